"""XXH3-128 digests of tensors, computed on their device (spec/container.md, Digests), with two launches for all tensors of a load.

Each block of 1,024 bytes adds a sum to the hash's accumulators, but the sum does not depend on them. The first launch computes the sums of
all blocks in parallel, at memory speed. The second combines each tensor's sums in order, for all tensors in parallel. Above 1 GiB, several
such pairs of launches run concurrently.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from itertools import cycle
from typing import Any

import numpy
import torch
import triton
from triton import language as tl

from .columns import device_table, launch

MIN_BYTES = 241
"""Minimum number of bytes; XXH3 hashes shorter inputs with other algorithms, which this file does not implement."""

BLOCK_BYTES = tl.constexpr(1024)
STRIPES, PAIRS = tl.constexpr(16), tl.constexpr(4)
"""Stripes per block, and pairs of 64-bit lanes per stripe."""
BLOCKS = 32
"""Number of blocks whose sums one program computes."""
WARPS = 4
STEPS = 32
"""Number of blocks whose sums are loaded before the first sum is used."""
BLOCKS_AT_ONCE = 1 << 20
"""Maximum number of blocks per pair of launches, unless a tensor has more. This is 1 GiB of data, whose sums take 64 MiB."""
STREAMS = 4
"""Number of pairs of launches that run concurrently.

The second launch takes as long as its largest tensor needs, and leaves most of the device idle: a 1 GB embedding takes as long as 14 GB of
smaller weights.
"""

TABLE_INTEGERS = tl.constexpr(3)
"""Integers per table row. A row describes a tensor by its address, its size in bytes, and the index of its first block among all blocks."""

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_ACCUMULATORS = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip
"""Initial accumulators of XXH3."""
PRIME32 = tl.constexpr(0x9E3779B1)
PRIME64, OTHER_PRIME64 = tl.constexpr(0x9E3779B185EBCA87), tl.constexpr(0xC2B2AE3D27D4EB4F)
AVALANCHE = tl.constexpr(0x165667919E3779F9)

SCRAMBLE, LAST, LOW, HIGH, BEGIN = (tl.constexpr(at) for at in (16, 24, 32, 40, 48))
"""Offsets of groups of 8 words in ``_hash_constants``.

The groups are the secrets for the end of a block, for the last stripe and for the two digest halves, and the initial accumulators.
"""


@lru_cache(maxsize=16)
def _hash_constants(device: str) -> torch.Tensor:
    """Return the constants of XXH3 as int64.

    They are the secret's 24 words, 8 words at each of three unaligned offsets, and the initial accumulators.
    """
    words = b"".join(_SECRET[offset : offset + size] for offset, size in ((0, 192), (121, 64), (11, 64), (117, 64)))
    values = numpy.concatenate([numpy.frombuffer(words, "<u8"), numpy.array(_ACCUMULATORS, numpy.uint64)])
    with torch.inference_mode(False):
        return torch.from_numpy(values.view(numpy.int64)).to(device)


def digests(ranges: Sequence[tuple[torch.Tensor, int, int]]) -> torch.Tensor:
    """Return the XXH3-128 digests of byte ``ranges`` in device memory, int64 ``[range, 2]``, high half first.

    A range is (contiguous uint8 tensor, index of its first byte, index after its last byte). All tensors are on one device. A range begins
    at a multiple of 8 bytes and has at least ``MIN_BYTES`` bytes.
    """
    device = ranges[0][0].device
    result = torch.empty(len(ranges), 2, dtype=torch.int64, device=device)
    groups: list[tuple[list[tuple[int, int, int]], int]] = []
    rows: list[tuple[int, int, int]] = []
    blocks = 0
    for memory, begin, end in ranges:
        rows.append((memory.data_ptr() + begin, end - begin, blocks))
        blocks += -(-(end - begin) // BLOCK_BYTES.value)
        if blocks >= BLOCKS_AT_ONCE:
            groups.append((rows, blocks))
            rows, blocks = [], 0
    if rows:
        groups.append((rows, blocks))
    parts = result.split([len(rows) for rows, _ in groups])  # type: ignore[no-untyped-call]
    with _launch_streams(device, len(groups)) as streams:
        for part, (rows, blocks), stream in zip(parts, groups, cycle(streams), strict=False):
            with stream:
                _launch(part, rows, blocks)
    return result


@contextmanager
def _launch_streams(device: torch.device, groups: int) -> Iterator[list[AbstractContextManager[Any]]]:
    """Yield CUDA stream contexts, one for each of ``groups`` pairs of launches. On exit, the caller's stream waits for all of them.

    A single pair runs on the caller's stream.
    """
    if device.type != "cuda" or groups == 1:
        yield [nullcontext()]
        return
    caller = torch.cuda.current_stream(device)
    launch_streams = _device_streams(device)[:groups]
    # Create the constants before any of the streams starts.
    _hash_constants(str(device))
    for stream in launch_streams:
        stream.wait_stream(caller)
    try:
        yield [torch.cuda.stream(stream) for stream in launch_streams]
    finally:
        for stream in launch_streams:
            caller.wait_stream(stream)


@lru_cache(maxsize=16)
def _device_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Return the ``STREAMS`` CUDA streams that compute digests on ``device``. Every call returns the same streams.

    PyTorch reuses freed memory only on the same stream, so the memory for sums would grow if new streams were created.
    """
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]


