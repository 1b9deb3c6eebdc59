"""FLA's functions in the places of transformers' own, for the scripts beside this file.

Where FlashQLA is installed, FLA's rule runs that one's kernels instead of its own, unless FLA_FLASH_QLA=0 says no.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from torch import Tensor

OPTIONS = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens")
"""What transformers says to the rule and FLA understands."""


def fla_functions() -> dict[str, Callable[..., Any]]:
    """FLA's rule and convolution with the arguments that transformers gives, by the names that it has for them.

    Raises:
        ImportError: FLA is not installed.
    """
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        return chunk_gated_delta_rule(query, key, value, g, beta, **{k: v for k, v in options.items() if k in OPTIONS})

    def conv(x: Tensor, weight: Tensor, bias: Any = None, activation: str = "silu", **_: Any) -> Tensor:
        y, _ = causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation)
        return y.transpose(1, 2)

    is_flash_qla = find_spec("flash_qla") is not None and os.environ.get("FLA_FLASH_QLA", "1") != "0"
    rule.__qualname__ = "fla.chunk_gated_delta_rule" + " by FlashQLA" * is_flash_qla
    conv.__qualname__ = "fla.causal_conv1d"
    return {"torch_chunk_gated_delta_rule": rule, "causal_conv1d_fn": conv}


def fla_step_functions() -> dict[str, Callable[..., Any]]:
    """FLA's rule and convolution of a token that is decoded, as `fla_functions` has those of a prompt.

    Raises:
        ImportError: FLA is not installed.
    """
    from fla.modules.causal_conv1d import causal_conv1d_update
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        chosen = {name: option for name, option in options.items() if name in OPTIONS}
        return fused_recurrent_gated_delta_rule(query, key, value, g=g, beta=beta, **chosen)

    def conv(x: Tensor, state: Tensor, weight: Tensor, bias: Any = None, activation: Any = None) -> Tensor:
        y, _ = causal_conv1d_update(x.transpose(1, 2), state, weight=weight, bias=bias, activation=activation)
        return y.transpose(1, 2)

    rule.__qualname__, conv.__qualname__ = "fla.fused_recurrent_gated_delta_rule", "fla.causal_conv1d_update"
    return {"torch_recurrent_gated_delta_rule": rule, "causal_conv1d_update": conv}
