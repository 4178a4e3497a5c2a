"""Small configurations for any model type of transformers, derived from the defaults of its configuration class."""

from __future__ import annotations

import re
from typing import Any

from transformers import CONFIG_MAPPING

VOCABULARY = 64
WINDOW = 12

_LAYERS = r"(^|_)(num_hidden_layers|n_layers?|num_layers|layers|depth|num_blocks)$"
_SIZES = [
    (r"vocab", VOCABULARY),
    (r"head_?dim$|^d_kv$|^d_head$|kv_channels$|head_size$|_rank$|rotary_dim$", 8),
    # Encoders have more layers than decoders, so that tests notice if code confuses the two numbers.
    (r"(^|_)encoder_(layers|num_layers|num_hidden_layers|depth)$|^num_encoder_layers$", 3),
    (_LAYERS, 2),
    (r"(num_key_value_heads|num_kv_heads|n_head_kv|kv_n_heads)$", 2),
    (r"(^|_)(n_heads?|num_heads|attention_heads|num_attention_heads|num_\w*_heads|linear_num_\w*heads)$", 4),
    (r"(^|_)(hidden_size|d_model|n_embd|dim|hidden_dim|embed_dim|embedding_size|emb_dim|lru_width)$|hidden_size_", 32),
    (r"intermediate_size|ffn|^d_ff$|^n_inner$|inner_dim$", 32),
    (r"experts$", 4),
    (r"(experts_per_tok(en)?|top_?k|moe_k)$", 2),
    (r"^(n_group|topk_group)$", 1),
    (r"(sliding_window|attention_window|window_size|attention_chunk_size)$", WINDOW),
    (r"position_embeddings$|^n_positions$|^max_seq_len$|^n_ctx$|target_positions$|source_positions$", 256),
]
"""Largest value for settings whose names match each pattern. The first pattern that matches applies."""

_LARGEST = 32
"""Largest value for all other settings that exceed 64."""

_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}

_SHARED_ATTENTION = {"attention_hidden_size": 64, "attention_head_dim": 16}

_OTHERS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 1},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 32},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "topk_method": "greedy"},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "helium": {"head_dim": 8, "num_key_value_heads": 4},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "ministral": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 1, "mamba_num_heads": 4, "mamba_head_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16]},
    "zamba": {**_SHARED_ATTENTION, "layer_types": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {**_SHARED_ATTENTION, "layer_types": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1]},
}
"""Settings that do not follow from these rules, by model type."""


def tiny_config(model_type: str, **others: Any) -> Any:
    """Return a configuration of ``model_type`` with small sizes. ``others`` are set as given."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**{**_shrink(kind(), model_type), **others})


def _shrink(config: Any, model_type: str) -> dict[str, Any]:
    defaults = config.to_dict()
    small = {name: _small_value(name, value) for name, value in defaults.items() if name not in _OMITTED_SETTINGS}
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            small[name] = {"model_type": part.model_type, **_shrink(part, part.model_type)}
    for encoder, decoder in (("num_layers", "num_decoder_layers"), ("encoder_layers", "decoder_layers")):
        if encoder in small and decoder in small:
            small[encoder] = small[decoder] + 1
    types = defaults.get("layer_types")
    if isinstance(types, list) and types:
        # One layer of each type, and at least two layers.
        chosen = [types.index(one) for one in dict.fromkeys(types)]
        chosen = sorted(chosen if len(chosen) > 1 else [0, len(types) - 1])
        listed = {name: value for name, value in defaults.items() if isinstance(value, list) and len(value) == len(types)}
        small |= {name: [_small_value(name, value[i]) for i in chosen] for name, value in listed.items()}
        small |= {name: len(chosen) for name, value in defaults.items() if re.search(_LAYERS, name) and value == len(types)}
    if defaults.get("num_kv_shared_layers") and isinstance(types, list):
        # For each type, one layer that keeps keys and values, and one that shares them.
        small |= {name: value * 2 for name, value in small.items() if isinstance(value, list) and len(value) == len(chosen)}
        small |= {"num_kv_shared_layers": len(chosen), "num_hidden_layers": 2 * len(chosen)}
    if "num_key_value_heads" in small and defaults["num_key_value_heads"] == defaults.get("num_attention_heads"):
        small["num_key_value_heads"] = small["num_attention_heads"]
    small |= {name: 0 for name in ("bos_token_id", "pad_token_id", "decoder_start_token_id") if name in small}
    return {**small, **_OTHERS.get(model_type, {})}


_OMITTED_SETTINGS = {
    "_name_or_path",
    "architectures",
    "attention_layers",
    "dtype",
    "id2label",
    "label2id",
    "model_type",
    "per_layer_config",
    "transformers_version",
}
"""Settings that a configuration derives from other settings."""


def _small_value(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name.endswith(("_id", "_token_index")):
        return min(value, VOCABULARY - 4)
    most = next((size for pattern, size in _SIZES if re.search(pattern, name)), _LARGEST if value > 64 else value)
    return min(value, most)
