"""Problem -> Plan: which kernel serves a call, with which guarantee, and why.

An `Operator` is one direction of an op (`swiglu`, `swiglu_backward`). It lists `Candidate`s, best
first. A `Problem` is what metadata tells about a call and a choice may depend on. `select` takes the
first candidate that accepts the problem and meets the preference; the result is a `Plan`.

A plan's parameters come in two kinds. Numeric ones change bits: they are part of the SKU and may
depend on the item's own size and dtype alone. Schedule ones (warps, tiles along independent axes) may
depend on anything, because they do not change a bit, which `verify` asserts. They are reviewed JSON,
by GPU name, beside the kernels.
"""

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.dispatch import listening, refuse_transforms
from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.core.guarantee import Guarantee
from adjoint.core.launch import Execute, Launch, Setup
from adjoint.core.preference import Preference, parse, resolve
from adjoint.core.problem import Problem, short
from adjoint.core.run_arguments import check_outputs, check_workspace
from adjoint.core.schedules import Schedules
from adjoint.core.sku import Sku
from adjoint.core.streams import refuse_capture


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
        run: of a plan in plain PyTorch: `run(plan, arguments, outputs, workspace)` computes and returns the outputs;
            where `outputs` is None it allocates them (`plan.allocate`).
        numeric: the parameters of `run` that change bits; kernels say themselves which of theirs do.
        schedules: the parameters that do not, by GPU.
        entry: the name of a problem's parameters among the schedules; by default that of the kernel.
        workspace_bytes: scratch needed; None where a library allocates what it likes.
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
    run: Callable[["Plan", tuple[Any, ...], tuple[Tensor, ...] | None, Tensor | None], tuple[Tensor, ...]] | None = None
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

    def scratch_bytes(self, problem: Problem) -> int | None:
        """The bytes of scratch memory a problem needs; None where a library allocates what it likes."""
        if self.setup is None:
            return self.workspace_bytes(problem)
        setup = Setup(problem, self.schedule(problem, problem.device))
        self.setup(setup)
        return setup.regions.bytes


@dataclass
class Operator:
    """One direction of an op: its arguments, its outputs and its candidates. Made by `define`.

    Attributes:
        name: as registered, `torch.ops.adjoint.<name>`.
        outputs: the names of what it returns, or of what it overwrites.
        tensors: the names of its tensor arguments, which come first; an optional one may be None, the first never.
        check: raises `ArgumentError` for arguments whose metadata is wrong.
        allocate: empty outputs for given arguments; the shape function is the same code.
        describe: the `Problem` of given arguments.
        candidates: best first; a function, so that no kernel module is imported to define an op.
        call: the registered operator.
        assemble: of a backward: `assemble(results, arguments)` gives a gradient for each output, where it is not what
            the operator returns.
    """

    name: str
    outputs: tuple[str, ...]
    tensors: tuple[str, ...]
    check: Callable[..., None]
    allocate: Callable[..., tuple[Tensor, ...]]
    describe: Callable[..., Problem]
    candidates: Callable[[], tuple[Candidate, ...]]
    call: Any = None
    assemble: Callable[[Any, tuple[Any, ...]], tuple[Tensor, ...]] | None = None
    _plans: dict[tuple[Problem, str], "Plan"] = field(default_factory=dict, repr=False)

    def __call__(self, *everything: Any) -> Any:
        """Runs the operator on its arguments and the preference's string.

        Through torch's dispatcher whenever anyone could be listening there (a compiler, a mode, a
        tensor subclass, a transform, the profiler), and straight to the launch otherwise: entering
        Python through the dispatcher costs as much as everything else in a call together.
        """
        tensors = everything[: len(self.tensors)]
        if torch.compiler.is_compiling():
            return self.call(*everything)
        if listening(tensors):
            refuse_transforms(self.name, tensors)
            return self.call(*everything)
        results = self.launch(everything[:-1], everything[-1])
        return results[0] if len(self.outputs) == 1 and results else results

    def launch(self, arguments: tuple[Any, ...], preference: str) -> tuple[Tensor, ...]:
        """Chooses a plan and runs it; what the registered operator does on every device."""
        problem = self.describe(*arguments)
        plan = self._plans.get((problem, preference))
        if plan is None:
            plan = select(self, problem, preference)
        return plan.execute(arguments, None, None)


