"""Sequences that mutants of the backward of the gated delta rule are tried on: float32, where a wrong term stands out.

Gradients are compared with autograd over the recurrence in float64, closely, each with and without what may be absent.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.contract.directions import Bound
from adjoint.contract.inputs import widened
from adjoint.core.plan import select
from adjoint.ops.gated_delta import packing, reference
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.rule import shape as rule_shape
from adjoint.ops.gated_delta.values import gradients, tokens
from adjoint.verify.checks.bits import same_bits
from tests.mutants.calls.edges import at_the_edge, differs_alone
from tests.mutants.calls.gated_delta.rule import fall

CLOSE = {torch.float32: 4e-6, torch.bfloat16: 1.5e-2}
"""Of the norm of a gradient: several times what rounding gives."""
CLOSE_STATE = {torch.float32: 4e-6, torch.bfloat16: 1.2e-3}
"""Of that of the initial state, which is float32, and whose terms have two parts."""

_FORWARD = Preference(plan="eager.chunked").text
_KERNELS = Preference(plan="triton.chunked+triton.chunked").text


class Prepared(NamedTuple):
    """Upstream gradients, inputs, what the forward saved, and the gradients in float64."""

    upstream: tuple[Tensor | None, ...]
    inputs: tuple[Any, ...]
    saved: Tensor
    exact: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Sequences:
    """One backward, all gradients."""

    shape: tuple[int, int, int, int, int, int]
    dtype: torch.dtype = torch.float32
    normalize: bool = False
    of_output: bool = True
    of_state: bool = True
    in_two_parts: bool = False
    falls: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def prepared(self) -> Prepared:
        """What the kernels of the backward have no part in."""
        source = torch.Generator().manual_seed(5)
        inputs = tokens(self.shape, **self.options)(self.dtype, torch.device("cpu"), source)
        if self.falls:
            fall(inputs[3])
        if self.normalize:  # of lengths that tell rows apart
            stretched = [x * (torch.rand(*x.shape[:-1], 1, generator=source) + 0.5).to(x.dtype) for x in inputs[:2]]
            inputs = (*stretched, *inputs[2:])
        rule = adjoint.gated_delta_rule.__globals__["_rule"]
        o, final, saved = rule.forward.launch((*inputs, 0.5, self.normalize, True, False, True), _FORWARD)
        do, dfinal = (torch.randn(x.shape, generator=source).to(x.dtype) for x in (o, final))
        upstream = (do if self.of_output else None, dfinal if self.of_state else None)
        slopes = gradients(lambda *x: reference.gated_delta_rule(*x, scale=0.5, normalize_qk=self.normalize))
        wide = [torch.zeros_like(x, dtype=torch.float64) for x in (o, final)]
        for place, part in enumerate(upstream):
            if part is not None:
                wide[place] = part.double()
        return Prepared(upstream, inputs, saved, slopes(*wide, *widened(inputs)))

    @cached_property
    def recorded(self) -> tuple[Tensor, ...]:
        """The gradients of the kernels as they are."""
        return self._run()

    def _run(self) -> tuple[Tensor, ...]:
        ready = self.prepared
        edged = [None if x is None else at_the_edge(x) for x in (*ready.upstream, *ready.inputs)]
        need = 31 if ready.inputs[5] is None else 63
        operator = adjoint.gated_delta_rule.__globals__["_rule"].forms[""].operator
        with _two_parts() if self.in_two_parts else nullcontext(), no_numbers():
            return operator.launch((*edged, ready.saved, 0.5, self.normalize, need), _KERNELS)  # type: ignore[no-any-return]

    def wrong_alone(self) -> bool:
        """Whether a gradient that is asked for alone has other bits than among all."""
        ready = self.prepared
        arguments = (*ready.upstream, *ready.inputs, ready.saved, 0.5, self.normalize, 63)
        operator = adjoint.gated_delta_rule.__globals__["_rule"].forms[""].operator
        backward = Bound(select(operator, operator.describe(*arguments), _KERNELS), arguments)
        with no_numbers():
            return differs_alone(backward, backward.run())

    def wrong_result(self) -> bool:
        """Whether kernels give anything but the gradients of the recurrence; in 16 bits, where a second part of a
        number is less than other roundings, any other bits than the kernels as they are."""
        results = self._run()
        if self.dtype == torch.bfloat16 and not all(map(same_bits, results, self.recorded)):
            return True
        limits = (*(CLOSE[self.dtype],) * 5, CLOSE_STATE[self.dtype])
        compared = zip(results, self.prepared.exact, limits, strict=False)
        return any(_far(got, right, limit) for got, right, limit in compared if right is not None)


def _far(got: Tensor, exact: Tensor, limit: float) -> bool:
    error = (got.double() - exact).norm()
    return not bool(error <= limit * exact.norm().clamp_min(1e-6))


@contextmanager
def no_numbers() -> Iterator[None]:
    """New memory holds no numbers."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _two_parts() -> Iterator[None]:
    """T in two parts, all of it in the second, where a part that is not added is missed most."""
    backward = import_module("adjoint.ops.gated_delta.rule.backward")
    bind, parts_of = backward.bind_chunk_inverse, backward.parts_of

    def bind_second_part_alone(*arguments: Any) -> Any:
        inverse = bind(*arguments)

        def launch(memory: Any, k: Any) -> None:
            inverse(memory, k)
            parts = memory["T"].view(-1, 2, CHUNK * CHUNK)
            parts[:, 1] = parts[:, 0]
            parts[:, 0] = 0

        return launch

    vars(backward).update(bind_chunk_inverse=bind_second_part_alone, parts_of=lambda shape: 2)
    adjoint.core.op.operator.forget()
    try:
        yield
    finally:
        vars(backward).update(bind_chunk_inverse=bind, parts_of=parts_of)
        adjoint.core.op.operator.forget()


