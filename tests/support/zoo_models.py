"""Tiny random models of the architectures that tests use. ``model_zoo`` covers all of transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

_DECODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
_TOKENS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
_HEADS = {**_DECODER, "head_dim": 16}
_WINDOW = {**_DECODER, "sliding_window": 12}
_GEMMA = {**_HEADS, "sliding_window": 12, "query_pre_attn_scalar": 16}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_OLDER = {"vocab_size": 64, "n_layer": 2, "n_head": 4}
_LATENT = {
    **_DECODER,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_n_groups": 1}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_VISION = {"depth": 1, "embed_dim": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 2, "hidden_size": 32, "spatial_merge_size": 1}
_SECTIONS = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


@dataclass(frozen=True)
class Architecture:
    """A configuration class of transformers, and small sizes for it."""

    name: str
    configuration: str
    sizes: dict[str, Any] = field(default_factory=dict)
    kind: str = "AutoModelForCausalLM"

    def model(self) -> Any:
        """Return the model, which has the same weights in every process."""
        torch.manual_seed(0)
        config = getattr(transformers, self.configuration)(**self.sizes, **_TOKENS)
        model = getattr(transformers, self.kind).from_config(config).eval()
        # Parameters that a model leaves uninitialized, such as sinks, are effectively random.
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        return model


ZOO = [
    Architecture("Llama", "LlamaConfig", _DECODER),
    Architecture("Mistral", "MistralConfig", _WINDOW),
    Architecture("Mixtral", "MixtralConfig", {**_DECODER, "num_local_experts": 2, "num_experts_per_tok": 1}),
    Architecture("Ministral", "MinistralConfig", {**_HEADS, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}),
    Architecture("Qwen2", "Qwen2Config", _DECODER),
    Architecture("Qwen2-MoE", "Qwen2MoeConfig", {**_DECODER, **_EXPERTS}),
    Architecture(
        "Qwen2-VL",
        "Qwen2VLConfig",
        {"text_config": {**_DECODER, "rope_parameters": _SECTIONS}, "vision_config": _VISION},
        "AutoModelForImageTextToText",
    ),
    Architecture("Qwen3", "Qwen3Config", _HEADS),
    Architecture("Qwen3-Next", "Qwen3NextConfig", {**_HEADS, **_EXPERTS, **_LINEAR, "num_hidden_layers": 4}),
    Architecture("Gemma", "GemmaConfig", _HEADS),
    Architecture("Gemma-2", "Gemma2Config", _GEMMA),
    Architecture("Gemma-3", "Gemma3TextConfig", {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
    Architecture(
        "Gemma-3n",
        "Gemma3nTextConfig",
        {
            **_HEADS,
            "sliding_window": 12,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "intermediate_size": [48] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    Architecture(
        "Gemma-4",
        "Gemma4TextConfig",
        {
            **_HEADS,
            "global_head_dim": 32,
            "sliding_window": 12,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    Architecture("Phi", "PhiConfig", _DECODER),
    Architecture("Phi-3", "Phi3Config", _WINDOW),
    Architecture("StarCoder2", "Starcoder2Config", _WINDOW),
    Architecture("GPT-OSS", "GptOssConfig", {**_HEADS, "sliding_window": 12, "num_local_experts": 2, "num_experts_per_tok": 1}),
    Architecture("GPT-2", "GPT2Config", {**_OLDER, "n_embd": 32, "n_positions": 128}),
    Architecture("GPT-J", "GPTJConfig", {**_OLDER, "n_embd": 32, "n_positions": 128, "rotary_dim": 8}),
    Architecture("GPT-NeoX", "GPTNeoXConfig", _DECODER),
    Architecture("OPT", "OPTConfig", {**_DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    Architecture("OLMo2", "Olmo2Config", _DECODER),
    Architecture("Cohere", "CohereConfig", _DECODER),
    Architecture("Cohere2", "Cohere2Config", {**_WINDOW, "num_hidden_layers": 4}),
    Architecture("Granite", "GraniteConfig", _DECODER),
    Architecture("StableLM", "StableLmConfig", _DECODER),
    Architecture("SmolLM3", "SmolLM3Config", _DECODER),
    Architecture("GLM", "GlmConfig", _HEADS),
    Architecture("GLM-4", "Glm4Config", _HEADS),
    Architecture(
        "Llama-4", "Llama4TextConfig", {**_HEADS, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 12}
    ),
    Architecture("Falcon", "FalconConfig", {**_DECODER, "alibi": False}),
    Architecture("Falcon (ALiBi)", "FalconConfig", {**_DECODER, "alibi": True}),
    Architecture("Bloom", "BloomConfig", {**_OLDER, "hidden_size": 32}),
    Architecture("MPT", "MptConfig", {"vocab_size": 64, "n_layers": 2, "n_heads": 4, "d_model": 32, "max_seq_len": 256}),
    Architecture("DeepSeek-V2", "DeepseekV2Config", {**_LATENT, "q_lora_rank": None, "n_routed_experts": 2, "topk_method": "greedy"}),
    Architecture("DeepSeek-V3", "DeepseekV3Config", {**_LATENT, "q_lora_rank": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}),
    Architecture("Falcon-H1", "FalconH1Config", {**_DECODER, **_MAMBA, "mamba_d_ssm": 32, "mamba_d_head": 8}),
    Architecture(
        "Jamba",
        "JambaConfig",
        {
            **_DECODER,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    Architecture("Bamba", "BambaConfig", {**_DECODER, **_MAMBA, "attn_layer_indices": [1], "mamba_d_head": 16}),
    Architecture(
        "T5",
        "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        "AutoModelForSeq2SeqLM",
    ),
    Architecture(
        "BART",
        "BartConfig",
        {
            "vocab_size": 64,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 128,
        },
        "AutoModelForSeq2SeqLM",
    ),
]


def model_of(name: str, attention: str | None = None, **sizes: Any) -> Any:
    """Return a model of one architecture with ``sizes`` in place of its own."""
    architecture = next(architecture for architecture in ZOO if architecture.name == name)
    model = Architecture(name, architecture.configuration, {**architecture.sizes, **sizes}, architecture.kind).model()
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


def images(tokens: int = 32) -> dict[str, Any]:
    """Return the inputs for an image of 4 x 4 patches at tokens 8 to 23, in the form that Qwen2-VL takes."""
    pixels = torch.randn(16, 3 * 2 * 2 * 2, generator=torch.Generator().manual_seed(0))
    types = torch.zeros(1, tokens, dtype=torch.int64)
    types[:, 8:24] = 1
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": types}
