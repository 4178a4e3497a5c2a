"""Side-cars from a recipe's words and from a header's map (spec/side-cars.md); what they do is in side_cars.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import MAX_DIM, NORMS
from .channel_order import DTYPES as ORDER_DTYPES
from .channel_order import ChannelOrder
from .channel_scale import ChannelScale
from .columns import default_fields
from .errors import InvalidParameter
from .outliers import CHUNK, Outliers
from .qjl import DEFAULT_SEED, Qjl
from .raw import DTYPES as RAW_DTYPES
from .raw_tokens import RawTokens
from .rotation import BlockRotation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .options import Options

OPTIONS = ("channel_scale", "channel_order", "block_rotation", "outliers", "qjl", "qjl_seed", "raw_tokens", "sinks", "low_norm_tokens")
"""The words of a recipe that ask for side-cars."""

_LARGEST_MULTIPLIER = 1000
_MOST_RAW_TOKENS = 1 << 16


def side_cars_of_words(dim: int, side: str, options: Options) -> dict[str, Any]:
    """The side-cars that a recipe's ``options`` ask for, by name; None for each of the others.

    Raises InvalidParameter for an option that is out of range, or that another one is missing for.
    """
    return {
        "channel_scale": _channel_scale(side, options),
        **_blocks(dim, options),
        "outliers": _outliers(dim, options),
        "qjl": _qjl(dim, options),
        "raw_tokens": _raw_tokens(dim, options),
    }


def _channel_scale(side: str, options: Options) -> ChannelScale | None:
    dtype = options.choice("channel_scale", "", tuple(NORMS))
    return ChannelScale(dtype, paired=side == "k") if dtype else None


def _blocks(dim: int, options: Options) -> dict[str, ChannelOrder | BlockRotation | None]:
    size = options.integer("block_rotation", 0, 2, MAX_DIM)
    dtype = options.choice("channel_order", "", tuple(ORDER_DTYPES))
    if dtype and not size:
        raise InvalidParameter(f"codec {options.codec}: channel_order is {dtype}, without block_rotation=<size> it would change nothing")
    rotation = BlockRotation(dim, size) if size else None
    return {"channel_order": ChannelOrder(dim, dtype, size) if dtype else None, "block_rotation": rotation}


def _outliers(dim: int, options: Options) -> Outliers | None:
    multiplier = options.integer("outliers", 0, 1, _LARGEST_MULTIPLIER)
    return Outliers(dim, default_fields(max(1, dim // CHUNK), (2,)), multiplier) if multiplier else None


def _qjl(dim: int, options: Options) -> Qjl | None:
    norm = options.choice("qjl", "", tuple(NORMS))
    seed = options.integer("qjl_seed", -1, 0, 2**64 - 1)
    if not norm:
        if seed >= 0:
            raise InvalidParameter(f"codec {options.codec}: qjl_seed is {seed}, without qjl=fp16 there is nothing that it is for")
        return None
    return Qjl(dim, DEFAULT_SEED if seed < 0 else seed, norm, default_fields(dim, (2,)))


def _raw_tokens(dim: int, options: Options) -> RawTokens | None:
    dtype = options.choice("raw_tokens", "", tuple(RAW_DTYPES))
    first = options.integer("sinks", 0, 1, _MOST_RAW_TOKENS)
    low_norm = options.integer("low_norm_tokens", 0, 1, _MOST_RAW_TOKENS)
    if not (first or low_norm):
        if dtype:
            raise InvalidParameter(f"codec {options.codec}: raw_tokens is {dtype}, sinks=<count> or low_norm_tokens=<count> say which")
        return None
    return RawTokens(dim, dtype or "bf16", first, low_norm)


def side_cars_of_params(dim: int, params: Mapping[str, Any]) -> dict[str, Any]:
    """The side-cars of a header's map, which has no other keys, by name.

    Raises InvalidParameter for a type or a value that the specification does not have.
    """
    found: dict[str, Any] = {}
    for name, value in params.items():
        if name == "channel_scale":
            found[name] = ChannelScale(_known_word(name, value, NORMS))
        elif name == "channel_order":
            found[name] = ChannelOrder(dim, _known_word(name, value, ORDER_DTYPES))
        elif name == "block_rotation":
            if type(value) is not int:
                raise InvalidParameter(f"side-car block_rotation is {value!r}, expected an integer")
            found[name] = BlockRotation(dim, value)
        elif name == "raw_tokens":
            found[name] = RawTokens(dim, _known_word(name, value, RAW_DTYPES))
        elif name == "outliers":
            found[name] = Outliers(dim, **_typed(name, value, {"fields": int}))
        else:
            found[name] = Qjl(dim, **_typed(name, value, {"seed": int, "norm": str, "fields": int}))
    return found


def _known_word(name: str, value: Any, known: Mapping[str, str]) -> str:
    if type(value) is not str or value not in known:
        raise InvalidParameter(f"side-car {name} is {value!r}, known are {', '.join(known)}")
    return value


def _typed(name: str, value: Any, types: dict[str, type]) -> dict[str, Any]:
    if type(value) is not dict or tuple(value) != tuple(types) or any(type(value[key]) is not kind for key, kind in types.items()):
        expected = ", ".join(f"{key}: {kind.__name__}" for key, kind in types.items())
        raise InvalidParameter(f"side-car {name} is {value!r}, expected a map {{{expected}}}")
    return value
