"""PageCodec: many pages at a time between an engine's own memory and rows of one size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from kvpack.coding.blocks import in_this_thread
from kvpack.coding.modes import own_modes
from kvpack.coding.recipes import parse_recipe
from kvpack.file.row import (
    KEY_BYTES,
    NAMESPACE_BYTES,
    check_row,
    check_same,
    row_layout,
    write_checksum,
    write_front,
)
from kvpack.formats.errors import InvalidParameter, InvalidShape, KvpackError, Truncated

from .buffer import PageBuffer
from .geometry import PageGeometry
from .lanes import check_values, lanes_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from kvpack.coding.recipes import Recipe

Rows = Sequence[Any] | torch.Tensor
Outcome = KvpackError | None
"""What became of a page: None, or the error for which it was left out."""

CPU = torch.device("cpu")


class PageCodec:
    """Encodes an engine's pages of ``geometry`` with ``recipe`` to rows of exactly ``nbytes`` bytes each, and decodes them (spec/row.md).

    ``namespace`` is 32 bytes that all rows name, such as ``Identity.digest``. ``threads`` are the codec's own: the host's threads, random
    state and default dtype stay as they are. Buffers are read and written where they lie, in host memory.
    Raises InvalidRecipe, InvalidDtype, LimitExceeded, and InvalidParameter for a recipe whose sizes depend on the values
    (lossless, outliers, raw tokens) and for one that keeps a raw tail.
    """

    def __init__(
        self,
        recipe: str | os.PathLike[str] | Recipe,
        geometry: PageGeometry,
        *,
        threads: int = 1,
        namespace: bytes = bytes(NAMESPACE_BYTES),
    ) -> None:
        if not isinstance(geometry, PageGeometry):
            raise InvalidParameter(f"geometry is a {type(geometry).__name__}, expected a kvpack.PageGeometry")
        if type(threads) is not int or not 1 <= threads <= 256:
            raise InvalidParameter(f"threads is {threads!r}, expected an integer from 1 to 256")
        if not isinstance(namespace, bytes) or len(namespace) != NAMESPACE_BYTES:
            raise InvalidParameter(f"namespace is {namespace!r:.80}, expected {NAMESPACE_BYTES} bytes, such as Identity.digest")
        self.recipe, self.geometry, self.threads, self.namespace = parse_recipe(recipe), geometry, threads, namespace
        self.contents = geometry.contents(self.recipe)
        self.layout = row_layout(self.contents)
        self.nbytes = self.layout.nbytes
        self._lanes = lanes_of(self.contents, self.layout, geometry)
        self._pool: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"PageCodec({self.recipe.text!r}, {self.geometry}, {self.nbytes} bytes of {self.geometry.raw_bytes})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the codec's threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def encode_into(self, pages: PageBuffer, slots: Sequence[int], rows: Rows, *, keys: Sequence[bytes] | None = None) -> list[Outcome]:
        """Encode the pages in ``slots`` to ``rows``, and return for each page None or the error for which it has no row.

        ``rows`` are writable buffers of at least ``nbytes`` bytes, or one uint8 tensor ``[page, byte]``; what follows a row in its
        buffer is left as it is. ``keys`` are the engine's names of the pages, of any bytes. The row of a page with an error does not
        begin as a row.
        Raises InvalidShape, InvalidParameter and OutOfBounds for arguments that fit no page.
        """
        targets = self._views(rows, len(slots), writable=True)
        digests = self._check(pages, slots, keys)
        lanes = [lane.of(pages) for lane in self._lanes]

        def encode(number: int, threads: int) -> Outcome:
            row = targets[number][: self.nbytes]
            write_front(row, self.layout, self.namespace, digests[number] or bytes(KEY_BYTES))
            try:
                for lane in lanes:
                    lane.encode(slots[number], row, threads)
            except KvpackError as error:
                row[:8] = bytes(8)
                return type(error)(f"slot {slots[number]}: {error}")
            for begin, end in self.layout.pads:
                row[begin:end] = bytes(end - begin)
            write_checksum(row)
            return None

        return self._each(encode, len(slots))

    def decode_into(
        self, rows: Rows, pages: PageBuffer, slots: Sequence[int], *, keys: Sequence[bytes] | None = None, values: bool = False
    ) -> list[Outcome]:
        """Decode ``rows`` to the pages in ``slots``, and return for each page None or the error for which it was left as it was.

        A row is checked before anything is written: its checksum, namespace, geometry, recipe and, with ``keys``, its name; with
        ``values`` also the rules of its codecs, for rows that others may have written. ``rows`` may be longer than a row.
        Raises InvalidShape, InvalidParameter and OutOfBounds for arguments that fit no page.
        """
        sources = self._views(rows, len(slots), writable=False)
        digests = self._check(pages, slots, keys)
        lanes = [lane.of(pages) for lane in self._lanes]

        def decode(number: int, threads: int) -> Outcome:
            row, where = sources[number], f"row {number}"
            try:
                frame = check_row(row, where)
                row = row[: frame.length]
                check_same(row, frame, self.layout, self.namespace, digests[number], where)
                if values:
                    check_values(row, self.contents, self.layout, where)
            except KvpackError as error:
                return error
            for lane in lanes:
                lane.decode(row, slots[number], threads)
            return None

        return self._each(decode, len(slots))

    def _each(self, work: Callable[[int, int], Outcome], count: int) -> list[Outcome]:
        workers = min(self.threads, count)
        # One page has all threads; many pages have one each.
        run = partial(_isolated, work, self.threads if count == 1 else 1)
        if workers < 2:
            return [run(number) for number in range(count)]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="kvpack-pages")
        return list(self._pool.map(run, range(count)))

    def _check(self, pages: Any, slots: Sequence[int], keys: Sequence[bytes] | None) -> list[bytes | None]:
        """The digests of ``keys``. Raises InvalidParameter, InvalidShape and OutOfBounds."""
        if not isinstance(pages, PageBuffer):
            raise InvalidParameter(f"pages are a {type(pages).__name__}, expected a kvpack.PageBuffer of an engine's memory")
        if pages.geometry != self.geometry:
            raise InvalidShape(f"the pages are {pages.geometry}, the codec is for {self.geometry}")
        if pages.device != CPU:
            raise InvalidParameter(f"the pages are on {pages.device}, and PageCodec reads and writes host memory: copy them there first")
        pages.check_slots(slots)
        if keys is None:
            return [None] * len(slots)
        if len(keys) != len(slots):
            raise InvalidParameter(f"{len(keys)} keys were given for {len(slots)} slots")
        return [key_digest(key) for key in keys]

    def _views(self, rows: Rows, count: int, *, writable: bool) -> list[memoryview]:
        if isinstance(rows, torch.Tensor):
            if rows.dim() != 2 or rows.dtype != torch.uint8 or rows.device != CPU or (rows.numel() and rows.stride(1) != 1):
                raise InvalidShape(f"rows are {rows.dtype} {list(rows.shape)} on {rows.device}, expected uint8 [page, byte] in host memory")
            # The GIL is all that a view of memory needs, whatever mode the tensor was made in.
            rows = [row.numpy().data for row in rows.detach().unbind()]
        views = [memoryview(row).cast("B") for row in rows]
        if len(views) != count:
            raise InvalidShape(f"{len(views)} rows were given for {count} slots")
        for number, view in enumerate(views):
            if writable and view.readonly:
                raise InvalidParameter(f"row {number} is a read-only buffer, and a page is to be written there")
            if writable and len(view) < self.nbytes:
                raise Truncated(f"row {number} has room for {len(view)} bytes, a page takes {self.nbytes}")
        return views


def key_digest(key: bytes) -> bytes:
    """The 32 bytes by which a row names the page of an engine's ``key``. Raises InvalidParameter for anything but bytes."""
    if not isinstance(key, bytes | bytearray | memoryview):
        raise InvalidParameter(f"a key is a {type(key).__name__}, expected bytes, such as those of an engine's block hash")
    return hashlib.sha256(key).digest()


def _isolated(work: Callable[[int, int], Outcome], threads: int, number: int) -> Outcome:
    with own_modes(CPU), in_this_thread():
        return work(number, threads)
