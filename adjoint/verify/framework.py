"""Checks of how an op lives inside PyTorch: registration, compilation, modes, threads, graphs."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from adjoint.core import kernels
from adjoint.core.cases import Case, Subject
from adjoint.core.preference import Preference
from adjoint.core.problem import short
from adjoint.verify.bits import same_bits
from adjoint.verify.row import Row
from adjoint.verify.run import Evaluation, as_tuple, differentiate, evaluate, plan_of

SIZES = tuple(range(1, 51))


def _case(subject: Subject) -> Case:
    return subject.cases[0]


def _row(subject: Subject, check: str, dtype: torch.dtype, plan: str, what: str, wrong: list[str]) -> Row:
    return Row(subject.name, check, short(dtype), plan, what, what, not wrong, "; ".join(wrong))


def registration(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """`torch.library.opcheck` on the operators of both directions."""
    base = evaluate(subject, _case(subject), dtype, device, preference)
    chosen = plan_of(subject, base.inputs, preference)
    assert chosen.adjoint is not None
    wrong = []
    for plan, tensors in ((chosen, base.inputs), (chosen.adjoint, (*base.upstream, *base.inputs))):
        arguments = (*(t.detach() for t in tensors), *plan.problem.options, preference.text)
        try:
            torch.library.opcheck(plan.operator.call, arguments)
        except Exception as error:
            wrong.append(f"{plan.operator.name}: {error}")
    return [_row(subject, "opcheck", dtype, chosen.name, "registered right", wrong)]


def compilation(
    subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference, backend: str = "aot_eager"
) -> list[Row]:
    """`torch.compile(fullgraph=True)`, with static and dynamic shapes, gives the bits of eager mode."""
    wrong = []
    base = evaluate(subject, _case(subject), dtype, device, preference)
    chosen = plan_of(subject, base.inputs, preference)
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda *x: subject(*x, preference=preference), fullgraph=True, dynamic=dynamic, backend=backend
        )
        for repeat in (1, 2):
            inputs = tuple(torch.cat([t] * repeat) for t in base.inputs)
            upstream = tuple(torch.cat([t] * repeat) for t in base.upstream)
            expected = differentiate(subject, inputs, upstream, preference)
            leaves = tuple(t.detach().requires_grad_() for t in inputs)
            outputs = as_tuple(compiled(*leaves))
            results = (*outputs, *torch.autograd.grad(outputs, leaves, upstream))
            if not all(map(same_bits, results, expected.results)):
                wrong.append(f"dynamic={dynamic}, size {repeat}: bits differ from eager mode")
    torch._dynamo.reset()
    return [_row(subject, f"compile ({backend})", dtype, chosen.name, "equals eager mode", wrong)]


def modes(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """inference_mode, no_grad, autocast, checkpointing, offload hooks and other threads change nothing."""
    base = evaluate(subject, _case(subject), dtype, device, preference)
    chosen = plan_of(subject, base.inputs, preference)
    wrong = []

    def compare(what: str, results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
        if not all(map(same_bits, results, expected)):
            wrong.append(f"{what} changes the result")

    def under(context: Callable[[], object]) -> Evaluation:
        with context():  # type: ignore[attr-defined]
            return differentiate(subject, base.inputs, base.upstream, preference)

    with torch.inference_mode():
        compare("inference_mode", as_tuple(subject(*base.inputs, preference=preference)), base.outputs)
    with torch.no_grad():
        compare("no_grad", as_tuple(subject(*base.inputs, preference=preference)), base.outputs)
    low = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    compare("autocast", under(lambda: torch.autocast(device.type, dtype=low)).results, base.results)
    compare("save_on_cpu", under(torch.autograd.graph.save_on_cpu).results, base.results)

    leaves = tuple(t.detach().requires_grad_() for t in base.inputs)
    outputs = as_tuple(checkpoint(lambda *x: subject(*x, preference=preference), *leaves, use_reentrant=False))
    compare("checkpoint", (*outputs, *torch.autograd.grad(outputs, leaves, base.upstream)), base.results)

    if kernels.interpreting():  # Triton's interpreter is not made for threads
        return [_row(subject, "modes", dtype, chosen.name, "changes nothing", wrong)]
    found: list[Evaluation] = []
    workers = [
        threading.Thread(target=lambda: found.append(differentiate(subject, base.inputs, base.upstream, preference)))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if len(found) != len(workers):
        wrong.append("a thread raised")
    for evaluation in found:
        compare("another thread", evaluation.results, base.results)
    return [_row(subject, "modes and threads", dtype, chosen.name, "changes nothing", wrong)]


def recompilation(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """After one call, fifty other sizes compile no kernel."""
    base = evaluate(subject, _case(subject), dtype, device, preference)
    chosen = plan_of(subject, base.inputs, preference)
    before = kernels.compilations()
    for size in SIZES:
        inputs = tuple(torch.cat([t] * (size // 10 + 1))[:size] for t in base.inputs)
        upstream = tuple(torch.cat([t] * (size // 10 + 1))[:size] for t in base.upstream)
        differentiate(subject, inputs, upstream, preference)
    compiled = kernels.compilations() - before
    wrong = [f"{compiled} kernels were compiled"] if compiled else []
    return [_row(subject, "no recompilation", dtype, chosen.name, f"{len(SIZES)} sizes", wrong)]


def streams(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """The op runs on the current stream: work queued before it on that stream is seen, work after it sees it."""
    base = evaluate(subject, _case(subject), dtype, device, preference)
    chosen = plan_of(subject, base.inputs, preference)
    wrong = []
    side = torch.cuda.Stream(device)
    staging = tuple(torch.full_like(t, float("nan")) for t in base.inputs)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        for target, source in zip(staging, base.inputs, strict=True):
            target.copy_(source)
        outputs = as_tuple(subject(*staging, preference=preference))
        copies = tuple(o.clone() for o in outputs)
    side.synchronize()
    if not all(map(same_bits, copies, base.outputs)):
        wrong.append("a side stream gave other bits")
    for index in range(1, torch.cuda.device_count()):
        other = torch.device("cuda", index)
        moved = tuple(t.to(other) for t in base.inputs)
        there = differentiate(subject, moved, tuple(t.to(other) for t in base.upstream), preference)
        if not all(same_bits(a.to(device), b) for a, b in zip(there.results, base.results, strict=True)):
            wrong.append(f"{other} gave other bits")
    devices = f"a side stream and {torch.cuda.device_count()} device(s)"
    return [_row(subject, "streams and devices", dtype, chosen.name, devices, wrong)]


def capture(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """Recorded in a CUDA graph and replayed on new data: equal to eager mode, and nothing is allocated."""
    first = evaluate(subject, _case(subject), dtype, device, preference, seed=1)
    second = evaluate(subject, _case(subject), dtype, device, preference, seed=2)
    chosen = plan_of(subject, first.inputs, preference).prepare()
    assert chosen.adjoint is not None
    inputs = tuple(t.clone() for t in first.inputs)
    upstream = tuple(t.clone() for t in first.upstream)
    outputs = chosen.allocate((*inputs, *chosen.problem.options))
    gradients = chosen.adjoint.allocate((*upstream, *inputs, *chosen.adjoint.problem.options))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
        chosen.run(*inputs, out=outputs)
        chosen.adjoint.run(*upstream, *inputs, out=gradients)
        allocated = torch.cuda.memory_stats(device)["allocation.all.allocated"] - before
    wrong = []
    if chosen.backend == "triton" and allocated:
        wrong.append(f"{allocated} allocations during capture")
    for data in (second, first):
        for target, source in zip((*inputs, *upstream), (*data.inputs, *data.upstream), strict=True):
            target.copy_(source)
        graph.replay()
        torch.cuda.synchronize(device)
        if not all(map(same_bits, (*outputs, *gradients), data.results)):
            wrong.append("a replay differs from eager mode")
    return [_row(subject, "CUDA graph", dtype, chosen.name, "replays equal eager mode", wrong)]
