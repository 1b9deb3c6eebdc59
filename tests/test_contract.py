"""Every op on every backend goes through the same checks; a new family is covered by being registered."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.contract.cases import Case, Subject
from adjoint.core import kernels
from adjoint.core.op.operator import forget, operators
from adjoint.core.preference import Preference
from adjoint.core.problem import short
from adjoint.verify import Job, available_backends, jobs
from adjoint.verify.checks import bits, forms, framework, numerics
from adjoint.verify.listing.jobs import subjects
from adjoint.verify.run import Evaluation, evaluate
from tests.conftest import device_under_test

COVERED_ONCE = frozenset(
    (
        "repeats",
        "batch invariance",
        "device invariance",
        "upstream layouts",
        "schedules",
        "poison",
        "exhaustive",
        "arithmetic",
        "forms",
    )
)
"""Checks the interpreter runs for one dtype of each subject only, unless `--all`."""

LONGEST = frozenset(("upstream layouts", "recompilation", "repeats", "arithmetic"))
LONG = {
    "gated_delta_rule": LONGEST,
    "gated_delta_rule[normalize_qk]": LONGEST | {"compilation", "registration", "modes", "device invariance"},
}
"""Checks of what plans and operators have in common, by subjects whose calls take the interpreter seconds: shorter ones
run them; long ones with `--all`."""


def _parameters() -> list[object]:
    device = device_under_test()
    return [
        pytest.param(job, id=job.label, marks=[pytest.mark.kernels] if job.backend == "triton" else [])
        for job in jobs(None, device)
    ]


MOST = 200
_evaluations: dict[tuple[object, ...], tuple[Subject, Case, Evaluation]] = {}


def _evaluate_once(
    subject: Subject, case: Case, dtype: torch.dtype, device: torch.device, preference: Preference, seed: int = 0
) -> Evaluation:
    """What a case gives, for all checks that begin with it: those of repeats and layouts then run it again."""
    key = id(subject), id(case), dtype, device, preference, seed
    if key not in _evaluations:
        if len(_evaluations) >= MOST:
            _evaluations.clear()
        _evaluations[key] = subject, case, evaluate(subject, case, dtype, device, preference, seed)
    return _evaluations[key][2]


@pytest.fixture
def evaluations_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    for checks in (bits, numerics, forms, framework):
        monkeypatch.setattr(checks, "evaluate", _evaluate_once)


@pytest.mark.parametrize("job", _parameters())
def test_check(job: Job, everything: bool, evaluations_are_shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels.interpreting() and not everything:
        # What is traced is the same on every backend: the ordinary process compiles for both kinds of shapes, and runs
        # all of opcheck. What kernels write, and how it lies in memory, is their own.
        monkeypatch.setattr(framework, "DYNAMIC_SHAPES", (True,))
        monkeypatch.setattr(framework, "OPCHECKS", ("test_schema", "test_faketensor"))
        if job.backend != "triton":
            pytest.skip("the ordinary process runs this")
        if job.check in COVERED_ONCE and job.dtype != "bfloat16":
            pytest.skip("covered for bfloat16; all dtypes with --all")
        if job.check in LONG.get(job.op, ()):
            pytest.skip("seconds a call: shorter subjects run this; with --all")
        if job.check == "gradients":
            pytest.skip(
                "the ordinary process holds the reference to finite differences, and accuracy in float64 the kernels"
            )
    for row in job.run():
        assert row.passed, f"{job.label}: {row.measured}: {row.detail}"


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


CPU = torch.device("cpu")


def _evaluate(subject: Subject, dtype: torch.dtype) -> Evaluation:
    """The first case of a subject."""
    return evaluate(subject, subject.cases[0], dtype, CPU, Preference())


@pytest.mark.parametrize(
    ("subject", "dtype"),
    [
        pytest.param(subject, dtype, id=f"{subject.name} {short(dtype)}")
        for subject in subjects()
        for dtype in subject.dtypes
    ],
)
def test_every_op_runs_where_torch_asks_for_deterministic_algorithms(
    subject: Subject, dtype: torch.dtype, deterministic: None
) -> None:
    """Both directions have a plan, every output of it promises to be repeatable, and two calls agree."""
    if kernels.interpreting() and dtype != torch.float32:
        pytest.skip("the interpreter runs one dtype; the ordinary process all")
    first = _evaluate(subject, dtype)
    assert first.plan.preference == "repeatable"
    assert first.plan.adjoint is not None
    for plan in (first.plan, first.plan.adjoint):
        assert [name for name, promise in plan.guarantee.items() if not promise.repeatable] == []
    for result, again in zip(first.results, _evaluate(subject, dtype).results, strict=True):
        assert torch.equal(result.nan_to_num(), again.nan_to_num())


def _step_in_place(x: Tensor) -> Tensor:
    token = x.detach()[None, :, None]
    state = torch.ones(1, 1, 4, 4)
    gates = token.new_zeros(1, 3, 1)
    return adjoint.gated_delta_step(token, token, token, gates, gates + 0.5, state, in_place=True)[1]


def _rotary_in_place(x: Tensor) -> Tensor:
    table = torch.ones(3, 4)
    return adjoint.rotary(x.detach().clone()[None, :, None], None, table, table, in_place=True)[0]


IDS = torch.tensor([2, 0, 2])

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_backward_reuse": lambda x: adjoint.silu(x * 1, reuse_inputs=True),
    "swiglu_backward_reuse": lambda x: adjoint.swiglu(x * 1, x * 2, reuse_inputs=True),
    "swiglu_packed_backward_reuse": lambda x: adjoint.swiglu(x * 1, reuse_inputs=True),
    "sigmoid_gate_backward_reuse": lambda x: adjoint.sigmoid_gate(x * 1, x * 2, reuse_inputs=True),
    "embedding_backward_into": lambda x: adjoint.embedding(IDS, x, accumulate_into=torch.zeros_like(x)),
    "embedding_backward_sparse": lambda x: adjoint.embedding(IDS, x, sparse=True),
    "gated_delta_step_in_place": _step_in_place,
    "rotary_in_place": _rotary_in_place,
}
"""Operators that no subject calls, by what calls them on a [3, 4] tensor."""


@pytest.mark.parametrize("operator", FORMS)
def test_every_other_operator_has_a_repeatable_plan(operator: str, deterministic: None) -> None:
    (called,) = [one for one in operators() if one.name == operator]
    forget()
    x = torch.arange(12.0).view(3, 4).mul_(0.1).requires_grad_()
    y = FORMS[operator](x)
    if y.requires_grad:
        y.sum().backward()
    (plan,) = called.plans.values()
    assert plan.preference == "repeatable"
    assert all(promise.repeatable for promise in plan.guarantee.values())


@pytest.mark.kernels
def test_both_backends_are_covered(device: torch.device) -> None:
    assert available_backends(device) == ["triton", "eager"]


def test_jobs_name_unknown_ops() -> None:
    with pytest.raises(ValueError, match=r"unknown op 'nonsense'; families are activation, .*; ops are .*silu"):
        jobs(["nonsense"])


def test_a_mode_can_be_named() -> None:
    assert {job.op for job in jobs(["swiglu[gate_up]"])} == {"swiglu[gate_up]", "activation.swiglu"}
