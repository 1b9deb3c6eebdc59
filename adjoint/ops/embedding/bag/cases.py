"""What `embedding_bag` is tested, verified and timed on."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Rebatch, Subject, Workload
from adjoint.contract.inputs import each, widened
from adjoint.contract.lookups import BUILT_UNALIGNED, normal_values, zeros
from adjoint.core.arguments import FLOATING
from adjoint.core.plan import Call, bind
from adjoint.core.problem import short
from adjoint.ops.embedding.bag import embedding_bag, reference
from adjoint.ops.embedding.values import bytes_looked_up, device_lookup, few_ids, hot_ids, zero_table


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


def _gradients(bag: Callable[..., Tensor], dout: Tensor, ids: Tensor, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """The gradients of a bag, by torch's autograd."""
    leaves = each(lambda t: t.detach().requires_grad_(t.is_floating_point()), inputs)
    with torch.enable_grad():
        return torch.autograd.grad(bag(ids, *leaves), [t for t in leaves if t is not None and t.requires_grad], dout)


def _bag_subset(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    """The last bags alone. Their sums keep their bits, and so do gradients of rows and entries that only they use."""
    ids, weight, offsets, factors = inputs
    first = upstream[0].shape[0] // 2
    begin = first if offsets is None else int(offsets[first])  # of ids along their first axis
    bounds = None if offsets is None else offsets[first:] - begin
    rest = ids[begin:], weight, bounds, None if factors is None else factors[begin:]
    untouched = torch.ones(weight.shape[0], dtype=torch.bool, device=ids.device)
    untouched[ids[:begin].reshape(-1).long()] = False

    def pairs(whole: Answers, alone: Answers) -> Iterator[tuple[Tensor, Tensor]]:
        for all_of_them, some in zip(whole[0], alone[0], strict=True):
            yield all_of_them[first:], some
        for all_of_them, some in zip(whole[1], alone[1], strict=True):
            if all_of_them.shape == weight.shape:
                yield all_of_them[untouched], some[untouched]
            else:
                yield all_of_them[begin:], some

    yield Rebatch("the last bags alone", rest, (upstream[0][first:],), pairs)


def _bags_resized(inputs: Inputs, upstream: tuple[Tensor, ...], size: int) -> tuple[Inputs, tuple[Tensor, ...]]:
    """The same bags, repeated to `size` of them."""
    ids, weight, offsets, factors = inputs
    copies = -(-size // upstream[0].shape[0])
    entries = size if offsets is None else copies * len(ids)  # along the first axis of ids

    def repeated(tensor: Tensor, length: int) -> Tensor:
        return torch.cat([tensor] * copies)[:length].contiguous()

    starts = None
    if offsets is not None:
        starts = torch.cat([offsets + copy * len(ids) for copy in range(copies)])[:size]
    many = None if factors is None else repeated(factors, entries)
    return (repeated(ids, entries), weight, starts, many), (repeated(upstream[0], size),)


def _bag_mistakes(mode: str) -> dict[str, Callable[..., Answers]]:
    other = {"sum": "mean", "mean": "sum", "max": "sum"}[mode]

    def answered(forward: str, backward: str, flipped: bool = False) -> Callable[..., Answers]:
        def answer(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
            dtype, inputs, dout = inputs[1].dtype, widened(inputs), upstream[0].double()
            gradients = _gradients(_reference(backward), dout.flip(0) if flipped else dout, *inputs)
            return (_reference(forward)(*inputs).to(dtype),), tuple(g.to(dtype) for g in gradients)

        return answer

    return {
        "zero output": zeros,
        f"forward is the {other}": answered(other, mode),
        f"backward is that of the {other}": answered(mode, other),
        "bags exchanged": answered(mode, mode, flipped=True),
    }


def _reference(mode: str) -> Callable[..., Tensor]:
    return partial(reference.embedding_bag, mode=mode)


def _in_tuple(bag: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *inputs: (bag(*inputs),)


def _bag_subject(name: str, mode: str, offsets: bool, factors: bool) -> Subject:
    return Subject(
        name=f"embedding_bag[{name}]",
        function=embedding_bag,
        keywords={"mode": mode},
        inputs=("ids", "weight", "offsets", "per_sample_weights"),
        reference=_in_tuple(_reference(mode)),
        reference_backward=partial(_gradients, _reference(mode)),
        cases=_bag_cases(offsets, factors),
        mistakes=_bag_mistakes(mode),
        dtypes=FLOATING if factors else (torch.float64, torch.bfloat16),
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


def _call(device: torch.device, **options: Any) -> Tensor:
    """A call with three ids, in two bags unless the offsets say otherwise."""
    options.setdefault("offsets", few_ids(device, 0, 2))
    return embedding_bag(few_ids(device), zero_table(device), **options)


def _matrix(device: torch.device, *shape: int, **options: Any) -> Tensor:
    return embedding_bag(few_ids(device).view(shape), zero_table(device), **options)


def _weighted(device: torch.device, weights: Tensor, mode: str = "sum") -> Tensor:
    return _call(device, mode=mode, per_sample_weights=weights)


def _with_offsets(*offsets: int, include_last_offset: bool = False) -> Callable[[torch.device], None]:
    def call(device: torch.device) -> None:
        _call(device, offsets=few_ids(device, *offsets), include_last_offset=include_last_offset)
        adjoint.check()

    return call


def _with_id(device: torch.device) -> None:
    embedding_bag(few_ids(device, 0, 5, -2, 9).view(2, 2), zero_table(device))
    adjoint.check()


BAD_CALLS = (
    BadCall("ids elsewhere", lambda d: embedding_bag(few_ids("meta")[None], zero_table(d)), "ids", "meta"),
    BadCall("an id out of range", _with_id, "embedding_bag: ids", "got -2 at position 2 "),
    BadCall("one axis without offsets", lambda d: _matrix(d, 3), "ids", "two axes", "(3,)"),
    BadCall("three axes without offsets", lambda d: _matrix(d, 1, 1, 3), "ids", "(1, 1, 3)"),
    BadCall("two axes with offsets", lambda d: _matrix(d, 1, 3, offsets=few_ids(d, 0)),
            "offsets", "one axis", "(1, 3)"),
    BadCall("offsets with two axes", lambda d: _call(d, offsets=few_ids(d, 0)[None]), "offsets", "(1, 1)"),
    BadCall("offsets that descend", _with_offsets(0, 2, 1), "offsets", "descend", "got 1 at position 2 "),
    BadCall("offsets that begin past 0", _with_offsets(1, 2), "begin with 0", "got 1 at position 0 "),
    BadCall("a negative offset", _with_offsets(0, -1, 2), "offsets", "got -1 at position 1 "),
    BadCall("offsets past the end", _with_offsets(0, 2, 4), "exceed", "got 4 at position 2 "),
    BadCall("a last offset past the end", _with_offsets(0, 2, 4, include_last_offset=True),
            "exceed", "got 4 at position 2 "),
    BadCall("include_last_offset without offsets", lambda d: _matrix(d, 1, 3, include_last_offset=True),
            "include_last_offset", "none are given"),
    BadCall("include_last_offset with no offset", lambda d: _call(d, offsets=few_ids(d)[:0], include_last_offset=True),
            "include_last_offset", "at least one"),
    BadCall("per_sample_weights of the wrong length", lambda d: _weighted(d, zero_table(d, 2)),
            "per_sample_weights", "(3,)", "(2,)"),
    BadCall("per_sample_weights of the wrong dtype", lambda d: _weighted(d, zero_table(d, 3).half()),
            "per_sample_weights", "weight", "float32", "float16"),
    BadCall("per_sample_weights with the mean", lambda d: _weighted(d, zero_table(d, 3), mode="mean"),
            "per_sample_weights", "'mean'"),
    BadCall("per_sample_weights with the maximum", lambda d: _weighted(d, zero_table(d, 3), mode="max"),
            "per_sample_weights", "'max'"),
    BadCall("unknown mode", lambda d: _call(d, mode="min"), "mode", "'mean'", "'sum'", "'max'", "'min'"),
    BadCall("padding_idx past the end", lambda d: _call(d, padding_idx=6), "embedding_bag: padding_idx"),
    BadCall("boolean padding_idx", lambda d: _call(d, padding_idx=False), "padding_idx", "False"),
)  # fmt: skip

# ----------------------------------------------------------------------------------------- workloads


def _torch_bag(mode: str) -> Callable[..., Tensor]:
    return lambda ids, weight, offsets=None, factors=None: F.embedding_bag(
        ids, weight, offsets, mode=mode, per_sample_weights=factors
    )


def _bag_table(rows: int, columns: int, bags: int, width: int) -> Make:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        ids, table = device_lookup("zipf", rows, columns, bags * width, dtype, device, generator)
        return ids.view(bags, width), table, None, None

    return make


def _workloads() -> Iterable[Workload]:
    rows, columns, bags, width = 1_000_000, 128, 16384, 32
    for subject in BAGS:
        mode = subject.keywords["mode"]
        # torch has no bfloat16 gradient of the maximum.
        dtype = torch.float32 if mode == "max" else torch.bfloat16
        size, in_torch = columns * dtype.itemsize, _torch_bag(mode)
        # The reference is torch's own function in float64, because ours is written for reading, bag by bag.
        yield Workload(
            f"embedding_bag[{mode}] {rows}×{columns}, {bags} bags of {width}, {short(dtype)}",
            replace(subject, reference=_in_tuple(in_torch), reference_backward=partial(_gradients, in_torch)),
            _bag_table(rows, columns, bags, width),
            lambda ids, weight, *_: bytes_looked_up(ids, weight, len(ids)),
            (bags + rows) * size,
            in_torch,
            dtype=dtype,
            devices=("cuda",),
        )


WORKLOADS = tuple(_workloads())


def built_calls() -> Iterator[tuple[Call, str, bool]]:
    """Calls in every dtype and mode, with bags of a matrix and between offsets."""
    for dtype in BAGS[0].dtypes:
        unaligned = dtype in BUILT_UNALIGNED
        weight = torch.empty(512, 4096, dtype=dtype, device="meta")
        ids = torch.empty(8, 32, dtype=torch.int64, device="meta")
        offsets = torch.empty(8, dtype=torch.int64, device="meta")
        factors = weight.new_empty(8, 32)
        yield bind(embedding_bag, ids, weight, per_sample_weights=factors, mode="sum"), "", unaligned
        for mode in ("sum", "mean", "max"):
            yield bind(embedding_bag, ids, weight, mode=mode), "", unaligned
            yield bind(embedding_bag, ids.flatten(), weight, offsets, mode=mode), "", unaligned