def _launch(result: torch.Tensor, rows: Sequence[tuple[int, int, int]], blocks: int) -> None:
    device = result.device
    table, constants = device_table(rows, device), _hash_constants(str(device))
    sums = torch.empty(blocks, 2 * PAIRS.value, dtype=torch.int64, device=device)
    parts = -(-max(size for _, size, _ in rows) // (BLOCK_BYTES.value * BLOCKS))
    launch(_sum_blocks, len(rows) * parts, device, sums, table, constants, parts, BLOCKS=BLOCKS, warps=WARPS)
    launch(_finish, len(rows), device, result, sums, table, constants, STEPS=STEPS, warps=1)


@triton.jit
def _as_words(address: tl.tensor) -> tl.tensor:
    return address.to(tl.pointer_type(tl.uint64))


@triton.jit(do_not_specialize=["parts"])
def _sum_blocks(sums: tl.tensor, table: tl.tensor, constants: tl.tensor, parts: tl.tensor, BLOCKS: tl.constexpr) -> None:
    """Write the sum that each block of one part of a tensor adds to the accumulators. The tensor's last stripe (64 bytes) is left out."""
    row = table + (tl.program_id(0) // parts) * TABLE_INTEGERS
    size = tl.load(row + 1)
    block = (tl.program_id(0) % parts).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None, None, None]
    stripe, pair, half = tl.arange(0, STRIPES)[:, None, None], tl.arange(0, PAIRS)[:, None], tl.arange(0, 2)
    # The stripe at the end of a tensor is added separately, in ``_finish``.
    valid = (block * STRIPES + stripe < (size - 1) // 64) & (pair + half >= 0)
    word = tl.load(_as_words(tl.load(row)) + block * 128 + (stripe * 8 + pair * 2 + half), valid, 0)
    key = word ^ tl.load(_as_words(constants) + (stripe + pair * 2 + half))
    product = tl.where(valid, key.to(tl.uint32).to(tl.uint64) * (key >> 32), 0)
    even, odd = tl.split(tl.sum(word, 1))
    total = tl.sum(product, 1) + tl.join(odd, even)
    block = tl.reshape(block, (BLOCKS, 1, 1))
    tl.store(_as_words(sums) + (tl.load(row + 2) + block) * 8 + (pair * 2 + half), total, (block * BLOCK_BYTES < size) & (pair + half >= 0))


@triton.jit
def _scramble(accumulators: tl.tensor, sums: tl.tensor, secret: tl.tensor) -> tl.tensor:
    accumulators += sums
    return (accumulators ^ (accumulators >> 47) ^ secret) * PRIME32


@triton.jit
def _digest_half(accumulators: tl.tensor, secret: tl.tensor, start: tl.tensor) -> tl.tensor:
    """Compute one 64-bit half of the digest from the final ``accumulators``."""
    a, b = tl.split(accumulators ^ secret)
    value = start + tl.sum((a * b) ^ tl.umulhi(a, b), 0)
    value = (value ^ (value >> 37)) * AVALANCHE
    return value ^ (value >> 32)


@triton.jit
def _finish(result: tl.tensor, sums: tl.tensor, table: tl.tensor, constants: tl.tensor, STEPS: tl.constexpr) -> None:
    """Combine the block sums of one tensor, and write its digest to ``result``: the high half, then the low half."""
    row = table + tl.program_id(0).to(tl.int64) * TABLE_INTEGERS
    size = tl.load(row + 1)
    lane = tl.arange(0, PAIRS)[:, None] * 2 + tl.arange(0, 2)
    constant = _as_words(constants) + lane
    accumulators, secret = tl.load(constant + BEGIN), tl.load(constant + SCRAMBLE)
    address = _as_words(sums) + tl.load(row + 2) * 8 + lane
    blocks = (size - 1) // BLOCK_BYTES
    for _ in range(blocks // STEPS):
        loaded = ()
        for step in tl.static_range(STEPS):
            loaded += (tl.load(address + step * 8),)
        for step in tl.static_range(STEPS):
            accumulators = _scramble(accumulators, loaded[step], secret)
        address += STEPS * 8
    for _ in range(blocks % STEPS):
        accumulators = _scramble(accumulators, tl.load(address), secret)
        address += 8
    accumulators += tl.load(address)
    byte = tl.load(row).to(tl.pointer_type(tl.uint8)) + (size - 64) + lane * 8
    word = tl.zeros_like(accumulators)
    neighbor = word
    for byte_index in tl.static_range(8):
        word |= tl.load(byte + byte_index).to(tl.uint64) << (8 * byte_index)
        neighbor |= tl.load(byte + byte_index + (1 - lane % 2 * 2) * 8).to(tl.uint64) << (8 * byte_index)
    key = word ^ tl.load(constant + LAST)
    accumulators += neighbor + key.to(tl.uint32).to(tl.uint64) * (key >> 32)
    length = size.to(tl.uint64)
    address = _as_words(result) + tl.program_id(0).to(tl.int64) * 2
    tl.store(address, _digest_half(accumulators, tl.load(constant + HIGH), (length * OTHER_PRIME64) ^ 0xFFFFFFFFFFFFFFFF))
    tl.store(address + 1, _digest_half(accumulators, tl.load(constant + LOW), length * PRIME64))
