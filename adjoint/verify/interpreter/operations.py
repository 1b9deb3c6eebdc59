"""Operators of Triton's interpreter in one step, where the types of their operands have occurred before.

A sum passes a dozen functions. They find out from the types of its operands which one is converted, whose shape the
result has, and its type. All of this follows from the two types, or from one type and a Python number. Triton's own
functions decide it when such a pair occurs first. The decision is remembered, and only numpy's part of the operation
remains. Nothing is remembered where the decision is not everything: for 16-bit floats, which numpy does not have or
treats by other rules.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from adjoint.verify.interpreter.operands import ALWAYS_OWN, MOST

ARITHMETIC: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip
COMPARISONS: dict[str, Any] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
OFFSETS = frozenset(("int8", "int16", "int32", "int64"))


class Decision(NamedTuple):
    """What an operation does with operands of known types.

    Attributes:
        left, right: the types of numpy to which the operands are converted, if they are converted.
        number: the operand that is no tensor, as an array.
        size: for an offset that is added to a pointer, the bytes of the type to which it points.
        element: the stated type of the elements of the result's array.
        type: the type of the result.
    """

    left: Any
    right: Any
    number: np.ndarray | None
    size: int
    element: Any
    type: Any


def at_once(place: Any, name: str, function: Any, semantic: Any) -> Any:
    """A function of the language that computes in one step, if this module has one for it."""
    import triton.language as tl

    if not getattr(tl.block_type.__init__, "remembers", False):
        return function  # types do not have the shapes that values show, which `remember_shapes` makes
    if place in (tl, tl.core, tl.math) and name in _FUNCTIONS:
        return _FUNCTIONS[name](function, semantic)
    if place is tl.tensor and name == "to":
        return _convert(function, semantic)
    if place is not tl.tensor or not (name.startswith("__") and name.endswith("__")):
        return function
    operator = name[2:-2]
    if operator in COMPARISONS:
        return _operator(COMPARISONS[operator], function, _Decisions(semantic, compares=True))
    if operator in ARITHMETIC:
        return _operator(ARITHMETIC[operator], function, _Decisions(semantic, offsets=operator == "add"))
    if operator[0] == "r" and operator[1:] in ARITHMETIC:
        decisions = _Decisions(semantic, reflected=True)
        return _operator(_swapped(ARITHMETIC[operator[1:]]), function, decisions)
    return function


def _swapped(compute: Callable[..., Any]) -> Callable[..., Any]:
    return lambda left, right: compute(right, left)


class _Decisions:
    """Finds out what an operator does with its operands."""

    def __init__(self, semantic: Any, compares: bool = False, offsets: bool = False, reflected: bool = False) -> None:
        self._semantic, self._compares, self._offsets, self._reflected = semantic, compares, offsets, reflected

    def decide(self, left: Any, right: Any, result: Any) -> Decision | None:
        """The decision behind a result of Triton's own functions, from operands of which the first is a tensor."""
        import triton.language as tl

        is_number = not isinstance(right, tl.tensor)
        if is_number and self._compares:
            right = self._semantic.to_tensor(right)
        element, type = result.handle.dtype, result.type
        if isinstance(left.dtype, tl.pointer_type):
            offset = self._semantic.to_tensor(right)
            if not self._offsets or offset.dtype.name not in OFFSETS:
                return None
            size = max(1, left.dtype.element_ty.primitive_bitwidth // 8)
            return Decision(None, None, offset.handle.data if is_number else None, size, element, type)
        if left.dtype.name not in ALWAYS_OWN or not (is_number or right.dtype.name in ALWAYS_OWN):
            return None
        pair = (right, left) if self._reflected else (left, right)
        settled = self._semantic.binary_op_type_checking_impl(*pair)
        own, other = settled[::-1] if self._reflected else settled
        if own.dtype.name not in ALWAYS_OWN or other.dtype.name not in ALWAYS_OWN:
            return None
        conversions = [
            None if before.dtype.name == after.dtype.name else after.handle.data.dtype
            for before, after in ((left, own), (other if is_number else right, other))
        ]
        number = other.handle.data if is_number else None
        return Decision(conversions[0], conversions[1], number, 0, element, type)


def _maker() -> Any:
    """A function that makes a tensor from an array whose elements fit the tensor's type."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    value = tl.tensor
    new, new_handle = value.__new__, TensorHandle.__new__
    scalar = value(None, tl.int32)

    def make(data: Any, element: Any, type: Any) -> Any:
        handle: Any = new_handle(TensorHandle)
        handle.data, handle.dtype, handle.attr = data, element, {}
        made: Any = new(value)
        made.handle, made.type, made.dtype = handle, type, type.scalar
        made.shape, made.numel = type.shown if type.is_block() else (scalar.shape, scalar.numel)
        return made

    return make


def _operator(compute: Any, function: Any, decisions: _Decisions) -> Any:
    """An operator that repeats its decision for operands of the same types, or asks Triton's own function."""
    import triton.language as tl

    value, constant, numbers, make = tl.tensor, tl.constexpr, (int, float, bool), _maker()
    remembered: dict[tuple[Any, ...], Decision] = {}
    address = np.dtype(np.uint64)

    def call(self: Any, other: Any) -> Any:
        if other.__class__ is constant:
            other = other.value
        kind = other.__class__
        if kind is value:
            key: tuple[Any, ...] = (self.type.name, other.type.name)
        elif kind in numbers and (other or kind is not float):  # 0.0 and -0.0 would be one key
            key = (self.type.name, kind, other)
        else:
            return function(self, other)
        decision = remembered.get(key)
        if decision is None:
            result = function(self, other)
            if result.__class__ is value and (decision := decisions.decide(self, other, result)) is not None:
                if len(remembered) >= MOST:
                    remembered.clear()
                remembered[key] = decision
            return result
        left, right, number, size, element, type = decision
        own = self.handle.data
        given = other.handle.data if number is None else number
        if size:
            given = given.astype(address)
            if size > 1:
                given *= address.type(size)
        else:
            if left is not None:
                own = own.astype(left)
            if right is not None:
                given = given.astype(right)
        return make(compute(own, given), element, type)

    return call


def _convert(function: Any, semantic: Any) -> Any:
    """Conversions to a type, without further options."""
    import triton.language as tl

    plain, constant = tl.dtype, tl.constexpr

    def call(self: Any, dtype: Any, *rest: Any, **others: Any) -> Any:
        if dtype.__class__ is constant:
            dtype = dtype.value
        if dtype.__class__ is not plain or rest or others:
            return function(self, dtype, *rest, **others)
        return semantic.cast(self, dtype)

    return call


def _key(operand: Any, value: type, numbers: tuple[type, ...]) -> Any:
    """The key of an operand in the table of decisions; None if the operand has none."""
    kind = operand.__class__
    if kind is value:
        return operand.type.name
    if kind in numbers:
        return (kind, operand) if operand or kind is not float else repr(operand)  # 0.0 or -0.0
    return None


def _where(function: Any, semantic: Any) -> Any:
    """`where` for two tensors, or a tensor and a number, of one type. Numpy broadcasts their shapes."""
    import triton.language as tl

    value, constant, numbers, make = tl.tensor, tl.constexpr, (int, float, bool), _maker()
    remembered: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def decide(condition: Any, x: Any, y: Any, result: Any) -> tuple[Any, ...] | None:
        if condition.dtype.name != "int1":
            return None
        settled = semantic.binary_op_type_checking_impl(x, y, True, True)
        for before, after in zip((x, y), settled, strict=True):
            if before.__class__ is value and before.dtype.name != after.dtype.name:
                return None
        arrays = [None if one.__class__ is value else two.handle.data for one, two in zip((x, y), settled, strict=True)]
        return *arrays, result.handle.dtype, result.type

    def call(condition: Any, x: Any, y: Any) -> Any:
        x = x.value if x.__class__ is constant else x
        y = y.value if y.__class__ is constant else y
        first, second = _key(x, value, numbers), _key(y, value, numbers)
        if condition.__class__ is not value or first is None or second is None:
            return function(condition, x, y)
        key = condition.type.name, first, second
        decision = remembered.get(key)
        if decision is None:
            result = function(condition, x, y)
            decision = decide(condition, x, y, result)
            if decision is not None:
                if len(remembered) >= MOST:
                    remembered.clear()
                remembered[key] = decision
            return result
        own, other, element, type = decision
        own = x.handle.data if own is None else own
        other = y.handle.data if other is None else other
        return make(np.where(condition.handle.data, own, other), element, type)

    return call


def _load(function: Any, semantic: Any) -> Any:
    """Loads of blocks, with a mask of the pointers' shape and a number for places where the mask is not set."""
    import triton.language as tl

    value, constant, numbers = tl.tensor, tl.constexpr, (int, float, bool)
    remembered: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def decide(pointer: Any, mask: Any, other: Any, result: Any) -> tuple[Any, Any] | None:
        """The number for places where the mask is not set, and the type of the result."""
        if not pointer.type.is_block() or pointer.dtype.element_ty.name == "int1" or mask.dtype.name != "int1":
            return None
        if not mask.type.is_block() or mask.type.shape != pointer.type.shape:
            return None
        if other is None:
            return None, result.type
        _, elsewhere = semantic.broadcast_impl_value(pointer, semantic.to_tensor(other))
        elsewhere = semantic.cast(elsewhere, pointer.dtype.element_ty).handle
        elsewhere.data.flags.writeable = False
        return elsewhere, result.type

    def call(pointer: Any, mask: Any = None, other: Any = None, *rest: Any, **others: Any) -> Any:
        other = other.value if other.__class__ is constant else other
        of_other = "none" if other is None else _key(other, value, numbers)
        if pointer.__class__ is not value or mask.__class__ is not value or other.__class__ is value or rest or others:
            return function(pointer, mask, other, *rest, **others)
        if of_other is None:
            return function(pointer, mask, other)
        key = pointer.type.name, mask.type.name, of_other
        decision = remembered.get(key)
        if decision is None:
            result = function(pointer, mask, other)
            decision = decide(pointer, mask, other, result)
            if decision is not None:
                if len(remembered) >= MOST:
                    remembered.clear()
                remembered[key] = decision
            return result
        elsewhere, type = decision
        loaded = semantic.builder.create_masked_load(pointer.handle, mask.handle, elsewhere, None, None, False)
        return value(loaded, type)

    return call


def _fma(function: Any, semantic: Any) -> Any:
    """x·y + z of three blocks of one type."""
    import triton.language as tl

    value, make = tl.tensor, _maker()

    def call(x: Any, y: Any, z: Any) -> Any:
        if x.__class__ is value and y.__class__ is value and z.__class__ is value:
            type = x.type
            if type.name == y.type.name == z.type.name and x.dtype.name in ALWAYS_OWN:
                return make(x.handle.data * y.handle.data + z.handle.data, x.dtype, type)
        return function(x, y, z)

    return call


_FUNCTIONS = {"load": _load, "where": _where, "fma": _fma}
