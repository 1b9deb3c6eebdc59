"""No check disappears unseen: how many there are of every subject, and how many bad calls of every op.

Where checks are added, the number here goes up with them.
"""

from collections import Counter

import pytest

from adjoint.core import kernels
from adjoint.verify import jobs

CHECKS = {
    "carry": (23, 0),
    "causal_conv1d": (41, 41),
    "causal_conv1d[2 parts]": (14, 14),
    "causal_conv1d[4 parts]": (14, 14),
    "causal_conv1d[split]": (41, 41),
    "causal_conv1d[states]": (41, 41),
    "causal_conv1d_step": (45, 45),
    "cross_entropy": (45, 35),
    "cross_entropy[none, shift, log-probabilities]": (45, 35),
    "cross_entropy[sum, smoothing, z_loss, softcap]": (45, 35),
    "cumulative_decay": (23, 0),
    "cumulative_decay[resets, bfloat16]": (14, 0),
    "cumulative_decay[resets, float64]": (14, 0),
    "embedding": (76, 76),
    "embedding[padding]": (25, 25),
    "embedding_bag[max]": (23, 23),
    "embedding_bag[mean]": (23, 23),
    "embedding_bag[sum]": (41, 41),
    "gate": (23, 14),
    "gated_delta_rule": (41, 32),
    "gated_delta_rule[normalize_qk]": (23, 14),
    "gated_delta_step": (45, 45),
    "gated_delta_step[all states]": (25, 25),
    "gated_rms_norm": (41, 41),
    "gated_rms_norm[rounded]": (41, 41),
    "gram": (23, 0),
    "l2_norm": (41, 41),
    "linear_cross_entropy": (41, 53),
    "linear_cross_entropy[none, shift, log-probabilities]": (41, 53),
    "linear_cross_entropy[sum, smoothing, z_loss, softcap]": (41, 53),
    "moe.combine": (41, 41),
    "moe.combine[sum]": (14, 14),
    "moe.dispatch": (41, 41),
    "moe.experts": (48, 41),
    "moe.load_balancing_loss": (32, 23),
    "moe.route": (32, 32),
    "moe.route[float64, not renormalized]": (14, 0),
    "moe.route[float64, sigmoid]": (14, 0),
    "moe.route[float64]": (14, 0),
    "moe.route[groups]": (23, 23),
    "moe.route[not renormalized]": (14, 14),
    "moe.route[sigmoid]": (23, 23),
    "moe.z_loss": (32, 23),
    "normalize": (23, 14),
    "output": (23, 0),
    "recompute_w_u": (41, 32),
    "recompute_w_u[narrow T]": (14, 14),
    "rms_norm": (41, 41),
    "rms_norm[offset]": (41, 41),
    "rms_norm[residual]": (41, 41),
    "rotary": (45, 45),
    "rotary[interleaved]": (45, 45),
    "rotary[whole heads]": (45, 45),
    "sigmoid_gate": (78, 47),
    "silu": (78, 47),
    "solve": (23, 0),
    "swiglu": (78, 47),
    "swiglu[gate_up]": (78, 47),
    "swiglu[interleaved]": (78, 47),
    "swiglu[up_gate]": (78, 47),
    "take_along_axis": (41, 68),
    "take_along_axis[axis=1]": (23, 23),
    "take_along_axis[distinct]": (23, 23),
}
"""Of every subject on a CPU: of plans in PyTorch, and of kernels, which the interpreter runs."""

BAD_CALLS = {
    "activation.sigmoid_gate": 23,
    "activation.silu": 15,
    "activation.swiglu": 27,
    "conv.causal_conv1d": 52,
    "conv.causal_conv1d_step": 40,
    "embedding.bag": 41,
    "embedding.embedding": 51,
    "gated_delta.rule": 74,
    "gated_delta.stages.chunks": 110,
    "gated_delta.stages.gate": 27,
    "gated_delta.stages.normalize": 12,
    "gated_delta.stages.w_u": 41,
    "gated_delta.step": 53,
    "indexing.take_along_axis": 47,
    "loss.cross_entropy": 37,
    "loss.linear_cross_entropy": 41,
    "moe.combine": 37,
    "moe.dispatch": 28,
    "moe.experts": 52,
    "moe.losses": 48,
    "moe.route": 36,
    "norm.gated_rms_norm": 25,
    "norm.l2_norm": 14,
    "norm.rms_norm": 24,
    "rotary.rotary": 58,
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
