"""KvpackHiCache: HiCache storage in a PageStore. Pages are packed from SGLang's host pool, and unpacked directly into it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import takewhile
from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvpack.formats.errors import InvalidParameter
from kvpack.identity.identity import Identity
from kvpack.integrations.counter_changes import CounterChanges
from kvpack.integrations.recipes import check_layers, recipe_with_basis
from kvpack.pages.buffer import PageBuffer
from kvpack.pages.geometry import DTYPES, PageGeometry
from kvpack.store.counters import MAX_RECENT, NAMES, SECONDS
from kvpack.store.page_store import PageStore

PREFIX = "sglang:kvpack_"


@lru_cache(maxsize=1)
def _metrics() -> dict[str, Any]:
    """Return this process's prometheus_client metrics by name. Empty if prometheus_client is not installed."""
    try:
        from prometheus_client import Counter, Gauge, Histogram
    except ImportError:
        return {}
    labels = ["pool", "tp_rank", "pp_rank"]
    result: dict[str, Any] = {
        name: Counter(PREFIX + name, meaning, [*labels, "operation", "reason"] if name == "faults" else labels)
        for name, meaning in NAMES.items()
    }
    sizes = {"page_bytes": "Size in bytes of a page in the host pool.", "row_bytes": "Size in bytes of a page packed as a row."}
    for name, meaning in sizes.items():
        result[name] = Gauge(PREFIX + name, meaning, labels, multiprocess_mode="mostrecent")
    result["seconds"] = Histogram(
        PREFIX + "seconds", "Duration in seconds of loading or saving pages, by operation.", [*labels, "operation"], buckets=SECONDS
    )
    return result


class StoreMetrics:
    """Reports the store counters of one pool to prometheus_client."""

    def __init__(self, store: PageStore, pool: str, ranks: Sequence[int]) -> None:
        self._store, self._labels, self._changes = store, (pool, *map(str, ranks)), CounterChanges(store)

    def report(self) -> None:
        metrics = _metrics()
        if not metrics:
            return
        for labels, added in self._changes.pop_increments().items():
            metrics[labels[0]].labels(*self._labels, *labels[1:]).inc(added)
        for operation, seconds in self._store.pop_recent():
            metrics["seconds"].labels(*self._labels, operation).observe(seconds)
        metrics["page_bytes"].labels(*self._labels).set(self._store.codec.geometry.raw_bytes)
        metrics["row_bytes"].labels(*self._labels).set(self._store.codec.nbytes)


_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_OPTIONS = {"location", "recipe", "basis", "revision", "adapter", "tenant", "threads", "max_bytes", "encryption_key_file"}
_SGLANG = {"backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path"}
"""SGLang's own settings in ``extra_config``. SGLang adds the last one itself, for ``--file-storage-path``."""
_PACKED = {"swa", "auxiliary_swa"}
"""Additional pools with keys and values. The pages of all other pools are kept byte for byte."""
_SETTINGS = (
    "dtype", "kv_cache_dtype", "mamba_ssm_dtype", "enable_int8_mamba_checkpoint", "quantization", "quantization_param_path",
    "modelopt_quant", "modelopt_checkpoint_restore_path", "quantize_and_serve", "rl_quant_profile", "load_format",
    "model_loader_extra_config", "custom_weight_loader", "kt_weight_path", "kt_method", "revision", "weight_version",
    "decrypted_config_file", "json_model_override_args", "model_impl", "context_length", "dllm_algorithm", "dllm_algorithm_config",
    "enable_hisparse", "hisparse_config", "forward_hooks", "enable_quant_communications", "enable_w4a4_mxfp4_megamoe",
    "flashinfer_mxfp4_moe_precision", "deepep_dispatcher_output_dtype", "prefill_kv_cache_dequant_dtype", "mm_process_config",
)  # fmt: skip
"""Arguments of SGLang's server that affect keys, values and states, in addition to the model's folder."""
_DRAFT = "draft"
"""Prefix of the pool names of a draft model."""
_DRAFT_SETTINGS = (
    "speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision", "speculative_draft_model_quantization",
    "speculative_draft_load_format", "speculative_draft_kv_cache_dtype",
)  # fmt: skip
"""Additional settings that affect the pages of a draft model."""


