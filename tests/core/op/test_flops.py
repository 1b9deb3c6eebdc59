"""Torch's `FlopCounterMode` counts the matrix products of every operator, whoever is imported first."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import adjoint
from adjoint import gated_delta, moe
from tests.package import package_operators

WITH_PRODUCTS = {
    "moe_experts", "moe_experts_backward",
    "linear_cross_entropy", "linear_cross_entropy_backward_again",
    "gated_delta_rule", "gated_delta_rule_backward",
    "gated_delta_step", "gated_delta_step_backward", "gated_delta_step_in_place",
    "recompute_w_u", "recompute_w_u_backward",
    "gram", "gram_backward",
    "solve_backward",
    "carry", "carry_backward",
    "output", "output_backward",
    *(f"causal_conv1d{part}{direction}" for part in ("", "_2", "_3", "_4") for direction in ("", "_backward")),
    "causal_conv1d_step", "causal_conv1d_step_backward", "causal_conv1d_step_in_place",
}  # fmt: skip

WITHOUT_PRODUCTS = {
    "silu", "silu_backward", "silu_backward_reuse",
    "swiglu", "swiglu_backward", "swiglu_backward_reuse",
    "sigmoid_gate", "sigmoid_gate_backward", "sigmoid_gate_backward_reuse",
    "swiglu_packed", "swiglu_packed_backward", "swiglu_packed_backward_reuse",
    "rms_norm", "rms_norm_backward", "rms_norm_residual", "rms_norm_residual_backward",
    "gated_rms_norm", "gated_rms_norm_backward", "l2_norm", "l2_norm_backward",
    "rotary", "rotary_backward", "rotary_in_place",
    "embedding", "embedding_backward", "embedding_backward_into", "embedding_backward_sparse",
    "embedding_bag", "embedding_bag_backward",
    "take_along_axis", "take_along_axis_backward",
    "moe_route", "moe_route_backward",
    "moe_load_balancing_loss", "moe_load_balancing_loss_backward", "moe_z_loss", "moe_z_loss_backward",
    "moe_dispatch", "moe_dispatch_backward", "moe_combine", "moe_combine_backward",
    "cross_entropy", "cross_entropy_backward", "cross_entropy_backward_kept", "cross_entropy_backward_reuse",
    "linear_cross_entropy_backward",
    "cumulative_decay", "cumulative_decay_backward", "gate", "gate_backward", "normalize", "normalize_backward",
    "solve",
}  # fmt: skip
"""Elementwise work, sums, look-ups, sorts and triangular systems, for which torch counts nothing either."""


def counted(function: Callable[[], Any]) -> dict[str, int]:
    """The operations of each operator of the package in a call; those of torch's own beneath them are not counted."""
    with FlopCounterMode(display=False) as counter:
        function()
    counts = counter.get_flop_counts().get("Global", {})
    return {str(packet).removeprefix("adjoint."): number for packet, number in counts.items()}


def gradients_counted(outputs: Callable[..., Any], inputs: dict[str, Tensor], needed: str) -> dict[str, int]:
    """The operations of a step that needs the gradients of the named inputs."""
    own = {name: x.detach().clone() for name, x in inputs.items()}
    for name in needed.split():
        own[name].requires_grad_()
    results = outputs(**own)
    results = results if isinstance(results, tuple) else (results,)
    summed = sum(x.sum() for x in results if x is not None and x.requires_grad)
    return counted(lambda: torch.autograd.grad(summed, [own[name] for name in needed.split()]))


def test_every_operator_is_registered_and_counts_products_or_deliberately_none() -> None:
    names = set(package_operators())
    assert names == WITH_PRODUCTS | WITHOUT_PRODUCTS, "a new operator belongs in one of the two"
    assert {name for name in names if getattr(torch.ops.adjoint, name) not in flop_registry} == set()


ORDERS = {
    "adjoint first": "import adjoint; from torch.utils.flop_counter import FlopCounterMode",
    "the counter first": "from torch.utils.flop_counter import FlopCounterMode; import adjoint",
    "reloaded": "import adjoint, importlib, torch.utils.flop_counter as counter\nimportlib.reload(counter)\n"
    "from torch.utils.flop_counter import FlopCounterMode",
}


