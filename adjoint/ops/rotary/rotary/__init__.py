"""The rotary position embedding.   y₁ = x₁·cos₁ − x₂·sin₁,   y₂ = x₂·cos₂ + x₁·sin₂

of pairs (x₁, x₂) among the first R columns of every head; the others are copied. The adjoint is the rotation back:

    dx₁ = dy₁·cos₁ + dy₂·sin₂,   dx₂ = dy₂·cos₂ − dy₁·sin₁

Saves cos and sin alone. In place is an op of its own, without an adjoint.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from adjoint.core.arguments import as_int, require_flag, require_float32_or_like, require_floating, require_like
from adjoint.core.errors import ArgumentError
from adjoint.core.layout import empty_like, overlaps_itself, share_memory
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.preference import Preference
from adjoint.ops.rotary.rotary import plans

_OP = "rotary"
_INPUTS = ("q", "k?", "cos", "sin")
_OPTIONS = "bool interleaved, int rotary_dim"


def _require_heads(name: str, x: Tensor) -> None:
    require_floating(_OP, name, x)
    if x.dim() != 4:
        raise ArgumentError(f"{_OP}: {name} must have axes [batch, time, heads, D], got shape {tuple(x.shape)}")


def _check(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, rotary_dim: int) -> None:
    _require_heads("q", q)
    if k is not None:
        _require_heads("k", k)
        batch, time, _, size = q.shape
        require_like(_OP, "k", k, "q", q, (batch, time, k.shape[2], size))
    _check_tables(q, cos, sin, rotary_dim)


def _check_tables(q: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> None:
    """Requires a row of cos and one of sin for each token of q, as wide as the rotated columns or half as wide."""
    require_floating(_OP, "cos", cos)
    require_float32_or_like(_OP, "cos", cos, "q", q)
    if cos.device != q.device:
        raise ArgumentError(f"{_OP}: cos must be on the device of q, {q.device}, got {cos.device}")
    batch, time, _, size = q.shape
    shape = tuple(cos.shape)
    if cos.dim() not in (2, 3):
        raise ArgumentError(f"{_OP}: cos must have axes [time, width] or [batch, time, width], got shape {shape}")
    width = shape[-1]
    if rotary_dim % 2 or rotary_dim < 2 or rotary_dim > size:
        told = "the width of cos" if rotary_dim == width else "rotary_dim"
        raise ArgumentError(
            f"{_OP}: {told}, which says how many columns are rotated, must be even, from 2 to the {size} columns of a "
            f"head, got {rotary_dim}"
        )
    if width not in (rotary_dim, rotary_dim // 2):
        raise ArgumentError(
            f"{_OP}: cos must have a number for each of the {rotary_dim} columns that are rotated, or for each of "
            f"their {rotary_dim // 2} pairs, got a width of {width}"
        )
    if shape[-2] != time:
        raise ArgumentError(f"{_OP}: cos must have a row for each of the {time} tokens of q, got {shape[-2]}")
    if cos.dim() == 3 and shape[0] not in (1, batch):
        raise ArgumentError(f"{_OP}: cos must have the batch of q, {batch}, or 1, got {shape[0]}")
    require_like(_OP, "sin", sin, "cos", cos)


def _check_in_place(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, rotary_dim: int) -> None:
    _check(q, k, cos, sin, interleaved, rotary_dim)
    if q.is_meta or torch.compiler.is_compiling():  # there are no addresses to check
        return
    tensors = {"q": q, "k": k, "cos": cos, "sin": sin}
    for name in ("q", "k"):
        x = tensors.pop(name)
        if x is None:
            continue
        if overlaps_itself(x):
            raise ArgumentError(
                f"{_OP}: {name}, which in_place=True overwrites, has elements that share memory: shape "
                f"{tuple(x.shape)}, strides {x.stride()}; give it memory of its own, as by clone()"
            )
        for other, y in tensors.items():
            if y is not None and share_memory(x, y):
                raise ArgumentError(
                    f"{_OP}: {name}, which in_place=True overwrites, shares memory with {other}; "
                    f"give it memory of its own, as by clone()"
                )


def _layout(*tensors: Tensor | None) -> str:
    """ "rows" where the columns of every tensor are adjacent, "strided" otherwise."""
    for x in tensors:
        if x is not None and x.stride(-1) != 1 and x.shape[-1] != 1:
            return "strided"
    return "rows"


def _describe(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, rotary_dim: int) -> Facts:
    sizes = (q.shape[3], q.shape[2], 0 if k is None else k.shape[2], cos.shape[-1])
    return Facts((q.dtype, cos.dtype), _layout(q, k, cos, sin), sizes)


# The backward gets only the heads and columns of q and k, because q and k are not saved. Either of the two upstream
# gradients may be absent, but not both.


def _describe_backward(drotated_q: Any, drotated_k: Any, cos: Tensor, sin: Tensor, *options: Any) -> Facts:
    _interleaved, _rotary_dim, q_heads, k_heads, size, _need = options
    dtype = (drotated_k if drotated_q is None else drotated_q).dtype
    layout = _layout(drotated_q, drotated_k, cos, sin)
    return Facts((dtype, cos.dtype), layout, (size, q_heads, k_heads, cos.shape[-1]))


def _allocate_backward(drotated_q: Any, drotated_k: Any, cos: Tensor, sin: Tensor, *options: Any) -> tuple[Tensor, ...]:
    _interleaved, _rotary_dim, q_heads, k_heads, size, need = options
    like = drotated_k if drotated_q is None else drotated_q
    sides = ((q_heads, need & plans.NEED_Q), (k_heads, need & plans.NEED_K))
    return tuple(like.new_empty((*like.shape[:2], heads, size) if needed else 0) for heads, needed in sides)


def _check_backward(drotated_q: Any, drotated_k: Any, cos: Tensor, sin: Tensor, *options: Any) -> None:
    _interleaved, rotary_dim, q_heads, k_heads, size, _need = options
    first = None
    for name, x, heads in (("drotated_q", drotated_q, q_heads), ("drotated_k", drotated_k, k_heads)):
        if x is not None:
            _require_heads(name, x)
            first = x if first is None else first
            require_like(_OP, name, x, "the gradients", first, (*first.shape[:2], heads, size))
    if first is None:
        raise ArgumentError(f"{_OP}: a backward takes drotated_q, drotated_k or both, got none")
    _check_tables(first, cos, sin, rotary_dim)


def _options_of_backward(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, rotary_dim: int
) -> tuple[Any, ...]:
    return interleaved, rotary_dim, q.shape[2], 0 if k is None else k.shape[2], q.shape[3]


_FORWARD: dict[str, Any] = {"inputs": _INPUTS, "options": _OPTIONS, "describe": _describe}

_rotary = Op(
    _OP,
    **_FORWARD,
    outputs=("rotated_q", "rotated_k"),
    differentiable=("q", "k"),
    absent=lambda q, k, *_: ("rotated_k",) if k is None else (),
    check=_check,
    allocate=lambda q, k, *_: (empty_like(q), q.new_empty(0 if k is None else k.shape)),
    forward=lambda: plans.ROTARY,
    adjoint=Adjoint(
        lambda: plans.ROTARY_BACKWARD,
        _describe_backward,
        saves=("cos", "sin"),
        options=f"{_OPTIONS}, int q_heads, int k_heads, int size",
        options_of=_options_of_backward,
        check=_check_backward,
        allocate=_allocate_backward,
    ),
)
_rotary_in_place = Op(
    f"{_OP}_in_place",
    **_FORWARD,
    label=_OP,
    outputs=(),
    differentiable=(),
    overwrites=("q", "k"),
    check=_check_in_place,
    allocate=lambda *_: (),
    forward=lambda: plans.ROTARY_IN_PLACE,
)


@_rotary.public
def rotary(
    q: Float[Tensor, "batch time heads D"],
    k: Float[Tensor, "batch time key_heads D"] | None,
    cos: Float[Tensor, "*batch time width"],
    sin: Float[Tensor, "*batch time width"],
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    in_place: bool = False,
    preference: Preference | None = None,
) -> tuple[Float[Tensor, "batch time heads D"], Float[Tensor, "batch time key_heads D"] | None]:
    """Rotates the first R columns of every head of q and k by the angles of their tokens, in one launch.

    The rotation is computed in float32 (float64 for float64) and rounded once. Columns from R on are copied. Each token
    has its own row of cos and sin, so the caller chooses the positions, also of packed sequences.

    Args:
        q: queries, any strides: a slice of a packed projection is read in place.
        k: keys, with any number of heads; None rotates only q.
        cos, sin: [time, width], or [batch, time, width], where the batch may be 1; float32 or of the dtype of q. The
            width is R, with a number for each column, or R/2, with a number for each pair. They have no gradient, and
            it is an error if one requires it.
        interleaved: whether pairs are neighbouring columns (2i, 2i + 1). By default column i of the first half of R has
            its partner in the second half (i, i + R/2). Tables of width R have the same layout.
        rotary_dim: R; by default the width of cos. Tables of width R/2 need it.
        in_place: whether to overwrite the rotated columns of q and k, which are returned, and no other columns. This is
            not differentiable.
        preference: narrows the choice of plans for this call and its backward.

    Returns:
        The rotated q and k, contiguous; in place q and k themselves. If k is None, None is returned for it.

    Raises:
        ArgumentError: shapes, dtypes, devices or widths do not fit, cos or sin require a gradient, or q or k of an
            in-place rotation require a gradient or have memory that overlaps.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> q = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(1, 1, 1, 5)
    >>> cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])  # a quarter of a circle, and none
    >>> rotary(q, None, cos, sin, rotary_dim=4)[0].flatten()
    tensor([-3.,  2.,  1.,  4.,  5.])
    >>> rotary(q, None, cos, sin, rotary_dim=4, interleaved=True)[0].flatten()
    tensor([-2.,  1.,  3.,  4.,  5.])
    """
    if rotary_dim is None:
        rotary_dim = cos.shape[-1] if isinstance(cos, Tensor) and cos.dim() else 0
    elif isinstance(rotary_dim := as_int(rotary_dim), bool) or not isinstance(rotary_dim, int | torch.SymInt):
        raise ArgumentError(f"{_OP}: rotary_dim must be a whole number, got {type(rotary_dim).__name__}")
    require_flag(_OP, "in_place", in_place)
    arguments = (q, k, cos, sin, require_flag(_OP, "interleaved", interleaved), rotary_dim)
    if torch.is_grad_enabled():
        for name, table in (("cos", cos), ("sin", sin)):
            if isinstance(table, Tensor) and table.requires_grad:
                raise ArgumentError(
                    f"{_OP}: {name} requires a gradient, and there is none for it; pass {name}.detach(), or make "
                    f"it under torch.no_grad()"
                )
        if in_place and any(isinstance(x, Tensor) and x.requires_grad for x in (q, k)):
            raise ArgumentError(
                f"{_OP}: in_place=True overwrites what autograd may need, and an input requires a gradient; call it "
                f"under torch.no_grad(), or with in_place=False"
            )
    if in_place:
        _rotary_in_place.call(*arguments, preference=preference)
        return q, k
    rotated_q, rotated_k = _rotary.call(*arguments, preference=preference)
    return rotated_q, None if k is None else rotated_k
