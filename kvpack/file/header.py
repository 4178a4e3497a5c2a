"""The header of a kvpack file as frozen dataclasses (spec/container.md, Fields).

Constructors check every rule, so every Header object is valid, whether it was read or will be written.
Messages name the place as the header spells it, such as ``layers[3].k.codec``.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from kvpack.formats.balanced import Balanced
from kvpack.formats.base import DTYPE_BYTES, Codec, Layout
from kvpack.formats.errors import InvalidHeader, KvpackError, LimitExceeded, UnsupportedVersion
from kvpack.formats.group import TOKEN_SCALE_FEATURE
from kvpack.formats.key_mean import KeyMean
from kvpack.formats.raw import DTYPES
from kvpack.formats.raw_positions import RawPositions
from kvpack.formats.token_norms import FEATURE as LOG_NORMS_FEATURE

from . import basis, hidden_tokens, layer_positions, layer_states, position_offsets
from .checks import check_integer, check_names, check_sequence, check_string, check_type
from .limits import MAX_BATCH, MAX_CODECS, MAX_ENTRIES, MAX_FILE_BYTES, MAX_HEADS, MAX_LAYERS, MAX_NAMES, MAX_RATIO, MAX_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

FORMAT = 1
"""The major version of the format."""

CODEC_FEATURES = frozenset({Balanced.feature, KeyMean.feature, LOG_NORMS_FEATURE, RawPositions.feature, TOKEN_SCALE_FEATURE})
"""The required features that stand for parameters of codecs, and for side-cars (``Codec.features``)."""

FEATURES = CODEC_FEATURES | {
    basis.FEATURE,
    hidden_tokens.FEATURE,
    layer_positions.FEATURE,
    layer_states.FEATURE,
    position_offsets.FEATURE,
}
"""The required features that this kvpack knows."""

FILTERS = ("none", "zstd")
DIGEST_BYTES = 16


@dataclass(frozen=True)
class SideEntry:
    """The keys or the values of one layer: ``runs`` of packed tokens, then ``tail`` raw tokens of ``tail_dtype``.

    ``codec`` is an index into the codec list. ``window`` is the number of raw tokens at which a writer encodes the tail.
    ``entries`` maps the name of each stream with one row per entry to its number of rows.
    Raises InvalidHeader or LimitExceeded, which name the field.
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
        check_type("codec", self.codec, int)
        if self.codec < 0:
            raise InvalidHeader(f"codec is {self.codec}, expected at least 0")
        check_integer("batch", self.batch, 1, MAX_BATCH)
        check_integer("heads", self.heads, 1, MAX_HEADS)
        check_sequence("runs", self.runs, tuple, MAX_ENTRIES)
        for number, run in enumerate(self.runs):
            check_integer(f"runs[{number}]", run, 1, MAX_TOKENS)
        check_integer("tail", self.tail, 0, MAX_TOKENS)
        check_integer("window", self.window, 0, MAX_TOKENS)
        if self.tokens > MAX_TOKENS:
            raise LimitExceeded(f"tokens is {self.tokens}, the limit is {MAX_TOKENS}")
        for name, count in self.entries:
            check_string("a key of entries", name)
            check_integer(f"entries.{name}", count, 0, MAX_TOKENS)
        check_string("tail_dtype", self.tail_dtype)
        if self.tail_dtype not in DTYPES:
            raise InvalidHeader(f"tail_dtype is {self.tail_dtype!r}, expected one of {', '.join(DTYPES)}")

    @property
    def packed(self) -> int:
        """The number of packed tokens: all except the tail."""
        return sum(self.runs)

    @property
    def tokens(self) -> int:
        return self.packed + self.tail


