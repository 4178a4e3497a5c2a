"""The base class of all codecs.

Ids are permanent: a codec id never changes its meaning, and equal ids and parameters decode the same bytes (spec/README.md, Versioning).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from .codec_summary import CodecSummary
from .columns import Columns
from .foreign import check_digits, check_layouts, is_foreign
from .lazy import torch
from .rotation import Rotation, cached_rotation
from .runs import Run, RunEncoder
from .streams import EntryStreams, Layout
from .tables import BoundedCache
from .token_norms import norms_per_head
from .value_blocks import check_finite

if TYPE_CHECKING:

    from .value_blocks import Array

SidecarType = TypeVar("SidecarType")

MAX_DIM = 1024

_PACKING_PARAMETERS = {"arrangement", "fields"}
"""Parameters that determine how codes are packed, but not the codes themselves."""

PayloadRule = Callable[["Mapping[str, Array]", str], None]
"""A function that checks stored streams. It receives arrays by name and a location for messages, and raises InvalidPayload."""

RunRule = Callable[["Mapping[str, Array]", Sequence[int], int, str], None]
"""A ``PayloadRule`` that also receives the number of tokens in each run and the number of sequences."""

Unpacker = Callable[[Columns, Sequence["torch.Tensor"]], list["torch.Tensor"]]
"""A function that unpacks the planes of a code stream into digits, like ``Columns.unpack``."""


class _Checks(NamedTuple):
    """Data for ``Codec.check``.

    ``packed`` contains the name, packing and planes of each code stream. ``finite`` contains the names of the streams whose numbers must be
    finite. The first axis of the stream ``batch_stream`` is the batch.
    """

    packed: list[tuple[str, Columns, list[str]]]
    finite: list[str]
    payload: tuple[PayloadRule, ...]
    run_rules: tuple[RunRule, ...]
    chunk_rules: tuple[PayloadRule, ...]
    batch_stream: str


class Codec(EntryStreams, ABC):
    """Interface of all codecs: a codec family (``CodecFamily``) with parameters for one head dim, with or without sidecars.

    A codec maps values ``[batch, kv_head, token, dim]`` to named tensors, its streams, and back. Encoding may first map values from their
    original frame to the coded frame, by the codec's rotation and linear maps.

    >>> codec = kvpack.pack(past, "octopus-3")[0].k.codec
    >>> streams = codec.encode(torch.randn(1, 2, 10, 64))
    >>> codec.decode(streams).shape
    torch.Size([1, 2, 10, 64])
    """

    id: ClassVar[str]
    supports_all_sidecars: ClassVar[bool] = True
    """True if the codec supports every sidecar, False if only those with ``supports_every_codec``. Lossless codecs support none."""
    dim: int
    sidecars: tuple[Any, ...] = ()
    raw_positions: Any = None
    """The codec's ``RawPositions``, if it has this sidecar."""

    @property
    @abstractmethod
    def nominal_bits(self) -> float:
        """Bits per value as the source paper counts them. Stored values take more bits: compute the actual figure from the file size."""

    def sidecar(self, kind: type[SidecarType]) -> SidecarType | None:
        """Return the codec's sidecar of class ``kind``, or None if it has none."""
        for sidecar in self.sidecars:
            if isinstance(sidecar, kind):
                return sidecar
        return None

    @property
    def changes_norms(self) -> bool:
        """True if encoding begins with a step that changes the norms of the values."""
        return False

    @property
    def spreads_channels(self) -> bool:
        """True if values are rotated before large channels are scaled down. One large channel then costs all channels precision."""
        return self.rotation.kind != "none"

    def coded_norms(self, run: Run, previous: Mapping[str, torch.Tensor] | None) -> torch.Tensor:
        """Return the norms of the values in the coded frame, float32 ``[batch, kv_head, token]``.

        Args:
            run: The values.
            previous: Streams of the preceding run of the same layer's keys or values, or None.

        Raises:
            ValueTooLarge: A value cannot be encoded.
        """
        none = torch.empty(*run.shape[:2], 0, dtype=torch.float32, device=run.device)
        return torch.cat([none, *(norms_per_head(block) for block in run.blocks())], 2)

    @property
    def error_spread(self) -> float:
        """Largest ratio of an ordinary token's ``error_sizes`` to the typical size, or 0 if errors are proportional to the coded norm."""
        return 0.0

    def min_token_rms(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the smallest root mean square of a token's values that the run's shared scale still encodes accurately.

        Tokens with smaller values have more than twice the typical relative error. The result is float32 ``[batch, kv_head or 1, 1]``, or
        None if no scale is shared by the whole run.
        """
        return None

    @property
    def features(self) -> frozenset[str]:
        """Features that a reader must support to read files with this codec, in addition to the original features of version 1."""
        return frozenset()

    @property
    @abstractmethod
    def without_sidecars(self) -> PlainCodec:
        """The codec without its sidecars."""

    @property
    def without_raw_positions(self) -> Codec:
        """The codec without ``raw_positions``."""
        return self

    @abstractmethod
    def with_plain_codec(self, codec: PlainCodec) -> Codec:
        """Return ``codec`` combined with this codec's sidecars."""

    @cached_property
    def rotation(self) -> Rotation:
        """Rotation from the original to the coded frame, defined by ``rotation_kind`` and ``seed``. The default is the identity."""
        return cached_rotation(getattr(self, "rotation_kind", "none"), self.dim, getattr(self, "seed", 0))

    @property
    def exact_dtype(self) -> str | None:
        """Dtype that the codec stores bit for bit, including NaN and infinity: "bf16", "fp16" or "fp32". None for lossy codecs."""
        return None

    @property
    def group_tokens(self) -> int:
        """Number of tokens that are encoded together. New tokens are encoded in multiples of this number."""
        return 1

    @property
    def keys_only(self) -> bool:
        """True if the codec encodes keys but not values."""
        return False

    def packings(self) -> dict[str, Columns]:
        """Return the packing of each code stream, in stored order. By default, there are none."""
        return {}

    @abstractmethod
    def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        """Return the layouts of all streams except packed codes, in the order in which files store them (after the codes).

        Args:
            batch: Number of sequences.
            heads: Number of key/value heads.
            tokens: Number of tokens.
        """

    def begin(self, run: Run, previous: Mapping[str, torch.Tensor] | None) -> RunEncoder:
        """Create the encoder of ``run``. Subclasses may measure the run or build a lookup table first.

        Args:
            run: The values.
            previous: Streams of the preceding run of the same layer's keys or values, or None. Two runs can be joined later only if their
                streams with one row per run are equal.

        Raises:
            ValueTooLarge: A scale does not fit its stored dtype.
        """
        return RunEncoder({}, lambda block, _: self.encode(block))

    @abstractmethod
    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode values to streams.

        Args:
            x: Finite float32 ``[batch, kv_head, token, dim]`` in the original frame.

        Returns:
            Tensors by name, with the names, dtypes and shapes of ``layout``.

        Raises:
            ValueTooLarge: A scale or norm does not fit its stored dtype.
        """

    @abstractmethod
    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Decode unpacked codes.

        Args:
            digits: Codes as returned by ``digits(streams)``, int32 ``[batch, kv_head, token, symbol]`` each.
            streams: All streams of the run.

        Returns:
            Values in the coded frame, float32 ``[batch, kv_head, token, dim]``.
        """

    def decode_frame(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Decode ``streams`` to float32 ``[batch, kv_head, token, dim]`` in the coded frame, without the inverse rotation."""
        return self.decode_digits(self.digits(streams), streams)

    def decode(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Decode ``streams`` to float32 ``[batch, kv_head, token, dim]`` in the original frame."""
        return self.original(self.decode_frame(streams), streams)

    def token_count(self, streams: Mapping[str, torch.Tensor]) -> int:
        """Return the number of tokens encoded in ``streams``."""
        layouts = self.layout(1, 1, 1)
        name = next((name for name, layout in layouts.items() if layout.per == "token" and layout.tokens_per_row == 1), next(iter(streams)))
        return streams[name].shape[2]

    def stored_values(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the stored values, ``[batch, kv_head, token, dim]`` in ``exact_dtype``, bit for bit.

        Only codecs with an ``exact_dtype`` implement this.
        """
        raise NotImplementedError

    def cut(self, streams: Mapping[str, torch.Tensor], tokens: int) -> Mapping[str, torch.Tensor]:
        """Shorten the last token group of ``streams`` to its first ``tokens`` tokens.

        Returns the streams that an encoder would have produced for the remaining tokens.
        """
        return streams

    def coded_frame(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Map float32 ``[batch, kv_head, row, dim]`` from the original frame to the run's coded frame; inverts ``original``."""
        return self.rotation.forward(x)

    def original(self, u: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Map float32 ``[batch, kv_head, row, dim]`` from the coded frame of the run with these ``streams`` to the original frame."""
        return self.rotation.inverse(u)

    def query(self, q: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Map queries to the coded frame, so that their products with coded keys equal the products of the original queries and keys.

        This is the transpose of ``original``.
        """
        return self.rotation.forward(q)

    def layout(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        """Return the name, dtype and shape of every stored stream. A code stream is stored as one array per plane.

        Args:
            batch: Number of sequences.
            heads: Number of key/value heads.
            tokens: Number of tokens.
        """
        layout = {}
        for stream, packing in self.packings().items():
            for plane, words in enumerate(packing.planes):
                layout[f"{stream}.{plane}"] = Layout("U16", (batch, heads, tokens, words))
        return layout | self.scale_layouts(batch, heads, tokens)

    def run_layouts(self, batch: int, heads: int) -> Mapping[str, Layout]:
        """Return the layouts of all streams for 0 tokens. Only streams with one row per run have rows in them."""
        if (batch, heads) not in self.derived_values:
            self.derived_values[batch, heads] = self.layout(batch, heads, 0)
        layouts: Mapping[str, Layout] = self.derived_values[batch, heads]
        return layouts

    @cached_property
    def summary(self) -> CodecSummary:
        """Properties that headers and encoders read for every layer.

        They are cached, because files have thousands of layers but few codecs.
        """
        layouts, plain = self.row_layouts, self.without_sidecars
        return CodecSummary(
            self.features,
            self.bases_needed,
            self.group_tokens,
            plain.fixed_heads,
            tuple(name for name, layout in layouts.items() if layout.per == "entry"),
            any(layout.per == "run" for layout in layouts.values()),
            "norm" in layouts and layouts["norm"].dtype == "U8",
            self.keys_only,
            self.exact_dtype,
            plain.shared_scales,
            self.changes_norms,
            self.error_spread,
            plain.direction_spread,
            plain.min_error,
            self.spreads_channels,
        )

    @cached_property
    def derived_values(self) -> BoundedCache:
        """Cache of values derived from this codec. All layers and files with the codec share it. Callers use distinct keys."""
        return BoundedCache()

    @cached_property
    def row_layouts(self) -> Mapping[str, Layout]:
        """Layouts of all streams for 0 tokens, with each stream's dtype, row length, and the unit that a row belongs to."""
        layouts = self.layout(1, 1, 0)
        if is_foreign(self.without_sidecars):
            check_layouts(self, layouts)
        return layouts

    def pack(self, stream: str, *digits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Pack the digits of one code stream into its planes. Each digit is a tensor ``[batch, kv_head, token, symbol]``."""
        if is_foreign(self):
            check_digits(self, stream, digits)
        return {f"{stream}.{plane}": words for plane, words in enumerate(self.packings()[stream].pack(digits))}

    def unpack(self, stream: str, streams: Mapping[str, torch.Tensor], unpacker: Unpacker = Columns.unpack) -> list[torch.Tensor]:
        """Unpack one code stream into its digits: one int32 tensor ``[batch, kv_head, token, symbol]`` per digit."""
        packing = self.packings()[stream]
        return unpacker(packing, [streams[f"{stream}.{plane}"] for plane in range(len(packing.planes))])

    def digits(self, streams: Mapping[str, torch.Tensor], unpacker: Unpacker = Columns.unpack) -> tuple[torch.Tensor, ...]:
        """Unpack all codes, in an order that does not depend on how they are packed.

        Args:
            streams: All streams of the run.
            unpacker: Unpacks the planes of one code stream: ``Columns.unpack``, or an equivalent kernel.

        Returns:
            Codes, int32 ``[batch, kv_head, token, symbol]`` for each digit.
        """
        return tuple(digit for stream in self.packings() for digit in self.unpack(stream, streams, unpacker))

    def pack_digits(self, *digits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Pack all codes into code streams. This is the inverse of ``digits``."""
        packed: dict[str, torch.Tensor] = {}
        for stream, digit in zip(self.packings(), digits, strict=True):
            packed |= self.pack(stream, digit)
        return packed

    def pack_factored(self, stream: str, digit: torch.Tensor) -> dict[str, torch.Tensor]:
        """Pack ``digit`` as ``stream`` or, if this codec splits the digit, as ``stream_low`` and ``stream_high``."""
        packings = self.packings()
        if stream in packings:
            return self.pack(stream, digit)
        low = packings[f"{stream}_low"].bases[0]
        return self.pack(f"{stream}_low", digit & low - 1) | self.pack(f"{stream}_high", digit >> low.bit_length() - 1)

    def unpack_factored(self, stream: str, streams: Mapping[str, torch.Tensor], unpacker: Unpacker = Columns.unpack) -> torch.Tensor:
        """Unpack a digit that ``pack_factored`` packed."""
        packings = self.packings()
        if stream in packings:
            return self.unpack(stream, streams, unpacker)[0]
        (low,), (high,) = (self.unpack(f"{stream}_{part}", streams, unpacker) for part in ("low", "high"))
        return high << packings[f"{stream}_low"].bases[0].bit_length() - 1 | low

    def has_same_codes(self, other: Codec) -> bool:
        """Return True if ``other`` stores the same codes as this codec. It may pack them differently."""
        params, other_params = self.params(), other.params()
        compared = params.keys() - _PACKING_PARAMETERS
        return params.keys() == other_params.keys() and all(params[name] == other_params[name] for name in compared)

    def repack(self, streams: Mapping[str, torch.Tensor], target: Codec) -> dict[str, torch.Tensor]:
        """Repack ``streams`` of this codec for the codec ``target``, which must store the same codes (``has_same_codes``).

        Decoded values do not change.
        """
        scales = {name: streams[name] for name in self.scale_layouts(1, 1, 0)}
        return target.pack_digits(*self.digits(streams)) | scales

    def check(self, arrays: Mapping[str, Array], where: str) -> None:
        """Reject stored bytes that no writer produces.

        Args:
            arrays: All streams as NumPy arrays (a codec's scales are never bfloat16), or as arrays that are read in blocks.
            where: Location for messages, such as ``"0.k"``.

        Raises:
            InvalidPayload: A digit is outside its alphabet, a spare bit is set, a scale is not finite, or one of ``payload_rules`` is
                broken.
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
        """Return the names of the streams whose values must be finite: by default, all scales with a floating-point dtype."""
        return [name for name, layout in self.scale_layouts(1, 1, 0).items() if layout.dtype in ("F16", "F32")]

    def payload_rules(self) -> tuple[PayloadRule, ...]:
        """Return the checks of stored bytes that are specific to this codec, in order. Each check raises InvalidPayload."""
        return ()

    def run_rules(self) -> tuple[RunRule, ...]:
        """Return the checks of ``check_runs``, in order."""
        return ()

    def chunk_rules(self) -> tuple[PayloadRule, ...]:
        """Return the checks of ``check_chunks``, in order."""
        return ()

    def check_runs(self, arrays: Mapping[str, Array], runs: Sequence[int], where: str) -> None:
        """Raise InvalidPayload for errors that are visible only if the number of tokens in each run is known.

        Call it after ``check`` has passed.
        """
        for rule in self._checks.run_rules:
            rule(arrays, runs, self.batch_size(arrays), where)

    def batch_size(self, streams: Mapping[str, Any]) -> int:
        """Return the number of sequences in ``streams``, which may be arrays or tensors."""
        batch: int = streams[self._checks.batch_stream].shape[0]
        return batch

    def check_chunks(self, arrays: Mapping[str, Array], where: str) -> None:
        """Raise InvalidPayload for errors that are visible only after all symbols are decoded.

        Call it after all other checks have passed.
        """
        for rule in self._checks.chunk_rules:
            rule(arrays, where)

    @abstractmethod
    def params(self) -> dict[str, Any]:
        """Return the map that describes the codec in a header: ``id``, its parameters, then its sidecars."""


class PlainCodec(Codec):
    """Interface of codecs without sidecars: the properties that sidecars do not change."""

    @property
    def without_sidecars(self) -> PlainCodec:
        return self

    def with_plain_codec(self, codec: PlainCodec) -> PlainCodec:
        return codec

    @property
    def fixed_heads(self) -> int | None:
        """The only number of heads that the codec accepts, or None if it accepts any number."""
        return None

    @property
    def values_per_run(self) -> int:
        """Number of values per head that a decoder computes once per run. Readers count them toward their memory limit."""
        return 0

    @property
    def shared_scales(self) -> frozenset[str]:
        """Units that share a scale proportional to norms: ``token_norms.HEADS``, ``token_norms.TOKENS``, both or neither."""
        return frozenset()

    @property
    def direction_spread(self) -> float:
        """Largest ratio of an ordinary token's relative error to the typical relative error, for codecs whose errors depend on directions.

        Such errors cannot be derived from the streams, so encoders measure them. For codecs whose errors depend on the size of values, this
        is 0.
        """
        return 0.0

    @property
    def min_error(self) -> float:
        """Floor for relative errors of tokens, for codecs with a ``direction_spread``: a typical error. Smaller ones are raised to it.

        Values that are encoded a second time may have no error. Without the floor, other errors would then seem large.
        """
        return 0.0

    def error_sizes(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Estimate each token's error from stored streams: float32 ``[batch, kv_head, token]``, proportional to the error.

        Only codecs with a nonzero ``error_spread`` implement this.
        """
        raise NotImplementedError(self.id)
