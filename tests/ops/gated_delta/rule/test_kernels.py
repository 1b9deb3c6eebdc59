"""The plan `triton.chunked` of the forward beyond the shared checks: bits, packing, segments, memory, bad values."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.contract.inputs import Inputs, each, widened
from adjoint.core.kernels import triton_missing
from adjoint.core.launch import set_up
from adjoint.core.problem import Problem
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.packing import SEGMENT
from adjoint.ops.gated_delta.rule import guarantee, plans
from adjoint.ops.gated_delta.rule import shape as rule_shape
from adjoint.ops.gated_delta.rule.shape import is_readable, pad_to_16, token_rows
from adjoint.ops.gated_delta.values import nearly_equal, orthogonal, tokens
from tests.ops.gated_delta.rule.bound.promised import FORWARD, OUTPUTS, arguments_of, guarantees_of
from tests.ops.gated_delta.rule.kernels import CHUNKED, Kernels

KERNELS = Preference(plan="triton.chunked")


def drawn(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, **options: Any) -> Inputs:
    return tokens(shape, **options)(dtype, device, torch.Generator().manual_seed(2))  # type: ignore[arg-type]


def rule(inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    *differentiable, initial_state, cu_seqlens = inputs
    with torch.no_grad():
        return adjoint.gated_delta_rule(
            *differentiable,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            output_final_state=True,
            preference=KERNELS,
            **options,
        )


def same(got: Tensor, expected: Tensor) -> bool:
    return torch.equal(got, expected)


def part(inputs: Inputs, begin: int, end: int, state: Tensor | None) -> Inputs:
    return (*(x[:, begin:end] for x in inputs[:5]), state, None)


def inside_the_ceiling(inputs: Inputs, by_chunks: bool = True, **options: Any) -> None:
    """Within what is recorded, and within what is promised for these inputs."""
    exact, wide = reference.gated_delta_rule(*widened(inputs), by_chunks=by_chunks, **options), widened(inputs)
    scale = options.get("scale", inputs[0].shape[-1] ** -0.5)
    arguments = arguments_of(inputs, scale, options.get("normalize_qk", False))
    promises = guarantees_of(FORWARD, arguments, "triton.chunked")
    for name, got, expected in zip(OUTPUTS, rule(inputs, **options), exact, strict=True):
        assert torch.isfinite(got).all()
        measured = promises[name].error.measure(got, expected, *wide)
        assert measured.holds, (name, str(measured))
        error = (got.double() - expected).norm() / expected.norm().clamp_min(1e-30)
        assert error <= guarantee.CEILINGS[inputs[0].dtype], float(error)


# ------------------------------------------------------------------------------------------------- bits


@pytest.mark.kernels
def test_packed_sequences_are_separate_ones(device: torch.device) -> None:
    """To the bit: outputs and final states, whatever they are packed with, however unaligned they lie there."""
    bounds = (0, 0, 1, 66, 71, 141)
    inputs = drawn(device, (1, 141, 1, 2, 16, 24), cu_seqlens=bounds)
    o, final = rule(inputs)
    for number, (begin, end) in enumerate(pairwise(bounds)):
        state = inputs[5][number : number + 1]
        alone, last = rule(part(inputs, begin, end, state))
        assert same(alone, o[:, begin:end]) and same(last, final[number : number + 1])


@pytest.mark.kernels
@pytest.mark.parametrize("time", (1, 70))
def test_a_row_of_a_batch_is_the_row_alone(device: torch.device, time: int) -> None:
    inputs = drawn(device, (3, time, 1, 2, 16, 16))
    o, final = rule(inputs)
    for row in range(3):
        alone, last = rule((*(x[row : row + 1] for x in inputs[:6]), None))
        assert same(alone, o[row : row + 1]) and same(last, final[row : row + 1])


@pytest.mark.kernels
@pytest.mark.parametrize("cut", (1, 63, 64, 65, 130))
def test_a_prefix_is_the_prefix(device: torch.device, cut: int) -> None:
    inputs = drawn(device, (1, 140, 1, 1, 16, 16))
    o, _ = rule(inputs)
    assert same(rule(part(inputs, 0, cut, inputs[5]))[0], o[:, :cut])


@pytest.mark.kernels
def test_what_comes_later_changes_nothing(device: torch.device) -> None:
    inputs = drawn(device, (1, 100, 1, 1, 16, 16))
    o, _ = rule(inputs)
    changed = list(each(Tensor.clone, inputs))
    for x in changed[:5]:
        x[:, 70:] *= 0.5
    again, _ = rule(tuple(changed))
    assert same(again[:, :70], o[:, :70]) and not same(again[:, 70], o[:, 70])


@pytest.mark.kernels
@pytest.mark.parametrize("cut", (64, 128))
def test_a_cut_at_whole_chunks_is_exact(device: torch.device, cut: int) -> None:
    """A prefill in two parts, with the state carried on."""
    inputs = drawn(device, (1, 150, 1, 1, 16, 16))
    o, final = rule(inputs)
    first, between = rule(part(inputs, 0, cut, inputs[5]))
    second, last = rule(part(inputs, cut, 150, between))
    assert same(torch.cat((first, second), 1), o) and same(last, final)


@pytest.mark.kernels
def test_another_cut_is_within_the_ceiling(device: torch.device) -> None:
    inputs = drawn(device, (1, 100, 1, 1, 16, 16), torch.float16)
    o, final = rule(inputs)
    first, between = rule(part(inputs, 0, 37, inputs[5]))
    second, last = rule(part(inputs, 37, 100, between))
    for got, whole in ((torch.cat((first, second), 1), o), (last, final)):
        assert (got.double() - whole.double()).norm() <= 2 * guarantee.CEILINGS[torch.float16] * whole.double().norm()


@pytest.mark.kernels
def test_strides_and_addresses_change_nothing(device: torch.device) -> None:
    """Heads in front of tokens, columns apart, one element into memory, a slice of a wider row."""
    inputs = drawn(device, (2, 70, 2, 2, 16, 16))
    expected = rule(inputs)

    def every_other(x: Tensor) -> Tensor:
        return torch.stack((x, x), -1)[..., 0]

    def shifted(x: Tensor) -> Tensor:
        memory = x.new_empty(x.numel() + 1)
        return memory[1:].view(x.shape).copy_(x)

    def sliced(x: Tensor) -> Tensor:
        return torch.cat((x, x), -1)[..., : x.shape[-1]]

    for lay in (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), every_other, shifted, sliced):
        strided = (*map(lay, inputs[:5]), every_other(inputs[5]), None)
        for got, right in zip(rule(strided), expected, strict=True):
            assert same(got, right)


# ------------------------------------------------------------------------------------------- states


@pytest.fixture
def unsplit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are scanned as with many heads, however few there are."""
    monkeypatch.setattr(rule_shape, "FEW_HEADS", 0)
    adjoint.core.op.operator.forget()


