"""Triton kernels with typed parameters: what is compiled, for which target, and how often it was launched.

    @kernel(budget=Budget(registers=32), schedule=("BLOCK",))
    @triton.jit
    def scale(x: PointerIf16.element, y: PointerIf16.element, factor: Float32, count: Int64, BLOCK: tl.constexpr):
        ...

The signature states the type of every run-time parameter, and Triton's own annotation says which are compile-time
constants. `adjoint.core.launch` binds the constants of a kernel and launches it by the names of its parameters.

Kernels are compiled from these types instead of through Triton's call-time specialisation, so that what is compiled
never depends on a batch's sizes or addresses by accident, the same description builds ahead of time for a GPU that is
not there, and a launch costs no signature matching.

This module imports Triton only inside functions: importing the package must not.
"""

import itertools
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adjoint.core.errors import Unsupported

TRITON_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
"""Targets kernels are built for ahead of time: backend, architecture and threads per warp."""

NVIDIA = tuple(target for target in TARGETS if target.startswith("sm_"))

TUNED, TUNED_GPU = "sm_90", "NVIDIA H200"
"""Where kernels are tuned, and timed: the architecture, and the GPU as schedules name it."""


@dataclass(frozen=True)
class Budget:
    """What a build may use per thread and per program.

    Attributes:
        spilled_elsewhere: the bytes it may spill where kernels are not tuned; where they are, none does.
    """

    registers: int
    shared_bytes: int = 0
    spilled_elsewhere: int = 0


@dataclass(frozen=True)
class Build:
    """What a kernel compiled for a target uses; registers are per thread, None where not reported."""

    registers: int | None
    spilled_bytes: int
    shared_bytes: int


@cache
def triton_missing() -> str:
    """Why the Triton backend cannot be used in this process at all; empty when it can."""
    try:
        import triton  # noqa: F401
    except Exception as error:  # a broken install raises more than ImportError
        return f"triton cannot be imported ({type(error).__name__}: {error})"
    return ""


@cache
def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, on the CPU: settled when Triton is imported."""
    if triton_missing():
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def why_not_triton(device: torch.device) -> str:
    """Why Triton kernels cannot run on a device; empty when they can."""
    if missing := triton_missing():
        return missing
    if interpreting():
        return "" if device.type == "cpu" else "Triton's interpreter is on, and it runs on the CPU alone"
    if device.type != "cuda":
        return f"Triton has no {device.type} backend here; its interpreter is off"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than sm_80"
    return ""


def why_not_on(device: torch.device, targets: Iterable[str]) -> str:
    """Why kernels for some targets cannot run on a device; empty when they can.

    Those for one architecture alone run nowhere else, and not in the interpreter: they are written in Gluon. Those for
    several run on every GPU of the vendors among them.
    """
    targets = tuple(targets)
    if len(targets) == 1:
        (target,) = targets
        if device.type != "cuda" or torch.version.hip is not None:
            return f"is for {target} alone"
        if torch.cuda.is_available() and architecture(device) != target:
            return f"is for {target}, this is {torch.cuda.get_device_name(device)}"
    elif device.type == "cuda" and torch.version.hip is not None and not set(targets) - set(NVIDIA):
        return "its kernels are for NVIDIA GPUs"
    return why_not_triton(device)


def why_not_for(target: str, targets: Iterable[str]) -> str:
    """Why kernels for some targets are not for another one, a GPU that need not be there; empty when they are."""
    targets = tuple(targets)
    if target in targets:
        return triton_missing()
    return f"is for {targets[0]} alone" if len(targets) == 1 else "its kernels are for NVIDIA GPUs"


def architecture(device: torch.device) -> str:
    """The architecture of a device, as kernels are built for it: "sm_90", "gfx942", or its type."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


# ------------------------------------------------------------------------------------ types of parameters


