"""Checks of bits: repetition, batches, layouts, devices, schedules and memory. Compared with `torch.equal`."""

from collections.abc import Callable

import torch
from torch import Tensor

from adjoint.contract.cases import Answers, Subject
from adjoint.contract.directions import Bound
from adjoint.contract.inputs import each, is_differentiable
from adjoint.contract.inputs import poison as fill_with_poison
from adjoint.core.guarantee import Guarantee
from adjoint.core.kernels import interpreting
from adjoint.core.preference import Preference
from adjoint.core.problem import short
from adjoint.verify.row import Row
from adjoint.verify.run import (
    Evaluation,
    as_tuple,
    differentiate,
    directions_of,
    evaluate,
    gradients_of,
    guarantees_of,
    plan_names,
    plan_of,
)

CANARY = 7.25


class _Comparison:
    """Collects bit comparisons for one row."""

    def __init__(self, subject: Subject, check: str, dtype: torch.dtype, promise: str) -> None:
        self.subject, self.check, self.dtype, self.promise = subject, check, dtype, promise
        self.count = 0
        self.wrong: list[str] = []
        self.plan = ""

    def equal(self, what: str, got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
        for index, (a, b) in enumerate(zip(got, expected, strict=True)):
            self.count += 1
            if not same_bits(a, b):
                self.wrong.append(f"{what}: result {index} differs")

    def row(self) -> Row:
        return Row(
            self.subject.name,
            self.check,
            short(self.dtype),
            self.plan,
            self.promise,
            f"{self.count} bit comparisons",
            self.count > 0 and not self.wrong,
            "; ".join(self.wrong[:4]) if self.count else "nothing was compared",
        )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaNs of any payload counted equal."""
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
    """Where it is promised, the same inputs give the same bits, on a GPU while another stream keeps it busy."""
    comparison = _Comparison(subject, "repeats", dtype, "repeatable")
    load = _Load(device) if device.type == "cuda" else None
    for case in subject.cases:
        first = evaluate(subject, case, dtype, device, preference)
        chosen = plan_of(subject, first.inputs, preference)
        if not all(_all(promises, "repeatable") for promises in guarantees_of(subject, chosen, first)):
            continue
        comparison.plan = plan_names(chosen)
        for _ in range(100 if load is not None and first.outputs[0].numel() > 2000 else 2):
            if load is not None:
                load.push()
            again = differentiate(subject, first.inputs, first.upstream, preference)
            comparison.equal(case.name, again.results, first.results)
    return [comparison.row()] if comparison.count else []


class _Load:
    """Matrix products on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.matrix = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)

    def push(self) -> None:
        with torch.cuda.stream(self.stream):
            torch.mm(self.matrix, self.matrix)


