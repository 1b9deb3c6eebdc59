"""FLA's functions in the places of transformers' own, for the scripts beside this file."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def fla_functions() -> dict[str, Callable[..., Any]]:
    """FLA's rule and convolution with the arguments that transformers gives, by the names that it has for them.

    Raises:
        ImportError: FLA is not installed.
    """
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        known = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens")
        return chunk_gated_delta_rule(query, key, value, g, beta, **{k: v for k, v in options.items() if k in known})

    def conv(x: Tensor, weight: Tensor, bias: Any = None, activation: str = "silu", **_: Any) -> Tensor:
        y, _ = causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation)
        return y.transpose(1, 2)

    rule.__qualname__, conv.__qualname__ = "fla.chunk_gated_delta_rule", "fla.causal_conv1d"
    return {"torch_chunk_gated_delta_rule": rule, "causal_conv1d_fn": conv}
