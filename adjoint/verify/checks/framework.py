"""Checks of how an op lives inside PyTorch: registration, compilation, modes, threads, graphs."""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from adjoint.contract import directions
from adjoint.contract.cases import Case, Subject
from adjoint.contract.inputs import Inputs, each
from adjoint.contract.undrawn import undrawn
from adjoint.core import kernels
from adjoint.core.errors import Unsupported
from adjoint.core.op.operator import forget
from adjoint.core.plan import Plan, select
from adjoint.core.preference import Preference, resolve
from adjoint.verify.checks.bits import same_bits
from adjoint.verify.run import Evaluation, Row, as_tuple, directions_of, evaluate, gradients_of, naming

SIZES = tuple(range(1, 51))
FEWER_SIZES = (1, 2, 5, 16, 33)
"""The sizes for the interpreter, where each one costs seconds."""
DYNAMIC_SHAPES = (False, True)
"""Both values of torch.compile's `dynamic`."""
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""The parts of `torch.library.opcheck`: all of them."""


def first_of_each_plan(
    subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference
) -> list[Case]:
    """The first case of each plan, and of each set of kernels that a plan launches."""
    by_plan: dict[tuple[object, ...], Case] = {}
    for case in subject.cases:
        with naming(case):
            call = subject.bind(undrawn(case, dtype))
            plans = [select(operator, problem, resolve(preference)) for operator, problem in call.problems(device)]
        by_plan.setdefault(tuple((plan.name, _kernels_of(plan)) for plan in plans), case)
    return list(by_plan.values())


def _kernels_of(plan: Plan) -> frozenset[str]:
    return frozenset(launch.kernel.name for launch in plan.launches)


def _results(
    subject: Subject, function: Callable[..., Any], inputs: Inputs, upstream: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The outputs and all gradients of a function that takes the inputs of a subject."""
    own = subject.leaves(inputs)
    outputs = as_tuple(function(*own))
    return (*outputs, *torch.autograd.grad(outputs, subject.differentiable(own), upstream))


