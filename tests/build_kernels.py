"""Builds the kernels of all ops ahead of time for one target, and prints what each build uses.

    python tests/build_kernels.py TARGET [SHARD/COUNT]

One JSON object a line: name, kernel, registers, spilled_bytes, shared_bytes, seconds. Run in a process
of its own: an intrinsic of another architecture ends the process, not the test run.
"""

import json
import sys
import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # from a checkout, with nothing installed

from adjoint.core import kernels
from adjoint.ops import builds


def main(target: str, part: str = "1/1") -> None:
    shard, count = map(int, part.split("/"))
    if kernels.interpreting():
        raise SystemExit("Triton's interpreter is on: nothing would be compiled")
    if target not in kernels.TARGETS:
        raise SystemExit(f"unknown target {target!r}; known are {', '.join(kernels.TARGETS)}")
    for name, variant in islice(builds(target), shard - 1, None, count):
        begin = time.perf_counter()
        built = asdict(kernels.build(variant, target))
        seconds = round(time.perf_counter() - begin, 3)
        print(json.dumps({"name": name, "kernel": variant.kernel, **built, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
