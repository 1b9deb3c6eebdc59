"""The mutation score by family: from the outcomes of a run of all mutants to `score.json`, and from there to the docs.

    python -m tests.mutants.run --jobs 16 --out mutants.jsonl
    python -m tests.mutants.report mutants.jsonl --write

The outcomes must be those of the tree as it is: a mutant that they lack, or one of other sources, is an error.
"""

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.mutants.checks import KILLED, MODULES, SURVIVED, TIMED_OUT, UNDECIDED

SCORE = Path(__file__).with_name("score.json")
PAGE = Path(__file__).parents[2] / "docs" / "mutants.md"
BEGIN, END = "<!-- mutants:begin -->\n", "<!-- mutants:end -->"

OUTCOMES = (KILLED, TIMED_OUT, SURVIVED, UNDECIDED)
EQUIVALENT = "equivalent"


def summarise(file: Path, commit: str, date: str) -> dict[str, Any]:
    """The outcomes of all mutants of the tree, counted by family, and those that survive."""
    from tests.mutants import run  # which turns the interpreter on

    known = run.known(file)
    families, survivors = {}, []
    for family in MODULES:
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
        same = len(run.trials([family], of_equivalent=True))
        families[family] = {outcome: counts[outcome] for outcome in OUTCOMES} | {EQUIVALENT: same}
        survivors += [
            f"{result['module']}, {result['function']}: {result['change']}"
            for result in results
            if result["outcome"] in (SURVIVED, UNDECIDED)
        ]
    return {"date": date, "commit": commit, "families": families, "survivors": survivors}


def score_of(counts: dict[str, int]) -> float:
    """The share of mutants that are noticed, in percent, among those that are not equivalent."""
    noticed = counts[KILLED] + counts[TIMED_OUT]
    return 100 * noticed / max(1, sum(counts[outcome] for outcome in OUTCOMES))


def render(score: dict[str, Any]) -> str:
    """The table of the docs, and what survives."""
    families = score["families"]
    total = {name: sum(counts[name] for counts in families.values()) for name in (*OUTCOMES, EQUIVALENT)}
    lines = [
        f"All mutants of commit {score['commit']}, tried on {score['date']}:",
        "",
        "| family | mutants | noticed | of them by time | not noticed | score | equivalent, and why is listed |",
        "|---|---|---|---|---|---|---|",
    ]
    for family, counts in (*families.items(), ("all", total)):
        mutants = sum(counts[outcome] for outcome in OUTCOMES)
        noticed, late = counts[KILLED] + counts[TIMED_OUT], counts[TIMED_OUT]
        share = f"{score_of(counts):.1f} %"
        lines.append(
            f"| {family} | {mutants} | {noticed} | {late} | {mutants - noticed} | {share} | {counts[EQUIVALENT]} |"
        )
    survivors = score["survivors"]
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
    parser.add_argument("--commit", help="that was tried; by default the one checked out")
    parser.add_argument("--date", help="of the run; by default that of the file")
    arguments = parser.parse_args()
    written = datetime.date.fromtimestamp(arguments.file.stat().st_mtime).isoformat()
    score = summarise(arguments.file, arguments.commit or _checked_out(), arguments.date or written)
    if arguments.write:
        SCORE.write_text(json.dumps(score, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), score), encoding="utf-8")
    print(render(score))
    return 0


if __name__ == "__main__":
    sys.exit(main())
