"""klt: columns of a calibrated basis, each with its own number of bits, and an optional gain per token (spec/codecs/klt.md).

There are two layouts. In the first, all heads share the widths (bits per column) of runs of 16 columns, and each head's codes are rows of
words. In the second, each head has its own widths for runs of 8 columns, and the codes of all heads of a token are one row of bytes: a run
of width w takes w bytes.

The basis is the Karhunen-Loeve transform of a model's keys or values in one layer, weighted by how much their errors cost the model
(formats/basis.py). Source: transform coding with fixed rates, Gersho and Gray 1992, ch. 8; weights as in Fisher-weighted SVD, Hsu et al.
2022 (arXiv 2207.00112).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from .base import MAX_DIM, PayloadRule
from .basis import DIGEST_BYTES, MAX_GAIN, MAX_LAYER, MAX_WIDTH, BasisRows, missing_basis_error, row_count, run_columns, run_count
from .columns import Columns, default_fields
from .errors import InvalidParameter, InvalidPayload, ValueTooLarge
from .family import CodecFamily, in_range, one_of
from .lazy import functional, numpy, torch
from .parameter_checks import Fields, check_fields
from .products import product
from .runs import Run, RunEncoder
from .streams import NORMS, Layout
from .tables import MAX_CACHED_TABLES
from .value_blocks import row_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .options import Options
    from .value_blocks import Array

SIDES = ("k", "v")
GAIN_DTYPES = {"none": None, "fp16": "F16"}
"""Stored dtypes of the gains of tokens, by parameter value."""
ROW_DTYPES = {"basis": None, **NORMS}
"""Stored dtypes of the basis rows, by parameter value. For ``basis``, the file does not store them."""

MAX_WITHOUT_GAIN = 64
"""Largest head dim without a gain by default, if heads have their own widths. More bits for columns then help more than a gain."""

HEAD_RUN_COLUMNS = 8
"""Number of columns that share a width if each head has its own widths. Their codes are whole bytes."""

CODES = "codes"
"""The code stream of all heads if each head has its own widths. Its number of fields is ``HEAD_RUN_COLUMNS``."""

WIDTH_SCOPES = ("shared", "heads")
"""Values of the option ``widths``: all heads share the widths, or each head has its own."""


@dataclass(frozen=True)
class Klt(CodecFamily):
    """Codec that stores coefficients in a calibrated basis, with a separate bit width for each run of columns.

    ``basis`` is the SHA-256 of the basis; ``layer`` and ``side`` select a part of it. ``widths`` contains one bit width per run of 16
    columns or, if ``fields`` names the stream ``codes``, one per run of 8 columns of each head. ``rows`` selects where the basis rows are
    stored: in their own file (``basis``), or in the stream ``rows`` as fp16 or fp32. ``source`` contains the rows once the codec has
    received its basis, and is not stored.
    """

    id: ClassVar[str] = "klt"
    supports_all_sidecars: ClassVar[bool] = False

    dim: int = field(metadata=in_range(1, MAX_DIM))
    basis: bytes
    layer: int = field(metadata=in_range(0, MAX_LAYER))
    side: str = field(metadata=one_of(SIDES))
    rows: str = field(metadata=one_of(ROW_DTYPES))
    widths: bytes
    gain: str = field(metadata=one_of(GAIN_DTYPES))
    fields: Fields
    source: BasisRows | None = field(default=None, compare=False, repr=False, metadata={"stored": False, "steers": False})

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.basis) != DIGEST_BYTES:
            raise InvalidParameter(f"codec {self.id}: basis has {len(self.basis)} bytes, expected a {DIGEST_BYTES}-byte SHA-256 digest")
        if dict(self.fields).keys() == {CODES}:
            _check_head_widths(self.widths, self.dim)
            if dict(self.fields)[CODES] != HEAD_RUN_COLUMNS:
                raise InvalidParameter(f"codec {self.id}: fields[{CODES!r}] is {dict(self.fields)[CODES]}, expected {HEAD_RUN_COLUMNS}")
        else:
            _check_shared_widths(self.widths, self.dim)
            check_fields(self.id, self.fields, tuple(f"codes_{width}" for width in used_widths(self.widths)))
        self.packings()

    @classmethod
    def create(cls, dim: int, side: str, options: Options) -> Self:
        per_head = options.choice("widths", WIDTH_SCOPES[0], WIDTH_SCOPES) == "heads"
        gain = cls.option(options, "gain", default_gain(dim, per_head), omitted=None if per_head else "fp16")
        rows = cls.option(options, "rows", "basis")
        for name in ("bits", "basis"):
            options.text(name)
        options.finish()
        cls.check_value("dim", dim)
        calibrated = options.calibrated
        if calibrated is None:
            return cls.from_widths(dim, bytes(DIGEST_BYTES), 0, side, bytes([1] * run_count(dim)), gain, rows, None)
        if calibrated.rows.dim != dim:
            raise InvalidParameter(
                f"codec {cls.id}: the head dim is {dim}, but the basis is for head dim {calibrated.rows.dim}: use a basis for this model"
            )
        place = calibrated.digest, calibrated.layer, side
        return cls.from_widths(dim, *place, calibrated.widths, gain, rows, calibrated.rows, per_head=per_head)

    @classmethod
    def from_widths(
        cls,
        dim: int,
        basis: bytes,
        layer: int,
        side: str,
        widths: bytes,
        gain: str = "fp16",
        rows: str = "basis",
        source: BasisRows | None = None,
        *,
        per_head: bool = False,
    ) -> Self:
        """Create the codec with the default number of fields for every stream.

        ``widths`` are the bits of runs of 16 columns, which all heads share. With ``per_head``, they are the bits of runs of 8 columns,
        head by head.
        """
        if per_head:
            return cls(dim, basis, layer, side, rows, widths, gain, ((CODES, HEAD_RUN_COLUMNS),), source)
        counts = columns_by_width(widths, dim)
        fields = tuple((f"codes_{width}", default_fields(len(columns), (1 << width,))) for width, columns in counts.items())
        return cls(dim, basis, layer, side, rows, widths, gain, fields, source)

    @property
    def nominal_bits(self) -> float:
        gain = 0 if self.gain == "none" else 16
        if self.fixed_heads is not None:
            return (8 * self.row_bytes / self.fixed_heads + gain) / self.dim
        bits = sum(width * len(columns) for width, columns in columns_by_width(self.widths, self.dim).items())
        return (bits + gain) / self.dim

    @property
    def fixed_heads(self) -> int | None:
        """Number of heads that ``widths`` covers, or None if all heads share the widths."""
        return len(self.widths) // head_run_count(self.dim) if self.fields == ((CODES, HEAD_RUN_COLUMNS),) else None

    @property
    def row_bytes(self) -> int:
        """Number of bytes per token for the codes of all heads, if each head has its own widths; otherwise 0."""
        return sum(count for part in self.runs for count in part.byte_counts)

    @property
    def code_bit_masks(self) -> list[int]:
        """Mask of the bits that belong to columns, for each byte of a row of all heads. Empty if all heads share the widths."""
        result = [0xFF] * self.row_bytes
        for part in self.runs:
            for places in part.byte_positions:
                result[places[-1]] = 0xFF >> -part.width * part.columns % 8
        return result

    @property
    def runs(self) -> tuple[RunsOfWidth, ...]:
        """Runs with at least one bit, grouped by width. Empty if all heads share the widths."""
        return () if self.fixed_heads is None else _runs_by_width(self.widths, self.dim)

    @property
    def bases_needed(self) -> frozenset[bytes]:
        return frozenset({self.basis} if self.rows == "basis" else ())

    @property
    def basis_location(self) -> str:
        """Name, for messages, of the part of the basis that the codec needs."""
        return f"{'keys' if self.side == 'k' else 'values'} of layer {self.layer} of the basis {self.basis.hex()}"

    @property
    def values_per_run(self) -> int:
        return row_count(self.dim) * self.dim if self.rows != "basis" else 0

    def packings(self) -> dict[str, Columns]:
        return _packings(self.widths, self.dim, self.fields) if self.fixed_heads is None else {}

    def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        result = {}
        if self.fixed_heads is not None:
            result[CODES] = Layout("U8", (batch, 1, tokens, self.row_bytes))
        if (gain := GAIN_DTYPES[self.gain]) is not None:
            result["gain"] = Layout(gain, (batch, heads, tokens))
        if (dtype := ROW_DTYPES[self.rows]) is not None:
            result["rows"] = Layout(dtype, (batch, heads, 1, row_count(self.dim), self.dim), per="run")
        return result

    def basis_rows(self, streams: Mapping[str, torch.Tensor]) -> BasisRows:
        """Return the basis rows for ``streams``, on the device of the streams.

        Raises MissingBasis if there is no basis, and InvalidParameter if the number of heads is wrong.
        """
        if "rows" in streams:
            return BasisRows(streams["rows"][:, :, 0])
        stream = next(iter(streams.values()))
        return self.source_for(self.fixed_heads or stream.shape[1]).on_device(stream.device)

    def with_basis_rows(self, streams: Mapping[str, torch.Tensor]) -> Klt:
        """Return an equivalent codec whose ``source`` contains the basis rows.

        If the rows are stored in ``streams``, ``basis`` becomes their digest. Raises MissingBasis if there is no basis, and
        InvalidParameter if the number of heads is wrong.
        """
        parts = self.basis_rows(streams)
        if "rows" not in streams:
            return self
        stored = parts.rows[:, :, : row_count(self.dim)].cpu().contiguous()
        digest = hashlib.sha256(f"{list(stored.shape)} {stored.dtype} ".encode() + stored.numpy().tobytes()).digest()
        return replace(self, rows="basis", basis=digest, source=BasisRows(stored))

    def source_for(self, heads: int) -> BasisRows:
        """Return the basis rows for ``heads`` heads.

        Raises MissingBasis if there is no basis, and InvalidParameter for a different number of heads.
        """
        if self.source is None:
            raise missing_basis_error(self.basis_location)
        try:
            return self.source.check_heads(heads)
        except InvalidParameter as error:
            raise InvalidParameter(f"{self.basis_location}: {error}") from None

    def begin(self, run: Run, previous: Mapping[str, torch.Tensor] | None) -> RunEncoder:
        batch, heads, _, _ = run.shape
        dtype = ROW_DTYPES[self.rows]
        if dtype is None:
            source = self.source_for(heads).on_device(run.device)
            return RunEncoder({}, lambda block, _: self._encode(block, source))
        if previous is not None:
            # Runs with equal rows can be joined.
            stored = previous["rows"]
        else:
            torch_dtype = torch.float16 if dtype == "F16" else torch.float32
            basis_rows = self.source_for(heads).on_device(run.device).rows[:, :, None, : row_count(self.dim)]
            stored = basis_rows.to(torch_dtype).expand(batch, heads, 1, -1, -1).contiguous()
            if not bool(stored.isfinite().all()):
                largest_value, limit = float(basis_rows.abs().max()), torch.finfo(torch_dtype).max
                raise ValueTooLarge(
                    f"{self.basis_location}: a row contains {largest_value:.6g}, which exceeds the largest {self.rows} value, "
                    f"{limit:.6g}: set rows=fp32, or omit rows= to read the rows from the basis"
                )
        rows = BasisRows(stored[:, :, 0])
        return RunEncoder({"rows": stored}, lambda block, _: self._encode(block, rows))

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        batch, heads, tokens, dim = x.shape
        run = self.begin(Run((batch, heads, tokens, dim), x.device, lambda: iter((x,))), None)
        return {**run.encode(x, 0), **run.streams}

    def _encode(self, x: torch.Tensor, rows: BasisRows) -> dict[str, torch.Tensor]:
        if self.fixed_heads is not None:
            return self._encode_heads(x, rows)
        centered = product(x, rows.inverse) - rows.mean
        codes: dict[int, list[torch.Tensor]] = {width: [] for width in used_widths(self.widths)}
        squared_length, product_sum = x.new_zeros(x.shape[:3]), x.new_zeros(x.shape[:3])
        decoded_length = x.new_zeros(x.shape[:3])
        for run, width in enumerate(self.widths):
            if width:
                columns = run_columns(run, self.dim)
                values = centered[..., columns]
                digit, decoded = _nearest_entries(values, rows.table(run, width))
                codes[width].append(digit)
                squares = rows.weights[..., columns].square()
                squared_length += (values.square() * squares).sum(-1)
                product_sum += (values * decoded * squares).sum(-1)
                decoded_length += (decoded.square() * squares).sum(-1)
        streams = self.pack_digits(*(torch.cat(digits, -1) for digits in codes.values()))
        if self.gain != "none":
            streams["gain"] = _compute_gains(squared_length, product_sum, decoded_length).to(torch.float16)
        return streams

    def _encode_heads(self, x: torch.Tensor, rows: BasisRows) -> dict[str, torch.Tensor]:
        batch, heads, tokens, _ = x.shape
        if heads != self.fixed_heads:
            raise InvalidParameter(
                f"codec {self.id}: widths is for {self.fixed_heads} heads, but the values have {heads}: use a basis for this model"
            )
        count = head_run_count(self.dim)
        spare = count * HEAD_RUN_COLUMNS - self.dim
        centered, weights = (
            functional.pad(operand, (0, spare)).view(*operand.shape[:3], count, HEAD_RUN_COLUMNS)
            for operand in (product(x, rows.inverse) - rows.mean, rows.weights.expand(-1, heads, -1, -1))
        )
        codes = torch.zeros(batch, tokens, self.row_bytes, dtype=torch.uint8, device=x.device)
        squared_length, product_sum, decoded_length = (x.new_zeros(batch, heads, tokens) for _ in range(3))
        for part in self.runs:
            head, run, places = (
                torch.tensor(operand, dtype=torch.int64, device=x.device) for operand in (part.heads, part.runs, part.byte_positions)
            )
            # [batch, run, token, column]
            values = centered[:, head, :, run].transpose(0, 1)
            digit, decoded = _nearest_entries(values, rows.head_tables(part.heads, part.runs, part.width))
            # Missing columns have zeros as codes.
            digit[..., part.columns :] = 0
            codes[:, :, places.flatten()] = _pack_codes(digit, part.width)[..., : places.shape[1]].permute(0, 2, 1, 3).flatten(2)
            squares = weights[:, head, :, run].transpose(0, 1).square()[..., : part.columns]
            values, decoded = values[..., : part.columns], decoded[..., : part.columns]
            squared_length.index_add_(1, head, (values.square() * squares).sum(-1))
            product_sum.index_add_(1, head, (values * decoded * squares).sum(-1))
            decoded_length.index_add_(1, head, (decoded.square() * squares).sum(-1))
        streams = {CODES: codes[:, None]}
        if self.gain != "none":
            streams["gain"] = _compute_gains(squared_length, product_sum, decoded_length).to(torch.float16)
        return streams

    def head_codes(self, streams: Mapping[str, torch.Tensor]) -> Iterator[tuple[RunsOfWidth, torch.Tensor]]:
        """Yield the runs of each width with their codes, int64 ``[batch, run, token, column]``. Each head must have its own widths."""
        codes = streams[CODES][:, 0]
        for part in self.runs:
            places = torch.tensor(part.byte_positions, dtype=torch.int64, device=codes.device)
            yield part, _unpack_codes(codes[:, :, places].transpose(1, 2), part.width)

    def _decode_heads(self, streams: Mapping[str, torch.Tensor], rows: BasisRows) -> torch.Tensor:
        batch, _, tokens, _ = streams[CODES].shape
        count, heads = head_run_count(self.dim), self.fixed_heads or 1
        values = torch.zeros(batch, heads, count, tokens, HEAD_RUN_COLUMNS, dtype=torch.float32, device=streams[CODES].device)
        for part, codes in self.head_codes(streams):
            table = rows.head_tables(part.heads, part.runs, part.width).expand(batch, -1, -1)
            values[:, list(part.heads), list(part.runs)] = table.gather(2, codes.flatten(2)).view(codes.shape)
        return values.transpose(2, 3).flatten(3)[..., : self.dim]

    def payload_rules(self) -> tuple[PayloadRule, ...]:
        return (self._check_code_bits,) if any(bits != 0xFF for bits in self.code_bit_masks) else ()

    def _check_code_bits(self, arrays: Mapping[str, Array], where: str) -> None:
        spare = ~numpy.array(self.code_bit_masks, numpy.uint8)
        for first, (block,) in row_blocks(arrays[CODES]):
            wrong = block & spare
            if wrong.any():
                row, place = divmod(int(wrong.reshape(-1).argmax()), self.row_bytes)
                batch, token = divmod(first + row, arrays[CODES].shape[2])
                at = [batch, 0, token, place]
                raise InvalidPayload(f"{where}.{CODES}: the byte at {at} is {block[row, place]}, expected zero bits after the last column")

    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        rows = self.basis_rows(streams)
        if self.fixed_heads is not None:
            values = self._decode_heads(streams, rows)
            return self._apply_gain(values, streams).add_(rows.mean)
        batch, heads, tokens, _ = digits[0].shape
        values = torch.zeros(batch, heads, tokens, self.dim, dtype=torch.float32, device=digits[0].device)
        remaining = dict(zip(used_widths(self.widths), digits, strict=True))
        for run, width in enumerate(self.widths):
            if width:
                columns = run_columns(run, self.dim)
                count = columns.stop - columns.start
                codes, remaining[width] = remaining[width][..., :count], remaining[width][..., count:]
                table = rows.table(run, width).expand(batch, heads, -1)
                values[..., columns] = table.gather(2, codes.flatten(2).to(torch.int64)).view(codes.shape)
        return self._apply_gain(values, streams).add_(rows.mean)

    def _apply_gain(self, values: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return values if self.gain == "none" else values.mul_(streams["gain"].to(torch.float32)[..., None])

    def coded_frame(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return product(x, self.basis_rows(streams).inverse)

    def original(self, u: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return product(u, self.basis_rows(streams).matrix)

    def query(self, q: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return product(q, self.basis_rows(streams).matrix.transpose(-1, -2))


def default_gain(dim: int, per_head: bool) -> str:
    return "none" if per_head and dim <= MAX_WITHOUT_GAIN else "fp16"


def used_widths(widths: bytes) -> list[int]:
    """Return the distinct nonzero widths of a head's runs, in ascending order. There is one code stream per width."""
    return sorted({*widths} - {0})


