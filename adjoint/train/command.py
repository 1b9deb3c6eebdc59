"""The command `adjoint train`. Its options are those of `Options`, and a few that name files and the run's folder."""

import inspect
import os
import time
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
from rich.console import Console

from adjoint.train.options import TYPES, Options, read_toml, refuse_zeros
from adjoint.train.stops import Interrupted

_NAMES = {"start": "--from"}


def parameters() -> list[inspect.Parameter]:
    """A parameter of the command for each option. Its value is None if the user does not set it."""
    own = {
        "out": (Path | None, "--out", "The run's folder; a new one under runs/ by default."),
        "resume": (Path | None, "--resume", "Go on with the run in this folder, from its newest checkpoint."),
        "config": (Path | None, "--config", "A TOML file with options; those of the command line come first."),
    }
    result = [_parameter(name, *rest) for name, rest in own.items()]
    for option in fields(Options):
        kind = TYPES[option.name]
        flag = _NAMES.get(option.name, f"--{option.name.replace('_', '-')}")
        default = option.default if option.default is not MISSING else []
        shown = "" if default in ("", [], 0, 0.0) and kind is not bool else f" By default {_shown(default)}."
        if kind is bool:
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
        elif get_origin(kind) is list:
            shown = " May be repeated."
        result.append(_parameter(option.name, kind | None, flag, option.metadata["help"] + shown))
    return result


def _parameter(name: str, kind: Any, flag: str, text: str) -> inspect.Parameter:
    annotation = Annotated[kind, typer.Option(flag, help=text, show_default=False)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _shown(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def as_command(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a function that takes `**values` the parameters of the command."""
    function.__signature__ = inspect.Signature(parameters())  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters()}
    return function


def run(console: Console, values: dict[str, Any]) -> None:
    """Starts a run or resumes one.

    Raises:
        ArgumentError, Unsupported: a mistake of the user.
        CannotSave, NotFinite, RankLost: the run stopped.
        Interrupted: the user stopped it.
    """
    from adjoint.core.errors import ArgumentError
    from adjoint.train.run import read_options

    out, resume, config = (values.pop(name) for name in ("out", "resume", "config"))
    changes = {name: value for name, value in values.items() if value not in (None, [])}
    if resume is not None:
        if out is not None or config is not None:
            raise ArgumentError("train: --resume goes on with the options of its folder: leave out --out and --config")
        _train(read_options(resume, changes), resume, resume=True, console=console)
        return
    if "start" in changes and "preset" in changes:
        raise ArgumentError("train: --from names the model, and --preset another: leave one of them out")
    written = read_toml(config) if config is not None else {}
    refuse_zeros({**written, **changes})
    options = Options(**written).replace(**changes)
    if out is None:
        if "RANK" in os.environ:
            raise ArgumentError("train: under torchrun name the run's folder, with --out, for all ranks alike")
        name = "fine-tuned" if options.start else options.preset
        out = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    _train(options, out, resume=False, console=console)


def _train(options: Options, folder: Path, *, resume: bool, console: Console) -> None:
    """Trains until the end or until Ctrl-C, which becomes an `Interrupted` with a sentence."""
    from adjoint.train.run import OPTIONS, train

    try:
        train(options, folder, resume=resume, console=console)
    except KeyboardInterrupt:
        if any(folder.glob("checkpoints/step-*")):
            raise Interrupted(f"train: interrupted; --resume {folder} goes on from its last checkpoint") from None
        if (folder / OPTIONS).exists():
            raise Interrupted(
                f"train: interrupted before the first checkpoint; --resume {folder} begins the run again"
            ) from None
        raise Interrupted("train: interrupted before the run began") from None
