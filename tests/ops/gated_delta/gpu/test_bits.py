"""Bits of the gated delta rule on a GPU: of packed sequences, rows, prefixes and resets, and under load."""

from itertools import pairwise
from typing import Any

import pytest
import torch

import adjoint
from adjoint.contract.inputs import as_tuple
from adjoint.ops.gated_delta.packing import CHUNK, SEGMENT
from tests.ops.gated_delta.gpu.examples import (
    BFLOAT16,
    EIGHT,
    FEW,
    MANY,
    OUTPUTS,
    SMALLER,
    Example,
    both_scans,
    drawn,
    every_plan,
    exact_results,
    forward,
    inside,
    named,
    of_sequence,
    plan_of,
    preference_for,
    results,
    same,
)

pytestmark = pytest.mark.gpu


@every_plan
@both_scans
@pytest.mark.parametrize("options", ({}, SMALLER), ids=("128", "64"))
def test_packed_sequences_are_separate_ones(
    device: torch.device, name: str, heads: tuple[int, int], options: dict[str, Any]
) -> None:
    """Five sequences of many heads are scanned with all of V in a program, one alone in halves, or in stretches."""
    bounds = (0, 0, 1, 66, 1200, 5400)
    example = drawn(device, bounds[-1], heads, bounds=bounds, **options)
    plan_of(name, example)
    batch = results(preference_for(name), example)
    for number, (begin, end) in enumerate(pairwise(bounds)):
        alone = results(preference_for(name), example.of(begin, end, number))
        assert same(alone, of_sequence(batch, number, begin, end)), (begin, end)


@every_plan
@pytest.mark.parametrize("heads", (FEW, EIGHT), ids=("4 heads", "8 heads"))
def test_gradients_pass_through_segments(device: torch.device, name: str, heads: tuple[int, int]) -> None:
    """Weak tokens that hardly decay, so that most of a state, and of its gradient, passes through thousands of them:
    within what is stated, and each sequence as if alone, those that are split and those that are not."""
    bounds = (0, 700, 700, 17800, 21896, 30088, 30189)
    example = drawn(device, bounds[-1], heads, bounds=bounds, decay=2e-5)
    example = example._replace(beta=example.beta * 0.01)
    plan = plan_of(name, example)
    answers, exact = results(preference_for(name), example), named(exact_results(example))
    passed = exact["dinitial_state"][2].norm() / example.dfinal[2].norm()
    assert passed > 0.1, "the gradient of the longest initial state has much of the final state's"
    inside(plan, named(answers), exact, example)
    assert torch.equal(named(answers)["dinitial_state"][1], example.dfinal[1])
    for number, (begin, end) in enumerate(pairwise(bounds)):
        alone = results(preference_for(name), example.of(begin, end, number))
        assert same(alone, of_sequence(answers, number, begin, end)), (begin, end)


@every_plan
@both_scans
def test_a_row_of_a_batch_is_the_row_alone(device: torch.device, name: str, heads: tuple[int, int]) -> None:
    example = drawn(device, 1500, heads, rows=5)
    plan_of(name, example)
    batch = results(preference_for(name), example)
    for row in (0, 4):
        alone = results(preference_for(name), example.of(0, 1500, row, row))
        assert same(alone, tuple(x[row : row + 1] for x in batch)), row


@every_plan
@both_scans
def test_prefixes_and_causality(device: torch.device, name: str, heads: tuple[int, int]) -> None:
    """The output of a prefix is the prefix of the output, and nothing that comes later changes it."""
    example = drawn(device, 5000, heads)
    plan_of(name, example)
    o, _ = forward(preference_for(name), example)
    for cut in (1, 64, 1000, 1025, 2048, 2500, 4096, 4500):
        short, _ = forward(preference_for(name), example.of(0, cut, 0))
        assert torch.equal(short, o[:, :cut]), cut
    for cut in (63, 1024, 1777, 2999, 4999):
        changed = example._replace(**{key: x.clone() for key, x in zip(Example._fields, example.tokens, strict=False)})
        for x in changed.tokens:
            x[:, cut:] *= 0.5
        again, _ = forward(preference_for(name), changed)
        assert torch.equal(again[:, :cut], o[:, :cut]) and not torch.equal(again[:, cut:], o[:, cut:]), cut


@pytest.mark.parametrize("bounds", (None, (0, 70, 70, 2900, 3000)), ids=("one sequence", "packed"))
def test_every_scan_for_hopper_has_the_same_bits(device: torch.device, bounds: tuple[int, ...] | None) -> None:
    """In halves, with all of V in a program, and in stretches from states ahead; saved states too."""
    example = drawn(device, 3000, MANY, bounds=bounds)
    plan = plan_of("gluon.fused", example)
    many = 2**20
    schedules = (
        {"spans_in_halves": many, "spans_ahead": 1},
        {"spans_in_halves": 1, "spans_ahead": 1},
        {"spans_ahead": many, "tokens_ahead": 1, "tokens_apart": 1},
    )
    scans = [as_tuple(plan.with_schedule(**parameters).run(*example[:7])) for parameters in schedules]
    assert all(same(scan, scans[0]) for scan in scans[1:])


