"""The expert layer: what only it knows. The shared checks are in test_contract."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint import ArgumentError, Preference, moe
from adjoint.core.launch import Setup
from adjoint.core.problem import Problem
from adjoint.ops.moe.experts import eager, plans, reference
from adjoint.ops.moe.experts.cases import EXPERTS
from adjoint.ops.moe.layout import Layout
from adjoint.ops.moe.layout import allocate as allocate_layout
from adjoint.ops.moe.layout.eager import write as write_layout
from adjoint.verify.run import compare, differentiate, directions_of

BACKENDS = [pytest.param("triton", marks=pytest.mark.kernels), pytest.param("eager")]
backends = pytest.mark.parametrize("backend", BACKENDS)

NAMES = ("y", "dx", "dgate_up", "ddown", "dweights")


def _layer(
    tokens: int, columns: int, experts: int, inner: int, slots: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """x, gate_up, down, indices and weights; an expert may be asked for twice by one token."""
    generator = torch.Generator().manual_seed(tokens + columns)

    def values(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    return [
        values(tokens, columns),
        values(experts, 2 * inner, columns, scale=max(columns, 1) ** -0.5),
        values(experts, columns, inner, scale=max(inner, 1) ** -0.5),
        torch.randint(experts, (tokens, slots), generator=generator),
        values(tokens, slots),
    ]


def _upstream(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype).to(x.device)


def _run(inputs: list[Tensor], backend: str | None = None, lost: int | None = None) -> tuple[Tensor, ...]:
    """The output and all gradients. The upstream gradient of the token `lost` is NaN."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
    y = moe.experts(*leaves, preference=Preference(backend=backend) if backend else None)
    floating = [t for t in leaves if t.is_floating_point()]
    upstream = _upstream(y)
    if lost is not None:
        upstream[lost] = float("nan")
    return y.detach(), *torch.autograd.grad(y, floating, upstream)


def _exact(inputs: list[Tensor]) -> tuple[Tensor, ...]:
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    return reference.experts(*wide), *reference.experts_backward(_upstream(inputs[0]).double(), *wide)


