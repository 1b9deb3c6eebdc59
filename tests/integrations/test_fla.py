"""The signatures of flash-linear-attention: the same arguments, and what they mean."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import adjoint
from adjoint.integrations.fla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.promises import FORWARD
from tests.ops.gated_delta.sequences import drawn, relative

CHUNK = (
    "q k v g beta scale=None initial_state=None output_final_state=False use_qk_l2norm_in_kernel=False "
    "use_beta_sigmoid_in_kernel=False allow_neg_eigval=False state_v_first=False cu_seqlens=None cu_seqlens_cpu=None "
    "chunk_indices=None cp_context=None **kwargs"
)
RECURRENT = (
    "q k v g=None gk=None gv=None beta=None scale=None initial_state=None output_final_state=False "
    "use_qk_l2norm_in_kernel=False use_gate_in_kernel=False A_log=None dt_bias=None use_beta_sigmoid_in_kernel=False "
    "allow_neg_eigval=False state_v_first=False cu_seqlens=None **kwargs"
)
BOTH = pytest.mark.parametrize("function", (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule))


@pytest.mark.parametrize(
    ("function", "stated"), ((chunk_gated_delta_rule, CHUNK), (fused_recurrent_gated_delta_rule, RECURRENT))
)
def test_signature(function, stated: str) -> None:
    words = []
    for name, parameter in inspect.signature(function).parameters.items():
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        words.append(f"{stars}{name}{default}")
    assert " ".join(words) == stated


@BOTH
@pytest.mark.parametrize("time", (1, 9, 70))
def test_the_same_rule(function, time: int) -> None:
    q, k, v, g, beta, state, _ = drawn((2, time, 1, 2, 4, 3))
    o, final = function(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)
    expected, last = adjoint.gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True)
    assert relative(o, expected) < 1e-14 and relative(final, last) < 1e-14
    assert function(q, k, v, g=g, beta=beta)[1] is None


@BOTH
def test_every_argument(function) -> None:
    q, k, v, g, beta, state, bounds = drawn((1, 20, 1, 2, 4, 3), torch.float32, cu_seqlens=(0, 7, 20))
    A_log, dt_bias = torch.tensor([0.1, -0.3]), torch.tensor([0.2, 0.4])
    o, final = function(
        2 * q,
        3 * k,
        v,
        g=g,
        beta=beta,
        scale=0.3,
        initial_state=state.mT.bfloat16(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        state_v_first=True,
        cu_seqlens=bounds,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    expected, last = adjoint.gated_delta_rule(
        2 * q,
        3 * k,
        v,
        -A_log.exp() * F.softplus(g + dt_bias),
        2 * beta.sigmoid(),
        scale=0.3,
        initial_state=state.bfloat16().float(),
        output_final_state=True,
        cu_seqlens=bounds,
        normalize_qk=True,
    )
    assert torch.equal(o, expected) and torch.equal(final, last.mT)


def test_no_gates_at_all() -> None:
    q, k, v, *_ = drawn((2, 5, 1, 2, 4, 3))
    o, _ = fused_recurrent_gated_delta_rule(q, k, v)
    zeros, ones = (torch.full((2, 5, 2), value, dtype=torch.float64) for value in (0, 1))
    assert relative(o, adjoint.gated_delta_rule(q, k, v, zeros, ones)[0]) < 1e-14


def test_gradients_of_both() -> None:
    inputs = [x.requires_grad_() for x in drawn((1, 12, 1, 2, 4, 3))[:5]]
    q, k, v, g, beta = inputs
    by_chunks = torch.autograd.grad(chunk_gated_delta_rule(q, k, v, g, beta)[0].sum(), inputs)
    by_tokens = torch.autograd.grad(fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta)[0].sum(), inputs)
    for one, other in zip(by_chunks, by_tokens, strict=True):
        assert relative(one, other) < 1e-13


REFUSED = (
    (chunk_gated_delta_rule, {"cp_context": object()}, adjoint.Unsupported, "cp_context"),
    (chunk_gated_delta_rule, {"chunk_size": 32}, adjoint.Unsupported, "chunk_size must be 64.* got 32"),
    (chunk_gated_delta_rule, {"head_first": True}, ValueError, "head_first"),
    (chunk_gated_delta_rule, {"use_gate_in_kernel": True}, ValueError, "A_log"),
    (chunk_gated_delta_rule, {"allow_neg_eigval": True}, ValueError, "use_beta_sigmoid_in_kernel"),
    (
        chunk_gated_delta_rule,
        {"state_v_first": True, "transpose_state_layout": True},
        ValueError,
        "transpose_state_layout",
    ),
    (fused_recurrent_gated_delta_rule, {"gk": torch.zeros(1)}, adjoint.Unsupported, "gk"),
    (fused_recurrent_gated_delta_rule, {"gv": torch.zeros(1)}, adjoint.Unsupported, "gv"),
    (fused_recurrent_gated_delta_rule, {"num_accepted_tokens": 3}, ValueError, "num_accepted_tokens"),
)


@pytest.mark.parametrize(
    ("function", "options", "error", "words"), REFUSED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_what_cannot_be_honoured_raises(function, options, error, words) -> None:
    q, k, v, g, beta, *_ = drawn((1, 5, 1, 2, 4, 3))
    with pytest.raises(error, match=words):
        function(q, k, v, g=g, beta=beta, **options)


@BOTH
@pytest.mark.parametrize("time", (3, 70))
def test_without_gates_nothing_decays_and_strengths_are_one(function, time: int) -> None:
    q, k, v, g, beta, _, _ = drawn((1, time, 1, 2, 4, 3), torch.float32)
    expected, _ = function(q, k, v, g=torch.zeros_like(g), beta=torch.ones_like(beta))
    assert torch.equal(function(q, k, v, g=None, beta=None)[0], expected)
    with pytest.raises(adjoint.ArgumentError, match="needs beta"):
        function(q, k, v, g=g, beta=None, use_beta_sigmoid_in_kernel=True)
    with pytest.raises(adjoint.ArgumentError, match="needs g"):
        function(q, k, v, g=None, beta=beta, use_gate_in_kernel=True, A_log=torch.zeros(2))


@BOTH
@pytest.mark.parametrize("time", (9, 70))
def test_minus_infinity_resets_the_state(function, time: int) -> None:
    """As g itself, and as the gate of an infinite raw input, of which every gradient is finite."""
    q, k, v, g, beta, state, _ = drawn((1, time, 1, 2, 4, 3), torch.float32)
    reset = g.clone()
    reset[:, 5] = -torch.inf
    o, final = function(q, k, v, g=reset, beta=beta, initial_state=state, output_final_state=True)
    exact = (x.double() for x in (q, k, v, reset, beta, state))
    right, last = reference.gated_delta_rule(*exact)
    assert relative(o, right) < FORWARD and relative(final, last) < FORWARD
    raw = g.clone()
    raw[:, 5] = torch.inf
    A_log, dt_bias = (torch.zeros(2, requires_grad=True) for _ in range(2))
    raw.requires_grad_()
    o, _ = function(q, k, v, g=raw, beta=beta, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)
    for gradient in torch.autograd.grad(o.sum(), (raw, A_log, dt_bias)):
        assert gradient.isfinite().all() and gradient.any()


@BOTH
def test_strengths_up_to_two_are_reported_in_checking_mode_alone(function) -> None:
    q, k, v, g, beta, _, _ = drawn((1, 20, 1, 2, 4, 3), torch.float32)
    options = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    function(q, k, v, g=g, beta=beta + 3, **options)
    with pytest.raises(adjoint.ArgumentError, match="beta must be from 0 to 1"), adjoint.checked():
        function(q, k, v, g=g, beta=beta + 3, **options)
