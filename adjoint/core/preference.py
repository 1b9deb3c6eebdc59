"""What a caller asks of a plan: `Preference`, and `prefer(...)` for a whole block.

A preference travels as a short string, for two reasons. Schemas of operators take no Python objects. And the backward,
which runs on autograd's own thread, does not see the forward's context. So the public function resolves the preference
once, and passes the same string to forward and backward.

The string may name a second request behind `OTHERWISE`, for the case that no plan meets the first one; the call then
warns. Only `torch.use_deterministic_algorithms(True, warn_only=True)` makes such strings.

The ambient preference is in a thread-local *instance* attribute. `torch.compile` traces that and guards on its value.
It does neither for a `ContextVar` or for a class attribute of a thread-local.
"""

import threading
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import torch

from adjoint.core.errors import ArgumentError

BACKENDS = ("triton", "eager")

OTHERWISE = "|"
"""The separator between a request and the alternative for problems of which no plan meets the request."""


@dataclass(frozen=True)
class Preference:
    """A request that narrows the choice of plans. A field with its default value asks for nothing.

    An explicit request never falls back in silence: when no plan meets it, the call raises `Unsupported` and lists
    every candidate with its reason.

    Attributes:
        backend: "triton" or "eager".
        plan: the name of one plan, as `adjoint.plan(...)` prints it, for forward and backward alike. An upstream
            gradient that this plan cannot read is then an error, whereas `backend` leaves a choice. Where the
            directions have plans of different names, join the names with "+". Each direction takes the first name that
            is one of its own candidates; it is an error if there is none.
        repeatable: every output must promise the same bits on every run.
        batch_invariant: every output must promise bits that do not depend on the rest of the batch.
        device_invariant: every output must promise the same bits on every device.
        max_workspace_bytes: the plan may need at most this much scratch memory.

    >>> Preference(backend="eager", repeatable=True).text
    'backend=eager,repeatable'
    """

    backend: str | None = None
    plan: str | None = None
    repeatable: bool = False
    batch_invariant: bool = False
    device_invariant: bool = False
    max_workspace_bytes: int | None = None
    text: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        if self.backend is not None and self.backend not in BACKENDS:
            raise ArgumentError(
                f"Preference: backend must be one of {', '.join(map(repr, BACKENDS))}, got {self.backend!r}"
            )
        for name in ("repeatable", "batch_invariant", "device_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"Preference: {name} must be True or False, got {getattr(self, name)!r}")
        limit = self.max_workspace_bytes
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise ArgumentError(f"Preference: max_workspace_bytes must be an integer ≥ 0, got {limit!r}")
        if self.plan is not None and not _names_plans(self.plan):
            raise ArgumentError(
                f"Preference: plan must be the name of a plan, or several joined by '+', got {self.plan!r}"
            )
        parts = [name if value is True else f"{name}={value}" for name, value in _fields(self).items()]
        object.__setattr__(self, "text", ",".join(parts))


def _names_plans(value: Any) -> bool:
    return isinstance(value, str) and not set(value) & set(f",={OTHERWISE}") and all(value.split("+"))


_FIELDS = tuple(f.name for f in fields(Preference) if f.init)


def _fields(preference: Preference) -> dict[str, Any]:
    """The fields that ask for something."""
    values = {name: getattr(preference, name) for name in _FIELDS}
    return {name: value for name, value in values.items() if value is not None and value is not False}


@lru_cache(maxsize=1024)
def parse(text: str) -> Preference:
    """The preference of a string; the inverse of `Preference.text`."""
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        values[name] = True if not equals else int(value) if name == "max_workspace_bytes" else value
    return Preference(**values)


@lru_cache(maxsize=1024)
def _merge(outer: str, inner: str) -> str:
    if not outer or not inner:
        return outer or inner
    return Preference(**(_fields(parse(outer)) | _fields(parse(inner)))).text


def merge(outer: str, inner: str) -> str:
    """Merges two requests: the fields that `inner` sets replace those of `outer`, and the others stay."""
    return _merge(outer, inner)


def _deterministic(text: str) -> str:
    """Adds `repeatable` to a request. Under `warn_only`, the original request becomes the alternative."""
    repeatable = _merge(text, "repeatable")
    if repeatable == text or not torch.is_deterministic_algorithms_warn_only_enabled():
        return repeatable
    return f"{repeatable}{OTHERWISE}{text}"


# torch.compiler.assume_constant_result does the same, but imports the whole compiler. The compiler may call these
# functions while tracing: the first is a pure function of strings, and the second also reads torch's flags, on which
# every compiled graph has a guard.
merge._dynamo_marked_constant = True  # type: ignore[attr-defined]
_deterministic._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Ambient(threading.local):
    def __init__(self) -> None:
        self.text = ""


_ambient = _Ambient()


class prefer:
    """Sets the preference for the calls inside a block, on this thread. Blocks nest.

    One object serves one block at a time. The asyncio tasks of one thread share its preference.

    >>> with prefer(backend="eager"):
    ...     with prefer(repeatable=True):
    ...         resolve(None)
    'backend=eager,repeatable'
    """

    def __init__(self, preference: Preference | None = None, /, **fields: Any) -> None:
        if preference is not None and not isinstance(preference, Preference):
            raise ArgumentError(
                f"prefer: expected a Preference or its fields, such as backend='eager', got {preference!r}"
            )
        if preference is not None and fields:
            raise ArgumentError("prefer: give a Preference or its fields, not both")
        unknown = sorted(set(fields) - set(_FIELDS))
        if unknown:
            raise ArgumentError(f"prefer: unknown {', '.join(unknown)}; a Preference has {', '.join(_FIELDS)}")
        self._text = (preference if preference is not None else Preference(**fields)).text
        self._outer: list[str] = []

    def __enter__(self) -> "prefer":
        self._outer.append(_ambient.text)
        _ambient.text = merge(_ambient.text, self._text)
        return self

    def __exit__(self, *exception: object) -> None:
        _ambient.text = self._outer.pop()


def resolve(preference: Preference | None) -> str:
    """The string that a call passes to its operators: its own preference merged over the ambient one.

    `torch.use_deterministic_algorithms(True)` asks for repeatable plans. With `warn_only=True`, a call that has no
    repeatable plan warns and takes another one.
    """
    text = _ambient.text
    if preference is not None:
        if not isinstance(preference, Preference):
            raise ArgumentError(f"preference= must be an adjoint.Preference, got {type(preference).__name__}")
        text = merge(text, preference.text)
    if torch.are_deterministic_algorithms_enabled():
        text = _deterministic(text)
    return text
