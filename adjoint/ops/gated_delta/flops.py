"""The operations of matrix products of the rule: those of the recurrence, 2·K·V for each product with a state.

They are not the operations of the chunked algorithm, which also has products within a chunk. Their number would depend
on the plan, on the size of a chunk and on the packing of sequences. The recurrence gives the same number for a whole
sequence, for its tokens one by one, and for any other implementation. A model's utilisation of a GPU is stated in such
numbers.
"""

from typing import Any

from torch import Tensor

from adjoint.ops.gated_delta.arguments import NEED_K, NEED_Q


def recurrence(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> int:
    """The operations of Sᵀk, k ⊗ β·(v − Sᵀk) and Sᵀq, for each token and value head."""
    return 3 * _product(q, v)


def recurrence_backward(do: Tensor | None, dstate: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> int:
    """The operations of S do for dq, of dS e and S de for dk, and of dS, which all gradients but dq need.

    dS takes dSᵀk, k ⊗ de and, if there is a do, q ⊗ do. The states, which the backward computes again, count only in
    the forward.
    """
    need, has_do = rest[-1], do is not None
    products = int(has_do) if need & NEED_Q else 0
    if need & ~NEED_Q:
        products += 2 + has_do
    if need & NEED_K:
        products += 2
    return products * _product(q, v)


def _product(q: Tensor, v: Tensor) -> int:
    """The operations of one product of a state and a vector, for all tokens and value heads."""
    return 2 * q.shape[3] * v.numel()
