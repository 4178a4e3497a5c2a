"""Parses llama.cpp's sequence state files. All offsets are checked against the file's length before anything is read.

All numbers are little-endian::

    magic "ggsq" as u32, version u32
    token ids: u32 count, count x i32
    a section for each of the context's caches: for whole layers, then for sliding-window layers if the model has any
        u32 streams; for each stream:
            u32 cells; no more if there are none
            for each cell: i32 position, u32 1, i32 sequence
            u32 transposed, u32 layers
            for each layer, its keys: i32 type, u64 bytes per cell, cells
            for each layer, its values: the same, or, transposed: i32 type, u32 bytes per value, u32 channels, channels
            (no values if the keys are latents, in models with MLA)

Source: llama.cpp 0c1e57098, ``llama_context::state_seq_save_file`` and ``llama_kv_cache::state_write``. llama-server's form of token ids is
``server_tokens::serialize``.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

import numpy as np

from kvpack.file.limits import MAX_LAYERS
from kvpack.file.user_files import open_error, open_regular, path_text
from kvpack.formats.errors import InvalidParameter

CONFIG = "llama.cpp sequence state 3"
"""Value of ``model["config"]`` in a cache read from such a file."""
LIST, SERVER = "list", "server"
"""Forms of token ids: a plain list, or llama-server's form, which may also contain media."""
TYPES = {"fp32": (0, 4), "fp16": (1, 2), "bf16": (30, 2)}
"""For each dtype that kvpack stores bit for bit: its number in ggml, and the size of a value in bytes."""
BLOCK = 32
"""Number of channels in a block."""


class QuantizedType(NamedTuple):
    """A quantized type: its ``number`` in ggml, the ``size`` of a block in bytes, and the ``bits`` of a code."""

    number: int
    size: int
    bits: int


QUANTIZED = {"q4_0": QuantizedType(2, 18, 4), "q5_0": QuantizedType(6, 22, 5), "q8_0": QuantizedType(8, 34, 8)}
"""Quantized types that a codec stores bit for bit."""
_UNSUPPORTED = {3: "q4_1", 7: "q5_1", 20: "iq4_nl"}
"""Other quantized types that llama.cpp's cache may have, by their numbers in ggml. No codec can represent them."""

_MAGIC, _VERSION = 0x67677371, 3
_OTHER_MAGICS = {0x6767736E: "the state of a whole context ('ggsn')", 0x67676C61: "an adapter ('ggla')"}
_MAX_STREAMS = 256
"""Maximum number of streams (llama.cpp's LLAMA_MAX_SEQ)."""
_SERVER_VERSION = 1
_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_OTHER_CELLS = (
    "the file may come from a recurrent model, or one with multi-dimensional positions (M-RoPE) or n-gram embeddings, all unsupported"
)


class CellBlock(NamedTuple):
    """The keys or values of a layer, at ``offset`` in a file. Each cell has ``channels`` values.

    The values are stored cell by cell, or transposed. ``dtype`` is a key of TYPES or QUANTIZED.
    """

    dtype: str
    channels: int
    offset: int

    @property
    def cell_bytes(self) -> int:
        if self.dtype in QUANTIZED:
            return self.channels // BLOCK * QUANTIZED[self.dtype].size
        return self.channels * TYPES[self.dtype][1]


class Section(NamedTuple):
    """The part of a state file that holds one cache. ``positions`` is int32 ``[cell]``. If ``transposed`` is set, values are transposed."""

    streams: int
    sequence: int
    positions: np.ndarray
    transposed: bool
    keys: tuple[CellBlock, ...]
    values: tuple[CellBlock, ...]


class StateFile(NamedTuple):
    """A parsed llama.cpp state file. ``ids`` are its token ids, 4 bytes each. ``ids_form`` is the encoding that the file uses for them."""

    ids: bytes
    ids_form: str
    sections: tuple[Section, ...]


