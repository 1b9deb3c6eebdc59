"""Small lookups, and what their gradients must be."""

from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from tests.ops.embedding.sums import rows_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BACKENDS = ["eager", pytest.param("triton", marks=pytest.mark.kernels)]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

ROWS, COLUMNS = 11, 6


def normal(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(device)


def make_weight(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(ROWS, COLUMNS, device=device, dtype=dtype).requires_grad_()


def make_ids(*shape: int, device: torch.device, seed: int = 1) -> Tensor:
    return torch.randint(ROWS - 2, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def gradient_of(ids: Tensor, weight: Tensor, dout: Tensor, **options: Any) -> Tensor:
    (dweight,) = torch.autograd.grad(adjoint.embedding(ids, weight, **options), weight, dout)
    return dweight


def expected_rows(dout: Tensor, ids: Tensor) -> Tensor:
    return rows_of(dout, ids, ROWS).to(dout.dtype)
