"""Every public function with every argument replaced by foreign values: it works, or raises a KvpackError.

Each entry is a call that works. Its arguments are replaced one at a time, and swapped two at a time.
"""

from __future__ import annotations

import inspect
import itertools
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from support.foreign_values import CACHE, FOREIGN, GEOMETRY, IDENTITY, PAIRS, foreign_errors
from support.klt_bases import random_basis
from support.zoo_models import model_of

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = "cpu"
K, V = PAIRS[0]
Q = torch.randn(1, 4, 3, 64)
KEYS = [b"a", b"b"]
SLOTS = [0, 2]
MODEL = model_of("Llama")


def letters(text: str) -> dict[str, list[int]]:
    """Return a tokenizer for a model of 64 tokens."""
    return {"input_ids": [1 + ord(letter) % 60 for letter in text]}


letters.bos_token_id = None  # type: ignore[attr-defined]


def live() -> kvpack.LiveCache:
    made = kvpack.LiveCache("kivi-4", layers=2)
    for number, (k, v) in enumerate(PAIRS):
        made.update(number, k, v)
    return made


def on_live(name: str, **given: Any) -> Any:
    return getattr(live(), name)(**given)


def pages() -> kvpack.pages.PageBuffer:
    k = torch.zeros(4, 2, 1, 16, 64, dtype=torch.bfloat16)
    return kvpack.pages.PageBuffer(GEOMETRY, k, k.clone())


def rows(codec: kvpack.pages.PageCodec) -> list[bytearray]:
    made = [bytearray(codec.nbytes) for _ in SLOTS]
    codec.encode_into(pages(), SLOTS, made)
    return made


