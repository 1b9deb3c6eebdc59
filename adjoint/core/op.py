"""`Op`: the one declaration of an op, and the only code that touches `torch.library`.

    _scale = Op(
        "scale",
        inputs=("x",),
        options="float factor",
        outputs=("y",),
        check=lambda x, factor: require_floating("scale", "x", x),
        allocate=lambda x, factor: (torch.empty_like(x),),
        describe=lambda x, factor: Facts((x.dtype,)),
        forward=lambda: plans.SCALE,
        adjoint=Adjoint(lambda: plans.SCALE_BACKWARD, describe=lambda dy, x, factor: Facts((x.dtype,))),
    )

    @_scale.public
    def scale(x, *, factor=2.0, preference=None):
        return _scale.call(x, factor, preference=preference)

From this come both torch operators with their shape functions, the checks of upstream gradients, the
`autograd.Function` with its mask of needed gradients, the error for a second derivative, and the binding for
`adjoint.plan`.

Operators are registered through the low-level interface, and an `autograd.Function` outside joins forward and backward:
that costs about a third of `custom_op` with `register_autograd` a call, and works with `torch.compile(fullgraph=True)`
and `opcheck`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from adjoint.core.arguments import require_floating, require_like
from adjoint.core.errors import ArgumentError, second_derivative
from adjoint.core.plan import Call, Candidate, Operator, publish, register_operator
from adjoint.core.preference import Preference, resolve
from adjoint.core.problem import Problem
from adjoint.core.reuse import apart, check_reusable, claim_saved, mark_overwritten

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


# -------------------------------------------------------------------------------------------- declarations

Function = TypeVar("Function", bound=Callable[..., Any])
Candidates = Callable[[], tuple[Candidate, ...]]


class Facts(NamedTuple):
    """What a choice of plan may depend on, besides the device and the options: see `Problem`."""

    dtypes: tuple[torch.dtype, ...]
    layout: str = ""
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Adjoint:
    """One backward of an op. Its operator takes upstream gradients, what was saved, buffers, options and `need`.

    `need` is a mask of the gradients that are needed, and is there where an op has several. The functions below take
    all of that in this order, but `options_of`, `omits` and `assemble`.

    Attributes:
        candidates: best first; a function, so that no kernel is imported.
        describe: the facts of a backward.
        saves: the names of the inputs and outputs it reads, with a "?" behind those that may be None; by default all
            inputs, and the outputs that are kept for it.
        omits: `omits(needs, *arguments of the forward)`: names among `saves` that a call does not need; `needs` says
            of every differentiable input, by name, whether it needs a gradient.
        options: what follows the tensors, as a schema writes it; by default the options of the forward.
        options_of: their values, from the arguments of the forward.
        check: raises for wrong metadata; by default the op's own check, and that upstream gradients are like outputs.
        allocate: empty gradients; by default like the inputs.
        gradients: names of what it returns; by default a gradient for each differentiable input.
        name: of the operator, behind that of the op.
        overwrites: it writes the gradients over the inputs that were saved, which must be all of them.
        buffers: tensors of the caller that it adds to instead of returning a gradient.
        assemble: `assemble(results, arguments)`: the gradients, of an operator that returns something else.
    """

    candidates: Candidates
    describe: Callable[..., Facts]
    saves: tuple[str, ...] | None = None
    omits: Callable[..., tuple[str, ...]] | None = None
    options: str | None = None
    options_of: Callable[..., tuple[Any, ...]] | None = None
    check: Callable[..., None] | None = None
    allocate: Callable[..., tuple[Tensor, ...]] | None = None
    gradients: tuple[str, ...] | None = None
    name: str = "backward"
    overwrites: bool = False
    buffers: tuple[str, ...] = ()
    assemble: Callable[[Any, tuple[Any, ...]], tuple[Tensor, ...]] | None = None


class Op:
    """The one declaration of an op: see the example at the top of this module.

    The forward operator is `<name>(inputs, options, keep)`; `keep` is there where an op has outputs that its backward
    alone reads, and says whether they are needed. Functions take the operator's arguments, unless they say otherwise.

    Args:
        name: of the operator.
        inputs: names of the tensors, with a "?" behind those that may be None; the first never is.
        outputs: names of what a caller gets.
        check: raises `ArgumentError` for wrong metadata; `keep` is not among its arguments.
        allocate: empty outputs, kept ones last.
        describe: the facts that a choice of plan depends on.
        forward: candidates, best first; a function, so that no kernel is imported.
        adjoint: the backward; None where there is none.
        others: further forms of the backward, by the name under which `call` asks for them.
        differentiable: the inputs that have gradients; all by default.
        constant: outputs that have no gradient, such as indices; the last ones.
        absent: `absent(*arguments)`: outputs that these arguments do not ask for, which are empty and have no gradient.
        kept: outputs behind the others that the backward alone reads.
        options: what follows the tensors, as a schema writes it: "float scale, bool normalize".
        gradient: an empty gradient for an input.
        overwrites: inputs that the forward overwrites; such an op has no adjoint.
        autocast: inputs that are cast to autocast's dtype where it is on, unless they are float64.
        label: the op as errors name it; by default its name.
    """

    def __init__(
        self,
        name: str,
        *,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        check: Callable[..., None],
        allocate: Callable[..., tuple[Tensor, ...]],
        describe: Callable[..., Facts],
        forward: Candidates,
        adjoint: Adjoint | None = None,
        others: dict[str, Adjoint] | None = None,
        differentiable: tuple[str, ...] | None = None,
        constant: tuple[str, ...] = (),
        absent: Callable[..., tuple[str, ...]] | None = None,
        kept: tuple[str, ...] = (),
        options: str = "",
        gradient: Callable[[Tensor], Tensor] = lambda x: x.new_empty(x.shape),
        overwrites: tuple[str, ...] = (),
        autocast: tuple[str, ...] = (),
        label: str | None = None,
    ) -> None:
        self.name, self.label, self.options = name, label or name, options
        self.inputs = tuple(x.removesuffix("?") for x in inputs)
        self.optional = frozenset(x.removesuffix("?") for x in inputs if x.endswith("?"))
        self.differentiable = self.inputs if differentiable is None else differentiable
        self.outputs, self.constant, self.kept = outputs, constant, kept
        self.upstream = tuple(f"d{x}" for x in outputs if x not in constant)
        self.absent, self.gradient, self.overwrites = absent, gradient, overwrites
        self.check, self.allocate = check, allocate
        self.autocast = tuple(self.inputs.index(x) for x in autocast)
        count, last = len(self.inputs), len(self.inputs) + (options.count(",") + 1 if options else 0)
        self.count, self.forward_length = count, last

        def describe_forward(*arguments: Any) -> Problem:
            facts = (name, arguments[0].device, *describe(*arguments), arguments[count:])
            return tuple.__new__(Problem, facts)  # a third of what the named constructor costs

        self.forward = define(
            name,
            _join(self._schema_of_inputs(overwrites), options, "bool keep" if kept else ""),
            _returns(len(outputs) + len(kept)),
            outputs=(*outputs, *kept),
            tensors=self.inputs,
            check=(lambda *arguments: check(*arguments[:last])) if kept else check,
            allocate=allocate,
            describe=describe_forward,
            candidates=forward,
        )
        forms = {"": adjoint} if adjoint is not None else {}
        self.forms = {form: _Backward(self, declared) for form, declared in (forms | (others or {})).items()}
        self.call = _make_call(self)

    def _schema_of_inputs(self, overwrites: tuple[str, ...]) -> str:
        written = {x: f"({letter}!)" for x, letter in zip(overwrites, "abcdefgh", strict=False)}
        return ", ".join(f"Tensor{written.get(x, '')}{'?' * (x in self.optional)} {x}" for x in self.inputs)

    def bind(self, arguments: tuple[Any, ...], form: str, buffers: tuple[Tensor, ...]) -> Call:
        """The operators and arguments that a call amounts to."""
        complete = (*arguments, True) if self.kept else arguments
        backward = self.forms.get(form)
        public = len(self.upstream) - len(self.absent(*arguments) if self.absent else ())
        if backward is None:
            return Call(self.forward, complete, public_outputs=public)

        def adjoint_arguments(upstream: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
            padding = (None,) * (len(self.upstream) - len(upstream))
            return backward.arguments((*upstream, *padding), arguments, outputs, buffers)

        return Call(self.forward, complete, backward.operator, adjoint_arguments, public)

    def public(self, function: Function) -> Function:
        """Makes a public function known to `adjoint.plan`, which calls it with `BINDING` as its preference."""

        def bind(*arguments: Any, **keywords: Any) -> Call:
            try:
                function(*arguments, **keywords, preference=BINDING)
            except Bound as bound:
                return bound.call
            raise TypeError(f"{self.label}: the public function returned without calling the op")

        signature = inspect.signature(function)
        parameters = [p for name, p in signature.parameters.items() if name != "preference"]
        bind.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        publish(function, bind)
        return function


class Bound(Exception):
    """Ends a call of a public function that was made to learn which operators it would run."""

    def __init__(self, call: Call) -> None:
        self.call = call


BINDING: Any = object()
"""In the place of a preference: nothing is computed, and `Bound` says which operators would run."""


def _join(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _hashable(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Values of options, of which a schema's lists ("SymInt[] shape") come as lists or as shapes."""
    return tuple([tuple(x) if isinstance(x, _LISTS) else x for x in options])


