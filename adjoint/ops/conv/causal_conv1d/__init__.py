"""Causal depthwise convolution.   z_t = bias + Σ_j weight[:, j]·x_{t−W+1+j},   y = z, or silu(z)

of each channel of each sequence. Before a sequence's first token lie the W − 1 columns of its initial state, or zeros;
the final state is its last W − 1 tokens, those of the initial state included.

Adjoint, with dz = dy·act'(z):   dx_s = Σ_k weight[:, W−1−k]·dz_{s+k}, and the final state's gradient where s is in it
                                 dweight_j = Σ_t dz_t·x_{t−W+1+j},   dbias = Σ_t dz_t
                                 dinitial_state is dx of the tokens before the first

Saves its inputs; z is computed again. y may be in several parts along the channels: there is an operator for each
number of parts, since the number of an operator's outputs is fixed. Under autocast nothing is cast.
"""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_flag
from adjoint.core.layout import empty_like
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.preference import Preference
from adjoint.device.sequences import count_sequences, require_cu_seqlens
from adjoint.ops.conv import plans
from adjoint.ops.conv.arguments import MAX_PARTS, is_silu, parts_of, require_convolution, require_state
from adjoint.ops.conv.flops import convolution, convolution_backward
from adjoint.ops.conv.shape import describe, part_names

_OP = "causal_conv1d"
_INPUTS = ("x", "weight", "bias?", "initial_state?", "cu_seqlens?")


def _check(*arguments: Any) -> None:
    x, weight, bias, initial_state, cu_seqlens, _silu, _output_final_state, *parts = arguments
    require_convolution(_OP, x, weight, bias)
    require_cu_seqlens(_OP, cu_seqlens, x, "x")
    if initial_state is not None:
        number = count_sequences(x, cu_seqlens)
        require_state(_OP, "initial_state", initial_state, number, x, weight)
    if parts:
        parts_of(_OP, parts, x.shape[2])


def _allocate(*arguments: Any) -> tuple[Tensor, ...]:
    x, weight, _bias, _initial_state, cu_seqlens, _silu, output_final_state, *parts = arguments
    y = [x.new_empty((*x.shape[:2], size)) for size in parts] if parts else [empty_like(x)]
    if not output_final_state:
        return *y, x.new_empty(0)
    return *y, x.new_empty((count_sequences(x, cu_seqlens), x.shape[2], weight.shape[1] - 1))


def _describe(*arguments: Any) -> Facts:
    x, weight, bias, initial_state, cu_seqlens, _silu, _output_final_state, *parts = arguments
    number = count_sequences(x, cu_seqlens)
    return describe(x, weight, bias, initial_state, cu_seqlens, number, part_count=max(1, len(parts)))


def _absent(*arguments: Any) -> tuple[str, ...]:
    _silu, output_final_state, *_ = arguments[len(_INPUTS) :]
    return () if output_final_state else ("final_state",)


def _declare(count: int) -> Op:
    """Declares the op that gives `count` parts."""
    upstream = (*part_names(count, "dy"), "dfinal_state")

    def describe_backward(*arguments: Any) -> Facts:
        gradients = dict(zip(upstream, arguments, strict=False))
        x, weight, bias, initial_state, cu_seqlens, *_ = arguments[count + 1 :]
        number = count_sequences(x, cu_seqlens)
        return describe(x, weight, bias, initial_state, cu_seqlens, number, gradients, count)

    sizes = "".join(f", int part_{number}" for number in range(count)) if count > 1 else ""
    return Op(
        _OP if count == 1 else f"{_OP}_{count}",
        label=_OP,
        inputs=_INPUTS,
        differentiable=("x", "weight", "bias", "initial_state"),
        options=f"bool silu, bool output_final_state{sizes}",
        outputs=(*part_names(count, "y"), "final_state"),
        absent=_absent,
        check=_check,
        allocate=_allocate,
        describe=_describe,
        forward=lambda: plans.CONV[count],
        flops=convolution,
        adjoint=Adjoint(lambda: plans.CONV_BACKWARD[count], describe_backward, flops=convolution_backward(count)),
    )


_ops = {count: _declare(count) for count in range(1, MAX_PARTS + 1)}


@_ops[1].public
def causal_conv1d(
    x: Float[Tensor, "batch time channels"],
    weight: Float[Tensor, "channels width"],
    bias: Float[Tensor, " channels"] | None = None,
    *,
    activation: str | None = "silu",
    initial_state: Float[Tensor, "sequences channels past"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    split: tuple[int, ...] | None = None,
    preference: Preference | None = None,
) -> Any:
    """y_t = act(bias + Σ_j weight[:, j]·x_{t−W+1+j}) for each channel of each sequence, rounded once.

    Args:
        x: channels last, as a projection gives them, any strides: a slice of a wider projection, and the transposed
            view of [batch, channels, time], are read in place. float64, float32, bfloat16 or float16, kept by y.
        weight: 1 to 8 taps for each channel, that of the oldest token first; of the dtype of x, or float32.
        bias: a number for each channel; of the dtype of x, or float32.
        activation: "silu", or None for none.
        initial_state: the W − 1 tokens before each sequence, of the dtype of x; zeros by default.
        output_final_state: whether to return the last W − 1 tokens of each sequence as well.
        cu_seqlens: int32 or int64, ascending from 0 to T: the bounds of sequences that are packed in the only row of
            the batch. Without it every row is a sequence.
        split: the channels of each of up to four parts into which y is divided. Each part is a tensor of its own.
        preference: narrows the choice of plans for this call and its backward.

    Returns:
        y, or its parts; and the final states, [sequences, channels, width − 1], if they are asked for. If there is more
        than one of these, they are a tuple.

    Raises:
        ArgumentError: shapes, dtypes, devices or sizes are wrong, or (on the CPU) cu_seqlens are out of order; on a GPU
            `adjoint.check()` raises for values.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> x, weight = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1), torch.tensor([[1.0, 10.0]])
    >>> y, state = causal_conv1d(x, weight, activation=None, output_final_state=True)
    >>> y.flatten(), state.flatten()
    (tensor([10., 21., 32.]), tensor([3.]))
    """
    options: tuple[Any, ...] = (is_silu(_OP, activation), require_flag(_OP, "output_final_state", output_final_state))
    parts: tuple[int, ...] = ()
    if split is not None:
        require_convolution(_OP, x, weight, bias)
        parts = parts_of(_OP, split, x.shape[2])
    count = max(1, len(parts))
    op = _ops[count]
    options += parts if count > 1 else ()
    *y, final_state = op.call(x, weight, bias, initial_state, cu_seqlens, *options, preference=preference)
    if output_final_state:
        return *y, final_state
    return tuple(y) if split is not None else y[0]
