"""Candidates: the ways to compute an operator, as the `plans.py` of a family lists them, best first."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.guarantee import Guarantee
from adjoint.core.launch import Execute, Setup
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules

if TYPE_CHECKING:
    from adjoint.core.plan.execution import Plan


Run = Callable[["Plan", tuple[Any, ...], tuple[Tensor, ...] | None, Tensor | None], tuple[Tensor, ...]]
"""The function of a candidate in plain PyTorch: `(plan, arguments, outputs or None, workspace or None) -> outputs`."""

Compute = Callable[["Plan", tuple[Any, ...], tuple[Tensor, ...], Tensor | None], None]
"""A function that writes into allocated outputs: `(plan, arguments, outputs, workspace or None)`."""

AtOnce = Callable[[tuple[Any, ...]], tuple[Tensor, ...] | None]
"""A function from the operator's arguments to outputs that it allocates itself; None where it cannot."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute an operator. The candidates in a family's `plans.py` alone decide the choice of a plan.

    Attributes:
        name: the name for `Preference(plan=...)`, unique within the operator.
        backend: "triton" or "eager".
        kernel: the name of the function that does the work.
        revision: a number that goes up when the kernel's bits change.
        refuse: says why the candidate cannot serve a problem; empty when it can.
        guarantee: gives what each output promises for a problem, by output name.
        setup: for a plan on kernels: binds the kernels and the workspace, and returns the function that runs them; see
            `launch.py`.
        targets: the architectures that `setup` is for.
        returns_outputs: whether the function that `setup` returns allocates the outputs and returns them, because their
            sizes are results.
        run: for a plan in plain PyTorch: computes and returns the outputs. Where they are None it allocates them
            (`plan.allocate`).
        numeric: the parameters of `run` that change bits; kernels declare their own.
        schedules: the parameters that change no bit, by GPU.
        entry: gives the name of a problem's parameters among the schedules; by default the name of the kernel.
        workspace_bytes: the scratch memory of `run`; None where a library allocates as it likes.
        any_layout: whether it serves every layout, so that a plan for one layout runs the others.
        waits: whether it waits for the device, because only the device knows how much there is to compute. No CUDA
            graph can record such a plan.
    """

    name: str
    backend: str
    kernel: str
    revision: int
    refuse: Callable[[Problem], str]
    guarantee: Callable[[Problem], Mapping[str, Guarantee]]
    run: Run | None = None
    setup: Callable[[Setup], Execute] | None = None
    targets: tuple[str, ...] = tuple(kernels.TARGETS)
    returns_outputs: bool = False
    numeric: Callable[[Problem], Mapping[str, Any]] = lambda problem: {}
    schedules: Schedules | None = None
    entry: Callable[[Problem], str] | None = None
    workspace_bytes: Callable[[Problem], int | None] = lambda problem: 0
    any_layout: bool = False
    waits: Callable[[Problem], bool] = lambda problem: False

    def schedule(self, problem: Problem, device: torch.device | None = None) -> dict[str, int]:
        """The schedule of a problem on a device; without a device, the default for GPUs that nobody tuned.

        Kernels for only one architecture have its schedule on every device, because they run nowhere else.
        """
        if self.schedules is None:
            return {}
        if problem.target:
            return self.schedule_on(problem, problem.target)
        if len(self.targets) == 1 and (device is None or kernels.architecture(device) != self.targets[0]):
            return self.schedule_on(problem, *self.targets)
        return self.schedules.lookup(self._entry_of(problem), device)

    def schedule_on(self, problem: Problem, *names: str) -> dict[str, int]:
        """The schedule of a problem on a GPU with one of these names or architectures, which need not be present."""
        return {} if self.schedules is None else self.schedules.named(self._entry_of(problem), *names)

    def _entry_of(self, problem: Problem) -> str:
        return self.entry(problem) if self.entry else self.kernel

    def why_not_on(self, device: torch.device) -> str:
        """Why its kernels cannot run on a device for any problem; empty when they can."""
        return "" if self.setup is None else kernels.why_not_on(device, self.targets)

    def why_not_for(self, problem: Problem) -> str:
        """Why it cannot serve a problem on the problem's own device or target; empty when it can."""
        if reason := self.refuse(problem):
            return reason
        if problem.target:
            return "" if self.setup is None else kernels.why_not_for(problem.target, self.targets)
        return self.why_not_on(problem.device)

    def scratch_bytes(self, problem: Problem) -> int | None:
        """The bytes of scratch memory that a problem needs; None where a library allocates as it likes."""
        if self.setup is None:
            return self.workspace_bytes(problem)
        setup = Setup(problem, self.schedule(problem, problem.device))
        self.setup(setup)
        return setup.regions.bytes


def allocating_outputs(compute: Compute, at_once: AtOnce | None = None, many_calls: bool = False) -> Run:
    """Makes a candidate's `run` of a function that writes into allocated outputs.

    Args:
        compute: the function.
        at_once: may return outputs in new memory instead, which saves allocating and copying.
        many_calls: whether `compute` calls torch some ten times or more. It then runs in inference mode, where every
            call costs a tenth less; entering the mode costs as much as two calls.
    """

    def run(
        plan: "Plan", arguments: tuple[Any, ...], outputs: tuple[Tensor, ...] | None, workspace: Tensor | None
    ) -> tuple[Tensor, ...]:
        results = None if at_once is None else at_once(arguments)
        if results is not None:
            if outputs is None:
                return results
            for output, result in zip(outputs, results, strict=True):
                output.copy_(result)
            return outputs
        if outputs is None:
            outputs = plan.allocate(arguments)
        if many_calls:
            with torch.inference_mode():
                compute(plan, arguments, outputs, workspace)
        else:
            compute(plan, arguments, outputs, workspace)
        return outputs

    return run


def in_pytorch(
    name: str,
    guarantee: Callable[[Problem], dict[str, Guarantee]],
    run: Run,
    numeric: Callable[[Problem], dict[str, Any]] = lambda problem: {},
    waits: Callable[[Problem], bool] = lambda problem: False,
    revision: int = 1,
) -> Candidate:
    """A candidate in plain PyTorch, which serves every problem and layout on every device."""
    return Candidate(
        name, "eager", "pytorch", revision, lambda problem: "", guarantee, run,
        numeric=numeric, workspace_bytes=lambda problem: None, any_layout=True, waits=waits,
    )  # fmt: skip
