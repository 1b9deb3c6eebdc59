"""The stage between the solved chunk matrices and the state:   w = T·(β·e^G·k),   u = T·(β·v)

per chunk and value head. Adjoint, given dw and du, with X = Tᵀ dw and Y = Tᵀ du:

    dk = Σ over value heads of β·e^G·X,   dv = β·Y,   dT = dw (β·e^G·k)ᵀ + du (β·v)ᵀ
    dβ = Y·v + e^G·(X·k),   dG = β·e^G·(X·k)

β·e^G·k and β·v are rounded to the dtype of k and v before the products; T is not rounded: in float32, as it is
solved, or in the dtype of k, half the bytes, which is a plan of its own.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_floating
from adjoint.core.errors import ArgumentError, second_derivative
from adjoint.core.op import define
from adjoint.core.plan import Call, publish
from adjoint.core.preference import Preference, resolve
from adjoint.core.problem import Problem, short
from adjoint.ops.gated_delta import arguments as metadata
from adjoint.ops.gated_delta.stages import w_u_plans

_OP = "recompute_w_u"


def _check(k: Tensor, v: Tensor, beta: Tensor, G: Tensor, T: Tensor, cu_seqlens: Tensor | None) -> None:
    metadata.require_axes(_OP, "k", k, "batch, time, key heads, K")
    metadata.require_axes(_OP, "v", v, "batch, time, value heads, V")
    batch, time, key_heads, K = k.shape
    if tuple(v.shape[:2]) != (batch, time):
        raise ArgumentError(
            f"{_OP}: v must begin with the batch and time of k, ({batch}, {time}), got shape {tuple(v.shape)}"
        )
    metadata.require_same(_OP, "v", v, "k", k)
    metadata.require_head_size(_OP, "k", "K", K)
    metadata.require_head_size(_OP, "v", "V", v.shape[3])
    metadata.require_heads(_OP, "k", key_heads, "v", v.shape[2])
    wide = metadata.state_dtype(k.dtype)
    for name, value in (("beta", beta), ("G", G)):
        require_floating(_OP, name, value)
        metadata.require_shape(_OP, name, value, (batch, time, v.shape[2]), "[batch, time, value heads]")
        if value.dtype != wide:
            raise ArgumentError(
                f"{_OP}: {name} must be {short(wide)} beside {short(k.dtype)} k and v, got {short(value.dtype)}"
            )
        metadata.require_device(_OP, name, value, "k", k)
    metadata.require_axes(_OP, "T", T, "batch, time, value heads, chunk")
    metadata.require_chunk(_OP, "T", T.shape[3])
    metadata.require_shape(_OP, "T", T, (batch, time, v.shape[2], T.shape[3]), "[batch, time, value heads, chunk]")
    if T.dtype not in (wide, k.dtype):
        expected = " or ".join(dict.fromkeys((short(wide), short(k.dtype))))
        raise ArgumentError(f"{_OP}: T must be {expected} beside {short(k.dtype)} k and v, got {short(T.dtype)}")
    metadata.require_device(_OP, "T", T, "k", k)
    if cu_seqlens is not None:
        metadata.require_cu_seqlens(_OP, cu_seqlens, k)


def _check_backward(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    G: Tensor,
    T: Tensor,
    dw: Tensor | None,
    du: Tensor | None,
    cu_seqlens: Tensor | None,
    need: int,
) -> None:
    _check(k, v, beta, G, T, cu_seqlens)
    for name, value, size in (("dw", dw, k.shape[3]), ("du", du, v.shape[3])):
        if value is not None:
            metadata.require_same(_OP, name, value, "k", k)
            metadata.require_shape(_OP, name, value, (*v.shape[:3], size), f"that of {name[1]}")


def _describe(
    op: str,
    k: Tensor,
    v: Tensor,
    T: Tensor,
    cu_seqlens: Tensor | None,
    options: tuple[Any, ...] = (),
    **upstream: Tensor | None,
) -> Problem:
    layout, sizes = w_u_plans.layout_of(k=k, v=v, T=T, **upstream), w_u_plans.sizes_of(k, v, T, cu_seqlens)
    return Problem(op, k.device, (k.dtype, T.dtype), layout, sizes, options)


_recompute = define(
    _OP,
    "Tensor k, Tensor v, Tensor beta, Tensor G, Tensor T, Tensor? cu_seqlens",
    "(Tensor, Tensor)",
    outputs=("w", "u"),
    tensors=("k", "v", "beta", "G", "T", "cu_seqlens"),
    check=_check,
    allocate=lambda k, v, beta, G, T, cu_seqlens: (
        v.new_empty((*v.shape[:3], k.shape[3])),
        v.new_empty(v.shape),
    ),
    describe=lambda k, v, beta, G, T, cu_seqlens: _describe(_OP, k, v, T, cu_seqlens),
    candidates=lambda: w_u_plans.RECOMPUTE_W_U,
)
_recompute_backward = define(
    f"{_OP}_backward",
    "Tensor k, Tensor v, Tensor beta, Tensor G, Tensor T, Tensor? dw, Tensor? du, Tensor? cu_seqlens, int need",
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    outputs=("dk", "dv", "dbeta", "dG", "dT"),
    tensors=("k", "v", "beta", "G", "T", "dw", "du", "cu_seqlens"),
    check=_check_backward,
    allocate=lambda k, v, beta, G, T, dw, du, cu_seqlens, need: tuple(
        k.new_empty(x.shape if need >> bit & 1 else (0,), dtype=x.dtype) for bit, x in enumerate((k, v, beta, G, T))
    ),
    describe=lambda k, v, beta, G, T, dw, du, cu_seqlens, need: _describe(
        f"{_OP}_backward", k, v, T, cu_seqlens, (need,), dw=dw, du=du
    ),
    candidates=lambda: w_u_plans.RECOMPUTE_W_U_BACKWARD,
)


class _RecomputeWU(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        G: Tensor,
        T: Tensor,
        cu_seqlens: Tensor | None,
        preference: str,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(k, v, beta, G, T, cu_seqlens)
        ctx.preference = preference
        return _recompute(k, v, beta, G, T, cu_seqlens, preference)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dw: Tensor | None, du: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise second_derivative(_OP)
        if dw is None and du is None:
            return (None,) * 7
        k, v, beta, G, T, cu_seqlens = ctx.saved_tensors
        need = sum(1 << bit for bit in range(5) if ctx.needs_input_grad[bit])
        gradients = _recompute_backward(k, v, beta, G, T, dw, du, cu_seqlens, need, ctx.preference)
        wanted = (gradient if need >> bit & 1 else None for bit, gradient in enumerate(gradients))
        return (*wanted, None, None)


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
        T: the solved matrix of each chunk, a row for each token: its columns are the tokens of the chunk, counted from
            its first; what stands for tokens past the end is not read. In float32 (float64 for float64), or in the
            dtype of k: half the bytes, and a plan of its own. The chunk is a power of two up to 64.
        cu_seqlens: the bounds of packed sequences, as for `gated_delta_rule`; chunks are counted from their starts.
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
    arguments = (k, v, beta, G, T, cu_seqlens)
    _check(*arguments)
    text = resolve(preference)
    if torch.is_grad_enabled() and any(x.requires_grad for x in arguments[:5] if x is not None):
        return _RecomputeWU.apply(*arguments, text)  # type: ignore[no-any-return]
    return _recompute(*arguments, text)  # type: ignore[no-any-return]


def _bind(k: Tensor, v: Tensor, beta: Tensor, G: Tensor, T: Tensor, *, cu_seqlens: Tensor | None = None) -> Call:
    arguments = (k, v, beta, G, T, cu_seqlens)
    _check(*arguments)
    return Call(
        _recompute,
        arguments,
        _recompute_backward,
        lambda upstream, outputs: (k, v, beta, G, T, *upstream, cu_seqlens, 31),
    )


publish(recompute_w_u, _bind)
