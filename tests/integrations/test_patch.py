"""`patch` on models of transformers: results beside their own and beside float64, packed, padded, decoded, adapted."""

import copy
import inspect
import io
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adjoint
from adjoint.integrations.transformers import forwards, patch, unpatch
from adjoint.ops import moe
from tests.models import oracle
from tests.models.small import CONFIGS, GRADIENTS, LOGITS, distance, small_model
from tests.models.test_hybrid import with_gradient_of, wrong_gradients
from tests.stated import stated

FOLDERS = {"qwen3_next": "qwen3_next", "qwen3_5": "qwen3_5", "qwen3_5_moe": "qwen3_5_moe"}

MARGIN = 2.0
"""How much of the error that the model's own path has, against float64, ours may have."""

ROUNDINGS = 2e-5
"""An error of a few roundings of float32, which one parameter's gradient has more of and another less, by chance."""

A_FEW_ROUNDINGS = 5 * 2.0**-8
"""The same, of bfloat16."""

families = pytest.mark.parametrize("name", CONFIGS)


@pytest.fixture(autouse=True)
def _version() -> None:
    transformers = pytest.importorskip("transformers")
    if not (5, 17) <= tuple(map(int, transformers.__version__.split(".")[:2])) <= (5, 22):
        pytest.skip("needs transformers 5.17 to 5.22")


def their_model(name: str, config: Any = None) -> Any:
    """A small model of transformers, with the parameters of ours."""
    ours = small_model(name)
    modeling = import_module(f"transformers.models.{FOLDERS[name]}.modeling_{FOLDERS[name]}")
    kind = getattr(modeling, ours.config.to_dict()["architectures"][0])
    model = kind(kind.config_class(**ours.config.to_dict()) if config is None else config)
    model.load_state_dict(ours.state_dict())
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("eager")
    return model


def patched(name: str) -> Any:
    model = their_model(name)
    patch(model, verbose=False)
    return model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, 61, (2, 40), generator=torch.Generator().manual_seed(1))


