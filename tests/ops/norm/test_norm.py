"""The norms against formulations that share no code with them, the order of their sums, and what is their own."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.device.row_tiles import LEVELS, order
from adjoint.ops.norm import plans
from adjoint.ops.norm.rms_norm.cases import RESIDUAL
from adjoint.verify.checks.bits import same_bits
from adjoint.verify.run import differentiate, measure
from tests.promises import broken

BACKENDS = ["eager", pytest.param("triton", marks=pytest.mark.kernels)]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype)


def gradients(
    outputs: Tensor | tuple[Tensor, ...], inputs: tuple[Tensor, ...], *upstream: Tensor
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(outputs, inputs, upstream, allow_unused=True)


# ------------------------------------------------------------------------------ a second formulation


def torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, 1 + weight, 1e-6)


def torch_gated(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6) * F.silu(gate)


def torch_l2(x: Tensor) -> Tensor:
    """The length of a vector with one more element, the root of ε."""
    longer = torch.cat((x, x.new_full((*x.shape[:-1], 1), 1e-3)), -1)
    return x / torch.linalg.vector_norm(longer, dim=-1, keepdim=True)


@every_backend
@pytest.mark.parametrize("name", ["rms_norm", "gated_rms_norm", "l2_norm"])
def test_torch_and_its_autograd_agree(name: str, backend: str, device: torch.device) -> None:
    """In float64, of what we compute in float32."""
    ours, theirs, names, options = {
        "rms_norm": (adjoint.rms_norm, torch_rms_norm, ("x", "weight"), {"offset": 1.0}),
        "gated_rms_norm": (adjoint.gated_rms_norm, torch_gated, ("x", "gate", "weight"), {}),
        "l2_norm": (adjoint.l2_norm, torch_l2, ("x",), {}),
    }[name]
    shapes = [(33,) if x == "weight" else (7, 33) for x in names]
    inputs = tuple(normal(*shape, dtype=torch.float32, seed=i).to(device) for i, shape in enumerate(shapes))
    dy, preference = normal(7, 33, dtype=torch.float32, seed=5).to(device), Preference(backend=backend)
    leaves, exact = ([x.to(kind).requires_grad_() for x in inputs] for kind in (torch.float32, torch.float64))
    y, expected = ours(*leaves, preference=preference, **options), theirs(*exact)
    both = zip(gradients(y, tuple(leaves), dy), gradients(expected, tuple(exact), dy.double()), strict=True)
    results = {"y": (y, expected)} | {f"d{x}": pair for x, pair in zip(names, both, strict=True)}
    assert not broken(ours, inputs, results, (dy,), preference, **options)


# --------------------------------------------------------------------------------- the order of sums


def halved(values: Tensor, axis: int) -> Tensor:
    while values.shape[axis] > 1:
        first, second = values.chunk(2, axis)
        values = first + second
    return values.squeeze(axis)


def row_sum(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the last axis, in the order that `row_tiles` states."""
    levels = order(values.shape[-1], dtype)
    padding = sum(levels.values())
    padded = F.pad(values, (0, 2**padding - values.shape[-1]))
    parts = padded.reshape(-1, *(2 ** levels[name] for name in LEVELS))  # rows, groups, pieces, vectors, neighbours
    groups = halved(parts, 1)
    return halved(halved(halved(groups, 3), 2), 1)


