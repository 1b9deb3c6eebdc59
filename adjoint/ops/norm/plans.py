"""Which kernel serves which norm, and what it guarantees."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Guarantee
from adjoint.core.launch import Execute, Setup
from adjoint.core.plan import Candidate, Plan, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.ops.norm import eager
from adjoint.ops.norm.arguments import Backward, Forward
from adjoint.ops.norm.bounds import Bounds, derived

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

WIDEST_BYTES, WIDEST_GATED_BYTES = 32_768, 8_192
"""The widest row, padded to a power of two, of which one program has all elements: without and with a gate."""

MAX_ROWS = 2**31 - 2**16
"""Rows that the kernels' integers count."""

# ----------------------------------------------------------------------------- what fixes the order of dweight

RUN_LEVELS = 9
"""Blocks of rows whose sums are added by halves: 512."""


def padded(size: int) -> int:
    """The columns of a row, padded to a power of two."""
    return 1 << max(0, size - 1).bit_length()


def row_levels(size: int) -> int:
    """2^row_levels rows are a tile of a backward."""
    rows = min(16, 2048 // padded(size))
    return rows.bit_length() - 1 if rows > 2 else 0  # a tile of two rows does not keep its bits under other schedules


def most_blocks(size: int) -> int:
    """The blocks that rows are shared out among, at most."""
    columns = padded(size)
    return 660 if columns <= 256 else 512 if columns <= 2048 else 256 if columns == 4096 else 132


def blocks_of(size: int, rows: int) -> int:
    return max(1, min(most_blocks(size), -(-rows >> row_levels(size))))


def chain_of(size: int, rows: int) -> int:
    """The longest chain of additions that a term of dweight goes through."""
    blocks = blocks_of(size, rows)
    tiles = -(-rows >> row_levels(size))
    return -(-tiles // blocks) + row_levels(size) + RUN_LEVELS + -(-blocks >> RUN_LEVELS)


# ------------------------------------------------------------------------------------------- guarantees

DOMAIN = (
    "rows whose mean of squares plus ε (of l2_norm, sum of squares plus ε) and products with dy stay within 2^±100 "
    "(float64: 2^±1000)"
)
SPECIAL_VALUES = (
    "a NaN in a row makes all of it NaN; an infinity gives NaN where it stands and 0 elsewhere; "
    "silu(−∞) = −0 and silu(+∞) = +∞ before the product"
)
ORDER_OF_ROWS = (
    "; its order is fixed by the number of rows, the width and the dtype: other rows in the batch change its bits"
)


def _bounds(problem: Problem, on_kernels: bool) -> Bounds:
    """The bounds of a problem; of torch's own sums, any order is allowed for."""
    element, weight = (*problem.dtypes, problem.dtypes[0])[:2]
    (size, rows), (eps, *more) = problem.sizes, problem.options
    return Bounds(
        element,
        weight,
        wide_dtype(element) if on_kernels else torch.float64,
        eps,
        more[0] if problem.op.startswith("rms") else 0.0,
        levels=padded(size).bit_length() - 1 if on_kernels else size,
        chain=chain_of(size, rows) if on_kernels else rows,
        rounded=problem.op.startswith("gated") and more[0],
        residual="residual" in problem.op,
    )


def guarantee(backend: str, problem: Problem) -> dict[str, Guarantee]:
    """What each output of an operator promises."""
    on_kernels = backend == "triton"
    b = _bounds(problem, on_kernels)
    y, dx = "(L/2 + 8 + silu)·u·|y|", "(3L + 26 + 2·silu)·u·r·(|u·w| + |z|·mean|u·w·z|)"
    dweight, dgate = "(K + L/2 + 8 + silu)·u·Σ|u·z|", "(L/2 + 10 + slope)·u·|dy·z·w|·(σ + |gate|·σ·(1 − σ))"
    by_operator: dict[str, dict[str, tuple[str, Callable[..., Tensor]]]] = {
        "rms_norm": {"y": (y, lambda x, w: b.y(x, w))},
        "rms_norm_residual": {"y": (f"{y}, s rounded", b.y), "s": ("u·|s|", b.s)},
        "gated_rms_norm": {"y": (y, lambda x, gate, w: b.y(x, w, gate=gate))},
        "l2_norm": {"y": ("(L/2 + 10)·u·|y|", b.l2_y)},
        "rms_norm_backward": {
            "dx": (dx, lambda dy, x, w: b.dx(dy, None, x, w)),
            "dweight": (dweight, lambda dy, x, w: b.dweight(dy, x)),
        },
        "rms_norm_residual_backward": {
            "dx": (f"{dx}, s rounded", lambda dy, ds, x, w, residual: b.dx(dy, ds, x + residual, w)),
            "dweight": (f"{dweight}, s rounded", lambda dy, ds, x, w, residual: b.dweight(dy, x + residual)),
            "dresidual": (f"{dx}, s rounded", lambda dy, ds, x, w, residual: b.dx(dy, ds, x + residual, w)),
        },
        "gated_rms_norm_backward": {
            "dx": (dx, lambda dy, x, gate, w: b.dx(dy, None, x, w, gate)),
            "dgate": (dgate, lambda dy, x, gate, w: b.dgate(dy, x, gate, w)),
            "dweight": (dweight, lambda dy, x, gate, w: b.dweight(dy, x, gate)),
        },
        "l2_norm_backward": {"dx": ("(3L + 32)·u·r·(|dy| + |y|·Σ|y·dy|)", b.l2_dx)},
    }
    return {
        name: Guarantee(
            repeatable=True,
            batch_invariant="row" if on_kernels and name != "dweight" else "",
            device_invariant=False,
            accumulator=str(b.arithmetic).removeprefix("torch."),
            roundings=1 + (name in ("y", "dweight", "dgate") and b.rounded) + (b.residual and name != "s"),
            error=derived(words, bound),
            domain=DOMAIN + (ORDER_OF_ROWS if on_kernels and name == "dweight" else ""),
            special_values=SPECIAL_VALUES,
        )
        for name, (words, bound) in by_operator[problem.op].items()
    }


# ------------------------------------------------------------------------------------------ candidates


def _refuse(problem: Problem) -> str:
    size, rows = problem.sizes
    most = WIDEST_GATED_BYTES if problem.op.startswith("gated") else WIDEST_BYTES
    needed = padded(size) * problem.dtypes[0].itemsize
    if size == 0:
        return "has rows of at least one column"
    if needed > most:
        return f"has rows of up to {most} bytes, padded to a power of two; these have {needed}"
    return f"numbers up to {MAX_ROWS} rows, these are {rows}" if rows > MAX_ROWS else ""


def _width(problem: Problem) -> str:
    """What schedules are listed by."""
    if problem.dtypes[0] == torch.float64:
        return "float64"
    return str(max(128, padded(problem.sizes[0])))


def _candidates(
    kernel: str, launch: Callable[[Setup], Execute], compute: Callable[[str, tuple[Any, ...], tuple[Tensor, ...]], None]
) -> tuple[Candidate, ...]:
    """The candidates of an operator, best first."""

    def run(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Any) -> None:
        compute(plan.operator.name, arguments, outputs)

    on_kernels = Candidate(
        name="triton.rows",
        backend="triton",
        kernel=kernel,
        revision=1,
        refuse=_refuse,
        guarantee=lambda problem: guarantee("triton", problem),
        setup=launch,
        schedules=_SCHEDULES,
        entry=lambda problem: f"{kernel} {_width(problem)}",
    )
    return on_kernels, in_pytorch("eager", lambda problem: guarantee("eager", problem), allocating_outputs(run))


def _setup(module: str, direction: str) -> Callable[[Setup], Execute]:
    """A direction's setup, from a module that imports Triton."""
    return lambda setup: getattr(import_module(module), direction)(setup)


def _backward_in_pytorch(op: str, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    eager.backward(Backward.of(op, arguments), outputs[0], outputs[1], outputs[-1])


_RMS, _L2 = "adjoint.ops.norm.kernels", "adjoint.ops.norm.l2_norm.kernels"

RMS_NORM = _candidates(
    "rms_norm_forward", _setup(_RMS, "forward"), lambda op, a, out: eager.forward(Forward.of(op, a), out)
)
RMS_NORM_BACKWARD = _candidates("rms_norm_backward", _setup(_RMS, "backward"), _backward_in_pytorch)
"""With a residual and with a gate, too."""

L2_NORM = _candidates("l2_norm_forward", _setup(_L2, "forward"), lambda op, a, out: eager.l2_forward(*a, *out))
L2_NORM_BACKWARD = _candidates(
    "l2_norm_backward", _setup(_L2, "backward"), lambda op, a, out: eager.l2_backward(*a, *out)
)
