"""Calls of the losses whose bits are recorded before kernels are broken: a mutant that computes the same keeps them."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import adjoint
from adjoint import ArgumentError, Preference
from adjoint.contract.directions import forward
from adjoint.core.kernels import interpreting
from adjoint.core.op.operator import forget
from adjoint.core.plan import bind
from adjoint.core.preference import resolve
from adjoint.core.schedules import Schedules
from adjoint.ops.loss.linear_cross_entropy import plans as linear_plans
from adjoint.verify.checks.bits import same_bits
from tests.mutants.calls import edges

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
EVERY_OPTION = {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 3.0}
MODULES = ("adjoint.ops.loss.kernels", "adjoint.ops.loss.linear_cross_entropy.kernels")
LAUNCHES = ("adjoint.ops.loss.cross_entropy.launches", "adjoint.ops.loss.linear_cross_entropy.blocks")
"""What imports the kernels, in the order of their imports."""

SIZES = {
    "lane_levels": lambda classes: 5,
    "SUM_LEVELS": 2,
    "COUNT_BLOCK": 2,
    "SCALE_BLOCK": 4,
    "SEGMENT": 64,
    "ROW_STEP": 8,
    "BLOCK_BYTES": 16 * 160 * 2,
}
SMALL = {
    "label_block": 8,
    "gradient_block": 128,
    "sum_block": 32,
    "tile_group": 2,
    "combine_rows": 8,
    "round_block": 64,
}
"""Of schedules; what they have beside these does not cut a problem."""

_lookup = Schedules.lookup


def _shrunken() -> list[dict[str, Any]]:
    """The names of every module whose sizes are made small."""
    of_plans = ("adjoint.ops.loss.plans", "adjoint.ops.loss.linear_cross_entropy.plans")
    return [vars(import_module(module)) for module in (*of_plans, *MODULES, *LAUNCHES)]


def shrink() -> None:
    """Few lanes, few sums at once, short segments, small tiles and blocks: few classes and rows fill several."""
    for names in _shrunken():
        names.update({name: value for name, value in SIZES.items() if name in names})
    kernels = import_module(MODULES[1])
    vars(kernels)["tile_of"] = lambda setup: kernels.Tile(32, 16, 16, 4, 1)
    vars(kernels)["tile_of_slopes"] = lambda tile, is_capped: tile._replace(columns=32) if is_capped else tile

    def small(self: Schedules, kernel: str, device: torch.device | None = None) -> dict[str, int]:
        schedule = _lookup(self, kernel, device)
        return (
            schedule | {name: SMALL[name] for name in schedule if name in SMALL}
            if "loss" in str(self._path)
            else schedule
        )

    Schedules.lookup = small  # type: ignore[method-assign]
    forget()


def _normal(seed: int, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return edges.LAYOUTS[""]((numbers * scale).to(dtype))


def _labels(tokens: tuple[int, ...], classes: int, dtype: torch.dtype = torch.int64) -> Tensor:
    labels = torch.randint(classes, tokens, generator=torch.Generator().manual_seed(9), dtype=dtype)
    labels.view(-1)[1::4] = -100
    labels.view(-1)[0] = 0
    if classes > 64 and labels.numel() > 2:
        labels.view(-1)[2] = 64  # the first of a segment
    return edges.LAYOUTS[""](labels)


def _gradients(outputs: Any, inputs: list[Tensor], scale: float = 1.0) -> tuple[Tensor, ...]:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [_normal(7 + i, *o.shape, dtype=o.dtype, scale=scale) for i, o in enumerate(outputs)]
    return (*(o.detach() for o in outputs), *torch.autograd.grad(outputs, inputs, upstream))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _rows(tokens: tuple[int, ...], classes: int, dtype: torch.dtype, apart: bool = False, **options: Any) -> Any:
    logits = _normal(0, *tokens, classes * (1 + apart), dtype=dtype, scale=2.0)
    logits = _leaf(logits[..., :classes] if apart else logits)
    loss = adjoint.cross_entropy(logits, _labels(tokens, classes), preference=Preference(backend="triton"), **options)
    return _gradients(loss, [logits])


def _large_rows() -> Any:
    """Rows of one class, whose L is its logit: L² overflows or nearly does, and z_loss·L² does not."""
    logits = _leaf(edges.LAYOUTS[""](torch.tensor([1e18, 1.2e18, 1.3e18, -2e19, 3e19])[:, None]))
    labels = edges.LAYOUTS[""](torch.zeros(5, dtype=torch.int64))
    triton = Preference(backend="triton")
    return _gradients(
        adjoint.cross_entropy(logits, labels, z_loss=3e-25, reduction="none", preference=triton), [logits]
    )


def _linear(
    plan: str, tokens: tuple[int, ...], columns: int, classes: int, dtype: torch.dtype, bias: bool = False,
    frozen: str = "", in_one_block: bool = False, upstream: float = 1.0, **options: Any,
) -> Any:  # fmt: skip
    if in_one_block:
        with patch.object(linear_plans, "BLOCK_BYTES", 2**30):
            return _linear(plan, tokens, columns, classes, dtype, bias, frozen, False, upstream, **options)
    inputs = {
        "hidden": _normal(0, *tokens, columns, dtype=dtype),
        "weight": _normal(1, classes, columns, dtype=dtype, scale=0.5),
    }
    inputs |= {"bias": _normal(2, classes, dtype=dtype)} if bias else {}
    inputs = {name: x if name == frozen else _leaf(x) for name, x in inputs.items()}
    labels = _labels(tokens, classes, torch.int32)
    loss = adjoint.linear_cross_entropy(
        labels=labels, preference=Preference(plan=f"triton.{plan}"), **inputs, **options
    )
    return _gradients(loss, [x for x in inputs.values() if x.requires_grad], upstream)


def _gradients_for(*upstream: float) -> tuple[Tensor, ...]:
    """In float16, which is scaled by what tokens that count have: the first, of class 0, does, the second does not."""
    tokens = (len(upstream),)
    hidden, weight = (_leaf(_normal(n, size, 8, dtype=FLOAT16)) for n, size in enumerate((*tokens, 48)))
    preference = Preference(plan="triton.tiles")
    loss = adjoint.linear_cross_entropy(hidden, weight, _labels(tokens, 48), reduction="none", preference=preference)
    return torch.autograd.grad(loss, [hidden, weight], torch.tensor(upstream))


def _wrong_label(position: int, value: int, **options: Any) -> tuple[Tensor, ...]:
    """The words of the error, as numbers."""
    labels = _labels((3, 5), 40)
    labels.view(-1)[position] = value
    try:
        adjoint.cross_entropy(
            _normal(0, 3, 5, 40, dtype=FLOAT32), labels, preference=Preference(backend="triton"), **options
        )
    except ArgumentError as error:
        return (torch.tensor(list(str(error).encode())),)
    return (torch.zeros(0),)


def _every_output(function: Any, plan: str, *inputs: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Those of the operator, what a backward reads among them: classes, the L of each token, the number of labels."""
    call = bind(function, *inputs, **options)
    return forward(call, resolve(Preference(plan=plan))).run()


