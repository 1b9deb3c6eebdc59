"""Every kernel compiles for every target it lists, inside its budget, and to the instructions it is written for."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from adjoint.core import kernels
from adjoint.core.kernels import TARGETS, TUNED, Variant
from adjoint.ops import builds
from tests.builds.build_kernels import axes, cover, listed

SCRIPT = Path(__file__).with_name("build_kernels.py")
SHARDS = 4
AMD_REGISTERS = 256
"""Vector registers a thread of four resident waves may have; NVIDIA's are in each kernel's budget."""


def _build(target: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The builds of one shard, in a process that compiles even where this one interprets."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), target, *options]
    return subprocess.run(command, capture_output=True, text=True, env=inherited | environment, timeout=600)


def _over_budget(build: dict[str, object], target: str) -> list[str]:
    """Each way in which a build uses more than it may, in words."""
    budget = kernels.registered()[str(build["kernel"])].budget
    registers = budget.registers if target.startswith("sm_") else AMD_REGISTERS
    spilled = 0 if target == TUNED else budget.spilled_elsewhere
    limits = {"registers": registers, "spilled_bytes": spilled, "shared_bytes": budget.shared_bytes}
    wrong = []
    for what, limit in limits.items():
        used = build[what]
        if not isinstance(used, int) or used > limit:
            wrong.append(f"{build['name']}: {what} {used}, the budget is {limit}")
    return wrong


@pytest.mark.parametrize("shard", range(1, SHARDS + 1))
@pytest.mark.parametrize("target", TARGETS)
def test_builds_are_inside_their_budget(target: str, shard: int, everything: bool, commit: str) -> None:
    """A shard has some kernels of every family: a process of its own for each family would mostly import torch."""
    if target != "sm_90" and not everything:
        pytest.skip("sm_90 alone, unless --all")
    built = _build(target, f"{shard}/{SHARDS}", "every" if everything else commit)
    assert built.returncode == 0, "\n".join(built.stderr.splitlines()[-15:])
    reports = [json.loads(line) for line in built.stdout.splitlines()]
    names = list(listed(target, everything, commit))
    assert [report["name"] for report in reports] == names[shard - 1 :: SHARDS]
    wrong = [line for report in reports for line in _over_budget(report, target)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_is_built(target: str) -> None:
    """Those of every op, and those that ops share."""
    listed = list(builds(target))
    built = {variant.kernel for _, variant in listed}
    assert len({variant for _, variant in listed}) == len(listed), "a build listed twice"
    known = [k for k in kernels.registered().values() if k.function.__module__.startswith("adjoint.")]
    assert built == {kernel.name for kernel in known if target in kernel.targets}


def test_every_axis_of_every_kernel_is_built(commit: str) -> None:
    """What is left for --all has other types together, or knows less about alignment."""
    every, some = listed("sm_90", True), listed("sm_90", False, commit)
    assert every == dict(builds("sm_90")) and some.items() < every.items()
    of_all, of_some = (
        {(variant.kernel, axis) for variant in variants.values() for axis in axes(variant)}
        for variants in (every, some)
    )
    assert of_some == of_all
    most = {}
    for variant in every.values():
        plain = replace(variant, aligned=())
        most[plain] = max(most.get(plain, 0), len(variant.aligned))
    assert all(len(variant.aligned) == most[replace(variant, aligned=())] for variant in some.values())


def test_every_variant_has_its_turn() -> None:
    variants = {name: variant for name, variant in builds("sm_90") if variant.kernel == "embedding_bag_forward"}
    parts = [cover(variants, hex(commit)) for commit in range(1000)]
    assert {name for part in parts for name in part} == set(variants)
    assert cover(variants, "0x1") == parts[1] and max(map(len, parts)) < len(variants) / 3


def test_a_budget_can_be_exceeded() -> None:
    """The check of a build notices each resource."""
    within = {"name": "x", "kernel": "silu_forward_rows", "registers": 32, "spilled_bytes": 0, "shared_bytes": 0}
    import_module("adjoint.ops.activation.kernels")
    assert _over_budget(within, "sm_90") == []
    for change in ({"registers": 255}, {"registers": None}, {"spilled_bytes": 4}, {"shared_bytes": 1 << 20}):
        (line,) = _over_budget(within | change, "sm_90")
        assert next(iter(change)) in line
    (line,) = _over_budget(within | {"spilled_bytes": 4}, "sm_80")
    assert line.endswith("spilled_bytes 4, the budget is 0")


def test_spills_are_in_the_budget_where_kernels_are_not_tuned() -> None:
    import_module("adjoint.ops.gated_delta.rule.triton.state_scan")
    allowed = kernels.registered()["rule_state_scan"].budget.spilled_elsewhere
    scan = {"name": "x", "kernel": "rule_state_scan", "registers": 32, "spilled_bytes": allowed, "shared_bytes": 0}
    assert allowed and _over_budget(scan, "sm_80") == []
    assert _over_budget(scan | {"spilled_bytes": allowed + 4}, "sm_80")
    assert _over_budget(scan, TUNED)


def test_a_failed_build_is_noticed() -> None:
    unknown = _build("sm_1", "1/1000")
    assert unknown.returncode != 0
    assert "unknown target 'sm_1'" in unknown.stderr
    interpreted = _build("sm_90", "1/1000", TRITON_INTERPRET="1")
    assert interpreted.returncode != 0


# ------------------------------------------------------------------------------------- instructions

compiles = pytest.mark.skipif(kernels.interpreting(), reason="the ordinary process compiles")


def _instructions(cubin: bytes) -> list[str]:
    """The machine code of a kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", text, re.MULTILINE)


