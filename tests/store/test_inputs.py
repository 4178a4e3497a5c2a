"""Inputs other than token ids are part of a chunk's key, or refused. A cache is stored only under its own tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import kvpack
from kvpack import cli
from kvpack.file import container
from kvpack.file.inputs import Inputs
from kvpack.formats.errors import InvalidHeader, InvalidParameter
from kvpack.store import catalog
from kvpack.store.entries import FEATURE, ChunkFields
from kvpack.store.keys import token_bytes
from support.store_caches import CHUNK, IDENTITY, cache, entries, is_same_prefix, open_store, prompt, rewrite, save

IMAGE = hashlib.sha256(b"an image").digest()


def computed(tokens: int, ids: list[int] | None = None, *undetermined: tuple[str, int]) -> kvpack.Cache:
    """Return a cache with recorded inputs."""
    inputs = Inputs(token_bytes(ids or []), tuple(text for text, _ in undetermined), tuple(start for _, start in undetermined))
    return dataclasses.replace(cache(tokens), inputs=inputs)


def test_a_digest_is_part_of_the_key_of_its_chunk_and_all_later_ones(tmp_path: Path) -> None:
    store, ids = open_store(tmp_path), prompt(4)
    plain, given = store.keys(ids), store.keys(ids, inputs=[b"", IMAGE, b"", b""])
    assert given[0] == plain[0]
    assert not set(given[1:]) & set(plain)
    assert store.keys(ids, inputs=[b""] * 4) == store.keys(ids, inputs=[b""] * 5) == plain
    other = [store.keys(ids, inputs=digests)[3] for digests in ([IMAGE, b"", b"", b""], [b"", b"", IMAGE, b""], [b"", IMAGE, IMAGE, b""])]
    assert len({given[3], plain[3], *other}) == 5


def test_prefixes_with_equal_ids_and_different_inputs_are_separate(tmp_path: Path) -> None:
    store, ids = open_store(tmp_path), prompt(3)
    one, two = [b"", IMAGE, b""], [b"", b"another", b""]
    first, second = cache(len(ids)), cache(len(ids), seed=1)
    assert store.save(ids, first, inputs=one) == 3 * CHUNK
    assert store.match(ids) == store.match(ids, inputs=two) == CHUNK
    assert store.save(ids, second, inputs=two) == 3 * CHUNK
    for digests, whole in ((one, first), (two, second)):
        n, found = store.load(ids, inputs=digests)
        assert n == 3 * CHUNK
        assert found is not None
        assert is_same_prefix(found[:, CHUNK:], whole[:, CHUNK:])
    assert store.pin(ids, inputs=one) == 3 * CHUNK
    assert not store.unpin(ids, inputs=two)
    assert store.unpin(ids, inputs=one)
    assert store.delete(ids, start=CHUNK, inputs=one) == 2
    assert store.match(ids, inputs=two) == 3 * CHUNK
    assert all(why is None for _, why in catalog.verify(store._backend))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([b""], "inputs has 1 digests, expected 2 for 69 token ids in chunks of 32"),
        ([b""] * 4, "inputs has 4 digests"),
        ([b"", b"x" * 65], r"inputs\[1\] is 65 bytes, expected a digest of at most 64 bytes"),
        ([b"", "digest"], r"inputs\[1\] is of type str"),
        (b"ab", "inputs is 2 bytes, expected a list of digests"),
        (7, "inputs is 7, expected a list of digests"),
    ],
    ids=["few", "many", "long", "text", "bytes", "number"],
)
def test_invalid_inputs_are_refused(inputs: Any, message: str, tmp_path: Path) -> None:
    store, ids = open_store(tmp_path), prompt(2)
    for call in (store.keys, store.match, store.load, store.pin, store.unpin, store.delete):
        with pytest.raises(InvalidParameter, match=message):
            call(ids, inputs=inputs)
    with pytest.raises(InvalidParameter, match=message):
        store.save(ids, cache(len(ids)), inputs=inputs)
    assert entries(tmp_path) == []


def test_undetermined_inputs_require_the_inputs_argument(tmp_path: Path) -> None:
    store, ids = open_store(tmp_path), prompt(3)
    made = computed(len(ids), ids, ("tokens 40 to 47 came from embeddings, not from token ids", 40))
    with pytest.raises(InvalidParameter, match=r"tokens 40 to 47 came from embeddings.*Pass inputs=.*Chunk 1 needs a digest"):
        store.save(ids, made)
    with pytest.raises(InvalidParameter, match="Chunk 1 needs a digest"):
        store.save(ids, made, inputs=[IMAGE, b"", b""])
    assert entries(tmp_path) == []
    assert store.save(ids, made, inputs=[b"", IMAGE, b""]) == 3 * CHUNK
    assert store.match(ids) == CHUNK
    shifted = computed(len(ids), ids, ("tokens 0 to 100 have positions that do not count from 0", 0))
    with pytest.raises(InvalidParameter, match="Chunk 0 needs a digest"):
        store.save(ids, shifted)
    assert open_store(tmp_path / "begin").save(ids[:CHUNK], made[:, :CHUNK]) == CHUNK, "later inputs changed the key of an earlier chunk"


def test_ids_that_contradict_the_cache_are_refused(tmp_path: Path) -> None:
    store, ids = open_store(tmp_path), prompt(2)
    other = [*ids[:37], 7, *ids[38:]]
    with pytest.raises(InvalidParameter, match=rf"token 37 of the cache was computed from id {ids[37]}, but token_ids\[37\] is 7"):
        store.save(other, computed(len(ids), ids))
    with pytest.raises(InvalidParameter, match="token 37 of the cache"):
        store.save(other, computed(len(ids), ids[:50]))
    assert entries(tmp_path) == []
    partly = computed(len(ids), ids[:10])
    with pytest.raises(
        InvalidParameter, match=r"tokens 10 to 68 came without their token ids.*replace\(cache, inputs=kvpack.Inputs\("
    ):
        store.save(ids, partly)
    assert store.save(ids, dataclasses.replace(partly, inputs=Inputs(token_bytes(ids)))) == 2 * CHUNK


def test_a_cache_with_another_number_of_tokens_is_refused(tmp_path: Path) -> None:
    store, ids = open_store(tmp_path), prompt(4)
    for count, tokens in ((133, 64), (64, 133), (133, 132), (132, 133)):
        with pytest.raises(InvalidParameter, match=rf"token_ids has {count} ids, but the cache has {tokens} tokens.*token_ids\[:n\]"):
            store.save(ids[:count], cache(tokens))
        with pytest.raises(InvalidParameter, match=f"token_ids has {count} ids, but the cache has {tokens} tokens"):
            store.save(ids[:count], computed(tokens, ids[: tokens - 1]))
    assert entries(tmp_path) == []


def test_a_cache_with_known_ids_is_stored_up_to_the_shorter_of_both(tmp_path: Path) -> None:
    store, ids = open_store(tmp_path), prompt(4)
    assert store.save(ids, computed(132, ids[:132])) == 4 * CHUNK
    assert open_store(tmp_path / "2").save(ids[: 2 * CHUNK + 3], computed(133, ids)) == 2 * CHUNK
    assert open_store(tmp_path / "3").save(ids, computed(2 * CHUNK, ids[: 2 * CHUNK])) == 2 * CHUNK


def test_a_window_that_dropped_tokens_is_refused(tmp_path: Path) -> None:
    """Otherwise, the newest 512 of 1,200 tokens would be stored as the first ones."""
    ids = list(range(1200))
    with pytest.raises(InvalidParameter, match=r"1200 ids, but the cache has 512 tokens.*sliding window"):
        open_store(tmp_path).save(ids, cache(512))


def test_a_loaded_cache_knows_its_inputs(tmp_path: Path) -> None:
    store, ids = open_store(tmp_path), prompt(3)
    save(store, ids)
    _, found = store.load(ids)
    assert found is not None
    assert found.inputs == Inputs(token_bytes(ids[: 3 * CHUNK]))
    with pytest.raises(InvalidParameter, match="token 0 of the cache"):
        store.save(prompt(3, seed=1)[: 3 * CHUNK], found)
    digests = [b"", IMAGE, b""]
    store.save(ids, cache(len(ids)), inputs=digests)
    _, found = store.load(ids, inputs=digests)
    assert found is not None
    with pytest.raises(InvalidParameter, match=r"tokens 32 to 63 were stored with a digest of other inputs.*Pass inputs="):
        store.save(ids, found)
    assert open_store(tmp_path / "other").save(ids, found, inputs=digests) == 3 * CHUNK


def test_verify_recomputes_keys_from_inputs(tmp_path: Path) -> None:
    store, ids = open_store(tmp_path), prompt(2)
    store.save(ids, cache(len(ids)), inputs=[IMAGE, b""])
    path = entry_of_key(store, store.keys(ids, inputs=[IMAGE, b""])[0])
    with open(path, "rb") as file:
        opened = container.open_bytes(file.read())
    named = ChunkFields.from_bytes(opened.header.ignorable[FEATURE], "here")
    assert (named.inputs, named.ids) == (IMAGE, token_bytes(ids[:CHUNK]))
    swapped = opened.header.ignorable[FEATURE].replace(IMAGE, b"z" * 32)
    rewrite(path, {FEATURE: swapped})
    (wrong,) = [why for _, why in catalog.verify(store._backend) if why is not None]
    assert "its parent, ids and inputs give" in str(wrong)


@pytest.mark.parametrize("feature", [b"", b"x" * 80, b"x" * 80 + b"\x01", b"x" * 80 + b"\x41" + b"x" * 69, b"x" * 80 + b"\x00" + b"x" * 7])
def test_a_truncated_feature_is_refused(feature: bytes) -> None:
    with pytest.raises(InvalidHeader, match=f"here: the {len(feature)} bytes of feature 'prefix-store-2'"):
        ChunkFields.from_bytes(feature, "here")


def test_inputs_are_exported_and_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, ids, digests = open_store(tmp_path / "store"), prompt(3), [b"", IMAGE, b"more"]
    whole = cache(len(ids))
    store.save(ids, whole, inputs=digests)
    key, file = store.keys(ids, inputs=digests)[2].hex(), tmp_path / "out.kvpack"
    assert cli.main(["store", "export", str(tmp_path / "store"), key, str(file)]) == 0
    features = container.open_file(file).header.ignorable
    assert list(features) == ["token-chunks.0"], "an importer without support for inputs found token ids"
    new = tmp_path / "new"
    words = ["store", "import", str(new), str(file), "--tenant", IDENTITY.tenant, "--trust-names"]
    assert cli.main([*words, "--chunk", "64"]) == 2
    assert "has input digests for chunks of 32 tokens, but --chunk is 64" in capsys.readouterr().err
    (tmp_path / "ids.json").write_text(json.dumps(ids[: 3 * CHUNK]))
    assert cli.main([*words, "--tokens", str(tmp_path / "ids.json")]) == 2
    assert "import it without --tokens" in capsys.readouterr().err
    assert entries(new) == []
    assert cli.main(words) == 0
    imported = open_store(new)
    n, found = imported.load(ids, inputs=digests)
    assert n == 3 * CHUNK
    assert is_same_prefix(found, whole)
    assert imported.match(ids) == CHUNK
    rewrite(str(file), {"token-chunks.0": features["token-chunks.0"][:-3]})
    assert cli.main(words) == 1
    assert "are not whole chunks of 32 tokens" in capsys.readouterr().err


def entry_of_key(store: kvpack.Store, key: bytes) -> str:
    (path,) = (path for path in entries(store.location) if path.endswith(key.hex()))
    return path