_operators: dict[str, Operator] = {}


def register_operator(operator: Operator) -> None:
    _operators[operator.name] = operator


def operators() -> list[Operator]:
    """Every operator defined so far."""
    return list(_operators.values())


def forget() -> None:
    """Forgets every plan chosen so far, and every kernel compiled: the next call is again the first."""
    with _lock:
        for operator in operators():
            operator._plans.clear()
    kernels.forget()


_CACHED_PLANS = 4096
_lock = threading.Lock()


def select(operator: Operator, problem: Problem, preference: str) -> "Plan":
    """The first candidate that accepts the problem and meets the preference, as a plan."""
    plan = operator._plans.get((problem, preference))
    if plan is not None:
        return plan
    wanted = parse(preference)
    candidates = operator.candidates()
    named = _named(wanted, candidates)
    verdicts: list[tuple[Candidate, str]] = [
        (candidate, _objection(candidate, problem, wanted, named)) for candidate in candidates
    ]
    taken = next((candidate for candidate, objection in verdicts if not objection), None)
    if taken is None:
        raise Unsupported(
            f"{operator.name}: no plan for {problem} meets the preference "
            f"({preference or 'none given'}). Candidates:\n"
            + "\n".join(f"  {candidate.name}: {objection}" for candidate, objection in verdicts)
        )
    others = tuple(
        (candidate.name, objection or f"would do, but ranks after {taken.name}")
        for candidate, objection in verdicts
        if candidate is not taken
    )
    plan = Plan(operator, taken, problem, preference, others)
    with _lock:
        while len(operator._plans) >= _CACHED_PLANS:
            operator._plans.pop(next(iter(operator._plans)))
        return operator._plans.setdefault((problem, preference), plan)


def _named(wanted: Preference, candidates: tuple[Candidate, ...]) -> str | None:
    """Which of the plans a preference names is meant here: the first that is among the candidates."""
    own = {candidate.name for candidate in candidates}
    return next((name for name in (wanted.plan or "").split("+") if name in own), None)


def _objection(candidate: Candidate, problem: Problem, wanted: Preference, named: str | None) -> str:
    """Why a candidate is not taken; empty when it may be."""
    if wanted.backend is not None and candidate.backend != wanted.backend:
        return f"its backend is {candidate.backend}, the preference asks for {wanted.backend}"
    if wanted.plan is not None and candidate.name != named:
        return f"the preference asks for the plan {wanted.plan}"
    if reason := candidate.refuse(problem) or candidate.why_not_on(problem.device):
        return reason
    for output, guarantee in candidate.guarantee(problem).items():
        for flag in ("repeatable", "batch_invariant", "device_invariant"):
            if getattr(wanted, flag) and not getattr(guarantee, flag):
                return f"{output} is not {flag}"
    limit = wanted.max_workspace_bytes
    if limit is not None:
        needed = candidate.scratch_bytes(problem)
        if needed is None:
            return f"its workspace is the library's affair, the preference allows {limit} bytes"
        if needed > limit:
            return f"needs a workspace of {needed} bytes, the preference allows {limit}"
    return ""


