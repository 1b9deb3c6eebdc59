"""Calls skip torch's dispatcher only when nobody listens there, as modes, subclasses, tracers and profilers do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import adjoint
from adjoint.core.op.operator import operators

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: adjoint.silu(x),
    "swiglu": lambda x: adjoint.swiglu(x, x + 1),
    "sigmoid_gate": lambda x: adjoint.sigmoid_gate(x, x + 1),
    "swiglu_packed": lambda x: adjoint.swiglu(x, order="interleaved"),
}

every_op = pytest.mark.parametrize("name", OPS)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) * 3


class _Seen(TorchDispatchMode):
    """Notes the operators dispatched while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(function.name())
        return function(*args, **(kwargs or {}))


class _Wrapped(Tensor):
    """A tensor subclass that holds a plain one, and notes the operators called on it."""

    called: list[str]
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "_Wrapped":
        wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)
        wrapper.inner, wrapper.called = inner, []
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(tensor: "_Wrapped") -> Tensor:
            tensor.called.append(function.name())
            return tensor.inner

        args, kwargs = tree_map_only(_Wrapped, unwrap, (args, kwargs or {}))
        return tree_map_only(Tensor, _Wrapped, function(*args, **kwargs))


class _Plain(Tensor):
    """A subclass without any behaviour of its own."""


# ------------------------------------------------------------------------------------------ nobody listens


