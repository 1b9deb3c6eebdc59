"""Calls of the convolution whose bits are recorded before kernels are broken: a mutant that changes nothing keeps them.

What must be reported is part of it: bounds out of order, and indices out of range, with their position.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.core.kernels import interpreting
from adjoint.core.op.operator import forget
from adjoint.core.schedules import Schedules
from adjoint.ops.conv import plans
from adjoint.verify.checks.bits import same_bits
from tests.mutants.calls import edges

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TRITON = Preference(backend="triton")
SMALL = {"channels": 16, "rows": 4, "edge_rows": 2, "rest_rows": 2, "stages": 1, "blocks": 2, "columns": 16, "warps": 4}
OF_A_STEP = SMALL | {"channels": 32, "word_rows": 2}
"""Words have multiples of 16 channels: 48 leave the last tile half full."""

BACKWARD = "adjoint.ops.conv.triton.backward"

LAYOUTS = {**edges.LAYOUTS, "time adjacent": lambda t: edges.LAYOUTS[""](t.mT).mT}

_lookup = Schedules.lookup


def shrink() -> None:
    """Short stretches and runs, small blocks, so that few tokens fill several."""
    vars(plans).update(MOST_STRETCHES=3, SHORTEST_STRETCH=8, LONGEST_STRETCH=16, RUN_LEVELS=1)
    vars(import_module(BACKWARD)).update(
        MOST_STRETCHES=3, LONGEST_STRETCH=16, RUN_LEVELS=1, stretch_of=plans.stretch_of
    )

    def small(self: Schedules, kernel: str, device: torch.device | None = None) -> dict[str, int]:
        schedule = _lookup(self, kernel, device)
        sizes = OF_A_STEP if kernel.startswith("conv_step") else SMALL
        return {name: sizes[name] for name in schedule} if kernel.startswith("conv_") else schedule

    Schedules.lookup = small  # type: ignore[method-assign]
    forget()


def _normal(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT64).to(dtype)


def _leaf(tensor: Tensor, layout: str = "") -> Tensor:
    return LAYOUTS[layout](tensor).detach().requires_grad_()


def _gradients(
    outputs: tuple[Tensor, ...], inputs: list[Tensor], layout: str, used: int, vanish: bool = False
) -> tuple[Tensor, ...]:
    """Of the first outputs; with upstream gradients of −0 if they are to vanish."""
    kept = [output for output in outputs if output.requires_grad][:used]
    upstream = [LAYOUTS[layout](_normal(7 + n, *o.shape, dtype=o.dtype)) for n, o in enumerate(kept)]
    if vanish:
        upstream = [torch.full_like(u, -0.0) for u in upstream]
    found = torch.autograd.grad(kept, inputs, upstream, allow_unused=True)
    return (*(o.detach() for o in outputs), *(g for g in found if g is not None))


def _outcome(call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...] | str:
    """Results, or what an error says."""
    try:
        return call()
    except adjoint.ArgumentError as error:
        return str(error)


def _conv(
    batch: int, time: int, channels: int, width: int, dtype: torch.dtype, *, bias: bool = True, state: bool = True,
    bounds: tuple[int, ...] | None = None, layout: str = "", parameters: torch.dtype | None = None, used: int = 9,
    alone: int | None = None, special: bool = False, nan: int | None = None, vanish: bool = False, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Both directions, of x with a channel of NaN if one is named."""
    number = batch if bounds is None else len(bounds) - 1
    kind = parameters or dtype
    values = _normal(0, batch, time, channels, dtype=dtype) * (40.0 if special else 1.0)
    if nan is not None:
        values[..., nan] = torch.nan
    inputs = [_leaf(values, layout), _leaf(_normal(1, channels, width, dtype=kind))]
    inputs += [_leaf(_normal(2, channels, dtype=kind))] if bias else []
    named = {"initial_state": _leaf(_normal(3, number, channels, width - 1, dtype=dtype))} if state else {}
    cut = None if bounds is None else LAYOUTS[""](torch.tensor(bounds))
    outputs = adjoint.causal_conv1d(*inputs, **named, cu_seqlens=cut, **options, preference=TRITON)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = [*inputs, *named.values()]
    return _gradients(outputs, leaves if alone is None else [leaves[alone]], layout, used, vanish)


