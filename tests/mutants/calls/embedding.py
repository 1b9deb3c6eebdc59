"""Calls whose bits must be those of the eager path: what mutants of the embedding family are tried on.

`shrink` makes tiles, digits, blocks and programs small, so that a few dozen tokens go through every level of every sum.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint.core.preference import Preference
from tests.mutants.calls.edges import LAYOUTS, Call, rewrite, small_digits, small_schedules

# ---------------------------------------------------------------------------------------------- calls


def _values(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Lookup:
    """A lookup and its gradient: dense, sparse, or added to a buffer."""

    rows: int
    columns: int
    ids: Tensor
    dtype: torch.dtype = torch.bfloat16
    layouts: tuple[str, str, str] = ("", "", "")
    """Of ids, weight and dout."""
    buffer: torch.dtype | None = None
    buffer_layout: str = ""
    zeros: bool = False
    plan: str = "tiles"
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, backend: str) -> tuple[Tensor, ...]:
        lay = [LAYOUTS[name] for name in self.layouts]
        weight = lay[1](_values(1, self.dtype, self.rows, self.columns)).requires_grad_()
        upstream = _values(2, self.dtype, *self.ids.shape, self.columns)
        dout = lay[2](torch.zeros_like(upstream).neg() if self.zeros else upstream)
        options = dict(self.options)
        buffer = None
        if self.buffer is not None:
            buffer = LAYOUTS[self.buffer_layout](_values(3, self.buffer, self.rows, self.columns))
            options["accumulate_into"] = buffer
        preference = Preference(plan=f"{backend}.gather+{backend}.{self.plan}")
        out = adjoint.embedding(lay[0](self.ids), weight, preference=preference, **options)
        (gradient,) = torch.autograd.grad(out, weight, dout, allow_unused=buffer is not None)
        if buffer is not None:
            return out.detach(), buffer
        if gradient.is_sparse:
            return out.detach(), gradient.indices(), gradient.values()
        return out.detach(), gradient


@dataclass(frozen=True)
class Bags:
    """Bags and their gradients."""

    rows: int
    columns: int
    ids: Tensor
    offsets: Tensor | None = None
    mode: str = "sum"
    factors: bool = False
    dtype: torch.dtype = torch.bfloat16
    layouts: tuple[str, str, str] = ("", "", "")
    """Of ids (and factors and offsets), weight and dout."""
    special: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, backend: str) -> tuple[Tensor, ...]:
        lay = [LAYOUTS[name] for name in self.layouts]
        table = _values(1, self.dtype, self.rows, self.columns)
        if self.mode == "max":
            table = table.round()  # many are equal
        if self.special:
            table.view(-1)[::3] = torch.tensor(float("nan"))
            table.view(-1)[1::5] = torch.tensor(float("-inf"))
            table.view(-1)[2::7] = torch.tensor(-0.0)
        weight = lay[1](table).requires_grad_()
        factors = lay[0](_values(3, self.dtype, *self.ids.shape)).requires_grad_() if self.factors else None
        offsets = None if self.offsets is None else lay[0](self.offsets)
        preference = Preference(backend=backend)
        out = adjoint.embedding_bag(
            lay[0](self.ids), weight, offsets, factors, mode=self.mode, preference=preference, **self.options
        )
        dout = lay[2](_values(2, self.dtype, *out.shape))
        leaves = (weight,) if factors is None else (weight, factors)
        assert out.grad_fn is not None
        extra = out.grad_fn.saved_tensors[-1].clone()
        return out.detach(), extra, *torch.autograd.grad(out, leaves, dout)


# ---------------------------------------------------------------------------------------------- lists


def _ids(rows: int, count: int, hot: int = 0, seed: int = 0) -> Tensor:
    """Random ids, `hot` of them one row in the middle, in random order."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(rows, (count,), generator=generator)
    ids[torch.randperm(count, generator=generator)[:hot]] = rows // 2
    return ids


def _with(ids: Tensor, **changes: int) -> Tensor:
    ids = ids.clone()
    for place, value in changes.items():
        ids[int(place[1:])] = value
    return ids


HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
WRONG = _with(_ids(9, 60, 40), p3=-1, p30=9, p58=2**31 + 4, p59=8)
PADDED = {"padding_idx": 4, "out_of_range": "zero"}