def expected_bits(x: Tensor, weight: Tensor, dy: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dweight of rms_norm in float32, one IEEE operation after the other."""
    (rows, size), eps = x.shape, torch.tensor(1e-6)
    part = torch.tensor(1 / size)
    mean = row_sum(x * x, dtype) * part + eps
    r = (1 / torch.from_numpy(np.sqrt(mean.numpy())))[:, None]  # torch's root is not always the nearest number
    z, a = x * r, dy * weight
    m = row_sum(a * x, dtype)[:, None] * part * r
    tile, blocks = 2 ** plans.row_levels(size), plans.blocks_of(size, rows)
    terms = F.pad(dy * z, (0, 0, 0, -rows % tile)).view(-1, tile, size)
    sums = torch.zeros(blocks, tile, size)
    for index, term in enumerate(terms):
        sums[index % blocks] += term
    runs = halved(sums, 1).split(2**plans.RUN_LEVELS)
    dweight = torch.zeros(size)
    for run in runs:
        dweight += halved(F.pad(run, (0, 0, 0, 2**plans.RUN_LEVELS - len(run))), 0)
    return z * weight, (a - z * m) * r, dweight


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("rows", "size", "dtype"),
    [
        (21, 128, torch.bfloat16),
        (21, 128, torch.float32),
        (5, 1000, torch.bfloat16),
        (5, 1024, torch.float16),
        (3, 2048, torch.bfloat16),
        (3, 4096, torch.float32),
        (9, 100, torch.float32),
        (7, 1, torch.float32),
    ],
)
def test_bits_are_those_of_the_stated_order(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    x, dy, weight = normal(rows, size, dtype=dtype), normal(rows, size, dtype=dtype, seed=1), normal(size, seed=2)
    weight = weight.float()
    expected = expected_bits(x.float(), weight, dy.float(), dtype)
    x, weight = x.to(device).requires_grad_(), weight.to(device).requires_grad_()
    y = adjoint.rms_norm(x, weight, preference=Preference(backend="triton"))
    found = (y, *gradients(y, (x, weight), dy.to(device)))
    for name, ours, exact in zip(("y", "dx", "dweight"), found, expected, strict=True):
        assert torch.equal(ours.cpu(), exact.to(ours.dtype)), name


@pytest.mark.kernels
def test_more_blocks_than_one_run_are_added_in_order(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and runs made small, so that few rows fill several."""
    monkeypatch.setattr(plans, "most_blocks", lambda size: 5)
    kernels = pytest.importorskip("adjoint.ops.norm.kernels")
    for module in (plans, kernels):
        monkeypatch.setattr(module, "RUN_LEVELS", 1)
    adjoint.core.op.operator.forget()
    x, dy, weight = normal(150, 128).float(), normal(150, 128, seed=1).float(), normal(128, seed=2).float()
    expected = expected_bits(x, weight, dy, torch.float32)
    x, weight = x.to(device).requires_grad_(), weight.to(device).requires_grad_()
    y = adjoint.rms_norm(x, weight, preference=Preference(backend="triton"))
    assert torch.equal(gradients(y, (weight,), dy.to(device))[0].cpu(), expected[2])
    adjoint.core.op.operator.forget()


@pytest.mark.kernels
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_s_gradient_does_not_depend_on_its_batch(gated: bool, device: torch.device) -> None:
    """dweight does, so the shared check of batch invariance leaves this direction out."""

    def run(x: Tensor, gate: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        x, gate = x.detach().requires_grad_(), gate.detach().requires_grad_()
        weight, wanted = normal(72, dtype=torch.bfloat16, seed=9).to(device), Preference(backend="triton")
        if gated:
            return gradients(adjoint.gated_rms_norm(x, gate, weight, preference=wanted), (x, gate), dy)
        return gradients(adjoint.rms_norm(x, weight, preference=wanted), (x,), dy)

    tensors = [normal(37, 72, dtype=torch.bfloat16, seed=i).to(device) for i in range(3)]
    whole = run(*tensors)
    for rows in (slice(0, 1), slice(36, 37), slice(5, 30)):
        for alone, together in zip(run(*(t[rows] for t in tensors)), whole, strict=True):
            assert torch.equal(alone, together[rows])
    apart = run(*(torch.cat((t, t), -1)[:, :72] for t in tensors))
    shifted = run(*(torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape) for t in tensors))
    for moved in (apart, shifted):
        assert all(map(torch.equal, moved, whole))


# ------------------------------------------------------------------------------------------- edges


@every_backend
def test_zero_rows_of_the_last_tile_add_nothing(backend: str, device: torch.device) -> None:
    """With ε = 0 a row of zeros has r = ∞; rows past the end are such rows."""
    x = normal(5, 16, dtype=torch.float32).to(device).requires_grad_()
    weight = torch.ones(16, device=device, requires_grad=True)
    y = adjoint.rms_norm(x, weight, eps=0.0, preference=Preference(backend=backend))
    assert all(gradient.isfinite().all() for gradient in gradients(y, (x, weight), torch.ones_like(y)))


@every_backend
def test_either_output_of_a_residual_may_be_unused(backend: str, device: torch.device) -> None:
    wanted = Preference(backend=backend)
    x, residual = (normal(4, 24, dtype=torch.float32, seed=i).to(device).requires_grad_() for i in range(2))
    weight, up = normal(24, dtype=torch.float32, seed=3).to(device).requires_grad_(), torch.ones(4, 24, device=device)
    y, s = adjoint.rms_norm(x, weight, residual=residual, preference=wanted)
    dx, dweight, dresidual = gradients(s, (x, weight, residual), up)
    assert torch.equal(dx, up) and torch.equal(dresidual, up) and not dweight.any()
    y, s = adjoint.rms_norm(x, weight, residual=residual, preference=wanted)
    alone = gradients(y, (x, weight, residual), up)
    of_sum = s.detach().requires_grad_()
    expected = gradients(adjoint.rms_norm(of_sum, weight, preference=wanted), (of_sum, weight), up)
    assert all(map(torch.equal, alone, (*expected, expected[0])))
    (only,) = gradients(adjoint.rms_norm(x.detach(), weight, residual=residual, preference=wanted)[0], (residual,), up)
    assert torch.equal(only, expected[0])


@every_backend
def test_special_values_of_a_sum_are_those_of_a_row(backend: str, device: torch.device) -> None:
    """In float32 the sum is a row of its own: the norm of it, and its gradients, have the same bits."""
    wanted, special = Preference(backend=backend), (torch.nan, torch.inf, -torch.inf, -0.0)
    x, residual = (normal(9, 24, dtype=torch.float32, seed=i).to(device) for i in range(2))
    for row, number in enumerate(special):
        x[row, 3], residual[4 + row, 5] = number, number
    x[1, 3], residual[1, 3] = torch.inf, -torch.inf  # whose sum is NaN
    leaves = [t.requires_grad_() for t in (x, residual, normal(24, dtype=torch.float32, seed=3).to(device))]
    y, s = adjoint.rms_norm(leaves[0], leaves[2], residual=leaves[1], preference=wanted)
    up = normal(9, 24, dtype=torch.float32, seed=4).to(device)
    dx, dresidual = gradients(y, (leaves[0], leaves[1]), up)
    row = s.detach().requires_grad_()
    of_row = adjoint.rms_norm(row, leaves[2].detach(), preference=wanted)
    (drow,) = gradients(of_row, (row,), up)
    assert same_bits(s.detach(), (x + residual).detach())
    assert same_bits(y.detach(), of_row.detach()) and same_bits(dx, drow) and same_bits(dresidual, drow)
    assert y[0].isnan().all() and y[2].isnan().sum() == 1 and not y[2, :3].any()


@every_backend
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["rms_norm", "gated_rms_norm", "l2_norm"])
def test_special_values_reach_what_is_stated(name: str, value: float, backend: str, device: torch.device) -> None:
    """A NaN or an infinity of x makes its row of dx NaN, and what the words of each other result say."""
    function = getattr(adjoint, name)
    names = {"rms_norm": ("x", "weight"), "gated_rms_norm": ("x", "gate", "weight"), "l2_norm": ("x",)}[name]
    leaves = {
        n: normal(*((24,) if n == "weight" else (9, 24)), dtype=torch.float32, seed=i) for i, n in enumerate(names)
    }
    leaves["x"][3, 5] = value
    leaves = {n: t.to(device).requires_grad_() for n, t in leaves.items()}
    plan = adjoint.plan(function, *leaves.values(), preference=Preference(backend=backend))
    y = function(*leaves.values(), preference=Preference(backend=backend))
    up = normal(9, 24, dtype=torch.float32, seed=4).to(device)
    up[3] = 0.0  # though nothing comes from this row, and another has a NaN of its own
    up[6, 2] = torch.nan
    found = dict(zip((f"d{n}" for n in names), gradients(y, tuple(leaves.values()), up), strict=True))
    column, others = torch.arange(24, device=device) == 5, [0, 1, 2, 4, 5, 7, 8]
    of_row = torch.ones_like(column) if value != value else column
    for result in (y.detach(), *([found["dgate"]] if "gate" in names else [])):
        assert torch.equal(result[3].isnan(), of_row) and not result[3][~of_row].any()
        assert result[others].isfinite().all()
    assert found["dx"][[3, 6]].isnan().all() and found["dx"][others].isfinite().all()
    assert "an infinity in a row of x makes all of it NaN" in plan.adjoint.guarantee["dx"].special_values
    assert "an infinity gives NaN where it stands and 0 elsewhere" in plan.guarantee["y"].special_values
    if "dweight" in found:
        assert torch.equal(found["dweight"].isnan(), of_row | (torch.arange(24, device=device) == 2))
        assert "an infinity gives NaN in its column" in plan.adjoint.guarantee["dweight"].special_values


