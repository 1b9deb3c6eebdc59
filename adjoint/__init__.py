"""GPU kernels that come with their gradients and their guarantees, for hybrid language models."""

import sys
from importlib import import_module
from typing import Any

from adjoint import nn
from adjoint.core.errors import ArgumentError, Unsupported, WrongResult, check, checked
from adjoint.core.guarantee import Derived, Empirical, Enumerated, Guarantee
from adjoint.core.plan import Plan, plan
from adjoint.core.plan.first_use import first_use_check, set_first_use_check
from adjoint.core.preference import Preference, prefer
from adjoint.ops import gated_delta, moe
from adjoint.ops.activation import sigmoid_gate, silu, swiglu
from adjoint.ops.conv import causal_conv1d, causal_conv1d_step
from adjoint.ops.embedding import embedding, embedding_bag
from adjoint.ops.gated_delta import gated_delta_rule, gated_delta_step
from adjoint.ops.indexing import take_along_axis
from adjoint.ops.loss import cross_entropy, linear_cross_entropy
from adjoint.ops.norm import gated_rms_norm, l2_norm, rms_norm
from adjoint.ops.rotary import rotary

__version__ = "0.1.0"

for _family in (gated_delta, moe):  # so that `from adjoint.moe import route` works as well
    sys.modules[f"{__name__}.{_family.__name__.rpartition('.')[2]}"] = _family

__all__ = [
    "ArgumentError",
    "Derived",
    "Empirical",
    "Enumerated",
    "Guarantee",
    "Plan",
    "Preference",
    "Unsupported",
    "WrongResult",
    "audit",
    "causal_conv1d",
    "causal_conv1d_step",
    "check",
    "checked",
    "cross_entropy",
    "embedding",
    "embedding_bag",
    "first_use_check",
    "gated_delta",
    "gated_delta_rule",
    "gated_delta_step",
    "gated_rms_norm",
    "integrations",
    "l2_norm",
    "linear_cross_entropy",
    "models",
    "moe",
    "nn",
    "plan",
    "prefer",
    "rms_norm",
    "rotary",
    "set_first_use_check",
    "sigmoid_gate",
    "silu",
    "swiglu",
    "take_along_axis",
]


def __getattr__(name: str) -> Any:
    """Imports what few programs need when it is first asked for."""
    if name in ("integrations", "models"):
        return import_module(f"adjoint.{name}")
    if name == "audit":
        return import_module("adjoint.verify.audit").audit
    raise AttributeError(f"module 'adjoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
