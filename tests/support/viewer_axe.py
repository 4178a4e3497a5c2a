"""Run axe-core on the viewer while it shows a file: ``python -m support.viewer_axe AXE.min.js``.

The page is checked at the width of a desktop and of a phone, in light and dark mode. The exit code is 1 if axe-core finds a violation.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from pathlib import Path

import kvpack
from kvpack.commands.view import Viewer
from support import chromium
from support.caches import random_pairs

FOUND = "axe.run().then((found) => JSON.stringify(found.violations.map((one) => [one.id, one.impact, one.nodes.map((node) => node.html)])))"


def main(axe: str) -> int:
    problems = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.kvpack")
        kvpack.save(kvpack.pack(random_pairs(2, 40), "octopus-4", inputs=kvpack.Inputs(bytes(160))), path)
        with Viewer(path) as viewer, chromium.page(Path(folder)) as page:
            threading.Thread(target=viewer.serve_forever, daemon=True).start()
            page.open(viewer.url)
            page.wait("document.getElementById('contents')?.hidden === false")
            page.evaluate("(show.click(), verify.click())")
            page.wait("!document.getElementById('values').hidden && document.getElementById('verify-status').className")
            page.evaluate(Path(axe).read_text(encoding="utf-8") + ";0")
            for width, height in ((1280, 900), (390, 844)):
                for scheme in ("light", "dark"):
                    page.size(width, height, phone=width < 500)
                    page.color_scheme(scheme)
                    violations = json.loads(page.evaluate(FOUND))
                    problems += len(violations)
                    print(f"{width} x {height}, {scheme}: {violations or 'no violation'}")
            viewer.shutdown()
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
