"""SiLU.   y = x·σ(x),   σ(x) = 1 / (1 + e^−x)

Adjoint, given dy:   dx = dy·σ(x)·(1 + x·(1 − σ(x)))

Saves x. Exact 0 at 0, finite for every finite x, right down to the smallest subnormal.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from adjoint.core.arguments import require_floating, reuse_form
from adjoint.core.op import Adjoint, Op
from adjoint.core.preference import Preference
from adjoint.ops.activation import plans

_silu = Op(
    "silu",
    inputs=("x",),
    outputs=("y",),
    check=lambda x: require_floating("silu", "x", x),
    allocate=lambda x: (torch.empty_like(x),),
    gradient=torch.empty_like,
    describe=lambda x: plans.describe((x,), like=(x,)),
    forward=lambda: plans.SILU,
    adjoint=Adjoint(lambda: plans.SILU_BACKWARD, lambda dy, x: plans.describe((dy, x), like=(x,))),
    alternatives=plans.reuse(lambda: plans.SILU_REUSE),
)


@_silu.public
def silu(
    x: Float[Tensor, "*shape"], *, reuse_inputs: bool = False, preference: Preference | None = None
) -> Float[Tensor, "*shape"]:
    """y = x·σ(x), elementwise.

    Args:
        x: any shape, any strides; float64, float32, bfloat16 or float16, kept by the result.
        reuse_inputs: whether the backward writes the gradient over `x` instead of into new memory. `x` is lost after
            backward, and a second backward raises.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: `x` is not a floating tensor on the CPU or a CUDA device.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> silu(torch.tensor([-90.0, 0.0, 1.0]), preference=Preference(plan="eager"))
    tensor([-7.3746e-38,  0.0000e+00,  7.3106e-01])
    """
    return _silu.call(x, preference=preference, form="" if reuse_inputs is False else reuse_form("silu", reuse_inputs))  # type: ignore[no-any-return]
