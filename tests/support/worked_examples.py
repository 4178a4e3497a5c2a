"""Parse the worked examples on the pages of the codecs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from kvpack.formats.base import Codec


def example(page: Path, *columns: str) -> list[dict[str, str]]:
    """Return the rows of the table with these columns in the page's worked example, without backticks."""
    text = page.read_text(encoding="utf-8").split("## Worked example")[1].split("\n## ")[0].replace("`", "")
    (block,) = re.findall(rf"\| {re.escape(' | '.join(columns))} \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", text)
    return [dict(zip(columns, (cell.strip() for cell in row.strip("|").split("|")), strict=True)) for row in block.strip().split("\n")]


def example_params(page: Path) -> dict[str, Any]:
    """Return the codec parameters of the example: ``fields`` as a map, and all others as text."""
    params: dict[str, Any] = {row["parameter"]: row["value"] for row in example(page, "parameter", "value")}
    params["fields"] = {name: int(fields) for name, fields in (entry.split() for entry in params["fields"].split(", "))}
    return params


def example_codec(page: Path, codec: type[Codec]) -> Codec:
    """Return the codec of an example. Parameters that look like numbers become numbers."""
    params = example_params(page)
    return codec.from_params({name: int(value) if isinstance(value, str) and value.isdigit() else value for name, value in params.items()})


def example_streams(page: Path, codec: Codec) -> dict[str, torch.Tensor]:
    """Return the streams of an example with two tokens.

    Their names, dtypes and shapes are checked against the codec's layout.
    """
    layout = codec.layout(1, 1, 2)
    streams = {}
    for row in example(page, "stream", "dtype", "shape", "bytes"):
        entry = layout[row["stream"]]
        assert (row["dtype"], row["shape"]) == (entry.dtype, " ".join(map(str, entry.shape)))
        dtype = {"U16": torch.uint16, "F16": torch.float16}[entry.dtype]
        streams[row["stream"]] = torch.frombuffer(bytearray.fromhex(row["bytes"]), dtype=dtype).reshape(entry.shape)
    assert list(streams) == list(layout)
    return streams
