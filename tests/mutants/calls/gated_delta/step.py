"""Steps of decoding that mutants of their kernels are tried on, in float64, where an error of one term stands out.

Results are compared with the recurrence, closely; tiles are small, and what follows the end of a tensor is guarded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.contract.inputs import differentiable, leaves
from adjoint.core.op.operator import forget
from adjoint.core.schedules import Schedules
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.step import plans
from adjoint.ops.gated_delta.values import tokens
from tests.mutants.calls.edges import LAYOUTS, surround

CLOSE = 1e-12
"""Of the largest value: a thousand times what rounding gives these sums."""

TRITON = Preference(backend="triton")


@dataclass(frozen=True)
class Step:
    """A step, in place too, and its gradients, all of them or each alone."""

    shape: tuple[int, int, int, int, int, int]
    indices: tuple[int, ...] | None = None
    states: int = 0
    normalize: bool = False
    every: bool = False
    upstream: tuple[bool, bool] = (True, True)
    layout: str = ""
    alone: bool = False
    kind: torch.dtype = torch.float64
    positive: int = -1
    """Where a gate is above 0."""
    gradients: bool = True
    spoiled: bool = False
    """Whether rows that are skipped hold no numbers."""

    def wrong_result(self) -> bool:
        """Whether kernels give anything but the recurrence's results."""
        generator = torch.Generator().manual_seed(sum(self.shape))
        q, k, v, g, beta, state, _ = tokens(self.shape)(self.kind, torch.device("cpu"), generator)
        if self.indices is not None:
            state = torch.randn((self.states, *state.shape[1:]), generator=generator).to(state.dtype)
        g.view(-1)[0] = 0  # no decay, and no fault
        if self.positive >= 0:
            g.view(-1)[self.positive] = 0.25
        for row, index in enumerate(self.indices or ()):
            if self.spoiled and not 0 <= index < self.states:
                q[row], k[row], v[row] = (float("nan"),) * 3
        lay = LAYOUTS[self.layout]
        given = leaves([lay(x) for x in (q, k, v, g, beta, state)])
        indices = None if self.indices is None else lay(torch.tensor(self.indices))
        options = {"state_indices": indices, "normalize_qk": self.normalize, "return_all_states": self.every}
        outputs = adjoint.gated_delta_step(*given, **options, scale=0.7, preference=TRITON)
        own = leaves([x.detach().double() for x in (q, k, v, g, beta, state)])
        exact, after = self._recurrence(own)
        ups = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in exact]
        pairs = [*zip(outputs, exact, strict=True)]
        if not self.shared:
            pairs += self._in_place([x.detach() for x in given[:5]], lay(state.clone()), options, exact, after)
        if not self.gradients:
            return any(not self._near(got, right) for got, right in pairs)
        used = [n for n, wanted in enumerate(self.upstream) if wanted]
        expected = torch.autograd.grad([exact[n] for n in used], own, [ups[n] for n in used], allow_unused=True)
        for wanted in [[x] for x in given] if self.alone else [list(differentiable(given))]:
            found = torch.autograd.grad(
                [outputs[n] for n in used], wanted, [lay(ups[n].to(outputs[n].dtype)) for n in used], retain_graph=True
            )
            where = [next(n for n, x in enumerate(given) if x is leaf) for leaf in wanted]
            for n, got in zip(where, found, strict=True):
                theirs = expected[n]
                pairs.append((got, torch.zeros_like(own[n]) if theirs is None else theirs))
        return any(not self._near(got, right) for got, right in pairs)

    @property
    def shared(self) -> bool:
        """Whether rows share a state, which a step in place may not."""
        kept = [index for index in self.indices or () if index >= 0]
        return len(kept) > len(set(kept))

    def _in_place(
        self, given: list[Tensor], pool: Tensor, options: dict[str, Any], exact: tuple[Tensor, Tensor], after: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        out, states = adjoint.gated_delta_step(*given, pool, **options, scale=0.7, in_place=True, preference=TRITON)
        return [(out, exact[0]), (pool, after), (states, exact[1] if self.every else after)]

    def _recurrence(self, own: Any) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Outputs and states, and the pool after a step in place."""
        q, k, v, g, beta, state = own
        outs, states, pool = [], [], state.detach().clone()
        for row in range(q.shape[0]):
            place = row if self.indices is None else self.indices[row]
            skipped = not 0 <= place < len(state)
            start = state[0 if skipped else place]
            keys = (reference.normalized(x[row]) if self.normalize else x[row] for x in (q, k))
            o, after = reference.recurrence(*keys, v[row], g[row], beta[row], start, 0.7)
            kept = after if self.every else after[-1]
            outs.append(torch.zeros_like(o) if skipped else o)
            states.append(torch.zeros_like(kept) if skipped else kept)
            if not skipped:
                pool[place] = after[-1].detach()
        return (torch.stack(outs), torch.stack(states)), pool

    def _near(self, got: Tensor, expected: Tensor) -> bool:
        limit = CLOSE if self.kind == torch.float64 else 0.02
        expected = expected.detach()
        return bool(((got.detach().double() - expected).abs() <= limit * (1 + expected.abs().max())).all())


def calls() -> Iterator[Step]:
    """Likely deaths first: sizes that fill no tile, pools, and each mode."""
    yield Step((2, 2, 1, 2, 5, 6))
    yield Step((3, 1, 1, 1, 3, 2), (4, -1, 1), 5, normalize=True)
    yield Step((1, 3, 2, 4, 4, 3), every=True)
    yield Step((3, 1, 1, 1, 2, 2), (1, 1, -1), 2, upstream=(True, False))
    yield Step((2, 1, 1, 2, 8, 5), layout="every other", normalize=True, every=True)
    yield Step((3, 2, 2, 4, 5, 3), (2, 0, -1), 3, normalize=True, spoiled=True)
    yield Step((1, 1, 1, 1, 1, 1), alone=True)
    yield Step((2, 2, 1, 2, 3, 4), kind=torch.bfloat16, upstream=(False, True))


WIDE = Step((1, 1, 1, 1, 16, 16), gradients=False)
"""Aligned; with all its columns in one tile, a thread has several keys of each."""

WRONG = (
    Step((3, 1, 1, 1, 2, 2), (2, 0, 1), 2, normalize=True, spoiled=True),
    Step((3, 2, 1, 2, 2, 2), (-2, 1, 0), 2, positive=7),
)
"""Indices and gates that must be recorded, with their position."""
SAID = ("got 2 at position 0", "got -2 at position 0", "a positive number at position 7")


_sizes = {"columns": 1, "warps": 2}


def shrink() -> None:
    """Two groups of a column, 16 numbers in a tile of the adjoint; what is wrong is recorded and does not raise."""
    vars(import_module("adjoint.ops.gated_delta.step.kernels"))["check"] = lambda: None
    vars(plans)["_BACKWARD_TILE"] = 16
    lookup = Schedules.lookup

    def small(self: Schedules, kernel: str, device: torch.device | None = None) -> dict[str, int]:
        schedule = lookup(self, kernel, device)
        if kernel == "gated_delta_step_tiles_16_bit":
            return schedule | _sizes | {"columns": 2}
        return schedule | (_sizes if kernel == "gated_delta_step_tiles" else {})

    Schedules.lookup = small  # type: ignore[method-assign]


def noticed() -> bool:
    """Whether any step comes out wrong."""
    for number, step in enumerate((*calls(), WIDE)):
        surround(number)
        if step is WIDE:
            _sizes.update(columns=64)
            forget()
        try:
            if step.wrong_result():
                return True
            adjoint.check()  # nothing is wrong with these
        except Exception:
            return True
    said = ""
    for step in WRONG:
        try:
            if step.wrong_result():
                return True
            adjoint.check()
        except adjoint.ArgumentError as error:
            said += "".join([str(error), *getattr(error, "__notes__", ())])
        except Exception:
            return True
    return not all(words in said for words in SAID)
