"""What lets existing code use the operations by changing an import."""
