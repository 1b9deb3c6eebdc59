"""Which checks run: all that there are for a device, the fewest that hold every promise, and what they cover."""
