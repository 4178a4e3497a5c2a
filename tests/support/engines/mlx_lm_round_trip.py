"""Exchange prompt caches between mlx-lm and kvpack, both of which must be installed (``make engines``).

Caches that mlx-lm saved are imported, compared, and exported. mlx-lm must continue identically from the original and from the exported
cache.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, RotatingKVCache, load_prompt_cache, save_prompt_cache

from kvpack.integrations.mlx_lm import export_prompt_cache, import_prompt_cache

WINDOW = 16
CACHES: dict[str, tuple[list[Any], tuple[int, ...]]] = {
    "whole": ([KVCache, KVCache], (12, 1, 1, 300)),
    "a window among whole layers": ([KVCache, RotatingKVCache], (12, *[1] * 9)),
    "a window after a long prompt": ([RotatingKVCache], (40, 1, 1)),
    "a window that is not full": ([RotatingKVCache], (5, 1)),
    "joined": ([ConcatenateKVCache], (5, 1)),
}


def update(layers: list[Any], tokens: int) -> None:
    keys, values = (mx.random.normal((1, 2, tokens, dim)).astype(mx.bfloat16) for dim in (64, 32))
    for layer in layers:
        layer.update_and_fetch(keys, values)


def in_token_order(layer: Any, array: mx.array) -> np.ndarray:
    found = layer._temporal_order(array) if isinstance(layer, RotatingKVCache) else array[..., : layer.offset, :]
    return np.array(found.astype(mx.float32))


def check(folder: Path, classes: list[Any], steps: tuple[int, ...]) -> None:
    made = [kind(max_size=WINDOW) if kind is RotatingKVCache else kind() for kind in classes]
    for tokens in steps:
        update(made, tokens)
    save_prompt_cache(str(folder / "made.safetensors"), made, {"model": "m"})
    cache = import_prompt_cache(folder / "made.safetensors")
    assert dict(cache.metadata) == {"model": "m"}
    for layer, own in zip(cache, made, strict=True):
        assert layer.seen_tokens == own.offset
        for found, array in zip(layer.unpack(torch.float32), (own.keys, own.values), strict=True):
            assert found is not None
            assert np.array_equal(found.numpy(), in_token_order(own, array))
    windows = {number: WINDOW for number, kind in enumerate(classes) if kind is RotatingKVCache}
    export_prompt_cache(cache, folder / "exported.safetensors", windows=windows)
    loaded = [load_prompt_cache(str(folder / f"{name}.safetensors")) for name in ("made", "exported")]
    for tokens in (1, 1, 5, 1, 30, 1, 1):
        key = mx.random.key(tokens)
        for layers in loaded:
            mx.random.seed(int(key[1].item()))
            update(layers, tokens)
        for mine, theirs in zip(*loaded, strict=True):
            assert mine.offset == theirs.offset
            newest = WINDOW if isinstance(mine, RotatingKVCache) else mine.offset
            for one, other in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                assert np.array_equal(in_token_order(mine, one)[:, :, -newest:], in_token_order(theirs, other)[:, :, -newest:])


if __name__ == "__main__":
    mx.random.seed(0)
    for name, (classes, steps) in CACHES.items():
        with tempfile.TemporaryDirectory() as folder:
            check(Path(folder), classes, steps)
        print(f"{name}: alike")