def _outputs_of_rows(tokens: tuple[int, ...], classes: int) -> tuple[Tensor, ...]:
    logits = _normal(0, *tokens, classes, dtype=FLOAT32)
    return _every_output(adjoint.cross_entropy, "triton.rows", logits, _labels(tokens, classes), reduction="none")


def _outputs_of_tiles(tokens: tuple[int, ...], classes: int) -> tuple[Tensor, ...]:
    hidden, weight = _normal(0, *tokens, 8, dtype=FLOAT32), _normal(1, classes, 8, dtype=FLOAT32)
    function = adjoint.linear_cross_entropy
    return _every_output(function, "triton.tiles", hidden, weight, _labels(tokens, classes), reduction="none")


def calls(module: str) -> Iterator[Callable[[], tuple[Tensor, ...]]]:
    """Those that reach the kernels of a module."""
    yield from _calls_of_rows() if module == MODULES[0] else _calls_of_tiles()


NONE: dict[str, Any] = {"reduction": "none", "return_log_probabilities": True}


def _calls_of_rows() -> Iterator[Callable[[], tuple[Tensor, ...]]]:
    yield partial(_rows, (3, 5), 300, BFLOAT16)
    yield partial(_rows, (3, 5), 256, FLOAT16, apart=True, **EVERY_OPTION, reduction="sum")
    yield partial(_rows, (3, 5), 77, FLOAT32, shift=True, **NONE)
    yield partial(_rows, (2, 3, 4), 131, FLOAT32, apart=True, label_smoothing=0.3, z_loss=0.2)
    yield partial(_rows, (2,), 40, FLOAT32)  # one token that counts
    yield _large_rows
    yield partial(_outputs_of_rows, (3, 5), 40)
    yield partial(_wrong_label, 4, 40)
    yield partial(_wrong_label, 8, -1, shift=True)
    yield partial(_wrong_label, 5, 50, shift=True)
    yield partial(_linear, "vendor", (3, 7), 20, 150, FLOAT16, bias=True, **EVERY_OPTION)
    yield partial(_linear, "vendor", (3, 7), 20, 130, FLOAT16, bias=True, **NONE, **EVERY_OPTION)
    yield partial(_linear, "vendor", (2, 5), 4, 272, BFLOAT16, reduction="sum")  # rows without a distance between them
    yield partial(_linear, "vendor", (3, 7), 34, 70, FLOAT32, bias=True, shift=True, **NONE)
    yield partial(_linear, "vendor", (2, 5), 4, 40, FLOAT32)


