"""A gated output.   y = x·σ(gate),   σ(t) = 1 / (1 + e^−t)

Adjoint, given dy:   dx    = dy·σ(gate)
                     dgate = dy·x·σ(gate)·(1 − σ(gate))

Saves x and gate. 1 − σ(gate) is computed as σ(−gate): a gate far above 0 keeps its gradient.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from adjoint.core.arguments import alike, require_floating, require_like, reuse_form
from adjoint.core.op import Adjoint, Op
from adjoint.core.preference import Preference
from adjoint.ops.activation.plans import describe, reuse
from adjoint.ops.activation.sigmoid_gate import plans


def _check(x: Tensor, gate: Tensor) -> None:
    if not alike(x, gate):
        require_floating("sigmoid_gate", "x", x)
        require_like("sigmoid_gate", "gate", gate, "x", x)


_sigmoid_gate = Op(
    "sigmoid_gate",
    inputs=("x", "gate"),
    outputs=("y",),
    check=_check,
    allocate=lambda x, gate: (torch.empty_like(x),),
    gradient=torch.empty_like,
    describe=lambda x, gate: describe((gate, x), like=(x,)),
    forward=lambda: plans.SIGMOID_GATE,
    adjoint=Adjoint(
        lambda: plans.SIGMOID_GATE_BACKWARD, lambda dy, x, gate, need: describe((dy, gate, x), like=(gate, x))
    ),
    alternatives=reuse(lambda: plans.SIGMOID_GATE_REUSE),
)


@_sigmoid_gate.public
def sigmoid_gate(
    x: Float[Tensor, "*shape"], gate: Float[Tensor, "*shape"], *, reuse_inputs: bool = False,
    preference: Preference | None = None,
) -> Float[Tensor, "*shape"]:  # fmt: skip
    """y = x·σ(gate), elementwise: the gated output of an attention.

    Args:
        x: any shape, any strides; float64, float32, bfloat16 or float16, kept by the result.
        gate: like `x`, with strides of its own.
        reuse_inputs: whether the backward writes the gradients over the inputs instead of into new memory. The inputs
            are lost after backward, and a second backward raises.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: shapes, dtypes or devices differ, or a dtype is not floating.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> accurate = Preference(plan="eager")
    >>> sigmoid_gate(torch.tensor([2.0, 2.0, 2.0]), torch.tensor([-90.0, 0.0, 1.0]), preference=accurate)
    tensor([1.6388e-39, 1.0000e+00, 1.4621e+00])
    """
    form = "" if reuse_inputs is False else reuse_form("sigmoid_gate", reuse_inputs)
    return _sigmoid_gate.call(x, gate, preference=preference, form=form)  # type: ignore[no-any-return]
