"""Basis files, which describe the keys and values of one model (spec/basis.md), and the bit allocation for recipes that use one."""

from __future__ import annotations

import hashlib
import math
import os
import re
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kvpack.file import container
from kvpack.file.basis import FEATURE, FREQUENCIES, KEY_FRAMES, MEAN, QUERIES, VALUES
from kvpack.file.header import Contents, LayerEntry, SideEntry
from kvpack.file.layer_states import StateEntry, features_of
from kvpack.formats.arguments import shown
from kvpack.formats.balanced_frames import CalibratedFrames
from kvpack.formats.basis import RUN_COLUMNS, BasisRows, Calibrated
from kvpack.formats.errors import InvalidHeader, InvalidParameter, InvalidType, OutOfBounds
from kvpack.formats.frames import Frames, Rope
from kvpack.formats.klt import HEAD_RUN_COLUMNS, Klt, default_gain
from kvpack.formats.lazy import functional, numpy, torch
from kvpack.formats.raw import Raw
from kvpack.formats.transform import MAX_STEP, default_chunk

from .basis_files import LONGEST, SIDES, balanced_of, check_is_basis, frames_of, opened, rows_of_side, states_named

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvpack.formats.base import Codec

    Numbers = numpy.ndarray[Any, Any]


LOSSES = "losses.{side}"
"""Metadata name of the loss that each layer causes at one width of one side: numbers with commas between them, first layer first."""

MIN_BITS, MAX_BITS = 0.25, 8.0

MIN_TRANSFORM_BITS = 0.05

CHUNK_BITS = 1024
"""Bits of the states of a chunk of the codec transform, besides those of its symbols."""

FILE_TOKENS = 4096
"""Tokens of the files that bits per value are of, all bytes counted: shorter files take more per value, and longer ones less."""

STREAM_BYTES = {"klt": 200, "transform": 330}
"""Bytes of a file for each stream of a side, besides the stream: its entries in the headers, pads, and places of chunks."""

TRANSFORM_STREAMS = 6

RAW_SHARE = 0.003
"""The part of a text's tokens that a recipe such as transform-0.6 keeps raw, at least: with SmolLM2-135M 0.3 to 0.7 % of texts are."""

OTHER_TEXT = 1.04
"""Bits of symbols of a text that did not calibrate, as a multiple of what tables foresee: measured with SmolLM2-135M on a novel."""

RAW_BITS, RAW_POSITION_BITS = 16, 64
"""Bits of a value of a raw token, and of the token's position, which each side has."""

DISTORTIONS = (1.0, 0.3634, 0.1175, 0.03454, 0.009497, 0.002499, 0.000642, 0.000163, 0.0000412)
"""Mean squared error of a normal value of variance 1 by a table of 0 to 8 bits. Source: Max 1960, Table I; above 5 bits Panter-Dite."""

_GAINS = tuple(before - after for before, after in pairwise(DISTORTIONS))
"""Error reduction by each further bit of a column."""

_STEPS = 100
_LOSS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,12})?(e-[0-9]{2})?")


