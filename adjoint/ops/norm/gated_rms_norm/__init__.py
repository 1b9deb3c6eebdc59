"""RMS norm with a gate.   y = z·weight·silu(gate),   z = x·r,   r = 1 / sqrt(mean(x²) + ε), along the last axis

Adjoint, given dy, with u = dy·silu(gate) and a = u·weight:   dx      = r·(a − z·mean(a·z))
                                                              dgate   = dy·z·weight·silu'(gate)
                                                              dweight = Σ u·z over all rows

Saves x, the gate and the weight. Under autocast nothing is cast: a norm keeps the dtypes that it is given.
"""

from jaxtyping import Float
from torch import Tensor

from adjoint.core.arguments import require_flag, require_like
from adjoint.core.layout import empty_like
from adjoint.core.op import Adjoint, Op
from adjoint.core.preference import Preference
from adjoint.device.rows import describe
from adjoint.ops.norm import plans
from adjoint.ops.norm.arguments import require_rows, require_weight


def _check(x: Tensor, weight: Tensor, gate: Tensor, eps: float, round_before_gate: bool) -> None:
    require_rows("gated_rms_norm", x, eps)
    require_like("gated_rms_norm", "gate", gate, "x", x)
    require_weight("gated_rms_norm", weight, x)


_gated_rms_norm = Op(
    "gated_rms_norm",
    inputs=("x", "weight", "gate"),
    options="float eps, bool round_before_gate",
    outputs=("y",),
    check=_check,
    allocate=lambda x, *others: (empty_like(x),),
    describe=lambda x, weight, gate, *options: describe(x, weight, gate=gate),
    forward=lambda: plans.GATED_NORM,
    adjoint=Adjoint(
        lambda: plans.GATED_NORM_BACKWARD, lambda dy, x, weight, gate, *options: describe(x, weight, gate=gate, dy=dy)
    ),
)


@_gated_rms_norm.public
def gated_rms_norm(
    x: Float[Tensor, "*shape size"], gate: Float[Tensor, "*shape size"], weight: Float[Tensor, " size"], *,
    eps: float = 1e-6, round_before_gate: bool = False, preference: Preference | None = None,
) -> Float[Tensor, "*shape size"]:  # fmt: skip
    """y = x·r·weight·silu(gate), r = 1 / sqrt(mean(x²) + eps), along the last axis.

    Args:
        x: any shape with at least one axis, any strides; float64, float32, bfloat16 or float16, kept by the result.
        gate: like x, with strides of its own.
        weight: one number for each column; of the dtype of x, or float32.
        eps: the number that is added to the mean of squares; not negative.
        round_before_gate: whether x·r is rounded to the dtype of x before the product with the weight, as in Hugging
            Face's modules; by default only the result is rounded.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit, or eps is negative.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> gated_rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0]), torch.ones(2))
    tensor([0.0000, 0.8271])
    """
    require_flag("gated_rms_norm", "round_before_gate", round_before_gate)
    return _gated_rms_norm.call(x, weight, gate, eps, round_before_gate, preference=preference)  # type: ignore[no-any-return]