@dataclass(frozen=True)
class LayerEntry:
    """One layer; an absent side is None. Raises InvalidHeader when the sides differ in batch or tokens."""

    k: SideEntry | None
    v: SideEntry | None

    def __post_init__(self) -> None:
        if self.k is None or self.v is None:
            return
        if self.k.batch != self.v.batch:
            raise InvalidHeader(f"k.batch is {self.k.batch} and v.batch {self.v.batch}, expected the same")
        if self.k.tokens != self.v.tokens:
            raise InvalidHeader(f"k.tokens is {self.k.tokens} and v.tokens {self.v.tokens}, expected the same")

    def sides(self) -> Iterator[tuple[str, SideEntry]]:
        """The sides that are present, as ("k" or "v", side)."""
        if self.k is not None:
            yield "k", self.k
        if self.v is not None:
            yield "v", self.v


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor: ``digest`` is the XXH3-128 (canonical: big-endian) of its ``stored_bytes`` stored bytes.

    Raises InvalidHeader or LimitExceeded, which name the field.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    filter: str
    stored_bytes: int
    digest: bytes

    def __post_init__(self) -> None:
        # True equals 1 in Python, also in the comparison with the layout.
        if not {int}.issuperset(map(type, self.shape)):
            raise InvalidHeader(f"shape is {list(self.shape)}, expected integers")
        if self.filter not in FILTERS:
            raise InvalidHeader(f"filter is {self.filter!r}, expected one of {', '.join(FILTERS)}")
        check_integer("stored_bytes", self.stored_bytes, 0, MAX_FILE_BYTES)
        check_type("digest", self.digest, bytes)
        if len(self.digest) != DIGEST_BYTES:
            raise InvalidHeader(f"digest has {len(self.digest)} bytes, expected {DIGEST_BYTES}")

    def check_against(self, name: str, layout: Layout) -> None:
        """Raise InvalidHeader or LimitExceeded unless this is the tensor ``name`` of ``layout``."""
        for field, found, expected in (("name", self.name, name), ("dtype", self.dtype, layout.dtype), ("shape", self.shape, layout.shape)):
            if found != expected:
                raise InvalidHeader(f"{field} is {found!r}, the layers and codecs give {expected!r} ({name})")
        size = layout_bytes(layout)
        if self.filter == "none" and self.stored_bytes != size:
            raise InvalidHeader(f"stored_bytes is {self.stored_bytes}, without a filter the shape takes {size} ({name})")
        if self.filter == "zstd" and size > MAX_RATIO * self.stored_bytes:
            raise LimitExceeded(
                f"stored_bytes is {self.stored_bytes} for {size} decoded bytes, the limit is {MAX_RATIO} per stored byte ({name})"
            )


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of a file, before its tensors are stored.

    ``model`` is the identity of the model, ``recipe`` is informative, ``start`` is the first position of the range that all
    layers share, and ``starts`` says where each layer starts in it. Readers preserve an ``ignorable`` feature that they do not
    know; an unknown ``required`` feature raises UnsupportedVersion.
    Raises InvalidHeader or LimitExceeded, which name the place.
    """

    codecs: tuple[Codec, ...]
    layers: tuple[LayerEntry, ...]
    model: Mapping[str, str] = dataclasses.field(default_factory=dict)
    recipe: str = ""
    start: int = 0
    required: tuple[str, ...] = ()
    ignorable: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_required(self.required)
        check_names("model", self.model, str)
        check_names("ignorable", self.ignorable, bytes)
        check_string("recipe", self.recipe)
        check_integer("start", self.start, 0, MAX_TOKENS)
        check_sequence("codecs", self.codecs, tuple, MAX_CODECS)
        check_sequence("layers", self.layers, tuple, MAX_LAYERS)
        for (number, name), side in self._first_uses.items():
            try:
                self._check_side(side)
            except InvalidHeader as error:
                raise within(f"layers[{number}].{name}", error) from None
        for number, layer in enumerate(self.layers):
            if layer.v is not None and self.codecs[layer.v.codec].side_car(KeyMean) is not None:
                raise InvalidHeader(f"layers[{number}].v: its codec has {KeyMean.name}, which is for keys only")
        if (named := CODEC_FEATURES.intersection(self.required)) != (used := set(features_of(self.codecs))):
            names, uses = (", ".join(sorted(found)) or "none" for found in (named, used))
            raise InvalidHeader(f"required names {names} of the features of codecs, the codecs have {uses}")
        _ = self.starts, self.states, self.hidden, self.offsets
        if self.is_basis:
            basis.check_basis(self.layers, self.codecs)
            basis.check_frames(self.layers, self.codecs, self.states)

    @property
    def is_basis(self) -> bool:
        """True if the file is a basis and not a cache."""
        return basis.FEATURE in self.required

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The position of the first token of every layer."""
        return layer_positions.layer_starts(self.start, self.layers, self.required, self.ignorable)

    @cached_property
    def states(self) -> tuple[layer_states.StateEntry, ...]:
        """The states of all layers, in file order."""
        return layer_states.layer_states(self.layers, self.required, self.ignorable)

    @cached_property
    def batch(self) -> int:
        """The number of sequences that every layer with sides or states has at least; 0 if none has."""
        sides = (side.batch for layer in self.layers for _, side in layer.sides())
        return min((*sides, *(state.shape[0] for state in self.states)), default=0)

    @cached_property
    def hidden(self) -> tuple[hidden_tokens.Hidden, ...]:
        """The tokens that no query may attend to."""
        ends = (first + side.tokens for first, layer in zip(self.starts, self.layers, strict=True) for _, side in layer.sides())
        return hidden_tokens.hidden_tokens(self.batch, self.start, max(ends, default=self.start), self.required, self.ignorable)

    @cached_property
    def offsets(self) -> tuple[int, ...] | None:
        """Difference between position and token index after the range, for each sequence; None if the file does not record it."""
        return position_offsets.position_offsets(self.layers, self.starts, self.states, self.start, self.required, self.ignorable)

    def states_of(self, number: int) -> list[layer_states.StateEntry]:
        """The states of layer ``number``, by ascending names."""
        return self._states_by_layer.get(number, [])

    @cached_property
    def _states_by_layer(self) -> dict[int, list[layer_states.StateEntry]]:
        found: dict[int, list[layer_states.StateEntry]] = {}
        for state in self.states:
            found.setdefault(state.layer, []).append(state)
        return found

    @cached_property
    def _first_uses(self) -> dict[tuple[int, str], SideEntry]:
        """Each distinct side at its first occurrence: most layers are equal, so one check covers them."""
        first: dict[SideEntry, tuple[int, str]] = {}
        for number, layer in enumerate(self.layers):
            for name, side in layer.sides():
                first.setdefault(side, (number, name))
        return {place: side for side, place in first.items()}

    def _check_side(self, side: SideEntry) -> None:
        if side.codec >= len(self.codecs):
            raise InvalidHeader(f"codec is {side.codec}, the file has {len(self.codecs)} codecs")
        codec = self.codecs[side.codec]
        if codec.fixed_heads not in (None, side.heads):
            raise InvalidHeader(f"heads is {side.heads}, the widths of codec {codec.id} are of {codec.fixed_heads} heads")
        group, layouts = codec.token_group, codec.row_layouts
        if group == 1 and len(side.runs) > 1 and all(layout.per != "run" for layout in layouts.values()):
            raise InvalidHeader(f"runs has {len(side.runs)} entries, a codec that encodes tokens one by one has at most 1")
        expected = [name for name, layout in layouts.items() if layout.per == "entry"]
        if [name for name, _ in side.entries] != expected:
            found = ", ".join(dict(side.entries)) or "none"
            raise InvalidHeader(f"entries names {found}, the codec has {', '.join(expected) or 'none'}")
        if side.window % group:
            raise InvalidHeader(f"window is {side.window}, expected a multiple of the codec's token group {group}")

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """Name, dtype and shape of every payload tensor, in file order."""
        found = {}
        for number, layer in enumerate(self.layers):
            for name, side in layer.sides():
                found.update({f"{number}.{name}.{stream}": layout for stream, layout in self.streams[side].items()})
            found.update({state.where: state.layout for state in self.states_of(number)})
        return found

    @cached_property
    def streams(self) -> dict[SideEntry, dict[str, Layout]]:
        """The tensors of every side by stream name, in file order; equal sides share one entry."""
        return {side: side_tensors(self.codecs[side.codec], side) for side in self._first_uses.values()}


