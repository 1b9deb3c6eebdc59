"""What the plans of dispatch and combine have in common."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Guarantee, spacing
from adjoint.core.launch import imported
from adjoint.core.plan import Candidate, Compute, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem, short, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.device.sums import IN_RANGE, sum_bound
from adjoint.ops.moe.layout import MAX_ENTRIES, MAX_EXPERTS
from adjoint.ops.moe.token_rows.eager import entries_of

SUM_ERROR = "½ ulp + γ·Σ|terms|, γ = n·u / (1 − n·u), n the roundings a term goes through"
SLOT_ORDER = f"{IN_RANGE}; a token's rows are added in the order of its slots"
IEEE_SUMS = "as IEEE sums that begin with +0"


def promise(error: Derived, problem: Problem | None = None, item: str = "token", **words: Any) -> Guarantee:
    """The promise of an output: sums of a problem that are rounded once, or copies, for which `problem` is None."""
    return Guarantee(
        repeatable=True,
        batch_invariant=item,
        device_invariant=True,
        accumulator="none" if problem is None else short(wide_dtype(problem.dtypes[0])),
        roundings=int(problem is not None),
        error=error,
        **words,
    )


def bound_of_products(
    exact: Tensor, magnitude: Tensor, terms: int, steps: int, dtype: torch.dtype, out: torch.dtype
) -> Tensor:
    """The bound of a sum of `terms` products, which may underflow, after `steps` roundings, rounded to `out`."""
    wide = wide_dtype(dtype)
    number, roundings = magnitude.new_tensor((terms + 1, steps))
    underflow = terms * torch.finfo(wide).smallest_normal * torch.finfo(wide).eps
    before = sum_bound(exact, magnitude, number, roundings, dtype, wide) + underflow
    return before if out == wide else before + spacing(exact.abs() + before, out) / 2


def terms_of(rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
    """The term that each entry adds to its token, [..., slots, columns]."""
    row, _, counts = entries_of(inverse, offsets)
    if rows.shape[0] == 0:
        return rows.new_zeros(*inverse.shape, rows.shape[1])
    terms = rows[row.long()].masked_fill(~counts[:, None], 0).view(*inverse.shape, rows.shape[1])
    return terms if weights is None else terms * weights[..., None]


def bound_of_sums(dtype: torch.dtype, rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
    terms, slots = terms_of(rows, weights, inverse, offsets), inverse.shape[-1]
    steps = slots + (weights is not None)
    return bound_of_products(terms.sum(-2), terms.abs().sum(-2), slots, steps, dtype, dtype)


def _refuse(problem: Problem) -> str:
    tokens, slots, experts, _ = problem.sizes
    if max(tokens, tokens * slots) > MAX_ENTRIES:
        return f"numbers up to {MAX_ENTRIES} tokens and entries, these are {tokens} with {slots} slots each"
    if problem.op == "moe_dispatch" and experts > MAX_EXPERTS:
        return f"sorts by at most {MAX_EXPERTS} experts, these are {experts}"
    return ""


def candidates(
    op: str, guarantee: Callable[[Problem], dict[str, Guarantee]], in_torch: Compute, **numeric: Any
) -> tuple[Candidate, ...]:
    """The candidates of an operator: one on kernels, and one in PyTorch with the same numeric parameters."""
    direction = op.removeprefix("moe_")
    folder = direction.removesuffix("_backward")
    on_kernels = Candidate(
        name="triton.tokens",
        backend="triton",
        kernel=op,
        revision=1,
        refuse=_refuse,
        guarantee=guarantee,
        setup=imported(f"adjoint.ops.moe.{folder}.kernels:{direction}"),
        schedules=Schedules(Path(__file__).parent.with_name(folder) / "schedules.json"),
    )
    return on_kernels, in_pytorch("eager.tokens", guarantee, allocating_outputs(in_torch), lambda problem: numeric)
