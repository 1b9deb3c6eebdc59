"""What the products for Hopper share: stages in shared memory, the products of a tile, and rows in memory.

A program has three warpgroups and stays on its multiprocessor for as long as there are tiles. One warpgroup copies: a
matrix by TMA, rows that lie apart 16 bytes a thread. The other two multiply, 64 rows of a tile each, by the same 256
columns. A stage has 64 terms of a tile's sums, of 2 × 64 rows on the left and 256 columns on the right: 48 KiB. Four of
them are 192 of the 227 KiB that a program may have; the rest is room for results on their way to memory.

    a stage         2·128·256·64 = 4.2 MFLOP: 1024 cycles at the most, at 670 TFLOP/s on 132 multiprocessors 0.83 µs
    its bytes       48 KiB: 7.7 TB/s from the L2 cache at that rate; of 64 rows alone 40 KiB for half the work
    shared memory   80 KiB of operands read, 48 written: 128 bytes in each of 1024 cycles, which is all that there is
    registers       64·256 sums a warpgroup: 128 a thread, of 216 to 232

After the terms of a tile may come a stage that is lent to results: they lie there, and in 16 KiB besides, until TMA has
copied them to memory, while the products of the next tile are under way.

So 128 × 256 is the tile: with fewer columns shared memory would be the limit, and more sums have no registers. A tile
of at most 64 rows (the last of an expert, or its only one) is multiplied by one warpgroup; the other lets stages go.

Bits. The terms of every sum are added in their order, 16 at a time, by one warpgroup, whatever tile the row is in: they
depend neither on the number of programs, nor on other rows. Every number has one writer.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from adjoint.core.kernels import Budget, Tiled
from adjoint.device.gluon import TILE, bundle, product_layout, rounded_to, row_layout, thread_barrier

HALF = gl.constexpr(64)
"""Rows of a tile that one warpgroup multiplies."""

ROWS = gl.constexpr(128)
"""Rows of a tile."""

COLUMNS = gl.constexpr(256)
"""Columns of a tile."""

DEPTH = gl.constexpr(64)
"""Terms of the sums that a stage has."""

LAG = gl.constexpr(2)
"""Stages whose copies by threads are under way, besides the one that was begun last. There are two stages more than
that, or all would wait: a warpgroup lets a stage go when it has begun with the next."""

BUDGET = Budget(registers=255, shared_bytes=227 * 1024)
"""All registers that a thread can have, and all shared memory that a program can."""

LEFT_BYTES = gl.constexpr(HALF.value * DEPTH.value * 2)
RIGHT_BYTES = gl.constexpr(COLUMNS.value * DEPTH.value * 2)

RESULT_TILE = Tiled.of("element", HALF.value, HALF.value)

RESULT_PARTS = gl.constexpr(COLUMNS.value // HALF.value)
"""Parts of a warpgroup's results that are copied to memory one by one."""


# ------------------------------------------------------------------------------------------------- stages


@bundle
class Stages:
    """The operands in shared memory, and barriers: a stage is there (full), or was read by both warpgroups (empty)."""

    lefts: gl.shared_memory_descriptor
    rights: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def allocate(kind: gl.constexpr, STAGES: gl.constexpr, LEFT_BY_TERM: gl.constexpr, RIGHT_BY_TERM: gl.constexpr):
        """BY_TERM, an operand has a line for each term of the sums; else the terms lie along its lines.

        A stage is full after two arrivals: of the copies by TMA, with their bytes, and of those by threads.
        """
        lefts = gl.allocate_shared_memory(kind, [2 * STAGES, DEPTH, HALF], TILE)
        if not LEFT_BY_TERM:
            lefts = lefts._reinterpret(kind, [2 * STAGES, HALF, DEPTH], TILE)
        rights = gl.allocate_shared_memory(kind, [STAGES, COLUMNS, DEPTH], TILE)
        if RIGHT_BY_TERM:
            rights = rights._reinterpret(kind, [STAGES, DEPTH, COLUMNS], TILE)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(full.index(stage), count=2)
            mbarrier.init(empty.index(stage), count=2)
        return Stages(lefts, rights, full, empty)

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
        """The stage before a stage."""
        return gl.where(stage == 0, self.full.shape[0] - 1, stage - 1)

    @gluon.jit
    def pairs(self):
        """Room for four matrices of 64 × 64 in the right operand of each stage."""
        return self.rights._reinterpret(self.rights.dtype, [4 * self.full.shape[0], HALF, DEPTH], TILE)

    @gluon.jit
    def fill(self, stage):
        """What threads copied is there. The fence that products need before they read it is here, to delay none."""
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(self.full.index(stage))

    @gluon.jit
    def release(self, stage, is_read):
        """A warpgroup has read a stage, if it is so."""
        thread_barrier()
        mbarrier.arrive(self.empty.index(stage), pred=is_read)


