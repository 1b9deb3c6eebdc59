"""Where an element lies, and which element an index means: what all kernels of taking along an axis share."""

from collections.abc import Callable
from typing import TypeVar

import triton
import triton.language as tl

from adjoint.core.launch import Setup
from adjoint.ops.indexing.take_along_axis.layout import MANY_AXES


@triton.jit
def offset_of(
    number, size_1, size_2, size_3, step_0, step_1, step_2, step_3, ONE: tl.constexpr, MANY: tl.constexpr
):  # fmt: skip
    """Where the element with a number lies, along MANY axes, or ONE, or else two.

    Steps are 64 bits wide, and so is what is multiplied by them.
    """
    if MANY:
        rest = number // size_3
        offset = (number % size_3) * step_3
        offset += (rest % size_2) * step_2
        rest = rest // size_2
        return offset + (rest % size_1) * step_1 + (rest // size_1) * step_0
    elif ONE:
        return number * step_3
    else:
        rest = number // size_3
        offset = (number % size_3) * step_3
        return offset + rest * step_2


@triton.jit
def from_the_beginning(index, length):
    """An index below 0 counts from the end."""
    return tl.where(index < 0, index + length, index)


Bound = TypeVar("Bound")


def bind_for_axes(setup: Setup, bind: Callable[[bool], Bound]) -> Bound:
    """Binds kernels with `bind(many)`, whether a layout has many axes or few.

    Where it has many, those for few are bound besides: a batch of one has fewer, and must not compile anew.
    """
    few = bind(False)
    return bind(True) if MANY_AXES in setup.problem.layout else few
