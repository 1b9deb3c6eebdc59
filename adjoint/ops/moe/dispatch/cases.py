"""What dispatch is tested, verified and timed on."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint.contract import batching
from adjoint.contract.batching import PIECE
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Rebatch, Subject, Workload
from adjoint.contract.inputs import each
from adjoint.contract.mistakes import answers, zeros
from adjoint.core.errors import Unsupported
from adjoint.core.plan import Call, bind
from adjoint.ops.moe.dispatch import dispatch, reference
from adjoint.ops.moe.layout import MAX_EXPERTS
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
    with_index,
)


def _tokens(
    tokens: tuple[int, ...],
    slots: int,
    columns: int,
    hot: bool = False,
    indices_dtype: torch.dtype = torch.int64,
    lay: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, indices: (x, indices),
) -> Make:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        indices = indices_of(generator, tokens, slots, hot).to(indices_dtype).to(device)
        return lay(values(generator, dtype, device, *tokens, columns), indices)

    return make


def _strided(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Columns that are not adjacent, and indices that are transposed in memory."""
    return laid_across(x, 2, 1, 0), laid_across(indices, 1, 0, 2)


def _scrambled(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Three axes of tokens in an order that no two strides describe."""
    return laid_across(x, 2, 1, 0, 3), indices


_CASES = (
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
    """The last half of the tokens alone. Their rows have other places and the same bits."""
    x, indices = inputs
    slots = indices.shape[-1]
    tokens, experts = x.reshape(-1, x.shape[-1]), indices.reshape(-1, slots)
    first = len(tokens) // 2
    rows = _permutation(indices).argsort()[first * slots :][_permutation(experts[first:])]

    def pairs(whole: Answers, alone: Answers) -> Iterator[tuple[Tensor, Tensor]]:
        for all_of_them, some in zip(whole[0], alone[0], strict=True):
            yield all_of_them[rows], some
        for all_of_them, some in zip(whole[1], alone[1], strict=True):
            yield all_of_them.reshape(-1, x.shape[-1])[first:], some

    yield Rebatch("the last tokens alone", (tokens[first:], experts[first:]), (upstream[0][rows],), pairs)


def _resized(inputs: Inputs, upstream: tuple[Tensor, ...], size: int) -> tuple[Inputs, tuple[Tensor, ...]]:
    """The same tokens, repeated to `size` along their first axis."""
    inputs, _ = batching.resized(inputs, (), size, 0, (True, True))
    return inputs, batching.resized((), upstream, inputs[1].numel(), 0, ())[1]


def _columns(arguments: Inputs, outputs: tuple[Tensor, ...]) -> Iterator[tuple[Inputs, tuple[Tensor, ...]]]:
    """Pieces of whole columns. Every column is a problem of its own, and all columns share the indices."""
    width = outputs[0].shape[-1]
    largest = max(tensor.numel() for tensor in (*arguments, *outputs))
    step = max(1, PIECE * width // max(1, largest))
    for begin in range(0, width, step):

        def part(tensor: Tensor, begin: int = begin) -> Tensor:
            return tensor[..., begin : begin + step] if tensor.is_floating_point() else tensor

        yield each(part, arguments), tuple(map(part, outputs))


# ------------------------------------------------------------------------------------------- mistakes


def _rows(x: Tensor, indices: Tensor) -> Tensor:
    return reference.dispatch(x, indices, EXPERTS)


def _dx(drows: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    return reference.dispatch_backward(drows, x, indices, EXPERTS)


def _last_slot_wins(drows: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    rows = _permutation(indices).argsort().view(-1, indices.shape[-1])[:, -1]
    return drows[rows].view(x.shape)


def _added_narrowly(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
    """Sums in a type that is too narrow for values of the inputs' dtype."""
    dtype = inputs[0].dtype
    narrow = {torch.float64: torch.float32, torch.float16: torch.float16}.get(dtype, torch.bfloat16)

    def dx(drows: Tensor, x: Tensor, indices: Tensor) -> Tensor:
        slots = indices.shape[-1]
        terms = drows.to(narrow)[_permutation(indices).argsort()].view(-1, slots, x.shape[-1])
        total = terms[:, 0].clone()
        for slot in range(1, slots):
            total += terms[:, slot]
        return total.view(x.shape)

    return answers(_rows, dx)(upstream, inputs)


_MISTAKES = {
    "zero output": zeros,
    "rows in order of tokens": answers(
        lambda x, indices: x.reshape(-1, x.shape[-1]).repeat_interleave(indices.shape[-1], 0), _dx
    ),
    "experts from the last down": answers(lambda x, indices: _rows(x, EXPERTS - 1 - indices), _dx),
    "the last slot wins": answers(_rows, _last_slot_wins),
    "gradient of another order": answers(_rows, lambda drows, x, indices: _dx(drows.flip(0), x, indices)),
    "sums in a narrow type": _added_narrowly,
}


def _subject(experts: int, **fields: Any) -> Subject:
    return Subject(
        name="moe.dispatch",
        function=dispatch,
        keywords={"num_experts": experts},
        inputs=("x", "indices"),
        reference=lambda x, indices: (reference.dispatch(x, indices, experts),),
        reference_backward=lambda drows, x, indices: (reference.dispatch_backward(drows, x, indices, experts),),
        pieces=_columns,
        **fields,
    )


DISPATCH = _subject(EXPERTS, cases=_CASES, mistakes=_MISTAKES, resized=_resized, rebatched=_with_other_tokens)

SUBJECTS = (DISPATCH,)

# ------------------------------------------------------------------------------------------ bad calls


def _inputs(device: torch.device) -> dict[str, Any]:
    indices = torch.tensor(((0, 1), (4, 1), (2, 2)), device=device)
    return {"x": torch.zeros(3, 4, device=device), "indices": indices, "num_experts": 5}


_changed = changing(dispatch, _inputs)


def _with_index(position: int, value: int, dtype: torch.dtype = torch.int64) -> Callable[[torch.device], None]:
    return _changed(x=shaped(300, 4), indices=with_index(300, 5, position, value, dtype))


def _backward_of_five_rows(device: torch.device) -> Tensor:
    _, layout = dispatch(**_inputs(device))
    drows = torch.zeros(5, 4, device=device)
    return torch.ops.adjoint.moe_dispatch_backward(drows, layout.inverse, layout.offsets, "")


BAD_CALLS = (
    BadCall("indices of other tokens", _changed(x=shaped(4, 4)), "x and indices", "(4, 4)", "(3, 2)"),
    BadCall("indices without slots", _changed(indices=shaped(3)), "indices", "(3,)"),
    BadCall("x without axes", _changed(x=shaped()), "x", "()"),
    BadCall("no experts", _changed(num_experts=0), "num_experts", "at least 1", "0"),
    BadCall("a boolean number of experts", _changed(num_experts=True), "num_experts", "True"),
    BadCall("a number of experts that is none", _changed(num_experts=5.0), "num_experts", "5.0"),
    BadCall("the first index too large", _with_index(0, 5), "moe.dispatch: indices", "got 5 at position 0 "),
    BadCall("the last index too large", _with_index(-1, 7, torch.int32), "got 7 at position 599 "),
    BadCall("a negative index", _with_index(301, -1), "got -1 at position 301 "),
    BadCall("an index that is an expert modulo 2^32", _with_index(42, 2**32 + 1), "got 4294967297 at position 42 "),
    BadCall("no workspace allowed", _changed(preference=adjoint.Preference(max_workspace_bytes=0)), "moe_dispatch",
            "triton", "eager", "the preference allows 0", error=Unsupported),
    BadCall("drows of the wrong shape, to the operator", _backward_of_five_rows, "drows", "6 entries", "5 rows"),
)  # fmt: skip

# ----------------------------------------------------------------------------------------- workloads


def _workload(tokens: int, columns: int, slots: int, experts: int) -> Workload:
    size = tokens * (slots + 1) * columns * 2
    return Workload(
        f"moe.dispatch {tokens}×{columns}, {slots} of {experts} experts, sort included",
        _subject(experts, cases=()),
        lambda dtype, device, generator: (
            random_values(dtype, device, generator, tokens, columns),
            distinct_experts(tokens, slots, experts, device, generator),
        ),
        size,
        size,
        lambda x, indices: x[indices.reshape(-1).argsort(stable=True) // slots],
        devices=("cuda",),
        deterministic=True,
    )


WORKLOADS = tuple(_workload(*shape) for shape in SHAPES)

# -------------------------------------------------------------------------------------------- builds


def built_calls() -> Iterator[Call]:
    """Calls in every dtype; in one of them with indices of both types, and with few and many experts."""
    calls = [(dtype, torch.int64, 512) for dtype in DISPATCH.dtypes]
    calls += [
        (torch.bfloat16, *others) for others in ((torch.int32, 512), (torch.int64, 128), (torch.int64, MAX_EXPERTS))
    ]
    for dtype, index, experts in calls:
        x, indices = (torch.empty(64, n, dtype=d, device="meta") for n, d in ((4096, dtype), (8, index)))
        yield bind(dispatch, x, indices, experts)
