"""lossless: 16-bit floats bit for bit, with entropy-coded exponents (spec/codecs/lossless.md).

Exponents of neighboring values are similar, while signs and fractions are nearly random and stored unchanged. Sources: SplitZip and FlexKV
also code the exponents of a KV cache, in fields of fixed width; DFloat11 (arXiv 2504.11651) entropy-codes the exponents of weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from . import rans
from .base import MAX_DIM, PayloadRule, RunRule
from .columns import Columns, default_fields
from .errors import InvalidParameter, InvalidPayload
from .family import CodecFamily, in_range, one_of
from .lazy import numpy, torch
from .parameter_checks import Fields, check_fields
from .raw import round_to_dtype
from .runs import Run, RunEncoder
from .streams import Layout
from .tables import MAX_CACHED_TABLES
from .value_blocks import first_index, read_values, row_blocks, take_rows, value_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .options import Options
    from .value_blocks import Array

    Numbers = numpy.ndarray[Any, Any]

CHUNK_SIZES = (16, 32, 64, 128, 256)

_CHECKED_WORDS = 1 << 20
_CHECKED_CHUNKS = 1 << 10
"""Maximum number of words and of chunks that a check decodes together. A single chunk may have 2^16 words."""

_EXTRA_BELOW, _EXTRA_ABOVE = 4, 1
"""Number of exponents that a run's table can encode below the run's smallest exponent and above its largest, in addition to 0.

