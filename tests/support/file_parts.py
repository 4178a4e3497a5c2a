"""Split files into parts, change them, and join them again with correct lengths and digests, so that only one rule is violated."""

from __future__ import annotations

import math
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import zstandard

import kvpack
from kvpack.cache.cache import Cache
from kvpack.cache.layer import Layer
from kvpack.cache.packed_runs import PackedRun, PackedRuns
from kvpack.cache.side import Side
from kvpack.coding.encoding import RAW_DTYPES, TORCH_DTYPES
from kvpack.formats.klt import Klt
from kvpack.formats.raw_positions import POSITIONS, VALUES, RawPositions
from support.golden_files import sidecar_packings
from support.lossless_streams import lossless_streams
from support.minifloat_digits import block_scales, make_finite
from support.parts import Parts
from support.transform_streams import transform_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpack.formats.base import Codec
    from kvpack.formats.columns import Columns


def entry_at(parts: Parts, path: str) -> Any:
    """Return the map or array of the header at ``path``, which consists of keys and indices separated by dots."""
    at: Any = parts.header
    for key in path.split(".") if path else []:
        at = at[int(key) if isinstance(at, list) else key]
    return at


def edit(path: str, value: Any) -> Callable[[Parts], None]:
    """Return a change that sets the header entry at ``path``, which consists of keys and indices separated by dots."""

    def apply(parts: Parts) -> None:
        above, _, last = path.rpartition(".")
        at = entry_at(parts, above)
        at[int(last) if isinstance(at, list) else last] = value

    return apply


def drop(path: str) -> Callable[[Parts], None]:
    """Return a change that removes the header entry at ``path``."""
    above, _, key = path.rpartition(".")
    return lambda parts: entry_at(parts, above).pop(key)


def reorder(path: str, *keys: str) -> Callable[[Parts], None]:
    """Return a change that gives the header map at ``path`` these keys in this order. New keys have the value 0."""

    def apply(parts: Parts) -> None:
        at = entry_at(parts, path)
        entries = {key: at.get(key, 0) for key in keys}
        at.clear()
        at.update(entries)

    return apply


def move_to_end(path: str, key: str) -> Callable[[Parts], None]:
    """Return a change that makes ``key`` the last key of the header map at ``path``."""

    def apply(parts: Parts) -> None:
        at = entry_at(parts, path)
        at[key] = at.pop(key)

    return apply


def overwrite(name: str, offset: int, value: str) -> Callable[[Parts], None]:
    """Return a change that overwrites the bytes of the tensor ``name`` from byte ``offset`` on."""

    def apply(parts: Parts) -> None:
        number, new = parts.tensor(name), bytes.fromhex(value)
        stored = parts.tensors[number]
        assert offset + len(new) <= len(stored)
        parts.tensors[number] = stored[:offset] + new + stored[offset + len(new) :]

    return apply


def frame(change: Callable[[bytes], bytes], name: str = "0.k.values") -> Callable[[Parts], None]:
    """Return a change that replaces the bytes of a tensor by ``change(bytes)`` and stores them as a zstd frame."""
    return lambda parts: parts.store(name, change(parts.tensors[parts.tensor(name)]), "zstd")