@dataclass(frozen=True)
class Parameter:
    """The type of one run-time parameter of a kernel.

    Attributes:
        type: a type of Triton's ("i64"); of a pointer, a torch dtype by name; of either, a variable that the launch
            settles.
        pointer: whether it is the address of numbers of that type.
        multiple: whether its value is a multiple of 16 (of a pointer, in bytes): "never" says that nothing is known,
            "always" that every launch sees to it, "aligned" that launches with `aligned=True` do.
        count: so many of them in a tuple, as `Int64 * 4` makes it; 0 for one that is in none.
    """

    type: str
    pointer: bool
    multiple: str
    count: int = 0
    __triton_builtin__ = True  # Triton's compiler evaluates annotations, and admits few globals

    @property
    def variable(self) -> str | None:
        """The variable that stands for the type; None where the type itself is named."""
        return None if self.type in (_DTYPES if self.pointer else _SCALARS) else self.type

    def text(self, dtypes: Mapping[str, torch.dtype]) -> str:
        """The type as Triton writes it, once variables are settled; of a tuple, with commas between."""
        if self.pointer:
            return f"*{TRITON_TYPES[_DTYPES.get(self.type) or dtypes[self.type]]}"
        text = self.type if self.type in _SCALARS else TRITON_TYPES[dtypes[self.type]]
        return ",".join([text] * max(1, self.count))

    def __mul__(self, count: int) -> "Parameter":
        return replace(self, count=count)


@dataclass(frozen=True)
class Tiled(Parameter):
    """A matrix in memory that a kernel of Gluon copies a tile at a time (TMA): a launch gives a contiguous tensor.

    It begins at a multiple of 16 bytes, and so does each of its rows. In shared memory a tile of a 16-bit type lies as
    matrix products read it: 128 bytes of a row beside each other, swizzled.

    Attributes:
        tile: rows and columns of a tile; the names of constants, or numbers.
    """

    tile: tuple[str | int, ...] = ()

    @staticmethod
    def of(type: str, *tile: str | int) -> "Tiled":
        """Tiles of numbers of a type, or of one that the launch settles."""
        return Tiled(type, True, "never", tile=tile)

    def text(self, settings: Mapping[str, Any]) -> str:
        sizes = ",".join(str(settings[size] if isinstance(size, str) else size) for size in self.tile)
        return f"{_TILES}<{super().text(settings)[1:]}[{sizes}],{_TILE_LAYOUT}>"


_TILES = "tensordesc"
_TILE_LAYOUT = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)"


class _Tiles(NamedTuple):
    """A tensor as Triton's launcher takes it, which reads these names and makes a descriptor of them.

    Triton's own class checks what `Tiled` states, at every launch.
    """

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


_SCALARS = frozenset(("i32", "i64", "fp32"))
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TRITON_TYPES}


class _Named(type):
    """`Pointer.float32` names a type; any other name is a variable that the launch settles: `Pointer.element`."""

    pointer = True
    multiple = "never"
    __triton_builtin__ = True

    def __getattr__(cls, name: str) -> Parameter:
        if name.startswith("_"):
            raise AttributeError(name)
        return Parameter(name, cls.pointer, cls.multiple)


class Pointer(metaclass=_Named):
    """The address of numbers, about whose alignment nothing is known."""


class Pointer16(metaclass=_Named):
    """An address that is a multiple of 16 bytes in every launch."""

    multiple = "always"


class PointerIf16(metaclass=_Named):
    """An address that is a multiple of 16 bytes in launches with `aligned=True`."""

    multiple = "aligned"


class Float(metaclass=_Named):
    """A number of the type that a variable stands for: `Float.computed`."""

    pointer = False


class Int(metaclass=_Named):
    """A whole number of the type that a variable stands for: `Int.number`."""

    pointer = False


Int32, Int64 = Parameter("i32", False, "never"), Parameter("i64", False, "never")
Int32x16, Int64x16 = Parameter("i32", False, "always"), Parameter("i64", False, "always")
Int32If16, Int64If16 = Parameter("i32", False, "aligned"), Parameter("i64", False, "aligned")
Float32 = Parameter("fp32", False, "never")


