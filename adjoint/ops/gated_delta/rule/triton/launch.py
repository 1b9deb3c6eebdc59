"""Launches the kernels of the gated delta rule on tensors: what lies where, the inverses, the walk, the outputs.

    shape = Shape.of(problem)
    launch = Launches(shape, device)                    # compiles on first use
    table_and_gates(launch, memory, cu_seqlens, g, beta)  # begins, firsts, places; what is made of g and β
    prepare(launch, memory, k)
    walk(launch, memory, k, v, initial_state, ...)
    output(launch, memory, q, k, scale, out)

`memory` maps the names of `table_regions` and `chunk_regions` to what kernels take: tensors, or addresses. q, k and v
are `Walkable`: rows of a multiple of 16 numbers at multiples of 16 bytes, which `walkable` makes of anything else.
Nothing here waits for the device or allocates.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.errors import status_word
from adjoint.core.kernels import TRITON_TYPES, Variant
from adjoint.core.streams import side_by_side
from adjoint.ops.gated_delta.arguments import EPSILON
from adjoint.ops.gated_delta.faults import POSITIVE_GATE, SEQUENCES_OUT_OF_ORDER
from adjoint.ops.gated_delta.packing import CHUNK, SEGMENT
from adjoint.ops.gated_delta.rule import shape as rule_shape
from adjoint.ops.gated_delta.rule.shape import Shape, Tuning, Walkable, padded, power, tuning
from adjoint.ops.gated_delta.rule.triton import kernels as _kernels  # noqa: F401  (registers them)
from adjoint.ops.gated_delta.rule.triton import table_kernels as _table_kernels  # noqa: F401

# ---------------------------------------------------------------------------------------------- variants

_ELEMENTS = frozenset(("q", "k", "v", "x", "T", "P", "states", "new", "out"))
_FLOATS = frozenset(("gates", "initial_state", "saved", "final_state", "factors", "transitions"))
_INTEGERS = frozenset(("begins", "firsts", "segment_firsts", "places", "segment_places", "spans"))
_STRIDES = frozenset(f"{name}_{of}_stride" for name in "qkv" for of in ("token", "head"))
_ALIGNED = frozenset(("q", "k", "v", "T", "P", "states", "new", "gates")) | _STRIDES
"""Arguments of the large kernels that are multiples of 16 in every launch; those that add up numbers without a dot
are promised nothing, so that their sums have one order."""

_BOUNDS_BLOCK, _PLACES_BLOCK = 1024, 256
_TABLE_BLOCK, _TABLE_SLOTS = 128, 16
_FEW_SEQUENCES = 2 * _TABLE_BLOCK - 1
"""Up to so many, every program of the table goes through all of them: two blocks of bounds."""

_GATE_HEADS = 8
_NORMALIZED_ROWS = 16
_CLEARED_ROWS, _CLEARED_COLUMNS, _CLEARED_ELEMENTS = 64, 128, 2048


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
        if name.isupper() and name not in ("T", "P"):
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
    if name in ("forward_hopper", "transition_hopper"):
        from adjoint.ops.gated_delta.rule.hopper import launch as rule_hopper

        return rule_hopper.variant(shape, key)
    sizes = {
        "GROUP": shape.group,
        "K": padded(shape.K),
        "V": padded(shape.V),
        "K_SIZE": shape.K,
        "V_SIZE": shape.V,
        "K_BLOCK": power(shape.K),
        "PARTS": tuned.parts,
        "WIDE": shape.is_wide,
        "PRECISION": "ieee",
    }
    if name == "bounds":
        raises, span = options
        constants = {"PACKED": shape.ids is not None, "RAISE": raises, "SPAN": span, "BLOCK": _BOUNDS_BLOCK}
        return describe("rule_bounds", shape, constants)
    if name == "places":
        return describe("rule_places", shape, {"SPAN": options[0], "BLOCK": _PLACES_BLOCK})
    spans = {"CHUNK": CHUNK, "SEGMENT": SEGMENT}
    if name == "table":
        chosen = dict(zip(("RAISE", "SEGMENTS"), options, strict=True))
        return describe("rule_table", shape, chosen | spans | {"SLOTS": _TABLE_SLOTS, "BLOCK": _TABLE_BLOCK})
    if name == "gates":
        chosen = dict(zip(("RAISE", "TABLE", "SEGMENTS"), options, strict=True))
        return describe("rule_gates", shape, chosen | spans | {"HEADS": _GATE_HEADS})
    if name == "clear":
        (kind,) = options
        return describe("rule_clear", shape._replace(element=kind), {"ROWS": _CLEARED_ROWS, "BLOCK": _CLEARED_COLUMNS})
    if name == "clear_saved":
        constants = {"SIZE": shape.K * shape.V, "SEGMENT": SEGMENT, "BLOCK": _CLEARED_ELEMENTS}
        return describe("rule_clear_saved", shape, constants)
    if name == "normalize":
        constants = {"EPSILON": EPSILON, "SIZE": shape.K, "PADDED": padded(shape.K), "BLOCK": power(shape.K)}
        return describe("rule_normalize", shape, constants | {"ROWS": _NORMALIZED_ROWS, "FACTORS": options[0]})
    if name == "prepare":
        deep = min(power(shape.K), 32 if shape.is_wide else 128)
        return describe("rule_prepare", shape, sizes | {"K_STEP": deep}, tuned.prepare_warps, 1, _ALIGNED)
    if name == "prepare_hopper":
        from adjoint.ops.gated_delta.rule.hopper import prepare_kernels as _  # noqa: F401  (registers it)

        constants = sizes | {"HEADS": shape.heads, "SCORES": options[0]}
        return describe("rule_prepare_hopper", shape, constants, 4, 1, _ALIGNED)
    if name == "scores":
        return describe("rule_scores", shape, sizes | {"SCORE_PARTS": options[0]}, 4, 1, _ALIGNED)
    walk = {"V_BLOCK": min(tuned.walk_block, power(shape.V)), "SEGMENT": SEGMENT, "BACK": 0, "WHOLE": 0}
    if name == "compose":
        narrow = {"V_BLOCK": 16, "SEGMENT": SEGMENT, "INITIAL": options[0], "PRECISION": "tf32x3"}
        narrow |= {"STAGES": tuned.compose_stages}
        return describe("rule_compose", shape, sizes | narrow, 8, tuned.compose_stages, frozenset(("transitions",)))
    if name in ("transition", "transition_alone"):
        nothing = dict.fromkeys(("INITIAL", "SAVE", "FINAL"), False)
        constants = sizes | walk | nothing | {"SEGMENTED": True, "TRANSITION": True}
        if name == "transition_alone":
            constants |= {"V": 0, "V_BLOCK": min(tuned.walk_block, power(shape.K))}
            constants |= {"BACK": rule_shape.BACK_SEGMENT, "WHOLE": shape.whole_back}
        aligned = _ALIGNED | {"final_state"}
        return describe("rule_walk", shape, constants, tuned.walk_warps, tuned.walk_stages, aligned)
    aligned = _ALIGNED | _CALLERS if options.pop() else _ALIGNED
    if name == "walk":
        chosen = dict(zip(("SEGMENTED", "INITIAL", "SAVE", "FINAL"), options, strict=True))
        constants = sizes | walk | chosen | {"TRANSITION": False}
        return describe("rule_walk", shape, constants, tuned.walk_warps, tuned.walk_stages, aligned)
    assert name == "output", name
    step = min(power(shape.K), 32) if shape.is_wide else power(shape.K)
    constants = sizes | {"V_BLOCK": min(tuned.output_block, power(shape.V)), "K_STEP": step}
    return describe("rule_output", shape, constants, tuned.output_warps, tuned.output_stages, aligned)


def is_aligned(*tensors: Tensor | None) -> bool:
    """Whether tensors begin at multiples of 16 bytes."""
    return all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)


@cache
def takes_from_shared(device: torch.device) -> bool:
    """Whether matrix products of a GPU take operands from shared memory; the interpreter knows neither."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def prepare_key(shape: Shape, hopper: bool = False, scores: bool = False) -> tuple[Any, ...]:
    """The kernel that inverts the matrices of chunks; in plans for Hopper, whose 16-bit types and K it needs, the one
    in Gluon, which takes pairs of value heads and gives `scores` too."""
    fits = shape.element in (torch.bfloat16, torch.float16) and shape.K in (64, 128) and shape.heads % 2 == 0
    return ("prepare_hopper", scores) if hopper and fits else ("prepare",)


