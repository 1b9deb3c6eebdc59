"""Checks of bits: repetition, batches, layouts, schedules and memory. Compared with `torch.equal`."""

from collections.abc import Callable

import torch
from torch import Tensor

from adjoint.core.cases import Subject
from adjoint.core.plan import Plan
from adjoint.core.preference import Preference
from adjoint.core.problem import short
from adjoint.verify.row import Row
from adjoint.verify.run import Evaluation, as_tuple, differentiate, evaluate, plan_of

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
    nan = a.isnan()
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    fill = torch.zeros((), dtype=a.dtype, device=a.device)
    left, right = torch.where(nan, fill, a), torch.where(b.isnan(), fill, b)
    return torch.equal(nan, b.isnan()) and torch.equal(
        left.contiguous().view(as_integers), right.contiguous().view(as_integers)
    )


def repeats(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """The same inputs give the same bits, on a GPU while another stream keeps it busy."""
    comparison = _Comparison(subject, "repeats", dtype, "repeatable")
    load = _Load(device) if device.type == "cuda" else None
    for case in subject.cases:
        first = evaluate(subject, case, dtype, device, preference)
        chosen = plan_of(subject, first.inputs, preference)
        comparison.plan = chosen.name
        for _ in range(100 if load is not None and first.inputs[0].numel() > 2000 else 2):
            if load is not None:
                load.push()
            again = differentiate(subject, first.inputs, first.upstream, preference)
            comparison.equal(case.name, again.results, first.results)
    return [comparison.row()]


class _Load:
    """Matrix products on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.matrix = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)

    def push(self) -> None:
        with torch.cuda.stream(self.stream):
            torch.mm(self.matrix, self.matrix)


def invariance(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """An item's bits do not depend on its batch, its alignment, its strides or the upstream's layout."""
    comparison = _Comparison(subject, "batch invariance", dtype, "batch_invariant")
    axis = subject.batch_axis
    for case in subject.cases:
        whole = evaluate(subject, case, dtype, device, preference)
        chosen = plan_of(subject, whole.inputs, preference)
        assert chosen.adjoint is not None
        if not all(g.batch_invariant for p in (chosen, chosen.adjoint) for g in p.guarantee.values()):
            return []
        comparison.plan = chosen.name
        copies = tuple(t.contiguous().clone() for t in whole.inputs)
        plain = differentiate(subject, copies, tuple(t.clone() for t in whole.upstream), preference)
        comparison.equal(f"{case.name}: strides", whole.results, plain.results)
        shifted = tuple(_shifted(t) for t in copies)
        moved = differentiate(subject, shifted, tuple(_shifted(t) for t in whole.upstream), preference)
        comparison.equal(f"{case.name}: shifted by one element", moved.results, plain.results)
        if whole.inputs[0].dim() < 2:
            continue
        size = whole.inputs[0].shape[axis]
        for begin, length in ((0, 1), (size - 1, 1), (size // 2, size - size // 2)):
            if length < 1 or begin < 0:
                continue

            def part(t: Tensor, begin: int = begin, length: int = length) -> Tensor:
                return t.narrow(axis, begin, length)

            alone = differentiate(subject, tuple(map(part, whole.inputs)), tuple(map(part, whole.upstream)), preference)
            comparison.equal(f"{case.name}: items {begin}+{length}", alone.results, tuple(map(part, whole.results)))
    return [comparison.row()]


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
        assert chosen.adjoint is not None
        comparison.plan = chosen.name
        if all(g.batch_invariant for g in chosen.adjoint.guarantee.values()):
            for what, relayout in _RELAYOUTS.items():
                laid = tuple(relayout(t) for t in base.upstream)
                plain = differentiate(subject, base.inputs, tuple(t.contiguous() for t in laid), preference)
                other = differentiate(subject, base.inputs, laid, preference)
                comparison.equal(f"{case.name}: {what}", other.gradients, plain.gradients)
        for index in range(len(base.inputs)):
            leaves = [t.detach().requires_grad_(i == index) for i, t in enumerate(base.inputs)]
            outputs = as_tuple(subject(*leaves, preference=preference))
            (gradient,) = torch.autograd.grad(outputs, leaves[index], base.upstream)
            comparison.equal(f"{case.name}: gradient {index} alone", (gradient,), (base.gradients[index],))
    return [comparison.row()]


_RELAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda t: t.new_ones(()).expand(t.shape),
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t,
    "every other": lambda t: torch.stack((t, t), dim=-1)[..., 1],
}


def schedules(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """No schedule parameter changes a bit."""
    comparison = _Comparison(subject, "schedules", dtype, "schedules change no bit")
    for case in subject.cases:
        base = evaluate(subject, case, dtype, device, preference)
        chosen = plan_of(subject, base.inputs, preference)
        comparison.plan = chosen.name
        assert chosen.adjoint is not None
        if not chosen.schedule:
            return []
        for name in chosen.schedule:
            value = 2 * chosen.schedule[name]
            other = as_tuple(chosen.with_schedule(**{name: value}).run(*base.inputs))
            comparison.equal(f"{case.name}: {name}={value}", other, base.outputs)
        adjoint = chosen.adjoint
        if adjoint.problem != adjoint.operator.describe(*base.upstream, *base.inputs, *adjoint.problem.options):
            continue  # this upstream takes another plan; its own case covers it
        for name in adjoint.schedule:
            value = max(1, adjoint.schedule[name] // 2)
            other = as_tuple(adjoint.with_schedule(**{name: value}).run(*base.upstream, *base.inputs))
            comparison.equal(f"{case.name}: adjoint {name}={value}", other, base.gradients)
    return [comparison.row()]


def poison(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """Every element of every output is written, none is read first, and nothing beside them is touched."""
    comparison = _Comparison(subject, "poison", dtype, "writes its outputs, all of them and nothing else")
    for case in subject.cases:
        base = evaluate(subject, case, dtype, device, preference)
        chosen = plan_of(subject, base.inputs, preference)
        assert chosen.adjoint is not None
        comparison.plan = chosen.name
        adjoint = _adjoint_for(chosen, base)
        for offset in (64, 65):  # an aligned address, and one that is not
            for plan, tensors, expected in (
                (chosen, base.inputs, base.outputs),
                (adjoint, (*base.upstream, *base.inputs), base.gradients),
            ):
                guarded = [_Guarded(result, offset) for result in expected]
                plan.run(*tensors, out=tuple(g.tensor for g in guarded), workspace=_poisoned_workspace(plan))
                comparison.equal(case.name, tuple(g.tensor for g in guarded), expected)
                comparison.count += 1
                if not all(g.intact() for g in guarded):
                    comparison.wrong.append(f"{case.name}: wrote outside its output")
    return [comparison.row()]


def _adjoint_for(chosen: Plan, base: Evaluation) -> Plan:
    """The adjoint's plan for these upstream gradients, whatever their layout."""
    from adjoint.core.plan import select

    adjoint = chosen.adjoint
    assert adjoint is not None
    problem = adjoint.operator.describe(*base.upstream, *base.inputs, *adjoint.problem.options)
    return select(adjoint.operator, problem, adjoint.preference)


def _poisoned_workspace(plan: Plan) -> Tensor | None:
    if not plan.workspace_bytes:
        return None
    return torch.full((plan.workspace_bytes,), 0xFF, dtype=torch.uint8, device=plan.problem.device)


class _Guarded:
    """An output full of NaN inside memory full of canaries, laid out like a given tensor."""

    def __init__(self, like: Tensor, offset: int) -> None:
        reach = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        span = max(reach + 1, 1) if like.numel() else 0
        self.memory = torch.full((span + 2 * offset,), CANARY, dtype=like.dtype, device=like.device)
        self.tensor = self.memory.as_strided(like.shape, like.stride(), offset)
        self.tensor.fill_(float("nan"))
        self.before, self.after = self.memory[:offset], self.memory[offset + span :]

    def intact(self) -> bool:
        return bool((self.before == CANARY).all() and (self.after == CANARY).all())
