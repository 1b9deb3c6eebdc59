"""The text of a run: files, tokens, and the order in which steps read them."""
