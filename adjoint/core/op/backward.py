"""The machinery of a declared backward: its operator, the `autograd.Function` that runs it, and its rules."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adjoint.core.arguments import require_floating, require_like
from adjoint.core.errors import ArgumentError, Unsupported, second_derivative
from adjoint.core.layout import overlaps_itself, share_memory, to_meta
from adjoint.core.op.operator import Operator, dispatch_modes, register
from adjoint.core.problem import Problem

if TYPE_CHECKING:
    from adjoint.core.op import Adjoint, Op


class Backward:
    """One form of an op's backward: its operator, and the `autograd.Function` that runs it.

    Attributes:
        saves: the names of the forward's inputs and outputs that the backward reads.
        has_mask: whether the operator takes `need`. An op with one gradient does not.
        function: the `autograd.Function`, whose `apply` a compiler can trace.
        apply: `function.apply` without its look for torch.func's transforms, which halves its time; only for use
            outside of them.
    """

    def __init__(self, op: "Op", adjoint: "Adjoint") -> None:
        self.op, self.adjoint = op, adjoint
        self.has_mask = len(op.differentiable) > 1
        upstream = op.upstream if len(op.upstream) == 1 else tuple(f"{x}?" for x in op.upstream)
        saves = adjoint.saves or (*(f"{x}?" if x in op.optional else x for x in op.inputs), *op.kept)
        tensors = (*upstream, *saves, *adjoint.buffers)
        self.saves = tuple(x.removesuffix("?") for x in saves)
        forward_tensors = (*op.inputs, *op.outputs, *op.kept)
        self._sources = tuple(map(forward_tensors.index, self.saves))
        gradients = adjoint.gradients or tuple(f"d{x}" for x in op.differentiable)
        options = op.options if adjoint.options is None else adjoint.options
        overwritten = (*(op.differentiable if adjoint.overwrites else ()), *adjoint.buffers)
        self._places = tuple(self.saves.index(x) for x in op.differentiable if x in self.saves)

        name, describe_facts = f"{op.name}_{adjoint.name}", adjoint.describe
        tensor_count, has_lists = len(tensors), "[]" in options
        present = 0 if len(upstream) == 1 else len(upstream)  # if there are several upstream gradients, any may be None

        def describe(*arguments: Any) -> Problem:
            values = arguments[tensor_count:]
            if has_lists:
                values = _hashable(values)
            facts = (name, arguments[present].device, *describe_facts(*arguments), values, "")
            return tuple.__new__(Problem, facts)  # a third of what the named constructor costs

        self.operator = register(
            Operator(
                name,
                outputs=gradients,
                tensors=tuple(x.removesuffix("?") for x in tensors),
                check=self._check,
                allocate=(lambda *arguments: ()) if overwritten else adjoint.allocate or self._allocate,
                describe=describe,
                candidates=adjoint.candidates,
                assemble=adjoint.assemble,
                flops=adjoint.flops,
            ),
            tensors=tensors,
            overwritten=overwritten,
            options=", ".join(filter(None, (options, "int need" * self.has_mask))),
            results=0 if overwritten else len(gradients),
        )
        self.function = self._make_function()
        self.apply: Any = super(torch.autograd.Function, self.function).apply  # type: ignore[misc]

    def _check(self, *arguments: Any) -> None:
        (self.adjoint.check or self._check_upstream)(*arguments)
        if self.adjoint.overwrites:
            saved = arguments[len(self.op.upstream) :]
            check_reusable(self.op.label, **{self.saves[place]: saved[place] for place in self._places})

    def _check_upstream(self, *arguments: Any) -> None:
        """The op's own check, and a check that upstream gradients are like the outputs. All inputs must be saved."""
        op, first = self.op, len(self.op.upstream)
        inputs = arguments[first : first + op.input_count]
        options = arguments[first + len(self.saves) : len(arguments) - self.has_mask]
        op.check(*inputs, *options)
        outputs = op.allocate(*map(to_meta, (*inputs, *options)), *(True,) * bool(op.kept))
        for label, gradient, output in zip(op.upstream, arguments, outputs, strict=False):
            if gradient is not None:
                require_floating(op.label, label, gradient)
                require_like(op.label, label, to_meta(gradient), label[1:], output)
                if gradient.device != inputs[0].device:
                    where = f"{inputs[0].device}, the device of {op.inputs[0]}"
                    raise ArgumentError(f"{op.label}: {label} must be on {where}, got {gradient.device}")

    def _allocate(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Allocates a gradient for each differentiable input, of size 0 where `need` does not ask for it."""
        saved, gradient = arguments[len(self.op.upstream) :], self.op.gradient
        if not self.has_mask:
            return (gradient(saved[self._places[0]]),)
        need = arguments[-1]
        return tuple(
            [gradient(saved[x]) if need >> bit & 1 else saved[0].new_empty(0) for bit, x in enumerate(self._places)]
        )

    def arguments(
        self,
        upstream: tuple[Tensor | None, ...],
        arguments: tuple[Any, ...],
        outputs: tuple[Tensor, ...],
        buffers: tuple[Tensor, ...],
    ) -> tuple[Any, ...]:
        """The arguments of a backward that computes every gradient, from the forward's arguments and outputs."""
        present = [arguments[self.op.inputs.index(x)] is not None for x in self.op.differentiable]
        saved = self._saved(present, arguments, outputs)
        return (*upstream, *saved, *buffers, *self._options(arguments), *self._mask(present))

    def _saved(self, needs: list[bool], arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
        tensors = (*arguments[: self.op.input_count], *outputs)
        if self.adjoint.omits is None:
            return tuple([tensors[source] for source in self._sources])
        omitted = self.adjoint.omits(dict(zip(self.op.differentiable, needs, strict=True)), *arguments)
        named = zip(self.saves, self._sources, strict=True)
        return tuple(None if x in omitted else tensors[source] for x, source in named)

    def _options(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.adjoint.options_of is None:
            return arguments[self.op.input_count :]
        return self.adjoint.options_of(*arguments)

    def _mask(self, needs: list[bool]) -> tuple[int, ...]:
        """`need` as a tuple of one number; an empty tuple where the operator does not take it."""
        return (sum([1 << bit for bit, needed in enumerate(needs) if needed]),) if self.has_mask else ()

    def _make_function(self) -> Any:
        """Makes the `autograd.Function`, which takes the forward's arguments but `keep`, buffers and the preference."""
        op, adjoint, declared = self.op, self.adjoint, self
        forward, operator, has_mask = op.forward, self.operator, self.has_mask
        keep, absent, constant_places = (True,) * bool(op.kept), op.absent, tuple(map(op.outputs.index, op.constant))
        at_once, assemble, omits, buffers = adjoint.at_once, adjoint.assemble, adjoint.omits, bool(adjoint.buffers)
        overwrites = adjoint.overwrites
        input_count, own_count = op.input_count, op.argument_count
        argument_count = own_count + len(adjoint.buffers) + 1
        differentiable = tuple(map(op.inputs.index, op.differentiable))
        bits = tuple([(1 << bit, place) for bit, place in enumerate(differentiable)])
        saves_inputs_alone = self._sources == tuple(range(input_count)) and omits is None
        output_count, upstream_count = len(op.outputs), len(op.upstream)
        is_tensor = output_count == 1 and not keep
        is_compiling, grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled

        class Differentiable(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *values: Any) -> Any:  # type: ignore[override]
                arguments, preference = values[:own_count], values[-1]
                results = forward(*arguments, *keep, preference)
                outputs = (results,) if is_tensor else results
                if saves_inputs_alone:
                    ctx.save_for_backward(*arguments[:input_count])
                else:
                    needs = [ctx.needs_input_grad[place] for place in differentiable] if omits else []
                    ctx.save_for_backward(*declared._saved(needs, arguments, outputs))
                # Buffers are not saved, because this backward and those of other calls write to them.
                ctx.rest, ctx.preference = (*values[own_count:-1], *declared._options(arguments)), preference
                missing = 0 if absent is None else len(absent(*arguments))
                ctx.absences = (None,) * missing
                if output_count - missing == 1:
                    return outputs[0]
                if not is_compiling():
                    ctx.set_materialize_grads(False)  # an output that is unused or has no gradient costs nothing
                if constant_places:
                    ctx.mark_non_differentiable(*[outputs[place] for place in constant_places])
                return outputs[: output_count - missing]

            @staticmethod
            def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
                if grad_enabled() and not is_compiling():
                    raise second_derivative(op.label)
                upstream = (*upstream[:upstream_count], *ctx.absences)
                gradients: list[Tensor | None] = [None] * argument_count
                if output_count > 1 and all([gradient is None for gradient in upstream]):
                    return tuple(gradients)
                needs_gradient, need = ctx.needs_input_grad, 0
                for bit, place in bits:
                    if needs_gradient[place]:
                        need |= bit
                rest = (*ctx.rest, need, ctx.preference) if has_mask else (*ctx.rest, ctx.preference)
                results: Any
                if overwrites:
                    saved = _claim_saved(op.label, ctx)
                    overwritten = tuple([saved[place] for place in declared._places])
                    operator(*(None if x is None else _separate(x, overwritten) for x in upstream), *saved, *rest)
                    for tensor, (bit, _) in zip(overwritten, bits, strict=True):
                        if need & bit:  # tells autograd: another op that saved the tensor raises, and reads no gradient
                            torch.autograd.graph.increment_version(tensor)
                    results = tuple(x.detach() for x in overwritten)
                else:
                    arguments = (*upstream, *ctx.saved_tensors, *rest)  # read once: a checkpoint unpacks only once
                    results = None
                    if at_once is not None and not (is_compiling() or dispatch_modes()):
                        results = at_once(*arguments[:-1])
                    if results is None:
                        results = operator(*arguments)
                        if buffers:
                            return tuple(gradients)
                        if assemble is not None:
                            results = assemble(results, arguments)
                        elif not has_mask:
                            results = (results,)
                for (bit, place), gradient in zip(bits, results, strict=True):
                    if need & bit:
                        gradients[place] = gradient
                return tuple(gradients)

        node = Differentiable._backward_cls  # type: ignore[attr-defined]
        node.__name__ = node.__qualname__ = f"_{op.name.title().replace('_', '')}Backward"  # as profilers show it
        return Differentiable


_LISTS = (list, torch.Size)


def _hashable(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Converts the values of options that are lists or shapes ("SymInt[] shape" in a schema) to tuples."""
    return tuple([tuple(x) if isinstance(x, _LISTS) else x for x in options])


# ------------------------------------------------------------ gradients that overwrite the saved inputs


def check_reusable(op: str, **saved: Tensor) -> None:
    """Raises unless gradients can be written over the saved tensors: each needs separate memory for every element."""
    if torch.compiler.is_compiling():
        raise Unsupported(
            f"{op}: reuse_inputs=True is not available under torch.compile, which plans the memory of the "
            f"backward itself; leave reuse_inputs out there"
        )
    for name, tensor in saved.items():
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            raise ArgumentError(
                f"{op}: reuse_inputs=True would overwrite {name}, a parameter or a view of one, with its gradient; "
                f"leave it out"
            )
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


def _separate(upstream: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
    """The upstream gradient, copied if overwriting the saved tensors would change it."""
    overlaps = overlaps_itself(upstream) or any(share_memory(upstream, tensor) for tensor in saved)
    return upstream.clone() if overlaps else upstream


def _claim_saved(op: str, context: Any) -> tuple[Tensor, ...]:
    """The saved tensors, for the one backward that may overwrite them."""
    if getattr(context, "spent", False):
        raise Unsupported(
            f"{op}: a second backward, but the first one overwrote the saved inputs with their gradients, as "
            f"reuse_inputs=True asked; leave reuse_inputs out to run backward more than once"
        )
    saved: tuple[Tensor, ...] = context.saved_tensors
    context.spent = True
    return saved
