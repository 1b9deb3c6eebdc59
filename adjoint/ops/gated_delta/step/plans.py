"""Which code serves which decoding step, and what it guarantees."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.launch import imported
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules
from adjoint.ops.gated_delta.promises import CHECKED, RESETS, Promises, eager_candidate, promise
from adjoint.ops.gated_delta.step import eager
from adjoint.ops.gated_delta.step.bounds import AXES, FORMULA, StepBounds

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

_CASES = "the family's cases: rows of their own, paged, several tokens, resets"

CEILING = 2e-6
"""The ceiling for results in float32: several times the errors of the cases."""

_OUT_OF_RANGE = (
    "g above 0 and state_indices out of range are reported: at once on the CPU, by adjoint.check() on a GPU, where g "
    f"is then taken as it is, and the row is skipped; {CHECKED}"
)
_SPECIAL_VALUES = (
    f"{RESETS}; any other NaN or infinity of a token reaches its own row and heads alone, and no token before its own; "
    "one of a state its head in the rows that read it"
)
_SPECIAL_GRADIENTS = (
    f"{RESETS}; any other NaN or infinity reaches gradients of its own row and heads, and of the state it reads; one "
    "in the gradient of an output none of a later token"
)
_WORDS: dict[str, Any] = {"out_of_range": _OUT_OF_RANGE, "special_values": _SPECIAL_VALUES}
_ORDER = "; sums over K add the second half to the first, until one is left"


def _outputs(problem: Problem) -> dict[str, torch.dtype]:
    states = "states" if problem.op.endswith("in_place") else "new_state"
    return {"o": problem.dtypes[0], states: problem.dtypes[3]}


def _gradients(problem: Problem) -> dict[str, torch.dtype]:
    dtype, g, beta, state = problem.dtypes[:4]
    return {"dq": dtype, "dk": dtype, "dv": dtype, "dg": g, "dbeta": beta, "dstate": state}


def _bound(problem: Problem, is_backward: bool) -> Callable[[str], Derived]:
    bounds = StepBounds(problem)
    of = bounds.backward if is_backward else bounds.forward
    return lambda name: Derived(FORMULA, partial(of, name), AXES.get(name, 0))


def _guarantee(problem: Problem) -> dict[str, Guarantee]:
    return promise(problem, _outputs(problem), CEILING, _CASES, bound=_bound(problem, False), **_WORDS)


def _backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    words: dict[str, Any] = {"bound": _bound(problem, True), "special_values": _SPECIAL_GRADIENTS}
    return promise(problem, _gradients(problem), CEILING, _CASES, **words)


def _tiles_guarantee(problem: Problem) -> dict[str, Guarantee]:
    """The guarantee of kernels. A row's tokens go one after the other in one program, and sums have a fixed order."""
    bits: dict[str, Any] = {"repeatable": True, "batch_invariant": "row", "prefix_invariant": True}
    bits["bound"] = _bound(problem, False)
    return promise(problem, _outputs(problem), CEILING, _CASES, order=_ORDER, **_WORDS, **bits)


def _tiles_backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    order = f"{_ORDER}, sums over V in tiles of {backward_columns(*problem.sizes[:2])}"
    shared = f"{order}; rows that share a state are added in their order"
    tokens = _gradients(problem)
    pool = {"dstate": tokens.pop("dstate")}
    words: dict[str, Any] = {"repeatable": True, "special_values": _SPECIAL_GRADIENTS}
    words["bound"] = _bound(problem, True)
    return {
        **promise(problem, tokens, CEILING, _CASES, order=order, batch_invariant="row", **words),
        **promise(problem, pool, CEILING, _CASES, order=shared, batch_invariant="the rows of a state", **words),
    }


def power_of_two(size: int) -> int:
    """The least power of two that is not below a size."""
    return 1 << max(0, size - 1).bit_length()


def backward_columns(K: int, V: int) -> int:
    """The number of columns of a state in a program of the adjoint. Sums over V are divided there, so it is part of the
    bits."""
    return max(1, min(power_of_two(V), _BACKWARD_TILE // power_of_two(K)))


_BACKWARD_TILE = 2048
"""The number of elements of a state in a program of the adjoint, which has as many elements of its gradient."""


# ------------------------------------------------------------------------------------------ candidates


def _entry(problem: Problem) -> str:
    """The name of a problem's schedule. The best cache policy for 16-bit states differs from that for float32.

    On an H200 a token of 256 × 32 heads of 128 × 128 took 193 µs with "evict_first" and 211 µs without in bfloat16, and
    295 µs with it and 272 µs without in float32. Programs that process several tiles of bfloat16, and copy them to
    shared memory ahead, took 281 µs.
    """
    return "gated_delta_step_tiles_16_bit" if problem.dtypes[3].itemsize == 2 else "gated_delta_step_tiles"


def _in_tiles(
    kernel: str, direction: str, guarantee: Promises, entry: Callable[[Problem], str] | None = None
) -> Candidate:
    return Candidate(
        name="triton.tiles",
        backend="triton",
        kernel=kernel,
        revision=1,
        refuse=lambda problem: "",
        guarantee=guarantee,
        setup=imported(f"adjoint.ops.gated_delta.step.kernels:{direction}"),
        schedules=_SCHEDULES,
        entry=entry,
    )


def _in_place(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    eager.forward(arguments, outputs, in_place=True)


_TILES = _in_tiles("gated_delta_step_tiles", "forward", _tiles_guarantee, _entry)

STEP = (_TILES, eager_candidate("eager.tokens", _guarantee, eager.forward))
STEP_IN_PLACE = (
    _TILES,
    # With state_indices, the rows that are skipped depend on values.
    eager_candidate("eager.tokens", _guarantee, _in_place, waits=lambda problem: len(problem.dtypes) > 4),
)
STEP_BACKWARD = (
    _in_tiles("gated_delta_step_backward_tiles", "backward", _tiles_backward_guarantee),
    eager_candidate("eager.tokens", _backward_guarantee, eager.backward),
)
