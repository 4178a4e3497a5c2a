"""Tests of safetensors files from other writers: the official writer's files are read, and memory is bounded by the file size."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from kvpack import cli
from kvpack.cache import tensor_files
from kvpack.formats.errors import InvalidParameter, Truncated

if TYPE_CHECKING:
    from pathlib import Path


def read(path: Path) -> dict[str, torch.Tensor]:
    return tensor_files.read(str(path), lambda names, metadata: (names, metadata))[0]


def written(path: Path, header: Any, body: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + body)
    return path


def of(dtype: Any = "U8", shape: Any = (4,), begin: Any = 0, end: Any = 4, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end], **more}


def test_all_dtypes_of_the_official_writer_are_read(tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in tensor_files._DTYPES.values()}
    tensors |= {"empty": torch.zeros(2, 0, 5), "scalar": torch.tensor(7, dtype=torch.int64)}
    save_file(tensors, path, {"a": "b"})
    found, (names, metadata) = tensor_files.read(str(path), lambda names, metadata: (names, metadata))
    assert metadata == {"a": "b"}
    assert set(names) == set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize(
    ("header", "body"),
    [
        (b"", b""),
        (b"[]", b""),
        (b"[" * 3000, b""),
        (b" {}", b""),
        (b"{} x", b""),
        (b'{"\xff":1}', b""),
        (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', bytes(4)),
        (b'{"\\ud83d":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', bytes(4)),
        (b'{"__metadata__":{"a":"\\ud83d"}}', b""),
        ({"__metadata__": []}, b""),
        ({"__metadata__": {"a": 1}}, b""),
        ({"a": 5}, b""),
        ({"a": of(more=1)}, bytes(4)),
        ({"a": {"dtype": "U8", "shape": [4]}}, bytes(4)),
        ({"a": of("U9")}, bytes(4)),
        ({"a": of(shape=4)}, bytes(4)),
        ({"a": of(shape=(True,), end=1)}, bytes(1)),
        ({"a": of(shape=(4.0,))}, bytes(4)),
        ({"a": of(shape=(-4,))}, bytes(4)),
        ({"a": of(shape=(5,))}, bytes(4)),
        ({"a": of(begin=4, end=0)}, bytes(4)),
        ({"a": of(begin=1, end=5)}, bytes(5)),
        ({"a": of(end=5)}, bytes(5)),
        ({"a": of()}, bytes(3)),
        ({"a": of()}, bytes(5)),
        ({"a": of(), "b": of(begin=2, end=6)}, bytes(6)),
        ({"a": of(), "b": of(begin=0, end=4)}, bytes(4)),
        ({"a": of(), "b": of(begin=5, end=9)}, bytes(9)),
        ({"a": of(end=2**70, shape=(2**39, 2**31))}, b""),
    ],
)
def test_files_of_other_formats_are_refused(header: Any, body: bytes, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter):
        read(written(tmp_path / "in", header, body))


@pytest.mark.parametrize(
    ("header", "body", "message"),
    [
        ({"a": of(shape=(2**40, 0), end=0)}, b"", "each dimension may be at most"),
        ({"a": of(shape=(2**39, 2**39, 0), end=0)}, b"", "the product of its nonzero dimensions may be at most"),
        ({"a": of(shape=tuple([1] * 17), end=1)}, b"x", "17 dimensions, but at most 16 are supported"),
        (b"{" + b" " * tensor_files.MAX_HEADER_BYTES + b"}", b"", "the header has 4194306 bytes, but at most 4194304 are allowed"),
    ],
)
def test_sizes_are_bounded(header: Any, body: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=message):
        read(written(tmp_path / "in", header, body))


@pytest.mark.parametrize("left", [0, 7, 100, 3000, 5000])
def test_a_file_truncated_during_reading_is_refused(left: int, tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    save_file({"a": torch.zeros(500), "b": torch.zeros(1000)}, path)
    with pytest.raises(Truncated, match=r"in\.safetensors: had 6\d\d\d bytes when it was opened, but ended at byte"):
        tensor_files.read(str(path), lambda *_: os.truncate(path, left))


def test_a_file_may_be_truncated_after_reading(tmp_path: Path) -> None:
    """Without the check, access to the memory mapping would kill the process."""
    path = tmp_path / "in.safetensors"
    save_file({"a": torch.ones(100_000)}, path)
    tensor = read(path)["a"]
    os.truncate(path, 0)
    assert tensor.sum() == 100_000


def test_pack_refuses_a_file_truncated_during_packing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.safetensors"
    save_file({"0.k": torch.randn(1, 1, 400, 64), "0.v": torch.randn(1, 1, 400, 64)}, path)
    reading = tensor_files._read_tensor

    def cutting(where: str, *rest: Any) -> torch.Tensor:
        os.truncate(path, 8192)
        return reading(where, *rest)

    monkeypatch.setattr(tensor_files, "_read_tensor", cutting)
    assert cli.main(["pack", str(path), str(tmp_path / "out"), "--recipe", "kivi-2"]) == 1
    assert "another process truncated it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_pack_refuses_more_layers_than_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each layer that the metadata declares would take memory, even without a tensor."""
    path = tmp_path / "in.safetensors"
    note = json.dumps({"start": {"range": 0, "layers": [0] * 5000}, "model": {}})
    save_file({"0.k": torch.zeros(1, 1, 4, 8), "0.v": torch.zeros(1, 1, 4, 8)}, path, {"kvpack.unpacked": note})
    assert cli.main(["pack", str(path), str(tmp_path / "out"), "--recipe", "raw"]) == 2
    assert "has 5000 layers, expected at most 4096" in capsys.readouterr().err
