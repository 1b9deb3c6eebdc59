"""`gated_delta_rule` beyond the shared checks: packing, segments, states, extremes, what is saved."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.contract.inputs import leaves
from adjoint.ops.gated_delta import packing, reference
from adjoint.ops.gated_delta.promises import BACKWARD, FORWARD
from adjoint.ops.gated_delta.rule.plans import RULE
from adjoint.ops.gated_delta.values import nearly_equal, orthogonal
from tests.ops.gated_delta.sequences import (
    BACKWARD_64,
    FORWARD_64,
    by_recurrence,
    drawn,
    gradients_of,
    relative,
    upstream_of,
)

NAMES = ("q", "k", "v", "g", "beta")


def rule(inputs, **options):
    *tokens, initial_state, cu_seqlens = inputs
    return adjoint.gated_delta_rule(
        *tokens, initial_state=initial_state, cu_seqlens=cu_seqlens, output_final_state=True, **options
    )


def compare(inputs, by_chunks: bool = True) -> None:
    """Every output and gradient against float64, inside the ceilings the plans state."""
    fresh = leaves(inputs)
    outputs = rule(fresh)
    exact, slopes = by_recurrence(inputs, by_chunks)
    gradients = gradients_of(outputs, fresh)
    is_wide = inputs[0].dtype == torch.float64
    forward, backward = (FORWARD_64, BACKWARD_64) if is_wide else (FORWARD, BACKWARD)
    for got, expected in zip(outputs, exact, strict=True):
        assert torch.isfinite(got).all()
        assert relative(got, expected) <= forward
    for got, expected in zip(gradients, slopes, strict=True):
        assert torch.isfinite(got).all()
        assert relative(got, expected) <= backward


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize(
    "cu_seqlens",
    (None, (0, 1100, 1101, 1101, 2200), (0, 40, 2200)),
    ids=("a row", "two long ones", "one past two segments"),
)
def test_segments(dtype: torch.dtype, cu_seqlens: tuple[int, ...] | None) -> None:
    compare(drawn((1, 2200, 1, 2, 4, 3), dtype, decay=0.02, cu_seqlens=cu_seqlens))


def test_rows_of_several_segments() -> None:
    compare(drawn((3, 1030, 1, 1, 3, 4), decay=0.02))


def test_groups_of_heads_and_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little is worked on at once, the result is the same."""
    inputs = drawn((1, 260, 2, 4, 4, 3), cu_seqlens=(0, 100, 101, 103, 200, 260))
    expected = rule(inputs)
    monkeypatch.setattr(packing, "_ROWS", 64)
    for got, whole in zip(rule(inputs), expected, strict=True):
        assert relative(got, whole) < FORWARD_64
    compare(inputs)


def test_lengths_of_every_kind_packed() -> None:
    lengths = (0, 1, 2, 63, 64, 65, 0, 7, 128, 31, 33, 1, 1)
    bounds = torch.tensor((0, *lengths)).cumsum(0).tolist()
    compare(drawn((1, bounds[-1], 1, 2, 5, 4), cu_seqlens=tuple(bounds)))


def test_packed_is_separate() -> None:
    bounds = (0, 5, 70, 70, 140)
    q, k, v, g, beta, state, cu_seqlens = drawn((1, 140, 1, 2, 6, 4), cu_seqlens=bounds)
    o, final = rule((q, k, v, g, beta, state, cu_seqlens))
    for number, (begin, end) in enumerate(pairwise(bounds)):
        part = (x[:, begin:end] for x in (q, k, v, g, beta))
        alone, last = rule((*part, state[number : number + 1], None))
        assert relative(alone, o[:, begin:end]) < FORWARD_64 and relative(last, final[number : number + 1]) < FORWARD_64


def test_more_sequences_than_a_grid_has_programs() -> None:
    """70,000 sequences, all of them one token or none, and their gradients."""
    number = 70_000
    lengths = torch.arange(number) % 3 != 1
    bounds = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.long().cumsum(0)))
    time = int(bounds[-1])
    q, k, v, g, beta = (x.requires_grad_() for x in drawn((1, time, 1, 1, 2, 2), state=False)[:5])
    o, final = rule((q, k, v, g, beta, None, bounds))
    dots = (q * k).sum(-1)
    assert relative(o, 2**-0.5 * dots[..., None] * beta[..., None] * v) < FORWARD_64
    full = k[0, :, 0, :, None] * (beta[0, :, 0, None] * v[0, :, 0])[:, None]
    assert relative(final[lengths, 0], full) < FORWARD_64 and not final[~lengths].any()
    (dbeta,) = torch.autograd.grad(o.sum(), beta)
    assert relative(dbeta, 2**-0.5 * dots * v.sum(-1)) < FORWARD_64


