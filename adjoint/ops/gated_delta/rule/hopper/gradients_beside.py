"""Gradients beside the reverse scan of a long sequence, for Hopper.

The reverse scan of one sequence leaves most of a card idle, and the state scan beside it ends before. So its last
chunks are scanned first, beside the state scan, and the rest beside gradients of chunks that both have passed. The
rest begins with the gradient of the state that the last chunks begin with, in float32: the very number that one scan
would have. A chunk has the same gradients in every launch, so sizes change no bit.
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
"""Microseconds that a chunk takes of a multiprocessor of an H200 at K = V = 128: in a program of the reverse scan, and
of a value head in the state scan and in the gradients."""

LEAST = 20.0
"""Microseconds that must be gained: two launches more, and what waits for them, take some ten."""


class Sizes(NamedTuple):
    """Chunks at the end of a sequence: those that are scanned first, and those whose gradients are computed beside the
    scan of the rest; 0 where all are scanned in one launch."""

    scanned: int
    beside: int


def sizes_of(shape: Shape, multiprocessors: int) -> Sizes:
    """The sizes for one sequence of n chunks, on a GPU of so many multiprocessors.

        reverse scan             on the multiprocessors it leaves idle
        the last `scanned`       the state scan
        the rest                 gradients of the last `beside`, and on all of them, after both, those of the rest

    `scanned` are those passed when the state scan ends, or more, where all of their gradients would be there before the
    scan of the rest ends. Programs take rounds to share out segments and items; of the whole rounds of gradients that
    end just before the scan and just after it, those that take less.
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
    """Both scans and the gradients of one sequence: `launch(memory, upstream, dinitial_state, scan_states,
    compute_gradients)`; the last two launch what they say, `compute_gradients(part, others)` that of a part."""
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
