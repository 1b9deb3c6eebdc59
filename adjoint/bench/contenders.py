"""The contenders of a workload: ours, torch eager, torch.compile, and the `peers`, each ready to run.

A contender computes one direction of one workload. Everything that is not timed happens when it is built: the choice of
the plan, the compilation, the recording of the graph.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjoint.contract import directions
from adjoint.contract.cases import Subject, Workload
from adjoint.contract.inputs import Inputs, differentiable, leaves
from adjoint.core.errors import Unsupported
from adjoint.core.guarantee import Guarantee
from adjoint.core.plan import plan
from adjoint.core.preference import resolve

FORWARD, BACKWARD, STEP = "forward", "backward", "forward + backward"
"""The directions. A step goes through autograd for every contender, which decides itself what to keep in between."""

KEPT_BYTES = 2**33
"""The most memory for the exact results of one task while its contenders are compared with them."""


@dataclass(frozen=True)
class Task:
    """One direction of a workload on its inputs. `upstream` has a gradient for each output."""

    workload: Workload
    direction: str
    inputs: Inputs
    upstream: tuple[Tensor, ...]
    _exact: dict[int, tuple[Tensor, ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def device(self) -> torch.device:
        return differentiable(self.inputs)[0].device

    @property
    def arguments(self) -> Inputs:
        """The arguments of this direction's reference."""
        return self.inputs if self.direction == FORWARD else (*self.upstream, *self.inputs)

    def reference(self, *arguments: Tensor | None) -> tuple[Tensor, ...]:
        subject = self.workload.subject
        return as_tuple((subject.reference if self.direction == FORWARD else subject.reference_backward)(*arguments))

    def exact(self, piece: int, arguments: Inputs) -> tuple[Tensor, ...]:
        """The reference's results for a piece of the arguments. They are kept for all contenders if memory allows."""
        if piece in self._exact:
            return self._exact[piece]
        results = self.reference(*arguments)
        if sum(x.nbytes for xs in (results, *self._exact.values()) for x in xs) <= KEPT_BYTES:
            self._exact[piece] = results
        return results


@dataclass(frozen=True)
class Contender:
    """Work ready to be timed.

    Attributes:
        run: does the work and returns the public outputs, or a gradient for each floating input.
        restore: restores the tensors that `run` overwrites.
        outputs: the memory that `run` writes to, if it is ours. It is poisoned before the check.
        guarantee: the promises of the results, in their order; None if nothing is promised.
        kept: gives the bytes that its forward keeps for its backward beside the inputs; None if it has no autograd
            function.
        choices: the choices of its forward among equal values, for `Workload.chosen`.
        sku: the SKU of our plan; for a step, those of both directions.
    """

    run: Callable[[], tuple[Tensor, ...]]
    restore: Callable[[], None] | None = None
    outputs: tuple[Tensor, ...] = ()
    guarantee: tuple[Guarantee, ...] | None = None
    kept: Callable[[], int] | None = None
    choices: tuple[Tensor, ...] = ()
    sku: str = ""


Builder = Callable[[Task], Contender]


class NotInstalled(Exception):
    """A peer that is not installed; the sentence says how to install it."""


class NeedsGpu(Exception):
    """A peer that does not run on this device."""


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _floating(function: Callable[..., Any], *arguments: Any) -> tuple[Tensor, ...]:
    """The results of a call without its choices, which are integers."""
    return tuple(x for x in as_tuple(function(*arguments)) if x.is_floating_point())


def _without_graph(function: Callable[..., Any], *arguments: Any) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return _floating(function, *arguments)


def kept_bytes(function: Callable[..., Any], inputs: Inputs, subject: Subject | None = None) -> int:
    """The bytes that autograd keeps of a call, without the inputs. A subject says which inputs have gradients."""
    own = leaves(inputs) if subject is None else subject.leaves(inputs)
    bytes_of_storage: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        bytes_of_storage[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*own)
    for tensor in own:
        if tensor is not None:
            bytes_of_storage.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(bytes_of_storage.values())


