"""Calls of take_along_axis whose bits must be those of the eager path: what mutants of its kernels are tried on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

import adjoint
from adjoint.core.preference import Preference
from tests.mutants.calls.edges import LAYOUTS, Call, rewrite, small_digits, small_schedules

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


@dataclass(frozen=True)
class Take:
    """Elements taken along an axis, and their gradient by one of the plans."""

    shape: tuple[int, ...]
    indices: Tensor
    plan: str
    axis: int = -1
    dtype: torch.dtype = SINGLE
    layouts: tuple[str, str, str] = ("", "", "")
    """Of x, indices and dout."""
    distinct: bool = False
    zeros: bool = False
    out_of_range: str = "raise"

    def __call__(self, backend: str) -> tuple[Tensor, ...]:
        lay = [LAYOUTS[name] for name in self.layouts]
        source = torch.Generator().manual_seed(1)
        x = torch.randn(self.shape, generator=source, dtype=torch.float64).to(self.dtype)
        x = lay[0](x).requires_grad_()
        gradient = "sorted" if backend == "eager" else self.plan
        out = adjoint.take_along_axis(
            x,
            lay[1](self.indices),
            self.axis,
            distinct=self.distinct,
            out_of_range=self.out_of_range,  # type: ignore[arg-type]
            preference=Preference(plan=f"{backend}.take+{backend}.{gradient}"),
        )
        upstream = torch.randn(out.shape, generator=source, dtype=torch.float64).to(self.dtype)
        dout = lay[2](torch.zeros_like(upstream).neg() if self.zeros else upstream)
        return out.detach(), *torch.autograd.grad(out, x, dout)


def _indices(length: int, *shape: int, hot: float = 0.0, seed: int = 0) -> Tensor:
    """Random indices, below 0 too, a share of which are one element in the middle."""
    source = torch.Generator().manual_seed(seed)
    indices = torch.randint(-length, length, shape, generator=source)
    return torch.where(torch.rand(shape, generator=source) < hot, length // 2, indices)


def _distinct(length: int, *shape: int) -> Tensor:
    order = torch.rand((*shape[:-1], length), generator=torch.Generator().manual_seed(0)).argsort(-1)
    return order[..., : shape[-1]]


def _with(indices: Tensor, **changes: int) -> Tensor:
    indices = indices.clone()
    for place, value in changes.items():
        indices.view(-1)[int(place[1:])] = value
    return indices


WRONG = {"p0": -10, "p2": 9, "p3": 2**31 + 1, "p4": -(2**63), "p5": 2**32 + 2}
ZERO = {"out_of_range": "zero"}


def takes(small: bool, plans: tuple[str, ...]) -> Iterator[Call]:
    """Calls for plans of the gradient, likely deaths first.

    Where tiles are small, a few entries go through all levels of sums that a plan has.
    """
    entries = {"few": 4, "lines": 16, "sorted": 30} if small else {"few": 7, "lines": 40, "sorted": 40}
    for plan in (name for name in plans if name in entries):
        many = entries[plan]
        yield Take((5, 9), _indices(9, 5, many, hot=0.7), plan)
        yield Take((2, 20, 5), _indices(20, 2, many, 5), plan, 1)
        yield Take((4, 9), _with(_indices(9, 4, many), **WRONG), plan, **ZERO)  # type: ignore[arg-type]
        yield Take((2, 1, 9, 2), _indices(9, 1, 2, many // 2, 2), plan, 2)
        yield Take((1, 2, 9, 1), _indices(9, 2, 2, many // 4, 2), plan, 2)
        yield Take((2, 3, 9, 2), _indices(9, 1, 3, many, 1), plan, 2)  # four axes, of which none merge
        yield Take((3, 16), _indices(16, 3, many), plan, dtype=HALF, zeros=True)
        yield Take((3, 9), _indices(9, 3, many).int(), plan, dtype=DOUBLE)
        yield Take((3, 2, 9), _indices(9, 3, 2, many), plan, layouts=("transposed", "every other", "transposed"))
        yield Take((2, 9, 3), _indices(9, 2, many, 3), plan, 1, layouts=("every other", "transposed", "every other"))
        yield Take((2, 35), _indices(35, 2, many), plan)
        for number in (3, 4, 5, 16, 17) if small else (1, 32, 33):
            if number <= many:
                yield Take((2, 2), _with(torch.zeros(2, number, dtype=torch.int64), p0=1), plan)
        if plan == "lines":  # the last run of a line, and the first of the next, have one index
            yield Take((2, 3), torch.tensor([[0] * 12 + [1] * 4, [1] * 16]), plan)
        if plan == "sorted":
            yield Take((1, 3), torch.full((1, 70 if small else 1100), 1), plan)
    for length, many, plan in ((9, 4, "few"), (20, 16, "lines"), (35, 16, "lines"), (50, 40, "scatter")):
        if plan not in plans:
            continue
        off = _with(_distinct(length, 3, many), p0=length, p1=-length - 1, **{f"p{3 * many - 1}": length})
        for dtype in (DOUBLE, HALF):  # one of them ends, and one begins, at the edge of memory
            yield Take((3, length), off, plan, distinct=True, dtype=dtype, **ZERO)  # type: ignore[arg-type]
        inner = _distinct(length, 2, 5, many).transpose(1, 2).contiguous()
        yield Take((2, length, 5), inner, plan, 1, distinct=True, layouts=("", "", "transposed"))
        yield Take((2, 2, length), _distinct(length, 2, 1, many), plan, distinct=True, zeros=True)
    plan = plans[0]
    for place, value in ((0, 9), (14, -10), (7, 2**32 + 2)):
        yield Take((5, 9), _with(_indices(9, 5, 3), **{f"p{place}": value}), plan)
    yield Take((4, 9, 2), _with(_indices(9, 1, 3, 2), p3=9), plan, 1)
    yield Take((4, 9), _with(_indices(9, 4, 3), p10=9, p11=-10, p3=9), plan, layouts=("", "transposed", ""))


def shrink(sources: dict[str, str], load: Callable[[str, str], None]) -> None:
    """Tiles of 4, digits of 3 bits, blocks of 8 or 16, programs of a few elements, a few lines at a time, 72 are many.

    Args:
        sources: the kernel modules' sources, changed or not, by module; those that others import come first.
        load: puts a source in the place of a module.
    """
    changes = {
        "layout": {"MAX_NUMBER = 2**30": "MAX_NUMBER = 72"},
        "plans": {
            "TILE_BITS = 5": "TILE_BITS = 2",
            "MAX_SORTED = 2**23": "MAX_SORTED = 150",
            "MAX_FILLED = 2**16": "MAX_FILLED = 30",
        },
    }
    for name, constants in changes.items():
        module = import_module(f"adjoint.ops.indexing.take_along_axis.{name}")
        path = Path(str(module.__file__))
        source = rewrite(module, path.read_text(encoding="utf-8"), constants)
        exec(compile(source, str(path), "exec"), vars(module))
    small_schedules(
        {"block": 16, "elements": 64, "entries": 128, "span": 16, "warps": 4, "compared": 512, "neighbours": 32}
    )
    small_digits()
    grouping = import_module("adjoint.device.grouping.kernels")
    load(grouping.__name__, Path(str(grouping.__file__)).read_text(encoding="utf-8"))
    for name, source in sources.items():
        load(name, source)
