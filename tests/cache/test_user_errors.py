"""Tests of user mistakes: each raises an error of one class, whose message shows the correct call."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import kvpack
from kvpack import cli
from kvpack.errors import InvalidParameter, InvalidType, KvpackError, MissingFile, OutOfBounds, WriteFailed
from support.caches import random_pairs

PAIRS = random_pairs(2, 40)
CACHE = kvpack.pack(PAIRS, "kivi-4")
K, V = PAIRS[0]
Q = torch.randn(1, 4, 1, 64)
META = Q.to("meta")
ABSENT = "xpu" if not torch.xpu.is_available() else "mps"


class KvpackCache:
    """A stand-in for the class of the transformers integration, which other tests in this file do not need."""

    packed = CACHE


Call = tuple[Callable[[], object], type[KvpackError], str]

CALLS: dict[str, Call] = {
    # save and load
    "save a list": (
        lambda: kvpack.save([(K, V)], "x"),
        InvalidType,
        r"use kvpack\.save\(kvpack\.pack\(past_key_values, recipe\), path\)",
    ),
    "save a path": (lambda: kvpack.save("file", "x"), InvalidType, r"use kvpack\.save\(kvpack\.load\('file'\), path\)"),
    "save a KvpackCache": (lambda: kvpack.save(KvpackCache(), "x"), InvalidType, r"use kvpack\.save\(cache\.packed, path\)"),
    "save a tensor": (lambda: kvpack.save(K, "x"), InvalidType, "a Tensor is not a packed cache: create one with kvpack.pack"),
    "save to a cache": (lambda: kvpack.save("x", CACHE), InvalidType, "path is a Cache, expected a str or os.PathLike"),
    "save a layer": (lambda: kvpack.save(CACHE[0], "x"), InvalidType, "a Layer is not a packed cache"),
    "save None": (lambda: kvpack.save(None, "x"), InvalidType, "a NoneType is not a packed cache"),
    "save to None": (lambda: kvpack.save(CACHE, None), InvalidType, "path is None, expected a str or os.PathLike"),
    "save to a number": (lambda: kvpack.save(CACHE, 3), InvalidType, "path is a int, expected"),
    "save to a folder": (lambda: kvpack.save(CACHE, "/"), WriteFailed, "/: could not be written, because it is not a regular file"),
    "save to a folder that does not exist": (lambda: kvpack.save(CACHE, "no/x"), WriteFailed, "pass a path in an existing folder"),
    "load None": (lambda: kvpack.load(None), InvalidType, "path is None, expected a str or os.PathLike"),
    "load a cache": (lambda: kvpack.load(CACHE), InvalidType, "path is a Cache, expected"),
    "load bytes of no path": (lambda: kvpack.load("nothing.kvpack"), MissingFile, "nothing.kvpack: could not be opened: No such file"),
    "load on no device": (lambda: kvpack.load("x", device="gpu"), InvalidParameter, "device is 'gpu', expected .*'cuda:0'"),
    "load on no device of this PyTorch": (
        lambda: kvpack.load("x", device=ABSENT),
        InvalidParameter,
        f"device is '{ABSENT}', which this version of PyTorch cannot use .*: use another, such as 'cpu'",
    ),
    "load on the meta device": (lambda: kvpack.load("x", device="meta"), InvalidParameter, "meta', which has no values"),
    "load the bytes of a file": (lambda: kvpack.load(b"\x80\0\0" * 99), InvalidType, "got 297 bytes instead of a path"),
    "load a limit of text": (lambda: kvpack.load("x", memory_limit="1GB"), InvalidType, "memory_limit is '1GB', expected an integer"),
    # pack
    "pack a path": (lambda: kvpack.pack("x.kvpack", "kivi-4"), InvalidType, "the path 'x.kvpack' is not a KV cache: open kvpack files"),
    "pack a Path": (lambda: kvpack.pack(Path("x"), "kivi-4"), InvalidType, "open kvpack files with kvpack.load"),
    "pack None": (lambda: kvpack.pack(None, "kivi-4"), InvalidType, "a NoneType is not a KV cache: pass"),
    "pack a number": (lambda: kvpack.pack(3, "kivi-4"), InvalidType, "a int is not a KV cache: pass"),
    "pack one tensor": (lambda: kvpack.pack(K, "kivi-4"), InvalidType, "a Tensor is not a KV cache: pass"),
    "pack tensors in place of a list": (
        lambda: kvpack.pack(K, V),
        InvalidType,
        r"the recipe is a Tensor: pass keys and values as one argument, such as kvpack.pack\(\(k, v\), 'kvpack-4'\)",
    ),
    "pack a list of tensors": (lambda: kvpack.pack([K, V, K, V], "kivi-4"), InvalidType, r"layers\[0\] is a Tensor, expected \(k, v\)"),
    "pack a list of short tuples": (lambda: kvpack.pack([(K, V), (K,)], "kivi-4"), InvalidType, r"layers\[1\] is a tuple of 1, expected"),
    "pack arrays": (lambda: kvpack.pack([(K.float().numpy(),) * 2], "kivi-4"), InvalidType, "got a ndarray.*torch.from_numpy"),
    "pack a cache": (lambda: kvpack.pack(CACHE, "kivi-4"), InvalidType, "already packed: change its recipe with Cache.convert"),
    "pack integers": (lambda: kvpack.pack([(K.int(), V)], "kivi-4"), InvalidType, "dtype torch.int32, expected bfloat16"),
    "pack fp8": (lambda: kvpack.pack([(K.to(torch.float8_e5m2), V)], "fp8"), InvalidType, r"kvpack.pages.Minifloats\(elements, scales\)"),
    "pack rank 3": (lambda: kvpack.pack([(K[0], V[0])], "kivi-4"), InvalidParameter, r"\[batch, kv_head, token, dim\]"),
    "pack a meta tensor": (lambda: kvpack.pack([(K.to("meta"), V)], "kivi-4"), InvalidType, "with layout torch.strided on meta"),
    "pack a sparse tensor": (lambda: kvpack.pack([(K.to_sparse(), V)], "kivi-4"), InvalidType, "layout torch.sparse_coo"),
    "pack NaN": (lambda: kvpack.pack([(K * torch.nan, V)], "kivi-4"), InvalidParameter, "token 0, channel 0 is nan"),
    "pack an old DynamicCache": (
        lambda: kvpack.pack(SimpleNamespace(key_cache=[K], value_cache=[V], _seen_tokens=40), "kivi-4"),
        InvalidType,
        r"from a transformers version before 4.56: pass list\(zip\(cache.key_cache, cache.value_cache\)\)",
    ),
    "pack with a progress of text": (
        lambda: kvpack.pack(PAIRS, "kivi-4", progress="bar"),
        InvalidType,
        "progress is 'bar', expected a callable",
    ),
    "pack without a recipe": (
        lambda: kvpack.pack(PAIRS, None),
        InvalidType,
        "a recipe must be text, such as 'kvpack-3', but got a NoneType",
    ),
    "pack with an unknown recipe": (lambda: kvpack.pack(PAIRS, "octopus"), InvalidParameter, "did you mean octopus-"),
    "model is a number": (lambda: kvpack.pack(PAIRS, "kivi-4", model=3), InvalidType, "model is a int, expected a transformers model"),
    "start is text": (lambda: kvpack.pack(PAIRS, "kivi-4", start="0"), InvalidType, "start is '0', expected an integer"),
    "start is negative": (lambda: kvpack.pack(PAIRS, "kivi-4", start=-1), InvalidParameter, "start is -1"),
    # attend
    "attend a cache": (lambda: kvpack.attend(Q, CACHE), InvalidType, r"one layer, such as cache\[0\], but got a Cache$"),
    "attend tensors": (
        lambda: kvpack.attend(Q, K),
        InvalidType,
        r"got a Tensor: pack keys and values with kvpack.pack, and pass a layer",
    ),
    "attend None": (lambda: kvpack.attend(Q, None), InvalidType, "got a NoneType"),
    "attend an array": (lambda: kvpack.attend(Q.numpy(), CACHE[0]), InvalidType, "q is a ndarray, expected a tensor"),
    "attend without q": (lambda: kvpack.attend(None, CACHE[0]), InvalidType, "q is a NoneType"),
    "q of other heads": (lambda: kvpack.attend(Q[:, :3], CACHE[0]), InvalidParameter, "a multiple of the number of key heads"),
    "q of another batch": (lambda: kvpack.attend(torch.cat([Q, Q]), CACHE[0]), InvalidParameter, "batch and dim must be the same"),
    "q of another dim": (lambda: kvpack.attend(Q[..., :32], CACHE[0]), InvalidParameter, "batch and dim must be the same"),
    "q of integers": (lambda: kvpack.attend(Q.int(), CACHE[0]), InvalidType, "expected a floating-point dtype"),
    "q elsewhere": (lambda: kvpack.attend(META, CACHE[0]), InvalidParameter, r"q is on meta, but the layer is on cpu .*q.to\(...\)"),
    "no query": (lambda: kvpack.attend(Q[:, :, :0], CACHE[0]), InvalidParameter, "expected at least one query"),
    "a sparse q": (lambda: kvpack.attend(Q.to_sparse(), CACHE[0]), InvalidType, r"layout torch.sparse_coo.*q.to_dense\(\)"),
    "causal of text": (lambda: kvpack.attend(Q, CACHE[0], causal="no"), InvalidType, "causal is 'no', expected True or False"),
    "a huge window": (lambda: kvpack.attend(Q, CACHE[0], sliding_window=2**70), InvalidParameter, "is a 71-bit integer, expected"),
    "scale of text": (lambda: kvpack.attend(Q, CACHE[0], scale="1"), InvalidType, "scale is '1', expected a number"),
    "softcap of text": (lambda: kvpack.attend(Q, CACHE[0], softcap="30"), InvalidType, "softcap is '30', expected a number"),
    "window of text": (
        lambda: kvpack.attend(Q, CACHE[0], sliding_window="8"),
        InvalidType,
        "window is '8', expected an integer",
    ),
    "lengths of a number": (lambda: kvpack.attend(Q, CACHE[0], lengths=40), InvalidType, "lengths is 40, expected a list of integers"),
    "lengths of floats": (lambda: kvpack.attend(Q, CACHE[0], lengths=[40.0]), InvalidType, r"lengths\[0\] is 40.0, expected an integer"),
    # a cache where transformers wants its own
    "a cache in a model": (
        lambda: CACHE.get_seq_length(),
        InvalidParameter,
        r"not a transformers cache: .*KvpackCache\.of\(cache, model\)",
    ),
    "a cache in generate": (lambda: setattr(CACHE, "_is_user_defined", True), InvalidParameter, r"KvpackCache.load\(path, model\)"),
    "a layer in a model": (lambda: CACHE[0].update(0, K, V), InvalidParameter, "a packed Layer is not a transformers cache"),
    # concat, slices, append, unpack
    "concat of a cache": (lambda: kvpack.concat(CACHE), InvalidType, "concat needs a list of packed caches, but got a Cache"),
    "concat of None": (lambda: kvpack.concat(None), InvalidType, "a list of packed caches, but got a NoneType"),
    "concat of tensors": (
        lambda: kvpack.concat([CACHE, K]),
        InvalidType,
        r"caches\[1\] is a Tensor, expected a packed cache: create one with kvpack.pack",
    ),
    "concat of paths": (lambda: kvpack.concat(["a", "b"]), InvalidType, r"caches\[0\] is a str, .*kvpack.load"),
    "concat of nothing": (lambda: kvpack.concat([]), InvalidParameter, "at least one"),
    "concat of other tokens": (lambda: kvpack.concat([CACHE, CACHE]), InvalidParameter, r"tokens \[0:40\] are followed by tokens \[0:40\]"),
    "a layer beyond the last": (lambda: CACHE[2], OutOfBounds, "layer 2 is out of range: the cache has 2 layers"),
    "a layer by name": (lambda: CACHE["0"], OutOfBounds, r"index a cache as cache\[layer\]"),
    "a slice of text": (lambda: CACHE[:, "0":3], OutOfBounds, "index a cache as cache"),
    "a slice of a layer": (lambda: CACHE[0][:1.5], InvalidType, "stop is 1.5, expected an integer"),
    "a slice too long": (lambda: CACHE[:, :41], OutOfBounds, r"tokens \[0:41\] are out of range: the cache has 40"),
    "append None": (lambda: CACHE.append(None), InvalidParameter, r"a list with one \(k, v\) per layer"),
    "append tensors": (lambda: CACHE.append((K, V)), InvalidParameter, r"a list with one \(k, v\) per layer"),
    "append to one layer": (lambda: CACHE.append([(K, V)]), InvalidParameter, "append got 1 layers, but the cache has 2"),
    "append arrays": (lambda: CACHE.append([(np.zeros(3),) * 2] * 2), InvalidType, "expected a tensor or None, but got a ndarray"),
    "append elsewhere": (lambda: CACHE.append([(K.to("meta"), V)] * 2), InvalidType, "on meta"),
    "unpack to text": (lambda: CACHE.unpack("bf16"), InvalidType, "dtype is 'bf16', expected a torch dtype, such as torch.bfloat16"),
    "unpack to integers": (lambda: CACHE[0].unpack(torch.int8), InvalidType, "torch.int8 cannot represent decoded values"),
    "to no device": (lambda: CACHE.to("gpu"), InvalidParameter, "device is 'gpu'"),
    "to None": (lambda: CACHE.to(None), InvalidParameter, "device is None"),
    "convert to None": (lambda: CACHE.convert(None), InvalidType, "a recipe must be text"),
    "a Recipe of None": (lambda: kvpack.Recipe(None), InvalidType, "a recipe must be text, such as 'kvpack-3', but got a NoneType"),
    "a Recipe of a number": (lambda: kvpack.Recipe(3), InvalidType, "got a int"),
}


@pytest.mark.parametrize(("call", "error", "message"), CALLS.values(), ids=CALLS)
def test_mistakes_give_helpful_errors(
    call: Callable[[], Any], error: type[KvpackError], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message) as raised:
        call()
    kind = next(kind for kind in type(raised.value).__mro__ if kind.__name__ in kvpack.errors.__all__)
    assert kind is error
    assert not list(tmp_path.iterdir()), "it left a file"


def test_a_cache_is_immutable() -> None:
    for thing in (CACHE, CACHE[0]):
        for name in ("layers", "other", "_is_user_defined"):
            with pytest.raises(FrozenInstanceError):
                setattr(thing, name, 1)
        assert not hasattr(thing, "other")
        assert not hasattr(thing, "get_seq_length")
        with pytest.raises(AttributeError, match="has no attribute 'other'"):
            thing.other  # noqa: B018


# The commands: one line, the right exit code, no traceback, and nothing written.

COMMANDS: dict[str, list[str]] = {
    "inspect": ["inspect", "IN"],
    "verify": ["verify", "IN"],
    "convert": ["convert", "IN", "OUT", "kivi-4"],
    "unpack": ["unpack", "IN", "OUT"],
    "pack": ["pack", "IN", "OUT", "--recipe", "kivi-4"],
    "import": ["store", "import", "STORE", "IN"],
    "recipes": ["recipes", "@IN"],
    "a recipe file": ["convert", "GOOD", "OUT", "@IN"],
    "the text of bench io": ["bench", "io", "--text", "IN"],
}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    kvpack.save(CACHE, tmp_path / "GOOD")
    (tmp_path / "STORE").mkdir(mode=0o700)
    (tmp_path / "folder").mkdir()
    (tmp_path / "nonsense").write_bytes(b"\xff" * 100)
    (tmp_path / "empty").write_bytes(b"")
    return {name: tmp_path / name for name in ("GOOD", "OUT", "STORE", "folder", "nonsense", "empty", "missing", "nul\0")}


@pytest.mark.parametrize(("kind", "codes"), [("missing", {3}), ("folder", {3}), ("nul\0", {3}), ("nonsense", {1, 2}), ("empty", {1, 2})])
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_command_refuses_files_of_other_formats(
    words: list[str], kind: str, codes: set[int], places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    if words[0] == "bench" and codes != {3}:
        pytest.skip("this file may contain any text")
    before = {path: path.stat().st_size for path in places["GOOD"].parent.rglob("*")}
    names = {"IN": str(places[kind]), **{name: str(path) for name, path in places.items()}}
    given = [names.get(word, word.replace("IN", names["IN"]) if word == "@IN" else word) for word in words]
    assert cli.main(given) in codes
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvpack: ")
    assert len(err.splitlines()) == 1 or "recipe" in err
    assert "Traceback" not in err
    assert {path: path.stat().st_size for path in places["GOOD"].parent.rglob("*")} == before


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_command_does_not_hang_on_a_fifo_or_device(words: list[str], places: dict[str, Path]) -> None:
    os.mkfifo(places["folder"] / "fifo")
    for path in (str(places["folder"] / "fifo"), "/dev/zero"):
        names = {"IN": path, **{name: str(place) for name, place in places.items()}, "@IN": f"@{path}"}
        codes: list[int] = []
        given = [names.get(word, word) for word in words]
        thread = threading.Thread(target=lambda given=given, codes=codes: codes.append(cli.main(given)), daemon=True)
        thread.start()
        thread.join(60)
        assert codes == [3]


def test_a_dense_file_with_a_long_or_deep_header_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in"
    deep = b'{"0.k":' + b"[" * 100_000
    for front, message in (
        ((2**24 + 1).to_bytes(8, "little"), "the header has 16777217 bytes"),
        (len(deep).to_bytes(8, "little") + deep, ""),
    ):
        with path.open("wb") as file:
            file.write(front)
            file.truncate(2**25)
        assert cli.main(["pack", str(path), str(tmp_path / "out"), "--recipe", "raw"]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["nonsense", "", "kv=", "kv=group", "k=raw", "layers=9:kv=raw;kv=raw"])
def test_a_command_refuses_a_wrong_recipe(recipe: str, places: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["convert", places["GOOD"], places["OUT"], recipe], ["recipes", recipe]):
        assert cli.main([str(word) for word in words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("kvpack: ")
        assert not places["OUT"].exists()
