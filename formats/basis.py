"""Rows of a basis, which define the calibrated frame of a layer's keys or values (spec/basis.md).

The rows of a head are the mean in the coded frame, the matrix from the coded to the original frame, the weights of the columns, and the
tables of every run of columns at every width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from .errors import InvalidParameter, MissingBasis
from .frames import Frames
from .inverses import check_decoded_range, invert_for_encoding
from .lazy import torch

RUN_COLUMNS = 16
"""Number of columns of the coded frame that share tables. In the klt layout with shared widths, they also share a width."""

MAX_WIDTH = 8
"""Maximum number of bits per column."""

TABLE_VALUES = (2 << MAX_WIDTH) - 2
"""Number of values in the tables of one run: 2 for one bit, then 4 for two bits, and so on."""

MEAN_UNIT = 256.0
"""Factor by which stored means are multiplied. A column that hardly varies may have a mean many times its spread."""

DIGEST_BYTES = 32
"""Number of bytes of the SHA-256 that identifies a basis file."""

MAX_LAYER = 4095
"""Largest layer index of a basis."""


def missing_basis_error(location: str) -> MissingBasis:
    """Create the error for a codec without its basis. ``location`` describes the part of the basis that the codec needs."""
    return MissingBasis(f"the {location} are needed, but no basis was passed: pass basis= when loading or converting the cache")


MAX_GAIN = 65504.0
"""Maximum gain of a token: the largest finite float16."""


def run_count(dim: int) -> int:
    """Return the number of runs of columns in a head. The last run may be partial."""
    return -(-dim // RUN_COLUMNS)


def row_count(dim: int) -> int:
    """Return the number of basis rows, of ``dim`` values each, that one head needs."""
    return 2 + dim + -(-TABLE_VALUES * run_count(dim) // dim)


def run_columns(run: int, dim: int) -> slice:
    """Return the columns of a run as a slice."""
    return slice(RUN_COLUMNS * run, min(RUN_COLUMNS * (run + 1), dim))


class BasisRows:
    """Basis rows for one layer's keys or values, float32 ``[batch or 1, kv_head, row, dim]``.

    Raises InvalidParameter for fewer than ``row_count(dim)`` rows.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        if rows.dim() != 4 or rows.shape[2] < row_count(rows.shape[3]):
            raise InvalidParameter(
                f"basis rows have shape {list(rows.shape)}, expected [batch, kv_head, row, dim] with at least "
                f"{row_count(rows.shape[-1])} rows"
            )
        self.rows = rows
        self._device_copies: dict[str, BasisRows] = {}

    @property
    def heads(self) -> int:
        return self.rows.shape[1]

    @property
    def dim(self) -> int:
        return self.rows.shape[3]

    def check_heads(self, heads: int) -> BasisRows:
        """Raise InvalidParameter unless there are rows for exactly ``heads`` heads. Returns self."""
        if self.heads != heads:
            raise InvalidParameter(f"the basis is for {self.heads} heads, but the values have {heads}: use a basis for this model")
        return self

    @cached_property
    def mean(self) -> torch.Tensor:
        """Mean in the coded frame, float32 ``[batch, kv_head, 1, column]``."""
        return self.rows[:, :, :1].to(torch.float32) * MEAN_UNIT

    @cached_property
    def matrix(self) -> torch.Tensor:
        """Columns of the coded frame as vectors in the original frame, float32 ``[batch, kv_head, column, channel]``."""
        return self.rows[:, :, 1 : 1 + self.dim].to(torch.float32)

    @cached_property
    def weights(self) -> torch.Tensor:
        """Cost of an error in each column, float32 ``[batch, kv_head, 1, column]``. The unit is the same for all columns of a basis."""
        return self.rows[:, :, 1 + self.dim, None].to(torch.float32)

    @cached_property
    def _run_tables(self) -> torch.Tensor:
        runs = run_count(self.dim)
        values = self.rows[:, :, 2 + self.dim :].to(torch.float32).flatten(2)
        return values[..., : TABLE_VALUES * runs].reshape(*values.shape[:2], runs, TABLE_VALUES)

    def table(self, run: int, width: int) -> torch.Tensor:
        """Return the decoded value of each code of ``width`` bits in a run, float32 ``[batch, kv_head, code]``."""
        return self._run_tables[:, :, run, (1 << width) - 2 : (2 << width) - 2]

    def head_tables(self, heads: Sequence[int], runs: Sequence[int], width: int) -> torch.Tensor:
        """Return the decoded value of each code of ``width`` bits, for runs of 8 columns: float32 ``[batch, run, code]``.

        A run is given by its head in ``heads`` and its index in ``runs``. Two runs of 8 columns share the tables of one run of
        ``RUN_COLUMNS``.
        """
        result = self._run_tables[:, list(heads), [run // 2 for run in runs]]
        return result[..., (1 << width) - 2 : (2 << width) - 2]

    @cached_property
    def inverse(self) -> torch.Tensor:
        """Inverse of ``matrix``, float32 ``[batch, kv_head, channel, column]``, for encoders.

        Raises ValueTooLarge if a token could decode to infinity, or if the inverse is not accurate.
        """
        largest = self._run_tables.abs().amax(-1).repeat_interleave(RUN_COLUMNS, -1)[..., : self.dim]
        check_decoded_range(MAX_GAIN * largest.to(torch.float64) + self.mean[:, :, 0].abs(), self.matrix, None, "the rows of the basis")
        return invert_for_encoding(self.matrix, "a matrix of the basis").to(self.rows.device)

    def on_device(self, device: torch.device) -> BasisRows:
        """Return a cached copy of the rows on ``device``."""
        if self.rows.device == device:
            return self
        key = str(device)
        if key not in self._device_copies:
            self._device_copies[key] = BasisRows(self.rows.to(device))
        return self._device_copies[key]


class CalibratedRows(NamedTuple):
    """Calibration data for one layer's keys or values: basis ``rows``, the SHA-256 of the basis, and parameters chosen for a bit budget.

    The parameters are the ``widths`` of the runs, for the klt codec, and ``frames`` and ``step``, for the transform codec.
    """

    rows: BasisRows
    digest: bytes
    layer: int
    widths: bytes = b""
    frames: Frames | None = None
    step: int = 0


def flatten_tables(tables: Sequence[Sequence[torch.Tensor]], dim: int) -> torch.Tensor:
    """Return the tables of a head as basis rows ``[row, dim]``: for each run, its tables of 1 to ``MAX_WIDTH`` bits."""
    values = torch.cat([table for run in tables for table in run])
    rows = row_count(dim) - 2 - dim
    padded = torch.zeros(rows * dim, dtype=values.dtype, device=values.device)
    padded[: len(values)] = values
    return padded.view(rows, dim)
