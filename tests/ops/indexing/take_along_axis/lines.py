"""Small tensors to take from, and what gradients must be, by a loop in plain Python."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import adjoint

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BACKENDS = ["eager", pytest.param("triton", marks=pytest.mark.kernels)]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def _adjoints(*names: str) -> pytest.MarkDecorator:
    """Every way to compute the gradient, as a preference names it."""
    kernels = (pytest.param(f"triton.take+triton.{name}", marks=pytest.mark.kernels, id=name) for name in names)
    return pytest.mark.parametrize("plan", [pytest.param("eager.take+eager.sorted", id="eager"), *kernels])


every_adjoint = _adjoints("few", "lines", "sorted")
every_adjoint_of_many = _adjoints("lines", "sorted")

TILE = 32


def normal(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(device)


def whole_numbers(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    """Values whose sums are exact, so that every order gives the same."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float().to(device)


def make_indices(*shape: int, length: int, device: torch.device, seed: int = 1) -> Tensor:
    return torch.randint(-length, length, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def gradient_of(x: Tensor, indices: Tensor, dout: Tensor, axis: int = -1, **options: Any) -> Tensor:
    x = x.detach().requires_grad_()
    (dx,) = torch.autograd.grad(adjoint.take_along_axis(x, indices, axis, **options), x, dout)
    return dx


def tree_sum(terms: list[Any], zero: Any) -> Any:
    """Tiles of 32 terms one after the other, tiles of tiles likewise."""
    while True:
        sums = []
        for begin in range(0, len(terms), TILE):
            total = zero
            for term in terms[begin : begin + TILE]:
                total = total + term
            sums.append(total)
        if len(sums) <= 1:
            return sums[0] if sums else zero
        terms = sums


def expected_gradient(dout: Tensor, indices: Tensor, length: int) -> Tensor:
    """The gradient of lines along the last axis, bit for bit, an element at a time."""
    wide = np.float64 if dout.dtype == torch.float64 else np.float32
    rows = dout.reshape(-1, dout.shape[-1]).to(torch.float64).cpu().numpy().astype(wide)
    chosen = indices.reshape(-1, indices.shape[-1]).tolist()
    result = np.zeros((len(rows), length), wide)
    for line, (row, places) in enumerate(zip(rows, chosen, strict=True)):
        terms_of: dict[int, list[Any]] = {}
        for term, index in zip(row, places, strict=True):
            if -length <= index < length:
                terms_of.setdefault(index % length, []).append(term)
        for element, terms in terms_of.items():
            result[line, element] = tree_sum(terms, wide(0))
    return torch.from_numpy(result).view(*dout.shape[:-1], length).to(dout.dtype).to(dout.device)
