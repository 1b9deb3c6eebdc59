"""Every op on every backend goes through the same checks; a new family is covered by being registered."""

import pytest
import torch

from adjoint.core import kernels
from adjoint.verify import Job, available_backends, jobs
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


@pytest.mark.parametrize("job", _parameters())
def test_check(job: Job, everything: bool) -> None:
    if kernels.interpreting() and not everything:
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


@pytest.mark.kernels
def test_both_backends_are_covered(device: torch.device) -> None:
    assert available_backends(device) == ["triton", "eager"]


def test_jobs_name_unknown_ops() -> None:
    with pytest.raises(ValueError, match=r"unknown op nonsense; ops are .*silu"):
        jobs(["nonsense"])


def test_a_mode_can_be_named() -> None:
    assert {job.op for job in jobs(["swiglu[gate_up]"])} == {"swiglu[gate_up]", "activation.swiglu"}