def invariance(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """An item's bits do not depend on its batch, its alignment, its strides or the upstream's layout.

    Checked for each direction of which every result promises it.
    """
    comparison = _Comparison(subject, "batch invariance", dtype, "batch_invariant")
    for case in subject.cases:
        whole = evaluate(subject, case, dtype, device, preference)
        chosen = plan_of(subject, whole.inputs, preference)
        forward, backward = (_all(promises, "batch_invariant") for promises in guarantees_of(subject, chosen, whole))
        if not (forward or backward):
            continue
        comparison.plan = plan_names(chosen)

        def promised(found: Evaluation, forward: bool = forward, backward: bool = backward) -> Answers:
            return found.outputs if forward else (), found.gradients if backward else ()

        def equal(what: str, got: Answers, expected: Answers) -> None:
            comparison.equal(what, (*got[0], *got[1]), (*expected[0], *expected[1]))

        copies = each(lambda t: t.contiguous().clone(), whole.inputs)
        plain = differentiate(subject, copies, tuple(t.clone() for t in whole.upstream), preference)
        equal(f"{case.name}: strides", promised(whole), promised(plain))
        moved = differentiate(subject, each(_shifted, copies), tuple(map(_shifted, whole.upstream)), preference)
        equal(f"{case.name}: shifted by one element", promised(moved), promised(plain))
        for other in subject.rebatch(whole.inputs, whole.upstream):
            alone = differentiate(subject, other.inputs, other.upstream, preference)
            for got, expected in other.pairs(promised(whole), promised(alone)):
                comparison.equal(f"{case.name}: {other.name}", (got,), (expected,))
    return [comparison.row()] if comparison.count else []


def _all(promises: dict[str, Guarantee], flag: str) -> bool:
    return all(getattr(guarantee, flag) for guarantee in promises.values())


def devices(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """Where every result promises the same bits on every device, they are those of PyTorch on the CPU.

    The other side is the eager plan that makes the same promise, under the same name where one is asked for
    ("triton.sequential", "eager.sequential"); if there is none, nobody can keep it.
    """
    comparison = _Comparison(subject, "device invariance", dtype, "device_invariant")
    named = preference.plan and preference.plan.replace("triton.", "eager.")
    eager = Preference(backend="eager", plan=named, device_invariant=True)
    for case in subject.cases:
        here = evaluate(subject, case, dtype, device, preference)
        chosen = plan_of(subject, here.inputs, preference)
        if not all(_all(promises, "device_invariant") for promises in guarantees_of(subject, chosen, here)):
            continue
        comparison.plan = plan_names(chosen)
        there = differentiate(subject, each(Tensor.cpu, here.inputs), tuple(t.cpu() for t in here.upstream), eager)
        comparison.equal(case.name, tuple(t.cpu() for t in here.results), there.results)
    return [comparison.row()] if comparison.count else []


def _shifted(tensor: Tensor) -> Tensor:
    """A contiguous copy that starts one element into its memory."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    memory[1:].copy_(tensor.reshape(-1))
    return memory[1:].view(tensor.shape)


def upstreams(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """Gradients are right for expanded and transposed upstreams, and when some inputs need none.

    Bits are compared where the plan promises them for any strides; elsewhere each gradient asked for
    alone is compared with the same gradient among all.
    """
    comparison = _Comparison(subject, "upstream layouts", dtype, "any upstream, any set of gradients")
    for case in subject.cases:
        base = evaluate(subject, case, dtype, device, preference)
        chosen = plan_of(subject, base.inputs, preference)
        comparison.plan = plan_names(chosen)
        _, promises = guarantees_of(subject, chosen, base)
        if _all(promises, "batch_invariant"):
            for what, relayout in _RELAYOUTS.items():
                laid = tuple(relayout(t) for t in base.upstream)
                plain = differentiate(subject, base.inputs, tuple(t.contiguous() for t in laid), preference)
                other = differentiate(subject, base.inputs, laid, preference)
                comparison.equal(f"{case.name}: {what}", other.gradients, plain.gradients)
        floating = [index for index, tensor in enumerate(base.inputs) if is_differentiable(tensor)]
        for index, expected in zip(floating, base.gradients, strict=True):
            inputs = list(each(Tensor.detach, base.inputs))
            inputs[index].requires_grad_()
            outputs = as_tuple(subject(*inputs, preference=preference))
            (gradient,) = torch.autograd.grad(outputs, inputs[index], base.upstream)
            comparison.equal(f"{case.name}: d{subject.inputs[index]} alone", (gradient,), (expected,))
    return [comparison.row()]


_RELAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda t: t.new_ones(()).expand(t.shape),
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t,
    "every other": lambda t: torch.stack((t, t), dim=-1)[..., 1],
}


def schedules(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """No schedule parameter changes a bit."""
    comparison = _Comparison(subject, "schedules", dtype, "schedules change no bit")
    # In the interpreter every parameter of every case would take minutes, and layouts do not exist there.
    for case in subject.cases[:3] if interpreting() else subject.cases:
        base = evaluate(subject, case, dtype, device, preference)
        chosen = plan_of(subject, base.inputs, preference)
        comparison.plan = plan_names(chosen)
        directions = directions_of(subject, base, preference)
        for bound, change in zip(directions.both, (_twice, _half), strict=True):
            plan = bound.plan
            expected = bound.run() if plan.schedule else ()
            for name, value in plan.schedule.items():
                another = _neighbour(value) if name.endswith("stages") else change(value)
                other = bound.run(plan.with_schedule(**{name: another}))
                comparison.equal(f"{case.name}: {plan.operator.name} {name}={another}", other, expected)
    return [comparison.row()] if comparison.count else []


def _twice(value: int) -> int:
    return 2 * value


def _half(value: int) -> int:
    return value // 2 if value > 1 else 2  # another value, always


def _neighbour(stages: int) -> int:
    """Another depth of a pipeline: twice as many stages may not fit into shared memory, and rings have two at least."""
    return stages - 1 if stages > 2 else stages + 1


def poison(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """Every element of every output is written, none is read first, and nothing beside them is touched."""
    comparison = _Comparison(subject, "poison", dtype, "writes its outputs, all of them and nothing else")
    for case in subject.cases:
        base = evaluate(subject, case, dtype, device, preference)
        directions = directions_of(subject, base, preference)
        forward, backward = directions.both
        comparison.plan = plan_names(plan_of(subject, base.inputs, preference))
        gradients = backward.run()
        comparison.equal(f"{case.name}: as called", directions.outputs[: len(base.outputs)], base.outputs)
        named = gradients_of(subject, base.inputs, backward, gradients)
        comparison.equal(f"{case.name}: gradients as called", named, base.gradients)
        for offset in (64, 65):  # an aligned address, and one that is not
            for bound, expected in ((forward, directions.outputs), (backward, gradients)):
                guarded = [_Guarded(result, offset) for result in expected]
                bound.run(out=tuple(g.tensor for g in guarded), workspace=_poisoned_workspace(bound))
                comparison.equal(case.name, tuple(g.tensor for g in guarded), expected)
                comparison.count += 1
                if not all(g.intact() for g in guarded):
                    comparison.wrong.append(f"{case.name}: wrote outside its output")
    return [comparison.row()]


def _poisoned_workspace(bound: Bound) -> Tensor | None:
    workspace = bound.workspace()
    return None if workspace is None else workspace.fill_(0xFF)


class _Guarded:
    """An output full of poison inside memory full of canaries, laid out like a given tensor."""

    def __init__(self, like: Tensor, offset: int) -> None:
        reach = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        span = max(reach + 1, 1) if like.numel() else 0
        self.canary = CANARY if like.is_floating_point() else int(CANARY)
        self.memory = torch.full((span + 2 * offset,), self.canary, dtype=like.dtype, device=like.device)
        self.tensor = self.memory.as_strided(like.shape, like.stride(), offset)
        fill_with_poison(self.tensor)
        self.before, self.after = self.memory[:offset], self.memory[offset + span :]

    def intact(self) -> bool:
        return bool((self.before == self.canary).all() and (self.after == self.canary).all())
