"""The backward of the gated delta rule on kernels, for both plans: what a plan binds, and what runs.

    step                        Triton                          Hopper
    gates                       triton/gates                    the same
    normalised q and k          triton/normalize                the same
    chunk inverse T             triton/chunk_inverse            hopper/chunk_inverse
    local gradients             triton/local_gradients          part of the reverse scan
    state scan of segments      triton/state_scan               hopper/state_scan
    reverse scan                triton/reverse_scan             hopper/reverse_scan
    matrices                    triton/gradients                hopper/gradients,
    gradients                   triton/gradients                one kernel
    gate gradients              triton/gradients                for all three

The state scan computes the states of the forward again, over all segments at once, from the saved states. Of few heads
the reverse scan is split in both plans: see `triton/compose_transitions.py`. Of one long sequence the plan for Hopper
computes gradients beside the reverse scan: see `hopper/gradients_beside.py`.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from adjoint.core.launch import Execute, Setup, run_concurrently
from adjoint.core.workspace import Memory
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.arguments import NEED_BETA, NEED_G, NEED_STATE
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.rule import shape as sizes
from adjoint.ops.gated_delta.rule.shape import Copies, Shape, TokenRows
from adjoint.ops.gated_delta.rule.triton import reverse_scan
from adjoint.ops.gated_delta.rule.triton.chunk_indices import bind_clear, index_regions
from adjoint.ops.gated_delta.rule.triton.chunk_inverse import bind_chunk_inverse, inverse_region
from adjoint.ops.gated_delta.rule.triton.compose_transitions import (
    bind_compose_reverse_transitions,
    reverse_transition_regions,
)
from adjoint.ops.gated_delta.rule.triton.gates import bind_gates, gate_region
from adjoint.ops.gated_delta.rule.triton.gradients import (
    NEED_KEYS,
    NEED_TOKENS,
    bind_gate_gradients,
    bind_gradients,
    bind_matrices,
    gradient_regions,
    sum_warps,
)
from adjoint.ops.gated_delta.rule.triton.local_gradients import bind_local_gradients, local_regions
from adjoint.ops.gated_delta.rule.triton.normalize import bind_normalize
from adjoint.ops.gated_delta.rule.triton.reverse_scan import Upstream, reverse_scan_regions
from adjoint.ops.gated_delta.rule.triton.state_scan import bind_reverse_transitions, bind_state_scan, scan_regions

TOKEN_GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta")
"""The gradients with a row for each token, in the order of their bits in `need`."""


def parts_of(shape: Shape) -> int:
    """How many numbers of the storage type store an element of T. dg and dβ of nearly equal keys need two."""
    return 1 if shape.is_float32 else 2


def _dtypes(shape: Shape) -> tuple[torch.dtype, ...]:
    """The dtypes of the gradients with a row for each token."""
    return (*(shape.element,) * 3, shape.gate, shape.strength)


def backward(setup: Setup, hopper: bool = False) -> Execute:
    """Computes the gradients in the mask `need`."""
    shape = Shape.of(setup.problem)
    _scale, normalize, need = setup.problem.options
    setup.add_numeric(chunk=CHUNK, segment=packing.SEGMENT)
    if shape.is_empty:
        return _without_tokens(need)
    parts = parts_of(shape)
    copies = Copies(setup, shape, normalize)
    setup.scratch(
        **index_regions(shape, segments=True), **gate_region(shape), **inverse_region(shape, parts),
        **scan_regions(shape), **reverse_scan_regions(shape),
    )  # fmt: skip
    gates = bind_gates(setup, shape, (True,), raises=False)
    normalized = bind_normalize(setup, shape, factors=True) if normalize else None
    if hopper:
        from adjoint.ops.gated_delta.rule.hopper.chunk_inverse import bind_inverse

        inverse, local = bind_inverse(setup, shape, parts), None
    else:
        setup.scratch(**local_regions(shape))
        inverse = bind_chunk_inverse(setup, shape, parts)
        local = bind_local_gradients(setup, shape, parts, shape.has_output_gradient)
    scan = _bind_scans(setup, shape, parts, hopper)
    gradients = (_bind_hopper_gradients if hopper else _bind_triton_gradients)(setup, shape)
    places = [bit for bit in range(5) if need >> bit & 1]
    clear = bind_clear(setup, shape, *(_dtypes(shape)[bit] for bit in places)) if shape.is_packed else None

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        do, dfinal_state, q, k, v, g, beta, initial_state, cu_seqlens, saved, scale, *_ = arguments
        memory = setup.memory(workspace)
        cu_seqlens = copies.contiguous(memory, "cu_seqlens", cu_seqlens)
        initial_state = copies.contiguous(memory, "initial_state", initial_state)
        dfinal_state = copies.contiguous(memory, "dfinal_state", dfinal_state)
        gates(memory, cu_seqlens, g, beta)
        queries, keys = copies.token_rows(memory, "q", q), copies.token_rows(memory, "k", k)
        if normalized:
            queries, keys = normalized(memory, "q", queries), normalized(memory, "k", keys)
        values = copies.token_rows(memory, "v", v)
        gradient = None if do is None else copies.token_rows(memory, "do", do)
        inverse(memory, keys)
        if local:
            local(memory, queries, keys, gradient, scale)
        upstream = Upstream(queries, keys, gradient, dfinal_state, scale)
        dinitial_state = outputs[5] if need & NEED_STATE else None

        def compute_gradients(*part: Any) -> None:
            gradients(memory, upstream, values, outputs, *part)

        scan(memory, upstream, values, initial_state, saved.contiguous(), dinitial_state, compute_gradients)
        if clear:
            clear(memory, *[outputs[bit] for bit in places])

    return execute


# --------------------------------------------------------------------------------------------------- scans


def _bind_state_scan(setup: Setup, shape: Shape, parts: int, hopper: bool) -> Callable[..., None]:
    """Binds the scan that computes states and new values again: `launch(memory, k, v, initial_state, saved)`.

    The kernel for Hopper gives the same bits as the one in Triton.
    """
    initial = shape.has_initial_state
    if hopper:
        from adjoint.ops.gated_delta.rule.hopper.state_scan import bind_segment_states

        return bind_segment_states(setup, shape, initial)
    return bind_state_scan(setup, shape, parts, segmented=True, initial=initial, saves=False, final=False)


def _bind_scans(setup: Setup, shape: Shape, parts: int, hopper: bool) -> Callable[..., None]:
    """Binds the state scan, the reverse scan, and then the gradients that are not computed beside them.

    The result is `launch(memory, upstream, v, initial_state, saved, dinitial_state, compute_gradients)`.
    """
    *_, need = setup.problem.options
    ends = {"final": shape.has_final_gradient, "initial": bool(need & NEED_STATE)}
    states = _bind_state_scan(setup, shape, parts, hopper)
    if hopper:
        from adjoint.ops.gated_delta.rule.hopper import reverse_scan as on_hopper

        scans: ModuleType = on_hopper
    else:
        scans, ends["upstream"] = reverse_scan, shape.has_output_gradient
    whole = scans.bind_reverse_scan(setup, shape, **ends)
    if shape.may_split:
        setup.add_numeric(reverse_segment=sizes.REVERSE_SEGMENT, unsplit_reverse=sizes.UNSPLIT_REVERSE)
        transitions = bind_reverse_transitions(setup, shape, parts)
        terms = scans.bind_segment_terms(setup, shape, **{key: x for key, x in ends.items() if key != "initial"})
        compose = bind_compose_reverse_transitions(setup, shape)
        segments = scans.bind_segment_scan(setup, shape, **ends)
    if shape.is_split_in_reverse:
        setup.scratch(**reverse_transition_regions(shape))
    beside = None
    if hopper and need & NEED_TOKENS and _may_compute_beside(setup, shape):
        from adjoint.ops.gated_delta.rule.hopper.gradients_beside import bind_gradients_beside

        beside = bind_gradients_beside(setup, shape, whole)
    device, is_large, may_be_whole = setup.device, shape.is_large, shape.is_packed and shape.sequences > 1

    def launch(
        memory: Memory, upstream: Upstream, v: TokenRows, initial: Tensor | None, saved: Tensor,
        dinitial: Tensor | None, compute_gradients: Callable[..., None],
    ) -> None:  # fmt: skip
        def scan_states() -> None:
            states(memory, upstream.k, v, initial, saved)

        def scan_whole() -> None:
            whole(memory, upstream, dinitial)

        # The reverse scan and the state scan do not depend on each other, and the reverse scan leaves most of the GPU
        # idle if there are few sequences. It goes first, because each of its programs needs a whole SM and would find
        # none behind those of the state scan.
        if beside:
            beside(memory, upstream, dinitial, scan_states, compute_gradients)
            return
        if not shape.is_split_in_reverse:
            run_concurrently(device, scan_whole, scan_states, worthwhile=is_large)
            compute_gradients()
            return

        def scan_whole_and_transitions() -> None:
            scan_whole()  # for the sequences that are packed with the long ones
            transitions(memory, upstream.k)

        def scan_terms() -> None:
            terms(memory, upstream, None)

        def scan_terms_and_states() -> None:
            scan_terms()
            scan_states()

        def scan_segments() -> None:
            compose(memory)
            segments(memory, upstream, dinitial)

        if may_be_whole:  # most sequences may be too short to be split
            run_concurrently(device, scan_whole_and_transitions, scan_terms_and_states, worthwhile=is_large)
            scan_segments()
        else:
            run_concurrently(device, scan_terms, scan_whole_and_transitions, worthwhile=is_large)
            run_concurrently(device, scan_segments, scan_states, worthwhile=is_large)
        compute_gradients()

    return launch


def _may_compute_beside(setup: Setup, shape: Shape) -> bool:
    """Whether gradients may be computed beside the reverse scan: for one long sequence that is scanned whole."""
    is_one = shape.sequences == 1 and not shape.is_packed and not shape.is_split_in_reverse
    return is_one and shape.time >= setup.schedule["tokens_beside"]


# ----------------------------------------------------------------------------------------------- gradients


def _bind_triton_gradients(setup: Setup, shape: Shape) -> Callable[..., None]:
    """Binds the kernels of the tokens' gradients: `launch(memory, upstream, v, outputs)`."""
    _scale, normalize, need = setup.problem.options
    upstream = shape.has_output_gradient
    matrices = gradients = gate_gradients = None
    setup.scratch(**gradient_regions(shape, need, normalize))
    if need & NEED_TOKENS:
        setup.add_numeric(sum_warps=sum_warps(shape))
        matrices = bind_matrices(setup, shape, upstream, need)
    if need & NEED_KEYS:
        gradients = bind_gradients(setup, shape, upstream, normalize, need)
    if need & (NEED_G | NEED_BETA):
        gate_gradients = bind_gate_gradients(setup, shape, upstream, need)

    def launch(memory: Memory, upstream: Upstream, v: TokenRows, outputs: tuple[Tensor, ...]) -> None:
        q, k, do, _, scale = upstream
        dq, dk, dv, dg, dbeta, _ = outputs
        if matrices:
            matrices(memory, q, k, v, do, scale, dv)
        if gradients:
            gradients(memory, q, k, do, scale, dq, dk)
        if gate_gradients:
            gate_gradients(memory, dg, dbeta)

    return launch


