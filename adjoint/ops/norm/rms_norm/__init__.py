"""RMS norm.   y = z·w,   z = x·r,   r = 1 / sqrt(mean(x²) + ε),   w = offset + weight, along the last axis

With a residual, s = x + residual is rounded once and returned too, and y is the norm of s.

Adjoint, given dy (and ds), with a = dy·w:   dx      = r·(a − z·mean(a·z)) (+ ds), the residual's gradient too
                                             dweight = Σ dy·z over all rows

Saves x, or s, and the weight. Under autocast nothing is cast: a norm keeps the dtypes that it is given.
"""

from typing import Any, overload

from jaxtyping import Float
from torch import Tensor

from adjoint.core.arguments import require_floating, require_like
from adjoint.core.layout import empty_like
from adjoint.core.op import Adjoint, Op
from adjoint.core.preference import Preference
from adjoint.device.rows import describe
from adjoint.ops.norm import plans
from adjoint.ops.norm.arguments import RESIDUAL, require_number, require_rows, require_weight


def _check(x: Tensor, weight: Tensor, eps: float, offset: float) -> None:
    require_rows("rms_norm", x, eps)
    require_number("rms_norm", "offset", offset)
    require_weight("rms_norm", weight, x)


_rms_norm = Op(
    "rms_norm",
    inputs=("x", "weight"),
    options="float eps, float offset",
    outputs=("y",),
    check=_check,
    allocate=lambda x, *others: (empty_like(x),),
    describe=lambda x, weight, *options: describe(x, weight),
    forward=lambda: plans.RMS_NORM,
    adjoint=Adjoint(lambda: plans.RMS_NORM_BACKWARD, lambda dy, x, weight, *options: describe(x, weight, dy=dy)),
)


def _check_residual(x: Tensor, weight: Tensor, residual: Tensor, eps: float, offset: float) -> None:
    _check(x, weight, eps, offset)
    require_like("rms_norm", "residual", residual, "x", x)


def _check_residual_backward(dy: Tensor | None, ds: Tensor | None, s: Tensor, *arguments: Any) -> None:
    _check(s, *arguments[:-1])
    for name, gradient in (("dy", dy), ("ds", ds)):
        if gradient is not None:
            require_floating("rms_norm", name, gradient)
            require_like("rms_norm", name, gradient, "x", s)


def _allocate_residual_backward(dy: Any, ds: Any, s: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, ...]:
    """Empty dx and dweight, and an empty tensor for the residual, whose gradient is dx."""
    need_x, need_weight, _ = RESIDUAL.needs(options[-1])
    return s.new_empty(s.shape if need_x else 0), weight.new_empty(weight.shape if need_weight else 0), s.new_empty(0)


_residual = Op(
    "rms_norm_residual",
    label="rms_norm",
    inputs=("x", "weight", "residual"),
    options="float eps, float offset",
    outputs=("y", "s"),
    check=_check_residual,
    allocate=lambda x, *others: (empty_like(x), empty_like(x)),
    describe=lambda x, weight, residual, *options: describe(x, weight, residual=residual),
    forward=lambda: plans.RESIDUAL_NORM,
    adjoint=Adjoint(
        lambda: plans.RESIDUAL_NORM_BACKWARD,
        lambda dy, ds, s, weight, *options: describe(s, weight, dy=dy, ds=ds),
        saves=("s", "weight"),
        check=_check_residual_backward,
        allocate=_allocate_residual_backward,
        assemble=lambda results, arguments: (results[0], results[1], results[0]),
    ),
)


@overload
def rms_norm(
    x: Float[Tensor, "*shape size"], weight: Float[Tensor, " size"], *, eps: float = 1e-6, offset: float = 0.0,
    residual: None = None, preference: Preference | None = None,
) -> Float[Tensor, "*shape size"]: ...  # fmt: skip
@overload
def rms_norm(
    x: Float[Tensor, "*shape size"], weight: Float[Tensor, " size"], *, eps: float = 1e-6, offset: float = 0.0,
    residual: Float[Tensor, "*shape size"], preference: Preference | None = None,
) -> tuple[Float[Tensor, "*shape size"], Float[Tensor, "*shape size"]]: ...  # fmt: skip
@_rms_norm.public
def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0, residual: Tensor | None = None,
    preference: Preference | None = None,
) -> Any:  # fmt: skip
    """y = x·r·(offset + weight), r = 1 / sqrt(mean(x²) + eps), along the last axis, rounded once.

    Args:
        x: any shape with at least one axis, any strides; float64, float32, bfloat16 or float16, kept by the result.
        weight: one number for each column; of the dtype of x, or float32.
        eps: the number that is added to the mean of squares; not negative.
        offset: the number that is added to the weight: 1.0 for weights that begin at 0.
        residual: like x. With a residual, s = x + residual, rounded once, is normalised, and (y, s) is returned.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit, or eps is negative.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2))
    tensor([0.8485, 1.1314])
    >>> rms_norm(torch.tensor([1.0, 3.0]), torch.ones(2), residual=torch.tensor([2.0, 1.0]))
    (tensor([0.8485, 1.1314]), tensor([3., 4.]))
    """
    if residual is None:
        return _rms_norm.call(x, weight, eps, offset, preference=preference)
    return _residual.call(x, weight, residual, eps, offset, preference=preference)
