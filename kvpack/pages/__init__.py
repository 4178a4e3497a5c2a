"""Pages of serving engines: their geometry, their layout in an engine's memory, and the codec that converts them to rows and back.

``PageGeometry`` describes the shape of a page, ``PageBuffer`` an engine's memory of pages, and ``PageLayout`` the arrangement of keys and
values in it. ``PageCodec`` encodes pages to rows (packed pages of one size). ``Minifloats`` describes an engine's 8-bit or 4-bit values.
``kvpack.PageStore`` stores rows by the engine's own keys.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpack.cache.minifloats import Minifloats

    from .buffer import PageBuffer
    from .codec import PageCodec
    from .geometry import PageGeometry
    from .layout import PageLayout

_HOMES = {
    "Minifloats": "kvpack.cache.minifloats",
    "PageBuffer": "kvpack.pages.buffer",
    "PageCodec": "kvpack.pages.codec",
    "PageGeometry": "kvpack.pages.geometry",
    "PageLayout": "kvpack.pages.layout",
}
"""The module that defines each public name."""

__all__ = ["Minifloats", "PageBuffer", "PageCodec", "PageGeometry", "PageLayout"]

# Type checkers see the imports above. A module's __getattr__ would hide misspelled names from them.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a public name on first use, because importing it needs torch."""
        if name not in __all__:
            raise AttributeError(f"module 'kvpack.pages' has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Return the module's names, including public names that have not been imported yet."""
    return sorted({*globals(), *__all__})