@dataclass(frozen=True)
class Plan:
    """A candidate bound to a problem. Owns no memory. `print(plan)` says why this one.

    Attributes:
        adjoint: the plan of the backward, when there is one.
    """

    operator: Operator
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
        on_kernels = self.candidate.setup is not None
        numeric = self._setup[0].numeric if on_kernels else self.candidate.numeric(self.problem)
        return Sku(
            self.operator.name,
            self.candidate.backend,
            self.candidate.kernel,
            self.candidate.revision,
            kernels.architecture(self.problem.device),
            "+".join(short(dtype) for dtype in self.problem.dtypes),
            self.problem.layout,
            ",".join(f"{name}={value}" for name, value in numeric.items()),
        )

    @cached_property
    def _sku_text(self) -> str:
        return str(self.sku)

    @cached_property
    def guarantee(self) -> Mapping[str, Guarantee]:
        return self.candidate.guarantee(self.problem)

    @cached_property
    def _setup(self) -> tuple[Setup, Execute]:
        """What the plan binds, and what runs it; of a plan on kernels."""
        assert self.candidate.setup is not None
        setup = Setup(self.problem, self.schedule, overrides=bool(self.overrides))
        return setup, self.candidate.setup(setup)

    @cached_property
    def _execute(self) -> Execute:
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

    @cached_property
    def schedule(self) -> dict[str, int]:
        return self.candidate.schedule(self.problem, self.problem.device) | dict(self.overrides)

    def with_schedule(self, **parameters: int) -> "Plan":
        """The same plan under other schedule parameters: the same bits, another speed."""
        unknown = sorted(set(parameters) - set(self.schedule))
        if unknown:
            raise ArgumentError(
                f"{self.operator.name}: plan {self.name} has no schedule parameter {', '.join(unknown)}; "
                f"it has {', '.join(self.schedule) or 'none'}"
            )
        for name, value in parameters.items():
            if value < 1 or (value & (value - 1) and not name.endswith("stages")):
                raise ArgumentError(
                    f"{self.operator.name}: schedule parameter {name} must be a power of two, got {value}"
                )
        return replace(self, overrides=tuple(parameters.items()))

    def can_implement(self, *tensors: Tensor | None) -> None:
        """Raises `ArgumentError` for wrong arguments, `Unsupported` for another problem than the plan's."""
        names = self.operator.tensors
        if len(tensors) != len(names):
            raise ArgumentError(
                f"{self.operator.name}: the plan takes {len(names)} tensors ({', '.join(names)}), got {len(tensors)}"
            )
        arguments = (*tensors, *self.problem.options)
        self.operator.check(*arguments)
        problem = self.operator.describe(*arguments)
        if _is_meta(tensors):
            problem = problem._replace(device=self.problem.device)
        if self.candidate.any_layout:
            problem = problem._replace(layout=self.problem.layout)
        if problem != self.problem:
            raise Unsupported(
                f"{self.operator.name}: the plan {self.name} was not made for this problem: "
                + "; ".join(self.problem.differences(problem))
            )

    def prepare(self) -> "Plan":
        """Compiles everything `run` launches, here and in the adjoint; returns the plan."""
        if self.candidate.setup is not None:
            self._setup[0].prepare()
        if self.adjoint is not None:
            self.adjoint.prepare()
        return self

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

    def execute(
        self, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...] | None, workspace: Tensor | None
    ) -> tuple[Tensor, ...]:
        """`run` without its checks, on the operator's arguments, options included."""
        if self.candidate.backend == "triton":
            kernels.count_launch(self._sku_text)
        if self.waits:
            self._refuse_capture()
        return self.compute(arguments, outputs, workspace)

    def compute(
        self, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...] | None, workspace: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The plan's own work: what `execute` does besides counting."""
        run = self.candidate.run
        if run is not None:
            return run(self, arguments, outputs, workspace)
        if outputs is None:
            if self.candidate.returns_outputs:
                return self._execute(arguments, (), workspace) or ()
            outputs = self.allocate(arguments)
        self._execute(arguments, outputs, workspace)
        return outputs

    def _refuse_capture(self) -> None:
        problem = self.problem
        others = [
            candidate.name
            for candidate in self.operator.candidates()
            if not (candidate.refuse(problem) or candidate.why_not_on(problem.device) or candidate.waits(problem))
        ]
        advice = f"plans that can be recorded: {', '.join(others)}" if others else "no plan of this problem can be"
        refuse_capture(self.problem.device, f"{self.operator.name}: the plan {self.name}", advice)

    def allocate(self, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return self.operator.allocate(*arguments)

    def __str__(self) -> str:
        needed = self.workspace_bytes
        scratch = "the library allocates its own" if needed is None else f"{needed} bytes"
        lines = [
            f"problem    {self.problem}",
            f"preference {self.preference or 'none'}",
            f"plan       {self.name}: the first of {len(self.others) + 1} candidates, best first, that fits",
            f"sku        {self.sku}",
            f"workspace  {scratch}",
        ]
        if self.waits:
            lines.append("waits      for the device: no CUDA graph can record it")
        if self.schedule:
            lines.append("schedule   " + ", ".join(f"{k}={v}" for k, v in self.schedule.items()))
        for output, guarantee in self.guarantee.items():
            first, *rest = str(guarantee).splitlines()
            lines += [f"guarantee  {output}: {first}", *(f"           {line}" for line in rest)]
        lines += [f"not taken  {name}: {reason}" for name, reason in self.others]
        if self.adjoint is not None:
            lines += ["adjoint", *(f"  {line}" for line in str(self.adjoint).splitlines())]
        return "\n".join(lines)


def _is_meta(tensors: tuple[Tensor | None, ...]) -> bool:
    return any(tensor is not None and tensor.is_meta for tensor in tensors)


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

    operator: Operator
    arguments: tuple[Any, ...]
    adjoint: Operator | None = None
    adjoint_arguments: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Any, ...]] | None = None
    public_outputs: int | None = None


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
    own = _public.get(function) if callable(function) else None
    if own is None:
        names = ", ".join(sorted(published()))
        raise ArgumentError(f"plan: {getattr(function, '__name__', function)!r} is not an op; ops are {names}")
    try:
        inspect.signature(own).bind(*arguments, **keywords)
    except TypeError as error:
        raise ArgumentError(f"plan: {function.__name__}: {error}") from None
    return own(*arguments, **keywords)


