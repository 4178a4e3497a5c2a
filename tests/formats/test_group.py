"""Tests of the affine codec ``group``: error bounds, layouts, special values, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpack.formats.errors import InvalidParameter, InvalidPayload, ValueTooLarge
from kvpack.formats.group import AXES, CENTERS, GROUP_SIZES, TOKEN_SCALES, Group
from kvpack.formats.streams import DTYPE_BYTES, Layout
from support.strategies import check_round_trip, codecs, contents, create, tensors

HEAD_DIMS = [64, 80, 96, 112, 128, 192, 256]


def group(dim: int = 64, **words: Any) -> Group:
    codec = create("group", dim, words.pop("side", "k"), **{name: str(value) for name, value in ({"b": 2} | words).items()})
    assert isinstance(codec, Group)
    return codec


def stored_bytes(layout: dict[str, Layout]) -> int:
    return sum(DTYPE_BYTES[entry.dtype] * int(numpy.prod(entry.shape)) for entry in layout.values())


@settings(max_examples=40)
@given(st.data())
def test_values_survive_a_round_trip_within_the_bound(data: st.DataObject) -> None:
    codec = data.draw(codecs("group"))
    check_round_trip(codec, data.draw(tensors(codec.dim)))


@pytest.mark.scenario
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dim", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("bits", range(1, 9), ids=lambda bits: f"{bits} bits")
def test_every_width_supports_every_head_dim(dim: int, bits: int, axis: str) -> None:
    for kind, tokens in (("outliers", 37), ("gaussian", 1), ("gaussian", 0)):
        x = contents(kind, (1, 2, tokens, dim), seed=bits)
        assert check_round_trip(group(dim, b=bits, axis=axis, rotation="signed-hadamard", seed=bits), x)


@pytest.mark.parametrize("token_scale", TOKEN_SCALES)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", range(1, 9), ids=lambda bits: f"{bits} bits")
def test_decoding_is_exact_for_any_valid_streams(bits: int, axis: str, token_scale: str) -> None:
    codec = group(80, b=bits, axis=axis, token_scale=token_scale)
    random = numpy.random.default_rng(bits)
    codes = random.integers(0, 2**bits, (1, 2, 45, 80))
    rows = (2, 80) if axis == "token" else (45, 3)
    # Any finite binary16: subnormal, negative, largest.
    halves = random.integers(0, 0x7C00, (1, 2, *rows, 2)) | random.integers(0, 2, (1, 2, *rows, 2)) << 15
    pairs = halves.astype(numpy.uint16).view(numpy.float16)
    streams = codec.pack("codes", torch.from_numpy(codes)) | {"scales": torch.from_numpy(pairs)}
    spread = numpy.repeat(pairs.astype(numpy.float64), 32, 2 if axis == "token" else 3)[:, :, :45, :80]
    # Exact in binary64, then one rounding: the product of a code and a scale has at most 19 bits.
    expected = ((codes - (2**bits - 1) / 2) * spread[..., 0] + spread[..., 1]).astype(numpy.float32)
    if token_scale != "none":
        shape = codec.layout(1, 2, 45)["token_scale"].shape
        factor = random.lognormal(0, 3, shape).astype(numpy.float16 if token_scale.startswith("fp16") else numpy.float32)
        streams["token_scale"] = torch.from_numpy(factor)
        expected = expected * factor.astype(numpy.float32)[..., None]
    assert numpy.array_equal(codec.decode_frame(streams).numpy(), expected)


@pytest.mark.parametrize(
    ("words", "bits"),
    [
        pytest.param({"b": 2, "side": "k"}, 3.0, id="KIVI keys"),
        pytest.param({"b": 2, "side": "v"}, 3.0, id="KIVI values"),
        pytest.param({"b": 2, "side": "k", "token_scale": "fp16"}, 3.0 + 16 / 1024, id="OScaR keys"),
        pytest.param({"b": 2, "side": "k", "token_scale": "fp16-per-head"}, 3.0 + 16 / 128, id="OScaR keys, a scale per head"),
        pytest.param({"b": 3, "side": "v"}, 4.0, id="3 bits"),
        pytest.param({"b": 4, "side": "v", "g": 128}, 4.25, id="4 bits in groups of 128"),
    ],
)
def test_stored_bits_match_the_formula(words: dict[str, Any], bits: float) -> None:
    layout = group(128, **words).layout(1, 8, 4096)
    assert 8 * stored_bytes(layout) / (8 * 4096 * 128) == bits


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param({"b": 2}, {"codes.0": Layout("U16", (2, 3, 33, 10)), "scales": Layout("F16", (2, 3, 2, 80, 2), 32)}, id="tokens"),
        pytest.param(
            {"b": 3, "side": "v", "token_scale": "fp32"},
            {
                "codes.0": Layout("U16", (2, 3, 33, 10)),
                "codes.1": Layout("U16", (2, 3, 33, 5)),
                "scales": Layout("F16", (2, 3, 33, 3, 2)),
                "token_scale": Layout("F32", (2, 1, 33)),
            },
            id="channels",
        ),
        pytest.param(
            {"b": 2, "token_scale": "fp16-per-head"},
            {
                "codes.0": Layout("U16", (2, 3, 33, 10)),
                "scales": Layout("F16", (2, 3, 2, 80, 2), 32),
                "token_scale": Layout("F16", (2, 3, 33)),
            },
            id="scales per head",
        ),
    ],
)
def test_the_layout_matches_the_specification(words: dict[str, Any], expected: dict[str, Layout]) -> None:
    codec = group(80, **words)
    assert codec.layout(2, 3, 33) == expected
    assert list(codec.layout(2, 3, 33)) == list(expected)
    assert codec.group_tokens == (32 if codec.axis == "token" else 1)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", GROUP_SIZES, ids=str)
def test_a_partial_last_group_has_its_own_scale(size: int, axis: str) -> None:
    codec = group(80, g=size, axis=axis)
    x = contents("gaussian", (1, 2, 2 * size + 5, 80), seed=1)
    whole = codec.encode(x)["scales"]
    if axis == "token":
        assert torch.equal(whole[:, :, 2:], codec.encode(x[:, :, 2 * size :])["scales"])
    else:
        full = 80 // size * size
        rest = replace(codec, dim=80 - full, fields=(("codes", 1),)).encode(x[..., full:])["scales"] if full < 80 else whole[:, :, :, :0]
        assert torch.equal(whole[:, :, :, 80 // size :], rest)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 65504.0, 2.0**-24], ids=str)
def test_a_constant_group_decodes_exactly(value: float, axis: str) -> None:
    x = torch.full((1, 1, 33, 40), value)
    codec = group(40, axis=axis)
    streams = codec.encode(x)
    assert not streams["scales"][..., 0].any()
    assert torch.equal(codec.decode(streams), x)


@pytest.mark.parametrize("axis", AXES)
def test_a_zero_center_is_symmetric_and_keeps_the_largest_magnitude(axis: str) -> None:
    x = contents("gaussian", (1, 2, 33, 80), seed=4)
    for bits in range(1, 9):
        symmetric, middle = (group(80, b=bits, g=8, axis=axis, centre=center) for center in reversed(CENTERS))
        assert symmetric == middle
        streams = symmetric.encode(x)
        assert not streams["scales"][..., 1].any()
        decoded = symmetric.decode(streams)
        # A value halfway between two steps may go to either.
        torch.testing.assert_close(symmetric.decode(symmetric.encode(-x)), -decoded, rtol=0, atol=1e-6)
        largest = x.abs().amax().item()
        assert decoded.flatten()[x.abs().flatten().argmax()].abs().item() == pytest.approx(largest, rel=2.0**-10)
        if bits > 1:
            assert (decoded - x).square().mean() > (middle.decode(middle.encode(x)) - x).square().mean()


@pytest.mark.parametrize("token_scale", TOKEN_SCALES)
@pytest.mark.parametrize("rotation", ["none", "hadamard", "signed-hadamard"])
def test_zeros_decode_to_zeros(rotation: str, token_scale: str) -> None:
    codec = group(80, rotation=rotation, token_scale=token_scale)
    x = contents("gaussian", (1, 2, 40, 80), seed=3)
    x[:, :, 7] = 0.0
    assert not codec.decode(codec.encode(torch.zeros_like(x))).any()
    channels = replace(codec, axis="channel")
    assert not channels.decode(channels.encode(x))[:, :, 7].any()


@pytest.mark.parametrize(
    ("words", "value", "message"),
    [
        pytest.param({}, 70000.0, r"center of a group at \[0, 0, 0, 5\] is 70000, but the largest float16 value is 65504", id="centre"),
        pytest.param({"b": 1}, None, r"scale of a group at \[0, 0, 0, 5\] is 80000, but the largest float16 value is 65504", id="scale"),
        pytest.param({"token_scale": "fp16"}, 1e7, r"token scale at \[0, 0, 0\] is .* largest float16 value is 65504", id="token scale"),
        pytest.param({"token_scale": "fp32"}, 3e38, r"token scale at \[0, 0, 0\] is inf, but the largest float32 value is", id="square"),
    ],
)
def test_a_value_that_is_too_large_is_refused(words: dict[str, Any], value: float | None, message: str) -> None:
    x = torch.zeros(1, 1, 16, 40)
    x[..., 5] = 40000.0 * torch.tensor([1.0, -1.0] * 8) if value is None else value
    with pytest.raises(ValueTooLarge, match=message):
        group(40, **words).encode(x)


def test_a_token_scale_is_the_root_mean_square_over_all_heads() -> None:
    codec = group(64, token_scale="fp16", rotation="hadamard", norm_rule="norm")
    x = contents("mixed", (2, 3, 9, 64), seed=5)
    scale = codec.encode(x)["token_scale"]
    assert scale.shape == (2, 1, 9)
    expected = x.double().square().mean((1, 3)).sqrt()
    assert ((scale[:, 0] - expected).abs() <= expected * 2.0**-10 + 2.0**-24).all()


def test_token_scales_per_head_use_only_that_head() -> None:
    words = {"token_scale": "fp16", "rotation": "hadamard"}
    x = contents("mixed", (2, 3, 9, 64), seed=5)
    together = group(64, **words | {"token_scale": "fp16-per-head"}).encode(x)
    for head in range(3):
        alone = group(64, **words).encode(x[:, head : head + 1])
        assert all(torch.equal(stream[:, head : head + 1], alone[name]) for name, stream in together.items())


def test_with_scales_per_head_a_large_head_does_not_affect_the_others() -> None:
    x = contents("gaussian", (1, 4, 64, 64), seed=6)
    x[:, 2, 9] *= 7
    errors = {}
    for token_scale in ("fp16", "fp16-per-head"):
        codec = group(64, token_scale=token_scale, rotation="hadamard")
        lost, others = codec.decode(codec.encode(x)) - x, [0, 1, 3]
        errors[token_scale] = float(lost[:, others, 9].norm() / x[:, others, 9].norm())
        usual = float(lost.norm() / x.norm())
    assert errors["fp16-per-head"] < 1.15 * usual
    assert errors["fp16"] > 2 * usual


def test_token_scales_protect_tokens_from_large_tokens() -> None:
    x = contents("gaussian", (1, 2, 64, 64), seed=6)
    x[:, :, 3] *= 300
    errors = {}
    for token_scale in ("none", "fp16"):
        codec = group(64, token_scale=token_scale, rotation="hadamard")
        errors[token_scale] = (codec.decode(codec.encode(x)) - x)[:, :, 10].square().mean().item()
    assert errors["fp16"] < errors["none"] / 20


@pytest.mark.parametrize("axis", AXES)
def test_gaussian_values_meet_the_expected_error(axis: str) -> None:
    x = contents("gaussian", (1, 4, 1024, 128), seed=7)
    expected = {2: 0.1545, 3: 0.0283, 4: 0.0061}
    for bits, error in expected.items():
        codec = group(128, b=bits, axis=axis)
        assert (codec.decode(codec.encode(x)) - x).square().mean().item() == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize(
    ("stream", "place", "bits", "message"),
    [
        pytest.param("scales", (0, 1, 0, 7, 1), 0x7E00, r"^layers\[0\]\.k\.scales: the value at \[0, 1, 0, 7, 1\] is nan", id="NaN"),
        pytest.param("scales", (0, 0, 1, 0, 0), 0xFC00, r"\.scales: the value at \[0, 0, 1, 0, 0\] is -inf", id="infinite scale"),
        pytest.param("token_scale", (0, 0, 3), 0x7C00, r"\.token_scale: the value at \[0, 0, 3\] is inf", id="infinite token scale"),
        pytest.param("codes.0", (0, 0, 2, 1), 0x1000, r"\.codes, plane 0: spare bits of word at \[0, 0, 2, 1\] is 4096", id="spare bit"),
    ],
)
def test_bytes_that_no_writer_produces_are_refused(stream: str, place: tuple[int, ...], bits: int, message: str) -> None:
    codec = replace(group(40, token_scale="fp16"), fields=(("codes", 6),))
    arrays = {name: value.numpy().copy() for name, value in codec.encode(contents("gaussian", (1, 2, 33, 40), seed=2)).items()}
    codec.check(arrays, "layers[0].k")
    arrays[stream].view(numpy.uint16)[place] = bits
    with pytest.raises(InvalidPayload, match=message):
        codec.check(arrays, "layers[0].k")


VALID = group(64).params()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"dim": 0}, "dim is 0, expected 1 to 1024", id="dim below"),
        pytest.param({"dim": 1025}, "dim is 1025, expected 1 to 1024", id="dim above"),
        pytest.param({"bits": 0}, "bits is 0, expected 1 to 8", id="bits below"),
        pytest.param({"bits": 9}, "bits is 9, expected 1 to 8", id="bits above"),
        pytest.param({"axis": "head"}, "axis is 'head', expected one of token, channel", id="axis"),
        pytest.param({"size": 48}, "size is 48, expected one of 4, 8, 16, 32, 64, 128", id="size"),
        pytest.param({"rotation_kind": "dct"}, "rotation_kind is 'dct', expected one of none, hadamard, signed-hadamard", id="rotation"),
        pytest.param({"rotation_kind": "hadamard", "dim": 72}, "no Hadamard rotation for 72 channels", id="rotation of a head dim"),
        pytest.param({"seed": -1}, "seed is -1", id="seed below"),
        pytest.param({"seed": 2**64}, "seed is 18446744073709551616", id="seed above"),
        pytest.param({"token_scale": "bf16"}, "token_scale is 'bf16', expected one of none, fp16, fp32", id="token scale"),
        pytest.param({"fields": {}}, "fields must name the streams codes, but names none", id="no fields"),
        pytest.param({"fields": {"codes": 8, "signs": 8}}, "must name the streams codes, but names codes, signs", id="too many fields"),
        pytest.param({"fields": {"codes": 0}}, "the number of fields is 0, expected 1 to 128", id="zero fields"),
        pytest.param({"fields": {"codes": 65}}, "at most 16 bytes", id="fields too wide"),
        pytest.param({"fields": {"codes": True}}, "map from stream name to integer", id="fields of a wrong type"),
        pytest.param({"bits": 2.0}, "bits is of type float, expected int", id="wrong type"),
        pytest.param({"bits": True}, "bits is of type bool, expected int", id="bool for int"),
        pytest.param({"extra": 1}, "unknown parameters extra", id="unknown name"),
    ],
)
def test_invalid_parameters_are_refused(change: dict[str, Any], message: str) -> None:
    params = {name: value for name, value in (VALID | change).items() if name != "id"}
    with pytest.raises(InvalidParameter, match=message):
        Group.from_params(params)


def test_a_missing_parameter_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="codec group: missing parameters seed"):
        Group.from_params({name: value for name, value in VALID.items() if name not in ("id", "seed")})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param({}, "codec group needs b=<1 to 8>", id="no bits"),
        pytest.param({"b": "9"}, "group:b is '9', expected an integer from 1 to 8", id="bits"),
        pytest.param({"b": "two"}, "group:b is 'two', expected an integer from 1 to 8", id="not a number"),
        pytest.param({"b": "2", "g": "48"}, "group:g is '48', expected one of 4, 8, 16, 32, 64, 128", id="size"),
        pytest.param({"b": "2", "centre": "low"}, "group:centre is 'low', expected one of middle, zero", id="centre"),
        pytest.param({"b": "2", "bits": "2"}, "codec group has no option 'bits'; its options are b, g, axis", id="unknown option"),
    ],
)
def test_invalid_options_are_refused(words: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        create("group", 64, **words)
