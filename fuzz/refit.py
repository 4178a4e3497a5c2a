"""Adjustment of a file's tensors to a changed header. Each gets the name, dtype and size that the codecs and layers require."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import zstandard

from kvpack.file.header import Contents, LayerEntry, SideEntry, layout_bytes, list_features, side_tensors
from kvpack.formats import codec_from_params
from kvpack.formats.errors import LimitExceeded
from support.parts import Parts
from support.second_decoder import decompress

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from kvpack.formats.base import Codec

MAX_PAYLOAD_BYTES = 1 << 14

_POSITION_BYTES = 8

_COUNTING_STREAMS = {"outlier_flags": "outliers", "raw_token_flags": "raw_tokens", "word_counts": "words"}
"""Streams that determine the number of entries of another stream."""
_COUNTS: dict[str, Callable[[bytes], int]] = {
    "outliers": lambda flags: int.from_bytes(flags, "little").bit_count(),
    "raw_tokens": lambda flags: flags.count(1),
    "words": lambda counts: sum(struct.unpack(f"<{len(counts) // 2}H", counts)),
}


def refit_tensors(parts: Parts, source: random.Random) -> Parts:
    """Return ``parts`` with the tensors that its header requires. Tensors keep as many of their bytes as possible.

    Raises KvpackError, or an error of a malformed header, if there are no such tensors.
    """
    stored = {row[0]: _content(row, data) for row, data in zip(parts.header["tensors"], parts.tensors, strict=True)}
    codecs = [codec_from_params(params) for params in parts.header["codecs"]]
    layers = []
    for number, layer in enumerate(parts.header["layers"]):
        entries: dict[str, SideEntry | None] = {}
        for name, side in layer.items():
            if side is not None:
                _count_entries(codecs[side["codec"]], side, f"{number}.{name}", stored, source)
            entries[name] = None if side is None else _side(side)
        layers.append(LayerEntry(**entries))
    layouts = Contents(codecs=tuple(codecs), layers=tuple(layers), required=list_features(codecs)).layouts
    if sum(map(layout_bytes, layouts.values())) > MAX_PAYLOAD_BYTES:
        raise LimitExceeded("the tensors would exceed the size of a fuzzer's input")
    rows, tensors = [], []
    for name, layout in layouts.items():
        size = layout_bytes(layout)
        rows.append([name, layout.dtype, list(layout.shape), "none", size, bytes(16)])
        tensors.append(_fit_bytes(stored.get(name, b""), size, source))
    return Parts({**parts.header, "tensors": rows}, tensors)


def _side(side: dict[str, Any]) -> SideEntry:
    return SideEntry(**{**side, "runs": tuple(side["runs"]), "entries": tuple(side.get("entries", {}).items())})


def _content(row: list[Any], data: bytes) -> bytes:
    if row[3] == "none":
        return data
    try:
        size = zstandard.get_frame_parameters(data).content_size
    except zstandard.ZstdError:
        return b""
    # The decompressor allocates the size that a frame declares, regardless of the limit.
    return decompress(data, MAX_PAYLOAD_BYTES) if size <= MAX_PAYLOAD_BYTES else b""


def _fit_bytes(known: bytes, size: int, source: random.Random) -> bytes:
    """Return ``size`` bytes that begin with ``known`` and repeat it as needed, so that streams stay similar."""
    if known:
        return (known * (size // len(known) + 1))[:size]
    return source.choice((bytes, source.randbytes))(size)


def _count_entries(codec: Codec, side: dict[str, Any], where: str, stored: dict[str, bytes], source: random.Random) -> None:
    """Set ``entries`` of ``side`` to the numbers that its adjusted flags or counts determine, or remove it without such streams."""
    names = [name for name, layout in codec.layout(1, 1, 0).items() if layout.per == "entry"]
    side.pop("entries", None)
    if not names:
        return
    side["entries"] = dict.fromkeys(names, 0)
    if "raw_positions" in names:
        count = len(stored.get(f"{where}.raw_positions", b"")) // _POSITION_BYTES
        side["entries"] |= {"raw_positions": count, "raw_values": count}
    for stream, layout in side_tensors(codec, _side(side)).items():
        name = _COUNTING_STREAMS.get(stream.split(".")[0])
        if name is not None and layout_bytes(layout) <= MAX_PAYLOAD_BYTES:
            place = f"{where}.{stream}"
            stored[place] = flags = _fit_bytes(stored.get(place, b""), layout_bytes(layout), source)
            side["entries"][name] += _COUNTS[name](flags)
