"""Checks of bits: repetition, batches, layouts, devices, schedules and memory. Compared with `torch.equal`."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from adjoint.contract.cases import Answers, Subject
from adjoint.contract.inputs import each
from adjoint.core.kernels import interpreting
from adjoint.core.plan import Plan
from adjoint.core.preference import Preference
from adjoint.core.problem import short
from adjoint.verify.checks.guarded import Guarded
from adjoint.verify.run import Evaluation, Forward, Row, as_tuple, differentiate, directions_of, evaluate, gradients_of

NOTHING = "nothing was compared"
"""The failure of a check that compared no result, and so showed nothing."""


class BitComparison:
    """Evaluates the cases of a subject, and collects bit comparisons for one row."""

    def __init__(
        self,
        subject: Subject,
        dtype: torch.dtype,
        device: torch.device,
        preference: Preference,
        check: str,
        promise: str,
    ) -> None:
        self.subject, self.dtype, self.device, self.preference = subject, dtype, device, preference
        self.check, self.promise = check, promise
        self.count = 0
        self.wrong: list[str] = []
        self.plan = ""
        self.skus: dict[str, None] = {}

    def evaluations(
        self, applies: Callable[[Evaluation], bool] = lambda evaluation: True, most: int | None = None
    ) -> Iterator[tuple[str, Evaluation]]:
        """The names and evaluations of the cases to which the check applies, among the first `most` cases."""
        for case in self.subject.cases[:most]:
            evaluation = evaluate(self.subject, case, self.dtype, self.device, self.preference)
            if applies(evaluation):
                self.plan = evaluation.plan_names
                self.skus |= dict.fromkeys(evaluation.skus)
                yield case.name, evaluation

    def equal(self, what: str, results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
        if not expected:
            self.hold(False, f"{what}: {NOTHING}")
        for index, (a, b) in enumerate(zip(results, expected, strict=True)):
            self.hold(same_bits(a, b), f"{what}: result {index} differs")

    def hold(self, right: bool, otherwise: str) -> None:
        """Counts one comparison, and notes what is wrong if it failed."""
        self.count += 1
        self.wrong += [] if right else [otherwise]

    def row(self) -> Row:
        detail = "; ".join(self.wrong[:4]) if self.count else NOTHING
        where = self.subject.name, self.check, short(self.dtype), self.plan
        measured = f"{self.count} bit comparison{'s' * (self.count != 1)}"
        return Row(*where, self.promise, measured, not detail, detail, tuple(self.skus))

    def rows(self) -> list[Row]:
        """The row in a list; an empty list if the check applies to no case, because nothing is promised."""
        return [self.row()] if self.plan else []


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit; NaNs with different payloads count as equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    nan = a.isnan()
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    fill = torch.zeros((), dtype=a.dtype, device=a.device)
    left, right = torch.where(nan, fill, a), torch.where(b.isnan(), fill, b)
    return torch.equal(nan, b.isnan()) and torch.equal(
        left.contiguous().view(as_integers), right.contiguous().view(as_integers)
    )


def repeats(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """The same inputs give the same bits, where this is promised; on a GPU while another stream keeps it busy."""
    comparison = BitComparison(subject, dtype, device, preference, "repeats", "repeatable")
    is_gpu = device.type == "cuda"
    if is_gpu:
        side_stream = torch.cuda.Stream(device)
        matrix = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
    for name, first in comparison.evaluations(lambda evaluation: all(evaluation.promises("repeatable"))):
        for _ in range(100 if is_gpu and first.outputs[0].numel() > 2000 else 2):
            if is_gpu:
                with torch.cuda.stream(side_stream):
                    torch.mm(matrix, matrix)
            comparison.equal(name, first.again().results, first.results)
    return comparison.rows()


def invariance(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """An item's bits do not depend on its batch, its alignment, its strides or the upstream's layout.

    The check compares only the results that promise it.
    """
    comparison = BitComparison(subject, dtype, device, preference, "batch invariance", "batch_invariant")

    def is_promised(evaluation: Evaluation) -> bool:
        return any(promise.batch_invariant for side in evaluation.guarantees for promise in side.values())

    for name, whole in comparison.evaluations(is_promised):
        forward, backward = ([bool(p.batch_invariant) for p in side.values()] for side in whole.guarantees)
        has_items = any(x.dim() for x in whole.inputs if x is not None)
        for place, (result, has_promise) in enumerate(zip(whole.results, (*forward, *backward), strict=True)):
            if has_promise and has_items and not result.dim():
                comparison.hold(False, f"{name}: result {place}, one number of all items, is no item's")

        def promised(evaluation: Evaluation, forward: list[bool] = forward, backward: list[bool] = backward) -> Answers:
            return _with_promise(evaluation.outputs, forward), _with_promise(evaluation.gradients, backward)

        def equal(what: str, results: Answers, expected: Answers) -> None:
            comparison.equal(what, (*results[0], *results[1]), (*expected[0], *expected[1]))

        copies = each(lambda t: t.contiguous().clone(), whole.inputs)
        plain = whole.again(copies, tuple(t.clone() for t in whole.upstream))
        equal(f"{name}: strides", promised(whole), promised(plain))
        moved = whole.again(each(_shifted, copies), tuple(map(_shifted, whole.upstream)))
        equal(f"{name}: shifted by one element", promised(moved), promised(plain))
        for other in subject.rebatch(whole.inputs, whole.upstream):
            alone = whole.again(other.inputs, other.upstream)
            for result, expected in other.pairs(promised(whole), promised(alone)):
                comparison.equal(f"{name}: {other.name}", (result,), (expected,))
    return comparison.rows()


def _with_promise(results: tuple[Tensor, ...], promised: list[bool]) -> tuple[Tensor, ...]:
    """The results of a direction, with zeros in place of those that promise nothing; none if no result promises it."""
    if not any(promised):
        return ()
    return tuple(t if has_promise else torch.zeros_like(t) for t, has_promise in zip(results, promised, strict=True))


def devices(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """Results that all promise the same bits on every device have the bits of PyTorch on the CPU.

    They are compared with the eager plan that makes the same promise. If a plan is asked for by name, the eager plan
    has the same name ("triton.sequential", "eager.sequential"). If there is no such plan, the check fails.
    """
    comparison = BitComparison(subject, dtype, device, preference, "device invariance", "device_invariant")
    eager = eager_twin(preference)
    for name, here in comparison.evaluations(lambda evaluation: all(evaluation.promises("device_invariant"))):
        there = differentiate(subject, each(Tensor.cpu, here.inputs), tuple(t.cpu() for t in here.upstream), eager)
        comparison.equal(name, tuple(t.cpu() for t in here.results), there.results)
    return comparison.rows()


def eager_twin(preference: Preference) -> Preference:
    """The preference for the plan in PyTorch with the same bits; with the same name if a plan is asked for by name."""
    named = preference.plan and preference.plan.replace("triton.", "eager.")
    return Preference(backend="eager", plan=named, device_invariant=True)


def _shifted(tensor: Tensor) -> Tensor:
    """A contiguous copy that begins one element behind the start of its memory."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    memory[1:].copy_(tensor.reshape(-1))
    return memory[1:].view(tensor.shape)


