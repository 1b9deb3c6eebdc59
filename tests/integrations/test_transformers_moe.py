"""Our experts and router in mixture models of transformers: stand-ins for blocks; models where it is installed."""

import copy
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adjoint
from adjoint.integrations.transformers import exchange_routers, experts_forward, register_experts
from tests.integrations.test_transformers import distance_of_all

HIDDEN, SIZE, EXPERTS, SLOTS = 16, 12, 6, 3

# --------------------------------------------------------------------------------------------- stand-ins


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package by the name of transformers with a version and a registry of experts, and nothing else."""
    package: Any = ModuleType("transformers")
    package.__version__ = "5.8.0"
    registered: dict[str, Any] = {}
    registry: Any = ModuleType("transformers.integrations.moe")
    registry.ALL_EXPERTS_FUNCTIONS = SimpleNamespace(register=registered.__setitem__)
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, "transformers.integrations", ModuleType("transformers.integrations"))
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", registry)
    package.registered = registered
    return package


class Qwen3NextTopKRouter(nn.Module):
    """A router with the attributes and results of the one that has this name."""

    def __init__(self, renormalize: bool) -> None:
        super().__init__()
        self.top_k, self.hidden_dim, self.norm_topk_prob = SLOTS, HIDDEN, renormalize
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x.reshape(-1, HIDDEN), self.weight)
        weights, indices = logits.softmax(-1).topk(SLOTS)
        return logits, weights / weights.sum(-1, keepdim=True) if self.norm_topk_prob else weights, indices


class Experts(nn.Module):
    """Fused experts, with the attributes that transformers' decorator gives them."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * SIZE, HIDDEN) * HIDDEN**-0.5)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, SIZE) * SIZE**-0.5)
        self.act_fn: nn.Module = nn.SiLU()

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return experts_forward(self, x, indices, weights)


class Block(nn.Module):
    def __init__(self, renormalize: bool = True) -> None:
        super().__init__()
        self.gate, self.experts = Qwen3NextTopKRouter(renormalize), Experts()

    def forward(self, x: Tensor) -> Tensor:
        _, weights, indices = self.gate(x)
        return self.experts(x.view(-1, HIDDEN), indices, weights).view(x.shape)  # type: ignore[no-any-return]


