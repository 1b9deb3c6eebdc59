"""Every arithmetic operator, comparison and constant in every kernel is broken in turn; a check must notice.

The mutants are made from the syntax tree of each family's `kernels.py`, inside its `@triton.jit`
functions, and run in the interpreter. One that survives is either a hole in the checks or an
equivalent program, and must then be listed here with the reason.
"""

import ast
import copy
import ctypes
import faulthandler
import importlib.util
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import adjoint.core.plan
from adjoint.core import kernels
from adjoint.core.cases import Case, Subject
from adjoint.core.inputs import each
from adjoint.core.preference import Preference
from adjoint.ops import FAMILIES
from adjoint.verify import bits, numerics
from adjoint.verify.row import Row
from adjoint.verify.run import differentiate, evaluate

EQUIVALENT = {
    ("silu_parts", "x >= 0 -> x > 0"): "both branches agree at 0, where h = 1",
    ("forward_value", "x >= 0 -> x > 0"): "both branches agree at 0, where h = 1",
    ("*", "columns - start >= BLOCK -> columns - start > BLOCK"): "a full tile is also right under a mask",
    ("*", "2048.0 -> 3072.0"): "any bound past the asymptote serves",
    ("*", "1024.0 -> 2048.0"): "any bound past the asymptote serves",
    ("half_exponential", "0.5 -> 0.75"): "another integer n, taken out just as exactly",
    ("half_exponential", "exponent * 1.4426950408889634 + 0.5 -> exponent * 1.4426950408889634 - 0.5"): (
        "another integer n, taken out just as exactly"
    ),
    (
        "half_exponential",
        "tl.floor(exponent * 1.4426950408889634 + 0.5) -> tl.ceil(exponent * 1.4426950408889634 + 0.5)",
    ): "another integer n, taken out just as exactly",
    ("half_exponential", "exponent * 1.4426950408889634 -> exponent + 1.4426950408889634"): (
        "another integer n, taken out just as exactly; what remains is larger, and still inside the bound"
    ),
}
"""Mutants that compute the same: (function or "*", change) -> why."""

_SWAPS: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult}
_COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq
}  # fmt: skip
_CALLS = {"maximum": "minimum", "minimum": "maximum", "exp": "exp2", "exp2": "exp", "floor": "ceil"}


@dataclass(frozen=True)
class Mutant:
    function: str
    change: str
    line: int
    source: str
    sampled: bool = False


