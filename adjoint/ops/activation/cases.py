"""The shapes, layouts and values the activations are tested, verified and timed on."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.core.cases import Answers, Case, Make, Special, Subject, Workload
from adjoint.core.kernels import Variant
from adjoint.ops.activation import reference
from adjoint.ops.activation.bad_calls import BAD_CALLS
from adjoint.ops.activation.packing import ORDERS, unpack
from adjoint.ops.activation.silu import silu
from adjoint.ops.activation.swiglu import swiglu

# --------------------------------------------------------------------------------------- layouts

Layout = Callable[[Callable[..., Tensor]], Tensor]
"""Makes one tensor out of `fill(*shape)`, which gives random values, contiguous."""

LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda fill: fill(6, 70),
    "three axes": lambda fill: fill(2, 3, 40),
    "past one tile": lambda fill: fill(2, 2500),
    "rows apart": lambda fill: fill(3, 3 * 4208)[:, 4208:8416],
    "short rows apart": lambda fill: fill(5, 48)[:, :16],
    "shifted by one": lambda fill: fill(2051)[1:],
    "transposed": lambda fill: fill(70, 6).T,
    "every other": lambda fill: fill(6, 140)[:, ::2],
    "expanded": lambda fill: fill(6, 1).expand(6, 70),
    "six axes": lambda fill: fill(3, 3, 3, 3, 3, 6)[:2, 1:, :2, 1:, :2, ::2],
    "one element": lambda fill: fill(1),
    "no axes": lambda fill: fill(1).reshape(()),
    "empty": lambda fill: fill(3, 0, 4),
}

_PACKED_LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda fill: fill(6, 140),
    "three axes": lambda fill: fill(2, 3, 80),
    "past one tile": lambda fill: fill(2, 5000),
    "odd halves": lambda fill: fill(3, 2 * 4201),
    "rows apart": lambda fill: fill(2, 2, 2 * 4208)[:, 1],
    "short rows apart": lambda fill: fill(5, 96)[:, 32:64],
    "shifted by one": lambda fill: fill(4101)[1:],
    "transposed": lambda fill: fill(140, 6).T,
    "every other": lambda fill: fill(6, 280)[:, ::2],
    "expanded": lambda fill: fill(1, 140).expand(6, 140),
    "five axes": lambda fill: fill(4, 3, 2, 5, 6).permute(3, 1, 0, 2, 4)[:, 1:],
    "one pair": lambda fill: fill(2),
    "empty": lambda fill: fill(3, 0, 4),
    "empty width": lambda fill: fill(3, 0),
}


def _values(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    """Random values whose sizes span what a model sees and far beyond: normal, times 1, 8 or 50."""

    def fill(*shape: int) -> Tensor:
        scale = torch.tensor([1.0, 8.0, 50.0])[torch.randint(3, shape, generator=generator)]
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)

    return fill


def _each(layout: Layout, count: int) -> Make:
    """`count` tensors of a layout."""
    return lambda dtype, device, generator: tuple(layout(_values(generator, dtype, device)) for _ in range(count))


def _mixed(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> tuple[Tensor, ...]:
    fill = _values(generator, dtype, device)
    return fill(70, 6).T, fill(6, 280)[:, ::4]


def _huge(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Gates far into underflow, each with the largest up the domain of the stated error allows."""
    gate = torch.linspace(-500, 5, 1011, dtype=torch.float64).to(dtype).to(device)
    return gate, torch.full_like(gate, min(torch.finfo(dtype).max, 2.0**98))


# ------------------------------------------------------------------------------------ exhaustive


