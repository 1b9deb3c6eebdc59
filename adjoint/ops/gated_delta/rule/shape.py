"""The sizes of a problem of the gated delta rule, and how its tokens lie in memory; nothing of Triton."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core.launch import Setup
from adjoint.core.op import Facts
from adjoint.core.problem import Problem
from adjoint.core.workspace import Memory
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.packing import CHUNK, saved_states

LARGE = 2**17
"""Tokens times value heads from which kernels that do not depend on each other run concurrently."""

REVERSE_SEGMENT = 2048
"""Tokens of a segment of the reverse scan, counted from the start of a sequence: a multiple of `packing.SEGMENT`."""

UNSPLIT_REVERSE = 16384
"""Tokens up to which the reverse scan takes a sequence as a whole where it splits longer ones: splitting is more than
twice the work, which only an idle card does in less time, and shorter ones are packed with others. At least those of a
segment."""

FEW_HEADS = 8
"""Value heads up to which one long sequence is split: more of them keep a card busy."""


def padded(size: int) -> int:
    """The width of rows that kernels read: a multiple of 16."""
    return max(16, -(-size // 16) * 16)


def power(size: int) -> int:
    """The width of the block that contains a row: a power of two."""
    return max(16, 1 << (size - 1).bit_length())


def tile(block: int, size: int) -> int:
    """Columns of a program's tile: those of the schedule, no more than a row has, and no fewer than a product takes."""
    return max(16, min(block, power(size)))


