"""Check the reading of records that a store keeps next to its entries and others may have written: pins and usage records. Does not need
torch.

The first byte of an input names its kind: a pin with an owner and an end, a pin of an earlier version, or a record of uses, whose name ends
with a line feed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuzz.byte_mutator import mutated_bytes
from kvpack.formats.errors import InvalidHeader
from kvpack.store.backend import Hold
from kvpack.store.holds import endless_pin, hold_bytes, in_effect, read_hold
from kvpack.store.keys import KEY_BYTES
from kvpack.store.last_used import eviction_order, merged, order_of

if TYPE_CHECKING:
    import random

    from kvpack.store.backend import Pin

_PIN, _OLD_PIN, _USES = b"h", b"e", b"u"
_PUT_NS, _NOW_NS = 10**18, 2 * 10**18
_KEYS = [bytes([number]) * KEY_BYTES for number in range(1, 5)]
_NAME = f"{10**17:020d}-{'0f' * 8}"
SEEDS = (
    _PIN + hold_bytes(_KEYS, Hold("host:1", 2**40)),
    _PIN + hold_bytes(_KEYS[:1], Hold("", 0)),
    _OLD_PIN + b"".join(_KEYS),
    *(_USES + name.encode() + b"\n" + b"".join(_KEYS) for name in (_NAME, f"{_NAME}-ttl60", f"{_NAME}-ttl60-merged", "other")),
)


def mutated_record(data: bytes, source: random.Random, most: int) -> bytes:
    """Return a mutated input, mostly of the same kind."""
    return mutated_bytes(data, source, most) if source.random() < 0.1 else data[:1] + mutated_bytes(data[1:], source, most - 1)


def check_record(data: bytes) -> bool:
    """Return True if an input is accepted. Raises AssertionError when a property does not hold."""
    kind, rest = data[:1], data[1:]
    if kind == _USES:
        return _check_uses(rest)
    if kind not in (_PIN, _OLD_PIN):
        return False
    try:
        pin = read_hold("fuzz", rest) if kind == _PIN else endless_pin(rest)
    except InvalidHeader:
        return False
    if pin is not None:
        _check_pin(pin)
    return pin is not None


def _check_pin(pin: Pin) -> None:
    assert pin.chain
    assert all(len(key) == KEY_BYTES for key in pin.chain)
    assert pin.key == pin.chain[-1]
    assert type(in_effect(pin)) is bool
    # An owner whose bytes are not text has other text, which is longer.
    if pin.until is not None and len(pin.owner.encode()) < 2**16:
        assert read_hold("fuzz", hold_bytes(pin.chain, Hold(pin.owner, pin.until))) == pin


def _check_uses(data: bytes) -> bool:
    name, _, record = data.partition(b"\n")
    text = name.decode("latin-1")
    last = order_of([(_PUT_NS, "", b"".join(_KEYS[:2])), (_PUT_NS + 1, text, record)])
    keys = {record[at : at + KEY_BYTES] for at in range(0, len(record) - KEY_BYTES + 1, KEY_BYTES)} | {*_KEYS[:2]}
    assert {*last} == keys
    assert all(0 <= use.used_ns <= _PUT_NS + 1 for use in last.values())
    again = order_of([(_NOW_NS, name, body) for name, body in merged(last, _NOW_NS).items()])
    assert {key: use.ttl for key, use in again.items()} == {key: use.ttl for key, use in last.items()}
    entries = [(key, _PUT_NS) for key in (*_KEYS, *last)]
    order = eviction_order(dict(entries).items(), last, _NOW_NS)
    assert len(order) == len({*order})
    assert {*order} == {key for key, _ in entries}
    return len(keys) > 2