def _recorded(module: nn.Module, router: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output of a module, and what a hook takes of its router: the first of its results."""
    taken: list[Tensor] = []
    handle = router.register_forward_hook(lambda module, inputs, output: taken.append(output[0]))
    y = module(x)
    handle.remove()
    (logits,) = taken
    return y, logits


def test_the_expert_layer_is_registered_by_name(stand_in: Any) -> None:
    register_experts()
    register_experts("ours")
    assert stand_in.registered == {"adjoint": experts_forward, "ours": experts_forward}


@pytest.mark.parametrize("version", ["5.7.2", "4.57.1"])
def test_an_older_transformers_is_named(stand_in: Any, version: str) -> None:
    stand_in.__version__ = version
    for call in (register_experts, lambda: exchange_routers(Block())):
        with pytest.raises(adjoint.Unsupported, match=f"needs transformers 5.8 or newer, this is {version}"):
            call()
    stand_in.__version__ = "5.17.0.dev0"
    register_experts()


@pytest.mark.parametrize("renormalize", [True, False])
def test_routers_are_exchanged_and_still_recorded(stand_in: Any, renormalize: bool) -> None:
    torch.manual_seed(0)
    block, x = Block(renormalize), torch.randn(2, 5, HIDDEN)
    theirs, logits = _recorded(block, block.gate, x)
    expected = block.gate(x)
    assert exchange_routers(block) == 1
    ours, same = _recorded(block, block.gate, x)
    assert torch.equal(same, logits)
    weights, indices = adjoint.moe.route(logits, SLOTS, renormalize=renormalize)
    for result, right in zip(block.gate(x), (logits, weights, indices), strict=True):
        assert torch.equal(result, right)
    assert torch.equal(expected[2], indices)
    for own_weights, y in ((weights, ours), (expected[1], theirs)):  # the blocks differ in the weights alone
        assert torch.equal(block.experts(x.view(-1, HIDDEN), indices, own_weights).view(x.shape), y)
    exact = logits.double().softmax(-1).gather(-1, indices)
    exact = exact / exact.sum(-1, keepdim=True) if renormalize else exact
    promised = adjoint.plan(adjoint.moe.route, logits, SLOTS, renormalize=renormalize).guarantee["weights"].error
    assert promised.measure(weights.detach(), exact.detach(), logits.detach().double()).holds
    copied = copy.deepcopy(block)
    with torch.no_grad():
        copied.gate.weight.zero_()
    assert not torch.equal(copied(x), ours), "a copy reads its own weights"
    del block.gate.forward
    assert torch.equal(block(x), theirs)


def test_the_weights_keep_the_type_of_the_logits(stand_in: Any) -> None:
    block = Block().bfloat16()
    exchange_routers(block)
    logits, weights, indices = block.gate(torch.randn(4, HIDDEN).bfloat16())
    assert logits.dtype == weights.dtype == torch.bfloat16 and indices.dtype == torch.int64


def test_a_model_without_such_a_router_is_an_error(stand_in: Any) -> None:
    with pytest.raises(adjoint.ArgumentError, match="no router of a class it knows: Qwen2MoeTopKRouter"):
        exchange_routers(nn.Linear(3, 3))


def test_a_sparse_moe_with_the_routers_gate_is_recorded() -> None:
    """And gives the bits of the block, which has no shared expert."""
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 5, HIDDEN)
    swapped = adjoint.nn.SparseMoE(HIDDEN, SIZE, EXPERTS, SLOTS)
    swapped.load_state_dict(block.state_dict())
    own = swapped(x)
    swapped.gate = block.gate
    assert swapped.state_dict().keys() == block.state_dict().keys()
    y, logits = _recorded(swapped, block.gate, x)
    assert torch.equal(y, own) and logits.shape == (10, EXPERTS)
    _, routing = swapped(x, return_routing=True)
    assert torch.equal(routing.logits, logits.view(2, 5, EXPERTS))


def test_a_block_compiles_whole(stand_in: Any) -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 5, HIDDEN)
    exchange_routers(block)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(block, fullgraph=True, backend="aot_eager")(x), block(x))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("has_gate", False, "has no gate"),
        ("has_bias", True, "has biases"),
        ("is_transposed", True, "transposed"),
        ("is_concatenated", False, "interleaved"),
        ("act_fn", nn.GELU(), "the activation GELU"),
    ],
)
def test_experts_of_another_kind_are_refused(attribute: str, value: Any, words: str) -> None:
    block = Block()
    setattr(block.experts, attribute, value)
    with pytest.raises(adjoint.Unsupported, match=f"Experts .*{words}.*another experts_implementation"):
        block(torch.randn(4, HIDDEN))


def test_experts_with_a_gate_of_their_own_are_refused() -> None:
    class Clamped(Experts):
        def _apply_gate(self, both: Tensor) -> Tensor:
            return both.clamp(max=7)

    block = Block()
    block.experts = Clamped()
    with pytest.raises(adjoint.Unsupported, match="Clamped has a gate of its own"):
        block(torch.randn(4, HIDDEN))


# ---------------------------------------------------------------------------------------- whole models

MARGIN = 2.0
"""How much of the error that the model's own path has, against float64, ours may have."""

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # a router far from a tie
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3Moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "Qwen3Next": (
        "qwen3_next",
        {
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
        },
    ),
}
models = pytest.mark.parametrize("name", MODELS)


def _package(name: str) -> ModuleType:
    transformers = pytest.importorskip("transformers")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 8):
        pytest.skip("needs transformers 5.8 or newer")
    return import_module(f"transformers.models.{MODELS[name][0]}.modeling_{MODELS[name][0]}")


