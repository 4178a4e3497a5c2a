"""The serde "kvpack" for LMCache: chunks ``[2, layer, token, head * dim]`` as rows, whose size is exact before encoding."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from lmcache.v1.distributed.serde import AsyncSerdeProcessor, Deserializer, Serializer, register_serde_factory

from kvpack.formats.errors import InvalidParameter, InvalidShape
from kvpack.pages.codec import PageCodec

from .layouts import check_model, geometry_of, is_fused, key_bytes, pages_of, recipe_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from kvpack.coding.recipes import Recipe


class Codecs:
    """One codec for each shape and dtype of LMCache's objects."""

    def __init__(self, recipe: Recipe, head_dim: int, revision: str, threads: int, kv_dtype: str, fused: bool) -> None:
        self.recipe, self._head_dim, self._threads, self._kv_dtype, self._fused = recipe, head_dim, threads, kv_dtype, fused
        self._namespace = hashlib.sha256(f"lmcache\0{revision}\0{head_dim}\0{kv_dtype}".encode()).digest()
        self._made: dict[tuple[tuple[int, ...], torch.dtype], PageCodec] = {}

    def of(self, shape: Sequence[int], dtype: torch.dtype) -> PageCodec:
        """The codec of one object's layout. Raises InvalidShape for one that is not keys and values, and InvalidParameter."""
        made = self._made.get((tuple(shape), dtype))
        if made is None:
            geometry = geometry_of(shape, dtype, self._head_dim, self._kv_dtype, self._fused)
            made = PageCodec(self.recipe, geometry, threads=self._threads, namespace=self._namespace)
            self._made[tuple(shape), dtype] = made
        return made


class KvpackSerializer(Serializer):  # type: ignore[misc]
    """Encodes an object to a row, which fills LMCache's estimate to the byte: its fs adapter reads no other size back."""

    def __init__(self, codecs: Codecs) -> None:
        self._codecs = codecs

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        check_model(self._codecs.recipe, key)
        codec = self._codecs.of(src.tensor.shape, src.tensor.dtype)
        row = dst.tensor.view(-1)[: codec.nbytes][None]
        (refused,) = codec.encode_into(pages_of(codec.geometry, src.tensor), [0], row, keys=[key_bytes(key)])
        if refused is not None:
            raise refused
        return codec.nbytes

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        shapes = list(zip(layout_desc.shapes, layout_desc.dtypes, strict=True))
        if len(shapes) != 1:
            raise InvalidShape(f"an object has {len(shapes)} tensors, and the serde takes one of keys and values")
        return self._codecs.of(*shapes[0]).nbytes


class KvpackDeserializer(Deserializer):  # type: ignore[misc]
    """Decodes a row into an object; a damaged one, and one of another key, raises before anything is written."""

    def __init__(self, codecs: Codecs) -> None:
        self._codecs = codecs

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        check_model(self._codecs.recipe, key)
        codec = self._codecs.of(dst.tensor.shape, dst.tensor.dtype)
        row = src.tensor.flatten()[None]
        (refused,) = codec.decode_into(row, pages_of(codec.geometry, dst.tensor), [0], keys=[key_bytes(key)])
        if refused is not None:
            raise refused


def create(kwargs: Mapping[str, Any]) -> Any:
    """LMCache's processor for the options of ``"serde": {"type": "kvpack", ...}``. Raises InvalidParameter."""
    known = {"recipe", "basis", "head_dim", "revision", "threads", "max_workers", "kv_dtype", "fused"}
    if set(kwargs) - known or not {"recipe", "head_dim", "revision"} <= set(kwargs):
        raise InvalidParameter(
            f"the serde kvpack got {', '.join(sorted(kwargs)) or 'no options'}, expected recipe, head_dim and revision (LMCache's keys "
            "name a model, and not its weights), and may get basis, threads, max_workers, kv_dtype and fused"
        )
    recipe, revision, kv_dtype = (str(kwargs.get(name, "")) for name in ("recipe", "revision", "kv_dtype"))
    head_dim = int(kwargs["head_dim"])
    packed = recipe_of(recipe, kwargs.get("basis"), head_dim, kv_dtype)
    codecs = Codecs(packed, head_dim, revision, int(kwargs.get("threads", 1)), kv_dtype, is_fused(kwargs))
    workers = int(kwargs.get("max_workers", 1))
    return AsyncSerdeProcessor(KvpackSerializer(codecs), KvpackDeserializer(codecs), max_workers=workers)


register_serde_factory("kvpack", create)
