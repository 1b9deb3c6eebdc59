"""Sequences that mutants of the gated delta rule's kernels are tried on: float32, where one wrong term stands out.

Products of chunks have no eager twin of equal bits, so results are compared with the recurrence, closely. What 16-bit
types alone do (parts of matrices and scores) is tried on them, and on the matrices themselves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.contract.inputs import widened
from adjoint.ops.gated_delta import packing, reference
from adjoint.ops.gated_delta.arguments import EPSILON
from adjoint.ops.gated_delta.rule import shape as rule_shape
from adjoint.ops.gated_delta.rule.shape import token_rows
from adjoint.ops.gated_delta.values import nearly_equal, tokens
from adjoint.verify.checks.bits import same_bits
from tests.mutants.calls.edges import at_the_edge
from tests.ops.gated_delta.rule.kernels import Kernels

CLOSE = {torch.float32: 2e-6, torch.bfloat16: 4.5e-3}
"""Of the norm of a result: ten times what rounding gives float32, and half more for bfloat16."""

_KERNELS = Preference(plan="triton.chunked+eager.chunked").text


@dataclass(frozen=True)
class Sequences:
    """One forward, all outputs."""

    shape: tuple[int, int, int, int, int, int]
    dtype: torch.dtype = torch.float32
    normalize: bool = False
    falls: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def prepared(self) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
        """Inputs, and the recurrence's results."""
        inputs = tokens(self.shape, **self.options)(self.dtype, torch.device("cpu"), torch.Generator().manual_seed(3))
        if self.falls:
            fall(inputs[3])
        o, final = reference.gated_delta_rule(*widened(inputs), scale=0.5, normalize_qk=self.normalize)
        return inputs, (o, final, _saved(widened(inputs), self.normalize))

    @cached_property
    def recorded(self) -> tuple[Tensor, ...]:
        """The results of the kernels as they are."""
        return self._run()

    def _run(self) -> tuple[Tensor, ...]:
        inputs, _ = self.prepared
        edged = tuple(x if x is None else at_the_edge(x, front=x.dtype == torch.int64) for x in inputs)
        forward = adjoint.gated_delta_rule.__globals__["_rule"].forward
        return forward.launch((*edged, 0.5, self.normalize, True, False, True), _KERNELS)  # type: ignore[no-any-return]

    def wrong_result(self) -> bool:
        """Whether kernels give anything but the recurrence's results; in 16 bits, where a second part of a number is
        less than other roundings, any other bits than the kernels as they are."""
        results, (_, exact) = self._run(), self.prepared
        if self.dtype == torch.bfloat16 and not all(map(same_bits, results, self.recorded)):
            return True
        return any(_far(got, right, self.dtype) for got, right in zip(results, exact, strict=True))


def fall(g: Tensor) -> None:
    """The first tokens decay so much that sums of g lose in float32 what later ones add to them; none is a reset."""
    g[:, :30] = -100.0


