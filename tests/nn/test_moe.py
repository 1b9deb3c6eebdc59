"""`SparseMoE` beside the definition of Qwen's blocks, and beside Hugging Face's own where it is installed."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import adjoint
from adjoint import nn
from adjoint.bench.measurement.check import OTHERS_LIMIT

HIDDEN, SIZE, SHARED, EXPERTS, SLOTS = 16, 12, 20, 6, 3


def _module(renormalize: bool = True, shared: int | None = SHARED, dtype: torch.dtype = torch.float32) -> nn.SparseMoE:
    torch.manual_seed(3)
    module = nn.SparseMoE(HIDDEN, SIZE, EXPERTS, SLOTS, shared_expert_size=shared, renormalize=renormalize, dtype=dtype)
    with torch.no_grad():
        module.gate.weight.mul_(8)  # far from a tie
    return module


def _x(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(4)).to(dtype)


def _by_definition(state: dict[str, Tensor], x: Tensor, renormalize: bool) -> Tensor:
    """The block in float64, a token and an expert at a time."""
    rows = []
    for token in x.reshape(-1, HIDDEN):
        probabilities = (state["gate.weight"] @ token).softmax(0)
        weights, chosen = probabilities.topk(SLOTS)
        if renormalize:
            weights = weights / weights.sum()
        y = torch.zeros_like(token)
        for weight, expert in zip(weights, chosen, strict=True):
            gate, up = (state["experts.gate_up_proj"][expert] @ token).chunk(2)
            y = y + weight * (state["experts.down_proj"][expert] @ (F.silu(gate) * up))
        if "shared_expert_gate.weight" in state:
            gate, up = (state[f"shared_expert.{name}_proj.weight"] @ token for name in ("gate", "up"))
            shared = state["shared_expert.down_proj.weight"] @ (F.silu(gate) * up)
            y = y + torch.sigmoid(state["shared_expert_gate.weight"] @ token) * shared
        rows.append(y)
    return torch.stack(rows).view(x.shape)


def _relative(got: Tensor, expected: Tensor) -> float:
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())


def _promised(dtype: torch.dtype) -> dict[str, float]:
    """The relative errors that are recorded of the expert layer, by output."""
    x, module = torch.empty(1, HIDDEN, dtype=dtype, device="meta"), _module(dtype=dtype).to("meta")
    indices = torch.empty(1, SLOTS, dtype=torch.int64, device="meta")
    plan = adjoint.plan(
        adjoint.moe.experts,
        x,
        module.experts.gate_up_proj,
        module.experts.down_proj,
        indices,
        x[:, :SLOTS],
        device="cpu",
    )
    assert plan.adjoint is not None
    stated = {**plan.guarantee, **plan.adjoint.guarantee}
    return {name: promise.recorded.ceiling for name, promise in stated.items() if promise.recorded is not None}


def _compare(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], x: Tensor, limit: float) -> None:
    """Outputs and the gradient of the input."""
    results = []
    for function in (ours, theirs):
        leaf = x.detach().clone().requires_grad_()
        y = function(leaf)
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, upstream)))
    for got, expected in zip(*results, strict=True):
        assert _relative(got, expected) < limit


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("shared", [SHARED, None])
def test_the_block_is_what_it_is_defined_to_be(renormalize: bool, shared: int | None) -> None:
    """Output, and the gradients of the input and of every parameter."""
    module, x = _module(renormalize, shared), _x().requires_grad_()
    state = {name: value.detach().double().requires_grad_() for name, value in module.state_dict().items()}
    exact_x = x.detach().double().requires_grad_()
    y, exact = module(x), _by_definition(state, exact_x, renormalize)
    promised = _promised(torch.float32)
    assert _relative(y, exact) < promised["y"]
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    parameters = dict(module.named_parameters())
    assert parameters.keys() == state.keys()
    got = torch.autograd.grad(y, (x, *parameters.values()), upstream)
    expected = torch.autograd.grad(exact, (exact_x, *(state[name] for name in parameters)), upstream.double())
    for name, mine, truth in zip(("x", *parameters), got, expected, strict=True):
        assert _relative(mine, truth) < max(promised.values()), name


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_a_model_in_float64_is_differentiated_in_float64(
    score: Literal["softmax", "sigmoid"], renormalize: bool
) -> None:
    """`.double()`, the layer and the losses of its router, beside finite differences in every parameter."""
    torch.manual_seed(3)
    layer = nn.SparseMoE(5, 4, 4, 2, shared_expert_size=3, renormalize=renormalize, score=score).double()
    with torch.no_grad():
        layer.gate.weight.mul_(8)
    names, values = zip(*layer.named_parameters(), strict=True)
    x = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).requires_grad_()

    def results(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        y, routing = torch.func.functional_call(
            layer, dict(zip(names, parameters, strict=True)), (x,), {"return_routing": True}
        )
        losses = adjoint.moe.load_balancing_loss(routing.logits, routing.indices), adjoint.moe.z_loss(routing.logits)
        assert {t.dtype for t in (y, routing.logits, routing.weights, *losses)} == {torch.float64}
        return y, routing.weights, *losses

    assert torch.autograd.gradcheck(results, (x, *values))


@pytest.mark.parametrize("renormalize", [True, False])
def test_a_block_in_float64_is_what_it_is_defined_to_be(renormalize: bool) -> None:
    module, x = _module(renormalize).double(), _x(torch.float64)
    assert _relative(module(x), _by_definition(module.state_dict(), x, renormalize)) < _promised(torch.float64)["y"]


def test_logits_may_be_shared_with_a_loss() -> None:
    module, x = _module(), _x()
    assert torch.equal(module.mix(x, module.gate(x)), module(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_whole(dynamic: bool) -> None:
    module = _module()
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for x in (_x(), _x()[:1]):
        mine, theirs = (x.clone().requires_grad_() for _ in range(2))
        y, expected = compiled(mine), module(theirs)
        assert torch.equal(y, expected)
        got, wanted = (torch.autograd.grad(out.sum(), x)[0] for out, x in ((y, mine), (expected, theirs)))
        assert torch.equal(got, wanted)
    torch._dynamo.reset()


def test_one_matrix_per_expert_is_fused() -> None:
    module = _module()
    state = module.state_dict()
    apart = {name: value for name, value in state.items() if not name.startswith("experts.")}
    for expert in range(EXPERTS):
        gate, up = state["experts.gate_up_proj"][expert].chunk(2)
        apart[f"experts.{expert}.gate_proj.weight"] = gate
        apart[f"experts.{expert}.up_proj.weight"] = up
        apart[f"experts.{expert}.down_proj.weight"] = state["experts.down_proj"][expert]
    fused = nn.fuse_experts({f"model.layers.0.mlp.{name}": value for name, value in apart.items()})
    assert {f"model.layers.0.mlp.{name}" for name in state} == fused.keys()
    assert all(torch.equal(value, fused[f"model.layers.0.mlp.{name}"]) for name, value in state.items())
    assert nn.fuse_experts(state).keys() == state.keys()
    other = nn.SparseMoE(HIDDEN, SIZE, EXPERTS, SLOTS, shared_expert_size=SHARED)
    other.load_state_dict(nn.fuse_experts(apart))
    assert torch.equal(other(_x()), module(_x()))
    del apart["experts.2.up_proj.weight"]
    with pytest.raises(adjoint.ArgumentError, match=r"no experts\.2\.up_proj\.weight"):
        nn.fuse_experts(apart)


def test_the_shared_expert_calls_its_modules() -> None:
    """What is attached to a module takes part: adapters, hooks, quantisation."""
    module, x, called = _module(), _x(), []
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(module.shared_expert, name).register_forward_hook(lambda *_, name=name: called.append(name))
    before = module(x)
    assert called == ["gate_proj", "up_proj", "down_proj"]
    module.shared_expert.down_proj.register_forward_hook(lambda hooked, inputs, output: 2 * output)
    assert not torch.equal(module(x), before)


def test_the_experts_are_called() -> None:
    """Hooks on them run, and what takes the place of a parameter for a call, as an adapter does, is in force."""
    module, x = _module(), _x()
    plain, called = module(x), []
    handle = module.experts.register_forward_hook(lambda hooked, inputs, output: called.append(output.shape))
    assert torch.equal(module(x), plain) and called == [(10, HIDDEN)]
    handle.remove()
    tokens = x.reshape(-1, HIDDEN)
    shared = torch.sigmoid(module.shared_expert_gate(tokens)) * module.shared_expert(tokens)
    module.experts.register_forward_hook(lambda hooked, inputs, output: 0 * output)
    assert torch.equal(module(x).view_as(shared), shared)


def test_adapters_of_peft_on_the_matrices_of_experts() -> None:
    """Down projections with an adapter are those with its product added."""
    peft = pytest.importorskip("peft")
    module, x = _module(), _x()
    plain = module(x)
    settings = peft.LoraConfig(r=2, target_parameters=["experts.down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(torch.nn.ModuleDict({"moe": module}), settings)
    y = adapted.base_model.model["moe"](x)
    assert not torch.equal(y, plain)
    y.sum().backward()
    adapters = {name: p for name, p in adapted.named_parameters() if "lora" in name}
    assert len(adapters) == 2 and all(p.grad is not None and p.grad.any() for p in adapters.values())
    merged = adapted.merge_and_unload()["moe"]
    assert torch.equal(merged(x), y)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantize_per_tensor.*")
@pytest.mark.parametrize("parts", [{torch.nn.Linear}, {"shared_expert.down_proj"}, {"gate"}], ids=str)
def test_linear_layers_may_be_quantised(parts: set[Any]) -> None:
    """torch's quantiser exchanges layers for its own, of which the weight is no tensor: the layer calls them."""
    module, x = _module(), _x()
    quantised = torch.ao.quantization.quantize_dynamic(module, parts, dtype=torch.qint8)
    names = [name for name, part in quantised.named_modules() if type(part) is torch.ao.nn.quantized.dynamic.Linear]
    assert len(names) == (5 if torch.nn.Linear in parts else 1)
    y, plain = quantised(x), module(x)
    assert y.shape == x.shape and not torch.equal(y, plain)
    tokens = x.reshape(-1, HIDDEN)
    routing = adjoint.moe.route(quantised.gate(tokens), SLOTS)
    shared = torch.sigmoid(quantised.shared_expert_gate(tokens)) * quantised.shared_expert(tokens)
    assert torch.equal(y.view(-1, HIDDEN), quantised.experts(tokens, *reversed(routing)) + shared)


