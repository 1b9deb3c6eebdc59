"""What `linear_cross_entropy` launches: blocks of rows of hidden, through products of the vendor or of our own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from adjoint.core.launch import Execute, Setup, is_aligned
from adjoint.core.layout import Rows
from adjoint.core.workspace import Memory
from adjoint.ops.loss.kernels import (
    RowGradients,
    RowLosses,
    RowResults,
    Targets,
    Total,
    Upstream,
    facts,
    upstream_kind,
)
from adjoint.ops.loss.linear_cross_entropy import kernels
from adjoint.ops.loss.linear_cross_entropy.kept import (
    NEED_BIAS,
    NEED_HIDDEN,
    NEED_WEIGHT,
    divides_later,
    needed_sums,
)
from adjoint.ops.loss.linear_cross_entropy.plans import SEGMENT, block_rows

SCALE_BLOCK = 1024
"""Tokens whose upstream gradients `loss_scale` compares at once."""


class Layer(NamedTuple):
    """What every block reads: the weight, the bias, and how many labels count."""

    weight: Tensor
    bias: Tensor | None
    number: Tensor


class Block(NamedTuple):
    """Rows of hidden, what belongs to each of them, and memory for their logits, or dx, at the same distance."""

    hidden: Tensor
    targets: Tensor
    slopes: Tensor
    results: RowResults
    upstream: Upstream
    scale: Tensor
    memory: Memory

    @property
    def rows(self) -> int:
        return len(self.hidden)

    def lines(self) -> Rows:
        return Rows(self.slopes, max(1, self.rows), 0, self.slopes.stride(0))


class Products(Protocol):
    """The products of a plan, and the losses and gradients of rows between them."""

    def losses(self, layer: Layer, block: Block) -> None:
        """Writes a block's results, and with `gradient` its dx for an upstream gradient of 1."""

    def slopes(self, layer: Layer, block: Block) -> None:
        """Writes a block's dx for its upstream gradients, from results that are known."""

    def of_hidden(self, layer: Layer, block: Block, out: Tensor) -> None:
        """out = dx·weight."""

    def of_weight(self, block: Block, out: Tensor, is_first: bool) -> None:
        """out = dxᵀ·hidden, on top of what is there unless the block is the first."""


# ------------------------------------------------------------------------------------------- the vendor's


@contextmanager
def _ieee_products(element: torch.dtype, device: torch.device) -> Iterator[None]:
    """The vendor's products as they are promised: neither cast by autocast, nor of float32 in fewer digits."""
    shortened = element == torch.float32 and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    if shortened:
        torch.backends.cuda.matmul.allow_tf32 = False
    try:
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield
    finally:
        if shortened:
            torch.backends.cuda.matmul.allow_tf32 = True


def multiply(left: Tensor, right: Tensor, out: Tensor, add: bool = False) -> None:
    """out = left·right, or on top of what is there; sums in float32, which stay so where `out` is.

    Where `out` begins at no multiple of 16 bytes, the vendor's product may take another order of sums: it goes through
    memory that does.
    """
    if not is_aligned(out):
        room = torch.empty_like(out, memory_format=torch.contiguous_format)
        multiply(left, right, room.copy_(out) if add else room, add)
        out.copy_(room)
    elif out.dtype == left.dtype:
        torch.addmm(out, left, right, out=out) if add else torch.mm(left, right, out=out)
    elif left.is_cuda:
        if add:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:  # the interpreter's: torch has no such product on the CPU
        product = left.to(out.dtype) @ right.to(out.dtype)
        out.add_(product) if add else out.copy_(product)