# ------------------------------------------------------------------------------------------------ kernels

_kernels: dict[str, "Kernel"] = {}
_lock = threading.Lock()
_launches: dict[str, "itertools.count[int]"] = {}
_compilations = itertools.count()


class Kernel:
    """One Triton function, the resources its builds may use, and the targets it is for.

    Attributes:
        types: the run-time parameters, in order.
        constants: the compile-time parameters, in order.
        variables: those that stand for types of pointers.
        numeric: constants and variables that change bits, by the name a SKU gives them.
        schedule: constants that change no bit, and may depend on the GPU.
        variants: those described so far, by what a launch settles.
    """

    def __init__(
        self, function: Any, budget: Budget, targets: Iterable[str], numeric: Mapping[str, str], schedule: Iterable[str]
    ) -> None:
        from triton.language import constexpr

        self.function, self.budget, self.targets = function, budget, frozenset(targets)
        self.name: str = function.__name__
        self.parameters: tuple[str, ...] = tuple(function.arg_names)
        annotations = function.fn.__annotations__
        self.constants = tuple(name for name in self.parameters if annotations.get(name) is constexpr)
        self.types: dict[str, Parameter] = {
            name: annotations[name] for name in self.parameters if isinstance(annotations.get(name), Parameter)
        }
        self.variables = frozenset(t.variable for t in self.types.values() if t.variable)
        self.settings = self.variables | frozenset(self.constants)
        self.numeric, self.schedule = dict(numeric), frozenset(schedule)
        self.variants: dict[Hashable, Variant] = {}
        self._require_types()

    def _require_types(self) -> None:
        """Raises unless the signature says what every parameter is, and all that is said is about parameters."""
        missing = [name for name in self.parameters if name not in self.types and name not in self.constants]
        if missing:
            raise TypeError(f"{self.name}: the signature states no type for {', '.join(missing)}")
        if self.parameters != (*self.types, *self.constants):
            raise TypeError(f"{self.name}: compile-time parameters come after the others")
        unknown = (set(self.numeric.values()) | self.schedule) - self.settings
        if unknown:
            raise TypeError(f"{self.name}: no compile-time parameter is called {', '.join(sorted(unknown))}")

    @cached_property
    def by_name(self) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Makes `launch(grid, *, <every run-time parameter>)` of `start(grid, *arguments)`.

        A generated function, so that Python itself matches names and reports wrong ones. A grid has one to three axes;
        without programs nothing is launched.
        """
        names = ", ".join(self.types)
        source = (
            f"def by_name(start):\n"
            f"    def launch(grid, *, {names}):\n"
            f"        if 0 not in grid:\n"
            f"            start((*grid, 1, 1)[:3], {names})\n"
            f"    launch.__qualname__ = '{self.name}.launch'\n"  # what Python names in the error for a wrong argument
            f"    return launch\n"
        )
        scope: dict[str, Any] = {}
        exec(source, scope)
        return scope["by_name"]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Variant:
    """One compilation of a kernel: its types, constants, alignment and launch shape. A plain value."""

    kernel: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        fields = self.kernel, self.types, self.constants, self.aligned, self.num_warps, self.num_stages
        object.__setattr__(self, "_hash", hash(fields))  # once: every plan looks up what is compiled

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def prepare(self, device: torch.device) -> Callable[..., None]:
        """Compiles for a device unless that was done, and returns `launcher(grid, *arguments)`."""
        launcher = _launchers.get((self, device))
        if launcher is None:
            with _lock:
                launcher = _launchers.get((self, device))
                if launcher is None:
                    launcher = _launchers[self, device] = self._launcher(device)
        return launcher

    def _launcher(self, device: torch.device) -> Callable[..., None]:
        next(_compilations)
        function = _kernels[self.kernel].function
        constants = dict(self.constants)
        if interpreting():
            return self._interpreted(function, constants)

        from triton.runtime import driver

        with torch.cuda.device(device):
            compiled = self.compile(driver.active.get_current_target())
            compiled._init_handles()  # load the module now: launching must not
        tiled = [place for place, (_, text) in enumerate(self.types) if text.startswith(_TILES)]
        return _describing(_starter(compiled, device.index, tuple(constants.values())), tiled)

    def _interpreted(self, function: Any, constants: dict[str, Any]) -> Callable[..., None]:
        """A launcher in Triton's interpreter, which knows no alignment: what a launch states of it is looked at."""
        types = _kernels[self.kernel].types
        stated = [
            (place, name)
            for place, (name, _) in enumerate(self.types)
            if name in self.aligned and types[name].multiple == "aligned"
        ]

        def launch(grid: tuple[int, ...], *arguments: Any) -> None:
            for place, name in stated:
                values = arguments[place] if isinstance(arguments[place], tuple) else (arguments[place],)
                for value in values:
                    number = value.data_ptr() if isinstance(value, torch.Tensor) else value
                    if number % 16:
                        raise AssertionError(f"{self.kernel}: {name} is stated to be a multiple of 16, and is {number}")
            function[grid](*arguments, **constants)

        return launch

    def compile(self, target: Any) -> Any:
        """Triton's compiled kernel for a `GPUTarget`; no GPU is needed."""
        import triton

        function = _kernels[self.kernel].function
        signature: dict[str, Any] = {
            name: tuple(text.split(",")) if "," in text and not text.startswith(_TILES) else text
            for name, text in self.types
        }
        signature |= {name: "constexpr" for name, _ in self.constants}
        position = {name: index for index, name in enumerate(signature)}
        if getattr(function, "is_gluon", lambda: False)():
            from triton.experimental.gluon._runtime import GluonASTSource as Source
        else:
            from triton.compiler import ASTSource as Source
        source = Source(
            fn=function,
            signature=signature,
            constexprs={(position[name],): value for name, value in self.constants},
            attrs={
                (position[name], *place): [["tt.divisibility", 16]]
                for name in self.aligned
                for place in (
                    ((i,) for i in range(len(signature[name]))) if isinstance(signature[name], tuple) else [()]
                )
            },
        )
        # Contraction would make bits depend on how a compiler happened to pair operations.
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}
        return triton.compile(source, target=target, options=options)