class KvpackHiCache(HiCacheStorage):  # type: ignore[misc]
    """A HiCache storage backend that stores pages of host pools. Entries are named by SGLang's own hashes, which cover tokens and salt.

    An identity covers everything else that the pages depend on. The geometry of a pool is read when SGLang registers the pool.

    Options are passed in ``extra_config``: ``location``, ``recipe``, ``max_bytes``, ``threads``, ``adapter``, ``tenant``, ``basis`` and
    ``revision``. ``basis`` is the basis file of a recipe that needs one. ``revision`` identifies the weights if the model is not a folder.
    Methods are called by threads of SGLang's cache controller, and may block. Raises InvalidParameter, which makes SGLang's request to
    attach the backend fail.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        self._config = storage_config
        self._options = {name: value for name, value in (storage_config.extra_config or {}).items() if name not in _SGLANG}
        unknown = set(self._options) - _OPTIONS
        if unknown or not {"location", "recipe"} <= set(self._options):
            raise InvalidParameter(
                f"extra_config has {', '.join(sorted(self._options)) or 'nothing'} for kvpack, expected location and recipe, and "
                f"optionally {', '.join(sorted(_OPTIONS - {'location', 'recipe'}))}"
            )

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store for the pages of the main pool."""
        super().register_mem_pool_host(mem_pool_host)
        self._pools: dict[str, Pool] = {}
        pages = pool_buffer(mem_pool_host)
        self._kv = self._create_pool(self._create_store(mem_pool_host, pages.geometry, ""), mem_pool_host, pages, "kv")
        self.store = self._kv.store

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Open the store for another pool. Pages of sliding-window layers are packed; those of other pools are kept byte for byte."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = _enum_name(host_pool_name)
        if host_pool is self.mem_pool_host:
            self._pools[name] = self._kv
            return
        pages = pool_buffer(host_pool) if name in _PACKED and hasattr(host_pool, "k_buffer") else None
        geometry = PageGeometry.of_bytes(host_pool.get_dummy_flat_data_page().nbytes) if pages is None else pages.geometry
        recipe = "raw" if pages is None else None
        self._pools[name] = self._create_pool(self._create_store(host_pool, geometry, name, recipe), host_pool, pages, name)

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return the longest prefix for which every pool has the pages that it needs. Raises InvalidParameter for an unknown hit policy."""
        from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

        pages = self.batch_exists(keys)
        hits: dict[Any, int] = {"kv": pages} if pages else {}
        usable = list(range(1, pages + 1))
        for transfer in pool_transfers or ():
            present = self._pools[_enum_name(transfer.name)].store.contains(_key_bytes(keys[:pages]))
            match _enum_name(transfer.hit_policy):
                case "all_pages":
                    longest = sum(1 for _ in takewhile(bool, present))
                    possible = set(range(1, longest + 1))
                case "trailing_pages":
                    last = max(1, len(transfer.keys or ()))
                    possible = {count for count in range(1, pages + 1) if all(present[max(0, count - last) : count])}
                    longest = max(possible, default=0)
                case policy:
                    raise InvalidParameter(f"the pool {transfer.name} has hit policy {policy!r}, expected all_pages or trailing_pages")
            if longest:
                hits[transfer.name] = longest
            usable = [count for count in usable if count in possible]
        return PoolTransferResult(usable[-1] if usable else 0, hits, usable)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Load pages of several pools. For each pool, the result has a bool per key: True if its page was loaded."""
        return {
            transfer.name: self._pools[_enum_name(transfer.name)].get(transfer.keys or (), transfer.host_indices) for transfer in transfers
        }

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store pages of several pools. For each pool, the result has a bool per key: True if its page is stored now."""
        ancestors = _key_bytes(getattr(extra_info, "prefix_keys", None) or ())
        return {
            transfer.name: self._pools[_enum_name(transfer.name)].set(transfer.keys or (), transfer.host_indices, ancestors)
            for transfer in transfers
        }

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        return sum(takewhile(bool, self.store.contains(_key_bytes(keys))))

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._kv.get(keys, host_indices)

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._kv.set(keys, host_indices, _key_bytes(getattr(extra_info, "prefix_keys", None) or ()))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> NoReturn:
        _refuse_copying()

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> NoReturn:
        _refuse_copying()

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> NoReturn:
        _refuse_copying()

    def batch_set(self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> NoReturn:
        _refuse_copying()

    def get_stats(self) -> Any:
        """Return the number of pages and the speed in GB/s of each call, for SGLang's storage metrics, and report kvpack's own counters."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        stats = StorageMetrics()
        for pool in self._every_pool():
            pool.metrics.report()
            loads, saves = pool.pop_calls()
            for calls, pages, speeds in (
                (loads, stats.prefetch_pgs, stats.prefetch_bandwidth), (saves, stats.backup_pgs, stats.backup_bandwidth),
            ):  # fmt: skip
                pages += [count for count, _ in calls]
                speeds += [speed for _, speed in calls]
        return stats

    def clear(self) -> None:
        """Remove all pages that this rank has stored, in every pool.

        Raises WriteFailed if some pages could not be removed. SGLang's endpoint reports success even then.
        """
        for pool in self._every_pool():
            pool.store.clear()

    def close(self) -> None:
        for pool in self._every_pool():
            pool.store.close()

    def _every_pool(self) -> list[Pool]:
        return list({id(pool): pool for pool in (self._kv, *self._pools.values())}.values())

    def _create_pool(self, store: PageStore, pool: Any, pages: PageBuffer | None, name: str) -> Pool:
        return Pool(store, pool, pages, StoreMetrics(store, name, (self._config.tp_rank, self._config.pp_rank)))

    def _create_store(self, pool: Any, geometry: PageGeometry, name: str, recipe: str | None = None) -> PageStore:
        packed = recipe_with_basis(self._options["recipe"], self._options.get("basis"), str(self._config.model_name or ""))
        if name or self._config.pp_size > 1:
            for recipe_text in (self._options["recipe"], packed.text):
                check_layers(recipe_text, "this pool does not hold all layers of the model")
        options = {**self._options, "recipe": packed if recipe is None else recipe}
        store = PageStore(
            options["location"],
            _page_identity(self._config, options, pool, name, arranged=recipe is not None),
            geometry,
            threads=int(options.get("threads", 1)),
            max_bytes=options.get("max_bytes"),
            encryption=_encryption_keys(options),
        )
        ratio = geometry.raw_bytes / store.codec.nbytes
        logging.getLogger("kvpack").info("kvpack packs pages with %s, %.2f times smaller, into its store", store.codec.recipe.text, ratio)
        return store


