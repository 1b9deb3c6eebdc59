"""Both directions of a call, each as the plan that serves it and the arguments of that plan."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjoint.core.op.operator import Operator
from adjoint.core.plan import Call, Plan, select


@dataclass(frozen=True)
class Bound:
    """A plan and the arguments of its operator, including its options."""

    plan: Plan
    arguments: tuple[Any, ...]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The arguments of `plan.run`."""
        return self.arguments[: len(self.plan.operator.tensors)]

    def run(self, plan: Plan | None = None, **memory: Any) -> tuple[Tensor, ...]:
        """Runs the plan, or another plan of the same operator, and returns all outputs of the operator."""
        results = (plan or self.plan).run(*self.tensors, **memory)
        return results if isinstance(results, tuple) else (results,)

    def gradients(self, results: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """The gradients in a backward's results, by the names of its outputs.

        A row-sparse gradient has two entries, its rows and their values, although autograd gets one tensor.
        """
        operator = self.plan.operator
        if operator.assemble is not None:
            assembled = operator.assemble(results, self.arguments)
            results = assembled if len(assembled) == len(operator.outputs) else results
        return dict(zip(operator.outputs, results, strict=True))

    def workspace(self) -> Tensor | None:
        """A workspace for the plan; None where it needs none or allocates its own."""
        size = self.plan.workspace_bytes
        return torch.empty(size, dtype=torch.uint8, device=self.plan.problem.device) if size else None


def forward(call: Call, preference: str) -> Bound:
    """The forward of a call."""
    return _bound(call.operator, call.arguments, preference)


def backward(call: Call, upstream: tuple[Tensor, ...], outputs: tuple[Tensor, ...], preference: str) -> Bound:
    """The backward of a call, from gradients of its public outputs and all outputs of the forward operator."""
    assert call.adjoint is not None and call.adjoint_arguments is not None
    return _bound(call.adjoint, call.adjoint_arguments(upstream, outputs), preference)


def _bound(operator: Operator, arguments: tuple[Any, ...], preference: str) -> Bound:
    return Bound(select(operator, operator.describe(*arguments), preference), arguments)
