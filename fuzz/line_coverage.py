"""Measurement of the library lines that inputs cover, and selection of the inputs that add coverage."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import kvpack
from kvpack import formats

FOLDERS = {"formats": Path(formats.__file__).parent, "kvpack": Path(kvpack.__file__).parent}
READERS = (
    "checks",
    "container",
    "header",
    "front",
    "hidden_tokens",
    "layer_positions",
    "layer_states",
    "limits",
    "payload",
    "position_offsets",
    "zstd",
)
"""Modules of kvpack/file/ that read files."""

Arc = tuple[str, int, int]


class Tracer:
    """Records every transition between lines of the library while a function runs."""

    def __init__(self) -> None:
        self.sources = {
            str(path): f"{name}/{path.relative_to(folder).as_posix()}" for name, folder in FOLDERS.items() for path in folder.rglob("*.py")
        }
        self._arcs: set[Arc] = set()

    def arcs(self, run: Callable[[], object]) -> set[Arc]:
        """Return the line transitions of ``run``. Exceptions are ignored, because failures are counted elsewhere."""
        self._arcs = set()
        sys.settrace(self._on_call)
        try:
            run()
        except Exception:
            pass
        finally:
            sys.settrace(None)
        return self._arcs

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = self.sources.get(frame.f_code.co_filename)
        if name is None:
            return None
        last = 0

        def stepped(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "line":
                self._arcs.add((name, last, frame.f_lineno))
                last = frame.f_lineno
            return stepped

        return stepped


def covered_lines(run: Callable[[bytes], object], inputs: Iterable[bytes], seconds: float) -> dict[str, list[int]]:
    """Return, by file, the lines that ``run`` executes on as many of ``inputs`` as it can process in ``seconds`` seconds."""
    tracer, end = Tracer(), time.perf_counter() + seconds
    lines: dict[str, set[int]] = {}
    for data in inputs:
        for name, _, line in tracer.arcs(lambda data=data: run(data)):  # type: ignore[misc]
            lines.setdefault(name, set()).add(line)
        if time.perf_counter() > end:
            break
    return {name: sorted(found) for name, found in sorted(lines.items())}


def minimize(run: Callable[[bytes], object], inputs: Iterable[bytes], known: Iterable[bytes]) -> list[bytes]:
    """Return the smallest of ``inputs`` that together cover every line transition that ``inputs`` cover and ``known`` lacks."""
    tracer = Tracer()
    steps: set[Arc] = set()
    for data in known:
        steps |= tracer.arcs(lambda data=data: run(data))  # type: ignore[misc]
    kept = []
    for data in sorted(inputs, key=lambda data: (len(data), data)):
        input_arcs = tracer.arcs(lambda data=data: run(data))  # type: ignore[misc]
        if not input_arcs <= steps:
            steps |= input_arcs
            kept.append(data)
    return kept


def runnable_lines() -> dict[str, set[int]]:
    """Return the lines inside functions of formats/ and of the readers, by file. Other lines run at import."""
    result: dict[str, set[int]] = {}
    readers = {f"kvpack/file/{name}.py" for name in READERS}
    for path, name in Tracer().sources.items():
        if not (name.startswith("formats/") or name in readers):
            continue
        module = compile(Path(path).read_text(encoding="utf-8"), path, "exec", dont_inherit=True)
        result[name] = {line for code in _function_codes(module) for _, _, line in code.co_lines() if line and line > code.co_firstlineno}
    return result


def _function_codes(code: CodeType) -> Iterable[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            # Only functions have fast locals; a class body runs once, at definition.
            if constant.co_flags & 0x2:
                yield constant
            yield from _function_codes(constant)
