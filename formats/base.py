"""The base of every codec: frozen parameters, a layout, encode and decode.

An id and its meaning never change: two codecs with one id and equal parameters decode each other's bytes
(spec/README.md, Versioning).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from .columns import Columns
from .errors import InvalidParameter, OutOfRange
from .head_norms import norms_per_head
from .lazy import numpy, torch
from .rotation import Rotation, rotation_of
from .tables import BoundedCache
from .value_blocks import check_finite

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .value_blocks import Array

SideCarType = TypeVar("SideCarType")

HALF_LIMIT = 65520.0
"""The smallest number that rounds to infinity in binary16; the largest finite binary16 is 65504."""

DTYPE_BYTES = {"U8": 1, "U16": 2, "F16": 2, "BF16": 2, "F32": 4}
"""Bytes per value of each stored dtype, by safetensors name."""
NUMPY_DTYPES = {"U8": "u1", "U16": "<u2", "F16": "<f2", "BF16": "<u2", "F32": "<f4"}
"""Their NumPy dtypes; bfloat16 is read as unsigned integers."""

NORMS = {"fp16": "F16", "fp32": "F32"}
"""Stored dtypes of norms and factors, by parameter value."""

MAX_DIM = 1024

_PACKING_PARAMETERS = {"arrangement", "fields"}
"""Parameters that say how codes are packed and do not change the codes."""

Fields = tuple[tuple[str, int], ...]
"""The number of fields F of each code stream, in stream order."""

PayloadRule = Callable[["Mapping[str, Array]", str], None]
"""A check of the stored streams of a side, arrays by name, which is named in messages. Raises InvalidPayload."""

RunRule = Callable[["Mapping[str, Array]", Sequence[int], int, str], None]
"""As ``PayloadRule``, given the tokens of each run and the number of sequences too."""

Unpacker = Callable[[Columns, Sequence["torch.Tensor"]], list["torch.Tensor"]]
"""A function that unpacks the planes of a code stream to its digits, as ``Columns.unpack`` does."""


@dataclass(frozen=True)
class Layout:
    """Dtype and shape ``[batch, kv_head or 1, rows, ...]`` of one stored stream.

    ``per`` says what a row stands for: "token" (a row covers ``tokens_per_row`` tokens), "run", or "entry" (the number of rows for each
    ``tokens_per_row`` tokens of a sequence depends on stored flags or counts; see ``Codec.entries``). ``batch_axis`` is None for a stream
    whose first axis is 1 for any batch: its rows are entries, ordered by token, then by sequence.
    """

    dtype: str
    shape: tuple[int, ...]
    tokens_per_row: int = 1
    per: str = "token"
    batch_axis: int | None = 0

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the strides, in values, of a contiguous array of this shape."""
        return _strides(self.shape)

    def array(self, data: memoryview) -> numpy.ndarray[Any, Any]:
        """View the stored bytes ``data`` as an array of this shape; bfloat16 as unsigned integers."""
        array: numpy.ndarray[Any, Any] = numpy.frombuffer(data, NUMPY_DTYPES[self.dtype]).reshape(self.shape)
        return array


@lru_cache(maxsize=256)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate((max(1, size) for size in reversed(shape[1:])), mul, initial=1))[::-1]


@dataclass(frozen=True)
class Run:
    """The tokens to encode as one run, for codecs that must see all of them before encoding the first.

    Each call of ``blocks()`` iterates over the values, finite float32 ``[batch, kv_head, token, dim]`` in token order. ``position`` is the
    position of the first token. ``norms``, float32 ``[batch, kv_head, token]``, are the norms of the layer's keys in each head, if known.
    ``whole()`` iterates over the values with the vectors of pages that ``blocks()`` lack; None if there are no such vectors.
    """

    shape: tuple[int, int, int, int]
    device: torch.device
    blocks: Callable[[], Iterator[torch.Tensor]]
    position: int | None = None
    norms: torch.Tensor | None = None
    whole: Callable[[], Iterator[torch.Tensor]] | None = None


@dataclass(frozen=True)
class RunEncoder:
    """Encoder of one run: ``streams`` holds the streams with one row per run, and ``encode(block, start)`` returns the others.

    A block is finite float32 ``[batch, kv_head, token, dim]``; its first token ``start`` is a multiple of the token group.
    """

    streams: Mapping[str, torch.Tensor]
    encode: Callable[[torch.Tensor, int], dict[str, torch.Tensor]]


