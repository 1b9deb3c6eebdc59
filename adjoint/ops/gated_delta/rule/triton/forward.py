"""The forward of the gated delta rule on Triton, as a plan runs it: its memory, and its kernels one after the other."""

from typing import Any

import torch
from torch import Tensor

from adjoint.core.errors import check, report, status_word
from adjoint.core.kernels import compile_together
from adjoint.core.plan import Plan
from adjoint.core.problem import Problem
from adjoint.core.streams import side_by_side
from adjoint.core.workspace import Regions
from adjoint.ops.gated_delta.faults import POSITIVE_GATE
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.rule.shape import (
    Shape,
    Walkable,
    chunk_regions,
    contiguous,
    copies,
    padded,
    split_regions,
    table_regions,
    tuning,
    walkable,
)
from adjoint.ops.gated_delta.rule.triton import launch
from adjoint.ops.gated_delta.rule.triton.launch import Launches


def regions(problem: Problem, fused: bool = False) -> Regions:
    """The workspace of a forward; `fused` is the walk that writes outputs itself."""
    shape, normalize = Shape.of(problem), problem.options[1]
    if shape.is_empty:
        return Regions(**{name: region for name, region in table_regions(shape).items() if name != "places"})
    keys, values = shape.key_heads * padded(shape.K), shape.heads * padded(shape.V)
    held = copies(problem, {"q": keys, "k": keys, "v": values})
    if normalize:
        held |= {f"copied_{name}": (shape.element, shape.tokens * keys) for name in ("q", "k")}
    if shape.is_split:
        held |= split_regions(shape, saved=not problem.options[3])
    table = table_regions(shape, segments=shape.is_split)
    return Regions(**table, **chunk_regions(shape, tuning(shape), int(fused)), **held)


def keys(problem: Problem, fused: bool = False) -> list[tuple[Any, ...]]:
    """Every kernel a forward may launch."""
    shape = Shape.of(problem)
    _, normalize, final, save = problem.options
    if shape.is_empty:
        return [("bounds", True, CHUNK)]
    if fused:
        from adjoint.ops.gated_delta.rule.hopper.launch import natural
    initial = bool(problem.sizes[7])
    listed = launch.table_keys(shape.ids is not None, True, (False, True) if shape.may_split else (False,))
    listed.append(launch.prepare_key(shape, fused, scores=True))
    listed += [("compose", initial)] * shape.may_split
    for split in (False, True) if shape.may_split else (False,):
        for aligned in (True, False):
            if fused:
                listed.append(("forward_hopper", natural(shape), split, initial, final, aligned))
            else:
                listed.append(("walk", split, initial, save and not split, final, aligned))
    if fused:
        listed += [("scores", 1)] * (("prepare",) in listed)
        listed += [("transition_hopper", natural(shape))] * shape.may_split
    else:
        listed += [("output", aligned) for aligned in (True, False)] + [("transition",)] * shape.may_split
    listed += [("normalize", False)] * normalize + [("clear_saved",)] * save
    return listed + [("clear", shape.element)] * (shape.ids is not None)


def prepare(plan: Plan, fused: bool = False) -> None:
    """Compiles every kernel the plan may launch."""
    status_word(plan.problem.device)
    launches = Launches(Shape.of(plan.problem), plan.problem.device, memo=plan.memo)
    for key in keys(plan.problem, fused):
        launches.prepare(key)


def run(
    plan: Plan,
    arguments: tuple[Any, ...],
    outputs: tuple[Tensor, ...],
    workspace: Tensor | None,
    fused: bool = False,
) -> None:
    """o; the final states, and those between segments, where they are wanted."""
    q, k, v, g, beta, initial_state, cu_seqlens, scale, normalize, output_final_state, save = arguments
    out, final_state, saved = outputs
    shape, held = Shape.of(plan.problem), regions(plan.problem, fused)
    launches = Launches(shape, plan.problem.device, memo=plan.memo)
    if shape.may_split:  # a longer sequence launches more, and must not be the first to compile
        what = (plan.problem.device, plan.problem.dtypes, plan.problem.options, plan.problem.sizes[3:], fused)
        compile_together(what, lambda: prepare(plan, fused))
    if workspace is None:
        workspace = held.allocate(plan.problem.device)
    memory = held.pointers(workspace)

    def copy(name: str) -> Tensor | None:
        return held.tensor(workspace, f"copied_{name}") if f"copied_{name}" in memory else None

    def tokens(name: str, x: Tensor) -> Walkable:
        if normalize and name != "v":
            return launch.normalize(launches, x, memory[f"copied_{name}"])
        return walkable(x, copy(name))

    if cu_seqlens is not None:
        cu_seqlens = contiguous(cu_seqlens, copy("cu_seqlens"))
    if initial_state is not None:
        initial_state = contiguous(initial_state, copy("initial_state"))
    if shape.is_empty:
        launch.table(launches, memory, cu_seqlens)
        report(POSITIVE_GATE, g, g > 0)
        _leave(plan.problem.device, outputs, initial_state)
        return
    launch.table_and_gates(launches, memory, cu_seqlens, g, beta)
    if plan.problem.device.type == "cpu":
        check()
    queries, keys, values = tokens("q", q), tokens("k", k), tokens("v", v)
    between = saved if save else held.tensor(workspace, "saved") if shape.is_split else None
    final = final_state if output_final_state else None

    def in_gluon() -> None:
        from adjoint.ops.gated_delta.rule.hopper import launch as rule_hopper

        launch.prepare_and_scores(launches, memory, queries, keys, scale)
        if shape.is_split:
            rule_hopper.transitions(launches, memory, keys, values)
            launch.compose(launches, memory, initial_state, between)
        rule_hopper.forward(
            launches, memory, queries, keys, values, scale, initial_state, between, final, out, shape.is_split
        )  # fmt: skip

    def in_triton() -> None:
        launch.prepare(launches, memory, keys)
        if shape.is_split:
            launch.transitions(launches, memory, keys, values)
            launch.compose(launches, memory, initial_state, between)
        launch.walk(
            launches, memory, keys, values, initial_state, segmented=shape.is_split, saved=between, final_state=final
        )  # fmt: skip
        launch.output(launches, memory, queries, keys, scale, out)

    def clear() -> None:
        if cu_seqlens is not None:
            launch.clear(launches, memory, out)
        if save:
            launch.clear_saved(launches, memory, saved)

    # What no sequence has is written by none of the others.
    side_by_side(
        plan.problem.device, in_gluon if fused else in_triton, clear, shape.is_large and cu_seqlens is not None
    )  # fmt: skip


def _leave(device: torch.device, outputs: tuple[Tensor, ...], initial_state: Tensor | None) -> None:
    """Without tokens, heads or sizes, states stay what they are."""
    out, final_state, saved = outputs
    if device.type == "cpu":
        check()
    out.zero_()
    saved.zero_()
    if initial_state is None or not final_state.numel():
        final_state.zero_()
    else:
        final_state.copy_(initial_state)
