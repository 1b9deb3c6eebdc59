"""Triton kernels of the losses over rows of logits, and what launches them.

A program has one row. Its columns lie across LANES lanes, 2^LANE_LEVELS of them: lane l sees columns l, l + LANES, … in
order, UNROLL of them at a time, and keeps the largest it has seen and Σ e^(z − largest). At the end the lanes' sums are
added by halves. Every addition takes two numbers, so the number of columns alone fixes the order: neither the layout of
threads nor the alignment of a row can change a bit.

With L = logsumexp(z), p = e^(z − L), y the label, ε the smoothing, λ the weight of z_loss, and upstream gradients g of
the loss and h of the label's log-probability:

    loss = (1 − ε)·(L − z_y) + ε·(L − mean z) + λ·L²        log-probability = z_y − L
    dz = (g·(1 + 2·λ·L) − h)·p + (h − g·(1 − ε))·1_y − g·ε/V,     dx = dz·(1 − (z/softcap)²)
"""

# ruff: noqa: RUF005  (Triton joins tuples with +, and knows no unpacking)

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import check, status_word
from adjoint.core.kernels import Budget, Float32, Int32, Int64, Int64If16, Pointer, PointerIf16, kernel
from adjoint.core.launch import Setup
from adjoint.core.layout import Rows
from adjoint.core.workspace import Memory
from adjoint.device.faults import record
from adjoint.device.row_tiles import halves
from adjoint.ops.loss.arguments import LABEL_OUT_OF_RANGE, Loss
from adjoint.ops.loss.plans import SUM_LEVELS, UNROLL, lane_levels

_SMALL = Budget(registers=96, shared_bytes=16_384)
_ROW = Budget(registers=128, shared_bytes=65_536)

COUNT_BLOCK = 1024
"""Counts that `loss_count` adds at once."""


# --------------------------------------------------------------------------------------------- labels


