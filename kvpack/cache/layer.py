"""Layers of a cache: the packed keys and values of one model layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from kvpack.coding import dispatch
from kvpack.formats.arguments import as_integer, describe, prefix_errors
from kvpack.formats.errors import InvalidParameter, OutOfBounds
from kvpack.formats.raw_positions import RawPositions

from .packed_objects import PackedObject, explain_errors
from .side import check_rows, row_indices

if TYPE_CHECKING:
    from .side import Rows, Side

Pair = tuple["torch.Tensor | None", "torch.Tensor | None"]


@explain_errors
@dataclass(frozen=True, eq=False)
class Layer(PackedObject):
    """The packed keys and values of one model layer. Keys or values may be absent.

    ``layer[a:b]`` contains tokens ``[a, b)``.

    Args:
        k: Keys, or None.
        v: Values, or None.
        skipped: Number of tokens at the beginning of the cache that a sliding window has dropped from this layer.
        states: States of a recurrent or convolution layer after all tokens: tensors ``[batch, ...]`` by name, stored without encoding.

    >>> layer = kvpack.pack(past, "octopus-3")[0]
    >>> layer.tokens, layer.k.heads, layer.v.dim
    (64, 2, 64)
    """

    k: Side | None
    v: Side | None
    skipped: int = field(default=0, kw_only=True)
    states: Mapping[str, torch.Tensor] = field(default_factory=partial(MappingProxyType, {}), kw_only=True)

    @property
    def sides(self) -> dict[str, Side]:
        """The layer's keys (under "k") and values (under "v"). Absent keys or values are omitted."""
        return {name: side for name, side in (("k", self.k), ("v", self.v)) if side is not None}

    @property
    def tokens(self) -> int:
        """Number of tokens in the layer. It is the same for keys and values."""
        side = self.v if self.k is None else self.k
        return 0 if side is None else side.tokens

    @property
    def seen_tokens(self) -> int:
        """Number of tokens in the layer plus the skipped tokens before them."""
        return self.skipped + self.tokens

    def unpack(self, dtype: torch.dtype = torch.bfloat16) -> Pair:
        """Decode the layer to dense k and v, each ``[batch, kv_head, token, dim]`` of ``dtype``, or None if absent."""
        return (self.k.unpack(dtype) if self.k else None, self.v.unpack(dtype) if self.v else None)

    def __getitem__(self, tokens: slice) -> Layer:
        """Return tokens ``[start, stop)``, counted from the cache's first token. Packed bytes are shared.

        A layer with skipped tokens can only be returned whole, because the first tokens of any other slice would lack part of their sliding
        window. Raises OutOfBounds if the layer lacks a token, or if the slice has a step or a negative position.
        """
        if not isinstance(tokens, slice) or tokens.step not in (None, 1):
            raise OutOfBounds(f"layer[{describe(tokens)}]: index a layer by tokens, as layer[start:stop]")
        start = 0 if tokens.start is None else as_integer(tokens.start, "start")
        stop = self.seen_tokens if tokens.stop is None else as_integer(tokens.stop, "stop")
        if (start, stop) == (0, self.seen_tokens):
            return self
        if self.states:
            raise OutOfBounds(
                f"tokens [{start}:{stop}] were requested from a layer with states {_state_names(self)}, which exist only after its last "
                "token: use the whole layer"
            )
        if not self.sides:
            return self
        if not self.skipped <= start <= stop <= self.seen_tokens:
            raise OutOfBounds(
                f"tokens [{start}:{stop}] are out of range: the layer has only tokens [{self.skipped}:{self.seen_tokens}]"
            )
        first, last = start - self.skipped, stop - self.skipped
        return Layer(self.k.slice(first, last) if self.k else None, self.v.slice(first, last) if self.v else None)

    def select(self, indices: Rows) -> Layer:
        """Return a layer with the sequences at ``indices``, as ``Cache.select`` does. Raises OutOfBounds or InvalidParameter."""
        rows = row_indices(indices)
        for state in self.states.values():
            check_rows(rows, state.shape[0])
        k, v = self.k.select(rows) if self.k else None, self.v.select(rows) if self.v else None
        return replace(self, k=k, v=v, states=MappingProxyType({name: state[list(rows)] for name, state in self.states.items()}))

    def append(self, k: torch.Tensor | None, v: torch.Tensor | None, where: str = "append", start: int | None = None) -> Layer:
        """Return the layer with the tokens of ``k`` and ``v`` appended.

        ``start`` is the position of the cache's first token, if known. ``where`` identifies the layer in error messages. Raises
        InvalidParameter if keys or values are missing, if they have different numbers of tokens, or if the layer has states.
        """
        if self.states:
            raise InvalidParameter(
                f"{where}: tokens cannot be appended to a layer with recurrent or convolution states {_state_names(self)}, because the "
                "states would not include them"
            )
        new, first = {}, None if start is None else start + self.skipped
        for name, side, x in (("k", self.k, k), ("v", self.v, v)):
            if (side is None) != (x is None):
                content = "keys" if name == "k" else "values"
                fault = "no {}: pass None" if side is None else "{}, but got None: pass a tensor"
                raise InvalidParameter(f"{where}.{name}: the layer has {fault.format(content)}")
            if side is not None and x is not None:
                side.check_new_tokens(x, f"{where}.{name}")
                new[name] = side, x
        if k is not None and v is not None and k.shape[2] != v.shape[2]:
            raise InvalidParameter(f"{where}: k has {k.shape[2]} tokens, but v has {v.shape[2]}: pass the same number of tokens in both")
        unit = None
        if any(side.codec.raw_positions for side in self.sides.values()):
            # The same raw tokens are chosen for keys and values, so both must encode the same tokens at the same time.
            unit = math.lcm(*(side.codec.group_tokens for side in self.sides.values()))

        @cache
        def norms_by_side(start: int, stop: int) -> dict[str, torch.Tensor]:
            return {name: _norms_between(*pair, start, stop) for name, pair in new.items()}

        def norms(raw: RawPositions | None, start: int, stop: int) -> torch.Tensor | None:
            if raw is None or "k" not in new:
                return None
            by_side = norms_by_side(start, stop)
            return raw.selection_norms(by_side["k"], by_side.get("v"))

        sides = {
            name: side.append(x, f"{where}.{name}", first, unit, partial(norms, side.codec.raw_positions))
            for name, (side, x) in new.items()
        }
        return replace(self, k=sides.get("k"), v=sides.get("v"))

    def merged(self) -> Layer:
        """Return the layer with as few runs of keys and values as possible (see ``Side.merged``)."""
        return replace(self, k=self.k and self.k.merged(), v=self.v and self.v.merged())

    def to(self, device: torch.device | str) -> Layer:
        """Return the layer with all buffers on ``device``."""
        k, v = self.k.to(device) if self.k else None, self.v.to(device) if self.v else None
        return replace(self, k=k, v=v, states=MappingProxyType({name: state.to(device) for name, state in self.states.items()}))


