"""Tries all mutants, in several processes, and goes on where an interrupted run stopped.

    python -m tests.mutants.run --jobs 16 --out mutants.jsonl

Every outcome is a line of JSON in the file, under a key that names the mutant's source and the checks that judge it:
what a change of either leaves as it was is not tried again. Equivalent mutants are counted, not tried, unless
`--equivalent` asks whether any of them is noticed after all. First the kernels as they are pass through the same
checks: where any of those notices them, it would notice every mutant too, and none is tried.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # see `tests.conftest`

import argparse
import hashlib
import inspect
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, TextIO

import numpy as np
import torch
import triton

import adjoint
from adjoint.verify import interpreter
from tests.mutants import checks, processes
from tests.mutants.processes import KILLED, SURVIVED, TIMED_OUT, UNDECIDED
from tests.mutants.trees import Mutant, equivalent, mutants


@dataclass
class Trial:
    """One mutant on its way through the checks of its family."""

    family: str
    mutant: Mutant
    key: str
    checks: list[checks.Noticed]
    number: int = 0
    """Of the check that runs now."""
    seconds: float = 0.0

    def result(self, outcome: str, by: str = "") -> dict[str, Any]:
        return {
            "key": self.key,
            "family": self.family,
            "module": self.mutant.module,
            "function": self.mutant.function,
            "line": self.mutant.place[0],
            "change": self.mutant.change,
            "outcome": outcome,
            "by": by,
            "seconds": round(self.seconds, 2),
        }


@dataclass
class Pool:
    """Runs trials in processes of their own, so many at once."""

    jobs: int
    out: TextIO
    running: dict[int, Trial] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)

    def run(self, trials: Iterable[Trial], total: int) -> None:
        begin, shown = time.monotonic(), time.monotonic()
        waiting = iter(trials)
        exhausted = False
        while self.running or not exhausted:
            while not exhausted and len(self.running) < self.jobs:
                trial = next(waiting, None)
                if trial is None:
                    exhausted = True
                else:
                    self._start(trial)
            if self.running:
                self._collect()
            if time.monotonic() - shown > 30:
                shown = time.monotonic()
                print(f"{len(self.results)} of {total} after {shown - begin:.0f} s", flush=True)

    def _start(self, trial: Trial) -> None:
        self.running[processes.start(trial.mutant, trial.checks[trial.number])] = trial

    def _collect(self) -> None:
        process, status, usage = os.wait4(-1, 0)
        trial = self.running.pop(process)
        trial.seconds += usage.ru_utime + usage.ru_stime
        outcome, by = processes.outcome(status)
        trial.number += 1
        if outcome == SURVIVED and trial.number < len(trial.checks):
            self._start(trial)
            return
        if by:
            by = f"{by} in check {trial.number} of {len(trial.checks)}"
        self.results.append(trial.result(outcome, by))
        print(json.dumps(self.results[-1]), file=self.out, flush=True)


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _judges(family: str) -> str:
    """A hash of the family's sources and of the checks that judge its mutants."""
    root = Path(str(adjoint.__file__)).parent / "ops" / family
    sources = [path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))]
    judging = [inspect.getsource(source) for source in (*checks.JUDGES[family], *_functions(family))]
    return _hash(*sources, *judging)


def _functions(family: str) -> list[FunctionType]:
    """The functions of `checks`, but for those that judge other families."""
    own, others = (
        {_inner(stage) for name, stages in checks.STAGES.items() if (name == family) is mine for stage in stages}
        for mine in (True, False)
    )
    found = (value for value in vars(checks).values() if isinstance(value, FunctionType))
    return [function for function in found if function.__module__ == checks.__name__ and function not in others - own]


def _inner(check: checks.Noticed) -> Any:
    """The function of a check that may have arguments already."""
    return check.func if isinstance(check, partial) else check


def trials(families: Iterable[str], part: str = "", of_equivalent: bool = False) -> list[Trial]:
    """Of all mutants, in modules whose names have a part, that are not equivalent, or that are listed to be."""
    listed = []
    for family in families:
        judges = _judges(family)
        for module in _modules(family, part):
            for mutant in mutants(module):
                if equivalent(mutant) is of_equivalent:
                    key = _hash(module, mutant.source, judges)
                    listed.append(Trial(family, mutant, key, list(checks.stages(family, mutant))))
    return listed


def _modules(family: str, part: str) -> list[str]:
    return [module for module in checks.MODULES[family] if part in module]


def controls(families: Iterable[str], part: str) -> list[Trial]:
    """Modules as they are."""
    listed = []
    for family in families:
        for module in _modules(family, part):
            same = checks.unbroken(module)
            key = _hash(module, same.source, _judges(family))
            listed.append(Trial(family, same, key, list(checks.stages(family, same))))
    return listed


