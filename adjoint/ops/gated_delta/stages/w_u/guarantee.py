"""What plans of `recompute_w_u` promise: bounds evaluated in float64 beside the reference, for the very inputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Guarantee, spacing
from adjoint.core.problem import Problem, wide_dtype
from adjoint.ops.gated_delta.packing import bounds, chunks_of
from adjoint.ops.gated_delta.stages.w_u.parts import parts_of

# ------------------------------------------------------------------------------------- in plain PyTorch

_FORMULA = (
    "½ ulp + (ρ + γ)·Σ|terms|, ρ the rounding of β·e^G·k and β·v (and η for each that underflows), "
    "γ = n·u / (1 − n·u) for n terms and 8 more"
)


def _eager_share(problem: Problem, terms: int, rounded: bool) -> float:
    """(ρ + γ): what the error of a sum of products may be of the sum of their magnitudes, in any order of summation."""
    dtype, wide = problem.dtypes[0], wide_dtype(problem.dtypes[0])
    unit = torch.finfo(wide).eps / 2
    steps = terms + 8  # besides the sum: products, an exponential, and the reference's own in float64
    if wide == torch.float64:
        steps *= 2
    gamma = steps * unit / (1 - steps * unit)
    return gamma + (torch.finfo(dtype).eps / 2 * (1 + gamma) if rounded and dtype != wide else 0.0)


def _stored(before: Tensor, magnitude: Tensor, terms: int, kind: torch.dtype, wide: torch.dtype) -> Tensor:
    """A bound before rounding, and half a unit in the last place of anything the result may be; products underflow."""
    before = before + terms * torch.finfo(wide).smallest_normal * torch.finfo(wide).eps
    return before if kind == wide else before + spacing(magnitude + before, kind) / 2


def _smallest(dtype: torch.dtype) -> float:
    """The distance of the smallest numbers of a dtype: what rounding to it may cost where it is no share."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


class _Magnitudes:
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
        rows = x.abs().flatten(0, 1)[self.places]
        return rows.masked_fill(~self.inside.view(*self.inside.shape, *(1,) * (rows.dim() - 2)), 0).transpose(1, 2)

    def tokens(self, x: Tensor) -> Tensor:
        """[chunks, heads, chunk, ...] -> [B, T, heads, ...]"""
        rows = x.transpose(1, 2)
        out = rows.new_zeros(self.shape.numel(), *rows.shape[2:])
        out[self.places[self.inside]] = rows[self.inside]
        return out.unflatten(0, self.shape)


def in_pytorch(problem: Problem) -> dict[str, Guarantee]:
    dtype, wide = problem.dtypes[0], wide_dtype(problem.dtypes[0])
    chunk = problem.sizes[2]
    share = _eager_share(problem, chunk, rounded=True)

    def of(values: Callable[[_Magnitudes], Tensor]) -> Callable[..., Tensor]:
        def bound(*inputs: Any) -> Tensor:
            m = _Magnitudes(*inputs)
            operand = values(m)
            magnitude = m.tokens(m.T @ operand)
            underflow = m.tokens(m.T @ torch.full_like(operand, _smallest(dtype)))
            return _stored(share * magnitude + underflow, magnitude, chunk, dtype, wide)

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
        domain="every finite input of which e^G is finite",
    )


def backward_in_pytorch(problem: Problem) -> dict[str, Guarantee]:
    dtype, T_dtype = problem.dtypes
    wide = wide_dtype(dtype)
    K, V, chunk = problem.sizes[:3]
    kinds = {"dk": dtype, "dv": dtype, "dbeta": wide, "dG": wide, "dT": T_dtype}

    def of(name: str) -> Callable[..., Tensor]:
        def bound(dw: Tensor, du: Tensor, *inputs: Any) -> Tensor:
            m = _Magnitudes(*inputs)
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
            share = _eager_share(problem, terms, rounded=name == "dT")
            of_tokens = m.tokens(magnitude)
            before = share * of_tokens
            if name == "dT":
                before += m.tokens((dw.sum(-1) + du.sum(-1))[..., None].expand_as(magnitude)) * _smallest(dtype)
            return _stored(before, of_tokens, terms, kinds[name], wide)

        return bound

    return {name: _promise(problem, of(name), int(kind != wide)) for name, kind in kinds.items()}


# ------------------------------------------------------------------------------------------- on kernels

U = 2.0**-24
_FLUSHED = 2.0**-125
"""What an exponential, or a part of T, that underflows may have been."""

_T = {
    0: "T as it is given",
    1: "float32 numbers as the sums of two TF32 numbers, 2⁻¹⁹ of each product",
    2: "T as the sum of two bfloat16 numbers, 2⁻¹⁷ of it",
}


def _share(parts: int, terms: int) -> float:
    """The error of a product of matrices, of the sum of its terms' magnitudes.

    Matrix instructions cut what they add where others round, so an addition costs 2·u.
    """
    steps = max(1, parts) * terms + 16
    return 2 * U * steps / (1 - 2 * U * steps) + {0: 0.0, 1: 2.0**-19, 2: 2.0**-17}[parts]