@pytest.mark.parametrize("order", ORDERS)
def test_whoever_is_imported_first(order: str) -> None:
    code = f"""
import sys, torch
{ORDERS[order]}
x = torch.ones(1, 3, 1, 2)
with FlopCounterMode(display=False) as counter:
    adjoint.gated_delta_rule(x, x, x, -x[..., 0], x[..., 0])
    adjoint.silu(x)
assert counter.get_total_flops() == 6 * 3 * 2 * 2, counter.get_flop_counts()
assert counter.get_flop_counts()["Global"][torch.ops.adjoint.silu] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_package_imports_neither_the_counter_nor_triton() -> None:
    code = "import sys, adjoint; assert not {'torch.utils.flop_counter', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_source_that_is_asked_for_is_still_there() -> None:
    """The import hook leaves the module's loader what it was."""
    code = (
        "import adjoint, inspect, torch.utils.flop_counter as c; assert 'class FlopCounterMode' in inspect.getsource(c)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_arguments_by_name() -> None:
    x = torch.ones(1, 3, 1, 2)
    operator, gates = torch.ops.adjoint.gated_delta_rule, x[..., 0]
    flags = dict.fromkeys(("normalize_qk", "output_final_state", "checking", "keep"), False)
    named = {"scale": 1.0, **flags, "preference": ""}
    counts = counted(lambda: operator(x, x, x, -gates, gates, None, cu_seqlens=None, **named))
    assert counts == {"gated_delta_rule": 6 * 3 * 2 * 2}


# ------------------------------------------------------------------------------------------ the rule

B, T, HG, H, K, V = 2, 5, 1, 3, 4, 7
PRODUCT = 2 * B * T * H * K * V
"""A product of a state [K, V] and a vector, for every token and value head."""


def tokens() -> dict[str, Tensor]:
    return {
        "q": torch.randn(B, T, HG, K),
        "k": torch.randn(B, T, HG, K),
        "v": torch.randn(B, T, H, V),
        "g": -torch.rand(B, T, H),
        "beta": torch.rand(B, T, H),
    }


def state() -> Tensor:
    return torch.randn(B, H, K, V)


RULE = {
    "q k v g beta initial_state": 6,
    "q": 1,
    "v": 3,
    "g": 3,
    "beta initial_state": 3,
    "k": 5,
    "q v": 4,
}
"""Which gradients are needed, and the products of a state and a vector that takes."""


def test_the_rule_counts_its_recurrence() -> None:
    inputs = tokens()
    assert counted(lambda: adjoint.gated_delta_rule(**inputs)) == {"gated_delta_rule": 3 * PRODUCT}
    packed = {name: x.flatten(0, 1)[None] for name, x in inputs.items()}
    bounds = torch.tensor([0, 1, 1, B * T])
    assert counted(lambda: adjoint.gated_delta_rule(**packed, cu_seqlens=bounds)) == {"gated_delta_rule": 3 * PRODUCT}


@pytest.mark.parametrize("needed", RULE)
def test_the_backward_of_the_rule_counts_the_gradients_that_are_needed(needed: str) -> None:
    counts = gradients_counted(adjoint.gated_delta_rule, tokens() | {"initial_state": state()}, needed)
    assert counts == {"gated_delta_rule_backward": RULE[needed] * PRODUCT}


def test_a_gradient_of_the_final_state_alone_has_no_products_with_do() -> None:
    def final(**inputs: Tensor) -> Tensor:
        return adjoint.gated_delta_rule(**inputs, output_final_state=True)[1]  # type: ignore[return-value]

    counts = gradients_counted(final, tokens(), "q k v g beta")
    assert counts == {"gated_delta_rule_backward": 4 * PRODUCT}


@pytest.mark.parametrize("needed", {name.replace("initial_state", "state"): 0 for name in RULE})
def test_steps_count_what_the_rule_counts(needed: str) -> None:
    inputs = tokens() | {"state": state()}
    assert counted(lambda: adjoint.gated_delta_step(**inputs)) == {"gated_delta_step": 3 * PRODUCT}
    in_place = counted(lambda: adjoint.gated_delta_step(**inputs, in_place=True))
    assert in_place == {"gated_delta_step_in_place": 3 * PRODUCT}
    products = RULE[needed.replace("state", "initial_state")]
    counts = gradients_counted(adjoint.gated_delta_step, inputs, needed)
    assert counts == {"gated_delta_step_backward": products * PRODUCT}


def test_the_recurrence_written_in_products_counts_the_same() -> None:
    """A plain loop over tokens, whose products torch counts itself."""
    inputs = tokens()

    def loop() -> None:
        q, k = (inputs[name].repeat_interleave(H // HG, 2) for name in "qk")
        S = torch.zeros(B, H, K, V)
        for t in range(T):
            S = inputs["g"][:, t, :, None, None].exp() * S
            read = (k[:, t, :, None] @ S)[:, :, 0]
            new = inputs["beta"][:, t, :, None] * (inputs["v"][:, t] - read)
            S = S + k[:, t, :, :, None] @ new[:, :, None]
            q[:, t, :, None] @ S

    assert sum(counted(loop).values()) == sum(counted(lambda: adjoint.gated_delta_rule(**inputs)).values())


# ---------------------------------------------------------------------------------------- the stages

CHUNK = 4


def stage_inputs() -> dict[str, dict[str, Tensor]]:
    of = tokens()
    G, k, q, v, beta = gated_delta.cumulative_decay(of["g"], CHUNK), of["k"], of["q"], of["v"], of["beta"]
    A = gated_delta.gram(k, beta, G, chunk=CHUNK)
    solved = gated_delta.solve(A)
    w, u = gated_delta.recompute_w_u(k, v, beta, G, solved)
    S = state()
    values, states, _ = gated_delta.carry(k, w, u, G, S, chunk=CHUNK)
    return {
        "gram": {"k": k, "beta": beta, "G": G},
        "solve": {"A": A},
        "recompute_w_u": {"k": k, "v": v, "beta": beta, "G": G, "T": solved},
        "carry": {"k": k, "w": w, "u": u, "G": G, "state": S},
        "output": {"q": q, "k": k, "values": values, "states": states, "G": G},
    }


_KEYS, _VALUES = 2 * B * T * HG * CHUNK * K, 2 * B * T * H * CHUNK * V
STAGES = (
    ("gram", "k beta G", _KEYS, _KEYS),
    ("gram", "beta", _KEYS, 0),
    ("solve", "A", 0, 2 * 2 * B * T * H * CHUNK * CHUNK),
    ("recompute_w_u", "k v beta G T", H * _KEYS + _VALUES, 2 * (H * _KEYS + _VALUES)),
    ("recompute_w_u", "T", H * _KEYS + _VALUES, H * _KEYS + _VALUES),
    ("recompute_w_u", "v", H * _KEYS + _VALUES, _VALUES),
    ("recompute_w_u", "G", H * _KEYS + _VALUES, H * _KEYS),
    ("carry", "k w u G state", 2 * PRODUCT, 4 * PRODUCT),
    ("carry", "u", 2 * PRODUCT, 2 * PRODUCT),
    ("carry", "w", 2 * PRODUCT, 3 * PRODUCT),
    ("output", "q k values states G", _KEYS + PRODUCT + _VALUES, 2 * (_KEYS + PRODUCT + _VALUES)),
    ("output", "values", _KEYS + PRODUCT + _VALUES, _VALUES),
    ("output", "states", _KEYS + PRODUCT + _VALUES, PRODUCT),
    ("output", "k", _KEYS + PRODUCT + _VALUES, _KEYS + _VALUES),
    ("output", "G", _KEYS + PRODUCT + _VALUES, PRODUCT + _VALUES),
)
"""Operations of a stage and of its backward, counted by hand; there is one key head for three value heads."""


@pytest.mark.parametrize(("name", "needed", "forward", "backward"), STAGES)
def test_stages(name: str, needed: str, forward: int, backward: int) -> None:
    inputs, options = stage_inputs()[name], {"chunk": CHUNK} if name in ("gram", "carry", "output") else {}

    def stage(**tensors: Tensor) -> Any:
        return getattr(gated_delta, name)(**tensors, **options)

    assert counted(lambda: stage(**inputs)) == {name: forward}
    assert gradients_counted(stage, inputs, needed) == {f"{name}_backward": backward}


# --------------------------------------------------------------------------------------- the experts

TOKENS, COLUMNS, INNER, EXPERTS, SLOTS = 9, 6, 5, 4, 2


def layer() -> dict[str, Tensor]:
    return {
        "x": torch.randn(TOKENS, COLUMNS),
        "gate_up": torch.randn(EXPERTS, 2 * INNER, COLUMNS),
        "down": torch.randn(EXPERTS, COLUMNS, INNER),
        "weights": torch.rand(TOKENS, SLOTS),
    }


INDICES = torch.randint(EXPERTS, (TOKENS, SLOTS), generator=torch.Generator().manual_seed(0))


def experts(**tensors: Tensor) -> Tensor:
    return moe.experts(indices=INDICES, **tensors)


def experts_in_torch(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, slot = INDICES.eq(expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, -1)
        rows = F.linear(F.silu(gate) * up, down[expert])
        out = out.index_add(0, token, rows * weights[token, slot, None])
    return out


def test_experts_count_what_their_products_in_torch_count() -> None:
    inputs = layer()
    ours, torchs = (sum(counted(lambda f=f: f(**inputs)).values()) for f in (experts, experts_in_torch))
    assert ours == torchs == 6 * TOKENS * SLOTS * COLUMNS * INNER


@pytest.mark.parametrize(
    ("needed", "products"),
    (("x gate_up down weights", 6), ("x gate_up down", 6), ("x", 3), ("gate_up", 3), ("down", 1), ("gate_up down", 4)),
)
def test_gradients_of_experts_count_what_they_count_in_torch(needed: str, products: int) -> None:
    ours = gradients_counted(experts, layer(), needed)
    assert ours == {"moe_experts_backward": 2 * products * TOKENS * SLOTS * COLUMNS * INNER}
    assert sum(gradients_counted(experts_in_torch, layer(), needed).values()) == sum(ours.values())


def test_gradients_of_weights_alone_take_the_gradient_of_the_hidden_rows() -> None:
    """Torch has the rows behind `down` in memory and multiplies elementwise; ours reads h, and computes dh."""
    ours = gradients_counted(experts, layer(), "weights")
    assert ours == {"moe_experts_backward": 2 * TOKENS * SLOTS * COLUMNS * INNER}


# ------------------------------------------------------------------------------------- the convolution

CHANNELS, WIDTH = 6, 4
TAPS = 2 * B * T * CHANNELS * WIDTH
"""Operations of a product for each tap of each number of y."""


def convolution() -> dict[str, Tensor]:
    return {
        "x": torch.randn(B, T, CHANNELS),
        "weight": torch.randn(CHANNELS, WIDTH),
        "bias": torch.randn(CHANNELS),
        "initial_state": torch.randn(B, CHANNELS, WIDTH - 1),
    }


def convolution_in_torch(x: Tensor, weight: Tensor, bias: Tensor, initial_state: Tensor) -> Tensor:
    return F.conv1d(torch.cat((initial_state, x.mT), 2), weight[:, None], bias, groups=CHANNELS)


NEEDED = {"x weight bias initial_state": 2, "x": 1, "weight": 1, "initial_state": 1, "x initial_state": 1, "bias": 0}


def test_a_convolution_counts_what_it_counts_in_torch() -> None:
    inputs = convolution()
    assert counted(lambda: adjoint.causal_conv1d(**inputs)) == {"causal_conv1d": TAPS}
    assert sum(counted(lambda: convolution_in_torch(**inputs)).values()) == TAPS
    state = {"state": inputs.pop("initial_state")}
    assert counted(lambda: adjoint.causal_conv1d_step(**inputs, **state)) == {"causal_conv1d_step": TAPS}
    in_place = counted(lambda: adjoint.causal_conv1d_step(**inputs, **state, in_place=True))
    assert in_place == {"causal_conv1d_step_in_place": TAPS}


@pytest.mark.parametrize("needed", NEEDED)
def test_gradients_of_a_convolution_that_are_needed_count(needed: str) -> None:
    counts = gradients_counted(adjoint.causal_conv1d, convolution(), needed)
    assert counts == {"causal_conv1d_backward": NEEDED[needed] * TAPS}

    def step(initial_state: Tensor, **inputs: Tensor) -> Any:
        return adjoint.causal_conv1d_step(state=initial_state, **inputs)

    counts = gradients_counted(step, convolution(), needed)
    assert counts == {"causal_conv1d_step_backward": NEEDED[needed] * TAPS}


def test_a_part_without_a_gradient_counts_nothing() -> None:
    def second(**inputs: Tensor) -> Tensor:
        return adjoint.causal_conv1d(**inputs, split=(1, CHANNELS - 1))[1]  # type: ignore[no-any-return]

    counts = gradients_counted(second, convolution(), "x weight")
    assert counts == {"causal_conv1d_2_backward": 2 * TAPS * (CHANNELS - 1) // CHANNELS}


def test_shapes_are_enough() -> None:
    with torch.device("meta"):
        inputs = tokens()
    assert counted(lambda: adjoint.gated_delta_rule(**inputs)) == {"gated_delta_rule": 3 * PRODUCT}
