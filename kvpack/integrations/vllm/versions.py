"""Versions of vLLM that kvpack supports."""

from __future__ import annotations

from kvpack.formats.errors import InvalidParameter

from . import VERSIONS


def check_version(version: str, any_version: bool) -> dict[str, str]:
    """Return the part of ``version`` that identities contain, so that incompatible versions share no entries.

    This is the first two numbers. For a version with which kvpack was not tested, it is the whole version. Raises InvalidParameter for such
    a version unless ``any_version`` is set.
    """
    minor = ".".join(version.split(".")[:2])
    if minor in VERSIONS:
        return {"vllm": minor}
    if not any_version:
        raise InvalidParameter(
            f"vLLM is {version}, but kvpack was tested only with {' and '.join(VERSIONS)}, and vLLM's interface is experimental: "
            f'install one of those (pip install "vllm=={VERSIONS[-1]}.*"), or set "any_version": true to try this one'
        )
    return {"vllm": version}
