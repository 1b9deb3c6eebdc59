"""What `embedding` is tested, verified and timed on."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Rebatch, Subject, Workload
from adjoint.contract.forms import Form, Outcome
from adjoint.contract.lookups import (
    BUILT_UNALIGNED,
    adjoint_of,
    bad_options,
    columns,
    narrow_dtype,
    normal_values,
    zeros,
)
from adjoint.core.errors import Unsupported
from adjoint.core.plan import Call, bind
from adjoint.core.problem import short
from adjoint.ops.embedding.embedding import embedding, reference
from adjoint.ops.embedding.values import ROWS, bytes_looked_up, device_lookup, few_ids, hot_ids, zero_table


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
    """The tokens of even rows alone, and among many tokens of one row, which is not compared."""
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
    if weight.shape[0] > 1 and len(flat):
        more = torch.cat((flat[keep], flat.new_full((70,), 1)))
        gradients = torch.cat((gradient[keep], torch.ones_like(gradient[:1]).expand(70, -1)))
        yield Rebatch("among other tokens", (more, weight), (gradients,), pairs)


def _mistake(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Answers]:
    """A right lookup with a wrong gradient, `change(gradient, ids, weight)`."""

    def answer(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
        ids, weight = inputs
        gradient = upstream[0].reshape(-1, weight.shape[1])
        return (reference.embedding(ids, weight),), (change(gradient, ids.reshape(-1).long(), weight).to(weight.dtype),)

    return answer


def _added_narrowly(gradient: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    narrow = narrow_dtype(weight.dtype)
    total = torch.zeros(weight.shape, dtype=narrow, device=weight.device)
    for token in range(min(len(ids), 2000)):
        total[ids[token]] += gradient[token].to(narrow)
    return total


def _added(gradient: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    return torch.zeros_like(weight).double().index_add(0, ids, gradient.double())


_LOOKUP_MISTAKES = {
    "zero output": zeros,
    "repeated ids overwrite": _mistake(lambda g, ids, w: torch.zeros_like(w).index_copy(0, ids, g)),
    "the last token dropped": _mistake(lambda g, ids, w: _added(g[:-1], ids[:-1], w)),
    "the next row": _mistake(lambda g, ids, w: _added(g, (ids + 1) % w.shape[0], w)),
    "sums in a narrow type": _mistake(_added_narrowly),
    "rows exchanged in the lookup": lambda upstream, inputs: (
        (reference.embedding(inputs[0], inputs[1].flip(0)),),
        (reference.embedding_backward(upstream[0].double(), inputs[0], inputs[1].double()).to(inputs[1].dtype),),
    ),
}

# ------------------------------------------------------------------------------------------- other forms

_FORMER = {
    torch.float64: torch.float32, torch.float32: torch.bfloat16,
    torch.bfloat16: torch.float32, torch.float16: torch.float16,
}  # fmt: skip
"""The dtype of the buffer for the gradient, by that of the table: wider, narrower and the same."""


def _buffer(inputs: Inputs) -> dict[str, Any]:
    """A buffer that contains numbers already."""
    _, weight = inputs
    steps = torch.arange(weight.numel(), device=weight.device).view(weight.shape) % 7 - 3
    return {"accumulate_into": torch.zeros_like(weight, dtype=_FORMER[weight.dtype]).copy_(steps)}


def _zeros(inputs: Inputs) -> dict[str, Any]:
    return {"accumulate_into": torch.zeros_like(inputs[1])}


def _dense(outcome: Outcome) -> tuple[Tensor | None, ...]:
    (gradient,) = outcome.gradients
    if gradient is None or not (gradient.is_sparse and gradient.is_coalesced()):
        raise ValueError("the gradient is not a coalesced sparse one")
    rows = gradient.indices()[0]
    if bool((rows.diff() <= 0).any()):
        raise ValueError(f"the rows of the gradient do not ascend: {rows.tolist()}")
    dense = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    dense[rows] = gradient.values()
    return *outcome.outputs, dense


def _forms(padding: int = -1) -> tuple[Form, ...]:
    def exact(upstream: tuple[Tensor, ...], inputs: Inputs, keywords: Mapping[str, Any]) -> Any:
        (dout,), (ids, weight), former = upstream, inputs, keywords["accumulate_into"]
        sums = former + reference.embedding_backward(dout, ids, weight, padding=padding)
        return (reference.embedding(ids, weight), inputs), (sums, (dout, ids, former))

    def into(name: str, buffer: Callable[[Inputs], dict[str, Any]], **rest: Any) -> Form:
        def results(outcome: Outcome) -> tuple[Tensor | None, ...]:
            """The buffer, if rows without a gradient are unchanged."""
            if outcome.gradients != (None,):
                raise ValueError("a gradient is given that was added to the buffer")
            (ids, weight), sums = outcome.before, outcome.keywords["accumulate_into"]
            is_free = ~torch.isin(torch.arange(len(weight), device=ids.device), ids[ids != padding])
            if not torch.equal(sums[is_free], buffer(outcome.before)["accumulate_into"][is_free]):
                raise ValueError("a row without a gradient is another")
            return *outcome.outputs, sums

        return Form(name, buffer, results=results, **rest)

    return (
        into("accumulate_into zeros", _zeros),
        into("accumulate_into", _buffer, exact=exact),
        Form("sparse", lambda inputs: {"sparse": True}, results=_dense),
    )


EMBEDDING = Subject(
    name="embedding",
    function=embedding,
    inputs=("ids", "weight"),
    reference=lambda ids, weight: (reference.embedding(ids, weight),),
    reference_backward=lambda dout, ids, weight: (reference.embedding_backward(dout, ids, weight),),
    cases=_LOOKUPS,
    mistakes=_LOOKUP_MISTAKES,
    plans=("triton.gather+triton.sequential", "eager.gather+eager.sequential"),
    forms=_forms(),
    batched=("ids",),
    rebatched=_with_other_tokens,
    pieces=columns,
)


def _some_wrong(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    """Ids below 0, past the last row and past 2^31, and many ids of the padding row."""
    ids = hot_ids(generator, 9, 60, 40)
    ids[[3, 30, 59]] = torch.tensor([-1, 9, 2**31 + 4])
    return ids.to(device), normal_values(generator, dtype, device, 9, 7)


PADDED = replace(
    EMBEDDING,
    name="embedding[padding]",
    keywords={"padding_idx": 4, "out_of_range": "zero"},
    reference_backward=lambda dout, ids, weight: (reference.embedding_backward(dout, ids, weight, padding=4),),
    cases=(Case("ids out of range", _some_wrong),),
    mistakes={"padding has a gradient": _mistake(lambda g, ids, w: reference.embedding_backward(g, ids, w))},
    dtypes=(torch.float32, torch.bfloat16),  # not float64: finite differences see what padding hides
    plans=(),
    forms=_forms(padding=4),
)

SUBJECTS = (EMBEDDING, PADDED)

# ----------------------------------------------------------------------------------------- bad calls


def _call(device: torch.device, **options: Any) -> Tensor:
    return embedding(few_ids(device), zero_table(device), **options)


def _into(change: Callable[[Tensor], Tensor] = lambda buffer: buffer, **options: Any) -> Callable[[torch.device], Any]:
    """A call of a lookup with a changed buffer."""
    return lambda device: _call(device, accumulate_into=change(zero_table(device)), **options)


def _differentiate(device: torch.device, **options: Any) -> None:
    embedding(few_ids(device), zero_table(device).requires_grad_(), **options).sum().backward()


def _with_id(position: int, value: int, dtype: torch.dtype = torch.int64) -> Callable[[torch.device], None]:
    """A call of a lookup of 300 ids, all of them right but one."""

    def call(device: torch.device) -> None:
        ids = torch.arange(300, device=device).remainder(ROWS).to(dtype)
        ids[position] = value
        embedding(ids, zero_table(device))
        adjoint.check()

    return call


def _operator(device: torch.device, *shape: int, rows: int = ROWS) -> Tensor:
    return torch.ops.adjoint.embedding_backward(torch.zeros(shape, device=device), few_ids(device), rows, -1, "")


def _operator_into(device: torch.device) -> None:
    buffer = torch.zeros((), device=device)
    torch.ops.adjoint.embedding_backward_into(zero_table(device, 3, 4), few_ids(device), buffer, -1, "")


def _plan(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, out: Any = None, **form: bool) -> Any:
    """Runs the plan of the backward of three ids."""
    return adjoint_of(embedding, few_ids(device), zero_table(device), **form).run(
        zero_table(device, *shape).to(dtype), few_ids(device), out=None if out is None else zero_table(device, *out)
    )


BAD_CALLS = (
    BadCall("boolean ids", lambda d: embedding(few_ids(d).bool(), zero_table(d)), "ids", "int64", "bool"),
    BadCall("narrow ids", lambda d: embedding(few_ids(d).short(), zero_table(d)), "ids", "int16", ".long()"),
    BadCall("ids elsewhere", lambda d: embedding(few_ids("meta"), zero_table(d)), "ids", "weight", "meta"),
    BadCall("a weight with one axis", lambda d: embedding(few_ids(d), zero_table(d, 6)), "weight", "(6,)"),
    BadCall("a weight with three axes", lambda d: embedding(few_ids(d), zero_table(d, 6, 2, 2)), "weight", "(6, 2, 2)"),
    BadCall("padding_idx past the end", lambda d: _call(d, padding_idx=6), "padding_idx", "-6 to 5", "6"),
    BadCall("padding_idx before the beginning", lambda d: _call(d, padding_idx=-7), "padding_idx", "-7"),
    BadCall("boolean padding_idx", lambda d: _call(d, padding_idx=True), "padding_idx", "integer", "True"),
    BadCall("float padding_idx", lambda d: _call(d, padding_idx=1.0), "padding_idx", "integer", "1.0"),
    BadCall("padding_idx of a weight with one axis", lambda d: embedding(few_ids(d), zero_table(d, 6), padding_idx=1),
            "weight", "(6,)"),
    *bad_options("embedding", _differentiate),
    BadCall("the first id too large", _with_id(0, 6), "embedding: ids", "got 6 at position 0 ", '"zero"'),
    BadCall("an id in the middle too large", _with_id(150, 1000), "got 1000 at position 150 "),
    BadCall("the last id too large", _with_id(-1, 7, torch.int32), "got 7 at position 299 "),
    BadCall("a negative id", _with_id(3, -1), "got -1 at position 3 "),
    BadCall("a negative id in 32 bits", _with_id(3, -6, torch.int32), "got -6 at position 3 "),
    BadCall("an id that is a row modulo 2^32", _with_id(257, 2**32 + 2), "got 4294967298 at position 257 "),
    BadCall("the smallest id there is", _with_id(40, -(2**63)), f"got {-(2**63)} at position 40 "),
    # Buffers.
    BadCall("a buffer of another shape", _into(lambda x: x.new_zeros(6, 5)), "accumulate_into", "(6, 4)", "(6, 5)"),
    BadCall("an integer buffer", _into(Tensor.int), "accumulate_into", "int32"),
    BadCall("a buffer elsewhere", _into(lambda x: x.to("meta")), "accumulate_into", "meta"),
    BadCall("a buffer that requires a gradient", _into(Tensor.requires_grad_), "accumulate_into", "gradient", "detach"),
    BadCall("a buffer that overlaps itself", _into(lambda x: x[:1].expand_as(x)),
            "accumulate_into", "(0, 1)", "overlap"),
    BadCall("a buffer and a sparse gradient", _into(sparse=True), "accumulate_into", "sparse"),
    BadCall("a buffer without axes, to the operator", _operator_into, "accumulate_into", "()"),
    # Gradients.
    BadCall("dout of the wrong shape, to the operator", lambda d: _operator(d, 2, 4),
            "embedding", "dout", "(3,)", "(2, 4)"),
    BadCall("dout without axes, to the operator", lambda d: _operator(d), "dout", "()"),
    BadCall("fewer than no rows, to the operator", lambda d: _operator(d, 3, 4, rows=-1), "rows", "-1"),
    BadCall("dout of the wrong shape, to the plan", lambda d: _plan(d, 4, 4), "dout", "(3,)", "(4, 4)"),
    BadCall("dout of another width than the plan's", lambda d: _plan(d, 3, 5),
            "not made for", "(3, 6, 5)", "(3, 6, 4)", error=Unsupported),
    BadCall("dout of another dtype than the plan's", lambda d: _plan(d, 3, 4, dtype=torch.float16),
            "not made for", "float16", "float32", error=Unsupported),
    BadCall("out= of the wrong shape, to the adjoint", lambda d: _plan(d, 3, 4, out=(5, 4)),
            "out=", "dweight", "(6, 4)", "(5, 4)"),
    BadCall("out= for a gradient whose size is data", lambda d: _plan(d, 3, 4, out=(6, 4), sparse=True),
            "embedding", "sparse", "out=", error=Unsupported),
)  # fmt: skip

# ----------------------------------------------------------------------------------------- workloads


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
    (32000, 4096, 16384, torch.bfloat16, "zipf"),
    (151936, 2048, 1024, torch.float32, "zipf"),
)


def _sparse_reference(dout: Tensor, ids: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the rows that occur, in ascending order of the rows."""
    rows, which = ids.unique(return_inverse=True)
    return (dout.new_zeros(len(rows), dout.shape[1]).index_add_(0, which, dout),)


