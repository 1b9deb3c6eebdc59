"""Bags: against torch, empty ones, ties, special values, the order of sums, and gradients in part."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.device.sums import sum_bound
from adjoint.ops.embedding.bag import reference
from adjoint.verify.checks.bits import same_bits
from tests.ops.embedding.sums import in_tiles

MODES = ["sum", "mean", "max"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
every_backend = pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=pytest.mark.kernels)])
every_mode = pytest.mark.parametrize("mode", MODES)

ROWS, COLUMNS = 12, 5


class Bags(NamedTuple):
    """Ids and where their bags are."""

    ids: Tensor
    offsets: Tensor | None = None
    include_last_offset: bool = False

    def entries(self) -> list[Tensor]:
        return reference.bags_of(self.ids, self.offsets, self.include_last_offset)


def _ids(*values: int) -> Tensor:
    return torch.tensor(values)


IDS = _ids(3, 7, 7, 1, 2, 9, 0, 3, 5, 7, 2, 2)

LAYOUTS = {
    "matrix": Bags(IDS.view(4, 3)),
    "offsets": Bags(IDS, _ids(0, 1, 5, 9)),
    "empty first, middle and last": Bags(IDS, _ids(0, 0, 0, 4, 4, 11, 12, 12)),
    "last offset": Bags(IDS, _ids(0, 0, 6, 6, 12, 12), True),
    "entries past the last offset": Bags(IDS, _ids(0, 4, 4, 9), True),
    "no entries": Bags(IDS[:0], _ids(0, 0, 0)),
    "no bags": Bags(IDS[:0], IDS[:0]),
    "matrix of no rows": Bags(IDS[:0].view(0, 3)),
}
QUICK = [
    ("matrix", None),
    ("empty first, middle and last", 7),
    ("entries past the last offset", 2 - ROWS),
    ("no entries", None),
]
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def _on(device: torch.device, bags: Bags) -> Bags:
    offsets = None if bags.offsets is None else bags.offsets.to(device)
    return bags._replace(ids=bags.ids.to(device), offsets=offsets)


def _normal(*shape: int, device: torch.device, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(device)


def _weight(device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """No two elements of a column are equal."""
    return _normal(ROWS, COLUMNS, device=device, dtype=dtype).requires_grad_()


def _call(bags: Bags, weight: Tensor, per_sample_weights: Tensor | None = None, **options: Any) -> Tensor:
    out = adjoint.embedding_bag(
        bags.ids,
        weight,
        bags.offsets,
        per_sample_weights=per_sample_weights,
        include_last_offset=bags.include_last_offset,
        **options,
    )
    adjoint.check()
    return out


def _by_torch(
    bags: Bags, inputs: list[Tensor], dout: Tensor, mode: str, padding_idx: int | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What torch says on the CPU; of entries past the last offset it counts some in the mean, so they are left out."""
    weight, *factors = (tensor.detach().cpu().requires_grad_() for tensor in inputs)
    ids, offsets = (None if tensor is None else tensor.cpu() for tensor in (bags.ids, bags.offsets))
    assert ids is not None
    end = int(offsets[-1]) if offsets is not None and bags.include_last_offset else len(ids)
    out = torch.nn.functional.embedding_bag(
        ids[:end],
        weight,
        offsets,
        per_sample_weights=factors[0][:end] if factors else None,
        mode=mode,
        padding_idx=padding_idx,
        include_last_offset=bags.include_last_offset,
    )
    gradients = torch.autograd.grad(out, (weight, *factors), dout.cpu(), allow_unused=True, materialize_grads=True)
    return out.detach().to(dout.device), tuple(gradient.to(dout.device) for gradient in gradients)


# ------------------------------------------------------------------------------------- against torch


