"""The rules of a recipe: the codec that one clause selects for sides and layers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from kvpack.formats import create_codec
from kvpack.formats.balanced import OPTION
from kvpack.formats.channel_scale import BALANCED
from kvpack.formats.errors import InvalidType
from kvpack.formats.lossless import FORMS
from kvpack.formats.options import Options, UnknownWord
from kvpack.formats.raw import DTYPES
from kvpack.formats.raw_positions import RawPositions

from . import raw_clause
from .bases import MAX_BITS, MIN_BITS, MIN_TRANSFORM_BITS
from .canonical import Spelled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpack.formats.balanced_frames import CalibratedFrames
    from kvpack.formats.base import Codec
    from kvpack.formats.basis import Calibrated

CHECKED_DIM = 128
"""Head dim for which clauses are checked."""

_DTYPES = {"raw": tuple(DTYPES), "lossless": tuple(FORMS)}
"""Input dtypes of the codecs whose option ``dtype`` defaults to the dtype of their input."""

_BALANCED_SCALE = ("channel_scale", BALANCED)
WORDS_OF_BASES = (f"{OPTION}=", "=".join(_BALANCED_SCALE))
"""Prefixes of options that need a basis in codecs that otherwise need none."""

CALIBRATED = {"klt": ("2", MIN_BITS), "transform": ("0.6", MIN_TRANSFORM_BITS)}
"""The codecs that need a basis, and their default and fewest bits per value."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Rule:
    """``words`` for the codec ``codec_id`` on ``sides``, in the layers of ``items`` (None: all); ``written`` is the clause as written."""

    sides: str
    codec_id: str
    words: tuple[tuple[str, str], ...]
    items: tuple[tuple[int, int], ...] | None
    written: str
    _codecs: dict[tuple[int, str, str | None], Codec] = field(default_factory=dict, init=False, compare=False, repr=False)

    def covers(self, layer: int, layers: int) -> bool:
        """Return True if the rule covers ``layer`` of ``layers``."""
        if self.items is None:
            return True
        return any(_position(first, layers) <= layer <= _position(last, layers) for first, last in self.items)

    def codec(
        self,
        dim: int,
        side: str,
        dtype: str = "bf16",
        calibrated: Calibrated | None = None,
        balanced: CalibratedFrames | None = None,
    ) -> Codec:
        """Return the rule's codec for one head dim; ``dtype`` is the dtype of the values.

        ``calibrated`` and ``balanced`` come from a basis, if there is one.

        Raises InvalidParameter if the codec does not support the head dim, and InvalidType if it cannot keep the dtype.
        """
        words = dict(self.words)
        if self.codec_id in _DTYPES and "dtype" not in words:
            if dtype not in _DTYPES[self.codec_id]:
                kept = " and ".join(_DTYPES[self.codec_id])
                raise InvalidType(
                    f"the codec {self.codec_id} supports only {kept} values, got {dtype}: use the recipe raw, which keeps every dtype"
                )
            words["dtype"] = dtype
        if calibrated is not None or balanced is not None:
            return create_codec(self.codec_id, dim, side, Options(self.codec_id, words, calibrated, balanced))
        # The layers of a cache share it.
        request = dim, side, words.get("dtype")
        if request not in self._codecs:
            self._codecs[request] = create_codec(self.codec_id, dim, side, Options(self.codec_id, words, None))
        return self._codecs[request]

    def with_raw_tokens(self, words: Mapping[str, str]) -> Rule:
        """Return the rule with the options ``words``, unless its codec is lossless or sets its own raw tokens."""
        if self.codec_id in _DTYPES or not dict(self.words).keys().isdisjoint(RawPositions.words):
            return self
        return replace(self, words=(*self.words, *words.items()))

    @property
    def keeps_raw(self) -> bool:
        """True if its codec keeps some tokens raw."""
        return raw_clause.choice_of({name: value for name, value in self.words if name in RawPositions.words}) is not None

    def canonical(self, side: str) -> Spelled:
        """Return the codec of ``side`` in its canonical spelling."""
        words = dict(self.words)
        if self.codec_id in CALIBRATED:
            words["bits"] = f"{self.bits:.6f}".rstrip("0").rstrip(".")
        return _canonical_codec(self.codec_id, tuple(words.items()), side)

    @property
    def frame(self) -> str:
        """Name of the basis frame for keys, or an empty string."""
        return dict(self.words).get(OPTION, "")

    @property
    def needs_basis(self) -> bool:
        """True if its codec needs a basis, or its encoder does."""
        return self.codec_id in CALIBRATED or bool(self.frame) or self.balances_channels

    @property
    def balances_channels(self) -> bool:
        """True if channels of keys are scaled by statistics of queries."""
        return _BALANCED_SCALE in self.words

    @property
    def bits(self) -> float:
        """Target bits per value of a calibrated codec. Raises UnknownWord."""
        default, least = CALIBRATED[self.codec_id]
        text = dict(self.words).get("bits", default)
        bits = float(text) if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,6})?", text) else 0.0
        if not least <= bits <= MAX_BITS:
            raise UnknownWord(f"{self.codec_id}:bits is {text!r}, expected {least:g} to {MAX_BITS:g} bits per value", f"bits={text}")
        return bits


@lru_cache(maxsize=4096)
def _canonical_codec(codec_id: str, words: tuple[tuple[str, str], ...], side: str) -> Spelled:
    options = Options(codec_id, dict(words), None)
    create_codec(codec_id, CHECKED_DIM, side, options)
    canonical = options.canonical()
    raw = {name: canonical[name] for name in canonical.keys() & set(RawPositions.words)}
    plain = {name: value for name, value in canonical.items() if name not in raw}
    kept = None if codec_id in _DTYPES else raw_clause.value_of(raw)
    return Spelled(_spelled(codec_id, canonical), _spelled(codec_id, plain), kept)


def _spelled(codec_id: str, words: Mapping[str, str]) -> str:
    text = ",".join(f"{name}={value}" for name, value in words.items())
    return f"{codec_id}:{text}" if text else codec_id


def _position(item: int, layers: int) -> int:
    return item + layers if item < 0 else item


def check_digest(codec_id: str, words: Mapping[str, str]) -> None:
    """Raise UnknownWord unless the basis is a SHA-256."""
    digest = words.get("basis")
    if digest is not None and not _DIGEST.fullmatch(digest):
        raise UnknownWord(f"{codec_id}:basis is {digest!r}, expected the 64 hexadecimal digits of a SHA-256", f"basis={digest}")