def _calls_of_tiles() -> Iterator[Callable[[], tuple[Tensor, ...]]]:
    call = partial(_linear, "tiles")
    yield partial(call, (3, 7), 20, 150, FLOAT16, bias=True, **EVERY_OPTION)
    yield partial(call, (3, 7), 34, 70, FLOAT32, bias=True, shift=True, **NONE)
    yield partial(call, (3, 7), 20, 130, FLOAT16, bias=True, **NONE, **EVERY_OPTION)
    yield partial(call, (70,), 17, 96, FLOAT32, bias=True, in_one_block=True, label_smoothing=0.1)
    yield partial(call, (70,), 32, 65, FLOAT32, in_one_block=True, **NONE)
    yield partial(_outputs_of_tiles, (3, 7), 40)
    for _ in range(3):  # at both edges, and with every kind of memory
        yield partial(call, (16,), 8, 10, FLOAT32)
        yield partial(call, (16,), 16, 10, BFLOAT16, bias=True)
        yield partial(call, (16,), 20, 80, FLOAT16, softcap=3.0, reduction="sum")
        yield partial(call, (9,), 8, 48, FLOAT16, upstream=0.01, **NONE)
        yield partial(call, (9,), 24, 40, FLOAT32, frozen="weight")
    yield partial(call, (3, 7), 34, 140, BFLOAT16, reduction="sum")
    yield partial(call, (2, 5), 32, 128, BFLOAT16, **NONE)
    yield partial(call, (3, 7), 36, 75, FLOAT16, return_log_probabilities=True)
    yield partial(_gradients_for, -1e6, math.inf, 1.0, 1.0, 1.0)
    yield partial(_gradients_for, 0.0, 0.0, 0.0, 0.0)


_recorded: dict[str, list[tuple[Tensor, ...]]] = {}


def record() -> None:
    """Keeps the bits of the kernels as they are."""
    if interpreting() and not _recorded:
        kept = [dict(names) for names in _shrunken()]
        shrink()
        _recorded.update({module: [call() for call in calls(module)] for module in MODULES})
        for names, before in zip(_shrunken(), kept, strict=True):
            names.update(before)
        Schedules.lookup = _lookup  # type: ignore[method-assign]
        forget()


def noticed(module: str) -> bool:
    """Whether any call has other bits than before, at either edge of memory."""
    for number, (call, expected) in enumerate(zip(calls(module), _recorded[module], strict=True)):
        edges.surround(number)
        found = call()
        if len(found) != len(expected) or not all(map(same_bits, found, expected)):
            return True
    return False
