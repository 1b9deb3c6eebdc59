"""The scripts in `benchmarks/`: a contestant that fails has a row, the time is limited, and figures are saved."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    text = f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", text, *map(str, paths)], capture_output=True, text=True, timeout=300)


def test_a_contestant_that_fails_has_a_row_and_the_others_go_on(tmp_path):
    file = tmp_path / "folder" / "rows.json"
    result = run(
        "from pathlib import Path\n"
        "from contest import Report\n"
        "report = Report({'shape': 'small'}, Path(sys.argv[1]), 60)\n"
        "assert report.attempt('first', lambda: 1 // 0) is None\n"
        "assert report.attempt('second', lambda: 7) == 7\n"
        "report.add('  second 7 ms', {'name': 'second', 'milliseconds': 7})\n"
        "report.finish()\n",
        file,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip().endswith("second 7 ms")
    facts = json.loads(file.read_text())
    assert facts["status"] == "finished"
    assert facts["rows"][0] == {"name": "first", "failed": "ZeroDivisionError: integer division or modulo by zero"}
    assert facts["rows"][1]["milliseconds"] == 7


def test_the_limit_ends_a_script_with_what_it_has(tmp_path):
    file = tmp_path / "rows.json"
    result = run(
        "import time\n"
        "from pathlib import Path\n"
        "from contest import Report\n"
        "report = Report({}, Path(sys.argv[1]), 1.5)\n"
        "report.add('  first 1 ms', {'name': 'first'})\n"
        "time.sleep(60)\n",
        file,
    )
    assert result.returncode == 3
    assert "first 1 ms\n  stopped after 1.5 s" in result.stdout
    facts = json.loads(file.read_text())
    assert facts["status"].startswith("stopped after 1.5 s")
    assert [row["name"] for row in facts["rows"]] == ["first"]


def test_a_block_that_computes_something_else_is_told_apart(tmp_path):
    pytest.importorskip("transformers")
    options = "['block', '--shape', 'tiny', '--device', 'cpu', '--tokens', '32', '--rounds', '1', '--warmups', '0']"
    code = f"import block\nsys.argv = {options} + ['--save', sys.argv[1]]\n"
    right, wrong = tmp_path / "right.json", tmp_path / "wrong.json"
    result = run(code + "block.main()\n", right)
    assert result.returncode == 0, result.stderr
    rows = {row["name"]: row for row in json.loads(right.read_text())["rows"]}
    assert list(rows) == ["patched", "FLA", "FLA and Liger", "torch"]
    assert rows["FLA"]["failed"] == "ImportError: FLA needs a GPU"
    assert rows["patched"]["ran"] == []
    assert rows["torch"]["ran"] == ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"]
    assert rows["torch"]["milliseconds"] > 0 and max(rows["torch"]["distances"].values()) < 1e-4

    spoilt = (
        "make = block.text_model\n"
        "def spoil(*arguments):\n"
        "    model = make(*arguments)\n"
        "    spoil.calls = getattr(spoil, 'calls', 0) + 1\n"
        "    if spoil.calls > 1:\n"
        "        model.layers[0].linear_attn.A_log.data += 1\n"
        "    return model\n"
        "block.text_model = spoil\n"
        "block.main()\n"
    )
    result = run(code + spoilt, wrong)
    assert result.returncode == 1
    assert "torch and patched do not compute the same: their times mean nothing" in result.stderr


def test_logits_of_another_model_are_told_apart_from_rounding(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    options = (
        "['generation', '--tiny', '--device', 'cpu', '--dtype', 'bfloat16', '--batch', '1', '--prompt', '6', "
        "'--new', '2', '--rounds', '1', '--only', 'patched']"
    )
    code = f"import generation\nsys.argv = {options} + ['--save', sys.argv[1]]\ngeneration.COMPARED = 64\n"
    right, wrong = tmp_path / "right.json", tmp_path / "wrong.json"
    result = run(code + "generation.main()\n", right)
    assert result.returncode == 0, result.stderr
    rows = {row["name"]: row for row in json.loads(right.read_text())["rows"]}
    assert list(rows) == ["HybridLM", "transformers, patched"]
    assert all(row["logits_from_float32"] > 0 for row in rows.values())

    spoilt = (
        "make = generation.their_model\n"
        "def spoil(model):\n"
        "    theirs = make(model)\n"
        "    spoil.calls = getattr(spoil, 'calls', 0) + 1\n"
        "    if spoil.calls > 2:\n"
        "        theirs.model.norm.weight = torch.nn.Parameter(theirs.model.norm.weight + 0.05)\n"
        "    return theirs\n"
        "generation.their_model = spoil\n"
        "generation.main()\n"
    )
    result = run(f"import torch\n{code}{spoilt}", wrong)
    assert result.returncode == 1
    assert result.stderr.endswith("transformers, patched computes other logits\n")


def test_bits_of_runs_one_of_which_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "bits.json"
    options = "['train_1b', '--models', '--bits', '4', '--device', 'cpu', '--save', sys.argv[1]]"
    result = run(f"import train_1b\nsys.argv = {options}\ntrain_1b.main()\n", file)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(file.read_text())["rows"]
    assert row["equal"] and row["killed_after"] in (2, 3) and len(row["losses"]) == 4


def test_whose_attention_ran_is_told_by_names() -> None:
    result = run(
        "import contest, types\n"
        "names = ['cudnn_generated_fort_native_sdpa_sm90_flash_fprop', 'cudnn fmha', 'void pytorch_flash::flash_fwd']\n"
        "names += ['fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)']\n"
        "for name in names:\n"
        "    contest.kernels = lambda work, device, name=name: [types.SimpleNamespace(key=name)]\n"
        "    print(*contest.attention_in(None, 'cuda'))\n"
    )
    assert result.stdout.splitlines() == [
        "cuDNN's attention", "", "torch's flash attention", "torch's memory-efficient attention",
    ], result.stderr  # fmt: skip
