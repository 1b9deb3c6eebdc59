"""The audit of a user's own model: every op, on the tensors that really flow, beside float64 and its bound."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adjoint.core.errors import ArgumentError
from adjoint.core.op.observation import observed
from adjoint.verify.audit.observer import Entry, Observer
from adjoint.verify.audit.report import Report
from adjoint.verify.audit.sampling import MOST_TOKENS, sample

__all__ = ["Entry", "Report", "audit", "sample"]


def audit(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    max_tokens: int = MOST_TOKENS,
) -> Report:
    """Runs a model forward and backward on a batch, and compares every adjoint op in it with float64.

    Each call is compared when it happens, on its own tensors: the outputs after the forward, and the gradients when
    autograd has computed them. Only numbers are kept. Parameters and their gradients stay as they are.

    Args:
        model: any module that calls ops of adjoint, for example `models.HybridLM` or a patched model of transformers.
        batch: the model's input: a tensor, a tuple of arguments, or a mapping of keywords.
        loss: makes a number from the model's outputs. By default this is the outputs' `loss`; if they have none, it is
            the sum, over the floating tensors among them that have a gradient, of the mean squares.
        max_tokens: the most tokens to compare. A longer batch is cut down to some of its items: see `sample`.

    Returns:
        A report. `print(report)` shows it, `report.broken` lists the results past their bounds, and
        `report.save(path)` writes it.

    >>> import adjoint
    >>> report = adjoint.audit(adjoint.nn.RMSNorm(8), torch.randn(4, 8))
    >>> report.is_sound, sorted({entry.output for entry in report.entries})
    (True, ['dweight', 'y'])
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"audit: model must be a torch.nn.Module, got {type(model).__name__}")
    positional, named = _arguments(sample(batch, max_tokens))
    parameters = {name: x for name, x in model.named_parameters() if x.requires_grad}
    observer = Observer(model)
    try:
        with observed(observer), torch.enable_grad():
            outputs = model(*positional, **named)
            number = _number(outputs, loss)
            if number is not None and number.requires_grad and parameters:
                torch.autograd.grad(number, list(parameters.values()), allow_unused=True)
    finally:
        observer.close()
    strange = [
        f"{name} is not finite in {int((~x.isfinite()).sum())} of {x.numel()} places"
        for name, x in (*model.named_parameters(), *model.named_buffers())
        if x.is_floating_point() and not bool(x.isfinite().all())
    ]
    has_backward = any(entry.direction == "backward" for entry in observer.entries)
    return Report(observer.entries, strange, has_backward, None if number is None else float(number.detach()))


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, list | tuple) else (batch,)), {}


def _number(outputs: Any, loss: Callable[[Any], Tensor] | None) -> Tensor | None:
    """The number to differentiate; None if the model returns nothing that has a gradient."""
    if loss is not None:
        return loss(outputs)
    own = getattr(outputs, "loss", None)
    if isinstance(own, Tensor):
        return own
    tensors = [x for x in _tensors(outputs) if x.is_floating_point() and x.requires_grad]
    return torch.stack([x.float().square().mean() for x in tensors]).sum() if tensors else None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in values for tensor in _tensors(part)]
