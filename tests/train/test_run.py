"""Runs in this process: they learn, repeat bit for bit, resume, and stop with a sentence."""

import io
import json
import math
import resource
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import adjoint
from adjoint.cli import app
from adjoint.models import HybridConfig, HybridLM
from adjoint.train import machine
from adjoint.train.options import Options
from adjoint.train.presets import PRESETS, Preset
from adjoint.train.run import Run, read_options, train
from adjoint.train.step.objective import Objective
from adjoint.train.step.ranks import Ranks
from adjoint.train.stops import CannotSave, NotFinite
from adjoint.train.text.stream import Batch, Stream
from tests.models.small import LOGITS, distance
from tests.stated import stated
from tests.train.small import (
    EXPERTS,
    FAST,
    SIZES,
    flags,
    loss_bits,
    metrics,
    weight_bytes,
    write_start,
    write_text,
)  # fmt: skip
from tests.without_fla import import_models


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of a run of a small dense model on a few files."""
    folder = tmp_path_factory.mktemp("base")
    return {
        **FAST, "start": str(write_start(folder / "start")), "data": [str(write_text(folder / "text"))], "steps": 6,
        "checkpoint_every": 3, "batch_rows": 2,
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    go(base, folder)
    return folder


def go(options: dict[str, Any], folder: Path, **more: Any) -> str:
    """A run of its own; what it printed."""
    text = io.StringIO()
    train(Options(**{**options, **more}), folder, console=Console(file=text, width=200))
    return text.getvalue()


def resume(folder: Path, **changes: Any) -> str:
    """Goes on with a run; what it printed."""
    text = io.StringIO()
    train(read_options(folder, changes), folder, resume=True, console=Console(file=text, width=200))
    return text.getvalue()


def copy_until(whole: Path, folder: Path, step: int) -> Path:
    """A run's folder as if it had been killed after a checkpoint."""
    import shutil

    shutil.copytree(whole, folder)
    for path in folder.glob("checkpoints/step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    shutil.rmtree(folder / "model")
    return folder


# ----------------------------------------------------------------------------------------------- learning


def test_it_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out files of the standard library's source: an untrained model needs 8 bits a byte, and this run 4.6."""
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "initializer_range": 0.1}
    layers = {"layer_types": ("linear_attention", "full_attention"), "num_attention_heads": 2, "head_dim": 16}
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "num_key_value_heads": 1}
    tiny = PRESETS["tiny"]
    monkeypatch.setitem(PRESETS, "tiny", Preset({**tiny.model, **sizes, **layers, **heads}, tiny.training))
    options = {"steps": 60, "batch_rows": 4, "sequence_length": 64, "learning_rate": 0.02, "heldout_bytes": 4000}
    quick = {"threads": 1, "device": "cpu", "sample_tokens": 8, "tensorboard": "off", "checkpoint_every": 60}
    text = go({**options, **quick}, tmp_path / "run")
    assert (tmp_path / "run" / "loss.png").exists()
    bits = json.loads((tmp_path / "run" / "result.json").read_text())["heldout_bits_per_byte"]
    assert bits < 4.6 < math.log2(256)
    for words in ("standard library", "corpus ", "bits per byte", "adjoint generate", "a sample"):
        assert words in text


def test_what_a_run_leaves_opens(whole: Path, base: dict[str, Any]) -> None:
    """The model by `adjoint generate`, and the last checkpoint by the model itself."""
    done = CliRunner().invoke(app, ["generate", str(whole / "model"), "def f", "--max-new-tokens", "3"])
    assert done.exit_code == 0, done.output
    model = HybridLM.from_pretrained(whole / "model")
    checkpoint = HybridLM.from_pretrained(whole / "checkpoints" / "step-00000006")
    for a, b in zip(model.parameters(), checkpoint.parameters(), strict=True):
        assert torch.equal(a, b)
    assert set(metrics(whole)[0]) >= {"step", "loss", "loss_bits", "gradient_norm", "learning_rate", "tokens"}
    assert metrics(whole)[-1]["step"] == 6 and "heldout_bits_per_byte" in metrics(whole)[-1]
    written = read_options(whole, {})
    assert written == Options(**base).complete()


