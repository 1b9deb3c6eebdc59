"""Calls of `rotary` whose bits must be those of the eager path: what mutants of its kernel are tried on."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from tests.mutants.calls.edges import LAYOUTS, Call, small_schedules

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def shrink() -> None:
    """Few rows in a tile, and few columns: a head takes several steps."""
    small_schedules({"elements": 32, "columns": 8, "warps": 4})


def _values(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Rotated:
    """A rotation, its gradients, and the same in place. Tables are [time, width], or [batch, time, width]."""

    shape: tuple[int, int, int, int, int]
    rotary_dim: int
    width: int
    by_row: bool = False
    interleaved: bool = False
    dtype: torch.dtype = SINGLE
    table: torch.dtype = SINGLE
    layout: str = ""
    other_layout: str | None = None
    """Of k and sin, where it is another than that of q and cos."""

    def __call__(self, backend: str) -> tuple[Tensor, ...]:
        batch, time, heads, key_heads, size = self.shape
        layouts = self.layout, self.layout if self.other_layout is None else self.other_layout
        (lay, lay_k), edge = (LAYOUTS[name] for name in layouts), LAYOUTS[""]
        q = lay(_values(0, self.dtype, batch, time, heads, size)).requires_grad_()
        k = lay_k(_values(1, self.dtype, batch, time, key_heads, size)).requires_grad_() if key_heads else None
        rows = (batch, time) if self.by_row else (time,)
        lay_tables = [LAYOUTS[name if name == "every other" else ""] for name in layouts]
        cos, sin = (f(_values(n, self.table, *rows, self.width)) for n, f in enumerate(lay_tables, 2))
        options = {"interleaved": self.interleaved, "rotary_dim": self.rotary_dim}
        preference = Preference(backend=backend)
        y = [t for t in adjoint.rotary(q, k, cos, sin, preference=preference, **options) if t is not None]  # type: ignore[arg-type]
        inputs = [t for t in (q, k) if t is not None]
        upstream = [lay(_values(4 + n, self.dtype, *t.shape)) for n, t in enumerate(y)]
        gradients = torch.autograd.grad(y, inputs, upstream)
        with torch.no_grad():
            own = [None if t is None else f(t.detach()) for t, f in ((q, lay), (k, lay_k))]
            adjoint.rotary(*own, cos, sin, in_place=True, preference=preference, **options)  # type: ignore[arg-type]
        return (*(t.detach() for t in y), *gradients, *(edge(t) for t in own if t is not None))


def calls() -> Iterator[Call]:
    """Both kinds of pairs and tables, rows that fill no tile, columns that fill no step, every layout."""
    yield Rotated((2, 5, 3, 1, 11), 6, 6)
    yield Rotated((2, 5, 3, 1, 11), 6, 6, interleaved=True)
    yield Rotated((2, 3, 1, 2, 14), 10, 5, by_row=True, dtype=HALF)
    yield Rotated((2, 3, 3, 2, 14), 10, 5, by_row=True, interleaved=True, dtype=HALF, table=HALF)
    yield Rotated((3, 1, 3, 2, 6), 6, 6, by_row=True, dtype=DOUBLE)
    yield Rotated((1, 7, 2, 0, 9), 4, 2, dtype=DOUBLE, table=DOUBLE, layout="every other")
    yield Rotated((2, 4, 2, 3, 9), 4, 4, by_row=True, layout="every other", interleaved=True)
    yield Rotated((2, 4, 2, 3, 9), 4, 4, layout="every other", other_layout="")
    yield Rotated((2, 4, 2, 3, 9), 4, 2, other_layout="every other")
    yield Rotated((1, 3, 2, 1, 10), 10, 10, interleaved=True)
    yield Rotated((1, 3, 2, 1, 10), 10, 5, interleaved=True)
    yield Rotated((1, 3, 2, 1, 10), 2, 2)
    yield Rotated((2, 4, 3, 2, 7), 4, 2, layout="swapped")
