"""The stage between the solved chunk matrices and the state:   w = T·(β·e^G·k),   u = T·(β·v)

per chunk and value head. Adjoint, given dw and du, with X = Tᵀ dw and Y = Tᵀ du:

    dk = Σ over value heads of β·e^G·X,   dv = β·Y,   dT = dw (β·e^G·k)ᵀ + du (β·v)ᵀ
    dβ = Y·v + e^G·(X·k),   dG = β·e^G·(X·k)

β·e^G·k and β·v are rounded to the dtype of k and v before the products; T is not rounded: in float32, as it is
solved, or in the dtype of k, half the bytes, which is a plan of its own.
"""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.layout import empty_like
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.preference import Preference
from adjoint.core.problem import wide_dtype
from adjoint.device.sequences import require_cu_seqlens
from adjoint.ops.gated_delta import arguments as metadata
from adjoint.ops.gated_delta.stages.w_u import plans

_OP = "recompute_w_u"


def _check(k: Tensor, v: Tensor, beta: Tensor, G: Tensor, T: Tensor, cu_seqlens: Tensor | None) -> None:
    metadata.require_axes(_OP, "k", k, "batch, time, key heads, K")
    metadata.require_values(_OP, "v", v, "k", k)
    metadata.require_heads(_OP, "k", k, "v", v)
    shape, wide, beside = tuple(v.shape[:3]), wide_dtype(k.dtype), {"like_name": "k", "tokens": "k and v"}
    for name, value in (("beta", beta), ("G", G)):
        metadata.require_beside(_OP, name, value, shape, "[batch, time, value heads]", (wide,), k, **beside)
    metadata.require_axes(_OP, "T", T, "batch, time, value heads, chunk")
    metadata.require_chunk(_OP, "T", T.shape[3])
    axes = "[batch, time, value heads, chunk]"
    metadata.require_beside(_OP, "T", T, (*shape, T.shape[3]), axes, (wide, k.dtype), k, **beside)
    require_cu_seqlens(_OP, cu_seqlens, k, "k")


def _describe(
    k: Tensor, v: Tensor, beta: Tensor, G: Tensor, T: Tensor, cu_seqlens: Tensor | None, **upstream: Tensor | None
) -> Facts:
    """The facts of a problem. Its sizes are K, V and chunk, and then those for workspaces and grids: rows, tokens,
    heads and bounds of sequences."""
    tensors = {"k": k, "v": v, "T": T, **upstream}
    copied = [name for name, tensor in tensors.items() if tensor is not None and not plans.is_readable(tensor)]
    bounds = 0 if cu_seqlens is None else cu_seqlens.shape[0]
    sizes = (k.shape[3], v.shape[3], T.shape[3], *k.shape[:3], v.shape[2], bounds)
    return Facts((k.dtype, T.dtype), f"{', '.join(copied)} copied" if copied else "", sizes)


def _describe_backward(dw: Tensor | None, du: Tensor | None, *arguments: Any) -> Facts:
    return _describe(*arguments[:-1], dw=dw, du=du)


def _flops(k: Tensor, v: Tensor, beta: Tensor, G: Tensor, T: Tensor, cu_seqlens: Tensor | None) -> int:
    """The operations of T·(β·e^G·k) and T·(β·v), for T with all of its columns."""
    return 2 * T.numel() * (k.shape[3] + v.shape[3])


def _flops_backward(dw: Tensor | None, du: Tensor | None, k: Tensor, v: Tensor, *rest: Any) -> int:
    """The operations of X = Tᵀ dw for dk, dβ and dG, of Y = Tᵀ du for dv and dβ, and of a product with each of dw and
    du for dT."""
    _beta, _G, T, _cu_seqlens, need = rest
    need_k, need_v, need_beta, need_G, need_T = (need >> bit & 1 for bit in range(5))
    of_dw = 0 if dw is None else k.shape[3] * ((need_k | need_beta | need_G) + need_T)
    of_du = 0 if du is None else v.shape[3] * ((need_v | need_beta) + need_T)
    return 2 * T.numel() * (of_dw + of_du)


_recompute = Op(
    _OP,
    inputs=("k", "v", "beta", "G", "T", "cu_seqlens?"),
    differentiable=("k", "v", "beta", "G", "T"),
    outputs=("w", "u"),
    check=_check,
    allocate=lambda k, v, beta, G, T, cu_seqlens: (v.new_empty((*v.shape[:3], k.shape[3])), empty_like(v)),
    describe=_describe,
    forward=lambda: plans.RECOMPUTE_W_U,
    flops=_flops,
    adjoint=Adjoint(lambda: plans.RECOMPUTE_W_U_BACKWARD, _describe_backward, flops=_flops_backward),
)


@_recompute.public
def recompute_w_u(
    k: Float[Tensor, "batch time key_heads K"],
    v: Float[Tensor, "batch time value_heads V"],
    beta: Float[Tensor, "batch time value_heads"],
    G: Float[Tensor, "batch time value_heads"],
    T: Float[Tensor, "batch time value_heads chunk"],
    *,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    preference: Preference | None = None,
) -> tuple[Float[Tensor, "batch time value_heads K"], Float[Tensor, "batch time value_heads V"]]:
    """w = T·(β·e^G·k) and u = T·(β·v), per chunk and value head.

    Args:
        k, v: keys and values, one dtype; K and V at most 256.
        beta: the strength, in float32 (float64 for float64).
        G: the running sum of g within each chunk, in the same dtype.
        T: the solved matrix of each chunk, with a row for each token. Its columns are the tokens of the chunk, counted
            from the first one. Columns past the end of the sequence are not read. It is in float32 (float64 for
            float64), or in the dtype of k, which has half the bytes and its own plan. The chunk is a power of two up to
            64.
        cu_seqlens: the bounds of packed sequences, as for `gated_delta_rule`. Chunks are counted from their starts.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: shapes, dtypes, devices or sizes are wrong, or (on the CPU) cu_seqlens is out of order; on a GPU
            `adjoint.check()` raises for values.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> k, v = torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1, 1)
    >>> beta, G = torch.full((1, 2, 1), 0.5), torch.zeros(1, 2, 1)
    >>> T = torch.tensor([[1.0, 0.0], [-0.5, 1.0]]).view(1, 2, 1, 2)
    >>> [x.flatten().tolist() for x in recompute_w_u(k, v, beta, G, T)]
    [[0.5, 0.25], [0.5, 0.25]]
    """
    return _recompute.call(k, v, beta, G, T, cu_seqlens, preference=preference)  # type: ignore[no-any-return]
