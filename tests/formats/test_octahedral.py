"""Tests of the octahedral codec: its map and its search against their definitions, accuracy, layout, and edge cases."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpack.formats.errors import InvalidParameter, InvalidPayload, ValueTooLarge
from kvpack.formats.lloyd_max import direction_table, octahedral_density
from kvpack.formats.octahedral import Octahedral
from kvpack.formats.octahedral_search import codebook, codebook_directions, midpoints, nearest_level, octahedral_coordinates
from kvpack.formats.options import Options

CPU = torch.device("cpu")
SPEC = Path(__file__).parents[2] / "spec" / "codecs" / "octahedral.md"
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)


def octahedral(dim: int = 128, **words: object) -> Octahedral:
    return Octahedral.create(dim, "k", Options("octahedral", {name: str(value) for name, value in words.items()}))


def arrays(streams: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: stream.numpy().copy() for name, stream in streams.items()}


def keys(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unit_directions(count: int, seed: int = 0) -> torch.Tensor:
    """Return directions ``[3, count]`` on the quarter sphere that the search covers."""
    vectors = torch.nn.functional.normalize(keys(3, count, seed=seed), dim=0)
    vectors[:2] = vectors[:2].abs()
    return vectors


def sphere_from_square(xi: np.ndarray, eta: np.ndarray) -> np.ndarray:
    """Evaluate OCTOPUS Eq. 6 as printed in the paper, with sign(0) = +1."""
    z = 1 - np.abs(xi) - np.abs(eta)
    x = np.where(z >= 0, xi, np.where(xi < 0, -1, 1) * (1 - np.abs(eta)))
    y = np.where(z >= 0, eta, np.where(eta < 0, -1, 1) * (1 - np.abs(xi)))
    vectors = np.stack([x, y, z])
    return vectors / np.sqrt((vectors**2).sum(0))


# The map


def test_the_map_inverts_equation_6_on_both_sides_of_the_fold() -> None:
    axis = np.linspace(0.0, 1.0, 65)
    xi, eta = (grid.ravel() for grid in np.meshgrid(axis, axis))
    found = octahedral_coordinates(*torch.tensor(sphere_from_square(xi, eta), dtype=torch.float32))
    np.testing.assert_allclose(torch.stack(found), np.stack([xi, eta]), atol=3e-7)


def test_equation_6_inverts_the_map() -> None:
    vectors = unit_directions(10_000)
    found = sphere_from_square(*torch.stack(octahedral_coordinates(*vectors)).double().numpy())
    np.testing.assert_allclose(found, vectors, atol=1e-6)


def test_the_map_of_the_zero_vector_is_finite() -> None:
    zero = torch.zeros(3)
    assert torch.equal(torch.stack(octahedral_coordinates(zero, zero, zero)), torch.zeros(2, 3))


def test_codebook_directions_match_equation_6() -> None:
    table = direction_table(8)
    magnitudes = np.frombuffer(table, "<f4").astype(np.float64)
    expected = np.concatenate([sphere_from_square(magnitudes, np.full(8, eta)) for eta in magnitudes], 1)
    np.testing.assert_allclose(codebook_directions(table), expected, atol=6e-8)


@pytest.mark.parametrize("coordinate", [0, 1], ids=["xi", "eta"])
def test_sampled_coordinates_follow_equation_7(coordinate: int) -> None:
    sampled = octahedral_coordinates(*unit_directions(400_000))[coordinate].double().numpy()
    found, edges = np.histogram(sampled, bins=64, range=(0, 1), density=True)
    np.testing.assert_allclose(found, octahedral_density((edges[1:] + edges[:-1]) / 2), atol=0.06)


def test_sampled_triplet_norms_follow_equation_4() -> None:
    """Stored levels are the means of the samples nearest to them."""
    codec = octahedral(b_dir=2, b_norm=3)
    table = np.frombuffer(codec.norm_table, "<f4")
    units = torch.nn.functional.normalize(keys(20_000, 128), dim=-1)
    norms = units[:, :126].unflatten(-1, (42, 3)).norm(dim=-1).flatten().numpy()
    nearest = np.searchsorted(midpoints(codec.norm_table), norms)
    means = np.bincount(nearest, norms) / np.bincount(nearest)
    np.testing.assert_allclose(means, table, rtol=0.004)


# The search


@pytest.mark.scenario
@pytest.mark.parametrize("b_dir", range(1, 9))
@pytest.mark.parametrize("rounding", ["local2x2", "local3x3"])
def test_local_searches_find_the_same_result_as_the_full_search(b_dir: int, rounding: str) -> None:
    vectors = unit_directions(60_000 if b_dir < 7 else 5_000, seed=b_dir)
    book = codebook(direction_table(2 ** (b_dir - 1)), CPU)
    best = book.projection(book.nearest(*vectors, "full"), *vectors)
    plain = book.projection(book.local_search(*vectors, rounding), *vectors)
    fast = book.projection(book.nearest(*vectors, rounding), *vectors)
    assert (best - plain).max() < 4e-7
    assert (best - fast).max() < 4e-7


@pytest.mark.parametrize("b_dir", [1, 2, 3, 4])
def test_the_full_search_finds_the_nearest_signed_codeword(b_dir: int) -> None:
    vectors = torch.nn.functional.normalize(keys(3, 4_000), dim=0)
    table = direction_table(2 ** (b_dir - 1))
    magnitudes = np.frombuffer(table, "<f4").astype(np.float64)
    signed = np.concatenate([-magnitudes[::-1], magnitudes])
    words = sphere_from_square(*(grid.ravel() for grid in np.meshgrid(signed, signed)))
    book = codebook(table, CPU)
    quarter = vectors[0].abs(), vectors[1].abs(), vectors[2]
    found = book.projection(book.nearest(*quarter, "full"), *quarter)
    np.testing.assert_allclose(found, (vectors.double().numpy().T @ words).max(1), atol=4e-7)


@pytest.mark.parametrize("b_dir", [1, 2, 4, 5])
def test_the_search_handles_directions_on_axes_edges_and_the_fold(b_dir: int) -> None:
    values = torch.tensor([0.0, 1e-30, 0.25, 0.5, 1.0])
    vectors = torch.cartesian_prod(values, values, torch.cat([values, -values])).T.contiguous()
    book = codebook(direction_table(2 ** (b_dir - 1)), CPU)
    found, best = (book.projection(book.nearest(*vectors, rounding), *vectors) for rounding in ("local3x3", "full"))
    assert ((best - found) <= 4e-7 * vectors.norm(dim=0)).all()


def test_scalar_rounding_selects_the_nearest_magnitudes() -> None:
    table = direction_table(8)
    magnitudes = np.frombuffer(table, "<f4")
    vectors = unit_directions(2_000)
    found = codebook(table, CPU).nearest(*vectors, "scalar").numpy()
    for coordinate, level in zip(octahedral_coordinates(*vectors), (found % 8, found // 8), strict=True):
        distance = np.abs(coordinate.numpy()[:, None] - magnitudes)
        np.testing.assert_allclose(distance[np.arange(2_000), level], distance.min(1), atol=1e-7)


def test_scalar_rounding_selects_the_norm_nearest_to_the_length() -> None:
    """OCTOPUS, Sec. 3.5, rounds the three values independently. With one direction bit, it costs most: 0.602 against 0.517 (Table 5)."""
    codec = octahedral(16, b_dir=1, b_norm=2, rotation="none", norm="fp32", rounding="scalar", norm_rule="norm")
    x = torch.nn.functional.normalize(keys(1, 1, 200, 16), dim=-1)
    lengths = x[..., :15].unflatten(-1, (5, 3)).norm(dim=-1)
    table = torch.from_numpy(np.frombuffer(codec.norm_table, "<f4").copy())
    found = codec.decode(codec.encode(x))[..., :15].unflatten(-1, (5, 3)).norm(dim=-1)
    nearest = (lengths[..., None] - table).abs().amin(-1)
    assert ((found - lengths).abs() <= nearest + 1e-6).all()


@pytest.mark.parametrize("count", [0, 1, 3, 200])
def test_comparison_and_search_count_levels_alike(count: int) -> None:
    bounds = sorted(keys(count).tolist())
    values = keys(7, 5, seed=1)
    assert np.array_equal(nearest_level(values, bounds).numpy(), np.searchsorted(np.float32(bounds), values.numpy()))


def test_the_stored_pair_is_the_best_direction_and_norm() -> None:
    """OCTOPUS, Eq. 11, is checked by brute force on a small codec."""
    codec = octahedral(16, b_dir=2, b_norm=2, rotation="none", norm="fp32", norm_rule="norm")
    x = torch.nn.functional.normalize(keys(1, 1, 200, 16), dim=-1)
    words = torch.cat([torch.from_numpy(signs)[:, None] * codebook_directions(codec.direction_table).double() for signs in SIGNS], 1)
    norms = torch.tensor(np.frombuffer(codec.norm_table, "<f4").astype(np.float64))
    choices = (words[:, :, None] * norms).flatten(1).T
    triplets = x[..., :15].unflatten(-1, (5, 3)).double()
    best = torch.cdist(triplets.flatten(0, -2), choices).amin(-1).square()
    found = (codec.decode(codec.encode(x))[..., :15].unflatten(-1, (5, 3)) - triplets).square().sum(-1).flatten()
    assert (found <= best + 1e-6).all()


SIGNS = [np.array([x, y, 1.0]) for x, y in itertools.product((1.0, -1.0), repeat=2)]


# Accuracy


@pytest.mark.parametrize(
    ("words", "error", "cosine"),
    [
        ({"b_dir": 1, "b_norm": 1, "rounding": "scalar"}, 0.6022, 0.692),
        ({"b_dir": 1, "b_norm": 1}, 0.5172, 0.703),
        ({"b": 2, "rounding": "scalar"}, 0.0897, 0.9547),
        ({"b": 3, "rounding": "scalar"}, 0.0260, 0.9871),
        ({"b": 4, "rounding": "scalar"}, 0.0071, 0.9965),
        ({"b": 2}, 0.0832, 0.9579),
        ({"b": 3}, 0.0243, 0.9880),
        ({"b": 4}, 0.0067, 0.9967),
        ({"b": 3, "rounding": "full"}, 0.0243, 0.9880),
        ({"b_dir": 1, "b_norm": 3}, 0.4555, 0.7372),
        ({"b_dir": 2, "b_norm": 2}, 0.1409, 0.9271),
        ({"b_dir": 2, "b_norm": 4}, 0.1273, 0.9342),
        ({"b_dir": 3, "b_norm": 3}, 0.0374, 0.9812),
        ({"b_dir": 5, "b_norm": 1}, 0.0537, 0.9732),
        ({"b_dir": 2, "b_norm": 6}, 0.1262, 0.9347),
        ({"b_dir": 3, "b_norm": 5}, 0.0332, 0.9832),
        ({"b_dir": 4, "b_norm": 4}, 0.0096, 0.9952),
        ({"b_dir": 6, "b_norm": 2}, 0.0166, 0.9919),
    ],
    ids=str,
)
def test_accuracy_equals_the_papers(words: dict[str, object], error: float, cosine: float) -> None:
    """Expected values are from OCTOPUS, Tables 1, 4 and 5, for Gaussian keys with d = 128."""
    codec, x = octahedral(**words, norm_rule="norm"), keys(1, 2, 2048, 128)
    decoded = codec.decode(codec.encode(x))
    assert (decoded - x).square().mean().item() == pytest.approx(error, rel=0.02)
    assert torch.cosine_similarity(decoded, x, dim=-1).mean().item() == pytest.approx(cosine, abs=2e-3)


def test_accuracy_does_not_depend_on_key_norms() -> None:
    codec, x = octahedral(b=3, norm="fp32"), keys(1, 1, 64, 128)
    for factor in (2.0**-110, 2.0**-20, 2.0**20, 2.0**110):
        decoded = codec.decode(codec.encode(x * factor)) / factor
        assert (decoded - x).square().mean().item() == pytest.approx(0.0243, rel=0.02)


# Layout


@pytest.mark.parametrize(
    ("b", "arrangement", "row_bytes", "bits"),
    [
        (2, "dense", {"index": 22, "sign": 18}, 2.63),
        (3, "dense", {"index": 44, "sign": 12}, 3.63),
        (4, "dense", {"index": 44, "sign": 28}, 4.75),
        (2, "direct", {"symbol": 48}, 3.13),
        (3, "direct", {"symbol": 64}, 4.13),
        (4, "direct", {"symbol": 80}, 5.13),
    ],
    ids=lambda value: str(value) if isinstance(value, (int, str)) else "",
)
def test_stored_bits_for_head_dim_128_are_unchanged(b: int, arrangement: str, row_bytes: dict[str, int], bits: float) -> None:
    codec = octahedral(b=b, arrangement=arrangement)
    streams = codec.encode(keys(1, 1, 4, 128))
    assert {name: packing.row_bytes for name, packing in codec.packings().items()} == row_bytes
    assert sum(stream.nbytes for stream in streams.values()) * 8 / (4 * 128) <= bits


def test_symbols_are_where_the_specification_says() -> None:
    """For direct rounding with b = 3, triplet i is field i div 16 of word i mod 16.

    A field has indices in its low 24 bits, followed by signs.
    """
    codec = octahedral(b=3, arrangement="direct", rotation="none")
    x = torch.zeros(1, 1, 1, 128)
    x[..., 3 * 17 : 3 * 17 + 3] = torch.tensor([-0.1, 0.2, -0.7])
    streams = codec.encode(x)
    word = int(streams["symbol.0"][0, 0, 0, 1]) | int(streams["symbol.1"][0, 0, 0, 1]) << 16
    index, sign = word >> 8 & 255, word >> 26 & 3
    magnitudes = np.frombuffer(codec.direction_table, "<f4")
    # Folded, by Eq. 5: |xi| = 1 - 0.2 and |eta| = 1 - 0.1; the best norm of a unit triplet is the largest.
    assert magnitudes[index & 7] == pytest.approx(0.8, abs=0.08)
    assert magnitudes[index >> 3 & 7] == pytest.approx(0.9, abs=0.08)
    assert index >> 6 == 3
    assert sign == 1


@pytest.mark.parametrize("arrangement", ["dense", "direct"])
@pytest.mark.parametrize("b_dir", [1, 3, 4, 8])
@pytest.mark.parametrize("b_norm", [0, 1, 2, 7, 8])
def test_streams_have_the_declared_layout(b_dir: int, b_norm: int, arrangement: str) -> None:
    codec = octahedral(80, b_dir=b_dir, b_norm=b_norm, arrangement=arrangement)
    streams = codec.encode(keys(2, 3, 5, 80))
    layout = codec.layout(2, 3, 5)
    names = {torch.uint16: "U16", torch.float16: "F16"}
    assert {name: (names[stream.dtype], tuple(stream.shape)) for name, stream in streams.items()} == {
        name: (declared.dtype, declared.shape) for name, declared in layout.items()
    }
    assert list(streams) == list(layout)
    codec.check(arrays(streams), "0.k")


@pytest.mark.parametrize("b_dir", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("b_norm", [0, 1, 2, 3, 8])
def test_both_arrangements_have_the_same_codes(b_dir: int, b_norm: int) -> None:
    dense = octahedral(64, b_dir=b_dir, b_norm=b_norm)
    direct = octahedral(64, b_dir=b_dir, b_norm=b_norm, arrangement="direct")
    streams = dense.encode(keys(1, 2, 9, 64))
    assert dense.has_same_codes(direct)
    converted = dense.repack(streams, direct)
    expected = direct.encode(keys(1, 2, 9, 64))
    assert list(converted) == list(expected)
    assert all(torch.equal(converted[name], expected[name]) for name in expected)
    assert torch.equal(direct.decode(converted), dense.decode(streams))
    back = direct.repack(converted, dense)
    assert all(torch.equal(back[name], streams[name]) for name in streams)


@pytest.mark.parametrize(("b_dir", "b_norm", "bits"), [(4, 2, 3.0), (3, 3, 3.0), (5, 1, 11 / 3)])
def test_nominal_bits_equal_the_papers_b(b_dir: int, b_norm: int, bits: float) -> None:
    assert octahedral(b_dir=b_dir, b_norm=b_norm).nominal_bits == pytest.approx(bits)


# Inputs


@pytest.mark.parametrize("dim", [*HEAD_DIMS, 4, 8, 1024])
def test_every_head_dim_is_decoded_accurately(dim: int) -> None:
    codec, x = octahedral(dim, b=5), keys(1, 2, 33, dim)
    error = (codec.decode(codec.encode(x)) - x).square().mean()
    assert error < 0.02


@pytest.mark.parametrize("dim", [5, 6, 7, 100])
def test_head_dims_without_a_rotation_are_encoded_without_one(dim: int) -> None:
    codec, x = octahedral(dim, b=6, rotation="none"), keys(1, 1, 20, dim)
    assert (codec.decode(codec.encode(x)) - x).square().mean() < 0.02


@pytest.mark.parametrize("norm", ["fp16", "fp32"])
def test_zero_tokens_among_others_decode_to_exact_zeros(norm: str) -> None:
    codec, x = octahedral(b=3, norm=norm), keys(1, 2, 6, 128)
    x[0, 1, 3] = 0
    decoded = codec.decode(codec.encode(x))
    assert torch.equal(decoded[0, 1, 3], torch.zeros(128))
    alone = codec.decode(codec.encode(keys(1, 2, 6, 128)))
    kept = torch.ones(1, 2, 6, dtype=torch.bool)
    kept[0, 1, 3] = False
    torch.testing.assert_close(decoded[kept], alone[kept])


@pytest.mark.parametrize("value", [1e-45, 1e-39, 1e-20, 3e-5, 1.0, 5e3, 1e18, 2.9e37], ids=str)
@pytest.mark.parametrize("pattern", ["constant", "one channel", "normal"])
def test_finite_values_of_any_size_are_encoded_with_fp32_norms(value: float, pattern: str) -> None:
    codec = octahedral(b=4, norm="fp32")
    patterns = {"constant": torch.ones(2, 128), "one channel": torch.eye(2, 128), "normal": keys(2, 128).clamp(-1, 1)}
    x = patterns[pattern][None, None] * value
    decoded = codec.decode(codec.encode(x))
    assert torch.isfinite(decoded).all()
    assert (decoded.double() - x.double()).norm() <= 0.2 * x.double().norm() + 2e-45 * 128


def test_one_block_may_contain_values_of_any_size() -> None:
    codec, x = octahedral(b=3, norm="fp32"), keys(1, 1, 4, 128)
    sizes = torch.tensor([1e-40, 1e-10, 1.0, 1e30])
    decoded = codec.decode(codec.encode(x * sizes[:, None]))
    assert (decoded / sizes[:, None] - x).square().mean() < 0.03


def test_errors_give_name_and_position_of_a_norm_beyond_binary16() -> None:
    x = keys(1, 2, 3, 128)
    x[0, 1, 2] *= 1e4
    with pytest.raises(ValueTooLarge, match=r"norm of a token at \[0, 1, 2\] is .*largest float16 value is 65504"):
        octahedral(b=3).encode(x)


@pytest.mark.parametrize("tokens", [0, 1, 4097])
@pytest.mark.parametrize("arrangement", ["dense", "direct"])
def test_encoding_tokens_together_or_one_by_one_agrees(tokens: int, arrangement: str) -> None:
    codec, x = octahedral(64, b=3, arrangement=arrangement), keys(1, 1, tokens, 64)
    streams = codec.encode(x)
    assert codec.decode(streams).shape == x.shape
    if tokens:
        last = codec.encode(x[:, :, -1:])
        assert all(torch.equal(streams[name][:, :, -1:], last[name]) for name in last)


def test_strided_input_is_encoded_like_contiguous_input() -> None:
    codec, x = octahedral(64, b=3), keys(2, 5, 3, 64).transpose(1, 2)
    streams, expected = codec.encode(x), codec.encode(x.contiguous())
    assert all(torch.equal(streams[name], expected[name]) for name in expected)


def test_the_input_is_not_modified() -> None:
    x = keys(1, 1, 9, 128)
    octahedral(b=3).encode(x)
    octahedral(b=3, rotation="none").encode(x)
    assert torch.equal(x, keys(1, 1, 9, 128))


@settings(deadline=None, max_examples=15)
@given(
    dim=st.sampled_from([4, 8, 64, 80, 96]),
    b_dir=st.integers(1, 6),
    b_norm=st.integers(0, 8),
    arrangement=st.sampled_from(["dense", "direct"]),
    norm=st.sampled_from(["fp16", "fp32"]),
    rotation=st.sampled_from(["none", "hadamard", "signed-hadamard"]),
    rounding=st.sampled_from(["scalar", "local2x2", "local3x3", "full"]),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(0, 5)),
    seed=st.integers(0, 2**64 - 1),
)
def test_reencoding_decoded_values_does_not_change_directions(
    dim: int, b_dir: int, b_norm: int, arrangement: str, norm: str, rotation: str, rounding: str, shape: tuple[int, int, int], seed: int
) -> None:
    codec = octahedral(dim, b_dir=b_dir, b_norm=b_norm, arrangement=arrangement, norm=norm, rotation=rotation, seed=seed, rounding=rounding)
    codec = replace(codec, norm_rule="norm")
    x = keys(*shape, dim, seed=seed % 1000)
    streams = codec.encode(x)
    codec.check(arrays(streams), "0.k")
    decoded = codec.decode(streams)
    assert decoded.shape == x.shape
    assert torch.isfinite(decoded).all()
    lengths = streams["norm"].float()
    torch.testing.assert_close(lengths, x.norm(dim=-1), rtol=1e-3, atol=1e-6)
    # Every triplet is coded on its own, so its error is at most its own length plus the largest norm level.
    assert (decoded.norm(dim=-1) <= lengths * codec.triplets**0.5 * 1.001).all()


# Parameters and stored bytes


def test_parameters_are_restored_from_the_header() -> None:
    codec = octahedral(80, b_dir=4, b_norm=1, arrangement="direct", norm="fp32", rotation="hadamard", seed=7, rounding="scalar")
    params = codec.params()
    assert "rounding" not in params
    assert params.pop("id") == "octahedral"
    found = Octahedral.from_params(params)
    assert found == codec
    assert found.rounding == "local3x3"
    x = keys(1, 1, 3, 80)
    assert torch.equal(found.decode(codec.encode(x)), codec.decode(codec.encode(x)))


def test_a_file_may_have_its_own_tables() -> None:
    codec = octahedral(64, b=2)
    own = replace(codec, direction_table=np.array([0.1, 0.3, 0.6, 1.0], "<f4").tobytes(), norm_table=np.array([0, 1], "<f4").tobytes())
    x = keys(1, 1, 3, 64)
    decoded = own.decode(own.encode(x))
    assert torch.isfinite(decoded).all()
    assert not torch.equal(decoded, codec.decode(codec.encode(x)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 3}, "dim is 3, expected 4 to 1024"),
        ({"dim": 1025}, "dim is 1025"),
        ({"b_dir": 0}, "b_dir is 0, expected 1 to 8"),
        ({"b_norm": 9}, "b_norm is 9, expected 0 to 8"),
        ({"arrangement": "packed"}, "arrangement is 'packed', expected one of dense, direct"),
        ({"norm": "bf16"}, "norm is 'bf16'"),
        ({"rotation_kind": "random"}, "rotation_kind is 'random'"),
        ({"rounding": "nearest"}, "rounding is 'nearest'"),
        ({"seed": -1}, "seed is -1"),
        ({"dim": 100}, "no Hadamard rotation for 100 channels"),
        ({"direction_table": b""}, "direction_table has 0 bytes, expected 16 for 4 float32 values"),
        ({"direction_table": np.array([0.1, 0.3, 0.3, 0.4], "<f4").tobytes()}, "the values of direction_table must be in"),
        ({"direction_table": np.array([0.1, 0.2, 0.3, 1.5], "<f4").tobytes()}, "the values of direction_table must be in"),
        ({"direction_table": np.array([-0.1, 0.2, 0.3, 0.5], "<f4").tobytes()}, "the values of direction_table must be in"),
        ({"norm_table": np.array([0.5, np.nan], "<f4").tobytes()}, "the values of norm_table must be in"),
        ({"norm_table": np.array([0.5, 0.2], "<f4").tobytes()}, "the values of norm_table must be in"),
        ({"fields": (("symbol", 3),)}, "fields must name the streams index, sign, but names symbol"),
        ({"fields": (("index", 4), ("sign", 0))}, "the number of fields is 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_parameters_out_of_range_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        replace(octahedral(b=2), **changes)


WRONG_OPTIONS = [{}, {"b": 0}, {"b": 8}, {"b_dir": 3}, {"b_norm": 1}, {"b": 3, "bits": 3}, {"b": 3, "norm": "fp8"}]


@pytest.mark.parametrize("words", WRONG_OPTIONS, ids=str)
def test_options_out_of_range_are_refused(words: dict[str, object]) -> None:
    with pytest.raises(InvalidParameter):
        octahedral(**words)


def test_explicit_bits_override_b() -> None:
    codec = octahedral(b=3, b_norm=1)
    assert (codec.b_dir, codec.b_norm) == (4, 1)


@pytest.mark.parametrize(
    ("words", "stream", "word", "bit"),
    [
        ({"b": 3, "arrangement": "direct"}, "symbol.1", 15, 4),
        ({"b": 3, "arrangement": "direct"}, "symbol.1", 11, 0),
        ({"b": 2, "arrangement": "direct"}, "symbol.1", 7, 8),
        ({"b": 3, "arrangement": "direct"}, "symbol.0", 0, None),
        ({"b": 3}, "sign.0", -1, 15),
    ],
    ids=["padding sign", "padding index", "padding in the odd plane", "nothing", "spare bit"],
)
def test_padding_and_unused_bits_are_zero(words: dict[str, object], stream: str, word: int, bit: int | None) -> None:
    codec = octahedral(**words)
    stored = arrays(codec.encode(keys(1, 1, 2, 128)))
    if bit is None:
        codec.check(stored, "0.k")
        return
    stored[stream][0, 0, 1, word] |= np.uint16(1 << bit)
    with pytest.raises(InvalidPayload, match=r"0\.k\."):
        codec.check(stored, "0.k")


def test_every_bit_of_the_direct_arrangement_is_used_or_checked() -> None:
    codec = octahedral(64, b=2, arrangement="direct")
    clean = codec.encode(torch.zeros(1, 1, 1, 64))
    names = [name for name in clean if name != "norm"]
    refused = 0
    for name in names:
        for word, bit in itertools.product(range(clean[name].shape[-1]), range(16)):
            stored = arrays(clean)
            stored[name][..., word] ^= np.uint16(1 << bit)
            try:
                codec.check(stored, "0.k")
            except InvalidPayload:
                refused += 1
    total = sum(16 * clean[name].shape[-1] for name in names)
    assert total - refused == 7 * codec.triplets


def test_a_non_finite_norm_is_refused() -> None:
    codec = octahedral(b=3)
    stored = arrays(codec.encode(keys(1, 1, 2, 128)))
    stored["norm"][0, 0, 1] = np.inf
    with pytest.raises(InvalidPayload, match=r"0\.k\.norm: the value at \[0, 0, 1\] is inf"):
        codec.check(stored, "0.k")


# The spec page


@pytest.mark.parametrize("dim", [80, 128])
@pytest.mark.parametrize("b_dir", [1, 4, 8])
def test_decoding_follows_the_specification_within_its_tolerance(dim: int, b_dir: int) -> None:
    codec = octahedral(dim, b_dir=b_dir, b_norm=3, norm="fp32")
    streams = codec.encode(keys(1, 1, 50, dim))
    digits = {stream: codec.unpack(stream, streams)[0].numpy() for stream in codec.packings()}
    index, sign = digits.get("index", np.zeros_like(digits["sign"])), digits["sign"]
    levels = 2 ** (b_dir - 1)
    norm_level = index // levels**2 if (2 * (b_dir - 1) + 3) in (1, 2, 4, 8, 16) else sign // 4
    magnitudes, norms = (np.frombuffer(table, "<f4").astype(np.float64) for table in (codec.direction_table, codec.norm_table))
    xi, eta = magnitudes[index % levels], magnitudes[index // levels % levels]
    signs = np.stack([1.0 - 2 * (sign & 1), 1.0 - (sign & 2), np.ones(sign.shape)])
    triplets = np.moveaxis(sphere_from_square(xi, eta) * signs * norms[norm_level], 0, -1)
    token_norms = streams["norm"].double().numpy()[..., None]
    frame = triplets.reshape(1, 1, 50, -1)[..., :dim] * token_norms
    rotation = codec.rotation.forward(torch.eye(dim)).double().numpy().T
    assert (np.abs(codec.decode(streams).numpy() - frame @ rotation) <= 2.0**-20 * token_norms).all()


def test_the_worked_example_of_the_specification_is_reproduced() -> None:
    (block,) = re.findall(r"```example\n(.*?)```", SPEC.read_text(encoding="utf-8"), re.DOTALL)
    lines = dict(line.split(": ", 1) for line in block.strip().splitlines())
    params = json.loads(lines["parameters"])
    tables = {name: bytes.fromhex(lines[name]) for name in ("direction_table", "norm_table")}
    dense = Octahedral.from_params(params | tables | {"arrangement": "dense", "fields": json.loads(lines["dense fields"])})
    direct = Octahedral.from_params(params | tables | {"arrangement": "direct", "fields": json.loads(lines["direct fields"])})
    assert dense == octahedral(params["dim"], b_dir=params["b_dir"], b_norm=params["b_norm"], rotation=params["rotation_kind"])
    x = torch.tensor(json.loads(lines["x"]))[None, None, None]
    decoded = torch.tensor(json.loads(lines["decoded"]))[None, None, None]
    for codec in (dense, direct):
        # The page's example stores the norm, as the papers do.
        streams = replace(codec, norm_rule="norm").encode(x)
        for name, stream in streams.items():
            assert stream.numpy().tobytes() == bytes.fromhex(lines[name]), name
        torch.testing.assert_close(codec.decode(streams), decoded, rtol=0, atol=2.0**-20 * float(x.norm()))
