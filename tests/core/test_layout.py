"""Coalescing axes and finding overlap, against brute force."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adjoint.core.layout import coalesce, overlaps_itself, share_memory


def _addresses(tensor: Tensor) -> list[int]:
    base = tensor.storage_offset()
    return [
        base + sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        for index in itertools.product(*(range(n) for n in tensor.shape))
    ]


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    memory = torch.empty(4096)
    shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=4))
    strides = [draw(st.integers(0, 24)) for _ in shape]
    return memory.as_strided(shape, strides, draw(st.integers(0, 30)))


@given(views(), st.randoms())
@settings(max_examples=200, deadline=None)
def test_coalesced_axes_visit_the_same_elements_together(first: Tensor, random: object) -> None:
    order = list(range(first.dim()))
    random.shuffle(order)  # type: ignore[attr-defined]
    second = torch.empty([first.shape[i] for i in order]).permute([order.index(i) for i in range(len(order))])
    axes = coalesce([first, second])
    visited = {
        tuple(
            t.storage_offset() + sum(i * s for i, s in zip(index, strides, strict=True))
            for t, strides in zip((first, second), axes.strides, strict=True)
        )
        for index in itertools.product(*(range(n) for n in axes.sizes))
    }
    assert visited == set(zip(_addresses(first), _addresses(second), strict=True))


@given(views())
@settings(max_examples=200, deadline=None)
def test_overlap_is_never_missed(view: Tensor) -> None:
    addresses = _addresses(view)
    if len(set(addresses)) < len(addresses):
        assert overlaps_itself(view)


@given(views(), st.integers(-40, 40), st.lists(st.integers(1, 4), min_size=4, max_size=4))
@settings(max_examples=600, deadline=None)
def test_sharing_is_exact_for_equal_strides_and_never_missed(view: Tensor, shift: int, sizes: list[int]) -> None:
    if overlaps_itself(view) or view.storage_offset() + shift < 0:
        return
    for shape in (view.shape, tuple(sizes[: view.dim()])):
        other = view.as_strided(shape, view.stride(), view.storage_offset() + shift)
        shared = bool(set(_addresses(view)) & set(_addresses(other)))
        assert share_memory(view, other) == share_memory(other, view) == shared


def test_halves_of_a_packed_tensor_share_nothing() -> None:
    packed = torch.empty(4, 10)
    assert not share_memory(packed[:, :5], packed[:, 5:])
    assert not share_memory(packed[:, 0::2], packed[:, 1::2])
    assert share_memory(packed[:, :6], packed[:, 4:])
    heads = torch.empty(2, 5, 8, 4)  # 5 heads of queries, 2 of keys and 1 of values of each token
    assert not share_memory(heads[:, :, :5], heads[:, :, 5:7]) and not share_memory(heads[:, :, 5:7], heads[:, :, :5])
    assert share_memory(heads[:, :, :6], heads[:, :, 5:7])
    assert share_memory(packed, packed.T)
    assert not share_memory(packed, torch.empty(4, 10))