_SPARSE = replace(
    EMBEDDING,
    name="embedding[sparse]",
    keywords={"sparse": True},
    reference_backward=_sparse_reference,
    cases=(),
    mistakes={},
    plans=(),
    forms=(),
    rebatched=None,
    pieces=None,
)


def _coalesced(upstream: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
    """Torch's sparse gradient in the form that an optimizer needs, with each row once."""
    ids, weight = inputs
    return (torch.sparse_coo_tensor(ids[None], upstream[0], weight.shape, check_invariants=False).coalesce().values(),)


def _torch_into_a_buffer() -> Callable[[tuple[Tensor, ...], Inputs], tuple[Tensor, ...]]:
    """Torch's own backward, without the cost of new memory."""
    buffers: dict[torch.Size, Tensor] = {}

    def gradients(upstream: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
        ids, weight = inputs
        if weight.shape not in buffers:
            buffers[weight.shape] = torch.empty_like(weight)
        out = buffers[weight.shape]
        return (torch.ops.aten.embedding_dense_backward.out(upstream[0], ids, weight.shape[0], -1, False, out=out),)

    return gradients


def _workload(rows: int, columns: int, count: int, dtype: torch.dtype, kind: str, **details: Any) -> Workload:
    size = columns * dtype.itemsize
    return Workload(
        f"embedding {rows}×{columns}, {count} tokens, {short(dtype)}, {kind}",
        EMBEDDING,
        partial(device_lookup, kind, rows, columns, count),
        lambda ids, weight: bytes_looked_up(ids, weight, ids.numel()),
        (count + rows) * size,
        lambda ids, weight: F.embedding(ids, weight),
        dtype=dtype,
        **details,
    )


def _workloads() -> Iterable[Workload]:
    for table in _TABLES:
        yield _workload(*table, deterministic=True, others={"index_add_": _index_add}, devices=("cuda",))
    for rows in (100_000, 10_000_000):
        columns, count = 1024, 32768
        yield Workload(
            f"embedding[sparse] {rows}×{columns}, {count} tokens, uniform",
            _SPARSE,
            partial(device_lookup, "uniform", rows, columns, count),
            2 * count * columns * 2,
            2 * count * columns * 2,
            None,
            directions=("backward",),
            others={"torch, coalesced": _coalesced},
            devices=("cuda",),
        )
    others = {"torch, into a buffer": _torch_into_a_buffer()}
    yield _workload(151936, 1024, 8192, torch.float32, "uniform", others=others, devices=("cpu",))


WORKLOADS = tuple(_workloads())


def built_calls() -> Iterator[tuple[Call, str, bool]]:
    """Calls in every dtype with ids of both types, and in the three forms of the gradient."""
    for dtype in EMBEDDING.dtypes:
        unaligned = dtype in BUILT_UNALIGNED
        weight = torch.empty(512, 4096, dtype=dtype, device="meta")
        for ids_dtype in (torch.int64, torch.int32):
            yield bind(embedding, torch.empty(256, dtype=ids_dtype, device="meta"), weight), "", unaligned
        ids = torch.empty(256, dtype=torch.int64, device="meta")
        yield bind(embedding, ids, weight, sparse=True), "", unaligned
        yield bind(embedding, ids, weight, accumulate_into=weight.float()), "", unaligned
