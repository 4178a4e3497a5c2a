"""KvpackTier: a secondary tier of vLLM's TieringOffloadingSpec that uses a kvpack store.

It runs in vLLM's scheduler and never blocks it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext, get_offload_group_idx
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvpack.coding.recipes import Recipe
from kvpack.formats.errors import InvalidParameter
from kvpack.integrations.recipes import check_layers, recipe_with_basis
from kvpack.store.encryption import read_key_file
from kvpack.store.page_store import Job, PageStore

from .groups import BLOCK_OFFSETS, GROUPS, Group, check_groups, require_layout
from .identities import SETTINGS, check_version, page_identity
from .metrics import TierMetrics, tier_definitions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvpack.pages.buffer import PageBuffer


class GroupStore(NamedTuple):
    """The store of one group of cache layers, and the chunks of the primary tier as pages of that group."""

    store: PageStore
    pages: PageBuffer


class _RunningJob(NamedTuple):
    """A vLLM job, which is split into one store job for each group of cache layers. ``parts`` contains their stores, jobs and keys."""

    metadata: Any
    parts: list[tuple[PageStore, Job, list[bytes]]]

    @property
    def done(self) -> bool:
        return all(job.done for _, job, _ in self.parts)


class KvpackTier(SecondaryTierManager):  # type: ignore[misc]
    """A secondary tier that stores chunks of vLLM's primary tier as rows in ``location``, encoded with ``recipe`` by ``threads`` threads.

    vLLM passes bytes without their shape, so the connector passes the model's groups of cache layers and their offsets in a chunk.
    Attention and MLA are encoded, and everything else, such as Mamba states, is stored byte for byte. ``layout`` is a name from
    ``layouts.arrangement``. ``revision`` identifies the weights if vLLM's model is not a folder, and ``basis`` is the basis file, if the
    recipe needs one. ``max_bytes`` and ``encryption_key_file`` are as for a store. ``any_version`` allows a vLLM version that was not
    tested.

    Raises InvalidParameter for an impossible configuration, before vLLM starts serving: an untested version, several cache groups with
    several blocks per chunk, mismatched sizes, or a connector that does not pass the model's settings.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        location: Any,
        recipe: str,
        layout: str = "",
        threads: int = 2,
        max_bytes: int | None = None,
        basis: str | None = None,
        revision: str | None = None,
        adapter: str = "",
        tenant: str = "",
        encryption_key_file: str | None = None,
        any_version: bool = False,
        locality: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = offloading_spec.config
        version = check_version(vllm.__version__, any_version)
        settings = config.extra_config.get(SETTINGS)
        if settings is None:
            raise InvalidParameter(
                "the model's overrides, quantization and load format are unknown, because only KvpackConnector passes them on: "
                'set "kv_connector": "KvpackConnector" and "placement": "store"'
            )
        groups = config.extra_config[GROUPS]
        packed = recipe_with_basis(recipe, basis, config.model.name)
        _check_layout(config, groups, layout)
        chunks = _chunk_groups(config, groups)
        if chunks[0].group.layers != len(config.groups[0].layer_names):
            check_layers(packed.text, "a row holds several blocks of a layer, or those of several workers")
        check_groups(packed, groups, config.groups[0].layer_names)
        encryption = None if encryption_key_file is None else read_key_file(encryption_key_file)
        memory = torch.from_numpy(numpy.asarray(primary_kv_view)).view(torch.uint8)
        self.stores: dict[int, GroupStore] = {}
        """The store of each group, keyed by the group's number in vLLM's keys."""
        for cache_group, (group, block_offsets), named in zip(groups, chunks, config.groups, strict=True):
            if current_platform.is_cpu() and group.kind == "attention":
                from .cpu import check_layout

                check_layout(layout, group)
            shape = {
                "layout": layout, "kv_cache_layout": config.kv_cache_layout, "layers": named.layer_names, "settings": settings, **version,
            }  # fmt: skip
            if len(groups) > 1 or group.kind != "attention":
                shape["group"] = repr(cache_group)
            given = Recipe(group.page_recipe(packed.text), packed.basis)
            identity = page_identity(config, given, shape, revision, adapter, tenant)
            store = PageStore(location, identity, group.geometry, threads=threads, jobs=2, max_bytes=max_bytes, encryption=encryption)
            self.stores[named.group_id] = GroupStore(store, group.buffer(layout, [memory[:, offset:] for offset in block_offsets]))
        self._running: dict[int, _RunningJob] = {}
        self._lookups, self._metrics = _LookupManager(self), TierMetrics([store for store, _ in self.stores.values()], tier_type)
        # A child of vLLM's own logger, which vLLM shows.
        logging.getLogger("vllm.kvpack").info(
            "kvpack packs pages with %s, %.2f times smaller, into its store", recipe,
            sum(store.codec.geometry.raw_bytes for store, _ in self.stores.values())
            / sum(store.codec.nbytes for store, _ in self.stores.values()),
        )  # fmt: skip

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return HIT if a chunk is stored, MISS if it is not, and RETRY until the lookup thread has looked it up."""
        result = self._lookups.lookup(key, req_context)
        return LookupResult.RETRY if result is None else LookupResult.HIT if result else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    def submit_store(self, job_metadata: Any) -> None:
        """Start encoding and storing chunks. Existing chunks are kept. The store evicts entries itself."""
        # vLLM's keys are unordered, but a prefix must be evicted from its end, so sort the keys of a request by position.
        positions = getattr(job_metadata.req_context, "_offload_key_positions", {})
        chunks = dict(zip(job_metadata.keys, job_metadata.chunk_ids, strict=True))
        keys = sorted(chunks, key=lambda key: positions.get(key, 0))
        first = min((positions[key] for key in keys if key in positions), default=0)
        before = sorted((key for key, position in positions.items() if position < first), key=lambda key: positions[key])
        ordered = replace(job_metadata, keys=keys, chunk_ids=[chunks[key] for key in keys])

        def put(group_store: GroupStore, keys: list[bytes], chunk_ids: list[int], group: int) -> Job:
            ancestors = [bytes(key) for key in before if get_offload_group_idx(key) == group]
            return group_store.store.submit_put(keys, group_store.pages, chunk_ids, ancestors=ancestors)

        self._begin(ordered, put)

    def submit_load(self, job_metadata: Any) -> None:
        """Start loading chunks into the primary tier. A damaged chunk is a miss, and does not affect others."""
        self._begin(job_metadata, lambda source, keys, chunk_ids, group: source.store.submit_get(keys, source.pages, chunk_ids))

    def get_finished_jobs(self) -> Iterable[Any]:
        for store, _ in self.stores.values():
            # The call only makes the store forget its finished jobs.
            store.finished()
        done = [running for running in self._running.values() if running.done]
        result = []
        for metadata, parts in done:
            del self._running[metadata.job_id]
            stored = {key for _, job, keys in parts for key in compress(keys, _chunk_results(job))}
            size = sum(store.codec.nbytes * sum(key in stored for key in keys) for store, _, keys in parts)
            good = [key for key in metadata.keys if bytes(key) in stored]
            failed = [key for key in metadata.keys if bytes(key) not in stored]
            if metadata.is_promotion and failed:
                # Otherwise, vLLM would keep requesting chunks that the lookup had reported.
                self._lookups.mark_miss(failed)
            result.append(JobResult(metadata.job_id, not failed, good or None, transfer_bytes=size))
        return result

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Do nothing. Loading a chunk records its use, and a request to a server would block the scheduler here."""

    def has_pending_work(self) -> bool:
        return bool(self._running)

    def drain_jobs(self) -> None:
        for store, _ in self.stores.values():
            store.drain()

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        return tier_definitions()

    def get_stats(self) -> Any:
        """Return the increments of the store's counters since the last call, for vLLM's own metrics."""
        return self._metrics.pop_stats()

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._metrics.close()
        for store, _ in self.stores.values():
            store.close()
        # Their pages are views of vLLM's memory.
        self.stores.clear()

    def _begin(self, metadata: Any, submit: Callable[[GroupStore, list[bytes], list[int], int], Job]) -> None:
        """Start a job that calls ``submit(store, keys, chunk_ids, group)`` for the chunks of each group."""
        chunks = dict(zip((bytes(key) for key in metadata.keys), map(int, metadata.chunk_ids), strict=True))
        parts = []
        for group, to in self.stores.items():
            keys = [key for key in chunks if get_offload_group_idx(key) == group]
            if keys:
                parts.append((to.store, submit(to, keys, [chunks[key] for key in keys], group), keys))
        self._running[metadata.job_id] = _RunningJob(metadata, parts)


