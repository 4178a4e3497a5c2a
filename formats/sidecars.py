"""Codecs with sidecars (spec/side-cars.md). Each sidecar has its own file; ``sidecar`` defines the order in which they apply."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from .arguments import prefix_errors
from .balanced import FrameMap
from .base import Codec, PayloadRule, PlainCodec, RunRule, Unpacker
from .batch import take_rows
from .columns import Columns
from .errors import InvalidParameter, ValueTooLarge
from .foreign import begin_run
from .lazy import torch
from .raw_positions import RawPositions
from .runs import Run, RunEncoder
from .sidecar import FramePart, PageVector, RawTokenSidecar, ResidualSketch, RunStep, Sidecar, ValueMap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .rotation import Rotation
    from .streams import Layout
    from .value_blocks import Array

    Streams = Mapping[str, torch.Tensor]
    Encode = Callable[[torch.Tensor, int], tuple[torch.Tensor, dict[str, torch.Tensor]]]
    Kernel = Callable[[Codec, torch.Tensor, int], dict[str, torch.Tensor] | None]
    Observer = Callable[[torch.Tensor, int, Streams], None]

_SAFE_MAGNITUDE = 2.0**100
"""Magnitude below which no sidecar turns a codec's decoded value into infinity."""


@dataclass(frozen=True)
class CodecWithSidecars(Codec):
    """Codec that combines ``codec`` with one or more ``sidecars``, in the order of the table ``formats.SIDECARS``.

    Raises InvalidParameter for a lossless codec, which has no error for a sidecar to reduce. Codecs that do not support all sidecars accept
    only those with ``supports_every_codec``. Codecs that encode tokens together do not accept page vectors.
    """

    id: ClassVar[str] = ""

    dim: int = field(init=False)
    codec: PlainCodec
    sidecars: tuple[Sidecar, ...]

    def __post_init__(self) -> None:
        none, any_kind = self.codec.exact_dtype is not None, self.codec.supports_all_sidecars
        if none or not (any_kind or all(map(attrgetter("supports_every_codec"), self.sidecars))):
            refused = [sidecar.name for sidecar in self.sidecars if none or not sidecar.supports_every_codec]
            raise InvalidParameter(
                f"codec {self.codec.id} does not support {'sidecars' if none else 'these sidecars'}: omit {', '.join(refused)}"
            )
        if self.page_vectors and self.codec.group_tokens > 1:
            raise InvalidParameter(
                f"codec {self.codec.id} encodes {self.codec.group_tokens} tokens together, but "
                f"{', '.join(sidecar.name for sidecar in self.page_vectors)} needs a codec that encodes tokens one by one: omit mean="
            )
        # Files and messages use the id and the dim of the inner codec.
        object.__setattr__(self, "id", self.codec.id)
        object.__setattr__(self, "dim", self.codec.dim)
        object.__setattr__(self, "raw_positions", self.sidecar(RawPositions))

    @cached_property
    def without_raw_positions(self) -> Codec:
        remaining = tuple(sidecar for sidecar in self.sidecars if sidecar.name != RawPositions.name)
        return CodecWithSidecars(self.codec, remaining) if remaining else self.codec

    @cached_property
    def raw_token_sidecars(self) -> tuple[RawTokenSidecar, ...]:
        return tuple(sidecar for sidecar in self.sidecars if isinstance(sidecar, RawTokenSidecar))

    @cached_property
    def value_maps(self) -> tuple[ValueMap, ...]:
        return tuple(sidecar for sidecar in self.sidecars if isinstance(sidecar, ValueMap))

    @cached_property
    def has_maps_per_run(self) -> bool:
        """True if runs may have different value maps."""
        return any(value_map.layout(1, 1, 0) for value_map in self.value_maps)

    @cached_property
    def folded_frame(self) -> FrameMap | None:
        """The codec's only value map, if it can be merged with the rotation into a single matrix product for queries. Otherwise None."""
        (value_map,) = self.value_maps if len(self.value_maps) == 1 else (None,)
        return value_map if isinstance(value_map, FrameMap) and type(self.codec).query is Codec.query else None

    @cached_property
    def page_vectors(self) -> tuple[PageVector, ...]:
        return tuple(sidecar for sidecar in self.sidecars if isinstance(sidecar, PageVector))

    @cached_property
    def frame_parts(self) -> tuple[FramePart, ...]:
        return tuple(sidecar for sidecar in self.sidecars if isinstance(sidecar, FramePart))

    @cached_property
    def sketches(self) -> tuple[ResidualSketch, ...]:
        return tuple(sidecar for sidecar in self.sidecars if isinstance(sidecar, ResidualSketch))

    def params(self) -> dict[str, Any]:
        return self.codec.params() | {sidecar.name: sidecar.params() for sidecar in self.sidecars}

    @property
    def nominal_bits(self) -> float:
        return self.codec.nominal_bits + sum(sidecar.nominal_bits for sidecar in self.sidecars)

    @property
    def features(self) -> frozenset[str]:
        return self.codec.features | {sidecar.feature for sidecar in self.sidecars} - {""}

    @property
    def bases_needed(self) -> frozenset[bytes]:
        return self.codec.bases_needed.union(*(sidecar.bases_needed for sidecar in self.sidecars))

    @property
    def changes_norms(self) -> bool:
        return bool(self.value_maps or self.page_vectors or self.frame_parts)

    @property
    def spreads_channels(self) -> bool:
        return self.codec.spreads_channels and not self.value_maps

    def coded_norms(self, run: Run, previous: Streams | None) -> torch.Tensor:
        steps, _ = self._begin_steps(run, previous, ())
        return self.codec.coded_norms(steps.run(), previous)

    @property
    def error_spread(self) -> float:
        # Large chunks are stored separately, so the remaining sizes are ordinary.
        return 0.0 if self.frame_parts else self.codec.error_spread

    def min_token_rms(self, streams: Streams) -> torch.Tensor | None:
        return None if self.changes_norms else self.codec.min_token_rms(streams)

    @property
    def without_sidecars(self) -> PlainCodec:
        return self.codec

    def with_plain_codec(self, codec: PlainCodec) -> CodecWithSidecars:
        return replace(self, codec=codec)

    def with_sidecar(self, sidecar: Sidecar) -> CodecWithSidecars:
        """Return the codec with ``sidecar`` in place of its sidecar of the same class."""
        place = [*map(type, self.sidecars)].index(type(sidecar))
        return replace(self, sidecars=(*self.sidecars[:place], sidecar, *self.sidecars[place + 1 :]))

    @cached_property
    def rotation(self) -> Rotation:
        return self.codec.rotation

    @property
    def group_tokens(self) -> int:
        return max([self.codec.group_tokens, *(vector.page_tokens for vector in self.page_vectors)])

    @property
    def keys_only(self) -> bool:
        return any(sidecar.keys_only for sidecar in self.sidecars)

    def token_count(self, streams: Streams) -> int:
        return self.codec.token_count(streams)

    def cut(self, streams: Streams, tokens: int) -> Streams:
        sidecar_streams = self.sidecar_layout(1, 1, 0)
        cut = self.codec.cut({name: stream for name, stream in streams.items() if name not in sidecar_streams}, tokens)
        return {**cut, **{name: streams[name] for name in sidecar_streams}}

    def packings(self) -> dict[str, Columns]:
        return self.codec.packings()

    def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        return self.codec.scale_layouts(batch, heads, tokens) | self.sidecar_layout(batch, heads, tokens)

    def sidecar_layout(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        """Return the layouts of the sidecars' streams, which are part of ``scale_layouts``."""
        return {name: layout for sidecar in self.sidecars for name, layout in sidecar.layout(batch, heads, tokens).items()}

    def default_entry_counts(self, batch: int, heads: int, tokens: int) -> dict[str, int]:
        counts = self.codec.default_entry_counts(batch, heads, tokens)
        for sidecar in self.sidecars:
            counts |= sidecar.default_entry_counts(batch, heads, tokens)
        return counts

    def entries(self, streams: Streams) -> dict[str, torch.Tensor]:
        counts = self.codec.entries(streams)
        return counts | {name: count for sidecar in self.sidecars for name, count in sidecar.entries(streams).items()}

    def entry_tokens(self, streams: Streams) -> dict[str, torch.Tensor]:
        return {name: token for sidecar in self.sidecars for name, token in sidecar.entry_tokens(streams).items()}

    def shift_tokens(self, streams: Streams, tokens: int | torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: stream for sidecar in self.sidecars for name, stream in sidecar.shift_tokens(streams, tokens).items()}

    def select_sequences(self, streams: Streams, indices: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: stream for sidecar in self.sidecars for name, stream in sidecar.select_sequences(streams, indices).items()}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        batch, heads, tokens, dim = x.shape
        encoder = self.begin(Run((batch, heads, tokens, dim), x.device, lambda: iter([x])), None)
        return {**encoder.streams, **encoder.encode(x, 0)}

    def begin(self, run: Run, previous: Streams | None, kernel: Kernel | None = None, watch: Observer | None = None) -> RunEncoder:
        """Return the encoder of ``run``, as ``Codec.begin`` does.

        ``kernel(codec, block, start)`` returns the codec's streams, or None if the codec must encode the block itself. ``watch(block,
        start, streams)`` is called with each block of the codec's input and its streams. ``start`` is the index of a block's first token.
        """
        steps, run_streams = self._begin_steps(run, previous, self.raw_token_sidecars)
        inner = begin_run(self.codec, steps.run(), previous)

        def encode(x: torch.Tensor, start: int) -> dict[str, torch.Tensor]:
            block, taken = steps.encode(x, start)
            # Only the codec's own encoder knows the results computed for the whole run.
            result = kernel(self.codec, block, start) if kernel and not inner.streams else None
            streams = inner.encode(block, start) if result is None else result
            if watch:
                watch(block, start, {**inner.streams, **streams})
            streams |= self._sketch_error(block, {**inner.streams, **streams}, run_streams | taken) | taken
            if x.numel() and not x.abs().amax().item() < _SAFE_MAGNITUDE:
                _require_finite(self.decode({**inner.streams, **run_streams, **streams}), "decoded")
            return streams

        return RunEncoder({**inner.streams, **run_streams}, encode)

    def _begin_steps(
        self, run: Run, previous: Streams | None, token_sidecars: Sequence[RawTokenSidecar]
    ) -> tuple[_Steps, dict[str, torch.Tensor]]:
        """Return the steps that precede the codec, beginning with those of ``token_sidecars``, and the streams with one row per run."""
        steps = _Steps(run)
        run_streams: dict[str, torch.Tensor] = {}

        def add(step: RunStep) -> None:
            run_streams.update(step.streams)
            steps.add(step.encode)

        # In decoding, the last sidecar overwrites tokens of earlier ones, so it comes first here.
        for tokens in reversed(token_sidecars):
            add(tokens.begin(steps.run(), previous, self))
        for value_map in self.value_maps:
            add(value_map.begin(self._subtract_vectors(steps.run()), previous))
        steps.add(lambda block, _: (_require_finite(block, "rotated in blocks"), {}))
        for vector in self.page_vectors:
            add(vector.begin(steps.run(), self.rotation))
        if self.frame_parts:
            steps.add(lambda block, _: (self.rotation.forward(block), {}))
            for part in self.frame_parts:
                add(part.begin(steps.run(), previous))
            steps.add(lambda block, _: (_require_finite(self.rotation.inverse(block), "rotated"), {}))
        return steps, run_streams

    def _subtract_vectors(self, run: Run) -> Run:
        """Return ``run`` without page vectors, because maps must be measured on the values that the codec will encode."""
        if self.page_vectors:
            run = replace(run, whole=run.blocks)
        for vector in self.page_vectors:
            run = replace(run, blocks=partial(_map_blocks, vector.without_vectors, run.blocks))
        return run

    def _sketch_error(self, block: torch.Tensor, streams: Streams, subtracted: Streams) -> dict[str, torch.Tensor]:
        """Return the streams that sketch the error of the codec's ``streams`` for ``block``.

        ``subtracted`` contains the streams of the parts that were removed from the block.
        """
        if not self.sketches:
            return {}
        exact, decoded = self.rotation.forward(block), self.codec.decode_frame(streams)
        # Put the parts back into both, so that exactly stored values have no residual; page means are in neither.
        for part in reversed(self.frame_parts):
            exact, decoded = part.put(exact, subtracted), part.put(decoded, subtracted)
        result: dict[str, torch.Tensor] = {}
        for number, sketch in enumerate(self.sketches, 1):
            described = sketch.encode(exact - decoded)
            result |= described
            if number < len(self.sketches):
                decoded = sketch.put(decoded, described)
        return result

    def digits(self, streams: Streams, unpacker: Unpacker = Columns.unpack) -> tuple[torch.Tensor, ...]:
        return self.codec.digits(streams, unpacker)

    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Streams) -> torch.Tensor:
        return self.complete(self.codec.decode_digits(digits, streams), streams)

    def complete(self, frame: torch.Tensor, streams: Streams) -> torch.Tensor:
        """Reverse the steps of all sidecars on ``frame``, the values that the codec decoded, and insert the stored tokens.

        Returns values in the coded frame.
        """
        frame = self._apply_sidecars(frame, streams)
        for tokens in self.raw_token_sidecars:
            sequences = tokens.token_positions(streams)[1]
            frame = tokens.put(frame, self.to_coded_frame(tokens.kept_values(streams), sequences, streams), streams)
        return frame

    def to_coded_frame(self, tokens: torch.Tensor, sequence: torch.Tensor, streams: Streams) -> torch.Tensor:
        """Map the stored ``tokens`` ``[entry, kv_head, dim]`` to the coded frame. ``sequence`` is the sequence index of each token."""
        if not len(tokens):
            return tokens
        # Rows stored once per run exist for every sequence and head; a kept token uses those of its sequence.
        names = [name for name, layout in self.row_layouts.items() if layout.per == "run"]
        rows = {name: take_rows(streams[name], 0, sequence) for name in names}
        tokens = tokens[:, :, None]
        for value_map in self.value_maps:
            tokens = value_map.forward(tokens, rows)
        return self.codec.coded_frame(tokens, rows or streams)[:, :, 0]

    def decode(self, streams: Streams) -> torch.Tensor:
        return self.finish_decoding(self.codec.decode_frame(streams), streams)

    def finish_decoding(self, frame: torch.Tensor, streams: Streams) -> torch.Tensor:
        """Apply all sidecars to ``frame``, the values that the codec decoded. Returns values in the original frame."""
        values = self.original(self._apply_sidecars(frame, streams), streams)
        for tokens in self.raw_token_sidecars:
            values = tokens.put(values, tokens.kept_values(streams), streams)
        return values

    def _apply_sidecars(self, frame: torch.Tensor, streams: Streams) -> torch.Tensor:
        for part in reversed(self.frame_parts):
            frame = part.put(frame, streams)
        for vector in self.page_vectors:
            frame = vector.put(frame, streams)
        for sketch in self.sketches:
            frame = sketch.put(frame, streams)
        return frame

    def original(self, u: torch.Tensor, streams: Streams) -> torch.Tensor:
        values = self.codec.original(u, streams)
        for value_map in reversed(self.value_maps):
            values = value_map.inverse(values, streams)
        return values

    def query(self, q: torch.Tensor, streams: Streams) -> torch.Tensor:
        if self.folded_frame is not None:
            return self.folded_frame.rotated_query(q, self.rotation)
        return self.codec.query(self.map_query(q, streams), streams)

    def map_query(self, q: torch.Tensor, streams: Streams) -> torch.Tensor:
        """Apply all value maps to queries ``[batch, kv_head, row, dim]``, so that they match the values that the codec encodes."""
        for value_map in self.value_maps:
            q = value_map.query(q, streams)
        return q

    def has_same_codes(self, other: Codec) -> bool:
        return isinstance(other, CodecWithSidecars) and self.sidecars == other.sidecars and self.codec.has_same_codes(other.codec)

    def repack(self, streams: Streams, target: Codec) -> dict[str, torch.Tensor]:
        assert isinstance(target, CodecWithSidecars)
        return self.codec.repack(streams, target.codec) | {name: streams[name] for name in self.sidecar_layout(1, 1, 0)}

    def finite_streams(self) -> list[str]:
        plain = (sidecar for sidecar in self.sidecars if type(sidecar).check is Sidecar.check)
        return [*self.codec.finite_streams(), *(name for sidecar in plain for name in sidecar.finite_streams())]

    def payload_rules(self) -> tuple[PayloadRule, ...]:
        sidecar_rules = (sidecar.check for sidecar in self.sidecars if type(sidecar).check is not Sidecar.check)
        return (*self.codec.payload_rules(), *sidecar_rules)

    def run_rules(self) -> tuple[RunRule, ...]:
        sidecar_rules = (sidecar.check_runs for sidecar in self.sidecars if type(sidecar).check_runs is not Sidecar.check_runs)
        return (*self.codec.run_rules(), *sidecar_rules)

    def check_sidecars(self, arrays: Mapping[str, Array], runs: Sequence[int], batch: int, where: str) -> None:
        """Call ``check`` and then ``check_runs`` of all sidecars on the streams ``arrays``."""
        for sidecar in self.sidecars:
            sidecar.check(arrays, where)
        for sidecar in self.sidecars:
            sidecar.check_runs(arrays, runs, batch, where)

    def chunk_rules(self) -> tuple[PayloadRule, ...]:
        return self.codec.chunk_rules()


