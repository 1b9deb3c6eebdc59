"""Which kernel serves which norm, and what it guarantees."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core.candidates import in_pytorch, writing
from adjoint.core.guarantee import Guarantee
from adjoint.core.launch import Execute, Setup
from adjoint.core.plan import Candidate, Plan
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules
from adjoint.device.sums import wide
from adjoint.ops.norm import eager
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
    return (max(1, min(16, 2048 // padded(size)))).bit_length() - 1


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


# ------------------------------------------------------------------------------------------------- views


class Forward(NamedTuple):
    """The arguments of a forward, as kernels and plain PyTorch take them alike."""

    x: Tensor
    weight: Tensor
    residual: Tensor | None
    gate: Tensor | None
    eps: float
    offset: float = 0.0
    round_before_gate: bool = False


class Backward(NamedTuple):
    """The arguments and outputs of a backward; of gradients that are not needed, the outputs are empty."""

    dy: Tensor | None
    ds: Tensor | None
    x: Tensor
    weight: Tensor
    gate: Tensor | None
    eps: float
    offset: float
    round_before_gate: bool
    dx: Tensor
    dgate: Tensor
    dweight: Tensor


class Views(NamedTuple):
    """How one op's arguments and outputs map to those above, and `need` to whether x, gate and weight need gradients."""

    forward: Callable[..., Forward]
    backward: Callable[[tuple[Any, ...], tuple[Tensor, ...]], Backward]
    needs: Callable[[int], tuple[bool, bool, bool]]


RMS_NORM_VIEWS = Views(
    lambda x, weight, eps, offset: Forward(x, weight, None, None, eps, offset),
    lambda a, out: Backward(a[0], None, a[1], a[2], None, a[3], a[4], False, out[0], out[0], out[1]),
    lambda need: (bool(need & 1), False, bool(need & 2)),
)
RESIDUAL_VIEWS = Views(
    lambda x, weight, residual, eps, offset: Forward(x, weight, residual, None, eps, offset),
    lambda a, out: Backward(a[0], a[1], a[2], a[3], None, a[4], a[5], False, out[0], out[0], out[1]),
    lambda need: (bool(need & 5), False, bool(need & 2)),  # x and residual have the same gradient
)
GATED_VIEWS = Views(
    lambda x, gate, weight, eps, rounded: Forward(x, weight, None, gate, eps, 0.0, rounded),
    lambda a, out: Backward(a[0], None, a[1], a[3], a[2], a[4], 0.0, a[5], *out),
    lambda need: (bool(need & 1), bool(need & 2), bool(need & 4)),
)

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


def _bounds(problem: Problem, backend: str) -> Bounds:
    """The bounds of a problem; of torch's own sums, any order is allowed for."""
    element, weight = (*problem.dtypes, problem.dtypes[0])[:2]
    (size, rows), (eps, *more) = problem.sizes, problem.options
    gated, on_kernels = problem.op.startswith("gated"), backend == "triton"
    return Bounds(
        element, weight, wide(element) if on_kernels else torch.float64, eps,
        0.0 if gated or problem.op.startswith("l2") else more[0],
        levels=padded(size).bit_length() - 1 if on_kernels else size, chain=chain_of(size, rows) if on_kernels else rows,
        rounded=gated and more[0], residual="residual" in problem.op,
    )  # fmt: skip


def guarantee(backend: str, problem: Problem) -> dict[str, Guarantee]:
    """What each output of an operator promises."""
    b, op = _bounds(problem, backend), problem.op
    y, dx = "(L/2 + 8 + silu)·u·|y|", "(3L + 26 + 2·silu)·u·r·(|u·w| + |z|·mean|u·w·z|)"
    dweight, dgate = "(K + L/2 + 8 + silu)·u·Σ|u·z|", "(L/2 + 10 + slope)·u·|dy·z·w|·(σ + |gate|·σ·(1 − σ))"
    stated = {
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
    }[op]
    return {
        name: Guarantee(
            repeatable=True,
            batch_invariant="row" if backend == "triton" and name != "dweight" else "",
            device_invariant=False,
            accumulator=str(b.arithmetic).removeprefix("torch."),
            roundings=1 + (name in ("y", "dweight", "dgate") and b.rounded) + (b.residual and name != "s"),
            error=derived(words, bound),
            domain=DOMAIN + (ORDER_OF_ROWS if name == "dweight" and backend == "triton" else ""),
            special_values=SPECIAL_VALUES,
        )
        for name, (words, bound) in stated.items()
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


def _on_kernels(kernel: str, setup: Callable[[Setup], Execute]) -> Candidate:
    return Candidate(
        name="triton.rows",
        backend="triton",
        kernel=kernel,
        revision=1,
        refuse=_refuse,
        guarantee=lambda problem: guarantee("triton", problem),
        setup=setup,
        schedules=_SCHEDULES,
        entry=lambda problem: f"{kernel} {_width(problem)}",
    )


def _width(problem: Problem) -> str:
    """What schedules are listed by."""
    if problem.dtypes[0] == torch.float64:
        return "float64"
    return str(max(128, padded(problem.sizes[0])))


def _in_plain_pytorch(compute: Callable[[tuple[Any, ...], tuple[Tensor, ...]], None]) -> Candidate:
    def run(_: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Any) -> None:
        compute(arguments, outputs)

    return in_pytorch("eager", lambda problem: guarantee("eager", problem), writing(run))


def _forward(views: Views) -> tuple[Candidate, ...]:
    def setup(setup: Setup) -> Execute:
        from adjoint.ops.norm import kernels

        return kernels.forward(setup, views)

    def compute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        view = views.forward(*arguments)
        eager.forward(*view, outputs[0], outputs[1] if view.residual is not None else None)

    return _on_kernels("rms_norm_forward", setup), _in_plain_pytorch(compute)


def _backward(views: Views) -> tuple[Candidate, ...]:
    def setup(setup: Setup) -> Execute:
        from adjoint.ops.norm import kernels

        return kernels.backward(setup, views)

    def compute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        *inputs, dx, dgate, dweight = views.backward(arguments, outputs)
        needs = zip(views.needs(arguments[-1]), (dx, dgate, dweight), strict=True)
        eager.backward(*inputs, *(gradient if needed else None for needed, gradient in needs))

    return _on_kernels("rms_norm_backward", setup), _in_plain_pytorch(compute)


RMS_NORM, RMS_NORM_BACKWARD = _forward(RMS_NORM_VIEWS), _backward(RMS_NORM_VIEWS)
RESIDUAL, RESIDUAL_BACKWARD = _forward(RESIDUAL_VIEWS), _backward(RESIDUAL_VIEWS)
GATED, GATED_BACKWARD = _forward(GATED_VIEWS), _backward(GATED_VIEWS)


def _l2(direction: str, compute: Callable[[tuple[Any, ...], tuple[Tensor, ...]], None]) -> tuple[Candidate, ...]:
    def setup(setup: Setup) -> Execute:
        from adjoint.ops.norm.l2_norm import kernels

        return kernels.forward(setup) if direction == "forward" else kernels.backward(setup)

    return _on_kernels(f"l2_norm_{direction}", setup), _in_plain_pytorch(compute)


L2_NORM = _l2("forward", lambda arguments, outputs: eager.l2_forward(*arguments, *outputs))
L2_NORM_BACKWARD = _l2("backward", lambda arguments, outputs: eager.l2_backward(*arguments, *outputs))
