"""`HybridLM` beside an oracle in float64: logits, losses and every parameter's gradient; bad calls; configurations."""

import copy
import inspect
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import adjoint
from adjoint.models import HybridConfig, HybridLM, pack
from adjoint.models.packing import next_labels
from tests.models import oracle
from tests.models.small import (
    ANOTHER_WAY,
    CONFIGS,
    EXACT_GRADIENTS,
    EXACT_LOGITS,
    GRADIENTS,
    PACKED_LOGITS,
    SAME_LOSS,
    SIZES,
    distance,
    sequences,
    small_model,
)

BOUNDS = {torch.float64: (EXACT_LOGITS, EXACT_GRADIENTS), torch.float32: (PACKED_LOGITS, GRADIENTS)}
"""What the error of logits, and of any parameter's gradient, is at most, by their norms."""

MARGIN = 2.0
"""How much of the error that plain torch has in 16 bits, against float64, ours may have."""

families = pytest.mark.parametrize("name", CONFIGS)
dtypes = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


def labels_of(ids: list[Tensor]) -> list[Tensor]:
    labels = [row.clone() for row in ids]
    labels[0][3] = -100
    return labels


def exact_results(
    model: HybridLM, ids: list[Tensor], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    weights = {name: p.detach().to(dtype, copy=True).requires_grad_() for name, p in model.named_parameters()}
    loss, logits = oracle.loss_of(ids, labels_of(ids), weights, model.config)
    loss.backward()
    return logits, loss, {name: w.grad for name, w in weights.items() if w.grad is not None}


def packed_results(
    model: HybridLM, ids: list[Tensor], with_logits: bool = False
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model.zero_grad()
    row, cu_seqlens = pack(ids)
    output = model(row, cu_seqlens=cu_seqlens, labels=pack(labels_of(ids))[0], output_logits=with_logits)
    assert output.loss is not None and (output.logits is not None) == with_logits
    logits = model(row, cu_seqlens=cu_seqlens, output_router_logits=False).logits
    output.loss.backward()
    return logits[0].detach(), output.loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def wrong_gradients(gradients: dict[str, Tensor], exact: dict[str, Tensor], bound: float) -> list[str]:
    """The parameters whose gradients are missing or outside of the bound."""
    assert gradients.keys() <= exact.keys()
    return [n for n, right in exact.items() if n not in gradients or not distance(gradients[n], right) <= bound]


@families
@dtypes
@pytest.mark.parametrize("lengths", ((9, 1, 0, 14, 5), (140, 9)), ids=("short", "three chunks"))
def test_packed_sequences_agree_with_the_oracle(name: str, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    """Short ones, and one in which the gated delta rule passes gradients of its state from chunk to chunk, twice."""
    model, ids = small_model(name, dtype, router_z_loss_coef=0.25), sequences(lengths)
    logits, loss, gradients = packed_results(model, ids)
    right_logits, right_loss, exact = exact_results(model, ids)
    of_logits, of_gradients = BOUNDS[dtype]
    assert distance(logits, right_logits) <= of_logits
    assert distance(loss, right_loss) <= of_logits
    assert exact.keys() == {key for key, _ in model.named_parameters()}
    assert wrong_gradients(gradients, exact, of_gradients) == []


@families
def test_rows_of_one_length_need_no_bounds(name: str) -> None:
    model = small_model(name, torch.float64)
    ids = sequences((11, 11))
    rows = model(torch.stack(ids)).logits
    packed = model(pack(ids)[0], cu_seqlens=pack(ids)[1]).logits
    assert distance(rows.flatten(0, 1), packed[0]) <= BOUNDS[torch.float64][0]


@families
def test_what_follows_in_the_row_changes_nothing(name: str) -> None:
    """Neither another sequence nor a later token: gradients of the loss of one sequence reach no other's embedding."""
    model = small_model(name, torch.float64)
    ids = [torch.arange(1, 9), torch.arange(20, 33)]
    row, cu_seqlens = pack(ids)
    logits = model(row, cu_seqlens=cu_seqlens).logits[0]
    logits[:5].square().sum().backward()
    touched = model.model.embed_tokens.weight.grad.abs().sum(1).nonzero().flatten().tolist()
    if not model.config.tie_word_embeddings:
        assert touched == ids[0][:5].tolist()
    changed = row.clone()
    changed[0, 5:] += 1
    with torch.no_grad():
        assert distance(model(changed, cu_seqlens=cu_seqlens).logits[0, :5], logits[:5]) <= ANOTHER_WAY


# --------------------------------------------------------------------- a gradient that is wrong is noticed

OPS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "embedding": ("adjoint.nn.embedding", "embedding", ("weight",)),
    "rms_norm": ("adjoint.nn.norm", "rms_norm", ("x", "weight", "residual")),
    "gated_rms_norm": ("adjoint.nn.norm", "gated_rms_norm", ("x", "gate", "weight")),
    "causal_conv1d": ("adjoint.nn.conv", "causal_conv1d", ("x", "weight")),
    "gate": ("adjoint.nn.gated_delta_net", "gate", ("a", "b", "A_log", "dt_bias")),
    "gated_delta_rule": ("adjoint.nn.gated_delta_net", "gated_delta_rule", ("q", "k", "v", "g", "beta")),
    "rotary": ("adjoint.nn.attention", "rotary", ("q", "k")),
    "sigmoid_gate": ("adjoint.nn.attention", "sigmoid_gate", ("x", "gate")),
    "swiglu": ("adjoint.nn.mlp", "swiglu", ("gate", "up")),
    "route": ("adjoint.ops.moe", "route", ("logits",)),
    "experts": ("adjoint.ops.moe", "experts", ("x", "gate_up", "down", "weights")),
    "load_balancing_loss": ("adjoint.ops.moe", "load_balancing_loss", ("logits",)),
    "linear_cross_entropy": ("adjoint.models.hybrid", "linear_cross_entropy", ("hidden", "weight")),
    "cross_entropy": ("adjoint.models.hybrid", "cross_entropy", ("logits",)),
    "z_loss": ("adjoint.ops.moe", "z_loss", ("logits",)),
}


def of_the_mixture(op: str = "") -> dict[str, Tensor]:
    """The gradients of the mixture. The loss is that of logits which are returned, if the op computes it."""
    model = small_model("qwen3_5_moe", torch.float64, router_z_loss_coef=0.25)
    return packed_results(model, sequences(), op == "cross_entropy")[2]


class Backwards(TorchDispatchMode):
    """The names of the library's operators that compute gradients, as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        if name.startswith("adjoint::") and "_backward" in name:
            self.names.add(name.removeprefix("adjoint::").removeprefix("moe_"))
        return function(*args, **(kwargs or {}))


def test_no_op_of_the_model_is_left_out() -> None:
    with Backwards() as backwards:
        of_the_mixture()
        of_the_mixture("cross_entropy")
    forms = r"(_3|_residual)?_backward(_kept)?"
    ops = {name: [op for op in OPS if re.fullmatch(op + forms, name)] for name in backwards.names}
    assert all(len(of_name) == 1 for of_name in ops.values()) and {op for (op,) in ops.values()} == OPS.keys()


class _Scaled(torch.autograd.Function):
    """The tensor itself, and its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def with_gradient_of(function: Callable[..., Any], argument: str, factor: float) -> Callable[..., Any]:
    """A function whose gradient to one argument is multiplied by a factor."""
    signature = inspect.signature(function)

    def changed(*arguments: Any, **keywords: Any) -> Any:
        bound = signature.bind(*arguments, **keywords)
        value = bound.arguments.get(argument)
        if isinstance(value, Tensor):
            bound.arguments[argument] = _Scaled.apply(value, factor)
        elif isinstance(value, list):
            bound.arguments[argument] = [_Scaled.apply(x, factor) for x in value]
        return function(*bound.args, **bound.kwargs)

    return changed


@pytest.fixture(scope="module")
def exact_of_the_mixture() -> dict[str, Tensor]:
    return exact_results(small_model("qwen3_5_moe", torch.float64, router_z_loss_coef=0.25), sequences())[2]


@pytest.mark.parametrize("factor", (0.0, -1.0), ids=("zeroed", "negated"))
@pytest.mark.parametrize(("op", "argument"), [(op, argument) for op in OPS for argument in OPS[op][2]])
def test_a_wrong_gradient_of_any_op_is_noticed(
    op: str, argument: str, factor: float, exact_of_the_mixture: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, attribute, _ = OPS[op]
    assert wrong_gradients(of_the_mixture(op), exact_of_the_mixture, EXACT_GRADIENTS) == []
    owner = __import__(module, fromlist=["_"])
    monkeypatch.setattr(owner, attribute, with_gradient_of(getattr(owner, attribute), argument, factor))
    assert wrong_gradients(of_the_mixture(op), exact_of_the_mixture, 1e-3), "no parameter's gradient shows it"


# ------------------------------------------------------------------------------------------ the rest


@families
def test_checkpointing_changes_no_bit(name: str) -> None:
    model = small_model(name)
    _, _, gradients = packed_results(model, sequences())
    plain = {key: gradient.clone() for key, gradient in gradients.items()}
    model.gradient_checkpointing_enable()
    _, _, gradients = packed_results(model.train(), sequences())
    assert all(torch.equal(gradients[key], plain[key]) for key in plain)


@families
def test_autocast_is_as_near_as_16_bits(name: str) -> None:
    """Parameters and the sums between layers stay float32, and matrices are multiplied in bfloat16."""
    model = small_model(name, initializer_range=0.15)
    ids, cu_seqlens = pack(sequences())
    plain = model(ids, cu_seqlens=cu_seqlens)
    rounded = small_model(name, torch.bfloat16, initializer_range=0.15)(ids, cu_seqlens=cu_seqlens)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(ids, cu_seqlens=cu_seqlens, labels=ids, output_logits=True)
    output.loss.backward()
    assert output.logits.dtype == torch.bfloat16
    assert distance(output.logits, plain.logits) <= MARGIN * distance(rounded.logits, plain.logits)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad)


@families
def test_autocast_to_another_16_bit_type(name: str) -> None:
    """Of a model in bfloat16 too: `torch.autocast("cuda")` alone casts to float16."""
    model = small_model(name, torch.bfloat16)
    ids, cu_seqlens = pack(sequences())
    plain = model(ids, cu_seqlens=cu_seqlens).logits
    with torch.no_grad():
        right = copy.deepcopy(model).double()(ids, cu_seqlens=cu_seqlens).logits
    with torch.autocast("cpu", torch.float16):
        output = model(ids, cu_seqlens=cu_seqlens, labels=ids, output_logits=True)
    output.loss.backward()
    assert output.logits.dtype == torch.float16
    assert distance(output.logits, right) <= MARGIN * distance(plain, right)
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters() if p.requires_grad)


@families
def test_a_model_on_the_meta_device_is_materialised(name: str) -> None:
    config = CONFIGS[name]
    model = HybridLM(config, device="meta", dtype=torch.float64)
    assert all(p.device.type == "meta" for p in model.parameters())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    model.reset_parameters()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == config.tie_word_embeddings
    assert all(p.isfinite().all() and p.dtype == torch.float64 for p in model.parameters())
    assert model(torch.ones(1, 3, dtype=torch.int64)).logits.isfinite().all()


def test_parameters_begin_as_transformers_draws_them() -> None:
    model = HybridLM(CONFIGS["qwen3_next"].replace(hidden_size=64, vocab_size=500, initializer_range=0.02))
    for name, parameter in model.named_parameters():
        if name.endswith("linear_attn.norm.weight") or name.endswith("dt_bias"):
            assert (parameter == 1).all(), name
        elif name.endswith("norm.weight"):
            assert (parameter == 0).all(), name
        elif name.endswith("A_log"):
            assert (parameter.exp() >= 0.0099).all() and (parameter.exp() <= 16.01).all()
        elif parameter.numel() > 1000:
            assert 0.018 < float(parameter.detach().std()) < 0.022, name
    assert (model.model.embed_tokens.weight[0] == 0).all(), "the row of padding"


def test_tied_weights_stay_tied() -> None:
    model = small_model("qwen3_5").to(torch.bfloat16).double()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize("assign", (False, True))
def test_a_state_dict_keeps_weights_tied(assign: bool) -> None:
    model = small_model("qwen3_5")
    other = HybridLM(model.config, device="meta" if assign else None)
    other.load_state_dict(model.state_dict(), assign=assign)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)


