"""The basis of a store's recipe, stored as an entry before the chunks that need it (spec/store.md, Bases).

A basis is the first entry of every chain. It is evicted after the chunks that need it, and its bytes count toward the budget.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from kvpack.coding.bases import Basis
from kvpack.formats.errors import DigestMismatch, MissingBasis

from .backend import Backend, Data
from .counters import Counters
from .encryption import Cipher, decrypt_entry
from .entry_kind import check_size
from .keys import basis_keys, check_basis
from .loading import FAULTS, reject_entry


def parse_basis_entry(key: bytes, data: Data, digest: bytes, cipher: Cipher | None) -> Basis:
    """Parse the basis in ``data``, the bytes of the entry ``key``. Its SHA-256 must be ``digest``.

    Raises DigestMismatch for a different basis, and the same errors as ``decrypt_entry`` and ``Basis.from_bytes``.
    """
    decrypted = decrypt_entry(key, data, cipher)
    # The recipe names the digest. A matching entry key alone does not prove that this is the basis.
    result = check_basis(key, decrypted, cipher)
    if result != digest:
        raise DigestMismatch(f"entry {key.hex()} is damaged: it contains the basis {result.hex()}, expected {digest.hex()}")
    return Basis.from_bytes(bytes(decrypted), where=f"entry {key.hex()}")


class StoredBasis:
    """The basis that a store's chunks need, identified by its SHA-256, ``digest``.

    ``model`` is the model for which the basis must have been calibrated, and ``digests`` are digests of its weights. ``basis`` is the
    caller's copy, if any. ``keys`` precede the chunks of every chain that needs the basis. Methods do not raise: a fault counts as a miss.
    """

    def __init__(
        self,
        digest: bytes,
        model: Mapping[str, str],
        backend: Backend,
        cipher: Cipher | None,
        counters: Counters,
        max_entry_bytes: int,
        basis: Basis | None = None,
        digests: Sequence[str] = (),
    ) -> None:
        if basis is not None:
            basis.check_model(model, digests)
        self.keys: Sequence[bytes] = basis_keys(digest, cipher)
        self._digest, self._model, self._digests, self._backend, self._cipher = digest, model, digests, backend, cipher
        self._counters, self._max_entry_bytes = counters, max_entry_bytes
        self._basis = basis
        self._whole: set[int] = set()

    def is_available(self) -> bool:
        """Return True if the basis is in memory, or if its entry in the store begins with valid bytes."""
        return self._basis is not None or any(self._backend.count_present([key]) for key in self.keys)

    def get(self) -> Basis | None:
        """Return the basis, or None if it was neither passed nor stored. It is read from the store at most once."""
        if self._basis is None:
            self._basis = next((result for key in self.keys if (result := self._read_stored(key)) is not None), None)
        return self._basis

    def record_missing(self, operation: str) -> None:
        """Count a failure of ``operation`` because the basis is missing."""
        self._counters.fault(
            operation,
            MissingBasis(
                f"the basis {self._digest.hex()} is needed, but the store does not have it: create the identity with Recipe(text, basis)"
            ),
        )

    def put(self, now_ns: int) -> bool:
        """Store the basis in every tier where it is missing or damaged. Returns True if any tier has the basis now."""
        basis = self.get()
        if basis is None:
            self.record_missing("save")
            return False
        # In every tier at once: a chunk must not reach a tier before its basis.
        return True in [self._put_in(tier, backend, basis, now_ns) for tier, backend in enumerate(self._backend.parts)]

    def _put_in(self, tier: int, backend: Backend, basis: Basis, now_ns: int) -> bool:
        key = self.keys[0]
        if backend.count_present([key]) and (tier in self._whole or self._check_or_remove(key, backend)):
            self._whole.add(tier)
            return True
        # A damaged entry has been removed by now. An entry that is still present may be readable to other stores, so it stays.
        if backend.count_present([key]):
            return False
        try:
            pieces = [basis.data] if self._cipher is None else self._cipher.encrypt(key, [basis.data])
            check_size(f"the basis {self._digest.hex()}", sum(map(len, pieces)), self._max_entry_bytes)
        except FAULTS as error:
            self._counters.fault("encode", error)
            return False
        if not backend.put([key], pieces, now_ns):
            return False
        self._whole.add(tier)
        return True

    def _check_or_remove(self, key: bytes, backend: Backend) -> bool:
        """Return True if the entry in one tier is the basis, byte for byte. A damaged entry is removed."""
        for basis in backend.find([key]):
            try:
                check_basis(key, decrypt_entry(key, basis.data, self._cipher), self._cipher)
            except FAULTS as error:
                reject_entry(backend, self._counters, key, basis, error)
                return False
            return True
        return False

    def _read_stored(self, key: bytes) -> Basis | None:
        after_tier = -1
        while entries := self._backend.find([key], after_tier=after_tier):
            try:
                basis = parse_basis_entry(key, entries[0].data, self._digest, self._cipher)
                basis.check_model(self._model, self._digests)
            except FAULTS as error:
                reject_entry(self._backend, self._counters, key, entries[0], error)
                after_tier = entries[0].tier
                continue
            self._backend.accept([key], entries[:1], time.time_ns())
            return basis
        return None
