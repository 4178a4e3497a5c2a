"""``PageCodec``: encodes pages from an engine's memory to rows of equal size, and decodes them back."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self

import torch

from kvpack.coding import dispatch
from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.file.row import NAMESPACE_BYTES, row_layout
from kvpack.formats.arguments import as_list, check_flag, describe
from kvpack.formats.errors import InvalidParameter, InvalidType, Truncated

from .buffer import PageBuffer
from .device import DevicePages, PageJob, Rows
from .geometry import PageGeometry
from .host import CPU, HostPages, LeftOutTokens, Outcome, RowPlan
from .lanes import build_lanes, row_address


class PageCodec:
    """Encodes pages of ``geometry`` with ``recipe`` to rows of exactly ``nbytes`` bytes, and decodes them (spec/row.md).

    ``namespace`` is 32 bytes that all rows contain, such as ``Identity.digest``. The codec has ``threads`` threads of its own, and does not
    change the host's threads, random state or default dtype.

    Buffers are read and written in place. In host memory, C kernels need no extra memory for pages. PyTorch operations replace missing C
    kernels, layer by layer: for 8-bit scales, channel scales, key means, and encoding by oscar and by minifloat with a scale per run. On a
    CUDA device, kernels run on the current stream, and read and write rows in device memory. If no kernel supports a recipe and geometry
    page by page, all pages are coded together. Rows in host memory are copied to and from the device. Cases that the device does not
    support are copied to host memory and coded there.

    A row has room for one raw token per 64 tokens of its page. Tokens with a norm below ``raw_low_norm`` times the page's median are stored
    there. Codecs that encode tokens together also store tokens above ``raw_high_norm``. ``raw_first`` is ignored, because a page has no
    position in the sequence. Tokens that maps, means and scales represent poorly get the remaining room. Pages of fewer than 64 tokens have
    no room, except for one token with the codec klt. ``raw_tokens_left_out`` counts tokens without room. If tokens lose precision for lack
    of room or because their norms are too small for 8 bits, or cause others to lose it, one KvpackWarning per codec is issued.

    Raises InvalidParameter, InvalidType or LimitExceeded if sizes depend on the values (lossless, transform, outliers, raw tokens by
    ``sinks``), or if the recipe keeps a raw tail. A klt recipe must include its basis (``Recipe("klt-2", basis)``). Raises MissingBasis
    without a basis, and InvalidParameter if the basis has a different number of heads.
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
            raise InvalidType(f"geometry is a {type(geometry).__name__}, expected a kvpack.pages.PageGeometry")
        if type(threads) is not int or not 1 <= threads <= 256:
            raise InvalidParameter(f"threads is {describe(threads)}, expected an integer from 1 to 256")
        if not isinstance(namespace, bytes) or len(namespace) != NAMESPACE_BYTES:
            raise InvalidParameter(f"namespace is {describe(namespace)}, expected {NAMESPACE_BYTES} bytes, such as Identity.digest")
        self.recipe, self.geometry, self.threads, self.namespace = parse_recipe(recipe), geometry, threads, namespace
        self.contents = geometry.contents(self.recipe)
        self.layout = row_layout(self.contents)
        self.nbytes = self.layout.nbytes
        self._plan = RowPlan(geometry, self.contents, self.layout, namespace, build_lanes(self.contents, self.layout, geometry))
        self._left_out = LeftOutTokens(geometry)
        self._host = HostPages(self._plan, threads, self._left_out)
        self._devices: dict[torch.device, DevicePages] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"PageCodec({self.recipe.text!r}, {self.geometry}, {self.nbytes} bytes of {self.geometry.raw_bytes})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the codec's threads. The codec cannot be used afterward."""
        self._closed = True
        self._host.close()

    @property
    def raw_tokens_left_out(self) -> int:
        """Number of tokens, so far, that should be raw but did not fit in their page. Waits for all devices."""
        return self._left_out.count + sum(int(device.left_out[0]) for device in self._devices.values())

    def encode_into(self, pages: PageBuffer, slots: Sequence[int], rows: Rows, *, keys: Sequence[bytes] | None = None) -> list[Outcome]:
        """Encode the pages in ``slots`` into ``rows``. Returns a list with None for each encoded page, and an error for each other page.

        ``rows`` are writable buffers of at least ``nbytes`` bytes, or one uint8 tensor ``[page, byte]``. Bytes after a row in its buffer
        are left unchanged. ``keys`` are the engine's names for the pages, as bytes. After an error, the page's buffer does not begin with
        a valid row header. Raises InvalidParameter or OutOfBounds if an argument is invalid for all pages.
        """
        return self.start_encode(pages, slots, rows, keys=keys).outcomes()

    def start_encode(self, pages: PageBuffer, slots: Sequence[int], rows: Rows, *, keys: Sequence[bytes] | None = None) -> PageJob:
        """Start ``encode_into`` without waiting for the device. In host memory, the job is complete on return.

        Recipes with raw tokens or key means do wait for the device, because the next launches depend on each page's number of raw tokens.
        """
        slots, digests = self.validate_arguments(pages, slots, keys)
        if (device := self._get_device_pages(pages)) is not None:
            self._check_rows(rows, len(slots), writable=True)
            return device.encode(pages, slots, rows, digests) if slots else PageJob.completed([])
        return PageJob.completed(self._host.encode(pages, slots, self._views(rows, len(slots), writable=True), digests))

    def decode_into(
        self, rows: Rows, pages: PageBuffer, slots: Sequence[int], *, keys: Sequence[bytes] | None = None, check_values: bool = False
    ) -> list[Outcome]:
        """Decode ``rows`` into the pages in ``slots``. Returns a list with None for each decoded page, and an error for each other page.

        A page with an error is left unchanged. Before anything is written, each row's checksum, namespace, geometry and recipe are checked.
        If ``keys`` are passed, the row's key is checked too. With ``check_values=True``, for rows from untrusted sources, the codecs' rules
        are checked too. Buffers in ``rows`` may be longer than a row. Raises InvalidParameter or OutOfBounds if an argument is invalid for
        all pages.
        """
        return self.start_decode(rows, pages, slots, keys=keys, check_values=check_values).outcomes()

    def start_decode(
        self, rows: Rows, pages: PageBuffer, slots: Sequence[int], *, keys: Sequence[bytes] | None = None, check_values: bool = False
    ) -> PageJob:
        """Start ``decode_into`` without waiting for the device. In host memory, the job is complete on return."""
        check_flag(check_values, "check_values")
        slots, digests = self.validate_arguments(pages, slots, keys, written=True)
        if (device := self._get_device_pages(pages)) is not None:
            self._check_rows(rows, len(slots), writable=False)
            return device.decode(rows, pages, slots, digests, check_values) if slots else PageJob.completed([])
        return PageJob.completed(self._host.decode(self._views(rows, len(slots), writable=False), pages, slots, digests, check_values))

    def check(self, rows: Rows, *, keys: Sequence[bytes] | None = None, check_values: bool = False) -> list[Outcome]:
        """Return one item per row: None if it is valid, otherwise the error that ``decode_into`` would report.

        The rows are in host memory. Raises InvalidParameter if the codec is closed or an argument is invalid.
        """
        check_flag(check_values, "check_values")
        if not isinstance(rows, torch.Tensor) or not rows.dim():
            rows = as_list(rows, "rows", "rows, which are bytes")
        views = self._views(rows, len(rows), writable=False)
        return self._host.check(views, _key_digests(keys, len(views), "rows"), check_values)

    def _get_device_pages(self, pages: PageBuffer) -> DevicePages | None:
        """Return the implementation for the device of ``pages``, or None for host memory, where ``HostPages`` is used."""
        if pages.device == CPU and not dispatch.uses_triton(CPU):
            return None
        if pages.device not in self._devices:
            self._devices[pages.device] = DevicePages(self._plan, self._host, pages.device, self._left_out)
        return self._devices[pages.device]

    def validate_arguments(
        self, pages: Any, slots: Sequence[int], keys: Sequence[bytes] | None, *, written: bool = False
    ) -> tuple[list[int], list[bytes | None]]:
        """Check ``pages``, ``slots`` and ``keys``. Returns the slots as integers and the digests of the keys.

        Raises InvalidParameter, InvalidType or OutOfBounds.
        """
        if self._closed:
            raise InvalidParameter("the codec is closed: create another PageCodec")
        if not isinstance(pages, PageBuffer):
            raise InvalidType(f"pages is a {type(pages).__name__}, expected a kvpack.pages.PageBuffer of an engine's memory")
        if pages.geometry != self.geometry:
            raise InvalidParameter(
                f"pages has geometry {pages.geometry}, but the codec is for {self.geometry}: use a PageCodec of the same "
                "geometry"
            )
        slots = pages.checked_slots(slots, written)
        return slots, _key_digests(keys, len(slots), "slots")

    def _check_rows(self, rows: Rows, count: int, *, writable: bool) -> None:
        """Check that ``rows``, which may be in device memory, have room for ``count`` pages. Raises the same errors as ``_views``."""
        if not isinstance(rows, torch.Tensor) or rows.device == CPU:
            self._views(rows, count, writable=writable)
        elif rows.dim() != 2 or rows.dtype != torch.uint8 or rows.shape[0] != count:
            raise InvalidParameter(f"rows is {rows.dtype} {list(rows.shape)}, expected uint8 [{count}, byte]")
        elif writable and rows.shape[1] < self.nbytes:
            raise Truncated(f"rows has room for {rows.shape[1]} bytes per page, but a page needs {self.nbytes}: pass longer rows")
        elif writable and count > 1 and rows.stride(0) < self.nbytes:
            raise InvalidParameter(_overlap_message(rows.stride(0), self.nbytes))

    def _views(self, rows: Rows, count: int, *, writable: bool) -> list[memoryview]:
        if isinstance(rows, torch.Tensor):
            if rows.dim() != 2 or rows.dtype != torch.uint8 or rows.device != CPU or (rows.numel() and rows.stride(1) != 1):
                description = f"{rows.dtype} {list(rows.shape)} on {rows.device}"
                raise InvalidParameter(f"rows is {description}, expected uint8 [page, byte] in host memory or on the device of the pages")
            # Views of memory do not depend on the mode in which the tensor was created.
            rows = [row.numpy().data for row in rows.detach().unbind()]
        try:
            views = [memoryview(row).cast("B") for row in rows]
        except TypeError as error:
            raise InvalidParameter(
                f"rows contains something other than contiguous buffers ({error}): pass bytearrays or one uint8 tensor"
            ) from None
        if len(views) != count:
            raise InvalidParameter(f"{len(views)} rows were passed for {count} slots: pass one row per slot")
        for number, view in enumerate(views):
            if writable and view.readonly:
                raise InvalidParameter(f"row {number} is a read-only buffer: pass a writable one, because a page is written to it")
            if writable and len(view) < self.nbytes:
                raise Truncated(f"row {number} has room for {len(view)} bytes, but a page needs {self.nbytes}: pass a longer buffer")
        if writable and len(views) > 1:
            nearest = min(after - before for before, after in pairwise(sorted(map(row_address, views))))
            if nearest < self.nbytes:
                raise InvalidParameter(_overlap_message(nearest, self.nbytes))
        return views


def _overlap_message(distance: int, nbytes: int) -> str:
    return f"two rows begin {distance} bytes apart, but a page needs {nbytes}: pass a separate row for each page"


def _key_digests(keys: Sequence[bytes] | None, count: int, description: str) -> list[bytes | None]:
    if keys is None:
        return [None] * count
    keys = as_list(keys, "keys", "the engine's keys, which are bytes")
    if len(keys) != count:
        raise InvalidParameter(f"{len(keys)} keys were passed for {count} {description}: pass one key for each")
    return [key_digest(key) for key in keys]


def key_digest(key: bytes) -> bytes:
    """Return the 32-byte digest of the engine's key for a page, as stored in the page's row.

    Raises InvalidType unless ``key`` is bytes.
    """
    if not isinstance(key, bytes | bytearray | memoryview):
        raise InvalidType(f"a key is a {type(key).__name__}, expected bytes, such as an engine's block hash")
    return hashlib.sha256(key).digest()
