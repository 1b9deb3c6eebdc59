"""The adjoint that overwrites the saved inputs with their gradients, which a caller asks for by reuse_inputs=True."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import adjoint
from adjoint import ArgumentError, Preference, Unsupported
from adjoint.contract.cases import Subject
from adjoint.ops.activation.packing import ORDERS, unpack
from adjoint.ops.activation.sigmoid_gate.cases import SIGMOID_GATE
from adjoint.ops.activation.silu.cases import SILU
from adjoint.ops.activation.swiglu.cases import PACKED, SWIGLU

PLANS = {
    "eager": Preference(backend="eager"),
    "float64": Preference(plan="eager"),
    "triton": Preference(backend="triton"),
}
BACKENDS = ["eager", "float64", pytest.param("triton", marks=pytest.mark.kernels)]

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.T,
    "three axes permuted": lambda t: t.view(6, 2, -1).permute(1, 2, 0),
    "every other": lambda t: t[:, ::2],
    "rows apart": lambda t: t[1:4, 10:50],
    "shifted by one": lambda t: t.flatten()[1:],
}
"""Views without an element twice, of a [6, 80] tensor; packed ones have an even last axis."""

PACKED_LAYOUTS = {name: view for name, view in LAYOUTS.items() if name != "shifted by one"} | {
    "shifted by two": lambda t: t.flatten()[2:],
}

SUBJECTS = (SILU, SWIGLU, *PACKED, SIGMOID_GATE)

every_subject = pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_order = pytest.mark.parametrize("order", ORDERS)


def _inputs(subject: Subject, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(6, 80, generator=generator) * 4).to(dtype).to(device) for _ in subject.inputs]


def _leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


def _upstream(y: Tensor) -> Tensor:
    return torch.linspace(-2, 3, y.numel(), dtype=torch.float64).reshape(y.shape).to(y)


def _cases() -> list[object]:
    return [
        pytest.param(subject, name, view, id=f"{subject.name}-{name}")
        for subject in SUBJECTS
        for name, view in (PACKED_LAYOUTS if subject in PACKED else LAYOUTS).items()
    ]


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("subject", "layout", "view"), _cases())
def test_gradients_lie_where_the_inputs_lay(
    subject: Subject,
    layout: str,
    view: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    backend: str,
    device: torch.device,
) -> None:
    """Same bits as out of place; the same memory, strides included; nothing beside it is touched."""
    preference = PLANS[backend]
    memory = _inputs(subject, device, dtype)
    leaves = _leaves([view(tensor.clone()) for tensor in memory])
    y = subject(*leaves, preference=preference)
    upstream = _upstream(y)
    expected = torch.autograd.grad(y, leaves, upstream)

    reused = _leaves([view(tensor) for tensor in memory])
    untouched = [tensor.clone() for tensor in memory]
    again = subject(*reused, preference=preference, reuse_inputs=True)
    assert torch.equal(again, y)
    assert all(map(torch.equal, memory, untouched)), "the forward wrote to an input"
    gradients = torch.autograd.grad(again, reused, upstream)
    for gradient, leaf, right in zip(gradients, reused, expected, strict=True):
        assert torch.equal(gradient, right)
        assert gradient.data_ptr() == leaf.data_ptr()
        assert gradient.stride() == leaf.stride()
    for written, before, right in zip(memory, untouched, expected, strict=True):
        view(before).copy_(right)
        assert torch.equal(written, before), "wrote beside the input"


@every_backend
@every_subject
def test_out_of_place_leaves_the_inputs_alone(subject: Subject, backend: str, device: torch.device) -> None:
    memory = _inputs(subject, device)
    leaves = _leaves(memory)
    before = [tensor.clone() for tensor in memory]
    y = subject(*leaves, preference=PLANS[backend])
    gradients = torch.autograd.grad(y, leaves, _upstream(y))
    assert all(map(torch.equal, memory, before))
    assert all(g.data_ptr() != leaf.data_ptr() for g, leaf in zip(gradients, leaves, strict=True))


@every_backend
@every_subject
def test_a_second_backward_raises(subject: Subject, backend: str, device: torch.device) -> None:
    leaves = _leaves(_inputs(subject, device))
    y = subject(*leaves, preference=PLANS[backend], reuse_inputs=True).sum()
    first = [g.clone() for g in torch.autograd.grad(y, leaves, retain_graph=True)]
    with pytest.raises(Unsupported, match=rf"{subject.function.__name__}: a second backward.*reuse_inputs=True"):
        torch.autograd.grad(y, leaves, retain_graph=True)
    assert all(map(torch.equal, [leaf.detach() for leaf in leaves], first)), "the refused backward wrote"


@every_backend
@every_subject
@pytest.mark.parametrize("other", [torch.sin, lambda x: x * x], ids=["sin", "square"])
def test_another_op_does_not_read_gradients_as_inputs(
    subject: Subject, other: Callable[[Tensor], Tensor], backend: str, device: torch.device
) -> None:
    """An op that saved the same tensor, and whose backward comes later, raises autograd's own error."""
    preference = PLANS[backend]
    for which in range(len(subject.inputs)):
        leaves = _leaves(_inputs(subject, device))
        inner = [leaf * 1 for leaf in leaves]
        beside = other(inner[which]).sum()  # recorded first, so its backward runs last
        y = subject(*inner, preference=preference, reuse_inputs=True).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (beside + y).backward()


