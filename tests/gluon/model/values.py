"""Values of a Gluon program on a CPU: tensors with the language's arithmetic, and pointers that know their memory."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

SCALARS = {"i32": torch.int32, "i64": torch.int64, "fp32": torch.float32}


class Fault(Exception):
    """What a program must not do, and what a GPU might do in silence."""


def unwrap(value: Any, like: torch.dtype | None = None) -> Tensor:
    """A value's tensor; Python's numbers have the type of their partner where that can hold them."""
    if isinstance(value, Value):
        return value.tensor
    if isinstance(value, int):
        return _integer(value, like)
    return torch.tensor(value, dtype=like if like is not None and like.is_floating_point else torch.float32)


@lru_cache(4096, typed=True)
def _integer(value: int, like: torch.dtype | None) -> Tensor:
    """A number of Python's that nobody writes to."""
    if isinstance(value, bool):
        return torch.tensor(value)
    return torch.tensor(value, dtype=torch.int32 if like in (None, torch.bool) else like)


def both(first: Any, second: Any) -> tuple[Tensor, Tensor]:
    """Two operands in their common type; a scalar counts as much as a tensor does."""
    if isinstance(first, Value):
        a = first.tensor
        b = second.tensor if isinstance(second, Value) else unwrap(second, a.dtype)
    else:
        b = unwrap(second)
        a = unwrap(first, b.dtype if isinstance(second, Value) else None)
    if a.dtype == b.dtype:
        return a, b
    common = torch.promote_types(a.dtype, b.dtype)
    return a.to(common), b.to(common)


class Value:
    """A tensor, or a number that only the device knows."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> list[int]:
        return list(self.tensor.shape)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Value":
        return Value(self.tensor.view(dtype) if bitcast else self.tensor.to(dtype))

    def reshape(self, shape: list[int]) -> "Value":
        return Value(self.tensor.reshape(shape))

    def __getitem__(self, key: Any) -> "Value":
        return Value(self.tensor[key])

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def __index__(self) -> int:
        return int(self.tensor)

    def __hash__(self) -> int:
        return id(self)

    def __neg__(self) -> "Value":
        return Value(-self.tensor)

    def __eq__(self, other: object) -> "Value":  # type: ignore[override]
        a, b = both(self, other)
        return Value(a == b)

    def __ne__(self, other: object) -> "Value":  # type: ignore[override]
        a, b = both(self, other)
        return Value(a != b)


def _truncated(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")


_OPERATORS = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div, "floordiv": _truncated,
    "mod": torch.fmod, "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "rshift": torch.bitwise_right_shift, "lshift": torch.bitwise_left_shift,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
}  # fmt: skip


def _define(name: str, function: Any) -> None:
    def forward(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        return Value(function(*both(self, other)))

    def reflected(self: Value, other: Any) -> Value:
        return Value(function(*both(other, self)))

    setattr(Value, f"__{name}__", forward)
    setattr(Value, f"__r{name}__", reflected)


for _name, _function in _OPERATORS.items():
    _define(_name, _function)


class Launch:
    """Which program of a launch has written which element: programs may not depend on each other's order."""

    def __init__(self) -> None:
        self.program = 0
        self._writers: dict[tuple[int, int], Tensor] = {}

    def load(self, name: str, memory: Tensor, places: Tensor) -> None:
        writers = self._writers.get((memory.data_ptr(), memory.numel()))
        if writers is not None and self._is_foreign(writers[places]):
            raise Fault(f"{name}: a program loads what another one stores")

    def store(self, name: str, memory: Tensor, places: Tensor) -> None:
        key = memory.data_ptr(), memory.numel()
        if key not in self._writers:
            self._writers[key] = torch.full((memory.numel(),), -1, dtype=torch.int32)
        writers = self._writers[key]
        if self._is_foreign(writers[places]):
            raise Fault(f"{name}: two programs store at one address")
        writers[places] = self.program

    def _is_foreign(self, writers: Tensor) -> bool:
        """Whether any element was written by another program than the one that runs."""
        return bool(((writers >= 0) & (writers != self.program)).any())


