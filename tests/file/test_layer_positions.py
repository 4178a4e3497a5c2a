"""The positions that each layer records are preserved from a model's cache to a file and back."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import kvpack
from kvpack import cli
from kvpack.cache.layer import Layer
from kvpack.file import container
from kvpack.formats.errors import InvalidParameter, LimitExceeded, OutOfBounds
from support.caches import random_pairs, unpack_all


def sliding(tokens: int = 70, held: int = 22, *, start: int = 5, recipe: str = "kivi-2;raw=0") -> kvpack.Cache:
    """Return a cache of three layers, the second of which holds only the newest ``held`` tokens."""
    pairs = random_pairs(3, tokens)
    full = kvpack.pack(pairs, recipe, start=start)
    newest = kvpack.pack([tuple(x[:, :, tokens - held :] for x in pairs[1])], recipe)[0]
    return replace(full, layers=(full[0], replace(newest, skipped=tokens - held), full[2]))


def test_a_cache_spans_the_tokens_that_its_layers_saw() -> None:
    cache = sliding()
    assert (cache.tokens, cache.start, cache.stop) == (70, 5, 75)
    assert [(layer.skipped, layer.tokens, layer.seen_tokens) for layer in cache] == [(0, 70, 70), (48, 22, 70), (0, 70, 70)]
    assert [cache.positions(number) for number in range(3)] == [(5, 75), (53, 75), (5, 75)]
    alone = replace(cache, layers=cache.layers[1:2])
    assert (alone.tokens, alone.stop) == (70, 75), "the cache does not span the tokens that its sliding layers saw"
    assert repr(alone) == "Cache('kv=group:b=2', 1 layers, tokens [5:75], some layers [53:75], model {})"


@pytest.mark.parametrize(("sides", "skipped"), [(1, -1), (0, 1)], ids=["negative", "without sides"])
def test_a_token_count_that_matches_no_layer_is_refused(sides: int, skipped: int) -> None:
    side = sliding()[0].k
    with pytest.raises(InvalidParameter, match=f"skipped is {skipped}"):
        kvpack.Cache((Layer(side if sides else None, None, skipped=skipped),), "")


def test_the_whole_cache_is_a_slice_of_itself() -> None:
    cache = sliding()
    for whole in (cache[:, :70], cache[:, :], cache[:, :70]):
        assert [layer.skipped for layer in whole] == [0, 48, 0]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(unpack_all(whole), unpack_all(cache), strict=True))


def test_tokens_that_every_layer_stores_can_be_sliced() -> None:
    cache = sliding(recipe="bf16")
    cut = cache[:, 50:65]
    assert (cut.start, cut.stop, [layer.skipped for layer in cut]) == (55, 70, [0, 0, 0])
    for mine, pair in zip(cut, random_pairs(3, 70), strict=True):
        assert torch.equal(mine.unpack()[0], pair[0][:, :, 50:65])


@pytest.mark.parametrize(("start", "stop"), [(0, 69), (0, 48), (0, 0), (10, 70), (47, 48), (10, 20)])
def test_dropped_tokens_cannot_be_sliced(start: int, stop: int) -> None:
    message = (
        rf"tokens \[{start}:{stop}\] were requested from layers\[1\], which has only positions \[53:75\], not \[{5 + start}:{5 + stop}\]"
    )
    with pytest.raises(OutOfBounds, match=message):
        sliding(recipe="bf16")[:, start:stop]
    with pytest.raises(OutOfBounds, match=rf"tokens \[{start}:{stop}\] are out of range: the layer has only tokens \[48:70\]"):
        sliding()[1][start:stop]


def test_slices_must_be_within_the_cache() -> None:
    for start, stop in ((0, 71), (-1, 3), (8, 3)):
        with pytest.raises(OutOfBounds, match=rf"tokens \[{start}:{stop}\] are out of range: the cache has 70"):
            sliding()[:, start:stop]


def test_a_layer_without_sides_is_part_of_every_slice() -> None:
    cache = replace(sliding(), layers=(*sliding().layers[:1], Layer(None, None)))
    assert [layer.tokens for layer in cache[:, 32:40]] == [8, 0]
    assert cache[:, 32:40].append([*random_pairs(1, 3), (None, None)]).tokens == 11


def test_every_operation_keeps_the_layer_positions() -> None:
    cache = sliding()
    pairs = random_pairs(3, 4, seed=1)
    for changed, seen in (
        (cache.append(pairs), 74),
        (cache.convert("octopus-3"), 70),
        (cache.convert("kivi-2;raw=0;tail=32"), 70),
        (cache.to("cpu"), 70),
        (kvpack.concat([cache]), 70),
        (kvpack.concat([cache, kvpack.pack(pairs, "kivi-2;raw=0", start=75)]), 74),
    ):
        assert [(layer.skipped, layer.seen_tokens) for layer in changed] == [(0, seen), (48, seen), (0, seen)]
        assert (changed.start, changed.stop) == (5, 5 + seen)
    assert [(part.skipped, part.tokens) for part in (cache[1][:], cache[1][48:70], cache[1][48:60])] == [(48, 22), (0, 22), (0, 12)]
    for part in (slice(0, 60), slice(48, 71), slice(-3, None), slice(0, 70, 2), 1):
        with pytest.raises(OutOfBounds, match=r"out of range: the layer has only tokens \[48:70\]|index a layer by tokens"):
            cache[1][part]  # type: ignore[index]


def test_a_layer_that_ends_before_the_cache_cannot_be_continued() -> None:
    cache = sliding()
    short = replace(cache, layers=(cache[0], replace(cache[1], skipped=40), cache[2]))
    message = r"layers\[1\] ends at position 67.* the cache ends at 75"
    pairs = random_pairs(3, 4, seed=1)
    with pytest.raises(InvalidParameter, match=message):
        short.append(pairs)
    following = kvpack.pack(pairs, "kivi-2;raw=0", start=75)
    with pytest.raises(InvalidParameter, match=message):
        kvpack.concat([short, following])
    with pytest.raises(InvalidParameter, match=message):
        kvpack.concat([kvpack.pack(random_pairs(3, 5), "kivi-2;raw=0"), short])


def test_all_layers_must_be_given_the_same_tokens() -> None:
    pairs = random_pairs(3, 4)
    with pytest.raises(InvalidParameter, match=r"different numbers of tokens \(layers\[0\] 4 and layers\[2\] 3\)"):
        sliding().append([pairs[0], pairs[1], tuple(x[:, :, :3] for x in pairs[2])])


def test_a_cache_with_dropped_tokens_cannot_be_appended_to_another() -> None:
    with pytest.raises(
        InvalidParameter, match=r"layers\[1\] of the cache that starts at position 5 has only 22 of its 70 tokens: join only"
    ):
        kvpack.concat([kvpack.pack(random_pairs(3, 5), "kivi-2;raw=0"), sliding()])


def test_a_file_keeps_layer_positions(tmp_path: Path) -> None:
    cache, path = sliding(), tmp_path / "cache.kvpack"
    assert kvpack.save(cache, path) == cache.nbytes
    header = container.open_file(path).header
    assert (header.required, header.start, header.starts) == (("layer-positions",), 5, (5, 53, 5))
    loaded = kvpack.load(path)
    assert [loaded.positions(number) for number in range(3)] == [(5, 75), (53, 75), (5, 75)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(unpack_all(loaded), unpack_all(cache), strict=True))
    kvpack.save(loaded, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_equal_layer_positions_need_no_feature(tmp_path: Path) -> None:
    kvpack.save(kvpack.pack(random_pairs(2, 40), "kivi-2;raw=0", start=7), tmp_path / "cache.kvpack")
    header = container.open_file(tmp_path / "cache.kvpack").header
    assert (header.required, dict(header.ignorable), header.starts) == ((), {}, (7, 7))


def test_invalid_layer_positions_are_not_written(tmp_path: Path) -> None:
    cache = sliding()
    far = replace(cache, layers=(replace(cache[0], skipped=2**40 - 5),))
    with pytest.raises(LimitExceeded, match=r"the first position of layers\[0\] is 1099511627776, expected at most 1099511627775"):
        kvpack.save(far, tmp_path / "cache.kvpack")
    assert list(tmp_path.iterdir()) == []


def test_inspect_shows_different_layer_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cache.kvpack"
    kvpack.save(sliding(), path)
    assert cli.main(["inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("tokens 5 to 75, ") for line in lines)
    rows = [line.split() for line in lines if line.split()[1:2] in (["k"], ["v"])]
    assert [" ".join(row).count(" 53 to 75 ") for row in rows] == [0, 0, 1, 1, 0, 0]
    assert [" ".join(row).count(" 5 to 75 ") for row in rows] == [1, 1, 0, 0, 1, 1]
    cli.main(["inspect", "--json", str(path)])
    summary = json.loads(capsys.readouterr().out)
    assert [[(side["start"], side["stop"]) for side in layer.values()] for layer in summary["layers"]] == [
        [(5, 75)] * 2,
        [(53, 75)] * 2,
        [(5, 75)] * 2,
    ]
    kvpack.save(kvpack.pack(random_pairs(2, 40), "kivi-2;raw=0", start=7), path)
    cli.main(["inspect", str(path)])
    assert "positions" not in capsys.readouterr().out


def test_a_layer_is_exported_with_its_dropped_tokens() -> None:
    pairs = random_pairs(2, 40)
    newest = tuple(x[:, :, 30:] for x in pairs[1])
    cache = kvpack.pack([pairs[0], (*newest, 30)], "kv=raw:dtype=bf16", start=5)
    assert [cache.positions(number) for number in range(2)] == [(5, 45), (35, 45)]
    assert torch.equal(cache[1].unpack()[1], newest[1])
    for skipped, shown in ((-1, "-1"), (True, "True"), (2**40, "1099511627776"), (None, "NoneType"), (torch.tensor(16), "Tensor")):
        with pytest.raises(InvalidParameter, match=rf"layers\[0\]: skipped \(the number of tokens dropped before k and v\) is {shown}"):
            kvpack.pack([(*newest, skipped)], "bf16")


@pytest.mark.parametrize("queries", [1, 3])
def test_attention_after_dropped_tokens_needs_a_window_that_is_stored(queries: int) -> None:
    whole, newest = kvpack.pack(random_pairs(3, 70), "bf16")[1], sliding(recipe="bf16")[1]
    q = torch.randn(1, 4, queries, 64, generator=torch.Generator().manual_seed(0))
    largest = 22 - queries + 1
    for window in (1, largest):
        found, expected = (kvpack.attend(q, layer, sliding_window=window) for layer in (newest, whole))
        torch.testing.assert_close(found, expected)
    held = r"the layer has only tokens \[48:70\] of its cache, but "
    for options, message in (
        ({}, f"the query at token {70 - queries} attends to all earlier tokens: pass"),
        ({"causal": False}, f"the query at token {70 - queries} attends to all earlier tokens"),
        ({"sliding_window": largest + 1}, f"the query at token {70 - queries} attends to {largest + 1} tokens"),
        ({"sliding_window": 4, "lengths": [20]}, "lengths= counts from the cache's first token"),
    ):
        with pytest.raises(InvalidParameter, match=held + message):
            kvpack.attend(q, newest, **options)


def test_unpack_and_pack_keep_layer_positions(tmp_path: Path) -> None:
    cache = replace(sliding(recipe="bf16"), layers=(*sliding(recipe="bf16").layers, Layer(None, None)))
    path, plain, again = tmp_path / "cache.kvpack", tmp_path / "dense.safetensors", tmp_path / "again.kvpack"
    kvpack.save(cache, path)
    assert cli.main(["unpack", str(path), str(plain)]) == 0
    assert cli.main(["pack", str(plain), str(again), "--recipe", "bf16"]) == 0
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ({"range": 3, "layers": [3]}, r"has layer 1, expected some of the 1 layers in its metadata"),
        ({"range": 3, "layers": [3, 2]}, "layer 1 starts at position 2, expected 3 to"),
        ({"range": 3, "layers": [3, 2**40]}, "layer 1 starts at position 1099511627776"),
        ({"range": 3, "layers": [3, 3, 4]}, "layer 2 starts at position 4, expected 3, because it has no keys and values"),
        ({"range": 3, "layers": [3, True]}, "metadata 'kvpack.unpacked' is"),
        ({"range": 3}, "metadata 'kvpack.unpacked' is"),
        ({"range": -1, "layers": [-1, -1]}, "start is -1, expected an integer from 0"),
    ],
    ids=["fewer layers", "before the range", "beyond all positions", "without tensors", "boolean", "no layers", "negative"],
)
def test_inconsistent_layer_positions_are_refused(start: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {f"{number}.k": torch.zeros(1, 1, 4, 64) for number in range(2)}
    save_file(tensors, tmp_path / "dense", {"kvpack.unpacked": json.dumps({"start": start, "model": {}})})
    assert cli.main(["pack", str(tmp_path / "dense"), str(tmp_path / "out"), "--recipe", "bf16"]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_store_entry_with_other_layer_positions_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is from a writer without checks. Each layer has 32 tokens, but those of the second layer are at positions 32 to 63."""
    store = kvpack.Store(tmp_path, kvpack.Identity("model", "bf16", weights="w"), chunk=32)
    ids, whole = list(range(32)), kvpack.pack(random_pairs(2, 32), "bf16")
    moved = replace(whole, layers=(whole[0], replace(whole[1], skipped=32)))
    monkeypatch.setattr("kvpack.store.store.check_cache", lambda *_: None)
    monkeypatch.setattr("kvpack.store.store.check_ids", lambda *_: None)
    monkeypatch.setattr("kvpack.store.store.check_complete", lambda *_: None)
    monkeypatch.setattr(kvpack.Cache, "__getitem__", lambda *_: moved)
    assert store.save(ids, moved) == 32
    monkeypatch.undo()
    assert store.load(ids) == (0, None)
    assert store.counters()["faults"] == {"load InvalidHeader": 1}
