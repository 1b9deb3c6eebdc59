"""`Options`: all options that decide what a run computes. The command line and the TOML file are made from it."""

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from adjoint.core.errors import ArgumentError
from adjoint.train.presets import FINE_TUNING, PRESETS

PRECISIONS = ("float32", "bfloat16")
OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "linear", "constant")
SWITCHES = ("auto", "on", "off")
SUGGESTED = "; by default as the preset suggests"


def _option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    text = f"{help} One of {', '.join(choices)}." if choices else help
    metadata = {"help": text, "choices": choices, "least": least, "most": most, "below": below}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run. A 0 in some options stands for the value that the preset or other options suggest.

    Raises:
        ArgumentError: a value has the wrong type, is out of range, or is none of its choices. The error names the
            option.

    >>> Options(steps=10).steps
    10
    """

    preset: str = _option("tiny", "The model's size.", choices=tuple(PRESETS))
    start: str = _option("", "A Hugging Face folder to fine-tune; then there is no preset.")
    data: list[str] = _option([], "Files or folders of text; by default the source of Python's standard library.")  # noqa: RUF009
    suffixes: list[str] = _option([], "Suffixes of files to read in a folder, such as .py; by default all text files.")  # noqa: RUF009
    tokenizer: str = _option("", "A tokenizer.json, or a folder with one; bytes by default.")
    heldout_bytes: int = _option(0, f"About how many bytes to hold out, in whole files{SUGGESTED}.", least=0)
    sequence_length: int = _option(0, f"Tokens of a row{SUGGESTED}.", least=0)
    batch_rows: int = _option(0, f"Rows of a step, over all ranks and accumulation steps{SUGGESTED}.", least=0)
    accumulation: int = _option(1, "How many parts a rank's rows of a step are divided into.", least=1)
    packing: bool = _option(True, "Whether documents in a row do not see each other.")
    steps: int = _option(0, f"Steps of the whole run{SUGGESTED}.", least=0)
    learning_rate: float = _option(0.0, f"The highest learning rate{SUGGESTED}.", least=0)
    warmup_steps: int = _option(
        0, "Steps until the learning rate is at its highest; by default a tenth of all, at most 1000.", least=0
    )
    schedule: str = _option("cosine", "How the learning rate falls afterwards.", choices=SCHEDULES)
    final_rate: float = _option(0.1, "The last learning rate, as a part of the highest.", least=0, most=1)
    optimizer: str = _option("adamw", "muon is Muon for matrices, and AdamW for the rest.", choices=OPTIMIZERS)
    weight_decay: float = _option(0.1, "Weight decay of matrices; vectors have none.", least=0)
    beta1: float = _option(0.9, "Of AdamW.", least=0, below=1)
    beta2: float = _option(0.95, "Of AdamW.", least=0, below=1)
    momentum: float = _option(0.95, "Of Muon.", least=0, below=1)
    clip: float = _option(1.0, "The largest norm of a step's gradient; 0 for none.", least=0)
    precision: str = _option("auto", "The model's arithmetic; weights are float32.", choices=("auto", *PRECISIONS))
    compile: bool = _option(False, "Compile each layer with torch.compile.")
    activation_checkpointing: bool = _option(
        False, "Keep only the values between layers, and compute the others again."
    )
    deterministic: bool = _option(True, "The same bits from the same options on the same machine.")
    router_loss: float = _option(0.001, "The factor of the routers' load-balancing loss.", least=0)
    seed: int = _option(0, "The seed of weights, order of documents, and sample.", least=0, most=2**63 - 1)
    threads: int = _option(0, "Threads on the CPU; 0 for torch's default.", least=0, most=1024)
    device: str = _option("auto", "cpu or cuda; auto takes the GPU if there is one.")
    evaluate_every: int = _option(0, "Steps between evaluations; 0 for one at the end.", least=0)
    checkpoint_every: int = _option(0, "Steps between checkpoints; 0 for about five in a run.", least=0)
    keep: int = _option(2, "How many checkpoints are kept.", least=1)
    log_every: int = _option(1, "Steps between lines of metrics.jsonl.", least=1)
    tensorboard: str = _option("auto", "Write metrics for TensorBoard; auto where it is installed.", choices=SWITCHES)
    sample_tokens: int = _option(240, "Tokens of the text that is generated at the end.", least=0)
    prompt: str = _option("def ", "What the sample begins with.")

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            object.__setattr__(self, option.name, _checked(option, TYPES[option.name], value))
        if not self.start and self.preset not in PRESETS:
            raise ArgumentError(_unknown("preset", self.preset, PRESETS))

    def replace(self, **changes: Any) -> "Options":
        """The same options with some of them changed."""
        return dataclasses.replace(self, **changes)

    def complete(self) -> "Options":
        """The same options, in which values of 0 or nothing are replaced by those of the preset or of fine-tuning."""
        defaults: dict[str, Any] = dict(FINE_TUNING if self.start else PRESETS[self.preset].training)
        steps = self.steps or defaults["steps"]
        defaults |= {"warmup_steps": max(1, min(steps // 10, 1000)), "checkpoint_every": max(1, -(-steps // 5))}
        return self.replace(**{name: value for name, value in defaults.items() if not getattr(self, name)})

    def differences(self, other: "Options", names: Iterable[str] | None = None) -> list[str]:
        """The names of the options in which two runs differ."""
        named = [option.name for option in fields(self)] if names is None else names
        return [name for name in named if getattr(self, name) != getattr(other, name)]

    def to_toml(self) -> str:
        """The text of a file that `read_toml` reads, with every option and its meaning."""
        lines = ["# The options of an `adjoint train` run: adjoint train --config THIS_FILE starts it again.", ""]
        for option in fields(self):
            lines += [f"# {option.metadata['help']}", f"{option.name} = {_toml(getattr(self, option.name))}", ""]
        return "\n".join(lines)


TYPES: dict[str, Any] = get_type_hints(Options)
"""The type of each option."""

RESUMABLE = ("evaluate_every", "checkpoint_every", "keep", "log_every", "tensorboard", "sample_tokens", "prompt")
"""Options that a resumed run may change: its numbers do not depend on them."""


ELSEWHERE = ("start", "data", "suffixes", "tokenizer", "device", "threads")
"""Options whose effect a checkpoint records instead: the architecture, the hash of the text, the machine."""


def _checked(option: "dataclasses.Field[Any]", kind: Any, value: Any) -> Any:
    """Checks a value of an option, and converts an integer to a float where the option is one."""
    if kind is float and type(value) is int:
        value = float(value)
    is_list = get_origin(kind) is list
    right = isinstance(value, list) and all(type(item) is get_args(kind)[0] for item in value) if is_list else None
    if not (type(value) is kind if right is None else right):
        names = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
        raise ArgumentError(
            f"train: {option.name} must be {'a list of texts' if is_list else names[kind]}, got {value!r}"
        )
    try:
        "".join(value if is_list or kind is str else ()).encode()
    except UnicodeEncodeError:  # the command line has bytes that are not UTF-8
        raise ArgumentError(f"train: {option.name} must be UTF-8 text, got {value!r}") from None
    least, choices = option.metadata["least"], option.metadata["choices"]
    if least is not None and not value >= least:
        raise ArgumentError(f"train: {option.name} must be at least {least}, got {value}")
    most, below = option.metadata["most"], option.metadata["below"]
    if most is not None and value > most:
        raise ArgumentError(f"train: {option.name} must be at most {most}, got {value}")
    if below is not None and value >= below:
        raise ArgumentError(f"train: {option.name} must be below {below}, got {value}")
    if kind is float and value == float("inf"):
        raise ArgumentError(f"train: {option.name} must be finite, got {value}")
    if choices and value not in choices:
        raise ArgumentError(_unknown(option.name, value, choices))
    return value


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    """A sentence about an unknown name, with the nearest known one."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 1, 0.5)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return f"train: there is no {what} {name!r}; {hint}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, int | float) else json.dumps(value, ensure_ascii=False)


def parse_options(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Checks the names of options, and returns names and values as a dictionary.

    Raises:
        ArgumentError: there is no option with a name. The error names the nearest one.
    """
    for name in values:
        if name not in TYPES:
            raise ArgumentError(f"{_unknown('option', name, TYPES)} (in {origin})")
    return dict(values)


def refuse_zeros(values: Mapping[str, Any]) -> None:
    """Refuses a 0 that a user writes for an option in which 0 stands for a suggested value, because nobody means that.

    Raises:
        ArgumentError: such an option is 0. The error names it.
    """
    for name in (*FINE_TUNING, "warmup_steps"):
        if name in values and type(values[name]) in (int, float) and values[name] == 0:
            least = "above 0" if TYPES[name] is float else "at least 1"
            raise ArgumentError(f"train: {name} must be {least}, got 0; without it the run takes what is suggested")


def read_toml(path: Path) -> dict[str, Any]:
    """The options in a TOML file.

    Raises:
        ArgumentError: there is no such file, it is not TOML, or an option is unknown.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"train: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"train: {path} is no TOML file: {error}") from None
    return parse_options(values, str(path))
