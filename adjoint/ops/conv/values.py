"""What the convolutions are tested, verified and timed on: inputs, other batches, pieces and wrong answers."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from adjoint.contract import batching
from adjoint.contract.batching import PIECE, Answers
from adjoint.contract.cases import Inputs, Make, Rebatch
from adjoint.ops.conv import reference

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "a slice": lambda x: torch.cat((x + 1, x, x - 1), -1)[..., x.shape[2] : 2 * x.shape[2]],
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every other channel": lambda x: torch.stack((x, x), -1).flatten(2)[..., ::2],
    "rows apart": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "shifted by one": lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape),
    "expanded": lambda x: x[:1].expand(x.shape),
}
"""The layouts of x."""


def inputs(
    batch: int, time: int, channels: int, width: int, *, bias: bool = True, state: bool = True,
    cu_seqlens: tuple[int, ...] | None = None, layout: str = "contiguous", wide: bool = False, scale: float = 1.0,
) -> Make:  # fmt: skip
    """x, weight, bias, initial states and bounds of sequences; weight and bias in float32 where they are `wide`."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        def normal(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(kind).to(device)

        kind = torch.float32 if wide and dtype != torch.float64 else dtype
        number = batch if cu_seqlens is None else len(cu_seqlens) - 1
        return (
            LAYOUTS[layout](normal(batch, time, channels)),
            normal(channels, width, kind=kind),
            normal(channels, kind=kind) if bias else None,
            normal(number, channels, width - 1) if state else None,
            None if cu_seqlens is None else torch.tensor(cu_seqlens, device=device),
        )

    return make


def rebatched(values: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    """Other batches: rows of a batch alone, or the last packed sequences at the beginning of a row."""
    cu_seqlens = values[-1]
    if cu_seqlens is None:
        yield from batching.rebatched(values, upstream, 0, [True, False, False, True, False])
        return
    x, weight, bias, state, _ = values
    first = len(cu_seqlens) // 2
    token = int(cu_seqlens[first])
    own = None if state is None else state[first:]
    packed = cu_seqlens[first:] - token

    def part(tensor: Tensor) -> Tensor:
        """The tokens of the last sequences in a tensor of tokens, or the states of the last sequences."""
        return tensor[:, token:] if tensor.shape[0] == 1 and tensor.shape[1] == x.shape[1] else tensor[first:]

    def pairs(whole: Answers, alone: Answers) -> Iterator[tuple[Tensor, Tensor]]:
        yield from ((part(every), some) for every, some in zip(whole[0], alone[0], strict=True))

    alone = (x[:, token:], weight, bias, own, packed)
    yield Rebatch("the last sequences", alone, tuple(map(part, upstream)), pairs)


def pieces(arguments: Inputs, outputs: tuple[Tensor, ...]) -> Iterator[tuple[Inputs, tuple[Tensor, ...]]]:
    """Pieces of channels, each of which is a problem of its own. Tensors with three axes have tokens."""
    channels = outputs[0].shape[2]
    largest = max(t.numel() for t in (*arguments, *outputs) if t is not None)
    step = max(1, PIECE * channels // max(1, largest))
    for begin in range(0, channels, step):

        def part(tensor: Any, begin: int = begin) -> Any:
            if tensor is None or not tensor.is_floating_point():
                return tensor
            return tensor.narrow(2 if tensor.dim() == 3 else 0, begin, min(step, channels - begin))

        yield tuple(map(part, arguments)), tuple(map(part, outputs))


def present(gradients: reference.Gradients, *values: Tensor | None) -> tuple[Tensor, ...]:
    """The gradients of those of x, weight, bias and state that are present."""
    return tuple(gradient for gradient, value in zip(gradients, values, strict=True) if value is not None)
