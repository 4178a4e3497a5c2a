"""Write the committed corpus: the smallest inputs from fuzzing runs that reach code that seeds do not reach.

    python -m fuzz.run --seconds 600 --found fuzz-found
    python -m fuzz.corpus --found fuzz-found

Committed inputs are kept as long as they reach additional code. The name of an input is the digest of its bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import zipfile
from pathlib import Path

from fuzz.line_coverage import minimize
from fuzz.seeds import committed_inputs, corpus_path
from fuzz.targets import TARGETS

MAX_BYTES = 60_000
"""Maximum size in bytes of a target's archive. All archives together stay below a megabyte."""
_DATE = (2026, 1, 1, 0, 0, 0)


def write(name: str, inputs: list[bytes]) -> int:
    """Write the archive of a target. Returns the number of inputs in it."""
    target = TARGETS[name]()
    known = set(target.seeds)
    kept = minimize(target.check, [data for data in inputs if data not in known and len(data) <= target.max_bytes], target.seeds)
    corpus_path(name).parent.mkdir(exist_ok=True)
    count = len(kept)
    while _build_archive(name, kept[:count]) > MAX_BYTES:
        count = count * 3 // 4
    return count


def _build_archive(name: str, inputs: list[bytes]) -> int:
    with zipfile.ZipFile(corpus_path(name), "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for data in inputs:
            archive.writestr(zipfile.ZipInfo(hashlib.sha256(data).hexdigest()[:16], _DATE), data, zipfile.ZIP_DEFLATED, 9)
    return corpus_path(name).stat().st_size


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--found", type=Path, required=True, help="folder that a fuzzing run wrote with --found")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="write only this target; may be repeated")
    arguments = parser.parse_args()
    for name in arguments.target or TARGETS:
        folder = arguments.found / name
        loaded_inputs = [path.read_bytes() for path in sorted(folder.glob("*")) if path.is_file()] if folder.is_dir() else []
        written = write(name, [*committed_inputs(name), *loaded_inputs])
        print(f"{name}: {written} of the {len(loaded_inputs)} inputs found were kept, {corpus_path(name).stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
