"""The `adjoint` command: env, ops, plan, verify, certificate, audit, bench, train, generate.

Commands import what they need when they run, so that help is quick. A mistake of the user is one red
sentence and exit status 2; a check that fails is exit status 1. With `--json` data alone goes to the standard output.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from adjoint.train.command import as_command

if TYPE_CHECKING:
    import torch

app = typer.Typer(
    help="GPU kernels that come with their gradients and their guarantees.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

_WIDE = 160  # columns where nothing tells: a log is better wide than folded


Json = Annotated[bool, typer.Option("--json", help="Print data, as JSON, and nothing else.")]


def _console(*, stderr: bool = False) -> Console:
    return Console(stderr=stderr, width=None if _has_width(stderr=stderr) else _WIDE)


def _has_width(*, stderr: bool = False) -> bool:
    """Whether a terminal, or the variable COLUMNS, says how wide lines may be."""
    return (sys.stderr if stderr else sys.stdout).isatty() or "COLUMNS" in os.environ


def _print_json(data: Any) -> None:
    print(json.dumps(_in_json(data), indent=2, ensure_ascii=False))


def _in_json(value: Any) -> Any:
    """A value as JSON has it: texts for what it has no numbers for."""
    if isinstance(value, dict):
        return {name: _in_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)


def _refuse(message: object) -> NoReturn:
    _console(stderr=True).print(Text(str(message), style="red"), soft_wrap=True)
    raise typer.Exit(2)


def _device(name: str | None) -> "torch.device":
    """The named device, or the GPU if there is one."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        _refuse(f"unknown device {name!r}; devices are cpu, cuda and cuda:N")
    return device


def _present(device: "torch.device") -> "torch.device":
    """A device that is there."""
    import torch

    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        _refuse(f"torch sees {torch.cuda.device_count()} GPUs here, and {device} is none of them; use --device cpu")
    return device


def _dtype(command: str, name: str | None) -> "torch.dtype | None":
    """The named dtype of weights; None where none is named."""
    import torch

    kind = None if name is None else getattr(torch, name, None)
    if name is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        _refuse(f"{command}: --dtype must be float64, float32, bfloat16 or float16, got {name!r}")
    return kind


