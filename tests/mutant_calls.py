"""Calls whose bits must be those of the eager path: what mutants of the embedding family are tried on.

Every tensor a kernel is given lies at the edge of memory that nobody may touch: a read or a write past it ends
the process. Outputs and workspaces are filled before, differently each time. `shrink` makes tiles, digits, blocks
and programs small, so that a few dozen tokens go through every level of every sum.
"""

import ctypes
import mmap
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint.core import grouping
from adjoint.core.plan import Plan
from adjoint.core.poison import poison
from adjoint.core.preference import Preference
from adjoint.core.schedules import Schedules
from adjoint.core.workspace import Regions
from adjoint.verify.bits import same_bits

# ---------------------------------------------------------------------------------- the edge of memory


def at_the_edge(tensor: Tensor, front: bool = False) -> Tensor:
    """A contiguous copy whose last byte is the last before a page nobody may touch; or whose first is the first after."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return tensor.clone()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + 2 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (address, address + mmap.PAGESIZE + pages):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 0) == 0
    offset = mmap.PAGESIZE + (0 if front else pages - size)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return copy.view(tensor.shape).copy_(tensor)


@dataclass
class _Edges:
    """Which edge is guarded now, what fills workspaces, and the regions of the workspace in use."""

    front: bool = False
    fill: int = 0
    held: dict[str, Tensor] = field(default_factory=dict)


_edges = _Edges()


def guard() -> None:
    """From now on, every region of a workspace and every output lies at an edge."""
    allocate_outputs = Plan.allocate

    def allocate(self: Regions, device: torch.device) -> Tensor:
        _edges.held = {}
        return torch.empty(self.bytes, dtype=torch.uint8, device=device)

    def tensors(self: Regions, workspace: Tensor) -> dict[str, Tensor]:
        for name, (dtype, count) in self._regions.items():
            if name not in _edges.held:
                empty = torch.full((count * dtype.itemsize,), _edges.fill, dtype=torch.uint8).view(dtype)
                _edges.held[name] = at_the_edge(empty, _edges.front)
        return {name: _edges.held[name] for name in self._regions}

    def outputs(self: Plan, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        found = tuple(at_the_edge(tensor, _edges.front) for tensor in allocate_outputs(self, arguments))
        for tensor in found:
            poison(tensor)
        return found

    Regions.allocate, Regions.tensors, Plan.allocate = allocate, tensors, outputs  # type: ignore[method-assign]


# ---------------------------------------------------------------------------------------------- calls


def _values(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _edge(tensor: Tensor) -> Tensor:
    return at_the_edge(tensor, _edges.front)


def _transposed(tensor: Tensor) -> Tensor:
    """The same values, the first axis the fastest."""
    axes = list(range(tensor.dim()))[::-1]
    return _edge(tensor.permute(axes)).permute(axes)


def _swapped(tensor: Tensor) -> Tensor:
    """The same values, the first two axes laid the other way round."""
    return _edge(tensor.transpose(0, 1)).transpose(0, 1)


def _every_other(tensor: Tensor) -> Tensor:
    return _edge(torch.stack((tensor, -tensor - 1), -1))[..., 0]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "": _edge, "transposed": _transposed, "swapped": _swapped, "every other": _every_other
}  # fmt: skip


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
            table = (2 * table).round() / 2  # many are equal
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
        wanted = (weight,) if factors is None else (weight, factors)
        return out.detach(), *torch.autograd.grad(out, wanted, dout)


Call = Callable[[str], tuple[Tensor, ...]]


def _outcome(call: Call, backend: str) -> tuple[Tensor, ...] | str:
    try:
        return call(backend)
    except adjoint.ArgumentError as error:
        return str(error)


def differs(call: Call) -> bool:
    """Whether the kernels give other bits, or another error, than the eager path."""
    expected = _outcome(call, "eager")
    for _edges.front, _edges.fill in ((False, 0), (True, 0xFF)):
        got = _outcome(call, "triton")
        if isinstance(got, str) or isinstance(expected, str):
            if got != expected:
                return True
        elif not (len(got) == len(expected) and all(map(same_bits, got, expected))):
            return True
    return False


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


def lookups(hot: int) -> Iterator[Call]:
    """Lookups and their gradients; `hot` tokens of one row go through all levels that are tried."""
    few, many = _ids(7, 10), _ids(40, hot + 40, hot)
    yield Lookup(7, 6, few.view(2, 5))
    yield Lookup(40, 20, many, SINGLE)
    yield Lookup(40, 5, many.int(), HALF)
    yield Lookup(40, 20, many, SINGLE, buffer=SINGLE)
    yield Lookup(40, 5, many, HALF, options={"sparse": True})
    yield Lookup(9, 3, WRONG, SINGLE, options=PADDED)
    yield Lookup(9, 3, WRONG, SINGLE, options=PADDED | {"sparse": True})
    yield Lookup(9, 3, WRONG, SINGLE, options=PADDED, buffer=DOUBLE)
    yield Lookup(8, 19, few.view(2, 5), HALF, ("transposed", "transposed", "swapped"))
    yield Lookup(40, 19, many[:84].view(6, 14), SINGLE, ("", "", "transposed"))
    yield Lookup(40, 19, many[:84].view(6, 14), SINGLE, ("", "every other", "every other"))
    yield Lookup(40, 3, many, HALF, buffer=SINGLE, buffer_layout="transposed")
    yield Lookup(40, 3, many, SINGLE, buffer=HALF)
    yield Lookup(40, 3, many, SINGLE, buffer=DOUBLE)
    yield Lookup(40, 3, many, DOUBLE, buffer=SINGLE)
    yield Lookup(40, 3, many, DOUBLE)
    yield Lookup(40, 3, many, SINGLE, zeros=True)
    yield Lookup(40, 3, many, SINGLE, plan="sequential")
    yield Lookup(40, 3, many, SINGLE, plan="sequential", buffer=SINGLE)
    yield Lookup(1, 1, _ids(1, 1))
    yield Lookup(4, 3, _ids(4, 1).view(()))
    yield Lookup(2, 16, torch.ones(hot, dtype=torch.int64), SINGLE)
    for length in range(1, 11):
        yield Lookup(5, 3, torch.arange(5).repeat_interleave(length), SINGLE)
    for count in (15, 16, 17, 127, 128, 129, 255, 256, 300):
        yield Lookup(300, 1, _ids(300, count), SINGLE)
        yield Lookup(300, 1, _ids(300, count), SINGLE, options={"sparse": True})
    yield Lookup(64, 2, torch.arange(63, -1, -1), SINGLE)
    yield Lookup(512, 1, torch.arange(511, -1, -3), SINGLE)
    yield Lookup(8, 2, torch.full((16,), 7), SINGLE)
    yield Lookup(5, 3, _ids(5, 300), SINGLE, options={"padding_idx": 0})
    for place, value in ((0, 6), (150, 1000), (299, 7), (3, -1), (257, 2**32 + 2), (40, -(2**63)), (299, -5)):
        yield Lookup(6, 20, _with(_ids(6, 300), **{f"p{place}": value}))
    yield Lookup(6, 20, _with(_ids(6, 300), p70=6, p71=8, p200=-1))


def wide_lookups() -> Iterator[Call]:
    """Columns and rows past one program, three digits, two levels."""
    yield Lookup(5, 144, _ids(5, 6), HALF)
    yield Lookup(5, 300, _ids(5, 50, 40), SINGLE)
    yield Lookup(5, 144, _ids(5, 50, 40), SINGLE, buffer=SINGLE)
    yield Lookup(300_000, 1, torch.cat((_ids(300_000, 150), _ids(300_000, 150) % 70 + 262_140)), SINGLE)
    yield Lookup(9, 1, _ids(9, 1400, 1300), SINGLE)
    yield Lookup(3, 1, _ids(3, 5000), SINGLE)


OFFSETS = torch.tensor([0, 0, 1, 5, 5, 40, 59, 60, 60])


def bags(length: int) -> Iterator[Call]:
    """Bags and their gradients; `length` entries of one bag go through all levels that are tried."""
    small, ids = _ids(6, 12).view(4, 3), _ids(9, 60, 30)
    long = _ids(9, length + 9)
    ends = torch.tensor([0, 3, length + 3, length + 9])
    matrix = _ids(9, 3 * 40).view(3, 40)
    special = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0], [4, 4, 5, 6], [8, 7, 0, 6]])
    for mode in ("sum", "mean", "max"):
        yield Bags(6, 5, small, mode=mode)
        yield Bags(9, 20, ids, OFFSETS, mode=mode, dtype=SINGLE)
    yield Bags(6, 5, small, factors=True)
    yield Bags(9, 20, ids, OFFSETS.int(), factors=True, dtype=SINGLE)
    for mode in ("sum", "mean", "max"):
        yield Bags(9, 3, long, ends[:-1], mode=mode, dtype=SINGLE)
        yield Bags(9, 3, long, ends, mode=mode, dtype=SINGLE, options={"include_last_offset": True})
        yield Bags(9, 3, ids, OFFSETS[:-2], mode=mode, dtype=SINGLE, options={"include_last_offset": True})
        yield Bags(9, 3, ids, OFFSETS, mode=mode, dtype=SINGLE, options={"padding_idx": 4})
        yield Bags(9, 3, ids.int(), OFFSETS.int(), mode=mode, dtype=DOUBLE, options={"padding_idx": 0})
        yield Bags(9, 4, special, mode=mode, dtype=SINGLE, special=True)
        yield Bags(9, 19, matrix, mode=mode, dtype=HALF, layouts=("transposed", "transposed", "transposed"))
        yield Bags(9, 19, ids, OFFSETS, mode=mode, dtype=SINGLE, layouts=("every other", "every other", "every other"))
        yield Bags(5, 3, _ids(5, 0), torch.tensor([0, 0, 0]), mode=mode)
        yield Bags(5, 3, _ids(5, 12), torch.tensor([0]), mode=mode, options={"include_last_offset": True})
        yield Bags(5, 3, _ids(5, 0).view(3, 0), mode=mode)
        yield Bags(1, 1, _ids(1, 1).view(1, 1), mode=mode)
        yield Bags(5, 2, _ids(5, 40), torch.arange(40), mode=mode, dtype=SINGLE)
        yield Bags(5, 2, _ids(5, 300), torch.arange(0, 300, 10), mode=mode, dtype=SINGLE)
    yield Bags(9, 3, long, ends[:-1], factors=True, dtype=SINGLE)
    yield Bags(9, 19, matrix, factors=True, dtype=SINGLE, layouts=("transposed", "every other", "transposed"))
    yield Bags(9, 19, matrix, factors=True, dtype=SINGLE, layouts=("", "transposed", ""))
    yield Bags(9, 19, matrix, factors=True, dtype=SINGLE, layouts=("", "", "transposed"))
    yield Bags(9, 3, ids, OFFSETS, factors=True, dtype=DOUBLE, options={"padding_idx": 4})
    yield Bags(9, 3, ids, OFFSETS[:-2], factors=True, dtype=SINGLE, options={"include_last_offset": True})
    yield Bags(9, 300, _ids(9, 8).view(4, 2), factors=True, dtype=SINGLE)
    yield Bags(9, 144, _ids(9, 8).view(4, 2), mode="mean", dtype=SINGLE)
    yield Bags(9, 144, _ids(9, 8).view(4, 2), mode="max", dtype=HALF)
    yield from wrong_bags()


def wrong_bags() -> Iterator[Call]:
    """Ids out of range and offsets out of order: what is reported, and where."""
    ids = _ids(9, 60, 30)
    for mode in ("sum", "max"):
        for place, value in ((0, 9), (59, -1), (33, 2**32 + 1), (4, 9)):
            yield Bags(9, 20, _with(ids, **{f"p{place}": value}), OFFSETS, mode=mode)
        yield Bags(9, 20, _with(_ids(9, 60), p40=9, p41=10, p59=-3).view(20, 3), mode=mode)
        yield Bags(9, 3, _with(ids, p59=-1), OFFSETS[:-2], mode=mode, options={"include_last_offset": True})
    for offsets in ((0, 2, 1), (1, 2), (0, -1, 2), (0, 2, 61), (0, 60, 60), (-1, 2, 3), (0, 1, 2, 61), (0, 5, 61, 60)):
        yield Bags(9, 20, ids, torch.tensor(offsets))
        yield Bags(9, 3, ids, torch.tensor(offsets), options={"include_last_offset": True})
    yield Bags(9, 2, ids, torch.cat((torch.arange(40), torch.tensor([38, 50]))))


# ------------------------------------------------------------------------------------- small programs


def rewrite(module: ModuleType, source: str, changes: dict[str, str]) -> str:
    """A module's source with constants changed, each found exactly once."""
    for before, after in changes.items():
        source, found = re.subn(rf"(?m)^{re.escape(before)}$", after, source)
        assert found == 1, f"{module.__name__}: {found} lines {before!r}"
    return source


