"""The kernels of `normalize` beyond the shared checks."""

import pytest
import torch

import adjoint
from adjoint import Preference

pytestmark = pytest.mark.kernels

TRITON = Preference(backend="triton")


def test_vectors_without_length(device: torch.device) -> None:
    """0 stays 0, and its gradient is dy / sqrt(1e-6)."""
    x = torch.zeros(3, 7, device=device, requires_grad=True)
    y = adjoint.gated_delta.normalize(x, preference=TRITON)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert not y.any()
    promised = adjoint.plan(adjoint.gated_delta.normalize, x.detach(), preference=TRITON).adjoint.guarantee["dx"]
    zero = torch.zeros(3, 7, device=device, dtype=torch.float64)
    measured = promised.error.measure(dx, torch.full_like(zero, 1e3), torch.ones_like(zero), zero)
    assert measured.holds, str(measured)
