"""Launches the kernels of the gated delta rule on tensors: what lies where, the chunks' inverses, the walk, the outputs.

    shape = Shape.of(q, v, g, beta, cu_seqlens)
    launch = Launches(shape, device)                    # compiles on first use
    table(launch, memory, cu_seqlens)                   # begins, firsts, places
    gates(launch, memory, g, beta)
    prepare(launch, memory, k)
    walk(launch, memory, k, v, initial_state, ...)
    output(launch, memory, q, k, scale, out)

`memory` maps the names of `regions(shape)` to what kernels take: tensors, or addresses. q, k and v are
`Walkable`: rows of a multiple of 16 numbers at multiples of 16 bytes, which `walkable` makes of anything else. Nothing
here waits for the device or allocates.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.errors import status_word
from adjoint.core.kernels import TRITON_TYPES, Variant
from adjoint.core.workspace import Regions
from adjoint.ops.gated_delta import rule_kernels as _kernels  # noqa: F401  (registers them)
from adjoint.ops.gated_delta import rule_table_kernels as _table_kernels  # noqa: F401
from adjoint.ops.gated_delta.eager import EPSILON
from adjoint.ops.gated_delta.faults import POSITIVE_GATE, SEQUENCES_OUT_OF_ORDER
from adjoint.ops.gated_delta.packing import CHUNK, SEGMENT

GATE_ROWS = 5
"""What the gates of a chunk are: G, what G lost in rounding, β, e^G, e^{Γ−G}."""


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
    def of(cls, q: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None) -> "Shape":
        rows, time, key_heads, K = q.shape
        ids, sequences = (None, rows) if cu_seqlens is None else (cu_seqlens.dtype, cu_seqlens.shape[0] - 1)
        return cls(q.dtype, g.dtype, beta.dtype, ids, rows, time, sequences, key_heads, v.shape[2], K, v.shape[3])

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
    def is_wide(self) -> bool:
        return self.element == torch.float32


class Tuning(NamedTuple):
    """How the kernels are cut and launched. Blocks and warps depend on the problem's dtype, K and V alone."""

    prepare_warps: int = 4
    walk_block: int = 64
    walk_warps: int = 4
    walk_stages: int = 3
    output_block: int = 128
    output_warps: int = 4
    output_stages: int = 2
    window: int = 1
    parts: int = 1


def tuning(shape: Shape) -> Tuning:
    """The cut of a problem."""
    if shape.is_wide:
        return Tuning(4, 16 if shape.K > 128 else 32, 4, 1, 32, 4, 1)
    if shape.K > 128:
        return Tuning(4, 64, 8, 1, 64, 8, 1)
    return Tuning()


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


def chunk_regions(shape: Shape, tuned: Tuning, every: int = 1) -> dict[str, tuple[torch.dtype, int]]:
    """gates [chunks, H, 5, 64], T [chunks, H, parts, 64, 64], states [chunks, H, V, K], new [chunks, H, V, 64]."""
    lanes, K, V = shape.chunks * shape.heads, padded(shape.K), padded(shape.V)
    return {
        "gates": (torch.float32, lanes * GATE_ROWS * CHUNK),
        "T": (shape.element, lanes * tuned.parts * CHUNK * CHUNK),
        "states": (shape.element, lanes * V * K),
        "new": (shape.element, lanes * V * CHUNK),
    }


class Walkable(NamedTuple):
    """Tokens as kernels walk them: where they begin, and how far tokens and heads are apart."""

    start: Any
    token_stride: int
    head_stride: int


def is_walkable(x: Tensor) -> bool:
    """Whether kernels can read [B, T, heads, size] where it lies."""
    rows, time, heads, size = x.shape
    batch, token, head, column = x.stride()
    return (
        size % 16 == 0
        and column == 1
        and token % 16 == 0
        and token < 2**24  # 64 tokens are apart by less than 2^31
        and (head % 16 == 0 or heads == 1)
        and (batch == time * token or rows == 1)
        and x.data_ptr() % 16 == 0
    )


