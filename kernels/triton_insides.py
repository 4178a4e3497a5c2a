"""What depends on Triton's insides: all of it is here, and says so when a version of Triton differs from those that were tested.

Documented are Triton's language and its launches; a compiled kernel's handles and how code is named are not.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton import knobs

from kvpack.formats.errors import KvpackError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

COMPILERS_BYTES = 16 << 10
"""Shared memory of a launch in front of what kvpack keeps behind it: there the compiler puts what it moves from lane to lane."""

SHARED_MEMORY = "global_smem"
"""The assembly's symbol of a launch's shared memory."""

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""A function attribute of the CUDA driver, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""


def expect(holds: bool, expected: str, found: object) -> None:
    """Raise KvpackError unless what the kernels rely on ``holds``."""
    if not holds:
        raise KvpackError(
            f"Triton {triton.__version__}: the kernels expect {expected}, found {found!r:.200}; "
            "set the environment variable KVPACK_KERNELS=torch, or install a version that kvpack was tested with"
        )


def shared_bytes(kernel: Any) -> int:
    """The shared memory in bytes that a compiled ``kernel`` is launched with: the last of the three values that its launcher takes."""
    packed, metadata = kernel.packed_metadata, kernel.metadata
    expected = (metadata.num_warps, metadata.num_ctas, metadata.shared)
    expect(
        isinstance(packed, tuple) and len(packed) == 3 and packed[:2] == expected[:2] and packed[2] >= expected[2],
        f"a launcher's values (warps, CTAs, shared memory) to be {expected}",
        packed,
    )
    return int(metadata.shared)


def enlarge_shared_memory(kernel: Any, size: int) -> None:
    """Have ``kernel`` launched with ``size`` bytes of shared memory, of which the compiler has at most the first COMPILERS_BYTES."""
    own = shared_bytes(kernel)
    expect(own <= COMPILERS_BYTES, f"the compiler to take at most {COMPILERS_BYTES} bytes of shared memory in front of tables", own)
    kernel.packed_metadata = (*kernel.packed_metadata[:2], size)


def allow_shared_memory(kernel: Any, size: int) -> None:
    """Let the CUDA driver launch ``kernel`` with ``size`` bytes of dynamic shared memory beside what its assembly declares."""
    # Asking for it loads the code, which gives the function its handle.
    _ = kernel.run
    expect(isinstance(kernel.function, int), "a compiled kernel's function to be a handle of the CUDA driver", kernel.function)
    error = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
        ctypes.c_void_p(kernel.function), MAX_DYNAMIC_SHARED_SIZE_BYTES, ctypes.c_int(size)
    )
    if error:
        raise KvpackError(f"the CUDA driver refuses {size} bytes of dynamic shared memory: error {error}")


def code_key(values: Iterable[Any]) -> str:
    """What names compiled code that ``values`` are constants of: of functions the source, of all others their text.

    Triton takes the source of functions that are arguments themselves, and of no others; of a constant it takes ``cache_key``.
    """
    return "-".join(_source_key(value) for value in values)


def _source_key(value: Any) -> str:
    if not isinstance(value, triton.runtime.JITFunction):
        return getattr(value, "cache_key", None) or repr(value)
    expect(isinstance(value.cache_key, str), "a function's cache_key to be text that changes with its source", value.cache_key)
    return str(value.cache_key)


def plain(function: Any) -> Callable[..., Any]:
    """The Python function of a ``triton.constexpr_function``: called as it is, Triton 3.6 takes the names of tuples away."""
    expect(callable(getattr(function, "fn", None)), "a constexpr_function to keep its function as fn", function)
    found: Callable[..., Any] = function.fn
    return found


def _hooks() -> bool:
    """Whether Triton calls a hook around launches, such as a profiler's."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


class CachedLaunch:
    """A launch whose compiled kernel is looked up once: later calls give pointers alone to the driver.

    Triton's own launch binds and specializes every argument again, which takes longer on the host than these kernels on the device.
    ``arguments`` follow the pointers and never change, and ``constants`` follow these.
    ``allow`` is called with the compiled kernel before its first launch.
    """

    def __init__(
        self,
        function: Any,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
        allow: Callable[[Any], None] | None = None,
    ) -> None:
        self.function, self.grid, self.arguments, self.constants, self.options = function, grid, arguments, constants, options
        self.allow = allow
        self._fixed: tuple[Any, ...] = ()
        self._kernel: Any = None

    def __call__(self, *pointers: tuple[torch.Tensor, int]) -> None:
        """Launch on the current stream; a pointer is a tensor and the number of elements to skip."""
        device = pointers[0][0].device
        # The driver launches on the current device alone.
        if self._kernel is not None and torch._C._cuda_getDevice() == device.index and not _hooks():
            addresses, low = [], 0
            for tensor, skipped in pointers:
                address = tensor.data_ptr() + skipped * tensor.element_size()
                addresses.append(address)
                low |= address
            if low % 16 == 0:
                kernel = self._kernel
                stream = torch._C._cuda_getCurrentRawStream(device.index)
                kernel.run(*self.grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *addresses, *self._fixed)
                return
        # Triton compiles for the current device.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._run([tensor.view(-1)[skipped:] if skipped else tensor for tensor, skipped in pointers])

    def _run(self, tensors: Sequence[torch.Tensor]) -> None:
        """Launch as Triton does, and keep the compiled kernel."""
        if self.allow is not None:
            self.allow(self.function.warmup(*tensors, *self.arguments, grid=self.grid, **self.constants, **self.options))
            self.allow = None
        kernel = self.function[self.grid](*tensors, *self.arguments, **self.constants, **self.options)
        if isinstance(self.function, triton.runtime.JITFunction) and all(tensor.data_ptr() % 16 == 0 for tensor in tensors):
            names = self.function.arg_names[len(tensors) + len(self.arguments) :]
            expect(set(names) == set(self.constants), f"the constants to be {sorted(self.constants)}", names)
            expect(callable(getattr(kernel, "run", None)), "a launch to return the compiled kernel", kernel)
            self._fixed = (*self.arguments, *(self.constants[name] for name in names))
            self._kernel = kernel