class Shape(NamedTuple):
    """What the kernels of a problem depend on; `ids` is None where every row of a batch is a sequence."""

    element: torch.dtype
    gate: torch.dtype
    strength: torch.dtype
    ids: torch.dtype | None
    rows: int
    time: int
    sequences: int
    key_heads: int
    heads: int
    K: int
    V: int

    @classmethod
    def of(cls, problem: Problem) -> "Shape":
        """The sizes of a problem begin with those of a shape, in its order; see `describe`."""
        element, gate, strength, *ids = problem.dtypes
        return cls(element, gate, strength, ids[0] if ids else None, *problem.sizes[:7])

    @property
    def is_empty(self) -> bool:
        return 0 in (self.tokens, self.sequences, self.heads, self.K, self.V)

    @property
    def is_packed(self) -> bool:
        return self.ids is not None

    @property
    def tokens(self) -> int:
        return self.rows * self.time

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.heads // self.key_heads

    @property
    def chunks(self) -> int:
        """Slots for chunks: at most so many are used."""
        return self.spans(CHUNK)

    @property
    def segments(self) -> int:
        """Slots for segments of `packing.SEGMENT` tokens."""
        return self.spans(packing.SEGMENT)

    def spans(self, size: int) -> int:
        if self.ids is None:
            return self.rows * -(-self.time // size)
        return self.tokens // size + self.sequences if self.sequences else 0

    @property
    def is_large(self) -> bool:
        """Whether its kernels run long enough for a second stream to pay."""
        return self.tokens * self.heads >= LARGE

    @property
    def may_split(self) -> bool:
        """Whether a sequence of more than one segment is split over the card, because few heads would leave most of it
        idle: whether one is, and with it its bits, depends on its own length, on H and on K alone."""
        return self.heads <= FEW_HEADS and self.K <= 128

    @property
    def is_split(self) -> bool:
        """Whether the forward may have such a sequence."""
        return self.may_split and self.time > packing.SEGMENT

    @property
    def unsplit_reverse(self) -> int:
        """Tokens up to which the reverse scan takes a sequence as a whole; 0 where it takes all of them so."""
        return UNSPLIT_REVERSE if self.may_split else 0

    @property
    def is_split_in_reverse(self) -> bool:
        """Whether there may be a longer one."""
        return self.may_split and self.time > self.unsplit_reverse

    @property
    def is_wide(self) -> bool:
        return self.element == torch.float32

    @property
    def constants(self) -> dict[str, Any]:
        """Sizes that most kernels are compiled for: K and V are the widths of rows in memory."""
        return {"GROUP": self.group, "K": padded(self.K), "V": padded(self.V)}

    @property
    def lanes(self) -> int:
        """Slots for chunks of a value head."""
        return self.chunks * self.heads

    @property
    def saved_elements(self) -> int:
        """Numbers of the states between segments."""
        return saved_states(self.tokens) * self.heads * self.K * self.V


# ------------------------------------------------------------------------------------------------ inputs


def describe(
    tokens: Mapping[str, Tensor | None], states: Mapping[str, Tensor | None], cu_seqlens: Tensor | None
) -> Facts:
    """The facts of tokens q, k, v, do [B, T, heads, size], g and beta, and of states [N, H, K, V].

    Their sizes are those of a `Shape`, then 1 or 0 for each of `states` and for do: present or not. Their layout names
    what kernels cannot read where it lies.
    """
    q, v, g, beta = (tokens[name] for name in ("q", "v", "g", "beta"))
    assert q is not None and v is not None and g is not None and beta is not None
    rows, time, key_heads, K = q.shape
    ids: tuple[torch.dtype, ...] = ()
    sequences = rows
    if cu_seqlens is not None:
        ids, sequences = (cu_seqlens.dtype,), cu_seqlens.shape[0] - 1
    optional = (*states.values(), tokens["do"]) if "do" in tokens else tuple(states.values())
    present = (0 if x is None else 1 for x in optional)
    copied = [name for name, x in tokens.items() if x is not None and x.dim() == 4 and not is_readable(x)]
    copied += [name for name, state in states.items() if state is not None and not state.is_contiguous()]
    if cu_seqlens is not None and not cu_seqlens.is_contiguous():
        copied.append("cu_seqlens")
    layout = " ".join((*copied, "copied")) if copied else ""
    sizes = (rows, time, sequences, key_heads, v.shape[2], K, v.shape[3], *present)
    return Facts((q.dtype, g.dtype, beta.dtype, *ids), layout, sizes)


class TokenRows(NamedTuple):
    """Tokens as kernels read them: where they begin, and the strides of tokens and of heads."""

    start: Any
    token_stride: int
    head_stride: int

    @property
    def strides(self) -> tuple[int, int]:
        return self.token_stride, self.head_stride


def is_readable(x: Tensor) -> bool:
    """Whether kernels can read [B, T, heads, size] where it lies: rows of a multiple of 16 numbers, each beginning at
    a multiple of 16 bytes."""
    rows, time, heads, size = x.shape
    if size % 16 or x.storage_offset() * x.element_size() % 16:
        return False
    if x.is_contiguous():
        return True
    batch, token, head, column = x.stride()
    return (
        (column == 1 or size == 1)
        and (token % 16 == 0 or rows * time == 1)
        and token < 2**24  # 128 tokens are apart by less than 2^31
        and (head % 16 == 0 or heads == 1)
        and (batch == time * token or rows == 1)
    )


def token_rows(x: Tensor, copy: Tensor | None = None) -> TokenRows:
    """Tokens for the kernels: where they lie, or copied into memory for [B, T, heads, padded size]."""
    if copy is None and x.data_ptr() % 16 == 0:
        return TokenRows(x, *_strides(x))
    rows, time, heads, size = x.shape
    if copy is None:  # memory that torch did not allocate
        copy = x.new_empty(rows * time * heads * padded(size))
    wide = copy.view(rows, time, heads, padded(size))
    wide[..., :size].copy_(x)
    if size < padded(size):
        wide[..., size:].zero_()
    return TokenRows(copy, heads * padded(size), padded(size))


def _strides(x: Tensor) -> tuple[int, int]:
    """The strides of the tokens of all rows and of their heads; where there is one, as if there were more."""
    rows, time, heads, size = x.shape
    token = x.stride(1) if time > 1 else x.stride(0) if rows > 1 else heads * size
    return token, x.stride(2) if heads > 1 else size


class Copies:
    """Memory for the inputs that kernels cannot read where they lie, and for those that are normalised."""

    def __init__(self, setup: Setup, shape: Shape, normalized: tuple[str, ...]) -> None:
        keys, values = shape.key_heads * padded(shape.K), shape.heads * padded(shape.V)
        widths = {"q": keys, "k": keys, "v": values, "do": values}
        self.names = frozenset(setup.problem.layout.split()[:-1])
        for name in dict.fromkeys((*setup.problem.layout.split()[:-1], *normalized)):
            if name in widths:
                setup.scratch(**{f"copied_{name}": (shape.element, shape.tokens * widths[name])})
            elif name == "cu_seqlens":
                setup.scratch(copied_cu_seqlens=(shape.ids or torch.int64, shape.sequences + 1))
            else:
                states = shape.sequences * shape.heads * shape.K * shape.V
                setup.scratch(**{f"copied_{name}": (torch.float32, states)})

    def contiguous(self, memory: Memory, name: str, x: Tensor | None) -> Tensor | None:
        """A state or cu_seqlens, or its copy."""
        if x is None or name not in self.names:
            return x
        return memory.tensor(f"copied_{name}").view(x.shape).copy_(x)

    def token_rows(self, memory: Memory, name: str, x: Tensor) -> TokenRows:
        """Tokens, or their copy."""
        return token_rows(x, memory.tensor(f"copied_{name}") if name in self.names else None)
