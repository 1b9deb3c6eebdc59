"""Training of hybrid language models: the command `adjoint train`. Not imported by `import adjoint`."""

from typing import Any

__all__ = ["Options", "train"]


def __getattr__(name: str) -> Any:
    """Imports the other names on first use, because the command's help needs none of them."""
    if name == "Options":
        from adjoint.train.options import Options

        return Options
    if name == "train":
        from adjoint.train.run import train

        return train
    raise AttributeError(f"module 'adjoint.train' has no attribute {name!r}")
