"""The kernel variants of the family, as they are compiled for a GPU.

Every kernel in every element type, and in every access for one of them.
"""

from collections.abc import Iterator

import torch

from adjoint.core.arguments import FLOATING
from adjoint.core.kernels import Variant
from adjoint.ops.indexing.plans import SCHEDULES

_FEW, _MANY = (512, 10), (512, 64)
"""Elements and entries of lines, for each of two kernels."""


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Kernel variants, named; indices in both types where a kernel reads them."""
    from adjoint.ops.indexing.launch import ACCESSES, Kinds, variant

    take = SCHEDULES.lookup("take_forward")
    compared, lines = SCHEDULES.lookup("take_backward_few"), SCHEDULES.lookup("take_backward_lines")
    scatter, by_sorting = SCHEDULES.lookup("take_scatter"), SCHEDULES.lookup("take_backward_sorted")

    def adjoint(kernel: str, kinds: Kinds, access: str, what: str) -> tuple[str, Variant]:
        part = kernel.removeprefix("take_backward_")
        length, entries = _FEW if part == "few" else _MANY
        kinds = kinds._replace(length=length, entries=entries)
        name = f"{kernel} {kinds.element} {kinds.index_type} {access} {what}"
        return name, variant(kernel, kinds, compared if part == "few" else lines, part, access)

    for dtype in FLOATING:
        main = dtype == torch.float32
        plain = Kinds(dtype, torch.int64, raises=True)
        yield f"take {dtype}", variant("take_forward", plain, take, "take", "plain")
        for access in ACCESSES if main else ACCESSES[:1]:
            yield adjoint("take_backward_few", plain, access, "")
            yield adjoint("take_backward_lines", plain, access, "sums")
            if main and access != "unit":
                yield adjoint("take_backward_lines", plain._replace(sums=False), access, "distinct")
        yield f"scatter {dtype}", variant("take_scatter", plain, scatter, "scatter", "unit")
        for kernel in ("take_sum_tiles", "take_write_sums"):
            yield f"{kernel} {dtype}", variant(kernel, plain, by_sorting, "sums", "unit")
        if dtype in (torch.float64, torch.float32):  # the sums of the others are float32's
            yield f"partials {dtype}", variant("take_sum_partials", plain, by_sorting, "sums", "unit")
    # What else a layout or a type may ask for, in one of the element types.
    dtype = torch.float32
    narrow, many = Kinds(dtype, torch.int32, raises=True), Kinds(dtype, torch.int64, many_axes=True, raises=True)
    large = many._replace(large=True)
    for what, kinds in (("int32", narrow), ("many axes", many), ("large", large)):
        yield f"take {what}", variant("take_forward", kinds, take, "take", "" if kinds.many_axes else "plain")
        yield f"scatter {what}", variant("take_scatter", kinds, scatter, "scatter", "strided")
    for what, kinds in (("int32", narrow), ("many axes", many)):
        for kernel in ("take_backward_few", "take_backward_lines"):
            yield adjoint(kernel, kinds, "unit" if kinds.many_axes else "aligned", what)
        yield f"keys {what}", variant("take_keys", kinds, by_sorting, "keys", "unit")
    yield "take strided", variant("take_forward", narrow, take, "take", "")
    long = Kinds(dtype, torch.int64, length=2**30, entries=64)
    yield "lines with long keys", variant("take_backward_lines", long, lines, "lines", "unit")
    for kernel in ("take_sum_tiles", "take_write_sums"):
        yield f"{kernel} many axes", variant(kernel, many, by_sorting, "sums", "unit")