def test_routing_is_returned_on_request() -> None:
    module, x = _module(), _x()
    y, routing = module(x, return_routing=True)
    weights, indices = adjoint.moe.route(module.gate(x), SLOTS)
    assert torch.equal(y, module(x)) and torch.equal(routing.logits, module.gate(x))
    assert torch.equal(routing.weights, weights) and torch.equal(routing.indices, indices)


def test_wrong_inputs_are_named() -> None:
    module = _module()
    with pytest.raises(adjoint.ArgumentError, match=f"SparseMoE: x must have {HIDDEN} columns"):
        module(torch.zeros(3, HIDDEN + 1))
    with pytest.raises(adjoint.ArgumentError, match="SparseMoE: x must be one of"):
        module(torch.zeros(3, HIDDEN, dtype=torch.int64))
    with pytest.raises(adjoint.ArgumentError, match="float32, got bfloat16"):
        module(_x(torch.bfloat16))
    with pytest.raises(adjoint.ArgumentError, match="score must be one of 'softmax', 'sigmoid', got 'soft'"):
        nn.SparseMoE(4, 4, 4, 2, score="soft")  # type: ignore[arg-type]
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),  # which casts no float64
        pytest.raises(adjoint.ArgumentError, match="float32, got float64"),
    ):
        module(_x(torch.float64))
    for logits in (torch.zeros(2, 5, EXPERTS + 1), torch.zeros(10, EXPERTS), None):
        with pytest.raises(adjoint.ArgumentError, match=r"SparseMoE: logits must be a tensor of shape \(2, 5, 6\)"):
            module.mix(_x(), logits)


