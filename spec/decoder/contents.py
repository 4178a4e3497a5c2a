"""The contents of a file: tensors, the keys and values of layers, and the file as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .codec import RAW_DTYPES, Codec, NumberStream
from .conventions import DTYPE_BYTES, ceil_div
from .metadata import take_metadata
from .packing import Columns
from .token_ids import take_inputs, take_token_ids


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    filter: str = "none"
    stored_bytes: int = 0
    digest: bytes = b""

    @property
    def bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass
class Side:
    """The keys or the values of one layer, with everything that ``read`` decodes from its tensors.

    ``digits`` contains the rows of every code stream, ``numbers`` those of every other stream. ``values`` are the decoded values of
    ``shape`` in C order, in the original frame. ``tolerances`` are the largest deviations that another reader may have from each of them.
    """

    codec: Codec
    batch: int
    heads: int
    runs: list[int]
    tail: int
    tail_dtype: str
    window: int
    entries: Mapping[str, int] = field(default_factory=dict)
    digits: dict[str, list[list[list[int]]]] = field(default_factory=dict)
    numbers: dict[str, list[float]] = field(default_factory=dict)
    values: list[float] = field(default_factory=list)
    tolerances: list[float] = field(default_factory=list)
    basis_parts: list[dict[str, list[float]]] = field(default_factory=list)
    """The part of the basis that each head needs, for a codec or sidecar with a basis."""

    @property
    def packed(self) -> int:
        return sum(self.runs)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.packed + self.tail, self.codec.dim

    def rows(self, stream: NumberStream) -> int:
        """Return the number of rows of ``stream`` (container.md, Runs and tail).

        A stream with one row per g tokens starts a new row at each run.
        """
        if stream.per == "entry":
            return self.entries[stream.name]
        return len(self.runs) if stream.per == "run" else sum(ceil_div(run, stream.tokens) for run in self.runs)

    def sizes(self, stream: NumberStream) -> tuple[int, ...]:
        """Return the shape of a row of ``stream``. An entry of raw tokens covers all heads."""
        return (self.heads, self.codec.dim) if stream.name in ("raw_tokens", "raw_values") else stream.sizes

    def tensors(self, prefix: str) -> list[Tensor]:
        """Return the tensors that container.md and the codec's page require, in order, without the fields that only the header contains."""
        result = []
        for name, stream in self.codec.streams.items():
            if isinstance(stream, Columns):
                for plane, width in enumerate(stream.plane_words):
                    result.append(Tensor(f"{prefix}{name}.{plane}", "U16", (self.batch, self.heads, self.packed, width)))
            else:
                batch, heads = (1, 1) if stream.per == "entry" else (self.batch, self.heads if stream.per_head else 1)
                result.append(Tensor(prefix + name, stream.dtype, (batch, heads, self.rows(stream), *self.sizes(stream))))
        if self.tail:
            result.append(Tensor(f"{prefix}tail", RAW_DTYPES[self.tail_dtype], (self.batch, self.heads, self.tail, self.codec.dim)))
        return result


@dataclass
class File:
    """A decoded file."""

    required: list[str]
    ignorable: dict[str, bytes]
    model: dict[str, str]
    recipe: str
    start: int
    starts: list[int]
    codecs: list[Codec]
    layers: list[dict[str, Side | None]]
    tensors: list[Tensor]
    states: dict[str, bytes] = field(default_factory=dict)
    """Bytes of every layer state, by the name of its tensor."""
    hidden: list[tuple[int, int, int]] = field(default_factory=list)
    """Sequence, first position and end of every range of hidden tokens."""
    offsets: list[int] | None = None
    """Position offset of every sequence."""

    @property
    def metadata(self) -> dict[str, str | int | float]:
        return take_metadata(self.ignorable.get("metadata", b""))

    @property
    def token_ids(self) -> list[list[int]]:
        """Known ids of the first tokens of each sequence."""
        sides = [(start, side) for start, layer in zip(self.starts, self.layers, strict=True) for side in layer.values() if side]
        states = [tensor.shape[0] for tensor in self.tensors if tensor.name.split(".")[1] == "state"]
        tokens = max((start + side.shape[2] for start, side in sides), default=self.start) - self.start
        return take_token_ids(self.ignorable, min([*states, *(side.batch for _, side in sides)], default=0), tokens)

    @property
    def undetermined(self) -> list[tuple[int, str]] | None:
        """Inputs that token ids do not determine, each with the position of its first token. None if ``inputs`` does not have the format of
        the page.
        """
        inputs = take_inputs(self.ignorable.get("inputs", b""))
        return inputs and inputs[1]
