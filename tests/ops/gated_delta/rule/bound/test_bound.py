"""The promised bounds of the gated delta rule hold on their whole domain: a search for inputs that break them."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.contract.inputs import Inputs, leaves, widened
from adjoint.ops.gated_delta import packing, reference
from adjoint.ops.gated_delta.promises import BACKWARD as BACKWARD_CEILING
from adjoint.ops.gated_delta.promises import FORWARD as FORWARD_CEILING
from adjoint.ops.gated_delta.rule import bound, guarantee
from adjoint.ops.gated_delta.values import gradients, nearly_equal, tokens, unit_vectors
from tests.ops.gated_delta.rule.bound.climbing import RESULTS, Problems, climb, drawn, smaller
from tests.ops.gated_delta.rule.bound.promised import (
    BACKWARD,
    FORWARD,
    arguments_of,
    bounds_of,
    error_norms,
    guarantees_of,
    shares,
)
from tests.ops.gated_delta.rule.bound.simulated import Rule

CPU = torch.device("cpu")
EAGER, PORTABLE, HOPPER = "eager.chunked", "triton.chunked", "gluon.fused"


def by_eager(problems: Problems, **options: Any) -> dict[str, Tensor]:
    """Results of the plan in plain PyTorch."""
    inputs = leaves(problems.inputs)
    outputs = adjoint.gated_delta_rule(
        *inputs[:5], initial_state=inputs[5], output_final_state=True, scale=problems.scale, **options
    )
    slopes = torch.autograd.grad(outputs, inputs[:6], problems.upstream)
    return dict(zip(RESULTS, (*(x.detach() for x in outputs), *slopes), strict=True))


def by_simulation(problems: Problems, hopper: bool) -> dict[str, Tensor]:
    """Results of the arithmetic of the plans on kernels."""
    rule = Rule(problems.q.dtype, hopper, problems.scale)
    *lanes, do = (x[0].transpose(0, 1) for x in (*problems[:5], problems.do))
    out, final, saved = rule.forward(*lanes, problems.state[0])
    *slopes, dstate = rule.backward(do, problems.dfinal[0], *lanes, saved)
    of_tokens = [x.transpose(0, 1)[None] for x in (out, *slopes)]
    return dict(zip(RESULTS, (of_tokens[0], final[None], *of_tokens[1:], dstate[None]), strict=True))


# --------------------------------------------------------------------------------------------- the search

SEARCHES = {
    "eager, float32": (EAGER, by_eager, torch.float32, (20, 130)),
    "eager, bfloat16": (EAGER, by_eager, torch.bfloat16, (65,)),
    "eager, float64": (EAGER, by_eager, torch.float64, (65,)),
    "portable, bfloat16": (PORTABLE, partial(by_simulation, hopper=False), torch.bfloat16, (2, 20, 65, 130)),
    "portable, float16": (PORTABLE, partial(by_simulation, hopper=False), torch.float16, (1, 64, 130)),
    "hopper, bfloat16": (HOPPER, partial(by_simulation, hopper=True), torch.bfloat16, (2, 20, 65, 130)),
    "hopper, float16": (HOPPER, partial(by_simulation, hopper=True), torch.float16, (1, 64, 130)),
}
"""Plan, what runs it, dtype, and lengths: 18 lengths of 12 problems each."""


@pytest.mark.parametrize("name", SEARCHES)
def test_no_climbed_problem_breaks_a_bound(name: str) -> None:
    plan, run, dtype, lengths = SEARCHES[name]
    for index, time in enumerate(lengths):
        generator = torch.Generator().manual_seed(1000 * index + len(name))
        K, V = ((2, 1), (8, 2), (16, 8), (4, 4))[index % 4]
        problems = drawn(generator, 12, time, K, V, dtype)
        target = RESULTS[(3 * index + len(name)) % len(RESULTS)]
        largest = climb(plan, run, problems, target, 6, generator)
        assert max(largest.values()) <= 1.0, (time, largest)
        if dtype not in (torch.float32, torch.float64):
            assert largest["o"] > 0.1, "a bound that nothing comes near says nothing"


@pytest.mark.parametrize("hopper", (False, True), ids=("portable", "hopper"))
@pytest.mark.parametrize("target", ("dv", "dbeta"))
def test_no_climbed_problem_of_small_numbers_breaks_a_bound(target: str, hopper: bool) -> None:
    """Below 2⁻¹⁴ float16 loses digits: what that costs counts wherever a plan rounds to it."""
    for time, K, V in ((1, 2, 1), (20, 16, 8)):
        generator = torch.Generator().manual_seed(time)
        problems = smaller(drawn(generator, 20, time, K, V, torch.float16), generator)
        run = partial(by_simulation, hopper=hopper)
        largest = climb(HOPPER if hopper else PORTABLE, run, problems, target, 6, generator)
        assert max(largest.values()) <= 1.0, (time, largest)


@pytest.mark.kernels
def test_small_numbers_on_kernels(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(3)
    problems = smaller(drawn(generator, 12, 5, 16, 16, torch.float16), generator)
    largest = largest_shares(PORTABLE, problems, by_kernels(PORTABLE, problems), problems.exact())
    assert max(largest.values()) <= 1.0 and largest["dbeta"] > 0.01, largest


# ------------------------------------------------------------------------------------------ named problems


def identical(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """One direction for all tokens."""
    batch, _, heads, size = shape
    return unit_vectors(generator, (batch, 1, heads, size)).expand(shape)


def problem_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1, **options: Any) -> Problems:
    inputs = tokens(shape, **options)(dtype, CPU, torch.Generator().manual_seed(seed))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed + 1)
    do, dfinal = (torch.randn(x.shape, generator=generator).to(x.dtype) for x in (inputs[2], inputs[5]))
    return Problems(*inputs[:6], do, dfinal)


def largest_shares(
    plan: str, problems: Problems, results: dict[str, Tensor], exact: dict[str, Tensor]
) -> dict[str, float]:
    over_bounds = shares(plan, problems.inputs, problems.upstream, results, exact, problems.scale)
    return {name: float(share.max()) for name, share in over_bounds.items()}


def relative(results: dict[str, Tensor], exact: dict[str, Tensor], name: str) -> float:
    return float((results[name].double() - exact[name]).norm() / exact[name].norm())


@pytest.mark.parametrize("hopper", (False, True), ids=("portable", "hopper"))
@pytest.mark.parametrize("keys", (nearly_equal, identical))
def test_keys_that_repeat_without_decay(keys: Any, hopper: bool) -> None:
    """T = 512, full strength: further off than the ceiling of the op's cases, and within what is promised."""
    problems = problem_of((1, 512, 1, 1, 64, 32), torch.bfloat16, keys=keys, decay=None, strength=(1.0, 1.0), seed=3)
    problems = problems._replace(state=torch.zeros_like(problems.state))
    results, exact = by_simulation(problems, hopper), problems.exact()
    assert relative(results, exact, "final_state") > guarantee.CEILINGS[torch.bfloat16], "why that is no promise"
    largest = largest_shares(HOPPER if hopper else PORTABLE, problems, results, exact)
    assert max(largest.values()) <= 1.0, largest


