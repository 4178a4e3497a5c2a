"""Write llama.cpp sequence states field by field, for tests that modify them or compare them with kvpack's writer."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import torch

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
Sides = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Caches:
    """Keys and values ``[cell, channel]`` of each layer, and the other parts of a state.

    A field that is not None replaces the default. Quantized keys or values are uint8 ``[cell, byte]``, and ``kinds`` gives their ggml type
    for each (layer, side) or layer.
    """

    layers: list[Sides]
    positions: list[int]
    transposed: bool = False
    streams: int = 1
    sequence: int = 0
    stream: int = 0
    sequences_of_a_cell: int = 1
    kinds: dict[int | tuple[int, int], int] = field(default_factory=dict)

    def pieces(self) -> bytes:
        counts = [len(self.positions) if stream == self.stream else 0 for stream in range(self.streams)]
        data = struct.pack("<I", self.streams)
        for count in counts:
            data += struct.pack("<I", count)
            if not count:
                continue
            data += b"".join(struct.pack("<iIi", position, self.sequences_of_a_cell, self.sequence) for position in self.positions)
            data += struct.pack("<II", self.transposed, len(self.layers))
            for side in (0, 1):
                for number, layer in enumerate(self.layers):
                    values = layer[side]
                    kind = self.kinds.get((number, side), self.kinds.get(number, TYPES.get(values.dtype, -1)))
                    if side and self.transposed:
                        data += struct.pack("<iII", kind, values.element_size(), values.shape[1])
                        values = values.T
                    else:
                        data += struct.pack("<iQ", kind, values.element_size() * values.shape[1])
                    data += values.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return data


def state(ids: list[int], *caches: Caches, magic: int = 0x67677371, version: int = 3) -> bytes:
    """Return a complete file. ``ids`` are the words of token ids as they are stored."""
    return struct.pack(f"<III{len(ids)}i", magic, version, len(ids), *ids) + b"".join(cache.pieces() for cache in caches)


def of_server(ids: list[int], *media: int) -> list[int]:
    """Return the words of token ids as llama-server stores them, without the media themselves."""
    return [-1, 1, len(ids), *ids, len(media), *media]