def results(model: Any, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    output = model(labels=inputs["input_ids"], use_cache=False, **inputs)
    output.loss.backward()
    return output.logits.detach(), {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


def exact_results(name: str, sequences: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model = small_model(name)
    weights = {key: p.detach().double().requires_grad_() for key, p in model.named_parameters()}
    loss, logits = oracle.loss_of(sequences, sequences, weights, model.config)
    loss.backward()
    return logits, {key: weight.grad for key, weight in weights.items() if weight.grad is not None}


@families
def test_logits_and_gradients(name: str, ids: Tensor) -> None:
    theirs, their_gradients = results(their_model(name), input_ids=ids)
    ours, gradients = results(patched(name), input_ids=ids)
    right, exact = exact_results(name, list(ids))
    assert not torch.equal(ours, theirs), "nothing was replaced"
    assert distance(ours.flatten(0, 1), right) <= MARGIN * distance(theirs.flatten(0, 1), right)
    assert gradients.keys() == exact.keys()
    for key, gradient in exact.items():
        bound = MARGIN * distance(their_gradients[key], gradient) + ROUNDINGS
        assert distance(gradients[key], gradient) <= bound, key


REPLACED: dict[str, tuple[str, ...]] = {
    "embedding": ("weight",),
    "rms_norm": ("x", "weight"),
    "gated_rms_norm": ("x", "gate", "weight"),
    "causal_conv1d": ("x", "weight"),
    "gate": ("a", "b", "A_log", "dt_bias"),
    "gated_delta_rule": ("q", "k", "v", "g", "beta"),
    "rotary": ("q", "k"),
    "sigmoid_gate": ("x", "gate"),
    "swiglu": ("gate", "up"),
    "route": ("logits",),
    "experts": ("x", "gate_up", "down", "weights"),
}
"""The operations of patched forwards, and their inputs that have gradients."""


@pytest.fixture(scope="module")
def gradients_of_the_mixture() -> dict[str, Tensor]:
    row = torch.randint(1, 61, (1, 24), generator=torch.Generator().manual_seed(2))
    return exact_results("qwen3_5_moe", list(row))[1]


@pytest.mark.parametrize("factor", (0.0, -1.0), ids=("zeroed", "negated"))
@pytest.mark.parametrize(("op", "argument"), [(op, argument) for op, names in REPLACED.items() for argument in names])
def test_a_wrong_gradient_of_any_op_is_noticed(
    op: str,
    argument: str,
    factor: float,
    gradients_of_the_mixture: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = torch.randint(1, 61, (1, 24), generator=torch.Generator().manual_seed(2))
    owner: Any = moe if op in ("route", "experts") else forwards
    changed = with_gradient_of(getattr(owner, op), argument, factor)
    monkeypatch.setattr(owner, op, changed)
    gradients = results(patched("qwen3_5_moe"), input_ids=row)[1]
    monkeypatch.undo()
    wrong = wrong_gradients(gradients, gradients_of_the_mixture, 100 * GRADIENTS)
    assert wrong, "no parameter's gradient shows it"
    if (op, argument, factor) == ("embedding", "weight", 0.0):
        right = results(patched("qwen3_5_moe"), input_ids=row)[1]
        assert wrong_gradients(right, gradients_of_the_mixture, GRADIENTS) == [], "without it nothing is wrong"


@families
def test_the_report_names_what_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = their_model(name)
    report = patch(model)
    assert capsys.readouterr().out == f"{report}\n"
    replaced = {line.module: line.count for line in report.replacements if not line.reason}
    family = type(model).__name__.removesuffix("ForCausalLM")
    assert replaced[f"{family}GatedDeltaNet"] == 3 and replaced[f"{family}Attention"] == 1
    assert replaced[f"{family}RMSNorm"] == 4 * 2 + 2 + 1 and replaced[f"{family}RMSNormGated"] == 3
    sparse = sum(map(CONFIGS[name].is_sparse, range(4)))
    assert replaced.get(f"{family}Experts", 0) == replaced.get(f"{family}TopKRouter", 0) == sparse
    assert replaced[f"{family}MLP"] == 4 and all(not line.reason for line in report.replacements)


def test_what_is_no_model_is_named() -> None:
    with pytest.raises(adjoint.ArgumentError, match="model must be a model of transformers, got NoneType"):
        patch(None)  # type: ignore[arg-type]
    for option in ("loss", "verbose"):
        with pytest.raises(adjoint.ArgumentError, match=f"patch: {option} must be True or False, got 'no'"):
            patch(nn.Linear(2, 2), **{option: "no"})


@families
def test_unpatch_puts_back_every_bit(name: str, ids: Tensor) -> None:
    model = their_model(name)
    before = results(model, input_ids=ids)
    patch(model, verbose=False)
    with pytest.raises(adjoint.ArgumentError, match="patched already"):
        patch(model)
    unpatch(model)
    after = results(model, input_ids=ids)
    assert torch.equal(before[0], after[0]) and all(torch.equal(before[1][key], after[1][key]) for key in before[1])
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(adjoint.ArgumentError, match="is not patched"):
        unpatch(model)


@families
def test_a_copy_of_a_patched_model_stands_alone(name: str, ids: Tensor) -> None:
    model = patched(name)
    mine = results(model, input_ids=ids)[0]
    copied = copy.deepcopy(model)
    assert torch.equal(results(copied, input_ids=ids)[0], mine)
    unpatch(copied)
    assert not any("forward" in vars(module) or module._forward_pre_hooks for module in copied.modules())
    assert torch.equal(results(copied, input_ids=ids)[0], results(their_model(name), input_ids=ids)[0])
    assert torch.equal(results(model, input_ids=ids)[0], mine), "the other stays patched"
    unpatch(model)
    assert torch.equal(results(model, input_ids=ids)[0], results(copied, input_ids=ids)[0])


@families
def test_another_model_of_the_same_configuration_is_untouched(name: str, ids: Tensor) -> None:
    first = their_model(name)
    other = their_model(name, first.config)
    before = results(other, input_ids=ids)[0]
    patch(first, verbose=False)
    assert torch.equal(results(other, input_ids=ids)[0], before)


@families
@pytest.mark.parametrize("loss", (False, True))
def test_a_pickled_model_is_patched_and_can_be_unpatched(name: str, loss: bool, ids: Tensor) -> None:
    model = their_model(name).eval()
    patch(model, loss=loss, verbose=False)
    written = io.BytesIO()
    torch.save(model, written)  # before transformers, to record router logits, puts hooks on that no pickle takes
    written.seek(0)
    read = torch.load(written, weights_only=False)
    assert torch.equal(results(read, input_ids=ids)[0], results(model, input_ids=ids)[0])
    unpatch(read)
    assert torch.equal(results(read, input_ids=ids)[0], results(their_model(name), input_ids=ids)[0])


@families
def test_a_model_is_patched_once_whatever_holds_it(name: str, ids: Tensor) -> None:
    model = their_model(name)
    before = results(model, input_ids=ids)[0]
    holder = nn.Sequential(model)
    for patched_by, unpatched_by in ((holder, model), (model, holder)):
        patch(patched_by, verbose=False)
        for again in (model, holder, model.model):
            with pytest.raises(adjoint.ArgumentError, match="patched already"):
                patch(again)
        unpatch(unpatched_by)
        for again in (model, holder):
            with pytest.raises(adjoint.ArgumentError, match="is not patched"):
                unpatch(again)
        assert torch.equal(results(model, input_ids=ids)[0], before)


def test_a_model_with_adapters_is_unpatched_by_either_name(ids: Tensor) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "out_proj"])
    model = their_model("qwen3_5")
    patch(model, verbose=False)
    unpatch(peft.get_peft_model(model, settings))
    wrapped = peft.get_peft_model(their_model("qwen3_5"), settings)
    patch(wrapped, verbose=False)
    merged = wrapped.merge_and_unload()
    unpatch(merged)
    for left in (model, merged):
        assert not any("forward" in vars(module) or module._forward_pre_hooks for module in left.modules())
    with torch.no_grad():
        assert torch.equal(merged(ids).logits, their_model("qwen3_5")(ids).logits)


@families
def test_a_copy_that_adapters_train_is_unpatched(name: str, ids: Tensor) -> None:
    """PEFT copies what it is to save, from under a patched model: the copy is what is left of it."""
    peft = pytest.importorskip("peft")
    model = patched(name)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "norm"])
    merged = peft.get_peft_model(model, settings).merge_and_unload()
    unpatch(merged)
    assert not any("forward" in vars(module) or module._forward_pre_hooks for module in merged.modules())
    with torch.no_grad():
        assert torch.equal(merged(ids).logits, their_model(name)(ids).logits)


