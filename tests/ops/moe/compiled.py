"""What the kernels of the router and of its losses are compiled to."""

import re
from typing import Any

from adjoint.core.kernels import TARGETS, Variant
from adjoint.core.launch import variants
from adjoint.core.plan import bind


def compiled(variant: Variant, form: str) -> str:
    """A variant in one of the forms that Triton compiles through, for sm_90."""
    from triton.backends.compiler import GPUTarget

    return str(variant.compile(GPUTarget(*TARGETS["sm_90"])).asm[form])


def variants_of(function: Any, *arguments: Any, **options: Any) -> dict[str, Variant]:
    """The last variant that a call on meta tensors may launch of each kernel."""
    return {variant.kernel: variant for _, variant in variants(bind(function, *arguments, **options), "sm_90")}


def sums_in_the_order_of_a_layout(variant: Variant) -> list[str]:
    """The reductions that add floats; maxima may be taken in any order."""
    reductions = re.findall(r'"tt\.reduce"\(.*?\}\)', compiled(variant, "ttgir"), re.DOTALL)
    return [body for body in reductions if "arith.addf" in body]
