"""Every public function with every argument replaced by values that do not belong there: it works, or raises a KvpackError.

Each entry is a call that works. Its arguments are replaced one at a time, and swapped two at a time.
"""

from __future__ import annotations

import inspect
import itertools
import tempfile
import warnings
from collections import UserList
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from caches import random_pairs

import kvpack
from kvpack.errors import KvpackError

from klt_bases import random_basis  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = "cpu"
PAIRS = random_pairs(2, 40)
CACHE = kvpack.pack(PAIRS, "kivi-4")
K, V = PAIRS[0]
Q = torch.randn(1, 4, 3, 64)
IDENTITY = kvpack.Identity("m", "raw")
GEOMETRY = kvpack.PageGeometry(2, 1, 16, 64, 64)
KEYS = [b"a", b"b"]
SLOTS = [0, 2]


class _Odd:
    """An object that has nothing in common with any argument."""


class _Liar:
    """An object that has the attributes which duck typing asks for, and fails when they are used."""

    shape, dtype, device, layers, packed, ndim = (1,), "float", "cpu", 3, None, 2

    def __len__(self) -> int:
        return 2


def _prototypes() -> dict[str, torch.Tensor]:
    """Tensors of kinds that PyTorch warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "a compressed sparse tensor": torch.ones(4, 4).to_sparse_csr(),
            "a quantized tensor": torch.quantize_per_tensor(torch.randn(1, 4, 3, 64), 0.1, 0, torch.qint8),
            "a nested tensor": torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged),
        }


FOREIGN: dict[str, Any] = {
    "None": None,
    "a bool": True,
    "zero": 0,
    "a negative integer": -3,
    "an integer": 7,
    "a huge integer": 2**70,
    "a huge negative integer": -(2**70),
    "a float": 0.5,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "a complex number": 1j,
    "empty text": "",
    "text": "octopus",
    "text with a zero byte": "a\0b",
    "a surrogate": "\udc80",
    "the name of no device": "tpu:0",
    "mps": "mps",
    "xpu": "xpu",
    "cuda:99": "cuda:99",
    "meta": "meta",
    "bytes": b"abc",
    "bytes of a file": b"\x80\0\0\0" * 300,
    "a path": Path("nowhere/file"),
    "a class": int,
    "a function": len,
    "an object": _Odd(),
    "a liar": _Liar(),
    "an empty list": [],
    "an empty tuple": (),
    "a list of None": [None],
    "a list of integers": [1, 2],
    "a list of floats": [0.5],
    "a list of text": ["a", "b"],
    "a list of lists": [[1], [2, 3]],
    "a list of objects": [_Odd(), _Odd()],
    "an iterator": iter([1, 2]),
    "a user's list": UserList([0, 1]),
    "a set": {1, 2},
    "a dict": {"a": 1},
    "a dict of integers": {1: 2},
    "a range": range(3),
    "a slice": slice(None),
    "an array": np.arange(4.0),
    "an array of objects": np.array([None, "a"], dtype=object),
    "a scalar of numpy": np.int64(1),
    "a float of numpy": np.float32(0.5),
    "a tensor": torch.randn(1, 2, 40, 64),
    "an empty tensor": torch.empty(0),
    "a scalar tensor": torch.tensor(3),
    "a tensor of integers": torch.arange(4),
    "a boolean tensor": torch.tensor([True, False]),
    "a complex tensor": torch.zeros(1, 2, 40, 64, dtype=torch.complex64),
    "a double tensor": torch.zeros(1, 2, 40, 64, dtype=torch.float64),
    "a float8 tensor": torch.zeros(1, 2, 40, 64).to(torch.float8_e4m3fn),
    "a meta tensor": torch.empty(1, 4, 3, 64, device="meta"),
    "a meta tensor of ids": torch.empty(300, dtype=torch.int64, device="meta"),
    "a sparse tensor": torch.ones(1, 4, 3, 64).to_sparse(),
    "a sparse tensor of ids": torch.ones(300, dtype=torch.int64).to_sparse(),
    **_prototypes(),
    "a tensor without dimensions left": torch.randn(1, 2, 0, 64),
    "a tensor of no batch": torch.randn(0, 2, 3, 64),
    "a tensor of no channels": torch.randn(1, 2, 3, 0),
    "a parameter": torch.nn.Parameter(torch.randn(1, 4, 3, 64)),
    "a module": torch.nn.Linear(2, 2),
    "a dtype": torch.float32,
    "an integer dtype": torch.int8,
    "a complex dtype": torch.complex64,
    "a float8 dtype": torch.float8_e5m2,
    "a device": torch.device("cpu"),
    "a meta device": torch.device("meta"),
    "a cache": CACHE,
    "a layer": CACHE[0],
    "a side": CACHE[0].k,
    "an empty cache": CACHE[:, :0],
    "a recipe": kvpack.Recipe("octopus-3"),
    "an identity": IDENTITY,
    "a geometry": GEOMETRY,
    "inputs": kvpack.Inputs(),
    "a live cache": kvpack.LiveCache("raw", layers=1),
    "pairs": PAIRS,
    "pairs of arrays": [(np.zeros((1, 2, 40, 64), np.float32),) * 2] * 2,
    "a recipe with a comma": "octopus-3,tail=32",
}


def live() -> kvpack.LiveCache:
    made = kvpack.LiveCache("kivi-4", layers=2)
    for number, (k, v) in enumerate(PAIRS):
        made.update(number, k, v)
    return made


def on_live(name: str, **given: Any) -> Any:
    return getattr(live(), name)(**given)


def pages() -> kvpack.PageBuffer:
    k = torch.zeros(4, 2, 1, 16, 64, dtype=torch.bfloat16)
    return kvpack.PageBuffer(GEOMETRY, k, k.clone())


def rows(codec: kvpack.PageCodec) -> list[bytearray]:
    made = [bytearray(codec.nbytes) for _ in SLOTS]
    codec.encode_into(pages(), SLOTS, made)
    return made


def entries(folder: Path) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Each function with arguments for which it works, by name."""
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

    codec = kvpack.PageCodec("raw", GEOMETRY)
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
        "basis": None,
    }
    engine = folder / "engine"
    engine.mkdir()
    (engine / "config.json").write_text("{}")
    page = torch.zeros(2 * 2 * 16 * 64, dtype=torch.bfloat16)
    pool = torch.zeros(4, page.numel(), dtype=torch.bfloat16)

    def writer(k: torch.Tensor, v: torch.Tensor | None) -> None:
        assert v is not None
        page.copy_(torch.cat([k.flatten(), v.flatten()]))

    layout = kvpack.PageLayout.certify(GEOMETRY, writer, page)
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
                "basis": None,
                "progress": None,
            },
        ),
        "save": (
            kvpack.save,
            {"cache": CACHE, "path": folder / "b", "compress": False, "durable": False, "metadata": {"a": 1}, "progress": None},
        ),
        "load": (
            kvpack.load,
            {
                "path": path,
                "device": CPU,
                "layers": [0],
                "tokens": 32,
                "max_bytes": 10**9,
                "copy": False,
                "basis": None,
                "recipe": None,
            },
        ),
        "attend": (kvpack.attend, {"q": Q, "layer": layer, **window, "lengths": [40]}),
        "concat": (kvpack.concat, {"caches": [CACHE]}),
        "backends": (kvpack.backends, {}),
        # Caches, layers and sides.
        "Cache.__getitem__": (lambda index: CACHE[index], {"index": 0}),
        "Cache.positions": (CACHE.positions, {"number": 0}),
        "Cache.prefix": (CACHE.prefix, {"tokens": 4}),
        "Cache.slice": (CACHE.slice, {"start": 0, "stop": 32}),
        "Cache.select": (CACHE.select, {"indices": [0]}),
        "Cache.append": (CACHE.append, {"pairs": PAIRS}),
        "Cache.append of layers": (lambda k, v: CACHE.append([(k, v), (K, V)]), {"k": K, "v": V}),
        "Cache.convert": (CACHE.convert, {"recipe": "kivi-2", "basis": None, "progress": None}),
        "Cache.unpack": (CACHE.unpack, {"dtype": torch.float32}),
        "Cache.to": (CACHE.to, {"device": CPU}),
        "Layer.unpack": (layer.unpack, {"dtype": torch.float32}),
        "Layer.prefix": (layer.prefix, {"tokens": 4}),
        "Layer.slice": (layer.slice, {"start": 0, "stop": 32}),
        "Layer.crop": (layer.crop, {"count": 1}),
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
            kvpack.Minifloats,
            {"elements": torch.zeros(1, 2, 4, 64).to(torch.float8_e4m3fn), "scales": torch.ones(1, 2, 4, 1)},
        ),
        # Recipes, inputs and bases.
        "Recipe": (kvpack.Recipe, {"text": "octopus-3", "basis": None}),
        "Recipe.codec": (kvpack.Recipe("octopus-3").codec, {"layer": 0, "layers": 2, "side": "k", "dim": 64, "dtype": "bf16"}),
        "Recipe.lossless": (kvpack.Recipe("octopus-3").lossless, {"layers": 2, "dim": 64}),
        "Inputs": (kvpack.Inputs, {"token_ids": b"\1\0\0\0", "undetermined": ("x",), "starts": (0,)}),
        "Basis.load": (kvpack.Basis.load, {"path": basis_path}),
        "Basis.of_bytes": (kvpack.Basis.of_bytes, {"data": basis}),
        # Live caches.
        "LiveCache": (
            kvpack.LiveCache,
            {"recipe": "kivi-4", "layers": 2, "sliding_windows": [None, 8], "model": {"a": "b"}, "basis": None},
        ),
        "LiveCache.of": (kvpack.LiveCache.of, {"cache": CACHE, "sliding_windows": [None, 64]}),
        **{
            f"LiveCache.{name}": (partial(on_live, name), {"layer": 0})
            for name in ("seen", "held", "skipped", "batch", "shapes", "keep_past", "share", "reset")
        },
        "LiveCache.update": (lambda **given: live().update(**given), {"layer": 0, "k": K, "v": V}),
        "LiveCache.append": (lambda **given: live().append(**given), {"layer": 0, "k": K, "v": V}),
        "LiveCache.attend": (lambda **given: live().attend(**given), {"layer": 0, "q": Q, **window}),
        "LiveCache.replayed": (lambda **given: live().replayed(**given), {"tokens": 0}),
        "LiveCache.recount": (lambda **given: live().recount(**given), {"tokens": 40}),
        "LiveCache.layer": (lambda **given: live().layer(**given), {"layer": 0, "packed": False}),
        "LiveCache.unpacked": (lambda **given: live().unpacked(**given), {"layer": 0, "dtype": torch.float32}),
        "LiveCache.freeze": (lambda **given: live().freeze(**given), {"packed": False}),
        "LiveCache.crop": (lambda **given: live().crop(**given), {"tokens": 1, "layer": 0}),
        "LiveCache.select": (lambda **given: live().select(**given), {"indices": [0], "layer": 0}),
        "LiveCache.to": (lambda **given: live().to(**given), {"device": CPU}),
        # Identities and stores.
        "Identity": (kvpack.Identity, {"recipe": "raw", **identity}),
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
        "Store.delete": (opened.delete, {"token_ids": ids, "start": 256, "inputs": [b""]}),
        # Pages of engines.
        "PageGeometry": (kvpack.PageGeometry, {"layers": 1, "heads": 1, "tokens": 16, "dim_k": 64, "dim_v": 64, "dtype": "bf16"}),
        "PageGeometry.contents": (GEOMETRY.contents, {"recipe": "raw"}),
        "PageGeometry.of_bytes": (kvpack.PageGeometry.of_bytes, {"count": 4096, "layers": 1}),
        "PageBuffer": (kvpack.PageBuffer, {"geometry": GEOMETRY, "k": pages().sides["k"], "v": pages().sides["v"]}),
        "PageBuffer.checked_slots": (pages().checked_slots, {"slots": SLOTS, "written": True}),
        "PageCodec": (kvpack.PageCodec, {"recipe": "raw", "geometry": GEOMETRY, "threads": 1, "namespace": bytes(32), "basis": None}),
        "PageCodec.encode_into": (codec.encode_into, {"pages": pages(), "slots": SLOTS, "rows": rows(codec), "keys": KEYS}),
        "PageCodec.decode_into": (
            codec.decode_into,
            {"rows": rows(codec), "pages": pages(), "slots": SLOTS, "keys": KEYS, "values": True},
        ),
        "PageCodec.start_encode": (codec.start_encode, {"pages": pages(), "slots": SLOTS, "rows": rows(codec), "keys": KEYS}),
        "PageCodec.start_decode": (
            codec.start_decode,
            {"rows": rows(codec), "pages": pages(), "slots": SLOTS, "keys": KEYS, "values": True},
        ),
        "PageLayout.certify": (kvpack.PageLayout.certify, {"geometry": GEOMETRY, "write": writer, "page": page}),
        "PageLayout.buffer": (layout.buffer, {"pool": pool}),
        "PageLayout.staging": (layout.staging, {"slots": 2}),
        "PageLayout.gather": (layout.gather, {"pool": pool, "slots": SLOTS, "staging": layout.staging(2)}),
        "PageLayout.scatter": (layout.scatter, {"staging": layout.staging(2), "pool": pool, "slots": SLOTS}),
        "PageCodec.check": (codec.check, {"rows": rows(codec), "keys": KEYS, "values": True}),
        "PageStore": (lambda **given: kvpack.PageStore(**given).close(), {**locations, "geometry": GEOMETRY, "threads": 1, "jobs": 1}),
        "PageStore.present": (paged.present, {"keys": KEYS}),
        "PageStore.put": (paged.put, {"keys": KEYS, "pages": pages(), "slots": SLOTS, "ancestors": [b"c"]}),
        "PageStore.get_into": (paged.get_into, {"keys": KEYS, "pages": pages(), "slots": SLOTS}),
        "PageStore.touch": (paged.touch, {"keys": KEYS, "ancestors": [b"c"]}),
        "PageStore.delete": (paged.delete, {"keys": KEYS}),
        "PageStore.submit_put": (paged.submit_put, {"keys": KEYS, "pages": pages(), "slots": SLOTS, "ancestors": [b"c"]}),
        "PageStore.submit_get": (paged.submit_get, {"keys": KEYS, "pages": pages(), "slots": SLOTS}),
    }


