"""The corrections to the interpreter: bfloat16 against torch's own conversions, sorts, and what it remembers."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adjoint.core import kernels
from adjoint.verify import interpreter


def _floats() -> torch.Tensor:
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x00008000, 0x7F7FFFFF], dtype=torch.int32)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-45])
    return torch.cat([ties.view(torch.float32), special, torch.randn(1000) * 1e3])


def test_narrow_rounds_to_nearest_even_like_torch() -> None:
    values = _floats()
    bits = torch.from_numpy(interpreter.narrow(values.numpy()).astype(np.int16)).view(torch.bfloat16)
    expected = values.to(torch.bfloat16)
    assert torch.equal(bits.isnan(), expected.isnan())
    keep = ~expected.isnan()
    assert torch.equal(bits[keep].view(torch.int16), expected[keep].view(torch.int16))


def test_widen_is_exact_for_every_value() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    values = torch.from_numpy(interpreter.widen(bits))
    expected = torch.from_numpy(bits.astype(np.int16)).view(torch.bfloat16).float()
    assert torch.equal(values.isnan(), expected.isnan())
    keep = ~expected.isnan()
    assert torch.equal(values[keep], expected[keep])


@pytest.mark.kernels
def test_kernels_convert_bfloat16_like_torch(device: torch.device) -> None:
    from tests.verify.interpreter.conversion_kernels import convert, product

    values = _floats().to(device)
    narrow = torch.empty_like(values, dtype=torch.bfloat16)
    back = torch.empty_like(values)
    convert[(1,)](values, narrow, back, values.numel(), BLOCK=2048)
    expected = values.to(torch.bfloat16)
    assert torch.equal(narrow.isnan(), expected.isnan())
    keep = ~expected.isnan()
    assert torch.equal(narrow[keep].view(torch.int16), expected[keep].view(torch.int16))
    assert torch.equal(back[keep], expected[keep].float())

    left = torch.randn(16, 16, device=device).to(torch.bfloat16)
    right = torch.randn(16, 16, device=device).to(torch.bfloat16)
    out = torch.empty(16, 16, device=device)
    product[(1,)](left, right, out, SIZE=16)
    exact = left.double() @ right.double()
    bound = 16 * 2.0**-23 * (left.double().abs() @ right.double().abs())  # 16 products summed in float32
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.kernels
def test_correction_is_applied_once_and_only_where_needed() -> None:
    if not kernels.interpreting():
        pytest.skip("the interpreter is off")
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    assert interpreter.correct_bfloat16() == (version <= interpreter.LAST_VERSION_WITH_FAULT)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kernels_sort_integers_like_torch(dtype: torch.dtype, device: torch.device) -> None:
    from tests.verify.interpreter.conversion_kernels import order

    values = torch.randint(-50, 50, (64,), dtype=dtype, generator=torch.Generator().manual_seed(0)).to(device)
    ascending, descending = torch.empty_like(values), torch.empty_like(values)
    largest = torch.empty_like(values[:8])
    order[(1,)](values, ascending, descending, largest, SIZE=64, FEW=8)
    assert torch.equal(ascending, values.sort().values)
    assert torch.equal(descending, values.sort(descending=True).values)
    assert torch.equal(largest, values.sort(descending=True).values[:8])


@pytest.mark.kernels
def test_names_are_those_of_the_language_again_after_a_launch(device: torch.device) -> None:
    """Whatever the interpreter remembers, it puts in place for a launch alone."""
    if not kernels.interpreting():
        pytest.skip("the interpreter is off")
    import triton.language as tl

    from tests.verify.interpreter.conversion_kernels import convert

    values = torch.randn(8)
    for _ in range(2):
        convert[(1,)](values, torch.empty(8, dtype=torch.bfloat16), torch.empty(8), 8, BLOCK=16)
        assert tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.tensor.to)


def test_numpy_types_are_those_the_interpreter_looks_up() -> None:
    import triton.language as tl
    from triton.runtime import interpreter as theirs

    for kind in (tl.int1, tl.bfloat16, tl.float32, tl.int64, tl.uint32, tl.pointer_type(tl.float32)):
        block = tl.block_type(kind, [4])
        expected = {"int1": "bool", "bf16": "uint16", "fp32": "float32"}.get(kind.name, kind.name)
        expected = "uint64" if kind.name.startswith("pointer") else expected
        assert theirs._get_np_dtype(kind) == theirs._get_np_dtype(block) == np.dtype(expected)


def test_blocks_and_values_are_those_that_triton_makes() -> None:
    """And so are their errors; in a process of its own, where nothing is remembered yet."""
    code = """
import triton.language as tl
from adjoint.verify.interpreter import remember_shapes

def made():
    kinds = (tl.int32, tl.bfloat16, tl.pointer_type(tl.float32))
    blocks = [tl.block_type(kind, shape) for shape in ([4], [2], [4, 8], [tl.constexpr(2), 1]) for kind in kinds] * 2
    values = [tl.tensor(None, kind) for kind in (*blocks, *kinds)]
    wrong = []
    for shape in ([3], [], [2.0], [2**21]):
        try:
            tl.block_type(tl.int32, shape)
        except Exception as error:
            wrong.append((type(error), str(error)))
    names = ("element_ty", "shape", "numel", "name", "scalar")
    show = lambda x: (type(x), str(x), [type(i) for i in x] if isinstance(x, tl.core.tuple) else "")
    return (
        [[show(getattr(x, name)) for name in names] for x in blocks],
        [[show(getattr(x, name)) for name in ("shape", "numel", "dtype", "type")] for x in values],
        wrong,
    )

before = made()
make = tl.block_type.__init__
remember_shapes()
assert tl.block_type.__init__ is not make, "this version is not known"
remembering = tl.block_type.__init__
remember_shapes()
assert tl.block_type.__init__ is remembering
after, again = made(), made()
assert len(before[2]) == 4
assert str(before) == str(after) == str(again), f"{before}\\n{after}"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("debug", (True, False))
def test_overflow_is_checked_where_it_is_reported(debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.language.semantic import TritonSemantic

    checked = []
    name = "binary_op_sanitize_overflow_impl"
    monkeypatch.setattr(TritonSemantic, name, lambda self, *operands: checked.append(operands))
    interpreter.skip_unreported_checks()
    once = getattr(TritonSemantic, name)
    interpreter.skip_unreported_checks()
    assert getattr(TritonSemantic, name) is once
    once(SimpleNamespace(builder=SimpleNamespace(options=SimpleNamespace(debug=debug))), 1, 2, "add")
    assert checked == ([(1, 2, "add")] if debug else [])


@pytest.mark.kernels
def test_arrays_of_one_element_bound_loops_whatever_numpy_says(device: torch.device) -> None:
    """numpy 2.4 refuses what Triton 3.6 does: `int` of an array with an axis."""
    if not kernels.interpreting():
        pytest.skip("of the interpreter")
    import triton.language as tl
    from triton.runtime import interpreter as triton_interpreter

    class Scope:
        def set_attr(self, place: object, name: str, value: object) -> None:
            attributes[name] = value

    attributes: dict[str, object] = {}
    triton_interpreter._patch_lang_tensor(tl.core.tensor, Scope())
    index = attributes["__index__"]

    class Refusing(np.ndarray):
        def __int__(self) -> int:
            raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

        def squeeze(self, *axes: object) -> "Refusing":  # Triton 3.7's own way, kept from hiding ours
            return self

    bound = SimpleNamespace(handle=SimpleNamespace(data=np.array([7]).view(Refusing)))
    assert index(bound) == 7  # type: ignore[operator]
