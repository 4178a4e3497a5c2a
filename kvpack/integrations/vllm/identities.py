"""The identity of vLLM's pages: everything on which they depend, except tokens, LoRA names and images, which vLLM's keys cover."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from kvpack.coding.recipes import Recipe
from kvpack.formats.errors import InvalidParameter
from kvpack.identity.identity import Identity

from . import VERSIONS
from .layouts import DTYPES

_IGNORED_SETTINGS = {"_name_or_path", "name_or_path", "transformers_version", "architectures", "torch_dtype"}
"""Keys of a model's configuration that do not affect pages, or that ``relevant_settings`` covers in another way."""
SETTINGS = "kvpack_settings"
"""Key under which kvpack's connectors store the result of ``relevant_settings`` in the spec's configuration."""
_MODEL = ("dtype", "quantization", "quantization_config", "model_impl", "model_class_overrides")
_CACHE = (
    "cache_dtype", "kv_cache_dtype_skip_layers", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode", "use_replayssm",
    "replayssm_buffer_len", "use_kda_recoverssm", "swa_bounded_replay",
)  # fmt: skip
_LOAD = ("load_format", "model_loader_extra_config")
_ATTENTION = ("indexer_kv_dtype", "hisparse_config", "use_non_causal")
_MEDIA = (
    "mm_processor_kwargs", "media_io_kwargs", "mm_device_do_normalize", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path",
    "video_pruning_rate", "video_pruning_method",
)  # fmt: skip
_DRAFT = ("method", "model", "revision", "quantization", "kv_cache_dtype")
"""Fields of vLLM's configuration, by part, that affect keys, values and states."""


def relevant_settings(vllm_config: Any) -> str:
    """Return a digest of the vLLM settings on which keys, values and states depend.

    These include the model's configuration with all overrides, the dtype, the quantization, the load format, the settings of multimodal
    preprocessing, and the draft model. Raises InvalidParameter if the installed vLLM version lacks one of these settings.
    """
    model = vllm_config.model_config
    settings = {name: value for name, value in model.hf_config.to_dict().items() if name not in _IGNORED_SETTINGS}
    # Some rotary embeddings depend on the maximum length that the server supports.
    longest = model.max_model_len if any(kind in str(settings) for kind in ("longrope", "dynamic")) else None
    parts = {
        "model_config": (model, _MODEL), "cache_config": (vllm_config.cache_config, _CACHE),
        "load_config": (vllm_config.load_config, _LOAD), "attention_config": (vllm_config.attention_config, _ATTENTION),
        "multimodal_config": (model.multimodal_config, _MEDIA), "speculative_config": (vllm_config.speculative_config, _DRAFT),
    }  # fmt: skip
    result = {name: _read_fields(name, part, fields) for name, (part, fields) in parts.items()}
    return hashlib.sha256(json.dumps([settings, longest, result], sort_keys=True, default=_to_json_value).encode()).hexdigest()


def _read_fields(name: str, part: Any, fields: Sequence[str]) -> dict[str, Any] | None:
    if part is None:
        return None
    unknown = [field for field in fields if not hasattr(part, field)]
    if unknown:
        raise InvalidParameter(
            f"{name} of the installed version of vLLM has no {', '.join(unknown)}, on which pages depend: kvpack was tested with "
            f"vLLM {' and '.join(VERSIONS)}; install one of those"
        )
    return {field: getattr(part, field) for field in fields}


def _to_json_value(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)


def page_identity(config: Any, recipe: str | Recipe, shape: Mapping[str, Any], revision: str | None, adapter: str, tenant: str) -> Identity:
    """Return the identity of pages with the layout ``shape``. ``config`` is vLLM's OffloadingConfig.

    Raises InvalidParameter if the weights cannot be identified.
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
            f"the model {config.model.name!r} is not a folder, so only a revision identifies its weights: set revision, for example to "
            "the commit on the hub"
        )
    return Identity(
        config.model.name, recipe, weights=revision, adapter=adapter, dtype=dtype, tenant=tenant, extra=f"layout={digest}; vllm"
    )


def check_version(version: str, any_version: bool) -> dict[str, str]:
    """Return the part of vLLM's ``version`` that identities contain, so that incompatible versions share no entries.

    This is the first two numbers or, for a version with which kvpack was not tested, the whole version. Raises InvalidParameter for an
    untested version unless ``any_version`` is set.
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
