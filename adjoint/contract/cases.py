"""What a family declares about its ops for tests, `verify`, `bench` and docs.

An op's `cases.py` lists its `SUBJECTS`, `BAD_CALLS` and `WORKLOADS`. It has `built_calls()`, which gives the calls
whose kernels are built ahead of time, each alone or in a tuple with what restricts its builds, as
`core.launch.variants` takes it. A new op needs nothing else to go through every check: see `adjoint.verify`. It may
also list `ERROR_WORKLOADS`: `bench --errors` then measures the errors of these instead of those of the timed workloads.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adjoint.contract import batching
from adjoint.contract.batching import Answers, Rebatch
from adjoint.contract.forms import Form
from adjoint.contract.inputs import Inputs, each, is_differentiable
from adjoint.core.errors import ArgumentError
from adjoint.core.plan import Call, bind
from adjoint.core.preference import Preference

__all__ = [
    "Answers",
    "BadCall",
    "Case",
    "Form",
    "Inputs",
    "Make",
    "Rebatch",
    "Special",
    "Subject",
    "Workload",
    "normal",
]

Make = Callable[[torch.dtype, torch.device, torch.Generator], Inputs]


def random_upstream(output: Tensor, generator: torch.Generator) -> Tensor:
    """An upstream gradient for an output: normal values in its dtype."""
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype).to(output.device)


def normal(*shapes: tuple[int, ...]) -> Make:
    """Makes tensors of normal values on the device itself; for workloads."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> tuple[Tensor, ...]:
        own = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
        return tuple(torch.randn(shape, dtype=dtype, device=device, generator=own) for shape in shapes)

    return make


@dataclass(frozen=True)
class Case:
    """Inputs for a subject. `make` gives them for a dtype and device; `upstream` gives a gradient for an output.

    The dtype is that of the floating inputs. A `heavy` case is too large for every check on a CPU.
    """

    name: str
    make: Make
    upstream: Callable[[Tensor, torch.Generator], Tensor] = random_upstream
    heavy: bool = False