def test_4096_nearly_identical_keys_in_float32() -> None:
    problems = problem_of((1, 4096, 1, 1, 32, 8), torch.float32, keys=identical, decay=None, strength=(1.0, 1.0))
    keys = problems.k + 1e-3 * unit_vectors(torch.Generator().manual_seed(5), problems.k.shape).float()
    keys = keys / keys.norm(dim=-1, keepdim=True).clamp_min(1.0)
    problems = problems._replace(k=keys, state=torch.zeros_like(problems.state))
    results, exact = by_eager(problems), problems.exact()
    assert relative(results, exact, "final_state") > FORWARD_CEILING, "why that is no promise"
    largest = largest_shares(EAGER, problems, results, exact)
    assert max(largest.values()) <= 1.0, largest


def test_the_gradient_of_a_decay_that_cancels() -> None:
    """Identical keys of full strength leave nothing of a state: dg is a sum of large terms, and nearly 0."""
    problems = problem_of((1, 300, 1, 1, 32, 8), torch.float32, keys=identical, decay=None, strength=(1.0, 1.0))
    problems = problems._replace(state=torch.zeros_like(problems.state))
    results, exact = by_eager(problems), problems.exact()
    assert relative(results, exact, "dg") > 100 * BACKWARD_CEILING, "why that is no promise"
    largest = largest_shares(EAGER, problems, results, exact)
    assert max(largest.values()) <= 1.0, largest


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_short_decays_behind_long_ones(dtype: torch.dtype) -> None:
    """A chunk's sum of decays is a large number, and small differences of it have few of its digits left."""
    problems = problem_of((1, 64, 1, 1, 8, 8), dtype)
    g = torch.full_like(problems.g, -100.0)
    g[:, 55:] = -torch.linspace(1e-3, 0.1, 9, dtype=torch.float64)[:, None] / 3
    problems = problems._replace(g=g)
    largest = largest_shares(EAGER, problems, by_eager(problems), token_by_token(problems))
    assert max(largest.values()) <= 1.0, largest


