"""A run from its options to its last sample."""

import contextlib
import json
import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from adjoint.core.errors import ArgumentError
from adjoint.core.problem import short
from adjoint.models.hybrid import HybridLM
from adjoint.train import machine
from adjoint.train.checkpoint import Checkpoints, State, model_in, write_text_atomically
from adjoint.train.evaluate import bits_per_byte
from adjoint.train.options import ELSEWHERE, RESUMABLE, Options, read_toml
from adjoint.train.presets import PRESETS
from adjoint.train.report.curve import in_terminal, write_png
from adjoint.train.report.display import Display
from adjoint.train.report.flops import flops_of_token, peak_of
from adjoint.train.report.metrics import Metrics, bits_of, require_tensorboard
from adjoint.train.step.loop import Trainer
from adjoint.train.step.objective import Objective
from adjoint.train.step.optimizer import Optimizers
from adjoint.train.step.ranks import Ranks, start_ranks
from adjoint.train.step.weights import Weights
from adjoint.train.stops import CannotSave
from adjoint.train.text.corpus import Corpus, count_bytes, read_corpus
from adjoint.train.text.language import Language, read_language
from adjoint.train.text.stream import Stream

OPTIONS = "options.toml"


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    folder: Path
    step: int
    bits_per_byte: float


def train(options: Options, folder: Path, *, resume: bool = False, console: Console | None = None) -> Result:
    """Trains a model, or resumes a run.

    Args:
        options: the options of a new run; for a run that is resumed, `read_options` of its folder.
        folder: the folder of the run, for options, checkpoints, metrics, the curve, and the model at the end.
        resume: whether to go on from the newest whole checkpoint of the folder; if there is none yet, the run begins
            again.
        console: the console that shows progress.

    Raises:
        ArgumentError: an option, the data or a checkpoint is wrong.
        Unsupported: something that is asked for is not available.
        CannotSave: the folder cannot be written to.
        NotFinite: a loss or a gradient is not finite.
        RankLost: another process of the run has ended.
    """
    options = options.complete()
    console = Console() if console is None else console
    context = machine.set_up(options.deterministic, options.threads)
    with context, start_ranks(options.device) as ranks:
        return Run(options, folder, ranks, console).go(resume)


def open_folder(folder: Path, options: Options, ranks: Ranks) -> None:
    """Makes the folder of a new run, and writes its options.

    Raises:
        ArgumentError: the folder has a run already, or cannot be made.
    """
    if ranks.share((folder / OPTIONS).exists()):
        raise ArgumentError(f"train: there is a run in {folder} already; go on with --resume {folder}, or name another")
    fault = ""
    if ranks.is_first:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_text_atomically(folder / OPTIONS, options.to_toml())
        except FileExistsError:
            fault = "there is a file of that name"
        except OSError as error:
            fault = error.strerror or str(error)
    if fault := ranks.share(fault):
        raise ArgumentError(f"train: cannot write to the folder {folder}: {fault}")


def read_options(folder: Path, changes: dict[str, Any]) -> Options:
    """The options of a run that is resumed.

    Raises:
        ArgumentError: there is no run, or one of the changes would make it another run.
    """
    if not (folder / OPTIONS).exists():
        raise ArgumentError(f"train: there is no run in {folder} to resume: it has no {OPTIONS}")
    options = Options(**read_toml(folder / OPTIONS))
    changed = options.replace(**changes)
    for name in options.differences(changed):
        if name not in RESUMABLE:
            raise ArgumentError(
                f"train: the run in {folder} has {name} {getattr(options, name)!r}, and {getattr(changed, name)!r} "
                f"would make it a different one; start a new run{_from(folder)}"
            )
    return changed


def _from(folder: Path) -> str:
    model = model_in(folder)
    return "" if model is None else f", for example --from {model}"


def _require_model(start: Path) -> None:
    """Refuses a folder to start from that has no model. If it is the folder of a run, the error names the model in it.

    Raises:
        ArgumentError: it has no config.json.
    """
    if start.is_dir() and not (start / "config.json").exists():
        model = model_in(start)
        hint = f"; did you mean {model}?" if model is not None else ""
        raise ArgumentError(f"train: {start} has no config.json, which a folder to start from has{hint}")


