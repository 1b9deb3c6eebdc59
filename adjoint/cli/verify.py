"""`adjoint verify`, `adjoint certificate` and `adjoint audit`: whether plans keep their promises."""

from pathlib import Path
from typing import Annotated, Any

import typer

from adjoint.cli.options import Json, device_of, dtype_of, require_present
from adjoint.cli.terminal import make_console, print_json, refuse


def verify(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="Families, ops or modes to check, all by default; files with --merge."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU if there is one.")] = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Run every check on every case, not each plan and promise once.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="As --thorough, with every check in every dtype.")] = False,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Check in N processes; by default one for each core.")
    ] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show every check, and the SKUs that ran.")] = False,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a certificate: FILE.json and FILE.html.")
    ] = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Run every N-th check, beginning with the I-th, such as 2/4.")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the rows to a file, as JSON.")] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Check nothing; measure the errors of these ops' cases and write them to a folder."
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Check nothing; show shards, from files of --save, as one run.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check every promise on this machine, in a minute or two. The exit status is 1 if one does not hold."""
    import adjoint
    from adjoint.verify import command
    from adjoint.verify.parallel.shards import read_shard
    from adjoint.verify.report.files import require_writable

    options: dict[str, Any] = {"--thorough": thorough, "--all": everything, "--jobs": jobs if merge else None}
    options |= {"--shard": shard, "--save": save, "--certificate": certificate}
    options |= {"--device": device, "--record": record} if merge else {"--json": as_json if record else None}
    alone = "--merge" if merge else "--record" if record else ""
    meaningless = [name for name, value in options.items() if value]
    if alone and meaningless:
        refuse(f"verify: {alone} runs no check: leave out {', '.join(meaningless)}")
    console = make_console(stderr=as_json)
    try:
        if certificate is not None:
            require_writable("verify: --certificate", certificate)
        if record is not None:
            from adjoint.verify.record import record as record_errors

            raise typer.Exit(
                record_errors(console, arguments or [], require_present(device_of(device)), record, processes=jobs)
            )
        if merge:
            outcome = command.merge(console, [Path(argument) for argument in arguments or []], verbose)
        else:
            outcome = command.check(
                console,
                arguments or [],
                require_present(device_of(device)),
                deep=command.EVERYTHING if everything else command.THOROUGH if thorough else command.QUICK,
                processes=jobs,
                shard=read_shard("1/1" if shard is None else shard),
                path=save,
                verbose=verbose,
            )
    except adjoint.ArgumentError as error:
        refuse(error)
    if certificate is not None:
        from adjoint.verify.certificate import describe
        from adjoint.verify.certificate import save as save_certificate

        try:
            for file in save_certificate(describe(outcome.rows, outcome.facts), certificate):
                console.print(f"{file}", highlight=False, soft_wrap=True)
        except adjoint.ArgumentError as error:
            refuse(error)
    if as_json:
        print_json(outcome.data)
    raise typer.Exit(outcome.status)


certificates = typer.Typer(help="Read certificates that `verify --certificate` wrote.", no_args_is_help=True)


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
    """Show what differs between two machines, versions or dates. The exit status is 1 if it breaks a promise."""
    from dataclasses import asdict

    import adjoint
    from adjoint.verify.certificate import comparison, load

    try:
        differences = comparison.compare(load(first), load(second))
    except adjoint.ArgumentError as error:
        refuse(error)
    if as_json:
        print_json(asdict(differences))
    else:
        comparison.show(make_console(), differences, verbose=verbose)
    raise typer.Exit(1 if differences.broken else 0)


def audit(
    folder: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder: config.json, safetensors.")],
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The text that the model reads; by default one from the package."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="The most tokens of the text to read.")] = 512,
    dtype: Annotated[str | None, typer.Option(help="The dtype of the weights; by default the checkpoint's.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU if there is one.")] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write FILE.json and FILE.html.")] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show every output of every layer.")] = False,
    as_json: Json = False,
) -> None:
    """Compare every op of a model, on a text, with float64 and its bound. The exit status is 1 unless all are sound."""
    import adjoint
    from adjoint.verify.audit.checkpoint import audit_checkpoint
    from adjoint.verify.report.files import require_writable

    console = make_console(stderr=as_json)
    try:
        if save is not None:
            require_writable("audit: --save", save)
        report = audit_checkpoint(
            folder, text, max_tokens, dtype_of("audit", dtype), require_present(device_of(device))
        )
    except (adjoint.ArgumentError, adjoint.Unsupported) as error:
        refuse(error)
    if as_json:
        print_json(report.as_data())
    else:
        report.show(console, verbose=verbose)
    try:
        for file in report.save(save) if save is not None else ():
            console.print(f"{file}", highlight=False, soft_wrap=True)
    except adjoint.ArgumentError as error:
        refuse(error)
    raise typer.Exit(0 if report.is_sound else 1)
