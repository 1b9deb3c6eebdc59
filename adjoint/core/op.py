"""`define()`: the only code that touches `torch.library`.

Operators are registered through the low-level interface, and an `autograd.Function` outside joins
forward and backward: that costs about a third of `custom_op` with `register_autograd` a call, and
works with `torch.compile(fullgraph=True)` and `opcheck`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adjoint.core.plan import Candidate, Operator, register_operator
from adjoint.core.problem import Problem

DEVICES = ("cpu", "cuda")
"""Device types operators are registered for."""

_library = torch.library.Library("adjoint", "DEF")


def define(
    name: str,
    arguments: str,
    returns: str,
    *,
    outputs: tuple[str, ...],
    tensors: tuple[str, ...],
    check: Callable[..., None],
    allocate: Callable[..., tuple[Tensor, ...]],
    describe: Callable[..., Problem],
    candidates: Callable[[], tuple[Candidate, ...]],
) -> Operator:
    """Registers `torch.ops.adjoint.<name>(<arguments>, str preference) -> <returns>`.

    The remaining arguments are those of `Operator`. Tensors come first and positional; a gradient
    nobody needs is a bit of a mask and an output of size 0, not another schema.
    """
    operator = Operator(name, outputs, tensors, check, allocate, describe, candidates)
    _library.define(f"{name}({arguments}, str preference) -> {returns}")

    def unwrap(results: tuple[Tensor, ...]) -> Any:
        return None if returns == "()" else results[0] if len(results) == 1 else results

    def run(*everything: Any) -> Any:
        check(*everything[:-1])
        with torch.no_grad():  # called directly, on a tensor that requires a gradient, it records none
            return unwrap(operator.launch(everything[:-1], everything[-1]))

    def shape(*everything: Any) -> Any:
        if returns != "()":  # an operator that overwrites its arguments also checks addresses: real ones only
            check(*everything[:-1])
        return unwrap(allocate(*everything[:-1]))

    for device in DEVICES:
        _library.impl(name, run, device.upper())
    torch.library.register_fake(f"adjoint::{name}", shape, lib=_library)
    operator.call = getattr(torch.ops.adjoint, name).default
    register_operator(operator)
    return operator
