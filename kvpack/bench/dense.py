"""Baselines without kvpack on the CPU: files of dense bfloat16 values, and attention over dense values."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
import zstandard
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Callable

    Tensors = dict[str, torch.Tensor]


def matmul_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute attention of queries ``[batch, q_head, 1, dim]`` with matrix products. In PyTorch, this is fastest for one bf16 query."""
    batch, heads, _, dim = k.shape
    scores = q.view(batch, heads, -1, dim) @ k.transpose(-1, -2)
    return torch.softmax(scores.float() * dim**-0.5, -1).to(k.dtype) @ v


class DenseFormat(NamedTuple):
    """A file format for dense tensors. ``read`` returns the tensors that ``write`` wrote, in new memory."""

    name: str
    write: Callable[[Tensors, str], object]
    read: Callable[[str], Tensors]


def _load_and_clone(path: str) -> Tensors:
    return {name: x.clone() for name, x in load_file(path).items()}


def _save(tensors: Tensors, path: str) -> None:
    torch.save(tensors, path)


def _write_tensors(tensors: Tensors, path: str) -> None:
    with open(path, "wb") as file:
        pickle.dump(tensors, file, protocol=pickle.HIGHEST_PROTOCOL)


def _unpickle(path: str) -> Tensors:
    with open(path, "rb") as file:
        result: Tensors = pickle.load(file)
    return result


def _compress(tensors: Tensors, path: str) -> None:
    """Write each tensor to its own file, as one zstd frame."""
    os.makedirs(path, exist_ok=True)
    for name, x in tensors.items():
        with open(os.path.join(path, name), "wb") as file:
            file.write(zstandard.ZstdCompressor().compress(x.contiguous().view(torch.int16).numpy().data))


def _decompress(path: str) -> Tensors:
    """Return the tensors that ``_compress`` wrote, flattened."""
    result = {}
    for name in os.listdir(path):
        with open(os.path.join(path, name), "rb") as file:
            values = numpy.frombuffer(bytearray(zstandard.ZstdDecompressor().decompress(file.read())), numpy.int16)
        result[name] = torch.from_numpy(values).view(torch.bfloat16)
    return result


FORMATS = (
    DenseFormat("safetensors", save_file, _load_and_clone),
    DenseFormat("torch.save", _save, torch.load),
    DenseFormat("pickle", _write_tensors, _unpickle),
    DenseFormat("zstd", _compress, _decompress),
)
"""File formats for dense tensors. The first one, safetensors, is the reference."""


def stored_bytes(path: str) -> int:
    """Return the size of a file, or the total size of the files in a folder."""
    if os.path.isdir(path):
        return sum(entry.stat().st_size for entry in os.scandir(path))
    return os.path.getsize(path)
