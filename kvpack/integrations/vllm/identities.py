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


SETTINGS = "kvpack_settings"
"""Where kvpack's connectors put ``settings_of`` in the configuration of the spec."""


def settings_of(vllm_config: Any) -> str:
    """What keys, values and states depend on as vLLM runs the model: its configuration with all overrides, dtype, quantization, weights
    that are not those of its folder (the load format dummy), and the draft model, whose layers may be among the cache's.
    """
    model, cache, draft = vllm_config.model_config, vllm_config.cache_config, vllm_config.speculative_config
    settings = {name: value for name, value in model.hf_config.to_dict().items() if name not in _NO_SETTINGS}
    # Some rotary embeddings choose their factors by the longest text that is served.
    longest = model.max_model_len if any(kind in str(settings) for kind in ("longrope", "dynamic")) else None
    found = [
        settings, str(model.dtype), model.quantization, longest, str(vllm_config.load_config.load_format),
        cache.cache_dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype,
        model.multimodal_config and model.multimodal_config.mm_processor_kwargs,
        draft and [draft.method, draft.model, draft.revision, draft.quantization, draft.kv_cache_dtype],
    ]  # fmt: skip
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
