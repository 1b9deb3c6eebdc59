"""Which kernel serves which activation problem, and what it guarantees."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.candidates import in_pytorch
from adjoint.core.guarantee import Derived, Enumerated, ErrorStatement, Guarantee
from adjoint.core.kernels import why_not_triton
from adjoint.core.layout import coalesce
from adjoint.core.plan import Candidate, Plan
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules
from adjoint.ops.activation import eager, reference
from adjoint.ops.activation.packing import unpack

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))


def default_schedule(kernel: str) -> dict[str, int]:
    """The schedule of a kernel on a GPU nobody tuned."""
    return _SCHEDULES.lookup(kernel)


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


def _kernels() -> Any:
    """The kernel module, imported on first use: it imports Triton."""
    from adjoint.ops.activation import kernels

    return kernels


def _numeric(problem: Problem) -> dict[str, Any]:
    """The order of a packed tensor is the one parameter that changes results."""
    return {"order": problem.options[0]} if "packed" in problem.op else {}


Launch = Callable[[Any, Plan, tuple[Any, ...], tuple[Tensor, ...]], None]
"""`launch(kernels, plan, arguments, outputs)` runs a Triton plan."""


def _triton(layout: str, kernel: str, launch: Launch) -> Candidate:
    def refuse(problem: Problem) -> str:
        if problem.layout != layout:
            return f"reads tensors laid out as {layout}, these are {problem.layout}"
        return why_not_triton(problem.device)

    def run(
        plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...] | None, workspace: Tensor | None
    ) -> tuple[Tensor, ...]:
        if outputs is None:
            outputs = plan.allocate(arguments)
        launch(_kernels(), plan, arguments, outputs)
        return outputs

    return Candidate(
        name=f"triton.{layout}",
        backend="triton",
        kernel=kernel,
        revision=1,
        refuse=refuse,
        guarantee=lambda problem: guarantee("triton", problem),
        run=run,
        prepare=lambda plan: _kernels().prepare(plan),
        numeric=_numeric,
        schedules=_SCHEDULES,
    )


def _eager(compute: Callable[[tuple[Any, ...], tuple[Tensor, ...]], None]) -> Candidate:
    def run(
        plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...] | None, workspace: Tensor | None
    ) -> tuple[Tensor, ...]:
        if outputs is None:
            outputs = plan.allocate(arguments)
        compute(arguments, outputs)
        return outputs

    return _eager_candidate(run)


def _eager_forward(unpacked: Callable[[tuple[Any, ...]], tuple[Tensor, Tensor | None]]) -> Candidate:
    """A forward in plain PyTorch; a contiguous result is rounded into its memory by the library itself."""

    def run(
        plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...] | None, workspace: Tensor | None
    ) -> tuple[Tensor, ...]:
        gate, up = unpacked(arguments)
        if outputs is None and not gate.is_contiguous():
            outputs = plan.allocate(arguments)
        return (eager.forward(gate, up, None if outputs is None else outputs[0]),)

    return _eager_candidate(run)


def _eager_candidate(run: Any) -> Candidate:
    return in_pytorch("eager", lambda problem: guarantee("eager", problem), run, _numeric)


def _candidates(
    direction: str, launch: Launch, in_pytorch: Candidate, pairs: Launch | None = None
) -> tuple[Candidate, ...]:
    """The candidates of an operator, best first."""
    alternating = (_triton("pairs", f"swiglu_{direction}_pairs", pairs),) if pairs is not None else ()
    return (
        _triton("rows", f"silu_{direction}_rows", launch),
        *alternating,
        _triton("strided", f"silu_{direction}_strided", launch),
        in_pytorch,
    )


NEED_GATE, NEED_UP = 1, 2
"""Bits of the gradients a backward computes."""

_BOTH = NEED_GATE | NEED_UP


def _wanted(need: int, outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    dgate, dup = outputs
    return dgate if need & NEED_GATE else None, dup if need & NEED_UP else None


SILU = _candidates(
    "forward",
    lambda k, plan, a, out: k.forward(plan, a[0], None, out[0]),
    _eager_forward(lambda a: (a[0], None)),
)
SILU_BACKWARD = _candidates(
    "backward",
    lambda k, plan, a, out: k.backward(plan, a[0], a[1], None, out[0], None, _BOTH),
    _eager(lambda a, out: eager.backward(a[0], a[1], None, out[0], None)),
)
SILU_BACKWARD_REUSE = _candidates(
    "backward",
    lambda k, plan, a, out: k.backward(plan, a[0], a[1], None, a[1], None, _BOTH),
    _eager(lambda a, out: eager.backward(a[0], a[1], None, a[1], None)),
)
SWIGLU = _candidates(
    "forward",
    lambda k, plan, a, out: k.forward(plan, a[0], a[1], out[0]),
    _eager_forward(lambda a: (a[0], a[1])),
)
SWIGLU_BACKWARD = _candidates(
    "backward",
    lambda k, plan, a, out: k.backward(plan, *a[:3], *out, a[3]),
    _eager(lambda a, out: eager.backward(a[0], a[1], a[2], *_wanted(a[3], out))),
)
SWIGLU_BACKWARD_REUSE = _candidates(
    "backward",
    lambda k, plan, a, out: k.backward(plan, *a[:3], a[1], a[2], a[3]),
    _eager(lambda a, out: eager.backward(a[0], a[1], a[2], *_wanted(a[3], (a[1], a[2])))),
)
SWIGLU_PACKED = _candidates(
    "forward",
    lambda k, plan, a, out: k.forward(plan, *unpack(*a), out[0]),
    _eager_forward(lambda a: unpack(*a)),
    lambda k, plan, a, out: k.forward_pairs(plan, a[0], out[0]),
)
SWIGLU_PACKED_BACKWARD = _candidates(
    "backward",
    lambda k, plan, a, out: k.backward(plan, a[0], *unpack(*a[1:]), *unpack(out[0], a[2]), _BOTH),
    _eager(lambda a, out: eager.backward(a[0], *unpack(*a[1:]), *unpack(out[0], a[2]))),
    lambda k, plan, a, out: k.backward_pairs(plan, a[0], a[1], out[0]),
)
SWIGLU_PACKED_BACKWARD_REUSE = _candidates(
    "backward",
    lambda k, plan, a, out: k.backward(plan, a[0], *unpack(*a[1:]), *unpack(*a[1:]), _BOTH),
    _eager(lambda a, out: eager.backward(a[0], *unpack(*a[1:]), *unpack(*a[1:]))),
    lambda k, plan, a, out: k.backward_pairs(plan, a[0], a[1], a[1]),
)
