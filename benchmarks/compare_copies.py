"""Compares copies of this package on one machine: whether their results have the same bits, and how long they take.

    git worktree add ../before HEAD~1
    python benchmarks/compare_copies.py before=../before after=. --ops gated_delta_rule --rows "32768 tokens" --kernels

Each copy is a folder that has `adjoint/`, and runs in a process of its own; the first is the one that the others are
compared with. A workload of the benchmark is built in all processes at once, so that kernels compile beside each other.
Every copy then repeats it and says what its results digest to, and the copies are timed in turns, so that a clock that
drifts meets all of them: the same plans, inputs, CUDA graphs and clocks as in `adjoint bench`. No result is compared
with a reference here; `adjoint verify` does that. A copy that raises, hangs or does not repeat its bits has a row that
says so, and the others go on.
"""

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

REPEATS = 4
"""How often a copy computes a workload before its bits are believed."""


# ------------------------------------------------------------------------------------------ in a copy's own process


def work(requests: IO[str], answer: Callable[[dict[str, Any]], None], options: dict[str, Any]) -> None:
    """Answers the parent's requests: which workloads there are, to build one, to time it, to list its kernels."""
    import torch
    from contest import free, kernels

    import adjoint
    from adjoint.bench.measurement.run import select as workloads
    from adjoint.bench.measurement.run import tasks_of
    from adjoint.bench.measurement.timing import own_stream, times_on

    device = torch.device(options["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    chosen = workloads(options["ops"], options["rows"])
    todo = [
        (workload, direction)
        for _, workload in chosen
        if device.type in workload.devices
        for direction in workload.directions
    ]
    names = [f"{workload.name}, {direction}" for workload, direction in todo]
    answer({"names": names, "package": str(Path(adjoint.__file__).parent.parent)})
    with own_stream(device):
        action: Callable[[], Any] = free
        for line in requests:
            request = json.loads(line)
            if request["ask"] == "build":
                action = free  # what was built before goes first
                free()
                workload, direction = todo[request["index"]]
                (task,) = (task for task in tasks_of(workload, device)[2] if task.direction == direction)
                action, facts = ready(task)
                answer(facts)
            elif request["ask"] == "time":
                answer({"microseconds": 1e3 * statistics.median(times_on(device, action))})
            else:
                spent = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
                times = {event.key: [event.count, getattr(event, spent)] for event in kernels(action, device.type)}
                answer({name: entry for name, entry in times.items() if entry[1]})


def ready(task: Any) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A task's call, or on a GPU the replay of its CUDA graph; what its results digest to, and whether they repeat."""
    import torch

    from adjoint.bench.contenders import ours
    from adjoint.bench.measurement.check import poison
    from adjoint.bench.measurement.timing import recorded, synchronize
    from adjoint.verify.checks.digests import digest

    contender = ours(task)
    restore = contender.restore or (lambda: None)
    results: list[Any] = []

    def run() -> None:
        results[:] = contender.run()

    action: Callable[[], Any] = run
    if task.device.type == "cuda":
        with suppress(RuntimeError):  # a call that waits for the device is no graph
            action = recorded(run)

    def compute() -> list[Any]:
        restore()
        poison(contender)
        action()
        synchronize(task.device)
        return [x.reshape(-1).view(torch.uint8) for x in results]

    first = [x.clone() for x in compute()]
    facts = {"digest": digest(*results)}
    facts["repeats"] = all(all(map(torch.equal, first, compute())) for _ in range(REPEATS - 1))

    def restored() -> None:
        restore()
        action()

    return action if contender.restore is None else restored, facts


# ----------------------------------------------------------------------------------------------------- in the parent


class Copy:
    """A copy of the package and the process that runs it."""

    def __init__(self, label: str, folder: Path, options: dict[str, Any]) -> None:
        self.label, self.folder, self.failure = label, folder.resolve(), ""
        here = Path(__file__).resolve()
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, str(here), "--worker", json.dumps(options)], env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, **request: Any) -> None:
        """Sends a request; `answer` reads what comes back."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any]:
        """What the process says next; if it says nothing in time, or that it failed, it is ended."""
        assert self._process.stdout is not None
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            if not select.select([self._process.stdout], [], [], 1.0)[0]:
                continue
            line = self._process.stdout.readline()
            answer: dict[str, Any] = json.loads(line) if line else {"failure": "its process ended"}
            self.failure = answer.get("failure", "")
            break
        else:
            self.failure = f"no answer in {seconds:g} s"
        if self.failure:
            self.end()
            return {}
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(copies: list[Copy], rounds: int, seconds: float, with_kernels: bool) -> Iterator[dict[str, Any]]:
    """A row for each workload and direction, of all copies that still run."""
    offered = {copy.label: copy.answer(seconds) for copy in copies}
    first = copies[0].label
    if not offered[first]:
        raise SystemExit(f"{first}: {copies[0].failure}")
    for copy in copies:
        if copy.failure:
            print(f"{copy.label}: {copy.failure}", flush=True)
        elif Path(offered[copy.label]["package"]) != copy.folder:
            raise SystemExit(f"{copy.label} ran {offered[copy.label]['package']}, not {copy.folder}")
        elif offered[copy.label]["names"] != offered[first]["names"]:
            raise SystemExit(f"{copy.label} has other workloads than {first}: their times cannot be compared")
    for index, name in enumerate(offered[first]["names"]):
        running = [copy for copy in copies if not copy.failure]
        for copy in running:
            copy.ask(ask="build", index=index)
        built = {copy.label: copy.answer(seconds) for copy in running}
        times: dict[str, list[float]] = {copy.label: [] for copy in running if not copy.failure}
        for _ in range(rounds):
            for copy in running:
                if not copy.failure:
                    copy.ask(ask="time")
                    times[copy.label] += copy.answer(seconds).values()
        row: dict[str, Any] = {"name": name, "copies": {}}
        for copy in running:
            if copy.failure:
                row["copies"][copy.label] = {"failure": copy.failure}
                continue
            entry = row["copies"][copy.label] = {
                "microseconds": times[copy.label],
                "repeats": built[copy.label]["repeats"],
                "same_bits": built[copy.label]["digest"] == built[first].get("digest"),
            }
            if with_kernels:
                copy.ask(ask="kernels")
                entry["kernels"] = copy.answer(seconds)
        yield row


def show(row: dict[str, Any]) -> None:
    """A line for each copy: the median of its rounds and their range, over the first, and what its bits are."""
    print(row["name"], flush=True)
    base = None
    for label, entry in row["copies"].items():
        if "failure" in entry:
            print(f"  {label:16s} {entry['failure']}", flush=True)
            continue
        median = statistics.median(entry["microseconds"])
        base = base or median
        bits = "same bits" if entry["same_bits"] else "OTHER BITS"
        bits += "" if entry["repeats"] else ", WHICH DO NOT REPEAT"
        spread = f"{min(entry['microseconds']):.1f} to {max(entry['microseconds']):.1f}"
        print(f"  {label:16s} {median:10.1f} µs ({spread})  {median / base:6.3f}  {bits}", flush=True)
        for kernel, (count, spent) in sorted(entry.get("kernels", {}).items(), key=lambda item: -item[1][1])[:12]:
            print(f"      {spent:10.1f} µs in {count:3d}  {kernel[:80]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("copies", nargs="+", metavar="LABEL=FOLDER", help="a copy of the package, and what to call it")
    parser.add_argument(
        "--ops", nargs="+", required=True, help="ops whose workloads are run, as `adjoint bench` names them"
    )
    parser.add_argument("--rows", nargs="+", default=[], metavar="TEXT", help="only workloads with this in their name")
    parser.add_argument("--device", default=None, help="cpu or cuda; by default the GPU if there is one")
    parser.add_argument("--rounds", type=int, default=3, help="how often each copy is timed")
    parser.add_argument("--kernels", action="store_true", help="also list the kernels that take longest")
    parser.add_argument(
        "--seconds", type=float, default=200, help="how long a copy may take to answer, compilation included"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="where rows are written, as JSON, as they come")
    options = parser.parse_args()
    folders = dict(text.partition("=")[::2] for text in options.copies)
    for label, folder in folders.items():
        if not (Path(folder) / "adjoint" / "__init__.py").is_file():
            parser.error(f"{label}={folder}: there is no adjoint/__init__.py in that folder")
    settings = {"ops": options.ops, "rows": options.rows, "device": options.device or default_device()}
    copies = [Copy(label, Path(folder), settings) for label, folder in folders.items()]
    rows = []
    try:
        for row in compare(copies, options.rounds, options.seconds, options.kernels):
            show(row)
            rows.append(row)
            if options.save:
                options.save.write_text(json.dumps({"copies": list(folders), "rows": rows}, indent=1) + "\n")
    finally:
        for copy in copies:
            copy.end()
    good = all(
        "failure" not in entry and entry["repeats"] and entry["same_bits"]
        for row in rows
        for entry in row["copies"].values()
    )
    raise SystemExit(0 if good and not any(copy.failure for copy in copies) else 1)


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def worker(options: dict[str, Any]) -> None:
    """Answers go where the parent reads; whatever else is printed joins the errors."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(facts: dict[str, Any]) -> None:
        channel.write(json.dumps(facts) + "\n")

    try:
        work(sys.stdin, answer, options)
    except Exception as error:
        answer({"failure": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(json.loads(sys.argv[2]))
    else:
        main()
