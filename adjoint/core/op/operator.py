"""Operators, each one direction of an op: how torch registers them, and when a call may bypass torch's dispatcher.

Operators are registered through torch's low-level interface, and an `autograd.Function` outside joins forward and
backward. A call then costs about a third of a call of `custom_op` with `register_autograd`, and
`torch.compile(fullgraph=True)` and `opcheck` work. No other module touches `torch.library`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.nn import Parameter

from adjoint.core import kernels
from adjoint.core.errors import Unsupported
from adjoint.core.op.flops import Flops, count, no_products
from adjoint.core.plan import Candidate, Plan, first_use, forget_plans, select
from adjoint.core.problem import Problem

DEVICES = ("cpu", "cuda")
"""The device types for which operators are registered."""


@dataclass
class Operator:
    """One direction of an op (`swiglu`, `swiglu_backward`): its arguments, its outputs and its candidates.

    Attributes:
        name: its name in `torch.ops.adjoint`.
        outputs: the names of the results, or of the tensors that it overwrites.
        tensors: the names of its tensor arguments, which come first. An optional one may be None, but never the first.
        check: raises `ArgumentError` for arguments whose metadata is wrong.
        allocate: gives empty outputs for some arguments; the shape function is the same code.
        describe: gives the `Problem` of some arguments.
        candidates: a function that returns the candidates, best first. It is a function so that defining an op imports
            no kernel.
        assemble: for a backward whose results are not the gradients: `assemble(results, arguments)` gives a gradient
            for each output.
        flops: the operations of its matrix products, as torch counts them.
        call: the registered operator.
        plans: the plans chosen so far, by problem and preference.
        has_warned: whether a call has warned that none of its plans was repeatable.
    """

    name: str
    outputs: tuple[str, ...]
    tensors: tuple[str, ...]
    check: Callable[..., None]
    allocate: Callable[..., tuple[Tensor, ...]]
    describe: Callable[..., Problem]
    candidates: Callable[[], tuple[Candidate, ...]]
    assemble: Callable[[Any, tuple[Any, ...]], tuple[Tensor, ...]] | None = None
    flops: Flops = no_products
    call: Any = None
    plans: dict[tuple[Problem, str], Plan] = field(default_factory=dict, repr=False)
    has_warned: bool = False

    def __call__(self, *arguments: Any) -> Any:
        """Runs the operator on its arguments, of which the last is the preference's string.

        The call goes through torch's dispatcher wherever anything could be listening there: a compiler, a mode, a
        tensor subclass, a transform or the profiler. Otherwise it goes straight to the launch, because entering Python
        through the dispatcher costs as much as all the rest of a call.
        """
        tensors = arguments[: len(self.tensors)]
        if torch.compiler.is_compiling():
            return self.call(*arguments)
        if _is_heard(tensors):
            refuse_transforms(self.name, tensors)
            return self.call(*arguments)
        results = self.launch(arguments[:-1], arguments[-1])
        return results[0] if len(self.outputs) == 1 and results else results

    def launch(self, arguments: tuple[Any, ...], preference: str) -> tuple[Tensor, ...]:
        """Chooses a plan and runs it. The registered operator does this on every device."""
        problem = self.describe(*arguments)
        plan = self.plans.get((problem, preference))
        if plan is None:
            plan = select(self, problem, preference)
        return plan.execute(arguments)


_library = torch.library.Library("adjoint", "DEF")
_operators: dict[str, Operator] = {}


def register(
    operator: Operator, *, tensors: tuple[str, ...], options: str, results: int, overwritten: tuple[str, ...] = ()
) -> Operator:
    """Registers `torch.ops.adjoint.<name>(<tensors>, <options>, str preference)`.

    A gradient that nobody needs takes a bit of a mask and an output of size 0, and no further schema.

    Args:
        operator: the operator without `call`, which is made here.
        tensors: the names of its tensors, with a "?" behind those that may be None.
        options: the options behind the tensors, as a schema writes them.
        results: how many tensors it returns.
        overwritten: the names of the tensors that it writes to.
    """
    name, check, letters = operator.name, operator.check, iter("abcdefgh")
    arguments = []
    for tensor in tensors:
        label = tensor.removesuffix("?")
        alias = f"({next(letters)}!)" if label in overwritten else ""
        arguments.append(f"Tensor{alias}{'?' * tensor.endswith('?')} {label}")
    arguments += [options] * bool(options) + ["str preference"]
    returns = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    _library.define(f"{name}({', '.join(arguments)}) -> {returns}")

    def unwrap(values: tuple[Tensor, ...]) -> Any:
        return None if results == 0 else values[0] if len(values) == 1 else values

    def run(*arguments: Any) -> Any:
        check(*arguments[:-1])
        with torch.no_grad():  # a direct call on a tensor that requires a gradient records none
            return unwrap(operator.launch(arguments[:-1], arguments[-1]))

    def shape(*arguments: Any) -> Any:
        if results:  # the check of an operator that overwrites its arguments reads addresses, which fakes do not have
            check(*arguments[:-1])
        return unwrap(operator.allocate(*arguments[:-1]))

    for device in DEVICES:
        _library.impl(name, run, device.upper())
    torch.library.register_fake(f"adjoint::{name}", shape, lib=_library)
    packet = getattr(torch.ops.adjoint, name)
    operator.call = packet.default
    count(packet, [argument.name for argument in operator.call._schema.arguments], operator.flops)
    _operators[name] = operator
    return operator


def register_as_one(schema: str, run: Callable[..., Any], shape: Callable[..., Any]) -> Any:
    """Registers several calls of torch on the CPU as one operator, for compilers that cannot trace them; it is no op.

    Args:
        schema: its name in `torch.ops.adjoint`, its arguments and its results, as torch writes them.
        run: makes the calls.
        shape: gives empty results.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CPU")
    torch.library.register_fake(f"adjoint::{name}", shape, lib=_library)
    return getattr(torch.ops.adjoint, name).default


