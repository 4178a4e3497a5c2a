"""Read basis files, whole or piece by piece, with the rows, frames and other states in them (spec/basis.md)."""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import TYPE_CHECKING, Any

from kvpack.file import container
from kvpack.file.basis import FREQUENCIES, KEY_FRAMES, ROPE, VALUES
from kvpack.file.user_files import OnDisk, open_regular, path_text
from kvpack.formats.balanced_frames import BalancedFrames
from kvpack.formats.basis import BasisRows, rows_of
from kvpack.formats.errors import InvalidHeader, InvalidParameter, KvpackError, LimitExceeded
from kvpack.formats.frames import Frames, Rope, Tables
from kvpack.formats.lazy import numpy, torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpack.file.layer_states import StateEntry
    from kvpack.file.user_files import Source

LONGEST = "rope_same_up_to"
"""Metadata name of the longest sequence, in tokens, for which RoPE uses the frequencies of the basis."""

MAX_FILE_BYTES = 1 << 32
"""Maximum number of bytes of a basis file."""

SIDES = ("k", "v")

_MAX_DIGITS = 18
_PIECE_BYTES = 1 << 20


class BasisFile:
    """An open basis file at ``where``; only its header has been read."""

    def __init__(self, source: Source, where: str) -> None:
        self._source, self.where = source, where

    def whole(self) -> bytearray:
        """Return all bytes. Raises Truncated and MissingFile."""
        data = bytearray(self._source.size)
        self._read(0, memoryview(data))
        return data

    def digest(self) -> bytes:
        """Return the SHA-256 of all bytes, reading them piece by piece. Raises Truncated and MissingFile."""
        hasher, piece = hashlib.sha256(), memoryview(bytearray(min(_PIECE_BYTES, self._source.size)))
        for begin in range(0, self._source.size, len(piece)):
            part = piece[: self._source.size - begin]
            self._read(begin, part)
            hasher.update(part)
        return hasher.digest()

    def _read(self, begin: int, memory: memoryview) -> None:
        try:
            self._source.read_into(begin, memory)
        except KvpackError as error:
            raise type(error)(f"{self.where}: {error}") from None


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BasisFile]:
    """Open the basis file ``path`` after checking its size and header, so that other kinds of files are refused at once."""
    where = path_text(path)
    source = OnDisk(open_regular(where, "a basis"))
    try:
        if source.size > MAX_FILE_BYTES:
            raise LimitExceeded(f"{where}: has more than {MAX_FILE_BYTES} bytes, the limit for a basis")
        check_is_basis(container.File(source, where, None))
        yield BasisFile(source, where)
    finally:
        source.close()


def check_is_basis(file: container.File) -> None:
    if not file.header.is_basis:
        raise InvalidParameter(f"{file.where}: is a cache, not a basis: make a basis with kvpack calibrate")


def frames_of(file: container.File) -> dict[tuple[int, str], Frames]:
    """Return the frames of all layers and sides, if the basis has any."""
    places = {(state.layer, state.name): state for state in file.header.states}

    def array(layer: int, name: str) -> Any:
        state = places[layer, name]
        return state.layout.array(file.read_state(state))[0]

    if (0, FREQUENCIES) not in places:
        return {}
    tables = Tables(array(0, FREQUENCIES), torch.from_numpy(array(0, VALUES).astype(numpy.float32)))
    longest = _longest(file)
    result = {}
    for layer, name in places:
        side, _, kind = name.partition(".")
        if kind == "frames" and side in SIDES:
            rows = torch.from_numpy(array(layer, name).astype(numpy.float32))
            turned = [(pairing, array(layer, state)) for state, pairing in ROPE.items() if side == "k" and (layer, state) in places]
            rope = next((Rope(tuple(map(float, frequencies)), pairing, longest) for pairing, frequencies in turned), None)
            result[layer, side] = Frames(rows, array(layer, f"{side}.scales"), tables, rope)
    return result


def balanced_of(file: container.File) -> dict[tuple[int, str], BalancedFrames]:
    """Return the balanced and centered frames of the keys of all layers that have them."""
    named = {frame: states_named(file, name) for frame, name in KEY_FRAMES.items()}
    return {(state.layer, frame): BalancedFrames(array) for frame, entries in named.items() for state, array in entries}


def states_named(file: container.File, name: str) -> Iterator[tuple[StateEntry, torch.Tensor]]:
    """Yield the states ``name`` of all layers with their values, float32 without the axis of sequences."""
    for state in file.header.states:
        if state.name == name:
            array = state.layout.array(file.read_state(state))[0]
            yield state, torch.from_numpy(array.astype(numpy.float32))


def _longest(file: container.File) -> int | None:
    text = file.header.model.get(LONGEST)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS and int(text)):
        raise InvalidHeader(f"{file.where}: model.{LONGEST} is {text!r:.100}, expected a number of tokens of at most {_MAX_DIGITS} digits")
    return int(text)


def rows_of_side(file: container.File, layer: int, side: str) -> BasisRows:
    entry = dict(file.header.layers[layer].sides())[side]
    (layout,) = file.header.streams[entry].values()
    data = file.read_side(layer, side)["values"]
    dtype = torch.float16 if layout.dtype == "F16" else torch.float32
    return BasisRows(torch.frombuffer(data, dtype=dtype).view(layout.shape)[:, :, : rows_of(layout.shape[3])])
