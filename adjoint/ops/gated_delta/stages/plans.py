"""Which code serves which stage of the gated delta rule, and what it guarantees."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Guarantee, spacing
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem
from adjoint.ops.gated_delta.arguments import wide_dtype
from adjoint.ops.gated_delta.packing import bounds, chunks_of
from adjoint.ops.gated_delta.promises import eager_candidate
from adjoint.ops.gated_delta.stages import eager_w_u

# -------------------------------------------------------------------------------------- recompute_w_u

_FORMULA = (
    "½ ulp + (ρ + γ)·Σ|terms|, ρ the rounding of β·e^G·k and β·v (and η for each that underflows), "
    "γ = n·u / (1 − n·u) for n terms and 8 more"
)

_FLAGS: dict[str, Any] = {"domain": "every finite input of which e^G is finite"}


def _share(problem: Problem, terms: int, rounded: bool) -> float:
    """(ρ + γ): what the error of a sum of products may be of the sum of their magnitudes, in any order of summation."""
    dtype, wide = problem.dtypes[0], wide_dtype(problem.dtypes[0])
    unit = torch.finfo(wide).eps / 2
    steps = terms + 8  # besides the sum: products, an exponential, and the reference's own in float64
    if wide == torch.float64:
        steps *= 2
    gamma = steps * unit / (1 - steps * unit)
    return gamma + (torch.finfo(dtype).eps / 2 * (1 + gamma) if rounded and dtype != wide else 0.0)


def stored(before: Tensor, magnitude: Tensor, terms: int, kind: torch.dtype, wide: torch.dtype) -> Tensor:
    """A bound before rounding, and half a unit in the last place of anything the result may be; products underflow."""
    before = before + terms * torch.finfo(wide).smallest_normal * torch.finfo(wide).eps
    return before if kind == wide else before + spacing(magnitude + before, kind) / 2


def smallest(dtype: torch.dtype) -> float:
    """The distance of the smallest numbers of a dtype: what rounding to it may cost where it is no share."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


class Magnitudes:
    """The inputs of the stage in float64 as `[chunks, heads, chunk, ...]`, without their signs."""

    def __init__(self, k: Tensor, v: Tensor, beta: Tensor, G: Tensor, T: Tensor, cu_seqlens: Tensor | None) -> None:
        starts, lengths = bounds(k.shape[0], k.shape[1], cu_seqlens, raises=False)
        places, inside = (x.to(k.device) for x in chunks_of(starts, lengths, T.shape[-1]))
        self.places, self.inside, self.shape = places, inside, k.shape[:2]
        self.repeat = v.shape[2] // max(1, k.shape[2])
        self.k = self.gather(k).repeat_interleave(self.repeat, 1)
        self.v, self.T = self.gather(v), self.gather(T)
        self.beta, self.from_start = self.gather(beta)[..., None], self.gather(G.exp())[..., None]
        self.exponent = self.gather(G)[..., None]

    def gather(self, x: Tensor) -> Tensor:
        found = x.abs().flatten(0, 1)[self.places]
        return found.masked_fill(~self.inside.view(*self.inside.shape, *(1,) * (found.dim() - 2)), 0).transpose(1, 2)

    def tokens(self, x: Tensor) -> Tensor:
        """[chunks, heads, chunk, ...] -> [B, T, heads, ...]"""
        laid = x.transpose(1, 2)
        out = laid.new_zeros(self.shape.numel(), *laid.shape[2:])
        out[self.places[self.inside]] = laid[self.inside]
        return out.unflatten(0, self.shape)