class Vendor:
    """Logits are rounded to the type of hidden, and dx is written over them."""

    def __init__(self, setup: Setup, gradient: bool, known: bool) -> None:
        (element, loss), (*_, classes) = facts(setup), setup.problem.sizes
        has_bias = "bias absent" not in setup.problem.layout
        mean = loss.reduction == "mean" and not divides_later(element, loss)
        self._classes = classes
        self._losses = None if known else RowLosses(setup, classes, has_bias, gradient, mean)
        self._slopes = RowGradients(setup, classes, has_bias, element == torch.float16) if known else None

    def _logits(self, layer: Layer, block: Block) -> Rows:
        multiply(block.hidden, layer.weight.T, block.slopes[:, : self._classes])
        return block.lines()

    def losses(self, layer: Layer, block: Block) -> None:
        assert self._losses is not None
        logits = self._logits(layer, block)
        self._losses.launch(block.rows, logits, layer.bias, block.targets, layer.number, block.results)

    def slopes(self, layer: Layer, block: Block) -> None:
        assert self._slopes is not None
        logits = self._logits(layer, block)
        self._slopes.launch(
            block.rows, logits, layer.bias, block.targets, block.upstream, layer.number, block.results.sizes,
            block.scale, logits,
        )  # fmt: skip

    def of_hidden(self, layer: Layer, block: Block, out: Tensor) -> None:
        multiply(block.slopes[:, : self._classes], layer.weight, out)

    def of_weight(self, block: Block, out: Tensor, is_first: bool) -> None:
        multiply(block.slopes[:, : self._classes].T, block.hidden, out, add=not is_first)


# ------------------------------------------------------------------------------------------------- our own


