"""Every check of `adjoint.verify` is shown a subject that is broken in the way it looks for, and must fail on it."""

import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Special, Subject
from adjoint.contract.directions import Bound
from adjoint.contract.forms import Outcome, reuse_inputs
from adjoint.core import kernels
from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.core.op.operator import forget
from adjoint.core.plan import Plan
from adjoint.core.preference import Preference
from adjoint.ops.activation.silu.cases import SILU
from adjoint.verify import Job, Row
from adjoint.verify.checks import bits, framework, numerics
from adjoint.verify.checks.forms import forms
from adjoint.verify.listing.jobs import _bad_call, job_of
from adjoint.verify.run import Evaluation
from tests.lookup import FORWARD, LOOKUP, lookup_op, reference, reference_backward

CPU, EAGER = torch.device("cpu"), Preference(backend="eager")
Check = Callable[[Subject, torch.dtype, torch.device, Preference], list[Row]]

pytestmark = pytest.mark.skipif(kernels.interpreting(), reason="needs no kernel")


def planted(change: Callable[[Tensor, Inputs], Tensor]) -> Subject:
    """The lookup with an output that is changed, which its guarantee knows nothing of."""

    @lookup_op.public
    def lookup(
        ids: Tensor, weight: Tensor, scale: Tensor | None = None, *, preference: Preference | None = None
    ) -> Tensor:
        return change(lookup_op.call(ids, weight, scale, preference=preference), (ids, weight, scale))

    return replace(LOOKUP, function=lookup)


def changed_if(condition: Callable[[], bool]) -> Subject:
    return planted(lambda out, inputs: out * 1.5 if condition() else out)