The table then also fits a following run of similar values.
"""


class FloatFormat(NamedTuple):
    """Bit widths of the fraction and the exponent of a float. The fraction has the lowest bits, and the sign is the highest bit."""

    fraction_bits: int
    exponent_bits: int

    @property
    def exponents(self) -> int:
        return 1 << self.exponent_bits


FLOAT_FORMATS = {"bf16": FloatFormat(7, 8), "fp16": FloatFormat(10, 5)}


@dataclass(frozen=True)
class Lossless(CodecFamily):
    """Codec that stores bf16 or fp16 values (``dtype``) bit for bit. The exponents of ``chunk`` tokens of a head are coded together."""

    id: ClassVar[str] = "lossless"

    dim: int = field(metadata=in_range(1, MAX_DIM))
    dtype: str = field(metadata=one_of(FLOAT_FORMATS))
    chunk: int = field(metadata=one_of(CHUNK_SIZES))
    fields: Fields

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk * self.dim > rans.MAX_SYMBOLS:
            raise InvalidParameter(
                f"codec {self.id}: chunk is {self.chunk}, which gives {self.chunk * self.dim} symbols at head dim {self.dim}, but a chunk "
                f"may have at most {rans.MAX_SYMBOLS}: use a smaller chunk"
            )
        check_fields(self.id, self.fields, ("signed_fractions",))
        self.packings()

    @classmethod
    def create(cls, dim: int, side: str, options: Options) -> Self:
        dtype = cls.option(options, "dtype", "bf16", omitted=None)
        largest = max(chunk for chunk in CHUNK_SIZES if chunk * dim <= rans.MAX_SYMBOLS or chunk == CHUNK_SIZES[0])
        chunk = cls.option(options, "chunk", largest, omitted=None)
        options.finish()
        return cls(dim, dtype, chunk, (("signed_fractions", default_fields(dim, (2 << FLOAT_FORMATS[dtype].fraction_bits,))),))

    @property
    def nominal_bits(self) -> float:
        """Bits per value for normally distributed values. Actual sizes depend on the values."""
        return 1 + FLOAT_FORMATS[self.dtype].fraction_bits + _TYPICAL_EXPONENT_BITS

    @property
    def exact_dtype(self) -> str:
        return self.dtype

    @property
    def group_tokens(self) -> int:
        return self.chunk

    def packings(self) -> dict[str, Columns]:
        return _packings(self.dim, FLOAT_FORMATS[self.dtype].fraction_bits, self.fields)

    def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        rows = -(-tokens // self.chunk)
        return {
            "frequencies": Layout("U16", (batch, heads, 1, FLOAT_FORMATS[self.dtype].exponents), per="run"),
            "states": Layout("U16", (batch, heads, rows, 2 * rans.LANES), self.chunk),
            "word_counts": Layout("U16", (batch, heads, rows), self.chunk),
            "words": Layout("U16", (1, 1, 0), self.chunk, per="entry", batch_axis=None),
        }

    def default_entry_counts(self, batch: int, heads: int, tokens: int) -> dict[str, int]:
        return {"words": int(batch * heads * tokens * self.dim * _TYPICAL_EXPONENT_BITS) // 16}

    def entries(self, streams: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"words": streams["word_counts"].view(torch.int16).to(torch.int64).bitwise_and(0xFFFF).sum(1).T}

    def begin(self, run: Run, previous: Mapping[str, torch.Tensor] | None) -> RunEncoder:
        batch, heads = run.shape[:2]
        alphabet = FLOAT_FORMATS[self.dtype].exponents
        counts = numpy.zeros((batch * heads, alphabet), numpy.int64)
        for block in run.blocks():
            exponents = torch.from_numpy(self._exponents(self._bit_patterns(block)).reshape(batch * heads, -1))
            for head, row in enumerate(exponents):
                # numpy.bincount would convert the symbols to int64 first.
                counts[head] += torch.bincount(row, minlength=alphabet).numpy()
        tables = self.choose_frequencies(counts, previous)
        stored = _to_stream(tables.reshape(batch, heads, 1, alphabet), run.device)
        return RunEncoder({"frequencies": stored}, lambda block, _: self.encode_with_tables(block, tables))

    def choose_frequencies(self, counts: Numbers, previous: Mapping[str, torch.Tensor] | None) -> Numbers:
        """Return the symbol frequencies for a run with these exponent ``counts``: int64 ``[batch · kv_head, symbol]``.

        The frequencies of the run ``previous`` are reused if new ones would not save more than the space they take.
        """
        tables = rans.frequencies(_add_unseen(counts))
        if previous is not None:
            last = _to_numpy(previous["frequencies"]).reshape(counts.shape).astype(numpy.int64)
            # A new table costs its own bytes.
            if (rans.cost_bits(counts, last) <= rans.cost_bits(counts, tables) + 16 * counts.shape[1]).all():
                return last
        return tables

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Round ``x`` of any float dtype to ``dtype``, with ties to even, and encode it.

        Values that already have that dtype keep their bits. Raises ValueTooLarge if a finite value would become infinity.
        """
        batch, heads, tokens, dim = x.shape
        run = self.begin(Run((batch, heads, tokens, dim), x.device, lambda: iter((x,))), None)
        return {**run.encode(x, 0), **run.streams}

    def encode_with_tables(self, x: torch.Tensor, tables: Numbers) -> dict[str, torch.Tensor]:
        """Encode ``x`` with ``tables``, int64 ``[batch · kv_head, symbol]``. Returns all streams except ``frequencies``.

        Every symbol in ``x`` must have a frequency above 0.
        """
        batch, heads, tokens, dim = x.shape
        bits = self._bit_patterns(x)
        rows = -(-tokens // self.chunk)
        symbols = numpy.zeros((batch * heads, rows * self.chunk, dim), numpy.uint8)
        symbols[:, :tokens] = self._exponents(bits).reshape(batch * heads, tokens, dim)
        symbols = symbols.reshape(batch * heads, rows, self.chunk * dim)
        # Words are ordered by chunk, then by sequence, then by head.
        in_order = symbols.transpose(1, 0, 2).reshape(-1, self.chunk * dim)
        lengths = numpy.repeat(self._chunk_lengths((tokens,)), batch * heads)
        chunks = rans.encode(in_order, lengths, tables, numpy.tile(numpy.arange(batch * heads), rows))
        return self.pack("signed_fractions", self._signed_fractions(bits)) | self.chunk_streams(chunks, batch, heads, x.device)

    def chunk_streams(self, chunks: rans.Chunks, batch: int, heads: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Convert encoded chunks to streams. They must be ordered by token group, sequence and head."""
        states = chunks.states.astype("<u4").view("<u2").reshape(-1, batch, heads, 2 * rans.LANES).transpose(1, 2, 0, 3)
        counts = chunks.counts.reshape(-1, batch, heads).transpose(1, 2, 0)
        return {
            "states": _to_stream(states, device),
            "word_counts": _to_stream(counts, device),
            "words": _to_stream(chunks.words[None, None], device),
        }

    def _bit_patterns(self, x: torch.Tensor) -> torch.Tensor:
        return round_to_dtype(x, self.dtype).view(torch.int16)

    def _exponents(self, bits: torch.Tensor) -> Numbers:
        fraction, exponent = FLOAT_FORMATS[self.dtype]
        return _to_numpy((bits >> fraction & (1 << exponent) - 1).to(torch.uint8))

    def _signed_fractions(self, bits: torch.Tensor) -> torch.Tensor:
        """Return one digit per value, int32 in the shape of ``bits``, that combines the sign and the fraction."""
        fraction, exponent = FLOAT_FORMATS[self.dtype]
        return (bits >> exponent & 1 << fraction | bits & (1 << fraction) - 1).to(torch.int32)

    def _chunk_lengths(self, runs: Sequence[int]) -> Numbers:
        """Return the number of symbols in each chunk of a head, int64 ``[chunk]``. ``runs`` contains the number of tokens in each run."""
        tokens = [min(self.chunk, run - first) for run in runs for first in range(0, run, self.chunk)]
        return numpy.array(tokens, numpy.int64) * self.dim

    def stored_values(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the values of a run in the codec's dtype. A shortened chunk decodes to its first tokens."""
        return self._join_fields(self.digits(streams)[0], streams)

    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._join_fields(digits[0], streams).to(torch.float32)

    def exponents(self, streams: Mapping[str, torch.Tensor]) -> Numbers:
        """Return the exponent fields, uint8 ``[chunk, batch, kv_head, token of the chunk, dim]``.

        If the only chunk is partial, the token axis has only as many tokens as the chunk encodes.
        """
        batch, heads, tokens = streams["signed_fractions.0"].shape[:3]
        rows = -(-tokens // self.chunk)
        flat = {name: _to_numpy(streams[name]) for name in ("frequencies", "states", "word_counts", "words")}
        counts = flat["word_counts"].transpose(2, 0, 1).reshape(-1).astype(numpy.int64)
        states = flat["states"].transpose(2, 0, 1, 3).reshape(-1, 2 * rans.LANES)
        tables = flat["frequencies"].reshape(batch * heads, -1)
        decoded = rans.decode(
            rans.Chunks(flat["words"].reshape(-1), counts, _join_states(states)),
            numpy.repeat(self._chunk_lengths((tokens,)), batch * heads),
            tables,
            numpy.tile(numpy.arange(batch * heads), rows),
        )
        result: Numbers = decoded.symbols.reshape(rows, batch, heads, min(self.chunk, tokens), self.dim)
        return result

    def _join_fields(self, digit: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tokens = digit.shape[2]
        exponents = torch.from_numpy(self.exponents(streams)).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :tokens]
        fraction, exponent = FLOAT_FORMATS[self.dtype]
        codes = digit.to(torch.int16)
        bits = (codes & 1 << fraction) << exponent
        bits |= codes & (1 << fraction) - 1
        bits |= exponents.to(digit.device, torch.int16).bitwise_left_shift_(fraction)
        return bits.view({"bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype])

    def cut(self, streams: Mapping[str, torch.Tensor], tokens: int) -> dict[str, torch.Tensor]:
        """Shorten the last chunk of ``streams`` to its first ``tokens`` tokens, by encoding it again with the same tables."""
        begin = streams["signed_fractions.0"].shape[2] - tokens
        last = {
            name: stream[:, :, begin:] if name.startswith("signed_fractions") else stream[:, :, -1:] for name, stream in streams.items()
        }
        words, counts = streams["words"], int(self.entries(last)["words"].sum())
        last["words"] = words[:, :, words.shape[2] - counts :]
        tables = _to_numpy(last["frequencies"]).astype(numpy.int64)
        again = self.encode_with_tables(self.stored_values(last), tables.reshape(-1, tables.shape[-1]))
        return dict(streams) | {
            "states": _replace_last(streams["states"], 1, again["states"]),
            "word_counts": _replace_last(streams["word_counts"], 1, again["word_counts"]),
            "words": _replace_last(words, counts, again["words"]),
        }

    def payload_rules(self) -> tuple[PayloadRule, ...]:
        return (self._check_chunk_streams,)

    def _check_chunk_streams(self, arrays: Mapping[str, Array], where: str) -> None:
        """Raise InvalidPayload for frequencies that do not sum to 2^12, states below 2^16, and word counts that do not match the words."""
        for first, (block,) in row_blocks(arrays["frequencies"]):
            sums = block.sum(1, dtype=numpy.int64)
            if (sums != rans.TOTAL).any():
                at = first_index(sums != rans.TOTAL, first, arrays["frequencies"].shape[:-1])
                raise InvalidPayload(
                    f"{where}.frequencies: the frequencies at {at} sum to {sums[(sums != rans.TOTAL).argmax()]}, expected {rans.TOTAL}"
                )
        rans.check_states(arrays["states"], where)
        counted = sum(int(block.sum(dtype=numpy.int64)) for _, block in value_blocks(arrays["word_counts"]))
        if counted != arrays["words"].shape[2]:
            raise InvalidPayload(
                f"{where}.word_counts: the counts sum to {counted}, but {where}.words has {arrays['words'].shape[2]} words"
            )

    def run_rules(self) -> tuple[RunRule, ...]:
        return (self._check_chunks,)

    def _check_chunks(self, arrays: Mapping[str, Array], runs: Sequence[int], batch: int, where: str) -> None:
        """Raise InvalidPayload if chunks read the wrong number of words or end in the wrong state. No encoder produces such chunks."""
        heads, rows = arrays["word_counts"].shape[1:]
        lengths = self._chunk_lengths(runs)
        table = numpy.repeat(numpy.arange(len(runs)), [-(-run // self.chunk) for run in runs])
        counts = read_values(arrays["word_counts"], 0, batch * heads * rows).reshape(batch * heads, rows).T.astype(numpy.int64)
        ends = numpy.cumsum(counts)
        for first, last in _chunk_ranges(ends):
            # Chunks are ordered by number, then by sequence, then by head. Rows of other streams are ordered by sequence, then by head.
            row, head = numpy.divmod(numpy.arange(first, last), batch * heads)
            used, table_of = numpy.unique(head * len(runs) + table[row], return_inverse=True)
            chunk_counts = counts[row, head]
            begin = int(ends[first - 1]) if first else 0
            chunks = rans.Chunks(
                read_values(arrays["words"], begin, int(ends[last - 1])),
                chunk_counts,
                _join_states(take_rows(arrays["states"], 2 * rans.LANES, head * rows + row)),
            )
            tables = take_rows(arrays["frequencies"], FLOAT_FORMATS[self.dtype].exponents, used)
            decoded = rans.decode(chunks, lengths[row], tables, table_of)

            def chunk_position(index: int, row: Numbers = row, head: Numbers = head) -> list[int]:
                return [*divmod(int(head[index]), heads), int(row[index])]

            rans.check_ends(decoded, chunk_counts, chunk_position, where)


def _chunk_ranges(ends: Numbers) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, last) of chunks to decode together. ``ends`` contains the index of the word after each chunk."""
    first = 0
    while first < len(ends):
        begin = int(ends[first - 1]) if first else 0
        last = int(numpy.searchsorted(ends, begin + _CHECKED_WORDS, "right"))
        last = min(max(first + 1, last), first + _CHECKED_CHUNKS, len(ends))
        yield first, last
        first = last


def _add_unseen(counts: Numbers) -> Numbers:
    """Raise zero ``counts`` ``[table, symbol]`` to 1 near counted symbols, because these symbols may occur later.

    With many values, this costs almost nothing.
    """
    present = counts > 0
    room = present.copy()
    for step in range(1, _EXTRA_BELOW + 1):
        room[:, :-step] |= present[:, step:]
    for step in range(1, _EXTRA_ABOVE + 1):
        room[:, step:] |= present[:, :-step]
    room[:, 0] = True
    return numpy.maximum(counts, room)


def _join_states(words: Numbers) -> Numbers:
    """Join stored words ``[chunk, 2 · LANES]``, lower halves first, into states, uint32 ``[chunk, LANES]``."""
    return numpy.ascontiguousarray(words, "<u2").view("<u4").astype(numpy.uint32)


def _to_numpy(stream: torch.Tensor) -> Numbers:
    result: Numbers = stream.detach().cpu().numpy()
    return result


def _to_stream(numbers: Numbers, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(numpy.ascontiguousarray(numbers, numpy.uint16)).to(device)


def _replace_last(stream: torch.Tensor, rows: int, new: torch.Tensor) -> torch.Tensor:
    return torch.cat([stream[:, :, : stream.shape[2] - rows], new], 2)


_TYPICAL_EXPONENT_BITS = 2.53125
"""Number of word bits per exponent of normally distributed values. The entropy is 2.54 bits, but part of it is stored in the states."""


@lru_cache(MAX_CACHED_TABLES)
def _packings(dim: int, fraction_bits: int, fields: Fields) -> dict[str, Columns]:
    return {"signed_fractions": Columns(dim, (2 << fraction_bits,), dict(fields)["signed_fractions"])}
