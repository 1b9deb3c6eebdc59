"""Gradients beside the reverse scan of a long sequence, for Hopper.

The reverse scan of one sequence leaves most of a GPU idle, and the state scan beside it ends earlier. So the last
chunks of the sequence are scanned first, beside the state scan. The rest is scanned beside the gradients of chunks that
both scans have passed. The rest begins with the gradient, in float32, of the state at the beginning of the last chunks,
which is the same number as in a single scan. A chunk has the same gradients in every launch, so sizes change no bit.
"""

from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core.launch import Setup, run_concurrently
from adjoint.core.workspace import Memory
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.rule.hopper.device import Part
from adjoint.ops.gated_delta.rule.hopper.reverse_scan import programs_of
from adjoint.ops.gated_delta.rule.shape import Shape
from adjoint.ops.gated_delta.rule.triton.reverse_scan import ReverseScan, Upstream

REVERSE, STATES, GRADIENTS = 2.43, 2.65, 7.43
"""The microseconds of a multiprocessor of an H200 for a chunk at K = V = 128: in a program of the reverse scan, and for
a value head in the state scan and in the gradients."""

LEAST = 20.0
"""The least gain in microseconds. Two further launches, and the wait for them, take about ten."""


class Sizes(NamedTuple):
    """Numbers of chunks at the end of a sequence: those that are scanned first, and those whose gradients are computed
    beside the scan of the others. Both are 0 if all chunks are scanned in one launch."""

    scanned: int
    beside: int


def sizes_of(shape: Shape, multiprocessors: int) -> Sizes:
    """The sizes for one sequence on a GPU with this many multiprocessors.

        reverse scan             on the multiprocessors it leaves idle
        the last `scanned`       the state scan
        the rest                 gradients of the last `beside`, and on all of them, after both, those of the rest

    `scanned` is the number of chunks that the reverse scan has passed when the state scan ends. It is more if all of
    their gradients would be done before the scan of the rest ends. Programs process segments and items in rounds.
    `beside` is the whole number of rounds of gradients that ends just before the scan of the rest or just after it,
    whichever takes less time.
    """
    chunks, idle = shape.chunks, multiprocessors - programs_of(shape)
    if idle <= 0:
        return Sizes(0, 0)
    item = GRADIENTS * shape.group
    states = STATES * (packing.SEGMENT // packing.CHUNK) * ceil(shape.segments * shape.heads / idle)
    gradients_of_chunk = item * shape.key_heads / idle
    scanned = max(ceil(states / REVERSE), ceil(chunks * REVERSE / (REVERSE + gradients_of_chunk)))
    rest = REVERSE * (chunks - scanned)

    def time(beside: int) -> float:
        after = ceil((chunks - beside) * shape.key_heads / multiprocessors)
        return max(rest, item * ceil(beside * shape.key_heads / idle)) + item * after

    rounds = int(max(rest, 0) / item)
    beside = min((min(count * idle // shape.key_heads, scanned) for count in (rounds, rounds + 1)), key=time)
    return Sizes(scanned, beside) if scanned < chunks and time(0) - time(beside) > LEAST else Sizes(0, 0)


def bind_gradients_beside(setup: Setup, shape: Shape, reverse_scan: ReverseScan) -> Callable[..., None]:
    """Binds both scans and the gradients of one sequence.

    The result is `launch(memory, upstream, dinitial_state, scan_states, compute_gradients)`. The last two arguments are
    functions that launch the state scan and, as `compute_gradients(part, others)`, the gradients of a part.
    """
    setup.scratch(dmiddle_state=(torch.float32, shape.heads * shape.K * shape.V))
    device, all_chunks = setup.device, Part(0, shape.chunks)

    def launch(
        memory: Memory, upstream: Upstream, dinitial_state: Tensor | None, scan_states: Callable[[], None],
        compute_gradients: Callable[[Part, int], None],
    ) -> None:  # fmt: skip
        scanned, beside = sizes_of(shape, setup.multiprocessors)
        if not beside:
            run_concurrently(
                device,
                lambda: reverse_scan(memory, upstream, dinitial_state),
                scan_states,
                worthwhile=shape.is_large,
            )
            compute_gradients(all_chunks, 0)
            return
        middle: Any = memory["dmiddle_state"]
        first, done = shape.chunks - scanned, shape.chunks - beside
        behind = upstream._replace(dfinal_state=middle)
        run_concurrently(
            device,
            lambda: reverse_scan(memory, upstream, middle, Part(first, scanned)),
            scan_states,
            worthwhile=True,
        )
        run_concurrently(
            device,
            lambda: reverse_scan(memory, behind, dinitial_state, Part(0, first)),
            lambda: compute_gradients(Part(done, beside), programs_of(shape)),
            worthwhile=True,
        )
        compute_gradients(Part(0, done), 0)

    return launch