def walkable(x: Tensor, copy: Tensor | None = None) -> Walkable:
    """Tokens for the kernels: where they lie, or copied into memory for [B, T, heads, padded size]."""
    if copy is None:
        return Walkable(x, x.stride(1), x.stride(2) if x.stride(2) % 16 == 0 else x.shape[3])
    rows, time, heads, size = x.shape
    wide = copy.view(rows, time, heads, padded(size))
    wide[..., :size].copy_(x)
    wide[..., size:].zero_()
    return Walkable(copy, heads * padded(size), padded(size))


# ---------------------------------------------------------------------------------------------- variants

_ELEMENTS = frozenset(("q", "k", "v", "x", "T", "states", "new", "out"))
_FLOATS = frozenset(("gates", "initial_state", "saved", "final_state"))
_INTEGERS = frozenset(("begins", "firsts", "places", "spans"))
_ALIGNED = frozenset(
    ("q", "k", "v", "T", "states", "new", "gates", "q_token_stride", "q_head_stride", "k_token_stride", "k_head_stride",
     "v_token_stride", "v_head_stride")
)  # fmt: skip
"""Arguments of the large kernels that are multiples of 16 in every launch; those that add up numbers without a dot
are promised nothing, so that their sums have one order."""

_TABLE_BLOCK, _PLACES_BLOCK = 1024, 256
_GATE_HEADS = 16
_NORMALIZED_ROWS = 16
_CLEARED_ROWS, _CLEARED_COLUMNS = 64, 128


_CALLERS = frozenset(("initial_state", "saved", "final_state", "out"))
"""Pointers that are multiples of 16 unless a caller brings memory of its own that is not."""


def describe(
    kernel: str,
    shape: Shape,
    constants: Mapping[str, Any],
    warps: int = 4,
    stages: int = 1,
    aligned: frozenset[str] = frozenset(),
) -> Variant:
    """A kernel as it is compiled for a shape."""
    described = kernels.registered()[kernel]
    types = {}
    for name in described.parameters:
        if name.isupper() and name != "T":
            continue
        if name in _ELEMENTS:
            types[name] = f"*{TRITON_TYPES[shape.element]}"
        elif name in _FLOATS:
            types[name] = "*fp32"
        elif name in _INTEGERS:
            types[name] = "*i32"
        elif name in ("g", "beta"):
            types[name] = f"*{TRITON_TYPES[shape.gate if name == 'g' else shape.strength]}"
        elif name == "cu_seqlens":
            types[name] = f"*{TRITON_TYPES[shape.ids or torch.int32]}"
        elif name == "status_word":
            types[name] = "*i64"
        elif name == "scale":
            types[name] = "fp32"
        else:
            types[name] = "i64" if name.endswith("_stride") or name in ("tokens", "rows", "width") else "i32"
    return described.variant(
        types,
        {name: constants[name] for name in described.parameters if name not in types},
        [name for name in types if name in aligned],
        num_warps=warps,
        num_stages=stages,
    )


