"""Codecs from which a search chooses, and their sizes in a model's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvpack.cache.cache import Cache
from kvpack.cache.layer import Layer
from kvpack.cache.side import Side, pack_side
from kvpack.coding import raw_clause
from kvpack.coding.presets import RAW_CLAUSE, calibrated_codec, kvpack_codec
from kvpack.coding.recipes import Recipe
from kvpack.coding.token_errors import collect_poor_fits
from kvpack.formats.errors import InvalidParameter, OutOfBounds
from kvpack.formats.token_norms import norms_per_head

from .allocation import Allocation, TensorKey, recipe_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.coding.bases import Basis
    from kvpack.evaluation.windows import UncompressedResult

    from .file_sizes import FileLength

_SCALE_SUFFIXES = ("", ",channel_scale=fp16")
"""Suffixes for key codecs, without and with channel scales. Rotated outlier channels need scales, which may do harm otherwise."""

_GROUPS = ("2,g=64", "2,g=32", "3,g=64", "4,g=128", "6,g=128")

THOROUGH_CANDIDATES = (
    *(f"k={codec}{scaled}" for codec in ("scalar:b=2", "scalar:b=3", "scalar:b=4", "octahedral:b=3") for scaled in _SCALE_SUFFIXES),
    *(f"k=group:b={words},scales=u8,rotation=hadamard{scaled}" for words in _GROUPS for scaled in _SCALE_SUFFIXES),
    *(f"k=group:b={words},scales=u8" for words in ("2,g=32", "3,g=64", "8,g=128")),
    *(f"v=scalar:b={words}" for words in ("1", "2", "2,high=3", "3", "4", "6", "8")),
    "v=octahedral:b=3",
    *(f"v=group:b={words},scales=u8,rotation=hadamard" for words in _GROUPS[1:4]),
)
"""Candidates of the thorough search, from 1 to 8 bits: the codecs of each family with the best quality for their size."""

_RAW_WORDS = ",".join(f"{name}={value}" for name, value in raw_clause.parse_raw_clause(RAW_CLAUSE).items())

BITS = (1, 2, 3, 4, 5, 6, 8)
"""Bit widths in the search by widths."""

WIDTH_CANDIDATES = tuple(f"{side}={kvpack_codec(side, bits, trellis=False)},{_RAW_WORDS}" for side in "kv" for bits in BITS)
"""Candidates of the search by widths. They store key means, without which different widths per layer do harm."""

BALANCED = tuple(f"k={calibrated_codec('k', bits, trellis=False)},{_RAW_WORDS}" for bits in BITS)
"""Candidates for keys if the basis has balanced frames."""

CALIBRATED = tuple(f"klt:bits={bits:g},widths=heads,{_RAW_WORDS}" for bits in (0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4))
"""Candidates for keys and values if there is a basis. Each number is the average bits per value over all tensors."""

FRAME_CANDIDATES = tuple(f"transform:bits={bits:g},{_RAW_WORDS}" for bits in (0.15, 0.25, 0.4, 0.6, 0.8, 1.1, 1.5))
"""Additional candidates if the basis has frames."""

DECODED_CODECS = ("transform", "lossless")
"""Codecs whose packed bytes attention cannot use directly, so that it decodes them tile by tile."""

SIDES = ("k", "v")


def parse_candidates(texts: Sequence[str]) -> dict[str, list[str]]:
    """Parse candidates such as ``k=scalar:b=3``, ``kv=...``, or a codec for keys and values. Returns lists of codecs by "k" and "v".

    Raises InvalidParameter if a codec is unknown, if a text has several clauses, or if keys or values have no candidate.
    """
    result: dict[str, list[str]] = {"k": [], "v": []}
    for text in texts:
        sides, equals, codec = text.strip().partition("=")
        if not equals or sides not in ("k", "v", "kv"):
            sides, codec = "kv", text.strip()
        if ";" in codec:
            raise InvalidParameter(f"--candidate is {text!r}, expected a single codec, such as k=scalar:b=3")
        for side in sides:
            Recipe(";".join(f"{other}={codec if other == side else 'raw'}" for other in SIDES))
            if codec not in result[side]:
                result[side].append(codec)
    for side, codecs in result.items():
        if not codecs:
            raise InvalidParameter(f"--candidate has no codec for {'keys' if side == 'k' else 'values'}: add {side}=<codec>")
    return result


def is_attendable(codec: str) -> bool:
    """Return True if attention can use the packed bytes of ``codec`` without decoding them. ``codec`` is written as in a recipe."""
    return codec.partition(":")[0] not in DECODED_CODECS


@dataclass(frozen=True)
class PackedCandidates:
    """Every tensor (the keys or values of one layer), packed with every candidate, to compute the sizes of files of ``length``.

    ``left_out`` contains the reasons why tensors cannot use some candidates.
    """

    packed: dict[TensorKey, dict[str, Side]]
    left_out: dict[TensorKey, dict[str, str]]
    length: FileLength

    @property
    def tensor_keys(self) -> list[TensorKey]:
        return list(self.packed)

    def file_bytes(self, allocation: Allocation) -> int:
        """Return the size in bytes of a file of one window that is packed with ``allocation``."""
        layers = [Layer(*(self.packed[layer, side][allocation[layer, side]] for side in SIDES)) for layer in range(len(self.packed) // 2)]
        return self.length.file_bytes(Cache(tuple(layers), recipe_text(allocation)))

    def stream_bytes(self, tensor_key: TensorKey, codec: str) -> int:
        """Return the size in bytes of the streams of the tensor ``tensor_key`` when packed with ``codec``."""
        return self.length.stream_bytes(self.packed[tensor_key][codec], tensor_key[0])

    def values(self) -> int:
        sides = {layer: next(iter(codecs.values())) for layer, codecs in self.packed.items()}
        return sum(side.batch * side.heads * side.dim * self.length.in_layer(layer) for (layer, _), side in sides.items())


def pack_candidates(
    exact: UncompressedResult, candidates: dict[str, list[str]], length: FileLength, basis: Basis | None = None
) -> PackedCandidates:
    """Pack a whole window with each candidate. As in a measurement, the prefix is packed first, and the scored tokens are appended.

    Sizes are computed for files of ``length``. Candidates with klt or transform use ``basis``.

    Raises MissingBasis if there is no basis, and InvalidParameter if a tensor cannot use any of the candidates.
    """
    packed: dict[TensorKey, dict[str, Side]] = {}
    left_out: dict[TensorKey, dict[str, str]] = {}
    for layer, pair in enumerate(exact.pairs):
        k_norms, v_norms = (norms_per_head(x.to(torch.bfloat16)) for x in pair)
        for side, x in zip(SIDES, pair, strict=True):
            tensor_key = layer, side
            packed[tensor_key], left_out[tensor_key] = {}, {}
            for codec in candidates[side]:
                try:
                    clause = Recipe(";".join(f"{other}={codec if other == side else 'raw'}" for other in SIDES), basis)
                    packed[tensor_key][codec] = _pack_tensor(
                        x.to(torch.bfloat16), (k_norms, v_norms), exact.prefix_tokens, clause, tensor_key, len(exact.pairs)
                    )
                except (InvalidParameter, OutOfBounds) as error:
                    left_out[tensor_key][codec] = str(error).removeprefix(f"layers[{layer}].{side}: ")
            if not packed[tensor_key]:
                reason = next(iter(left_out[tensor_key].values()))
                raise InvalidParameter(f"no candidate can encode layers[{layer}].{side}: {reason}")
    return PackedCandidates(packed, left_out, length)


def _pack_tensor(
    x: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor], prefix: int, recipe: Recipe, tensor_key: TensorKey, layers: int
) -> Side:
    number, side = tensor_key
    codec = recipe.codec(number, layers, side, x.shape[3])
    raw = codec.raw_positions
    chosen_by = None if raw is None else raw.selection_norms(*norms)
    # Suppress warnings about tokens, because the candidate's loss is measured.
    with collect_poor_fits():
        first = pack_side(x[:, :, :prefix], codec, recipe.window, f"layers[{number}].{side}", 0, chosen_by)
        return first.append(x[:, :, prefix:], first=0, norms=lambda start, stop: None if chosen_by is None else chosen_by[:, :, start:stop])