class Tiles:
    """Logits stay in float32, tile by tile, and are computed a second time for dx."""

    def __init__(self, setup: Setup, gradient: bool, known: bool, step: int, out: torch.dtype) -> None:
        (element, loss), (_, columns, classes) = facts(setup), setup.problem.sizes
        self._loss, self._classes, self._columns, self._tile = loss, classes, columns, kernels.tile_of(setup)
        self._segments = -(-classes // SEGMENT)
        tile, schedule = self._tile, setup.schedule
        sizes = {"D": columns, "CLASSES": classes}
        of_logits = {**sizes, "HAS_BIAS": "bias absent" not in setup.problem.layout, "SOFTCAP": loss.softcap > 0}
        smoothing = loss.label_smoothing > 0
        group = schedule["tile_group"]
        self._has_slopes = gradient or known
        if not known:
            self._rows = setup.kernel(
                kernels.loss_tile_rows,
                SMOOTHING=smoothing,
                SEGMENT=SEGMENT,
                **kernels.settings(setup, tile, **of_logits),
            )
            self._combine_rows = schedule["combine_rows"]
            self._combine = setup.kernel(
                kernels.loss_combine, SMOOTHING=smoothing, ROWS=self._combine_rows, num_warps=1
            )
        if self._has_slopes:
            mean = loss.reduction == "mean" and not divides_later(element, loss)
            kind = upstream_kind(setup) if known else {"LOSS": "unit", "HAS_LOG": False, "MEAN": mean}
            stepped = kernels.settings(setup, tile, STEP=step, GROUP=group, **sizes)
            self._slope_tile = kernels.tile_of_slopes(tile, loss.softcap > 0)
            of_slopes = kernels.settings(setup, self._slope_tile, STEP=step, GROUP=group, **of_logits)
            self._slopes = setup.kernel(
                kernels.loss_tile_slopes, SCALED=known and element == torch.float16, **kind, **of_slopes
            )
            self._of_hidden = setup.either(kernels.loss_hidden_product, out=out, **stepped)
            self._of_weight = setup.either(kernels.loss_weight_product, **stepped)

    @staticmethod
    def scratch(setup: Setup, rows: int) -> None:
        """Memory for what is left of each segment of each row of a block."""
        (_, loss), segments = facts(setup), -(-setup.problem.sizes[2] // SEGMENT)
        parts = rows * segments
        setup.scratch(largest=(torch.float32, parts), totals=(torch.float32, parts), chosen=(torch.float32, rows))
        setup.scratch(sums_z=(torch.float32, parts if loss.label_smoothing else 0))

    def losses(self, layer: Layer, block: Block) -> None:
        tile, memory, loss = self._tile, block.memory, self._loss
        parts = {"largest": memory["largest"], "totals": memory["totals"], "chosen": memory["chosen"]}
        parts["sums_z"] = memory.get("sums_z", memory["totals"])
        bias = block.hidden if layer.bias is None else layer.bias
        self._rows.launch(
            (-(-block.rows // tile.rows), self._segments), hidden=block.hidden, weight=layer.weight, bias=bias,
            targets=block.targets, rows=block.rows, softcap=loss.softcap, **parts,
        )  # fmt: skip
        self._combine.launch(
            (-(-block.rows // self._combine_rows),), targets=block.targets, losses=block.results.losses,
            log_probabilities=block.results.log_probabilities, sizes=block.results.sizes, rows=block.rows,
            segments=self._segments, classes=self._classes, smoothing=loss.label_smoothing, z_weight=loss.z_loss,
            **parts,
        )  # fmt: skip
        if self._has_slopes:
            self.slopes(layer, block)

    def slopes(self, layer: Layer, block: Block) -> None:
        loss, upstream = self._loss, block.upstream
        self._slopes.launch(
            self._grid(block.rows, self._classes, self._slope_tile), hidden=block.hidden, weight=layer.weight,
            bias=block.hidden if layer.bias is None else layer.bias, targets=block.targets,
            dloss=layer.number if upstream.dloss is None else upstream.dloss,
            dlog_probabilities=layer.number if upstream.dlog_probabilities is None else upstream.dlog_probabilities,
            count=layer.number, sizes=block.results.sizes, scale=block.scale, slopes=block.slopes, rows=block.rows,
            softcap=loss.softcap, smoothing=loss.label_smoothing, z_weight=loss.z_loss,
        )  # fmt: skip

    def of_hidden(self, layer: Layer, block: Block, out: Tensor) -> None:
        self._of_hidden[is_aligned(out)].launch(
            self._grid(block.rows, self._columns), slopes=block.slopes, weight=layer.weight, out=out, rows=block.rows
        )

    def of_weight(self, block: Block, out: Tensor, is_first: bool) -> None:
        self._of_weight[is_aligned(out)].launch(
            self._grid(self._classes, self._columns), slopes=block.slopes, hidden=block.hidden, sums=out,
            rows=block.rows, is_first=int(is_first),
        )  # fmt: skip

    def _grid(self, rows: int, columns: int, tile: kernels.Tile | None = None) -> tuple[int]:
        tile = tile or self._tile
        return (-(-rows // tile.rows) * -(-columns // tile.columns),)


# ------------------------------------------------------------------------------------------------ the plans


class _Blocks:
    """What forward and backward have in common: the rows of a block, its memory, and the products."""

    def __init__(self, setup: Setup, plan: str, need: int, known: bool, hidden_dtype: torch.dtype) -> None:
        (element, _), (tokens, columns, classes) = facts(setup), setup.problem.sizes
        self.setup, self.tokens, self.columns, self.classes, self.need = setup, tokens, columns, classes, need
        has_memory = plan == "vendor" or bool(need)
        self.step = -(-classes // 16) * 16  # rows begin at multiples of 16 bytes
        self.size = block_rows(tokens, self.step, element.itemsize, known)
        setup.add_numeric(block=self.size)
        setup.scratch(slopes=(element, min(self.size, tokens) * self.step * has_memory))
        self.has_memory, self.plan = has_memory, plan
        if plan == "vendor":
            self.products: Products = Vendor(setup, bool(need), known)
        else:
            self.products = Tiles(setup, bool(need), known, self.step, hidden_dtype)
            if not known:
                Tiles.scratch(setup, min(self.size, tokens))
        index = setup.problem.dtypes[1] if not known else torch.int64
        setup.copies(
            hidden=(element, tokens * columns), weight=(element, classes * columns), bias=(element, classes),
            labels=(index, tokens), dloss=(torch.float32, tokens), dlog_probabilities=(torch.float32, tokens),
        )  # fmt: skip
        self._block = setup.schedule["sum_block"]
        self.column_sums = None
        if need & NEED_BIAS:
            self.column_sums = setup.kernel(kernels.loss_column_sums, element=element, BLOCK=self._block)

    def slices(self) -> list[slice]:
        return [slice(start, min(start + self.size, self.tokens)) for start in range(0, self.tokens, self.size)]

    def slopes(self, memory: Memory, rows: int, absent: Tensor) -> Tensor:
        """Memory for the logits, or dx, of a block; without any, some other tensor stands in its place."""
        if not self.has_memory:
            return absent
        return memory.tensor("slopes")[: rows * self.step].view(rows, self.step)

    def add(self, layer: Layer, block: Block, is_first: bool, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
        """A block's gradient of hidden, and its parts of the others."""
        of_hidden, of_weight, of_bias = gradients
        if self.need & NEED_HIDDEN:
            self.products.of_hidden(layer, block, of_hidden)
        if self.need & NEED_WEIGHT:
            self.products.of_weight(block, of_weight, is_first)
        if self.column_sums is not None:
            self.column_sums.launch(
                (-(-self.classes // self._block),), slopes=block.slopes, sums=of_bias, rows=block.rows,
                is_first=int(is_first), classes=self.classes, step=self.step,
            )  # fmt: skip


def forward(setup: Setup, plan: str) -> Execute:
    """The loss, log-probabilities where they are asked for, what a backward reads, and gradients that are kept."""
    (element, loss), (tokens, columns, classes) = facts(setup), setup.problem.sizes
    *_, frozen, keep = setup.problem.options
    need = needed_sums(loss, frozen, keep, "bias absent" not in setup.problem.layout)
    hidden_dtype = torch.bfloat16 if element == torch.bfloat16 else torch.float32
    blocks = _Blocks(setup, plan, need, False, hidden_dtype)
    targets_of, total = Targets(setup, "linear_cross_entropy", tokens, classes), Total(setup)
    has_total = loss.reduction != "none"
    setup.scratch(losses=(torch.float32, tokens * has_total))
    setup.scratch(log_probabilities=(torch.float32, tokens * (not loss.log_probabilities)))
    setup.scratch(targets=(torch.int32, tokens * loss.is_total), sizes=(torch.float32, tokens * loss.is_total))

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        hidden, weight, labels, bias = arguments[:4]
        out, log_probabilities, targets, sizes, count, hidden_sums, weight_sums, bias_sums = outputs
        if tokens == 0:
            for output in (out, weight_sums, bias_sums):
                output.zero_()
            count.fill_(1.0)
            return
        memory = setup.memory(workspace)
        if loss.is_total:  # no backward reads them
            targets, sizes = memory.tensor("targets"), memory.tensor("sizes")
        targets_of.find(memory, memory.contiguous("labels", labels), targets, count)
        hidden = memory.contiguous("hidden", hidden).view(tokens, columns)
        bias = None if bias is None else memory.contiguous("bias", bias)
        layer = Layer(memory.contiguous("weight", weight), bias, count)
        losses = memory.tensor("losses") if has_total else out.view(-1)
        logs = log_probabilities.view(-1) if loss.log_probabilities else memory.tensor("log_probabilities")
        by_row = hidden_sums.view(tokens, columns) if need & NEED_HIDDEN else hidden_sums
        with _ieee_products(element, hidden.device):
            for rows in blocks.slices():
                slopes = blocks.slopes(memory, rows.stop - rows.start, count)
                results = RowResults(losses[rows], logs[rows], sizes[rows])
                block = Block(hidden[rows], targets[rows], slopes, results, Upstream(None, None), count, memory)
                blocks.products.losses(layer, block)
                blocks.add(layer, block, rows.start == 0, (by_row[rows], weight_sums, bias_sums))
        if has_total:
            total.launch(tokens, losses, count, out)
        targets_of.check()

    return execute


class _Round:
    """Sums times a factor, rounded to the type of hidden."""

    def __init__(self, setup: Setup, sums: torch.dtype, divides: bool) -> None:
        self._block = setup.schedule["round_block"]
        self._round = setup.either(
            kernels.loss_round, sum=sums, out=setup.problem.dtypes[0], DIVIDES=divides, BLOCK=self._block,
            num_warps=setup.schedule["round_warps"],
        )  # fmt: skip

    def launch(self, sums: Tensor, factor: Tensor, count: Tensor, out: Tensor) -> None:
        elements = sums.numel()
        self._round[is_aligned(sums, out)].launch(
            (-(-elements // self._block),), sums=sums, factor=factor, count=count, out=out, elements=elements
        )


def scaling(setup: Setup, plan: str) -> Execute:
    """Gradients that the forward kept, times the upstream one."""
    element, loss = facts(setup)
    divides = divides_later(element, loss)
    kept = torch.bfloat16 if element == torch.bfloat16 else torch.float32
    of_hidden, of_sums = _Round(setup, kept, divides), _Round(setup, torch.float32, divides)
    of_hidden_sums, of_weight_sums, of_bias_sums = setup.problem.sizes
    setup.copies(
        hidden_sums=(kept, of_hidden_sums), weight_sums=(torch.float32, of_weight_sums),
        bias_sums=(torch.float32, of_bias_sums),
    )  # fmt: skip

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dloss, _, hidden_sums, weight_sums, bias_sums, count = arguments[:6]
        memory = setup.memory(workspace)
        named = {"hidden_sums": hidden_sums, "weight_sums": weight_sums, "bias_sums": bias_sums}
        for (name, sums), gradient in zip(named.items(), outputs, strict=True):
            if gradient.numel():
                rounding = of_hidden if name == "hidden_sums" else of_sums
                rounding.launch(memory.contiguous(name, sums), dloss, count, gradient)

    return execute


def again(setup: Setup, plan: str) -> Execute:
    """All gradients that are needed, from logits that are computed once more."""
    (element, _), (tokens, columns, classes) = facts(setup), setup.problem.sizes
    need, scaled = setup.problem.options[-1], element == torch.float16
    hidden_dtype = torch.float32 if scaled else element
    blocks = _Blocks(setup, plan, need, True, hidden_dtype)
    kind = upstream_kind(setup)
    scale_of = setup.kernel(kernels.loss_scale, BLOCK=SCALE_BLOCK, **kind) if scaled else None
    narrow = element != torch.float32
    rounds = _Round(setup, torch.float32, False) if narrow else None
    setup.scratch(scale=(torch.float32, 1))
    setup.scratch(hidden_sums=(torch.float32, tokens * columns if scaled and need & NEED_HIDDEN else 0))
    setup.scratch(weight_sums=(torch.float32, classes * columns if narrow and need & NEED_WEIGHT else 0))
    setup.scratch(bias_sums=(torch.float32, classes if narrow and need & NEED_BIAS else 0))

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dloss, dlog_probabilities, hidden, weight, bias, targets, sizes, count = arguments[:8]
        if tokens == 0 or not need:
            for gradient in outputs:
                gradient.zero_()
            return
        memory = setup.memory(workspace)
        upstream = Upstream(
            None if dloss is None else memory.contiguous("dloss", dloss).view(-1),
            None
            if dlog_probabilities is None
            else memory.contiguous("dlog_probabilities", dlog_probabilities).view(-1),
        )
        scale = memory.tensor("scale")
        if scale_of is not None:
            scale_of.launch(
                (1,), dloss=count if upstream.dloss is None else upstream.dloss, count=count, scale=scale,
                dlog_probabilities=count if upstream.dlog_probabilities is None else upstream.dlog_probabilities,
                targets=targets, tokens=tokens,
            )  # fmt: skip
        elif narrow:
            scale.fill_(1.0)
        hidden = memory.contiguous("hidden", hidden).view(tokens, columns)
        bias = None if bias is None else memory.contiguous("bias", bias)
        layer = Layer(memory.contiguous("weight", weight), bias, count)
        names = ("hidden_sums", "weight_sums", "bias_sums")
        found = tuple(memory.tensor(x) if x in memory else out for x, out in zip(names, outputs, strict=True))
        by_row = found[0].view(tokens, columns) if need & NEED_HIDDEN else found[0]
        with _ieee_products(element, hidden.device):
            for rows in blocks.slices():
                slopes = blocks.slopes(memory, rows.stop - rows.start, count)
                of_rows = Upstream(
                    upstream.dloss[rows] if upstream.dloss is not None and kind["LOSS"] == "token" else upstream.dloss,
                    None if upstream.dlog_probabilities is None else upstream.dlog_probabilities[rows],
                )
                results = RowResults(sizes[rows], sizes[rows], sizes[rows])
                block = Block(hidden[rows], targets[rows], slopes, results, of_rows, scale, memory)
                blocks.products.slopes(layer, block)
                blocks.add(layer, block, rows.start == 0, (by_row[rows], found[1].view(-1, columns), found[2]))
        for sums, gradient in zip(found, outputs, strict=True):
            if rounds is not None and sums is not gradient:
                rounds.launch(sums, scale, count, gradient)

    return execute
