"""The tokens and layouts that dispatch and combine are tested, verified and timed on."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from adjoint.core.batching import PIECE
from adjoint.core.cases import Answers, Case, Inputs, Make, Rebatch, Subject, Workload
from adjoint.core.inputs import each
from adjoint.ops.moe import dispatch_reference as reference
from adjoint.ops.moe.combine import combine_tensors
from adjoint.ops.moe.dispatch import dispatch

EXPERTS = 6


def _values(generator: torch.Generator, dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def _indices(generator: torch.Generator, tokens: tuple[int, ...], slots: int, hot: bool = False) -> Tensor:
    """Experts in random order of frequency; expert 1 gets none, and with `hot` expert 4 most."""
    indices = torch.randint(EXPERTS - 1, (*tokens, slots), generator=generator)
    indices = torch.where(indices >= 1, indices + 1, indices)
    if hot:
        indices[torch.rand(indices.shape, generator=generator) < 0.7] = 4
    return indices


def _narrow(dtype: torch.dtype) -> torch.dtype:
    """A type too narrow to add values of a dtype in."""
    return {torch.float64: torch.float32, torch.float16: torch.float16}.get(dtype, torch.bfloat16)


# ------------------------------------------------------------------------------------------ dispatch


def _tokens(
    tokens: tuple[int, ...],
    slots: int,
    columns: int,
    hot: bool = False,
    indices_dtype: torch.dtype = torch.int64,
    lay: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, indices: (x, indices),
) -> Make:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        indices = _indices(generator, tokens, slots, hot).to(indices_dtype).to(device)
        return lay(_values(generator, dtype, device, *tokens, columns), indices)

    return make


def _strided(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Columns apart, and indices that lie the other way round."""
    return x.transpose(0, -1).contiguous().transpose(0, -1), indices.transpose(0, 1).contiguous().transpose(0, 1)


