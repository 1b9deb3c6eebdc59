"""The sizes of a problem of the gated delta rule, and how its tokens lie in memory; nothing of Triton."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core.launch import Setup
from adjoint.core.layout import copied_names
from adjoint.core.op import Facts
from adjoint.core.problem import Problem
from adjoint.core.workspace import Memory
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.packing import CHUNK, saved_states

LARGE = 2**17
"""From this number of tokens times value heads on, kernels that do not depend on each other run concurrently."""

REVERSE_SEGMENT = 2048
"""The number of tokens of a segment of the reverse scan, from the start of a sequence: a multiple of
`packing.SEGMENT`."""

UNSPLIT_REVERSE = 16384
"""The number of tokens of the longest sequence of few heads that the reverse scan does not split; at least
`REVERSE_SEGMENT`.

Splitting more than doubles the work, and is worth it only if most of the GPU would be idle otherwise. Shorter sequences
are mostly packed with others, which keep the GPU busy.
"""

FEW_HEADS = 8
"""The most value heads with which long sequences are split. More heads keep a GPU busy by themselves."""


def pad_to_16(size: int) -> int:
    """The width of rows that kernels read: a multiple of 16."""
    return max(16, -(-size // 16) * 16)


def next_power_of_two(size: int) -> int:
    """The width of the block that contains a row: a power of two."""
    return max(16, 1 << (size - 1).bit_length())


def clamp_tile(block: int, size: int) -> int:
    """The columns of a program's tile: those of the schedule, but at most those of a row, and at least the minimum of a
    product."""
    return max(16, min(block, next_power_of_two(size)))


class Shape(NamedTuple):
    """The facts on which the kernels of a problem depend. `ids` is None if every row of a batch is a sequence.

    The final gradient is that of the final states, and the output gradient that of the outputs. A forward has neither.
    """

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
    has_initial_state: bool = False
    has_final_gradient: bool = False
    has_output_gradient: bool = False

    @classmethod
    def of(cls, problem: Problem) -> "Shape":
        """The shape of a problem. The problem's sizes are those of a shape and then its flags, in order; see
        `describe`."""
        element, gate, strength, *ids = problem.dtypes
        rows, time, sequences, key_heads, heads, K, V, *present = problem.sizes
        sizes = (rows, time, sequences, key_heads, heads, K, V)
        return cls(element, gate, strength, ids[0] if ids else None, *sizes, *map(bool, present))

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
        """The number of value heads for each key head."""
        return self.heads // self.key_heads

    @property
    def chunks(self) -> int:
        """The number of slots for chunks."""
        return self.count_spans(CHUNK)

    @property
    def segments(self) -> int:
        """The number of slots for segments of `packing.SEGMENT` tokens."""
        return self.count_spans(packing.SEGMENT)

    def count_spans(self, size: int) -> int:
        """The number of slots for spans of `size` tokens, from the start of each sequence. At most so many are used."""
        if self.ids is None:
            return self.rows * -(-self.time // size)
        return self.tokens // size + self.sequences if self.sequences else 0

    @property
    def is_large(self) -> bool:
        """Whether its kernels run long enough that a second stream is worth it."""
        return self.tokens * self.heads >= LARGE

    @property
    def may_split(self) -> bool:
        """Whether long sequences are split into segments that run side by side, because few heads would leave most of a
        GPU idle.

        A sequence is split if it is longer than a segment, or in the reverse scan longer than `UNSPLIT_REVERSE`. So its
        bits depend on its own length, on H and on K, and on nothing that shares its batch.
        """
        return self.heads <= FEW_HEADS and self.K <= 128

    @property
    def is_split(self) -> bool:
        """Whether the forward may have a sequence that it splits."""
        return self.may_split and self.time > packing.SEGMENT

    @property
    def forward_spans(self) -> int:
        """The number of sequences, or of segments into which they are split, that the forward scans side by side."""
        return self.segments if self.is_split else self.sequences

    @property
    def unsplit_reverse(self) -> int:
        """The tokens of the longest sequence that the reverse scan does not split; 0 if it splits none."""
        return UNSPLIT_REVERSE if self.may_split else 0

    @property
    def is_split_in_reverse(self) -> bool:
        """Whether the reverse scan may have a sequence that it splits."""
        return self.may_split and self.time > self.unsplit_reverse

    @property
    def is_float32(self) -> bool:
        return self.element == torch.float32

    @property
    def constants(self) -> dict[str, Any]:
        """The sizes for which most kernels are compiled. K and V are the widths of rows in memory."""
        return {"GROUP": self.group, "K": pad_to_16(self.K), "V": pad_to_16(self.V)}

    @property
    def lanes(self) -> int:
        """The number of slots for chunks of single value heads."""
        return self.chunks * self.heads

    @property
    def saved_elements(self) -> int:
        """The number of elements of the states between segments."""
        return saved_states(self.tokens) * self.heads * self.K * self.V


# ------------------------------------------------------------------------------------------------ inputs


def describe(
    tokens: Mapping[str, Tensor | None], states: Mapping[str, Tensor | None], cu_seqlens: Tensor | None
) -> Facts:
    """The facts of tokens q, k, v, do [B, T, heads, size], g and beta, and of states [N, H, K, V].

    Their sizes are those of a `Shape`. After them, 1 or 0 says for initial_state, dfinal_state and do, as far as the
    operator takes them, whether each is present. The layout names the tensors that kernels cannot read in place.
    """
    q, v, g, beta = tokens["q"], tokens["v"], tokens["g"], tokens["beta"]
    assert q is not None and v is not None and g is not None and beta is not None
    rows, time, key_heads, K = q.shape
    _, _, heads, V = v.shape
    optional = (*states.values(), tokens["do"]) if "do" in tokens else tuple(states.values())
    present = [0 if x is None else 1 for x in optional]
    copied = [name for name, x in tokens.items() if x is not None and x.dim() == 4 and not is_readable(x)]
    copied += [name for name, state in states.items() if state is not None and not state.is_contiguous()]
    dtypes: tuple[torch.dtype, ...] = (q.dtype, g.dtype, beta.dtype)
    sequences = rows
    if cu_seqlens is not None:
        dtypes, sequences = (*dtypes, cu_seqlens.dtype), cu_seqlens.shape[0] - 1
        if not cu_seqlens.is_contiguous():
            copied.append("cu_seqlens")
    layout = f"{', '.join(copied)} copied" if copied else ""
    return Facts(dtypes, layout, (rows, time, sequences, key_heads, heads, K, V, *present))


class TokenRows(NamedTuple):
    """Tokens in the form that kernels read: the address of the first one, and the strides of tokens and of heads."""

    start: Any
    token_stride: int
    head_stride: int

    @property
    def strides(self) -> tuple[int, int]:
        return self.token_stride, self.head_stride


def is_readable(x: Tensor) -> bool:
    """Whether kernels can read [B, T, heads, size] in place: rows of a multiple of 16 numbers, each of which begins at
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
        and token < 2**24  # so that 128 tokens span less than 2^31 elements
        and (head % 16 == 0 or heads == 1)
        and (batch == time * token or rows == 1)
    )