class _LookupManager(AsyncLookupManager):  # type: ignore[misc]
    """A thread that looks up chunks in the tier's stores, based on vLLM's own lookup thread."""

    def __init__(self, tier: KvpackTier) -> None:
        self._stores = {group: store for group, (store, _) in tier.stores.items()}
        super().__init__(tier_type=tier.tier_type)

    def batch_lookup(self, keys: Sequence[bytes], req_context: Any) -> list[bool]:
        present: dict[bytes, bool] = {}
        for group, store in self._stores.items():
            own = [bytes(key) for key in keys if get_offload_group_idx(key) == group]
            present |= zip(own, store.contains(own), strict=True)
        return [present.get(bytes(key), False) for key in keys]


def _chunk_results(job: Job) -> list[bool]:
    """Return a bool for each chunk: True if it was stored or loaded. All are False if the job failed."""
    try:
        return job.results or [False] * len(job.keys)
    except Exception:
        return [False] * len(job.keys)


class _ChunkGroup(NamedTuple):
    """A group of cache layers, and the offset in bytes of each layer's block in a chunk."""

    group: Group
    block_offsets: list[int]


def _check_layout(config: Any, groups: Sequence[Group], layout: str) -> None:
    """Raise InvalidParameter if the layout is missing, or contradicts the name of vLLM's layout."""
    require_layout(groups, layout)
    last = {"adjacent": "HNC", "adjacent-tokens-first": "NHC"}.get(layout, "")
    if config.kv_cache_layout is not None and not config.kv_cache_layout.endswith(last):
        raise InvalidParameter(
            f"layout is {layout!r}, but vLLM stores the cache as {config.kv_cache_layout}: set layout to 'adjacent' if that ends in HNC, "
            "or to 'adjacent-tokens-first' if it ends in NHC"
        )


