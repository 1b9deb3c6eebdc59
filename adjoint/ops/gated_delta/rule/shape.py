"""The sizes of a problem of the gated delta rule as its kernels see it, and the memory they need; nothing of Triton."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core.problem import Problem
from adjoint.ops.gated_delta.packing import CHUNK, SEGMENT, saved_states

GATE_ROWS = 5
"""What the gates of a chunk are: G, what G lost in rounding, β, e^G, e^{Γ−G}."""

LARGE = 2**17
"""Tokens times value heads from which kernels that do not depend on each other run side by side."""


BACK_SEGMENT = 2048
"""Tokens of a segment on the way back, counted from the start of a sequence: a multiple of SEGMENT."""

WHOLE_BACK = 16384
"""Tokens up to which a sequence is walked back whole where longer ones are split: that is more than twice the work,
which only an idle card does in less time, and shorter ones are packed with others. At least those of a segment."""

FEW_HEADS = 8
"""Value heads up to which one long sequence is split: more of them keep a card busy."""


def padded(size: int) -> int:
    """The width of rows that kernels read: a multiple of 16."""
    return max(16, -(-size // 16) * 16)


def power(size: int) -> int:
    """The width of the block that holds a row: a power of two."""
    return max(16, 1 << (size - 1).bit_length())


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
        """Slots for segments of SEGMENT tokens."""
        return self.spans(SEGMENT)

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
        """Whether there may be such a sequence."""
        return self.may_split and self.time > SEGMENT

    @property
    def whole_back(self) -> int:
        """Tokens up to which a sequence is walked back whole; 0 where all are."""
        return WHOLE_BACK if self.may_split else 0

    @property
    def is_split_back(self) -> bool:
        """Whether there may be a longer one."""
        return self.may_split and self.time > self.whole_back

    @property
    def is_wide(self) -> bool:
        return self.element == torch.float32


class Tuning(NamedTuple):
    """How the kernels are cut and launched: columns of V a program has, its warps, and the depth of its pipeline.

    Tuned on an H200. On one GPU all of it depends on the dtype and on K alone, so that bits cannot depend on anything
    else.
    """

    prepare_warps: int = 2
    walk_block: int = 32
    walk_warps: int = 4
    walk_stages: int = 3
    output_block: int = 64
    output_warps: int = 4
    output_stages: int = 1
    compose_stages: int = 3
    parts: int = 1


def tuning(shape: Shape, from_shared: bool = True) -> Tuning:
    """The cut of a problem.

    Args:
        from_shared: whether products take operands from shared memory, as on Hopper and Blackwell's data-centre GPUs;
            elsewhere they take registers, outputs are cut smaller, and there may be no room for two of M.
    """
    if shape.is_wide:
        tuned = Tuning(8, 16, 8 if shape.K > 128 else 4, 1, 32, 8, 1)
    else:
        tuned = Tuning(4, 32, 8, 1) if shape.K > 128 else Tuning()
        if not from_shared:
            tuned = tuned._replace(output_block=32, output_warps=8)
    return tuned if from_shared else tuned._replace(compose_stages=1)


# ------------------------------------------------------------------------------------------------ memory


def table_regions(shape: Shape, segments: bool = False) -> dict[str, tuple[torch.dtype, int]]:
    """begins and firsts [N + 1], places [chunks, 4]; of segments as well: segment_firsts, segment_places."""
    held = {
        "begins": (torch.int32, shape.sequences + 1),
        "firsts": (torch.int32, shape.sequences + 1),
        "places": (torch.int32, shape.chunks * 4),
    }
    if segments:
        held["segment_firsts"] = (torch.int32, shape.sequences + 1)
        held["segment_places"] = (torch.int32, shape.segments * 4)
    return held


def split_regions(shape: Shape, saved: bool) -> dict[str, tuple[torch.dtype, int]]:
    """transitions [segments, H, K + V, K]; and saved states, unless the caller keeps them."""
    K, V = padded(shape.K), padded(shape.V)
    held = {"transitions": (torch.float32, shape.segments * shape.heads * (K + V) * K)}
    if saved:
        held["saved"] = (torch.float32, saved_states(shape.tokens) * shape.heads * shape.K * shape.V)
    return held


def chunk_regions(shape: Shape, tuned: Tuning, score_parts: int = 0) -> dict[str, tuple[torch.dtype, int]]:
    """gates [chunks, H, 5, 64], T [chunks, H, parts, 64, 64], states [chunks, H, V, K], new [chunks, H, V, 64].

    With `score_parts`, P [chunks, H, score parts, 64, 64] in the place of states and new: for a walk that writes o.
    """
    lanes, K, V = shape.chunks * shape.heads, padded(shape.K), padded(shape.V)
    held = {
        "gates": (torch.float32, lanes * GATE_ROWS * CHUNK),
        "T": (shape.element, lanes * tuned.parts * CHUNK * CHUNK),
    }
    if score_parts:
        return held | {"P": (shape.element, lanes * score_parts * CHUNK * CHUNK)}
    return held | {"states": (shape.element, lanes * V * K), "new": (shape.element, lanes * V * CHUNK)}


# ------------------------------------------------------------------------------------------------ inputs


def describe(
    op: str,
    tokens: Mapping[str, Tensor | None],
    states: Mapping[str, Tensor | None],
    cu_seqlens: Tensor | None,
    options: tuple[Any, ...],
) -> Problem:
    """The problem of tokens q, k, v, do [B, T, heads, size], g and beta, and of states [N, H, K, V].

    Its sizes are those of a `Shape`, then 1 or 0 for each of `states` and for do: given or not. Its layout names what
    kernels cannot read where it lies.
    """
    q, v, g, beta = (tokens[name] for name in ("q", "v", "g", "beta"))
    assert q is not None and v is not None and g is not None and beta is not None
    rows, time, key_heads, K = q.shape
    ids: tuple[torch.dtype, ...] = ()
    sequences = rows
    if cu_seqlens is not None:
        ids, sequences = (cu_seqlens.dtype,), cu_seqlens.shape[0] - 1
    optional = (*states.values(), tokens["do"]) if "do" in tokens else tuple(states.values())
    given = (0 if x is None else 1 for x in optional)
    copied = [name for name, x in tokens.items() if x is not None and x.dim() == 4 and not is_walkable(x)]
    copied += [name for name, state in states.items() if state is not None and not state.is_contiguous()]
    if cu_seqlens is not None and not cu_seqlens.is_contiguous():
        copied.append("cu_seqlens")
    layout = " ".join((*copied, "copied")) if copied else ""
    sizes = (rows, time, sequences, key_heads, v.shape[2], K, v.shape[3], *given)
    return Problem(op, q.device, (q.dtype, g.dtype, beta.dtype, *ids), layout, sizes, options)


class Walkable(NamedTuple):
    """Tokens as kernels walk them: where they begin, and how far tokens and heads are apart."""

    start: Any
    token_stride: int
    head_stride: int


def is_walkable(x: Tensor) -> bool:
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


def walkable(x: Tensor, copy: Tensor | None = None) -> Walkable:
    """Tokens for the kernels: where they lie, or copied into memory for [B, T, heads, padded size]."""
    if copy is None and x.data_ptr() % 16 == 0:
        return Walkable(x, *_apart(x))
    rows, time, heads, size = x.shape
    if copy is None:  # memory that torch did not allocate
        copy = x.new_empty(rows * time * heads * padded(size))
    wide = copy.view(rows, time, heads, padded(size))
    wide[..., :size].copy_(x)
    if size < padded(size):
        wide[..., size:].zero_()
    return Walkable(copy, heads * padded(size), padded(size))


def _apart(x: Tensor) -> tuple[int, int]:
    """How far the tokens of all rows and their heads are apart; where there is one, as if there were more."""
    rows, time, heads, size = x.shape
    token = x.stride(1) if time > 1 else x.stride(0) if rows > 1 else heads * size
    return token, x.stride(2) if heads > 1 else size


def copies(problem: Problem, tokens: Mapping[str, int]) -> dict[str, tuple[torch.dtype, int]]:
    """Memory for what kernels cannot read where it lies.

    `tokens` maps names of token tensors to the numbers of a token, all heads, that a copy has.
    """
    shape, held = Shape.of(problem), {}
    for name in problem.layout.split()[:-1]:
        if name in tokens:
            held[f"copied_{name}"] = (shape.element, shape.tokens * tokens[name])
        elif name == "cu_seqlens":
            held["copied_cu_seqlens"] = (shape.ids or torch.int64, shape.sequences + 1)
        else:
            held[f"copied_{name}"] = (torch.float32, shape.sequences * shape.heads * shape.K * shape.V)
    return held


def contiguous(x: Tensor, copy: Tensor | None) -> Tensor:
    """A state or cu_seqlens, or its copy."""
    return x if copy is None else copy.view(x.shape).copy_(x)