class _Checks(NamedTuple):
    """Inputs of a codec's checks: code streams with their planes, streams of finite numbers, rules, and a stream of all sequences."""

    packed: list[tuple[str, Columns, list[str]]]
    finite: list[str]
    payload: tuple[PayloadRule, ...]
    run_rules: tuple[RunRule, ...]
    chunk_rules: tuple[PayloadRule, ...]
    batch_stream: str


class CodecSummary(NamedTuple):
    """Properties of a codec by name; ``entries`` are the streams with one row per entry; ``has_run_rows``: any has one per run."""

    features: frozenset[str]
    bases_needed: frozenset[bytes]
    token_group: int
    fixed_heads: int | None
    entries: tuple[str, ...]
    has_run_rows: bool
    keys_only: bool
    exact_dtype: str | None
    shared_scales: frozenset[str]
    changes_norms: bool
    error_spread: float


class Codec(ABC):
    """A codec with parameters bound to one head dim: a family member (``family.CodecFamily``), or one with side-cars."""

    id: ClassVar[str]
    supports_all_side_cars: ClassVar[bool] = True
    """True if a codec that is lossy can have all side-cars, and not only those ``supports_every_codec``."""
    dim: int
    side_cars: tuple[Any, ...] = ()

    @property
    @abstractmethod
    def nominal_bits(self) -> float:
        """Bits per value as the source paper counts them; the file size gives the actual figure."""

    def side_car(self, wanted: type[SideCarType]) -> SideCarType | None:
        """Return the codec's side-car of class ``wanted``, or None."""
        for side_car in self.side_cars:
            if isinstance(side_car, wanted):
                return side_car
        return None

    @property
    def shared_scales(self) -> frozenset[str]:
        """Kinds of norm-proportional scales (``head_norms.HEADS``, ``TOKENS``) that heads or tokens share."""
        return frozenset()

    @property
    def changes_norms(self) -> bool:
        """True if encoding starts with a step that changes the norms of the values."""
        return False

    def coded_norms(self, run: Run, before: Mapping[str, torch.Tensor] | None) -> torch.Tensor:
        """Return the norms of the values as the codec will encode them, float32 ``[batch, kv_head, token]``.

        ``before`` has the same meaning as in ``begin``. Raises OutOfRange for values that cannot be encoded.
        """
        none = torch.empty(*run.shape[:2], 0, dtype=torch.float32, device=run.device)
        return torch.cat([none, *(norms_per_head(block) for block in run.blocks())], 2)

    @property
    def error_spread(self) -> float:
        """The largest ratio of ``error_sizes`` to the usual one in ordinary tokens; 0 if the norm of what is encoded is such a size."""
        return 0.0

    def error_sizes(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a size in proportion to each token's error, by what is stored of it: float32 ``[batch, kv_head, token]``.

        Only codecs with an ``error_spread`` have it.
        """
        raise NotImplementedError(self.id)

    def min_sizes(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the root mean square that values must have for a scale that their run shares: float32 ``[batch, kv_head or 1, 1]``.

        Tokens of smaller values have over twice the usual relative error. None: nothing depends on the largest value of a run.
        """
        return None

    @property
    def features(self) -> frozenset[str]:
        """Required features for parameters that the first readers of version 1 do not know."""
        return frozenset()

    @property
    def bases_needed(self) -> frozenset[bytes]:
        """SHA-256 of each basis that readers need to decode the values."""
        return frozenset()

    @property
    def family(self) -> Codec:
        """The codec without its side-cars."""
        return self

    @property
    def without_raw_positions(self) -> Codec:
        """The codec without raw tokens chosen by position."""
        return self

    def with_family(self, family: Codec) -> Codec:
        """Return ``family`` combined with the side-cars of this codec."""
        return family

    @cached_property
    def rotation(self) -> Rotation:
        """The rotation from the original to the coded frame, set by ``rotation_kind`` and ``seed``; the identity by default."""
        return rotation_of(getattr(self, "rotation_kind", "none"), self.dim, getattr(self, "seed", 0))

    @property
    def exact_dtype(self) -> str | None:
        """The dtype ("bf16", "fp16" or "fp32") that the codec stores bit for bit, including NaN and infinity; None if it is lossy."""
        return None

    @property
    def token_group(self) -> int:
        """The number of tokens encoded together: new tokens are encoded in multiples of it."""
        return 1

    @property
    def fixed_heads(self) -> int | None:
        """The only number of heads that the codec accepts; None for any."""
        return None

    @property
    def keys_only(self) -> bool:
        """True if only keys can be encoded."""
        return False

    @property
    def run_values(self) -> int:
        """Values per head in run rows that decoding converts at once; readers with a memory limit count them."""
        return 0

    @abstractmethod
    def packings(self) -> dict[str, Columns]:
        """Return the packing of each code stream, in stored order."""

    @abstractmethod
    def scales(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        """Return the streams other than packed codes, stored after the codes in this order."""

    def begin(self, run: Run, before: Mapping[str, torch.Tensor] | None) -> RunEncoder:
        """Create the encoder of ``run``. It may first measure the whole run or build a lookup table that will pay off.

        ``before`` contains the streams of the side's preceding run: runs with equal run rows can be joined.
        """
        return RunEncoder({}, lambda block, _: self.encode(block))

    @abstractmethod
    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode finite float32 ``[batch, kv_head, token, dim]`` to the streams of ``layout``.

        Raises OutOfRange if a scale or norm does not fit its stored width.
        """

    @abstractmethod
    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Decode ``digits``, unpacked from ``streams``, to float32 ``[batch, kv_head, token, dim]`` in the coded frame."""

    def decode_frame(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Decode to float32 ``[batch, kv_head, token, dim]`` in the coded frame: no inverse rotation is applied."""
        return self.decode_digits(self.digits(streams), streams)

    def decode(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Decode to float32 ``[batch, kv_head, token, dim]`` in the original frame."""
        return self.original(self.decode_frame(streams), streams)

    def token_count(self, streams: Mapping[str, torch.Tensor]) -> int:
        """Return the number of tokens encoded in ``streams``."""
        layouts = self.layout(1, 1, 1)
        name = next((name for name, layout in layouts.items() if layout.per == "token" and layout.tokens_per_row == 1), next(iter(streams)))
        return streams[name].shape[2]

    def stored_values(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the values ``[batch, kv_head, token, dim]`` in ``exact_dtype``, bit for bit; only for codecs that have one."""
        raise NotImplementedError

    def cut(self, streams: Mapping[str, torch.Tensor], tokens: int) -> Mapping[str, torch.Tensor]:
        """Return ``streams`` as an encoder would produce them if the last token group had only its first ``tokens`` tokens."""
        return streams

    def coded_frame(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Map float32 ``[batch, kv_head, row, dim]`` from the original frame to the coded frame of the run: the inverse of ``original``."""
        return self.rotation.forward(x)

    def original(self, u: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Map float32 ``[batch, kv_head, row, dim]`` from the coded frame of the run that has ``streams`` to the original frame."""
        return self.rotation.inverse(u)

    def query(self, q: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Map queries so that their products with coded keys equal those of ``q`` with original keys: the transpose of ``original``."""
        return self.rotation.forward(q)

    def usual_entry_counts(self, batch: int, heads: int, tokens: int) -> dict[str, int]:
        """Return, for each stream with one row per entry, its number of rows in a run of ``tokens`` ordinary tokens."""
        return {}

    def entries(self, streams: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return, for each stream with one row per entry, its number of rows per token and sequence, integers ``[token, batch]``.

        An entry that covers ``tokens_per_row`` tokens is counted once for all of them: integers ``[row, batch]``.
        """
        return {}

    def entry_tokens(self, streams: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return, for each stream whose entries name their tokens, the token of each entry in use, int64, ascending."""
        return {}

    def shift_tokens(self, streams: Mapping[str, torch.Tensor], tokens: int) -> dict[str, torch.Tensor]:
        """Return the streams of ``entry_tokens`` with token numbers increased by ``tokens``; unused entries are dropped."""
        return {}

    def select_sequences(self, streams: Mapping[str, torch.Tensor], indices: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the streams of ``entry_tokens`` for the sequences ``indices``, int64 ``[row]``, in that order."""
        return {}

    def layout(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        """Return the name, dtype and shape of every stored stream for ``tokens`` tokens; a code stream has one array per plane."""
        layout = {}
        for stream, packing in self.packings().items():
            for plane, words in enumerate(packing.planes):
                layout[f"{stream}.{plane}"] = Layout("U16", (batch, heads, tokens, words))
        return layout | self.scales(batch, heads, tokens)

    def run_layouts(self, batch: int, heads: int) -> Mapping[str, Layout]:
        """Return the layouts of the streams whose number of rows does not depend on the tokens, for a side of this size."""
        if (batch, heads) not in self.derived_values:
            self.derived_values[batch, heads] = self.layout(batch, heads, 0)
        layouts: Mapping[str, Layout] = self.derived_values[batch, heads]
        return layouts

    @cached_property
    def summary(self) -> CodecSummary:
        """Return the properties that headers and encoders read for every side, cached: files have thousands of sides but few codecs."""
        layouts = self.row_layouts
        return CodecSummary(
            self.features,
            self.bases_needed,
            self.token_group,
            self.fixed_heads,
            tuple(name for name, layout in layouts.items() if layout.per == "entry"),
            any(layout.per == "run" for layout in layouts.values()),
            self.keys_only,
            self.exact_dtype,
            self.shared_scales,
            self.changes_norms,
            self.error_spread,
        )

    @cached_property
    def derived_values(self) -> BoundedCache:
        """Cache of values derived from this codec, keyed by use; sides of many layers and files share it."""
        return BoundedCache()

    @cached_property
    def row_layouts(self) -> Mapping[str, Layout]:
        """Layouts of the streams without a token count: dtype, what a row stands for, and row length."""
        return self.layout(1, 1, 0)

    def pack(self, stream: str, *digits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Pack the digits of one code stream, each ``[batch, kv_head, token, symbols]``, into its planes."""
        return {f"{stream}.{plane}": words for plane, words in enumerate(self.packings()[stream].pack(digits))}

    def unpack(self, stream: str, streams: Mapping[str, torch.Tensor], unpacker: Unpacker = Columns.unpack) -> list[torch.Tensor]:
        """Unpack the digits of one code stream, int32 ``[batch, kv_head, token, symbols]`` each."""
        packing = self.packings()[stream]
        return unpacker(packing, [streams[f"{stream}.{plane}"] for plane in range(len(packing.planes))])

    def digits(self, streams: Mapping[str, torch.Tensor], unpacker: Unpacker = Columns.unpack) -> tuple[torch.Tensor, ...]:
        """Return the codes, int32 ``[batch, kv_head, token, symbols]`` per digit, in a form independent of the packing.

        ``unpacker`` unpacks the planes of each code stream: ``Columns.unpack``, or a kernel equivalent to it.
        """
        return tuple(digit for stream in self.packings() for digit in self.unpack(stream, streams, unpacker))

    def pack_digits(self, *digits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Pack the codes into code streams; the inverse of ``digits``."""
        packed: dict[str, torch.Tensor] = {}
        for stream, digit in zip(self.packings(), digits, strict=True):
            packed |= self.pack(stream, digit)
        return packed

    def pack_factored(self, stream: str, digit: torch.Tensor) -> dict[str, torch.Tensor]:
        """Pack a digit as ``stream``, or as two factors ``stream_low`` and ``stream_high`` if this codec splits it."""
        packings = self.packings()
        if stream in packings:
            return self.pack(stream, digit)
        low = packings[f"{stream}_low"].bases[0]
        return self.pack(f"{stream}_low", digit & low - 1) | self.pack(f"{stream}_high", digit >> low.bit_length() - 1)

    def unpack_factored(self, stream: str, streams: Mapping[str, torch.Tensor], unpacker: Unpacker = Columns.unpack) -> torch.Tensor:
        """Unpack a digit packed by ``pack_factored``."""
        packings = self.packings()
        if stream in packings:
            return self.unpack(stream, streams, unpacker)[0]
        (low,), (high,) = (self.unpack(f"{stream}_{part}", streams, unpacker) for part in ("low", "high"))
        return high << packings[f"{stream}_low"].bases[0].bit_length() - 1 | low

    def same_codes(self, other: Codec) -> bool:
        """Return True if ``other`` stores the same codes, whatever their packing."""
        params, others = self.params(), other.params()
        return params.keys() == others.keys() and all(params[name] == others[name] for name in params.keys() - _PACKING_PARAMETERS)

    def repack(self, streams: Mapping[str, torch.Tensor], other: Codec) -> dict[str, torch.Tensor]:
        """Repack the streams for ``other``, which has the ``same_codes``; no value is decoded or lost."""
        scales = {name: streams[name] for name in self.scales(1, 1, 0)}
        return other.pack_digits(*self.digits(streams)) | scales

    def check(self, arrays: Mapping[str, Array], where: str) -> None:
        """Refuse stored bytes that no writer may produce.

        ``arrays`` holds the streams as numpy arrays (no scale is bfloat16) or as arrays read in blocks. Raises InvalidPayload for a digit
        outside its alphabet, a nonzero spare bit, a scale that is not finite, and violations of ``payload_rules``.
        """
        checks = self._checks
        for stream, packing, planes in checks.packed:
            packing.check([*map(arrays.__getitem__, planes)], f"{where}.{stream}")
        for name in checks.finite:
            check_finite(f"{where}.{name}", arrays[name], "scales and norms")
        for rule in checks.payload:
            rule(arrays, where)

    @cached_property
    def _checks(self) -> _Checks:
        packed = [
            (stream, packing, [f"{stream}.{plane}" for plane in range(len(packing.planes))]) for stream, packing in self.packings().items()
        ]
        batch_stream = next(name for name, layout in self.row_layouts.items() if layout.batch_axis is not None)
        return _Checks(packed, sorted(self.finite_streams()), self.payload_rules(), self.run_rules(), self.chunk_rules(), batch_stream)

    def finite_streams(self) -> list[str]:
        """Return the streams other than codes whose values must be finite: by default all with floating-point numbers."""
        return [name for name, layout in self.scales(1, 1, 0).items() if layout.dtype in ("F16", "F32")]

    def payload_rules(self) -> tuple[PayloadRule, ...]:
        """Return this codec's own checks of stored bytes, in order; each raises InvalidPayload."""
        return ()

    def run_rules(self) -> tuple[RunRule, ...]:
        """Return the checks of ``check_runs``, in order."""
        return ()

    def chunk_rules(self) -> tuple[PayloadRule, ...]:
        """Return the checks of ``check_chunks``, in order."""
        return ()

    def check_runs(self, arrays: Mapping[str, Array], runs: Sequence[int], where: str) -> None:
        """Raise InvalidPayload for errors visible only in the tokens of each run, in streams that passed ``check``."""
        for rule in self._checks.run_rules:
            rule(arrays, runs, self.batch_size(arrays), where)

    def batch_size(self, streams: Mapping[str, Any]) -> int:
        """Return the number of sequences of ``streams``, arrays or tensors."""
        batch: int = streams[self._checks.batch_stream].shape[0]
        return batch

    def check_chunks(self, arrays: Mapping[str, Array], where: str) -> None:
        """Raise InvalidPayload for errors visible only after decoding all symbols, in streams that passed the other checks."""
        for rule in self._checks.chunk_rules:
            rule(arrays, where)

    @abstractmethod
    def params(self) -> dict[str, Any]:
        """Return the header's map of this codec: ``id``, its parameters, then its side-cars."""


def check_range(codec: str, name: str, value: int, low: int, high: int) -> None:
    """Raise InvalidParameter unless ``low <= value <= high``."""
    if not low <= value <= high:
        raise InvalidParameter(f"codec {codec}: {name} is {value}, expected {low} to {high}")


def check_choice(codec: str, name: str, value: str | int, known: tuple[str, ...] | tuple[int, ...]) -> None:
    """Raise InvalidParameter unless ``value`` is one of ``known``."""
    if value not in known:
        raise InvalidParameter(f"codec {codec}: {name} is {value!r}, expected one of {', '.join(map(str, known))}")


def check_fields(codec: str, fields: Fields, expected: tuple[str, ...]) -> None:
    """Raise InvalidParameter unless ``fields`` names exactly the ``expected`` streams, in order."""
    found = tuple(name for name, _ in fields)
    if found != expected:
        raise InvalidParameter(f"codec {codec}: fields names the streams {', '.join(found) or 'none'}, expected {', '.join(expected)}")


def stored_norm(values: torch.Tensor, dtype: str, what: str) -> torch.Tensor:
    """Round ``values`` to the stored float ``dtype`` ("F16" or "F32").

    Raises OutOfRange if a value does not fit; the message contains ``what``, the position, the value and its limit.
    """
    half = dtype == "F16"
    # One pass over the unrounded values: 65520 and above would round to infinity.
    if values.numel() and not values.abs().amax().item() < (HALF_LIMIT if half else math.inf):
        at = [int(i) for i in torch.nonzero(~(values.abs() < (HALF_LIMIT if half else math.inf)))[0]]
        raise OutOfRange(
            f"{what} at {at} is {values[tuple(at)].item():.6g}, but the largest "
            f"{'binary16 is 65504' if half else 'binary32 is 3.40282e+38'}: "
            "scale the input, or choose fp32 norms or a raw codec"
        )
    return values.to(torch.float16 if half else torch.float32)
