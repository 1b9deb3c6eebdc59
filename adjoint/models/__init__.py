"""Hybrid language models assembled from `adjoint.nn`. Not imported by `import adjoint`."""

from adjoint.models.cache import Cache, Snapshot
from adjoint.models.config import HybridConfig
from adjoint.models.hybrid import HybridLM, HybridOutput, pack

__all__ = ["Cache", "HybridConfig", "HybridLM", "HybridOutput", "Snapshot", "pack"]
