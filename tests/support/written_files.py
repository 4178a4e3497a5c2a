"""Files and stores as kvpack wrote them before identities, tails and raw tokens changed, and the code that wrote them.

``python -m support.written_files`` writes missing files, and leaves existing ones unchanged. ``tests/written/manifest.json`` contains the
SHA-256 of every file, and the values that a reader must find in it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

import kvpack
from kvpack import cache_names
from kvpack.coding.bases import Basis
from kvpack.coding.presets import ADDITIONS, PUBLISHED
from kvpack.coding.recorded_presets import RECORDED
from kvpack.models import BOS, demo_text, load_model, model_folder
from kvpack.pages.codec import key_digest
from kvpack.store.keys import page_key
from support.klt_bases import random_basis, random_tables

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).resolve().parents[1] / "written"
MANIFEST = FOLDER / "manifest.json"
PRESETS = FOLDER / "presets"
VALUES = FOLDER / "values.safetensors"
BASIS = FOLDER / "basis.kvbasis"
PROMPT = FOLDER / "prompt.kvpack"
BATCH = FOLDER / "batch.kvpack"
STORE = FOLDER / "store"
PAGES = FOLDER / "pages"
ROW = FOLDER / "page.row"

SAMPLE = 37
"""One in this many decoded values is recorded."""
CHUNK = 32
RECIPE = "octopus-4"
NAMES = [*(name for name in RECORDED if name not in ADDITIONS), "klt-2", "transform-2"]
GEOMETRY = kvpack.pages.PageGeometry(1, 2, 16, 64, 64)
PAGE_KEYS = [b"first page", b"second page"]
CONTINUATION = 24
UNENCRYPTED = kvpack.Identity("model", RECIPE, weights="w1", dtype="bfloat16", tenant="tenant")


def shape(name: str) -> tuple[int, int, int, int]:
    """Return the numbers of layers, heads and tokens, and the head dim, of a preset's cache."""
    preset = PUBLISHED.get(name)
    if preset is None:
        return 1, 2, 40, 16
    if preset.layers is not None:
        return preset.layers, 1, 1, preset.dim or 64
    return (1, 1, 131, 128) if "tail=" in preset.recipe else (1, 1, 36, 128) if "g=128" in preset.recipe else (1, 1, 36, 64)


