"""Taking and its gradient: types, shapes, layouts, order of sums, indices out of range, promises, compilation."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import ArgumentError, Preference
from adjoint.core.kernels import interpreting
from adjoint.ops.indexing.take_along_axis import plans
from adjoint.verify.checks.bits import same_bits
from tests.ops.indexing.take_along_axis.lines import (
    every_adjoint,
    every_adjoint_of_many,
    every_backend,
    every_dtype,
    expected_gradient,
    gradient_of,
    make_indices,
    normal,
    whole_numbers,
)

# ---------------------------------------------------------------------------------- types and shapes


@every_backend
@every_dtype
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_every_type(dtype: torch.dtype, index: torch.dtype, backend: str, device: torch.device) -> None:
    x = normal(3, 7, device=device, dtype=dtype).requires_grad_()
    indices = make_indices(3, 9, length=7, device=device).to(index)
    out = adjoint.take_along_axis(x, indices, preference=Preference(backend=backend))
    assert same_bits(out, x.gather(1, indices.long() % 7))
    dout = normal(3, 9, device=device, dtype=dtype, seed=2)
    (dx,) = torch.autograd.grad(out, x, dout)
    assert same_bits(dx, expected_gradient(dout, indices, 7))


SHAPES = [
    ((5,), (3,), 0),
    ((4, 5), (6, 5), 0),
    ((4, 5), (2, 1), 0),
    ((4, 1), (2, 5), 0),
    ((1, 5), (4, 3), 1),
    ((2, 5, 3), (2, 4, 3), 1),
    ((2, 5, 3), (1, 4, 1), -2),
    ((1, 5, 1), (2, 4, 3), 1),
    ((2, 1, 4, 3), (1, 3, 2, 1), 2),
    ((2, 1, 3, 1, 2), (1, 2, 4, 3, 1), 2),
    ((2, 1, 2, 1, 3, 1, 2), (1, 2, 1, 2, 4, 3, 1), 4),
    ((0, 5), (0, 3), 1),
    ((0, 5), (1, 3), 1),
    ((4, 5), (4, 0), 1),
    ((4, 5), (0, 5), 0),
    ((3, 0), (3, 0), 1),
]


@pytest.mark.parametrize("plan", ["", pytest.param("kernels", marks=pytest.mark.kernels)])
@pytest.mark.parametrize(("shape", "places", "axis"), SHAPES, ids=str)
def test_any_rank_and_axis_and_what_broadcasts(
    shape: tuple[int, ...], places: tuple[int, ...], axis: int, plan: str, device: torch.device
) -> None:
    """As torch.take_along_dim and its gradient, which share no code with this. Sums of whole numbers are exact."""
    x = whole_numbers(*shape, device=device).requires_grad_()
    indices = make_indices(*places, length=max(1, shape[axis]), device=device)
    expected = torch.take_along_dim(x, indices, axis) if shape[axis] else x.new_zeros(places)
    preference = None if plan else Preference(backend="eager")
    out = adjoint.take_along_axis(x, indices, axis, preference=preference)
    assert torch.equal(out, expected)
    dout = whole_numbers(*out.shape, device=device, seed=2)
    (dx,) = torch.autograd.grad(out, x, dout)
    if shape[axis]:
        assert torch.equal(dx, torch.autograd.grad(expected, x, dout)[0])
    assert dx.shape == x.shape


@every_backend
def test_elements_are_copied_with_every_bit(backend: str, device: torch.device) -> None:
    """Payloads of NaN and the sign of zero included."""
    bits = torch.tensor([[0x7FC00001, -0x003FFFFE, 0x7F800000, -0x80000000, 1, 0x7FA00000]], dtype=torch.int64)
    x = bits.to(torch.int32).to(device).view(torch.float32)
    indices = torch.tensor([[5, 4, 3, 2, 1, 0, -1]], device=device)
    out = adjoint.take_along_axis(x, indices, preference=Preference(backend=backend))
    assert torch.equal(out.view(torch.int32), x.view(torch.int32)[:, indices[0]])


@every_adjoint
def test_special_values_of_the_gradient(plan: str, device: torch.device) -> None:
    """Sums begin with +0: none is −0; infinities of both signs make NaN; the rest is untouched by them."""
    infinity = float("inf")
    dout = torch.tensor([[-0.0, infinity, -infinity, -infinity, 1.0]], device=device)
    indices = torch.tensor([[0, 1, 1, 2, 3]], device=device)
    dx = gradient_of(torch.zeros(1, 5, device=device), indices, dout, preference=Preference(plan=plan))
    assert dx[0, 1].isnan() and dx[0, 2] == -infinity and dx[0, 3] == 1
    assert not torch.signbit(dx[0, [0, 4]]).any() and (dx[0, [0, 4]] == 0).all()


# ------------------------------------------------------------------------------------- order of sums


@every_adjoint_of_many
@pytest.mark.parametrize("entries", [32, 33, 64, 65, 100])
def test_entries_are_added_in_their_order(entries: int, plan: str, device: torch.device) -> None:
    """Within tiles of 32, tiles in order; to the bit, by a loop in plain Python."""
    indices = make_indices(2, entries, length=2, device=device)
    indices[0] = 1
    dout = normal(2, entries, device=device, seed=3)
    dx = gradient_of(normal(2, 2, device=device), indices, dout, preference=Preference(plan=plan))
    assert same_bits(dx, expected_gradient(dout, indices, 2))


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=pytest.mark.kernels)])
@pytest.mark.parametrize("entries", [1024, 1025, 2100])
def test_long_sums_are_trees_of_tiles(entries: int, backend: str, device: torch.device) -> None:
    """At 1024 entries a level of tiles is full, and another begins."""
    indices = torch.zeros(2, entries, dtype=torch.int64, device=device)
    indices[1, ::7] = 2
    dout = normal(2, entries, device=device, seed=4)
    dx = gradient_of(normal(2, 3, device=device), indices, dout, preference=Preference(backend=backend))
    assert same_bits(dx, expected_gradient(dout, indices, 3))


@pytest.mark.kernels
@pytest.mark.parametrize(("lines", "at_once"), [(5, 130), (14, 320)])
@pytest.mark.parametrize("name", ["lines", "sorted"])
def test_lines_that_are_sorted_a_few_at_a_time(
    name: str, lines: int, at_once: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workspace for some lines serves all of them, the last ones included, of which there are fewer.

    Of 14 lines of 40 entries, 8 and 6 are sorted; so few as the 6 have are divided into more blocks than the 320
    of the 8, unless they keep the blocks of those.
    """
    x, indices = normal(lines, 7, device=device), make_indices(lines, 40, length=7, device=device)
    dout = normal(lines, 40, device=device, seed=2)
    preference = Preference(plan=f"triton.take+triton.{name}")
    whole = adjoint.plan(adjoint.take_along_axis, x, indices, preference=preference).adjoint
    assert whole is not None and whole.workspace_bytes is not None
    monkeypatch.setattr(plans, "MAX_SORTED", at_once)
    plan = replace(whole)  # chosen before, set up anew
    assert plan.workspace_bytes is not None and plan.workspace_bytes < whole.workspace_bytes
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
    dx = plan.run(dout, indices, workspace=workspace)
    assert isinstance(dx, Tensor) and same_bits(dx, expected_gradient(dout, indices, 7))


