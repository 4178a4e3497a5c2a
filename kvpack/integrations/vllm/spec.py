"""KvpackSpec: vLLM's TieringOffloadingSpec with rows in its primary tier. The worker packs pages in place.

vLLM's own secondary tiers store packed chunks unchanged. Loaded chunks are checked before a worker reads them.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
from dataclasses import replace
from typing import Any

import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.gpu_worker import pin_mmap_region
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvpack.coding.recipes import Recipe
from kvpack.formats.errors import InvalidParameter, InvalidType
from kvpack.integrations.recipes import recipe_with_basis
from kvpack.pages.codec import PageCodec

from .chunk_keys import attach_keys
from .groups import GROUPS, Group, check_groups, require_layout
from .identities import SETTINGS, check_version, page_identity
from .metrics import packing_metric_definitions
from .promotions import check_promotions
from .worker import PackedWorker


class KvpackSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """The offloading spec with which vLLM's workers pack pages into its primary tier.

    The options in ``kv_connector_extra_config`` are vLLM's own, and those of ``KvpackTier`` that do not concern its store. Raises
    InvalidParameter for an impossible configuration, before vLLM starts serving.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        options = self.extra_config
        version = check_version(vllm.__version__, bool(options.get("any_version", False)))
        groups: list[Group] | None = options.get(GROUPS)
        if groups is None:
            raise InvalidParameter('KvpackSpec is created by KvpackConnector: set "kv_connector": "KvpackConnector"')
        self._groups = groups
        given = recipe_with_basis(_required_text(options, "recipe"), options.get("basis"), config.model.name)
        self._recipe, self._layout = given.text, str(options.get("layout", ""))
        _check_config(config, groups)
        require_layout(groups, self._layout)
        check_groups(given, groups, config.groups[0].layer_names)
        shape = {"groups": [repr(group) for group in groups], "layers": [g.layer_names for g in config.groups], "layout": self._layout}
        identity = page_identity(
            config,
            self._recipe,
            shape | version,
            options.get("revision"),
            str(options.get("adapter", "")),
            str(options.get("tenant", "")),
        )
        # vLLM's tiers and peers distinguish caches by the fields of this configuration, so the name must distinguish rows from pages.
        # The settings are the scheduler's, which has the tiers: a worker's model may have changed its copy.
        name = hashlib.sha256(identity.digest + str(options[SETTINGS]).encode()).hexdigest()[:16]
        self.config = replace(config, model=replace(config.model, dtype=f"{config.model.dtype} in kvpack's rows {name}"))
        self._packed: PackedWorker | None = None
        copies = 1 if self.replicated_layout else config.parallel.world_size
        self._namespace, threads = identity.digest, int(options.get("threads", 1))
        self.codecs = [
            [
                PageCodec(
                    Recipe(group.page_recipe(self._recipe), given.basis),
                    group.geometry,
                    threads=threads,
                    namespace=self._row_namespace(number, rank),
                )
                for rank in range(copies)
            ]
            for number, group in enumerate(groups)
        ]
        self.cpu_page_size_per_worker = max(codecs[0].nbytes for codecs in self.codecs) * self.blocks_per_chunk
        # A chunk belongs to one group, and vLLM sizes chunks for the largest group.
        page_bytes = max(group.page_bytes * group.layers for group in groups)
        self.kv_bytes_per_chunk = -(-self.cpu_page_size_per_worker * copies // mmap.PAGESIZE) * mmap.PAGESIZE
        self.num_chunks = int(options["cpu_bytes_to_use"]) // self.kv_bytes_per_chunk
        info: Any = getattr(self, "cpu_info", None)
        if info is not None:
            # vLLM 0.33 publishes the size of its tier, which its constructor computes for unpacked pages.
            self.cpu_info = info.from_config(config, self.num_chunks, self.kv_bytes_per_chunk)
        self.ratio = page_bytes * self.blocks_per_chunk * copies / self.kv_bytes_per_chunk
        if not self.num_chunks:
            raise InvalidParameter(
                f"cpu_bytes_to_use is {options['cpu_bytes_to_use']}, but one chunk takes {self.kv_bytes_per_chunk}: set it to at least that"
            )

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        return {**super().build_metric_definitions(extra_config), **packing_metric_definitions()}

    def get_manager(self) -> Any:
        """Return vLLM's manager, with checks of the rows that its secondary tiers load."""
        is_new = self._manager is None
        manager = super().get_manager()
        if is_new:
            view = manager.primary_tier.get_kv_memoryview()
            for tier in manager.secondary_tiers:
                check_promotions(tier, view, self.codecs_by_group_id, self.cpu_page_size_per_worker, self.blocks_per_chunk)
            attach_keys(manager)
            manager.kvpack_ratio = self.ratio
            # vLLM shows messages of its own logger and its children.
            logging.getLogger("vllm.kvpack").info(
                "kvpack packs pages with %s, %.2f times smaller: host memory holds %d chunks",
                self.extra_config["recipe"], self.ratio, self.num_chunks,
            )  # fmt: skip
        return manager

    @property
    def codecs_by_group_id(self) -> dict[int, list[PageCodec]]:
        """The codecs of each offloaded group, by the group's id in vLLM's keys. Groups that vLLM does not offload have ids too."""
        return {group.group_id: codecs for group, codecs in zip(self.config.groups, self.codecs, strict=True)}

    def get_worker(self, kv_caches: Any) -> PackedWorker:
        if self._packed is None:
            self._packed = self._make_worker(kv_caches)
        return self._packed

    def _make_worker(self, kv_caches: Any) -> PackedWorker:
        rank = 0 if self.replicated_layout else self.config.parallel.rank
        pages = []
        for group, refs in zip(self._groups, kv_caches.group_data_refs, strict=True):
            for ref in refs:
                if ref.page_size_bytes != group.page_bytes:
                    raise InvalidParameter(
                        f"a block of a layer has {ref.page_size_bytes} bytes, but the model's configuration implies {group.page_bytes}: "
                        "kvpack does not support layers that share a block; use vLLM's TieringOffloadingSpec"
                    )
            pages.append(group.buffer(self._layout, [kv_caches.tensors[ref.tensor_idx].tensor for ref in refs]))
            if current_platform.is_cpu() and group.kind == "attention":
                from .cpu import check_layout

                check_layout(self._layout, group)
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        if pages[0].device.type == "cuda":
            pin_mmap_region(region)
        memory = region.create_next_worker_view(self.cpu_page_size_per_worker)
        return PackedWorker([codecs[rank] for codecs in self.codecs], pages, memory, self.blocks_per_chunk, region.cleanup)

    def _row_namespace(self, group: int, rank: int) -> bytes:
        return hashlib.sha256(self._namespace + f"group {group} of rank {rank}".encode()).digest()


def _required_text(options: Any, name: str) -> str:
    value = options.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidType(f'{name} is {value!r}, expected text in kv_connector_extra_config, such as "octopus-4"')
    return value


def _check_config(config: Any, groups: list[Group]) -> None:
    parallel = config.parallel
    if len(groups) != len(config.groups):
        raise InvalidParameter(
            f"vLLM offloads {len(config.groups)} groups of cache layers, but the connector found {len(groups)}: use vLLM's "
            "TieringOffloadingSpec"
        )
    if config.canonical_layout:
        raise InvalidParameter("canonical_layout is set, but kvpack packs pages in the worker's own layout: unset canonical_layout")
    for name in ("pp_size", "pcp_size", "dcp_size"):
        if getattr(parallel, name) != 1:
            raise InvalidParameter(f"{name} is {getattr(parallel, name)}, but kvpack supports only tensor parallelism: set it to 1")
