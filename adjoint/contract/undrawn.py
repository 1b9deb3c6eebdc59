"""Inputs with constant values instead of random ones, for choosing plans, where drawing would take the most time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from adjoint.contract.cases import Case, Inputs


def undrawn(case: Case, dtype: torch.dtype) -> Inputs:
    """The inputs of a case on the CPU, for choosing plans and counting numbers: none of them is drawn."""
    with Undrawn():
        return case.make(dtype, torch.device("cpu"), torch.Generator().manual_seed(0))


class Undrawn(TorchFunctionMode):
    """In a block, `torch.randn` gives a constant."""

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not torch.randn:
            return function(*args, **kwargs)
        sizes = args[0] if args and not isinstance(args[0], int) else args
        return _constant(sizes, **{name: value for name, value in kwargs.items() if name in ("dtype", "device")})


def _constant(sizes: Any, **kind: Any) -> Tensor:
    return torch.full(tuple(sizes), 0.5, **kind)
