"""The state scan over segments on Hopper: its states and v' beside those in Triton and of the recurrence in float64."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint.contract.inputs import Inputs
from adjoint.core.kernels import triton_missing
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.rule import guarantee, plans
from adjoint.ops.gated_delta.rule.shape import token_rows
from tests.ops.gated_delta.rule.kernels import Kernels
from tests.ops.gated_delta.rule.test_backward import FORWARD, drawn
from tests.ops.gated_delta.rule.test_gradients_hopper import CANDIDATE, FUSED, hopper

PACKED = (0, 0, 1, 66, 194, 2300, 2300)
"""Sequences without tokens, of one, of one more than a chunk, of two chunks, and of more than two segments."""

SHAPES: tuple[tuple[tuple[int, ...], torch.dtype, dict[str, Any]], ...] = (
    ((2, 200, 2, 4, 128, 128), torch.bfloat16, {}),
    ((1, 2300, 2, 4, 128, 128), torch.bfloat16, {"cu_seqlens": PACKED}),
    ((1, 1100, 1, 4, 64, 64), torch.float16, {"state": False}),
    ((1, 333, 1, 3, 128, 64), torch.float16, {}),
    ((1, 130, 2, 2, 64, 128), torch.bfloat16, {"state": False}),
)

every_shape = pytest.mark.parametrize(("shape", "dtype", "options"), SHAPES)


def scanned(inputs: Inputs, on_hopper: bool) -> tuple[Tensor, Tensor]:
    """Sᵀ at the start of every chunk [chunks, H, V, K] and its v'ᵀ [chunks, H, V, 64], from poisoned memory."""
    from adjoint.ops.gated_delta.rule.hopper.chunk_inverse import bind_inverse
    from adjoint.ops.gated_delta.rule.hopper.state_scan import bind_segment_states
    from adjoint.ops.gated_delta.rule.triton.chunk_indices import index_regions
    from adjoint.ops.gated_delta.rule.triton.chunk_inverse import inverse_region
    from adjoint.ops.gated_delta.rule.triton.gates import bind_gates, gate_region
    from adjoint.ops.gated_delta.rule.triton.state_scan import bind_state_scan, scan_regions

    _, k, v, g, beta, state, cu_seqlens = inputs
    _, _, saved = FORWARD.launch((*inputs, 0.5, False, False, False, True), FUSED)
    bound = Kernels(inputs, CANDIDATE, "gated_delta_rule_backward")
    setup, shape = bound.setup, bound.shape
    memory = bound.memory(
        **index_regions(shape, segments=True), **gate_region(shape), **inverse_region(shape, 2), **scan_regions(shape)
    )
    bind_gates(setup, shape, (True,), raises=False)(memory, cu_seqlens, g, beta)
    bind_inverse(setup, shape, 2)(memory, token_rows(k))
    initial = state is not None
    if on_hopper:
        scan = bind_segment_states(setup, shape, initial)
    else:
        scan = bind_state_scan(setup, shape, 2, segmented=True, initial=initial, saves=False, final=False)
    scan(memory, token_rows(k), token_rows(v), state, saved)
    states, new_values = memory["states"], memory["new_values"]
    return states.view(-1, shape.heads, shape.V, shape.K), new_values.view(-1, shape.heads, shape.V, CHUNK)


def bits(x: Tensor) -> Tensor:
    """Which can be compared where there are no numbers."""
    return x.view(torch.int16)


