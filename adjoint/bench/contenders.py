"""What is timed: ours, torch eager, torch.compile, and whatever `peers` adds, each ready to run.

A contender computes one direction of one workload. Building it does everything that is not to be
timed: choosing the plan, compiling, recording the graph.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint.core.cases import Workload
from adjoint.core.guarantee import Guarantee

FORWARD, BACKWARD = "forward", "backward"
DIRECTIONS = (FORWARD, BACKWARD)


@dataclass(frozen=True)
class Task:
    """One direction of a workload on its inputs; `upstream` holds a gradient per output."""

    workload: Workload
    direction: str
    inputs: tuple[Tensor, ...]
    upstream: tuple[Tensor, ...]

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """What the reference of this direction takes."""
        return self.inputs if self.direction == FORWARD else (*self.upstream, *self.inputs)

    def reference(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        subject = self.workload.subject
        return as_tuple((subject.reference if self.direction == FORWARD else subject.reference_backward)(*arguments))


@dataclass(frozen=True)
class Contender:
    """Work ready to be timed.

    Attributes:
        run: does the work and returns the outputs.
        restore: puts back what `run` overwrites.
        outputs: where `run` writes, when that is memory of ours: poisoned before the check.
        guarantee: what the outputs promise, in their order; None where nothing is promised.
    """

    run: Callable[[], tuple[Tensor, ...]]
    restore: Callable[[], None] | None = None
    outputs: tuple[Tensor, ...] = ()
    guarantee: tuple[Guarantee, ...] | None = None


Builder = Callable[[Task], Contender]


class NotInstalled(Exception):
    """A peer that is not there; the sentence says how to get it."""


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def ours(task: Task) -> Contender:
    """The plan a call would use, writing into memory that is there already."""
    subject = task.workload.subject
    plan = adjoint.plan(subject.function, *task.inputs, **subject.keywords).prepare()
    if task.direction == BACKWARD:
        if plan.adjoint is None:
            raise adjoint.Unsupported(f"{subject.name} has no adjoint")
        plan = plan.adjoint
    arguments = (*task.arguments, *plan.problem.options)
    outputs = plan.allocate(arguments)
    size = plan.workspace_bytes
    workspace = torch.empty(size, dtype=torch.uint8, device=task.device) if size else None

    def run() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return plan.execute(arguments, outputs, workspace)

    promises: Mapping[str, Guarantee] = plan.guarantee
    return Contender(run, outputs=outputs, guarantee=tuple(promises[name] for name in plan.operator.outputs))


def _through_autograd(function: Callable[..., Any], task: Task) -> Contender:
    """Forward without a graph; backward over a graph that is kept, so that it alone is timed."""
    if task.direction == FORWARD:

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return as_tuple(function(*task.inputs))

        return Contender(forward)

    leaves = tuple(tensor.detach().requires_grad_() for tensor in task.inputs)
    outputs = as_tuple(function(*leaves))
    return Contender(lambda: torch.autograd.grad(outputs, leaves, task.upstream, retain_graph=True))


def eager(task: Task) -> Contender:
    """The same work in torch's own functions."""
    return _through_autograd(task.workload.baseline, task)


def compiled(task: Task) -> Contender:
    """The same work through `torch.compile`, for exactly these sizes."""
    import torch._functorch.config as functorch

    # What another workload compiled must not turn this one's sizes into symbols.
    torch._dynamo.reset()
    function = torch.compile(task.workload.baseline, dynamic=False, fullgraph=True)
    # A donated buffer is freed by the first backward; here one graph is run many times.
    with functorch.patch(donated_buffer=False):
        contender = _through_autograd(function, task)
        contender.run()
    return contender
