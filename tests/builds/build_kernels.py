"""Builds the kernels of all ops ahead of time for one target, and prints what each build uses.

    python tests/builds/build_kernels.py TARGET [SHARD/COUNT [every | COMMIT]]

Of every kernel some variants, in which each type of a parameter, each value of a constant, each number of warps and of
stages occurs; which of them, the commit decides, so that each has its turn. Of those that differ in what they know
about alignment alone, the one that knows most. All of them if `every` is asked for.
One JSON object a line: name, kernel, registers, spilled_bytes, shared_bytes, seconds. Run in a process
of its own: an intrinsic of another architecture ends the process, not the test run.
"""

import json
import random
import sys
import time
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # from a checkout, with nothing installed

from adjoint.core import kernels
from adjoint.ops import builds


def listed(target: str, every: bool, commit: str = "") -> dict[str, kernels.Variant]:
    """The variants to build, by name."""
    named = dict(builds(target))
    if every:
        return named
    best: dict[kernels.Variant, int] = {}
    for variant in named.values():
        plain = replace(variant, aligned=())
        best[plain] = max(best.get(plain, 0), len(variant.aligned))
    by_kernel: dict[str, dict[str, kernels.Variant]] = {}
    for name, variant in named.items():
        if len(variant.aligned) == best[replace(variant, aligned=())]:
            by_kernel.setdefault(variant.kernel, {})[name] = variant
    chosen = {name for variants in by_kernel.values() for name in cover(variants, commit)}
    return {name: variant for name, variant in named.items() if name in chosen}


def axes(variant: kernels.Variant) -> set[tuple[str, object]]:
    """What a variant of a kernel has that another may not have: its types, its constants, its warps and stages."""
    return {*variant.types, *variant.constants, ("warps", variant.num_warps), ("stages", variant.num_stages)}


def cover(variants: dict[str, kernels.Variant], commit: str) -> list[str]:
    """Some variants of a kernel that have whatever any of them has; chance, by the commit, begins."""
    order = sorted(variants)
    random.Random(commit).shuffle(order)
    missing = {axis for variant in variants.values() for axis in axes(variant)}
    chosen = []
    while missing:
        chosen.append(max(order, key=lambda name: len(axes(variants[name]) & missing)))
        missing -= axes(variants[chosen[-1]])
    return chosen


def main(target: str, part: str = "1/1", which: str = "") -> None:
    shard, count = map(int, part.split("/"))
    if kernels.interpreting():
        raise SystemExit("Triton's interpreter is on: nothing would be compiled")
    if target not in kernels.TARGETS:
        raise SystemExit(f"unknown target {target!r}; known are {', '.join(kernels.TARGETS)}")
    for name, variant in islice(listed(target, which == "every", which).items(), shard - 1, None, count):
        begin = time.perf_counter()
        built = asdict(kernels.build(variant, target))
        seconds = round(time.perf_counter() - begin, 3)
        print(json.dumps({"name": name, "kernel": variant.kernel, **built, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