def ours(task: Task) -> Contender:
    """The plan that a call would use, which writes into allocated memory. A step goes through the public function."""
    subject, preference = task.workload.subject, task.workload.preference
    text = resolve(preference)
    function = subject if preference is None else partial(subject, preference=preference)
    if task.direction == STEP:
        positional, named = subject.arguments(task.inputs)
        chosen = plan(subject.function, *positional, preference=preference, **named)
        adjoint = chosen.adjoint
        if adjoint is None:
            raise Unsupported(f"{subject.name} has no adjoint")
        promised = tuple(adjoint.guarantee[name] for name in subject.gradients(task.inputs))
        return replace(through_autograd(function, task), guarantee=promised, sku=f"{chosen.sku}; {adjoint.sku}")
    call = subject.bind(task.inputs)
    if set(call.operator.outputs) <= set(call.operator.tensors):
        return _in_place(task)
    timed = directions.forward(call, text)
    names = call.operator.outputs[: call.public_outputs]
    if task.direction == BACKWARD:
        if call.adjoint is None:
            raise Unsupported(f"{subject.name} has no adjoint")
        timed = directions.backward(call, task.upstream, timed.run(), text)
        names = subject.gradients(task.inputs)
    chosen = timed.plan.prepare()
    workspace = timed.workspace()
    try:
        outputs = chosen.allocate(timed.arguments)
    except Unsupported:  # the sizes of its outputs depend on values, so it allocates them itself
        outputs = None

    def run() -> tuple[Tensor, ...]:
        with torch.no_grad():
            results = timed.gradients(chosen.execute(timed.arguments, outputs, workspace))
        return tuple(results[name] for name in names)

    promised = tuple(chosen.guarantee[name] for name in names)
    return Contender(
        run,
        outputs=outputs or (),
        guarantee=promised,
        kept=lambda: kept_bytes(function, task.inputs, subject),
        sku=str(chosen.sku),
    )


def _in_place(task: Task) -> Contender:
    """An operator that returns nothing and overwrites inputs. Its results are those inputs, in memory of their own."""
    subject = task.workload.subject
    call = subject.bind(tuple(None if x is None else x.clone() for x in task.inputs))
    timed = directions.forward(call, resolve(task.workload.preference))
    chosen, names = timed.plan.prepare(), call.operator.tensors
    places = [names.index(name) for name in call.operator.outputs]

    def restore() -> None:
        for place in places:
            timed.arguments[place].copy_(task.inputs[place])

    def run() -> tuple[Tensor, ...]:
        with torch.no_grad():
            chosen.execute(timed.arguments, (), timed.workspace())
        return tuple(timed.arguments[place] for place in places)

    promised = tuple(chosen.guarantee[name] for name in call.operator.outputs)
    return Contender(run, restore=restore, guarantee=promised, sku=str(chosen.sku))


def through_autograd(function: Callable[..., Any], task: Task) -> Contender:
    """A function through autograd: its forward without a graph, its backward alone over a kept graph, or both as one
    step."""
    if task.direction == FORWARD:
        return Contender(lambda: _without_graph(function, *task.inputs))
    subject = task.workload.subject
    own = subject.leaves(task.inputs)
    slopes = subject.differentiable(own)
    if task.direction == STEP:
        return Contender(lambda: torch.autograd.grad(_floating(function, *own), slopes, task.upstream))
    everything = as_tuple(function(*own))
    outputs = tuple(x for x in everything if x.is_floating_point())
    return Contender(
        lambda: torch.autograd.grad(outputs, slopes, task.upstream, retain_graph=True),
        kept=lambda: kept_bytes(function, task.inputs, subject),
        choices=tuple(x for x in everything if not x.is_floating_point()),
    )


def eager(task: Task) -> Contender:
    """The same work in torch's own functions."""
    assert task.workload.baseline is not None
    return through_autograd(task.workload.baseline, task)


def compiled(task: Task) -> Contender:
    """The same work through `torch.compile`, for exactly these sizes."""
    import torch._functorch.config as functorch

    # Compilations for another workload must not turn this one's sizes into symbols.
    torch._dynamo.reset()
    function = torch.compile(task.workload.baseline, dynamic=False, fullgraph=True)
    # A donated buffer is freed by the first backward; here one graph is run many times.
    with functorch.patch(donated_buffer=False):
        contender = through_autograd(function, task)
        contender.run()
    return contender


def deterministic(task: Task) -> Contender:
    """The same work in torch's own functions, in torch's deterministic mode, which is restored afterwards."""
    plain = eager(task)

    def run() -> tuple[Tensor, ...]:
        enabled = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            return plain.run()
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)

    return Contender(run)


def gradients_by(function: Callable[[tuple[Tensor, ...], Inputs], tuple[Tensor, ...]]) -> Builder:
    """Builds a contender from a plain function of upstream gradients and inputs, outside autograd."""

    return lambda task: Contender(lambda: _without_graph(function, task.upstream, task.inputs))
