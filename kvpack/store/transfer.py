"""Exports a prefix as a single kvpack file, and imports it (spec/store.md, Exported prefixes)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvpack.file import container
from kvpack.file.inputs import IDS_FEATURE, Inputs, join_features, split_feature
from kvpack.file.user_files import read_json
from kvpack.formats.errors import InvalidHeader, InvalidParameter, MissingFile
from kvpack.identity.identity import Identity

from . import state_entries
from .chunk_sizes import stored_chunk_sizes
from .counters import Counters
from .encryption import Cipher, decrypt_entry
from .entries import check_entry, open_entry
from .keys import ID_BYTES, MAX_INPUT_BYTES, token_bytes
from .locations import open_for_identity

if TYPE_CHECKING:
    import os

    from kvpack.cache.cache import Cache
    from kvpack.coding.bases import Basis

    from .backend import Backend
    from .catalog import Prefix, StatesEntry
    from .options import StoreOptions

TOKEN_CHUNKS_FEATURE = "token-chunks"
"""Feature that replaces ``IDS_FEATURE`` if a chunk has a digest of other inputs in addition to its token ids."""
MAX_TOKENS_BYTES = 2**26
"""Maximum size of a JSON file of token ids, in bytes."""
_CHUNK_BYTES = 4
"""Size in bytes of the first field: the number of tokens per chunk, little-endian."""
CHUNK_SIZE_FEATURE = "chunk-tokens"
"""Feature of a file with ``IDS_FEATURE``: the number of tokens per chunk, in ``_CHUNK_BYTES`` bytes."""


@dataclass(frozen=True)
class ExportedPrefix:
    """An exported prefix with its identity, which includes the basis. ``inputs``, if set, contains a digest for every ``chunk`` tokens.

    ``chunk`` is None if the file does not contain the chunk size.
    """

    identity: Identity
    ids: list[int]
    cache: Cache
    inputs: list[bytes] | None = None
    chunk: int | None = None


def export_prefix(
    backend: Backend,
    prefix: Prefix,
    path: str | os.PathLike[str],
    cipher: Cipher | None = None,
    *,
    durable: bool = False,
    basis: Basis | None = None,
    states: StatesEntry | None = None,
) -> int:
    """Write a prefix with its token ids to ``path`` as one unencrypted kvpack file. Returns the file's size in bytes.

    For a model that keeps states, ``states`` is the entry of the states after the last chunk. The file refers to the ``basis`` that it
    needs, but does not contain it. Raises InvalidParameter if the beginning of the prefix is missing, WriteFailed, and the errors of
    reading entries.
    """
    from kvpack.cache import files
    from kvpack.cache.cache import concat
    from kvpack.cache.states import with_states

    if not prefix.is_complete:
        raise InvalidParameter(
            f"the prefix of {prefix.key.hex()} begins at token {prefix.entries[0].start}: earlier entries no longer exist, so export "
            "another prefix"
        )
    chunks = []
    for entry, data in zip(prefix.entries, backend.peek_many([entry.stored.key for entry in prefix.entries]), strict=True):
        key = entry.stored.key
        if data is None:
            raise MissingFile(f"entry {key.hex()} no longer exists")
        file = open_entry(decrypt_entry(key, data, cipher), key)
        # A listed entry may have been replaced in the meantime.
        if check_entry(file, entry.start, entry.model, entry.recipe) != entry.fields:
            raise InvalidHeader(f"{file.where} is not the entry that was listed")
        chunks.append(files.read(file, basis=basis))
    cache = concat(chunks)
    if states is not None:
        data = backend.peek(states.stored.key)
        if data is None:
            raise MissingFile(f"entry {states.stored.key.hex()} no longer exists")
        decrypted, last = decrypt_entry(states.stored.key, data, cipher), prefix.entries[-1]
        end_states = state_entries.read(decrypted, last.stored.key, last.start + last.tokens, last.model, last.recipe)
        if len(end_states) != len(cache):
            raise InvalidHeader(
                f"entry {states.stored.key.hex()} has the states of {len(end_states)} layers, but the prefix has {len(cache)}"
            )
        cache = replace(cache, layers=with_states(cache.layers, end_states))
    contents, arrays = files.header_and_arrays(cache)
    return container.write(path, replace(contents, ignorable={**contents.ignorable, **_features(prefix)}), arrays, durable=durable)


def _features(prefix: Prefix) -> dict[str, bytes]:
    chunk_fields = [entry.fields for entry in prefix.entries]
    size = (len(chunk_fields[0].ids) // ID_BYTES).to_bytes(_CHUNK_BYTES, "little")
    if any(chunk.inputs for chunk in chunk_fields):
        return split_feature(
            TOKEN_CHUNKS_FEATURE, size + b"".join(bytes([len(chunk.inputs)]) + chunk.inputs + chunk.ids for chunk in chunk_fields)
        )
    return {CHUNK_SIZE_FEATURE: size, **split_feature(IDS_FEATURE, b"".join(chunk.ids for chunk in chunk_fields))}


def read_exported(path: str | os.PathLike[str], tokens: str | None, tenant: str, source: str | None = None) -> ExportedPrefix:
    """Read the prefix in a kvpack file. For a file without token ids, ``tokens`` is the path of a JSON file that contains them.

    ``source`` is the path of the basis that the file needs, or of a folder that contains it. Raises InvalidParameter if there are no ids,
    MissingFile, MissingBasis, and the same errors as ``kvpack.load``.
    """
    from kvpack.cache import files
    from kvpack.coding.basis_sources import find_basis
    from kvpack.coding.recipes import Recipe, basis_digest

    # Truncating a mapped file would end the process, so the command reads a copy.
    file = container.open_file(path, copy=True)
    header = file.header
    identity = Identity.from_header(header.model, header.recipe, tenant)
    digest = basis_digest(Recipe.from_recorded(header.recipe))
    basis = find_basis(source, digest) if source is not None and digest is not None else None
    cache = files.read(file, basis=basis)
    identity = replace(identity, keeps_states=any(layer.states for layer in cache), basis=basis)
    if data := join_features(header.ignorable, TOKEN_CHUNKS_FEATURE):
        if tokens is not None:
            raise InvalidParameter(f"{file.where} contains its token ids and the digests of its other inputs: import it without --tokens")
        chunk, digests, ids = _parse_chunks(data, file.where)
        return ExportedPrefix(identity, _to_list(ids), cache, digests, chunk)
    inputs = Inputs.from_features(header.ignorable, tokens=header.tokens)
    data = (b"" if inputs is None else inputs.token_ids) if tokens is None else _read_ids(tokens)
    if not data:
        raise InvalidParameter(f"{file.where} contains no token ids: pass them as a JSON array with --tokens")
    if tokens is None and len(data) != cache.tokens * ID_BYTES:
        raise InvalidParameter(
            f"{file.where} has the ids of {len(data) // ID_BYTES:,} of its {cache.tokens:,} tokens: pass all of them as a JSON array "
            "with --tokens"
        )
    size = header.ignorable.get(CHUNK_SIZE_FEATURE, b"")
    return ExportedPrefix(
        identity, _to_list(data), cache, chunk=int.from_bytes(size, "little") or None if len(size) == _CHUNK_BYTES else None
    )


def stored_chunk_size(location: Any, exported: ExportedPrefix, options: StoreOptions) -> int | None:
    """Return the chunk size, in tokens, with which a prefix is stored at a location, or None if it is not stored there.

    Does not change the location. Raises the errors of opening it.
    """
    backend = open_for_identity(location, exported.identity, Counters(), options, skip_sweep=True).backend
    try:
        return next(iter(stored_chunk_sizes(backend, exported.identity.root, token_bytes(exported.ids))), None)
    finally:
        backend.close()


def _parse_chunks(data: bytes, where: str) -> tuple[int, list[bytes], bytes]:
    """Parse the feature ``TOKEN_CHUNKS_FEATURE``. Returns tokens per chunk, the digest of each chunk, and all token ids."""
    chunk = int.from_bytes(data[:_CHUNK_BYTES], "little")
    digests, ids, offset = [], [], _CHUNK_BYTES
    while offset < len(data):
        begin = offset + 1 + data[offset]
        digests.append(data[offset + 1 : begin])
        ids.append(data[begin : begin + chunk * ID_BYTES])
        offset = begin + chunk * ID_BYTES
    if not chunk or offset != len(data) or any(len(digest) > MAX_INPUT_BYTES for digest in digests):
        raise InvalidHeader(
            f"{where}: the {len(data)} bytes of the features {TOKEN_CHUNKS_FEATURE!r} are not whole chunks of {chunk} tokens"
        )
    return chunk, digests, b"".join(ids)


def _read_ids(tokens: str) -> bytes:
    ids = read_json(tokens, MAX_TOKENS_BYTES, "a JSON array of token ids")
    try:
        return token_bytes(ids)
    except InvalidParameter as error:
        raise InvalidParameter(f"{tokens} is not a JSON array of token ids: {error}") from None


def _to_list(data: bytes) -> list[int]:
    return memoryview(data).cast("I").tolist()
