"""Everything that depends on Triton's internals. Checks raise errors for incompatible Triton versions.

Triton documents its language and launches, but not the handles of compiled kernels or the cache keys of code.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import _async_compile, cache, driver

from kvpack.formats.errors import KvpackError

COMPILER_BYTES = 16 << 10
"""Maximum bytes that the compiler uses, at the start of a launch's shared memory, to move values between lanes."""

SHARED_MEMORY = "global_smem"
"""PTX symbol of a launch's shared memory."""

POINTER_ALIGNMENT = 16
"""Alignment of pointers, in bytes, for which Triton specializes kernels."""

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""CUDA driver constant CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""


_finder = triton.runtime.jit.DependenciesFinder
_update_hash = _finder._update_hash


def _update_hash_in_order(self: Any, function: Any) -> None:
    """Compute the key of a called ``function`` before its constants are read, as Triton 3.9 does.

    Otherwise, a kernel's key contains the constants of the functions that have keys already, so it depends on earlier launches.
    """
    _ = function.cache_key
    _update_hash(self, function)


_finder._update_hash = _update_hash_in_order


def check_assumption(holds: bool, expected: str, result: object) -> None:
    """Raise KvpackError unless an assumption about Triton ``holds``. The message contains the ``expected`` and the actual ``result``."""
    if not holds:
        raise KvpackError(
            f"Triton {triton.__version__}: the kernels expect {expected}, but found {result!r:.200}: "
            "set the environment variable KVPACK_KERNELS=torch, or install a version that kvpack was tested with"
        )


def shared_bytes(kernel: Any) -> int:
    """Return the number of bytes of shared memory that the compiled ``kernel`` is launched with."""
    packed, metadata = kernel.packed_metadata, kernel.metadata
    expected = (metadata.num_warps, metadata.num_ctas, metadata.shared)
    check_assumption(
        isinstance(packed, tuple) and len(packed) == 3 and packed[:2] == expected[:2] and packed[2] >= expected[2],
        f"a launcher's values (warps, CTAs, shared memory) to be {expected}",
        packed,
    )
    return int(metadata.shared)


def enlarge_shared_memory(kernel: Any, size: int) -> None:
    """Launch ``kernel`` with ``size`` bytes of shared memory from now on. The compiler may use up to ``COMPILER_BYTES`` of them."""
    own = shared_bytes(kernel)
    check_assumption(own <= COMPILER_BYTES, f"the compiler to take at most {COMPILER_BYTES} bytes of shared memory in front of tables", own)
    kernel.packed_metadata = (*kernel.packed_metadata[:2], size)


def allow_shared_memory(kernel: Any, size: int) -> None:
    """Let the CUDA driver launch ``kernel`` with ``size`` bytes of dynamic shared memory, in addition to its static shared memory."""
    # Reading this attribute loads the code and sets the function's handle.
    _ = kernel.run
    check_assumption(isinstance(kernel.function, int), "a compiled kernel's function to be a handle of the CUDA driver", kernel.function)
    error = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
        ctypes.c_void_p(kernel.function), MAX_DYNAMIC_SHARED_SIZE_BYTES, ctypes.c_int(size)
    )
    if error:
        raise KvpackError(f"the CUDA driver refuses {size} bytes of dynamic shared memory (error {error}): set KVPACK_KERNELS=torch")


def code_key(values: Iterable[Any]) -> str:
    """Return a cache key for code that is compiled with the constants ``values``: the source of functions, and the text of other constants.

    Triton's own cache key covers only the source of functions that are passed as arguments. For constants, it uses their ``cache_key``.
    """
    return "-".join(_source_key(value) for value in values)


def _source_key(value: Any) -> str:
    if not isinstance(value, triton.runtime.JITFunction):
        return getattr(value, "cache_key", None) or repr(value)
    check_assumption(isinstance(value.cache_key, str), "a function's cache_key to be text that changes with its source", value.cache_key)
    return str(value.cache_key)


def cached_binary(key: str, name: str, build: Callable[[], bytes]) -> bytes:
    """Return the file ``name`` for ``key`` in Triton's cache. If it is missing, ``build`` makes its contents."""
    manager = cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    path = manager.get_file(name) or manager.put(build(), name)
    return Path(path).read_bytes()


class Compilation(NamedTuple):
    """A kernel to compile: its name, its key in Triton's cache, and a function that compiles it."""

    kernel: str
    key: str
    compile: Callable[[], Any]


class _TargetDriver:
    """Stand-in for Triton's driver before launches, for a device of compute ``capability`` that need not exist."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        # Triton finds the kernels of a device by its number, which no real one shares.
        return -self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _target(capability: int) -> Iterator[None]:
    """Return a context manager in which Triton launches and compiles for compute ``capability``, without using CUDA."""
    active = driver._active
    driver.set_active(_TargetDriver(capability))
    try:
        yield
    finally:
        driver._active = active


class _Collector:
    """Stand-in for Triton's parallel compilation, which collects kernels instead of compiling them."""

    def __init__(self, capability: int) -> None:
        self.capability, self.kernel = capability, ""
        self.compilations: dict[str, Compilation] = {}

    def submit(self, key: str, compile_kernel: Callable[[], Any], *_: Any) -> None:
        def compile_for_target() -> Any:
            # Kernels may depend on the capability, and forked processes cannot ask CUDA for it.
            with _target(self.capability):
                return compile_kernel()

        self.compilations.setdefault(key, Compilation(self.kernel, key, compile_for_target))


