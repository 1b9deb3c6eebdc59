"""The stages of the gated delta rule that have no kernels: G, A, T, the states and the outputs.

Their mathematics stand in the docstring of `stages`, their adjoints beside the code, in `eager.py`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_floating
from adjoint.core.errors import ArgumentError
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.preference import Preference
from adjoint.core.problem import short, wide_dtype
from adjoint.ops.gated_delta import arguments as metadata
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.stages.chunks import plans
from adjoint.ops.gated_delta.stages.in_chunks import state_count

Bounds = Int[Tensor, " bounds"] | None


def _facts(*inputs: Tensor) -> Facts:
    return Facts(tuple(x.dtype for x in inputs), sizes=(inputs[0].shape[-1],))


def _require_wide(
    op: str, name: str, value: Tensor, shape: tuple[int, ...], meaning: str, like_name: str, like: Tensor
) -> None:
    """A tensor in float32, float64 beside float64."""
    require_floating(op, name, value)
    metadata.require_shape(op, name, value, shape, meaning)
    if value.dtype != wide_dtype(like.dtype):
        raise ArgumentError(f"{op}: {name} must be {short(wide_dtype(like.dtype))}, got {short(value.dtype)}")
    metadata.require_device(op, name, value, like_name, like)


def _require_packing(op: str, like_name: str, like: Tensor, cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is not None:
        metadata.require_cu_seqlens(op, cu_seqlens, like, like_name)


def _sequences(like: Tensor, cu_seqlens: Tensor | None) -> int:
    return like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


# ------------------------------------------------------------------------------------- cumulative_decay


def _check_decay(g: Tensor, cu_seqlens: Tensor | None, chunk: int) -> None:
    metadata.require_axes("cumulative_decay", "g", g, "batch, time, value heads")
    metadata.require_chunk("cumulative_decay", "a chunk's matrix", chunk)
    _require_packing("cumulative_decay", "g", g, cu_seqlens)


_decay = Op(
    "cumulative_decay",
    inputs=("g", "cu_seqlens?"),
    differentiable=("g",),
    options="int chunk",
    outputs=("G",),
    check=_check_decay,
    allocate=lambda g, cu_seqlens, chunk: (g.new_empty(g.shape, dtype=wide_dtype(g.dtype)),),
    describe=lambda g, cu_seqlens, chunk: _facts(g),
    forward=lambda: plans.CUMULATIVE_DECAY,
    adjoint=Adjoint(lambda: plans.CUMULATIVE_DECAY_BACKWARD, lambda dG, g, *_: _facts(g)),
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

    >>> import torch
    >>> cumulative_decay(torch.full((1, 5, 1), -1.0), 2).flatten()
    tensor([-1., -2., -1., -2., -1.])
    """
    return _decay.call(g, cu_seqlens, chunk, preference=preference)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------- gram


def _check_gram(k: Tensor, beta: Tensor, G: Tensor, cu_seqlens: Tensor | None, chunk: int) -> None:
    op = "gram"
    metadata.require_axes(op, "k", k, "batch, time, key heads, K")
    metadata.require_head_size(op, "k", "K", k.shape[3])
    metadata.require_axes(op, "beta", beta, "batch, time, value heads")
    shape = (k.shape[0], k.shape[1], beta.shape[2])
    _require_wide(op, "beta", beta, shape, "[batch, time, value heads]", "k", k)
    _require_wide(op, "G", G, shape, "[batch, time, value heads]", "k", k)
    metadata.require_heads(op, "k", k.shape[2], "beta", beta.shape[2])
    metadata.require_chunk(op, "the result", chunk)
    _require_packing(op, "k", k, cu_seqlens)


