"""What the scripts beside this file share: rows that survive a failure, a limit on the time, and a profile as rows."""

import gc
import importlib.metadata
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

PACKAGES = ("torch", "triton", "transformers", "fla-core", "liger-kernel", "tilelang")

ATTENTION = {
    r"cudnn.*sdpa": "cuDNN's attention", r"pytorch_flash::": "torch's flash attention",
    r"fmha_cutlass|PyTorchMemEffAttention": "torch's memory-efficient attention",
    r"flash_attention_for_cpu": "torch's attention",
}  # fmt: skip
"""Patterns in the names of kernels, and of operators on a CPU, and whose they are."""


class Report:
    """The rows of a script, shown and saved when it ends, when a contestant fails, and when the time is up.

    Args:
        facts: the conditions of the run, as JSON has them.
        file: where the rows go, as JSON; none if they are only shown.
        limit: seconds after which the script shows what it has and ends with status 3, whatever it is doing.
    """

    def __init__(self, facts: dict[str, Any], file: Path | None, limit: float) -> None:
        self._facts, self._file, self._limit = facts | {"versions": versions()}, file, limit
        self._begin, self._lines, self.rows = time.perf_counter(), [""], list[dict[str, Any]]()
        self._profile: list[dict[str, Any]] = []
        self._timer = threading.Timer(limit, self._stop)
        self._timer.daemon = True
        self._timer.start()

    def say(self, line: str) -> None:
        """Prints a line with the seconds since the start."""
        print(f"[{time.perf_counter() - self._begin:5.1f} s] {line}", flush=True)

    def add(self, line: str, row: dict[str, Any]) -> None:
        """A row of figures: its line for the table, and its numbers."""
        self._lines.append(line)
        self.rows.append(row)
        self.say(line.strip())
        self._save("running")

    def attempt(self, name: str, work: Callable[[], Any], **facts: Any) -> Any:
        """What `work` returns; if it raises, a row says so and the script goes on with None."""
        try:
            return work()
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        free()
        self.add(f"  {name:14s} failed: {text}", {"name": name, **facts, "failed": text})
        return None

    def profile(self, work: Callable[[], Any], device: str, count: int = 24) -> None:
        """The kernels (on a CPU: the operators) that take longest in `work`, printed and kept."""
        key = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
        events = sorted(kernels(work, device), key=lambda event: -getattr(event, key))
        whole = sum(getattr(event, key) for event in events) or 1.0
        print(f"  {'milliseconds':>12s}  share  calls  {'kernel' if device == 'cuda' else 'operator'}")
        for event in events[:count]:
            spent = getattr(event, key)
            row = {"kernel": event.key, "milliseconds": spent / 1e3, "share": spent / whole, "calls": event.count}
            self._profile.append(row)
            print(f"  {spent / 1e3:12.3f}  {spent / whole:5.1%}  {event.count:5d}  {event.key[:96]}")
        print(f"  {whole / 1e3:12.3f}  in all of them", flush=True)

    def finish(self, wrong: str = "") -> None:
        """Shows and saves everything; ends the process with status 1 where something was wrong."""
        self._timer.cancel()
        self._show()
        self._save(wrong or "finished")
        if wrong:
            raise SystemExit(wrong)

    def _show(self) -> None:
        print("\n".join(self._lines), flush=True)

    def _save(self, status: str) -> None:
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        seconds = round(time.perf_counter() - self._begin, 1)
        facts = self._facts | {"status": status, "seconds": seconds, "rows": self.rows, "profile": self._profile}
        self._file.write_text(json.dumps(facts, indent=1) + "\n")

    def _stop(self) -> None:
        text = f"stopped after {self._limit:g} s, the limit; what has no row was not reached"
        self._lines.append(f"  {text}")
        self._show()
        self._save(text)
        sys.stdout.flush()
        os._exit(3)


def kernels(work: Callable[[], Any], device: str) -> list[Any]:
    """The kernels (on a CPU: the operators) that `work` runs, with their times."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as record:
        work()
        if device == "cuda":
            torch.cuda.synchronize()
    return list(record.key_averages())


def attention_in(work: Callable[[], Any], device: str) -> set[str]:
    """Whose softmax attention `work` runs."""
    names = "\n".join(event.key for event in kernels(work, device))
    return {whose for pattern, whose in ATTENTION.items() if re.search(pattern, names)}


def versions() -> dict[str, str]:
    """The packages that take part and their versions, the device, the day and the command."""
    found = {"date": time.strftime("%Y-%m-%d"), "command": " ".join(["python", *sys.argv])}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if torch.cuda.is_available():
        found |= {"device": torch.cuda.get_device_name(), "cudnn": str(torch.backends.cudnn.version())}
    return found


def free() -> None:
    """Gives back what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def compiled_in_parallel(threads: int) -> Iterator[None]:
    """Inside, the variants among which Triton's autotuner chooses are compiled at the same time, not one by one.

    It then measures them as ever, so that a peer runs with the variants it would have chosen; only the wait is shorter.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        yield
        return
    prune = Autotuner.prune_configs

    def prune_and_compile(self: Any, options: dict[str, Any]) -> Any:
        configs = prune(self, options)
        with suppress(Exception), AsyncCompileMode(pool, ignore_errors=True):
            for config in configs:
                self.fn.run(*self.nargs.values(), **options | config.all_kwargs() | {"warmup": True})
        return configs

    with ThreadPoolExecutor(threads) as pool:
        Autotuner.prune_configs = prune_and_compile
        try:
            yield
        finally:
            Autotuner.prune_configs = prune
