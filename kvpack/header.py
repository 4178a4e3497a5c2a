"""The header of a kvpack file: what it holds, as frozen dataclasses and as canonical msgpack (spec/container.md, Header tensor).

Every rule is checked when an object is made, so a Header that exists is valid, whether it was read or is to be written.
Messages name the place as the header spells it, such as ``layers[3].k.codec``.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import msgpack

from .formats import codec_class
from .formats.base import DTYPE_BYTES, Layout
from .formats.errors import InvalidHeader, InvalidParameter, LimitExceeded, UnsupportedVersion
from .formats.raw import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .formats.base import Codec

FORMAT = 1
"""The one major number of a file."""

FEATURES: frozenset[str] = frozenset()
"""The required features that this kvpack knows."""

MAX_HEADER_BYTES = 8 * 2**20
"""Bytes of the header tensor."""
MAX_CODECS = 4096
MAX_LAYERS = 4096
MAX_TENSORS = 2**17
MAX_RUNS = 2**17
"""Runs of one side."""
MAX_BATCH = 65536
MAX_HEADS = 65536
MAX_TOKENS = 2**40 - 1
"""Tokens of one side, the position of the first token, and the window."""
MAX_FILE_BYTES = 2**60 - 1
MAX_STRING_BYTES = 4096
"""UTF-8 bytes of any string."""
MAX_BINARY_BYTES = 65536
"""Bytes of any binary value."""
MAX_NAMES = 256
"""Entries of ``model``, ``required`` and ``ignorable``, each."""
MAX_RATIO = 256
"""Decoded bytes of a zstd tensor for each stored byte."""

FILTERS = ("none", "zstd")
DIGEST_BYTES = 16

_TOP_KEYS = ("format", "required", "ignorable", "model", "recipe", "start", "codecs", "layers", "tensors")
_BYTES_PER_CONTAINER = 16
"""No valid header has more arrays and maps than one in this many bytes: a bound on what parsing allocates."""


@dataclass(frozen=True)
class SideEntry:
    """The keys or the values of one layer: ``runs`` of packed tokens, then ``tail`` raw tokens of ``tail_dtype``.

    ``codec`` is an index into the codec list. ``window`` is the number of raw tokens at which a writer encodes the tail.
    Raises InvalidHeader or LimitExceeded, which name the field.
    """

    codec: int
    batch: int
    heads: int
    runs: tuple[int, ...]
    tail: int
    tail_dtype: str
    window: int

    def __post_init__(self) -> None:
        _integer("codec", self.codec, 0, MAX_CODECS - 1)
        _integer("batch", self.batch, 1, MAX_BATCH)
        _integer("heads", self.heads, 1, MAX_HEADS)
        _sequence("runs", self.runs, tuple, MAX_RUNS)
        for number, run in enumerate(self.runs):
            if type(run) is not int or not 1 <= run <= MAX_TOKENS:
                _integer(f"runs[{number}]", run, 1, MAX_TOKENS)
        _integer("tail", self.tail, 0, MAX_TOKENS)
        _integer("window", self.window, 0, MAX_TOKENS)
        _integer("tokens", self.tokens, 0, MAX_TOKENS)
        if self.tail_dtype not in DTYPES:
            raise InvalidHeader(f"tail_dtype is {self.tail_dtype!r}, known are {', '.join(DTYPES)}")

    @cached_property
    def packed(self) -> int:
        """Packed tokens: all but the tail."""
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
        for name in ("batch", "tokens"):
            keys, values = getattr(self.k, name), getattr(self.v, name)
            if keys != values:
                raise InvalidHeader(f"k has {name} {keys}, v has {name} {values}; both sides of a layer hold the same {name}")

    def sides(self) -> Iterator[tuple[str, SideEntry]]:
        """The sides that are present, as ("k" or "v", side)."""
        for name, side in (("k", self.k), ("v", self.v)):
            if side is not None:
                yield name, side


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor: ``digest`` is the XXH3-128 (big-endian, canonical) of its ``stored_bytes`` bytes after ``filter``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    filter: str
    stored_bytes: int
    digest: bytes

    def __post_init__(self) -> None:
        if self.filter not in FILTERS:
            raise InvalidHeader(f"filter is {self.filter!r}, known are {', '.join(FILTERS)}")
        _integer("stored_bytes", self.stored_bytes, 0, MAX_FILE_BYTES)
        if type(self.digest) is not bytes or len(self.digest) != DIGEST_BYTES:
            raise InvalidHeader(f"digest is {self.digest!r}, expected {DIGEST_BYTES} bytes")

    def check_against(self, name: str, layout: Layout) -> None:
        """Raise InvalidHeader or LimitExceeded unless this is the tensor ``name`` of ``layout``."""
        found, expected = (self.name, self.dtype, self.shape), (name, layout.dtype, layout.shape)
        if found != expected:
            raise InvalidHeader(f"is {_described(*found)}, the layers and codecs give {_described(*expected)}")
        size = layout_bytes(layout)
        if self.filter == "none" and self.stored_bytes != size:
            raise InvalidHeader(f"stored_bytes is {self.stored_bytes} without a filter, its shape takes {size}")
        if self.filter == "zstd" and size > MAX_RATIO * self.stored_bytes:
            raise LimitExceeded(
                f"stored_bytes is {self.stored_bytes} for {size} decoded bytes, allowed are {MAX_RATIO} times as many decoded bytes"
            )


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a file holds, before its tensors are stored.

    ``model`` is the identity of the model, ``recipe`` informative, ``start`` the position of the first token.
    ``ignorable`` features are preserved by readers that do not know them; unknown ``required`` ones raise UnsupportedVersion.
    Raises InvalidHeader or LimitExceeded, which name the place.
    """

    codecs: tuple[Codec, ...]
    layers: tuple[LayerEntry, ...]
    model: Mapping[str, str] = field(default_factory=dict)
    recipe: str = ""
    start: int = 0
    required: tuple[str, ...] = ()
    ignorable: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_required(self.required)
        for name in ("model", "ignorable"):
            object.__setattr__(self, name, _names(name, getattr(self, name), str if name == "model" else bytes))
        _string("recipe", self.recipe)
        _integer("start", self.start, 0, MAX_TOKENS)
        _sequence("codecs", self.codecs, tuple, MAX_CODECS)
        _sequence("layers", self.layers, tuple, MAX_LAYERS)
        checked: set[SideEntry] = set()
        for number, layer in enumerate(self.layers):
            for name, side in layer.sides():
                if side not in checked:
                    with _within(f"layers[{number}].{name}"):
                        self._check_side(side)
                    checked.add(side)
        _integer("tensors", len(self.layouts), 0, MAX_TENSORS)

    def _check_side(self, side: SideEntry) -> None:
        if side.codec >= len(self.codecs):
            raise InvalidHeader(f"codec is {side.codec}, the file has {len(self.codecs)} codecs")
        group = self.codecs[side.codec].token_group
        if group == 1 and len(side.runs) > 1:
            raise InvalidHeader(f"runs has {len(side.runs)} entries; a codec that encodes tokens one by one has at most 1")
        if side.window % group:
            raise InvalidHeader(f"window is {side.window}, expected a multiple of the codec's token group {group}")

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """Name, dtype and shape of every payload tensor, in file order."""
        result: dict[str, Layout] = {}
        known: dict[SideEntry, dict[str, Layout]] = {}
        for number, layer in enumerate(self.layers):
            for name, side in layer.sides():
                if side not in known:
                    known[side] = side_tensors(self.codecs[side.codec], side)
                for stream, layout in known[side].items():
                    result[f"{number}.{name}.{stream}"] = layout
        return result


