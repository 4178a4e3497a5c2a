"""KvpackTier: a secondary tier of vLLM's TieringOffloadingSpec over a PageStore. It runs in vLLM's scheduler, which it never blocks."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy
import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvpack.formats.errors import InvalidParameter
from kvpack.integrations.recipes import check_layer_names, check_layers, recipe_with_basis
from kvpack.store.key_files import read_key_file
from kvpack.store.page_store import PageStore

from .identities import SETTINGS, identity_of
from .layouts import DTYPES, Rows
from .metrics import TierMetrics, tier_definitions
from .versions import check_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvpack.store.page_store import Job


class KvpackTier(SecondaryTierManager):  # type: ignore[misc]
    """A secondary tier that stores chunks of vLLM's primary tier as rows in ``location``, encoded with ``recipe`` by ``threads`` threads.

    vLLM passes bytes without their shape, so ``heads`` (KV heads of one worker) and ``head_dim`` come from the connector, and are compared
    with the bytes of a block, as is ``layout``, a name of ``layouts.arrangement``. ``revision`` names the weights if vLLM's model is not a
    folder, and ``basis`` is the file of the basis that a recipe may need. ``max_bytes`` and ``encryption_key_file`` are those of a store.
    ``any_version`` allows a vLLM version that was not tested. Raises InvalidParameter before vLLM serves for an impossible configuration:
    another version, several cache groups, other sizes, and a connector that does not pass the model's settings.
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
        heads: int,
        head_dim: int,
        layout: str,
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
                "only KvpackConnector passes on the model's overrides, quantization and load format, without which chunks of different "
                'settings would be mistaken for one another: set "kv_connector": "KvpackConnector" and "placement": "store"'
            )
        rows = _rows(config, heads, head_dim, layout)
        packed = recipe_with_basis(recipe, basis, config.model.name)
        if rows.geometry.layers != len(config.groups[0].layer_names):
            check_layers(packed.text, "a row holds several blocks of a layer, or those of several workers")
        check_layer_names(packed.text, config.groups[0].layer_names)
        if current_platform.is_cpu():
            from .cpu import check_layout

            check_layout(rows, heads, config.groups[0].tokens_per_block, head_dim)
        shape = {
            "layout": layout, "kv_cache_layout": config.kv_cache_layout, "layers": config.groups[0].layer_names, "settings": settings,
            **version,
        }  # fmt: skip
        identity = identity_of(config, packed, shape, revision, adapter, tenant)
        encryption = None
        if encryption_key_file is not None:
            encryption = read_key_file(encryption_key_file)
        self.store = PageStore(location, identity, rows.geometry, threads=threads, jobs=2, max_bytes=max_bytes, encryption=encryption)
        memory = torch.from_numpy(numpy.asarray(primary_kv_view)).view(torch.uint8)
        self._pages = rows.buffer(memory)
        self._running: dict[int, Any] = {}
        self._lookups, self._metrics = _Lookups(self), TierMetrics(self.store, tier_type)
        ratio = rows.geometry.raw_bytes / self.store.codec.nbytes
        # A child of vLLM's own logger, which vLLM shows.
        logging.getLogger("vllm.kvpack").info("kvpack packs pages with %s, %.2f times smaller, into its store", recipe, ratio)

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return True if a chunk is stored, False if not, and RETRY until the lookup thread knows."""
        result = self._lookups.lookup(key, req_context)
        return LookupResult.RETRY if result is None else LookupResult.HIT if result else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    def submit_store(self, job_metadata: Any) -> None:
        """Start encoding and storing chunks. Existing chunks are kept, and the store evicts on its own."""
        # vLLM's keys are a set, and those of one request begin with the chunks of its earlier jobs: a prefix is evicted from its end on.
        positions = getattr(job_metadata.req_context, "_offload_key_positions", {})
        chunks = dict(zip(job_metadata.keys, job_metadata.chunk_ids, strict=True))
        keys = sorted(chunks, key=lambda key: positions.get(key, 0))
        first = min((positions[key] for key in keys if key in positions), default=0)
        before = sorted((key for key, position in positions.items() if position < first), key=lambda key: positions[key])
        ordered = replace(job_metadata, keys=keys, chunk_ids=[chunks[key] for key in keys])
        self._begin(ordered, partial(self.store.submit_put, ancestors=[bytes(key) for key in before]))

    def submit_load(self, job_metadata: Any) -> None:
        """Start loading chunks into rows of the primary tier. A damaged chunk is a miss and does not affect others."""
        self._begin(job_metadata, self.store.submit_get)

    def get_finished_jobs(self) -> Iterable[Any]:
        result = []
        for job in self.store.finished():
            metadata = self._running.pop(job.number)
            results = _results(job)
            good = [key for key, stored in zip(metadata.keys, results, strict=True) if stored]
            if metadata.is_promotion and len(good) < len(results):
                # Otherwise vLLM would ask for what the lookup said, again and again.
                self._lookups.mark_miss([key for key, loaded in zip(metadata.keys, results, strict=True) if not loaded])
            result.append(
                JobResult(metadata.job_id, len(good) == len(results), good or None, transfer_bytes=len(good) * self.store.codec.nbytes)
            )
        return result

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Do nothing, because loading a chunk records its use, and a request to a server here would block the scheduler."""

    def has_pending_work(self) -> bool:
        return bool(self._running)

    def drain_jobs(self) -> None:
        self.store.drain()

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        return tier_definitions()

    def get_stats(self) -> Any:
        """Return the increments of the store's counters since the last call, for vLLM's own metrics."""
        return self._metrics.take()

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._metrics.close()
        self.store.close()
        del self._pages

    def _begin(self, metadata: Any, submit: Any) -> None:
        job = submit([bytes(key) for key in metadata.keys], self._pages, [int(chunk) for chunk in metadata.chunk_ids])
        self._running[job.number] = metadata


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """A thread that looks up chunks in the tier's store, based on vLLM's own lookup thread."""

    def __init__(self, tier: KvpackTier) -> None:
        self._store = tier.store
        super().__init__(tier_type=tier.tier_type)

    def batch_lookup(self, keys: Sequence[bytes], req_context: Any) -> list[bool]:
        return self._store.present([bytes(key) for key in keys])