class Pool:
    """A host pool and its store. ``pages`` is the pool's memory, or None if its pages are flat and kept byte for byte."""

    def __init__(self, store: PageStore, pool: Any, pages: PageBuffer | None, metrics: StoreMetrics) -> None:
        self.store, self.metrics, self._pool, self._pages = store, metrics, pool, pages
        self._size = getattr(pool, "page_size", 1) or 1
        self._calls: dict[str, deque[tuple[int, float]]] = {kind: deque(maxlen=MAX_RECENT) for kind in ("load", "save")}

    def get(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        """Load pages into the pool. Returns a bool per key: True if its page was loaded."""
        with self._time_operation("load", len(keys)):
            return self._get(keys, host_indices)

    def set(self, keys: Sequence[str], host_indices: torch.Tensor, ancestors: Sequence[bytes]) -> list[bool]:
        """Store pages of the pool. Returns a bool per key: True if its page is stored now."""
        with self._time_operation("save", len(keys)):
            return self._set(keys, host_indices, ancestors)

    def pop_calls(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Return the loads and the saves since the last call as (pages, GB/s of pool bytes) pairs, at most ``MAX_RECENT`` of each."""
        result = []
        for calls in self._calls.values():
            result.append([calls.popleft() for _ in range(len(calls))])
        return result[0], result[1]

    @contextmanager
    def _time_operation(self, kind: str, pages: int) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        if pages:
            seconds = max(time.perf_counter() - begun, 1e-9)
            self._calls[kind].append((pages, pages * self.store.codec.geometry.raw_bytes / seconds / 1e9))

    def _get(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        starts = self._page_starts(keys, host_indices)
        if self._pages is not None:
            return self.store.get_into(_key_bytes(keys), self._pages, [start // self._size for start in starts])
        flat = [self._pool.get_dummy_flat_data_page() for _ in keys]
        loaded = self.store.get_into(_key_bytes(keys), [self._as_slot(page) for page in flat], [0] * len(flat))
        for is_loaded, start, page in zip(loaded, starts, flat, strict=True):
            if is_loaded:
                self._pool.set_from_flat_data_page(start, page)
        return loaded

    def _set(self, keys: Sequence[str], host_indices: torch.Tensor, ancestors: Sequence[bytes]) -> list[bool]:
        starts = self._page_starts(keys, host_indices)
        if self._pages is not None:
            return self.store.put(_key_bytes(keys), self._pages, [start // self._size for start in starts], ancestors=ancestors)
        flat = [self._pool.get_data_page(start, flat=True).contiguous() for start in starts]
        return self.store.put(_key_bytes(keys), [self._as_slot(page) for page in flat], [0] * len(flat), ancestors=ancestors)

    def _as_slot(self, page: torch.Tensor) -> PageBuffer:
        geometry = self.store.codec.geometry
        return PageBuffer(geometry, page.view(torch.uint8).view(1, 1, 1, geometry.tokens, geometry.dim_k))

    def _page_starts(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[int]:
        starts: list[int] = host_indices[:: self._size].tolist()
        if len(starts) != len(keys) or (self._pages is not None and any(start % self._size for start in starts)):
            raise InvalidParameter(
                f"{len(keys)} keys were passed for indices of {len(starts)} pages, which begin at {starts[:8]}: pass one key per page, and "
                f"indices of whole pages of {self._size} tokens"
            )
        return starts


def pool_buffer(pool: Any) -> PageBuffer:
    """Return SGLang's host pool as a buffer with one slot per page. Raises InvalidParameter if the pool's layout is unknown."""
    layers, tokens, pages = pool.layer_num, pool.page_size, pool.page_num
    if pool.dtype not in _NAMES:
        raise InvalidParameter(f"the host pool has dtype {pool.dtype}, expected one of {', '.join(map(str, _NAMES))}")
    for info in getattr(pool, "_buffer_infos", ()):
        if _enum_name(info.buffers.layout) not in ("nhd", "paged_nhd"):
            raise InvalidParameter(
                f"SGLang keeps values in the layout {_enum_name(info.buffers.layout)!r}, expected nhd: use another backend"
            )
    if hasattr(pool, "kv_lora_rank"):
        latent, rotary_dim = pool.kv_lora_rank, pool.qk_rope_head_dim
        geometry = PageGeometry(layers, 1, tokens, latent, rotary_dim, _NAMES[pool.dtype])
        _check_only_keys_and_values(pool, geometry)
        cells = _layer_views(pool.kv_buffer, pool.layout, layers, tokens, pages)
        return PageBuffer(geometry, [x[..., :latent] for x in cells], [x[..., latent:] for x in cells])
    geometry = PageGeometry(layers, pool.head_num, tokens, pool.head_dim, pool.head_dim, _NAMES[pool.dtype])
    if getattr(pool, "v_head_dim", pool.head_dim) != pool.head_dim:
        raise InvalidParameter(
            f"the host pool has keys of dim {pool.head_dim} and values of dim {pool.v_head_dim}, expected equal dims: use another backend"
        )
    _check_only_keys_and_values(pool, geometry)
    return PageBuffer(geometry, *(_layer_views(x, pool.layout, layers, tokens, pages) for x in (pool.k_buffer, pool.v_buffer)))


def _check_only_keys_and_values(pool: Any, geometry: PageGeometry) -> None:
    """Raise InvalidParameter if a pool stores anything besides keys and values, such as scales."""
    kept = pool.get_size_per_token() * pool.page_size
    if kept != geometry.raw_bytes:
        raise InvalidParameter(
            f"the host pool holds {kept} bytes per page, but its keys and values take {geometry.raw_bytes}: kvpack does not support "
            "pools with scales, indices or packed rows; use another backend"
        )


def _relevant_settings(pool: Any, name: str) -> list[str]:
    """Return the SGLang settings that affect the pages of the pool ``name``.

    Raises InvalidParameter if a setting is needed but unknown.
    """
    from sglang.srt.runtime_context import get_server_args

    try:
        arguments = get_server_args()
    except ValueError:
        # Host pools can be used without a server.
        if getattr(pool, "dtype", None) == torch.uint8:
            raise InvalidParameter(
                "the host pool holds bytes of an unknown dtype, because no SGLang server is running: start one with --kv-cache-dtype"
            ) from None
        return []
    names = (*_SETTINGS, *(_DRAFT_SETTINGS if name.startswith(_DRAFT) else ()))
    unknown = [setting for setting in names if not hasattr(arguments, setting)]
    if unknown:
        raise InvalidParameter(
            f"the installed version of SGLang has no server argument {', '.join(unknown)}, on which pages depend: kvpack was tested "
            "with SGLang 0.5.23; install that version"
        )
    return [f"{setting}={getattr(arguments, setting)}" for setting in names]


def _layer_views(x: torch.Tensor, layout: str, layers: int, tokens: int, pages: int) -> list[torch.Tensor]:
    """Return a view ``[page, head, token, channel]`` of ``x`` for each layer."""
    match layout:
        case "layer_first":
            return [x[n].view(pages, tokens, *x.shape[2:]).transpose(1, 2) for n in range(layers)]
        case "page_first":
            return [x.view(pages, tokens, *x.shape[1:])[:, :, n].transpose(1, 2) for n in range(layers)]
        case "page_first_direct":
            return [x[:, n].transpose(1, 2) for n in range(layers)]
        case "page_head":
            return [x[:, :, :, n] for n in range(layers)]
    raise InvalidParameter(f"the host pool has layout {layout!r}, expected layer_first, page_first, page_first_direct or page_head")


def _page_identity(config: Any, options: dict[str, Any], pool: Any, name: str, arranged: bool) -> Identity:
    """Return the identity of pages. It covers everything that they depend on, except tokens and salt.

    With ``arranged``, pages are raw bytes in the order of the pool's layout. The layout is then part of the identity. Rows of packed values
    are the same for all layouts.
    """
    model, tag, revision = str(config.model_name or ""), getattr(pool, "storage_format_tag", None), options.get("revision")
    if tag is not None:
        # SGLang appends the tag to the name, which may be the path of a folder.
        model = model.removesuffix(f"-{tag}")
    names = ["tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size", "is_mla_model", "should_split_heads"]
    # All ranks of a model with latents have the same pages.
    names += [] if config.is_mla_model else ["tp_rank", "dp_rank"]
    parallel = {name: getattr(config, name, None) for name in names}
    arrangement = [str(getattr(pool, "layout", "")), str(tag)] if arranged else [] if tag is None else [str(tag)]
    shape = [parallel, pool.page_size, *([name] if name else []), *arrangement, *_relevant_settings(pool, name)]
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()
    kept: Any = getattr(pool, "dtype", None)
    recipe, dtype = options["recipe"], _NAMES.get(kept, "u8")
    adapter, tenant = options.get("adapter", ""), options.get("tenant", "")
    if os.path.isdir(model):
        return Identity.of_engine(
            model, recipe, kv_dtype=dtype, layout=digest, revision=revision, adapter=adapter, tenant=tenant, extra="sglang"
        )
    if revision is None:
        raise InvalidParameter(f"the model {model!r} is not a folder: set revision in extra_config, for example to the commit on the hub")
    return Identity(model, recipe, weights=revision, adapter=adapter, dtype=dtype, tenant=tenant, extra=f"layout={digest}; sglang")


def _encryption_keys(options: dict[str, Any]) -> dict[str, bytes] | None:
    from kvpack.store.encryption import read_key_file

    path = options.get("encryption_key_file")
    return None if path is None else read_key_file(path)


def _enum_name(value: Any) -> str:
    """Return a name from SGLang, which may be a member of an enumeration, as text."""
    return str(getattr(value, "value", value))


def _key_bytes(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _refuse_copying() -> NoReturn:
    raise InvalidParameter('kvpack packs pages in the host pool itself: set "interface_v1": 1 in the extra config')
