"""Ids that the embeddings are tested, verified and timed on."""

import torch
from torch import Tensor

from adjoint.contract.lookups import on_device

ROWS, COLUMNS = 6, 4
"""The sizes of the table in bad calls."""


def zero_table(device: torch.device | str, *shape: int) -> Tensor:
    return torch.zeros(shape or (ROWS, COLUMNS), device=device)


def few_ids(device: torch.device | str, *values: int) -> Tensor:
    return torch.tensor(values or (1, 5, 1), device=device)


def hot_ids(generator: torch.Generator, rows: int, count: int, hot: int) -> Tensor:
    """Random ids in random order; `hot` of them are the same row."""
    ids = torch.randint(rows, (count,), generator=generator)
    ids[torch.randperm(count, generator=generator)[:hot]] = rows // 2
    return ids


def bytes_looked_up(ids: Tensor, weight: Tensor, results: int) -> int:
    """The fewest bytes that a forward must move: it reads each row that occurs once, and writes `results` rows."""
    return (len(ids.unique()) + results) * weight.shape[1] * weight.element_size()


def device_lookup(
    kind: str, rows: int, columns: int, count: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Ids, and a table of normal values that are drawn on the device.

    The ids are uniform, zipf (with the rows in random order of frequency), or half or all of them are one row.
    """
    names = torch.randperm(rows, generator=generator)
    if kind == "zipf":
        weights = 1 / torch.arange(1, rows + 1, dtype=torch.float64)
        ids = names[torch.multinomial(weights, count, replacement=True, generator=generator)]
    else:
        ids = torch.randint(rows, (count,), generator=generator)
        hot = {"uniform": 0, "half one token": count // 2, "all one token": count}[kind]
        ids[torch.randperm(count, generator=generator)[:hot]] = names[0]
    table = torch.randn(rows, columns, dtype=dtype, device=device, generator=on_device(device, generator))
    return ids.to(device), table
