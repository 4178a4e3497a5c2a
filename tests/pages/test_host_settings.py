"""Calls of kvpack's interfaces for engines, even failing ones, leave the host's settings unchanged, as a vLLM worker requires."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvpack
from kvpack import Identity, PageStore, Recipe
from kvpack.errors import KvpackError
from kvpack.pages import PageBuffer, PageCodec, PageGeometry, PageLayout
from support.host_settings import Watched, vllm_like_host

GEOMETRY = PageGeometry(layers=2, heads=2, tokens=32, dim_k=64, dim_v=64)
KEYS = [b"a", b"b", b"c"]


def public(kind: type) -> set[str]:
    found = {name for name, value in vars(kind).items() if callable(value) or isinstance(value, (property, classmethod))}
    return {name for name in found if not name.startswith("_")} | {"made"}


def buffer(fill: float) -> PageBuffer:
    """Return three pages, the last of which contains a value that no codec accepts."""
    values = torch.full((2, 3, 2, 2, 32, 64), fill, dtype=torch.bfloat16, device="cpu")
    values[:, :2] += torch.arange(64, dtype=torch.bfloat16, device="cpu")
    values[:, 2, 0, 0, 0, 0] = float("nan")
    return PageBuffer(GEOMETRY, values[0], values[1])


def watched(kind: Any, *arguments: Any, **options: Any) -> Watched:
    """Construct an instance of ``kind`` under observation, and return it with all of its calls observed."""
    watch = Watched(None)
    watch.inner = watch.call("made", kind)(*arguments, **options)
    with pytest.raises((KvpackError, TypeError)):
        watch.call("made", kind)()
    return watch


@pytest.mark.parametrize(
    "recipe", ["octopus-4", "oscar-2", "kv=scalar:b=3,channel_scale=fp16", "kivi-2;k=scalar:b=3,raw_low_norm=0.9", "bf16"]
)
def test_every_call_of_a_codec_keeps_the_hosts_settings(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with vllm_like_host(monkeypatch):
        pages, target = buffer(1), buffer(0)
        codec = watched(PageCodec, recipe, GEOMETRY, threads=2)
        with codec.call("__enter__", codec.inner.__enter__)():
            rows = [bytearray(codec.inner.nbytes) for _ in KEYS]
            kept = recipe == "bf16"
            assert [one is None for one in codec.encode_into(pages, range(3), rows, keys=KEYS)] == [True, True, kept]
            assert codec.start_encode(pages, [0, 1], rows[:2], keys=KEYS[:2]).outcomes() == [None, None]
            assert codec.check(rows[:2], keys=KEYS[:2], check_values=True) == [None, None]
            assert [one is None for one in codec.decode_into(rows, target, range(3), keys=KEYS)] == [True, True, kept]
            assert codec.start_decode(rows[:1], target, [2]).outcomes() == [None]
            for wrong in (lambda: codec.encode_into(pages, [9], rows[:1]), lambda: codec.decode_into(rows[:2], target, [0, 0])):
                with pytest.raises(KvpackError):
                    wrong()
            assert codec.validate_arguments(target, [1], None) == ([1], [None])
            assert codec.call("raw_tokens_left_out", lambda: codec.inner.raw_tokens_left_out)() >= 0
            codec.close()
    assert codec.called >= public(PageCodec)


def test_every_call_of_a_layout_keeps_the_hosts_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with vllm_like_host(monkeypatch):
        page = torch.zeros(2 * 2 * 2 * 32 * 64, dtype=torch.bfloat16, device="cpu")

        def write(k: torch.Tensor, v: torch.Tensor | None) -> None:
            assert v is not None
            page.copy_(torch.stack([k, v], 3).flatten())

        def loses(k: torch.Tensor, v: torch.Tensor | None) -> None:
            page[:8] = k.flatten()[:8]

        layout = Watched(None)
        layout.inner = layout.call("detect", PageLayout.detect)(GEOMETRY, write, page)
        with pytest.raises(KvpackError):
            layout.call("detect", PageLayout.detect)(GEOMETRY, loses, page)
        pool = torch.ones(3, page.numel(), dtype=torch.bfloat16, device="cpu")
        for name in ("digest", "offsets_and_strides"):
            layout.call(name, lambda name=name: getattr(layout.inner, name))()
        layout.buffer(pool)
        staging = layout.staging(2)
        layout.gather(pool, [0, 2], staging)
        layout.scatter(staging, pool, [1, 2])
        with pytest.raises(KvpackError):
            layout.gather(pool, [9], staging)
        made = Watched(None)
        pages = made.inner = made.call("made", PageBuffer)(GEOMETRY, *(staging.sides[side] for side in "kv"))
        made.checked_slots([0, 1], written=True)
        with pytest.raises(KvpackError):
            made.call("made", PageBuffer)(GEOMETRY, pages.sides["k"])
    assert layout.called >= public(PageLayout) - {"made"}
    assert made.called >= public(PageBuffer)


@pytest.mark.parametrize("recipe", ["octopus-4", "bf16"])
def test_every_call_of_a_store_keeps_the_hosts_settings(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = Identity("m", recipe, weights="w")
    with vllm_like_host(monkeypatch):
        pages, target = buffer(1), buffer(0)
        store = watched(PageStore, tmp_path, identity, GEOMETRY, threads=2, max_bytes=10**7)
        with store.call("__enter__", store.inner.__enter__)():
            kept = recipe == "bf16"
            assert store.put(KEYS, pages, range(3), ancestors=[b"before"]) == store.contains(KEYS) == [True, True, kept]
            assert store.put_new(KEYS[:2], pages, [0, 1], ancestors=[b"before"]) == ([True, True], [False, False])
            job = store.submit_put(KEYS[:2], pages, [0, 1])
            store.drain()
            assert store.finished() == [job]
            entry = next(path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes()[:10] == b"kvpack-row")
            entry.write_bytes(entry.read_bytes()[:-1] + b"!")
            assert sum(store.get_into(KEYS, target, range(3))) == 1 + kept
            store.submit_get(KEYS[:2], target, [0, 1])
            store.drain()
            for wrong in (lambda: store.put(KEYS, pages, [0]), lambda: store.get_into(KEYS[:2], target, [0, 0])):
                with pytest.raises(KvpackError):
                    wrong()
            store.touch(KEYS, ancestors=[b"before"])
            store.counters()
            store.stats()
            store.prometheus()
            store.pop_recent()
            store.delete(KEYS[:1])
            store.clear()
            store.close()
        model = Path(kvpack.__file__).parent / "demo" / "tinylm"
        assert store.call("of_engine", Identity.of_engine)(model, recipe, kv_dtype="bf16", layout="a").recipe == Recipe(recipe).text
    assert store.called >= public(PageStore)