def test_gradients_beside_the_reverse_scan_have_the_bits_of_single_launches(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sizes that long sequences have, from one chunk to all but one."""
    example = drawn(device, 9001, MANY, decay=0.01)
    plan_of("gluon.fused", example)
    from adjoint.ops.gated_delta.rule.hopper import gradients_beside

    answers = [results(preference_for("gluon.fused"), example)]
    for sizes in ((0, 0), (1, 1), (75, 33), (140, 140)):
        monkeypatch.setattr(gradients_beside, "sizes_of", lambda *_, sizes=sizes: gradients_beside.Sizes(*sizes))
        answers.append(results(preference_for("gluon.fused"), example))
    assert all(same(answer, answers[0]) for answer in answers[1:])


@every_plan
@both_scans
def test_resets_change_no_bit_before_them_and_have_no_gradient(
    device: torch.device, name: str, heads: tuple[int, int]
) -> None:
    """Nor do very low gates, whose results are those of −inf."""
    example = drawn(device, 1500, heads)
    plan_of(name, example)
    before = named(results(preference_for(name), example))
    resets = [100, 101, 1100]
    after = []
    for value in (-torch.inf, -1e30, torch.finfo(torch.float32).min, -104.5):
        g = example.g.clone()
        g[:, resets] = value
        after.append(results(preference_for(name), example._replace(g=g)))
        assert same(after[-1], after[0]), value
    answers = named(after[0])
    assert torch.equal(answers["o"][:, :100], before["o"][:, :100]) and not answers["dg"][:, resets].any()


@every_plan
@both_scans
def test_nan_stays_within_its_chunk_and_after(device: torch.device, name: str, heads: tuple[int, int]) -> None:
    """Chunks before it, other sequences, and their gradients keep every bit; a query reaches its own output alone."""
    bounds, token, begin, end = (0, 200, 1500, 1700), 1300, 200 + 17 * CHUNK, 1500
    example = drawn(device, 1700, heads, bounds=bounds)
    plan_of(name, example)
    right = results(preference_for(name), example)
    for names in (("k", "v", "g", "beta"), ("q",)):
        changes = {key: x.clone() for key, x in zip(Example._fields, example.tokens, strict=False) if key in names}
        for x in changes.values():
            x[:, token] = torch.nan
        got = results(preference_for(name), example._replace(**changes))
        elsewhere = torch.ones(1700, dtype=torch.bool, device=device)
        elsewhere[slice(token, token + 1) if names == ("q",) else slice(begin, end)] = False
        assert got[0][:, token].isnan().all() and torch.equal(got[0][:, elsewhere], right[0][:, elsewhere])
        for number in (0, 2):
            whose = number, bounds[number], bounds[number + 1]
            assert same(of_sequence(got, *whose), of_sequence(right, *whose)), (names, number)


@every_plan
def test_a_prefill_in_checking_mode_is_recorded_in_a_graph(device: torch.device, name: str) -> None:
    """NaN in g, a beta above 1 and long keys are reported by each replay, and change nothing otherwise."""
    example = drawn(device, 300, MANY)
    plan_of(name, example)
    expected = forward(preference_for(name), example)
    with adjoint.checked():
        forward(preference_for(name), example)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = forward(preference_for(name), example)
    graph.replay()
    adjoint.check()
    assert same(recorded, expected)
    places = (("g", torch.nan, "got NaN at position 323 "), ("beta", 1.25, "from 0 to 1.* position 323 "))
    for key, value, words in (*places, ("k", 1.0, "the state grow at position ")):
        tensor = getattr(example, key)
        before = tensor.clone()
        if key == "k":
            tensor[:, 20] = value  # 128 of them
        else:
            tensor[0, 20, 3] = value
        graph.replay()
        with pytest.raises(adjoint.ArgumentError, match=words):
            adjoint.check()
        tensor.copy_(before)


@every_plan
@both_scans
def test_a_prefill_cut_in_two(device: torch.device, name: str, heads: tuple[int, int]) -> None:
    """After whole chunks it keeps its bits, where it is not one that is split. Any other cut gives what is within the
    ceiling of the exact result as the whole is, so the two are within twice of it."""
    time = 2500
    example = drawn(device, time, heads)
    plan = plan_of(name, example)
    whole = forward(preference_for(name), example)
    for cut in (CHUNK, 3 * CHUNK, SEGMENT, 2 * SEGMENT, 1, 777, 1025):
        first, between = forward(preference_for(name), example.of(0, cut, 0))
        second, last = forward(preference_for(name), example.of(cut, time, 0)._replace(state=between))
        parts = torch.cat((first, second), 1), last
        if heads == MANY and cut % CHUNK == 0:
            assert same(parts, whole), cut
        for key, got, expected in zip(OUTPUTS, parts, whole, strict=True):
            measured = plan.guarantee[key].recorded.measure(got, expected.double())
            assert measured.value <= 2 * measured.limit, (key, cut, str(measured))
    short = forward(preference_for(name), example.of(0, SEGMENT, 0))
    first, between = forward(preference_for(name), example.of(0, 5 * CHUNK, 0))
    second, last = forward(preference_for(name), example.of(5 * CHUNK, SEGMENT, 0)._replace(state=between))
    assert same((torch.cat((first, second), 1), last), short), "a sequence of one segment is never split"


@every_plan
@both_scans
def test_bits_repeat_while_another_stream_loads_the_gpu(
    device: torch.device, name: str, heads: tuple[int, int]
) -> None:
    example = drawn(device, 2048 if heads == MANY else 3000, heads)
    plan_of(name, example)
    first = results(preference_for(name), example)
    load, side = torch.randn(4096, 4096, dtype=BFLOAT16, device=device), torch.cuda.Stream(device)
    for repeat in range(100):
        with torch.cuda.stream(side):
            torch.mm(load, load)
        assert same(results(preference_for(name), example), first), repeat