def shrink(sources: dict[str, str], load: Callable[[str, str], None]) -> None:
    """Tiles of 2, digits of 3 bits, blocks of 16, programs of a few elements.

    Args:
        sources: the kernel modules' sources, changed or not, by module.
        load: puts a source in the place of a module.
    """
    constants = {
        "adjoint.ops.embedding.kernels": {"TILE_BITS = 5": "TILE_BITS = 1"},
        "adjoint.ops.embedding.bag_kernels": {},
        "adjoint.core.grouping_kernels": {
            "DIGIT = 9": "DIGIT = 3",
            "BLOCK = 128": "BLOCK = 16",
            "_LANES = tl.constexpr(32)": "_LANES = tl.constexpr(4)",
        },
    }
    for name, changes in constants.items():
        plain = "\n".join(line.split("  #")[0] for line in sources[name].splitlines())
        load(name, rewrite(import_module(name), plain, changes))
    package = "adjoint.ops.embedding"
    plans, launch, bag_plans, bag_launch = (
        import_module(f"{package}.{name}") for name in ("plans", "launch", "bag_plans", "bag_launch")
    )
    path = Path(str(plans.__file__))
    source = rewrite(plans, path.read_text(encoding="utf-8"), {"TILE = 32": "TILE = 2"})
    exec(compile(source, str(path), "exec"), vars(plans))
    vars(launch)["TILE_BITS"] = 1
    vars(bag_plans)["TILE"] = vars(bag_launch)["TILE"] = 2
    vars(bag_launch)["_ENTRIES"] = 16
    vars(grouping).update(_BLOCK=16, _DIGIT=3, _counted=lambda: {"WIDTH": 4, "CHUNK": 2})
    lookup = Schedules.lookup

    def small(self: Schedules, kernel: str, device: torch.device | None = None) -> dict[str, int]:
        sizes = {"block": 16, "elements": 64, "unroll": 2, "warps": 4}
        found = {name: sizes[name.rpartition("_")[2]] for name in lookup(self, kernel, device)}
        return found | ({"weights_elements": 256} if "weights_elements" in found else {})

    Schedules.lookup = small  # type: ignore[method-assign]
