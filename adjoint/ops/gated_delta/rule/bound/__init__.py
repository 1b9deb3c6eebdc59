"""A bound of the rounding error of the chunked gated delta rule, evaluated in float64 for the very inputs of a call.

docs/gated-delta-error.md has the theorem and its proof, in the same order and with the same names. One lane is a
sequence and a value head; `S` is the state a chunk begins with, `dS` the gradient of the state it ends with, and

    G, Γ, D, A, T, P, Y, v'      as in `eager.py`, P with the scale
    T° = T − I                   what is stored of T
    old = β e^G ⊙ k,  w = T old,  k̃ = e^{Γ−G} ⊙ k,  W = Tᵀ k̃
    M = e^Γ I − k̃ᵀ w             what a chunk makes of the state: S⁺ = M S + ..., and dS = Mᵀ dS⁺ + ...

The error E of a state is not kept as a number, because rounding feeds back: what is rounded contains E. It is kept as a
sum of ellipsoids, one for each chunk that made one, and a chunk moves them by its exact M: see `Ellipsoids`.
"""

from adjoint.ops.gated_delta.rule.bound.arithmetic import TF32_PRODUCT, Arithmetic
from adjoint.ops.gated_delta.rule.bound.call import Call

__all__ = ["TF32_PRODUCT", "Arithmetic", "Call"]
