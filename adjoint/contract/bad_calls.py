"""The calls that every op must refuse, made from an op's first case: an op lists only those of its own."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from adjoint.contract import directions
from adjoint.contract.cases import BadCall, Subject
from adjoint.contract.inputs import Inputs, differentiable, leaves
from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.core.plan import Plan, plan
from adjoint.core.preference import Preference

SEED = 0


def shared(subject: Subject) -> Iterator[BadCall]:
    """Calls of a subject that must raise, and what their errors must say."""
    op = subject.name.partition("[")[0].rpartition(".")[2]
    example = _inputs(subject, torch.device("cpu"))
    for place, (name, tensor) in enumerate(zip(subject.inputs, example, strict=True)):
        if tensor is not None:
            yield from _wrong_input(subject, op, place, name, tensor)
    for name, call, error, words in _WHOLE_CALLS:
        yield BadCall(f"{subject.name}: {name}", _on(call, subject), error, (op, *words))


def _inputs(subject: Subject, device: torch.device) -> Inputs:
    dtype = torch.float32 if torch.float32 in subject.dtypes else subject.dtypes[0]
    return subject.cases[0].make(dtype, device, torch.Generator().manual_seed(SEED))


def _on(call: Callable[[Subject, Inputs], Any], subject: Subject) -> Callable[[torch.device], Any]:
    return lambda device: call(subject, _inputs(subject, device))


# ---------------------------------------------------------------------------------------- wrong inputs


def _wrong_input(subject: Subject, op: str, place: int, name: str, tensor: Tensor) -> Iterator[BadCall]:
    """One input exchanged for what it must not be."""

    def exchanged(change: Callable[[Tensor], Any]) -> Callable[[torch.device], Any]:
        def call(device: torch.device) -> Any:
            inputs = list(_inputs(subject, device))
            inputs[place] = change(inputs[place])
            return subject(*inputs)

        return call

    def bad(words: str, change: Callable[[Tensor], Any], *expected: str) -> BadCall:
        return BadCall(f"{subject.name}: {words.format(name)}", exchanged(change), ArgumentError, (op, *expected))

    yield bad("{} that is a list", lambda x: [1.0], name, "list")
    if tensor.dim():
        yield bad("sparse {}", lambda x: x.to_sparse(), name, "dense")
    if tensor.is_floating_point():
        yield bad("{} of whole numbers", lambda x: x.long(), name, "int64")
        yield bad("complex {}", lambda x: x.to(torch.complex64), name, "complex64")
    else:
        yield bad("{} of floating numbers", lambda x: x.double(), name, "float64")
    if place:
        yield bad("{} elsewhere", lambda x: x.to("meta"), "meta")


# ----------------------------------------------------------------------------------------- whole calls


def _plan(subject: Subject, inputs: Inputs, **preference: Any) -> Plan:
    positional, named = subject.arguments(inputs)
    return plan(subject.function, *positional, preference=Preference(**preference), **named)


def _run(subject: Subject, inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Any:
    """Runs the forward's plan into outputs that were changed."""
    forward = directions.forward(subject.bind(inputs), "")
    first, *others = forward.plan.allocate(forward.arguments)
    return forward.run(out=(change(first), *others))


def _differentiate_twice(subject: Subject, inputs: Inputs) -> None:
    own = leaves(inputs)
    first = _first_output(subject(*own))
    gradients = torch.autograd.grad(first.sum(), differentiable(own), create_graph=True, allow_unused=True)
    sum(gradient.sum() for gradient in gradients if gradient is not None).backward()  # type: ignore[union-attr]


def _differentiate_forwards(subject: Subject, inputs: Inputs) -> Any:
    place = next(i for i, x in enumerate(inputs) if x is not None and x.is_floating_point())
    return torch.func.jvp(
        lambda x: _first_output(subject(*inputs[:place], x, *inputs[place + 1 :])), (inputs[place],), (inputs[place],)
    )


def _vectorize(subject: Subject, inputs: Inputs) -> Any:
    place = next(i for i, x in enumerate(inputs) if x is not None and x.is_floating_point())
    several = torch.stack((inputs[place], inputs[place]))
    return torch.vmap(lambda x: _first_output(subject(*inputs[:place], x, *inputs[place + 1 :])))(several)


def _first_output(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else _first_output(value[0])


_WHOLE_CALLS: tuple[tuple[str, Callable[[Subject, Inputs], Any], type[Exception], tuple[str, ...]], ...] = (
    ("create_graph=True", _differentiate_twice, Unsupported, ("second derivative", "create_graph")),
    ("a forward-mode gradient", _differentiate_forwards, Unsupported, ("torch.func",)),
    ("vmap", _vectorize, Unsupported, ("torch.func", "vmap")),
    (
        "an unknown plan",
        lambda subject, inputs: subject(*inputs, preference=Preference(plan="fastest")),
        Unsupported,
        ("fastest", "eager"),
    ),
    (
        "too few tensors, to the plan",
        lambda subject, inputs: _plan(subject, inputs).run(),
        ArgumentError,
        ("the plan takes", "got 0"),
    ),
    (
        "out= of another shape",
        lambda subject, inputs: _run(subject, inputs, lambda out: out.new_empty((*out.shape, 2))),
        ArgumentError,
        ("out=", "shape"),
    ),
    (
        "out= of another dtype",
        lambda subject, inputs: _run(subject, inputs, lambda out: out.to(torch.complex64)),
        ArgumentError,
        ("out=", "complex64"),
    ),
    (
        "out= elsewhere",
        lambda subject, inputs: _run(subject, inputs, lambda out: out.to("meta")),
        ArgumentError,
        ("out=", "meta"),
    ),
)