def every_value(dtype: torch.dtype) -> Tensor:
    """Every bit pattern of a 16-bit type, NaNs and infinities included."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def spread(dtype: torch.dtype) -> list[float]:
    """Factors the exhaustive cases meet: signs, zero, and the ends of the stated domain."""
    small, large = (2.0**-24, 65504.0) if dtype == torch.float16 else (2.0**-60, 2.0**88)
    return [1.0, -1.0, 0.0, 0.7, -3.14, 1e-3, 1e3, small, -large]


ROOT = -1.2784645427610738
"""Where silu' is 0: the slope's relative error is largest beside it."""


def around_root(dtype: torch.dtype, gates: int, others: int) -> tuple[Tensor, Tensor, Tensor]:
    """The values nearest the root of silu', each with every significand of one factor and some of another.

    Scaled by 2^10, so that the products are normal numbers, whose units in the last place are finest.
    Pairs matter: the largest error is that of a product just below a power of two, rounded just above.
    """
    values = every_value(dtype)
    values = values[values.isfinite()]
    nearest = values[(values.double() - ROOT).abs().argsort()[:gates]]
    count = round(1 / torch.finfo(dtype).eps)
    significands = (1 + torch.arange(count, dtype=torch.float64) / count).to(dtype)
    other = significands[:: max(1, count // others)][:others]
    gate, factor, other = (t.flatten() for t in torch.meshgrid(nearest, 1024 * significands, other, indexing="ij"))
    return gate, factor, other


def _exhaustive(arrange: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> Callable[[torch.dtype], Iterator[Case]]:
    """For each factor, a case with every gate; the upstream gradient walks the spread at another pace.

    Then, where rounding errors weigh most, every significand of the factor, and of the upstream.
    """

    def made(gate: Tensor, factor: Tensor) -> Make:
        return lambda dtype, device, generator: tuple(t.to(device) for t in arrange(gate, factor))

    def filled(value: float) -> Callable[[Tensor, torch.Generator], Tensor]:
        return lambda output, generator: torch.full_like(output, value)

    def laid(values: Tensor) -> Callable[[Tensor, torch.Generator], Tensor]:
        return lambda output, generator: values.to(output.device).view(output.shape)

    def cases(dtype: torch.dtype) -> Iterator[Case]:
        factors = spread(dtype)
        gate = every_value(dtype)
        for index, factor in enumerate(factors):
            upstream = filled(factors[(4 * index + 1) % len(factors)])
            yield Case(f"every gate, factor {factor:.3g}", made(gate, torch.full_like(gate, factor)), upstream)
        for name, gates, others in (("root, every significand", 64, 1), ("root, pairs of significands", 1, 64)):
            gate, first, second = around_root(dtype, gates, others)
            yield Case(f"{name} of the factor", made(gate, first), laid(second))
            yield Case(f"{name} of the upstream", made(gate, second), laid(first))

    return cases


# -------------------------------------------------------------------------------- special values

_INF, _NAN = float("inf"), float("nan")

_SILU_SPECIALS = tuple(
    Special(f"x = {x}", (x,), dy, (y,), (dx,))
    for x, dy, y, dx in [
        (0.0, 1.0, 0.0, 0.5),
        (-0.0, 1.0, -0.0, 0.5),
        (_INF, 3.0, _INF, 3.0),
        (-_INF, 3.0, -0.0, -0.0),
        (_NAN, 1.0, _NAN, _NAN),
        (1.0, 0.0, None, 0.0),
        (1.0, _NAN, None, _NAN),
        (-_INF, _INF, -0.0, _NAN),
    ]
    if y is not None
)

_SWIGLU_SPECIALS = tuple(
    Special(f"gate = {gate}, up = {up}", (gate, up), 1.0, (y,), (dgate, dup))
    for gate, up, y, dgate, dup in [
        (0.0, 2.0, 0.0, 1.0, 0.0),
        (-0.0, 2.0, -0.0, 1.0, -0.0),
        (-0.0, -2.0, 0.0, -1.0, -0.0),
        (_INF, 2.0, _INF, 2.0, _INF),
        (_INF, 0.0, _NAN, 0.0, _INF),
        (-_INF, 2.0, -0.0, -0.0, -0.0),
        (-_INF, _INF, _NAN, _NAN, -0.0),
        (0.0, _INF, _NAN, _INF, 0.0),
        (_NAN, 2.0, _NAN, _NAN, _NAN),
    ]
)

_SWIGLU_SPECIALS += (
    Special(
        "gate = -300, up the largest number",
        (-300.0, torch.finfo(torch.bfloat16).max),
        1.0,
        (-0.0,),
        (-0.0, -0.0),
        dtypes=(torch.float32, torch.bfloat16),
    ),
)

# -------------------------------------------------------------------------------------- mistakes


def _answers(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Answers]:
    """A wrong answer computed in float64 by given formulas and rounded once: only the formula is wrong."""

    def answer(upstream: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> Answers:
        wide = [t.double() for t in inputs]
        outputs = _tuple(forward(*wide))
        gradients = _tuple(backward(*(t.double() for t in upstream), *wide))
        dtype = inputs[0].dtype
        return tuple(t.to(dtype) for t in outputs), tuple(t.to(dtype) for t in gradients)

    return answer


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _narrow_arithmetic(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Answers]:
    """Every operation rounded to bfloat16, or to float16 for float16 itself."""

    def answer(upstream: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> Answers:
        dtype = inputs[0].dtype
        narrow = torch.float16 if dtype == torch.float16 else torch.bfloat16
        values = [t.to(narrow) for t in inputs]
        outputs = _tuple(forward(*values))
        gradients = _tuple(backward(*(t.to(narrow) for t in upstream), *values))
        return tuple(t.to(dtype) for t in outputs), tuple(t.to(dtype) for t in gradients)

    return answer


def _zeros(upstream: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> Answers:
    return tuple(torch.zeros_like(t) for t in upstream), tuple(torch.zeros_like(t) for t in inputs)


_SILU_MISTAKES = {
    "zero output": _zeros,
    "narrow arithmetic": _narrow_arithmetic(reference.silu, reference.silu_backward),
    "slope without its second term": _answers(reference.silu, lambda dy, x: dy * reference.sigmoid(x)),
    "sigmoid instead of silu": _answers(reference.sigmoid, reference.silu_backward),
    "upstream gradient ignored": _answers(reference.silu, lambda dy, x: reference.silu_slope(x)),
}

_SWIGLU_MISTAKES = {
    "zero output": _zeros,
    "narrow arithmetic": _narrow_arithmetic(reference.swiglu, reference.swiglu_backward),
    "gate and up exchanged": _answers(
        lambda gate, up: reference.swiglu(up, gate), lambda dy, gate, up: reference.swiglu_backward(dy, up, gate)
    ),
    "gradients exchanged": _answers(
        reference.swiglu, lambda dy, gate, up: reference.swiglu_backward(dy, gate, up)[::-1]
    ),
    "slope without its second term": _answers(
        reference.swiglu,
        lambda dy, gate, up: (dy * up * reference.sigmoid(gate), dy * reference.silu(gate)),
    ),
    "dgate without up": _answers(
        reference.swiglu, lambda dy, gate, up: (dy * reference.silu_slope(gate), dy * reference.silu(gate))
    ),
}


def _packed_mistakes(order: str) -> dict[str, Any]:
    other = "up_gate" if order == "gate_up" else "gate_up"
    return {
        "zero output": _zeros,
        "another order": _answers(
            lambda packed: reference.swiglu_packed(packed, other),
            lambda dy, packed: reference.swiglu_packed_backward(dy, packed, other),
        ),
        "gradients exchanged": _answers(
            lambda packed: reference.swiglu_packed(packed, order),
            lambda dy, packed: reference.pack(
                *reference.swiglu_backward(dy, *reference.unpack(packed, order))[::-1], order
            ),
        ),
    }


# -------------------------------------------------------------------------------------- subjects

SILU = Subject(
    name="silu",
    function=silu,
    inputs=("x",),
    reference=lambda x: (reference.silu(x),),
    reference_backward=lambda dy, x: (reference.silu_backward(dy, x),),
    cases=tuple(Case(name, _each(layout, 1)) for name, layout in LAYOUTS.items()),
    exhaustive=_exhaustive(lambda gate, factor: (gate,)),
    mistakes=_SILU_MISTAKES,
    specials=_SILU_SPECIALS,
)

SWIGLU = Subject(
    name="swiglu",
    function=swiglu,
    inputs=("gate", "up"),
    reference=lambda gate, up: (reference.swiglu(gate, up),),
    reference_backward=reference.swiglu_backward,
    cases=(
        *(Case(name, _each(layout, 2)) for name, layout in LAYOUTS.items()),
        Case("mixed strides", _mixed),
        Case("huge up", _huge),
    ),
    exhaustive=_exhaustive(lambda gate, factor: (gate, factor)),
    mistakes=_SWIGLU_MISTAKES,
    specials=_SWIGLU_SPECIALS,
)

PACKED = tuple(
    Subject(
        name=f"swiglu[{order}]",
        function=swiglu,
        keywords={"order": order},
        inputs=("packed",),
        reference=lambda packed, order=order: (reference.swiglu_packed(packed, order),),
        reference_backward=lambda dy, packed, order=order: (reference.swiglu_packed_backward(dy, packed, order),),
        cases=tuple(Case(name, _each(layout, 1)) for name, layout in _PACKED_LAYOUTS.items()),
        exhaustive=_exhaustive(lambda gate, factor, order=order: (reference.pack(gate, factor, order),)),  # type: ignore[misc]
        mistakes=_packed_mistakes(order),
    )
    for order in ORDERS
)

SUBJECTS = (SILU, SWIGLU, *PACKED)

__all__ = ["BAD_CALLS", "SUBJECTS", "WORKLOADS", "builds"]

# ------------------------------------------------------------------------------ workloads, builds

_BENCH_SHAPES = ((32768, 2048), (16384, 12288), (32768, 5120))


def _normal(count: int, shape: tuple[int, ...]) -> Make:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> tuple[Tensor, ...]:
        seed = int(torch.randint(2**31, (), generator=generator))
        own = torch.Generator(device).manual_seed(seed)
        return tuple(torch.randn(shape, dtype=dtype, device=device, generator=own) for _ in range(count))

    return make


def _torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As users write it."""
    return F.silu(gate) * up


