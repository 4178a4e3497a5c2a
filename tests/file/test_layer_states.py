"""States of recurrent and convolution layers are preserved bit for bit, belong to one position, and are never cut."""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

import kvpack
from kvpack import cli
from kvpack.cache.device_copy import HostCopyQueue
from kvpack.cache.files import read_to_device
from kvpack.cache.layer import Layer
from kvpack.cache.staged_save import save_from
from kvpack.errors import InvalidParameter, LimitExceeded, OutOfBounds
from kvpack.file import container
from kvpack.file.layer_states import StateEntry, list_features
from support.caches import random_pairs

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = 32


def states(batch: int = 1, seed: int = 0) -> MappingProxyType[str, torch.Tensor]:
    """Return a convolution state and a recurrent state whose values would change in any arithmetic."""
    source = torch.Generator().manual_seed(seed)
    recurrent = torch.randn(batch, 2, 3, 5, generator=source)
    recurrent.view(torch.int32)[0, 0, 0, :3] = torch.tensor([0x7FC12345, -0x80000000, 1], dtype=torch.int32)
    return MappingProxyType({"conv.0": torch.randn(batch, 6, 4, generator=source).bfloat16(), "recurrent.0": recurrent})


def hybrid(batch: int = 1, recipe: str = "kivi-2;raw=0") -> kvpack.Cache:
    """Return a cache of three layers: one with only states, one with only keys and values, and one with both."""
    packed = kvpack.pack(random_pairs(2, TOKENS, batch=batch), recipe)
    layers = (Layer(None, None, states=states(batch)), packed[0], replace(packed[1], states=states(batch, 1)))
    return replace(packed, layers=layers)


def check_row_matches(found: kvpack.Cache, expected: kvpack.Cache) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.states.keys() == theirs.states.keys()
        for name, state in theirs.states.items():
            assert mine.states[name].dtype == state.dtype
            assert torch.equal(mine.states[name].view(torch.uint8), state.view(torch.uint8)), name


@pytest.mark.parametrize("compress", [False, True])
def test_a_file_keeps_every_bit(compress: bool, tmp_path: Path) -> None:
    cache, path = hybrid(2), tmp_path / "cache.kvpack"
    size = kvpack.save(cache, path, compress=compress)
    assert compress or size == cache.nbytes
    header = container.open_file(path).header
    assert header.required == ("layer-state",)
    assert [state.where for state in header.states] == ["0.state.conv.0", "0.state.recurrent.0", "2.state.conv.0", "2.state.recurrent.0"]
    loaded = kvpack.load(path)
    check_row_matches(loaded, cache)
    kvpack.save(loaded, tmp_path / "again", compress=compress)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    with safe_open(path, framework="pt") as file:
        assert compress or torch.equal(file.get_tensor("0.state.conv.0"), cache[0].states["conv.0"])


def test_loading_to_and_saving_from_a_device_is_exact(tmp_path: Path) -> None:
    cache, path = hybrid(), tmp_path / "cache.kvpack"
    kvpack.save(cache, path)
    check_row_matches(read_to_device(HostCopyQueue(), container.open_file(path)), cache)
    save_from(HostCopyQueue(), cache, tmp_path / "staged")
    assert (tmp_path / "staged").read_bytes() == path.read_bytes()
    with pytest.raises(OutOfBounds, match=r"tokens \[0:16\] of 32 were requested, but layers\[0\] has its states"):
        read_to_device(HostCopyQueue(), container.open_file(path), tokens=16)


def test_states_belong_to_the_end_of_the_cache(tmp_path: Path) -> None:
    cache, path = hybrid(), tmp_path / "cache.kvpack"
    kvpack.save(cache, path)
    check_row_matches(cache[:, :], cache)
    rest = replace(cache, layers=cache.layers[:2])[:, 0:TOKENS]
    check_row_matches(rest, replace(cache, layers=cache.layers[:2]))
    for cut in (lambda: cache[:, :16], lambda: kvpack.load(path, tokens=16), lambda: cache[:, :31]):
        with pytest.raises(OutOfBounds, match=r"layers\[0\] has its states \(conv.0, recurrent.0\) only after the last token"):
            cut()
    with pytest.raises(OutOfBounds, match=r"a layer with states \(conv.0, recurrent.0\), .* its last token: use the whole layer"):
        cache[2][1:]
    assert cache[2][:].states is cache[2].states
    pairs = [(None, None), *random_pairs(2, 1)]
    with pytest.raises(InvalidParameter, match=r"layers\[0\]: tokens cannot be appended to a layer with recurrent or convolution states"):
        cache.append(pairs)
    assert [len(layer.states) for layer in kvpack.load(path, layers=[1, 2])] == [0, 0, 2]


