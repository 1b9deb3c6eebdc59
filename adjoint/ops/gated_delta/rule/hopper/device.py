"""What the kernels for Hopper share: layouts, copies into shared memory, barriers, and the binding of variants.

One warpgroup copies, 16 bytes a thread, while others compute. ptxas begins another block of instructions wherever a
function was inlined, which can cost registers: that is why some code is written out that a function here has.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from adjoint.core.kernels import Budget, Kernel
from adjoint.core.launch import Launch, Setup
from adjoint.device.gluon import (  # noqa: F401  (kernels take what several ops share from here, too)
    TILE,
    bundle,
    fields,
    product_layout,
    rest_of,
    rounded_to,
    row_layout,
    thread_barrier,
)
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows
from adjoint.ops.gated_delta.rule.triton.gates import GATE_FROM_START, GATE_STRENGTH, GATE_TO_END

CHUNK = gl.constexpr(packing.CHUNK)

V_BLOCK = gl.constexpr(64)
"""Columns of V that one warpgroup scans."""

GATE_SUM = gl.constexpr(0)
"""The row of G in a chunk's gates; the others' names are in `gates.py`."""

BUDGET = Budget(registers=255, shared_bytes=227 * 1024)
"""All registers that a thread can have, and all shared memory that a program can."""

# ---------------------------------------------------------------------------------------------- layouts

LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""A row of numbers in shared memory."""


# ------------------------------------------------------------------------------------------------ copies


@bundle
class Rows:
    """Rows of a matrix in memory, STRIDE apart, as threads copy them."""

    row: gl.tensor
    column: gl.tensor
    offset: gl.tensor
    STRIDE: gl.constexpr

    @gluon.jit
    def of(ROWS: gl.constexpr, COLUMNS: gl.constexpr, STRIDE: gl.constexpr):
        """64 bits throughout, so that what is constant in an address becomes part of the instruction."""
        LAYOUT: gl.constexpr = row_layout(COLUMNS, gl.num_warps())
        row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
        return Rows(row, column, (row.to(gl.int64) * STRIDE)[:, None] + column.to(gl.int64)[None, :], STRIDE)

    @gluon.jit
    def at(self, base):
        """base + offset in two sums, of which a row's has one register: for addresses that are used once."""
        return base + (self.row.to(gl.int64) * self.STRIDE)[:, None] + self.column.to(gl.int64)[None, :]

    @gluon.jit
    def inside(self, count):
        """What is of the first `count` rows."""
        return (self.row < count)[:, None] & (self.column < self.column.shape[0])[None, :]

    @gluon.jit
    def fetch(self, tile, base):
        """Starts the copy of a matrix."""
        async_copy.async_copy_global_to_shared(tile, base + self.offset)

    @gluon.jit
    def fetch_tokens(self, tile, base, count):
        """Starts the copy of a chunk's tokens; rows past `count` are zeros."""
        inside = self.inside(count)
        async_copy.async_copy_global_to_shared(tile, base + self.offset, mask=inside)


@gluon.jit
def fetch_tokens(tile, base, STRIDE: gl.constexpr, count):
    """Starts the copy of a chunk's tokens, as a method of `Rows` does, with addresses that are used once."""
    rows = Rows.of(tile.shape[0], tile.shape[1], STRIDE)
    inside = rows.inside(count)
    async_copy.async_copy_global_to_shared(tile, rows.at(base), mask=inside)


@gluon.jit
def fetch_gates(lines, stage, gates, ROW: gl.constexpr):
    """Starts the copy of a row of a chunk's gates."""
    token = gl.arange(0, CHUNK, gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    async_copy.async_copy_global_to_shared(lines.index(stage), gates + ROW * CHUNK + token)


@bundle
class Gates:
    """β, e^G and e^{Γ−G} of chunks in shared memory, a stage each."""

    strengths: gl.shared_memory_descriptor
    starts: gl.shared_memory_descriptor
    ends: gl.shared_memory_descriptor

    @gluon.jit
    def allocate(STAGES: gl.constexpr):
        strengths = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)
        starts = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)
        ends = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)
        return Gates(strengths, starts, ends)

    @gluon.jit
    def fetch(self, stage, gates):
        """Starts the copy of a chunk's."""
        fetch_gates(self.strengths, stage, gates, GATE_STRENGTH)
        fetch_gates(self.starts, stage, gates, GATE_FROM_START)
        fetch_gates(self.ends, stage, gates, GATE_TO_END)


