"""`LinearCrossEntropy` as a module: the head of a language model, and its loss."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from adjoint.core.arguments import require_flag, require_size
from adjoint.core.errors import ArgumentError
from adjoint.core.preference import Preference
from adjoint.ops.loss import linear_cross_entropy
from adjoint.ops.loss.arguments import check_options, options
from adjoint.ops.loss.linear_cross_entropy import Reduction


class LinearCrossEntropy(nn.Linear):
    """The loss of labels by `adjoint.linear_cross_entropy`; without labels, the logits.

    It is a `torch.nn.Linear`, by default without a bias, with the same parameters, initial values and state dict. So it
    loads the `lm_head` of a Hugging Face model, and its weight can be tied to an embedding. Under autocast, hidden of
    another dtype than the weight is multiplied as in a `torch.nn.Linear`: both are cast to autocast's dtype.

    Args:
        in_features: the number of columns of hidden.
        out_features: the number of classes.
        bias: whether there is a bias.
        ignore_index, label_smoothing, z_loss, softcap, reduction, shift, return_log_probabilities: as for
            `adjoint.linear_cross_entropy`.
        device, dtype: those of the parameters.
        preference: narrows the choice of plans.

    Raises:
        ArgumentError: a size or an option is out of range, or, in a call without labels, hidden has other columns.

    >>> import torch
    >>> head = LinearCrossEntropy(2, 3)
    >>> _ = nn.init.zeros_(head.weight)
    >>> head(torch.ones(1, 4, 2), torch.tensor([[0, 1, 2, -100]]))
    tensor(1.0986, grad_fn=<_LinearCrossEntropyBackward>)
    >>> head(torch.ones(2)).shape
    torch.Size([3])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        reduction: Reduction = "mean",
        shift: bool = False,
        return_log_probabilities: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        preference: Preference | None = None,
    ) -> None:
        values = (ignore_index, label_smoothing, z_loss, softcap, reduction, shift, return_log_probabilities)
        check_options("LinearCrossEntropy", options("LinearCrossEntropy", *values))
        sizes = (("in_features", in_features), ("out_features", out_features))
        columns, classes = (require_size("LinearCrossEntropy", name, value) for name, value in sizes)
        super().__init__(columns, classes, require_flag("LinearCrossEntropy", "bias", bias), device, dtype)
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "softcap": softcap,
            "reduction": reduction,
            "shift": shift,
            "return_log_probabilities": return_log_probabilities,
        }
        self.preference = preference

    def forward(  # type: ignore[override]
        self, hidden: Float[Tensor, "*tokens columns"], labels: Int[Tensor, "*tokens"] | None = None
    ) -> Any:
        if labels is None:
            if not isinstance(hidden, Tensor) or hidden.shape[-1:] != (self.in_features,):
                got = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
                raise ArgumentError(
                    f"LinearCrossEntropy: hidden must be a tensor with {self.in_features} columns, got {got}"
                )
            logits = super().forward(hidden)
            cap = self.options["softcap"]
            return logits if cap is None else cap * torch.tanh(logits / cap)
        hidden, weight, bias = self._in_one_dtype(hidden)
        return linear_cross_entropy(hidden, weight, labels, bias=bias, preference=self.preference, **self.options)

    def _in_one_dtype(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden, weight and bias. Without autocast a mixture of dtypes stays, and the op names it."""
        weight, bias = self.weight, self.bias
        if (
            not isinstance(hidden, Tensor)
            or hidden.dtype == weight.dtype
            or torch.float64 in (hidden.dtype, weight.dtype)
            or not torch.is_autocast_enabled(hidden.device.type)
        ):
            return hidden, weight, bias
        dtype = torch.get_autocast_dtype(hidden.device.type)
        return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)

    def extra_repr(self) -> str:
        changed = {name: value for name, value in self.options.items() if value != _DEFAULTS[name]}
        return ", ".join([super().extra_repr(), *(f"{name}={value!r}" for name, value in changed.items())])


_DEFAULTS = {
    "ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "reduction": "mean", "shift": False,
    "return_log_probabilities": False,
}  # fmt: skip
