"""Converts chunks of prefixes to and from the bytes of entries.

An entry is a kvpack file that identifies its chunk (spec/store.md, Entries).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import xxhash

from kvpack.file import container
from kvpack.file.front import LENGTH_BYTES, TENSOR_ALIGNMENT
from kvpack.file.header import DIGEST_BYTES, Contents
from kvpack.formats.errors import DigestMismatch, InvalidHeader, LimitExceeded, Truncated
from kvpack.runtime.threads import in_parallel

from .backend import MAX_ENTRY_BYTES, Data
from .keys import ID_BYTES, KEY_BYTES, MAX_INPUT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy

    from kvpack.cache.cache import Cache
    from kvpack.coding.bases import Basis

    from .entry_template import EntryTemplate

FEATURE = "prefix-store-2"
"""Name of the ignorable feature that contains a chunk's key and parent key, the digests of its payload and other inputs, and its token ids.
"""
_DIGEST_END = 2 * KEY_BYTES + DIGEST_BYTES

SideShapes = tuple[tuple[tuple[str, int, int, str | None], ...], ...]
"""The (name, heads, head dim, dtype) of the keys and the values of each layer. The dtype is None if the codec is lossy."""

_MEMORY_FACTOR, _MEMORY_ALLOWANCE = 4, 2**26
"""Memory limit for reading an entry: a multiple of its size, plus a number of bytes (see kvpack/file/footprint.py)."""

_THREADS = 4
_MAX_TEMPLATES = 32


@dataclass(frozen=True, slots=True)
class ChunkFields:
    """The fields of an entry's header that describe its chunk."""

    key: bytes
    parent: bytes
    payload: bytes
    inputs: bytes
    ids: bytes

    @classmethod
    def from_bytes(cls, feature: bytes, where: str) -> ChunkFields:
        """Parse the value of ``FEATURE`` in the header of the entry ``where``. Raises InvalidHeader if it is malformed."""
        ids = _DIGEST_END + 1 + (feature[_DIGEST_END] if len(feature) > _DIGEST_END else MAX_INPUT_BYTES)
        if not ids <= len(feature) or ids > _DIGEST_END + 1 + MAX_INPUT_BYTES or (len(feature) - ids) % ID_BYTES:
            raise InvalidHeader(f"{where}: the {len(feature)} bytes of feature {FEATURE!r} are not keys, digests and whole token ids")
        key, parent = feature[:KEY_BYTES], feature[KEY_BYTES : 2 * KEY_BYTES]
        return cls(key, parent, feature[2 * KEY_BYTES : _DIGEST_END], feature[_DIGEST_END + 1 : ids], feature[ids:])


def to_pieces(cache: Cache, key: bytes, parent: bytes, ids: bytes, inputs: bytes = b"") -> list[memoryview]:
    """Return a chunk's entry as consecutive byte buffers.

    Its header contains ``key``, ``parent``, the token ``ids``, and ``inputs``, a digest of the other inputs.
    """
    from kvpack.cache import files

    contents, arrays = files.header_and_arrays(cache)
    feature = key + parent + payload_digest(contents, arrays) + bytes([len(inputs)]) + inputs + ids
    contents = replace(contents, ignorable={**contents.ignorable, FEATURE: feature})
    return container.pieces(contents, arrays)


def payload_digest(contents: Contents, arrays: Mapping[str, numpy.ndarray]) -> bytes:
    """Return the digest of a file's payload, which starts with its first tensor."""
    payload = xxhash.xxh3_128()
    end = 0
    for name in contents.layouts:
        pad = -end % TENSOR_ALIGNMENT
        payload.update(bytes(pad))
        payload.update(arrays[name].data)
        end += pad + arrays[name].nbytes
    return payload.digest()


def file_payload_digest(file: container.File, view: memoryview) -> bytes:
    """Return the ``payload_digest`` of an open file with the bytes ``view``."""
    begin = min((place.begin for place in file.front.places.values()), default=len(file.front.tensor))
    return xxhash.xxh3_128_digest(view[len(file.front.text) + begin :])