# ------------------------------------------------------------------------------------------- layouts


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def _every_other(tensor: Tensor) -> Tensor:
    return torch.stack((tensor, tensor - 1), -1)[..., 0]


LAYOUTS = {"transposed": _transposed, "every other": _every_other, "shifted": lambda t: torch.cat((t, t))[len(t) :]}


@every_adjoint
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [1, 2])
def test_any_strides(axis: int, layout: str, plan: str, device: torch.device) -> None:
    lay, preference = LAYOUTS[layout], Preference(plan=plan)
    shape = (3, 4, 5)
    places = tuple(6 if d == axis else size for d, size in enumerate(shape))
    x, indices = normal(*shape, device=device), make_indices(*places, length=shape[axis], device=device)
    dout = normal(*places, device=device, seed=2)
    expected = adjoint.take_along_axis(x, indices, axis, preference=preference)
    assert same_bits(adjoint.take_along_axis(lay(x), lay(indices), axis, preference=preference), expected)
    gradient = gradient_of(x, indices, dout, axis, preference=preference)
    assert same_bits(gradient_of(lay(x), lay(indices), lay(dout), axis, preference=preference), gradient)
    ones = torch.ones((), device=device).expand(places)
    expected = gradient_of(x, indices, ones.contiguous(), axis, preference=preference)
    assert same_bits(gradient_of(x, lay(indices), ones, axis, preference=preference), expected)


# ------------------------------------------------------------------------------------- out of range


@every_backend
@pytest.mark.parametrize("entries", [4, 60, 1030])
def test_out_of_range_is_zero_and_has_no_gradient(entries: int, backend: str, device: torch.device) -> None:
    indices = make_indices(3, entries, length=5, device=device)
    indices[0, 0], indices[1, 1], indices[2, -1], indices[2, 0] = 5, -6, 2**31 + 2, -(2**63)
    valid = (indices >= -5) & (indices < 5)
    x = normal(3, 5, device=device).requires_grad_()
    out = adjoint.take_along_axis(x, indices, out_of_range="zero", preference=Preference(backend=backend))
    assert same_bits(out, torch.where(valid, x.gather(1, torch.where(valid, indices, 0) % 5), 0.0))
    dout = normal(3, entries, device=device, seed=2)
    (dx,) = torch.autograd.grad(out, x, dout)
    assert same_bits(dx, expected_gradient(dout, indices, 5))
    adjoint.check()


@every_backend
def test_an_axis_without_elements_has_no_indices_in_range(backend: str, device: torch.device) -> None:
    preference = Preference(backend=backend)
    x, indices = torch.zeros(2, 0, device=device), torch.zeros(2, 3, dtype=torch.int64, device=device)
    out = adjoint.take_along_axis(x, indices, out_of_range="zero", preference=preference)
    assert torch.equal(out, torch.zeros(2, 3, device=device))
    with pytest.raises(ArgumentError, match="got 0 at position 0 "):
        adjoint.take_along_axis(x, indices, preference=preference)
        adjoint.check()