@families
@pytest.mark.parametrize("beams", (1, 3))
def test_generation(name: str, beams: int, ids: Tensor) -> None:
    """Prefill and decoding with transformers' cache, of rows padded on the left, greedy and by beams."""
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    model = their_model(name).eval().double()
    model.config.output_router_logits = False  # the auxiliary loss does not take a mask of tokens that are cached
    theirs = model.generate(ids, **options)
    patch(model, verbose=False)
    assert torch.equal(model.generate(ids, **options), theirs)


@families
def test_decoding_in_pieces_is_the_whole_forward(name: str, ids: Tensor) -> None:
    model = patched(name).eval()
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        first = model(input_ids=ids[:, :5], use_cache=True)
        pieces, cache = [first.logits], first.past_key_values
        for begin, end in ((5, 6), (6, 9), (9, 30), (30, 40)):
            pieces.append(model(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True).logits)
    assert distance(torch.cat(pieces, 1), whole) <= 2 * LOGITS


@families
def test_checkpointing_and_autocast(name: str, ids: Tensor) -> None:
    model = patched(name).train()
    plain = results(model, input_ids=ids)
    model.gradient_checkpointing_enable()
    again = results(model, input_ids=ids)
    assert all(torch.equal(plain[1][key], gradient) for key, gradient in again[1].items())
    with torch.autocast("cpu", torch.bfloat16):
        lower = results(model, input_ids=ids)
    assert distance(lower[0], plain[0]) <= 0.3 and all(g.isfinite().all() for g in lower[1].values())