def token_rows(x: Tensor, copy: Tensor | None = None) -> TokenRows:
    """Tokens for the kernels: in place, or copied into memory for [B, T, heads, padded size]."""
    rows, time, heads, size = x.shape
    if copy is None and x.data_ptr() % 16 == 0:  # where there is one token or head, the strides are as if of more
        token = x.stride(1) if time > 1 else x.stride(0) if rows > 1 else heads * size
        return TokenRows(x, token, x.stride(2) if heads > 1 else size)
    padded = pad_to_16(size)
    if copy is None:  # memory that torch did not allocate
        copy = x.new_empty(rows * time * heads * padded)
    wide = copy.view(rows, time, heads, padded)
    wide[..., :size].copy_(x)
    if size < padded:
        wide[..., size:].zero_()
    return TokenRows(copy, heads * padded, padded)


class Copies:
    """Memory for the inputs that kernels cannot read in place, and for q and k if they are normalised."""

    def __init__(self, setup: Setup, shape: Shape, normalize: bool) -> None:
        keys = (shape.element, shape.tokens * shape.key_heads * pad_to_16(shape.K))
        values = (shape.element, shape.tokens * shape.heads * pad_to_16(shape.V))
        states = (torch.float32, shape.sequences * shape.heads * shape.K * shape.V)
        self.names = frozenset(copied_names(setup.problem.layout))
        setup.copies(
            q=keys, k=keys, v=values, do=values, initial_state=states, dfinal_state=states,
            cu_seqlens=(shape.ids or torch.int64, shape.sequences + 1),
        )  # fmt: skip
        if normalize:
            setup.scratch(**{f"copy_of_{name}": keys for name in ("q", "k") if name not in self.names})

    def contiguous(self, memory: Memory, name: str, x: Tensor | None) -> Tensor | None:
        """A state or cu_seqlens, or its copy."""
        return memory.contiguous(name, x) if x is not None and name in self.names else x

    def token_rows(self, memory: Memory, name: str, x: Tensor) -> TokenRows:
        """Tokens, or their copy."""
        return token_rows(x, memory.tensor(f"copy_of_{name}") if name in self.names else None)
