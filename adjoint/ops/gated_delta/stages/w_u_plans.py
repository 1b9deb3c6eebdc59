"""Which kernels serve `recompute_w_u`, and what they guarantee.

They come before the plans in plain PyTorch, for all types but float64.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.candidates import writing
from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.kernels import why_not_on_nvidia
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules
from adjoint.ops.gated_delta.arguments import state_dtype
from adjoint.ops.gated_delta.stages import plans as stage_plans
from adjoint.ops.gated_delta.stages.plans import Magnitudes, smallest, stored

SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

INPUTS = ("k", "v", "beta", "G", "T")
UPSTREAM = ("dw", "du")

PARTS = 2
"""bfloat16 numbers whose sum stands for a number of T in float32, beside keys and values in bfloat16, whose own
rounding is 2⁸ times coarser. Part of the bits."""

TF32 = 1
"""The mode of a product in which every float32 is the sum of two TF32 numbers."""


def parts_of(element: torch.dtype, T: torch.dtype) -> int:
    """How a product with T is computed, as `w_u_kernels.times` counts."""
    if T == element != torch.float32:
        return 0
    return PARTS if element == torch.bfloat16 else TF32


def launcher() -> Any:
    """The module that imports Triton, on first use."""
    return import_module("adjoint.ops.gated_delta.stages.w_u_launch")


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
    return why_not_on_nvidia(problem.device)


# ------------------------------------------------------------------------------------------- guarantee

U = 2.0**-24
_FLUSHED = 2.0**-125
"""What an exponential, or a part of T, that underflows may have been."""

_T = {
    0: "T as it is given",
    1: "float32 numbers as the sums of two TF32 numbers, 2⁻¹⁹ of each product",
    2: "T as the sum of two bfloat16 numbers, 2⁻¹⁷ of it",
}


def _share(parts: int, terms: int) -> float:
    """The error of a product of matrices, of the sum of its terms' magnitudes.

    Matrix instructions cut what they add where others round, so an addition costs 2·u.
    """
    steps = max(1, parts) * terms + 16
    return 2 * U * steps / (1 - 2 * U * steps) + {0: 0.0, 1: 2.0**-19, 2: 2.0**-17}[parts]


def _decayed(m: Magnitudes) -> Tensor:
    """The error of β·e^G·k before it is rounded, of itself: an exponential costs 3·|G|·u + 5·u."""
    return U * (3 * m.exponent + 8)


def _forward_bounds(problem: Problem) -> dict[str, Callable[..., Tensor]]:
    element, T = problem.dtypes[:2]
    chunk = problem.sizes[2]
    share = _share(parts_of(element, T), chunk)
    rounding = torch.finfo(element).eps / 2 if element != torch.float32 else 0.0

    def of(operand: Callable[[Magnitudes], tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
        def bound(*inputs: Any) -> Tensor:
            m = Magnitudes(*inputs)
            values, unscaled = operand(m)
            own = values * (share + (rounding + _decayed(m)) * (1 + share)) + smallest(element) + unscaled * _FLUSHED
            magnitude = m.tokens(m.T @ values)
            lost = m.tokens(m.T @ own + values.sum(-2, keepdim=True) * _FLUSHED)
            return stored(lost, magnitude, chunk, element, torch.float32)

        return bound

    return {
        "w": of(lambda m: (m.beta * m.from_start * m.k, m.beta * m.k)),
        "u": of(lambda m: (m.beta * m.v, m.beta * m.v)),
    }


def _backward_bounds(problem: Problem) -> dict[str, Callable[..., Tensor]]:
    element, T_dtype = problem.dtypes[:2]
    K, V, chunk = problem.sizes[:3]
    parts, plain = parts_of(element, T_dtype), parts_of(element, element)
    kinds = {"dk": element, "dv": element, "dbeta": torch.float32, "dG": torch.float32, "dT": T_dtype}

    def of(name: str) -> Callable[..., Tensor]:
        def bound(dw: Tensor, du: Tensor, *inputs: Any) -> Tensor:
            m = Magnitudes(*inputs)
            dw, du = m.gather(dw), m.gather(du)
            products, sums = _share(parts, chunk + m.repeat), _share(plain, K + V + chunk)
            if name in ("dk", "dv"):
                through = m.T.mT @ (dw if name == "dk" else du)
                factor = m.beta * m.from_start if name == "dk" else m.beta
                terms = through * factor
                lost = terms * (products + _decayed(m)) + m.beta * through * _FLUSHED
                if name == "dk":
                    terms, lost = (x.unflatten(1, (-1, m.repeat)).sum(2) for x in (terms, lost))
            elif name == "dT":
                P, Q = dw @ m.k.mT, du @ m.v.mT
                terms = (P * m.from_start.mT + Q) * m.beta.mT
                lost = terms * (sums + _decayed(m).mT) + P * m.beta.mT * _FLUSHED
            else:
                of_keys = (m.T * (dw @ m.k.mT)).sum(-2)[..., None]
                of_values = (m.T * (du @ m.v.mT)).sum(-2)[..., None]
                by = m.beta if name == "dG" else torch.ones_like(m.beta)
                terms = of_keys * m.from_start * by + (0.0 if name == "dG" else of_values)
                lost = terms * (sums + _decayed(m)) + of_keys * by * _FLUSHED
                terms, lost = terms[..., 0], lost[..., 0]
            return stored(m.tokens(lost), m.tokens(terms), chunk + K + V, kinds[name], torch.float32)

        return bound

    return {name: of(name) for name in kinds}


_ROUNDED = {"w": 2, "u": 2, "dk": 1, "dv": 1, "dbeta": 0, "dG": 0, "dT": 1}
_ITEM = "chunk of a value head"


def _guarantee(problem: Problem) -> dict[str, Guarantee]:
    element, T = problem.dtypes[:2]
    backward = problem.op.endswith("_backward")
    formula = (
        "½ ulp + c·u·Σ|terms|, c twice the terms of a product and 3·|G| + 8 more"
        if backward
        else "½ ulp + (ρ + c·u)·Σ|terms|, ρ the rounding of β·e^G·k and β·v, c twice the terms of a product and "
        "3·|G| + 8 more"
    )
    bounds = (_backward_bounds if backward else _forward_bounds)(problem)
    kinds = dict.fromkeys(bounds, element) | {"dT": T}
    return {
        name: Guarantee(
            repeatable=True,
            batch_invariant=_ITEM if name != "dk" else "chunk of a key head",
            device_invariant=False,
            accumulator="float32",
            roundings=0 if kinds[name] == torch.float32 else _ROUNDED[name],
            error=Derived(f"{formula}, u = 2⁻²⁴; {_T[parts_of(element, T)]}", bound),
            domain="every finite input of which e^G is finite and T is below 2¹²⁷",
            out_of_range="cu_seqlens out of order is reported, at once on the CPU, by adjoint.check() on a GPU, and "
            "taken as what lies within bounds; tokens of no sequence give 0",
        )
        for name, bound in bounds.items()
    }


# ------------------------------------------------------------------------------------------ candidates


def _candidate(direction: str, narrow: bool) -> Candidate:
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
        guarantee=_guarantee,
        run=writing(lambda *a: getattr(launcher(), direction)(*a)),
        prepare=lambda plan: launcher().prepare(plan),
        numeric=numeric,
        schedules=SCHEDULES,
        workspace_bytes=lambda problem: launcher().regions(problem).bytes,
    )


RECOMPUTE_W_U = (_candidate("forward", False), _candidate("forward", True), *stage_plans.RECOMPUTE_W_U)
RECOMPUTE_W_U_BACKWARD = (
    _candidate("backward", False),
    _candidate("backward", True),
    *stage_plans.RECOMPUTE_W_U_BACKWARD,
)
