"""What any lossy codec can be given besides its own streams (spec/side-cars.md).

``WithSideCars`` is a codec and the side-cars of one side. Values go through them in this order: raw tokens are taken out,
channels are scaled, put in another order and rotated in blocks, the codec's rotation leads to the coded frame, outliers are
taken out, the codec encodes the rest, and qjl describes what that loses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .base import Codec, Run, RunEncoder
from .batch import rows_of
from .channel_order import STREAM as CHANNEL_ORDER
from .channel_order import ChannelOrder, reordered, restored
from .channel_scale import STREAM as CHANNEL_SCALE
from .channel_scale import ChannelScale, factors
from .columns import Columns
from .errors import InvalidParameter, OutOfRange
from .lazy import torch
from .outliers import CHUNK, Outliers
from .outliers import VALUES as OUTLIERS
from .qjl import Qjl
from .raw_tokens import FLAGS as RAW_FLAGS
from .raw_tokens import VALUES as RAW_TOKENS
from .raw_tokens import RawTokens
from .rotation import BlockRotation
from .side_car_options import side_cars_of_params, side_cars_of_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .base import Layout, Unpacker
    from .options import Options
    from .rotation import Rotation
    from .value_blocks import Array

SIDE_CARS = ("channel_scale", "channel_order", "block_rotation", "outliers", "qjl", "raw_tokens")
"""Their names in a codec's map in the header, after the codec's own parameters and in this order."""

_LARGE = 2.0**100
"""Below this no step of a side-car makes an infinite value of what a codec decodes to."""


@dataclass(frozen=True)
class WithSideCars(Codec):
    """``codec`` with at least one side-car. Raises InvalidParameter when the codec is raw: it has nothing to add to."""

    id: ClassVar[str] = ""

    dim: int = field(init=False)
    codec: Codec
    channel_scale: ChannelScale | None = None
    channel_order: ChannelOrder | None = None
    block_rotation: BlockRotation | None = None
    outliers: Outliers | None = None
    qjl: Qjl | None = None
    raw_tokens: RawTokens | None = None

    def __post_init__(self) -> None:
        names = [name for name in SIDE_CARS if getattr(self, name) is not None]
        if self.codec.id == "raw":
            raise InvalidParameter(f"codec raw takes no side-cars, found {', '.join(names)}")
        # The codec's own id and dim: by them files and messages call it.
        object.__setattr__(self, "id", self.codec.id)
        object.__setattr__(self, "dim", self.codec.dim)

    @classmethod
    def create(cls, dim: int, side: str, options: Options) -> Self:
        from . import codec_class

        side_cars = side_cars_of_words(dim, side, options)
        return cls(codec_class(options.codec).create(dim, side, options), **side_cars)

    def params(self) -> dict[str, Any]:
        result = self.codec.params()
        if self.channel_scale is not None:
            result["channel_scale"] = self.channel_scale.dtype
        if self.channel_order is not None:
            result["channel_order"] = self.channel_order.dtype
        if self.block_rotation is not None:
            result["block_rotation"] = self.block_rotation.size
        if self.outliers is not None:
            result["outliers"] = self.outliers.params()
        if self.qjl is not None:
            result["qjl"] = self.qjl.params()
        if self.raw_tokens is not None:
            result["raw_tokens"] = self.raw_tokens.dtype
        return result

    @property
    def nominal_bits(self) -> float:
        flags = 1 / CHUNK if self.outliers is not None else 0.0
        return self.codec.nominal_bits + flags + (1.0 if self.qjl is not None else 0.0)

    @property
    def rotation(self) -> Rotation:
        return self.codec.rotation

    @property
    def token_group(self) -> int:
        return self.codec.token_group

    def packings(self) -> dict[str, Columns]:
        return self.codec.packings()

    def scales(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        return self.codec.scales(batch, heads, tokens) | self._own_layout(batch, heads, tokens)

    def _own_layout(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        result: dict[str, Layout] = {}
        if self.channel_scale is not None:
            result |= self.channel_scale.layout(batch, heads, self.dim)
        if self.channel_order is not None:
            result |= self.channel_order.layout(batch, heads)
        for side_car in (self.outliers, self.qjl, self.raw_tokens):
            if side_car is not None:
                result |= side_car.layout(batch, heads, tokens)
        return result

    def usual_entries(self, batch: int, tokens: int) -> dict[str, int]:
        rows = self.codec.usual_entries(batch, tokens)
        if self.outliers is not None:
            rows[OUTLIERS] = 0
        if self.raw_tokens is not None:
            rows[RAW_TOKENS] = batch * min(tokens, self.raw_tokens.first + self.raw_tokens.low_norm)
        return rows

    def entries(self, streams: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        counts = self.codec.entries(streams)
        if self.outliers is not None:
            counts[OUTLIERS] = self.outliers.flags(streams).sum((1, 3)).T
        if self.raw_tokens is not None:
            counts[RAW_TOKENS] = streams[RAW_FLAGS][:, 0].T.to(torch.int64)
        return counts

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        batch, heads, tokens, dim = x.shape
        encoder = self.begin(Run((batch, heads, tokens, dim), x.device, lambda: iter([x])), None)
        return {**encoder.streams, **encoder.encode(x, 0)}

    def begin(self, run: Run, before: Mapping[str, torch.Tensor] | None) -> RunEncoder:
        own: dict[str, torch.Tensor] = {}
        chosen = self.raw_tokens.choose(run, before is not None) if self.raw_tokens is not None else None

        def kept(block: torch.Tensor, start: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            """The block without its raw tokens, and the streams that hold these."""
            if self.raw_tokens is None or chosen is None:
                return block, {}
            return self.raw_tokens.encode(block, chosen[:, start : start + block.shape[2]], self.token_group)

        def blocks(prepare: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[torch.Tensor]:
            """The blocks of the run without their raw tokens, each as ``prepare`` makes it; errors say which tokens a block holds."""
            start = 0
            for block in run.blocks():
                stop = start + block.shape[2]
                try:
                    yield prepare(kept(block, start)[0])
                except OutOfRange as error:
                    raise OutOfRange(f"tokens {start} to {stop}: {error}") from None
                start = stop

        def scaled(block: torch.Tensor) -> torch.Tensor:
            return block if self.channel_scale is None else block / factors(own)

        def prepared(block: torch.Tensor) -> torch.Tensor:
            """The block as the codec is given it."""
            return _finite(self._turned(scaled(block), own), "rotated in blocks")

        if self.channel_scale is not None:
            known = None if before is None else before.get(CHANNEL_SCALE)
            own[CHANNEL_SCALE] = self.channel_scale.measure(blocks(lambda block: block)) if known is None else known
        if self.channel_order is not None:
            known = None if before is None else before.get(CHANNEL_ORDER)
            own[CHANNEL_ORDER] = self.channel_order.measure(blocks(scaled), *run.shape[:2], run.device) if known is None else known

        threshold = None
        if self.outliers is not None:
            threshold = self.outliers.threshold(blocks(lambda block: self.rotation.forward(prepared(block))))

        def without_outliers(block: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            """The prepared block without its outliers, and the streams that hold these."""
            if self.outliers is None or threshold is None:
                return block, {}
            rest, streams = self.outliers.encode(self.rotation.forward(block), threshold)
            return _finite(self.rotation.inverse(rest), "rotated"), streams

        inner_blocks = Run(run.shape, run.device, lambda: blocks(lambda block: without_outliers(prepared(block))[0]))
        inner = self.codec.begin(inner_blocks, before)

        def encode(x: torch.Tensor, start: int) -> dict[str, torch.Tensor]:
            block, raw = kept(x, start)
            block, outliers = without_outliers(prepared(block))
            streams = inner.encode(block, start)
            if self.qjl is not None:
                residual = self.rotation.forward(block) - self.codec.decode_frame({**inner.streams, **streams})
                if self.outliers is not None:
                    # What is stored as it is leaves nothing over.
                    residual = self.outliers.put(residual, outliers | {OUTLIERS: torch.zeros_like(outliers[OUTLIERS])})
                streams |= self.qjl.encode(residual)
            streams |= outliers | raw
            if x.numel() and not x.abs().amax().item() < _LARGE:
                _finite(self.decode({**inner.streams, **own, **streams}), "decoded")
            return streams

        return RunEncoder({**inner.streams, **own}, encode)

    def digits(self, streams: Mapping[str, torch.Tensor], unpacker: Unpacker = Columns.unpack) -> tuple[torch.Tensor, ...]:
        return self.codec.digits(streams, unpacker)

    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.complete(self.codec.decode_digits(digits, streams), streams)

    def complete(self, frame: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What the codec alone decodes to, with everything that the side-cars know, in the coded frame."""
        frame = self._corrected(frame, streams)
        if self.raw_tokens is None:
            return frame
        raw = streams[RAW_TOKENS][0, 0].to(torch.float32)
        # What a run has once is of every sequence and head; for a raw token it is that of its sequence.
        sequence = (streams[RAW_FLAGS] != 0)[:, 0].T.nonzero()[:, 1]
        rows = {name: rows_of(streams[name], 0, sequence) for name in (CHANNEL_SCALE, CHANNEL_ORDER) if name in streams}
        raw = raw if self.channel_scale is None else raw / factors(rows)[:, :, 0]
        raw = self._turned(raw[:, :, None], rows)[:, :, 0]
        return self.raw_tokens.put(frame, self.rotation.forward(raw), streams)

    def decode(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.complete_original(self.codec.decode_frame(streams), streams)

    def complete_original(self, frame: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What the codec alone decodes to, with everything that the side-cars know, in the original frame."""
        values = self.original(self._corrected(frame, streams), streams)
        if self.raw_tokens is None:
            return values
        return self.raw_tokens.put(values, streams[RAW_TOKENS][0, 0].to(torch.float32), streams)

    def _corrected(self, frame: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if self.outliers is not None:
            frame = self.outliers.put(frame, streams)
        return frame if self.qjl is None else frame + self.qjl.correction(streams)

    def original(self, u: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        values = self._turned_back(self.codec.original(u, streams), streams)
        return values if self.channel_scale is None else values * factors(streams)

    def query(self, q: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.codec.query(self.inner_query(q, streams), streams)

    def inner_query(self, q: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The queries ``[batch, kv_head, row, dim]`` whose products with what the codec alone decodes to are those of ``q`` with keys."""
        return self._turned(q if self.channel_scale is None else q * factors(streams), streams)

    def _turned(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """``[batch, kv_head, row, dim]`` in the order of its run and rotated in blocks; an orthogonal map."""
        x = x if self.channel_order is None else reordered(x, streams)
        return x if self.block_rotation is None else self.block_rotation.forward(x)

    def _turned_back(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        x = x if self.block_rotation is None else self.block_rotation.inverse(x)
        return x if self.channel_order is None else restored(x, streams)

    def same_codes(self, other: Codec) -> bool:
        return isinstance(other, WithSideCars) and self._side_cars == other._side_cars and self.codec.same_codes(other.codec)

    def repack(self, streams: Mapping[str, torch.Tensor], other: Codec) -> dict[str, torch.Tensor]:
        assert isinstance(other, WithSideCars)
        return self.codec.repack(streams, other.codec) | {name: streams[name] for name in self._own_layout(1, 1, 0)}

    @property
    def _side_cars(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in SIDE_CARS)

    def check(self, arrays: Mapping[str, Array], where: str) -> None:
        own = self._own_layout(1, 1, 0)
        self.codec.check({name: array for name, array in arrays.items() if name not in own}, where)
        for side_car in self._side_cars:
            if side_car is not None and not isinstance(side_car, BlockRotation):
                side_car.check(arrays, where)


def _finite(x: torch.Tensor, what: str) -> torch.Tensor:
    """``x`` ``[batch, kv_head, token, dim]``. Raises OutOfRange, which says ``what`` was done, where a value is not finite."""
    # The sum is one cheap pass; only when it is not finite (it may merely overflow) is every value looked at.
    if not torch.isfinite(x.sum()) and not torch.isfinite(x).all():
        batch, head, token, channel = torch.nonzero(~torch.isfinite(x))[0].tolist()
        raise OutOfRange(
            f"the value at batch {batch}, head {head}, token {token}, channel {channel} is beyond binary32 when {what}; "
            "scale the input, or choose a raw codec"
        )
    return x


def codec_with(codec: Codec, params: Mapping[str, Any]) -> Codec:
    """``codec`` with the side-cars of a header's map ``params``, which has no other keys; ``codec`` itself without any.

    Raises InvalidParameter for a type or a value that the specification does not have.
    """
    return WithSideCars(codec, **side_cars_of_params(codec.dim, params)) if params else codec