@dataclass
class EntryReader:
    """Reads the entries of one identity. Their headers must contain ``model`` and ``recipe``.

    Rejects entries larger than ``max_bytes``, and entries with a layer whose values take more than that at 16 bits each. If ``shape``, the
    shape of the model's cache, is set, also rejects entries of other shapes.
    """

    model: Mapping[str, str]
    recipe: str
    chunk: int
    check_values: bool
    basis: Basis | None = None
    max_bytes: int = MAX_ENTRY_BYTES
    shape: SideShapes | None = None
    _templates: dict[tuple[int, int], EntryTemplate] = field(default_factory=dict)

    def read(self, entries: Sequence[Data], keys: Sequence[bytes], *, first: int = 0) -> Iterator[Cache]:
        """Check the entries of a chain in order, starting with chunk ``first``, and yield each chunk's cache.

        The caches are views of the entries' bytes. Raises the same errors as ``container.open_bytes``, and InvalidHeader if an entry is not
        the chunk with the key in ``keys``.
        """
        views = [memoryview(data) for data in entries]
        if len(views) < 2:
            yield from (self._read_one(view, key, index) for index, (view, key) in enumerate(zip(views, keys, strict=False), first))
            return
        # Hashing releases the GIL: the next entries are hashed while the tensors of this one are created.
        digests = in_parallel(lambda at: self._payload_digest(views[at], first + at), range(len(views)), _THREADS)
        with contextlib.closing(digests):
            for index, (view, key, digest) in enumerate(zip(views, keys, digests, strict=False), first):
                yield self._read_one(view, key, index, digest)

    def _payload_digest(self, view: memoryview, index: int) -> tuple[int, bytes] | None:
        """Return the offset and the digest of an entry's payload, or None if no template matches the entry's size and index.

        The offset comes from the template.
        """
        template = self._template(view, index)
        return None if template is None else (template.front.payload, xxhash.xxh3_128_digest(view[template.front.payload :]))

    def _template(self, view: memoryview, index: int) -> EntryTemplate | None:
        return self._templates.get((len(view), _start_bytes(index * self.chunk)))

    def _read_one(self, view: memoryview, key: bytes, index: int, payload_digest_at: tuple[int, bytes] | None = None) -> Cache:
        start = index * self.chunk
        where = f"entry {key.hex()}"
        template = None if self.check_values else self._template(view, index)
        feature = template.feature(view, start) if template is not None else None
        if template is None or feature is None:
            return self._parse(view, key, start, where)
        named = ChunkFields.from_bytes(feature, where)
        self._check_key(named, key, where)
        # An entry read since it was hashed may match another template of the same size.
        begin, digest = payload_digest_at or (None, b"")
        check_payload_digest(
            named.payload, digest if begin == template.front.payload else xxhash.xxh3_128_digest(view[template.front.payload :]), where
        )
        return template.cache(view, start)

    def _parse(self, view: memoryview, key: bytes, start: int, where: str) -> Cache:
        from kvpack.cache import files

        from .entry_template import EntryTemplate

        file = open_entry(view, key)
        named = check_entry(file, start, self.model, self.recipe, self.max_bytes)
        self._check_key(named, key, where)
        self.check_shape(file)
        if len(named.ids) != self.chunk * ID_BYTES:
            raise InvalidHeader(f"{where} is a chunk of {len(named.ids) // ID_BYTES} tokens, expected {self.chunk}")
        cache = files.read(file, check_values=self.check_values, basis=self.basis)
        check_payload_digest(named.payload, file_payload_digest(file, view), where)
        if file.header.states:
            raise InvalidHeader(f"{where} has the state {file.header.states[0].where}, expected no states in a chunk of a prefix")
        if any(layer.skipped for layer in cache if layer.sides):
            held = ["[{}:{}]".format(*cache.positions(index)) for index in range(len(cache))]
            raise InvalidHeader(f"{where}: its layers have the positions {held}, expected [{start}:{start + self.chunk}] in each")
        if not self.check_values and len(self._templates) < _MAX_TEMPLATES:
            template = EntryTemplate.from_file(file, FEATURE, cache)
            if template is not None:
                self._templates[len(view), _start_bytes(start)] = template
        return cache

    def require_shape_of(self, cache: Cache) -> bool:
        """From now on, reject entries with a different shape than ``cache``, which the model produced. Returns True if the shape is new."""
        shape = tuple(tuple((name, side.heads, side.dim, side.codec.exact_dtype) for name, side in layer.sides.items()) for layer in cache)
        if shape == self.shape:
            return False
        # Templates may be of entries that were read before.
        self.shape, self._templates = shape, {}
        return True

    def check_shape(self, file: container.File) -> None:
        """Raise InvalidHeader if an entry's layers, heads, head dims or exact dtypes differ from the model's.

        Accepts any shape as long as the model's is unknown.
        """
        if self.shape is None:
            return
        shape = side_shapes(file)
        if shape != self.shape:
            numbers = range(min(len(shape), len(self.shape)))
            at = next((index for index in numbers if shape[index] != self.shape[index]), len(numbers))
            descriptions = [
                f"{len(layers)} layers, layer {at}: {layers[at] if at < len(layers) else 'none'}" for layers in (shape, self.shape)
            ]
            raise InvalidHeader(
                f"{file.where} and the model's cache have different heads, head dims or dtypes: {descriptions[0]}, expected "
                f"{descriptions[1]}: use a separate identity for each model and dtype"
            )

    def _check_key(self, fields: ChunkFields, key: bytes, where: str) -> None:
        if fields.key != key:
            raise InvalidHeader(f"{where}: its header names the key {fields.key.hex()}, expected {key.hex()}")


