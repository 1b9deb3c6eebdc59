"""Which code serves which decoding step, and what it guarantees."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Guarantee
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem, short, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.ops.gated_delta.promises import DOMAIN, domain_of, eager_candidate, empirical_error, promise
from adjoint.ops.gated_delta.step import eager

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

_CASES = "the family's cases: rows of their own, paged, several tokens"

CEILING = 2e-6
"""Of what is computed in float32: several times what the cases show."""

_OUT_OF_RANGE = (
    "g above 0 and state_indices out of range are reported: at once on the CPU, by adjoint.check() on a GPU, where g "
    "is then taken as it is, and the row is skipped"
)


def _guarantee(problem: Problem) -> dict[str, Guarantee]:
    dtype, _, _, state = problem.dtypes[:4]
    wide = wide_dtype(dtype)
    states = "states" if problem.op.endswith("in_place") else "new_state"
    return {
        name: promise(
            problem,
            empirical_error(kind, wide, CEILING, _CASES),
            int(kind != wide),
            out_of_range=_OUT_OF_RANGE,
        )
        for name, kind in (("o", dtype), (states, state))
    }


def _backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    dtype, g, beta, state = problem.dtypes[:4]
    wide = wide_dtype(dtype)
    kinds = {"dq": dtype, "dk": dtype, "dv": dtype, "dg": g, "dbeta": beta, "dstate": state}
    return {
        name: promise(problem, empirical_error(kind, wide, CEILING, _CASES), int(kind != wide), domain=domain_of(name))
        for name, kind in kinds.items()
    }


_ORDER = "sums over K add the second half to the first, until one is left"


def _in_tiles(problem: Problem, kind: torch.dtype, item: str, **words: Any) -> Guarantee:
    """A row's tokens go one after the other in one program, and every sum has an order of its own."""
    computed = wide_dtype(problem.dtypes[0])
    return Guarantee(
        repeatable=True,
        batch_invariant=item,
        device_invariant=False,
        accumulator=short(computed),
        roundings=int(kind != computed),
        error=empirical_error(kind, computed, CEILING, _CASES),
        **words,
    )


def _tiles_guarantee(problem: Problem) -> dict[str, Guarantee]:
    dtype, _, _, state = problem.dtypes[:4]
    states = "states" if problem.op.endswith("in_place") else "new_state"
    words = {"prefix_invariant": True, "domain": f"{DOMAIN}; {_ORDER}", "out_of_range": _OUT_OF_RANGE}
    return {name: _in_tiles(problem, kind, "row", **words) for name, kind in (("o", dtype), (states, state))}


def _tiles_backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    dtype, g, beta, state = problem.dtypes[:4]
    kinds = {"dq": dtype, "dk": dtype, "dv": dtype, "dg": g, "dbeta": beta}
    order = f"{_ORDER}, sums over V in tiles of {backward_columns(*problem.sizes[:2])}"
    shared = f"{DOMAIN}; {order}; rows that share a state are added in their order"
    return {
        **{name: _in_tiles(problem, kind, "row", domain=f"{domain_of(name)}; {order}") for name, kind in kinds.items()},
        "dstate": _in_tiles(problem, state, "the rows of a state", domain=shared),
    }


def power_of_two(size: int) -> int:
    """The least that is not below a size."""
    return 1 << max(0, size - 1).bit_length()


def backward_columns(K: int, V: int) -> int:
    """Columns of a state that a program of the adjoint holds: sums over V are cut there, so part of its bits."""
    return max(1, min(power_of_two(V), _BACKWARD_TILE // power_of_two(K)))


_BACKWARD_TILE = 2048
"""Numbers of a state that a program of the adjoint holds, and as many of its gradient."""


# ------------------------------------------------------------------------------------------ candidates


def _kernels() -> Any:
    """The module that imports Triton, on first use."""
    return import_module("adjoint.ops.gated_delta.step.kernels")


def _entry(problem: Problem) -> str:
    """The cache treats states of 16 bits best in another way.

    On an H200 a token of 256 × 32 heads of 128 × 128 took 193 µs with "evict_first" and 211 without in bfloat16; in
    float32 295 µs with it, 272 without.
    """
    return "gated_delta_step_tiles_16_bit" if problem.dtypes[3].itemsize == 2 else "gated_delta_step_tiles"


_TILES = Candidate(
    name="triton.tiles",
    backend="triton",
    kernel="gated_delta_step_tiles",
    revision=1,
    refuse=lambda problem: "",
    guarantee=_tiles_guarantee,
    setup=lambda setup: _kernels().forward(setup),
    schedules=_SCHEDULES,
    entry=_entry,
)
_TILES_BACKWARD = Candidate(
    name="triton.tiles",
    backend="triton",
    kernel="gated_delta_step_backward_tiles",
    revision=1,
    refuse=lambda problem: "",
    guarantee=_tiles_backward_guarantee,
    setup=lambda setup: _kernels().backward(setup),
    schedules=_SCHEDULES,
)


def _step_in_place(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    out, states = outputs
    all_states = arguments[9]
    eager.forward(*(*arguments, out, states if all_states else None, True))


STEP = (_TILES, eager_candidate("eager.tokens", _guarantee, lambda arguments, out: eager.forward(*arguments, *out)))
STEP_IN_PLACE = (
    _TILES,
    # With state_indices, which rows are skipped is data.
    eager_candidate("eager.tokens", _guarantee, _step_in_place, waits=lambda problem: len(problem.dtypes) > 4),
)
STEP_BACKWARD = (
    _TILES_BACKWARD,
    eager_candidate(
        "eager.tokens", _backward_guarantee, lambda arguments, gradients: eager.backward(*(*arguments, gradients))
    ),
)
