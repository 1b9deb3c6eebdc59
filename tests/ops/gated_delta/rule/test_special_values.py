"""`gated_delta_rule` at the edge of its values: resets of the state, what NaN reaches, and what `checked()` reports.

Each test runs in plain PyTorch, and on the portable kernels where there is an interpreter or a GPU.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.contract.inputs import Inputs, each, leaves, widened
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.arguments import RESET
from adjoint.ops.gated_delta.values import gradients, tokens
from tests.ops.gated_delta.sequences import upstream_of

EAGER, KERNELS = "eager.chunked", "triton.chunked"
PLANS = (EAGER, pytest.param(KERNELS, marks=pytest.mark.kernels))
SHAPE = (1, 150, 1, 1, 16, 16)
LEAST = torch.finfo(torch.float32).min


def drawn(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...] = SHAPE, **options: Any) -> Inputs:
    make = tokens(shape, **{"decay": 0.05, **options})  # type: ignore[arg-type]
    return make(dtype, device, torch.Generator().manual_seed(4))


def with_gates(inputs: Inputs, at: Any, value: float) -> Inputs:
    """Other log decays at some tokens."""
    g = inputs[3].clone()
    g[:, at] = value
    return (*inputs[:3], g, *inputs[4:])


def results(
    inputs: Inputs, plan: str, lost: tuple[int, Any, float] | None = None, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients. `lost` is a number in the upstream gradient: of which output, where, and its value."""
    fresh = leaves(inputs)
    *differentiable, state, cu_seqlens = fresh
    outputs = adjoint.gated_delta_rule(
        *differentiable, initial_state=state, cu_seqlens=cu_seqlens, output_final_state=True,
        preference=Preference(plan=f"{plan}+{plan}"), **options,
    )  # fmt: skip
    sources = [x for x in fresh[:6] if x is not None]
    upstream = [upstream_of(x.cpu()).to(x) for x in outputs]
    if lost is not None:
        output, at, value = lost
        upstream[output][at] = value
    slopes = torch.autograd.grad(outputs, sources, upstream)
    return [x.detach() for x in outputs], list(slopes)


