"""The layout, dispatch, and its pair with combine: what only they know. The shared checks are in test_contract."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference, moe
from adjoint.ops.moe.combine.plans import DOT_WIDTH
from adjoint.ops.moe.dispatch import reference
from adjoint.ops.moe.layout.reference import layout as reference_layout
from adjoint.verify.checks.bits import same_bits

BACKENDS = [pytest.param("triton", marks=pytest.mark.kernels), pytest.param("eager")]
backends = pytest.mark.parametrize("backend", BACKENDS)

SHAPES = [(0, 2, 3), (1, 1, 1), (5, 1, 9), (70, 3, 2), (33, 4, 300), (9, 8, 8), (3, 0, 4)]
"""Tokens, slots and experts."""


def _indices(tokens: int, slots: int, experts: int, seed: int = 0) -> Tensor:
    """Half of them one expert, and some experts without any."""
    generator = torch.Generator().manual_seed(seed + tokens)
    indices = torch.randint(experts, (tokens, slots), generator=generator)
    indices[torch.rand(tokens, slots, generator=generator) < 0.5] = experts // 2
    return indices


def _values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _integers(*shape: int, seed: int = 1) -> Tensor:
    """Small ones, whose sums of products are exact in float64, in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


# -------------------------------------------------------------------------------------------- layout


