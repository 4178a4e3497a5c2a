"""Look up stored prompts as users who must not find them: other tenants, adapters, configurations and inputs.

    python -m support.store_lookups --count 1000000

Every prompt is stored by one owner. A lookup by anyone else must find nothing, and the owner must find the owner's values.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch

import kvpack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CHUNK, LAYERS = 16, 1
TENANTS = ("", "a", "b", "ab", "a/b", "tenant")
ADAPTERS = ("", "default sha256:00", "default sha256:01", "a sha256:00", "customer sha256:00", "disabled")
CONFIGS = ("sha256:00", "sha256:01", "sha256:10")
EXTRAS = ("", "a hook")
INPUTS = (b"", b"image", b"another")
"""Digests of inputs with which prompts are looked up."""

IDENTITIES = [
    kvpack.Identity("model", "bf16", weights="revision", tenant=tenant, adapter=adapter, config=config, extra=extra)
    for tenant, adapter, config, extra in itertools.product(TENANTS, ADAPTERS, CONFIGS, EXTRAS)
]


def prompt(number: int) -> list[int]:
    """Return the token ids of a prompt of one to three chunks. Half of all prompts share their first chunk."""
    own = random.Random(number)
    ids = [own.randrange(1000) for _ in range(CHUNK * own.randint(1, 3))]
    return [*range(CHUNK), *ids[CHUNK:]] if number % 2 else ids


def packed_prompt(owner: tuple[int, bytes], number: int) -> kvpack.Cache:
    """Return a cache whose values identify its owner and its prompt."""
    identity, inputs = owner
    tokens = len(prompt(number))
    x = torch.full((1, 1, tokens, 16), identity % 128, dtype=torch.bfloat16)
    x[..., 0], x[..., 1], x[..., 2] = number % 128, INPUTS.index(inputs), identity // 128
    return kvpack.pack([(x, -x)] * LAYERS, "bf16")


def run_lookups(
    opened: Callable[[kvpack.Identity], kvpack.Store],
    count: int,
    prompts: int = 500,
    *,
    seed: int = 0,
    identities: Sequence[kvpack.Identity] = IDENTITIES,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> dict[str, Any]:
    """Make ``count`` lookups by users other than the owners, and one by each owner, and return their counts.

    ``opened`` returns the store of each of ``identities``.
    """
    choice = random.Random(seed)
    stores = [opened(identity) for identity in identities]
    texts = [prompt(number) for number in range(prompts)]
    owners = [(choice.randrange(len(stores)), choice.choice(INPUTS)) for _ in texts]
    # The owner of a prompt has the first chunk of all prompts that begin the same.
    stored_first = {(owner, tuple(text[:CHUNK])) for owner, text in zip(owners, texts, strict=True)}
    for number, (text, (identity, inputs)) in enumerate(zip(texts, owners, strict=True)):
        assert stores[identity].save(text, packed_prompt((identity, inputs), number), inputs=_digests(text, inputs)) == len(text)
    started = time.monotonic()
    hits = wrong = 0
    looked_up = 0
    while looked_up < count:
        number = choice.randrange(prompts)
        asking = (choice.randrange(len(stores)), choice.choice(INPUTS))
        text = texts[number]
        if (asking, tuple(text[:CHUNK])) in stored_first:
            continue
        found, cache = stores[asking[0]].load(text, inputs=_digests(text, asking[1]))
        hits += found > 0 or cache is not None
        looked_up += 1
        if looked_up % 1000 == 0:
            progress(looked_up, count)
    seconds = time.monotonic() - started
    for number, (text, (identity, inputs)) in enumerate(zip(texts, owners, strict=True)):
        found, cache = stores[identity].load(text, inputs=_digests(text, inputs))
        expected = packed_prompt((identity, inputs), number)[0].unpack(torch.bfloat16)[0]
        if cache is None or found != len(text):
            wrong += 1
            continue
        k = cache[0].unpack(torch.bfloat16)[0]
        # The first chunk may come from another prompt of the same owner.
        wrong += not torch.equal(k[:, :, CHUNK:], expected[:, :, CHUNK:]) or not torch.equal(k[..., 1:], expected[..., 1:])
    refused = sum(store.counters()["damaged_entries"] for store in stores)
    for store in stores:
        store.close()
    return {
        "identities": len(stores),
        "prompts": prompts,
        "lookups": looked_up,
        "hits": hits,
        "refused": refused,
        "owners_that_found_something_else": wrong,
        "seconds": round(seconds, 1),
    }


def folder_opener(folder: str) -> Callable[[kvpack.Identity], kvpack.Store]:
    """Return a function that opens the store of an identity in ``folder``."""
    return lambda identity: kvpack.Store(folder, identity, chunk=CHUNK)


def _digests(text: list[int], inputs: bytes) -> list[bytes]:
    return [inputs] + [b""] * (len(text) // CHUNK - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        report = run_lookups(folder_opener(folder), arguments.count, seed=arguments.seed)
    print(json.dumps(report, indent=2))
    sys.exit(1 if report["hits"] or report["refused"] or report["owners_that_found_something_else"] else 0)


if __name__ == "__main__":
    main()