@pytest.mark.parametrize("used", ("o", "final_state"))
def test_an_output_may_be_unused(used: str) -> None:
    inputs = drawn((1, 70, 1, 2, 4, 3))
    first, other = leaves(inputs), leaves(inputs)
    index = ("o", "final_state").index(used)
    output = rule(first)[index]
    exact = reference.gated_delta_rule(*other)[index]
    got = torch.autograd.grad(output, first[:6], upstream_of(output), allow_unused=True)
    expected = torch.autograd.grad(exact, other[:6], upstream_of(exact), allow_unused=True)
    for name, mine, theirs in zip((*NAMES, "initial_state"), got, expected, strict=True):
        theirs = torch.zeros_like(mine) if theirs is None else theirs
        assert (mine - theirs).norm() <= BACKWARD_64 * (1 + theirs.norm()), name


def test_without_a_final_state() -> None:
    *tokens, _, _ = drawn((2, 9, 1, 1, 4, 4))
    o, final = adjoint.gated_delta_rule(*tokens)
    assert final is None
    leaf = tokens[2].clone().requires_grad_()
    again, final = adjoint.gated_delta_rule(*tokens[:2], leaf, *tokens[3:])
    assert final is None and torch.equal(o, again)
    again.sum().backward()
    assert leaf.grad is not None


@pytest.mark.parametrize("cut", (1, 64, 65, 128, 199))
def test_a_prefill_in_two_parts(cut: int) -> None:
    """The state carries on: cuts at whole chunks and elsewhere alike, up to rounding."""
    inputs = drawn((1, 200, 1, 2, 8, 8), torch.float32)
    whole, final = rule(inputs)
    *tokens, state, _ = inputs
    first, between = rule((*(x[:, :cut] for x in tokens), state, None))
    second, last = rule((*(x[:, cut:] for x in tokens), between, None))
    assert relative(torch.cat((first, second), 1), whole) < 2 * FORWARD
    assert relative(last, final) < 2 * FORWARD


def test_the_future_is_not_seen() -> None:
    inputs = list(drawn((1, 150, 1, 1, 8, 4)))
    before, _ = rule(inputs)
    for index in range(5):
        inputs[index] = inputs[index].clone()
        inputs[index][:, 70:] *= 0.5
    after, _ = rule(inputs)
    assert relative(after[:, :70], before[:, :70]) < FORWARD_64
    assert not torch.equal(after[:, 70], before[:, 70])


EXTREMES = {
    "one token": ((1, 1, 1, 1, 1, 1), {}),
    "one more than a chunk": ((2, 65, 1, 1, 3, 3), {}),
    "largest heads": ((1, 70, 1, 1, 256, 256), {}),
    "no decay, full strength": ((1, 200, 1, 1, 16, 8), {"decay": None, "strength": (1.0, 1.0)}),
    "keys nearly equal": ((1, 300, 1, 1, 32, 8), {"keys": nearly_equal, "decay": 0.01, "strength": (0.99, 1.0)}),
    "orthogonal keys": ((1, 100, 1, 1, 16, 8), {"keys": orthogonal, "strength": (1.0, 1.0)}),
    "decay that leaves nothing": ((1, 100, 1, 1, 8, 8), {"decay": 5000.0}),
    "decay that leaves little": ((1, 200, 1, 1, 8, 8), {"decay": 5.0}),
    "no strength": ((1, 70, 1, 1, 4, 4), {"strength": (0.0, 0.0)}),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name: str) -> None:
    shape, options = EXTREMES[name]
    compare(drawn(shape, torch.float32, **options), by_chunks=False)


def test_short_decays_after_a_long_one() -> None:
    """Differences of a running sum of thousands keep the digits of decays of hundredths."""
    inputs = drawn((1, 60, 1, 1, 8, 8), torch.float32, decay=0.05)
    inputs[3][:, 0] = -20000.7
    compare(inputs, by_chunks=False)


@pytest.mark.parametrize(
    "shape", ((0, 5, 1, 1, 2, 2), (2, 0, 1, 2, 3, 4), (1, 4, 0, 0, 2, 2), (1, 4, 1, 1, 0, 2), (1, 4, 1, 1, 2, 0))
)
def test_sizes_of_zero(shape: tuple[int, ...]) -> None:
    inputs = leaves(drawn(shape))
    o, final = rule(inputs)
    assert o.shape == inputs[2].shape
    if o.requires_grad:
        for gradient, x in zip(torch.autograd.grad((o.sum() + final.sum()), inputs[:6]), inputs, strict=False):
            assert gradient.shape == x.shape