_FOLDER = tempfile.TemporaryDirectory(prefix="kvpack-foreign-")
CALLS = entries(Path(_FOLDER.name))


PARTS = {
    "Cache": {"check_ends"},
    "Identity": {"of_header", "of_parts"},
    "Inputs": {"from_bytes", "from_features", "select", "slice"},
    "LiveCache": {"frozen_as_it_is"},
    "PageCodec": {"checked"},
    "PageGeometry": {"codec"},
    "Recipe": {"check_layers", "recorded"},
    "Side": {"followed_by", "frame", "moved", "place", "repacked", "tiles"},
}
"""Methods that other modules of kvpack call, with arguments that are checked before."""
CLASSES = (
    kvpack.Cache,
    kvpack.Identity,
    kvpack.Inputs,
    kvpack.Layer,
    kvpack.LiveCache,
    kvpack.PageBuffer,
    kvpack.PageCodec,
    kvpack.PageGeometry,
    kvpack.PageLayout,
    kvpack.PageStore,
    kvpack.Recipe,
    kvpack.Side,
    kvpack.Store,
)


def test_every_public_function_is_tried() -> None:
    errors = {name for name in kvpack.__all__ if isinstance(getattr(kvpack, name), type) and issubclass(getattr(kvpack, name), Exception)}
    functions = {name for name in set(kvpack.__all__) - errors if callable(getattr(kvpack, name))}
    # Pages are made by kvpack alone.
    assert functions - {"Page"} - {name.partition(".")[0] for name in CALLS} == set()
    missing = []
    for owner in CLASSES:
        for name, method in inspect.getmembers(owner, callable):
            tried = f"{owner.__name__}.{name}" in CALLS or name in PARTS.get(owner.__name__, ())
            if name.startswith("_") or name in vars(object) or tried:
                continue
            if set(inspect.signature(method).parameters) - {"self"}:
                missing.append(f"{owner.__name__}.{name}")
    assert missing == []


def foreign_errors(call: Callable[..., Any], given: dict[str, Any], replaced: dict[str, dict[str, Any]]) -> list[str]:
    """The calls that raised anything but a KvpackError, or one without a message."""
    found = []
    for what, changed in replaced.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                call(**{**given, **changed})
            except KvpackError as error:
                if not str(error).strip() or len(str(error)) > 2000:
                    found.append(f"{what}: the message {str(error)!r:.100} of {len(str(error))} characters")
            except Exception as error:
                found.append(f"{what}: {type(error).__name__}: {str(error).splitlines()[:1]}")
    return found


@pytest.mark.parametrize(("call", "given"), CALLS.values(), ids=CALLS)
def test_foreign_arguments(call: Callable[..., Any], given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    found = foreign_errors(call, given, replaced)
    assert not found, "\n" + "\n".join(found)
