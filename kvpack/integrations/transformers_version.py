"""Versions of transformers that kvpack supports."""

from __future__ import annotations

import re
from typing import Any

from kvpack.formats.errors import MissingPackage

MIN_VERSION = (5, 23)
"""Oldest supported version, as in pyproject.toml."""

_INSTALL = "pip install -U 'kvpack[transformers]'"


def installed_transformers() -> Any:
    """Return the ``transformers`` module. Raises MissingPackage if it is not installed, or is older than ``MIN_VERSION``."""
    try:
        import transformers
    except ImportError:
        raise MissingPackage(f"this needs transformers, which is not installed: {_INSTALL}") from None
    numbers = tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2]))
    if numbers < MIN_VERSION:
        oldest = ".".join(map(str, MIN_VERSION))
        raise MissingPackage(f"this needs transformers {oldest} or newer, but {transformers.__version__} is installed: {_INSTALL}")
    return transformers
