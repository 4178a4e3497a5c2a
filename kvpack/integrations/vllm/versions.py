"""Which vLLM kvpack runs in."""

from __future__ import annotations

from kvpack.formats.errors import InvalidParameter

from . import VERSIONS


def check_version(version: str, any_version: bool) -> dict[str, str]:
    """What an identity of pages names of ``version``: nothing of those with which kvpack was run, since their pages are the same.

    Raises InvalidParameter for another, unless ``any_version`` is set.
    """
    if ".".join(version.split(".")[:2]) in VERSIONS:
        return {}
    if not any_version:
        raise InvalidParameter(
            f"vLLM is {version}, and kvpack's tier was run with {', '.join(VERSIONS)}: its interface is experimental. "
            'Write "any_version": true to try it'
        )
    return {"vllm": version}