class Launches:
    """Starts kernels of one problem by their keys; compiles each on first use."""

    def __init__(
        self, shape: Shape, device: torch.device, tuned: Tuning | None = None, memo: dict[Any, Any] | None = None
    ) -> None:
        self.shape, self.device, self.tuned = shape, device, tuned or tuning(shape, takes_from_shared(device))
        self._memo = {} if memo is None else memo

    def prepare(self, key: tuple[Any, ...]) -> Any:
        launcher = self._memo.get(key)
        if launcher is None:
            launcher = self._memo[key] = variant(key, self.shape, self.tuned).prepare(self.device)
        return launcher

    def __call__(self, key: tuple[Any, ...], programs: int, *arguments: Any) -> None:
        """Compiles in any case: what this size does not need, the next may, and must not be the first to compile."""
        launcher = self.prepare(key)
        if programs:
            launcher((programs, 1, 1), *arguments)


# ----------------------------------------------------------------------------------------------- launches


def table(launch: Launches, memory: Mapping[str, Any], cu_seqlens: Tensor | None, raises: bool = True) -> None:
    """begins, firsts and places of chunks; and of segments, where the memory has them."""
    shape, word = launch.shape, status_word(launch.device)
    given = memory["begins"] if cu_seqlens is None else cu_seqlens
    segments = "segment_firsts" in memory
    few = cu_seqlens is not None and "places" in memory and shape.sequences <= _FEW_SEQUENCES
    if cu_seqlens is not None and "places" in memory:
        programs = -(-shape.chunks // _TABLE_SLOTS) + -(-shape.segments // _TABLE_SLOTS) * segments
        launch(
            ("table", raises, segments), programs if few else 0, given, memory["begins"], memory["firsts"],
            memory["places"], memory.get("segment_firsts", given), memory.get("segment_places", given), word,
            SEQUENCES_OUT_OF_ORDER.row, shape.sequences, shape.tokens, shape.chunks, shape.segments,
        )  # fmt: skip

    def spans(size: int, firsts: Any, places: Any, raises: bool) -> None:
        launch(
            ("bounds", raises, size), 0 if few else 1, given, memory["begins"], firsts, word,
            SEQUENCES_OUT_OF_ORDER.row, shape.sequences, shape.tokens, shape.time,
        )  # fmt: skip
        if places is None:
            return  # nothing to place
        slots = shape.spans(size)
        launch(
            ("places", size), 0 if few else -(-slots // _PLACES_BLOCK), memory["begins"], firsts, places, slots,
            shape.sequences, shape.sequences.bit_length(),
        )  # fmt: skip

    spans(CHUNK, memory["firsts"], memory.get("places"), raises)
    if segments:
        spans(SEGMENT, memory["segment_firsts"], memory.get("segment_places"), False)


def gates(
    launch: Launches, memory: Mapping[str, Any], g: Tensor, beta: Tensor, raises: bool = True, table: bool = False
) -> None:
    """The gates of every chunk; a positive g is reported. With `table` what `table` writes for rows of a batch, too."""
    shape = launch.shape
    absent = memory["begins"]  # stands for a pointer that no variant writes
    launch(
        ("gates", raises, table, table and "segment_firsts" in memory), shape.chunks * -(-shape.heads // _GATE_HEADS),
        g, beta, memory["begins"], memory["firsts"], memory["places"], memory.get("segment_firsts", absent),
        memory.get("segment_places", absent), memory["gates"], status_word(launch.device), POSITIVE_GATE.row,
        shape.heads, shape.rows, shape.time, *g.stride(), *beta.stride(),
    )  # fmt: skip


def table_and_gates(
    launch: Launches, memory: Mapping[str, Any], cu_seqlens: Tensor | None, g: Tensor, beta: Tensor, raises: bool = True
) -> None:
    """What lies where, and the gates of every chunk: one launch where every row of a batch is a sequence."""
    if cu_seqlens is not None:
        table(launch, memory, cu_seqlens, raises)
    gates(launch, memory, g, beta, raises, table=cu_seqlens is None)


def table_keys(packed: bool, raises: bool, segments: Iterable[bool]) -> list[tuple[Any, ...]]:
    """What `table_and_gates` may launch, without segments or with them."""
    if not packed:
        return [("gates", raises, True, also) for also in segments]
    listed: list[tuple[Any, ...]] = [("gates", raises, False, False), ("bounds", raises, CHUNK), ("places", CHUNK)]
    for also in segments:
        listed.append(("table", raises, also))
        listed += [("bounds", False, SEGMENT), ("places", SEGMENT)] * also
    return listed


def normalize(launch: Launches, x: Tensor, out: Any, factors: Any = None) -> Walkable:
    """Rows of q or k divided by their norms, into memory for [B, T, key heads, padded K]; 1 / norm into `factors`."""
    shape = launch.shape
    rows = shape.tokens * shape.key_heads
    launch(
        ("normalize", factors is not None), -(-rows // _NORMALIZED_ROWS), x, out, out if factors is None else factors,
        rows, shape.key_heads, shape.time, *x.stride(),
    )  # fmt: skip
    return Walkable(out, shape.key_heads * padded(shape.K), padded(shape.K))


def prepare(launch: Launches, memory: Mapping[str, Any], k: Walkable, hopper: bool = False) -> None:
    """T − I of every chunk and value head; `hopper` where a plan is for Hopper alone."""
    shape = launch.shape
    key = prepare_key(shape, hopper)
    if key == ("prepare",):
        launch(
            key, shape.chunks * shape.key_heads, k.start, memory["gates"], memory["places"], memory["T"],
            shape.key_heads, k.token_stride, k.head_stride,
        )  # fmt: skip
    else:
        _prepare_hopper(launch, memory, k, k, 1.0, memory["T"], scores=False)


def _prepare_hopper(
    launch: Launches, memory: Mapping[str, Any], q: Walkable, k: Walkable, scale: float, P: Any, scores: bool
) -> None:
    shape = launch.shape
    launch(
        ("prepare_hopper", scores), shape.chunks * (shape.heads // 2), q.start, k.start, memory["gates"],
        memory["places"], memory["T"], P, scale, q.token_stride, q.head_stride, k.token_stride, k.head_stride,
    )  # fmt: skip


def prepare_and_scores(launch: Launches, memory: Mapping[str, Any], q: Walkable, k: Walkable, scale: float) -> None:
    """T − I and P of every chunk and value head, in plans for Hopper: one launch, or two side by side."""
    if prepare_key(launch.shape, True) == ("prepare",):
        side_by_side(
            launch.device,
            lambda: prepare(launch, memory, k),
            lambda: scores(launch, memory, q, k, scale),
            launch.shape.is_large,
        )
    else:
        _prepare_hopper(launch, memory, q, k, scale, memory["P"], scores=True)


def scores(launch: Launches, memory: Mapping[str, Any], q: Walkable, k: Walkable, scale: float, parts: int = 1) -> None:
    """P of every chunk and value head, into memory["P"], [chunks, H, parts, 64, 64]."""
    shape = launch.shape
    launch(
        ("scores", parts), shape.chunks * shape.key_heads, q.start, k.start, memory["gates"], memory["places"],
        memory["P"], shape.key_heads, scale, q.token_stride, q.head_stride, k.token_stride, k.head_stride,
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
    starts: bool = True,
) -> None:
    """states and new of every chunk; over whole sequences, or over segments from the states that were saved.

    Over whole sequences `saved` is written, where given, and over segments it is read. Without `starts` it is compiled
    and no more.
    """
    shape = launch.shape
    if segmented and final_state is not None and shape.ids is not None:  # for sequences without a segment
        final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
    absent = memory["gates"]  # stands for a pointer that no variant reads
    spans = shape.segments if segmented else shape.sequences
    key = ("walk", segmented, initial_state is not None, saved is not None and not segmented, final_state is not None)
    aligned = is_aligned(initial_state, saved, final_state)
    launch(
        (*key, aligned), spans * shape.heads * _blocks(shape, launch.tuned.walk_block) * starts, k.start, v.start,
        memory["gates"], memory["T"], memory["segment_places"] if segmented else memory["begins"], memory["begins"],
        memory["firsts"], absent if initial_state is None else initial_state, absent if saved is None else saved,
        memory["states"], memory["new"], absent if final_state is None else final_state, shape.heads,
        k.token_stride, k.head_stride, v.token_stride, v.head_stride,
    )  # fmt: skip


def transitions(launch: Launches, memory: Mapping[str, Any], k: Walkable, v: Walkable) -> None:
    """What every segment makes of a state, M S + B: Mᵀ and Bᵀ into memory["transitions"], [segments, H, K + V, K]."""
    shape, absent = launch.shape, memory["gates"]
    block = min(launch.tuned.walk_block, power(shape.V))
    lines = padded(shape.K) + padded(shape.V)
    launch(
        ("transition",), shape.segments * shape.heads * -(-lines // block), k.start, v.start, memory["gates"],
        memory["T"], memory["segment_places"], memory["begins"], memory["firsts"], absent, absent, memory["T"],
        memory["T"], memory["transitions"], shape.heads, k.token_stride, k.head_stride, v.token_stride, v.head_stride,
    )  # fmt: skip


def transitions_alone(launch: Launches, memory: Mapping[str, Any], k: Walkable) -> None:
    """Mᵀ of the segments that gradients pass through into memory["transitions"], [places, H, K, K]: of those that are
    neither the first nor the last of a sequence that is split on the way back."""
    shape, absent = launch.shape, memory["gates"]
    blocks = -(-padded(shape.K) // min(launch.tuned.walk_block, power(shape.K)))
    launch(
        ("transition_alone",), shape.segments * shape.heads * blocks * shape.is_split_back, k.start, k.start,
        memory["gates"], memory["T"], memory["segment_places"], memory["begins"], memory["firsts"], absent, absent,
        memory["T"], memory["T"], memory.get("transitions", absent), shape.heads, k.token_stride, k.head_stride,
        k.token_stride, k.head_stride,
    )  # fmt: skip


def compose(launch: Launches, memory: Mapping[str, Any], initial_state: Tensor | None, saved: Any) -> None:
    """The state at the start of every segment but a sequence's first, into `saved`."""
    shape = launch.shape
    launch(
        ("compose", initial_state is not None), shape.sequences * shape.heads * -(-padded(shape.V) // 16),
        memory["transitions"], memory["begins"], memory["segment_firsts"],
        memory["gates"] if initial_state is None else initial_state, saved, shape.heads,
    )  # fmt: skip


def output(launch: Launches, memory: Mapping[str, Any], q: Walkable, k: Walkable, scale: float, out: Tensor) -> None:
    """o of the tokens of all sequences; `out` is contiguous."""
    shape = launch.shape
    programs = shape.chunks * shape.key_heads * _blocks(shape, launch.tuned.output_block)
    launch(
        ("output", is_aligned(out)), programs, q.start, k.start, memory["gates"], memory["places"], memory["states"],
        memory["new"], out, shape.key_heads, scale,
        q.token_stride, q.head_stride, k.token_stride, k.head_stride,
    )  # fmt: skip


def clear(launch: Launches, memory: Mapping[str, Any], *outputs: Tensor) -> None:
    """Zeros for the tokens of no sequence in contiguous tensors [B, T, ...]."""
    shape = launch.shape
    for out in outputs:
        launch(
            ("clear", out.dtype), -(-shape.tokens // _CLEARED_ROWS), memory["begins"], out, shape.sequences,
            shape.tokens, out.numel() // shape.tokens,
        )  # fmt: skip


def clear_saved(launch: Launches, memory: Mapping[str, Any], saved: Tensor) -> None:
    """Zeros for the places of saved states that no sequence has."""
    shape = launch.shape
    if shape.sequences == 0:
        saved.zero_()
        return
    everyone = shape.ids is None and saved.shape[0] == shape.rows * (-(-shape.time // SEGMENT) - 1)
    launch(
        ("clear_saved",), 0 if everyone else saved.shape[0] * shape.heads, memory["begins"], saved, shape.sequences,
        shape.heads, shape.sequences.bit_length(),
    )  # fmt: skip
