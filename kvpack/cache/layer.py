"""Layer: the keys and the values of one layer of a model, each a Side."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

import torch

from kvpack.coding import dispatch
from kvpack.formats.arguments import as_integer, describe
from kvpack.formats.errors import InvalidParameter, OutOfBounds
from kvpack.formats.raw_positions import RawPositions

from .packed_objects import explained, refuse_pickle
from .rows import check_rows, row_numbers

if TYPE_CHECKING:
    from .side import Rows, Side

Pair = tuple["torch.Tensor | None", "torch.Tensor | None"]


@explained
@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a cache: its keys and values, each a Side; either may be absent.

    ``layer[a:b]`` contains tokens ``[a, b)``.

    Args:
        k: Keys, or None.
        v: Values, or None.
        skipped: Number of tokens at the beginning of the cache that a sliding window has dropped from the layer.
        states: Tensors ``[batch, ...]`` by name that a recurrent or convolution layer has computed from all tokens; never encoded.

    Raises:
        InvalidParameter: ``skipped`` is negative, or is not 0 in a layer without sides.

    >>> layer = kvpack.pack(past, "octopus-3")[0]
    >>> layer.tokens, layer.k.heads, layer.v.dim
    (64, 2, 64)
    """

    k: Side | None
    v: Side | None
    skipped: int = field(default=0, kw_only=True)
    states: Mapping[str, torch.Tensor] = field(default_factory=partial(MappingProxyType, {}), kw_only=True)

    def __post_init__(self) -> None:
        if self.skipped and (self.skipped < 0 or not self.sides):
            raise InvalidParameter(f"skipped is {self.skipped}, expected an integer of at least 0, and 0 for a layer without sides")

    def __copy__(self) -> Layer:
        return self

    def __deepcopy__(self, memo: object) -> Layer:
        return self

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self)

    @property
    def sides(self) -> dict[str, Side]:
        """The sides that the layer has, by name ("k", "v")."""
        return {name: side for name, side in (("k", self.k), ("v", self.v)) if side is not None}

    @property
    def tokens(self) -> int:
        """Number of tokens in the layer; keys and values have the same number."""
        side = self.v if self.k is None else self.k
        return 0 if side is None else side.tokens

    @property
    def seen(self) -> int:
        """Number of tokens from the beginning of the cache to the last token of the layer, including skipped ones."""
        return self.skipped + self.tokens

    def unpack(self, dtype: torch.dtype = torch.bfloat16) -> Pair:
        """Decode to dense k and v ``[batch, kv_head, token, dim]`` of ``dtype``; None for an absent side."""
        return (self.k.unpack(dtype) if self.k else None, self.v.unpack(dtype) if self.v else None)

    def __getitem__(self, tokens: slice) -> Layer:
        """Return tokens ``[start, stop)``, counted from the beginning of the cache's range; packed bytes are shared.

        A layer that skipped tokens can only be sliced whole: cut, its last tokens would lack the window before them. Raises OutOfBounds
        for tokens that the layer does not hold, for a step, and for negative positions.
        """
        if not isinstance(tokens, slice) or tokens.step not in (None, 1):
            raise OutOfBounds(f"layer[{describe(tokens)}]: index a layer by tokens, as layer[start:stop]")
        start = 0 if tokens.start is None else as_integer(tokens.start, "start")
        stop = self.seen if tokens.stop is None else as_integer(tokens.stop, "stop")
        if (start, stop) == (0, self.seen):
            return self
        if self.states:
            raise OutOfBounds(_one_moment(self, f"tokens {start} to {stop} were requested from it"))
        if not self.sides:
            return self
        if not self.skipped <= start <= stop <= self.seen:
            raise OutOfBounds(f"tokens {start} to {stop} were requested from a layer that holds tokens {self.skipped} to {self.seen}")
        first, last = start - self.skipped, stop - self.skipped
        return Layer(self.k.slice(first, last) if self.k else None, self.v.slice(first, last) if self.v else None)

    def select(self, indices: Rows) -> Layer:
        """Return the sequences ``indices`` of the batch, as ``Cache.select`` does. Raises OutOfBounds and InvalidParameter."""
        rows = row_numbers(indices)
        for state in self.states.values():
            check_rows(rows, state.shape[0])
        k, v = self.k.select(rows) if self.k else None, self.v.select(rows) if self.v else None
        return replace(self, k=k, v=v, states=MappingProxyType({name: state[list(rows)] for name, state in self.states.items()}))

    def append(self, k: torch.Tensor | None, v: torch.Tensor | None, where: str = "append", start: int | None = None) -> Layer:
        """Return the layer with the tokens of ``k`` and ``v`` appended.

        ``start`` is the position at which the cache begins, if known; ``where`` names the layer in error messages. Raises InvalidParameter
        if a side is missing, if k and v differ in tokens, or if the layer has states.
        """
        if self.states:
            raise InvalidParameter(_one_moment(self, f"{where}: tokens cannot be appended to it"))
        sides, first = [], None if start is None else start + self.skipped
        unit = None
        if any(side.codec.side_car(RawPositions) for side in self.sides.values()):
            # The keys choose raw tokens for both sides, so both are encoded at once.
            unit = math.lcm(*(side.codec.token_group for side in self.sides.values()))

        def norms(start: int, stop: int) -> torch.Tensor | None:
            if self.k is None or k is None or unit is None:
                return None
            held = self.k.norms(start) if start < self.k.tokens else k.new_zeros(*k.shape[:2], 0, dtype=torch.float32)
            return torch.cat([held, dispatch.norms(k)], 2)[:, :, : stop - start]

        for name, side, x in (("k", self.k, k), ("v", self.v, v)):
            if (side is None) != (x is None):
                held, given = ("no", "some") if side is None else ("a", "none")
                raise InvalidParameter(f"{where}.{name}: the layer has {held} {name} side, but {given} was appended")
            sides.append(None if side is None or x is None else side.append(x, f"{where}.{name}", first, unit, norms))
        if k is not None and v is not None and k.shape[2] != v.shape[2]:
            raise InvalidParameter(f"{where}: k has {k.shape[2]} tokens and v has {v.shape[2]}; both must have the same number")
        return replace(self, k=sides[0], v=sides[1])

    def to(self, device: torch.device | str) -> Layer:
        """Return the layer with every buffer on ``device``."""
        k, v = self.k.to(device) if self.k else None, self.v.to(device) if self.v else None
        return replace(self, k=k, v=v, states=MappingProxyType({name: state.to(device) for name, state in self.states.items()}))


