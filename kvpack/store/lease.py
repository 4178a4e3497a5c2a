"""A lease of one key, as a backend grants it (leases.py)."""

from __future__ import annotations

from typing import Protocol


class Lease(Protocol):
    """A lease, which a backend grants to one holder at a time."""

    def release(self) -> None:
        """End the lease, if it has not ended by itself. Raises nothing."""


class NoLease:
    """The lease of a location that does not support leases: everybody has it."""

    def release(self) -> None:
        """Do nothing: there is no lease to release."""
