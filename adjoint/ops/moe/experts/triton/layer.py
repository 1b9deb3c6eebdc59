"""Both directions of the expert layer.

forward    lay out the rows  →  up  →  [product with down, sum of slots] for some columns at a time
backward   hidden gradients  →  outer (ddown)  →  [product with gate_up, sum of slots] …  →  outer (dgate_up)
"""

from typing import Any

from torch import Tensor

from adjoint.core.errors import check
from adjoint.core.launch import Execute, Setup, is_aligned
from adjoint.ops.moe.experts.plans import EDGE, INDEX_OUT_OF_RANGE, NEED_DOWN, NEED_GATE_UP, NEED_X
from adjoint.ops.moe.experts.triton.hidden_gradients import HiddenGradients
from adjoint.ops.moe.experts.triton.products import bind_outer, moe_experts_up
from adjoint.ops.moe.experts.triton.tiles import RowTiles, bind_over_rows
from adjoint.ops.moe.experts.triton.token_sums import TokenSums
from adjoint.ops.moe.layout import Layout
from adjoint.ops.moe.layout.kernels import LayoutSort


def _settle_common(setup: Setup) -> None:
    """Adds room for the arguments that are copied first, and the edge of tiles as a parameter if it changes bits."""
    tokens, hidden, experts, inner, slots = setup.problem.sizes
    element, second = setup.problem.dtypes[:2]
    setup.copies(
        x=(element, tokens * hidden), dy=(element, tokens * hidden), indices=(second, tokens * slots),
        gate_up=(element, experts * 2 * inner * hidden), down=(element, experts * hidden * inner),
        gu=(element, tokens * slots * 2 * inner),
    )  # fmt: skip
    if element in EDGE and not setup.interpreted:
        setup.add_numeric(edge=EDGE[element])


def forward(setup: Setup) -> Execute:
    """Computes y, and for the backward g and u of each row and the layout."""
    tokens, hidden, experts, inner, slots = setup.problem.sizes
    element, index, _ = setup.problem.dtypes
    (keep,) = setup.problem.options
    sort = LayoutSort(setup, index, tokens * slots, experts, INDEX_OUT_OF_RANGE)
    ups = bind_over_rows(setup, moe_experts_up, "up", inner, D=hidden, INNER=inner, KEEP=bool(keep))
    sums = TokenSums(setup, "down", terms=inner, by_column=True, weighted=True)
    row_tiles = RowTiles(setup, False, ups, sums.products)
    setup.scratch(h=(element, tokens * slots * inner), rows=(element, tokens * slots * sums.width))
    _settle_common(setup)
    on_cpu = setup.device.type == "cpu"

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        x, gate_up, down, indices, weights, _ = arguments
        y, gu, *rest = outputs
        layout, memory = Layout(*rest), setup.memory(workspace)
        aligned = is_aligned(x, gate_up, down, y, gu if keep else None)
        x, gate_up = memory.contiguous("x", x), memory.contiguous("gate_up", gate_up)
        down, indices = memory.contiguous("down", down), memory.contiguous("indices", indices)
        sort.write(memory, indices, layout)
        if on_cpu:
            check()
        row_tokens = row_tiles.find_tokens(memory, layout.permutation, weights)
        up, height = ups[aligned], sums.products[aligned].tile.rows
        tiles = row_tiles.cut(memory, 0, up.tile.rows, layout.offsets)
        up.launch(
            x=x, gate_up=gate_up, tokens=row_tokens, tile_expert=tiles.expert, tile_begin=tiles.begin,
            tile_end=tiles.end, gu=gu, h=memory["h"],
        )  # fmt: skip
        if height != up.tile.rows:
            tiles = row_tiles.cut(memory, 1, height, layout.offsets)
        sums.launch(aligned, memory["h"], down, tiles, memory["rows"], weights, layout, y)

    return execute


def backward(setup: Setup) -> Execute:
    """Computes the gradients that are needed."""
    tokens, hidden, _, inner, slots = setup.problem.sizes
    element = setup.problem.dtypes[0]
    (need,) = setup.problem.options
    gradients = HiddenGradients(setup)
    products, width = [gradients.products], 0
    if need & NEED_DOWN:
        to_down = bind_outer(setup, hidden, inner, left_by_token=True)
    if need & NEED_X:
        sums = TokenSums(setup, "dx", terms=2 * inner, by_column=False, weighted=False)
        products, width = [*products, sums.products], sums.width
    if need & NEED_GATE_UP:
        to_gate_up = bind_outer(setup, 2 * inner, hidden, left_by_token=False)
    row_tiles = RowTiles(setup, True, *products)
    # This has w·h, and later columns of dx for each row, which are computed when w·h is no longer needed.
    setup.scratch(shared=(element, tokens * slots * max(inner if need & NEED_DOWN else 0, width)))
    _settle_common(setup)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dy, x, gate_up, down, weights, gu, *rest, _ = arguments
        dx, dgate_up, ddown, dweights = outputs
        layout, memory = Layout(*rest), setup.memory(workspace)
        aligned = is_aligned(dy, x, gate_up, down, gu, dx, dgate_up, ddown)
        dy, x, gu = memory.contiguous("dy", dy), memory.contiguous("x", x), memory.contiguous("gu", gu)
        gate_up, down = memory.contiguous("gate_up", gate_up), memory.contiguous("down", down)
        row_tokens = row_tiles.find_tokens(memory, layout.permutation, weights)
        height = gradients.products[aligned].tile.rows
        tiles = row_tiles.cut(memory, 0, height, layout.offsets)
        shared = memory.get("shared", row_tokens)
        gradients.launch(aligned, memory, dy, down, gu, layout, tiles, shared, dweights)
        if need & NEED_DOWN:
            to_down[aligned].launch(left=dy, right=shared, tokens=row_tokens, offsets=layout.offsets, out=ddown)
        if need & NEED_X:
            if sums.products[aligned].tile.rows != height:
                tiles = row_tiles.cut(memory, 1, sums.products[aligned].tile.rows, layout.offsets)
            sums.launch(aligned, memory["dgu"], gate_up, tiles, shared, weights, layout, dx)
        if need & NEED_GATE_UP:
            to_gate_up[aligned].launch(
                left=memory["dgu"], right=x, tokens=row_tokens, offsets=layout.offsets, out=dgate_up
            )

    return execute
