"""Launches the adjoint of `gated_delta_step`."""

from typing import Any

import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.kernels import TRITON_TYPES, Variant
from adjoint.core.plan import Plan
from adjoint.core.problem import Problem
from adjoint.core.workspace import Regions
from adjoint.ops.gated_delta.arguments import NEED_BETA, NEED_G, NEED_K, NEED_Q, NEED_STATE, NEED_V, wide_dtype
from adjoint.ops.gated_delta.step import backward_kernels as _kernels  # noqa: F401  (registers them)
from adjoint.ops.gated_delta.step import eager as eager_step
from adjoint.ops.gated_delta.step.launch import Kinds, power_of_two
from adjoint.ops.gated_delta.step.plans import backward_columns

_TILES, _TOKENS, _PLACES = (f"gated_delta_step_backward_{name}" for name in ("tiles", "tokens", "places"))

_INTEGERS = frozenset(("time", "heads", "key_heads", "group", "blocks", "tiles"))
_PARTS = frozenset(("dq_parts", "dk_parts", "dg_parts", "dbeta_parts"))

PLACES_BLOCK = 1024


def variant(kernel: str, kinds: Kinds, warps: int, has_do: bool = True, has_dstates: bool = True) -> Variant:
    """A kernel as it is compiled."""
    described = kernels.registered()[kernel]
    indexed = kinds.indices is not None
    computed = wide_dtype(kinds.element)
    own = {
        **dict.fromkeys(("q", "k", "v", "do", "dq", "dk", "dv"), kinds.element),
        **dict.fromkeys(("g", "dg"), kinds.g),
        **dict.fromkeys(("beta", "dbeta"), kinds.beta),
        **dict.fromkeys(("state", "dstates", "dpool"), kinds.state),
        **dict.fromkeys(_PARTS, computed),
        "drows": computed if indexed else kinds.state,
        "indices": kinds.indices or torch.int32,
    }
    types = {}
    for name in described.parameters:
        if name in own:
            types[name] = f"*{TRITON_TYPES[own[name]]}"
        elif name == "scale":
            types[name] = TRITON_TYPES[computed]
        elif not name.isupper():
            types[name] = "i32" if name in _INTEGERS else "i64"
    size, columns = power_of_two(kinds.K), backward_columns(kinds.K, kinds.V)
    values = {
        "K": kinds.K, "V": kinds.V, "ROWS": size, "LEVELS": size.bit_length() - 1, "COLUMNS": columns,
        "WIDTH_LEVELS": columns.bit_length() - 1, "INDEXED": indexed, "NORMALIZE": kinds.normalize,
        "ALL_STATES": kinds.all_states, "HAS_DO": has_do, "HAS_DSTATES": has_dstates, "BLOCK": PLACES_BLOCK,
        "NEED_Q": bool(kinds.need & NEED_Q), "NEED_K": bool(kinds.need & NEED_K), "NEED_V": bool(kinds.need & NEED_V),
        "NEED_G": bool(kinds.need & NEED_G), "NEED_BETA": bool(kinds.need & NEED_BETA),
        "NEED_STATE": bool(kinds.need & NEED_STATE), "DOUBLE": computed == torch.float64,
    }  # fmt: skip
    constants = {name: values[name] for name in described.parameters if name.isupper()}
    if kernel == _TILES and computed == torch.float64:
        warps *= 2  # as many registers a number
    return described.variant(types, constants, (), num_warps=warps, num_stages=1)


def regions(problem: Problem) -> Regions:
    """The parts that tiles leave of what sums over V, and of states that rows may share."""
    K, V, batch, time, heads, *_ = problem.sizes
    computed = wide_dtype(problem.dtypes[0])
    blocks = -(-V // backward_columns(K, V)) if V else 0
    items = blocks * batch * time * heads
    parts = {name: (computed, items * (K if name in ("dq_parts", "dk_parts") else 1)) for name in sorted(_PARTS)}
    if len(problem.dtypes) > 4 and problem.options[-1] & NEED_STATE:
        parts["drows"] = (computed, batch * heads * K * V)
    return Regions(**parts)


def _variants(plan: Plan) -> dict[Any, Variant]:
    """Everything a plan may launch; which gradients come from above is data of the call."""
    kinds, schedule = Kinds.of(plan.problem), plan.schedule
    found: dict[Any, Variant] = {
        (_TILES, do, dstates): variant(_TILES, kinds, schedule["warps"], do, dstates)
        for do, dstates in ((True, True), (True, False), (False, True))
    }
    found[_TOKENS] = variant(_TOKENS, kinds, schedule["token_warps"])
    if kinds.indices is not None and kinds.need & NEED_STATE:
        found[_PLACES] = variant(_PLACES, kinds, 4)
    return found


def prepare(plan: Plan) -> None:
    """Compiles everything a plan may launch."""
    for key, described in _variants(plan).items():
        if key not in plan.memo:
            plan.memo[key] = described.prepare(plan.problem.device)


def backward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
    q, k, v, g, beta, state, do, dstates, indices, scale, *_, need = arguments
    dq, dk, dv, dg, dbeta, dpool = outputs
    batch, time, heads, V = v.shape
    key_heads, K = q.shape[2:]
    if v.numel() == 0 or K == 0 or (do is None and dstates is None):
        eager_step.backward(*(*arguments, outputs))
        return
    if not plan.memo:
        prepare(plan)
    needed = plan.memo.get("regions")
    if needed is None:
        needed = plan.memo["regions"] = regions(plan.problem)
    if workspace is None:
        workspace = needed.allocate(plan.problem.device)
    memory = needed.pointers(workspace)
    index, step = (dv, 0) if indices is None else (indices, indices.stride(0))
    blocks = -(-V // backward_columns(K, V))
    parts = tuple(memory[name] for name in ("dq_parts", "dk_parts", "dg_parts", "dbeta_parts"))
    states_strides = (0,) * 5
    if dstates is not None:
        row, *rest = dstates.stride()
        states_strides = (row, *rest) if dstates.dim() == 5 else (row, 0, *rest)
    plan.memo[_TILES, do is not None, dstates is not None](
        (batch * heads * blocks, 1, 1), q, k, v, g, beta, state, index, v if do is None else do,
        state if dstates is None else dstates, dv, memory.get("drows", dpool), *parts, scale, batch, time, heads,
        heads // key_heads, state.shape[0], *q.stride(), *k.stride(), *v.stride(), *g.stride(), *beta.stride(),
        *state.stride(), *((0,) * 4 if do is None else do.stride()), *states_strides, step,
    )  # fmt: skip
    if need & (NEED_Q | NEED_K | NEED_G | NEED_BETA):
        plan.memo[_TOKENS](
            (batch * time * key_heads, 1, 1), q, k, index, *parts, dq, dk, dg, dbeta, batch * time * heads, time,
            key_heads, heads // key_heads, blocks, state.shape[0], *q.stride(), *k.stride(), step,
        )  # fmt: skip
    if indices is not None and need & NEED_STATE:
        size = heads * K * V
        tiles = -(-size // PLACES_BLOCK)
        plan.memo[_PLACES]((state.shape[0] * tiles, 1, 1), indices, memory["drows"], dpool, batch, step, size, tiles)
