"""The launchers of the activation kernels: how work is cut, which variant runs, what is compiled and counted."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference, ops
from adjoint.contract.cases import Case
from adjoint.core import kernels as registry
from adjoint.core.kernels import Variant
from adjoint.core.launch import variants
from adjoint.core.layout import coalesce
from adjoint.ops.activation.sigmoid_gate.cases import SIGMOID_GATE
from adjoint.ops.activation.silu.cases import SILU
from adjoint.ops.activation.swiglu.cases import PACKED, SWIGLU
from adjoint.verify.run import differentiate, evaluate, plan_of
from tests.launches import record_launches

SUBJECTS = (SILU, SWIGLU, *PACKED, SIGMOID_GATE)
TRITON = Preference(backend="triton")
DTYPES = SILU.dtypes


@pytest.fixture
def kernels() -> ModuleType:
    """Looked up at run time: other tests put changed copies in its place and back."""
    from adjoint.ops.activation import kernels

    return kernels


# ------------------------------------------------------------------------------------- cutting the work


def _visits(kernels: ModuleType, tensors: list[Tensor]) -> list[list[int]]:
    """The addresses the pieces of `_windows` visit, tensor by tensor, in the order of the walk."""
    axes = coalesce(tensors)
    visited: list[list[int]] = [[] for _ in tensors]
    for offsets, sizes, strides in kernels._windows(axes.sizes, axes.strides):
        assert len(sizes) == kernels.MAX_AXES
        assert all(len(row) == kernels.MAX_AXES for row in strides)
        for index in itertools.product(*map(range, sizes)):
            for addresses, offset, row in zip(visited, offsets, strides, strict=True):
                addresses.append(offset + sum(i * s for i, s in zip(index, row, strict=True)))
    return visited


@pytest.mark.parametrize("limit", [1, 7, 64, 2**30])
@pytest.mark.parametrize(
    "shape", [(1,), (130,), (3, 50), (50, 3), (2, 3, 4), (5, 5, 5, 5), (3, 2, 4, 2, 3), (2, 3, 1, 2, 3, 2, 3)]
)
def test_windows_visit_every_element_once(
    shape: tuple[int, ...], limit: int, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And visit corresponding elements of all tensors together, however each lies in memory."""
    monkeypatch.setattr(kernels, "MAX_ELEMENTS", limit)
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    spread = torch.empty([2 * size for size in shape])[tuple(slice(None, None, 2) for _ in shape)]
    turned = torch.empty(shape[::-1]).permute(*reversed(range(len(shape))))
    expanded = torch.empty(()).expand(shape)
    tensors = [spread, turned, expanded, numbers]
    *others, order = _visits(kernels, tensors)
    assert sorted(order) == list(range(numbers.numel()))
    for tensor, addresses in zip(tensors, others, strict=False):
        position = dict(zip(order, addresses, strict=True))
        for flat, index in enumerate(itertools.product(*map(range, shape))):
            assert position[flat] == sum(i * s for i, s in zip(index, tensor.stride(), strict=True))


@pytest.mark.parametrize("limit", [7, 64, 1000])
def test_windows_are_no_larger_than_a_launch_may_be(
    limit: int, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MAX_ELEMENTS", limit)
    for sizes in ((5000,), (3, 700), (2, 2, 300), (300, 2, 2, 1), (4, 2, 2, 500)):
        strides = tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
        pieces = [math.prod(piece) for _, piece, _ in kernels._windows(sizes, (strides,))]
        rest = math.prod(sizes) // max(sizes)
        assert max(pieces) <= max(limit, rest)
        assert sum(pieces) == math.prod(sizes)
        assert len(pieces) > 1


def test_limits_fit_the_types_of_the_kernels(kernels: ModuleType) -> None:
    """A strided launch counts in int32, blocks past the end included; a grid's second axis has 16 bits."""
    largest_block = 2**16
    assert kernels.MAX_ELEMENTS + largest_block < 2**31
    assert kernels.MAX_GRID_Y < 2**16


def _strided(fill: Callable[..., Tensor], packed: bool) -> Iterator[Tensor]:
    width = 2 if packed else 1
    yield fill(11 * width, 18)[:, ::2].T
    yield fill(4, 3, 5, 12 * width)[:, :, ::2, ::2]
    yield fill(3, 2, 3, 2, 4, 3 * width).permute(1, 0, 4, 2, 3, 5)[:, 1:, ::3]
    yield fill(5, 1).expand(5, 40 * width)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_splitting_a_strided_launch_changes_no_bit(
    subject: Any, dtype: torch.dtype, kernels: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)

    def fill(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 9).to(dtype).to(device)

    for tensors in zip(*(_strided(fill, subject in PACKED) for _ in subject.inputs), strict=True):
        assert plan_of(subject, tensors, TRITON).name == "triton.strided"
        y = subject(*tensors, preference=TRITON)
        upstream = (fill(*y.shape, 2)[..., 0],)
        whole = differentiate(subject, tensors, upstream, TRITON)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "MAX_ELEMENTS", 64)
            launched = record_launches(patch)
            pieces = differentiate(subject, tensors, upstream, TRITON)
        assert all(map(torch.equal, pieces.results, whole.results))
        assert len(launched) > 2, "nothing was split"


