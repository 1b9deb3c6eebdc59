"""What lets existing code use the operations by changing an import: `adjoint.integrations.fla`, `.transformers`.

A module is imported when it is first asked for, and the library that it is for when something of it is used.
"""

from importlib import import_module
from types import ModuleType

__all__ = ["fla", "transformers"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return import_module(f"adjoint.integrations.{name}")
    raise AttributeError(f"module 'adjoint.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