@kernel(budget=_SMALL, schedule=("BLOCK",))
@triton.jit
def loss_targets(
    labels: Pointer.index, targets: Pointer.int32, counts: Pointer.int32, status_word: Pointer.int64, fault: Int32,
    tokens: Int64, time: Int64, classes: Int32, ignore_index: Int64, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The class of each token, −1 where it does not count, and how many of a block's tokens do.

    SHIFT: a token's class is the next one's label, and the last of a sequence has none.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    place = token
    if SHIFT:
        inside = inside & (token % time != time - 1)
        place = token + 1
    label = tl.load(labels + place, inside, other=0).to(tl.int64)
    counted = inside & (label != ignore_index)
    wrong = counted & ((label < 0) | (label >= classes))
    record(status_word, fault, place, label, wrong)
    counted = counted & (wrong == 0)
    tl.store(targets + token, tl.where(counted, label, -1).to(tl.int32), token < tokens)
    tl.store(counts + tl.program_id(0), tl.sum(counted.to(tl.int32), 0))


@kernel(budget=_SMALL, schedule=("BLOCK",))
@triton.jit
def loss_count(counts: Pointer.int32, count: Pointer.float32, blocks: Int32, BLOCK: tl.constexpr):
    """The number of tokens that count, at least 1."""
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        total += tl.load(counts + block, block < blocks, other=0)
    number = tl.maximum(tl.sum(total, 0), 1)
    tl.store(count, number.to(tl.float32))


@kernel(budget=_SMALL, numeric=("SUM_LEVELS",))
@triton.jit
def loss_total(
    losses: Pointer.float32, count: Pointer.float32, loss: Pointer.float32, tokens: Int64,
    MEAN: tl.constexpr, SUM_LEVELS: tl.constexpr,
):  # fmt: skip
    """The sum of all tokens' losses, or their mean: token t is added in lane t mod 2^SUM_LEVELS, lanes by halves."""
    LANES: tl.constexpr = 2**SUM_LEVELS
    total = tl.zeros([LANES], tl.float32)
    for start in range(0, tokens, LANES):
        token = start + tl.arange(0, LANES)
        total += tl.load(losses + token, token < tokens, other=0.0)
    sums = tl.reshape(halves(total, 1, SUM_LEVELS, 1), (1,))
    if MEAN:
        sums = sums / tl.load(count)
    tl.store(loss + tl.arange(0, 1), sums)


# ------------------------------------------------------------------------------------------ logits


@triton.jit
def row_start(row, inner, outer, step):
    """Where a row begins: see `adjoint.core.layout.Rows`."""
    return (row // inner).to(tl.int64) * outer + (row % inner).to(tl.int64) * step


@triton.jit
def cap(x, softcap, SOFTCAP: tl.constexpr):
    """z = softcap·tanh(x / softcap) and dz/dx; x and 1 without a cap. With t = e^(−2·|x| / softcap), tanh is
    (1 − t) / (1 + t), and its slope 4·t / (1 + t)²."""
    if SOFTCAP:
        t = tl.exp(tl.abs(x) * (-2.0 / softcap))
        z = softcap * ((1.0 - t) / (1.0 + t))
        return tl.where(x < 0, -z, z), 4.0 * t / ((1.0 + t) * (1.0 + t))
    else:
        return x, 1.0


@triton.jit
def load_logits(
    logits, bias, column, classes, softcap, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
    EVICTED: tl.constexpr,
):  # fmt: skip
    """z and dz/dx of some columns of a row; past the last column z is −∞. MASKED: some may be past it.

    EVICTED: when the L2 cache may forget what is read: a row is read twice, and the second time should find it there.
    """
    if MASKED:
        x = tl.load(logits + column, column < classes, other=0, eviction_policy=EVICTED).to(tl.float32)
    else:
        x = tl.load(logits + column, eviction_policy=EVICTED).to(tl.float32)
    if HAS_BIAS:
        if MASKED:
            x += tl.load(bias + column, column < classes, other=0).to(tl.float32)
        else:
            x += tl.load(bias + column).to(tl.float32)
    z, slope = cap(x, softcap, SOFTCAP)
    if MASKED:
        z = tl.where(column < classes, z, float("-inf"))
    return z, slope


@triton.jit
def add_columns(
    largest, total, sum_z, logits, bias, start, classes, softcap, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr, MASKED: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Each lane's largest z, Σ e^(z − largest) and (SMOOTHING) Σ z, with the next UNROLL columns of it."""
    values = ()
    new_largest = largest
    for step in tl.static_range(UNROLL):
        column = start + step * LANES + tl.arange(0, LANES)
        z, _ = load_logits(logits, bias, column, classes, softcap, HAS_BIAS, SOFTCAP, MASKED, "evict_last")
        new_largest = tl.maximum(new_largest, z)
        if SMOOTHING:
            sum_z += tl.where(column < classes, z, 0.0) if MASKED else z
        values = values + (z,)
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    total = total * tl.exp(largest - shift)
    for step in tl.static_range(UNROLL):
        total += tl.exp(values[step] - shift)
    return new_largest, total, sum_z


@triton.jit
def store_slopes(
    gradient, logits, bias, start, classes, softcap, size, target, of_p, of_label, of_all, HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The gradient of UNROLL columns of each lane: of_p·p + of_label·1_y + of_all, times dz/dx."""
    for step in tl.static_range(UNROLL):
        column = start + step * LANES + tl.arange(0, LANES)
        z, slope = load_logits(logits, bias, column, classes, softcap, HAS_BIAS, SOFTCAP, MASKED, "evict_first")
        value = of_p * tl.exp(z - size) + (tl.where(column == target, of_label, 0.0) + of_all)
        value = (value * slope).to(gradient.dtype.element_ty)
        if MASKED:
            tl.store(gradient + column, value, column < classes, eviction_policy="evict_first")
        else:
            tl.store(gradient + column, value, eviction_policy="evict_first")


@triton.jit
def store_zeros(gradient, classes, LANES: tl.constexpr):
    """A row without a gradient."""
    for start in range(0, classes, LANES):
        column = start + tl.arange(0, LANES)
        tl.store(gradient + column, tl.zeros([LANES], gradient.dtype.element_ty), column < classes)


@triton.jit
def results_of(top, log_total, chosen, sum_z, smoothing, z_weight, classes, SMOOTHING: tl.constexpr):
    """A row's loss, its label's log-probability and L = top + log_total, of which no large parts are subtracted."""
    size = top + log_total
    log_probability = (chosen - top) - log_total
    loss = -log_probability
    if SMOOTHING:
        loss = (1.0 - smoothing) * loss + smoothing * ((top - sum_z / classes) + log_total)
    # Past 10¹⁸ the square may overflow where its product with z_weight, which may be 0, does not.
    square = tl.where(tl.abs(size) < 1e18, z_weight * (size * size), (z_weight * size) * size)
    return loss + square, log_probability, size


@kernel(budget=_ROW, numeric=("LANE_LEVELS", "UNROLL"))
@triton.jit
def loss_rows(
    logits: PointerIf16.element, bias: PointerIf16.element, targets: Pointer.int32, count: Pointer.float32,
    losses: Pointer.float32, log_probabilities: Pointer.float32, sizes: Pointer.float32, gradient: PointerIf16.element,
    classes: Int32, inner: Int32, outer: Int64If16, step: Int64If16, gradient_outer: Int64If16,
    gradient_step: Int64If16,
    smoothing: Float32, z_weight: Float32, softcap: Float32,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, GRADIENT: tl.constexpr, MEAN: tl.constexpr,
    LANE_LEVELS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The loss, the label's log-probability and L of a row; 0 where it does not count.

    GRADIENT: also the row's gradient, for an upstream gradient of 1, divided by `count` where MEAN; it may be written
    over the logits. Columns are then read in the other order, beginning with those that are still in cache.
    """
    LANES: tl.constexpr = 2**LANE_LEVELS
    STRIDE: tl.constexpr = LANES * UNROLL
    row = tl.program_id(0)
    logits += row_start(row, inner, outer, step)
    gradient += row_start(row, inner, gradient_outer, gradient_step)
    target = tl.load(targets + row)
    if target < 0:
        tl.store(losses + row, 0.0)
        tl.store(log_probabilities + row, 0.0)
        tl.store(sizes + row, 0.0)
        if GRADIENT:
            store_zeros(gradient, classes, LANES)
        return
    largest = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    sum_z = tl.zeros([LANES], tl.float32)
    whole = classes // STRIDE
    for stride in range(0, whole):
        largest, total, sum_z = add_columns(
            largest, total, sum_z, logits, bias, stride * STRIDE, classes, softcap, HAS_BIAS, SOFTCAP, SMOOTHING,
            False, LANES, UNROLL,
        )  # fmt: skip
    if whole * STRIDE < classes:
        largest, total, sum_z = add_columns(
            largest, total, sum_z, logits, bias, whole * STRIDE, classes, softcap, HAS_BIAS, SOFTCAP, SMOOTHING,
            True, LANES, UNROLL,
        )  # fmt: skip
    top = tl.max(largest, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.max(halves(total * tl.exp(largest - shift), 1, LANE_LEVELS, 1))
    sum_z = tl.max(halves(sum_z, 1, LANE_LEVELS, 1)) if SMOOTHING else 0.0
    chosen, _ = load_logits(logits, bias, target, classes, softcap, HAS_BIAS, SOFTCAP, False, "")
    loss, log_probability, size = results_of(
        shift, tl.log(total), chosen, sum_z, smoothing, z_weight, classes, SMOOTHING
    )
    tl.store(losses + row, loss)
    tl.store(log_probabilities + row, log_probability)
    tl.store(sizes + row, size)
    if GRADIENT:
        tl.debug_barrier()  # the label's logit is read before it is written over, and L written before it is read
        size, of_p, of_label, of_all = coefficients(
            row, losses, losses, count, sizes, count, smoothing, z_weight, classes, "unit", False, MEAN, False
        )
        if whole * STRIDE < classes:
            store_slopes(
                gradient, logits, bias, whole * STRIDE, classes, softcap, size, target, of_p, of_label, of_all,
                HAS_BIAS, SOFTCAP, True, LANES, UNROLL,
            )  # fmt: skip
        for stride in range(0, whole):
            store_slopes(
                gradient, logits, bias, (whole - 1 - stride) * STRIDE, classes, softcap, size, target, of_p, of_label,
                of_all, HAS_BIAS, SOFTCAP, False, LANES, UNROLL,
            )  # fmt: skip


@triton.jit
def coefficients(
    token, dloss, dlog_probabilities, count, sizes, scale, smoothing, z_weight, classes,
    LOSS: tl.constexpr, HAS_LOG: tl.constexpr, MEAN: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """What a token's gradient is made of: L, and the factors of p, of the label and of all columns.

    LOSS: the upstream gradient of the loss is "absent", 1 ("unit"), a number ("total") or one for each token ("token").
    SCALED: divided by `scale`, the largest of all upstream gradients: what is then stored in 16 bits does not overflow.
    """
    size = tl.load(sizes + token)
    g = tl.zeros_like(size)
    h = tl.zeros_like(size)
    if LOSS == "unit":
        g += 1.0
    elif LOSS == "total":
        g += tl.load(dloss)
    elif LOSS == "token":
        g = tl.load(dloss + token)
    if HAS_LOG:
        h = tl.load(dlog_probabilities + token)
    if MEAN:
        g = g / tl.load(count)
    if SCALED:
        g = g / tl.load(scale)
        h = h / tl.load(scale)
    of_p = g * (1.0 + 2.0 * z_weight * size) - h
    return size, of_p, h - g * (1.0 - smoothing), -g * (smoothing / classes)


@kernel(budget=_ROW, schedule=("BLOCK",))
@triton.jit
def loss_gradient(
    logits: PointerIf16.element, bias: PointerIf16.element, targets: Pointer.int32, dloss: Pointer.float32,
    dlog_probabilities: Pointer.float32, count: Pointer.float32, sizes: Pointer.float32, scale: Pointer.float32,
    gradient: PointerIf16.element, classes: Int32, blocks: Int32,
    inner: Int32, outer: Int64If16, step: Int64If16, gradient_outer: Int64If16, gradient_step: Int64If16,
    smoothing: Float32, z_weight: Float32, softcap: Float32,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, LOSS: tl.constexpr, HAS_LOG: tl.constexpr, MEAN: tl.constexpr,
    SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of BLOCK columns of a row whose L is known; it may be written over the logits."""
    row = tl.program_id(0) // blocks
    start = (tl.program_id(0) % blocks) * BLOCK
    logits += row_start(row, inner, outer, step)
    gradient += row_start(row, inner, gradient_outer, gradient_step)
    target = tl.load(targets + row)
    column = start + tl.arange(0, BLOCK)
    if target < 0:
        tl.store(gradient + column, tl.zeros([BLOCK], gradient.dtype.element_ty), column < classes)
        return
    size, of_p, of_label, of_all = coefficients(
        row, dloss, dlog_probabilities, count, sizes, scale, smoothing, z_weight, classes,
        LOSS, HAS_LOG, MEAN, SCALED,
    )  # fmt: skip
    if start + BLOCK <= classes:
        store_slopes(
            gradient, logits, bias, start, classes, softcap, size, target, of_p, of_label, of_all, HAS_BIAS, SOFTCAP,
            False, BLOCK, 1,
        )  # fmt: skip
    else:
        store_slopes(
            gradient, logits, bias, start, classes, softcap, size, target, of_p, of_label, of_all, HAS_BIAS, SOFTCAP,
            True, BLOCK, 1,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------- launches


def facts(setup: Setup) -> tuple[torch.dtype, Loss]:
    """The dtype of the logits, and the options, which every operator of the losses takes first."""
    return setup.problem.dtypes[0], Loss(*setup.problem.options[: len(Loss._fields)])


class Targets:
    """Finds the class of each token, and counts those that have one."""

    def __init__(self, setup: Setup, op: str, tokens: int, classes: int) -> None:
        (_, loss), self._op = facts(setup), op
        self._tokens, self._classes, self._loss, self._device = tokens, classes, loss, setup.device
        self._block = setup.schedule["label_block"]
        self._blocks = -(-tokens // self._block)
        index = setup.problem.dtypes[1]
        self._targets = setup.kernel(loss_targets, index=index, SHIFT=loss.shift, BLOCK=self._block)
        self._count = setup.kernel(loss_count, BLOCK=COUNT_BLOCK)
        setup.scratch(counts=(torch.int32, self._blocks))

    def find(self, memory: Memory, labels: Tensor, targets: Tensor, count: Tensor) -> None:
        self._targets.launch(
            (self._blocks,), labels=labels, targets=targets, counts=memory["counts"],
            status_word=status_word(self._device), fault=LABEL_OUT_OF_RANGE[self._op].row, tokens=self._tokens,
            time=labels.shape[-1] if labels.dim() else 1, classes=self._classes, ignore_index=self._loss.ignore_index,
        )  # fmt: skip
        self._count.launch((1,), counts=memory["counts"], count=count, blocks=self._blocks)

    def check(self) -> None:
        """On the CPU a wrong label raises at once."""
        if self._device.type == "cpu":
            check()


class RowResults(NamedTuple):
    """What a row gives, each a number for every row, as kernels take them."""

    losses: Any
    log_probabilities: Any
    sizes: Any


class RowLosses:
    """The loss of every row of logits, and with `gradient` its gradient for an upstream gradient of 1."""

    def __init__(self, setup: Setup, classes: int, has_bias: bool, gradient: bool = False, mean: bool = False) -> None:
        element, self._loss = facts(setup)
        self._classes = classes
        is_capped = self._loss.softcap > 0
        warps = setup.schedule["row_warps"] * (2 if is_capped and gradient else 1)  # caps take more registers
        self._rows = setup.either(
            loss_rows, element=element, HAS_BIAS=has_bias, SOFTCAP=is_capped,
            SMOOTHING=self._loss.label_smoothing > 0, GRADIENT=gradient, MEAN=mean, LANE_LEVELS=lane_levels(classes),
            UNROLL=UNROLL, num_warps=warps,
        )  # fmt: skip

    def launch(
        self, count: int, logits: Rows, bias: Tensor | None, targets: Any, number: Any, results: RowResults,
        gradient: Rows | None = None,
    ) -> None:  # fmt: skip
        into = gradient or logits
        aligned = logits.is_aligned and into.is_aligned and (bias is None or bias.data_ptr() % 16 == 0)
        self._rows[aligned].launch(
            (count,), logits=logits.tensor, bias=logits.tensor if bias is None else bias, targets=targets, count=number,
            losses=results.losses, log_probabilities=results.log_probabilities, sizes=results.sizes,
            gradient=into.tensor, classes=self._classes, inner=logits.inner, outer=logits.outer, step=logits.step,
            gradient_outer=into.outer, gradient_step=into.step, smoothing=self._loss.label_smoothing,
            z_weight=self._loss.z_loss, softcap=self._loss.softcap,
        )  # fmt: skip


def upstream_kind(setup: Setup) -> dict[str, Any]:
    """Which upstream gradients a backward has, as `coefficients` takes them."""
    layout, loss = setup.problem.layout, facts(setup)[1]
    kind = "absent" if "dloss absent" in layout else "token" if loss.reduction == "none" else "total"
    return {"LOSS": kind, "HAS_LOG": "dlog_probabilities absent" not in layout, "MEAN": loss.reduction == "mean"}


class Upstream(NamedTuple):
    """Upstream gradients of the loss and of the log-probabilities, each of them possibly absent."""

    dloss: Tensor | None
    dlog_probabilities: Tensor | None


class RowGradients:
    """The gradient of rows of logits whose L is known, for upstream gradients."""

    def __init__(self, setup: Setup, classes: int, has_bias: bool, scaled: bool = False) -> None:
        element, self._loss = facts(setup)
        self._classes, self._block = classes, setup.schedule["gradient_block"]
        self._rows = setup.either(
            loss_gradient, element=element, HAS_BIAS=has_bias, SOFTCAP=self._loss.softcap > 0,
            SCALED=scaled, BLOCK=self._block, **upstream_kind(setup), num_warps=setup.schedule["gradient_warps"],
        )  # fmt: skip

    def launch(
        self, count: int, logits: Rows, bias: Tensor | None, targets: Any, upstream: Upstream, number: Any, sizes: Any,
        scale: Any, gradient: Rows,
    ) -> None:  # fmt: skip
        blocks = -(-self._classes // self._block)
        aligned = logits.is_aligned and gradient.is_aligned and (bias is None or bias.data_ptr() % 16 == 0)
        self._rows[aligned].launch(
            (count * blocks,), logits=logits.tensor, bias=logits.tensor if bias is None else bias, targets=targets,
            dloss=number if upstream.dloss is None else upstream.dloss,
            dlog_probabilities=number if upstream.dlog_probabilities is None else upstream.dlog_probabilities,
            count=number, sizes=sizes, scale=scale, gradient=gradient.tensor, classes=self._classes, blocks=blocks,
            inner=logits.inner, outer=logits.outer, step=logits.step, gradient_outer=gradient.outer,
            gradient_step=gradient.step, smoothing=self._loss.label_smoothing, z_weight=self._loss.z_loss,
            softcap=self._loss.softcap,
        )  # fmt: skip


class Total:
    """The loss of all tokens from that of each."""

    def __init__(self, setup: Setup) -> None:
        reduction = facts(setup)[1].reduction
        self._total = setup.kernel(loss_total, MEAN=reduction == "mean", SUM_LEVELS=SUM_LEVELS, num_warps=8)

    def launch(self, tokens: int, losses: Any, count: Tensor, loss: Tensor) -> None:
        self._total.launch((1,), losses=losses, count=count, loss=loss, tokens=tokens)
