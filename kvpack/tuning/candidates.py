"""The codecs from which a search chooses, and their sizes in a model's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvpack.cache.cache import Cache
from kvpack.cache.layer import Layer
from kvpack.cache.side import pack_side
from kvpack.coding import raw_clause
from kvpack.coding.encoding import collected_misfits
from kvpack.coding.presets import RAW_CLAUSE, calibrated_codec, own_codec
from kvpack.coding.recipes import Recipe
from kvpack.formats.errors import InvalidParameter, OutOfBounds
from kvpack.formats.head_norms import norms_per_head

from .allocation import Allocation, Place, recipe_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.cache.side import Side
    from kvpack.coding.bases import Basis
    from kvpack.evaluation.windows import Exact

_SCALED = ("", ",channel_scale=fp16")
"""Keys without and with channel scales: with outlier channels a rotation needs them, elsewhere they may do harm."""

_GROUPS = ("2,g=64", "2,g=32", "3,g=64", "4,g=128", "6,g=128")

LADDER = (
    *(f"k={codec}{scaled}" for codec in ("scalar:b=2", "scalar:b=3", "scalar:b=4", "octahedral:b=3") for scaled in _SCALED),
    *(f"k=group:b={words},scales=u8,rotation=hadamard{scaled}" for words in _GROUPS for scaled in _SCALED),
    *(f"k=group:b={words},scales=u8" for words in ("2,g=32", "3,g=64", "8,g=128")),
    *(f"v=scalar:b={words}" for words in ("1", "2", "2,high=3", "3", "4", "6", "8")),
    "v=octahedral:b=3",
    *(f"v=group:b={words},scales=u8,rotation=hadamard" for words in _GROUPS[1:4]),
)
"""The candidates of the thorough search, from 1 to 8 bits: for every family, the codecs with the best quality for their size."""

RUNGS = (
    *(f"k=group:b={words},scales=u8" for words in ("2,g=64", "2,g=32", "3,g=64", "4,g=64", "5,g=64", "6,g=64", "8,g=64")),
    *(f"v=scalar:b={b}" for b in (2, 3, 4, 5, 6, 8)),
)
"""The candidates of the fast search: one family per side, so that more bytes mean smaller errors without a measurement.