_launchers: dict[tuple[Variant, torch.device], Callable[..., None]] = {}

_DIRECT_LAUNCH = ((3, 6), (3, 7))
"""Versions of Triton, first and last, whose compiled kernels are known to be started as `_starter` does."""


def _starter(compiled: Any, index: int, constants: tuple[Any, ...]) -> Callable[..., None]:
    """`start(grid, *arguments)` for a compiled kernel on the current stream of its device.

    What `compiled[grid]` does, without asking Triton for the device, the stream and its hooks' metadata at
    every launch: half of what a launch costs the host. Profilers that hook into launches, and versions this
    was not tried with, get Triton's own way.
    """
    import triton
    from triton import knobs

    def start_slowly(grid: tuple[int, int, int], *arguments: Any) -> None:
        with torch.cuda.device(index):
            compiled[grid](*arguments, *constants)

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if torch.version.hip is not None or not _DIRECT_LAUNCH[0] <= version <= _DIRECT_LAUNCH[1]:
        return start_slowly
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream_of = torch._C._cuda_getCurrentRawStream
    current_device = torch._C._cuda_getDevice  # torch.cuda's own asks first whether CUDA is initialised
    runtime = knobs.runtime

    def start(grid: tuple[int, int, int], *arguments: Any) -> None:
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        # A hook is None, a function, or a chain of functions that may be empty.
        hooked = (enter is not None and getattr(enter, "calls", True)) or (
            leave is not None and getattr(leave, "calls", True)
        )
        if hooked or current_device() != index:
            start_slowly(grid, *arguments)
        else:
            run(*grid, stream_of(index), function, metadata, None, None, None, *arguments, *constants)

    return start


