"""Small models, small data, and runs of the command in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from adjoint.models import HybridConfig, HybridLM
from adjoint.models.byte_text import write_byte_tokenizer
from tests import forks

SIZES: dict[str, Any] = {
    "model_type": "qwen3_5_text", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "layer_types": ("linear_attention", "full_attention"), "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "partial_rotary_factor": 0.5, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip

FAST = {
    "batch_rows": 6, "sequence_length": 32, "learning_rate": 0.01, "heldout_bytes": 400, "sample_tokens": 4,
    "threads": 1, "device": "cpu", "warmup_steps": 2, "tensorboard": "off",
}  # fmt: skip
"""Options of runs that take seconds."""


def write_start(folder: Path, *, sparse: bool = False, **changes: Any) -> Path:
    """A folder that a run starts from: random weights, and the tokenizer of bytes."""
    torch.manual_seed(0)
    HybridLM(HybridConfig(**{**SIZES, **(EXPERTS if sparse else {}), **changes})).save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


def write_text(folder: Path, files: int = 12) -> Path:
    """Files of text that repeats itself, of different lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        lines = [f"def function_{number}_{line}(x):\n    return x + {line * number}\n\n" for line in range(3 + number)]
        (folder / f"file_{number}.py").write_text("".join(lines), encoding="utf-8")
    return folder


def flags(options: dict[str, Any]) -> list[str]:
    """Options as arguments of the command."""
    words = []
    for name, value in options.items():
        flag = {"start": "from"}.get(name, name).replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "COLUMNS": "200",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
}


def command(options: dict[str, Any], ranks: int) -> list[str]:
    """The command as torchrun starts it."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *launcher, "-m", "adjoint", "train", *flags(options)]


def run(options: dict[str, Any], ranks: int = 0) -> "subprocess.CompletedProcess[str]":
    return forks.python("-m", "adjoint", "train", *flags(options), environment=ENVIRONMENT, ranks=ranks)


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def loss_bits(folder: Path) -> dict[int, str]:
    """The bits of each step's loss; a step that is there twice is a mistake."""
    rows = [(row["step"], row["loss_bits"]) for row in metrics(folder) if "loss_bits" in row]
    assert len({step for step, _ in rows}) == len(rows)
    return dict(rows)


def weight_bytes(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()
