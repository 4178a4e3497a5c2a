"""The interface of sidecars: additional data that a codec stores next to its codes (spec/side-cars.md).

Each sidecar is a frozen dataclass in its own file, of one of five kinds. Encoding applies the kinds in order:

1. ``RawTokenSidecar`` removes some tokens entirely from the values.
2. ``ValueMap`` maps the values of each head linearly, before the codec rotates them into the coded frame.
3. ``PageVector`` subtracts a vector that the tokens of a page share.
4. ``FramePart`` removes a part of the values from the coded frame; the codec encodes the rest.
5. ``ResidualSketch`` describes the codec's error.

Decoding puts the parts back in the coded frame, adds the page vectors and the sketched residuals, inverts the rotation and the maps, and
puts back the kept tokens. Sidecars of one kind apply in the order of the table ``formats.SIDECARS``; parts are put back, and maps are
inverted, in reverse order. Keys and streams in a file have the order of the table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .errors import InvalidParameter
from .raw import DTYPES
from .streams import EntryStreams, Layout
from .value_blocks import check_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from .base import Codec
    from .options import Options
    from .rotation import Rotation
    from .runs import Run
    from .value_blocks import Array


@dataclass(frozen=True)
class RunStep:
    """Step of a sidecar that transforms a run before the codec encodes it.

    ``streams`` have one row per run. ``encode(block, start)`` returns the block for the next step, and the streams with one row per token
    or entry. A block is finite float32 ``[batch, kv_head, token, dim]``. ``start`` is the index of its first token, a multiple of the token
    group.
    """

    streams: Mapping[str, torch.Tensor]
    encode: Callable[[torch.Tensor, int], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class Sidecar(EntryStreams, ABC):
    """Base class of sidecars, with parameters bound to one head dim.

    Every concrete subclass is a frozen dataclass whose first field is ``dim``. A field with ``compare=False`` and a default affects only
    the encoder and is not stored in headers.
    """

    name: ClassVar[str]
    """Key of the sidecar in the map that describes a codec in the header, after the codec's own parameters."""
    words: ClassVar[tuple[str, ...]]
    """Recipe options that request and configure the sidecar."""
    supports_every_codec: ClassVar[bool] = False
    """True if every lossy codec supports this sidecar, even codecs that support no other."""
    keys_only: ClassVar[bool] = False
    """True if a codec with this sidecar encodes keys but not values."""
    feature: ClassVar[str] = ""
    """Feature that readers of files with this sidecar must support; empty if the first readers of version 1 support it."""
    dim: int

    @classmethod
    @abstractmethod
    def from_options(cls, dim: int, side: str, options: Options) -> Self | None:
        """Return the sidecar that a recipe's ``options`` request for ``side`` ("k" or "v"), or None if they request none.

        Raises InvalidParameter for an option that is out of range or that requires another option.
        """

    @classmethod
    @abstractmethod
    def from_params(cls, dim: int, value: Any) -> Self:
        """Create the sidecar from its ``value`` in a header. Raises InvalidParameter if the type or the value is invalid."""

    @abstractmethod
    def params(self) -> Any:
        """Return the sidecar's value in the header: a string, an integer or a map. ``from_params`` is the inverse."""

    @property
    def nominal_bits(self) -> float:
        """Bits per value, as the source paper counts them."""
        return 0.0

    def layout(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        """Return the name, dtype and shape of each of the sidecar's streams, in stored order."""
        return {}

    def check(self, arrays: Mapping[str, Array], where: str) -> None:
        """Raise InvalidPayload for stored bytes that no writer produces. ``arrays`` are all streams of one layer's keys or values.

        By default, this checks that float16 and float32 values are finite.
        """
        for name in self.finite_streams():
            check_finite(f"{where}.{name}", arrays[name], "scales and norms")

    def finite_streams(self) -> list[str]:
        """Return the names of the streams with float16 or float32 values."""
        return [name for name, layout in self.layout(1, 1, 0).items() if layout.dtype in ("F16", "F32")]

    def check_runs(self, arrays: Mapping[str, Array], runs: Sequence[int], batch: int, where: str) -> None:
        """Raise InvalidPayload for errors that are visible only if the number of tokens in each run is known.

        Call it after ``check`` has passed.
        """
        return


class RawTokenSidecar(Sidecar):
    """Sidecar that stores some tokens of all heads in the original frame. The codec does not have to encode them.

    Entries are ordered by token, then by sequence. The header stores only ``dtype``, the dtype of the values.
    """

    dtype: str

    @classmethod
    def from_params(cls, dim: int, value: Any) -> Self:
        return cls(dim, parse_choice(cls.name, value, DTYPES))  # type: ignore[call-arg]

    def params(self) -> str:
        return self.dtype

    @abstractmethod
    def begin(self, run: Run, previous: Mapping[str, torch.Tensor] | None, codec: Codec) -> RunStep:
        """Return the step that stores some tokens of ``run``, and replaces them in the codec's input.

        ``previous`` contains the streams of the preceding run of the same layer's keys or values.
        """

    @abstractmethod
    def token_positions(self, streams: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token index and the sequence index of each stored token, int64 ``[entry]`` each, in stored order."""

    @abstractmethod
    def kept_values(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the values of the stored tokens, float32 ``[entry, kv_head, dim]``."""

    def put(self, x: torch.Tensor, tokens: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Put the stored ``tokens`` ``[entry, kv_head, dim]`` back into ``x`` ``[batch, kv_head, token, dim]``.

        Both must be in the same frame.
        """
        result = x.clone()
        result.permute(2, 0, 1, 3)[self.token_positions(streams)] = tokens
        return result


class ValueMap(Sidecar):
    """Sidecar that maps the values of each head linearly. Its streams, if any, have one row per run.

    Attention maps the queries instead of the keys, and the sums of values instead of the values, so the map must be linear.
    """

    def measure(self, run: Run) -> dict[str, torch.Tensor]:
        """Return the map's streams for ``run``. Preceding maps are already applied to its blocks."""
        return {}

    @abstractmethod
    def forward(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Apply the map to float32 ``[batch, kv_head, row, dim]``. The run's ``streams`` describe the map."""

    @abstractmethod
    def inverse(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Invert ``forward``."""

    def query(self, q: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Map queries by the transpose of ``inverse``, so that their products with mapped keys equal the original products.

        For an orthogonal map, this is ``forward``; other maps override it.
        """
        return self.forward(q, streams)

    def begin(self, run: Run, previous: Mapping[str, torch.Tensor] | None) -> RunStep:
        """Return the step that maps ``run``.

        ``previous`` contains the streams of the preceding run. If they contain a map, it is reused, so that the runs can be joined.
        Otherwise, a new map is measured.
        """
        names = self.layout(1, 1, 0)
        if previous is not None and all(name in previous for name in names):
            streams = {name: previous[name] for name in names}
        else:
            streams = self.measure(run)
        return RunStep(streams, lambda block, _: (self.forward(block, streams), {}))


class PageVector(Sidecar):
    """Sidecar that subtracts one vector per page from the tokens, in the coded frame.

    A page is ``page_tokens`` tokens of a run; the last page may be shorter. A page is also a token group. Raw tokens do not contribute to
    the vector: for its computation, the mean of the page's other tokens replaces them.
    """

    @property
    @abstractmethod
    def page_tokens(self) -> int:
        """Number of tokens per page."""

    @abstractmethod
    def begin(self, run: Run, rotation: Rotation) -> RunStep:
        """Return the step that subtracts the vectors from the blocks of ``run``. ``rotation`` maps the blocks to the coded frame."""

    @abstractmethod
    def without_vectors(self, x: torch.Tensor) -> torch.Tensor:
        """Subtract approximate page vectors from ``x`` ``[batch, kv_head, token, dim]``, in the original frame.

        The first token of ``x`` must begin a page.
        """

    @abstractmethod
    def vectors(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the vectors, float32 ``[batch, kv_head, page, dim]`` in the coded frame."""

    def put(self, frame: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Add the vectors to ``frame``, float32 ``[batch, kv_head, token, dim]``, which must begin with the first token of a page."""
        return frame + self._expand_to_tokens(self.vectors(streams), frame.shape[2])

    def _expand_to_tokens(self, vectors: torch.Tensor, tokens: int) -> torch.Tensor:
        return vectors.repeat_interleave(self.page_tokens, 2)[:, :, :tokens]


class FramePart(Sidecar):
    """Sidecar that stores part of the values in the coded frame, such as outliers. The codec encodes the rest."""

    @abstractmethod
    def begin(self, run: Run, previous: Mapping[str, torch.Tensor] | None) -> RunStep:
        """Return the step that stores this sidecar's part of the blocks of ``run``. The blocks are in the coded frame.

        The step returns the remaining values, and the streams that store the part. ``previous`` contains the streams of the preceding run,
        if any.
        """

    @abstractmethod
    def put(self, frame: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Put the part back into ``frame``, float32 ``[batch, kv_head, token, dim]``."""


class ResidualSketch(Sidecar):
    """Sidecar that describes the residual: the codec's input minus its decoded values."""

    @abstractmethod
    def encode(self, residual: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode ``residual``, float32 ``[batch, kv_head, token, dim]`` in the coded frame, to streams.

        The residual is 0 where another sidecar stores the values exactly.
        """

    @abstractmethod
    def put(self, frame: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Add the estimated residual to ``frame``, float32 ``[batch, kv_head, token, dim]``."""


def parse_choice(sidecar: str, value: Any, choices: Mapping[str, str]) -> str:
    """Return ``value`` if it is a key of ``choices``. Raises InvalidParameter otherwise."""
    if type(value) is not str or value not in choices:
        raise InvalidParameter(f"sidecar {sidecar} is {value!r}, expected one of {', '.join(choices)}")
    return value


def parse_map(sidecar: str, value: Any, types: dict[str, type]) -> dict[str, Any]:
    """Return ``value`` if it is a map with the keys of ``types``, in the same order, and values of these types.

    Raises InvalidParameter otherwise.
    """
    if type(value) is not dict or tuple(value) != tuple(types) or any(type(value[key]) is not kind for key, kind in types.items()):
        expected = ", ".join(f"{key}: {kind.__name__}" for key, kind in types.items())
        raise InvalidParameter(f"sidecar {sidecar} is {value!r}, expected a map {{{expected}}}")
    return value
