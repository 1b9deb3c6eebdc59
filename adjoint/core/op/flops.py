"""The operations that `torch.utils.flop_counter.FlopCounterMode` counts for the operators of the package.

Torch's convention is 2·m·n·k for a product of matrices, and nothing for other operations. Torch's module imports
Triton, so this one does not import it. It registers the formulas when somebody else imports that module, or at once
where that has happened.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Flops = Callable[..., int]
"""Takes an operator's arguments without the preference, and gives the operations of its matrix products."""

_COUNTER = "torch.utils.flop_counter"
_formulas: dict[Any, Callable[..., int]] = {}


def no_products(*arguments: Any) -> int:
    """The formula without matrix products: torch counts no elementwise work, sums, look-ups or sorts."""
    return 0


def count(packet: Any, names: Sequence[str], flops: Flops) -> None:
    """Registers an operator's formula with torch's counter.

    Args:
        packet: `torch.ops.adjoint.<name>`.
        names: the names of its arguments, the preference last.
        flops: its formula.
    """

    def formula(*arguments: Any, out_val: Any = None, **named: Any) -> int:
        complete = (*arguments, *(named[name] for name in names[len(arguments) :]))
        return flops(*complete[:-1])

    _formulas[packet] = formula
    if _COUNTER in sys.modules:  # another thread may still be executing the module; importing it waits for that
        _hand_over(import_module(_COUNTER), {packet: formula})


def _hand_over(counter: ModuleType, formulas: dict[Any, Callable[..., int]]) -> None:
    for packet, formula in formulas.items():
        if packet not in counter.flop_registry:
            counter.register_flop_formula(packet, get_raw=True)(formula)


class _WhenImported(MetaPathFinder):
    """Hands the formulas over once torch's counter has been imported. It finds no module itself."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_hand_over(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == _COUNTER:  # modules may share a loader
                _hand_over(module, _formulas)

        spec.loader.exec_module = execute_and_hand_over  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _WhenImported())
