"""Whether an op may take a module's parameters in place of calling it, and as which numbers."""

import torch
from torch import Tensor, nn


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of a class itself, not of one made from it, and a call runs its forward and nothing else.

    Adapters, quantisers and sharding exchange the class; hooks, and offloading, which replaces `forward`, do not.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module) is kind and "forward" not in vars(module) and not any(hooks)


def beside(weight: Tensor, x: Tensor) -> Tensor:
    """A module's weight, or a table of cosines, as norms, convolutions and rotary positions take it beside x.

    Autocast to one 16-bit type, of a model in the other, makes x of another type than the weight, which is then widened
    to float32, exactly. Otherwise such a mixture is a mistake, and the op says so, as it does where x is no tensor.
    """
    if (
        not isinstance(x, Tensor)
        or weight.dtype == x.dtype
        or weight.dtype.itemsize != 2
        or not torch.is_autocast_enabled(x.device.type)
    ):
        return weight
    return weight.float()