# ---------------------------------------------------------------------------------------------- barriers


@bundle
class Ring:
    """Barriers of the stages that chunks have in shared memory: a chunk is there (full), or has been read (empty)."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def allocate(STAGES: gl.constexpr, FILLS: gl.constexpr, READS: gl.constexpr):
        """Args: how many arrivals make a stage full, and empty."""
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(full.index(stage), count=FILLS)
            mbarrier.init(empty.index(stage), count=READS)
        return Ring(full, empty)

    @gluon.jit
    def fill(self, stage):
        """A chunk has been copied. The fence that products need before they read it is here, to delay none."""
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(self.full.index(stage))

    @gluon.jit
    def release(self, stage):
        """A chunk has been read."""
        thread_barrier()
        mbarrier.arrive(self.empty.index(stage))

    @gluon.jit
    def after(self, stage, phase):
        """The next stage and its phase."""
        stage += 1
        if stage == self.full.shape[0]:
            stage = 0
            phase ^= 1
        return stage, phase

    @gluon.jit
    def before(self, stage):
        """The stage before one."""
        return (stage + (self.full.shape[0] - 1)) % self.full.shape[0]


@bundle
class Handoff:
    """Barriers of what a warpgroup leaves in shared memory for another: it is there (staged), or was read (drained)."""

    staged: gl.shared_memory_descriptor
    drained: gl.shared_memory_descriptor

    @gluon.jit
    def allocate():
        staged = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        drained = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(staged, count=1)
        mbarrier.init(drained, count=1)
        return Handoff(staged, drained)

    @gluon.jit
    def put(self, tile, value, phase):
        """Writes a tile when what was there has been read."""
        mbarrier.wait(self.drained, phase)
        tile.store(value.to(tile.dtype))
        thread_barrier()
        mbarrier.arrive(self.staged)

    @gluon.jit
    def take(self, tile, phase):
        """Reads the rows of a tile when they are there."""
        mbarrier.wait(self.staged, phase)
        rows = tile.load(row_layout(tile.shape[1], gl.num_warps()))
        thread_barrier()
        mbarrier.arrive(self.drained)
        return rows


# ---------------------------------------------------------------------------------------------- products


@gluon.jit
def start_product(left, right, nothing):
    """left·right, which is to be waited for; `nothing` has the layout of its accumulators."""
    return warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)


@gluon.jit
def exp(x):
    """e^x as tl.exp computes it, but for results below 2^-126, which are 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=gl.float32, is_pure=True, pack=1
    )


# ---------------------------------------------------------------------------------------------- launches


class Part(NamedTuple):
    """Chunks of every sequence: the number of the first, and how many they are at most."""

    first: int
    chunks: int


WHOLE = Part(0, 2**25 - 1)
"""All of a sequence."""


class ByStrides:
    """The variants of a kernel, one for each choice of its tokens' strides: they are constants, and addresses cheap.

    The variant for contiguous tokens is bound at once, another when it is first launched.
    """

    def __init__(self, setup: Setup, shape: Shape, kernel: Kernel, tokens: str, **settings: Any) -> None:
        keys, values = (shape.key_heads * shape.K, shape.K), (shape.heads * shape.V, shape.V)
        settings |= {"element": shape.element, "GROUP": shape.group, "K": shape.K, "V": shape.V}
        self._setup, self._kernel, self._tokens, self._settings = setup, kernel, tokens.split(), settings
        contiguous = tuple(keys if name in ("Q", "K") else values for name in self._tokens)
        self._variants = {contiguous: self._bind(contiguous)}

    def _bind(self, strides: tuple[tuple[int, int], ...]) -> Launch:
        named = dict(zip(self._tokens, strides, strict=True))
        constants: dict[str, Any] = {f"{name}_STRIDE": token for name, (token, _) in named.items()}
        constants |= {f"{name}_HEAD": head for name, (_, head) in named.items()}
        return self._setup.kernel(self._kernel, **constants, **self._settings)

    def of(self, *tokens: TokenRows) -> Launch:
        """The variant for tokens, in the order of their names."""
        strides = tuple([x.strides for x in tokens])
        variant = self._variants.get(strides)
        if variant is None:
            variant = self._variants[strides] = self._bind(strides)
        return variant
