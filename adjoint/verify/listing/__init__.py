"""Which checks run: all checks of a device, the fewest that cover every promise, and what they cover."""