@backends
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("tokens", "slots", "experts"), SHAPES)
def test_the_layout_is_the_stable_sort(
    tokens: int, slots: int, experts: int, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    indices = _indices(tokens, slots, experts).to(dtype).to(device)
    x = _values(tokens, 3).to(device)
    rows, layout = moe.dispatch(x, indices, experts, preference=Preference(backend=backend))
    for name, got, expected in zip(layout._fields, layout, reference_layout(indices, experts), strict=True):
        assert torch.equal(got, expected), name
    for expert in range(experts):  # a second formulation: an expert's rows, by what was asked for
        mine = rows[int(layout.offsets[expert]) : int(layout.offsets[expert + 1])]
        assert torch.equal(mine, x[(indices == expert).nonzero()[:, 0]])


@backends
def test_leading_axes_are_kept(backend: str, device: torch.device) -> None:
    x, indices = _values(2, 3, 4).to(device), _indices(6, 2, 5).view(2, 3, 2).to(device)
    preference = Preference(backend=backend)
    rows, layout = moe.dispatch(x, indices, 5, preference=preference)
    assert layout.inverse.shape == (2, 3, 2)
    assert torch.equal(moe.combine(rows, None, layout, preference=preference), x * 2)
    alone, one = moe.dispatch(x[0, 0], indices[0, 0], 5, preference=preference)
    assert torch.equal(moe.combine(alone, None, one, preference=preference), x[0, 0] * 2)


@pytest.mark.kernels
def test_an_index_out_of_range_gives_a_zero_row_past_the_last_offset(device: torch.device) -> None:
    indices = _indices(40, 3, 6).to(device)
    wrong = [(0, 0, 6), (17, 2, -1), (39, 1, 2**31 + 3)]
    for token, slot, value in wrong:
        indices[token, slot] = value
    x = _values(40, 5).to(device)
    plan = adjoint.plan(moe.dispatch, x, indices, 6, preference=Preference(backend="triton")).prepare()
    outputs = plan.allocate((x, indices, 6))
    for output in outputs:
        output.fill_(float("nan") if output.is_floating_point() else -7)
    with pytest.raises(adjoint.ArgumentError, match="got 6 at position 0 "):
        plan.run(x, indices, out=outputs)
        adjoint.check()
    rows, *layout = outputs
    assert all(map(torch.equal, layout, reference_layout(indices, 6)))
    assert torch.equal(rows[117:], torch.zeros_like(rows[117:])) and int(layout[0][-1]) == 117
    assert torch.equal(rows, reference.dispatch(x, indices, 6))
    # It has no gradient, and counts for nothing, whatever its row holds by now.
    rows[117:] = float("nan")
    y = moe.combine(rows, None, moe.Layout(*layout), preference=Preference(backend="triton"))
    times = torch.full((40, 1), 3.0, device=device)
    times[[0, 17, 39]] -= 1
    assert torch.equal(y, (x.double() * times).float())  # two or three times a number, rounded once
    assert plan.adjoint is not None
    dx = plan.adjoint.run(rows, layout[2], layout[0])
    assert torch.equal(dx, y)


@pytest.mark.kernels
@pytest.mark.parametrize("chunk", [1, 1024, 2**20])
def test_rows_are_filled_whatever_the_chunks(chunk: int, device: torch.device) -> None:
    """One span at a time, two of a GPU's and sixteen of the interpreter's, all at once; with entries of no expert."""
    indices = _indices(700, 3, 5)
    indices[torch.arange(0, 2100, 13) // 3, torch.arange(0, 2100, 13) % 3] = 5
    x, indices = _values(700, 3).to(device), indices.to(device)
    plan = adjoint.plan(moe.dispatch, x, indices, 5, preference=Preference(backend="triton"))
    plan = plan.with_schedule(gather_chunk=chunk)
    outputs = plan.allocate((x, indices, 5))
    for output in outputs:
        output.fill_(float("nan") if output.is_floating_point() else -7)
    with pytest.raises(adjoint.ArgumentError, match="got 5 at position 0 "):
        plan.run(x, indices, out=outputs)
        adjoint.check()
    assert torch.equal(outputs[0], reference.dispatch(x, indices, 5))
    assert all(map(torch.equal, outputs[1:], reference_layout(indices, 5)))


# ---------------------------------------------------------------------------------- there and back


@backends
@pytest.mark.parametrize(("tokens", "slots", "experts"), SHAPES)
def test_combine_is_the_adjoint_of_dispatch(
    tokens: int, slots: int, experts: int, backend: str, device: torch.device
) -> None:
    """⟨dispatch(x), r⟩ = ⟨x, combine(r)⟩, and each is the other's gradient, to the bit."""
    preference = Preference(backend=backend)
    indices = _indices(tokens, slots, experts).to(device)
    x = _integers(tokens, 6).to(device).requires_grad_()
    rows, layout = moe.dispatch(x, indices, experts, preference=preference)
    upstream = _integers(tokens * slots, 6, seed=2).to(device).requires_grad_()
    y = moe.combine(upstream, None, layout, preference=preference)
    assert torch.equal((rows * upstream).sum(), (x * y).sum())
    (dx,) = torch.autograd.grad(rows, x, upstream.detach())
    assert torch.equal(dx, y)
    (drows,) = torch.autograd.grad(y, upstream, x.detach())
    assert torch.equal(drows, rows)


@backends
def test_special_values_of_rows_and_sums(backend: str, device: torch.device) -> None:
    """Rows are copied with every bit; sums, of numbers that are exact in any type, are IEEE sums that begin with +0."""
    preference, numbers = Preference(backend=backend), (0.0, -0.0, 1.0, -2.0, torch.inf, -torch.inf, torch.nan)
    indices = _indices(49, 2, 5).to(device)
    pairs = torch.cartesian_prod(*(torch.tensor(numbers),) * 2).to(device)  # those of a token's two slots
    x = pairs.clone()
    x.view(torch.int32)[-1, 0] = 0x7FC12345  # a NaN with a payload
    rows, layout = moe.dispatch(x.requires_grad_(), indices, 5, preference=preference)
    copied = x.detach()[layout.permutation.long() // 2]
    assert torch.equal(rows.detach().view(torch.int32), copied.view(torch.int32))
    upstream = torch.zeros_like(rows)
    upstream[layout.inverse.long().reshape(-1)] = pairs.reshape(-1, 1).expand(-1, 2)
    expected = (0.0 + pairs[:, :1] + pairs[:, 1:]).expand(-1, 2)
    (dx,) = torch.autograd.grad(rows, x, upstream)
    assert same_bits(dx, expected.contiguous())
    y = moe.combine(upstream, torch.ones_like(pairs), layout, preference=preference)
    assert same_bits(y, expected.contiguous())


@backends
def test_special_values_of_the_gradients_of_combine(backend: str, device: torch.device) -> None:
    """Of rows the IEEE product with the weight; of weights sums over the columns that begin with +0."""
    numbers = torch.tensor([0.0, -0.0, 2.0, -1.0, torch.inf, -torch.inf, torch.nan], device=device)
    dy, weights = (x[:, None] for x in torch.cartesian_prod(numbers, numbers).unbind(1))
    indices = _indices(49, 1, 5).to(device)
    _, layout = moe.dispatch(dy, indices, 5)
    rows, weights = torch.ones(49, 1, device=device).requires_grad_(), weights.contiguous().requires_grad_()
    y = moe.combine(rows, weights, layout, preference=Preference(backend=backend))
    drows, dweights = torch.autograd.grad(y, (rows, weights), dy.contiguous())
    assert same_bits(drows[layout.inverse.long()[:, 0]], dy * weights.detach())
    assert same_bits(dweights, 0.0 + dy * rows.detach())


@backends
def test_a_mixture_of_experts_by_hand(backend: str, device: torch.device) -> None:
    """User code between dispatch and combine: a matrix for each expert, beside a loop over tokens in float64."""
    experts, preference = 5, Preference(backend=backend)
    indices = _indices(12, 3, experts).to(device)
    x = _integers(12, 4).to(device).requires_grad_()
    weights = _integers(12, 3, seed=3).to(device).requires_grad_()
    matrices = _integers(experts, 4, 4, seed=4).to(device).requires_grad_()

    def ours() -> Tensor:
        rows, layout = moe.dispatch(x, indices, experts, preference=preference)
        parts = rows.split(layout.offsets.diff().tolist())
        rows = torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])
        return moe.combine(rows, weights, layout, preference=preference)

    def by_hand() -> Tensor:
        tokens = []
        for token in range(12):
            chosen = [x[token] @ matrices[indices[token, slot]] * weights[token, slot] for slot in range(3)]
            tokens.append(sum(chosen))
        return torch.stack(tokens)  # type: ignore[arg-type]

    upstream = _integers(12, 4, seed=5).to(device)
    results = [(y, *torch.autograd.grad(y, (x, weights, matrices), upstream)) for y in (ours(), by_hand())]
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


@backends
def test_nothing_but_what_is_needed_is_saved(backend: str, device: torch.device) -> None:
    """dispatch saves its layout; combine its rows only where the weights' gradient is wanted."""
    x = _values(6, 4).to(device).requires_grad_()
    preference = Preference(backend=backend)

    def saved(make: Callable[[], object]) -> int:
        tensors: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: tensors.append(t) or t, lambda t: t):
            make()
        return sum(t.is_floating_point() for t in tensors)

    rows, layout = moe.dispatch(x, _indices(6, 2, 3).to(device), 3, preference=preference)
    weights = torch.ones(6, 2, device=device)
    assert saved(lambda: moe.dispatch(x, _indices(6, 2, 3).to(device), 3, preference=preference)) == 0
    assert saved(lambda: moe.combine(rows, weights, layout, preference=preference)) == 1
    weights.requires_grad_()
    assert saved(lambda: moe.combine(rows.detach(), weights, layout, preference=preference)) == 2


