"""The float64 reference against 50 digits, its adjoints against autograd, and its packing.

With u = 2⁻⁵³, and an exponential good to one unit in the last place (2u):

    σ(x)     exponential 2u, sum u, quotient u                                      4u
    silu(x)  one product more                                                       5u·|silu|
    silu'(x) σ(−x) 4u, product u, sum u, σ 4u, product u, on the larger term       11u·(σ + |x|σ(1−σ))

and where the exponential is subnormal it is good to η = 2⁻¹⁰⁷⁴ instead, which |x| multiplies.
"""

import math
from collections.abc import Callable

import mpmath
import pytest
import torch
from torch import Tensor

from adjoint.ops.activation import packing, reference
from adjoint.ops.activation.packing import ORDERS

UNIT = mpmath.mpf(2) ** -53
TINY = mpmath.mpf(2) ** -1074
SECOND_ORDER = 1 + mpmath.mpf(2) ** -40
ROOT = -1.2784645427610738
"""Of silu'."""


@pytest.fixture(autouse=True)
def fifty_digits() -> object:
    with mpmath.workdps(50):
        yield


def _points() -> list[float]:
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(200, generator=generator, dtype=torch.float64) * 1600 - 800
    middle = torch.randn(100, generator=generator, dtype=torch.float64) * 4
    points = [*spread.tolist(), *middle.tolist(), -800.0, 800.0, 0.0, 5e-324, -5e-324, 1e-310, -1e-310]
    points += [sign * 2.0**-exponent for sign in (1, -1) for exponent in (1, 10, 26, 27, 52, 53, 54, 200, 1000, 1022)]
    points += [start + step for start in (-708.4, -745.0, -745.2, 36.7, 709.8) for step in (-0.5, -0.1, 0.0, 0.1, 0.5)]
    for towards in (-math.inf, 0.0):
        x = ROOT
        for _ in range(8):
            points.append(x)
            x = math.nextafter(x, towards)
    points += [ROOT + sign * 10.0**-exponent for sign in (1, -1) for exponent in range(2, 16)]
    return points


def _sigmoid(x: mpmath.mpf) -> mpmath.mpf:
    return 1 / (1 + mpmath.exp(-x))


def _check(compute: Callable[[Tensor], Tensor], exact: Callable, bound: Callable) -> None:
    points = _points()
    computed = compute(torch.tensor(points, dtype=torch.float64)).tolist()
    alone = [compute(torch.tensor(x, dtype=torch.float64)).item() for x in points]  # not the vectorised loop
    for x, *results in zip(points, computed, alone, strict=True):
        wide = mpmath.mpf(x)
        for got in results:
            error = abs(mpmath.mpf(got) - exact(wide))
            assert error <= bound(wide), f"at {x!r}: {got!r} is off by {mpmath.nstr(error / bound(wide), 5)} bounds"


def test_silu_is_good_to_five_units() -> None:
    def bound(x: mpmath.mpf) -> mpmath.mpf:
        return 5 * UNIT * SECOND_ORDER * abs(x * _sigmoid(x)) + TINY * (1 + abs(x))

    _check(reference.silu, lambda x: x * _sigmoid(x), bound)


def test_slope_is_good_to_eleven_units_of_its_terms() -> None:
    def slope(x: mpmath.mpf) -> mpmath.mpf:
        return _sigmoid(x) * (1 + x * _sigmoid(-x))

    def bound(x: mpmath.mpf) -> mpmath.mpf:
        terms = _sigmoid(x) * (1 + abs(x) * _sigmoid(-x))
        return 11 * UNIT * SECOND_ORDER * terms + TINY * (2 + abs(x))

    _check(reference.silu_slope, slope, bound)


def test_slope_changes_sign_at_its_root() -> None:
    around = torch.tensor([ROOT - 1e-9, ROOT + 1e-9], dtype=torch.float64)
    below, above = reference.silu_slope(around).tolist()
    assert below < 0 < above
    step = (above - below) / 2e-9  # silu'' there
    with mpmath.workdps(50):
        exact = mpmath.diff(lambda x: x * _sigmoid(x), mpmath.mpf(ROOT), 2)
        terms = _sigmoid(ROOT) * (1 + abs(ROOT) * _sigmoid(-ROOT))
    assert abs(step - float(exact)) <= 2 * 11 * UNIT * terms / 2e-9, "each slope is off as far as the test above allows"


@pytest.mark.parametrize(
    ("compute", "x", "limit"),
    [
        (reference.silu, math.inf, math.inf),
        (reference.silu, -math.inf, -0.0),
        (reference.silu, 0.0, 0.0),
        (reference.silu, -0.0, -0.0),
        (reference.silu_slope, math.inf, 1.0),
        (reference.silu_slope, -math.inf, -0.0),
        (reference.silu_slope, 0.0, 0.5),
    ],
)
def test_limits(compute: Callable[[Tensor], Tensor], x: float, limit: float) -> None:
    got = compute(torch.tensor([x], dtype=torch.float64)).item()
    assert got == limit
    assert math.copysign(1, got) == math.copysign(1, limit)


