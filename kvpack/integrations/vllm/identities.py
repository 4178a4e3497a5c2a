"""Everything that vLLM's pages depend on but their tokens, which vLLM's key covers with LoRA names and images."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

from kvpack.formats.errors import InvalidParameter
from kvpack.store.identity import Identity

from .layouts import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping


_NO_SETTINGS = {"_name_or_path", "name_or_path", "transformers_version", "architectures", "torch_dtype"}
"""Keys of a model's configuration on which no value of a page depends, or whose effect ``settings_of`` names otherwise."""


def settings_of(vllm_config: Any) -> str:
    """What keys and values depend on as vLLM runs the model: its configuration with all overrides, dtype, quantization."""
    model = vllm_config.model_config
    settings = {name: value for name, value in model.hf_config.to_dict().items() if name not in _NO_SETTINGS}
    # Some rotary embeddings choose their factors by the longest text that is served.
    longest = model.max_model_len if any(kind in str(settings) for kind in ("longrope", "dynamic")) else None
    found = [settings, str(model.dtype), model.quantization, vllm_config.cache_config.cache_dtype, longest]
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()


def identity_of(config: Any, recipe: str, shape: Mapping[str, Any], revision: str | None, adapter: str, tenant: str) -> Identity:
    """The identity of pages whose arrangement ``shape`` tells, of vLLM's OffloadingConfig.

    Raises InvalidParameter where nothing names the weights.
    """
    shape = {
        **shape, "tokens_per_hash": config.cache.tokens_per_hash, "blocks_per_chunk": config.cache.blocks_per_chunk,
        "world_size": config.parallel.world_size, "pp_size": config.parallel.pp_size,
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()
    dtype = DTYPES.get(config.model.dtype, config.model.dtype)
    if os.path.isdir(config.model.name):
        return Identity.of_engine(
            config.model.name, recipe, kv_dtype=dtype, layout=digest, revision=revision, adapter=adapter, tenant=tenant, extra="vllm"
        )
    if revision is None:
        raise InvalidParameter(
            f"the model {config.model.name!r} is no folder, so nothing tells its weights from those of another revision: give revision, "
            "such as the commit on the hub"
        )
    return Identity(
        config.model.name, recipe, weights=revision, adapter=adapter, dtype=dtype, tenant=tenant, extra=f"layout={digest}; vllm"
    )
