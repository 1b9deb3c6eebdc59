"""`adjoint ops` and `adjoint plan`: all plans, and the plan that a call would use."""

import textwrap
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from adjoint.cli.options import Json, device_of
from adjoint.cli.terminal import has_width, make_console, print_json, refuse


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
        refuse(error)
    if as_json:
        print_json([asdict(entry) for entry in rows])
        return
    console = make_console()
    for op in dict.fromkeys(entry.op for entry in rows):
        console.print(Text(op, style="bold cyan"))
        for entry in rows:
            if entry.op == op:
                facts = f"{entry.plan}, {entry.direction}: {', '.join(entry.dtypes)}; {entry.where}"
                console.print(
                    Padding(Text(facts), (0, 0, 0, 2)), Padding(Text(entry.what, "dim"), (0, 0, 0, 6)), sep=""
                )


def plan(
    op: Annotated[str, typer.Argument(metavar="OP", help="An op, such as swiglu.")],
    shape: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=]SIZES[:DTYPE]",
            help="Sizes joined by x, such as 4x64, for each tensor in order. If all are floating, one stands for all.",
        ),
    ],
    dtype: Annotated[
        str, typer.Option(help="Floating tensors' dtype: float64, float32, bfloat16, float16.")
    ] = "bfloat16",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU if there is one.")] = None,
    target: Annotated[
        str | None, typer.Option(metavar="ARCHITECTURE", help="Plan for a GPU that need not be present, such as sm_90.")
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
    max_workspace_bytes: Annotated[
        int | None, typer.Option(help="The most scratch memory that the plan may need.")
    ] = None,
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
    from adjoint.cli.call import read_call
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
        where = device_of(device) if target is None or device is not None else None
        chosen = adjoint.plan(function, preference=preference, device=where, target=target, **arguments)
    except (adjoint.ArgumentError, adjoint.Unsupported) as error:
        refuse(error)
    if as_json:
        print_json(explanation.as_data(chosen))
        return
    console, text = make_console(), str(chosen)
    if has_width():
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