def test_joined_caches_have_the_states_of_the_last_one() -> None:
    first = hybrid()
    second = replace(first, start=TOKENS, layers=tuple(replace(x, states=states(seed=5)) if x.states else x for x in first))
    check_row_matches(kvpack.concat([first, second]), second)
    without = replace(second, layers=tuple(replace(layer, states=MappingProxyType({})) for layer in second))
    with pytest.raises(InvalidParameter, match=r"layers\[0\] has the states \['conv.0', 'recurrent.0'\] in one cache, but \[\]"):
        kvpack.concat([first, without])


def test_sequences_can_be_selected_and_recipes_can_store_states() -> None:
    cache = hybrid(2)
    chosen = cache.select([1, 1, 0])
    assert torch.equal(chosen[0].states["conv.0"], cache[0].states["conv.0"][[1, 1, 0]])
    check_row_matches(cache.convert("octopus-3"), cache)
    check_row_matches(cache.to("cpu"), cache)
    with pytest.raises(OutOfBounds, match=r"layers\[0\]"):
        cache.select([2])


def test_pack_keeps_the_states_of_a_models_cache() -> None:
    linear, both = LinearAttentionLayer(number_of_states=2), LinearAttentionAndFullAttentionLayer()
    given = states()
    for layer in (linear, both):
        layer.update_conv_state(given["conv.0"])
        layer.update_recurrent_state(given["recurrent.0"])
    both.update(*random_pairs(1, 8)[0])
    past = DynamicCache()
    past.layers = [linear, both]
    packed = kvpack.pack(past, "bf16")
    check_row_matches(packed, replace(packed, layers=tuple(replace(layer, states=given) for layer in packed)))
    assert packed[1].tokens == 8
    # The model goes on in place.
    linear.conv_states[0].zero_()
    assert packed[0].states["conv.0"].any()
    past.layers[0].conv_states[1] = past.layers[0].conv_states[0].double()
    past.layers[0].has_previous_state[1], past.layers[0].conv_kernel_size[1] = True, 4
    with pytest.raises(InvalidParameter, match=r"layers\[0\].conv_states\[1\] has shape \[1, 6, 4\] and an unsupported dtype"):
        kvpack.pack(past, "bf16")

    class Other(DynamicLayer):  # type: ignore[misc]
        pass

    Other.__module__ = DynamicLayer.__module__
    past.layers = [Other()]
    with pytest.raises(InvalidParameter, match=r"layers\[0\] is a Other"):
        kvpack.pack(past, "bf16")


def test_functions_for_keys_and_values_refuse_states(tmp_path: Path) -> None:
    cache = hybrid()
    with pytest.raises(InvalidParameter, match=r"layers\[0\] has the states conv.0 and recurrent.0, but a LiveCache keeps only keys"):
        kvpack.LiveCache.of(cache)
    identity = kvpack.Identity("model", "kivi-2;raw=0", weights="w")
    refused = r"layers\[0\] has the states conv.0 and recurrent.0, but the store's identity is .* without states: .* keeps_states=True"
    with kvpack.Store(tmp_path, identity, chunk=TOKENS) as store, pytest.raises(InvalidParameter, match=refused):
        store.save(list(range(TOKENS)), cache)
    with kvpack.Store(tmp_path, replace(identity, keeps_states=True), chunk=TOKENS) as store:
        assert store.save(list(range(TOKENS)), cache) == TOKENS
        check_row_matches(store.load(list(range(TOKENS)))[1], cache)


def test_commands_show_and_convert_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plain, again = tmp_path / "cache.kvpack", tmp_path / "dense.safetensors", tmp_path / "again.kvpack"
    cache = hybrid(recipe="bf16")
    kvpack.save(cache, path)
    assert cli.main(["inspect", str(path)]) == 0
    assert "4 states of 2 layers, 336 bytes" in capsys.readouterr().out
    cli.main(["inspect", "--json", str(path)])
    summary = json.loads(capsys.readouterr().out)
    assert [state["name"] for state in summary["states"]][2:] == ["2.state.conv.0", "2.state.recurrent.0"]
    assert summary["values"] == cache.values
    assert cli.main(["unpack", str(path), str(plain)]) == 0
    assert cli.main(["pack", str(plain), str(again), "--recipe", "bf16"]) == 0
    assert again.read_bytes() == path.read_bytes()


def test_writers_enforce_the_limits_of_states() -> None:
    for entry in (StateEntry(0, "n" * 29, "U8", (1,)), StateEntry(0, "n", "U8", (1,) * 9)):
        with pytest.raises(LimitExceeded, match="the limits are 28 bytes and 8 dimensions"):
            list_features([entry])
    with pytest.raises(LimitExceeded, match="the layers have 683 states, but a file can have at most 682"):
        list_features(StateEntry(number, "n", "U8", (1,)) for number in range(683))