@every_backend
@every_mode
@every_layout
@pytest.mark.parametrize("padding_idx", [None, 7, 2 - ROWS])
def test_bags_are_those_of_torch(
    padding_idx: int | None, layout: str, mode: str, backend: str, device: torch.device, quick: bool
) -> None:
    """Values and gradients, in float64, within the stated error."""
    if quick and (layout, padding_idx) not in QUICK:
        pytest.skip("the ordinary process runs this, and a GPU")
    bags, weight, preference = _on(device, LAYOUTS[layout]), _weight(device), Preference(backend=backend)
    out = _call(bags, weight, mode=mode, padding_idx=padding_idx, preference=preference)
    dout = _normal(*out.shape, device=device, seed=1)
    (dweight,) = torch.autograd.grad(out, weight, dout)
    expected, (expected_gradient,) = _by_torch(bags, [weight], dout, mode, padding_idx)
    plan = adjoint.plan(
        adjoint.embedding_bag,
        bags.ids,
        weight,
        bags.offsets,
        mode=mode,
        padding_idx=padding_idx,
        include_last_offset=bags.include_last_offset,
        preference=preference,
    )
    assert plan.adjoint is not None and (plan.backend, plan.adjoint.backend) == (backend, backend)
    inputs = (bags.ids, weight.detach(), bags.offsets)
    assert out.shape == expected.shape
    assert plan.guarantee["out"].error.measure(out.detach(), expected, *inputs).holds
    assert plan.adjoint.guarantee["dweight"].error.measure(dweight, expected_gradient, dout, *inputs).holds


@every_backend
@every_layout
@pytest.mark.parametrize("padding_idx", [None, 7])
def test_per_sample_weights_are_those_of_torch(
    padding_idx: int | None, layout: str, backend: str, device: torch.device, quick: bool
) -> None:
    if quick and (padding_idx or layout not in ("matrix", "entries past the last offset", "no entries")):
        pytest.skip("the ordinary process runs this, and a GPU")
    bags, weight = _on(device, LAYOUTS[layout]), _weight(device).detach().mul(64).round().requires_grad_()
    factors = _normal(*bags.ids.shape, device=device, seed=2).mul(64).round().requires_grad_()  # integers: exact
    preference = Preference(backend=backend)
    out = _call(bags, weight, factors, mode="sum", padding_idx=padding_idx, preference=preference)
    dout = _normal(*out.shape, device=device, seed=1).mul(64).round()
    expected, theirs = _by_torch(bags, [weight, factors], dout, "sum", padding_idx)
    assert torch.equal(out, expected)
    assert all(map(torch.equal, torch.autograd.grad(out, (weight, factors), dout), theirs))


@every_backend
@every_mode
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_every_type(
    mode: str, dtype: torch.dtype, index: torch.dtype, backend: str, device: torch.device, quick: bool
) -> None:
    """Ids of one type and offsets of the other, against the reference in float64."""
    if quick and (dtype, index) not in ((torch.bfloat16, torch.int32), (torch.float64, torch.int64)):
        pytest.skip("the ordinary process runs this, and a GPU")
    other = torch.int64 if index == torch.int32 else torch.int32
    bags = Bags(IDS.to(index).to(device), _ids(0, 5, 5, 8).to(other).to(device))
    weight, preference = _weight(device, dtype), Preference(backend=backend)
    out = _call(bags, weight, mode=mode, preference=preference)
    dout = _normal(*out.shape, device=device, dtype=dtype, seed=1)
    (dweight,) = torch.autograd.grad(out, weight, dout)
    assert (out.dtype, dweight.dtype) == (dtype, dtype)
    wide = weight.detach().double().requires_grad_()
    exact = reference.embedding_bag(bags.ids, wide, bags.offsets, mode=mode)
    (exact_gradient,) = torch.autograd.grad(exact, wide, dout.double())
    plan = adjoint.plan(adjoint.embedding_bag, bags.ids, weight, bags.offsets, mode=mode, preference=preference)
    assert plan.adjoint is not None
    inputs = (bags.ids, wide.detach(), bags.offsets)
    assert plan.guarantee["out"].error.measure(out.detach(), exact.detach(), *inputs).holds
    assert plan.adjoint.guarantee["dweight"].error.measure(dweight, exact_gradient, dout.double(), *inputs).holds


# ------------------------------------------------------------------------------- rules of each mode


@every_backend
@every_mode
def test_an_empty_bag_is_positive_zero(mode: str, backend: str, device: torch.device) -> None:
    """Also one that holds nothing but padding; the rows of other bags do not matter."""
    weight = torch.full((ROWS, COLUMNS), float("nan"), device=device).requires_grad_()
    bags = Bags(_ids(4, 2, 2).to(device), _ids(0, 0, 1, 3).to(device))
    out = _call(bags, weight, mode=mode, padding_idx=2, preference=Preference(backend=backend))
    empty = out.detach()[[0, 2, 3]]
    assert same_bits(empty, torch.zeros_like(empty))
    assert out[1].isnan().all()
    dout = torch.full_like(out, float("inf"))
    dout[1] = 1.0
    (dweight,) = torch.autograd.grad(out, weight, dout)
    assert dweight[4].tolist() == [1.0] * COLUMNS
    rest = dweight[[row for row in range(ROWS) if row != 4]]
    assert same_bits(rest, torch.zeros_like(rest))