@contextmanager
def collect_compilations(capability: int) -> Iterator[dict[str, Compilation]]:
    """Return a context manager that collects, by key, the kernels of all launches on CPU tensors, instead of launching them.

    The kernels are for devices of compute ``capability`` 10 * major + minor, such as 90. On such a device, the same launches have the same
    keys if tensors have the same dtypes, alignments and strides.
    """
    jit, collector = triton.runtime.JITFunction, _Collector(capability)
    run = jit.run

    def collect(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        collector.kernel = self.__name__
        run(self, *args, grid=grid, warmup=True, **options)

    mode = _async_compile.active_mode.set(collector)
    jit.run = collect
    try:
        with _target(capability):
            yield collector.compilations
    finally:
        jit.run = run
        _async_compile.active_mode.reset(mode)


def _has_launch_hooks() -> bool:
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


def current_stream(device: int) -> int:
    """Return the current CUDA stream of ``device``, or -1 if cached launches are not possible.

    They are possible only on the current device, and only without launch hooks.
    """
    if torch._C._cuda_getDevice() != device or _has_launch_hooks():
        return -1
    return int(torch._C._cuda_getCurrentRawStream(device))


class CachedLaunch:
    """A launch that looks up its compiled kernel only once. Later calls only pass pointers to the driver.

    Triton's own launch binds and specializes every argument again, which takes longer on the host than these kernels take on the device.
    ``arguments`` follow the pointers and never change, and ``constants`` come last. ``allow`` is called with the compiled kernel before the
    first launch.
    """

    def __init__(
        self,
        function: Any,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
        allow: Callable[[Any], None] | None = None,
    ) -> None:
        self.function, self.grid, self.arguments, self.constants, self.options = function, grid, arguments, constants, options
        self.allow = allow
        self._before: tuple[Any, ...] = ()
        self._after: tuple[Any, ...] = ()
        self._launch: Callable[..., None] | None = None

    def __call__(self, *pointers: tuple[torch.Tensor, int]) -> None:
        """Launch on the current stream. Each pointer is a tensor and the number of elements to skip."""
        device = pointers[0][0].device
        if self._launch is not None and (stream := current_stream(device.index)) >= 0:
            addresses, low = [], 0
            for tensor, skipped in pointers:
                address = tensor.data_ptr() + skipped * tensor.element_size()
                addresses.append(address)
                low |= address
            if low % POINTER_ALIGNMENT == 0:
                self.launch_on(stream, *addresses)
                return
        # Triton compiles for the current device.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._run([tensor.view(-1)[skipped:] if skipped else tensor for tensor, skipped in pointers])

    @property
    def is_cached(self) -> bool:
        return self._launch is not None

    def launch_on(self, stream: int, *addresses: int) -> None:
        """Launch the cached kernel on ``stream``, as returned by ``current_stream``.

        All addresses must be multiples of ``POINTER_ALIGNMENT``.
        """
        assert self._launch is not None
        self._launch(*self.grid, stream, *self._before, *addresses, *self._after)

    def _run(self, tensors: Sequence[torch.Tensor]) -> None:
        is_cuda = tensors[0].is_cuda
        if self.allow is not None and is_cuda:
            self.allow(self.function.warmup(*tensors, *self.arguments, grid=self.grid, **self.constants, **self.options))
            self.allow = None
        kernel = self.function[self.grid](*tensors, *self.arguments, **self.constants, **self.options)
        is_compiled = is_cuda and isinstance(self.function, triton.runtime.JITFunction)
        if is_compiled and all(tensor.data_ptr() % POINTER_ALIGNMENT == 0 for tensor in tensors):
            names = self.function.arg_names[len(tensors) + len(self.arguments) :]
            check_assumption(set(names) == set(self.constants), f"the constants to be {sorted(self.constants)}", names)
            check_assumption(callable(getattr(kernel, "run", None)), "a launch to return the compiled kernel", kernel)
            self._after = (*self.arguments, *(self.constants[name] for name in names))
            self._launch, self._before = _launcher(kernel)


_cached_launches: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[Any, ...], list[str]]] = {}
"""Cached launches by key: a compiled kernel's launcher, the arguments before the kernel's own, and the names of its constants.

The key contains everything on which Triton specializes.
"""


