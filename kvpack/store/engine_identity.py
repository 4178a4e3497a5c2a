"""What names a serving engine's model and pages, from the model's folder: weights are sampled, and nothing is loaded."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpack.formats.errors import InvalidParameter, MissingFile

if TYPE_CHECKING:
    from collections.abc import Mapping

SAMPLES, SAMPLE_BYTES = 64, 4096
"""Samples of a file of weights, evenly spread, and their size; a smaller file is read whole."""
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
    """The fields model, weights, rope, config and extra of an identity. Raises as ``Identity.of_engine``."""
    if not kv_dtype or not layout:
        raise InvalidParameter("kv_dtype and layout name the engine's pages: neither may be empty")
    if ";" in layout:
        # It would read as the end of the layout, and the rest as extra.
        raise InvalidParameter(f"layout is {layout!r:.80}, expected text without a semicolon, such as PageLayout.digest")
    rank, size = tp
    if not (type(rank) is type(size) is int and 0 <= rank < size):
        raise InvalidParameter(f"tp is {tp!r}, expected the rank and the number of ranks, such as (0, 1)")
    folder = Path(model_path).expanduser()
    if not folder.is_dir():
        raise MissingFile(f"{folder}: is not a folder; of_engine takes that of a model, with its config.json")
    try:
        config = (folder / "config.json").read_bytes()
        settings = json.loads(config)
        digest = hashlib.sha256(config)
        for path in sorted(folder.glob("*.py")):
            # The model's own code, which engines run with trust_remote_code.
            digest.update(hashlib.sha256(path.name.encode()).digest() + hashlib.sha256(path.read_bytes()).digest())
        weights = sampled_weights(folder) if revision is None else revision
    except OSError as error:
        raise MissingFile(f"{error.filename or folder}: {error.strerror or error}") from None
    except ValueError as error:
        raise InvalidParameter(f"{folder / 'config.json'}: is not JSON: {error}") from None
    if not weights:
        raise InvalidParameter(f"{folder}: holds no *.safetensors: give revision, which names the weights")
    return {
        "model": folder.resolve().name,
        "weights": weights,
        "rope": _rope_text(settings) if rope is None else rope,
        "config": digest.hexdigest(),
        "extra": f"tp={rank}/{size}; layout={layout}; {extra}".removesuffix("; "),
    }


def sampled_weights(folder: Path) -> str:
    """A digest of the names, sizes, headers and samples of the safetensors files of a folder; empty if there are none. Raises OSError."""
    digest, found = hashlib.sha256(), False
    for path in sorted(folder.glob("*.safetensors")):
        found = True
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = 8 + int.from_bytes(file.read(8), "little")
            parts = [path.name.encode(), size.to_bytes(8, "little"), file.read(max(0, min(begin, size) - 8))]
            step = max(1, (size - SAMPLE_BYTES) // SAMPLES)
            for at in range(0, size, max(step, SAMPLE_BYTES)):
                file.seek(at)
                parts.append(file.read(SAMPLE_BYTES))
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
    return f"sampled {digest.hexdigest()}" if found else ""


def _rope_text(settings: Mapping[str, Any]) -> str:
    text = settings.get("text_config")
    of_text = {**settings, **text} if isinstance(text, dict) else settings
    return json.dumps({name: of_text[name] for name in _ROPE if name in of_text}, sort_keys=True)
