"""The mutation score by family: from the outcomes of a run of all mutants to `score.json`, and from there to the docs.

    python -m tests.mutants.run --jobs 16 --out mutants.jsonl
    python -m tests.mutants.report mutants.jsonl --write

The outcomes must be those of the tree as it is: a mutant that they lack, or one of other sources, is an error.
`--family` counts the named families alone; the others keep the score that is saved, with its commit and its date.
"""

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.mutants.checks import MODULES
from tests.mutants.processes import KILLED, SURVIVED, TIMED_OUT, UNDECIDED

SCORE = Path(__file__).with_name("score.json")
PAGE = Path(__file__).parents[2] / "docs" / "mutants.md"
BEGIN, END = "<!-- mutants:begin -->\n", "<!-- mutants:end -->"

OUTCOMES = (KILLED, TIMED_OUT, SURVIVED, UNDECIDED)
EQUIVALENT = "equivalent"


def summarise(file: Path, commit: str, date: str, families: Iterable[str] | None = None) -> dict[str, Any]:
    """The outcomes of all mutants of families, counted, and those that survive; by family."""
    from tests.mutants import run  # which turns the interpreter on

    known = run.known(file)
    score = {}
    for family in MODULES if families is None else families:
        trials = run.trials([family])
        missing = [trial for trial in trials if trial.key not in known]
        if missing:
            first = missing[0].mutant
            raise SystemExit(
                f"{file} lacks {len(missing)} of the {len(trials)} mutants of {family}, such as {first.module}, "
                f"{first.function}: {first.change}; run tests.mutants.run on this tree"
            )
        results = [known[trial.key] for trial in trials]
        counts = Counter(result["outcome"] for result in results)
        survivors = [
            f"{result['module']}, {result['function']}: {result['change']}"
            for result in results
            if result["outcome"] in (SURVIVED, UNDECIDED)
        ]
        score[family] = {
            "commit": commit,
            "date": date,
            **{outcome: counts[outcome] for outcome in OUTCOMES},
            EQUIVALENT: len(run.trials([family], of_equivalent=True)),
            "survivors": survivors,
        }
    return score


def merged(saved: dict[str, Any], counted: dict[str, Any]) -> dict[str, Any]:
    """The score of every family: as counted now, or as it was saved. A family without any is left out."""
    every = saved | counted
    return {family: every[family] for family in MODULES if family in every}


def score_of(counts: dict[str, int]) -> float:
    """The share of mutants that are noticed, in percent, among those that are not equivalent."""
    noticed = counts[KILLED] + counts[TIMED_OUT]
    return 100 * noticed / max(1, sum(counts[outcome] for outcome in OUTCOMES))


def render(score: dict[str, Any]) -> str:
    """The table of the docs, and what survives."""
    total = {name: sum(counts[name] for counts in score.values()) for name in (*OUTCOMES, EQUIVALENT)}
    untried = [family for family in MODULES if family not in score]
    lines = [
        "| family | mutants | noticed | of them by time | not noticed | score "
        "| equivalent, and why is listed | of commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family, counts in (*score.items(), ("all", total)):
        mutants = sum(counts[outcome] for outcome in OUTCOMES)
        noticed, late = counts[KILLED] + counts[TIMED_OUT], counts[TIMED_OUT]
        share = f"{score_of(counts):.1f} %"
        tried = f"{counts['commit']}, {counts['date']}" if "commit" in counts else ""
        shown = (family, mutants, noticed, late, mutants - noticed, share, counts[EQUIVALENT], tried)
        lines.append(f"| {' | '.join(map(str, shown))} |")
    if untried:
        lines += ["", f"Not all mutants of {' and '.join(untried)} have been tried yet."]
    survivors = [survivor for counts in score.values() for survivor in counts["survivors"]]
    lines += ["", "What survives:" if survivors else "Nothing survives.", ""]
    lines += [f"- `{survivor}`" for survivor in survivors]
    return "\n".join(lines).rstrip() + "\n"


def with_table(page: str, score: dict[str, Any]) -> str:
    """A page with the table in its place."""
    return re.sub(f"({BEGIN}).*?({END})", lambda match: f"{match[1]}{render(score)}{match[2]}", page, flags=re.S)


def _checked_out() -> str:
    git = ["git", "-C", str(SCORE.parent), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.report", description=__doc__)
    parser.add_argument("file", type=Path, help="outcomes, as tests.mutants.run writes them")
    parser.add_argument("--write", action="store_true", help=f"into {SCORE.name} and docs/{PAGE.name}; else shown")
    parser.add_argument("--family", action="append", choices=tuple(MODULES), help="this family alone; repeatable")
    parser.add_argument("--commit", help="that was tried; by default the one checked out")
    parser.add_argument("--date", help="of the run; by default that of the file")
    arguments = parser.parse_args()
    written = datetime.date.fromtimestamp(arguments.file.stat().st_mtime).isoformat()
    saved = json.loads(SCORE.read_text(encoding="utf-8"))
    commit = arguments.commit or _checked_out()
    score = merged(saved, summarise(arguments.file, commit, arguments.date or written, arguments.family))
    if arguments.write:
        SCORE.write_text(json.dumps(score, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), score), encoding="utf-8")
    print(render(score))
    return 0


if __name__ == "__main__":
    sys.exit(main())
