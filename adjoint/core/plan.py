"""Problem -> Plan: which kernel serves a call, with which guarantee, and why.

An operator lists `Candidate`s, best first. A `Problem` is what metadata tells about a call and a choice may depend on.
`select` takes the first candidate that accepts the problem and meets the preference; the result is a `Plan`.

A plan's parameters come in two kinds. Numeric ones change bits: they are part of the SKU and may
depend on the item's own size and dtype alone. Schedule ones (warps, tiles along independent axes) may
depend on anything, because they do not change a bit, which `verify` asserts. They are reviewed JSON,
by GPU name, beside the kernels.
"""

import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adjoint.core import explanation, first_use, kernels
from adjoint.core.arguments import check_outputs, check_workspace
from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.core.guarantee import Derived, Figures, Guarantee
from adjoint.core.launch import Execute, Launch, Setup, refuse_capture
from adjoint.core.layout import to_meta
from adjoint.core.preference import OTHERWISE, Preference, parse, resolve
from adjoint.core.problem import Problem, Sku, short
from adjoint.core.schedules import Schedules

if TYPE_CHECKING:
    from adjoint.core.op.operator import Operator

Run = Callable[["Plan", tuple[Any, ...], tuple[Tensor, ...] | None, Tensor | None], tuple[Tensor, ...]]
"""What a candidate in plain PyTorch runs: `(plan, arguments, outputs or None, workspace or None) -> outputs`."""

Compute = Callable[["Plan", tuple[Any, ...], tuple[Tensor, ...], Tensor | None], None]
"""What writes into outputs that are there: `(plan, arguments, outputs, workspace or None)`."""

# ------------------------------------------------------------------------------------------- candidates