def test_labels_of_no_count_give_no_loss() -> None:
    model = small_model("qwen3_5")
    ids = torch.ones(1, 4, dtype=torch.int64)
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    assert loss is not None and float(loss.detach()) == 0.0
    loss.backward()
    assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


@families
def test_the_loss_with_logits_is_the_loss_without(name: str) -> None:
    """And that of a head which is no plain matrix, as with an adapter."""
    model, ids = small_model(name, torch.float64), torch.stack(sequences((9, 9)))
    losses = [model(ids, labels=ids).loss, model(ids, labels=ids, output_logits=True).loss]
    model.lm_head = nn.Sequential(model.lm_head)
    losses.append(model(ids, labels=ids).loss)
    assert all(distance(loss, losses[0]) <= SAME_LOSS for loss in losses)


@families
def test_hooks_and_a_bias_of_the_head_take_part_in_the_loss(name: str) -> None:
    model, ids, called = small_model(name, torch.float64), torch.stack(sequences((9, 9))), []
    plain = model(ids, labels=ids).loss
    handle = model.lm_head.register_forward_hook(lambda head, inputs, output: called.append(output.shape))
    assert distance(model(ids, labels=ids).loss, plain) <= SAME_LOSS and len(called) == 1
    handle.remove()
    biased = nn.Linear(model.config.hidden_size, model.config.vocab_size, dtype=torch.float64)
    biased.weight = model.lm_head.weight
    model.lm_head = biased
    loss = model(ids, labels=ids).loss
    assert distance(loss, model(ids, labels=ids, output_logits=True).loss) <= SAME_LOSS < distance(loss, plain)


