"""Which kernels serve which loss of the router, and what they guarantee."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from adjoint.core.errors import register_fault
from adjoint.core.guarantee import Derived, Guarantee, spacing
from adjoint.core.launch import imported
from adjoint.core.plan import Candidate, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules
from adjoint.ops.moe.layout import REPORTED
from adjoint.ops.moe.losses import eager, reference

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

RUN, RUNS = 16, 64
"""Tokens of a run, and runs of a sum of the next level: part of a loss's bits."""

MAX_CHOICES = 2**31 - 2**16
"""Choices of all tokens that fit the kernels' integers."""

U = 2.0**-24

INDEX_OUT_OF_RANGE = register_fault(
    "moe.load_balancing_loss: indices[{position}] (of all indices, row by row) is {value}, which is no expert: experts "
    "are numbered from 0 to the last axis of logits"
)


def levels(rows: int) -> list[int]:
    """The number of runs of tokens, and of the sums of each level above, down to one."""
    counts = [-(-rows // RUN)]
    while len(counts) < 2 or counts[-1] > 1:
        counts.append(-(-counts[-1] // RUNS))
    return counts


# ------------------------------------------------------------------------------------------- guarantee

_ORDER = (
    f"every input; tokens are added in their order within runs of {RUN}, runs in their order {RUNS} at a time, and so "
    f"on: the order depends on the number of tokens alone"
)
_SPECIAL = (
    "a token that the mask leaves out counts for nothing, whatever its logits; NaN, +∞ or a row of −∞ among the "
    "others gives what IEEE arithmetic makes of it; without any token the loss is 0"
)


def _additions(rows: int) -> int:
    """Additions a token's term goes through."""
    return RUN + RUNS * (len(levels(rows)) - 1)


def _parts(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of the tokens that count: probabilities, their relative error, logsumexp and its error; and which count.

    A probability costs 3·|d|·u + 5·u for each of its exponentials, d the distance from the row's maximum, and an
    addition for each slice and halving of the sum; a logarithm 8·u·(1 + |log|).
    """
    rows = logits.reshape(-1, logits.shape[-1])
    counted = torch.ones_like(rows[:, 0], dtype=torch.bool) if mask is None else mask.reshape(-1)
    far = (rows.amax(-1, keepdim=True) - rows).nan_to_num(nan=0.0, posinf=0.0)
    p = torch.softmax(rows, -1)
    mean = (p * far).nan_to_num(nan=0.0).sum(-1, keepdim=True)
    steps = rows.shape[1] / 32 + 24
    relative = U * (3 * far + 3 * mean + steps)
    size = torch.logsumexp(rows, -1, keepdim=True)
    log = (size - rows.amax(-1, keepdim=True)).abs().nan_to_num(nan=0.0, posinf=0.0)
    error = U * (3 * mean + steps + 8 * (1 + log) + 2 * size.abs())
    return p, relative, size, error, counted


def _forward_bound(problem: Problem, in_float64: bool) -> Callable[..., Tensor]:
    steps = _additions(problem.sizes[1])

    def balance(logits: Tensor, indices: Tensor, mask: Tensor | None = None) -> Tensor:
        loss = reference.load_balancing_loss(logits, indices, mask)
        if in_float64:
            return 1.001 * U * loss.abs()
        _, relative, _, _, counted = _parts(logits, mask)
        worst = relative[counted].amax() if counted.any() else loss.new_zeros(())
        return loss.abs() * (1.001 * worst + U * (steps + logits.shape[-1] / 32 + 16))

    def z(logits: Tensor, mask: Tensor | None = None) -> Tensor:
        loss = reference.z_loss(logits, mask)
        if in_float64:
            return 1.001 * U * loss.abs() + 2.0**-149
        _, _, size, error, counted = _parts(logits, mask)
        number = max(1, int(counted.sum()))
        terms = (2 * size.abs() * error + error * error)[counted].sum() / number
        return 1.001 * terms + U * (steps + 6) * loss.abs() + 2.0**-125

    return balance if "balancing" in problem.op else z


def _backward_bound(problem: Problem, in_float64: bool) -> Callable[..., Tensor]:
    dtype = problem.dtypes[0]

    def finish(exact: Tensor, limit: Tensor, counted: Tensor, shape: torch.Size) -> Tensor:
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        limit = limit + spacing(exact.abs() + limit, dtype) / 2 + smallest + 2.0**-120
        return torch.where(counted[:, None], limit, 0.0).view(shape)

    def balance(dloss: Tensor, logits: Tensor, indices: Tensor, mask: Tensor | None = None) -> Tensor:
        p, relative, _, _, counted = _parts(logits, mask)
        f = reference.fractions(indices, counted, p.shape[1], p.dtype)
        exact = reference.load_balancing_loss_backward(dloss, logits, indices, mask).reshape(p.shape)
        terms = p * (f + (p * f).sum(-1, keepdim=True)) * p.shape[1] / max(1, int(counted.sum())) * dloss.abs()
        share = U * 8 if in_float64 else 2 * relative.amax(-1, keepdim=True) + U * (p.shape[1] / 32 + 24)
        return finish(exact, share * terms, counted, logits.shape)

    def z(dloss: Tensor, logits: Tensor, mask: Tensor | None = None) -> Tensor:
        p, relative, size, error, counted = _parts(logits, mask)
        exact = reference.z_loss_backward(dloss, logits, mask).reshape(p.shape)
        factor = 2 * p / max(1, int(counted.sum())) * dloss.abs()
        limit = U * 8 * exact.abs() if in_float64 else factor * (size.abs() * (relative + 8 * U) + 2 * error)
        return finish(exact, limit, counted, logits.shape)

    return balance if "balancing" in problem.op else z


def _guarantee(problem: Problem, in_float64: bool) -> dict[str, Guarantee]:
    balancing, backward = "balancing" in problem.op, problem.op.endswith("_backward")
    formula = (
        "½ ulp + c·u·Σ|terms|, c the roundings a term goes through"
        if backward
        else "c·u·|loss|, c the additions a token goes through and the error of its own term"
    )
    stated = Guarantee(
        repeatable=True,
        batch_invariant="",
        device_invariant=False,
        accumulator="float64" if in_float64 else "float32",
        roundings=1,
        error=Derived(f"{formula}, u = 2⁻²⁴", (_backward_bound if backward else _forward_bound)(problem, in_float64)),
        domain="every input" if backward or in_float64 else _ORDER,
        special_values=_SPECIAL,
        out_of_range=f"an index counts for no expert, {REPORTED}" if balancing and not backward else "",
    )
    return dict.fromkeys(("dlogits",) if backward else ("loss", "load" if balancing else "tokens"), stated)


# ------------------------------------------------------------------------------------------ candidates


def _refuse(problem: Problem) -> str:
    choices = problem.sizes[1] * problem.sizes[2]
    return f"counts up to {MAX_CHOICES} choices, there are {choices}" if choices > MAX_CHOICES else ""


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
