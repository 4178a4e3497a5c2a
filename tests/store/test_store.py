"""The prefix store on a folder: saved prefixes are found under the same identity, and anything wrong is a miss."""

from __future__ import annotations

import copy
import dataclasses
import gc
import hashlib
import os
import pickle
import re
import stat
import struct
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import kvpack
from kvpack.formats.errors import InvalidParameter, MissingPackage
from kvpack.integrations.transformers import KvpackCache
from kvpack.runtime import mapping
from kvpack.store import entries as entries_module
from kvpack.store.counters import NAMES, LatencyHistogram
from kvpack.store.encryption import Cipher
from kvpack.store.keys import basis_keys
from kvpack.store.metrics import Collector, register_metrics
from support.caches import random_pairs, unpack_all
from support.engine_stubs import parse_metrics
from support.store_caches import CHUNK, IDENTITY, cache, entries, entry_of, is_same_prefix, open_store, prompt, save

RECIPES = ["bf16", "octopus-3", "kivi-2", "oscar-2", "kv=quaternion:s=24,r=3", "kivi-4;tail=32"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_saved_caches_are_loaded(recipe: str, tmp_path: Path) -> None:
    identity = dataclasses.replace(IDENTITY, recipe=recipe)
    ids = list(range(150))
    whole = kvpack.pack(random_pairs(3, 150, heads=2, dims=(64, 32)), recipe)
    with open_store(tmp_path / "store", identity) as store:
        assert store.match(ids) == 0
        assert store.load(ids) == (0, None)
        assert store.save(ids, whole) == store.match(ids) == 128
    with open_store(tmp_path / "store", identity) as store:
        n, found = store.load(ids)
        assert n == 128
        assert is_same_prefix(found, whole)
        assert (found.start, found.recipe) == (0, identity.recipe)
        assert dict(found.model) == {"name": "model", "weights": "w1", "dtype": "bfloat16"}


def test_the_first_prefix_that_is_shorter_than_a_chunk_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = "kivi-2;tail=32"  # a raw tail is part of the prefix
    store = open_store(tmp_path, dataclasses.replace(IDENTITY, recipe=recipe))
    for tokens in (CHUNK - 1, CHUNK - 2):
        assert store.save(list(range(tokens)), cache(tokens, recipe)) == 0
    (record,) = caplog.records
    assert record.getMessage().startswith(f"nothing was stored: the prefix has {CHUNK - 1} tokens")
    assert store.stats()["saves"] == 0
    store.save(prompt(2), cache(2 * CHUNK + 5, recipe))
    assert store.stats()["saves"] == 1
    assert len(caplog.records) == 1


def test_an_exact_cache_replaces_entries_of_another_dtype(tmp_path: Path) -> None:
    store = open_store(tmp_path, kvpack.Identity("model", "raw"))
    for tokens, dtype in ((2 * CHUNK, torch.bfloat16), (3 * CHUNK, torch.float32), (2 * CHUNK, torch.bfloat16)):
        whole = kvpack.pack([(k.to(dtype), v.to(dtype)) for k, v in random_pairs(2, tokens)], "raw")
        assert store.save(list(range(tokens)), whole) == tokens
        found, loaded = store.load(list(range(tokens)))
        assert found == tokens
        assert loaded is not None
        assert loaded[0].k.codec == whole[0].k.codec
        assert is_same_prefix(loaded, whole)


def test_a_store_cannot_be_pickled_or_copied(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for call in (pickle.dumps, copy.deepcopy):
            with pytest.raises(InvalidParameter, match="open it again in each process"):
                call(store)


def test_the_longest_stored_prefix_is_found(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ids = prompt(5)
    whole = save(store, ids)
    for length in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, len(ids), len(ids) + 40):
        asked = (ids + [9] * 40)[:length]
        n, found = store.load(asked)
        assert n == store.match(asked) == min(length, 5 * CHUNK) // CHUNK * CHUNK
        assert found is None if n == 0 else is_same_prefix(found, whole)
    other = [*ids[: 2 * CHUNK], 7, *ids[2 * CHUNK + 1 :]]
    assert store.match(other) == 2 * CHUNK
    assert store.match([7, *ids[1:]]) == 0
    for empty in ([], range(0), torch.tensor([]), torch.empty(1, 0)):
        assert store.match(empty) == store.load(empty)[0] == 0


def test_prompts_share_their_common_prefix(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(store, prompt(4, first=2, seed=1))
    save(store, prompt(4, first=2, seed=2))
    assert store.stats()["entries"] == 2 + 2 + 2
    assert store.counters()["present_chunks"] == 2


def test_a_longer_cache_adds_only_new_chunks(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ids, whole = prompt(6), cache(6 * CHUNK + 5)
    assert store.save(ids[: 2 * CHUNK], whole[:, : 2 * CHUNK]) == 2 * CHUNK
    assert store.save(ids, whole) == 6 * CHUNK
    assert store.save(ids[: 3 * CHUNK], whole[:, : 3 * CHUNK]) == 3 * CHUNK
    assert store.counters()["saved_chunks"] == 6
    assert is_same_prefix(store.load(ids)[1], whole)


def test_chunks_loaded_to_a_device_are_one_run(tmp_path: Path) -> None:
    store, ids = open_store(tmp_path, dataclasses.replace(IDENTITY, recipe="octopus-3")), prompt(3)
    with pytest.raises(InvalidParameter, match="device is 'gpu', expected"):
        store.load(ids, device="gpu")
    whole = save(store, ids)
    count, found = store.load(ids, device="cpu:0")
    assert found is not None
    assert (count, is_same_prefix(found, whole)) == (3 * CHUNK, True)
    assert all([run.tokens for run in side.runs] == [3 * CHUNK] for layer in found for side in layer.sides.values())


def test_pages_are_views_of_the_mapped_files(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ids = prompt(3)
    save(store, ids)
    _, found = store.load(ids)
    maps = {}
    with open("/proc/self/maps") as file:
        for line in file:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and str(tmp_path) in fields[5]:
                maps[fields[5].strip()] = tuple(int(end, 16) for end in fields[0].split("-"))
    assert len(maps) == 3
    descriptors = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert not any(path.startswith(str(tmp_path)) for path in descriptors), "entry files remained open"
    for layer in found:
        for side in layer.sides.values():
            assert len(side.runs) == 3
            for page in side.runs:
                for stream in page.streams.values():
                    assert not stream.numel() or any(begin <= stream.data_ptr() < end for begin, end in maps.values())
    found[0].k.runs[0].streams["codes.0"].zero_()
    assert not torch.equal(unpack_all(store.load(ids)[1])[0], unpack_all(found)[0]), "writing to a tensor changed the file"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(kvpack.Identity) if field.compare])
def test_different_identities_share_nothing(field: str, tmp_path: Path) -> None:
    mine = open_store(tmp_path)
    ids = prompt(3)
    save(mine, ids)
    other = "kivi-4" if field == "recipe" else f"{getattr(IDENTITY, field)}x"
    theirs = open_store(tmp_path, dataclasses.replace(IDENTITY, **{field: other}))
    assert theirs.match(ids) == 0
    assert theirs.load(ids) == (0, None)
    assert theirs.delete(ids) == theirs.pin(ids) == 0
    assert theirs.counters()["damaged_entries"] == 0
    assert mine.match(ids) == 3 * CHUNK
    assert not set(mine.keys(ids)) & set(theirs.keys(ids))


def test_field_boundaries_are_part_of_keys() -> None:
    digests = {
        kvpack.Identity("a", "bf16", weights=weights, adapter=adapter, tenant=tenant).digest
        for weights, adapter, tenant in [("bc", "", ""), ("b", "c", ""), ("", "bc", ""), ("b", "", "c"), ("", "b", "c"), ("", "", "bc")]
    }
    assert len(digests) == 6
    half, whole = (open_store("/nowhere", chunk=chunk).keys(range(64)) for chunk in (32, 64))
    assert not set(half) & set(whole)


def test_keys_follow_the_specification() -> None:
    def prefixed(*fields: bytes) -> bytes:
        return b"".join(struct.pack("<Q", len(field)) + field for field in fields)

    fields = {"format": "1", "model": "m", "recipe": "kv=raw:dtype=bf16"}
    fields |= dict.fromkeys(("weights", "adapter", "rope", "dtype", "tenant", "config", "extra"), "")
    root = hashlib.sha256(prefixed(*(text.encode() for pair in fields.items() for text in pair))).digest()
    first = hashlib.sha256(prefixed(root, struct.pack("<4I", *range(4)))).digest()
    second = hashlib.sha256(prefixed(first, struct.pack("<4I", *range(4, 8)))).digest()
    with_inputs = hashlib.sha256(prefixed(first, struct.pack("<4I", *range(4, 8)), b"image")).digest()
    identity = kvpack.Identity("m", "bf16")
    assert identity.digest == root
    store = kvpack.Store("/nowhere", identity, chunk=4)
    assert store.keys(range(9)) == store.keys(range(9), inputs=[b"", b""]) == [first, second]
    assert store.keys(range(9), inputs=[b"", b"image"]) == [first, with_inputs]
    text = (Path(__file__).parents[2] / "spec" / "test-values.md").read_text()
    vector = (Path(__file__).parents[2] / "spec" / "vectors" / "valid" / "basis-two-layers.kvpack").read_bytes()
    basis = hashlib.sha256(vector).digest()
    encrypted = hashlib.sha256(prefixed(b"kvpack-basis 1", basis, b"a", b"t")).digest()
    states = [hashlib.sha256(prefixed(b"kvpack-states 1", root)).digest()]
    states.append(hashlib.sha256(prefixed(states[0], struct.pack("<4I", *range(4)))).digest())
    states.append(hashlib.sha256(prefixed(b"kvpack-states 1", states[1])).digest())
    keeping = kvpack.Store("/nowhere", dataclasses.replace(identity, keeps_states=True), chunk=4)
    assert keeping.keys(range(4)) == states[1:2]
    assert [*basis_keys(basis, None), *basis_keys(basis, Cipher({"a": bytes(32)}, "t"))] == [basis, encrypted]
    named = (root, first, second, with_inputs, *states, basis, encrypted)
    assert re.findall("`([0-9a-f]{64})`", text) == [digest.hex() for digest in named]


@pytest.mark.parametrize("tenant", ["", "a/b", "..", "\0", "@", "\ud800", "x" * 100_000], ids=repr)
def test_a_tenant_may_have_any_name(tenant: str, tmp_path: Path) -> None:
    store = open_store(tmp_path, dataclasses.replace(IDENTITY, tenant=tenant))
    ids = prompt(1)
    whole = save(store, ids)
    assert is_same_prefix(store.load(ids)[1], whole)
    assert all(re.fullmatch("[0-9a-f]{64}", os.path.basename(path)) for path in entries(tmp_path))


@pytest.mark.parametrize(
    "ids",
    [
        range(40),
        tuple(range(40)),
        numpy.arange(40),
        numpy.arange(40, dtype=numpy.uint8),
        torch.arange(40),
        torch.arange(40)[None],
        torch.arange(40, dtype=torch.int32),
        [list(range(40))],
    ],
    ids=lambda ids: f"{type(ids).__name__} {getattr(ids, 'dtype', '')} {getattr(ids, 'ndim', '')}",
)
def test_token_ids_of_any_form_are_equivalent(ids: Any, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(list(range(40)), cache(40))
    assert store.match(ids) == CHUNK


@pytest.mark.parametrize(
    "ids",
    [
        [1.5] * 40,
        [-1] * 40,
        [2**32] * 40,
        ["a"] * 40,
        "text",
        None,
        7,
        [True, None],
        torch.zeros(40),
        torch.zeros(2, 40, dtype=torch.int64),
        numpy.array([2**40]),
    ],
    ids=str,
)
def test_invalid_token_ids_are_refused(ids: Any, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for call in (store.match, store.load, store.pin, store.unpin, store.delete, lambda ids: store.save(ids, cache(40))):
        with pytest.raises(InvalidParameter, match="token_ids"):
            call(ids)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: kvpack.pack(random_pairs(1, 40, dims=(32, 32)), "kivi-4"), "recipe is 'kv=group:b=4;.*', .* is 'kv=group:b=2;"),
        (lambda: kvpack.pack(random_pairs(1, 40, dims=(32, 32)), "kivi-2", start=32), "starts at position 32"),
        (lambda: kvpack.pack(random_pairs(1, 40, dims=(32, 32)), "kivi-2", model={"name": "other"}), "model is 'other', .* has 'model'"),
        (lambda: kvpack.pack(random_pairs(1, 40, dims=(32, 32), batch=2), "kivi-2"), "holds 2 sequences"),
        (lambda: random_pairs(1, 40), "a list is not a packed cache"),
        (
            lambda: kvpack.pack([random_pairs(1, 40, dims=(32, 32))[0], random_pairs(1, 33, dims=(32, 32))[0]], "kivi-2"),
            r"layers\[1\] ends at token 33, but the cache ends at 40",
        ),
    ],
    ids=["recipe", "start", "model", "batch", "no cache", "ends early"],
)
def test_caches_with_skipped_tokens_are_refused(made: Any, message: str, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(InvalidParameter, match=message):
        store.save(list(range(40)), made())
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 0}, "chunk is 0, expected an integer of at least 1"),
        ({"chunk": 40}, "encodes 32 tokens together"),
        ({"chunk": 32.0}, "chunk is 32.0"),
        ({"max_bytes": -1}, "max_bytes is -1"),
        ({"max_bytes": "1GB"}, r"max_bytes is '1GB', expected an integer of at least 0 bytes, such as 10\*\*9 for 1 GB"),
        ({"max_bytes": 1e9}, r"max_bytes is 1000000000.0, expected an integer of at least 0 bytes"),
        ({"min_free": "1G"}, "min_free is '1G'"),
        ({"timeout": 60}, "a folder has no option timeout"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=message):
        open_store(tmp_path, **options)
    with pytest.raises(InvalidParameter, match=r"expected a kvpack\.Identity"):
        kvpack.Store(tmp_path, "model")
    with pytest.raises(InvalidParameter):
        kvpack.Identity("model", "no-such-recipe")
    with pytest.raises(InvalidParameter, match=r"identity\.weights"):
        kvpack.Identity("model", "bf16", weights=7)


def test_a_transformers_cache_that_extends_a_packed_one_is_saved(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    whole = cache(70)
    assert store.save(list(range(70)), KvpackCache.of(whole)) == 2 * CHUNK


def test_a_cache_packed_in_parts_is_saved_up_to_the_last_possible_slice(tmp_path: Path) -> None:
    parts = cache(40).append(random_pairs(2, 64, dims=(32, 32), seed=1))
    store = open_store(tmp_path)
    assert store.save(list(range(104)), parts) == 2 * CHUNK
    assert store.counters()["faults"] == {"encode OutOfBounds": 1}
    assert is_same_prefix(store.load(list(range(104)))[1], parts)


DAMAGE = {
    "a flipped bit": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "a JSON header of more than the maximum": lambda data: data[:5] + b"\x10" + data[6:],
    "a zero page": lambda data: data[:4096] + bytes(4096) + data[8192:],
    "cut short": lambda data: data[:-1],
    "a byte more": lambda data: data + b"\0",
    "nothing": lambda data: b"",
    "another file": lambda data: b"not an entry",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_a_miss_and_is_replaced(damage: str, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ids = prompt(4)
    whole = save(store, ids)
    path = entry_of(store, ids, 2)
    with open(path, "rb") as file:
        data = file.read()
    with open(path, "wb") as file:
        file.write(DAMAGE[damage](data))
    n, found = store.load(ids)
    assert n == 2 * CHUNK
    assert is_same_prefix(found, whole)
    assert store.counters()["damaged_entries"] + len(store.counters()["faults"]) >= 1
    assert store.save(ids, whole) == 4 * CHUNK
    assert store.load(ids)[0] == 4 * CHUNK


def test_entries_with_swapped_names_are_misses(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ids, others = prompt(2), prompt(2, seed=5)
    save(store, ids)
    save(store, others, seed=1)
    os.replace(entry_of(store, others, 1), entry_of(store, ids, 1))
    assert store.load(ids)[0] == CHUNK
    assert store.counters()["damaged_entries"] == 1


def test_files_are_readable_only_by_their_owner(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = open_store(tmp_path / "a" / "store")
        save(store, prompt(3))
        store.pin(prompt(3))
    finally:
        os.umask(old)
    for parent, folders, names in os.walk(tmp_path / "a"):
        for name in folders:
            assert stat.S_IMODE(os.stat(os.path.join(parent, name)).st_mode) == 0o700, name
        for name in names:
            assert stat.S_IMODE(os.stat(os.path.join(parent, name)).st_mode) == 0o600, name


def test_a_folder_writable_by_others_is_refused(tmp_path: Path) -> None:
    for mode in (0o777, 0o720, 0o702):
        os.chmod(tmp_path, mode)
        with pytest.raises(InvalidParameter, match=f"has mode {mode:04o}"):
            open_store(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidParameter, match="is not a folder"):
        open_store(tmp_path / "file")


def test_delete_removes_a_prefix_after_a_given_token(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ids, other = prompt(4, first=1, seed=1), prompt(2, first=1, seed=2)
    save(store, ids)
    save(store, other, seed=0)
    store.pin(ids)
    assert store.delete(ids, start=CHUNK) == 3
    assert store.match(ids) == CHUNK
    assert store.match(other) == 2 * CHUNK
    assert not store.unpin(ids)
    assert store.delete(ids) == 1
    assert store.delete(ids) == 0
    assert store.match(other) == 0
    assert store.counters()["deleted_entries"] == 4


def test_counters_are_exported_as_prometheus_text(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ids = prompt(3)
    save(store, ids)
    store.load(ids)
    store.load(prompt(2, seed=3))
    os.truncate(entry_of(store, ids, 0), 7)
    store.load(ids)
    text = store.prometheus({})
    values = dict(re.findall(r"^(kvpack_store_\w+(?:\{[^}]*\})?) (\d+)$", text, re.MULTILINE))
    assert int(values["kvpack_store_loads_total"]) == 3
    assert int(values["kvpack_store_load_tokens_total"]) == 8 * CHUNK
    assert int(values["kvpack_store_hit_tokens_total"]) == 3 * CHUNK
    assert int(values["kvpack_store_damaged_entries_total"]) == 1
    assert int(values['kvpack_store_faults_total{operation="load",reason="NotKvpack"}']) == 1
    assert int(values["kvpack_store_entries"]) == 2
    assert int(values["kvpack_store_bytes"]) == sum(os.stat(path).st_size for path in entries(tmp_path))
    lines = text.splitlines()
    for name in NAMES:
        assert f"# TYPE kvpack_store_{name}_total counter" in lines
    assert all(re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+(\{(\w+="[^"\\]*",?)+\})? [\d.e-]+', line) for line in lines)
    assert (
        values['kvpack_store_seconds_count{operation="load"}'] == values['kvpack_store_seconds_bucket{operation="load",le="+Inf"}'] == "3"
    )
    assert values['kvpack_store_seconds_count{operation="save"}'] == "1"


def test_latencies_are_counted_in_their_buckets() -> None:
    latency = LatencyHistogram()
    for seconds in (0.0001, 0.0002, 0.5, 100.0):
        latency.add(seconds)
    found = dict(line.split("} ") for line in latency.lines("kvpack_store_seconds", {"operation": "load"}))
    bounds = {name.partition('le="')[2].rstrip('"'): int(count) for name, count in found.items() if "bucket" in name}
    assert (bounds["0.0001"], bounds["0.0003"], bounds["0.3"], bounds["1.0"], bounds["10.0"], bounds["+Inf"]) == (1, 2, 2, 3, 3, 4)
    assert float(found['kvpack_store_seconds_sum{operation="load"']) == 0.0001 + 0.0002 + 0.5 + 100.0


def test_metrics_are_registered_with_prometheus_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(MissingPackage, match="pip install prometheus-client"):
            register_metrics(store)
    registered: list[Any] = []
    client: Any = types.ModuleType("prometheus_client")
    parser: Any = types.ModuleType("prometheus_client.parser")
    client.REGISTRY = types.SimpleNamespace(register=registered.append)
    parser.text_string_to_metric_families = parse_metrics
    monkeypatch.setitem(sys.modules, "prometheus_client", client)
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", parser)
    collector = register_metrics(store)
    assert registered == [collector]
    store.load(prompt(1))

    def loads() -> list[tuple[dict[str, str], float]]:
        (family,) = [one for one in collector.collect() if one.name == "kvpack_store_loads_total"]
        return [(sample.labels, sample.value) for sample in family.samples]

    assert loads() == [({"model": "model"}, 1)]
    # Two stores in one registry are told apart by their labels.
    other = open_store(tmp_path)
    collector.add(other, {"pool": "swa"})
    assert loads() == [({"model": "model"}, 1), ({"pool": "swa", "model": "model"}, 0)]
    collector.remove(store)
    assert loads() == [({"pool": "swa", "model": "model"}, 0)]


def test_hits_are_counted_in_tokens_and_in_chunks(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(store, prompt(3))
    store.load(prompt(2))
    values = dict(re.findall(r"^(kvpack_store_hit_\w+) (\d+)$", store.prometheus({}), re.MULTILINE))
    assert values == {"kvpack_store_hit_tokens_total": str(2 * store.chunk), "kvpack_store_hit_chunks_total": "2"}


def test_every_tier_has_metrics(tmp_path: Path) -> None:
    store = open_store([tmp_path / "fast", tmp_path / "slow"])
    ids = prompt(3)
    save(store, ids)
    store.load(ids)
    values = dict(re.findall(r"^(kvpack_store_tier_\w+\{[^}]*\}) (\d+)$", store.prometheus({}), re.MULTILINE))
    for tier in "01":
        assert values[f'kvpack_store_tier_seconds_count{{tier="{tier}",operation="save"}}'] == "1"
        assert values[f'kvpack_store_tier_entries{{tier="{tier}"}}'] == "3"
        assert values[f'kvpack_store_tier_saved_chunks_total{{tier="{tier}"}}'] == "3"
    assert (values['kvpack_store_tier_hit_chunks_total{tier="0"}'], values['kvpack_store_tier_hit_chunks_total{tier="1"}']) == ("3", "0")


def test_every_metric_has_the_model(tmp_path: Path) -> None:
    store = open_store([tmp_path / "fast", tmp_path / "slow"], dataclasses.replace(IDENTITY, model='a "b"\\c'))
    save(store, prompt(2))
    for text, given in ((store.prometheus(), 'model="a \\"b\\"\\\\c"'), (store.prometheus({"pool": "x"}), 'pool="x"')):
        samples = [line for line in text.splitlines() if not line.startswith("#")]
        assert len(samples) > 50
        assert all(f"{{{given}" in line for line in samples)


@pytest.mark.parametrize("name", ["le", "operation", "reason", "tier", "__name__"])
def test_reserved_labels_are_refused(name: str, tmp_path: Path) -> None:
    """A repeated label makes all metrics of a process unreadable. Some labels occur only after a fault."""
    with pytest.raises(InvalidParameter, match=f"the label name '{name}' is reserved or already used by kvpack's metrics: choose another"):
        open_store(tmp_path).prometheus({name: "x"})
    with pytest.raises(InvalidParameter, match=f"the label name '{name}'"):
        Collector().add(open_store(tmp_path), {name: "x"})


def test_opening_a_store_imports_no_torch(tmp_path: Path) -> None:
    script = (
        f"import kvpack, sys\nstore = kvpack.Store({str(tmp_path)!r}, kvpack.Identity('m', 'kivi-2'))\n"
        "assert store.match(list(range(600))) == 0\nassert store.stats()['entries'] == 0\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_store_accepts_the_identity_of_a_model() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=50, name_or_path="org/model"))
    mine = kvpack.Identity.of(model, "octopus-3", tenant="t")
    assert mine.recipe == kvpack.Recipe("octopus-3").text
    assert (mine.model, mine.dtype, mine.tenant, mine.adapter) == ("org/model", "float32", "t", "")
    assert "rope_theta" in mine.rope
    assert mine.weights.startswith("sha256:")
    assert kvpack.Identity.of(model, "octopus-3", tenant="t") == mine
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    changed = kvpack.Identity.of(model, "octopus-3", tenant="t")
    assert changed.weights != mine.weights
    assert dataclasses.replace(changed, weights=mine.weights) == mine
    model.config.rope_parameters["rope_theta"] *= 2
    assert kvpack.Identity.of(model, "octopus-3", weights="w").rope != mine.rope
    named = kvpack.Identity.of(model, "octopus-3", weights="w", name="n", adapter="a", extra="a hook")
    assert (named.weights, named.model, named.adapter, named.extra) == ("w", "n", "a", "a hook")


def test_entries_that_match_a_template_are_parsed_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    ids = prompt(12)
    whole = save(store, ids)
    opened: list[bytes] = []
    real = entries_module.open_entry
    monkeypatch.setattr(entries_module, "open_entry", lambda data, key: opened.append(key) or real(data, key))
    for decoded in (4, 0):
        opened.clear()
        assert is_same_prefix(store.load(ids)[1], whole)
        # The first chunk has raw tokens, and positions from 0, 128 and 256 on take different numbers of bytes.
        assert len(opened) == decoded
    checking = open_store(tmp_path, check_values=True)
    opened.clear()
    assert is_same_prefix(checking.load(ids)[1], whole)
    assert len(opened) == 12


@pytest.mark.scenario
@pytest.mark.parametrize("recipe", ["kivi-2", "octopus-3"])
def test_every_flipped_bit_of_an_entry_is_noticed(recipe: str, tmp_path: Path) -> None:
    """Bits are flipped throughout the front, its padding and the payload, for the parsing reader and the template reader."""
    store = open_store(tmp_path, dataclasses.replace(IDENTITY, recipe=recipe))
    ids = prompt(2)
    save(store, ids)
    key = store.keys(ids)[1]
    with open(entry_of(store, ids, 1), "rb") as file:
        data = bytearray(file.read())
    readers = [store._reader, dataclasses.replace(store._reader, check_values=True, _templates={})]
    for reader in readers:
        assert reader._read_one(memoryview(bytearray(data)), key, 1).tokens == CHUNK
    assert readers[0]._templates
    front, json = 4096 * 2, len(bytes(data[:4096]).rstrip(b" "))
    places = [*range(0, json, 3), *range(json, 4096, 31), *range(4096, front, 3), *range(front, len(data), 97)]
    for place in places:
        bit = 1 << place % 8
        data[place] ^= bit
        for reader in readers:
            # The rest of the front is parsed anew where it is not what the shape says, as a whole file is.
            with pytest.raises(kvpack.KvpackError):
                reader._read_one(memoryview(data), key, 1)
        data[place] ^= bit


def test_entries_of_equal_size_may_have_different_payload_offsets(tmp_path: Path) -> None:
    """An entry is hashed from the payload offset of the last template of its size, which may be that of the preceding entry."""
    store, ids = open_store(tmp_path), prompt(3)
    whole = save(store, ids)
    assert is_same_prefix(store.load(ids)[1], whole)
    reader = store._reader
    for place, template in reader._templates.items():
        front = dataclasses.replace(template.front, text=b"\1" + template.front.text[1:], payload=template.front.payload + 64)
        reader._templates[place] = dataclasses.replace(template, front=front)
    n, found = store.load(ids)
    assert n == 3 * CHUNK
    assert is_same_prefix(found, whole)
    assert store.stats()["damaged_entries"] == 0


def test_reads_replace_mappings_if_necessary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of mappings per process is limited, and a store uses only a part of them."""
    store, ids = open_store(tmp_path), prompt(6)
    whole = save(store, ids)
    before = len(mapping._MAPPED)
    monkeypatch.setattr(mapping, "max_mappings", lambda: before + 4)
    found = store.load(ids)[1]
    assert len(mapping._MAPPED) == before + 4
    again = store.load(ids)[1]
    assert len(mapping._MAPPED) == before + 4
    assert is_same_prefix(found, whole)
    assert is_same_prefix(again, whole)
    del found
    gc.collect()
    found = store.load(ids)[1]
    assert len(mapping._MAPPED) == before + 4
    assert is_same_prefix(found, whole)
    assert mapping.max_mappings() > 0
