"""What `recompute_w_u` is tested, verified and timed on.

It is timed on a layer of Qwen3-Next on one sequence, with T as it is solved and in 16 bits.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Rebatch, Subject, Workload
from adjoint.core.plan import Call, bind
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.stages.values import solved, w_u
from adjoint.ops.gated_delta.stages.w_u import recompute_w_u
from adjoint.ops.gated_delta.values import gradients, wrong, zeros


def _alone(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    """Every sequence by itself, whether it was a row of a batch or packed with others."""
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


_MISTAKES = {
    "zero output": zeros,
    "w without its decay": wrong(lambda k, v, beta, G, T, cu: w_u(k, v, beta, G * 0, T, cu)),
    "T transposed": wrong(lambda k, v, beta, G, T, cu: w_u(k, v, beta, G, T.flip(-1), cu)),
    "gradient of T dropped": wrong(lambda k, v, beta, G, T, cu: w_u(k, v, beta, G, T.detach(), cu)),
}


def _subject(name: str, narrow: bool, dtypes: tuple[torch.dtype, ...]) -> Subject:
    cases: tuple[Case, ...] = (
        Case("grouped heads", solved((2, 5, 1, 2, 3, 2), 4, narrow=narrow)),
        Case("packed", solved((1, 40, 1, 2, 9, 7), 16, (0, 0, 1, 18, 40, 40), narrow)),
        Case("a layer", solved((1, 1000, 2, 4, 128, 128), 64, narrow=narrow), heavy=True),
    )
    if not narrow:
        cases = (*cases, Case("no tokens", solved((1, 0, 1, 1, 4, 4), 16)))
    return Subject(
        name=name,
        function=recompute_w_u,
        inputs=("k", "v", "beta", "G", "T", "cu_seqlens"),
        by_name=("cu_seqlens",),
        reference=w_u,
        reference_backward=gradients(w_u),
        cases=cases,
        mistakes=_MISTAKES,
        rebatched=_alone,
        dtypes=dtypes,
    )


SUBJECTS = (
    _subject("recompute_w_u", False, (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    _subject("recompute_w_u[narrow T]", True, (torch.bfloat16,)),
)

# -------------------------------------------------------------------------------------------- bad calls

META = torch.device("meta")
BATCH, TIME, KEY_HEADS, HEADS, K, V = 1, 6, 1, 2, 4, 3


def _with(**changes: Any) -> Callable[[torch.device], Any]:
    """The stage with other arguments; those that are functions are called with the device."""

    def call(device: torch.device) -> None:
        arguments = {
            "k": torch.zeros(BATCH, TIME, KEY_HEADS, K, device=device),
            "v": torch.zeros(BATCH, TIME, HEADS, V, device=device),
            "beta": torch.zeros(BATCH, TIME, HEADS, device=device),
            "G": torch.zeros(BATCH, TIME, HEADS, device=device),
            "T": torch.zeros(BATCH, TIME, HEADS, 4, device=device),
        }
        others = {name: value(device) if callable(value) else value for name, value in changes.items()}
        recompute_w_u(**(arguments | others))
        adjoint.check()

    return call


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


def _bounds(*values: int) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.tensor(values, device=device)


BAD_CALLS = (
    BadCall("T of another time", _with(T=_zeros(1, 5, HEADS, 4)), "recompute_w_u", "T", "(1, 6, 2, 4)"),
    BadCall("a chunk of 48", _with(T=_zeros(1, TIME, HEADS, 48)), "chunk", "power of two", "64", "48"),
    BadCall("a chunk of 128", _with(T=_zeros(1, TIME, HEADS, 128)), "chunk", "64", "128", "fit"),
    BadCall("T in another 16 bits", _with(T=_zeros(1, TIME, HEADS, 4, dtype=torch.float16)), "T", "float32", "float16"),
    BadCall("G of another dtype", _with(G=_zeros(1, TIME, HEADS, dtype=torch.float64)), "G", "float64"),
    BadCall("beta elsewhere", _with(beta=lambda d: _zeros(1, TIME, HEADS)(META)), "beta", "meta"),
    BadCall("heads of v that do not divide", _with(k=_zeros(1, TIME, 3, K)), "2 heads of v", "3 heads of k"),
    BadCall("K past the cap in a stage", _with(k=_zeros(1, TIME, 1, 300)), "K", "300", "256"),
    BadCall(
        "bounds of a stage that descend", _with(cu_seqlens=_bounds(0, 4, 2, 6)), "cu_seqlens", "got 2 at position 2 "
    ),
)

# -------------------------------------------------------------------------------------------- workloads

_CHUNK = 64
_PIECE = 1024
"""Tokens that are compared with the reference at once: whole chunks."""


def _layer(time: int, key_heads: int, heads: int, size: int, narrow: bool) -> Make:
    """Keys of length one, gates in their ranges, and matrices like solved ones: lower, with a diagonal of 1."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        on_device = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))

        def values(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=on_device)

        k = torch.nn.functional.normalize(values(1, time, key_heads, size), dim=-1).to(dtype)
        v = values(1, time, heads, size).to(dtype)
        beta = torch.rand(1, time, heads, device=device, generator=on_device)
        G = -torch.rand(1, time, heads, device=device, generator=on_device) * 3
        place = (torch.arange(time, device=device) % _CHUNK).view(1, time, 1, 1)
        column = torch.arange(_CHUNK, device=device)
        T = (values(1, time, heads, _CHUNK) * 0.1).masked_fill_(column > place, 0).masked_fill_(column == place, 1)
        return k, v, beta, G, T.to(dtype) if narrow else T, None

    return make


