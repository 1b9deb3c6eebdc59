"""`RMSNorm` and `GatedRMSNorm` as modules: the state dicts are those of torch's and of Hugging Face's modules."""

from typing import overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adjoint.core.arguments import require_flag, require_size
from adjoint.core.preference import Preference
from adjoint.nn.plain import beside
from adjoint.ops.norm import gated_rms_norm, rms_norm
from adjoint.ops.norm.arguments import require_eps, require_number


class RMSNorm(nn.Module):
    """y = x·r·(offset + weight), r = 1 / sqrt(mean(x²) + eps), by `adjoint.rms_norm`.

    Args:
        size: columns of the last axis.
        eps: what is added to the mean of squares.
        offset: what is added to the weight, which begins at 1 − offset: 1.0 for Qwen3-Next's norms.
        device, dtype: of the weight.
        preference: narrows the choice of plans.

    Raises:
        ArgumentError: there are no columns, eps is negative, or an argument is not a number.

    >>> import torch
    >>> RMSNorm(2)(torch.tensor([3.0, 4.0]))
    tensor([0.8485, 1.1314], grad_fn=<_RmsNormBackward>)
    >>> RMSNorm(4, offset=1.0).weight
    Parameter containing:
    tensor([0., 0., 0., 0.], requires_grad=True)
    """

    def __init__(
        self,
        size: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        preference: Preference | None = None,
    ) -> None:
        super().__init__()
        size = require_size("RMSNorm", "size", size)
        require_eps("RMSNorm", eps)
        require_number("RMSNorm", "offset", offset)
        self.size, self.eps, self.offset, self.preference = size, eps, offset, preference
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1 - self.offset)

    @overload
    def forward(self, x: Float[Tensor, "*shape size"], residual: None = None) -> Float[Tensor, "*shape size"]: ...
    @overload
    def forward(self, x: Float[Tensor, "*shape size"], residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of x; with a residual, the norm of s = x + residual, and s itself."""
        return rms_norm(  # type: ignore[return-value]
            x, beside(self.weight, x), eps=self.eps, offset=self.offset, residual=residual, preference=self.preference
        )

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}" + (f", offset={self.offset}" if self.offset else "")


class GatedRMSNorm(nn.Module):
    """y = x·r·weight·silu(gate), r = 1 / sqrt(mean(x²) + eps), by `adjoint.gated_rms_norm`.

    Args:
        size: columns of the last axis.
        eps: what is added to the mean of squares.
        round_before_gate: whether x·r is rounded before it is multiplied by the weight, as in Hugging Face's modules.
        device, dtype: of the weight.
        preference: narrows the choice of plans.

    Raises:
        ArgumentError: there are no columns, eps is negative or not a number, or round_before_gate is not a flag.

    >>> import torch
    >>> GatedRMSNorm(2)(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.8271], grad_fn=<_GatedRmsNormBackward>)
    """

    def __init__(
        self,
        size: int,
        eps: float = 1e-6,
        *,
        round_before_gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        preference: Preference | None = None,
    ) -> None:
        super().__init__()
        size = require_size("GatedRMSNorm", "size", size)
        require_eps("GatedRMSNorm", eps)
        require_flag("GatedRMSNorm", "round_before_gate", round_before_gate)
        self.size, self.eps, self.round_before_gate, self.preference = size, eps, round_before_gate, preference
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(
        self, x: Float[Tensor, "*shape size"], gate: Float[Tensor, "*shape size"]
    ) -> Float[Tensor, "*shape size"]:
        return gated_rms_norm(
            x, gate, beside(self.weight, x), eps=self.eps, round_before_gate=self.round_before_gate,
            preference=self.preference,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}" + ", round_before_gate=True" * self.round_before_gate
