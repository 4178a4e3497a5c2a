"""Tests of the trellis codec: paths against all strings, windows against the spec page, accuracy, and edge cases."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpack.formats.errors import InvalidParameter, ValueTooLarge
from kvpack.formats.options import Options
from kvpack.formats.trellis import STATE_BITS, Trellis, nearest_path, unit_table, viterbi
from support.strategies import CONTENTS, check_round_trip, codecs, contents, tensors

SPEC = Path(__file__).parents[2] / "spec" / "codecs" / "trellis.md"
# Of a normal value of variance 1, by 256 and 1,024 states (spec/codecs/trellis.md).
ERRORS = {1: (0.284, 0.277), 2: (0.0780, 0.0741), 3: (0.0217, 0.0199), 4: (0.0061, 0.0053)}


def trellis(dim: int = 128, **words: object) -> Trellis:
    return Trellis.create(dim, "k", Options("trellis", {name: str(value) for name, value in words.items()}))


def keys(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def example_table() -> bytes:
    """Return the table of the spec page's example."""
    return struct.pack("<256e", *((37 * w % 256 - 128) / 256 for w in range(256)))


@pytest.mark.parametrize("bits", ERRORS)
@pytest.mark.parametrize("state_bits", STATE_BITS)
def test_the_error_matches_the_specification(bits: int, state_bits: int) -> None:
    codec = trellis(b=bits, states=1 << state_bits, norm_rule="norm")
    x = keys(1, 1, 150, 128)
    error = (codec.decode(codec.encode(x)) - x).square().mean().item()
    assert error == pytest.approx(ERRORS[bits][STATE_BITS.index(state_bits)], rel=0.05)


def test_more_states_and_more_bits_reduce_the_error() -> None:
    x = keys(1, 1, 40, 64)
    errors = {}
    for bits in range(1, 5):
        for states in (256, 1024):
            codec = trellis(64, b=bits, states=states, norm_rule="norm")
            errors[bits, states] = (codec.decode(codec.encode(x)) - x).square().mean().item()
    assert all(errors[bits, 1024] < errors[bits, 256] for bits in range(1, 5))
    assert all(errors[bits + 1, 256] < errors[bits, 1024] for bits in range(1, 4))


def test_the_search_finds_the_best_string_with_a_given_end() -> None:
    table = torch.frombuffer(bytearray(unit_table(8, 2, 8)), dtype=torch.float16).float()
    codec = trellis(8, b=2, states=256, rotation="none")
    words = torch.arange(1 << 16, dtype=torch.int32)
    values = table[codec.windows(words[:, None])]
    x = torch.nn.functional.normalize(keys(20, 8), dim=-1)
    for shared in (0, 17, 63):
        best = (x[:, None] - values[words >> 10 == shared]).square().sum(-1).amin(-1)
        path = viterbi(x, table, 2, torch.full((20,), shared))
        torch.testing.assert_close((x - table[path]).square().sum(-1), best, rtol=2.0**-16, atol=0)


def test_a_path_is_nearly_the_best_string() -> None:
    """Only the bits that windows share across the ends of the string are chosen by a heuristic."""
    table = torch.frombuffer(bytearray(unit_table(64, 2, 8)), dtype=torch.float16).float()
    x = torch.nn.functional.normalize(keys(16, 64), dim=-1)
    ends = (viterbi(x, table, 2, torch.full((16,), shared)) for shared in range(64))
    best = torch.stack([(x - table[path]).square().sum(-1) for path in ends]).amin(0)
    found = (x - table[nearest_path(x, table, 2)]).square().sum(-1)
    assert found.mean() < 1.01 * best.mean()


@pytest.mark.parametrize(("bits", "state_bits", "dim"), [(1, 10, 16), (2, 8, 24), (3, 10, 16), (4, 8, 20), (2, 10, 128)])
def test_each_window_is_the_previous_one_shifted(bits: int, state_bits: int, dim: int) -> None:
    codec = trellis(dim, b=bits, states=1 << state_bits)
    streams = codec.encode(keys(1, 2, 3, dim))
    windows = codec.windows(codec.digits(streams)[0])
    assert torch.equal(windows & (1 << state_bits - bits) - 1, windows.roll(1, -1) >> bits)


def test_tokens_are_decoded_independently() -> None:
    codec = trellis(b=2)
    streams = codec.encode(keys(1, 2, 9, 128))
    alone = {name: stream[:, :, 4:5] for name, stream in streams.items()}
    assert torch.equal(codec.decode_frame(alone), codec.decode_frame(streams)[:, :, 4:5])


def test_products_are_unbiased() -> None:
    x, other = keys(1, 1, 200, 64), keys(1, 1, 200, 64, seed=1)
    other = other + x
    shrunk, kept = ((trellis(64, b=1, states=256, norm_rule=rule), rule) for rule in ("norm", "unbiased"))
    ratios = {rule: ((codec.decode(codec.encode(x)) * other).sum() / (x * other).sum()).item() for codec, rule in (shrunk, kept)}
    assert ratios["norm"] < 0.9
    assert ratios["unbiased"] == pytest.approx(1, abs=0.03)


@given(codec=codecs("trellis"), data=st.data())
@settings(deadline=None, max_examples=15)
def test_values_survive_a_round_trip_within_the_bound(codec: Trellis, data: st.DataObject) -> None:
    check_round_trip(codec, data.draw(tensors(codec.dim, max_tokens=20)))


@pytest.mark.parametrize("kind", CONTENTS)
def test_unusual_values_are_decoded_within_the_bound(kind: str) -> None:
    check_round_trip(trellis(32, b=2, states=256, norm="fp32"), contents(kind, (1, 2, 5, 32), 1))


def test_values_beyond_the_range_of_norms_are_refused() -> None:
    with pytest.raises(ValueTooLarge, match="norm of a token"):
        trellis(16, b=1, states=256).encode(torch.full((1, 1, 1, 16), 3e4))


@pytest.mark.parametrize(
    ("dim", "words", "message"),
    [
        (20, {"b": 1}, "20 channels of 1 bits take 20 bits per token, expected a multiple of 16"),
        (64, {"b": 5}, "b"),
        (64, {}, "b"),
        (64, {"b": 2, "states": 512}, "states"),
        (64, {"b": 2, "norm": "bf16"}, "norm"),
    ],
)
def test_invalid_options_are_refused(dim: int, words: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        trellis(dim, **words)


@pytest.mark.parametrize("table", [bytes(511), bytes(514), struct.pack("<e", 1.001) + bytes(510), b"\x00\x7e" + bytes(510)])
def test_invalid_tables_are_refused(table: bytes) -> None:
    with pytest.raises(InvalidParameter, match=r"table"):
        replace(trellis(64, b=2, states=256), table=table)


def test_the_worked_example_of_the_specification_is_reproduced() -> None:
    (block,) = re.findall(r"```example\n(.*?)```", SPEC.read_text(encoding="utf-8"), re.DOTALL)
    lines = dict(line.split(": ", 1) for line in block.strip().splitlines())
    codec = Trellis.from_params(json.loads(lines["parameters"]) | {"table": example_table()})
    words = torch.frombuffer(bytearray.fromhex(lines["codes.0"]), dtype=torch.uint16).view(1, 1, 1, 1)
    streams = {"codes.0": words, "norm": torch.frombuffer(bytearray.fromhex(lines["norm"]), dtype=torch.float16).view(1, 1, 1)}
    assert codec.windows(codec.digits(streams)[0]).flatten().tolist() == json.loads(lines["states"])
    assert codec.decode(streams).flatten().tolist() == json.loads(lines["decoded"])
