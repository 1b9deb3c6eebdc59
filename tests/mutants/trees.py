"""Mutants: a module of kernels with one operator, comparison or constant changed, made from its syntax tree."""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path

from tests.mutants.equivalent import EQUIVALENT

_SWAPS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
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
    write: Callable[[], str]
    """Writes the source: of ten thousand mutants, a commit tries a few hundred."""
    module: str
    everywhere: str = ""
    """The change without the number of its place."""
    number: int = 0
    """Among those of its module, the equivalent ones included."""

    @cached_property
    def source(self) -> str:
        """Of the module, with the change in it."""
        return self.write()


@dataclass(frozen=True)
class Edit:
    """A node of a module's tree, and what takes its place: a field of another node, or one of a list there."""

    parent: ast.AST
    field: str
    index: int | None
    changed: ast.AST

    @contextmanager
    def made(self) -> Iterator[None]:
        """The tree with the change in it."""
        before = self._put(self.changed)
        try:
            yield
        finally:
            self._put(before)

    def _put(self, node: ast.AST) -> ast.AST:
        value = getattr(self.parent, self.field)
        if self.index is None:
            setattr(self.parent, self.field, node)
            return value
        before, value[self.index] = value[self.index], node
        return before


def _mutations(node: ast.AST) -> Iterator[ast.AST]:
    """The node, changed in each way that applies to it."""
    if isinstance(node, ast.BinOp) and type(node.op) in _SWAPS:
        yield ast.BinOp(node.left, _SWAPS[type(node.op)](), node.right)
    if isinstance(node, ast.AugAssign) and type(node.op) in _SWAPS:
        yield ast.AugAssign(node.target, _SWAPS[type(node.op)](), node.value)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        yield ast.Compare(node.left, [_COMPARISONS[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.Constant) and type(node.value) is float:
        yield ast.Constant(node.value * 1.5 if node.value else 1.0)
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value:
        yield ast.Constant(node.value + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert | ast.Not):
        yield node.operand
    if isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
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
        if name == "store" and any(keyword.arg == "mask" for keyword in node.keywords):
            yield ast.Call(node.func, node.args, [keyword for keyword in node.keywords if keyword.arg != "mask"])


def source_of(module: str) -> str:
    """A module's source, as its syntax tree says it."""
    return ast.unparse(ast.parse(Path(str(import_module(module).__file__)).read_text(encoding="utf-8")))


def mutants(module: str) -> list[Mutant]:
    """Every mutant of a kernel module; where a function has the same change in several places, they are numbered."""
    found = list(_found(module))
    places = defaultdict(list)
    for mutant in found:
        places[mutant.function, mutant.change].append(mutant.place)
    numbered = []
    for number, mutant in enumerate(found):
        same = sorted(places[mutant.function, mutant.change])
        change = f"{mutant.change} ({same.index(mutant.place) + 1})" if len(same) > 1 else mutant.change
        numbered.append(replace(mutant, change=change, everywhere=mutant.change, number=number))
    return numbered


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef, ast.stmt]]:
    """Every function that is compiled: its qualified name, itself, and the statement of the module it is part of."""
    for statement in tree.body:
        scopes = [("", [statement])]
        if isinstance(statement, ast.ClassDef):
            scopes = [(f"{statement.name}.", statement.body)]
        for prefix, body in scopes:
            for function in body:
                if isinstance(function, ast.FunctionDef) and "jit" in " ".join(
                    map(ast.unparse, function.decorator_list)
                ):
                    yield f"{prefix}{function.name}", function, statement


def _is_layout(node: ast.AST) -> bool:
    """Whether an expression says which thread has what, on which no value depends, or how many registers it has."""
    if isinstance(node, ast.keyword):
        return node.arg == "worker_num_regs"
    name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    return name.endswith(("Layout", "_layout"))


def _found(module: str) -> Iterator[Mutant]:
    tree = ast.parse(Path(str(import_module(module).__file__)).read_text(encoding="utf-8"))
    texts = [ast.unparse(statement) for statement in tree.body]
    for name, function, part in _functions(tree):
        number = tree.body.index(part)
        native = {
            id(node)
            for branch in ast.walk(function)
            if isinstance(branch, ast.If) and "NATIVE" in ast.unparse(branch.test)
            for inner in (branch.test, *branch.body)
            for node in ast.walk(inner)
        }  # inline assembly: no interpreter runs it; the builds check its text
        parents = {child: parent for parent in ast.walk(function) for child in ast.iter_child_nodes(parent)}
        outside = (*function.decorator_list, *(each.annotation for each in function.args.args if each.annotation))
        layouts = [node for node in ast.walk(function) if _is_layout(node)]
        declared = {id(node) for part in (*outside, *layouts) for node in ast.walk(part)}  # computes nothing
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
                        edit = Edit(statement, field, index if isinstance(value, list) else None, changed)
                        before = ast.unparse(place)
                        with edit.made():
                            after = ast.unparse(changed if place is child else place)
                        at = (getattr(child, "lineno", 0), getattr(child, "col_offset", 0))
                        write = partial(_written, edit, texts, number, part)
                        yield Mutant(name, f"{before} -> {after}", at, write, module)


def _written(edit: Edit, texts: list[str], number: int, part: ast.stmt) -> str:
    """A module's source with a change in one of its statements."""
    with edit.made():
        return "\n".join((*texts[:number], ast.unparse(part), *texts[number + 1 :]))


def _named(parent: ast.AST, child: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.AST:
    """What a change is called by: what changes, or for an integer, which is like many others, what it is part of."""
    number = child.operand if isinstance(child, ast.UnaryOp) else child
    if not (isinstance(number, ast.Constant) and type(number.value) is int):
        return child
    while isinstance(parent, ast.UnaryOp):
        parent = parents[parent]
    return parent


def names(mutant: Mutant) -> list[str]:
    """What a mutant's function may be called in the list: its own name, or with more and more of its module's."""
    parts = mutant.module.split(".")
    return [".".join((*parts[begin:], mutant.function)) for begin in range(len(parts), -1, -1)]


def equivalent(mutant: Mutant) -> bool:
    return any((name, mutant.change) in EQUIVALENT for name in names(mutant)) or ("*", mutant.everywhere) in EQUIVALENT