def launch_cached(
    function: Any, programs: int, device: torch.device, arguments: Sequence[Any], constants: Mapping[str, Any], options: Mapping[str, Any]
) -> bool:
    """Launch the kernel that ``launch_and_cache`` cached for equivalent arguments. Returns False if there is none."""
    if (stream := current_stream(device.index)) < 0:
        return False
    try:
        cached = _cached_launches.get(_launch_key(function, device, arguments, constants, options))
    except TypeError:
        # Triton handles constants that are not hashable.
        return False
    if cached is None:
        return False
    run, before, names = cached
    run(programs, 1, 1, stream, *before, *arguments, *[constants[name] for name in names])
    return True


def launch_and_cache(
    function: Any, programs: int, device: torch.device, arguments: Sequence[Any], constants: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Launch through Triton on the current device, and cache the compiled kernel."""
    kernel = function[(programs,)](*arguments, **constants, **options)
    if device.type != "cuda" or not isinstance(function, triton.runtime.JITFunction):
        return
    names = [parameter.name for parameter in function.params if parameter.is_constexpr]
    # Cache the call only if the arguments passed by name are exactly the constants.
    if [*function.arg_names[len(arguments) :]] == names and set(names) == set(constants) and callable(getattr(kernel, "run", None)):
        with suppress(TypeError):
            _cached_launches[_launch_key(function, device, arguments, constants, options)] = (*_launcher(kernel), names)


def _launch_key(
    function: Any, device: torch.device, arguments: Sequence[Any], constants: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return a key that is equal for all launches that can use the same compiled code.

    Raises TypeError if no key supports an argument or a constant.
    """
    constant_keys = [(name, type(value), value) for name, value in constants.items()]
    result = (function, device.index, *map(_argument_key, arguments), *constant_keys, *options.items())
    hash(result)
    return result


def _argument_key(value: Any) -> Any:
    """Return the properties of an argument for which Triton compiles separate code.

    For a tensor, these are its dtype and alignment. For an integer, these are its width, and whether it is 1 or a multiple of 16.
    """
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % POINTER_ALIGNMENT == 0
    if type(value) is int:
        return value == 1, value % POINTER_ALIGNMENT == 0, -(2**31) <= value < 2**31, value < 2**63
    if value is None:
        return None
    if isinstance(value, tuple):
        return type(value), *map(_argument_key, value)
    raise TypeError(f"kernels do not support arguments of type {type(value).__name__}")


def _launcher(kernel: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the C launcher of a compiled kernel, and the arguments that it expects between the stream and the kernel's own arguments.

    Triton's Python launcher adds only scratch memory, which these kernels do not use.
    """
    run, behind = kernel.run, (kernel.packed_metadata, None, None, None)
    scratch = [getattr(run, name, None) for name in ("global_scratch_size", "profile_scratch_size")]
    inner, choices = getattr(run, "launch", None), [getattr(run, name, None) for name in ("launch_cooperative_grid", "launch_pdl")]
    if scratch == [0, 0] and callable(inner) and all(isinstance(choice, bool) for choice in choices):
        return inner, (kernel.function, *choices, None, None, *behind)
    return run, (kernel.function, *behind)


class LaunchChain:
    """A sequence of launches whose pointers are in fixed tensors or in tensors that each call passes.

    Each pointer is a pair: a fixed tensor, or the index of one of the call's tensors, and the number of elements to skip.
    """

    def __init__(self, launches: Sequence[tuple[CachedLaunch, Sequence[tuple[int | torch.Tensor, int]]]]) -> None:
        self._launches = launches
        self._kept: list[tuple[CachedLaunch, list[tuple[int, int]]]] = []

    def __call__(self, tensors: Sequence[torch.Tensor], first: int = 0) -> None:
        """Run the launches on the current CUDA stream, beginning with launch ``first``."""
        if self._kept and (stream := current_stream(tensors[0].device.index)) >= 0:
            addresses, low = [0], 0
            for tensor in tensors:
                address = tensor.data_ptr()
                addresses.append(address)
                low |= address
            if low % POINTER_ALIGNMENT == 0:
                for launch, pointers in self._kept[first:] if first else self._kept:
                    launch.launch_on(stream, *[addresses[number] + skipped for number, skipped in pointers])
                return
        for launch, places in self._launches[first:]:
            launch(*[(place if isinstance(place, torch.Tensor) else tensors[place], skipped) for place, skipped in places])
        if not self._kept and all(launch.is_cached for launch, _ in self._launches):
            self._cache_addresses(tensors)

    def _cache_addresses(self, tensors: Sequence[torch.Tensor]) -> None:
        """Cache the addresses of the fixed tensors.

        For the tensors of a call, whose addresses change, cache only the number of bytes to skip.
        """
        fixed = []
        for launch, places in self._launches:
            pointers = []
            for place, skipped in places:
                tensor = place if isinstance(place, torch.Tensor) else tensors[place]
                number, address = (0, place.data_ptr()) if isinstance(place, torch.Tensor) else (place + 1, 0)
                pointers.append((number, address + skipped * tensor.element_size()))
            if any(address % POINTER_ALIGNMENT for _, address in pointers):
                return
            fixed.append((launch, pointers))
        self._kept = fixed