def table(results: Iterable[dict[str, Any]], equivalents: Counter[str]) -> str:
    """Outcomes by module, and the score: the share of mutants that are noticed among those that differ."""
    rows = [("module", KILLED, TIMED_OUT, SURVIVED, UNDECIDED, "equivalent", "score", "seconds")]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        groups[result["family"], result["module"]].append(result)
        groups[result["family"], ""].append(result)
        groups["all", ""].append(result)
    for (family, module), group in groups.items():
        counts = Counter(result["outcome"] for result in group)
        score = 100 * (counts[KILLED] + counts[TIMED_OUT]) / len(group)
        shown = [str(counts[outcome]) for outcome in (KILLED, TIMED_OUT, SURVIVED, UNDECIDED)]
        seconds = f"{sum(result['seconds'] for result in group):.0f}"
        same = str(equivalents[module or family])
        rows.append((module or f"{family}: all", *shown, same, f"{score:.1f} %", seconds))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(w) if n else cell.ljust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )


def _equivalents(families: Iterable[str], part: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for trial in trials(families, part, of_equivalent=True):
        counts.update((trial.mutant.module, trial.family, "all"))
    return counts


def known(file: Path) -> dict[str, dict[str, Any]]:
    """Results of earlier runs; a line that an interruption cut short is none."""
    results = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            result = json.loads(line)
        except ValueError:
            continue
        if result["outcome"] != UNDECIDED:
            results[result["key"]] = result
    return results


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"), help="outcomes, one JSON object a line")
    parser.add_argument(
        "--family", action="append", choices=tuple(checks.MODULES), help="this family alone; repeatable"
    )
    parser.add_argument("--module", default="", help="modules whose names have this part")
    parser.add_argument("--shard", default="1/1", help="i/n: every n-th mutant, from the i-th on")
    parser.add_argument("--sample", type=int, help="so many mutants of every module, by chance")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--equivalent", action="store_true", help="try the mutants that are listed as equivalent")
    return parser.parse_args()


def _chosen(listed: list[Trial], arguments: argparse.Namespace) -> list[Trial]:
    index, count = (int(part) for part in arguments.shard.split("/"))
    chosen = listed[index - 1 :: count]
    order = random.Random(arguments.seed)
    order.shuffle(chosen)  # modules with slow checks are spread over the run
    if arguments.sample is None:
        return chosen
    taken: Counter[str] = Counter()
    sample = []
    for trial in chosen:
        taken[trial.mutant.module] += 1
        if taken[trial.mutant.module] <= arguments.sample:
            sample.append(trial)
    return sample


def refusal() -> str:
    """Why nothing that is counted here would mean anything; empty where it would."""
    parts = [tuple(map(int, module.__version__.split(".")[:2])) for module in (triton, np)]
    if parts[0] < (3, 7) and parts[1] >= (2, 4):
        return (
            f"the interpreter of Triton {triton.__version__} is wrong with numpy {np.__version__}: "
            "checks would fail on kernels as they are; put a numpy before 2.4 on PYTHONPATH"
        )
    return ""


def main() -> int:
    arguments = _arguments()
    if reason := refusal():
        print(reason, file=sys.stderr)
        return 2
    families = arguments.family or list(checks.MODULES)
    interpreter.correct()
    torch.set_num_threads(1)
    chosen = _chosen(trials(families, arguments.module, arguments.equivalent), arguments)
    outcomes = known(arguments.out)
    same = controls(families, arguments.module)
    passed = {trial.key for trial in same if outcomes.get(trial.key, {}).get("outcome") == SURVIVED}
    untried = [trial for trial in same if trial.key not in passed]
    missing = [trial for trial in chosen if trial.key not in outcomes]
    print(
        f"{len(chosen)} mutants; {len(missing)} trials are missing, and {len(untried)} of kernels as they are; "
        f"{arguments.jobs} run at once",
        flush=True,
    )
    checks.warm({trial.mutant.module: None for trial in (*untried, *missing)})
    with arguments.out.open("a", encoding="utf-8") as out:
        first = Pool(arguments.jobs, out)
        first.run(untried, len(untried))
        if noticed := [result for result in first.results if result["outcome"] != SURVIVED]:
            for result in noticed:
                how = f"{result['outcome']}{', ' * bool(result['by'])}{result['by']}"
                print(f"{result['module']}: the checks fail on the kernels as they are ({how})", file=sys.stderr)
            print("no mutant was tried: all of these modules would be noticed, whatever is broken", file=sys.stderr)
            return 2
        pool = Pool(arguments.jobs, out)
        pool.run(missing, len(missing))
    outcomes |= {result["key"]: result for result in pool.results}
    results = [outcomes[trial.key] for trial in chosen]
    order = {module: n for n, module in enumerate(m for modules in checks.MODULES.values() for m in modules)}
    results.sort(key=lambda result: (order[result["module"]], result["line"]))
    print(table(results, _equivalents(families, arguments.module)))
    wrong = (KILLED, TIMED_OUT) if arguments.equivalent else (SURVIVED, UNDECIDED)
    unexpected = [result for result in results if result["outcome"] in wrong]
    for result in unexpected:
        print(f"{result['outcome']}: {result['module']}:{result['line']} {result['function']}: {result['change']}")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
