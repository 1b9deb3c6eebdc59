"""What an op says so that tests, `verify`, `bench` and docs can exercise it: cases, mistakes, bad calls, workloads."""
