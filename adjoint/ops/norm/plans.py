"""Which kernel serves which norm, and what it guarantees."""

from pathlib import Path

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.launch import imported
from adjoint.core.plan import Candidate, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem, short, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.ops.norm import eager
from adjoint.ops.norm.arguments import GATED, L2, RESIDUAL, RMS, Norm, by_name
from adjoint.ops.norm.bounds import Bounds, L2Bounds

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

WIDEST_BYTES, WIDEST_GATED_BYTES = 32_768, 8_192
"""The widest row, padded to a power of two, of which one program has all elements: without and with a gate."""

MAX_ROWS = 2**31 - 2**16
"""Rows that the kernels' integers count."""

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
    blocks, tiles = blocks_of(size, rows), -(-rows >> row_levels(size))
    return -(-tiles // blocks) + row_levels(size) + RUN_LEVELS + -(-blocks >> RUN_LEVELS)


DOMAIN = (
    "rows whose mean of squares plus ε (of l2_norm, sum of squares plus ε) and products with dy stay within 2^±100 "
    "(float64: 2^±1000), with a residual those whose sums with it have a place in their type; else the bound of what "
    "they reach is infinite"
)
_ROW = "a NaN in a row of x makes all of it NaN"
_SPECIAL_ROW = f"{_ROW}; an infinity gives NaN where it stands and 0 elsewhere"
SPECIAL_VALUES = {
    "s": "an IEEE sum",
    "y": _SPECIAL_ROW,
    "dx": "a NaN or an infinity in a row of x makes all of it NaN, and so does a NaN in its gradient",
    "dweight": f"{_ROW}; an infinity gives NaN in its column",
    "dgate": f"{_SPECIAL_ROW}; silu'(−∞) = −0 and silu'(+∞) = 1 before the product",
}
"""What infinities and NaN give. With a residual, its sum with x is the row."""
_OF_GATES = "; silu(−∞) = −0 and silu(+∞) = +∞ before the product"
ORDER_OF_ROWS = (
    "; its order is fixed by the number of rows, the width and the dtype: other rows in the batch change its bits"
)
ERRORS = {
    "s": "u·|s|",
    "y": "(L/2 + 8 + silu)·u·|y|",
    "dx": "(3L + 26 + 2·silu)·u·r·(|d·w| + |z|·mean|d·w·z|)",
    "dweight": "(K + L/2 + 8 + silu)·u·Σ|d·z|",
    "dgate": "(L/2 + 10 + slope)·u·|dy·z·w|·(σ + |gate|·σ·(1 − σ))",
}
L2_ERRORS = {"y": "(L/2 + 10)·u·|y|", "dx": "(3L + 32)·u·r·(|dy| + |y|·Σ|y·dy|)"}


def _guarantee(norm: Norm, direction: str, on_kernels: bool, problem: Problem) -> dict[str, Guarantee]:
    """What each output of an operator promises; of torch's own sums, any order is allowed for."""
    (size, rows), arithmetic = problem.sizes, wide_dtype(problem.dtypes[0]) if on_kernels else torch.float64
    levels, chain = (padded(size).bit_length() - 1, chain_of(size, rows)) if on_kernels else (size, rows)
    bounds = (Bounds if norm.weight else L2Bounds)(norm, problem, arithmetic, levels, chain)
    if direction == "forward":
        outputs, read = ("y", *("s",) * norm.residual), by_name(*norm.inputs)
    else:
        outputs, read = tuple(f"d{x}" for x in norm.inputs), by_name(*norm.upstream, *norm.inputs)

    def error(name: str) -> Derived:
        def bound(*tensors: Tensor) -> Tensor:
            of = read(tensors)
            of = of if of.residual is None else of._replace(x=of.x + of.residual)
            return getattr(bounds, name)(of)  # type: ignore[no-any-return]

        words = (ERRORS if norm.weight else L2_ERRORS)["dx" if name == "dresidual" else name]
        rounded = ", s rounded" if norm.residual and name != "s" else ""
        return Derived(f"½ ulp + {words}{rounded}: docs/norm.md", bound)

    return {
        name: Guarantee(
            repeatable=True,
            batch_invariant="row" if on_kernels and name != "dweight" else "",
            device_invariant=False,
            accumulator=short(arithmetic),
            roundings=1 + (bounds.rounded and name != "dx") + (norm.residual and name != "s"),
            error=error(name),
            domain=DOMAIN + (ORDER_OF_ROWS if on_kernels and name == "dweight" else ""),
            special_values=_special_values(norm, name),
        )
        for name in outputs
    }


def _special_values(norm: Norm, name: str) -> str:
    words = SPECIAL_VALUES["dx" if name == "dresidual" else name]
    if norm.residual and name != "s":
        words = words.replace("a row of x", "a row of s")
    return words + (_OF_GATES if name == "y" and "gate" in norm.inputs else "")


def _candidates(norm: Norm, direction: str) -> tuple[Candidate, Candidate]:
    """The candidates of an operator, best first."""
    kernel = f"{'rms' if norm.weight else 'l2'}_norm_{direction}"
    module = "adjoint.ops.norm.kernels" if norm.weight else "adjoint.ops.norm.l2_norm.kernels"
    keywords = {"norm": norm} if norm.weight else {}
    compute = eager.forward if direction == "forward" else eager.backward

    def refuse(problem: Problem) -> str:
        size, rows = problem.sizes
        most = WIDEST_GATED_BYTES if norm.gate else WIDEST_BYTES
        needed = padded(size) * problem.dtypes[0].itemsize
        if size == 0:
            return "has rows of at least one column"
        if needed > most:
            return f"has rows of up to {most} bytes, padded to a power of two; these have {needed}"
        return f"numbers up to {MAX_ROWS} rows, these are {rows}" if rows > MAX_ROWS else ""

    def entry(problem: Problem) -> str:
        width = str(max(128, padded(problem.sizes[0])))
        return f"{kernel} {'float64' if problem.dtypes[0] == torch.float64 else width}"

    on_kernels = Candidate(
        name="triton.rows",
        backend="triton",
        kernel=kernel,
        revision=1,
        refuse=refuse,
        guarantee=lambda problem: _guarantee(norm, direction, True, problem),
        setup=imported(f"{module}:{direction}", **keywords),
        schedules=_SCHEDULES,
        entry=entry,
    )
    run = allocating_outputs(lambda plan, arguments, outputs, _: compute(norm, arguments, outputs), many_calls=True)
    return on_kernels, in_pytorch("eager", lambda problem: _guarantee(norm, direction, False, problem), run)


RMS_NORM, RMS_NORM_BACKWARD = _candidates(RMS, "forward"), _candidates(RMS, "backward")
RESIDUAL_NORM, RESIDUAL_NORM_BACKWARD = _candidates(RESIDUAL, "forward"), _candidates(RESIDUAL, "backward")
GATED_NORM, GATED_NORM_BACKWARD = _candidates(GATED, "forward"), _candidates(GATED, "backward")
L2_NORM, L2_NORM_BACKWARD = _candidates(L2, "forward"), _candidates(L2, "backward")
