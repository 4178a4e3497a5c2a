"""The expected contents of stores: the streams of every prompt of every identity, as bytes.

All identities have the same prompts and caches of the same shape, so the comparison would reveal a store that mixes them up.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

import kvpack

if TYPE_CHECKING:
    from collections.abc import Iterable

CHUNK = 32
FAMILIES, PROMPTS, LONGEST = 4, 16, 4
"""Number of families, number of prompts, and largest number of chunks per prompt. Prompts of a family share their first chunks."""
HEADS, DIM = 1, 32
_layers = 1

BASE = kvpack.Identity("model", "kivi-2", weights="w1", adapter="a", dtype="bfloat16", tenant="tenant")
IDENTITIES = (
    BASE,
    replace(BASE, tenant="tenant 2"),
    replace(BASE, adapter="b"),
    replace(BASE, model="model 2"),
)


class BrokenGuarantee(Exception):
    """Raised if a store has violated a guarantee."""


@cache
def prompt(number: int) -> tuple[int, ...]:
    """Return the token ids of a prompt: one or two chunks that its family shares, its own chunks, and a few extra tokens."""
    family, own = random.Random(number % FAMILIES), random.Random(1000 + number)
    shared = [family.randrange(100_000) for _ in range(CHUNK * (1 + number % FAMILIES % 2))]
    rest = [own.randrange(100_000) for _ in range(CHUNK * own.randint(0, LONGEST - 2))]
    return (*shared, *rest, 1, 2, 3)


def chunks(number: int) -> int:
    """Return the number of whole chunks in a prompt."""
    return len(prompt(number)) // CHUNK


@cache
def packed_prompt(who: int, number: int) -> kvpack.Cache:
    """Return the cache of a prompt, whose values are a function of the identity, the layer, and all tokens so far."""
    ids = prompt(number)

    def side(*name: Any) -> torch.Tensor:
        parts = []
        for start in range(0, len(ids), CHUNK):
            generator = torch.Generator().manual_seed(random.Random(repr((who, name, ids[: start + CHUNK]))).getrandbits(60))
            parts.append(torch.randn(1, HEADS, len(ids[start : start + CHUNK]), DIM, generator=generator))
        return torch.cat(parts, 2).to(torch.bfloat16)

    return kvpack.pack([(side("k", layer), side("v", layer)) for layer in range(_layers)], BASE.recipe)


def chunk_bytes(whole: kvpack.Cache, number: int) -> bytes:
    """Return all streams of chunk ``number``, with their names, dtypes and shapes, as bytes."""
    parts: list[bytes] = []
    for layer in whole[:, number * CHUNK : (number + 1) * CHUNK]:
        for name, side in layer.sides.items():
            parts.append(f"{name} {side.codec} {side.tokens} {side.tail.shape[2]}".encode())
            for page in side.runs:
                for stream, x in page.streams.items():
                    parts.append(f"{stream} {x.dtype} {list(x.shape)}".encode())
                    parts.append(x.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return b"\n".join(parts)


@cache
def expected_chunks(who: int, number: int) -> tuple[bytes, ...]:
    whole = packed_prompt(who, number)
    return tuple(chunk_bytes(whole, chunk) for chunk in range(chunks(number)))


def set_layers(count: int) -> None:
    """Set the number of layers of all later caches to ``count``, which changes the size of entries.

    Only a separate process may call this.
    """
    global _layers
    _layers = count
    packed_prompt.cache_clear()
    expected_chunks.cache_clear()


def prepare() -> None:
    """Compute all expected values now, so that forked processes share them."""
    for who in range(len(IDENTITIES)):
        for number in range(PROMPTS):
            expected_chunks(who, number)


def compare(who: int, number: int, tokens: int, found: kvpack.Cache | None) -> int:
    """Return the number of chunks in a result of ``load``. Raises Wrong unless they equal those that were saved, byte for byte."""
    if found is None:
        if tokens:
            raise BrokenGuarantee(f"load reports {tokens} tokens but returns no cache")
        return 0
    right = expected_chunks(who, number)
    if not 0 < tokens == found.tokens <= len(right) * CHUNK or tokens % CHUNK:
        raise BrokenGuarantee(f"load reports {tokens} tokens, but its cache has {found.tokens}, and the prompt has {len(right)} chunks")
    for chunk in range(tokens // CHUNK):
        got = chunk_bytes(found, chunk)
        if got != right[chunk]:
            raise BrokenGuarantee(f"chunk {chunk} of prompt {number} of identity {who} is wrong: it contains {_describe_owner(got)}")
    return tokens // CHUNK


def check(store: kvpack.Store, who: int, number: int) -> int:
    """Load a prompt and return the number of chunks found. Raises Wrong for wrong contents, and the errors of ``load``."""
    return compare(who, number, *store.load(prompt(number)))


def require(store: kvpack.Store, wanted: Iterable[tuple[int, int]], who: int, why: str) -> None:
    """Raise Wrong unless the prompts in ``wanted`` (identity, prompt) that ``store`` may see are complete."""
    for owner, number in wanted:
        if owner == who and (found := check(store, who, number)) != chunks(number):
            raise BrokenGuarantee(
                f"{why}: {found} of {chunks(number)} chunks of prompt {number} of identity {who} are left: {nonzero_counters(store)}"
            )


def nonzero_counters(store: kvpack.Store) -> dict[str, object]:
    """Return the nonzero counters of a store."""
    return {name: count for name, count in store.counters().items() if count}


def _describe_owner(got: bytes) -> str:
    for who in range(len(IDENTITIES)):
        for number in range(PROMPTS):
            if got in expected_chunks(who, number):
                return f"chunk {expected_chunks(who, number).index(got)} of prompt {number} of identity {who}"
    return "values that no process saved"
