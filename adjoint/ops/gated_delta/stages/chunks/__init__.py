"""The stages of the gated delta rule that have no kernels: G, A, T, the states and the outputs.

Their mathematics stand in the docstring of `stages`, their adjoints beside the code, in `eager.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.errors import ArgumentError
from adjoint.core.layout import empty_like
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.op.flops import Flops, no_products
from adjoint.core.preference import Preference
from adjoint.core.problem import short, wide_dtype
from adjoint.device.sequences import count_sequences, require_cu_seqlens
from adjoint.ops.gated_delta import arguments as metadata
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.stages.chunks import plans
from adjoint.ops.gated_delta.stages.in_chunks import state_count

Bounds = Int[Tensor, " bounds"] | None


def _stage(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    check: Callable[..., None],
    allocate: Callable[..., tuple[Tensor, ...]],
    options: str = "int chunk",
    flops: Flops = no_products,
    flops_backward: Flops = no_products,
) -> Op:
    """Declares a stage that takes `cu_seqlens` after its inputs, and has one plan.

    Its counted operations are those of products of whole chunks, not only of their lower halves. q and k of a key head
    are multiplied once for all of its value heads.
    """

    def describe(*arguments: Any) -> Facts:
        is_packed = arguments[len(inputs)] is not None
        return Facts(tuple(x.dtype for x in arguments[: len(inputs)]), sizes=(arguments[0].shape[-1], int(is_packed)))

    return Op(
        name,
        inputs=(*inputs, "cu_seqlens?"),
        differentiable=inputs,
        options=options,
        outputs=outputs,
        check=check,
        allocate=allocate,
        describe=describe,
        forward=lambda: plans.STAGES[name][:1],
        flops=flops,
        adjoint=Adjoint(
            lambda: plans.STAGES[name][1:],
            lambda *everything: describe(*everything[len(outputs) :]),
            flops=flops_backward,
        ),
    )


def _require_gate(op: str, name: str, gate: Tensor, shape: tuple[int, ...], like_name: str, like: Tensor) -> None:
    """Requires a gate [B, T, H] in float32, or in float64 beside float64."""
    dtypes = (wide_dtype(like.dtype),)
    metadata.require_beside(op, name, gate, shape, "[batch, time, value heads]", dtypes, like, like_name)


# ------------------------------------------------------------------------------------- cumulative_decay


def _check_decay(g: Tensor, cu_seqlens: Tensor | None, chunk: int) -> None:
    metadata.require_axes("cumulative_decay", "g", g, "batch, time, value heads")
    metadata.require_chunk("cumulative_decay", "a chunk's matrix", chunk)
    require_cu_seqlens("cumulative_decay", cu_seqlens, g, "g")


_decay = _stage(
    "cumulative_decay",
    ("g",),
    ("G",),
    _check_decay,
    lambda g, cu_seqlens, chunk: (g.new_empty(g.shape, dtype=wide_dtype(g.dtype)),),
)


@_decay.public
def cumulative_decay(
    g: Float[Tensor, "batch time value_heads"],
    chunk: int = CHUNK,
    *,
    cu_seqlens: Bounds = None,
    preference: Preference | None = None,
) -> Float[Tensor, "batch time value_heads"]:
    """G, the running sum of g within each chunk, in float32 (float64 for float64).

    A g below −104 (−746 for float64), including −inf, counts as −104 (−746). e^g is 0 either way, and the state is
    reset. But G stays finite, which the other stages need because they take differences of it. The gradient of such a g
    is 0.

    >>> import torch
    >>> cumulative_decay(torch.full((1, 5, 1), -1.0), 2).flatten()
    tensor([-1., -2., -1., -2., -1.])
    """
    return _decay.call(g, cu_seqlens, chunk, preference=preference)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------- gram


def _check_gram(k: Tensor, beta: Tensor, G: Tensor, cu_seqlens: Tensor | None, chunk: int) -> None:
    op = "gram"
    metadata.require_axes(op, "k", k, "batch, time, key heads, K")
    metadata.require_axes(op, "beta", beta, "batch, time, value heads")
    shape = (k.shape[0], k.shape[1], beta.shape[2])
    _require_gate(op, "beta", beta, shape, "k", k)
    _require_gate(op, "G", G, shape, "k", k)
    metadata.require_heads(op, "k", k, "beta", beta)
    metadata.require_chunk(op, "the result", chunk)
    require_cu_seqlens(op, cu_seqlens, k, "k")


def _flops_gram(k: Tensor, beta: Tensor, G: Tensor, cu_seqlens: Tensor | None, chunk: int) -> int:
    """The operations of k kᵀ."""
    return 2 * k.numel() * chunk


def _flops_gram_backward(dA: Tensor, *arguments: Any) -> int:
    """The operations of dk = (E + Eᵀ) k, with E summed over the value heads first. dβ and dG use k kᵀ, which counts in
    the forward."""
    *inputs, need = arguments
    return _flops_gram(*inputs) if need & 1 else 0


_gram = _stage(
    "gram",
    ("k", "beta", "G"),
    ("A",),
    _check_gram,
    lambda k, beta, G, cu_seqlens, chunk: (beta.new_empty((*beta.shape, chunk)),),
    flops=_flops_gram,
    flops_backward=_flops_gram_backward,
)


@_gram.public
def gram(
    k: Float[Tensor, "batch time key_heads K"],
    beta: Float[Tensor, "batch time value_heads"],
    G: Float[Tensor, "batch time value_heads"],
    *,
    chunk: int = CHUNK,
    cu_seqlens: Bounds = None,
    preference: Preference | None = None,
) -> Float[Tensor, "batch time value_heads chunk"]:
    """A_ij = β_i·(k_i·k_j)·e^{G_i−G_j} for i > j, 0 elsewhere; beta, G and A in float32 (float64 for float64).

    >>> import torch
    >>> k, beta, G = torch.ones(1, 3, 1, 2), torch.full((1, 3, 1), 0.5), torch.zeros(1, 3, 1)
    >>> gram(k, beta, G, chunk=2)[0, :, 0]
    tensor([[0., 0.],
            [1., 0.],
            [0., 0.]])
    """
    return _gram.call(k, beta, G, cu_seqlens, chunk, preference=preference)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------ solve


def _check_solve(A: Tensor, cu_seqlens: Tensor | None) -> None:
    metadata.require_axes("solve", "A", A, "batch, time, value heads, chunk")
    if A.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(f"solve: A must be float32 or float64, got {short(A.dtype)}; 16 bits lose the solution")
    metadata.require_chunk("solve", "A", A.shape[3])
    require_cu_seqlens("solve", cu_seqlens, A, "A")


def _flops_solve_backward(dT: Tensor, A: Tensor, cu_seqlens: Tensor | None) -> int:
    """The operations of Tᵀ dT Tᵀ. The forward counts nothing, because torch counts nothing for triangular systems."""
    return 2 * 2 * A.numel() * A.shape[3]


_solve = _stage(
    "solve",
    ("A",),
    ("T",),
    _check_solve,
    lambda A, cu_seqlens: (empty_like(A),),
    options="",
    flops_backward=_flops_solve_backward,
)


@_solve.public
def solve(
    A: Float[Tensor, "batch time value_heads chunk"],
    *,
    cu_seqlens: Bounds = None,
    preference: Preference | None = None,
) -> Float[Tensor, "batch time value_heads chunk"]:
    """T = (I + A)⁻¹ of each chunk, for A in float32 or float64. Only elements of A below the diagonal are read.

    >>> import torch
    >>> solve(torch.tensor([[0.0, 0.0], [0.5, 0.0]]).view(1, 2, 1, 2))[0, :, 0]
    tensor([[ 1.0000,  0.0000],
            [-0.5000,  1.0000]])
    """
    return _solve.call(A, cu_seqlens, preference=preference)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------ carry


def _check_carry(
    k: Tensor, w: Tensor, u: Tensor, G: Tensor, state: Tensor, cu_seqlens: Tensor | None, chunk: int
) -> None:
    op = "carry"
    metadata.require_axes(op, "k", k, "batch, time, key heads, K")
    metadata.require_axes(op, "u", u, "batch, time, value heads, V")
    batch, time, _, K = k.shape
    heads, V = u.shape[2:]
    metadata.require_same(op, "u", u, "k", k)
    metadata.require_shape(op, "u", u, (batch, time, heads, V), "with the batch and time of k")
    metadata.require_same(op, "w", w, "k", k)
    metadata.require_shape(op, "w", w, (batch, time, heads, K), "[batch, time, value heads, K]")
    metadata.require_heads(op, "k", k, "u", u)
    _require_gate(op, "G", G, (batch, time, heads), "k", k)
    require_cu_seqlens(op, cu_seqlens, k, "k")
    shape = (count_sequences(k, cu_seqlens), heads, K, V)
    metadata.require_states(op, "state", state, shape, k, "k", "k, w and u")
    metadata.require_chunk(op, "a chunk's matrix", chunk)


def _allocate_carry(
    k: Tensor, w: Tensor, u: Tensor, G: Tensor, state: Tensor, cu_seqlens: Tensor | None, chunk: int
) -> tuple[Tensor, ...]:
    places = state_count(k.shape[0] * k.shape[1], count_sequences(k, cu_seqlens), chunk)
    return empty_like(u), state.new_empty((places, *state.shape[1:])), empty_like(state)


def _flops_carry(k: Tensor, w: Tensor, u: Tensor, *rest: Any) -> int:
    """The operations of w S and kᵀ v'."""
    return 2 * 2 * w.numel() * u.shape[3]


