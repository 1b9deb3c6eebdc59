"""Corrections of Triton's interpreter: its wrong bfloat16, its slow sorts, and its slow entry into a function.

The interpreter of Triton 3.6 to 3.9 keeps bfloat16 as raw 16-bit integers. It truncates float32 to bfloat16 where the
hardware rounds to nearest even, converts other types by their bits, and multiplies matrices of raw bits.
`correct_bfloat16()` replaces its conversions and its product. It changes nothing outside the interpreter, and nothing
in versions that it was not written for. The new product adds terms in one order for every element, as a GPU does; in
numpy's own product the shapes of the matrices decide the order.

Triton 3.6 passes a loop's bounds to `int` as arrays of one element, which newer versions of numpy refuse.
`convert_one_element()` converts the element.

Sorts give the right order, but take half a second for 256 integers. `replace_sorts()` lets numpy sort them.

The other functions save time that the interpreter repeats:

- Before every launch, and every call of one function by another, the interpreter looks through all names of
  `triton.language` for those that it must replace. This takes a third of the time of small kernels. For every value it
  also looks up which type of numpy stands for which type of Triton. `remember_lookups()` lets it remember both.
- For every value it makes and checks the shape of its block, and the tuple that shows the shape. This takes a quarter
  of the time of kernels with many small operations. `remember_shapes()` makes each shape once.
- It checks every sum and product of integers for overflow, by eight operations whose result is reported in debug mode
  alone. `skip_unreported_checks()` skips them in other modes.
- `operands` remembers facts about the two sides of an operation. `operations` computes in one step where the types of
  the operands have occurred before.

`correct()` does all of it, for the command and the tests alike.
"""

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from adjoint.core import kernels
from adjoint.verify.interpreter.operands import (
    compare_types_by_identity,
    convert_at_once,
    make_handles_at_once,
    remember_operands,
    without_detour,
)
from adjoint.verify.interpreter.operations import at_once

LAST_VERSION_WITH_FAULT = (3, 9)


def correct() -> None:
    """Applies all corrections in this process, if Triton interprets its kernels here."""
    if kernels.interpreting():
        correct_bfloat16()
        convert_one_element()
        replace_sorts()
        remember_lookups()
        remember_shapes()
        skip_unreported_checks()
        remember_operands()
        compare_types_by_identity()
        convert_at_once()
        make_handles_at_once()


def widen(bits: np.ndarray) -> np.ndarray:
    """Converts bfloat16 bit patterns to float32 values, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Converts float32 values to bfloat16 bit patterns, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def correct_bfloat16() -> bool:
    """Corrects bfloat16 in this process, and returns whether this version of Triton needs the correction."""
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version > LAST_VERSION_WITH_FAULT:
        return False
    builder: Any = interpreter.InterpreterBuilder
    if getattr(builder, "bfloat16_corrected", False):
        return True
    handle = interpreter.TensorHandle
    cast, convert, dot = builder.cast_impl, builder.create_fp_to_fp, builder.create_dot

    def as_float32(source: Any) -> Any:
        return handle(widen(source.data), tl.float32) if source.dtype.scalar == tl.bfloat16 else source

    def through_float32(original: Any) -> Any:
        def replacement(self: Any, source: Any, destination: Any, *rest: Any) -> Any:
            if tl.bfloat16 not in (source.dtype.scalar, destination.scalar):
                return original(self, source, destination, *rest)
            if source.dtype.scalar == destination.scalar:
                return source
            values = as_float32(source).data
            if destination.scalar == tl.bfloat16:
                return handle(narrow(values.astype(np.float32)), tl.bfloat16)
            return handle(values.astype(interpreter._get_np_dtype(destination)), destination.scalar)

        return replacement

    def corrected_dot(self: Any, a: Any, b: Any, total: Any, *rest: Any) -> Any:
        a, b = as_float32(a), as_float32(b)
        if not a.dtype.scalar.is_floating() or a.dtype.primitive_bitwidth == 8:
            return dot(self, a, b, total, *rest)
        kind = total.data.dtype
        product = np.einsum("...mk,...kn->...mn", a.data.astype(kind), b.data.astype(kind))
        return handle(product + total.data, total.dtype.scalar)

    builder.cast_impl = through_float32(cast)
    builder.create_fp_to_fp = through_float32(convert)
    builder.create_dot = corrected_dot
    builder.bfloat16_corrected = True
    return True


def convert_one_element() -> None:
    """Lets the interpreter convert arrays of one element to integers, with every version of numpy."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor
    if getattr(original, "converts", False):
        return

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch.converts = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch


def replace_sorts() -> None:
    """Lets numpy sort integers in this process, with the same result as Triton's sorting networks."""
    import triton.language as tl
    from triton.runtime import interpreter

    if getattr(tl.sort, "replaced", False):
        return
    handle = interpreter.TensorHandle

    def ordered(x: Any, count: int, descending: bool) -> Any:
        values = np.sort(x.handle.data, axis=-1)
        values = values[..., ::-1] if descending else values
        values = np.ascontiguousarray(values[..., :count])
        return tl.core.tensor(handle(values, x.handle.dtype), tl.block_type(x.dtype, list(values.shape)))

    def replacement(original: Any, sort: Any) -> Any:
        def call(x: Any, *arguments: Any, **keywords: Any) -> Any:
            if not x.dtype.is_int():
                return original(x, *arguments, **keywords)
            return sort(x, *arguments, **keywords)

        call.replaced = True  # type: ignore[attr-defined]
        return call

    def plain(value: Any) -> Any:
        return getattr(value, "value", value)  # the value of a constexpr

    tl.sort = replacement(
        tl.sort, lambda x, dim=None, descending=False: ordered(x, x.shape[-1], bool(plain(descending)))
    )
    tl.topk = replacement(tl.topk, lambda x, k, dim=None: ordered(x, plain(k), True))