def token_by_token(problems: Problems) -> dict[str, Tensor]:
    """Exact results by the recurrence, which has no sums of decays."""
    rule, inputs, slopes = reference.gated_delta_rule, widened(problems.inputs), widened(problems.upstream)
    return dict(zip(RESULTS, (*rule(*inputs), *gradients(rule)(*slopes, *inputs)), strict=True))


def test_a_state_that_is_reset() -> None:
    """g = −inf: bounds are finite, those of any strong decay, and hold."""
    problems = problem_of((1, 70, 1, 2, 8, 4), torch.float32)
    g = problems.g.clone()
    g[:, 5::9] = -torch.inf
    problems = problems._replace(g=g)
    bounds = bounds_of(PORTABLE, problems.inputs, problems.upstream, problems.scale)
    assert all(torch.isfinite(bounds[name]).all() and (bounds[name] > 0).all() for name in RESULTS)
    finite = problems._replace(g=g.clamp_min(-60.0))
    expected = bounds_of(PORTABLE, finite.inputs, finite.upstream, finite.scale)
    for name in RESULTS:
        # A decay of e⁻⁶⁰ leaves 10⁻²⁶ of a state, and the rounding of its exponent counts for a thousandth of a bound.
        assert torch.allclose(bounds[name], expected[name], rtol=1e-2, atol=1e-30), name
    largest = largest_shares(EAGER, problems, by_eager(problems), token_by_token(problems))
    assert max(largest.values()) <= 1.0, largest


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_normalised_keys(dtype: torch.dtype) -> None:
    problems = problem_of((1, 130, 1, 2, 12, 6), dtype, decay=0.05)
    long = problems.k * torch.linspace(0.02, 5, 130)[:, None, None].to(dtype)
    problems = problems._replace(k=long, q=problems.q * 3)
    results = by_eager(problems, normalize_qk=True)
    rule = partial(reference.gated_delta_rule, normalize_qk=True, by_chunks=True)
    inputs = widened(problems.inputs)
    values = (*rule(*inputs), *gradients(rule)(*widened(problems.upstream), *inputs))
    exact = dict(zip(RESULTS, values, strict=True))
    over_bounds = shares(EAGER, problems.inputs, problems.upstream, results, exact, problems.scale, normalize=True)
    assert max(float(share.max()) for share in over_bounds.values()) <= 1.0


# ----------------------------------------------------------------------------------------- what they say


def _bounds_with(problems: Problems, **changes: Any) -> dict[str, Tensor]:
    """The bounds of the portable plan's arithmetic, with something changed in it."""
    problem = FORWARD.describe(*arguments_of(problems.inputs, problems.scale))
    arithmetic = replace(guarantee.arithmetic_of(problem, hopper=False), **changes)
    kind = problems.q.dtype
    call = bound.Call(arithmetic, problems.scale, normalize=False)
    kinds = dict.fromkeys(RESULTS, torch.float32) | dict.fromkeys(("o", "dq", "dk", "dv"), kind)
    wide, slopes = widened(problems.inputs), widened(problems.upstream)
    return call.forward(kinds, *wide) | call.backward(kinds, *slopes, *wide)


def test_every_rounding_counts() -> None:
    """Without any one of them the bound of what depends on it is smaller."""
    problems = problem_of((1, 200, 1, 2, 16, 8), torch.bfloat16, decay=0.1)
    whole = _bounds_with(problems)
    for change, names in (
        ({"storage": None}, RESULTS),
        ({"merge": 0.0}, ("o", "final_state", "dv")),
        ({"score": 0.0}, ("o",)),
        ({"new_value": 0.0}, ("o",)),
        ({"row_product": 0.0}, ("dg", "dbeta")),
        ({"short_sums": False}, ("o",)),
        ({"cut": False}, RESULTS),
    ):
        less = _bounds_with(problems, **change)
        for name in names:
            assert (less[name] <= whole[name]).all() and (less[name] < whole[name]).any(), (change, name)


def test_a_split_costs_what_passes_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SEGMENT", 128)
    problems = problem_of((1, 600, 1, 2, 8, 4), torch.bfloat16, decay=0.001, strength=(0.0, 0.2))
    whole = _bounds_with(problems, segment=0, unsplit_reverse=0)
    split = _bounds_with(problems, segment=128, reverse_segment=128, unsplit_reverse=256)
    for name in ("final_state", "dinitial_state"):
        assert (split[name] > whole[name]).all() and (split[name] < 20 * whole[name]).all(), name
    assert torch.equal(split["o"][:, :128], whole["o"][:, :128]), "the first segment begins as it did"