@pytest.mark.kernels
def test_states_between_segments(device: torch.device, unsplit: None) -> None:
    """They are those that a sequence cut there ends with; places of nobody are 0."""
    bounds = (0, 3, SEGMENT + 70, SEGMENT + 71)
    *whole, state, cu_seqlens = drawn(device, (1, bounds[-1], 1, 1, 16, 16), decay=0.05, cu_seqlens=bounds)
    plan = adjoint.plan(
        adjoint.gated_delta_rule, *whole, initial_state=state, cu_seqlens=cu_seqlens, output_final_state=True,
        preference=Preference(plan="triton.chunked+eager.chunked"),
    )  # fmt: skip
    _, _, saved = plan.run(*whole, state, cu_seqlens)
    first = (*(x[:, 3 : 3 + SEGMENT] for x in whole), state[1:2], None)
    assert saved.shape[0] == 1 and same(saved[0], rule(first)[1][0])
    short = tuple(x[:, : SEGMENT + 10] for x in whole)
    bounds_of_short = torch.tensor([0, 900, SEGMENT + 10], device=device)
    out = plan.operator.allocate(*short, None, bounds_of_short, 1.0, False, True, False, True)
    for x in out:
        x.fill_(torch.nan)
    other = adjoint.plan(
        adjoint.gated_delta_rule, *short, cu_seqlens=bounds_of_short, output_final_state=True, scale=1.0,
        preference=Preference(plan="triton.chunked+eager.chunked"),
    )  # fmt: skip
    other.run(*short, None, bounds_of_short, out=out)
    assert out[2].shape[0] == 1 and not out[2].any()


