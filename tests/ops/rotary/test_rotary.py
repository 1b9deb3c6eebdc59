"""A second formulation, values a user would try, promises that no shared check holds, and the form in place."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import ArgumentError, Preference
from adjoint.core.launch import variants
from adjoint.core.plan import bind
from adjoint.ops.rotary.rotary import bounds, cases, reference
from adjoint.verify.checks.bits import same_bits
from adjoint.verify.run import differentiate, measure
from tests.launches import record_launches

BACKENDS = ["eager", pytest.param("triton", marks=pytest.mark.kernels)]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
both_pairs = pytest.mark.parametrize("interleaved", [False, True])
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def _normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64, device: Any = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).to(device)


def _whole(seed: int, *shape: int) -> Tensor:
    """Whole numbers, of which products and sums are exact."""
    return (20 * _normal(seed, *shape)).round()


def _angles(time: int, pairs: int, seed: int = 5) -> Tensor:
    return _normal(seed, time, pairs) * 3


def _wide(table: Tensor, interleaved: bool) -> Tensor:
    return table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)


# ---------------------------------------------------------------------------------------- what it computes


@both_pairs
def test_the_reference_multiplies_complex_numbers(interleaved: bool) -> None:
    """Pairs as complex numbers, times cos + i·sin; and the gradient is the product with the conjugate."""
    x, cos, sin = (
        (20 * _normal(seed, *shape)).round() for seed, shape in ((0, (2, 5, 3, 10)), (1, (5, 3)), (2, (5, 3)))
    )
    rotation = torch.complex(cos, sin)[:, None]

    def as_complex(x: Tensor) -> Tensor:
        first, second = (x[..., 0:6:2], x[..., 1:6:2]) if interleaved else (x[..., :3], x[..., 3:6])
        return torch.complex(first, second)

    for compute, factor in ((reference.rotate, rotation), (reference.rotate_back, rotation.conj())):
        y = compute(x, cos, sin, 6, interleaved)
        assert torch.equal(as_complex(y), as_complex(x) * factor)
        assert torch.equal(y[..., 6:], x[..., 6:])


@both_pairs
def test_the_reference_s_adjoint_is_autograd_s_for_any_table(interleaved: bool) -> None:
    """Tables whose columns of a pair differ: no rotation, and the adjoint is not the same kernel with −sin."""
    x, dy, tables = (
        (20 * _normal(seed, *shape)).round() for seed, shape in ((0, (2, 5, 3, 10)), (1, (2, 5, 3, 10)), (2, (2, 5, 6)))
    )
    x.requires_grad_()
    cos, sin = tables
    (expected,) = torch.autograd.grad(reference.rotate(x, cos, sin, 6, interleaved), x, dy)
    assert torch.equal(reference.rotate_back(dy, cos, sin, 6, interleaved), expected)
    negated = reference.rotate(dy, cos, -sin, 6, interleaved)
    assert not torch.equal(negated, expected)


@every_backend
@both_pairs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tables_of_both_widths_give_the_same_bits(
    interleaved: bool, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    q, k = (_normal(n, 2, 7, n + 2, 12, dtype=dtype, device=device).requires_grad_() for n in range(2))
    tables = [t.to(dtype).to(device) for t in (_angles(7, 4).cos(), _angles(7, 4).sin())]
    found = []
    for given in (tables, [_wide(t, interleaved) for t in tables]):
        y = adjoint.rotary(q, k, *given, rotary_dim=8, interleaved=interleaved, preference=Preference(backend=backend))
        found.append((*y, *torch.autograd.grad(y, (q, k), [t.detach().flip(1) for t in y])))
    assert all(map(torch.equal, *found))


@every_backend
@both_pairs
def test_what_is_rotated_and_back_is_what_it_was(interleaved: bool, backend: str, device: torch.device) -> None:
    """The gradient of a rotation, given the rotated heads, is the heads: to within the two bounds, and as far as the
    squares of the rounded tables add up to 1."""
    q, angles = _normal(0, 2, 9, 3, 16, dtype=torch.float32, device=device).requires_grad_(), _angles(9, 5).to(device)
    tables = angles.cos().float(), angles.sin().float()
    y, none = adjoint.rotary(
        q, None, *tables, rotary_dim=10, interleaved=interleaved, preference=Preference(backend=backend)
    )
    assert none is None
    (back,) = torch.autograd.grad(y, q, y.detach())
    wide, cos, sin = q.detach().double(), *(table.double() for table in tables)
    forward, backward = (
        bound(x, cos, sin, 10, interleaved, torch.float32)
        for bound, x in ((bounds.rotated, wide), (bounds.rotated_back, y.detach().double()))
    )
    # An error of both numbers of a pair is turned back by |cos| and |sin|, which add up to less than 3/2.
    apart = backward.max() + 1.5 * forward.max() + (cos.square() + sin.square() - 1).abs().max() * wide.abs().max()
    assert (back.double() - wide).abs().max() <= apart
    assert torch.equal(back[..., 10:], q.detach()[..., 10:])


@every_backend
def test_scores_depend_on_the_distance_alone(backend: str, device: torch.device) -> None:
    q, k = (_normal(n, 1, 1, 1, 32, device=device).expand(1, 40, 1, 32) for n in range(2))
    frequencies = 100.0 ** -(torch.arange(16, dtype=torch.float64, device=device) / 16)
    angles = torch.arange(40, device=device)[:, None] * frequencies
    q, k = adjoint.rotary(q, k, angles.cos(), angles.sin(), rotary_dim=32, preference=Preference(backend=backend))  # type: ignore[assignment]
    scores = q[0, :, 0] @ k[0, :, 0].T
    # An angle of up to 39 is rounded, then its cosine and sine, their products and sums: 43 roundings of each element
    # of both, and 32 of the score, in each of two scores.
    limit = 2 * (2 * 43 + 32) * 2.0**-53 * float(q[0, 0].norm() * k[0, 0].norm())
    assert (scores[1:, 1:] - scores[:-1, :-1]).abs().max() <= limit
    assert (scores[0, 1:] - scores[0, :-1]).abs().max() > 0.1


# --------------------------------------------------------------------------------------------- promises


@every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_prefix_is_the_prefix(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """And a token alone has the bits that it has among others, in both directions."""
    q, k = (_normal(n, 2, 33, n + 1, 12, dtype=dtype, device=device).requires_grad_() for n in range(2))
    cos, sin = (_normal(n, 2, 33, 8, dtype=dtype, device=device) for n in (3, 4))
    preference = Preference(backend=backend)

    def run(begin: int, end: int) -> tuple[Tensor, ...]:
        inputs = [x[:, begin:end] for x in (q, k, cos, sin)]
        y = adjoint.rotary(*inputs, preference=preference)  # type: ignore[arg-type]
        return (*y, *torch.autograd.grad(y, inputs[:2], [t.detach() for t in y]))  # type: ignore[arg-type]

    whole = run(0, 33)
    for begin, end in ((0, 1), (0, 17), (0, 32), (16, 17), (32, 33)):
        for part, all_of in zip(run(begin, end), whole, strict=True):
            assert torch.equal(part, all_of[:, begin:end])


@every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """IEEE products and sums in rotated columns; every bit pattern is kept in the others."""
    inf, nan = math.inf, math.nan
    tables = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]], dtype=dtype, device=device)  # cos and sin of 3 tokens
    heads = torch.tensor(
        [[inf, 2.0, -0.0, nan], [inf, 2.0, nan, -0.0], [inf, inf, inf, -inf]], dtype=dtype, device=device
    )
    q = heads.view(1, 3, 1, 4).requires_grad_()
    y, _ = adjoint.rotary(q, None, tables[:, :1], tables[:, 1:], rotary_dim=2, preference=Preference(backend=backend))
    expected = torch.tensor([[nan, inf], [inf, nan], [nan, inf]], dtype=dtype, device=device)
    assert same_bits(y.detach()[0, :, 0, :2], expected)
    (dq,) = torch.autograd.grad(y, q, heads.view(1, 3, 1, 4))
    assert same_bits(dq[0, :, 0, :2], torch.tensor([[nan, -inf], [inf, nan], [inf, nan]], dtype=dtype, device=device))
    for result in (y.detach(), dq):
        kept = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        assert torch.equal(result[..., 2:].contiguous().view(kept), q.detach()[..., 2:].contiguous().view(kept))


@every_backend
@both_pairs
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_no_numbers_break_the_bound(interleaved: bool, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """Products of all sizes, those that cancel, underflow and overflow among them; and some come near the bound."""
    subject, generator = cases._subject("searched", 8, 8, interleaved), torch.Generator().manual_seed(0)
    info, time = torch.finfo(dtype), 4000 if backend == "eager" else 400
    smallest = math.log2(info.smallest_normal * info.eps)

    def any_size(*shape: int, low: float, high: float) -> Tensor:
        exponents = low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)
        signs = 1 - 2 * torch.randint(2, shape, generator=generator).double()
        return (signs * 2.0**exponents).clamp(info.min, info.max)

    largest = {"rotated_q": 0.0, "rotated_k": 0.0, "dq": 0.0, "dk": 0.0}
    for low, high in ((-3.0, 3.0), (smallest, math.log2(info.max)), (smallest, smallest + 12)):
        q, k, up_q, up_k = (any_size(2, time, n, 8, low=low, high=high) for n in (3, 1, 3, 1))
        cos, sin = (any_size(time, 8, low=-4.0, high=0.0) for _ in range(2))
        sin[: time // 2] = cos[: time // 2]
        q[:, : time // 4, :, 4:] = q[:, : time // 4, :, :4]  # x₁·cos − x₂·sin cancels
        inputs = tuple(x.to(dtype).to(device) for x in (q, k, cos, sin))
        upstream = tuple(x.to(dtype).to(device) for x in (up_q, up_k))
        found = differentiate(subject, inputs, upstream, Preference(backend=backend))
        for name, measured in measure(found).items():
            assert measured.holds, f"{name}: {measured}"
            largest[name] = max(largest[name], measured.value)
    assert min(largest.values()) > (0.5 if dtype == torch.float32 else 0.95), largest


# ------------------------------------------------------------------------------------------------ launches


@pytest.mark.kernels
@both_pairs
def test_one_launch_rotates_q_and_k(interleaved: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = (_normal(n, 2, 50, 4 - 2 * n, 16, dtype=torch.float32, device=device).requires_grad_() for n in range(2))
    cos, sin = (_normal(n, 50, 8, dtype=torch.float32, device=device) for n in (2, 3))
    launched = record_launches(monkeypatch)
    y = adjoint.rotary(q, k, cos, sin, interleaved=interleaved, preference=Preference(backend="triton"))
    assert len(launched) == 1
    torch.autograd.grad(y, (q, k), [t.detach() for t in y])  # type: ignore[arg-type]
    assert len(launched) == 2
    with torch.no_grad():
        adjoint.rotary(q, k, cos, sin, in_place=True, preference=Preference(backend="triton"))
    assert len(launched) == 3


@pytest.mark.kernels
@pytest.mark.parametrize("layout", ["projection", "heads first", "contiguous"])
def test_views_are_read_where_they_lie(layout: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """q and k as slices of one projection, or with heads before tokens: no copy, and the aligned variant."""
    both = _normal(0, 2, 9, 6, 32, dtype=torch.bfloat16, device=device)
    q, k = both[:, :, :4], both[:, :, 4:]
    if layout == "heads first":
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    if layout == "contiguous":
        q, k = q.contiguous(), k.contiguous()
    cos, sin = (_normal(n, 9, 16, dtype=torch.float32, device=device) for n in (2, 3))
    launched = record_launches(monkeypatch)
    monkeypatch.setattr(Tensor, "contiguous", lambda self: pytest.fail("a copy"))
    y = adjoint.rotary(q, k, cos, sin, preference=Preference(backend="triton"))
    monkeypatch.undo()
    ((variant, _),) = launched
    assert bool(variant.aligned)
    expected = adjoint.rotary(q.contiguous(), k.contiguous(), cos, sin, preference=Preference(backend="eager"))
    assert all(map(torch.equal, y, expected))
    assert all(x.is_contiguous() for x in y if x is not None)


def test_the_benchmark_s_kernel_copies_16_bytes_at_a_time() -> None:
    """Columns that are copied, in machine code for an H200; pairs are as wide as a tile leaves to a thread."""
    import re

    from triton.backends.compiler import GPUTarget

    from adjoint.core.kernels import interpreting

    if interpreting():
        pytest.skip("kernels are compiled in the ordinary process")

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    table = meta(64, 64, dtype=torch.float32)
    for options in ({}, {"interleaved": True}, {"in_place": True}):
        call = bind(adjoint.rotary, meta(1, 64, 16, 256), meta(1, 64, 2, 256), table, table, **options)
        for _, variant in variants(call, "sm_90", unaligned=False):
            text = variant.compile(GPUTarget("cuda", 90, 32)).asm["ptx"]
            accesses = set(re.findall(r"(?:ld|st)\.global[.\w:]*", text))
            assert accesses <= {f"{way}.global{width}.b32" for way in ("ld", "st") for width in ("", ".v2", ".v4")}
            assert options.get("in_place") or accesses >= {"ld.global.v4.b32", "st.global.v4.b32"}


# ------------------------------------------------------------------------------------------------ gradients


@every_backend
def test_gradients_that_are_needed(backend: str, device: torch.device) -> None:
    """Of one input alone, of an output nobody used, and none for tables."""
    preference = Preference(backend=backend)
    q, k = (_normal(n, 2, 5, n + 1, 8, device=device) for n in range(2))
    cos, sin = (_normal(n, 5, 6, device=device) for n in (2, 3))
    whole = [x.clone().requires_grad_() for x in (q, k)]
    y = adjoint.rotary(*whole, cos, sin, preference=preference)
    expected = torch.autograd.grad(y, whole, [t.detach() for t in y], retain_graph=True)  # type: ignore[arg-type]
    for place in range(2):
        (alone,) = torch.autograd.grad(y[place], whole[place], y[place].detach(), retain_graph=True)  # type: ignore[union-attr]
        assert torch.equal(alone, expected[place])
        other = torch.autograd.grad(y[place].sum(), whole[1 - place], retain_graph=True, allow_unused=True)[0]  # type: ignore[union-attr]
        assert other is None or not other.any()
        inputs = [q, k]
        inputs[place] = inputs[place].clone().requires_grad_()
        one = adjoint.rotary(*inputs, cos, sin, preference=preference)[place]  # type: ignore[misc]
        assert torch.equal(torch.autograd.grad(one, inputs[place], one.detach())[0], expected[place])  # type: ignore[union-attr]


def test_nothing_of_q_and_k_is_kept() -> None:
    """The backward reads cos and sin alone."""
    q, k = (_normal(n, 2, 5, n + 1, 8).requires_grad_() for n in range(2))
    cos, sin = (_normal(n, 5, 6) for n in (2, 3))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        adjoint.rotary(q, k, cos, sin)
    assert {x.data_ptr() for x in kept} == {cos.data_ptr(), sin.data_ptr()}


# ------------------------------------------------------------------------------------------------- in place

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every other column": lambda x: torch.stack((x, x), -1)[..., 1],
    "columns of a wider head": lambda x: torch.cat((x, x), -1)[..., x.shape[-1] :],
}


@every_backend
@both_pairs
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_has_the_bits_of_out_of_place(
    layout: str, interleaved: bool, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    preference, options = Preference(backend=backend), {"rotary_dim": 6, "interleaved": interleaved}
    q, k = (LAYOUTS[layout](_normal(n, 2, 37, n + 2, 10, dtype=dtype, device=device)) for n in range(2))
    cos, sin = (_normal(n, 2, 37, 3, dtype=dtype, device=device) for n in (2, 3))
    expected = adjoint.rotary(q, k, cos, sin, preference=preference, **options)  # type: ignore[arg-type]
    versions = q._version, k._version
    y = adjoint.rotary(q, k, cos, sin, in_place=True, preference=preference, **options)  # type: ignore[arg-type]
    assert y[0] is q and y[1] is k
    assert all(map(torch.equal, y, expected))
    assert q._version > versions[0] and k._version > versions[1], "autograd is not told"


@every_backend
def test_in_place_touches_rotated_columns_alone(backend: str, device: torch.device) -> None:
    """What lies beside them is not even written with what it was: another thread's writes would be lost."""
    memory = torch.full((2, 9, 3, 16), math.nan, device=device)
    q = memory[..., 2:12]
    q[..., :4] = _normal(0, 2, 9, 3, 4, dtype=torch.float32, device=device)
    before = memory.clone()
    cos, sin = (_normal(n, 9, 4, dtype=torch.float32, device=device) for n in (2, 3))
    adjoint.rotary(q, None, cos, sin, in_place=True, preference=Preference(backend=backend))
    changed = ~((memory == before) | (memory.isnan() & before.isnan()))
    assert changed[..., 2:6].all() and not changed[..., :2].any() and not changed[..., 6:].any()
    call = bind(adjoint.rotary, q, None, cos, sin, in_place=True)
    assert call.operator.name == "rotary_in_place" and call.operator.outputs == ("q", "k")


