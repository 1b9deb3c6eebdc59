"""The audit: it finds a broken kernel, a planted NaN and inputs outside the domain, names them, and changes nothing."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import adjoint
from adjoint.cli import app
from adjoint.core.op.observation import watch
from adjoint.core.plan import Plan
from adjoint.models import HybridLM, pack
from adjoint.verify.audit import sample
from adjoint.verify.audit.checkpoint import TEXT
from tests.models.small import CONFIGS, small_model
from tests.without_fla import import_models


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, 61, (2, 40), generator=torch.Generator().manual_seed(1))


def _break(monkeypatch: pytest.MonkeyPatch, operator: str, dtype: torch.dtype = torch.float32) -> None:
    """The plans of an operator come out one part in a thousand too large, in one dtype."""
    execute = Plan.execute

    def wrong(self: Plan, *arguments: Any, **keywords: Any) -> tuple[Tensor, ...]:
        results = execute(self, *arguments, **keywords)
        if self.operator.name == operator and self.problem.dtypes[0] == dtype:
            return tuple(x * 1.001 if x.is_floating_point() else x for x in results)
        return results

    monkeypatch.setattr(Plan, "execute", wrong)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_sound_model_is_within_every_bound(name: str, ids: Tensor) -> None:
    model = small_model(name)
    report = adjoint.audit(model, {"input_ids": ids, "labels": ids})
    assert report.is_sound, str(report)
    assert all(entry.measured is not None for entry in report.entries)
    seen = {(entry.op, entry.direction) for entry in report.entries}
    for op in ("embedding", "rms_norm", "gated_delta_rule", "causal_conv1d", "gate", "rotary", "gated_rms_norm"):
        assert {(op, "forward"), (op, "backward")} <= seen
    layers = {entry.layer for entry in report.entries if entry.op == "gated_delta_rule"}
    assert "model.layers.0.linear_attn" in layers and len(layers) > 1
    assert watch.observer is None and all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("operator", "op", "direction"),
    [
        ("rms_norm", "rms_norm", "forward"),
        ("swiglu_backward", "swiglu", "backward"),
        ("gated_delta_rule", "gated_delta_rule", "forward"),
        ("gated_delta_rule_backward", "gated_delta_rule", "backward"),
    ],
)
def test_a_broken_kernel_is_found_and_named(
    operator: str, op: str, direction: str, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("qwen3_5")
    _break(monkeypatch, operator)
    report = adjoint.audit(model, {"input_ids": ids, "labels": ids})
    assert report.broken and {(entry.op, entry.direction) for entry in report.broken} == {(op, direction)}
    worst = report.worst[0]
    assert worst.is_broken and (worst.op, worst.direction) == (op, direction) and worst.layer.startswith("model.")
    assert f"{worst.layer}: {op}, {direction}" in str(report) and not report.is_sound


def test_a_nan_in_one_layer_is_found_and_named(ids: Tensor) -> None:
    model = small_model("qwen3_5")
    with torch.no_grad():
        model.get_parameter("model.layers.2.mlp.up_proj.weight")[3, 5] = torch.nan
    report = adjoint.audit(model, {"input_ids": ids, "labels": ids})
    first = report.suspect[0]
    assert (first.layer, first.op, first.direction) == ("model.layers.2.mlp", "swiglu", "forward")
    assert "up is not finite" in first.remarks[0] and "first at [0, 0, 3]" in first.remarks[0]
    assert report.worst[0] is first and not report.is_sound
    (words,) = report.parameters
    assert words.startswith("model.layers.2.mlp.up_proj.weight is not finite in 1 of")
    after = str(report).partition("\nmodel.norm\n")[2].splitlines()
    norm = [line.split() for line in after if line.startswith("  rms_norm ")]
    expected = [["rms_norm", direction, "not", "finite"] for direction in ("forward", "backward")]
    assert norm == expected, "NaN beside NaN is no exact result"


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight"])
def test_a_nan_in_a_parameter_breaks_no_promise(name: str, ids: Tensor) -> None:
    """Where NaN comes in nothing is promised, and what does not depend on it is as right as it was."""
    model = small_model("qwen3_5")
    with torch.no_grad():
        model.get_parameter(f"model.layers.1.linear_attn.{name}").view(-1)[1] = torch.nan
    report = adjoint.audit(model, {"input_ids": ids, "labels": ids})
    assert not report.broken and not report.is_sound
    assert report.suspect[0].layer.startswith(("model.layers.1", "model.layers.2.input")), report.suspect[0]


class _Rule(nn.Module):
    """The rule on keys and gates as they are stored, with no care taken."""

    def __init__(self, length: float, decay: float, strength: float) -> None:
        super().__init__()
        k = nn.functional.normalize(torch.randn(1, 6, 1, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
        self.k = nn.Parameter(k * length)
        self.g, self.beta = torch.full((1, 6, 2), decay), torch.full((1, 6, 2), strength)

    def forward(self, v: Tensor) -> Tensor:
        return adjoint.gated_delta_rule(self.k, self.k, v, self.g, self.beta)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1.0, -0.1, 0.5), ""),
        ((1.0, -torch.inf, 0.5), ""),
        ((1.5, -0.1, 0.5), "6 of 6 keys are longer than 1, up to 1.5: pass normalize_qk=True"),
        ((1.0, -0.1, 1.5), "beta is outside [0, 1] in 12 of 12 places"),
        ((1.0, torch.nan, 0.5), "g is not finite in 12 of 12 places, first at [0, 0, 0]"),
    ],
)
def test_inputs_outside_the_domain_are_named(arguments: tuple[float, float, float], words: str) -> None:
    v = torch.randn(1, 6, 2, 3, generator=torch.Generator().manual_seed(1))
    report = adjoint.audit(_Rule(*arguments), v)
    remarks = {remark for entry in report.entries if entry.direction == "forward" for remark in entry.remarks}
    assert remarks >= {words} if words else not remarks, remarks


def test_a_bfloat16_model_and_packed_sequences() -> None:
    model = small_model("qwen3_next").bfloat16()
    input_ids, cu_seqlens = pack([[1, 2, 3, 4, 5], [6, 7, 8]])
    report = adjoint.audit(model, {"input_ids": input_ids, "cu_seqlens": cu_seqlens, "labels": input_ids})
    assert report.is_sound, str(report)


def test_a_patched_model_of_transformers(ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.integrations import test_patch

    transformers = pytest.importorskip("transformers")
    import_models()
    if not (5, 17) <= tuple(map(int, transformers.__version__.split(".")[:2])) <= (5, 22):
        pytest.skip("needs transformers 5.17 to 5.22")
    model = test_patch.patched("qwen3_5")
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    report = adjoint.audit(model, batch)
    assert report.is_sound and report.has_backward, str(report)
    rule = [entry for entry in report.entries if entry.op == "gated_delta_rule"]
    assert {entry.layer for entry in rule} >= {"model.layers.0.linear_attn"}
    _break(monkeypatch, "gated_delta_rule")
    assert {entry.op for entry in adjoint.audit(model, batch).broken} == {"gated_delta_rule"}


def test_a_plain_module_a_frozen_one_and_one_without_ops() -> None:
    norm = adjoint.nn.RMSNorm(8)
    assert adjoint.audit(norm, torch.randn(4, 8)).has_backward
    frozen = adjoint.audit(norm.requires_grad_(False), torch.randn(4, 8))
    assert not frozen.has_backward and "No gradient was seen" in str(frozen)
    plain = adjoint.audit(nn.Linear(8, 8), torch.randn(4, 8))
    assert not plain.entries and not plain.is_sound and "called no op of adjoint" in str(plain)
    assert "patch(model)" in plain.summary and "Nothing was compared" in plain.as_page()
    with pytest.raises(adjoint.ArgumentError, match=r"torch\.nn\.Module"):
        adjoint.audit(adjoint.silu, torch.randn(4))  # type: ignore[arg-type]


def test_an_exception_of_the_model_leaves_no_observer() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            adjoint.silu(x)
            raise ValueError("on purpose")

    model = Fails()
    with pytest.raises(ValueError, match="on purpose"):
        adjoint.audit(model, torch.randn(4))
    assert watch.observer is None and not model._forward_hooks


def test_gradients_of_inputs_that_the_backward_overwrites() -> None:
    class Reuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return adjoint.silu(x * self.scale, reuse_inputs=True)

    report = adjoint.audit(Reuses(), torch.randn(5, 6))
    assert report.is_sound and {entry.output for entry in report.entries} == {"y", "dx"}


def test_batches_are_cut_down_to_whole_items() -> None:
    ids = torch.arange(80).view(8, 10)
    assert sample({"input_ids": ids, "labels": ids, "use_cache": False}, 25)["labels"].tolist() == ids[[0, 7]].tolist()
    assert sample(ids, 5).shape == (1, 10) and sample(ids, 80) is ids
    x, y = sample((torch.randn(6, 4), torch.randn(6)), 3)
    assert x.shape == (3, 4) and y.shape == (3,)
    input_ids, cu_seqlens = pack([[1, 2, 3], [4, 5], [6, 7, 8]])
    cut = sample({"input_ids": input_ids, "cu_seqlens": cu_seqlens}, 6)
    assert cut["input_ids"].tolist() == [[1, 2, 3, 6, 7, 8]] and cut["cu_seqlens"].tolist() == [0, 3, 6]
    assert cut["cu_seqlens"].dtype == cu_seqlens.dtype
    input_ids, cu_seqlens = pack([[number] * (1 + number % 3) for number in range(60)])
    cut = sample({"input_ids": input_ids, "labels": input_ids, "cu_seqlens": cu_seqlens}, 30)
    whole = [row.tolist() for row in cut["labels"][0].split(cut["cu_seqlens"].diff().tolist())]
    assert all(row == [row[0]] * (1 + row[0] % 3) for row in whole) and 25 <= cut["labels"].numel() <= 30
    firsts = [row[0] for row in whole]
    assert firsts[0] < 10 and firsts[-1] >= 50 and max(b - a for a, b in itertools.pairwise(firsts)) < 15
    one = sample({"input_ids": input_ids, "cu_seqlens": cu_seqlens}, 1)
    assert one["input_ids"].tolist() == [[0]] and one["cu_seqlens"].tolist() == [0, 1]


# -------------------------------------------------------------------------------------- the command


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    small_model("qwen3_5").save_pretrained(folder)
    return folder


def test_the_command_reads_a_text_and_writes_both_files(checkpoint: Path, tmp_path: Path) -> None:
    done = call(checkpoint, "--device", "cpu", "--max-tokens", 24, "--save", tmp_path / "report")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    start = lines.index("model.layers.0.linear_attn")
    (rule,) = [
        line for line in lines[start : start + 5] if line.startswith("  gated_delta_rule") and "backward" in line
    ]
    assert "% of the bound" in rule and "headroom" in rule and max(map(len, lines[: lines.index("The worst")])) < 80
    worst = lines[lines.index("The worst") + 1 :]
    assert any("% of the bound by" in line for line in worst) and not any("(limit 1)" in line for line in worst)
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["sound"] and len(data["worst"]) == 10 and {"measured", "limit", "share"} <= data["entries"][0].keys()
    page = (tmp_path / "report.html").read_text()
    assert "Every result is within its bound" in page and "<script" not in page
    (tmp_path / "text").write_text("another text")
    done = call(checkpoint, "--device", "cpu", "--text", tmp_path / "text", "--json")
    assert json.loads(done.stdout)["sound"] and TEXT.exists()


def test_a_wrong_checkpoint_fails_with_a_status(checkpoint: Path, tmp_path: Path) -> None:
    model = HybridLM.from_pretrained(checkpoint)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[0, 0] = torch.inf
    model.save_pretrained(tmp_path)
    done = call(tmp_path, "--device", "cpu", "--max-tokens", 16)
    assert done.exit_code == 1 and "model.layers.1.mlp: swiglu" in done.output and "The parameter " in done.output
    for arguments, words in (
        ((tmp_path / "nowhere",), "nowhere"),
        ((checkpoint, "--text", tmp_path / "no.txt"), "no.txt"),
        ((checkpoint, "--max-tokens", 1), "--max-tokens"),
        (
            (checkpoint, "--text", checkpoint / "model.safetensors"),
            "is not UTF-8 text: it is binary, or in another encoding",
        ),
        ((checkpoint, "--save", tmp_path / "no" / "report"), "audit: --save"),
        ((checkpoint, "--dtype", "int8"), "--dtype"),
    ):
        done = call(*arguments, "--device", "cpu")
        assert done.exit_code == 2 and words in done.stderr and "Traceback" not in done.output