@dataclass(frozen=True, kw_only=True)
class Header(Contents):
    """The whole header: ``tensors`` lists every payload tensor in file order, and must be what layers and codecs give."""

    tensors: tuple[TensorEntry, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        _sequence("tensors", self.tensors, tuple, MAX_TENSORS)
        if len(self.tensors) != len(self.layouts):
            raise InvalidHeader(f"tensors has {len(self.tensors)} entries, the layers and codecs give {len(self.layouts)}")
        for number, (tensor, (name, layout)) in enumerate(zip(self.tensors, self.layouts.items(), strict=True)):
            with _within(f"tensors[{number}]"):
                tensor.check_against(name, layout)

    def to_bytes(self) -> bytes:
        """The header tensor. Raises LimitExceeded when it is longer than the format allows."""
        data: bytes = msgpack.packb(
            {
                "format": FORMAT,
                "required": list(self.required),
                "ignorable": dict(self.ignorable),
                "model": dict(self.model),
                "recipe": self.recipe,
                "start": self.start,
                "codecs": [codec.params() for codec in self.codecs],
                "layers": [{"k": _packed(layer.k), "v": _packed(layer.v)} for layer in self.layers],
                "tensors": [[t.name, t.dtype, t.shape, t.filter, t.stored_bytes, t.digest] for t in self.tensors],
            }
        )
        _integer("kvpack.header bytes", len(data), 0, MAX_HEADER_BYTES)
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse the header tensor.

        Raises UnsupportedVersion, UnknownCodec, InvalidHeader (also for msgpack that is not canonical) and LimitExceeded.
        """
        top = _unpacked(data)
        if type(top) is not dict:
            raise InvalidHeader(f"kvpack.header is a msgpack {type(top).__name__}, expected a map")
        version = top.get("format")
        if type(version) is int and version > FORMAT:
            raise UnsupportedVersion(newer(version))
        _integer("format", version, FORMAT, FORMAT)
        _check_required(tuple(_sequence("required", top.get("required"), list, MAX_NAMES)))
        _keys("kvpack.header", top, _TOP_KEYS)
        codecs = _sequence("codecs", top["codecs"], list, MAX_CODECS)
        layers = _sequence("layers", top["layers"], list, MAX_LAYERS)
        tensors = _sequence("tensors", top["tensors"], list, MAX_TENSORS)
        header = cls(
            required=tuple(top["required"]),
            ignorable=top["ignorable"],
            model=top["model"],
            recipe=top["recipe"],
            start=top["start"],
            codecs=tuple(_codec(f"codecs[{number}]", params) for number, params in enumerate(codecs)),
            layers=tuple(_layer(f"layers[{number}]", layer) for number, layer in enumerate(layers)),
            tensors=tuple(_tensor(f"tensors[{number}]", row) for number, row in enumerate(tensors)),
        )
        if header.to_bytes() != data:
            raise InvalidHeader("kvpack.header is not canonical msgpack: its values, written again, give other bytes")
        return header


def side_tensors(codec: Codec, side: SideEntry, prefix: str = "") -> dict[str, Layout]:
    """Name (after ``prefix``), dtype and shape of every tensor of a side, in file order (spec/container.md, Runs and tail)."""
    result = {}
    for stream, layout in codec.layout(side.batch, side.heads, side.packed).items():
        group = layout.tokens_per_row
        if group > 1:
            rows = sum(-(-run // group) for run in side.runs)
            layout = Layout(layout.dtype, (*layout.shape[:2], rows, *layout.shape[3:]), group)
        result[f"{prefix}{stream}"] = layout
    if side.tail:
        result[f"{prefix}tail"] = Layout(DTYPES[side.tail_dtype], (side.batch, side.heads, side.tail, codec.dim))
    return result


def layout_bytes(layout: Layout) -> int:
    """The bytes that a tensor takes before any filter."""
    return math.prod(layout.shape) * DTYPE_BYTES[layout.dtype]


def newer(version: int | str) -> str:
    """The message for a file of a later major number."""
    return f"written by a newer kvpack: format {version}, this one reads {FORMAT}"


def _packed(side: SideEntry | None) -> dict[str, Any] | None:
    return None if side is None else {name: getattr(side, name) for name in _SIDE_KEYS}


_SIDE_KEYS = tuple(f.name for f in fields(SideEntry))


def _unpacked(data: bytes) -> Any:
    if len(data) > MAX_HEADER_BYTES:
        raise LimitExceeded(f"kvpack.header has {len(data)} bytes, allowed are at most {MAX_HEADER_BYTES}")
    try:
        return msgpack.unpackb(
            data,
            max_str_len=MAX_STRING_BYTES,
            max_bin_len=MAX_BINARY_BYTES,
            max_array_len=MAX_TENSORS,
            max_map_len=MAX_NAMES,
            max_ext_len=0,
            list_hook=(count := _counter(len(data) // _BYTES_PER_CONTAINER + len(_TOP_KEYS))),
            object_hook=count,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise InvalidHeader(f"kvpack.header is not msgpack within the format's limits: {error or type(error).__name__}") from None


def _counter(limit: int) -> Callable[[Any], Any]:
    """A hook that refuses more arrays and maps than ``limit``: one byte of msgpack can become seventy of memory."""
    left = limit

    def count(container: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise LimitExceeded(f"kvpack.header has more than {limit} arrays and maps for its length")
        return container

    return count


def _codec(where: str, params: Any) -> Codec:
    if type(params) is not dict:
        raise InvalidHeader(f"{where} is of type {type(params).__name__}, expected a map")
    codec_id = _string(f"{where}.id", params.get("id"))
    try:
        return codec_class(codec_id).from_params({name: value for name, value in params.items() if name != "id"})
    except InvalidParameter as error:
        raise InvalidHeader(f"{where}: {error}") from None


def _layer(where: str, layer: Any) -> LayerEntry:
    _keys(where, layer, ("k", "v"))
    sides = {name: _side(f"{where}.{name}", side) for name, side in layer.items()}
    with _within(where):
        return LayerEntry(**sides)


def _side(where: str, side: Any) -> SideEntry | None:
    if side is None:
        return None
    _keys(where, side, _SIDE_KEYS)
    with _within(where):
        return SideEntry(**{**side, "runs": tuple(_sequence("runs", side["runs"], list, MAX_RUNS))})


def _tensor(where: str, row: Any) -> TensorEntry:
    if type(row) is not list or len(row) != len(fields(TensorEntry)) or type(row[2]) is not list:
        raise InvalidHeader(f"{where} is {row!r:.200}, expected [name, dtype, shape, filter, stored_bytes, digest]")
    name, dtype, shape, *rest = row
    with _within(where):
        return TensorEntry(name, dtype, tuple(shape), *rest)


@contextmanager
def _within(where: str) -> Iterator[None]:
    """Put ``where`` in front of a message that begins with the name of a field."""
    try:
        yield
    except (InvalidHeader, LimitExceeded) as error:
        raise type(error)(f"{where}{' ' if str(error).startswith(('is ', 'k ')) else '.'}{error}") from None


def _keys(where: str, value: Any, expected: tuple[str, ...]) -> None:
    if type(value) is not dict:
        raise InvalidHeader(f"{where} is of type {type(value).__name__}, expected a map")
    if tuple(value) != expected:
        raise InvalidHeader(f"{where} has the keys {', '.join(map(str, value))}, expected {', '.join(expected)}")


def _integer(where: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int:
        raise InvalidHeader(f"{where} is of type {type(value).__name__}, expected an integer")
    if value < low:
        raise InvalidHeader(f"{where} is {value}, allowed are at least {low}")
    if value > high:
        raise LimitExceeded(f"{where} is {value}, allowed are at most {high}")


def _sequence(where: str, value: Any, kind: type, limit: int) -> Any:
    if type(value) is not kind:
        raise InvalidHeader(f"{where} is of type {type(value).__name__}, expected {kind.__name__}")
    if len(value) > limit:
        raise LimitExceeded(f"{where} has {len(value)} entries, allowed are at most {limit}")
    return value


def _string(where: str, value: Any) -> str:
    if type(value) is not str:
        raise InvalidHeader(f"{where} is of type {type(value).__name__}, expected a string")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidHeader(f"{where} is {value!r}, which UTF-8 cannot write") from None
    if size > MAX_STRING_BYTES:
        raise LimitExceeded(f"{where} has {size} bytes, allowed are at most {MAX_STRING_BYTES}")
    return value


def _names(where: str, value: Any, kind: type) -> dict[str, Any]:
    """A map from names to strings or bytes, sorted by name."""
    if not hasattr(value, "items"):
        raise InvalidHeader(f"{where} is of type {type(value).__name__}, expected a map")
    if len(value) > MAX_NAMES:
        raise LimitExceeded(f"{where} has {len(value)} entries, allowed are at most {MAX_NAMES}")
    for name, entry in value.items():
        place = f"{where}[{_string(where, name)!r}]"
        if kind is str:
            _string(place, entry)
        elif type(entry) is not bytes:
            raise InvalidHeader(f"{place} is of type {type(entry).__name__}, expected bytes")
        elif len(entry) > MAX_BINARY_BYTES:
            raise LimitExceeded(f"{place} has {len(entry)} bytes, allowed are at most {MAX_BINARY_BYTES}")
    return dict(sorted(value.items()))


def _check_required(required: Any) -> None:
    _sequence("required", required, tuple, MAX_NAMES)
    for number, name in enumerate(required):
        if _string(f"required[{number}]", name) not in FEATURES:
            raise UnsupportedVersion(f"the file needs the feature {name!r}, which this kvpack lacks: a newer one reads it")


def _described(name: object, dtype: object, shape: object) -> str:
    return f"{name} {dtype} {list(shape) if isinstance(shape, tuple) else shape}"