@every_backend
@every_mode
@pytest.mark.parametrize(
    ("bags", "count"),
    [(Bags(IDS[:0].view(3, 0)), 3), (Bags(IDS, IDS[:0]), 0), (Bags(IDS, _ids(0), True), 0)],
    ids=["bags of no entries", "entries of no bags", "entries past the end of no bags"],
)
def test_bags_without_entries_and_entries_without_bags(
    bags: Bags, count: int, mode: str, backend: str, device: torch.device
) -> None:
    weight = _weight(device)
    out = _call(_on(device, bags), weight, mode=mode, preference=Preference(backend=backend))
    assert same_bits(out.detach(), weight.new_zeros(count, COLUMNS))
    (dweight,) = torch.autograd.grad(out, weight, torch.ones_like(out))
    assert same_bits(dweight, torch.zeros_like(weight))


@every_backend
def test_the_first_of_equal_entries_wins(backend: str, device: torch.device) -> None:
    """In each column by itself; +0 and −0 are equal."""
    table = [[1.0, 5.0, 0.0], [2.0, 5.0, -0.0], [2.0, 5.0, -1.0], [-3.0, 4.0, 0.0]]
    weight = torch.tensor(table, device=device, requires_grad=True)
    bags = Bags(_ids(3, 1, 2, 0, 1, 2, 0, 1).to(device).view(2, 4))
    out = _call(bags, weight, mode="max", preference=Preference(backend=backend))
    assert out.tolist() == [[2.0, 5.0, 0.0], [2.0, 5.0, 0.0]]
    assert out.signbit().tolist() == [[False, False, False], [False, False, True]]
    (dweight,) = torch.autograd.grad(out, weight, torch.tensor([[1.0] * 3, [10.0] * 3], device=device))
    assert dweight.tolist() == [[0, 0, 0], [11, 11, 10], [0, 0, 0], [0, 0, 1]]


@every_backend
def test_the_maximum_of_special_values(backend: str, device: torch.device) -> None:
    """NaN is above every number, and the first of several wins; −inf is a value, not the absence of one."""
    inf, nan = math.inf, math.nan
    table = [[1.0, inf, -inf, nan, -inf], [nan, 2.0, -inf, nan, -5.0], [3.0, inf, -inf, 1.0, nan]]
    weight = torch.tensor(table, device=device, requires_grad=True)
    out = _call(Bags(_ids(0, 1, 2).to(device)[None]), weight, mode="max", preference=Preference(backend=backend))
    expected = torch.tensor([[nan, inf, -inf, nan, nan]], device=device)
    assert same_bits(out.detach(), expected)
    assert same_bits(reference.embedding_bag(_ids(0, 1, 2)[None], weight.detach().cpu(), mode="max"), expected.cpu())
    (dweight,) = torch.autograd.grad(out, weight, torch.arange(1.0, 6.0, device=device)[None])
    assert dweight.tolist() == [[0, 2, 3, 4, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 5]]


@every_backend
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_sums_of_special_values(mode: str, backend: str, device: torch.device) -> None:
    """IEEE sums that begin with +0: no −0 comes out, opposite infinities are NaN."""
    inf, nan = math.inf, math.nan
    table = [[-0.0, inf, inf, nan, 1.0], [-0.0, 1.0, -inf, 1.0, -1.0]]
    weight = torch.tensor(table, device=device)
    out = _call(Bags(_ids(0, 1).to(device)[None]), weight, mode=mode, preference=Preference(backend=backend))
    assert same_bits(out, torch.tensor([[0.0, inf, nan, nan, 0.0]], device=device))


@every_backend
def test_the_mean_counts_what_counts(backend: str, device: torch.device) -> None:
    """Not padding; the divisor is theirs in both directions."""
    weight = torch.arange(1.0, 5.0, device=device)[:, None].requires_grad_()
    bags = Bags(_ids(0, 3, 3, 1, 2, 3, 1).to(device), _ids(0, 3, 6).to(device))
    out = _call(bags, weight, mode="mean", padding_idx=-1, preference=Preference(backend=backend))
    assert out.tolist() == [[1.0], [2.5], [2.0]]
    (dweight,) = torch.autograd.grad(out, weight, torch.tensor([[1.0], [8.0], [64.0]], device=device))
    assert dweight.tolist() == [[1.0], [68.0], [4.0], [0.0]]


