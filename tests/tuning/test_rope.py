"""RoPE of any type is determined from single tokens, and keys that depend on positions in another way are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from kvpack.evaluation.windows import prefill
from kvpack.formats.errors import InvalidParameter
from kvpack.tuning import rope
from support.small_models import small_llama
from support.zoo_models import ZOO

TOKENS = torch.arange(2, 22)[None]
TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 32.0, "original_max_position_embeddings": 64},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"factor": 4.0, "long_factor": [4.0] * 8, "short_factor": [1.5] * 8, "original_max_position_embeddings": 512},
}


@pytest.mark.parametrize("name", TYPES)
def test_every_rope_type_has_its_frequencies(name: str) -> None:
    settings = {"rope_type": name, "rope_theta": 10000.0, **TYPES[name]}
    model = small_llama(rope_parameters=settings, max_position_embeddings=2048)
    found = rope.find_ropes(model, TOKENS)
    assert len(found) == 2
    first, far = (prefill(model, TOKENS[0, :3, None], torch.full((3, 1), place)) for place in (0, 77))
    for one, (k, _), (other, _) in zip(found, first, far, strict=True):
        assert one is not None
        assert (one.pairing, len(one.frequencies)) == ("halves", 8)
        assert one.longest == {"dynamic": 2047, "longrope": 512}.get(name)
        torch.testing.assert_close(one.rotate(k, 77), other, rtol=0, atol=1e-4 * k.abs().max().item())
        torch.testing.assert_close(one.rotate(one.rotate(k, 77), 77, inverse=True), k, rtol=0, atol=1e-5)


def small(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
    config = getattr(transformers, name)(**{**sizes, **settings, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_interleaved_and_partial_rotations_are_recognized() -> None:
    found = rope.find_ropes(small("CohereConfig", num_key_value_heads=1), TOKENS)
    assert [(one.pairing, len(one.frequencies)) for one in found if one] == [("neighbours", 8)] * 2
    found = rope.find_ropes(small("PhiConfig", num_key_value_heads=2), TOKENS)
    assert [(one.pairing, len(one.frequencies)) for one in found if one] == [("halves", 4)] * 2


def test_keys_without_rope_have_no_frequencies_or_are_refused() -> None:
    alibi = small("FalconConfig", alibi=True, new_decoder_architecture=False)
    assert rope.find_ropes(alibi, TOKENS) == [None, None]
    learned = small("GPT2Config", n_embd=32, n_layer=2, n_head=2, n_positions=64)
    with pytest.raises(InvalidParameter, match="layer 0: its keys depend on positions, but not through RoPE"):
        rope.find_ropes(learned, TOKENS)


@pytest.mark.parametrize("name", ["Jamba", "Bamba", "Falcon-H1", "Qwen3-Next"])
def test_models_with_states_are_refused(name: str) -> None:
    model = next(architecture for architecture in ZOO if architecture.name == name).model()
    with pytest.raises(InvalidParameter, match="has layers with recurrent or convolution states"):
        rope.find_ropes(model, TOKENS)
