"""The checks: of values, of bits, of life inside PyTorch, of other forms of a call; and digests of results."""
