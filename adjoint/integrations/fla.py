"""The gated delta rule under the signatures of flash-linear-attention.

Code that imports `chunk_gated_delta_rule` and `fused_recurrent_gated_delta_rule` from `fla.ops.gated_delta_rule`
switches by importing them from here: the names, order and defaults of the arguments are the same, and so is what is
returned. An argument that cannot be honoured raises and is named; none is ignored that would change a result by more
than roundings: `chunk_size`, by which FLA divides its work, has no effect. What transformers' layers hand on to these
functions beside their arguments (`use_cache`, `max_length_q`) changes none.

Tensors are [batch, time, heads, size], and nothing in a shape shows that heads and time were exchanged: see
`gated_delta_rule`. `head_first=True`, which older versions of FLA had, is refused.

Different on purpose: gradients of both, `torch.compile`, the CPU, and an error where g is positive. The final state is
float32 (float64 for float64) whatever the dtype of the initial one. q, k and v may have dtypes of their own, as there:
they are computed in one that holds the values of all, and outputs have the dtype that FLA gives them: that of q by
chunks, that of v by steps.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from adjoint.core.arguments import require_flag, require_floating, require_ids
from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.core.problem import wide_dtype
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.rule import gated_delta_rule
from adjoint.ops.gated_delta.stages.gate import gate
from adjoint.ops.gated_delta.step import MAX_TOKENS, gated_delta_step

_OF_THE_CALLER = frozenset(
    (
        "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "num_items_in_batch",
        "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "is_causal", "seq_idx",
    )
)  # fmt: skip
"""Keywords that transformers passes from layer to layer. They do not concern the rule, and FLA ignores them."""

_CHUNK_SIZES = (16, 32, 64)
"""The sizes that FLA takes. Its results differ by roundings alone, and ours are the same bits."""


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, T, HV, V], and final states [N, HV, K, V] or None, for whole sequences.

    `cu_seqlens_cpu` and `chunk_indices` repeat the facts in `cu_seqlens`, and are not needed.

    Args:
        kwargs: `use_gate_in_kernel`, `A_log` and `dt_bias`, if g is the gate's raw input, from which
            `adjoint.gated_delta.gate` computes the gate and its gradients; `chunk_size`, which may be 16, 32 or 64, and
            has no effect; `transpose_state_layout`, an older name of `state_v_first`; and `head_first`, which must be
            False.
    """
    op = "chunk_gated_delta_rule"
    _require_tensors(op, cu_seqlens, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    if cp_context is not None:
        raise Unsupported(f"{op}: cp_context, context parallelism, is not supported; leave it None")
    if (chunk_size := kwargs.pop("chunk_size", CHUNK)) not in _CHUNK_SIZES:
        raise ArgumentError(
            f"{op}: chunk_size must be 16, 32 or 64, as in FLA, got {chunk_size!r}; it has no effect, because chunks "
            f"have {CHUNK} tokens here"
        )
    for name, value in (("cu_seqlens_cpu", cu_seqlens_cpu), ("chunk_indices", chunk_indices)):
        if value is not None and cu_seqlens is None:
            raise ArgumentError(f"{op}: {name} repeats what cu_seqlens says, which is None; give cu_seqlens")
    raw, A_log, dt_bias = (kwargs.pop(name, None) for name in ("use_gate_in_kernel", "A_log", "dt_bias"))
    state_v_first = _layout(op, state_v_first, kwargs)
    final, normalize = _of_the_rule(op, output_final_state, use_qk_l2norm_in_kernel)
    _refuse(op, kwargs)
    g, beta = _gates(op, g, beta, v, raw, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    dtype, (q, k, v) = q.dtype, _in_one_dtype(q, k, v)
    state = _state(op, initial_state, q, v, cu_seqlens, state_v_first)
    o, final_state = gated_delta_rule(
        q, k, v, _as_gate(g, q), _as_gate(beta, q), scale=scale, initial_state=state, cu_seqlens=cu_seqlens,
        output_final_state=final, normalize_qk=normalize,
    )  # fmt: skip
    return _as_before(o, q, dtype), _in_layout(final_state, state_v_first)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, T, HV, V], and final states [N, HV, K, V] or None.

    Up to 16 tokens of each row are computed one after the other, as a step of decoding. Longer and packed sequences are
    computed by chunks.
    """
    op = "fused_recurrent_gated_delta_rule"
    _require_tensors(op, cu_seqlens, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    for name, value in (("gk", gk), ("gv", gv)):
        if value is not None:
            raise Unsupported(f"{op}: {name}, a decay of its own for every element of a head, is not supported")
    state_v_first = _layout(op, state_v_first, kwargs)
    final, normalize = _of_the_rule(op, output_final_state, use_qk_l2norm_in_kernel)
    _refuse(op, kwargs)
    g, beta = _gates(op, g, beta, v, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    dtype, (q, k, v) = v.dtype, _in_one_dtype(q, k, v)
    g, beta = _as_gate(g, q), _as_gate(beta, q)
    state = _state(op, initial_state, q, v, cu_seqlens, state_v_first)
    if cu_seqlens is None and 1 <= q.shape[1] <= MAX_TOKENS:
        if state is None:
            sizes = q.shape[0], v.shape[2], q.shape[3], v.shape[3]
            state = torch.zeros(sizes, dtype=wide_dtype(q.dtype), device=v.device)
        o, new_state = gated_delta_step(q, k, v, g, beta, state, scale=scale, normalize_qk=normalize)
        return _as_before(o, q, dtype), _in_layout(new_state, state_v_first) if final else None
    o, final_state = gated_delta_rule(
        q, k, v, g, beta, scale=scale, initial_state=state, cu_seqlens=cu_seqlens, output_final_state=final,
        normalize_qk=normalize,
    )  # fmt: skip
    return _as_before(o, q, dtype), _in_layout(final_state, state_v_first)


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def _require_tensors(op: str, cu_seqlens: Tensor | None, **arguments: Tensor | None) -> None:
    """Requires floating tensors, and bounds of sequences. The bounds, g, beta and the initial state may be absent."""
    for name, value in arguments.items():
        if value is not None or name in ("q", "k", "v"):
            require_floating(op, name, value)  # type: ignore[arg-type]
    for name in ("q", "k", "v"):
        if (x := arguments[name]) is not None and x.dim() != 4:
            raise ArgumentError(f"{op}: {name} must be [batch, time, heads, size], got shape {tuple(x.shape)}")
    if cu_seqlens is not None:
        require_ids(op, "cu_seqlens", cu_seqlens, "q", arguments["q"])  # type: ignore[arg-type]


def _flag(op: str, name: str, value: bool | None) -> bool:
    """A flag. None is False, as in FLA: its layers hand on `use_cache=None` as `output_final_state`."""
    return value is not None and require_flag(op, name, value)


def _of_the_rule(op: str, output_final_state: bool | None, use_qk_l2norm_in_kernel: bool | None) -> tuple[bool, bool]:
    """The two flags that the rule has under other names."""
    return (
        _flag(op, "output_final_state", output_final_state),
        _flag(op, "use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel),
    )


def _refuse(op: str, kwargs: dict[str, Any]) -> None:
    if kwargs.pop("head_first", False):
        raise ArgumentError(
            f"{op}: head_first=True is not supported: q, k and v must be [batch, time, heads, size], g and beta "
            f"[batch, time, heads]; exchange the two axes, as by transpose(1, 2)"
        )
    unknown = sorted(set(kwargs) - _OF_THE_CALLER)
    if unknown:
        raise ArgumentError(f"{op}: does not know {', '.join(unknown)}")


def _layout(op: str, state_v_first: bool, kwargs: dict[str, Any]) -> bool:
    """Whether states are [V, K]. The option may have its older name, but not both names."""
    v_first = _flag(op, "state_v_first", state_v_first)
    if "transpose_state_layout" not in kwargs:
        return v_first
    if v_first:
        raise ArgumentError(f"{op}: transpose_state_layout is an older name of state_v_first; give one of them")
    warnings.warn("transpose_state_layout is an older name of state_v_first", DeprecationWarning, stacklevel=3)
    return _flag(op, "transpose_state_layout", kwargs.pop("transpose_state_layout"))


def _gates(
    op: str,
    g: Tensor | None,
    beta: Tensor | None,
    v: Tensor,
    raw: bool | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    logits: bool | None,
    doubled: bool | None,
) -> tuple[Tensor, Tensor]:
    """g itself, 0 if it is None, or −e^{A_log}·softplus(g + dt_bias); and beta itself, 1, σ(beta) or 2·σ(beta).

    If g is not raw, A_log and dt_bias have no effect, as in FLA.
    """
    raw, logits = _flag(op, "use_gate_in_kernel", raw), _flag(op, "use_beta_sigmoid_in_kernel", logits)
    doubled = _flag(op, "allow_neg_eigval", doubled)
    if doubled and not logits:
        raise ArgumentError(f"{op}: allow_neg_eigval=True goes with use_beta_sigmoid_in_kernel=True")
    if logits:
        beta = _needed(op, "use_beta_sigmoid_in_kernel", "beta", beta)
    if raw:
        g = _needed(op, "use_gate_in_kernel", "g, the gate's raw input", g)
        A_log = _needed(op, "use_gate_in_kernel", "A_log", A_log)
        require_floating(op, "A_log", A_log)
        bias = torch.zeros_like(A_log) if dt_bias is None else dt_bias
        if logits and beta is not None and beta.dtype == g.dtype:
            g, beta = gate(g, beta, A_log, bias)
            logits = False
        else:
            g, _ = gate(g, g.detach(), A_log, bias)
    if logits and beta is not None:
        beta = beta.to(wide_dtype(beta.dtype)).sigmoid()
    if g is None:
        g = torch.zeros(v.shape[:3], dtype=torch.float32, device=v.device)
    if beta is None:
        beta = torch.ones(v.shape[:3], dtype=torch.float32, device=v.device)
    return g, 2 * beta if doubled else beta


def _needed(op: str, keyword: str, name: str, value: Tensor | None) -> Tensor:
    if value is None:
        raise ArgumentError(f"{op}: {keyword}=True needs {name}, and it is None")
    return value


def _in_one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Converts tensors to the one dtype that can represent the values of all."""
    common = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    return q.to(common), k.to(common), v.to(common)


def _as_before(o: Tensor, q: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts outputs to the dtype that an input had before the inputs got a common one; autocast's dtype stays."""
    return o.to(dtype) if q.dtype != dtype else o


def _as_gate(x: Tensor, q: Tensor) -> Tensor:
    """Converts a tensor to the dtype of q or to float32, so that no digit is lost."""
    return x if x.dtype in (q.dtype, torch.float32) else x.to(torch.promote_types(torch.float32, q.dtype))


def _state(
    op: str, state: Tensor | None, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, state_v_first: bool
) -> Tensor | None:
    """The initial state as the rule takes it. Its shape is checked here, where the layout is the caller's."""
    if state is None:
        return None
    sequences, K, V = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1, q.shape[3], v.shape[3]
    shape = sequences, v.shape[2], *((V, K) if state_v_first else (K, V))
    if state.shape != shape:
        layout = "V, K], as state_v_first=True says," if state_v_first else "K, V],"
        raise ArgumentError(
            f"{op}: initial_state must have shape {shape}, [sequences, value heads, {layout} got {tuple(state.shape)}"
        )
    return (state.mT if state_v_first else state).to(wide_dtype(q.dtype))


def _in_layout(state: Tensor | None, state_v_first: bool) -> Tensor | None:
    return state.mT.contiguous() if state is not None and state_v_first else state