def _scrambled(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Three axes of tokens in an order that no two strides describe."""
    return x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3), indices


_DISPATCHED = (
    Case("few tokens", _tokens((4,), 2, 3)),
    Case("a hot expert", _tokens((30,), 3, 144, hot=True, indices_dtype=torch.int32)),
    Case("strided", _tokens((3, 2), 2, 19, lay=_strided)),
    Case("three axes of tokens, one slot", _tokens((2, 3, 2), 1, 3, lay=_scrambled)),
    Case("no tokens", _tokens((0,), 2, 5)),
    Case("many tokens", _tokens((8192,), 8, 1024, hot=True), heavy=True),
)


def _permutation(indices: Tensor) -> Tensor:
    return indices.reshape(-1).argsort(stable=True)


def _with_other_tokens(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    """The last half of the tokens alone: their rows are elsewhere, and have the same bits."""
    x, indices = inputs
    slots = indices.shape[-1]
    tokens, experts = x.reshape(-1, x.shape[-1]), indices.reshape(-1, slots)
    first = len(tokens) // 2
    whole_rows = _permutation(indices).argsort()[first * slots :]  # of each entry that is kept
    kept = _permutation(experts[first:])

    def pairs(whole: Answers, alone: Answers) -> Iterator[tuple[Tensor, Tensor]]:
        for all_of_them, some in zip(whole[0], alone[0], strict=True):
            yield all_of_them[whole_rows][kept], some
        for all_of_them, some in zip(whole[1], alone[1], strict=True):
            yield all_of_them.reshape(-1, x.shape[-1])[first:], some

    yield Rebatch(
        "the last tokens alone", (tokens[first:], experts[first:]), (upstream[0][whole_rows][kept],), pairs
    )


def _dispatch_resized(inputs: Inputs, upstream: tuple[Tensor, ...], size: int) -> tuple[Inputs, tuple[Tensor, ...]]:
    """`size` along the first axis of tokens: the same over again."""

    def fitted(tensor: Tensor, length: int) -> Tensor:
        return torch.cat([tensor] * -(-length // len(tensor)))[:length].contiguous()

    x, indices = (fitted(tensor, size) for tensor in inputs)
    return (x, indices), (fitted(upstream[0], indices.numel()),)


def _columns(arguments: Inputs, outputs: tuple[Tensor, ...]) -> Iterator[tuple[Inputs, tuple[Tensor, ...]]]:
    """Pieces of columns: every column is a problem of its own; indices belong to all of them."""
    width = outputs[0].shape[-1]
    largest = max(tensor.numel() for tensor in (*arguments, *outputs))
    step = max(1, PIECE * width // max(1, largest))
    for begin in range(0, width, step):

        def part(tensor: Tensor, begin: int = begin) -> Tensor:
            return tensor[..., begin : begin + step] if tensor.is_floating_point() else tensor

        yield each(part, arguments), tuple(map(part, outputs))


def _dispatch_answer(
    rows: Callable[[Tensor, Tensor], Tensor], dx: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Callable[..., Answers]:
    def answer(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
        x, indices = inputs
        return (rows(x, indices).to(x.dtype),), (dx(upstream[0], x, indices).to(x.dtype).view(x.shape),)

    return answer


def _right_rows(x: Tensor, indices: Tensor) -> Tensor:
    return reference.dispatch(x, indices, EXPERTS)


def _right_dx(drows: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    return reference.dispatch_backward(drows.double(), x, indices, EXPERTS)


def _last_slot_wins(drows: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    slots = indices.shape[-1]
    rows = _permutation(indices).argsort().view(-1, slots)[:, -1]
    return drows[rows]


def _added_narrowly(drows: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    slots = indices.shape[-1]
    terms = drows.to(_narrow(x.dtype))[_permutation(indices).argsort()].view(-1, slots, x.shape[-1])
    total = terms[:, 0].clone()
    for slot in range(1, slots):
        total += terms[:, slot]
    return total


_DISPATCH_MISTAKES = {
    "zero output": lambda upstream, inputs: ((torch.zeros_like(upstream[0]),), (torch.zeros_like(inputs[0]),)),
    "rows in order of tokens": _dispatch_answer(
        lambda x, indices: x.reshape(-1, x.shape[-1]).repeat_interleave(indices.shape[-1], 0), _right_dx
    ),
    "experts from the last down": _dispatch_answer(lambda x, indices: _right_rows(x, EXPERTS - 1 - indices), _right_dx),
    "the last slot wins": _dispatch_answer(_right_rows, _last_slot_wins),
    "gradient of another order": _dispatch_answer(
        _right_rows, lambda drows, x, indices: _right_dx(drows.flip(0), x, indices)
    ),
    "sums in a narrow type": _dispatch_answer(_right_rows, _added_narrowly),
}

DISPATCH = Subject(
    name="moe.dispatch",
    function=dispatch,
    keywords={"num_experts": EXPERTS},
    inputs=("x", "indices"),
    reference=lambda x, indices: (reference.dispatch(x, indices, EXPERTS),),
    reference_backward=lambda drows, x, indices: (reference.dispatch_backward(drows, x, indices, EXPERTS),),
    cases=_DISPATCHED,
    mistakes=_DISPATCH_MISTAKES,
    resized=_dispatch_resized,
    rebatched=_with_other_tokens,
    pieces=_columns,
)

# ------------------------------------------------------------------------------------------- combine


def _laid_out(indices: Tensor) -> tuple[Tensor, Tensor]:
    """inverse and offsets."""
    offsets, _, inverse = reference.layout(indices, EXPERTS)
    return inverse, offsets


def _grouped(
    tokens: tuple[int, ...], slots: int, columns: int, weighted: bool, *, own_dtype: bool = False, strided: bool = False
) -> Make:
    """Rows of a layout in which an entry or two belong to no expert, and weights, float32 unless `own_dtype`."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        indices = _indices(generator, tokens, slots, hot=True)
        if indices.numel() > 4:
            indices.view(-1)[[1, -2]] = EXPERTS
        inverse, offsets = _laid_out(indices)
        rows = _values(generator, dtype, device, indices.numel(), columns)
        kind = dtype if own_dtype or dtype == torch.float64 else torch.float32
        weights = _values(generator, kind, device, *indices.shape) if weighted else None
        if strided:
            rows = rows.T.contiguous().T
            weights = None if weights is None else torch.stack((weights, weights), -1)[..., 0]
        return rows, weights, inverse.to(device), offsets.to(device)

    return make


def _combined(weighted: bool) -> tuple[Case, ...]:
    few = Case("few tokens", _grouped((4,), 2, 3, weighted))
    strided = Case("strided", _grouped((3, 2), 3, 19, weighted, own_dtype=True, strided=True))
    # The layout by hand, as the reference has it, is slow for more.
    many = Case("many tokens", _grouped((1024,), 8, 2048, weighted), heavy=True)
    if not weighted:
        return few, strided, many
    wide = Case("wide", _grouped((12,), 3, 260, weighted))
    return few, strided, wide, Case("no tokens", _grouped((0,), 2, 5, weighted)), many


def _experts_of(inverse: Tensor, offsets: Tensor) -> Tensor:
    """The indices a layout was made from; those of no expert are past the last."""
    return torch.searchsorted(offsets, inverse.contiguous(), right=True) - 1


def _combine_part(inputs: Inputs, upstream: tuple[Tensor, ...], tokens: Tensor) -> tuple[Inputs, tuple[Tensor, ...], Tensor]:
    """Some tokens of a problem as one of their own, and the row that each of its rows had."""
    rows, weights, inverse, offsets = inputs
    slots = inverse.shape[-1]
    old = inverse.reshape(-1, slots)[tokens]
    new_inverse, new_offsets = _laid_out(_experts_of(old, offsets))
    source = torch.empty_like(new_inverse.reshape(-1)).long()
    source[new_inverse.reshape(-1).long()] = old.reshape(-1).long()
    part = None if weights is None else weights.reshape(-1, slots)[tokens].contiguous()
    gradient = upstream[0].reshape(-1, upstream[0].shape[-1])[tokens]
    return (rows[source], part, new_inverse, new_offsets), (gradient,), source


def _combine_rebatched(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    inverse = inputs[2]
    count = inverse.shape[:-1].numel()
    tokens = torch.arange(count // 2, count, device=inverse.device)
    part, gradient, source = _combine_part(inputs, upstream, tokens)

    def pairs(whole: Answers, alone: Answers) -> Iterator[tuple[Tensor, Tensor]]:
        for all_of_them, some in zip(whole[0], alone[0], strict=True):
            yield all_of_them.reshape(count, all_of_them.shape[-1])[tokens], some
        if whole[1]:
            yield whole[1][0][source], alone[1][0]
        if len(whole[1]) > 1:
            yield whole[1][1].reshape(count, inverse.shape[-1])[tokens], alone[1][1]

    yield Rebatch("the last tokens alone", part, gradient, pairs)


def _combine_resized(inputs: Inputs, upstream: tuple[Tensor, ...], size: int) -> tuple[Inputs, tuple[Tensor, ...]]:
    """`size` tokens: the same over again."""
    tokens = torch.arange(size, device=inputs[2].device) % inputs[2].shape[:-1].numel()
    part, gradient, _ = _combine_part(inputs, upstream, tokens)
    return part, gradient


def _token_pieces(arguments: Inputs, outputs: tuple[Tensor, ...]) -> Iterator[tuple[Inputs, tuple[Tensor, ...]]]:
    """Pieces of tokens, each with rows of its own, in the order of its entries. Every entry must have an expert."""
    *upstream, rows, weights, inverse, offsets = arguments
    tokens, slots = inverse.shape
    step = max(1, PIECE // max(1, slots * rows.shape[1]))
    for begin in range(0, tokens, step):
        part = slice(begin, begin + step)
        places = inverse[part].reshape(-1).long()
        order = torch.arange(len(places), dtype=torch.int32, device=inverse.device).view(-1, slots)
        ends = torch.tensor([0, len(places)], dtype=torch.int32, device=inverse.device)
        given = (*(dy[part] for dy in upstream), rows[places], None if weights is None else weights[part], order, ends)
        yield given, (outputs[0][places], *(o[part] for o in outputs[1:])) if upstream else (outputs[0][part],)


def _combine_answer(
    y: Callable[..., Tensor], gradients: Callable[..., tuple[Tensor, ...]]
) -> Callable[..., Answers]:
    def answer(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
        rows, weights, inverse, offsets = inputs
        wide = (rows.double(), None if weights is None else weights.double(), inverse, offsets)
        dtypes = [t.dtype for t in (rows, weights) if t is not None]
        found = gradients(upstream[0].double(), *wide)
        return (y(*wide).to(rows.dtype),), tuple(g.to(d) for g, d in zip(found, dtypes, strict=True))

    return answer


def _combined_narrowly(rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
    """The sum in bfloat16, for whatever type: too narrow even for what is rounded to it afterwards."""
    total = torch.zeros(*inverse.shape[:-1], rows.shape[1], dtype=torch.bfloat16, device=rows.device)
    for slot in range(inverse.shape[-1]):
        alone = inverse[..., slot : slot + 1]
        factor = None if weights is None else weights[..., slot : slot + 1]
        total += reference.combine(rows, factor, alone, offsets).to(torch.bfloat16)
    return total


def _weights_flipped(dy: Tensor, rows: Tensor, weights: Tensor | None, *layout: Tensor) -> tuple[Tensor, ...]:
    return reference.combine_backward(dy, rows, None if weights is None else weights.flip(-1), *layout)


def _mistakes(weighted: bool) -> dict[str, Callable[..., Answers]]:
    right, right_gradients = reference.combine, reference.combine_backward
    listed = {
        "zero output": lambda upstream, inputs: (
            tuple(torch.zeros_like(t) for t in upstream),
            tuple(torch.zeros_like(t) for t in inputs[:2] if t is not None),
        ),
        "entries of no expert count": _combine_answer(
            lambda rows, weights, inverse, offsets: right(rows, weights, inverse, offsets + 2), right_gradients
        ),
        "sums in a narrow type": _combine_answer(_combined_narrowly, right_gradients),
        "rows of another token": _combine_answer(
            lambda rows, weights, inverse, offsets: right(rows, weights, inverse.flip(0), offsets), right_gradients
        ),
    }
    if weighted:
        listed |= {
            "weights ignored": _combine_answer(lambda rows, w, *layout: right(rows, None, *layout), right_gradients),
            "slots exchanged": _combine_answer(lambda rows, w, *layout: right(rows, w.flip(-1), *layout), right_gradients),
            "drows with another slot's weight": _combine_answer(right, _weights_flipped),
            "dweights without the last column": _combine_answer(
                right,
                lambda dy, rows, *rest: (
                    right_gradients(dy, rows, *rest)[0],
                    right_gradients(dy[..., :-1], rows[:, :-1], *rest)[1],
                ),
            ),
        }
    return listed


def _combine_subject(name: str, weighted: bool, **fields: Any) -> Subject:
    return Subject(
        name=name,
        function=combine_tensors,
        inputs=("rows", "weights", "inverse", "offsets"),
        reference=lambda *inputs: (reference.combine(*inputs),),
        reference_backward=reference.combine_backward,
        cases=_combined(weighted),
        mistakes=_mistakes(weighted),
        batched=("weights", "inverse"),
        resized=_combine_resized,
        rebatched=_combine_rebatched,
        pieces=_token_pieces,
        **fields,
    )


COMBINE = _combine_subject("moe.combine", weighted=True)
PLAIN = _combine_subject("moe.combine[sum]", weighted=False, dtypes=(torch.bfloat16,))

SUBJECTS = (DISPATCH, COMBINE, PLAIN)

# ----------------------------------------------------------------------------------------- workloads


def _chosen(tokens: int, slots: int, experts: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Distinct experts for each token, uniformly."""
    own = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
    return torch.rand(tokens, experts, device=device, generator=own).topk(slots, -1).indices


def _random(dtype: torch.dtype, device: torch.device, generator: torch.Generator, *shape: int) -> Tensor:
    own = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
    return torch.randn(shape, dtype=dtype, device=device, generator=own)


def _dispatch_workload(tokens: int, columns: int, slots: int, experts: int) -> Workload:
    subject = Subject(
        name="moe.dispatch",
        function=dispatch,
        keywords={"num_experts": experts},
        inputs=("x", "indices"),
        reference=lambda x, indices: (reference.dispatch(x, indices, experts),),
        reference_backward=lambda drows, x, indices: (reference.dispatch_backward(drows, x, indices, experts),),
        cases=(),
        pieces=_columns,
    )
    size = tokens * (slots + 1) * columns * 2
    return Workload(
        f"moe.dispatch {tokens}×{columns}, {slots} of {experts} experts, sort included",
        subject,
        lambda dtype, device, generator: (
            _random(dtype, device, generator, tokens, columns),
            _chosen(tokens, slots, experts, device, generator),
        ),
        size,
        size,
        lambda x, indices: x[indices.reshape(-1).argsort(stable=True) // slots],
        devices=("cuda",),
        deterministic=True,
    )


def _combine_workload(tokens: int, columns: int, slots: int, experts: int) -> Workload:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        indices = _chosen(tokens, slots, experts, device, generator)
        _, layout = dispatch(torch.empty(tokens, 0, dtype=dtype, device=device), indices, experts)
        rows = _random(dtype, device, generator, tokens * slots, columns)
        weights = _random(torch.float32, device, generator, tokens, slots).softmax(-1)
        return rows, weights, layout.inverse, layout.offsets

    def baseline(rows: Tensor, weights: Tensor, inverse: Tensor, offsets: Tensor) -> Tensor:
        return (rows[inverse.long()] * weights[..., None]).sum(1).to(rows.dtype)

    return Workload(
        f"moe.combine {tokens}×{columns}, {slots} of {experts} experts",
        COMBINE,
        make,
        tokens * (slots + 1) * columns * 2,
        tokens * (2 * slots + 1) * columns * 2,
        baseline,
        devices=("cuda",),
        deterministic=True,
    )


_SHAPES = ((32768, 2048, 8, 128), (32768, 2048, 10, 512))

WORKLOADS = (
    *(_dispatch_workload(*shape) for shape in _SHAPES),
    *(_combine_workload(*shape) for shape in _SHAPES),
)
