"""Loading of language models for commands: from a folder, from the hub, or the demo's own model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvpack import cache_names, hub
from kvpack.formats.errors import InvalidParameter
from kvpack.integrations.transformers_version import installed_transformers

BOS = 256
"""Beginning-of-sequence id of the demo's model, whose other ids are bytes."""


def load_model(path: str | os.PathLike[str] | None = None, attention: str = "sdpa", dtype: torch.dtype | str = torch.float32) -> Any:
    """Load a causal language model with a transformers attention implementation.

    Args:
        path: A folder or a name on the hub, or None for the demo's model.
        attention: Name of the attention. "sdpa" falls back to eager attention for models without it (Gemma-2, GPT-OSS).
        dtype: Dtype of the weights; "auto" keeps the checkpoint's dtype.

    Raises MissingFile, MissingPackage if transformers is not installed, and InvalidParameter if the model has an encoder or if transformers
    cannot load it as a causal model.
    """
    library, reasons = import_transformers(), []
    if attention == "kvpack":
        # Importing this registers the attention with transformers.
        import kvpack.integrations.transformers  # noqa: F401
    with model_folder(path) as folder:
        fault = f"{folder}: transformers cannot load this model with the attention {attention!r}"
        try:
            has_encoder = library.AutoConfig.from_pretrained(folder).is_encoder_decoder
        except ValueError as error:
            raise InvalidParameter(f"{fault}: {error}") from None
        if has_encoder:
            raise InvalidParameter(f"{folder}: the model has an encoder, expected a decoder-only model that AutoModelForCausalLM can load")
        for kind in (attention, "eager") if attention == "sdpa" else (attention,):
            try:
                return library.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=kind).eval()
            except ValueError as error:
                reasons.append(str(error))
    raise InvalidParameter(f"{fault}: {reasons[0]}")


@contextlib.contextmanager
def model_folder(path: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """Yield the folder of a transformers model.

    ``path`` is a folder, a name on the hub, or None for the demo's model.
    """
    if path is None:
        with as_file(files("kvpack.demo") / "tinylm") as folder:
            yield folder
    else:
        yield hub.model_folder(path)


class ByteTokenizer:
    """A tokenizer for models whose tokens are UTF-8 bytes. Each sequence starts with one extra token."""

    chat_template = None
    bos_token_id = BOS
    is_fast = True

    def __call__(self, text: str, *, add_special_tokens: bool = True, return_offsets_mapping: bool = False) -> dict[str, Any]:
        """Return the ids of ``text`` as ``input_ids`` and, if requested, the character range of each id as ``offset_mapping``."""
        data = [(byte, number) for number, char in enumerate(text) for byte in char.encode(errors="replace")]
        first = [BOS] if add_special_tokens else []
        result: dict[str, Any] = {"input_ids": [*first, *(byte for byte, _ in data)]}
        if return_offsets_mapping:
            result["offset_mapping"] = [*((0, 0) for _ in first), *((number, number + 1) for _, number in data)]
        return result

    def decode(self, ids: Sequence[int], **_: object) -> str:
        """Return the text of ``ids``, ignoring ids that are not bytes."""
        return bytes(token for token in map(int, ids) if token < BOS).decode(errors="replace")


def load_tokenizer(folder: Path) -> Any | None:
    """Return the tokenizer in a model's folder, or None if there is none."""
    if not any((folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    return import_transformers().AutoTokenizer.from_pretrained(folder)


class LayerShape(NamedTuple):
    """The shape of a layer's keys and values: number of heads, head dims, and sliding window. ``window`` is None for full attention."""

    heads: int
    dim_k: int
    dim_v: int
    window: int | None = None


def cache_shapes(path: str | os.PathLike[str]) -> list[LayerShape | None]:
    """Return the shape of each layer's cached keys and values, or None for a layer without any.

    ``path`` is a folder or a name on the hub. Only the configuration is read: a model without weights computes one token on the meta
    device. Raises MissingFile, MissingPackage, and InvalidParameter if transformers cannot create a decoder from the configuration.
    """
    library = import_transformers()
    folder = hub.model_folder(path, weights=False)
    try:
        config = library.AutoConfig.from_pretrained(folder)
        with torch.device("meta"), torch.inference_mode():
            model = library.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            cache = library.DynamicCache(config=config.get_text_config(decoder=True))
            model(torch.zeros(1, 1, dtype=torch.int64, device="meta"), **cache_names.cache_argument(model, cache))
    except (AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidParameter(
            f"{path}: transformers cannot create a decoder from the configuration ({next(iter(str(error).splitlines()), '')}): pass "
            "--layers, --heads and --dim instead"
        ) from None
    return [_layer_shape(layer) for layer in cache.layers]


def _layer_shape(layer: Any) -> LayerShape | None:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return None
    return LayerShape(keys.shape[1], keys.shape[3], values.shape[3], getattr(layer, "sliding_window", None))


def demo_text() -> bytes:
    """Return the demo's prompt followed by its continuation."""
    return (files("kvpack.demo") / "demo.txt").read_bytes()


def import_transformers() -> Any:
    """Return the transformers module, with progress bars disabled. Raises MissingPackage if it is missing or too old."""
    transformers = installed_transformers()
    transformers.utils.logging.disable_progress_bar()
    return transformers
