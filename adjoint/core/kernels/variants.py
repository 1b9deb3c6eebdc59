"""Variants: the single compilations of a kernel, and how a compiled kernel is launched."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from adjoint.core.kernels.counts import count_compilation
from adjoint.core.kernels.declaration import kernel_of, registered
from adjoint.core.kernels.parameters import TILES
from adjoint.core.kernels.targets import interpreting

_lock = threading.Lock()


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
        object.__setattr__(self, "_hash", hash(fields))  # computed once: every plan looks up its compiled variants

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def prepare(self, device: torch.device) -> Callable[..., None]:
        """Compiles the variant for a device, unless that was done, and returns `launcher(grid, *arguments)`."""
        launchers = kernel_of(self.kernel).launchers
        launcher = launchers.get((self, device))
        if launcher is None:
            with _lock:
                launcher = launchers.get((self, device))
                if launcher is None:
                    launcher = launchers[self, device] = self._launcher(device)
        return launcher

    def _launcher(self, device: torch.device) -> Callable[..., None]:
        count_compilation()
        function = kernel_of(self.kernel).function
        constants = dict(self.constants)
        if interpreting():
            return self._interpreted(function, constants)

        from triton.runtime import driver

        with torch.cuda.device(device):
            compiled = self.compile(driver.active.get_current_target())
            compiled._init_handles()  # load the module now, because a launch must not load it
        tiled = [place for place, (_, text) in enumerate(self.types) if text.startswith(TILES)]
        return _describing(_starter(compiled, device.index, tuple(constants.values())), tiled)

    def _interpreted(self, function: Any, constants: dict[str, Any]) -> Callable[..., None]:
        """A launcher in Triton's interpreter. The interpreter ignores alignment, so the launcher checks it."""
        types = kernel_of(self.kernel).types
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

        function = kernel_of(self.kernel).function
        signature: dict[str, Any] = {
            name: tuple(text.split(",")) if "," in text and not text.startswith(TILES) else text
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


_DIRECT_LAUNCH = ((3, 6), (3, 7))
"""The first and the last version of Triton for which the direct launch of `_starter` is known to work."""


def _starter(compiled: Any, index: int, constants: tuple[Any, ...]) -> Callable[..., None]:
    """`start(grid, *arguments)`, which launches a compiled kernel on the current stream of its device.

    It does what `compiled[grid]` does, but does not ask Triton for the device, the stream and the hooks' metadata at
    every launch. This halves what a launch costs the host. Under profilers that hook into launches, and with versions
    of Triton for which this was not tried, it launches in Triton's own way.
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


class _Tiles(NamedTuple):
    """A matrix with the attributes from which Triton's launcher makes a tensor descriptor.

    Triton's own class would check at every launch what `Tiled` states already.
    """

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


def _describing(start: Callable[..., None], tiled: list[int]) -> Callable[..., None]:
    """`start` for a kernel some of whose arguments are matrices that it copies by tiles."""
    if not tiled:
        return start

    def start_described(grid: tuple[int, int, int], *arguments: Any) -> None:
        described = list(arguments)
        for place in tiled:
            tensor = arguments[place]
            described[place] = _Tiles(tensor, list(tensor.shape), list(tensor.stride()))
        start(grid, *described)

    return start_described


def forget() -> None:
    """Forgets the kernels that this process has compiled, so that the next launch compiles or loads again."""
    with _lock:
        for kernel in registered().values():
            kernel.launchers.clear()
