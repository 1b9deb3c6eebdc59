"""The rotary embedding in plain PyTorch: the operations of the kernels in the same types, so the same bits."""

from torch import Tensor

from adjoint.core.problem import wide_dtype


def rotate(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool, adjoint: bool) -> None:
    """Rotates the first columns of x into y, or rotates them back, and copies the others. y may be x."""
    wide = wide_dtype(x.dtype)
    first, second = _pairs(x[..., :rotary_dim].to(wide), interleaved)
    (cos_1, cos_2), (sin_1, sin_2) = (_of_pairs(t.to(wide), rotary_dim, interleaved) for t in (cos, sin))
    if adjoint:
        sin_1, sin_2 = -sin_2, -sin_1
    results = first * cos_1 - second * sin_1, second * cos_2 + first * sin_2
    for target, result in zip(_pairs(y[..., :rotary_dim], interleaved), results, strict=True):
        target.copy_(result)
    if y is not x:
        y[..., rotary_dim:].copy_(x[..., rotary_dim:])


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second column of every pair, as views."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _of_pairs(table: Tensor, rotary_dim: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The numbers of a table for the first and the second column of every pair, for all heads."""
    table = table.unsqueeze(-2)
    return _pairs(table, interleaved) if table.shape[-1] == rotary_dim else (table, table)
