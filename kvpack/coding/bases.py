"""Basis files, which describe the keys and values of one model (spec/basis.md), and the bit allocation for recipes that use a basis."""

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
from kvpack.file.layer_states import StateEntry, list_features
from kvpack.formats.arguments import describe
from kvpack.formats.balanced_frames import CalibratedFrames
from kvpack.formats.basis import RUN_COLUMNS, BasisRows, CalibratedRows
from kvpack.formats.errors import InvalidHeader, InvalidParameter, InvalidType, OutOfBounds
from kvpack.formats.frames import Frames, Rope
from kvpack.formats.klt import HEAD_RUN_COLUMNS, Klt, default_gain
from kvpack.formats.lazy import functional, numpy, torch
from kvpack.formats.raw import Raw
from kvpack.formats.transform import MAX_STEP, default_chunk

from .basis_files import LONGEST_ROPE, SIDES, check_is_basis, open_basis, read_balanced_frames, read_frames, read_rows, states_named

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvpack.formats.base import Codec

    Numbers = numpy.ndarray[Any, Any]


LOSSES = "losses.{side}"
"""Metadata key of the losses measured for keys (side "k") or values ("v"): comma-separated numbers, one per layer."""

MIN_BITS, MAX_BITS = 0.25, 8.0

MIN_TRANSFORM_BITS = 0.05

CHUNK_BITS = 1024
"""Number of bits that a chunk of the codec transform takes for the state of its entropy coder, without symbols."""

FILE_TOKENS = 4096
"""Number of tokens of the file for which expected bits per value are computed. Shorter files need more bits per value."""

STREAM_BYTES = {"klt": 200, "transform": 330}
"""File overhead of a stream in bytes, by codec: header entries, padding and chunk offsets."""

TRANSFORM_STREAMS = 6

RAW_SHARE = 0.003
"""Fraction of tokens that recipes such as transform-0.6 keep raw. Measured with SmolLM2-135M: 0.3% to 0.7%."""

UNSEEN_TEXT_FACTOR = 1.04
"""Ratio of the bits that symbols take in unseen text to the tables' estimate, measured with SmolLM2-135M on a novel."""

RAW_BITS, RAW_POSITION_BITS = 16, 64
"""Bits per value of a raw token, and bits of its position, which keys and values both store."""

DISTORTIONS = (1.0, 0.3634, 0.1175, 0.03454, 0.009497, 0.002499, 0.000642, 0.000163, 0.0000412)
"""Mean squared error of a normally distributed value with unit variance, quantized to 0 to 8 bits.

Sources: Max 1960, Table I, and Panter and Dite above 5 bits.
"""

_GAINS = tuple(before - after for before, after in pairwise(DISTORTIONS))
"""Reduction of the error of a column by each additional bit."""

_SIDE_NAMES = {"k": "keys", "v": "values"}
_ADVICE = ": make a new basis with kvpack calibrate"

_STEPS = 100
_LOSS_PATTERN = re.compile(r"[0-9]{1,6}(\.[0-9]{1,12})?(e-[0-9]{2})?")


