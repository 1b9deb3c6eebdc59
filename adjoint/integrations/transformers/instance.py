"""A forward of one module alone: how it is put there and taken away, in copies and replicas too, and beside accelerate.

Hooks of accelerate move and load what a module needs where a model is spread over devices. They take the place of
`forward` and call what they keep.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

Undo = list[tuple[Any, ...]]
"""Functions and their arguments. Modules are among these, so that a deep copy of a model undoes what it has itself."""

_REPLICATE = "_replicate_for_data_parallel"
"""The method by which `nn.DataParallel` copies a module for each GPU. Attributes are copied as they are."""


class _Forward(partial[Any]):
    """A forward of ours, bound to its module. It pickles and copies with it."""


def is_replaced(module: nn.Module) -> bool:
    """Whether someone has replaced a module's forward; a hook of accelerate around it has not."""
    place = _place_of_forward(module)
    kept = vars(module).get(place)
    return kept is not None and (place == "forward" or getattr(kept, "__func__", None) is not type(module).forward)


def set_forward(module: nn.Module, forward: Callable[..., Any], undo: Undo) -> None:
    """The new forward has the names of the arguments that the old one had: transformers and its Trainer look at them to
    see which inputs the model takes."""
    names = inspect.signature(module.forward)
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in names.parameters.values()]
    signature = names.replace(parameters=parameters, return_annotation=names.empty)
    setattr(module, _place_of_forward(module), _bound(forward, module, signature))
    setattr(module, _REPLICATE, partial(_replicate, module))
    undo.append((_forget_forward, module))


@contextmanager
def loaded(module: Any) -> Iterator[Any]:
    """Has the weights of a module that is not called where a call has them: a hook of accelerate may load them."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        hook.pre_forward(module)
    try:
        yield module
    finally:
        if hook is not None:
            hook.post_forward(module, ())


def _place_of_forward(module: nn.Module) -> str:
    """Where a module keeps its own forward."""
    return "_old_forward" if "_hf_hook" in vars(module) and "_old_forward" in vars(module) else "forward"


def _bound(forward: Callable[..., Any], module: nn.Module, signature: inspect.Signature) -> _Forward:
    replaced: Any = _Forward(forward, module)
    replaced.__func__ = forward  # accelerate wraps the function of a bound method, and binds it again
    replaced.__signature__ = signature
    return replaced  # type: ignore[no-any-return]


def _replicate(module: nn.Module) -> nn.Module:
    """The replica has the forward bound to itself, whose parameters are those on its GPU."""
    replica = getattr(type(module), _REPLICATE)(module)
    kept = vars(module).get(place := _place_of_forward(module))
    setattr(replica, _REPLICATE, partial(_replicate, replica))
    if isinstance(kept, _Forward):
        setattr(replica, place, _bound(kept.func, replica, kept.__signature__))  # type: ignore[attr-defined]
    return replica  # type: ignore[no-any-return]


def _forget_forward(module: nn.Module) -> None:
    """The forward is that of the class again, inside a hook of accelerate too."""
    vars(module).pop(_REPLICATE, None)
    if isinstance(vars(module).get("_old_forward"), _Forward):
        module._old_forward = MethodType(type(module).forward, module)  # type: ignore[assignment]
    else:
        vars(module).pop("forward", None)
