"""Which code serves `recompute_w_u`: kernels before plain PyTorch, for all types but float64."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Guarantee
from adjoint.core.kernels import NVIDIA
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.ops.gated_delta.promises import Compute, eager_candidate
from adjoint.ops.gated_delta.stages import copies
from adjoint.ops.gated_delta.stages.w_u import eager, guarantee
from adjoint.ops.gated_delta.stages.w_u.parts import parts_of

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

MAX_STRIDE = 2**24
"""The largest distance between tokens, in elements, that kernels read."""


def layout_of(**tensors: Tensor | None) -> str:
    """What is copied before a kernel reads it, in words: rows whose elements do not lie side by side, or that are too
    far apart for the 32 bits of an offset within a chunk."""

    def is_readable(tensor: Tensor) -> bool:
        near = tensor.stride(1) <= MAX_STRIDE or tensor.shape[1] == 1
        return near and (tensor.dim() < 4 or tensor.shape[3] == 1 or tensor.stride(3) == 1)

    copied = [
        name for name, tensor in tensors.items() if tensor is not None and tensor.numel() and not is_readable(tensor)
    ]
    return copies.layout_of(copied)


def sizes_of(k: Tensor, v: Tensor, T: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    """K, V, chunk; then what workspaces and grids need: rows, tokens, heads, bounds of sequences."""
    bounds = 0 if cu_seqlens is None else cu_seqlens.shape[0]
    return (k.shape[3], v.shape[3], T.shape[3], *k.shape[:3], v.shape[2], bounds)


MAX_TOKENS = 2**31 - 2**16
"""Tokens, and bounds of sequences, that the kernels' integers count."""


# ------------------------------------------------------------------------------------------ candidates


def _refuse_T(problem: Problem, narrow: bool) -> str:
    """One plan is for T as it is solved, one for T in the 16 bits of k: they read different numbers."""
    element, T = problem.dtypes
    if narrow == (wide_dtype(element) != T):
        return ""
    return "reads T in the 16 bits of k" if narrow else "reads T in the type it is solved in"


def _refuse(problem: Problem, narrow: bool) -> str:
    if problem.dtypes[0] == torch.float64:
        return "computes in float32; float64 is eager alone"
    if reason := _refuse_T(problem, narrow):
        return reason
    _, _, chunk, batch, time, _, heads, bounds = problem.sizes
    programs = (batch * time // chunk + batch + bounds + 2) * max(1, heads)
    return f"numbers up to {MAX_TOKENS} chunks of heads, these are {programs}" if programs > MAX_TOKENS else ""


def _kernels() -> Any:
    """The module that imports Triton, on first use."""
    return import_module("adjoint.ops.gated_delta.stages.w_u.kernels")


_PRODUCTS = ("16_bit", "tf32", "two_parts")
"""How a product with T is computed, as `parts_of` counts: what schedules are for."""


def _on_kernels(kernel: str, direction: str, narrow: bool) -> Candidate:
    return Candidate(
        name="triton.narrow_T" if narrow else "triton.solved_T",
        backend="triton",
        kernel=kernel,
        revision=1,
        refuse=lambda problem: _refuse(problem, narrow),
        guarantee=guarantee.on_kernels,
        setup=lambda setup: getattr(_kernels(), direction)(setup),
        targets=NVIDIA,
        schedules=_SCHEDULES,
        entry=lambda problem: f"{kernel}_{_PRODUCTS[parts_of(*problem.dtypes)]}",
    )


def _in_pytorch(promises: Callable[[Problem], dict[str, Guarantee]], compute: Compute, narrow: bool) -> Candidate:
    def numeric(problem: Problem) -> dict[str, Any]:
        return {"chunk": problem.sizes[2], "T": str(problem.dtypes[1]).removeprefix("torch.")}

    candidate = eager_candidate("eager.narrow_T" if narrow else "eager.solved_T", promises, compute, numeric)
    return replace(candidate, refuse=lambda problem: _refuse_T(problem, narrow))


def _compute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    eager.forward(*arguments, *outputs)


def _compute_backward(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    eager.backward(*(*arguments, outputs))


_EITHER = (False, True)

RECOMPUTE_W_U = (
    *(_on_kernels("gated_delta_w_u", "forward", narrow) for narrow in _EITHER),
    *(_in_pytorch(guarantee.in_pytorch, _compute, narrow) for narrow in _EITHER),
)
RECOMPUTE_W_U_BACKWARD = (
    *(_on_kernels("gated_delta_w_u_backward", "backward", narrow) for narrow in _EITHER),
    *(_in_pytorch(guarantee.backward_in_pytorch, _compute_backward, narrow) for narrow in _EITHER),
)
