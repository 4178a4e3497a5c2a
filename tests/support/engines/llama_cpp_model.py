"""Tiny random models as GGUF files, and a wrapper of llama.cpp's library that runs them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Self

import gguf
import numpy as np
from llama_cpp import llama_cpp as library

VOCABULARY = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{byte:02X}>", 6) for byte in range(256))]
"""Tokens and their types. Each ordinary token is a single byte."""
LAYERS, WINDOW = 3, 32
TYPES = {"fp32": 0, "fp16": 1, "bf16": 30, "q8_0": 8, "q5_0": 6, "q4_0": 2}


def write_model(path: Path, arch: str, dim: int, heads: int = 4, kv_heads: int = 2, window: int = WINDOW) -> Path:
    """Write a model of ``arch`` with random weights and return its path.

    ``arch`` is llama, qwen2, gemma3, deepseek2, qwen2vl or mamba.
    """
    writer, source = gguf.GGUFWriter(path, arch), np.random.default_rng(dim)
    width, vocabulary = heads * dim, len(VOCABULARY)
    writer.add_context_length(1024)
    writer.add_embedding_length(width)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    # The cache of a model with latents contains ``dim`` latents and half as many rotary channels.
    latents = arch == "deepseek2"
    writer.add_key_length(dim + dim // 2 if latents else dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim // 2 if latents else dim)
    if latents:
        writer.add_q_lora_rank(dim)
        writer.add_kv_lora_rank(dim)
        writer.add_key_length_mla(dim)
        writer.add_value_length_mla(dim)
        writer.add_leading_dense_block_count(LAYERS)
        writer.add_expert_feed_forward_length(dim)
        writer.add_expert_shared_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token for token, _ in VOCABULARY])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([kind for _, kind in VOCABULARY])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if arch == "gemma3":
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([True, False, True])
    if arch == "qwen2vl":
        writer.add_rope_dimension_sections([dim // 8, dim // 8, dim // 4, 0])

    def add(name: str, *shape: int) -> None:
        values = np.ones(shape, np.float32) if "norm" in name else source.standard_normal(shape, np.float32) / shape[-1] ** 0.5
        writer.add_tensor(f"{name}.weight", values)

    if arch == "mamba":
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(2 * width)
        writer.add_ssm_state_size(8)
        writer.add_ssm_time_step_rank(4)
    for name, shape in (("token_embd", (vocabulary, width)), ("output_norm", (width,)), ("output", (vocabulary, width))):
        add(name, *shape)
    for layer in range(LAYERS):
        block, inner = f"blk.{layer}", 2 * width
        add(f"{block}.attn_norm", width)
        if arch == "mamba":
            add(f"{block}.ssm_in", 2 * inner, width)
            add(f"{block}.ssm_conv1d", inner, 4)
            writer.add_tensor(f"{block}.ssm_conv1d.bias", np.zeros(inner, np.float32))
            add(f"{block}.ssm_x", 4 + 16, inner)
            add(f"{block}.ssm_dt", inner, 4)
            writer.add_tensor(f"{block}.ssm_dt.bias", np.zeros(inner, np.float32))
            writer.add_tensor(f"{block}.ssm_a", -np.ones((inner, 8), np.float32))
            writer.add_tensor(f"{block}.ssm_d", np.ones(inner, np.float32))
            add(f"{block}.ssm_out", width, inner)
            continue
        if latents:
            add(f"{block}.attn_q_a", dim, width)
            add(f"{block}.attn_q_a_norm", dim)
            add(f"{block}.attn_q_b", heads * dim, dim)
            add(f"{block}.attn_kv_a_mqa", dim + dim // 2, width)
            add(f"{block}.attn_kv_a_norm", dim)
            add(f"{block}.attn_k_b", heads, dim, dim // 2)
            add(f"{block}.attn_v_b", heads, dim, dim)
        for side, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)) if not latents else ():
            add(f"{block}.attn_{side}", count * dim, width)
            if arch in ("qwen2", "qwen2vl"):
                writer.add_tensor(f"{block}.attn_{side}.bias", np.zeros(count * dim, np.float32))
        add(f"{block}.attn_output", width, heads * dim)
        add(f"{block}.ffn_norm", width)
        add(f"{block}.ffn_gate", 2 * width, width)
        add(f"{block}.ffn_up", 2 * width, width)
        add(f"{block}.ffn_down", width, 2 * width)
        if arch == "gemma3":
            for name, size in (("attn_q_norm", dim), ("attn_k_norm", dim), ("post_attention_norm", width), ("post_ffw_norm", width)):
                add(f"{block}.{name}", size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Context:
    """A llama.cpp context for a model, on one thread."""

    def __init__(
        self, path: Path, types: tuple[str, str] = ("fp16", "fp16"), *, flash: bool = True, sequences: int = 1, size: int = 512
    ) -> None:
        self.model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        options = library.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = size * sequences, 64, 64, sequences
        options.n_threads = options.n_threads_batch = 1
        options.type_k, options.type_v = (TYPES[name] for name in types)
        options.flash_attn_type = int(flash)
        options.kv_unified = options.swa_full = False
        self.pointer = library.llama_init_from_model(self.model, options)
        assert self.pointer, f"llama.cpp could not create a context for {path}"
        self.vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        library.llama_free(self.pointer)
        library.llama_model_free(self.model)

    def decode(self, ids: list[int], first: int, sequence: int = 0) -> np.ndarray:
        """Return the logits after the last of ``ids``, whose positions start at ``first``."""
        for start in range(0, len(ids), 64):
            part = ids[start : start + 64]
            batch = library.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for number, token in enumerate(part):
                batch.token[number], batch.pos[number] = token, first + start + number
                batch.n_seq_id[number], batch.seq_id[number][0], batch.logits[number] = 1, sequence, number == len(part) - 1
            assert library.llama_decode(self.pointer, batch) == 0
            library.llama_batch_free(batch)
        return np.ctypeslib.as_array(library.llama_get_logits_ith(self.pointer, -1), (self.vocabulary,)).copy()

    def save(self, path: Path, ids: list[int], sequence: int = 0) -> bytes:
        """Return the bytes that llama_state_seq_save_file writes."""
        array = (ctypes.c_int32 * len(ids))(*ids)
        assert library.llama_state_seq_save_file(self.pointer, str(path).encode(), sequence, array, len(ids))
        return path.read_bytes()

    def load(self, path: Path, sequence: int = 0) -> list[int] | None:
        """Load a file into llama.cpp and return its token ids, or None if llama.cpp refuses it."""
        array, count = (ctypes.c_int32 * 4096)(), ctypes.c_size_t()
        size = library.llama_state_seq_load_file(self.pointer, str(path).encode(), sequence, array, 4096, ctypes.byref(count))
        assert size in (0, path.stat().st_size)
        return array[: count.value] if size else None

    def remove(self, first: int, last: int, sequence: int = 0) -> Any:
        """Remove the positions ``[first, last)`` of a sequence from the cache."""
        return library.llama_memory_seq_rm(library.llama_get_memory(self.pointer), sequence, first, last)

    def shift(self, first: int, last: int, by: int, sequence: int = 0) -> None:
        """Move the positions ``[first, last)`` of a sequence by ``by``."""
        library.llama_memory_seq_add(library.llama_get_memory(self.pointer), sequence, first, last, by)
