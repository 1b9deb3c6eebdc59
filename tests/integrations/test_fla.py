"""The signatures of flash-linear-attention: the same arguments, and what they mean."""

import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import adjoint
from adjoint.integrations.fla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.promises import FORWARD
from tests.ops.gated_delta.sequences import BACKWARD_64, FORWARD_64, drawn, relative

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
    assert relative(o, expected) < FORWARD_64 and relative(final, last) < FORWARD_64
    assert function(q, k, v, g=g, beta=beta)[1] is None


@BOTH
@pytest.mark.parametrize("time", (5, 70))
@pytest.mark.parametrize(
    "dtypes",
    ((torch.float32, torch.float32, torch.float16), (torch.bfloat16, torch.float16, torch.float32)),
    ids=("q and k wide", "v wide"),
)
def test_inputs_of_several_dtypes(function, time: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """Computed in float32, without another rounding of an input; gradients have the dtypes of the inputs."""
    q, k, v, g, beta, _, _ = drawn((1, time, 1, 2, 4, 3), torch.float32)
    parts = [x.to(dtype).requires_grad_() for x, dtype in zip((q, k, v), dtypes, strict=True)]
    wide = [x.detach().float().requires_grad_() for x in parts]
    o, _ = function(*parts, g=g, beta=beta)
    expected, _ = function(*wide, g=g, beta=beta)
    dtype = dtypes[0] if function is chunk_gated_delta_rule else dtypes[2]
    assert o.dtype == dtype and torch.equal(o, expected.to(dtype))
    upstream = torch.randn_like(expected).to(dtype)
    gradients = torch.autograd.grad(o, parts, upstream)
    for part, mine, right in zip(parts, gradients, torch.autograd.grad(expected, wide, upstream.float()), strict=True):
        assert mine.dtype == part.dtype and torch.equal(mine, right.to(part.dtype))


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
    decay, strength = adjoint.gated_delta.gate(g, beta, A_log, dt_bias)
    expected, last = adjoint.gated_delta_rule(
        2 * q,
        3 * k,
        v,
        decay,
        2 * strength,
        scale=0.3,
        initial_state=state.bfloat16().float(),
        output_final_state=True,
        cu_seqlens=bounds,
        normalize_qk=True,
    )
    assert torch.equal(o, expected) and torch.equal(final, last.mT)


GATES = {  # the dtypes of g and beta, whether beta is logits, whether there is a dt_bias
    "both raw": (torch.float32, torch.float32, True, True),
    "both raw, 16 bits": (torch.bfloat16, torch.bfloat16, True, True),
    "two dtypes": (torch.float32, torch.bfloat16, True, True),
    "g alone": (torch.float32, torch.float32, False, True),
    "no bias": (torch.float32, torch.float32, False, False),
    "float64": (torch.float64, torch.float64, True, True),
}


@BOTH
@pytest.mark.parametrize("case", GATES)
def test_a_raw_gate_goes_through_the_gate_op_with_its_gradients(function, case: str) -> None:
    """Within the guarantees of `gate`, against the formula in float64; the rule is told apart by what reaches it."""
    g_dtype, beta_dtype, logits, biased = GATES[case]
    wide = torch.float64 if g_dtype == torch.float64 else torch.float32
    q, k, v, g, beta, *_ = drawn((2, 9, 1, 2, 4, 3), wide)
    g, beta = g.to(g_dtype).requires_grad_(), beta.to(beta_dtype).requires_grad_()
    A_log, dt_bias = torch.tensor([0.1, -0.3]).requires_grad_(), torch.tensor([0.2, 0.4]).requires_grad_()
    options = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias if biased else None}
    leaves = [g, beta, A_log, *([dt_bias] if biased else [])]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    called: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
            called.append(operator.name())
            if operator.name().startswith("adjoint::gated_delta"):
                seen.append(tuple(x.detach() for x in arguments[3:5]))
            return operator(*arguments, **(keywords or {}))

    with Watch():
        o, _ = function(q, k, v, g=g, beta=beta, use_beta_sigmoid_in_kernel=logits, **options)
    assert called.count("adjoint::gate") == 1
    ((decay, strength),) = seen
    exact = -A_log.double().exp() * F.softplus(g.double() + (dt_bias.double() if biased else 0), threshold=1e3)
    exact_strength = beta.double().sigmoid() if logits else beta.double()
    inputs = [x.detach() for x in (g, beta if logits and beta_dtype == g_dtype else g, A_log, dt_bias)]
    inputs[3] = inputs[3] if biased else torch.zeros_like(inputs[3])
    promised = adjoint.plan(adjoint.gated_delta.gate, *inputs)
    measured = promised.guarantee["g"].error.measure(decay, exact.detach(), *(x.double() for x in inputs))
    assert measured.holds, measured
    if logits and beta_dtype == g_dtype:
        measured = promised.guarantee["beta"].error.measure(
            strength, exact_strength.detach(), *(x.double() for x in inputs)
        )
        assert measured.holds, measured

    upstream = torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(o, leaves, upstream)
    at = [x.detach().requires_grad_() for x in (decay, strength)]
    through = torch.autograd.grad(function(q, k, v, g=at[0], beta=at[1])[0], at, upstream)
    expected = torch.autograd.grad((exact, exact_strength), leaves, [x.double() for x in through])
    of_gate = dict(zip(("g", "beta", "A_log", "dt_bias"), ("da", "db", "dA_log", "ddt_bias"), strict=True))
    names = ["g", "beta", "A_log", "dt_bias"][: len(leaves)]
    for name, gradient, truth in zip(names, gradients, expected, strict=True):
        if name == "beta" and not (logits and beta_dtype == g_dtype):
            continue
        arguments = (*(x.double() for x in through), *(x.double() for x in inputs))
        measured = promised.adjoint.guarantee[of_gate[name]].error.measure(gradient, truth, *arguments)
        assert measured.holds, (name, measured)


