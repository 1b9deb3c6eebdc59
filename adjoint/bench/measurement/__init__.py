"""What is measured: the times of contenders that were checked, their errors, and the host cost of one call."""