def _mutations(node: ast.AST) -> Iterator[ast.AST]:
    """The node, changed in each way that applies to it."""
    if isinstance(node, ast.BinOp) and type(node.op) in _SWAPS:
        yield ast.BinOp(node.left, _SWAPS[type(node.op)](), node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod):
        yield ast.BinOp(node.left, ast.Mod() if isinstance(node.op, ast.FloorDiv) else ast.FloorDiv(), node.right)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        yield ast.Compare(node.left, [_COMPARISONS[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.Constant) and type(node.value) is float:
        yield ast.Constant(node.value * 1.5 if node.value else 1.0)
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value:
        yield ast.Constant(node.value + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node.operand
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        if name in _CALLS:
            yield ast.Call(ast.Attribute(node.func.value, _CALLS[name], ast.Load()), node.args, node.keywords)
        if name == "abs":
            yield node.args[0]
        if name == "where":
            yield ast.Call(node.func, [node.args[0], node.args[2], node.args[1]], node.keywords)
        if name == "store" and len(node.args) > 2:
            yield ast.Call(node.func, node.args[:2], node.keywords)


def mutants(path: Path) -> Iterator[Mutant]:
    """Every mutant of a kernel module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for function in tree.body:
        if not (
            isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in function.decorator_list)
        ):
            continue
        native = {
            id(node)
            for branch in ast.walk(function)
            if isinstance(branch, ast.If) and "NATIVE" in ast.unparse(branch.test)
            for part in (branch.test, *branch.body)
            for node in ast.walk(part)
        }  # inline assembly: no interpreter runs it; the builds check its text
        for statement in ast.walk(function):
            for field, value in ast.iter_fields(statement):
                children = value if isinstance(value, list) else [value]
                for index, child in enumerate(children):
                    if not isinstance(child, ast.AST) or isinstance(child, ast.FunctionDef):
                        continue
                    if id(child) in native:
                        continue
                    for changed in _mutations(child):
                        before, after = ast.unparse(child), ast.unparse(changed)
                        if isinstance(value, list):
                            value[index] = changed
                        else:
                            setattr(statement, field, changed)
                        source = ast.unparse(ast.fix_missing_locations(copy.deepcopy(tree)))
                        if isinstance(value, list):
                            value[index] = child
                        else:
                            setattr(statement, field, child)
                        yield Mutant(function.name, f"{before} -> {after}", getattr(child, "lineno", 0), source)


def equivalent(mutant: Mutant) -> bool:
    return any((function, mutant.change) in EQUIVALENT for function in (mutant.function, "*"))


def _load(family: str, path: Path) -> ModuleType:
    """Puts a file in the place of a family's kernel module."""
    name = f"adjoint.ops.{family}.kernels"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    vars(import_module(f"adjoint.ops.{family}"))["kernels"] = module
    for operator in adjoint.core.plan.operators():
        operator._plans.clear()
    return module


def _noticed(mutant: Mutant, subjects: tuple[Subject, ...], device: torch.device) -> bool:
    """Whether any check fails; those most likely to fail run first, so that mutants die soon."""
    preference = Preference(backend="triton")

    def failed(check: Callable[[], list[Row]]) -> bool:
        try:
            return not all(row.passed for row in check())
        except Exception:
            return True

    def inaccurate(
        subject: Subject, dtype: torch.dtype, cases: Iterable[Case], preference: Preference = preference
    ) -> bool:
        return failed(partial(numerics.accuracy, subject, dtype, device, preference, tuple(cases), "accuracy"))

    strided = "strided" in mutant.function or mutant.function == "split_index"
    likely = {"transposed", "six axes", "five axes"} if strided else {"past one tile", "rows apart", "odd halves"}
    ordered = sorted(
        subjects, key=lambda s: (("pairs" in mutant.function) != ("interleaved" in s.name), s.name != "swiglu")
    )
    soon = {
        subject.name: [case for case in subject.cases if case.name in likely] or list(subject.cases[:2])
        for subject in ordered
    }
    return (
        any(inaccurate(subject, torch.bfloat16, soon[subject.name]) for subject in ordered[:2])
        or failed(partial(_read_at_the_edge, ordered[0], strided, device, preference))
        or any(inaccurate(subject, torch.float32, soon[subject.name][:1]) for subject in ordered[:2])
        or any(failed(partial(numerics.specials, s, d, device, preference)) for s in ordered[:2] for d in s.dtypes)
        or any(
            failed(
                partial(
                    check, replace(subject, cases=tuple(soon[subject.name][:2])), torch.bfloat16, device, preference
                )
            )
            for subject in ordered[:2]
            for check in (bits.poison, bits.upstreams)
        )
        or any(inaccurate(subject, dtype, subject.cases) for subject in ordered for dtype in subject.dtypes)
        or any(
            inaccurate(subject, dtype, subject.cases, Preference(plan=plan))
            for subject in ordered
            for plan in subject.plans
            for dtype in subject.dtypes
        )
    )


def _read_at_the_edge(subject: Subject, strided: bool, device: torch.device, preference: Preference) -> list[Row]:
    """Runs on tensors that end where readable memory ends: a read past them ends the process."""
    case = next((case for case in subject.cases if case.name == "contiguous"), subject.cases[0])
    found = evaluate(subject, case, torch.bfloat16, device, preference)
    inputs, upstream = (each(_at_the_edge, tensors) for tensors in (found.inputs, found.upstream))
    if strided and subject.batched is None:
        inputs, upstream = (tuple(t.T for t in tensors) for tensors in (inputs, upstream))
        inputs = (inputs[0], *(t.contiguous() for t in inputs[1:]))
    differentiate(subject, inputs, upstream, preference)
    return []


def _at_the_edge(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy whose last byte is the last before a page nobody may read."""
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + pages), mmap.PAGESIZE, 0) == 0
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=pages - size)
    return copy.view(tensor.shape).copy_(tensor)


def _parameters() -> list[object]:
    """All mutants that differ; of those in the kernels proper, which move data, two in three are left for --all."""
    listed = []
    for family in FAMILIES:
        package = import_module(f"adjoint.ops.{family}")
        entry_points = {kernel.name for kernel in import_module(f"adjoint.ops.{family}.kernels").KERNELS}
        found = [m for m in mutants(Path(package.__path__[0]) / "kernels.py") if not equivalent(m)]
        for index, mutant in enumerate(found):
            chosen = replace(mutant, sampled=mutant.function in entry_points and index % 3 != 0)
            name = f"{family}:{mutant.function}:{mutant.line}:{mutant.change}"[:120]
            listed.append(pytest.param(family, chosen, id=name))
    return listed


@pytest.mark.kernels
@pytest.mark.skipif(not kernels.interpreting(), reason="mutants run in the interpreter")
@pytest.mark.parametrize(("family", "mutant"), _parameters())
def test_mutant_dies(family: str, mutant: Mutant, tmp_path: Path, device: torch.device, everything: bool) -> None:
    if mutant.sampled and not everything:
        pytest.skip("one in three of the mutants in address arithmetic; all with --all")
    broken = tmp_path / "kernels.py"
    broken.write_text(mutant.source, encoding="utf-8")
    subjects = import_module(f"adjoint.ops.{family}.cases").SUBJECTS
    child = os.fork()  # a mutant may write anywhere: it gets a process of its own
    if child == 0:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.alarm(300)
        noticed = True
        try:
            _load(family, broken)
            with np.errstate(all="ignore"):
                noticed = _noticed(mutant, subjects, device)
        finally:
            os._exit(0 if noticed else UNNOTICED)
    _, status = os.waitpid(child, 0)
    survived = os.WIFEXITED(status) and os.WEXITSTATUS(status) == UNNOTICED
    assert not survived, f"line {mutant.line}: {mutant.change} goes unnoticed"


UNNOTICED = 7


@pytest.mark.kernels
@pytest.mark.skipif(not kernels.interpreting(), reason="mutants run in the interpreter")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_themselves_are_not_noticed(family: str, device: torch.device) -> None:
    """The same checks pass on the unbroken kernels: a mutant dies of its mutation."""
    whole = Mutant("", "", 0, "")
    assert not _noticed(whole, import_module(f"adjoint.ops.{family}.cases").SUBJECTS, device)


def test_mutants_are_found() -> None:
    for family in FAMILIES:
        found = list(mutants(Path(import_module(f"adjoint.ops.{family}").__path__[0]) / "kernels.py"))
        assert len(found) > 50
        functions = {mutant.function for mutant in found}
        listed = {function for function, _ in EQUIVALENT} - {"*"}
        assert listed <= functions, "an equivalent mutant names a function that is gone"
