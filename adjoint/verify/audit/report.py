"""The report of an audit: a table by layer, the worst results with their reasons, and both as JSON and as a page."""

import io
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from adjoint.core.errors import ArgumentError
from adjoint.verify.audit.observer import Entry
from adjoint.verify.report.files import paths
from adjoint.verify.report.html import details, page, table

WORST = 10

NOTHING = (
    "Nothing was compared: the model called no op of adjoint. A model of transformers calls them after "
    "adjoint.integrations.transformers.patch(model); inside torch.compile calls are not seen."
)


@dataclass(frozen=True)
class Report:
    """The results of every op that a model called, in the order in which they were computed.

    Attributes:
        parameters: sentences about parameters and buffers that are not finite.
        has_backward: whether gradients were seen. A frozen model has none.
        loss: the number that was differentiated.
    """

    entries: list[Entry]
    parameters: list[str]
    has_backward: bool
    loss: float | None

    @property
    def broken(self) -> list[Entry]:
        """The results that are past their bounds."""
        return [entry for entry in self.entries if entry.is_broken]

    @property
    def suspect(self) -> list[Entry]:
        """The results with remarks: inputs outside the domain, results that are not finite or not compared."""
        return [entry for entry in self.entries if entry.remarks]

    @property
    def is_sound(self) -> bool:
        """Whether there are results, and all were compared, within their bounds, inside the domain and finite."""
        return bool(self.entries) and not (self.broken or self.suspect or self.parameters)

    @property
    def worst(self) -> list[Entry]:
        """The ten worst results: first those past their bounds, then those with remarks, then by share of the bound."""
        place = {id(entry): number for number, entry in enumerate(self.entries)}

        def rank(entry: Entry) -> tuple[float, float]:
            if entry.is_broken:
                return 0, -entry.share
            return (1, place[id(entry)]) if entry.remarks else (2, -entry.share)

        return sorted(self.entries, key=rank)[:WORST]

    def __str__(self) -> str:
        stream = io.StringIO()
        self.show(Console(file=stream, width=100))
        return stream.getvalue().rstrip()

    def show(self, console: Console, *, verbose: bool = False) -> None:
        """Prints a line for each op of each layer and direction (for each output with `verbose`), and the worst results
        with their reasons."""
        if not self.entries:
            console.print(NOTHING, highlight=False)
            return
        groups = [[entry] for entry in self.entries] if verbose else _groups(self.entries)
        for layer in dict.fromkeys(entry.layer for entry in self.entries):
            console.print(Text(layer, "bold cyan"), soft_wrap=True)
            for group in groups:
                if group[0].layer == layer:
                    _show_line(console, group, verbose=verbose)
        console.print(Text("The worst", "bold"))
        for entry in self.worst:
            style = "red" if entry.is_broken else "yellow" if entry.remarks else ""
            console.print(Padding(Text(f"{_where(entry)}: {_reason(entry)}", style), (0, 0, 0, 2)))
        for words in self.parameters:
            console.print(Text(f"The parameter {words}", "red"))
        if not self.has_backward:
            console.print("No gradient was seen: no parameter that an op depends on requires one.", highlight=False)
        console.print(self.summary, highlight=False)

    @property
    def summary(self) -> str:
        if not self.entries:
            return NOTHING
        layers = len({entry.layer for entry in self.entries})
        compared = sum(entry.measured is not None for entry in self.entries)
        return (
            f"{compared} of {len(self.entries)} results of {layers} layer{'s' * (layers != 1)} compared: "
            f"{len(self.broken)} past the bound, {len(self.suspect)} with remarks"
        )

    # ------------------------------------------------------------------------------------------- files

    def as_data(self) -> dict[str, Any]:
        """The whole report as JSON types."""
        return {
            "summary": self.summary,
            "sound": self.is_sound,
            "loss": self.loss,
            "parameters": self.parameters,
            "worst": [_data(entry) for entry in self.worst],
            "entries": [_data(entry) for entry in self.entries],
        }

    def save(self, path: Path | str) -> tuple[Path, Path]:
        """Writes the report as JSON and as a page beside it, and returns both paths."""
        data, html = paths(Path(path))
        try:
            data.write_text(json.dumps(self.as_data(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            html.write_text(self.as_page(), encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"audit: cannot write a report to {path}: {error.strerror}") from error
        return data, html

    def as_page(self) -> str:
        """The report as one page of HTML that needs no other file."""
        verdict = "passed" if self.is_sound else "failed"
        words = "Every result is within its bound" if self.is_sound else "Some results need a look"
        rows = [
            (_name(lines[0]), lines[0].direction, ", ".join(dict.fromkeys(e.plan for e in lines)), _headroom(lines))
            for lines in _groups(self.entries)
        ]
        every = [
            (e.layer, e.op, e.direction, e.output, e.plan, _measured(e), e.promise, e.reference, "; ".join(e.remarks))
            for e in self.entries
        ]
        heads = ("layer", "op", "direction", "output", "plan", "measured", "promise", "beside", "remarks")
        parts = [
            f'<p class="verdict {verdict}">{words}</p><p>{self.summary}.</p>',
            "<h2>The worst</h2>",
            table(("where", "reason"), [(_where(entry), _reason(entry)) for entry in self.worst]),
            table(("parameter",), [(words,) for words in self.parameters]) if self.parameters else "",
            "<h2>Layers</h2>",
            "<p>The largest error of all outputs, as a share of the bound that the plan states.</p>",
            table(("layer and op", "direction", "plan", "error"), rows),
            details(f"Every output: {len(every)} lines", table(heads, every)),
        ]
        return page("An audit by adjoint", "".join(parts))


def _data(entry: Entry) -> dict[str, Any]:
    numbers = {"share": entry.share, "measured": entry.measured, "limit": entry.limit}
    return asdict(entry) | {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in numbers.items()
    }


def _groups(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Groups the results by layer, op and direction."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.layer, entry.op, entry.direction), []).append(entry)
    return list(groups.values())


def _name(entry: Entry) -> str:
    return f"{entry.layer} {entry.op}"


def _where(entry: Entry) -> str:
    return f"{entry.layer}: {entry.op}, {entry.direction}, {entry.output}"


def _measured(entry: Entry) -> str:
    if entry.measured is None:
        return "not compared"
    if not entry.is_finite and not entry.is_broken:
        return "not finite"
    if entry.unit == "of the bound":
        return f"{100 * entry.measured:.4g}% of the bound"
    return f"{entry.measured:.3g} {entry.unit} (limit {entry.limit:.3g})"


def _headroom(lines: list[Entry]) -> str:
    """The largest share of a bound, and the factor by which that error is smaller than its bound."""
    error, headroom = _columns(lines)
    return ", ".join(filter(None, (error, headroom)))


def _columns(lines: list[Entry]) -> tuple[str, str]:
    """The largest share of a bound, and the headroom that it leaves."""
    if all(entry.measured is None for entry in lines):
        return "not compared", ""
    share = max(entry.share for entry in lines)
    if share <= 1 and not all(entry.is_finite for entry in lines):
        return "not finite", ""
    percent = f"{100 * share:.3g}%" if share < 10 else "over 999%"
    error = f"{'FAILED ' if share > 1 else ''}{percent} of the bound"
    return error, "" if share > 1 else "exact" if not share else f"headroom {_factor(1 / share)}×"


def _factor(value: float) -> str:
    """A factor in at most five characters."""
    return f"{value:.1f}" if value < 10 else f"{value:.0f}" if value < 1e5 else f"{value:.0e}".replace("e+0", "e")


def _show_line(console: Console, lines: list[Entry], *, verbose: bool) -> None:
    """Prints an op of a layer in one direction, in a line of fewer than 80 columns, and its remarks beneath it."""
    entry, (error, headroom) = lines[0], _columns(lines)
    style = "red" if any(x.is_broken for x in lines) else "yellow" if any(x.remarks for x in lines) else ""
    op = f"{entry.op} {entry.output}" if verbose else entry.op
    console.print(Text(f"  {op:<25} {entry.direction:<8}  {error:>24}  {headroom}".rstrip(), style), soft_wrap=True)
    for remark in dict.fromkeys(remark for x in lines for remark in x.remarks):
        console.print(Padding(Text(remark, style), (0, 0, 0, 6)))


def _reason(entry: Entry) -> str:
    parts = [*entry.remarks]
    if entry.measured is not None:
        parts.append(f"{_measured(entry)} by {entry.plan}, beside the {entry.reference}: {entry.promise}")
    return "; ".join(parts)
