"""``python spec/decoder FILE``: print the layers, codecs, shapes and first values of a file."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> int:
    """Describe the file named by ``arguments``. Returns the exit code."""
    from . import Refused, read

    if len(arguments) != 1:
        print("usage: python spec/decoder FILE", file=sys.stderr)
        return 2
    try:
        file = read(Path(arguments[0]).read_bytes())
    except (OSError, Refused) as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 1
    print(f"{len(file.layers)} layers from position {file.start}, recipe {file.recipe!r}, model {file.model}")
    for number, layer in enumerate(file.layers):
        for name, side in layer.items():
            if side is None:
                print(f"{number}.{name}  absent")
            else:
                first = " ".join(f"{value:.9g}" for value in side.values[:6])
                place = f"from position {file.starts[number]}  " if file.starts[number] != file.start else ""
                print(f"{number}.{name}  {side.codec.id}  {'x'.join(map(str, side.shape))}  {place}{first}")
    for name, content in file.states.items():
        print(f"{name}  {len(content)} bytes")
    return 0


if __package__:
    sys.exit(main(sys.argv[1:]))
else:
    # Python was given the folder instead of the package, so make its modules importable.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    runpy.run_module("decoder", alter_sys=True)
