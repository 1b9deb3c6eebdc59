"""The SwiGLU expert layer.

    y[t] = Σ_j weights[t, j] · down[e] · h,   h = silu(g) ⊙ u,   [g; u] = gate_up[e] · x[t],   e = indices[t, j]

Adjoint, given dy, for each token t and slot j, with dh = down[e]ᵀ · dy[t] and w = weights[t, j]:

    dweights[t, j] = h · dh
    dg = w·dh ⊙ u ⊙ silu'(g),   du = w·dh ⊙ silu(g)
    dx[t] = Σ_j gate_up[e]ᵀ · [dg; du]
    dgate_up[e] = Σ [dg; du] · x[t]ᵀ,   ddown[e] = Σ dy[t] · (w·h)ᵀ     over the tokens and slots of expert e

The order of gate and up is that of Hugging Face's fused experts: the first I rows of gate_up[e] are the gate's.

A row is a token and one of its slots. Saved for the backward, besides the arguments: g and u of each row in the type
of x (4·I bytes a row in 16 bits), and the layout of the rows (8 bytes a row). Recomputed: h, from the saved g and u.
The gradient is that of the layer at the saved, rounded g and u. Neither x nor dy is ever copied into rows, because the
products read them by token. Of intermediate results with D columns for each row, only 512 columns are in memory at
once, or I columns if I is larger.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_floating, require_ids, require_like
from adjoint.core.errors import ArgumentError
from adjoint.core.layout import copied_layout, empty_like
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.preference import Preference
from adjoint.core.problem import short
from adjoint.ops.moe.experts import plans
from adjoint.ops.moe.layout import Layout
from adjoint.ops.moe.layout import allocate as allocate_layout

_OP = "moe.experts"

# -------------------------------------------------------------------------------------------- checks


def _require_tokens(x: Tensor) -> None:
    require_floating(_OP, "x", x)
    if x.dim() != 2:
        raise ArgumentError(
            f"{_OP}: x must have two axes, tokens and columns, got shape {tuple(x.shape)}; flatten batch and time first"
        )


def _check_layer(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> None:
    """Requires x [T, D], gate_up [E, 2I, D] and down [E, D, I] in one dtype, and weights [T, k]."""
    _require_tokens(x)
    columns = x.shape[1]
    require_floating(_OP, "gate_up", gate_up)
    if gate_up.dim() != 3 or gate_up.shape[1] % 2 or gate_up.shape[2] != columns:
        raise ArgumentError(
            f"{_OP}: gate_up must have shape [experts, 2·I, {columns}], the gate's rows first, for x with {columns} "
            f"columns, got {tuple(gate_up.shape)}"
        )
    require_floating(_OP, "down", down)
    if down.dim() != 3:
        raise ArgumentError(f"{_OP}: down must have shape [experts, columns, I], got {tuple(down.shape)}")
    if down.shape[0] != gate_up.shape[0]:
        raise ArgumentError(
            f"{_OP}: down must have as many experts as gate_up, {gate_up.shape[0]}, got {down.shape[0]}"
        )
    require_like(_OP, "gate_up", gate_up, "x", x, tuple(gate_up.shape))
    require_like(_OP, "down", down, "x", x, (gate_up.shape[0], columns, gate_up.shape[1] // 2))
    require_floating(_OP, "weights", weights)
    if weights.device != x.device:
        raise ArgumentError(f"{_OP}: weights must be on the device of x, {x.device}, got {weights.device}")
    if weights.dim() != 2 or weights.shape[0] != x.shape[0] or weights.shape[1] < 1:
        raise ArgumentError(
            f"{_OP}: weights must have shape [{x.shape[0]}, k], a line for each token of x and k ≥ 1, "
            f"got {tuple(weights.shape)}"
        )


def _check(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> None:
    _require_tokens(x)
    require_ids(_OP, "indices", indices, "x", x)
    if indices.dim() != 2 or indices.shape[0] != x.shape[0] or indices.shape[1] < 1:
        raise ArgumentError(
            f"{_OP}: indices must have shape [tokens, k], a line for each token of x, whose shape is {tuple(x.shape)}, "
            f"and k ≥ 1, got {tuple(indices.shape)}"
        )
    _check_layer(x, gate_up, down, weights)
    if weights.shape != indices.shape:
        raise ArgumentError(
            f"{_OP}: weights must have the shape of indices, {tuple(indices.shape)}, got {tuple(weights.shape)}"
        )


def _check_backward(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, gu: Tensor, *rest: Any
) -> None:
    _check_layer(x, gate_up, down, weights)
    require_like(_OP, "dy", dy, "x", x)
    rows = weights.shape[0] * weights.shape[1]
    require_like(_OP, "gu", gu, "x", x, (rows, gate_up.shape[1]))
    shapes = (gate_up.shape[0] + 1,), (rows,), tuple(weights.shape)
    for name, tensor, shape in zip(Layout._fields, rest[:3], shapes, strict=True):
        require_ids(_OP, name, tensor, "x", x)
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != shape:
            raise ArgumentError(
                f"{_OP}: {name} must be int32 of shape {shape}, as the forward gives it, got {short(tensor.dtype)} of "
                f"shape {tuple(tensor.shape)}"
            )
        if not torch.compiler.is_compiling() and not tensor.is_contiguous():
            raise ArgumentError(f"{_OP}: {name} must be contiguous, as the forward gives it")


# --------------------------------------------------------------------------------------- the operator


def _facts(dtypes: tuple[torch.dtype, ...], weights: Tensor, **tensors: Tensor) -> Facts:
    """The facts of a problem. Kernels read `tensors`, such as x and down, contiguous; weights may have any layout."""
    x, down = tensors["x"], tensors["down"]
    sizes = (x.shape[0], x.shape[1], down.shape[0], down.shape[2], weights.shape[1])
    return Facts(dtypes, copied_layout({}, tensors), sizes)


def _describe(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor, keep: bool) -> Facts:
    dtypes = x.dtype, indices.dtype, weights.dtype
    return _facts(dtypes, weights, x=x, gate_up=gate_up, down=down, indices=indices)


def _describe_backward(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, gu: Tensor, *rest: Any
) -> Facts:
    return _facts((x.dtype, weights.dtype), weights, dy=dy, x=x, gate_up=gate_up, down=down, gu=gu)


def _allocate(
    x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor, keep: bool
) -> tuple[Tensor, ...]:
    rows = indices.shape[0] * indices.shape[1] if keep else 0
    gu = x.new_empty((rows, gate_up.shape[1]))
    return empty_like(x), gu, *allocate_layout(indices, gate_up.shape[0])


def _flops(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor, keep: bool) -> int:
    """The operations of gate_up[e] · x and down[e] · h for each row."""
    return 2 * weights.numel() * x.shape[1] * (gate_up.shape[1] + down.shape[2])


def _flops_backward(dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *rest: Any) -> int:
    """The operations of dh = down[e]ᵀ · dy, which all gradients but ddown need, and of one product each for dx,
    dgate_up and ddown."""
    need = rest[-1]
    of_gate_up = bool(need & plans.NEED_X) + bool(need & plans.NEED_GATE_UP)
    of_down = bool(need & ~plans.NEED_DOWN) + bool(need & plans.NEED_DOWN)
    return 2 * weights.numel() * x.shape[1] * (of_gate_up * gate_up.shape[1] + of_down * down.shape[2])


_experts = Op(
    "moe_experts",
    label=_OP,
    inputs=("x", "gate_up", "down", "indices", "weights"),
    outputs=("y",),
    kept=("gu", *Layout._fields),
    differentiable=("x", "gate_up", "down", "weights"),
    autocast=("x", "gate_up", "down"),
    check=_check,
    allocate=_allocate,
    describe=_describe,
    forward=lambda: plans.EXPERTS,
    flops=_flops,
    adjoint=Adjoint(
        lambda: plans.EXPERTS_BACKWARD,
        _describe_backward,
        saves=("x", "gate_up", "down", "weights", "gu", *Layout._fields),
        check=_check_backward,
        flops=_flops_backward,
    ),
)


@_experts.public
def experts(
    x: Float[Tensor, "tokens columns"],
    gate_up: Float[Tensor, "experts two_inner columns"],
    down: Float[Tensor, "experts columns inner"],
    indices: Int[Tensor, "tokens slots"],
    weights: Float[Tensor, "tokens slots"],
    *,
    preference: Preference | None = None,
) -> Float[Tensor, "tokens columns"]:
    """y[t] = Σ_j weights[t, j] · down[e] · (silu(g) ⊙ u), with [g; u] = gate_up[e] · x[t] and e = indices[t, j].

    Args:
        x: the tokens; float64, float32, bfloat16 or float16, kept by the result.
        gate_up: for each expert, I rows of the gate and I rows of up, in the dtype of x.
        down: for each expert, the matrix back to the columns of x, in the dtype of x.
        indices: int32 or int64, the experts of each token. An expert that occurs twice is added twice. An index out of
            range adds nothing and has no gradient. Its position and value are reported: at once on the CPU, and on a
            GPU through `adjoint.check()`.
        weights: the factor of each expert's result, in any of the four types, whichever that of x is. Products and sums
            with it are computed in float32, or in float64 if x is float64.
        preference: narrows the choice of plans for this call and its backward.

    Under autocast x, gate_up and down are cast to its dtype, unless they are float64; weights stay as they are.

    Raises:
        ArgumentError: shapes, dtypes or devices disagree, or (on the CPU) an index is out of range.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> x = torch.tensor([[1.0, 2.0]])
    >>> gate_up = torch.tensor([[[0.0, 0.0], [0.0, 0.0]], [[20.0, 0.0], [0.0, 1.0]]])
    >>> down = torch.tensor([[[1.0], [1.0]], [[1.0], [0.5]]])
    >>> experts(x, gate_up, down, torch.tensor([[1, 0]]), torch.tensor([[0.5, 0.5]]))
    tensor([[20., 10.]])
    """
    return _experts.call(x, gate_up, down, indices, weights, preference=preference)  # type: ignore[no-any-return]
