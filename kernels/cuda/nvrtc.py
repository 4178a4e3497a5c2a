"""Kernels in CUDA C++, compiled by NVRTC, which PyTorch includes, and launched by the CUDA driver."""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvpack.formats.errors import KvpackError
from kvpack.kernels.triton_internals import MAX_DYNAMIC_SHARED_SIZE_BYTES, CachedLaunch, cached_binary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

OVERLAPS_LAUNCHES = 6
"""CUDA driver constant CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""

POINTERS, INTEGERS = struct.Struct("=9Q"), struct.Struct("=11i4x")
"""Layout of the kernels' only parameter: pointers, followed by integers."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of the CUDA driver, with a boolean value."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("unused", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig of the CUDA driver."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)), ("attribute_count", ctypes.c_uint),
    )  # fmt: skip


_overlap = _Attribute(OVERLAPS_LAUNCHES, 0, 1)


class Kernel:
    """A compiled kernel of ``threads`` threads and up to ``shared_bytes`` bytes of shared memory per block, on ``device``."""

    def __init__(self, binary: bytes, name: str, threads: int, shared_bytes: int, device: torch.device) -> None:
        self.threads = threads
        self._driver = _load_driver()
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            _check(self._driver.cuModuleLoadData(ctypes.byref(module), binary), "CUDA cannot load the kernel")
            _check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()), f"CUDA finds no kernel {name}")
            error = self._driver.cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        _check(error, f"the CUDA driver refuses {shared_bytes} bytes of dynamic shared memory")

    def launcher(self, shared_bytes: int, overlap: bool, integers: Sequence[int]) -> Callable[..., None]:
        """Return a function that launches the kernel: its arguments are the grid, the stream, and the pointers before ``integers``.

        With ``overlap``, the kernel may begin before the previous launch ends. All that stays the same is prepared here, because that takes
        longer than a launch.
        """
        parameter = ctypes.create_string_buffer(POINTERS.size + INTEGERS.size)
        INTEGERS.pack_into(parameter, POINTERS.size, *integers)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(parameter))
        config = _Config(1, 1, 1, self.threads, 1, 1, shared_bytes, None, ctypes.pointer(_overlap), int(overlap))
        run, function, lock = self._driver.cuLaunchKernelEx, self._function.value, threading.Lock()
        run.argtypes = (ctypes.c_void_p,) * 4
        where = ctypes.addressof(config)

        def launch(x: int, y: int, z: int, stream: int, *pointers: int) -> None:
            # The driver copies the configuration and the parameter before it returns.
            with lock:
                POINTERS.pack_into(parameter, 0, *pointers)
                config.grid_x, config.grid_y, config.grid_z, config.stream = x, y, z, stream
                error = run(where, function, parameters, None)
            _check(error, "CUDA refuses a launch")

        return launch


class CudaLaunch(CachedLaunch):
    """A launch of ``blocks`` blocks of ``kernel``, with ``integers`` after its pointers."""

    def __init__(self, kernel: Kernel, blocks: int, shared_bytes: int, overlap: bool, integers: Sequence[int]) -> None:
        super().__init__(kernel, (blocks, 1, 1), (), {}, {})
        self._launch = kernel.launcher(shared_bytes, overlap, integers)

    def _run(self, tensors: Sequence[torch.Tensor]) -> None:
        stream: Any = torch.cuda.current_stream()
        self.launch_on(stream.cuda_stream, *[tensor.data_ptr() for tensor in tensors])


def load_kernel(
    path: Path, constants: Mapping[str, int], capability: tuple[int, int], threads: int, shared_bytes: int, device: torch.device
) -> Kernel | None:
    """Return the kernel of the source file ``path``, which has its name, or None if NVRTC is missing or fails, or the driver does.

    ``constants`` are defined as macros.
    """
    try:
        return Kernel(compile_kernel(path, constants, capability), path.stem, threads, shared_bytes, device)
    except (OSError, KvpackError) as error:
        logging.getLogger("kvpack").debug("Triton's kernels replace %s: %s", path.name, error)
        return None


def compile_kernel(path: Path, constants: Mapping[str, int], capability: tuple[int, int]) -> bytes:
    """Return the machine code of the source file ``path``. It is kept in Triton's cache."""
    nvrtc = _library()
    version = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc.nvrtcVersion(*map(ctypes.byref, version)), "NVRTC has no version")
    source = path.read_bytes()
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in constants.items()]
    key = "\n".join([source.decode(), *options, *(str(number.value) for number in version)])
    return cached_binary(key, f"{path.stem}.cubin", lambda: _compile(nvrtc, source, options))


def _load_driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    if torch.version.cuda is None:
        raise KvpackError("PyTorch has no CUDA")
    return ctypes.CDLL(f"libnvrtc.so.{torch.version.cuda.partition('.')[0]}")


def _compile(nvrtc: ctypes.CDLL, source: bytes, options: Sequence[str]) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None), "NVRTC cannot create a program")
    try:
        error = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*[option.encode() for option in options]))
        if error:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise KvpackError(f"NVRTC cannot compile a kernel: {log.value.decode(errors='replace')}")
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "NVRTC has no machine code")
        binary = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, binary), "NVRTC has no machine code")
        return binary.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _check(error: int, what: str) -> None:
    if error:
        raise KvpackError(f"{what} (error {error}): set KVPACK_KERNELS=torch")