def _blocks(shape: Shape, block: int) -> int:
    return -(-padded(shape.V) // min(block, power(shape.V)))


def variant(key: tuple[Any, ...], shape: Shape, tuned: Tuning) -> Variant:
    """What is compiled for a key: the name of a kernel without `rule_`, and its options."""
    name, *options = key
    sizes = {
        "GROUP": shape.group,
        "K": padded(shape.K),
        "V": padded(shape.V),
        "K_SIZE": shape.K,
        "V_SIZE": shape.V,
        "K_BLOCK": power(shape.K),
        "PARTS": tuned.parts,
        "WINDOW": tuned.window,
        "WIDE": shape.is_wide,
        "PRECISION": "tf32x3" if shape.is_wide else "tf32",  # 16-bit operands know neither
    }
    if name == "bounds":
        raises, span = options
        constants = {"PACKED": shape.ids is not None, "RAISE": raises, "SPAN": span, "BLOCK": _TABLE_BLOCK}
        return describe("rule_bounds", shape, constants)
    if name == "places":
        return describe("rule_places", shape, {"SPAN": options[0], "BLOCK": _PLACES_BLOCK})
    if name == "gates":
        return describe("rule_gates", shape, {"RAISE": options[0], "CHUNK": CHUNK, "HEADS": _GATE_HEADS})
    if name == "clear":
        return describe("rule_clear", shape, {"ROWS": _CLEARED_ROWS, "BLOCK": _CLEARED_COLUMNS})
    if name == "normalize":
        constants = {"EPSILON": EPSILON, "SIZE": shape.K, "PADDED": padded(shape.K), "BLOCK": power(shape.K)}
        return describe("rule_normalize", shape, constants | {"ROWS": _NORMALIZED_ROWS})
    if name == "prepare":
        return describe("rule_prepare", shape, sizes, tuned.prepare_warps, 1, _ALIGNED)
    aligned = _ALIGNED | _CALLERS if options.pop() else _ALIGNED
    if name == "walk":
        segmented, initial, save, final, every = options
        constants = sizes | {
            "V_BLOCK": min(tuned.walk_block, power(shape.V)),
            "SEGMENTED": segmented,
            "INITIAL": initial,
            "SAVE": save,
            "FINAL": final,
            "SEGMENT": SEGMENT,
            "EVERY": every,
        }
        return describe("rule_walk", shape, constants, tuned.walk_warps, tuned.walk_stages, aligned)
    assert name == "output", name
    constants = sizes | {"V_BLOCK": min(tuned.output_block, power(shape.V))}
    return describe("rule_output", shape, constants, tuned.output_warps, tuned.output_stages, aligned)


def is_aligned(*tensors: Tensor | None) -> bool:
    """Whether tensors begin at multiples of 16 bytes."""
    return all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)


class Launches:
    """Starts kernels of one problem by their keys; compiles each on first use."""

    def __init__(
        self, shape: Shape, device: torch.device, tuned: Tuning | None = None, memo: dict[Any, Any] | None = None
    ) -> None:
        self.shape, self.device, self.tuned = shape, device, tuned or tuning(shape)
        self._memo = {} if memo is None else memo

    def prepare(self, key: tuple[Any, ...]) -> Any:
        launcher = self._memo.get(key)
        if launcher is None:
            launcher = self._memo[key] = variant(key, self.shape, self.tuned).prepare(self.device)
        return launcher

    def __call__(self, key: tuple[Any, ...], programs: int, *arguments: Any) -> None:
        if programs:
            self.prepare(key)((programs, 1, 1), *arguments)


# ----------------------------------------------------------------------------------------------- launches


