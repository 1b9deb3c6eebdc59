"""`adjoint bench`: times and errors beside torch and other libraries."""

from pathlib import Path
from typing import Annotated, Any

import typer

from adjoint.cli.options import Json, device_of, require_present
from adjoint.cli.terminal import make_console, print_json, refuse


def bench(
    ops: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Ops to time; all by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU if there is one.")] = None,
    rows: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Only workloads whose name contains this; may be repeated.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this peer, such as FLA; may be repeated.")
    ] = None,
    compile: Annotated[bool, typer.Option("--compile/--no-compile", help="Time torch.compile as well.")] = True,
    errors: Annotated[
        bool, typer.Option("--errors", help="Measure errors instead, beside promises and peers.")
    ] = False,
    overhead: Annotated[
        bool, typer.Option("--overhead", help="Time the host cost of a call on a small tensor instead.")
    ] = False,
    save: Annotated[bool, typer.Option("--save", help="Merge the times into the results of this machine.")] = False,
    results: Annotated[Path, typer.Option(help="The folder of saved results.")] = Path("benchmarks/results"),
    readme: Annotated[
        bool,
        typer.Option("--readme", help="Write the saved GPU results into docs/benchmarks.md; with --save, time first."),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the times with matplotlib; with --readme, the saved times and errors."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Time our ops beside torch eager, torch.compile and peers. A wrong result gets no time."""
    import adjoint
    from adjoint.bench import command

    console, passed = make_console(stderr=as_json), True
    data: Any = None
    target = require_present(device_of(device))
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
                    refuse(f"cannot save results in {results}: {error}")
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
        refuse(error)
    if as_json:
        print_json(data)
    raise typer.Exit(0 if passed else 1)