@dataclass(frozen=True, kw_only=True)
class Header(Contents):
    """The whole header: ``tensors`` lists every payload tensor in file order and must match the layers and codecs."""

    tensors: tuple[TensorEntry, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sequence("tensors", self.tensors, tuple, MAX_ENTRIES)
        if len(self.tensors) != len(self.layouts):
            raise InvalidHeader(f"tensors has {len(self.tensors)} entries, the layers and codecs give {len(self.layouts)}")
        for number, (tensor, (name, layout)) in enumerate(zip(self.tensors, self.layouts.items(), strict=True)):
            try:
                tensor.check_against(name, layout)
            except (InvalidHeader, LimitExceeded) as error:
                raise within(f"tensors[{number}]", error) from None

    @classmethod
    def of(cls, contents: Contents, tensors: tuple[TensorEntry, ...]) -> Header:
        """The header of ``contents`` stored as ``tensors``."""
        return cls(**{field.name: getattr(contents, field.name) for field in dataclasses.fields(Contents)}, tensors=tensors)


def side_tensors(codec: Codec, side: SideEntry, prefix: str = "") -> dict[str, Layout]:
    """Name (after ``prefix``), dtype and shape of every tensor of a side, in file order (spec/container.md, Runs and tail)."""
    result, entries = {}, dict(side.entries)
    for stream, layout in codec.layout(side.batch, side.heads, side.packed).items():
        if layout.per == "token":
            rows = sum(-(-run // layout.tokens_per_row) for run in side.runs)
        else:
            rows = len(side.runs) if layout.per == "run" else entries[stream]
        result[f"{prefix}{stream}"] = replace(layout, shape=(*layout.shape[:2], rows, *layout.shape[3:]))
    if side.tail:
        result[f"{prefix}tail"] = Layout(DTYPES[side.tail_dtype], (side.batch, side.heads, side.tail, codec.dim))
    return result


def layout_bytes(layout: Layout) -> int:
    """The size of a tensor in bytes before any filter."""
    return math.prod(layout.shape) * DTYPE_BYTES[layout.dtype]


def features_of(codecs: Iterable[Codec]) -> tuple[str, ...]:
    """The required features of ``codecs``, ascending."""
    return tuple(sorted(frozenset().union(*(codec.features for codec in codecs))))


def check_required(required: tuple[str, ...]) -> None:
    """Raise UnsupportedVersion for a required feature that this kvpack does not know, InvalidHeader for names out of order."""
    check_sequence("required", required, tuple, MAX_NAMES)
    for number, name in enumerate(required):
        check_string(f"required[{number}]", name)
        if name not in FEATURES:
            raise UnsupportedVersion(lacking(name))
    if any(second <= first for first, second in pairwise(required)):
        raise InvalidHeader(f"required is {list(required)}, expected names in ascending order")


def lacking(feature: str) -> str:
    """The message for a required feature that this kvpack does not know."""
    return f"the file needs the feature {feature!r:.200}, which this kvpack lacks; a newer one may read it"


def within(where: str, error: KvpackError) -> KvpackError:
    """``error`` with ``where`` put before the field that its message begins with."""
    return type(error)(f"{where}.{error}")
