"""Perform all operations of a store's users, at random or once each, and check the guarantees after a fault."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from support.store_matrix.kinds import Place
from support.store_matrix.oracle import (
    CHUNK,
    IDENTITIES,
    PROMPTS,
    BrokenGuarantee,
    check,
    chunks,
    compare,
    nonzero_counters,
    packed_prompt,
    prompt,
    require,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    import kvpack

ALL_PROMPTS = tuple(range(PROMPTS))
PINNED_PROMPTS = ((0, 0), (1, 5), (2, 0))
"""Prompts (identity, prompt) that are saved and pinned before the fault, which no fault may remove. They have at most 8 chunks."""


def save_and_pin(place: Place) -> None:
    """Save ``PINNED_PROMPTS`` and pin it."""
    for who, number in PINNED_PROMPTS:
        with place.open(who) as store:
            for _ in range(20):
                # Others may evict chunks between save and pin.
                store.save(prompt(number), packed_prompt(who, number))
                if store.pin(prompt(number)) == chunks(number) * CHUNK and check(store, who, number) == chunks(number):
                    break
            else:
                raise BrokenGuarantee(f"prompt {number} could not be saved and pinned: {nonzero_counters(store)}")


def perform_random_operation(place: Place, stores: list[kvpack.Store], choice: random.Random, loaded: list[Any]) -> tuple[int, int]:
    """Perform one random operation on the store of one identity. Return the numbers of chunks found and compared.

    ``loaded`` contains caches whose entries may be evicted meanwhile.
    """
    who, number, what = choice.randrange(len(stores)), choice.randrange(PROMPTS), choice.random()
    store, ids = stores[who], prompt(number)
    if what < 0.45:
        return check(store, who, number), chunks(number)
    if what < 0.85:
        saved = store.save(ids, packed_prompt(who, number))
        if not 0 <= saved <= len(ids) or saved % CHUNK:
            raise BrokenGuarantee(f"save reports {saved} of {len(ids)} tokens")
    elif what < 0.88:
        store.match(ids)
    elif what < 0.91:
        # Do not delete the first chunks, which the kept prompts share.
        store.delete(ids, start=2 * CHUNK) if (who, number) not in PINNED_PROMPTS else None
    elif what < 0.95:
        loaded.append((who, number, *store.load(ids)))
        if len(loaded) > 4:
            compare(*loaded.pop(0))
    elif what < 0.97:
        if all(number != kept for _, kept in PINNED_PROMPTS):
            store.pin(ids[:CHUNK])
            store.unpin(ids[:CHUNK])
    elif what < 0.98:
        store.collect()
    elif what < 0.99:
        store.stats()
    else:
        stores[who].close()
        stores[who] = place.open(who)
    return 0, 0


def perform_each_operation(place: Place) -> int:
    """Perform every operation once, with two identities, and return the number of chunks found.

    Raises Wrong, and any exception of a store, which must not occur.
    """
    found = 0
    for who in (0, 2):
        with place.open(who) as store:
            for number in (1, 4):
                ids = prompt(number)
                if not 0 <= store.save(ids, packed_prompt(who, number)) <= len(ids):
                    raise BrokenGuarantee("save reports more tokens than the prompt has")
                found += check(store, who, number)
            if store.pin(prompt(1)) > len(prompt(1)):
                raise BrokenGuarantee("pin reports more tokens than the prompt has")
            store.match(prompt(1))
            store.unpin(prompt(1))
            store.delete(prompt(4), start=CHUNK)
            store.collect()
            store.stats()
            check(store, who, 0)
    return found


def check_intact(
    place: Place, kept: Sequence[tuple[int, int]] = PINNED_PROMPTS, *, damage_allowed: bool = False, read: Sequence[int] = ALL_PROMPTS
) -> int:
    """Check that a store is intact after the fault, and return how many chunks of ``read`` are still found.

    Raises Wrong if the store is not intact.

    With ``damage_allowed``, damaged entries and faults are permitted, as long as they only cause misses.
    """
    stores = [place.open(who) for who in range(len(IDENTITIES))]
    try:
        stores[0].collect()
        if left := place.unfinished_files():
            raise BrokenGuarantee(f"unfinished files remain after the fault: {left}")
        if place.budget is not None and (size := place.max_stored_bytes()) > place.budget:
            raise BrokenGuarantee(f"{size} bytes are stored, but the budget is {place.budget}")
        if foreign := place.foreign_paths():
            raise BrokenGuarantee(f"these files belong to other users or are accessible to them: {foreign}")
        found = 0
        for who, store in enumerate(stores):
            require(store, kept, who, "entries that were saved and pinned before the fault are missing")
            found += sum(check(store, who, number) for number in read)
        for store in stores:
            counts = store.counters()
            if not damage_allowed and (counts["damaged_entries"] or counts["faults"]):
                raise BrokenGuarantee(f"after the fault: {counts['damaged_entries']} damaged entries, faults {counts['faults']}")
    finally:
        for store in stores:
            store.close()
    # Use one store after another, because one's background writes may evict entries that another relies on.
    for who, number in ((0, 6), (3, 9)):
        with place.open(who) as store:
            check_usable(store, who, number)
    return found


def check_usable(store: kvpack.Store, who: int, number: int) -> None:
    """Raise Wrong unless a prompt can be saved and found."""
    whole = chunks(number)
    if (saved := store.save(prompt(number), packed_prompt(who, number))) != whole * CHUNK:
        raise BrokenGuarantee(f"save no longer works: {saved} tokens of {whole} chunks: {nonzero_counters(store)}")
    if (found := check(store, who, number)) != whole:
        raise BrokenGuarantee(
            f"save reported that all chunks are stored, but only {found} of {whole} are found: {nonzero_counters(store)}"
        )
