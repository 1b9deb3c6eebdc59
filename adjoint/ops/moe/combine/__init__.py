"""Combine.   y[t, :] = Σ over j, in order, of weights[t, j] · rows[inverse[t, j], :]

Adjoint, given dy:   drows[inverse[t, j], :] = weights[t, j] · dy[t, :]
                     dweights[t, j]          = dy[t, :] · rows[inverse[t, j], :]

Without weights the sum is plain: the adjoint of dispatch. Saves the weights and the layout, and the rows only
where the weights' gradient is wanted. Rows past the last offset belong to no expert: they count for nothing,
whatever they hold, and their gradient is 0.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_floating, require_like
from adjoint.core.errors import ArgumentError, is_checking
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.preference import Preference
from adjoint.core.problem import short
from adjoint.ops.moe.combine import plans
from adjoint.ops.moe.combine.plans import NEED_ROWS, NEED_WEIGHTS
from adjoint.ops.moe.layout import Layout
from adjoint.ops.moe.token_rows import check_layout, check_rows, facts

_OP = "moe.combine"

# -------------------------------------------------------------------------------------------- checks


def _check_weights(weights: Tensor | None, rows_name: str, rows: Tensor, inverse: Tensor) -> None:
    if weights is None:
        return
    require_floating(_OP, "weights", weights)
    if weights.dtype not in (torch.float32, rows.dtype):
        raise ArgumentError(
            f"{_OP}: weights must be float32, or of the dtype of {rows_name}, {short(rows.dtype)}, "
            f"got {short(weights.dtype)}"
        )
    if weights.shape != inverse.shape:
        raise ArgumentError(
            f"{_OP}: weights must have the shape of layout.inverse, one for each entry, {tuple(inverse.shape)}, "
            f"got {tuple(weights.shape)}"
        )
    if weights.device != rows.device:
        raise ArgumentError(f"{_OP}: weights must be on the device of {rows_name}, {rows.device}, got {weights.device}")


def _check(rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor) -> None:
    check_rows(_OP, "rows", rows, inverse, offsets)
    _check_weights(weights, "rows", rows, inverse)


def _check_backward(
    dy: Tensor, rows: Tensor | None, weights: Tensor | None, inverse: Tensor, offsets: Tensor, need: int
) -> None:
    require_floating(_OP, "dy", dy)
    check_layout(_OP, "dy", dy, inverse, offsets)
    if dy.dim() == 0 or dy.shape[:-1] != inverse.shape[:-1]:
        raise ArgumentError(
            f"{_OP}: dy must have the axes of layout.inverse but the last, {tuple(inverse.shape[:-1])}, and columns, "
            f"got {tuple(dy.shape)}"
        )
    _check_weights(weights, "dy", dy, inverse)
    if rows is not None:
        require_like(_OP, "rows", rows, "dy", dy, (inverse.numel(), dy.shape[-1]))
    if need & NEED_WEIGHTS and (rows is None or weights is None):
        raise ArgumentError(f"{_OP}: the gradient of weights needs rows and weights, and one is not given")


# --------------------------------------------------------------------------------------- the operator


def _describe(
    tokens: dict[str, Tensor], like: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor
) -> Facts:
    dtypes = (like.dtype,) if weights is None else (like.dtype, weights.dtype)
    others = {"weights": weights, "inverse": inverse, "offsets": offsets}
    return facts(dtypes, inverse, offsets.shape[0] - 1, like.shape[-1], tokens, others)


def _allocate_backward(
    dy: Tensor, rows: Tensor | None, weights: Tensor | None, inverse: Tensor, offsets: Tensor, need: int
) -> tuple[Tensor, Tensor]:
    like = dy if weights is None else weights
    return (
        dy.new_empty((inverse.numel(), dy.shape[-1]) if need & NEED_ROWS else (0,)),
        like.new_empty(tuple(inverse.shape) if need & NEED_WEIGHTS else (0,)),
    )


_combine = Op(
    "moe_combine",
    label=_OP,
    inputs=("rows", "weights?", "inverse", "offsets"),
    outputs=("y",),
    differentiable=("rows", "weights"),
    check=_check,
    allocate=lambda rows, weights, inverse, offsets: (rows.new_empty((*inverse.shape[:-1], rows.shape[1])),),
    describe=lambda rows, *others: _describe({}, rows, *others),
    forward=lambda: plans.COMBINE,
    adjoint=Adjoint(
        lambda: plans.COMBINE_BACKWARD,
        lambda dy, rows, weights, inverse, offsets, need: _describe({"dy": dy}, dy, weights, inverse, offsets),
        saves=("rows?", "weights?", "inverse", "offsets"),
        omits=lambda needs, *arguments: () if needs["weights"] else ("rows",),
        check=_check_backward,
        allocate=_allocate_backward,
    ),
)


@_combine.public
def combine(
    rows: Float[Tensor, "rows columns"],
    weights: Float[Tensor, "*tokens slots"] | None,
    layout: Layout,
    *,
    preference: Preference | None = None,
) -> Float[Tensor, "*tokens columns"]:
    """y[t, :] = Σ weights[t, j] · rows[layout.inverse[t, j], :], added in the order of j.

    This puts together the rows of each token, which `dispatch` took apart.

    Args:
        rows: one row for each entry, in the order of the layout; float64, float32, bfloat16 or float16, kept by the
            result.
        weights: one weight for each entry, float32 or of the dtype of `rows`; None for a plain sum.
        layout: the layout from `dispatch`. Entries past its last offset are left out.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: shapes, dtypes or devices are wrong, or (on the CPU; on a GPU `adjoint.check()` raises)
            the layout names a row that does not exist. Inside `adjoint.checked()` also if it names a row twice.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> from adjoint.ops.moe.dispatch import dispatch
    >>> rows, layout = dispatch(torch.tensor([[1.0], [2.0]]), torch.tensor([[2, 0], [0, 1]]), 3)
    >>> combine(rows, torch.tensor([[0.5, 0.5], [0.25, 0.5]]), layout)
    tensor([[1.0000],
            [1.5000]])
    """
    if not isinstance(layout, Layout):
        raise ArgumentError(f"{_OP}: layout must be the Layout that moe.dispatch returned, got {type(layout).__name__}")
    return combine_tensors(rows, weights, layout.inverse, layout.offsets, preference=preference)


@_combine.public
def combine_tensors(
    rows: Float[Tensor, "rows columns"],
    weights: Float[Tensor, "*tokens slots"] | None,
    inverse: Int[Tensor, "*tokens slots"],
    offsets: Int[Tensor, " experts_and_one"],
    *,
    preference: Preference | None = None,
) -> Float[Tensor, "*tokens columns"]:
    """`combine` with the tensors of a layout as separate arguments, as plans and checks take them."""
    y = _combine.call(rows, weights, inverse, offsets, preference=preference)
    if not torch.compiler.is_compiling() and is_checking():
        _check_promise(inverse)
    return y  # type: ignore[no-any-return]


def _check_promise(inverse: Tensor) -> None:
    """Checks, in checking mode, that every row has only one entry. This waits for the device."""
    rows = inverse.reshape(-1).sort().values
    repeated = rows[1:] == rows[:-1]
    if bool(repeated.any()):
        row = int(rows[1:][repeated][0])
        raise ArgumentError(
            f"{_OP}: layout.inverse must name every row once, got row {row} more than once; give the layout that "
            f"moe.dispatch returned, and a weight of 0 to leave an entry out"
        )
