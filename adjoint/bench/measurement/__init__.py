"""The measurements: the times of contenders whose results were checked, their errors, and the host cost of one call."""
