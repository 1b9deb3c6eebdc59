"""The lookup and its gradient: types, shapes, layouts, ids out of range, modes and compilation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import adjoint
from adjoint import ArgumentError, Preference
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

# ---------------------------------------------------------------------------------- types and shapes


@every_backend
@every_dtype
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_every_type(dtype: torch.dtype, index: torch.dtype, backend: str, device: torch.device) -> None:
    weight, ids = make_weight(device, dtype), make_ids(3, 5, device=device).to(index)
    out = adjoint.embedding(ids, weight, preference=Preference(backend=backend))
    assert same_bits(out, weight[ids.long()])
    dout = normal(3, 5, COLUMNS, device=device, dtype=dtype, seed=2)
    (dweight,) = torch.autograd.grad(out, weight, dout)
    assert same_bits(dweight, expected_rows(dout, ids))


@every_backend
@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 4), (0,), (3, 0, 2)], ids=str)
def test_ids_of_any_shape(shape: tuple[int, ...], backend: str, device: torch.device) -> None:
    weight, ids = make_weight(device), make_ids(*shape, device=device)
    out = adjoint.embedding(ids, weight, preference=Preference(backend=backend))
    assert out.shape == (*shape, COLUMNS)
    assert same_bits(out, weight[ids])
    dout = normal(*shape, COLUMNS, device=device, seed=2)
    (dweight,) = torch.autograd.grad(out, weight, dout)
    assert same_bits(dweight, expected_rows(dout, ids))


@every_backend
def test_rows_are_copied_with_every_bit(backend: str, device: torch.device) -> None:
    """Payloads of NaN and the sign of zero included."""
    bits = torch.tensor([0x7FC00001, -0x003FFFFE, 0x7F800000, -0x80000000, 1, 0x7FA00000], dtype=torch.int64)
    weight = bits.to(torch.int32).to(device)[:, None].expand(6, 5).contiguous().view(torch.float32)
    ids = torch.arange(6, device=device)
    out = adjoint.embedding(ids, weight, preference=Preference(backend=backend))
    assert torch.equal(out.view(torch.int32), weight.view(torch.int32))


# ------------------------------------------------------------------------------------------- layouts

ID_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda ids: ids.T.contiguous().T,
    "every other": lambda ids: torch.stack((ids, ids + 99), -1).flatten(1)[:, ::2],
    "expanded": lambda ids: ids[:1].expand(ids.shape),
    "reversed order": lambda ids: ids.flip(0),
}


@every_backend
@pytest.mark.parametrize("layout", ID_LAYOUTS)
def test_ids_of_any_strides(layout: str, backend: str, device: torch.device) -> None:
    weight, ids = make_weight(device), ID_LAYOUTS[layout](make_ids(4, 3, device=device))
    out = adjoint.embedding(ids, weight, preference=Preference(backend=backend))
    assert same_bits(out, weight[ids])
    dout = normal(4, 3, COLUMNS, device=device, seed=2)
    (dweight,) = torch.autograd.grad(out, weight, dout)
    assert same_bits(dweight, expected_rows(dout, ids))


WEIGHT_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda weight: weight.T.contiguous().T,
    "some columns": lambda weight: torch.cat((weight, weight, weight), 1)[:, 5 : 5 + COLUMNS],
    "every other column": lambda weight: torch.stack((weight, weight + 9), -1).flatten(1)[:, ::2],
    "one row for all": lambda weight: weight[:1].expand(ROWS, COLUMNS),
    "shifted by an element": lambda weight: torch.cat((weight.flatten()[:1], weight.flatten()))[1:].view(ROWS, COLUMNS),
}


@every_backend
@pytest.mark.parametrize("layout", WEIGHT_LAYOUTS)
def test_weights_of_any_strides(layout: str, backend: str, device: torch.device) -> None:
    weight, ids = WEIGHT_LAYOUTS[layout](make_weight(device).detach()), make_ids(7, device=device)
    out = adjoint.embedding(ids, weight, preference=Preference(backend=backend))
    assert same_bits(out, weight[ids])
    assert out.is_contiguous()


UPSTREAM: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded, as from sum": lambda dout: dout[:1, :1, :1, :1].expand(dout.shape),
    "one row for all": lambda dout: dout[:1, :1, :1].expand(dout.shape),
    "the first of an outer axis for all": lambda dout: dout[:1].contiguous().expand(dout.shape),
    "leading axes transposed": lambda dout: dout.transpose(0, 1).contiguous().transpose(0, 1),
    "permuted, which takes a copy": lambda dout: dout.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "every other column": lambda dout: torch.stack((dout, dout + 9), -1).flatten(3)[..., ::2],
    "columns first": lambda dout: dout.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "shifted by an element": lambda dout: torch.cat((dout.flatten()[:1], dout.flatten()))[1:].view(dout.shape),
    "every other token": lambda dout: torch.stack((dout, dout + 9), 3).flatten(2, 3)[:, :, ::2],
}


@every_backend
@pytest.mark.parametrize("layout", UPSTREAM)
def test_upstream_gradients_of_any_layout(layout: str, backend: str, device: torch.device) -> None:
    weight, ids = make_weight(device), make_ids(2, 3, 4, device=device)
    dout = UPSTREAM[layout](normal(2, 3, 4, COLUMNS, device=device, seed=2))
    plain = dout.contiguous()
    preference = Preference(backend=backend)
    assert same_bits(gradient_of(ids, weight, dout, preference=preference), expected_rows(plain, ids))


def test_only_the_ids_are_saved(device: torch.device) -> None:
    weight, ids = make_weight(device), make_ids(4, device=device)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        adjoint.embedding(ids, weight)
    assert [tensor.data_ptr() for tensor in saved] == [ids.data_ptr()]


def test_ids_changed_before_the_backward_raise(device: torch.device) -> None:
    weight, ids = make_weight(device), make_ids(4, device=device)
    out = adjoint.embedding(ids, weight).sum()
    ids.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


# ------------------------------------------------------------------------------ out of range, padding


@every_backend
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_zero_rows_out_of_range(index: torch.dtype, backend: str, device: torch.device) -> None:
    """Nothing beside the table is read, and no gradient goes there, or anywhere for such ids."""
    memory = torch.full((ROWS + 8, COLUMNS), float("nan"), device=device)
    memory[4 : 4 + ROWS] = make_weight(device).detach()
    weight = memory[4 : 4 + ROWS].requires_grad_()
    ids = torch.tensor([0, -1, ROWS, 3, -ROWS, 2**31 - 1, ROWS - 1], dtype=index, device=device)
    if index == torch.int64:
        ids[2], ids[5] = 2**32 + 3, -(2**63)
    inside = torch.tensor([True, False, False, True, False, False, True], device=device)
    preference = Preference(backend=backend)
    out = adjoint.embedding(ids, weight, out_of_range="zero", preference=preference)
    adjoint.check()
    assert same_bits(out[inside], weight[ids[inside].long()])
    assert same_bits(out[~inside], torch.zeros_like(out[~inside]))
    dout = normal(7, COLUMNS, device=device)
    dout[~inside] = float("nan")
    (dweight,) = torch.autograd.grad(out, weight, dout)
    assert same_bits(dweight, expected_rows(dout[inside], ids[inside]))
    guarded = torch.full_like(memory, 7.0)
    out = adjoint.embedding(
        ids, weight, out_of_range="zero", accumulate_into=guarded[4 : 4 + ROWS], preference=preference
    )
    out.backward(dout)
    assert same_bits(guarded[4 : 4 + ROWS], 7 + dweight)
    assert (guarded[:4] == 7).all() and (guarded[4 + ROWS :] == 7).all()


@every_backend
def test_an_id_out_of_range_is_reported_once(backend: str, device: torch.device) -> None:
    """The first of several, counted in order whatever the strides; then the slate is clean."""
    preference = Preference(backend=backend)
    ids = make_ids(4, 3, device=device).T
    ids[1, 2], ids[2, 0] = -4, 99

    def lookup(ids: Tensor) -> None:
        adjoint.embedding(ids, make_weight(device), preference=preference)
        adjoint.check()

    with pytest.raises(ArgumentError, match=r"embedding: ids .* got -4 at position 6 "):
        lookup(ids)
    lookup(ids.remainder(ROWS))


@pytest.mark.gpu
def test_a_gpu_gives_zero_rows_meanwhile(device: torch.device) -> None:
    weight, ids = make_weight(device), make_ids(5, device=device)
    ids[3] = ROWS
    with pytest.raises(ArgumentError, match=f"got {ROWS} at position 3 "), adjoint.checked():
        out = adjoint.embedding(ids, weight)
        assert not out[3].any()
        assert same_bits(out[:3], weight[ids[:3]])
        (dweight,) = torch.autograd.grad(out, weight, torch.ones_like(out))
        assert float(dweight.sum()) == 4 * COLUMNS


@every_backend
@pytest.mark.parametrize("padding_idx", [3, 3 - ROWS])
@pytest.mark.parametrize("form", ["dense", "sparse", "into"])
def test_padding_gets_no_gradient(form: str, padding_idx: int, backend: str, device: torch.device) -> None:
    weight, ids = make_weight(device), torch.tensor([3, 1, 3, 0, 1], device=device)
    options: dict[str, Any] = {"padding_idx": padding_idx, "preference": Preference(backend=backend)}
    out = adjoint.embedding(ids, weight, **options)
    assert same_bits(out, weight[ids]), "padding is looked up as any other row"
    dout = normal(5, COLUMNS, device=device)
    expected = expected_rows(dout[ids != 3], ids[ids != 3])
    if form == "into":
        buffer = torch.zeros_like(expected)
        adjoint.embedding(ids, weight, accumulate_into=buffer, **options).backward(dout)
        assert same_bits(buffer, expected)
    else:
        dweight = gradient_of(ids, weight, dout, sparse=form == "sparse", **options)
        assert same_bits(dweight.to_dense(), expected)
        if form == "sparse":
            assert dweight._indices().tolist() == [[0, 1]]


# -------------------------------------------------------------------------------------------- modes


@every_backend
def test_modes_change_nothing(backend: str, device: torch.device) -> None:
    weight, ids, preference = make_weight(device), make_ids(5, device=device), Preference(backend=backend)
    expected = weight.detach()[ids]
    with torch.inference_mode():
        out = adjoint.embedding(ids, weight, preference=preference)
        assert out.is_inference() and torch.equal(out, expected)
    with torch.no_grad():
        out = adjoint.embedding(ids, weight, preference=preference)
        assert not out.requires_grad and torch.equal(out, expected)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = adjoint.embedding(ids, weight, preference=preference)
    assert out.dtype == torch.float32 and torch.equal(out, expected)
    torch.use_deterministic_algorithms(True)  # which also fills new memory with NaN
    try:
        out = adjoint.embedding(ids, weight, preference=preference)
        assert torch.equal(out, expected)
        (dweight,) = torch.autograd.grad(out, weight, torch.ones_like(out))
    finally:
        torch.use_deterministic_algorithms(False)
    assert same_bits(dweight, expected_rows(torch.ones_like(out), ids))


@every_backend
@pytest.mark.parametrize("into", [False, True])
def test_checkpointing(into: bool, backend: str, device: torch.device) -> None:
    weight, ids = make_weight(device), make_ids(5, device=device)
    buffer = torch.zeros(ROWS, COLUMNS, device=device)

    def block(table: Tensor) -> Tensor:
        options = {"accumulate_into": buffer} if into else {}
        return adjoint.embedding(ids, table, preference=Preference(backend=backend), **options).square()

    out = checkpoint(block, weight, use_reentrant=False)
    assert isinstance(out, Tensor)
    out.sum().backward()
    expected = expected_rows(2 * weight.detach()[ids], ids)
    assert same_bits(buffer if into else weight.grad, expected)  # type: ignore[arg-type]
    assert not into or weight.grad is None


# ------------------------------------------------------------------------------------- torch.compile


@every_backend
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("padding_idx", [None, -1])
def test_compiled(
    padding_idx: int | None,
    dynamic: bool,
    backend: str,
    device: torch.device,
    compiled: Callable[..., Any],
) -> None:
    """Other numbers of tokens, rows and columns too."""
    preference = Preference(backend=backend)

    def lookup(ids: Tensor, weight: Tensor) -> Tensor:
        return adjoint.embedding(ids, weight, padding_idx=padding_idx, preference=preference) * 2

    function = compiled(lookup, dynamic=dynamic)
    for count, rows, columns in ((5, 7, 3), (9, 8, 4)):
        weight = normal(rows, columns, device=device).requires_grad_()
        ids = torch.arange(count, device=device) % rows
        results = []
        for call in (function, lookup):
            out = call(ids, weight)
            results.append((out, *torch.autograd.grad(out, weight, normal(count, columns, device=device, seed=1))))
        assert all(map(same_bits, *results))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_accumulation_writes_to_the_buffer(
    dynamic: bool, device: torch.device, compiled: Callable[..., Any]
) -> None:
    """In the order of the backwards; two lookups in one graph too; what the buffer holds then counts."""
    weight, ids = make_weight(device), make_ids(6, device=device)

    def lookups(ids: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        first = adjoint.embedding(ids, weight, accumulate_into=buffer)
        return first + 3 * adjoint.embedding(ids + 1, weight, accumulate_into=buffer)

    buffers = []
    for function in (compiled(lookups, dynamic=dynamic), lookups):
        buffer = torch.ones(ROWS, 2 * COLUMNS, device=device)[:, ::2]
        one, two = (function(ids, weight, buffer).square().sum() for _ in range(2))
        buffer.zero_()
        two.backward()
        one.backward()
        buffers.append(buffer)
    assert same_bits(*buffers)
    assert buffers[0].any()
    assert weight.grad is None


def test_a_sparse_gradient_is_refused_under_compile(device: torch.device, compiled: Callable[..., Any]) -> None:
    function = compiled(lambda ids, weight: adjoint.embedding(ids, weight, sparse=True))
    with pytest.raises(Exception, match=r"(?s)row-sparse gradient .* not available under torch\.compile"):
        function(make_ids(4, device=device), make_weight(device))


@pytest.mark.parametrize("operator", ["embedding", "embedding_backward", "embedding_backward_into"])
def test_operators_are_registered_right(operator: str, device: torch.device) -> None:
    weight, ids = make_weight(device).detach(), make_ids(4, device=device)
    dout = normal(4, COLUMNS, device=device)
    arguments: dict[str, tuple[Any, ...]] = {
        "embedding": (ids, weight, -1, "raise", ""),
        "embedding_backward": (dout, ids, ROWS, -1, ""),
        "embedding_backward_into": (dout, ids, torch.zeros_like(weight), -1, ""),
    }
    torch.library.opcheck(getattr(torch.ops.adjoint, operator).default, arguments[operator])
