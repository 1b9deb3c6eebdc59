"""What `recompute_w_u` is tested, verified and timed on.

It is timed on a layer of Qwen3-Next on one sequence, with T as it is solved and in 16 bits.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Rebatch, Subject, Workload
from adjoint.contract.inputs import each
from adjoint.core.plan import Call, bind
from adjoint.core.problem import short
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.stages.w_u import recompute_w_u
from adjoint.ops.gated_delta.values import (
    blank,
    calls_of,
    changed,
    drawn_on,
    gradients,
    integers,
    on_meta,
    solved,
    w_u,
    wrong,
    zeros,
)


def _alone(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    """Every sequence alone, whether it was a row of a batch or packed with others."""
    *tensors, cu_seqlens = inputs
    batch, time = tensors[0].shape[:2]
    for row, part in reference.sequences(batch, time, cu_seqlens):
        if part.start == part.stop:
            continue
        at = (slice(row, row + 1), part)

        def pairs(whole: Answers, alone: Answers, at: tuple[slice, slice] = at) -> Iterator[tuple[Tensor, Tensor]]:
            every, parts = (*whole[0], *whole[1]), (*alone[0], *alone[1])
            return ((part, x[at]) for x, part in zip(every, parts, strict=True))

        yield Rebatch(
            f"sequence {row}, {part.start}", (*(x[at] for x in tensors), None), tuple(x[at] for x in upstream), pairs
        )


_INPUTS = ("k", "v", "beta", "G", "T", "cu_seqlens")
_changed = partial(changed, w_u, _INPUTS)


def _cases(narrow: bool) -> tuple[Case, ...]:
    return (
        Case("grouped heads", solved((2, 5, 1, 2, 3, 2), 4, narrow=narrow)),
        Case("packed", solved((1, 40, 1, 2, 9, 7), 16, (0, 0, 1, 18, 40, 40), narrow)),
        Case("a layer", solved((1, 1000, 2, 4, 128, 128), 64, narrow=narrow), heavy=True),
    )


_SOLVED = Subject(
    name="recompute_w_u",
    function=recompute_w_u,
    inputs=_INPUTS,
    by_name=("cu_seqlens",),
    reference=w_u,
    reference_backward=gradients(w_u),
    cases=(*_cases(narrow=False), Case("no tokens", solved((1, 0, 1, 1, 4, 4), 16))),
    mistakes={
        "zero output": zeros,
        "w without its decay": wrong(_changed(G=lambda G: G * 0)),
        "T transposed": wrong(_changed(T=lambda T: T.flip(-1))),
        "gradient of T dropped": wrong(_changed(T=Tensor.detach)),
    },
    rebatched=_alone,
)
_NARROW = replace(_SOLVED, name="recompute_w_u[narrow T]", cases=_cases(narrow=True), dtypes=(torch.bfloat16,))

SUBJECTS = (_SOLVED, _NARROW)

# -------------------------------------------------------------------------------------------- bad calls

_call = calls_of(recompute_w_u, k=(1, 6, 1, 4), v=(1, 6, 2, 3), beta=(1, 6, 2), G=(1, 6, 2), T=(1, 6, 2, 4))

BAD_CALLS = (
    BadCall("T of another time", _call(T=blank(1, 5, 2, 4)), "recompute_w_u", "T", "(1, 6, 2, 4)"),
    BadCall("a chunk of 48", _call(T=blank(1, 6, 2, 48)), "chunk", "power of two", "64", "48"),
    BadCall("a chunk of 128", _call(T=blank(1, 6, 2, 128)), "chunk", "64", "128", "fit"),
    BadCall("T in another 16 bits", _call(T=blank(1, 6, 2, 4, dtype=torch.float16)), "T", "float32", "float16"),
    BadCall("G of another dtype", _call(G=blank(1, 6, 2, dtype=torch.float64)), "G", "float64"),
    BadCall("beta elsewhere", _call(beta=on_meta(1, 6, 2)), "beta", "meta"),
    BadCall("heads of v that do not divide", _call(k=blank(1, 6, 3, 4)), "2 heads of v", "3 heads of k"),
    BadCall("K past the cap in a stage", _call(k=blank(1, 6, 1, 300)), "K", "300", "256"),
    BadCall("bounds of a stage that descend", _call(cu_seqlens=integers(0, 4, 2, 6)),
            "cu_seqlens", "got 2 at position 2 "),
)  # fmt: skip

# -------------------------------------------------------------------------------------------- workloads

_TIME, _KEY_HEADS, _HEADS, _SIZE, _CHUNK = 32768, 16, 32, 128, 64

_PIECE = 1024
"""The number of tokens that are compared with the reference at once, in whole chunks."""


def _layer(narrow: bool) -> Make:
    """Keys of length 1, gates in their ranges, and matrices like solved ones: lower triangular with a diagonal of 1."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        source = drawn_on(device, generator)
        k = F.normalize(torch.randn(1, _TIME, _KEY_HEADS, _SIZE, **source), dim=-1).to(dtype)
        v = torch.randn(1, _TIME, _HEADS, _SIZE, **source).to(dtype)
        beta, G = torch.rand(1, _TIME, _HEADS, **source), -torch.rand(1, _TIME, _HEADS, **source) * 3
        place = (torch.arange(_TIME, device=device) % _CHUNK).view(1, _TIME, 1, 1)
        column = torch.arange(_CHUNK, device=device)
        T = torch.randn(1, _TIME, _HEADS, _CHUNK, **source) * 0.1
        T.masked_fill_(column > place, 0).masked_fill_(column == place, 1)
        return k, v, beta, G, T.to(dtype) if narrow else T, None

    return make


