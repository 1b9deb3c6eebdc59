"""Kernels with typed parameters, and what a plan's setup derives from them."""

import pytest
import torch
import triton
import triton.language as tl

from adjoint import ops
from adjoint.core.kernels import (
    Budget,
    Float32,
    Int32,
    Int64If16,
    Pointer,
    Pointer16,
    PointerIf16,
    interpreting,
    kernel,
    registered,
)
from adjoint.core.launch import Setup, is_aligned, setups
from adjoint.core.problem import Problem
from tests.core.constants import unexplained


@kernel(budget=Budget(registers=64), numeric=("CHUNK", "precision"), schedule=("BLOCK",))
@triton.jit
def scaled_copy(
    x: PointerIf16.element, y: Pointer16.precision, ids: Pointer.int32, factor: Float32, count: Int32,
    stride: Int64If16, CHUNK: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + lane, tl.load(x + lane * stride, lane < count) * factor, lane < count)


SETTINGS = {"element": torch.float32, "precision": torch.float32, "CHUNK": 64, "BLOCK": 128, "SIZE": 48}


def a_setup(*sizes: int, target: str | None = "sm_90") -> Setup:
    return Setup(Problem("scale", torch.device("cpu"), (torch.float32,), "", sizes), {}, target)


def test_types_are_those_of_the_signature() -> None:
    launch = a_setup().kernel(scaled_copy, **SETTINGS | {"element": torch.bfloat16})
    assert dict(launch.variant.types) == {
        "x": "*bf16", "y": "*fp32", "ids": "*i32", "factor": "fp32", "count": "i32", "stride": "i64"
    }  # fmt: skip
    assert dict(launch.variant.constants) == {"CHUNK": 64, "BLOCK": 128, "SIZE": 48}


def test_multiples_of_16_are_those_of_the_signature() -> None:
    either = a_setup().either(scaled_copy, **SETTINGS)
    assert either[True].variant.aligned == ("x", "y", "stride")
    assert either[False].variant.aligned == ("y",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SIZE": None}, "missing are SIZE"),
        ({"element": None}, "missing are element"),
        ({"TILE": 3}, "unknown are TILE"),
    ],
)
def test_a_launch_settles_every_constant_and_type(change: dict[str, int | None], words: str) -> None:
    settings = {name: value for name, value in (SETTINGS | change).items() if value is not None}
    with pytest.raises(TypeError, match=rf"scaled_copy: .*{words}"):
        a_setup().kernel(scaled_copy, **settings)


def test_a_signature_without_a_type_is_an_error() -> None:
    @triton.jit
    def untyped(x, count: Int32, BLOCK: tl.constexpr):
        pass

    with pytest.raises(TypeError, match="untyped: the signature states no type for x"):
        kernel(budget=Budget(registers=8))(untyped)
    assert "untyped" not in registered()


def test_constants_come_last() -> None:
    @triton.jit
    def early(BLOCK: tl.constexpr, x: Pointer.float32):
        pass

    with pytest.raises(TypeError, match="early: compile-time parameters come after the others"):
        kernel(budget=Budget(registers=8))(early)


def test_a_numeric_parameter_must_exist() -> None:
    @triton.jit
    def plain(x: Pointer.float32, BLOCK: tl.constexpr):
        pass

    with pytest.raises(TypeError, match="plain: no compile-time parameter is called CHUNK"):
        kernel(budget=Budget(registers=8), numeric=("CHUNK",))(plain)


# --------------------------------------------------------------------------------------- what is derived


def test_numeric_parameters_come_from_what_is_bound() -> None:
    setup = a_setup()
    setup.add_numeric(order="gate_up")
    setup.kernel(scaled_copy, **SETTINGS)
    assert setup.numeric == {"order": "gate_up", "chunk": 64, "precision": "float32"}


def test_two_values_of_one_numeric_parameter_are_an_error() -> None:
    """A plan whose kernels disagree cannot say in its SKU what fixes its bits."""
    setup = a_setup()
    for chunk in (64, 32):
        setup.kernel(scaled_copy, **SETTINGS | {"CHUNK": chunk})
    with pytest.raises(AssertionError, match="chunk is numeric, and both 64 and 32"):
        _ = setup.numeric