def columns_by_width(widths: bytes, dim: int) -> dict[int, list[int]]:
    """Return the columns of each width in ``used_widths``, in ascending order."""
    result: dict[int, list[int]] = {width: [] for width in used_widths(widths)}
    for run, width in enumerate(widths):
        if width:
            columns = run_columns(run, dim)
            result[width] += range(columns.start, columns.stop)
    return result


class RunsOfWidth(NamedTuple):
    """Runs of 8 columns with the same ``width``, for heads with their own widths.

    All runs have ``columns`` columns. ``heads`` and ``runs`` are the head and the index of each run. ``byte_positions`` are the positions
    of the run's bytes in a token's row.
    """

    width: int
    columns: int
    heads: tuple[int, ...]
    runs: tuple[int, ...]
    byte_positions: tuple[tuple[int, ...], ...]

    @property
    def byte_counts(self) -> tuple[int, ...]:
        return tuple(map(len, self.byte_positions))


@lru_cache(MAX_CACHED_TABLES)
def _runs_by_width(widths: bytes, dim: int) -> tuple[RunsOfWidth, ...]:
    """Group the runs that have codes by width, for heads with their own ``widths``. Full runs precede the partial last runs of heads."""
    result: dict[tuple[int, bool], list[tuple[int, int, tuple[int, ...]]]] = {}
    place, count = 0, head_run_count(dim)
    for number, width in enumerate(widths):
        head, run = divmod(number, count)
        columns = min(HEAD_RUN_COLUMNS, dim - HEAD_RUN_COLUMNS * run)
        size = -(-width * columns // 8)
        if width:
            result.setdefault((width, columns < HEAD_RUN_COLUMNS), []).append((head, run, tuple(range(place, place + size))))
        place += size
    return tuple(
        RunsOfWidth(width, dim % HEAD_RUN_COLUMNS if partial else HEAD_RUN_COLUMNS, *zip(*parts, strict=True))
        for (width, partial), parts in sorted(result.items())
    )


def head_run_count(dim: int) -> int:
    return -(-dim // HEAD_RUN_COLUMNS)


def _pack_codes(digits: torch.Tensor, width: int) -> torch.Tensor:
    """Pack codes ``[..., 8]`` of ``width`` bits into ``width`` bytes, first code in the lowest bits: uint8."""
    shifts = torch.arange(0, HEAD_RUN_COLUMNS * width, width, device=digits.device)
    words = (digits.to(torch.int64) << shifts).sum(-1)[..., None]
    return (words >> torch.arange(0, 8 * width, 8, device=digits.device) & 0xFF).to(torch.uint8)


def _unpack_codes(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Unpack codes that ``_pack_codes`` packed, int64 ``[..., 8]``. Missing bytes at the end count as zeros."""
    shifts = torch.arange(0, 8 * codes.shape[-1], 8, device=codes.device)
    words = (codes.to(torch.int64) << shifts).sum(-1)[..., None]
    return words >> torch.arange(0, HEAD_RUN_COLUMNS * width, width, device=codes.device) & (1 << width) - 1


def _check_head_widths(widths: bytes, dim: int) -> None:
    count = head_run_count(dim)
    if not widths or len(widths) % count:
        raise InvalidParameter(f"codec klt: widths has {len(widths)} bytes, expected a multiple of {count}, one for each run of a head")
    _check_width_values(widths)


def _check_width_values(widths: bytes) -> None:
    if max(widths) > MAX_WIDTH:
        raise InvalidParameter(f"codec klt: widths is {widths.hex()}, expected bytes from 0 to {MAX_WIDTH} (bits per column of a run)")
    if not any(widths):
        raise InvalidParameter("codec klt: widths is zero for every run, expected a nonzero width in at least one")


def _check_shared_widths(widths: bytes, dim: int) -> None:
    if len(widths) != run_count(dim):
        raise InvalidParameter(
            f"codec klt: widths has {len(widths)} bytes, expected {run_count(dim)}, one for each run of {dim} columns"
        )
    _check_width_values(widths)


def _nearest_entries(values: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the code (int32) and the value of the table entry nearest to each of ``values``, in their shape.

    ``values`` are ``[batch, head or run, token, column]``, and ``table`` is ``[batch or 1, head or run, code]``. A stable sort breaks ties
    between equal entries, so that all devices return the same codes.
    """
    batch, heads, _, _ = values.shape
    ordered, codes = table.expand(batch, heads, -1).sort(dim=-1, stable=True)
    bounds = ((ordered[..., 1:] + ordered[..., :-1]) / 2).contiguous()
    places = torch.searchsorted(bounds, values.flatten(2).contiguous())
    return codes.gather(2, places).view(values.shape).to(torch.int32), ordered.gather(2, places).view(values.shape)


def _compute_gains(squared_length: torch.Tensor, product_sum: torch.Tensor, decoded_length: torch.Tensor) -> torch.Tensor:
    """Return the gain of each token, float32 in the shape of the arguments.

    For a token x that decodes to d, ``squared_length`` is |x|^2, ``decoded_length`` is |d|^2, and ``product_sum`` is <x, d>, all weighted.
    The gain |x|^2 / <x, d> makes products with the token right on average (formats/norm_rule.py). If x and d are more than 45 degrees
    apart, the result is instead the gain with the smallest error.
    """
    near = (product_sum > 0) & (squared_length * decoded_length <= 2 * product_sum.square())
    gains = torch.where(near, squared_length / product_sum, product_sum.clamp_min(0) / decoded_length)
    return torch.where(torch.isfinite(gains), gains, 1.0).clamp_max(MAX_GAIN)


@lru_cache(MAX_CACHED_TABLES)
def _packings(widths: bytes, dim: int, fields: Fields) -> dict[str, Columns]:
    counts = dict(fields)
    return {
        name: Columns(len(columns), (1 << width,), counts[name])
        for width, columns in columns_by_width(widths, dim).items()
        if (name := f"codes_{width}")
    }
