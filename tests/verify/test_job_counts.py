"""No check disappears unseen: how many there are of every subject, and how many bad calls of every op.

Where checks are added, the number here goes up with them.
"""

from collections import Counter

import pytest

from adjoint.core import kernels
from adjoint.verify import jobs

CHECKS = {
    "carry": (22, 0),
    "cumulative_decay": (22, 0),
    "embedding": (54, 54),
    "embedding[padding]": (21, 21),
    "embedding_bag[max]": (22, 22),
    "embedding_bag[mean]": (22, 22),
    "embedding_bag[sum]": (38, 38),
    "gate": (22, 13),
    "gated_delta_rule": (38, 29),
    "gated_delta_rule[normalize_qk]": (22, 13),
    "gated_delta_step": (38, 38),
    "gated_delta_step[all states]": (22, 22),
    "gated_rms_norm": (38, 38),
    "gated_rms_norm[rounded]": (38, 38),
    "gram": (22, 0),
    "l2_norm": (38, 38),
    "moe.combine": (38, 38),
    "moe.combine[sum]": (13, 13),
    "moe.dispatch": (38, 38),
    "moe.experts": (38, 38),
    "moe.load_balancing_loss": (21, 21),
    "moe.route": (29, 29),
    "moe.route[not renormalized]": (13, 13),
    "moe.route[sigmoid]": (21, 21),
    "moe.z_loss": (21, 21),
    "normalize": (22, 13),
    "output": (22, 0),
    "recompute_w_u": (38, 29),
    "recompute_w_u[narrow T]": (13, 13),
    "rms_norm": (38, 38),
    "rms_norm[offset]": (38, 38),
    "rms_norm[residual]": (38, 38),
    "silu": (40, 40),
    "solve": (22, 0),
    "swiglu": (40, 40),
    "swiglu[gate_up]": (40, 40),
    "swiglu[interleaved]": (40, 40),
    "swiglu[up_gate]": (40, 40),
    "take_along_axis": (38, 54),
    "take_along_axis[axis=1]": (22, 22),
    "take_along_axis[distinct]": (22, 22),
}
"""Of every subject on a CPU: of plans in PyTorch, and of kernels, which the interpreter runs."""

BAD_CALLS = {
    "activation.silu": 15,
    "activation.swiglu": 27,
    "embedding.bag": 41,
    "embedding.embedding": 51,
    "gated_delta.rule": 69,
    "gated_delta.stages.chunks": 110,
    "gated_delta.stages.gate": 27,
    "gated_delta.stages.normalize": 12,
    "gated_delta.stages.w_u": 41,
    "gated_delta.step": 50,
    "indexing.take_along_axis": 47,
    "moe.combine": 37,
    "moe.dispatch": 28,
    "moe.experts": 52,
    "moe.losses": 39,
    "moe.route": 35,
    "norm.gated_rms_norm": 25,
    "norm.l2_norm": 14,
    "norm.rms_norm": 24,
}
"""The fewest calls that every op must refuse."""


@pytest.mark.kernels
@pytest.mark.skipif(not kernels.interpreting(), reason="on a CPU, kernels run in the interpreter")
def test_no_check_of_kernels_disappears() -> None:
    _hold_counts("triton", 1)


def test_no_check_disappears() -> None:
    _hold_counts("eager", 0)


def _hold_counts(backend: str, column: int) -> None:
    counts = Counter(job.op for job in jobs(None, "cpu") if job.backend == backend)
    expected = {op: numbers[column] for op, numbers in CHECKS.items() if numbers[column]}
    changed = {
        op: (counts[op], expected.get(op, 0)) for op in {*counts, *expected} if counts[op] != expected.get(op, 0)
    }
    assert not changed, f"checks of {backend} plans, as listed and as expected: {changed}"


def test_no_bad_call_disappears() -> None:
    counts = Counter(job.op for job in jobs(None, "cpu") if not job.backend)
    assert counts.keys() == BAD_CALLS.keys()
    fewer = {op: counts[op] for op, least in BAD_CALLS.items() if counts[op] < least}
    assert not fewer, f"calls that must be refused are gone: {fewer}"
