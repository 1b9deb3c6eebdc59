"""Whether an op may take a module's parameters in place of calling it."""

from torch import nn


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of a class itself, not of one made from it, and a call runs its forward and nothing else.

    Adapters, quantisers and sharding exchange the class; hooks, and offloading, which replaces `forward`, do not.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module) is kind and "forward" not in vars(module) and not any(hooks)
