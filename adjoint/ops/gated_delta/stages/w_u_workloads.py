"""What `recompute_w_u` is timed on: a layer of Qwen3-Next on one sequence, with T as it is solved and in 16 bits."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from adjoint.contract.cases import Inputs, Make, Subject, Workload
from adjoint.ops.gated_delta.stages.cases import W_U

_CHUNK = 64
_PIECE = 1024
"""Tokens that are compared with the reference at once: whole chunks."""


def _layer(time: int, key_heads: int, heads: int, size: int, narrow: bool) -> Make:
    """Keys of length one, gates in their ranges, and matrices like solved ones: lower, with a diagonal of 1."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        own = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))

        def values(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=own)

        k = torch.nn.functional.normalize(values(1, time, key_heads, size), dim=-1).to(dtype)
        v = values(1, time, heads, size).to(dtype)
        beta = torch.rand(1, time, heads, device=device, generator=own)
        G = -torch.rand(1, time, heads, device=device, generator=own) * 3
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
    for subject, narrow in zip(W_U, (False, True), strict=True):
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
