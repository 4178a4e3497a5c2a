"""Runs the kernels in CUDA C++ on tensors of the CPU.

A C++ compiler compiles them with ``cuda_host.h`` instead of NVRTC, to a library that also stands for the CUDA driver.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

    from kvpack.kernels.cuda.nvrtc import CudaLaunch

COMPILER = shutil.which("g++")

MAIN = """#include "cuda_host.h"
#include "{source}"
struct Config {{ unsigned grid[3], block[3], shared_bytes; void *stream, *attributes; unsigned attribute_count; }};
extern "C" int cuModuleLoadData(void**, const void*) {{ return 0; }}
extern "C" int cuModuleGetFunction(void**, void*, const char* name) {{ return strcmp(name, "{name}"); }}
extern "C" int cuFuncSetAttribute(void*, int, int) {{ return 0; }}
extern "C" int cuLaunchKernelEx(const Config* config, void*, void** parameters, void**) {{
  const Arguments& arguments = *(const Arguments*)parameters[0];
  for (unsigned block = 0; block < config->grid[0]; block++)
    run_block(block, config->block[0], config->shared_bytes, [&] {{ {name}(arguments); }});
  return 0;
}}
"""


def run_on_cpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let launches in CUDA C++ run on the CPU. ``folder`` is for compiled kernels."""
    from kvpack.kernels.cuda import attend_scalar, nvrtc

    libraries: list[Path] = []

    def compile_kernel(path: Path, constants: Mapping[str, int], capability: tuple[int, int]) -> bytes:
        name = folder / "-".join([path.stem, *map(str, constants.values())])
        if not name.exists():
            name.with_suffix(".cpp").write_text(MAIN.format(source=path, name=path.stem))
            options = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{Path(__file__).parent}"]
            options += [f"-D{key}={value}" for key, value in constants.items()]
            assert COMPILER is not None
            subprocess.run([COMPILER, *options, str(name.with_suffix(".cpp")), "-o", str(name)], check=True)
        libraries.append(name)
        return b""

    def load_driver() -> ctypes.CDLL:
        return ctypes.CDLL(str(libraries[-1]))

    monkeypatch.setattr(nvrtc, "compile_kernel", compile_kernel)
    monkeypatch.setattr(nvrtc, "_load_driver", load_driver)
    monkeypatch.setattr(nvrtc.CudaLaunch, "__call__", launch_on_cpu)
    monkeypatch.setattr(attend_scalar, "_can_run", lambda device: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def launch_on_cpu(self: CudaLaunch, *pointers: tuple[torch.Tensor, int]) -> None:
    self.launch_on(0, *[tensor.data_ptr() + skipped * tensor.element_size() for tensor, skipped in pointers])