def upstreams(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """Gradients are right for expanded and transposed upstream gradients, and if only one input needs a gradient.

    Layouts of upstream gradients are compared where the plan promises the same bits for any strides. For every plan,
    each gradient that is computed alone is compared with the same gradient among all.
    """
    promise = "any upstream, any set of gradients"
    comparison = BitComparison(subject, dtype, device, preference, "upstream layouts", promise)
    for name, base in comparison.evaluations():
        if base.promises("batch_invariant")[1]:
            forward = Forward(subject, base.inputs, preference)
            ones = tuple(t.new_ones(()).expand(t.shape) for t in base.upstream)
            for upstream, relayouts in ((base.upstream, _RELAYOUTS), (ones, {"expanded": lambda t: t})):
                plain = forward.backward(tuple(t.contiguous() for t in upstream), keep=True)
                for what, relayout in relayouts.items():
                    laid = forward.backward(tuple(map(relayout, upstream)), keep=True)
                    comparison.equal(f"{name}: {what}", laid.gradients, plain.gradients)
        for index, expected in zip(subject.places(base.inputs), base.gradients, strict=True):
            inputs = list(each(Tensor.detach, base.inputs))
            inputs[index].requires_grad_()
            outputs = as_tuple(subject(*inputs, preference=preference))
            (gradient,) = torch.autograd.grad(outputs, inputs[index], base.upstream)
            comparison.equal(f"{name}: d{subject.inputs[index]} alone", (gradient,), (expected,))
    return [comparison.row()]


_RELAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t,
    "every other": lambda t: torch.stack((t, t), dim=-1)[..., 1],
}


