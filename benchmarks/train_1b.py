"""Times steps of `adjoint train` at the 1b preset, and the same model in transformers with FLA and Liger, in one loop.

    PYTHONPATH=.:peers python benchmarks/train_1b.py --models ours theirs --no-deterministic --profile
    FLA_FLASH_QLA=0 PYTHONPATH=.:peers python benchmarks/train_1b.py --models ours theirs  # FLA's own kernels
    python benchmarks/train_1b.py --models --bits

Rows are of random tokens, one sequence each. Both models have the same configuration, begin with the same weights, take
the same steps (loss, clipping, AdamW, float32 weights beside bfloat16 ones). Their first losses and the norms of their
gradients are compared. What ran is printed, and a model that fails has a row that says so. Ours runs in deterministic
mode unless told otherwise, which the peers' kernels do not have. With `--bits` two runs of a smaller model, and a third
that is killed halfway and resumed, are compared bit for bit. The model has the layers and the sizes of heads of the
preset, which choose the kernels, and little else, so that checkpoints are small: on an H200 compiling takes most of the
minute that it is meant to last.
"""

import argparse
import email
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from contest import Report, attention_in, compiled_in_parallel, free
from fla_functions import fla_functions
from rich.console import Console
from torch import Tensor, nn

from adjoint.models import HybridLM
from adjoint.train import machine
from adjoint.train.options import Options
from adjoint.train.presets import PRESETS, Preset
from adjoint.train.report.flops import flops_of_token, peak_of
from adjoint.train.run import read_options, train
from adjoint.train.step.loop import StepResult, Trainer
from adjoint.train.step.objective import Objective, Sums
from adjoint.train.step.optimizer import Optimizers
from adjoint.train.step.ranks import Ranks
from adjoint.train.step.weights import Weights
from adjoint.train.text.stream import Batch, Stream

APART = 0.02
"""How far the first losses, and the norms of their gradients, may be from each other in bfloat16, relatively."""


class TheirObjective(nn.Module):
    """Transformers' model with FLA's rule and convolution, and Liger's norms, feed-forward layers and loss."""

    sparse_layers = 0

    def __init__(self, model: Any, length: int) -> None:
        super().__init__()
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        self.model, self._length = model, length
        self._loss = LigerFusedLinearCrossEntropyLoss(reduction="sum", ignore_index=-100)

    def forward(self, batch: Batch, choices: Tensor | None = None, *, with_balance: bool = True) -> Sums:
        hidden = self.model.model(batch.tokens.view(-1, self._length), use_cache=False).last_hidden_state
        nats = self._loss(self.model.lm_head.weight, hidden.flatten(0, 1), batch.labels.flatten())
        return Sums(nats, nats.new_zeros(()))


