"""`Op`: the one declaration of an op.

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

From this declaration `operator.py` and `backward.py` make both torch operators with their shape functions, the checks
of upstream gradients, the `autograd.Function` with its mask of needed gradients, the error for a second derivative, and
the binding for `adjoint.plan`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from adjoint.core.layout import empty_like, to_meta
from adjoint.core.op.backward import Backward, check_reusable
from adjoint.core.op.flops import Flops, no_products
from adjoint.core.op.observation import watch
from adjoint.core.op.operator import Operator, refuse_transforms, register, transform
from adjoint.core.plan import Call, Candidate, publish
from adjoint.core.preference import Preference, resolve
from adjoint.core.problem import Problem

Function = TypeVar("Function", bound=Callable[..., Any])
Candidates = Callable[[], tuple[Candidate, ...]]


class Facts(NamedTuple):
    """The facts on which a choice of plan may depend, besides the device and the options: see `Problem`."""

    dtypes: tuple[torch.dtype, ...]
    layout: str = ""
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Adjoint:
    """One backward of an op. Its operator takes upstream gradients, saved tensors, buffers, options and `need`.

    `need` is a mask of the gradients that are needed; an op with only one gradient has none. The functions below take
    all of these arguments in this order, except `options_of`, `omits` and `assemble`.

    Attributes:
        candidates: a function that returns the candidates, best first. It is a function so that no kernel is imported.
        describe: gives the facts of a backward.
        saves: the names of the inputs and outputs that the backward reads, with a "?" behind those that may be None. By
            default these are all inputs, and the outputs that are kept for the backward.
        omits: `omits(needs, *arguments of the forward)` gives the names among `saves` that a call does not need.
            `needs` says for each differentiable input, by name, whether it needs a gradient.
        options: the options behind the tensors, as a schema writes them; by default those of the forward.
        options_of: gives the values of the options, from the arguments of the forward.
        check: raises for wrong metadata. By default it is the op's own check, and one that each upstream gradient has
            the metadata of its output.
        allocate: gives empty gradients; by default they are like the inputs.
        gradients: the names of the results; by default a gradient for each differentiable input.
        name: the operator's name behind that of the op.
        overwrites: whether it writes the gradients over the differentiable inputs, which must be saved.
        buffers: the caller's tensors to which it adds, instead of returning a gradient.
        assemble: `assemble(results, arguments)` makes gradients of the results of an operator that returns something
            else.
        at_once: `at_once(*arguments)` returns the gradients if they were saved, so that nothing is left to compute;
            else None. It is not called while compiling or under a dispatch mode, which must see the operator.
        flops: the operations of its matrix products, 2·m·n·k each, for the gradients that are needed. Products that the
            forward has already computed count there.
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
    at_once: Callable[..., tuple[Tensor, ...] | None] | None = None
    flops: Flops = no_products


