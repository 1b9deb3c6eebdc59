"""The quick set: it leaves out no op, plan or promise that the thorough one checks, and no kernel on Hopper."""

from collections.abc import Sequence

import pytest
import torch

from adjoint.contract.undrawn import Undrawn, undrawn
from adjoint.core import kernels
from adjoint.core.plan import Plan, select
from adjoint.core.preference import resolve
from adjoint.verify import jobs
from adjoint.verify.checks.digests import digest
from adjoint.verify.listing import depth
from adjoint.verify.listing.coverage import checked
from adjoint.verify.listing.jobs import Job, subjects
from adjoint.verify.run import generator
from tests.verify.listing.test_coverage import RULE, hopper  # noqa: F401

CPU = torch.device("cpu")


def checks_of(ops: Sequence[str] | None, device: torch.device) -> list[Job]:
    by_name = {subject.name: subject for subject in subjects(ops)}
    chosen = depth.stops(ops, device)
    return [check for stop in chosen for check in depth.checks_at(stop, by_name[stop.subject], device)]


@pytest.mark.skipif(kernels.interpreting(), reason="the ordinary process does")
def test_every_promise_is_held_at_some_stop() -> None:
    quick, thorough = checks_of(None, CPU), jobs(None, CPU)
    assert not checked(thorough, CPU) - checked(quick, CPU)
    assert {job.op for job in thorough if job.backend} == {check.op for check in quick}
    assert {job.op for job in thorough if not job.backend} == {
        job.op for job in depth.jobs_at((), None, CPU)
    }  # calls to refuse
    promise_checks = {"accuracy", "repeats", "batch invariance", "device invariance", "arithmetic", "special values"}
    assert {check.check for check in quick} >= promise_checks | {"poison", "forms", "upstream layouts", "digest"}


@pytest.mark.kernels
@pytest.mark.skipif(not kernels.interpreting(), reason="where kernels run on a CPU")
def test_every_promise_of_kernels_is_held_at_some_stop() -> None:
    ops = ["silu", "embedding", "moe.dispatch", "gated_delta_step", "rms_norm"]
    assert not checked(jobs(ops, CPU), CPU) - checked(checks_of(ops, CPU), CPU)


def _plans(stop: depth.Stop, device: torch.device) -> list[Plan]:
    (subject,) = (subject for subject in subjects() if subject.name == stop.subject)
    (case,) = (case for case in subject.cases if case.name == stop.case)
    call = subject.bind(undrawn(case, stop.dtype))
    return [select(operator, problem, resolve(stop.preference)) for operator, problem in call.problems(device)]


@pytest.mark.skipif(kernels.interpreting(), reason="no interpreter pretends to be a GPU")
def test_hopper_plans_run_at_sizes_where_they_are_chosen(hopper: torch.device) -> None:  # noqa: F811
    chosen = depth.stops([RULE], hopper)
    free = [stop for stop in chosen if stop.preference.plan is None]
    fused = [plan for stop in free for plan in _plans(stop, hopper) if plan.name == "gluon.fused"]
    assert {plan.operator.name for plan in fused} == {RULE, f"{RULE}_backward"}
    listed = {
        launch.kernel.name
        for subject in subjects([RULE])
        for case in subject.cases
        for operator, problem in subject.bind(undrawn(case, torch.bfloat16)).problems(hopper)
        for launch in select(operator, problem, "backend=triton").launches
    }
    ran = {launch.kernel.name for stop in chosen for plan in _plans(stop, hopper) for launch in plan.launches}
    assert ran >= listed and len(listed) > 5
    quick = checked([c for c in checks_of([RULE], hopper) if c.check != "digest"], hopper)
    assert not checked(jobs([RULE], hopper), hopper) - quick


def test_cases_that_cost_little_come_first() -> None:
    (stop, *_) = depth.stops(["take_along_axis"], CPU)
    (subject,) = (s for s in subjects(["take_along_axis"]) if s.name == "take_along_axis")
    sizes = {
        case.name: sum(x.numel() for x in undrawn(case, stop.dtype) if x is not None)
        for case in subject.cases
        if not case.heavy
    }
    assert 0 < sizes[stop.case] <= depth.ENOUGH
    assert sizes[stop.case] == max(size for size in sizes.values() if size <= depth.ENOUGH)
    assert stop.is_first and stop.dtype == torch.bfloat16


def test_a_digest_tells_bits_shapes_and_dtypes_apart() -> None:
    x = torch.tensor([0.0, 1.0, torch.nan])
    assert digest(x) == digest(x.clone()) != digest(-x)
    assert digest(x[:2]) != digest(torch.tensor([-0.0, 1.0]))
    assert digest(x) != digest(x[None]) and digest(x) != digest(x.double()) and digest(x, None) != digest(x)
    payload = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest(payload) == digest(x[2:])
    assert digest(x[::2]) == digest(x[::2].contiguous())


def test_inputs_that_are_not_drawn_have_the_sizes_of_those_that_are() -> None:
    for subject in subjects():
        dtype = subject.dtypes[-1]
        for case in (case for case in subject.cases if not case.heavy):
            drawn = case.make(dtype, CPU, generator())
            constant = undrawn(case, dtype)
            facts = [
                [None if x is None else (x.shape, x.dtype, x.stride()) for x in both] for both in (drawn, constant)
            ]
            assert facts[0] == facts[1], case.name
    with Undrawn():
        assert torch.equal(torch.randn(2, 3), torch.full((2, 3), 0.5))
    assert torch.randn(2, 3).unique().numel() > 1
