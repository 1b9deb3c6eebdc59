"""Candidates as families write them: what computes into outputs that are there, and the path in plain PyTorch."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from adjoint.core.guarantee import Guarantee
from adjoint.core.plan import Candidate, Plan
from adjoint.core.problem import Problem

Run = Callable[[Plan, tuple[Any, ...], tuple[Tensor, ...] | None, Tensor | None], tuple[Tensor, ...]]
"""What a candidate runs: `(plan, arguments, outputs or None, workspace or None) -> outputs`."""

Compute = Callable[[Plan, tuple[Any, ...], tuple[Tensor, ...], Tensor | None], None]
"""What writes into outputs: `(plan, arguments, outputs, workspace or None)`."""


def writing(compute: Compute) -> Run:
    """A candidate's `run` from what writes into outputs that are there."""

    def run(
        plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...] | None, workspace: Tensor | None
    ) -> tuple[Tensor, ...]:
        if outputs is None:
            outputs = plan.allocate(arguments)
        compute(plan, arguments, outputs, workspace)
        return outputs

    return run


def in_pytorch(
    name: str,
    guarantee: Callable[[Problem], dict[str, Guarantee]],
    run: Run,
    numeric: Callable[[Problem], dict[str, Any]] = lambda problem: {},
    waits: Callable[[Problem], bool] = lambda problem: False,
) -> Candidate:
    """A candidate in plain PyTorch: for every problem and layout, on every device."""
    return Candidate(
        name=name,
        backend="eager",
        kernel="pytorch",
        revision=1,
        refuse=lambda problem: "",
        guarantee=guarantee,
        run=run,
        numeric=numeric,
        workspace_bytes=lambda problem: None,
        any_layout=True,
        waits=waits,
    )
