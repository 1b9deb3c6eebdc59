"""The checks that mutants are tried with, by family."""

import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib import import_module, reload
from itertools import islice
from types import ModuleType

import torch

import adjoint.core.op.operator
import adjoint.core.plan
from adjoint import ops
from adjoint.contract.cases import Case, Subject
from adjoint.contract.inputs import each
from adjoint.core.preference import Preference
from adjoint.verify import Row
from adjoint.verify.checks import bits, numerics
from adjoint.verify.run import differentiate, evaluate
from tests.gluon.model.programs import SCHEDULES
from tests.mutants.calls import conv as conv_calls
from tests.mutants.calls import edges
from tests.mutants.calls import embedding as embedding_calls
from tests.mutants.calls import gluon as gluon_calls
from tests.mutants.calls import indexing as indexing_calls
from tests.mutants.calls import loss as loss_calls
from tests.mutants.calls import norm as norm_calls
from tests.mutants.calls import rotary as rotary_calls
from tests.mutants.calls.edges import at_the_edge
from tests.mutants.calls.gated_delta import backward as rule_backward_calls
from tests.mutants.calls.gated_delta import rule as rule_calls
from tests.mutants.calls.gated_delta import stages as stage_calls
from tests.mutants.calls.gated_delta import step as step_calls
from tests.mutants.calls.moe import dispatch as dispatch_calls
from tests.mutants.calls.moe import experts as experts_calls
from tests.mutants.calls.moe import route as route_calls
from tests.mutants.trees import Mutant, source_of

CPU = torch.device("cpu")
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
    "rotary": ("adjoint.ops.rotary.rotary.kernels",),
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
        "adjoint.ops.moe.experts.hopper.tiles",
        *gluon_calls.EXPERT_MODULES,
    ),
    "loss": loss_calls.MODULES,
    "gated_delta": (
        *RULE,
        "adjoint.ops.gated_delta.step.kernels",
        "adjoint.ops.gated_delta.stages.gate.kernels",
        "adjoint.ops.gated_delta.stages.w_u.kernels",
        gluon_calls.SHARED,
        *gluon_calls.RULE_MODULES,
    ),
}
"""Every module with kernels, under the first family that uses it."""


def load(name: str, source: str) -> None:
    """Puts a source in the place of a module."""
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # Triton reads sources again
    module = ModuleType(name)
    module.__file__ = import_module(name).__file__  # beside which its schedules lie
    sys.modules[name] = module
    exec(compile(source, file, "exec"), vars(module))
    parent, _, leaf = name.rpartition(".")
    vars(import_module(parent))[leaf] = module
    for operator in adjoint.core.op.operator.operators():
        operator.plans.clear()


# ----------------------------------------------------------------------------------------- activation


