"""Both directions of the expert layer on kernels for Hopper.

forward    lay out the rows  →  up  →  [product with down, sum of slots] for some columns at a time
backward   hidden gradients  →  outer (ddown)  →  [product with gate_up, sum of slots] …  →  outer (dgate_up)
"""

from typing import Any

import torch
from torch import Tensor

from adjoint.core.errors import check
from adjoint.core.launch import Execute, Setup, is_aligned
from adjoint.core.workspace import Memory
from adjoint.ops.moe.experts.hopper.device import COLUMNS, DEPTH
from adjoint.ops.moe.experts.hopper.hidden_gradients import moe_experts_down_adjoint_hopper
from adjoint.ops.moe.experts.hopper.outer import moe_experts_outer_hopper
from adjoint.ops.moe.experts.hopper.product import moe_experts_product_hopper
from adjoint.ops.moe.experts.hopper.tiles import TILE_ROWS, Persistent, Rows, RowTiles
from adjoint.ops.moe.experts.hopper.up import GATE, moe_experts_up_hopper
from adjoint.ops.moe.experts.plans import INDEX_OUT_OF_RANGE, NEED_DOWN, NEED_GATE_UP, NEED_WEIGHTS, NEED_X
from adjoint.ops.moe.experts.triton.hidden_gradients import PartialSums
from adjoint.ops.moe.experts.triton.token_sums import SlotSums
from adjoint.ops.moe.layout import Layout
from adjoint.ops.moe.layout.kernels import LayoutSort


