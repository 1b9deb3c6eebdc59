"""Calls of the embeddings that must raise, and what their errors must say."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import adjoint
from adjoint.contract.cases import BadCall
from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.ops.embedding.embedding import embedding
from adjoint.ops.embedding.embedding_bag import embedding_bag

ROWS, COLUMNS = 6, 4
META = torch.device("meta")


def _table(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape or (ROWS, COLUMNS), device=device)


def _ids(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values or (1, 5, 1), device=device)


def _lookup(device: torch.device, **options: Any) -> Tensor:
    return embedding(_ids(device), _table(device), **options)


def _bag(device: torch.device, **options: Any) -> Tensor:
    """Three ids, in two bags unless the offsets say otherwise."""
    options.setdefault("offsets", _ids(device, 0, 2))
    return embedding_bag(_ids(device), _table(device), **options)


def _weighted(device: torch.device, weights: Tensor, mode: str = "sum") -> Tensor:
    return _bag(device, mode=mode, per_sample_weights=weights)


def _with_id(position: int, value: int, dtype: torch.dtype = torch.int64) -> Callable[[torch.device], None]:
    """A lookup of 300 ids, all right but one."""

    def call(device: torch.device) -> None:
        ids = torch.arange(300, device=device).remainder(ROWS).to(dtype)
        ids[position] = value
        embedding(ids, _table(device))
        adjoint.check()

    return call


def _with_offsets(*offsets: int, include_last_offset: bool = False) -> Callable[[torch.device], None]:
    def call(device: torch.device) -> None:
        _bag(device, offsets=_ids(device, *offsets), include_last_offset=include_last_offset)
        adjoint.check()

    return call


def _bag_with_id(device: torch.device) -> None:
    embedding_bag(_ids(device, 0, 5, -2, 9).view(2, 2), _table(device))
    adjoint.check()


def _second_derivative(function: Callable[[Tensor], Tensor], device: torch.device) -> None:
    weight = _table(device).requires_grad_()
    (dweight,) = torch.autograd.grad(function(weight).sum(), weight, create_graph=True)
    dweight.sum().backward()


def _forward_mode(device: torch.device) -> None:
    with forward_ad.dual_level():
        embedding(_ids(device), forward_ad.make_dual(_table(device), _table(device)))


def _plan(device: torch.device, **options: Any) -> adjoint.Plan:
    return adjoint.plan(embedding, _ids(device), _table(device), **options)


def _adjoint(device: torch.device, **options: Any) -> adjoint.Plan:
    plan = _plan(device, **options).adjoint
    assert plan is not None
    return plan


LOOKUPS = (
    BadCall(
        "float ids", lambda d: embedding(_ids(d).float(), _table(d)), ArgumentError, ("embedding", "ids", "float32")
    ),
    BadCall("boolean ids", lambda d: embedding(_ids(d).bool(), _table(d)), ArgumentError, ("ids", "int64", "bool")),
    BadCall("narrow ids", lambda d: embedding(_ids(d).short(), _table(d)), ArgumentError, ("ids", "int16", ".long()")),
    BadCall("ids that are a list", lambda d: embedding([1, 2], _table(d)), ArgumentError, ("ids", "tensor", "list")),  # type: ignore[arg-type]
    BadCall("ids elsewhere", lambda d: embedding(_ids(META), _table(d)), ArgumentError, ("ids", "weight", "meta")),
    BadCall("a weight with one axis", lambda d: embedding(_ids(d), _table(d, 6)), ArgumentError, ("weight", "(6,)")),
    BadCall(
        "a weight with three axes",
        lambda d: embedding(_ids(d), _table(d, 6, 2, 2)),
        ArgumentError,
        ("weight", "(6, 2, 2)"),
    ),
    BadCall(
        "integer weight",
        lambda d: embedding(_ids(d), _table(d).long()),
        ArgumentError,
        ("embedding", "weight", "int64"),
    ),
    BadCall(
        "sparse weight",
        lambda d: embedding(_ids(d), _table(d).to_sparse()),
        ArgumentError,
        ("weight", "dense", "sparse"),
    ),
    BadCall(
        "padding_idx past the end", lambda d: _lookup(d, padding_idx=6), ArgumentError, ("padding_idx", "-6 to 5", "6")
    ),
    BadCall(
        "padding_idx before the beginning", lambda d: _lookup(d, padding_idx=-7), ArgumentError, ("padding_idx", "-7")
    ),
    BadCall(
        "boolean padding_idx", lambda d: _lookup(d, padding_idx=True), ArgumentError, ("padding_idx", "integer", "True")
    ),
    BadCall(
        "float padding_idx", lambda d: _lookup(d, padding_idx=1.0), ArgumentError, ("padding_idx", "integer", "1.0")
    ),
    BadCall(
        "unknown out_of_range",
        lambda d: _lookup(d, out_of_range="clamp"),
        ArgumentError,
        ("out_of_range", "'raise'", "'zero'", "'clamp'"),
    ),
    BadCall(
        "the first id too large", _with_id(0, 6), ArgumentError, ("embedding: ids", "got 6 at position 0 ", '"zero"')
    ),
    BadCall("an id in the middle too large", _with_id(150, 1000), ArgumentError, ("got 1000 at position 150 ",)),
    BadCall("the last id too large", _with_id(-1, 7, torch.int32), ArgumentError, ("got 7 at position 299 ",)),
    BadCall("a negative id", _with_id(3, -1), ArgumentError, ("got -1 at position 3 ",)),
    BadCall("a negative id in 32 bits", _with_id(3, -6, torch.int32), ArgumentError, ("got -6 at position 3 ",)),
    BadCall(
        "an id that is a row modulo 2^32", _with_id(257, 2**32 + 2), ArgumentError, ("got 4294967298 at position 257 ",)
    ),
    BadCall("the smallest id there is", _with_id(40, -(2**63)), ArgumentError, (f"got {-(2**63)} at position 40 ",)),
    BadCall(
        "a preference of another type",
        lambda d: _lookup(d, preference="eager"),
        ArgumentError,
        ("preference=", "adjoint.Preference", "str"),
    ),
    BadCall(
        "no workspace allowed",
        lambda d: torch.autograd.backward(
            embedding(_ids(d), _table(d).requires_grad_(), preference=adjoint.Preference(max_workspace_bytes=0)).sum()
        ),
        Unsupported,
        ("embedding", "triton", "eager", "the preference allows 0"),
    ),
)

ACCUMULATION = (
    BadCall(
        "a buffer of another shape",
        lambda d: _lookup(d, accumulate_into=_table(d, 6, 5)),
        ArgumentError,
        ("accumulate_into", "(6, 4)", "(6, 5)"),
    ),
    BadCall(
        "an integer buffer",
        lambda d: _lookup(d, accumulate_into=_table(d).int()),
        ArgumentError,
        ("accumulate_into", "int32"),
    ),
    BadCall(
        "a buffer elsewhere",
        lambda d: _lookup(d, accumulate_into=_table(META)),
        ArgumentError,
        ("accumulate_into", "meta"),
    ),
    BadCall(
        "a buffer that requires a gradient",
        lambda d: _lookup(d, accumulate_into=_table(d).requires_grad_()),
        ArgumentError,
        ("accumulate_into", "gradient", "detach"),
    ),
    BadCall(
        "a buffer that overlaps itself",
        lambda d: _lookup(d, accumulate_into=_table(d, 1, COLUMNS).expand(ROWS, COLUMNS)),
        ArgumentError,
        ("accumulate_into", "(0, 1)", "overlap"),
    ),
    BadCall(
        "a buffer and a sparse gradient",
        lambda d: _lookup(d, accumulate_into=_table(d), sparse=True),
        ArgumentError,
        ("accumulate_into", "sparse"),
    ),
    BadCall(
        "a buffer without axes, to the operator",
        lambda d: torch.ops.adjoint.embedding_backward_into(
            _table(d, 3, 4), _ids(d), torch.zeros((), device=d), -1, ""
        ),
        ArgumentError,
        ("accumulate_into", "()"),
    ),
)

GRADIENTS = (
    BadCall(
        "dout of the wrong shape, to the operator",
        lambda d: torch.ops.adjoint.embedding_backward(_table(d, 2, 4), _ids(d), ROWS, -1, ""),
        ArgumentError,
        ("embedding", "dout", "(3,)", "(2, 4)"),
    ),
    BadCall(
        "dout without axes, to the operator",
        lambda d: torch.ops.adjoint.embedding_backward(torch.zeros((), device=d), _ids(d), ROWS, -1, ""),
        ArgumentError,
        ("dout", "()"),
    ),
    BadCall(
        "fewer than no rows, to the operator",
        lambda d: torch.ops.adjoint.embedding_backward(_table(d, 3, 4), _ids(d), -1, -1, ""),
        ArgumentError,
        ("rows", "-1"),
    ),
    BadCall(
        "dout of the wrong shape, to the plan",
        lambda d: _adjoint(d).run(_table(d, 4, 4), _ids(d)),
        ArgumentError,
        ("dout", "(3,)", "(4, 4)"),
    ),
    BadCall(
        "dout of another width than the plan's",
        lambda d: _adjoint(d).run(_table(d, 3, 5), _ids(d)),
        Unsupported,
        ("not made for", "(3, 6, 5)", "(3, 6, 4)"),
    ),
    BadCall(
        "dout of another dtype than the plan's",
        lambda d: _adjoint(d).run(_table(d, 3, 4).half(), _ids(d)),
        Unsupported,
        ("not made for", "float16", "float32"),
    ),
    BadCall(
        "out= of the wrong shape",
        lambda d: _plan(d).run(_ids(d), _table(d), out=_table(d, 3, 5)),
        ArgumentError,
        ("out=", "(3, 4)", "(3, 5)"),
    ),
    BadCall(
        "out= of the wrong shape, to the adjoint",
        lambda d: _adjoint(d).run(_table(d, 3, 4), _ids(d), out=_table(d, 5, 4)),
        ArgumentError,
        ("out=", "dweight", "(6, 4)", "(5, 4)"),
    ),
    BadCall(
        "out= for a gradient whose size is data",
        lambda d: _adjoint(d, sparse=True).run(_table(d, 3, 4), _ids(d), out=_table(d)),
        Unsupported,
        ("embedding", "sparse", "out="),
    ),
    BadCall(
        "create_graph=True",
        lambda d: _second_derivative(lambda weight: embedding(_ids(d), weight), d),
        Unsupported,
        ("embedding", "second derivative", "create_graph"),
    ),
    BadCall(
        "create_graph=True through bags",
        lambda d: _second_derivative(lambda weight: embedding_bag(_ids(d)[None], weight), d),
        Unsupported,
        ("embedding_bag", "second derivative", "create_graph"),
    ),
    BadCall(
        "vmap over ids",
        lambda d: torch.func.vmap(lambda ids: embedding(ids, _table(d)))(_ids(d)[:, None]),
        Unsupported,
        ("embedding", "vmap"),
    ),
    BadCall(
        "vmap over bags",
        lambda d: torch.func.vmap(lambda ids: embedding_bag(ids, _table(d)))(_ids(d)[:, None, None]),
        Unsupported,
        ("embedding_bag", "vmap"),
    ),
    BadCall("a forward-mode gradient", _forward_mode, Unsupported, ("embedding", "forward-mode")),
    BadCall(
        "a jvp",
        lambda d: torch.func.jvp(lambda weight: embedding(_ids(d), weight), (_table(d),), (_table(d),)),
        Unsupported,
        ("embedding", "torch.func"),
    ),
)

BAGS = (
    BadCall(
        "float ids in bags",
        lambda d: embedding_bag(_ids(d).float()[None], _table(d)),
        ArgumentError,
        ("ids", "float32"),
    ),
    BadCall(
        "ids of bags elsewhere", lambda d: embedding_bag(_ids(META)[None], _table(d)), ArgumentError, ("ids", "meta")
    ),
    BadCall(
        "an id out of range in a bag",
        _bag_with_id,
        ArgumentError,
        ("embedding_bag: ids", "got -2 at position 2 "),
    ),
    BadCall("one axis without offsets", lambda d: _bag(d, offsets=None), ArgumentError, ("ids", "two axes", "(3,)")),
    BadCall(
        "three axes without offsets",
        lambda d: embedding_bag(_ids(d)[None, None], _table(d)),
        ArgumentError,
        ("ids", "(1, 1, 3)"),
    ),
    BadCall(
        "two axes with offsets",
        lambda d: embedding_bag(_ids(d)[None], _table(d), _ids(d, 0)),
        ArgumentError,
        ("offsets", "one axis", "(1, 3)"),
    ),
    BadCall("offsets with two axes", lambda d: _bag(d, offsets=_ids(d, 0)[None]), ArgumentError, ("offsets", "(1, 1)")),
    BadCall("float offsets", lambda d: _bag(d, offsets=_ids(d, 0).float()), ArgumentError, ("offsets", "float32")),
    BadCall("offsets elsewhere", lambda d: _bag(d, offsets=_ids(META, 0)), ArgumentError, ("offsets", "meta")),
    BadCall(
        "offsets that descend", _with_offsets(0, 2, 1), ArgumentError, ("offsets", "descend", "got 1 at position 2 ")
    ),
    BadCall("offsets that begin past 0", _with_offsets(1, 2), ArgumentError, ("begin with 0", "got 1 at position 0 ")),
    BadCall("a negative offset", _with_offsets(0, -1, 2), ArgumentError, ("offsets", "got -1 at position 1 ")),
    BadCall("offsets past the end", _with_offsets(0, 2, 4), ArgumentError, ("exceed", "got 4 at position 2 ")),
    BadCall(
        "a last offset past the end",
        _with_offsets(0, 2, 4, include_last_offset=True),
        ArgumentError,
        ("exceed", "got 4 at position 2 "),
    ),
    BadCall(
        "include_last_offset without offsets",
        lambda d: embedding_bag(_ids(d)[None], _table(d), include_last_offset=True),
        ArgumentError,
        ("include_last_offset", "none are given"),
    ),
    BadCall(
        "include_last_offset with no offset",
        lambda d: _bag(d, offsets=_ids(d)[:0], include_last_offset=True),
        ArgumentError,
        ("include_last_offset", "at least one"),
    ),
    BadCall(
        "per_sample_weights of the wrong length",
        lambda d: _weighted(d, _table(d, 2)),
        ArgumentError,
        ("per_sample_weights", "(3,)", "(2,)"),
    ),
    BadCall(
        "per_sample_weights of the wrong dtype",
        lambda d: _weighted(d, _table(d, 3).half()),
        ArgumentError,
        ("per_sample_weights", "weight", "float32", "float16"),
    ),
    BadCall(
        "per_sample_weights with the mean",
        lambda d: _weighted(d, _table(d, 3), mode="mean"),
        ArgumentError,
        ("per_sample_weights", "'mean'"),
    ),
    BadCall(
        "per_sample_weights with the maximum",
        lambda d: _weighted(d, _table(d, 3), mode="max"),
        ArgumentError,
        ("per_sample_weights", "'max'"),
    ),
    BadCall(
        "unknown mode", lambda d: _bag(d, mode="min"), ArgumentError, ("mode", "'mean'", "'sum'", "'max'", "'min'")
    ),
    BadCall(
        "padding_idx past the end, in bags",
        lambda d: _bag(d, padding_idx=6),
        ArgumentError,
        ("embedding_bag: padding_idx",),
    ),
    BadCall(
        "boolean padding_idx in bags", lambda d: _bag(d, padding_idx=False), ArgumentError, ("padding_idx", "False")
    ),
)

BAD_CALLS = (*LOOKUPS, *ACCUMULATION, *GRADIENTS, *BAGS)