def assert_right(inputs: Inputs, plan: str) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients, all within what the plan promises for these inputs, and what is recorded of others."""
    outputs, slopes = results(inputs, plan)
    *differentiable, state, cu_seqlens = inputs
    chosen = adjoint.plan(
        adjoint.gated_delta_rule, *differentiable, initial_state=state, cu_seqlens=cu_seqlens, output_final_state=True,
        preference=Preference(plan=f"{plan}+{plan}"),
    )  # fmt: skip
    promises = {**chosen.guarantee, **chosen.adjoint.guarantee}
    exact_inputs = widened(each(Tensor.cpu, inputs))
    upstream = [upstream_of(x.cpu()).to(x.dtype).double() for x in outputs]
    exact = *reference.gated_delta_rule(*exact_inputs), *gradients(reference.gated_delta_rule)(*upstream, *exact_inputs)
    names = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
    for name, got, right in zip(names, (*outputs, *slopes), exact, strict=False):
        assert torch.isfinite(got).all(), name
        arguments = exact_inputs if name in chosen.guarantee else (*upstream, *exact_inputs)
        for statement in (promises[name].error, promises[name].recorded):
            measured = statement.measure(got.cpu(), right, *arguments)
            assert measured.holds, (name, measured)
    return outputs, slopes


# ------------------------------------------------------------------------------------------------ resets

WHERE: dict[str, Any] = {
    "the first token": [0],
    "the last token": [149],
    "the first of a chunk": [64],
    "the last of a chunk": [63],
    "several of a chunk": [66, 67, 68, 90],
    "most of a chunk": list(range(64, 112)),
    "every token": list(range(150)),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
def test_minus_infinity_resets_the_state(
    device: torch.device, dtype: torch.dtype, where: str, plan: str, everything: bool
) -> None:
    """The recurrence, dg = 0 there, and not a bit of another token before it."""
    if plan == KERNELS and dtype == torch.float64:
        pytest.skip("float64 is for plain PyTorch")
    interprets = plan == KERNELS and device.type == "cpu"
    if interprets and not everything and dtype != torch.float32 and where != "most of a chunk":
        pytest.skip("the interpreter takes long: of 16-bit types, where sums are longest; all with --all")
    inputs = drawn(device, dtype)
    (o, _), slopes = assert_right(with_gates(inputs, WHERE[where], -torch.inf), plan)
    assert not slopes[3][:, WHERE[where]].any()
    first = min(WHERE[where])
    assert torch.equal(o[:, :first], ordinary(device, dtype, plan)[0][0][:, :first])


@lru_cache
def ordinary(device: torch.device, dtype: torch.dtype, plan: str) -> tuple[list[Tensor], list[Tensor]]:
    """Results without a reset."""
    return results(drawn(device, dtype), plan)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("value", (-104.5, -1000.0, -1e30, LEAST))
def test_a_very_low_gate_is_a_reset(device: torch.device, value: float, plan: str) -> None:
    """Sums of it overflow, or have no digits left for later tokens; the results are those of −inf, to the bit."""
    inputs = drawn(device, torch.float32, (1, 80, 1, 1, 16, 16))
    low, reset = (with_gates(inputs, [3, 70, 71], number) for number in (value, -torch.inf))
    outputs, slopes = assert_right(low, plan)
    outputs_of_reset, slopes_of_reset = results(reset, plan)
    assert all(map(torch.equal, (*outputs, *slopes), (*outputs_of_reset, *slopes_of_reset)))


@pytest.mark.parametrize("plan", PLANS)
def test_the_highest_gate_that_is_a_reset(device: torch.device, plan: str) -> None:
    """Beside the number that stands for them, decays are what they were: no bit of an ordinary gate changes."""
    inputs = drawn(device, torch.float32, (1, 80, 1, 1, 16, 16))
    least = RESET[torch.float32]
    assert torch.tensor(least).exp() == 0 and torch.tensor(least + 0.1).exp() > 0
    for value in (least, least + 0.1):
        assert_right(with_gates(inputs, [3, 70, 71], value), plan)


def test_the_highest_gate_that_is_a_reset_in_float64() -> None:
    least = RESET[torch.float64]
    assert torch.tensor(least, dtype=torch.float64).exp() == 0
    assert torch.tensor(least + 1, dtype=torch.float64).exp() > 0
    inputs = drawn(torch.device("cpu"), torch.float64, state=True)
    nothing_new = (*inputs[:4], torch.zeros_like(inputs[4]), *inputs[5:])
    o, final = results(with_gates(nothing_new, [70], -700.0), EAGER)[0]
    assert final.any() and o[:, 70:].any()  # what float64 holds is not lost


@pytest.mark.parametrize("plan", PLANS)
def test_resets_in_packed_sequences_and_16_bit_gates(device: torch.device, plan: str) -> None:
    bounds = (0, 0, 1, 66, 150)
    inputs = drawn(device, torch.bfloat16, cu_seqlens=bounds, wide_gates=False)
    assert inputs[3].dtype == torch.bfloat16
    dg = assert_right(with_gates(inputs, [0, 1, 30, 65, 66, 149], -torch.inf), plan)[1][3]
    assert not dg[:, [0, 1, 30, 65, 66, 149]].any() and dg[:, 31:65].any()


@pytest.mark.parametrize("plan", PLANS)
def test_resets_of_one_head_are_its_own(device: torch.device, plan: str) -> None:
    inputs = drawn(device, torch.float32, (1, 100, 1, 2, 16, 16))
    g = inputs[3].clone()
    g[:, [20, 90], 1] = -torch.inf
    (o, final), _ = assert_right((*inputs[:3], g, *inputs[4:]), plan)
    before, last = results(inputs, plan)[0]
    assert torch.equal(o[:, :, 0], before[:, :, 0]) and torch.equal(final[:, 0], last[:, 0])
    assert not torch.equal(o[:, 20:, 1], before[:, 20:, 1])


@pytest.mark.parametrize("plan", PLANS)
def test_resets_between_segments(device: torch.device, plan: str) -> None:
    """Of a sequence that kernels split: the transition of a segment with a reset is 0."""
    inputs = drawn(device, torch.float32, (1, 1100, 1, 1, 16, 16), state=True)
    assert_right(with_gates(inputs, [500, 1023, 1024, 1090], -torch.inf), plan)


# --------------------------------------------------------------------------------------------------- NaN

TOKEN, CHUNK_BEGIN, CHUNK_END, END, TOKENS = 100, 64, 128, 130, 150
NAMES = ("q", "k", "v", "g", "beta")
KEY_HEADS, HEADS = 2, 4


def packed(device: torch.device) -> Inputs:
    return drawn(device, torch.bfloat16, (1, TOKENS, KEY_HEADS, HEADS, 16, 16), cu_seqlens=(0, END, TOKENS))


@lru_cache
def all_numbers(device: torch.device, plan: str) -> tuple[list[Tensor], list[Tensor]]:
    """Results where nothing is lost."""
    return results(packed(device), plan)


def values_that_are_no_numbers() -> Iterator[tuple[str, float]]:
    for name in NAMES:
        for value in (torch.nan, torch.inf, -torch.inf):
            if name != "g" or value != torch.inf:  # which is refused
                yield name, value


def assert_equal_elsewhere(slopes: list[Tensor], exact: list[Tensor], heads: int) -> None:
    """Gradients of the second sequence, and of all but so many value heads and the first key head, keep every bit."""
    for name, got, right in zip(NAMES, slopes, exact, strict=False):
        first = 1 if name in ("q", "k") else heads
        assert torch.equal(got[:, END:], right[:, END:]), name
        assert torch.equal(got[:, :, first:], right[:, :, first:]), name
    assert torch.equal(slopes[5][1], exact[5][1]) and torch.equal(slopes[5][:, heads:], exact[5][:, heads:])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("name", "value"), tuple(values_that_are_no_numbers()))
def test_what_is_no_number_stays_within_its_chunk_and_after(
    device: torch.device, name: str, value: float, plan: str
) -> None:
    """Chunks before it, other heads and sequences, and the gradients of these, keep every bit; a query reaches its own
    output alone."""
    inputs = packed(device)
    index = NAMES.index(name)
    tensor = inputs[index].clone()
    tensor[:, TOKEN, 0] = value
    heads = HEADS // KEY_HEADS if name in ("q", "k") else 1
    (o, final), slopes = results((*inputs[:index], tensor, *inputs[index + 1 :]), plan)
    (right, last), exact = all_numbers(device, plan)
    is_reset = (name, value) == ("g", -torch.inf)
    first = TOKEN if is_reset or name == "q" else CHUNK_BEGIN
    assert torch.equal(o[:, :first], right[:, :first]) and torch.equal(o[:, END:], right[:, END:])
    assert torch.equal(o[:, :, heads:], right[:, :, heads:])
    assert torch.equal(final[1], last[1]) and torch.equal(final[:, heads:], last[:, heads:])
    if name == "q":
        assert torch.equal(o[:, TOKEN + 1 :], right[:, TOKEN + 1 :]) and torch.equal(final, last)
    if not is_reset:
        assert not any(o[:, TOKEN, head].isfinite().all() for head in range(heads))
    assert_equal_elsewhere(slopes, exact, heads)


@pytest.mark.parametrize("plan", PLANS)
def test_a_lost_state_stays_in_its_sequence_and_head(device: torch.device, plan: str) -> None:
    inputs = packed(device)
    state = inputs[5].clone()
    state[0, 0] = torch.nan
    (o, final), slopes = results((*inputs[:5], state, inputs[6]), plan)
    (right, last), exact = all_numbers(device, plan)
    assert torch.equal(o[:, END:], right[:, END:]) and torch.equal(final[1], last[1]) and o[:, :END, 0].isnan().all()
    assert torch.equal(o[:, :, 1:], right[:, :, 1:]) and torch.equal(final[:, 1:], last[:, 1:])
    assert_equal_elsewhere(slopes, exact, 1)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("value", (torch.nan, torch.inf))
def test_a_lost_gradient_of_an_output_reaches_no_later_chunk(device: torch.device, value: float, plan: str) -> None:
    """Nor another head or sequence. It reaches every earlier token, which all have a part in the output."""
    _, slopes = results(packed(device), plan, (0, (0, TOKEN, 0), value))
    _, exact = all_numbers(device, plan)
    assert_equal_elsewhere(slopes, exact, 1)
    for name, got, right in zip(NAMES, slopes, exact, strict=False):
        assert torch.equal(got[:, CHUNK_END:], right[:, CHUNK_END:]), name
        assert not got[:, TOKEN, 0].isfinite().all(), name
        if name != "q":
            assert not got[:, 0, 0].isfinite().all(), name


@pytest.mark.parametrize("plan", PLANS)
def test_a_lost_gradient_of_a_final_state_stays_in_its_sequence_and_head(device: torch.device, plan: str) -> None:
    _, slopes = results(packed(device), plan, (1, (0, 0), torch.nan))
    assert_equal_elsewhere(slopes, all_numbers(device, plan)[1], 1)
    assert slopes[2][:, :END, 0].isnan().all()


# --------------------------------------------------------------------------------------------- checked()


SHORT = (1, 20, 1, 2, 16, 16)


def checked_rule(inputs: Inputs, plan: str, **options: Any) -> None:
    *differentiable, state, cu_seqlens = inputs
    with torch.no_grad(), adjoint.checked():
        adjoint.gated_delta_rule(
            *differentiable, initial_state=state, cu_seqlens=cu_seqlens, preference=Preference(plan=plan), **options
        )


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("name", "value", "words"),
    (
        ("g", torch.nan, r"g must be a number.* got NaN at position 21 "),
        ("beta", torch.nan, r"beta must be from 0 to 1.* position 21 "),
        ("beta", 1.0078125, r"beta must be from 0 to 1.* position 21 "),
        ("beta", -0.0078125, r"beta must be from 0 to 1.* position 21 "),
        ("beta", torch.inf, r"beta must be from 0 to 1.* position 21 "),
    ),
)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_gates_that_are_reported_in_checking_mode(
    device: torch.device, dtype: torch.dtype, name: str, value: float, words: str, plan: str
) -> None:
    inputs = list(drawn(device, dtype, SHORT, wide_gates=False))
    checked_rule(tuple(inputs), plan)
    index = NAMES.index(name)
    inputs[index] = inputs[index].clone()
    inputs[index][0, 10, 1] = inputs[index][0, 12, 0] = value
    results(tuple(inputs), plan)  # elsewhere nobody asks
    adjoint.check()
    with pytest.raises(adjoint.ArgumentError, match=words):
        checked_rule(tuple(inputs), plan)


@pytest.mark.parametrize("plan", PLANS)
def test_gates_at_their_limits_are_not_reported(device: torch.device, plan: str) -> None:
    inputs = with_gates(drawn(device, torch.float32, SHORT), [3, 17], -torch.inf)
    inputs[3][:, 5] = -0.0
    inputs[4][:, 10], inputs[4][:, 11] = 0.0, 1.0
    checked_rule(inputs, plan)


@pytest.mark.parametrize("plan", PLANS)
def test_keys_that_make_the_state_grow_are_reported(device: torch.device, plan: str) -> None:
    """e^g·(β‖k‖² − 1) > 1 + 2⁻⁶, unless keys are normalised here; position 21 is token 10, value head 1."""
    q, k, v, g, beta, state, _ = drawn(device, torch.float32, SHORT)
    k, beta, g = torch.nn.functional.normalize(k, dim=-1), torch.full_like(beta, 0.5), torch.zeros_like(g)

    def with_key(square: float, decay: float = 0.0) -> Inputs:
        longer, decays, strengths = k.clone(), g.clone(), beta.clone()
        longer[:, 10] *= square**0.5
        decays[:, 10] = decay
        strengths[:, 10, 0] = 0.25
        return q, longer, v, decays, strengths, state, None

    checked_rule(with_key(2 * (2 + 2**-7)), plan)
    for inputs in (with_key(2 * (2 + 2**-5)), with_key(40.0, decay=-2.5)):
        with pytest.raises(adjoint.ArgumentError, match=r"the state grow at position 21 .*normalize_qk=True"):
            checked_rule(inputs, plan)
    with pytest.raises(adjoint.ArgumentError, match="the state grow at position 20 "):
        checked_rule(with_key(torch.inf), plan)
    checked_rule(with_key(40.0, decay=-3.0), plan)  # e⁻³·19 is less than 1
    checked_rule(with_key(40.0), plan, normalize_qk=True)


@pytest.mark.parametrize("plan", PLANS)
def test_checking_changes_no_result(device: torch.device, plan: str) -> None:
    inputs = drawn(device, torch.float32, SHORT)
    outputs, slopes = results(inputs, plan)
    with adjoint.checked():
        outputs_inside, slopes_inside = results(inputs, plan)
    assert all(map(torch.equal, (*outputs, *slopes), (*outputs_inside, *slopes_inside)))


def test_no_tokens_are_checked() -> None:
    for shape in ((0, 5, 1, 1, 2, 2), (2, 0, 1, 2, 3, 4), (1, 4, 0, 0, 2, 2), (1, 4, 1, 1, 0, 2), (1, 4, 1, 1, 2, 0)):
        checked_rule(drawn(torch.device("cpu"), torch.float32, shape), EAGER)
    inputs = drawn(torch.device("cpu"), torch.float32, (1, 4, 1, 1, 2, 0))
    with pytest.raises(adjoint.ArgumentError, match="got NaN at position 2 "):
        checked_rule(with_gates(inputs, [2], torch.nan), EAGER)


def test_compiled_in_checking_mode() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(adjoint.gated_delta_rule, fullgraph=True, backend="aot_eager")
    *tokens_, _, _ = with_gates(drawn(torch.device("cpu"), torch.float32, (1, 9, 1, 2, 4, 4)), [4], torch.nan)
    with torch.no_grad():
        compiled(*tokens_)
        with pytest.raises(adjoint.ArgumentError, match="got NaN at position 8 "), adjoint.checked():
            compiled(*tokens_)
    torch._dynamo.reset()
