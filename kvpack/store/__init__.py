"""The prefix store: processes that serve one model share packed prefixes, from a folder or a server.

For example::

    store = kvpack.Store("~/.cache/kvpack", kvpack.Identity.of(model, "octopus-3"))
    n, cache = store.load(token_ids)
    store.save(token_ids, cache)
"""

from .identity import Identity
from .locations import Tier
from .store import Store

__all__ = ["Identity", "Store", "Tier"]