def _flops_carry_backward(dvalues: Any, dstates: Any, dfinal: Any, k: Tensor, w: Tensor, u: Tensor, *rest: Any) -> int:
    """The operations of k dS⁺ and wᵀ dv', which all gradients need, of dv' Sᵀ for dw, and of v' dS⁺ᵀ for dk."""
    need = rest[-1]
    products = 2 * bool(need) + (need & 1) + (need >> 1 & 1)
    return 2 * products * w.numel() * u.shape[3]


_carry = _stage(
    "carry",
    ("k", "w", "u", "G", "state"),
    ("values", "states", "final_state"),
    _check_carry,
    _allocate_carry,
    flops=_flops_carry,
    flops_backward=_flops_carry_backward,
)


@_carry.public
def carry(
    k: Float[Tensor, "batch time key_heads K"],
    w: Float[Tensor, "batch time value_heads K"],
    u: Float[Tensor, "batch time value_heads V"],
    G: Float[Tensor, "batch time value_heads"],
    state: Float[Tensor, "sequences value_heads K V"],
    *,
    chunk: int = CHUNK,
    cu_seqlens: Bounds = None,
    preference: Preference | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new part of the values, v'; the state at the beginning of each chunk; and the final states.

    The states are in a tensor `[⌊B·T / chunk⌋ + N, H, K, V]`, whose size depends on no value. Those of sequence n,
    which begins at token s of all tokens, begin at place ⌊s / chunk⌋ + n. Places in between are 0. `output` reads them
    there.

    >>> import torch
    >>> k = w = torch.ones(1, 2, 1, 1)
    >>> u, G, state = torch.full((1, 2, 1, 1), 3.0), torch.zeros(1, 2, 1), torch.ones(1, 1, 1, 1)
    >>> [x.flatten().tolist() for x in carry(k, w, u, G, state, chunk=1)]
    [[2.0, 0.0], [1.0, 3.0, 0.0], [3.0]]
    """
    return _carry.call(k, w, u, G, state, cu_seqlens, chunk, preference=preference)  # type: ignore[no-any-return]


# ----------------------------------------------------------------------------------------------- output


def _check_output(*arguments: Any) -> None:
    q, k, values, states, G, cu_seqlens, chunk, _scale = arguments
    op = "output"
    metadata.require_queries(op, q, k, values, "values")
    _require_gate(op, "G", G, tuple(values.shape[:3]), "q", q)
    require_cu_seqlens(op, cu_seqlens, q, "q")
    metadata.require_chunk(op, "a chunk's matrix", chunk)
    places = state_count(q.shape[0] * q.shape[1], count_sequences(q, cu_seqlens), chunk)
    shape = (places, values.shape[2], q.shape[3], values.shape[3])
    metadata.require_states(op, "states", states, shape, q, tokens="q, k and values")


def _flops_output(q: Tensor, k: Tensor, values: Tensor, *rest: Any) -> int:
    """The operations of q S, of q kᵀ, and of its product with v'."""
    *_, chunk, _scale = rest
    return 2 * (q.numel() * chunk + values.numel() * (q.shape[3] + chunk))


def _flops_output_backward(do: Tensor, q: Tensor, k: Tensor, values: Tensor, *rest: Any) -> int:
    """The operations of M k and Mᵀ q by key head, of do Sᵀ for dq and dG, of do v'ᵀ for M, and of one product each for
    dv' and dS."""
    *_, chunk, _scale, need = rest
    need_q, need_k, need_values, need_states, need_G = (need >> bit & 1 for bit in range(5))
    of_states = (need_q | need_G) + need_states
    of_chunks = (need_q | need_k | need_G) + need_values
    of_scores = need_q + need_k
    return 2 * (q.numel() * chunk * of_scores + values.numel() * (q.shape[3] * of_states + chunk * of_chunks))


_output = _stage(
    "output",
    ("q", "k", "values", "states", "G"),
    ("o",),
    _check_output,
    lambda q, k, values, *_: (empty_like(values),),
    options="int chunk, float scale",
    flops=_flops_output,
    flops_backward=_flops_output_backward,
)


@_output.public
def output(
    q: Float[Tensor, "batch time key_heads K"],
    k: Float[Tensor, "batch time key_heads K"],
    values: Float[Tensor, "batch time value_heads V"],
    states: Float[Tensor, "places value_heads K V"],
    G: Float[Tensor, "batch time value_heads"],
    scale: float | None = None,
    *,
    chunk: int = CHUNK,
    cu_seqlens: Bounds = None,
    preference: Preference | None = None,
) -> Float[Tensor, "batch time value_heads V"]:
    """The outputs, from v' and the states from `carry`. The scale is 1/sqrt(K) by default.

    >>> import torch
    >>> q = k = torch.ones(1, 2, 1, 1)
    >>> values, G = torch.tensor([2.0, 0.0]).view(1, 2, 1, 1), torch.zeros(1, 2, 1)
    >>> output(q, k, values, torch.tensor([1.0, 3.0, 0.0]).view(3, 1, 1, 1), G, chunk=1).flatten()
    tensor([3., 3.])
    """
    metadata.require_axes("output", "q", q, "batch, time, key heads, K")
    scale = metadata.scale_of("output", scale, q.shape[3])
    return _output.call(q, k, values, states, G, cu_seqlens, chunk, scale, preference=preference)  # type: ignore[no-any-return]