@BOTH
def test_parameters_of_a_gate_that_is_not_raw_say_nothing(function) -> None:
    q, k, v, g, beta, *_ = drawn((1, 5, 1, 2, 4, 3))
    expected, _ = function(q, k, v, g=g, beta=beta)
    assert torch.equal(function(q, k, v, g=g, beta=beta, A_log=torch.ones(2), dt_bias=torch.ones(2))[0], expected)


@BOTH
def test_head_first_is_refused_and_its_absence_is_not(function) -> None:
    q, k, v, g, beta, *_ = drawn((1, 5, 1, 2, 4, 3))
    with pytest.raises(adjoint.ArgumentError, match=r"head_first=True .* \[batch, time, heads, size\]"):
        function(q, k, v, g=g, beta=beta, head_first=True)
    assert torch.equal(function(q, k, v, g=g, beta=beta, head_first=False)[0], function(q, k, v, g=g, beta=beta)[0])


def test_heads_first_are_not_noticed_where_shapes_allow_and_the_docstrings_say_so() -> None:
    q, k, v, g, beta, *_ = (x if x is None else x.transpose(1, 2) for x in drawn((1, 5, 2, 2, 4, 3)))
    assert chunk_gated_delta_rule(q, k, v, g, beta)[0].shape == (1, 2, 5, 3)
    assert "[B, H, T, D]" in (adjoint.gated_delta_rule.__doc__ or "")
    assert "heads and time were exchanged" in (inspect.getmodule(chunk_gated_delta_rule).__doc__ or "")  # type: ignore[union-attr]


def test_no_gates_at_all() -> None:
    q, k, v, *_ = drawn((2, 5, 1, 2, 4, 3))
    o, _ = fused_recurrent_gated_delta_rule(q, k, v)
    zeros, ones = (torch.full((2, 5, 2), value, dtype=torch.float64) for value in (0, 1))
    assert relative(o, adjoint.gated_delta_rule(q, k, v, zeros, ones)[0]) < FORWARD_64


@pytest.mark.parametrize("chunk_size", (16, 32, 64))
def test_the_size_of_chunks_changes_no_bit(chunk_size: int) -> None:
    """FLA divides its work by it, which changes its results by roundings alone."""
    q, k, v, g, beta, state, _ = drawn((1, 70, 1, 2, 4, 3), torch.float32)
    options = {"initial_state": state, "output_final_state": True}
    results = chunk_gated_delta_rule(q, k, v, g, beta, chunk_size=chunk_size, **options)
    assert all(map(torch.equal, results, chunk_gated_delta_rule(q, k, v, g, beta, **options)))


FLAGS = "output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first"


@BOTH
@pytest.mark.parametrize("time", (5, 70))
@pytest.mark.parametrize("name", (*FLAGS.split(), "use_gate_in_kernel"))
def test_a_flag_may_be_none_and_is_named_as_in_fla(function, name: str, time: int) -> None:
    """FLA's layers hand on `use_cache=None` as `output_final_state`."""
    q, k, v, g, beta, *_ = drawn((1, time, 1, 2, 4, 3))
    o, final = function(q, k, v, g=g, beta=beta, **{name: None})
    assert torch.equal(o, function(q, k, v, g=g, beta=beta)[0]) and final is None
    with pytest.raises(adjoint.ArgumentError, match=f"{function.__name__}: {name} must be True or False, got 1"):
        function(q, k, v, g=g, beta=beta, **{name: 1})