def _products(kernel: str, wanted: dict[str, Any], changed: dict[str, Any] | None = None) -> tuple[int, int]:
    """Of a kernel's first variant with these constants: matrix instructions, and those that end a product. None of its
    registers is spilled."""
    from triton.backends.compiler import GPUTarget

    (variant, *_) = (
        variant
        for _, variant in builds("sm_90")
        if variant.kernel == kernel and wanted.items() <= dict(variant.constants).items()
    )
    constants = tuple((dict(variant.constants) | (changed or {})).items())
    code = _instructions(replace(variant, constants=constants).compile(GPUTarget(*TARGETS["sm_90"])).asm["cubin"])
    assert not any(line.startswith(("STL", "LDL")) for line in code), "registers are spilled"
    products = [line for line in code if line.startswith("HGMMA")]
    return len(products), len([line for line in products if "gsb0" in line])


@compiles
@pytest.mark.parametrize(("segmented", "saves"), [(False, True), (False, False), (True, False)])
def test_products_of_the_whole_scan_are_not_serialised(segmented: bool, saves: bool) -> None:
    """Where registers are short, ptxas ends every instruction of a product with a wait, and spills nothing."""
    wanted = {"K": 128, "SEGMENTED": segmented, "FINAL": True}
    instructions, ends = _products("rule_whole_scan_hopper", wanted, {"SAVES": saves})
    assert instructions == 2 * 32 + 8, "of each half of V, and of the scores"
    assert ends == 2 * 6 + 1, "one for each product of matrices"


@compiles
@pytest.mark.parametrize(("kernel", "warpgroups"), [("rule_states_ahead_hopper", 1), ("rule_transitions_hopper", 2)])
def test_products_of_the_state_scan_ahead_are_not_serialised(kernel: str, warpgroups: int) -> None:
    instructions, ends = _products(kernel, {"K": 128})
    assert instructions == 20 * warpgroups, "Sᵀ kᵀ of 8, r T°ᵀ of 4, w k of 4 for each half of k"
    assert ends == 4 * warpgroups, "one for each product of matrices"


@compiles
@pytest.mark.parametrize(("segmented", "transition"), [(False, False), (True, False), (True, True)])
def test_products_of_the_reverse_scan_are_not_serialised(segmented: bool, transition: bool) -> None:
    wanted = {"K": 128, "SEGMENTED": segmented, "TRANSITION": transition, "FINAL": True}
    instructions, ends = _products("rule_reverse_scan_hopper", wanted)
    assert instructions == 40 + 16, "of the scan, and of Pᵀ do"
    assert ends == 11 + 3, "one for each product of matrices, of which one has four slices besides"


@cache
def _rows_variants() -> dict[tuple[str, str, str, bool], Variant]:
    """The bfloat16 variants of the rows kernels: by kernel, op, the kind of rows and alignment."""
    listed = {}
    for _, variant in builds("sm_90"):
        if variant.kernel.endswith("_rows") and variant.kernel.startswith("silu") and variant.types[0][1] == "*bf16":
            constants = dict(variant.constants)
            rows = "one row" if constants["ONE_ROW"] else "long rows" if variant.num_warps == 8 else "short rows"
            op = "sigmoid_gate" if constants["SIGMOID"] else "swiglu" if constants["HAS_UP"] else "silu"
            listed[variant.kernel, op, rows, bool(variant.aligned)] = variant
    return listed