@pytest.mark.kernels
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
@pytest.mark.parametrize("shift", [0, 1])
def test_splitting_long_rows_changes_no_bit(
    subject: Any, shift: int, kernels: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with more tiles than a grid's second axis holds are launched one at a time."""
    generator = torch.Generator().manual_seed(0)
    width = 4208 * (2 if subject in PACKED else 1)

    def fill() -> Tensor:
        memory = torch.randn(3, width + 64, generator=generator).mul_(9).to(device)
        return memory[:, shift * 2 : shift * 2 + width]

    tensors = tuple(fill() for _ in subject.inputs)
    layout = "pairs" if subject.keywords.get("order") == "interleaved" else "rows"
    assert plan_of(subject, tensors, TRITON).name == f"triton.{layout}"
    y = subject(*tensors, preference=TRITON)
    upstream = (torch.randn(y.shape, generator=generator).to(device),)
    whole = differentiate(subject, tensors, upstream, TRITON)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "MAX_GRID_Y", 1)
        launched = record_launches(patch)
        pieces = differentiate(subject, tensors, upstream, TRITON)
    assert all(map(torch.equal, pieces.results, whole.results))
    assert len(launched) >= 2 * 3, "nothing was split"


@pytest.mark.kernels
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
@pytest.mark.parametrize("columns", [40, 700])
def test_splitting_many_rows_changes_no_bit(
    subject: Any, columns: int, kernels: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than a grid's first axis holds are launched in turns."""
    generator = torch.Generator().manual_seed(0)
    width = columns * (2 if subject in PACKED else 1)
    memory = [torch.randn(7, width + 16, generator=generator).mul_(9).to(device) for _ in subject.inputs]
    tensors = tuple(tensor[:, :width] for tensor in memory)
    y = subject(*tensors, preference=TRITON)
    upstream = (torch.randn(y.shape, generator=generator).to(device),)
    whole = differentiate(subject, tensors, upstream, TRITON)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "MAX_GRID_X", 3)
        launched = record_launches(patch)
        pieces = differentiate(subject, tensors, upstream, TRITON)
    assert all(map(torch.equal, pieces.results, whole.results))
    assert [grid[0] for _, grid in launched] == [3, 3, 1] * 2


# ----------------------------------------------------------------------------------- choosing a variant