@BOTH
@pytest.mark.parametrize("time", (5, 70))
@pytest.mark.parametrize("shape", ((3,), (1, 2, 4, 3), (2, 2, 3, 4)), ids=str)
def test_the_shape_of_a_state_is_named_in_the_layout_of_the_caller(function, shape: tuple[int, ...], time: int) -> None:
    q, k, v, g, beta, *_ = drawn((1, time, 1, 2, 4, 3))
    expected = r"initial_state must have shape \(1, 2, 3, 4\), \[sequences, value heads, V, K\], .* got "
    with pytest.raises(adjoint.ArgumentError, match=expected + re.escape(str(shape))):
        function(q, k, v, g=g, beta=beta, initial_state=torch.zeros(shape), state_v_first=True)


def test_gradients_of_both() -> None:
    inputs = [x.requires_grad_() for x in drawn((1, 12, 1, 2, 4, 3))[:5]]
    q, k, v, g, beta = inputs
    by_chunks = torch.autograd.grad(chunk_gated_delta_rule(q, k, v, g, beta)[0].sum(), inputs)
    by_tokens = torch.autograd.grad(fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta)[0].sum(), inputs)
    for one, other in zip(by_chunks, by_tokens, strict=True):
        assert relative(one, other) < BACKWARD_64


REFUSED = (
    (chunk_gated_delta_rule, {"cp_context": object()}, adjoint.Unsupported, "cp_context"),
    (chunk_gated_delta_rule, {"chunk_size": 48}, adjoint.ArgumentError, "chunk_size must be 16, 32 or 64.* got 48"),
    (chunk_gated_delta_rule, {"cu_seqlens_cpu": torch.tensor([0, 5])}, ValueError, "cu_seqlens_cpu .* give cu_seqlens"),
    (chunk_gated_delta_rule, {"chunk_indices": torch.zeros(1, 2)}, ValueError, "chunk_indices .* give cu_seqlens"),
    (
        chunk_gated_delta_rule,
        {"use_gate_in_kernel": True, "A_log": torch.zeros(3)},
        ValueError,
        "A_log must have shape",
    ),
    (
        chunk_gated_delta_rule,
        {"use_gate_in_kernel": True, "A_log": [0.0, 0.0]},
        adjoint.ArgumentError,
        "chunk_gated_delta_rule: A_log must be a tensor, got list",
    ),
    (fused_recurrent_gated_delta_rule, {"use_gate_in_kernel": True}, ValueError, "A_log"),
    (fused_recurrent_gated_delta_rule, {"cp_context": object()}, ValueError, "cp_context"),
    (fused_recurrent_gated_delta_rule, {"chunk_size": 64}, ValueError, "chunk_size"),
    (fused_recurrent_gated_delta_rule, {"inplace_final_state": True}, ValueError, "inplace_final_state"),
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
@pytest.mark.parametrize("name", ("q", "k", "v", "g", "beta", "initial_state"))
def test_what_is_no_floating_tensor_is_named(function, name: str) -> None:
    names = ("q", "k", "v", "g", "beta", "initial_state")
    arguments = dict(zip(names, drawn((1, 5, 1, 2, 4, 3))[:6], strict=True))
    wrong = [[1.0], arguments[name].long()] + [None] * (name in "qkv")
    for value in wrong:
        with pytest.raises(adjoint.ArgumentError, match=f"{function.__name__}: {name} must be "):
            function(**(arguments | {name: value}))
    if name in "qkv":
        with pytest.raises(adjoint.ArgumentError, match=rf"{name} must be \[batch, time, heads, size\]"):
            function(**(arguments | {name: arguments[name][0]}))


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


@BOTH
@pytest.mark.parametrize("time", (9, 70))
@pytest.mark.parametrize(
    ("dtypes", "wide"),
    [
        ((torch.float32, torch.float32, torch.float16), torch.float32),
        ((torch.bfloat16, torch.bfloat16, torch.float32), torch.float32),
        ((torch.bfloat16, torch.float16, torch.bfloat16), torch.float32),
    ],
    ids=str,
)
def test_tokens_of_different_dtypes(function, time: int, dtypes: tuple[torch.dtype, ...], wide: torch.dtype) -> None:
    """The rule on what they are when widened, to the bit; gradients come back in the dtypes of the inputs."""
    *tokens, g, beta, state, _ = drawn((2, time, 1, 2, 4, 3), torch.float32)
    tokens = [x.to(dtype).requires_grad_() for x, dtype in zip(tokens, dtypes, strict=True)]
    beta = beta.to(dtypes[2])
    o, final = function(*tokens, g=g, beta=beta, initial_state=state, output_final_state=True)
    expected, last = function(
        *(x.to(wide) for x in tokens), g=g, beta=beta.to(wide), initial_state=state, output_final_state=True
    )
    assert o.dtype == dtypes[0 if function is chunk_gated_delta_rule else 2]
    assert torch.equal(o, expected.to(o.dtype)) and torch.equal(final, last)
    gradients = torch.autograd.grad(o, tokens, torch.ones_like(o))
    assert [x.dtype for x in gradients] == list(dtypes)
    assert all(x.isfinite().all() and x.any() for x in gradients)
