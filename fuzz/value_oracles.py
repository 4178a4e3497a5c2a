"""Checks of the values that accepted files decode to. They import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fuzz.oracles import MAX_COMPARED_BYTES, MAX_DECODED_BYTES, compare_container, needs_basis, open_verified, read_by_decoder
from fuzz.reader_oracles import check_readers
from fuzz.seeds import bases
from kvpack.cache import files
from kvpack.cache.cache import Cache
from kvpack.coding.bases import Basis
from kvpack.file import container
from kvpack.file.header import layout_bytes
from kvpack.formats.errors import KvpackError
from kvpack.formats.minifloat import E8M0_BIAS
from support.decoded_values import assert_same_cache
from support.second_decoder import decoder, decompress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpack.cache.packed_runs import PackedRun

BASES = bases()
_BASES = [Basis.from_bytes(data) for data in BASES]
"""Bases of the vectors, which every reader receives."""

MAX_VALUES = 1 << 16
_MODERATE = 2.0**40
"""Bound below which values are far from every limit of binary32, and no intermediate step overflows."""
_OVERFLOW_BOUND = 2.0**96
"""Bound above which an intermediate step may overflow."""


def load_checked(data: bytes) -> Cache | None:
    """Return the cache of a file after checking the rules of every value, or None if it is refused."""
    try:
        # The memory is writable, like a private mapping, because torch cannot create tensors from read-only memory.
        return files.read(container.open_bytes(bytearray(data), memory_limit=MAX_DECODED_BYTES), basis=_BASES)
    except KvpackError:
        return None


def check_values(data: bytes) -> bool:
    """Check that an accepted file decodes to values of the shapes that its header declares. Return True if the file is accepted."""
    cache = load_checked(data)
    if cache is None:
        return False
    if cache.values <= MAX_VALUES:
        for layer in cache:
            for side in layer.sides.values():
                values = side.unpack(torch.float32)
                assert tuple(values.shape) == (side.batch, side.heads, side.tokens, side.dim)
                assert values.dtype == torch.float32
    return True


def compare_values(data: bytes) -> None:
    """Check that the second decoder accepts the same files and decodes the same values.

    The values must also stay the same when the cache is sliced, and when it is saved and loaded.
    """
    compare_container(data)
    cache = load_checked(data)
    file = open_verified(data)
    if file is not None and needs_basis(file) and sum(map(layout_bytes, file.header.layouts.values())) <= MAX_COMPARED_BYTES:
        decoded, rule = read_by_decoder(data, BASES)
        library = "accepts" if cache else "refuses"
        assert (cache is not None) == (not rule), f"the library {library} it; the second decoder: {rule or 'accepts it'}"
        check_readers(data, ".kvpack", BASES, decoded, rule)
    if cache is None or cache.values > MAX_VALUES or _stored_bytes(cache) > MAX_COMPARED_BYTES:
        return
    assert_same_cache(decoder.read(data, decompress, BASES), cache)
    _check_finite(cache)
    again = load_checked(container.to_bytes(*files.header_and_arrays(cache)))
    assert again is not None, "the cache is refused after it was saved again"
    assert_equal(again, cache, cache.tokens)
    half = cache.tokens // 2
    assert [again.positions(number) for number in range(len(again))] == [cache.positions(number) for number in range(len(cache))]
    if all(not layer.skipped and not layer.states and layer.tokens >= half for layer in cache):
        assert_equal(cache[:, :half], cache, half)


def _stored_bytes(cache: Cache) -> int:
    sides = [side for layer in cache for side in layer.sides.values()]
    return sum(stream.nbytes for side in sides for page in side.runs for stream in page.streams.values())


def _check_finite(cache: Cache) -> None:
    """Check that the values of a lossy codec are finite unless a stored or intermediate value is near a limit."""
    for layer in cache:
        for name, side in layer.sides.items():
            floats = [stream for page in side.runs for stream in _numbers(page)]
            if side.codec.exact_dtype is not None or any(not (stream.abs() < _MODERATE).all() for stream in floats if stream.numel()):
                continue
            for page in side.runs:
                values = page.codec.decode(page.streams)
                finite = torch.isfinite(values)
                # Moderate exponents of a logarithmic norm can exceed binary32 too, and then all values of the token do.
                tokens = finite.all(-1) | (side.codec.id == "angle")
                assert tokens.all(), f"{name}: a value is not finite, and no stored number is {_MODERATE:g} or more"


def _numbers(page: PackedRun) -> Iterator[torch.Tensor]:
    """Yield the numbers that a page stores: float streams, and powers of two that are stored as exponents (e8m0)."""
    for name, stream in page.streams.items():
        if stream.is_floating_point():
            yield stream
        elif name == "block_scales" and getattr(getattr(page.codec, "codec", page.codec), "scale_dtype", "") == "e8m0":
            yield torch.exp2(stream.to(torch.float32) - E8M0_BIAS)


def assert_equal(actual: Cache, cache: Cache, tokens: int) -> None:
    """Assert that ``actual`` has the values of the first ``tokens`` tokens of ``cache``."""
    for layer, other in zip(actual, cache, strict=True):
        for name, side in layer.sides.items():
            values, whole = side.unpack(torch.float32), other.sides[name].unpack(torch.float32)[:, :, :tokens]
            # With other rows, sums may be vectorized in another order and then differ by a few last places of a head's largest.
            allowed = 2.0**-18 * whole.nan_to_num(0.0, 0.0, 0.0).abs().amax(-1, keepdim=True) if whole.numel() else 0.0
            same = (values == whole) | (~torch.isfinite(values) & ~torch.isfinite(whole)) | ((values - whole).abs() <= allowed)
            # Near the limits of binary32, the order of sums determines whether an intermediate step overflows.
            largest = torch.maximum(values.abs(), whole.abs()).nan_to_num(torch.inf).amax(-1, keepdim=True) if whole.numel() else 0.0
            same |= (torch.isfinite(values) ^ torch.isfinite(whole)) & (largest >= _OVERFLOW_BOUND)
            assert same.all(), f"{name}: the same tokens have different values"