def test_wrong_sizes_are_named() -> None:
    for name, arguments in {
        "hidden_size": (0, 4, 4, 2),
        "expert_size": (4, 0, 4, 2),
        "num_experts": (4, 4, 0, 1),
        "experts_per_token": (4, 4, 4, 5),
    }.items():
        with pytest.raises(adjoint.ArgumentError, match=f"SparseMoE: {name} must be"):
            nn.SparseMoE(*arguments)
    with pytest.raises(adjoint.ArgumentError, match="shared_expert_size"):
        nn.SparseMoE(4, 4, 4, 2, shared_expert_size=0)


@pytest.mark.parametrize("size", [2.0, "2", None, True])
def test_sizes_that_are_no_integers_are_named(size: Any) -> None:
    names = ("hidden_size", "expert_size", "num_experts", "experts_per_token")
    for place, name in enumerate(names):
        arguments = [4, 4, 4, 2]
        arguments[place] = size
        with pytest.raises(adjoint.ArgumentError, match=f"SparseMoE: {name} must be an integer, got {size!r}"):
            nn.SparseMoE(*arguments)
    with pytest.raises(adjoint.ArgumentError, match="DenseMLP: intermediate_size must be an integer"):
        nn.DenseMLP(4, size)
    with pytest.raises(adjoint.ArgumentError, match="GatedAttention: head_dim must be an integer"):
        nn.GatedAttention(8, 2, 2, size)
    with pytest.raises(adjoint.ArgumentError, match="GatedDeltaNet: num_key_heads must be an integer"):
        nn.GatedDeltaNet(8, size, 2, 4, 4)


