"""Run one vLLM process on the CPU with cache layers other than plain attention.

The command is ``python vllm_groups.py KIND FOLDER RECIPE PLACEMENT``.

``KIND`` is "windows", "latents" or "states". "windows" has sliding windows and full attention, two workers, and chunks of two blocks, so
that a window may cover part of a chunk. "latents" is MLA. "states" has short convolutions, which vLLM treats as Mamba states, and
attention. The models are random, so their log probabilities are compared instead of their text.
"""

from __future__ import annotations

import json
import os
import sys
from functools import wraps
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
sys.path.insert(0, str(Path(__file__).parent))
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}

import torch

# With AMX, vLLM's attention uses a page layout that kvpack refuses. Workers import this file as well.
torch.cpu._is_amx_tile_supported = lambda: False

TOKENS, GENERATED = 900, 16


WORKERS = {"windows": 2, "latents": 1, "states": 1}
BLOCKS = {"windows": 2, "latents": 2, "states": 1}
"""Number of blocks in a chunk, by kind."""
SIZES = {
    "vocab_size": 264, "hidden_size": 256, "intermediate_size": 512, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 0,
    "tie_word_embeddings": False, "num_attention_heads": 4,
}  # fmt: skip


def random_model(kind: str) -> Any:
    """Return a random model with two or four layers."""
    import transformers

    torch.manual_seed(0)
    if kind == "windows":
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(
            **SIZES, num_hidden_layers=4, num_key_value_heads=2, head_dim=64, query_pre_attn_scalar=64, sliding_window=256,
            layer_types=["sliding_attention", "full_attention"] * 2, initializer_range=0.15,
        ))  # fmt: skip
    if kind == "latents":
        return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(
            **SIZES, num_hidden_layers=2, num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64,
            qk_nope_head_dim=128, v_head_dim=128, moe_intermediate_size=128, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
            first_k_dense_replace=2, max_position_embeddings=2048, initializer_range=0.1,
        ))  # fmt: skip
    # vLLM reads the sizes of the convolution and the MLP under the names of the first of these models.
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(
        **SIZES, num_hidden_layers=4, num_key_value_heads=2, layer_types=["conv", "full_attention"] * 2, conv_dim=256, conv_dim_out=256,
        block_dim=256, block_ff_dim=512, block_auto_adjust_ff_dim=False, block_multiple_of=256, block_ffn_dim_multiplier=1.0,
        initializer_range=0.1,
    ))  # fmt: skip


def model_of(kind: str, folder: Path) -> Path:
    path = folder / "model"
    if not path.exists():
        random_model(kind).to(torch.bfloat16).save_pretrained(path)
    return path


def main(kind: str, folder: str, recipe: str, placement: str) -> None:
    from vllm import LLM, SamplingParams

    from kvpack.integrations.vllm import spec, tier

    made: list[Any] = []

    def seen(known: Any) -> Any:
        @wraps(known)
        def init(self: Any, *arguments: Any, **options: Any) -> None:
            known(self, *arguments, **options)
            made.append(self)

        return init

    store = str(Path(folder) / "store")
    extra = {"cpu_bytes_to_use": 64 << 20, "recipe": recipe, "layout": "cpu-vec"}
    if placement == "store":
        tier.KvpackTier.__init__ = seen(tier.KvpackTier.__init__)
        extra |= {"placement": "store", "location": store, "spec_name": "CpuTieringSpec", "spec_module_path": "vllm_cpu_spec"}
    else:
        spec.KvpackSpec.__init__ = seen(spec.KvpackSpec.__init__)
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": store, "n_read_threads": 2, "n_write_threads": 2}]
        extra["blocks_per_chunk"] = BLOCKS[kind]
    llm = LLM(
        str(model_of(kind, Path(folder))),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        dtype="bfloat16",
        max_num_seqs=2,
        enable_prefix_caching=True,
        tensor_parallel_size=WORKERS[kind],
        distributed_executor_backend="mp" if WORKERS[kind] > 1 else "uni",
        kv_transfer_config={
            "kv_connector": "KvpackConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        },
    )
    text = Path(__file__).parents[3].joinpath("README.md").read_bytes()
    sampling = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False, logprobs=1)

    def run(tokens: list[int]) -> tuple[int, list[float]]:
        (out,) = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        (found,) = out.outputs
        scores = [of_token[token].logprob for token, of_token in zip(found.token_ids, found.logprobs, strict=True)]
        return out.num_cached_tokens, scores

    prompt = [256, *text[: TOKENS - 1]]
    first, _ = run(prompt)
    # Run more steps, in which vLLM collects finished transfers.
    for word in range(3):
        run([256, 65, 66 + word])
    llm.reset_prefix_cache()
    cached, scores = run(prompt)
    if placement == "store":
        (found,) = made
        tiers, groups = [found], [store.identity.recipe for store, _ in found.stores.values()]
        damaged = sum(store.counters()["damaged_entries"] for store, _ in found.stores.values())
    else:
        (found,) = [one for one in made if one._manager is not None]
        tiers, groups = found._manager.secondary_tiers, [group.kind for group in found._groups]
        damaged = sum(one.damaged_chunks for one in tiers)
    for one in tiers:
        one.drain_jobs()
    print("RESULT " + json.dumps({
        "first": first,
        "cached": cached,
        "scores": scores,
        "workers": WORKERS[kind],
        "groups": groups,
        "damaged": damaged,
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
