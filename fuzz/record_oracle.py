"""Checks of the records next to a store's entries (pins and usage records), which others may have written. They do not need torch.

The first byte of an input selects the kind: a pin, or a usage record whose name ends with a line feed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuzz.byte_mutator import mutate_bytes
from kvpack.formats.errors import InvalidHeader
from kvpack.store.backend import PinTerms
from kvpack.store.keys import KEY_BYTES
from kvpack.store.last_used import eviction_order, merge_records, parse_last_uses
from kvpack.store.pins import encode_pin, is_active, parse_pin

if TYPE_CHECKING:
    import random

    from kvpack.store.backend import Pin

_PIN, _USES = b"h", b"u"
_PUT_NS, _NOW_NS = 10**18, 2 * 10**18
_KEYS = [bytes([number]) * KEY_BYTES for number in range(1, 5)]
_NAME = f"{10**17:020d}-{'0f' * 8}"
SEEDS = (
    _PIN + encode_pin(_KEYS, PinTerms("host:1", 2**40)),
    _PIN + encode_pin(_KEYS[:1], PinTerms("", 0)),
    *(_USES + name.encode() + b"\n" + b"".join(_KEYS) for name in (_NAME, f"{_NAME}-ttl60", f"{_NAME}-ttl60-merged", "other")),
)


def mutate_record(data: bytes, source: random.Random, max_bytes: int) -> bytes:
    """Return a mutated input, usually of the same kind."""
    return mutate_bytes(data, source, max_bytes) if source.random() < 0.1 else data[:1] + mutate_bytes(data[1:], source, max_bytes - 1)


def check_record(data: bytes) -> bool:
    """Return True if an input is accepted. Raises AssertionError if a property does not hold."""
    kind, record = data[:1], data[1:]
    if kind == _USES:
        return _check_uses(record)
    if kind != _PIN:
        return False
    try:
        pin = parse_pin("fuzz", record)
    except InvalidHeader:
        return False
    _check_pin(pin)
    return True


def _check_pin(pin: Pin) -> None:
    assert pin.chain
    assert all(len(key) == KEY_BYTES for key in pin.chain)
    assert pin.key == pin.chain[-1]
    assert type(is_active(pin)) is bool
    # An owner that is not valid text is escaped, which may make it too long.
    if len(pin.owner.encode()) < 2**16:
        assert parse_pin("fuzz", encode_pin(pin.chain, PinTerms(pin.owner, pin.until))) == pin


def _check_uses(data: bytes) -> bool:
    name, _, record = data.partition(b"\n")
    text = name.decode("latin-1")
    last = parse_last_uses([(_PUT_NS, "", b"".join(_KEYS[:2])), (_PUT_NS + 1, text, record)])
    keys = {record[at : at + KEY_BYTES] for at in range(0, len(record) - KEY_BYTES + 1, KEY_BYTES)} | {*_KEYS[:2]}
    assert {*last} == keys
    assert all(0 <= use.used_ns <= _PUT_NS + 1 for use in last.values())
    again = parse_last_uses([(_NOW_NS, name, body) for name, body in merge_records(last, _NOW_NS).items()])
    assert {key: use.ttl for key, use in again.items()} == {key: use.ttl for key, use in last.items()}
    entries = [(key, _PUT_NS) for key in (*_KEYS, *last)]
    order = eviction_order(dict(entries).items(), last, _NOW_NS)
    assert len(order) == len({*order})
    assert {*order} == {key for key, _ in entries}
    return len(keys) > 2
