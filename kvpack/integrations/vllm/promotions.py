"""Checks chunks from a secondary tier of vLLM in the scheduler. A chunk with a damaged row is a miss, and no worker reads it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import get_offload_group_idx
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager

from .chunk_keys import ABSENT, row_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvpack.pages.codec import PageCodec


def check_promotions(tier: Any, view: memoryview, codecs: Mapping[int, Sequence[PageCodec]], cell: int, blocks: int) -> None:
    """Make ``tier`` report a loaded chunk in ``view`` as failed unless it has valid rows of ``codecs`` with the chunk's key.

    ``codecs`` maps vLLM's id of a group to one codec per cell. A chunk consists of cells of ``cell`` bytes. Each cell has ``blocks`` rows,
    at least one of which is present.
    """
    submit, finished = tier.submit_load, tier.get_finished_jobs
    running: dict[int, Any] = {}
    tier.damaged_chunks = 0

    def submit_load(metadata: Any) -> None:
        running[metadata.job_id] = metadata
        submit(metadata)

    def is_valid(key: bytes, chunk: int) -> bool:
        memory = view[chunk : chunk + 1].cast("B")
        for number, codec in enumerate(codecs[get_offload_group_idx(key)]):
            begins = [number * cell + place * codec.nbytes for place in range(blocks)]
            rows = {place: memory[begin : begin + codec.nbytes] for place, begin in enumerate(begins)}
            filled = {place: row for place, row in rows.items() if row[: len(ABSENT)] != ABSENT}
            if not filled or any(codec.check([*filled.values()], keys=[row_key(key, place) for place in filled])):
                return False
        return True

    def reject_invalid(result: Any) -> Any:
        metadata = running.pop(result.job_id, None)
        if metadata is None:
            return result
        loaded = set(metadata.keys if result.success else result.successful_keys or ())
        places = dict(zip(metadata.keys, metadata.chunk_ids, strict=True))
        rejected = [key for key in loaded if not is_valid(bytes(key), int(places[key]))]
        if not rejected:
            return result
        tier.damaged_chunks += len(rejected)
        # Otherwise, vLLM would keep requesting chunks that the lookup had reported.
        for value in vars(tier).values():
            if isinstance(value, AsyncLookupManager):
                value.mark_miss(rejected)
        accepted = [key for key in metadata.keys if key in loaded.difference(rejected)]
        return replace(result, success=False, successful_keys=accepted or None)

    def get_finished_jobs() -> Iterable[Any]:
        return [reject_invalid(result) for result in finished()]

    tier.submit_load, tier.get_finished_jobs = submit_load, get_finished_jobs
