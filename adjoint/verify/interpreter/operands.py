"""Decisions that Triton's interpreter makes for every operation, made once; they are half of the time of small ones.

Most operands of sums, products and comparisons need no conversion. Either both have one type, or one is a tensor and
the other a Python number, which becomes the same constant each time. Remembered decisions change how soon a result is
there, but not the result: where nothing is remembered yet, Triton's own function decides.
"""

from typing import Any

MOST = 4096
"""The most constants that are remembered; then all are forgotten."""

INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
ALWAYS_OWN = frozenset(("int1", *INTEGERS, "fp32", "fp64"))
"""Types whose operations have the same type. 16-bit floats are not among them, because they are divided in float32."""


def remember_operands() -> None:
    """Keeps operands of one type as they are, and makes the constant for a number beside a tensor only once."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    settle, make_constant = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.scalar_constant
    if getattr(settle, "remembers", False) or not getattr(tl.block_type.__init__, "remembers", False):
        return  # keys contain identities of shapes, which only `remember_shapes` makes unique
    value, numbers = tl.tensor, (int, float, bool)
    promote = TritonSemantic.computation_type_impl
    constants: dict[tuple[Any, ...], Any] = {}
    kinds: dict[tuple[Any, ...], Any] = {}

    def remember(key: tuple[Any, ...], constant: Any) -> None:
        if len(constants) >= MOST:
            constants.clear()
        constant.handle.data.flags.writeable = False
        constants[key] = constant

    def settled(self: Any, left: Any, right: Any, *flags: Any, **named: Any) -> Any:
        key: tuple[Any, ...]
        if left.__class__ is value:
            if right.__class__ is value:
                name = left.dtype.name
                if name in ALWAYS_OWN and right.dtype.name == name:
                    return self.broadcast_impl_value(left, right)
            elif right.__class__ in numbers and not named:
                key = id(left.shape), left.dtype.name, right.__class__, right, flags
                constant = constants.get(key)
                if constant is not None:
                    return left, constant
                first, second = settle(self, left, right, *flags)
                if first is left and right == right:
                    remember(key, second)
                return first, second
        elif right.__class__ is value and left.__class__ in numbers and not named:
            key = left.__class__, left, id(right.shape), right.dtype.name, flags
            constant = constants.get(key)
            if constant is not None:
                return constant, right
            first, second = settle(self, left, right, *flags)
            if second is right and left == left:
                remember(key, first)
            return first, second
        return settle(self, left, right, *flags, **named)

    def constant_of(self: Any, number: Any, dtype: Any) -> Any:
        if number.__class__ not in numbers or dtype is None:
            return make_constant(self, number, dtype)
        key = number.__class__, number, dtype.name
        constant = constants.get(key)
        if constant is None:
            constant = make_constant(self, number, dtype)
            if number == number:
                remember(key, constant)
        return constant

    def common(self: Any, first: Any, first_is_scalar: bool, second: Any, second_is_scalar: bool, divides: bool) -> Any:
        key = first.name, first_is_scalar, second.name, second_is_scalar, divides
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = promote(self, first, first_is_scalar, second, second_is_scalar, divides)
        return kind

    settled.remembers = True  # type: ignore[attr-defined]
    TritonSemantic.binary_op_type_checking_impl = settled
    TritonSemantic.scalar_constant = constant_of
    TritonSemantic.computation_type_impl = common


def compare_types_by_identity() -> None:
    """Lets a type be equal to itself without a comparison of names."""
    import triton.language as tl

    equal = tl.dtype.__eq__
    if getattr(equal, "by_identity", False):
        return

    def same(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    same.by_identity = True  # type: ignore[attr-defined]
    tl.dtype.__eq__ = same


CONVERSIONS = {
    ("bf16", "fp32"): "create_fp_ext", ("fp16", "fp32"): "create_fp_ext", ("fp32", "fp64"): "create_fp_ext",
    ("fp32", "bf16"): "create_fp_trunc", ("fp32", "fp16"): "create_fp_trunc", ("fp64", "fp32"): "create_fp_trunc",
}  # fmt: skip
"""The builder's function for a conversion between floats, rounded to nearest."""


def convert_at_once() -> None:
    """Converts numbers, and tells constants from values, without a test for every other type."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    cast, unwrap = TritonSemantic.cast, tl.core._unwrap_if_constexpr
    if getattr(cast, "at_once", False):
        return
    value, handle = tl.tensor, interpreter.TensorHandle
    plain = frozenset((value, int, float, bool, str, type(None)))

    def convert(self: Any, source: Any, target: Any, *rounding: Any, **named: Any) -> Any:
        kind = target.scalar
        element = source.dtype.name
        if element == kind.name:
            return source
        if any(rounding) or any(named.values()):
            return cast(self, source, target, *rounding, **named)
        name = CONVERSIONS.get((element, kind.name))
        is_plain = element in ALWAYS_OWN and kind.name in ALWAYS_OWN and kind.name != "int1"
        if name is None and not is_plain:
            return cast(self, source, target, *rounding, **named)
        type = source.type.with_element_ty(kind) if source.type.is_block() else kind
        if name is None:
            return self.tensor(handle(source.handle.data.astype(interpreter._get_np_dtype(kind)), kind), type)
        return self.tensor(getattr(self.builder, name)(source.handle, type), type)

    def unwrap_others(argument: Any) -> Any:
        return argument if argument.__class__ in plain else unwrap(argument)

    convert.at_once = True  # type: ignore[attr-defined]
    TritonSemantic.cast = convert
    tl.core._unwrap_if_constexpr = unwrap_others


def make_handles_at_once() -> None:
    """Checks a value's array against its type without a call, unless the array is wrong."""
    import triton.language as tl
    from triton.runtime import interpreter

    handle: Any = interpreter.TensorHandle
    if getattr(handle.__init__, "at_once", False) or list(handle.__dataclass_fields__) != ["data", "dtype", "attr"]:
        return
    plain, pointer = tl.dtype, tl.pointer_type

    def make(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        kind = dtype.__class__
        if kind is not pointer and (kind is not plain or data.itemsize * 8 > max(dtype.primitive_bitwidth, 8)):
            self.__post_init__()

    make.at_once = True  # type: ignore[attr-defined]
    handle.__init__ = make


def without_detour(function: Any, semantic: Any) -> Any:
    """The interpreter's entry into a function of the language, without a search for an argument that it sets itself."""
    member = (getattr(function, "__kwdefaults__", None) or {}).get("member")
    inner = getattr(member, "__wrapped__", None)
    if inner is None:
        return function

    def call(*arguments: Any, **keywords: Any) -> Any:
        keywords["_semantic"] = semantic
        return inner(*arguments, **keywords)

    return call
