"""Every arithmetic operator, comparison and constant in every kernel is broken in turn; a check must notice.

The mutants are made from the syntax trees of the modules in `MODULES`, inside their `@triton.jit`
functions, and run in the interpreter. One that survives is either a hole in the checks or an
equivalent program, and must then be listed in `mutants.equivalent` with the reason.
"""

import ast
import faulthandler
import linecache
import os
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module, reload
from itertools import islice
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import adjoint.core.operator
import adjoint.core.plan
from adjoint import ops
from adjoint.contract.cases import Case, Subject
from adjoint.contract.inputs import each
from adjoint.core import kernels
from adjoint.core.preference import Preference
from adjoint.ops import FAMILIES
from adjoint.verify import Row, bits, numerics
from adjoint.verify.run import differentiate, evaluate
from tests.mutants import calls as edges
from tests.mutants import (
    conv_calls,
    dispatch_calls,
    embedding_calls,
    experts_calls,
    indexing_calls,
    norm_calls,
    route_calls,
    rule_backward_calls,
    rule_calls,
    stage_calls,
    step_calls,
)
from tests.mutants.calls import at_the_edge
from tests.mutants.equivalent import EQUIVALENT

EXPERTS = ("tiles", "products", "token_sums", "hidden_gradients")

RULE = tuple(
    f"adjoint.ops.gated_delta.rule.triton.{part}"
    for part in (
        "chunk_indices",
        "gates",
        "normalize",
        "chunk_inverse",
        "state_scan",
        "compose_transitions",
        "output",
        "local_gradients",
        "reverse_scan",
        "gradients",
    )
)
"""Modules of kernels in the order of their imports: those after a mutant are loaded again, with the mutant in them."""

MODULES = {
    "activation": ("adjoint.ops.activation.kernels",),
    "norm": ("adjoint.ops.norm.kernels", "adjoint.ops.norm.l2_norm.kernels", "adjoint.device.row_tiles"),
    "conv": tuple(f"adjoint.ops.conv.triton.{part}" for part in ("rows", "forward", "backward", "step")),
    "embedding": (
        "adjoint.device.grouping.kernels",
        "adjoint.ops.embedding.kernels",
        "adjoint.ops.embedding.embedding.kernels",
        "adjoint.ops.embedding.bag.kernels",
    ),
    "indexing": tuple(f"adjoint.ops.indexing.take_along_axis.triton.{part}" for part in ("take", "lines", "sorting")),
    "moe": (
        "adjoint.ops.moe.layout.kernels",
        "adjoint.ops.moe.token_rows.kernels",
        "adjoint.ops.moe.dispatch.kernels",
        "adjoint.ops.moe.combine.kernels",
        *route_calls.MODULES,
        *(f"adjoint.ops.moe.experts.triton.{part}" for part in EXPERTS),
    ),
    "gated_delta": (
        *RULE,
        "adjoint.ops.gated_delta.step.kernels",
        "adjoint.ops.gated_delta.stages.gate.kernels",
        "adjoint.ops.gated_delta.stages.w_u.kernels",
    ),
}
"""Every module with kernels, under the first family that uses it."""

IN_GLUON = tuple(
    f"adjoint.ops.gated_delta.rule.hopper.{part}"
    for part in (
        "chunk_inverse",
        "forward_scan",
        "transitions",
        "state_scan",
        "local_gradients",
        "reverse_scan",
        "gradients",
    )
)
"""Which has no interpreter."""

_SWAPS: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult}
_COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq
}  # fmt: skip
_CALLS = {"maximum": "minimum", "minimum": "maximum", "exp": "exp2", "exp2": "exp", "floor": "ceil"}


@dataclass(frozen=True)
class Mutant:
    function: str
    change: str
    place: tuple[int, int]
    """Line and column."""
    source: str
    module: str
    everywhere: str = ""
    """The change without the number of its place."""
    sampled: str = ""
    """Why it is left for --all, where it is."""


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