class Reader:
    """An open file that is read piece by piece, in order."""

    def __init__(self, where: str) -> None:
        self.where, self.at = where, 0
        self._descriptor = open_regular(where)
        self.size = os.fstat(self._descriptor).st_size

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    @property
    def remaining(self) -> int:
        return self.size - self.at

    def skip(self, count: int, description: str) -> int:
        """Skip the next ``count`` bytes, and return their offset. Raises InvalidParameter if fewer bytes are left."""
        if count > self.remaining:
            raise InvalidParameter(
                f"{self.where} is truncated: {description} take {count} bytes at offset {self.at}, but only {self.remaining} remain"
            )
        begin, self.at = self.at, self.at + count
        return begin

    def read(self, count: int, description: str) -> bytearray:
        """Read the next ``count`` bytes. Raises the same errors as ``skip``."""
        begin = self.skip(count, description)
        data = bytearray(count)
        self.read_into(memoryview(data), begin)
        return data

    def read_numbers(self, layout: str, description: str) -> tuple[int, ...]:
        """Read numbers in the struct format ``layout``. Raises the same errors as ``skip``."""
        return struct.unpack(f"<{layout}", self.read(struct.calcsize(f"<{layout}"), description))

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` with the bytes at ``offset``. Raises MissingFile if the file cannot be read, and InvalidParameter if the file has
        become shorter.
        """
        while buffer:
            try:
                count = os.preadv(self._descriptor, [buffer], offset)
            except OSError as error:
                raise open_error(self.where, error) from None
            if not count:
                raise InvalidParameter(f"{self.where} shrank from {self.size} to {offset} bytes while it was read: import it again")
            buffer, offset = buffer[count:], offset + count


def is_state_file(path: str | os.PathLike[str]) -> bool:
    """Return True if a file begins like one of llama.cpp's state files, of any kind."""
    with Reader(path_text(path)) as reader:
        return reader.size >= 4 and reader.read_numbers("I", "its magic")[0] in (_MAGIC, *_OTHER_MAGICS)


def parse(reader: Reader, sections: int, *, latents: bool = False) -> StateFile:
    """Parse the file. Raises InvalidParameter unless it consists of ``sections`` sections with keys and values.

    With ``latents``, sections must have only keys.
    """
    _check_header(reader)
    ids, form = _read_ids(reader)
    result = tuple(_read_section(reader, kind, latents) for kind in ("full-attention", "sliding-window")[:sections])
    if reader.remaining:
        more = "recurrent states, an indexer's keys or other caches, which kvpack does not read"
        more = more if sections > 1 else f"sliding-window layers (name them with windows=, or --window), {more}"
        raise InvalidParameter(
            f"{reader.where}: {reader.remaining} bytes follow its {sum(len(section.keys) for section in result)} layers, perhaps of {more}"
        )
    return StateFile(ids, form, result)


def _check_header(reader: Reader) -> None:
    if reader.size < 8:
        raise InvalidParameter(f"{reader.where} is not a sequence state of llama.cpp: it has only {reader.size} bytes")
    magic, version = reader.read_numbers("II", "its magic and version")
    if magic != _MAGIC:
        problem = f"is {_OTHER_MAGICS[magic]}" if magic in _OTHER_MAGICS else f"begins with {magic:#010x}"
        raise InvalidParameter(
            f"{reader.where}: {problem}, but a sequence state of llama.cpp begins with {_MAGIC:#010x} ('ggsq'): "
            "save it with llama_state_seq_save_file, or use llama-server to save a slot"
        )
    if version != _VERSION:
        raise InvalidParameter(
            f"{reader.where} is a sequence state of version {version}, but kvpack reads only version {_VERSION}: save it with a "
            "llama.cpp that writes that version"
        )


def _read_ids(reader: Reader) -> tuple[bytes, str]:
    """Return the token ids and their encoding."""
    (count,) = reader.read_numbers("I", "the number of its token ids")
    ids = np.frombuffer(reader.read(4 * count, f"its {count} token ids"), "<i4")
    form = LIST
    if count and ids[0] == -1:
        # server_tokens::serialize: -1, a version, the number of ids, the ids, the number of media, the media.
        form, words = SERVER, ids.view("<u4")
        after = 3 + int(words[2]) if count >= 4 and words[1] == _SERVER_VERSION else count
        if after < count and words[after]:
            raise InvalidParameter(
                f"{reader.where}: its tokens include {words[after]} media, such as images, so token ids do not determine its cache: "
                "save a slot of text only"
            )
        if after != count - 1:
            raise InvalidParameter(
                f"{reader.where}: its {count} words of token ids begin like llama-server's, but are not in version {_SERVER_VERSION} "
                "of its format"
            )
        ids = ids[3:after]
    if len(ids) and ids.min() < 0:
        raise InvalidParameter(f"{reader.where}: token {int(ids.argmin())} has id {int(ids.min())}, but token ids must be at least 0")
    return ids.tobytes(), form


def _read_section(reader: Reader, kind: str, latents: bool) -> Section:
    (streams,) = reader.read_numbers("I", f"the streams of its {kind} layers")
    if not 0 < streams <= _MAX_STREAMS:
        raise InvalidParameter(f"{reader.where}: its {kind} layers have {streams} streams, expected 1 to {_MAX_STREAMS}")
    cells_read = None
    for stream in range(streams):
        (cells,) = reader.read_numbers("I", f"the cells of stream {stream}")
        if cells:
            if cells_read is not None:
                raise InvalidParameter(
                    f"{reader.where}: two of its streams hold cells, but kvpack reads one sequence: save one slot per file"
                )
            cells_read = _read_cells(reader, kind, latents, streams, cells)
    if cells_read is None:
        raise InvalidParameter(f"{reader.where}: its {kind} layers contain no tokens: save a slot that has processed a prompt")
    return cells_read


def _read_cells(reader: Reader, kind: str, latents: bool, streams: int, count: int) -> Section:
    cells = np.frombuffer(reader.read(count * _CELL.itemsize, f"the {count} cells of its {kind} layers"), _CELL)
    owners = cells["sequence"]
    strange = np.flatnonzero((cells["sequences"] != 1) | (owners != owners[0]) | (owners < 0) | (owners >= _MAX_STREAMS))
    if len(strange):
        sequences, sequence = (int(cells[field][strange[0]]) for field in ("sequences", "sequence"))
        raise InvalidParameter(
            f"{reader.where}: cell {strange[0]} of its {kind} layers belongs to {sequences} sequences (the first is "
            f"{sequence}), but every cell must belong to the same single sequence ({int(owners[0])} in this file), numbered below "
            f"{_MAX_STREAMS}: {_OTHER_CELLS}"
        )
    transposed, layers = reader.read_numbers("II", f"the counts of its {kind} layers")
    if transposed > 1 or layers > MAX_LAYERS:
        raise InvalidParameter(
            f"{reader.where} has {layers} {kind} layers and a transposed flag of {transposed}, expected at most {MAX_LAYERS} layers and "
            f"a flag of 0 or 1: {_OTHER_CELLS}"
        )
    keys = tuple(_read_block(reader, f"the keys of {kind} layer {number}", count, False) for number in range(layers))
    if layers and not reader.remaining and not latents:
        raise InvalidParameter(
            f"{reader.where} ends after its keys: it is truncated, or from a model with multi-head latent attention (MLA), which "
            "has only latents; for such a model, pass latents=True, or --latents"
        )
    value_layers = () if latents else range(layers)
    values = tuple(_read_block(reader, f"the values of {kind} layer {number}", count, bool(transposed)) for number in value_layers)
    return Section(streams, int(cells["sequence"][0]), cells["position"].copy(), bool(transposed), keys, values)


def _read_block(reader: Reader, description: str, cells: int, transposed: bool) -> CellBlock:
    ggml_type, size, *channels = reader.read_numbers("iII" if transposed else "iQ", f"the type and size of {description}")
    numbers = {number: dtype for dtype, (number, *_) in (*TYPES.items(), *QUANTIZED.items())}
    dtype = numbers.get(ggml_type)
    if ggml_type in _UNSUPPORTED:
        raise InvalidParameter(
            f"{reader.where}: {description} are in {_UNSUPPORTED[ggml_type]}, which no codec represents: save a slot whose cache types are "
            "f16, bf16, f32, q8_0, q5_0 or q4_0 (--cache-type-k, --cache-type-v)"
        )
    if dtype is None:
        raise InvalidParameter(f"{reader.where}: {description} have ggml type {ggml_type}, which is not supported: {_OTHER_CELLS}")
    quantized = QUANTIZED.get(dtype)
    element_bytes = quantized.size if quantized else TYPES[dtype][1]
    if (transposed and (quantized or size != element_bytes)) or not size or size % element_bytes:
        unit = "value" if transposed else "cell"
        expected = f"a positive multiple of {element_bytes} for {dtype}"
        if transposed:
            expected = "values that are not quantized, because they are transposed" if quantized else f"{element_bytes} for {dtype}"
        raise InvalidParameter(f"{reader.where}: {description} have {size} bytes per {unit}, expected {expected}")
    row = size * channels[0] if transposed else size
    if not row:
        raise InvalidParameter(f"{reader.where}: {description} have no channels")
    return CellBlock(dtype, row // element_bytes * (BLOCK if quantized else 1), reader.skip(cells * row, description))


def pieces(file: StateFile, data: list[list[memoryview]]) -> list[memoryview]:
    """Return the bytes of ``file``, for which new offsets are computed.

    ``data`` contains, for each section, the bytes of all keys and then of all values.
    """
    ids = np.frombuffer(file.ids, "<u4")
    if file.ids_form == SERVER:
        ids = np.concatenate([np.array([2**32 - 1, _SERVER_VERSION, len(ids)], "<u4"), ids, np.zeros(1, "<u4")])
    result: list[bytes | memoryview] = [struct.pack("<III", _MAGIC, _VERSION, len(ids)), ids.astype("<u4").tobytes()]
    for section, blocks in zip(file.sections, data, strict=True):
        # With several streams, each sequence is in the stream with the same index.
        stream = section.sequence if section.streams > 1 else 0
        cells = np.zeros(len(section.positions), _CELL)
        cells["position"], cells["sequences"], cells["sequence"] = section.positions, 1, section.sequence
        result += [struct.pack(f"<{stream + 2}I", section.streams, *[0] * stream, len(cells)), cells.tobytes()]
        result.append(struct.pack("<II", section.transposed, len(section.keys)))
        for number, (block, values) in enumerate(zip((*section.keys, *section.values), blocks, strict=True)):
            kind = QUANTIZED[block.dtype].number if block.dtype in QUANTIZED else TYPES[block.dtype][0]
            if section.transposed and number >= len(section.keys):
                result.append(struct.pack("<iII", kind, TYPES[block.dtype][1], block.channels))
            else:
                result.append(struct.pack("<iQ", kind, block.cell_bytes))
            result.append(values)
        result.append(bytes(4 * (section.streams - 1 - stream)))
    return [memoryview(piece).cast("B") for piece in result if len(piece)]