def remember_lookups() -> None:
    """Lets the interpreter look up only once which names it replaces, and which types of numpy it uses."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._patch_lang
    if getattr(original, "remembers", False) or not hasattr(interpreter, "_LangPatchScope"):
        return
    remembered: dict[tuple[Any, ...], list[tuple[Any, str, Any]]] = {}
    seen: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()

    def patch(function: Any) -> Any:
        languages = seen.get(function)
        if languages is None:
            names = function.__globals__.values()
            languages = tuple(language for language in (tl, tl.core) if any(value is language for value in names))
            seen[function] = languages
        scope = interpreter._LangPatchScope()
        if languages and not any(tl.core.is_builtin(language.load) for language in languages):
            return scope  # another function called this one, and everything is in place
        if languages not in remembered:
            scope = original(function)
            semantic = interpreter.interpreter_semantic
            for place, name, _ in scope._changes:
                direct = without_detour(getattr(place, name), semantic)
                remembered.setdefault(languages, []).append((place, name, at_once(place, name, direct, semantic)))
        for place, name, value in remembered[languages]:
            scope.set_attr(place, name, value)
        return scope

    patch.remembers = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch
    look_up = interpreter._get_np_dtype
    types: dict[str, Any] = {}

    def numpy_type(kind: Any) -> Any:
        name = kind.scalar.name  # for a block, the name of its elements' type
        numpy_kind = types.get(name)
        if numpy_kind is None:
            numpy_kind = types[name] = look_up(kind)
        return numpy_kind

    interpreter._get_np_dtype = numpy_type


def remember_shapes() -> None:
    """Makes the shape of a block, its number of elements, and the values that show both only once for each shape."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    block, value = tl.block_type, tl.tensor
    make_block, make_value = block.__init__, value.__init__
    of_block, of_value = {"element_ty", "shape", "numel", "name"}, {"handle", "shape", "numel", "type", "dtype"}
    scalar, pair = value(None, tl.int32), block(tl.int32, [2])
    if getattr(make_block, "remembers", False) or vars(scalar).keys() != of_value or vars(pair).keys() != of_block:
        return  # it was done already, or this version has attributes that are not known here
    shapes: dict[tuple[Any, ...], tuple[Any, int, str, Any, Any]] = {}

    def plain(size: Any) -> Any:
        size = tl.core._unwrap_if_constexpr(size)
        return size if type(size) is int else repr(size)  # 2.0 is an error and must not share a key with 2

    def remembering_block(self: Any, element: Any, shape: Any) -> None:
        sizes = tuple([size if type(size) is int else plain(size) for size in shape])
        entry = shapes.get(sizes)
        if entry is None:
            make_block(self, element, shape)
            example: Any = value.__new__(value)
            make_value(example, None, self)
            entry = shapes[sizes] = self.shape, self.numel, str(self.shape), example.shape, example.numel
        self.element_ty, self.shape, self.numel = element, entry[0], entry[1]
        self.name = f"<{entry[2]}, {element}>"
        self.shown = entry[3:]

    def remembering_value(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.shown if type.is_block() else (scalar.shape, scalar.numel)

    broadcast = TritonSemantic.broadcast_impl_value
    common: dict[tuple[int, int], Any] = {}

    def broadcast_others(self: Any, left: Any, right: Any) -> Any:
        """Broadcasts two values. Blocks of one shape and two scalars stay; a scalar takes the shape of a block."""
        own, other = left.type, right.type
        if own.is_block():
            if not other.is_block():
                kind = own if other.name == left.dtype.name else own.with_element_ty(other)
                return left, self.tensor(self.builder.create_splat(kind, right.handle), kind)
            if own.shape is other.shape:
                return left, right
            pair = id(own.shape), id(other.shape)  # identities are keys here, because `shapes` keeps all shapes alive
            shape = common.get(pair)
            if shape is None:
                wide, across = broadcast(self, left, right)
                if len(own.shape) == len(other.shape):
                    common[pair] = wide.type.shape
                return wide, across
            return broadcast_to(self, left, shape), broadcast_to(self, right, shape)
        elif other.is_block():
            kind = other if own.name == right.dtype.name else other.with_element_ty(own)
            return self.tensor(self.builder.create_splat(kind, left.handle), kind), right
        return left, right

    def broadcast_to(self: Any, block: Any, shape: Any) -> Any:
        if block.type.shape is shape:
            return block
        wide = self.builder.create_broadcast(block.handle, shape)
        return self.tensor(wide, tl.block_type(block.dtype, shape))

    remembering_block.remembers = True  # type: ignore[attr-defined]
    block.__init__, value.__init__ = remembering_block, remembering_value
    TritonSemantic.broadcast_impl_value = broadcast_others


def skip_unreported_checks() -> None:
    """Checks integers for overflow only where the result is reported: with the option `debug`, which is off here."""
    from triton.language.semantic import TritonSemantic

    check = TritonSemantic.binary_op_sanitize_overflow_impl
    if getattr(check, "skipped", False):
        return

    def reported(self: Any, *arguments: Any) -> None:
        if self.builder.options.debug:
            check(self, *arguments)

    reported.skipped = True  # type: ignore[attr-defined]
    TritonSemantic.binary_op_sanitize_overflow_impl = reported
