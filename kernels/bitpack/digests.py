"""XXH3-128 of tensors on their device (spec/container.md, Digests): two launches for all tensors of a load.

What a block of 1,024 bytes adds to the hash's accumulators does not depend on the accumulators, so one launch computes it for all blocks at
memory speed. The other processes the blocks of each tensor in order, 64 bytes and a few instructions per block, all tensors at once. Above
1 GiB, several such pairs run at once.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import lru_cache
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy
import torch
import triton
from triton import language as tl

from .columns import launch, table_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

MIN_BYTES = 241
"""Fewer bytes are hashed in other ways, which are not here."""

BLOCK_BYTES = tl.constexpr(1024)
STRIPES, PAIRS = tl.constexpr(16), tl.constexpr(4)
"""Stripes of a block, and pairs of 64-bit lanes of a stripe."""
BLOCKS = 32
"""Blocks that a program adds up at once."""
WARPS = 4
STEPS = 32
"""Blocks whose sums are loaded before the first is used."""
BLOCKS_AT_ONCE = 1 << 20
"""Blocks of two launches, unless one tensor has more: 1 GiB of tensors, for whose sums 64 MiB are allocated."""
STREAMS = 4
"""Pairs of launches that run at once. The second launch of a pair takes as long as its largest tensor needs, and leaves most of the device
idle: an embedding of 1 GB takes as long as 14 GB of smaller weights.
"""

TABLE_INTEGERS = tl.constexpr(3)
"""Integers of a tensor in the table: its address, its bytes, and the number of its first block among all."""

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_ACCUMULATORS = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip
"""The default secret of XXH3, and its accumulators before the first block."""
PRIME32 = tl.constexpr(0x9E3779B1)
PRIME64, OTHER_PRIME64 = tl.constexpr(0x9E3779B185EBCA87), tl.constexpr(0xC2B2AE3D27D4EB4F)
AVALANCHE = tl.constexpr(0x165667919E3779F9)

SCRAMBLE, LAST, LOW, HIGH, BEGIN = (tl.constexpr(at) for at in (16, 24, 32, 40, 48))
"""Places of 8 words in the table of constants: for the end of a block, the last stripe and both halves of the digest, and the start."""


@lru_cache(maxsize=16)
def _constants(device: str) -> torch.Tensor:
    """Return the secret's 24 words, its words at three odd places, and the accumulators at the start, int64."""
    words = b"".join(_SECRET[at : at + size] for at, size in ((0, 192), (121, 64), (11, 64), (117, 64)))
    values = numpy.concatenate([numpy.frombuffer(words, "<u8"), numpy.array(_ACCUMULATORS, numpy.uint64)])
    with torch.inference_mode(False):
        return torch.from_numpy(values.view(numpy.int64)).to(device)


def digests(places: Sequence[tuple[torch.Tensor, int, int]]) -> torch.Tensor:
    """Return the digests of bytes ``[begin, end)`` of memory on one device, int64 ``[place, 2]``: high half, then low half.

    The memory is contiguous uint8; each place begins at a multiple of 8 bytes and has ``MIN_BYTES`` or more.
    """
    device = places[0][0].device
    result = torch.empty(len(places), 2, dtype=torch.int64, device=device)
    groups: list[tuple[list[tuple[int, int, int]], int]] = []
    rows: list[tuple[int, int, int]] = []
    blocks = 0
    for memory, begin, end in places:
        rows.append((memory.data_ptr() + begin, end - begin, blocks))
        blocks += -(-(end - begin) // BLOCK_BYTES.value)
        if blocks >= BLOCKS_AT_ONCE:
            groups.append((rows, blocks))
            rows, blocks = [], 0
    if rows:
        groups.append((rows, blocks))
    parts = result.split([len(rows) for rows, _ in groups])  # type: ignore[no-untyped-call]
    with _streams(device, len(groups)) as streams:
        for part, (rows, blocks), stream in zip(parts, groups, cycle(streams), strict=False):
            with stream:
                _launch(part, rows, blocks)
    return result


@contextmanager
def _streams(device: torch.device, groups: int) -> Iterator[list[AbstractContextManager[Any]]]:
    """Yield the streams for ``groups`` pairs of launches: the caller's stream for one pair, otherwise other streams, and wait for them."""
    if device.type != "cuda" or groups == 1:
        yield [nullcontext()]
        return
    caller = torch.cuda.current_stream(device)
    own = _streams_of(device)[:groups]
    # The table of constants is made before any of them begins.
    _constants(str(device))
    for stream in own:
        stream.wait_stream(caller)
    try:
        yield [torch.cuda.stream(stream) for stream in own]
    finally:
        for stream in own:
            caller.wait_stream(stream)


@lru_cache(maxsize=16)
def _streams_of(device: torch.device) -> list[torch.cuda.Stream]:
    """Return ``STREAMS`` streams for groups of launches.

    Memory freed on a stream is reused only on that stream, so the sums of all groups take the memory of ``STREAMS`` groups.
    """
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]


