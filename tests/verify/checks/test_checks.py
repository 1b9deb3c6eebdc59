"""The shared checks on an op with integer, shared and optional inputs; and that each notices what it is for."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from adjoint.core.op.operator import operators
from adjoint.core.preference import Preference
from adjoint.ops.activation.silu.cases import SILU
from adjoint.verify import Job, Row, jobs
from adjoint.verify.checks import bits as checks
from adjoint.verify.listing import jobs as listing
from tests.lookup import LOOKUP

CPU = torch.device("cpu")
EAGER = Preference(backend="eager")


@pytest.fixture
def lookup_jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    family = SimpleNamespace(__name__="tests.lookup.cases", SUBJECTS=(LOOKUP,), BAD_CALLS=())
    monkeypatch.setattr(listing, "cases", lambda: [family])
    return [job for job in jobs(None, CPU) if job.backend == "eager"]


def test_every_check_passes_on_an_op_that_is_right(lookup_jobs: list[Job]) -> None:
    rows = [row for job in lookup_jobs for row in job.run()]
    assert not [f"{row.check}: {row.detail}" for row in rows if not row.passed]
    assert {"accuracy", "gradients", "repeats", "batch invariance", "device invariance", "upstream layouts"} <= {
        row.check for row in rows
    }
    assert {"poison", "opcheck", "compile (aot_eager)", "modes and threads", "no recompilation"} <= {
        row.check for row in rows
    }


INVARIANCES = ("batch invariance", "device invariance")


def test_named_plans_have_jobs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = replace(LOOKUP, plans=("eager.other_bits+eager", "cuda.fast+eager"))
    family = SimpleNamespace(__name__="tests.lookup.cases", SUBJECTS=(subject,), BAD_CALLS=())
    monkeypatch.setattr(listing, "cases", lambda: [family])
    listed = {job.label: job for job in jobs(None, CPU)}
    assert {label for label in listed if "float32 eager.other_bits" in label} == {
        f"lookup float32 eager.other_bits+eager: {check}"
        for check in ("accuracy", "special values", "repeats", "poison", "arithmetic", *INVARIANCES)
    }
    assert not [label for label in listed if "cuda.fast" in label], "its backend is not here"
    (row,) = listed["lookup float32 eager.other_bits+eager: repeats"].run()
    assert row.passed and row.plan == "eager + eager.other_bits"


WRONG: dict[str, tuple[Callable[..., list[Row]], str, str]] = {
    "other bits than on the CPU": (checks.devices, "triton.elsewhere+eager", "result 1 differs"),
    "an output that is not public is not written": (checks.poison, "eager.unwritten+eager", "result 1 differs"),
    "bits depend on the batch": (checks.invariance, "eager.batch+eager", "the first alone"),
    "a schedule of the adjoint alone changes bits": (checks.schedules, "eager.schedule+eager", "block=2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_broken_promise_is_noticed(name: str) -> None:
    check, plan, words = WRONG[name]
    (row,) = check(LOOKUP, torch.float32, CPU, Preference(plan=plan))
    assert not row.passed and words in row.detail
    assert all(right.passed for right in check(LOOKUP, torch.float32, CPU, EAGER))


def test_what_is_not_promised_is_not_checked() -> None:
    assert checks.devices(SILU, torch.float32, CPU, EAGER) == []
    assert checks.schedules(LOOKUP, torch.float32, CPU, EAGER) == []


def test_a_shared_input_needs_a_statement_about_batches() -> None:
    with pytest.raises(NotImplementedError, match="lookup: not every input has the batch axis"):
        checks.invariance(replace(LOOKUP, rebatched=None), torch.float32, CPU, EAGER)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32])
def test_bits_of_every_type_are_compared(dtype: torch.dtype) -> None:
    ones, zeros = torch.ones(3).to(dtype), torch.zeros(3).to(dtype)
    assert checks.same_bits(ones, ones.clone()) and not checks.same_bits(ones, zeros)
    assert not checks.same_bits(ones, ones.double()) and not checks.same_bits(ones, ones[:2])


def test_a_backend_without_a_plan_has_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "available_backends", lambda device: ["triton", "eager", "nonsense"])
    backends = {job.backend for job in listing.jobs(["swiglu"])}
    assert backends == {"triton", "eager", ""}


def test_a_dtype_without_a_kernel_has_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that refuses float64 is not asked for it; the other dtypes are checked as ever."""
    monkeypatch.setattr(listing, "available_backends", lambda device: ["triton"])
    (operator,) = (o for o in operators() if o.name == "silu")
    narrow = replace(operator.candidates()[0], refuse=lambda problem: "no" * (problem.dtypes[0] == torch.float64))
    monkeypatch.setattr(operator, "candidates", lambda: (narrow,))
    dtypes = {job.dtype for job in listing.jobs(["silu"]) if job.backend}
    assert dtypes == {"float32", "bfloat16", "float16"}


@pytest.mark.parametrize(
    ("a", "b", "are_same"),
    [
        ([1.0, float("nan")], [1.0, float("nan")], True),
        ([float("nan")], [0.0], False),
        ([0.0], [float("nan")], False),
        ([0.0], [-0.0], False),
        ([1.0], [1.0 + 2.0**-23], False),
        ([1.0], [1.0, 1.0], False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bits_are_the_same_or_not(dtype: torch.dtype, a: list[float], b: list[float], are_same: bool) -> None:
    left, right = (torch.tensor(values, dtype=dtype) for values in (a, b))
    assert checks.same_bits(left, right) is are_same
    assert not checks.same_bits(left, right.bfloat16())
