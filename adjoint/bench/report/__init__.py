"""The reports of measurements: tables for a terminal and for Markdown, saved results, charts and pictures."""
