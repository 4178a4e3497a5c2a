"""Rows in vLLM's primary tier, over stubs of the classes of vLLM 0.32 that the worker, the spec and the connector take.

``make engines`` runs them in vLLM itself.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch

from kvpack import PageCodec
from kvpack.errors import InvalidParameter
from kvpack.integrations.vllm.groups import Group, groups_of

from engine_stubs import import_over  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Iterable

LAYERS, HEADS, TOKENS, DIM, BLOCKS = 2, 2, 16, 32, 12
ATTENTION = Group(LAYERS, TOKENS, 2 * HEADS * TOKENS * DIM * 2, "attention", HEADS, DIM, 0, "bf16")
STATES = Group(1, TOKENS, 3000)
PER_CHUNK = 2


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class AsyncLookupManager:
    def __init__(self) -> None:
        self.missed: list[bytes] = []

    def mark_miss(self, keys: Iterable[bytes]) -> None:
        self.missed += keys


class TieringOffloadingSpec:
    """What vLLM's own does in its constructor, as far as kvpack's relies on it."""

    def __init__(self, config: Any) -> None:
        self.config, self.extra_config = config, config.extra_config
        self.blocks_per_chunk = config.cache.blocks_per_chunk
        self.replicated_layout = config.replicated_layout
        self.kv_bytes_per_chunk = config.worker_kv_bytes_per_block * config.parallel.world_size * self.blocks_per_chunk
        self.num_chunks = 0
        self._manager = self._worker = None
        self._engine_id = config.engine_id
        self.secondary_tier_configs = self.extra_config.get("secondary_tiers", [])


MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0.32.0"},
    "vllm.platforms": {"current_platform": types.SimpleNamespace(is_cpu=lambda: False)},
    "vllm.v1.kv_offload.base": {
        "OffloadingWorker": object,
        "TransferResult": TransferResult,
        "get_offload_group_idx": lambda key: int.from_bytes(key[-4:], "big"),
    },
    "vllm.v1.kv_offload.cpu.gpu_worker": {"pin_mmap_region": None},
    "vllm.v1.kv_offload.cpu.shared_offload_region": {"SharedOffloadRegion": None},
    "vllm.v1.kv_offload.tiering.async_lookup": {"AsyncLookupManager": AsyncLookupManager},
    "vllm.v1.kv_offload.tiering.spec": {"TieringOffloadingSpec": TieringOffloadingSpec},
}


def module(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    for part in ("worker", "promotions", "spec"):
        monkeypatch.delitem(__import__("sys").modules, f"kvpack.integrations.vllm.{part}", raising=False)
    return import_over(monkeypatch, MODULES, f"kvpack.integrations.vllm.{name}")


def device_blocks(group: Group, seed: int) -> list[torch.Tensor]:
    """int8 ``[block, byte]`` for each layer, with padding that is vLLM's."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(group.layers, BLOCKS, group.page_bytes // 2 + 32, generator=source).bfloat16()
    return [*values.view(torch.int8)]


def gpu(blocks: list[list[int]], indices: list[int]) -> Any:
    flat = [block for group in blocks for block in group]
    return types.SimpleNamespace(block_ids=numpy.array(flat, numpy.int32), group_sizes=[len(g) for g in blocks], block_indices=indices)


def cpu(chunks: list[int]) -> Any:
    return types.SimpleNamespace(block_ids=numpy.array(chunks, numpy.int32))


