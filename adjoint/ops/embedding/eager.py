"""What the embeddings share in plain PyTorch: grouping by row."""

import torch
from torch import Tensor


def group(ids: Tensor, rows: int, padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions in order of their ids, where each id that occurs begins (and where the last ends), and the ids."""
    flat = ids.reshape(-1)
    counts = (flat >= 0) & (flat < rows) & (flat != padding)
    keys, positions = torch.where(counts, flat, rows).sort(stable=True)
    present, lengths = torch.unique_consecutive(keys, return_counts=True)
    starts = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    if len(present) and int(present[-1]) == rows:  # what is in no group comes last
        present, starts = present[:-1], starts[:-1]
    return positions, starts, present.long()
