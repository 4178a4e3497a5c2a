"""Small files that never change, and the code that wrote them.

Their contents are generated from seeded random digits, not by an encoder. ``python -m support.golden_files`` writes missing files, and
leaves existing ones unchanged.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import kvpack
from kvpack.cache.cache import Cache
from kvpack.cache.layer import Layer
from kvpack.cache.packed_runs import PackedRun, PackedRuns
from kvpack.cache.side import Side
from kvpack.coding.encoding import RAW_DTYPES, TORCH_DTYPES
from kvpack.coding.recipes import Recipe
from kvpack.formats.generator import Generator
from kvpack.formats.outliers import Outliers
from kvpack.formats.qjl import Qjl
from kvpack.formats.sidecars import CodecWithSidecars
from support.klt_bases import with_random_basis
from support.lossless_streams import lossless_streams
from support.minifloat_digits import block_scales, make_finite

if TYPE_CHECKING:
    from kvpack.formats.base import Codec
    from kvpack.formats.columns import Columns

FOLDER = Path(__file__).resolve().parents[1] / "golden"
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
    "minifloat-e4m3": ("kv=minifloat:element=e4m3", 64, 128, (3, 1), 1, "bf16"),
    "minifloat-e5m2": ("k=minifloat:element=e5m2,per=head,scales=fp16;v=minifloat:element=e5m2,per=token", 80, 33, (3, 2), 0, "bf16"),
    "minifloat-mx": ("k=minifloat:element=e4m3,scales=e8m0;v=minifloat:element=e2m1,scales=e8m0", 64, 80, (3,), 2, "bf16"),
    "minifloat-nvfp4-two-sequences": ("kv=minifloat:element=e2m1,scales=e4m3", 128, 40, (2, 3), 0, "bf16"),
    "lossless-bf16": ("kv=lossless", 64, 80, (33,), 1, "bf16"),
    "lossless-fp16-two-sequences": ("kv=lossless:dtype=fp16,chunk=16", 20, 33, (32, 5, 16), 2, "fp16"),
    "klt": ("kv=klt:rows=fp16", 40, 17, (3, 2), 1, "bf16"),
    "klt-no-gain-two-sequences": ("kv=klt:rows=fp32,gain=none", 16, 33, (4,), 0, "bf16"),
    "no-tokens": ("kivi-2", 64, 64, (), 0, "bf16"),
    "one-side": ("oscar-2", 128, 0, (32, 1), 0, "bf16"),
    "channel-scale-two-sequences": ("kv=scalar:b=2,channel_scale=fp16", 64, 80, (2, 3, 1), 0, "bf16"),
    "channel-scale-fp32": (
        "k=group:b=2,g=4,rotation=hadamard,channel_scale=fp32;v=octahedral:b=2,channel_scale=fp32",
        96,
        64,
        (5, 9),
        2,
        "bf16",
    ),
    "outliers": ("kv=quaternion:s=24,r=3,outliers=3", 64, 128, (3,), 1, "bf16"),
    "outliers-two-sequences": ("k=group:b=3,g=4,outliers=2;v=angle:n=48,norm=log4,outliers=9", 20, 96, (5, 6), 0, "bf16"),
    "outliers-no-entries": ("kv=polar:b=2,outliers=3", 64, 80, (2,), 0, "bf16"),
    "qjl": ("kv=scalar:b=2,qjl=fp16", 64, 80, (3,), 2, "bf16"),
    "qjl-fp32": ("k=octahedral:b=2,qjl=fp32,qjl_seed=18446744073709551615;v=angle:n=8,rotation=none,qjl=fp32", 96, 112, (2,), 0, "bf16"),
    "raw-tokens-two-sequences": ("kv=group:b=2,g=4,sinks=1", 64, 48, (5, 7), 3, "bf16"),
    "raw-tokens-fp16-fp32": (
        "k=scalar:b=1,sinks=1,raw_tokens=fp16;v=group:b=2,g=8,axis=channel,low_norm_tokens=1,raw_tokens=fp32",
        80,
        20,
        (5,),
        0,
        "fp32",
    ),
    "block-rotation-two-sequences": ("kv=group:b=2,g=32,axis=channel,block_rotation=8,channel_order=u8", 80, 40, (3, 2), 1, "bf16"),
    "block-rotation-fp32": (
        "k=octahedral:b=2,block_rotation=64,channel_order=u16,channel_scale=fp32,qjl=fp32,sinks=1,raw_tokens=fp32;"
        "v=scalar:b=2,rotation=none,block_rotation=32,outliers=3,qjl=fp16",
        128,
        96,
        (3, 1),
        0,
        "bf16",
    ),
    "side-cars": (
        "kv=group:b=2,g=4,rotation=hadamard,token_scale=fp16,channel_scale=fp16,block_rotation=16,channel_order=u8,outliers=3,qjl=fp16,sinks=2",
        80,
        128,
        (5, 8, 1),
        2,
        "bf16",
    ),
    "side-cars-two-sequences": (
        "k=octahedral:b=2,channel_scale=fp32,outliers=3,qjl=fp32,sinks=1,raw_tokens=fp32;"
        "v=quaternion:s=5,r=3,channel_scale=fp32,outliers=3,qjl=fp32,qjl_seed=7,low_norm_tokens=1,raw_tokens=fp32",
        64,
        96,
        (2, 3),
        0,
        "fp16",
    ),
    "side-cars-u8": ("kv=group:b=2,g=4,scales=u8,channel_scale=fp32,qjl=fp16,sinks=2", 64, 96, (5, 6), 0, "bf16"),
    "side-cars-no-entries": ("kv=polar:b=2,rotation=none,channel_scale=fp16,outliers=3,qjl=fp16,sinks=2", 64, 128, (2,), 0, "bf16"),
    "side-cars-no-tokens": ("kv=group:b=2,g=4,channel_scale=fp16,outliers=3,qjl=fp16,sinks=2;tail=4", 64, 128, (), 3, "bf16"),
}


def file_path(name: str) -> Path:
    return FOLDER / f"{name}.kvpack"


def expected_path(name: str) -> Path:
    return FOLDER / f"{name}.f32"


def recipe_codecs(name: str) -> dict[str, Codec]:
    """Return the codec of each side, as kvpack currently defines the recipe ``name``."""
    recipe, k_dim, v_dim, *_ = FILES[name]
    dims = [(side, dim) for side, dim in (("k", k_dim), ("v", v_dim)) if dim]
    if "kv=klt" in recipe:
        (rule,) = Recipe(recipe).rules
        return {side: with_random_basis(rule.codec(dim, side)) for side, dim in dims}
    return {side: Recipe.from_recorded(recipe).codec(0, 1, side, dim) for side, dim in dims}


def golden_cache(name: str, codecs: dict[str, Codec]) -> Cache:
    """Return the contents of one file. Every digit, scale and raw value is from the seeded generator."""
    recipe, _, _, runs, tail, tail_dtype = FILES[name]
    generator = Generator(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
    sides: dict[str, Side] = {}
    for side, codec in codecs.items():
        batch, heads = (2, 1) if name.endswith(("direct", "two-sequences")) else (1, 2)
        several = codec.group_tokens > 1 or any(layout.per == "run" for layout in codec.layout(1, 1, 0).values())
        side_runs = runs if several or not runs else (sum(runs),)
        every = 0 if name.endswith("no-entries") else 3
        pages = tuple(PackedRun(codec, run, _streams(codec, batch, heads, run, generator, every)) for run in side_runs)
        raw = _halves(generator, (batch, heads, tail, codec.dim)).to(RAW_DTYPES[tail_dtype])
        sides[side] = Side(codec, PackedRuns.from_runs(pages), raw, Recipe(recipe).window)
    return Cache((Layer(sides.get("k"), sides.get("v")),), recipe, {"name": name}, start=len(name))


def expected_values(cache: Cache) -> torch.Tensor:
    """Return every decoded value, keys before values, as a flat float32 tensor."""
    return torch.cat([side.unpack(torch.float32).flatten() for side in cache[0].sides.values()])


def sidecar_packings(codec: Codec) -> dict[str, Columns]:
    """Return the packing of every code stream of the codec's sidecars."""
    packings: dict[str, Columns] = {}
    if isinstance(codec, CodecWithSidecars):
        if outliers := codec.sidecar(Outliers):
            packings["outlier_flags"] = outliers.packing
        if qjl := codec.sidecar(Qjl):
            packings["qjl_signs"] = qjl.packing
    return packings