def test_a_token_predicts_nothing_of_another_sequence() -> None:
    labels, bounds = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([0, 0, 2, 2, 5, 5])
    assert next_labels(labels, bounds).tolist() == [[2, -100, 4, 5, -100]]
    assert next_labels(labels, None).tolist() == [[2, 3, 4, 5, -100]]


@families
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_16_bits_are_as_near_to_float64_as_plain_torch(name: str, dtype: torch.dtype) -> None:
    """Plain torch in bfloat16, scaled to the dtype's last digit: in float16 its norms underflow."""
    model, ids = small_model(name, dtype, initializer_range=0.15), sequences()
    logits, _, gradients = packed_results(model, ids)
    right, _, _ = exact_results(model, ids)
    rounded = small_model(name, torch.bfloat16, initializer_range=0.15)
    plain = distance(exact_results(rounded, ids, torch.bfloat16)[0], exact_results(rounded, ids)[0])
    assert logits.dtype == dtype
    assert distance(logits, right) <= MARGIN * plain * torch.finfo(dtype).eps / torch.finfo(torch.bfloat16).eps
    assert all(gradient.isfinite().all() for gradient in gradients.values())


ONES = torch.ones(1, 3, dtype=torch.int64)

BAD = {
    "rank": (lambda m: m(torch.ones(3, dtype=torch.int64)), "input_ids must be"),
    "no tensor": (lambda m: m([[1, 2]]), "input_ids must be a tensor"),
    "bounds": (lambda m: m(torch.ones(2, 3, dtype=torch.int64), cu_seqlens=torch.tensor([0, 3])), "cu_seqlens"),
    "order": (lambda m: m(torch.ones(1, 3, dtype=torch.int64), cu_seqlens=torch.tensor([0, 2, 1, 3])), "cu_seqlens"),
    "no bounds": (lambda m: m(ONES, cu_seqlens=[0, 3]), "HybridLM: cu_seqlens must be a tensor, got list"),
    "dtype of bounds": (lambda m: m(ONES, cu_seqlens=torch.tensor([0.0, 3.0])), "cu_seqlens must be int32 or int64"),
    "bounds too short": (lambda m: m(ONES, cu_seqlens=torch.tensor([0, 2])), r"number of tokens, 3, got \[0, 2\]"),
    "bounds too long": (lambda m: m(ONES, cu_seqlens=torch.tensor([0, 4])), r"number of tokens, 3, got \[0, 4\]"),
    "bounds from 1": (lambda m: m(ONES, cu_seqlens=torch.tensor([1, 3])), "cu_seqlens must begin with 0"),
    "bounds of a cache": (
        lambda m: m(ONES, cu_seqlens=torch.tensor([0, 2]), cache=m.new_cache(1)),
        "HybridLM: cu_seqlens must begin with 0",
    ),
    "no labels": (lambda m: m(ONES, labels=[[1, 1, 1]]), "labels must be a tensor, got list"),
    "no cache": (lambda m: m(ONES, cache="x"), "cache must be one of this model, from new_cache; got str"),
    "slots of no cache": (lambda m: m(ONES, slots=[0]), "slots name sequences of a cache, and cache is None"),
    "slots of a tensor": (
        lambda m: m(ONES.expand(2, 3), cache=m.new_cache(2), slots=torch.tensor([1, 1])),
        "slots must be an integer",
    ),
    "fewer than no sequences": (lambda m: m.new_cache(-1), "sequences must be at least 0, got -1"),
    "labels": (lambda m: m(torch.ones(1, 3, dtype=torch.int64), labels=torch.ones(1, 2, dtype=torch.int64)), "labels"),
    "token": (lambda m: m(torch.full((1, 3), 61)), "61"),
    "a negative token": (lambda m: m(torch.full((1, 3), -1)), "got -1 at position 0"),
    "last of no tokens": (lambda m: m(ONES[:, :0], last_only=True), "last_only needs a token of each sequence"),
    "one slot": (lambda m: m(ONES, cache=m.new_cache(2), slots=1), "slots must be a list of them, got 1"),
    "fractions": (lambda m: pack([[1], [1.5, 2.0]]), "pack: sequences must be .* number 1 is of float32"),
    "fractions of a tensor": (lambda m: pack([torch.tensor([1.5])]), "number 0 is of float32"),
    "a text": (lambda m: pack(["ab"]), "pack: sequences must be .* number 0 is 'ab'"),
    "nothing to pack": (lambda m: pack(None), "pack: sequences must be lists of token ids, got NoneType"),
    "cache": (lambda m: m(torch.ones(1, 3, dtype=torch.int64), cache=small_model("qwen3_5").new_cache(1)), "another"),
    "batch": (lambda m: m(torch.ones(2, 3, dtype=torch.int64), cache=m.new_cache(1)), "holds 1 sequences"),
    "slots": (lambda m: m(torch.ones(1, 3, dtype=torch.int64), cache=m.new_cache(1), slots=[1]), "slots"),
    "twice": (lambda m: m(torch.ones(2, 3, dtype=torch.int64), cache=m.new_cache(2), slots=[1, 1]), "slots"),
}


