"""Dividing one piece of memory: regions are aligned, apart from each other, and within the stated size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adjoint.core.workspace import Regions

SIZES = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.tuples(st.sampled_from([torch.int8, torch.float16, torch.int32, torch.float64]), st.integers(0, 300)),
)


def _addresses(view: Tensor) -> range:
    return range(view.data_ptr(), view.data_ptr() + view.numel() * view.element_size())


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sizes=SIZES, shift=st.integers(0, 511))
def test_regions_are_aligned_apart_and_inside(sizes: dict[str, tuple[torch.dtype, int]], shift: int) -> None:
    """Wherever the workspace begins."""
    regions = Regions(**sizes)
    workspace = torch.empty(regions.bytes + shift, dtype=torch.uint8)[shift:]
    views = regions.tensors(workspace)
    assert {name: (view.dtype, view.numel()) for name, view in views.items()} == {
        name: size for name, size in sizes.items() if size[1]
    }
    whole = _addresses(workspace)
    end = whole.start
    for view in views.values():
        own = _addresses(view)
        assert own.start % 256 == 0
        assert end <= own.start and own.stop <= whole.stop
        end = own.stop


def test_the_size_is_at_most_an_alignment_for_each_region_too_large() -> None:
    sizes = {"a": (torch.int32, 65), "b": (torch.float64, 1), "c": (torch.int8, 256)}
    assert sum(dtype.itemsize * count for dtype, count in sizes.values()) <= Regions(**sizes).bytes <= 512 + 256 * 3


def test_empty_regions_take_no_memory() -> None:
    assert Regions().bytes == 0
    assert Regions(a=(torch.int32, 0)).bytes == 0
    assert Regions(a=(torch.int32, 0), b=(torch.int8, 1)).tensors(torch.empty(512, dtype=torch.uint8)).keys() == {"b"}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_a_workspace_of_any_type_serves(dtype: torch.dtype) -> None:
    """As `plan.run` takes any contiguous tensor, whatever its shape."""
    regions = Regions(a=(torch.int64, 5), b=(torch.int8, 3))
    workspace = torch.zeros(2, regions.bytes // dtype.itemsize // 2 + 1, dtype=dtype)
    views = regions.tensors(workspace)
    views["a"].fill_(-1)
    views["b"].fill_(7)
    assert int((workspace.view(-1).view(torch.uint8) == 0xFF).sum()) == 40
    assert int((workspace.view(-1).view(torch.uint8) == 7).sum()) == 3


def test_kernels_get_the_same_places(device: torch.device) -> None:
    """Addresses on a GPU, tensors elsewhere."""
    regions = Regions(a=(torch.int32, 70), b=(torch.float64, 9))
    workspace = torch.empty(regions.bytes + 1, dtype=torch.uint8, device=device)[1:]
    pointers = regions.pointers(workspace)
    for name, view in regions.tensors(workspace).items():
        pointer = pointers[name]
        assert (pointer if isinstance(pointer, int) else pointer.data_ptr()) == view.data_ptr()


def test_allocated_memory_has_the_stated_size(device: torch.device) -> None:
    regions = Regions(a=(torch.int32, 70))
    workspace = regions.divide(None, device).workspace
    assert workspace is not None and Regions().divide(None, device).workspace is None
    assert (workspace.numel() * workspace.element_size(), workspace.device) == (regions.bytes, device)


def test_a_tensor_with_a_region_for_its_copy_is_copied_into_it(device: torch.device) -> None:
    regions = Regions(copy_of_x=(torch.float32, 6))
    memory = regions.divide(None, device)
    x = torch.arange(6.0, device=device).view(3, 2).T
    copy = memory.contiguous("x", x)
    assert torch.equal(copy, x) and copy.is_contiguous()
    assert copy.data_ptr() == memory.tensor("copy_of_x").data_ptr()
    assert memory.contiguous("y", x) is x
    assert memory.contiguous("weights", None) is None
