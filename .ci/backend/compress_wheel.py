"""Recompress wheels at zlib's highest level, without entries for folders: ``python .ci/backend/compress_wheel.py WHEEL...``."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path


def compress_wheel(path: Path) -> None:
    """Recompress the members of the wheel ``path``. Entries for folders, which auditwheel adds, are not needed."""
    with zipfile.ZipFile(path) as wheel:
        members = [(member, wheel.read(member)) for member in wheel.infolist() if not member.is_dir()]
    with zipfile.ZipFile(path, "w") as wheel:
        for member, data in members:
            wheel.writestr(member, data, compresslevel=9)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        compress_wheel(Path(name))
