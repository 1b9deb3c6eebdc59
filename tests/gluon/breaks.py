"""Kernels with one piece of synchronisation taken out."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, ModuleType

SYNCHRONISATION = (
    "wait", "arrive", "wait_group", "commit_group", "mbarrier_arrive", "warpgroup_mma_wait", "expect", "store_wait",
)  # fmt: skip
"""Calls that a program cannot do without."""


@dataclass(frozen=True)
class Break:
    """A function of a module without one statement."""

    module: str
    function: str
    statement: str
    line: int
    code: CodeType

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.function}, line {self.line}: without {self.statement}"


def _called(statement: ast.stmt) -> ast.Call | None:
    """The call that a statement is, or assigns."""
    value = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
    value = value.left if isinstance(value, ast.BinOp) else value
    if not isinstance(value, ast.Call):
        return None
    name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
    return value if name in SYNCHRONISATION else None


class _Without(ast.NodeTransformer):
    def __init__(self, line: int) -> None:
        self.line = line

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.copy_location(ast.Pass(), node) if node.lineno == self.line else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if node.lineno == self.line and getattr(node.func, "id", "") == "warpgroup_mma_wait":
            (deps,) = [keyword.value for keyword in node.keywords]
            assert isinstance(deps, ast.List)
            return deps.elts[0] if len(deps.elts) == 1 else ast.Tuple(deps.elts, ast.Load())
        return self.generic_visit(node)


def breaks(module: ModuleType) -> Iterator[Break]:
    """Every way to leave out one statement."""
    source = inspect.getsource(module)
    tree = ast.parse(source)
    functions = [("", tree), *((f"{each.name}.", each) for each in tree.body if isinstance(each, ast.ClassDef))]
    for prefix, scope in functions:
        for function in scope.body:
            is_jit = isinstance(function, ast.FunctionDef) and "gluon.jit" in map(ast.unparse, function.decorator_list)
            for statement in ast.walk(function) if is_jit else ():
                if isinstance(statement, ast.stmt) and _called(statement) is not None:
                    changed = ast.fix_missing_locations(_Without(statement.lineno).visit(ast.parse(source)))
                    name = f"{prefix}{function.name}"  # type: ignore[attr-defined]
                    code = code_of(compile(changed, str(module.__file__), "exec"), name)
                    yield Break(module.__name__, name, ast.unparse(statement), statement.lineno, code)


def code_of(code: CodeType, name: str) -> CodeType:
    """The code of a function, by its qualified name."""
    inner = [constant for constant in code.co_consts if inspect.iscode(constant)]
    for each in inner:
        if each.co_qualname == name:
            return each
        if name.startswith(f"{each.co_qualname}."):
            return code_of(each, name)
    raise LookupError(name)