@pytest.mark.kernels
def test_segments_scanned_alone_have_the_same_bits(device: torch.device) -> None:
    """What the backward computes again from saved states is what the forward had."""
    from adjoint.ops.gated_delta.rule.triton import chunk_indices, chunk_inverse, gates, state_scan

    bounds = (0, 5, SEGMENT + 80)
    inputs = drawn(device, (1, bounds[-1], 1, 1, 16, 16), decay=0.05, cu_seqlens=bounds)
    _, k, v, g, beta, state, cu_seqlens = inputs
    bound = Kernels(inputs)
    setup, shape = bound.setup, bound.shape
    memory = bound.memory(
        **chunk_indices.index_regions(shape, segments=True), **gates.gate_region(shape),
        **chunk_inverse.inverse_region(shape, 1), **state_scan.scan_regions(shape),
    )  # fmt: skip
    saved = torch.full((1, 1, 16, 16), torch.nan, device=device)
    gates.bind_gates(setup, shape, (True,), raises=True)(memory, cu_seqlens, g, beta)
    keys, values = token_rows(k), token_rows(v)
    chunk_inverse.bind_chunk_inverse(setup, shape, 1)(memory, keys)
    results = []
    for segmented in (False, True):
        for name in ("states", "new_values"):
            memory[name].fill_(torch.nan)
        scan = state_scan.bind_state_scan(
            setup, shape, 1, segmented=segmented, initial=True, saves=not segmented, final=False
        )
        scan(memory, keys, values, state, saved)
        results.append([memory[name].clone().view(torch.int16) for name in ("states", "new_values")])
    assert all(map(torch.equal, *results))


@pytest.mark.kernels
def test_a_long_sequence_of_few_heads_is_split(device: torch.device) -> None:
    """In segments of fixed length: the results of the recurrence, the bits of a prefix, those of the sequence alone."""
    bounds = (0, 3, SEGMENT + 90)
    inputs = drawn(device, (1, bounds[-1], 1, 1, 16, 16), torch.float32, decay=0.05, cu_seqlens=bounds)
    o, final = rule(inputs)
    exact = reference.gated_delta_rule(*widened(inputs), by_chunks=True)
    for got, right in zip((o, final), exact, strict=True):
        assert (got.double() - right).norm() <= guarantee.CEILINGS[torch.float32] * right.norm()
    alone, last = rule(part(inputs, 3, bounds[-1], inputs[5][1:2]))
    assert same(alone, o[:, 3:]) and same(last, final[1:2])
    short, _ = rule(part(inputs, 3, 3 + SEGMENT + 10, inputs[5][1:2]))
    assert same(short, o[:, 3 : 3 + SEGMENT + 10])