def table(launch: Launches, memory: Mapping[str, Any], cu_seqlens: Tensor | None, raises: bool = True) -> None:
    """begins, firsts and places of chunks; and of segments, where the memory has them."""
    shape, word = launch.shape, status_word(launch.device)
    given = memory["begins"] if cu_seqlens is None else cu_seqlens

    def spans(size: int, firsts: Any, places: Any, raises: bool) -> None:
        launch(
            ("bounds", raises, size), 1, given, memory["begins"], firsts, word, SEQUENCES_OUT_OF_ORDER.row,
            shape.sequences, shape.tokens, shape.time,
        )  # fmt: skip
        slots = shape.spans(size)
        launch(
            ("places", size), -(-slots // _PLACES_BLOCK), memory["begins"], firsts, places, slots, shape.sequences,
            shape.sequences.bit_length(),
        )  # fmt: skip

    spans(CHUNK, memory["firsts"], memory.get("places"), raises)
    if "segment_firsts" in memory:
        spans(SEGMENT, memory["segment_firsts"], memory.get("segment_places"), False)


def gates(launch: Launches, memory: Mapping[str, Any], g: Tensor, beta: Tensor, raises: bool = True) -> None:
    """The gates of every chunk; a positive g is reported."""
    shape = launch.shape
    launch(
        ("gates", raises), shape.chunks * -(-shape.heads // _GATE_HEADS), g, beta, memory["places"], memory["gates"],
        status_word(launch.device), POSITIVE_GATE.row, shape.heads, shape.time, *g.stride(), *beta.stride(),
    )  # fmt: skip


def normalize(launch: Launches, x: Tensor, out: Any) -> Walkable:
    """Rows of q or k divided by their norms, into memory for [B, T, key heads, padded K]."""
    shape = launch.shape
    rows = shape.tokens * shape.key_heads
    launch(
        ("normalize",), -(-rows // _NORMALIZED_ROWS), x, out, rows, shape.key_heads, shape.time, *x.stride()
    )  # fmt: skip
    return Walkable(out, shape.key_heads * padded(shape.K), padded(shape.K))


def prepare(launch: Launches, memory: Mapping[str, Any], k: Walkable) -> None:
    """T − I of every chunk and value head."""
    shape = launch.shape
    launch(
        ("prepare",), shape.chunks * shape.key_heads, k.start, memory["gates"], memory["places"], memory["T"],
        shape.key_heads, k.token_stride, k.head_stride,
    )  # fmt: skip


def walk(
    launch: Launches,
    memory: Mapping[str, Any],
    k: Walkable,
    v: Walkable,
    initial_state: Tensor | None,
    *,
    segmented: bool = False,
    saved: Tensor | None = None,
    final_state: Tensor | None = None,
    every: int = 1,
) -> None:
    """states and new of every chunk; over whole sequences, or over segments from the states that were saved.

    Over whole sequences `saved` is written, where given, and over segments it is read.
    """
    shape = launch.shape
    absent = memory["gates"]  # stands for a pointer that no variant reads
    spans = shape.segments if segmented else shape.sequences
    key = ("walk", segmented, initial_state is not None, saved is not None and not segmented, final_state is not None)
    aligned = is_aligned(initial_state, saved, final_state)
    launch(
        (*key, every, aligned), spans * shape.heads * _blocks(shape, launch.tuned.walk_block), k.start, v.start,
        memory["gates"], memory["T"], memory["segment_places"] if segmented else memory["begins"], memory["begins"],
        memory["firsts"], absent if initial_state is None else initial_state, absent if saved is None else saved,
        memory["states"], memory["new"], absent if final_state is None else final_state, shape.heads,
        k.token_stride, k.head_stride, v.token_stride, v.head_stride,
    )  # fmt: skip


def output(
    launch: Launches, memory: Mapping[str, Any], q: Walkable, k: Walkable, scale: float, out: Tensor
) -> None:
    """o of the tokens of all sequences; `out` is contiguous."""
    shape = launch.shape
    launch(
        ("output", is_aligned(out)), shape.chunks * shape.key_heads * _blocks(shape, launch.tuned.output_block), q.start, k.start,
        memory["gates"], memory["places"], memory["begins"], memory["states"], memory["new"], out, shape.key_heads, scale,
        q.token_stride, q.head_stride, k.token_stride, k.head_stride,
    )  # fmt: skip


def clear(launch: Launches, memory: Mapping[str, Any], out: Tensor) -> None:
    """Zeros for the tokens of no sequence."""
    shape = launch.shape
    launch(
        ("clear",), -(-shape.tokens // _CLEARED_ROWS), memory["begins"], out, shape.sequences, shape.tokens,
        shape.heads * shape.V,
    )  # fmt: skip


def regions(shape: Shape, tuned: Tuning | None = None) -> Regions:
    """The workspace of a forward without its copies of inputs."""
    return Regions(**table_regions(shape), **chunk_regions(shape, tuned or tuning(shape)))
