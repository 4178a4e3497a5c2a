"""Sidecars with extreme contents and sizes are refused by position, or kept, saved, cut, and joined."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

import kvpack
from kvpack.cli import main
from kvpack.coding import encoding
from kvpack.formats.errors import KvpackError, ValueTooLarge
from kvpack.formats.sidecars import CodecWithSidecars
from support.caches import unpack_all
from support.strategies import create

if TYPE_CHECKING:
    from pathlib import Path

DIM = 64

RECIPES = {
    "every token raw": "kv=group:b=2,g=32,sinks=70,low_norm_tokens=70",
    "half of the chunks outliers": "kv=octahedral:b=3,channel_scale=fp16,outliers=1,sinks=300",
    "all": (
        "kv=group:b=2,g=32,rotation=hadamard,channel_scale=fp32,channel_order=u8,block_rotation=16,outliers=1,qjl=fp32,"
        "sinks=5,low_norm_tokens=3,raw_tokens=fp32;tail=32"
    ),
}


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def contents() -> dict[str, torch.Tensor]:
    found = {
        "one token": values(1, 1, 1, DIM),
        "zeros": torch.zeros(2, 2, 40, DIM),
        "one value": torch.full((1, 2, 70, DIM), 3.25),
        "denormal": values(2, 1, 70, DIM) * 1e-40,
        "small": values(2, 1, 70, DIM) * 1e-20,
    }
    found["constant channels"] = values(2, 2, 70, DIM)
    found["constant channels"][..., 3:5] = torch.tensor([7.0, 0.0])
    found["padding"] = values(1, 2, 70, DIM)
    found["padding"][:, :, 20:] = 0
    found["one chunk"] = torch.zeros(1, 2, 70, DIM)
    found["one chunk"][0, 1, 5, 8:12] = 100.0
    return found


CONTENTS = contents()


def same(found: kvpack.Cache, expected: kvpack.Cache) -> bool:
    return all(map(torch.equal, unpack_all(found), unpack_all(expected)))


@pytest.mark.scenario
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("x", CONTENTS.values(), ids=CONTENTS)
def test_any_values_survive_files_appends_and_conversions(x: torch.Tensor, recipe: str, tmp_path: Path) -> None:
    path = tmp_path / "x.kvpack"

    def saved(cache: kvpack.Cache, *, compress: bool = False) -> kvpack.Cache:
        kvpack.save(cache, path, compress=compress)
        loaded = kvpack.load(path)
        assert same(loaded, cache)
        return loaded

    cache = kvpack.pack([(x, x.flip(2))], recipe)
    assert all(torch.isfinite(side).all() for side in unpack_all(cache))
    saved(cache, compress=True)
    loaded = saved(cache)
    saved(loaded.append([(x[:, :, :33], x[:, :, :33])]))
    empty = saved(loaded[:, :0])
    assert empty.tokens == 0
    saved(empty.append([(x, x)]))
    for other in ("kivi-2", RECIPES["all"], "raw"):
        saved(saved(loaded.convert(other)).convert(recipe))
    if not cache[0].k.tail.shape[2]:
        saved(kvpack.concat([cache, kvpack.pack([(2 * x, x)], recipe, start=cache.stop)]))


def test_nothing_is_lost_if_every_token_is_raw() -> None:
    x = values(2, 2, 70, DIM).to(torch.bfloat16)
    cache = kvpack.pack([(x, x)], RECIPES["every token raw"])
    assert all(torch.equal(side, x.float()) for side in unpack_all(cache))


def test_zero_chunks_do_not_change_the_threshold_of_outliers() -> None:
    codec = create("scalar", DIM, b="2", outliers="3")
    x = values(1, 2, 40, DIM)
    padded = torch.cat([x, torch.zeros(1, 2, 200, DIM)], 2)
    alone, among = codec.encode(x), codec.encode(padded)
    assert torch.equal(among["outlier_flags.0"][:, :, :40], alone["outlier_flags.0"])
    assert torch.equal(among["outliers"], alone["outliers"])


def test_chunks_beyond_binary16_are_left_to_the_codec() -> None:
    x = values(1, 1, 40, DIM) * 1e-8
    x[0, 0, 7, 8:12] *= 100
    with_outliers, alone = (create("quaternion", DIM, s="24", r="6", norm="fp32", **words) for words in ({"outliers": "3"}, {}))
    streams = with_outliers.encode(x)
    assert streams["outliers"].shape[2] == 0
    assert torch.equal(with_outliers.decode(streams), alone.decode(alone.encode(x)))


HUGE = {
    "channel scale": ("octahedral", {"b": "1", "norm": "fp32", "channel_scale": "fp32"}),
    "qjl": ("scalar", {"b": "1", "norm": "fp32", "qjl": "fp32", "channel_scale": "fp16"}),
    "block rotation": ("angle", {"n": "4", "norm": "fp32", "block_rotation": "8"}),
}


@pytest.mark.parametrize(("codec_id", "words"), HUGE.values(), ids=HUGE)
def test_values_near_the_largest_are_refused_or_decode_to_finite_ones(codec_id: str, words: dict[str, str]) -> None:
    codec, messages = create(codec_id, 16, **words), []
    for seed in range(4):
        x = values(1, 1, 12, 16, seed=seed)
        x[..., 5] = x[..., 13] = 3.3e38 * x[..., 5].sign()
        try:
            decoded = codec.decode(codec.encode(x))
        except ValueTooLarge as error:
            messages.append(str(error))
        else:
            assert torch.isfinite(decoded).all()
    assert messages
    assert all("overflows float32 when " in message for message in messages)


PLACES = {
    "an outlier": (
        200,
        1e6,
        "outliers=3",
        ", tokens 128 to 255: the outlier at batch 1, head 2, token 72, channel 9 of the coded frame is 1e",
    ),
    "a raw token": (4, -7e4, "sinks=6", ", tokens 0 to 127: raw token 4 (sequence 1, head 2) has the value -70000 in channel 9"),
    "a raw token of a measured run": (
        150,
        -7e4,
        "sinks=200,channel_scale=fp16",
        ": tokens 128 to 255: raw token 22 (sequence 1, head 2) has the value -70000 in channel 9, but the largest fp16 value is 65504",
    ),
}


@pytest.mark.parametrize(("token", "value", "words", "message"), PLACES.values(), ids=PLACES)
def test_messages_give_the_position(token: int, value: float, words: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BLOCK_VALUES", 1)
    x = values(2, 3, 300, DIM)
    x[1, 2, token, 9] = value
    dtype = ",raw_tokens=fp16" if "sinks" in words else ""
    with pytest.raises(ValueTooLarge) as caught:
        kvpack.pack([(values(2, 3, 300, DIM), x)], f"k=raw;v=group:b=2,g=32,{words}{dtype}")
    assert str(caught.value).startswith(f"layers[0].v{message}")


def test_raw_tokens_are_replaced_within_their_token_group() -> None:
    x = values(1, 1, 64, DIM) + torch.arange(2).repeat_interleave(32)[None, None, :, None] * 100
    codec = create("group", DIM, b="2", g="32", sinks="3")
    assert isinstance(codec, CodecWithSidecars)
    streams, alone = codec.encode(x), codec.codec.encode(x)
    groups = streams["scales"][:, :, :, :, 0]
    assert (groups <= alone["scales"][:, :, :, :, 0]).all(), "a raw token widened its group"


def test_the_command_line_supports_sidecars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = values(1, 2, 80, DIM)
    cache = kvpack.pack([(x, x)], RECIPES["all"])
    for name, part in (("whole", cache), ("empty", cache[:, :0])):
        path = tmp_path / f"{name}.kvpack"
        kvpack.save(part, path)
        assert main(["verify", str(path)]) == 0
        assert main(["convert", str(path), str(tmp_path / "other.kvpack"), RECIPES["every token raw"], "--force"]) == 0
        assert main(["verify", str(tmp_path / "other.kvpack")]) == 0
        capsys.readouterr()
        assert main(["inspect", str(path), "--json"]) == 0
        codec = json.loads(capsys.readouterr().out)["codecs"][0]
        assert codec["raw_tokens"] == "fp32"
        assert codec["block_rotation"] == 16
    data = bytearray((tmp_path / "whole.kvpack").read_bytes())
    data[-1] ^= 1
    (tmp_path / "whole.kvpack").write_bytes(data)
    assert main(["verify", str(tmp_path / "whole.kvpack")]) == 1


def test_another_recipe_with_the_same_codec_keeps_packed_values() -> None:
    x = values(1, 2, 80, DIM)
    cache = kvpack.pack([(x, x)], "kv=scalar:b=2,outliers=3")
    assert cache.convert("kv=scalar:b=2,outliers=9")[0].k.runs[0] is cache[0].k.runs[0]
    with pytest.raises(KvpackError, match="dim is 62, expected a multiple of 4"):
        kvpack.pack([(x[..., :62], None)], "kv=scalar:b=2,rotation=none,outliers=3")
