"""A toy op with everything the activations lack: out[i] = weight[ids[i]]·scale[i].

Its ids are integers, its weight is shared by all items, its scale may be absent, and its forward operator
has an output that only the backward sees. Beside the right plan it has wrong ones, each of which breaks one
promise that it makes.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adjoint.contract.cases import Answers, Case, Inputs, Rebatch, Subject, Workload
from adjoint.core.arguments import require_floating, require_ids, require_like
from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.plan import Candidate, Plan
from adjoint.core.preference import Preference
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules

# ------------------------------------------------------------------------------------- reference


def reference(ids: Tensor, weight: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
    out = weight[ids]
    return (out if scale is None else out * scale[:, None],)


def reference_backward(dout: Tensor, ids: Tensor, weight: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
    scaled = dout if scale is None else dout * scale[:, None]
    dweight = torch.zeros_like(weight).index_add(0, ids, scaled)
    return (dweight,) if scale is None else (dweight, (dout * weight[ids]).sum(-1))


def _bound(index: int, dtype: torch.dtype, backward: bool) -> Callable[..., Tensor]:
    """One rounding of sums that were formed in float64."""
    eps = torch.finfo(dtype).eps

    def bound(*arguments: Tensor | None) -> Tensor:
        sizes = [a.abs() if a is not None and a.is_floating_point() else a for a in arguments]
        largest = (reference_backward if backward else reference)(*sizes)[index]  # type: ignore[arg-type]
        exact = (reference_backward if backward else reference)(*arguments)[index]  # type: ignore[arg-type]
        return eps * exact.abs() + 1e-13 * largest + torch.finfo(dtype).smallest_normal

    return bound


# ----------------------------------------------------------------------------------------- plans


def _guarantee(problem: Problem) -> dict[str, Guarantee]:
    backward = problem.op.endswith("backward")

    def promise(index: int, item: str) -> Guarantee:
        error = Derived("u·|exact|", _bound(index, problem.dtypes[0], backward))
        return Guarantee(True, item, True, "float64", 1, error)

    if backward:
        return {"dweight": promise(0, ""), "dscale": promise(1, "item")}
    return {"out": promise(0, "item"), "rows": promise(0, "item")}


def _for_any_strides(problem: Problem) -> dict[str, Guarantee]:
    """What all gradients promise to be for upstream gradients of any strides."""
    return {name: replace(promise, batch_invariant="item") for name, promise in _guarantee(problem).items()}


def _that_states(**changes: Any) -> Callable[[Problem], dict[str, Guarantee]]:
    return lambda problem: {name: replace(promise, **changes) for name, promise in _guarantee(problem).items()}


Compute = Callable[[Plan, tuple[Any, ...]], tuple[Tensor, ...]]


def _spoil(output: Tensor, beside: int) -> None:
    """Writes to the element before an output (-1), or to the one after it (1)."""
    if output.numel():
        place = output.storage_offset() - 1 if beside < 0 else output.storage_offset() + output.numel()
        output.as_strided((1,), (1,), place).fill_(0)


def _candidate(
    name: str,
    compute: Compute,
    unwritten: int | None = None,
    schedules: Any = None,
    beside: int = 0,
    reads_scratch: bool = False,
    guarantee: Callable[[Problem], dict[str, Guarantee]] = _guarantee,
) -> Candidate:
    """A plan that writes what `compute` gives, except one output if told so, and beside the first if told that; or that
    adds to the first what it finds in its scratch memory."""

    def run(plan: Plan, arguments: Any, outputs: Any, workspace: Tensor | None) -> tuple[Tensor, ...]:
        results = tuple(r.to(o.dtype) for r, o in zip(compute(plan, arguments), plan.allocate(arguments), strict=True))
        if reads_scratch and workspace is not None:
            found = workspace[:4].view(torch.float32)
            results = (results[0] + found, *results[1:])
        if outputs is None:
            return results
        for index, (output, result) in enumerate(zip(outputs, results, strict=True)):
            if index != unwritten:
                output.copy_(result)
        if beside:
            _spoil(outputs[0], beside)
        return tuple(outputs)

    return Candidate(
        name,
        "eager",
        "lookup",
        1,
        refuse=lambda problem: "",
        guarantee=guarantee,
        run=run,
        schedules=schedules,
        workspace_bytes=lambda problem: 64,
    )


def _forward(plan: Plan, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    ids, weight, scale, _ = arguments
    (out,) = reference(ids, weight.double(), None if scale is None else scale.double())
    return out, ids.clone()


def _backward(plan: Plan, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    dout, rows, weight, scale, need = arguments
    results = reference_backward(dout.double(), rows, weight.double(), None if scale is None else scale.double())
    gradients = results if scale is not None else (*results, weight)
    return tuple(x if need >> bit & 1 else x.new_empty(0) for bit, x in enumerate(gradients))


def _next(tensor: Tensor) -> Tensor:
    """The neighbouring value of every element."""
    return torch.nextafter(tensor, torch.full_like(tensor, float("inf")))


def _other_bits(plan: Plan, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    dweight, dscale = _backward(plan, arguments)
    return _next(dweight.to(arguments[2].dtype)), dscale


def _batch_in_bits(plan: Plan, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    out, rows = _forward(plan, arguments)
    return (_next(out.to(arguments[1].dtype)) if len(rows) > 1 else out), rows


def _third_in_float32(plan: Plan, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Divided and multiplied by 3 in float32, whatever the guarantee says."""
    out, rows = _forward(plan, arguments)
    return (out.float() / 3 * 3 if arguments[1].dtype == torch.float32 else out), rows


