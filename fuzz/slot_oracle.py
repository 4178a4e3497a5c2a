"""Checks of ``kvpack import`` on sequence states of llama.cpp. Imports torch."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

from fuzz.byte_mutator import mutate_bytes
from fuzz.value_oracles import assert_equal
from kvpack.formats.errors import KvpackError
from kvpack.integrations.llama_cpp import export_slot, import_slot
from kvpack.integrations.llama_cpp.state_file import Reader, parse

if TYPE_CHECKING:
    import random

SEEDS = tuple(
    path.read_bytes() for path in sorted((Path(__file__).resolve().parents[1] / "tests" / "integrations" / "llama_cpp").glob("*.bin"))
)
"""Files of llama.cpp, including some that kvpack refuses."""
_WORDS = tuple(struct.pack("<I", word) for word in (0, 1, 2, 3, 8, 30, 256, 4096, 2**16, 2**31 - 1, 2**31, 2**32 - 1))


def mutate_slot(data: bytes, source: random.Random, max_bytes: int) -> bytes:
    """Return ``data`` after one or two edits of a word (most often a count, type or size) or of any byte."""
    for _ in range(source.randrange(1, 3)):
        if source.random() < 0.2 or len(data) < 8:
            data = mutate_bytes(data, source, max_bytes)
            continue
        at = source.randrange(0, len(data) - 3, 4)
        if source.random() < 0.7:
            # Any values of keys are valid, so mutate the bytes before them.
            at = min(at % 160, len(data) - 4) // 4 * 4
        word = source.choice(_WORDS) if source.random() < 0.7 else data[(other := source.randrange(0, len(data) - 3, 4)) : other + 4]
        data = data[:at] + word + data[at + 4 :]
    return data[:max_bytes]


class SlotOracle:
    """Oracle that reads files with and without sliding windows, and writes the accepted ones again."""

    def __init__(self, folder: Path) -> None:
        self._file, self._out = folder / "slot", folder / "again"

    def check(self, data: bytes) -> bool:
        """Return True if the file is accepted.

        Fails unless the file can be written with the same layers, and reads back as the same cache.
        """
        self._file.write_bytes(data)
        return any([self._accepts(None, False, data), self._accepts({0: 4, 2: 4}, False, data), self._accepts(None, True, data)])

    def _accepts(self, windows: dict[int, int] | None, latents: bool, data: bytes) -> bool:
        try:
            cache = import_slot(self._file, kv_heads=1, windows=windows, latents=latents)
        except KvpackError:
            return False
        refusal, size = "", 0
        try:
            size = export_slot(cache, self._out, windows=windows)
        except KvpackError as error:
            refusal = str(error)
        assert not refusal or "sequence" in refusal, f"an imported cache cannot be exported: {refusal}"
        if refusal:
            # No llama.cpp context has a sequence with this number.
            return True
        assert size == len(data)
        again = self._out.read_bytes()
        with Reader(str(self._file)) as reader:
            in_order = all(
                (section.positions[1:] >= section.positions[:-1]).all()
                for section in parse(reader, 1 + bool(windows), latents=latents).sections
            )
        assert again == data or not in_order or cache.metadata["llama.cpp streams"] != 1, "an ordered file is written back differently"
        imported = import_slot(self._out, kv_heads=1, windows=windows, latents=latents)
        assert (imported.metadata, imported.inputs) == (cache.metadata, cache.inputs)
        assert [layer.skipped for layer in imported] == [layer.skipped for layer in cache]
        assert_equal(imported, cache, cache.tokens)
        return True
