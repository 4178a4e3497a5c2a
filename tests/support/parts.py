"""Split a file and join it again with correct lengths and digests, even if its header was changed, without importing torch."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import msgpack
import xxhash

from spec.decoder.contents import Tensor
from spec.decoder.json_header import json_header, tensor_spans


@dataclass
class Parts:
    """The header of a file as plain values, and the stored bytes of every tensor."""

    header: dict[str, Any]
    tensors: list[bytes]

    @classmethod
    def of(cls, data: bytes) -> Parts:
        start = 8 + int.from_bytes(data[:8], "little")
        unpacker = msgpack.Unpacker(io.BytesIO(data[start:]))
        header = unpacker.unpack()
        at = unpacker.tell()
        tensors = []
        for row in header["tensors"]:
            at += -at % 64
            tensors.append(data[start + at : start + at + row[4]])
            at += row[4]
        return cls(header, tensors)

    def joined(self, packed: bytes | None = None, *, keep_sizes: bool = False) -> bytes:
        """Return the bytes of the file.

        ``packed`` replaces the header tensor, and ``keep_sizes`` keeps the sizes that the header declares.
        """
        for row, stored in zip(self.header["tensors"], self.tensors, strict=True):
            if not keep_sizes:
                row[4:] = [len(stored), xxhash.xxh3_128_digest(stored)]
        packed = msgpack.packb(self.header) if packed is None else packed
        rows = [Tensor(row[0], row[1], tuple(row[2]), *row[3:]) for row in self.header["tensors"]]
        json = json_header(packed, rows)
        data = len(json).to_bytes(8, "little") + json + packed
        for place, stored in zip([p for p in tensor_spans(len(packed), rows) if p.tensor], self.tensors, strict=True):
            data += bytes(place.begin + 8 + len(json) - len(data)) + stored
        return data

    def tensor(self, name: str) -> int:
        return next(number for number, row in enumerate(self.header["tensors"]) if row[0] == name)

    def store(self, name: str, stored: bytes, chosen: str = "none") -> None:
        number = self.tensor(name)
        self.tensors[number] = stored
        self.header["tensors"][number][3] = chosen
