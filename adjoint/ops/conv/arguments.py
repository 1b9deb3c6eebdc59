"""Checks of what metadata shows about x, weight, bias, states and bounds, and the value errors of the family."""

from typing import Any

import torch
from torch import Tensor

from adjoint.core.arguments import as_int, require_float32_or_like, require_floating, require_like
from adjoint.core.errors import ArgumentError, register_fault

MAX_WIDTH = 8
"""The most taps of a convolution. A tile's rows, and as many rows before and after them, stay in registers."""

MAX_PARTS = 4
"""The most parts that `split` may give. There is an operator for each number of parts."""

MAX_STEP_TOKENS = 16
"""The most tokens of a row that a step takes."""

NEED_X, NEED_WEIGHT, NEED_BIAS, NEED_STATE = (1 << bit for bit in range(4))
"""The bits of the gradients in the mask of a backward."""


def is_silu(op: str, activation: str | None) -> bool:
    if activation not in ("silu", None):
        raise ArgumentError(f"{op}: activation must be 'silu' or None, got {activation!r}")
    return activation == "silu"


def require_convolution(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Requires x [B, T, C], weight [C, W] with 1 to 8 taps, and bias [C]; weight and bias in the dtype of x or in
    float32."""
    require_floating(op, "x", x)
    if x.dim() != 3:
        raise ArgumentError(f"{op}: x must have the axes [batch, time, channels], got shape {tuple(x.shape)}")
    _require_parameter(op, "weight", weight, x)
    if weight.dim() != 2 or weight.shape[0] != x.shape[2]:
        expected = f"[{x.shape[2]} channels, width]"
        advice = "; that of an nn.Conv1d has them after weight.squeeze(1)" * (weight.dim() == 3)
        raise ArgumentError(f"{op}: weight must have the axes {expected}, got shape {tuple(weight.shape)}{advice}")
    if not 1 <= weight.shape[1] <= MAX_WIDTH:
        raise ArgumentError(
            f"{op}: the width, the last axis of weight, must be from 1 to {MAX_WIDTH}, got {weight.shape[1]}: a "
            f"program keeps a window of so many tokens in registers"
        )
    if bias is not None:
        _require_parameter(op, "bias", bias, x)
        if bias.shape != x.shape[2:]:
            raise ArgumentError(f"{op}: bias must have shape {tuple(x.shape[2:])}, got {tuple(bias.shape)}")


def _require_parameter(op: str, name: str, value: Tensor, x: Tensor) -> None:
    require_floating(op, name, value)
    require_float32_or_like(op, name, value, "x", x)
    if value.device != x.device:
        raise ArgumentError(f"{op}: {name} must be on the device of x, {x.device}, got {value.device}")


def require_state(op: str, name: str, state: Tensor, number: int, x: Tensor, weight: Tensor) -> None:
    """Requires states [number, C, W − 1] in the dtype of x, because a state is a copy of tokens."""
    require_floating(op, name, state)
    require_like(op, name, state, "x", x, (number, x.shape[2], weight.shape[1] - 1))


def parts_of(op: str, split: Any, channels: int) -> tuple[int, ...]:
    """The channels of each part, from the caller's `split`, which is checked."""
    if not isinstance(split, tuple | list | torch.Size):
        raise ArgumentError(f"{op}: split must be a tuple with the channels of each part, got {type(split).__name__}")
    parts = tuple(map(as_int, split))
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | torch.SymInt) or part < 0:
            raise ArgumentError(f"{op}: split must hold whole numbers that are not negative, got {part!r} in {parts}")
    if not 1 <= len(parts) <= MAX_PARTS:
        raise ArgumentError(f"{op}: split must have 1 to {MAX_PARTS} parts, got {len(parts)}")
    if sum(parts) != channels:
        raise ArgumentError(f"{op}: split must add up to the {channels} channels of x, got {parts}: {sum(parts)}")
    return parts


# ---------------------------------------------------------------------------------------------- value errors

SEQUENCES_OUT_OF_ORDER = register_fault(
    "causal_conv1d: cu_seqlens must begin with 0, never descend, and end with the number of tokens, got {value} at "
    "position {position} of cu_seqlens"
)
STATE_INDEX_OUT_OF_RANGE = register_fault(
    "causal_conv1d_step: state_indices must be at least 0 and less than the number of states, or -1 for a row that is "
    "skipped, got {value} at position {position}"
)
STATE_INDEX_REPEATED = register_fault(
    "causal_conv1d_step: state_indices must not repeat, because two rows would write one state, got {value} again at "
    "position {position}"
)