@gluon.jit
def multiply(
    stages, HALF_NUMBER: gl.constexpr, stage, phase, steps, LEFT_BY_TERM: gl.constexpr, RIGHT_BY_TERM: gl.constexpr,
    lent=None,
):  # fmt: skip
    """The sums of 64 rows of a tile, and the stage and phase after it. One product is under way beside the waits.

    Where the stage before may have been `lent` for results, it is let go when TMA has copied them from there.
    """
    total = gl.zeros([HALF, COLUMNS], gl.float32, product_layout(COLUMNS))
    for step in range(steps):
        mbarrier.wait(stages.full.index(stage), phase)
        left = stages.lefts.index(stage * 2 + HALF_NUMBER)
        right = stages.rights.index(stage)
        if LEFT_BY_TERM:
            left = left.permute((1, 0))
        if not RIGHT_BY_TERM:
            right = right.permute((1, 0))
        total = warpgroup_mma(left, right, total, is_async=True)
        total = warpgroup_mma_wait(1, deps=[total])
        if lent is None:
            stages.release(stages.before(stage), step > 0)
        else:
            tma.store_wait(0)
            stages.release(stages.before(stage), (step > 0) | lent)
        stage, phase = stages.after(stage, phase)
    total = warpgroup_mma_wait(0, deps=[total])
    if lent is None:
        stages.release(stages.before(stage), steps > 0)
    else:
        tma.store_wait(0)
        stages.release(stages.before(stage), (steps > 0) | lent)
    return total, stage, phase


@gluon.jit
def pass_by(stages, stage, phase, steps):
    """Lets the stages of a tile go that has no rows for this warpgroup."""
    for _ in range(steps):
        mbarrier.wait(stages.full.index(stage), phase)
        stages.release(stage, True)
        stage, phase = stages.after(stage, phase)
    return stage, phase


# --------------------------------------------------------------------------------------------------- tiles


@bundle
class Tiles:
    """Tiles of rows, each of one expert, in the order of their rows, and how many there are."""

    expert: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    count: gl.tensor

    @gluon.jit
    def place(self, number, column_tiles, GROUP: gl.constexpr):
        """The tile of rows and the tile of columns of a number: GROUP tiles of rows share columns that are in cache."""
        group = number // (GROUP * column_tiles)
        within = number % (GROUP * column_tiles)
        height = gl.minimum(self.count - group * GROUP, GROUP)
        return group * GROUP + within % height, within // height

    @gluon.jit
    def rows(self, number, column_tiles, GROUP: gl.constexpr):
        """Where the rows of a number's tile begin and end, and its tile of columns; of the last where there is none."""
        tile, column_tile = self.place(gl.minimum(number, self.count * column_tiles - 1), column_tiles, GROUP)
        return gl.load(self.begin + tile), gl.load(self.end + tile), column_tile


# ---------------------------------------------------------------------------------------------------- rows


