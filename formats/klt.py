"""klt: columns of a calibrated basis, each at a width of its own, one gain per token (spec/codecs/klt.md).

The basis is the Karhunen-Loeve transform of a model's keys or values of one layer, weighted by what their errors cost the model
(formats/basis.py). Source: transform coding with fixed rates, Gersho and Gray 1992, ch. 8; weights as in Fisher-weighted SVD,
Hsu et al. 2022 (arXiv 2207.00112).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Self

from .base import MAX_DIM, NORMS, Fields, Layout, Run, RunEncoder, check_choice, check_fields, check_range
from .basis import DIGEST_BYTES, MAX_WIDTH, BasisRows, not_given, rows_of, run_slice, runs_of
from .columns import Columns, default_fields
from .errors import InvalidParameter, InvalidShape
from .family import CodecFamily
from .lazy import torch
from .products import product
from .tables import TABLES_KEPT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .options import Options

SIDES = ("k", "v")
GAINS = {"none": None, "fp16": "F16"}
"""Stored dtypes of the gains of tokens, by parameter value."""
ROWS = {"basis": None, **NORMS}
"""Stored dtypes of the rows of the basis, by parameter value; they are not stored for ``basis``."""

MOST_WITHOUT_GAIN = 64
"""The largest head dim at which tokens have no gain unless a recipe asks for one: the bits of one are worth more in columns there."""

MAX_LAYER = 4095
LARGEST_GAIN = 65504.0


@dataclass(frozen=True)
class Klt(CodecFamily):
    """``widths`` has the bits of each run of 16 columns of the basis with SHA-256 ``basis``, for ``side`` of ``layer``.

    ``rows`` says where the rows of the basis are: in its own file (``basis``), or in the stream ``rows`` as fp16 or fp32.
    ``source`` holds them for a codec that has been given its basis; it is not stored.
    """

    id: ClassVar[str] = "klt"
    takes_side_cars: ClassVar[bool] = False

    dim: int
    basis: bytes
    layer: int
    side: str
    rows: str
    widths: bytes
    gain: str
    fields: Fields
    source: BasisRows | None = field(default=None, compare=False, repr=False, metadata={"stored": False, "steers": False})

    def __post_init__(self) -> None:
        check_range(self.id, "dim", self.dim, 1, MAX_DIM)
        if len(self.basis) != DIGEST_BYTES:
            raise InvalidParameter(f"codec {self.id}: basis has {len(self.basis)} bytes, a SHA-256 has {DIGEST_BYTES}")
        check_range(self.id, "layer", self.layer, 0, MAX_LAYER)
        check_choice(self.id, "side", self.side, SIDES)
        check_choice(self.id, "rows", self.rows, tuple(ROWS))
        _check_widths(self.widths, self.dim)
        check_choice(self.id, "gain", self.gain, tuple(GAINS))
        check_fields(self.id, self.fields, tuple(f"codes_{width}" for width in used_widths(self.widths)))
        self.packings()

    @classmethod
    def create(cls, dim: int, side: str, options: Options) -> Self:
        gain, rows = options.choice("gain", default_gain(dim), tuple(GAINS), omitted=None), options.choice("rows", "basis", tuple(ROWS))
        for name in ("bits", "basis"):
            options.text(name)
        options.finish()
        check_range(cls.id, "dim", dim, 1, MAX_DIM)
        found = options.calibrated
        if found is None:
            return cls.of(dim, bytes(DIGEST_BYTES), 0, side, bytes([1] * runs_of(dim)), gain, rows, None)
        if found.rows.dim != dim:
            raise InvalidParameter(f"codec {cls.id}: the head dim is {dim}, and that of the basis {found.rows.dim}")
        return cls.of(dim, found.digest, found.layer, side, found.widths, gain, rows, found.rows)

    @classmethod
    def of(
        cls,
        dim: int,
        basis: bytes,
        layer: int,
        side: str,
        widths: bytes,
        gain: str = "fp16",
        rows: str = "basis",
        source: BasisRows | None = None,
    ) -> Self:
        """The codec with the default F of every stream."""
        counts = columns_of(widths, dim)
        fields = tuple((f"codes_{width}", default_fields(len(columns), (1 << width,))) for width, columns in counts.items())
        return cls(dim, basis, layer, side, rows, widths, gain, fields, source)

    @property
    def nominal_bits(self) -> float:
        bits = sum(width * len(columns) for width, columns in columns_of(self.widths, self.dim).items())
        return (bits + (0 if self.gain == "none" else 16)) / self.dim

    @property
    def place(self) -> str:
        """The part of the basis that the codec needs, in words."""
        return f"{'keys' if self.side == 'k' else 'values'} of layer {self.layer} of the basis {self.basis.hex()}"

    @property
    def run_values(self) -> int:
        return rows_of(self.dim) * self.dim if self.rows != "basis" else 0

    def packings(self) -> dict[str, Columns]:
        return _packings(self.widths, self.dim, self.fields)

    def scales(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        found = {}
        if (gain := GAINS[self.gain]) is not None:
            found["gain"] = Layout(gain, (batch, heads, tokens))
        if (dtype := ROWS[self.rows]) is not None:
            found["rows"] = Layout(dtype, (batch, heads, 1, rows_of(self.dim), self.dim), per="run")
        return found

    def parts(self, streams: Mapping[str, torch.Tensor]) -> BasisRows:
        """The rows of the basis for ``streams``, on their device. Raises MissingBasis, and InvalidShape for another number of heads."""
        if "rows" in streams:
            return BasisRows(streams["rows"][:, :, 0])
        some = next(iter(streams.values()))
        return self.source_for(some.shape[1]).on(some.device)

    def given(self, streams: Mapping[str, torch.Tensor]) -> Klt:
        """The same codec with its rows as ``source``, named by their own digest where they are in ``streams`` and not in the basis.

        Raises MissingBasis, and InvalidShape for another number of heads.
        """
        parts = self.parts(streams)
        if "rows" not in streams:
            return self
        stored = parts.rows[:, :, : rows_of(self.dim)].cpu().contiguous()
        digest = hashlib.sha256(f"{list(stored.shape)} {stored.dtype} ".encode() + stored.numpy().tobytes()).digest()
        return replace(self, rows="basis", basis=digest, source=BasisRows(stored))

    def source_for(self, heads: int) -> BasisRows:
        """The rows that the codec was given. Raises MissingBasis, and InvalidShape for another number of heads."""
        if self.source is None:
            raise not_given(self.place)
        try:
            return self.source.of_heads(heads)
        except InvalidShape as error:
            raise InvalidShape(f"the {self.place}: {error}") from None

    def begin(self, run: Run, before: Mapping[str, torch.Tensor] | None) -> RunEncoder:
        batch, heads, _, _ = run.shape
        dtype = ROWS[self.rows]
        if dtype is None:
            source = self.source_for(heads).on(run.device)
            return RunEncoder({}, lambda block, _: self._encode(block, source))
        if before is not None:
            # Runs of equal rows can be joined.
            stored = before["rows"]
        else:
            wanted = torch.float16 if dtype == "F16" else torch.float32
            given = self.source_for(heads).on(run.device).rows[:, :, None, : rows_of(self.dim)]
            stored = given.to(wanted).expand(batch, heads, 1, -1, -1).contiguous()
        rows = BasisRows(stored[:, :, 0])
        return RunEncoder({"rows": stored}, lambda block, _: self._encode(block, rows))

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        batch, heads, tokens, dim = x.shape
        run = self.begin(Run((batch, heads, tokens, dim), x.device, lambda: iter((x,))), None)
        return {**run.encode(x, 0), **run.streams}

    def _encode(self, x: torch.Tensor, rows: BasisRows) -> dict[str, torch.Tensor]:
        centred = product(x, rows.inverse) - rows.mean
        codes: dict[int, list[torch.Tensor]] = {width: [] for width in used_widths(self.widths)}
        own, found = x.new_zeros(x.shape[:3]), x.new_zeros(x.shape[:3])
        length = x.new_zeros(x.shape[:3])
        for run, width in enumerate(self.widths):
            if width:
                columns = run_slice(run, self.dim)
                values = centred[..., columns]
                digit, decoded = _nearest(values, rows.table(run, width))
                codes[width].append(digit)
                squares = rows.weights[..., columns].square()
                own += (values.square() * squares).sum(-1)
                found += (values * decoded * squares).sum(-1)
                length += (decoded.square() * squares).sum(-1)
        streams = self.pack_digits(*(torch.cat(digits, -1) for digits in codes.values()))
        if self.gain != "none":
            streams["gain"] = _gains(own, found, length).to(torch.float16)
        return streams

    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        rows = self.parts(streams)
        batch, heads, tokens, _ = digits[0].shape
        values = torch.zeros(batch, heads, tokens, self.dim, dtype=torch.float32, device=digits[0].device)
        rest = dict(zip(used_widths(self.widths), digits, strict=True))
        for run, width in enumerate(self.widths):
            if width:
                columns = run_slice(run, self.dim)
                count = columns.stop - columns.start
                codes, rest[width] = rest[width][..., :count], rest[width][..., count:]
                table = rows.table(run, width).expand(batch, heads, -1)
                values[..., columns] = table.gather(2, codes.flatten(2).to(torch.int64)).view(codes.shape)
        if self.gain != "none":
            values *= streams["gain"].to(torch.float32)[..., None]
        return values.add_(rows.mean)

    def original(self, u: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return product(u, self.parts(streams).matrix)

    def query(self, q: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return product(q, self.parts(streams).matrix.transpose(-1, -2))


def default_gain(dim: int) -> str:
    """The gain of a recipe that names none, at head dim ``dim``."""
    return "none" if dim <= MOST_WITHOUT_GAIN else "fp16"


def used_widths(widths: bytes) -> list[int]:
    """The widths of a head's runs, ascending, without 0: there is a code stream for each."""
    return sorted({*widths} - {0})


