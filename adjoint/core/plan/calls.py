"""Calls of public functions: the operators that a call runs, and `plan`, which says how they would run."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.errors import ArgumentError
from adjoint.core.layout import to_meta
from adjoint.core.plan.execution import Plan
from adjoint.core.plan.selection import select
from adjoint.core.preference import Preference, resolve
from adjoint.core.problem import Problem

if TYPE_CHECKING:
    from adjoint.core.op.operator import Operator


@dataclass(frozen=True)
class Call:
    """The operators that a call of a public function runs, with their arguments.

    Attributes:
        operator: the forward.
        arguments: the arguments of the forward, tensors first; None for an optional tensor that is absent.
        adjoint: the backward, if there is one.
        adjoint_arguments: `(upstream, outputs) -> arguments` of an adjoint that computes every gradient. `upstream` has
            the gradients of the public outputs, and `outputs` has all outputs of the forward operator. It reads only
            metadata, because both are meta tensors inside `plan`.
        public_outputs: how many of the operator's outputs, from the first, the public function returns; None for all.
        elsewhere: makes the same call of meta tensors, for a public function that looks at the device of its tensors.
    """

    operator: "Operator"
    arguments: tuple[Any, ...]
    adjoint: "Operator | None" = None
    adjoint_arguments: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Any, ...]] | None = None
    public_outputs: int | None = None
    elsewhere: "Callable[[], Call] | None" = None

    def problems(self, device: torch.device) -> Iterator[tuple["Operator", Problem]]:
        """Both operators with their problems on a device, for upstream gradients that lie like the outputs."""
        if self.elsewhere is not None and self.arguments[0].device.type not in (device.type, "meta"):
            yield from self.elsewhere().problems(device)
            return
        yield self.operator, self.operator.describe(*self.arguments)._replace(device=device)
        if self.adjoint is not None and self.adjoint_arguments is not None:
            outputs = self.operator.allocate(*map(to_meta, self.arguments))
            arguments = self.adjoint_arguments(outputs[: self.public_outputs], outputs)
            yield self.adjoint, self.adjoint.describe(*arguments)._replace(device=device)


_public: dict[Any, Callable[..., Call]] = {}


def publish(function: Any, bind: Callable[..., Call]) -> None:
    """Makes a public function known to `plan`. `bind` takes the function's arguments and validates them."""
    _public[function] = bind


def published() -> dict[str, Any]:
    """The public functions, by name."""
    return {function.__name__: function for function in _public}


def bind(function: Any, *arguments: Any, **keywords: Any) -> Call:
    """The operators that a call of a public function runs, with their arguments; nothing is computed.

    Raises:
        ArgumentError: the function is no op, or the arguments are wrong.
    """
    bind_call = _public.get(function) if callable(function) else None
    if bind_call is None:
        names = ", ".join(sorted(published()))
        raise ArgumentError(f"plan: {getattr(function, '__name__', function)!r} is not an op; ops are {names}")
    try:
        inspect.signature(bind_call).bind(*arguments, **keywords)
    except TypeError as error:
        raise ArgumentError(f"plan: {function.__name__}: {error}") from None
    return bind_call(*arguments, **keywords)


def plan(
    function: Any,
    *arguments: Any,
    preference: Preference | None = None,
    device: torch.device | str | None = None,
    target: str | None = None,
    **keywords: Any,
) -> Plan:
    """The plan that a call of a public function would use, with its adjoint; nothing is computed.

    Args:
        function: a public op, such as `adjoint.swiglu`.
        arguments: as for the call; they may be meta tensors.
        preference: narrows the choice further than `prefer(...)`, and wins where both set a field.
        device: for meta tensors, the device that the op would run on; by default the GPU if there is one.
        target: the architecture of a GPU that need not be present, such as "sm_90", in place of a device. Such a plan
            can be read, but not run. It has the schedule of the architecture.
        keywords: as for the call.

    Raises:
        ArgumentError: the arguments are wrong.
        Unsupported: no candidate meets the preference; the error lists each one with its reason.
    """
    call = bind(function, *arguments, **keywords)
    tensor = next(a for a in call.arguments if isinstance(a, Tensor))
    if target is not None:
        where = _device_of(target, device)
    else:
        where = _target_device(tensor.device, device)
    problems = [(operator, problem._replace(target=target or "")) for operator, problem in call.problems(where)]
    forward, *backward = [select(operator, problem, resolve(preference)) for operator, problem in problems]
    return replace(forward, adjoint=backward[0]) if backward else forward


def _device_of(target: str, device: torch.device | str | None) -> torch.device:
    """The device type of a target."""
    if device is not None:
        raise ArgumentError(f"plan: give device= or target=, not both; got {device} and {target}")
    if target not in kernels.TARGETS:
        raise ArgumentError(f"plan: unknown target {target!r}; targets are {', '.join(kernels.TARGETS)}")
    return torch.device(kernels.TARGETS[target][0])


def _target_device(actual: torch.device, device: torch.device | str | None) -> torch.device:
    if actual.type != "meta":
        if device is not None:
            raise ArgumentError(f"plan: device= is for meta tensors; these are on {actual}")
        return actual
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if target.type not in ("cpu", "cuda"):
        raise ArgumentError(f"plan: device must be the CPU or a CUDA device, got {target}")
    if torch.cuda.is_available() and (target.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(f"plan: there is no {target} here; there are {torch.cuda.device_count()} CUDA devices")
    if target.type == "cuda" and target.index is None:
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return target
