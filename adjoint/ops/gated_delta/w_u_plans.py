"""Which kernels serve `recompute_w_u`, and what they guarantee: before the plans in plain PyTorch, for all but float64."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.candidates import writing
from adjoint.core.guarantee import Guarantee
from adjoint.core.kernels import why_not_triton
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules
from adjoint.ops.gated_delta import stage_plans
from adjoint.ops.gated_delta.arguments import state_dtype

SCHEDULES = Schedules(Path(__file__).with_name("stage_schedules.json"))

INPUTS = ("k", "v", "beta", "G", "T")
UPSTREAM = ("dw", "du")

PARTS = 3
"""bfloat16 numbers whose sum stands for a number of T in float32, beside keys and values in bfloat16: all of its 24
bits. Part of the bits."""

_TF32 = 1
"""The mode of a product in which every float32 is the sum of two TF32 numbers."""


def parts_of(element: torch.dtype, T: torch.dtype) -> int:
    """How a product with T is computed, as `w_u_kernels.times` counts."""
    if T == element != torch.float32:
        return 0
    return PARTS if element == torch.bfloat16 else _TF32


def launcher() -> Any:
    """The module that imports Triton, on first use."""
    return import_module("adjoint.ops.gated_delta.w_u_launch")


# ------------------------------------------------------------------------------------------- problems


MAX_STRIDE = 2**24
"""The largest distance between tokens, in elements, that is walked."""


def layout_of(**tensors: Tensor | None) -> str:
    """What is copied before a kernel reads it, in words: rows whose elements do not lie side by side, or that are too
    far apart for the 32 bits of an offset within a chunk."""

    def is_walked(tensor: Tensor) -> bool:
        near = tensor.stride(1) <= MAX_STRIDE or tensor.shape[1] == 1
        return near and (tensor.dim() < 4 or tensor.shape[3] == 1 or tensor.stride(3) == 1)

    copied = [
        name for name, tensor in tensors.items() if tensor is not None and tensor.numel() and not is_walked(tensor)
    ]
    return f"{', '.join(copied)} copied" if copied else ""


def copied_names(layout: str) -> list[str]:
    return [name for name in layout.removesuffix(" copied").split(", ") if name]


def sizes_of(k: Tensor, v: Tensor, T: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    """K, V, chunk; then what workspaces and grids need: rows, tokens, heads, bounds of sequences."""
    bounds = 0 if cu_seqlens is None else cu_seqlens.shape[0]
    return (k.shape[3], v.shape[3], T.shape[3], *k.shape[:3], v.shape[2], bounds)


MAX_TOKENS = 2**31 - 2**16
"""Tokens, and bounds of sequences, that the kernels' integers count."""


def _refuse(problem: Problem, narrow: bool) -> str:
    element, T = problem.dtypes[:2]
    if element == torch.float64:
        return "computes in float32; float64 is eager alone"
    if narrow != (state_dtype(element) != T):
        return "reads T in the 16 bits of k" if narrow else "reads T in the type it is solved in"
    _, _, chunk, batch, time, _, heads, bounds = problem.sizes
    programs = (batch * time // chunk + batch + bounds + 2) * max(1, heads)
    if programs > MAX_TOKENS:
        return f"numbers up to {MAX_TOKENS} chunks of heads, these are {programs}"
    return why_not_triton(problem.device)


# ------------------------------------------------------------------------------------------ candidates


def _candidate(direction: str, narrow: bool, guarantee: Callable[[Problem], dict[str, Guarantee]]) -> Candidate:
    kernel = "gated_delta_w_u_backward" if direction == "backward" else "gated_delta_w_u"

    def numeric(problem: Problem) -> dict[str, Any]:
        element, T = problem.dtypes[:2]
        return {"chunk": problem.sizes[2], "T": str(T).removeprefix("torch."), "parts": parts_of(element, T)}

    return Candidate(
        name="triton.narrow_T" if narrow else "triton.solved_T",
        backend="triton",
        kernel=kernel,
        revision=1,
        refuse=lambda problem: _refuse(problem, narrow),
        guarantee=guarantee,
        run=writing(lambda *a: getattr(launcher(), direction)(*a)),
        prepare=lambda plan: launcher().prepare(plan),
        numeric=numeric,
        schedules=SCHEDULES,
        workspace_bytes=lambda problem: launcher().regions(problem).bytes,
    )


RECOMPUTE_W_U = (
    *(_candidate("forward", narrow, stage_plans.w_u_guarantee_of_kernels) for narrow in (False, True)),
    *stage_plans.RECOMPUTE_W_U,
)
RECOMPUTE_W_U_BACKWARD = (
    *(_candidate("backward", narrow, stage_plans.w_u_backward_guarantee_of_kernels) for narrow in (False, True)),
    *stage_plans.RECOMPUTE_W_U_BACKWARD,
)
