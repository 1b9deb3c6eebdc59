"""The layouts and values that the norms are tested on, and how their rows are batched."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from adjoint.contract.batching import Answers, Rebatch
from adjoint.contract.cases import Case, Inputs, Make

Fill = Callable[..., Tensor]
"""`fill(*shape)` gives random values, contiguous."""

LAYOUTS: dict[str, Callable[[Fill], Tensor]] = {
    "contiguous": lambda fill: fill(6, 40),
    "three axes": lambda fill: fill(2, 3, 100),
    "a head's width": lambda fill: fill(19, 128),
    "wide": lambda fill: fill(2, 1000),
    "odd width": lambda fill: fill(5, 7),
    "one column": lambda fill: fill(5, 1),
    "one row": lambda fill: fill(33),
    "no rows": lambda fill: fill(0, 5),
    "rows apart": lambda fill: fill(5, 256)[:, 64:192],
    "runs of rows": lambda fill: fill(3, 5, 64)[:, :4],
    "three axes of rows": lambda fill: fill(2, 3, 4, 32)[:, :2, :3, :16],
    "transposed": lambda fill: fill(40, 6).T,
    "shifted by one": lambda fill: fill(6 * 40 + 1)[1:].view(6, 40),
    "expanded": lambda fill: fill(1, 40).expand(6, 40),
}
"""How x lies, and all that is like x."""

FEW = ("contiguous", "three axes", "wide")
WIDEST = Case("2048 columns", lambda *where: make(lambda fill: fill(2, 2048), 1, 1)(*where))


def random_rows(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Fill:
    """Normal values, rows of which differ in size: by 1, 30 or 1/1000, where ε counts."""

    def fill(*shape: int) -> Tensor:
        scale = torch.tensor([1.0, 30.0, 1e-3])[torch.randint(3, (*shape[:-1], 1), generator=generator)]
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)

    return fill


def make(
    layout: Callable[[Fill], Tensor], count: int, weight_at: int | None, weight: torch.dtype | None = None
) -> Make:
    """`count` tensors of a layout, and a weight at a place among them, of a dtype of its own if one is given."""

    def inputs(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> tuple[Tensor, ...]:
        fill = random_rows(generator, dtype, device)
        tensors = [layout(fill) for _ in range(count)]
        if weight_at is not None:
            values = torch.randn(tensors[0].shape[-1], generator=generator, dtype=torch.float64)
            tensors.insert(weight_at, values.to(weight or dtype).to(device))
        return tuple(tensors)

    return inputs


def cases(count: int, weight_at: int | None, names: Iterable[str] = tuple(LAYOUTS)) -> tuple[Case, ...]:
    """Layouts, each of all tensors alike; and a float32 weight."""
    listed = [Case(name, make(LAYOUTS[name], count, weight_at)) for name in names]
    if weight_at is not None:
        listed.append(Case("weight in float32", make(LAYOUTS["three axes"], count, weight_at, torch.float32)))
    return tuple(listed)


def gate_in_a_slice(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> tuple[Tensor, ...]:
    """x, a gate that is a part of a wider projection, and a weight."""
    fill = random_rows(generator, dtype, device)
    return fill(19, 128), fill(19, 3 * 128)[:, 128:256], fill(128)


def rebatched(weight_at: int | None) -> Callable[[Inputs, tuple[Tensor, ...]], Iterable[Rebatch]]:
    """Some rows alone, beside the same weight; all results but dweight keep their bits."""

    def rebatch(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterable[Rebatch]:
        rows = inputs[0].shape[0]
        for begin, end in ((0, 1), (rows // 2, rows)) if rows and inputs[0].dim() > 1 else ():

            def part(tensors: Inputs, weight_at: int | None, begin: int = begin, end: int = end) -> Inputs:
                return tuple(t if place == weight_at else t[begin:end] for place, t in enumerate(tensors))

            def pairs(whole: Answers, alone: Answers, part: Callable[..., Inputs] = part) -> Iterable[Inputs]:
                yield from zip(alone[0], part(whole[0], None), strict=True)
                gradients = zip(alone[1], part(whole[1], weight_at), strict=True)
                yield from (pair for place, pair in enumerate(gradients) if place != weight_at)

            yield Rebatch(f"rows {begin} to {end}", part(inputs, weight_at), part(upstream, None), pairs)

    return rebatch


def normal_rows(count: int, weight_at: int | None, rows: int, size: int) -> Make:
    """Inputs of a workload."""

    def inputs(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> tuple[Tensor, ...]:
        source = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
        shapes = [(rows, size)] * count
        if weight_at is not None:
            shapes.insert(weight_at, (size,))  # type: ignore[arg-type]
        return tuple(torch.randn(shape, dtype=dtype, device=device, generator=source) for shape in shapes)

    return inputs


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor for calls that are built and not run."""
    return torch.empty(shape, dtype=dtype, device="meta")