def _one_moment(layer: Layer, request: str) -> str:
    names = " and ".join(layer.states)
    return f"{request}, and the layer has the states {names} only after the cache's last token, so no other range has them"


def sliced(layer: Layer, number: int, tokens: tuple[int, int], first: int, count: int) -> Layer:
    """Return tokens ``[start, stop)`` of layer ``number`` of a cache of ``count`` tokens from position ``first`` on.

    The result is that of ``cache[:, start:stop]``. Raises OutOfBounds, which names the layer, if it does not contain all of them, and if
    ``start`` is inside a token group.
    """
    start, stop = tokens
    whole = tokens == (0, count) and layer.seen == stop
    if layer.sides and not whole and not layer.skipped <= start <= stop <= layer.seen:
        held = f"which holds {layer.tokens}"
        if layer.skipped:
            held = f"which holds only positions {first + layer.skipped} to {first + layer.seen}, not {first + start} to {first + stop}"
        raise OutOfBounds(f"tokens {start} to {stop} were requested from layers[{number}], {held}")
    if layer.states and stop != count:
        raise OutOfBounds(f"layers[{number}]: {_one_moment(layer, f'tokens {start} to {stop} of {count} were requested')}")
    try:
        # States after the last token are those of every range that ends there.
        return replace(replace(layer, states=MappingProxyType({}))[start:stop], states=layer.states)
    except OutOfBounds as error:
        raise OutOfBounds(f"layers[{number}]: {error}") from None
