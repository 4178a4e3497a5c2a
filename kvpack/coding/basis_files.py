"""Reading of basis files (spec/basis.md): all of their bytes, or their rows, frames and other states."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import Any

from kvpack.file import container
from kvpack.file.basis import FREQUENCIES, KEY_FRAMES, ROPE, VALUES
from kvpack.file.layer_states import StateEntry
from kvpack.file.user_files import DiskFile, Source, open_regular, path_text
from kvpack.formats.arguments import prefix_errors
from kvpack.formats.balanced_frames import BalancedFrames
from kvpack.formats.basis import BasisRows, row_count
from kvpack.formats.errors import InvalidHeader, InvalidParameter, LimitExceeded
from kvpack.formats.frames import Frames, Rope, SymbolTables
from kvpack.formats.lazy import numpy, torch

LONGEST_ROPE = "rope_same_up_to"
"""Metadata key of a sequence length in tokens. For all sequences up to this length, RoPE uses the frequencies stored in the basis."""

MAX_FILE_BYTES = 1 << 32
"""Maximum size of a basis file in bytes."""

SIDES = ("k", "v")

_MAX_DIGITS = 18
_PIECE_BYTES = 1 << 20


class BasisFile:
    """An open basis file. Its header was checked, but nothing else was read. ``where`` is its path."""

    def __init__(self, source: Source, where: str) -> None:
        self._source, self.where = source, where

    def read_all(self) -> bytearray:
        data = bytearray(self._source.size)
        self._read(0, memoryview(data))
        return data

    def digest(self) -> bytes:
        """Return the SHA-256 of the file. Raises Truncated or MissingFile."""
        hasher, piece = hashlib.sha256(), memoryview(bytearray(min(_PIECE_BYTES, self._source.size)))
        for begin in range(0, self._source.size, len(piece)):
            part = piece[: self._source.size - begin]
            self._read(begin, part)
            hasher.update(part)
        return hasher.digest()

    def _read(self, begin: int, memory: memoryview) -> None:
        with prefix_errors(self.where):
            self._source.read_into(begin, memory)


@contextlib.contextmanager
def open_basis(path: str | os.PathLike[str]) -> Iterator[BasisFile]:
    """Open a basis file, and check its header and size."""
    where = path_text(path)
    source = DiskFile(open_regular(where, "a basis"))
    try:
        if source.size > MAX_FILE_BYTES:
            raise LimitExceeded(f"{where} is {source.size:,} bytes, but the maximum for a basis is {MAX_FILE_BYTES:,}: pass a smaller one")
        check_is_basis(container.File(source, where, None))
        yield BasisFile(source, where)
    finally:
        source.close()


def check_is_basis(file: container.File) -> None:
    if not file.header.is_basis:
        raise InvalidParameter(f"{file.where} is a cache, but a basis is needed: make one with kvpack calibrate")


def read_frames(file: container.File) -> dict[tuple[int, str], Frames]:
    """Return the basis's frames by (layer, "k" or "v"). Empty if it has none."""
    states = {(state.layer, state.name): state for state in file.header.states}

    def array(layer: int, name: str) -> Any:
        state = states[layer, name]
        return state.layout.array(file.read_state(state))[0]

    if (0, FREQUENCIES) not in states:
        return {}
    tables = SymbolTables(array(0, FREQUENCIES), torch.from_numpy(array(0, VALUES).astype(numpy.float32)))
    longest = _read_rope_limit(file)
    result = {}
    for layer, name in states:
        side, _, kind = name.partition(".")
        if kind == "frames" and side in SIDES:
            rows = torch.from_numpy(array(layer, name).astype(numpy.float32))
            rotations = [(pairing, array(layer, state)) for state, pairing in ROPE.items() if side == "k" and (layer, state) in states]
            rope = next((Rope(tuple(map(float, frequencies)), pairing, longest) for pairing, frequencies in rotations), None)
            result[layer, side] = Frames(rows, array(layer, f"{side}.scales"), tables, rope)
    return result


def read_balanced_frames(file: container.File) -> dict[tuple[int, str], BalancedFrames]:
    """Return the balanced frames by (layer, "balanced" or "centered"). Empty if the basis has none."""
    named = {frame: states_named(file, name) for frame, name in KEY_FRAMES.items()}
    return {(state.layer, frame): BalancedFrames(array) for frame, entries in named.items() for state, array in entries}


def states_named(file: container.File, name: str) -> Iterator[tuple[StateEntry, torch.Tensor]]:
    """Yield the entry and the float32 values, without the batch axis, of each state called ``name``."""
    for state in file.header.states:
        if state.name == name:
            array = state.layout.array(file.read_state(state))[0]
            yield state, torch.from_numpy(array.astype(numpy.float32))


def _read_rope_limit(file: container.File) -> int | None:
    text = file.header.model.get(LONGEST_ROPE)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS and int(text)):
        expected = f"a positive number of tokens with at most {_MAX_DIGITS} digits"
        raise InvalidHeader(f"{file.where}: model.{LONGEST_ROPE} is {text!r:.100}, expected {expected}")
    return int(text)


def read_rows(file: container.File, layer: int, side: str) -> BasisRows:
    entry = dict(file.header.layers[layer].sides())[side]
    (layout,) = file.header.streams[entry].values()
    data = file.read_side(layer, side)["values"]
    dtype = torch.float16 if layout.dtype == "F16" else torch.float32
    return BasisRows(torch.frombuffer(data, dtype=dtype).view(layout.shape)[:, :, : row_count(layout.shape[3])])