@dataclass(frozen=True)
class Candidate:
    """One way to compute an operator. A family's `plans.py` holds these, and nothing else decides.

    Attributes:
        name: unique within the operator; what `Preference(plan=...)` names.
        backend: "triton" or "eager".
        kernel: the function that does the work.
        revision: goes up when the kernel's bits change.
        refuse: why it cannot serve a problem; empty when it can.
        guarantee: what each output promises for a problem, by output name.
        setup: of a plan on kernels: binds what it launches and the workspace, and gives what runs; see `launch.py`.
        targets: the architectures that `setup` is for.
        returns_outputs: what `setup` gives allocates the outputs and returns them, because their sizes are results.
        run: of a plan in plain PyTorch: computes and returns the outputs; where they are None it allocates them
            (`plan.allocate`).
        numeric: the parameters of `run` that change bits; kernels say themselves which of theirs do.
        schedules: the parameters that do not, by GPU.
        entry: the name of a problem's parameters among the schedules; by default that of the kernel.
        workspace_bytes: the scratch memory of `run`; None where a library allocates what it likes.
        any_layout: serves every layout, so a plan made for one runs the others.
        waits: whether it waits for the device, because only there it is known how much there is to compute; then no
            CUDA graph can record it.
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
        """The schedule of a problem on a device; without one, that of a GPU nobody tuned.

        Kernels for one architecture have its schedule wherever they are asked about: they run nowhere else.
        """
        if self.schedules is None:
            return {}
        if problem.target:
            return self.schedule_on(problem, problem.target)
        if len(self.targets) == 1 and (device is None or kernels.architecture(device) != self.targets[0]):
            return self.schedule_on(problem, *self.targets)
        return self.schedules.lookup(self._entry_of(problem), device)

    def schedule_on(self, problem: Problem, *names: str) -> dict[str, int]:
        """The schedule of a problem on a GPU of that name or architecture, which need not be there."""
        return {} if self.schedules is None else self.schedules.named(self._entry_of(problem), *names)

    def _entry_of(self, problem: Problem) -> str:
        return self.entry(problem) if self.entry else self.kernel

    def why_not_on(self, device: torch.device) -> str:
        """Why its kernels cannot run on a device, whatever the problem; empty when they can."""
        return "" if self.setup is None else kernels.why_not_on(device, self.targets)

    def why_not_for(self, problem: Problem) -> str:
        """Why it cannot serve a problem where that is posed; empty when it can."""
        if reason := self.refuse(problem):
            return reason
        if problem.target:
            return "" if self.setup is None else kernels.why_not_for(problem.target, self.targets)
        return self.why_not_on(problem.device)

    def scratch_bytes(self, problem: Problem) -> int | None:
        """The bytes of scratch memory a problem needs; None where a library allocates what it likes."""
        if self.setup is None:
            return self.workspace_bytes(problem)
        setup = Setup(problem, self.schedule(problem, problem.device))
        self.setup(setup)
        return setup.regions.bytes


def allocating_outputs(compute: Compute) -> Run:
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
    revision: int = 1,
) -> Candidate:
    """A candidate in plain PyTorch: for every problem and layout, on every device."""
    return Candidate(
        name, "eager", "pytorch", revision, lambda problem: "", guarantee, run,
        numeric=numeric, workspace_bytes=lambda problem: None, any_layout=True, waits=waits,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- selection

_CACHED_PLANS = 4096
_lock = threading.Lock()


def select(operator: "Operator", problem: Problem, preference: str) -> "Plan":
    """The first candidate that accepts the problem and meets the preference, as a plan.

    Where the preference has an alternative, that is for a problem of which no plan meets the first request.
    """
    plan = operator.plans.get((problem, preference))
    if plan is not None:
        return plan
    request, has_alternative, alternative = preference.partition(OTHERWISE)
    try:
        plan = _first_that_fits(operator, problem, request)
    except Unsupported:
        if not has_alternative:
            raise
        plan = _first_that_fits(operator, problem, alternative)
        _warn_not_repeatable(plan)
    with _lock:
        while len(operator.plans) >= _CACHED_PLANS:
            operator.plans.pop(next(iter(operator.plans)))
        return operator.plans.setdefault((problem, preference), plan)


def _first_that_fits(operator: "Operator", problem: Problem, preference: str) -> "Plan":
    candidates, request = operator.candidates(), parse(preference)
    named = _named(request, candidates)
    objections = [(candidate, _objection(candidate, problem, request, named)) for candidate in candidates]
    chosen = next((candidate for candidate, objection in objections if not objection), None)
    if chosen is None:
        raise Unsupported(
            f"{operator.name}: no plan for {problem} meets the preference "
            f"({preference or 'none given'}). Candidates:\n"
            + "\n".join(f"  {candidate.name}: {objection}" for candidate, objection in objections)
        )
    others = tuple(
        (candidate.name, objection or f"would do, but ranks after {chosen.name}")
        for candidate, objection in objections
        if candidate is not chosen
    )
    return Plan(operator, chosen, problem, preference, others)


def _warn_not_repeatable(plan: "Plan") -> None:
    """Warns, once for each operator, that a call runs without a promise that `warn_only=True` asks for."""
    operator = plan.operator
    if not operator.has_warned:
        operator.has_warned = True
        warnings.warn(
            f"{operator.name}: no plan for {plan.problem} is repeatable, so this runs {plan.name}, whose bits may "
            f"differ from run to run; torch.use_deterministic_algorithms(True, warn_only=True) allows that, and "
            f"without warn_only it is an error. Later calls of {operator.name} do not warn",
            UserWarning,
            stacklevel=2,
        )


def forget_plans(operators: Iterable["Operator"]) -> None:
    """Forgets every plan that was chosen for some operators, and that they have warned."""
    with _lock:
        for operator in operators:
            operator.plans.clear()
            operator.has_warned = False


def _named(request: Preference, candidates: tuple[Candidate, ...]) -> str | None:
    """Which of the plans a preference names is meant here: the first that is among the candidates."""
    known = {candidate.name for candidate in candidates}
    return next((name for name in (request.plan or "").split("+") if name in known), None)


def _objection(candidate: Candidate, problem: Problem, request: Preference, named: str | None) -> str:
    """Why a candidate is not chosen; empty when it may be."""
    if request.backend is not None and candidate.backend != request.backend:
        return f"its backend is {candidate.backend}, the preference asks for {request.backend}"
    if request.plan is not None and candidate.name != named:
        return f"the preference asks for the plan {request.plan}"
    if reason := candidate.why_not_for(problem):
        return reason
    for output, guarantee in candidate.guarantee(problem).items():
        for flag in ("repeatable", "batch_invariant", "device_invariant"):
            if getattr(request, flag) and not getattr(guarantee, flag):
                return f"{output} is not {flag}"
    limit = request.max_workspace_bytes
    if limit is not None:
        needed = candidate.scratch_bytes(problem)
        if needed is None:
            return f"its workspace is the library's affair, the preference allows {limit} bytes"
        if needed > limit:
            return f"needs a workspace of {needed} bytes, the preference allows {limit}"
    return ""


# -------------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True, repr=False)
class Plan:
    """A candidate bound to a problem. Owns no memory. `print(plan)` says why this one, `repr(plan)` which in a line.

    Attributes:
        others: the candidates that were not taken, by name, each with the reason.
        adjoint: the plan of the backward, when there is one.
        overrides: schedule parameters that are not the reviewed ones.
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
        """What a plan on kernels binds, and what runs it."""
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
        """Whether `run` waits for the device; a CPU keeps nobody waiting."""
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
        """Raises `ArgumentError` for wrong arguments, `Unsupported` for another problem than the plan's."""
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
        """Compiles everything `run` launches, here and in the adjoint; returns the plan.

        Raises:
            Unsupported: the plan was made for a target, not for a device.
            WrongResult: it computes wrongly, which `first_use_check` looks for.
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
        """Computes the outputs from the operator's tensors, in its order; no gradient is recorded.

        An optional tensor that is not given is None.
        After `prepare()`, with `out=` and, where `workspace_bytes` is not 0, `workspace=` (any
        contiguous tensor of at least that many bytes), a kernel plan compiles nothing, allocates
        nothing and never waits for the device; docs/concepts.md names the exceptions.
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
            for written in outputs or ():
                if not written.is_inference():
                    torch.autograd.graph.increment_version(written)
        return results[0] if len(results) == 1 else results

    def errors(self, *tensors: Tensor | None) -> dict[str, Figures]:
        """What the promises say of these tensors: the norm of each output's bound, and that of the error to expect.

        The tensors are those of the op's reference: the inputs, in a backward behind the upstream gradients. Outputs
        whose promise is no bound that is evaluated are not there.
        """
        promises = {name: promise.error for name, promise in self.guarantee.items()}
        return {name: error.figures(*tensors) for name, error in promises.items() if isinstance(error, Derived)}

    def execute(
        self,
        arguments: tuple[Any, ...],
        outputs: tuple[Tensor, ...] | None = None,
        workspace: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """`run` without its checks, on the operator's arguments, options included."""
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
    """Guarantees by output; the error for another name says which there are."""

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


# ------------------------------------------------------------------------------------- calls of public functions


@dataclass(frozen=True)
class Call:
    """What a call of a public function amounts to: operators and arguments.

    Attributes:
        operator: the forward.
        arguments: its arguments: tensors first, None for an optional one that is not given.
        adjoint: the backward, when there is one.
        adjoint_arguments: `(upstream, outputs) -> arguments` of the adjoint when every gradient is
            wanted; `upstream` holds the gradients of the public outputs, `outputs` all outputs of the
            forward operator. Reads metadata alone: inside `plan` both are meta tensors.
        public_outputs: how many of the operator's outputs, from the first, the public function
            returns; None for all.
    """

    operator: "Operator"
    arguments: tuple[Any, ...]
    adjoint: "Operator | None" = None
    adjoint_arguments: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Any, ...]] | None = None
    public_outputs: int | None = None

    def problems(self, device: torch.device) -> Iterator[tuple["Operator", Problem]]:
        """Both operators with their problems on a device, for upstream gradients that lie like the outputs."""
        yield self.operator, self.operator.describe(*self.arguments)._replace(device=device)
        if self.adjoint is not None and self.adjoint_arguments is not None:
            outputs = self.operator.allocate(*map(to_meta, self.arguments))
            arguments = self.adjoint_arguments(outputs[: self.public_outputs], outputs)
            yield self.adjoint, self.adjoint.describe(*arguments)._replace(device=device)


