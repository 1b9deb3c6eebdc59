"""The stages of the gated delta rule as operators of their own, for a chunk of C tokens of a sequence and a value head:

    g    = −e^{A_log}·softplus(a + dt_bias),   β = σ(b)                         gate
    y    = x / sqrt(Σx² + 1e-6)                                                 normalize
    G    = running sum of g                                                     cumulative_decay
    A_ij = β_i·(k_i·k_j)·e^{G_i−G_j}, i > j                                     gram
    T    = (I + A)⁻¹                                                            solve
    w    = T·(β·e^G·k),   u = T·(β·v)                                           recompute_w_u
    v'   = u − w·S,   S⁺ = e^Γ·S + Σ_j e^{Γ−G_j}·k_j ⊗ v'_j                     carry
    o_i  = scale·(e^{G_i}·q_i·S + Σ_{j≤i} (q_i·k_j)·e^{G_i−G_j}·v'_j)           output

Chunks are counted from the start of each sequence, and tails are masked. A chunk's matrix is a row of C for each token.
One after the other, the stages are `gated_delta_rule`. Those without kernels are in `chunks`.
"""

from adjoint.ops.gated_delta.stages.chunks import carry, cumulative_decay, gram, output, solve
from adjoint.ops.gated_delta.stages.gate import gate
from adjoint.ops.gated_delta.stages.normalize import normalize
from adjoint.ops.gated_delta.stages.w_u import recompute_w_u

__all__ = ["carry", "cumulative_decay", "gate", "gram", "normalize", "output", "recompute_w_u", "solve"]
