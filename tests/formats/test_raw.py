"""Tests of raw: values are preserved bit for bit, and never silently become infinite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpack.formats.errors import InvalidParameter, ValueTooLarge
from kvpack.formats.raw import Raw
from kvpack.formats.streams import Layout
from support.strategies import check_round_trip, codecs, create, tensors

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

SPECIAL_BITS = {
    "bf16": [0x0000, 0x8000, 0x0001, 0x7F7F, 0x7F80, 0xFF80, 0x7F81, 0xFFC1, 0x7FFF],
    "fp16": [0x0000, 0x8000, 0x0001, 0x7BFF, 0x7C00, 0xFC00, 0x7C01, 0xFE01, 0x7FFF],
    "fp32": [0x00000000, 0x80000000, 0x00000001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00001, 0x7FFFFFFF],
}


@given(st.data())
def test_values_survive_a_round_trip_within_the_bound(data: st.DataObject) -> None:
    codec = data.draw(codecs("raw"))
    check_round_trip(codec, data.draw(tensors(codec.dim)))


@pytest.mark.parametrize("dtype", TORCH)
def test_values_of_the_stored_dtype_are_stored_bit_for_bit(dtype: str) -> None:
    size = torch.empty(0, dtype=TORCH[dtype]).element_size()
    stored = b"".join(bits.to_bytes(size, "little") for bits in SPECIAL_BITS[dtype] * 8)
    x = torch.frombuffer(bytearray(stored), dtype=TORCH[dtype]).reshape(1, 2, 4, 9)
    codec = Raw(9, dtype)
    values = codec.encode(x)["values"]
    assert values.contiguous().view(torch.uint8).numpy().tobytes() == stored
    assert torch.equal(torch.isnan(codec.decode({"values": values})), torch.isnan(x))


@pytest.mark.parametrize("dtype", TORCH)
def test_binary32_nan_and_infinity_are_kept(dtype: str) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1.0] * 20).reshape(1, 1, 20, 5)
    codec = Raw(5, dtype)
    decoded = codec.decode(codec.encode(x))
    assert torch.equal(torch.isnan(decoded), torch.isnan(x))
    kept = ~torch.isnan(x)
    assert decoded[kept].view(torch.int32).tolist() == x[kept].view(torch.int32).tolist()


@pytest.mark.parametrize(("dtype", "value", "largest"), [("fp16", 65520.0, "65504"), ("fp16", -1e30, "65504"), ("bf16", 3.4e38, "3.38953")])
def test_a_finite_value_that_would_become_infinite_is_refused(dtype: str, value: float, largest: str) -> None:
    x = torch.zeros(1, 2, 3, 4)
    x[0, 1, 2, 3] = value
    x[0, 0, 0, 0] = float("inf")
    with pytest.raises(ValueTooLarge, match=rf"at \[0, 1, 2, 3\] is .* largest {dtype} value is {largest}.*: choose a wider dtype"):
        Raw(4, dtype).encode(x)


def test_values_whose_sum_overflows_are_stored() -> None:
    x = torch.full((1, 1, 8, 4), 60000.0)
    assert torch.isfinite(Raw(4, "fp16").encode(x)["values"]).all()
    assert torch.isfinite(Raw(4, "fp32").encode(x * 1e33)["values"]).all()


@pytest.mark.parametrize(("dtype", "stored", "bits"), [("bf16", "BF16", 16.0), ("fp16", "F16", 16.0), ("fp32", "F32", 32.0)])
def test_the_layout_matches_the_specification(dtype: str, stored: str, bits: float) -> None:
    codec = create("raw", 80, dtype=dtype)
    assert codec.layout(2, 3, 5) == {"values": Layout(stored, (2, 3, 5, 80))}
    assert codec.nominal_bits == bits
    assert codec.group_tokens == 1
    assert codec.packings() == {}


@pytest.mark.parametrize("dim", [0, 1025], ids=str)
def test_a_head_dim_out_of_range_is_refused(dim: int) -> None:
    with pytest.raises(InvalidParameter, match=f"codec raw: dim is {dim}, expected 1 to 1024"):
        Raw(dim, "bf16")


def test_unknown_words_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="raw:dtype is 'fp8', expected one of bf16, fp16, fp32"):
        create("raw", 64, dtype="fp8")
    with pytest.raises(InvalidParameter, match="codec raw has no option 'b'; its options are dtype"):
        create("raw", 64, b="2")
    with pytest.raises(InvalidParameter, match="codec raw: dtype is 'fp8', expected one of bf16, fp16, fp32"):
        Raw(64, "fp8")
