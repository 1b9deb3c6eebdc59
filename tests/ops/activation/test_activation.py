"""Values a user would try, the tightness of the stated errors, random layouts, and very large tensors."""

import math
from collections.abc import Callable, Iterator

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.contract.cases import Subject
from adjoint.ops.activation import bounds, plans, reference
from adjoint.ops.activation.packing import ORDERS
from adjoint.ops.activation.sigmoid_gate.cases import SIGMOID_GATE
from adjoint.ops.activation.silu.cases import SILU
from adjoint.ops.activation.swiglu.cases import PACKED, SWIGLU
from adjoint.ops.activation.values import every_value
from adjoint.verify.checks.bits import same_bits
from adjoint.verify.run import differentiate, measure
from tests.promises import broken

PLANS = {
    "eager": Preference(backend="eager"),
    "float64": Preference(plan="eager"),
    "triton": Preference(backend="triton"),
}
BACKENDS = ["eager", "float64", pytest.param("triton", marks=pytest.mark.kernels)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NARROW = [torch.bfloat16, torch.float16]

every_backend = pytest.mark.parametrize("backend", BACKENDS)
accurate = pytest.mark.parametrize("backend", BACKENDS[1:])
"""Those that are right however far a gate is below 0: all but torch's own functions, in float32."""

SUBJECTS = (SILU, SWIGLU, *PACKED, SIGMOID_GATE)


def _silu(x: float) -> float:
    with mpmath.workdps(50):
        return float(mpmath.mpf(x) / (1 + mpmath.exp(-mpmath.mpf(x))))


# ------------------------------------------------------------------------------- values a user would try


@accurate
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("x", [-80.0, -87.0, -88.0, -89.0, -90.0, -91.0])
def test_far_below_zero_results_are_normal_and_right(
    x: float, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    """A naive x / (1 + e^−x) gives 0 from −88.8 on."""
    exact = _silu(x)
    assert abs(exact) > torch.finfo(dtype).smallest_normal
    inputs, preference = torch.full((5,), x, dtype=dtype, device=device), PLANS[backend]
    y = adjoint.silu(inputs, preference=preference)
    truth = torch.full((5,), exact, dtype=torch.float64, device=device)
    assert not broken(adjoint.silu, (inputs,), {"y": (y, truth)}, preference=preference)
    assert broken(adjoint.silu, (inputs,), {"y": (torch.zeros_like(y), truth)}, preference=preference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torch_s_functions_are_right_from_minus_87_on(dtype: torch.dtype) -> None:
    """And below they may be 0: the plan says so, and so says its bound."""
    preference = Preference(plan="eager.float32")
    for x, is_right in ((-80.0, True), (-87.0, True), (-90.0, False)):
        inputs = torch.full((5,), x, dtype=dtype)
        truth = torch.full((5,), _silu(x), dtype=torch.float64)
        y = adjoint.silu(inputs, preference=preference)
        assert not broken(adjoint.silu, (inputs,), {"y": (y, truth)}, preference=preference)
        zero = broken(adjoint.silu, (inputs,), {"y": (torch.zeros_like(y), truth)}, preference=preference)
        assert bool(zero) == is_right
        assert bool((y != 0).all()) == is_right
    promise = adjoint.plan(adjoint.silu, inputs).guarantee["y"]
    assert "below −87" in promise.domain and "x < −87" in str(promise.error) and "NaN" in promise.special_values


@accurate
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_results_fade_through_the_subnormals(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """No cliff: the last nonzero result is the smallest the type has."""
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = torch.linspace(-760, -80, 40001, dtype=dtype, device=device)
    y, preference = adjoint.silu(x, preference=PLANS[backend]), PLANS[backend]
    assert not broken(adjoint.silu, (x,), {"y": (y, reference.silu(x.double()))}, preference=preference)
    assert float(-y[y != 0].max()) < 1e3 * tiny


@every_backend
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_finite_input_gives_finite_results(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    x = every_value(dtype)
    x = x[x.isfinite()].to(device).requires_grad_()
    y = adjoint.silu(x, preference=PLANS[backend])
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.isfinite().all()
    assert dx.isfinite().all()
    assert float(dx.max()) <= 1.11  # the largest slope, 1.0998, rounded
    assert float(y.detach().min()) >= -0.28


@every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ends_of_each_type_are_finite(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    info = torch.finfo(dtype)
    x = torch.tensor([info.max, info.min, info.smallest_normal, -info.smallest_normal], dtype=dtype, device=device)
    x.requires_grad_()
    y = adjoint.silu(x, preference=PLANS[backend])
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.tolist() == [info.max, 0.0, info.smallest_normal / 2, -info.smallest_normal / 2]
    assert dx.tolist() == [1.0, 0.0, 0.5, 0.5]


@every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_is_exactly_zero(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """With its sign, in every output that silu multiplies."""
    preference = PLANS[backend]
    zeros = torch.tensor([0.0, -0.0], dtype=dtype, device=device)
    up = torch.tensor([3.0, 3.0], dtype=dtype, device=device)
    for y in (
        adjoint.silu(zeros, preference=preference),
        adjoint.swiglu(zeros, up, preference=preference),
        adjoint.swiglu(torch.stack((zeros, up), dim=-1), order="gate_up", preference=preference).flatten(),
    ):
        assert y.tolist() == [0.0, 0.0]
        assert y.signbit().tolist() == [False, True]


@every_backend
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_special_values_of_one_tensor_are_those_of_two(
    dtype: torch.dtype, order: str, backend: str, device: torch.device
) -> None:
    """Every pair of them, both directions, to the bit."""
    special = [0.0, -0.0, 1.5, -300.0, torch.finfo(torch.bfloat16).max, torch.inf, -torch.inf, torch.nan]
    grid = torch.cartesian_prod(*(torch.tensor(special),) * 2).to(dtype).to(device)
    gate, up = (x.contiguous().requires_grad_() for x in grid.unbind(1))
    packed = reference.pack(gate.detach()[None], up.detach()[None], order).requires_grad_()
    y = adjoint.swiglu(gate, up, preference=PLANS[backend])
    of_one = adjoint.swiglu(packed, order=order, preference=PLANS[backend])  # type: ignore[arg-type]
    dgate, dup = torch.autograd.grad(y, (gate, up), torch.ones_like(y))
    (dpacked,) = torch.autograd.grad(of_one, packed, torch.ones_like(of_one))
    assert same_bits(of_one.detach()[0], y.detach())
    assert same_bits(dpacked, reference.pack(dgate[None], dup[None], order))


@every_backend
def test_a_product_in_range_does_not_overflow_on_the_way(backend: str, device: torch.device) -> None:
    """gate·up alone would overflow; silu(gate)·up is small."""
    preference = PLANS[backend]
    for at, times, dtype in ((-60.0, 2.0**60, torch.bfloat16), (-100.0, 3e38, torch.float32)):
        gate, up = (torch.tensor([x], dtype=dtype, device=device) for x in (at, times))
        y = adjoint.swiglu(gate, up, preference=preference)
        exact = torch.tensor([_silu(at) * float(up)], dtype=torch.float64, device=device)
        assert not broken(adjoint.swiglu, (gate, up), {"y": (y, exact)}, preference=preference)


# ----------------------------------------------------------------------------------- stated error is tight


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_silu_of_every_16_bit_number_in_kernels(dtype: torch.dtype, device: torch.device) -> None:
    """Tight on a GPU alone: the interpreter's 2^x and 1/x are not the hardware's."""
    x = every_value(dtype).to(device)
    chosen = adjoint.plan(adjoint.silu, x, preference=Preference(backend="triton"))
    measured = chosen.guarantee["y"].error.measure(chosen.run(x), reference.silu(x.double()))  # type: ignore[arg-type]
    assert measured.limit == bounds.ULP[plans.arithmetic(device)][dtype]
    assert measured.holds
    if device.type == "cuda":
        assert measured.value >= 0.99 * measured.limit


# --------------------------------------------------------------------------------------- random layouts


@st.composite
def _views(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of a shape, seen through a random permutation, slices, a shift, and an expanded axis."""
    axes = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    begins = [draw(st.integers(0, 2)) for _ in shape]
    expanded = draw(st.sampled_from([None, None, *range(len(shape))]))
    sizes = [1 if axis == expanded else size * step + begin for axis, (size, step, begin) in
             enumerate(zip(shape, steps, begins, strict=True))]  # fmt: skip
    shift = draw(st.integers(0, 3))
    scale = draw(st.sampled_from([0.1, 1.0, 30.0, 100.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    memory = torch.randn(math.prod(sizes) + shift, generator=generator, dtype=torch.float64).mul_(scale).to(dtype)
    physical = memory[shift:].view([sizes[axis] for axis in axes])
    view = physical.permute([axes.index(axis) for axis in range(len(shape))])
    for axis, (size, step, begin) in enumerate(zip(shape, steps, begins, strict=True)):
        if axis != expanded:
            view = view.narrow(axis, begin, size * step)
            view = view[(slice(None),) * axis + (slice(None, None, step),)]
    return view.expand(shape)


@st.composite
def _calls(draw: st.DrawFn) -> tuple[Subject, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A subject, its inputs and an upstream gradient, each laid out in its own way."""
    subject = draw(st.sampled_from(SUBJECTS))
    dtype = draw(st.sampled_from(DTYPES))
    packed = subject in PACKED
    rank = draw(st.integers(1 if packed else 0, 5))
    shape = tuple(draw(st.integers(0, 5)) for _ in range(rank))
    inner = shape
    if packed:
        inner, shape = shape, (*shape[:-1], 2 * shape[-1])
    inputs = tuple(draw(_views(shape, dtype)) for _ in subject.inputs)
    return subject, inputs, (draw(_views(inner, dtype)),)


def _within_the_guarantee(
    call: tuple[Subject, tuple[Tensor, ...], tuple[Tensor, ...]], preference: Preference, device: torch.device
) -> None:
    subject, inputs, upstream = call
    inputs, upstream = tuple(t.to(device) for t in inputs), tuple(t.to(device) for t in upstream)
    found = differentiate(subject, inputs, upstream, preference)
    for output, measured in measure(found).items():
        assert measured.holds, f"{subject.name} {inputs[0].dtype} {output}: {measured}"
    for gradient, tensor in zip(found.gradients, inputs, strict=True):
        assert gradient.shape == tensor.shape
        assert gradient.dtype == tensor.dtype


@settings(max_examples=300, deadline=None, derandomize=True)
@given(call=_calls())
def test_random_layouts_in_eager(call: tuple[Subject, tuple[Tensor, ...], tuple[Tensor, ...]]) -> None:
    for name in ("eager", "float64"):
        _within_the_guarantee(call, PLANS[name], torch.device("cpu"))


@pytest.mark.kernels
@settings(max_examples=100, deadline=None, derandomize=True)
@given(call=_calls())
def test_random_layouts_in_kernels(call: tuple[Subject, tuple[Tensor, ...], tuple[Tensor, ...]]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _within_the_guarantee(call, Preference(backend="triton"), device)


# ------------------------------------------------------------------------------- past 2^31 elements

PAST = 2**31 + 8 * 1024 + 3
CHUNK = 1 << 20


def _ramp(tensor: Tensor) -> Tensor:
    """Fills a tensor with a pattern whose period is prime: no two places a tile or 2^31 apart agree."""
    pattern = torch.linspace(-12, 9, 65521, device=tensor.device).to(tensor.dtype)
    flat = tensor.view(-1)
    for begin in range(0, flat.numel(), 65521 * 1024):
        part = flat[begin : begin + 65521 * 1024]
        part.copy_(pattern.repeat(-(-part.numel() // 65521))[: part.numel()])
    return tensor


def _spots(length: int) -> Iterator[slice]:
    """The first, the middle and the last places along an axis, and those around 2^30 and 2^31."""
    for centre in (0, 2**30, length // 2, 2**31, length):
        begin = max(0, min(centre, length) - CHUNK // 2)
        if begin < length:
            yield slice(begin, min(begin + CHUNK, length))


def _near(got: Tensor, exact: Tensor, bound: Tensor) -> None:
    assert ((got.double() - exact).abs() <= bound).all()


def _bounds(device: torch.device) -> bounds.Bounds:
    return bounds.Bounds(bounds.arithmetic(plans.arithmetic(device), torch.bfloat16), torch.bfloat16)


def _check_large(x: Tensor, dy: Tensor, spots: Callable[[Tensor], Iterator[Tensor]], layout: str) -> None:
    """silu and its gradient at the given spots of tensors that share a shape."""
    chosen = adjoint.plan(adjoint.silu, x)
    assert chosen.name == f"triton.{layout}"
    y = adjoint.silu(x)
    for spot, got in zip(spots(x), spots(y), strict=True):
        _near(got, reference.silu(spot.double()), _bounds(x.device).value(spot.double(), None))
    del y
    leaf = x.detach().requires_grad_()
    (dx,) = torch.autograd.grad(adjoint.silu(leaf), leaf, dy)
    for spot, upstream, got in zip(spots(x), spots(dy), spots(dx), strict=True):
        wide = upstream.double(), spot.double()
        _near(got, reference.silu_backward(*wide), _bounds(x.device).slope(*wide, None))


@pytest.fixture
def memory() -> Iterator[None]:
    if torch.cuda.mem_get_info()[1] < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    yield
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_past_2_31_contiguous(memory: None) -> None:
    x = _ramp(torch.empty(PAST, dtype=torch.bfloat16, device="cuda"))
    _check_large(x, x.flip(0), lambda t: (t[spot] for spot in _spots(PAST)), "rows")


@pytest.mark.gpu
def test_past_2_31_in_rows_apart(memory: None) -> None:
    """Two rows out of a wider tensor: each row's tiles exceed the grid's second axis."""
    columns = 2**30 + 5
    x = _ramp(torch.empty(2, columns + 11, dtype=torch.bfloat16, device="cuda"))[:, 3 : 3 + columns]
    dy = _ramp(torch.empty(2, columns, dtype=torch.bfloat16, device="cuda"))

    def spots(t: Tensor) -> Iterator[Tensor]:
        return (t[row, spot] for row in (0, 1) for spot in _spots(columns))

    _check_large(x, dy, spots, "rows")


@pytest.mark.gpu
def test_past_2_31_strided(memory: None) -> None:
    """Every other element, and an expanded upstream gradient, through the strided kernel in several launches."""
    columns = 2**30 + 5
    x = _ramp(torch.empty(2, 2 * columns, dtype=torch.bfloat16, device="cuda"))[:, ::2]
    dy = torch.tensor([[0.75], [-1.5]], dtype=torch.bfloat16, device="cuda").expand(2, columns)

    def spots(t: Tensor) -> Iterator[Tensor]:
        return (t[row, spot] for row in (0, 1) for spot in _spots(columns))

    _check_large(x, dy, spots, "strided")


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["gate_up", "interleaved"])
def test_past_2_31_packed(order: str, memory: None) -> None:
    columns = 2**30 + 4
    packed = _ramp(torch.empty(2, 2 * columns, dtype=torch.bfloat16, device="cuda"))
    dy = torch.full((2, columns), -1.25, dtype=torch.bfloat16, device="cuda")
    leaf = packed.detach().requires_grad_()
    y = adjoint.swiglu(leaf, order=order)  # type: ignore[arg-type]
    (dpacked,) = torch.autograd.grad(y, leaf, dy)
    gate, up = reference.unpack(packed, order)
    dgate, dup = reference.unpack(dpacked, order)
    for row in (0, 1):
        for spot in _spots(columns):
            g, u, upstream = (t[row, spot].double() for t in (gate, up, dy))
            (to_gate, to_up), stated = reference.swiglu_backward(upstream, g, u), _bounds(packed.device)
            _near(y.detach()[row, spot], reference.swiglu(g, u), stated.value(g, u))
            _near(dgate[row, spot], to_gate, stated.slope(upstream, g, u))
            _near(dup[row, spot], to_up, stated.value(g, upstream))