def their_model(ours: HybridLM, ran: set[str]) -> Any:
    """The same weights in transformers, with the peers' functions in the places of its own, which note that."""
    modeling = import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    with torch.device(ours.device):
        model = modeling.Qwen3_5ForCausalLM(modeling.Qwen3_5ForCausalLM.config_class(**ours.config.to_dict()))
    missing, unexpected = model.load_state_dict(ours.state_dict(), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:  # which is tied
        raise ValueError(f"the two models have other parameters: {missing}, {unexpected}")
    model.tie_weights()
    liger = import_module("liger_kernel.transformers")
    try:
        liger.apply_liger_kernel_to_qwen3_5(model=model, fused_linear_cross_entropy=False)
        ran.add("Liger's norms and feed-forward layers")
    except (AttributeError, TypeError) as error:
        print(f"theirs: Liger's norms and feed-forward layers do not reach this model: {error!r}; its loss does")

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            ran.add(function.__qualname__)
            return function(*arguments, **options)

        return call

    for name, function in fla_functions().items() if ours.device.type == "cuda" else ():
        setattr(modeling, name, noted(function))
    return model


def trainer(objective: Any, options: Options, stream: Stream, ranks: Ranks) -> Trainer:
    objective.model.to(ranks.device).train()
    weights = Weights(objective, torch.bfloat16 if ranks.device.type == "cuda" else torch.float32, ranks)
    return Trainer(options, objective, weights, Optimizers(weights.named, options), stream, ranks, Path("."))


class Contest:
    """The models of a run, one after the other; each is gone before the next is made."""

    def __init__(self, chosen: argparse.Namespace, report: Report) -> None:
        self._chosen, self._report = chosen, report
        self._device = torch.device(chosen.device)
        config = PRESETS[chosen.preset].config(chosen.vocabulary)
        layers = chosen.layers or config.num_hidden_layers
        self._config = config.replace(num_hidden_layers=layers, layer_types=config.layer_types[:layers])
        self._options = Options(
            preset=chosen.preset, steps=100, batch_rows=chosen.rows, sequence_length=chosen.length,
            optimizer=chosen.optimizer, packing=False, device=chosen.device,
        ).complete()  # fmt: skip
        tokens = torch.randint(0, chosen.vocabulary, (64 * chosen.rows * chosen.length,), dtype=torch.int32)
        self._stream = Stream([tokens], chosen.length, seed=0, packing=False)
        self._flops, self._peak = flops_of_token(self._config, chosen.length), peak_of(self._device)
        report.say(f"{self._config.num_hidden_layers} layers, {self._flops} operations a token, {self._peak} TF/s")

    def time(self, name: str) -> dict[str, Any]:
        """The row of a model."""
        chosen, on_gpu = self._chosen, self._device.type == "cuda"
        torch.manual_seed(0)
        with torch.device(self._device):
            start = HybridLM(self._config)
        ran: set[str] = set()
        objective: Any
        if name == "ours":
            objective = Objective(start)
        else:
            objective = TheirObjective(their_model(start, ran), chosen.length)
        del start
        run = trainer(objective, self._options, self._stream, Ranks(0, 1, self._device))
        begin = time.perf_counter()
        with compiled_in_parallel(chosen.threads):
            first = run.step(0)
        self._report.say(
            f"{name}: the first step took {time.perf_counter() - begin:.1f} s, its loss is {first.loss:.4f}"
        )
        for step in range(1, 1 + chosen.warmups):
            run.step(step)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = [self._seconds(run, step) for step in range(1 + chosen.warmups, 1 + chosen.warmups + chosen.steps)]
        row = self._row(name, first, seconds)
        if name == "ours":
            ran |= {"/".join(sku.split("/")[:4]) for sku in machine.used_skus()}
        row["ran"] = sorted(ran | attention_in(lambda: run.step(59), chosen.device))
        self._report.add(describe(row), row)
        if name == chosen.profile:
            self._report.profile(lambda: run.step(60), chosen.device, count=30)
        return row

    def _seconds(self, run: Trainer, step: int) -> float:
        begin = time.perf_counter()
        run.step(step)  # reads the loss: the device has done all but the optimizer's work
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def _row(self, name: str, first: StepResult, seconds: list[float]) -> dict[str, Any]:
        median, length = statistics.median(seconds), self._chosen.rows * self._chosen.length
        row: dict[str, Any] = {"name": name, "first_loss": first.loss, "first_gradient_norm": first.gradient_norm}
        row |= {"milliseconds": median * 1e3, "all_milliseconds": [round(1e3 * x, 2) for x in seconds]}
        row |= {"tokens_per_second": round(length / median), "tokens": length}
        if self._flops and self._peak:
            row["tf_per_s"] = self._flops * length / median / 1e12
            row["share_of_matrix_ceiling"] = row["tf_per_s"] / self._peak
        if self._device.type == "cuda":
            row["peak_bytes"] = torch.cuda.max_memory_allocated()
        return row


def describe(row: dict[str, Any]) -> str:
    share = (
        f"{row['tf_per_s']:6.1f} TF/s, {row['share_of_matrix_ceiling']:.3f} of the ceiling;  "
        if "tf_per_s" in row
        else ""
    )
    return (
        f"  {row['name']:8s} {row['milliseconds']:8.1f} ms a step, {row['tokens_per_second']:8d} tokens/s;  {share}"
        f"{row.get('peak_bytes', 0) / 2**30:6.1f} GiB;  {', '.join(row['ran'])}"
    )


def compare(rows: list[dict[str, Any]], report: Report) -> str:
    """Says how the two models' steps compare; what is wrong with them, or nothing."""
    ours, theirs = rows
    ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
    apart = {key: abs(ours[key] / theirs[key] - 1) for key in ("first_loss", "first_gradient_norm")}
    report.add(
        f"  ours over theirs: {ratio:.2f} times the tokens/s; first losses {apart['first_loss']:.1e} apart, norms of "
        f"the gradients {apart['first_gradient_norm']:.1e}",
        {"name": "ours over theirs", "tokens_per_second": ratio, **apart},
    )
    return "" if max(apart.values()) < APART else "the two do not compute the same: their times mean nothing"


def compare_bits(device: str, steps: int, report: Report) -> str:
    """Two runs, and a third that is killed after half of its steps and resumed: equal losses and weights."""
    # A new process may use a GPU beside this one. On the CPU a process that has imported everything once makes forks.
    context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    context.set_forkserver_preload(["torch._inductor.config", "adjoint.train.run"])
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / text for text in ("one", "two", "killed")]
        runs = [context.Process(target=run_small, args=(device, steps, str(folder))) for folder in folders]
        for run in runs:
            run.start()
        while len(losses := _losses(folders[2])) < steps // 2 and runs[2].is_alive():
            time.sleep(0.002)
        runs[2].kill()
        runs[2].join()
        report.say(f"killed after {len(losses)} steps, with {runs[2].exitcode}")
        resumed = context.Process(target=run_small, args=(device, steps, str(folders[2])))
        resumed.start()
        for run in (*runs[:2], resumed):
            run.join()
            if run.exitcode:
                raise RuntimeError(f"a run ended with {run.exitcode}")
        results = [_bits(folder) for folder in folders]
    equal = results[0] == results[1] == results[2] and len(results[0][0]) == steps
    was_killed = runs[2].exitcode == -signal.SIGKILL and steps // 2 <= len(losses) < steps
    report.add(
        f"  bits of two runs of {steps} steps, and of one killed after {len(losses)} and resumed: "
        f"{'equal' if equal else 'DIFFERENT'}; losses {results[0][0][0]} to {results[0][0][-1]}",
        {"name": "bits", "equal": equal, "killed_after": len(losses), "losses": results[0][0]},
    )
    return "" if equal and was_killed else "the bits of two runs differ" if was_killed else "no run was killed"


