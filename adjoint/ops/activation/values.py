"""The layouts and values on which the activations are tested: random ones, and every one of the 16-bit types."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from adjoint.contract.cases import Case, Subject, Workload, normal
from adjoint.core.problem import short

Layout = Callable[[Callable[..., Tensor]], Tensor]
"""Makes one tensor from `fill(*shape)`, which gives contiguous random values."""

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

PACKED_LAYOUTS: dict[str, Layout] = {
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


def random_values(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Callable[..., Tensor]:
    """Random values in the range of a model and far beyond it: normal values, times 1, 8 or 50."""

    def fill(*shape: int) -> Tensor:
        scale = torch.tensor([1.0, 8.0, 50.0])[torch.randint(3, shape, generator=generator)]
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)

    return fill


def cases(layouts: dict[str, Layout], count: int) -> tuple[Case, ...]:
    """A case of `count` tensors for each layout."""

    def case(name: str, layout: Layout) -> Case:
        return Case(name, lambda *where: tuple(layout(random_values(*where)) for _ in range(count)))

    return tuple(case(*named) for named in layouts.items())


def mixed_strides(*where: Any) -> tuple[Tensor, ...]:
    fill = random_values(*where)
    return fill(70, 6).T, fill(6, 280)[:, ::4]


def huge_up(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Gates far into underflow, each with the largest up in the domain of the stated error."""
    gate = torch.linspace(-500, 5, 1011, dtype=torch.float64).to(dtype).to(device)
    return gate, torch.full_like(gate, min(torch.finfo(dtype).max, 2.0**98))


def every_value(dtype: torch.dtype) -> Tensor:
    """Every bit pattern of a 16-bit type, including NaNs and infinities."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def spread(dtype: torch.dtype) -> list[float]:
    """The factors of the exhaustive cases: signs, zero, and the ends of the stated domain."""
    small, large = (2.0**-24, 65504.0) if dtype == torch.float16 else (2.0**-60, 2.0**88)
    return [1.0, -1.0, 0.0, 0.7, -3.14, 1e-3, 1e3, small, -large]


ROOT = -1.2784645427610738
"""The root of silu'. The relative error of the slope is largest near it."""


def around_root(dtype: torch.dtype, gates: int, others: int) -> tuple[Tensor, Tensor, Tensor]:
    """The values nearest to the root of silu', each with every significand of one factor and some of another.

    Factors are scaled by 2^10, so that the products are normal numbers, whose units in the last place are finest.
    Pairs of factors matter, because the largest error is that of a product just below a power of two that is rounded to
    just above it.
    """
    values = every_value(dtype)
    values = values[values.isfinite()]
    nearest = values[(values.double() - ROOT).abs().argsort()[:gates]]
    count = round(1 / torch.finfo(dtype).eps)
    significands = (1 + torch.arange(count, dtype=torch.float64) / count).to(dtype)
    other = significands[:: max(1, count // others)][:others]
    gate, factor, other = (t.flatten() for t in torch.meshgrid(nearest, 1024 * significands, other, indexing="ij"))
    return gate, factor, other


def exhaustive(arrange: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> Callable[[torch.dtype], Iterator[Case]]:
    """For each factor, a case with every gate, in which the upstream gradient goes through the same factors at another
    pace.

    Then, for gates where rounding errors weigh most, every significand of the factor and of the upstream gradient.
    """

    def case(name: str, gate: Tensor, factor: Tensor, dy: Tensor) -> Case:
        return Case(
            name,
            lambda dtype, device, generator: tuple(t.to(device) for t in arrange(gate, factor)),
            lambda output, generator: dy.to(output.device).view(output.shape),
        )

    def every_case(dtype: torch.dtype) -> Iterator[Case]:
        gate = every_value(dtype)
        filled = [torch.full_like(gate, factor) for factor in spread(dtype)]
        for index, factor in enumerate(spread(dtype)):
            dy = filled[(4 * index + 1) % len(filled)]
            yield case(f"every gate, factor {factor:.3g}", gate, filled[index], dy)
        for name, gates, others in (("root, every significand", 64, 1), ("root, pairs of significands", 1, 64)):
            gate, first, second = around_root(dtype, gates, others)
            yield case(f"{name} of the factor", gate, first, second)
            yield case(f"{name} of the upstream", gate, second, first)

    return every_case


WORKLOAD_SHAPES = ((32768, 2048), (16384, 12288), (32768, 5120))


CPU_WORKLOADS: tuple[dict[str, Any], ...] = tuple(
    {"shape": (1024, 4096), "dtype": d, "devices": ("cpu",)} for d in (torch.float32, torch.bfloat16)
)
"""A workload that fits a CPU's cache."""


def workload(
    subject: Subject, shape: tuple[int, int], baseline: Callable[..., Tensor], dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> Workload:  # fmt: skip
    """A workload whose forward reads gate and up and writes y, and whose backward reads dy, gate and up and writes the
    gradients."""
    (rows, columns), is_packed = shape, "order" in subject.keywords
    tensors, one = 2 if is_packed else len(subject.inputs), dtype.itemsize * rows * columns
    make = normal((rows, 2 * columns)) if is_packed else normal(*(shape,) * tensors)
    name = f"{subject.name} {rows}×{'2·' * is_packed}{columns}"
    name += f", {short(dtype)}" * (dtype != torch.bfloat16)
    return Workload(name, subject, make, (tensors + 1) * one, (2 * tensors + 1) * one, baseline, dtype=dtype, **more)


def built_tensors(count: int) -> Iterator[tuple[Tensor, ...]]:
    """Tensors for calls that are built but not run, in every dtype, as rows and strided."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.empty(64, 64, dtype=dtype, device="meta")
        yield from ((x,) * count for x in (tensor, tensor[:, ::2]))
