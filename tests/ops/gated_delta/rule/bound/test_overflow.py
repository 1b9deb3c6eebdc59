"""Where float16 has no number for what the kernels round to it, bounds are infinite, and nowhere else."""

import pytest
import torch
from torch import Tensor

from adjoint.core.guarantee import overflow_threshold
from tests.ops.gated_delta.rule.bound.climbing import RESULTS, Problems, drawn
from tests.ops.gated_delta.rule.bound.promised import bounds_of, shares
from tests.ops.gated_delta.rule.bound.test_bound import HOPPER, PORTABLE, by_kernels, by_simulation, problem_of

PLANS = pytest.mark.parametrize("plan", (PORTABLE, HOPPER))
LARGEST = float(torch.finfo(torch.float16).max)


def problem(dtype: torch.dtype = torch.float16, time: int = 64) -> Problems:
    """Keys, states and their gradients of one sign, and values that are not: an ordinary problem, whose first new value
    and the Y of whose last token are as long as they can be, and of one direction."""
    problems = problem_of((1, time, 1, 1, 64, 64), dtype, seed=2, decay=None, strength=(1.0, 1.0))
    keys = problems.k.double().abs()
    keys = (keys / keys.norm(dim=-1, keepdim=True)).to(dtype)
    state, dfinal = (torch.full_like(x, 9.0) + x for x in (problems.state, problems.dfinal))
    return problems._replace(k=keys, state=state, dfinal=dfinal)


def results_of(plan: str, problems: Problems) -> dict[str, Tensor]:
    return by_simulation(problems, plan == HOPPER)