def test_sizes_may_be_integers_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    module = nn.SparseMoE(*map(numpy.int64, (HIDDEN, SIZE, EXPERTS, SLOTS)), shared_expert_size=numpy.int32(SHARED))
    assert module(_x()).shape == _x().shape and type(module.experts_per_token) is int
    layer = nn.GatedDeltaNet(*map(numpy.int64, (HIDDEN, 1, 2, 8, 4)), conv_width=numpy.int8(3))
    assert layer(_x()).shape == _x().shape


def test_it_shows_what_it_is() -> None:
    assert "num_experts=6, experts_per_token=3, renormalize=False" in repr(_module(renormalize=False))


# ------------------------------------------------------------------------------------- Hugging Face


def _theirs(name: str, **options: Any) -> torch.nn.Module:
    """A block of Hugging Face's with a tiny configuration."""
    pytest.importorskip("transformers")
    package = {"Qwen3Next": "qwen3_next", "Qwen3_5Moe": "qwen3_5_moe"}[name]
    try:
        models = import_module(f"transformers.models.{package}.modeling_{package}")
        settings = import_module(f"transformers.models.{package}.configuration_{package}")
    except ImportError as error:
        pytest.skip(f"this transformers has no {name}: {error}")
    config = getattr(settings, f"{name}TextConfig", None) or getattr(settings, f"{name}Config")
    tiny = config(
        hidden_size=HIDDEN,
        moe_intermediate_size=SIZE,
        shared_expert_intermediate_size=SHARED,
        num_experts=EXPERTS,
        num_experts_per_tok=SLOTS,
        **options,
    )
    tiny._experts_implementation = "eager"  # their loop over experts, where there are others to choose from
    block: torch.nn.Module = getattr(models, f"{name}SparseMoeBlock")(tiny)
    return block


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, None), (torch.bfloat16, OTHERS_LIMIT)])
@pytest.mark.parametrize(
    ("name", "options"),
    [("Qwen3Next", {"norm_topk_prob": True}), ("Qwen3Next", {"norm_topk_prob": False}), ("Qwen3_5Moe", {})],
)
def test_the_block_is_hugging_faces(
    name: str, options: dict[str, Any], dtype: torch.dtype, limit: float | None, device: torch.device
) -> None:
    """On the same weights, loaded from its state dict.

    In bfloat16, where theirs rounds the routing weights and ours does not, as near as `bench` asks of those who promise
    nothing; in float32 as near as the expert layer promises.
    """
    theirs = _theirs(name, **options).to(dtype)
    ours = _module(options.get("norm_topk_prob", True), dtype=dtype)
    state = ours.state_dict()
    fused = nn.fuse_experts(theirs.state_dict())
    assert {n: tuple(t.shape) for n, t in fused.items()} == {n: tuple(t.shape) for n, t in state.items()}
    if theirs.state_dict().keys() == state.keys():
        theirs.load_state_dict(state)
    else:  # one matrix per expert
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.normal_(0, 0.2)
        ours.load_state_dict(nn.fuse_experts(theirs.state_dict()))
    ours, theirs = ours.to(device), theirs.to(device)

    def block(x: Tensor) -> Tensor:
        result = theirs(x)
        return result[0] if isinstance(result, tuple) else result

    _compare(ours, block, _x(dtype).to(device), limit or max(_promised(dtype).values()))