def composed(k: Tensor, v: Tensor, beta: Tensor, G: Tensor, T: Tensor, cu_seqlens: None) -> Any:
    """The stage in torch's own functions: operands written to memory, then a batched product for each result."""
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
        here = slice(begin, begin + _PIECE)
        yield tuple(None if x is None else x[:, here] for x in arguments), tuple(x[:, here] for x in outputs)


def _timed(subject: Subject) -> Subject:
    return Subject(
        name=subject.name,
        function=subject.function,
        inputs=subject.inputs,
        by_name=subject.by_name,
        reference=subject.reference,
        reference_backward=subject.reference_backward,
        cases=(),
        pieces=_pieces,
    )


def _workloads() -> Iterator[Workload]:
    time, key_heads, heads, size = 32768, 16, 32, 128
    for subject, narrow in zip(SUBJECTS, (False, True), strict=True):
        keys, values = time * key_heads * size * 2, time * heads * size * 2
        gates, matrices = 2 * time * heads * 4, time * heads * _CHUNK * (2 if narrow else 4)
        inputs = keys + values + gates + matrices
        words = f"{time} tokens, {key_heads} and {heads} heads of {size}, T {'bfloat16' if narrow else 'float32'}"
        for direction in ("forward", "backward"):
            yield Workload(
                f"recompute_w_u {words}",
                _timed(subject),
                _layer(time, key_heads, heads, size, narrow),
                inputs + 2 * values,
                inputs + 2 * values + inputs,
                composed,
                peers=("fla_recompute_w_u",) if narrow and direction == "forward" else (),
                devices=("cuda",),
                directions=(direction,),
                compile=False,
                recorded=True,
            )


WORKLOADS = tuple(_workloads())

# ----------------------------------------------------------------------------------------------- builds


def built_calls() -> Iterator[Call]:
    """Every way to multiply with T, packed sequences, the longest rows, and rows that fill no tile."""
    half, single = torch.bfloat16, torch.float32
    for element, T in ((half, half), (half, single), (torch.float16, single), (single, single)):
        yield _built(element, T, 128)
    yield _built(half, single, 256, packed=True)
    yield _built(single, single, 256)
    yield _built(half, half, 9, chunk=16, packed=True)


def _built(element: torch.dtype, T: torch.dtype, size: int, chunk: int = _CHUNK, packed: bool = False) -> Call:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    k, v = empty(1, 64, 1, size, dtype=element), empty(1, 64, 2, size, dtype=element)
    bounds = empty(3, dtype=torch.int64) if packed else None
    return bind(
        recompute_w_u, k, v, empty(1, 64, 2), empty(1, 64, 2), empty(1, 64, 2, chunk, dtype=T), cu_seqlens=bounds
    )
