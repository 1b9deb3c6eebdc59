"""Dispatch.   rows[inverse[t, j], :] = x[t, :]

with the rows in order of (indices[t, j], t, j): grouped by expert, then by token, then by slot. Every entry has
a row, however many an expert gets: nothing is dropped and nothing padded.

Adjoint, given drows:   dx[t, :] = Σ over j, in order, of drows[inverse[t, j], :]

Saves the layout alone. An index out of range belongs to no expert: its row stands after all others, past the
last offset, is zero, and has no gradient.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import as_int, require_floating, require_ids
from adjoint.core.errors import ArgumentError
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.preference import Preference
from adjoint.ops.moe.dispatch import plans
from adjoint.ops.moe.layout import Layout, allocate
from adjoint.ops.moe.token_rows import check_rows, facts

_OP = "moe.dispatch"

# -------------------------------------------------------------------------------------------- checks


def _check(x: Tensor, indices: Tensor, num_experts: int) -> None:
    require_floating(_OP, "x", x)
    require_ids(_OP, "indices", indices, "x", x)
    if x.dim() == 0 or indices.dim() != x.dim() or indices.shape[:-1] != x.shape[:-1]:
        raise ArgumentError(
            f"{_OP}: x and indices must have the same axes but the last, x [..., columns] and indices [..., slots], "
            f"got shapes {tuple(x.shape)} and {tuple(indices.shape)}"
        )
    if isinstance(num_experts, bool) or not isinstance(num_experts, int | torch.SymInt) or num_experts < 1:
        raise ArgumentError(f"{_OP}: num_experts must be an integer of at least 1, got {num_experts!r}")


# --------------------------------------------------------------------------------------- the operator


def _describe(x: Tensor, indices: Tensor, num_experts: int) -> Facts:
    return facts((x.dtype, indices.dtype), indices, num_experts, x.shape[-1], {"x": x}, {"indices": indices})


def _describe_backward(drows: Tensor, inverse: Tensor, offsets: Tensor) -> Facts:
    layout: dict[str, Tensor | None] = {"inverse": inverse, "offsets": offsets}
    return facts((drows.dtype,), inverse, offsets.shape[0] - 1, drows.shape[1], {}, layout)


_dispatch = Op(
    "moe_dispatch",
    label=_OP,
    inputs=("x", "indices"),
    options="SymInt num_experts",
    outputs=("rows", "offsets", "permutation", "inverse"),
    differentiable=("x",),
    constant=("offsets", "permutation", "inverse"),
    check=_check,
    allocate=lambda x, indices, num_experts: (
        x.new_empty((indices.numel(), x.shape[-1])),
        *allocate(indices, num_experts),
    ),
    describe=_describe,
    forward=lambda: plans.DISPATCH,
    adjoint=Adjoint(
        lambda: plans.DISPATCH_BACKWARD,
        _describe_backward,
        saves=("inverse", "offsets"),
        options="",
        options_of=lambda x, indices, num_experts: (),
        check=lambda drows, inverse, offsets: check_rows(_OP, "drows", drows, inverse, offsets),
        allocate=lambda drows, inverse, offsets: (drows.new_empty((*inverse.shape[:-1], drows.shape[1])),),
    ),
)


@_dispatch.public
def dispatch(
    x: Float[Tensor, "*tokens columns"],
    indices: Int[Tensor, "*tokens slots"],
    num_experts: int,
    *,
    preference: Preference | None = None,
) -> tuple[Float[Tensor, "rows columns"], Layout]:
    """Copies each token's row once for each of its experts, grouped by expert; and gives the layout of the rows.

    The order is a pure function of `indices`: by expert, then token, then slot. Every entry has a row.

    Args:
        x: the tokens; float64, float32, bfloat16 or float16, kept by the rows.
        indices: the experts of each token; int32 or int64.
        num_experts: the number of experts; some may have no tokens.
        preference: narrows the choice of plans for this call and its backward.

    Returns:
        The rows, byte-identical copies, and their `Layout`: `offsets`, `permutation` and `inverse`, int32.

    Raises:
        ArgumentError: shapes, dtypes or devices are wrong, or (on the CPU) an index is out of range. On a GPU
            `adjoint.check()` raises for it. Meanwhile its row is zero, stands past the last offset, and `combine`
            leaves it out.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> rows, layout = dispatch(torch.tensor([[1.0], [2.0]]), torch.tensor([[2, 0], [0, 1]]), 4)
    >>> rows.T
    tensor([[1., 2., 2., 1.]])
    >>> layout.offsets, layout.permutation
    (tensor([0, 2, 3, 4, 4], dtype=torch.int32), tensor([1, 2, 3, 0], dtype=torch.int32))
    """
    rows, *layout = _dispatch.call(x, indices, as_int(num_experts), preference=preference)
    return rows, Layout(*layout)
