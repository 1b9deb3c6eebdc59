"""Which kernel serves which activation problem, and what it guarantees."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Enumerated, ErrorStatement, Guarantee
from adjoint.core.launch import Execute, Setup
from adjoint.core.layout import coalesce
from adjoint.core.op import Facts
from adjoint.core.plan import Candidate, Plan, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules
from adjoint.ops.activation import eager, reference
from adjoint.ops.activation.packing import unpack

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))


# ---------------------------------------------------------------------------------------------- layout


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


def describe_reuse(dy: Tensor, *arguments: Any) -> Facts:
    """The facts of a backward that overwrites its inputs."""
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    return Facts((dy.dtype,), layout_of([dy, *tensors]))


# ------------------------------------------------------------------------------------------- guarantee

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


def _error(used: str, dtype: torch.dtype, kind: str, bound: Callable[..., Tensor]) -> ErrorStatement:
    """The statement for an output of a kind: "y", "dgate" (a slope) or "dup" (a value)."""
    if dtype in ULP[used]:
        over = f"every {str(dtype).removeprefix('torch.')} gate × a spread of other factors"
        return Enumerated(ULP[used][dtype][kind], over)
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
    return Derived(name, lambda *inputs: bound(*inputs, scale * unit, tiny))


def _value_bound(gate: Tensor, factor: Tensor, relative: float, tiny: float) -> Tensor:
    """For silu(gate)·factor: every operation rounds once, products may underflow."""
    return relative * (reference.silu(gate) * factor).abs() + tiny * (2 + gate.abs() + factor.abs())


def _slope_bound(dy: Tensor, gate: Tensor, up: Tensor, relative: float, tiny: float) -> Tensor:
    """For dy·up·silu'(gate): silu' has a root, so the bound is relative to the sum of its terms' sizes."""
    s = reference.sigmoid(gate)
    terms = s + gate.abs() * s * reference.sigmoid(-gate)
    return relative * (dy * up).abs() * terms + tiny * (2 + 4 * dy.abs() + 4 * up.abs())


def _kinds(operator: str, options: tuple[Any, ...]) -> dict[str, tuple[str, Callable[..., Tensor]]]:
    """For each output of an operator: its kind, and its bound from the reference's tensors."""
    if operator == "silu":
        return {"y": ("y", lambda x, r, t: _value_bound(x, torch.ones_like(x), r, t))}
    if operator == "silu_backward":
        return {"dx": ("dgate", lambda dy, x, r, t: _slope_bound(dy, x, torch.ones_like(x), r, t))}
    if operator == "swiglu":
        return {"y": ("y", _value_bound)}
    if operator == "swiglu_backward":
        return {
            "dgate": ("dgate", _slope_bound),
            "dup": ("dup", lambda dy, gate, up, r, t: _value_bound(gate, dy, r, t)),
        }
    (order,) = options
    if operator == "swiglu_packed":
        return {"y": ("y", lambda packed, r, t: _value_bound(*reference.unpack(packed, order), r, t))}

    def packed_gradient(dy: Tensor, packed: Tensor, relative: float, tiny: float) -> Tensor:
        gate, up = reference.unpack(packed, order)
        to_gate = _slope_bound(dy, gate, up, relative, tiny)
        return reference.pack(to_gate, _value_bound(gate, dy, relative, tiny), order)

    return {"dpacked": ("dgate", packed_gradient)}


def guarantee(backend: str, problem: Problem) -> dict[str, Guarantee]:
    """What each output of an operator promises."""
    dtype = problem.dtypes[0]
    used = arithmetic(backend, problem.device)
    wide = "float64" if backend == "eager" or dtype == torch.float64 else "float32"
    return {
        output: Guarantee(
            repeatable=True,
            batch_invariant="element" if backend == "triton" else "",
            device_invariant=False,
            accumulator=wide,
            roundings=1,
            error=_error(used, dtype, kind, bound),
            domain=DOMAIN,
            special_values=SPECIAL_VALUES,
        )
        for output, (kind, bound) in _kinds(problem.op.removesuffix("_reuse"), problem.options).items()
    }


# ------------------------------------------------------------------------------------------ candidates