def test_what_is_saved_for_the_backward() -> None:
    """The inputs, and a state between any 1024 tokens of a head and the next: 64 bytes for each token and head at
    K = V = 128."""
    inputs = leaves(drawn((1, 2048, 1, 2, 16, 16), torch.float32, state=False))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        rule(inputs)
    addresses = {x.data_ptr() for x in inputs if x is not None}
    beside = [x for x in saved if x.data_ptr() not in addresses and x.numel()]
    assert [tuple(x.shape) for x in beside] == [(1, 2, 16, 16)]
    assert packing.SEGMENT == 1024 and 128 * 128 * 4 / packing.SEGMENT == 64


def test_compiled_with_packed_sequences() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: rule(x), fullgraph=True, dynamic=True, backend="aot_eager")
    for bounds in ((0, 3, 20), (0, 0, 9, 33, 70)):
        inputs = leaves(drawn((1, bounds[-1], 1, 2, 4, 4), cu_seqlens=bounds))
        outputs, expected = compiled(*inputs), rule(inputs)
        for got, right in zip(
            (*outputs, *gradients_of(outputs, inputs)), (*expected, *gradients_of(expected, inputs)), strict=True
        ):
            assert torch.equal(got, right)
    torch._dynamo.reset()


def test_compiled_without_a_final_state() -> None:
    """Its gradient, which a compiler makes zeros of, is not one."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: adjoint.gated_delta_rule(*x)[0], fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for time in (5, 70):
        inputs = leaves(drawn((1, time, 1, 2, 4, 4), state=False))[:5]
        gradients = torch.autograd.grad(compiled(*inputs).sum(), inputs)
        for got, right in zip(
            gradients, torch.autograd.grad(adjoint.gated_delta_rule(*inputs)[0].sum(), inputs), strict=True
        ):
            assert torch.equal(got, right)
    torch._dynamo.reset()


def test_a_plan_from_shapes_alone() -> None:
    tokens = [x.to("meta") for x in drawn((1, 5, 1, 2, 4, 4), torch.bfloat16)[:5]]
    with torch.autocast("cpu", dtype=torch.float16):
        plan = adjoint.plan(adjoint.gated_delta_rule, *tokens, device="cpu")
    assert (plan.name, plan.adjoint.name) == ("eager.chunked", "eager.chunked")
    assert plan.guarantee["o"].repeatable and not plan.guarantee["o"].batch_invariant


def test_kernels_are_refused_on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = [torch.empty(1, 64, 2, 32, device="meta") for _ in range(3)]
    gates = [torch.empty(1, 64, 2, device="meta") for _ in range(2)]
    problem = adjoint.plan(adjoint.gated_delta_rule, *meta, *gates).problem._replace(device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    reasons = {plan.name: plan.why_not_on(problem.device) for plan in RULE if plan.backend == "triton"}
    assert reasons == {"gluon.fused": "is for sm_90 alone", "triton.chunked": "its kernels are for NVIDIA GPUs"}


def test_outputs_and_gradients_into_memory_of_the_caller() -> None:
    *tokens, state, _ = drawn((1, 70, 1, 2, 4, 3), torch.float32)
    plan = adjoint.plan(adjoint.gated_delta_rule, *tokens, initial_state=state, output_final_state=True)
    expected = plan.run(*tokens, state, None)
    out = tuple(torch.full_like(x, torch.nan) for x in expected)
    plan.run(*tokens, state, None, out=out)
    assert all(map(torch.equal, out, expected))
    upstream = tuple(map(torch.ones_like, expected[:2]))
    gradients = plan.adjoint.run(*upstream, *tokens, state, None, expected[2])
    assert [x.shape for x in gradients] == [x.shape for x in (*tokens, state)]


def test_bounds_in_32_bits() -> None:
    *inputs, bounds = drawn((1, 20, 1, 1, 4, 4), cu_seqlens=(0, 7, 20))
    for got, expected in zip(rule((*inputs, bounds.int())), rule((*inputs, bounds)), strict=True):
        assert torch.equal(got, expected)


def test_nothing_in_between_is_larger_than_a_block() -> None:
    starts, lengths = packing.bounds(8, 5000, None, raises=False)
    for group in packing.groups(starts, lengths, 16, 32):
        assert len(group.sequences) * min(packing.SEGMENT, 5000) * group.heads * 2 <= packing._ROWS


def test_saved_states_never_share_a_place() -> None:
    bounds = torch.tensor((0, 1023, 3100, 3101, 5150, 5150, 9000))
    places = [
        place
        for group in packing.groups(*packing.bounds(1, 9000, bounds, raises=True), 1, 1)
        for segment in range(1, group.segments)
        for place in group.saved(segment, torch.device("cpu")).tolist()
    ]
    assert len(set(places)) == len(places) == sum(-(-int(n) // 1024) - 1 for n in bounds.diff() if n)
    assert max(places) < packing.saved_states(9000)
