"""`Plan`: a candidate bound to a problem. It says what it promises and needs, compiles, and runs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.arguments import check_outputs, check_workspace
from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.core.guarantee import Derived, Figures, Guarantee
from adjoint.core.launch import Execute, Launch, Setup, refuse_capture
from adjoint.core.plan import explanation, first_use
from adjoint.core.plan.candidates import Candidate
from adjoint.core.problem import Problem, Sku, short

if TYPE_CHECKING:
    from adjoint.core.op.operator import Operator


@dataclass(frozen=True, repr=False)
class Plan:
    """A candidate bound to a problem. It owns no memory.

    `print(plan)` explains the choice of the plan, and `repr(plan)` names the plan in one line.

    Attributes:
        others: the candidates that were not taken, by name, each with the reason.
        adjoint: the plan of the backward, if there is one.
        overrides: schedule parameters that replace the reviewed ones.
    """

    operator: "Operator"
    candidate: Candidate
    problem: Problem
    preference: str
    others: tuple[tuple[str, str], ...]
    adjoint: "Plan | None" = None
    overrides: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def backend(self) -> str:
        return self.candidate.backend

    @cached_property
    def sku(self) -> Sku:
        candidate, problem = self.candidate, self.problem
        numeric = candidate.numeric(problem) if candidate.setup is None else self._setup[0].numeric
        return Sku(
            self.operator.name,
            candidate.backend,
            candidate.kernel,
            candidate.revision,
            problem.architecture,
            "+".join(map(short, problem.dtypes)),
            problem.layout,
            ",".join(f"{name}={value}" for name, value in numeric.items()),
        )

    @cached_property
    def _sku_text(self) -> str:
        return str(self.sku)

    @cached_property
    def guarantee(self) -> Mapping[str, Guarantee]:
        """What each output promises, by its name."""
        return _Guarantees(self.operator.name, self.candidate.guarantee(self.problem))

    @cached_property
    def schedule(self) -> dict[str, int]:
        return self.candidate.schedule(self.problem, self.problem.device) | dict(self.overrides)

    @cached_property
    def _setup(self) -> tuple[Setup, Execute]:
        """For a plan on kernels: its setup, and the function that runs it."""
        assert self.candidate.setup is not None
        setup = Setup(self.problem, self.schedule, overrides=bool(self.overrides))
        return setup, self.candidate.setup(setup)

    @cached_property
    def _launch(self) -> Execute:
        return self._setup[1]

    @property
    def launches(self) -> list[Launch]:
        """The kernels that the plan may launch; none for a plan in plain PyTorch."""
        return [] if self.candidate.setup is None else self._setup[0].launches

    @cached_property
    def workspace_bytes(self) -> int | None:
        if self.candidate.setup is not None:
            return self._setup[0].regions.bytes
        return self.candidate.workspace_bytes(self.problem)

    @cached_property
    def waits(self) -> bool:
        """Whether `run` waits for the device; always False on the CPU."""
        return self.problem.device.type != "cpu" and self.candidate.waits(self.problem)

    def with_schedule(self, **parameters: int) -> "Plan":
        """The same plan under other schedule parameters: the same bits, another speed."""
        op, unknown = self.operator.name, sorted(set(parameters) - set(self.schedule))
        if unknown:
            raise ArgumentError(
                f"{op}: plan {self.name} has no schedule parameter {', '.join(unknown)}; "
                f"it has {', '.join(self.schedule) or 'none'}"
            )
        for name, value in parameters.items():
            if value < 1 or (value & (value - 1) and not name.endswith("stages")):
                raise ArgumentError(f"{op}: schedule parameter {name} must be a power of two, got {value}")
        return replace(self, overrides=tuple(parameters.items()))

    def can_implement(self, *tensors: Tensor | None) -> None:
        """Raises `ArgumentError` for wrong arguments, and `Unsupported` for a problem other than the plan's."""
        op, names = self.operator.name, self.operator.tensors
        if len(tensors) != len(names):
            raise ArgumentError(f"{op}: the plan takes {len(names)} tensors ({', '.join(names)}), got {len(tensors)}")
        arguments = (*tensors, *self.problem.options)
        self.operator.check(*arguments)
        problem = self.operator.describe(*arguments)
        if _is_meta(tensors):
            problem = problem._replace(device=self.problem.device, target=self.problem.target)
        if self.candidate.any_layout:
            problem = problem._replace(layout=self.problem.layout)
        if problem != self.problem:
            differences = "; ".join(self.problem.differences(problem))
            raise Unsupported(f"{op}: the plan {self.name} was not made for this problem: {differences}")

    def prepare(self) -> "Plan":
        """Compiles all kernels of this plan and of its adjoint, and returns the plan.

        Raises:
            Unsupported: the plan was made for a target, not for a device.
            WrongResult: the first-use check is on, and found a result outside of its guarantee.
        """
        self._require_device()
        if self.candidate.setup is not None:
            self._setup[0].prepare()
        if first_use.switch.enabled:
            first_use.check(self)
        if self.adjoint is not None:
            self.adjoint.prepare()
        return self

    def _require_device(self) -> None:
        """Raises `Unsupported` for a plan that was made for a target."""
        if target := self.problem.target:
            raise Unsupported(
                f"{self.operator.name}: this plan was made for the target {target}, to be read and not run; plan for "
                f"tensors, or for a device, to run it"
            )

    def run(
        self,
        *tensors: Tensor | None,
        out: Tensor | tuple[Tensor, ...] | None = None,
        workspace: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Computes the outputs from the operator's tensors, in its order, and records no gradient.

        An optional tensor that is absent is None. `workspace=` is any contiguous tensor of at least `workspace_bytes`
        bytes. After `prepare()`, a kernel plan that runs with `out=` and, where it needs one, `workspace=` compiles
        nothing, allocates nothing and never waits for the device. docs/concepts.md names the exceptions.
        """
        self._require_device()
        with torch.no_grad():
            self.can_implement(*tensors)
            if _is_meta(tensors):
                raise ArgumentError(f"{self.operator.name}: run computes; give it tensors on {self.problem.device}")
            tensors = tuple(None if tensor is None else tensor.resolve_neg() for tensor in tensors)
            arguments = (*tensors, *self.problem.options)
            outputs = None
            if out is not None:
                outputs = tuple(out) if isinstance(out, tuple | list) else (out,)
                check_outputs(self.operator, arguments, outputs)
            if workspace is not None:
                check_workspace(self, workspace)
            results = self.execute(arguments, outputs, workspace)
            for output in outputs or ():
                if not output.is_inference():
                    torch.autograd.graph.increment_version(output)
        return results[0] if len(results) == 1 else results

    def errors(self, *tensors: Tensor | None) -> dict[str, Figures]:
        """The norm of each output's bound and that of its expected error, by output, for these tensors.

        The tensors are those that the op's reference takes: the inputs, and in a backward the upstream gradients before
        them. Only outputs whose error statement is `Derived` have an entry.
        """
        promises = {name: promise.error for name, promise in self.guarantee.items()}
        return {name: error.figures(*tensors) for name, error in promises.items() if isinstance(error, Derived)}

    def execute(
        self,
        arguments: tuple[Any, ...],
        outputs: tuple[Tensor, ...] | None = None,
        workspace: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """`run` without its checks, on the operator's arguments, including its options."""
        if first_use.switch.enabled:
            first_use.check(self)
        if self.waits:
            self._refuse_capture()
        candidate = self.candidate
        if candidate.run is not None:
            return candidate.run(self, arguments, outputs, workspace)
        kernels.count_launch(self._sku_text)
        if outputs is None:
            outputs = () if candidate.returns_outputs else self.allocate(arguments)
        return self._launch(arguments, outputs, workspace) or outputs

    def allocate(self, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return self.operator.allocate(*arguments)

    def _refuse_capture(self) -> None:
        problem = self.problem
        able = ", ".join(
            candidate.name
            for candidate in self.operator.candidates()
            if not (candidate.why_not_for(problem) or candidate.waits(problem))
        )
        advice = f"plans that can be recorded: {able}" if able else "no plan of this problem can be"
        refuse_capture(problem.device, f"{self.operator.name}: the plan {self.name}", advice)

    def __str__(self) -> str:
        return explanation.in_words(self)

    def __repr__(self) -> str:
        return explanation.in_a_line(self)


class _Guarantees(dict[str, Guarantee]):
    """Guarantees by output. The error for an unknown name lists the outputs."""

    def __init__(self, op: str, guarantees: Mapping[str, Guarantee]) -> None:
        super().__init__(guarantees)
        self._op = op

    def __missing__(self, name: str) -> Guarantee:
        raise KeyError(
            f"{self._op} has no output {name!r}; its outputs are {', '.join(self)}"
            f"{'' if self._op.endswith('_backward') else ', and gradients are in plan.adjoint.guarantee'}"
        )


def _is_meta(tensors: tuple[Tensor | None, ...]) -> bool:
    return any(tensor is not None and tensor.is_meta for tensor in tensors)
