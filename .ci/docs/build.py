"""Build the guides, the reference and the specification as HTML: ``python .ci/docs/build.py build/docs``.

Pages are copied to one folder first, each to the place that it has in the repository, so that links between them hold.
Every warning is an error: a link that leads nowhere, a name that is not documented, a docstring that is no reStructuredText.
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
"""Folders of pages, and what these link to."""
PAGES = ("CHANGELOG.md", "README.md")
"""Pages at the top of the repository: the index shows parts of the README."""


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