def _count_dispatches(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    operator = next(operator for operator in operators() if operator.name == name)
    registered = operator.call

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        return registered(*arguments)

    monkeypatch.setattr(operator, "call", call)
    return calls


@every_op
def test_a_plain_call_skips_the_dispatcher(name: str, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _count_dispatches(monkeypatch, name)
    OPS[name](x)
    OPS[name](Parameter(x))
    with torch.no_grad():
        OPS[name](x)
    with torch.inference_mode():
        OPS[name](x)
    assert not calls


def test_both_ways_give_equal_bits(x: Tensor) -> None:
    up, dy = x.flip(0) * 2, x.cos()
    registered = torch.ops.adjoint
    assert torch.equal(adjoint.silu(x), registered.silu(x, ""))
    assert torch.equal(adjoint.swiglu(x, up), registered.swiglu(x, up, ""))
    assert torch.equal(adjoint.swiglu(x, order="up_gate"), registered.swiglu_packed(x, "up_gate", ""))

    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(adjoint.silu(leaf), leaf, dy)
    assert torch.equal(dx, registered.silu_backward(dy, x, ""))
    pair = [x.clone().requires_grad_(), up.clone().requires_grad_()]
    gradients = torch.autograd.grad(adjoint.swiglu(*pair), pair, dy)
    assert all(map(torch.equal, gradients, registered.swiglu_backward(dy, x, up, 3, "")))
    half = dy[:, :3].contiguous()
    (dpacked,) = torch.autograd.grad(adjoint.swiglu(leaf, order="gate_up"), leaf, half)
    assert torch.equal(dpacked, registered.swiglu_packed_backward(half, x, "gate_up", ""))


def test_both_ways_return_the_same_kind_of_value(x: Tensor) -> None:
    """One tensor, a tuple, or nothing from an operator that overwrites."""
    direct = {operator.name: operator for operator in operators()}
    arguments: dict[str, tuple[Any, ...]] = {
        "silu": (x, ""),
        "swiglu_backward": (x, x, x, 3, ""),
        "silu_backward": (x, x, ""),
    }
    for name, given in arguments.items():
        assert type(direct[name](*given)) is type(direct[name].call(*given))


# ---------------------------------------------------------------------------------------------- listeners


@every_op
def test_a_dispatch_mode_sees_the_operator(name: str, x: Tensor) -> None:
    expected = OPS[name](x)
    with _Seen() as seen:
        result = OPS[name](x)
    assert f"adjoint::{name}" in seen.called
    assert torch.equal(result, expected)


def test_a_dispatch_mode_sees_the_backward(x: Tensor) -> None:
    leaf = x.requires_grad_()
    y = adjoint.silu(leaf)
    with _Seen() as seen:
        torch.autograd.grad(y, leaf, torch.ones_like(y))
    assert "adjoint::silu_backward" in seen.called


def test_a_dispatch_mode_may_answer_itself(x: Tensor) -> None:
    class Zero(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.adjoint.silu.default:
                return torch.zeros_like(args[0])
            return function(*args, **(kwargs or {}))

    with Zero():
        assert not adjoint.silu(x).any()
    assert adjoint.silu(x).any()


@every_op
def test_fake_tensors_give_fake_tensors(name: str, x: Tensor) -> None:
    mode = FakeTensorMode()
    fake = mode.from_tensor(x.T)
    expected = OPS[name](x.T)
    with mode:
        inside = OPS[name](fake)
    outside = OPS[name](fake)  # the mode is not active, but the tensor remembers it
    for result in (inside, outside):
        assert isinstance(result, FakeTensor)
        assert (result.shape, result.stride(), result.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert result.device == torch.device("cpu")


@every_op
def test_a_subclass_is_dispatched(name: str, x: Tensor) -> None:
    wrapped = _Wrapped(x)
    result = OPS[name](wrapped)
    assert f"adjoint::{name}" in wrapped.called
    assert isinstance(result, _Wrapped)
    assert torch.equal(result.inner, OPS[name](x))


def test_a_subclass_as_the_second_tensor_is_dispatched(x: Tensor) -> None:
    wrapped = _Wrapped(x)
    result = adjoint.swiglu(x, wrapped)
    assert wrapped.called == ["adjoint::swiglu"]
    assert isinstance(result, _Wrapped)


@every_op
def test_a_subclass_without_behaviour_gives_right_values(name: str, x: Tensor) -> None:
    assert torch.equal(OPS[name](x.as_subclass(_Plain)).as_subclass(Tensor), OPS[name](x))


@every_op
def test_the_profiler_sees_the_operator(name: str, x: Tensor) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        OPS[name](x)
    assert f"adjoint::{name}" in {event.key for event in profiled.key_averages()}


@every_op
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_tracing_records_the_operator(name: str, mode: str, x: Tensor) -> None:
    traced = make_fx(OPS[name], tracing_mode=mode)(x)
    targets = [node.target for node in traced.graph.nodes]
    assert getattr(torch.ops.adjoint, name).default in targets
    other = torch.randn(4, 6)
    assert torch.equal(traced(other), OPS[name](other))


def test_tracing_records_the_backward(x: Tensor) -> None:
    def gradient(leaf: Tensor) -> Tensor:
        return torch.autograd.grad(adjoint.silu(leaf).sum(), leaf)[0]

    traced = make_fx(gradient)(x.clone().requires_grad_())
    targets = [node.target for node in traced.graph.nodes]
    assert torch.ops.adjoint.silu_backward.default in targets
    other = torch.randn(4, 6).requires_grad_()
    assert torch.equal(traced(other), gradient(other))


@every_op
def test_meta_tensors_give_meta_tensors(name: str, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _count_dispatches(monkeypatch, name)
    for count, view in enumerate((x, x.T, x[:, ::3]), start=1):
        result, expected = OPS[name](view.to("meta")), OPS[name](view)
        assert result.is_meta
        assert len(calls) == count
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=pytest.mark.kernels)])
def test_lazily_negated_tensors_are_negated(backend: str, x: Tensor, device: torch.device) -> None:
    """The imaginary part of a conjugate is a view whose sign is a flag: a kernel would read it unnegated."""
    preference = adjoint.Preference(backend=backend)
    values = x.to(device)
    negated = torch.complex(values, -values).conj().imag
    assert negated.is_neg()
    assert torch.equal(adjoint.silu(negated, preference=preference), adjoint.silu(values, preference=preference))
    assert torch.equal(
        adjoint.swiglu(values, negated, preference=preference), adjoint.swiglu(values, values, preference=preference)
    )
    plan = adjoint.plan(adjoint.silu, negated, preference=preference)
    assert torch.equal(plan.run(negated), adjoint.silu(values, preference=preference))  # type: ignore[arg-type]


def test_a_function_mode_changes_nothing(x: Tensor) -> None:
    class Quiet(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    expected = adjoint.silu(x)
    with Quiet():
        assert torch.equal(adjoint.silu(x), expected)


# --------------------------------------------------------------------------------------------- transforms


TRANSFORMED: dict[str, Callable[[Tensor], Any]] = {
    "vmap": lambda x: torch.func.vmap(adjoint.silu)(x),
    "vmap of two": lambda x: torch.func.vmap(adjoint.swiglu)(x, x + 1),
    "vmap of a packed one": lambda x: torch.func.vmap(adjoint.swiglu)(x),
    "vmap of one of two": lambda x: torch.func.vmap(adjoint.swiglu, in_dims=(0, None))(x, x[0]),
    "grad": lambda x: torch.func.grad(lambda t: adjoint.silu(t).sum())(x),
    "vmap of grad": lambda x: torch.func.vmap(torch.func.grad(lambda t: adjoint.silu(t).sum()))(x),
    "vjp": lambda x: torch.func.vjp(adjoint.silu, x)[1](torch.ones_like(x)),
    "jacrev": lambda x: torch.func.jacrev(lambda t: adjoint.silu(t).sum())(x),
    "jvp": lambda x: torch.func.jvp(adjoint.silu, (x,), (torch.ones_like(x),)),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_are_refused(name: str, x: Tensor) -> None:
    """By the op, also where something else requires a gradient: never a derivative lost in silence."""
    with pytest.raises(adjoint.Unsupported, match="transforms"):
        TRANSFORMED[name](x)


BATCHED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: adjoint.silu(x).sum(),
    "linear_cross_entropy": lambda x: adjoint.linear_cross_entropy(
        x, torch.ones(3, x.shape[-1]), torch.zeros(x.shape[:-1], dtype=torch.int64)
    ),
}


@pytest.mark.parametrize("name", BATCHED)
def test_batched_gradients_are_refused(name: str) -> None:
    x = torch.ones(4, 2, requires_grad=True)
    with pytest.raises(adjoint.Unsupported, match="batched gradients are not supported"):
        torch.autograd.grad(BATCHED[name](x), x, torch.ones(2), is_grads_batched=True)


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=pytest.mark.kernels)])
def test_forward_mode_is_refused(backend: str, x: Tensor, device: torch.device) -> None:
    x = x.to(device)
    for leaf in (x, x.clone().requires_grad_()):
        with forward_ad.dual_level(), pytest.raises(adjoint.Unsupported, match="silu: forward-mode gradients"):
            dual = forward_ad.make_dual(leaf, torch.ones_like(x))
            adjoint.silu(dual, preference=adjoint.Preference(backend=backend))