def plan(
    function: Any,
    *arguments: Any,
    preference: Preference | None = None,
    device: torch.device | str | None = None,
    **keywords: Any,
) -> Plan:
    """The plan a call of a public function would use, with its adjoint; nothing is computed.

    Args:
        function: a public op, such as `adjoint.swiglu`.
        arguments: as for the call; meta tensors will do.
        preference: narrows the choice, over what `prefer(...)` asks.
        device: where the op would run, for meta tensors; by default the GPU if there is one.
        keywords: as for the call.

    Raises:
        ArgumentError: the arguments are wrong.
        Unsupported: no candidate meets the preference; lists each with its reason.
    """
    call = bind(function, *arguments, **keywords)
    tensors = [a for a in call.arguments if isinstance(a, Tensor)]
    target = _target_device(tensors[0].device, device)
    text = resolve(preference)

    def choose(operator: Operator, arguments: tuple[Any, ...]) -> Plan:
        return select(operator, operator.describe(*arguments)._replace(device=target), text)

    chosen = choose(call.operator, call.arguments)
    if call.adjoint is None or call.adjoint_arguments is None:
        return chosen
    outputs = call.operator.allocate(*(a.to("meta") if isinstance(a, Tensor) else a for a in call.arguments))
    upstream = outputs[: call.public_outputs]  # laid out like the outputs
    return replace(chosen, adjoint=choose(call.adjoint, call.adjoint_arguments(upstream, outputs)))


def _target_device(actual: torch.device, asked: torch.device | str | None) -> torch.device:
    if actual.type != "meta":
        if asked is not None:
            raise ArgumentError(f"plan: device= is for meta tensors; these are on {actual}")
        return actual
    target = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    if target.type not in ("cpu", "cuda"):
        raise ArgumentError(f"plan: device must be the CPU or a CUDA device, got {target}")
    if torch.cuda.is_available() and (target.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(f"plan: there is no {target} here; there are {torch.cuda.device_count()} CUDA devices")
    if target.type == "cuda" and target.index is None:
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return target
