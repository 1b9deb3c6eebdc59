"""The backward of the gated delta rule on Triton, as a plan runs it: its memory, and its kernels one after the other.

table → gates → prepare → walk, over segments from the saved states, → turn → walk_back → matrices → gradients →
gate_gradients

On Hopper (`fused`), one kernel has the place of the last three, and those before have others of their own. Of few
heads, walk_back is split: see `rule_compose_back_kernels.py`.
"""

from typing import Any

import torch
from torch import Tensor

from adjoint.core.errors import status_word
from adjoint.core.plan import Plan
from adjoint.core.problem import Problem
from adjoint.core.streams import side_by_side
from adjoint.core.workspace import Regions
from adjoint.ops.gated_delta.arguments import NEED_BETA, NEED_G, NEED_K, NEED_Q, NEED_STATE, NEED_V
from adjoint.ops.gated_delta.rule.shape import (
    Shape,
    Walkable,
    chunk_regions,
    contiguous,
    copies,
    padded,
    table_regions,
    walkable,
)
from adjoint.ops.gated_delta.rule.triton import backward_launch, launch
from adjoint.ops.gated_delta.rule.triton.backward_launch import Launches

_OF_KEYS = NEED_Q | NEED_K | NEED_G | NEED_BETA
_OF_TOKENS = _OF_KEYS | NEED_V

OF_TOKENS = ("dq", "dk", "dv", "dg", "dbeta")
"""Gradients with a row for each token, in the order of their bits in `need`."""


_FEW_PROGRAMS = 64
"""Of a walk back in Gluon, which are all that one sequence of 32 heads has with V = 128."""


