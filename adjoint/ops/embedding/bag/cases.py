"""What `embedding_bag` is tested, verified and timed on."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Rebatch, Subject, Workload
from adjoint.core.plan import Call, bind
from adjoint.ops.embedding.bag import embedding_bag, reference
from adjoint.ops.embedding.values import device_ids, device_values, hot_ids, normal_values


def _bag_inputs(
    rows: int, columns: int, bags: int, width: int, offsets: bool, factors: bool, ties: bool = True
) -> Make:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        ids = hot_ids(generator, rows, bags * width, bags * width // 3)
        weight = normal_values(generator, dtype, device, rows, columns)
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
        samples = normal_values(generator, dtype, device, *ids.shape) if factors else None
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
        leaves = [t.detach().requires_grad_() for t in (weight, factors) if t is not None]
        with torch.enable_grad():
            out = reference.embedding_bag(ids, leaves[0], offsets, *leaves[1:], mode=mode)
            return torch.autograd.grad(out, leaves, dout)

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
    untouched = torch.ones(weight.shape[0], dtype=torch.bool, device=ids.device)
    untouched[flat[:begin].long()] = False

    def pairs(whole: Answers, alone: Answers) -> Iterator[tuple[Tensor, Tensor]]:
        for all_of_them, some in zip(whole[0], alone[0], strict=True):
            yield all_of_them[first:], some
        for all_of_them, some in zip(whole[1], alone[1], strict=True):
            if all_of_them.shape == weight.shape:
                yield all_of_them[untouched], some[untouched]
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

SUBJECTS = BAGS

# ----------------------------------------------------------------------------------------- bad calls


def _zeros(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape or (6, 4), device=device)


def _ids(device: torch.device | str, *values: int) -> Tensor:
    return torch.tensor(values or (1, 5, 1), device=device)


def _call(device: torch.device, **options: Any) -> Tensor:
    """Three ids, in two bags unless the offsets say otherwise."""
    options.setdefault("offsets", _ids(device, 0, 2))
    return embedding_bag(_ids(device), _zeros(device), **options)


def _matrix(device: torch.device, *shape: int, **options: Any) -> Tensor:
    return embedding_bag(_ids(device).view(shape), _zeros(device), **options)


def _weighted(device: torch.device, weights: Tensor, mode: str = "sum") -> Tensor:
    return _call(device, mode=mode, per_sample_weights=weights)


def _with_offsets(*offsets: int, include_last_offset: bool = False) -> Callable[[torch.device], None]:
    def call(device: torch.device) -> None:
        _call(device, offsets=_ids(device, *offsets), include_last_offset=include_last_offset)
        adjoint.check()

    return call


def _with_id(device: torch.device) -> None:
    embedding_bag(_ids(device, 0, 5, -2, 9).view(2, 2), _zeros(device))
    adjoint.check()


BAD_CALLS = (
    BadCall("ids elsewhere", lambda d: embedding_bag(_ids("meta")[None], _zeros(d)), "ids", "meta"),
    BadCall("an id out of range", _with_id, "embedding_bag: ids", "got -2 at position 2 "),
    BadCall("one axis without offsets", lambda d: _matrix(d, 3), "ids", "two axes", "(3,)"),
    BadCall("three axes without offsets", lambda d: _matrix(d, 1, 1, 3), "ids", "(1, 1, 3)"),
    BadCall("two axes with offsets", lambda d: _matrix(d, 1, 3, offsets=_ids(d, 0)), "offsets", "one axis", "(1, 3)"),
    BadCall("offsets with two axes", lambda d: _call(d, offsets=_ids(d, 0)[None]), "offsets", "(1, 1)"),
    BadCall("offsets that descend", _with_offsets(0, 2, 1), "offsets", "descend", "got 1 at position 2 "),
    BadCall("offsets that begin past 0", _with_offsets(1, 2), "begin with 0", "got 1 at position 0 "),
    BadCall("a negative offset", _with_offsets(0, -1, 2), "offsets", "got -1 at position 1 "),
    BadCall("offsets past the end", _with_offsets(0, 2, 4), "exceed", "got 4 at position 2 "),
    BadCall(
        "a last offset past the end", _with_offsets(0, 2, 4, include_last_offset=True), "exceed", "got 4 at position 2 "
    ),
    BadCall(
        "include_last_offset without offsets",
        lambda d: _matrix(d, 1, 3, include_last_offset=True),
        "include_last_offset",
        "none are given",
    ),
    BadCall(
        "include_last_offset with no offset",
        lambda d: _call(d, offsets=_ids(d)[:0], include_last_offset=True),
        "include_last_offset",
        "at least one",
    ),
    BadCall(
        "per_sample_weights of the wrong length",
        lambda d: _weighted(d, _zeros(d, 2)),
        "per_sample_weights",
        "(3,)",
        "(2,)",
    ),
    BadCall(
        "per_sample_weights of the wrong dtype",
        lambda d: _weighted(d, _zeros(d, 3).half()),
        "per_sample_weights",
        "weight",
        "float32",
        "float16",
    ),
    BadCall(
        "per_sample_weights with the mean",
        lambda d: _weighted(d, _zeros(d, 3), mode="mean"),
        "per_sample_weights",
        "'mean'",
    ),
    BadCall(
        "per_sample_weights with the maximum",
        lambda d: _weighted(d, _zeros(d, 3), mode="max"),
        "per_sample_weights",
        "'max'",
    ),
    BadCall("unknown mode", lambda d: _call(d, mode="min"), "mode", "'mean'", "'sum'", "'max'", "'min'"),
    BadCall("padding_idx past the end", lambda d: _call(d, padding_idx=6), "embedding_bag: padding_idx"),
    BadCall("boolean padding_idx", lambda d: _call(d, padding_idx=False), "padding_idx", "False"),
)

# ----------------------------------------------------------------------------------------- workloads


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
        device_ids("zipf", rows, bags * width, device, generator).view(bags, width),
        device_values(dtype, device, generator, rows, columns),
        None,
        None,
    )


def _bag_baseline(mode: str) -> Callable[..., Tensor]:
    def torch_bag(ids: Tensor, weight: Tensor, offsets: Any = None, factors: Any = None) -> Tensor:
        return F.embedding_bag(ids, weight, offsets, mode=mode, per_sample_weights=factors)

    return torch_bag


def _workloads() -> Iterable[Workload]:
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


def built_calls() -> Iterator[tuple[Call, str, bool]]:
    """Every dtype and mode, bags of a matrix and between offsets."""
    for dtype in BAGS[0].dtypes:
        unaligned = dtype in (torch.float64, torch.bfloat16)
        weight = torch.empty(512, 4096, dtype=dtype, device="meta")
        ids = torch.empty(8, 32, dtype=torch.int64, device="meta")
        offsets = torch.empty(8, dtype=torch.int64, device="meta")
        factors = weight.new_empty(8, 32)
        yield bind(embedding_bag, ids, weight, per_sample_weights=factors, mode="sum"), "", unaligned
        for mode in ("sum", "mean", "max"):
            yield bind(embedding_bag, ids, weight, mode=mode), "", unaligned
            yield bind(embedding_bag, ids.flatten(), weight, offsets, mode=mode), "", unaligned