class Basis:
    """The calibrated basis of one model: the matrices by which the codecs klt and transform, and balanced keys, encode.

    ``kvpack calibrate`` writes a basis file; ``Basis.load`` and ``Basis.of_bytes`` read one.

    Attributes:
        digest: SHA-256 of the file (32 bytes). Recipes and caches name the basis by it.
        model: Fields that name the model for which the basis was calibrated.
        layers: Number of layers of the model.
        data: Bytes of the file, read-only.

    >>> basis = kvpack.Basis.load("model.kvbasis")
    >>> basis.layers
    2
    >>> kvpack.pack(past, kvpack.Recipe("klt-2", basis)).tokens
    64
    """

    def __init__(self, data: bytearray, where: str) -> None:
        self.where = where
        self.digest = hashlib.sha256(data).digest()
        self.data = memoryview(data).toreadonly()
        # torch warns of memory that cannot be written.
        with container.open_bytes(data, where=where) as file:
            check_is_basis(file)
            self.model: Mapping[str, str] = dict(file.header.model)
            self.layers = len(file.header.layers)
            places = [(number, name) for number, layer in enumerate(file.header.layers) for name, _ in layer.sides()]
            self._rows = {place: rows_of_side(file, *place) for place in places}
            self._frames = frames_of(file)
            self._balanced = balanced_of(file)
            self._queries = {state.layer: array for state, array in states_named(file, QUERIES)}
            self._means = {state.layer: array for state, array in states_named(file, MEAN)}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read and check the basis file at ``path``.

        Raises InvalidParameter if the file is a cache, and the errors of ``kvpack.load`` for a file that is missing or damaged.
        """
        with opened(path) as source:
            return cls(source.whole(), source.where)

    @classmethod
    def of_bytes(cls, data: bytes, *, where: str = "basis") -> Self:
        """Create the basis whose file has the bytes ``data``; ``where`` names it in error messages. Raises the errors of ``load``."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise InvalidType(f"data is {shown(data)}, expected the bytes of a basis file: to read a path, use Basis.load")
        return cls(bytearray(data), where)

    def __repr__(self) -> str:
        return f"Basis({self.digest.hex()[:16]}, {self.layers} layers, model {dict(self.model)})"

    def __deepcopy__(self, memo: object) -> Basis:
        return self

    def sides(self) -> Iterator[tuple[int, str]]:
        """Yield the (layer, "k" or "v") pairs for which the basis has rows, in order."""
        return iter(self._rows)

    @property
    def layers_described(self) -> int:
        """Number of layers up to the last one with rows or balanced frames."""
        return 1 + max((layer for layer, _ in (*self._rows, *self._balanced)), default=-1)

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """Return the (heads, head dim) pairs of the rows and frames."""
        rows = {(state.heads, state.dim) for state in self._rows.values()}
        return rows | {(state.heads, state.dim) for state in self._balanced.values()}

    def rows(self, layer: int, side: str) -> BasisRows:
        """Return the rows for ``side`` ("k" or "v") of ``layer``. Raises OutOfBounds."""
        cached = self._rows.get((layer, side))
        if cached is None:
            raise OutOfBounds(f"{self.where}: the basis has no {'keys' if side == 'k' else 'values'} of layer {layer}")
        return cached

    def frames(self, layer: int, side: str) -> Frames:
        """Return the frames of ``side`` ("k" or "v") of ``layer`` for the codec transform. Raises OutOfBounds."""
        cached = self._frames.get((layer, side))
        if cached is None:
            raise OutOfBounds(f"{self.where}: the basis has no frames of {'keys' if side == 'k' else 'values'} of layer {layer}")
        return cached

    def balanced(self, layer: int, frame: str) -> CalibratedFrames:
        """Return the "balanced" or "centered" ``frame`` of each key head of ``layer``, for ``frame=`` in recipes. Raises OutOfBounds."""
        cached = self._balanced.get((layer, frame))
        if cached is None:
            raise OutOfBounds(
                f"{self.where}: the basis has no {frame} frames for the keys of layer {layer}: make them with kvpack calibrate"
            )
        return CalibratedFrames(self.digest, layer, cached)

    @property
    def has_balanced_frames(self) -> bool:
        """True if the keys of any layer have balanced frames."""
        return bool(self._balanced)

    def channel_queries(self, layer: int) -> CalibratedFrames:
        """Return the mean squared queries of ``layer``, float32 ``[kv_head, dim]``, for ``channel_scale=balanced``. Raises OutOfBounds."""
        return CalibratedFrames(self.digest, layer, queries=self.queries(layer).diagonal(dim1=1, dim2=2).contiguous())

    def queries(self, layer: int) -> torch.Tensor:
        """Return E[q q^T] over the queries of each key head of ``layer``, float32 ``[kv_head, dim, dim]``. Raises OutOfBounds."""
        return self._key_factors(self._queries, layer, "second moments of queries")

    def mean(self, layer: int) -> torch.Tensor:
        """Return the mean of the keys of ``layer`` before RoPE, float32 ``[kv_head, dim]``. Raises OutOfBounds."""
        return self._key_factors(self._means, layer, "mean of keys before RoPE")

    @cached_property
    def losses(self) -> Mapping[tuple[int, str], float]:
        """Loss that each layer and side causes at one width, by (layer, "k" or "v"); empty if it was not measured. Raises InvalidHeader."""
        return MappingProxyType({(layer, side): loss for side in SIDES for layer, loss in enumerate(_losses(self, side))})

    def _key_factors(self, found: Mapping[int, torch.Tensor], layer: int, what: str) -> torch.Tensor:
        if layer not in found:
            raise OutOfBounds(f"{self.where}: the basis has no {what} of layer {layer}: make them with kvpack calibrate")
        return found[layer]

    def framed(self) -> list[tuple[int, str]]:
        """Return the layers and sides that have frames, in order."""
        return sorted(self._frames)

    def transformed(self, layer: int, side: str, bits: float, raw: bool = False) -> Calibrated:
        """Return the calibrated part of the codec transform, for ``bits`` bits per value on average over all layers and sides.

        With ``raw``, the average includes the tokens that are kept raw. Raises OutOfBounds, and InvalidParameter for bits out of range.
        """
        return Calibrated(self.rows(layer, side), self.digest, layer, frames=self.frames(layer, side), step=self.step(bits, raw))

    def step(self, bits: float, raw: bool = False) -> int:
        """Return the step of the codec transform that is expected to take at most ``bits`` bits per value on average.

        With ``raw``, the average includes the tokens that are kept raw. Errors of all layers and sides have the same unit, so that one step
        is best for all. Raises InvalidParameter for bits out of range, and for fewer bits than the coarsest step needs.
        """
        _check_bits(bits, MIN_TRANSFORM_BITS)
        if (bits, raw) not in self._steps:
            least = self.least_transform_bits(raw)
            if bits < least:
                # The next hundredth is a text that is accepted.
                raise InvalidParameter(
                    f"{self.where}: bits is {bits:g}, and a file of {FILE_TOKENS} tokens takes at least {least:.4g} bits per value with "
                    f"the codec transform and this basis: write transform-{math.ceil(100 * least) / 100:g} or more"
                )
            self._steps[bits, raw] = max(step for step in range(MAX_STEP + 1) if self.transform_bits(step, raw) <= bits)
        return self._steps[bits, raw]

    @cached_property
    def _steps(self) -> dict[tuple[float, bool], int]:
        return {}

    def least_transform_bits(self, raw: bool = False) -> float:
        """Return the minimum bits per value that ``step`` supports.

        This is the cost of chunk states, of a file's streams and of raw tokens, without symbols.
        """
        return min(self.transform_bits(step, raw) for step in range(MAX_STEP + 1))

    def transform_bits(self, step: int, raw: bool = False) -> float:
        """Return the expected bits per value of a file with the codec transform at ``step``, over all layers and sides."""
        bits, values = 0.0, 0
        for place, frames in self._frames.items():
            channels = frames.count * frames.columns
            chunk = default_chunk(self._rows[place].dim)
            bits += OTHER_TEXT * channels * frames.expected_bits(step) + CHUNK_BITS * frames.heads(self._rows[place].dim) / chunk
            bits += 8 * STREAM_BYTES["transform"] * TRANSFORM_STREAMS / FILE_TOKENS
            if raw:
                bits += RAW_SHARE * (RAW_BITS * channels + RAW_POSITION_BITS)
            values += channels
        return bits / values if values else 0.0

    def calibrated(self, layer: int, side: str, bits: float, gain: str | None = None, own: bool = False) -> Calibrated:
        """Return the calibrated part of the codec klt, for ``bits`` bits per value on average over all layers and sides.

        ``gain`` and ``own`` are as for ``widths``. Raises OutOfBounds, and InvalidParameter for bits out of range.
        """
        return Calibrated(self.rows(layer, side), self.digest, layer, self.widths(bits, gain, own)[layer, side])

    @cached_property
    def _run_weights(self) -> dict[tuple[int, str, bool], Numbers]:
        """Mean squared weight of the columns of each run: of 8 columns of each head, head by head, or of 16 over all heads."""
        result = {}
        for place, rows in self._rows.items():
            squares = rows.weights[0, :, 0].to(torch.float64).square()
            for per_head, parts in ((True, squares), (False, squares.mean(0, keepdim=True))):
                columns = HEAD_RUN_COLUMNS if per_head else RUN_COLUMNS
                runs = [torch.stack([part.mean() for part in torch.split(head, columns)]) for head in parts]
                result[*place, per_head] = torch.cat(runs).numpy()
        return result

    def widths(self, bits: float, gain: str | None = None, own: bool = False) -> Mapping[tuple[int, str], bytes]:
        """Return the widths of every run, by layer and side, that cost the model least at ``bits`` bits per value of a whole file.

        With ``own``, each head has its own widths of runs of 8 columns; otherwise all heads of a side share the widths of runs of 16. Each
        bit goes where it lowers the weighted error most (Shoham and Gersho 1988). Each side gets at least one bit, and the gains that a
        codec with ``gain`` stores ("none" or "fp16"; None: ``default_gain``), even if these exceed ``bits``, as at small head dims. Raises
        InvalidParameter for bits out of range.
        """
        _check_bits(bits, MIN_BITS)
        key = bits, gain, own
        if key not in self._widths:
            low, high = -60.0, 60.0
            for _ in range(_STEPS):
                middle = (low + high) / 2
                low, high = (middle, high) if self.bits_of(self._widths_at_slope(2.0**middle, own), gain, own) > bits else (low, middle)
            self._widths[key] = MappingProxyType(self._widths_at_slope(2.0**high, own))
        return self._widths[key]

    @cached_property
    def _widths(self) -> dict[tuple[float, str | None, bool], Mapping[tuple[int, str], bytes]]:
        # Every layer and side of every pass asks for the same bits, and the search passes over the whole model.
        return {}

    def _widths_at_slope(self, slope: float, own: bool) -> dict[tuple[int, str], bytes]:
        """Return the widths at which a further bit of any column lowers the weighted error by at most ``slope``."""
        result = {}
        for place in self._rows:
            weights = self._run_weights[*place, own]
            widths = (weights[:, None] * _GAINS > slope).sum(1)
            if not widths.any():
                widths[weights.argmax()] = 1
            result[place] = bytes(widths.tolist())
        return result

    def bits_of(self, widths: Mapping[tuple[int, str], bytes], gain: str | None = None, own: bool = False) -> float:
        """Return the bits per value of files whose runs have ``widths``, by layer and side.

        ``gain`` and ``own`` are as for ``widths``.
        """
        bits, values = 0.0, 0
        for place, run_widths in widths.items():
            rows = self._rows[place]
            has_gain = (gain or default_gain(rows.dim, own)) != "none"
            counts, heads = (HEAD_RUN_COLUMNS, 1) if own else (RUN_COLUMNS, rows.heads)
            columns = numpy.minimum(counts, rows.dim - numpy.arange(0, rows.dim, counts))
            taken = numpy.frombuffer(run_widths, numpy.uint8).reshape(-1, len(columns)) * columns
            # Codes of runs of 8 take whole bytes.
            bits += heads * int((8 * -(-taken // 8) if own else taken).sum()) + 16 * rows.heads * has_gain
            streams = has_gain + (1 if own else len(Klt.of(rows.dim, self.digest, *place, run_widths).layout(1, 1, 1)) - 1)
            bits += 8 * STREAM_BYTES["klt"] * streams / FILE_TOKENS
            values += rows.heads * rows.dim
        return bits / values

    def check_model(self, model: Mapping[str, str], digests: Sequence[str] = ()) -> None:
        """Raise InvalidParameter if ``model``, the identity of a cache's model, differs from the model of the basis.

        If both name their weights by the same kind of digest, in the cache's dtype, the weights and the RoPE settings are compared, and the
        name is not: the same model may be in another folder. ``digests`` are other digests of the weights of the cache's model.
        """
        # The same weights are other bytes in another dtype.
        weights = self.model.get(weights_key(model.get("dtype", "")), self.model.get("weights"))
        known = self.model if weights is None else {**self.model, "weights": weights}
        # A digest of all weights and one of a sample tell nothing of each other, nor do two texts of RoPE next to them.
        kind = known.get("weights", "").partition(":")[0]
        if same := [text for text in digests if text.partition(":")[0] == kind]:
            model = {**model, "weights": same[0]}
        kinds = [description["weights"].partition(":")[0] for description in (model, known) if "weights" in description]
        for name in ("weights", "rope") if len(kinds) == 2 and kinds[0] == kinds[1] else ("name",):
            found, expected = model.get(name), known.get(name)
            if found is None or expected is None or found == expected:
                continue
            if name == "name" and os.path.basename(found) == os.path.basename(expected):
                continue
            dtypes = [description.get("dtype") for description in (self.model, model)]
            unknown = name == "weights" and weights == self.model.get("weights") and None not in dtypes and dtypes[0] != dtypes[1]
            note = f"its dtype is {dtypes[0]}, but the cache's is {dtypes[1]}: load the model in {dtypes[0]}"
            verb = "are" if name == "weights" else "is"
            raise InvalidParameter(
                f"{self.where}: is the basis of a model whose {name} {verb} {expected!r}, but the cache's {verb} {found!r}: "
                f"{note if unknown else 'kvpack calibrate makes a basis for the model of the cache'}"
            )


def _check_bits(bits: float, least: float) -> None:
    if not isinstance(bits, int | float) or not least <= bits <= MAX_BITS:
        found = f"{bits:g}" if isinstance(bits, float) else shown(bits)
        raise InvalidParameter(f"bits is {found}, expected {least:g} to {MAX_BITS:g} bits per value")


class BalancedKeys(NamedTuple):
    """Calibrated statistics of the keys of one layer, float32 ``[kv_head, dim, dim]``.

    ``balanced`` and ``centered`` are frames as in ``BalancedFrames``; ``queries`` is E[q q^T] of the queries of a head after RoPE;
    ``mean``, ``[kv_head, dim]``, is the mean of the keys before ``rope`` rotates them, or None if their rotation is unknown.
    """

    balanced: torch.Tensor
    centered: torch.Tensor
    queries: torch.Tensor
    mean: torch.Tensor | None = None
    rope: Rope | None = None


def weights_key(dtype: str) -> str:
    """Return the identity key, in a basis, of its model's weights loaded in ``dtype``, if that is not the checkpoint's dtype."""
    return f"weights.{dtype}"


def basis_bytes(
    rows: Mapping[tuple[int, str], torch.Tensor],
    layers: int,
    model: Mapping[str, str],
    dtype: str = "fp16",
    frames: Mapping[tuple[int, str], Frames] | None = None,
    balanced: Mapping[int, BalancedKeys] | None = None,
) -> bytes:
    """Return the basis file of a model of ``layers`` layers.

    ``rows``, float32 ``[kv_head, row, dim]``, and ``frames`` are by layer and side, and ``balanced`` by layer. All frames have the same
    tables. Raises OutOfRange if ``dtype`` ("fp16" or "fp32") cannot represent a value, and LimitExceeded.
    """
    codecs: dict[Codec, int] = {}
    entries, arrays = [], {}
    for number in range(layers):
        result = {side: rows[number, side] for side in SIDES if (number, side) in rows}
        # Both sides of a layer have the same number of rows; those of the smaller head dim are filled up.
        count = max((values.shape[1] for values in result.values()), default=0)
        sides = {}
        for side, values in result.items():
            codec = Raw(values.shape[2], dtype)
            filled = functional.pad(values.to(torch.float32), (0, 0, 0, count - values.shape[1]))
            arrays[f"{number}.{side}.values"] = codec.encode(filled)["values"].contiguous().numpy()
            sides[side] = SideEntry(codecs.setdefault(codec, len(codecs)), 1, values.shape[0], (count,), 0, dtype, 0)
        entries.append(LayerEntry(sides.get("k"), sides.get("v")))
    states = _states(frames or {}, balanced or {}, dtype)
    arrays |= {state.where: array for state, array in states.items()}
    turned = [*(part.rope for part in (frames or {}).values()), *(part.rope for part in (balanced or {}).values())]
    limits = [rope.longest for rope in turned if rope is not None and rope.longest is not None]
    if limits:
        model = {**model, LONGEST: str(min(limits))}
    required, ignorable = features_of(states)
    contents = Contents(
        codecs=tuple(codecs), layers=tuple(entries), model=dict(model), required=tuple(sorted((FEATURE, *required))), ignorable=ignorable
    )
    return container.to_bytes(contents, arrays)


def _states(frames: Mapping[tuple[int, str], Frames], balanced: Mapping[int, BalancedKeys], dtype: str) -> dict[StateEntry, Any]:
    """Return the states that describe ``frames`` and ``balanced`` frames, with their arrays."""
    result: dict[StateEntry, Any] = {}

    def add(layer: int, name: str, stored: str, array: Any) -> None:
        result[StateEntry(layer, name, stored, (1, *array.shape))] = numpy.ascontiguousarray(array)

    def add_rows(layer: int, name: str, rows: torch.Tensor) -> None:
        stored = Raw(rows.shape[-1], dtype).encode(rows[None])["values"][0].contiguous().numpy()
        add(layer, name, {"fp16": "F16", "fp32": "F32"}[dtype], stored)

    def add_rope(layer: int, rope: Rope | None) -> None:
        if rope is not None:
            add(layer, f"rope.{rope.pairing}", "F32", numpy.array(rope.frequencies, numpy.float32))

    for layer, keys in sorted(balanced.items()):
        add_rows(layer, KEY_FRAMES["balanced"], keys.balanced)
        add_rows(layer, KEY_FRAMES["centered"], keys.centered)
        add(layer, QUERIES, "F32", keys.queries.numpy())
        if keys.mean is not None:
            add(layer, MEAN, "F32", keys.mean.numpy())
        add_rope(layer, keys.rope)
    for (layer, side), side_frames in sorted(frames.items()):
        add_rows(layer, f"{side}.frames", side_frames.rows)
        add(layer, f"{side}.scales", "U8", side_frames.scales.astype(numpy.uint8))
        add_rope(layer, side_frames.rope)
    if frames:
        tables = next(iter(frames.values())).tables
        add(0, FREQUENCIES, "U16", tables.frequencies.astype(numpy.uint16))
        add(0, VALUES, "F16", tables.values.numpy().astype(numpy.float16))
    return result


def _losses(basis: Basis, side: str) -> list[float]:
    name = LOSSES.format(side=side)
    texts = basis.model[name].split(",") if name in basis.model else []
    if (texts and len(texts) != basis.layers_described) or not all(_LOSS.fullmatch(text) for text in texts):
        raise InvalidHeader(
            f"{basis.where}: model.{name} is {basis.model[name]!r:.100}, expected {basis.layers_described} numbers such as 0.0125 or 3e-05"
        )
    return [float(text) for text in texts]