class Basis:
    """The calibrated basis of one model: matrices for the codecs klt and transform, and for encoding keys in balanced frames.

    ``kvpack calibrate`` writes a basis file; ``Basis.load`` and ``Basis.from_bytes`` read one.

    Attributes:
        digest: SHA-256 of the file (32 bytes). Recipes and caches identify the basis by it.
        model: Fields that identify the model for which the basis was calibrated.
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
        # torch warns about read-only memory, so it reads the original.
        with container.open_bytes(data, where=where) as file:
            check_is_basis(file)
            self.model: Mapping[str, str] = dict(file.header.model)
            self.layers = len(file.header.layers)
            places = [(number, name) for number, layer in enumerate(file.header.layers) for name, _ in layer.sides()]
            self._rows = {place: read_rows(file, *place) for place in places}
            self._frames = read_frames(file)
            self._balanced = read_balanced_frames(file)
            self._queries = {state.layer: array for state, array in states_named(file, QUERIES)}
            self._means = {state.layer: array for state, array in states_named(file, MEAN)}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read and check the basis file at ``path``.

        Raises InvalidParameter if the file is a cache, and the same errors as ``kvpack.load`` if the file is missing or damaged.
        """
        with open_basis(path) as source:
            return cls(source.read_all(), source.where)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = "basis") -> Self:
        """Create a basis from the bytes of a basis file. Raises the same errors as ``load``, with ``where`` as the basis's name in
        messages.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise InvalidType(f"data is {describe(data)}, expected the bytes of a basis file: to read a path, use Basis.load")
        return cls(bytearray(data), where)

    def __repr__(self) -> str:
        return f"Basis({self.digest.hex()[:16]}, {self.layers} layers, model {dict(self.model)})"

    def __deepcopy__(self, memo: object) -> Basis:
        return self

    def sides(self) -> Iterator[tuple[int, str]]:
        """Yield the (layer, "k" or "v") pairs for which the basis has rows, in order."""
        return iter(self._rows)

    @property
    def described_layer_count(self) -> int:
        """Number of layers up to the last one for which the basis has rows or balanced frames."""
        return 1 + max((layer for layer, _ in (*self._rows, *self._balanced)), default=-1)

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """The (heads, head dim) pairs for which the basis has rows or frames."""
        rows = {(state.heads, state.dim) for state in self._rows.values()}
        return rows | {(state.heads, state.dim) for state in self._balanced.values()}

    def rows(self, layer: int, side: str) -> BasisRows:
        """Return the rows for ``side`` ("k" or "v") of ``layer``. Raises OutOfBounds if the basis has none."""
        cached = self._rows.get((layer, side))
        if cached is None:
            raise OutOfBounds(f"{self.where}: the basis has no matrices for the {_SIDE_NAMES[side]} of layer {layer}{_ADVICE}")
        return cached

    def frames(self, layer: int, side: str) -> Frames:
        """Return the frames of ``side`` ("k" or "v") of ``layer`` for the codec transform. Raises OutOfBounds if the basis has none."""
        cached = self._frames.get((layer, side))
        if cached is None:
            raise OutOfBounds(f"{self.where}: the basis has no frames for the {_SIDE_NAMES[side]} of layer {layer}{_ADVICE}")
        return cached

    def balanced_frames(self, layer: int, frame: str) -> CalibratedFrames:
        """Return the frames for the keys of each head of ``layer``. ``frame`` is "balanced" or "centered".

        Raises OutOfBounds if the basis has none.
        """
        cached = self._balanced.get((layer, frame))
        if cached is None:
            raise OutOfBounds(
                f"{self.where}: the basis has no {frame} frames for the keys of layer {layer}: make them with kvpack calibrate"
            )
        return CalibratedFrames(self.digest, layer, cached)

    @property
    def has_balanced_frames(self) -> bool:
        """True if the basis has balanced frames for the keys of at least one layer."""
        return bool(self._balanced)

    def channel_queries(self, layer: int) -> CalibratedFrames:
        """Return the mean square of each query channel of ``layer``, float32 ``[kv_head, dim]``, for ``channel_scale=balanced``.

        Raises OutOfBounds if the basis has none.
        """
        return CalibratedFrames(self.digest, layer, queries=self.queries(layer).diagonal(dim1=1, dim2=2).contiguous())

    def queries(self, layer: int) -> torch.Tensor:
        """Return the mean of q q^T over the queries of each key head, float32 ``[kv_head, dim, dim]``.

        Raises OutOfBounds if the basis has none.
        """
        return self._key_statistics(self._queries, layer, "second moments of queries")

    def mean(self, layer: int) -> torch.Tensor:
        """Return the mean of the keys of ``layer`` before RoPE, float32 ``[kv_head, dim]``. Raises OutOfBounds if the basis has none."""
        return self._key_statistics(self._means, layer, "mean of keys before RoPE")

    @cached_property
    def losses(self) -> Mapping[tuple[int, str], float]:
        """Loss of each tensor, by (layer, "k" or "v"), when all tensors are packed at one width. Empty if the calibration did not measure
        losses.

        Raises InvalidHeader.
        """
        return MappingProxyType({(layer, side): loss for side in SIDES for layer, loss in enumerate(_parse_losses(self, side))})

    def _key_statistics(self, arrays: Mapping[int, torch.Tensor], layer: int, description: str) -> torch.Tensor:
        if layer not in arrays:
            raise OutOfBounds(f"{self.where}: the basis has no {description} for layer {layer}{_ADVICE}")
        return arrays[layer]

    def sides_with_frames(self) -> list[tuple[int, str]]:
        """Return the (layer, "k" or "v") pairs for which the basis has frames, in order."""
        return sorted(self._frames)

    def transform_parameters(self, layer: int, side: str, bits: float, raw: bool = False) -> CalibratedRows:
        """Return the parameters of the codec transform for the keys ("k") or values ("v") of one layer.

        ``bits`` is the average number of bits per value over all layers. With ``raw=True``, it includes the raw tokens. Raises OutOfBounds
        for a missing layer, and InvalidParameter if ``bits`` is out of range.
        """
        return CalibratedRows(self.rows(layer, side), self.digest, layer, frames=self.frames(layer, side), step=self.step(bits, raw))

    def step(self, bits: float, raw: bool = False) -> int:
        """Return the finest quantization step of the codec transform at which files have at most ``bits`` bits per value on average.

        With ``raw=True``, the average includes the raw tokens. All layers share one step, because errors have the same unit in all layers.
        Raises InvalidParameter if ``bits`` is out of range, or too few even for the coarsest step.
        """
        _check_bits(bits, MIN_TRANSFORM_BITS)
        least = self.min_transform_bits(raw)
        if bits < least:
            # Rounded up to a hundredth, because that value is accepted.
            raise InvalidParameter(
                f"{self.where}: bits is {bits:g}, but with this basis, the transform codec needs at least {least:.4g} bits per value "
                f"in a file of {FILE_TOKENS} tokens: write transform-{math.ceil(100 * least) / 100:g} or more"
            )
        return max(step for step, step_bits in enumerate(self._step_bits[raw]) if step_bits <= bits)

    @cached_property
    def _step_bits(self) -> dict[bool, list[float]]:
        """Bits per value at each step, keyed by ``raw`` (see ``transform_bits``)."""
        return {raw: [self.transform_bits(step, raw) for step in range(MAX_STEP + 1)] for raw in (False, True)}

    def min_transform_bits(self, raw: bool = False) -> float:
        """Return the minimum ``bits`` that ``step`` accepts: the bits per value of everything except symbols."""
        return min(self._step_bits[raw])

    def transform_bits(self, step: int, raw: bool = False) -> float:
        """Return the expected bits per value of files that use the codec transform with this quantization step."""
        bits, values = 0.0, 0
        for place, frames in self._frames.items():
            channels = frames.count * frames.columns
            chunk = default_chunk(self._rows[place].dim)
            bits += UNSEEN_TEXT_FACTOR * channels * frames.expected_bits(step) + CHUNK_BITS * frames.heads(self._rows[place].dim) / chunk
            bits += 8 * STREAM_BYTES["transform"] * TRANSFORM_STREAMS / FILE_TOKENS
            if raw:
                bits += RAW_SHARE * (RAW_BITS * channels + RAW_POSITION_BITS)
            values += channels
        return bits / values if values else 0.0

    def klt_parameters(self, layer: int, side: str, bits: float, gain: str | None = None, per_head: bool = False) -> CalibratedRows:
        """Return the parameters of the codec klt for the keys ("k") or values ("v") of one layer.

        ``bits`` is the average number of bits per value over all layers. ``gain`` and ``per_head`` are as for ``widths``. Raises
        OutOfBounds if the basis has no such layer or side, and InvalidParameter if ``bits`` is out of range.
        """
        return CalibratedRows(self.rows(layer, side), self.digest, layer, self.widths(bits, gain, per_head)[layer, side])

    @cached_property
    def _run_weights(self) -> dict[tuple[int, str, bool], Numbers]:
        """Mean square of the column weights in each run, by (layer, side, per head). A run has 8 columns of one head, or 16 of all heads.
        """
        result = {}
        for place, rows in self._rows.items():
            squares = rows.weights[0, :, 0].to(torch.float64).square()
            for per_head, parts in ((True, squares), (False, squares.mean(0, keepdim=True))):
                columns = HEAD_RUN_COLUMNS if per_head else RUN_COLUMNS
                runs = [torch.stack([part.mean() for part in torch.split(head, columns)]) for head in parts]
                result[*place, per_head] = torch.cat(runs).numpy()
        return result

    def widths(self, bits: float, gain: str | None = None, per_head: bool = False) -> Mapping[tuple[int, str], bytes]:
        """Return the bit widths that minimize the loss at an average of ``bits`` bits per value, by (layer, "k" or "v").

        With ``per_head=True``, each head has its own widths for runs of 8 columns. Otherwise, all heads share the widths of runs of 16.
        Each bit is assigned to the run whose weighted error it reduces most (Shoham and Gersho 1988). ``gain`` is the codec's option:
        "none", "fp16", or None for ``default_gain``. With small head dims, gains and the minimum of one bit may cost more than ``bits``.
        Raises InvalidParameter if ``bits`` is out of range.
        """
        _check_bits(bits, MIN_BITS)
        key = bits, gain, per_head
        if key not in self._widths:
            low, high = -60.0, 60.0
            for _ in range(_STEPS):
                middle = (low + high) / 2
                exceeds = self.average_bits(self._widths_at_slope(2.0**middle, per_head), gain, per_head) > bits
                low, high = (middle, high) if exceeds else (low, middle)
            self._widths[key] = MappingProxyType(self._widths_at_slope(2.0**high, per_head))
        return self._widths[key]

    @cached_property
    def _widths(self) -> dict[tuple[float, str | None, bool], Mapping[tuple[int, str], bytes]]:
        # The search covers the whole model, and its result is needed again for every layer.
        return {}

    def _widths_at_slope(self, slope: float, per_head: bool) -> dict[tuple[int, str], bytes]:
        """Return the largest widths at which each run's last bit reduces the weighted error by more than ``slope``."""
        result = {}
        for place in self._rows:
            weights = self._run_weights[*place, per_head]
            widths = (weights[:, None] * _GAINS > slope).sum(1)
            if not widths.any():
                widths[weights.argmax()] = 1
            result[place] = bytes(widths.tolist())
        return result

    def average_bits(self, widths: Mapping[tuple[int, str], bytes], gain: str | None = None, per_head: bool = False) -> float:
        """Return the average number of bits per value in files with these ``widths``."""
        bits, values = 0.0, 0
        for place, run_widths in widths.items():
            rows = self._rows[place]
            has_gain = (gain or default_gain(rows.dim, per_head)) != "none"
            counts, heads = (HEAD_RUN_COLUMNS, 1) if per_head else (RUN_COLUMNS, rows.heads)
            columns = numpy.minimum(counts, rows.dim - numpy.arange(0, rows.dim, counts))
            taken = numpy.frombuffer(run_widths, numpy.uint8).reshape(-1, len(columns)) * columns
            # The codes of each run of 8 columns fill whole bytes.
            bits += heads * int((8 * -(-taken // 8) if per_head else taken).sum()) + 16 * rows.heads * has_gain
            streams = has_gain + (1 if per_head else len(Klt.from_widths(rows.dim, self.digest, *place, run_widths).layout(1, 1, 1)) - 1)
            bits += 8 * STREAM_BYTES["klt"] * streams / FILE_TOKENS
            values += rows.heads * rows.dim
        return bits / values

    def check_model(self, model: Mapping[str, str], digests: Sequence[str] = ()) -> None:
        """Raise InvalidParameter unless ``model``, which identifies a cache's model, is the model of this basis.

        Weights and RoPE settings are compared if both identities have the same kind of weights digest for the cache's dtype. Otherwise,
        only the names are compared, which may be paths. ``digests`` contains more digests of the weights of the cache's model.
        """
        # The digest of the same weights differs by dtype.
        weights = self.model.get(weights_key(model.get("dtype", "")), self.model.get("weights"))
        own_fields = self.model if weights is None else {**self.model, "weights": weights}
        # A digest of all weights cannot be compared with a digest of a sample, nor can the RoPE texts stored with them.
        kind = own_fields.get("weights", "").partition(":")[0]
        if same := [text for text in digests if text.partition(":")[0] == kind]:
            model = {**model, "weights": same[0]}
        kinds = [description["weights"].partition(":")[0] for description in (model, own_fields) if "weights" in description]
        for name in ("weights", "rope") if len(kinds) == 2 and kinds[0] == kinds[1] else ("name",):
            actual, expected = model.get(name), own_fields.get(name)
            if actual is None or expected is None or actual == expected:
                continue
            if name == "name" and os.path.basename(actual) == os.path.basename(expected):
                continue
            dtypes = [description.get("dtype") for description in (self.model, model)]
            unknown = name == "weights" and weights == self.model.get("weights") and None not in dtypes and dtypes[0] != dtypes[1]
            note = f"its dtype is {dtypes[0]}, but the cache's is {dtypes[1]}; load the model in {dtypes[0]}"
            verb = "are" if name == "weights" else "is"
            raise InvalidParameter(
                f"{self.where} is a basis for a model whose {name} {verb} {expected!r}, but the {name} of the cache's model {verb} "
                f"{actual!r}: {note if unknown else 'make a basis for the model of the cache with kvpack calibrate'}"
            )


def _check_bits(bits: float, minimum: float) -> None:
    if not isinstance(bits, int | float) or not minimum <= bits <= MAX_BITS:
        text = f"{bits:g}" if isinstance(bits, float) else describe(bits)
        raise InvalidParameter(f"bits is {text}, expected {minimum:g} to {MAX_BITS:g} bits per value")


class BalancedKeys(NamedTuple):
    """Calibrated statistics of the keys of one layer, float32 ``[kv_head, dim, dim]``.

    ``balanced`` and ``centered`` are frames as in ``BalancedFrames``. ``queries`` is the mean of q q^T over each head's queries after RoPE.
    ``mean``, ``[kv_head, dim]``, is the mean of the keys before RoPE. ``rope`` describes RoPE's rotation. If it is unknown, ``mean`` and
    ``rope`` are None.
    """

    balanced: torch.Tensor
    centered: torch.Tensor
    queries: torch.Tensor
    mean: torch.Tensor | None = None
    rope: Rope | None = None


def weights_key(dtype: str) -> str:
    """Return the metadata key of the weights digest for a ``dtype`` other than the checkpoint's."""
    return f"weights.{dtype}"


def basis_bytes(
    rows: Mapping[tuple[int, str], torch.Tensor],
    layers: int,
    model: Mapping[str, str],
    dtype: str = "fp16",
    frames: Mapping[tuple[int, str], Frames] | None = None,
    balanced: Mapping[int, BalancedKeys] | None = None,
) -> bytes:
    """Return the bytes of a basis file for a model with ``layers`` layers.

    ``rows``, float32 ``[kv_head, row, dim]`` each, and ``frames``, which share their tables, are keyed by (layer, "k" or "v"). ``balanced``
    is keyed by layer. Raises ValueTooLarge if ``dtype`` ("fp16" or "fp32") cannot represent a value, and LimitExceeded if the file would
    exceed a limit of the format.
    """
    codecs: dict[Codec, int] = {}
    entries, arrays = [], {}
    for layer in range(layers):
        arrays_of_layer = {side: rows[layer, side] for side in SIDES if (layer, side) in rows}
        # Keys and values of a layer store the same number of rows; the ones with the smaller head dim are padded.
        count = max((values.shape[1] for values in arrays_of_layer.values()), default=0)
        sides = {}
        for side, values in arrays_of_layer.items():
            codec = Raw(values.shape[2], dtype)
            padded = functional.pad(values.to(torch.float32), (0, 0, 0, count - values.shape[1]))
            arrays[f"{layer}.{side}.values"] = codec.encode(padded)["values"].contiguous().numpy()
            sides[side] = SideEntry(codecs.setdefault(codec, len(codecs)), 1, values.shape[0], (count,), 0, dtype, 0)
        entries.append(LayerEntry(sides.get("k"), sides.get("v")))
    states = _frame_states(frames or {}, balanced or {}, dtype)
    arrays |= {state.where: array for state, array in states.items()}
    ropes = [*(part.rope for part in (frames or {}).values()), *(part.rope for part in (balanced or {}).values())]
    limits = [rope.longest for rope in ropes if rope is not None and rope.longest is not None]
    if limits:
        model = {**model, LONGEST_ROPE: str(min(limits))}
    required, ignorable = list_features(states)
    contents = Contents(
        codecs=tuple(codecs), layers=tuple(entries), model=dict(model), required=tuple(sorted((FEATURE, *required))), ignorable=ignorable
    )
    return container.to_bytes(contents, arrays)


def _frame_states(frames: Mapping[tuple[int, str], Frames], balanced: Mapping[int, BalancedKeys], dtype: str) -> dict[StateEntry, Any]:
    """Return the arrays of all frames, keyed by their entries in the file's header."""
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


def _parse_losses(basis: Basis, side: str) -> list[float]:
    name = LOSSES.format(side=side)
    texts = basis.model[name].split(",") if name in basis.model else []
    if (texts and len(texts) != basis.described_layer_count) or not all(_LOSS_PATTERN.fullmatch(text) for text in texts):
        raise InvalidHeader(
            f"{basis.where}: model.{name} is {basis.model[name]!r:.100}, expected {basis.described_layer_count} numbers such as 0.0125 or "
            "3e-05"
        )
    return [float(text) for text in texts]
