"""Sizes of files of another length than the cache that they are computed from."""

from __future__ import annotations

import pytest
import torch

import kvpack
from kvpack.commands.recipes import _SizedLayer, recipe_sizes
from kvpack.tuning.file_sizes import FileLength

SHAPE = _SizedLayer(heads=3, dim_k=64, dim_v=64, tokens=4096)


def pairs(tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(2, 1, 3, tokens, 64, generator=generator).bfloat16()) for _ in range(2)]  # type: ignore[misc]


@pytest.mark.parametrize("tokens", [96, 256, 1000])
@pytest.mark.parametrize("recipe", ["kvpack-3", "fp8", "kivi-2", "oscar-2-g128", "kv=scalar:b=2,sinks=4;layers=1:k=raw"])
def test_sizes_at_another_length_are_those_of_its_file(recipe: str, tokens: int) -> None:
    cache, other = kvpack.pack(pairs(256), recipe), kvpack.pack(pairs(tokens), recipe)
    length = FileLength(tokens, [None, None])
    assert length.file_bytes(cache) == other.nbytes
    assert length.values(cache) == other.values
    for number in range(2):
        for side, its_side in zip(cache[number].sides.values(), other[number].sides.values(), strict=True):
            streams = sum(stream.nbytes for run in its_side.runs for stream in run.streams.values())
            assert length.stream_bytes(side, number) == its_side.tail.nbytes + streams


def test_layers_with_a_sliding_window_have_at_most_its_tokens() -> None:
    cache = kvpack.pack(pairs(256), "kvpack-3")
    sizes = [recipe_sizes(kvpack.Recipe("kvpack-3"), layers) for layers in ([SHAPE, SHAPE], [SHAPE, SHAPE._replace(tokens=128)])]
    for windows, (_, bits, size) in zip(([None, 5000], [None, 128]), sizes, strict=True):
        length = FileLength(4096, windows)
        assert length.file_bytes(cache) == size
        assert 8 * size / length.values(cache) == bits


def test_later_raw_tokens_grow_with_the_file_and_first_ones_do_not() -> None:
    made = pairs(256)
    for k, v in made:
        k[:, :, 100:102] = 0
        v[:, :, 100:102] = 0
    cache = kvpack.pack(made, "kv=scalar:b=2;raw=4,0.5,4")
    long = kvpack.pack([tuple(torch.cat([x, *[x[:, :, 4:]] * 2], 2) for x in pair) for pair in made], "kv=scalar:b=2;raw=4,0.5,4")  # type: ignore[misc]
    assert long.tokens == 256 + 2 * 252
    # The copies have two raw tokens each, like the first window: 6 in all, and an estimate of 5.94.
    assert FileLength(long.tokens, [None, None]).file_bytes(cache) == long.nbytes
