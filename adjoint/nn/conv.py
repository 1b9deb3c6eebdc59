"""`CausalConv1d` as a module: its state dict is that of the depthwise `conv1d` of Hugging Face's modules."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adjoint.core.arguments import require_flag, require_integer, require_size
from adjoint.core.errors import ArgumentError
from adjoint.core.preference import Preference
from adjoint.nn.plain import beside
from adjoint.ops.conv import causal_conv1d, causal_conv1d_step
from adjoint.ops.conv.arguments import MAX_WIDTH, is_silu


class CausalConv1d(nn.Module):
    """y_t = act(bias + Σ_j weight[:, 0, j]·x_{t−W+1+j}), by `adjoint.causal_conv1d`; x is [batch, time, channels].

    The weight is [channels, 1, width] and has the same initial values as that of
    `nn.Conv1d(channels, channels, width, groups=channels)`.

    Args:
        channels: the number of channels of x.
        width: the number of taps of each channel, 1 to 8.
        bias: whether there is a bias; Qwen3-Next has none.
        activation: "silu", or None.
        device, dtype: those of the parameters.
        preference: narrows the choice of plans.

    Raises:
        ArgumentError: there are no channels, the width is out of range, or the activation is unknown.

    >>> import torch
    >>> module = CausalConv1d(2, 4)
    >>> module(torch.zeros(1, 3, 2)).shape, module.weight.shape
    (torch.Size([1, 3, 2]), torch.Size([2, 1, 4]))
    """

    def __init__(
        self,
        channels: int,
        width: int,
        bias: bool = False,
        *,
        activation: str | None = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        preference: Preference | None = None,
    ) -> None:
        super().__init__()
        channels = require_size("CausalConv1d", "channels", channels)
        if not 1 <= (width := require_integer("CausalConv1d", "width", width)) <= MAX_WIDTH:
            raise ArgumentError(f"CausalConv1d: width must be from 1 to {MAX_WIDTH}, got {width}")
        is_silu("CausalConv1d", activation)
        self.channels, self.width, self.activation, self.preference = channels, width, activation, preference
        self.weight = nn.Parameter(torch.empty(channels, 1, width, device=device, dtype=dtype))
        has_bias = require_flag("CausalConv1d", "bias", bias)
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if has_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters uniformly within ±1/sqrt(width), as `nn.Conv1d` does."""
        bound = self.width**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self,
        x: Float[Tensor, "batch time channels"],
        *,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        split: tuple[int, ...] | None = None,
    ) -> Any:
        """See `adjoint.causal_conv1d`."""
        return causal_conv1d(
            x, *self._matrices(x), activation=self.activation, initial_state=initial_state,
            output_final_state=output_final_state, cu_seqlens=cu_seqlens, split=split, preference=self.preference,
        )  # fmt: skip

    def step(
        self, x: Tensor, state: Tensor, *, state_indices: Tensor | None = None, in_place: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The outputs of the next tokens of each row, and the state after them: see `adjoint.causal_conv1d_step`."""
        return causal_conv1d_step(
            x, state, *self._matrices(x), activation=self.activation, state_indices=state_indices,
            in_place=in_place, preference=self.preference,
        )  # fmt: skip

    def _matrices(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias in the form that the ops take."""
        return beside(self.weight, x).squeeze(1), None if self.bias is None else beside(self.bias, x)

    def extra_repr(self) -> str:
        bias = ", bias=True" if self.bias is not None else ""
        return f"{self.channels}, {self.width}{bias}, activation={self.activation!r}"