@gluon.jit
def halves(x):
    """The left and the right half of the columns of sums, in the layout of sums."""
    LAYOUT: gl.constexpr = product_layout(x.shape[1] // 2)
    left, right = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
    return gl.convert_layout(left, LAYOUT), gl.convert_layout(right, LAYOUT)


@gluon.jit
def quarters(x):
    """The quarters of the columns of sums."""
    left, right = halves(x)
    return halves(left) + halves(right)


@gluon.jit
def store_rows(out, x, rows, columns, STRIDE: gl.constexpr, LATE: gl.constexpr = False):
    """Stores rows that were rounded, STRIDE apart: the first `rows`, and of each the first `columns`.

    LATE, places are computed here, instead of staying in registers through the products.
    """
    LAYOUT: gl.constexpr = row_layout(x.shape[1])
    row = gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    if LATE:
        row += gl.minimum(rows - 1, 0)  # 0, which is known where there are rows alone
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    # 64 bits throughout, so that what is constant in an address becomes part of the instruction.
    place = (row.to(gl.int64) * STRIDE)[:, None] + column.to(gl.int64)[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    gl.store(out + place, gl.convert_layout(x, LAYOUT), mask=mask)


# ------------------------------------------------------------------------------------------------- results


@gluon.jit
def allocate_rest(kind: gl.constexpr):
    """Room for the last part of both warpgroups' results: a stage has room for the others."""
    return gl.allocate_shared_memory(kind, [2, HALF, HALF], TILE)


@gluon.jit
def result_room(stages, rest, stage, HALF_NUMBER: gl.constexpr, PART: gl.constexpr):
    """Where a part of a warpgroup's results lies: in a stage that is lent, or besides."""
    if PART < 2:
        room = stages.pairs().index(stage * 4 + 2 * HALF_NUMBER + PART)
    elif PART == 2:
        room = stages.lefts.index(stage * 2 + HALF_NUMBER)
    else:
        room = rest.index(HALF_NUMBER)
    return room


@gluon.jit
def write_results(total, stages, rest, stage, HALF_NUMBER: gl.constexpr, TURNED: gl.constexpr):
    """Rounds the sums of 64 rows into a stage that is lent, 64 columns a part; TURNED, columns become lines."""
    parts = quarters(total)
    for part in gl.static_range(RESULT_PARTS):
        room = result_room(stages, rest, stage, HALF_NUMBER, part)
        rounded = rounded_to(parts[part], room.dtype)
        if TURNED:
            room.permute((1, 0)).store(rounded)
        else:
            room.store(rounded)
    fence_async_shared()
    thread_barrier()


# --------------------------------------------------------------------------------------------------- gates


@gluon.jit
def _exponential_2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def silu_product(g, u):
    """silu(g)·u on half exponentials, as the activations compute it: with d = e^(min(g, 0)/2), (g·r·d)·(u·d)."""
    h = _exponential_2(gl.abs(g) * -0.7213475204444817)
    positive = g >= 0
    value = gl.where(positive, g, gl.maximum(g, -2048.0) * h) * _reciprocal(1.0 + h * h)
    return value * (u * gl.where(positive, 1.0, h))


@gluon.jit
def silu_parts(x):
    """silu(x)/d, silu'(x)/d² and d, where d = e^(min(x, 0)/2), as the activations compute them.

    Bounding x keeps infinities from meeting zeros; it drops a NaN, which h brings back.
    """
    h = _exponential_2(gl.abs(x) * -0.7213475204444817)
    bounded = gl.minimum(gl.maximum(x, -2048.0), 2048.0)
    z = h * h
    r = _reciprocal(1.0 + z)
    positive = x >= 0
    value = gl.where(positive, x, bounded * h) * r
    slope = gl.fma(bounded * gl.where(positive, z, 1.0), r, 1.0) * r
    return value, slope, gl.where(positive, 1.0, h)


# -------------------------------------------------------------------------------------------------- copies


@gluon.jit
def token_lines(base, tokens, first_row, end, STRIDE: gl.constexpr):
    """The addresses of 64 terms of 64 rows, which are read by token, and which of the rows are there."""
    LAYOUT: gl.constexpr = row_layout(DEPTH)
    row = first_row + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, DEPTH, gl.SliceLayout(0, LAYOUT))
    inside = row < end
    token = gl.load(tokens + row, mask=inside, other=0)
    lines = base + token.to(gl.int64)[:, None] * STRIDE + column[None, :]
    return lines, inside[:, None] & (column < DEPTH)[None, :]


@gluon.jit
def fill_late(stages, copied, filled):
    """Fills the stage whose copies were begun LAG stages ago, if there is one; gives the next stage to fill."""
    async_copy.commit_group()
    async_copy.wait_group(LAG)
    if copied >= LAG:
        stages.fill(filled)
        filled += 1
        if filled == stages.full.shape[0]:
            filled = 0
    return filled


@gluon.jit
def fill_rest(stages, copied, filled):
    """Fills the stages whose copies were begun last."""
    async_copy.wait_group(0)
    for _ in range(gl.minimum(copied, LAG)):
        stages.fill(filled)
        filled += 1
        if filled == stages.full.shape[0]:
            filled = 0