def _decayed(m: _Magnitudes) -> Tensor:
    """The error of β·e^G·k before it is rounded, of itself: an exponential costs 3·|G|·u + 5·u."""
    return U * (3 * m.exponent + 8)


def _forward_bounds(problem: Problem) -> dict[str, Callable[..., Tensor]]:
    element, T = problem.dtypes[:2]
    chunk = problem.sizes[2]
    share = _share(parts_of(element, T), chunk)
    rounding = torch.finfo(element).eps / 2 if element != torch.float32 else 0.0

    def of(operand: Callable[[_Magnitudes], tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
        def bound(*inputs: Any) -> Tensor:
            m = _Magnitudes(*inputs)
            values, unscaled = operand(m)
            error = values * (share + (rounding + _decayed(m)) * (1 + share)) + _smallest(element) + unscaled * _FLUSHED
            magnitude = m.tokens(m.T @ values)
            lost = m.tokens(m.T @ error + values.sum(-2, keepdim=True) * _FLUSHED)
            return _stored(lost, magnitude, chunk, element, torch.float32)

        return bound

    return {
        "w": of(lambda m: (m.beta * m.from_start * m.k, m.beta * m.k)),
        "u": of(lambda m: (m.beta * m.v, m.beta * m.v)),
    }


def _backward_bounds(problem: Problem) -> dict[str, Callable[..., Tensor]]:
    element, T_dtype = problem.dtypes[:2]
    K, V, chunk = problem.sizes[:3]
    parts, plain = parts_of(element, T_dtype), parts_of(element, element)
    kinds = {"dk": element, "dv": element, "dbeta": torch.float32, "dG": torch.float32, "dT": T_dtype}

    def of(name: str) -> Callable[..., Tensor]:
        def bound(dw: Tensor, du: Tensor, *inputs: Any) -> Tensor:
            m = _Magnitudes(*inputs)
            dw, du = m.gather(dw), m.gather(du)
            products, sums = _share(parts, chunk + m.repeat), _share(plain, K + V + chunk)
            if name in ("dk", "dv"):
                through = m.T.mT @ (dw if name == "dk" else du)
                factor = m.beta * m.from_start if name == "dk" else m.beta
                terms = through * factor
                lost = terms * (products + _decayed(m)) + m.beta * through * _FLUSHED
                if name == "dk":
                    terms, lost = (x.unflatten(1, (-1, m.repeat)).sum(2) for x in (terms, lost))
            elif name == "dT":
                P, Q = dw @ m.k.mT, du @ m.v.mT
                terms = (P * m.from_start.mT + Q) * m.beta.mT
                lost = terms * (sums + _decayed(m).mT) + P * m.beta.mT * _FLUSHED
            else:
                of_keys = (m.T * (dw @ m.k.mT)).sum(-2)[..., None]
                of_values = (m.T * (du @ m.v.mT)).sum(-2)[..., None]
                by = m.beta if name == "dG" else torch.ones_like(m.beta)
                terms = of_keys * m.from_start * by + (0.0 if name == "dG" else of_values)
                lost = terms * (sums + _decayed(m)) + of_keys * by * _FLUSHED
                terms, lost = terms[..., 0], lost[..., 0]
            return _stored(m.tokens(lost), m.tokens(terms), chunk + K + V, kinds[name], torch.float32)

        return bound

    return {name: of(name) for name in kinds}


_ROUNDED = {"w": 2, "u": 2, "dk": 1, "dv": 1, "dbeta": 0, "dG": 0, "dT": 1}
_ITEM = "chunk of a value head"


def on_kernels(problem: Problem) -> dict[str, Guarantee]:
    element, T = problem.dtypes[:2]
    backward = problem.op.endswith("_backward")
    formula = (
        "½ ulp + c·u·Σ|terms|, c twice the terms of a product and 3·|G| + 8 more"
        if backward
        else "½ ulp + (ρ + c·u)·Σ|terms|, ρ the rounding of β·e^G·k and β·v, c twice the terms of a product and "
        "3·|G| + 8 more"
    )
    bounds = (_backward_bounds if backward else _forward_bounds)(problem)
    kinds = dict.fromkeys(bounds, element) | {"dT": T}
    return {
        name: Guarantee(
            repeatable=True,
            batch_invariant=_ITEM if name != "dk" else "chunk of a key head",
            device_invariant=False,
            accumulator="float32",
            roundings=0 if kinds[name] == torch.float32 else _ROUNDED[name],
            error=Derived(f"{formula}, u = 2⁻²⁴; {_T[parts_of(element, T)]}", bound),
            domain="every finite input of which e^G is finite and T is below 2¹²⁷",
            out_of_range="cu_seqlens out of order is reported, at once on the CPU, by adjoint.check() on a GPU, and "
            "taken as what lies within bounds; tokens of no sequence give 0",
        )
        for name, bound in bounds.items()
    }
