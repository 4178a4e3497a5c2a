"""Lookup of a model's folder by its path, or by its name on the Hugging Face hub."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from kvpack.formats.errors import MissingFile, MissingPackage

_NAME = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)
"""Pattern of a model's name on the hub, such as gpt2 or HuggingFaceTB/SmolLM2-135M-Instruct."""

_SETTINGS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")

_WEIGHTS = ("*.safetensors", "*.bin")
"""Patterns of weight files. The first is preferred if a repository has both."""


def model_folder(model: str | os.PathLike[str], *, weights: bool = True, revision: str | None = None) -> Path:
    """Return the folder of ``model``, which is a path or a name on the hub.

    A name selects ``revision``, or by default the newest revision in huggingface_hub's cache. A model that is not in the cache is
    downloaded, unless HF_HUB_OFFLINE is set. If ``weights`` is False, only the configuration is downloaded. Raises MissingFile, with the
    download command in its message, and MissingPackage if huggingface_hub is not installed.
    """
    folder = Path(model)
    if (folder / "config.json").is_file():
        return folder
    name = os.fspath(model)
    if folder.exists() or not _NAME.fullmatch(name):
        expected = "expected the folder of a transformers model, or a name on the hub, such as HuggingFaceTB/SmolLM2-135M-Instruct"
        raise MissingFile(f"{name} has no config.json, {expected}", filename=name)
    return _find_in_cache(name, weights, revision) or _download(name, weights, revision)


def _find_in_cache(name: str, weights: bool, revision: str | None) -> Path | None:
    """Return the model's folder in huggingface_hub's cache, or None if it is incomplete."""
    config = _import_huggingface_hub(name).try_to_load_from_cache(name, "config.json", revision=revision)
    folder = Path(config).parent if isinstance(config, str) else None
    return folder if folder is not None and _is_complete(folder, weights) else None


def _is_complete(folder: Path, weights: bool) -> bool:
    return (folder / "config.json").is_file() and (not weights or any(map(partial(_has_weights, folder), _WEIGHTS)))


def _has_weights(folder: Path, pattern: str) -> bool:
    """Return True if ``folder`` has all weight files that match ``pattern``, including all files that an index lists."""
    for index in folder.glob(f"{pattern}.index.json"):
        try:
            return all((folder / part).is_file() for part in json.loads(index.read_bytes())["weight_map"].values())
        except (OSError, ValueError, LookupError, AttributeError):
            return False
    return any(True for _ in folder.glob(pattern))


def _download(name: str, weights: bool, revision: str | None) -> Path:
    hub = _import_huggingface_hub(name)
    reason = "it has no config.json, or no weights"
    refusals: tuple[type[Exception], ...] = (OSError, ValueError, *_network_errors(hub))
    try:
        # One attempt with a timeout: downloads retry several times, and each of their requests may wait for minutes.
        hub.HfApi().model_info(name, revision=revision, timeout=hub.constants.HF_HUB_ETAG_TIMEOUT)
        for files in ([*_SETTINGS, kind] for kind in _WEIGHTS) if weights else (["config.json"],):
            folder = Path(hub.snapshot_download(name, allow_patterns=files, revision=revision))
            if _is_complete(folder, weights):
                return folder
    except refusals as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
    command = f"hf download {name}{'' if weights else ' config.json'}{'' if revision is None else f' --revision {revision}'}"
    raise MissingFile(
        f"{name} is not a folder with a config.json, is not complete in huggingface_hub's cache, and cannot be downloaded ({reason}): "
        f"download it with '{command}' on a machine that can reach the hub, or pass the folder of a model",
        filename=name,
    )


def _network_errors(hub: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions by which requests report a missing network. They depend on the HTTP library that huggingface_hub uses."""
    error = hub.errors.HfHubHTTPError
    return tuple(base for base in error.__mro__ if base.__name__ == "HTTPError")


def _import_huggingface_hub(name: str) -> Any:
    try:
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError:
        raise MissingPackage(
            f"{name} is not a folder with a config.json, and names on the hub require huggingface_hub: pip install 'kvpack[transformers]'"
        ) from None
    return huggingface_hub
