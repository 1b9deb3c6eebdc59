"""What plans of `recompute_w_u` promise: bounds evaluated in float64 beside the reference, for the very inputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Guarantee, spacing
from adjoint.core.problem import Problem, short, wide_dtype
from adjoint.ops.gated_delta.stages.in_chunks import Chunks

NEED_K, NEED_V, NEED_BETA, NEED_DECAY, NEED_T = (1 << bit for bit in range(5))
"""The bits of the gradients in the mask of a backward."""

TF32 = 1
"""The mode of a product in which every float32 is the sum of two TF32 numbers."""

PARTS = 2
"""The number of bfloat16 numbers whose sum stands for a float32 number of T, beside keys and values in bfloat16, whose
own rounding is 2⁸ times coarser. It is part of the bits."""


def parts_of(element: torch.dtype, T: torch.dtype) -> int:
    """The mode of a product with T, as `times` in the kernels numbers it."""
    if T == element != torch.float32:
        return 0
    return PARTS if element == torch.bfloat16 else TF32


Bound = Callable[..., Tensor]

_DOMAIN = (
    "every finite input of which e^G is finite; where a sum on the way may pass the accumulator's largest number, the "
    "bound is infinite"
)


class _Magnitudes:
    """The inputs of the stage in float64 as `[chunks, heads, chunk, ...]`, without their signs.

    Exponentials and products may be subnormal, and what multiplies them large: they count as larger by `floor`.
    """

    def __init__(
        self, k: Tensor, v: Tensor, beta: Tensor, G: Tensor, T: Tensor, cu_seqlens: Tensor | None, *, floor: float = 0.0
    ) -> None:
        self.chunks = Chunks(k, cu_seqlens, T.shape[-1])
        self.tokens = self.chunks.tokens
        self.repeat = v.shape[2] // max(1, k.shape[2])
        self.k = self.gather(k).repeat_interleave(self.repeat, 1)
        self.v, self.T = self.gather(v), self.gather(T)
        self.beta, self.from_start = self.gather(beta)[..., None], self.gather(G.exp())[..., None] + floor
        self.exponent = self.gather(G)[..., None]
        self.beta_k = (self.beta * self.k + floor) * self.from_start + floor
        self.beta_v = self.beta * self.v + floor

    def gather(self, x: Tensor) -> Tensor:
        return self.chunks.gather(x.abs(), torch.float64)


def _stored(before: Tensor, magnitude: Tensor, terms: int, kind: torch.dtype, wide: torch.dtype) -> Tensor:
    """The bound before rounding, plus half a unit in the last place of the largest value that the result may have.

    Products may underflow.
    """
    before = before + terms * _smallest(wide)
    return before if kind == wide else before + spacing(magnitude + before, kind) / 2


def _largest_terms(name: str, m: _Magnitudes, *slopes: Tensor) -> Tensor:
    """What sums of terms on the way to a result amount to, whatever decays and β multiply them before or behind."""
    if name in ("w", "u"):
        return m.tokens(m.T @ ((m.k if name == "w" else m.v) * m.from_start.clamp_min(1)))
    dw, du = (m.gather(x) for x in slopes)
    pairs = (dw @ m.k.mT) * m.from_start.mT.clamp_min(1) + du @ m.v.mT
    if name == "dT":
        return m.tokens(pairs)
    if name in ("dk", "dv"):
        through = m.T.mT @ (dw * m.from_start.clamp_min(1) if name == "dk" else du)
        return m.tokens(through.unflatten(1, (-1, m.repeat)).sum(2) if name == "dk" else through)
    return m.tokens((pairs * m.T.clamp_min(1)).sum(-2))


def _where_it_fits(bound: Bound, name: str, wide: torch.dtype) -> Bound:
    """A bound that is infinite where terms may have no place in the type of the arithmetic."""

    def placed(*inputs: Any) -> Tensor:
        terms = _largest_terms(name, _Magnitudes(*inputs[-6:]), *inputs[:-6])
        return torch.where(terms < torch.finfo(wide).max / 2, bound(*inputs), torch.inf)

    return placed


def _smallest(dtype: torch.dtype) -> float:
    """The distance between the smallest numbers of a dtype, which bounds rounding errors below the normal range."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def _dtypes(problem: Problem) -> dict[str, torch.dtype]:
    """The dtypes of the results."""
    element, T = problem.dtypes
    if not problem.op.endswith("_backward"):
        return {"w": element, "u": element}
    wide = wide_dtype(element)
    return {"dk": element, "dv": element, "dbeta": wide, "dG": wide, "dT": T}


