"""Searches for numbers that break the stated errors: pairs of significands, at exponents where rounding matters."""

import math
from collections.abc import Iterator
from copy import copy
from functools import cached_property

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Derived, Enumerated, Preference
from adjoint.contract.cases import Subject
from adjoint.core.plan import Plan
from adjoint.ops.activation import bounds, reference
from adjoint.ops.activation.sigmoid_gate.cases import SIGMOID_GATE
from adjoint.ops.activation.silu.cases import SILU
from adjoint.ops.activation.swiglu.cases import PACKED, SWIGLU
from adjoint.ops.activation.values import ROOT, every_value
from adjoint.verify.run import plan_of
from tests.promises import broken

NARROW = [torch.bfloat16, torch.float16]
SEARCHED = [torch.float32, *NARROW]
IN_TORCH = ["eager.float32", "eager"]

# -------------------------------------------------------------------------------------------- the search


class Draw:
    """Draws gates, ups and upstream gradients of a type, `count` at a time.

    Their products lie evenly over all exponents, and again as often where a result underflows and where it overflows.
    """

    def __init__(self, subject: Subject, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.of_gate = _sigmoid_and_slope if subject is SIGMOID_GATE else _silu_and_slope
        self.dtype, self.device, self.info = dtype, device, torch.finfo(dtype)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.smallest = math.log2(self.info.smallest_normal * self.info.eps)
        self.largest = math.log2(self.info.max)

    def __call__(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """gate, up and dy: f(gate)·up, dy·f(gate) and dy·up·f'(gate) are results of all sizes; f is silu or σ."""
        gate = self._gates(count)
        value, slope = self.of_gate(gate.double())
        up = self._factor(value)
        dy = torch.where(self._uniform(count) < 0.5, self._factor(value), self._factor(slope * up.double()))
        return gate, up, dy

    def _uniform(self, count: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        unit = torch.rand(count, dtype=torch.float64, device=self.device, generator=self.generator)
        return low + (high - low) * unit

    def _round(self, values: Tensor) -> Tensor:
        return values.clamp(self.info.min, self.info.max).to(self.dtype)

    def _gates(self, count: int) -> Tensor:
        """Where silu is not its asymptote, around the root of its slope, around 0, and of all sizes."""
        kind, sign = self._uniform(count, 0, 4).floor(), torch.where(self._uniform(count) < 0.5, -1.0, 1.0)
        usual = self._uniform(count, -32.0 if self.dtype == torch.float16 else -190.0, 20.0)
        root = ROOT + sign * 2.0 ** self._uniform(count, -24, -2)
        small = sign * 2.0 ** self._uniform(count, self.smallest, 0)
        any_size = sign * 2.0 ** self._uniform(count, 0, self.largest)
        return self._round(torch.where(kind == 0, root, torch.where(kind == 1, small, usual)).where(kind < 3, any_size)
                           .where(self._uniform(count) < 0.5, usual))  # fmt: skip

    def _factor(self, other: Tensor) -> Tensor:
        """Numbers whose product with others has an exponent of interest, with any significand."""
        count = other.numel()
        kind = self._uniform(count, 0, 3).floor()
        everywhere = self._uniform(count, self.smallest - 2, self.largest + 2)
        small = self._uniform(count, self.smallest - 2, math.log2(self.info.smallest_normal) + 2)
        large = self._uniform(count, self.largest - 1, self.largest + 1)
        target = 2.0 ** torch.where(kind == 0, everywhere, torch.where(kind == 1, small, large))
        sign = torch.where(self._uniform(count) < 0.5, -1.0, 1.0)
        return self._round(sign * target / other.abs().clamp_min(1e-300))


def _silu_and_slope(gate: Tensor) -> tuple[Tensor, Tensor]:
    return reference.silu(gate), reference.silu_slope(gate)


def _sigmoid_and_slope(gate: Tensor) -> tuple[Tensor, Tensor]:
    return reference.sigmoid(gate), reference.sigmoid(gate) * reference.sigmoid(-gate)


def _arguments(subject: Subject, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    if subject is SILU:
        return (gate,)
    if subject is SIGMOID_GATE:
        return up, gate
    return (gate, up) if subject is SWIGLU else (reference.pack(gate, up, subject.keywords["order"]),)


class Problem:
    """Numbers of a subject, and its exact results, which all plans are compared with."""

    def __init__(self, subject: Subject, gate: Tensor, up: Tensor, dy: Tensor) -> None:
        self.subject, self.inputs, self.dy = subject, _arguments(subject, gate, up), dy
        self.wide = tuple(x.double() for x in self.inputs)

    @cached_property
    def outputs(self) -> tuple[Tensor, ...]:
        return self.subject.reference(*self.wide)

    @cached_property
    def gradients(self) -> tuple[Tensor, ...]:
        return self.subject.reference_backward(self.dy.double(), *self.wide)

    @cached_property
    def with_smaller_slopes(self) -> "Problem":
        """The same; no upstream gradient is more than half of the largest number."""
        most = torch.finfo(self.dy.dtype).max / 2
        smaller = copy(self)
        smaller.dy, smaller.outputs = self.dy.clamp(-most, most), self.outputs
        vars(smaller).pop("gradients", None)
        return smaller


def _shares(plan: Plan, problem: Problem) -> Iterator[tuple[str, float, float]]:
    """Each output, the largest share of its bound, or its error in ulp, and the limit of that."""
    assert plan.adjoint is not None
    if plan.name == "eager.float32" and problem.subject is not SIGMOID_GATE:
        problem = problem.with_smaller_slopes
    for direction, arguments, given, exact in (
        (plan, problem.wide, problem.inputs, problem.outputs),
        (plan.adjoint, (problem.dy.double(), *problem.wide), (problem.dy, *problem.inputs), problem.gradients),
    ):
        results = direction.run(*given)
        results = results if isinstance(results, tuple) else (results,)
        for (output, guarantee), result, truth in zip(direction.guarantee.items(), results, exact, strict=True):
            measured = guarantee.error.measure(result, truth, *arguments)
            yield output, measured.value, measured.limit


def _search(
    subject: Subject, dtype: torch.dtype, preferences: list[Preference], device: torch.device, pairs: int
) -> None:
    """No pair breaks a bound of any plan, and some come near it: a bound that is far from all of them says little."""
    block, draw = min(pairs, 2**25 if device.type == "cuda" else 2**19), Draw(subject, dtype, device)
    largest: dict[tuple[str, str], float] = {}
    for begin in range(0, pairs, block):
        problem = Problem(subject, *draw(min(block, pairs - begin)))
        for preference in preferences:
            plan = plan_of(subject, problem.inputs, preference)
            for output, value, limit in _shares(plan, problem):
                largest[plan.name, output] = max(largest.get((plan.name, output), 0.0), value / limit)
    print(f"{subject.name}, {dtype}, {device}: {pairs} pairs, largest shares of the bounds {largest}")
    assert {plan for plan, _ in largest} == {preference.plan or plan.name for preference in preferences}
    assert max(largest.values()) <= 1, largest
    if dtype != torch.float32:
        assert min(largest.values()) > 0.9, largest


@pytest.mark.parametrize("subject", [SWIGLU, SIGMOID_GATE], ids=lambda subject: subject.name)
@pytest.mark.parametrize("dtype", SEARCHED, ids=str)
def test_no_pair_breaks_the_bounds_in_torch(subject: Subject, dtype: torch.dtype, everything: bool) -> None:
    """10⁷ pairs for each plan."""
    pairs = 10**7 if everything else 10**7 // 3
    _search(subject, dtype, [Preference(plan=plan) for plan in IN_TORCH], torch.device("cpu"), pairs)


def test_no_pair_breaks_the_bounds_in_torch_where_no_product_of_float16_overflows() -> None:
    """A tensor with a dy·up that overflows has all of its dgate from float32, so the searches find no other."""
    gate, up, dy = Draw(SWIGLU, torch.float16, torch.device("cpu"))(2**20)
    is_in_range = (dy * up).isfinite()
    problem = Problem(SWIGLU, *(x[is_in_range] for x in (gate, up, dy)))
    plan = plan_of(SWIGLU, problem.inputs, Preference(plan="eager.float32"))
    shares = {output: value / limit for output, value, limit in _shares(plan, problem.with_smaller_slopes)}
    assert len(problem.dy) > 2**19
    assert 0.9 < min(shares.values()) <= max(shares.values()) <= 1, shares


@pytest.mark.parametrize("subject", [SILU, *PACKED], ids=lambda subject: subject.name)
@pytest.mark.parametrize("dtype", SEARCHED, ids=str)
def test_no_pair_breaks_the_bounds_of_other_forms(subject: Subject, dtype: torch.dtype) -> None:
    _search(subject, dtype, [Preference(plan=plan) for plan in IN_TORCH], torch.device("cpu"), 2**18)


@pytest.mark.kernels
@pytest.mark.parametrize("subject", [SILU, SWIGLU, SIGMOID_GATE], ids=lambda subject: subject.name)
@pytest.mark.parametrize("dtype", SEARCHED, ids=str)
def test_no_pair_breaks_the_bounds_of_the_kernels(subject: Subject, dtype: torch.dtype, device: torch.device) -> None:
    _search(subject, dtype, [Preference(backend="triton")], device, 10**5)


@pytest.mark.gpu
@pytest.mark.parametrize("subject", [SWIGLU, SIGMOID_GATE], ids=lambda subject: subject.name)
@pytest.mark.parametrize("dtype", SEARCHED, ids=str)
def test_no_pair_breaks_the_bounds_on_a_gpu(subject: Subject, dtype: torch.dtype) -> None:
    """10⁹ pairs for each type, a few seconds."""
    _search(subject, dtype, [Preference(backend="triton")], torch.device("cuda"), 10**9)


# --------------------------------------------------------------------------------- numbers that did break


@pytest.mark.parametrize("backend", [*IN_TORCH, pytest.param("triton", marks=pytest.mark.kernels)])
@pytest.mark.parametrize(
    ("dtype", "gate", "up", "dy"),
    [
        (torch.float16, -12.875, 57.59375, 1.0),
        (torch.bfloat16, -131.0, 2.06e18, 2.06e18),
        (torch.bfloat16, -175.0, 3e38, 3e38),
        (torch.float16, -12.875, 1.0, 57.59375),
        (torch.float16, 11.0, 5952.0, 5952.0),
    ],
)
def test_hard_products_are_inside_the_bounds(
    dtype: torch.dtype, gate: float, up: float, dy: float, backend: str, device: torch.device
) -> None:
    """More than the 0.501 ulp that a spread of nine factors shows; silu below the range of float32; the overflow.

    Zeros are outside of the bounds, unless silu may count as 0: no term that is large beside the result empties them.
    """
    preference = Preference(backend=backend) if backend == "triton" else Preference(plan=backend)
    lowest = {"triton": -174.0, "eager.float32": -87.0, "eager": -708.0}[backend]
    tensors = [torch.full((64,), value, dtype=dtype, device=device) for value in (gate, up, dy)]
    plan = adjoint.plan(adjoint.swiglu, *tensors[:2], preference=preference)
    for output, value, limit in _shares(plan, Problem(SWIGLU, *tensors)):
        assert value <= limit, output
    wide, exact = [x.double() for x in tensors[:2]], reference.swiglu(*(x.double() for x in tensors[:2]))
    zero = plan.guarantee["y"].error.measure(torch.zeros_like(tensors[0]), exact, *wide)
    assert zero.holds == (gate < lowest)


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=pytest.mark.kernels)])
@pytest.mark.parametrize("subject", [SWIGLU, SIGMOID_GATE], ids=lambda subject: subject.name)
def test_gates_of_float64_where_the_reference_underflows(subject: Subject, backend: str, device: torch.device) -> None:
    """Its σ is subnormal for gates below −708, and 0 below −745, and factors make large numbers of what that loses."""
    count, generator = 2**10 if backend == "triton" else 2**16, torch.Generator().manual_seed(3)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, dtype=torch.float64, generator=generator)

    gate, up, dy = uniform(-780, -690), 2.0 ** uniform(-300, 300), 2.0 ** uniform(-300, 300)
    problem = Problem(subject, *(x.to(device) for x in (gate, up, dy)))
    preference = Preference(backend=backend)
    for output, value, limit in _shares(plan_of(subject, problem.inputs, preference), problem):
        assert value <= limit, output