class _Scaled(torch.autograd.Function):
    """x, whose gradient is wrong where a function of the upstream gradient says so."""

    @staticmethod
    def forward(context: Any, x: Tensor, is_wrong: Callable[[Tensor], bool]) -> Tensor:
        context.is_wrong = is_wrong
        return x.clone()

    @staticmethod
    def backward(context: Any, dout: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return (dout * 1.5 if context.is_wrong(dout) else dout), None


def wrong_gradient(is_wrong: Callable[[Tensor], bool] = lambda dout: True) -> Subject:
    return planted(lambda out, inputs: _Scaled.apply(out, is_wrong))


def _wrong_alone(out: Tensor, inputs: Inputs) -> Tensor:
    """Wrong where one gradient alone is asked for."""
    _, weight, scale = inputs
    alone = scale is not None and weight.requires_grad != scale.requires_grad
    return _Scaled.apply(out, lambda dout: alone)  # type: ignore[no-any-return]


_calls = itertools.count()


def _counted(out: Tensor, inputs: Inputs) -> Tensor:
    return out * (1 + next(_calls) % 7)


def _compiles_for_every_size(out: Tensor, inputs: Inputs) -> Tensor:
    if (size := len(inputs[0])) not in _sizes:
        _sizes.add(size)
        kernels.count_compilation()
    return out


_sizes: set[int] = set()


def _other_when_compiled_for_any_size(out: Tensor, inputs: Inputs) -> Tensor:
    is_for_any_size = torch.compiler.is_compiling() and not torch._dynamo.config.assume_static_by_default
    return out * 1.5 if is_for_any_size else out


def _right(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
    return reference(*inputs), reference_backward(*upstream, *inputs)


def _nearly_right(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
    outputs, (dweight, *rest) = _right(upstream, inputs)
    return outputs, (dweight * (1 + 1e-12), *rest)


def _wrong_reference(*arguments: Tensor) -> tuple[Tensor, ...]:
    dweight, *rest = reference_backward(*arguments)
    return 2 * dweight, *rest


def _slightly_wrong_reference(*arguments: Tensor) -> tuple[Tensor, ...]:
    dweight, *rest = reference_backward(*arguments)
    return dweight * (1 + 1e-4), *rest


def _has_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _silu_of(value: float, stated: float) -> Subject:
    return replace(SILU, specials=(Special("stated", (value,), 1.0, (stated,), (None,)),))


def _silu_in_a_form(**changes: Any) -> Subject:
    """silu with a form of its call that is changed."""
    return replace(SILU, forms=(replace(reuse_inputs("x"), **changes),))


def _changed_gradient(outcome: Outcome) -> tuple[Tensor | None, ...]:
    return *outcome.outputs, outcome.gradients[0] * 1.5  # type: ignore[operator]


def _write_before(outcome: Outcome) -> tuple[Tensor | None, ...]:
    (x,) = outcome.inputs
    x.as_strided((1,), (1,), x.storage_offset() - 1).zero_()
    return *outcome.outputs, *outcome.gradients


def _write_between(outcome: Outcome) -> tuple[Tensor | None, ...]:
    """Where an input has every other element, those that are not its own."""
    (x,) = outcome.inputs
    if x.dim() == 2 and x.stride(1) == 2:
        x.as_strided((1,), (1,), x.storage_offset() + 1).zero_()
    return *outcome.outputs, *outcome.gradients


def _twice(upstream: tuple[Tensor, ...], inputs: Inputs, keywords: Any) -> Any:
    (dy,), (x,) = upstream, inputs
    return (SILU.reference(x)[0], inputs), (2 * SILU.reference_backward(dy, x)[0], (dy, x))


def _plan(name: str) -> Preference:
    return Preference(plan=name)


PLANTED: dict[str, tuple[Check, Subject, Preference, torch.dtype, str]] = {
    "an output is wrong": (numerics.accuracy, planted(lambda out, _: out * 1.01), EAGER, torch.float32, "output out"),
    "a gradient is wrong": (numerics.accuracy, wrong_gradient(), EAGER, torch.float32, "output dweight"),
    "a result is rounded twice": (
        numerics.arithmetic, planted(lambda out, _: out / 3 * 3), EAGER, torch.bfloat16, "out is not rounded 1 times"
    ),
    "a result of 16 bits is no copy": (
        numerics.arithmetic, LOOKUP, _plan("eager.copies+eager"), torch.bfloat16, "out is not rounded 0 times"
    ),
    "an accumulator is not as wide as stated": (
        numerics.arithmetic, LOOKUP, _plan("eager.narrow+eager"), torch.float32, "out is not rounded 1 times"
    ),
    "a special value is another": (numerics.specials, _silu_of(1.0, 1.0), EAGER, torch.float32, "stated 1.0"),
    "a zero has another sign": (numerics.specials, _silu_of(-0.0, 0.0), EAGER, torch.float32, "stated 0.0"),
    "NaN is a number": (numerics.specials, _silu_of(1.0, float("nan")), EAGER, torch.float32, "stated nan"),
    "a mistake is none": (
        numerics.mistakes, replace(LOOKUP, mistakes={"none": _right}), EAGER, torch.float64, "'none' passes"
    ),
    "finite differences find the op wrong": (
        numerics.gradients, wrong_gradient(), EAGER, torch.float64, "disagrees with the op's gradient"
    ),
    "finite differences find the reference wrong": (
        numerics.gradients, replace(LOOKUP, reference_backward=_wrong_reference), EAGER, torch.float64,
        "the reference's adjoint is wrong",
    ),
    "finite differences find the reference a little wrong": (
        numerics.gradients, replace(LOOKUP, reference_backward=_slightly_wrong_reference), EAGER, torch.float64,
        "the reference's adjoint is wrong",
    ),
    "finite differences accept a mistake": (
        numerics.gradients, replace(LOOKUP, mistakes={"small": _nearly_right}), EAGER, torch.float64,
        "accept a wrong gradient",
    ),
    "every call differs": (bits.repeats, planted(_counted), EAGER, torch.float32, "result 0 differs"),
    "the batch is in the bits": (bits.invariance, LOOKUP, _plan("eager.batch+eager"), torch.float32, "first alone"),
    "one number of all items has the batch in it": (
        bits.invariance, replace(planted(lambda out, _: out.sum()), rebatched=lambda inputs, upstream: ()), EAGER,
        torch.float32, "is no item's",
    ),
    "the strides are in the bits": (
        bits.invariance, planted(lambda out, inputs: out * (1 + inputs[1].storage_offset())), EAGER, torch.float32,
        "shifted by one element",
    ),
    "a device has other bits": (
        bits.devices, LOOKUP, _plan("triton.elsewhere+eager"), torch.float32, "result 1 differs"
    ),
    **{
        f"an upstream is {layout} and wrong": (
            bits.upstreams, wrong_gradient(wrong), _plan("eager.any_upstream+eager"), torch.float32, layout
        )
        for layout, wrong in (
            ("expanded", lambda dout: 0 in dout.stride()),
            ("transposed", lambda dout: dout.dim() > 1 and dout.stride(-1) > dout.stride(0)),
            ("every other", lambda dout: dout.dim() > 0 and dout.stride(-1) == 2),
        )
    },
    "a gradient alone is wrong": (bits.upstreams, planted(_wrong_alone), EAGER, torch.float32, "alone"),
    "a schedule is in the bits": (bits.schedules, LOOKUP, _plan("eager.schedule+eager"), torch.float32, "block=2"),
    "an output is not written": (
        bits.poison, LOOKUP, _plan("eager.unwritten+eager"), torch.float32, "result 1 differs"
    ),
    "memory before an output is written": (
        bits.poison, LOOKUP, _plan("eager.before+eager"), torch.float32, "wrote outside its output"
    ),
    "memory after an output is written": (
        bits.poison, LOOKUP, _plan("eager.after+eager"), torch.float32, "wrote outside its output"
    ),
    "scratch memory is read first": (
        bits.poison, LOOKUP, _plan("eager.scratch+eager"), torch.float32, "result 0 differs"
    ),
    "a compiled call of another size differs": (
        framework.compilation, planted(_other_when_compiled_for_any_size), EAGER, torch.float32, "dynamic=True"
    ),
    "another form has other bits": (
        forms, _silu_in_a_form(results=_changed_gradient), EAGER, torch.float32, "result 1 differs"
    ),
    "another form gives no gradient": (
        forms, _silu_in_a_form(results=lambda outcome: (*outcome.outputs, None)), EAGER, torch.float32, "is not there"
    ),
    "another form writes beside its memory": (
        forms, _silu_in_a_form(results=_write_before), EAGER, torch.float32, "wrote outside its memory"
    ),
    "another form writes between its elements": (
        forms, _silu_in_a_form(results=_write_between), EAGER, torch.float32, "every other: wrote outside its memory"
    ),
    "another form's sum is out of its bound": (
        forms, _silu_in_a_form(exact=_twice), EAGER, torch.float32, "of the bound"
    ),
    "an output has other strides than stated": (
        framework.registration, LOOKUP, _plan("eager.strides+eager"), torch.float32, "test_lookup"
    ),
    "a compiled call differs": (
        framework.compilation, changed_if(torch.compiler.is_compiling), EAGER, torch.float32, "bits differ from eager"
    ),
    "inference_mode": (
        framework.modes, changed_if(torch.is_inference_mode_enabled), EAGER, torch.float32, "inference_mode changes"
    ),
    "no_grad": (
        framework.modes, changed_if(lambda: not torch.is_grad_enabled()), EAGER, torch.float32, "no_grad changes"
    ),
    "autocast": (
        framework.modes, changed_if(lambda: torch.is_autocast_enabled("cpu")), EAGER, torch.float32, "autocast changes"
    ),
    "save_on_cpu": (framework.modes, changed_if(_has_hooks), EAGER, torch.float32, "save_on_cpu changes"),
    "checkpoint": (framework.modes, changed_if(_has_hooks), EAGER, torch.float32, "checkpoint changes"),
    "another thread": (
        framework.modes, changed_if(lambda: threading.current_thread() is not threading.main_thread()), EAGER,
        torch.float32, "another thread changes",
    ),
    "another size is compiled": (
        framework.recompilation, planted(_compiles_for_every_size), EAGER, torch.float32, "kernels were compiled"
    ),
}  # fmt: skip
"""A check, a subject that it must fail on, with its plan and dtype, and words of the failure."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_failure_is_noticed(name: str) -> None:
    check, subject, preference, dtype, words = PLANTED[name]
    if check is framework.recompilation:
        _sizes.clear()
    job = Job("", "", "", "", "", lambda: check(subject, dtype, CPU, preference))
    rows = job.run()
    assert any(not row.passed and words in row.detail for row in rows), [row.detail for row in rows]


@pytest.mark.parametrize(
    ("check", "plan"),
    [
        (numerics.accuracy, "eager"),
        (bits.repeats, "eager"),
        (bits.devices, "triton.elsewhere+eager"),
        (framework.compilation, "eager"),
        (framework.modes, "eager"),
        (framework.streams, "eager"),
        (framework.capture, "eager"),
    ],
)
def test_a_comparison_of_nothing_fails(
    check: Check, plan: str, monkeypatch: pytest.MonkeyPatch, pretended_gpu: SimpleNamespace
) -> None:
    """An evaluation that gives no results, or whose results nobody lists, passes no check."""
    monkeypatch.setattr(numerics, "compare", lambda found: [])
    monkeypatch.setattr(Evaluation, "results", property(lambda found: ()))
    if check is framework.streams:
        monkeypatch.setattr(framework, "as_tuple", lambda value: ())
    rows = Job("", "", "", "", "", lambda: check(LOOKUP, torch.float32, CPU, _plan(plan))).run()
    assert any(not row.passed for row in rows), "nothing was compared, and nobody noticed"


def test_a_special_value_of_which_nothing_is_stated_fails() -> None:
    nothing = replace(SILU, specials=(Special("silent", (1.0,), 1.0, (None,), (None,)),))
    (row,) = numerics.specials(nothing, torch.float32, CPU, EAGER)
    assert not row.passed and "nothing was compared" in row.detail


ON_A_GPU = {framework.streams, framework.capture}
"""Checks that a pretended GPU is needed for: below."""


def test_every_check_has_a_planted_failure() -> None:
    def is_check(module: ModuleType, function: Any) -> bool:
        signature = inspect.signature(function)
        own = function.__module__ == module.__name__ and not function.__name__.startswith("_")
        takes = list(signature.parameters)[:4] == ["subject", "dtype", "device", "preference"]
        return own and takes and signature.return_annotation == list[Row]

    every = {
        function
        for module in (numerics, bits, framework, import_module("adjoint.verify.checks.forms"))
        for _, function in inspect.getmembers(module, inspect.isfunction)
        if is_check(module, function)
    }
    assert len(every) >= 18
    assert every == {check for check, *_ in PLANTED.values()} | ON_A_GPU


# --------------------------------------------------------------------------------------------- a pretended GPU


class _Graph:
    """Records what runs while it is captured; `replays` says whether a replay runs it again."""

    def __init__(self, replays: bool) -> None:
        self.replays = replays
        self.calls: list[Callable[[], Any]] = []

    def replay(self) -> None:
        for call in self.calls if self.replays else ():
            call()


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = SimpleNamespace(on_side=False, replays=True, allocations=itertools.repeat(0))

    @contextmanager
    def stream(side: Any) -> Iterator[None]:
        state.on_side = True
        yield
        state.on_side = False

    @contextmanager
    def graph(recorder: _Graph) -> Iterator[None]:
        run = Bound.run

        def record(self: Bound, *arguments: Any, **memory: Any) -> Any:
            recorder.calls.append(lambda: run(self, *arguments, **memory))
            return run(self, *arguments, **memory)

        with monkeypatch.context() as patch:
            patch.setattr(Bound, "run", record)
            yield

    pretended = {
        "Stream": lambda device: SimpleNamespace(synchronize=lambda: None),
        "stream": stream,
        "synchronize": lambda device: None,
        "_sleep": lambda cycles: None,
        "device_count": lambda: 1,
        "CUDAGraph": lambda: _Graph(state.replays),
        "graph": graph,
        "memory_stats": lambda device: {"allocation.all.allocated": next(state.allocations)},
    }
    for name, replacement in pretended.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    return state


def test_a_replay_that_does_nothing_is_noticed(pretended_gpu: SimpleNamespace) -> None:
    (right,) = framework.capture(LOOKUP, torch.float32, CPU, EAGER)
    assert right.passed, right.detail
    pretended_gpu.replays = False
    (row,) = framework.capture(LOOKUP, torch.float32, CPU, EAGER)
    assert not row.passed and "a replay differs" in row.detail


def test_memory_that_kernels_allocate_in_a_graph_is_noticed(
    pretended_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended_gpu.allocations = itertools.count()
    (right,) = framework.capture(LOOKUP, torch.float32, CPU, EAGER)
    assert right.passed, "PyTorch may allocate"
    monkeypatch.setattr(Plan, "backend", "triton")
    (row,) = framework.capture(LOOKUP, torch.float32, CPU, EAGER)
    assert not row.passed and "1 allocations during capture" in row.detail


def test_a_plan_that_waits_and_is_recorded_is_noticed(
    pretended_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget()  # plans that know whether they wait
    monkeypatch.setattr(Plan, "waits", property(lambda plan: plan.operator is FORWARD))
    monkeypatch.setattr(Plan, "_refuse_capture", lambda plan: None)
    (row,) = framework.capture(LOOKUP, torch.float32, CPU, EAGER)
    assert not row.passed and "eager waits, and was recorded" in row.detail

    def refuse(plan: Plan, name: str) -> None:
        raise Unsupported(f"{name} waits")

    monkeypatch.setattr(Bound, "run", lambda side, *arguments, **memory: refuse(side.plan, side.plan.name))
    (row,) = framework.capture(LOOKUP, torch.float32, CPU, EAGER)
    assert row.passed and row.guarantee == "refused by name: it waits"
    monkeypatch.setattr(Bound, "run", lambda side, *arguments, **memory: refuse(side.plan, "another"))
    (row,) = framework.capture(LOOKUP, torch.float32, CPU, EAGER)
    assert not row.passed and "the refusal does not name eager" in row.detail


def test_another_stream_with_other_bits_is_noticed(pretended_gpu: SimpleNamespace) -> None:
    (right,) = framework.streams(LOOKUP, torch.float32, CPU, EAGER)
    assert right.passed, right.detail
    (row,) = framework.streams(changed_if(lambda: pretended_gpu.on_side), torch.float32, CPU, EAGER)
    assert not row.passed and "a side stream gave other bits" in row.detail


@pytest.mark.parametrize("check", [numerics.accuracy, framework.registration])
def test_a_case_that_raises_is_named(check: Any) -> None:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        return (torch.zeros(2, dtype=torch.int64, device=device),)

    subject = replace(SILU, cases=(*SILU.cases[:1], Case("of whole numbers", make)))
    (row,) = job_of(subject, "accuracy", torch.float32, CPU, EAGER, check).run()
    assert not row.passed and row.detail.startswith("case 'of whole numbers': ArgumentError: silu: x"), row.detail


# ------------------------------------------------------------------------------------------------- bad calls


def _refuse(device: torch.device) -> None:
    raise ArgumentError("lookup: weight")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (BadCall("accepted", lambda device: None, "weight"), "nothing was raised"),
        (BadCall("another message", _refuse, "scale"), "the message lacks scale"),
        (BadCall("another error", _refuse, "weight", error=TypeError), "ArgumentError"),
    ],
)
def test_a_call_that_is_not_refused_as_stated_is_noticed(bad: BadCall, words: str) -> None:
    (row,) = _bad_call(bad, "lookup", CPU).run()
    assert not row.passed and words in row.detail
    (right,) = _bad_call(BadCall("refused", _refuse, "weight"), "lookup", CPU).run()
    assert right.passed
