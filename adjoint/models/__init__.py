"""Hybrid language models assembled from `adjoint.nn`. Not imported by `import adjoint`."""

from adjoint.models.cache import Cache, Snapshot
from adjoint.models.config import HybridConfig
from adjoint.models.decoding import Decoder
from adjoint.models.generation import Sampling
from adjoint.models.hybrid import HybridLM, HybridOutput
from adjoint.models.packing import pack

__all__ = ["Cache", "Decoder", "HybridConfig", "HybridLM", "HybridOutput", "Sampling", "Snapshot", "pack"]


def __dir__() -> list[str]:
    return __all__
