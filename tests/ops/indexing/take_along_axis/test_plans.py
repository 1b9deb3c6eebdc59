"""Which plan serves which call, and what plans need."""

import pytest
import torch

import adjoint
from adjoint import Plan, Preference, Unsupported
from adjoint.core import kernels
from adjoint.ops.indexing.take_along_axis.layout import Axes, lines_of, merged
from adjoint.ops.indexing.take_along_axis.plans import MAX_COMPARED, MAX_ENTRIES
from adjoint.verify.checks.bits import same_bits
from tests.ops.indexing.take_along_axis.lines import expected_gradient, make_indices, normal


def _backward(
    device: torch.device, shape: tuple[int, ...], places: tuple[int, ...], axis: int = -1, distinct: bool = False
) -> Plan:
    x, indices = torch.zeros(shape, device=device), torch.zeros(places, dtype=torch.int64, device=device)
    plan = adjoint.plan(adjoint.take_along_axis, x, indices, axis, distinct=distinct).adjoint
    assert plan is not None
    return plan


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("entries", "distinct", "name"),
    [
        (MAX_COMPARED, False, "triton.few"),
        (MAX_COMPARED + 1, False, "triton.lines"),
        (MAX_ENTRIES, False, "triton.lines"),
        (MAX_ENTRIES + 1, False, "triton.sorted"),
        (MAX_COMPARED, True, "triton.few"),
        (MAX_ENTRIES, True, "triton.lines"),
        (MAX_ENTRIES + 1, True, "triton.scatter"),
    ],
)
def test_the_number_of_entries_decides(entries: int, distinct: bool, name: str, device: torch.device) -> None:
    plan = _backward(device, (3, 2000), (3, entries), distinct=distinct)
    assert plan.name == name
    assert str(plan.sku).endswith("tile=32")
    assert (plan.workspace_bytes == 0) == (distinct or name == "triton.few")
    assert ("no index repeats" in plan.guarantee["dx"].domain) == distinct


@pytest.mark.kernels
def test_entries_of_what_is_broadcast_count(device: torch.device) -> None:
    assert _backward(device, (1, 4), (MAX_COMPARED, 2)).name == "triton.lines"
    assert _backward(device, (1, 4), (MAX_ENTRIES, 2)).name == "triton.sorted"
    assert _backward(device, (1, 4), (MAX_ENTRIES, 2), distinct=True).name == "triton.sorted"
    assert _backward(device, (MAX_ENTRIES, 4), (1, 2)).name == "triton.few"


def test_what_a_plan_promises(device: torch.device) -> None:
    plan = adjoint.plan(
        adjoint.take_along_axis, torch.zeros(2, 3, device=device), torch.zeros(2, 1, dtype=torch.int32, device=device)
    )
    assert plan.guarantee["out"].flags == "repeatable, batch_invariant(element), device_invariant"
    assert plan.guarantee["out"].roundings == 0
    assert plan.adjoint is not None
    promise = plan.adjoint.guarantee["dx"]
    assert promise.flags == "repeatable, batch_invariant(line), device_invariant"
    assert promise.accumulator == "float32" and promise.roundings == 1 and "tiles of 32" in promise.domain


@pytest.mark.kernels
@pytest.mark.parametrize("entries", [20, 300, 1030])
def test_a_prepared_plan_writes_where_it_is_told(entries: int, device: torch.device) -> None:
    """And compiles nothing more."""
    x, indices = normal(3, 7, device=device), make_indices(3, entries, length=7, device=device)
    plan = adjoint.plan(adjoint.take_along_axis, x, indices).prepare()
    backward = plan.adjoint
    assert backward is not None
    before = kernels.compilations()
    out = torch.full((3, entries), float("nan"), device=device)
    assert plan.run(x, indices, out=out) is out
    dx, dout = torch.full_like(x, float("nan")), normal(3, entries, device=device, seed=2)
    workspace = torch.full((max(1, backward.workspace_bytes or 0),), 255, dtype=torch.uint8, device=device)
    backward.run(dout, indices, out=dx, workspace=workspace)
    assert kernels.compilations() == before
    assert same_bits(dx, expected_gradient(dout, indices, 7))


@pytest.mark.kernels
def test_axes_that_do_not_merge_are_left_to_pytorch(device: torch.device) -> None:
    shape = (2, 3, 2, 3, 2, 3)
    x, indices = torch.zeros(shape, device=device).permute(5, 4, 3, 2, 1, 0), torch.zeros(3, 2, 1, 2, 3, 2).long()
    plan = adjoint.plan(adjoint.take_along_axis, x, indices.to(device), 2)
    assert plan.name == "eager.take" and "axes" in str(plan)
    with pytest.raises(Unsupported, match="more axes than its four"):
        adjoint.take_along_axis(x, indices.to(device), 2, preference=Preference(backend="triton"))


def test_axes_are_as_few_as_tensors_allow() -> None:
    assert merged((2, 3, 4), (12, 4, 1)).sizes == (24,)
    assert merged((2, 1, 4), (4, 9, 1), (8, 9, 1)) == Axes((2, 4), ((4, 1), (8, 1)))
    assert merged((1, 1), (5, 5)) == Axes((1,), ((0,),))
    assert Axes((2, 4), ((4, 1),)).numbers("sizes", "x_steps") == {"sizes": (1, 2, 4), "x_steps": (0, 0, 4, 1)}
    lines = lines_of(torch.empty(3, 4, 6), torch.empty(3, 4, 6), (3, 5, 1), 1)
    assert (lines.line_count, lines.entry_count, lines.axis_step) == (3, 24, 1)
    assert lines.axes == Axes((3,), ((5,), (24,), (24,)))
    assert lines.entry_axes == Axes((24,), ((1,), (1,)))
    assert lines.select(("dout", "dx_steps", "length")) == {"dx_steps": (0, 0, 0, 5), "length": 5}