@every_backend
def test_weights_of_padding_do_not_matter(backend: str, device: torch.device) -> None:
    """Not even NaN, and their gradient is 0."""
    weight = _weight(device, torch.float32)
    factors = torch.tensor([[2.0, math.nan], [math.inf, -1.0]], device=device, requires_grad=True)
    bags = Bags(_ids(1, 4, 4, 3).to(device).view(2, 2))
    preference = Preference(backend=backend)
    out = _call(bags, weight, factors, mode="sum", padding_idx=4, preference=preference)
    assert torch.equal(out, torch.stack((2 * weight[1], -weight[3])))
    dweight, dfactors = torch.autograd.grad(out.sum(), (weight, factors))
    assert dweight[[1, 3, 4]].unique(dim=1).tolist() == [[2.0], [-1.0], [0.0]]
    assert dfactors[0, 1] == 0 and dfactors[1, 0] == 0 and dfactors[0, 0] != 0


# --------------------------------------------------------------------------------- the order of sums


@every_backend
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("length", [32, 33, 70, 1024, 1025, 1100, 2100])
def test_a_long_bag_is_the_tree_of_tiles(
    length: int, mode: str, backend: str, device: torch.device, quick: bool
) -> None:
    if quick and (length != 70 or mode == "mean"):
        pytest.skip("the ordinary process runs this, and a GPU")
    weight = _normal(ROWS, COLUMNS, device=device, dtype=torch.float32)
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(ROWS, (length + 5,), generator=generator).to(device)
    bags = Bags(ids, _ids(0, 3, length + 3).to(device))  # it begins at an odd place, between two short ones
    out = _call(bags, weight, mode=mode, preference=Preference(backend=backend))
    total = in_tiles(weight[ids[3 : length + 3]].unbind(), weight.new_zeros(COLUMNS))
    expected = total.cpu() / length if mode == "mean" else total.cpu()  # on a GPU torch multiplies by a reciprocal
    assert same_bits(out[1].cpu(), expected)


@every_backend
@pytest.mark.parametrize("length", [33, 1100])
def test_factors_are_rounded_before_they_are_added(
    length: int, backend: str, device: torch.device, quick: bool
) -> None:
    """No fused multiply-add: products are the terms of the tree, in the forward and for the table."""
    if quick and length != 33:
        pytest.skip("the ordinary process runs this, and a GPU")
    weight = _normal(ROWS, 2, device=device, dtype=torch.float32).requires_grad_()
    factors = _normal(1, length, device=device, dtype=torch.float32, seed=1)
    bags = Bags(torch.full((1, length), 4, device=device))
    out = _call(bags, weight, factors, mode="sum", preference=Preference(backend=backend))
    zero = weight.new_zeros(2)
    assert same_bits(out[0], in_tiles((factors[0][:, None] * weight[4]).unbind(), zero))
    dout = _normal(1, 2, device=device, dtype=torch.float32, seed=2)
    (dweight,) = torch.autograd.grad(out, weight, dout)
    assert same_bits(dweight[4], in_tiles((factors[0][:, None] * dout).unbind(), zero))


@every_backend
@pytest.mark.parametrize("columns", [1, 5, 128, 131, 700])
def test_the_gradient_of_a_factor_adds_columns_apart_then_halves(
    columns: int, backend: str, device: torch.device, quick: bool
) -> None:
    if quick and columns not in (5, 131):
        pytest.skip("the ordinary process runs this, and a GPU")
    weight = _normal(3, columns, device=device, dtype=torch.float32)
    factors = torch.ones(1, 2, device=device, requires_grad=True)
    out = _call(Bags(_ids(2, 0).to(device)[None]), weight, factors, mode="sum", preference=Preference(backend=backend))
    dout = _normal(1, columns, device=device, dtype=torch.float32, seed=1)
    (dfactors,) = torch.autograd.grad(out, factors, dout)
    for got, row in zip(dfactors[0], (2, 0), strict=True):
        products = torch.nn.functional.pad(dout[0] * weight[row], (0, -columns % 128)).view(-1, 128)
        lanes = sum(products, start=products.new_zeros(128))
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        assert same_bits(got, lanes[0])


# ------------------------------------------------------------------------------------ other batches