def test_a_constant_that_nothing_explains_is_noticed() -> None:
    setup = a_setup(7, 48)
    setup.kernel(scaled_copy, **SETTINGS)
    assert list(unexplained(setup)) == []
    setup.kernel(scaled_copy, **SETTINGS | {"SIZE": 20})
    (words,) = unexplained(setup)
    assert words.startswith("scaled_copy: SIZE=20 is no size of")


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_every_constant_of_every_kernel_is_explained(target: str) -> None:
    """Numeric and in the SKU, part of a schedule, or a fact of the problem."""
    calls = [call for module in ops.cases() if hasattr(module, "built_calls") for call in module.built_calls()]
    named = [call[:2] if isinstance(call, tuple) else (call, "") for call in calls]
    every = [setup for call, plan in named for setup in setups(call, target, plan)]
    assert len(every) > 20
    assert [words for setup in every for words in unexplained(setup)] == []


# ----------------------------------------------------------------------------------------------- launches


@pytest.mark.kernels
def test_a_launch_is_by_name(device: torch.device) -> None:
    setup = Setup(Problem("scale", device, (torch.float32,)), {})
    bound = setup.either(scaled_copy, **SETTINGS)
    x, y = torch.arange(200.0, device=device), torch.full((200,), torch.nan, device=device)
    arguments = {"x": x, "y": y, "ids": torch.zeros(1, dtype=torch.int32, device=device), "factor": 2.0, "count": 200}
    bound[False].launch((2,), **arguments, stride=1)
    assert torch.equal(y, 2 * x)
    with pytest.raises(TypeError, match=r"scaled_copy\.launch.*stride"):
        bound[True].launch((2,), **arguments)
    with pytest.raises(TypeError, match=r"scaled_copy\.launch.*step"):
        bound[True].launch((2,), **arguments, stride=1, step=1)
    y.fill_(torch.nan)
    bound[False].launch((0,), **arguments, stride=1)
    assert y.isnan().all(), "a grid without programs launches nothing"


@pytest.mark.kernels
def test_the_first_launch_compiles_all_that_is_bound(device: torch.device) -> None:
    setup = Setup(Problem("scale", device, (torch.float32,)), {})
    first, second = (setup.kernel(scaled_copy, **SETTINGS | {"BLOCK": block}) for block in (16, 32))
    unprepared = second.launch.__qualname__
    x = torch.ones(16, device=device)
    first.launch((1,), x=x, y=x, ids=x.int(), factor=1.0, count=16, stride=1)
    assert second.launch.__qualname__ == "scaled_copy.launch" != unprepared


def test_alignment_is_of_every_tensor() -> None:
    x = torch.empty(64, dtype=torch.uint8)
    base = -x.data_ptr() % 16
    assert is_aligned(x[base:], None, x[base + 16 :])
    assert not is_aligned(x[base:], x[base + 8 :])


@pytest.mark.kernels
@pytest.mark.skipif(not interpreting(), reason="a GPU takes a launch at its word")
def test_the_interpreter_takes_no_launch_at_its_word() -> None:
    """A kernel that is compiled for multiples of 16 is wrong, or traps, where they are none."""
    x, y = torch.arange(800.0), torch.zeros(48)
    bound = a_setup(target="cpu").either(scaled_copy, **SETTINGS)
    rest = {"y": y, "ids": torch.zeros(1, dtype=torch.int32), "factor": 2.0, "count": 48}
    bound[True].launch((1,), x=x, stride=16, **rest)
    assert torch.equal(y, 2 * x[: 48 * 16 : 16])
    with pytest.raises(AssertionError, match="scaled_copy: x is stated to be a multiple of 16"):
        bound[True].launch((1,), x=x[1:], stride=16, **rest)
    with pytest.raises(AssertionError, match="stride is stated to be a multiple of 16, and is 3"):
        bound[True].launch((1,), x=x, stride=3, **rest)
    bound[False].launch((1,), x=x[1:], stride=3, **rest)
    assert torch.equal(y, 2 * x[1 : 1 + 48 * 3 : 3])
