"""What a plan settles before it runs: the kernels that it may launch, each with its constants, and its workspace.

    def forward(setup: Setup) -> Execute:              # beneath its kernel; called once for a plan
        scale = setup.either(scale_rows, element=setup.problem.dtypes[0], BLOCK=1024)

        def execute(arguments, outputs, workspace):    # called for every run of the plan
            (x, factor), (y,) = arguments, outputs
            grid = (-(-x.numel() // 1024),)
            scale[is_aligned(x, y)].launch(grid, x=x, y=y, factor=factor, count=x.numel())

        return execute

A run can launch only the kernels that the setup has bound. So the setup is the one place that says what a plan
launches: `prepare` compiles these kernels, the build tests build them, the SKU shows their numeric parameters, and
`workspace_bytes` adds up the scratch memory. None of this is listed again.

The kernels that a setup binds may depend on the problem's dtypes, layout and options and on the GPU. They may depend on
sizes only where kernels are compiled for them, because a plan for more tokens must find everything compiled.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adjoint.core.errors import Unsupported, status_word
from adjoint.core.kernels import TARGETS, TUNED, TUNED_GPU, Kernel, Variant, interpreting
from adjoint.core.layout import copied_names
from adjoint.core.problem import Problem, short
from adjoint.core.workspace import Memory, Regions

if TYPE_CHECKING:
    from adjoint.core.plan import Call, Candidate

Execute = Callable[[tuple[Any, ...], tuple[Tensor, ...], Tensor | None], tuple[Tensor, ...] | None]
"""Computes a plan's outputs from `(arguments, outputs, workspace)`. Where the workspace is None, it allocates one.

Where the sizes of the outputs are results, `outputs` is empty and the outputs are returned: see
`Candidate.returns_outputs`.
"""


def imported(path: str, **keywords: Any) -> Callable[["Setup"], Execute]:
    """A setup function from a module that imports Triton. The module is imported on first use.

    Args:
        path: the module, a colon, and the function: "adjoint.ops.norm.kernels:forward".
        keywords: the function's arguments besides the `Setup`.
    """
    module, _, function = path.partition(":")
    return lambda setup: getattr(import_module(module), function)(setup, **keywords)


class Launch:
    """A kernel with its constants.

    Attributes:
        launch: `launch(grid, *, <every run-time parameter>)`; the first launch of a setup compiles all of its kernels.
    """

    __slots__ = ("aligned", "kernel", "launch", "num_stages", "num_warps", "settings", "setup")

    def __init__(
        self, setup: "Setup", kernel: Kernel, settings: dict[str, Any], aligned: bool, num_warps: int, num_stages: int
    ) -> None:
        self.setup, self.kernel, self.settings = setup, kernel, settings
        self.aligned, self.num_warps, self.num_stages = aligned, num_warps, num_stages
        self.launch: Callable[..., None] = self._launch_first

    @property
    def has_twin(self) -> bool:
        """Whether the kernel has separate variants for aligned and unaligned memory."""
        return any(parameter.multiple == "aligned" for parameter in self.kernel.types.values())

    @property
    def variant(self) -> Variant:
        """The variant to compile. It is described once, however many plans bind it."""
        key = (self.aligned, self.num_warps, self.num_stages, *self.settings.items())
        described = self.kernel.variants.get(key)
        if described is None:
            described = self.kernel.variants[key] = self._describe()
        return described

    def _describe(self) -> Variant:
        kernel, settings = self.kernel, self.settings
        multiples = ("always", "aligned") if self.aligned else ("always",)
        return Variant(
            kernel.name,
            tuple((name, parameter.text(settings)) for name, parameter in kernel.types.items()),
            tuple((name, settings[name]) for name in kernel.constants),
            tuple(name for name, parameter in kernel.types.items() if parameter.multiple in multiples),
            self.num_warps,
            self.num_stages,
        )

    def prepare(self) -> None:
        """Compiles the kernel, unless that was done."""
        self.launch = self.kernel.by_name(self.variant.prepare(self.setup.device))

    def _launch_first(self, grid: tuple[int, ...], **arguments: Any) -> None:
        if self.setup.overrides:  # `verify` and tuning try many schedules: compile only the kernels that are launched
            self.prepare()
        else:
            self.setup.prepare()
        self.launch(grid, **arguments)


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a device; 1 for Triton's interpreter, which runs one program at a time."""
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


