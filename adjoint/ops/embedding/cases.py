"""The tables, ids and bags the embedding family is tested, verified and timed on."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract.batching import PIECE
from adjoint.contract.cases import Answers, Case, Inputs, Make, Rebatch, Subject, Workload
from adjoint.contract.inputs import each
from adjoint.ops.embedding import reference
from adjoint.ops.embedding.bad_calls import BAD_CALLS
from adjoint.ops.embedding.builds import builds
from adjoint.ops.embedding.embedding import embedding
from adjoint.ops.embedding.embedding_bag import embedding_bag

__all__ = ["BAD_CALLS", "SUBJECTS", "WORKLOADS", "builds"]

# -------------------------------------------------------------------------------------------- lookup


def _values(generator: torch.Generator, dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def hot_ids(generator: torch.Generator, rows: int, count: int, hot: int) -> Tensor:
    """Random ids, `hot` of which are one row, in random order."""
    ids = torch.randint(rows, (count,), generator=generator)
    ids[torch.randperm(count, generator=generator)[:hot]] = rows // 2
    return ids


def _lookup(
    rows: int,
    columns: int,
    shape: tuple[int, ...],
    hot: int = 0,
    ids_dtype: torch.dtype = torch.int64,
    lay: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda ids, weight: (ids, weight),
) -> Make:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        count = torch.Size(shape).numel()
        ids = hot_ids(generator, rows, count, hot).view(shape).to(ids_dtype).to(device)
        return lay(ids, _values(generator, dtype, device, rows, columns))

    return make


def _strided(ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.stack((ids, ids), -1)[..., 0].T, weight.T.contiguous().T


_LOOKUPS = (
    Case("few tokens", _lookup(7, 6, (2, 5))),
    Case("a hot row", _lookup(40, 48, (80,), hot=45, ids_dtype=torch.int32)),
    Case("strided", _lookup(8, 19, (3, 4), lay=_strided)),
    Case("two digits", _lookup(600, 3, (20,))),
    Case("wide", _lookup(5, 144, (6,))),
    Case("one of each", _lookup(1, 1, (1,))),
    Case("no axes", _lookup(4, 3, ())),
    Case("no tokens", _lookup(6, 4, (0,))),
    Case("three levels", _lookup(300, 40, (40000,), hot=35000), heavy=True),
    Case("a vocabulary", _lookup(20000, 1024, (4096,), hot=500), heavy=True),
)


def _with_other_tokens(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    """Tokens of even rows alone; and among many tokens of one row that nobody compares."""
    ids, weight = inputs
    flat, gradient = ids.reshape(-1), upstream[0].reshape(-1, weight.shape[1])
    keep = flat % 2 == 0
    rows = torch.arange(weight.shape[0], device=ids.device) % 2 == 0

    def pairs(whole: Answers, alone: Answers) -> Iterator[tuple[Tensor, Tensor]]:
        for all_of_them, some in zip(whole[0], alone[0], strict=True):
            yield all_of_them.reshape(-1, weight.shape[1])[keep], some[: int(keep.sum())]
        for all_of_them, some in zip(whole[1], alone[1], strict=True):
            yield all_of_them[rows], some[rows]

    yield Rebatch("tokens of even rows alone", (flat[keep], weight), (gradient[keep],), pairs)
    if weight.shape[0] > 1:
        more = flat.new_full((70,), 1)
        gradients = torch.cat((gradient[keep], torch.ones_like(gradient[:1]).expand(70, -1))) if len(flat) else None
        if gradients is not None:
            yield Rebatch("among other tokens", (torch.cat((flat[keep], more)), weight), (gradients,), pairs)


def _columns(arguments: Inputs, outputs: tuple[Tensor, ...]) -> Iterator[tuple[Inputs, tuple[Tensor, ...]]]:
    """Pieces of columns: every column is a problem of its own; ids belong to all of them."""
    width = outputs[0].shape[-1]
    largest = max(tensor.numel() for tensor in (*arguments, *outputs) if tensor is not None)
    step = max(1, PIECE * width // max(1, largest))

    for begin in range(0, width, step):

        def part(tensor: Tensor, begin: int = begin) -> Tensor:
            return tensor[..., begin : begin + step] if tensor.is_floating_point() else tensor

        yield each(part, arguments), tuple(map(part, outputs))


def _narrow_sums(dtype: torch.dtype) -> torch.dtype:
    """A type too narrow to add values of a dtype in."""
    return {torch.float64: torch.float32, torch.float16: torch.float16}.get(dtype, torch.bfloat16)


def _mistake(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Answers]:
    """A right lookup and a wrong gradient: `change(gradient, ids, weight)`."""

    def answer(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
        ids, weight = inputs
        gradient = upstream[0].reshape(-1, weight.shape[1])
        return (reference.embedding(ids, weight),), (change(gradient, ids.reshape(-1).long(), weight).to(weight.dtype),)

    return answer


def _added_narrowly(gradient: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    narrow = _narrow_sums(weight.dtype)
    total = torch.zeros(weight.shape, dtype=narrow, device=weight.device)
    for token in range(min(len(ids), 2000)):
        total[ids[token]] += gradient[token].to(narrow)
    return total


_LOOKUP_MISTAKES = {
    "zero output": lambda upstream, inputs: (
        (torch.zeros_like(upstream[0]),),
        (torch.zeros_like(inputs[1]),),
    ),
    "repeated ids overwrite": _mistake(lambda g, ids, w: torch.zeros_like(w).index_copy(0, ids, g)),
    "the last token dropped": _mistake(
        lambda g, ids, w: torch.zeros_like(w).double().index_add(0, ids[:-1], g[:-1].double())
    ),
    "the next row": _mistake(
        lambda g, ids, w: torch.zeros_like(w).double().index_add(0, (ids + 1) % w.shape[0], g.double())
    ),
    "sums in a narrow type": _mistake(_added_narrowly),
    "rows exchanged in the lookup": lambda upstream, inputs: (
        (reference.embedding(inputs[0], inputs[1].flip(0)),),
        (reference.embedding_backward(upstream[0].double(), inputs[0], inputs[1].double()).to(inputs[1].dtype),),
    ),
}

EMBEDDING = Subject(
    name="embedding",
    function=embedding,
    inputs=("ids", "weight"),
    reference=lambda ids, weight: (reference.embedding(ids, weight),),
    reference_backward=lambda dout, ids, weight: (reference.embedding_backward(dout, ids, weight),),
    cases=_LOOKUPS,
    mistakes=_LOOKUP_MISTAKES,
    plans=("triton.gather+triton.sequential", "eager.gather+eager.sequential"),
    batched=("ids",),
    rebatched=_with_other_tokens,
    pieces=_columns,
)


def _some_wrong(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    """Ids below 0, past the last row and past 2^31, and many of the padding row."""
    ids = hot_ids(generator, 9, 60, 40)
    ids[[3, 30, 59]] = torch.tensor([-1, 9, 2**31 + 4])
    return ids.to(device), _values(generator, dtype, device, 9, 7)


PADDED = Subject(
    name="embedding[padding]",
    function=embedding,
    keywords={"padding_idx": 4, "out_of_range": "zero"},
    inputs=("ids", "weight"),
    reference=lambda ids, weight: (reference.embedding(ids, weight),),
    reference_backward=lambda dout, ids, weight: (reference.embedding_backward(dout, ids, weight, padding=4),),
    cases=(Case("ids out of range", _some_wrong),),
    mistakes={"padding has a gradient": _mistake(lambda g, ids, w: reference.embedding_backward(g, ids, w))},
    dtypes=(torch.float32, torch.bfloat16),  # not float64: finite differences see what padding hides
    batched=("ids",),
    rebatched=_with_other_tokens,
    pieces=_columns,
)

# ---------------------------------------------------------------------------------------------- bags


def _bag_inputs(
    rows: int, columns: int, bags: int, width: int, offsets: bool, factors: bool, ties: bool = True
) -> Make:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        ids = hot_ids(generator, rows, bags * width, bags * width // 3)
        weight = _values(generator, dtype, device, rows, columns)
        if ties:  # multiples of one half: entries of a bag are often equal, and the first of them must win
            weight = (weight * 2).round() / 2
        bounds = None
        if offsets:
            bounds = torch.randint(bags * width + 1, (bags,), generator=generator).sort().values
            bounds[0] = 0
            bounds[bags // 2] = bounds[bags // 2 - 1]  # an empty bag at least
            bounds = bounds.sort().values.to(device)
        else:
            ids = ids.view(bags, width)
        samples = _values(generator, dtype, device, *ids.shape) if factors else None
        return ids.to(device), weight, bounds, samples

    return make


def _bag_cases(offsets: bool, factors: bool) -> tuple[Case, ...]:
    return (
        Case("small bags", _bag_inputs(6, 5, 4, 3, offsets, factors, ties=False)),
        Case("long bags", _bag_inputs(9, 6, 3, 40, offsets, factors)),
        Case("many bags", _bag_inputs(1000, 64, 600, 20, offsets, factors), heavy=True),
        Case("very long bags", _bag_inputs(50, 33, 5, 1500, offsets, factors), heavy=True),
    )


def _bag_gradients(mode: str) -> Callable[..., tuple[Tensor, ...]]:
    """The reference's gradients, by torch's autograd."""

    def gradients(
        dout: Tensor, ids: Tensor, weight: Tensor, offsets: Tensor | None, factors: Tensor | None
    ) -> tuple[Tensor, ...]:
        own = [t.detach().requires_grad_() for t in (weight, factors) if t is not None]
        with torch.enable_grad():
            out = reference.embedding_bag(ids, own[0], offsets, *own[1:], mode=mode)
            return torch.autograd.grad(out, own, dout)

    return gradients


def _bag_subset(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    """The last bags alone: their sums keep their bits, and so do rows and entries only they refer to."""
    ids, weight, offsets, factors = inputs
    bags = upstream[0].shape[0]
    first = bags // 2
    if offsets is None:
        begin = first * ids.shape[1]
        rest: Inputs = (ids[first:], weight, None, None if factors is None else factors[first:])
    else:
        begin = int(offsets[first])
        rest = (ids[begin:], weight, offsets[first:] - begin, None if factors is None else factors[begin:])
    flat = ids.reshape(-1)
    own = torch.ones(weight.shape[0], dtype=torch.bool, device=ids.device)
    own[flat[:begin].long()] = False

    def pairs(whole: Answers, alone: Answers) -> Iterator[tuple[Tensor, Tensor]]:
        for all_of_them, some in zip(whole[0], alone[0], strict=True):
            yield all_of_them[first:], some
        for all_of_them, some in zip(whole[1], alone[1], strict=True):
            if all_of_them.shape == weight.shape:
                yield all_of_them[own], some[own]
            else:
                yield all_of_them.reshape(-1)[begin:], some.reshape(-1)

    yield Rebatch("the last bags alone", rest, (upstream[0][first:],), pairs)


def _bags_resized(inputs: Inputs, upstream: tuple[Tensor, ...], size: int) -> tuple[Inputs, tuple[Tensor, ...]]:
    """`size` bags: the same ones over again."""
    ids, weight, offsets, factors = inputs
    copies = -(-size // upstream[0].shape[0])
    dout = torch.cat([upstream[0]] * copies)[:size].contiguous()

    def repeated(tensor: Tensor) -> Tensor:
        return torch.cat([tensor] * copies)

    many = None if factors is None else repeated(factors)
    if offsets is None:
        return (repeated(ids)[:size], weight, None, None if many is None else many[:size]), (dout,)
    starts = torch.cat([offsets + copy * len(ids) for copy in range(copies)])[:size]
    return (repeated(ids), weight, starts, many), (dout,)


def _bag_mistakes(mode: str) -> dict[str, Callable[..., Answers]]:
    other = {"sum": "mean", "mean": "sum", "max": "sum"}[mode]

    def answered(forward: str, backward: str, flipped: bool = False) -> Callable[..., Answers]:
        def answer(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
            ids, weight, offsets, factors = inputs
            samples = None if factors is None else factors.double()
            dout = upstream[0].double()
            out = reference.embedding_bag(ids, weight.double(), offsets, samples, mode=forward)
            gradients = _bag_gradients(backward)(
                dout.flip(0) if flipped else dout, ids, weight.double(), offsets, samples
            )
            return (out.to(weight.dtype),), tuple(g.to(weight.dtype) for g in gradients)

        return answer

    return {
        "zero output": lambda upstream, inputs: (
            tuple(torch.zeros_like(t) for t in upstream),
            tuple(torch.zeros_like(t) for t in (inputs[1], inputs[3]) if t is not None),
        ),
        f"forward is the {other}": answered(other, mode),
        f"backward is that of the {other}": answered(mode, other),
        "bags exchanged": answered(mode, mode, flipped=True),
    }


def _bag_subject(name: str, mode: str, offsets: bool, factors: bool) -> Subject:
    return Subject(
        name=f"embedding_bag[{name}]",
        function=embedding_bag,
        keywords={"mode": mode},
        inputs=("ids", "weight", "offsets", "per_sample_weights"),
        reference=lambda ids, weight, bounds, samples: (
            reference.embedding_bag(ids, weight, bounds, samples, mode=mode),
        ),
        reference_backward=_bag_gradients(mode),
        cases=_bag_cases(offsets, factors),
        mistakes=_bag_mistakes(mode),
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16)
        if factors
        else (torch.float64, torch.bfloat16),
        batched=("ids", "offsets", "per_sample_weights"),
        resized=_bags_resized,
        rebatched=_bag_subset,
    )


BAGS = (
    _bag_subject("sum", "sum", offsets=False, factors=True),
    _bag_subject("mean", "mean", offsets=True, factors=False),
    _bag_subject("max", "max", offsets=True, factors=False),
)

SUBJECTS = (EMBEDDING, PADDED, *BAGS)

# ----------------------------------------------------------------------------------------- workloads


def _device_ids(kind: str, rows: int, count: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Uniform, zipf (rows in random order of frequency), or with half or all of the tokens one row."""
    names = torch.randperm(rows, generator=generator)
    if kind == "zipf":
        weights = 1 / torch.arange(1, rows + 1, dtype=torch.float64)
        return names[torch.multinomial(weights, count, replacement=True, generator=generator)].to(device)
    ids = torch.randint(rows, (count,), generator=generator)
    hot = {"uniform": 0, "half one token": count // 2, "all one token": count}[kind]
    ids[torch.randperm(count, generator=generator)[:hot]] = names[0]
    return ids.to(device)


def _on_device(dtype: torch.dtype, device: torch.device, generator: torch.Generator, *shape: int) -> Tensor:
    own = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
    return torch.randn(shape, dtype=dtype, device=device, generator=own)


def _table(rows: int, columns: int, count: int, kind: str) -> Make:
    return lambda dtype, device, generator: (
        _device_ids(kind, rows, count, device, generator),
        _on_device(dtype, device, generator, rows, columns),
    )


def _index_add(upstream: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
    ids, weight = inputs
    return (torch.zeros_like(weight).index_add_(0, ids, upstream[0]),)


_ROWS: tuple[tuple[int, int, int, torch.dtype, str], ...] = (
    (151936, 2048, 8192, torch.float32, "zipf"),
    (151936, 2048, 32768, torch.float32, "zipf"),
    (151936, 4096, 32768, torch.bfloat16, "uniform"),
    (151936, 4096, 32768, torch.bfloat16, "half one token"),
    (151936, 4096, 32768, torch.bfloat16, "all one token"),
    (248320, 2048, 32768, torch.bfloat16, "zipf"),
    (248320, 4096, 65536, torch.bfloat16, "zipf"),
)


def _sparse_reference(dout: Tensor, ids: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The rows that occur, ascending."""
    rows, which = ids.unique(return_inverse=True)
    return (dout.new_zeros(len(rows), dout.shape[1]).index_add_(0, which, dout),)


_SPARSE = Subject(
    name="embedding[sparse]",
    function=embedding,
    keywords={"sparse": True},
    inputs=("ids", "weight"),
    reference=EMBEDDING.reference,
    reference_backward=_sparse_reference,
    cases=(),
    batched=("ids",),
)


def _coalesced(upstream: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
    """What torch's sparse gradient is worth to an optimizer: its rows, each once."""
    ids, weight = inputs
    return (torch.sparse_coo_tensor(ids[None], upstream[0], weight.shape, check_invariants=False).coalesce().values(),)


def _torch_into_a_buffer() -> Callable[[tuple[Tensor, ...], Inputs], tuple[Tensor, ...]]:
    """torch's own backward, without the cost of new memory."""
    buffers: dict[torch.Size, Tensor] = {}

    def gradients(upstream: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
        ids, weight = inputs
        if weight.shape not in buffers:
            buffers[weight.shape] = torch.empty_like(weight)
        out = buffers[weight.shape]
        return (torch.ops.aten.embedding_dense_backward.out(upstream[0], ids, weight.shape[0], -1, False, out=out),)

    return gradients


def _timed_bag(subject: Subject) -> Subject:
    """The subject with torch's own float64 functions as its reference: ours is made for reading, bag by bag."""
    bag = _bag_baseline(subject.keywords["mode"])

    def backward(dout: Tensor, ids: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        table = weight.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(bag(ids, table, *rest), table, dout)

    return replace(subject, reference=lambda *inputs: (bag(*inputs),), reference_backward=backward)


def _bag_table(rows: int, columns: int, bags: int, width: int) -> Make:
    return lambda dtype, device, generator: (
        _device_ids("zipf", rows, bags * width, device, generator).view(bags, width),
        _on_device(dtype, device, generator, rows, columns),
        None,
        None,
    )


def _bag_baseline(mode: str) -> Callable[..., Tensor]:
    def torch_bag(ids: Tensor, weight: Tensor, offsets: Any = None, factors: Any = None) -> Tensor:
        return F.embedding_bag(ids, weight, offsets, mode=mode, per_sample_weights=factors)

    return torch_bag


def _workloads() -> Iterable[Workload]:
    for rows, columns, count, dtype, kind in _ROWS:
        size = columns * dtype.itemsize
        yield Workload(
            f"embedding {rows}×{columns}, {count} tokens, {str(dtype).removeprefix('torch.')}, {kind}",
            EMBEDDING,
            _table(rows, columns, count, kind),
            2 * count * size,
            (count + rows) * size,
            lambda ids, weight: F.embedding(ids, weight),
            dtype=dtype,
            compile=False,
            deterministic=True,
            others={"index_add_": _index_add},
            devices=("cuda",),
        )
    for rows in (100_000, 10_000_000):
        columns, count = 1024, 32768
        yield Workload(
            f"embedding[sparse] {rows}×{columns}, {count} tokens, uniform",
            _SPARSE,
            _table(rows, columns, count, "uniform"),
            2 * count * columns * 2,
            2 * count * columns * 2,
            None,
            compile=False,
            directions=("backward",),
            others={"torch, coalesced": _coalesced},
            devices=("cuda",),
        )
    rows, columns, count = 151936, 1024, 8192
    yield Workload(
        f"embedding {rows}×{columns}, {count} tokens, float32, uniform",
        EMBEDDING,
        _table(rows, columns, count, "uniform"),
        2 * count * columns * 4,
        (count + rows) * columns * 4,
        lambda ids, weight: F.embedding(ids, weight),
        dtype=torch.float32,
        compile=False,
        others={"torch, into a buffer": _torch_into_a_buffer()},
        devices=("cpu",),
    )
    rows, columns, bags, width = 1_000_000, 128, 16384, 32
    for subject in BAGS:
        mode = subject.keywords["mode"]
        # torch has no bfloat16 gradient of the maximum.
        dtype = torch.float32 if mode == "max" else torch.bfloat16
        size = columns * dtype.itemsize
        yield Workload(
            f"embedding_bag[{mode}] {rows}×{columns}, {bags} bags of {width}, {str(dtype).removeprefix('torch.')}",
            _timed_bag(subject),
            _bag_table(rows, columns, bags, width),
            bags * (width + 1) * size,
            (bags + rows) * size,
            _bag_baseline(mode),
            dtype=dtype,
            compile=False,
            devices=("cuda",),
        )


WORKLOADS = tuple(_workloads())
