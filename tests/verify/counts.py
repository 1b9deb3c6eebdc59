"""How many outputs have recorded figures on each machine, as docs/concepts.md shows: `python -m tests.verify.counts`
writes that table anew."""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from adjoint.verify import figures

PAGE = Path(__file__).parents[2] / "docs" / "concepts.md"
BEGIN, END = "<!-- recorded:begin -->\n", "<!-- recorded:end -->"

DTYPES = ("float32", "bfloat16", "float16")


def machines() -> list[str]:
    return sorted(folder.name for folder in figures.FOLDER.iterdir() if folder.is_dir())


def recorded(machine: str) -> dict[tuple[figures.Place, str], float]:
    """Every figure of a machine by case and output."""
    return {
        (figures.Place(machine, dtype, subject, plans, case), output): figure
        for dtype in DTYPES
        for subject, by_plans in (figures.load(machine, dtype) or {}).items()
        for plans, by_case in by_plans.items()
        for case, by_output in by_case.items()
        for output, figure in by_output.items()
    }


class Counts(NamedTuple):
    """Of ops × outputs × dtypes that have figures: those that notice a doubled error, and those that had no error at
    all on any case, and notice every one. The rest notice neither."""

    all: int
    doubled: int
    exact: int


def counts(machine: str) -> Counts:
    by_output = defaultdict(list)
    for (place, output), figure in recorded(machine).items():
        by_output[place.subject, output, place.dtype].append(figure)
    exact = sum(not any(found) for found in by_output.values())
    return Counts(len(by_output), len(by_output) - exact, exact)


def table() -> str:
    head = "| machine | ops × outputs × dtypes | notice an error that doubles | had no error, and notice any |\n"
    rows = [f"| {name} | {' | '.join(map(str, counts(name)))} |\n" for name in machines()]
    return f"\n{head}|---|---:|---:|---:|\n{''.join(rows)}\n"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + table() + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
