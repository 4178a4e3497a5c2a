"""The header of a kvpack file as frozen dataclasses (spec/container.md, Fields).

Constructors check all rules, so every Header object is valid, whether it was read or will be written. Error messages contain the position
in the header, such as ``layers[3].k.codec``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

from kvpack.formats.balanced import FrameMap
from kvpack.formats.base import Codec
from kvpack.formats.errors import InvalidHeader, KvpackError, LimitExceeded, UnsupportedVersion
from kvpack.formats.group import TOKEN_SCALE_FEATURE
from kvpack.formats.key_mean import KeyMean
from kvpack.formats.raw import DTYPES
from kvpack.formats.raw_positions import RawPositions
from kvpack.formats.streams import DTYPE_BYTES, Layout
from kvpack.formats.token_norms import LOG_NORMS_FEATURE as LOG_NORMS_FEATURE

from . import basis, hidden_tokens, layer_positions, layer_states, position_offsets
from .checks import BINARY_BY_NAME, TEXT, TEXT_BY_NAME, Rule, check, check_fields
from .limits import MAX_BATCH, MAX_CODECS, MAX_ENTRIES, MAX_FILE_BYTES, MAX_HEADS, MAX_LAYERS, MAX_NAMES, MAX_RATIO, MAX_TOKENS

FORMAT = 1
"""Major version of the format."""

CODEC_FEATURES = frozenset({FrameMap.feature, KeyMean.feature, LOG_NORMS_FEATURE, RawPositions.feature, TOKEN_SCALE_FEATURE})
"""Required features of codec parameters and sidecars (``Codec.features``)."""

_FEATURES_WITH_DATA = (layer_positions.FEATURE, layer_states.FEATURE, hidden_tokens.FEATURE, position_offsets.FEATURE)
"""Required features that store data in ``ignorable``, in the order in which they are checked."""

FEATURES = CODEC_FEATURES.union({basis.FEATURE}, _FEATURES_WITH_DATA)
"""Required features that this version of kvpack supports."""

FILTERS = ("none", "zstd")
DIGEST_BYTES = 16

_TOKENS = Rule(int, MAX_TOKENS)
SIDE_RULES = {
    "codec": Rule(int),
    "batch": Rule(int, MAX_BATCH, 1),
    "heads": Rule(int, MAX_HEADS, 1),
    "runs": Rule(tuple, MAX_ENTRIES, each=Rule(int, MAX_TOKENS, 1)),
    "tail": _TOKENS,
    "window": _TOKENS,
    "tail_dtype": Rule(str, choices=tuple(DTYPES)),
}
TENSOR_RULES = {"filter": Rule(str, choices=FILTERS), "stored_bytes": Rule(int, MAX_FILE_BYTES), "digest": Rule(bytes)}
CONTENTS_RULES = {
    "model": TEXT_BY_NAME,
    "ignorable": BINARY_BY_NAME,
    "recipe": TEXT,
    "start": _TOKENS,
    "codecs": Rule(tuple, MAX_CODECS),
    "layers": Rule(tuple, MAX_LAYERS),
}
"""Rules for the fields of keys or values, of a tensor and of the whole header, in the order of the checks."""

_features = attrgetter("summary.features")


@dataclass(frozen=True)
class SideEntry:
    """The header entry for the keys or the values of one layer: runs of packed tokens, followed by a tail of raw tokens.

    ``codec`` is an index into the codec list. ``runs`` contains the number of tokens in each run, and ``tail`` is the number of raw tokens.
    ``window`` is the number of raw tokens that are encoded together. ``entries`` contains the number of rows of each stream with one row
    per entry. Raises InvalidHeader or LimitExceeded.
    """

    codec: int
    batch: int
    heads: int
    runs: tuple[int, ...]
    tail: int
    tail_dtype: str
    window: int
    entries: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, SIDE_RULES)
        check("tokens", self.tokens, _TOKENS)
        for name, count in self.entries:
            check("a key of entries", name, TEXT)
            check(f"entries.{name}", count, _TOKENS)

    @property
    def packed(self) -> int:
        """Number of packed tokens, without the tail."""
        return sum(self.runs)

    @property
    def tokens(self) -> int:
        return sum(self.runs) + self.tail


@dataclass(frozen=True)
class LayerEntry:
    """The header entry for one layer. Absent keys or values are None.

    Raises InvalidHeader if keys and values have different numbers of sequences or tokens.
    """

    k: SideEntry | None
    v: SideEntry | None

    def __post_init__(self) -> None:
        if self.k is None or self.v is None:
            return
        if self.k.batch != self.v.batch:
            raise InvalidHeader(f"k.batch is {self.k.batch}, but v.batch is {self.v.batch}: they must be equal")
        if self.k.tokens != self.v.tokens:
            raise InvalidHeader(f"k.tokens is {self.k.tokens}, but v.tokens is {self.v.tokens}: they must be equal")

    def sides(self) -> Iterator[tuple[str, SideEntry]]:
        """Yield ("k", keys) and ("v", values), omitting absent sides."""
        if self.k is not None:
            yield "k", self.k
        if self.v is not None:
            yield "v", self.v


@dataclass(frozen=True)
class TensorEntry:
    """The header entry for one stored tensor. ``digest`` is the big-endian XXH3-128 of the ``stored_bytes`` bytes in the file.

    Raises InvalidHeader or LimitExceeded.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    filter: str
    stored_bytes: int
    digest: bytes

    def __post_init__(self) -> None:
        # True equals 1 in Python, so the comparison with the layout would accept it.
        if not {int}.issuperset(map(type, self.shape)):
            raise InvalidHeader(f"shape is {list(self.shape)}, expected integers")
        check_fields(self, TENSOR_RULES)
        if len(self.digest) != DIGEST_BYTES:
            raise InvalidHeader(f"digest has {len(self.digest)} bytes, expected {DIGEST_BYTES}")

    def check_against(self, name: str, layout: Layout) -> None:
        """Raise InvalidHeader or LimitExceeded unless this entry describes a tensor called ``name`` with ``layout``."""
        fields = (("name", self.name, name), ("dtype", self.dtype, layout.dtype), ("shape", self.shape, layout.shape))
        for field, actual, expected in fields:
            if actual != expected:
                raise InvalidHeader(f"{field} is {actual!r}, but the layers and codecs imply {expected!r} ({name})")
        size = layout_bytes(layout)
        if self.filter == "none" and self.stored_bytes != size:
            raise InvalidHeader(f"stored_bytes is {self.stored_bytes}, expected {size} for the shape without a filter ({name})")
        if self.filter == "zstd" and size > MAX_RATIO * self.stored_bytes:
            raise LimitExceeded(
                f"stored_bytes is {self.stored_bytes} for {size} decoded bytes, but the ratio may be at most {MAX_RATIO} ({name})"
            )


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The fields of a header, except for the list of stored tensors.

    ``model`` identifies the model, and ``recipe`` is informative. ``start`` is the first position of the range that all layers share, and
    ``starts`` are the first positions of the layers. Readers ignore unknown ``ignorable`` features but keep them. An unknown ``required``
    feature raises UnsupportedVersion. Raises InvalidHeader or LimitExceeded.
    """

    codecs: tuple[Codec, ...]
    layers: tuple[LayerEntry, ...]
    model: Mapping[str, str] = dataclasses.field(default_factory=dict)
    recipe: str = ""
    start: int = 0
    required: tuple[str, ...] = ()
    ignorable: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check("required", self.required, Rule(tuple, MAX_NAMES))
        for number, feature in enumerate(self.required):
            check(f"required[{number}]", feature, TEXT)
            if feature not in FEATURES:
                raise UnsupportedVersion(unsupported_feature_message(feature))
        if [*self.required] != sorted({*self.required}):
            raise InvalidHeader(f"required is {list(self.required)}, expected names in ascending order")
        check_fields(self, CONTENTS_RULES)
        for (number, name), side in self._first_uses.items():
            try:
                self._check_side(side)
            except InvalidHeader as error:
                raise prefix_error(f"layers[{number}].{name}", error) from None
        for number, layer in enumerate(self.layers):
            if layer.v is not None and self.codecs[layer.v.codec].summary.keys_only:
                raise InvalidHeader(f"layers[{number}].v: its codec has {KeyMean.name}, which is allowed only for keys")
        if (listed := CODEC_FEATURES.intersection(self.required)) != (used := frozenset().union(*map(_features, self.codecs))):
            names, uses = (", ".join(sorted(codec_names)) or "none" for codec_names in (listed, used))
            raise InvalidHeader(f"required lists the codec features {names}, but the codecs use {uses}")
        for feature in _FEATURES_WITH_DATA:
            if (is_required := feature in self.required) != (feature in self.ignorable):
                places = ("required", "ignorable") if is_required else ("ignorable", "required")
                raise InvalidHeader(f"{feature} is in {places[0]} but not in {places[1]}: it must be in both")
        if self.ignorable:
            _ = self.starts, self.states, self.hidden, self.offsets
        if self.is_basis:
            basis.check_basis(self.layers, self.codecs)
            basis.check_frames(self.layers, self.codecs, self.states)

    @property
    def is_basis(self) -> bool:
        """True if the file is a basis instead of a cache."""
        return basis.FEATURE in self.required

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first position of each layer."""
        data = self.ignorable.get(layer_positions.FEATURE)
        return (self.start,) * len(self.layers) if data is None else layer_positions.parse_layer_starts(data, self.start, self.layers)

    @cached_property
    def states(self) -> tuple[layer_states.StateEntry, ...]:
        """The states of all layers, in file order."""
        data = self.ignorable.get(layer_states.FEATURE)
        return () if data is None else layer_states.parse_layer_states(data, self.layers)

    @cached_property
    def min_batch(self) -> int:
        """Smallest number of sequences in any layer, or 0 if all layers are empty."""
        sides = (side.batch for layer in self.layers for _, side in layer.sides())
        return min((*sides, *(state.shape[0] for state in self.states)), default=0)

    @cached_property
    def tokens(self) -> int:
        """Number of tokens from the file's first position to its last, or 0 if no layer has keys or values."""
        ends = (first + side.tokens for first, layer in zip(self.starts, self.layers, strict=True) for _, side in layer.sides())
        return max(ends, default=self.start) - self.start

    @cached_property
    def hidden(self) -> tuple[hidden_tokens.HiddenRange, ...]:
        """The tokens to which no query may attend."""
        data = self.ignorable.get(hidden_tokens.FEATURE)
        if data is None:
            return ()
        return hidden_tokens.parse_hidden_ranges(data, self.min_batch, self.start, self.start + self.tokens)

    @cached_property
    def offsets(self) -> tuple[int, ...] | None:
        """For each sequence, its position minus its token index after the last token. None if the file does not record it."""
        data = self.ignorable.get(position_offsets.FEATURE)
        return None if data is None else position_offsets.parse_position_offsets(data, self.layers, self.starts, self.states, self.start)

    def states_in_layer(self, layer_index: int) -> list[layer_states.StateEntry]:
        """Return the states of layer ``layer_index``, sorted by name."""
        return self._states_by_layer.get(layer_index, []) if self.states else []

    @cached_property
    def _states_by_layer(self) -> dict[int, list[layer_states.StateEntry]]:
        result: dict[int, list[layer_states.StateEntry]] = {}
        for state in self.states:
            result.setdefault(state.layer, []).append(state)
        return result

    @cached_property
    def _first_uses(self) -> dict[tuple[int, str], SideEntry]:
        """First (layer, side) that has each distinct header entry of keys or values.

        Most layers have equal entries, so each distinct entry is checked only once.
        """
        first: dict[SideEntry, tuple[int, str]] = {}
        for number, layer in enumerate(self.layers):
            for name, side in layer.sides():
                first.setdefault(side, (number, name))
        return dict(zip(first.values(), first, strict=True))

    def _check_side(self, side: SideEntry) -> None:
        if side.codec >= len(self.codecs):
            raise InvalidHeader(f"codec is {side.codec}, but the file has {len(self.codecs)} codecs")
        codec = self.codecs[side.codec]
        summary = codec.summary
        if summary.fixed_heads not in (None, side.heads):
            raise InvalidHeader(f"heads is {side.heads}, but the widths of codec {codec.id} are for {summary.fixed_heads} heads")
        if summary.group_tokens == 1 and len(side.runs) > 1 and not summary.has_run_rows:
            raise InvalidHeader(f"runs has {len(side.runs)} entries, expected at most 1 for a codec that encodes each token separately")
        if (names := tuple(dict(side.entries))) != summary.entries:
            expected = ", ".join(summary.entries) or "none"
            raise InvalidHeader(f"entries has the names {', '.join(names) or 'none'}, expected {expected} from the codec")
        if side.window % summary.group_tokens:
            raise InvalidHeader(f"window is {side.window}, expected a multiple of the codec's token group {summary.group_tokens}")

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The layout of each payload tensor by name, in file order."""
        result = {}
        for number, layer in enumerate(self.layers):
            for name, side in layer.sides():
                for stream, layout in self.streams[side].items():
                    result[f"{number}.{name}.{stream}"] = layout
            for state in self.states_in_layer(number):
                result[state.where] = state.layout
        return result

    @cached_property
    def streams(self) -> dict[SideEntry, dict[str, Layout]]:
        """Layouts of the tensors of each distinct header entry of keys or values, by stream name and in file order."""
        result = {}
        for side in self._first_uses.values():
            result[side] = side_tensors(self.codecs[side.codec], side)
        return result


@dataclass(frozen=True, kw_only=True)
class Header(Contents):
    """The complete header. ``tensors`` lists all payload tensors in file order and must match the layers and codecs."""

    tensors: tuple[TensorEntry, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check("tensors", self.tensors, Rule(tuple, MAX_ENTRIES))
        if len(self.tensors) != len(self.layouts):
            raise InvalidHeader(f"tensors has {len(self.tensors)} entries, expected {len(self.layouts)} from the layers and codecs")
        for number, (tensor, (name, layout)) in enumerate(zip(self.tensors, self.layouts.items(), strict=True)):
            try:
                tensor.check_against(name, layout)
            except (InvalidHeader, LimitExceeded) as error:
                raise prefix_error(f"tensors[{number}]", error) from None

    @classmethod
    def from_contents(cls, contents: Contents, tensors: tuple[TensorEntry, ...]) -> Header:
        """Return the header of a file with these contents and stored tensors."""
        return cls(**{field.name: getattr(contents, field.name) for field in dataclasses.fields(Contents)}, tensors=tensors)


def side_tensors(codec: Codec, side: SideEntry, prefix: str = "") -> dict[str, Layout]:
    """Return the layout of each tensor of a side in file order. Names begin with ``prefix`` (spec/container.md, Runs and tail)."""
    result, entries, rows_by_size = {}, dict(side.entries), {1: sum(side.runs)}
    for stream, layout in codec.run_layouts(side.batch, side.heads).items():
        rows, size = len(side.runs), layout.tokens_per_row
        if layout.per == "token":
            if size not in rows_by_size:
                rows_by_size[size] = 0
                for run in side.runs:
                    rows_by_size[size] += -(-run // size)
            rows = rows_by_size[size]
        elif layout.per == "entry":
            rows = entries[stream]
        result[f"{prefix}{stream}"] = replace(layout, shape=(*layout.shape[:2], rows, *layout.shape[3:]))
    if side.tail:
        result[f"{prefix}tail"] = Layout(DTYPES[side.tail_dtype], (side.batch, side.heads, side.tail, codec.dim))
    return result


def layout_bytes(layout: Layout) -> int:
    """Return the size of an unfiltered tensor in bytes."""
    return math.prod(layout.shape) * DTYPE_BYTES[layout.dtype]


def list_features(codecs: Iterable[Codec]) -> tuple[str, ...]:
    """Return the features that ``codecs`` require, in ascending order."""
    return tuple(sorted(frozenset().union(*map(_features, codecs))))


def unsupported_feature_message(feature: str) -> str:
    return f"the file needs the feature {feature!r:.200}, which this version of kvpack does not support: upgrade kvpack"


def prefix_error(where: str, error: KvpackError) -> KvpackError:
    """Return ``error`` with ``where`` and a dot before its message, which must begin with the name of a field."""
    return type(error)(f"{where}.{error}")
