"""Tables and ids that the embeddings are tested, verified and timed on."""

import torch
from torch import Tensor


def normal_values(generator: torch.Generator, dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    """Normal values, the same on every device."""
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def hot_ids(generator: torch.Generator, rows: int, count: int, hot: int) -> Tensor:
    """Random ids, `hot` of which are one row, in random order."""
    ids = torch.randint(rows, (count,), generator=generator)
    ids[torch.randperm(count, generator=generator)[:hot]] = rows // 2
    return ids


def device_ids(kind: str, rows: int, count: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Uniform, zipf (rows in random order of frequency), or with half or all of the tokens one row."""
    names = torch.randperm(rows, generator=generator)
    if kind == "zipf":
        weights = 1 / torch.arange(1, rows + 1, dtype=torch.float64)
        return names[torch.multinomial(weights, count, replacement=True, generator=generator)].to(device)
    ids = torch.randint(rows, (count,), generator=generator)
    hot = {"uniform": 0, "half one token": count // 2, "all one token": count}[kind]
    ids[torch.randperm(count, generator=generator)[:hot]] = names[0]
    return ids.to(device)


def device_values(dtype: torch.dtype, device: torch.device, generator: torch.Generator, *shape: int) -> Tensor:
    """Normal values, made on the device."""
    of_device = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
    return torch.randn(shape, dtype=dtype, device=device, generator=of_device)
