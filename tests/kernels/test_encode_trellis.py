"""The Triton search for trellis paths finds the same paths as formats/, in the interpreter anywhere and on CUDA devices.

interpreter.py describes which process runs which of these tests.
"""

from __future__ import annotations

import pytest
import torch

from kvpack.formats import trellis
from kvpack.kernels import codecs
from kvpack.kernels.encode import encode
from kvpack.kernels.encode import trellis as kernel
from support.interpreter import DEVICE
from support.strategies import contents, create, with_poisoned_padding

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize(("bits", "state_bits", "dim"), [(1, 10, 32), (2, 8, 48), (3, 10, 16), (4, 8, 16)])
def test_the_kernel_finds_the_same_path_as_formats(bits: int, state_bits: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs include zeros, values beyond the table, and equal costs. A program searches several rows with the memory for one."""
    x = contents("gaussian", (5, dim), bits) * dim**-0.5
    x[1], x[2, ::3] = 0, 3.0
    x = x.to(DEVICE)
    table = trellis.window_values(trellis.unit_table(dim, bits, state_bits), x.device)
    monkeypatch.setattr(kernel, "BACK_BYTES", 2 * dim << state_bits - bits)
    found = kernel.nearest_path(x, table, bits)
    assert torch.equal(found.long(), trellis.nearest_path(x, table, bits))


@pytest.mark.usefixtures("uninitialized_is_poisoned")
@pytest.mark.parametrize(("words", "dtype"), [("norm=fp16", torch.bfloat16), ("norm=log8,norm_rule=norm", torch.float32)])
def test_streams_equal_those_of_formats(words: str, dtype: torch.dtype) -> None:
    codec = create("trellis", 16, "k", b="2", states="256", **dict(word.split("=") for word in words.split(",")))
    x = contents("gaussian", (2, 2, 3, 16), 0).to(dtype)
    with torch.device(DEVICE):
        given = with_poisoned_padding(x)
        streams = encode.encode(codec, given)
    assert streams is not None
    expected = codec.encode(given.float())
    assert list(streams) == list(codec.layout(2, 2, 3))
    for name, stream in expected.items():
        # Rows that are rotated together are rounded alike.
        assert torch.equal(streams[name].float(), stream.float()), name


def test_engine_pages_are_left_to_formats() -> None:
    codec = create("trellis", 16, "k", b="2")
    x = torch.zeros(1, 1, 2, 16)
    encoding = encode.prepare(codec, x)
    assert encoding is not None
    output = encoding.run.args[2]._replace(origins=object())  # type: ignore[attr-defined]
    assert not codecs.codec_kernels(codec).encode(codec, x, output)
