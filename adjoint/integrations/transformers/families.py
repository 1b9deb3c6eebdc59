"""The families of models that the integration knows, and which of their classes a module is of."""

from typing import Any

FAMILIES = ("Qwen3Next", "Qwen3_5Moe", "Qwen3_5")


def class_of(module: object) -> Any:
    """The class of transformers that a module is of, or that its own class is made from; None for other modules.

    Sharding and parametrisations make such classes, and so do users.
    """
    return next((kind for kind in type(module).__mro__ if _is_known(kind)), None)


def _is_known(kind: type) -> bool:
    return kind.__module__.startswith("transformers.models.qwen3_") and kind.__name__.startswith(FAMILIES)
