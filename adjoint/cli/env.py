"""`adjoint env`: the machine and its versions."""

import statistics
import subprocess
import sys
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from adjoint.cli.options import Json
from adjoint.cli.terminal import make_console, print_json


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
        print_json(machine)
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
    make_console().print(table)


def _import_seconds(modules: str) -> float:
    """Seconds to import modules in a fresh process: the median of three runs, after one that fills the file cache."""
    code = f"import time; start = time.perf_counter(); import {modules}; print(time.perf_counter() - start)"
    runs = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(4)
    ]
    return statistics.median(runs[1:])
