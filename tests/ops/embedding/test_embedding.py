"""The lookup and its gradient: types, shapes, layouts, buffers, sparse gradients, plans and their memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import adjoint
from adjoint import ArgumentError, Plan, Preference, Unsupported
from adjoint.verify.bits import same_bits
from tests.ops.embedding.sums import rows_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BACKENDS = ["eager", pytest.param("triton", marks=pytest.mark.kernels)]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

ROWS, COLUMNS = 11, 6


def _normal(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(device)


def _weight(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return _normal(ROWS, COLUMNS, device=device, dtype=dtype).requires_grad_()


def _ids(*shape: int, device: torch.device, seed: int = 1) -> Tensor:
    return torch.randint(ROWS - 2, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _gradient(ids: Tensor, weight: Tensor, dout: Tensor, **options: Any) -> Tensor:
    (dweight,) = torch.autograd.grad(adjoint.embedding(ids, weight, **options), weight, dout)
    return dweight


def _expected(dout: Tensor, ids: Tensor) -> Tensor:
    return rows_of(dout, ids, ROWS).to(dout.dtype)


# ---------------------------------------------------------------------------------- types and shapes


@every_backend
@every_dtype
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_every_type(dtype: torch.dtype, index: torch.dtype, backend: str, device: torch.device) -> None:
    weight, ids = _weight(device, dtype), _ids(3, 5, device=device).to(index)
    out = adjoint.embedding(ids, weight, preference=Preference(backend=backend))
    assert same_bits(out, weight[ids.long()])
    dout = _normal(3, 5, COLUMNS, device=device, dtype=dtype, seed=2)
    (dweight,) = torch.autograd.grad(out, weight, dout)
    assert same_bits(dweight, _expected(dout, ids))


@every_backend
@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 4), (0,), (3, 0, 2)], ids=str)
def test_ids_of_any_shape(shape: tuple[int, ...], backend: str, device: torch.device) -> None:
    weight, ids = _weight(device), _ids(*shape, device=device)
    out = adjoint.embedding(ids, weight, preference=Preference(backend=backend))
    assert out.shape == (*shape, COLUMNS)
    assert same_bits(out, weight[ids])
    dout = _normal(*shape, COLUMNS, device=device, seed=2)
    (dweight,) = torch.autograd.grad(out, weight, dout)
    assert same_bits(dweight, _expected(dout, ids))


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
    weight, ids = _weight(device), ID_LAYOUTS[layout](_ids(4, 3, device=device))
    out = adjoint.embedding(ids, weight, preference=Preference(backend=backend))
    assert same_bits(out, weight[ids])
    dout = _normal(4, 3, COLUMNS, device=device, seed=2)
    (dweight,) = torch.autograd.grad(out, weight, dout)
    assert same_bits(dweight, _expected(dout, ids))


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
    weight, ids = WEIGHT_LAYOUTS[layout](_weight(device).detach()), _ids(7, device=device)
    out = adjoint.embedding(ids, weight, preference=Preference(backend=backend))
    assert same_bits(out, weight[ids])
    assert out.is_contiguous()


UPSTREAM: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded, as from sum": lambda dout: dout[:1, :1, :1, :1].expand(dout.shape),
    "one row for all": lambda dout: dout[:1, :1, :1].expand(dout.shape),
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
    weight, ids = _weight(device), _ids(2, 3, 4, device=device)
    dout = UPSTREAM[layout](_normal(2, 3, 4, COLUMNS, device=device, seed=2))
    plain = dout.contiguous()
    preference = Preference(backend=backend)
    assert same_bits(_gradient(ids, weight, dout, preference=preference), _expected(plain, ids))


def test_only_the_ids_are_saved(device: torch.device) -> None:
    weight, ids = _weight(device), _ids(4, device=device)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        adjoint.embedding(ids, weight)
    assert [tensor.data_ptr() for tensor in saved] == [ids.data_ptr()]


def test_ids_changed_before_the_backward_raise(device: torch.device) -> None:
    weight, ids = _weight(device), _ids(4, device=device)
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
    memory[4 : 4 + ROWS] = _weight(device).detach()
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
    dout = _normal(7, COLUMNS, device=device)
    dout[~inside] = float("nan")
    (dweight,) = torch.autograd.grad(out, weight, dout)
    assert same_bits(dweight, _expected(dout[inside], ids[inside]))
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
    ids = _ids(4, 3, device=device).T
    ids[1, 2], ids[2, 0] = -4, 99

    def lookup(given: Tensor) -> None:
        adjoint.embedding(given, _weight(device), preference=preference)
        adjoint.check()

    with pytest.raises(ArgumentError, match=r"embedding: ids .* got -4 at position 6 "):
        lookup(ids)
    lookup(ids.remainder(ROWS))


@pytest.mark.gpu
def test_a_gpu_gives_zero_rows_meanwhile(device: torch.device) -> None:
    weight, ids = _weight(device), _ids(5, device=device)
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
    weight, ids = _weight(device), torch.tensor([3, 1, 3, 0, 1], device=device)
    options: dict[str, Any] = {"padding_idx": padding_idx, "preference": Preference(backend=backend)}
    out = adjoint.embedding(ids, weight, **options)
    assert same_bits(out, weight[ids]), "padding is looked up as any other row"
    dout = _normal(5, COLUMNS, device=device)
    expected = _expected(dout[ids != 3], ids[ids != 3])
    if form == "into":
        buffer = torch.zeros_like(expected)
        adjoint.embedding(ids, weight, accumulate_into=buffer, **options).backward(dout)
        assert same_bits(buffer, expected)
    else:
        dweight = _gradient(ids, weight, dout, sparse=form == "sparse", **options)
        assert same_bits(dweight.to_dense(), expected)
        if form == "sparse":
            assert dweight._indices().tolist() == [[0, 1]]


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
    weight, ids = _weight(device, dtype), _ids(14, device=device)
    dout = _normal(14, COLUMNS, device=device, dtype=dtype, seed=2)
    buffer = _normal(ROWS, COLUMNS, device=device, dtype=into, seed=3)
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
    weight, ids, dout = _weight(device), _ids(9, device=device), _normal(9, COLUMNS, device=device, seed=2)
    memory = _normal(23, 23, device=device)
    expected, view = memory.clone(), BUFFERS[layout]
    view(expected).add_(_expected(dout, ids))
    preference = Preference(backend=backend)
    adjoint.embedding(ids, weight, accumulate_into=view(memory), preference=preference).backward(dout)
    assert same_bits(memory, expected)


@every_backend
def test_two_forwards_before_two_backwards(backend: str, device: torch.device) -> None:
    weight, buffer = _weight(device), torch.zeros(ROWS, COLUMNS, device=device)
    ids = [_ids(6, device=device, seed=seed) for seed in (1, 2)]
    douts = [_normal(6, COLUMNS, device=device, seed=seed) for seed in (3, 4)]
    outs = [adjoint.embedding(i, weight, accumulate_into=buffer, preference=Preference(backend=backend)) for i in ids]
    for out, dout in zip(outs, douts, strict=True):
        out.backward(dout)
    first, second = (_expected(dout, i) for dout, i in zip(douts, ids, strict=True))
    assert same_bits(buffer, first + second)
    assert weight.grad is None


@every_backend
def test_a_buffer_saved_elsewhere_raises_there(backend: str, device: torch.device) -> None:
    """What another op saved has changed by the time its backward runs, and autograd notices."""
    weight, buffer = _weight(device), torch.ones(ROWS, COLUMNS, device=device)
    factor = torch.ones_like(buffer, requires_grad=True)
    product = (factor * buffer).sum()  # saves the buffer
    preference = Preference(backend=backend)
    adjoint.embedding(_ids(4, device=device), weight, accumulate_into=buffer, preference=preference).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_without_a_gradient_the_buffer_is_left_alone(device: torch.device) -> None:
    weight, buffer = _weight(device), torch.zeros(ROWS, COLUMNS, device=device)
    with torch.no_grad():
        out = adjoint.embedding(_ids(4, device=device), weight, accumulate_into=buffer)
    assert not out.requires_grad
    adjoint.embedding(_ids(4, device=device), weight.detach(), accumulate_into=buffer)
    assert not buffer.any()


# ------------------------------------------------------------------------------------------- sparse


@every_backend
@every_dtype
def test_a_sparse_gradient_holds_the_rows_that_occur(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    weight, ids = _weight(device, dtype), _ids(2, 5, device=device)
    dout = _normal(2, 5, COLUMNS, device=device, dtype=dtype, seed=2)
    dweight = _gradient(ids, weight, dout, sparse=True, preference=Preference(backend=backend))
    assert dweight.layout == torch.sparse_coo and dweight.is_coalesced()
    assert dweight.indices()[0].tolist() == sorted(set(ids.flatten().tolist()))
    assert same_bits(dweight.to_dense(), _expected(dout, ids))


@every_backend
def test_a_sparse_gradient_may_be_empty(backend: str, device: torch.device) -> None:
    weight, preference = _weight(device), Preference(backend=backend)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    assert _gradient(nothing, weight, weight.new_ones(0, COLUMNS), sparse=True, preference=preference)._nnz() == 0
    outside = torch.full((3,), ROWS, device=device)
    dout = weight.new_ones(3, COLUMNS)
    dweight = _gradient(outside, weight, dout, sparse=True, out_of_range="zero", preference=preference)
    assert dweight._nnz() == 0 and dweight.shape == weight.shape


def test_sparse_adam_takes_the_step_torch_takes(device: torch.device) -> None:
    ids = _ids(8, device=device)
    ours, theirs = (torch.nn.Parameter(_weight(device).detach().clone()) for _ in range(2))
    for weight, lookup in ((ours, adjoint.embedding), (theirs, torch.nn.functional.embedding)):
        optimizer = torch.optim.SparseAdam([weight], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            lookup(ids, weight, sparse=True).square().sum().backward()  # type: ignore[operator]
            optimizer.step()
    assert not torch.equal(ours, _weight(device))
    assert torch.equal(ours, theirs)


def test_sparse_gradients_add_up(device: torch.device) -> None:
    weight, ids = _weight(device), _ids(6, device=device)
    for _ in range(2):
        adjoint.embedding(ids, weight, sparse=True).sum().backward()
    assert weight.grad is not None and weight.grad.is_sparse
    assert same_bits(weight.grad.to_dense(), 2 * _expected(weight.new_ones(6, COLUMNS), ids))


# -------------------------------------------------------------------------------------------- modes


@every_backend
def test_modes_change_nothing(backend: str, device: torch.device) -> None:
    weight, ids, preference = _weight(device), _ids(5, device=device), Preference(backend=backend)
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
    assert same_bits(dweight, _expected(torch.ones_like(out), ids))


@every_backend
@pytest.mark.parametrize("into", [False, True])
def test_checkpointing(into: bool, backend: str, device: torch.device) -> None:
    weight, ids = _weight(device), _ids(5, device=device)
    buffer = torch.zeros(ROWS, COLUMNS, device=device)

    def block(table: Tensor) -> Tensor:
        options = {"accumulate_into": buffer} if into else {}
        return adjoint.embedding(ids, table, preference=Preference(backend=backend), **options).square()

    out = checkpoint(block, weight, use_reentrant=False)
    assert isinstance(out, Tensor)
    out.sum().backward()
    expected = _expected(2 * weight.detach()[ids], ids)
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
        weight = _normal(rows, columns, device=device).requires_grad_()
        ids = torch.arange(count, device=device) % rows
        results = []
        for call in (function, lookup):
            out = call(ids, weight)
            results.append((out, *torch.autograd.grad(out, weight, _normal(count, columns, device=device, seed=1))))
        assert all(map(same_bits, *results))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_accumulation_writes_to_the_buffer(
    dynamic: bool, device: torch.device, compiled: Callable[..., Any]
) -> None:
    """In the order of the backwards; two lookups in one graph too; what the buffer holds then counts."""
    weight, ids = _weight(device), _ids(6, device=device)

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
        function(_ids(4, device=device), _weight(device))


@pytest.mark.parametrize("operator", ["embedding", "embedding_backward", "embedding_backward_into"])
def test_operators_are_registered_right(operator: str, device: torch.device) -> None:
    weight, ids = _weight(device).detach(), _ids(4, device=device)
    dout = _normal(4, COLUMNS, device=device)
    arguments: dict[str, tuple[Any, ...]] = {
        "embedding": (ids, weight, "raise", ""),
        "embedding_backward": (dout, ids, ROWS, -1, ""),
        "embedding_backward_into": (dout, ids, torch.zeros_like(weight), -1, ""),
    }
    torch.library.opcheck(getattr(torch.ops.adjoint, operator).default, arguments[operator])


# --------------------------------------------------------------------------------- plans and memory

FORMS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "dense": lambda weight: {},
    "into": lambda weight: {"accumulate_into": torch.zeros_like(weight)},
    "sparse": lambda weight: {"sparse": True},
}


def _plan(form: str, device: torch.device, backend: str, **preference: Any) -> Plan:
    weight = _weight(device).detach()
    wanted = Preference(backend=backend, **preference)
    return adjoint.plan(adjoint.embedding, _ids(9, device=device), weight, preference=wanted, **FORMS[form](weight))


def _backward(form: str, device: torch.device, backend: str, **preference: Any) -> Plan:
    plan = _plan(form, device, backend, **preference).adjoint
    assert plan is not None
    return plan


@every_backend
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("order", ["tiles", "sequential"])
def test_plans_by_name(order: str, form: str, backend: str, device: torch.device) -> None:
    plan = _plan(form, device, backend, plan=f"{backend}.gather+{backend}.{order}")
    assert (plan.name, plan.adjoint.name) == (f"{backend}.gather", f"{backend}.{order}")  # type: ignore[union-attr]
    backward = plan.adjoint
    assert backward is not None
    assert str(backward.sku).startswith(f"embedding_backward{'' if form == 'dense' else '_' + form}/{backend}/")
    assert str(backward.sku).endswith("tile=32" if order == "tiles" else "tile=none")
    promise = backward.guarantee["dweight"]
    assert promise.flags == "repeatable, batch_invariant(row), device_invariant"
    assert promise.accumulator == "float32" and promise.roundings == 1
    assert ("tiles of 32" in promise.domain) == (order == "tiles")
    assert plan.guarantee["out"].roundings == 0


@every_backend
def test_the_tiles_come_first(backend: str, device: torch.device) -> None:
    assert _backward("dense", device, backend).name == f"{backend}.tiles"
    named = f"{backend}.sequential"
    with pytest.raises(Unsupported, match=rf"(?s)embedding: no plan .* asks for the plan {named}"):
        _plan("dense", device, backend, plan=named)  # no forward plan has the name


def test_no_workspace_allowed_lists_every_candidate(device: torch.device) -> None:
    weight, ids = _weight(device), _ids(4, device=device)
    with pytest.raises(Unsupported) as caught:
        adjoint.embedding(ids, weight, preference=Preference(max_workspace_bytes=0)).sum().backward()
    message = str(caught.value)
    candidates = ("gather",) if "embedding: no plan" in message else ("tiles", "sequential")
    for name in (f"{backend}.{kind}" for backend in ("triton", "eager") for kind in candidates):
        assert f"  {name}: " in message
    assert "the preference allows 0 bytes" in message


def test_eager_plans_take_no_workspace(device: torch.device) -> None:
    plan = _backward("dense", device, "eager")
    assert plan.workspace_bytes is None
    with pytest.raises(ArgumentError, match=r"eager\.tiles takes no workspace="):
        plan.run(_normal(9, COLUMNS, device=device), _ids(9, device=device), workspace=torch.empty(99, device=device))


def _guarded(size: int, shift: int, device: torch.device) -> tuple[Tensor, Callable[[], bool]]:
    """Poisoned memory of a size that begins at any address, and whether what lies around it is untouched."""
    memory = torch.full((size + 1024,), 0xAB, dtype=torch.uint8, device=device)
    begin = 512 + shift - memory.data_ptr() % 256
    around = torch.cat((memory[:begin], memory[begin + size :])).clone()
    return memory[begin : begin + size], lambda: torch.equal(
        torch.cat((memory[:begin], memory[begin + size :])), around
    )


@pytest.mark.kernels
@pytest.mark.parametrize("shift", [0, 1, 255])
@pytest.mark.parametrize("form", FORMS)
def test_the_stated_workspace_is_enough_wherever_it_begins(form: str, shift: int, device: torch.device) -> None:
    """Poisoned: nothing is read before it is written. Guarded: nothing is written beside it."""
    plan = _backward(form, device, "triton")
    assert plan.workspace_bytes
    dout, ids = _normal(9, COLUMNS, device=device), _ids(9, device=device)
    workspace, intact = _guarded(plan.workspace_bytes, shift, device)
    buffer = torch.zeros(ROWS, COLUMNS, device=device)
    if form == "dense":
        out = torch.full((ROWS, COLUMNS), float("nan"), device=device)
        assert plan.run(dout, ids, out=out, workspace=workspace) is out
        buffer = out
    elif form == "into":
        assert plan.run(dout, ids, buffer, workspace=workspace) == ()
    else:
        rows, values = plan.run(dout, ids, workspace=workspace)
        buffer[rows] = values
    assert same_bits(buffer, _expected(dout, ids))
    assert intact()
    with pytest.raises(ArgumentError, match=rf"too small: {plan.workspace_bytes} bytes are needed"):
        plan.run(dout, ids, *([buffer] * (form == "into")), workspace=workspace[:-1])


@pytest.mark.kernels
def test_the_copies_a_layout_takes_are_in_the_workspace(device: torch.device) -> None:
    """Ids that are not contiguous, and a gradient no kernel walks."""
    weight = _weight(device).detach()
    ids = _ids(4, 3, 2, device=device).permute(2, 0, 1)
    dout = _normal(3, 4, 2, COLUMNS, device=device, seed=2).permute(2, 1, 0, 3)
    plan = adjoint.plan(adjoint.embedding, ids, weight)
    workspace, intact = _guarded(plan.workspace_bytes or 0, 3, device)
    assert len(workspace) >= ids.numel() * 8
    assert same_bits(plan.run(ids, weight, workspace=workspace), weight[ids])  # type: ignore[arg-type]
    assert intact()
    operator = torch.ops.adjoint.embedding_backward
    expected = operator(dout.contiguous(), ids.contiguous(), ROWS, -1, "")
    assert same_bits(operator(dout, ids, ROWS, -1, ""), expected)
    assert same_bits(expected, _expected(dout, ids))


@pytest.mark.kernels
def test_another_number_of_tokens_is_another_plan(device: torch.device) -> None:
    """A plan's workspace has the size of its problem."""
    plan = _backward("dense", device, "triton")
    with pytest.raises(Unsupported, match=r"not made for .* \(8, 11, 6\), the plan was made for \(9, 11, 6\)"):
        plan.run(_normal(8, COLUMNS, device=device), _ids(8, device=device))
