"""Determines the identity of a serving engine's pages from the model's folder, without loading the model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpack.file.user_files import path_text
from kvpack.formats.errors import InvalidParameter, KvpackError, MissingFile
from kvpack.hub import model_folder

from .checkpoints import checkpoint_digest
from .fingerprint import model_name

_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings")


def engine_fields(
    model_path: str | os.PathLike[str],
    revision: str | None,
    rope: str | None,
    *,
    kv_dtype: str,
    layout: str,
    tp: tuple[int, int],
    extra: str,
) -> dict[str, str]:
    """Return the fields model, weights, rope, config and extra of an engine's identity. Raises the errors of ``Identity.of_engine``."""
    if not kv_dtype or not layout:
        raise InvalidParameter("kv_dtype or layout is empty: pass the dtype of the engine's cache, and PageLayout.digest")
    if ";" in layout:
        # A semicolon would end the layout, and the rest would be read as extra.
        raise InvalidParameter(f"layout is {layout!r:.80}, expected text without a semicolon, such as PageLayout.digest")
    rank, size = tp
    if not (type(rank) is type(size) is int and 0 <= rank < size):
        raise InvalidParameter(f"tp is {tp!r:.80}, expected the rank and the number of ranks, such as (0, 1)")
    folder = Path(path_text(model_path)).expanduser()
    if not folder.is_dir():
        # A revision identifies the weights, so their files need not be read.
        folder = model_folder(folder, weights=revision is None, revision=revision)
    try:
        config = (folder / "config.json").read_bytes()
        settings = json.loads(config)
        digest = hashlib.sha256(config)
        for path in sorted(folder.glob("*.py")):
            # The model's own code, which engines run with trust_remote_code.
            digest.update(hashlib.sha256(path.name.encode()).digest() + hashlib.sha256(path.read_bytes()).digest())
        weights = checkpoint_digest(folder) if revision is None else revision
    except KvpackError:
        raise
    except OSError as error:
        raise MissingFile(f"{error.filename or folder}: {error.strerror or error}") from None
    except ValueError as error:
        raise InvalidParameter(f"{folder / 'config.json'} is not valid JSON: {error}") from None
    if not weights:
        raise InvalidParameter(f"{folder} contains no *.safetensors files: pass revision= to identify the weights")
    return {
        "model": model_name(str(folder.resolve())),
        "weights": weights,
        "rope": _rope_text(settings) if rope is None else rope,
        "config": digest.hexdigest(),
        "extra": f"tp={rank}/{size}; layout={layout}; {extra}".removesuffix("; "),
    }


def _rope_text(settings: Mapping[str, Any]) -> str:
    text = settings.get("text_config")
    text_settings = {**settings, **text} if isinstance(text, dict) else settings
    return json.dumps({name: text_settings[name] for name in _ROPE if name in text_settings}, sort_keys=True)
