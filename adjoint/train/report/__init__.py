"""What a run reports: its progress, its numbers and its curve."""
