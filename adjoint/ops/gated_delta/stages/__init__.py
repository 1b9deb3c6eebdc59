"""The stages of the gated delta rule as operators of their own, for a chunk of C tokens of a sequence and a value head:

    G    = running sum of g                              cumulative_decay
    A_ij = β_i·(k_i·k_j)·e^{G_i−G_j}, i > j              gram
    T    = (I + A)⁻¹                                     solve
    w    = T·(β·e^G·k),   u = T·(β·v)                    recompute_w_u, in `w_u.py`
    v'   = u − w·S,   S⁺ = e^Γ·S + Σ_j e^{Γ−G_j}·k_j ⊗ v'_j                     carry
    o_i  = scale·(e^{G_i}·q_i·S + Σ_{j≤i} (q_i·k_j)·e^{G_i−G_j}·v'_j)           output

Chunks are counted from the start of each sequence, and tails are masked. A chunk's matrix is a row of C for each token.
Their adjoints stand beside the code, in `eager_stages.py`. One after the other, the stages are `gated_delta_rule`.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_floating
from adjoint.core.errors import ArgumentError
from adjoint.core.guarantee import Guarantee
from adjoint.core.plan import publish
from adjoint.core.preference import Preference
from adjoint.core.problem import Problem, short
from adjoint.ops.gated_delta import arguments as metadata
from adjoint.ops.gated_delta.arguments import state_dtype
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.promises import BACKWARD, DOMAIN, FORWARD, promise, recorded
from adjoint.ops.gated_delta.stages import eager
from adjoint.ops.gated_delta.stages.eager import state_count
from adjoint.ops.gated_delta.stages.stage import Definition, Promises, Stage

_CASES = "the family's cases: grouped heads, packed, tails"

Bounds = Int[Tensor, " bounds"] | None


def promised(ceiling: float, computed: torch.dtype | None = None, domain: str = DOMAIN, **kinds: int | str) -> Promises:
    """Guarantees by name. A kind that is a number: the result has that input's dtype; "wide": float32, or float64."""

    def promises(problem: Problem) -> dict[str, Guarantee]:
        wide = state_dtype(problem.dtypes[0])
        found = {name: wide if isinstance(kind, str) else problem.dtypes[kind] for name, kind in kinds.items()}
        return {
            name: promise(
                problem,
                recorded(kind, computed or wide, ceiling, _CASES),
                int(kind != (computed or wide)),
                accumulator=short(computed or wide),
                domain=domain,
            )
            for name, kind in found.items()
        }

    return promises


def _require_wide(op: str, name: str, value: Tensor, shape: tuple[int, ...], meaning: str, like: Tensor) -> None:
    """A tensor in float32, float64 beside float64."""
    require_floating(op, name, value)
    metadata.require_shape(op, name, value, shape, meaning)
    if value.dtype != state_dtype(like.dtype):
        raise ArgumentError(f"{op}: {name} must be {short(state_dtype(like.dtype))}, got {short(value.dtype)}")
    metadata.require_device(op, name, value, "the first argument", like)


