"""Build the guides, the reference and the specification as HTML: ``python .ci/docs/build.py build/docs``.

Pages are first copied to a temporary folder with the same layout as the repository, so that links between them work. Every warning is an
error, for example about a broken link, an undocumented name or a docstring with invalid reStructuredText.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from sphinx.cmd.build import main

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LINKED = ("formats", "kernels", "kvpack", "spec")
"""Folders with pages, and with files that pages link to."""
PAGES = ("CHANGELOG.md", "README.md")
"""Pages in the root of the repository. The index includes parts of the README."""


def build(out: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(HERE, folder, dirs_exist_ok=True)
        for name in LINKED:
            shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        for page in PAGES:
            shutil.copy(ROOT / page, folder)
        return main(["-q", "-W", "--keep-going", "-E", "-b", "html", folder, out])


if __name__ == "__main__":
    sys.exit(build(sys.argv[1]))