def test_transformers_opens_a_run_too(whole: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import_models()
    model = transformers.AutoModelForCausalLM.from_pretrained(whole / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(whole / "model")
    ids = tokenizer("def f(x):", return_tensors="pt").input_ids
    assert ids[0].tolist() == list(b"def f(x):")
    ours = HybridLM.from_pretrained(whole / "model").eval()
    with torch.no_grad():
        theirs, own = model.eval()(ids).logits, ours(ids).logits
    assert distance(own, theirs) <= 2 * LOGITS, "each is within that of the exact ones"


def test_a_hugging_face_tokenizer(tmp_path: Path, base: dict[str, Any]) -> None:
    """Bits are to a byte of the text, whatever its tokens are, and the tokenizer comes with the model."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["?", "def", "return", "x", "(", ")", ":", "+", "function"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    options = {name: value for name, value in base.items() if name != "start"}
    go(options, tmp_path / "run", tokenizer=str(tmp_path / "words.json"), steps=2, preset="tiny", prompt="def")
    assert HybridLM.from_pretrained(tmp_path / "run" / "model").config.vocab_size == 9
    assert metrics(tmp_path / "run")[-1]["heldout_bits_per_byte"] < 2, "far fewer tokens than bytes"
    done = CliRunner().invoke(app, ["generate", str(tmp_path / "run" / "model"), "def x", "--max-new-tokens", "2"])
    assert done.exit_code == 0, done.output
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "tokenizer.json").write_text("{}")
    assert "is no tokenizer.json" in call("--tokenizer", str(tmp_path / "wrong"), "--out", str(tmp_path / "out"))


# ------------------------------------------------------------------------------------------- bit-exactness


def test_two_runs_have_the_same_bits(whole: Path, base: dict[str, Any], tmp_path: Path) -> None:
    go(base, tmp_path / "again")
    assert loss_bits(tmp_path / "again") == loss_bits(whole)
    assert weight_bytes(tmp_path / "again") == weight_bytes(whole)
    go(base, tmp_path / "other", seed=1)
    assert loss_bits(tmp_path / "other") != loss_bits(whole)


def test_a_resumed_run_has_the_same_bits(whole: Path, tmp_path: Path) -> None:
    folder = copy_until(whole, tmp_path / "run", 3)
    (folder / "metrics.jsonl").write_text((whole / "metrics.jsonl").read_text()[:-7])  # cut in the midst of a line
    assert "bits may differ" not in resume(folder)
    assert loss_bits(folder) == loss_bits(whole) and weight_bytes(folder) == weight_bytes(whole)


@pytest.mark.parametrize("changes", ({"optimizer": "muon"}, {"precision": "bfloat16"}), ids=("muon", "bfloat16"))
def test_other_options_resume_with_the_same_bits(changes: dict[str, Any], tmp_path: Path, base: dict[str, Any]) -> None:
    start = write_start(tmp_path / "start", sparse=True)
    go({**base, "start": str(start)}, tmp_path / "whole", **changes, steps=4, checkpoint_every=2)
    folder = copy_until(tmp_path / "whole", tmp_path / "run", 2)
    resume(folder)
    assert loss_bits(folder) == loss_bits(tmp_path / "whole")
    assert weight_bytes(folder) == weight_bytes(tmp_path / "whole")
    losses = [row["loss"] for row in metrics(folder) if "loss" in row]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe"])
def test_a_run_of_a_preset_resumes_with_the_same_bits(preset: str, base: dict[str, Any], tmp_path: Path) -> None:
    """Its configuration has sizes that the family's config.json does not: those of a dense layer in a sparse model."""
    options = {name: value for name, value in base.items() if name != "start"} | {"preset": preset}
    go(options, tmp_path / "whole", steps=2, checkpoint_every=1)
    folder = copy_until(tmp_path / "whole", tmp_path / "run", 1)
    resume(folder)
    assert loss_bits(folder) == loss_bits(tmp_path / "whole")
    assert weight_bytes(folder) == weight_bytes(tmp_path / "whole")


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(whole: Path, tmp_path: Path) -> None:
    folder = copy_until(whole, tmp_path / "run", 0)
    (folder / "metrics.jsonl").write_text("".join((whole / "metrics.jsonl").read_text().splitlines(True)[:2]))
    assert f"the run in {folder} ended before its first checkpoint, and begins again" in resume(folder)
    assert loss_bits(folder) == loss_bits(whole) and weight_bytes(folder) == weight_bytes(whole)


def test_a_finished_run_that_is_resumed_says_that_it_is_done(whole: Path, tmp_path: Path) -> None:
    text = resume(copy_until(whole, tmp_path / "run", 6))
    assert f"all 6 steps are done; the run is in {tmp_path / 'run'}" in text and "0 steps" not in text
    assert loss_bits(tmp_path / "run") == loss_bits(whole) and weight_bytes(tmp_path / "run") == weight_bytes(whole)


def test_a_finished_run_without_checkpoints_does_not_begin_again(whole: Path, tmp_path: Path) -> None:
    folder = copy_until(whole, tmp_path / "run", 0)
    (folder / "model").mkdir()
    with pytest.raises(adjoint.ArgumentError, match="there is no whole checkpoint"):
        resume(folder)


def test_activation_checkpointing_changes_no_bit(whole: Path, base: dict[str, Any], tmp_path: Path) -> None:
    go(base, tmp_path / "run", activation_checkpointing=True)
    assert loss_bits(tmp_path / "run") == loss_bits(whole)


BOUND = stated("training", "float32 move by at most")
"""Of a loss in float32, relatively: the same sums in another order."""


def test_layers_compiled_by_inductor_train_as_plain_ones(
    whole: Path, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, everything: bool
) -> None:
    if not everything:
        pytest.skip("half a minute of a compiler: with --all")
    from torch._inductor import compile_fx

    graphs = []
    compile_graph = compile_fx.compile_fx

    def count(graph: Any, *arguments: Any, **keywords: Any) -> Any:
        graphs.append(graph)
        return compile_graph(graph, *arguments, **keywords)

    monkeypatch.setattr(compile_fx, "compile_fx", count)
    torch.compiler.reset()
    go(base, tmp_path / "run", compile=True, steps=2, sample_tokens=0)
    torch.compiler.reset()
    assert len(graphs) >= 2, "a layer of each kind"
    plain = [row["loss"] for row in metrics(whole) if "loss" in row]
    compiled = [row["loss"] for row in metrics(tmp_path / "run") if "loss" in row]
    assert len(compiled) == 2 and all(abs(a - b) <= BOUND * b for a, b in zip(compiled, plain, strict=False))


@pytest.mark.parametrize("sparse", (False, True), ids=("dense", "sparse"))
def test_accumulation_is_one_batch(sparse: bool, base: dict[str, Any], tmp_path: Path) -> None:
    """The labels of the parts differ in number, and the routers' statistics are those of all parts."""
    options = {
        **base,
        "start": str(write_start(tmp_path / "start", sparse=sparse)),
        "batch_rows": 6,
        "router_loss": 0.1,
    }
    rows = []
    for parts in (1, 3):
        go(options, tmp_path / f"parts-{parts}", accumulation=parts)
        rows.append([row for row in metrics(tmp_path / f"parts-{parts}") if "loss" in row])
    for one, three in zip(*rows, strict=True):
        for name in ("loss", "gradient_norm", *(["router_loss"] if sparse else [])):
            assert one[name] == pytest.approx(three[name], rel=BOUND)
    if sparse:
        assert rows[0][0]["router_loss"] > 0.19


@pytest.mark.parametrize("sparse", (False, True), ids=("dense", "sparse"))
def test_rows_are_packed_sequences_of_one_length(sparse: bool) -> None:
    torch.manual_seed(0)
    objective = Objective(HybridLM(HybridConfig(**{**SIZES, **(EXPERTS if sparse else {})})))
    documents = [torch.randint(0, 256, (size,)) for size in (300, 70, 9)]
    rows = Stream(documents, 32, seed=0, packing=False).batch(range(5))
    packed = Batch(rows.tokens.view(1, -1), rows.labels.view(1, -1), torch.arange(6) * 32, rows.rows)
    results = []
    for batch in (rows, packed):
        objective.zero_grad()
        sums = objective(batch)
        (sums.nats + sums.balance).backward()
        norms = [float(parameter.grad.norm()) for parameter in objective.parameters() if parameter.grad is not None]
        results.append([float(sums.nats), float(sums.balance), *norms])
    assert results[0] == pytest.approx(results[1], rel=BOUND)


# ------------------------------------------------------------------------------------------------- stopping


def small_run(base: dict[str, Any], folder: Path, **changes: Any) -> Run:
    folder.mkdir(exist_ok=True)
    return Run(Options(**{**base, **changes}).complete(), folder, Ranks(0, 1, torch.device("cpu")), Console())


@pytest.mark.parametrize("packing", (True, False), ids=("packed", "rows"))
def test_a_loss_that_is_not_finite_names_the_layer_and_saves_the_batch(
    packing: bool, base: dict[str, Any], tmp_path: Path
) -> None:
    run = small_run(base, tmp_path, packing=packing, batch_rows=24)
    run.trainer.step(0)
    weight = run.weights.named["model.layers.1.mlp.down_proj.weight"]
    with torch.no_grad():
        weight[0, 0] = math.inf
    before = {name: x.detach().clone() for name, x in run.weights.named.items()}
    with pytest.raises(NotFinite, match=r"step 2: the loss is not finite, first in model\.layers\.1\.mlp\.down_proj;"):
        run.trainer.step(1)
    assert all(torch.equal(before[name], x) for name, x in run.weights.named.items())
    from adjoint.models import safetensors

    entries = safetensors.read_header(tmp_path / "not-finite-step-2.safetensors")
    tokens = torch.empty(entries["0.tokens"].shape, dtype=torch.int64)
    entries["0.tokens"].copy_to(tokens)
    batch = run.stream.batch(range(24, 48))
    assert torch.equal(tokens, batch.tokens) and ("0.cu_seqlens" in entries) == packing


def test_a_gradient_that_is_not_finite_is_named(base: dict[str, Any], tmp_path: Path) -> None:
    run = small_run(base, tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    run.weights.named[name].register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(NotFinite, match=r"step 1: the gradient is not finite, first in the gradient of " + name):
        run.trainer.step(0)


def test_numbers_that_are_not_finite_are_named_on_a_full_disk_too(base: dict[str, Any], tmp_path: Path) -> None:
    run = small_run(base, tmp_path)
    with torch.no_grad():
        run.weights.named["model.layers.1.mlp.down_proj.weight"][0, 0] = math.inf
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(NotFinite, match=r"first in model\.layers\.1\.mlp\.down_proj; .* could not be saved in "):
            run.trainer.step(0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_shard_for_which_there_is_no_room_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises no OSError then, and its exception's text is the traces of all ranks."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException

    from adjoint.train.checkpoint import State, _write_shards

    def save(state: Any, checkpoint_id: Path) -> None:
        raise CheckpointException("write", {1: (RuntimeError("unexpected pos 704 vs 598\nmore"), None)})  # type: ignore[dict-item]

    monkeypatch.setattr(state_dict_saver, "save", save)
    with pytest.raises(OSError, match="as when the disk is full") as error:
        _write_shards(tmp_path, State(1, {}, {}, {}))
    assert "unexpected pos 704 vs 598" in str(error.value) and "\n" not in str(error.value)


def test_a_full_disk_is_a_sentence_and_loses_nothing(whole: Path, tmp_path: Path) -> None:
    folder = copy_until(whole, tmp_path / "run", 3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))  # a file may not grow further, as on a full disk
    try:
        with pytest.raises(CannotSave, match=r"step 6 could not be saved in .* the checkpoint of step 3 is whole"):
            resume(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003"]
    resume(folder)
    assert weight_bytes(folder) == weight_bytes(whole)


def test_a_damaged_checkpoint_is_named_and_an_older_one_used(whole: Path, tmp_path: Path) -> None:
    folder = copy_until(whole, tmp_path / "run", 6)
    path = folder / "checkpoints" / "step-00000006" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(bytes(content))
    assert "step-00000006 is damaged and not used: optimizer.safetensors" in resume(folder)
    assert weight_bytes(folder) == weight_bytes(whole)


@pytest.mark.parametrize("content", ("{}", "[]", ""))
def test_a_checkpoint_without_its_manifest_is_not_used(content: str, whole: Path, tmp_path: Path) -> None:
    folder = copy_until(whole, tmp_path / "run", 6)
    (folder / "checkpoints" / "step-00000006" / "manifest.json").write_text(content)
    assert "step-00000006 is damaged and not used: " in resume(folder)
    assert weight_bytes(folder) == weight_bytes(whole)


@pytest.mark.parametrize("name", ("checkpoints", "metrics.jsonl"))
def test_what_cannot_be_read_is_named(name: str, whole: Path, tmp_path: Path) -> None:
    """A file where the folder should be, and the reverse: permissions do not stop a test that runs as root."""
    folder = copy_until(whole, tmp_path / "run", 3)
    path = folder / name
    if path.is_dir():
        path.rename(tmp_path / "elsewhere")
        path.write_text("")
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(adjoint.ArgumentError, match=f"cannot read .*{name}: "):
        resume(folder)


def test_lines_that_are_no_metrics_are_removed(whole: Path, tmp_path: Path) -> None:
    folder = copy_until(whole, tmp_path / "run", 3)
    lines = (whole / "metrics.jsonl").read_text().splitlines(True)
    (folder / "metrics.jsonl").write_text("".join([*lines[:3], "3\n", "[]\n", *lines[3:]]))
    resume(folder)
    assert loss_bits(folder) == loss_bits(whole)


def test_another_machine_is_named(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy_until(whole, tmp_path / "run", 3)
    facts = json.loads((folder / "checkpoints" / "step-00000003" / "state.json").read_text())
    assert any(sku.startswith("gated_delta_rule/eager/") for sku in facts["skus"])
    now = machine.describe(torch.device("cpu"))
    monkeypatch.setattr(machine, "describe", lambda device: {**now, "threads": 99, "torch": "9.9"})
    revised = [sku.replace("/r", "/r9") for sku in facts["skus"] if sku.startswith("swiglu/")]
    monkeypatch.setattr(machine, "used_skus", lambda: revised)
    text = resume(folder)
    for words in (f"threads was {now['threads']} and is 99", f"torch was {now['torch']} and is 9.9", "swiglu/eager/"):
        assert words in text


# ------------------------------------------------------------------------------------------------ bad input


def call(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["train", *arguments])
    assert done.exit_code == 2, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"data": "nowhere"}, "cannot read nowhere: No such file"),
        ({"preset": "tinny"}, "no preset 'tinny'; did you mean tiny?"),
        ({"prompt": "a\udcff"}, "prompt must be UTF-8 text"),
        ({"data": "a\udcff"}, "data must be UTF-8 text"),
        ({"start": "nowhere"}, "there is no folder nowhere to start from"),
        ({"start": "here", "preset": "tiny"}, "leave one of them out"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"learning_rate": 0}, "learning_rate must be above 0, got 0"),
        ({"warmup_steps": 0}, "warmup_steps must be at least 1, got 0"),
        ({"device": "tpu"}, "no device 'tpu'"),
        ({"config": "nowhere.toml"}, "cannot read nowhere.toml"),
        ({"resume": "nowhere"}, "there is no run in nowhere to resume"),
        ({"batch_rows": 5, "accumulation": 2}, "batch_rows must be a multiple of 2"),
        ({"tokenizer": "nowhere"}, "there is no tokenizer at nowhere"),
        ({"data": ""}, "data must name files or folders"),
        ({"suffixes": "py"}, "a suffix begins with a dot, such as .py, got 'py'"),
        ({"prompt": ""}, "the prompt must have a token, got ''"),
        ({"seed": 2**63}, "seed must be at most 9223372036854775807"),
        ({"threads": 99_999_999}, "threads must be at most 1024"),
        ({"beta1": 1.5}, "beta1 must be below 1, got 1.5"),
        ({"beta2": 1}, "beta2 must be below 1, got 1.0"),
        ({"momentum": 1.5}, "momentum must be below 1, got 1.5"),
        ({"final_rate": 7}, "final_rate must be at most 1, got 7.0"),
    ),
)
def test_mistakes_of_the_command_are_one_sentence(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    more = {} if "resume" in options else {"out": tmp_path / "run"}
    assert words in call(*flags({**options, **more}))
    assert not (tmp_path / "run").exists(), "nothing is made for a run that cannot begin"


def test_the_help_says_what_is_taken_by_default() -> None:
    done = CliRunner().invoke(app, ["train", "--help"])
    words = " ".join(done.output.replace("│", " ").split())
    for expected in (
        "Of AdamW. By default 0.9.",
        "One of adamw, muon. By default adamw.",
        "on the same machine. By default on.",
    ):
        assert expected in words


def test_tensorboard_is_missed_before_a_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert "tensorboard is not installed" in call("--tensorboard", "on", "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_folder_of_a_run_is_no_model(whole: Path, tmp_path: Path) -> None:
    text = call("--from", str(whole), "--out", str(tmp_path / "run"))
    assert f"{whole} has no config.json" in text and f"did you mean {whole / 'model'}?" in text


def test_the_command_that_a_run_ends_with_is_one_for_a_shell(base: dict[str, Any], tmp_path: Path) -> None:
    text = go(base, tmp_path / "a run", prompt="it's é", steps=1)
    (line,) = [line for line in text.splitlines() if "adjoint generate" in line]
    words = shlex.split(line)
    assert words[2:4] == [str(tmp_path / "a run" / "model"), "it's é"]


@pytest.mark.parametrize("steps", (0, 1, 2))
def test_an_interrupted_run_says_how_it_goes_on(
    steps: int, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Run._step

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    if not steps:
        monkeypatch.setattr("adjoint.train.run.read_corpus", stop)

    def press(self: Run, number: int, *arguments: Any) -> None:
        if number == steps:
            raise KeyboardInterrupt
        step(self, number, *arguments)

    monkeypatch.setattr(Run, "_step", press)
    options = {**base, "data": base["data"][0], "checkpoint_every": 2, "out": tmp_path / "run"}
    done = CliRunner().invoke(app, ["train", *flags(options)])
    assert done.exit_code == 130
    expected = {
        0: "interrupted before the run began",
        1: f"--resume {tmp_path / 'run'} begins the run again",
        2: f"--resume {tmp_path / 'run'} goes on from its last checkpoint",
    }
    assert expected[steps] in done.output


def test_a_resume_with_other_options_is_refused(whole: Path, tmp_path: Path) -> None:
    text = call("--resume", str(whole), "--learning-rate", "0.5")
    assert "has learning_rate 0.01, and 0.5 would make it a different one" in text
    assert f"for example --from {whole / 'model'}" in text
    folder = copy_until(whole, tmp_path / "run", 3)
    text = call("--resume", str(folder), "--learning-rate", "0.5")
    assert f"for example --from {folder / 'checkpoints' / 'step-00000003'}" in text, "it has no other model"
    assert "leave out --out and --config" in call("--resume", str(whole), "--out", str(tmp_path))
    assert "there is a run in" in call("--out", str(whole), "--device", "cpu", "--threads", "1")


def test_a_resume_on_other_data_is_refused(whole: Path, tmp_path: Path, base: dict[str, Any]) -> None:
    folder = copy_until(whole, tmp_path / "run", 3)
    text = write_text(tmp_path / "text", files=9)
    options = (folder / "options.toml").read_text().replace(base["data"][0], str(text))
    (folder / "options.toml").write_text(options)
    with pytest.raises(adjoint.ArgumentError, match="the data is not what the run"):
        resume(folder)


def test_options_that_were_edited_since_the_checkpoint_are_refused(whole: Path, tmp_path: Path) -> None:
    folder = copy_until(whole, tmp_path / "run", 3)
    path = folder / "options.toml"
    path.write_text(path.read_text().replace("learning_rate = 0.01", "learning_rate = 0.5"))
    with pytest.raises(adjoint.ArgumentError, match=r"trained with learning_rate 0\.01, and options\.toml says 0\.5"):
        resume(folder)
    path.write_text((whole / "options.toml").read_text().replace("keep = 2", "keep = 3"))
    resume(folder)
    assert loss_bits(folder) == loss_bits(whole), "which are kept is no matter of the numbers"


def test_a_checkpoint_of_another_architecture_is_refused(whole: Path, tmp_path: Path, base: dict[str, Any]) -> None:
    folder = copy_until(whole, tmp_path / "run", 3)
    wider = write_start(tmp_path / "wider", intermediate_size=64)
    options = (folder / "options.toml").read_text().replace(base["start"], str(wider))
    (folder / "options.toml").write_text(options)
    with pytest.raises(adjoint.ArgumentError, match=r"another architecture: its intermediate_size is 48.* is 64"):
        resume(folder)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "llama" / name).write_text((wider / name).read_text())
    assert "got 'llama'" in call("--from", str(tmp_path / "llama"), "--out", str(tmp_path / "out"))


def test_a_folder_that_cannot_be_written_to_is_a_sentence(tmp_path: Path, base: dict[str, Any]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(adjoint.ArgumentError, match=r"cannot write to the folder .*file/run: Not a directory"):
        go(base, tmp_path / "file" / "run")
    with pytest.raises(adjoint.ArgumentError, match=r"cannot write to the folder .*file: there is a file of that name"):
        go(base, tmp_path / "file")


def test_torch_is_afterwards_as_it_was(whole: Path) -> None:
    assert not torch.are_deterministic_algorithms_enabled()