def _require_packing(op: str, like: Tensor, cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is not None:
        metadata.require_cu_seqlens(op, cu_seqlens, like)


def _sequences(like: Tensor, cu_seqlens: Tensor | None) -> int:
    return like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


# ------------------------------------------------------------------------------------- cumulative_decay


def _check_decay(g: Tensor, cu_seqlens: Tensor | None, chunk: int) -> None:
    metadata.require_axes("cumulative_decay", "g", g, "batch, time, value heads")
    metadata.require_chunk("cumulative_decay", "a chunk's matrix", chunk)
    _require_packing("cumulative_decay", g, cu_seqlens)


_decay = Stage(
    Definition(
        name="cumulative_decay",
        inputs=("g",),
        outputs=("G",),
        options="int chunk",
        check=_check_decay,
        allocate=lambda g, cu_seqlens, chunk: (g.new_empty(g.shape, dtype=state_dtype(g.dtype)),),
        forward=eager.cumulative_decay,
        backward=eager.cumulative_decay_backward,
        promises=promised(FORWARD, torch.float64, G="wide"),
        adjoint_promises=promised(BACKWARD, torch.float64, dg=0),
    )
)


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
    return _decay(g, cu_seqlens, chunk, preference=preference)  # type: ignore[no-any-return]


publish(cumulative_decay, lambda g, chunk=CHUNK, *, cu_seqlens=None: _decay.bind(g, cu_seqlens, chunk))

# ------------------------------------------------------------------------------------------------- gram


def _check_gram(k: Tensor, beta: Tensor, G: Tensor, cu_seqlens: Tensor | None, chunk: int) -> None:
    op = "gram"
    metadata.require_axes(op, "k", k, "batch, time, key heads, K")
    metadata.require_head_size(op, "k", "K", k.shape[3])
    metadata.require_axes(op, "beta", beta, "batch, time, value heads")
    shape = (k.shape[0], k.shape[1], beta.shape[2])
    _require_wide(op, "beta", beta, shape, "[batch, time, value heads]", k)
    _require_wide(op, "G", G, shape, "[batch, time, value heads]", k)
    metadata.require_heads(op, "k", k.shape[2], "beta", beta.shape[2])
    metadata.require_chunk(op, "the result", chunk)
    _require_packing(op, k, cu_seqlens)


_gram = Stage(
    Definition(
        name="gram",
        inputs=("k", "beta", "G"),
        outputs=("A",),
        options="int chunk",
        check=_check_gram,
        allocate=lambda k, beta, G, cu_seqlens, chunk: (beta.new_empty((*beta.shape, chunk)),),
        forward=eager.gram,
        backward=eager.gram_backward,
        promises=promised(FORWARD, A="wide"),
        adjoint_promises=promised(BACKWARD, dk=0, dbeta="wide", dG="wide"),
    )
)


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
    return _gram(k, beta, G, cu_seqlens, chunk, preference=preference)  # type: ignore[no-any-return]


publish(gram, lambda k, beta, G, *, chunk=CHUNK, cu_seqlens=None: _gram.bind(k, beta, G, cu_seqlens, chunk))

# ------------------------------------------------------------------------------------------------ solve


def _check_solve(A: Tensor, cu_seqlens: Tensor | None) -> None:
    metadata.require_axes("solve", "A", A, "batch, time, value heads, chunk")
    if A.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(f"solve: A must be float32 or float64, got {short(A.dtype)}; 16 bits lose the solution")
    metadata.require_chunk("solve", "A", A.shape[3])
    _require_packing("solve", A, cu_seqlens)


_solve = Stage(
    Definition(
        name="solve",
        inputs=("A",),
        outputs=("T",),
        options="",
        check=_check_solve,
        allocate=lambda A, cu_seqlens: (A.new_empty(A.shape),),
        forward=eager.solve,
        backward=eager.solve_backward,
        promises=promised(FORWARD, T="wide"),
        adjoint_promises=promised(BACKWARD, dA="wide"),
    )
)


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
    return _solve(A, cu_seqlens, preference=preference)  # type: ignore[no-any-return]


publish(solve, lambda A, *, cu_seqlens=None: _solve.bind(A, cu_seqlens))

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
    _require_wide(op, "G", G, (batch, time, heads), "[batch, time, value heads]", k)
    _require_packing(op, k, cu_seqlens)
    metadata.require_states(op, "state", state, (_sequences(k, cu_seqlens), heads, K, V), k)
    metadata.require_chunk(op, "a chunk's matrix", chunk)


def _allocate_carry(
    k: Tensor, w: Tensor, u: Tensor, G: Tensor, state: Tensor, cu_seqlens: Tensor | None, chunk: int
) -> tuple[Tensor, ...]:
    places = state_count(k.shape[0] * k.shape[1], _sequences(k, cu_seqlens), chunk)
    return u.new_empty(u.shape), state.new_empty((places, *state.shape[1:])), state.new_empty(state.shape)


_carry = Stage(
    Definition(
        name="carry",
        inputs=("k", "w", "u", "G", "state"),
        outputs=("values", "states", "final_state"),
        options="int chunk",
        check=_check_carry,
        allocate=_allocate_carry,
        forward=eager.carry,
        backward=eager.carry_backward,
        promises=promised(FORWARD, values=0, states="wide", final_state="wide"),
        adjoint_promises=promised(BACKWARD, dk=0, dw=0, du=0, dG="wide", dstate="wide"),
    )
)


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
    return _carry(k, w, u, G, state, cu_seqlens, chunk, preference=preference)  # type: ignore[no-any-return]


publish(
    carry,
    lambda k, w, u, G, state, *, chunk=CHUNK, cu_seqlens=None: _carry.bind(k, w, u, G, state, cu_seqlens, chunk),
)

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
    metadata.require_tokens(op, q, k, values, G, G)
    _require_wide(op, "G", G, tuple(values.shape[:3]), "[batch, time, value heads]", q)
    _require_packing(op, q, cu_seqlens)
    metadata.require_chunk(op, "a chunk's matrix", chunk)
    places = state_count(q.shape[0] * q.shape[1], _sequences(q, cu_seqlens), chunk)
    metadata.require_states(op, "states", states, (places, values.shape[2], q.shape[3], values.shape[3]), q)


_output = Stage(
    Definition(
        name="output",
        inputs=("q", "k", "values", "states", "G"),
        outputs=("o",),
        options="int chunk, float scale",
        check=_check_output,
        allocate=lambda q, k, values, states, G, cu_seqlens, chunk, scale: (values.new_empty(values.shape),),
        forward=eager.output,
        backward=eager.output_backward,
        promises=promised(FORWARD, o=0),
        adjoint_promises=promised(BACKWARD, dq=0, dk=0, dvalues=0, dstates="wide", dG="wide"),
    )
)


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
    return _output(*_output_arguments(q, k, values, states, G, scale, chunk, cu_seqlens), preference=preference)  # type: ignore[no-any-return]


def _output_arguments(
    q: Tensor, k: Tensor, values: Tensor, states: Tensor, G: Tensor, scale: float | None, chunk: int, cu_seqlens: Any
) -> tuple[Any, ...]:
    metadata.require_axes("output", "q", q, "batch, time, key heads, K")
    return (q, k, values, states, G, cu_seqlens, chunk, metadata.scale_of("output", scale, q.shape[3]))


publish(
    output,
    lambda q, k, values, states, G, scale=None, *, chunk=CHUNK, cu_seqlens=None: _output.bind(
        *_output_arguments(q, k, values, states, G, scale, chunk, cu_seqlens)
    ),
)