def _transposed(plan: Plan, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Other strides than the op's shape function states."""
    out, rows = _forward(plan, arguments)
    return out.t().contiguous().t(), rows


def _schedule_in_bits(plan: Plan, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    dweight, dscale = _backward(plan, arguments)
    return dweight * plan.schedule["block"], dscale


class _OneBlock(Schedules):
    def __init__(self) -> None: ...

    def lookup(self, kernel: str, device: torch.device | None = None) -> dict[str, int]:
        return {"block": 1 if kernel == "lookup" else 0}


# ----------------------------------------------------------------------------------- declaration


def _check(ids: Tensor, weight: Tensor, scale: Tensor | None) -> None:
    require_floating("lookup", "weight", weight)
    require_ids("lookup", "ids", ids, "weight", weight)
    if scale is not None:
        require_like("lookup", "scale", scale, "weight", weight, (len(ids),))


lookup_op = Op(
    "test_lookup",
    label="lookup",
    inputs=("ids", "weight", "scale?"),
    differentiable=("weight", "scale"),
    outputs=("out",),
    kept=("rows",),
    check=_check,
    allocate=lambda ids, weight, scale, keep: (weight.new_empty(len(ids), weight.shape[1]), torch.empty_like(ids)),
    describe=lambda ids, weight, scale, keep: Facts((weight.dtype,)),
    forward=lambda: (
        _candidate("eager", _forward),
        _candidate("eager.unwritten", _forward, unwritten=1),
        _candidate("eager.batch", _batch_in_bits),
        _candidate("eager.before", _forward, beside=-1),
        _candidate("eager.after", _forward, beside=1),
        _candidate("eager.scratch", _forward, reads_scratch=True),
        _candidate("eager.copies", _forward, guarantee=_that_states(roundings=0)),
        _candidate("eager.narrow", _third_in_float32, guarantee=_that_states(accumulator="float64")),
        _candidate("eager.strides", _transposed),
    ),
    adjoint=Adjoint(
        lambda: (
            _candidate("eager", _backward),
            _candidate("eager.other_bits", _other_bits),
            _candidate("eager.any_upstream", _backward, guarantee=_for_any_strides),
            # What runs elsewhere under one name, and gives other bits than PyTorch under the same name.
            _candidate("triton.elsewhere", _other_bits),
            _candidate("eager.elsewhere", _backward),
            _candidate("eager.schedule", _schedule_in_bits, schedules=_OneBlock()),
        ),
        describe=lambda dout, rows, weight, scale, need: Facts((weight.dtype,)),
        saves=("rows", "weight", "scale?"),
        check=lambda dout, rows, weight, scale, need: _check(rows, weight, scale),
    ),
)

FORWARD, BACKWARD = lookup_op.forward, lookup_op.forms[""].operator


@lookup_op.public
def lookup(ids: Tensor, weight: Tensor, scale: Tensor | None = None, *, preference: Preference | None = None) -> Tensor:
    return lookup_op.call(ids, weight, scale, preference=preference)  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------- subject


def _make(items: int, scaled: bool) -> Callable[..., Inputs]:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        ids = torch.randint(5, (items,), generator=generator)
        weight = torch.randn(5, 4, generator=generator, dtype=torch.float64).to(dtype)
        scale = torch.randn(items, generator=generator, dtype=torch.float64).to(dtype) if scaled else None
        return ids.to(device), weight.to(device), None if scale is None else scale.to(device)

    return make


def _rebatched(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterable[Rebatch]:
    ids, weight, scale = inputs
    if len(ids):
        first = None if scale is None else scale[:1]

        def pairs(whole: Answers, alone: Answers) -> Iterable[tuple[Tensor, Tensor]]:
            return [(one, every[:1]) for one, every in zip(alone[0], whole[0], strict=True)]

        yield Rebatch("the first alone", (ids[:1], weight, first), (upstream[0][:1],), pairs)


def _columns(arguments: Inputs, outputs: tuple[Tensor, ...]) -> Iterable[tuple[Inputs, tuple[Tensor, ...]]]:
    """One column at a time, with the ids whole; for workloads without a scale."""

    def column(tensor: Tensor, index: int) -> Tensor:
        return tensor[..., index : index + 1] if tensor.dim() == 2 else tensor

    for index in range(outputs[0].shape[-1]):
        yield (
            tuple(None if t is None else column(t, index) for t in arguments),
            tuple(column(t, index) for t in outputs),
        )


def _zeros(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
    floating = [t for t in inputs[1:] if t is not None]
    return tuple(map(torch.zeros_like, upstream)), tuple(map(torch.zeros_like, floating))


LOOKUP = Subject(
    name="lookup",
    function=lookup,
    inputs=("ids", "weight", "scale"),
    reference=reference,
    reference_backward=reference_backward,
    cases=(
        Case("scaled", _make(9, True)),
        Case("not scaled", _make(7, False)),
        Case("no items", _make(0, True)),
    ),
    dtypes=(torch.float64, torch.float32, torch.bfloat16),
    mistakes={"zero output": _zeros},
    plans=("eager",),
    batched=("ids", "scale"),
    rebatched=_rebatched,
    pieces=_columns,
)

WORKLOAD = Workload(
    "lookup 64×4, float32",
    LOOKUP,
    _make(64, False),
    forward_bytes=64 * 4 * 4,
    backward_bytes=64 * 4 * 4,
    baseline=lambda ids, weight, scale: weight[ids],
    dtype=torch.float32,
)