class Setup:
    """Binds the kernels of a plan and divides its workspace.

    Attributes:
        problem: the plan's problem.
        device: the device that the plan runs on.
        target: the architecture that kernels are built for: "sm_90", "gfx942", or "cpu" for Triton's interpreter.
        schedule: the parameters that change no bit.
        overrides: whether the schedule differs from the reviewed one.
        launches: the kernels bound so far, with their constants.
        plan_numeric: the parameters that change bits and belong to no kernel.
        regions: the workspace.
    """

    def __init__(
        self, problem: Problem, schedule: Mapping[str, int], target: str | None = None, overrides: bool = False
    ) -> None:
        self.problem, self.device, self.schedule, self.overrides = problem, problem.device, schedule, overrides
        self.target = target or problem.architecture
        self.launches: list[Launch] = []
        self.regions = Regions()
        self.plan_numeric: dict[str, Any] = {}

    @property
    def nvidia(self) -> bool:
        return self.target.startswith("sm_")

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels: few, large programs then take the least time."""
        return self.target == "cpu" and interpreting()

    @property
    def multiprocessors(self) -> int:
        return multiprocessors(self.device)

    def kernel(
        self, kernel: Kernel, *, aligned: bool = False, num_warps: int = 4, num_stages: int = 1, **settings: Any
    ) -> Launch:
        """Binds a kernel's compile-time parameters, and the dtypes that its type variables stand for.

        Args:
            kernel: what to launch.
            aligned: whether the parameters of `...If16` types are multiples of 16.
            num_warps: warps of a program.
            num_stages: the depth of software pipelining.
            settings: every constant and every type variable, by name.
        """
        if settings.keys() != kernel.settings:
            missing, unknown = sorted(kernel.settings - set(settings)), sorted(set(settings) - kernel.settings)
            raise TypeError(
                f"{kernel.name}: a launch settles {', '.join(sorted(kernel.settings))}; "
                f"missing are {', '.join(missing) or 'none'}, unknown are {', '.join(unknown) or 'none'}"
            )
        bound = Launch(self, kernel, settings, aligned, num_warps, num_stages)
        self.launches.append(bound)
        return bound

    def either(self, kernel: Kernel, **settings: Any) -> dict[bool, Launch]:
        """Binds both variants of a kernel, by whether the parameters of `...If16` types are multiples of 16."""
        return {aligned: self.kernel(kernel, aligned=aligned, **settings) for aligned in (True, False)}

    def scratch(self, **regions: tuple[torch.dtype, int]) -> None:
        """Adds regions to the workspace: a dtype and a number of elements for each name."""
        self.regions.add(**regions)

    def copies(self, **tensors: tuple[torch.dtype, int]) -> None:
        """Adds a region for each tensor that the problem's layout names as copied; `Memory.contiguous` copies it.

        Args:
            tensors: the dtype and the number of elements of every tensor that may be copied.
        """
        self.scratch(**{f"copy_of_{name}": tensors[name] for name in copied_names(self.problem.layout)})

    def memory(self, workspace: Tensor | None) -> Memory:
        """The regions of a workspace as kernels take them. Where `workspace` is None, one is allocated."""
        return self.regions.divide(workspace, self.device)

    def add_numeric(self, **parameters: Any) -> None:
        """Adds parameters that change bits and belong to no kernel."""
        self.plan_numeric |= parameters

    def prepare(self) -> None:
        """Compiles all kernels that were bound."""
        if any("status_word" in launch.kernel.types for launch in self.launches):
            status_word(self.device)
        for launch in self.launches:
            launch.prepare()

    @property
    def numeric(self) -> dict[str, Any]:
        """The parameters that change bits, by the names that kernels give them."""
        named = dict(self.plan_numeric)
        for launch in self.launches:
            for label, name in launch.kernel.numeric.items():
                value = launch.settings[name]
                value = short(value) if isinstance(value, torch.dtype) else value
                if named.setdefault(label, value) != value:
                    raise AssertionError(
                        f"{launch.kernel.name}: {label} is numeric, and both {named[label]} and {value} in one plan; "
                        f"give them different names in the kernels' declarations"
                    )
        return named


def is_aligned(*tensors: Tensor | None) -> bool:
    """Whether all tensors begin at multiples of 16 bytes."""
    for tensor in tensors:  # noqa: SIM110  (a generator costs as much as all the rest)
        if tensor is not None and tensor.data_ptr() % 16:
            return False
    return True


# ------------------------------------------------------------------------------------------------- streams

_of_thread = threading.local()


def run_concurrently(
    device: torch.device, first: Callable[[], Any], *others: Callable[[], Any], worthwhile: bool
) -> None:
    """Launches pieces of work that do not depend on each other. Later work waits for all of them.

    No piece fills the GPU. So on a GPU, where it is worthwhile, each piece but the first gets a stream of its own. The
    pieces are launched in their order, so the GPU places the first one first. The streams are joined even when a piece
    raises, so the pieces may use memory of the current stream freely. CUDA graphs capture all of this.

    Args:
        device: the device of all pieces.
        first, others: functions that launch on the current stream.
        worthwhile: whether the work takes long enough to outweigh what further streams cost the host.
    """
    if device.type != "cuda" or not worthwhile or not others:
        for launch in (first, *others):
            launch()
        return
    main, streams = torch.cuda.current_stream(device), [_side_stream(device, n) for n in range(len(others))]
    for stream in streams:
        stream.wait_stream(main)
    try:
        first()
        for stream, launch in zip(streams, others, strict=True):
            with torch.cuda.stream(stream):
                launch()
    finally:
        for stream in streams:
            main.wait_stream(stream)


def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """One of this thread's further streams of a device, beside the one that it launches on."""
    streams: dict[tuple[int, int], torch.cuda.Stream] = _of_thread.__dict__.setdefault("streams", {})
    index = torch.cuda.current_device() if device.index is None else device.index
    if (index, number) not in streams:
        streams[index, number] = torch.cuda.Stream(index)
    return streams[index, number]