Views = Callable[[tuple[Any, ...], tuple[Tensor, ...]], tuple[Any, ...]]
"""The tensors of an operator from its arguments and outputs, as kernels and plain PyTorch take them alike.

Of a forward gate, up and y; of a backward dy, gate, up, dgate, dup and need. Without an up, up and dup are None.
"""


def _on_kernels(layout: str, direction: str, bind: Callable[[Any], Callable[[Setup], Execute]]) -> Candidate:
    """A plan on Triton for one layout; `bind` picks its setup from the kernel module, which imports Triton."""

    def refuse(problem: Problem) -> str:
        readable = problem.layout == layout
        return "" if readable else f"reads tensors laid out as {layout}, these are {problem.layout}"

    def setup(setup: Setup) -> Execute:
        from adjoint.ops.activation import kernels

        if "packed" in setup.problem.op:
            setup.add_numeric(order=setup.problem.options[0])
        return bind(kernels)(setup)

    return Candidate(
        name=f"triton.{layout}",
        backend="triton",
        kernel=f"{'swiglu' if layout == 'pairs' else 'silu'}_{direction}_{layout}",
        revision=1,
        refuse=refuse,
        guarantee=lambda problem: guarantee("triton", problem),
        setup=setup,
        schedules=_SCHEDULES,
    )


def _in_pytorch(run: Any) -> Candidate:
    return in_pytorch(
        "eager",
        lambda problem: guarantee("eager", problem),
        run,
        lambda problem: {"order": problem.options[0]} if "packed" in problem.op else {},
    )


def _forward(views: Views, pairs: bool = False) -> tuple[Candidate, ...]:
    """The candidates of a forward, best first."""

    def run(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...] | None, _: Any) -> tuple[Tensor, ...]:
        """A contiguous result is rounded into its memory by the library itself."""
        gate, up, _ = views(arguments, outputs or (arguments[0],))
        if outputs is None and not gate.is_contiguous():
            outputs = plan.allocate(arguments)
        return (eager.forward(gate, up, None if outputs is None else outputs[0]),)

    return (
        _on_kernels("rows", "forward", lambda kernels: lambda setup: kernels.forward_rows(setup, views)),
        *(_on_kernels("pairs", "forward", lambda kernels: kernels.forward_pairs),) * pairs,
        _on_kernels("strided", "forward", lambda kernels: lambda setup: kernels.forward_strided(setup, views)),
        _in_pytorch(run),
    )


def _backward(views: Views, pairs: bool = False) -> tuple[Candidate, ...]:
    """The candidates of a backward, best first."""

    def compute(_: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Any) -> None:
        dy, gate, up, dgate, dup, need = views(arguments, outputs)
        eager.backward(dy, gate, up, dgate if need & NEED_GATE else None, dup if need & NEED_UP else None)

    return (
        _on_kernels("rows", "backward", lambda kernels: lambda setup: kernels.backward_rows(setup, views)),
        *(_on_kernels("pairs", "backward", lambda kernels: kernels.backward_pairs),) * pairs,
        _on_kernels("strided", "backward", lambda kernels: lambda setup: kernels.backward_strided(setup, views)),
        _in_pytorch(allocating_outputs(compute)),
    )


NEED_GATE, NEED_UP = 1, 2
"""Bits of the gradients a backward computes."""

_BOTH = NEED_GATE | NEED_UP

SILU = _forward(lambda a, out: (a[0], None, out[0]))
SILU_BACKWARD = _backward(lambda a, out: (*a, None, out[0], None, _BOTH))
SILU_REUSE = _backward(lambda a, out: (*a, None, a[1], None, _BOTH))
SWIGLU = _forward(lambda a, out: (*a, out[0]))
SWIGLU_BACKWARD = _backward(lambda a, out: (*a[:3], *out, a[3]))
SWIGLU_REUSE = _backward(lambda a, out: (*a[:3], a[1], a[2], a[3]))
SWIGLU_PACKED = _forward(lambda a, out: (*unpack(*a), out[0]), pairs=True)
SWIGLU_PACKED_BACKWARD = _backward(
    lambda a, out: (a[0], *unpack(*a[1:]), *unpack(out[0], a[2]), _BOTH),
    pairs=True,
)
SWIGLU_PACKED_REUSE = _backward(lambda a, out: (a[0], *unpack(*a[1:]), *unpack(*a[1:]), _BOTH), pairs=True)