def _ptx(kernel: str, op: str, key: tuple[str, bool]) -> tuple[Variant, str]:
    """The bfloat16 kernel with NVIDIA's own instructions, as assembly for sm_90."""
    from triton.backends.compiler import GPUTarget

    rows, aligned = key
    variant = _rows_variants()[kernel, op, rows, aligned]
    return variant, variant.compile(GPUTarget(*TARGETS["sm_90"])).asm["ptx"]


LOADS_STORES = {
    ("silu_forward_rows", "silu"): (1, 1),
    ("silu_forward_rows", "swiglu"): (2, 1),
    ("silu_forward_rows", "sigmoid_gate"): (2, 1),
    ("silu_backward_rows", "silu"): (2, 1),
    ("silu_backward_rows", "swiglu"): (3, 2),
    ("silu_backward_rows", "sigmoid_gate"): (3, 2),
}

rows_kernels = pytest.mark.parametrize(("kernel", "op"), list(LOADS_STORES))


def _per_thread(variant: Variant) -> int:
    return int(dict(variant.constants)["BLOCK"]) // (32 * variant.num_warps)


@compiles
@rows_kernels
@pytest.mark.parametrize("key", [("one row", True), ("long rows", False), ("short rows", True)], ids=str)
def test_exponentials_and_reciprocals_are_single_instructions(kernel: str, op: str, key: tuple[str, bool]) -> None:
    """One each for every element of a thread, in the path without a mask and in the one with it."""
    variant, ptx = _ptx(kernel, op, key)
    used = Counter(re.findall(r"\b(?:ex2|rcp|div|sqrt|rsqrt|lg2|tanh)\.[.\w]*", ptx))
    elements = 2 * _per_thread(variant)
    assert used == {"ex2.approx.ftz.f32": elements, "rcp.approx.ftz.f32": elements}


@compiles
@rows_kernels
def test_inline_assembly_reads_its_operand(kernel: str, op: str) -> None:
    """Each 2^x reads a product with −log₂(e)/2, each 1/x a sum with 1: no interpreter runs this text."""
    _, ptx = _ptx(kernel, op, ("one row", True))
    written_by = {}
    sources: dict[str, set[str]] = {"ex2": set(), "rcp": set()}
    for line in ptx.splitlines():
        instruction = re.match(r"\s*(?:@!?%p\d+\s+)?([a-z][\w.]*)\s+(%\w+), (.*);", line)
        if instruction is None:
            continue
        operation, destination, operands = instruction.groups()
        name = operation.split(".")[0]
        if name in sources:
            assert re.fullmatch(r"%r\d+", operands), line
            assert operands != destination, f"reads what it writes: {line.strip()}"
            sources[name].add(operands)
            producer, given = written_by[operands]
            if name == "ex2":
                assert producer.startswith("mul") and given.endswith("0fBF38AA3B"), (producer, given, line)
            else:
                assert producer.startswith("add") and "0f3F800000" in given, (producer, given, line)
        written_by[destination] = (operation, operands)
    count = len(re.findall(r"ex2\.approx", ptx))
    assert {name: len(found) for name, found in sources.items()} == {"ex2": count, "rcp": count}
    assert count > 0


@compiles
@rows_kernels
@pytest.mark.parametrize("rows", ["one row", "long rows", "short rows"])
def test_aligned_accesses_are_128_bits_wide(kernel: str, op: str, rows: str) -> None:
    """Whatever the number of columns: the path of full tiles has no mask."""
    _, ptx = _ptx(kernel, op, (rows, True))
    loads, stores = LOADS_STORES[kernel, op]
    wide = Counter(re.findall(r"\b(ld|st)\.global[\w.:]*\.(v\d\.b\d+)", ptx))
    assert wide == {("ld", "v4.b32"): loads, ("st", "v4.b32"): stores}


@compiles
@rows_kernels
def test_nothing_is_divided_or_contracted(kernel: str, op: str) -> None:
    """No integer division for addresses; no multiply-add but the ones the kernel writes as such."""
    variant, ptx = _ptx(kernel, op, ("long rows", True))
    assert not re.findall(r"\b(?:div|rem)\.[su]\d+", ptx)
    written = 2 * _per_thread(variant) if "backward" in kernel and op != "sigmoid_gate" else 0
    assert len(re.findall(r"\bfma\.rn\.f32", ptx)) == written
