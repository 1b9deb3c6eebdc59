"""The first-use check: wrong kernels are noticed before they serve a call, each once, and right ones are left alone."""

import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import known_answers
from adjoint.contract.cases import Subject
from adjoint.contract.directions import backward, forward
from adjoint.core.kernels import interpreting
from adjoint.core.launch import Execute, Setup
from adjoint.core.op.operator import forget, operators
from adjoint.core.plan import Candidate, Plan, first_use
from adjoint.ops import cases

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing was used before, and the check is off."""
    forget()
    yield
    adjoint.set_first_use_check(False)
    forget()


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that are compared with a known answer, as they are."""
    seen: list[Plan] = []
    compare = known_answers.compare

    def recording(plan: Plan) -> bool:
        seen.append(plan)
        return compare(plan)

    monkeypatch.setattr(known_answers, "compare", recording)
    return seen


def spoil(monkeypatch: pytest.MonkeyPatch, operator: str, factor: float = 1.01) -> None:
    """Lets every candidate of an operator compute its outputs times a factor."""

    def wrong(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for output in outputs:
            output.mul_(factor)
        return outputs

    def spoilt(candidate: Candidate) -> Candidate:
        if candidate.run is not None:
            run = candidate.run
            return replace(candidate, run=lambda *arguments: wrong(run(*arguments)))
        set_up = candidate.setup
        assert set_up is not None

        def setup(setup: Setup) -> Execute:
            execute = set_up(setup)

            def execute_wrongly(arguments: Any, outputs: Any, workspace: Any) -> tuple[Tensor, ...]:
                return wrong(execute(arguments, outputs, workspace) or outputs)

            return execute_wrongly

        return replace(candidate, setup=setup)

    found = next(o for o in operators() if o.name == operator)
    candidates = tuple(map(spoilt, found.candidates()))
    monkeypatch.setattr(found, "candidates", lambda: candidates)


def swiglu(dtype: torch.dtype = torch.float32, rows: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    gate, up = (torch.randn(rows, 24, generator=generator).to(dtype) for _ in range(2))
    return gate, up


# --------------------------------------------------------------------------------------------- wrong kernels


@pytest.mark.kernels
def test_a_wrong_kernel_is_noticed_before_its_result_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    a_wrong_plan_is_noticed(monkeypatch, "triton")


def test_a_wrong_plan_in_pytorch_is_noticed_before_its_result_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    a_wrong_plan_is_noticed(monkeypatch, "eager")


def a_wrong_plan_is_noticed(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    gate, up = swiglu()
    with adjoint.prefer(backend=backend):
        right = adjoint.swiglu(gate, up)
        forget()
        spoil(monkeypatch, "swiglu")
        assert torch.equal(adjoint.swiglu(gate, up), right.mul(1.01)), "the check is off by default"
        chosen = adjoint.plan(adjoint.swiglu, gate, up)
        with adjoint.first_use_check():
            for attempt in (lambda: adjoint.swiglu(gate, up), lambda: chosen.run(gate, up), chosen.prepare):
                with pytest.raises(adjoint.WrongResult) as raised:
                    attempt()
                bound = chosen.guarantee["y"].error
                for word in ("swiglu", chosen.name, str(chosen.sku), "computes y wrongly", "limit 1", str(bound)):
                    assert word in str(raised.value)


@pytest.mark.kernels
@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_a_wrong_gradient_is_noticed_in_the_backward(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    gate, up = (x.requires_grad_() for x in swiglu())
    spoil(monkeypatch, "swiglu_backward")
    with adjoint.prefer(backend=backend), adjoint.first_use_check():
        y = adjoint.swiglu(gate, up)
        with pytest.raises(adjoint.WrongResult, match=r"swiglu_backward: the plan .* computes dgate wrongly"):
            y.sum().backward()
    assert gate.grad is None


def test_prepare_checks_the_adjoint_too(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "swiglu_backward", float("nan"))
    chosen = adjoint.plan(adjoint.swiglu, *swiglu())
    chosen.prepare()
    with adjoint.first_use_check(), pytest.raises(adjoint.WrongResult, match="swiglu_backward"):
        chosen.prepare()


# ---------------------------------------------------------------------------------------------- right kernels

_SUBJECTS = [subject for module in cases() for subject in module.SUBJECTS]
_ONE_OF_EACH_FUNCTION = list({subject.function: subject for subject in reversed(_SUBJECTS)}.values())


def uses_of(subject: Subject, dtype: torch.dtype, backend: str) -> None:
    """Runs both directions of a subject under the check."""
    source = torch.Generator().manual_seed(1)
    case = subject.cases[0]
    call = subject.bind(case.make(dtype, CPU, source))
    with torch.no_grad(), adjoint.first_use_check():
        outputs = forward(call, f"backend={backend}").run()
        upstream = tuple(case.upstream(output, source) for output in outputs[: call.public_outputs])
        backward(call, upstream, outputs, f"backend={backend}").run()


@pytest.mark.parametrize("subject", _SUBJECTS, ids=lambda subject: subject.name)
def test_right_plans_pass_whatever_the_op(subject: Subject, compared: list[Plan]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in subject.dtypes:
            uses_of(subject, dtype, "eager")
    assert len(compared) >= 2


@pytest.mark.kernels
@pytest.mark.parametrize("subject", _ONE_OF_EACH_FUNCTION, ids=lambda subject: subject.name)
def test_right_kernels_pass_whatever_the_op(subject: Subject, compared: list[Plan]) -> None:
    dtype = torch.float32 if torch.float32 in subject.dtypes else torch.bfloat16
    try:
        uses_of(subject, dtype, "triton")
    except adjoint.Unsupported as error:
        pytest.skip(f"no kernels: {str(error).splitlines()[0]}")
    assert len(compared) == 2 and all(plan.launches for plan in compared)


def test_a_call_is_checked_wherever_it_is_made(compared: list[Plan]) -> None:
    """Under autocast, in inference mode, and compiled; the caller's random numbers stay what they were."""
    x, weight = torch.randn(6, 32), torch.ones(32)
    adjoint.set_first_use_check(True)
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        adjoint.rms_norm(x, weight)
    assert [plan.operator.name for plan in compared] == ["rms_norm"]
    compiled = torch.compile(adjoint.silu, backend="aot_eager", fullgraph=True)
    y = compiled(x.requires_grad_())
    y.sum().backward()
    assert [plan.operator.name for plan in compared[1:]] == ["silu", "silu_backward"]
    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------------------------------- once, and when


def test_each_plan_is_checked_once(compared: list[Plan]) -> None:
    with adjoint.first_use_check():
        for rows in (5, 5, 9):
            adjoint.swiglu(*swiglu(rows=rows))
        assert len(compared) == 1
        adjoint.swiglu(*swiglu(torch.float16))
        assert len(compared) == 2
    with adjoint.first_use_check():
        adjoint.swiglu(*swiglu())
    assert len(compared) == 2


@pytest.mark.kernels
def test_another_variant_of_a_kernel_is_checked_anew(compared: list[Plan]) -> None:
    with adjoint.prefer(backend="triton"), adjoint.first_use_check():
        for columns in (16, 16, 48):
            adjoint.rms_norm(torch.ones(3, columns), torch.ones(columns))
    first, second = compared
    assert {x.variant for x in first.launches} != {x.variant for x in second.launches}


def test_a_failure_is_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "swiglu")
    with adjoint.first_use_check():
        for _ in range(2):
            with pytest.raises(adjoint.WrongResult):
                adjoint.swiglu(*swiglu())


def test_blocks_and_the_process_switch_it(compared: list[Plan]) -> None:
    def is_checked(call: Callable[..., Tensor] = adjoint.swiglu) -> bool:
        forget()
        before = len(compared)
        call(*swiglu())
        return len(compared) > before

    assert not is_checked()
    with adjoint.first_use_check():
        with adjoint.first_use_check():
            assert is_checked()
        assert is_checked(), "the outer block is still open"
    assert not is_checked()
    adjoint.set_first_use_check(True)
    with adjoint.first_use_check():
        pass
    assert is_checked(), "a block does not end what the process asked for"
    adjoint.set_first_use_check(False)
    assert not is_checked()
    with pytest.raises(ZeroDivisionError), adjoint.first_use_check():
        _ = 1 / 0
    assert not is_checked()


def test_of_two_threads_one_checks(compared: list[Plan]) -> None:
    arguments, results = swiglu(), []
    with adjoint.first_use_check():
        threads = [threading.Thread(target=lambda: results.append(adjoint.swiglu(*arguments))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(compared) == 1 and all(torch.equal(result, results[0]) for result in results) and len(results) == 4


def test_a_plan_without_a_case_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_answers, "cases", lambda: [])
    with adjoint.first_use_check():
        with pytest.warns(UserWarning, match=r"first-use check: <Plan of swiglu: .*> runs without it: no case"):
            adjoint.swiglu(*swiglu())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            adjoint.swiglu(*swiglu())


def test_nothing_is_checked_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch, compared: list[Plan]) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    recorded: Any = SimpleNamespace(problem=SimpleNamespace(device=torch.device("cuda", 0)), sku="toy", launches=[])
    with pytest.warns(UserWarning, match=r"recorded in a CUDA graph without it; call plan.prepare\(\)"):
        first_use.check(recorded)
    assert not compared


@pytest.mark.gpu
@pytest.mark.skipif(interpreting(), reason="on the GPU itself")
def test_a_prepared_plan_is_recorded_in_a_graph(compared: list[Plan]) -> None:
    gate, up = (x.cuda() for x in swiglu())
    plan = adjoint.plan(adjoint.swiglu, gate, up)
    with adjoint.first_use_check(), warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.prepare()
        checked, graph = len(compared), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = adjoint.swiglu(gate, up)
    graph.replay()
    assert checked == len(compared) == 2
    assert torch.equal(y, adjoint.swiglu(gate, up))
