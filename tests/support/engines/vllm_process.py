"""Run one vLLM process on the CPU with kvpack's tier, and print its output and the number of loaded tokens.

The command is ``python vllm_process.py MODEL STORE RECIPE``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
sys.path.insert(0, str(Path(__file__).parent))

TOKENS, GENERATED = 900, 48


def main(model: str, store: str, recipe: str) -> None:
    import torch

    # With AMX, vLLM's attention uses a page layout that the tier refuses.
    torch.cpu._is_amx_tile_supported = lambda: False

    from vllm import LLM, SamplingParams

    from kvpack.integrations.vllm import tier as tiers_module

    tiers: list[Any] = []

    class Seen(tiers_module.KvpackTier):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            tiers.append(self)

    # This is the configuration that operators write: kvpack's entry point has registered the type.
    tiers_module.KvpackTier = Seen
    packed = {"placement": "store", "location": store, "recipe": recipe, "layout": "cpu-vec"}
    extra = {"spec_name": "CpuTieringSpec", "spec_module_path": "vllm_cpu_spec", "cpu_bytes_to_use": 64 << 20, **packed}
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        dtype="bfloat16",
        max_num_seqs=2,
        disable_log_stats=False,
        kv_transfer_config={"kv_connector": "KvpackConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra},
    )
    text = Path(__file__).parents[3].joinpath("README.md").read_bytes()
    sampling = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False)
    (out,) = llm.generate([{"prompt_token_ids": [256, *text[: TOKENS - 1]]}], sampling, use_tqdm=False)
    tiers[0].drain_jobs()
    # Run more steps, in which vLLM collects finished transfers and metrics.
    for word in range(2):
        llm.generate([{"prompt_token_ids": [256, 65, 66 + word]}], sampling, use_tqdm=False)
        tiers[0].drain_jobs()
    ((store_, _),) = tiers[0].stores.values()
    print("RESULT " + json.dumps({
        "cached": out.num_cached_tokens,
        "tokens": list(out.outputs[0].token_ids),
        "ratio": store_.codec.geometry.raw_bytes / store_.codec.nbytes,
        "damaged": store_.counters()["damaged_entries"],
        "metrics": {one.name: one.value for one in llm.get_metrics() if "kvpack" in one.name and hasattr(one, "value")},
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
