"""Which kernels serve which loss of the router, and what they guarantee."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.core.errors import register_fault
from adjoint.core.guarantee import Derived, Guarantee, spacing
from adjoint.core.launch import imported
from adjoint.core.plan import Candidate, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.device.sums import IN_RANGE
from adjoint.ops.moe.layout import REPORTED
from adjoint.ops.moe.logits import refuse_float64
from adjoint.ops.moe.losses import eager, reference

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

RUN, RUNS = 16, 64
"""The number of tokens in a run, and of runs in a sum of the next level. Both are part of a loss's bits."""

MAX_CHOICES = 2**31 - 2**16
"""The most choices, over all tokens, that the kernels' integers can count."""

INDEX_OUT_OF_RANGE = register_fault(
    "moe.load_balancing_loss: indices[{position}] (of all indices, row by row) is {value}, which is no expert: experts "
    "are numbered from 0 to the last axis of logits"
)


def levels(rows: int) -> list[int]:
    """The number of runs of tokens, and then the number of sums of each level above, down to one."""
    counts = [-(-rows // RUN)]
    while len(counts) < 2 or counts[-1] > 1:
        counts.append(-(-counts[-1] // RUNS))
    return counts


# ------------------------------------------------------------------------------------------- guarantee

_ORDER = (
    f"{IN_RANGE}; tokens are added in their order within runs of {RUN}, runs in their order {RUNS} at a time, and so "
    f"on: the order depends on the number of tokens alone"
)
_SPECIAL = (
    "a token that the mask leaves out counts for nothing, whatever its logits; NaN, +∞ or a row of −∞ among the "
    "others gives what IEEE arithmetic makes of it; without any token the loss is 0"
)


class _Arithmetic(NamedTuple):
    """The arithmetic of a loss.

    Attributes:
        kind: the type of the loss.
        rounds_once: whether it is computed in a wider type.
        over_tokens: the number of additions of a token's term.
        over_experts: the number of additions of a term in a sum over the experts.
    """

    kind: torch.dtype
    rounds_once: bool
    over_tokens: float
    over_experts: float

    @property
    def u(self) -> float:
        return torch.finfo(self.kind).eps / 2

    @property
    def smallest(self) -> float:
        """The smallest normal number."""
        return torch.finfo(self.kind).tiny

    @property
    def floor(self) -> float:
        """What numbers count as larger that may be subnormal: u times it is the smallest normal number."""
        return 0.0 if self.rounds_once else self.smallest / self.u


def _arithmetic(problem: Problem, in_float64: bool) -> _Arithmetic:
    """The arithmetic of a problem. In float64 torch adds in its own order, so a sum has as many additions as terms."""
    kind, (experts, rows, _) = wide_dtype(problem.dtypes[0]), problem.sizes
    if in_float64:
        return _Arithmetic(kind, kind != torch.float64, rows, experts)
    return _Arithmetic(kind, False, RUN + RUNS * (len(levels(rows)) - 1), experts / 32)


def _parts(
    logits: Tensor, mask: Tensor | None, arithmetic: _Arithmetic
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For the tokens that count: probabilities, their relative error, logsumexp and its error; and which tokens count.

    Each exponential of a probability has an error of 3·|d|·u + 5·u, where d is the distance from the row's maximum. Its
    sum has an addition for each slice and each halving. A logarithm has an error of 8·u·(1 + |log|).
    """
    u = arithmetic.u
    rows = logits.reshape(-1, logits.shape[-1])
    counted = torch.ones_like(rows[:, 0], dtype=torch.bool) if mask is None else mask.reshape(-1)
    far = (rows.amax(-1, keepdim=True) - rows).nan_to_num(nan=0.0, posinf=0.0)
    p = torch.softmax(rows, -1)
    mean = (p * far).nan_to_num(nan=0.0).sum(-1, keepdim=True)
    steps = arithmetic.over_experts + 24
    relative = u * (3 * far + 3 * mean + steps)
    size = torch.logsumexp(rows, -1, keepdim=True)
    log = (size - rows.amax(-1, keepdim=True)).abs().nan_to_num(nan=0.0, posinf=0.0)
    error = u * (3 * mean + steps + 8 * (1 + log) + 2 * size.abs())
    return p, relative, size, error, counted


def _forward_bound(problem: Problem, in_float64: bool) -> Callable[..., Tensor]:
    arithmetic = _arithmetic(problem, in_float64)
    u = arithmetic.u

    def balance(logits: Tensor, indices: Tensor, mask: Tensor | None = None) -> Tensor:
        loss = reference.load_balancing_loss(logits, indices, mask)
        if arithmetic.rounds_once:
            return 1.001 * u * loss.abs() + 2 * u * arithmetic.smallest
        _, relative, _, _, counted = _parts(logits, mask, arithmetic)
        worst = relative[counted].amax() if counted.any() else loss.new_zeros(())
        lost = logits.shape[-1] * (indices.shape[-1] + 2) * arithmetic.smallest  # lost where probabilities underflow
        return loss.abs() * (1.001 * worst + u * (arithmetic.over_tokens + arithmetic.over_experts + 16)) + lost

    def z(logits: Tensor, mask: Tensor | None = None) -> Tensor:
        loss = reference.z_loss(logits, mask)
        if arithmetic.rounds_once:
            return 1.001 * u * loss.abs() + 2 * u * arithmetic.smallest
        _, _, size, error, counted = _parts(logits, mask, arithmetic)
        number = max(1, int(counted.sum()))
        terms = (2 * size.abs() * error + error * error)[counted].sum() / number
        limit = 1.001 * terms + u * (arithmetic.over_tokens + 6) * loss.abs() + 2 * arithmetic.smallest
        largest = torch.finfo(arithmetic.kind).max
        return torch.where(loss * number + limit * number > largest, torch.inf, limit)  # the sum, not the mean

    return balance if "balancing" in problem.op else z


def _backward_bound(problem: Problem, in_float64: bool) -> Callable[..., Tensor]:
    dtype, arithmetic = problem.dtypes[0], _arithmetic(problem, in_float64)
    u = arithmetic.u

    def finish(exact: Tensor, limit: Tensor, counted: Tensor, shape: torch.Size) -> Tensor:
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        limit = limit + spacing(exact.abs() + limit, dtype) / 2 + smallest + 64 * arithmetic.smallest
        return torch.where(counted[:, None], limit, 0.0).view(shape)

    def balance(dloss: Tensor, logits: Tensor, indices: Tensor, mask: Tensor | None = None) -> Tensor:
        p, relative, _, _, counted = _parts(logits, mask, arithmetic)
        f = reference.fractions(indices, counted, p.shape[1], p.dtype)
        exact = reference.load_balancing_loss_backward(dloss, logits, indices, mask).reshape(p.shape)
        p = p + arithmetic.floor  # a probability may be subnormal, as a product may, and what multiplies it large
        terms = p * (f + (p * f).sum(-1, keepdim=True)) + arithmetic.floor
        terms = terms * p.shape[1] / max(1, int(counted.sum())) * dloss.abs()
        sums = 2 * relative.amax(-1, keepdim=True) + u * (arithmetic.over_experts + 24)
        share = u * 8 if arithmetic.rounds_once else sums
        return finish(exact, share * terms, counted, logits.shape)

    def z(dloss: Tensor, logits: Tensor, mask: Tensor | None = None) -> Tensor:
        p, relative, size, error, counted = _parts(logits, mask, arithmetic)
        exact = reference.z_loss_backward(dloss, logits, mask).reshape(p.shape)
        p = p + arithmetic.floor  # as above, and so may the first product of three factors be
        factor = 2 * p / max(1, int(counted.sum())) * (dloss.abs() + arithmetic.floor)
        sums = factor * (size.abs() * (relative + 8 * u) + 2 * error)
        limit = u * 8 * exact.abs() if arithmetic.rounds_once else sums
        return finish(exact, limit, counted, logits.shape)

    return balance if "balancing" in problem.op else z


def _guarantee(problem: Problem, in_float64: bool) -> dict[str, Guarantee]:
    balancing, backward = "balancing" in problem.op, problem.op.endswith("_backward")
    formula = (
        "½ ulp + c·u·Σ|terms|, c the roundings a term goes through"
        if backward
        else "c·u·|loss|, c the additions a token goes through and the error of its own term, + what underflows"
    )
    units = "u = 2⁻⁵³" if problem.dtypes[0] == torch.float64 else "u = 2⁻²⁴"
    stated = Guarantee(
        repeatable=True,
        batch_invariant="",
        device_invariant=False,
        accumulator="float64" if in_float64 else "float32",
        roundings=2 if backward and balancing and problem.dtypes[0].itemsize > 2 else 1,  # the saved load is rounded
        error=Derived(f"{formula}, {units}", (_backward_bound if backward else _forward_bound)(problem, in_float64)),
        domain="every input" if backward else IN_RANGE if in_float64 else _ORDER,
        special_values=_SPECIAL,
        out_of_range=f"an index counts for no expert, {REPORTED}" if balancing and not backward else "",
    )
    return dict.fromkeys(("dlogits",) if backward else ("loss", "load" if balancing else "tokens"), stated)


# ------------------------------------------------------------------------------------------ candidates


def _refuse(problem: Problem) -> str:
    choices = problem.sizes[1] * problem.sizes[2]
    too_many = f"counts up to {MAX_CHOICES} choices, there are {choices}" if choices > MAX_CHOICES else ""
    return refuse_float64(problem) or too_many


def _candidates(kernel: str, launch: str, compute: Callable[..., None]) -> tuple[Candidate, ...]:
    on_kernels = Candidate(
        name="triton.runs",
        backend="triton",
        kernel=kernel,
        revision=1,
        refuse=_refuse,
        guarantee=lambda problem: _guarantee(problem, False),
        setup=imported(f"adjoint.ops.moe.losses.kernels:{launch}"),
        schedules=_SCHEDULES,
    )
    run = allocating_outputs(lambda plan, arguments, outputs, _: compute(*arguments, *outputs))
    return on_kernels, in_pytorch("eager", lambda problem: _guarantee(problem, True), run)


BALANCE = _candidates("moe_balance_runs", "balance", partial(eager.balance, INDEX_OUT_OF_RANGE))
BALANCE_BACKWARD = _candidates("moe_balance_backward", "backward", eager.balance_backward)
Z = _candidates("moe_z_runs", "z", eager.z)
Z_BACKWARD = _candidates("moe_z_backward", "backward", eager.z_backward)