class Run:
    """The parts of a run, put together."""

    def __init__(self, options: Options, folder: Path, ranks: Ranks, console: Console) -> None:
        self.options, self.folder, self.ranks = options, folder, ranks
        self._console = console
        if options.start:
            _require_model(Path(options.start))
        require_tensorboard(options.tensorboard)
        self.language: Language = read_language(options.tokenizer, options.start)
        if options.sample_tokens and not self.language.tokens(options.prompt.encode()).numel():
            raise ArgumentError(
                f"train: the prompt must have a token, got {options.prompt!r}; for no sample set sample_tokens to 0"
            )
        self.corpus: Corpus = read_corpus(options.data, options.suffixes, options.heldout_bytes)
        self.heldout = [self.language.tokens(document.content) for document in self.corpus.heldout]
        documents = [self.language.tokens(document.content) for document in self.corpus.training]
        self.stream = Stream(documents, options.sequence_length, seed=options.seed, packing=options.packing)
        model = self._make_model()
        self.config = model.config
        objective = Objective(model, ranks.add_up)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.weights = Weights(objective, self.precision, ranks)
        self.optimizers = Optimizers(self.weights.named, options)
        self.trainer = Trainer(options, objective, self.weights, self.optimizers, self.stream, ranks, folder)
        self.checkpoints = Checkpoints(folder, options.keep, ranks)
        self.tokens = 0
        self.skus: list[str] = []

    @property
    def precision(self) -> torch.dtype:
        if self.options.precision == "auto":
            return torch.bfloat16 if self.ranks.device.type == "cuda" else torch.float32
        return getattr(torch, self.options.precision)  # type: ignore[no-any-return]

    def _make_model(self) -> HybridLM:
        """Makes the model in float32. Its weights are drawn on the CPU, so they are the same for every device."""
        if self.options.start:
            model = HybridLM.from_pretrained(self.options.start, dtype=torch.float32)
            if model.config.vocab_size < self.language.vocabulary:
                raise ArgumentError(
                    f"train: the tokenizer has {self.language.vocabulary} tokens, and the model in "
                    f"{self.options.start} {model.config.vocab_size}; use the model's own"
                )
        else:
            torch.manual_seed(self.options.seed)
            model = HybridLM(PRESETS[self.options.preset].config(self.language.vocabulary), dtype=torch.float32)
        model = model.to(self.ranks.device).train()
        model.gradient_checkpointing_enable(self.options.activation_checkpointing)
        if self.options.compile:
            for layer in model.model.layers:
                layer.compile()
        return model

    # ------------------------------------------------------------------------------------------- the run

    def go(self, resume: bool) -> Result:
        """Runs all steps, from the first or from the newest checkpoint, and then the end of the run."""
        facts = machine.describe(self.ranks.device)
        first = self._resume(facts) if resume else 0
        if not resume:
            open_folder(self.folder, self.options, self.ranks)
        else:
            self._rewrite_options()
        metrics = Metrics(self.folder, first, self.options.tensorboard, self.ranks.is_first)
        peak = peak_of(self.ranks.device)
        flops = flops_of_token(self.config, self.options.sequence_length) if peak else None
        peak = peak and peak * self.ranks.size
        with Display(self._console, first, self.options.steps, flops, peak, self.ranks.is_first) as display:
            self._introduce(display, first)
            for step in range(first, self.options.steps):
                self._step(step, step == first and resume, metrics, display, facts)
            bits = self._evaluate(display, self.options.steps, metrics)
        self._finish(metrics, bits)
        return Result(self.folder, self.options.steps, bits)

    def _step(self, step: int, after_resume: bool, metrics: Metrics, display: Display, facts: dict[str, Any]) -> None:
        begin = time.perf_counter()
        result = self.trainer.step(step)
        seconds = time.perf_counter() - begin
        self.tokens += result.tokens
        if after_resume:
            for change in machine.changed_skus(self.skus, machine.used_skus()):
                self._warn(f"train: bits may differ from the run before it was resumed: {change}")
        speed = display.show(result, seconds)
        if result.step % self.options.log_every == 0 or result.step == self.options.steps:
            router = {"router_loss": result.router_loss} if self.trainer.objective.sparse_layers else {}
            metrics.add({
                "step": result.step, "loss": result.loss, "loss_bits": bits_of(result.loss), **router,
                "gradient_norm": result.gradient_norm, "learning_rate": result.rate, "tokens": self.tokens, **speed,
            })  # fmt: skip
        every = self.options.evaluate_every
        if every and result.step % every == 0 and result.step < self.options.steps:
            self._evaluate(display, result.step, metrics)
        if result.step % self.options.checkpoint_every == 0 or result.step == self.options.steps:
            self._save(result.step, facts)

    def _state(self, step: int, facts: dict[str, Any]) -> State:
        everything = {
            "tokens": self.tokens, "corpus": self.corpus.hash, "machine": facts, "skus": self.skus,
            "options": self._recorded,
        }  # fmt: skip
        return State(step, self.weights.named, self.optimizers.states(), everything)

    def _save(self, step: int, facts: dict[str, Any]) -> None:
        self.skus = sorted({*self.skus, *machine.used_skus()})
        self.checkpoints.save(self._state(step, facts), self.config, self.language)

    @property
    def _recorded(self) -> dict[str, Any]:
        """The options on which a checkpoint's numbers depend and that nothing else in the checkpoint records."""
        options = asdict(self.options)
        return {name: value for name, value in options.items() if name not in (*RESUMABLE, *ELSEWHERE)}

    def _resume(self, facts: dict[str, Any]) -> int:
        if not self.checkpoints.steps() and not (self.folder / "model").exists():
            self._warn(f"train: the run in {self.folder} ended before its first checkpoint, and begins again")
            return 0
        step, saved, damaged = self.checkpoints.newest()
        for sentence in damaged:
            self._warn(f"train: {sentence}")
        for name, now in self._recorded.items():
            if (then := saved.get("options", {}).get(name, now)) != now:
                raise ArgumentError(
                    f"train: the checkpoint of step {step} in {self.folder} was trained with {name} {then!r}, and "
                    f"{OPTIONS} says {now!r}; write {then!r} there, or start a new run{_from(self.folder)}"
                )
        if saved["corpus"] != self.corpus.hash:
            raise ArgumentError(
                f"train: the data is not what the run in {self.folder} was trained on: its hash was "
                f"{saved['corpus'][:16]}, and is {self.corpus.hash[:16]}"
            )
        for change in machine.differences(saved["machine"], facts):
            self._warn(f"train: bits may differ from the run before it was resumed: {change}")
        self.checkpoints.load(step, self._state(step, facts), self.config)
        self.weights.publish()
        self.tokens, self.skus = saved["tokens"], saved["skus"]
        return step

    def _rewrite_options(self) -> None:
        if self.ranks.is_first:
            with _saving(self.folder):
                write_text_atomically(self.folder / OPTIONS, self.options.to_toml())

    def _warn(self, sentence: str) -> None:
        if self.ranks.is_first:
            self._console.print(sentence, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def _introduce(self, display: Display, first: int) -> None:
        options, ranks = self.options, self.ranks
        name = f"the model in {options.start}" if options.start else f"the {options.preset} preset"
        threads = torch.get_num_threads()
        display.say(
            f"{name}, {self.parameters:,} parameters, {short(self.precision)}, on {ranks.size} × {ranks.device.type}"
            + (f" with {threads} thread{'s' * (threads > 1)}" if ranks.device.type == "cpu" else "")
        )
        display.say(self.corpus.describe())
        tokens = options.batch_rows * options.sequence_length
        left = options.steps - first
        steps = f"{left} step{'s' * (left > 1)} of {tokens:,} tokens" if left else f"all {first} steps are done"
        display.say(f"{steps}; the run is in {self.folder}")

    def _evaluate(self, display: Display, step: int, metrics: Metrics) -> float:
        bits = bits_per_byte(
            self.trainer.objective,
            self.heldout,
            count_bytes(self.corpus.heldout),
            self.options.sequence_length,
            max(1, self.options.batch_rows // self.ranks.size // self.options.accumulation),
            self.config.vocab_size,
            self.ranks,
        )
        if not metrics.has_evaluation(step):  # a run that was killed after its last evaluation has the line already
            metrics.add({"step": step, "heldout_bits_per_byte": bits})
        display.say(f"step {step}: {bits:.3f} bits per byte of held-out files")
        return bits

    # ------------------------------------------------------------------------------------------- the end

    def _finish(self, metrics: Metrics, bits: float) -> None:
        """Writes the model as a Hugging Face folder, the curve, and a sample."""
        folder = self.folder / "model"
        model = self._whole_model()
        if not self.ranks.is_first:
            return
        with _saving(self.folder):
            model.save_pretrained(folder)
            self.language.write(folder)
            write_png(self.folder / "loss.png", metrics.losses())
            summary = {"step": self.options.steps, "heldout_bits_per_byte": bits, "corpus": self.corpus.hash}
            write_text_atomically(self.folder / "result.json", json.dumps(summary, indent=1) + "\n")
        say = self._console.out
        say(in_terminal(metrics.losses()), highlight=False)
        say(f"loss curve in {self.folder / 'loss.png'}, every number in {metrics.path}", highlight=False)
        if self.options.sample_tokens:
            self._sample(folder)
        say(f"\n{bits:.3f} bits per byte of held-out files; the model opens with", highlight=False)
        say(
            f"  {shlex.join(('adjoint', 'generate', str(folder), self.options.prompt))} --temperature 0.7",
            highlight=False,
        )

    def _whole_model(self) -> HybridLM:
        """The weights in the run's precision, unsharded, on the first rank's CPU."""
        model = HybridLM(self.config, device="meta", dtype=self.precision)
        if self.ranks.is_first:
            model = model.to_empty(device="cpu")
        targets = dict(model.named_parameters())
        with torch.no_grad():
            for name, weight in self.weights.named.items():
                whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
                if self.ranks.is_first:
                    targets[name].copy_(whole)
        return model.eval()

    def _sample(self, folder: Path) -> None:
        """Generates a text with the model, which is read again from its folder."""
        model = HybridLM.from_pretrained(folder, device=self.ranks.device).eval()
        prompt = self.language.tokens(self.options.prompt.encode()).tolist()
        generator = torch.Generator(self.ranks.device).manual_seed(self.options.seed)
        torch.use_deterministic_algorithms(False)  # drawing a token has no deterministic form on a GPU
        tokens = model.generate(
            [prompt], self.options.sample_tokens, temperature=0.7, top_p=0.95, generator=generator
        )[0]  # fmt: skip
        self._console.rule("a sample")
        self._console.out((self.options.prompt + self.language.text(tokens)).rstrip(), highlight=False)
        self._console.rule()


@contextlib.contextmanager
def _saving(folder: Path) -> Any:
    try:
        yield
    except OSError as error:
        raise CannotSave(f"train: cannot write to {folder}: {error.strerror or error}") from error
