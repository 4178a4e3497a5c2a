"""Tests of the cache keys of compiled attention kernels."""

from __future__ import annotations

import pytest

from kvpack.coding import triton_version
from kvpack.coding.recipes import parse_recipe

pytestmark = pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels need a newer Triton")


def test_a_bound_loader_is_identified_by_the_source_of_its_functions() -> None:
    # Triton hashes a function among a kernel's arguments, and of any other argument its cache_key, or else its text: without one, a
    # kernel compiled before an update would be taken from the disk after it.
    from kvpack.kernels.tables.shared_tables import SharedTable
    from kvpack.kernels.tiles import loaders
    from kvpack.kernels.tiles.bound_loader import LoadMode, bind

    names = []
    for codec in ("group:b=4,g=32", "group:b=4,g=32,token_scale=fp16", "scalar:b=3"):
        tiles = loaders.find_tiles(parse_recipe(f"kv={codec}").codec(0, 1, "k", 128))
        assert tiles is not None
        bound = bind(tiles, LoadMode(SharedTable(), False, True), None, (), False)
        for function in (bound.load, bound.decode, bound.factor):
            assert function is None or function.cache_key in bound.cache_key
        assert bound._replace(offset=True).cache_key != bound.cache_key
        names.append(bound.cache_key)
    assert len(set(names)) == 3


def test_a_quantizer_is_identified_by_the_source_of_its_functions() -> None:
    from kvpack.kernels.encode import group, scalar
    from kvpack.kernels.encode.kernel import Quantizer

    names = set()
    for quantize in (group._quantize, group._measure_extremes, scalar._quantize):
        for end in (None, group._store_products):
            quantizer = Quantizer(quantize, (1,), end=end)
            assert quantize.cache_key in quantizer.cache_key
            names |= {quantizer.cache_key, quantizer._replace(constants=(2,)).cache_key}
    assert len(names) == 12


def test_a_decoder_is_identified_by_the_source_of_its_function() -> None:
    from kvpack.kernels.decode import group, table
    from kvpack.kernels.decode.kernel import TileDecoder

    decoders = [TileDecoder(function, (number,)) for function in (group._decode_group, table._decode_table) for number in (1, 2)]
    assert all(decoder.decode.cache_key in decoder.cache_key for decoder in decoders)
    assert len({decoder.cache_key for decoder in decoders}) == 4
