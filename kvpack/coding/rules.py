"""Rules of a recipe. Each rule selects the codec for the keys, the values, or both, of some layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from kvpack.formats import create_codec
from kvpack.formats.balanced import OPTION
from kvpack.formats.balanced_frames import CalibratedFrames
from kvpack.formats.base import Codec
from kvpack.formats.basis import CalibratedRows
from kvpack.formats.channel_scale import BALANCED
from kvpack.formats.errors import InvalidType
from kvpack.formats.lossless import FLOAT_FORMATS
from kvpack.formats.options import InvalidOption, Options
from kvpack.formats.raw import DTYPES
from kvpack.formats.raw_positions import RawPositions

from . import raw_clause
from .bases import MAX_BITS, MIN_BITS, MIN_TRANSFORM_BITS
from .canonical import CodecText

CHECKED_DIM = 128
"""Head dim with which a recipe is checked before the model's head dim is known."""

_DTYPES = {"raw": tuple(DTYPES), "lossless": tuple(FLOAT_FORMATS)}
"""Supported dtypes of the codecs that store values in the input's dtype by default."""

_BALANCED_SCALE = ("channel_scale", BALANCED)
BASIS_OPTIONS = (f"{OPTION}=", "=".join(_BALANCED_SCALE))
"""Prefixes of the options that require a basis for any codec."""

CALIBRATED = {"klt": ("2", MIN_BITS), "transform": ("0.6", MIN_TRANSFORM_BITS)}
"""Codecs that need a basis, each with its default (as text) and minimum bits per value."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Rule:
    """A clause of a recipe, which selects a codec for the keys, the values or both, in some or all layers.

    ``sides`` is "k", "v" or "kv". ``words`` contains the codec's options. ``items`` contains the layers as (first, last) pairs; None means
    all layers. ``written`` is the clause as it appears in the recipe.
    """

    sides: str
    codec_id: str
    words: tuple[tuple[str, str], ...]
    items: tuple[tuple[int, int], ...] | None
    written: str
    _codecs: dict[tuple[int, str, str | None], Codec] = field(default_factory=dict, init=False, compare=False, repr=False)

    def covers(self, layer: int, layers: int) -> bool:
        """Return True if the rule applies to layer ``layer`` of a cache with ``layers`` layers."""
        if self.items is None:
            return True
        return any(_layer_position(first, layers) <= layer <= _layer_position(last, layers) for first, last in self.items)

    def codec(
        self,
        dim: int,
        side: str,
        dtype: str = "bf16",
        calibrated: CalibratedRows | None = None,
        balanced: CalibratedFrames | None = None,
    ) -> Codec:
        """Return the rule's codec for keys ("k") or values ("v") with head dim ``dim`` and dtype ``dtype``.

        ``calibrated`` and ``balanced`` are parameters from a basis, for codecs that need one. Raises InvalidParameter if the codec does not
        support the head dim, and InvalidType if an exact codec does not support ``dtype``.
        """
        words = dict(self.words)
        if self.codec_id in _DTYPES and "dtype" not in words:
            if dtype not in _DTYPES[self.codec_id]:
                supported = " and ".join(_DTYPES[self.codec_id])
                raise InvalidType(
                    f"the {self.codec_id} codec supports only {supported} values, but got {dtype}. Values from a lossy codec are fp32, "
                    "and converting them restores nothing: to keep every bit of a model's bf16 or fp16 values, pack them with "
                    "lossless from the start. For other fp32 values, use the raw codec, which stores every dtype unchanged"
                )
            words["dtype"] = dtype
        if calibrated is not None or balanced is not None:
            return create_codec(self.codec_id, dim, side, Options(self.codec_id, words, calibrated, balanced))
        # Reuse the codec in all layers of a cache.
        request = dim, side, words.get("dtype")
        if request not in self._codecs:
            self._codecs[request] = create_codec(self.codec_id, dim, side, Options(self.codec_id, words, None))
        return self._codecs[request]

    def with_raw_tokens(self, options: Mapping[str, str]) -> Rule:
        """Return the rule with ``options`` for raw tokens. They do not replace the rule's own, and do not apply to lossless codecs."""
        if self.codec_id in _DTYPES or not dict(self.words).keys().isdisjoint(RawPositions.words):
            return self
        return replace(self, words=(*self.words, *options.items()))

    @property
    def keeps_raw(self) -> bool:
        """True if the rule's codec keeps some tokens raw."""
        return raw_clause.raw_positions_from({name: value for name, value in self.words if name in RawPositions.words}) is not None

    def canonical(self, side: str) -> CodecText:
        words = dict(self.words)
        if self.codec_id in CALIBRATED:
            words["bits"] = f"{self.bits:.6f}".rstrip("0").rstrip(".")
        return _canonical_codec(self.codec_id, tuple(words.items()), side)

    @property
    def frame(self) -> str:
        """Value of the option ``frame``, which selects the basis's frames for keys, or an empty string if it is unset."""
        return dict(self.words).get(OPTION, "")

    @property
    def needs_basis(self) -> bool:
        """True if the codec or its encoder requires a basis."""
        return self.codec_id in CALIBRATED or bool(self.frame) or self.balances_channels

    @property
    def balances_channels(self) -> bool:
        """True if key channels are scaled by statistics of the queries, which come from a basis."""
        return _BALANCED_SCALE in self.words

    @property
    def bits(self) -> float:
        """Bits per value for a codec that needs a basis. Raises InvalidOption if the option ``bits`` is invalid."""
        default, least = CALIBRATED[self.codec_id]
        text = dict(self.words).get("bits", default)
        bits = float(text) if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,6})?", text) else 0.0
        if not least <= bits <= MAX_BITS:
            raise InvalidOption(f"{self.codec_id}:bits is {text!r}, expected {least:g} to {MAX_BITS:g} bits per value", f"bits={text}")
        return bits


@lru_cache(maxsize=4096)
def _canonical_codec(codec_id: str, words: tuple[tuple[str, str], ...], side: str) -> CodecText:
    options = Options(codec_id, dict(words), None)
    create_codec(codec_id, CHECKED_DIM, side, options)
    canonical = options.canonical()
    raw = {name: canonical[name] for name in canonical.keys() & set(RawPositions.words)}
    plain = {name: value for name, value in canonical.items() if name not in raw}
    kept = None if codec_id in _DTYPES else raw_clause.raw_clause_value(raw)
    return CodecText(_codec_text(codec_id, canonical), _codec_text(codec_id, plain), kept)


def _codec_text(codec_id: str, options: Mapping[str, str]) -> str:
    text = ",".join(f"{name}={value}" for name, value in options.items())
    return f"{codec_id}:{text}" if text else codec_id


def _layer_position(item: int, layers: int) -> int:
    return item + layers if item < 0 else item


def check_basis_option(codec_id: str, options: Mapping[str, str]) -> None:
    """Raise InvalidOption if the option ``basis`` is set but is not a SHA-256."""
    digest = options.get("basis")
    if digest is not None and not _DIGEST.fullmatch(digest):
        raise InvalidOption(f"{codec_id}:basis is {digest!r}, expected the 64 hexadecimal digits of a SHA-256", f"basis={digest}")
