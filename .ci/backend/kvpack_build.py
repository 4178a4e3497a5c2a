"""setuptools' build backend, extended to restore links and to make the C library optional.

The package includes formats/, kernels/ and the files that `kvpack view` serves through symbolic links in kvpack/. pip unpacks them from a
zip as text files that contain the links' targets. They are turned back into links before setuptools looks for packages.

The C library is optional. A wheel without it is tagged py3-none-any, so that pip's cache does not offer it instead of a compiled wheel.
Debug information, which is five sixths of the library's size, is omitted unless CFLAGS is set. On Linux, symbols are stripped unless
LDFLAGS is set. A compiled wheel is compressed at zlib's highest level. The C files are compiled in parallel.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from compress_wheel import compress_wheel
from setuptools import build_meta
from setuptools._distutils.ccompiler import CCompiler
from setuptools.build_meta import get_requires_for_build_editable, get_requires_for_build_sdist, get_requires_for_build_wheel

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_BUILD_WITHOUT_LIBRARY = """
import sys
from setuptools import Distribution, build_meta
Distribution.has_ext_modules = lambda _: False
print(build_meta.build_wheel(sys.argv[1]))
"""

LINKS = {
    "kvpack/formats": "../formats",
    "kvpack/javascript": "../spec/readers/javascript",
    "kvpack/kernels": "../kernels",
    "kvpack/viewer": "../spec/viewer",
}


_compile = CCompiler.compile


def _compile_at_once(self: CCompiler, sources: list[str], *args: Any, **options: Any) -> list[str]:
    """Compile the files in parallel threads. Raises the same errors as sequential compilation."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return [name for names in pool.map(lambda source: _compile(self, [source], *args, **options), sources) for name in names]


CCompiler.compile = _compile_at_once


def _restore_links() -> None:
    """Turn text files that contain the targets of links back into links. Raises RuntimeError if a folder is missing."""
    for name, target in LINKS.items():
        path = Path(name)
        if path.is_file() and path.read_text(encoding="utf-8").strip() == target:
            path.unlink()
            os.symlink(target, path)
        if not path.is_dir():
            expected = f"expected a symbolic link to {target}; clone the repository again, or install the sdist"
            raise RuntimeError(f"{name} is not a folder: {expected}")


def build_wheel(wheel_directory: str, *args: Any) -> str:
    _restore_links()
    os.environ.setdefault("CFLAGS", "-g0")
    if sys.platform == "linux":
        os.environ.setdefault("LDFLAGS", "-Wl,--strip-all")
    name = build_meta.build_wheel(wheel_directory, *args)
    path = Path(wheel_directory, name)
    with zipfile.ZipFile(path) as wheel:
        compiled = any(member.startswith("kvpack/kernels/cpu/_cpu.") for member in wheel.namelist())
    if compiled:
        compress_wheel(path)
        return name
    path.unlink()
    # setuptools can only build once per process.
    done = subprocess.run([sys.executable, "-c", _BUILD_WITHOUT_LIBRARY, wheel_directory], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()[-1]


def build_editable(*args: Any) -> str:
    _restore_links()
    return build_meta.build_editable(*args)


def build_sdist(*args: Any) -> str:
    _restore_links()
    return build_meta.build_sdist(*args)


def prepare_metadata_for_build_wheel(*args: Any) -> str:
    _restore_links()
    return build_meta.prepare_metadata_for_build_wheel(*args)


def prepare_metadata_for_build_editable(*args: Any) -> str:
    _restore_links()
    return build_meta.prepare_metadata_for_build_editable(*args)