def lookups(small: bool) -> Iterator[Call]:
    """Lookups and their gradients, likely deaths first; hot rows go through all levels that there are."""
    hot, rest = (34, 3) if small else (45, 40)
    few, many = _ids(7, 10), _ids(40, hot + rest, hot)
    matrix = many[: (hot + rest) // 4 * 4].view(4, -1)
    yield Lookup(9, 3, 1 + torch.arange(15) // 2, SINGLE)  # pairs; one token right before the end of a block
    yield Lookup(40, 13, many, SINGLE)
    yield Lookup(5, 13, torch.arange(5).repeat_interleave(torch.tensor([3, 20, 10, 1, 5])), SINGLE)
    yield Lookup(7, 6, few.view(2, 5))
    yield Lookup(9, 19, few.view(2, 5), HALF, ("transposed", "transposed", "swapped"))
    yield Lookup(40, 3, matrix, SINGLE, ("", "", "transposed"))
    yield next(wrong_lookups())
    yield Lookup(40, 13, many.int(), SINGLE, buffer=SINGLE)
    yield Lookup(40, 3, many, HALF, options={"sparse": True})
    yield Lookup(9, 3, WRONG[-30:], SINGLE, options=PADDED | {"sparse": True})
    yield Lookup(9, 3, WRONG[-30:], SINGLE, options=PADDED)
    yield from wrong_lookups()
    yield Lookup(40, 20, many, SINGLE)
    yield Lookup(9, 3, WRONG, SINGLE, options=PADDED, buffer=DOUBLE)
    yield Lookup(40, 3, matrix, SINGLE, ("", "every other", "every other"))
    yield Lookup(40, 3, many, HALF, buffer=SINGLE, buffer_layout="transposed")
    yield Lookup(9, 3, few, SINGLE, buffer=HALF)
    yield Lookup(9, 3, few, SINGLE, buffer=DOUBLE)
    yield Lookup(9, 3, few, DOUBLE, buffer=SINGLE)
    yield Lookup(40, 3, many, DOUBLE)
    yield Lookup(40, 3, many, SINGLE, zeros=True)
    yield Lookup(40, 3, many, SINGLE, plan="sequential")
    yield Lookup(9, 3, WRONG, SINGLE, plan="sequential", options=PADDED, buffer=SINGLE)
    yield Lookup(1, 1, _ids(1, 1))
    yield Lookup(4, 3, _ids(4, 1).view(()))
    yield Lookup(3, 16, torch.ones(hot, dtype=torch.int64), SINGLE)
    yield Lookup(3, 3, torch.ones(hot, dtype=torch.int64), SINGLE)
    yield Lookup(3, 3, torch.cat((torch.ones(7), torch.full((hot,), 2))).long(), SINGLE)
    yield Lookup(9, 3, torch.full((hot,), 4), SINGLE, options=PADDED | {"sparse": True})
    yield Lookup(9, 3, torch.full((hot,), 4), SINGLE, options=PADDED, buffer=SINGLE)
    for length in range(1, 7):
        yield Lookup(5, 3, torch.arange(5).repeat_interleave(length), SINGLE)
    for count in (15, 16, 17, 33) if small else (127, 128, 129, 256, 300):
        yield Lookup(300, 1, _ids(300, count), SINGLE)
        yield Lookup(300, 1, _ids(300, count), SINGLE, options={"sparse": True})
    yield Lookup(64, 2, torch.arange(63, -1, -3), SINGLE)
    yield Lookup(512, 1, torch.arange(511, -1, -9), SINGLE)
    yield Lookup(8, 2, torch.full((16,), 7), SINGLE)
    yield Lookup(5, 3, _ids(5, 40 if small else 300), SINGLE, options={"padding_idx": 0})
    yield from islice(bags(small), 9)
    if not small:
        yield Lookup(5, 300, _ids(5, 50, 40), SINGLE)
        yield Lookup(5, 144, _ids(5, 50, 40), SINGLE, buffer=SINGLE)
        yield Lookup(300_000, 1, torch.cat((_ids(300_000, 90), _ids(300_000, 90) % 70 + 262_140)), SINGLE)
        yield Lookup(3, 1, _ids(3, 1100, 1080), SINGLE)


def wrong_lookups() -> Iterator[Call]:
    """Ids out of range: what is reported, and where."""
    for place, value in ((50, 1000), (79, 6), (3, -1), (57, 2**32 + 2), (0, -(2**63))):
        yield Lookup(6, 20, _with(_ids(6, 80), **{f"p{place}": value}))
    yield Lookup(6, 20, _with(_ids(6, 80), p30=6, p31=8, p70=-1))


OFFSETS = torch.tensor([0, 0, 1, 5, 5, 19, 39, 40, 40])


def bags(small: bool) -> Iterator[Call]:
    """Bags and their gradients, likely deaths first; long bags go through all levels that there are."""
    length = 50 if small else 70
    ids, long = _ids(9, 40, 20), _ids(9, length + 9)
    ends = torch.tensor([0, 3, length + 3, length + 9])
    matrix = _ids(9, 24).view(3, 8)
    special = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0], [4, 4, 5, 6], [8, 7, 0, 6]])
    last = {"include_last_offset": True}
    yield Bags(9, 3, ids, OFFSETS, dtype=SINGLE)
    yield Bags(9, 3, ids, OFFSETS, mode="max", dtype=SINGLE)
    yield Bags(9, 3, ids, OFFSETS.int(), mode="mean", dtype=SINGLE)
    yield next(wrong_bags())
    yield Bags(6, 5, _ids(6, 12).view(4, 3), factors=True)
    yield Bags(9, 13, long, ends[:-1], dtype=SINGLE, factors=True)
    for mode in ("sum", "mean", "max"):
        yield Bags(9, 3, ids.int(), OFFSETS[:-2].int(), mode=mode, dtype=DOUBLE, options=last | {"padding_idx": 4})
        yield Bags(9, 19, matrix, mode=mode, dtype=SINGLE, layouts=("transposed", "transposed", "transposed"))
    yield from wrong_bags()
    yield Bags(9, 19, matrix, factors=True, dtype=SINGLE, layouts=("transposed", "every other", "transposed"))
    yield Bags(9, 3, ids, OFFSETS[:-2].int(), mode="mean", dtype=SINGLE)
    yield Bags(9, 300, _ids(9, 8).view(4, 2), factors=True, dtype=SINGLE)
    yield Bags(9, 3, ids, OFFSETS, factors=True, dtype=DOUBLE, options={"padding_idx": 4})
    yield Bags(9, 3, ids, OFFSETS[:-2], factors=True, dtype=SINGLE, options=last)
    yield Bags(9, 19, matrix, factors=True, dtype=SINGLE, layouts=("", "transposed", ""))
    yield Bags(9, 19, matrix, factors=True, dtype=SINGLE, layouts=("", "", "transposed"))
    for mode in ("sum", "mean", "max"):
        yield Bags(9, 4, special, mode=mode, dtype=SINGLE, special=True)
        yield Bags(9, 20, ids, OFFSETS, mode=mode, options={"padding_idx": 0})
        yield Bags(9, 13, long, ends, mode=mode, dtype=SINGLE, options=last)
        yield Bags(9, 19, ids, OFFSETS, mode=mode, dtype=SINGLE, layouts=("every other", "every other", "every other"))
        yield Bags(5, 3, _ids(5, 0), torch.tensor([0, 0, 0]), mode=mode)
        yield Bags(5, 3, _ids(5, 12), torch.tensor([0]), mode=mode, options=last)
        yield Bags(5, 3, _ids(5, 0).view(3, 0), mode=mode)
        yield Bags(1, 1, _ids(1, 1).view(1, 1), mode=mode)
        yield Bags(5, 2, _ids(5, 17), torch.arange(17), mode=mode, dtype=SINGLE)
        yield Bags(9, 144, _ids(9, 8).view(4, 2), mode=mode, dtype=HALF)
    if not small:
        yield Bags(5, 2, _ids(5, 300), torch.arange(0, 300, 10), mode="mean", dtype=SINGLE)
        yield Bags(5, 1, _ids(5, 1060), torch.tensor([0, 1050]), mode="sum", dtype=SINGLE)


