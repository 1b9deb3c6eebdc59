"""The rules of an adjoint that overwrites the inputs the forward saved with their gradients."""

from typing import Any

import torch
from torch import Tensor

from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.core.layout import overlaps_itself, share_memory


def check_reusable(op: str, **saved: Tensor) -> None:
    """Raises unless each saved tensor has one place for each of its gradient's elements."""
    if torch.compiler.is_compiling():
        raise Unsupported(
            f"{op}: reuse_inputs=True is not available under torch.compile, which plans the memory of the "
            f"backward itself; leave reuse_inputs out there"
        )
    for name, tensor in saved.items():
        if overlaps_itself(tensor):
            raise ArgumentError(
                f"{op}: reuse_inputs=True needs {name} to hold each element once, but its strides "
                f"{tensor.stride()} for shape {tuple(tensor.shape)} overlap; pass a contiguous copy"
            )
    if len(saved) == 2 and share_memory(*saved.values()):
        raise ArgumentError(
            f"{op}: reuse_inputs=True needs {' and '.join(saved)} in separate memory, but they overlap; "
            f"pass copies, or leave reuse_inputs out"
        )


def apart(dy: Tensor, *saved: Tensor) -> Tensor:
    """The upstream gradient, copied if overwriting the saved tensors would change it."""
    return dy.clone() if overlaps_itself(dy) or any(share_memory(dy, tensor) for tensor in saved) else dy


def claim_saved(op: str, context: Any) -> tuple[Tensor, ...]:
    """The saved tensors, for the one backward that may overwrite them."""
    if getattr(context, "spent", False):
        raise Unsupported(
            f"{op}: a second backward, but the first one overwrote the saved inputs with their gradients, as "
            f"reuse_inputs=True asked; leave reuse_inputs out to run backward more than once"
        )
    saved = context.saved_tensors
    context.spent = True
    return saved


def mark_overwritten(*tensors: Tensor) -> None:
    """Tells autograd, so that another op that saved the same tensors raises instead of reading gradients."""
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)
