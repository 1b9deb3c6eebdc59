"""Which kernel serves which activation problem, and what it guarantees."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Enumerated, ErrorStatement, Guarantee
from adjoint.core.launch import Execute, Setup, imported
from adjoint.core.layout import coalesce
from adjoint.core.op import Adjoint, Facts
from adjoint.core.plan import Candidate, Plan, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem, short, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.ops.activation import eager, reference
from adjoint.ops.activation.packing import unpack

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))


def layout_of(tensors: list[Tensor]) -> str:
    """ "rows" when every tensor is rows of adjacent elements, "strided" otherwise."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return "rows"
    axes = coalesce(tensors)
    adjacent = all(strides[-1] == 1 for strides in axes.strides) or axes.sizes == (1,)
    return "rows" if len(axes.sizes) <= 2 and adjacent else "strided"


def packed_layout_of(tensors: list[Tensor], packed: list[Tensor], order: str) -> str:
    """As `layout_of`, and "pairs" when gate and up alternate along rows of adjacent elements.

    `tensors` have the output's shape; `packed` hold gate and up, the output of a backward last.
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
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    return Facts((tensors[0].dtype,), layout_of(tensors))


def reuse(
    candidates: Callable[[], tuple[Candidate, ...]], describe: Callable[..., Facts] = _describe_reuse
) -> dict[str, Adjoint]:
    """The form of a backward that overwrites its inputs."""
    return {"reuse": Adjoint(candidates, describe, name="backward_reuse", overwrites=True)}


ULP: Mapping[str, Mapping[torch.dtype, Mapping[str, float]]] = {
    "eager": {
        torch.bfloat16: {"y": 0.501, "dgate": 0.501, "dup": 0.501},
        torch.float16: {"y": 0.501, "dgate": 0.501, "dup": 0.501},
    },
    "nvidia": {
        torch.bfloat16: {"y": 0.502, "dgate": 0.503, "dup": 0.501},
        torch.float16: {"y": 0.501, "dgate": 0.9, "dup": 0.501},
    },
    "portable": {
        torch.bfloat16: {"y": 0.502, "dgate": 0.51, "dup": 0.501},
        torch.float16: {"y": 0.501, "dgate": 2.1, "dup": 0.501},
    },
}
"""Largest error in ulp over every 16-bit input, by arithmetic, dtype and kind of output.

silu' has a root. At the float16 value nearest to it, float32 arithmetic leaves an error of 0.3 units before
the rounding with NVIDIA's 2^x and 1/x, and of 1.1 units with IEEE division and the interpreter's
exponential; bfloat16 has no value that near."""


def arithmetic(backend: str, device: torch.device) -> str:
    """Whose 2^x and 1/x a plan uses: a key of `ULP`."""
    if backend == "eager":
        return "eager"
    return "nvidia" if device.type == "cuda" and torch.version.hip is None else "portable"


SPECIAL_VALUES = (
    "silu(±0) = ±0, silu(+∞) = +∞, silu(−∞) = −0, silu'(−∞) = −0, silu'(+∞) = 1, NaN gives NaN; "
    "products with up and the upstream gradient are IEEE products, in which a value below the range of the "
    "arithmetic's type (float32: gates below about −174) counts as 0"
)


DOMAIN = (
    "every input; finite wherever the exact result is in range; "
    "the error in ulp for |up|, |dy| and |up·dy| each 0 or within [2⁻⁶⁰, 2¹⁰⁰]"
)


class Activation(NamedTuple):
    """One direction of an activation, as kernels, plain PyTorch and bounds see it alike.

    Attributes:
        views: its tensors, from the arguments and outputs of the operator: of a forward gate, up and y; of a backward
            dy, gate, up, dgate, dup and need. Without an up, up and dup are None.
        has_up: whether there is an up.
        packed: whether one tensor holds gate and up.
    """

    is_forward: bool
    views: Callable[[tuple[Any, ...], tuple[Tensor, ...]], tuple[Any, ...]]
    has_up: bool = True
    packed: bool = False


def _error(used: str, dtype: torch.dtype, kind: str, bound: Callable[..., Tensor]) -> ErrorStatement:
    """The statement for an output of a kind: "y", "dgate" (a slope) or "dup" (a value)."""
    if dtype in ULP[used]:
        return Enumerated(ULP[used][dtype][kind], f"every {short(dtype)} gate × a spread of other factors")
    if used == "eager" and dtype == torch.float32:
        scale = 1 + 2**-20  # float64 arithmetic, one rounding
    else:
        scale = 80 if kind == "dgate" else 40
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    unit = torch.finfo(dtype).eps / 2
    formula = {
        "y": "|silu(gate)·up| + η·(2 + |gate| + |up|)",
        "dgate": "|dy·up|·(σ + |gate|·σ·(1−σ)) + η·(2 + 4|dy| + 4|up|)",
        "dup": "|dy·silu(gate)| + η·(2 + |gate| + |dy|)",
    }[kind]
    name = f"{scale:.3g}·{unit:.3g}·{formula}, η = {tiny:.3g}"
    return Derived(name, lambda *inputs: bound(scale * unit, tiny, *inputs))


def _value_bound(relative: float, tiny: float, gate: Tensor, factor: Tensor) -> Tensor:
    """For silu(gate)·factor: every operation rounds once, products may underflow."""
    return relative * (reference.silu(gate) * factor).abs() + tiny * (2 + gate.abs() + factor.abs())


def _slope_bound(relative: float, tiny: float, dy: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """For dy·up·silu'(gate): silu' has a root, so the bound is relative to the sum of its terms' sizes."""
    s = reference.sigmoid(gate)
    terms = s + gate.abs() * s * reference.sigmoid(-gate)
    return relative * (dy * up).abs() * terms + tiny * (2 + 4 * dy.abs() + 4 * up.abs())


