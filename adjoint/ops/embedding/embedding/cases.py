"""What `embedding` is tested, verified and timed on."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint.contract.batching import PIECE
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Rebatch, Subject, Workload
from adjoint.contract.inputs import each
from adjoint.core.errors import Unsupported
from adjoint.core.plan import Call, bind
from adjoint.ops.embedding.embedding import embedding, reference
from adjoint.ops.embedding.values import device_ids, device_values, hot_ids, normal_values


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
        return lay(ids, normal_values(generator, dtype, device, rows, columns))

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
    return ids.to(device), normal_values(generator, dtype, device, 9, 7)


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

SUBJECTS = (EMBEDDING, PADDED)

# ----------------------------------------------------------------------------------------- bad calls

_ROWS, _COLUMNS = 6, 4


def _zeros(device: torch.device | str, *shape: int) -> Tensor:
    return torch.zeros(shape or (_ROWS, _COLUMNS), device=device)


def _ids(device: torch.device | str, *values: int) -> Tensor:
    return torch.tensor(values or (1, 5, 1), device=device)


def _call(device: torch.device, **options: Any) -> Tensor:
    return embedding(_ids(device), _zeros(device), **options)


def _with_id(position: int, value: int, dtype: torch.dtype = torch.int64) -> Callable[[torch.device], None]:
    """A lookup of 300 ids, all right but one."""

    def call(device: torch.device) -> None:
        ids = torch.arange(300, device=device).remainder(_ROWS).to(dtype)
        ids[position] = value
        embedding(ids, _zeros(device))
        adjoint.check()

    return call


def _adjoint(device: torch.device, **options: Any) -> adjoint.Plan:
    plan = adjoint.plan(embedding, _ids(device), _zeros(device), **options).adjoint
    assert plan is not None
    return plan


def _without_workspace(device: torch.device) -> None:
    preference = adjoint.Preference(max_workspace_bytes=0)
    embedding(_ids(device), _zeros(device).requires_grad_(), preference=preference).sum().backward()


_OPERATOR = torch.ops.adjoint

BAD_CALLS = (
    BadCall("boolean ids", lambda d: embedding(_ids(d).bool(), _zeros(d)), "ids", "int64", "bool"),
    BadCall("narrow ids", lambda d: embedding(_ids(d).short(), _zeros(d)), "ids", "int16", ".long()"),
    BadCall("ids elsewhere", lambda d: embedding(_ids("meta"), _zeros(d)), "ids", "weight", "meta"),
    BadCall("a weight with one axis", lambda d: embedding(_ids(d), _zeros(d, 6)), "weight", "(6,)"),
    BadCall("a weight with three axes", lambda d: embedding(_ids(d), _zeros(d, 6, 2, 2)), "weight", "(6, 2, 2)"),
    BadCall("padding_idx past the end", lambda d: _call(d, padding_idx=6), "padding_idx", "-6 to 5", "6"),
    BadCall("padding_idx before the beginning", lambda d: _call(d, padding_idx=-7), "padding_idx", "-7"),
    BadCall("boolean padding_idx", lambda d: _call(d, padding_idx=True), "padding_idx", "integer", "True"),
    BadCall("float padding_idx", lambda d: _call(d, padding_idx=1.0), "padding_idx", "integer", "1.0"),
    BadCall(
        "padding_idx of a weight with one axis",
        lambda d: embedding(_ids(d), _zeros(d, 6), padding_idx=1),
        "weight",
        "(6,)",
    ),
    BadCall(
        "unknown out_of_range", lambda d: _call(d, out_of_range="clamp"), "out_of_range", "'raise'", "'zero'", "'clamp'"
    ),
    BadCall("the first id too large", _with_id(0, 6), "embedding: ids", "got 6 at position 0 ", '"zero"'),
    BadCall("an id in the middle too large", _with_id(150, 1000), "got 1000 at position 150 "),
    BadCall("the last id too large", _with_id(-1, 7, torch.int32), "got 7 at position 299 "),
    BadCall("a negative id", _with_id(3, -1), "got -1 at position 3 "),
    BadCall("a negative id in 32 bits", _with_id(3, -6, torch.int32), "got -6 at position 3 "),
    BadCall("an id that is a row modulo 2^32", _with_id(257, 2**32 + 2), "got 4294967298 at position 257 "),
    BadCall("the smallest id there is", _with_id(40, -(2**63)), f"got {-(2**63)} at position 40 "),
    BadCall(
        "a preference of another type",
        lambda d: _call(d, preference="eager"),
        "preference=",
        "adjoint.Preference",
        "str",
    ),
    BadCall(
        "no workspace allowed",
        _without_workspace,
        "embedding",
        "triton",
        "eager",
        "the preference allows 0",
        error=Unsupported,
    ),
    # Buffers.
    BadCall(
        "a buffer of another shape",
        lambda d: _call(d, accumulate_into=_zeros(d, 6, 5)),
        "accumulate_into",
        "(6, 4)",
        "(6, 5)",
    ),
    BadCall("an integer buffer", lambda d: _call(d, accumulate_into=_zeros(d).int()), "accumulate_into", "int32"),
    BadCall("a buffer elsewhere", lambda d: _call(d, accumulate_into=_zeros("meta")), "accumulate_into", "meta"),
    BadCall(
        "a buffer that requires a gradient",
        lambda d: _call(d, accumulate_into=_zeros(d).requires_grad_()),
        "accumulate_into",
        "gradient",
        "detach",
    ),
    BadCall(
        "a buffer that overlaps itself",
        lambda d: _call(d, accumulate_into=_zeros(d, 1, _COLUMNS).expand(_ROWS, _COLUMNS)),
        "accumulate_into",
        "(0, 1)",
        "overlap",
    ),
    BadCall(
        "a buffer and a sparse gradient",
        lambda d: _call(d, accumulate_into=_zeros(d), sparse=True),
        "accumulate_into",
        "sparse",
    ),
    BadCall(
        "a buffer without axes, to the operator",
        lambda d: _OPERATOR.embedding_backward_into(_zeros(d, 3, 4), _ids(d), torch.zeros((), device=d), -1, ""),
        "accumulate_into",
        "()",
    ),
    # Gradients.
    BadCall(
        "dout of the wrong shape, to the operator",
        lambda d: _OPERATOR.embedding_backward(_zeros(d, 2, 4), _ids(d), _ROWS, -1, ""),
        "embedding",
        "dout",
        "(3,)",
        "(2, 4)",
    ),
    BadCall(
        "dout without axes, to the operator",
        lambda d: _OPERATOR.embedding_backward(torch.zeros((), device=d), _ids(d), _ROWS, -1, ""),
        "dout",
        "()",
    ),
    BadCall(
        "fewer than no rows, to the operator",
        lambda d: _OPERATOR.embedding_backward(_zeros(d, 3, 4), _ids(d), -1, -1, ""),
        "rows",
        "-1",
    ),
    BadCall(
        "dout of the wrong shape, to the plan",
        lambda d: _adjoint(d).run(_zeros(d, 4, 4), _ids(d)),
        "dout",
        "(3,)",
        "(4, 4)",
    ),
    BadCall(
        "dout of another width than the plan's",
        lambda d: _adjoint(d).run(_zeros(d, 3, 5), _ids(d)),
        "not made for",
        "(3, 6, 5)",
        "(3, 6, 4)",
        error=Unsupported,
    ),
    BadCall(
        "dout of another dtype than the plan's",
        lambda d: _adjoint(d).run(_zeros(d, 3, 4).half(), _ids(d)),
        "not made for",
        "float16",
        "float32",
        error=Unsupported,
    ),
    BadCall(
        "out= of the wrong shape, to the adjoint",
        lambda d: _adjoint(d).run(_zeros(d, 3, 4), _ids(d), out=_zeros(d, 5, 4)),
        "out=",
        "dweight",
        "(6, 4)",
        "(5, 4)",
    ),
    BadCall(
        "out= for a gradient whose size is data",
        lambda d: _adjoint(d, sparse=True).run(_zeros(d, 3, 4), _ids(d), out=_zeros(d)),
        "embedding",
        "sparse",
        "out=",
        error=Unsupported,
    ),
)

# ----------------------------------------------------------------------------------------- workloads


def _table(rows: int, columns: int, count: int, kind: str) -> Make:
    return lambda dtype, device, generator: (
        device_ids(kind, rows, count, device, generator),
        device_values(dtype, device, generator, rows, columns),
    )


def _index_add(upstream: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
    ids, weight = inputs
    return (torch.zeros_like(weight).index_add_(0, ids, upstream[0]),)


_TABLES: tuple[tuple[int, int, int, torch.dtype, str], ...] = (
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


def _workloads() -> Iterable[Workload]:
    for rows, columns, count, dtype, kind in _TABLES:
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


WORKLOADS = tuple(_workloads())


def built_calls() -> Iterator[tuple[Call, str, bool]]:
    """Every dtype with ids of both types, and the three forms of the gradient."""
    for dtype in EMBEDDING.dtypes:
        unaligned = dtype in (torch.float64, torch.bfloat16)
        weight = torch.empty(512, 4096, dtype=dtype, device="meta")
        for ids_dtype in (torch.int64, torch.int32):
            yield bind(embedding, torch.empty(256, dtype=ids_dtype, device="meta"), weight), "", unaligned
        ids = torch.empty(256, dtype=torch.int64, device="meta")
        yield bind(embedding, ids, weight, sparse=True), "", unaligned
        yield bind(embedding, ids, weight, accumulate_into=weight.float()), "", unaligned