def test_nan_stays_nan() -> None:
    x = torch.tensor([math.nan], dtype=torch.float64)
    assert reference.silu(x).isnan().all()
    assert reference.silu_slope(x).isnan().all()


# ------------------------------------------------------------------------------- adjoints, by autograd

AUTOGRAD_UNITS = 64 * 2.0**-53
"""Autograd differentiates σ as a quotient: up to twelve roundings, tripled where its two terms cancel."""


def _operands(count: int, width: int = 400) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, width, generator=generator, dtype=torch.float64) * 12 for _ in range(count)]


def _differentiated(forward: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    return torch.autograd.grad(forward(*leaves), leaves, dy)


def _terms(dy: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """The size of what a slope's gradient adds up."""
    s = reference.sigmoid(gate)
    return (dy * up).abs() * (s + gate.abs() * s * reference.sigmoid(-gate))


def test_silu_backward_is_autograd_s() -> None:
    dy, x = _operands(2)
    (expected,) = _differentiated(reference.silu, dy, x)
    error = (reference.silu_backward(dy, x) - expected).abs()
    assert (error <= AUTOGRAD_UNITS * _terms(dy, x, torch.ones_like(x))).all()


def test_swiglu_backward_is_autograd_s() -> None:
    dy, gate, up = _operands(3)
    dgate, dup = reference.swiglu_backward(dy, gate, up)
    expected_gate, expected_up = _differentiated(reference.swiglu, dy, gate, up)
    assert ((dgate - expected_gate).abs() <= AUTOGRAD_UNITS * _terms(dy, gate, up)).all()
    assert ((dup - expected_up).abs() <= AUTOGRAD_UNITS * expected_up.abs()).all()


def test_sigmoid_is_good_to_four_units() -> None:
    _check(reference.sigmoid, _sigmoid, lambda x: 4 * UNIT * SECOND_ORDER * _sigmoid(x) + TINY)


def test_sigmoid_gate_backward_is_autograd_s() -> None:
    """Where 1 − σ, which autograd forms, does not cancel."""
    dy, x, gate = _operands(3)
    gate = gate.clamp(-30, 3)
    dx, dgate = reference.sigmoid_gate_backward(dy, x, gate)
    expected_x, expected_gate = _differentiated(reference.sigmoid_gate, dy, x, gate)
    assert ((dx - expected_x).abs() <= AUTOGRAD_UNITS * expected_x.abs()).all()
    assert ((dgate - expected_gate).abs() <= 32 * AUTOGRAD_UNITS * expected_gate.abs()).all()


@pytest.mark.parametrize("order", ORDERS)
def test_packed_backward_is_autograd_s(order: str) -> None:
    (packed,) = _operands(1)
    dy, _ = reference.unpack(torch.flip(packed, (0,)), order)
    gate, up = reference.unpack(packed, order)
    (expected,) = _differentiated(lambda p: reference.swiglu_packed(p, order), dy, packed)
    error = (reference.swiglu_packed_backward(dy, packed, order) - expected).abs()
    allowed = reference.pack(_terms(dy, gate, up), (dy * reference.silu(gate)).abs(), order)
    assert (error <= AUTOGRAD_UNITS * allowed).all()


# --------------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize(
    ("order", "gate", "up"),
    [
        ("gate_up", [0, 1, 2], [3, 4, 5]),
        ("up_gate", [3, 4, 5], [0, 1, 2]),
        ("interleaved", [0, 2, 4], [1, 3, 5]),
    ],
)
def test_the_three_orders(order: str, gate: list[int], up: list[int]) -> None:
    packed = torch.arange(6)
    assert [half.tolist() for half in reference.unpack(packed, order)] == [gate, up]
    assert reference.pack(torch.tensor(gate), torch.tensor(up), order).tolist() == packed.tolist()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(2,), (3, 8), (2, 3, 10), (3, 0), (0, 4)])
def test_pack_and_unpack_are_inverse(order: str, shape: tuple[int, ...]) -> None:
    packed = torch.arange(math.prod(shape)).reshape(shape)
    halves = reference.unpack(packed, order)
    assert all(half.shape == (*shape[:-1], shape[-1] // 2) for half in halves)
    assert torch.equal(reference.pack(*halves, order), packed)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("strided", [False, True])
def test_the_kernels_unpack_as_the_reference_does(order: str, strided: bool) -> None:
    packed = torch.arange(480).reshape(4, 6, 20)
    packed = packed.permute(2, 0, 1)[::2] if strided else packed
    for view, expected in zip(packing.unpack(packed, order), reference.unpack(packed, order), strict=True):
        assert torch.equal(view, expected)
        assert view.stride() == expected.stride()
        assert view.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr(), "a copy"
