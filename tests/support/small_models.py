"""Small transformers models that several tests of identities use."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

import kvpack
from support import warm_python

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 50}


def small_llama(**settings: Any) -> Any:
    """Return a two-layer Llama whose weights are the same in every call."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 2, **settings})).eval()


def identity(model: Any, **given: Any) -> kvpack.Identity:
    """Return the identity of a model with the given fields and a fixed digest of its weights."""
    return kvpack.Identity.of(model, "octopus-3", **{"weights": "revision", **given})


def run_elsewhere(script: str) -> str:
    """Run a script in another process that can import the tests' modules, and return its output."""
    code = f"import sys, warnings\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\nwarnings.simplefilter('ignore')\n{script}"
    python = warm_python.python(*warm_python.MODELS)
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, timeout=300).stdout.strip()
