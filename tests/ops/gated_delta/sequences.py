"""Inputs and comparisons the family's tests share."""

from typing import Any

import torch
from torch import Tensor

from adjoint.contract.cases import Inputs
from adjoint.contract.inputs import differentiable, leaves, widened
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.promises import BACKWARD, FORWARD, empirical_error
from adjoint.ops.gated_delta.values import tokens

CPU = torch.device("cpu")

FORWARD_64, BACKWARD_64 = (
    empirical_error(torch.float64, torch.float64, ceiling).ceiling for ceiling in (FORWARD, BACKWARD)
)
"""The errors that float64 plans promise, of outputs and of gradients."""


def drawn(shape: tuple[int, int, int, int, int, int], dtype: torch.dtype = torch.float64, **options: Any) -> Inputs:
    """q, k, v, g, beta, initial states and bounds."""
    return tokens(shape, **options)(dtype, CPU, torch.Generator().manual_seed(1))


def by_recurrence(inputs: Inputs, by_chunks: bool = False, **options: Any) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Outputs, and the gradients of (o·c + final·c).sum() with c the cosine of the position."""
    exact_inputs = leaves(widened(inputs))
    outputs = reference.gated_delta_rule(*exact_inputs, by_chunks=by_chunks, **options)
    return outputs, gradients_of(outputs, exact_inputs)


def upstream_of(output: Tensor) -> Tensor:
    return torch.arange(output.numel(), dtype=torch.float64).cos().view(output.shape).to(output)


def gradients_of(outputs: tuple[Tensor, ...], inputs: Inputs) -> list[Tensor]:
    return list(torch.autograd.grad(outputs, differentiable(inputs), [upstream_of(o) for o in outputs]))


def relative(got: Tensor, exact: Tensor) -> float:
    """The norm of the error over that of the exact result, or over the smallest float32 where that underflows."""
    got, exact = got.detach().double(), exact.detach().double()
    return float((got - exact).norm() / exact.norm().clamp_min(1e-38))