# ------------------------------------------------------------------------------------- in plain PyTorch

_FORMULA = (
    "½ ulp + (ρ + γ)·Σ|terms|, ρ the rounding of β·e^G·k and β·v (and η for each that underflows), "
    "γ = n·u / (1 − n·u) for n terms and 8 more"
)


def _eager_share(problem: Problem, terms: int, rounded: bool) -> float:
    """ρ + γ, the largest error of a sum of products in any order, as a share of the sum of their magnitudes."""
    dtype, wide = problem.dtypes[0], wide_dtype(problem.dtypes[0])
    unit = torch.finfo(wide).eps / 2
    steps = terms + 8  # besides the sum: products, an exponential, and the roundings of the reference in float64
    if wide == torch.float64:
        steps *= 2
    gamma = steps * unit / (1 - steps * unit)
    return gamma + (torch.finfo(dtype).eps / 2 * (1 + gamma) if rounded and dtype != wide else 0.0)


def _eager_bound(problem: Problem, name: str, kind: torch.dtype) -> Bound:
    dtype, wide = problem.dtypes[0], wide_dtype(problem.dtypes[0])
    K, V, chunk = problem.sizes[:3]
    floor = 2 * torch.finfo(wide).smallest_normal / torch.finfo(wide).eps

    def of_result(*inputs: Any) -> Tensor:
        m = _Magnitudes(*inputs, floor=floor)
        operand = m.beta_k if name == "w" else m.beta_v
        magnitude = m.tokens(m.T @ operand)
        underflow = m.tokens(m.T @ torch.full_like(operand, _smallest(dtype)))
        return _stored(_eager_share(problem, chunk, True) * magnitude + underflow, magnitude, chunk, kind, wide)

    def of_gradient(dw: Tensor, du: Tensor, *inputs: Any) -> Tensor:
        m = _Magnitudes(*inputs, floor=floor)
        dw, du = m.gather(dw), m.gather(du)
        X, Y = m.T.mT @ dw + floor, m.T.mT @ du + floor
        of_keys = ((X * m.k).sum(-1) + floor) * m.from_start[..., 0] + floor
        magnitude = {
            "dk": lambda: (X * m.beta * m.from_start).unflatten(1, (-1, m.repeat)).sum(2),
            "dv": lambda: Y * m.beta,
            "dbeta": lambda: (Y * m.v).sum(-1) + of_keys,
            "dG": lambda: of_keys * m.beta[..., 0],
            "dT": lambda: dw @ m.beta_k.mT + du @ m.beta_v.mT,
        }[name]()
        terms = chunk + K + V + m.repeat
        of_tokens = m.tokens(magnitude)
        before = _eager_share(problem, terms, rounded=name == "dT") * of_tokens
        if name == "dT":
            before += m.tokens((dw.sum(-1) + du.sum(-1))[..., None].expand_as(magnitude)) * _smallest(dtype)
        return _stored(before, of_tokens, terms, kind, wide)

    return of_result if name in ("w", "u") else of_gradient


def in_pytorch(problem: Problem) -> dict[str, Guarantee]:
    wide = wide_dtype(problem.dtypes[0])
    return {
        name: Guarantee(
            repeatable=problem.device.type == "cpu",
            batch_invariant="",
            device_invariant=False,
            accumulator=short(wide),
            roundings=2 * int(kind != wide or (name == "dT" and problem.dtypes[0] != wide)),  # dT has two terms
            error=Derived(_FORMULA, _where_it_fits(_eager_bound(problem, name, kind), name, wide)),
            out_of_range="cu_seqlens out of order is reported; tokens of no sequence give 0",
            domain=_DOMAIN,
        )
        for name, kind in _dtypes(problem).items()
    }


# ------------------------------------------------------------------------------------------- on kernels

U = 2.0**-24
_FLUSHED = 2.0**-125
"""The largest magnitude that an exponential, or a part of T, that underflows may have had."""

_T = {
    0: "T as it is given",
    1: "float32 numbers as the sums of two TF32 numbers, 2⁻¹⁹ of each product",
    2: "T as the sum of two bfloat16 numbers, 2⁻¹⁷ of it",
}
_TERMS = "c twice the terms of a product and 3·|G| + 8 more"
_ITEM = "chunk of a value head"