def _model(name: str) -> Any:
    modeling = _package(name)
    folder, options = MODELS[name]
    settings = import_module(f"transformers.models.{folder}.configuration_{folder}")
    torch.manual_seed(0)
    model = getattr(modeling, f"{name}ForCausalLM")(getattr(settings, f"{name}Config")(**SIZES, **options))
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("A_log"):
            nn.init.uniform_(parameter, -4, 0)
    model.set_experts_implementation("eager")
    return model


def _exchanged(model: Any) -> Any:
    register_experts()
    model.set_experts_implementation("adjoint")
    assert exchange_routers(model) == SIZES["num_hidden_layers"]
    return model


@pytest.fixture
def inputs() -> Iterator[dict[str, Any]]:
    ids = torch.randint(1, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    labels = torch.where(mask.bool(), ids, -100)
    yield {"input_ids": ids, "attention_mask": mask, "labels": labels, "output_router_logits": True}


def _distance(result: Tensor, exact: Tensor) -> float:
    return float((result.detach().double() - exact.detach().double()).norm())


@models
def test_router_logits_and_the_auxiliary_loss_are_kept(name: str, inputs: dict[str, Any]) -> None:
    theirs = _model(name)(**inputs)
    ours = _exchanged(_model(name))(**inputs)
    exact = _exchanged(_model(name).double())(**inputs)
    assert len(ours.router_logits) == len(theirs.router_logits) == SIZES["num_hidden_layers"]
    assert torch.equal(ours.router_logits[0], theirs.router_logits[0]), "before the first expert layer all is the same"
    for mine, their, truth in zip(ours.router_logits, theirs.router_logits, exact.router_logits, strict=True):
        assert mine.shape == their.shape and mine.dtype == their.dtype
        assert _distance(mine, truth) <= MARGIN * _distance(their, truth)
    of_their_logits = _package(name).load_balancing_loss_func(  # type: ignore[attr-defined]
        theirs.router_logits, SIZES["num_experts"], SIZES["num_experts_per_tok"], inputs["attention_mask"]
    )
    assert torch.equal(theirs.aux_loss, of_their_logits)
    for key in ("aux_loss", "loss", "logits"):
        rounding = torch.finfo(torch.float32).eps * float(exact[key].detach().abs().max())
        assert _distance(ours[key], exact[key]) <= MARGIN * _distance(theirs[key], exact[key]) + rounding, key


@models
def test_gradients_with_the_auxiliary_loss(name: str, inputs: dict[str, Any]) -> None:
    gradients = []
    for model in (_model(name), _exchanged(_model(name)), _exchanged(_model(name).double())):
        model(**inputs).loss.backward()
        gradients.append({k: p.grad for k, p in model.named_parameters() if p.grad is not None})
    theirs, ours, exact = gradients
    assert theirs.keys() == ours.keys() == exact.keys()
    assert any(key.endswith("gate.weight") for key in exact)
    assert distance_of_all(ours, exact) <= MARGIN * distance_of_all(theirs, exact)


def test_swapped_blocks_that_keep_their_routers_are_recorded(inputs: dict[str, Any]) -> None:
    """`SparseMoE` gives the bits of the registered experts behind exchanged routers."""
    registered = _exchanged(_model("Qwen3Moe"))
    expected = registered(**inputs)
    swapped = _model("Qwen3Moe")
    for layer in swapped.model.layers:
        block = adjoint.nn.SparseMoE(32, 16, SIZES["num_experts"], SIZES["num_experts_per_tok"])
        block.load_state_dict(layer.mlp.state_dict())
        block.gate, layer.mlp = layer.mlp.gate, block
    outputs = swapped(**inputs)
    assert torch.equal(outputs.logits, expected.logits) and torch.equal(outputs.aux_loss, expected.aux_loss)
    assert all(map(torch.equal, outputs.router_logits, expected.router_logits))