def wrong_bags() -> Iterator[Call]:
    """Ids out of range and offsets out of order: what is reported, and where."""
    ids = _ids(9, 40, 20)
    for mode in ("sum", "max"):
        for place, value in ((0, 9), (39, -1), (33, 2**32 + 1), (4, 9)):
            yield Bags(9, 20, _with(ids, **{f"p{place}": value}), OFFSETS, mode=mode)
        yield Bags(9, 20, _with(_ids(9, 60), p40=9, p41=10, p59=-3).view(20, 3), mode=mode)
        yield Bags(9, 3, _with(ids, p39=-1), OFFSETS[:-2], mode=mode, options={"include_last_offset": True})
    for offsets in ((0, 2, 1), (1, 2), (0, -1, 2), (0, 2, 41), (0, 40, 40), (-1, 2, 3), (0, 5, 41, 40)):
        yield Bags(9, 20, ids, torch.tensor(offsets))
        yield Bags(9, 3, ids, torch.tensor(offsets), options={"include_last_offset": True})
    yield Bags(9, 20, ids, torch.tensor([3]), options={"include_last_offset": True})
    yield Bags(9, 2, ids, torch.cat((torch.arange(30), torch.tensor([28, 40]))))


# ------------------------------------------------------------------------------------- small programs


def shrink(sources: dict[str, str], load: Callable[[str, str], None]) -> None:
    """Tiles of 2, digits of 3 bits, blocks of 8 or 16, programs of a few elements.

    Args:
        sources: the kernel modules' sources, changed or not, by module; those that others import come first.
        load: puts a source in the place of a module.
    """
    plans = [import_module(f"adjoint.ops.embedding.{name}") for name in ("plans", "embedding.plans", "bag.plans")]
    for module, changes in zip(plans, ({"TILE_BITS = 5": "TILE_BITS = 1"}, {}, {}), strict=True):
        path = Path(str(module.__file__))
        source = rewrite(module, path.read_text(encoding="utf-8"), changes)
        exec(compile(source, str(path), "exec"), vars(module))
    small_schedules({"block": 16, "elements": 32, "programs": 2, "unroll": 2, "warps": 4})
    small_digits()
    for name, source in sources.items():
        load(name, source)
