"""Problem -> Plan: which kernel serves a call, with which guarantee, and why.

An operator lists `Candidate`s, best first. A `Problem` has the part of a call's metadata on which the choice may
depend. `select` takes the first candidate that accepts the problem and meets the preference; the result is a `Plan`.

A plan's parameters come in two kinds. Numeric parameters change bits. They are part of the SKU, and may depend only on
the item's own size and dtype. Schedule parameters (warps, tiles along independent axes) change no bit, which `verify`
asserts, so they may depend on anything. They are reviewed JSON, by GPU name, beside the kernels.
"""

from adjoint.core.plan.calls import Call, bind, plan, publish, published
from adjoint.core.plan.candidates import AtOnce, Candidate, Compute, Run, allocating_outputs, in_pytorch
from adjoint.core.plan.execution import Plan
from adjoint.core.plan.selection import forget_plans, select

__all__ = [
    "AtOnce",
    "Call",
    "Candidate",
    "Compute",
    "Plan",
    "Run",
    "allocating_outputs",
    "bind",
    "forget_plans",
    "in_pytorch",
    "plan",
    "publish",
    "published",
    "select",
]
