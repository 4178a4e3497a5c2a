"""Converts the states after a chunk to and from the bytes of an entry, a kvpack file without tokens (spec/store.md, States)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvpack.file import container
from kvpack.file.header import DIGEST_BYTES
from kvpack.formats.errors import InvalidHeader
from kvpack.identity.identity import states_key

from .entries import check_header, check_payload_digest, file_payload_digest, open_entry, payload_digest
from .keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpack.cache.states import States

    from .backend import Data

FEATURE = "prefix-states"
"""The ignorable feature of an entry with states: the entry's key, the key of the preceding chunk, and the digest of its payload."""


@dataclass(frozen=True)
class StateFields:
    """The fields of an entry's header that describe its states."""

    key: bytes
    chunk_key: bytes
    payload: bytes

    @classmethod
    def from_file(cls, file: container.File) -> StateFields:
        """Parse the header of an entry with states.

        Raises InvalidHeader if the entry has keys or values, does not have the states of exactly one sequence, or is stored under the wrong
        key.
        """
        header, where = file.header, file.where
        feature = header.ignorable.get(FEATURE, b"")
        if len(feature) != 2 * KEY_BYTES + DIGEST_BYTES:
            raise InvalidHeader(f"{where}: the feature {FEATURE!r} has {len(feature)} bytes, expected {2 * KEY_BYTES + DIGEST_BYTES}")
        named = cls(feature[:KEY_BYTES], feature[KEY_BYTES : 2 * KEY_BYTES], feature[2 * KEY_BYTES :])
        if named.key != (key := states_key(named.chunk_key)):
            raise InvalidHeader(f"{where}: its header names the key {named.key.hex()}, expected {key.hex()} for states after its chunk")
        if not header.states or any(True for layer in header.layers for _ in layer.sides()):
            raise InvalidHeader(f"{where} is not an entry of states: it has no states, or it has keys and values")
        for state in header.states:
            if state.shape[0] != 1:
                raise InvalidHeader(f"{where}: {state.where} has {state.shape[0]} sequences, expected one")
        for tensor in header.tensors:
            if tensor.filter != "none":
                raise InvalidHeader(f"{where}: the tensor {tensor.name} has the filter {tensor.filter}, expected none in an entry")
        return named


def is_states(file: container.File) -> bool:
    """Return True if an open entry contains states, according to its header."""
    return FEATURE in file.header.ignorable


def to_pieces(states: States, chunk_key: bytes, position: int, model: Mapping[str, str], recipe: str) -> list[memoryview]:
    """Return the entry with the states after a chunk as consecutive byte buffers.

    ``position`` is the end of the chunk.
    """
    from kvpack.cache import files
    from kvpack.cache.cache import Cache
    from kvpack.cache.layer import Layer

    on_cpu = ({name: state.cpu().contiguous() for name, state in layer.items()} for layer in states)
    layers = tuple(Layer(None, None, states=MappingProxyType(layer)) for layer in on_cpu)
    contents, arrays = files.header_and_arrays(Cache(layers, recipe, model, position))
    feature = states_key(chunk_key) + chunk_key + payload_digest(contents, arrays)
    return container.pieces(replace(contents, ignorable={**contents.ignorable, FEATURE: feature}), arrays)


def read(data: Data, chunk_key: bytes, position: int, model: Mapping[str, str], recipe: str) -> States:
    """Check the entry ``data`` and return its states, as views of it.

    Raises InvalidHeader if these are not the states after the chunk ``chunk_key``. Also raises the errors of ``container.open_bytes``.
    """
    from kvpack.cache import files
    from kvpack.cache.states import collect_states

    file = open_entry(data, states_key(chunk_key))
    check_header(file, position, model, recipe)
    named = StateFields.from_file(file)
    if named.chunk_key != chunk_key:
        raise InvalidHeader(f"{file.where} has the states after the chunk {named.chunk_key.hex()}, expected those after {chunk_key.hex()}")
    check_payload_digest(named.payload, file_payload_digest(file, memoryview(data)), file.where)
    return collect_states(files.read(file))
