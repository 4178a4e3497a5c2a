"""transform: columns of a calibrated frame, quantized uniformly and entropy-coded with static tables (spec/codecs/transform.md).

This is transform coding as for images: a decorrelating transform, a uniform quantizer and an entropy coder. Keys are encoded as they are
before RoPE. Sources: V. Goyal, Theoretical foundations of transform coding (2001); KVTC (arXiv 2511.01815) for KV caches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from . import rans
from .base import MAX_DIM, PayloadRule, RunRule
from .basis import DIGEST_BYTES, MAX_LAYER, missing_basis_error
from .errors import InvalidParameter, InvalidPayload, ValueTooLarge
from .family import CodecFamily, in_range, one_of
from .frames import MAX_LEVEL, SCALES_PER_OCTAVE, Frames, Rope
from .lazy import numpy, torch
from .products import product
from .runs import Run, RunEncoder
from .streams import Layout
from .transform_chunks import (
    ChunkList,
    Symbols,
    decode_levels,
    decode_symbols,
    encode_chunks,
    flatten_chunks,
    join_halves,
    split_halves,
    to_stream,
)
from .value_blocks import first_index, read_values, row_blocks, take_rows, value_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .options import Options
    from .value_blocks import Array

    Numbers = numpy.ndarray[Any, Any]

SIDES = ("k", "v")
SCOPES = ("head", "layer")
"""Scopes of a frame: the channels of one head, or the channels of all heads of a layer."""
CHUNK_SIZES = (16, 32, 64, 128, 256)
MAX_STEP = 255

_COUNT_STREAMS = ("columns", "tokens", "word_counts")
_POSITIONS = 1 << 32
_TYPICAL_BITS = 0.5
_SYMBOLS_AT_ONCE = 1 << 22
"""Maximum number of symbols decoded together, because even a small chunk may decode to many tokens.

