"""The layouts and values that the norms are tested on, and how their rows are batched."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from adjoint.contract.batching import Answers, Rebatch
from adjoint.contract.cases import Case, Inputs, Make

Layout = Callable[[Callable[..., Tensor]], Tensor]
"""Makes one tensor out of `fill(*shape)`, which gives random values, contiguous."""

LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda fill: fill(6, 40),
    "three axes": lambda fill: fill(2, 3, 100),
    "a head's width": lambda fill: fill(21, 128),
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
    "wide": lambda fill: fill(3, 2048),
}


def random_rows(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    """Normal values, rows of which differ in size: by 1, 30 or 1/1000, where ε counts."""

    def fill(*shape: int) -> Tensor:
        scale = torch.tensor([1.0, 30.0, 1e-3])[torch.randint(3, (*shape[:-1], 1), generator=generator)]
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)

    return fill


def inputs(layout: Layout, count: int, weight_at: int | None, wide_weight: bool = False) -> Make:
    """`count` tensors of a layout, and a weight at a place among them; `wide_weight`: in float32 beside 16-bit types."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> tuple[Tensor, ...]:
        tensors = [layout(random_rows(generator, dtype, device)) for _ in range(count)]
        if weight_at is not None:
            weight = torch.randn(tensors[0].shape[-1], generator=generator, dtype=torch.float64).to(device)
            tensors.insert(weight_at, weight.to(torch.float32 if wide_weight and dtype.itemsize == 2 else dtype))
        return tuple(tensors)

    return make


def cases(count: int, weight_at: int | None) -> tuple[Case, ...]:
    """Every layout, of all tensors alike; and a gate, or what comes second, that is a slice of a wider tensor."""
    listed = [Case(name, inputs(layout, count, weight_at)) for name, layout in LAYOUTS.items()]
    if weight_at is not None:
        listed.append(Case("weight in float32", inputs(LAYOUTS["three axes"], count, weight_at, wide_weight=True)))
    if count > 1:

        def mixed(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> tuple[Tensor, ...]:
            made = list(inputs(LAYOUTS["a head's width"], count, weight_at)(dtype, device, generator))
            place = next(i for i in range(1, len(made)) if i != weight_at)
            made[place] = random_rows(generator, dtype, device)(21, 3 * 128)[:, 128:256]
            return tuple(made)

        listed.append(Case("a slice beside a whole", mixed))
    return tuple(listed)


def rebatched(weight_at: int) -> Callable[[Inputs, tuple[Tensor, ...]], Iterable[Rebatch]]:
    """Some rows alone, beside the same weight; all results but dweight keep their bits."""

    def rebatch(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterable[Rebatch]:
        rows = inputs[0].shape[0]
        if inputs[0].dim() < 2 or rows == 0:
            return
        for begin, end in ((0, 1), (rows - 1, rows), (rows // 2, rows)):

            def part(tensor: Tensor, begin: int = begin, end: int = end) -> Tensor:
                return tensor[begin:end]

            def pairs(
                whole: Answers, alone: Answers, part: Callable[[Tensor], Tensor] = part
            ) -> Iterable[tuple[Tensor, Tensor]]:
                drop = [i for i in range(len(alone[1])) if i != weight_at]
                together = (*whole[0], *(whole[1][i] for i in drop))
                return zip((*alone[0], *(alone[1][i] for i in drop)), map(part, together), strict=True)

            changed = tuple(t if i == weight_at else part(t) for i, t in enumerate(inputs))
            yield Rebatch(f"rows {begin} to {end}", changed, tuple(map(part, upstream)), pairs)

    return rebatch


def normal_rows(count: int, weight_at: int | None, rows: int, size: int) -> Make:
    """Inputs of a workload."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> tuple[Tensor, ...]:
        source = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
        tensors = [torch.randn(rows, size, dtype=dtype, device=device, generator=source) for _ in range(count)]
        if weight_at is not None:
            tensors.insert(weight_at, torch.randn(size, dtype=dtype, device=device, generator=source))
        return tuple(tensors)

    return make
