"""Reads a call from a command line, and turns it into the arguments of `adjoint.plan`.

    embedding  4x128  1000x64:float32  padding_idx=0

The op's signature says which arguments are tensors, in which order, which are integers, and which may be left out.
"""

import ast
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_overloads

import torch
from torch import Tensor

from adjoint.core.errors import ArgumentError
from adjoint.ops.names import path_of, public_functions, unknown_op

FLOATING = ("float64", "float32", "bfloat16", "float16")
INTEGER = ("int64", "int32")


@dataclass(frozen=True)
class _Argument:
    """A tensor argument of a public function."""

    integer: bool
    required: bool
    by_name: bool


def read_call(
    op: str, shapes: Sequence[str], settings: Sequence[str], dtype: str
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The public function of an op's name, and the call's arguments by name. The tensors are meta tensors.

    Args:
        op: the name of a function, or of a mode of it, such as "swiglu[up_gate]".
        shapes: `[NAME=]SIZES[:DTYPE]`. Unnamed shapes are in the order of the signature's positional tensors. A single
            shape stands for all tensors of an op that takes only floating tensors.
        settings: `NAME=VALUE`, for the keywords that are no tensors.
        dtype: the dtype of floating tensors whose shape states none.

    Raises:
        ArgumentError: the op is unknown, or its arguments cannot be read.

    >>> function, arguments = read_call("embedding", ["4x128", "1000x64"], ["padding_idx=0"], "bfloat16")
    >>> {name: getattr(value, "shape", value) for name, value in arguments.items()}
    {'ids': torch.Size([4, 128]), 'weight': torch.Size([1000, 64]), 'padding_idx': 0}
    """
    function, keywords = _function(op)
    keywords |= _settings(op, function, settings)
    arguments = tensor_arguments(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is parameter.empty and name not in arguments and name not in keywords:
            raise ArgumentError(f"{op} takes {name}, which has no default; write --set {name}=VALUE")
    alone = len(shapes) == 1 and "=" not in shapes[0]
    if alone and not any(argument.integer for argument in arguments.values()):
        shapes = list(shapes) * _count_tensors(function, keywords, arguments)
    return function, _tensors(op, arguments, shapes, dtype) | keywords


def _function(op: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    functions = public_functions()
    for name in (op, *(path for path in functions if path.endswith(f".{op}"))):
        if name in functions:
            return functions[name], {}
    from adjoint.verify import subjects

    for subject in subjects():
        if op in (subject.name, path_of(subject)):
            return subject.function, dict(subject.keywords)
    raise ArgumentError(unknown_op("plan", [op], list(functions)))


# -------------------------------------------------------------------------------------------- keywords


def _settings(op: str, function: Callable[..., Any], settings: Sequence[str]) -> dict[str, Any]:
    tensors = tensor_arguments(function)
    known = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in tensors and name != "preference"
    }
    values: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise ArgumentError(f"cannot read {text!r}; write a keyword as NAME=VALUE, such as padding_idx=0")
        if name not in known:
            hint = f"; give the shape of {name} instead" if name in tensors else ""
            raise ArgumentError(f"{op} has no keyword {name!r} besides its tensors; it has {', '.join(known)}{hint}")
        values[name] = _value(value)
        if known[name].annotation is bool and not isinstance(values[name], bool):
            raise ArgumentError(f"{op}: {name} must be True or False, got {value!r}")
    return values


def _value(text: str) -> Any:
    """The Python literal that a text states, such as a number, True or None; otherwise the text itself."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


# --------------------------------------------------------------------------------------------- tensors


def tensor_arguments(function: Callable[..., Any]) -> dict[str, _Argument]:
    """The tensor arguments of a function, found by its annotations."""
    stated: dict[str, list[Any]] = {}  # an implementation leaves it to its overloads to say what an argument may be
    for form in (*get_overloads(function), function):
        for name, parameter in inspect.signature(form).parameters.items():
            stated.setdefault(name, []).extend(get_args(parameter.annotation) or (parameter.annotation,))
    arguments = {}
    for name, parameter in inspect.signature(function).parameters.items():
        for kind in stated[name]:
            dtypes = getattr(kind, "dtypes", None)
            if dtypes is not None:
                arguments[name] = _Argument(
                    integer="int64" in dtypes,
                    required=parameter.default is parameter.empty,
                    by_name=parameter.kind is parameter.KEYWORD_ONLY,
                )
    return arguments


def _count_tensors(
    function: Callable[..., Any], keywords: Mapping[str, Any], arguments: Mapping[str, _Argument]
) -> int:
    """How many tensors a call with these keywords takes: as many as the mode that shares most of them."""
    from adjoint.verify import subjects

    modes = [subject for subject in subjects() if subject.function is function]
    if not modes:
        return sum(argument.required for argument in arguments.values())
    return len(max(modes, key=lambda mode: len(mode.keywords.keys() & keywords.keys())).inputs)


def _tensors(op: str, arguments: Mapping[str, _Argument], shapes: Sequence[str], dtype: str) -> dict[str, Tensor]:
    """A meta tensor for each shape, by the name of its argument."""
    tensors: dict[str, Tensor] = {}
    for text in shapes:
        name, sizes, own = _shape(text)
        if name is None:
            unnamed = (name for name, argument in arguments.items() if name not in tensors and not argument.by_name)
            name = next(unnamed, None)
        if name is None:
            raise ArgumentError(f"{op} takes {_in_words(arguments)}, got {len(shapes)} shapes")
        if name not in arguments:
            raise ArgumentError(f"{op} has no tensor {name!r}; it takes {_in_words(arguments)}")
        if name in tensors:
            raise ArgumentError(f"{op}: the shape of {name} is given twice")
        kind = _dtype(own or (INTEGER[0] if arguments[name].integer else dtype))
        tensors[name] = torch.empty(sizes, dtype=kind, device="meta")
    for name, argument in arguments.items():
        if argument.required and name not in tensors:
            raise ArgumentError(f"{op} takes {_in_words(arguments)}; {name} has no shape")
    return {name: tensors[name] for name in arguments if name in tensors}


def _in_words(arguments: Mapping[str, _Argument]) -> str:
    """The arguments in words: "ids, weight, [offsets], [per_sample_weights=]".

    Arguments in brackets may be left out, and arguments with "=" are passed by name.
    """
    named = {name: f"{name}=" if argument.by_name else name for name, argument in arguments.items()}
    return ", ".join(text if arguments[name].required else f"[{text}]" for name, text in named.items())


def _shape(text: str) -> tuple[str | None, tuple[int, ...], str | None]:
    """Name, sizes and dtype of a shape; name and dtype are None if they are absent."""
    read = re.fullmatch(r"(?:(\w+)=)?(\d+(?:x\d+)*)(?::(\w+))?", text)
    if read is None:
        raise ArgumentError(
            f"cannot read the shape {text!r}; write its sizes joined by x, such as 4x64, or 128 for one axis; "
            f"a name before and a dtype after may be added, such as ids=4x64:int32"
        )
    name, sizes, dtype = read[1], tuple(map(int, read[2].split("x"))), read[3]
    if math.prod(sizes) >= 2**60:
        raise ArgumentError(f"the shape {text!r} has more elements than memory can ever hold")
    return name, sizes, dtype


def _dtype(name: str) -> torch.dtype:
    if name not in FLOATING + INTEGER:
        raise ArgumentError(f"unknown dtype {name!r}; dtypes are {', '.join(FLOATING + INTEGER)}")
    return getattr(torch, name)
