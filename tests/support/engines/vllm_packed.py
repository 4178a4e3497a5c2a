"""Run one vLLM process on the CPU with rows in its primary tier, above vLLM's own fs tier.

The command is ``python vllm_packed.py MODEL FOLDER RECIPE``.

The pages of vLLM's CPU attention take the place of device pages, and kvpack's worker handles them like those of a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

TOKENS, GENERATED = 900, 48


def main(model: str, folder: str, recipe: str, cache_dtype: str = "auto") -> None:
    import torch

    # With AMX, vLLM's attention uses a page layout that kvpack refuses.
    torch.cpu._is_amx_tile_supported = lambda: False

    from vllm import LLM, SamplingParams

    from kvpack.integrations.vllm import spec

    made: list[Any] = []
    known = spec.KvpackSpec.__init__

    def seen(self: Any, config: Any) -> None:
        known(self, config)
        made.append(self)

    spec.KvpackSpec.__init__ = seen
    extra = {
        "cpu_bytes_to_use": 64 << 20, "recipe": recipe, "layout": "cpu-vec",
        "secondary_tiers": [{"type": "fs", "root_dir": folder, "n_read_threads": 2, "n_write_threads": 2}],
    }  # fmt: skip
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        dtype="bfloat16",
        kv_cache_dtype=cache_dtype,
        max_num_seqs=2,
        disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "KvpackConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        },
    )
    text = Path(__file__).parents[3].joinpath("README.md").read_bytes()
    sampling = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False)

    def run(tokens: list[int]) -> Any:
        (out,) = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        return out

    prompt = [256, *text[: TOKENS - 1]]
    out = run(prompt)
    # Run more steps, in which vLLM collects finished transfers.
    for word in range(3):
        run([256, 65, 66 + word])
    (scheduler,) = [one for one in made if one._manager is not None]
    (worker,) = [one._packed for one in made if one._packed is not None]
    first = {"cached": out.num_cached_tokens, "tokens": list(out.outputs[0].token_ids)}
    # Reset the device's prefix cache, so that chunks come from the primary tier, and flip a bit of one of them in memory.
    llm.reset_prefix_cache()
    found = run(prompt)
    memory = {"cached": found.num_cached_tokens, "tokens": list(found.outputs[0].token_ids)}
    rows = [row for row in worker._memory if bytes(row[:10].tolist()) == b"kvpack-row"]
    rows[3][len(rows[3]) // 3] ^= 4
    # Tokens from the damaged block on are computed again, but vLLM still counts them as cached.
    kept = 3 * llm.llm_engine.vllm_config.cache_config.block_size
    llm.reset_prefix_cache()
    found = run(prompt)
    flipped = {"cached": kept, "tokens": list(found.outputs[0].token_ids), "damaged": worker.count("damaged")}
    for tier in scheduler._manager.secondary_tiers:
        tier.drain_jobs()
    print("RESULT " + json.dumps({
        **first,
        "memory": memory,
        "flipped": flipped,
        "ratio": scheduler.ratio,
        "damaged": sum(tier.damaged_chunks for tier in scheduler._manager.secondary_tiers),
        "encoded": worker.count("encoded"),
        "metrics": {one.name: one.value for one in llm.get_metrics() if "kvpack" in one.name and hasattr(one, "value")},
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