def _describing(start: Callable[..., None], tiled: list[int]) -> Callable[..., None]:
    """`start`, where the arguments at some places are matrices whose tiles are copied."""
    if not tiled:
        return start

    def start_described(grid: tuple[int, int, int], *arguments: Any) -> None:
        described = list(arguments)
        for place in tiled:
            tensor = arguments[place]
            described[place] = _Tiles(tensor, list(tensor.shape), list(tensor.stride()))
        start(grid, *described)

    return start_described


def kernel(
    *,
    budget: Budget,
    targets: Iterable[str] = TARGETS,
    numeric: Iterable[str] | Mapping[str, str] = (),
    schedule: Iterable[str] = (),
) -> Callable[[Any], Kernel]:
    """Registers the `@triton.jit` or `@gluon.jit` function beneath it, whose parameters are typed.

    Args:
        budget: what a build may use.
        targets: where it is for.
        numeric: the compile-time parameters that change bits: they stand in the SKU, under their names in lower case
            or under those that a mapping gives them.
        schedule: those that change none, and may depend on the GPU. All others are facts of the problem.
    """
    labels = numeric if isinstance(numeric, Mapping) else {name.lower(): name for name in numeric}

    def decorate(function: Any) -> Kernel:
        made = Kernel(function, budget, targets, labels, schedule)
        if made.name in _kernels and _kernels[made.name].function.__module__ != function.__module__:
            raise ValueError(f"two kernels are named {made.name}")
        _kernels[made.name] = made
        for key in [key for key in _launchers if key[0].kernel == made.name]:
            del _launchers[key]
        return made

    return decorate


def registered() -> dict[str, Kernel]:
    """Every kernel registered so far, by name."""
    return dict(_kernels)


def count_launch(sku: str) -> None:
    """Counts one launch of a plan; thread-safe."""
    counter = _launches.get(sku)
    if counter is None:
        counter = _launches.setdefault(sku, itertools.count())
    next(counter)


def launches() -> dict[str, int]:
    """How often each plan has launched in this process, by SKU."""
    return {sku: _count(counter) for sku, counter in _launches.items()}


def forget() -> None:
    """Forgets what was compiled in this process, so that the next launch compiles or loads again."""
    with _lock:
        _launchers.clear()


def compilations() -> int:
    """How many kernels this process has compiled or loaded for a device."""
    return _count(_compilations)


def _count(counter: "itertools.count[int]") -> int:
    return int(repr(counter)[6:-1])


def build(variant: Variant, target: str) -> Build:
    """Compiles for a named target and reports what the machine code uses.

    Registers and spills come from the machine code itself: `cuobjdump` for NVIDIA, the code
    object's own metadata for AMD.
    """
    if target not in TARGETS:
        raise Unsupported(f"build: unknown target {target!r}; known are {', '.join(TARGETS)}")
    from triton.backends.compiler import GPUTarget

    compiled = variant.compile(GPUTarget(*TARGETS[target]))
    if "cubin" in compiled.asm:
        return Build(*_nvidia_usage(compiled.asm["cubin"]), compiled.metadata.shared)
    text = compiled.asm["amdgcn"]
    spilled = sum(int(n) for n in re.findall(r"\.private_segment_fixed_size:\s+(\d+)", text))
    registers = re.search(r"\.vgpr_count:\s+(\d+)", text)
    return Build(int(registers[1]) if registers else None, spilled, compiled.metadata.shared)


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of local memory (spills and stack) a thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", report)
    if usage is None:
        raise RuntimeError(f"cuobjdump reported no resource usage:\n{report}")
    return int(usage[1]), int(usage[2]) + int(usage[3])
