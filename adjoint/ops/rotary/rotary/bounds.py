"""How far a rotated head may be from the exact one: two products, one sum, and the rounding to the storage type.

Before it is rounded, x₁·cos − x₂·sin has an error of at most u of each product and u of their sum, which is at most
(2u + u²)·(|x₁·cos| + |x₂·sin|), with u half of the eps of the arithmetic's type. Two products may lose η, its smallest
number, by underflow. Where a product passes the largest number, the bound is infinite. Columns that are copied are
exact.
"""

import torch
from torch import Tensor

from adjoint.core.guarantee import spacing
from adjoint.core.problem import wide_dtype
from adjoint.ops.rotary.rotary.reference import partner, table_of_columns


def rotated(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool, dtype: torch.dtype) -> Tensor:
    """The largest error of each element of a rotated x."""
    cos, sin = (table_of_columns(t, rotary_dim, interleaved) for t in (cos, sin))
    columns = x[..., :rotary_dim]
    return _largest_error(x, columns * cos, partner(columns, interleaved) * sin, dtype)


def rotated_back(
    dy: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool, dtype: torch.dtype
) -> Tensor:
    """The largest error of each element of the gradient."""
    cos, sin = (table_of_columns(t, rotary_dim, interleaved) for t in (cos, sin))
    columns = dy[..., :rotary_dim]
    return _largest_error(dy, columns * cos, -partner(columns * sin, interleaved), dtype)


def _largest_error(x: Tensor, own: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of the sum of two products; columns of x that are copied have none."""
    arithmetic = wide_dtype(dtype)
    info = torch.finfo(arithmetic)
    unit, tiny = info.eps / 2, info.smallest_normal * info.eps
    error = (2 * unit + unit * unit) * (own.abs() + other.abs()) + tiny
    if dtype == torch.float64:  # the reference is also in float64 and rounds as often
        error = 2 * error
    if dtype != arithmetic:
        error = error + spacing((own + other).abs() + error, dtype) / 2
    error = torch.where(torch.maximum(own.abs(), other.abs()) < info.max, error, torch.inf)
    return torch.cat((error, torch.zeros_like(x[..., own.shape[-1] :])), -1)


def in_words(dtype: torch.dtype) -> str:
    is_double = dtype == torch.float64
    numbers = "u = 2⁻⁵³, η = 2⁻¹⁰⁷⁴" if is_double else "u = 2⁻²⁴, η = 2⁻¹⁴⁹"
    rounding = "½ ulp + " if dtype.itemsize == 2 else ""
    terms = "(2u + u²)·(|x₁·cos| + |x₂·sin|) + η"
    return f"{rounding}{f'2·({terms})' if is_double else terms} of rotated columns, 0 of the others, {numbers}"