def _share(parts: int, terms: int) -> float:
    """The error of a product of matrices, as a share of the sum of its terms' magnitudes.

    Matrix instructions truncate sums where other instructions round, so an addition has an error of 2·u.
    """
    steps = max(1, parts) * terms + 16
    return 2 * U * steps / (1 - 2 * U * steps) + {0: 0.0, 1: 2.0**-19, 2: 2.0**-17}[parts]


def _kernel_bound(problem: Problem, name: str, kind: torch.dtype) -> Bound:
    element, T_dtype = problem.dtypes
    K, V, chunk = problem.sizes[:3]
    parts, plain = parts_of(element, T_dtype), parts_of(element, element)
    rounding = torch.finfo(element).eps / 2 if element != torch.float32 else 0.0

    def decayed(m: _Magnitudes) -> Tensor:
        """The relative error of β·e^G·k before it is rounded. An exponential has an error of 3·|G|·u + 5·u."""
        return U * (3 * m.exponent + 8)

    def of_result(*inputs: Any) -> Tensor:
        m, share = _Magnitudes(*inputs), _share(parts, chunk)
        values, unscaled = (m.beta_k, m.beta * m.k) if name == "w" else (m.beta_v, m.beta_v)
        error = values * (share + (rounding + decayed(m)) * (1 + share)) + _smallest(element) + unscaled * _FLUSHED
        lost = m.tokens(m.T @ error + values.sum(-2, keepdim=True) * _FLUSHED)
        return _stored(lost, m.tokens(m.T @ values), chunk, kind, torch.float32)

    def of_gradient(dw: Tensor, du: Tensor, *inputs: Any) -> Tensor:
        m = _Magnitudes(*inputs)
        dw, du = m.gather(dw), m.gather(du)
        products, sums = _share(parts, chunk + m.repeat), _share(plain, K + V + chunk)
        if name in ("dk", "dv"):
            through = m.T.mT @ (dw if name == "dk" else du) + _FLUSHED / U
            terms = through * (m.beta * m.from_start if name == "dk" else m.beta)
            lost = terms * (products + decayed(m)) + m.beta * through * _FLUSHED
            if name == "dk":
                terms, lost = (x.unflatten(1, (-1, m.repeat)).sum(2) for x in (terms, lost))
        elif name == "dT":
            P, Q = dw @ m.k.mT + _FLUSHED / U, du @ m.v.mT + _FLUSHED / U
            terms = (P * m.from_start.mT + Q) * m.beta.mT
            lost = terms * (sums + decayed(m).mT) + P * m.beta.mT * _FLUSHED
        else:
            of_keys = (m.T * (dw @ m.k.mT + _FLUSHED / U) + _FLUSHED / U).sum(-2)[..., None]
            of_values = (m.T * (du @ m.v.mT + _FLUSHED / U)).sum(-2)[..., None]
            by = m.beta if name == "dG" else torch.ones_like(m.beta)
            terms = of_keys * m.from_start * by + (0.0 if name == "dG" else of_values)
            lost = terms * (sums + decayed(m)) + of_keys * by * _FLUSHED
            terms, lost = terms[..., 0], lost[..., 0]
        return _stored(m.tokens(lost), m.tokens(terms), chunk + K + V, kind, torch.float32)

    return of_result if name in ("w", "u") else of_gradient


def on_kernels(problem: Problem) -> dict[str, Guarantee]:
    backward = problem.op.endswith("_backward")
    formula = f"½ ulp + (ρ + c·u)·Σ|terms|, ρ the rounding of β·e^G·k and β·v, {_TERMS}"
    if backward:
        formula = f"½ ulp + c·u·Σ|terms|, {_TERMS}"
    return {
        name: Guarantee(
            repeatable=True,
            batch_invariant=_ITEM if name != "dk" else "chunk of a key head",
            device_invariant=False,
            accumulator="float32",
            roundings=0 if kind == torch.float32 else 1 if backward else 2,
            error=Derived(
                f"{formula}, u = 2⁻²⁴; {_T[parts_of(*problem.dtypes)]}",
                _where_it_fits(_kernel_bound(problem, name, kind), name, torch.float32),
            ),
            domain=f"{_DOMAIN}; T is below 2¹²⁷",
            out_of_range="cu_seqlens out of order is reported, at once on the CPU, by adjoint.check() on a GPU, and "
            "taken as what lies within bounds; tokens of no sequence give 0",
        )
        for name, kind in _dtypes(problem).items()
    }
