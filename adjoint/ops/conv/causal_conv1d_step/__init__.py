"""A few tokens of decoding.   z_t = bias + Σ_j weight[:, j]·x_{t−W+1+j},   y = z, or silu(z)

for up to 16 tokens of each row, after the W − 1 of its state. The adjoint, out of place only, is that of
`causal_conv1d`, where rows that share a state add up. Saves its inputs. In place is an op of its own, without an
adjoint.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_flag, require_floating, require_ids
from adjoint.core.errors import ArgumentError, is_checking
from adjoint.core.layout import empty_like, overlaps_itself
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.preference import Preference
from adjoint.ops.conv import plans
from adjoint.ops.conv.arguments import MAX_STEP_TOKENS, is_silu, require_convolution, require_state
from adjoint.ops.conv.flops import convolution, convolution_backward
from adjoint.ops.conv.shape import STEP, describe

_INPUTS = ("x", "weight", "bias?", "state", "state_indices?")


def _check(*arguments: Any) -> None:
    x, weight, bias, state, state_indices, *_ = arguments
    require_convolution(STEP, x, weight, bias)
    if not 1 <= x.shape[1] <= MAX_STEP_TOKENS:
        raise ArgumentError(
            f"{STEP}: takes 1 to {MAX_STEP_TOKENS} tokens of each row, got {x.shape[1]}; causal_conv1d takes sequences"
        )
    require_floating(STEP, "state", state)
    number = x.shape[0] if state_indices is None or state.dim() != 3 else state.shape[0]
    require_state(STEP, "state", state, number, x, weight)
    if state_indices is not None:
        require_ids(STEP, "state_indices", state_indices, "x", x)
        if state_indices.shape != x.shape[:1]:
            expected = f"shape {tuple(x.shape[:1])}, one for each row"
            raise ArgumentError(f"{STEP}: state_indices must have {expected}, got {tuple(state_indices.shape)}")


def _check_in_place(*arguments: Any) -> None:
    _check(*arguments)
    _x, _weight, _bias, state, *_ = arguments
    if overlaps_itself(state):
        raise ArgumentError(
            f"{STEP}: state, which in_place=True overwrites, has elements that share memory: shape "
            f"{tuple(state.shape)}, strides {state.stride()}; give it memory of its own, as by clone()"
        )


def _describe(*arguments: Any) -> Facts:
    x, weight, bias, state, state_indices, *_ = arguments
    return describe(x, weight, bias, state, state_indices, state.shape[0])


def _describe_backward(dy: Any, dnew_state: Any, *arguments: Any) -> Facts:
    x, weight, bias, state, state_indices, *_ = arguments
    upstream = {"dy": dy, "dnew_state": dnew_state}
    return describe(x, weight, bias, state, state_indices, state.shape[0], upstream)


_FORWARD: dict[str, Any] = {
    "inputs": _INPUTS,
    "options": "bool silu, bool checking",
    "describe": _describe,
    "flops": convolution,
}

_step = Op(
    STEP,
    **_FORWARD,
    differentiable=("x", "weight", "bias", "state"),
    outputs=("y", "new_state"),
    check=_check,
    allocate=lambda x, weight, bias, state, *others: (
        empty_like(x),
        x.new_empty((x.shape[0], *state.shape[1:])),
    ),
    forward=lambda: plans.STEP,
    adjoint=Adjoint(lambda: plans.STEP_BACKWARD, _describe_backward, flops=convolution_backward(1)),
)
_step_in_place = Op(
    f"{STEP}_in_place",
    **_FORWARD,
    label=STEP,
    differentiable=(),
    outputs=("y",),
    overwrites=("state",),
    check=_check_in_place,
    allocate=lambda x, *others: (empty_like(x),),
    forward=lambda: plans.STEP_IN_PLACE,
)


@_step.public
def causal_conv1d_step(
    x: Float[Tensor, "batch time channels"],
    state: Float[Tensor, "states channels past"],
    weight: Float[Tensor, "channels width"],
    bias: Float[Tensor, " channels"] | None = None,
    *,
    activation: str | None = "silu",
    state_indices: Int[Tensor, " batch"] | None = None,
    in_place: bool = False,
    preference: Preference | None = None,
) -> tuple[Float[Tensor, "batch time channels"], Float[Tensor, "states channels past"]]:
    """The causal convolution of the next 1 to 16 tokens of each row: y, and the state after them.

    Args:
        x, weight, bias, activation: as for `causal_conv1d`.
        state: the last W − 1 tokens of each row, or a pool of states that `state_indices` picks from; of the dtype of
            x.
        state_indices: int32 or int64, the state that each row reads and, in place, writes. −1 skips the row, whose
            outputs and new state are 0. Two rows of an in-place step must not share a state. Inside
            `adjoint.checked()` this is an error; elsewhere that state is undefined afterwards.
        in_place: whether to overwrite `state`, which is then returned, instead of returning the rows' new states. This
            is not differentiable.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: shapes, dtypes, devices or sizes are wrong, a gradient is asked of an in-place step, or (on the
            CPU) an index is out of range; on a GPU `adjoint.check()` raises for values.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> x, weight, state = torch.full((1, 1, 1), 3.0), torch.tensor([[1.0, 10.0]]), torch.full((1, 1, 1), 2.0)
    >>> y, state = causal_conv1d_step(x, state, weight, activation=None)
    >>> y.flatten(), state.flatten()
    (tensor([32.]), tensor([3.]))
    """
    arguments = (x, weight, bias, state, state_indices, is_silu(STEP, activation), is_checking())
    if not require_flag(STEP, "in_place", in_place):
        return _step.call(*arguments, preference=preference)  # type: ignore[no-any-return]
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in arguments[:4]):
        raise ArgumentError(
            f"{STEP}: in_place=True overwrites the state its gradient would need, and an input requires a gradient; "
            f"call it under torch.no_grad(), or with in_place=False"
        )
    return _step_in_place.call(*arguments, preference=preference), state
