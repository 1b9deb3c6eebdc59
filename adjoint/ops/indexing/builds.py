"""The kernel variants of the family, as they are compiled for a GPU.

Every kernel in every element type, and in every access for one of them.
"""

from collections.abc import Iterator

import torch

from adjoint.core.arguments import FLOATING
from adjoint.core.kernels import Variant
from adjoint.ops.indexing.plans import MAX_COMPARED, SCHEDULES

_LINES = ((512, 10), (128, 8), (100, 40), (16, MAX_COMPARED))
"""Elements and entries of the lines that are built for."""


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Kernel variants, named; indices in both types where a kernel reads them."""
    from adjoint.ops.indexing.launch import Kinds, variant

    take = SCHEDULES.lookup("take_forward")
    lines = SCHEDULES.lookup("take_backward_lines")
    scatter = SCHEDULES.lookup("take_scatter")
    by_sorting = SCHEDULES.lookup("take_backward_sorted")
    for dtype in FLOATING:
        main = dtype == torch.float32
        for index in (torch.int64, torch.int32) if main else (torch.int64,):
            for access in ("plain", "") if main else ("plain",):
                for many, large in ((False, False), (True, False), (True, True)) if main else ((False, False),):
                    kinds = Kinds(dtype, index, many, large, raises=True)
                    name = f"take {dtype} {index} {access} {many} {large}"
                    yield name, variant("take_forward", kinds, take, "take", access)
            for length, entries in _LINES:
                for sums in (True, False):
                    for access in ("aligned", "unit", "strided") if main else ("aligned", "strided"):
                        kinds = Kinds(dtype, index, sums=sums, length=length, entries=entries)
                        name = f"lines {dtype} {index} {length} {entries} {sums} {access}"
                        yield name, variant("take_backward_lines", kinds, lines, "lines", access)
        for many in (False, True) if main else (False,):
            kinds = Kinds(dtype, torch.int64, many, length=512, entries=10)
            if many:
                yield f"lines {dtype} many", variant("take_backward_lines", kinds, lines, "lines", "unit")
            for access in ("unit", "strided") if main and not many else ("unit",):
                yield f"scatter {dtype} {many} {access}", variant("take_scatter", kinds, scatter, "scatter", access)
                for name, part in (("take_keys", "keys"), ("take_sum_tiles", "sums"), ("take_write_sums", "sums")):
                    if main or name != "take_keys":
                        yield f"{name} {dtype} {many} {access}", variant(name, kinds, by_sorting, part, access)
        if dtype in (torch.float64, torch.float32):  # the sums of the others are float32's
            kinds = Kinds(dtype, torch.int64)
            yield f"partials {dtype}", variant("take_sum_partials", kinds, by_sorting, "sums", "unit")
