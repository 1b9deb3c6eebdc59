"""Lets transformers take its own functions of the gated delta rule, in a process that has FLA too.

transformers looks for FLA when a model's module is first imported, and takes it then for every device. Its kernels
cannot read a CPU's memory, and these tests compare with transformers' own functions.
"""

import sys
from importlib import import_module

MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


def import_models() -> None:
    """Imports transformers' modules of hybrid models, where transformers is installed, as if FLA were not."""
    fla = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "fla"}
    for name in fla:
        del sys.modules[name]
    sys.modules["fla"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        for model in MODELS:
            import_module(f"transformers.models.{model}.modeling_{model}")
    except ImportError:
        pass
    finally:
        del sys.modules["fla"]
        sys.modules.update(fla)