def pairs(name: str, layers: int, heads: int, tokens: int, dim: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return normally distributed bf16 keys and values for each layer, each ``[1, head, token, dim]``.

    They have one outlier channel and one token of large norm.
    """
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"))
    found = []
    for _ in range(layers):
        k, v = (torch.randn(1, heads, tokens, dim, generator=generator) for _ in range(2))
        k[..., 3] *= 8
        v[:, :, 0] *= 4
        found.append((k.bfloat16(), v.bfloat16()))
    return found


def sample_values(cache: kvpack.Cache) -> torch.Tensor:
    """Return one in ``SAMPLE`` values of every layer, keys before values, as float32."""
    sides = [side.unpack(torch.float32).flatten() for layer in cache for side in layer.sides.values()]
    return torch.cat(sides)[::SAMPLE].contiguous()


def page_identities() -> dict[str, kvpack.Identity]:
    with model_folder() as folder:
        engine = kvpack.Identity.of_engine(folder, "fp8", kv_dtype="bfloat16", layout="test")
    return {"plain": kvpack.Identity("model", "fp8", weights="w1"), "engine": engine}


def store_identities() -> dict[str, kvpack.Identity]:
    return {"plain": UNENCRYPTED, "model": kvpack.Identity.of(demo_model(), RECIPE)}


def store_ids(name: str) -> list[int]:
    """Return the token ids of two chunks for the identity ``name``."""
    return list(range(2 * CHUNK)) if name == "plain" else prompt_ids()[:-1]


def random_pool() -> torch.Tensor:
    """Return the slots of two pages, bf16 ``[slot, layer, side, head, token, channel]``."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, 1, 2, 2, 16, 64, generator=generator).bfloat16()


def buffer(values: torch.Tensor) -> kvpack.pages.PageBuffer:
    return kvpack.pages.PageBuffer(GEOMETRY, values[:, :, 0], values[:, :, 1])


def prompt_ids() -> list[int]:
    return [BOS, *demo_text()[: 2 * CHUNK]]


def demo_model() -> Any:
    """Return the demo's model, prepared for packed caches, under a name that is the same on every machine."""
    model = load_model(attention="kvpack")
    model.config._name_or_path = "tinylm"
    return model


def batch_ids() -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids ``[row, token]`` of two prompts, the second of which is padded on the left, and their mask."""
    rows = [[BOS, *demo_text()[:16]], [0] * 4 + [BOS, *demo_text()[100:112]]]
    return torch.tensor(rows), torch.tensor([[1] * 17, [0] * 4 + [1] * 13])


def continue_greedily(model: Any, cache: Any, first: list[int], mask: torch.Tensor | None = None) -> list[list[int]]:
    """Return the most likely next tokens of every row after the tokens in the cache, starting with ``first``."""
    found: list[list[int]] = [[] for _ in first]
    token = torch.tensor(first)[:, None]
    with torch.inference_mode():
        for _ in range(CONTINUATION):
            mask = None if mask is None else torch.cat([mask, mask.new_ones(len(first), 1)], 1)
            places = {} if mask is None else {"attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}
            logits = model(token, **places, **cache_names.cache_argument(model, cache)).logits
            token = logits[:, -1, :BOS].argmax(-1)[:, None]
            for row, one in zip(found, token[:, 0].tolist(), strict=True):
                row.append(one)
    return found


def files() -> Iterator[Path]:
    """Return every file except the manifest."""
    return (path for path in sorted(FOLDER.rglob("*")) if path.is_file() and path != MANIFEST)


def _write_presets() -> None:
    scopes = {(0, "k"): "head", (0, "v"): "head"}
    sides = {(0, "k"): (2, 16), (0, "v"): (2, 16)}
    BASIS.write_bytes(random_basis(sides, 1, scopes=scopes, tables=random_tables("written")))
    basis, values = Basis.load(BASIS), {}
    PRESETS.mkdir()
    for name in NAMES:
        needed = None if name in PUBLISHED else basis
        cache = kvpack.pack(pairs(name, *shape(name)), kvpack.Recipe(name, needed), model={"name": "x"})
        kvpack.save(cache, PRESETS / f"{name}.kvpack")
        values[name] = sample_values(kvpack.load(PRESETS / f"{name}.kvpack", basis=needed))
    save_file(values, VALUES)


def _write_prompt(manifest: dict[str, Any]) -> None:
    from kvpack.integrations.transformers import KvpackCache

    model, ids = demo_model(), prompt_ids()
    with torch.inference_mode(), KvpackCache(model, RECIPE) as cache:
        model(torch.tensor([ids[:-1]]), **cache_names.cache_argument(model, cache))
        packed = cache.packed
    kvpack.save(packed, PROMPT)
    manifest["prompt"] = continue_greedily(model, KvpackCache.of(kvpack.load(PROMPT)), ids[-1:])
    rows, mask = batch_ids()
    places = {"attention_mask": mask[:, :-1], "position_ids": (mask[:, :-1].cumsum(1) - 1).clamp(min=0)}
    with torch.inference_mode(), KvpackCache(model, RECIPE) as cache:
        model(rows[:, :-1], **places, **cache_names.cache_argument(model, cache))
        packed = cache.packed
    kvpack.save(packed, BATCH)
    manifest["batch"] = continue_greedily(model, KvpackCache.of(kvpack.load(BATCH)), rows[:, -1].tolist(), mask[:, :-1])


def _write_stores(manifest: dict[str, Any]) -> None:
    identities = store_identities()
    caches = {"plain": kvpack.pack(pairs("store", 1, 2, 2 * CHUNK, 64), RECIPE), "model": kvpack.load(PROMPT)}
    for name, identity in identities.items():
        known = store_ids(name)
        cache = caches[name] if name == "plain" else kvpack.pack([layer.unpack() for layer in caches[name]], RECIPE)
        with kvpack.Store(STORE, identity, chunk=CHUNK) as store:
            assert store.save(known, cache) == 2 * CHUNK
            manifest["store"] = {**manifest.get("store", {}), name: {"keys": [key.hex() for key in store.keys(known)]}}
            save_file({"values": sample_values(store.load(known)[1])}, FOLDER / f"store-{name}.safetensors")
    for name, identity in page_identities().items():
        with kvpack.PageStore(PAGES, identity, GEOMETRY) as store:
            assert all(store.put(PAGE_KEYS, buffer(random_pool()), [0, 1]))
            decoded = torch.zeros_like(random_pool())
            assert all(store.get_into(PAGE_KEYS, buffer(decoded), [0, 1]))
            names = [page_key(store.codec.namespace, key_digest(key), store.codec.layout.description).hex() for key in PAGE_KEYS]
        manifest["pages"] = {**manifest.get("pages", {}), name: {"keys": names}}
        save_file({"values": decoded}, FOLDER / "pages.safetensors")


def _write_row(manifest: dict[str, Any]) -> None:
    with kvpack.pages.PageCodec("octopus-4", GEOMETRY) as codec:
        rows = [bytearray(codec.nbytes)]
        assert codec.encode_into(buffer(random_pool()), [0], rows, keys=PAGE_KEYS[:1]) == [None]
        ROW.write_bytes(rows[0])
        decoded = torch.zeros_like(random_pool())
        assert codec.decode_into(rows, buffer(decoded), [0], keys=PAGE_KEYS[:1]) == [None]
    save_file({"values": decoded[0].contiguous()}, FOLDER / "page.safetensors")


def main() -> None:
    if MANIFEST.exists():
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    found: dict[str, Any] = {}
    _write_presets()
    _write_prompt(found)
    _write_stores(found)
    _write_row(found)
    found["files"] = {str(path.relative_to(FOLDER)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files()}
    MANIFEST.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{sum(path.stat().st_size for path in files()) / 2**20:.2f} MiB in {len(found['files'])} files")


if __name__ == "__main__":
    main()