def test_bounds_are_near_where_little_is_rounded() -> None:
    """Strong decays: within ten times of the error, token for token, in the middle."""
    problems = problem_of((1, 130, 1, 2, 16, 16), torch.bfloat16, decay=40.0)
    over_bounds = shares(
        PORTABLE, problems.inputs, problems.upstream, by_simulation(problems, False), problems.exact(), problems.scale
    )
    for name in ("o", "dv", "final_state"):
        assert float(over_bounds[name].median()) > 0.1, name


@pytest.mark.parametrize("plan", (PORTABLE, HOPPER))
@pytest.mark.parametrize(
    "options", ({}, {"keys": nearly_equal, "strength": (1.0, 1.0)}), ids=("random", "nearly equal")
)
def test_errors_are_what_is_expected(plan: str, options: dict[str, Any]) -> None:
    """Within a fifth, over all tokens, and no token is far off."""
    problems = problem_of((1, 512, 1, 2, 32, 32), torch.bfloat16, decay=0.06, **options)
    results, exact = by_simulation(problems, plan == HOPPER), problems.exact()
    promised = guarantees_of(FORWARD, arguments_of(problems.inputs, problems.scale), plan)
    for name in ("o", "final_state"):
        expected = promised[name].error.expected(*widened(problems.inputs))  # type: ignore[union-attr, misc]
        error = error_norms(results[name], exact[name], expected)
        assert 0.8 < float(expected.norm() / error.norm()) < 1.25, name
        assert float((error / expected).max()) < 3, name


@pytest.mark.kernels
def test_the_expected_error_is_printed_beside_the_bound(device: torch.device) -> None:
    """For given inputs: by a plan, and by what `verify` measures."""
    problems = Problems(*(x.to(device) for x in problem_of((1, 70, 1, 2, 16, 16), torch.float16, decay=0.06)))
    options = {"initial_state": problems.state, "output_final_state": True, "scale": problems.scale}
    chosen = adjoint.plan(
        adjoint.gated_delta_rule, *problems[:5], preference=adjoint.Preference(plan=PORTABLE), **options
    )
    errors = chosen.errors(*problems.inputs)
    results = by_kernels(PORTABLE, problems)
    exact = problems.exact()
    for name in ("o", "final_state"):
        error = float((results[name].double() - exact[name]).norm())
        assert errors[name].expected is not None and 0.7 < error / errors[name].expected < 1.4, name
        assert error < errors[name].bound and "expected" in str(errors[name])
        measured = chosen.guarantee[name].error.measure(results[name], exact[name], *widened(problems.inputs))
        assert measured.expected == pytest.approx(error / errors[name].expected, rel=1e-6)
        assert "of what is expected" in str(measured)
    assert all(figures.expected is None for name, figures in errors.items() if name == "saved")


def test_where_no_error_is_expected() -> None:
    """In float32, of gradients, and of sequences that are split: there is no model of them."""
    for dtype, time, expects in ((torch.bfloat16, 70, True), (torch.float32, 70, False), (torch.bfloat16, 1100, False)):
        problems = problem_of((1, time, 1, 1, 4, 3), dtype)
        promised = guarantees_of(FORWARD, arguments_of(problems.inputs, problems.scale), PORTABLE)
        assert (promised["o"].error.expected is not None) == expects  # type: ignore[union-attr]


def test_the_bound_of_saved_states() -> None:
    """It has a place for each, and grows from none."""
    problems = problem_of((1, 2200, 1, 2, 4, 3), torch.bfloat16, decay=0.01)
    promised = guarantees_of(FORWARD, arguments_of(problems.inputs, problems.scale), PORTABLE)
    saved = promised["saved"].error.bound(*widened(problems.inputs))  # type: ignore[union-attr]
    assert saved.shape == (packing.saved_states(2200), 2) and (saved > 0).all()


def test_evaluated_once_for_all_results() -> None:
    """And again for other inputs."""
    problems = problem_of((1, 70, 1, 1, 4, 3), torch.float32)
    inputs: Inputs = widened(problems.inputs)
    promised = guarantees_of(FORWARD, arguments_of(problems.inputs, problems.scale), EAGER)
    first = promised["o"].error.bound(*inputs)  # type: ignore[union-attr]
    assert promised["o"].error.bound(*inputs) is first  # type: ignore[union-attr]
    others = (*inputs[:2], 2 * inputs[2], *inputs[3:])
    assert not torch.equal(promised["o"].error.bound(*others), first)  # type: ignore[union-attr]