@dataclass(frozen=True)
class Special:
    """Inputs whose outputs are stated exactly, including signs of zeros. NaN matches NaN, and None states nothing.

    The statement is for `dtypes`; if that is empty, for all dtypes of the subject. `of_plans` has, by name, the plans
    that state other outputs and gradients.
    """

    name: str
    inputs: tuple[float, ...]
    upstream: float
    outputs: tuple[float | None, ...]
    gradients: tuple[float | None, ...]
    dtypes: tuple[torch.dtype, ...] = ()
    of_plans: Mapping[str, tuple[tuple[float | None, ...], tuple[float | None, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject:
    """One op, or one mode of it, under test.

    Items follow each other along `batch_axis`. Every input has this axis, unless `batched` names the inputs that do;
    then all items share the others, for example a table of weights. A family whose items are laid out in another way
    provides `resized`, `rebatched` and `pieces`.

    Attributes:
        name: the name in tables.
        function: the public function.
        keywords: the keywords of the mode.
        inputs: the names of the tensor arguments, in order. Inputs of a floating dtype are differentiable, and the
            adjoint's output for `x` is named `dx`. Other inputs keep their dtype and have no gradient.
        constant: the names of floating inputs that have no gradient.
        reference: takes the inputs, floating ones in float64, and gives the public outputs.
        reference_backward: takes upstream gradients and then inputs, in the same way, and gives a gradient for each
            floating input.
        choices: takes the inputs, in the same way, and gives what error statements of gradients need besides them, for
            example the experts that a router chose.
        cases: layouts, sizes and values.
        exhaustive: for 16-bit dtypes, cases that together have every value; empty where that is out of reach.
        mistakes: plausible wrong answers by name, `(upstream, inputs) -> Answers`, in the inputs' dtype. Each must fail
            the accuracy check, or the check proves nothing.
        specials: elementwise special values.
        plans: plans that are verified besides the first one of each backend, as `Preference(plan=...)` names them, on
            the cases and dtypes that they take.
        forms: other forms of the call, which give the same bits.
        batch_axis: the axis along which items follow each other.
        batched: the names of the inputs that have this axis; None for all.
        resized: `(inputs, upstream, size) -> (inputs, upstream)` with another number of items.
        rebatched: `(inputs, upstream) -> Rebatch, ...`: other batches in which items keep their bits.
        pieces: `(arguments, outputs) -> (arguments, outputs), ...`: the arguments and outputs of a reference, cut into
            pieces of about `batching.PIECE` elements. The reference maps pieces to pieces, one to one.
        autocast: the names of the inputs that the op casts under autocast; the others keep their dtype.
        by_name: the names of the last inputs, which the function takes by name.
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    reference: Callable[..., tuple[Tensor, ...]]
    reference_backward: Callable[..., tuple[Tensor, ...]]
    cases: tuple[Case, ...]
    choices: Callable[..., tuple[Tensor, ...]] = lambda *inputs: ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    exhaustive: Callable[[torch.dtype], Iterable[Case]] = lambda dtype: ()
    mistakes: Mapping[str, Callable[[tuple[Tensor, ...], Inputs], Answers]] = field(default_factory=dict)
    specials: tuple[Special, ...] = ()
    plans: tuple[str, ...] = ()
    forms: tuple[Form, ...] = ()
    batch_axis: int = 0
    batched: tuple[str, ...] | None = None
    resized: Callable[[Inputs, tuple[Tensor, ...], int], tuple[Inputs, tuple[Tensor, ...]]] | None = None
    rebatched: Callable[[Inputs, tuple[Tensor, ...]], Iterable[Rebatch]] | None = None
    pieces: Callable[[Inputs, tuple[Tensor, ...]], Iterable[tuple[Inputs, tuple[Tensor, ...]]]] | None = None
    autocast: tuple[str, ...] = ()
    by_name: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()

    def __call__(self, *inputs: Tensor | None, **keywords: Any) -> Any:
        positional, named = self.arguments(inputs)
        return self.function(*positional, **named, **keywords)

    def arguments(self, inputs: Inputs) -> tuple[Inputs, dict[str, Any]]:
        """The arguments of a call with these inputs and the mode's keywords: by position, and by name."""
        first = len(self.inputs) - len(self.by_name)
        return inputs[:first], {**dict(zip(self.by_name, inputs[first:], strict=True)), **self.keywords}

    def bind(self, inputs: Inputs) -> Call:
        """The operators that a call with these inputs runs, with their arguments."""
        positional, named = self.arguments(inputs)
        return bind(self.function, *positional, **named)

    def gradients(self, inputs: Inputs) -> tuple[str, ...]:
        """The names of the adjoint's outputs that are gradients of these inputs, in their order."""
        named = zip(self.inputs, inputs, strict=True)
        return tuple(f"d{name}" for name, x in named if is_differentiable(x) and name not in self.constant)

    def places(self, inputs: Inputs) -> list[int]:
        """The positions of the inputs that have a gradient."""
        named = enumerate(zip(self.inputs, inputs, strict=True))
        return [place for place, (name, x) in named if is_differentiable(x) and name not in self.constant]

    def differentiable(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """The inputs that have a gradient, in order."""
        return tuple(inputs[place] for place in self.places(inputs))

    def leaves(self, inputs: Inputs) -> Inputs:
        """The inputs as leaves of a new graph, where those that have a gradient require it."""
        own = each(Tensor.detach, inputs)
        for tensor in self.differentiable(own):
            tensor.requires_grad_()
        return own

    def has_items(self, name: str) -> bool:
        """Whether an input has the batch axis."""
        return self.batched is None or name in self.batched

    def items(self, inputs: Inputs) -> int:
        """The number of items in these inputs."""
        named = zip(self.inputs, inputs, strict=True)
        return next(x.shape[self.batch_axis] for name, x in named if x is not None and self.has_items(name))  # type: ignore[no-any-return]

    def resize(self, inputs: Inputs, upstream: tuple[Tensor, ...], size: int) -> tuple[Inputs, tuple[Tensor, ...]]:
        """The same problem with `size` items."""
        if self.resized is not None:
            return self.resized(inputs, upstream, size)
        return batching.resized(inputs, upstream, size, self.batch_axis, [*map(self.has_items, self.inputs)])

    def rebatch(self, inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterable[Rebatch]:
        """Other batches in which items keep their bits."""
        if self.rebatched is not None:
            return self.rebatched(inputs, upstream)
        if self.batched is not None:
            whose = "what keeps its bits in another batch is for the family to say: give the subject `rebatched`"
            raise NotImplementedError(f"{self.name}: not every input has the batch axis, so {whose}")
        return batching.rebatched(inputs, upstream, self.batch_axis)

    def cut(self, arguments: Inputs, outputs: tuple[Tensor, ...]) -> Iterable[tuple[Inputs, tuple[Tensor, ...]]]:
        """A reference's arguments and outputs in pieces; one piece if items share inputs and there is no `pieces`."""
        if self.pieces is not None:
            return self.pieces(arguments, outputs)
        if self.batched is not None:
            return [(arguments, outputs)]
        return batching.pieces(arguments, outputs, self.batch_axis)


class BadCall:
    """A call that must raise an error, and words that the error's message must contain."""

    def __init__(
        self, name: str, call: Callable[[torch.device], Any], *words: str, error: type[Exception] = ArgumentError
    ) -> None:
        self.name, self.call, self.words, self.error = name, call, words, error


@dataclass(frozen=True)
class Workload:
    """A problem to time, with the bytes that it moves, the same work in torch, and its checks.

    Attributes:
        name: the name in tables.
        subject: the op that is timed and checked.
        make: gives the inputs.
        forward_bytes, backward_bytes: the fewest bytes that each direction must move; a function of the inputs where
            this depends on their values.
        baseline: the same work in torch's own functions, `(*inputs) -> output`; None where there is none. Integer
            outputs are choices that it made, such as the experts of a router: see `chosen`.
        peers: the names of entries in `adjoint.bench.peers` that do the same work.
        dtype: the dtype of the floating inputs. The workload's name states it where it is not the default.
        devices: the device types for which the workload is meant.
        directions: the directions that are timed. "forward + backward" is a whole step through autograd, with its
            memory.
        operations: the floating-point operations of the forward's matrix products; the backward has twice as many.
        compile: whether torch.compile of the baseline takes part.
        deterministic: whether the baseline's backward under `torch.use_deterministic_algorithms` takes part.
        kept: whether to measure the memory that contenders keep from their forward for their backward.
        recorded: whether a call is timed as the replay of a CUDA graph, without the gaps between its kernels.
        others: further ways to compute the gradients, by label: `(upstream, inputs) -> gradients`, one for each
            floating input.
        chosen: for ops in which equal values leave a choice open, the reference of the backward for a contender's
            choices: `chosen(arguments, choices) -> (gradients, ties)`. `ties` is the number of items in which equal
            values were chosen in another order than the reference's. A choice of a smaller value counts as an error.
        preference: the preference of our call; the workload's name states it.
    """

    name: str
    subject: Subject
    make: Make
    forward_bytes: int | Callable[..., int]
    backward_bytes: int | Callable[..., int]
    baseline: Callable[..., Any] | None
    peers: tuple[str, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    devices: tuple[str, ...] = ("cpu", "cuda")
    directions: tuple[str, ...] = ("forward", "backward")
    operations: int = 0
    compile: bool = True
    deterministic: bool = False
    kept: bool = False
    recorded: bool = False
    others: Mapping[str, Callable[[tuple[Tensor, ...], Inputs], tuple[Tensor, ...]]] = field(default_factory=dict)
    chosen: Callable[[Inputs, tuple[Tensor, ...]], tuple[tuple[Tensor, ...], int]] | None = None
    preference: Preference | None = None