def open_entry(data: Data, key: bytes) -> container.File:
    """Open the entry ``key`` as a file.

    Entries may be malicious: parsing an 8 MiB header can take 400 MB of memory. Raises LimitExceeded if reading the entry would take far
    more memory than its size, and the same errors as ``container.open_bytes``.
    """
    where = f"entry {key.hex()}"
    try:
        return container.open_bytes(data, where=where, memory_limit=_MEMORY_FACTOR * len(data) + _MEMORY_ALLOWANCE)
    except LimitExceeded as error:
        # An entry that exceeds a limit is normally kept, but no reader can use one that ends within its JSON header.
        end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
        if end <= len(data):
            raise
        raise Truncated(f"{where}: the entry has {len(data)} bytes, but its JSON header ends at byte {end}") from error


def side_shapes(file: container.File) -> SideShapes:
    """Return the heads, head dims and exact dtypes of each layer's keys and values."""
    codecs = [(codec.dim, codec.exact_dtype) for codec in file.header.codecs]
    return tuple(tuple((name, side.heads, *codecs[side.codec]) for name, side in layer.sides()) for layer in file.header.layers)


def check_entry(
    file: container.File,
    start: int | None,
    model: Mapping[str, str] | None,
    recipe: str | None,
    max_bytes: int = MAX_ENTRY_BYTES,
) -> ChunkFields:
    """Check the header of a chunk's entry, and return its fields. No tensors are read. Raises InvalidHeader or LimitExceeded."""
    header = file.header
    if FEATURE not in header.ignorable:
        raise InvalidHeader(f"{file.where} is not an entry of a store: its header has no feature {FEATURE!r}")
    check_header(file, start, model, recipe)
    named = ChunkFields.from_bytes(header.ignorable[FEATURE], file.where)
    _check_chunk(file, len(named.ids) // ID_BYTES, max_bytes)
    return named


def _check_chunk(file: container.File, tokens: int, max_bytes: int) -> None:
    """Raise InvalidHeader unless every layer has ``tokens`` tokens of one sequence, as in entries that stores write.

    Without this check, a small malicious entry could decode to any size. Raises LimitExceeded if a layer's values would take more than
    ``max_bytes`` at 16 bits each.
    """
    header = file.header
    for tensor in header.tensors:
        if tensor.filter != "none":
            raise InvalidHeader(f"{file.where}: the tensor {tensor.name} has the filter {tensor.filter}, expected none in an entry")
    for index, layer in enumerate(header.layers):
        values = 0
        for name, side in layer.sides():
            if (side.batch, sum(side.runs), side.tail) != (1, tokens, 0):
                raise InvalidHeader(
                    f"{file.where}: layers[{index}].{name} has {side.batch} sequences of {sum(side.runs)} packed and {side.tail} raw "
                    f"tokens, expected one sequence of {tokens} packed tokens"
                )
            values += side.heads * header.codecs[side.codec].dim * tokens
        if 2 * values > max_bytes:
            raise LimitExceeded(f"{file.where}: layer {index} decodes to {2 * values} bytes, but max_entry_bytes is {max_bytes}")


def check_header(file: container.File, start: int | None, model: Mapping[str, str] | None, recipe: str | None) -> None:
    """Raise InvalidHeader unless an entry has the given start, model and recipe. None means any value."""
    header = file.header
    for name, actual, expected in (
        ("start", header.start, start),
        ("model", dict(header.model), None if model is None else dict(model)),
        ("recipe", header.recipe, recipe),
    ):
        if expected is not None and actual != expected:
            raise InvalidHeader(f"{file.where}: the entry's {name} is {actual!r}, expected {expected!r}")


def check_decoded_size(cache: Cache, key: bytes, max_bytes: int) -> None:
    """Raise LimitExceeded if a layer of a chunk is too large for readers with the same limit."""
    for index, layer in enumerate(cache):
        size = 2 * cache.tokens * sum(side.heads * side.dim for side in layer.sides.values())
        if size > max_bytes:
            raise LimitExceeded(f"chunk {key.hex()}: layer {index} decodes to {size} bytes, but max_entry_bytes is {max_bytes}")


def check_payload_digest(expected: bytes, actual: bytes, where: str) -> None:
    """Raise DigestMismatch unless the digest in an entry's header, ``expected``, equals ``actual``, computed from its payload."""
    if expected != actual:
        raise DigestMismatch(f"{where} is damaged: its payload has the digest {actual.hex()}, expected {expected.hex()}")


def _start_bytes(start: int) -> int:
    """Return the number of bytes that msgpack needs for a start position."""
    return next(size for size, limit in ((1, 1 << 7), (2, 1 << 8), (3, 1 << 16), (5, 1 << 32), (9, 1 << 64)) if start < limit)
