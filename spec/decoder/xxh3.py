"""XXH3-128 with seed 0, most significant byte first (spec/container.md, Digests)."""

from __future__ import annotations

import struct

from .conventions import MASK, word32, word64

PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
PRIME_MX1, PRIME_MX2 = 0x165667919E3779F9, 0x9FB21C651E98DF25
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
STRIPE, LANES = 64, 8
STRIPES_PER_BLOCK = (len(SECRET) - STRIPE) // 8


def swap_bytes(x: int, count: int) -> int:
    return int.from_bytes(x.to_bytes(count, "little"), "big")


def fold(a: int, b: int) -> int:
    """Return the exclusive or of both halves of the 128-bit product."""
    product = a * b
    return product & MASK ^ product >> 64


def avalanche(x: int) -> int:
    x = (x ^ x >> 37) * PRIME_MX1 & MASK
    return x ^ x >> 32


def avalanche_short(x: int) -> int:
    x = (x ^ x >> 33) * PRIME64_2 & MASK
    x = (x ^ x >> 29) * PRIME64_3 & MASK
    return x ^ x >> 32


def xxh3_128(data: bytes) -> bytes:
    """Return XXH3-128 of ``data`` with seed 0, in canonical form."""
    size = len(data)
    if size > 240:
        low, high = _xxh3_long(data)
    elif size > 16:
        low, high = _xxh3_middle(data)
    elif size > 8:
        low, high = _xxh3_9_to_16(data)
    elif size > 3:
        low, high = _xxh3_4_to_8(data)
    elif size > 0:
        low, high = _xxh3_1_to_3(data)
    else:
        low = avalanche_short(word64(SECRET, 64) ^ word64(SECRET, 72))
        high = avalanche_short(word64(SECRET, 80) ^ word64(SECRET, 88))
    return high.to_bytes(8, "big") + low.to_bytes(8, "big")


def _xxh3_1_to_3(data: bytes) -> tuple[int, int]:
    size = len(data)
    combined = data[-1] | size << 8 | data[0] << 16 | data[size // 2] << 24
    swapped = swap_bytes(combined, 4)
    rotated = (swapped << 13 | swapped >> 19) & 0xFFFFFFFF
    low = word32(SECRET, 0) ^ word32(SECRET, 4) ^ combined
    high = word32(SECRET, 8) ^ word32(SECRET, 12) ^ rotated
    return avalanche_short(low), avalanche_short(high)


def _xxh3_4_to_8(data: bytes) -> tuple[int, int]:
    size = len(data)
    value = word64(SECRET, 16) ^ word64(SECRET, 24) ^ (word32(data, 0) | word32(data, size - 4) << 32)
    product = value * (PRIME64_1 + (size << 2))
    low, high = product & MASK, product >> 64 & MASK
    high = high + (low << 1) & MASK
    low ^= high >> 3
    low = (low ^ low >> 35) * PRIME_MX2 & MASK
    return low ^ low >> 28, avalanche(high)


def _xxh3_9_to_16(data: bytes) -> tuple[int, int]:
    size = len(data)
    first, last = word64(data, 0), word64(data, size - 8)
    product = (word64(SECRET, 32) ^ word64(SECRET, 40) ^ first ^ last) * PRIME64_1
    other = word64(SECRET, 48) ^ word64(SECRET, 56) ^ last
    low = (product & MASK) + (size - 1 << 54) & MASK
    high = (product >> 64) + other + (other & 0xFFFFFFFF) * (PRIME32_2 - 1) & MASK
    low ^= swap_bytes(high, 8)
    product = (high << 64 | low) * PRIME64_2
    return avalanche(product & MASK), avalanche(product >> 64 & MASK)


def _xxh3_middle(data: bytes) -> tuple[int, int]:
    size = len(data)
    low, high = size * PRIME64_1 & MASK, 0

    def mix(at: int, secret: int) -> int:
        return fold(word64(data, at) ^ word64(SECRET, secret), word64(data, at + 8) ^ word64(SECRET, secret + 8))

    def mix_two(at: int, other: int, secret: int) -> None:
        nonlocal low, high
        low = (low + mix(at, secret) & MASK) ^ (word64(data, other) + word64(data, other + 8) & MASK)
        high = (high + mix(other, secret + 16) & MASK) ^ (word64(data, at) + word64(data, at + 8) & MASK)

    if size <= 128:
        for i in reversed(range((size - 1) // 32 + 1)):
            mix_two(16 * i, size - 16 * i - 16, 32 * i)
    else:
        for i in range(4):
            mix_two(32 * i, 32 * i + 16, 32 * i)
        low, high = avalanche(low), avalanche(high)
        for i in range(4, size // 32):
            mix_two(32 * i, 32 * i + 16, 32 * (i - 4) + 3)
        mix_two(size - 16, size - 32, 103)
    ended = avalanche(low * PRIME64_1 + high * PRIME64_4 + size * PRIME64_2 & MASK)
    return avalanche(low + high & MASK), -ended & MASK


def _xxh3_long(data: bytes) -> tuple[int, int]:
    size = len(data)
    sums = [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1]

    def accumulate(at: int, secret: int) -> None:
        stripe = struct.unpack_from("<8Q", data, at)
        keys = struct.unpack_from("<8Q", SECRET, secret)
        for i in range(LANES):
            value = stripe[i] ^ keys[i]
            sums[i ^ 1] = sums[i ^ 1] + stripe[i] & MASK
            sums[i] = sums[i] + (value & 0xFFFFFFFF) * (value >> 32) & MASK

    # Process all full stripes but the last bytes. Every block of stripes except the last ends with a scramble.
    for n in range((size - 1) // STRIPE):
        place = n % STRIPES_PER_BLOCK
        if n and place == 0:
            _scramble(sums)
        accumulate(STRIPE * n, 8 * place)
    if (size - 1) // STRIPE % STRIPES_PER_BLOCK == 0:
        _scramble(sums)
    accumulate(size - STRIPE, len(SECRET) - 71)

    def merge(start: int, secret: int) -> int:
        keys = struct.unpack_from("<8Q", SECRET, secret)
        folds = (fold(sums[i] ^ keys[i], sums[i + 1] ^ keys[i + 1]) for i in range(0, LANES, 2))
        return avalanche(start + sum(folds) & MASK)

    return merge(size * PRIME64_1 & MASK, 11), merge(~(size * PRIME64_2) & MASK, len(SECRET) - 75)


def _scramble(sums: list[int]) -> None:
    keys = struct.unpack_from("<8Q", SECRET, len(SECRET) - STRIPE)
    for i in range(LANES):
        sums[i] = (sums[i] ^ sums[i] >> 47 ^ keys[i]) * PRIME32_1 & MASK