def _w_u_guarantee(problem: Problem) -> dict[str, Guarantee]:
    dtype, wide = problem.dtypes[0], wide_dtype(problem.dtypes[0])
    chunk = problem.sizes[2]
    share = _share(problem, chunk, rounded=True)

    def of(values: Callable[[Magnitudes], Tensor]) -> Callable[..., Tensor]:
        def bound(*inputs: Any) -> Tensor:
            found = Magnitudes(*inputs)
            operand = values(found)
            magnitude = found.tokens(found.T @ operand)
            underflow = found.tokens(found.T @ torch.full_like(operand, smallest(dtype)))
            return stored(share * magnitude + underflow, magnitude, chunk, dtype, wide)

        return bound

    bounds_of = {"w": of(lambda m: m.beta * m.from_start * m.k), "u": of(lambda m: m.beta * m.v)}
    return {name: _promise(problem, bound, int(dtype != wide)) for name, bound in bounds_of.items()}


def _promise(problem: Problem, bound: Callable[..., Tensor], stored: int) -> Guarantee:
    return Guarantee(
        repeatable=problem.device.type == "cpu",
        batch_invariant="",
        device_invariant=False,
        accumulator=str(wide_dtype(problem.dtypes[0])).removeprefix("torch."),
        roundings=2 * stored,
        error=Derived(_FORMULA, bound),
        out_of_range="cu_seqlens out of order is reported; tokens of no sequence give 0",
        **_FLAGS,
    )


def _w_u_backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    dtype, T_dtype = problem.dtypes
    wide = wide_dtype(dtype)
    K, V, chunk = problem.sizes[:3]
    kinds = {"dk": dtype, "dv": dtype, "dbeta": wide, "dG": wide, "dT": T_dtype}

    def of(name: str) -> Callable[..., Tensor]:
        def bound(dw: Tensor, du: Tensor, *inputs: Any) -> Tensor:
            m = Magnitudes(*inputs)
            dw, du = m.gather(dw), m.gather(du)
            X, Y = m.T.mT @ dw, m.T.mT @ du
            of_keys = (X * m.k).sum(-1) * m.from_start[..., 0]
            magnitude = {
                "dk": lambda: (X * m.beta * m.from_start).unflatten(1, (-1, m.repeat)).sum(2),
                "dv": lambda: Y * m.beta,
                "dbeta": lambda: (Y * m.v).sum(-1) + of_keys,
                "dG": lambda: of_keys * m.beta[..., 0],
                "dT": lambda: dw @ (m.beta * m.from_start * m.k).mT + du @ (m.beta * m.v).mT,
            }[name]()
            terms = chunk + K + V + m.repeat
            share = _share(problem, terms, rounded=name == "dT")
            laid = m.tokens(magnitude)
            before = share * laid
            if name == "dT":
                before += m.tokens((dw.sum(-1) + du.sum(-1))[..., None].expand_as(magnitude)) * smallest(dtype)
            return stored(before, laid, terms, kinds[name], wide)

        return bound

    return {name: _promise(problem, of(name), int(kind != wide)) for name, kind in kinds.items()}


def _w_u(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    eager_w_u.forward(*arguments, *outputs)


def _w_u_backward(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    eager_w_u.backward(*(*arguments, outputs))


def _by_T(guarantee: Callable[[Problem], dict[str, Guarantee]], compute: Any) -> tuple[Candidate, Candidate]:
    """One plan for T as it is solved, one for T in the 16 bits of k: they read different numbers."""

    def is_narrow(problem: Problem) -> bool:
        return problem.dtypes[1] != wide_dtype(problem.dtypes[0])

    def numeric(problem: Problem) -> dict[str, Any]:
        return {"chunk": problem.sizes[2], "T": str(problem.dtypes[1]).removeprefix("torch.")}

    solved = eager_candidate("eager.solved_T", guarantee, compute, numeric)
    narrow = eager_candidate("eager.narrow_T", guarantee, compute, numeric)
    return (
        replace(solved, refuse=lambda problem: "reads T in the type it is solved in" if is_narrow(problem) else ""),
        replace(narrow, refuse=lambda problem: "" if is_narrow(problem) else "reads T in the 16 bits of k"),
    )


RECOMPUTE_W_U = _by_T(_w_u_guarantee, _w_u)
RECOMPUTE_W_U_BACKWARD = _by_T(_w_u_backward_guarantee, _w_u_backward)
