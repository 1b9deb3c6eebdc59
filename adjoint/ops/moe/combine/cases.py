"""What combine is tested, verified and timed on."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint.contract.batching import PIECE
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Rebatch, Subject, Workload
from adjoint.contract.mistakes import answers, zeros
from adjoint.core.plan import Call, bind
from adjoint.core.problem import wide_dtype
from adjoint.ops.moe.combine import combine, combine_tensors, reference
from adjoint.ops.moe.dispatch import dispatch
from adjoint.ops.moe.layout import Layout
from adjoint.ops.moe.layout.reference import layout as reference_layout
from adjoint.ops.moe.values import (
    EXPERTS,
    SHAPES,
    changing,
    distinct_experts,
    indices_of,
    laid_across,
    random_values,
    shaped,
    values,
)


def _places(indices: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse and the offsets of a layout."""
    offsets, _, inverse = reference_layout(indices, EXPERTS)
    return inverse, offsets


def _grouped(tokens: tuple[int, ...], slots: int, columns: int, weighted: bool, strided: bool = False) -> Make:
    """Rows of a layout in which one or two entries have no expert; and weights, in the rows' dtype if `strided`."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        indices = indices_of(generator, tokens, slots, hot=True)
        if indices.numel() > 4:
            indices.view(-1)[[1, -2]] = EXPERTS
        inverse, offsets = _places(indices)
        rows = values(generator, dtype, device, indices.numel(), columns)
        kind = dtype if strided or dtype == torch.float64 else torch.float32
        weights = values(generator, kind, device, *indices.shape) if weighted else None
        if strided:
            rows = laid_across(rows, 1, 0)
            weights = None if weights is None else torch.stack((weights, weights), -1)[..., 0]
        return rows, weights, inverse.to(device), offsets.to(device)

    return make


def _cases(weighted: bool) -> tuple[Case, ...]:
    few = Case("few tokens", _grouped((3,), 2, 2, weighted))
    strided = Case("strided", _grouped((3, 2), 3, 19, weighted, strided=True))
    # The reference makes the layout in Python, which is slow for more tokens.
    many = Case("many tokens", _grouped((1024,), 8, 2048, weighted), heavy=True)
    if not weighted:
        return few, strided, many
    wide = Case("wide", _grouped((12,), 3, 260, weighted))
    return few, strided, wide, Case("no tokens", _grouped((0,), 2, 5, weighted)), many


def _part(inputs: Inputs, upstream: tuple[Tensor, ...], tokens: Tensor) -> tuple[Inputs, tuple[Tensor, ...], Tensor]:
    """A problem of some tokens of another one, and for each of its rows the row in the other problem."""
    rows, weights, inverse, offsets = inputs
    slots = inverse.shape[-1]
    old = inverse.reshape(-1, slots)[tokens]
    indices = torch.searchsorted(offsets, old, right=True) - 1  # past the last expert for entries of no expert
    new_inverse, new_offsets = _places(indices)
    source = torch.empty_like(new_inverse.reshape(-1)).long()
    source[new_inverse.reshape(-1).long()] = old.reshape(-1).long()
    part = None if weights is None else weights.reshape(-1, slots)[tokens].contiguous()
    gradient = upstream[0].reshape(-1, upstream[0].shape[-1])[tokens]
    return (rows[source], part, new_inverse, new_offsets), (gradient,), source


def _rebatched(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    inverse = inputs[2]
    count = inverse.shape[:-1].numel()
    tokens = torch.arange(count // 2, count, device=inverse.device)
    part, gradient, source = _part(inputs, upstream, tokens)

    def pairs(whole: Answers, alone: Answers) -> Iterator[tuple[Tensor, Tensor]]:
        for all_of_them, some in zip(whole[0], alone[0], strict=True):
            yield all_of_them.reshape(count, all_of_them.shape[-1])[tokens], some
        if whole[1]:
            yield whole[1][0][source], alone[1][0]
        if len(whole[1]) > 1:
            yield whole[1][1].reshape(count, inverse.shape[-1])[tokens], alone[1][1]

    yield Rebatch("the last tokens alone", part, gradient, pairs)


def _resized(inputs: Inputs, upstream: tuple[Tensor, ...], size: int) -> tuple[Inputs, tuple[Tensor, ...]]:
    """The same tokens, repeated to `size` of them."""
    tokens = torch.arange(size, device=inputs[2].device) % inputs[2].shape[:-1].numel()
    part, gradient, _ = _part(inputs, upstream, tokens)
    return part, gradient


def _token_pieces(arguments: Inputs, outputs: tuple[Tensor, ...]) -> Iterator[tuple[Inputs, tuple[Tensor, ...]]]:
    """Pieces of tokens, each with its own rows in the order of its entries. Every entry must have an expert."""
    *upstream, rows, weights, inverse, _ = arguments
    tokens, slots = inverse.shape
    step = max(1, PIECE // max(1, slots * rows.shape[1]))
    for begin in range(0, tokens, step):
        part = slice(begin, begin + step)
        places = inverse[part].reshape(-1).long()
        order = torch.arange(len(places), dtype=torch.int32, device=inverse.device).view(-1, slots)
        ends = torch.tensor([0, len(places)], dtype=torch.int32, device=inverse.device)
        inputs = (*(dy[part] for dy in upstream), rows[places], None if weights is None else weights[part], order, ends)
        yield inputs, (outputs[0][places], *(o[part] for o in outputs[1:])) if upstream else (outputs[0][part],)


def _combined_narrowly(rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
    """The sum in bfloat16 for every type. This is too narrow even for results that are rounded to bfloat16."""
    total = torch.zeros(*inverse.shape[:-1], rows.shape[1], dtype=torch.bfloat16, device=rows.device)
    for slot in range(inverse.shape[-1]):
        alone = inverse[..., slot : slot + 1]
        factor = None if weights is None else weights[..., slot : slot + 1]
        total += reference.combine(rows, factor, alone, offsets).to(torch.bfloat16)
    return total


def _mistakes(weighted: bool) -> dict[str, Callable[..., Answers]]:
    right, gradients = reference.combine, reference.combine_backward
    listed = {
        "zero output": zeros,
        "entries of no expert count": answers(
            lambda rows, weights, inverse, offsets: right(rows, weights, inverse, offsets + 2), gradients
        ),
        "sums in a narrow type": answers(_combined_narrowly, gradients),
        "rows of another token": answers(
            lambda rows, weights, inverse, offsets: right(rows, weights, inverse.flip(0), offsets), gradients
        ),
    }
    if weighted:
        listed |= {
            "weights ignored": answers(lambda rows, w, *layout: right(rows, None, *layout), gradients),
            "slots exchanged": answers(lambda rows, w, *layout: right(rows, w.flip(-1), *layout), gradients),
            "drows with another slot's weight": answers(
                right, lambda dy, rows, weights, *layout: gradients(dy, rows, weights.flip(-1), *layout)
            ),
            "dweights without the last column": answers(
                right,
                lambda dy, rows, *rest: (
                    gradients(dy, rows, *rest)[0],
                    gradients(dy[..., :-1], rows[:, :-1], *rest)[1],
                ),
            ),
        }
    return listed


def _subject(name: str, weighted: bool, **fields: Any) -> Subject:
    return Subject(
        name=name,
        function=combine_tensors,
        inputs=("rows", "weights", "inverse", "offsets"),
        reference=lambda *inputs: (reference.combine(*inputs),),
        reference_backward=reference.combine_backward,
        cases=_cases(weighted),
        mistakes=_mistakes(weighted),
        batched=("weights", "inverse"),
        resized=_resized,
        rebatched=_rebatched,
        pieces=_token_pieces,
        **fields,
    )


COMBINE = _subject("moe.combine", weighted=True)
PLAIN = _subject("moe.combine[sum]", weighted=False, dtypes=(torch.bfloat16,))

SUBJECTS = (COMBINE, PLAIN)

# ------------------------------------------------------------------------------------------ bad calls


def _inputs(device: torch.device) -> dict[str, Any]:
    indices = torch.tensor(((0, 1), (4, 1), (2, 2)), device=device)
    rows, layout = dispatch(torch.zeros(3, 4, device=device), indices, 5)
    return {"rows": rows, "weights": torch.ones(3, 2, device=device), "layout": layout}


_changed = changing(combine, _inputs)


def _with_layout(change: Callable[[Layout], dict[str, Tensor]]) -> Callable[[torch.device], None]:
    return _changed(layout=lambda layout: layout._replace(**change(layout)))


def _named_twice(device: torch.device) -> None:
    with adjoint.checked():
        _with_layout(lambda layout: {"inverse": layout.inverse.clamp_min(1)})(device)


def _backward(device: torch.device, tokens: int, need: int) -> Any:
    """A call of the backward operator, without rows and weights."""
    layout, dy = _inputs(device)["layout"], torch.zeros(tokens, 4, device=device)
    return torch.ops.adjoint.moe_combine_backward(dy, None, None, layout.inverse, layout.offsets, need, "")


BAD_CALLS = (
    BadCall("rows with one axis", _changed(rows=lambda rows: rows[:, 0]), "moe.combine", "rows", "(6,)"),
    BadCall("too few rows", _changed(rows=lambda rows: rows[:5]), "rows", "6 entries", "5 rows"),
    BadCall("weights of the wrong shape", _changed(weights=shaped(2, 3)), "weights", "(3, 2)", "(2, 3)"),
    BadCall("weights of the wrong dtype", _changed(weights=Tensor.half), "weights", "float32", "float16"),
    BadCall("a layout that is a tensor", _changed(layout=lambda layout: layout.inverse), "layout", "Layout", "Tensor"),
    BadCall("a layout in 64 bits", _changed(layout=lambda layout: Layout(*(t.long() for t in layout))),
            "layout.inverse", "int32", "int64"),
    BadCall("a layout without offsets", _with_layout(lambda layout: {"offsets": layout.offsets[:0]}),
            "layout.offsets", "(0,)"),
    BadCall("a layout that names a row past the end", _with_layout(lambda layout: {"inverse": layout.inverse + 1}),
            "moe.combine: layout.inverse", "got 6 at position 2 "),
    BadCall("a layout that names a row before the beginning",
            _with_layout(lambda layout: {"inverse": layout.inverse - 1}), "layout.inverse", "got -1 at position 0 "),
    BadCall("a layout that names a row twice", _named_twice, "layout.inverse", "row 1 more than once"),
    BadCall("dy of the wrong shape, to the operator", lambda d: _backward(d, 2, 1), "dy", "(3,)", "(2, 4)"),
    BadCall("no rows for the gradient of weights, to the operator", lambda d: _backward(d, 3, 2), "weights", "rows"),
)  # fmt: skip

# ----------------------------------------------------------------------------------------- workloads


def _workload(tokens: int, columns: int, slots: int, experts: int, weighted: bool) -> Workload:
    """A workload. Without weights, its forward is the backward of `dispatch`, and its backward is `dispatch` without
    the sort."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        indices = distinct_experts(tokens, slots, experts, device, generator)
        _, layout = dispatch(torch.empty(tokens, 0, dtype=dtype, device=device), indices, experts)
        rows = random_values(dtype, device, generator, tokens * slots, columns)
        weights = random_values(torch.float32, device, generator, tokens, slots).softmax(-1) if weighted else None
        return rows, weights, layout.inverse, layout.offsets

    def baseline(rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
        terms = rows[inverse.long()]
        return (terms if weights is None else terms * weights[..., None]).sum(1).to(rows.dtype)

    row = columns * 2
    return Workload(
        f"moe.combine{'' if weighted else '[sum]'} {tokens}×{columns}, {slots} of {experts} experts",
        COMBINE if weighted else PLAIN,
        make,
        tokens * (slots + 1) * row,
        tokens * (2 * slots + 1 if weighted else slots + 1) * row,
        baseline,
        devices=("cuda",),
        deterministic=True,
    )


WORKLOADS = tuple(_workload(*shape, weighted) for shape in SHAPES for weighted in (True, False))

# -------------------------------------------------------------------------------------------- builds


def built_calls() -> Iterator[Call]:
    """Calls in every dtype, without weights and with weights of each dtype that they may have."""
    inverse, offsets = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((64, 8), (513,)))
    for dtype in COMBINE.dtypes:
        rows = torch.empty(64 * 8, 4096, dtype=dtype, device="meta")
        yield bind(combine_tensors, rows, None, inverse, offsets)
        for kind in dict.fromkeys((wide_dtype(dtype), dtype)):
            yield bind(combine_tensors, rows, torch.empty(64, 8, dtype=kind, device="meta"), inverse, offsets)
