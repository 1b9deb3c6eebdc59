"""What holds for every batch: which tokens a row's gradient depends on, in which order, and to the bit."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.core.kernels import interpreting
from adjoint.verify.checks.bits import same_bits
from tests.conftest import device_under_test
from tests.ops.embedding.sums import TILE, in_order, in_tiles, rows_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
every_backend = pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=pytest.mark.kernels)])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
many = settings(max_examples=4 if interpreting() else 60, deadline=None, derandomize=True)


class Batch(NamedTuple):
    """Tokens, and the gradient that arrives at each."""

    ids: Tensor
    dout: Tensor
    rows: int

    def replaced(self, ids: Tensor) -> "Batch":
        return self._replace(ids=ids)

    def select(self, positions: Tensor) -> "Batch":
        return Batch(self.ids[positions], self.dout[positions], self.rows)


def _normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(device_under_test())


@st.composite
def batches(draw: st.DrawFn, least: int = 0, shortest: int = 0) -> Batch:
    """Few rows, so that they repeat; one of them may have a large share; any size, odd ones included."""
    rows = draw(st.sampled_from([1, 2, 3, 19]).filter(lambda rows: rows >= least))
    count = draw(st.sampled_from([0, 1, 2, 31, 32, 33, 70]).filter(lambda count: count >= shortest))
    columns = draw(st.sampled_from([1, 2, 3, 16, 17]))
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(rows, (count,), generator=generator, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    if draw(st.booleans()):
        ids[torch.rand(count, generator=generator) < 0.6] = rows - 1
    return Batch(ids.to(device_under_test()), _normal(count, columns, dtype=dtype, seed=seed), rows)


def gradient(batch: Batch, backend: str = "eager", plan: str | None = None, **options: Tensor) -> Tensor | None:
    """dweight, whatever the weights are."""
    preference = Preference(backend=backend, plan=f"{backend}.gather+{backend}.{plan}" if plan else None)
    weight = batch.dout.new_zeros(batch.rows, batch.dout.shape[1]).requires_grad_()
    adjoint.embedding(batch.ids, weight, preference=preference, **options).backward(batch.dout)  # type: ignore[arg-type]
    return weight.grad


# ------------------------------------------------------------------------------------- whole batches


@every_backend
@many
@given(batch=batches())
def test_looking_up_and_scattering_back_counts_the_tokens(backend: str, batch: Batch) -> None:
    """dweight = count · weight, exactly: the values are integers."""
    weight = _normal(batch.rows, batch.dout.shape[1], dtype=torch.float64, seed=1).mul(100).round().requires_grad_()
    out = adjoint.embedding(batch.ids, weight, preference=Preference(backend=backend))
    (dweight,) = torch.autograd.grad(out, weight, out.detach())
    counts = torch.bincount(batch.ids, minlength=batch.rows)
    assert torch.equal(dweight, counts[:, None] * weight.detach())


@every_backend
@many
@given(batch=batches())
def test_every_row_is_the_sum_of_its_tokens_in_the_stated_order(backend: str, batch: Batch) -> None:
    expected = rows_of(batch.dout, batch.ids, batch.rows).to(batch.dout.dtype)
    assert same_bits(gradient(batch, backend), expected)  # type: ignore[arg-type]


@every_backend
@many
@given(batch=batches())
def test_accumulating_into_zeros_is_not_accumulating(backend: str, batch: Batch) -> None:
    buffer = batch.dout.new_zeros(batch.rows, batch.dout.shape[1])
    assert gradient(batch, backend, accumulate_into=buffer) is None
    assert same_bits(buffer, gradient(batch, backend))  # type: ignore[arg-type]


@every_backend
@many
@given(batch=batches(least=2), value=st.sampled_from([float("nan"), float("inf"), -0.0, 1.0]))
def test_rows_never_referenced_are_positive_zero(backend: str, batch: Batch, value: float) -> None:
    ids = batch.ids.remainder(batch.rows // 2)  # none of the second half
    dweight = gradient(Batch(ids, torch.full_like(batch.dout, value), batch.rows), backend)
    assert dweight is not None
    unreferenced = dweight[batch.rows // 2 :]
    assert same_bits(unreferenced, torch.zeros_like(unreferenced))


@every_backend
def test_no_sum_is_negative_zero(backend: str) -> None:
    """Sums begin with +0: of one token, of several, and on top of a buffer."""
    ids = torch.tensor([0, 1, 1], device=device_under_test())
    batch = Batch(ids, torch.full((3, 4), -0.0, device=ids.device), 3)
    zeros = torch.zeros(3, 4, device=ids.device)
    assert same_bits(gradient(batch, backend), zeros)  # type: ignore[arg-type]
    buffer = -zeros
    gradient(batch, backend, accumulate_into=buffer)
    assert buffer.signbit().tolist() == [[False] * 4, [False] * 4, [True] * 4]


# -------------------------------------------------------------------------------------- other batches


@every_backend
@many
@given(batch=batches(least=2, shortest=2), seed=st.integers(0, 2**16))
def test_moving_other_tokens_to_other_rows_leaves_a_row_alone(backend: str, batch: Batch, seed: int) -> None:
    row = int(batch.ids[0])
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(batch.rows - 1, batch.ids.shape, generator=generator).to(batch.ids)
    elsewhere = (row + 1 + steps) % batch.rows  # any row but this one
    moved = batch.replaced(torch.where(batch.ids == row, batch.ids, elsewhere.to(batch.ids.dtype)))
    before, after = gradient(batch, backend), gradient(moved, backend)
    assert before is not None and after is not None
    assert same_bits(before[row], after[row])


@every_backend
@many
@given(batch=batches(shortest=2), seed=st.integers(0, 2**16))
def test_a_row_has_the_same_bits_in_every_batch_that_keeps_its_tokens_in_order(
    backend: str, batch: Batch, seed: int
) -> None:
    """Alone, and among tokens of other rows that come before, between and after."""
    row = int(batch.ids[0])
    tokens = batch.select((batch.ids == row).nonzero()[:, 0])
    generator = torch.Generator().manual_seed(seed)
    where = torch.rand(len(tokens.ids) + 45, generator=generator).argsort()[: len(tokens.ids)].sort().values
    ids = torch.randint(row + 1, row + 9, (len(tokens.ids) + 45,), generator=generator).to(tokens.ids)
    dout = _normal(len(ids), tokens.dout.shape[1], dtype=tokens.dout.dtype, seed=seed)
    ids[where], dout[where] = tokens.ids, tokens.dout
    alone, among = gradient(tokens, backend), gradient(Batch(ids, dout, row + 9), backend)
    assert alone is not None and among is not None
    assert same_bits(alone[row], among[row])


# ----------------------------------------------------------------------------------- lengths and sizes


@every_backend
@pytest.mark.parametrize(
    ("rows", "count", "columns"),
    [(0, 0, 3), (1, 0, 1), (1, 1, 1), (1, 40, 1), (5, 0, 3), (5, 1, 7), (3, 4, 0), (600, 3, 129)],
    ids=lambda size: str(size),
)
def test_sizes_at_the_edge(backend: str, rows: int, count: int, columns: int) -> None:
    ids = torch.arange(count, device=device_under_test()) * 5 % max(1, rows)
    batch = Batch(ids, _normal(count, columns, dtype=torch.float32, seed=0), rows)
    weight = _normal(rows, columns, dtype=torch.float32, seed=1)
    assert torch.equal(adjoint.embedding(ids, weight, preference=Preference(backend=backend)), weight[ids])
    assert same_bits(gradient(batch, backend), rows_of(batch.dout, ids, rows))  # type: ignore[arg-type]


@every_backend
@every_dtype
@pytest.mark.parametrize("count", [1, 2, TILE - 1, TILE])
def test_a_row_within_a_tile_is_the_obvious_loop(backend: str, dtype: torch.dtype, count: int, quick: bool) -> None:
    if quick and count not in (2, TILE):
        pytest.skip("the ordinary process runs this, and a GPU")
    ids = torch.ones(count, dtype=torch.int64, device=device_under_test())
    batch = Batch(ids, _normal(count, 5, dtype=dtype, seed=count), 3)
    assert same_bits(gradient(batch, backend), rows_of(batch.dout, ids, 3, in_order).to(dtype))  # type: ignore[arg-type]


def _long(count: int, dtype: torch.dtype = torch.float32) -> Batch:
    """A row of so many tokens that begins in the middle of a tile's places, and a few tokens before and after."""
    ids = torch.ones(count + 6, dtype=torch.int64)
    ids[[0, 2, count + 1, count + 4]], ids[[3, count + 5]] = 0, 2
    return Batch(ids.to(device_under_test()), _normal(count + 6, 2, dtype=dtype, seed=count), 3)