class Op:
    """The one declaration of an op: see the example at the top of this module.

    The forward operator is `<name>(inputs, options, keep)`. Only an op with outputs that its backward alone reads has
    `keep`, which says whether those outputs are needed. Functions take the operator's arguments, unless stated
    otherwise.

    Args:
        name: the name of the operator.
        inputs: the names of the tensors, with a "?" behind those that may be None; the first one is never None.
        outputs: the names of the outputs that a caller gets. Where there are none, the promises are about the inputs
            that the op overwrites.
        check: raises `ArgumentError` for wrong metadata; `keep` is not among its arguments.
        allocate: gives empty outputs, kept ones last.
        describe: gives the facts on which a choice of plan depends.
        forward: a function that returns the candidates, best first. It is a function so that no kernel is imported.
        adjoint: the backward; None where there is none.
        alternatives: further forms of the backward, by the name under which `call` asks for them.
        differentiable: the inputs that have gradients; all by default.
        constant: the outputs that have no gradient, such as indices; they come last.
        absent: `absent(*arguments)` gives the outputs that these arguments do not ask for, the last ones. The operator
            gives empty tensors for them, and `call`, where it records a gradient, None.
        kept: the outputs, behind the others, that only the backward reads.
        options: the options behind the tensors, as a schema writes them: "float scale, bool normalize".
        gradient: gives an empty gradient for an input.
        overwrites: the inputs that the forward overwrites; such an op has no adjoint.
        autocast: the inputs that are cast to autocast's dtype where autocast is on, unless they are float64.
        label: the op's name in errors; by default its name.
        flops: the operations of its matrix products, 2·m·n·k each, for torch's `FlopCounterMode`; 0 by default.
        asks_device: whether the public function looks at the device of its tensors. A plan for another device is then
            made from meta tensors.
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
        alternatives: dict[str, Adjoint] | None = None,
        differentiable: tuple[str, ...] | None = None,
        constant: tuple[str, ...] = (),
        absent: Callable[..., tuple[str, ...]] | None = None,
        kept: tuple[str, ...] = (),
        options: str = "",
        gradient: Callable[[Tensor], Tensor] = empty_like,
        overwrites: tuple[str, ...] = (),
        autocast: tuple[str, ...] = (),
        label: str | None = None,
        flops: Flops = no_products,
        asks_device: bool = False,
    ) -> None:
        self.name, self.label, self.options = name, label or name, options
        self.inputs = tuple(x.removesuffix("?") for x in inputs)
        self.optional = frozenset(x.removesuffix("?") for x in inputs if x.endswith("?"))
        self.differentiable = self.inputs if differentiable is None else differentiable
        self.outputs, self.constant, self.kept = outputs, constant, kept
        self.upstream = tuple(f"d{x}" for x in outputs if x not in constant)
        self.absent, self.gradient, self.overwrites = absent, gradient, overwrites
        self.asks_device = asks_device
        self.check, self.allocate = check, allocate
        self.autocast = tuple(self.inputs.index(x) for x in autocast)
        self.input_count = input_count = len(self.inputs)
        self.argument_count = argument_count = input_count + (options.count(",") + 1 if options else 0)

        def describe_forward(*arguments: Any) -> Problem:
            facts = (name, arguments[0].device, *describe(*arguments), arguments[input_count:], "")
            return tuple.__new__(Problem, facts)  # a third of what the named constructor costs

        self.forward = register(
            Operator(
                name,
                outputs=(*outputs, *kept) or overwrites,
                tensors=self.inputs,
                check=(lambda *arguments: check(*arguments[:argument_count])) if kept else check,
                allocate=allocate,
                describe=describe_forward,
                candidates=forward,
                flops=flops,
            ),
            tensors=inputs,
            overwritten=overwrites,
            options=", ".join(filter(None, (options, "bool keep" if kept else ""))),
            results=len(outputs) + len(kept),
        )
        forms = {"": adjoint} if adjoint is not None else {}
        self.forms = {form: Backward(self, declared) for form, declared in (forms | (alternatives or {})).items()}
        self.call = _make_call(self)

    def bind(self, arguments: tuple[Any, ...], form: str, buffers: tuple[Tensor, ...]) -> Call:
        """The operators that a call runs, with their arguments."""
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
                if not self.asks_device:
                    return bound.call
                named = {name: to_meta(value) for name, value in keywords.items()}
                return replace(bound.call, elsewhere=lambda: bind(*map(to_meta, arguments), **named))
            raise TypeError(f"{self.label}: the public function returned without calling the op")

        signature = inspect.signature(function)
        parameters = [p for name, p in signature.parameters.items() if name != "preference"]
        bind.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        publish(function, bind)
        return function


class Bound(Exception):
    """Ends a call of a public function whose only purpose is to learn which operators it would run."""

    def __init__(self, call: Call) -> None:
        self.call = call


BINDING: Any = object()
"""Passed in place of a preference. Then nothing is computed, and `Bound` says which operators would run."""


def _make_call(op: Op) -> Callable[..., Any]:
    """Makes `call(*inputs, *options, preference=, form=, buffers=)`. It is a closure because attributes cost time."""
    check, forward, autocast, kept = op.check, op.forward, op.autocast, bool(op.kept)
    forms, inputs, output_count = op.forms, op.inputs, len(op.outputs)
    differentiable = tuple(map(inputs.index, op.differentiable))
    overwritten, has_absent = tuple(map(inputs.index, op.overwrites)), op.absent is not None
    grad_enabled, is_compiling, name = torch.is_grad_enabled, torch.compiler.is_compiling, op.name

    def call(*arguments: Any, preference: Preference | None, form: str = "", buffers: tuple[Tensor, ...] = ()) -> Any:
        if autocast:
            arguments = _cast(arguments, autocast)
        check(*arguments)
        if preference is BINDING:
            raise Bound(op.bind(arguments, form, buffers))
        text = resolve(preference)
        if watch.observer is not None and not is_compiling():
            return watch.observer(op, arguments, form, text, lambda: run(arguments, text, form, buffers))
        return run(arguments, text, form, buffers)

    def run(arguments: tuple[Any, ...], text: str, form: str, buffers: tuple[Tensor, ...]) -> Any:
        if grad_enabled():
            for place in differentiable:
                tensor = arguments[place]
                if tensor is not None and tensor.requires_grad:
                    backward = forms[form]
                    if backward.adjoint.overwrites:
                        check_reusable(op.label, **{inputs[place]: arguments[place] for place in differentiable})
                    if is_compiling():
                        results = backward.function.apply(*arguments, *buffers, text)
                    else:
                        if transform() is not None or forward_ad._current_level >= 0:
                            refuse_transforms(name, arguments[: len(inputs)])
                        results = backward.apply(*arguments, *buffers, text)
                    if has_absent:
                        results = results if isinstance(results, tuple) else (results,)
                        results += (None,) * (output_count - len(results))
                    return results
        if kept:
            results = forward(*arguments, False, text)
            return results[0] if output_count == 1 else results[:output_count]
        results = forward(*arguments, text)
        if overwritten and not is_compiling():
            for place in overwritten:
                if arguments[place] is not None and not arguments[place].is_inference():
                    torch.autograd.graph.increment_version(arguments[place])
        return results

    return call


def _cast(arguments: tuple[Any, ...], places: tuple[int, ...]) -> tuple[Any, ...]:
    """Casts the tensors at some places to autocast's dtype, where autocast is on; float64 and integers stay."""
    first = arguments[places[0]]
    if not isinstance(first, Tensor) or first.is_meta or not torch.is_autocast_enabled(first.device.type):
        return arguments
    dtype = torch.get_autocast_dtype(first.device.type)

    def cast(x: Any) -> Any:
        is_narrower = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if is_narrower else x

    return tuple(cast(x) if place in places else x for place, x in enumerate(arguments))
