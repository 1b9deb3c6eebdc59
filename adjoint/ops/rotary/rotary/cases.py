"""What `rotary` is tested, verified and timed on."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjoint.contract.batching import PIECE
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Rebatch, Subject, Workload
from adjoint.contract.forms import Form
from adjoint.contract.inputs import each
from adjoint.contract.mistakes import answers, narrow_arithmetic, zeros
from adjoint.core.plan import Call, bind
from adjoint.ops.rotary.rotary import reference, rotary

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


# ------------------------------------------------------------------------------------------------- cases


def _case(
    name: str, shape: tuple[int, int, int, int, int], table: Callable[[int, int], tuple[int, ...]],
    lay: Callable[[Tensor], Tensor] = lambda x: x, lay_table: Callable[[Tensor], Tensor] = lambda x: x,
    table_dtype: torch.dtype | None = None,
) -> Case:  # fmt: skip
    """A case of heads with sizes [batch, time, heads, key heads, D]. The numbers in its tables belong to no angles."""
    batch, time, heads, key_heads, size = shape

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        def fill(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=_F64)

        kind = dtype if table_dtype is None or dtype == _F64 else table_dtype
        tokens = [lay(fill(batch, time, n, size)).to(dtype) if n else None for n in (heads, key_heads)]
        tables = [lay_table(fill(*table(batch, time))).to(kind) for _ in range(2)]
        return each(lambda x: x.to(device), (*tokens, *tables))

    return Case(name, make)


def _packed(x: Tensor) -> Tensor:
    """Heads as a slice of a projection that contains other heads as well."""
    return torch.cat((x + 1, x, x - 1), 2)[:, :, x.shape[2] : 2 * x.shape[2]]


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _every_other(x: Tensor) -> Tensor:
    return torch.stack((x, x + 1), -1)[..., 0]


def _cases(rotary_dim: int, size: int) -> tuple[Case, ...]:
    """Cases of layouts and sizes, for a number of rotated columns and a number of all columns."""
    pairs = rotary_dim // 2
    return (
        _case("tokens", (2, 5, 3, 1, size), lambda b, t: (t, rotary_dim)),
        _case("half as wide tables, by batch row", (2, 3, 4, 2, size), lambda b, t: (b, t, pairs)),
        _case("one batch row of tables, float32", (3, 4, 2, 2, size), lambda b, t: (1, t, pairs), table_dtype=_F32),
        _case("past one tile", (1, 130, 5, 3, size), lambda b, t: (t, rotary_dim), table_dtype=_F32),
        _case("one token of many rows", (37, 1, 4, 1, size), lambda b, t: (b, t, rotary_dim)),
        _case("slices of a projection", (2, 5, 3, 1, size), lambda b, t: (t, rotary_dim), _packed),
        _case("heads before tokens", (2, 5, 3, 2, size), lambda b, t: (t, pairs), _heads_first),
        _case("every other column", (2, 5, 3, 2, size), lambda b, t: (t, pairs), _every_other, _every_other),
        _case("tables of one row, expanded", (2, 5, 3, 2, size), lambda b, t: (b, 1, pairs), lay_table=_expanded),
        _case("no key heads", (2, 5, 3, 0, size), lambda b, t: (t, rotary_dim)),
        _case("no tokens", (2, 0, 3, 1, size), lambda b, t: (t, rotary_dim)),
    )


def _expanded(table: Tensor) -> Tensor:
    return table.expand(-1, 5, -1)


# ----------------------------------------------------------------------------------------------- batches


def _cut(tensors: Inputs, part: Callable[[Tensor, int], Tensor]) -> Inputs:
    """Cuts tokens along axis 1 of heads, and along the last axis but one of tables."""
    return each(lambda x: part(x, 1 if x.dim() == 4 else x.dim() - 2), tensors)


def _resized(inputs: Inputs, upstream: tuple[Tensor, ...], size: int) -> tuple[Inputs, tuple[Tensor, ...]]:
    """The same inputs with another number of tokens."""

    def fit(x: Tensor, axis: int) -> Tensor:
        copies = -(-size // max(1, x.shape[axis]))
        return torch.cat([x] * copies, axis).narrow(axis, 0, size).contiguous()

    return _cut(inputs, fit), _cut(upstream, fit)


def _rebatched(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    """The first tokens, the last one, and the last batch row alone."""
    batch, time = inputs[0].shape[:2]
    for begin, length in ((0, (time + 1) // 2), (time - 1, 1)) if time else ():

        def tokens(x: Tensor, axis: int = 1, begin: int = begin, length: int = length) -> Tensor:
            return x.narrow(axis, begin, length)

        yield Rebatch(f"tokens {begin}+{length}", _cut(inputs, tokens), _cut(upstream, tokens), _pairs(tokens))

    def last(x: Tensor) -> Tensor:
        return x[-1:] if x.dim() == 4 or (x.dim() == 3 and x.shape[0] == batch) else x

    yield Rebatch("the last row", each(last, inputs), tuple(map(last, upstream)), _pairs(last))


def _pairs(part: Callable[[Tensor], Tensor]) -> Callable[[Answers, Answers], Iterable[tuple[Tensor, Tensor]]]:
    def pairs(whole: Answers, alone: Answers) -> Iterator[tuple[Tensor, Tensor]]:
        for all_of, one_of in zip(whole, alone, strict=True):
            yield from zip(one_of, map(part, all_of), strict=True)

    return pairs


def _pieces(arguments: Inputs, outputs: tuple[Tensor, ...]) -> Iterator[tuple[Inputs, tuple[Tensor, ...]]]:
    time, largest = outputs[0].shape[1], max(x.numel() for x in outputs)
    step = max(1, PIECE * time // max(1, largest))
    for begin in range(0, time, step):

        def part(x: Tensor, axis: int, begin: int = begin) -> Tensor:
            return x.narrow(axis, begin, min(step, time - begin))

        yield _cut(arguments, part), _cut(outputs, part)


# ---------------------------------------------------------------------------------------------- subjects


def _forward(rotary_dim: int, interleaved: bool) -> Callable[..., tuple[Tensor, ...]]:
    def forward(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return tuple(reference.rotate(x, cos, sin, rotary_dim, interleaved) for x in (q, k) if x is not None)

    return forward


def _backward(rotary_dim: int, interleaved: bool) -> Callable[..., tuple[Tensor, ...]]:
    """The reference of the gradients, which takes upstream gradients, then q, k, cos and sin."""

    def backward(*arguments: Any) -> tuple[Tensor, ...]:
        *upstream, _q, _k, cos, sin = arguments
        return tuple(reference.rotate_back(dy, cos, sin, rotary_dim, interleaved) for dy in upstream)

    return backward


Formula = Callable[..., tuple[Tensor, ...]]


def _wrong(make: Any, forward: Formula, backward: Formula) -> Callable[..., Answers]:
    """A mistake that `answers` makes, for heads only, because tables have no gradients."""

    def answer(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
        *heads, cos, sin = inputs

        def tables(like: Tensor) -> tuple[Tensor, Tensor]:
            return cos.to(like.dtype), sin.to(like.dtype)

        def of_heads(*x: Tensor) -> tuple[Tensor, ...]:
            return forward(*x, *tables(x[0]))

        def of_upstream(*x: Tensor) -> tuple[Tensor, ...]:
            return backward(*x, *tables(x[0]))

        return make(of_heads, of_upstream)(upstream, tuple(heads))  # type: ignore[no-any-return]

    return answer


def _mistakes(rotary_dim: int, interleaved: bool) -> dict[str, Callable[..., Answers]]:
    right, back = _forward(rotary_dim, interleaved), _backward(rotary_dim, interleaved)

    def changed(change: Callable[..., Any]) -> Formula:
        """The forward with other tables, or with the tables in another order."""
        return lambda q, k, cos, sin: right(q, k, *change(cos, sin))

    def changed_back(change: Callable[..., Any]) -> Formula:
        return lambda *arguments: back(*arguments[:-2], *change(*arguments[-2:]))

    def as_forward(*arguments: Tensor) -> tuple[Tensor, ...]:
        *upstream, _q, _k, cos, sin = arguments
        return right(*upstream, cos, sin)

    def halves_swapped(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return cos, sin.roll(sin.shape[-1] // 2, -1) if not interleaved else sin.unflatten(-1, (-1, 2)).flip(
            -1
        ).flatten(-2)

    def later(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return cos.roll(1, -2), sin.roll(1, -2)

    def keys_as_they_are(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return right(q, k, cos, sin)[0], k

    return {
        "zero output": lambda upstream, inputs: zeros(upstream, inputs[:2]),
        "narrow arithmetic": _wrong(narrow_arithmetic, right, back),
        "the other pairs": _wrong(
            answers, _forward(rotary_dim, not interleaved), _backward(rotary_dim, not interleaved)
        ),
        "the other direction": _wrong(answers, changed(lambda cos, sin: (cos, -sin)), as_forward),
        "cos and sin exchanged": _wrong(answers, changed(lambda cos, sin: (sin, cos)), back),
        "the table of the token before": _wrong(answers, changed(later), changed_back(later)),
        "fewer columns": _wrong(answers, _narrower(right, rotary_dim), _narrower(back, rotary_dim)),
        "keys as they are": _wrong(answers, keys_as_they_are, back),
        "the adjoint with its own column's sin": _wrong(answers, right, changed_back(halves_swapped)),
    }


def _narrower(function: Formula, rotary_dim: int) -> Formula:
    """The same function, except that the last rotated column is copied."""

    def narrower(*arguments: Tensor) -> tuple[Tensor, ...]:
        results = function(*arguments)
        return tuple(
            torch.cat((y[..., : rotary_dim - 1], x[..., rotary_dim - 1 : rotary_dim], y[..., rotary_dim:]), -1)
            for x, y in zip(arguments, results, strict=False)
        )

    return narrower


_IN_PLACE = Form(
    "in_place",
    lambda inputs: {"in_place": True},
    overwrites=("q", "k"),
    is_differentiable=False,
    names={"rotated_q": "q", "rotated_k": "k"},
)


def _subject(name: str, rotary_dim: int, size: int, interleaved: bool) -> Subject:
    return Subject(
        name=name,
        function=rotary,
        keywords={"rotary_dim": rotary_dim, "interleaved": interleaved},
        inputs=("q", "k", "cos", "sin"),
        constant=("cos", "sin"),
        reference=_forward(rotary_dim, interleaved),
        reference_backward=_backward(rotary_dim, interleaved),
        cases=_cases(rotary_dim, size),
        mistakes=_mistakes(rotary_dim, interleaved),
        batch_axis=1,
        batched=("q", "k"),
        resized=_resized,
        rebatched=_rebatched,
        pieces=_pieces,
        forms=(_IN_PLACE,),
    )


ROTARY = _subject("rotary", 6, 10, False)
INTERLEAVED = _subject("rotary[interleaved]", 6, 10, True)
WHOLE = _subject("rotary[whole heads]", 16, 16, False)

SUBJECTS = (ROTARY, INTERLEAVED, WHOLE)


# --------------------------------------------------------------------------------------------- bad calls


def _arguments(device: torch.device, **others: Any) -> dict[str, Any]:
    """The tensors of a right call, some of them replaced by others."""
    shapes = {"q": (2, 5, 3, 8), "k": (2, 5, 1, 8), "cos": (5, 6), "sin": (5, 6)}
    arguments = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    return arguments | {name: x(device) if callable(x) else x for name, x in others.items()}


def _call(**others: Any) -> Callable[[torch.device], Any]:
    return lambda device: rotary(**_arguments(device, **others))


def _zeros(*shape: int, dtype: torch.dtype = _F32) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


def _tables(*shape: int, dtype: torch.dtype = _F32) -> dict[str, Any]:
    return {"cos": _zeros(*shape, dtype=dtype), "sin": _zeros(*shape, dtype=dtype)}


def _leaf(*shape: int) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.zeros(shape, device=device, requires_grad=True)


def _shared(device: torch.device) -> Any:
    memory = torch.zeros(2, 5, 3, 8, device=device)
    return rotary(**_arguments(device, q=memory, k=memory[:, :, 1:]), in_place=True)


def _rotate_backward(device: torch.device, **others: Any) -> Any:
    given = {"dq": torch.zeros(2, 5, 3, 8, device=device), "dk": torch.zeros(2, 5, 1, 8, device=device)} | others
    table = torch.zeros(5, 6, device=device)
    return torch.ops.adjoint.rotary_backward(given["dq"], given["dk"], table, table, False, 6, 3, 1, 8, 3, "")


BAD_CALLS = (
    BadCall("q without heads", _call(q=_zeros(2, 5, 8)), "q", "[batch, time, heads, D]", "(2, 5, 8)"),
    BadCall("k without heads", _call(k=_zeros(2, 5, 8)), "k", "[batch, time, heads, D]", "(2, 5, 8)"),
    BadCall("k of another batch", _call(k=_zeros(3, 5, 1, 8)), "k", "(2, 5, 1, 8)", "(3, 5, 1, 8)"),
    BadCall("k of other tokens", _call(k=_zeros(2, 4, 1, 8)), "k", "(2, 5, 1, 8)", "(2, 4, 1, 8)"),
    BadCall("k of another width", _call(k=_zeros(2, 5, 1, 6)), "k", "(2, 5, 1, 8)", "(2, 5, 1, 6)"),
    BadCall("k of another dtype", _call(k=_zeros(2, 5, 1, 8, dtype=_F16)), "k", "float32", "float16"),
    BadCall("tables of an odd width", _call(**_tables(5, 5)), "width of cos", "even", "5"),
    BadCall("tables wider than heads", _call(**_tables(5, 10)), "width of cos", "8 columns", "10"),
    BadCall("tables without columns", _call(**_tables(5, 0)), "width of cos", "from 2", "0"),
    BadCall("tables of another width than rotary_dim", _call(rotary_dim=8), "8 columns", "4 pairs", "width of 6"),
    BadCall("an odd rotary_dim", _call(rotary_dim=3), "rotary_dim", "even", "3"),
    BadCall("more columns than a head has", _call(rotary_dim=12), "rotary_dim", "8 columns", "12"),
    BadCall("a negative rotary_dim", _call(rotary_dim=-2), "rotary_dim", "from 2", "-2"),
    BadCall("a rotary_dim that is no number", _call(rotary_dim=4.0), "rotary_dim", "whole number", "float"),
    BadCall("tables of other tokens", _call(**_tables(4, 6)), "cos", "5 tokens", "4"),
    BadCall("tables of another batch", _call(**_tables(3, 5, 6)), "cos", "batch of q, 2", "3"),
    BadCall("tables of one axis", _call(**_tables(6)), "cos", "[time, width]", "(6,)"),
    BadCall("tables of four axes", _call(**_tables(2, 5, 1, 6)), "cos", "[batch, time, width]", "(2, 5, 1, 6)"),
    BadCall("sin of another shape", _call(sin=_zeros(5, 4)), "sin", "shape of cos", "(5, 6)", "(5, 4)"),
    BadCall("sin of another dtype", _call(sin=_zeros(5, 6, dtype=_F64)), "sin", "dtype of cos", "float64"),
    BadCall("tables in float64 for float32", _call(**_tables(5, 6, dtype=_F64)), "cos", "float32", "float64"),
    BadCall("tables in another 16-bit type", _call(
        q=_zeros(2, 5, 3, 8, dtype=_BF16), k=_zeros(2, 5, 1, 8, dtype=_BF16), **_tables(5, 6, dtype=_F16)
    ), "cos", "bfloat16", "float16"),
    BadCall("a gradient for cos", _call(cos=_leaf(5, 6)), "cos", "gradient", "detach"),
    BadCall("a gradient for sin", _call(sin=_leaf(5, 6)), "sin", "gradient", "detach"),
    BadCall("a gradient of a rotation in place", _call(q=_leaf(2, 5, 3, 8), in_place=True), "in_place", "no_grad"),
    BadCall("a gradient for k of one in place", _call(k=_leaf(2, 5, 1, 8), in_place=True), "in_place", "no_grad"),
    BadCall(
        "in place of expanded memory",
        _call(q=lambda d: torch.zeros(2, 5, 1, 8, device=d).expand(2, 5, 3, 8), in_place=True),
        *("q", "in_place", "share memory", "clone"),
    ),
    BadCall("in place of q and k that overlap", _shared, "q", "in_place", "memory with k"),
    BadCall("gradients of different batches", partial(_rotate_backward, dk=torch.zeros(3, 5, 1, 8)), "drotated_k"),
    BadCall("gradients of other heads", partial(_rotate_backward, dq=torch.zeros(2, 5, 2, 8)), "drotated_q", "3, 8"),
    BadCall("no upstream gradient", partial(_rotate_backward, dq=None, dk=None), "drotated_q", "got none"),
)  # fmt: skip


# --------------------------------------------------------------------------------------------- workloads


def _make(
    batch: int, time: int, heads: int, key_heads: int, size: int, rotary_dim: int, table_dtype: torch.dtype
) -> Callable[..., Inputs]:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        own = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
        q, k = (
            torch.randn(batch, time, n, size, dtype=dtype, device=device, generator=own) for n in (heads, key_heads)
        )
        frequencies = 1e7 ** -(torch.arange(0, rotary_dim, 2, device=device) / rotary_dim)
        angles = torch.arange(time, device=device)[:, None] * frequencies
        angles = torch.cat((angles, angles), -1)
        return q, k, angles.cos().to(table_dtype), angles.sin().to(table_dtype)

    return make


def _torch_rotary(rotary_dim: int, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """The op as users write it in torch."""
    cos, sin = cos[:, None], sin[:, None]

    def rotate(x: Tensor) -> Tensor:
        columns, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        first, second = columns.chunk(2, -1)
        rotated = columns * cos + torch.cat((-second, first), -1) * sin
        return torch.cat((rotated.to(x.dtype), rest), -1)

    return rotate(q), rotate(k)


def _timed(rotary_dim: int, size: int, **keywords: Any) -> Subject:
    """The mode that a workload times, with whole heads or a part of them rotated."""
    return Subject(
        name=f"rotary{'[in place]' * bool(keywords)}",
        function=rotary,
        keywords={"rotary_dim": rotary_dim, **keywords},
        inputs=ROTARY.inputs,
        constant=ROTARY.constant,
        reference=_forward(rotary_dim, False),
        reference_backward=_backward(rotary_dim, False),
        cases=_cases(rotary_dim, size),
        batch_axis=1,
        batched=("q", "k"),
        pieces=_pieces,
    )


def _workload(
    tokens: int, heads: int, key_heads: int, size: int, rotary_dim: int, in_place: bool = False,
    table_dtype: torch.dtype = _BF16, **more: Any,
) -> Workload:  # fmt: skip
    """A workload. A rotation reads and writes every column, or in place the rotated ones. It reads tables once."""
    subject = _timed(rotary_dim, size, **({"in_place": True} if in_place else {}))
    itemsize = more.get("dtype", _BF16).itemsize
    columns = rotary_dim if in_place else size
    moved = 2 * tokens * (heads + key_heads) * columns * itemsize + 2 * tokens * rotary_dim * table_dtype.itemsize
    part = "" if rotary_dim == size else f", {rotary_dim} rotated"
    return Workload(
        f"{subject.name} {tokens}×({heads} + {key_heads})×{size}{part}",
        subject,
        _make(1, tokens, heads, key_heads, size, rotary_dim, table_dtype),
        moved,
        moved,
        partial(_torch_rotary, rotary_dim),
        directions=("forward",) if in_place else ("forward", "backward"),
        **more,
    )


WORKLOADS = (
    _workload(32768, 16, 2, 256, 64, peers=("fla_rotary",)),
    _workload(32768, 16, 2, 256, 64, in_place=True, peers=("fla_rotary", "liger_rotary")),
    _workload(32768, 32, 8, 128, 128, peers=("fla_rotary", "liger_rotary")),
    _workload(1024, 16, 2, 256, 64, devices=("cpu",), table_dtype=_F32, dtype=_F32),
)


# ------------------------------------------------------------------------------------------------ builds


def built_calls() -> Iterator[Call]:
    """Calls with the benchmark's heads, every dtype, whole heads, pairs of both kinds, tables of both widths, and in
    place."""
    for dtype, table in ((_BF16, _BF16), (_F16, _F32), (_F32, _F32), (_F64, _F64)):
        yield _built(dtype, table, 256, 64, 64)
    yield _built(_BF16, _F32, 256, 64, 32)
    yield _built(_BF16, _F32, 256, 64, 64, interleaved=True)
    yield _built(_BF16, _F32, 256, 64, 32, interleaved=True)
    yield _built(_BF16, _F32, 256, 64, 64, in_place=True)
    yield _built(_F64, _F32, 256, 64, 64, in_place=True)
    yield _built(_BF16, _F32, 128, 128, 128)
    yield _built(_F32, _F32, 80, 20, 20)
    yield _built(_BF16, _BF16, 1024, 1024, 512)
    yield _built(_BF16, _F32, 256, 64, 64, strided=True)


def _built(
    dtype: torch.dtype, table: torch.dtype, size: int, rotary_dim: int, width: int, strided: bool = False,
    **options: bool,
) -> Call:  # fmt: skip
    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((*shape, 1 + strided), dtype=dtype, device="meta")[..., 0]

    q, k = (empty(1, 64, heads, size, dtype=dtype) for heads in (16, 2))
    cos, sin = (empty(64, width, dtype=table) for _ in range(2))
    return bind(rotary, q, k, cos, sin, rotary_dim=rotary_dim, **options)