@every_backend
@pytest.mark.parametrize("count", [33, 63, 64, 65, 1024, 1025, 1100, 2000, 35_000])
def test_a_long_row_is_the_tree_of_tiles(backend: str, count: int, quick: bool) -> None:
    """A level more shows in the bits from its 34th tile on: 1100 tokens have two levels, 35,000 three."""
    if (interpreting() and count > 2000) or (quick and count not in (65, 1100)):
        pytest.skip("the ordinary process runs this, and a GPU")
    batch = _long(count)
    expected = rows_of(batch.dout, batch.ids, 3)
    assert same_bits(gradient(batch, backend), expected)  # type: ignore[arg-type]
    if count > 65:
        assert not same_bits(expected, rows_of(batch.dout, batch.ids, 3, in_order)), "the orders cannot be told apart"


@every_backend
@pytest.mark.parametrize("count", [70, 200, 3000])
def test_the_sequential_plan_is_the_obvious_loop(backend: str, count: int, quick: bool) -> None:
    if quick and count > 70:
        pytest.skip("the ordinary process runs this, and a GPU")
    batch = _long(count)
    expected = rows_of(batch.dout, batch.ids, 3, in_order)
    assert same_bits(gradient(batch, backend, plan="sequential"), expected)  # type: ignore[arg-type]
    buffer = torch.zeros_like(expected)
    gradient(batch, backend, plan="sequential", accumulate_into=buffer)
    assert same_bits(buffer, expected)