@families
@pytest.mark.parametrize("loss", (False, True))
@pytest.mark.parametrize(("own", "cast"), ((torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)))
def test_autocast_to_another_16_bit_type(
    name: str, loss: bool, own: torch.dtype, cast: torch.dtype, ids: Tensor
) -> None:
    model = their_model(name).train()
    expected = model(input_ids=ids, labels=ids).loss
    patch(model.to(own), loss=loss, verbose=False)
    with torch.autocast("cpu", cast):
        output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    assert distance(output.loss, expected) <= A_FEW_ROUNDINGS
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@families
@pytest.mark.parametrize("count", (None, 50))
def test_the_loss_without_logits(name: str, count: int | None, ids: Tensor) -> None:
    labels = ids.clone()
    labels[0, 3:9] = -100
    inputs: dict[str, Any] = {"input_ids": ids, "labels": labels, "use_cache": False}
    if count is not None:
        inputs["num_items_in_batch"] = torch.tensor(count)
    theirs, ours = their_model(name).train(), their_model(name).train()
    report = patch(ours, loss=True, verbose=False)
    assert any(line.operations == "linear_cross_entropy" and line.count == 1 for line in report.replacements)
    expected, output = theirs(**inputs), ours(**inputs)
    assert output.logits is None and distance(output.loss, expected.loss) <= 2 * LOGITS
    expected.loss.backward()
    output.loss.backward()
    for (key, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert distance(mine.grad, other.grad) <= 2 * GRADIENTS, key
    assert ours.eval()(**inputs).logits is not None, "an evaluation needs them"
    unpatch(ours)
    assert ours.train()(**inputs).logits is not None


@families
def test_a_model_takes_the_same_arguments(name: str, ids: Tensor) -> None:
    """Transformers and its Trainer look at their names, and they may come without."""
    theirs, ours = their_model(name).train(), their_model(name).train()
    patch(ours, loss=True, verbose=False)
    expected, names = (list(inspect.signature(model.forward).parameters) for model in (theirs, ours))
    assert names == expected and ours._supports_logits_to_keep()
    loss = theirs(ids, None, None, None, None, ids).loss
    assert distance(ours(ids, None, None, None, None, ids).loss, loss) <= 2 * LOGITS
    with pytest.raises(TypeError, match="multiple values"):
        ours(ids, input_ids=ids, labels=ids)
    some = torch.tensor([3, 8])
    with torch.no_grad():
        assert distance(ours(ids, logits_to_keep=some).logits, theirs(ids, logits_to_keep=some).logits) <= 2 * LOGITS


def test_a_loss_that_is_not_replaced_is_named() -> None:
    modeling: Any = import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    config = modeling.Qwen3NextForSequenceClassification.config_class(**CONFIGS["qwen3_next"].to_dict())
    model = modeling.Qwen3NextForSequenceClassification(config)
    left = {line.module: line.reason for line in patch(model, loss=True, verbose=False).replacements if line.reason}
    assert left == {"Qwen3NextForSequenceClassification": "loss=True is for causal models, and this has another loss"}
    unpatch(model)
    assert all(not line.reason for line in patch(model, verbose=False).replacements)


def test_the_auxiliary_loss_is_kept(ids: Tensor) -> None:
    theirs, ours = their_model("qwen3_5_moe"), patched("qwen3_5_moe")
    inputs = {"input_ids": ids, "labels": ids, "output_router_logits": True}
    expected, output = theirs(**inputs), ours(**inputs)
    assert len(output.router_logits) == 4
    assert (
        distance(output.aux_loss, expected.aux_loss) <= 2 * LOGITS
        and distance(output.loss, expected.loss) <= 2 * LOGITS
    )


ADAPTED = stated("models", "| gradients of adapters, float64 |")
ADAPTED_BESIDE_ROUTERS = stated("models", "| gradients of adapters beside routers, float64 |")
"""How far gradients of adapters in float64 may be from the oracle's, of their norm. Adapters of random numbers multiply
roundings by up to ten thousand, which makes float32 no measure of them."""


def exact_adapters(name: str, ids: Tensor, adapters: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The oracle's gradients of adapters, by name: matrices A and B beside a weight are B·A·scale on top of it."""
    model = small_model(name)
    weights = {key: p.detach().double() for key, p in model.named_parameters()}
    leaves = {key: adapter.detach().double().requires_grad_() for key, adapter in adapters.items()}
    for key, down in leaves.items():
        if ".lora_A." in key:
            own = key.removeprefix("base_model.model.").replace(".lora_A.default", "")
            weights[own] = weights[own] + scale * leaves[key.replace(".lora_A.", ".lora_B.")] @ down
    oracle.loss_of(list(ids), list(ids), weights, model.config)[0].backward()
    return {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}


@families
@pytest.mark.parametrize("patch_first", [True, False])
def test_adapters(name: str, patch_first: bool, ids: Tensor) -> None:
    """LoRA on the projections, put on after the patch and before it: the gradients are those of the exact weights."""
    peft = pytest.importorskip("peft")
    model = their_model(name).double()
    targets = [
        key
        for key, module in model.named_modules()
        if isinstance(module, nn.Linear) and "lm_head" not in key and "shared_expert_gate" not in key
        if name != "qwen3_next" or "mlp" not in key  # there PEFT adapts all experts with one of these
    ]
    settings = peft.LoraConfig(r=2, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    if patch_first:
        patch(model, loss=True, verbose=False)
    torch.manual_seed(7)
    wrapped = peft.get_peft_model(model, settings).double()
    if not patch_first:
        patch(wrapped, loss=True, verbose=False)
    output = wrapped(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    adapters = {key: p for key, p in wrapped.named_parameters() if "lora" in key}
    exact = exact_adapters(name, ids, adapters, scale=4.0)
    assert exact.keys() == {key for key, p in wrapped.named_parameters() if p.grad is not None}
    bound = ADAPTED_BESIDE_ROUTERS if hasattr(model.config, "num_experts") else ADAPTED
    for key, gradient in exact.items():
        assert distance(adapters[key].grad, gradient) <= bound, key


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_adapters_beside_those_of_the_model(name: str, ids: Tensor) -> None:
    """LoRA by the names of projections, which PEFT takes for experts' as well: gradients as without a patch.

    Small ones: with large random ones the model is another, whose gradients have not the conditioning of this one's.
    """
    peft = pytest.importorskip("peft")
    targets = [
        key.rpartition(".")[2]
        for key, module in their_model(name).named_modules()
        if isinstance(module, nn.Linear) and "lm_head" not in key and "shared_expert_gate" not in key
    ]
    settings = peft.LoraConfig(r=2, lora_alpha=1, target_modules=sorted(set(targets)), init_lora_weights=False)

    def gradients(patch_first: bool | None) -> dict[str, Tensor]:
        model = their_model(name)
        if patch_first:
            patch(model, verbose=False)
        torch.manual_seed(7)
        wrapped = peft.get_peft_model(model, settings)
        if patch_first is False:
            patch(wrapped, verbose=False)
        return results(wrapped, input_ids=ids)[1]

    theirs = gradients(None)
    for patch_first in (True, False):
        ours = gradients(patch_first)
        assert ours.keys() == theirs.keys() and all("lora" in key for key in ours)
        assert all(distance(ours[key], theirs[key]) <= 2 * GRADIENTS for key in theirs)


def test_a_hook_on_the_last_matrix_runs_in_training(ids: Tensor) -> None:
    model, called = their_model("qwen3_5"), []
    patch(model, loss=True, verbose=False)
    model.lm_head.register_forward_hook(lambda *_: called.append("lm_head"))
    loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
    assert called == ["lm_head"]
    assert distance(loss, their_model("qwen3_5")(input_ids=ids, labels=ids, use_cache=False).loss) <= 2 * LOGITS


@pytest.mark.parametrize("loss", (False, True))
def test_a_trainer_trains_it(loss: bool, ids: Tensor, tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    transformers: Any = import_module("transformers")

    def losses(model: Any) -> list[float]:
        settings = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True,
            save_strategy="no", learning_rate=1e-3, disable_tqdm=True, gradient_checkpointing=True, optim="sgd",
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in ids.repeat(3, 1)]
        trainer = transformers.Trainer(model, settings, train_dataset=rows)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    model = their_model("qwen3_5")
    patch(model, loss=loss, verbose=False)
    theirs, ours = losses(their_model("qwen3_5")), losses(model)
    # Steps of SGD lower the loss by as much as gradients say, and no loss by more than itself.
    assert len(ours) == 3 and ours[2] < ours[0]
    assert all(abs(a - b) <= 2 * (LOGITS + GRADIENTS) * b for a, b in zip(ours, theirs, strict=True))


def test_accelerate_wraps_and_unwraps_it(ids: Tensor) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = their_model("qwen3_5").train()
    patch(model, loss=True, verbose=False)
    plain = model(ids, labels=ids, use_cache=False)
    reset = partial(accelerate.state.AcceleratorState._reset_state, reset_partial_state=True)  # the process has one
    reset()
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare_model(model)
    lower = prepared(ids, labels=ids, use_cache=False)
    assert lower.logits is None and 0 < distance(lower.loss, plain.loss) <= 0.3
    left = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    reset()
    again = left(ids, labels=ids, use_cache=False)
    assert again.logits is None and torch.equal(again.loss, plain.loss)
    unpatch(left)
    assert left(ids, labels=ids, use_cache=False).logits is not None


# ------------------------------------------------------------------------------------------- refusals


@pytest.fixture
def other_version(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers, "__version__", "5.99.0")
    yield transformers


def test_an_unknown_version_is_named(other_version: ModuleType) -> None:
    with pytest.raises(adjoint.Unsupported, match=r"5\.17 to 5\.22, this is 5\.99\.0"):
        patch(nn.Linear(2, 2))


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(adjoint.ArgumentError, match="Linear has no module of the families it knows: Qwen3Next"):
        patch(nn.Linear(2, 2))


def test_what_cannot_be_replaced_is_named(ids: Tensor) -> None:
    model = their_model("qwen3_5")
    model.model.layers[0].mlp.act_fn = nn.GELU()
    norm = model.model.norm
    norm.forward = norm.forward
    report = patch(model, verbose=False)
    left = {line.module: line.reason for line in report.replacements if line.reason}
    assert "GELU" in left["Qwen3_5MLP"] and left["Qwen3_5RMSNorm"] == "its forward is replaced already"
    assert "GELU" in str(report) and "as before" in str(report)
    unpatch(model)
    assert "forward" in vars(norm), "what was there before stays"
