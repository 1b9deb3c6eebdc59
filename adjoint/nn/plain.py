"""Whether an op may take a module's parameters instead of calling the module, and in which dtype."""

import torch
from torch import Tensor, nn


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of exactly this class, and a call runs its forward and nothing else.

    Adapters, quantisers and sharding replace the class. Hooks do not, and neither does offloading, which replaces
    `forward`; so both are looked for.
    """
    return type(module) is kind and "forward" not in vars(module) and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module runs hooks beside its forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(map(bool, hooks))


def beside(weight: Tensor, x: Tensor) -> Tensor:
    """A module's weight, or a table of cosines, in a dtype that norms, convolutions and rotary positions take beside x.

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
