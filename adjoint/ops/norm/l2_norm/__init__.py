"""Vectors of length one.   y = x·r,   r = 1 / sqrt(Σx² + ε), along the last axis

Adjoint, given dy:   dx = r·(dy − y·(y·dy))

Saves x. Under autocast nothing is cast: a norm keeps the dtype that it is given.
"""

from jaxtyping import Float
from torch import Tensor

from adjoint.core.layout import empty_like
from adjoint.core.op import Adjoint, Op
from adjoint.core.preference import Preference
from adjoint.device.rows import describe
from adjoint.ops.norm import plans
from adjoint.ops.norm.arguments import require_rows

_l2_norm = Op(
    "l2_norm",
    inputs=("x",),
    options="float eps",
    outputs=("y",),
    check=lambda x, eps: require_rows("l2_norm", x, eps),
    allocate=lambda x, eps: (empty_like(x),),
    describe=lambda x, eps: describe(x),
    forward=lambda: plans.L2_NORM,
    adjoint=Adjoint(lambda: plans.L2_NORM_BACKWARD, lambda dy, x, eps: describe(x, dy=dy)),
)


@_l2_norm.public
def l2_norm(
    x: Float[Tensor, "*shape size"], *, eps: float = 1e-6, preference: Preference | None = None
) -> Float[Tensor, "*shape size"]:
    """y = x / sqrt(Σx² + eps) along the last axis, rounded once.

    Args:
        x: any shape with at least one axis, any strides; float64, float32, bfloat16 or float16, kept by the result.
        eps: the number that is added to the sum of squares; not negative.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: x is not a floating tensor with an axis, or eps is negative.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> l2_norm(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    return _l2_norm.call(x, eps, preference=preference)  # type: ignore[no-any-return]