def test_in_place_takes_heads_of_one_packed_projection() -> None:
    """Five heads of queries, two of keys and two of values: their addresses meet, and no element is in two of them."""
    packed = torch.randn(2, 6, 9, 8, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.1])
    before, (q, k, v) = packed.clone(), packed.split((5, 2, 2), 2)
    right = adjoint.rotary(q, k, angles.cos(), angles.sin(), rotary_dim=4)
    adjoint.rotary(q, k, angles.cos(), angles.sin(), rotary_dim=4, in_place=True)
    assert torch.equal(q, right[0]) and torch.equal(k, right[1]) and torch.equal(v, before[:, :, 7:])  # type: ignore[arg-type]
    with pytest.raises(adjoint.ArgumentError, match="q, which in_place=True overwrites, shares memory with k"):
        adjoint.rotary(packed[:, :, :6], k, angles.cos(), angles.sin(), rotary_dim=4, in_place=True)


def test_in_place_plans_say_what_they_promise() -> None:
    q, table = torch.zeros(1, 3, 2, 8), torch.zeros(3, 4)
    plan = adjoint.plan(adjoint.rotary, q, q.clone(), table, table.clone(), in_place=True)
    assert list(plan.guarantee) == ["q", "k"] and plan.adjoint is None
    assert plan.guarantee["q"].device_invariant and plan.guarantee["q"].batch_invariant == "token"


