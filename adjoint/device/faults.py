"""The device-side half of the status word (see `adjoint.core.errors`); imports Triton, so kernels only."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def record(status_word, row, position, value, faulty):
    """Records `value` at `position` where `faulty`; the first position wins, whatever the order."""
    position = tl.minimum(position.to(tl.int64), 2147483646) << 32
    value = value.to(tl.int64)
    low = position | (value & 0xFFFFFFFF)
    high = position | ((value >> 32) & 0xFFFFFFFF)
    word = status_word + row * 2 + tl.zeros_like(value)
    tl.atomic_min(word, low, mask=faulty, sem="relaxed")
    tl.atomic_min(word + 1, high, mask=faulty, sem="relaxed")


@triton.jit
def _exchange(status_word, recorded, clear, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(recorded + place, tl.atomic_xchg(status_word + place, clear + tl.zeros([COUNT], tl.int64)))


def exchange(status_word: Tensor, clear: int) -> Tensor:
    """What is recorded, each number exchanged for `clear` in one step; no plan launches this, so Triton compiles it."""
    recorded = torch.empty_like(status_word)
    with torch.cuda.device_of(status_word):
        _exchange[(1,)](status_word, recorded, clear, COUNT=status_word.numel())
    return recorded