@pytest.mark.parametrize("dtype", plans.CEILINGS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_equal_calls_on_the_cpu_have_equal_bits(threads: int, dtype: torch.dtype) -> None:
    """Products large enough to be shared among threads, of copies that lie elsewhere in memory."""
    inputs, before = _layer(300, 192, 5, 160, 2, dtype), torch.get_num_threads()
    plan = adjoint.plan(moe.experts, *inputs, preference=Preference(backend="eager", repeatable=True))
    assert plan.name == "eager.grouped" and plan.adjoint is not None and plan.adjoint.name == "eager.grouped"
    assert "equal numbers of threads" in plan.guarantee["y"].domain
    torch.set_num_threads(threads)
    try:
        first, others = _run(inputs, "eager"), []
        for _ in range(5):
            others.append([t.clone() for t in inputs])  # kept, so that each has memory of its own
            for name, result, again in zip(NAMES, first, _run(others[-1], "eager"), strict=True):
                assert torch.equal(result, again), name
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", plans.CEILINGS)
def test_where_the_memory_of_a_gradient_begins_changes_no_bit(dtype: torch.dtype) -> None:
    """A library's product takes another order of sums where its result begins at no multiple of 16 bytes."""
    inputs = _layer(60, 15, 3, 9, 2, dtype)
    evaluation = differentiate(EXPERTS, tuple(inputs), (_upstream(inputs[0]),), Preference(backend="eager"))
    backward = directions_of(evaluation).backward
    expected = backward.run()
    for offset in range(1, 8):
        shifted = tuple(torch.empty(t.numel() + offset, dtype=t.dtype)[offset:].view(t.shape) for t in expected)
        backward.run(out=shifted)
        for name, result, plain in zip(NAMES[1:], shifted, expected, strict=True):
            assert torch.equal(result, plain), f"{name}, {offset} elements further"


def _agree(got: tuple[Tensor, ...], exact: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    ceiling = plans.CEILINGS[dtype]
    for name, value, truth in zip(NAMES, got, exact, strict=True):
        assert value.shape == truth.shape
        error = (value.double() - truth).norm()
        assert error <= ceiling * truth.norm(), f"{name}: {error / truth.norm():.3g}"


# --------------------------------------------------------------------------------- the promise about errors


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=pytest.mark.kernels)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_that_cancel_are_inside_the_bounds(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """Two slots whose experts have nearly opposite rows: for what is left of y no ceiling holds, and the bound does."""
    x, gate_up, down, indices, weights = _layer(6, 16, 2, 16, 2, dtype)
    gate_up[1], down[1], indices[:] = gate_up[0] * (1 + 2 * torch.finfo(dtype).eps), -down[0], torch.arange(2)
    weights[:, 1] = weights[:, 0]
    inputs = tuple(t.to(device) for t in (x, gate_up, down, indices, weights))
    upstream = (_upstream(inputs[0]).to(dtype),)
    found = differentiate(EXPERTS, inputs, upstream, Preference(backend=backend))
    measured = {comparison.name: comparison for comparison in compare(found)}
    assert measured["y"].relative_error > plans.CEILINGS[dtype], "why that is no promise"
    for name, comparison in measured.items():
        assert comparison.promise.holds, (name, comparison.promise)


# ------------------------------------------------------------------------------------------ reference


def _dense(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Every expert on every token, then a matrix of weights that is zero almost everywhere."""
    g, u = torch.einsum("td,ehd->teh", x, gate_up).chunk(2, -1)
    every = torch.einsum("teh,edh->ted", F.silu(g) * u, down)
    share = (F.one_hot(indices, down.shape[0]).to(weights.dtype) * weights[..., None]).sum(1)
    return torch.einsum("te,ted->td", share, every)


def test_the_reference_is_the_dense_layer() -> None:
    inputs = _layer(9, 6, 4, 5, 3)
    leaves = [t.requires_grad_(t.is_floating_point()) for t in inputs]
    y = _dense(*leaves)
    gradients = torch.autograd.grad(y, [t for t in leaves if t.is_floating_point()], _upstream(y))
    _agree(_exact([t.detach() for t in leaves]), (y, *gradients), torch.float64)


# --------------------------------------------------------------------------------------------- values


@backends
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((5, 528, 2, 136, 2), torch.bfloat16),  # two chunks of columns, several steps, two blocks of the inner width
        ((80, 16, 3, 12, 2), torch.float32),  # more than one tile of rows to an expert
        ((6, 9, 4, 5, 4), torch.float16),  # every slot any expert, some of them twice
        ((3, 1, 1, 1, 1), torch.float64),
    ],
    ids=str,
)
def test_values(sizes: tuple[int, ...], dtype: torch.dtype, backend: str, device: torch.device) -> None:
    inputs = [t.to(device) for t in _layer(*sizes, dtype)]
    _agree(_run(inputs, backend), _exact(inputs), dtype)


@backends
def test_all_tokens_on_one_expert(backend: str, device: torch.device) -> None:
    x, gate_up, down, indices, weights = (t.to(device) for t in _layer(35, 8, 3, 8, 2, torch.float32))
    inputs = [x, gate_up, down, torch.ones_like(indices), weights]
    got = _run(inputs, backend)
    _agree(got, _exact(inputs), torch.float32)
    for gradient in got[2:4]:
        assert torch.equal(gradient[[0, 2]], torch.zeros_like(gradient[[0, 2]]))


@backends
@pytest.mark.parametrize("sizes", [(0, 4, 2, 3, 2), (3, 0, 2, 3, 2), (3, 4, 2, 0, 2)], ids=str)
def test_nothing_to_multiply(sizes: tuple[int, ...], backend: str, device: torch.device) -> None:
    """No tokens, no columns, or nothing between gate_up and down: zeros of the right shapes."""
    inputs = [t.to(device) for t in _layer(*sizes, torch.float32)]
    floating = [t for t in inputs if t.is_floating_point()]
    for got, like in zip(_run(inputs, backend), [inputs[0], *floating], strict=True):
        assert torch.equal(got, torch.zeros_like(like))


@backends
def test_routing_weights_keep_their_type(backend: str, device: torch.device) -> None:
    *layer, weights = (t.to(device) for t in _layer(12, 16, 3, 8, 2, torch.bfloat16))
    inputs = [*layer, weights.float() * 1.001]  # not a bfloat16 number
    got = _run(inputs, backend)
    assert got[4].dtype == torch.float32
    assert (got[4] != got[4].bfloat16()).any()
    _agree(got, _exact(inputs), torch.bfloat16)


def test_autocast_casts_the_matrices_alone(device: torch.device) -> None:
    inputs = [t.to(device) for t in _layer(6, 8, 3, 8, 2, torch.float32)]
    leaves = [t.requires_grad_(t.is_floating_point()) for t in inputs]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = moe.experts(*leaves)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in leaves if t.is_floating_point())
    cast = [t.detach().bfloat16() for t in leaves[:3]]
    assert torch.equal(y, moe.experts(*cast, leaves[3], leaves[4].detach()))


# ---------------------------------------------------------------------------------------------- leaks


@backends
def test_a_token_reaches_nobody_else(backend: str, device: torch.device) -> None:
    """NaN in one token: its own results, and its experts' gradients, and nothing more."""
    inputs = [t.to(device) for t in _layer(11, 8, 5, 8, 2, torch.float32)]
    clean = _run(inputs, backend)
    spoiled = [inputs[0].clone(), *inputs[1:]]
    spoiled[0][4] = float("nan")
    got = _run(spoiled, backend)
    others = torch.arange(11, device=device) != 4
    strangers = torch.tensor([e not in inputs[3][4].tolist() for e in range(5)], device=device)
    assert strangers.any()
    for name, value, before in zip(NAMES, got, clean, strict=True):
        keep = strangers if value.dim() == 3 else others
        assert value[keep].isfinite().all(), name
        if backend == "triton":
            assert torch.equal(value[keep], before[keep]), name
        assert value[~keep].isnan().any(), name


@backends
@pytest.mark.parametrize("what", ("routing weight", "upstream gradient"))
def test_a_lost_weight_or_slope_of_a_token_reaches_nobody_else(what: str, backend: str, device: torch.device) -> None:
    """A weight has no part in any gradient of weights, and in no expert but its own; an upstream gradient none in y."""
    inputs = [t.to(device) for t in _layer(11, 8, 5, 8, 2, torch.float32)]
    clean, weights = _run(inputs, backend), inputs[4].clone()
    weights[4, 1] = float("nan")
    is_weight = what == "routing weight"
    got = _run([*inputs[:4], weights], backend) if is_weight else _run(inputs, backend, lost=4)
    token, experts = torch.arange(11, device=device) == 4, inputs[3][4, 1:] if is_weight else inputs[3][4]
    reached = {"experts": torch.tensor([e in experts.tolist() for e in range(5)], device=device), "token": token}
    for name, value, before in zip(NAMES, got, clean, strict=True):
        items = reached["experts" if value.dim() == 3 else "token"]
        if name == ("dweights" if is_weight else "y"):
            items = torch.zeros_like(items)
        assert value[~items].isfinite().all() and value[items].isnan().flatten(1).any(1).all(), name
        if backend == "triton":
            assert torch.equal(value[~items], before[~items]), name


@backends
def test_an_expert_reaches_nobody_else(backend: str, device: torch.device) -> None:
    inputs = [t.to(device) for t in _layer(11, 8, 5, 8, 2, torch.float32)]
    inputs[1][3], inputs[2][3] = float("inf"), float("nan")
    keep = (inputs[3] != 3).all(1)
    assert keep.any() and not keep.all()
    y, dx, dgate_up, ddown, dweights = _run(inputs, backend)
    for name, value in (("y", y), ("dx", dx), ("dweights", dweights)):
        assert value[keep].isfinite().all(), name
    others = torch.arange(5, device=device) != 3
    assert dgate_up[others].isfinite().all() and ddown[others].isfinite().all()


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_of_minus_infinity(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """Its hidden is −0 on kernels and NaN in plain PyTorch, as the guarantee says; that of +∞ is infinite on both."""
    x, gate_up = torch.ones(2, 4, dtype=dtype), torch.ones(2, 6, 4, dtype=dtype)
    gate_up[0, 0, 1], gate_up[1, 0, 1] = -torch.inf, torch.inf
    down, indices = torch.ones(2, 4, 3, dtype=dtype), torch.tensor([[0], [1]])
    inputs = [t.to(device) for t in (x, gate_up, down, indices, torch.ones(2, 1))]
    preference = Preference(backend=backend)
    y, words = moe.experts(*inputs, preference=preference), adjoint.plan(moe.experts, *inputs, preference=preference)
    said = words.guarantee["y"].special_values
    assert (y[1] == torch.inf).all() and "silu(+∞) = +∞" in said
    assert y[0].isfinite().all() if "silu(−∞) = −0" in said else y[0].isnan().all() and "silu(−∞) is NaN" in said


# --------------------------------------------------------------------------------------- out of range


def _out_of_range(device: torch.device) -> list[Tensor]:
    inputs = [t.to(device) for t in _layer(13, 8, 4, 8, 2, torch.float32)]
    inputs[3][2, 1], inputs[3][5, 0], inputs[3][12, 1] = -1, 4, 2**40
    return inputs


def test_an_index_out_of_range_adds_nothing_eagerly() -> None:
    x, gate_up, down, indices, weights = _out_of_range(torch.device("cpu"))
    layout = allocate_layout(indices, 4)
    write_layout(indices, 4, layout, None)
    layer, y, gu = (x, gate_up, down, weights), torch.empty_like(x), x.new_empty(26, 16)
    eager.forward(layer, layout, y, gu)
    gradients = tuple(map(torch.empty_like, layer))
    eager.backward((_upstream(x), *layer, gu), layout, gradients)
    _agree((y, *gradients), _exact([x, gate_up, down, indices, weights]), torch.float32)
    assert gradients[3][2, 1] == gradients[3][5, 0] == gradients[3][12, 1] == 0


@pytest.mark.kernels
def test_an_index_out_of_range_adds_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels stay in bounds and report it; on the CPU, the interpreter's report comes before the products."""
    from adjoint.ops.moe.experts.triton import layer

    monkeypatch.setattr(layer, "check", lambda: None)
    inputs = _out_of_range(device)
    got = _run(inputs, "triton")
    with pytest.raises(ArgumentError, match=r"moe\.experts: indices .* got -1 at position 5 "):
        adjoint.check()
    _agree(got, _exact(inputs), torch.float32)
    assert got[4][2, 1] == got[4][5, 0] == got[4][12, 1] == 0


# ------------------------------------------------------------------------------------ what is saved


@backends
def test_what_is_saved(backend: str, device: torch.device) -> None:
    """The arguments, g and u of each row, and two numbers a row with the experts' offsets."""
    inputs = [t.to(device) for t in _layer(10, 8, 3, 6, 2, torch.bfloat16)]
    leaves = [t.requires_grad_(t.is_floating_point()) for t in inputs]
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        moe.experts(*leaves, preference=Preference(backend=backend))
    arguments = {t.data_ptr() for t in leaves}
    extra = sum(t.numel() * t.element_size() for t in saved if t.data_ptr() not in arguments)
    rows = 10 * 2
    assert extra == rows * 2 * 6 * 2 + 2 * rows * 4 + (3 + 1) * 4


@backends
def test_inference_keeps_no_hidden_values(backend: str, device: torch.device) -> None:
    inputs = [t.to(device) for t in _layer(4, 8, 3, 6, 2, torch.float32)]
    text = Preference(backend=backend).text
    alone, differentiable = (torch.ops.adjoint.moe_experts(*inputs, keep, text) for keep in (False, True))
    assert [alone[1].shape, differentiable[1].shape] == [(0, 12), (8, 12)]
    assert torch.equal(alone[0], differentiable[0])


@backends
@pytest.mark.parametrize("need", [0, 5, 10])
def test_gradients_nobody_needs_have_no_elements(need: int, backend: str, device: torch.device) -> None:
    inputs = [t.to(device) for t in _layer(4, 8, 3, 6, 2, torch.float32)]
    x, gate_up, down, _, weights = inputs
    text = Preference(backend=backend).text
    _, *saved = torch.ops.adjoint.moe_experts(*inputs, True, text)
    every = _run(inputs, backend)[1:]
    dy = _upstream(x)
    gradients = torch.ops.adjoint.moe_experts_backward(dy, x, gate_up, down, weights, *saved, need, text)
    for bit, gradient, expected in zip((1, 2, 4, 8), gradients, every, strict=True):
        assert torch.equal(gradient, expected) if need & bit else gradient.numel() == 0


GIB = 2**30


@pytest.mark.parametrize(
    ("sizes", "peer"), [((16384, 2048, 512, 512, 10), 1.6 * GIB), ((16384, 2048, 128, 768, 8), 2.2 * GIB)], ids=str
)
def test_memory_of_a_large_layer(sizes: tuple[int, ...], peer: float) -> None:
    """What is live at the peak of a backward, weight gradients excluded: at most 0.7 of torch's composed layer."""
    pytest.importorskip("triton")
    tokens, columns, _, inner, slots = sizes
    device, half = torch.device("cuda"), torch.bfloat16
    forward = plans.EXPERTS[0].scratch_bytes(
        Problem("moe_experts", device, (half, torch.int64, torch.float32), "", sizes, (True,))
    )
    backward = plans.EXPERTS_BACKWARD[0].scratch_bytes(
        Problem("moe_experts_backward", device, (half, torch.float32), "", sizes, (15,))
    )
    assert forward and backward
    saved = tokens * slots * (4 * inner + 8)
    line = 2 * tokens * columns  # y, dy and dx
    assert saved + backward + 3 * line <= 0.7 * peer
    assert saved + forward + line <= 0.7 * peer


# --------------------------------------------------------------------------------------------- tiles


@pytest.mark.parametrize(("target", "limit"), [("gfx942", 65_536), ("sm_120", 101_376), ("sm_90", 232_448)])
def test_every_schedule_fits_a_gpu(target: str, limit: int) -> None:
    """Whatever powers of two a schedule has, a tile fits in registers and in shared memory."""
    pytest.importorskip("triton")
    from adjoint.ops.moe.experts.triton.tiles import MAX_GROUP, tile_of

    sizes = product((16, 64, 128, 512), (8, 128, 1024), ((1, 1), (8, 4), (32, 16)))
    parts = product(("up", "down", "hidden", "outer"), (torch.bfloat16, torch.float32, torch.float64), (True, False))
    for (part, dtype, aligned), (rows, columns, (warps, stages)) in product(list(parts), list(sizes)):
        named = {"rows": rows, "columns": columns, "warps": warps, "stages": stages, "group": 256}
        schedule = {f"{part}_{name}": value for name, value in named.items()}
        schedule |= {"unaligned_edge": rows, "unaligned_warps": warps}
        setup = Setup(Problem("moe_experts", torch.device("cuda"), (dtype,)), schedule, target)
        tile, sides = tile_of(setup, part, aligned), 2 if part == "up" else 1
        assert tile.rows * tile.columns * sides / (32 * tile.warps) <= 128, "accumulators of a thread"
        operands = (tile.rows + sides * tile.columns) * tile.depth * dtype.itemsize
        assert tile.stages * operands <= limit or tile.stages == 1
        assert 4 <= tile.warps <= 16 and min(tile.rows, tile.columns) >= 16
        assert MAX_GROUP % tile.group == 0


@pytest.mark.kernels
@pytest.mark.parametrize("counts", [(3, 0, 5, 16, 0), (0, 0, 0), (64,), (1, 1, 1, 1, 1, 1, 1)], ids=str)
def test_tiles_cover_each_row_once(counts: tuple[int, ...], device: torch.device) -> None:
    from adjoint.ops.moe.experts.triton.tiles import moe_experts_tiles, tile_count

    tile_rows, rows, experts = 16, sum(counts), len(counts)
    offsets = torch.tensor((0, *counts), device=device).cumsum(0).to(torch.int32)
    tiles = tile_count(rows, experts, tile_rows)
    columns = [torch.full((tiles,), 99, dtype=torch.int32, device=device) for _ in range(3)]
    names = ("tile_expert", "tile_begin", "tile_end")
    setup = Setup(Problem("tiles", device, ()), {})
    setup.kernel(moe_experts_tiles, ROWS=tile_rows, BLOCK=64).launch(
        (-(-tiles // 64),),
        offsets=offsets,
        **dict(zip(names, columns, strict=True)),
        experts=experts,
        steps=experts.bit_length(),
        tiles=tiles,
    )
    owner = torch.full((rows,), -1)
    for expert, begin, end in zip(*(column.tolist() for column in columns), strict=True):
        if expert >= 0:
            assert 0 < end - begin <= tile_rows
            assert (owner[begin:end] == -1).all()
            owner[begin:end] = expert
    assert owner.tolist() == [e for e, count in enumerate(counts) for _ in range(count)]


# ------------------------------------------------------------------------------------------- the plan


def test_the_adjoint_is_planned_with_the_call(device: torch.device) -> None:
    inputs = [t.to(device) for t in _layer(4, 8, 3, 6, 2, torch.float32)]
    plan = adjoint.plan(moe.experts, *inputs)
    assert plan.adjoint is not None
    y, *saved = plan.run(*inputs)
    x, gate_up, down, _, weights = inputs
    gradients = plan.adjoint.run(_upstream(x), x, gate_up, down, weights, *saved)
    for got, expected in zip((y, *gradients), _run(inputs), strict=True):
        assert torch.equal(got, expected)


def test_eager_products_promise_no_bits(device: torch.device) -> None:
    """Those of a library: an explicit wish for invariance is not met by them."""
    inputs = [t.to(device) for t in _layer(4, 8, 3, 6, 2, torch.float32)]
    with pytest.raises(adjoint.Unsupported, match="y is not batch_invariant"):
        moe.experts(*inputs, preference=Preference(backend="eager", batch_invariant=True))


def _changed(index: int, change: Callable[[Tensor], Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda saved: [change(t) if i == index else t for i, t in enumerate(saved)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_changed(0, lambda t: t[:-1]), r"gu must have shape \(8, 12\), got \(7, 12\)"),
        (_changed(1, lambda t: t.long()), r"offsets must be int32 .* got int64"),
        (_changed(2, lambda t: t[:-1]), r"permutation must be int32 of shape \(8,\)"),
        (_changed(3, lambda t: t.T.contiguous().T), "inverse must be contiguous"),
    ],
)
def test_a_backward_refuses_what_no_forward_gives(
    change: Callable[[list[Any]], list[Any]], words: str, device: torch.device
) -> None:
    inputs = [t.to(device) for t in _layer(4, 8, 3, 6, 2, torch.float32)]
    x, gate_up, down, _, weights = inputs
    _, *saved = torch.ops.adjoint.moe_experts(*inputs, True, "")
    with pytest.raises(ArgumentError, match=words):
        torch.ops.adjoint.moe_experts_backward(_upstream(x), x, gate_up, down, weights, *change(saved), 15, "")


def test_layouts_are_those_of_dispatch(device: torch.device) -> None:
    inputs = [t.to(device) for t in _layer(9, 8, 4, 6, 3, torch.float32)]
    _, _, *layout = torch.ops.adjoint.moe_experts(*inputs, True, "")
    _, expected = moe.dispatch(inputs[0], inputs[3], 4)
    assert all(torch.equal(a, b) for a, b in zip(Layout(*layout), expected, strict=True))


def test_a_product_that_adds_in_bfloat16_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_in_bfloat16(left: Tensor, right: Tensor) -> Tensor:
        total = torch.zeros(left.shape[0], right.shape[1], dtype=left.dtype)
        for k in range(left.shape[1]):
            total = total + left[:, k, None] * right[k]
        return total

    is_direct = eager.multiplies_directly.__wrapped__
    assert is_direct(torch.float32) and is_direct(torch.float64) and not is_direct(torch.float16)
    monkeypatch.setattr(Tensor, "__matmul__", add_in_bfloat16)
    assert not is_direct(torch.bfloat16)
