"""The interface of every side-car: its parameters, its streams, and its place in the coding order (spec/side-cars.md).

A side-car file contains one frozen dataclass of one of five kinds. A run is encoded in this order of kinds:

1. ``KeptTokens`` take whole tokens out of the values.
2. ``ValueMap`` maps the values of each head linearly, before the codec rotates them into the coded frame.
3. ``PageVector`` subtracts a vector that the tokens of a page share.
4. ``FramePart`` takes a part of the values out of the coded frame; the codec encodes the rest.
5. ``ResidualSketch`` describes the codec's error.

Decoding puts the parts back in the coded frame, adds the page vectors and the sketched residuals, inverts the rotation and the maps, and
puts back the kept tokens. Side-cars of one kind apply in the order of the table ``formats.SIDE_CARS`` (parts are put back and maps
inverted in reverse order). Their keys and streams in a file have the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .errors import InvalidParameter
from .value_blocks import check_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from .base import Codec, Layout, Run
    from .options import Options
    from .rotation import Rotation
    from .value_blocks import Array


@dataclass(frozen=True)
class RunStep:
    """A side-car's step before the codec for one run: ``streams`` have one row per run, and ``encode(block, start)`` is called per block.

    A block is finite float32 ``[batch, kv_head, token, dim]``. Its first token ``start`` is a multiple of the token group. ``encode``
    returns the block for the next step, and the streams with one row per token or entry.
    """

    streams: Mapping[str, torch.Tensor]
    encode: Callable[[torch.Tensor, int], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class SideCar(ABC):
    """A side-car with its parameters bound to one head dim.

    Every subclass of a kind is a frozen dataclass whose first field is ``dim``. A field with ``compare=False`` and a default steers
    the encoder only: no header contains it.
    """

    name: ClassVar[str]
    """Its key in a codec's map in the header, after the codec's own parameters."""
    words: ClassVar[tuple[str, ...]]
    """The options of a recipe that request and configure it."""
    supports_every_codec: ClassVar[bool] = False
    """True if lossy codecs without support for other side-cars support this one."""
    keys_only: ClassVar[bool] = False
    """True if codecs with it code only keys."""
    feature: ClassVar[str] = ""
    """The required feature that stands for it, if the first readers of version 1 do not know it."""
    dim: int

    @classmethod
    @abstractmethod
    def from_options(cls, dim: int, side: str, options: Options) -> Self | None:
        """Return the side-car that a recipe's ``options`` request for this ``side`` ("k" or "v"), or None.

        Raises InvalidParameter for an option that is out of range or that needs another option.
        """

    @classmethod
    @abstractmethod
    def from_params(cls, dim: int, value: Any) -> Self:
        """Create the side-car from its ``value`` in a header. Raises InvalidParameter for an invalid type or value."""

    @abstractmethod
    def params(self) -> Any:
        """Return the side-car's value in the header, a string, an integer or a map; ``from_params`` inverts it."""

    @property
    def nominal_bits(self) -> float:
        """Bits per value, as the source paper counts them."""
        return 0.0

    @property
    def bases_needed(self) -> frozenset[bytes]:
        """SHA-256 of each basis that readers need to decode the values."""
        return frozenset()

    def layout(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        """Return the name, dtype and shape of the side-car's streams, in stored order."""
        return {}

    def entries(self, streams: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the number of rows per token and sequence in every stream with one row per entry, integers ``[token, batch]``."""
        return {}

    def usual_entry_counts(self, batch: int, heads: int, tokens: int) -> dict[str, int]:
        """Return the number of rows of every stream with one row per entry, in a run of ``tokens`` ordinary tokens."""
        return {}

    def check(self, arrays: Mapping[str, Array], where: str) -> None:
        """Refuse stored bytes that no writer may produce; ``arrays`` are all streams of the side. Raises InvalidPayload.

        The default checks that binary16 and float32 values are finite.
        """
        for name in self.layout(1, 1, 0):
            if arrays[name].dtype.kind == "f":
                check_finite(f"{where}.{name}", arrays[name], "scales and norms")

    def check_runs(self, arrays: Mapping[str, Array], runs: Sequence[int], batch: int, where: str) -> None:
        """Raise InvalidPayload for errors visible only in the tokens of each run, in streams that passed ``check``."""
        return

    def entry_tokens(self, streams: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return, for streams whose entries name their tokens, the token of each entry in use, int64, ascending."""
        return {}

    def shift_tokens(self, streams: Mapping[str, torch.Tensor], tokens: int) -> dict[str, torch.Tensor]:
        """Return the streams with token numbers increased by ``tokens``; unused entries are dropped."""
        return {}

    def select_sequences(self, streams: Mapping[str, torch.Tensor], indices: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the streams of the sequences ``indices``, int64 ``[row]``."""
        return {}


class KeptTokens(SideCar):
    """Takes whole tokens, in all heads, out of the values, and keeps them in the original frame.

    Entries are ordered by token, then by sequence.
    """

    @abstractmethod
    def begin(self, run: Run, before: Mapping[str, torch.Tensor] | None, codec: Codec) -> RunStep:
        """Choose the tokens of ``run`` to keep; ``before`` contains the streams of the side's preceding run.

        The step replaces the tokens by values that widen none of the token groups that ``codec`` encodes together.
        """

    @abstractmethod
    def token_positions(self, streams: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token and the sequence of each kept token, int64 ``[entry]`` each, in the order of the entries."""

    @abstractmethod
    def kept_values(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the values of the kept tokens, float32 ``[entry, kv_head, dim]``."""

    def put(self, x: torch.Tensor, kept: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Put ``kept`` tokens, ``[entry, kv_head, dim]`` in the frame of ``x``, back into ``x`` ``[batch, kv_head, token, dim]``."""
        result = x.clone()
        result.permute(2, 0, 1, 3)[self.token_positions(streams)] = kept
        return result


class ValueMap(SideCar):
    """Maps the values of each head linearly; its streams, if any, have one row per run.

    Attention maps queries instead of keys, and sums of values instead of values: it relies on the map being linear.
    """

    def measure(self, run: Run) -> dict[str, torch.Tensor]:
        """Return the map's streams for ``run``, whose blocks have passed the maps before it."""
        return {}

    @abstractmethod
    def forward(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Map ``[batch, kv_head, row, dim]`` float32, given the run's ``streams``."""

    @abstractmethod
    def inverse(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Undo ``forward``."""

    def query(self, q: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Apply the transpose of ``inverse`` to queries: products with mapped keys equal those of ``q`` with the original keys.

        For an orthogonal map it is ``forward``; any other map defines its own.
        """
        return self.forward(q, streams)

    def begin(self, run: Run, before: Mapping[str, torch.Tensor] | None) -> RunStep:
        """Reuse the streams of the run ``before``, so that the two can be joined, or else measure ``run``."""
        names = self.layout(1, 1, 0)
        if before is not None and all(name in before for name in names):
            streams = {name: before[name] for name in names}
        else:
            streams = self.measure(run)
        return RunStep(streams, lambda block, _: (self.forward(block, streams), {}))


class PageVector(SideCar):
    """Subtracts one vector per page from the tokens, in the coded frame. A page is ``page_tokens`` tokens of a run; the last may be
    shorter.

    A page is a token group: kept tokens are replaced by the mean of the others, so that the vector does not depend on them.
    """

    @property
    @abstractmethod
    def page_tokens(self) -> int:
        """Tokens per page."""

    @abstractmethod
    def begin(self, run: Run, rotation: Rotation) -> RunStep:
        """Subtract the vectors from the blocks of ``run``; ``rotation`` maps them to the coded frame."""

    @abstractmethod
    def without_vectors(self, x: torch.Tensor) -> torch.Tensor:
        """Return approximately what remains of ``x`` ``[batch, kv_head, token, dim]`` without its vectors, in the original frame.

        The first token of ``x`` must begin a page.
        """

    @abstractmethod
    def vectors(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the vectors, float32 ``[batch, kv_head, page, dim]`` in the coded frame."""

    def put(self, frame: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Add the vectors to ``frame`` ``[batch, kv_head, token, dim]`` float32, whose first token begins a page."""
        return frame + self._expand_to_tokens(self.vectors(streams), frame.shape[2])

    def _expand_to_tokens(self, vectors: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the vector of each token."""
        return vectors.repeat_interleave(self.page_tokens, 2)[:, :, :tokens]


class FramePart(SideCar):
    """Takes a part of the values out of the coded frame; the codec encodes the rest."""

    @abstractmethod
    def begin(self, run: Run, before: Mapping[str, torch.Tensor] | None) -> RunStep:
        """Measure ``run``, whose blocks are in the coded frame; ``before`` contains the streams of the side's preceding run.

        The step returns the rest, and the streams that contain the part.
        """

    @abstractmethod
    def put(self, frame: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Put the part back into ``frame`` ``[batch, kv_head, token, dim]`` float32."""


class ResidualSketch(SideCar):
    """Describes the residual: the codec's input minus its decoded values."""

    @abstractmethod
    def encode(self, residual: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode a ``residual`` ``[batch, kv_head, token, dim]`` float32 in the coded frame; it is 0 where a part is put back exactly."""

    @abstractmethod
    def put(self, frame: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Add the estimated residual to ``frame`` ``[batch, kv_head, token, dim]`` float32."""


def parse_choice(side_car: str, value: Any, known: Mapping[str, str]) -> str:
    """Return ``value`` if it is one of the strings ``known``. Raises InvalidParameter otherwise."""
    if type(value) is not str or value not in known:
        raise InvalidParameter(f"side-car {side_car} is {value!r}, expected one of {', '.join(known)}")
    return value


def parse_map(side_car: str, value: Any, types: dict[str, type]) -> dict[str, Any]:
    """Return ``value`` if it is a map with the keys of ``types`` in order, each of its type. Raises InvalidParameter otherwise."""
    if type(value) is not dict or tuple(value) != tuple(types) or any(type(value[key]) is not kind for key, kind in types.items()):
        expected = ", ".join(f"{key}: {kind.__name__}" for key, kind in types.items())
        raise InvalidParameter(f"side-car {side_car} is {value!r}, expected a map {{{expected}}}")
    return value