def calls() -> Iterator[Sequences]:
    slow: dict[str, Any] = {"decay": 0.001, "strength": (0.0, 0.1)}  # much of a gradient passes through a segment
    yield Sequences((1, 200, 1, 3, 16, 24), options={"cu_seqlens": (0, 0, 1, 66, 200), "decay": 0.3})
    # No tokens, some, as many as are scanned whole, and four segments; four with keys that do not fill a block.
    yield Sequences((1, 650, 1, 2, 16, 24), options={"cu_seqlens": (0, 0, 10, 138, 650), **slow})
    yield Sequences((1, 700, 1, 1, 16, 16), options={"cu_seqlens": (0, 320, 700), **slow})
    yield Sequences((2, 450, 2, 2, 40, 16), of_state=False, options={"state": False, **slow})
    # Values that do not fill a block, which only 16-bit types have.
    yield Sequences((1, 320, 1, 2, 16, 40), torch.bfloat16, options=slow)
    yield Sequences((2, 70, 2, 2, 40, 16), of_state=False, options={"state": False, "decay": 0.3})
    yield Sequences((1, 70, 1, 1, 40, 5), normalize=True, options={"decay": 0.3})
    yield Sequences((1, 70, 1, 1, 16, 16), torch.bfloat16, options={"decay": 0.3})
    yield Sequences((1, 70, 1, 1, 16, 16), of_output=False, options={"decay": 0.1})
    yield Sequences((1, 70, 2, 2, 16, 16), normalize=True, options={"cu_seqlens": (0, 3, 70), "decay": 0.3})
    yield Sequences((1, 70, 1, 2, 40, 40), torch.bfloat16, options={"decay": 0.3})
    yield Sequences((1, 70, 1, 2, 16, 16), in_two_parts=True, options={"decay": 0.3})
    yield Sequences((1, 128, 1, 1, 16, 16), falls=True, options={"decay": 0.05})
    yield Sequences((1, 20, 1, 9, 16, 40), torch.bfloat16, options={"decay": 0.3})


CALLS = tuple(calls())
ALONE = Sequences((1, 70, 1, 2, 16, 16), torch.bfloat16, options={"decay": 0.3})


@contextmanager
def small() -> Iterator[None]:
    """Segments have one chunk, or two, and two heads are few."""
    before = packing.SEGMENT, rule_shape.FEW_HEADS, rule_shape.REVERSE_SEGMENT, rule_shape.UNSPLIT_REVERSE
    packing.SEGMENT = 64
    rule_shape.FEW_HEADS, rule_shape.REVERSE_SEGMENT, rule_shape.UNSPLIT_REVERSE = 2, 128, 128
    adjoint.core.op.operator.forget()
    try:
        yield
    finally:
        packing.SEGMENT, rule_shape.FEW_HEADS, rule_shape.REVERSE_SEGMENT, rule_shape.UNSPLIT_REVERSE = before
        adjoint.core.op.operator.forget()


def warm() -> None:
    """Prepares all calls."""
    with small():
        for call in (*CALLS, ALONE):
            assert call.prepared
            if call.dtype == torch.bfloat16:
                assert call.recorded


def noticed(function: str) -> bool:
    """Whether any call does not give what it should, given the function that is broken."""
    ordered = sorted(CALLS, key=lambda call: call.normalize < ("unnormalize" in function))
    with small():
        try:
            return any(call.wrong_result() for call in ordered) or ALONE.wrong_alone()
        except Exception:
            return True
