"""What dispatch is tested, verified and timed on."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import adjoint
from adjoint.contract.batching import PIECE
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Rebatch, Subject, Workload
from adjoint.contract.inputs import each
from adjoint.core.errors import Unsupported
from adjoint.core.plan import Call, bind
from adjoint.ops.moe.dispatch import dispatch, reference
from adjoint.ops.moe.layout import MAX_EXPERTS, Layout

EXPERTS = 6


def values(generator: torch.Generator, dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def indices_of(generator: torch.Generator, tokens: tuple[int, ...], slots: int, hot: bool = False) -> Tensor:
    """Experts in random order of frequency; expert 1 gets none, and with `hot` expert 4 most."""
    indices = torch.randint(EXPERTS - 1, (*tokens, slots), generator=generator)
    indices = torch.where(indices >= 1, indices + 1, indices)
    if hot:
        indices[torch.rand(indices.shape, generator=generator) < 0.7] = 4
    return indices


def _narrow(dtype: torch.dtype) -> torch.dtype:
    """A type too narrow to add values of a dtype in."""
    return {torch.float64: torch.float32, torch.float16: torch.float16}.get(dtype, torch.bfloat16)


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
    """Columns apart, and indices that lie the other way round."""
    return x.transpose(0, -1).contiguous().transpose(0, -1), indices.transpose(0, 1).contiguous().transpose(0, 1)


def _scrambled(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Three axes of tokens in an order that no two strides describe."""
    return x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3), indices


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
    """The last half of the tokens alone: their rows are elsewhere, and have the same bits."""
    x, indices = inputs
    slots = indices.shape[-1]
    tokens, experts = x.reshape(-1, x.shape[-1]), indices.reshape(-1, slots)
    first = len(tokens) // 2
    whole_rows = _permutation(indices).argsort()[first * slots :]  # of each entry of these tokens
    order = _permutation(experts[first:])

    def pairs(whole: Answers, alone: Answers) -> Iterator[tuple[Tensor, Tensor]]:
        for all_of_them, some in zip(whole[0], alone[0], strict=True):
            yield all_of_them[whole_rows][order], some
        for all_of_them, some in zip(whole[1], alone[1], strict=True):
            yield all_of_them.reshape(-1, x.shape[-1])[first:], some

    yield Rebatch("the last tokens alone", (tokens[first:], experts[first:]), (upstream[0][whole_rows][order],), pairs)


def _resized(inputs: Inputs, upstream: tuple[Tensor, ...], size: int) -> tuple[Inputs, tuple[Tensor, ...]]:
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


