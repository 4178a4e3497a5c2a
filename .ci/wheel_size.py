"""Check that wheels without the demo's model are at most 2 MB large: ``python .ci/wheel_size.py WHEEL...``."""

from __future__ import annotations

import os
import sys
import zipfile

MODEL = "kvpack/demo/tinylm/model.safetensors"
LIMIT = 2_000_000


def size(path: str | os.PathLike[str]) -> int:
    """Return the number of bytes of the wheel ``path`` without its compressed demo model."""
    with zipfile.ZipFile(path) as wheel:
        return os.path.getsize(path) - wheel.getinfo(MODEL).compress_size


if __name__ == "__main__":
    sizes = {path: size(path) for path in sys.argv[1:]}
    for path, count in sizes.items():
        print(f"{path}: {count:,} bytes without the demo's model, of at most {LIMIT:,}")
    if not sizes or max(sizes.values()) > LIMIT:
        sys.exit("a wheel is too large" if sizes else "give the paths of wheels")