def _step(
    batch: int, time: int, channels: int, width: int, dtype: torch.dtype, indices: tuple[int, ...] | None = None,
    layout: str = "", in_place: bool = False, bias: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    states = batch if indices is None else 4
    x, weight = _leaf(_normal(0, batch, time, channels, dtype=dtype), layout), _normal(1, channels, width, dtype=dtype)
    state, own = _normal(3, states, channels, width - 1, dtype=dtype), [_leaf(_normal(2, channels, dtype=dtype))] * bias
    inputs = [x, _leaf(state, layout), _leaf(weight), *own]
    chosen = None if indices is None else LAYOUTS[""](torch.tensor(indices))
    if in_place:
        with torch.no_grad():
            arguments = [t.detach() for t in inputs]
            return adjoint.causal_conv1d_step(*arguments, state_indices=chosen, in_place=True, preference=TRITON)
    outputs = adjoint.causal_conv1d_step(*inputs, state_indices=chosen, preference=TRITON)
    return _gradients(outputs, inputs, layout, 2)


def _states_of_a_refused_step(
    indices: tuple[int, ...], channels: int = 4, dtype: torch.dtype = FLOAT64
) -> tuple[Tensor, ...]:
    """The pool after a step in place that an index out of range ends: its row has changed none."""
    x = LAYOUTS[""](_normal(0, 3, 1, channels, dtype=dtype))
    weight = LAYOUTS[""](_normal(1, channels, 3, dtype=dtype))
    pool, chosen = LAYOUTS[""](_normal(3, 4, channels, 2, dtype=dtype)), LAYOUTS[""](torch.tensor(indices))
    try:
        adjoint.causal_conv1d_step(x, pool, weight, state_indices=chosen, in_place=True, preference=TRITON)
    except adjoint.ArgumentError:
        return (pool.clone(),)
    raise AssertionError("nothing was refused")


def _step_backward(indices: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The gradients of a step, of which nothing reports indices: those out of range are of rows that are skipped."""
    dy, x = (LAYOUTS[""](_normal(n, 3, 2, 5, dtype=FLOAT64)) for n in (7, 0))
    dstate, pool = LAYOUTS[""](_normal(8, 3, 5, 2, dtype=FLOAT64)), LAYOUTS[""](_normal(3, 4, 5, 2, dtype=FLOAT64))
    weight, bias = LAYOUTS[""](_normal(1, 5, 3, dtype=FLOAT64)), LAYOUTS[""](_normal(2, 5, dtype=FLOAT64))
    backward = torch.ops.adjoint.causal_conv1d_step_backward
    chosen = LAYOUTS[""](torch.tensor(indices))
    return tuple(backward(dy, dstate, x, weight, bias, pool, chosen, True, False, 15, TRITON.text))


PACKED = (0, 0, 1, 3, 14, 14, 29, 30)


def calls(module: str) -> Iterator[Callable[[], tuple[Tensor, ...]]]:
    """Those of the kernels of a module; of what they share, some of all."""
    if not module.endswith("step"):
        yield partial(_conv, 1, 30, 5, 4, FLOAT64, bounds=PACKED, output_final_state=True)
        yield partial(_conv, 2, 23, 24, 3, FLOAT32, split=(5, 0, 19), output_final_state=True)
        yield partial(_conv, 2, 16, 32, 4, BFLOAT16, layout="time adjacent", parameters=FLOAT32)
        yield partial(_conv, 2, 9, 5, 3, FLOAT32, layout="transposed")
        yield partial(_conv, 3, 2, 4, 6, FLOAT64, output_final_state=True, activation=None)
        yield partial(_conv, 2, 21, 16, 4, FLOAT16, layout="every other", bias=False, state=False)
        yield partial(_conv, 2, 19, 16, 4, FLOAT64, layout="swapped", output_final_state=True)
        yield partial(_conv, 1, 40, 16, 1, FLOAT32, special=True)
        yield partial(_conv, 1, 40, 20, 2, FLOAT32, split=(1, 2, 1, 16), state=False, used=2)
        yield partial(_conv, 1, 3, 2, 4, FLOAT64, bounds=(0, 1, 1, 3), output_final_state=True, alone=3)
        yield partial(_conv, 1, 30, 5, 4, FLOAT32, bounds=(0, 5, 4, 30))
        yield partial(_conv, 1, 30, 5, 4, FLOAT32, bounds=(0, 5, 31), output_final_state=True)
        yield partial(_conv, 1, 30, 5, 4, FLOAT32, bounds=(-1, 5, 30))
        yield partial(_conv, 1, 30, 5, 4, FLOAT32, bounds=(0, 31, 30))
        yield partial(_conv, 1, 30, 5, 4, FLOAT32, bounds=(2, 5, 30))
        yield partial(_conv, 1, 30, 5, 4, FLOAT32, bounds=(0, 5, 29))
        yield partial(_conv, 1, 30, 5, 4, FLOAT32, bounds=(0,), output_final_state=True)
        yield partial(_conv, 1, 30, 5, 4, FLOAT32, bounds=(0,))  # at the other edge
        yield partial(_conv, 1, 12, 5, 4, FLOAT32, bounds=(0, 7, 12))
        yield partial(_conv, 1, 12, 5, 4, FLOAT32, bounds=(0, 7, 12))  # at the other edge
        yield partial(_conv, 3, 1, 4, 3, FLOAT64, output_final_state=True)
        yield partial(_conv, 1, 24, 5, 7, FLOAT64)
        yield partial(_conv, 2, 21, 5, 4, FLOAT64, layout="time adjacent")
        yield partial(_conv, 1, 43, 3, 4, FLOAT32, bounds=(0, 5, 7, 8, 11, 43), layout="time adjacent")
        yield partial(_conv, 1, 22, 32, 4, FLOAT32, split=(16, 16), used=1, nan=20)
        yield partial(_conv, 1, 6, 5, 4, FLOAT64, bounds=(0, 1, 3, 3, 6), output_final_state=True, vanish=True)
        yield partial(_conv, 2, 9, 3, 3, FLOAT64, alone=1)
        yield partial(_conv, 2, 9, 3, 3, FLOAT64, alone=2)
    if not module.endswith("forward"):
        yield partial(_step, 4, 3, 20, 4, FLOAT64, (3, -1, 0, 3))
        yield partial(_step, 2, 2, 18, 3, FLOAT32, layout="transposed")
        yield partial(_step, 2, 16, 5, 4, BFLOAT16, bias=False)
        yield partial(_step, 3, 2, 48, 4, BFLOAT16, (3, -1, 0))  # two channels a word
        yield partial(_step, 3, 2, 48, 4, BFLOAT16, (3, -1, 0))  # at the other edge
        yield partial(_step, 3, 2, 48, 3, FLOAT16, (2, -1, 0), in_place=True)
        yield partial(_step, 3, 1, 32, 3, BFLOAT16, (2, 0, 4))
        yield partial(_step, 3, 1, 32, 3, BFLOAT16, (0, 1, -2))
        yield partial(_states_of_a_refused_step, (2, 0, 4), 32, BFLOAT16)
        yield partial(_step, 6, 1, 70, 3, FLOAT32)
        yield partial(_step, 5, 1, 32, 1, BFLOAT16, bias=False)
        yield partial(_step, 5, 1, 16, 8, FLOAT16)
        yield partial(_step, 3, 9, 5, 4, FLOAT64, (1, -1, 2))
        yield partial(_step_backward, (2, 4, 0))
        yield partial(_step_backward, (0, 4, 0))  # at the other edge
    if module.endswith(("step", "rows")):
        yield partial(_states_of_a_refused_step, (2, 0, 4))
        yield partial(_step, 3, 2, 17, 4, FLOAT64, (2, -1, 0), in_place=True)
        yield partial(_step, 3, 1, 4, 3, FLOAT64, (2, 0, 4))
        yield partial(_step, 3, 1, 4, 3, FLOAT64, (2, 0, 4))  # at the other edge
        yield partial(_step, 3, 1, 4, 1, FLOAT64, (2, 1, 0))
        yield partial(_step, 3, 1, 4, 3, FLOAT64, (0, 1, -2))
    if module.endswith("backward"):
        yield partial(_conv, 1, 9, 16, 2, FLOAT64, bounds=(0, 2, 5, 9), output_final_state=True, vanish=True)


_recorded: dict[str, list[tuple[Tensor, ...] | str]] = {}


def record(modules: tuple[str, ...]) -> None:
    """Keeps the bits of the kernels as they are."""
    if interpreting() and not _recorded:
        shrunk = plans, import_module(BACKWARD)
        kept, lookup = [dict(vars(module)) for module in shrunk], Schedules.lookup
        shrink()
        _recorded.update({module: [_outcome(call) for call in calls(module)] for module in modules})
        for module, names in zip(shrunk, kept, strict=True):  # other tests of this process have them as they were
            vars(module).update(names)
        Schedules.lookup = lookup  # type: ignore[method-assign]
        forget()


def noticed(module: str) -> bool:
    """Whether any call has other bits, or another error, than before, at either edge of memory."""
    for number, (call, expected) in enumerate(zip(calls(module), _recorded[module], strict=True)):
        edges.surround(number)
        found = _outcome(call)
        if isinstance(found, str) or isinstance(expected, str):
            if found != expected:
                return True
        elif not (len(found) == len(expected) and all(map(same_bits, found, expected))):
            return True
    return False