def schedules(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """No schedule parameter changes a bit."""
    comparison = BitComparison(subject, dtype, device, preference, "schedules", "schedules change no bit")
    # In the interpreter every parameter of every case would take minutes, and layouts do not exist there.
    for name, base in comparison.evaluations(_has_schedule, most=3 if interpreting() else None):
        for bound, doubles in zip(directions_of(base).both, (True, False), strict=True):
            plan = bound.plan
            expected = bound.run() if plan.schedule else ()
            others = {}
            for parameter, value in plan.schedule.items():
                changed = _another(parameter, value, doubles)
                others[f"{parameter}={changed}"] = plan.with_schedule(**{parameter: changed})
            if interpreting():
                others = {what: other for what, other in others.items() if not _run_the_same(plan, other)} or others
            for what, other in others.items():
                comparison.equal(f"{name}: {plan.operator.name} {what}", bound.run(other), expected)
    return comparison.rows()


def _run_the_same(first: Plan, second: Plan) -> bool:
    """Whether the kernels of two plans differ only in their warps or stages, which the interpreter does not have."""
    same, apart = (
        [[take(launch) for launch in plan.launches] for plan in (first, second)]
        for take in (
            lambda launch: (launch.kernel.name, launch.settings),
            lambda launch: (launch.num_warps, launch.num_stages),
        )
    )
    return same[0] == same[1] and apart[0] != apart[1]


def _has_schedule(evaluation: Evaluation) -> bool:
    sides = (evaluation.plan, evaluation.plan.adjoint)
    return any(side.schedule for side in sides if side is not None)


def _another(parameter: str, value: int, doubles: bool) -> int:
    """Another value of a schedule parameter: twice or half as much.

    The number of stages of a pipeline changes only by one, because twice as many may not fit into shared memory, and a
    ring has at least two.
    """
    if parameter.endswith("stages"):
        return value - 1 if value > 2 else value + 1
    return 2 * value if doubles or value == 1 else value // 2


def poison(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """Every element of every output is written and none is read before that; no other memory is written."""
    promise = "writes its outputs, all of them and nothing else"
    comparison = BitComparison(subject, dtype, device, preference, "poison", promise)
    for name, base in comparison.evaluations():
        directions = directions_of(base)
        forward, backward = directions.both
        gradients = backward.run()
        comparison.equal(f"{name}: as called", directions.outputs[: len(base.outputs)], base.outputs)
        comparison.equal(f"{name}: gradients as called", gradients_of(base, backward, gradients), base.gradients)
        for offset in (64, 65):  # an aligned address, and one that is not
            for bound, expected in ((forward, directions.outputs), (backward, gradients)):
                guarded = [Guarded(result, offset) for result in expected]
                workspace = bound.workspace()
                if workspace is not None:
                    workspace.fill_(0xFF)
                bound.run(out=tuple(g.tensor for g in guarded), workspace=workspace)
                comparison.equal(name, tuple(g.tensor for g in guarded), expected)
                comparison.hold(all(g.is_intact() for g in guarded), f"{name}: wrote outside its output")
    return [comparison.row()]