def _source(module: str) -> str:
    """A module's source, as its syntax tree says it."""
    return ast.unparse(ast.parse(Path(str(import_module(module).__file__)).read_text(encoding="utf-8")))


def mutants(module: str) -> list[Mutant]:
    """Every mutant of a kernel module; where a function has the same change in several places, they are numbered."""
    found = list(_found(module))
    places = defaultdict(list)
    for mutant in found:
        places[mutant.function, mutant.change].append(mutant.place)
    numbered = []
    for mutant in found:
        same = sorted(places[mutant.function, mutant.change])
        change = f"{mutant.change} ({same.index(mutant.place) + 1})" if len(same) > 1 else mutant.change
        numbered.append(replace(mutant, change=change, everywhere=mutant.change))
    return numbered


def _found(module: str) -> Iterator[Mutant]:
    tree = ast.parse(Path(str(import_module(module).__file__)).read_text(encoding="utf-8"))
    texts = [ast.unparse(statement) for statement in tree.body]
    for number, function in enumerate(tree.body):
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
        parents = {child: parent for parent in ast.walk(function) for child in ast.iter_child_nodes(parent)}
        outside = (*function.decorator_list, *(each.annotation for each in function.args.args if each.annotation))
        declared = {id(node) for part in outside for node in ast.walk(part)}  # computes nothing
        for statement in ast.walk(function):
            if id(statement) in declared:
                continue
            for field, value in ast.iter_fields(statement):
                children = value if isinstance(value, list) else [value]
                for index, child in enumerate(children):
                    if not isinstance(child, ast.AST) or isinstance(child, ast.FunctionDef):
                        continue
                    if id(child) in native or id(child) in declared:
                        continue
                    for changed in _mutations(child):
                        place = _named(statement, child, parents)
                        before = ast.unparse(place)
                        if isinstance(value, list):
                            value[index] = changed
                        else:
                            setattr(statement, field, changed)
                        after = ast.unparse(changed if place is child else place)
                        source = "\n".join((*texts[:number], ast.unparse(function), *texts[number + 1 :]))
                        if isinstance(value, list):
                            value[index] = child
                        else:
                            setattr(statement, field, child)
                        at = (getattr(child, "lineno", 0), getattr(child, "col_offset", 0))
                        yield Mutant(function.name, f"{before} -> {after}", at, source, module)


