"""PageStore: an engine's pages under its own keys, in every kind of location. Anything invalid is a miss."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import kvpack
from kvpack import Identity, PageStore, Tier, cli
from kvpack.coding.bases import Basis
from kvpack.coding.recipes import Recipe
from kvpack.errors import InvalidParameter, MissingBasis, MissingFile, WriteFailed
from kvpack.pages import PageBuffer, PageGeometry
from kvpack.pages.codec import key_digest
from kvpack.store.keys import page_key
from support.klt_bases import random_basis
from support.redis_server import run_server

GEOMETRY = PageGeometry(layers=2, heads=2, tokens=16, dim_k=32, dim_v=32)
IDENTITY = Identity("model", "kv=group:b=4,g=32", weights="w")
KEYS = [b"first", b"second \xff\x00", b"third" * 40, b""]
DESCRIPTION = kvpack.pages.PageCodec(IDENTITY.recipe, GEOMETRY).layout.description
SECRET = {"encryption": {"a": b"k" * 32}}


def pages(slots: int = 4, seed: int = 0) -> tuple[PageBuffer, torch.Tensor]:
    """Return pages, and all of their values ``[slot, side, layer, head, token, channel]``."""
    made = torch.randn(slots, 2, 2, 2, 16, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return PageBuffer(GEOMETRY, made[:, 0], made[:, 1]), made


def cleared(slots: int = 4) -> tuple[PageBuffer, torch.Tensor]:
    made = torch.zeros(slots, 2, 2, 2, 16, 32, dtype=torch.bfloat16)
    return PageBuffer(GEOMETRY, made[:, 0], made[:, 1]), made


@pytest.fixture(params=["a folder", "memory", "tiers", "an object store", "Redis"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    memory = Tier("memory://", max_bytes=10**7)
    match request.param:
        case "a folder":
            yield tmp_path
        case "memory":
            yield [memory]
        case "tiers":
            yield [memory, tmp_path]
        case "an object store":
            yield pytest.importorskip("obstore").store.MemoryStore()
        case _:
            pytest.importorskip("redis")
            with run_server(tmp_path) as server:
                yield server.url


@pytest.mark.parametrize("options", [{}, SECRET], ids=["plain", "encrypted"])
def test_pages_are_loaded_by_their_keys(location: Any, options: dict[str, Any]) -> None:
    given, values = pages()
    target, found = cleared()
    with PageStore(location, IDENTITY, GEOMETRY, **options) as store:
        assert store.contains(KEYS) == [False] * 4
        assert store.put(KEYS[:3], given, [0, 1, 2]) == [True] * 3
        assert store.put([KEYS[3]], given, [3], ancestors=KEYS[:3]) == [True]
        assert store.contains([KEYS[2], b"none", KEYS[0]]) == [True, False, True]
        assert store.get_into([KEYS[3], b"none", KEYS[1]], target, [0, 1, 2]) == [True, False, True]
        assert not found[1].any()
        for slot, source in ((0, 3), (2, 1)):
            error = (found[slot].float() - values[source].float()).norm() / values[source].float().norm()
            assert error < 0.12
        assert store.put(KEYS[:1], given, [0]) == [True]
        assert store.delete([KEYS[0], b"none"]) == 1
        assert store.contains(KEYS) == [False, True, True, True]
        store.touch(KEYS[1:], ancestors=KEYS[:1])
        stats = store.stats()
        assert (stats["loads"], stats["hit_tokens"], stats["deleted_entries"], stats["faults"]) == (1, 32, 1, {})
        assert "kvpack_store_row_bytes" in store.prometheus()


def test_two_buffers_of_one_memory_have_no_slot_in_common(tmp_path: Path) -> None:
    given, _ = pages()
    target, found = cleared()
    again = PageBuffer(GEOMETRY, found[:, 0], found[:, 1])
    with PageStore(tmp_path, IDENTITY, GEOMETRY) as store:
        store.put(KEYS[:2], given, [0, 1])
        with pytest.raises(InvalidParameter, match="pass each slot once"):
            store.get_into(KEYS[:2], [target, again], [3, 3])
        assert not found.any()
        assert store.get_into(KEYS[:2], [target, again], [2, 3]) == [True, True]


def test_other_processes_but_not_other_identities_read_pages(tmp_path: Path) -> None:
    given, _ = pages()
    with PageStore(tmp_path, IDENTITY, GEOMETRY) as store:
        store.put(KEYS, given, range(4))
    (one, mine), (other, theirs) = cleared(), cleared()
    with PageStore(tmp_path, IDENTITY, GEOMETRY, threads=2) as store:
        assert store.get_into(KEYS, one, range(4)) == [True] * 4
    for identity in (Identity("model", IDENTITY.recipe, weights="other"), Identity("model", IDENTITY.recipe, weights="w", tenant="t")):
        with PageStore(tmp_path, identity, GEOMETRY) as store:
            assert store.contains(KEYS) == [False] * 4
            assert store.get_into(KEYS, other, range(4)) == [False] * 4
    assert mine.any()
    assert not theirs.any()


def test_pages_of_other_shapes_are_separate(tmp_path: Path) -> None:
    given, _ = pages()
    target, _ = cleared()
    wide = PageGeometry(layers=1, heads=1, tokens=16, dim_k=128, dim_v=128)
    values = torch.randn(2, 4, 1, 1, 16, 128).bfloat16()
    others = PageBuffer(wide, *values)
    with PageStore(tmp_path, IDENTITY, GEOMETRY) as store, PageStore(tmp_path, IDENTITY, wide) as other:
        assert store.put(KEYS, given, range(4)) == [True] * 4
        assert other.contains(KEYS) == [False] * 4
        assert other.get_into(KEYS, others, range(4)) == [False] * 4
        assert other.put(KEYS, others, range(4)) == [True] * 4
        assert store.get_into(KEYS, target, range(4)) == other.get_into(KEYS, others, range(4)) == [True] * 4
        assert store.counters()["damaged_entries"] == other.counters()["damaged_entries"] == 0


@pytest.mark.parametrize("options", [{}, SECRET], ids=["plain", "encrypted"])
def test_clearing_removes_the_pages_of_one_identity(location: Any, options: dict[str, Any]) -> None:
    given, _ = pages()
    wide = PageGeometry(layers=1, heads=1, tokens=16, dim_k=128, dim_v=128)
    others = PageBuffer(wide, *torch.randn(2, 4, 1, 1, 16, 128).bfloat16())
    theirs = Identity("model", IDENTITY.recipe, weights="other")
    with PageStore(location, IDENTITY, GEOMETRY, **options) as store:
        store.put(KEYS, given, range(4))
        with PageStore(location, IDENTITY, wide, **options) as same, PageStore(location, theirs, GEOMETRY, **options) as other:
            same.put(KEYS[:2], others, range(2))
            other.put(KEYS[:3], given, range(3))
            # Tiers in memory are a store's own.
            shared = other.stats()["entries"] > 3
            assert store.clear() == (6 if shared else 4)
            assert store.contains(KEYS) == [False] * 4
            assert other.contains(KEYS) == [True] * 3 + [False]
        assert store.clear() == 0
        assert store.counters()["faults"] == {}


def test_clearing_reports_the_remaining_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, _ = pages()
    with PageStore(tmp_path, IDENTITY, GEOMETRY) as store:
        store.put(KEYS, given, range(4))
        monkeypatch.setattr("kvpack.store.folder.os.unlink", lambda *_, **__: (_ for _ in ()).throw(OSError(30, "read-only")))
        with pytest.raises(WriteFailed, match=r"4 of 4 pages could not be removed\. Faults of this store so far: \{"):
            store.clear()


def entry(folder: Path, key: bytes) -> Path:
    return next(folder.rglob(page_key(IDENTITY.digest, key_digest(key), DESCRIPTION).hex()))


@pytest.mark.parametrize("options", [{}, SECRET], ids=["plain", "encrypted"])
def test_a_damaged_entry_is_a_single_miss_and_is_replaced(options: dict[str, Any], tmp_path: Path) -> None:
    given, _ = pages()
    target, found = cleared()
    with PageStore(tmp_path, IDENTITY, GEOMETRY, **options) as store:
        store.put(KEYS, given, range(4))
        path = entry(tmp_path, KEYS[1])
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 16
        path.write_bytes(data)
        assert store.get_into(KEYS, target, range(4)) == [True, False, True, True]
        assert [bool(found[slot].any()) for slot in range(4)] == [True, False, True, True]
        assert store.counters()["damaged_entries"] == 1
        assert not path.exists()
        assert store.put(KEYS, given, range(4)) == [True] * 4
        assert store.get_into(KEYS, target, range(4)) == [True] * 4


def test_an_entry_of_another_page_is_a_miss(tmp_path: Path) -> None:
    given, _ = pages()
    target, found = cleared()
    with PageStore(tmp_path, IDENTITY, GEOMETRY) as store:
        store.put(KEYS[:2], given, [0, 1])
        first, second = (entry(tmp_path, key) for key in KEYS[:2])
        second.write_bytes(first.read_bytes())
        assert store.get_into(KEYS[:2], target, [0, 1]) == [True, False]
        assert not found[1].any()
        first.write_bytes(b"no row")
        assert store.get_into(KEYS[:1], target, [2]) == [False]


def test_a_bad_entry_in_a_fast_tier_does_not_hide_one_in_a_slower_tier(tmp_path: Path) -> None:
    given, _ = pages()
    target, found = cleared()
    with PageStore([tmp_path / "fast", tmp_path / "slow"], IDENTITY, GEOMETRY) as store:
        store.put(KEYS, given, range(4))
        path = entry(tmp_path / "fast", KEYS[2])
        data = bytearray(path.read_bytes())
        data[300] ^= 1
        path.write_bytes(data)
        assert store.get_into(KEYS, target, range(4)) == [True] * 4
        assert found.flatten(1).any(1).all()
        assert store.counters()["damaged_entries"] == 1
        assert entry(tmp_path / "fast", KEYS[2]).read_bytes() == entry(tmp_path / "slow", KEYS[2]).read_bytes()


def test_a_page_that_cannot_be_encoded_is_left_out(tmp_path: Path) -> None:
    given, values = pages()
    values[1, 0, 0, 0, 0, 0] = float("inf")
    with PageStore(tmp_path, IDENTITY, GEOMETRY) as store:
        assert store.put(KEYS, given, range(4)) == [True, False, True, True]
        assert store.counters()["faults"] == {"encode InvalidParameter": 1}


def test_descendants_are_evicted_before_their_ancestors(tmp_path: Path) -> None:
    given, _ = pages()
    size = kvpack.pages.PageCodec(IDENTITY.recipe, GEOMETRY).nbytes
    with PageStore([Tier("memory://", max_bytes=3 * size + 100)], IDENTITY, GEOMETRY) as store:
        store.put(KEYS[:3], given, [0, 1, 2])
        store.put([b"another"], given, [3])
        assert store.contains([*KEYS[:3], b"another"]) == [True, True, False, True]
        store.touch(KEYS[:2])
        store.put([b"one more"], given, [3])
        assert store.contains([*KEYS[:2], b"another", b"one more"]) == [True, True, False, True]


def test_a_load_marks_the_first_page_as_most_recently_used(location: Any) -> None:
    if type(location).__module__.startswith("obstore"):
        pytest.skip("the store does not list the times of its entries")
    keys = [bytes([number]) for number in range(20)]
    given, target = pages(20)[0], cleared(20)[0]
    with PageStore(location, IDENTITY, GEOMETRY) as store:
        for slot, key in enumerate(keys):
            store.put([key], given, [slot])
        assert store.get_into(keys, target, range(20)) == [True] * 20
        used = {stored.key: stored.used_ns for stored in store._backend.list()}
        times = [used[name] for name in store._entry_keys(keys)]
        assert times == sorted(times, reverse=True)


def test_jobs_can_be_polled(tmp_path: Path) -> None:
    given, _ = pages()
    target, found = cleared()
    with PageStore(tmp_path, IDENTITY, GEOMETRY, jobs=2) as store:
        puts = [store.submit_put([key], given, [slot]) for slot, key in enumerate(KEYS)]
        store.drain()
        done = store.finished()
        assert {job.number for job in done} == {job.number for job in puts}
        assert all(job.kind == "put" and job.results == [True] for job in done)
        assert store.finished() == []
        job = store.submit_get(
            [*KEYS, b"none"], PageBuffer(GEOMETRY, *(x.repeat(2, 1, 1, 1, 1) for x in (found[:, 0], found[:, 1]))), range(5)
        )
        store.drain()
        assert job.done
        assert job.results == [True] * 4 + [False]
        failed = store.submit_get(KEYS[:1], target, [9])
        store.drain()
        with pytest.raises(kvpack.OutOfBounds, match="slot 9 was passed"):
            _ = failed.results
        assert store.counters()["faults"] == {"get OutOfBounds": 1}
        with pytest.raises(InvalidParameter, match="1 keys were passed for 2 slots"):
            store.submit_get(KEYS[:1], target, [0, 1])


def test_a_job_uses_the_lists_as_they_were_when_submitted(tmp_path: Path) -> None:
    given, _ = pages()
    target, found = cleared()
    with PageStore(tmp_path, IDENTITY, GEOMETRY) as store:
        store.put(KEYS, given, range(4))
        begin = threading.Event()
        store._threads["get"].submit(lambda: begin.wait(60))
        keys, slots = [bytearray(KEYS[0])], [0]
        job = store.submit_get(keys, target, slots)
        keys[0][:], slots[0] = KEYS[1], 3
        begin.set()
        store.drain()
        assert job.results == [True]
        assert found[0].any()
        assert not found[1:].any()
        with pytest.raises(InvalidParameter, match="a key is a int, expected bytes"):
            store.submit_get([5], target, [0])  # type: ignore[list-item]
        with pytest.raises(InvalidParameter, match="slot 2 was passed 2 times"):
            store.get_into(KEYS[:2], target, [2, 2])


def _in_child(store: PageStore, target: PageBuffer, results: Any) -> None:
    job = store.submit_get(KEYS, target, range(4))
    store.drain()
    results.put((job.results, len(store.finished())))


def test_a_closed_store_refuses_calls(tmp_path: Path) -> None:
    given, _ = pages()
    store = PageStore(tmp_path, IDENTITY, GEOMETRY)
    submitted = store.submit_put(KEYS[:1], given, [0])
    store.close()
    assert submitted.results == [True], "an earlier job was not completed first"
    store.close()
    threads = threading.active_count()
    calls: list[Any] = [
        lambda: store.put(KEYS[:1], given, [0]),
        lambda: store.get_into(KEYS[:1], given, [0]),
        lambda: store.submit_put(KEYS[:1], given, [0]),
        lambda: store.submit_get(KEYS[:1], given, [0]),
        lambda: store.contains(KEYS),
        lambda: store.touch(KEYS),
        lambda: store.delete(KEYS),
        store.clear,
    ]
    for call in calls:
        with pytest.raises(InvalidParameter, match="is closed: open another PageStore"):
            call()
    with pytest.raises(InvalidParameter, match="the codec is closed: create another PageCodec"):
        store.codec.encode_into(given, [0], [bytearray(store.codec.nbytes)])
    assert threading.active_count() == threads


def test_jobs_work_in_a_forked_process(tmp_path: Path) -> None:
    given, _ = pages()
    target, _ = cleared()
    with PageStore(tmp_path, IDENTITY, GEOMETRY) as store:
        begin = threading.Event()
        store._threads["put"].submit(lambda: begin.wait(60))
        # No thread of the child ends this one.
        job = store.submit_put(KEYS, given, range(4))
        with PageStore(tmp_path, IDENTITY, GEOMETRY) as other:
            other.put(KEYS, given, range(4))
        fork = multiprocessing.get_context("fork")
        results = fork.Queue()
        child = fork.Process(target=_in_child, args=(store, target, results), daemon=True)
        child.start()
        assert results.get(timeout=60) == ([True] * 4, 1)
        child.join()
        begin.set()
        store.drain()
        assert job.results == [True] * 4


def test_the_hosts_settings_are_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("the host's number of threads was changed")

    monkeypatch.setattr(torch, "set_num_threads", forbidden)
    given, _ = pages()
    target, _ = cleared()
    torch.manual_seed(3)
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    with torch.inference_mode(), PageStore(tmp_path, IDENTITY, GEOMETRY, threads=2) as store:
        for call in (
            lambda: store.put(KEYS, given, range(4)),
            lambda: store.get_into(KEYS, target, range(4)),
            lambda: store.contains(KEYS),
            lambda: store.touch(KEYS),
            lambda: store.submit_get(KEYS, target, range(4)),
            store.drain,
            lambda: store.delete(KEYS),
            store.stats,
        ):
            call()
            assert torch.equal(torch.get_rng_state(), state)
            assert torch.get_default_dtype() == dtype
            assert torch.is_inference_mode_enabled()


def test_pages_can_need_a_basis(tmp_path: Path) -> None:
    basis = Basis.from_bytes(random_basis({(layer, side): (2, 32) for layer in range(2) for side in "kv"}, 2, model={"name": "model"}))
    recipe = Recipe("kv=klt:bits=4", basis)
    (tmp_path / "x.basis").write_bytes(basis.data)
    identity = Identity("model", recipe)
    (given, _), (target, found), (decoded, expected) = pages(), cleared(), cleared()
    with kvpack.pages.PageCodec(recipe, GEOMETRY) as codec:
        rows = [bytearray(codec.nbytes) for _ in range(4)]
        assert codec.encode_into(given, range(4), rows) == codec.decode_into(rows, decoded, range(4)) == [None] * 4
    with PageStore(tmp_path / "store", identity, GEOMETRY) as store:
        assert store.put(KEYS, given, range(4)) == [True] * 4
    with PageStore(tmp_path / "store", Identity("model", Recipe("kv=klt:bits=4", tmp_path / "x.basis")), GEOMETRY) as store:
        assert store.get_into(KEYS, target, range(4)) == [True] * 4
        assert expected.any()
        assert torch.equal(found, expected)
    with pytest.raises(MissingBasis, match="needs the basis"):
        PageStore(tmp_path / "store", Identity("model", recipe.text), GEOMETRY)
    other = Basis.from_bytes(random_basis({(layer, side): (2, 32) for layer in range(2) for side in "kv"}, 2, seed=5))
    with pytest.raises(InvalidParameter, match="names the basis"):
        Identity("model", recipe.text, basis=other)
    with pytest.raises(InvalidParameter, match="whose name is 'model', but the name of the cache's model is 'another'"):
        PageStore(tmp_path / "store", Identity("another", recipe), GEOMETRY)


def test_a_page_codec_accepts_a_basis(tmp_path: Path) -> None:
    basis = Basis.from_bytes(random_basis({(layer, side): (2, 32) for layer in range(2) for side in "kv"}, 2))
    (tmp_path / "x.basis").write_bytes(basis.data)
    with kvpack.pages.PageCodec(kvpack.Recipe("kv=klt:bits=4", tmp_path / "x.basis"), GEOMETRY) as codec:
        assert codec.recipe == Recipe("kv=klt:bits=4", basis)
        given, _ = pages()
        rows = [bytearray(codec.nbytes) for _ in range(4)]
        assert codec.encode_into(given, range(4), rows) == [None] * 4
    with pytest.raises(MissingBasis, match="needs a basis"):
        kvpack.pages.PageCodec("kv=klt:bits=4", GEOMETRY)
    with pytest.raises(InvalidParameter, match="is a basis for a model with 2 layers, but the cache has 3"):
        kvpack.pages.PageCodec(kvpack.Recipe("kv=klt:bits=4", basis), replace(GEOMETRY, layers=3))
    with pytest.raises(InvalidParameter, match=r"keys of layer 0 of the basis .*: .* for 2 heads, but .* 1"):
        kvpack.pages.PageCodec(kvpack.Recipe("kv=klt:bits=4", basis), replace(GEOMETRY, heads=1))


def test_commands_support_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, _ = pages()
    with PageStore(tmp_path, IDENTITY, GEOMETRY) as store:
        store.put(KEYS, given, range(4))
        assert cli.main(["store", "verify", str(tmp_path)]) == 0
        capsys.readouterr()
        assert cli.main(["store", "stat", str(tmp_path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["entries"], found["pages"], found["unreadable"]) == (4, 4, 0)
        assert cli.main(["store", "ls", str(tmp_path)]) == 0
        assert "4 pages of engines" in capsys.readouterr().out
        assert cli.main(["store", "stat", str(tmp_path)]) == 0
        shown = capsys.readouterr().out
        assert "4 of them are pages of engines" in shown
        assert "by model and recipe" not in shown
        assert cli.main(["store", "gc", str(tmp_path)]) == 0
        assert store.contains(KEYS) == [True] * 4
        path = entry(tmp_path, KEYS[0])
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        assert cli.main(["store", "verify", str(tmp_path)]) == 1


def model_folder(folder: Path, seed: int = 0, **settings: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"rope_theta": 10000.0, **settings}))
    weights = {"w": torch.randn(300_000, generator=torch.Generator().manual_seed(seed))}
    save_file(weights, folder / "model.safetensors")
    return folder


def test_an_engines_identity_needs_no_model_in_memory(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_dtype": "bf16", "layout": "d1"}
    path = model_folder(tmp_path / "m")
    base = Identity.of_engine(path, "octopus-3", **options)
    assert Identity.of_engine(path, "octopus-3", **options) == base
    assert (base.model, base.dtype, base.rope) == ("m", "bf16", '{"rope_theta": 10000.0}')
    other = model_folder(tmp_path / "other", 1)
    (tmp_path / "y").mkdir()
    scaled = model_folder(tmp_path / "y" / "m", rope_theta=5.0)
    digests = {
        base.digest,
        Identity.of_engine(other, "octopus-3", **options).digest,
        Identity.of_engine(scaled, "octopus-3", **options).digest,
        Identity.of_engine(path, "octopus-4", **options).digest,
        Identity.of_engine(path, "octopus-3", **options, tp=(1, 2)).digest,
        Identity.of_engine(path, "octopus-3", **options, revision="abc").digest,
        Identity.of_engine(path, "octopus-3", **options, adapter="lora").digest,
        Identity.of_engine(path, "octopus-3", **options, tenant="t").digest,
        Identity.of_engine(path, "octopus-3", kv_dtype="fp8_e4m3", layout="d1").digest,
        Identity.of_engine(path, "octopus-3", kv_dtype="bf16", layout="d2").digest,
    }
    for code in (b"", b"x = 1"):
        (path / "modeling_m.py").write_bytes(code)
        digests.add(Identity.of_engine(path, "octopus-3", **options).digest)
    (path / "modeling_m.py").rename(path / "modeling_n.py")
    digests.add(Identity.of_engine(path, "octopus-3", **options).digest)
    assert len(digests) == 13
    with pytest.raises(MissingFile, match=r"has no config\.json, expected the folder of a transformers model"):
        Identity.of_engine(tmp_path / "none", "octopus-3", **options)
    (path / "model.safetensors").unlink()
    with pytest.raises(InvalidParameter, match=r"contains no \*.safetensors files: pass revision"):
        Identity.of_engine(path, "octopus-3", **options)
    assert Identity.of_engine(path, "octopus-3", **options, revision="abc").weights == "abc"
    with pytest.raises(InvalidParameter, match=r"tp is \(2, 2\)"):
        Identity.of_engine(path, "octopus-3", **options, tp=(2, 2))
    with pytest.raises(InvalidParameter, match="kv_dtype or layout is empty"):
        Identity.of_engine(path, "octopus-3", kv_dtype="bf16", layout="")
    with pytest.raises(InvalidParameter, match="layout is 'd1; x', expected text without a semicolon"):
        # What layout d1 and extra x are called.
        Identity.of_engine(path, "octopus-3", kv_dtype="bf16", layout="d1; x")
