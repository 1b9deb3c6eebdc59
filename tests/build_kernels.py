"""Builds the kernels of all ops ahead of time for one target, and prints what each build uses.

    python tests/build_kernels.py TARGET [SHARD/COUNT [every]]

Of variants that differ in what they know about alignment alone, the one that knows most, unless `every` is asked for.
One JSON object a line: name, kernel, registers, spilled_bytes, shared_bytes, seconds. Run in a process
of its own: an intrinsic of another architecture ends the process, not the test run.
"""

import json
import sys
import time
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # from a checkout, with nothing installed

from adjoint.core import kernels
from adjoint.ops import builds


def listed(target: str, every: bool) -> dict[str, kernels.Variant]:
    """The variants to build, by name."""
    named = dict(builds(target))
    if every:
        return named
    best: dict[kernels.Variant, int] = {}
    for variant in named.values():
        plain = replace(variant, aligned=())
        best[plain] = max(best.get(plain, 0), len(variant.aligned))
    return {name: v for name, v in named.items() if len(v.aligned) == best[replace(v, aligned=())]}


def main(target: str, part: str = "1/1", every: str = "") -> None:
    shard, count = map(int, part.split("/"))
    if kernels.interpreting():
        raise SystemExit("Triton's interpreter is on: nothing would be compiled")
    if target not in kernels.TARGETS:
        raise SystemExit(f"unknown target {target!r}; known are {', '.join(kernels.TARGETS)}")
    for name, variant in islice(listed(target, bool(every)).items(), shard - 1, None, count):
        begin = time.perf_counter()
        built = asdict(kernels.build(variant, target))
        seconds = round(time.perf_counter() - begin, 3)
        print(json.dumps({"name": name, "kernel": variant.kernel, **built, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
