"""One process of vLLM on the CPU with two workers, whose model has sliding windows: ``python vllm_workers.py FOLDER RECIPE``.

A chunk is two blocks, so that windows leave chunks in part. The model is random: its log probabilities are compared, not its text.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}

import torch

# With AMX, vLLM's attention keeps pages in an arrangement that kvpack refuses; workers import this file as well.
torch.cpu._is_amx_tile_supported = lambda: False

TOKENS, GENERATED = 900, 16


def model_of(folder: Path) -> Path:
    """A random model of two layers with a sliding window of 256 and two without."""
    path = folder / "model"
    if not path.exists():
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        torch.manual_seed(0)
        config = Gemma3TextConfig(
            vocab_size=264, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=64, query_pre_attn_scalar=64, sliding_window=256, layer_types=["sliding_attention", "full_attention"] * 2,
            bos_token_id=256, eos_token_id=257, pad_token_id=0, initializer_range=0.15, tie_word_embeddings=False,
        )  # fmt: skip
        Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def main(folder: str, recipe: str) -> None:
    from vllm import LLM, SamplingParams

    from kvpack.integrations.vllm import spec

    made: list[Any] = []
    known = spec.KvpackSpec.__init__

    def seen(self: Any, config: Any) -> None:
        known(self, config)
        made.append(self)

    spec.KvpackSpec.__init__ = seen
    tier = {"type": "fs", "root_dir": str(Path(folder) / "store"), "n_read_threads": 2, "n_write_threads": 2}
    extra = {"cpu_bytes_to_use": 64 << 20, "recipe": recipe, "layout": "cpu-vec", "blocks_per_chunk": 2, "secondary_tiers": [tier]}
    llm = LLM(
        str(model_of(Path(folder))),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        dtype="bfloat16",
        max_num_seqs=2,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
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
    # Steps in which vLLM collects what is done.
    for word in range(3):
        run([256, 65, 66 + word])
    llm.reset_prefix_cache()
    cached, scores = run(prompt)
    (scheduler,) = [one for one in made if one._manager is not None]
    for tier in scheduler._manager.secondary_tiers:
        tier.drain_jobs()
    print("RESULT " + json.dumps({
        "first": first,
        "cached": cached,
        "scores": scores,
        "groups": [group.kind for group in scheduler._groups],
        "damaged": sum(tier.damaged_chunks for tier in scheduler._manager.secondary_tiers),
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