class Pointer:
    """Addresses in the memory of one tensor, as numbers of elements from where it begins."""

    class Type:
        def __init__(self, element: torch.dtype) -> None:
            self.element_ty = element

    def __init__(self, name: str, memory: Tensor, offset: Tensor, launch: Launch | None = None) -> None:
        self.name, self.memory, self.offset = name, memory, offset
        self.dtype = Pointer.Type(memory.dtype)
        self.launch = launch

    @staticmethod
    def to_tensor(name: str, tensor: Tensor, launch: Launch | None = None) -> "Pointer":
        """The address of a tensor; its memory ends with its last element, and nothing outside may be touched."""
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        count = reach + 1 if tensor.numel() else 0
        return Pointer(name, torch.as_strided(tensor, (count,), (1,)), torch.zeros((), dtype=torch.int64), launch)

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.name, self.memory, self.offset + unwrap(other).long(), self.launch)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Pointer":
        return Pointer(self.name, self.memory, self.offset - unwrap(other).long(), self.launch)

    def _touched(self, mask: Any) -> tuple[torch.Size, Tensor | None, Tensor]:
        """The shape of an access, the mask as wide as it, and the places in memory."""
        if mask is None:
            shape, chosen, places = self.offset.shape, None, self.offset.reshape(-1)
        else:
            offset, chosen = torch.broadcast_tensors(self.offset, unwrap(mask))
            shape, places = offset.shape, offset[chosen]
        if places.numel():
            least, most = (int(each) for each in places.aminmax())
            if least < 0 or most >= self.memory.numel():
                raise Fault(f"{self.name}: elements {least} to {most} of memory with {self.memory.numel()}")
        return shape, chosen, places

    def load(self, mask: Any = None, other: Any = 0) -> Value:
        shape, chosen, places = self._touched(mask)
        if self.launch is not None:
            self.launch.load(self.name, self.memory, places)
        found = self.memory[places]
        if chosen is None:
            return Value(found.view(shape))
        outside = torch.tensor(float(unwrap(other)), dtype=torch.float64).to(self.memory.dtype)
        return Value(outside.expand(shape).masked_scatter(chosen, found))

    def store(self, value: Any, mask: Any = None) -> None:
        shape, chosen, places = self._touched(mask)
        written = unwrap(value, self.memory.dtype).expand(shape)
        written = (written.reshape(-1) if chosen is None else written[chosen]).to(self.memory.dtype)
        if len(places.unique()) != places.numel():
            raise Fault(f"{self.name}: one store writes an element twice")
        if self.launch is not None:
            self.launch.store(self.name, self.memory, places)
        self.memory[places] = written


class Matrix:
    """A matrix in memory that is copied a tile at a time; what is outside of it is zeros, and is not written."""

    def __init__(self, name: str, tensor: Tensor, launch: Launch | None = None) -> None:
        if not tensor.is_contiguous() or tensor.dim() != 2 or tensor.stride(0) * tensor.itemsize % 16:
            raise Fault(f"{name}: tiles are copied of contiguous matrices with rows of a multiple of 16 bytes")
        self.name, self.shape = name, list(tensor.shape)
        self.pointer = Pointer.to_tensor(name, tensor, launch)

    def _places(self, coordinates: list[int], shape: list[int]) -> tuple[Pointer, Value]:
        """The places of the tile that begins at a row and a column, and which of them are inside."""
        row, column = (first + torch.arange(size) for first, size in zip(coordinates, shape, strict=True))
        inside = ((row >= 0) & (row < self.shape[0]))[:, None] & ((column >= 0) & (column < self.shape[1]))[None, :]
        return self.pointer + Value(row[:, None] * self.shape[1] + column[None, :]), Value(inside)

    def load(self, coordinates: list[int], shape: list[int]) -> Tensor:
        place, inside = self._places(coordinates, shape)
        return place.load(inside).tensor

    def store(self, coordinates: list[int], tile: Tensor) -> None:
        place, inside = self._places(coordinates, list(tile.shape))
        place.store(Value(tile), inside)
