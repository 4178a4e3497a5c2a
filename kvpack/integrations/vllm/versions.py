"""Which vLLM kvpack runs in."""

from __future__ import annotations

from kvpack.formats.errors import InvalidParameter

from . import VERSIONS


def check_version(version: str, any_version: bool) -> None:
    """Raise InvalidParameter for a version of vLLM with which kvpack was not run."""
    if not any_version and not version.startswith(VERSIONS):
        raise InvalidParameter(
            f"vLLM is {version}, and kvpack's tier was run with {', '.join(VERSIONS)}: its interface is experimental. "
            'Write "any_version": true to try it'
        )
