"""The calls that every op must refuse, made from the op's first case; an op lists only its own bad calls."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from adjoint.contract import directions
from adjoint.contract.cases import BadCall, Subject
from adjoint.contract.inputs import Inputs
from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.core.plan import plan
from adjoint.core.preference import Preference

SEED = 0


def shared(subject: Subject) -> Iterator[BadCall]:
    """Calls of a subject that must raise, with words that their errors must contain."""
    op = subject.name.partition("[")[0].rpartition(".")[2]
    example = _inputs(subject, torch.device("cpu"))
    for place, (name, tensor) in enumerate(zip(subject.inputs, example, strict=True)):
        if tensor is not None:
            yield from _wrong_input(subject, op, place, name, tensor)
    yield from _whole_calls(subject, op)


def _inputs(subject: Subject, device: torch.device) -> Inputs:
    dtype = torch.float32 if torch.float32 in subject.dtypes else subject.dtypes[0]
    return subject.cases[0].make(dtype, device, torch.Generator().manual_seed(SEED))


def _wrong_input(subject: Subject, op: str, place: int, name: str, tensor: Tensor) -> Iterator[BadCall]:
    """Calls in which one input is replaced by a wrong one."""

    def bad(words: str, change: Callable[[Tensor], Any], *expected: str) -> BadCall:
        def call(device: torch.device) -> Any:
            inputs = list(_inputs(subject, device))
            inputs[place] = change(inputs[place])
            return subject(*inputs)

        return BadCall(f"{subject.name}: {words.format(name)}", call, op, *expected)

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


def _differentiate_twice(subject: Subject, inputs: Inputs) -> None:
    own = subject.leaves(inputs)
    first = _first_output(subject(*own))
    gradients = torch.autograd.grad(first.sum(), subject.differentiable(own), create_graph=True, allow_unused=True)
    sum(gradient.sum() for gradient in gradients if gradient is not None).backward()  # type: ignore[union-attr]


def _transform(subject: Subject, inputs: Inputs, transform: Callable[..., Any]) -> Any:
    """Applies a transform to the function from the first floating input to the first output, and calls the result."""
    place = subject.places(inputs)[0]
    return transform(lambda x: _first_output(subject(*inputs[:place], x, *inputs[place + 1 :])), inputs[place])


def _first_output(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else _first_output(value[0])


def _whole_calls(subject: Subject, op: str) -> Iterator[BadCall]:
    """Calls that are wrong as a whole."""

    def bad(name: str, call: Callable[[Inputs], Any], *words: str, error: type[Exception] = ArgumentError) -> BadCall:
        whole = f"{subject.name}: {name}"
        return BadCall(whole, lambda device: call(_inputs(subject, device)), op, *words, error=error)

    def run(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Any:
        """Runs the forward's plan with `out=` whose first tensor was changed."""
        forward = directions.forward(subject.bind(inputs), "")
        first, *others = forward.plan.allocate(forward.arguments)
        return forward.run(out=(change(first), *others))

    def jvp(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        return torch.func.jvp(function, (x,), (x,))

    def vmap(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        return torch.vmap(function)(torch.stack((x, x)))

    def run_without_tensors(inputs: Inputs) -> Any:
        positional, named = subject.arguments(inputs)
        return plan(subject.function, *positional, **named).run()

    fastest = Preference(plan="fastest")
    second = ("second derivative", "create_graph")
    yield bad("create_graph=True", lambda x: _differentiate_twice(subject, x), *second, error=Unsupported)
    yield bad("a forward-mode gradient", lambda x: _transform(subject, x, jvp), "torch.func", error=Unsupported)
    yield bad("vmap", lambda x: _transform(subject, x, vmap), "torch.func", "vmap", error=Unsupported)
    yield bad("an unknown plan", lambda x: subject(*x, preference=fastest), "fastest", "eager", error=Unsupported)
    yield bad("too few tensors, to the plan", run_without_tensors, "the plan takes", "got 0")
    yield bad("out= of another shape", lambda x: run(x, lambda y: y.new_empty((*y.shape, 2))), "out=", "shape")
    yield bad("out= of another dtype", lambda x: run(x, lambda y: y.to(torch.complex64)), "out=", "complex64")
    yield bad("out= elsewhere", lambda x: run(x, lambda y: y.to("meta")), "out=", "meta")
