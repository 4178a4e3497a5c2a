"""Small files that never change: their contents, made of seeded digits and not of an encoder, and how they were written.

``python tests/golden_files.py`` writes the files that are missing and touches no other.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import kvpack
from kvpack.cache import Cache, Layer, Page, Side
from kvpack.encoding import RAW_DTYPES, TORCH_DTYPES
from kvpack.formats.generator import Generator
from kvpack.recipes import Recipe

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

FOLDER = Path(__file__).parent / "golden"
MANIFEST = FOLDER / "manifest.json"

# name: (recipe, head dim of K, head dim of V, runs of packed tokens, tail tokens, tail dtype)
FILES: dict[str, tuple[str, int, int, tuple[int, ...], int, str]] = {
    "raw-bf16": ("kv=raw:dtype=bf16", 64, 64, (3,), 0, "bf16"),
    "raw-fp16": ("kv=raw:dtype=fp16", 80, 48, (1,), 0, "fp16"),
    "raw-fp32": ("kv=raw:dtype=fp32", 16, 16, (2,), 0, "fp32"),
    "group-1-bit": ("kv=group:b=1,g=16", 64, 64, (17,), 0, "bf16"),
    "group-2-bits": ("kv=group:b=2,g=32;tail=32", 64, 128, (33, 5), 7, "bf16"),
    "group-3-bits": ("kv=group:b=3,g=32,rotation=hadamard,token_scale=fp16", 80, 112, (34,), 3, "fp16"),
    "group-4-bits": ("kv=group:b=4,g=64", 96, 64, (65,), 1, "fp32"),
    "group-8-bits": ("kv=group:b=8,g=128,token_scale=fp32,rotation=signed-hadamard,seed=7", 64, 192, (2,), 0, "bf16"),
    "group-4-bits-of-4": ("k=group:b=4,g=4,axis=channel,rotation=signed-hadamard;v=group:b=3,g=8,axis=token", 64, 80, (9,), 0, "bf16"),
    "group-2-bits-u8": ("kv=group:b=2,g=32,scales=u8,token_scale=fp16", 64, 80, (32, 3), 1, "bf16"),
    "octahedral-2": ("kv=octahedral:b=2", 64, 128, (3,), 2, "bf16"),
    "octahedral-3": ("kv=octahedral:b=3,seed=18446744073709551615", 80, 128, (3,), 0, "bf16"),
    "octahedral-4-direct": ("kv=octahedral:b=4,arrangement=direct,norm=fp32", 64, 96, (2,), 0, "bf16"),
    "octahedral-2-direct": ("kv=octahedral:b=2,arrangement=direct,rotation=none", 64, 128, (2,), 0, "bf16"),
    "angle-128-linear": ("kv=angle:n=128,norm=linear8", 64, 128, (3,), 1, "bf16"),
    "angle-48-log": ("kv=angle:n=48,norm=log4,range=fp32", 64, 96, (3,), 0, "bf16"),
    "angle-100-fp32": ("kv=angle:n=100,norm=fp32,rotation=none", 64, 80, (2,), 0, "bf16"),
    "angle-64-direct": ("kv=angle:n=56,norm=log8,arrangement=direct", 64, 128, (2,), 0, "bf16"),
    "quaternion-s24-r3": ("kv=quaternion:s=24,r=3", 64, 128, (3,), 1, "bf16"),
    "quaternion-s192-r6": ("kv=quaternion:s=192,r=6,norm=fp32,seed=3", 64, 112, (2,), 0, "bf16"),
    "quaternion-s5-direct": ("kv=quaternion:s=5,r=4,arrangement=direct,rotation=signed-hadamard,rotation_seed=9", 64, 80, (2,), 0, "bf16"),
    "polar-2": ("kv=polar:b=2", 64, 128, (3,), 2, "bf16"),
    "polar-3-unequal": ("kv=polar:b=3,norm=fp32,seed=5", 80, 96, (2,), 0, "bf16"),
    "polar-4222-blocks": ("kv=polar:b=4.2.2.2,rotation=none", 64, 40, (2,), 0, "bf16"),
    "scalar-2": ("kv=scalar:b=2", 64, 128, (3,), 2, "bf16"),
    "scalar-3": ("kv=scalar:b=3,norm=fp32,rotation=hadamard", 80, 112, (2,), 0, "bf16"),
    "scalar-2-and-3": ("k=scalar:b=2,high=3;v=scalar:b=1,high=8,share=13,rotation=none", 128, 80, (3,), 1, "bf16"),
    "no-tokens": ("kivi-2", 64, 64, (), 0, "bf16"),
    "one-side": ("oscar-2", 128, 0, (32, 1), 0, "bf16"),
}


def file_path(name: str) -> Path:
    return FOLDER / f"{name}.kvpack"


def expected_path(name: str) -> Path:
    return FOLDER / f"{name}.f32"


def recipe_codecs(name: str) -> dict[str, Codec]:
    """The codec of each side, as the recipe gives it today."""
    recipe, k_dim, v_dim, *_ = FILES[name]
    return {side: Recipe(recipe).codec(0, 1, side, dim) for side, dim in (("k", k_dim), ("v", v_dim)) if dim}


def golden_cache(name: str, codecs: dict[str, Codec]) -> Cache:
    """The contents of one file: every digit, scale and raw value from the seeded generator."""
    recipe, _, _, runs, tail, tail_dtype = FILES[name]
    generator = Generator(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
    sides: dict[str, Side] = {}
    for side, codec in codecs.items():
        batch, heads = (2, 1) if name.endswith("direct") else (1, 2)
        several = codec.token_group > 1 or any(layout.per == "run" for layout in codec.layout(1, 1, 0).values())
        side_runs = runs if several or not runs else (sum(runs),)
        pages = tuple(Page(codec, run, _streams(codec, batch, heads, run, generator)) for run in side_runs)
        raw = _halves(generator, (batch, heads, tail, codec.dim)).to(RAW_DTYPES[tail_dtype])
        sides[side] = Side(codec, pages, raw, Recipe(recipe).window)
    return Cache((Layer(sides.get("k"), sides.get("v")),), recipe, {"name": name}, start=len(name))


def expected(cache: Cache) -> torch.Tensor:
    """Every decoded value, K before V, flat float32."""
    return torch.cat([side.unpack(torch.float32).flatten() for side in cache[0].sides.values()])


def _streams(codec: Codec, batch: int, heads: int, tokens: int, generator: Generator) -> dict[str, torch.Tensor]:
    streams = {}
    for stream, packing in codec.packings().items():
        used = packing.symbols if stream != "symbol" or codec.id != "octahedral" else -(-codec.dim // 3)
        shape = (batch, heads, tokens, packing.symbols)
        digits = []
        for alphabet in packing.alphabets:
            digit = torch.tensor([generator.word() % alphabet for _ in range(batch * heads * tokens * packing.symbols)], dtype=torch.int32)
            digits.append(digit.view(shape) * (torch.arange(packing.symbols) < used))
        streams |= codec.pack(stream, *digits)
    for name, layout in codec.layout(batch, heads, tokens).items():
        if name not in streams and layout.dtype == "U8":
            count = torch.Size(layout.shape).numel()
            streams[name] = torch.tensor([generator.word() % 256 for _ in range(count)], dtype=torch.uint8).view(layout.shape)
        elif name not in streams:
            values = _halves(generator, layout.shape)
            if codec.id != "raw":
                # Scales and norms are not negative, and a range is an exponent or a root: small steps keep it finite.
                values = values.abs() / (16 if name.endswith("range") else 1)
            streams[name] = values.to(TORCH_DTYPES[layout.dtype])
    return streams


def _halves(generator: Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """Values k / 128 with |k| <= 255: exact in every stored float dtype."""
    count = torch.Size(shape).numel()
    return torch.tensor([(generator.word() % 511 - 255) / 128 for _ in range(count)], dtype=torch.float32).view(shape)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    manifest = json.loads(MANIFEST.read_text()) if MANIFEST.exists() else {}
    for name in FILES:
        if name in manifest:
            continue
        cache = golden_cache(name, recipe_codecs(name))
        kvpack.save(cache, file_path(name))
        expected_path(name).write_bytes(expected(cache).numpy().astype("<f4").tobytes())
        manifest[name] = {path.suffix[1:]: hashlib.sha256(path.read_bytes()).hexdigest() for path in (file_path(name), expected_path(name))}
    MANIFEST.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