def _launch(found: torch.Tensor, rows: Sequence[tuple[int, int, int]], blocks: int) -> None:
    device = found.device
    table, constants = table_of(rows, device), _constants(str(device))
    sums = torch.empty(blocks, 2 * PAIRS.value, dtype=torch.int64, device=device)
    parts = -(-max(size for _, size, _ in rows) // (BLOCK_BYTES.value * BLOCKS))
    launch(_add_up, len(rows) * parts, device, sums, table, constants, parts, BLOCKS=BLOCKS, warps=WARPS)
    launch(_finish, len(rows), device, found, sums, table, constants, STEPS=STEPS, warps=1)


@triton.jit
def _words(address: tl.tensor) -> tl.tensor:
    return address.to(tl.pointer_type(tl.uint64))


@triton.jit(do_not_specialize=["parts"])
def _add_up(sums: tl.tensor, table: tl.tensor, constants: tl.tensor, parts: tl.tensor, BLOCKS: tl.constexpr) -> None:
    """Add the blocks of this part of a tensor to the accumulators, except the tensor's last stripe."""
    row = table + (tl.program_id(0) // parts) * TABLE_INTEGERS
    size = tl.load(row + 1)
    block = (tl.program_id(0) % parts).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None, None, None]
    stripe, pair, half = tl.arange(0, STRIPES)[:, None, None], tl.arange(0, PAIRS)[:, None], tl.arange(0, 2)
    # A stripe that ends a tensor is its last stripe, which is added without being part of a block.
    there = (block * STRIPES + stripe < (size - 1) // 64) & (pair + half >= 0)
    word = tl.load(_words(tl.load(row)) + block * 128 + (stripe * 8 + pair * 2 + half), there, 0)
    key = word ^ tl.load(_words(constants) + (stripe + pair * 2 + half))
    product = tl.where(there, key.to(tl.uint32).to(tl.uint64) * (key >> 32), 0)
    even, odd = tl.split(tl.sum(word, 1))
    sum_ = tl.sum(product, 1) + tl.join(odd, even)
    block = tl.reshape(block, (BLOCKS, 1, 1))
    tl.store(_words(sums) + (tl.load(row + 2) + block) * 8 + (pair * 2 + half), sum_, (block * BLOCK_BYTES < size) & (pair + half >= 0))


@triton.jit
def _after_block(accumulators: tl.tensor, sums: tl.tensor, secret: tl.tensor) -> tl.tensor:
    accumulators += sums
    return (accumulators ^ (accumulators >> 47) ^ secret) * PRIME32


@triton.jit
def _half(accumulators: tl.tensor, secret: tl.tensor, start: tl.tensor) -> tl.tensor:
    """Return one 64-bit half of the digest."""
    a, b = tl.split(accumulators ^ secret)
    value = start + tl.sum((a * b) ^ tl.umulhi(a, b), 0)
    value = (value ^ (value >> 37)) * AVALANCHE
    return value ^ (value >> 32)


@triton.jit
def _finish(found: tl.tensor, sums: tl.tensor, table: tl.tensor, constants: tl.tensor, STEPS: tl.constexpr) -> None:
    """Compute the digest of a tensor, as its high and its low half."""
    row = table + tl.program_id(0).to(tl.int64) * TABLE_INTEGERS
    size = tl.load(row + 1)
    lane = tl.arange(0, PAIRS)[:, None] * 2 + tl.arange(0, 2)
    constant = _words(constants) + lane
    accumulators, secret = tl.load(constant + BEGIN), tl.load(constant + SCRAMBLE)
    place = _words(sums) + tl.load(row + 2) * 8 + lane
    blocks = (size - 1) // BLOCK_BYTES
    for _ in range(blocks // STEPS):
        loaded = ()
        for step in tl.static_range(STEPS):
            loaded += (tl.load(place + step * 8),)
        for step in tl.static_range(STEPS):
            accumulators = _after_block(accumulators, loaded[step], secret)
        place += STEPS * 8
    for _ in range(blocks % STEPS):
        accumulators = _after_block(accumulators, tl.load(place), secret)
        place += 8
    accumulators += tl.load(place)
    byte = tl.load(row).to(tl.pointer_type(tl.uint8)) + (size - 64) + lane * 8
    word = tl.zeros_like(accumulators)
    other = word
    for at in tl.static_range(8):
        word |= tl.load(byte + at).to(tl.uint64) << (8 * at)
        other |= tl.load(byte + at + (1 - lane % 2 * 2) * 8).to(tl.uint64) << (8 * at)
    key = word ^ tl.load(constant + LAST)
    accumulators += other + key.to(tl.uint32).to(tl.uint64) * (key >> 32)
    length = size.to(tl.uint64)
    place = _words(found) + tl.program_id(0).to(tl.int64) * 2
    tl.store(place, _half(accumulators, tl.load(constant + HIGH), (length * OTHER_PRIME64) ^ 0xFFFFFFFFFFFFFFFF))
    tl.store(place + 1, _half(accumulators, tl.load(constant + LOW), length * PRIME64))