@every_backend
def test_the_first_of_several_is_reported(backend: str, device: torch.device) -> None:
    indices = torch.zeros(40, 10, dtype=torch.int64, device=device)
    indices[[39, 20, 21], [9, 3, 2]] = torch.tensor([7, -8, 9], device=device)
    with pytest.raises(ArgumentError, match="got -8 at position 203 "):
        adjoint.take_along_axis(torch.zeros(40, 5, device=device), indices, preference=Preference(backend=backend))
        adjoint.check()
    adjoint.check()


# ------------------------------------------------------------------------------------------ promises


@every_backend
@every_dtype
@pytest.mark.parametrize(("length", "entries"), [(9, 4), (50, 40), (1030, 1026)])
def test_distinct_indices_give_the_same_bits(
    length: int, entries: int, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    if dtype != torch.bfloat16 and entries > 4:
        pytest.skip("one type is enough")
    order = torch.rand(2, length, generator=torch.Generator().manual_seed(5)).argsort(1)[:, :entries].to(device)
    x, dout = normal(2, length, device=device, dtype=dtype), normal(2, entries, device=device, dtype=dtype, seed=2)
    dout[0, 0] = -0.0
    preference = Preference(backend=backend)
    expected = gradient_of(x, order, dout, preference=preference)
    assert same_bits(gradient_of(x, order, dout, distinct=True, preference=preference), expected)
    assert same_bits(expected, expected_gradient(dout, order, length))


@every_backend
def test_distinct_speaks_of_the_lines_of_indices(backend: str, device: torch.device) -> None:
    """Where x is broadcast, lines of indices share a line of x, and their gradients are still added."""
    x, indices = whole_numbers(1, 4, device=device), torch.tensor([[0, 1], [1, 2], [3, 1]], device=device)
    with adjoint.checked():
        dx = gradient_of(
            x, indices, torch.ones(3, 2, device=device), distinct=True, preference=Preference(backend=backend)
        )
    assert dx.tolist() == [[1, 3, 1, 1]]


@every_backend
def test_a_broken_promise_is_noticed_in_checking_mode_alone(backend: str, device: torch.device) -> None:
    x, indices = torch.zeros(2, 5, device=device), torch.tensor([[0, 1, 2], [4, 3, -1]], device=device)
    preference = Preference(backend=backend)
    adjoint.take_along_axis(x, indices, distinct=True, preference=preference)
    adjoint.check()
    with pytest.raises(ArgumentError, match="-1 at position 5 "), adjoint.checked():
        adjoint.take_along_axis(x, indices, distinct=True, preference=preference)
    with adjoint.checked():
        adjoint.take_along_axis(x, indices, preference=preference)
        adjoint.take_along_axis(x, indices[:, :2], distinct=True, preference=preference)


@every_backend
def test_a_promise_along_another_axis(backend: str, device: torch.device) -> None:
    x = torch.zeros(3, 2, device=device)
    with adjoint.checked():
        adjoint.take_along_axis(
            x, torch.tensor([[0, 1], [2, 0]], device=device), 0, distinct=True, preference=Preference(backend=backend)
        )
    with pytest.raises(ArgumentError, match="1 at position 3 "), adjoint.checked():
        adjoint.take_along_axis(
            x, torch.tensor([[0, 1], [2, 1]], device=device), 0, distinct=True, preference=Preference(backend=backend)
        )


# --------------------------------------------------------------------------------------- compilation


@pytest.mark.skipif(interpreting(), reason="the contract compiles, and the ordinary process")
def test_compiled_with_axes_that_broadcast_and_dynamic_sizes(device: torch.device) -> None:
    torch._dynamo.reset()
    compiled: Any = torch.compile(adjoint.take_along_axis, fullgraph=True, backend="aot_eager", dynamic=True)
    for lines in (3, 5, 8):
        x = normal(lines, 6, 4, device=device).requires_grad_()
        indices = make_indices(lines, 9, 1, length=6, device=device)
        out = compiled(x, indices, 1)
        expected = adjoint.take_along_axis(x, indices, 1)
        assert same_bits(out, expected)
        dout = normal(*out.shape, device=device, seed=2)
        assert same_bits(torch.autograd.grad(out, x, dout)[0], torch.autograd.grad(expected, x, dout)[0])
    torch._dynamo.reset()


@pytest.mark.skipif(interpreting(), reason="the ordinary process compiles")
def test_promises_are_checked_in_compiled_code(device: torch.device) -> None:
    torch._dynamo.reset()
    compiled: Any = torch.compile(
        lambda x, i: adjoint.take_along_axis(x, i, distinct=True), fullgraph=True, backend="aot_eager"
    )
    x, indices = torch.zeros(2, 5, device=device), torch.tensor([[0, 1, 2], [4, 3, 4]], device=device)
    compiled(x, indices)
    adjoint.check()
    with pytest.raises(ArgumentError, match="4 at position 5 "), adjoint.checked():
        compiled(x, indices)
    compiled(x, indices)
    adjoint.check()
    torch._dynamo.reset()