class Engine:
    """A worker over two groups of cache layers, with the memory of the host below it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, recipe: str = "raw") -> None:
        self.groups = (ATTENTION, STATES)
        self.layers = [device_blocks(group, number) for number, group in enumerate(self.groups)]
        self.codecs = [PageCodec(group.recipe(recipe), group.geometry, namespace=bytes([n] * 32)) for n, group in enumerate(self.groups)]
        self.cell = max(codec.nbytes for codec in self.codecs) * PER_CHUNK
        self.memory = torch.zeros(6, self.cell + 100, dtype=torch.int8)
        self.released: list[bool] = []
        pages = [group.buffer("adjacent", layers) for group, layers in zip(self.groups, self.layers, strict=True)]
        made = module(monkeypatch, "worker").PackedWorker
        self.worker = made(self.codecs, pages, self.memory[:, : self.cell], PER_CHUNK, lambda: self.released.append(True))

    def bytes_of(self, group: int, block: int) -> list[torch.Tensor]:
        return [layer[block, : self.groups[group].page_bytes].clone() for layer in self.layers[group]]


def test_blocks_of_several_groups_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    assert engine.worker.submit_store(3, gpu([[4, 7, 1, 2], [5, 6]], [0, 2]), cpu([0, 3, 5]))
    (result,) = engine.worker.get_finished()
    assert (result.job_id, result.success) == (3, True)
    assert result.transfer_size == 4 * engine.codecs[0].nbytes + 2 * engine.codecs[1].nbytes
    kept = {(0, block): engine.bytes_of(0, block) for block in (4, 7, 1, 2)} | {(1, block): engine.bytes_of(1, block) for block in (5, 6)}
    padding = [layer[:, -64:].clone() for layer in engine.layers[0]]
    for layers in engine.layers:
        for layer in layers:
            layer[:, :-64] = 0
    # From the middle of the first chunk on, to other blocks; the last chunk in part.
    assert engine.worker.submit_load(4, cpu([0, 3, 5]), gpu([[9, 8], [11]], [1, 2]), expedited=True)
    engine.worker.wait({4})
    assert [one.job_id for one in engine.worker.get_finished()] == [4]
    for group, found, stored in ((0, 9, 7), (0, 8, 1), (1, 11, 5)):
        for one, other in zip(engine.bytes_of(group, found), kept[group, stored], strict=True):
            assert torch.equal(one, other)
    assert not any(layer[10, :-64].any() for layer in engine.layers[0])
    assert all(torch.equal(layer[:, -64:], old) for layer, old in zip(engine.layers[0], padding, strict=True))
    assert engine.worker.failed_blocks() == set()
    assert not engine.memory[:, engine.cell :].any()
    engine.worker.shutdown()
    assert engine.released == [True]


def test_a_damaged_row_is_a_block_that_was_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, "octopus-4")
    engine.layers[0][1][3].view(torch.bfloat16)[5] = float("nan")
    engine.worker.submit_store(1, gpu([[1, 2, 3], []], [0, 0]), cpu([0, 1]))
    assert engine.worker.get_finished()[0].success
    assert (engine.worker.encoded, engine.worker.refused) == (2, 1)
    engine.memory[0, 500] ^= 4
    before = engine.bytes_of(0, 7) + engine.bytes_of(0, 9)
    engine.worker.submit_load(2, cpu([0, 1]), gpu([[7, 8, 9], []], [0, 0]))
    assert engine.worker.get_finished()[0].success
    assert engine.worker.failed_blocks() == {7, 9}
    assert engine.worker.failed_blocks() == set()
    assert (engine.worker.decoded, engine.worker.damaged) == (1, 2)
    assert all(torch.equal(one, old) for one, old in zip(engine.bytes_of(0, 7) + engine.bytes_of(0, 9), before, strict=True))


def test_what_a_tier_brings_back_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.worker.submit_store(1, gpu([[1, 2, 3, 4], [5, 6]], [0, 0]), cpu([0, 1, 2]))
    engine.worker.get_finished()
    engine.memory[1, 900] ^= 1
    view = memoryview(engine.memory.numpy())
    results = [JobResult(1, True), JobResult(2, True), JobResult(9, True), JobResult(3, False, [b"a" + bytes(4)])]
    submitted: list[int] = []
    tier = types.SimpleNamespace(
        lookups=AsyncLookupManager(), submit_load=lambda one: submitted.append(one.job_id), get_finished_jobs=lambda: results
    )
    keys = [b"a" + bytes(4), b"b" + bytes(4), b"c" + bytes(3) + b"\1"]
    module(monkeypatch, "promotions").check_promotions(tier, view, [[codec] for codec in engine.codecs], engine.cell, PER_CHUNK)
    for number, asked, chunks in ((1, keys, [0, 1, 2]), (2, [keys[0], keys[2]], [0, 0]), (3, keys, [0, 1, 2])):
        tier.submit_load(types.SimpleNamespace(job_id=number, keys=asked, chunk_ids=numpy.array(chunks)))
    assert submitted == [1, 2, 3]
    first, second, store, third = tier.get_finished_jobs()
    assert (first.success, first.successful_keys) == (False, [keys[0], keys[2]])
    # A chunk of another group is not read as one of this.
    assert (second.success, second.successful_keys) == (False, [keys[0]])
    assert (store.success, store.successful_keys) == (True, None)
    assert (third.success, third.successful_keys) == (False, [keys[0]])
    assert sorted(tier.lookups.missed) == [keys[1], keys[2]]
    assert tier.damaged_chunks == 2


def config(groups: tuple[Group, ...] = (ATTENTION, STATES), workers: int = 2, **changes: Any) -> Any:
    options = {
        "kvpack_groups": list(groups), "recipe": "octopus-4", "layout": "adjacent", "revision": "abc", "cpu_bytes_to_use": 1 << 20,
        **changes.pop("options", {}),
    }  # fmt: skip
    parallel = {"rank": 1, "world_size": workers, "pp_size": 1, "pcp_size": 1, "dcp_size": 1} | changes.pop("parallel", {})
    values = {
        "extra_config": {name: value for name, value in options.items() if value is not None},
        "groups": tuple(types.SimpleNamespace(layer_names=[str(n)], tokens_per_block=TOKENS) for n in range(len(groups))),
        "model": types.SimpleNamespace(name="m", dtype="bfloat16"),
        "cache": types.SimpleNamespace(tokens_per_hash=TOKENS, blocks_per_chunk=PER_CHUNK),
        "parallel": types.SimpleNamespace(**parallel),
        "worker_kv_bytes_per_block": sum(group.page_bytes * group.layers for group in groups),
        "canonical_layout": False, "replicated_layout": False, "engine_id": "e",
    } | changes  # fmt: skip
    return types.SimpleNamespace(**values)


def test_chunks_have_the_size_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    spec_class = module(monkeypatch, "spec").KvpackSpec
    spec = spec_class(config())
    cell = PER_CHUNK * max(codecs[0].nbytes for codecs in spec.codecs)
    assert spec.cpu_page_size_per_worker == cell
    assert spec.kv_bytes_per_chunk == -(-2 * cell // 4096) * 4096
    assert spec.num_chunks == (1 << 20) // spec.kv_bytes_per_chunk
    # Rows of another rank, group, model or recipe are not those of this one.
    names = {codec.namespace for codecs in spec.codecs for codec in codecs}
    assert len(names) == 4
    for other in (config(options={"revision": "abd"}), config(options={"layout": "split"}), config(options={"recipe": "octopus-3"})):
        assert not names & {codec.namespace for codecs in spec_class(other).codecs for codec in codecs}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config(options={"kvpack_groups": None}), 'write "kv_connector": "KvpackConnector"'),
        (config(options={"recipe": None}), "recipe is None, expected text"),
        (config(options={"layout": None}), "layout is missing"),
        (config(options={"cpu_bytes_to_use": 100}), "cpu_bytes_to_use is 100, and one chunk takes"),
        (config(options={"revision": None}), "nothing tells its weights"),
        (config(options={"secondary_tiers": [{"type": "kvpack"}]}), "the primary tier holds rows already"),
        (config(canonical_layout=True), "canonical_layout is set"),
        (config(parallel={"pp_size": 2}), "pp_size is 2, and kvpack's spec takes tensor parallelism alone"),
        (config(groups=()), "vLLM offloads 1 groups of cache layers, and the connector found 0"),
    ],
    ids=["connector", "recipe", "layout", "bytes", "weights", "tier", "canonical", "pipeline", "groups"],
)
def test_what_cannot_be_right_is_refused(given: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if message.startswith("vLLM offloads"):
        given.groups = (types.SimpleNamespace(layer_names=["a"], tokens_per_block=TOKENS),)
    with pytest.raises(InvalidParameter, match=message):
        module(monkeypatch, "spec").KvpackSpec(given)


def test_groups_are_read_from_vllms_own_description(monkeypatch: pytest.MonkeyPatch) -> None:
    class AttentionSpec:
        dtype, tokens_per_state, block_size = torch.bfloat16, 1, TOKENS

        def __init__(self, heads: int = HEADS, size: int = DIM, v: int | None = None, **values: Any) -> None:
            self.num_kv_heads, self.head_size, self.head_size_v = heads, size, size if v is None else v
            self.unpadded_page_size_bytes = TOKENS * heads * (self.head_size + self.head_size_v) * 2
            vars(self).update(values)

        @property
        def page_size_bytes(self) -> int:
            return int(self.unpadded_page_size_bytes)

    names = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec", "UniformTypeKVCacheSpecs")
    classes: dict[str, Any] = {name: type(name, (AttentionSpec,) if "Attention" in name or "Sliding" in name else (), {}) for name in names}
    classes["MLAAttentionSpec"] = type("MLAAttentionSpec", (classes["FullAttentionSpec"],), {})
    classes["SlidingWindowMLASpec"] = type("SlidingWindowMLASpec", (classes["SlidingWindowSpec"],), {})
    offloading = {"get_offloading_group_ids": lambda kv: range(len(kv.kv_cache_groups))}
    for name, values in (
        ("vllm.v1.kv_cache_interface", {"AttentionSpec": AttentionSpec, **classes}),
        ("vllm.distributed.kv_transfer.kv_connector.v1.offloading.config", offloading),
    ):
        made = types.ModuleType(name)
        vars(made).update(values)
        monkeypatch.setitem(__import__("sys").modules, name, made)

    mamba = classes["MambaSpec"]()
    vars(mamba).update(block_size=TOKENS, real_page_size_bytes=3000)
    latents = classes["MLAAttentionSpec"](heads=1, size=576, v=0)
    several = classes["UniformTypeKVCacheSpecs"]()
    given = [
        (classes["FullAttentionSpec"](), ATTENTION),
        (classes["SlidingWindowSpec"](), ATTENTION),
        (latents, Group(LAYERS, TOKENS, TOKENS * 576 * 2, "latents", 1, 512, 64, "bf16")),
        (classes["FullAttentionSpec"](dtype=torch.uint8), Group(LAYERS, TOKENS, ATTENTION.page_bytes)),
        (classes["FullAttentionSpec"](v=16), Group(LAYERS, TOKENS, TOKENS * HEADS * 48 * 2)),
        (mamba, Group(LAYERS, TOKENS, 3000)),
    ]
    vllm_config = types.SimpleNamespace(model_config=types.SimpleNamespace(hf_text_config=types.SimpleNamespace(qk_rope_head_dim=64)))
    groups = [types.SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"]) for spec, _ in given]
    assert groups_of(vllm_config, types.SimpleNamespace(kv_cache_groups=groups)) == [expected for _, expected in given]
    for other in (classes["FullAttentionSpec"](heads=4), classes["FullAttentionSpec"](heads=2 * HEADS, size=DIM // 2)):
        several.kv_cache_specs = {"a": classes["FullAttentionSpec"](), "b": other}
        one = types.SimpleNamespace(kv_cache_spec=several, layer_names=["a", "b"])
        with pytest.raises(InvalidParameter, match="are one group of 2 shapes of blocks"):
            groups_of(vllm_config, types.SimpleNamespace(kv_cache_groups=[one]))
    several.kv_cache_specs = {"a": classes["FullAttentionSpec"](), "b": classes["FullAttentionSpec"]()}
    one = types.SimpleNamespace(kv_cache_spec=several, layer_names=["a", "b"])
    assert groups_of(vllm_config, types.SimpleNamespace(kv_cache_groups=[one])) == [ATTENTION]


def test_latents_are_two_sides_of_a_block() -> None:
    group = Group(LAYERS, TOKENS, TOKENS * 576 * 2, "latents", 1, 512, 64, "bf16")
    layers = [torch.randn(3, TOKENS * 576, generator=torch.Generator().manual_seed(n)).bfloat16().view(torch.int8) for n in range(LAYERS)]
    pages = group.buffer("", layers)
    codec = PageCodec(group.recipe("octopus-4"), group.geometry)
    row = bytearray(codec.nbytes)
    assert codec.encode_into(pages, [2], [row]) == [None]
    assert codec.decode_into([row], pages, [0]) == [None]
    cells = [layer.view(torch.bfloat16).view(3, TOKENS, 576) for layer in layers]
    for cell in cells:
        assert torch.equal(cell[0, :, 512:], cell[2, :, 512:])
        error = (cell[0, :, :512].float() - cell[2, :, :512].float()).norm() / cell[2, :, :512].float().norm()
        assert 0.01 < error < 0.12
