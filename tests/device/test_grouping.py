"""Grouping positions by key: a stable sort, and where each group begins, against torch's own."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from adjoint.core.launch import Setup
from adjoint.core.problem import Problem
from adjoint.device import grouping
from adjoint.device.grouping.kernels import Grouping

LAST = 2**31 - 1
"""The key of places past the end: above every other."""

COUNTS = [0, 1, 255, 256, 257, 600]


def _sizes(*further: tuple[int, int]) -> pytest.MarkDecorator:
    """Every count with groups that one digit tells apart, and further pairs."""
    return pytest.mark.parametrize(("count", "groups"), [*((count, 300) for count in COUNTS), *further])


class _Sorted(NamedTuple):
    """What `sort` gives, and the memory it worked in, ready for what follows it."""

    grouping: Grouping
    memory: dict[str, Tensor]
    keys: Tensor
    positions: Tensor


def _setup(device: torch.device) -> Setup:
    return Setup(Problem("grouping", device, ()), {})


def _sort(
    ids: Tensor, groups: int, skipped: int = -1, *, listed: bool = False, flagged: bool = False, most: int = 0,
    fill: int = 0xAB,
) -> _Sorted:  # fmt: skip
    """Sorts in a workspace full of what nobody wrote, which has room for `most` ids."""
    setup, count = _setup(ids.device), ids.numel()
    grouping = Grouping(setup, ids.dtype, max(most, count), groups, listed=listed, flagged=flagged)
    workspace = torch.full((setup.regions.bytes,), fill, dtype=torch.uint8, device=ids.device)
    memory = setup.regions.tensors(workspace)
    grouping.begin(memory, ids, count, groups, skipped)
    return _Sorted(grouping, memory, *grouping.finish(memory, count, groups))


def _ids(count: int, groups: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Ids from a few values on both sides of every digit, some of them out of range, each several times."""
    generator = torch.Generator().manual_seed(count)
    near = torch.tensor([0, 1, 511, 512, 513, 2**18 - 1, 2**18, groups - 1, groups, groups + 1, -1, groups // 2])
    ids = near[torch.randint(len(near), (count,), generator=generator)]
    spread = torch.randint(groups, (count,), generator=generator)
    return torch.where(torch.rand(count, generator=generator) < 0.5, ids, spread).to(dtype)


def _keys(ids: Tensor, groups: int, skipped: int) -> Tensor:
    return torch.where((ids >= 0) & (ids < groups) & (ids != skipped), ids, groups)


# ------------------------------------------------------------------------------------------------ sort


@pytest.mark.parametrize(
    ("groups", "passes"), [(0, 1), (1, 1), (511, 1), (512, 2), (2**18 - 1, 2), (2**18, 3), (2**20, 3), (2**31 - 2, 4)]
)
def test_passes_cover_the_largest_key(groups: int, passes: int) -> None:
    """Which is the number of groups: what is in none."""
    assert grouping.passes(groups) == passes


@pytest.mark.parametrize("listed", [False, True], ids=["marked", "listed"])
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 511, 512])
def test_there_is_room_past_the_end(count: int, listed: bool) -> None:
    setup = _setup(torch.device("cpu"))
    Grouping(setup, torch.int64, count, 7, listed=listed)
    memory = setup.memory(None)
    listing = {"starts", "ends", "group_keys", "segment_of"} if listed else set()
    assert all(len(memory[name]) > count for name in {"keys_a", "keys_b", "positions_a", "positions_b"} | listing)


@pytest.mark.kernels
@pytest.mark.parametrize(("most", "count"), [(257, 256), (1000, 130), (5000, 1)])
def test_a_sort_may_have_fewer_ids_than_its_memory_has_room_for(most: int, count: int, device: torch.device) -> None:
    """Also where so few alone would be divided into smaller blocks, of which there are more."""
    ids = _ids(count, 300).to(device)
    alone, among = _sort(ids, 300), _sort(ids, 300, most=most)
    assert torch.equal(alone.keys[:count], among.keys[:count])
    assert torch.equal(alone.positions[:count], among.positions[:count])