@pytest.mark.parametrize("layers", ("mixed", "full"))
@pytest.mark.parametrize("case", BAD)
def test_bad_calls_are_named(case: str, layers: str) -> None:
    """Also by a model that has no layer whose operations check the bounds of sequences."""
    call, words = BAD[case]
    model = small_model("qwen3_5", **({"layer_types": ("full_attention",) * 4} if layers == "full" else {}))
    with torch.no_grad(), pytest.raises(adjoint.ArgumentError, match=words):
        call(model)


def test_a_frozen_model_with_checkpointing_fills_its_cache() -> None:
    model = small_model("qwen3_5").train().requires_grad_(False)
    model.gradient_checkpointing_enable()
    ids, cache = sequences((11,))[0][None], model.new_cache(1)
    pieces = [model(ids[:, begin:end], cache=cache).logits for begin, end in ((0, 4), (4, 5), (5, 11))]
    assert distance(torch.cat(pieces, 1), model(ids).logits) <= PACKED_LOGITS


def test_a_cache_has_no_gradient() -> None:
    model = small_model("qwen3_5")
    with pytest.raises(adjoint.ArgumentError, match="no_grad"):
        model(torch.ones(1, 3, dtype=torch.int64), cache=model.new_cache(1))


# ------------------------------------------------------------------------------------- configurations


