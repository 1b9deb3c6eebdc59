"""Gradients that are added to a buffer, and those that are row-sparse."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.verify.checks.bits import same_bits
from tests.ops.embedding.embedding.lookups import (
    COLUMNS,
    ROWS,
    every_backend,
    every_dtype,
    expected_rows,
    gradient_of,
    make_ids,
    make_weight,
    normal,
)
from tests.ops.embedding.sums import rows_of

# --------------------------------------------------------------------------------------- accumulation


@every_backend
@pytest.mark.parametrize(
    ("dtype", "into"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float64),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.float64, torch.float64),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
def test_a_buffer_of_any_type_is_added_to(
    dtype: torch.dtype, into: torch.dtype, backend: str, device: torch.device
) -> None:
    """The sum is not rounded to the type of the weights on the way; rows that do not occur are left alone."""
    weight, ids = make_weight(device, dtype), make_ids(14, device=device)
    dout = normal(14, COLUMNS, device=device, dtype=dtype, seed=2)
    buffer = normal(ROWS, COLUMNS, device=device, dtype=into, seed=3)
    buffer[-1] = float("nan")  # the last rows do not occur
    sums = rows_of(dout, ids, ROWS)
    expected = (buffer.to(torch.promote_types(into, sums.dtype)) + sums).to(into)
    adjoint.embedding(ids, weight, accumulate_into=buffer, preference=Preference(backend=backend)).backward(dout)
    assert same_bits(buffer, expected)
    assert weight.grad is None


BUFFERS: dict[str, Callable[[Tensor], Tensor]] = {
    "every other row": lambda memory: memory[1 : 2 * ROWS : 2, 1 : 1 + COLUMNS],
    "every other column": lambda memory: memory[3 : 3 + ROWS, 1 : 1 + 2 * COLUMNS : 2],
    "transposed": lambda memory: memory.T[2 : 2 + ROWS, 5 : 5 + COLUMNS],
}


@every_backend
@pytest.mark.parametrize("layout", BUFFERS)
def test_a_strided_buffer_is_added_to_in_place(layout: str, backend: str, device: torch.device) -> None:
    """And what lies between its elements is left alone."""
    weight, ids, dout = make_weight(device), make_ids(9, device=device), normal(9, COLUMNS, device=device, seed=2)
    memory = normal(23, 23, device=device)
    expected, view = memory.clone(), BUFFERS[layout]
    view(expected).add_(expected_rows(dout, ids))
    preference = Preference(backend=backend)
    adjoint.embedding(ids, weight, accumulate_into=view(memory), preference=preference).backward(dout)
    assert same_bits(memory, expected)


@every_backend
def test_two_forwards_before_two_backwards(backend: str, device: torch.device) -> None:
    weight, buffer = make_weight(device), torch.zeros(ROWS, COLUMNS, device=device)
    ids = [make_ids(6, device=device, seed=seed) for seed in (1, 2)]
    douts = [normal(6, COLUMNS, device=device, seed=seed) for seed in (3, 4)]
    outs = [adjoint.embedding(i, weight, accumulate_into=buffer, preference=Preference(backend=backend)) for i in ids]
    for out, dout in zip(outs, douts, strict=True):
        out.backward(dout)
    first, second = (expected_rows(dout, i) for dout, i in zip(douts, ids, strict=True))
    assert same_bits(buffer, first + second)
    assert weight.grad is None


@every_backend
def test_a_buffer_saved_elsewhere_raises_there(backend: str, device: torch.device) -> None:
    """What another op saved has changed by the time its backward runs, and autograd notices."""
    weight, buffer = make_weight(device), torch.ones(ROWS, COLUMNS, device=device)
    factor = torch.ones_like(buffer, requires_grad=True)
    product = (factor * buffer).sum()  # saves the buffer
    preference = Preference(backend=backend)
    adjoint.embedding(
        make_ids(4, device=device), weight, accumulate_into=buffer, preference=preference
    ).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_without_a_gradient_the_buffer_is_left_alone(device: torch.device) -> None:
    weight, buffer = make_weight(device), torch.zeros(ROWS, COLUMNS, device=device)
    with torch.no_grad():
        out = adjoint.embedding(make_ids(4, device=device), weight, accumulate_into=buffer)
    assert not out.requires_grad
    adjoint.embedding(make_ids(4, device=device), weight.detach(), accumulate_into=buffer)
    assert not buffer.any()


# ------------------------------------------------------------------------------------------- sparse


@every_backend
@every_dtype
def test_a_sparse_gradient_holds_the_rows_that_occur(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    weight, ids = make_weight(device, dtype), make_ids(2, 5, device=device)
    dout = normal(2, 5, COLUMNS, device=device, dtype=dtype, seed=2)
    dweight = gradient_of(ids, weight, dout, sparse=True, preference=Preference(backend=backend))
    assert dweight.layout == torch.sparse_coo and dweight.is_coalesced()
    assert dweight.indices()[0].tolist() == sorted(set(ids.flatten().tolist()))
    assert same_bits(dweight.to_dense(), expected_rows(dout, ids))


@every_backend
def test_a_sparse_gradient_may_be_empty(backend: str, device: torch.device) -> None:
    weight, preference = make_weight(device), Preference(backend=backend)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    assert gradient_of(nothing, weight, weight.new_ones(0, COLUMNS), sparse=True, preference=preference)._nnz() == 0
    outside = torch.full((3,), ROWS, device=device)
    dout = weight.new_ones(3, COLUMNS)
    dweight = gradient_of(outside, weight, dout, sparse=True, out_of_range="zero", preference=preference)
    assert dweight._nnz() == 0 and dweight.shape == weight.shape


def test_sparse_adam_takes_the_step_torch_takes(device: torch.device) -> None:
    ids = make_ids(8, device=device)
    ours, theirs = (torch.nn.Parameter(make_weight(device).detach().clone()) for _ in range(2))
    for weight, lookup in ((ours, adjoint.embedding), (theirs, torch.nn.functional.embedding)):
        optimizer = torch.optim.SparseAdam([weight], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            lookup(ids, weight, sparse=True).square().sum().backward()  # type: ignore[operator]
            optimizer.step()
    assert not torch.equal(ours, make_weight(device))
    assert torch.equal(ours, theirs)


def test_sparse_gradients_add_up(device: torch.device) -> None:
    weight, ids = make_weight(device), make_ids(6, device=device)
    for _ in range(2):
        adjoint.embedding(ids, weight, sparse=True).sum().backward()
    assert weight.grad is not None and weight.grad.is_sparse
    assert same_bits(weight.grad.to_dense(), 2 * expected_rows(weight.new_ones(6, COLUMNS), ids))
