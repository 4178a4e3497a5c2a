"""Checks of ``kvpack import`` on prompt cache files of mlx-lm. Imports torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from fuzz.byte_mutator import mutate_bytes, mutate_numbers
from fuzz.memory import measure_growth
from fuzz.value_mutator import mutate_position
from kvpack.formats.errors import KvpackError
from kvpack.integrations.mlx_lm import export_prompt_cache, import_prompt_cache

if TYPE_CHECKING:
    import random
    from pathlib import Path

SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "U64": 8, "U8": 1, "BOOL": 1}
MAX_MIB = 64
"""Maximum memory, in MiB, for reading a file, in addition to its size."""
_COUNTS = (0, 1, 2, 5, 16, 255, 256, 2**31 - 1, 2**31, 2**32, 2**40 - 1, 2**40, 9 * 10**9, 2**63 - 1, 2**63, 2**64 - 1)
_WORDS = ("0.0", "0.1", "0.2", "0.5", "1.0", "2.0", "KVCache", "RotatingKVCache", "ConcatenateKVCache", "QuantizedKVCache", *SIZES, "", "5")


def prompt_cache(layers: list[tuple[str, list[int], list[int]]], dtype: str = "BF16", count: str = "I32", *, older: bool = False) -> bytes:
    """Return a prompt cache file in mlx-lm's newer or ``older`` format.

    Each layer consists of its class, the shape of its keys and values, and its counts.
    """
    metadata = {} if older else {"2.0": "", "0.title": "t"}
    header: dict[str, Any] = {"__metadata__": metadata}
    body = b""
    for number, (name, shape, counts) in enumerate(layers):
        metadata[f"2.{number}" if older else f"1.{number}"] = name
        parts = [(dtype, shape, bytes(range(1, 1 + SIZES[dtype])))] * 2
        if older:
            metadata |= {f"0.{number}.{part}": str(value) for part, value in enumerate(counts)}
        else:
            parts += [(count, [], value.to_bytes(SIZES[count], "little")) for value in counts]
        for part, (kind, sizes, pattern) in enumerate(parts):
            values = 1
            for size in sizes:
                values *= size
            header[f"{number}.{part}"] = {"dtype": kind, "shape": sizes, "data_offsets": [len(body), len(body) + values * len(pattern)]}
            body += pattern * values
    return join_file(header, body)


def join_file(header: Any, body: bytes) -> bytes:
    text = json.dumps(header, default=lambda value: value.hex()).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


SEEDS = (
    prompt_cache([("KVCache", [1, 2, 8, 4], [5])]),
    prompt_cache([("KVCache", [1, 1, 4, 4], [4]), ("RotatingKVCache", [1, 1, 4, 4], [9, 0, 4, 1])], count="I64"),
    prompt_cache([("RotatingKVCache", [1, 1, 6, 2], [3, 2, 4, 3])], "F32", "U64"),
    prompt_cache([("ConcatenateKVCache", [2, 1, 3, 4], []), ("RotatingKVCache", [1, 1, 4, 4], [0, 4, 9, 1])], "F16", older=True),
    prompt_cache([("RotatingKVCache", [1, 1, 4, 4], [9, 2, 4, 3])]),
)


def mutate_prompt_cache(data: bytes, source: random.Random, max_bytes: int) -> bytes:
    """Return ``data`` after one edit of a count, its header, its arrays, or any byte."""
    end = 8 + int.from_bytes(data[:8], "little")
    kind = source.randrange(6)
    try:
        header = json.loads(data[8:end])
        if kind <= 2:
            return _change_count(header, data[end:], source)[:max_bytes]
        if kind <= 4:
            mutate_position(header, _WORDS, source)
            return join_file(header, data[end:])[:max_bytes]
    except (ValueError, TypeError, RecursionError, KeyError, AttributeError):
        pass
    if source.random() < 0.5:
        return data[:end] + mutate_numbers(data[end:], source.choice(("F16", "F32", "BF16")), source)
    return mutate_bytes(data, source, max_bytes)


def _change_count(header: dict[str, Any], body: bytes, source: random.Random) -> bytes:
    """Return the file with another count, as an array of any dtype or as text in any spelling."""
    metadata, value = header.get("__metadata__", {}), source.choice(_COUNTS)
    texts = [name for name in metadata if name.startswith("0.") and name.count(".") == 2]
    arrays = [name for name, entry in header.items() if name != "__metadata__" and entry["shape"] == []]
    if texts and source.random() < 0.9:
        spellings = (str(value), f"+{value}", f" {value}", f"0{value}", f"-{value}", "٣", "1_0", "9" * 5000)
        metadata[source.choice(texts)] = source.choice(spellings)
    elif arrays:
        entry, dtype = header[source.choice(arrays)], source.choice(("I32", "I64", "U64", "U8", "BOOL", "F32"))
        begin, end = entry["data_offsets"]
        entry["dtype"] = dtype
        number = (value % 2 ** (8 * SIZES[dtype])).to_bytes(SIZES[dtype], "little")
        body = body[:begin] + number + body[end:]
        for other in header.values():
            if "data_offsets" in other:
                other["data_offsets"] = [at + len(number) - (end - begin) if at >= end else at for at in other["data_offsets"]]
        entry["data_offsets"] = [begin, begin + len(number)]
    return join_file(header, body)


class PromptCacheOracle:
    """Oracle that reads files and writes the accepted ones again."""

    def __init__(self, folder: Path) -> None:
        self._file, self._out = folder / "prompt.safetensors", folder / "again.safetensors"

    def check(self, data: bytes) -> bool:
        """Return True if the file is accepted. Fails if reading needs too much memory, or if the file written back has other tokens."""
        self._file.write_bytes(data)
        taken = measure_growth(lambda: self._accepts(len(data)))
        assert taken is None or taken <= MAX_MIB, f"took {taken:.0f} MiB for {len(data)} bytes"
        return self._accepts(len(data))

    def _accepts(self, size: int) -> bool:
        try:
            cache = import_prompt_cache(self._file)
        except KvpackError:
            return False
        assert cache.values <= size, f"{cache.values} values of {size} bytes"
        windows = {number: layer.tokens for number, layer in enumerate(cache) if layer.skipped}
        try:
            export_prompt_cache(cache, self._out, windows=windows)
        except KvpackError:
            # The values have a dtype, or the metadata has names, that mlx-lm does not support.
            return True
        if all(layer.tokens for layer in cache):
            imported = import_prompt_cache(self._out)
            assert [layer.seen_tokens for layer in imported] == [layer.seen_tokens for layer in cache]
            for layer, again in zip(cache, imported, strict=True):
                # If earlier tokens were dropped, a first token of zeros may be an unused slot.
                assert layer.tokens - again.tokens in ((0, 1) if layer.skipped else (0,))
                for values, other_values in zip(layer.unpack(), again.unpack(), strict=True):
                    assert values is not None
                    assert other_values is not None
                    assert _bytes(values[:, :, layer.tokens - again.tokens :]).equal(_bytes(other_values)), (
                        "the same tokens have different values"
                    )
        return True


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)