def operators() -> list[Operator]:
    """Every operator registered so far."""
    return list(_operators.values())


def forget() -> None:
    """Forgets every chosen plan and every compiled kernel, so that the next call is again the first."""
    forget_plans(operators())
    kernels.forget()
    first_use.forget()


# ------------------------------------------------------------------------------------------ torch's dispatcher

_PLAIN = frozenset((Tensor, Parameter))
dispatch_modes = torch._C._len_torch_dispatch_stack
transform = torch._C._functorch.peek_interpreter_stack  # the innermost of torch.func's that is active, or None
is_batched = torch._C._functorch.is_legacy_batchedtensor  # what is_grads_batched=True makes


def _is_heard(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether anything could notice that a call with these tensors bypasses the dispatcher."""
    for tensor in tensors:
        if tensor is None:  # an optional argument that is absent
            continue
        if type(tensor) not in _PLAIN or tensor.is_meta or tensor.is_neg() or tensor._is_zerotensor():
            return True
        if is_batched(tensor):
            return True
    return bool(
        dispatch_modes() or transform() is not None or forward_ad._current_level >= 0 or profiler._is_profiler_enabled
    )


def refuse_transforms(op: str, tensors: tuple[Tensor | None, ...]) -> None:
    """Raises under torch.func's transforms and forward-mode gradients, which would lose derivatives in silence."""
    present = [tensor for tensor in tensors if tensor is not None]
    if transform() is not None or any(map(is_batched, present)):
        raise Unsupported(
            f"{op}: torch.func transforms (vmap, grad, jvp) and batched gradients are not supported; "
            f"use the op outside the transform, with torch.autograd"
        )
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in present):
        raise Unsupported(f"{op}: forward-mode gradients are not implemented; use reverse mode (backward)")