def test_x_and_residual_accumulate_apart() -> None:
    x, residual = normal(2, 4).requires_grad_(), normal(2, 4, seed=1).requires_grad_()
    y, s = adjoint.rms_norm(x, torch.ones(4, dtype=torch.float64), residual=residual)
    (y.sum() + s.sum()).backward()
    assert x.grad is not None and residual.grad is not None
    before = residual.grad.clone()
    x.grad.zero_()
    assert torch.equal(residual.grad, before)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_closed_gate_gives_minus_zero(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    x, weight = torch.ones(2, 8, dtype=dtype, device=device), torch.ones(8, dtype=dtype, device=device)
    gate = torch.tensor([[-torch.inf], [torch.inf]], dtype=dtype, device=device).repeat(1, 8).requires_grad_()
    y = adjoint.gated_rms_norm(x, gate, weight, eps=0.0, preference=Preference(backend=backend))
    (slope,) = gradients(y, (gate,), torch.ones_like(y))
    assert (y[0] == 0).all() and y[0].signbit().all() and (y[1] == torch.inf).all()
    assert (slope[0] == 0).all() and (slope[1] == 1).all()


@pytest.mark.parametrize("size", [16385, 32768])
def test_rows_too_wide_for_a_program_are_eager(size: int, device: torch.device) -> None:
    x = torch.empty(2, size, dtype=torch.bfloat16, device="meta")
    plan = adjoint.plan(adjoint.rms_norm, x, torch.empty(size, dtype=torch.bfloat16, device="meta"))
    assert plan.name == "eager"
    assert dict(plan.others)["triton.rows"] == (
        "has rows of up to 32768 bytes, padded to a power of two; these have 65536"
    )


@pytest.mark.kernels
def test_a_sku_names_the_order_of_dweight(device: torch.device) -> None:
    x, weight = torch.empty(64, 128, device=device), torch.empty(128, device=device)
    adjoint_plan = adjoint.plan(adjoint.rms_norm, x, weight).adjoint
    assert adjoint_plan is not None
    assert "row_levels=4" in str(adjoint_plan.sku) and "most_blocks=660" in str(adjoint_plan.sku)
    assert adjoint_plan.workspace_bytes == 4 * 128 * 4 + 256
    assert "number of rows" in adjoint_plan.guarantee["dweight"].domain
    assert adjoint_plan.guarantee["dx"].batch_invariant == "row"
    assert not adjoint_plan.guarantee["dweight"].batch_invariant


# -------------------------------------------------------------------------------- a row that broke a bound


@every_backend
def test_a_residual_that_rounds_the_worst_way(backend: str, device: torch.device) -> None:
    """Large numbers of s are rounded down, small ones up, and dx is r·z·mean(a·z) of small ones: off by five roundings
    and thirteen products of two, which 5.01·u does not cover."""
    rows, large, size, u = 256, 56, 64, 2.0**-8
    small = 2.0**-20
    x = torch.cat((torch.ones(large), torch.full((size - large,), small))).expand(rows, size)
    residual = torch.cat((torch.full((large,), u), torch.full((size - large,), small * u * (1 + 2 * u))))
    dy = torch.zeros(rows, size)
    dy[:, large:-1] = 1 + torch.rand(rows, size - 1 - large, generator=torch.Generator().manual_seed(0))
    inputs = (x, torch.ones(size), residual.expand(rows, size))
    inputs = tuple(t.to(torch.bfloat16).contiguous().to(device) for t in inputs)
    upstream = (dy.to(torch.bfloat16).to(device), torch.zeros(rows, size, dtype=torch.bfloat16, device=device))
    found = differentiate(RESIDUAL, inputs, upstream, Preference(backend=backend))
    shares = {name: measured.value for name, measured in measure(found).items()}
    assert max(shares.values()) <= 1.0, shares
    if backend == "eager":
        assert shares["dx"] > 0.98, shares
