"""The definition of the rotary embedding and its adjoint: float64, one formula a line, never optimised.

Of the first R columns of a head, column j has a partner: half-split, that half of R away; interleaved, its neighbour.

    y_j = x_j·cos_j + partner(x)_j·sin_j,    partner(x) = (−x₂, x₁) of every pair (x₁, x₂)

Columns from R on are copied.
"""

import torch
from torch import Tensor


def partner(x: Tensor, interleaved: bool) -> Tensor:
    """(−x₂, x₁) of every pair (x₁, x₂). Its transpose is its negative."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def table_of_columns(table: Tensor, rotary_dim: int, interleaved: bool) -> Tensor:
    """A number for each of the R columns of each token, [..., time, 1, R], from a table of width R or R/2."""
    if table.shape[-1] != rotary_dim:
        table = table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)
    return table.unsqueeze(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool) -> Tensor:
    cos, sin = (table_of_columns(t, rotary_dim, interleaved) for t in (cos, sin))
    columns = x[..., :rotary_dim]
    return torch.cat((columns * cos + partner(columns, interleaved) * sin, x[..., rotary_dim:]), -1)


def rotate_back(dy: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool) -> Tensor:
    """The adjoint of `rotate`, also for tables that do not give both columns of a pair the same angle."""
    cos, sin = (table_of_columns(t, rotary_dim, interleaved) for t in (cos, sin))
    columns = dy[..., :rotary_dim]
    return torch.cat((columns * cos - partner(columns * sin, interleaved), dy[..., rotary_dim:]), -1)
