"""The scripts in `benchmarks/`: a contestant that fails has a row, the time is limited, and figures are saved."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forks
from tests.models.small import GRADIENTS

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(code: str, *paths: Path, imports: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    text = f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n{code}"
    return forks.python("-c", text, *map(str, paths), imports=imports)


TRANSFORMERS = ("transformers.models.qwen3_next.modeling_qwen3_next",)


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
    result = run(code + "block.main()\n", right, imports=TRANSFORMERS)
    assert result.returncode == 0, result.stderr
    rows = {row["name"]: row for row in json.loads(right.read_text())["rows"]}
    assert list(rows) == ["patched", "FLA", "FLA and Liger", "torch"]
    assert rows["FLA"]["failed"] == "ImportError: FLA needs a GPU"
    assert rows["patched"]["ran"] == []
    assert rows["torch"]["ran"] == ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"]
    assert rows["torch"]["milliseconds"] > 0 and max(rows["torch"]["distances"].values()) <= GRADIENTS

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
    result = run(code + spoilt, wrong, imports=TRANSFORMERS)
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
    result = run(code + "generation.main()\n", right, imports=TRANSFORMERS)
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
    result = run(f"import torch\n{code}{spoilt}", wrong, imports=TRANSFORMERS)
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


def test_copies_of_the_package_are_compared(tmp_path: Path) -> None:
    def copy(label: str, module: str, old: str, new: str) -> str:
        shutil.copytree(FOLDER.parent / "adjoint", tmp_path / label / "adjoint")
        file = tmp_path / label / "adjoint" / module
        text = file.read_text(encoding="utf-8")
        assert text.count(old) == 1
        file.write_text(text.replace(old, new), encoding="utf-8")
        return f"{label}={tmp_path / label}"

    module, product = "ops/activation/in_float32.py", "_silu(gate, out=y) if up is None"
    copies = [
        f"as_is={FOLDER.parent}",
        copy("other", module, product, "_silu(gate, out=y).mul_(1 + 2**-20) if up is None"),
        copy("random", module, product, "_silu(gate, out=y).mul_(torch.rand(())) if up is None"),
        copy("raises", "bench/contenders.py", "def ours(task", "def ours(task): return 1 // 0\ndef theirs(task"),
        copy("ends", "bench/contenders.py", "KEPT_BYTES = 2**33", "import os; os._exit(1)"),
    ]
    file = tmp_path / "rows.json"
    options = [
        "--ops",
        "silu",
        "--rows",
        "float32",
        "--device",
        "cpu",
        "--rounds",
        "1",
        "--kernels",
        "--save",
        str(file),
    ]
    command = [sys.executable, str(FOLDER / "compare_copies.py"), *copies, *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1, result.stderr
    assert "ends: its process ended" in result.stdout
    forward, backward = (row["copies"] for row in json.loads(file.read_text())["rows"])
    assert forward["raises"] == {"failure": "ZeroDivisionError: integer division or modulo by zero"}
    assert {label: (x["repeats"], x["same_bits"]) for label, x in forward.items() if "repeats" in x} == {
        "as_is": (True, True), "other": (True, False), "random": (False, False),
    }  # fmt: skip
    assert list(backward) == ["as_is", "other", "random"] and all(x["same_bits"] for x in backward.values())
    assert all(x["microseconds"][0] > 0 for x in (*list(forward.values())[:3], *backward.values()))
    assert "aten::silu" in forward["as_is"]["kernels"] and "aten::silu_backward" in backward["as_is"]["kernels"]


def test_a_folder_without_the_package_is_no_copy(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "compare_copies.py"), f"here={tmp_path}", "--ops", "silu"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and "there is no adjoint/__init__.py in that folder" in result.stderr