def test_every_fourth_layer_is_full_attention_by_default() -> None:
    config = HybridConfig(model_type="qwen3_5_text", num_hidden_layers=8)
    assert [kind == "full_attention" for kind in config.layer_types] == [False, False, False, True] * 2


def test_a_configuration_survives_its_json() -> None:
    for config in CONFIGS.values():
        assert HybridConfig.from_dict(json.loads(json.dumps(config.to_dict()))).replace(intermediate_size=40) == config


def test_a_configuration_of_several_parts() -> None:
    text = CONFIGS["qwen3_5_moe"].to_dict()
    nested = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}, "tie_word_embeddings": True}
    assert HybridConfig.from_dict(nested).tie_word_embeddings
    del text["model_type"], text["layer_types"]
    text["full_attention_interval"] = 2
    config = HybridConfig.from_dict(nested)
    assert config.model_type == "qwen3_5_moe_text" and config.layer_types[1::2] == ("full_attention",) * 2
    old = {key: value for key, value in text.items() if key != "rope_parameters"}
    old |= {"model_type": "qwen3_next", "rope_theta": 5e6, "partial_rotary_factor": 0.25, "rope_scaling": None}
    assert HybridConfig.from_dict(old).rope_theta == 5e6 and HybridConfig.from_dict(old).rotary_size == 4
    both = old | {"rope_scaling": {"type": "mrope", "rope_theta": 7.0}, "rope_parameters": {"rope_theta": 9.0}}
    assert HybridConfig.from_dict(both).rope_theta == 7.0, "the one that transformers takes"


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "family": ({"model_type": "llama"}, adjoint.Unsupported, "llama"),
    "activation": ({"hidden_act": "gelu"}, adjoint.Unsupported, "gelu"),
    "dropout": ({"attention_dropout": 0.1}, adjoint.Unsupported, "attention_dropout"),
    "rope": ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, adjoint.Unsupported, "yarn"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, adjoint.Unsupported, "fp8"),
    "layers": ({"layer_types": ["linear_attention"]}, adjoint.ArgumentError, "layer_types"),
    "mixer": ({"layer_types": ["sliding_attention"] * 4}, adjoint.Unsupported, "sliding_attention"),
    "size": ({"hidden_size": 0}, adjoint.ArgumentError, "hidden_size"),
    "true size": ({"hidden_size": True}, adjoint.ArgumentError, "hidden_size must be a positive integer, got True"),
    "half a layer": ({"num_hidden_layers": 4.0}, adjoint.ArgumentError, "num_hidden_layers must be a positive integer"),
    "text layers": (
        {"num_hidden_layers": "4", "layer_types": None},
        adjoint.ArgumentError,
        "num_hidden_layers must be",
    ),
    "one layer": ({"layer_types": 5}, adjoint.ArgumentError, "layer_types must be a list, got 5"),
    "text of layers": ({"layer_types": "full"}, adjoint.ArgumentError, "layer_types must be a list, got 'full'"),
    "half an expert": ({"num_experts": 2.5}, adjoint.ArgumentError, "num_experts must be an integer from 0 on"),
    "text of a factor": (
        {"rope_parameters": {"partial_rotary_factor": "x"}},
        adjoint.ArgumentError,
        "must be a number",
    ),
    "list of rope": ({"rope_parameters": [1]}, adjoint.ArgumentError, r"rope_parameters must be an object, got \[1\]"),
    "no base": (
        {"rope_parameters": {"rope_theta": -1.0}},
        adjoint.ArgumentError,
        "rope_theta must be a number from 0 on",
    ),
    "text of a token": ({"eos_token_id": [1, "x"]}, adjoint.ArgumentError, "eos_token_id must be a token id"),
    "several paddings": ({"pad_token_id": [0]}, adjoint.ArgumentError, r"pad_token_id must be a token id, got \(0,\)"),
    "eps": ({"rms_norm_eps": 0}, adjoint.ArgumentError, "rms_norm_eps must be positive, got 0"),
    "text of a dropout": ({"attention_dropout": "x"}, adjoint.Unsupported, "attention_dropout must be 0, got x"),
    "interval": (
        {"layer_types": None, "full_attention_interval": 1.5},
        adjoint.ArgumentError,
        "full_attention_interval must be an integer, got 1.5",
    ),
    "text of a truth": ({"tie_word_embeddings": "false"}, adjoint.ArgumentError, "must be true or false, got 'false'"),
    "no factor": (
        {"rope_parameters": {"partial_rotary_factor": float("nan")}},
        adjoint.ArgumentError,
        "partial_rotary_factor must be a number from 0 on, got nan",
    ),
    "negative deviation": ({"initializer_range": -1.0}, adjoint.ArgumentError, "initializer_range must be a number"),
    "text of a layer": ({"mlp_only_layers": ["1"]}, adjoint.ArgumentError, "must be numbers of layers, got '1'"),
    "older rope beside rope": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        adjoint.Unsupported,
        "rope_type must be 'default', got 'yarn'",
    ),
    "heads": (
        {"num_attention_heads": 3},
        adjoint.ArgumentError,
        "num_attention_heads must be a multiple of num_key_value_heads, 2, got 3",
    ),
    "linear heads": (
        {"linear_num_value_heads": 3},
        adjoint.ArgumentError,
        "linear_num_value_heads must be a multiple of linear_num_key_heads, 2, got 3",
    ),
    "more experts than there are": (
        {"model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 5},
        adjoint.ArgumentError,
        "num_experts_per_tok must be at most num_experts, 4, got 5",
    ),
    "experts": ({"num_experts": 4}, adjoint.ArgumentError, "num_experts"),
    "rotary": ({"head_dim": 2}, adjoint.ArgumentError, "partial_rotary_factor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_here_is_named(case: str) -> None:
    changes, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        HybridConfig.from_dict(CONFIGS["qwen3_5"].to_dict() | changes)


def test_sizes_of_the_small_models_differ() -> None:
    """So that exchanged axes are noticed."""
    assert len({SIZES[key] for key in ("hidden_size", "linear_key_head_dim", "linear_value_head_dim", "head_dim")}) == 4