def _answer(
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


_MISTAKES = {
    "zero output": lambda upstream, inputs: ((torch.zeros_like(upstream[0]),), (torch.zeros_like(inputs[0]),)),
    "rows in order of tokens": _answer(
        lambda x, indices: x.reshape(-1, x.shape[-1]).repeat_interleave(indices.shape[-1], 0), _right_dx
    ),
    "experts from the last down": _answer(lambda x, indices: _right_rows(x, EXPERTS - 1 - indices), _right_dx),
    "the last slot wins": _answer(_right_rows, _last_slot_wins),
    "gradient of another order": _answer(_right_rows, lambda drows, x, indices: _right_dx(drows.flip(0), x, indices)),
    "sums in a narrow type": _answer(_right_rows, _added_narrowly),
}

DISPATCH = Subject(
    name="moe.dispatch",
    function=dispatch,
    keywords={"num_experts": EXPERTS},
    inputs=("x", "indices"),
    reference=lambda x, indices: (reference.dispatch(x, indices, EXPERTS),),
    reference_backward=lambda drows, x, indices: (reference.dispatch_backward(drows, x, indices, EXPERTS),),
    cases=_CASES,
    mistakes=_MISTAKES,
    resized=_resized,
    rebatched=_with_other_tokens,
    pieces=_columns,
)

SUBJECTS = (DISPATCH,)

# ------------------------------------------------------------------------------------------ bad calls


def _x(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape or (3, 4), device=device)


def _indices(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values or (0, 1, 4, 1, 2, 2), device=device).view(3, 2)


def example(device: torch.device) -> tuple[Tensor, Tensor, Layout]:
    """Rows, weights and their layout."""
    rows, layout = dispatch(_x(device), _indices(device), 5)
    return rows, torch.ones(3, 2, device=device), layout


def _with_index(position: int, value: int, dtype: torch.dtype = torch.int64) -> Callable[[torch.device], None]:
    """A dispatch of 600 entries, all right but one."""

    def call(device: torch.device) -> None:
        indices = torch.arange(600, device=device).remainder(5).to(dtype)
        indices[position] = value
        dispatch(_x(device, 300, 4), indices.view(300, 2), 5)
        adjoint.check()

    return call


def _places(device: torch.device) -> tuple[Tensor, Tensor]:
    """What the backward reads of a layout."""
    layout = example(device)[2]
    return layout.inverse, layout.offsets


BAD_CALLS = (
    BadCall(
        "indices of other tokens", lambda d: dispatch(_x(d, 4, 4), _indices(d), 5), "x and indices", "(4, 4)", "(3, 2)"
    ),
    BadCall("indices without slots", lambda d: dispatch(_x(d), _indices(d)[:, 0], 5), "indices", "(3,)"),
    BadCall("x without axes", lambda d: dispatch(torch.zeros((), device=d), _indices(d), 5), "x", "()"),
    BadCall("no experts", lambda d: dispatch(_x(d), _indices(d), 0), "num_experts", "at least 1", "0"),
    BadCall("a boolean number of experts", lambda d: dispatch(_x(d), _indices(d), True), "num_experts", "True"),
    BadCall("a number of experts that is none", lambda d: dispatch(_x(d), _indices(d), 5.0), "num_experts", "5.0"),  # type: ignore[arg-type]
    BadCall("the first index too large", _with_index(0, 5), "moe.dispatch: indices", "got 5 at position 0 "),
    BadCall("the last index too large", _with_index(-1, 7, torch.int32), "got 7 at position 599 "),
    BadCall("a negative index", _with_index(301, -1), "got -1 at position 301 "),
    BadCall("an index that is an expert modulo 2^32", _with_index(42, 2**32 + 1), "got 4294967297 at position 42 "),
    BadCall(
        "no workspace allowed",
        lambda d: dispatch(_x(d), _indices(d), 5, preference=adjoint.Preference(max_workspace_bytes=0)),
        "moe_dispatch",
        "triton",
        "eager",
        "the preference allows 0",
        error=Unsupported,
    ),
    BadCall(
        "drows of the wrong shape, to the operator",
        lambda d: torch.ops.adjoint.moe_dispatch_backward(_x(d, 5, 4), *_places(d), ""),
        "drows",
        "6 entries",
        "5 rows",
    ),
)

# ----------------------------------------------------------------------------------------- workloads


def distinct_experts(tokens: int, slots: int, experts: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Distinct experts for each token, uniformly."""
    on_device = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
    return torch.rand(tokens, experts, device=device, generator=on_device).topk(slots, -1).indices


def random_values(dtype: torch.dtype, device: torch.device, generator: torch.Generator, *shape: int) -> Tensor:
    on_device = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
    return torch.randn(shape, dtype=dtype, device=device, generator=on_device)


def _workload(tokens: int, columns: int, slots: int, experts: int) -> Workload:
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
            random_values(dtype, device, generator, tokens, columns),
            distinct_experts(tokens, slots, experts, device, generator),
        ),
        size,
        size,
        lambda x, indices: x[indices.reshape(-1).argsort(stable=True) // slots],
        devices=("cuda",),
        deterministic=True,
    )


SHAPES = ((32768, 2048, 8, 128), (32768, 2048, 10, 512))
"""Tokens, columns, slots and experts of what is timed."""

WORKLOADS = tuple(_workload(*shape) for shape in SHAPES)

# -------------------------------------------------------------------------------------------- builds


def built_calls() -> Iterator[Call]:
    """Every dtype; for one of them indices in both, and few and many experts."""
    for dtype in DISPATCH.dtypes:
        yield _built(dtype, torch.int64, 512)
    for index, experts in ((torch.int32, 512), (torch.int64, 128), (torch.int64, MAX_EXPERTS)):
        yield _built(torch.bfloat16, index, experts)


def _built(dtype: torch.dtype, index: torch.dtype, experts: int) -> Call:
    x, indices = (torch.empty(64, n, dtype=d, device="meta") for n, d in ((4096, dtype), (8, index)))
    return bind(dispatch, x, indices, experts)