def _map_blocks(change: Callable[[torch.Tensor], torch.Tensor], blocks: Callable[[], Iterator[torch.Tensor]]) -> Iterator[torch.Tensor]:
    return map(change, blocks())


class _Steps:
    """Steps that transform the blocks of ``run``, in order, before the codec encodes them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._steps: list[Encode] = []

    def add(self, step: Encode) -> None:
        self._steps.append(step)

    def encode(self, block: torch.Tensor, start: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Apply all steps to ``block``, whose first token has index ``start``. Returns the values for the codec, and the streams."""
        return _apply_steps(tuple(self._steps), block, start)

    def run(self) -> Run:
        """Return the run as the steps added so far transform it."""
        if not self._steps:
            return self._run
        steps = tuple(self._steps)

        def blocks() -> Iterator[torch.Tensor]:
            start = 0
            for block in self._run.blocks():
                stop = start + block.shape[2]
                with prefix_errors(f"tokens {start} to {stop - 1}", ValueTooLarge):
                    after, _ = _apply_steps(steps, block, start)
                yield after
                start = stop

        return replace(self._run, blocks=blocks)


def _apply_steps(steps: tuple[Encode, ...], block: torch.Tensor, start: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    streams: dict[str, torch.Tensor] = {}
    for step in steps:
        block, result = step(block, start)
        streams |= result
    return block, streams


def _require_finite(x: torch.Tensor, operation: str) -> torch.Tensor:
    """Return ``x`` ``[batch, kv_head, token, dim]``. Raises ValueTooLarge, with ``operation`` in the message, if a value is not finite."""
    # The sum is one cheap pass; every value is checked only if it is not finite.
    if not torch.isfinite(x.sum()) and not torch.isfinite(x).all():
        batch, head, token, channel = torch.nonzero(~torch.isfinite(x))[0].tolist()
        raise ValueTooLarge(
            f"the value at batch {batch}, head {head}, token {token}, channel {channel} overflows float32 when {operation}: "
            "scale the input, or choose a raw codec"
        )
    return x