def _named(parent: ast.AST, child: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.AST:
    """What a change is called by: what changes, or for an integer, which is like many others, what it is part of."""
    number = child.operand if isinstance(child, ast.UnaryOp) else child
    if not (isinstance(number, ast.Constant) and type(number.value) is int):
        return child
    while isinstance(parent, ast.UnaryOp):
        parent = parents[parent]
    return parent


def equivalent(mutant: Mutant) -> bool:
    return (mutant.function, mutant.change) in EQUIVALENT or ("*", mutant.everywhere) in EQUIVALENT


def _load(name: str, source: str) -> None:
    """Puts a source in the place of a module."""
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # Triton reads sources again
    module = ModuleType(name)
    module.__file__ = import_module(name).__file__  # beside which its schedules lie
    sys.modules[name] = module
    exec(compile(source, file, "exec"), vars(module))
    parent, _, leaf = name.rpartition(".")
    vars(import_module(parent))[leaf] = module
    for operator in adjoint.core.operator.operators():
        operator.plans.clear()


# ----------------------------------------------------------------------------------------- activation


def _activation_noticed(mutant: Mutant, device: torch.device) -> bool:
    """Whether any check fails; those most likely to fail run first, so that mutants die soon."""
    preference = Preference(backend="triton")
    subjects = [subject for module in ops.cases("activation") for subject in module.SUBJECTS]

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
    inputs, upstream = (each(at_the_edge, tensors) for tensors in (found.inputs, found.upstream))
    if strided and subject.batched is None:
        inputs, upstream = (tuple(t.T for t in tensors) for tensors in (inputs, upstream))
        inputs = (inputs[0], *(t.contiguous() for t in inputs[1:]))
    differentiate(subject, inputs, upstream, preference)
    return []


# ----------------------------------------------------------------------------------------------- norm


def _norm_noticed(mutant: Mutant, device: torch.device) -> bool:
    """Whether any call gives other bits than the kernels as they are; blocks and runs are small."""
    edges.guard()
    if mutant.module == "adjoint.device.row_tiles":
        for name in MODULES["norm"][:2]:
            _load(name, _source(name))
    norm_calls.shrink()
    try:
        return norm_calls.noticed(mutant.module)
    except Exception:
        return True


# ----------------------------------------------------------------------------------------------- conv


def _conv_noticed(mutant: Mutant, device: torch.device) -> bool:
    """Whether any call gives other bits than the kernels as they are; blocks, stretches and runs are small."""
    edges.guard()
    if mutant.module == MODULES["conv"][0]:  # which the others import
        for name in MODULES["conv"][1:]:
            _load(name, _source(name))
    conv_calls.shrink()
    try:
        return conv_calls.noticed(mutant.module)
    except Exception:
        return True


# ------------------------------------------------------------------------------------------ embedding


def _embedding_noticed(mutant: Mutant, device: torch.device, stage: str) -> bool:
    """Whether any call of a stage gives other bits than the eager path; in "small", tiles and programs are."""
    edges.guard()
    if stage == "small":
        sources = {name: mutant.source if name == mutant.module else _source(name) for name in MODULES["embedding"]}
        embedding_calls.shrink(sources, _load)
    made = embedding_calls.bags if ".bag." in mutant.module else embedding_calls.lookups
    calls = list(made(small=stage == "small"))
    if mutant.function == "load_term":  # most of it is for bags
        calls = [*islice(embedding_calls.bags(small=stage == "small"), 4), *calls]
    chosen = {"first": slice(FIRST), "small": slice(None), "rest": slice(FIRST, None)}[stage]
    return any(_differs(call, number) for number, call in list(enumerate(calls))[chosen])


def _differs(call: edges.Call, number: int) -> bool:
    try:
        return edges.differs(call, number)
    except Exception:
        return True


FIRST = 11


# ------------------------------------------------------------------------------------------- indexing


def _indexing_noticed(mutant: Mutant, device: torch.device, stage: str) -> bool:
    """Whether any call of a stage gives other bits than the eager path; in "small", tiles and programs are."""
    edges.guard()
    modules = MODULES["indexing"]
    if stage == "small":
        sources = {name: mutant.source if name == mutant.module else _source(name) for name in modules}
        indexing_calls.shrink(sources, _load)
    else:
        for later in modules[modules.index(mutant.module) + 1 :]:
            _load(later, _source(later))
    calls = indexing_calls.takes(stage == "small", PLANS.get(mutant.function, SHARED[mutant.module.rpartition(".")[2]]))
    return any(_differs(call, number) for number, call in enumerate(calls))


PLANS = {
    "take_forward": ("few", "scatter"),
    "take_backward_few": ("few",),
    "take_backward_lines": ("lines",),
    "larger": ("lines",),
    "take_scatter": ("scatter",),
}
"""The plans that run a function; those of its module where it is not listed."""
SHARED = {
    "take": ("few", "lines", "scatter"),
    "lines": ("few", "lines", "scatter"),
    "sorting": ("sorted",),
}


# ------------------------------------------------------------------------------------------------ moe


def _moe_noticed(mutant: Mutant, device: torch.device) -> bool:
    """Whether any call gives other bits than the eager path; spans and programs are small."""
    edges.guard()
    if mutant.module in route_calls.MODULES:
        for dependent in route_calls.dependents(mutant.module):
            _load(dependent, _source(dependent))
        try:
            return route_calls.noticed(mutant.module)
        except Exception:
            return True
    if ".experts." in mutant.module:
        experts_calls.shrink()
        return experts_calls.noticed()
    dispatch_calls.shrink()
    return any(_differs(call, number) for number, call in enumerate(dispatch_calls.calls()))


# ---------------------------------------------------------------------------------------- gated delta


def _gated_delta_noticed(mutant: Mutant, device: torch.device) -> bool:
    """Whether any result is further from the definition than rounding; segments, tiles and programs are small."""
    edges.guard()
    if ".stages." in mutant.module:
        try:
            return stage_calls.noticed(mutant.module)
        except Exception:
            return True
    if ".step." in mutant.module:
        step_calls.shrink()
        return step_calls.noticed()
    whole = ("adjoint.ops.gated_delta.rule.forward", "adjoint.ops.gated_delta.rule.backward")
    for later in (*RULE[RULE.index(mutant.module) + 1 :], *whole):
        reload(import_module(later))
    if mutant.module.endswith(("gradients", "reverse_scan")) or mutant.function in _OF_THE_BACKWARD:
        return rule_backward_calls.noticed()
    return rule_calls.noticed() or (mutant.function == "rule_state_scan" and rule_backward_calls.noticed())


_OF_THE_BACKWARD = ("rule_unnormalize", "rule_compose_reverse_transitions")
"""Kernels of the backward alone, beside those of its own modules."""


# ---------------------------------------------------------------------------------------------- tests

Noticed = Callable[[Mutant, torch.device], bool]
STAGES: dict[str, tuple[Noticed, ...]] = {
    "activation": (_activation_noticed,),
    "norm": (_norm_noticed,),
    "conv": (_conv_noticed,),
    "embedding": tuple(partial(_embedding_noticed, stage=stage) for stage in ("first", "small", "rest")),
    "indexing": tuple(partial(_indexing_noticed, stage=stage) for stage in ("small", "whole")),
    "moe": (_moe_noticed,),
    "gated_delta": (_gated_delta_noticed,),
}
"""Checks by family, each in a process of its own, as a mutant may write anywhere; until one of them notices."""


def _stages(family: str, mutant: Mutant) -> tuple[Noticed, ...]:
    """The checks, those most likely to notice first: levels of sums have most to do where tiles are small."""
    stages = STAGES[family]
    return (stages[1], stages[0], stages[2]) if mutant.function in LEVELS else stages


LEVELS = ("find_tile", "embedding_sum_tiles", "embedding_sum_partials", "embedding_write_groups")

NOTICED, UNNOTICED, UNDECIDED = 0, 7, 8


def _ends(mutant: Mutant, noticed: Noticed, device: torch.device) -> int:
    """How a process that runs a mutant through checks ends, as `waitpid` says it."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.alarm(300)
        torch.set_num_threads(1)  # a pool of threads does not survive a fork
        end = UNDECIDED  # what fails before the checks run says nothing about the mutant
        try:
            _load(mutant.module, mutant.source)
            with np.errstate(all="ignore"):
                end = NOTICED if noticed(mutant, device) else UNNOTICED
        finally:
            os._exit(end)
    return os.waitpid(child, 0)[1]


@pytest.fixture(scope="module")
def warm() -> None:
    """Imports, and everything else that is done once, are done before processes part."""
    firsts = (
        embedding_calls.lookups(small=False),
        embedding_calls.bags(small=False),
        indexing_calls.takes(False, ("few",)),
        dispatch_calls.calls(),
    )
    for call in map(next, firsts):
        for backend in ("eager", "triton"):
            call(backend)
    norm_calls.record(MODULES["norm"])
    conv_calls.record(MODULES["conv"])


def _survives(mutant: Mutant, noticed: Noticed, device: torch.device) -> bool:
    """Whether checks let a mutant pass; one that they cannot be run on has not died of them."""
    status = _ends(mutant, noticed, device)
    assert status != UNDECIDED << 8, "the checks do not run"
    return status == UNNOTICED << 8


def _parameters() -> list[object]:
    """All mutants that differ; some of those that move data are left for --all."""
    listed = []
    for family in FAMILIES if kernels.interpreting() else ():
        for module in MODULES[family]:
            loaded = import_module(module)
            entry_points = {k.name for k in kernels.registered().values() if k.function.__module__ == loaded.__name__}
            found = mutants(module)
            for index, mutant in enumerate(found):  # counted with the equivalent ones, which come and go
                if equivalent(mutant):
                    continue
                chosen = replace(
                    mutant, sampled=_left_out(module, family, mutant.function in entry_points, index, len(found))
                )
                name = f"{module.removeprefix('adjoint.')}:{mutant.function}:{mutant.place[0]}:{mutant.change}"[:120]
                listed.append(pytest.param(family, chosen, id=name))
    return listed


def _left_out(module: str, family: str, moves_data: bool, index: int, among: int) -> str:
    """Why a mutant is left for --all; empty when it is not."""
    one_in = ONE_IN.get(module, ONE_IN[family])[moves_data]
    if index % one_in == 0:
        return ""
    what = "in kernels proper, which move data" if moves_data else "in functions that kernels call"
    return f"one in {one_in} of the mutants {what} ({among} in this module); all with --all"


ONE_IN = {
    "activation": (6, 12),
    "norm": (12, 19),
    "conv": (17, 41),
    "embedding": (8, 16),
    "indexing": (8, 27),
    "moe": (10, 20),
    **dict.fromkeys(route_calls.MODULES, (23, 31)),
    **{f"adjoint.ops.moe.experts.triton.{part}": (19, 29) for part in EXPERTS},  # a layer takes it a second
    "gated_delta": (199, 307),  # sequences take it several
    "adjoint.ops.gated_delta.step.kernels": (61, 127),
}
"""Of how many mutants one is tried without --all, by family or module: in functions kernels call, and in kernels."""


@pytest.mark.kernels
@pytest.mark.skipif(not kernels.interpreting(), reason="mutants run in the interpreter")
@pytest.mark.parametrize(("family", "mutant"), _parameters())
def test_mutant_dies(family: str, mutant: Mutant, warm: None, device: torch.device, everything: bool) -> None:
    if mutant.sampled and not everything:
        pytest.skip(mutant.sampled)
    survived = all(_survives(mutant, noticed, device) for noticed in _stages(family, mutant))
    assert not survived, f"line {mutant.place[0]}: {mutant.change} goes unnoticed"


@pytest.mark.kernels
@pytest.mark.skipif(not kernels.interpreting(), reason="mutants run in the interpreter")
@pytest.mark.parametrize(("family", "module"), [(family, module) for family in FAMILIES for module in MODULES[family]])
def test_the_kernels_themselves_are_not_noticed(
    family: str, module: str, warm: None, device: torch.device, everything: bool
) -> None:
    """The same checks pass on the unbroken kernels: a mutant dies of its mutation."""
    for noticed in STAGES[family] if everything else STAGES[family][:1]:
        assert _survives(Mutant("", "", (0, 0), _source(module), module), noticed, device)


def test_every_module_with_kernels_has_mutants() -> None:
    listed = {module for modules in MODULES.values() for module in modules}
    root = Path(str(adjoint.__file__)).parent
    with_kernels = {
        ".".join(("adjoint", *file.relative_to(root).with_suffix("").parts))
        for file in root.rglob("*.py")
        if re.search(r"^@triton\.jit", file.read_text(encoding="utf-8"), re.MULTILINE)
    } - {"adjoint.device.faults"}
    assert with_kernels == listed and set(MODULES) == set(FAMILIES)


def test_mutants_are_found() -> None:
    changes = set()
    for modules in MODULES.values():
        for module in modules:
            found = mutants(module)
            assert len(found) > 10
            changes |= {(mutant.function, mutant.change) for mutant in found} | {("*", m.everywhere) for m in found}
    assert not set(EQUIVALENT) - changes, "equivalent mutants are gone"