@pytest.mark.parametrize("dtype", SEARCHED, ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_silu_of_a_16_bit_number_is_enumerated(dtype: torch.dtype, device: str) -> None:
    x = torch.empty(4, 8, dtype=dtype, device="meta")
    for subject in (SILU, SWIGLU, SIGMOID_GATE, *PACKED):
        plan = adjoint.plan(subject.function, *(x,) * len(subject.inputs), device=device, **subject.keywords)
        assert plan.adjoint is not None
        kind = Enumerated if subject is SILU and dtype in NARROW and device == "cuda" else Derived
        assert isinstance(plan.guarantee["y"].error, kind)
        assert all(isinstance(promise.error, Derived) for promise in plan.adjoint.guarantee.values())


@pytest.mark.parametrize("subject", [SWIGLU, *PACKED], ids=lambda subject: subject.name)
@pytest.mark.parametrize("overflows", [False, True], ids=["in range", "dy·up overflows"])
def test_a_large_up_does_not_enlarge_the_error_of_a_small_upstream_gradient(subject: Subject, overflows: bool) -> None:
    """In float16 a dgate that is a normal number has two roundings of its own size, though dy is subnormal."""
    steps = torch.arange(1, 513, dtype=torch.float64)
    dy, up, gate = steps * 2.0**-24, 2.0**15 / (1 + steps / 1000), torch.linspace(0, 4, 512)
    if overflows:  # and this dgate does not
        dy[-1], up[-1], gate[-1] = 4.0, 32768.0, -12.0
    problem = Problem(subject, gate.half(), up.half(), dy.half())
    plan = plan_of(subject, problem.inputs, Preference(plan="eager.float32"))
    assert plan.adjoint is not None
    results, promise = plan.adjoint.run(problem.dy, *problem.inputs), next(iter(plan.adjoint.guarantee.values()))
    result, exact = results[0] if isinstance(results, tuple) else results, problem.gradients[0]
    assert promise.error.measure(result, exact, problem.dy.double(), *problem.wide).holds
    if subject is not SWIGLU:
        (result, _), (exact, _) = (reference.unpack(x, subject.keywords["order"]) for x in (result, exact))
    relative = ((result.double() - exact) / exact).abs()
    assert (relative <= (1 + 2.0**-11) ** 2 - 1 + 2.0**-16).all()  # and what silu' itself is off by


@pytest.mark.parametrize("dtype", [torch.float64, *SEARCHED], ids=str)
def test_the_cpu_computes_in_float32_by_default(dtype: torch.dtype) -> None:
    """In both directions; float64 inside is there by its name, and for what is float64 itself."""
    x = torch.empty(4, 8, dtype=dtype)
    for subject in (SILU, SWIGLU, SIGMOID_GATE, *PACKED):
        default = plan_of(subject, (x,) * len(subject.inputs), Preference())
        named = plan_of(subject, (x,) * len(subject.inputs), Preference(plan="eager"))
        assert default.adjoint is not None and named.adjoint is not None
        for plan in (default, default.adjoint):
            assert plan.name == ("eager" if dtype == torch.float64 else "eager.float32")
            assert all(promise.accumulator == str(max(dtype, torch.float32, key=lambda t: t.itemsize))[6:]
                       for promise in plan.guarantee.values())  # fmt: skip
        for plan, other in ((named, default), (named.adjoint, default.adjoint)):
            assert plan.name == "eager"
            assert dtype == torch.float64 or plan.sku != other.sku
            assert all(promise.accumulator == "float64" for promise in plan.guarantee.values())


# ------------------------------------------------------------------------------------ one operand, all values


@pytest.mark.parametrize("plan", IN_TORCH)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_silu_of_every_16_bit_number(plan: str, dtype: torch.dtype) -> None:
    x = every_value(dtype)
    chosen = adjoint.plan(adjoint.silu, x, preference=Preference(plan=plan))
    if plan == "eager.float32":
        x = x[x.isfinite()]
    exact = reference.silu(x.double())
    measured = chosen.guarantee["y"].error.measure(chosen.run(x), exact, x.double())  # type: ignore[arg-type]
    assert measured.holds
    assert measured.value / measured.limit > 0.99
    if plan == "eager":
        assert measured.limit == bounds.ULP["float64"][dtype]


@pytest.mark.parametrize("backend", [*IN_TORCH, pytest.param("triton", marks=pytest.mark.kernels)])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_sigmoid_of_every_16_bit_gate(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """Of x = 1, so that σ itself is rounded, and its slope for dy = 1: both inside the bound, and near it."""
    if backend == "triton":
        preference = Preference(backend=backend)
    else:
        preference, device = Preference(plan=backend), torch.device("cpu")
    gate = every_value(dtype).to(device)
    one = torch.ones_like(gate)
    plan = adjoint.plan(adjoint.sigmoid_gate, one, gate, preference=preference)
    for output, value, limit in _shares(plan, Problem(SIGMOID_GATE, gate, one, one)):
        assert 0.95 * limit < value <= limit, output


def test_the_slope_of_a_large_gate_is_not_lost() -> None:
    """1 − σ(gate), with a σ that was rounded, is 0 for gates of 9 in bfloat16 and of 17 in float32."""
    for dtype, at in ((torch.bfloat16, 12.0), (torch.float32, 40.0)):
        x, gate = (torch.full((5,), value, dtype=dtype).requires_grad_() for value in (3.0, at))
        (dgate,) = torch.autograd.grad(adjoint.sigmoid_gate(x, gate).sum(), gate)
        sigma = gate.detach().double().sigmoid()
        exact = x.detach().double() * sigma * (-gate.detach().double()).sigmoid()
        assert exact[0] > 0 and dgate[0] > 0
        assert not broken(adjoint.sigmoid_gate, (x, gate), {"dgate": (dgate, exact)}, (torch.ones_like(x).detach(),))
        (of_torch,) = torch.autograd.grad((x * gate.sigmoid()).sum(), gate)
        assert of_torch[0].item() == 0.0


@pytest.mark.parametrize("plan", IN_TORCH)
def test_silu_of_float32_bit_patterns(plan: str) -> None:
    """Four million random ones, infinities, NaN and the edges between ways to compute."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (2**22,), generator=generator).to(torch.int32).view(torch.float32)
    edges = torch.tensor([-87.0, -87.33655, -88.0, -88.72284, -103.97, -104.0, -174.67, -0.0, 0.0, 17.0, 88.8, ROOT])
    near = torch.cat([edges.nextafter(edges.new_tensor(to)) for to in (-torch.inf, torch.inf)])
    x = torch.cat((x, edges, near, torch.linspace(-105, -80, 2**18), torch.linspace(-20, 20, 2**18)))
    dy = torch.where(x.isnan(), 1.0, x.roll(1).nan_to_num(1.0, 1.0, 1.0)).clamp(-(2.0**126), 2.0**126)
    chosen = adjoint.plan(adjoint.silu, x, preference=Preference(plan=plan))
    for output, value, limit in _shares(chosen, Problem(SILU, x, x, dy)):
        assert value <= limit, output