def test_in_place_under_compile_and_inference_mode() -> None:
    q, k = (_normal(n, 2, 5, n + 1, 8) for n in range(2))
    cos, sin = (_normal(n, 5, 6) for n in (2, 3))
    expected = adjoint.rotary(q, k, cos, sin)
    compiled = torch.compile(
        lambda q, k: adjoint.rotary(q, k, cos, sin, in_place=True), fullgraph=True, backend="aot_eager"
    )
    with torch.no_grad():
        own = q.clone(), k.clone()
        compiled(*own)
        assert all(map(torch.equal, own, expected))
    with torch.inference_mode():
        own = q.clone(), k.clone()
        adjoint.rotary(*own, cos, sin, in_place=True)
        assert all(map(torch.equal, own, expected))


def test_in_place_is_noticed_by_a_backward_that_needs_the_input() -> None:
    x = _normal(0, 1, 3, 1, 4).requires_grad_()
    q = x.detach().clone()
    y = x * q
    adjoint.rotary(q, None, torch.ones(3, 4, dtype=q.dtype), torch.ones(3, 4, dtype=q.dtype), in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---------------------------------------------------------------------------------------------- large


@pytest.mark.gpu
@both_pairs
def test_past_2_31_elements(interleaved: bool) -> None:
    """Offsets are 64 bits wide: the last token of one long row, and the last row of a batch."""
    for batch, time in ((1, 2**19 + 3), (2**19 + 3, 1)):
        q = torch.zeros(batch, time, 16, 264, dtype=torch.bfloat16, device="cuda")
        k = torch.zeros(batch, time, 1, 264, dtype=torch.bfloat16, device="cuda")
        assert q.numel() > 2**31
        cos, sin = (torch.rand(batch, time, 8, device="cuda") for _ in range(2))
        for x in (q, k):
            x[-1, -1] = torch.randn(x.shape[2:], device="cuda")
        y = adjoint.rotary(q, k, cos, sin, interleaved=interleaved)
        last = [x[-1:, -1:].cpu() for x in (q, k, cos, sin)]
        expected = adjoint.rotary(*last, interleaved=interleaved)
        for result, one in zip(y, expected, strict=True):
            assert torch.equal(result[-1:, -1:].cpu(), one)  # type: ignore[index, union-attr, arg-type]
        del y
        torch.cuda.empty_cache()


def test_tables_that_require_a_gradient_are_refused_only_where_one_is_recorded() -> None:
    q, cos, sin = _normal(0, 1, 3, 1, 4), _normal(1, 3, 4).requires_grad_(), _normal(2, 3, 4)
    with pytest.raises(ArgumentError, match="cos requires a gradient"):
        adjoint.rotary(q, None, cos, sin)
    with torch.no_grad():
        adjoint.rotary(q, None, cos, sin)