def _chunk_groups(config: Any, groups: Sequence[Group]) -> list[_ChunkGroup]:
    """Return the groups with the offsets of their blocks in a chunk. Raises InvalidParameter if the configuration does not match.

    A chunk contains the blocks of every worker, each with the blocks of every layer.
    """
    blocks, workers, block_bytes = config.cache.blocks_per_chunk, config.parallel.world_size, config.worker_kv_bytes_per_block
    if config.canonical_layout or config.replicated_layout:
        raise InvalidParameter(
            'a store needs the direct layout of rows, but vLLM\'s is canonical or replicated: use "placement": "primary"'
        )
    if len(groups) > 1 and blocks > 1:
        raise InvalidParameter(
            f"the model has {len(groups)} groups of cache layers, and a chunk has {blocks} blocks, but vLLM does not report which of them "
            "a sliding window has left empty. Omit block_size and blocks_per_chunk from kv_connector_extra_config, so that a chunk is "
            'one block, or use "placement": "primary"'
        )
    result = []
    for group, block_offsets, named in zip(groups, config.extra_config[BLOCK_OFFSETS], config.groups, strict=True):
        if len(block_offsets) * config.parallel.pp_size != len(named.layer_names):
            raise InvalidParameter(
                f"the first pipeline stage has {len(block_offsets)} of the {len(named.layer_names)} layers "
                f"{', '.join(named.layer_names)}, but a store needs the same number from each stage: "
                'use "placement": "primary"'
            )
        end = max(block_offsets) + group.page_bytes
        if end > block_bytes:
            raise InvalidParameter(
                f"the layers {', '.join(named.layer_names)} need {end} bytes per block, but vLLM allots {block_bytes} for all layers; "
                "kvpack does not support this layout: use vLLM's fs tier"
            )
        starts = [
            worker * block_bytes * blocks + offset * blocks + block * group.page_bytes
            for worker in range(workers)
            for offset in block_offsets
            for block in range(blocks)
        ]
        result.append(_ChunkGroup(replace(group, layers=len(starts)), starts))
    return result
