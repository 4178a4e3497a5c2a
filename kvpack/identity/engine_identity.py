"""Determines the identity of a serving engine's pages from the model's folder, without loading the model.

Every byte of the checkpoint's files is digested once, and the digests of unchanged files are cached.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from kvpack.file.user_files import open_regular, path_text
from kvpack.formats.errors import InvalidParameter, KvpackError, MissingFile
from kvpack.hub import model_folder
from kvpack.runtime.threads import in_parallel, usable_cores

from .canonical_text import FILES, json_text
from .fingerprint import model_name

PIECE_BYTES = 1 << 26
"""Size in bytes of the pieces of a file. Each is read and digested by one thread."""
BUFFER_BYTES = 1 << 22
THREADS = 16
"""Maximum number of threads that read at the same time. A single thread cannot saturate a fast disk."""
SETTLED_SECONDS = 2.0
"""Age in seconds at which a file's times are reliable, because a later change yields another time.

Digests of younger files are not cached.
"""
MAX_KEPT_BYTES = 1 << 16
_FORMAT = "kvpack checkpoint digest 1"
_HEX = re.compile(r"[0-9a-f]{64}")


def checkpoint_digest(folder: Path) -> str:
    """Return a digest of the names and bytes of all safetensors files in a folder. Empty if there are none.

    Digests are cached in the folder ``kvpack-checkpoints`` in XDG_CACHE_HOME. A file is read again if its path, inode, size or times have
    changed. Raises OSError if a file cannot be read, and InvalidParameter if a file changes while it is read.
    """
    paths = sorted(folder.glob("*.safetensors"))
    digests = [(path.name, _file_digest(os.path.realpath(path))) for path in paths]
    return f"{FILES}:{hashlib.sha256(json_text(digests).encode('utf-8', 'surrogatepass')).hexdigest()}" if paths else ""


def _file_digest(path: str) -> str:
    with _open_cached_digest(path) as kept:
        before = _file_status(path)
        digest = kept.read(before)
        if digest is None:
            digest = digest_file_bytes(path, before["size"])
            after = _file_status(path)
            if after != before:
                raise InvalidParameter(f"{path} changed while its digest was computed: wait until it is complete, then try again")
            kept.write(after, digest)
        return digest


def digest_file_bytes(path: str, size: int) -> str:
    """Return the digest of a file of ``size`` bytes: the SHA-256 of the XXH3-128 digests of its pieces of ``PIECE_BYTES`` bytes."""
    total = hashlib.sha256(size.to_bytes(8, "little"))
    descriptor = open_regular(path)
    try:

        def piece(begin: int) -> bytes:
            hasher, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(BUFFER_BYTES, size - begin)))
            at, stop = begin, min(begin + PIECE_BYTES, size)
            while at < stop and (count := os.preadv(descriptor, [buffer[: stop - at]], at)):
                hasher.update(buffer[:count])
                at += count
            return hasher.digest()

        for digest in in_parallel(piece, range(0, size, PIECE_BYTES), min(THREADS, usable_cores())):
            total.update(digest)
    finally:
        os.close(descriptor)
    return total.hexdigest()


def _file_status(path: str) -> dict[str, int]:
    """Return the attributes of a file that change whenever its contents change."""
    status = os.stat(path)
    names = {"device": "st_dev", "inode": "st_ino", "size": "st_size", "modified_ns": "st_mtime_ns", "changed_ns": "st_ctime_ns"}
    return {name: getattr(status, attribute) for name, attribute in names.items()}


class _CachedDigest:
    """The cached digest of one file. ``cache_path`` is the path of the cache file, or None if there is no cache folder."""

    def __init__(self, path: str, cache_path: str | None) -> None:
        self._path, self._place = path, cache_path

    def read(self, status: Mapping[str, int]) -> str | None:
        """Return the cached digest if it is for a file with this status, or None otherwise."""
        if self._place is None:
            return None
        try:
            descriptor = os.open(self._place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                record: Any = json.loads(file.read(MAX_KEPT_BYTES)) if _is_written_by_user(os.fstat(descriptor), stat.S_ISREG) else None
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(record, dict) or (record.get("format"), record.get("path"), record.get("status")) != (
            _FORMAT,
            self._path,
            status,
        ):
            return None
        digest = record.get("digest")
        return digest if isinstance(digest, str) and _HEX.fullmatch(digest) else None

    def write(self, status: Mapping[str, int], digest: str) -> None:
        """Cache the digest. Does nothing if the cache is not writable, or if the file changed only moments ago."""
        newest = max(status["modified_ns"], status["changed_ns"]) / 1e9
        if self._place is None or not 0 <= newest < time.time() - SETTLED_SECONDS:
            return
        text = json.dumps({"format": _FORMAT, "path": self._path, "status": status, "digest": digest})
        with contextlib.suppress(OSError):
            # A fixed name, so that a file left by a killed process is replaced by the next one.
            new = f"{self._place}.new"
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "w") as file:
                file.write(text)
            os.replace(new, self._place)


@contextlib.contextmanager
def _open_cached_digest(path: str) -> Iterator[_CachedDigest]:
    """Yield a file's cached digest while holding a lock, so that other processes wait for the digest instead of reading the file too."""
    folder = _digest_folder()
    if folder is None:
        yield _CachedDigest(path, None)
        return
    name = hashlib.sha256(os.fsencode(path)).hexdigest()
    descriptor = None
    try:
        with contextlib.suppress(OSError):
            descriptor = os.open(os.path.join(folder, f"lock-{name[0]}"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield _CachedDigest(path, os.path.join(folder, f"{name}.json"))
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _digest_folder() -> str | None:
    """Return this user's cache folder for digests, after creating it if necessary. Returns None if other users can write to it."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.join(base, "kvpack-checkpoints")
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        return folder if _is_written_by_user(os.stat(folder), stat.S_ISDIR) else None
    except (OSError, ValueError):
        return None


def _is_written_by_user(status: os.stat_result, is_kind: Any) -> bool:
    """Return True if a file or folder is of the kind that ``is_kind`` tests, and only this user can have written it."""
    return is_kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings")


def engine_fields(
    model_path: str | os.PathLike[str],
    revision: str | None,
    rope: str | None,
    *,
    kv_dtype: str,
    layout: str,
    tp: tuple[int, int],
    extra: str,
) -> dict[str, str]:
    """Return the fields model, weights, rope, config and extra of an engine's identity. Raises the same errors as ``Identity.of_engine``.
    """
    if not kv_dtype or not layout:
        raise InvalidParameter(
            "kv_dtype or layout is empty: pass the dtype of the engine's cache as kv_dtype, and PageLayout.digest as layout"
        )
    if ";" in layout:
        # A semicolon would end the layout, and the rest would be read as extra.
        raise InvalidParameter(f"layout is {layout!r:.80}, expected text without a semicolon, such as PageLayout.digest")
    rank, size = tp
    if not (type(rank) is type(size) is int and 0 <= rank < size):
        raise InvalidParameter(f"tp is {tp!r:.80}, expected the rank and the number of ranks, such as (0, 1)")
    folder = Path(path_text(model_path)).expanduser()
    if not folder.is_dir():
        # A revision identifies the weights, so their files need not be read.
        folder = model_folder(folder, weights=revision is None, revision=revision)
    try:
        config = (folder / "config.json").read_bytes()
        settings = json.loads(config)
        digest = hashlib.sha256(config)
        for path in sorted(folder.glob("*.py")):
            # The model's own code, which engines run with trust_remote_code.
            digest.update(hashlib.sha256(path.name.encode()).digest() + hashlib.sha256(path.read_bytes()).digest())
        weights = checkpoint_digest(folder) if revision is None else revision
    except KvpackError:
        raise
    except OSError as error:
        raise MissingFile(f"{error.filename or folder}: {error.strerror or error}") from None
    except ValueError as error:
        raise InvalidParameter(f"{folder / 'config.json'} is not valid JSON: {error}") from None
    if not weights:
        raise InvalidParameter(f"{folder} contains no *.safetensors files: pass revision= to identify the weights")
    return {
        "model": model_name(str(folder.resolve())),
        "weights": weights,
        "rope": _rope_json(settings) if rope is None else rope,
        "config": digest.hexdigest(),
        "extra": f"tp={rank}/{size}; layout={layout}; {extra}".removesuffix("; "),
    }


def _rope_json(settings: Mapping[str, Any]) -> str:
    text = settings.get("text_config")
    text_settings = {**settings, **text} if isinstance(text, dict) else settings
    return json.dumps({name: text_settings[name] for name in _ROPE if name in text_settings}, sort_keys=True)
