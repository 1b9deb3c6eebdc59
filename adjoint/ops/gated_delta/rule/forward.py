"""The forward of the gated delta rule on kernels, for all plans: what a plan binds, and what runs.

    step                        Triton                          Hopper
    gates                       triton/gates                    the same
    normalised q and k          triton/normalize                the same
    chunk inverse T             triton/chunk_inverse            hopper/chunk_inverse, with the scores P
    transitions of segments     triton/state_scan               hopper/transitions
    states between segments     triton/compose_transitions      the same
    state scan                  triton/state_scan               hopper/forward_scan, one kernel
    output                      triton/output                   for both

If spans and heads alone keep the GPU busy, hopper/whole_scan replaces hopper/forward_scan and gives the same bits. It
computes the scores itself, so hopper/chunk_inverse computes none. It also serves a long sequence, of which it scans
parts side by side from the states that hopper/states_ahead computes.

Segments have transitions, and states that are composed of them, only if a sequence is split. q and k are normalised
only if the call asks for it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core.errors import check, report
from adjoint.core.launch import Execute, Setup, run_concurrently
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.arguments import POSITIVE_GATE, report_values
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.rule.shape import Copies, Shape
from adjoint.ops.gated_delta.rule.triton.chunk_indices import bind_bounds, bind_clear, bind_clear_saved, index_regions
from adjoint.ops.gated_delta.rule.triton.chunk_inverse import bind_chunk_inverse, inverse_region, score_region
from adjoint.ops.gated_delta.rule.triton.compose_transitions import bind_compose_transitions, transition_region
from adjoint.ops.gated_delta.rule.triton.gates import bind_gates, gate_region
from adjoint.ops.gated_delta.rule.triton.normalize import bind_normalize
from adjoint.ops.gated_delta.rule.triton.output import bind_output
from adjoint.ops.gated_delta.rule.triton.state_scan import bind_state_scan, bind_transitions, scan_regions

PARTS = 1
"""How many numbers of the storage type store an element of T."""


def forward(setup: Setup, hopper: bool = False) -> Execute:
    """Computes o and, if they are needed, the final states and the states between segments.

    Args:
        hopper: whether to use the kernels for Hopper.
    """
    shape, device = Shape.of(setup.problem), setup.device
    _scale, normalize, output_final_state, checking, keep = setup.problem.options
    setup.add_numeric(chunk=CHUNK, segment=packing.SEGMENT)
    copies = Copies(setup, shape, normalize and not shape.is_empty)
    setup.scratch(**index_regions(shape, segments=shape.is_split and not shape.is_empty))
    if shape.is_empty:
        return _without_tokens(setup, shape, copies)
    setup.scratch(**gate_region(shape), **inverse_region(shape, PARTS))
    is_split = shape.is_split
    if is_split:
        setup.scratch(**transition_region(shape))
        if not keep:
            setup.scratch(saved=(torch.float32, shape.saved_elements))
    gates = bind_gates(setup, shape, (False, True) if shape.may_split else (False,), raises=True)
    normalized = bind_normalize(setup, shape, factors=False) if normalize else None
    bind_kernels = _bind_hopper if hopper else _bind_triton
    inverse, scan, output, transitions, compose = bind_kernels(setup, shape)
    clear = bind_clear(setup, shape, shape.element) if shape.is_packed else None
    clear_saved = bind_clear_saved(setup, shape) if keep else None
    concurrently = shape.is_large and shape.is_packed

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        q, k, v, g, beta, initial_state, cu_seqlens, scale, *_ = arguments
        out, final_state, saved = outputs
        memory = setup.memory(workspace)
        cu_seqlens = copies.contiguous(memory, "cu_seqlens", cu_seqlens)
        initial_state = copies.contiguous(memory, "initial_state", initial_state)
        if checking:
            report_values(k, g, beta, normalize)
        gates(memory, cu_seqlens, g, beta)
        if device.type == "cpu":
            check()
        queries, keys = copies.token_rows(memory, "q", q), copies.token_rows(memory, "k", k)
        if normalized:
            queries, keys = normalized(memory, "q", queries), normalized(memory, "k", keys)
        values = copies.token_rows(memory, "v", v)
        between = saved if keep else memory.tensor("saved") if is_split else None
        final = final_state if output_final_state else None

        def compute_chunks() -> None:
            if inverse is not None:
                inverse(memory, queries, keys, scale)
            if is_split and transitions and compose:
                transitions(memory, keys, values)
                compose(memory, initial_state, between)
            if output is None:
                scan(memory, queries, keys, values, scale, initial_state, between, final, out)
            else:
                scan(memory, keys, values, initial_state, between, final)
                output(memory, queries, keys, scale, out)

        def clear_others() -> None:
            if clear:
                clear(memory, out)
            if clear_saved:
                clear_saved(memory, saved)

        # Beside that, the outputs of tokens that belong to no sequence, and unused saved states, are cleared.
        run_concurrently(device, compute_chunks, clear_others, worthwhile=concurrently)

    return execute


class _Kernels(NamedTuple):
    """The kernels that compute the chunks. Without an output kernel the scan writes the outputs, and without a kernel
    for the inverses it computes these as well.

    If sequences may be split, whole and split scans are both bound, because a plan for another length must find its
    scan compiled.
    """

    inverse: Callable[..., None] | None
    scan: Callable[..., None]
    output: Callable[..., None] | None = None
    transitions: Callable[..., None] | None = None
    compose: Callable[..., None] | None = None


def _bind_triton(setup: Setup, shape: Shape) -> _Kernels:
    *_, output_final_state, _checking, keep = setup.problem.options
    states = {"initial": shape.has_initial_state, "final": output_final_state}
    setup.scratch(**scan_regions(shape))
    inverse, output = _without_scores(bind_chunk_inverse(setup, shape, PARTS)), bind_output(setup, shape)
    scan = bind_state_scan(setup, shape, PARTS, segmented=False, saves=keep, **states)
    if not shape.may_split:
        return _Kernels(inverse, scan, output)
    transitions = bind_transitions(setup, shape, PARTS)
    compose = bind_compose_transitions(setup, shape, shape.has_initial_state)
    split_scan = bind_state_scan(setup, shape, PARTS, segmented=True, saves=False, **states)
    return _Kernels(inverse, split_scan if shape.is_split else scan, output, transitions, compose)


def _bind_hopper(setup: Setup, shape: Shape) -> _Kernels:
    """Binds every scan that can serve, because other numbers of sequences and other lengths need another one."""
    from adjoint.ops.gated_delta.rule.hopper.transitions import bind_transitions

    spans = shape.forward_spans * shape.heads * (shape.V // 128)
    is_ahead = _can_scan_ahead(shape) and spans <= setup.schedule["spans_ahead"]
    is_ahead = is_ahead and shape.time >= setup.schedule["tokens_ahead"]
    is_whole = is_ahead or (_can_scan_whole(shape) and spans > setup.schedule["spans_in_halves"])
    scans = _bind_scan_in_halves(setup, shape)
    if _can_scan_whole(shape):
        whole_scans = _bind_whole_scan(setup, shape, is_ahead)
        scans = whole_scans if is_whole else scans
    inverse, scan, split_scan = scans
    if not is_whole:
        setup.scratch(**score_region(shape))
    if not shape.may_split:
        return _Kernels(inverse, scan)
    transitions = bind_transitions(setup, shape)
    compose = bind_compose_transitions(setup, shape, shape.has_initial_state)
    return _Kernels(inverse, split_scan if shape.is_split else scan, None, transitions, compose)


def _can_scan_whole(shape: Shape) -> bool:
    """Whether a program may have 128 columns of V. For an odd number of heads, scores in memory have other bits."""
    return shape.V % 128 == 0 and shape.heads % 2 == 0


def _can_scan_ahead(shape: Shape) -> bool:
    """Whether states may be scanned ahead of the outputs, and parts of a sequence side by side."""
    return _can_scan_whole(shape) and not shape.may_split


_Scans = tuple[Callable[..., None] | None, Callable[..., None], Callable[..., None]]
"""The kernel of the inverses, or None if the scan computes them; the scan of whole sequences; and the scan of segments,
for sequences that may be split."""


def _bind_scan_in_halves(setup: Setup, shape: Shape) -> _Scans:
    from adjoint.ops.gated_delta.rule.hopper.chunk_inverse import bind_inverse_and_scores
    from adjoint.ops.gated_delta.rule.hopper.forward_scan import bind_forward_scan

    *_, output_final_state, _checking, _keep = setup.problem.options
    states = {"initial": shape.has_initial_state, "final": output_final_state}
    inverse, scan = bind_inverse_and_scores(setup, shape), bind_forward_scan(setup, shape, segmented=False, **states)
    return inverse, scan, bind_forward_scan(setup, shape, segmented=True, **states) if shape.may_split else scan


def _bind_whole_scan(setup: Setup, shape: Shape, is_ahead: bool) -> _Scans:
    from adjoint.ops.gated_delta.rule.hopper.chunk_inverse import bind_inverse
    from adjoint.ops.gated_delta.rule.hopper.states_ahead import bind_scan_ahead, start_region
    from adjoint.ops.gated_delta.rule.hopper.whole_scan import bind_whole_scan

    *_, output_final_state, _checking, keep = setup.problem.options
    states = {"initial": shape.has_initial_state, "final": output_final_state}
    invert = bind_inverse(setup, shape, PARTS)
    inverse: Callable[..., None] | None = _without_scores(invert)
    scan = bind_whole_scan(setup, shape, segmented=False, saves=keep, **states)
    split_scan = bind_whole_scan(setup, shape, segmented=True, saves=False, **states) if shape.may_split else scan
    if _can_scan_ahead(shape):
        scan_ahead = bind_scan_ahead(setup, shape, invert, scan, shape.has_initial_state)
        if is_ahead:
            setup.scratch(**start_region(shape))
            inverse, scan = None, scan_ahead
    return inverse, scan, split_scan


def _without_scores(inverse: Callable[..., None]) -> Callable[..., None]:
    """A function that computes only inverses, with the arguments of one that also computes scores."""
    return lambda memory, queries, keys, scale: inverse(memory, keys)


def _without_tokens(setup: Setup, shape: Shape, copies: Copies) -> Execute:
    """The forward without tokens, heads or sizes: states stay as they are, and values are checked all the same."""
    bounds = bind_bounds(setup, shape, CHUNK, raises=True) if shape.is_packed else None

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        _q, k, _v, g, beta, initial_state, cu_seqlens, _scale, normalize, *_, checking, _keep = arguments
        out, final_state, saved = outputs
        memory = setup.memory(workspace)
        if bounds:
            bounds(memory, copies.contiguous(memory, "cu_seqlens", cu_seqlens), memory["first_chunks"])
        report(POSITIVE_GATE, g, g > 0)
        if checking:
            report_values(k, g, beta, normalize)
        if setup.device.type == "cpu":
            check()
        out.zero_()
        saved.zero_()
        if initial_state is None or not final_state.numel():
            final_state.zero_()
        else:
            final_state.copy_(initial_state)

    return execute
