"""When a call may go past torch's dispatcher, and what must not happen in silence when it does not."""

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.nn import Parameter

from adjoint.core.errors import Unsupported


def listening(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether calling these tensors' operator past the dispatcher could be noticed."""
    for tensor in tensors:
        if tensor is None:  # an optional argument that is not given
            continue
        if type(tensor) not in _PLAIN or tensor.is_meta or tensor.is_neg() or tensor._is_zerotensor():
            return True
        if _is_batched(tensor):
            return True
    return bool(
        _dispatch_modes()
        or _transforms() is not None
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
    )


def refuse_transforms(op: str, tensors: tuple[Tensor | None, ...]) -> None:
    """Raises under what would lose derivatives in silence: torch.func's transforms and forward-mode gradients."""
    if _transforms() is not None or any(tensor is not None and _is_batched(tensor) for tensor in tensors):
        raise Unsupported(
            f"{op}: torch.func transforms (vmap, grad, jvp) and batched gradients are not supported; "
            f"use the op outside the transform, with torch.autograd"
        )
    given = (tensor for tensor in tensors if tensor is not None)
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in given):
        raise Unsupported(f"{op}: forward-mode gradients are not implemented; use reverse mode (backward)")


_PLAIN = frozenset((Tensor, Parameter))


_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # what is_grads_batched=True makes