def _offset(shape: tuple[int, int], stride: int, offset: int, device: torch.device) -> Tensor:
    memory = torch.linspace(-20, 20, offset + shape[0] * stride, dtype=torch.float64).float().to(device)
    return memory.as_strided(shape, (stride, 1), offset)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("shape", "stride", "offset", "key"),
    [
        ((4, 320), 320, 0, ("one row", True)),
        ((4, 320), 320, 4, ("one row", True)),
        ((4, 320), 320, 1, ("one row", False)),
        ((4, 320), 336, 0, ("short rows", True)),
        ((4, 320), 336, 1, ("short rows", False)),
        ((4, 320), 330, 0, ("short rows", False)),
        ((3, 8192), 8208, 0, ("long rows", True)),
        ((3, 8192), 8208, 2, ("long rows", False)),
        ((3, 8192), 8193, 0, ("long rows", False)),
    ],
)
def test_the_variant_follows_rows_and_alignment(
    shape: tuple[int, int],
    stride: int,
    offset: int,
    key: tuple[str, bool],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And every variant gives the bits of contiguous, aligned memory."""
    x = _offset(shape, stride, offset, device)
    launched = record_launches(monkeypatch)
    plan = adjoint.plan(adjoint.silu, x, preference=TRITON)
    y = plan.run(x)
    ((variant, grid),) = launched
    constants = dict(variant.constants)
    kind = "one row" if constants["ONE_ROW"] else "long rows" if constants["BLOCK"] == plan.schedule["block"] else ""
    assert (kind or "short rows", bool(variant.aligned)) == key
    rows, tiles = shape[0], -(-shape[1] // plan.schedule["block"])
    expected = {"one row": (-(-rows * shape[1] // plan.schedule["block"]), 1), "short rows": (rows, 1)}
    assert grid[:2] == expected.get(key[0], (rows, tiles))
    plain = x.contiguous().clone()
    assert torch.equal(y, adjoint.silu(plain, preference=TRITON))


@pytest.mark.kernels
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alignment_changes_no_bit(
    subject: Any, dtype: torch.dtype, kernels: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both directions, each operand in turn shifted by one element of memory."""

    def shifted(tensor: Tensor) -> Tensor:
        memory = torch.empty(tensor.numel() + 1, dtype=dtype, device=device)
        return memory[1:].view(tensor.shape).copy_(tensor)

    case = Case("aligned rows", lambda dtype, device, generator: tuple(
        torch.randn(4, 320 * (2 if subject in PACKED else 1), generator=generator).mul(9).to(dtype).to(device)
        for _ in subject.inputs
    ))  # fmt: skip
    base = evaluate(subject, case, dtype, device, TRITON)
    launched = record_launches(monkeypatch)
    forward = plan_of(subject, base.inputs, TRITON)
    assert forward.adjoint is not None
    for plan, tensors, expected in (
        (forward, base.inputs, base.outputs),
        (forward.adjoint, (*base.upstream, *base.inputs), base.gradients),
    ):
        launched.clear()
        for moved in (None, *range(len(tensors))):
            results = plan.run(*(shifted(t) if i == moved else t for i, t in enumerate(tensors)))
            results = results if isinstance(results, tuple) else (results,)
            assert all(map(torch.equal, results, expected))
        assert [bool(variant.aligned) for variant, _ in launched] == [True] + [False] * len(tensors)


@pytest.mark.kernels
@pytest.mark.parametrize("need", [1, 2])
def test_a_gradient_nobody_needs_is_not_written(need: int, kernels: ModuleType, device: torch.device) -> None:
    gate, up, dy = (torch.randn(3, 40, device=device) for _ in range(3))
    dgate, dup = torch.ops.adjoint.swiglu_backward(dy, gate, up, need, "backend=triton")
    whole = torch.ops.adjoint.swiglu_backward(dy, gate, up, 3, "backend=triton")
    assert (dgate.numel() > 0, dup.numel() > 0) == (need == 1, need == 2)
    assert torch.equal((dgate, dup)[need - 1], whole[need - 1])


# ---------------------------------------------------------------------------------- counting, compiling


@pytest.mark.kernels
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_launches_are_counted_by_sku(subject: Any, device: torch.device) -> None:
    base = evaluate(subject, subject.cases[0], torch.float32, device, TRITON)
    chosen = plan_of(subject, base.inputs, TRITON)
    assert chosen.adjoint is not None
    before = registry.launches()
    for _ in range(3):
        differentiate(subject, base.inputs, base.upstream, TRITON)
    after = registry.launches()
    grown = {sku: count - before.get(sku, 0) for sku, count in after.items() if count != before.get(sku, 0)}
    assert grown == {str(chosen.sku): 3, str(chosen.adjoint.sku): 3}


def test_eager_plans_launch_nothing(device: torch.device) -> None:
    before = registry.launches()
    evaluate(SWIGLU, SWIGLU.cases[0], torch.float32, device, Preference(backend="eager"))
    assert registry.launches() == before


@pytest.mark.kernels
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_nothing_compiles_after_prepare(subject: Any, device: torch.device) -> None:
    """Whatever the number of rows, their length and their alignment."""
    tall = 2 if subject in PACKED else 1
    block = 128 << SUBJECTS.index(subject)  # nothing else uses it with so many warps: preparing compiles
    inputs = tuple(torch.randn(4, 64 * tall, device=device) for _ in subject.inputs)
    plan = plan_of(subject, inputs, TRITON).with_schedule(block=block, num_warps=2)
    registered = registry.compilations()
    plan.prepare()
    assert registry.compilations() - registered >= 2
    prepared = registry.compilations()
    found = []
    for rows, columns, gap, shift in itertools.product((1, 5), (1, 96, 700), (0, 16, 3), (0, 1)):
        if subject.keywords.get("order") == "interleaved" and gap == 3:
            gap = 4  # rows of pairs lie an even distance apart
        width = columns * tall
        tensors = tuple(
            torch.randn(shift + rows * (width + gap), device=device).as_strided((rows, width), (width + gap, 1), shift)
            for _ in subject.inputs
        )
        if plan.operator.describe(*tensors, *plan.problem.options) == plan.problem:
            found.append((plan.run(*tensors), tensors))
    assert len(found) >= 20
    assert registry.compilations() == prepared
    for y, tensors in found:
        assert torch.equal(y, subject(*tensors, preference=TRITON))


@pytest.mark.kernels
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_the_first_call_brings_every_variant(subject: Any, device: torch.device) -> None:
    base = evaluate(subject, subject.cases[0], torch.float32, device, TRITON)
    chosen = plan_of(subject, base.inputs, TRITON)
    assert chosen.adjoint is not None
    for plan, tensors in ((chosen, base.inputs), (chosen.adjoint, (*base.upstream, *base.inputs))):
        fresh = replace(plan)
        fresh.run(*tensors)
        rows = {(dict(x.variant.constants)["ONE_ROW"], x.variant.num_warps, x.aligned) for x in fresh.launches}
        assert len(rows) >= 4 and len(fresh.launches) == 6
        assert all(x.launch.__qualname__ == f"{x.kernel.name}.launch" for x in fresh.launches), "not compiled"


@pytest.mark.kernels
def test_preparing_twice_compiles_once(device: torch.device) -> None:
    x = torch.randn(4, 64, device=device)
    adjoint.plan(adjoint.silu, x, preference=TRITON).prepare()
    before = registry.compilations()
    adjoint.plan(adjoint.silu, x, preference=TRITON).prepare()
    adjoint.silu(x, preference=TRITON)
    assert registry.compilations() == before


# --------------------------------------------------------------------------------------------- variants


def _variants() -> list[Variant]:
    """What is built for an NVIDIA GPU and for an AMD GPU."""
    return [
        variant
        for target in ("sm_90", "gfx942")
        for module in ops.cases("activation")
        for call in module.built_calls()
        for _, variant in variants(call, target)
    ]


def test_every_kernel_is_built_for_every_dtype_and_alignment(kernels: ModuleType) -> None:
    built = _variants()
    own = [kernel for kernel in vars(kernels).values() if isinstance(kernel, registry.Kernel)]
    assert len(own) == 6 and {variant.kernel for variant in built} == {kernel.name for kernel in own}
    for kernel, dtype, native in itertools.product(own, DTYPES, (False, True)):
        element = f"*{registry.TRITON_TYPES[dtype]}"
        same = [
            variant
            for variant in built
            if variant.kernel == kernel.name
            and variant.types[0][1] == element
            and dict(variant.constants)["NATIVE"] == native
        ]
        strided = kernel.name.endswith("strided")
        assert {bool(variant.aligned) for variant in same} == ({False} if strided else {True, False})
        for variant in same:
            types, constants = dict(variant.types), dict(variant.constants)
            assert set(types.values()) <= {element, "i64", "i32"}
            assert all(kind == "i64" for name, kind in types.items() if "stride" in name or name == "columns")
            assert constants["NARROW"] == (dtype.itemsize == 2)
            multiples = {n for n, kind in variant.types if kind.startswith("*") or n.endswith("_stride")}
            assert set(variant.aligned) in (multiples, set())


def test_every_plan_is_on_a_kernel_of_the_module(kernels: ModuleType) -> None:
    from adjoint.ops.activation import plans

    names = {kernel.name for kernel in vars(kernels).values() if isinstance(kernel, registry.Kernel)}
    operators = [value for name, value in vars(plans).items() if name.isupper() and isinstance(value, tuple)]
    used = {c.kernel for candidates in operators for c in candidates if getattr(c, "backend", "") == "triton"}
    assert used == names