def _far(got: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    error = (got.double() - exact).norm()
    return not bool(error <= CLOSE[dtype] * exact.norm().clamp_min(1e-6))


def _saved(inputs: tuple[Any, ...], normalize: bool) -> Tensor:
    """The states between segments: the last of a sequence cut there."""
    *differentiable, state, cu_seqlens = inputs
    rows, time, heads, V = differentiable[2].shape
    K = differentiable[0].shape[3]
    places = differentiable[2].new_zeros(packing.saved_states(rows * time), heads, K, V)
    bounds = [row * time for row in range(rows + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    flat = [x.flatten(0, 1) for x in differentiable]
    for number, (begin, end) in enumerate(pairwise(bounds)):
        for segment in range(1, -(-(end - begin) // packing.SEGMENT)):
            part = [x[begin : begin + segment * packing.SEGMENT][None] for x in flat]
            first = None if state is None else state[number : number + 1]
            _, last = reference.gated_delta_rule(*part, first, None, scale=0.5, normalize_qk=normalize)
            places[begin // packing.SEGMENT + segment - 1] = last[0]
    return places


@contextmanager
def small() -> Iterator[None]:
    """Segments of two chunks, so that few tokens have several; sequences of one and two heads are split."""
    before = packing.SEGMENT, rule_shape.FEW_HEADS
    packing.SEGMENT, rule_shape.FEW_HEADS = 128, 2
    adjoint.core.op.operator.forget()
    try:
        yield
    finally:
        packing.SEGMENT, rule_shape.FEW_HEADS = before
        adjoint.core.op.operator.forget()


def calls() -> Iterator[Sequences]:
    yield Sequences((1, 330, 1, 3, 16, 24), options={"cu_seqlens": (0, 0, 1, 66, 330), "decay": 0.3})
    yield Sequences((2, 128, 2, 2, 40, 16), options={"state": False})
    yield Sequences((1, 70, 1, 3, 40, 40), torch.bfloat16)
    yield Sequences((1, 70, 1, 1, 12, 5), normalize=True)
    yield Sequences((1, 270, 1, 2, 36, 24), options={"cu_seqlens": (0, 0, 10, 270), "decay": 0.05})
    yield Sequences((2, 260, 1, 2, 16, 16), options={"state": False, "decay": 0.05})
    # The second place of saved states is nobody's: the second sequence, which begins in the first, ends before it.
    yield Sequences((1, 300, 1, 1, 16, 16), options={"cu_seqlens": (0, 100, 300), "decay": 0.05})
    yield Sequences((1, 70, 1, 1, 16, 16), falls=True, options={"decay": 0.05})
    yield Sequences((1, 20, 1, 1, 64, 16), options={"decay": None})


CALLS = tuple(calls())


def warm() -> None:
    """Prepares all calls."""
    with small():
        for call in CALLS:
            assert call.prepared
            if call.dtype == torch.bfloat16:
                assert call.recorded


def _triton(module: str) -> Any:
    """A module of kernels as it is now: a mutant may have its place."""
    return import_module(f"adjoint.ops.gated_delta.rule.triton.{module}")


class Chunks:
    """The kernels one by one, on memory of their own."""

    def __init__(
        self,
        dtype: torch.dtype,
        time: int,
        bounds: tuple[int, ...] | None,
        parts: int,
        heads: tuple[int, int] = (1, 2),
    ) -> None:
        options: dict[str, Any] = {"keys": nearly_equal, "decay": 0.01, "strength": (0.9, 1.0), "cu_seqlens": bounds}
        draw = tokens((1, time, *heads, 16, 16), **options)
        inputs = draw(dtype, torch.device("cpu"), torch.Generator().manual_seed(4))
        self.q, self.k, self.v, self.g, self.beta, self.state, self.cu_seqlens = inputs
        bound, self.parts = Kernels(inputs), parts
        self.setup, self.shape = bound.setup, bound.shape
        inverse = _triton("chunk_inverse")
        self.memory = bound.memory(
            **_triton("chunk_indices").index_regions(self.shape, segments=True),
            **_triton("gates").gate_region(self.shape),
            **inverse.inverse_region(self.shape, parts),
            **inverse.score_region(self.shape),
            **_triton("state_scan").scan_regions(self.shape),
        )
        self.queries, self.keys, self.values = (token_rows(at_the_edge(x)) for x in (self.q, self.k, self.v))
        gates = _triton("gates").bind_gates(self.setup, self.shape, (True,), raises=True)
        gates(self.memory, self.cu_seqlens, self.g, self.beta)
        inverse.bind_chunk_inverse(self.setup, self.shape, parts)(self.memory, self.keys)

    def scan(self, segmented: bool = False, saved: Tensor | None = None) -> list[Tensor]:
        """What a state scan leaves: states and new values of all chunks."""
        results = [self.memory[name] for name in ("states", "new_values")]
        for x in results:
            x.fill_(torch.nan)
        scan = _triton("state_scan").bind_state_scan(
            self.setup, self.shape, self.parts, segmented=segmented, initial=True,
            saves=saved is not None and not segmented, final=False,
        )  # fmt: skip
        scan(self.memory, self.keys, self.values, self.state, saved)
        return [x.clone().nan_to_num(7.0) for x in results]


def wrong_matrices() -> bool:
    """Whether T in two parts is further from the inverse than its parts allow, or P from the scores."""
    for dtype, close, key_heads, heads in ((torch.bfloat16, 1e-4, 2, 4), (torch.float32, 1e-6, 1, 2)):
        chunks = Chunks(dtype, 100, None, 2, (key_heads, heads))
        scores = _triton("chunk_inverse").bind_scores(chunks.setup, chunks.shape)
        scores(chunks.memory, chunks.queries, chunks.keys, 0.5)
        T = chunks.memory["T"].view(2, heads, 2, 64, 64).double().sum(2)
        P = chunks.memory["P"].view(2, heads, 64, 64).double()
        for chunk, size in ((0, 64), (1, 36)):
            here = slice(64 * chunk, 64 * chunk + size)
            for head in range(heads):
                G = chunks.g[0, here, head].double().cumsum(0)
                decay = (G[:, None] - G[None]).exp().tril()
                key_head = head * key_heads // heads
                rows = chunks.k[0, here, key_head].double()
                A = (chunks.beta[0, here, head].double()[:, None] * (rows @ rows.T) * decay).tril(-1)
                inverse = torch.eye(64, dtype=torch.float64)
                inverse[:size, :size] = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + A)
                score = torch.zeros(64, 64, dtype=torch.float64)
                score[:size, :size] = 0.5 * (chunks.q[0, here, key_head].double() @ rows.T) * decay
                if (T[chunk, head] + torch.eye(64) - inverse).norm() > close * inverse.norm():
                    return True
                if (P[chunk, head] - score).norm() > (close if dtype == torch.float32 else 2**-9) * score.norm():
                    return True
    return False


def wrong_scans() -> bool:
    """Whether segments do not give what whole sequences do, or the second part of T is not what is added."""
    one_part = Chunks(torch.bfloat16, 310, (0, 20, 310), 1)
    saved = torch.zeros(packing.saved_states(310), 2, 16, 16)
    whole = one_part.scan(saved=saved)
    if not all(map(torch.equal, one_part.scan(segmented=True, saved=saved), whole)):
        return True
    two_parts = Chunks(torch.bfloat16, 310, (0, 20, 310), 2)
    parts = two_parts.memory["T"].view(-1, 2, 64 * 64)
    parts[:, 1] = parts[:, 0]
    parts[:, 0] = 0
    return not all(map(torch.equal, two_parts.scan(), whole))


def wrong_indices() -> bool:
    """Whether what lies where is not what counting by hand gives: of rows, of few sequences, and of many."""
    packed, two_blocks = (3, 3, 20, 310), (*range(128), 310)
    of_few = ((310, 1, packed, 128), (310, 1, two_blocks, 128))
    indices, gates = _triton("chunk_indices"), _triton("gates")
    of_rows = ((200, 3, None, 0), (50, 1, None, 0))
    blocks = [1024] * 5 + [2]  # the last sequence in the first block, or in a later one
    calls = (*of_rows, *of_few, (310, 1, packed, 0), (310, 1, packed, 0))
    for (time, rows, bounds, few), block in zip(calls, blocks, strict=True):
        indices.FEW_SEQUENCES, indices.BOUNDS_BLOCK = few, tl.constexpr(block)
        x, g = torch.zeros(rows, time, 1, 16), at_the_edge(torch.zeros(rows, time, 1))
        cu_seqlens = None if bounds is None else at_the_edge(torch.tensor(bounds), front=True)
        bound = Kernels((x, x, x, g, g, None, cu_seqlens))
        memory = bound.memory(**indices.index_regions(bound.shape, segments=True), **gates.gate_region(bound.shape))
        gates.bind_gates(bound.setup, bound.shape, (True,), raises=False)(memory, cu_seqlens, g, g)
        begins = [row * time for row in range(rows + 1)] if bounds is None else list(bounds)
        if memory["sequence_begins"].tolist() != begins:
            return True
        for size, name in ((packing.CHUNK, "chunk"), (packing.SEGMENT, "segment")):
            first, lying = [0], []
            for number, (begin, end) in enumerate(pairwise(begins)):
                spans = range(begin, end, size)
                lying += [[token, min(size, end - token), number, index] for index, token in enumerate(spans)]
                first.append(len(lying))
            written = memory[f"{name}_indices"].view(-1, 4).tolist()
            if memory[f"first_{name}s"].tolist() != first or written[: len(lying)] != lying:
                return True
            if any(index[1] for index in written[len(lying) :]):
                return True
    indices.FEW_SEQUENCES, indices.BOUNDS_BLOCK = 255, tl.constexpr(1024)
    return False


def wrong_bounds() -> bool:
    """Whether sequences, and their first chunks, do not begin where they do, or more is written than they are."""
    indices, begins = _triton("chunk_indices"), (0, 200, 330, 600)
    x, g, cu_seqlens = torch.zeros(1, 600, 1, 16), torch.zeros(1, 600, 1), torch.tensor(begins)
    bound = Kernels((x, x, x, g, g, None, cu_seqlens))
    memory = bound.memory(**indices.index_regions(bound.shape, segments=False))
    bounds = {name: at_the_edge(memory[name]) for name in ("sequence_begins", "first_chunks")}
    launch = indices.bind_bounds(bound.setup, bound.shape, packing.CHUNK, raises=False)
    launch(bounds, cu_seqlens, bounds["first_chunks"])
    return bounds["sequence_begins"].tolist() != list(begins) or bounds["first_chunks"].tolist() != [0, 4, 7, 12]


def wrong_clearing() -> bool:
    """Whether anything but the tokens of no sequence becomes zero."""
    chunks = Chunks(torch.float32, 100, None, 1)
    out = at_the_edge(torch.ones(1, 100, 2, 16))
    clear = _triton("chunk_indices").bind_clear(chunks.setup, chunks.shape, torch.float32)
    clear({"sequence_begins": torch.tensor([3, 90], dtype=torch.int32)}, out)
    right = torch.ones(1, 100, 2, 16)
    right[:, :3] = right[:, 90:] = 0
    return not torch.equal(out, right)


def wrong_clearing_of_states() -> bool:
    """Whether anything but the places of saved states that no sequence has becomes zero."""
    for bounds in ((0, 100, 300, 300, 700), (0, 0, 600, 700), (0, 130, 260, 390, 700), (0, 700)):
        chunks = Chunks(torch.float32, 700, bounds, 1)
        saved = torch.ones(packing.saved_states(700), 2, 16, 16)
        right = torch.zeros_like(saved)
        for begin, end in pairwise(bounds):
            first = begin // packing.SEGMENT
            right[first : first + max(0, -(-(end - begin) // packing.SEGMENT) - 1)] = 1
        edged = at_the_edge(saved)
        _triton("chunk_indices").bind_clear_saved(chunks.setup, chunks.shape)(chunks.memory, edged)
        if not torch.equal(edged, right):
            return True
    return False


def wrong_norms() -> bool:
    """Whether rows of unlike lengths, some of them tiny, or what divides them, are not what they should be."""
    source = torch.Generator().manual_seed(6)
    x = torch.randn(2, 9, 3, 24, generator=source)[..., ::2] * torch.rand(2, 9, 3, 1, generator=source) ** 20
    gates = torch.zeros(2, 9, 3)
    bound = Kernels((x, x, x, gates, gates, None, None))
    out, factors = torch.full((2 * 9 * 3 + 1, 16), torch.nan), torch.full((2 * 9 * 3 + 1,), torch.nan)
    normalize = _triton("normalize").bind_normalize(bound.setup, bound.shape, factors=True)
    normalize({"copy_of_q": out, "q_factors": factors}, "q", token_rows(x, out[:-1]))
    factor = (x.double().square().sum(-1) + EPSILON).rsqrt()
    right = torch.zeros(2, 9, 3, 16, dtype=torch.float64)
    right[..., :12] = x.double() * factor[..., None]
    if not (out[-1].isnan().all() and factors[-1].isnan()):
        return True
    return any(_far(got[:-1], exact.flatten(0, 2), torch.float32) for got, exact in ((out, right), (factors, factor)))


def wrong_gates() -> bool:
    """Whether G and e^G, with its sign, are not those of sums that float32 rounds, of resets, of what is just none, and
    of NaN."""
    least = -104.0
    below = float(torch.nextafter(torch.tensor(least), torch.tensor(-torch.inf)))
    finite = torch.tensor([-60.0, -1.7e-6, least, -0.5, below, -0.125, -torch.inf, -0.25])
    lost = torch.tensor([-1.0, torch.nan, -1.0, -torch.inf, -1.0, -1.0, -1.0, -1.0])
    g, x = torch.stack((finite, lost), -1)[None], torch.zeros(1, 8, 2, 16)
    bound, gates = Kernels((x, x, x, g, g, None, None)), _triton("gates")
    indices = _triton("chunk_indices").index_regions(bound.shape, segments=True)
    memory = bound.memory(**indices, **gates.gate_region(bound.shape))
    gates.bind_gates(bound.setup, bound.shape, (True,), raises=True)(memory, None, g, g)
    high, low, _, from_start, _ = memory["gates"].view(2, 5, 64)[0, :, :8]
    G = finite.double().clamp_min(least).cumsum(0)
    # Two parts of float32 have 48 bits, 4e-15, and some for their sums; one alone has 24 of them, 6e-8.
    if not torch.allclose(high.double() + low.double(), G, rtol=1e-12, atol=0):
        return True
    # An exponential of float32, its argument in two parts, is a few units of 6e-8 off.
    if not torch.allclose(from_start, G.exp().float(), rtol=5e-7, atol=0):
        return True
    if from_start.signbit().tolist() != [False] * 4 + [True, False, True, False]:
        return True
    high, _, _, from_start, _ = memory["gates"].view(2, 5, 64)[1, :, :8]
    return high.isnan().tolist() != [False] + [True] * 7 or not from_start[1:].isnan().all()


def wrong_fault() -> bool:
    """Whether a positive g is reported at another place, or as another number, than plain PyTorch reports it."""
    inputs = tokens((2, 70, 1, 3, 16, 16))(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(7))
    inputs[3][1, 67, 2] = 5.0
    forward, messages = adjoint.gated_delta_rule.__globals__["_rule"].forward, []
    for plan in (_KERNELS, Preference(plan="eager.chunked").text):
        try:
            forward.launch((*inputs, 0.5, False, True, False, True), plan)
        except adjoint.ArgumentError as error:
            messages.append(str(error))
    return len(messages) != 2 or messages[0] != messages[1]


WRONG_BOUNDS = (
    ((0, 9, 7, 25), 2),
    ((3, 9, 25), 0),
    ((0, 9, 20), 2),
    ((0, 30, 25), 1),
    ((0, 5, -1, 25), 2),
    ((0, 9, 20, 21, 7, 25), 4),
)
"""Of 25 tokens, and the first place where each is wrong."""


def wrong_reports_of_bounds() -> bool:
    """Whether bounds that are wrong are not reported, the first of them where it is."""
    inputs = tokens((1, 25, 1, 2, 16, 16), state=False)(torch.float32, torch.device("cpu"), torch.Generator())
    for bounds, place in WRONG_BOUNDS:
        try:
            adjoint.gated_delta_rule(
                *inputs[:5], cu_seqlens=torch.tensor(bounds), preference=Preference(plan="triton.chunked")
            )
        except adjoint.ArgumentError as error:
            if f"got {bounds[place]} at position {place} " not in str(error):
                return True
        else:
            return True
    return False


def wrong_reach() -> bool:
    """Whether what is no number in one head reaches another, where keys do not fill a block and segments follow."""
    inputs = tokens((1, 400, 1, 2, 36, 16), decay=0.05)(torch.float32, torch.device("cpu"), torch.Generator())
    forward = adjoint.gated_delta_rule.__globals__["_rule"].forward
    outputs = []
    for number in (0.5, torch.nan):
        inputs[4][0, 10, 1] = number
        outputs.append(forward.launch((*inputs, 0.5, False, True, False, True), _KERNELS)[0][:, :, 0])
    return not same_bits(*outputs)


def noticed() -> bool:
    """Whether any call does not give what it should."""
    with small():
        try:
            return (
                wrong_indices()
                or wrong_bounds()
                or wrong_clearing()
                or wrong_clearing_of_states()
                or wrong_norms()
                or wrong_fault()
                or wrong_reports_of_bounds()
                or wrong_gates()
                or wrong_matrices()
                or any(call.wrong_result() for call in CALLS)
                or wrong_scans()
                or wrong_reach()
            )
        except Exception:
            return True
