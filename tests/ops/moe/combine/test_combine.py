"""Combine: what only it knows. The shared checks are in test_contract, its pair with dispatch in that op's tests."""

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference, moe
from adjoint.ops.moe.combine import combine_tensors
from adjoint.verify.checks.bits import same_bits

BACKENDS = [pytest.param("triton", marks=pytest.mark.kernels), pytest.param("eager")]
backends = pytest.mark.parametrize("backend", BACKENDS)


def _values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@backends
def test_slots_are_added_in_their_order(backend: str, device: torch.device) -> None:
    """Each order of 1e8, 1 and −1e8 has another sum in float32."""
    indices = torch.tensor([[2, 0, 1], [0, 1, 2]], device=device)
    values = torch.tensor([[1e8, 1.0, -1e8], [1e8, -1e8, 1.0]], device=device)
    _, layout = moe.dispatch(torch.zeros(2, 1, device=device), indices, 3)
    rows = torch.empty(6, 1, device=device)
    rows[layout.inverse.long()] = values[..., None]
    y = moe.combine(rows, None, layout, preference=Preference(backend=backend))
    assert y[:, 0].tolist() == [0.0, 1.0]
    y = moe.combine(torch.ones_like(rows), values, layout, preference=Preference(backend=backend))
    assert y[:, 0].tolist() == [0.0, 1.0]


@backends
@pytest.mark.parametrize("columns", [1, 3, 255, 256, 257, 700])
def test_the_order_of_a_dot_product_is_fixed_by_its_columns(columns: int, backend: str, device: torch.device) -> None:
    """Columns 256 apart one after the other, then neighbours: beside a loop, in float32, to the bit."""
    dy, row = _values(1, columns, seed=8), _values(1, columns, seed=9)
    lanes = torch.zeros(256)
    for column in range(columns):
        lanes[column % 256] += dy[0, column] * row[0, column]
    while len(lanes) > 1:
        lanes = torch.stack([lanes[lane] + lanes[lane + 1] for lane in range(0, len(lanes), 2)])
    weights = torch.ones(1, 1, device=device, requires_grad=True)
    _, layout = moe.dispatch(dy.to(device), torch.zeros(1, 1, dtype=torch.int64, device=device), 1)
    y = moe.combine(row.to(device), weights, layout, preference=Preference(backend=backend))
    (dweights,) = torch.autograd.grad(y, weights, dy.to(device))
    assert dweights.item() == lanes.item()


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_run_in_float32(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """64 slots of 1 beside one of 256: a sum in bfloat16 would stay at 256."""
    indices = torch.zeros(1, 65, dtype=torch.int64, device=device)
    rows = torch.ones(65, 1, dtype=dtype, device=device)
    rows[0] = 256
    _, layout = moe.dispatch(rows[:1], indices, 1)
    for weights in (None, torch.ones(1, 65, device=device), torch.ones(1, 65, dtype=dtype, device=device)):
        assert moe.combine(rows, weights, layout, preference=Preference(backend=backend)).item() == 320


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_begin_with_a_zero_and_products_are_those_of_ieee(
    dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    """Of two tokens with two slots; row 3 is past the last offset, so it counts for nothing and has the gradient +0."""
    nan, inf = torch.nan, torch.inf
    rows = torch.tensor([[-0.0, nan, inf, 1.0], [-0.0, 1.0, -inf, inf], [-0.0, 2.0, inf, -inf], [nan] * 4], dtype=dtype)
    weights = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    dy = torch.tensor([[-0.0, inf, 2.0, 0.0], [-0.0, -inf, nan, 3.0]], dtype=dtype)
    rows, weights, dy = rows.to(device).requires_grad_(), weights.to(device).requires_grad_(), dy.to(device)
    inverse, offsets = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0, 1], [2, 3]], [0, 2, 3]))
    y = combine_tensors(rows, weights, inverse, offsets, preference=Preference(backend=backend))
    assert same_bits(y.detach().cpu(), torch.tensor([[0.0, nan, nan, inf], [0.0, 0.0, nan, nan]], dtype=dtype))
    drows, dweights = (t.cpu() for t in torch.autograd.grad(y, (rows, weights), dy))
    products = [[-0.0, inf, 2.0, 0.0], [-0.0, inf, 2.0, 0.0], [-0.0, nan, nan, 0.0], [0.0] * 4]
    assert same_bits(drows, torch.tensor(products, dtype=dtype))
    assert dweights[0].isnan().all() and dweights[1, 0].isnan() and same_bits(dweights[1, 1], torch.tensor(0.0))


@pytest.mark.kernels
def test_a_broken_layout_stays_in_bounds(device: torch.device) -> None:
    """Rows and offsets from anywhere: an error that names the first, and nothing outside is touched."""
    rows, layout = moe.dispatch(_values(5, 3).to(device), torch.arange(10, device=device).remainder(4).view(5, 2), 4)
    broken = layout.inverse.clone()
    broken[1, 1], broken[4, 0] = 10, -(2**31)
    preference = Preference(backend="triton")
    for offsets in (layout.offsets, layout.offsets + 1000, layout.offsets - 1000):
        with pytest.raises(adjoint.ArgumentError, match=r"got 10 at position 3 "):
            combine_tensors(rows, None, broken, offsets, preference=preference)
            adjoint.check()
        operator = torch.ops.adjoint.moe_combine_backward
        drows, _ = operator(_values(5, 3).to(device), None, None, broken, offsets, 1, preference.text)
        assert drows.shape == (10, 3)