_public: dict[Any, Callable[..., Call]] = {}


def publish(function: Any, bind: Callable[..., Call]) -> None:
    """Makes a public function known to `plan`; `bind` takes the same arguments and validates them."""
    _public[function] = bind


def published() -> dict[str, Any]:
    """The public functions, by name."""
    return {function.__name__: function for function in _public}


def bind(function: Any, *arguments: Any, **keywords: Any) -> Call:
    """The operators and arguments a call of a public function amounts to; nothing is computed.

    Raises:
        ArgumentError: the function is no op, or the arguments are wrong.
    """
    bind_call = _public.get(function) if callable(function) else None
    if bind_call is None:
        names = ", ".join(sorted(published()))
        raise ArgumentError(f"plan: {getattr(function, '__name__', function)!r} is not an op; ops are {names}")
    try:
        inspect.signature(bind_call).bind(*arguments, **keywords)
    except TypeError as error:
        raise ArgumentError(f"plan: {function.__name__}: {error}") from None
    return bind_call(*arguments, **keywords)


def plan(
    function: Any,
    *arguments: Any,
    preference: Preference | None = None,
    device: torch.device | str | None = None,
    target: str | None = None,
    **keywords: Any,
) -> Plan:
    """The plan a call of a public function would use, with its adjoint; nothing is computed.

    Args:
        function: a public op, such as `adjoint.swiglu`.
        arguments: as for the call; meta tensors will do.
        preference: narrows the choice, over what `prefer(...)` asks.
        device: where the op would run, for meta tensors; by default the GPU if there is one.
        target: the architecture of a GPU that need not be there, such as "sm_90", in place of a device. Such a plan
            tells everything about itself and does not run; its schedule is that of the architecture.
        keywords: as for the call.

    Raises:
        ArgumentError: the arguments are wrong.
        Unsupported: no candidate meets the preference; lists each with its reason.
    """
    call = bind(function, *arguments, **keywords)
    tensor = next(a for a in call.arguments if isinstance(a, Tensor))
    if target is not None:
        where = _device_of(target, device)
    else:
        where = _target_device(tensor.device, device)
    problems = [(operator, problem._replace(target=target or "")) for operator, problem in call.problems(where)]
    forward, *backward = [select(operator, problem, resolve(preference)) for operator, problem in problems]
    return replace(forward, adjoint=backward[0]) if backward else forward


def _device_of(target: str, device: torch.device | str | None) -> torch.device:
    """The kind of device that a target is."""
    if device is not None:
        raise ArgumentError(f"plan: give device= or target=, not both; got {device} and {target}")
    if target not in kernels.TARGETS:
        raise ArgumentError(f"plan: unknown target {target!r}; targets are {', '.join(kernels.TARGETS)}")
    return torch.device(kernels.TARGETS[target][0])


def _target_device(actual: torch.device, device: torch.device | str | None) -> torch.device:
    if actual.type != "meta":
        if device is not None:
            raise ArgumentError(f"plan: device= is for meta tensors; these are on {actual}")
        return actual
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if target.type not in ("cpu", "cuda"):
        raise ArgumentError(f"plan: device must be the CPU or a CUDA device, got {target}")
    if torch.cuda.is_available() and (target.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(f"plan: there is no {target} here; there are {torch.cuda.device_count()} CUDA devices")
    if target.type == "cuda" and target.index is None:
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return target
