"""Launches the kernels of the gated delta rule's adjoint, after those that compute the forward's chunks again.

table → gates → prepare → walk, over segments from the saved states → turn → walk_back → gradients → gate_gradients

Where long sequences of few heads are split, walk_back is three: over segments from 0, compose_back, over segments.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.kernels import TRITON_TYPES, Variant
from adjoint.ops.gated_delta.arguments import NEED_BETA, NEED_G, NEED_K, NEED_Q, NEED_V
from adjoint.ops.gated_delta.packing import CHUNK, SEGMENT
from adjoint.ops.gated_delta.rule import shape as rule_shape
from adjoint.ops.gated_delta.rule.shape import Shape, Walkable, padded, power
from adjoint.ops.gated_delta.rule.triton import backward_kernels as _kernels  # noqa: F401  (registers them)
from adjoint.ops.gated_delta.rule.triton import closing_kernels as _closing_kernels  # noqa: F401
from adjoint.ops.gated_delta.rule.triton import compose_back_kernels as _compose_back_kernels  # noqa: F401
from adjoint.ops.gated_delta.rule.triton import gradients_kernels as _gradients_kernels  # noqa: F401
from adjoint.ops.gated_delta.rule.triton import launch as rule_launch
from adjoint.ops.gated_delta.rule.triton.launch import is_aligned

APART, INLINE = 2, 1
"""How the gradient passes through the norms of q and k: in a kernel of its own, or in the one that has whole rows."""

_WALKS_ON_HOPPER = ("turn_hopper", "walk_back_hopper")

KERNELS = (
    "turn",
    "walk_back",
    "transition_back",
    "segment_back",
    "compose_back",
    "matrices",
    "gradients",
    "gate_gradients",
    "unnormalize",
    *_WALKS_ON_HOPPER,
    "walk_hopper",
    "gradients_hopper",
)
"""Those of the backward alone, as keys name them."""

_UNNORMALIZED_ROWS = 16
_COMPOSED = 16
"""Columns of V that a program takes from segment to segment: what sizes are padded to, and the fewest of a product."""

PARTS = 3
"""Rows of what the gradients leave for those of the gates."""

# ------------------------------------------------------------------------------------------------- the cut


class Tuning(NamedTuple):
    """How the kernels are cut and launched. Tuned on an H200.

    By the dtype, K, V and the number of heads alone, because bits may depend on it.
    """

    walk_block: int = 32
    walk_warps: int = 4
    walk_stages: int = 2
    segment_block: int = 128
    segment_warps: int = 8
    segment_stages: int = 2
    compose_warps: int = 8
    compose_stages: int = 3
    turn_keys: int = 128
    turn_values: int = 128
    turn_warps: int = 4
    turn_stages: int = 2
    matrix_values: int = 32
    matrix_warps: int = 4
    matrix_stages: int = 2
    key_block: int = 128
    value_block: int = 32
    warps: int = 4
    stages: int = 3


def walks_back_in_gluon(shape: Shape, fused: bool) -> bool:
    """Whether a plan for Hopper walks back in Gluon: its walk goes over whole sequences, so not those of few heads."""
    return fused and not shape.may_split


def tuning(shape: Shape, from_shared: bool = True) -> Tuning:
    """The cut of a problem.

    Args:
        from_shared: whether products take operands from shared memory, as on Hopper; elsewhere they take registers, and
            walks have more warps.
    """
    if shape.is_wide:
        return Tuning(
            walk_block=16, walk_warps=8, walk_stages=1, segment_block=16, segment_warps=8, segment_stages=1,
            turn_keys=32, turn_values=32, turn_warps=8, turn_stages=1,
            matrix_values=16, matrix_warps=8, matrix_stages=1,
            key_block=32, value_block=16, warps=8, stages=1,
        )  # fmt: skip
    if shape.K > 128:
        return Tuning(
            walk_block=32, walk_warps=8, walk_stages=1, turn_keys=64, turn_values=64, turn_stages=1, value_block=16,
            stages=2,
        )  # fmt: skip
    tuned = Tuning()
    if not from_shared:
        tuned = tuned._replace(segment_block=64, walk_block=64, walk_warps=8)
    if shape.V <= 64:
        tuned = tuned._replace(segment_block=32, segment_warps=4, segment_stages=3 if from_shared else 2)
    # Few heads fill more of a card where the walk cuts V finer, and each step takes less.
    return tuned._replace(walk_block=16, walk_warps=4, walk_stages=3) if shape.may_split else tuned


def forward_tuning(shape: Shape) -> rule_shape.Tuning:
    """Of the forward's kernels that run again.

    T has two parts: dg and dβ of nearly equal keys need them. Over segments the walk has programs enough for wider
    blocks.
    """
    tuned = rule_shape.tuning(shape)
    if not shape.is_wide:
        tuned = tuned._replace(parts=2)
    if shape.is_wide or shape.K > 128 or shape.V <= 64:
        return tuned
    return tuned._replace(walk_block=64, walk_warps=4, walk_stages=3)


def key_blocks(shape: Shape, tuned: Tuning) -> int:
    """Blocks of K that gradients are computed in."""
    return -(-padded(shape.K) // min(tuned.key_block, power(shape.K)))


def is_apart(shape: Shape, tuned: Tuning | None = None) -> bool:
    """Whether a row of q or k is more than one block, and the gradient of its norm a kernel of its own."""
    return key_blocks(shape, tuned or tuning(shape)) > 1


def regions(
    shape: Shape, tuned: Tuning, need: int, normalize: bool = False, fused: bool = False
) -> dict[str, tuple[torch.dtype, int]]:
    """The workspace besides the forward's.

    Y and local [chunks, H, V, 64], dstates [chunks, H, V, K], W [chunks, H, 64, K], M, M_turned and E
    [chunks, H, 64, 64], what dg and dβ are made of; for normalised q and k their factors, and, where rows are cut, the
    gradients of what was normalised, in float32. `fused` is the kernel that keeps all between Y and the gradients to
    itself. Where sequences may be split: transitions [places, H, K, K] and dstarts [places, H, V, K], in float32.
    """
    lanes, K, V = shape.chunks * shape.heads, padded(shape.K), padded(shape.V)
    held = {name: (shape.element, lanes * CHUNK * V) for name in ("Y", "local")}
    held |= {"dstates": (shape.element, lanes * V * K), "W": (shape.element, lanes * CHUNK * K)}
    if shape.is_split_back:  # places as those of saved states, of other segments: see `saved_states`
        places = (shape.tokens - 1) // rule_shape.BACK_SEGMENT
        held |= {
            name: (torch.float32, places * shape.heads * lines * K)
            for name, lines in (("transitions", K), ("dstarts", V))
        }
    if need & (NEED_Q | NEED_K) and not fused:
        held |= {name: (shape.element, lanes * CHUNK * CHUNK) for name in ("M", "M_turned", "E")}
    if need & (NEED_G | NEED_BETA) and not fused:
        blocks = key_blocks(shape, tuned)
        held["parts"] = (torch.float32, lanes * blocks * PARTS * CHUNK)
        held["kept"] = (torch.float32, lanes * blocks)
        held |= {name: (torch.float32, lanes * CHUNK) for name in ("passing", "besides")}
    if normalize:
        rows = shape.tokens * shape.key_heads
        for bit, name in ((NEED_Q, "q"), (NEED_K, "k")):
            held[f"{name}_factors"] = (torch.float32, rows)
            if need & bit and is_apart(shape, tuned):
                held[f"d{name}_normalized"] = (torch.float32, rows * shape.K)
    return held


# ------------------------------------------------------------------------------------------------ variants

_MATRICES = ("T", "W", "local", "M", "M_turned", "E", "states", "dstates", "new", "Y")
_ELEMENTS = frozenset(("x", "out", "q", "k", "v", "do", "dq", "dk", "dv", *_MATRICES))
_FLOATS = frozenset(
    (
        "gates",
        "dfinal_state",
        "dinitial_state",
        "dstarts",
        "transitions",
        "parts",
        "kept",
        "passing",
        "besides",
        "q_factors",
        "k_factors",
        "factors",
        "gradient",
    )
)
_STRIDES = frozenset(f"{name}_{of}_stride" for name in ("q", "k", "v", "do") for of in ("token", "head"))
_ALIGNED = frozenset(("q", "k", "v", "do", "gates", "dstarts", "transitions", *_MATRICES)) | _STRIDES
_CALLERS = frozenset(("dfinal_state", "dinitial_state", "dq", "dk", "dv"))
"""Pointers that are multiples of 16 unless a caller brings memory of its own that is not."""


def describe(
    kernel: str, shape: Shape, constants: Mapping[str, Any], warps: int, stages: int, aligned: frozenset[str]
) -> Variant:
    """A kernel as it is compiled for a shape."""
    described = kernels.registered()[kernel]
    types = {}
    for name in described.parameters:
        if name in ("dq", "dk") and constants.get("NORMALIZED") == APART:
            types[name] = "*fp32"
        elif name in _ELEMENTS:
            types[name] = f"*{TRITON_TYPES[shape.element]}"
        elif name in _FLOATS:
            types[name] = "*fp32"
        elif name in ("begins", "firsts", "places", "spans"):
            types[name] = "*i32"
        elif name in ("dg", "dbeta"):
            types[name] = f"*{TRITON_TYPES[shape.gate if name == 'dg' else shape.strength]}"
        elif name == "scale":
            types[name] = "fp32"
        elif not name.isupper():
            types[name] = "i64" if name.endswith("_stride") else "i32"
    return described.variant(
        types,
        {name: constants[name] for name in described.parameters if name not in types},
        [name for name in types if name in aligned],
        num_warps=warps,
        num_stages=stages,
    )


def variant(key: tuple[Any, ...], shape: Shape, parts: int, tuned: Tuning) -> Variant:
    """What is compiled for a key: the name of a kernel without `rule_`, and its options."""
    name, *options = key
    if name == "gradients_hopper":
        from adjoint.ops.gated_delta.rule.hopper import gradients as rule_gradients_hopper

        return rule_gradients_hopper.variant(shape, key[1:])
    if name == "walk_hopper":
        from adjoint.ops.gated_delta.rule.hopper import walk as rule_walk_hopper

        return rule_walk_hopper.variant(shape, key)
    if name in _WALKS_ON_HOPPER:
        from adjoint.ops.gated_delta.rule.hopper import walk_back as rule_walk_back_hopper

        return rule_walk_back_hopper.variant(shape, key)
    sizes = {
        "GROUP": shape.group,
        "K": padded(shape.K),
        "V": padded(shape.V),
        "K_SIZE": shape.K,
        "V_SIZE": shape.V,
        "K_BLOCK": power(shape.K),
        "PARTS": parts,
        "WIDE": shape.is_wide,
        "PRECISION": "tf32x3" if shape.is_wide else "ieee",  # which 16-bit operands do not know
    }
    if name == "turn":
        constants = sizes | {
            "K_BLOCK": min(tuned.turn_keys, power(shape.K)),
            "V_BLOCK": min(tuned.turn_values, power(shape.V)),
            "STAGES": tuned.turn_stages,
            "UPSTREAM": options[0],
        }
        return describe("rule_turn", shape, constants, tuned.turn_warps, tuned.turn_stages, _ALIGNED)
    if name == "unnormalize":
        constants = {"SIZE": shape.K, "PADDED": padded(shape.K), "BLOCK": power(shape.K), "ROWS": _UNNORMALIZED_ROWS}
        return describe("rule_unnormalize", shape, constants, 4, 1, frozenset())
    if name == "gate_gradients":
        upstream, need = options
        constants = {
            "K_BLOCKS": key_blocks(shape, tuned),
            "UPSTREAM": upstream,
            "NEED_G": bool(need & NEED_G),
            "NEED_BETA": bool(need & NEED_BETA),
        }
        return describe("rule_gate_gradients", shape, constants, 2, 1, frozenset())
    if name == "compose_back":
        constants = sizes | {
            "V_BLOCK": _COMPOSED,
            "STAGES": tuned.compose_stages,
            "BACK": rule_shape.BACK_SEGMENT,
            "WHOLE": shape.whole_back,
            "PRECISION": "tf32x3",
        }
        return describe("rule_compose_back", shape, constants, tuned.compose_warps, tuned.compose_stages, _ALIGNED)
    aligned = _ALIGNED | _CALLERS if options.pop() else _ALIGNED
    if name in ("walk_back", "transition_back", "segment_back"):
        upstream, final, initial = options
        block, warps, stages = _walk(tuned, name)
        constants = sizes | {
            "V_BLOCK": min(block, power(shape.V)),
            "STAGES": stages,
            "PRECISION": "ieee",
            "UPSTREAM": upstream,
            "FINAL": final,
            "INITIAL": initial,
            "SEGMENTED": name != "walk_back",
            "TRANSITION": name == "transition_back",
            "SEGMENT": SEGMENT,
            "BACK": rule_shape.BACK_SEGMENT,
            "WHOLE": shape.whole_back,
        }
        return describe("rule_walk_back", shape, constants, warps, stages, aligned)
    if name == "matrices":
        upstream, need = options
        constants = sizes | {
            "K_BLOCK": min(tuned.key_block, power(shape.K)),
            "V_BLOCK": min(tuned.matrix_values, power(shape.V)),
            "STAGES": tuned.matrix_stages,
            "UPSTREAM": upstream,
            "NEED_QK": bool(need & (NEED_Q | NEED_K)),
            "NEED_V": bool(need & NEED_V),
            "NEED_GATES": bool(need & (NEED_G | NEED_BETA)),
        }
        return describe("rule_matrices", shape, constants, tuned.matrix_warps, tuned.matrix_stages, aligned)
    assert name == "gradients", name
    upstream, normalize, need = options
    normalized = (APART if is_apart(shape, tuned) else INLINE) if normalize else 0
    stages = tuned.stages
    if normalized == INLINE:  # which leaves few registers, and places without alignment take more of them
        stages = min(stages, 2 if aligned > _ALIGNED else 1)
    constants = sizes | {
        "NORMALIZED": normalized,
        "K_BLOCK": min(tuned.key_block, power(shape.K)),
        "V_BLOCK": min(tuned.value_block, power(shape.V)),
        "STAGES": stages,
        "UPSTREAM": upstream,
        "NEED_Q": bool(need & NEED_Q),
        "NEED_K": bool(need & NEED_K),
        "NEED_GATES": bool(need & (NEED_G | NEED_BETA)),
    }
    return describe("rule_gradients", shape, constants, tuned.warps, stages, aligned)


def _walk(tuned: Tuning, kernel: str) -> tuple[int, int, int]:
    """Columns of V, warps and stages of a walk back, by its name in keys."""
    if kernel == "walk_back":
        return tuned.walk_block, tuned.walk_warps, tuned.walk_stages
    return tuned.segment_block, tuned.segment_warps, tuned.segment_stages


class Launches(rule_launch.Launches):
    """Starts the kernels of both files by their keys."""

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        tuned: rule_shape.Tuning | None = None,
        backward: Tuning | None = None,
        memo: dict[Any, Any] | None = None,
    ) -> None:
        super().__init__(shape, device, tuned or forward_tuning(shape), memo)
        self.backward = backward or tuning(shape, rule_launch.takes_from_shared(device))

    def prepare(self, key: tuple[Any, ...]) -> Any:
        if key[0] not in KERNELS:
            return super().prepare(key)
        launcher = self._memo.get(key)
        if launcher is None:
            described = variant(key, self.shape, self.tuned.parts, self.backward)
            launcher = self._memo[key] = described.prepare(self.device)
        return launcher


# ------------------------------------------------------------------------------------------------ launches


def turn(
    launch: Launches, memory: Mapping[str, Any], q: Walkable, k: Walkable, do: Walkable | None, scale: float
) -> None:
    """W and local of every chunk and value head; W alone without do."""
    shape = launch.shape
    upstream = do or q
    launch(
        ("turn", do is not None), shape.chunks * shape.key_heads, q.start, k.start, upstream.start, memory["gates"],
        memory["places"], memory["T"], memory["W"], memory["local"], shape.key_heads, scale, q.token_stride,
        q.head_stride, k.token_stride, k.head_stride, upstream.token_stride, upstream.head_stride,
    )  # fmt: skip


class WayBack(NamedTuple):
    """What every walk back reads: tokens, and the gradients of what came of them; None where there is none."""

    q: Walkable
    k: Walkable
    do: Walkable | None
    dfinal_state: Tensor | None
    scale: float


def walk_back(launch: Launches, memory: Mapping[str, Any], way: WayBack, dinitial_state: Tensor | None) -> None:
    """Y and dstates of every chunk, and the gradient of the initial states where it is wanted; but for sequences that
    are split."""
    shape = launch.shape
    spans = 0 if shape.is_split_back and shape.ids is None else shape.sequences
    _go_back("walk_back", spans, launch, memory, way, dinitial_state)


def transitions_back(launch: Launches, memory: Mapping[str, Any], way: WayBack) -> None:
    """What segments make of a gradient 0 of the state they end with, the last of the final state's, into dstarts."""
    spans = launch.shape.segments if launch.shape.is_split_back else 0
    _go_back("transition_back", spans, launch, memory, way, None)