def refuse_capture(device: torch.device, what: str, advice: str) -> None:
    """Raises `Unsupported` while a CUDA graph is recorded, for work that waits for the device.

    Torch would raise as well, but in the middle of the work, and its random generators on the device could not be used
    after that.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Unsupported(f"{what} waits for the device, so a CUDA graph cannot record it; {advice}")


# ------------------------------------------------------------------------------------------------- builds


def setups(call: "Call", target: str, plan: str = "") -> Iterator[Setup]:
    """The setups of the plans that a call on meta tensors may have on a GPU that need not be present, in both
    directions.

    These are the plans that accept the problem and are for the target; with `plan`, only the one with that name. Each
    has a setup under the target's own schedule. For the architecture on which kernels are tuned, each has another one
    under the schedule of the tuned GPU.
    """
    for operator, problem in call.problems(torch.device(TARGETS[target][0])):
        for candidate in operator.candidates():
            is_meant = candidate.setup is not None and target in candidate.targets and plan in ("", candidate.name)
            if is_meant and not candidate.refuse(problem):
                for gpu in (target, TUNED_GPU) if target == TUNED else (target,):
                    yield set_up(candidate, problem, target, gpu)


def set_up(candidate: "Candidate", problem: Problem, target: str, gpu: str = "") -> Setup:
    """The setup of a candidate for a problem on a GPU that need not be present, under the schedule of that GPU."""
    assert candidate.setup is not None
    setup = Setup(problem, candidate.schedule_on(problem, gpu, target), target)
    candidate.setup(setup)
    return setup


def variants(call: "Call", target: str, plan: str = "", unaligned: bool = True) -> Iterator[tuple[str, Variant]]:
    """Names and variants of the kernels that a call on meta tensors may launch on a GPU that need not be present.

    Args:
        plan: the name of one plan; by default all plans. See `setups`.
        unaligned: whether to include the variants for unaligned memory of kernels that also have variants for memory
            that begins at multiples of 16 bytes.
    """
    for setup in setups(call, target, plan):
        for launch in setup.launches:
            if target in launch.kernel.targets and (unaligned or launch.aligned or not launch.has_twin):
                yield _words(launch.variant), launch.variant


def _words(variant: Variant) -> str:
    types = "".join(text for _, text in variant.types if text.startswith("*"))  # in order, one for each pointer
    constants = ",".join(f"{name}={value}" for name, value in variant.constants)
    shape = f"warps={variant.num_warps},stages={variant.num_stages},multiples={len(variant.aligned)}"
    return f"{variant.kernel} {types} {constants} {shape}"