def _version(is_asked: bool) -> None:
    if is_asked:
        import adjoint

        print(f"adjoint {adjoint.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


# ------------------------------------------------------------------------------------------------- env


@app.command()
def env(
    import_time: Annotated[
        bool, typer.Option("--import-time", help="Measure how long importing takes, in fresh processes.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show versions, GPUs, and which backends work here and why not."""
    from adjoint.bench import environment

    machine = environment.machine()
    if import_time:
        theirs, both = _import_seconds("torch"), _import_seconds("torch, adjoint")
        machine["import_seconds"] = {"torch": theirs, "adjoint": max(0.0, both - theirs)}
    if as_json:
        _print_json(machine)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, version in machine["versions"].items():
        table.add_row(name, escape(version or "not there"))
    table.add_row("CPU", escape(machine["cpu"]))
    for device, gpu in machine["gpus"].items():
        memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        table.add_row(device, escape(f"{gpu['name']}, compute capability {gpu['capability']}, {memory}"))
    if not machine["gpus"]:
        table.add_row("GPU", "torch sees none")
    for device, backends in machine["backends"].items():
        for backend, reason in backends.items():
            works = f"[yellow]no:[/] {escape(reason)}" if reason else "[green]works[/]"
            table.add_row(f"{backend} on {device}", works)
    if import_time:
        table.add_row("import torch", f"{machine['import_seconds']['torch']:.2f} s")
        table.add_row("import adjoint", f"{machine['import_seconds']['adjoint']:.2f} s more")
    _console().print(table)


def _import_seconds(modules: str) -> float:
    """Seconds to import in a fresh process: the median of three, after one that fills the file cache."""
    code = f"import time; start = time.perf_counter(); import {modules}; print(time.perf_counter() - start)"
    runs = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(4)
    ]
    return statistics.median(runs[1:])


# ------------------------------------------------------------------------------------------------- ops


@app.command()
def ops(
    names: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Ops to list; all by default.")] = None,
    as_json: Json = False,
) -> None:
    """List every op's plans: their dtypes, where they run, and what they promise."""
    from dataclasses import asdict

    import adjoint
    from adjoint.matrix import entries

    try:
        rows = entries(names or ())
    except adjoint.ArgumentError as error:
        _refuse(error)
    if as_json:
        _print_json([asdict(entry) for entry in rows])
        return
    console = _console()
    for op in dict.fromkeys(entry.op for entry in rows):
        console.print(Text(op, style="bold cyan"))
        for entry in rows:
            if entry.op == op:
                facts = f"{entry.plan}, {entry.direction}: {', '.join(entry.dtypes)}; {entry.where}"
                console.print(
                    Padding(Text(facts), (0, 0, 0, 2)), Padding(Text(entry.what, "dim"), (0, 0, 0, 6)), sep=""
                )


# ------------------------------------------------------------------------------------------------ plan


@app.command()
def plan(
    op: Annotated[str, typer.Argument(metavar="OP", help="An op, such as swiglu.")],
    shape: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=]SIZES[:DTYPE]",
            help="Sizes joined by x, such as 4x64, for each tensor in order. One will do where all are floating.",
        ),
    ],
    dtype: Annotated[str, typer.Option(help="Of floating tensors: float64, float32, bfloat16, float16.")] = "bfloat16",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU if there is one.")] = None,
    target: Annotated[
        str | None, typer.Option(metavar="ARCHITECTURE", help="A GPU that need not be there, such as sm_90.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Ask for triton or eager.")] = None,
    name: Annotated[str | None, typer.Option("--plan", metavar="NAME", help="Ask for one plan by name.")] = None,
    repeatable: Annotated[bool, typer.Option("--repeatable", help="Same bits on every run.")] = False,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Bits that do not depend on the rest of the batch.")
    ] = False,
    device_invariant: Annotated[
        bool, typer.Option("--device-invariant", help="The same bits on every device.")
    ] = False,
    max_workspace_bytes: Annotated[int | None, typer.Option(help="Scratch memory the plan may need.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A keyword of the op, such as padding_idx=0."),
    ] = None,
    order: Annotated[
        str | None, typer.Option(help="swiglu on one packed tensor: gate_up, up_gate or interleaved.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain which plan a call would use, what it guarantees, and why no other was taken."""
    import adjoint
    from adjoint.cli_call import read_call
    from adjoint.core.plan import explanation

    keywords = [*(settings or ()), *(f"order={value}" for value in [order] if value)]
    try:
        function, arguments = read_call(op, shape, keywords, dtype)
        preference = adjoint.Preference(
            backend=backend,
            plan=name,
            repeatable=repeatable,
            batch_invariant=batch_invariant,
            device_invariant=device_invariant,
            max_workspace_bytes=max_workspace_bytes,
        )
        where = _device(device) if target is None or device is not None else None
        chosen = adjoint.plan(function, preference=preference, device=where, target=target, **arguments)
    except (adjoint.ArgumentError, adjoint.Unsupported) as error:
        _refuse(error)
    if as_json:
        _print_json(explanation.as_data(chosen))
        return
    console, text = _console(), str(chosen)
    if _has_width():
        text = _folded(text, console.width, explanation.LABEL)
    console.print(_styled(text), soft_wrap=True)


def _folded(explanation: str, width: int, label: int) -> str:
    """A printed plan in lines of a width: the rest of a statement stands below its beginning."""
    lines, indent = [], label
    for line in explanation.splitlines():
        if line == "adjoint":
            indent += 2
        lines += textwrap.wrap(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)
    return "\n".join(lines)


def _styled(explanation: str) -> Text:
    """A printed plan with the words that open its lines, in the first ten columns of either direction, in bold."""
    text = Text(explanation)
    text.highlight_regex(r"(?m)^(  )?[a-z][a-z ]{0,9}", "bold cyan")
    return text


# ---------------------------------------------------------------------------------------------- verify


@app.command()
def verify(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="Families, ops or modes to check, all by default; files with --merge."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU if there is one.")] = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Every check on every case, not each plan and promise once.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Thorough, and every check on every dtype.")] = False,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Check in N processes; by default one for each core.")
    ] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show every check, and the SKUs that ran.")] = False,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a certificate: FILE.json and FILE.html.")
    ] = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Run every N-th check, from the I-th on, such as 2/4.")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the rows to a file, as JSON.")] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Check nothing; write the errors of these ops' cases here to a folder, as JSON."
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Show the shards in files of --save as one run; check nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check every promise on this machine, in a minute or two; exit status 1 when one does not hold."""
    import adjoint
    from adjoint.verify import command
    from adjoint.verify.parallel.shards import read_shard

    options: dict[str, Any] = {"--thorough": thorough, "--all": everything, "--jobs": jobs if merge else None}
    options |= {"--shard": shard, "--save": save, "--certificate": certificate}
    options |= {"--device": device, "--record": record} if merge else {"--json": as_json if record else None}
    alone = "--merge" if merge else "--record" if record else ""
    meaningless = [name for name, value in options.items() if value]
    if alone and meaningless:
        _refuse(f"verify: {alone} runs no check: leave out {', '.join(meaningless)}")
    console = _console(stderr=as_json)
    try:
        if certificate is not None:
            from adjoint.verify.certificate import require_writable

            require_writable(certificate)
        if record is not None:
            from adjoint.verify.record import record as record_errors

            raise typer.Exit(record_errors(console, arguments or [], _present(_device(device)), record, processes=jobs))
        if merge:
            outcome = command.merge(console, [Path(argument) for argument in arguments or []], verbose)
        else:
            outcome = command.check(
                console,
                arguments or [],
                _present(_device(device)),
                deep=command.EVERYTHING if everything else command.THOROUGH if thorough else command.QUICK,
                processes=jobs,
                shard=read_shard("1/1" if shard is None else shard),
                path=save,
                verbose=verbose,
            )
    except adjoint.ArgumentError as error:
        _refuse(error)
    if certificate is not None:
        from adjoint.verify.certificate import describe
        from adjoint.verify.certificate import save as save_certificate

        for file in save_certificate(describe(outcome.rows, outcome.facts), certificate):
            console.print(f"{file}", highlight=False)
    if as_json:
        _print_json(outcome.data)
    raise typer.Exit(outcome.status)


# ----------------------------------------------------------------------------------------- certificate

certificates = typer.Typer(help="Read certificates that `verify --certificate` wrote.", no_args_is_help=True)
app.add_typer(certificates, name="certificate")


@certificates.callback()
def _certificates() -> None:
    pass


@certificates.command("compare")
def compare_certificates(
    first: Annotated[Path, typer.Argument(metavar="A", help="A certificate.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show everything that differs.")] = False,
    as_json: Json = False,
) -> None:
    """Show what differs between two machines, versions or dates; exit status 1 when that breaks a promise."""
    from dataclasses import asdict

    import adjoint
    from adjoint.verify.certificate import comparison, load

    try:
        differences = comparison.compare(load(first), load(second))
    except adjoint.ArgumentError as error:
        _refuse(error)
    if as_json:
        _print_json(asdict(differences))
    else:
        comparison.show(_console(), differences, verbose=verbose)
    raise typer.Exit(1 if differences.broken else 0)


# ----------------------------------------------------------------------------------------------- audit


@app.command()
def audit(
    folder: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder: config.json, safetensors.")],
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The text that the model reads; by default one that is shipped.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Read at most so many tokens of it.")] = 512,
    dtype: Annotated[str | None, typer.Option(help="Of the weights; by default as the checkpoint says.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU if there is one.")] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write FILE.json and FILE.html.")] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show every output of every layer.")] = False,
    as_json: Json = False,
) -> None:
    """Compare every op of a model, on a text, with float64 and its bound; exit status 1 when one is past it."""
    import adjoint
    from adjoint.verify.audit.checkpoint import audit_checkpoint

    console = _console(stderr=as_json)
    try:
        report = audit_checkpoint(folder, text, max_tokens, _dtype("audit", dtype), _present(_device(device)))
        files = report.save(save) if save is not None else ()
    except (adjoint.ArgumentError, adjoint.Unsupported) as error:
        _refuse(error)
    if as_json:
        _print_json(report.as_data())
    else:
        report.show(console, verbose=verbose)
    for file in files:
        console.print(f"{file}", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if report.is_sound else 1)


# ----------------------------------------------------------------------------------------------- bench


@app.command()
def bench(
    ops: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Ops to time; all by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU if there is one.")] = None,
    rows: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Only workloads with this in their name; may be repeated.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this peer, such as FLA; may be repeated.")
    ] = None,
    compile: Annotated[bool, typer.Option("--compile/--no-compile", help="Time torch.compile as well.")] = True,
    errors: Annotated[
        bool, typer.Option("--errors", help="Measure errors, beside promises and peers, and time nothing.")
    ] = False,
    overhead: Annotated[
        bool, typer.Option("--overhead", help="Time the host cost of a call on a small tensor instead.")
    ] = False,
    save: Annotated[bool, typer.Option("--save", help="Merge the times into the results of this machine.")] = False,
    results: Annotated[Path, typer.Option(help="The folder of saved results.")] = Path("benchmarks/results"),
    readme: Annotated[
        bool,
        typer.Option(
            "--readme", help="Write the saved GPU results into docs/benchmarks.md; times nothing without --save."
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the times, with matplotlib; with --readme, the saved ones and their errors."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Time ours beside torch eager, torch.compile and peers; no time is shown for a wrong result."""
    import adjoint
    from adjoint.bench import command

    console, passed = _console(stderr=as_json), True
    data: Any = None
    target = _present(_device(device))
    try:
        if overhead:
            data = command.overhead(console, target, as_json)
        elif errors:
            folder = results.with_name("errors")
            if save or not readme:
                passed = command.accuracy(
                    console, ops or [], target, rows=rows or (), peers=peer, folder=folder if save else None
                )
            if readme:
                command.errors_page(console, Path("docs/errors.md"), folder)
        elif save or not readme:
            if save:
                try:
                    results.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    _refuse(f"cannot save results in {results}: {error}")
            passed, data = command.times(
                console,
                ops or [],
                target,
                rows=rows or (),
                peers=peer,
                compile=compile,
                folder=results if save else None,
                plot=plot,
                as_data=as_json,
            )
        if readme and not errors:
            command.readme(console, [Path("docs/benchmarks.md")], results)
            if plot is not None and not save:
                command.pictures(console, plot, results)
    except (adjoint.ArgumentError, adjoint.Unsupported) as error:
        _refuse(error)
    if as_json:
        _print_json(data)
    raise typer.Exit(0 if passed else 1)