def sequences(inputs: Inputs) -> list[tuple[Inputs, int]]:
    """Each sequence alone, in order, and the chunks of those before it."""
    *tokens, state, cu_seqlens = inputs
    rows, time = tokens[0].shape[:2]
    bounds = range(0, (rows + 1) * time, time) if cu_seqlens is None else cu_seqlens.tolist()
    every, chunks = [], 0
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if end > begin:
            alone = [x.flatten(0, 1)[None, begin:end] for x in tokens]
            every.append(((*alone, None if state is None else state[number : number + 1], None), chunks))
            chunks += -(-(end - begin) // CHUNK)
    return every


def recurrence(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """What one sequence has, token by token in float64."""
    _, k, v, g, beta, state, _ = inputs
    heads = v.shape[2]
    keys = k[0].double().repeat_interleave(heads // k.shape[2], 1)
    S = torch.zeros(heads, k.shape[3], v.shape[3], dtype=torch.float64, device=k.device)
    S = S if state is None else state[0].double()
    states, new_values = [], []
    for token, (key, value, decay, strength) in enumerate(
        zip(keys, v[0].double(), g[0].double().exp(), beta[0].double(), strict=True)
    ):
        if token % CHUNK == 0:
            states.append(S.mT)
        S = S * decay[:, None, None]
        new_values.append(strength[:, None] * (value - torch.einsum("hkv,hk->hv", S, key)))
        S = S + torch.einsum("hk,hv->hkv", key, new_values[-1])
    return torch.stack(states), torch.stack(new_values, -1)


@pytest.mark.parametrize(("sequences", "heads", "V"), ((1, 32, 128), (2, 32, 64), (3, 48, 128), (1, 8, 128)))
def test_which_scans_are_bound(sequences: int, heads: int, V: int) -> None:
    """Those for Hopper, whatever the number of programs; but for the transitions of segments."""
    if triton_missing():
        pytest.skip("kernels are chosen by a module that imports Triton")
    from adjoint.core.launch import set_up

    sizes = (sequences, 4096, sequences, heads // 2, heads, 128, V, 0, 0, 1)
    dtypes = (torch.bfloat16, torch.float32, torch.float32)
    problem = Problem("gated_delta_rule_backward", torch.device("cuda", 0), dtypes, "", sizes, (1.0, False, 31))

    def scans(candidate: Candidate) -> set[str]:
        """The kernels of scans that a plan binds, but for transitions."""
        launches = set_up(candidate, problem, "sm_90").launches
        names = {launch.kernel.name for launch in launches if not launch.settings.get("TRANSITION")}
        return {name for name in names if "_scan" in name}

    assert scans(CANDIDATE) == {"rule_state_scan_hopper", "rule_reverse_scan_hopper"}
    (chunked,) = (candidate for candidate in plans.RULE_BACKWARD if candidate.name == "triton.chunked")
    assert scans(chunked) == {"rule_state_scan", "rule_reverse_scan"}


# ---------------------------------------------------------------------------------------------- on Hopper


@hopper
@pytest.mark.kernels
@every_shape
def test_bits_are_those_of_the_scan_in_triton(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Of all memory: neither leaves a place of a chunk as it was, nor writes any other."""
    inputs = drawn(device, shape, dtype, **options)
    on_hopper, in_triton = scanned(inputs, on_hopper=True), scanned(inputs, on_hopper=False)
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(on_hopper, in_triton, strict=True))


@hopper
@pytest.mark.kernels
@every_shape
def test_states_and_values(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Within what is stated of the op; and past the end of a sequence v' is 0."""
    inputs = drawn(device, shape, dtype, **options)
    states, new_values = scanned(inputs, on_hopper=True)
    for alone, chunk in sequences(inputs):
        expected_states, expected_new = recurrence(alone)
        chunks, tokens = len(expected_states), expected_new.shape[-1]
        values = new_values[chunk : chunk + chunks].permute(1, 2, 0, 3).flatten(2)
        for got, expected in ((states[chunk : chunk + chunks], expected_states), (values[..., :tokens], expected_new)):
            error = float((got.double() - expected).norm())
            assert error <= guarantee.CEILINGS[dtype] * float(expected.norm()), (chunk, error)
        assert bool((values[..., tokens:] == 0).all())


@hopper
@pytest.mark.kernels
def test_packed_sequences_are_separate_ones(device: torch.device) -> None:
    shape, dtype, options = SHAPES[1]
    inputs = drawn(device, shape, dtype, **options)
    packed = scanned(inputs, on_hopper=True)
    for alone, chunk in sequences(inputs):
        for one, all_ in zip(scanned(alone, on_hopper=True), packed, strict=True):
            assert torch.equal(bits(one), bits(all_[chunk : chunk + len(one)]))


@hopper
@pytest.mark.kernels
def test_bits_repeat(device: torch.device) -> None:
    shape, dtype, options = SHAPES[1]
    inputs = drawn(device, shape, dtype, **options)
    first = scanned(inputs, on_hopper=True)
    for _ in range(20):
        again = scanned(inputs, on_hopper=True)
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(first, again, strict=True))