def composed(k: Tensor, v: Tensor, beta: Tensor, G: Tensor, T: Tensor, cu_seqlens: None) -> Any:
    """The stage in torch's own functions, which writes operands to memory and has a batched product for each result."""
    chunk, repeat = T.shape[-1], v.shape[2] // k.shape[2]

    def by_chunk(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, chunk)).transpose(2, 3)

    keys = (k.repeat_interleave(repeat, 2).float() * (beta * G.exp()).unsqueeze(-1)).to(k.dtype)
    values = (v.float() * beta.unsqueeze(-1)).to(v.dtype)
    matrix = by_chunk(T)
    w, u = ((matrix @ by_chunk(x).to(matrix.dtype)).to(k.dtype).transpose(2, 3).flatten(1, 2) for x in (keys, values))
    return w, u


def _pieces(arguments: Inputs, outputs: tuple[Tensor, ...]) -> Iterator[tuple[Inputs, tuple[Tensor, ...]]]:
    time = next(x for x in arguments if x is not None).shape[1]
    for begin in range(0, time, _PIECE):
        part = partial(Tensor.narrow, dim=1, start=begin, length=min(_PIECE, time - begin))
        yield each(part, arguments), tuple(map(part, outputs))


def _workloads() -> Iterator[Workload]:
    keys, values = _TIME * _KEY_HEADS * _SIZE * 2, _TIME * _HEADS * _SIZE * 2
    for subject, kind in ((_SOLVED, torch.float32), (_NARROW, torch.bfloat16)):
        narrow = subject is _NARROW
        inputs = keys + values + 2 * _TIME * _HEADS * 4 + _TIME * _HEADS * _CHUNK * kind.itemsize
        words = f"{_TIME} tokens, {_KEY_HEADS} and {_HEADS} heads of {_SIZE}, T {short(kind)}"
        for direction in ("forward", "backward"):
            yield Workload(
                name=f"recompute_w_u {words}",
                subject=replace(subject, cases=(), mistakes={}, rebatched=None, dtypes=_SOLVED.dtypes, pieces=_pieces),
                make=_layer(narrow),
                forward_bytes=inputs + 2 * values,
                backward_bytes=inputs + 2 * values + inputs,
                baseline=composed,
                peers=("fla_recompute_w_u",) if narrow and direction == "forward" else (),
                devices=("cuda",),
                directions=(direction,),
                recorded=True,
            )


WORKLOADS = tuple(_workloads())

# ----------------------------------------------------------------------------------------------- builds


def built_calls() -> Iterator[Call]:
    """Calls for every way to multiply by T, packed sequences, the longest rows, and rows that do not fill a tile."""
    half, single = torch.bfloat16, torch.float32
    for element, T in ((half, half), (half, single), (torch.float16, single), (single, single)):
        yield _built(element, T, 128)
    yield _built(half, single, 256, packed=True)
    yield _built(single, single, 256)
    yield _built(half, half, 9, chunk=16, packed=True)


def _built(element: torch.dtype, T: torch.dtype, size: int, chunk: int = _CHUNK, packed: bool = False) -> Call:
    k, v = (on_meta(1, 64, heads, size, dtype=element) for heads in (1, 2))
    beta, G, matrices = on_meta(1, 64, 2), on_meta(1, 64, 2), on_meta(1, 64, 2, chunk, dtype=T)
    bounds = on_meta(3, dtype=torch.int64) if packed else None
    return bind(recompute_w_u, k, v, beta, G, matrices, cu_seqlens=bounds)
