"""Packed sequences and pools of states, which several families take: the checks of their metadata and their values."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from adjoint.core.arguments import require_ids
from adjoint.core.errors import ArgumentError


def require_cu_seqlens(op: str, cu_seqlens: Tensor | None, like: Tensor, name: str = "q") -> None:
    """[N + 1] int32 or int64, and a batch of one row, where there is one; `name` is what the caller calls `like`."""
    if cu_seqlens is None:
        return
    require_ids(op, "cu_seqlens", cu_seqlens, name, like)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ArgumentError(
            f"{op}: cu_seqlens must have one axis, the N + 1 bounds of N sequences, got shape {tuple(cu_seqlens.shape)}"
        )
    if like.shape[0] != 1:
        raise ArgumentError(
            f"{op}: cu_seqlens cuts the tokens of one row, so the batch of {name} must be 1, got {like.shape[0]}; "
            f"lay the rows one after the other"
        )


def count_sequences(like: Tensor, cu_seqlens: Tensor | None) -> int:
    return like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def check_bounds(op: str, bounds: Sequence[int], tokens: int) -> None:
    """Raises for bounds, as numbers on the CPU, that do not cut so many tokens into sequences."""
    ordered = all(begin <= end for begin, end in itertools.pairwise(bounds))
    if not ordered or bounds[0] != 0 or bounds[-1] != tokens:
        raise ArgumentError(
            f"{op}: cu_seqlens must begin with 0, never descend, and end with the number of tokens, {tokens}, got "
            f"{_shown(bounds)}"
        )


def _shown(bounds: Sequence[int]) -> str:
    if len(bounds) <= 8:
        return str(list(bounds))
    return f"{str(list(bounds[:4]))[:-1]}, …, {str(list(bounds[-2:]))[1:]}"


def wrong_bounds(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Which bounds are out of order or out of range."""
    wrong = torch.cat((cu_seqlens[:1] != 0, cu_seqlens[1:] < cu_seqlens[:-1]))
    wrong |= (cu_seqlens < 0) | (cu_seqlens > tokens)
    wrong[-1] |= cu_seqlens[-1] != tokens
    return wrong


def out_of_range(indices: Tensor, states: int) -> Tensor:
    """Which state indices are neither of a state nor −1."""
    return (indices < -1) | (indices >= states)


def skipped_rows(indices: Tensor | None, states: int) -> Tensor | None:
    """Which rows of a step read no state; None where every row has its own."""
    return None if indices is None else out_of_range(indices, states) | (indices < 0)


def repeated(indices: Tensor) -> Tensor:
    """Which state indices, skipped rows aside, have occurred before."""
    ordered, order = indices.sort(stable=True)
    again = torch.zeros_like(indices, dtype=torch.bool)
    again[order[1:]] = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    return again