A sequence of a token group is never split.
"""


@dataclass(frozen=True)
class Transform(CodecFamily):
    """Codec that quantizes keys or values in a frame of a calibrated basis, with steps of size 2^(-``step`` / 16).

    ``side`` and ``layer`` select the frame in the basis with SHA-256 ``basis``. ``chunk`` tokens are encoded together. ``source`` contains
    the frames once the codec has received its basis; it is not stored.
    """

    id: ClassVar[str] = "transform"
    supports_all_sidecars: ClassVar[bool] = False

    dim: int = field(metadata=in_range(1, MAX_DIM))
    basis: bytes
    layer: int = field(metadata=in_range(0, MAX_LAYER))
    side: str = field(metadata=one_of(SIDES))
    scope: str = field(metadata=one_of(SCOPES))
    step: int = field(metadata=in_range(0, MAX_STEP))
    chunk: int = field(metadata=one_of(CHUNK_SIZES))
    source: Frames | None = field(default=None, compare=False, repr=False, metadata={"stored": False, "steers": False})

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.basis) != DIGEST_BYTES:
            raise InvalidParameter(f"codec {self.id}: basis has {len(self.basis)} bytes, expected a {DIGEST_BYTES}-byte SHA-256 digest")
        if self.chunk * self.dim > rans.MAX_SYMBOLS:
            raise InvalidParameter(
                f"codec {self.id}: chunk is {self.chunk}, which gives {self.chunk * self.dim} symbols at head dim {self.dim}, but a chunk "
                f"may have at most {rans.MAX_SYMBOLS}: use a smaller chunk"
            )

    @classmethod
    def create(cls, dim: int, side: str, options: Options) -> Self:
        cls.check_value("dim", dim)
        chunk = cls.option(options, "chunk", default_chunk(dim), omitted=None)
        for name in ("bits", "basis"):
            options.text(name)
        options.finish()
        calibrated = options.calibrated
        if calibrated is None or calibrated.frames is None:
            return cls(dim, bytes(DIGEST_BYTES), 0, side, "head", 0, chunk)
        if calibrated.rows.dim != dim:
            raise InvalidParameter(
                f"codec {cls.id}: the head dim is {dim}, but the basis is for head dim {calibrated.rows.dim}: use a basis for this model"
            )
        scope = "head" if calibrated.frames.count == calibrated.rows.heads else "layer"
        return cls(dim, calibrated.digest, calibrated.layer, side, scope, calibrated.step, chunk, calibrated.frames)

    @property
    def nominal_bits(self) -> float:
        """Bits per value that the basis predicts or, without a basis, the typical number for a recipe."""
        return _TYPICAL_BITS if self.source is None else self.source.expected_bits(self.step)

    @property
    def group_tokens(self) -> int:
        return self.chunk

    @property
    def step_size(self) -> float:
        """Decoded value of level 1."""
        return float(2.0 ** (-self.step / SCALES_PER_OCTAVE))

    @property
    def bases_needed(self) -> frozenset[bytes]:
        return frozenset({self.basis})

    @property
    def basis_location(self) -> str:
        """Name, for messages, of the part of the basis that the codec needs."""
        return f"{'keys' if self.side == 'k' else 'values'} of layer {self.layer} of the basis {self.basis.hex()}"

    def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        rows = -(-tokens // self.chunk)
        positions = {"positions": Layout("U16", (batch, 1, rows, 2), self.chunk)} if self.side == "k" else {}
        return positions | {
            "tokens": Layout("U16", (batch, 1, rows), self.chunk),
            "columns": Layout("U16", (batch, heads, rows), self.chunk),
            "states": Layout("U16", (batch, heads, rows, 2 * rans.LANES), self.chunk),
            "word_counts": Layout("U16", (batch, heads, rows, 2), self.chunk),
            "words": Layout("U16", (1, 1, 0), self.chunk, per="entry", batch_axis=None),
        }

    def token_count(self, streams: Mapping[str, torch.Tensor]) -> int:
        counts = streams["tokens"][0, 0].view(torch.int16).to(torch.int64).bitwise_and(0xFFFF)
        return int(counts.clamp_max(self.chunk).sum())

    def default_entry_counts(self, batch: int, heads: int, tokens: int) -> dict[str, int]:
        return {"words": int(batch * heads * tokens * self.dim * self.nominal_bits) // 16}

    def entries(self, streams: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        pairs = streams["word_counts"].view(torch.int16).to(torch.int64).bitwise_and(0xFFFF)
        return {"words": (pairs[..., 0] + (pairs[..., 1] << 16)).sum(1).T}

    def source_for(self, heads: int) -> Frames:
        """Return the frames for ``heads`` heads. Raises MissingBasis if there is none, or InvalidParameter for a wrong number of heads."""
        if self.source is None:
            raise missing_basis_error(self.basis_location)
        try:
            return self.source.check_heads(heads, self.dim)
        except InvalidParameter as error:
            raise InvalidParameter(f"{self.basis_location}: {error}") from None

    def side_rope(self, source: Frames) -> Rope | None:
        """Return the RoPE of keys, or None for values and for models without RoPE."""
        return source.rope if self.side == "k" else None

    def begin(self, run: Run, previous: Mapping[str, torch.Tensor] | None) -> RunEncoder:
        first = run.position
        if first is None:
            first = 0 if previous is None or self.side == "v" else _next_position(previous)
        return RunEncoder({}, lambda block, start: self._encode(block, first + start))

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode ``x``, assuming that its first token has position 0.

        Raises ValueTooLarge for values of more than 2^31 steps, and for keys of sequences longer than the basis's RoPE covers.
        """
        return self._encode(x, 0)

    def _encode(self, x: torch.Tensor, position: int) -> dict[str, torch.Tensor]:
        batch, heads, tokens, _ = x.shape
        source = self.source_for(heads)
        rope = self.side_rope(source)
        if rope is not None:
            if rope.longest is not None and position + tokens > rope.longest:
                raise ValueTooLarge(
                    f"the sequence has {position + tokens} tokens, but the basis covers sequences of at most {rope.longest} tokens, "
                    "because the model's RoPE uses different frequencies for longer ones: choose another codec for keys"
                )
            # Any position decodes correctly, but only the true one gives similar keys to similar tokens. Token groups do not wrap around.
            position %= _POSITIONS
            position = position if position + tokens <= _POSITIONS else 0
            x = rope.rotate(x.to(torch.float32), position, inverse=True)
        wide = (
            x.to(torch.float32) if self.scope == "head" else x.to(torch.float32).transpose(1, 2).reshape(batch, 1, tokens, heads * self.dim)
        )
        rows = source.rows_on_device(x.device)
        columns = product(wide - rows[:, :1], source.inverse.to(x.device)) / self.step_size
        levels = torch.sign(columns) * torch.floor(columns.abs() + 0.5)
        if levels.numel() and not float(levels.abs().amax()) <= MAX_LEVEL:
            raise ValueTooLarge(
                f"a value is {float(levels.abs().amax()):.6g} steps from the mean, but the limit is {MAX_LEVEL}: scale the input, or "
                "choose a raw codec"
            )
        # Column c of a layer's frame belongs to block c mod heads, so that all blocks have a part of the first columns.
        blocks = levels if self.scope == "head" else levels.view(batch, tokens, self.dim, heads).permute(0, 3, 1, 2)
        result = [
            blocks[:, :, start : start + self.chunk].transpose(2, 3).to(torch.int64).cpu().numpy() for start in range(0, tokens, self.chunk)
        ]
        streams = self.encode_levels(result, source, (batch, heads))
        if self.side == "k":
            first = (position + self.chunk * numpy.arange(len(result))) % _POSITIONS
            streams["positions"] = numpy.broadcast_to(split_halves(first), (batch, 1, len(result), 2))
        return {name: to_stream(streams[name], x.device) for name in self.row_layouts}

    def table_indices(self, source: Frames, heads: int) -> Numbers:
        """Return the index of each column's table, uint8 ``[kv_head, column]``."""
        result = source.tables_at(self.step).astype(numpy.uint8)
        return result if self.scope == "head" else result.reshape(self.dim, heads).T

    def encode_levels(self, groups: Sequence[Numbers], source: Frames, shape: tuple[int, int]) -> dict[str, Numbers]:
        """Encode quantized levels to all streams except ``positions``.

        ``groups`` contains, for each token group, the levels, int64 ``[batch, kv_head, column of the block, token]``. ``source`` contains
        the frames of all heads, and ``shape`` is (batch, kv_head). Raises ValueTooLarge for levels that a table cannot encode.
        """
        return encode_chunks(groups, source.tables, self.table_indices(source, shape[1]), shape)

    def symbols(self, streams: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, Symbols]]:
        """Decode the symbols of ``streams`` in parts. Yields the index of each part's first chunk, and the part's symbols.

        Chunks are ordered by token group, sequence and head. Parts never split the heads of a sequence. Raises MissingBasis without a
        basis.
        """
        batch, heads, rows = streams["columns"].shape
        source = self.source_for(heads)
        chunks = ChunkList.from_streams(streams, self.table_indices(source, heads), self.chunk)
        at_once = heads * max(1, _SYMBOLS_AT_ONCE // (heads * self.chunk * self.dim))
        for first in range(0, batch * heads * rows, at_once):
            yield first, chunks.symbols(first, min(first + at_once, batch * heads * rows), source.tables)

    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Decode all tokens of ``streams``. A shortened chunk decodes to its first tokens."""
        batch, heads, _ = streams["columns"].shape
        device, source = streams["columns"].device, self.source_for(heads)
        tokens = numpy.minimum(flatten_chunks(streams["tokens"])[::batch], self.chunk)
        ends = numpy.cumsum(tokens)
        out = torch.empty(batch, heads, int(tokens.sum()), self.dim, dtype=torch.float32, device=device)
        rope = self.side_rope(source)
        positions = None if rope is None else _join_positions(streams["positions"])
        for first, part in self.symbols(streams):
            values = self._decode_values(part, source)
            for begin in range(0, len(values), heads):
                row, b = divmod((first + begin) // heads, batch)
                heads_slice, count = slice(begin, begin + heads), int(tokens[row])
                to = out[b, :, int(ends[row]) - count : int(ends[row])]
                x = self._decode_token_group(values[heads_slice], part.columns[heads_slice], count, source, device)
                if positions is not None and rope is not None:
                    rope.rotate(x, int(positions[b, row]), out=to)
                else:
                    to.copy_(x)
        return out

    def _decode_values(self, symbols: Symbols, source: Frames) -> list[torch.Tensor]:
        """Return the decoded values of each chunk, float32 ``[column, token]``."""
        tables = source.tables
        by_symbol = (tables.symbol_values * self.step_size).numpy()
        places = numpy.multiply(symbols.table, tables.alphabet, dtype=numpy.intp)
        places += symbols.symbols
        values = by_symbol.take(places)
        if len(symbols.escaped):
            values[symbols.symbols == 0] = symbols.escaped * numpy.float64(self.step_size)
        parts = zip(values, symbols.columns, symbols.tokens, strict=True)
        return [torch.from_numpy(row[: columns * tokens].reshape(columns, tokens)) for row, columns, tokens in parts]

    def _decode_token_group(
        self, values: Sequence[torch.Tensor], columns: Numbers, tokens: int, source: Frames, device: torch.device
    ) -> torch.Tensor:
        """Return the first ``tokens`` tokens of a sequence's token group, without RoPE: float32 ``[kv_head, token, dim]``."""
        heads, rows = len(values), source.rows_on_device(device)
        if self.scope == "head":
            return torch.stack(
                [
                    torch.addmm(rows[h, 0], head_values.to(device).T, rows[h, 1 : 1 + len(head_values)])
                    for h, head_values in enumerate(values)
                ]
            )
        # Column c of the layer's frame is column c div heads of block c mod heads.
        interleaved = torch.empty(int(columns.max()), heads, tokens, dtype=torch.float32, device="cpu")
        for h, head_values in enumerate(values):
            interleaved[: len(head_values), h] = head_values
            interleaved[len(head_values) :, h] = 0.0
        wide = interleaved.flatten(0, 1).to(device)
        x = torch.addmm(rows[0, 0], wide.T, rows[0, 1 : 1 + len(wide)])
        return x.view(tokens, heads, self.dim).transpose(0, 1)

    def cut(self, streams: Mapping[str, torch.Tensor], tokens: int) -> dict[str, torch.Tensor]:
        """Shorten the last chunk of ``streams`` to its first ``tokens`` tokens, by encoding it again with the same tables."""
        heads = streams["columns"].shape[1]
        last = {name: stream[:, :, -1:] for name, stream in streams.items() if name != "words"}
        words, count = streams["words"], int(self.entries(last)["words"].sum())
        last["words"] = words[:, :, words.shape[2] - count :]
        source, again = self.source_for(heads), []
        for _, part in self.symbols(last):
            group = numpy.stack([levels[:, :tokens] for levels in decode_levels(part, source.tables, self.dim)])
            sequences = len(group) // heads
            again.append(self.encode_levels([group.reshape(sequences, heads, self.dim, tokens)], source, (sequences, heads)))
        device = words.device
        result = {name: stream for name, stream in streams.items() if name in ("positions", "words")}
        result["words"] = torch.cat(
            [words[:, :, : words.shape[2] - count], *(to_stream(encoded_again["words"], device) for encoded_again in again)], 2
        )
        for name in ("tokens", "columns", "states", "word_counts"):
            coded_again = torch.cat([to_stream(encoded_again[name], device) for encoded_again in again], 0)
            result[name] = torch.cat([streams[name][:, :, :-1], coded_again], 2)
        return {name: result[name] for name in streams}

    def payload_rules(self) -> tuple[PayloadRule, ...]:
        return (self._check_chunk_streams,)

    def _check_chunk_streams(self, arrays: Mapping[str, Array], where: str) -> None:
        """Raise InvalidPayload for column counts above the head dim, states below 2^16, and word counts that do not match the words."""
        for first, block in value_blocks(arrays["columns"]):
            if (block > self.dim).any():
                at = first_index(block > self.dim, first, arrays["columns"].shape)
                raise InvalidPayload(
                    f"{where}.columns: the count at {at} is {block[(block > self.dim).argmax()]}, expected at most the head dim, {self.dim}"
                )
        rans.check_states(arrays["states"], where)
        counted = sum(int(join_halves(block.astype(numpy.int64)).sum()) for _, (block,) in row_blocks(arrays["word_counts"]))
        if counted != arrays["words"].shape[2]:
            raise InvalidPayload(
                f"{where}.word_counts: the counts sum to {counted}, but {where}.words has {arrays['words'].shape[2]} words"
            )

    def run_rules(self) -> tuple[RunRule, ...]:
        return (self._check_counts,)

    def _check_counts(self, arrays: Mapping[str, Array], runs: Sequence[int], batch: int, where: str) -> None:
        """Raise InvalidPayload unless the token counts match the runs."""
        rows = arrays["columns"].shape[2]
        expected = [min(self.chunk, run - first) for run in runs for first in range(0, run, self.chunk)]
        tokens = read_values(arrays["tokens"], 0, batch * rows).reshape(batch, rows)
        if (tokens != expected).any():
            b, row = (int(index) for index in numpy.argwhere(tokens != expected)[0])
            raise InvalidPayload(f"{where}.tokens: the count at {[b, 0, row]} is {tokens[b, row]}, expected {expected[row]} for this run")

    def chunk_rules(self) -> tuple[PayloadRule, ...]:
        return (self._check_symbols,)

    def _check_symbols(self, arrays: Mapping[str, Array], where: str) -> None:
        """Raise InvalidPayload for chunks that no encoder produces. Without the basis, this check always passes."""
        batch, heads, rows = arrays["columns"].shape
        if self.source is None or not rows:
            return
        source = self.source_for(heads)
        numbers = self.table_indices(source, heads)
        counted = (arrays[name] for name in _COUNT_STREAMS)
        columns, tokens, pairs = (read_values(array, 0, math.prod(array.shape)).astype(numpy.int64) for array in counted)
        columns, pairs = (one.reshape(batch * heads, rows, -1).swapaxes(0, 1).reshape(batch * heads * rows, -1) for one in (columns, pairs))
        counts, tokens = join_halves(pairs), tokens.reshape(batch, rows)
        ends = numpy.cumsum(counts)
        at_once = max(1, _SYMBOLS_AT_ONCE // (self.chunk * self.dim))
        for first in range(0, batch * heads * rows, at_once):
            last = min(first + at_once, batch * heads * rows)
            row, sequence, head = numpy.unravel_index(numpy.arange(first, last), (rows, batch, heads))
            result = decode_symbols(
                numpy.minimum(columns[first:last, 0], self.dim),
                numpy.minimum(tokens[sequence, row], self.chunk),
                counts[first:last],
                take_rows(arrays["states"], 2 * rans.LANES, (sequence * heads + head) * rows + row),
                read_values(arrays["words"], int(ends[first] - counts[first]), int(ends[last - 1])),
                numbers[head],
                source.tables,
            )
            self.check_ends(rans.DecodedChunks(result.symbols, result.read, result.states), result.counts, (batch, heads), where, first)

    def check_ends(self, decoded: rans.DecodedChunks, counts: Numbers, shape: tuple[int, int], where: str, first: int = 0) -> None:
        """Check the ends of chunks, ordered by token group, sequence and head, as ``rans.check_ends`` does.

        ``first`` is the index of the first chunk, and ``shape`` is (batch, kv_head). The words of escapes count as read.
        """
        batch, heads = shape

        def chunk_position(index: int) -> list[int]:
            row, sequence = divmod(first + index, batch * heads)
            return [*divmod(sequence, heads), row]

        rans.check_ends(decoded, counts, chunk_position, where)


def default_chunk(dim: int) -> int:
    """Return the largest number of tokens that a chunk may have at head dim ``dim``."""
    return max(chunk for chunk in CHUNK_SIZES if chunk * dim <= rans.MAX_SYMBOLS)


def _join_positions(stream: torch.Tensor) -> Numbers:
    """Decode the stream ``[batch, 1, row, 2]`` to positions, int64 ``[batch, row]``."""
    return join_halves(stream.cpu().numpy().astype(numpy.int64)[:, 0])


def _next_position(previous: Mapping[str, torch.Tensor]) -> int:
    """Return the position after the last token of the run ``previous``."""
    return int(_join_positions(previous["positions"])[0, -1]) + int(previous["tokens"][0, 0, -1].to(torch.int64))