@every_backend
@every_mode
def test_a_bag_has_the_same_bits_in_every_batch(mode: str, backend: str, device: torch.device) -> None:
    """As a row of a matrix, between offsets, and alone."""
    weight, preference = _normal(ROWS, COLUMNS, device=device, dtype=torch.bfloat16), Preference(backend=backend)
    ids = IDS.to(device)
    matrix = _call(Bags(ids.view(2, 6)), weight, mode=mode, preference=preference)
    ragged = _call(Bags(ids, _ids(0, 2, 6).to(device)), weight, mode=mode, preference=preference)
    alone = _call(Bags(ids[6:].clone(), _ids(0).to(device)), weight, mode=mode, preference=preference)
    assert same_bits(matrix[1], ragged[2]) and same_bits(matrix[1], alone[0])


# ------------------------------------------------------------------------------------------- layouts


@every_backend
def test_any_strides(backend: str, device: torch.device) -> None:
    """Of ids, offsets, factors, the table, and the gradient that arrives."""
    preference = Preference(backend=backend)

    def spread(tensor: Tensor) -> Tensor:
        return torch.stack((tensor, tensor + 50), -1).flatten(-2)[..., ::2]

    factors = _normal(12, device=device, seed=2)
    plain = (IDS.to(device), _weight(device).detach(), _ids(0, 2, 2, 8).to(device), factors)
    dout = _normal(4, COLUMNS, device=device, seed=1)
    results = []
    for arrange in (lambda tensor: tensor, spread):
        ids, weight, offsets, weights = map(arrange, plain)
        weight, weights = weight.requires_grad_(), weights.requires_grad_()
        out = _call(Bags(ids, offsets), weight, weights, mode="sum", preference=preference)
        results.append((out, *torch.autograd.grad(out, (weight, weights), arrange(dout))))
    assert all(map(same_bits, *results))

    ids, weight = plain[0].view(3, 4).T, _weight(device)
    expected = torch.nn.functional.embedding_bag(ids, weight, mode="max")
    out = _call(Bags(ids), weight, mode="max", preference=preference)
    assert torch.equal(out, expected)
    ours, theirs = (torch.autograd.grad(result.sum(), weight)[0] for result in (out, expected))
    assert torch.equal(ours, theirs)


# ------------------------------------------------------------------------------- gradients in part


@every_backend
def test_gradients_are_computed_for_those_who_ask(backend: str, device: torch.device) -> None:
    bags, preference = Bags(IDS.to(device).view(4, 3)), Preference(backend=backend)
    weight, factors = _weight(device), _normal(4, 3, device=device, seed=2).requires_grad_()
    both = torch.autograd.grad(_call(bags, weight, factors, mode="sum", preference=preference).sum(), (weight, factors))
    for differentiable, expected in zip((weight, factors), both, strict=True):
        tensors = [tensor if tensor is differentiable else tensor.detach() for tensor in (weight, factors)]
        out = _call(bags, *tensors, mode="sum", preference=preference)
        (gradient,) = torch.autograd.grad(out.sum(), differentiable)
        assert same_bits(gradient, expected)
    plain = _call(bags, weight.detach(), factors.detach(), mode="sum", preference=preference)
    assert not plain.requires_grad


@pytest.mark.parametrize("need", [1, 2, 3])
def test_a_gradient_nobody_needs_is_not_there(need: int, device: torch.device) -> None:
    weight, ids = _weight(device).detach(), IDS.to(device).view(4, 3)
    factors, dout = _normal(4, 3, device=device), _normal(4, COLUMNS, device=device)
    extra = torch.empty(0, dtype=torch.int32, device=device)
    results = torch.ops.adjoint.embedding_bag_backward(
        dout, ids, weight if need & 2 else None, None, factors, extra, ROWS, "sum", -1, False, need, ""
    )
    assert [tensor.numel() > 0 for tensor in results] == [bool(need & 1), bool(need & 2)]


@every_mode
def test_the_table_is_not_kept_for_its_own_gradient(mode: str, device: torch.device) -> None:
    """It may change between forward and backward: only the gradient of per-sample weights reads it."""
    weight, bags = _weight(device), Bags(IDS.to(device).view(4, 3))
    factors = _normal(4, 3, device=device, seed=2) if mode == "sum" else None
    expected, again = (_call(bags, weight, factors, mode=mode).sum() for _ in range(2))
    (before,) = torch.autograd.grad(expected, weight)
    with torch.no_grad():
        weight.neg_()
    (after,) = torch.autograd.grad(again, weight)
    assert same_bits(before, after)
    if factors is not None:
        out = _call(bags, weight, factors.requires_grad_(), mode=mode).sum()
        with torch.no_grad():
            weight.neg_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


