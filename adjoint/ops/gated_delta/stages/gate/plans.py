"""Which code serves `gate`, and what it guarantees."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules
from adjoint.ops.gated_delta.promises import BACKWARD, FORWARD
from adjoint.ops.gated_delta.stages import in_pytorch
from adjoint.ops.gated_delta.stages.gate import eager
from adjoint.ops.gated_delta.stages.rows import TINY, U, guarantee, on_kernels, refuse, stored, underflow

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

RUN = 64
"""The number of tokens in a sum, and of sums in a sum of the next level. It is part of the bits of dA_log and
ddt_bias."""


def levels(rows: int) -> list[int]:
    """The number of runs of rows, and then the number of sums of each level above, down to one."""
    counts = [-(-rows // RUN)]
    while len(counts) < 2 or counts[-1] > 1:
        counts.append(-(-counts[-1] // RUN))
    return counts


# ------------------------------------------------------------------------------------------ guarantees


class _Gates:
    """The exact results, and bounds of their relative errors.

    An exponential has an error of 3·|exponent|·u + 5·u. a + dt_bias is rounded, which changes softplus and σ by at most
    a share of |t|·u (and less than u if t is positive). All other operations together have less than 32·u.
    """

    def __init__(self, unit: float, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> None:
        t = a + dt_bias
        self.rate, self.softplus, self.slope = A_log.exp(), torch.logaddexp(t, torch.zeros_like(t)), t.sigmoid()
        self.beta, self.other = b.sigmoid(), (-b).sigmoid()
        self.share = unit * (3 * A_log.abs() + 4 * t.abs() + 40)
        self.share_of_beta = unit * (6 * b.abs() + 40)


def _bound(name: str, kind: torch.dtype, computed: torch.dtype, additions: int) -> Callable[..., Tensor]:
    """The bound of a result in the arithmetic of a type. Sums over tokens have this many additions.

    For float64 the bound is doubled, because its reference rounds as much.
    """
    most = torch.finfo(computed).max / 2

    def placed(bound: Tensor, *sizes: Tensor) -> Tensor:
        """A bound that is infinite outside of the domain, where numbers on the way have no place."""
        for size in sizes:
            bound = torch.where(size < most, bound, torch.inf)
        return bound

    unit, lost = (U, TINY) if computed == torch.float32 else (2.0**-52, underflow(computed))

    def of_result(*inputs: Tensor) -> Tensor:
        m = _Gates(unit, *inputs)
        if name == "beta":  # it depends only on b, whatever A_log is
            return stored(m.beta, m.beta * m.share_of_beta, kind, computed)
        exact = m.rate * m.softplus
        return placed(stored(exact, exact * m.share + m.rate * lost, kind, computed), m.rate, m.softplus, exact)

    def of_gradient(dg: Tensor, dbeta: Tensor, *inputs: Tensor) -> Tensor:
        m = _Gates(unit, *inputs)
        exact = {
            "da": lambda: dg * m.rate * m.slope,
            "db": lambda: dbeta * m.beta * m.other,
            "dA_log": lambda: dg * m.rate * m.softplus,
            "ddt_bias": lambda: dg * m.rate * m.slope,
        }[name]().abs()
        share = m.share_of_beta if name == "db" else m.share
        tiny = (dbeta.abs() if name == "db" else (1 + dg.abs()) * (1 + m.rate)) * lost
        sizes = () if name == "db" else (m.rate, m.rate * m.softplus, dg.abs() * m.rate, exact)
        if name in ("da", "db"):
            return placed(stored(exact, exact * share + tiny, kind, computed), *sizes)
        columns = exact.shape[-1]
        before = placed(exact * (share + additions * unit) + tiny, *sizes).reshape(-1, columns).sum(0)
        total = exact.reshape(-1, columns).sum(0)
        return placed(stored(total, before, kind, computed), total)

    return of_gradient if name in _GRADIENT_NAMES else of_result


_GRADIENT_NAMES = ("da", "db", "dA_log", "ddt_bias")
_FINITE = (
    "every finite input of which e^{A_log}, its products and the sums of their magnitudes are below half of the "
    "largest number; else the bound is infinite"
)
_ORDER = f"tokens in runs of {RUN}, by halves; runs {RUN} at a time likewise: the number of tokens alone decides"
_SUM = "½ ulp + the error of its terms, and u·Σ|terms| for each of its additions"
_FORMULAS = {
    "g": "u·(3·|A_log| + 4·|a + dt_bias| + 40) of itself",
    "beta": "u·(6·|b| + 40) of itself",
    "da": "½ ulp + u·(3·|A_log| + 4·|a + dt_bias| + 40) of itself",
    "db": "½ ulp + u·(6·|b| + 40) of itself",
    "dA_log": _SUM,
    "ddt_bias": _SUM,
}


def _guarantee(problem: Problem) -> dict[str, Guarantee]:
    dtypes = {"g": torch.float32, "beta": torch.float32}
    if problem.op.endswith("_backward"):
        dtypes = dict(zip(_GRADIENT_NAMES, problem.dtypes, strict=True))

    def of(name: str, kind: torch.dtype) -> Guarantee:
        item, domain = ("", f"{_FINITE}; {_ORDER}") if _FORMULAS[name] is _SUM else ("token", _FINITE)
        additions = (RUN.bit_length() - 1) * len(levels(problem.sizes[1]))
        stated = guarantee(kind, item, _FORMULAS[name], _bound(name, kind, torch.float32, additions), domain)
        return replace(stated, special_values=_UNUSED) if name in _GRADIENT_NAMES else stated

    return {name: of(name, kind) for name, kind in dtypes.items()}


# ------------------------------------------------------------------------------------------ candidates

_KERNELS = ("adjoint.ops.gated_delta.stages.gate.kernels", refuse, _guarantee, _SCHEDULES)
_UNUSED = "a token whose dg is 0 adds 0 to da, dA_log and ddt_bias, where its g is −inf too"


def _eager_bound(problem: Problem, name: str, kinds: dict[str, torch.dtype]) -> Derived:
    """The bound of PyTorch in float64, with sums in any order and one rounding."""
    words = f"½ ulp + {_FORMULAS[name].removeprefix('½ ulp + ')}, u = 2⁻⁵²"
    words += ", n additions of n tokens" if _FORMULAS[name] is _SUM else ""
    return Derived(words, _bound(name, kinds[name], torch.float64, problem.sizes[1]))


_OUTPUTS = in_pytorch.promised(FORWARD, torch.float64, _FINITE, bound=_eager_bound, g="wide", beta="wide")
_GRADIENTS = in_pytorch.promised(
    BACKWARD, torch.float64, _FINITE, _UNUSED, bound=_eager_bound, da=0, db=1, dA_log=2, ddt_bias=3
)

GATE = (on_kernels("gated_delta_gate", *_KERNELS), in_pytorch.forward(eager.forward, _OUTPUTS))
GATE_BACKWARD = (on_kernels("gated_delta_gate_backward", *_KERNELS), in_pytorch.backward(eager.backward, _GRADIENTS))
