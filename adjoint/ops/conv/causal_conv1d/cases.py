"""What `causal_conv1d` is tested, verified and timed on."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract.cases import BadCall, Case, Inputs, Make, Subject, Workload, normal
from adjoint.contract.mistakes import answers, narrow_arithmetic, zeros
from adjoint.core.plan import Call, bind
from adjoint.ops.conv import reference
from adjoint.ops.conv.causal_conv1d import causal_conv1d
from adjoint.ops.conv.values import LAYOUTS, inputs, pieces, present, rebatched
from adjoint.ops.gated_delta.values import blank, calls_of, integers, on_meta

_INPUTS = ("x", "weight", "bias", "initial_state", "cu_seqlens")


class _Mode:
    """The reference of a mode: with an activation, with final states, or in parts."""

    def __init__(self, is_silu: bool = True, has_states: bool = False, split: tuple[int, ...] | None = None) -> None:
        self.is_silu, self.has_states, self.split = is_silu, has_states, split
        self.parts = 1 if split is None else len(split)

    def forward(self, *values: Any) -> tuple[Tensor, ...]:
        y, states = reference.forward(*values, is_silu=self.is_silu)
        parts = (y,) if self.split is None else y.split(self.split, -1)
        return *parts, *(states,) * self.has_states

    def backward(self, *values: Any) -> tuple[Tensor, ...]:
        dy, rest = torch.cat(values[: self.parts], -1), values[self.parts :]
        dfinal_state, *own = rest if self.has_states else (None, *rest)
        return present(reference.backward(dy, dfinal_state, *own, is_silu=self.is_silu), *own[:4])

    def mistakes(self) -> dict[str, Any]:
        """Wrong answers. A formula takes x, weight, bias, state and bounds, after the upstream gradients."""
        count = self.parts + self.has_states

        def of(change: Callable[..., tuple[Any, ...]]) -> Any:
            """Both directions of changed inputs."""

            def backward(*values: Any) -> tuple[Tensor, ...]:
                return self.backward(*values[:count], *change(*values[count:]))

            return answers(lambda *values: self.forward(*change(*values)), backward)

        def exchange(place: int, change: Callable[..., Tensor]) -> Any:
            """The right results, but one gradient."""

            def backward(*values: Any) -> tuple[Tensor, ...]:
                gradients = list(self.backward(*values))
                gradients[place] = change(gradients[place], *values)
                return tuple(gradients)

            return answers(self.forward, backward)

        made = {
            "zero output": zeros,
            "narrow arithmetic": narrow_arithmetic(self.forward, self.backward),
            "taps reversed": of(lambda x, weight, *others: (x, weight.flip(1), *others)),
            "a token ahead": of(lambda x, *others: (x.roll(-1, 1), *others)),
            "the states of other channels": of(
                lambda x, weight, bias, state, bounds: (x, weight, bias, state.flip(1), bounds)
            ),
            "dweight of the taps reversed": exchange(1, lambda gradient, *values: gradient.flip(1)),
            "gradient of the state dropped": exchange(-1, lambda gradient, *values: gradient * 0),
        }
        if self.is_silu:
            without = _Mode(False, self.has_states, self.split)
            made["the slope of the activation left out"] = answers(self.forward, without.backward)
            made["no activation"] = answers(without.forward, self.backward)
        return made


_PACKED = (0, 0, 1, 3, 20, 20, 59, 60)
"""Sequences of 0, 1, 2, 17, 0, 39 and 1 tokens."""

_CASES = (
    Case("two rows", inputs(2, 7, 3, 4)),
    Case("packed", inputs(1, 60, 40, 4, cu_seqlens=_PACKED)),
    Case("packed, without states", inputs(1, 60, 16, 3, cu_seqlens=_PACKED, state=False)),
    Case("x and weight alone", inputs(2, 37, 20, 4, bias=False, state=False)),
    Case("weight and bias in float32", inputs(2, 37, 16, 4, wide=True)),
    Case("one tap", inputs(2, 19, 5, 1)),
    Case("eight taps", inputs(2, 21, 19, 8)),
    Case("shorter than the window", inputs(3, 2, 4, 6)),
    Case("one token", inputs(3, 1, 4, 4)),
    Case("no tokens", inputs(2, 0, 4, 4)),
    Case("no rows", inputs(0, 5, 4, 4)),
    Case("no channels", inputs(2, 5, 0, 4)),
    Case("aligned", inputs(2, 48, 32, 4)),
    Case("large values", inputs(1, 20, 16, 4, scale=6.0)),
    Case("transposed, aligned", inputs(2, 48, 16, 4, layout="transposed")),
    *(Case(layout, inputs(2, 33, 16, 4, layout=layout)) for layout in LAYOUTS if layout != "contiguous"),
)


def _subject(name: str, mode: _Mode, cases: tuple[Case, ...], **keywords: Any) -> Subject:
    return Subject(
        name=name,
        function=causal_conv1d,
        inputs=_INPUTS,
        by_name=_INPUTS[3:],
        keywords=keywords,
        reference=mode.forward,
        reference_backward=mode.backward,
        cases=cases,
        mistakes=mode.mistakes(),
        batched=("x", "initial_state"),
        rebatched=rebatched,
        pieces=pieces,
    )


_SPLIT = (16, 5, 11)

CONV = _subject("causal_conv1d", _Mode(), _CASES)
WITH_STATES = _subject(
    "causal_conv1d[states]",
    _Mode(False, True),
    tuple(
        case
        for case in _CASES
        if case.name in ("two rows", "packed", "eight taps", "shorter than the window", "one token", "no tokens")
    ),
    activation=None,
    output_final_state=True,
)
IN_PARTS = _subject(
    "causal_conv1d[split]",
    _Mode(True, True, _SPLIT),
    (
        Case("two rows", inputs(2, 7, 32, 4)),
        Case("packed", inputs(1, 60, 32, 4, cu_seqlens=_PACKED)),
        Case("a slice", inputs(2, 33, 32, 4, layout="a slice")),
        Case("transposed", inputs(2, 48, 32, 3, layout="transposed")),
    ),
    output_final_state=True,
    split=_SPLIT,
)

TWO_PARTS, FOUR_PARTS = (
    replace(
        _subject(
            f"causal_conv1d[{len(split)} parts]", _Mode(True, True, split), cases, split=split, output_final_state=True
        ),
        dtypes=(torch.bfloat16,),
    )
    for split, cases in (
        ((16, 5), (Case("two rows", inputs(2, 7, 21, 4)), Case("packed", inputs(1, 60, 21, 4, cu_seqlens=_PACKED)))),
        (
            (3, 8, 1, 4),
            (Case("two rows", inputs(2, 7, 16, 4)), Case("transposed", inputs(2, 48, 16, 3, layout="transposed"))),
        ),
    )
)
"""Of one dtype: every number of parts is an operator of its own, with the kernels of the others."""

SUBJECTS = (CONV, WITH_STATES, IN_PARTS, TWO_PARTS, FOUR_PARTS)

# -------------------------------------------------------------------------------------------- bad calls

_call = calls_of(causal_conv1d, x=(2, 5, 6), weight=(6, 4))
_packed = calls_of(causal_conv1d, x=(1, 5, 6), weight=(6, 4))


BAD_CALLS = (
    BadCall("x with two axes", _call(x=blank(5, 6)), "causal_conv1d", "x", "axes", "(5, 6)"),
    BadCall("weight of other channels", _call(weight=blank(5, 4)), "weight", "6 channels", "(5, 4)"),
    BadCall("weight as modules keep it", _call(weight=blank(6, 1, 4)), "weight", "(6, 1, 4)", "weight.squeeze(1)"),
    BadCall("no taps", _call(weight=blank(6, 0)), "width", "1 to 8", "got 0"),
    BadCall("nine taps", _call(weight=blank(6, 9)), "width", "1 to 8", "got 9"),
    BadCall("weight of another 16-bit dtype", _call(x=blank(2, 5, 6, dtype=torch.bfloat16),
            weight=blank(6, 4, dtype=torch.float16)), "weight", "bfloat16", "float16"),
    BadCall("bias of another size", _call(bias=blank(5)), "bias", "(6,)", "(5,)"),
    BadCall("bias elsewhere", _call(bias=lambda device: on_meta(6)), "bias", "meta"),
    BadCall("another activation", _call(activation="gelu"), "activation", "'silu'", "'gelu'"),
    BadCall("a state of another width", _call(initial_state=blank(2, 6, 4)), "initial_state", "(2, 6, 3)", "(2, 6, 4)"),
    BadCall("a state for another batch", _call(initial_state=blank(3, 6, 3)), "initial_state", "(2, 6, 3)"),
    BadCall("a state of another dtype", _call(initial_state=blank(2, 6, 3, dtype=torch.float64)), "initial_state",
            "float32", "float64"),
    BadCall("a split that does not add up", _call(split=(2, 3)), "split", "6 channels", "(2, 3)", "5"),
    BadCall("a negative part", _call(split=(7, -1)), "split", "not negative", "-1"),
    BadCall("a part that is no number", _call(split=(2.0, 4)), "split", "whole", "2.0"),
    BadCall("a split without parts", _call(split=()), "split", "1 to 4", "got 0"),
    BadCall("too many parts", _call(split=(1, 1, 1, 1, 2)), "split", "1 to 4", "got 5"),
    BadCall("a split that is a number", _call(split=6), "split", "tuple", "int"),
    BadCall("several rows of packed sequences", _call(cu_seqlens=integers(0, 5)), "cu_seqlens", "batch", "got 2"),
    BadCall("cu_seqlens with two axes", _packed(cu_seqlens=lambda d: torch.zeros(2, 1, dtype=torch.int64, device=d)),
            "cu_seqlens", "one axis"),
    BadCall("cu_seqlens that begin late", _packed(cu_seqlens=integers(1, 5)), "cu_seqlens", "got 1 at position 0"),
    BadCall("cu_seqlens that descend", _packed(cu_seqlens=integers(0, 4, 3, 5)), "cu_seqlens", "got 3 at position 2"),
    BadCall("cu_seqlens that end early", _packed(cu_seqlens=integers(0, 4)), "cu_seqlens", "got 4 at position 1"),
    BadCall("cu_seqlens that end late", _packed(cu_seqlens=integers(0, 9)), "cu_seqlens", "got 9 at position 1"),
    BadCall("no sequence for some tokens", _packed(cu_seqlens=integers(0)), "cu_seqlens", "got 0 at position 0"),
)  # fmt: skip

# -------------------------------------------------------------------------------------------- workloads


def _in_torch(x: Tensor, weight: Tensor, bias: Any = None, state: Any = None, cu_seqlens: Any = None) -> Tensor:
    """Padding, the convolution and the activation; of packed sequences, one after the other."""

    def convolve(rows: Tensor) -> Tensor:
        padded = F.pad(rows.transpose(1, 2), (weight.shape[1] - 1, 0))
        return F.silu(F.conv1d(padded, weight[:, None], bias, groups=weight.shape[0])).transpose(1, 2)

    if cu_seqlens is None:
        return convolve(x)
    return torch.cat([convolve(x[:, part]) for _, part in reference.sequences(x, cu_seqlens)], 1)


def _drawn(time: int, channels: int, width: int, sequences: int) -> Make:
    """x and weight, without bias and states; sequences of one length, where they are packed."""
    draw = normal((1, time, channels), (channels, width))

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        bounds = torch.arange(sequences + 1, dtype=torch.int32, device=device) * (time // sequences)
        return *draw(dtype, device, generator), None, None, bounds if sequences > 1 else None

    return make


def _workload(time: int, channels: int, width: int, sequences: int = 1, **more: Any) -> Workload:
    name = f"causal_conv1d {time}×{channels}, width {width}" + (f", {sequences} sequences" if sequences > 1 else "")
    one = 2 * time * channels
    return Workload(
        name, CONV, _drawn(time, channels, width, sequences), 2 * one, 3 * one, _in_torch,
        peers=("fla_causal_conv1d",), compile=sequences == 1, **more,
    )  # fmt: skip


WORKLOADS = (
    _workload(32768, 8192, 4, devices=("cuda",)),
    _workload(32768, 8192, 4, 64, devices=("cuda",)),
    _workload(4096, 2048, 4),
)

# ----------------------------------------------------------------------------------------------- builds

_BF16, _F16, _F32, _F64, _I32, _I64 = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64
)  # fmt: skip


def _built(
    dtype: torch.dtype, channels: int, width: int, *, parameters: torch.dtype | None = None,
    bounds: torch.dtype | None = None, states: bool = False, transposed: bool = False, **options: Any,
) -> Call:  # fmt: skip
    parameters, number = parameters or dtype, 3 if bounds else 2
    shape = (1 if bounds else 2, 4096, channels)
    x = on_meta(shape[0], channels, 4096, dtype=dtype).transpose(1, 2) if transposed else on_meta(*shape, dtype=dtype)
    return bind(
        causal_conv1d, x, on_meta(channels, width, dtype=parameters),
        on_meta(channels, dtype=parameters) if states else None,
        initial_state=on_meta(number, channels, width - 1, dtype=dtype) if states else None, output_final_state=states,
        cu_seqlens=on_meta(number + 1, dtype=bounds) if bounds else None, **options,
    )  # fmt: skip


def built_calls() -> Iterator[Call]:
    """The benchmark's, every dtype, the narrowest and the widest window, each layout, and all modes at once."""
    yield _built(_BF16, 8192, 4)
    yield _built(_BF16, 8192, 4, bounds=_I32)
    yield _built(_BF16, 8192, 4, bounds=_I64, states=True, parameters=_F32, split=(2048, 2048, 4096))
    yield _built(_BF16, 1000, 2, states=True, activation=None)
    yield _built(_F16, 2048, 1, states=True)
    yield _built(_F16, 2048, 8, bounds=_I32, states=True)
    yield _built(_BF16, 2048, 4, transposed=True, states=True)
    yield _built(_F32, 2048, 4, states=True)
    yield _built(_F32, 2048, 8, states=True)
    yield _built(_F64, 2048, 4, states=True)
    yield _built(_F64, 2048, 4, transposed=True)
