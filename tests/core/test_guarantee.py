"""How errors are measured: what counts as agreement, and that a bound can fail."""

import math
import weakref

import pytest
import torch

from adjoint.core.guarantee import (
    Derived,
    Empirical,
    Enumerated,
    EvaluatedOnce,
    Guarantee,
    absolute_error,
    error_in_ulp,
    spacing,
)  # fmt: skip
from adjoint.core.preference import Preference
from adjoint.verify.listing.jobs import subjects
from adjoint.verify.run import plan_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_spacing_is_the_distance_to_the_next_value(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    values = torch.tensor([1.0, 1.5, 3.0, -4.0, info.smallest_normal, info.max], dtype=torch.float64)
    away = torch.nextafter(values.abs().to(dtype), torch.tensor(0.0, dtype=dtype)).double()
    expected = values.abs() - away
    expected = torch.where(values.abs().log2().frac() == 0, 2 * expected, expected)  # the binade below is finer
    expected[4] = info.smallest_normal * info.eps
    assert torch.equal(spacing(values, dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_and_subnormals_have_the_smallest_spacing(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps
    assert spacing(torch.tensor([0.0, tiny, 3 * tiny], dtype=torch.float64), dtype).tolist() == [tiny] * 3


def test_agreement_on_nan_and_infinity_is_no_error() -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf])
    assert absolute_error(values, values.double()).tolist() == [0, 0, 0]
    assert not Enumerated(0.5, "").measure(torch.tensor([math.nan]), torch.tensor([1.0])).holds
    assert not Enumerated(0.5, "").measure(torch.tensor([1.0]), torch.tensor([math.nan])).holds
    assert not Empirical(0.5, "").measure(torch.tensor([math.nan]), torch.tensor([1.0])).holds
    assert (
        not Derived("", lambda x: torch.ones(1))
        .measure(torch.tensor([math.nan]), torch.tensor([1.0]), torch.ones(1))
        .holds
    )


def test_overflow_is_infinity_from_the_rounding_threshold_on() -> None:
    exact = torch.tensor([65519.0, 65520.0, 1e6, -1e6], dtype=torch.float64)
    right = torch.tensor([65504.0, math.inf, math.inf, -math.inf], dtype=torch.float16)
    assert (error_in_ulp(right, exact) < 0.5).all()
    wrong = torch.tensor([math.inf, 65504.0, 65504.0, math.inf], dtype=torch.float16)
    assert (error_in_ulp(wrong, exact) > 0.49).all()


def test_a_derived_bound_is_per_element() -> None:
    exact = torch.tensor([1.0, 1e-3], dtype=torch.float64)
    bound = Derived("1e-6·|x|", lambda x: 1e-6 * x.abs())
    assert bound.measure(exact * (1 + 5e-7), exact, exact).holds
    assert not bound.measure(exact + 5e-7, exact, exact).holds


def test_norm_relative_judges_zero_output_of_small_values() -> None:
    exact = torch.full((4,), 1e-9, dtype=torch.float64)
    assert not Empirical(1e-2, "").measure(torch.zeros(4), exact).holds


def test_flags_in_words() -> None:
    promise = Guarantee(True, "row", True, "float32", 1, Enumerated(0.5, "every input"))
    assert promise.flags == "repeatable, batch_invariant(row), device_invariant"
    assert Guarantee(False, "", False, "float32", 1, Enumerated(0.5, "all")).flags == "none"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_bound_counts_an_overflow_as_the_number_after_the_largest(dtype: torch.dtype) -> None:
    """Just below the threshold infinity is one rounding too far; for anything smaller it is wrong."""
    info = torch.finfo(dtype)
    unit = info.max * info.eps / (2 - info.eps)
    statement = Derived("0.6 ulp", lambda *inputs: torch.tensor([0.6 * unit], dtype=torch.float64))
    output = torch.tensor([math.inf], dtype=dtype)
    near = torch.tensor([info.max], dtype=torch.float64) + (0.45 if dtype != torch.float64 else 0.0) * unit
    largest = torch.tensor([info.max], dtype=torch.float64)
    if dtype != torch.float64:  # in float64 there is nothing between the largest number and the threshold
        assert statement.measure(output, near).value == pytest.approx(0.55 / 0.6, rel=1e-3)
    assert statement.measure(output, largest).value == pytest.approx(1 / 0.6, rel=1e-3)
    assert not statement.measure(output, largest / 2).holds
    assert not statement.measure(-output, near).holds
    assert statement.measure(output, torch.tensor([math.inf])).value == 0
    assert not statement.measure(output, torch.tensor([math.nan])).holds


def test_an_infinite_bound_promises_nothing_and_any_other_does() -> None:
    statement = Derived("1, of finite x", lambda x: torch.where(x.isinf(), torch.inf, 1.0))
    x = torch.tensor([torch.inf, 2.0], dtype=torch.float64)
    assert statement.measure(torch.tensor([torch.nan, 2.5]), torch.tensor([3.0, 2.0]), x).value == 0.5
    assert not statement.measure(torch.tensor([torch.nan, torch.nan]), torch.tensor([3.0, 2.0]), x).holds
    assert not statement.measure(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 2.0]), x).holds


def test_what_bounds_share_is_evaluated_once_until_an_input_changes() -> None:
    seen: list[float] = []

    def function(x: torch.Tensor, absent: None) -> dict[str, torch.Tensor]:
        seen.append(float(x.sum()))
        return {"twice": 2 * x}

    once = EvaluatedOnce(function)
    x = torch.ones(2)
    assert once(x, None) is once(x, None) and seen == [2.0]
    x.mul_(3)
    assert torch.equal(once(x, None)["twice"], torch.full((2,), 6.0)) and seen == [2.0, 6.0]
    assert once(x.clone(), None) is not once(x, None)
    results = weakref.ref(once(x, None)["twice"])
    del x
    assert results() is None, "results stay when nobody can ask for them again"
    with torch.inference_mode():
        x = torch.ones(2)
        assert once(x, None) is not once(x, None), "torch counts no writes to it"


@pytest.mark.parametrize(("name", "place"), [("gated_delta_rule", 2), ("causal_conv1d", 0)])
def test_a_bound_is_that_of_the_numbers_at_hand(name: str, place: int) -> None:
    """Also where the caller has written to the same tensors since."""
    subject = next(subject for subject in subjects() if subject.name == name)
    inputs = subject.cases[0].make(torch.float64, torch.device("cpu"), torch.Generator().manual_seed(0))
    (first, *_) = plan_of(subject, inputs, Preference()).guarantee.values()
    before = first.error.bound(*inputs)
    inputs[place].mul_(1000)
    after = first.error.bound(*inputs)
    copies = tuple(None if x is None else x.clone() for x in inputs)
    assert torch.equal(after, first.error.bound(*copies)) and after.norm() > 10 * before.norm()