def _are_equal(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Whether results have the expected bits; False if there are no results, because then nothing was compared."""
    return 0 < len(results) == len(expected) and all(map(same_bits, results, expected))


def registration(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """`torch.library.opcheck` on the operators of both directions."""
    return [
        _registered(evaluate(subject, case, dtype, device, preference), dtype)
        for case in first_of_each_plan(subject, dtype, device, preference)
    ]


def _registered(base: Evaluation, dtype: torch.dtype) -> Row:
    wrong = []
    for direction in directions_of(base).both:
        operator = direction.plan.operator
        try:
            torch.library.opcheck(operator.call, (*direction.arguments, base.preference.text), test_utils=OPCHECKS)
        except Exception as error:
            wrong.append(f"{operator.name}: {error}")
    return base.row("opcheck", dtype, "registered right", wrong=wrong)


def compilation(
    subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference, backend: str = "aot_eager"
) -> list[Row]:
    """`torch.compile(fullgraph=True)`, with static and dynamic shapes, gives the bits of eager mode.

    The first case is compiled for two sizes. The case of another plan keeps its size, because another size might have
    another plan.
    """
    rows = []
    for number, case in enumerate(first_of_each_plan(subject, dtype, device, preference)):
        base = evaluate(subject, case, dtype, device, preference)
        wrong = []
        items = subject.items(base.inputs)
        calls = [(items, base.inputs, base.upstream)]
        if not number:
            calls = [(size, *subject.resize(base.inputs, base.upstream, size)) for size in (items, 2 * items)]
        expected = [base.again(inputs, upstream).results for _, inputs, upstream in calls]
        for dynamic in DYNAMIC_SHAPES:
            torch._dynamo.reset()
            compiled = torch.compile(
                lambda *x: subject(*x, preference=preference), fullgraph=True, dynamic=dynamic, backend=backend
            )
            for (size, inputs, upstream), results in zip(calls, expected, strict=True):
                if not _are_equal(_results(subject, compiled, inputs, upstream), results):
                    wrong.append(f"dynamic={dynamic}, {size} items: bits differ from eager mode")
        torch._dynamo.reset()
        rows.append(base.row(f"compile ({backend})", dtype, "equals eager mode", wrong=wrong))
    return rows


def modes(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """Modes, checkpointing, offload hooks and threads change nothing; autocast does what the op states."""
    return [
        _in_modes(evaluate(subject, case, dtype, device, preference), dtype, device)
        for case in first_of_each_plan(subject, dtype, device, preference)
    ]


def _in_modes(base: Evaluation, dtype: torch.dtype, device: torch.device) -> Row:
    subject, preference = base.subject, base.preference
    wrong = []

    def compare(what: str, results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
        if not _are_equal(results, expected):
            wrong.append(f"{what} changes the result")

    with torch.inference_mode():
        compare("inference_mode", as_tuple(subject(*base.inputs, preference=preference)), base.outputs)
    with torch.no_grad():
        compare("no_grad", as_tuple(subject(*base.inputs, preference=preference)), base.outputs)
    low = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    if _can_be_cast(base, low):
        compare("autocast", *_autocast(base, device, low))
    with torch.autograd.graph.save_on_cpu():
        compare("save_on_cpu", base.again().results, base.results)

    def recomputed(*inputs: Any) -> Any:
        return checkpoint(lambda *x: subject(*x, preference=preference), *inputs, use_reentrant=False)

    compare("checkpoint", _results(subject, recomputed, base.inputs, base.upstream), base.results)

    if kernels.interpreting():  # Triton's interpreter does not support threads
        return base.row("modes", dtype, "changes nothing", wrong=wrong)
    evaluations: list[Evaluation] = []
    workers = [threading.Thread(target=lambda: evaluations.append(base.again())) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if len(evaluations) != len(workers):
        wrong.append("a thread raised")
    for evaluation in evaluations:
        compare("another thread", evaluation.results, base.results)
    return base.row("modes and threads", dtype, "changes nothing", wrong=wrong)


def _can_be_cast(base: Evaluation, low: torch.dtype) -> bool:
    """Whether the op takes cast inputs beside those that autocast leaves alone, such as gates.

    It does not if one of the latter has another 16-bit type.
    """
    alone = [
        x.dtype
        for name, x in zip(base.subject.inputs, base.inputs, strict=True)
        if x is not None and x.is_floating_point() and base.subject.autocast and name not in base.subject.autocast
    ]
    return all(kind.itemsize > 2 or kind == low for kind in alone)


def _autocast(
    base: Evaluation, device: torch.device, low: torch.dtype
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Results under autocast to a dtype, and the expected ones: those for inputs that were cast as the op does it."""
    subject, preference = base.subject, base.preference
    named = zip(subject.inputs, base.inputs, strict=True)
    inputs = tuple(t.to(low) if t is not None and name in subject.autocast else t for name, t in named)
    with torch.no_grad():
        outputs = as_tuple(subject(*inputs, preference=preference))
    upstream = tuple(t.to(output.dtype) for t, output in zip(base.upstream, outputs, strict=True))
    expected = base.again(inputs, upstream)
    with torch.autocast(device.type, dtype=low):
        evaluation = base.again(upstream=upstream)
    as_given = zip(expected.gradients, subject.differentiable(base.inputs), strict=True)
    return evaluation.results, (*expected.outputs, *(gradient.to(own.dtype) for gradient, own in as_given))


def recompilation(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """After one call, calls with other sizes compile no kernel: fifty sizes, fewer in the interpreter."""
    base = evaluate(subject, subject.cases[0], dtype, device, preference)
    forget()  # otherwise the kernels that another check has compiled would serve
    base.again()
    before = kernels.compilations()
    sizes = FEWER_SIZES if kernels.interpreting() else SIZES
    for size in sizes:
        base.again(*subject.resize(base.inputs, base.upstream, size))
    compiled = kernels.compilations() - before
    wrong = [f"{compiled} kernels were compiled"] if compiled else []
    return [base.row("no recompilation", dtype, f"{len(sizes)} sizes", wrong=wrong)]


def streams(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """The op runs on the current stream: it sees the results of earlier work there, and later work sees its results.

    It gives the same bits on every GPU of the machine.
    """
    return [
        _on_streams(evaluate(subject, case, dtype, device, preference), dtype, device)
        for case in first_of_each_plan(subject, dtype, device, preference)
    ]


def _on_streams(base: Evaluation, dtype: torch.dtype, device: torch.device) -> Row:
    wrong = []
    side = torch.cuda.Stream(device)
    staging = each(lambda t: torch.full_like(t, float("nan") if t.is_floating_point() else 0), base.inputs)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        _copy(staging, base.inputs)
        outputs = as_tuple(base.subject(*staging, preference=base.preference))
        copies = tuple(o.clone() for o in outputs)
    side.synchronize()
    if not _are_equal(copies, base.outputs):
        wrong.append("a side stream gave other bits")
    for index in range(1, torch.cuda.device_count()):
        other = torch.device("cuda", index)
        moved = each(lambda t, other=other: t.to(other), base.inputs)  # type: ignore[misc]
        there = base.again(moved, tuple(t.to(other) for t in base.upstream))
        if not _are_equal(tuple(t.to(device) for t in there.results), base.results):
            wrong.append(f"{other} gave other bits")
    devices = f"a side stream and {torch.cuda.device_count()} device(s)"
    return base.row("streams and devices", dtype, devices, wrong=wrong)


def _copy(targets: Inputs, sources: Inputs) -> None:
    for target, source in zip(targets, sources, strict=True):
        if target is not None:
            target.copy_(source)


def _recording_refused(side: directions.Bound) -> str:
    """Tries to record a plan that waits, which must be refused by name; says what is wrong, or nothing."""
    try:
        with warnings.catch_warnings(), torch.cuda.graph(torch.cuda.CUDAGraph()):
            warnings.simplefilter("ignore")  # torch warns that the graph is empty
            side.run()
    except Unsupported as error:
        return "" if side.plan.name in str(error) else f"the refusal does not name {side.plan.name}: {error}"
    return f"{side.plan.name} waits, and was recorded"


def capture(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """A replay of a CUDA graph on new data equals eager mode, and nothing is allocated while it is recorded."""
    return [
        _captured([evaluate(subject, case, dtype, device, preference, seed) for seed in (1, 2)], dtype, device)
        for case in first_of_each_plan(subject, dtype, device, preference)
    ]


def _captured(data_of: list[Evaluation], dtype: torch.dtype, device: torch.device) -> Row:
    first, second = data_of
    inputs, upstream = each(Tensor.clone, first.inputs), tuple(t.clone() for t in first.upstream)
    call, text = first.subject.bind(inputs), resolve(first.preference)
    forward = directions.forward(call, text)
    outputs = forward.plan.prepare().allocate(forward.arguments)
    backward = directions.backward(call, upstream, outputs, text)
    gradients = backward.plan.prepare().allocate(backward.arguments)
    workspaces = forward.workspace(), backward.workspace()
    if forward.plan.waits or backward.plan.waits:
        wrong = [text for side in (forward, backward) if side.plan.waits and (text := _recording_refused(side))]
        return first.row("CUDA graph", dtype, "refused by name: it waits", wrong=wrong)
    for _ in range(2):  # twice, because a vendor's library allocates its workspace on its first use of a stream
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
            forward.run(out=outputs, workspace=workspaces[0])
            backward.run(out=gradients, workspace=workspaces[1])
            allocated = torch.cuda.memory_stats(device)["allocation.all.allocated"] - before
        if not allocated:
            break
    wrong = []
    if forward.plan.backend == backward.plan.backend == "triton" and allocated:
        wrong.append(f"{allocated} allocations during capture")
    for data in (second, first):
        _copy((*inputs, *upstream), (*data.inputs, *data.upstream))
        graph.replay()
        torch.cuda.synchronize(device)
        results = (*outputs[: len(data.outputs)], *gradients_of(first, backward, gradients))
        if not _are_equal(results, data.results):
            wrong.append("a replay differs from eager mode")
    return first.row("CUDA graph", dtype, "replays equal eager mode", wrong=wrong)
