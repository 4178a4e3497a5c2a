"""kvpack: compressed KV caches as files, attended without unpacking.

cache = kvpack.pack(past_key_values, "octopus-3")
kvpack.save(cache, "prompt.kvpack")
cache = kvpack.load("prompt.kvpack")
out = kvpack.attend(q, cache[layer])
k, v = cache[layer].unpack()
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors as errors
    from . import formats as formats
    from . import pages as pages
    from .attention import attend
    from .bench.evaluate import evaluate
    from .cache.cache import Cache, concat
    from .cache.files import load, save
    from .cache.layer import Layer
    from .cache.packing import pack
    from .cache.side import Side
    from .coding.bases import Basis
    from .coding.dispatch import backends
    from .coding.inspection import inspect, verify
    from .coding.recipes import PRESETS, Recipe
    from .errors import (
        DigestMismatch,
        InvalidHeader,
        InvalidParameter,
        InvalidPayload,
        InvalidType,
        KvpackError,
        KvpackWarning,
        LimitExceeded,
        MissingBasis,
        MissingFile,
        MissingPackage,
        NotKvpack,
        OutOfBounds,
        Truncated,
        Undecryptable,
        UnknownCodec,
        UnsupportedVersion,
        WriteFailed,
    )
    from .file.inputs import Inputs
    from .identity.identity import Identity
    from .integrations.transformers.prefill import prefill
    from .live.cache import LiveCache
    from .store import Store, Tier
    from .store.page_store import PageStore

__version__ = "0.1.0"

_HOMES = {
    "attend": "attention",
    "evaluate": "bench.evaluate",
    "backends": "coding.dispatch",
    "Basis": "coding.bases",
    "Cache": "cache.cache",
    "Layer": "cache.layer",
    "LiveCache": "live.cache",
    "Side": "cache.side",
    "concat": "cache.cache",
    "Inputs": "file.inputs",
    "load": "cache.files",
    "save": "cache.files",
    "pack": "cache.packing",
    "inspect": "coding.inspection",
    "verify": "coding.inspection",
    "prefill": "integrations.transformers.prefill",
    "PRESETS": "coding.recipes",
    "Recipe": "coding.recipes",
    "Identity": "identity.identity",
    "PageStore": "store.page_store",
    "Store": "store",
    "Tier": "store",
}
"""Module of each public name, except errors, which are all in ``errors``."""

_MODULES = ("errors", "formats", "pages")

__all__ = [
    "PRESETS",
    "Basis",
    "Cache",
    "DigestMismatch",
    "Identity",
    "Inputs",
    "InvalidHeader",
    "InvalidParameter",
    "InvalidPayload",
    "InvalidType",
    "KvpackError",
    "KvpackWarning",
    "Layer",
    "LimitExceeded",
    "LiveCache",
    "MissingBasis",
    "MissingFile",
    "MissingPackage",
    "NotKvpack",
    "OutOfBounds",
    "PageStore",
    "Recipe",
    "Side",
    "Store",
    "Tier",
    "Truncated",
    "Undecryptable",
    "UnknownCodec",
    "UnsupportedVersion",
    "WriteFailed",
    "attend",
    "backends",
    "concat",
    "evaluate",
    "inspect",
    "load",
    "pack",
    "prefill",
    "save",
    "verify",
]


# Type checkers use the imports above; with a __getattr__ they would accept misspelled names.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import public names on first use, because most of them need torch."""
        if name not in __all__ and name not in _MODULES:
            raise AttributeError(f"module 'kvpack' has no attribute {name!r}")
        from importlib import import_module

        home = import_module(f".{name if name in _MODULES else _HOMES.get(name, 'errors')}", __name__)
        value = home if name in _MODULES else getattr(home, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Return the module's names, including public ones that are not imported yet."""
    return sorted({*globals(), *__all__, *_MODULES})