def _walks_in_gluon(shape: Shape, fused: bool) -> bool:
    """Whether a plan for Hopper walks over segments in Gluon. It has the bits of the walk in Triton, and is faster.

    Not beside a walk back of few programs, which it slows down by more than it saves: on an H200 the backward of one
    sequence of 32768 tokens, 32 heads and K = V = 128 took 2551 µs with it (with a third chunk in shared memory), and
    2450 without.
    """
    few = shape.sequences * shape.heads * (shape.V // 64) <= _FEW_PROGRAMS
    return fused and not (few and backward_launch.walks_back_in_gluon(shape, fused))


def _walks_in_triton(shape: Shape, fused: bool) -> bool:
    """Whether any number of sequences is walked in Triton."""
    return not fused or backward_launch.walks_back_in_gluon(shape, fused)


def _kinds(shape: Shape) -> tuple[torch.dtype, ...]:
    """The types of the gradients of tokens."""
    return (shape.element, shape.element, shape.element, shape.gate, shape.strength)


def regions(problem: Problem, fused: bool = False) -> Regions:
    """The workspace of a backward; `fused` is the one for Hopper."""
    shape = Shape.of(problem)
    if shape.is_empty:
        return Regions()
    _, normalize, need = problem.options
    keys, values = shape.key_heads * padded(shape.K), shape.heads * padded(shape.V)
    held = copies(problem, {"q": keys, "k": keys, "v": values, "do": values})
    if normalize:
        held |= {f"copied_{name}": (shape.element, shape.tokens * keys) for name in ("q", "k")}
    held |= backward_launch.regions(shape, backward_launch.tuning(shape), need, normalize, fused)
    if fused and need & _OF_TOKENS:  # which one kernel computes, all of them
        widths = (shape.key_heads * shape.K, shape.key_heads * shape.K, shape.heads * shape.V, shape.heads, shape.heads)
        for bit, (name, kind, width) in enumerate(zip(OF_TOKENS, _kinds(shape), widths, strict=True)):
            if not need >> bit & 1:
                held[f"unwanted_{name}"] = (kind, shape.tokens * width)
    return Regions(
        **table_regions(shape, segments=True), **chunk_regions(shape, backward_launch.forward_tuning(shape)), **held
    )


def keys(problem: Problem, fused: bool = False) -> list[tuple[Any, ...]]:
    """Every kernel a backward may launch."""
    shape = Shape.of(problem)
    _, normalize, need = problem.options
    initial, final, upstream = (bool(given) for given in problem.sizes[7:])
    apart = 0 if fused else need
    walks = backward_launch.walks_back_in_gluon(shape, fused)
    listed = launch.table_keys(shape.ids is not None, False, (True,))
    listed += [launch.prepare_key(shape, fused)]
    listed += [("turn", upstream)] * (not fused) + [("normalize", True)] * normalize
    for aligned in (True, False):
        listed += [("walk", True, initial, False, False, aligned)] * _walks_in_triton(shape, fused)
        if not walks:
            listed.append(("walk_back", upstream, final, bool(need & NEED_STATE), aligned))
        if shape.may_split:
            listed.append(("transition_back", upstream, final, False, aligned))
            listed.append(("segment_back", upstream, final, bool(need & NEED_STATE), aligned))
        if apart & _OF_TOKENS:
            listed.append(("matrices", upstream, need & _OF_TOKENS, aligned))
        if apart & _OF_KEYS:
            listed.append(("gradients", upstream, normalize, need & _OF_KEYS, aligned))
    listed += [("transition_alone",), ("compose_back",)] * shape.may_split
    if fused:
        from adjoint.ops.gated_delta.rule.hopper.launch import natural

        listed += [("turn_hopper", natural(shape)), ("walk_hopper", natural(shape)[2:], initial)]
        listed += [("walk_back_hopper", natural(shape), final, bool(need & NEED_STATE))] * walks
        listed += [("gradients_hopper", natural(shape, 2), normalize)] * bool(need & _OF_TOKENS)
    if apart & (NEED_G | NEED_BETA):
        listed.append(("gate_gradients", upstream, need & (NEED_G | NEED_BETA)))
    if normalize and need & (NEED_Q | NEED_K) and backward_launch.is_apart(shape):
        listed.append(("unnormalize",))
    if shape.ids is not None:
        listed += sorted({("clear", kind) for bit, kind in enumerate(_kinds(shape)) if need >> bit & 1}, key=str)
    return listed


def prepare(plan: Plan, fused: bool = False) -> None:
    """Compiles every kernel the plan may launch."""
    status_word(plan.problem.device)
    shape = Shape.of(plan.problem)
    if shape.is_empty:
        return
    launches = Launches(shape, plan.problem.device, memo=plan.memo)
    for key in keys(plan.problem, fused):
        launches.prepare(key)


def run(
    plan: Plan,
    arguments: tuple[Any, ...],
    outputs: tuple[Tensor, ...],
    workspace: Tensor | None,
    fused: bool = False,
) -> None:
    """The gradients that `need` asks for."""
    q, k, v, g, beta, do, dfinal_state, initial_state, cu_seqlens, saved, scale, normalize, need = arguments
    shape, held = Shape.of(plan.problem), regions(plan.problem, fused)
    if shape.is_empty:
        _leave(outputs, dfinal_state, need)
        return
    launches = Launches(shape, plan.problem.device, memo=plan.memo)
    if workspace is None:
        workspace = held.allocate(plan.problem.device)
    memory = held.pointers(workspace)

    def copy(name: str) -> Tensor | None:
        return held.tensor(workspace, f"copied_{name}") if f"copied_{name}" in memory else None

    def tokens(name: str, x: Tensor) -> Walkable:
        if normalize and name in ("q", "k"):
            return launch.normalize(launches, x, memory[f"copied_{name}"], memory[f"{name}_factors"])
        return walkable(x, copy(name))

    if cu_seqlens is not None:
        cu_seqlens = contiguous(cu_seqlens, copy("cu_seqlens"))
    if initial_state is not None:
        initial_state = contiguous(initial_state, copy("initial_state"))
    if dfinal_state is not None:
        dfinal_state = contiguous(dfinal_state, copy("dfinal_state"))
    launch.table_and_gates(launches, memory, cu_seqlens, g, beta, raises=False)
    queries, keys, values = tokens("q", q), tokens("k", k), tokens("v", v)
    upstream = None if do is None else tokens("do", do)
    launch.prepare(launches, memory, keys, hopper=fused)
    kept = saved.contiguous()
    dinitial = outputs[5] if need & NEED_STATE else None
    way = backward_launch.WayBack(queries, keys, upstream, dfinal_state, scale)

    def forward_again() -> None:
        gluon = _walks_in_gluon(shape, fused)
        if fused:
            from adjoint.ops.gated_delta.rule.hopper import walk as rule_walk_hopper

            rule_walk_hopper.walk(launches, memory, keys, values, initial_state, kept, starts=gluon)
        if _walks_in_triton(shape, fused):  # compiled with either, or another number of sequences would compile it
            launch.walk(launches, memory, keys, values, initial_state, segmented=True, saved=kept, starts=not gluon)

    def whole() -> None:
        if backward_launch.walks_back_in_gluon(shape, fused):
            assert upstream is not None
            hopper.walk_back(launches, memory, queries, keys, upstream, scale, dfinal_state, dinitial)
        else:
            backward_launch.walk_back(launches, memory, way, dinitial)

    def from_zero() -> None:
        backward_launch.transitions_back(launches, memory, way)

    def whole_and_transitions() -> None:
        if shape.is_split_back:  # of what is packed with the long ones
            whole()
        launch.transitions_alone(launches, memory, keys)

    def back() -> None:
        if not shape.is_split_back:
            whole()
        if shape.may_split:
            backward_launch.compose_back(launches, memory)
            backward_launch.segments_back(launches, memory, way, dinitial)

    if fused:
        from adjoint.ops.gated_delta.rule.hopper import walk_back as hopper

        assert upstream is not None  # or the plan refused
        hopper.turn(launches, memory, queries, keys, upstream, scale)
    else:
        backward_launch.turn(launches, memory, queries, keys, upstream, scale)
    # Neither of two needs the other, and going back leaves most of the card idle where sequences are few. It goes
    # first: its programs need a whole SM each, and would find none after those of the walk. What no sequence is long
    # enough for is compiled, and not launched.
    device, large = plan.problem.device, shape.is_large
    if shape.is_split_back and shape.ids is not None and shape.sequences > 1:  # most of them may be walked whole

        def from_zero_and_forward_again() -> None:
            from_zero()
            forward_again()

        side_by_side(device, whole_and_transitions, from_zero_and_forward_again, large)
        back()
    else:
        if shape.may_split:
            side_by_side(device, from_zero, whole_and_transitions, large and shape.is_split_back)
        side_by_side(device, back, forward_again, large)
    dq, dk, dv, dg, dbeta, _ = outputs
    if fused and need & _OF_TOKENS:
        from adjoint.ops.gated_delta.rule.hopper import gradients as rule_gradients_hopper

        assert upstream is not None
        results = tuple(
            out if need >> bit & 1 else held.tensor(workspace, f"unwanted_{name}")
            for bit, (name, out) in enumerate(zip(OF_TOKENS, outputs, strict=False))
        )
        rule_gradients_hopper.gradients(launches, memory, queries, keys, values, upstream, results, scale, normalize)
    apart = 0 if fused else need
    if apart & _OF_TOKENS:
        backward_launch.matrices(launches, memory, queries, keys, values, upstream, dv, scale, need & _OF_TOKENS)
    if apart & _OF_KEYS:
        backward_launch.gradients(
            launches, memory, queries, keys, upstream, dq, dk, scale, normalize, need & _OF_KEYS
        )  # fmt: skip
    if apart & (NEED_G | NEED_BETA):
        backward_launch.gate_gradients(
            launches, memory, dg, dbeta, upstream is not None, need & (NEED_G | NEED_BETA)
        )  # fmt: skip
    if cu_seqlens is not None:
        launch.clear(launches, memory, *(out for bit, out in enumerate(outputs[:5]) if need >> bit & 1))


def _leave(outputs: tuple[Tensor, ...], dfinal_state: Tensor | None, need: int) -> None:
    """Without tokens, heads or sizes, the gradient of the states goes through as it is."""
    for bit, out in enumerate(outputs):
        if need >> bit & 1:
            if bit == 5 and dfinal_state is not None:
                out.copy_(dfinal_state)
            else:
                out.zero_()
