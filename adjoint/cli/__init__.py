"""The `adjoint` command: env, ops, plan, verify, certificate, audit, bench, train, generate.

Commands import modules when they run, so that help is quick. A mistake of the user gives one red sentence and the exit
status 2. A check that fails gives the exit status 1. With `--json` only data goes to the standard output.
"""

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from adjoint.cli import bench, env, models, plan, verify

app = typer.Typer(
    help="GPU kernels that come with their gradients and their guarantees.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


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


COMMANDS: tuple[Callable[..., None], ...] = (
    env.env,
    plan.ops,
    plan.plan,
    verify.verify,
    verify.audit,
    bench.bench,
    models.train,
    models.generate,
)
for command in COMMANDS:
    app.command()(command)
app.add_typer(verify.certificates, name="certificate")


def main() -> None:
    """The entry point of the `adjoint` command.

    A terminal that lacks a character gets its escape, and an output that cannot be written is one sentence.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered is written at the exit again
        print(f"the output cannot be written: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None
