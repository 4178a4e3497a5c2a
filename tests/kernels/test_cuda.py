"""On a CUDA device, a cache is encoded, appended to, attended and unpacked with the same results as on the CPU."""

from __future__ import annotations

import pytest
import torch

import kvpack
from support.caches import BOUNDS, RECIPES, random_pairs, relative_error, unpack_all

pytestmark = pytest.mark.cuda

TOLERANCE = 1e-4


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_loaded_cache_attends_and_unpacks_alike(recipe: str, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    cache = kvpack.pack(random_pairs(2, 700, batch=2, dims=(64, 96)), recipe)
    kvpack.save(cache, f"{tmp_path}/a.kvpack")
    q = torch.randn(2, 6, 5, 64, generator=torch.Generator().manual_seed(0))
    modes = [{}, {"sliding_window": 100}, {"causal": False, "softcap": 20.0}]
    expected = unpack_all(cache)
    attended = [kvpack.attend(q, cache[1], **mode) for mode in modes]
    monkeypatch.setenv("KVPACK_KERNELS", backend)
    there = kvpack.load(f"{tmp_path}/a.kvpack", device="cuda")
    for here, moved in zip(expected, unpack_all(there), strict=True):
        torch.testing.assert_close(moved.cpu(), here, rtol=TOLERANCE, atol=TOLERANCE)
    for mode, here in zip(modes, attended, strict=True):
        # The kernels multiply binary16 tiles.
        assert (kvpack.attend(q.cuda(), there[1], **mode).cpu() - here).norm() / here.norm() < (TOLERANCE if backend == "torch" else 2e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cache_is_encoded_on_the_device(recipe: str, tmp_path: object) -> None:
    pairs = random_pairs(1, 500)
    cache = kvpack.pack([(k[:, :, :400].cuda(), v[:, :, :400].cuda()) for k, v in pairs], recipe)
    cache = cache.append([(k[:, :, 400:].cuda(), v[:, :, 400:].cuda()) for k, v in pairs])
    assert relative_error(cache.to("cpu"), pairs) <= BOUNDS[recipe]
    kvpack.save(cache, f"{tmp_path}/a.kvpack")
    loaded = kvpack.load(f"{tmp_path}/a.kvpack")
    assert all(torch.equal(a, b) for a, b in zip(unpack_all(loaded), unpack_all(cache.to("cpu")), strict=True))


@pytest.mark.parametrize("recipe", ["octopus-3-scaled", "hqmq-s24-r4-med3", "rotatekv-2", "octopus-qjl-2", "raw"])
def test_batch_rows_are_selected_on_the_device(recipe: str) -> None:
    cache = kvpack.pack(random_pairs(1, 300, batch=3, dims=(128, 128)), recipe)
    found = cache.to("cuda").select([2, 0, 0])
    assert all(side.device.type == "cuda" for side in found[0].sides.values())
    for mine, theirs in zip(unpack_all(found.to("cpu")), unpack_all(cache), strict=True):
        assert torch.equal(mine, theirs[[2, 0, 0]])
