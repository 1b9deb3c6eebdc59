"""A stage of the gated delta rule: an operator, its adjoint, and what joins them.

The stages differ in their mathematics and in nothing else, so what every op needs (two operators, an
`autograd.Function`, a binding for plans) is made here once from what a stage says about itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjoint.core.arguments import require_floating, require_like
from adjoint.core.errors import second_derivative
from adjoint.core.guarantee import Guarantee
from adjoint.core.op import define
from adjoint.core.plan import Call, Candidate
from adjoint.core.preference import Preference, resolve
from adjoint.core.problem import Problem
from adjoint.ops.gated_delta.promises import eager_candidate

Promises = Callable[[Problem], dict[str, Guarantee]]
Describe = Callable[..., tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Definition:
    """What a stage says about itself.

    Attributes:
        name: of the operator and of the public function.
        inputs, outputs: names; every input is a floating tensor, and has a gradient.
        options: names and types of what follows `cu_seqlens`, as a schema writes them.
        check: `check(*inputs, cu_seqlens, *options)` raises for wrong metadata.
        allocate: the outputs, from the same arguments.
        forward: `forward(*inputs, cu_seqlens, *options, outputs)` writes them.
        backward: `backward(*inputs, *upstream, cu_seqlens, *options) -> gradients`; an upstream gradient that is absent
            is None.
        promises, adjoint_promises: the guarantee of each output, and of each gradient, of the path in plain PyTorch.
        kernels, adjoint_kernels: candidates before it, best first.
        describe, adjoint_describe: layout and sizes of a problem from all arguments but the options: what kernels need
            to choose and to divide their memory; by default the size of the last axis.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    options: str
    check: Callable[..., None]
    allocate: Callable[..., tuple[Tensor, ...]]
    forward: Callable[..., None]
    backward: Callable[..., tuple[Tensor, ...]]
    promises: Promises
    adjoint_promises: Promises
    kernels: tuple[Candidate, ...] = ()
    adjoint_kernels: tuple[Candidate, ...] = ()
    describe: Describe = lambda *arguments: ("", (arguments[0].shape[-1],))
    adjoint_describe: Describe = lambda *arguments: ("", (arguments[0].shape[-1],))


class Stage:
    """A stage that can be called, planned and differentiated."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        name, count = definition.name, len(definition.inputs)
        tensors = ", ".join(f"Tensor {x}" for x in definition.inputs)
        upstream = tuple(f"d{x}" for x in definition.outputs)
        options = f", {definition.options}" if definition.options else ""

        def kinds(arguments: tuple[Any, ...]) -> tuple[torch.dtype, ...]:
            return tuple(x.dtype for x in arguments[:count])

        def describe(op: str, given: int, own: Describe) -> Callable[..., Problem]:
            return lambda *a: Problem(op, a[0].device, kinds(a), *own(*a[:given]), a[given:])

        def check_backward(*arguments: Any) -> None:
            inputs, rest = arguments[:count], arguments[count + len(upstream) : -1]
            definition.check(*inputs, *rest)
            outputs = definition.allocate(*(x.to("meta") for x in inputs), *_meta(rest))
            for label, gradient, output in zip(upstream, arguments[count:], outputs, strict=False):
                if gradient is not None:
                    require_floating(name, label, gradient)
                    require_like(name, label, gradient.to("meta"), label[1:], output)

        def compute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
            with torch.no_grad():
                definition.forward(*arguments, outputs)

        def compute_backward(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
            with torch.no_grad():
                found = definition.backward(*arguments[:-1])
            for bit, (target, gradient) in enumerate(zip(outputs, found, strict=True)):
                if arguments[-1] >> bit & 1:
                    target.copy_(gradient)

        forward = (*definition.kernels, eager_candidate("eager.chunks", definition.promises, compute))
        in_pytorch = eager_candidate("eager.chunks", definition.adjoint_promises, compute_backward)
        adjoint = (*definition.adjoint_kernels, in_pytorch)
        self.operator = define(
            name,
            f"{tensors}, Tensor? cu_seqlens{options}",
            "Tensor" if len(definition.outputs) == 1 else f"({', '.join(['Tensor'] * len(definition.outputs))})",
            outputs=definition.outputs,
            tensors=(*definition.inputs, "cu_seqlens"),
            check=definition.check,
            allocate=definition.allocate,
            describe=describe(name, count + 1, definition.describe),
            candidates=lambda: forward,
        )
        self.adjoint = define(
            f"{name}_backward",
            f"{tensors}, {', '.join(f'Tensor? {x}' for x in upstream)}, Tensor? cu_seqlens{options}, int need",
            "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})",
            outputs=tuple(f"d{x}" for x in definition.inputs),
            tensors=(*definition.inputs, *upstream, "cu_seqlens"),
            check=check_backward,
            allocate=lambda *a: tuple(
                x.new_empty(x.shape if a[-1] >> bit & 1 else (0,)) for bit, x in enumerate(a[:count])
            ),
            describe=describe(f"{name}_backward", count + len(upstream) + 1, definition.adjoint_describe),
            candidates=lambda: adjoint,
        )
        self.function = _join(name, count, self.operator, self.adjoint)

    def __call__(self, *arguments: Any, preference: Preference | None) -> Any:
        """`arguments` are the inputs, cu_seqlens and the options."""
        self.definition.check(*arguments)
        text = resolve(preference)
        if torch.is_grad_enabled() and any(x.requires_grad for x in arguments[: len(self.definition.inputs)]):
            return self.function.apply(*arguments, text)
        return self.operator(*arguments, text)

    def bind(self, *arguments: Any) -> Call:
        self.definition.check(*arguments)
        count = len(self.definition.inputs)
        need = 2**count - 1
        return Call(
            self.operator,
            arguments,
            self.adjoint,
            lambda upstream, outputs: (*arguments[:count], *upstream, *arguments[count:], need),
        )


def _meta(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.to("meta") if isinstance(x, Tensor) else x for x in arguments)


def _join(name: str, count: int, operator: Any, adjoint: Any) -> Any:
    """The `autograd.Function` of a stage."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:  # type: ignore[override]
            *given, preference = arguments
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*given[: count + 1])
            ctx.options, ctx.preference, ctx.length = tuple(given[count + 1 :]), preference, len(arguments)
            return operator(*given, preference)

        @staticmethod
        def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise second_derivative(name)
            if all(gradient is None for gradient in upstream):
                return (None,) * ctx.length
            *inputs, cu_seqlens = ctx.saved_tensors
            need = sum(1 << bit for bit in range(count) if ctx.needs_input_grad[bit])
            found = adjoint(*inputs, *upstream, cu_seqlens, *ctx.options, need, ctx.preference)
            gradients = (found,) if count == 1 else found
            wanted = tuple(gradient if need >> bit & 1 else None for bit, gradient in enumerate(gradients))
            return (*wanted, *(None,) * (ctx.length - count))

    return Function