def test_bounds_of_a_call_without_final_states() -> None:
    """It has one upstream gradient, and the bounds of a call whose other one is 0."""
    problems = problem_of((1, 70, 1, 2, 4, 3), torch.bfloat16)
    inputs, do = problems.inputs, problems.do
    saved = FORWARD.allocate(*arguments_of(inputs, 1.0))[2]
    for name in ("dq", "dv", "dg", "dinitial_state"):
        stated = guarantees_of(BACKWARD, (do, None, *inputs, saved, 1.0, False, 63), PORTABLE)[name].error
        alone = stated.bound(*widened((do, *inputs)))  # type: ignore[union-attr]
        zero = stated.bound(*widened((do, torch.zeros_like(problems.dfinal), *inputs)))  # type: ignore[union-attr]
        assert torch.equal(alone, zero) and (alone > 0).any(), name


def test_sizes_of_zero() -> None:
    for shape in ((0, 5, 1, 1, 2, 2), (2, 0, 1, 2, 3, 4), (1, 4, 1, 1, 0, 2), (1, 4, 1, 1, 2, 0)):
        inputs = tokens(shape)(torch.float32, CPU, torch.Generator().manual_seed(0))
        promised = guarantees_of(FORWARD, arguments_of(inputs, 1.0), EAGER)
        assert promised["o"].error.bound(*widened(inputs)).shape == shape[:2] + shape[3:4]  # type: ignore[union-attr]
        saved = FORWARD.allocate(*arguments_of(inputs, 1.0))[2]
        arguments = (inputs[2], inputs[5], *inputs, saved, 1.0, False, 63)
        gradient = guarantees_of(BACKWARD, arguments, EAGER)["dq"].error
        assert gradient.bound(*widened((inputs[2], inputs[5], *inputs))).shape == shape[:3]  # type: ignore[union-attr]


# --------------------------------------------------------------------------------------------- on a GPU


def by_kernels(plan: str, problems: Problems) -> dict[str, Tensor]:
    """Results of a plan on kernels."""
    return by_eager(problems, preference=adjoint.Preference(plan=plan))


CLIMBERS = 500
"""Problems of a length that climb at once on a GPU, each a head of one call."""


LENGTHS = {torch.bfloat16: (1, 7, 63, 65, 128), torch.float16: (2, 20, 64, 100, 130)}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LENGTHS, ids=str)
@pytest.mark.parametrize("plan", (PORTABLE, HOPPER))
def test_no_problem_climbed_on_a_gpu_breaks_a_bound(plan: str, dtype: torch.dtype) -> None:
    """10,000 problems with both plans: ten lengths of 500 problems each, all heads of a call, five steps."""
    device = torch.device("cuda", torch.cuda.current_device())
    if plan == HOPPER and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("is for sm_90 alone")
    reached, lengths = dict.fromkeys(RESULTS, 0.0), LENGTHS[dtype]
    for index, time in enumerate(lengths):
        generator = torch.Generator(device).manual_seed(time)
        problems = drawn(generator, CLIMBERS, time, 64, 64, dtype)
        if dtype == torch.float16 and index % 2:
            problems = smaller(problems, generator)
        target = RESULTS[(index + len(lengths) * (dtype == torch.float16)) % len(RESULTS)]
        largest = climb(plan, partial(by_kernels, plan), problems, target, 5, generator)
        assert max(largest.values()) <= 1.0, (time, dtype, largest)
        reached = {name: max(share, largest[name]) for name, share in reached.items()}
    largest = {name: round(share, 3) for name, share in reached.items()}
    print(f"{plan}, {dtype}: {CLIMBERS * len(lengths)} problems climbed, largest shares of the bounds {largest}")


@pytest.mark.gpu
@pytest.mark.parametrize("plan", (PORTABLE, HOPPER))
@pytest.mark.parametrize("keys", (nearly_equal, identical, unit_vectors))
def test_split_sequences_on_a_gpu(plan: str, keys: Any) -> None:
    """Few heads: segments begin with M S + B, forward from 1024 tokens on and in reverse from 16384."""
    device = torch.device("cuda", torch.cuda.current_device())
    if plan == HOPPER and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("is for sm_90 alone")
    for time, decay in ((2500, None), (17000, 1e-4)):
        shape = (1, time, 2, 2, 64, 64)
        problems = problem_of(shape, torch.bfloat16, keys=keys, decay=decay, strength=(0.0, 1.0))
        problems = Problems(*(x.to(device) for x in problems))
        results, exact = by_kernels(plan, problems), problems.exact()
        largest = largest_shares(plan, problems, results, exact)
        assert max(largest.values()) <= 1.0, (time, largest)