def _workloads() -> Iterable[Workload]:
    for rows, columns in _BENCH_SHAPES:
        size = rows * columns * 2  # bytes of one bfloat16 tensor
        shape = f"{rows}×{columns}"
        yield Workload(f"silu {shape}", SILU, _normal(1, (rows, columns)), 2 * size, 3 * size, F.silu, peers=())
        yield Workload(
            f"swiglu {shape}",
            SWIGLU,
            _normal(2, (rows, columns)),
            3 * size,
            5 * size,
            _torch_swiglu,
            peers=("liger_swiglu",),
        )
    rows, columns = _BENCH_SHAPES[0]
    size = rows * columns * 2
    for subject in PACKED:
        order = subject.keywords["order"]
        yield Workload(
            f"{subject.name} {rows}×2·{columns}",
            subject,
            _normal(1, (rows, 2 * columns)),
            3 * size,
            5 * size,
            lambda packed, order=order: _torch_swiglu(*unpack(packed, order)),
        )


WORKLOADS = tuple(_workloads())


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Every kernel variant, named, as it would be compiled for a target."""
    from adjoint.ops.activation import kernels
    from adjoint.ops.activation.plans import default_schedule

    for kernel in kernels.KERNELS:
        for dtype in SILU.dtypes:
            for has_up in (False, True) if "HAS_UP" in kernel.parameters else (True,):
                variants = kernels.variants(
                    kernel.name, dtype, has_up, target.startswith("sm_"), default_schedule(kernel.name)
                )
                for key, variant in variants.items():
                    yield f"{kernel.name} {dtype} has_up={has_up} {key}", variant
