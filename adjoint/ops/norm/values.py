"""What the norms are tested, verified and timed on: their cases, special values, bad calls and workloads."""

from collections.abc import Callable, Iterable
from functools import partial
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from adjoint.contract import batching
from adjoint.contract.cases import BadCall, Case, Inputs, Special, Subject, Workload, normal
from adjoint.contract.inputs import as_tuple
from adjoint.contract.mistakes import zeros

EPS = 1e-6

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
    "2048 columns": lambda fill: fill(2, 2048),
}
"""The layouts of x and of all tensors that are like x."""

EVERY, MOST, FEW = tuple(LAYOUTS), tuple(LAYOUTS)[:-1], ("contiguous", "three axes", "wide")


def random_rows(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Fill:
    """Normal values in rows of different size: times 1, 30 or 1/1000, for which ε matters."""

    def fill(*shape: int) -> Tensor:
        scale = torch.tensor([1.0, 30.0, 1e-3])[torch.randint(3, (*shape[:-1], 1), generator=generator)]
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)

    return fill


def subject(
    name: str, function: Callable[..., Any], inputs: tuple[str, ...], forward: Callable[..., Any],
    backward: Callable[..., Any], layouts: Iterable[str], mistakes: dict[str, Any], *, cases: tuple[Case, ...] = (),
    **more: Any,
) -> Subject:  # fmt: skip
    """The subject of a norm. `forward` and `backward` are its reference. All inputs but the weight have one layout.

    Args:
        layouts: names of `LAYOUTS`, each of which is a case. For a norm with a weight there is one more case for each,
            with the weight in float32.
        cases: further cases.
    """
    rows = tuple(x for x in inputs if x != "weight")

    def case(layout: str, name: str, weight: torch.dtype | None = None) -> Case:
        def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
            fill = random_rows(dtype, device, generator)
            tensors = {x: LAYOUTS[layout](fill) for x in rows}
            if rows != inputs:
                values = torch.randn(tensors["x"].shape[-1], generator=generator, dtype=torch.float64)
                tensors["weight"] = values.to(weight or dtype).to(device)
            return tuple(tensors[x] for x in inputs)

        return Case(name, make)

    wide = (case("three axes", "weight in float32", torch.float32),) * (rows != inputs)
    return Subject(
        name=name,
        function=function,
        inputs=inputs,
        reference=lambda *tensors: as_tuple(forward(*tensors)),
        reference_backward=lambda *tensors: as_tuple(backward(*tensors)),
        cases=(*(case(x, x) for x in layouts), *wide, *cases),
        mistakes={"zero output": zeros, **mistakes},
        batched=rows if rows != inputs else None,
        rebatched=partial(batching.rebatched, axis=0, batched=[x in rows for x in inputs]),
        **more,
    )


def special_rows(*others: float) -> tuple[Special, ...]:
    """Special values: zeros, NaN and infinities in x, with these other inputs."""
    return tuple(
        Special(f"x = {name}", (x, *others), dy, (y,), (gradient,) * (1 + len(others)))
        for name, x, dy, y, gradient in (
            ("0", 0.0, 0.0, 0.0, 0.0),
            ("-0", -0.0, 0.0, -0.0, 0.0),
            ("NaN", nan, 1.0, nan, nan),
            ("infinity", inf, 1.0, nan, nan),
        )
    )


def bad_call(
    function: Callable[..., Any], name: str, words: tuple[str, ...], *shapes: tuple[int, ...], **keywords: Any
) -> BadCall:
    """A call on zeros of these shapes."""

    def call(device: torch.device) -> Any:
        return function(*(torch.zeros(shape, device=device) for shape in shapes), **keywords)

    return BadCall(name, call, function.__name__, *words)


def workload(subject: Subject, rows: int, size: int, baseline: Callable[..., Tensor], **more: Any) -> Workload:
    """A workload whose forward reads its inputs and writes y, and whose backward reads dy and the inputs and writes as
    many gradients."""
    count, one = len(subject.batched or subject.inputs), 2 * rows * size
    make = normal(*((size,) if x == "weight" else (rows, size) for x in subject.inputs))
    forward, backward = (count + 1) * one, (2 * count + 1) * one
    return Workload(f"{subject.name} {rows}×{size}", subject, make, forward, backward, baseline, **more)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor for calls that are built but not run."""
    return torch.empty(shape, dtype=dtype, device="meta")