def lost_results(plan: str, problems: Problems, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Where bounds are infinite; elsewhere everything is within them."""
    exact = problems.exact()
    over_bounds = shares(plan, problems.inputs, problems.upstream, results, exact, problems.scale)
    assert all(float(share.max()) <= 1.0 for share in over_bounds.values()), over_bounds
    bounds = bounds_of(plan, problems.inputs, problems.upstream, problems.scale)
    assert not any(bound.isnan().any() for bound in bounds.values())
    return {name: bound.isinf() for name, bound in bounds.items()}


def not_finite(x: Tensor, bound: Tensor) -> Tensor:
    bad = ~x.isfinite()
    return bad.flatten(bound.dim()).any(-1) if x.dim() > bound.dim() else bad


def assert_dk_is_lost_alone(plan: str, lost: dict[str, Tensor], results: dict[str, Tensor]) -> None:
    """Just where it is infinite; and in the portable plan, which adds up E k·k in two parts of float16, dg."""
    assert 0 < int(lost["dk"].sum()) < 20 and torch.equal(lost["dk"], not_finite(results["dk"], lost["dk"]))
    assert bool(lost["dg"].all()) == bool(not_finite(results["dg"], lost["dg"]).any()) == (plan == PORTABLE)
    assert not any(lost[name].any() for name in set(RESULTS) - {"dk", "dg"})


@PLANS
def test_products_that_are_larger_than_gradients(plan: str) -> None:
    """E = β (Y·v') e^{G_i−G_j} of two tokens is past 65504, though no input or exact dk is: their dk is infinite."""
    problems = problem()
    results, exact = results_of(plan, problems), problems.exact()
    assert max(float(x.abs().max()) for x in problems) < 16
    assert float(exact["dk"].abs().max()) < LARGEST
    lost = lost_results(plan, problems, results)
    assert_dk_is_lost_alone(plan, lost, results)


@pytest.mark.kernels
def test_products_that_are_larger_than_gradients_on_kernels(device: torch.device) -> None:
    problems = Problems(*(x.to(device) for x in problem()))
    results = by_kernels(PORTABLE, problems)
    lost = lost_results(PORTABLE, problems, results)
    assert_dk_is_lost_alone(PORTABLE, lost, results)


@PLANS
def test_bfloat16_has_these_numbers(plan: str) -> None:
    problems = problem(torch.bfloat16)
    lost = lost_results(plan, problems, results_of(plan, problems))
    assert not any(where.any() for where in lost.values())


@PLANS
def test_a_state_that_outgrows_float16(plan: str) -> None:
    """Values of 60000 that one key adds up: outputs are promised up to the chunk that begins with such a state."""
    problems = problem(time=130)._replace(state=torch.zeros(1, 1, 64, 64), dfinal=torch.zeros(1, 1, 64, 64))
    keys = torch.zeros_like(problems.k)
    keys[..., 0] = 0.25  # β k kᵀ = 1/16, so that the state at k/‖k‖ is 4·v at most
    problems = problems._replace(k=keys, v=torch.full_like(problems.v, 60000.0), q=problems.q / 64)
    results = results_of(plan, problems)
    bounds = bounds_of(plan, problems.inputs, problems.upstream, problems.scale)
    assert bounds["o"][:, :64].isfinite().all() and bounds["o"][:, 64:].isinf().all()
    assert bounds["final_state"].isinf().all() and bounds["dv"].isfinite().all()
    assert bounds["dq"][:, 64:].isinf().all()
    lost_results(plan, problems, results)


@PLANS
def test_a_result_past_the_largest_number_is_infinite(plan: str) -> None:
    """dq = scale·S do of 160000 is rounded to infinity, and that is its right value: the bound stays finite."""
    problems = problem()
    one = torch.ones_like
    problems = problems._replace(
        beta=torch.zeros_like(problems.beta), state=1000 * one(problems.state), do=20 * one(problems.do)
    )
    results, exact = results_of(plan, problems), problems.exact()
    assert float(exact["dq"].abs().min()) > overflow_threshold(torch.float16) and results["dq"].isinf().all()
    lost = lost_results(plan, problems, results)
    assert not lost["dq"].any() and not lost["dv"].any()
    wrong = {**results, "dq": torch.full_like(results["dq"], LARGEST)}
    over_bounds = shares(plan, problems.inputs, problems.upstream, wrong, exact, problems.scale)
    assert float(over_bounds["dq"].min()) > 1.0, "a finite number in its place is wrong"


def large_problems(number: int, time: int) -> Problems:
    """Of every size up to the largest number of float16, each a head."""
    generator = torch.Generator().manual_seed(time)
    problems, sizes = drawn(generator, number, time, 16, 16, torch.float16), {}
    for name in ("v", "state", "do", "dfinal"):
        x = getattr(problems, name)
        one = (number, 1, 1) if name in ("state", "dfinal") else (number, 1)
        factor = 10 ** (4 * torch.rand(one, generator=generator))
        sizes[name] = (x * factor).clamp(-LARGEST, LARGEST).to(x.dtype)
    return problems._replace(**sizes)


@PLANS
@pytest.mark.parametrize("time", (20, 130))
def test_what_is_infinite_was_not_promised(plan: str, time: int) -> None:
    """dq and dk are infinite somewhere, and promised elsewhere."""
    problems = large_problems(30, time)
    results = results_of(plan, problems)
    lost = lost_results(plan, problems, results)
    for name in ("dq", "dk"):
        assert 0.0 < float(lost[name].double().mean()) < 0.9, name
        assert not_finite(results[name], lost[name]).any(), name


@pytest.mark.kernels
def test_what_is_infinite_on_kernels_was_not_promised(device: torch.device) -> None:
    problems = Problems(*(x.to(device) for x in large_problems(12, 70)))
    results = by_kernels(PORTABLE, problems)
    lost = lost_results(PORTABLE, problems, results)
    assert not_finite(results["dk"], lost["dk"]).any() and not lost["dk"].all()


@pytest.mark.parametrize("dtype, threshold", ((torch.float16, 65520.0), (torch.bfloat16, 2.0**128 - 2.0**119)))
def test_the_threshold(dtype: torch.dtype, threshold: float) -> None:
    assert overflow_threshold(dtype) == threshold
    at = torch.tensor(threshold)  # in float32, from which kernels round
    assert at.to(dtype).isinf() and at.nextafter(torch.zeros(())).to(dtype).isfinite()
