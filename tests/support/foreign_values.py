"""Values that are invalid for every argument, and a check of how functions handle them."""

from __future__ import annotations

import warnings
from collections import UserList
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import kvpack
from kvpack.errors import KvpackError
from support.caches import random_pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PAIRS = random_pairs(2, 40)
CACHE = kvpack.pack(PAIRS, "kivi-4")
IDENTITY = kvpack.Identity("m", "raw")
GEOMETRY = kvpack.pages.PageGeometry(2, 1, 16, 64, 64)


class _UnrelatedObject:
    """An object that has no attribute of a valid argument."""


class _RaisingObject:
    """An object whose attributes, all those that duck typing looks for, raise errors when they are used."""

    shape, dtype, device, layers, packed, ndim = (1,), "float", "cpu", 3, None, 2

    def __len__(self) -> int:
        return 2


def _prototypes() -> dict[str, torch.Tensor]:
    """Return tensors of the kinds about which PyTorch warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "a compressed sparse tensor": torch.ones(4, 4).to_sparse_csr(),
            "a quantized tensor": torch.quantize_per_tensor(torch.randn(1, 4, 3, 64), 0.1, 0, torch.qint8),
            "a nested tensor": torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged),
        }


FOREIGN: dict[str, Any] = {
    "None": None,
    "a bool": True,
    "zero": 0,
    "a negative integer": -3,
    "an integer": 7,
    "a huge integer": 2**70,
    "a huge negative integer": -(2**70),
    "a float": 0.5,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "a complex number": 1j,
    "an empty string": "",
    "text": "octopus",
    "a string with a null byte": "a\0b",
    "a surrogate": "\udc80",
    "an unknown device name": "tpu:0",
    "mps": "mps",
    "xpu": "xpu",
    "cuda:99": "cuda:99",
    "meta": "meta",
    "bytes": b"abc",
    "file contents": b"\x80\0\0\0" * 300,
    "a path": Path("nowhere/file"),
    "a class": int,
    "a function": len,
    "an object": _UnrelatedObject(),
    "an object that raises": _RaisingObject(),
    "an empty list": [],
    "an empty tuple": (),
    "a list of None": [None],
    "a list of integers": [1, 2],
    "a list of floats": [0.5],
    "a list of strings": ["a", "b"],
    "a list of lists": [[1], [2, 3]],
    "a list of objects": [_UnrelatedObject(), _UnrelatedObject()],
    "an iterator": iter([1, 2]),
    "a UserList": UserList([0, 1]),
    "a set": {1, 2},
    "a dict": {"a": 1},
    "a dict of integers": {1: 2},
    "a range": range(3),
    "a slice": slice(None),
    "an array": np.arange(4.0),
    "an array of objects": np.array([None, "a"], dtype=object),
    "a NumPy integer": np.int64(1),
    "a NumPy float": np.float32(0.5),
    "a tensor": torch.randn(1, 2, 40, 64),
    "an empty tensor": torch.empty(0),
    "a scalar tensor": torch.tensor(3),
    "a tensor of integers": torch.arange(4),
    "a boolean tensor": torch.tensor([True, False]),
    "a complex tensor": torch.zeros(1, 2, 40, 64, dtype=torch.complex64),
    "a double tensor": torch.zeros(1, 2, 40, 64, dtype=torch.float64),
    "a float8 tensor": torch.zeros(1, 2, 40, 64).to(torch.float8_e4m3fn),
    "a meta tensor": torch.empty(1, 4, 3, 64, device="meta"),
    "a meta tensor of ids": torch.empty(300, dtype=torch.int64, device="meta"),
    "a sparse tensor": torch.ones(1, 4, 3, 64).to_sparse(),
    "a sparse tensor of ids": torch.ones(300, dtype=torch.int64).to_sparse(),
    **_prototypes(),
    "a tensor without tokens": torch.randn(1, 2, 0, 64),
    "a tensor without sequences": torch.randn(0, 2, 3, 64),
    "a tensor without channels": torch.randn(1, 2, 3, 0),
    "a parameter": torch.nn.Parameter(torch.randn(1, 4, 3, 64)),
    "a module": torch.nn.Linear(2, 2),
    "a dtype": torch.float32,
    "an integer dtype": torch.int8,
    "a complex dtype": torch.complex64,
    "a float8 dtype": torch.float8_e5m2,
    "a device": torch.device("cpu"),
    "a meta device": torch.device("meta"),
    "a cache": CACHE,
    "a layer": CACHE[0],
    "a side": CACHE[0].k,
    "an empty cache": CACHE[:, :0],
    "a recipe": kvpack.Recipe("octopus-3"),
    "an identity": IDENTITY,
    "a geometry": GEOMETRY,
    "inputs": kvpack.Inputs(),
    "a live cache": kvpack.LiveCache("raw", layers=1),
    "pairs": PAIRS,
    "pairs of arrays": [(np.zeros((1, 2, 40, 64), np.float32),) * 2] * 2,
    "a recipe with a comma": "octopus-3,tail=32",
}


def foreign_errors(call: Callable[[Any], Any], values: Mapping[str, Any]) -> list[str]:
    """Call ``call`` with each of ``values`` and return the failures by name.

    A failure is an exception other than a KvpackError, or an empty or overlong message.
    """
    found = []
    for what, value in values.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                call(value)
            except KvpackError as error:
                if not str(error).strip() or len(str(error)) > 2000:
                    found.append(f"{what}: the message {str(error)!r:.100} of {len(str(error))} characters")
            except Exception as error:
                found.append(f"{what}: {type(error).__name__}: {str(error).splitlines()[:1]}")
    return found
