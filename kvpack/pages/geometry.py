"""``PageGeometry``: the shape of an engine's pages, and the codecs that a recipe assigns to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.file.header import Contents, LayerEntry, SideEntry, list_features
from kvpack.file.limits import MAX_HEADS, MAX_LAYERS, MAX_TOKENS
from kvpack.formats.arguments import as_integer, describe
from kvpack.formats.base import Codec
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.klt import Klt
from kvpack.formats.opaque import Opaque
from kvpack.formats.raw import Raw
from kvpack.formats.raw_positions import slot_count

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "u8": torch.uint8,
}
"""torch dtypes of an engine's values, by name. "u8" is for pages of bytes that kvpack does not interpret."""
ENCODING_DTYPES = {"fp8_e4m3": "bf16", "fp8_e5m2": "bf16"}
"""Dtypes to which 8-bit values are converted before encoding. The conversion is exact."""
MAX_BYTES = 2**40
"""Maximum number of bytes per layer in a page of opaque bytes."""
FEATURE = "page-dtype"
"""Ignorable feature in a row's description that records the engine's dtype."""


@dataclass(frozen=True)
class PageGeometry:
    """The shape of a page: the numbers of layers, heads and tokens, the channels per head of keys and of values, and the dtype.

    ``dim_v`` is None for a page without values, such as MLA latents that are stored with one codec. Latents of 512 channels with 64 RoPE
    channels have two sides, ``dim_k=512, dim_v=64``. A recipe such as "k=group:b=4;v=raw" then stores the RoPE channels exactly. ``dtype``
    is ``bf16``, ``fp16``, ``fp32``, ``fp8_e4m3``, ``fp8_e5m2`` or ``u8``. Raises InvalidParameter if a number or the dtype is not
    supported.
    """

    layers: int
    heads: int
    tokens: int
    dim_k: int
    dim_v: int | None
    dtype: str = "bf16"

    @classmethod
    def of_bytes(cls, count: int, layers: int = 1) -> Self:
        """Return the geometry of opaque pages of ``count`` bytes per layer. Raises InvalidParameter if ``count`` is out of range."""
        if not 1 <= as_integer(count, "count") <= MAX_BYTES:
            raise InvalidParameter(f"count is {describe(count)}, expected the number of bytes per layer, from 1 to {MAX_BYTES}")
        dim = max((size for size in range(1, 1025) if count % size == 0), default=1)
        return cls(layers, 1, count // dim, dim, None, "u8")

    def __post_init__(self) -> None:
        limits = {"layers": MAX_LAYERS, "heads": MAX_HEADS, "tokens": MAX_TOKENS, "dim_k": 1024}
        for name, limit in {**limits, **({} if self.dim_v is None else {"dim_v": 1024})}.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= limit:
                raise InvalidParameter(f"PageGeometry: {name} is {describe(value)}, expected an integer from 1 to {limit}")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise InvalidParameter(f"PageGeometry: dtype is {describe(self.dtype)}, expected one of {', '.join(DTYPES)}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def computed_dtype(self) -> torch.dtype:
        return DTYPES[ENCODING_DTYPES.get(self.dtype, self.dtype)]

    @property
    def dims(self) -> dict[str, int]:
        """Number of values per token and head: "k" for keys and, if the page has values, "v"."""
        return {"k": self.dim_k} if self.dim_v is None else {"k": self.dim_k, "v": self.dim_v}

    @property
    def raw_bytes(self) -> int:
        """Size of a page in the engine's memory, in bytes."""
        return self.layers * self.heads * self.tokens * sum(self.dims.values()) * self.torch_dtype.itemsize

    def codec(self, recipe: Recipe, layer: int, side: str) -> Codec:
        """Return the codec for the keys ("k") or values ("v") of a layer.

        Raises MissingBasis if the recipe lacks its basis. Raises InvalidParameter if sizes depend on the values, if opaque bytes would not
        be stored raw, or if the basis has a different number of heads.
        """
        dim, where = self.dims[side], f"layers[{layer}].{side}"
        codec = recipe.codec(layer, self.layers, side, dim, ENCODING_DTYPES.get(self.dtype, "bf16" if self.dtype == "u8" else self.dtype))
        if isinstance(codec, Raw) and self.torch_dtype.itemsize == 1:
            return Opaque(dim)
        if self.dtype == "u8":
            raise InvalidParameter(
                f"{where}: the recipe selects codec {codec.id}, but pages of dtype u8 hold bytes that kvpack cannot interpret: "
                "use the 'raw' recipe"
            )
        if isinstance(codec.without_sidecars, Klt):
            # A page with a different number of heads could never be encoded.
            codec.without_sidecars.source_for(self.heads)
        slots = self.slots(codec)
        if not slots:
            codec = codec.without_raw_positions
        varying = [name for name, layout in codec.row_layouts.items() if layout.per == "entry" and name not in slots]
        if varying:
            raise InvalidParameter(
                f"{where}: the sizes of {codec.id}'s streams {', '.join(varying)} depend on the values, but all rows of an engine "
                "must have the same size: omit lossless, transform, outliers, and all raw tokens except those of raw_low_norm"
            )
        return codec

    def slots(self, codec: Codec) -> dict[str, int]:
        """Return the number of raw tokens that fit in a page, by stream. The dict is empty if there is no room.

        With a basis, there is room for at least one. A basis is calibrated without the tokens that recipes keep raw, and represents them
        poorly.
        """
        raw, count = codec.raw_positions, slot_count(self.tokens, int(isinstance(codec.without_sidecars, Klt)))
        return dict.fromkeys(raw.layout(1, 1, 0), count) if raw is not None and count else {}

    def contents(self, recipe: str | Recipe) -> Contents:
        """Return the description of a page encoded with ``recipe``. Raises InvalidParameter or InvalidType."""
        recipe = parse_recipe(recipe)
        recipe.check_layers(self.layers)
        if recipe.window:
            raise InvalidParameter(f"the recipe keeps the newest {recipe.window} tokens raw, but pages have no raw tail: omit window=")
        codecs: dict[Codec, int] = {}
        tail_dtype = ENCODING_DTYPES.get(self.dtype, "bf16" if self.dtype == "u8" else self.dtype)
        layers = []
        for layer in range(self.layers):
            sides = {}
            for side in self.dims:
                codec = self.codec(recipe, layer, side)
                number, slots = codecs.setdefault(codec, len(codecs)), self.slots(codec)
                sides[side] = SideEntry(number, 1, self.heads, (self.tokens,), 0, tail_dtype, 0, tuple(slots.items()))
            layers.append(LayerEntry(sides["k"], sides.get("v")))
        ignorable = {FEATURE: self.dtype.encode()}
        return Contents(codecs=tuple(codecs), layers=tuple(layers), recipe=recipe.text, required=list_features(codecs), ignorable=ignorable)