@pytest.mark.kernels
@_sizes((256, 5000), (600, 5000), (257, 2**20), (600, 2**20))
def test_the_sort_is_stable(count: int, groups: int, device: torch.device) -> None:
    ids = _ids(count, groups).to(device)
    _, _, keys, positions = _sort(ids, groups)
    expected = _keys(ids, groups, -1).sort(stable=True)
    assert torch.equal(keys[:count].long(), expected.values)
    assert torch.equal(positions[:count].long(), expected.indices)
    assert (keys[count:] == LAST).all()


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_that_belong_to_no_group_come_last(dtype: torch.dtype, device: torch.device) -> None:
    """Negative ones, large ones, and the one that is skipped, in their order."""
    ids = torch.tensor([7, 2, -1, 9, 2, 3, 2**31 - 1, 0, -(2**31), 3], dtype=dtype, device=device)
    if dtype == torch.int64:
        ids[3], ids[8] = 2**32 + 2, -(2**63)
    _, _, keys, positions = _sort(ids, 9, skipped=3)
    assert keys[:10].tolist() == [0, 2, 2, 7, 9, 9, 9, 9, 9, 9]
    assert positions[:10].tolist() == [7, 1, 4, 0, 2, 3, 5, 6, 8, 9]


@pytest.mark.kernels
@pytest.mark.parametrize("groups", [1, 511, 512, 2**18])
def test_one_key_for_all_keeps_the_order(groups: int, device: torch.device) -> None:
    ids = torch.full((300,), groups - 1, device=device)
    _, _, keys, positions = _sort(ids, groups)
    assert (keys[:300] == groups - 1).all()
    assert positions[:300].tolist() == list(range(300))


# ---------------------------------------------------------------------------------------------- groups


def _members(places: Tensor, members: Tensor) -> Tensor:
    """Which groups have a place of theirs at the number that stands for them, by the key there."""
    inside = (places >= 0) & (places < len(members))
    return inside & (members[places.clamp(0, len(members) - 1).long()] == torch.arange(len(places)))


FILLS = pytest.mark.parametrize("fill", [0, 0xAB], ids=["zeros", "negative"])
"""What was in the workspace before: places that are there, or none."""


@pytest.mark.kernels
@_sizes((600, 1), (600, 5000), (600, 2**20))
def test_flags_tell_which_groups_occur(count: int, groups: int, device: torch.device) -> None:
    """The one that is skipped does not."""
    ids = _ids(count, groups).to(device)
    flags = _sort(ids, groups, skipped=0, flagged=True).memory["occurs"][:groups]
    assert torch.equal(flags.long(), torch.bincount(_keys(ids, groups, 0), minlength=groups + 1)[:groups].clamp(max=1))


@pytest.mark.kernels
@FILLS
@_sizes((600, 1), (600, 5000))
def test_groups_are_marked_where_they_begin_and_end(count: int, groups: int, fill: int, device: torch.device) -> None:
    ids = _ids(count, groups).to(device)
    sorting, memory, keys, _ = _sort(ids, groups, fill=fill)
    sorting.mark_groups(memory, keys, count, groups)
    sizes = torch.bincount(_keys(ids, groups, -1), minlength=groups + 1)[:groups]
    ends = sizes.cumsum(0)
    starts, occurs = memory["starts"][:groups], sizes > 0
    assert torch.equal(_members(starts.cpu(), keys.cpu()), occurs.cpu())
    assert torch.equal(starts[occurs].long(), (ends - sizes)[occurs])
    assert torch.equal(memory["ends"][:groups][occurs].long(), ends[occurs])


@pytest.mark.kernels
@_sizes((600, 1), (600, 5000))
def test_groups_that_occur_are_listed(count: int, groups: int, device: torch.device) -> None:
    ids = _ids(count, groups).to(device)
    sorting, memory, keys, _ = _sort(ids, groups, listed=True)
    sorting.list_groups(memory, keys, count, groups)
    present, inverse, sizes = torch.unique(_keys(ids, groups, -1), sorted=True, return_inverse=True, return_counts=True)
    number = len(present) - int((present == groups).any())  # what is in no group is not listed
    ends = sizes.cumsum(0)
    assert memory["group_count"].tolist() == [number]
    assert torch.equal(memory["group_keys"][:number].long(), present[:number])
    assert torch.equal(memory["starts"][:number].long(), (ends - sizes)[:number])
    assert torch.equal(memory["ends"][:number].long(), ends[:number])
    segment = inverse.sort().values
    assert torch.equal(memory["segment_of"][:count].long(), torch.where(segment < number, segment, LAST))


@pytest.mark.kernels
def test_a_group_may_span_blocks(device: torch.device) -> None:
    """One that begins in the first block and ends in the third, and one in the last place of a block."""
    ids = torch.tensor([4] * 255 + [5] + [6] * 300 + [1], device=device)
    sorting, memory, keys, _ = _sort(ids, 7)
    sorting.mark_groups(memory, keys, len(ids), 7)
    assert memory["starts"][:7][[1, 4, 5, 6]].tolist() == [0, 1, 256, 257]
    assert memory["ends"][:7][[1, 4, 5, 6]].tolist() == [1, 256, 257, 557]
