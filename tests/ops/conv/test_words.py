"""Steps whose channels go by two, as words, have the bits of those whose channels go one by one."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.core import kernels
from adjoint.ops.conv.triton import step
from adjoint.verify.checks.bits import same_bits

TRITON = Preference(backend="triton")
INDICES = (3, -1, 0, 6, 2)


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(inputs: tuple[Tensor | None, ...], device: torch.device, in_place: bool, **options: Any) -> tuple[Tensor, ...]:
    x, state, weight, bias = (None if t is None else t.to(device) for t in inputs)
    assert state is not None
    own = state.clone() if in_place else state
    outputs = adjoint.causal_conv1d_step(x, own, weight, bias, in_place=in_place, preference=TRITON, **options)
    return (*outputs, own)


def both_ways(
    monkeypatch: pytest.MonkeyPatch, inputs: tuple[Tensor | None, ...], device: torch.device, **options: Any
) -> bool:
    """Asserts that both have equal bits; whether one of them went by words."""
    in_words, seen = step._in_words, []

    def spy(*arguments: Any) -> bool:
        seen.append(in_words(*arguments))
        return seen[-1]

    monkeypatch.setattr(step, "_in_words", spy)
    words = run(inputs, device, **options)
    monkeypatch.setattr(step, "_in_words", lambda *arguments: False)
    singly = run(inputs, device, **options)
    monkeypatch.setattr(step, "_in_words", in_words)
    assert all(map(same_bits, words, singly))
    return any(seen)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", range(1, 9))
def test_words_have_the_bits_of_single_numbers(
    width: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = product((1, 3), (True, False), ("silu", None), (True, False), (True, False))
    for number, (time, has_bias, activation, is_indexed, in_place) in enumerate(forms):
        if (number + width + 2 * (dtype == torch.float16)) % 4:  # every form has its turn, at some width
            continue
        x = draw(5, time, 48, dtype=dtype, seed=number)
        x[0, 0, 1], x[2, 0, 0], x[3, 0, 3] = torch.nan, torch.inf, -0.0
        state = draw(7 if is_indexed else 5, 48, width - 1, dtype=dtype, seed=1)
        weight, bias = draw(48, width, dtype=dtype, seed=2), draw(48, dtype=dtype, seed=3) if has_bias else None
        indices = torch.tensor(INDICES, device=device) if is_indexed else None
        assert both_ways(
            monkeypatch, (x, state, weight, bias), device, activation=activation, state_indices=indices,
            in_place=in_place,
        )  # fmt: skip


@pytest.mark.kernels
def test_what_does_not_lie_in_words_goes_singly(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16
    x, state, weight = (
        draw(5, 1, 48, dtype=dtype, seed=0),
        draw(5, 48, 3, dtype=dtype, seed=1),
        draw(48, 4, dtype=dtype, seed=2),
    )
    wide = draw(5, 1, 64, dtype=dtype, seed=3)
    cases = {
        "as it is": ((x, state, weight), True),
        "rows of a wider tensor": ((wide[..., :48], state, weight), True),
        "an odd number of channels": ((x[..., :33].contiguous(), state[:, :33].contiguous(), weight[:33]), False),
        "channels from an odd one on": ((wide[..., 1:49], state, weight), False),
        "states by column": ((x, state.mT.contiguous().mT, weight), False),
        "states of an odd distance": ((x, draw(5, 145, dtype=dtype, seed=4)[:, :144].view(5, 48, 3), weight), False),
        "states from an odd one on": ((x, draw(721, dtype=dtype, seed=4)[1:].view(5, 48, 3), weight), False),
        "taps by tap": ((x, state, weight.mT.contiguous().mT), False),
        "taps of another type": ((x, state, weight.float()), False),
        "float32": ((x.float(), state.float(), weight.float()), False),
    }
    for name, (tensors, is_expected) in cases.items():
        if device.type != "cpu" and name.startswith(("rows", "channels", "states", "taps by")):
            continue  # a copy to the device lies otherwise
        assert both_ways(monkeypatch, (*tensors, None), device, in_place=False) == is_expected, name


@pytest.mark.skipif(kernels.interpreting() or bool(kernels.triton_missing()), reason="the ordinary process compiles")
def test_states_go_by_sixteen_bytes() -> None:
    """And a row takes about half the instructions that it takes by single numbers."""
    import re

    from triton.backends.compiler import GPUTarget

    from adjoint.ops import builds

    lengths = {}
    for _, variant in builds("sm_90"):
        constants = dict(variant.constants)
        plain = not constants.get("INDEXED") and not constants.get("IN_PLACE") and constants.get("WIDTH") == 4
        is_step = variant.kernel in ("conv_step", "conv_step_words")
        if is_step and plain and dict(variant.types)["x"] == "*bf16" and "x" in variant.aligned:
            ptx, rows = variant.compile(GPUTarget(*kernels.TARGETS["sm_90"])).asm["ptx"], constants["ROWS"]
            lengths[variant.kernel] = len(re.findall(r"^\s+(?!//)[@\w].*;", ptx, re.MULTILINE)) / rows
            if variant.kernel == "conv_step_words":
                assert not re.search(r"(?:ld|st)\.global\S*\.b16", ptx)
                assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) == rows
                assert len(re.findall(r"st\.global\S*\.v4\.b32", ptx)) == rows
    assert lengths["conv_step_words"] < 0.6 * lengths["conv_step"], lengths