# ---------------------------------------------------------------------------------------------- inverses


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(("key_heads", "heads", "K"), ((1, 2, 128), (2, 2, 64), (1, 4, 64), (2, 6, 128)))
@pytest.mark.parametrize("keys", (None, nearly_equal), ids=("random", "nearly equal"))
def test_inverses_on_hopper(dtype: torch.dtype, key_heads: int, heads: int, K: int, keys: Any) -> None:
    """T in two parts, of the kernel for Hopper as of the portable one, to 2^-13; others are left alone."""
    from adjoint.ops.gated_delta.rule.hopper import chunk_inverse as hopper
    from adjoint.ops.gated_delta.rule.triton import chunk_indices, chunk_inverse, gates

    device = torch.device("cuda", 0)
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("for Hopper")
    options = {"cu_seqlens": (0, 0, 1, 130, 270), "decay": 0.01, "strength": (0.9, 1.0)} | (
        {"keys": keys} if keys else {}
    )
    inputs = drawn(device, (1, 270, key_heads, heads, K, 64), dtype, **options)
    q, k, _, g, beta, _, cu_seqlens = inputs
    bound = Kernels(inputs)
    setup, shape = bound.setup, bound.shape
    memory = bound.memory(
        **chunk_indices.index_regions(shape, segments=False), **gates.gate_region(shape),
        **chunk_inverse.inverse_region(shape, 2), **chunk_inverse.score_region(shape),
    )  # fmt: skip
    gates.bind_gates(setup, shape, (False,), raises=True)(memory, cu_seqlens, g, beta)
    used = memory["chunk_indices"].view(-1, 4)[:, 1] > 0
    inverses = []
    for bind in (chunk_inverse.bind_chunk_inverse, hopper.bind_inverse):
        memory["T"].fill_(torch.nan)
        bind(setup, shape, 2)(memory, token_rows(k))
        T = memory["T"].view(shape.chunks, heads, 2, 64, 64)
        assert T[~used].isnan().all() and not T[used].isnan().any()
        inverses.append(T[used].double().sum(2))
    assert hopper.fits_pairs(shape)
    # Merges lose 3·2⁻¹⁶ of their terms in either kernel (`merge` of guarantee.arithmetic_of): 2⁻¹³ for both.
    assert (inverses[1] - inverses[0]).norm() <= 2**-13 * inverses[0].norm()
    assert not inverses[1].triu().any()
    separate, joint = ({**memory, "T": memory["T"].clone(), "P": memory["P"].clone()} for _ in range(2))
    chunk_inverse.bind_scores(setup, shape)(separate, token_rows(q), token_rows(k), 0.5)
    hopper.bind_inverse_and_scores(setup, shape)(joint, token_rows(q), token_rows(k), 0.5)
    P, expected = (x["P"].view(shape.chunks, heads, 64, 64) for x in (joint, separate))
    assert P[~used].isnan().all() and torch.equal(P[used], expected[used])
    T = joint["T"][: used.numel() * heads * 4096].view(-1, heads, 64, 64)[used].double()
    # One rounding to 16 bits, of which bfloat16 loses half a unit of 2⁻⁷ at most.
    assert (T - inverses[1]).norm() <= 2**-8 * inverses[1].norm()


# ---------------------------------------------------------------------------------------- what lies where


def written_indices(device: torch.device, time: int, rows: int, bounds: tuple[int, ...] | None) -> dict[str, list[Any]]:
    """What the kernels write of sequences, chunks and segments."""
    from adjoint.ops.gated_delta.rule.triton.chunk_indices import index_regions
    from adjoint.ops.gated_delta.rule.triton.gates import bind_gates, gate_region

    g = torch.zeros(rows, time, 1, device=device)
    x = torch.zeros(rows, time, 1, 16, device=device)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device=device)
    bound = Kernels((x, x, x, g, g, None, cu_seqlens))
    shape = bound.shape
    memory = bound.memory(**index_regions(shape, segments=True), **gate_region(shape))
    bind_gates(bound.setup, shape, (True,), raises=False)(memory, cu_seqlens, g, g)
    written = {name: memory[name].tolist() for name in ("sequence_begins", "first_chunks", "first_segments")}
    for name, count in (("chunk_indices", shape.chunks), ("segment_indices", shape.segments)):
        indices = memory[name].view(-1, 4).tolist()
        assert len(indices) == count
        written[name] = [index for index in indices if index[1]]
        assert indices[: len(written[name])] == written[name], "slots without tokens come last"
    return written


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("time", "rows", "bounds"),
    (
        (70, 3, None),
        (SEGMENT + 65, 2, None),
        (SEGMENT + 200, 1, (0, 0, 3, 67, 67, SEGMENT + 100, SEGMENT + 200)),
        (300, 1, (5, 200, 70, 290)),
        (500, 1, (*range(129), 500)),
        (500, 1, (*range(300), 250, 500)),
    ),
    ids=("rows", "long rows", "packed", "out of order", "two blocks of bounds", "many"),
)
def test_where_chunks_and_segments_lie(
    device: torch.device, time: int, rows: int, bounds: tuple[int, ...] | None
) -> None:
    """In one launch or in several: what counting by hand gives."""
    written = written_indices(device, time, rows, bounds)
    unordered = [row * time for row in range(rows + 1)] if bounds is None else list(bounds)
    begins = [max(unordered[: n + 1]) for n in range(len(unordered))]
    assert written["sequence_begins"] == begins
    for size, firsts, indices in (
        (64, "first_chunks", "chunk_indices"),
        (SEGMENT, "first_segments", "segment_indices"),
    ):
        first, lying = [0], []
        for number, (begin, end) in enumerate(pairwise(begins)):
            spans = range(begin, end, size)
            lying += [[token, min(size, end - token), number, index] for index, token in enumerate(spans)]
            first.append(len(lying))
        assert written[firsts] == first and written[indices] == lying