def _bind_hopper_gradients(setup: Setup, shape: Shape) -> Callable[..., None]:
    """Binds one kernel that computes all gradients of tokens; those that are not needed go to the workspace.

    The further arguments of a launch are about a part of a sequence: see `gradients.bind_gradients`.
    """
    from adjoint.ops.gated_delta.rule.hopper import gradients

    _scale, normalize, need = setup.problem.options
    if not need & NEED_TOKENS:
        return lambda *arguments: None
    keys, values = shape.tokens * shape.key_heads * shape.K, shape.tokens * shape.heads * shape.V
    counts = (keys, keys, values, shape.tokens * shape.heads, shape.tokens * shape.heads)
    unneeded = [None if need >> bit & 1 else f"unneeded_{name}" for bit, name in enumerate(TOKEN_GRADIENTS)]
    regions = zip(unneeded, zip(_dtypes(shape), counts, strict=True), strict=True)
    setup.scratch(**{name: region for name, region in regions if name})
    compute = gradients.bind_gradients(setup, shape, normalize)

    def launch(memory: Memory, upstream: Upstream, v: TokenRows, outputs: tuple[Tensor, ...], *part: Any) -> None:
        q, k, do, _, scale = upstream
        results = tuple([memory.tensor(name) if name else outputs[bit] for bit, name in enumerate(unneeded)])
        compute(memory, q, k, v, do, scale, results, *part)

    return launch


def _without_tokens(need: int) -> Execute:
    """The backward without tokens, heads or sizes: the gradient of the final states is that of the initial states."""

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        _do, dfinal_state, *_ = arguments
        for bit, out in enumerate(outputs):
            if need >> bit & 1:
                out.zero_()
        if need & NEED_STATE and dfinal_state is not None:
            outputs[5].copy_(dfinal_state)

    return execute
