"""The kernel variants of the family, as they are compiled for a GPU.

Every kernel in every element type, and in every access for one of them.
"""

from collections.abc import Iterator

import torch

from adjoint.core.arguments import FLOATING
from adjoint.core.kernels import Variant
from adjoint.ops.embedding.plans import SCHEDULES, WEIGHTS_BLOCK

_COLUMNS = 4096
_IDS = (torch.int64, torch.int32)


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Kernel variants, named; ids in both types where a kernel reads them."""
    from adjoint.device import grouping
    from adjoint.ops.embedding.launch import ACCESSES, Kinds, variant

    for ids in _IDS:
        for key, described in grouping.variants(ids).items():
            if ids == _IDS[0] or key.startswith("group_count_digits first"):  # the others read keys
                yield f"{key} {ids}", described
    gather = SCHEDULES.lookup("embedding_gather")
    backward = SCHEDULES.lookup("embedding_backward")
    bags, bags_backward = SCHEDULES.lookup("embedding_bag_forward"), SCHEDULES.lookup("embedding_bag_backward")
    for dtype in FLOATING:
        for access in ACCESSES if dtype == torch.bfloat16 else ACCESSES[:1]:
            for ids in _IDS if access == "aligned" else _IDS[:1]:
                kinds = Kinds(dtype, ids, dtype, _COLUMNS, raises=True)
                yield f"gather {dtype} {ids} {access}", variant("embedding_gather", kinds, gather, "gather", access)
            kinds = Kinds(dtype, torch.int64, dtype, _COLUMNS)
            if access != "strided" and dtype != torch.float16 and dtype != torch.float32:  # their sums are bfloat16's
                name = "embedding_sum_partials"
                yield f"{name} {dtype} {access}", variant(name, kinds, backward, "partials", access)
            yield f"zeros {dtype} {access}", variant("embedding_write_zeros", kinds, backward, "zeros", access)
            used = {
                "": kinds,
                "into float32": kinds._replace(listed=True, into=True, out=torch.float32),
                "scaled": kinds._replace(bagged=True, scaled=True),
                "chosen": kinds._replace(bagged=True, chosen=True),
            }
            for what, kind in used.items():
                for name, part in (("embedding_sum_tiles", "tiles"), ("embedding_write_groups", "groups")):
                    if not (kind.into and part == "tiles"):
                        schedule = bags_backward if kind.bagged else backward
                        yield f"{name} {dtype} {access} {what}", variant(name, kind, schedule, part, access)
            for mode in range(3):
                for offsets in (None, torch.int64):
                    kind = kinds._replace(mode=mode, offsets=offsets, scaled=mode == 0, raises=True)
                    name = "embedding_bag_forward"
                    yield (f"{name} {dtype} {access} {mode} {offsets}", variant(name, kind, bags, "bags", access))
            weights = dict(bags_backward) | {"weights_block": WEIGHTS_BLOCK}
            kind = kinds._replace(columns=WEIGHTS_BLOCK)
            name = "embedding_bag_weights"
            yield f"{name} {dtype} {access}", variant(name, kind, weights, "weights", access)
        entries = {"entries_block": 256, "entries_warps": 4}
        for mode in range(2):
            kind = Kinds(dtype, torch.int64, dtype, 256, mode=mode, scaled=mode == 0, offsets=torch.int64)
            name = "embedding_bag_entries"
            yield f"{name} {dtype} {mode}", variant(name, kind, entries, "entries", "unaligned")
