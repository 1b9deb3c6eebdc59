"""q and k of length one.   y = x·r,   r = 1 / sqrt(Σx² + 1e-6), along the last axis

Adjoint:   dx = r·(dy − y·(y·dy))

In plain PyTorch computed in float64 and rounded once; by the kernels of `l2_norm` in float32. Under autocast nothing is
cast.
"""

from jaxtyping import Float
from torch import Tensor

from adjoint.core.arguments import require_floating
from adjoint.core.errors import ArgumentError
from adjoint.core.layout import empty_like
from adjoint.core.op import Adjoint, Op
from adjoint.core.preference import Preference
from adjoint.device.rows import describe
from adjoint.ops.gated_delta.stages.normalize import plans


def _check(x: Tensor) -> None:
    require_floating("normalize", "x", x)
    if x.dim() == 0:
        raise ArgumentError("normalize: x must have at least one axis, got shape ()")


_normalize = Op(
    "normalize",
    inputs=("x",),
    outputs=("y",),
    check=_check,
    allocate=lambda x: (empty_like(x),),
    describe=lambda x: describe(x),
    forward=lambda: plans.NORMALIZE,
    adjoint=Adjoint(lambda: plans.NORMALIZE_BACKWARD, lambda dy, x: describe(x, dy=dy)),
)


@_normalize.public
def normalize(x: Float[Tensor, "*shape size"], *, preference: Preference | None = None) -> Float[Tensor, "*shape size"]:
    """x / sqrt(Σx² + 1e-6) along the last axis, in the dtype of x: the same as `normalize_qk`, but rounded.

    >>> import torch
    >>> normalize(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    return _normalize.call(x, preference=preference)  # type: ignore[no-any-return]
