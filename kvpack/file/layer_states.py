"""The required feature ``layer-state``: states of recurrent and convolution layers (spec/container.md, Layer states)."""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpack.formats.errors import InvalidHeader, InvalidParameter, LimitExceeded
from kvpack.formats.streams import Layout

from .checks import Rule, check
from .limits import MAX_BATCH, MAX_BINARY_BYTES, MAX_TOKENS

FEATURE = "layer-state"
DTYPES = ("U8", "U16", "F16", "BF16", "F32")
"""Dtypes of states. A state's record stores an index into this tuple."""
MAX_SIZES = 8
MAX_NAME_BYTES = 28
_RECORD = struct.Struct(f"<HBB{MAX_SIZES}Q{MAX_NAME_BYTES}s")
_NAME = re.compile(r"[a-z][a-z0-9_.]*")
_PLACE = f"ignorable[{FEATURE!r}]"


class HasBatch(Protocol):
    """Anything that has a number of sequences, such as a layer's keys or values."""

    @property
    def batch(self) -> int: ...


class HasSides(Protocol):
    def sides(self) -> Iterator[tuple[str, HasBatch]]: ...


@dataclass(frozen=True)
class StateEntry:
    """The description of a layer's state. Its shape is ``[batch, ...]``, and its dtype is one of ``DTYPES``.

    Raises InvalidHeader or LimitExceeded.
    """

    layer: int
    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidHeader(
                f"{_PLACE}: layer {self.layer} has a state named {self.name!r:.80}, but state names may contain only a-z, 0-9, _ and . and "
                "must begin with a letter"
            )
        if not self.shape:
            raise InvalidHeader(f"{self.where} has no dimensions, expected 1 to {MAX_SIZES}")
        for number, size in enumerate(self.shape):
            check(f"{self.where}.shape[{number}]", size, Rule(int, MAX_TOKENS if number else MAX_BATCH, 1))

    @property
    def where(self) -> str:
        """The name of the state's tensor in a file."""
        return f"{self.layer}.state.{self.name}"

    @property
    def layout(self) -> Layout:
        return Layout(self.dtype, self.shape)


def list_features(states: Iterable[StateEntry]) -> tuple[tuple[str, ...], dict[str, bytes]]:
    """Return the ``required`` and ``ignorable`` features of a file with these states. Raises LimitExceeded if there are too many."""
    ordered = sorted(states, key=lambda state: (state.layer, state.name))
    if not ordered:
        return (), {}
    for state in ordered:
        if len(state.name) > MAX_NAME_BYTES or len(state.shape) > MAX_SIZES:
            raise LimitExceeded(
                f"the state {state.where} has a {len(state.name)}-byte name and {len(state.shape)} dimensions; "
                f"the limits are {MAX_NAME_BYTES} bytes and {MAX_SIZES} dimensions"
            )
    if len(ordered) * _RECORD.size > MAX_BINARY_BYTES:
        raise LimitExceeded(f"the layers have {len(ordered)} states, but a file can have at most {MAX_BINARY_BYTES // _RECORD.size}")
    return (FEATURE,), {FEATURE: b"".join(map(_pack, ordered))}


def parse_layer_states(data: bytes, layers: Sequence[HasSides]) -> tuple[StateEntry, ...]:
    """Parse the feature's data. Returns the states in file order. Raises InvalidHeader or LimitExceeded."""
    if not data or len(data) % _RECORD.size:
        raise InvalidHeader(f"{_PLACE} has {len(data)} bytes, expected a positive multiple of {_RECORD.size}")
    states = tuple(_parse(at // _RECORD.size, data[at : at + _RECORD.size]) for at in range(0, len(data), _RECORD.size))
    last = (-1, "")
    batches: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for state in states:
        if state.layer >= len(layers):
            raise InvalidHeader(f"{_PLACE} has a state for layer {state.layer}, but the file has {len(layers)} layers")
        if (state.layer, state.name) <= last:
            raise InvalidHeader(f"{_PLACE} has {state.where} after {last[0]}.state.{last[1]}, expected ascending layers and names")
        last = state.layer, state.name
        batch_by_name = batches[state.layer]
        batch_by_name |= {name: side.batch for name, side in layers[state.layer].sides()}
        batch_by_name[state.where] = state.shape[0]
        if len(set(batch_by_name.values())) > 1:
            batches_text = ", ".join(f"{batch} in {name}" for name, batch in batch_by_name.items())
            raise InvalidHeader(f"{_PLACE}: layer {state.layer} has different numbers of sequences: {batches_text}")
    return states


def _pack(state: StateEntry) -> bytes:
    sizes = (*state.shape, *[0] * (MAX_SIZES - len(state.shape)))
    return _RECORD.pack(state.layer, DTYPES.index(state.dtype), len(state.shape), *sizes, state.name.encode())


def _parse(record_index: int, record: bytes) -> StateEntry:
    layer, dtype, count, *sizes, name = _RECORD.unpack(record)
    if dtype >= len(DTYPES):
        raise InvalidHeader(f"{_PLACE}: record {record_index} has the dtype number {dtype}, expected 0 to {len(DTYPES) - 1}")
    state = StateEntry(layer, name.rstrip(b"\0").decode("latin-1"), DTYPES[dtype], tuple(sizes[:count]))
    if _pack(state) != record:
        raise InvalidHeader(
            f"{_PLACE}: record {record_index} has {count} dimensions of {sizes}, expected 1 to {MAX_SIZES} dimensions, then zeros"
        )
    return state


def check_state(where: str, dtype: str | None, shape: Sequence[int]) -> None:
    """Raise InvalidParameter unless a file can store a state of this shape and dtype.

    ``dtype`` is None if the format does not support it.
    """
    if dtype is None or not 1 <= len(shape) <= MAX_SIZES or not all(shape):
        kind = f"dtype {dtype}" if dtype else "an unsupported dtype"
        raise InvalidParameter(
            f"{where} has shape {list(shape)} and {kind}, expected [batch, ...] with at most {MAX_SIZES} nonzero dimensions and dtype "
            f"{' or '.join(DTYPES)}"
        )
