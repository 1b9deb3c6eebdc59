"""What an op declares for tests, `verify`, `bench` and docs: cases, mistakes, bad calls, workloads."""
