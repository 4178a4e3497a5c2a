"""Count lines of code, and the functions that single calls run: ``python -m support.code_size`` or ``make code-size``.

Blank lines, comments and docstrings do not count. Each call is traced by ``sys.setprofile`` on its second run, after imports and setup. The
program counts the distinct kvpack functions that the call enters, the files that define them, all calls of such functions, and the maximum
depth. ``--root DIR`` measures another checkout, whose C library must be built, and ``--check`` fails if a figure is above its limit.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tempfile
import tokenize
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kvpack", "formats", "kernels")

BASELINE_LINES = 48_185
"""Number of lines in FOLDERS at commit 9e2580e, before duplicate code was merged."""
MAX_LINES = BASELINE_LINES * 85 // 100


class Calls(NamedTuple):
    """The kvpack functions that a call enters, the files that define them, the total number of calls, and the maximum depth."""

    functions: int
    files: int
    calls: int
    depth: int


LIMITS: dict[str, dict[str, int]] = {
    "pack": {"functions": 65, "files": 16},
    "load": {"functions": 90, "files": 18},
    "attend": {"functions": 28, "files": 12},
    "decode step": {"calls": 450},
}

_C_TOKENS = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'""", re.DOTALL)


def python_lines(source: str) -> int:
    """Count the lines of a Python source that contain code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            lines |= set(range(token.start[0], token.end[0] + 1))
    # A string statement is documentation: of a module, a class, a function or a constant.
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def c_lines(source: str) -> int:
    """Count the lines of a C source that contain code."""
    without = _C_TOKENS.sub(lambda match: "\n" * match[0].count("\n") if match[0].startswith("/") else "x", source)
    return sum(1 for line in without.splitlines() if line.strip())


def folder_lines(folder: Path) -> dict[str, int]:
    """Count the lines of code of each folder and file directly below a folder, without following links."""
    counts: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        count = {".py": python_lines, ".c": c_lines, ".h": c_lines}.get(path.suffix)
        if count and path.is_file():
            name = path.relative_to(folder).parts[0]
            counts[name] = counts.get(name, 0) + count(path.read_text(encoding="utf-8"))
    return counts


def trace(call: Callable[[], object], root: Path) -> Calls:
    """Count the Python functions below ``root`` that a call enters."""
    entered: dict[tuple[str, int, str], int] = {}
    inside: list[FrameType] = []
    depth = 0
    folders = tuple(f"{root / name}/" for name in FOLDERS)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal depth
        code = frame.f_code
        if not code.co_filename.startswith(folders):
            return
        if event == "call":
            key = (code.co_filename, code.co_firstlineno, code.co_name)
            entered[key] = entered.get(key, 0) + 1
            inside.append(frame)
            depth = max(depth, len(inside))
        elif event == "return" and inside and inside[-1] is frame:
            inside.pop()

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    files = {Path(name).resolve() for name, _, _ in entered}
    return Calls(len(entered), len(files), sum(entered.values()), depth)


def operations(folder: Path) -> dict[str, Callable[[], object]]:
    """Return the operations to trace on the CPU, by name: calls for one octopus-4 layer, and a decode step over four layers."""
    import torch

    import kvpack
    from kvpack.integrations.transformers import KvpackCache
    from support.small_models import small_llama

    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    pair = (tensor(1, 2, 512, 64), tensor(1, 2, 512, 64))
    cache = kvpack.pack([pair], "octopus-4")
    path = folder / "cache.kvpack"
    kvpack.save(cache, path)
    layer = kvpack.load(path)[0]
    query = tensor(1, 8, 1, 64)
    model = small_llama(num_hidden_layers=4)
    past = KvpackCache(model, "octopus-4")
    with torch.inference_mode():
        model(torch.arange(300)[None] % 50, past_key_values=past)

    def step() -> None:
        with torch.inference_mode():
            model(torch.tensor([[1]]), past_key_values=past)

    return {
        "pack": lambda: kvpack.pack([pair], "octopus-4"),
        "save": lambda: kvpack.save(cache, path),
        "load": lambda: kvpack.load(path),
        "attend": lambda: kvpack.attend(query, layer),
        "decode step": step,
    }


def trace_operations(root: Path) -> dict[str, Calls]:
    """Return what each operation calls on its second run."""
    with tempfile.TemporaryDirectory() as folder:
        result = {}
        for name, call in operations(Path(folder)).items():
            call()
            result[name] = trace(call, root)
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to measure (default: this one)")
    parser.add_argument("--check", action="store_true", help="fail if any figure exceeds its limit")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    sys.path.insert(0, str(root))

    above = []
    total = 0
    for folder in FOLDERS:
        parts = folder_lines(root / folder)
        total += sum(parts.values())
        largest = sorted(parts.items(), key=lambda item: -item[1])[:8]
        print(f"{folder:12}{sum(parts.values()):7,}  " + ", ".join(f"{name} {count:,}" for name, count in largest))
    print(f"{'together':12}{total:7,}  limit {MAX_LINES:,}")
    above += ["lines"] if total > MAX_LINES else []
    print(f"\n{'':12}{'functions':>14}{'files':>14}{'calls':>14}{'depth':>14}")
    for name, calls in trace_operations(root).items():
        limits = LIMITS.get(name, {})
        cells = [f"{value}" + (f" / {limits[field]}" if field in limits else "") for field, value in calls._asdict().items()]
        print(f"{name:12}" + "".join(f"{cell:>14}" for cell in cells))
        above += [f"{field} of {name}" for field, limit in limits.items() if getattr(calls, field) > limit]
    print(f"\nabove the limit: {', '.join(above) or 'nothing'}")
    return 1 if above and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