@every_backend
@every_subject
def test_another_op_that_comes_first_is_right(subject: Subject, backend: str, device: torch.device) -> None:
    preference = PLANS[backend]

    def gradients(reuse: bool) -> tuple[Tensor, ...]:
        leaves = _leaves(_inputs(subject, device))
        inner = [leaf * 1 for leaf in leaves]
        y = subject(*inner, preference=preference, reuse_inputs=reuse).sum()
        beside = sum(torch.sin(tensor).sum() for tensor in inner)
        return torch.autograd.grad(beside + y, leaves)

    assert all(map(torch.equal, gradients(True), gradients(False)))


@every_subject
def test_inputs_changed_in_between_raise(subject: Subject, device: torch.device) -> None:
    leaves = _leaves(_inputs(subject, device))
    inner = [leaf * 1 for leaf in leaves]
    y = subject(*inner, reuse_inputs=True).sum()
    inner[-1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@every_subject
def test_compilation_is_refused_in_words(subject: Subject, device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: subject(*x, reuse_inputs=True), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"(?s)reuse_inputs=True is not available under torch\.compile"):
        compiled(*_leaves(_inputs(subject, device)))
    torch._dynamo.reset()


@every_subject
def test_without_gradients_it_is_ignored(subject: Subject, device: torch.device) -> None:
    """Even for inputs it could not overwrite."""
    memory = _inputs(subject, device)
    expected = subject(*memory)
    assert torch.equal(subject(*memory, reuse_inputs=True), expected)
    with torch.no_grad():
        assert torch.equal(subject(*_leaves(memory), reuse_inputs=True), expected)
    with torch.inference_mode():
        assert torch.equal(subject(*memory, reuse_inputs=True), expected)
    overlapping = [tensor[:1].expand(6, 80) for tensor in memory]
    assert torch.equal(subject(*overlapping, reuse_inputs=True), expected[:1].expand(expected.shape))


@every_subject
@pytest.mark.parametrize(
    "overlap",
    [lambda t: t[:1].expand(6, 80), lambda t: t.flatten().as_strided((10, 20), (7, 1))],
    ids=["expanded", "overlapping rows"],
)
def test_overlapping_inputs_are_refused(
    subject: Subject, overlap: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    for index, name in enumerate(subject.inputs):
        tensors = [overlap(tensor) for tensor in _inputs(subject, device)]
        plain = [tensor.contiguous() for tensor in tensors]
        plain[index] = tensors[index]
        leaves = _leaves(plain)
        with pytest.raises(ArgumentError, match=rf"reuse_inputs=True needs {name} to hold each element once"):
            subject(*leaves, reuse_inputs=True)
        subject(*leaves)  # out of place, it is served


def test_one_tensor_as_gate_and_up_is_refused(device: torch.device) -> None:
    x = torch.randn(4, 6, device=device, requires_grad=True)
    for gate, up in ((x, x), (x, x.view(4, 6)), (x[:3], x[1:]), (x[:, :4], x[:, 2:])):
        with pytest.raises(ArgumentError, match="needs gate and up in separate memory"):
            adjoint.swiglu(gate, up, reuse_inputs=True)


@every_backend
@every_order
def test_halves_of_one_tensor_are_separate(order: str, backend: str, device: torch.device) -> None:
    """As gate and up, they give the gradient of the packed tensor, in its memory."""
    preference = PLANS[backend]
    (memory,) = _inputs(SILU, device)
    packed = memory.clone().requires_grad_()
    y = adjoint.swiglu(packed, order=order, preference=preference)  # type: ignore[arg-type]
    (expected,) = torch.autograd.grad(y, packed, _upstream(y))
    gate, up = _leaves(list(unpack(memory, order)))
    again = adjoint.swiglu(gate, up, reuse_inputs=True, preference=preference)
    torch.autograd.grad(again, (gate, up), _upstream(y))
    assert torch.equal(memory, expected)


@every_backend
@pytest.mark.parametrize("wanted", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_gradient_alone_leaves_the_other_input_alone(
    wanted: int, layout: str, backend: str, device: torch.device
) -> None:
    preference = PLANS[backend]

    def gradient(reuse: bool) -> tuple[Tensor, list[Tensor]]:
        tensors = [LAYOUTS[layout](tensor) for tensor in _inputs(SWIGLU, device)]
        tensors[wanted].requires_grad_()
        y = adjoint.swiglu(*tensors, reuse_inputs=reuse, preference=preference)
        return torch.autograd.grad(y, tensors[wanted], _upstream(y))[0], tensors

    got, inputs = gradient(True)
    expected, untouched = gradient(False)
    assert torch.equal(got, expected)
    assert got.data_ptr() == inputs[wanted].data_ptr()
    assert torch.equal(inputs[1 - wanted], untouched[1 - wanted])


@every_backend
@every_subject
def test_an_upstream_in_the_inputs_memory_is_read_first(subject: Subject, backend: str, device: torch.device) -> None:
    """As when the upstream gradient is a view of an input: elements are overwritten out of order."""
    preference = PLANS[backend]

    def gradients(reuse: bool) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(4)
        inputs = [torch.randn(128, 256, generator=generator).to(device) for _ in subject.inputs]  # several tiles
        leaves = _leaves(inputs)
        y = subject(*leaves, preference=preference, reuse_inputs=reuse)
        dy = inputs[-1].as_strided(y.shape, (1, y.shape[0]))
        return torch.autograd.grad(y, leaves, dy)

    assert all(map(torch.equal, gradients(True), gradients(False)))


@every_backend
@every_subject
def test_plan_shows_the_operator(subject: Subject, backend: str, device: torch.device) -> None:
    memory = _inputs(subject, device)
    preference = PLANS[backend]
    chosen = adjoint.plan(subject.function, *memory, preference=preference, reuse_inputs=True, **subject.keywords)
    plain = adjoint.plan(subject.function, *memory, preference=preference, **subject.keywords)
    assert chosen.adjoint is not None and plain.adjoint is not None
    assert chosen.adjoint.operator.name == plain.adjoint.operator.name + "_reuse"
    assert chosen.adjoint.sku.op.endswith("_reuse")
    assert {k: str(g) for k, g in chosen.adjoint.guarantee.items()} == {
        k: str(g) for k, g in plain.adjoint.guarantee.items()
    }
    y = chosen.run(*memory)
    upstream = _upstream(y)  # type: ignore[arg-type]
    expected = plain.adjoint.run(upstream, *memory)
    chosen.adjoint.run(upstream, *memory)
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert all(map(torch.equal, memory, expected))


@every_backend
@every_subject
def test_checkpointing_recomputes_what_was_overwritten(subject: Subject, backend: str, device: torch.device) -> None:
    def block(*tensors: Tensor, reuse: bool) -> Tensor:
        inner = [tensor * 1.5 for tensor in tensors]
        return subject(*inner, reuse_inputs=reuse, preference=PLANS[backend])

    leaves = _leaves(_inputs(subject, device))
    expected = torch.autograd.grad(block(*leaves, reuse=False).sum(), leaves)
    y = checkpoint(block, *leaves, reuse=True, use_reentrant=False)
    assert isinstance(y, Tensor)
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), leaves), expected))


@every_subject
def test_saved_tensor_hooks_keep_the_inputs(subject: Subject, device: torch.device) -> None:
    """Where a hook stores a copy, the copy is overwritten, and the gradients are right all the same."""
    memory = _inputs(subject, device)
    leaves = _leaves(memory)
    before = [tensor.clone() for tensor in memory]
    y = subject(*leaves)
    expected = torch.autograd.grad(y, leaves, _upstream(y))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = subject(*leaves, reuse_inputs=True)
    assert all(map(torch.equal, torch.autograd.grad(y, leaves, _upstream(y)), expected))
    assert all(map(torch.equal, memory, before))


def test_a_parameter_is_not_overwritten() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(ArgumentError, match="would overwrite x, a parameter"):
        adjoint.silu(weight, reuse_inputs=True)
    with pytest.raises(ArgumentError, match="would overwrite up, a parameter"):
        adjoint.swiglu(torch.ones(4, requires_grad=True) * 1, weight, reuse_inputs=True)
    for view in (weight.view(2, 2), weight[1:], weight.view(2, 2).T[0]):
        with pytest.raises(ArgumentError, match="would overwrite x, a parameter or a view of one"):
            adjoint.silu(view, reuse_inputs=True)
