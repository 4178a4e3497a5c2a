"""The prefix store. Processes that serve the same model share packed prefixes in a folder or on a server.

For example::

    store = kvpack.Store("~/.cache/kvpack", kvpack.Identity.of(model, "octopus-3"))
    n, cache = store.load(token_ids)
    store.save(token_ids, cache)
"""

from .options import Tier
from .store import Store

__all__ = ["Store", "Tier"]