# ------------------------------------------------------------------------------------------ extremes

EXTREMES: dict[str, tuple[tuple[int, ...], torch.dtype, dict[str, Any]]] = {
    "one token, sizes of one": ((1, 1, 1, 1, 1, 1), torch.bfloat16, {}),
    "three heads of one key": ((1, 66, 1, 3, 24, 8), torch.float16, {}),
    "no decay, full strength": ((1, 130, 1, 1, 16, 16), torch.bfloat16, {"decay": None, "strength": (1.0, 1.0)}),
    "keys nearly equal": (
        (1, 130, 1, 1, 32, 16),
        torch.float32,
        {"keys": nearly_equal, "decay": 0.01, "strength": (0.99, 1.0)},
    ),
    "orthogonal keys": ((1, 70, 1, 1, 16, 16), torch.bfloat16, {"keys": orthogonal, "strength": (1.0, 1.0)}),
    "decay that leaves nothing": ((1, 70, 1, 1, 16, 16), torch.float32, {"decay": 5000.0}),
    "no strength": ((1, 65, 1, 1, 16, 16), torch.bfloat16, {"strength": (0.0, 0.0)}),
}


@pytest.mark.kernels
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(device: torch.device, name: str) -> None:
    shape, dtype, options = EXTREMES[name]
    inside_the_ceiling(drawn(device, shape, dtype, **options), by_chunks=False)


@pytest.mark.kernels
def test_short_decays_after_a_long_one(device: torch.device) -> None:
    """Differences of a running sum of thousands keep the digits of decays of hundredths, in float32."""
    inputs = drawn(device, (1, 60, 1, 1, 16, 16), torch.float32, decay=0.05)
    inputs[3][:, 0] = -20000.7
    inside_the_ceiling(inputs, by_chunks=False)


@pytest.mark.kernels
@pytest.mark.parametrize("shape", ((0, 5, 1, 1, 2, 2), (2, 0, 1, 2, 3, 4), (1, 4, 1, 1, 0, 2), (1, 4, 1, 1, 2, 0)))
def test_sizes_of_zero(device: torch.device, shape: tuple[int, ...]) -> None:
    inputs = drawn(device, shape)
    o, final = rule(inputs)
    assert o.shape == inputs[2].shape and not o.any()
    assert same(final, inputs[5])


@pytest.mark.kernels
def test_no_sequences(device: torch.device) -> None:
    inputs = drawn(device, (1, 0, 1, 1, 16, 16), state=False)
    o, final = rule((*inputs[:6], torch.zeros(1, dtype=torch.int32, device=device)))
    assert o.shape == (1, 0, 1, 16) and final.shape == (0, 1, 16, 16)


# ----------------------------------------------------------------------------------------- bad values