def _norms_between(side: Side, appended: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the norms of tokens ``[start, stop)`` of ``side`` followed by ``appended``, float32 ``[batch, kv_head, token]``."""
    older = side.norms(start) if start < side.tokens else appended.new_zeros(*appended.shape[:2], 0, dtype=torch.float32)
    return torch.cat([older, dispatch.norms(appended)], 2)[:, :, : stop - start]


def _state_names(layer: Layer) -> str:
    return f"({', '.join(layer.states)})"


def slice_layer(layer: Layer, layer_index: int, tokens: tuple[int, int], first: int, count: int) -> Layer:
    """Return layer ``layer_index`` of ``cache[:, start:stop]``, where ``tokens`` is ``(start, stop)``.

    The cache has ``count`` tokens and starts at position ``first``. Raises OutOfBounds, with the layer's index in the message, if the layer
    lacks some of the tokens or ``start`` is inside a token group.
    """
    start, stop = tokens
    whole = tokens == (0, count) and layer.seen_tokens == stop
    if layer.sides and not whole and not layer.skipped <= start <= stop <= layer.seen_tokens:
        fault = f"which has {layer.tokens}"
        if layer.skipped:
            fault = f"which has only positions [{first + layer.skipped}:{first + layer.seen_tokens}], not [{first + start}:{first + stop}]"
        raise OutOfBounds(f"tokens [{start}:{stop}] were requested from layers[{layer_index}], {fault}")
    if layer.states and stop != count:
        raise OutOfBounds(
            f"tokens [{start}:{stop}] of {count} were requested, but layers[{layer_index}] has its states {_state_names(layer)} only after "
            f"the last token: request tokens up to {count}"
        )
    with prefix_errors(f"layers[{layer_index}]", OutOfBounds):
        # The states after the last token belong to every range that ends there.
        return replace(replace(layer, states=MappingProxyType({}))[start:stop], states=layer.states)