def _streams(codec: Codec, batch: int, heads: int, tokens: int, generator: Generator, every: int) -> dict[str, torch.Tensor]:
    """Return streams of random digits and numbers. One in ``every`` flags is 1, or none if ``every`` is 0."""
    if (coded := lossless_streams(codec, batch, heads, tokens, generator.next_word, finite=True)) is not None:
        return coded
    streams = {}
    for stream, packing in codec.packings().items():
        used = packing.symbols if stream != "symbol" or codec.id != "octahedral" else -(-codec.dim // 3)
        shape = (batch, heads, tokens, packing.symbols)
        digits = []
        for alphabet in packing.alphabets:
            count = batch * heads * tokens * packing.symbols
            digit = torch.tensor([generator.next_word() % alphabet for _ in range(count)], dtype=torch.int32)
            digits.append(make_finite(codec, digit.view(shape) * (torch.arange(packing.symbols) < used)))
        streams |= codec.pack(stream, *digits)
    sidecars = sidecar_packings(codec)
    for name, packing in sidecars.items():
        shape = (batch, heads, tokens, packing.symbols)
        digit = _flags(generator, shape, every) if name == "outlier_flags" else _flags(generator, shape, 2)
        streams |= {f"{name}.{plane}": words for plane, words in enumerate(packing.pack([digit]))}
    layouts = codec.layout(batch, heads, tokens)
    if "raw_token_flags" in layouts:
        streams["raw_token_flags"] = _flags(generator, layouts["raw_token_flags"].shape, every).to(torch.uint8)
    entries = {name: int(count.sum()) for name, count in codec.entries(streams).items()}
    for name, layout in layouts.items():
        if name not in streams and layout.dtype == "U8" and name != "channel_order":
            count = torch.Size(layout.shape).numel()
            numbers = torch.tensor([generator.next_word() % 256 for _ in range(count)])
            numbers = block_scales(codec, numbers) if name == "block_scales" else numbers
            streams[name] = numbers.to(torch.uint8).view(layout.shape)
        elif name not in streams:
            values = _halves(generator, (*layout.shape[:2], entries.get(name, layout.shape[2]), *layout.shape[3:]))
            if name == "channel_scale":
                values = values.abs() + 1 / 128
            elif name == "channel_order":
                values = _orders(generator, layout.shape)
            elif codec.id != "raw" and name not in entries:
                # Scales and norms are not negative, and a range is an exponent or a root: small steps keep it finite.
                values = values.abs() / (16 if name.endswith("range") else 1)
            streams[name] = values.to(TORCH_DTYPES[layout.dtype])
    return {name: streams[name] for name in layouts}


def _orders(generator: Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """Return int32 of ``shape`` whose rows are random permutations."""
    rows = [sorted(range(shape[-1]), key=lambda _: generator.next_word()) for _ in range(torch.Size(shape[:-1]).numel())]
    return torch.tensor(rows, dtype=torch.int32).view(shape)


def _flags(generator: Generator, shape: tuple[int, ...], every: int) -> torch.Tensor:
    """Return int32 flags of ``shape``. One in ``every`` flags is 1, and the others are 0."""
    count = torch.Size(shape).numel()
    ones = [int(every > 0 and generator.next_word() % every == 0) for _ in range(count)]
    return torch.tensor(ones, dtype=torch.int32).view(shape)


def _halves(generator: Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """Return values k / 128 with abs(k) <= 255, which are exact in every stored float dtype."""
    count = torch.Size(shape).numel()
    return torch.tensor([(generator.next_word() % 511 - 255) / 128 for _ in range(count)], dtype=torch.float32).view(shape)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    manifest = json.loads(MANIFEST.read_text()) if MANIFEST.exists() else {}
    for name in FILES:
        if name in manifest:
            continue
        cache = golden_cache(name, recipe_codecs(name))
        kvpack.save(cache, file_path(name))
        expected_path(name).write_bytes(expected_values(cache).numpy().astype("<f4").tobytes())
        manifest[name] = {path.suffix[1:]: hashlib.sha256(path.read_bytes()).hexdigest() for path in (file_path(name), expected_path(name))}
    MANIFEST.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