@pytest.mark.gpu
def test_bounds_out_of_order_are_reported_and_put_in_order() -> None:
    """Tokens of no sequence give 0; the others are as if the bounds had been what lies within."""
    device = torch.device("cuda", 0)
    inputs = drawn(device, (1, 130, 1, 1, 16, 16), cu_seqlens=(5, 70, 60, 100))
    o, final = rule(inputs)
    with pytest.raises(adjoint.ArgumentError, match="got 5 at position 0 of cu_seqlens"):
        adjoint.check()
    right, last = rule((*(x[:, 5:100] for x in inputs[:5]), inputs[5], torch.tensor([0, 65, 65, 95], device=device)))
    assert same(o[:, 5:100], right) and same(final, last)
    assert not o[:, :5].any() and not o[:, 100:].any()


@pytest.mark.kernels
def test_a_positive_gate_is_named(device: torch.device) -> None:
    inputs = drawn(device, (1, 9, 1, 2, 16, 16))
    inputs[3][0, 4, 1] = 0.5
    with pytest.raises(adjoint.ArgumentError, match="must be at most 0, got a positive number at position 9"):
        rule(inputs)
        adjoint.check()


# -------------------------------------------------------------------------------------- what is refused


def problem(dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Problem:
    every = {"rows": 1, "time": 64, "sequences": 1, "key_heads": 1, "heads": 1, "K": 16, "V": 16, "states": 0} | sizes
    return Problem(
        "gated_delta_rule",
        torch.device("cpu"),
        (dtype,) * 3,
        "",
        tuple(every.values()),
        (1.0, False, True, False, True),
    )


@pytest.mark.parametrize(
    ("refused", "words"),
    (
        (problem(torch.float64), "float64 is for plain PyTorch"),
        (problem(time=2**31), "numbers up to 2147352576 tokens, these are 2147483648"),
        (problem(heads=2**14 + 1), "takes up to 16384 value heads, these are 16385"),
        (problem(time=2**30, heads=4096), "more programs than a launch has"),
    ),
)
def test_what_the_kernels_refuse(refused: Problem, words: str) -> None:
    assert words in plans.refuse(refused)


def test_what_can_be_read_where_it_lies() -> None:
    x = torch.empty(2, 9, 3, 32)
    assert is_readable(x) and is_readable(x[..., 16:]) and is_readable(x[:1, ::2])
    assert not is_readable(x[..., 8:24].to(torch.bfloat16)[..., 1:])  # 15 columns
    assert not is_readable(x[..., 1:17]) and not is_readable(x[:, 1:]) and not is_readable(x.transpose(2, 3))
    assert (pad_to_16(1), pad_to_16(16), pad_to_16(17), pad_to_16(256)) == (16, 16, 32, 256)


def test_the_strides_of_tokens_and_heads() -> None:
    """As they lie, 0 where they are one expanded; one alone as if there were more, so that nothing else is compiled."""
    x = torch.empty(2, 9, 3, 32)
    cases: tuple[tuple[Tensor, tuple[int, int]], ...] = (
        (x, (96, 32)),
        (x[:1, ::2], (192, 32)),
        (x[:1, :1].expand(1, 9, 3, 32), (0, 32)),
        (x[:1, :, :1].expand(1, 9, 3, 32), (96, 0)),
        (torch.empty(2, 1, 3, 32), (96, 32)),
        (torch.empty(1, 1, 3, 32), (96, 32)),
        (torch.empty(2, 9, 1, 32), (32, 32)),
    )
    for rows, expected in cases:
        assert is_readable(rows) and token_rows(rows).strides == expected, (rows.shape, rows.stride())


def test_how_a_problem_is_cut_depends_on_its_own_size_alone() -> None:
    """Not on the batch, not on the length: bits must not."""
    if triton_missing():
        pytest.skip("a setup imports Triton")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        problems = [problem(dtype, rows=rows, time=time, sequences=rows) for rows in (1, 7) for time in (1, 9999)]
        setups = [set_up(CHUNKED, one, "sm_90") for one in problems]
        assert all(setup.schedule == setups[0].schedule for setup in setups)
        assert all(setup.numeric == setups[0].numeric for setup in setups)
