"""Several gloo processes beside one on the same global batch: losses, shards, resumption, the end of a rank."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.stated import stated
from tests.train.small import ENVIRONMENT, FAST, command, metrics, run, write_start, write_text

BOUND = stated("many-processes", "of two and three ranks stay within")
"""Of a loss in float32, relatively: the sums of ranks have another order than that of one process."""

STEPS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("base")
    start, text = write_start(folder / "start", sparse=True), write_text(folder / "text")
    return {**FAST, "start": str(start), "data": str(text), "steps": STEPS, "checkpoint_every": 2, "router_loss": 0.1}


@pytest.fixture(scope="module")
def one(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    done = run({**base, "out": folder})
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def compare(folder: Path, expected: Path) -> None:
    """Losses of every step, once each, and bits per byte at the end."""
    runs = [[row for row in metrics(path) if "loss" in row] for path in (folder, expected)]
    assert [row["step"] for row in runs[0]] == list(range(1, STEPS + 1))
    for row, other in zip(*runs, strict=True):
        for name in ("loss", "router_loss", "gradient_norm"):
            assert row[name] == pytest.approx(other[name], rel=BOUND), (row["step"], name)
        assert row["tokens"] == other["tokens"]
    bits = [metrics(path)[-1]["heldout_bits_per_byte"] for path in (folder, expected)]
    assert bits[0] == pytest.approx(bits[1], rel=BOUND)


def test_two_ranks_are_one_process(base: dict[str, Any], one: Path, tmp_path: Path) -> None:
    """With accumulation: the labels of all ranks and parts are one sum, and so are the routers' statistics."""
    done = run({**base, "out": tmp_path / "two", "accumulation": 3}, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    compare(tmp_path / "two", one)
    assert (tmp_path / "two" / "model" / "model.safetensors").exists()


def test_ranks_resume_what_others_saved(base: dict[str, Any], one: Path, tmp_path: Path) -> None:
    options = {**base, "data": [base["data"]]}
    (tmp_path / "options.json").write_text(json.dumps(options), encoding="utf-8")
    files = [str(tmp_path / name) for name in ("options.json", "three")]
    done = forks.python("-m", "tests.train.many", *files, environment=ENVIRONMENT, ranks=3)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "states are sharded over 3 ranks" in done.stdout
    compare(tmp_path / "three", one)
    for source, ranks in ((tmp_path / "three", 2), (tmp_path / "three", 0), (one, 2)):
        folder = tmp_path / f"{source.name}-resumed-{ranks}"
        shutil.copytree(source, folder)
        shutil.rmtree(folder / "checkpoints" / f"step-{STEPS:08d}")
        done = run({"resume": folder}, ranks)
        assert done.returncode == 0, done.stderr[-3000:]
        compare(folder, one)


def test_the_other_ranks_end_when_one_dies(base: dict[str, Any], tmp_path: Path) -> None:
    options = {**base, "out": tmp_path / "run", "steps": 100_000, "checkpoint_every": 2}
    options |= {"optimizer": "muon", "precision": "bfloat16"}
    process = subprocess.Popen(
        command(options, 2), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        limit = time.monotonic() + 200
        while len(list((tmp_path / "run").glob("checkpoints/step-*"))) < 1:
            assert time.monotonic() < limit and process.poll() is None
            time.sleep(0.05)
        ranks = _ranks_below(process.pid)
        assert sorted(ranks) == [0, 1]
        os.kill(ranks[1], signal.SIGKILL)
        begin = time.monotonic()
        _, errors = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode != 0 and time.monotonic() - begin < 60
    assert "another rank has ended" in errors
    assert not Path(f"/proc/{ranks[0]}").exists()


def _ranks_below(parent: int) -> dict[int, int]:
    """The processes that torchrun has started, by their rank."""
    ranks = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent:
                variables = (path / "environ").read_bytes().split(b"\0")
                ranks[next(int(x[5:]) for x in variables if x.startswith(b"RANK="))] = int(path.name)
        except (OSError, StopIteration):
            continue
    return ranks
