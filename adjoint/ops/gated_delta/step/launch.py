"""Launches the kernels of `gated_delta_step`."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.errors import check, report, status_word
from adjoint.core.kernels import TRITON_TYPES, Variant
from adjoint.core.plan import Plan
from adjoint.core.problem import Problem
from adjoint.ops.gated_delta.faults import POSITIVE_GATE, STATE_INDEX_OUT_OF_RANGE, STATE_INDEX_REPEATED
from adjoint.ops.gated_delta.step import eager as eager_step
from adjoint.ops.gated_delta.step import kernels as _kernels  # noqa: F401  (registers them)

_KERNEL = "gated_delta_step_tiles"

_INTEGERS = frozenset(("index_fault", "gate_fault", "time", "heads", "group"))

_ALIGNED = (
    "q", "k", "v", "state", "out", "states", "q_row", "q_token", "q_head", "k_row", "k_token", "k_head",
    "v_row", "v_token", "v_head", "state_place", "state_head", "out_token", "states_token",
)  # fmt: skip
"""What is a multiple of 16 in an aligned launch: bytes of addresses, elements of strides."""


ELEMENTS = 128
"""Numbers of a state that a thread holds at most."""


READ_POLICY = {2: "evict_first"}
"""How the cache treats states it reads, by the bytes of a number: on an H200 a token of 256 × 32 heads of 128 × 128
took 295 µs with "evict_first" and 272 without in float32, 193 with it and 211 without in bfloat16."""


class Kinds(NamedTuple):
    """What variants of the step and of its adjoint are compiled for, beside how they read; `need` is of the adjoint."""

    element: torch.dtype
    g: torch.dtype
    beta: torch.dtype
    state: torch.dtype
    indices: torch.dtype | None
    K: int
    V: int
    normalize: bool = False
    all_states: bool = False
    in_place: bool = False
    need: int = 63

    @staticmethod
    def of(problem: Problem) -> "Kinds":
        element, g, beta, state, *indices = problem.dtypes
        K, V = problem.sizes[:2]
        _, normalize, all_states, last = problem.options
        found = Kinds(element, g, beta, state, indices[0] if indices else None, K, V, normalize, all_states)
        if problem.op.endswith("_backward"):
            return found._replace(need=last)
        return found._replace(in_place=problem.op.endswith("in_place"))


def _scalar(name: str, element: torch.dtype) -> str:
    """The type of an argument that is a number."""
    if name == "scale":
        return "fp64" if element == torch.float64 else "fp32"
    return "i32" if name in _INTEGERS else "i64"


def power_of_two(size: int) -> int:
    """The least that is not below a size."""
    return 1 << max(0, size - 1).bit_length()


def variant(kinds: Kinds, schedule: dict[str, int], one_token: bool, aligned: bool) -> Variant:
    """The kernel as it is compiled."""
    described = kernels.registered()[_KERNEL]
    own = {
        "q": kinds.element, "k": kinds.element, "v": kinds.element, "out": kinds.element, "g": kinds.g,
        "beta": kinds.beta, "state": kinds.state, "states": kinds.state, "indices": kinds.indices or torch.int32,
        "status_word": torch.int64,
    }  # fmt: skip
    types = {}
    for name in described.parameters:
        if name in own:
            types[name] = f"*{TRITON_TYPES[own[name]]}"
        elif not name.isupper():
            types[name] = _scalar(name, kinds.element)
    rows, wide = power_of_two(kinds.K), power_of_two(kinds.V)
    # Strides take registers too, a float64 two of them, and a loop over tokens some.
    plain = aligned and kinds.element != torch.float64
    held = ELEMENTS // (8 if not plain else 1 if one_token else 2)
    wanted = schedule["narrow_columns" if kinds.state.itemsize == 2 else "columns"]
    columns = min(wanted, wide, max(1, 32 * held // rows))
    groups = min(schedule["warps"], wide // columns)
    low = min(rows, max(1, 32 // max(1, columns * kinds.state.itemsize // 16)))  # with the columns, a warp
    constants = {
        "K": kinds.K, "V": kinds.V, "HIGH": rows // low, "HIGH_LEVELS": (rows // low).bit_length() - 1,
        "GROUPS": groups, "LOW": low, "LOW_LEVELS": low.bit_length() - 1, "COLUMNS": columns,
        "INDEXED": kinds.indices is not None, "NORMALIZE": kinds.normalize, "ALL_STATES": kinds.all_states,
        "IN_PLACE": kinds.in_place, "ONE_TOKEN": one_token, "ADJACENT": aligned,
        "POLICY": READ_POLICY.get(kinds.state.itemsize, ""), "DOUBLE": kinds.element == torch.float64,
    }  # fmt: skip
    return described.variant(types, constants, _ALIGNED if aligned else (), num_warps=groups, num_stages=1)


def _is_aligned(tokens: tuple[Tensor, ...], state: Tensor, outputs: tuple[Tensor, ...]) -> bool:
    """Whether elements are adjacent, and everything else begins at a multiple of 16 elements or bytes."""
    if state.stride(3) != 1 or state.stride(2) != state.shape[3] or any(step % 16 for step in state.stride()[:2]):
        return False
    for x in tokens:
        row, token, head, element = x.stride()
        if element != 1 or row % 16 or token % 16 or head % 16:
            return False
    if tokens[2].shape[2] * tokens[2].shape[3] % 16:  # the strides of what is written
        return False
    return not any(x.data_ptr() % 16 for x in (*tokens, state, *outputs))


def _all_variants(plan: Plan) -> Iterator[tuple[tuple[bool, bool], Variant]]:
    kinds = Kinds.of(plan.problem)
    for one_token in (True, False):
        for aligned in (True, False):
            yield (one_token, aligned), variant(kinds, plan.schedule, one_token, aligned)


def prepare(plan: Plan) -> None:
    """Compiles everything a plan may launch: the number of tokens and the layout decide which it is."""
    status_word(plan.problem.device)
    for key, described in _all_variants(plan):
        if key not in plan.memo:
            values = dict(described.constants)
            plan.memo[key] = described.prepare(plan.problem.device), values["GROUPS"] * values["COLUMNS"]


def forward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """Of either operator: with states of its own, or in place."""
    q, k, v, g, beta, state, indices, scale, _normalize, all_states, checking = arguments
    out, states = outputs
    in_place = plan.problem.op.endswith("in_place")
    batch, time, heads, V = v.shape
    K = q.shape[3]
    if out.numel() == 0 or K == 0:
        wanted = states if all_states or not in_place else None
        eager_step.forward(*(*arguments, out, wanted, in_place))
        return
    if checking and indices is not None:
        report(STATE_INDEX_REPEATED, indices, eager_step.repeated(indices))
    if not plan.memo:
        prepare(plan)
    key = (time == 1, _is_aligned((q, k, v), state, outputs))
    start, columns = plan.memo[key]
    start(
        (batch * heads * -(-V // columns), 1, 1), q, k, v, g, beta, state, out if indices is None else indices, out,
        states, status_word(plan.problem.device), STATE_INDEX_OUT_OF_RANGE.row, POSITIVE_GATE.row, scale, time, heads,
        heads // q.shape[2], state.shape[0], *q.stride(), *k.stride(), *v.stride(), *g.stride(), *beta.stride(),
        *state.stride(), heads * V, heads * K * V, 0 if indices is None else indices.stride(0),
    )  # fmt: skip
    if plan.problem.device.type == "cpu":
        check()