@every_mode
def test_gradcheck(mode: str, device: torch.device) -> None:
    bags, weight = _on(device, LAYOUTS["empty first, middle and last"]), _weight(device)
    factors = _normal(12, device=device, seed=2).requires_grad_() if mode == "sum" else None

    def function(weight: Tensor, *factors: Tensor) -> Tensor:
        return _call(bags, weight, *factors, mode=mode, padding_idx=1)

    inputs = (weight,) if factors is None else (weight, factors)
    assert torch.autograd.gradcheck(function, inputs)


# ------------------------------------------------------------------------------------- torch.compile


@every_backend
@every_mode
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool, mode: str, backend: str, device: torch.device, compiled: Callable[..., Any]) -> None:
    def bag(ids: Tensor, weight: Tensor, offsets: Tensor | None, factors: Tensor | None) -> Tensor:
        return adjoint.embedding_bag(
            ids, weight, offsets, per_sample_weights=factors, mode=mode, preference=Preference(backend=backend)
        )

    function = compiled(bag, dynamic=dynamic)
    for count in (6, 12):
        factors = _normal(count, device=device, seed=2).requires_grad_() if mode == "sum" else None
        offsets = torch.arange(0, count, 2, device=device)
        leaves = [tensor for tensor in (_weight(device), factors) if tensor is not None]
        results = []
        for call in (function, bag):
            out = call(IDS[:count].to(device), leaves[0], offsets, factors)
            results.append((out, *torch.autograd.grad(out, leaves, _normal(*out.shape, device=device, seed=1))))
        assert all(map(same_bits, *results))


@every_mode
def test_operators_are_registered_right(mode: str, device: torch.device) -> None:
    weight, ids, offsets = _weight(device).detach(), IDS.to(device), _ids(0, 4, 4).to(device)
    factors = _normal(12, device=device) if mode == "sum" else None
    options = (mode, -1, False)
    forward, backward = torch.ops.adjoint.embedding_bag.default, torch.ops.adjoint.embedding_bag_backward.default
    out, extra = forward(ids, weight, offsets, factors, *options, True, "")
    torch.library.opcheck(forward, (ids, weight, offsets, factors, *options, True, ""))
    need = 1 if factors is None else 3
    torch.library.opcheck(backward, (out, ids, weight, offsets, factors, extra, ROWS, *options, need, ""))


# -------------------------------------------------------------------------------------------- memory


@pytest.mark.kernels
@pytest.mark.parametrize("layout", ["matrix", "last offset"])
def test_the_stated_workspace_is_enough(layout: str, device: torch.device) -> None:
    """At an odd address, poisoned, with nothing written beside it; copies of what is strided included."""
    bags, weight = _on(device, LAYOUTS[layout]), _weight(device).detach()
    factors = _normal(*bags.ids.shape, device=device).repeat_interleave(2, -1)[..., ::2]
    options: dict[str, Any] = {"mode": "sum", "include_last_offset": bags.include_last_offset}
    plan = adjoint.plan(adjoint.embedding_bag, bags.ids, weight, bags.offsets, factors, **options)
    assert plan.adjoint is not None
    inputs = (bags.ids, weight, bags.offsets, factors)
    expected = _call(bags, weight, factors.contiguous(), mode="sum")
    dout = _normal(*expected.shape, device=device, seed=1)
    runs = ((plan, inputs), (plan.adjoint, (dout, *inputs, torch.empty(0, dtype=torch.int32, device=device))))
    for chosen, arguments in runs:
        needed = chosen.workspace_bytes
        assert needed
        memory = torch.full((needed + 64,), 0xAB, dtype=torch.uint8, device=device)
        with_memory = chosen.run(*arguments, workspace=memory[33 : 33 + needed])
        assert all(map(same_bits, with_memory, chosen.run(*arguments)))
        assert (memory[:33] == 0xAB).all() and (memory[33 + needed :] == 0xAB).all()
        with pytest.raises(adjoint.ArgumentError, match=f"too small: {needed} bytes are needed"):
            chosen.run(*arguments, workspace=memory[: needed - 1])
    assert same_bits(plan.run(*inputs)[0], expected)


def test_the_bound_of_products_that_underflow_in_float64() -> None:
    """Each may be off by half of the smallest number, however small they are: numbers that float32 has not."""
    smallest, exact = 2.0**-1074, torch.full((1,), 5 * 2.0**-1074, dtype=torch.float64)
    assert float(sum_bound(exact, exact, torch.tensor([3]), torch.tensor([4]), torch.float64)) >= 3 * smallest
