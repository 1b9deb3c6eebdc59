"""The forward of the gated delta rule on kernels, for both plans: what a plan binds, and what runs.

    step                        Triton                          Hopper
    gates                       triton/gates                    the same
    normalised q and k          triton/normalize                the same
    chunk inverse T             triton/chunk_inverse            hopper/chunk_inverse, with the scores P
    transitions of segments     triton/state_scan               hopper/transitions
    states between segments     triton/compose_transitions      the same
    state scan                  triton/state_scan               hopper/forward_scan, one kernel
    output                      triton/output                   for both

Only where a sequence is split have segments transitions, and states that are composed of them; only where it is asked
for are q and k normalised.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core.errors import check, report
from adjoint.core.launch import Execute, Setup, run_concurrently
from adjoint.core.workspace import Memory
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.faults import POSITIVE_GATE
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.rule.shape import Copies, Shape, TokenRows
from adjoint.ops.gated_delta.rule.triton.chunk_indices import (
    bind_bounds,
    bind_clear,
    bind_clear_saved,
    index_regions,
)
from adjoint.ops.gated_delta.rule.triton.chunk_inverse import bind_chunk_inverse, inverse_region, score_region
from adjoint.ops.gated_delta.rule.triton.compose_transitions import bind_compose_transitions, transition_region
from adjoint.ops.gated_delta.rule.triton.gates import bind_gates, gate_region
from adjoint.ops.gated_delta.rule.triton.normalize import bind_normalize
from adjoint.ops.gated_delta.rule.triton.output import bind_output
from adjoint.ops.gated_delta.rule.triton.state_scan import bind_state_scan, bind_transitions, scan_regions

PARTS = 1
"""Numbers of the storage type that an element of T is stored in."""

Chunks = Callable[..., None]
"""`compute(memory, q, k, v, scale, initial_state, saved, final_state, out)`, from gates to outputs."""


class Options(NamedTuple):
    """The options of the forward, as a problem has them."""

    scale: float
    normalize: bool
    output_final_state: bool
    keep: bool


def forward(setup: Setup, hopper: bool = False) -> Execute:
    """o; the final states, and those between segments, where they are needed."""
    shape = Shape.of(setup.problem)
    _, normalize, output_final_state, keep = Options(*setup.problem.options)
    setup.add_numeric(chunk=CHUNK, segment=packing.SEGMENT)
    copies = Copies(setup, shape, ("q", "k") if normalize and not shape.is_empty else ())
    setup.scratch(**index_regions(shape, segments=shape.is_split and not shape.is_empty))
    if shape.is_empty:
        return _without_tokens(setup, shape, copies)
    setup.scratch(**gate_region(shape), **inverse_region(shape, PARTS))
    if shape.is_split:
        setup.scratch(**transition_region(shape))
        if not keep:
            setup.scratch(saved=(torch.float32, shape.saved_elements))
    gates = bind_gates(setup, shape, (False, True) if shape.may_split else (False,), raises=True)
    normalized = bind_normalize(setup, shape, factors=False) if normalize else None
    compute = (_bind_hopper if hopper else _bind_triton)(setup, shape)
    clear = bind_clear(setup, shape, shape.element) if shape.is_packed else None
    clear_saved = bind_clear_saved(setup, shape) if keep else None
    concurrently = shape.is_large and shape.is_packed
    device = setup.device

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        q, k, v, g, beta, initial_state, cu_seqlens, scale, *_ = arguments
        out, final_state, saved = outputs
        memory = setup.memory(workspace)
        cu_seqlens = copies.contiguous(memory, "cu_seqlens", cu_seqlens)
        initial_state = copies.contiguous(memory, "initial_state", initial_state)
        gates(memory, cu_seqlens, g, beta)
        if device.type == "cpu":
            check()
        queries, keys = copies.token_rows(memory, "q", q), copies.token_rows(memory, "k", k)
        if normalized:
            queries, keys = normalized(memory, "q", queries), normalized(memory, "k", keys)
        values = copies.token_rows(memory, "v", v)
        between = saved if keep else memory.tensor("saved") if shape.is_split else None
        final = final_state if output_final_state else None

        def compute_chunks() -> None:
            compute(memory, queries, keys, values, scale, initial_state, between, final, out)

        def clear_others() -> None:
            if clear:
                clear(memory, out)
            if clear_saved:
                clear_saved(memory, saved)

        # The outputs of tokens that belong to no sequence, and saved states that no sequence has, are cleared beside.
        run_concurrently(device, compute_chunks, clear_others, concurrently)

    return execute


def _bind_triton(setup: Setup, shape: Shape) -> Chunks:
    options = Options(*setup.problem.options)
    initial, final, keep = shape.has_initial_state, options.output_final_state, options.keep
    setup.scratch(**scan_regions(shape))
    inverse, output = bind_chunk_inverse(setup, shape, PARTS), bind_output(setup, shape)
    scan = bind_state_scan(setup, shape, PARTS, segmented=False, initial=initial, saves=keep, final=final)
    split_scan, is_split = scan, shape.is_split
    if shape.may_split:
        transitions = bind_transitions(setup, shape, PARTS)
        compose = bind_compose_transitions(setup, shape, initial)
        split_scan = bind_state_scan(setup, shape, PARTS, segmented=True, initial=initial, saves=False, final=final)

    def compute(
        memory: Memory,
        q: TokenRows,
        k: TokenRows,
        v: TokenRows,
        scale: float,
        initial_state: Tensor | None,
        saved: Tensor | None,
        final_state: Tensor | None,
        out: Tensor,
    ) -> None:
        inverse(memory, k)
        if is_split:
            transitions(memory, k, v)
            compose(memory, initial_state, saved)
        (split_scan if is_split else scan)(memory, k, v, initial_state, saved, final_state)
        output(memory, q, k, scale, out)

    return compute


def _bind_hopper(setup: Setup, shape: Shape) -> Chunks:
    from adjoint.ops.gated_delta.rule.hopper.chunk_inverse import bind_inverse_and_scores
    from adjoint.ops.gated_delta.rule.hopper.forward_scan import bind_forward_scan
    from adjoint.ops.gated_delta.rule.hopper.transitions import bind_transitions

    initial, final = shape.has_initial_state, Options(*setup.problem.options).output_final_state
    setup.scratch(**score_region(shape))
    inverse_and_scores = bind_inverse_and_scores(setup, shape)
    scan = bind_forward_scan(setup, shape, segmented=False, initial=initial, final=final)
    split_scan, is_split = scan, shape.is_split
    if shape.may_split:
        transitions = bind_transitions(setup, shape)
        compose = bind_compose_transitions(setup, shape, initial)
        split_scan = bind_forward_scan(setup, shape, segmented=True, initial=initial, final=final)

    def compute(
        memory: Memory,
        q: TokenRows,
        k: TokenRows,
        v: TokenRows,
        scale: float,
        initial_state: Tensor | None,
        saved: Tensor | None,
        final_state: Tensor | None,
        out: Tensor,
    ) -> None:
        inverse_and_scores(memory, q, k, scale)
        if is_split:
            transitions(memory, k, v)
            compose(memory, initial_state, saved)
        (split_scan if is_split else scan)(memory, q, k, v, scale, initial_state, saved, final_state, out)

    return compute


def _without_tokens(setup: Setup, shape: Shape, copies: Copies) -> Execute:
    """Without tokens, heads or sizes, states stay what they are; values are checked all the same."""
    bounds = bind_bounds(setup, shape, CHUNK, raises=True)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        _q, _k, _v, g, _beta, initial_state, cu_seqlens, *_ = arguments
        out, final_state, saved = outputs
        memory = setup.memory(workspace)
        bounds(memory, copies.contiguous(memory, "cu_seqlens", cu_seqlens), memory["first_chunks"])
        report(POSITIVE_GATE, g, g > 0)
        if setup.device.type == "cpu":
            check()
        out.zero_()
        saved.zero_()
        if initial_state is None or not final_state.numel():
            final_state.zero_()
        else:
            final_state.copy_(initial_state)

    return execute
