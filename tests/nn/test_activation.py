"""The modules are the functions, with their options bound."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import adjoint
from adjoint.nn import SigmoidGate, SiLU, SwiGLU
from adjoint.ops.activation.packing import ORDERS

EAGER = adjoint.Preference(backend="eager")


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("order", ORDERS)
def test_packed_is_the_function(order: str) -> None:
    packed = normal(3, 8)
    assert torch.equal(SwiGLU(order)(packed), adjoint.swiglu(packed, order=order))


def test_the_orders_differ() -> None:
    packed = normal(3, 8)
    results = [SwiGLU(order)(packed) for order in ORDERS]
    assert not any(torch.equal(results[i], results[j]) for i in range(3) for j in range(i))


@pytest.mark.parametrize("order", ORDERS)
def test_two_tensors_need_no_order(order: str) -> None:
    gate, up = normal(2, 3, 4)
    assert torch.equal(SwiGLU(order)(gate, up), adjoint.swiglu(gate, up))


def test_silu_is_the_function() -> None:
    x = normal(3, 5)
    assert torch.equal(SiLU()(x), adjoint.silu(x))


def test_sigmoid_gate_is_the_function() -> None:
    x, gate = normal(2, 3, 5)
    assert torch.equal(SigmoidGate()(x, gate), adjoint.sigmoid_gate(x, gate))
    assert torch.equal(SigmoidGate()(x, gate), x * gate.sigmoid())
    assert repr(SigmoidGate(reuse_inputs=True, preference=EAGER)) == (
        f"SigmoidGate(reuse_inputs=True, preference={EAGER!r})"
    )
    with pytest.raises(adjoint.Unsupported, match="no_such_plan"):
        SigmoidGate(preference=adjoint.Preference(plan="no_such_plan"))(x, gate)
    y = SigmoidGate(reuse_inputs=True)(x.requires_grad_() * 1, gate * 1)
    y.sum().backward(retain_graph=True)
    with pytest.raises(adjoint.Unsupported, match="second backward"):
        y.sum().backward()


@pytest.mark.parametrize("module", [SiLU(), SwiGLU(), SwiGLU("interleaved")])
def test_gradients_reach_the_input(module: nn.Module) -> None:
    x = normal(3, 8).double().requires_grad_()
    assert torch.autograd.gradcheck(module, x)


def test_unknown_order_is_an_error_at_construction() -> None:
    with pytest.raises(adjoint.ArgumentError, match=r"SwiGLU: order must be one of .*, got 'up'"):
        SwiGLU("up")  # type: ignore[arg-type]


@pytest.mark.parametrize("module", [SiLU(reuse_inputs=True), SwiGLU(reuse_inputs=True)])
def test_reuse_inputs_is_passed_on(module: nn.Module) -> None:
    x = normal(3, 8).requires_grad_()
    y = module(x * 1)
    y.sum().backward(retain_graph=True)
    with pytest.raises(adjoint.Unsupported, match="second backward"):
        y.sum().backward()


@pytest.mark.parametrize("module", [SiLU, SwiGLU])
def test_preference_is_passed_on(module: type[nn.Module]) -> None:
    x = normal(3, 8)
    assert torch.equal(module(preference=EAGER)(x), module()(x))
    with pytest.raises(adjoint.Unsupported, match="no_such_plan"):
        module(preference=adjoint.Preference(plan="no_such_plan"))(x)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (SiLU(), "SiLU()"),
        (SiLU(reuse_inputs=True), "SiLU(reuse_inputs=True)"),
        (SwiGLU(), "SwiGLU(order='gate_up')"),
        (SwiGLU("interleaved", reuse_inputs=True), "SwiGLU(order='interleaved', reuse_inputs=True)"),
        (SwiGLU(preference=EAGER), f"SwiGLU(order='gate_up', preference={EAGER!r})"),
    ],
)
def test_representation(module: nn.Module, text: str) -> None:
    assert repr(module) == text


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("module", [SiLU(preference=EAGER), SwiGLU("up_gate", reuse_inputs=True, preference=EAGER)])
def test_copies_keep_every_option(module: nn.Module, copied: object) -> None:
    twin = copied(module)  # type: ignore[operator]
    x = normal(3, 8)
    assert repr(twin) == repr(module)
    assert torch.equal(twin(x), module(x))


@pytest.mark.parametrize("module", [SiLU(), SwiGLU()])
def test_there_are_no_parameters(module: nn.Module) -> None:
    assert list(module.parameters()) == []
    assert module.state_dict() == {}
    module.load_state_dict({})


@pytest.mark.parametrize("module", [SiLU(), SwiGLU("interleaved"), SwiGLU(preference=EAGER)])
def test_compiles_whole(module: nn.Module) -> None:
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, twin = normal(3, 8).requires_grad_(), normal(3, 8).requires_grad_()
    module(x).sum().backward()
    compiled(twin).sum().backward()
    assert torch.equal(compiled(twin), module(x))
    assert x.grad is not None and twin.grad is not None
    assert torch.equal(x.grad, twin.grad)
