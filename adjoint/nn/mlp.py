"""`DenseMLP`: the SwiGLU feed-forward layer."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adjoint.core.arguments import require_size
from adjoint.nn.tokens import require_tokens, weight_of
from adjoint.ops.activation import swiglu


class DenseMLP(nn.Module):
    """y = down · swiglu(gate · x, up · x), by `adjoint.swiglu`.

    The state dict is that of Hugging Face's `Qwen3NextMLP` and `Qwen3_5MLP`: `gate_proj.weight` and `up_proj.weight`
    [intermediate, hidden], `down_proj.weight` [hidden, intermediate].

    Args:
        hidden_size: the number of columns of a token.
        intermediate_size: the number of columns of gate and up.
        device, dtype: those of the parameters.

    Raises:
        ArgumentError: a size is not positive.

    >>> import torch
    >>> DenseMLP(4, 6)(torch.zeros(2, 4)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden_size = require_size("DenseMLP", "hidden_size", hidden_size)
        intermediate_size = require_size("DenseMLP", "intermediate_size", intermediate_size)
        self.hidden_size = hidden_size
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False, **factory)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False, **factory)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, **factory)

    def forward(self, x: Float[Tensor, "*tokens hidden"]) -> Float[Tensor, "*tokens hidden"]:
        require_tokens("DenseMLP", x, self.hidden_size, weight_of(self.gate_proj))
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]
