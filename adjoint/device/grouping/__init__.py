"""Grouping positions by key on the device: a stable sort whose memory is the plan's own workspace.

    sizes = regions(count)                       # what the workspace must hold
    launch = launcher(plan.memo, ids.dtype, ids.device)
    keys, positions = sort(launch, memory, ids, count, groups, skipped)

`launch(key, grid, *arguments)` starts a kernel of `grouping.kernels` by the key of its variant, from
`variants(ids dtype)`. Nothing is allocated and nobody waits for the device.
"""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch

from adjoint.core import kernels as core_kernels
from adjoint.core.kernels import TRITON_TYPES, Variant

Launch = Callable[..., None]

MAX_COUNT = 2**30
MAX_GROUPS = 2**31 - 2
LISTED_PASSES = 3  # keys up to 27 bits
DIGIT = 9
"""Bits of a digit, here and in the kernels."""
BLOCKS = (128, 512)
"""Positions of a block: few where there are few, so that every processor has some; else many, which cost less each."""
_FEW = 2**15
_SHARES = 32  # programs that share the rows of counts of a bin


def block(count: int) -> int:
    """Positions of a block of so many."""
    return BLOCKS[count > (2**8 if core_kernels.interpreting() else _FEW)]


def blocks(count: int) -> int:
    """Blocks of positions; the last one has room for at least one place past the end."""
    return count // block(count) + 1