_gram = Op(
    "gram",
    inputs=("k", "beta", "G", "cu_seqlens?"),
    differentiable=("k", "beta", "G"),
    options="int chunk",
    outputs=("A",),
    check=_check_gram,
    allocate=lambda k, beta, G, cu_seqlens, chunk: (beta.new_empty((*beta.shape, chunk)),),
    describe=lambda k, beta, G, cu_seqlens, chunk: _facts(k, beta, G),
    forward=lambda: plans.GRAM,
    adjoint=Adjoint(lambda: plans.GRAM_BACKWARD, lambda dA, k, beta, G, *_: _facts(k, beta, G)),
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
    _require_packing("solve", "A", A, cu_seqlens)


_solve = Op(
    "solve",
    inputs=("A", "cu_seqlens?"),
    differentiable=("A",),
    outputs=("T",),
    check=_check_solve,
    allocate=lambda A, cu_seqlens: (A.new_empty(A.shape),),
    describe=lambda A, cu_seqlens: _facts(A),
    forward=lambda: plans.SOLVE,
    adjoint=Adjoint(lambda: plans.SOLVE_BACKWARD, lambda dT, A, cu_seqlens: _facts(A)),
)


@_solve.public
def solve(
    A: Float[Tensor, "batch time value_heads chunk"],
    *,
    cu_seqlens: Bounds = None,
    preference: Preference | None = None,
) -> Float[Tensor, "batch time value_heads chunk"]:
    """T = (I + A)⁻¹ of each chunk, A in float32 or float64; what stands on its diagonal and above is not read.

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
    batch, time, key_heads, K = k.shape
    heads, V = u.shape[2:]
    metadata.require_same(op, "u", u, "k", k)
    metadata.require_shape(op, "u", u, (batch, time, heads, V), "with the batch and time of k")
    metadata.require_same(op, "w", w, "k", k)
    metadata.require_shape(op, "w", w, (batch, time, heads, K), "[batch, time, value heads, K]")
    metadata.require_head_size(op, "k", "K", K)
    metadata.require_head_size(op, "u", "V", V)
    metadata.require_heads(op, "k", key_heads, "u", heads)
    _require_wide(op, "G", G, (batch, time, heads), "[batch, time, value heads]", "k", k)
    _require_packing(op, "k", k, cu_seqlens)
    shape = (_sequences(k, cu_seqlens), heads, K, V)
    metadata.require_states(op, "state", state, shape, k, "k", "k, w and u")
    metadata.require_chunk(op, "a chunk's matrix", chunk)


def _allocate_carry(
    k: Tensor, w: Tensor, u: Tensor, G: Tensor, state: Tensor, cu_seqlens: Tensor | None, chunk: int
) -> tuple[Tensor, ...]:
    places = state_count(k.shape[0] * k.shape[1], _sequences(k, cu_seqlens), chunk)
    return u.new_empty(u.shape), state.new_empty((places, *state.shape[1:])), state.new_empty(state.shape)


_carry = Op(
    "carry",
    inputs=("k", "w", "u", "G", "state", "cu_seqlens?"),
    differentiable=("k", "w", "u", "G", "state"),
    options="int chunk",
    outputs=("values", "states", "final_state"),
    check=_check_carry,
    allocate=_allocate_carry,
    describe=lambda k, w, u, G, state, *_: _facts(k, w, u, G, state),
    forward=lambda: plans.CARRY,
    adjoint=Adjoint(lambda: plans.CARRY_BACKWARD, lambda dvalues, dstates, dfinal, *inputs: _facts(*inputs[:5])),
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
    """What is new in the values, v'; the state each chunk begins with; and the final states.

    The states lie in `[⌊B·T / chunk⌋ + N, H, K, V]`: those of sequence n, which begins at token s of all, from place
    ⌊s / chunk⌋ + n on, so that the size depends on no value; places in between are 0. `output` reads them there.

    >>> import torch
    >>> k = w = torch.ones(1, 2, 1, 1)
    >>> u, G, state = torch.full((1, 2, 1, 1), 3.0), torch.zeros(1, 2, 1), torch.ones(1, 1, 1, 1)
    >>> [x.flatten().tolist() for x in carry(k, w, u, G, state, chunk=1)]
    [[2.0, 0.0], [1.0, 3.0, 0.0], [3.0]]
    """
    return _carry.call(k, w, u, G, state, cu_seqlens, chunk, preference=preference)  # type: ignore[no-any-return]


# ----------------------------------------------------------------------------------------------- output


def _check_output(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    states: Tensor,
    G: Tensor,
    cu_seqlens: Tensor | None,
    chunk: int,
    scale: float,
) -> None:
    op = "output"
    metadata.require_queries(op, q, k, values, "values")
    _require_wide(op, "G", G, tuple(values.shape[:3]), "[batch, time, value heads]", "q", q)
    _require_packing(op, "q", q, cu_seqlens)
    metadata.require_chunk(op, "a chunk's matrix", chunk)
    places = state_count(q.shape[0] * q.shape[1], _sequences(q, cu_seqlens), chunk)
    shape = (places, values.shape[2], q.shape[3], values.shape[3])
    metadata.require_states(op, "states", states, shape, q, tokens="q, k and values")


_output = Op(
    "output",
    inputs=("q", "k", "values", "states", "G", "cu_seqlens?"),
    differentiable=("q", "k", "values", "states", "G"),
    options="int chunk, float scale",
    outputs=("o",),
    check=_check_output,
    allocate=lambda q, k, values, states, G, cu_seqlens, chunk, scale: (values.new_empty(values.shape),),
    describe=lambda q, k, values, states, G, *_: _facts(q, k, values, states, G),
    forward=lambda: plans.OUTPUT,
    adjoint=Adjoint(lambda: plans.OUTPUT_BACKWARD, lambda do, *inputs: _facts(*inputs[:5])),
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
    """The outputs, from v' and the states that `carry` gives; scale is 1/sqrt(K) by default.

    >>> import torch
    >>> q = k = torch.ones(1, 2, 1, 1)
    >>> values, G = torch.tensor([2.0, 0.0]).view(1, 2, 1, 1), torch.zeros(1, 2, 1)
    >>> output(q, k, values, torch.tensor([1.0, 3.0, 0.0]).view(3, 1, 1, 1), G, chunk=1).flatten()
    tensor([3., 3.])
    """
    metadata.require_axes("output", "q", q, "batch, time, key heads, K")
    scale = metadata.scale_of("output", scale, q.shape[3])
    return _output.call(q, k, values, states, G, cu_seqlens, chunk, scale, preference=preference)  # type: ignore[no-any-return]