# ----------------------------------------------------------------------------------------------- train


@app.command()
@as_command
def train(**values: Any) -> None:
    """Train a hybrid model: by default a small one, on the Python standard library's source, in two CPU minutes."""
    import adjoint
    from adjoint.train.command import run
    from adjoint.train.stops import STOPS

    try:
        run(_console(), values)
    except (adjoint.ArgumentError, adjoint.Unsupported) as error:
        _refuse(error)
    except STOPS as error:
        _console(stderr=True).print(Text(str(error), style="red"), soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        _console(stderr=True).print(Text("train: interrupted; --resume FOLDER goes on from the last checkpoint"))
        raise typer.Exit(130) from None


# -------------------------------------------------------------------------------------------- generate


@app.command()
def generate(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint folder: config.json, safetensors.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="A text, or token ids with --tokens.")],
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Prompt and output are token ids, and no tokenizer is needed.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="At most so many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Choose among the K most likely.")] = None,
    top_p: Annotated[float | None, typer.Option(metavar="P", help="Choose among those that add up to P.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random choices.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="Of the weights; by default as the checkpoint says.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU if there is one.")] = None,
) -> None:
    """Continue a prompt with a checkpoint of Qwen3-Next, Qwen3.5 or Qwen3.5-MoE."""
    import torch

    import adjoint
    from adjoint.models import HybridLM
    from adjoint.models.text import TokenIds, text_of

    target = _present(_device(device))
    kind = _dtype("generate", dtype)
    try:
        language = TokenIds() if tokens else text_of(folder)
        model = HybridLM.from_pretrained(folder, device=target, dtype=kind).eval()
        steps = model.stream(
            [language.encode(prompt)],
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            generator=torch.Generator(target).manual_seed(seed),
        )
        for piece in language.decode(token for (token,) in steps if token is not None):
            print(piece, end="", flush=True)
        print()
    except (adjoint.ArgumentError, adjoint.Unsupported) as error:
        _refuse(error)


def main() -> None:
    """The entry point of the `adjoint` command."""
    app()
