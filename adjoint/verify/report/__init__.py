"""The reports of a run: the summary of its rows, the table of verdicts, and pages of HTML."""
