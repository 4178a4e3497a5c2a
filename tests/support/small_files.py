"""Small contents and files that several tests of the container use."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import msgpack
import torch

from kvpack.file import container
from kvpack.file.header import Contents, LayerEntry, SideEntry, layout_bytes
from kvpack.file.layer_states import StateEntry, list_features
from kvpack.formats.raw import DTYPES
from support.strategies import create

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

TAIL_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def side(codec: int, tokens: int = 3, **values: Any) -> SideEntry:
    """Return a header entry for keys or values with one run. ``values`` replace its fields."""
    return replace(SideEntry(codec, 1, 1, (tokens,) if tokens else (), 0, "bf16", 0), **values)


def arrays_of(contents: Contents, seed: int = 0) -> dict[str, Any]:
    """Encode Gaussian values, and return every tensor of ``contents`` as a flat array of bytes."""
    generator = torch.Generator().manual_seed(seed)
    arrays: dict[str, Any] = {}
    for number, layer in enumerate(contents.layers):
        for name, entry in layer.sides():
            for stream, tensor in _streams(contents.codecs[entry.codec], entry, generator).items():
                arrays[f"{number}.{name}.{stream}"] = tensor.contiguous().flatten().view(torch.uint8).numpy()
        for state in contents.states_in_layer(number):
            arrays[state.where] = torch.randint(256, (layout_bytes(state.layout),), dtype=torch.uint8, generator=generator).numpy()
    return arrays


def _streams(codec: Codec, entry: SideEntry, generator: torch.Generator) -> dict[str, torch.Tensor]:
    runs = [codec.encode(torch.randn(entry.batch, entry.heads, run, codec.dim, generator=generator)) for run in entry.runs or (0,)]
    streams = {name: torch.cat([run[name] for run in runs], 2) for name in codec.layout(1, 1, 0)}
    if entry.tail:
        streams["tail"] = torch.randn(entry.batch, entry.heads, entry.tail, codec.dim, generator=generator).to(
            TAIL_DTYPES[entry.tail_dtype]
        )
    return streams


def contents(kind: str) -> Contents:
    """Return contents of one kind in ``KINDS``.

    Together, the kinds cover every dtype, absent sides, several runs, entries, tails, and no tokens.
    """
    keys, values = create("group", 4, "k", b="3", g="16"), create("group", 5, "v", b="2", g="16", token_scale="fp32")
    if kind == "group":
        k, v = side(0, runs=(3, 17), tail=2, window=32), side(1, 20, tail=2, tail_dtype="fp32")
        return Contents(codecs=(keys, values), layers=(LayerEntry(k, v),), model={"name": "test"}, recipe="kivi-3", start=7)
    if kind == "raw":
        raws = tuple(create("raw", dim, dtype=dtype) for dim, dtype in zip((1, 3, 40), DTYPES, strict=True))
        layers = (LayerEntry(side(0), side(1)), LayerEntry(None, side(2, tail=1, tail_dtype="fp16")), LayerEntry(None, None))
        return Contents(codecs=raws, layers=layers)
    if kind == "sidecars":
        k = create("scalar", 8, "k", b="2", channel_scale="fp16", outliers="1")
        v = create("group", 8, "v", b="2", g="16", qjl="fp32", sinks="2", raw_tokens="fp32")
        # In each run, the half of the chunks above the median is stored without quantization.
        runs = side(0, runs=(3, 2), entries=(("outliers", 3 + 2),), tail=1)
        return Contents(codecs=(k, v), layers=(LayerEntry(runs, side(1, 5, entries=(("raw_tokens", 2),), tail=1)),))
    if kind == "states":
        required, ignorable = list_features([StateEntry(0, "conv.0", "BF16", (1, 3, 4)), StateEntry(1, "recurrent.0", "F32", (1, 5))])
        layers = (LayerEntry(None, None), LayerEntry(side(0), side(1)))
        return Contents(codecs=(keys, values), layers=layers, required=required, ignorable=ignorable)
    return Contents(codecs=(keys, values), layers=(LayerEntry(side(0, 0), side(1, 0)), LayerEntry(side(0, 1), None)))


KINDS = ("group", "raw", "sidecars", "states", "empty")


def small_file(kind: str = "group", *, compress: bool = False) -> bytes:
    """Return the bytes of a small file."""
    made = contents(kind)
    return container.to_bytes(made, arrays_of(made), compress=compress)


@cache
def _data_section(kind: str) -> bytes:
    data = small_file(kind)
    return data[8 + int.from_bytes(data[:8], "little") :]


def header_map(kind: str = "group") -> dict[str, Any]:
    """Return the header of a small file as plain msgpack values, which tests change and pack again."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(_data_section(kind))
    top: dict[str, Any] = unpacker.unpack()
    return top
