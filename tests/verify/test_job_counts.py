"""No check disappears unseen: how many there are of every subject, and how many bad calls of every op.

Where checks are added, the number here goes up with them.
"""

from collections import Counter

import pytest

from adjoint.core import kernels
from adjoint.verify import jobs

CHECKS = {
    "carry": (23, 0),
    "causal_conv1d": (40, 40),
    "causal_conv1d[2 parts]": (14, 14),
    "causal_conv1d[4 parts]": (14, 14),
    "causal_conv1d[split]": (40, 40),
    "causal_conv1d[states]": (40, 40),
    "causal_conv1d_step": (44, 44),
    "cross_entropy": (44, 34),
    "cross_entropy[none, shift, log-probabilities]": (44, 34),
    "cross_entropy[sum, smoothing, z_loss, softcap]": (44, 34),
    "cumulative_decay": (23, 0),
    "cumulative_decay[resets, bfloat16]": (14, 0),
    "cumulative_decay[resets, float64]": (14, 0),
    "embedding": (74, 74),
    "embedding[padding]": (24, 24),
    "embedding_bag[max]": (23, 23),
    "embedding_bag[mean]": (23, 23),
    "embedding_bag[sum]": (40, 40),
    "gate": (23, 14),
    "gated_delta_rule": (40, 31),
    "gated_delta_rule[normalize_qk]": (23, 14),
    "gated_delta_step": (44, 44),
    "gated_delta_step[all states]": (25, 25),
    "gated_rms_norm": (40, 40),
    "gated_rms_norm[rounded]": (40, 40),
    "gram": (23, 0),
    "l2_norm": (40, 40),
    "linear_cross_entropy": (40, 51),
    "linear_cross_entropy[none, shift, log-probabilities]": (40, 51),
    "linear_cross_entropy[sum, smoothing, z_loss, softcap]": (40, 51),
    "moe.combine": (40, 40),
    "moe.combine[sum]": (14, 14),
    "moe.dispatch": (40, 40),
    "moe.experts": (47, 40),
    "moe.load_balancing_loss": (31, 22),
    "moe.route": (31, 31),
    "moe.route[float64, not renormalized]": (14, 0),
    "moe.route[float64, sigmoid]": (14, 0),
    "moe.route[float64]": (14, 0),
    "moe.route[groups]": (22, 22),
    "moe.route[not renormalized]": (14, 14),
    "moe.route[sigmoid]": (22, 22),
    "moe.z_loss": (32, 23),
    "normalize": (23, 14),
    "output": (23, 0),
    "recompute_w_u": (40, 31),
    "recompute_w_u[narrow T]": (14, 14),
    "rms_norm": (40, 40),
    "rms_norm[offset]": (40, 40),
    "rms_norm[residual]": (40, 40),
    "rotary": (44, 44),
    "rotary[interleaved]": (44, 44),
    "rotary[whole heads]": (44, 44),
    "sigmoid_gate": (76, 46),
    "silu": (76, 46),
    "solve": (22, 0),
    "swiglu": (76, 46),
    "swiglu[gate_up]": (76, 46),
    "swiglu[interleaved]": (76, 46),
    "swiglu[up_gate]": (76, 46),
    "take_along_axis": (40, 66),
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
