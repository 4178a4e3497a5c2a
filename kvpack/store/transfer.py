"""One prefix as a single kvpack file, out of a store and into one (spec/store.md, Exported prefixes)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvpack.formats.errors import InvalidParameter, MissingFile

from .. import container
from ..limits import MAX_BINARY_BYTES
from ..user_files import read_json
from .encryption import in_clear
from .identity import Identity
from .keys import ID_BYTES, token_bytes

if TYPE_CHECKING:
    import os

    from ..cache import Cache
    from .backend import Backend
    from .catalog import Prefix
    from .encryption import Cipher

FEATURE = "token-ids"
"""Begins the names of the ignorable features that hold an exported prefix's token ids: token-ids.0, token-ids.1 and so on."""

MAX_TOKENS_BYTES = 2**26
"""Bytes of a JSON file of token ids."""


def export_prefix(
    backend: Backend, prefix: Prefix, path: str | os.PathLike[str], cipher: Cipher | None = None, *, durable: bool = False
) -> int:
    """Write a prefix to ``path`` as one kvpack file with its token ids, in the clear, and return the file's bytes.

    Raises InvalidParameter for a prefix whose beginning is missing, WriteFailed, and what reading its entries raises.
    """
    from .. import files
    from ..cache import concat

    if not prefix.whole:
        raise InvalidParameter(f"the prefix of {prefix.key.hex()} begins at token {prefix.entries[0].start}: what is before it is gone")
    chunks = []
    for entry in prefix.entries:
        data = backend.peek(entry.stored.key)
        if data is None:
            raise MissingFile(f"entry {entry.stored.key.hex()} is gone")
        chunks.append(files.read(container.open_bytes(in_clear(entry.stored.key, data, cipher), where=f"entry {entry.stored.key.hex()}")))
    contents, arrays = files.stored(concat(chunks))
    ids = b"".join(entry.named.ids for entry in prefix.entries)
    pieces = {f"{FEATURE}.{number}": ids[at : at + MAX_BINARY_BYTES] for number, at in enumerate(range(0, len(ids), MAX_BINARY_BYTES))}
    return container.write(path, replace(contents, ignorable={**contents.ignorable, **pieces}), arrays, durable=durable)


def read_exported(path: str | os.PathLike[str], tokens: str | None, tenant: str) -> tuple[Identity, list[int], Cache]:
    """The identity, the token ids and the cache of a kvpack file; ``tokens`` is a JSON file of its ids, where it has none itself.

    Raises InvalidParameter without ids, MissingFile, and what loading a file raises.
    """
    from .. import files

    file = container.open_file(path)
    header = file.header
    model = header.model
    if tokens is None:
        count = sum(name.startswith(f"{FEATURE}.") for name in header.ignorable)
        data = b"".join(header.ignorable.get(f"{FEATURE}.{number}", b"") for number in range(count))
        if not data or len(data) % ID_BYTES:
            raise InvalidParameter(f"{file.where}: holds no token ids; give them as a JSON array with --tokens")
    else:
        given = read_json(tokens, MAX_TOKENS_BYTES, "a JSON array of token ids")
        try:
            data = token_bytes(given)
        except InvalidParameter as error:
            raise InvalidParameter(f"{tokens}: is not a JSON array of token ids: {error}") from None
    fields = {"model": model.get("name", ""), **{name: model.get(name, "") for name in ("weights", "adapter", "rope", "dtype")}}
    ids = memoryview(data).cast("I").tolist()
    return Identity(recipe=header.recipe, tenant=tenant, **fields), ids, files.read(file)