Groups of tokens have one scale per channel, so that keys with outlier channels lose nothing.
"""

_RAW_WORDS = ",".join(f"{name}={value}" for name, value in raw_clause.parse_raw_clause(RAW_CLAUSE).items())

BITS = (1, 2, 3, 4, 5, 6, 8)
"""The widths of the search by widths."""

BY_WIDTHS = tuple(f"{side}={own_codec(side, bits, trellis=False)},{_RAW_WORDS}" for side in "kv" for bits in BITS)
"""The candidates of the search by widths: without means of keys, widths by what layers lose do harm."""

BALANCED = tuple(f"k={calibrated_codec('k', bits, trellis=False)},{_RAW_WORDS}" for bits in BITS)
"""Key candidates if the basis has balanced frames."""

CALIBRATED = tuple(f"klt:bits={bits:g},widths=heads,{_RAW_WORDS}" for bits in (0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4))
"""Candidates that a basis adds for both sides: with the bits of each place chosen for this many bits per value on average."""

FRAMED = tuple(f"transform:bits={bits:g},{_RAW_WORDS}" for bits in (0.15, 0.25, 0.4, 0.6, 0.8, 1.1, 1.5))
"""The candidates that a basis with frames adds besides."""

DECODED = ("transform", "lossless")
"""Codecs that attention decodes tile by tile: there is no attention over what they pack."""

SIDES = ("k", "v")


def parse_candidates(texts: Sequence[str]) -> dict[str, list[str]]:
    """Parse the codecs of each side from texts such as ``k=scalar:b=3``, ``kv=...``, or only a codec, which is for both sides.

    Raises InvalidParameter for an unknown codec, and InvalidParameter if a side has no codec or a text has several clauses.
    """
    result: dict[str, list[str]] = {"k": [], "v": []}
    for text in texts:
        sides, equals, codec = text.strip().partition("=")
        if not equals or sides not in ("k", "v", "kv"):
            sides, codec = "kv", text.strip()
        if ";" in codec:
            raise InvalidParameter(f"--candidate is {text!r}: a candidate is one codec, such as k=scalar:b=3")
        for side in sides:
            Recipe(";".join(f"{other}={codec if other == side else 'raw'}" for other in SIDES))
            if codec not in result[side]:
                result[side].append(codec)
    for side, codecs in result.items():
        if not codecs:
            raise InvalidParameter(f"--candidate names no codec for {side}: add {side}=<codec>")
    return result


def attendable(codec: str) -> bool:
    """Return True if attention can run on the packed bytes of ``codec``, given in the words of a recipe."""
    return codec.partition(":")[0] not in DECODED


@dataclass(frozen=True)
class Priced:
    """Every candidate of every place, packed: the size of a file with any of them is known without packing again.

    ``left_out`` says why a place cannot use a candidate.
    """

    packed: dict[Place, dict[str, Side]]
    left_out: dict[Place, dict[str, str]]

    @property
    def places(self) -> list[Place]:
        return list(self.packed)

    def file_bytes(self, allocation: Allocation) -> int:
        """Return the bytes of one window's file with these codecs."""
        layers = [Layer(*(self.packed[layer, side][allocation[layer, side]] for side in SIDES)) for layer in range(len(self.packed) // 2)]
        return Cache(tuple(layers), recipe_text(allocation)).nbytes

    def stream_bytes(self, place: Place, codec: str) -> int:
        """Return the bytes of the streams of one place."""
        side = self.packed[place][codec]
        return side.tail.nbytes + sum(stream.nbytes for page in side.runs for stream in page.streams.values())

    def values(self) -> int:
        """Number of values in one window."""
        return sum(side.batch * side.heads * side.tokens * side.dim for sides in self.packed.values() for side in list(sides.values())[:1])


def price(exact: Exact, candidates: dict[str, list[str]], basis: Basis | None = None) -> Priced:
    """Pack the whole window with every candidate, as a measurement does: its prefix, then the scored tokens appended.

    ``basis`` is for candidates with the codecs klt and transform. Raises MissingBasis, and InvalidParameter if a place cannot use any of
    the candidates.
    """
    packed: dict[Place, dict[str, Side]] = {}
    left_out: dict[Place, dict[str, str]] = {}
    for layer, pair in enumerate(exact.pairs):
        # The keys choose raw tokens for both sides.
        norms = norms_per_head(pair[0].to(torch.bfloat16))
        for side, x in zip(SIDES, pair, strict=True):
            place = layer, side
            packed[place], left_out[place] = {}, {}
            for codec in candidates[side]:
                try:
                    clause = _recipe(side, codec, basis)
                    packed[place][codec] = _pack(x.to(torch.bfloat16), norms, exact.prefix, clause, place, len(exact.pairs))
                except (InvalidParameter, OutOfBounds) as error:
                    left_out[place][codec] = str(error).removeprefix(f"layers[{layer}].{side}: ")
            if not packed[place]:
                reason = next(iter(left_out[place].values()))
                raise InvalidParameter(f"no candidate can encode layers[{layer}].{side}: {reason}")
    return Priced(packed, left_out)


def _recipe(side: str, codec: str, basis: Basis | None) -> Recipe:
    return Recipe(";".join(f"{other}={codec if other == side else 'raw'}" for other in SIDES), basis)


def _pack(x: torch.Tensor, norms: torch.Tensor, prefix: int, recipe: Recipe, place: Place, layers: int) -> Side:
    number, side = place
    codec = recipe.codec(number, layers, side, x.shape[3])
    # What tokens lose is measured, and shown as the candidate's loss.
    with collected_misfits():
        first = pack_side(x[:, :, :prefix], codec, recipe.window, f"layers[{number}].{side}", 0, norms)
        return first.append(x[:, :, prefix:], first=0, norms=lambda start, stop: norms[:, :, start:stop])
