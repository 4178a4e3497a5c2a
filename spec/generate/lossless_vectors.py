"""The conformance vectors of the codec lossless and of the coder rANS."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from kvpack.cache.side import packed_side
from spec.generate.invalid_vectors import LOSSLESS, add
from spec.generate.parameter_vectors import add_alone
from spec.generate.valid_vectors import add as add_valid
from spec.generate.valid_vectors import with_fields
from support.file_parts import Parts, bits, changed, file_of, one_side
from support.lossless_streams import DTYPES
from support.strategies import create

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.formats.base import Codec

LONG = create("lossless", 20, dtype="fp16", chunk="16")
SPECIAL = {
    "bf16": "0000 8000 0001 80ff 7f80 ff80 7fc0 ff01 7fff ffff",
    "fp16": "0000 8000 0001 83ff 7c00 fc00 7e00 fe01 7fff ffff",
}
"""Zeros, subnormal numbers, infinities and NaN, as numbers."""


def add_all() -> None:
    add_values()
    add_shapes()
    add_parameters()
    add_coder()
    add_words()


def of_bits(codec: Codec, patterns: Sequence[int], heads: int = 1, runs: Sequence[int] = ()) -> bytes:
    """A file of values with these bits, which fill whole tokens; each of ``runs`` is encoded by itself."""
    dtype = DTYPES[codec.dtype]  # type: ignore[attr-defined]
    values = torch.tensor(patterns, dtype=torch.int32).to(torch.int16).view(dtype).view(1, heads, -1, codec.dim)
    sides = [packed_side(part, codec, 0, "k") for part in torch.split(values, list(runs or [values.shape[2]]), 2)]
    return file_of((sides[0].concat(*sides[1:]), None))


def add_values() -> None:
    for dtype, text in SPECIAL.items():
        codec, patterns = create("lossless", 5, dtype=dtype, chunk="16"), [int(one, 16) for one in text.split()]
        shows = f"{dtype}: zeros of both signs, subnormal and largest subnormal numbers, infinities, NaN of several payloads"
        add_valid(f"lossless-{dtype}-special-values", shows, lambda c=codec, p=patterns: of_bits(c, p), "lossless-7", "front-12")
        exponents = 256 if dtype == "bf16" else 32
        fraction = 7 if dtype == "bf16" else 10
        every = [sign << 15 | exponent << fraction | exponent * 37 % (1 << fraction) for exponent in range(exponents) for sign in (0, 1)]
        wide = create("lossless", 32, dtype=dtype, chunk="16")
        shows = f"{dtype}: every exponent with both signs"
        add_valid(f"lossless-{dtype}-all-exponents", shows, lambda c=wide, p=every: of_bits(c, p), "lossless-7")
    bf16 = create("lossless", 40, dtype="bf16", chunk="16")
    one = [0x3F80 | i % 128 for i in range(40 * 16)]
    add_valid("lossless-one-exponent", "one exponent next to the others that have room", lambda: of_bits(bf16, one), "lossless-7")
    alone = changed_table(bf16, lambda table: [4096 if symbol == 127 else 0 for symbol in range(256)])
    shows = "a table of one symbol, whose frequency is 4096: chunks without words, states that stay at 2^16"
    add_valid("lossless-one-symbol", shows, lambda: alone(one), "lossless-7")
    rare = changed_table(bf16, lambda table: [3841 if symbol == 127 else 1 for symbol in range(256)])
    skewed = [(0x3F80 if i % 3 else i * 113 % 256 << 7) | i % 128 for i in range(40 * 16)]
    add_valid("lossless-rare-symbols", "symbols of frequency 1, each of which takes 12 bits", lambda: rare(skewed), "lossless-7")


def changed_table(codec: Codec, change: Callable[[list[int]], list[int]]) -> Callable[[Sequence[int]], bytes]:
    """Makes a file of values with the given bits, coded by another table than the encoder's."""
    from kvpack.cache.pages import Page
    from kvpack.cache.side import Side

    def make(patterns: Sequence[int]) -> bytes:
        values = torch.tensor(patterns, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(1, 1, -1, codec.dim)
        streams = codec.encode(values)
        table = torch.tensor(change(streams["frequencies"].flatten().tolist()), dtype=torch.int32)
        streams |= codec.coded(values, table[None].to(torch.int64).numpy())  # type: ignore[attr-defined]
        streams["frequencies"] = table.to(torch.int16).view(torch.uint16).view(streams["frequencies"].shape)
        page = Page(codec, values.shape[2], {name: streams[name] for name in codec.layout(1, 1, 0)})
        return file_of((Side(codec, (page,), values[:, :, :0]), None))

    return make


def add_shapes() -> None:
    for dim, dtype, chunk, runs in (
        (1, "bf16", "16", (40,)),
        (5, "fp16", "32", (33,)),
        (33, "bf16", "16", (17,)),
        (128, "fp16", "256", (3,)),
        (128, "bf16", "256", (2,)),
        (1024, "bf16", "64", (1,)),
    ):
        codec = create("lossless", dim, dtype=dtype, chunk=chunk)
        shows = f"{dtype}, head dim {dim}, token groups of {chunk}, {runs[0]} tokens"
        add_valid(f"lossless-{dtype}-dim-{dim}", shows, lambda c=codec, r=runs: one_side(c, runs=r, heads=1), "lossless-7", "front-12")
    fp16 = create("lossless", 6, dtype="fp16", chunk="16")
    shows = "words of two sequences and three heads, in three runs of whole and partial token groups"
    add_valid("lossless-rows", shows, lambda: one_side(fp16, runs=(17, 32, 5), batch=2, heads=3), "lossless-7", "front-12")
    for count, shows in ((1, "one field a column"), (11, "more fields than channels, in columns of 16 bytes")):
        codec = with_fields(fp16, count)
        add_valid(f"lossless-fields-{count}", shows, lambda c=codec: one_side(c), "front-12")


def add_parameters() -> None:
    wide = create("lossless", 257, dtype="bf16", chunk="128")
    add_alone("lossless-chunk-too-wide", "lossless-4", wide, {"chunk": 256}, "a chunk of 256 tokens of 257 channels")
    widest = create("lossless", 1024, dtype="fp16", chunk="64")
    add_alone("lossless-chunk-of-1024-channels", "lossless-4", widest, {"chunk": 128}, "a chunk of 128 tokens of 1024 channels")
    for name, value in (("channel-scale", "fp16"), ("outliers", {"fields": 1}), ("raw-tokens", "bf16")):
        codec = create("lossless", 8, dtype="bf16", chunk="16")
        add_alone(f"side-car-{name}-of-lossless", "lossless-5", codec, {name.replace("-", "_"): value}, f"{name} of lossless")


def add_payload(name: str, rule: str, shows: str, make: Callable[[], bytes]) -> None:
    add(f"lossless-{name}", rule, "InvalidPayload", shows, make)


def coded(*changes: Callable[[Parts], None], runs: tuple[int, ...] = (16,)) -> bytes:
    """A file with a chunk, or several, that have words."""
    return changed(one_side(LONG, runs=runs, tail=0, heads=1), *changes)


def add_coder() -> None:
    for name, at, value, shows in (
        ("above", 0, 1, "a table that sums to 4097"),
        ("below", 62, -1, "a table that sums to 4095"),
        ("wrapped", 4, 61440, "a table that sums to 65536"),
    ):
        add_payload(f"frequencies-{name}", "rans-1", shows, lambda a=at, v=value: coded(plus("frequencies", a, v, 2)))
    shows = "a table of zeros"
    add_payload("frequencies-zero", "rans-1", shows, lambda: coded(bits("0.k.frequencies", 0, "00" * 64)))
    add_payload(
        "frequencies-of-a-second-run", "rans-1", "the table of the second run", lambda: coded(plus("frequencies", 64, 1, 2), runs=(5, 16))
    )
    for lane in (0, 31):
        shows = f"the first state of lane {lane} is below 2^16"
        add_payload(f"state-{lane}-low", "rans-2", shows, lambda one=lane: coded(bits("0.k.states", 4 * one + 2, "0000")))
    add_payload("state-low-that-ends-well", "rans-2", "a first state of 1 that ends at 2^16, for it takes a word of 0", one_low_state)
    idle = lambda: one_side(LOSSLESS, bits("0.k.states", 124, "0100"), tail=0)  # noqa: E731
    add_payload("state-of-an-idle-lane", "rans-4", "a lane without a symbol whose state is 2^16 + 1", idle)
    used = lambda: one_side(LOSSLESS, plus("states", 4, 4096, 4), tail=0)  # noqa: E731
    add_payload("state-of-a-used-lane", "rans-4", "a lane with one symbol that ends above 2^16", used)
    largest = lambda: one_side(LOSSLESS, bits("0.k.states", 124, "ffffffff"), tail=0)  # noqa: E731
    add_payload("state-largest", "rans-4", "a lane without a symbol whose state is 2^32 - 1", largest)


def one_low_state() -> bytes:
    """One value by a table of one symbol, which leaves states as they are."""
    codec = create("lossless", 1, dtype="bf16", chunk="16")
    alone = changed_table(codec, lambda _: [4096 if symbol == 127 else 0 for symbol in range(256)])

    def word(counts: list[int], stored: list[int]) -> None:
        counts[0] = 1
        stored.append(0)

    return changed(alone([0x3F80]), bits("0.k.states", 0, "01000000"), words(word))


def plus(stream: str, at: int, amount: int, size: int) -> Callable[[Parts], None]:
    """Adds ``amount`` to the number of ``size`` bytes at byte ``at`` of a stream."""

    def apply(parts: Parts) -> None:
        number = parts.tensor(f"0.k.{stream}")
        data = bytearray(parts.tensors[number])
        value = int.from_bytes(data[at : at + size], "little") + amount
        data[at : at + size] = value.to_bytes(size, "little")
        parts.tensors[number] = bytes(data)

    return apply


def words(change: Callable[[list[int], list[int]], None]) -> Callable[[Parts], None]:
    """Applies ``change`` to the counts and the words of all chunks, and lets the header follow."""

    def apply(parts: Parts) -> None:
        number, counted = parts.tensor("0.k.words"), parts.tensor("0.k.word_counts")
        counts = list(struct.unpack(f"<{len(parts.tensors[counted]) // 2}H", parts.tensors[counted]))
        stored = list(struct.unpack(f"<{len(parts.tensors[number]) // 2}H", parts.tensors[number]))
        change(counts, stored)
        parts.tensors[counted] = struct.pack(f"<{len(counts)}H", *counts)
        parts.tensors[number] = struct.pack(f"<{len(stored)}H", *stored)
        entries = len(stored)
        parts.header["layers"][0]["k"]["entries"]["words"] = parts.header["tensors"][number][2][2] = entries

    return apply


def add_words() -> None:
    def drop(counts: list[int], stored: list[int]) -> None:
        counts[-1] -= 1
        stored.pop()

    def append(counts: list[int], stored: list[int]) -> None:
        counts[-1] += 1
        stored.append(0)

    def move(counts: list[int], stored: list[int]) -> None:
        counts[0] -= 1
        counts[1] += 1

    def none(counts: list[int], stored: list[int]) -> None:
        counts[0] = 0
        stored.clear()

    uneven = create("lossless", 5, dtype="bf16", chunk="16")
    shows = "a sign in a field without a channel"
    add_payload("field-without-a-symbol", "front-3", shows, lambda: one_side(uneven, bits("0.k.signed_fractions.0", 5, "80"), tail=0))
    add_payload("word-missing", "rans-3", "a chunk that needs a word more than it has", lambda: coded(words(drop)))
    add_payload("word-surplus", "rans-3", "a chunk that leaves a word", lambda: coded(words(append)))
    add_payload("words-none", "rans-3", "a chunk without words that needs some", lambda: coded(words(none)))
    shows = "two chunks, the first of which has lost its last word to the second"
    add_payload("word-of-a-neighbour", "rans-3", shows, lambda: coded(words(move), runs=(32,)))
    shows = "a chunk of symbols that fit in the states, and a word"
    add_payload("word-without-need", "rans-3", shows, lambda: changed(one_side(LOSSLESS, tail=0, heads=1), words(append)))
    shows = "word_counts that sum to one more than the words that there are"
    add_payload("word-counts-above", "lossless-6", shows, lambda: coded(plus("word_counts", 0, 1, 2)))
    add_payload("word-counts-below", "lossless-6", "word_counts that sum to one less", lambda: coded(plus("word_counts", 0, -1, 2)))
    shows = "entries of words, and no count of them, of a side without packed tokens"
    add_payload(
        "words-without-tokens", "lossless-6", shows, lambda: one_side(LOSSLESS, words(lambda counts, stored: stored.append(1)), runs=())
    )