def test_the_two_orders_can_be_told_apart() -> None:
    """Or the tests of either prove nothing."""
    terms = list(_normal(200, 8, dtype=torch.float32, seed=3))
    zero = torch.zeros_like(terms[0])
    assert not same_bits(in_tiles(terms, zero), in_order(terms, zero))
    assert same_bits(in_tiles(terms[:TILE], zero), in_order(terms[:TILE], zero))


# ------------------------------------------------------------------------------------------- hot rows


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ones_are_counted_far_past_the_precision_of_the_type(backend: str, dtype: torch.dtype) -> None:
    """A sum in bfloat16 would stop at 256, one in float16 at 2048."""
    if interpreting() and dtype == torch.float16:
        pytest.skip("takes more tokens than the interpreter gets through")
    count = 300 if interpreting() else 4096
    ids = torch.zeros(count, dtype=torch.int64, device=device_under_test())
    batch = Batch(ids, torch.ones(count, 3, dtype=dtype, device=ids.device), 2)
    assert gradient(batch, backend).tolist() == [[count] * 3, [0] * 3]  # type: ignore[union-attr]


@every_backend
@pytest.mark.parametrize("plan", ["tiles", "sequential"])
@every_dtype
def test_a_row_with_half_of_the_batch_is_within_the_stated_error(
    backend: str, dtype: torch.dtype, plan: str, quick: bool
) -> None:
    if quick and (dtype, plan) not in ((torch.bfloat16, "tiles"), (torch.float32, "sequential")):
        pytest.skip("the ordinary process runs this, and a GPU")
    count, rows = (64, 5) if interpreting() else (4000, 50)
    ids = torch.arange(count, device=device_under_test()) % rows
    ids[::2] = 1
    batch = Batch(ids, _normal(count, 6, dtype=dtype, seed=0).abs(), rows)
    preference = Preference(plan=f"{backend}.gather+{backend}.{plan}")
    chosen = adjoint.plan(adjoint.embedding, ids, batch.dout.new_zeros(rows, 6), preference=preference).adjoint
    assert chosen is not None and chosen.name == f"{backend}.{plan}"
    truth = rows_of(batch.dout.double(), ids, rows)
    inputs = (batch.dout.double(), ids, truth)  # the bound looks at the shape of the weight alone
    error = chosen.guarantee["dweight"].error
    assert error.measure(gradient(batch, backend, plan), truth, *inputs).holds  # type: ignore[arg-type]
    narrow = in_order(batch.dout[ids == 1].unbind(), batch.dout.new_zeros(6))
    wrong = truth.to(dtype).index_copy(0, torch.tensor([1], device=ids.device), narrow[None])
    if dtype.itemsize == 2:
        assert not error.measure(wrong, truth, *inputs).holds, "a 16-bit accumulator passes"
