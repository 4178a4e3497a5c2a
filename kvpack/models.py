"""Language models for commands: a transformers folder, a model on the hub, or the demo's own."""

from __future__ import annotations

import contextlib
import os
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvpack import cache_names, hub
from kvpack.formats.errors import InvalidParameter
from kvpack.integrations.transformers_version import installed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BOS = 256
"""The beginning-of-sequence id of the demo's model, whose other ids are bytes."""


def load_model(path: str | os.PathLike[str] | None = None, attention: str = "sdpa", dtype: torch.dtype | str = torch.float32) -> Any:
    """Load the causal language model ``path``, a folder or a name on the hub, or the demo's, with the named transformers attention.

    ``dtype`` "auto" keeps the dtype of its weights. For a model without scaled dot-product attention (Gemma-2, GPT-OSS), "sdpa" selects
    eager attention. Raises MissingFile, InvalidParameter for a model with an encoder or one that transformers does not load as a causal
    model, and MissingPackage without transformers.
    """
    library, refusals = transformers_library(), []
    if attention == "kvpack":
        # Its import tells transformers of this attention.
        import kvpack.integrations.transformers  # noqa: F401
    with model_folder(path) as folder:
        refusal = f"{folder}: transformers does not load this model with the attention {attention!r}"
        try:
            has_encoder = library.AutoConfig.from_pretrained(folder).is_encoder_decoder
        except ValueError as error:
            raise InvalidParameter(f"{refusal}: {error}") from None
        if has_encoder:
            raise InvalidParameter(f"{folder}: the model has an encoder, expected a decoder-only model, as AutoModelForCausalLM loads")
        for kind in (attention, "eager") if attention == "sdpa" else (attention,):
            try:
                return library.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=kind).eval()
            except ValueError as error:
                refusals.append(str(error))
    raise InvalidParameter(f"{refusal}: {refusals[0]}")


@contextlib.contextmanager
def model_folder(path: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """Yield the folder of a transformers model: ``path``, a folder or a name on the hub, or the demo's own. Raises MissingFile."""
    if path is None:
        with as_file(files("kvpack.demo") / "tinylm") as folder:
            yield folder
    else:
        yield hub.model_folder(path)


class ByteTokenizer:
    """A tokenizer for models whose tokens are UTF-8 bytes, after one token that begins every sequence."""

    chat_template = None
    bos_token_id = BOS
    is_fast = True

    def __call__(self, text: str, *, add_special_tokens: bool = True, return_offsets_mapping: bool = False) -> dict[str, Any]:
        """Return the ids of ``text`` as ``input_ids``, and their start and end in it as ``offset_mapping``."""
        data = [(byte, number) for number, char in enumerate(text) for byte in char.encode(errors="replace")]
        first = [BOS] if add_special_tokens else []
        result: dict[str, Any] = {"input_ids": [*first, *(byte for byte, _ in data)]}
        if return_offsets_mapping:
            result["offset_mapping"] = [*((0, 0) for _ in first), *((number, number + 1) for _, number in data)]
        return result

    def decode(self, ids: Sequence[int], **_: object) -> str:
        """Return the text of ``ids``; ids that are not bytes are left out."""
        return bytes(token for token in map(int, ids) if token < BOS).decode(errors="replace")


def load_tokenizer(folder: Path) -> Any | None:
    """Return the tokenizer in the folder of a model; None if it has none."""
    if not any((folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    return transformers_library().AutoTokenizer.from_pretrained(folder)


class LayerShape(NamedTuple):
    """The keys and values of a layer: the number of heads, both head dims, and the sliding window or None."""

    heads: int
    dim_k: int
    dim_v: int
    window: int | None = None


def cache_shapes(path: str | os.PathLike[str]) -> list[LayerShape | None]:
    """Return each layer's keys and values in the caches of the model ``path``, a folder or a name on the hub; None for a layer without any.

    Only the configuration is read: a model without weights computes one token. Raises MissingFile, MissingPackage, and InvalidParameter for
    a configuration from which transformers creates no decoder.
    """
    library = transformers_library()
    folder = hub.model_folder(path, weights=False)
    try:
        config = library.AutoConfig.from_pretrained(folder)
        with torch.device("meta"), torch.inference_mode():
            model = library.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            cache = library.DynamicCache(config=config.get_text_config(decoder=True))
            model(torch.zeros(1, 1, dtype=torch.int64, device="meta"), **cache_names.over(model, cache))
    except (AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidParameter(
            f"{path}: transformers makes no decoder of this configuration ({next(iter(str(error).splitlines()), '')}): give --layers, "
            "--heads and --dim"
        ) from None
    return [_shape(layer) for layer in cache.layers]


def _shape(layer: Any) -> LayerShape | None:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return None
    return LayerShape(keys.shape[1], keys.shape[3], values.shape[3], getattr(layer, "sliding_window", None))


def demo_text() -> bytes:
    """Return the demo's prompt and its continuation."""
    return (files("kvpack.demo") / "demo.txt").read_bytes()


def transformers_library() -> Any:
    """Return the module transformers with progress bars off. Raises MissingPackage if it is not installed or is too old."""
    transformers = installed()
    transformers.utils.logging.disable_progress_bar()
    return transformers