def compress(raw: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(raw)


def raw_frame(raw: bytes, descriptor: str, block_type: int = 0) -> bytes:
    """Return a zstd frame with one uncompressed block, and the bytes ``descriptor`` as its header."""
    return bytes.fromhex("28b52ffd" + descriptor) + (len(raw) << 3 | block_type << 1 | 1).to_bytes(3, "little") + raw


def repeated_frame(content_size: int, blocks: list[int]) -> bytes:
    """Return a zstd frame that declares a ``content_size`` below 256.

    Each of its ``blocks`` is the number of times that a block repeats a zero byte.
    """
    body = b"".join((size << 3 | 2).to_bytes(3, "little") + b"\0" for size in blocks)
    return bytes.fromhex("28b52ffd 20") + bytes([content_size]) + body + bytes([1, 0, 0])


def random_digits(packing: Columns, used: int, rows: tuple[int, ...], source: random.Random) -> list[torch.Tensor]:
    """Return random valid values for every digit of ``packing``. From symbol ``used`` on, digits are zero."""
    return [
        torch.tensor(
            [source.randrange(a) if i % packing.symbols < used else 0 for i in range(math.prod(rows) * packing.symbols)],
            dtype=torch.int32,
        ).view(*rows, packing.symbols)
        for a in packing.alphabets
    ]


def random_page(
    codec: Codec, batch: int, heads: int, tokens: int, source: random.Random
) -> tuple[PackedRun, dict[str, list[torch.Tensor]]]:
    """Return a run of random valid digits, and the digits.

    Numbers have either sign, and streams have any number of entries.
    """
    if raw := codec.raw_positions:
        page, digits = random_page(codec.without_raw_positions, batch, heads, tokens, source)
        return PackedRun(codec, tokens, {**page.streams, **_random_raw(raw, batch, heads, tokens, source)}), digits
    if (coded := lossless_streams(codec, batch, heads, tokens, lambda: source.randrange(1 << 16))) is not None:
        return PackedRun(codec, tokens, coded), {name: codec.unpack(name, coded) for name in codec.packings()}
    if (coded := transform_streams(codec, batch, heads, tokens, lambda: source.randrange(1 << 16))) is not None:
        return PackedRun(codec, tokens, coded), {}
    streams, digits = {}, {}
    for name, packing in codec.packings().items():
        used = -(-codec.dim // 3) if (codec.id, name) == ("octahedral", "symbol") else packing.symbols
        digits[name] = [make_finite(codec, digit) for digit in random_digits(packing, used, (batch, heads, tokens), source)]
        streams |= codec.pack(name, *(digit.to(torch.int32) for digit in digits[name]))
    for name, packing in sidecar_packings(codec).items():
        digits[name] = random_digits(packing, packing.symbols, (batch, heads, tokens), source)
        planes = packing.pack([digit.to(torch.int32) for digit in digits[name]])
        streams |= {f"{name}.{plane}": words for plane, words in enumerate(planes)}
    layouts = codec.layout(batch, heads, tokens)
    if "raw_token_flags" in layouts:
        flags = torch.tensor([source.randrange(2) for _ in range(batch * tokens)], dtype=torch.uint8)
        streams["raw_token_flags"] = flags.view(batch, 1, tokens)
    rows = {name: int(count.sum()) for name, count in codec.entries(streams).items()}
    for name, layout in layouts.items():
        if name not in streams:
            shape = (*layout.shape[:2], rows.get(name, layout.shape[2]), *layout.shape[3:])
            size = 0.1 if name.endswith("range") else 1.0
            draws = (source.randrange(256) if layout.dtype == "U8" else size * source.gauss(0, 1) for _ in range(math.prod(shape)))
            numbers = torch.tensor(list(draws), dtype=torch.float32)
            if name == "block_scales":
                numbers = block_scales(codec, numbers)
            elif isinstance(codec, Klt) and name == "codes":
                numbers = numbers.to(torch.int32).view(-1, codec.row_bytes) & torch.tensor(codec.code_bit_masks)
            elif name == "channel_order":
                orders = [source.sample(range(shape[-1]), shape[-1]) for _ in range(math.prod(shape[:-1]))]
                numbers = torch.tensor(orders, dtype=torch.int32)
            elif name == "channel_scale":
                numbers = numbers.abs() + 2.0**-10
            elif name == "raw_tokens" and source.random() < 0.2:
                numbers[::7] = float(source.choice(("nan", "inf", "-inf", "-0.0")))
            streams[name] = numbers.view(shape).to(TORCH_DTYPES[layout.dtype])
    return PackedRun(codec, tokens, {name: streams[name] for name in layouts}), digits


def _random_raw(raw: RawPositions, batch: int, heads: int, tokens: int, source: random.Random) -> dict[str, torch.Tensor]:
    """Return the streams of raw tokens at random positions, some of which are not finite."""
    entries = [(token + 1, sequence) for token in range(tokens) for sequence in range(batch) if source.random() < 0.4]
    words = [[position % 2**16, position >> 16, 0, sequence] for position, sequence in entries]
    values = torch.tensor([source.gauss(0, 1) for _ in range(len(words) * heads * raw.dim)], dtype=torch.float32)
    if source.random() < 0.2:
        values[::7] = float(source.choice(("nan", "inf", "-inf", "-0.0")))
    return {
        POSITIONS: torch.tensor(words, dtype=torch.int32).view(1, 1, len(words), 4).to(torch.uint16),
        VALUES: values.view(1, 1, len(words), heads, raw.dim).to(RAW_DTYPES[raw.dtype]),
    }


def random_side(
    codec: Codec, runs: tuple[int, ...] = (2,), tail: int = 1, batch: int = 1, heads: int = 2, tail_dtype: str = "bf16", seed: str = ""
) -> Side:
    source = random.Random(f"{codec!r} {seed}")
    pages = tuple(random_page(codec, batch, heads, run, source)[0] for run in runs)
    values = torch.tensor([source.gauss(0, 1) for _ in range(batch * heads * tail * codec.dim)])
    return Side(codec, PackedRuns.from_runs(pages), values.view(batch, heads, tail, codec.dim).to(RAW_DTYPES[tail_dtype]), 0)


def file_of(
    *layers: tuple[Side | None, Side | None],
    skipped: tuple[int, ...] = (),
    states: Sequence[Mapping[str, torch.Tensor]] = (),
    offsets: tuple[int, ...] | None = None,
) -> bytes:
    """Return a file with ``layers``, each a pair of keys and values, that starts at position 3.

    ``skipped`` gives the number of tokens that each layer lacks.
    """
    counts, kept = skipped or (0,) * len(layers), states or ({},) * len(layers)
    made = (Layer(k, v, skipped=count, states=of) for (k, v), count, of in zip(layers, counts, kept, strict=True))
    cache = Cache(tuple(made), "test", {"name": "x"}, start=3, position_offsets=offsets)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        kvpack.save(cache, path)
        return path.read_bytes()


def keys_file(codec: Codec, *changes: Callable[[Parts], Any], runs: tuple[int, ...] = (2,), tail: int = 1, **options: Any) -> bytes:
    """Return a file with one layer that has only keys, after ``changes``."""
    return change_file(file_of((random_side(codec, runs, tail, **options), None)), *changes)


def change_file(data: bytes, *changes: Callable[[Parts], Any]) -> bytes:
    """Return the file ``data`` after ``changes``, with correct digests."""
    parts = Parts.of(data)
    for change in changes:
        change(parts)
    return parts.joined()