def _divide(columns: int, tile: int) -> int:
    return -(-columns // tile)


def _settle_common(setup: Setup) -> None:
    """Adds room for the arguments that are copied first, and the parameters that change bits."""
    tokens, hidden, experts, inner, slots = setup.problem.sizes
    element, second = setup.problem.dtypes[:2]
    setup.copies(
        x=(element, tokens * hidden), dy=(element, tokens * hidden), indices=(second, tokens * slots),
        gate_up=(element, experts * 2 * inner * hidden), down=(element, experts * hidden * inner),
        gu=(element, tokens * slots * 2 * inner),
    )  # fmt: skip
    setup.add_numeric(depth=DEPTH.value)


def _at_16_bytes(memory: Memory, name: str, tensor: Tensor) -> Tensor:
    """The tensor or a copy of it, contiguous and at a multiple of 16 bytes, as TMA and wide copies need."""
    tensor = memory.contiguous(name, tensor)
    return tensor if is_aligned(tensor) else tensor.clone()


def _room(output: Tensor) -> Tensor:
    """The output, or memory at a multiple of 16 bytes from which it must be copied."""
    return output if is_aligned(output) else torch.empty_like(output)


def _launch_width(setup: Setup) -> int:
    """The number of columns of rows that are in memory at once.

    It is at least that of the schedule, and at least I, for which the backward uses the same memory before. Launches
    have whole tiles of columns, and all launches the same number of tiles if possible.
    """
    _, hidden, _, inner, _ = setup.problem.sizes
    tiles, most = (_divide(columns, COLUMNS.value) for columns in (hidden, max(setup.schedule["chunk"], inner)))
    return min(hidden, _divide(tiles, _divide(tiles, most)) * COLUMNS.value)


class _TokenSums:
    """A product over rows that is summed into tokens, some columns at a time. The arguments are those of the kernel."""

    def __init__(self, setup: Setup, rows: Rows, terms: int, by_column: bool, weighted: bool) -> None:
        hidden = setup.problem.sizes[1]
        self.width = width = _launch_width(setup)
        self._sums = SlotSums(setup, weighted, width)
        self._product = Persistent(
            setup, moe_experts_product_hopper, rows.most_tiles * _divide(width, COLUMNS.value), K=terms, N=hidden,
            WIDTH=width, BY_COLUMN=by_column, WEIGHT_LINES=COLUMNS.value if by_column else DEPTH.value,
            WEIGHT_WIDTH=DEPTH.value if by_column else COLUMNS.value, GROUP=setup.schedule["group"],
        )  # fmt: skip

    def launch(
        self,
        rows: Tensor,
        weight: Tensor,
        tiles: RowTiles,
        scratch: Tensor,
        weights: Tensor,
        layout: Layout,
        out: Tensor,
    ) -> None:
        scratch = scratch[: len(rows) * self.width].view(-1, self.width)
        for chunk in range(self._sums.chunks):
            self._product.launch(
                rows=rows, weight=weight.flatten(0, 1), out=scratch, out_tiles=scratch, chunk=chunk, **tiles._asdict()
            )
            self._sums.launch(is_aligned(out), chunk, scratch, weights, layout, out)


class _Outer:
    """For each expert, the product of D columns that are read by token with columns of rows; or its transpose."""

    def __init__(self, setup: Setup, columns: int, turned: bool) -> None:
        hidden, self._experts = setup.problem.sizes[1:3]
        tiles = self._experts * _divide(hidden, TILE_ROWS) * _divide(columns, COLUMNS.value)
        self._product = Persistent(setup, moe_experts_outer_hopper, tiles, M=hidden, N=columns, TURNED=turned)

    def launch(self, by_token: Tensor, rows: Tensor, tokens: Any, layout: Layout, out: Tensor) -> None:
        target = _room(out)
        self._product.launch(
            by_token=by_token, rows=rows, row_tiles=rows, tokens=tokens, offsets=layout.offsets,
            out=target.flatten(0, 1), experts=self._experts,
        )  # fmt: skip
        if target is not out:
            out.copy_(target)


def forward(setup: Setup) -> Execute:
    """Computes y, and for the backward g and u of each row and the layout."""
    tokens, hidden, experts, inner, slots = setup.problem.sizes
    element, index, _ = setup.problem.dtypes
    (keep,) = setup.problem.options
    sort = LayoutSort(setup, index, tokens * slots, experts, INDEX_OUT_OF_RANGE)
    rows = Rows(setup, weighted=False)
    up = Persistent(
        setup, moe_experts_up_hopper, rows.most_tiles * _divide(inner, GATE.value), D=hidden, INNER=inner,
        KEEP=bool(keep), GROUP=setup.schedule["group"],
    )  # fmt: skip
    sums = _TokenSums(setup, rows, terms=inner, by_column=True, weighted=True)
    setup.scratch(h=(element, tokens * slots * inner), rows=(element, tokens * slots * sums.width))
    _settle_common(setup)
    on_cpu = setup.device.type == "cpu"

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        x, gate_up, down, indices, weights, _ = arguments
        y, gu, *rest = outputs
        layout, memory = Layout(*rest), setup.memory(workspace)
        x, gate_up, down = (
            _at_16_bytes(memory, name, tensor) for name, tensor in (("x", x), ("gate_up", gate_up), ("down", down))
        )
        sort.write(memory, memory.contiguous("indices", indices), layout)
        if on_cpu:
            check()
        tiles = rows.find(memory, layout.permutation, layout.offsets, weights)
        pairs = _room(gu) if keep else gu
        up.launch(
            x=x, gate_up=gate_up.flatten(0, 1), tokens=memory["tokens"], gu=pairs if keep else memory["h"],
            h=memory["h"], **tiles._asdict(),
        )  # fmt: skip
        if pairs is not gu:
            gu.copy_(pairs)
        hidden_rows = memory.tensor("h").view(-1, inner)
        sums.launch(hidden_rows, down, tiles, memory.tensor("rows"), weights, layout, y)

    return execute


def backward(setup: Setup) -> Execute:
    """Computes the gradients that are needed."""
    tokens, hidden, _, inner, slots = setup.problem.sizes
    element = setup.problem.dtypes[0]
    (need,) = setup.problem.options
    count, group, width = tokens * slots, setup.schedule["group"], 0
    needs_pairs = bool(need & (NEED_X | NEED_GATE_UP))
    rows = Rows(setup, weighted=True)
    to_hidden = Persistent(
        setup, moe_experts_down_adjoint_hopper, rows.most_tiles * _divide(inner, COLUMNS.value), D=hidden, INNER=inner,
        HIDDEN=needs_pairs, SCALED=bool(need & NEED_DOWN), WEIGHTS=bool(need & NEED_WEIGHTS), GROUP=group,
    )  # fmt: skip
    if need & NEED_WEIGHTS:
        setup.add_numeric(hidden_columns=COLUMNS.value)
        partial_sums = PartialSums(setup, COLUMNS.value)
    if need & NEED_DOWN:
        to_down = _Outer(setup, inner, turned=False)
    if need & NEED_X:
        sums = _TokenSums(setup, rows, terms=2 * inner, by_column=False, weighted=False)
        width = sums.width
    if need & NEED_GATE_UP:
        to_gate_up = _Outer(setup, 2 * inner, turned=True)
    if needs_pairs:
        setup.scratch(dgu=(element, count * 2 * inner))
    # This has w·h, and later columns of dx for each row, which are computed when w·h is no longer needed.
    setup.scratch(shared=(element, count * max(inner if need & NEED_DOWN else 0, width)))
    _settle_common(setup)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dy, x, gate_up, down, weights, gu, *rest, _ = arguments
        dx, dgate_up, ddown, dweights = outputs
        layout, memory = Layout(*rest), setup.memory(workspace)
        named = ("dy", dy), ("x", x), ("gate_up", gate_up), ("down", down), ("gu", gu)
        dy, x, gate_up, down, gu = (_at_16_bytes(memory, name, tensor) for name, tensor in named)
        tiles = rows.find(memory, layout.permutation, layout.offsets, weights)
        row_tokens, absent = memory["tokens"], memory["tokens"]  # `absent` is a pointer that nobody reads
        to_hidden.launch(
            dy=dy, down=down.flatten(0, 1), gu=gu, tokens=row_tokens, row_weights=memory["row_weights"],
            dgu=memory.get("dgu", absent), scaled=memory.get("shared", absent),
            partials=memory.get("partials", absent), count=count, **tiles._asdict(),
        )  # fmt: skip
        if need & NEED_WEIGHTS:
            partial_sums.launch(memory, layout, dweights)
        if need & NEED_DOWN:
            scaled = memory.tensor("shared")[: count * inner].view(count, inner)
            to_down.launch(dy, scaled, row_tokens, layout, ddown)
        pairs = memory.tensor("dgu").view(count, 2 * inner) if needs_pairs else dy
        if need & NEED_X:
            sums.launch(pairs, gate_up, tiles, memory.tensor("shared"), weights, layout, dx)
        if need & NEED_GATE_UP:
            to_gate_up.launch(x, pairs, row_tokens, layout, dgate_up)

    return execute