def passes(groups: int) -> int:
    """Digits of the largest key, which is `groups` itself: what is in no group."""
    return max(1, -(-groups.bit_length() // DIGIT))


def regions(count: int) -> dict[str, tuple[torch.dtype, int]]:
    """The memory a sort needs."""
    room = blocks(count) * block(count)
    return {
        "keys_a": (torch.int32, room),
        "keys_b": (torch.int32, room),
        "positions_a": (torch.int32, room),
        "positions_b": (torch.int32, room),
        "counts": (torch.int32, blocks(count) << DIGIT),
        "begins": (torch.int32, blocks(count) << DIGIT),
        "totals": (torch.int32, 1 << DIGIT),
    }


def mark_regions(groups: int) -> dict[str, tuple[torch.dtype, int]]:
    """The memory `mark_groups` needs."""
    return {name: (torch.int32, max(1, groups)) for name in ("starts", "ends")}


def list_regions(count: int) -> dict[str, tuple[torch.dtype, int]]:
    """The memory `list_groups` needs."""
    room = blocks(count) * block(count)
    return {
        "starts": (torch.int32, room),
        "ends": (torch.int32, room),
        "listed": (torch.int32, room),
        "segment_of": (torch.int32, room),
        "listed_count": (torch.int32, 1),
    }


_POINTERS = frozenset(
    (
        "keys",
        "counts",
        "begins",
        "totals",
        "positions",
        "sorted_keys",
        "sorted_positions",
        "starts",
        "ends",
        "listed",
        "segment_of",
        "cleared",
    )
)


def _counted() -> dict[str, int]:
    """Bins and rows of counts one program sums at a time; the interpreter wants few programs."""
    return {"WIDTH": 1 << DIGIT, "CHUNK": 2} if core_kernels.interpreting() else {"WIDTH": 8, "CHUNK": 128}


def variants(ids: torch.dtype) -> dict[str, Variant]:
    """What is compiled to group ids of a dtype, by the key it is launched with: `key`'s."""
    from adjoint.device.grouping import kernels as _  # noqa: F401  (registers them)

    listed = {}
    for name, kernel in core_kernels.registered().items():
        if not name.startswith("group_"):
            continue
        types = {
            parameter: f"*{TRITON_TYPES[ids]}" if parameter == "ids" else "*i32" if parameter in _POINTERS else "i32"
            for parameter in kernel.parameters
            if not parameter.isupper()
        }
        for first, block in product((True, False), BLOCKS):
            constants = {"FIRST": first, "BLOCK": block} | _counted()
            listed[_key(name, first, block)] = kernel.variant(
                types,
                {parameter: constants[parameter] for parameter in kernel.parameters if parameter.isupper()},
                num_warps=4,
                num_stages=1,
            )
    return listed


def _key(name: str, first: bool, block: int) -> str:
    """Which variant: FIRST and BLOCK as far as the kernel knows them."""
    known = core_kernels.registered()[name].parameters
    return name + " first" * (first and "FIRST" in known) + f" {block}" * ("BLOCK" in known)


def launcher(memo: dict[Any, Any], ids: torch.dtype, device: torch.device) -> Launch:
    """What starts the kernels for a plan, kept in the plan's memo; with the first, all are compiled."""
    kept: Launch | None = memo.get("sort")
    if kept is not None:
        return kept
    compiled = {key: variant.prepare(device) for key, variant in variants(ids).items()}

    def launch(key: str, grid: tuple[int, ...], *arguments: Any) -> None:
        compiled[key]((*grid, 1, 1)[:3], *arguments)

    memo["sort"] = launch
    return launch


def sort(
    launch: Launch, memory: Mapping[str, Any], ids: Any, count: int, groups: int, skipped: int, mark: bool
) -> tuple[Any, Any]:
    """Sorts ids, stably; gives the sorted keys and the position each had. Both live in `memory`.

    An id below 0, at least `groups`, or equal to `skipped` has the key `groups`. With `mark`,
    memory is made ready for `mark_groups`; without it, at least `LISTED_PASSES` passes are made, so that
    listing groups takes as long for a large table as for a small one.
    """
    number, size = blocks(count), block(count)
    source, target = (memory["keys_b"], memory["positions_b"]), (memory["keys_a"], memory["positions_a"])
    counts, begins, totals = memory["counts"], memory["begins"], memory["totals"]
    for index in range(passes(groups) if mark else max(passes(groups), LISTED_PASSES)):
        first = " first" if index == 0 else ""
        keys, _ = source
        shift = index * DIGIT
        launch(f"group_count_digits{first} {size}", (number,), ids, keys, counts, count, groups, skipped, shift)
        cleared, clear_count = (memory["starts"], groups) if index == 0 and mark else (keys, 0)
        sum_counts(launch, counts, begins, totals, 1 << DIGIT, number, cleared, clear_count)
        launch(f"group_move{first} {size}", (number,), *source, counts, begins, totals, *target, shift)
        source, target = target, source
    return source


def sum_counts(
    launch: Launch,
    counts: Any,
    begins: Any,
    totals: Any,
    bins: int,
    rows: int,
    cleared: Any = None,
    clear_count: int = 0,
) -> None:
    """begins[row, bin] = the sum of counts [rows, bins] in the rows before; totals gets the sum of each bin.

    On the way, the first `clear_count` places of `cleared` become −1.
    """
    counted = _counted()
    chunks = -(-rows // counted["CHUNK"])
    share = -(-chunks // _SHARES)  # chunks of a program
    launch(
        "group_sum_counts", (-(-bins // counted["WIDTH"]), -(-chunks // share)), counts, begins, totals, bins, rows,
        share * counted["CHUNK"], totals if cleared is None else cleared, clear_count,
    )  # fmt: skip


def mark_groups(launch: Launch, memory: Mapping[str, Any], keys: Any, count: int, groups: int) -> None:
    """Group g has the places from memory["starts"][g] to memory["ends"][g]; an empty one starts at −1.

    The sort must have been told to `mark`.
    """
    launch(f"group_mark {block(count)}", (blocks(count),), keys, memory["starts"], memory["ends"], groups)


def list_groups(launch: Launch, memory: Mapping[str, Any], keys: Any, count: int, groups: int) -> None:
    """Lists the groups that occur in memory: "starts", "ends", "listed" (keys), "segment_of" and "listed_count"."""
    number, size = blocks(count), block(count)
    launch(f"group_count_heads {size}", (number,), keys, memory["counts"], groups)
    sum_counts(launch, memory["counts"], memory["begins"], memory["listed_count"], 1, number)
    launch(
        f"group_list {size}", (number,), keys, memory["begins"], memory["starts"], memory["ends"], memory["listed"],
        memory["segment_of"], groups,
    )  # fmt: skip
