"""Run vLLM on the CPU without kvpack, and print the text generated after a number of cached tokens.

The command is ``python vllm_plain.py MODEL CACHED``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm_process import GENERATED, TOKENS


def main(model: str, cached: int) -> None:
    import torch
    from vllm import LLM, SamplingParams

    torch.cpu._is_amx_tile_supported = lambda: False
    llm = LLM(model, skip_tokenizer_init=True, enforce_eager=True, max_model_len=1024, dtype="bfloat16", max_num_seqs=2)
    text = Path(__file__).parents[3].joinpath("README.md").read_bytes()
    sampling = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False)

    def run(tokens: list[int]) -> Any:
        (out,) = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        return out

    prompt = [256, *text[: TOKENS - 1]]
    if cached:
        # Only whole blocks are cached, and the last token is always computed.
        run(prompt[: cached + 1])
    out = run(prompt)
    print("RESULT " + json.dumps({"cached": out.num_cached_tokens, "tokens": list(out.outputs[0].token_ids)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