def entries(folder: Path) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return each function with valid arguments, by name."""
    ids = list(range(300))
    path = folder / "a.kvpack"
    kvpack.save(CACHE, path)
    wide = kvpack.pack([(torch.randn(1, 1, 300, 64).bfloat16(),) * 2], "raw")
    basis = random_basis({(0, side): (1, 64) for side in "kv"}, 1)
    basis_path = folder / "a.kvbasis"
    basis_path.write_bytes(basis)

    def store() -> kvpack.Store:
        return kvpack.Store(folder / "store", IDENTITY)

    def page_store() -> kvpack.PageStore:
        return kvpack.PageStore(folder / "pages", IDENTITY, GEOMETRY)

    codec = kvpack.pages.PageCodec("raw", GEOMETRY)
    opened = store()
    opened.save(ids, wide)
    paged = page_store()
    layer, side = CACHE[0], CACHE[0].k
    assert side is not None
    window: dict[str, Any] = {
        "scale": 1.0,
        "causal": True,
        "softcap": 30.0,
        "sliding_window": 8,
        "sink_logits": torch.zeros(4),
        "starts": [0],
    }
    locations: dict[str, Any] = {
        "location": folder / "other",
        "identity": IDENTITY,
        "max_bytes": 10**9,
        "min_free": 0,
        "durable": False,
        "ttl": None,
        "timeout": None,
        "storage_options": None,
        "write_back": None,
        "encryption": {"a": bytes(32)},
        "check_values": True,
        "max_entry_bytes": 10**8,
    }
    engine = folder / "engine"
    engine.mkdir()
    (engine / "config.json").write_text("{}")
    page = torch.zeros(2 * 2 * 16 * 64, dtype=torch.bfloat16)
    pool = torch.zeros(4, page.numel(), dtype=torch.bfloat16)

    def writer(k: torch.Tensor, v: torch.Tensor | None) -> None:
        assert v is not None
        page.copy_(torch.cat([k.flatten(), v.flatten()]))

    layout = kvpack.pages.PageLayout.detect(GEOMETRY, writer, page)
    identity_options = dict.fromkeys(("name", "weights", "adapter", "tenant", "extra"), "x")
    engine_options = dict.fromkeys(("rope", "adapter", "tenant", "extra"), "x")
    identity = dict.fromkeys(("model", "weights", "adapter", "rope", "dtype", "tenant", "config", "extra"), "x")
    return {
        # The functions of the package.
        "pack": (
            kvpack.pack,
            {
                "past_key_values": PAIRS,
                "recipe": "kivi-4",
                "model": {"a": "b"},
                "start": 0,
                "inputs": None,
                "progress": None,
                "states_at": {},
            },
        ),
        "prefill": (
            lambda **given: kvpack.prefill(**given).release(),
            {"model": MODEL, "token_ids": [1, 2, 3], "contents": "raw", "every": 256, "chunk": 256},
        ),
        "evaluate": (
            partial(kvpack.evaluate, tokenizer=letters),
            {
                "model": MODEL,
                "texts": "text " * 20,
                "recipes": "raw",
                "reference": None,
                "tokens": 16,
                "scored_tokens": 4,
                "windows": 1,
                "step": 4,
                "seed": 0,
                "progress": None,
            },
        ),
        "Evaluation": (kvpack.bench.evaluate.Evaluation, {"report": {}}),
        "save": (
            kvpack.save,
            {"cache": CACHE, "path": folder / "b", "compress": False, "durable": False, "metadata": {"a": 1}, "progress": None},
        ),
        "inspect": (kvpack.inspect, {"path": path}),
        "verify": (kvpack.verify, {"path": path, "basis": None, "progress": None}),
        "load": (
            kvpack.load,
            {
                "path": path,
                "device": CPU,
                "layers": [0],
                "tokens": 32,
                "memory_limit": 10**9,
                "copy": False,
                "basis": None,
                "recipe": None,
                "progress": None,
            },
        ),
        "attend": (kvpack.attend, {"q": Q, "layer": layer, **window, "lengths": [40]}),
        "concat": (kvpack.concat, {"caches": [CACHE]}),
        "backends": (kvpack.backends, {}),
        # Caches, layers and sides.
        "Cache.__getitem__": (lambda index: CACHE[index], {"index": 0}),
        "Cache.positions": (CACHE.positions, {"layer_index": 0}),
        "Cache.select": (CACHE.select, {"indices": [0]}),
        "Cache.append": (CACHE.append, {"pairs": PAIRS}),
        "Cache.append of layers": (lambda k, v: CACHE.append([(k, v), (K, V)]), {"k": K, "v": V}),
        "Cache.convert": (CACHE.convert, {"recipe": "kivi-2", "progress": None}),
        "Cache.unpack": (CACHE.unpack, {"dtype": torch.float32}),
        "Cache.to": (CACHE.to, {"device": CPU}),
        "Layer.unpack": (layer.unpack, {"dtype": torch.float32}),
        "Layer[]": (lambda tokens: layer[tokens], {"tokens": slice(0, 32)}),
        "Layer.select": (layer.select, {"indices": [0]}),
        "Layer.append": (layer.append, {"k": K, "v": V}),
        "Layer.to": (layer.to, {"device": CPU}),
        "Side.unpack": (side.unpack, {"dtype": torch.float32}),
        "Side.unpack_into": (side.unpack_into, {"out": torch.empty(1, 2, 40, 64)}),
        "Side.prefix": (side.prefix, {"tokens": 4}),
        "Side.slice": (side.slice, {"start": 0, "stop": 32}),
        "Side.select": (side.select, {"indices": [0]}),
        "Side.append": (side.append, {"x": K}),
        "Side.concat": (side.concat, {}),
        "Side.to": (side.to, {"device": CPU}),
        "Minifloats": (
            kvpack.pages.Minifloats,
            {"elements": torch.zeros(1, 2, 4, 64).to(torch.float8_e4m3fn), "scales": torch.ones(1, 2, 4, 1)},
        ),
        # Recipes, inputs and bases.
        "Recipe": (kvpack.Recipe, {"text": "octopus-3", "basis": None}),
        "Recipe.codec": (kvpack.Recipe("octopus-3").codec, {"layer": 0, "layers": 2, "side": "k", "dim": 64, "dtype": "bf16"}),
        "Recipe.lossless": (kvpack.Recipe("octopus-3").lossless, {"layers": 2, "dim": 64}),
        "Recipe.calibrated": (kvpack.Recipe.calibrated, {"basis": basis_path, "bits": 2.5, "trellis": False}),
        "Inputs": (kvpack.Inputs, {"token_ids": b"\1\0\0\0", "undetermined": ("x",), "starts": (0,), "rows": (), "hidden": ()}),
        "Basis.load": (kvpack.Basis.load, {"path": basis_path}),
        "Basis.from_bytes": (kvpack.Basis.from_bytes, {"data": basis}),
        # Live caches.
        "LiveCache": (
            kvpack.LiveCache,
            {"recipe": "kivi-4", "layers": 2, "sliding_windows": [None, 8], "model": {"a": "b"}},
        ),
        "LiveCache.of": (kvpack.LiveCache.of, {"cache": CACHE, "sliding_windows": [None, 64]}),
        **{
            f"LiveCache.{name}": (partial(on_live, name), {"layer": 0})
            for name in ("seen_tokens", "stored_tokens", "skipped_tokens", "batch", "shapes", "keep_past", "share", "reset")
        },
        "LiveCache.update": (lambda **given: live().update(**given), {"layer": 0, "k": K, "v": V}),
        "LiveCache.try_update": (lambda **given: live().try_update(**given), {"layer": 0, "k": K, "v": V}),
        "LiveCache.attend": (lambda **given: live().attend(**given), {"layer": 0, "q": Q, **window}),
        "LiveCache.record_replay": (lambda **given: live().record_replay(**given), {"tokens": 0}),
        "LiveCache.adjust_length": (lambda **given: live().adjust_length(**given), {"tokens": 40}),
        "LiveCache.layer": (lambda **given: live().layer(**given), {"layer": 0, "packed": False}),
        "LiveCache.unpack": (lambda **given: live().unpack(**given), {"layer": 0, "dtype": torch.float32}),
        "LiveCache.freeze": (lambda **given: live().freeze(**given), {"packed": False}),
        "LiveCache.truncate": (lambda **given: live().truncate(**given), {"tokens": 1, "layer": 0}),
        "LiveCache.select": (lambda **given: live().select(**given), {"indices": [0], "layer": 0}),
        "LiveCache.to": (lambda **given: live().to(**given), {"device": CPU}),
        # Identities and stores.
        "Identity": (kvpack.Identity, {"recipe": "raw", **identity, "windows": (8, None), "keeps_states": True}),
        "Identity.of": (kvpack.Identity.of, {"model": torch.nn.Linear(1, 1), "recipe": "raw", **identity_options}),
        "Identity.of_engine": (
            kvpack.Identity.of_engine,
            {"model_path": engine, "recipe": "raw", "kv_dtype": "bf16", "layout": "x", "revision": "1", "tp": (0, 1), **engine_options},
        ),
        "Tier": (kvpack.Tier, {"location": folder / "tier", "max_bytes": 10**9}),
        "Store": (lambda **given: kvpack.Store(**given).close(), {**locations, "chunk": 256}),
        "Store.keys": (opened.keys, {"token_ids": ids, "inputs": [b""]}),
        "Store.match": (opened.match, {"token_ids": ids, "inputs": [b""]}),
        "Store.load": (opened.load, {"token_ids": ids, "device": CPU, "inputs": [b""]}),
        "Store.save": (opened.save, {"token_ids": ids, "cache": wide, "inputs": [b""]}),
        "Store.pin": (opened.pin, {"token_ids": ids, "inputs": [b""]}),
        "Store.unpin": (opened.unpin, {"token_ids": ids, "inputs": [b""]}),
        "Store.prometheus": (opened.prometheus, {"labels": {"model": "m"}}),
        "Store.delete": (opened.delete, {"token_ids": ids, "start": 256, "inputs": [b""]}),
        # Pages of engines.
        "PageGeometry": (kvpack.pages.PageGeometry, {"layers": 1, "heads": 1, "tokens": 16, "dim_k": 64, "dim_v": 64, "dtype": "bf16"}),
        "PageGeometry.contents": (GEOMETRY.contents, {"recipe": "raw"}),
        "PageGeometry.of_bytes": (kvpack.pages.PageGeometry.of_bytes, {"count": 4096, "layers": 1}),
        "PageBuffer": (kvpack.pages.PageBuffer, {"geometry": GEOMETRY, "k": pages().sides["k"], "v": pages().sides["v"]}),
        "PageBuffer.checked_slots": (pages().checked_slots, {"slots": SLOTS, "written": True}),
        "PageCodec": (kvpack.pages.PageCodec, {"recipe": "raw", "geometry": GEOMETRY, "threads": 1, "namespace": bytes(32)}),
        "PageCodec.encode_into": (codec.encode_into, {"pages": pages(), "slots": SLOTS, "rows": rows(codec), "keys": KEYS}),
        "PageCodec.decode_into": (
            codec.decode_into,
            {"rows": rows(codec), "pages": pages(), "slots": SLOTS, "keys": KEYS, "check_values": True},
        ),
        "PageCodec.start_encode": (codec.start_encode, {"pages": pages(), "slots": SLOTS, "rows": rows(codec), "keys": KEYS}),
        "PageCodec.start_decode": (
            codec.start_decode,
            {"rows": rows(codec), "pages": pages(), "slots": SLOTS, "keys": KEYS, "check_values": True},
        ),
        "PageLayout.detect": (kvpack.pages.PageLayout.detect, {"geometry": GEOMETRY, "write": writer, "page": page}),
        "PageLayout.buffer": (layout.buffer, {"pool": pool}),
        "PageLayout.staging": (layout.staging, {"slots": 2}),
        "PageLayout.gather": (layout.gather, {"pool": pool, "slots": SLOTS, "staging": layout.staging(2)}),
        "PageLayout.scatter": (layout.scatter, {"staging": layout.staging(2), "pool": pool, "slots": SLOTS}),
        "PageCodec.check": (codec.check, {"rows": rows(codec), "keys": KEYS, "check_values": True}),
        "PageStore": (lambda **given: kvpack.PageStore(**given).close(), {**locations, "geometry": GEOMETRY, "threads": 1, "jobs": 1}),
        "PageStore.contains": (paged.contains, {"keys": KEYS}),
        "PageStore.put": (paged.put, {"keys": KEYS, "pages": pages(), "slots": SLOTS, "ancestors": [b"c"]}),
        "PageStore.get_into": (paged.get_into, {"keys": KEYS, "pages": pages(), "slots": SLOTS}),
        "PageStore.touch": (paged.touch, {"keys": KEYS, "ancestors": [b"c"]}),
        "PageStore.prometheus": (paged.prometheus, {"labels": {"model": "m"}}),
        "PageStore.delete": (paged.delete, {"keys": KEYS}),
        "PageStore.submit_put": (paged.submit_put, {"keys": KEYS, "pages": pages(), "slots": SLOTS, "ancestors": [b"c"]}),
        "PageStore.submit_get": (paged.submit_get, {"keys": KEYS, "pages": pages(), "slots": SLOTS}),
    }


_FOLDER = tempfile.TemporaryDirectory(prefix="kvpack-foreign-")
CALLS = entries(Path(_FOLDER.name))


PARTS = {
    "Cache": {"check_ends"},
    "Identity": {"from_header", "from_model_parts", "weights_of_kind"},
    "Inputs": {"from_bytes", "from_features", "from_rows", "select", "slice", "to_features", "with_missing_ids"},
    "LiveCache": {"snapshot"},
    "PageCodec": {"validate_arguments"},
    "PageGeometry": {"codec", "slots"},
    "PageStore": {"put_new"},
    "Recipe": {"check_layers", "from_recorded"},
    "Side": {"check_new_tokens", "decode_frame", "map_buffers", "norms", "repack", "run_containing", "tiles", "with_run"},
}
"""Methods that only other kvpack modules call, with arguments that were already checked."""
CLASSES = (
    kvpack.Cache,
    kvpack.Identity,
    kvpack.Inputs,
    kvpack.Layer,
    kvpack.LiveCache,
    kvpack.pages.PageBuffer,
    kvpack.pages.PageCodec,
    kvpack.pages.PageGeometry,
    kvpack.pages.PageLayout,
    kvpack.PageStore,
    kvpack.Recipe,
    kvpack.Side,
    kvpack.Store,
)


def test_every_public_function_is_tested() -> None:
    errors = {name for name in kvpack.__all__ if isinstance(getattr(kvpack, name), type) and issubclass(getattr(kvpack, name), Exception)}
    functions = {name for name in set(kvpack.__all__) - errors if callable(getattr(kvpack, name))}
    assert functions - {name.partition(".")[0] for name in CALLS} == set()
    missing = []
    for owner in CLASSES:
        for name, method in inspect.getmembers(owner, callable):
            tried = f"{owner.__name__}.{name}" in CALLS or name in PARTS.get(owner.__name__, ())
            if name.startswith("_") or name in vars(object) or tried:
                continue
            if set(inspect.signature(method).parameters) - {"self"}:
                missing.append(f"{owner.__name__}.{name}")
    assert missing == []


@pytest.mark.scenario
@pytest.mark.parametrize(("call", "given"), CALLS.values(), ids=CALLS)
def test_foreign_arguments_are_accepted_or_refused_by_a_kvpack_error(
    call: Callable[..., Any], given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    replaced = {
        f"{argument}={what}": {argument: value}
        for argument in given
        for what, value in FOREIGN.items()
        # A function of the caller's that fails is the caller's.
        if argument not in ("progress", "write") or not callable(value)
    }
    for first, second in itertools.combinations(given, 2):
        replaced[f"{first} and {second} swapped"] = {first: given[second], second: given[first]}
    found = foreign_errors(lambda changed: call(**{**given, **changed}), replaced)
    assert not found, "\n" + "\n".join(found)