def _activation_noticed(mutant: Mutant) -> bool:
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
        return failed(partial(numerics.accuracy, subject, dtype, CPU, preference, tuple(cases), "accuracy"))

    strided = "strided" in mutant.function or mutant.function == "split_index"
    likely = {"transposed", "six axes", "five axes"} if strided else {"past one tile", "rows apart", "odd halves"}
    ordered = sorted(
        subjects,
        key=lambda s: (
            ("pairs" in mutant.function) != ("interleaved" in s.name),
            ("sigmoid" in mutant.function) != (s.name == "sigmoid_gate"),
            s.name not in ("swiglu", "sigmoid_gate"),
        ),
    )
    soon = {
        subject.name: [case for case in subject.cases if case.name in likely] or list(subject.cases[:2])
        for subject in ordered
    }
    return (
        any(inaccurate(subject, torch.bfloat16, soon[subject.name]) for subject in ordered[:3])
        or failed(partial(_read_at_the_edge, ordered[0], strided, preference))
        or any(inaccurate(subject, torch.float32, soon[subject.name][:1]) for subject in ordered[:3])
        or any(failed(partial(numerics.specials, s, d, CPU, preference)) for s in ordered[:3] for d in s.dtypes)
        or any(
            failed(
                partial(check, replace(subject, cases=tuple(soon[subject.name][:2])), torch.bfloat16, CPU, preference)
            )
            for subject in ordered[:3]
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


def _read_at_the_edge(subject: Subject, strided: bool, preference: Preference) -> list[Row]:
    """Runs on tensors that end where readable memory ends: a read past them ends the process."""
    case = next((case for case in subject.cases if case.name == "contiguous"), subject.cases[0])
    found = evaluate(subject, case, torch.bfloat16, CPU, preference)
    inputs, upstream = (each(at_the_edge, tensors) for tensors in (found.inputs, found.upstream))
    if strided and subject.batched is None:
        inputs, upstream = (tuple(t.T for t in tensors) for tensors in (inputs, upstream))
        inputs = (inputs[0], *(t.contiguous() for t in inputs[1:]))
    differentiate(subject, inputs, upstream, preference)
    return []


# ----------------------------------------------------------------------------------------------- norm


def _norm_noticed(mutant: Mutant) -> bool:
    """Whether any call gives other bits than the kernels as they are; blocks and runs are small."""
    edges.guard()
    if mutant.module == "adjoint.device.row_tiles":
        for name in MODULES["norm"][:2]:
            load(name, source_of(name))
    norm_calls.shrink()
    try:
        return norm_calls.noticed(mutant.module)
    except Exception:
        return True


# ----------------------------------------------------------------------------------------------- loss


def _loss_noticed(mutant: Mutant) -> bool:
    """Whether any call gives other bits than the kernels as they are; segments and blocks are small."""
    edges.guard()
    for later in (*MODULES["loss"][MODULES["loss"].index(mutant.module) + 1 :], *loss_calls.LAUNCHES):
        load(later, source_of(later))
    loss_calls.shrink()
    try:
        return loss_calls.noticed(mutant.module)
    except Exception:
        return True


# ----------------------------------------------------------------------------------------------- conv


def _conv_noticed(mutant: Mutant) -> bool:
    """Whether any call gives other bits than the kernels as they are; blocks, stretches and runs are small."""
    edges.guard()
    if mutant.module == MODULES["conv"][0]:  # which the others import
        for name in MODULES["conv"][1:]:
            load(name, source_of(name))
    conv_calls.shrink()
    try:
        return conv_calls.noticed(mutant.module)
    except Exception:
        return True


# --------------------------------------------------------------------------------------------- rotary


def _rotary_noticed(mutant: Mutant) -> bool:
    """Whether any call gives other bits than the eager path, at either edge of memory; tiles are small."""
    edges.guard()
    rotary_calls.shrink()
    return any(_differs(call, number) for number, call in enumerate(rotary_calls.calls()))


# ------------------------------------------------------------------------------------------ embedding


def _embedding_noticed(mutant: Mutant, stage: str) -> bool:
    """Whether any call of a stage gives other bits than the eager path; in "small", tiles and programs are."""
    edges.guard()
    if stage == "small":
        sources = {name: mutant.source if name == mutant.module else source_of(name) for name in MODULES["embedding"]}
        embedding_calls.shrink(sources, load)
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


def _indexing_noticed(mutant: Mutant, stage: str) -> bool:
    """Whether any call of a stage gives other bits than the eager path; in "small", tiles and programs are."""
    edges.guard()
    modules = MODULES["indexing"]
    if stage == "small":
        sources = {name: mutant.source if name == mutant.module else source_of(name) for name in modules}
        indexing_calls.shrink(sources, load)
    else:
        for later in modules[modules.index(mutant.module) + 1 :]:
            load(later, source_of(later))
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


def _moe_noticed(mutant: Mutant) -> bool:
    """Whether any call gives other bits than the eager path; spans and programs are small."""
    edges.guard()
    if mutant.module in route_calls.MODULES:
        for dependent in route_calls.dependents(mutant.module):
            load(dependent, source_of(dependent))
        try:
            return route_calls.noticed(mutant.module)
        except Exception:
            return True
    if mutant.module.endswith(".hopper.tiles"):
        return experts_calls.tiles_noticed()
    if ".experts." in mutant.module:
        experts_calls.shrink()
        return experts_calls.noticed()
    dispatch_calls.shrink()
    return any(_differs(call, number) for number, call in enumerate(dispatch_calls.calls()))


# ---------------------------------------------------------------------------------------- gated delta


def _gated_delta_noticed(mutant: Mutant) -> bool:
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
    if _is_of_the_backward(mutant.module) or mutant.function in _OF_THE_BACKWARD:
        return rule_backward_calls.noticed(mutant.function)
    if rule_calls.noticed():
        return True
    return mutant.function == "rule_state_scan" and rule_backward_calls.noticed(mutant.function)


def _is_of_the_backward(module: str) -> bool:
    return module.endswith(("gradients", "reverse_scan"))


_OF_THE_BACKWARD = ("rule_unnormalize", "rule_compose_reverse_transitions")
"""Kernels of the backward alone, beside those of its own modules."""


Noticed = Callable[[Mutant], bool]
JUDGES: dict[str, tuple[ModuleType, ...]] = {
    "activation": (edges, bits, numerics),
    "norm": (edges, norm_calls),
    "conv": (edges, conv_calls),
    "rotary": (edges, rotary_calls),
    "embedding": (edges, embedding_calls),
    "indexing": (edges, indexing_calls),
    "moe": (edges, dispatch_calls, route_calls, experts_calls, gluon_calls),
    "loss": (edges, loss_calls),
    "gated_delta": (edges, rule_calls, rule_backward_calls, step_calls, stage_calls, gluon_calls),
}
"""The modules that say what a family's checks are: where they change, its mutants are tried again."""
STAGES: dict[str, tuple[Noticed, ...]] = {
    "activation": (_activation_noticed,),
    "norm": (_norm_noticed,),
    "conv": (_conv_noticed,),
    "rotary": (_rotary_noticed,),
    "embedding": tuple(partial(_embedding_noticed, stage=stage) for stage in ("first", "small", "rest")),
    "indexing": tuple(partial(_indexing_noticed, stage=stage) for stage in ("small", "whole")),
    "moe": (_moe_noticed,),
    "loss": (_loss_noticed,),
    "gated_delta": (_gated_delta_noticed,),
}
"""Checks by family, each in a process of its own, as a mutant may write anywhere; until one of them notices."""


GLUON = tuple(partial(gluon_calls.noticed, schedule=schedule) for schedule in SCHEDULES)
"""Those of kernels in Gluon, a schedule each: most mutants need no second one."""


def stages(family: str, mutant: Mutant) -> tuple[Noticed, ...]:
    """The checks, those most likely to notice first: levels of sums have most to do where tiles are small."""
    if mutant.module in gluon_calls.MODULES:
        return GLUON
    stages = STAGES[family]
    return (stages[1], stages[0], stages[2]) if mutant.function in LEVELS else stages


LEVELS = ("find_tile", "embedding_sum_tiles", "embedding_sum_partials", "embedding_write_groups")


def unbroken(module: str) -> Mutant:
    """A module as it is, in the place of a mutant."""
    return Mutant("", "", (0, 0), partial(source_of, module), module)


def controls(family: str, alone: bool) -> list[tuple[str, ...]]:
    """Modules of a family that pass through the checks as they are: each alone, or those together that all have the
    same calls to judge them."""
    groups = () if alone else tuple(group for group in SAME_CALLS if group[0] in MODULES[family])
    together = {module for group in groups for module in group}
    return [*groups, *((module,) for module in MODULES[family] if module not in together)]


SAME_CALLS = (
    tuple(module for module in RULE if not _is_of_the_backward(module)),
    tuple(module for module in RULE if _is_of_the_backward(module)),
    tuple(f"adjoint.ops.moe.experts.triton.{part}" for part in EXPERTS),
)
"""Modules whose mutants are judged by the same calls, whichever of them is broken; in the order of their imports."""


def warm(modules: Iterable[str]) -> None:
    """Does what is done once, before the processes for mutants of these modules part."""
    for module in modules:
        next((prepare for part, prepare in _PREPARATIONS.items() if part in module), lambda: None)()


def _first(*makers: Callable[[], Iterator[edges.Call]]) -> Callable[[], None]:
    def run() -> None:
        for make in makers:
            for backend in ("eager", "triton"):
                next(make())(backend)

    return cache(run)


def _prepare_rule() -> None:
    rule_calls.warm()
    rule_backward_calls.warm()


_LOOKUPS = _first(partial(embedding_calls.lookups, small=False), partial(embedding_calls.bags, small=False))
_PREPARATIONS: dict[str, Callable[[], None]] = {
    ".norm.": partial(norm_calls.record, MODULES["norm"]),
    ".row_tiles": partial(norm_calls.record, MODULES["norm"]),
    ".loss.": loss_calls.record,
    ".conv.": partial(conv_calls.record, MODULES["conv"]),
    ".grouping.": _LOOKUPS,
    ".embedding.": _LOOKUPS,
    ".indexing.": _first(partial(indexing_calls.takes, False, ("few",))),
    ".experts.hopper.": gluon_calls.record_experts,
    ".moe.": _first(dispatch_calls.calls),
    ".hopper.": gluon_calls.record,
    gluon_calls.SHARED: gluon_calls.record,
    ".rule.": cache(_prepare_rule),
}
"""By a part of a module's name: the first that it has."""