# --------------------------------------------------------------------------------------- framework


@backends
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_pair_compiles_with_code_between(dynamic: bool, backend: str, device: torch.device) -> None:
    def layer(x: Tensor, indices: Tensor, weights: Tensor) -> tuple[Tensor, moe.Layout]:
        rows, layout = moe.dispatch(x, indices, 4, preference=Preference(backend=backend))
        sizes = layout.offsets.diff()
        return moe.combine(rows * (1 + sizes.sum()), weights, layout, preference=Preference(backend=backend)), layout

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (6, 9):
        x = _values(tokens, 5).to(device).requires_grad_()
        weights = _values(tokens, 2, seed=3).to(device).requires_grad_()
        indices = _indices(tokens, 2, 4).to(device)
        (y, layout), (expected, expected_layout) = compiled(x, indices, weights), layer(x, indices, weights)
        assert isinstance(layout, moe.Layout) and all(map(torch.equal, layout, expected_layout))
        gradients = [torch.autograd.grad(out.square().sum(), (x, weights)) for out in (y, expected)]
        assert torch.equal(y, expected) and all(map(torch.equal, *gradients))
    torch._dynamo.reset()


def test_plans_say_what_they_promise(device: torch.device) -> None:
    x, indices = (
        torch.empty(8, 16, dtype=torch.bfloat16, device="meta"),
        torch.empty(8, 2, dtype=torch.int64, device="meta"),
    )
    plan = adjoint.plan(moe.dispatch, x, indices, 4, device="cpu")
    assert plan.adjoint is not None
    assert plan.guarantee["rows"].flags == "repeatable, batch_invariant(token), device_invariant"
    assert plan.guarantee["inverse"].flags == "repeatable, batch_invariant(all of indices), device_invariant"
    assert plan.adjoint.guarantee["dx"].roundings == 1
    every_promise = Preference(repeatable=True, batch_invariant=True, device_invariant=True)
    assert adjoint.plan(moe.dispatch, x, indices, 4, device="cpu", preference=every_promise).name == plan.name
    rows, layout = moe.dispatch(torch.zeros(2, 3), torch.tensor([[0], [1]]), 2)
    plan = adjoint.plan(moe.combine, rows, torch.ones(2, 1), layout)
    assert plan.adjoint is not None and set(plan.adjoint.guarantee) == {"drows", "dweights"}
    assert f"dot_width={DOT_WIDTH}" in str(plan.adjoint.sku)


@pytest.mark.kernels
def test_the_kernels_refuse_what_they_cannot_number(device: torch.device) -> None:
    x = torch.empty(4, 2, device=device)
    indices = torch.zeros(4, 1, dtype=torch.int64, device=device)
    with pytest.raises(adjoint.Unsupported, match="at most 2048 experts, these are 2049"):
        moe.dispatch(x, indices, 2049, preference=Preference(backend="triton"))
    many = torch.empty(2**28 + 1, 0, device="meta"), torch.empty(2**28 + 1, 1, dtype=torch.int64, device="meta")
    with pytest.raises(adjoint.Unsupported, match=r"up to 268435456 tokens and entries, these are 268435457"):
        adjoint.plan(moe.dispatch, *many, 4, device=device, preference=Preference(backend="triton"))


def test_a_number_of_experts_of_numpy_is_a_number() -> None:
    indices = _indices(5, 2, 3)
    (rows, layout), (right, other) = (moe.dispatch(_values(5, 4), indices, number) for number in (np.int64(3), 3))
    assert torch.equal(rows, right) and all(map(torch.equal, layout, other))
