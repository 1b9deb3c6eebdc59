"""Expert layers that mutants of their kernels are tried on, in float64, where an error of one term stands out.

Sums of matrix products have no eager twin of equal bits, so results are compared with the definition, closely.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

import adjoint
from adjoint import Preference, moe
from adjoint.core.schedules import Schedules
from adjoint.ops.moe.experts import reference
from adjoint.ops.moe.experts.triton import layer as directions
from tests.mutants.calls.edges import LAYOUTS, surround

CLOSE = 1e-12
"""Of the largest value: a thousand times what rounding gives these sums."""


@dataclass(frozen=True)
class Layer:
    """A layer and its gradients, all of them or each alone."""

    tokens: int
    columns: int
    experts: int
    inner: int
    slots: int
    wrong: tuple[tuple[int, int, int], ...] = ()
    """Indices that are out of range: token, slot and value."""
    idle: int = -1
    """An expert that nobody asks for."""
    need: int = 15
    kind: torch.dtype = torch.float64

    def wrong_result(self) -> bool:
        """Whether kernels give anything but the definition's results."""
        generator = torch.Generator().manual_seed(self.tokens)

        def values(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.kind)

        indices = torch.randint(self.experts, (self.tokens, self.slots), generator=generator)
        indices[indices == self.idle] = self.experts - 1
        for token, slot, value in self.wrong:
            indices[token, slot] = value
        inputs = (
            values(self.tokens, self.columns),
            values(self.experts, 2 * self.inner, self.columns) / 2,
            values(self.experts, self.columns, self.inner) / 2,
            indices,
            values(self.tokens, self.slots),
        )
        x, gate_up, down, indices, weights = (LAYOUTS[""](t) for t in inputs)
        dy, text = LAYOUTS[""](values(self.tokens, self.columns)), Preference(backend="triton").text
        op = moe.experts.__globals__["_experts"]
        y, *saved = op.forward.launch((x, gate_up, down, indices, weights, True), text)
        gradients = op.forms[""].operator.launch((dy, x, gate_up, down, weights, *saved, self.need), text)
        alone = moe.experts(x, gate_up, down, indices, weights, preference=Preference(backend="triton"))
        wide = [t.double() if t.is_floating_point() else t for t in inputs]
        exact = reference.experts(*wide), *reference.experts_backward(dy.double(), *wide)
        pairs = [(y, exact[0]), (alone, exact[0])]
        pairs += [(g, e) for bit, g, e in zip((1, 2, 4, 8), gradients, exact[1:], strict=True) if self.need & bit]
        return any(not _near(got, expected, self.kind) for got, expected in pairs)


def _near(got: Tensor, expected: Tensor, kind: torch.dtype) -> bool:
    limit = CLOSE if kind == torch.float64 else 0.02
    return bool(((got.double() - expected).abs() <= limit * (1 + expected.abs().max())).all())  # False for NaN


def calls() -> Iterator[Layer]:
    """Likely deaths first: sizes that fill no tile, and sizes that fill every one."""
    yield Layer(19, 21, 3, 37, 2)
    yield Layer(5, 32, 3, 32, 1, idle=0)
    yield Layer(9, 5, 4, 3, 3, wrong=((0, 0, -1), (3, 2, 4), (8, 1, 9)))
    yield Layer(6, 8, 3, 8, 2, need=4)
    yield Layer(6, 8, 3, 8, 2, need=10)
    yield Layer(6, 8, 3, 8, 2, need=1)
    yield Layer(18, 16, 1, 8, 1)
    yield Layer(3, 16, 1, 8, 1, kind=torch.bfloat16)
    yield Layer(14, 3, 5, 2, 5)
    yield Layer(7, 33, 3, 37, 2)
    yield Layer(5, 5, 2, 32, 1)


LAST = (Layer(7, 6, 2, 8, 1), Layer(5, 16, 2, 5, 1), Layer(5, 21, 2, 8, 1))
"""Where programs have more rows, entries and slots than there are, and tiles as many columns as a chunk."""

_SIZES = {
    "rows": 16,
    "columns": 32,
    "warps": 4,
    "stages": 1,
    "group": 2,
    "chunk": 16,
    "block": 16,
    "tokens": 4,
}


def shrink() -> None:
    """Tiles of 16 rows and 32 columns, chunks of 16, programs of a few rows; wrong indices do not raise."""
    vars(directions)["check"] = lambda: None
    named = Schedules.named

    def small(self: Schedules, kernel: str, name: str) -> dict[str, int]:
        schedule = named(self, kernel, name)
        if not kernel.startswith("moe_experts"):
            return schedule
        return {parameter: _SIZES.get(parameter.rpartition("_")[2], value) for parameter, value in schedule.items()}

    Schedules.named = small  # type: ignore[method-assign]


def noticed() -> bool:
    """Whether any layer comes out wrong."""
    for number, layer in enumerate((*calls(), *LAST)):
        surround(number)
        if layer in LAST:
            surround(0)  # guards what follows the end
            _SIZES.update(block=128, columns=16)
        try:
            if layer.wrong_result():
                return True
        except Exception:
            return True
    try:
        adjoint.check()
    except adjoint.ArgumentError:
        return False
    return True  # the indices out of range must have been recorded


def tiles_noticed() -> bool:
    """Whether the tiles of rows for Hopper are anything but those of each expert in turn; blocks are small."""
    tiles = import_module("adjoint.ops.moe.experts.hopper.tiles")
    return any(_wrong_tiles(tiles, counts) for counts in ((5,), (3, 0, 64, 129, 0), (0, 0, 700, 128, 1, 257, 0, 0)))


def _wrong_tiles(tiles: ModuleType, counts: tuple[int, ...]) -> bool:
    rows, expected, begin = tiles.TILE_ROWS, [], 0
    for expert, count in enumerate(counts):
        expected += [(expert, begin + at, begin + min(at + rows, count)) for at in range(0, count, rows)]
        begin += count
    offsets = LAYOUTS[""](torch.tensor((0, *counts), dtype=torch.int32).cumsum(0, dtype=torch.int32))
    found = [LAYOUTS[""](torch.full((len(expected) + 3,), -7, dtype=torch.int32)) for _ in range(3)]
    total = LAYOUTS[""](torch.full((1,), -7, dtype=torch.int32))
    try:
        tiles.moe_experts_row_tiles.function[(len(counts),)](
            offsets, *found, total, len(counts), ROWS=rows, EXPERTS=1 << (len(counts) - 1).bit_length(), BLOCK=2
        )
    except Exception:
        return True
    written = [tuple(int(column[row]) for column in found) for row in range(len(expected))]
    untouched = all(bool((column[len(expected) :] == -7).all()) for column in found)
    return written != expected or int(total) != len(expected) or not untouched