_LISTS = (list, torch.Size)


def _returns(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


# ------------------------------------------------------------------------------------------------ backward


class _Backward:
    """One form of an op's backward: its operator, and the `autograd.Function` that runs it."""

    def __init__(self, op: Op, adjoint: Adjoint) -> None:
        self.op, self.adjoint = op, adjoint
        self.several = len(op.differentiable) > 1
        saves = adjoint.saves or (*(f"{x}?" if x in op.optional else x for x in op.inputs), *op.kept)
        self.saves = tuple(x.removesuffix("?") for x in saves)
        order = (*op.inputs, *op.outputs, *op.kept)
        self.places = tuple(order.index(x) for x in self.saves)
        """Where what is saved stands among the inputs and the outputs of the forward."""
        first, count = len(op.upstream), len(op.upstream) + len(saves) + len(adjoint.buffers)
        options = op.options if adjoint.options is None else adjoint.options
        gradients = adjoint.gradients or tuple(f"d{x}" for x in op.differentiable)
        self.gradients = gradients
        absent = "?" * (first > 1)
        letters = iter("abcdefgh")
        schema = [f"Tensor{absent} {x}" for x in op.upstream]
        for x in saves:
            written = f"({next(letters)}!)" if adjoint.overwrites and x in op.inputs else ""
            schema.append(f"Tensor{written}{'?' * x.endswith('?')} {x.removesuffix('?')}")
        schema += [f"Tensor({next(letters)}!) {x}" for x in adjoint.buffers]
        in_place = adjoint.overwrites or bool(adjoint.buffers)
        never_absent = 0 if first == 1 else first  # of several upstream gradients some may be

        has_lists, name, describe_facts = "[]" in options, f"{op.name}_{adjoint.name}", adjoint.describe

        def describe(*arguments: Any) -> Problem:
            values = _hashable(arguments[count:]) if has_lists else arguments[count:]
            return Problem(name, arguments[never_absent].device, *describe_facts(*arguments), values)

        def check(*arguments: Any) -> None:
            (adjoint.check or self._check)(*arguments)
            if adjoint.overwrites:
                check_reusable(op.label, **dict(zip(self.saves, arguments[first:], strict=False)))

        self.operator = define(
            f"{op.name}_{adjoint.name}",
            _join(*schema, options, "int need" * self.several),
            "()" if in_place else _returns(len(gradients)),
            outputs=gradients,
            tensors=(*op.upstream, *self.saves, *adjoint.buffers),
            check=check,
            allocate=(lambda *arguments: ()) if in_place else adjoint.allocate or self._allocate,
            describe=describe,
            candidates=adjoint.candidates,
        )
        self.operator.assemble = adjoint.assemble
        self.function = self._make_function()

    def _check(self, *arguments: Any) -> None:
        """The op's own check, and that upstream gradients are like the outputs; all inputs must be saved for it."""
        op, first = self.op, len(self.op.upstream)
        inputs = arguments[first : first + op.count]
        options = arguments[first + len(self.saves) : -1] if self.several else arguments[first + len(self.saves) :]
        op.check(*inputs, *options)
        outputs = op.allocate(*map(_meta, (*inputs, *options)), *(True,) * bool(op.kept))
        for label, gradient, output in zip(op.upstream, arguments, outputs, strict=False):
            if gradient is not None:
                require_floating(op.label, label, gradient)
                require_like(op.label, label, _meta(gradient), label[1:], output)
                if gradient.device != inputs[0].device:
                    where = f"{inputs[0].device}, the device of {op.inputs[0]}"
                    raise ArgumentError(f"{op.label}: {label} must be on {where}, got {gradient.device}")

    def _allocate(self, *arguments: Any) -> tuple[Tensor, ...]:
        """A gradient like each differentiable input, empty where `need` does not ask for it."""
        op, first = self.op, len(self.op.upstream)
        saved = dict(zip(self.saves, arguments[first:], strict=False))
        need = arguments[-1] if self.several else 1
        return tuple(
            op.gradient(saved[x]) if need >> bit & 1 else arguments[first].new_empty(0)
            for bit, x in enumerate(op.differentiable)
        )

    def arguments(
        self,
        upstream: tuple[Tensor | None, ...],
        arguments: tuple[Any, ...],
        outputs: tuple[Tensor, ...],
        buffers: tuple[Tensor, ...],
    ) -> tuple[Any, ...]:
        """The arguments of a backward that computes every gradient, from those of the forward and its outputs."""
        present = [arguments[self.op.inputs.index(x)] is not None for x in self.op.differentiable]
        saved = self.saved(present, arguments, outputs)
        return (*upstream, *saved, *buffers, *self.option_values(arguments), *self.mask(present))

    def saved(self, needs: list[bool], arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
        every = (*arguments[: self.op.count], *outputs)
        if self.adjoint.omits is None:
            return tuple([every[place] for place in self.places])
        omitted = self.adjoint.omits(dict(zip(self.op.differentiable, needs, strict=True)), *arguments)
        return tuple(None if x in omitted else every[place] for x, place in zip(self.saves, self.places, strict=True))

    def option_values(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.adjoint.options_of is None:
            return arguments[self.op.count :]
        return self.adjoint.options_of(*arguments)

    def mask(self, needs: list[bool]) -> tuple[int, ...]:
        """`need`, where the operator takes it, from whether each gradient is needed."""
        return (sum([1 << bit for bit, needed in enumerate(needs) if needed]),) if self.several else ()

    def _make_function(self) -> Any:
        """The `autograd.Function`: it takes the arguments of the forward but `keep`, buffers and the preference."""
        op, adjoint, backward = self.op, self.adjoint, self
        forward, operator, several = op.forward, self.operator, self.several
        length = op.forward_length + len(adjoint.buffers) + 1
        places = tuple(op.inputs.index(x) for x in op.differentiable)
        only_inputs = self.places == tuple(range(op.count)) and adjoint.omits is None
        returned = len(op.outputs)
        single = returned == 1

        class Differentiable(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *everything: Any) -> Any:  # type: ignore[override]
                arguments, preference = everything[: op.forward_length], everything[-1]
                if not single and not torch.compiler.is_compiling():
                    ctx.set_materialize_grads(False)  # an output nobody used, or without a gradient, costs nothing
                results = forward(*arguments, True, preference) if op.kept else forward(*arguments, preference)
                outputs = (results,) if single and not op.kept else results
                if only_inputs:
                    ctx.save_for_backward(*arguments[: op.count])
                else:
                    needs = [ctx.needs_input_grad[place] for place in places]
                    ctx.save_for_backward(*backward.saved(needs, arguments, outputs))
                ctx.options, ctx.preference = backward.option_values(arguments), preference
                # Not saved: they are written to, by this backward and by those of other calls.
                ctx.buffers = everything[op.forward_length : -1]
                ctx.absent = op.absent(*arguments) if op.absent else ()
                constant = [outputs[op.outputs.index(x)] for x in (*op.constant, *ctx.absent)]
                if constant:
                    ctx.mark_non_differentiable(*constant)
                return outputs[0] if single else outputs[:returned]

            @staticmethod
            def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
                if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                    raise second_derivative(op.label)
                upstream = upstream[: len(op.upstream)]
                if ctx.absent:  # a compiler makes zeros of a gradient that nobody gave
                    named = zip(op.upstream, upstream, strict=True)
                    upstream = tuple(None if x[1:] in ctx.absent else gradient for x, gradient in named)
                gradients: list[Tensor | None] = [None] * length
                if not single and all(gradient is None for gradient in upstream):
                    return tuple(gradients)
                needs_gradient = ctx.needs_input_grad
                needs = [needs_gradient[place] for place in places]
                rest = (*ctx.buffers, *ctx.options, *backward.mask(needs), ctx.preference)
                results: Any
                if adjoint.overwrites:
                    saved = claim_saved(op.label, ctx)
                    operator(*(apart(x, *saved) for x in upstream if x is not None), *saved, *rest)
                    mark_overwritten(*(x for x, needed in zip(saved, needs, strict=True) if needed))
                    results = tuple(x.detach() for x in saved)
                else:
                    arguments = (*upstream, *ctx.saved_tensors, *rest)  # checkpoints unpack what is saved once
                    results = operator(*arguments)
                    if adjoint.buffers:
                        return tuple(gradients)
                    if adjoint.assemble is not None:
                        results = adjoint.assemble(results, arguments)
                    elif not several:
                        results = (results,)
                for place, needed, gradient in zip(places, needs, results, strict=True):
                    if needed:
                        gradients[place] = gradient
                return tuple(gradients)

        node = Differentiable._backward_cls  # type: ignore[attr-defined]
        node.__name__ = node.__qualname__ = f"_{op.name.title().replace('_', '')}Backward"  # as profilers show it
        return Differentiable


def _meta(value: Any) -> Any:
    """A tensor without its memory: the same sizes, strides and dtype."""
    return value.to("meta") if isinstance(value, Tensor) else value


def _make_call(op: Op) -> Callable[..., Any]:
    """`call(*inputs, *options, preference=, form=, buffers=)`; a closure, because attributes cost."""
    check, forward, autocast, kept = op.check, op.forward, op.autocast, bool(op.kept)
    functions, inputs = op.forms, op.inputs
    places = tuple(inputs.index(x) for x in op.differentiable)
    written = tuple(inputs.index(x) for x in op.overwrites)
    returned = len(op.outputs)
    grad_enabled = torch.is_grad_enabled

    def call(*arguments: Any, preference: Preference | None, form: str = "", buffers: tuple[Tensor, ...] = ()) -> Any:
        if autocast:
            arguments = _cast(arguments, autocast)
        check(*arguments)
        if preference is BINDING:
            raise Bound(op.bind(arguments, form, buffers))
        text = resolve(preference)
        if grad_enabled():
            for place in places:
                tensor = arguments[place]
                if tensor is not None and tensor.requires_grad:
                    backward = functions[form]
                    if backward.adjoint.overwrites:
                        check_reusable(op.label, **dict(zip(inputs, arguments, strict=False)))
                    return backward.function.apply(*arguments, *buffers, text)
        if kept:
            results = forward(*arguments, False, text)
            return results[0] if returned == 1 else results[:returned]
        results = forward(*arguments, text)
        if written and not torch.compiler.is_compiling():
            for place in written:
                if not arguments[place].is_inference():
                    torch.autograd.graph.increment_version(arguments[place])
        return results

    return call


def _cast(arguments: tuple[Any, ...], places: tuple[int, ...]) -> tuple[Any, ...]:
    """The arguments with some tensors in autocast's dtype, where it is on; float64 and whole numbers stay."""
    first = arguments[places[0]]
    if not isinstance(first, Tensor) or first.is_meta or not torch.is_autocast_enabled(first.device.type):
        return arguments
    dtype = torch.get_autocast_dtype(first.device.type)

    def cast(x: Any) -> Any:
        is_narrower = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if is_narrower else x

    return tuple(cast(x) if place in places else x for place, x in enumerate(arguments))
