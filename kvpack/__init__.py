"""kvpack: compressed KV caches as files, attended without unpacking.

cache = kvpack.pack(past_key_values, "octopus-3")
kvpack.save(cache, "prompt.kvpack")
cache = kvpack.load("prompt.kvpack")
out = kvpack.attend(q, cache[layer])
k, v = cache[layer].unpack()
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import attend
    from .bench.evaluate import Evaluation, evaluate
    from .cache.cache import Cache, concat
    from .cache.files import load, save
    from .cache.layer import Layer
    from .cache.minifloats import Minifloats
    from .cache.packing import pack
    from .cache.side import Side
    from .coding.bases import Basis
    from .coding.dispatch import backends
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
        RoundedWarning,
        Truncated,
        Undecryptable,
        UnknownCodec,
        UnsupportedVersion,
        WriteFailed,
    )
    from .file.inputs import Inputs
    from .integrations.transformers.prefill import prefill
    from .live.cache import LiveCache
    from .pages.buffer import PageBuffer
    from .pages.codec import PageCodec
    from .pages.geometry import PageGeometry
    from .pages.layout import PageLayout
    from .store import Identity, Store, Tier
    from .store.page_store import PageStore

__version__ = "0.1.0"

_HOMES = {
    "attend": "attention",
    "Evaluation": "bench.evaluate",
    "evaluate": "bench.evaluate",
    "backends": "coding.dispatch",
    "Basis": "coding.bases",
    "Cache": "cache.cache",
    "Layer": "cache.layer",
    "LiveCache": "live.cache",
    "Minifloats": "cache.minifloats",
    "PageBuffer": "pages.buffer",
    "PageCodec": "pages.codec",
    "PageGeometry": "pages.geometry",
    "PageLayout": "pages.layout",
    "Side": "cache.side",
    "concat": "cache.cache",
    "Inputs": "file.inputs",
    "load": "cache.files",
    "save": "cache.files",
    "pack": "cache.packing",
    "prefill": "integrations.transformers.prefill",
    "PRESETS": "coding.recipes",
    "Recipe": "coding.recipes",
    "Identity": "store",
    "PageStore": "store.page_store",
    "Store": "store",
    "Tier": "store",
}
"""The modules of the public names but the errors, which are all in ``errors``."""

__all__ = [
    "PRESETS",
    "Basis",
    "Cache",
    "DigestMismatch",
    "Evaluation",
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
    "Minifloats",
    "MissingBasis",
    "MissingFile",
    "MissingPackage",
    "NotKvpack",
    "OutOfBounds",
    "PageBuffer",
    "PageCodec",
    "PageGeometry",
    "PageLayout",
    "PageStore",
    "Recipe",
    "RoundedWarning",
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
    "load",
    "pack",
    "prefill",
    "save",
]


# Type checkers see the imports above; a module's __getattr__ would hide misspelt names from them.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import public names on first use: most need torch, and errors need the codecs."""
        if name not in __all__ and name != "errors":
            raise AttributeError(f"module 'kvpack' has no attribute {name!r}")
        from importlib import import_module

        home = import_module(f".{_HOMES.get(name, 'errors')}", __name__)
        value = home if name == "errors" else getattr(home, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The names of the module, with the public ones that are not imported yet."""
    return sorted({*globals(), *__all__, "errors"})
