"""The types of a kernel's run-time parameters, as its signature states them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

TRITON_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}


@dataclass(frozen=True)
class Parameter:
    """The type of one run-time parameter of a kernel.

    Attributes:
        type: for a number a type of Triton ("i64"), for a pointer the name of a torch dtype; for both it may be a
            variable that the launch settles.
        pointer: whether the parameter is the address of numbers of that type.
        multiple: whether the value (the address in bytes) is a multiple of 16. "always" says that it is in every
            launch, "aligned" that it is in launches with `aligned=True`, and "never" that nothing is known.
        count: the length of the tuple of such parameters that `Int64 * 4` declares; 0 for a parameter that is no tuple.
    """

    type: str
    pointer: bool
    multiple: str
    count: int = 0
    __triton_builtin__ = True  # Triton's compiler evaluates annotations, and accepts few globals

    @property
    def variable(self) -> str | None:
        """The variable for the type; None where the type itself is named."""
        return None if self.type in (_DTYPES if self.pointer else _SCALARS) else self.type

    def text(self, dtypes: Mapping[str, torch.dtype]) -> str:
        """The type as Triton writes it, once variables are settled; for a tuple, its types with commas between."""
        if self.pointer:
            return f"*{TRITON_TYPES[_DTYPES.get(self.type) or dtypes[self.type]]}"
        text = self.type if self.type in _SCALARS else TRITON_TYPES[dtypes[self.type]]
        return ",".join([text] * max(1, self.count))

    def __mul__(self, count: int) -> "Parameter":
        return replace(self, count=count)


@dataclass(frozen=True)
class Tiled(Parameter):
    """A matrix in memory that a Gluon kernel copies one tile at a time (TMA). A launch passes a contiguous tensor.

    The matrix and each of its rows begin at multiples of 16 bytes. In shared memory a tile of a 16-bit type has the
    layout that matrix products read: pieces of 128 bytes of a row, swizzled.

    Attributes:
        tile: rows and columns of a tile, as names of constants or as numbers.
    """

    tile: tuple[str | int, ...] = ()

    @staticmethod
    def of(type: str, *tile: str | int) -> "Tiled":
        """Tiles of numbers of a named type, or of a type variable that the launch settles."""
        return Tiled(type, True, "never", tile=tile)

    def text(self, settings: Mapping[str, Any]) -> str:
        sizes = ",".join(str(settings[size] if isinstance(size, str) else size) for size in self.tile)
        return f"{TILES}<{super().text(settings)[1:]}[{sizes}],{_TILE_LAYOUT}>"


TILES = "tensordesc"
_TILE_LAYOUT = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)"

_SCALARS = frozenset(("i32", "i64", "fp32"))
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TRITON_TYPES}


class _Named(type):
    """`Pointer.float32` names a type. Another name, as in `Pointer.element`, is a variable that the launch settles."""

    pointer = True
    multiple = "never"
    __triton_builtin__ = True

    def __getattr__(cls, name: str) -> Parameter:
        if name.startswith("_"):
            raise AttributeError(name)
        return Parameter(name, cls.pointer, cls.multiple)


class Pointer(metaclass=_Named):
    """The address of numbers, of unknown alignment."""


class Pointer16(metaclass=_Named):
    """An address that is a multiple of 16 bytes in every launch."""

    multiple = "always"


class PointerIf16(metaclass=_Named):
    """An address that is a multiple of 16 bytes in launches with `aligned=True`."""

    multiple = "aligned"


class Float(metaclass=_Named):
    """A number whose type is a variable: `Float.computed`."""

    pointer = False


class Int(metaclass=_Named):
    """An integer whose type is a variable: `Int.number`."""

    pointer = False


Int32, Int64 = Parameter("i32", False, "never"), Parameter("i64", False, "never")
Int32x16, Int64x16 = Parameter("i32", False, "always"), Parameter("i64", False, "always")
Int32If16, Int64If16 = Parameter("i32", False, "aligned"), Parameter("i64", False, "aligned")
Float32 = Parameter("fp32", False, "never")