def _results(job: Job) -> list[bool]:
    """Return True for each chunk that was stored or loaded, or False for all if the job failed."""
    try:
        return job.results or [False] * len(job.keys)
    except Exception:
        return [False] * len(job.keys)


def _rows(config: Any, heads: int, head_dim: int, layout: str) -> Rows:
    """Return the layout of the primary tier's rows. Raises InvalidParameter if the configuration does not match."""
    if len(config.groups) != 1:
        raise InvalidParameter(
            f"the model has {len(config.groups)} groups of cache layers, as hybrid models do, but a store supports one: "
            'use "placement": "primary", or vLLM\'s fs tier'
        )
    (group,) = config.groups
    if config.canonical_layout or config.replicated_layout:
        raise InvalidParameter('a store needs the direct layout of rows, but it is canonical or replicated: use "placement": "primary"')
    if config.model.dtype not in DTYPES:
        raise InvalidParameter(
            f'the cache\'s dtype is {config.model.dtype}, but a store supports {", ".join(DTYPES)}: use "placement": "primary"'
        )
    workers = config.parallel.world_size
    blocks = workers * len(group.layer_names) // config.parallel.pp_size * config.cache.blocks_per_chunk
    tokens = group.tokens_per_block // max(1, config.parallel.pcp_size * config.parallel.dcp_size)
    rows = Rows(layout, blocks, heads, tokens, head_dim, DTYPES[config.model.dtype])
    last = {"adjacent": "HNC", "adjacent-tokens-first": "NHC"}.get(layout, "")
    if config.kv_cache_layout is not None and not config.kv_cache_layout.endswith(last):
        raise InvalidParameter(
            f"layout is {layout!r}, but vLLM keeps the cache in {config.kv_cache_layout}: layouts that end in HNC are adjacent, those that "
            "end in NHC adjacent-tokens-first"
        )
    expected = config.worker_kv_bytes_per_block * workers * config.cache.blocks_per_chunk
    if rows.nbytes != expected:
        raise InvalidParameter(
            f"a chunk of {len(group.layer_names)} layers, {tokens} tokens, {heads} heads of {head_dim} {config.model.dtype} has "
            f"{rows.nbytes} bytes, but vLLM's has {expected}: heads are the KV heads of one worker, and head_dim is that of the cache"
        )
    return rows