def columns_of(widths: bytes, dim: int) -> dict[int, list[int]]:
    """The columns of each of ``used_widths``, ascending."""
    found: dict[int, list[int]] = {width: [] for width in used_widths(widths)}
    for run, width in enumerate(widths):
        if width:
            columns = run_slice(run, dim)
            found[width] += range(columns.start, columns.stop)
    return found


def _check_widths(widths: bytes, dim: int) -> None:
    if len(widths) != runs_of(dim):
        raise InvalidParameter(f"codec klt: widths has {len(widths)} bytes, {dim} channels have {runs_of(dim)} runs of columns")
    if max(widths) > MAX_WIDTH:
        raise InvalidParameter(f"codec klt: widths is {widths.hex()}, expected 0 to {MAX_WIDTH} bits in every byte")
    if not any(widths):
        raise InvalidParameter("codec klt: widths is zero for every run, expected at least one run with a width")


def _nearest(values: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes, int32, of the entries of ``table`` ``[batch or 1, kv_head, code]`` nearest to ``values``, and these entries.

    Of equal entries one device would otherwise take another than the next.
    """
    batch, heads, _, _ = values.shape
    ordered, codes = table.expand(batch, heads, -1).sort(dim=-1, stable=True)
    bounds = ((ordered[..., 1:] + ordered[..., :-1]) / 2).contiguous()
    places = torch.searchsorted(bounds, values.flatten(2).contiguous())
    return codes.gather(2, places).view(values.shape).to(torch.int32), ordered.gather(2, places).view(values.shape)


def _gains(own: torch.Tensor, common: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """The factors of tokens: ``own`` is their weighted squared length, ``common`` that with the ``decoded`` token, all float32.

    |x|^2 / <x, d> makes products with the token right on average (formats/norm_rule.py). Where x and d are more than 45 degrees
    apart, that is not so, and the factor of least error is stored.
    """
    near = (common > 0) & (own * decoded <= 2 * common.square())
    found = torch.where(near, own / common, common.clamp_min(0) / decoded)
    return torch.where(torch.isfinite(found), found, 1.0).clamp_max(LARGEST_GAIN)


@lru_cache(TABLES_KEPT)
def _packings(widths: bytes, dim: int, fields: Fields) -> dict[str, Columns]:
    counts = dict(fields)
    return {
        name: Columns(len(columns), (1 << width,), counts[name])
        for width, columns in columns_of(widths, dim).items()
        if (name := f"codes_{width}")
    }