def run_small(device: str, steps: int, folder: str) -> None:
    """A run with the heads of the 1b preset in a narrow model, or the rest of one; it ends with its parent."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    small = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    if device == "cpu":
        small |= {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
        small |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
        small |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    PRESETS["1b"] = Preset({**PRESETS["1b"].model, **small, "layer_types": None}, PRESETS["1b"].training)
    options = Options(
        preset="1b", steps=steps, batch_rows=4, sequence_length=1024 if device == "cuda" else 64, device=device,
        checkpoint_every=max(1, steps // 4), sample_tokens=0, heldout_bytes=4000, tensorboard="off",
        learning_rate=1e-3, data=[str(Path(email.__file__).parent)],
    )  # fmt: skip
    place, quiet = Path(folder), Console(quiet=True)
    if place.exists():
        train(read_options(place, {}), place, resume=True, console=quiet)
    else:
        train(options, place, console=quiet)


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _losses(folder: Path) -> list[str]:
    """The bits of each loss so far."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return []
    lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [row["loss_bits"] for row in map(json.loads, lines) if "loss" in row]


def _bits(folder: Path) -> tuple[list[str], bytes]:
    return _losses(folder), (folder / "model" / "model.safetensors").read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["ours"], choices=["ours", "theirs"])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--layers", type=int, help="fewer than the preset has")
    parser.add_argument("--preset", default="1b", choices=tuple(PRESETS))
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-deterministic", action="store_true")
    parser.add_argument(
        "--bits", type=int, nargs="?", const=40,
        help="steps of runs of a small model that are compared bit for bit, one of them killed halfway and resumed",
    )  # fmt: skip
    parser.add_argument("--profile", nargs="?", const="ours", choices=["ours", "theirs"], help="the kernels of a step")
    parser.add_argument("--threads", type=int, default=8, help="that compile a peer's variants")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which it ends with what it has")
    parser.add_argument("--save", type=Path, help="a file for the figures, as JSON")
    chosen = parser.parse_args()
    facts = {name: getattr(chosen, name) for name in ("preset", "length", "vocabulary", "layers", "optimizer")}
    facts["batch_rows"] = chosen.rows
    report = Report(facts | {"deterministic": not chosen.no_deterministic}, chosen.save, chosen.limit)
    wrong = []
    if chosen.models:
        contest = Contest(chosen, report)
        rows = []
        for name in chosen.models:
            # The peers' kernels add with atomics in places: deterministic mode would refuse their torch parts.
            with machine.set_up(name == "ours" and not chosen.no_deterministic, 0):
                rows.append(report.attempt(name, lambda name=name: contest.time(name)))
            free()
        if len(rows) == 2 and all(rows):
            wrong.append(compare(sorted(rows, key=lambda row: row["name"]), report))
    if chosen.bits:
        wrong.append(report.attempt("bits", lambda: compare_bits(chosen.device, chosen.bits, report)) or "")
    if any("failed" in row and row["name"] != "theirs" for row in report.rows):
        wrong.append("ours failed")
    report.finish("; ".join(filter(None, wrong)))


if __name__ == "__main__":
    main()
