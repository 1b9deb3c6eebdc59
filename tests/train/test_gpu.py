"""On a GPU: runs in bfloat16 repeat and resume bit for bit, and the share of the peak is there."""

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from adjoint.train.options import Options
from adjoint.train.run import read_options, train
from tests.train.small import FAST, loss_bits, metrics, weight_bytes, write_start, write_text


@pytest.mark.gpu
@pytest.mark.parametrize("sparse", (False, True), ids=("dense", "sparse"))
def test_runs_on_a_gpu_have_the_same_bits(sparse: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    start = write_start(tmp_path / "start", sparse=sparse, **sizes)
    text = write_text(tmp_path / "text")
    values = {**FAST, "start": str(start), "data": [str(text)], "steps": 6, "checkpoint_every": 3, "device": "cuda"}
    options = Options(**values)
    console = Console(file=io.StringIO())
    for name in ("one", "two"):
        train(options, tmp_path / name, console=console)
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step-00000006")
    first = loss_bits(tmp_path / "two"), weight_bytes(tmp_path / "two")
    train(read_options(tmp_path / "two", {}), tmp_path / "two", resume=True, console=console)
    assert (loss_bits(tmp_path / "one"), weight_bytes(tmp_path / "one")) == first
    assert (loss_bits(tmp_path / "two"), weight_bytes(tmp_path / "two")) == first
    rows = [row for row in metrics(tmp_path / "one") if "loss" in row]
    assert rows[-1]["loss"] < rows[0]["loss"] and "share_of_peak" in rows[0]
