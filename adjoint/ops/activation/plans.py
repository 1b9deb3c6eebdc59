"""Which kernel serves which activation problem, and what it guarantees."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core.arguments import FLOATING
from adjoint.core.guarantee import Derived, Enumerated, ErrorStatement, Guarantee
from adjoint.core.launch import Execute, Setup, imported
from adjoint.core.layout import coalesce
from adjoint.core.op import Adjoint, Facts
from adjoint.core.plan import Candidate, Plan, Run, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem, short
from adjoint.core.schedules import Schedules
from adjoint.ops.activation import bounds, eager, in_float32, reference
from adjoint.ops.activation.packing import unpack

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))


def describe(tensors: tuple[Tensor, ...], like: tuple[Tensor, ...]) -> Facts:
    """The facts of a problem with these tensors and with results that have the layout of `like`."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            results = [torch.empty_like(x, device="meta") for x in like]
            return Facts((tensor.dtype,), layout_of([*tensors, *results]))
    return _CONTIGUOUS[tensors[0].dtype]


_CONTIGUOUS = {dtype: Facts((dtype,), "rows") for dtype in FLOATING}


def layout_of(tensors: list[Tensor]) -> str:
    """ "rows" when every tensor is rows of adjacent elements, "strided" otherwise."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return "rows"
    axes = coalesce(tensors)
    adjacent = all(strides[-1] == 1 for strides in axes.strides) or axes.sizes == (1,)
    return "rows" if len(axes.sizes) <= 2 and adjacent else "strided"


def packed_layout_of(tensors: list[Tensor], packed: list[Tensor], order: str) -> str:
    """The layout as in `layout_of`, or "pairs" when gate and up alternate along rows of adjacent elements.

    `tensors` have the output's shape. `packed` tensors contain gate and up; the output of a backward is the last one.
    """
    if order != "interleaved":
        return layout_of([*tensors, *(half for tensor in packed for half in unpack(tensor, order))])
    if all(tensor.is_contiguous() for tensor in (*tensors, *packed)):
        return "pairs"
    gates = [unpack(tensor, order)[0] for tensor in packed]
    axes = coalesce([*gates, *tensors])
    strides = [row[-1] for row in axes.strides]
    alternate = strides == [2] * len(packed) + [1] * len(tensors)
    return "pairs" if len(axes.sizes) <= 2 and alternate else "strided"


def _describe_reuse(*arguments: Any) -> Facts:
    return describe(tuple([x for x in arguments if isinstance(x, Tensor)]), ())


def reuse(
    candidates: Callable[[], tuple[Candidate, ...]], describe: Callable[..., Facts] = _describe_reuse
) -> dict[str, Adjoint]:
    """The form of a backward that overwrites its inputs."""
    return {"reuse": Adjoint(candidates, describe, name="backward_reuse", overwrites=True)}


def arithmetic(device: torch.device) -> str:
    """The arithmetic of a plan on kernels, by whose exponentials and quotients it uses: a key of `bounds.ULP`."""
    return "nvidia" if device.type == "cuda" and torch.version.hip is None else "portable"


SPECIAL_VALUES = (
    "silu(±0) = ±0, silu(+∞) = +∞, silu(−∞) = −0, silu'(−∞) = −0, silu'(+∞) = 1, NaN gives NaN; "
    "products with up and the upstream gradient are IEEE products, in which a value below the range of the "
    "arithmetic's type (float32: gates below about −174) counts as 0"
)


DOMAIN = "every gate, finite up and dy; finite wherever the exact result is in range"

SPECIAL_VALUES_IN_FLOAT32 = (
    "silu(±0) = ±0, silu(+∞) = +∞, silu(−∞), silu'(−∞) and silu'(+∞) are NaN, as torch's functions have them, NaN "
    "gives NaN; products with up and the upstream gradient are IEEE products, in which silu of a gate below −87 may "
    "be 0"
)

DOMAIN_IN_FLOAT32 = (
    "finite gates, of which those below −87 may count as −∞, and finite up and dy; finite wherever the exact result is "
    "in range, of dgate for |dy| up to half of the largest number"
)


class Function(NamedTuple):
    """The function that an activation computes of its gate: in kernels, in plain PyTorch, and with which errors.

    Attributes:
        is_sigmoid: whether kernels compute σ in place of silu.
        eager, in_float32: modules with its `forward` and `backward` in plain PyTorch.
        costs: gives the errors of an arithmetic, by its name in `bounds`, for a storage type.
        errors: gives the error statement for each output of a direction, from the arithmetic, the storage type and the
            options.
        domain, special_values, and those of `in_float32`: the words of a guarantee.
    """

    is_sigmoid: bool
    eager: Any
    in_float32: Any
    costs: Callable[[str, torch.dtype], bounds.Arithmetic]
    errors: Callable[["Activation", str, torch.dtype, tuple[Any, ...]], dict[str, ErrorStatement]]
    domain: str
    special_values: str
    domain_in_float32: str
    special_values_in_float32: str


class Activation(NamedTuple):
    """One direction of an activation, in a form that serves kernels, plain PyTorch and bounds.

    Attributes:
        views: gives its tensors from the arguments and outputs of the operator: for a forward gate, up and y, and for a
            backward dy, gate, up, dgate, dup and need. Without an up, up and dup are None.
        function: the function of the gate.
        has_up: whether there is an up.
        packed: whether one tensor contains gate and up.
    """

    is_forward: bool
    views: Callable[[tuple[Any, ...], tuple[Tensor, ...]], tuple[Any, ...]]
    function: Function
    has_up: bool = True
    packed: bool = False


def _errors(of: Activation, used: str, dtype: torch.dtype, options: tuple[Any, ...]) -> dict[str, ErrorStatement]:
    """The error statement for each output. Only for silu of a 16-bit number can all inputs be tried."""
    costs = bounds.arithmetic(used, dtype)
    bound = bounds.Bounds(costs, dtype)

    def gate_and_up(*inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        if of.packed:
            return reference.unpack(inputs[0], options[0])
        return (inputs[0], inputs[1]) if of.has_up else (inputs[0], None)

    def dgate(dy: Tensor, *inputs: Tensor) -> Tensor:
        return bound.slope(dy, *gate_and_up(*inputs))

    def dup(dy: Tensor, *inputs: Tensor) -> Tensor:
        return bound.value(gate_and_up(*inputs)[0], dy)

    def words(kind: str) -> str:
        return bounds.in_words(costs, dtype, kind, of.has_up)

    if of.is_forward:
        if dtype.itemsize == 2 and not of.has_up and used in bounds.ULP:
            return {"y": Enumerated(bounds.ULP[used][dtype], f"every {short(dtype)} x")}
        return {"y": Derived(words("y"), lambda *inputs: bound.value(*gate_and_up(*inputs)))}
    if of.packed:
        both = f"of dgate {words('dgate')}; of dup {words('dup')}"
        return {"dpacked": Derived(both, lambda *inputs: reference.pack(dgate(*inputs), dup(*inputs), options[0]))}
    if of.has_up:
        return {"dgate": Derived(words("dgate"), dgate), "dup": Derived(words("dup"), dup)}
    return {"dx": Derived(words("dgate"), dgate)}


SILU_FUNCTION = Function(
    False, eager, in_float32, bounds.arithmetic, _errors,
    DOMAIN, SPECIAL_VALUES, DOMAIN_IN_FLOAT32, SPECIAL_VALUES_IN_FLOAT32,
)  # fmt: skip


def guarantee(of: Activation, used: str, problem: Problem) -> dict[str, Guarantee]:
    """The promises of each output of an operator in an arithmetic, by its name in `bounds.arithmetic`."""
    (dtype,) = problem.dtypes
    function, costs = of.function, of.function.costs(used, dtype)
    domain, special_values = function.domain, function.special_values
    if used == "float32":
        domain, special_values = function.domain_in_float32, function.special_values_in_float32
    return {
        output: Guarantee(
            repeatable=True,
            batch_invariant="element" if used in ("nvidia", "portable") else "",
            device_invariant=False,
            accumulator=short(costs.dtype),
            roundings=1 + (costs.rounds_between and of.has_up),
            error=error,
            domain=domain,
            special_values=special_values,
        )
        for output, error in function.errors(of, used, dtype, problem.options).items()
    }


NEED_GATE, NEED_UP = 1, 2
"""The bits of the gradients in the mask of a backward."""

_BOTH = NEED_GATE | NEED_UP


def candidates(of: Activation) -> tuple[Candidate, ...]:
    """The candidates of an operator, best first."""

    def on_kernels(layout: str) -> Candidate:
        direction = "forward" if of.is_forward else "backward"
        bind = imported(f"adjoint.ops.activation.kernels:{layout}", of=of)

        def setup(setup: Setup) -> Execute:
            setup.add_numeric(**numeric(setup.problem))
            return bind(setup)

        return Candidate(
            name=f"triton.{layout}",
            backend="triton",
            kernel=f"{'swiglu' if layout == 'pairs' else 'silu'}_{direction}_{layout}",
            revision=1,
            refuse=lambda p: "" if p.layout == layout else f"reads tensors laid out as {layout}, these are {p.layout}",
            guarantee=lambda problem: guarantee(of, arithmetic(problem.device), problem),
            setup=setup,
            schedules=_SCHEDULES,
        )

    def numeric(problem: Problem) -> dict[str, Any]:
        return {"order": problem.options[0]} if of.packed else {}

    def in_torch(module: Any) -> Run:
        """Computes with the functions of a module."""

        def forward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...] | None, _: Any) -> Any:
            """Computes y. The library itself rounds a contiguous result into its memory."""
            gate, up, _ = of.views(arguments, outputs or (arguments[0],))
            if outputs is None and not gate.is_contiguous():
                outputs = plan.allocate(arguments)
            return (module.forward(gate, up, None if outputs is None else outputs[0]),)

        def backward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Any) -> None:
            dy, gate, up, dgate, dup, need = of.views(arguments, outputs)
            module.backward(dy, gate, up, dgate if need & NEED_GATE else None, dup if need & NEED_UP else None)

        return forward if of.is_forward else allocating_outputs(backward)

    def eagerly(name: str, used: str, module: Any) -> Candidate:
        return in_pytorch(name, lambda problem: guarantee(of, used, problem), in_torch(module), numeric)

    layouts = ("rows", "pairs", "strided") if of.packed else ("rows", "strided")
    return (
        *map(on_kernels, layouts),
        replace(
            eagerly("eager.float32", "float32", of.function.in_float32),
            kernel="pytorch_float32",
            revision=3 if of.has_up and not of.function.is_sigmoid else 2,
            refuse=_refuse_float32,
        ),
        eagerly("eager", "float64", of.function.eager),
    )


def _refuse_float32(problem: Problem) -> str:
    """Why the plan in float32 cannot serve a problem: its statements are about torch on the CPU."""
    if problem.device.type != "cpu":
        return "computes as torch does on the CPU"
    return "computes in float32, these are float64" if problem.dtypes[0] == torch.float64 else ""


def _forward(views: Callable[..., Any], **of: bool) -> tuple[Candidate, ...]:
    return candidates(Activation(True, views, SILU_FUNCTION, **of))


def _backward(views: Callable[..., Any], **of: bool) -> tuple[Candidate, ...]:
    return candidates(Activation(False, views, SILU_FUNCTION, **of))


SILU = _forward(lambda a, out: (a[0], None, out[0]), has_up=False)
SILU_BACKWARD = _backward(lambda a, out: (*a, None, out[0], None, _BOTH), has_up=False)
SILU_REUSE = _backward(lambda a, out: (*a, None, a[1], None, _BOTH), has_up=False)
SWIGLU = _forward(lambda a, out: (*a, out[0]))
SWIGLU_BACKWARD = _backward(lambda a, out: (*a[:3], *out, a[3]))
SWIGLU_REUSE = _backward(lambda a, out: (*a[:3], a[1], a[2], a[3]))
SWIGLU_PACKED = _forward(lambda a, out: (*unpack(*a), out[0]), packed=True)
SWIGLU_PACKED_BACKWARD = _backward(
    lambda a, out: (a[0], *unpack(*a[1:]), *unpack(out[0], a[2]), _BOTH), packed=True
)  # fmt: skip
SWIGLU_PACKED_REUSE = _backward(lambda a, out: (a[0], *unpack(*a[1:]), *unpack(*a[1:]), _BOTH), packed=True)