def _kinds(of: Activation, options: tuple[Any, ...]) -> dict[str, tuple[str, Callable[..., Tensor]]]:
    """For each output: its kind, and its bound from two numbers and the reference's tensors."""

    def gate_and_up(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        if of.packed:
            return reference.unpack(inputs[0], options[0])
        return (inputs[0], inputs[1]) if of.has_up else (inputs[0], torch.ones_like(inputs[0]))

    def dgate(relative: float, tiny: float, dy: Tensor, *inputs: Tensor) -> Tensor:
        return _slope_bound(relative, tiny, dy, *gate_and_up(*inputs))

    def dup(relative: float, tiny: float, dy: Tensor, *inputs: Tensor) -> Tensor:
        return _value_bound(relative, tiny, gate_and_up(*inputs)[0], dy)

    if of.is_forward:
        return {"y": ("y", lambda relative, tiny, *inputs: _value_bound(relative, tiny, *gate_and_up(*inputs)))}
    if of.packed:
        return {"dpacked": ("dgate", lambda *numbers: reference.pack(dgate(*numbers), dup(*numbers), options[0]))}
    return {"dgate": ("dgate", dgate), "dup": ("dup", dup)} if of.has_up else {"dx": ("dgate", dgate)}


def guarantee(of: Activation, backend: str, problem: Problem) -> dict[str, Guarantee]:
    """What each output of an operator promises."""
    (dtype,) = problem.dtypes
    return {
        output: Guarantee(
            repeatable=True,
            batch_invariant="element" if backend == "triton" else "",
            device_invariant=False,
            accumulator=short(torch.float64 if backend == "eager" else wide_dtype(dtype)),
            roundings=1,
            error=_error(arithmetic(backend, problem.device), dtype, kind, bound),
            domain=DOMAIN,
            special_values=SPECIAL_VALUES,
        )
        for output, (kind, bound) in _kinds(of, problem.options).items()
    }


NEED_GATE, NEED_UP = 1, 2
"""Bits of the gradients a backward computes."""

_BOTH = NEED_GATE | NEED_UP


def _candidates(of: Activation) -> tuple[Candidate, ...]:
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
            guarantee=lambda problem: guarantee(of, "triton", problem),
            setup=setup,
            schedules=_SCHEDULES,
        )

    def numeric(problem: Problem) -> dict[str, Any]:
        return {"order": problem.options[0]} if of.packed else {}

    def forward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...] | None, _: Any) -> Any:
        """A contiguous result is rounded into its memory by the library itself."""
        gate, up, _ = of.views(arguments, outputs or (arguments[0],))
        if outputs is None and not gate.is_contiguous():
            outputs = plan.allocate(arguments)
        return (eager.forward(gate, up, None if outputs is None else outputs[0]),)

    def backward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Any) -> None:
        dy, gate, up, dgate, dup, need = of.views(arguments, outputs)
        eager.backward(dy, gate, up, dgate if need & NEED_GATE else None, dup if need & NEED_UP else None)

    layouts = ("rows", "pairs", "strided") if of.packed else ("rows", "strided")
    run = forward if of.is_forward else allocating_outputs(backward)
    return *map(on_kernels, layouts), in_pytorch("eager", lambda problem: guarantee(of, "eager", problem), run, numeric)


def _forward(views: Callable[..., Any], **of: bool) -> tuple[Candidate, ...]:
    return _candidates(Activation(True, views, **of))


def _backward(views: Callable[..., Any], **of: bool) -> tuple[Candidate, ...]:
    return _candidates(Activation(False, views, **of))


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