def compose_back(launch: Launches, memory: Mapping[str, Any]) -> None:
    """The gradient of the state that every segment but a sequence's first begins with, in dstarts."""
    shape, absent = launch.shape, memory["gates"]
    programs = shape.sequences * shape.heads * (padded(shape.V) // _COMPOSED)
    launch(
        ("compose_back",), programs if shape.is_split_back else 0, memory.get("transitions", absent),
        memory["begins"], memory.get("dstarts", absent), shape.heads,
    )  # fmt: skip


def segments_back(launch: Launches, memory: Mapping[str, Any], way: WayBack, dinitial_state: Tensor | None) -> None:
    """What `walk_back` gives, of the sequences that are split, all segments at once."""
    spans = launch.shape.segments if launch.shape.is_split_back else 0
    _go_back("segment_back", spans, launch, memory, way, dinitial_state)


def _go_back(
    kernel: str, spans: int, launch: Launches, memory: Mapping[str, Any], way: WayBack, dinitial_state: Tensor | None
) -> None:
    shape, (q, k, do, dfinal_state, scale) = launch.shape, way
    absent = memory["gates"]  # stands for a pointer that no variant reads
    blocks = -(-padded(shape.V) // min(_walk(launch.backward, kernel)[0], power(shape.V)))
    upstream = do or q
    key = (kernel, do is not None, dfinal_state is not None, dinitial_state is not None)
    launch(
        (*key, is_aligned(dfinal_state, dinitial_state)), spans * shape.heads * blocks, q.start, k.start,
        upstream.start, memory["gates"], memory["W"], memory["local"], memory["segment_places"], memory["begins"],
        memory["firsts"], absent if dfinal_state is None else dfinal_state,
        absent if dinitial_state is None else dinitial_state, memory.get("dstarts", absent), memory["Y"],
        memory["dstates"], shape.heads, scale, q.token_stride, q.head_stride, k.token_stride, k.head_stride,
        upstream.token_stride, upstream.head_stride,
    )  # fmt: skip


def matrices(
    launch: Launches,
    memory: Mapping[str, Any],
    q: Walkable,
    k: Walkable,
    v: Walkable,
    do: Walkable | None,
    dv: Tensor,
    scale: float,
    need: int,
) -> None:
    """M, its transpose and E + Eᵀ of every chunk and value head; dv; what dg and dβ have of them."""
    shape = launch.shape
    upstream = do or v
    absent = memory["gates"]  # stands for a pointer that no variant reads
    launch(
        ("matrices", do is not None, need, is_aligned(dv)), shape.chunks * shape.heads, q.start, k.start, v.start,
        upstream.start, memory["gates"], memory["places"], memory["new"], memory["Y"],
        *(memory.get(name, absent) for name in ("M", "M_turned", "E")), dv,
        *(memory.get(name, absent) for name in ("passing", "besides")), shape.key_heads, padded(shape.V), scale,
        q.token_stride, q.head_stride, k.token_stride, k.head_stride, v.token_stride, v.head_stride,
        upstream.token_stride, upstream.head_stride,
    )  # fmt: skip


def gradients(
    launch: Launches,
    memory: Mapping[str, Any],
    q: Walkable,
    k: Walkable,
    do: Walkable | None,
    dq: Tensor,
    dk: Tensor,
    scale: float,
    normalize: bool,
    need: int,
) -> None:
    """dq and dk, as `need` says, and the parts of dg and dβ."""
    shape = launch.shape
    blocks = key_blocks(shape, launch.backward)
    apart = normalize and blocks > 1
    upstream = do or q
    absent = memory["gates"]  # stands for a pointer that no variant reads
    targets = [memory.get(f"{name}_normalized", out) if apart else out for name, out in (("dq", dq), ("dk", dk))]
    factors = [memory.get(name, absent) for name in ("q_factors", "k_factors")]
    launch(
        ("gradients", do is not None, normalize, need, is_aligned(dq, dk)),
        2 * blocks * shape.chunks * shape.key_heads, q.start, k.start, upstream.start, memory["gates"],
        memory["places"], memory["states"], memory["dstates"], memory["new"], memory["Y"],
        *(memory.get(name, absent) for name in ("M", "M_turned", "E")), *targets,
        *(memory.get(name, absent) for name in ("parts", "kept")), *factors, shape.key_heads, padded(shape.V), scale,
        q.token_stride, q.head_stride, k.token_stride, k.head_stride, upstream.token_stride, upstream.head_stride,
    )  # fmt: skip
    if apart:
        rows = shape.tokens * shape.key_heads
        for bit, x, number, out in ((NEED_Q, q, 0, dq), (NEED_K, k, 1, dk)):
            if need & bit:
                programs = -(-rows // _UNNORMALIZED_ROWS)
                launch(("unnormalize",), programs, x.start, factors[number], targets[number], out, rows)


def gate_gradients(
    launch: Launches, memory: Mapping[str, Any], dg: Tensor, dbeta: Tensor, upstream: bool, need: int
) -> None:
    """dg and dβ."""
    shape = launch.shape
    launch(
        ("gate_gradients", upstream, need), shape.chunks * shape.heads, memory["gates"], memory["places"],
        memory["parts"], memory["kept"], memory["passing"], memory["besides"], dg, dbeta, shape.heads,
    )  # fmt: skip
