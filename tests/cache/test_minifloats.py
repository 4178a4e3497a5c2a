"""Tests of engines' fp8, mxfp8, mxfp4 and nvfp4 caches, which are imported and exported bit for bit, saved, and attended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from kvpack.formats.errors import InvalidParameter, InvalidType

if TYPE_CHECKING:
    from pathlib import Path

E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
E2M1 = getattr(torch, "float4_e2m1fn_x2", None)
BATCH, HEADS, TOKENS, DIM = 2, 3, 37, 64


def random_values(seed: int, dim: int = DIM) -> torch.Tensor:
    return torch.randn(BATCH, HEADS, TOKENS, dim, generator=torch.Generator().manual_seed(seed))


def packed_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return e2m1 values packed two per byte, with even channels in the low bits.

    Each value is found by searching all 16 values of OCP MX, table 5.
    """
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = (x[..., None] - table).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def values_of_e2m1(packed: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    return table[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()]


def engine_side(name: str, seed: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the import arguments for one format, created with torch only, and the values that they represent as binary64."""
    x = random_values(seed)
    if name.startswith("fp8"):
        dtype = torch.float8_e5m2 if "e5m2" in name else torch.float8_e4m3fn
        axes = {"tensor": (0, 1, 2, 3), "head": (0, 2, 3), "token": (3,)}[name.split()[-1]]
        scale = x.abs().amax(axes, keepdim=True) / torch.finfo(dtype).max
        scale = scale.to(torch.float16) if name.startswith("fp8 fp16") else scale
        elements = (x / scale.float()).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
        shapes = {"tensor": (), "head": (HEADS,), "token": (BATCH, HEADS, TOKENS)}
        return {"elements": elements, "scales": scale.reshape(shapes[name.split()[-1]])}, elements.double() * scale.double()
    if name == "nvfp4":
        unit = x.abs().amax() / (6 * 448)
        blocks = x.unflatten(-1, (-1, 16))
        scales = (blocks.abs().amax(-1) / 6 / unit).to(torch.float8_e4m3fn)
        elements = packed_e2m1((blocks / (scales.float() * unit)[..., None]).flatten(-2))
        expected = values_of_e2m1(elements).double() * scales.double().repeat_interleave(16, -1) * unit.double()
        return {"elements": elements, "scales": scales, "global_scale": unit, "element": "e2m1"}, expected
    blocks = x.unflatten(-1, (-1, 32))
    emax = {"mxfp8": 8, "mxfp4": 2}[name]
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1))) - emax
    scaled = (blocks / torch.exp2(exponent)[..., None]).flatten(-2)
    codes = (exponent + 127).to(torch.uint8)
    of_values = torch.exp2(exponent.double()).repeat_interleave(32, -1)
    if name == "mxfp8":
        elements = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"elements": elements, "scales": codes.view(E8M0)}, elements.double() * of_values
    elements = packed_e2m1(scaled)
    return {"elements": elements, "scales": codes.view(E8M0), "element": "e2m1"}, values_of_e2m1(elements).double() * of_values


FORMATS = ("fp8 tensor", "fp8 e5m2 head", "fp8 fp16 token", "mxfp8", "mxfp4", "nvfp4")


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", FORMATS)
def test_an_engines_values_are_restored_bit_for_bit(name: str, tmp_path: Path) -> None:
    sides, expected = zip(*(engine_side(name, seed) for seed in (1, 2)), strict=True)
    k, v = (kvpack.pages.Minifloats(**arguments) for arguments in sides)
    cache = kvpack.Cache((kvpack.Layer(k.side(), v.side()),), "engine")
    kvpack.save(cache, tmp_path / "x.kvpack")
    loaded = kvpack.load(tmp_path / "x.kvpack")
    for side, given, values in zip(loaded[0].sides.values(), sides, expected, strict=True):
        assert torch.equal(side.unpack(torch.float32), values.to(torch.float32))
        found = kvpack.pages.Minifloats.from_side(side)
        assert same_bits(found.elements, given["elements"])
        wide = given["scales"].reshape({"head": (1, HEADS, 1), "tensor": (1, 1, 1)}.get(found.granularity or "", given["scales"].shape))
        assert same_bits(found.scales, wide.expand(found.scales.shape))
        assert (found.global_scale is None) == (name != "nvfp4")
        if found.global_scale is not None:
            assert found.global_scale.flatten().tolist() == [given["global_scale"].item()] * BATCH


@pytest.mark.parametrize("name", FORMATS)
def test_imported_values_are_attended_and_extended(name: str) -> None:
    (k, k_values), (v, v_values) = engine_side(name, 1), engine_side(name, 2)
    layer = kvpack.Layer(kvpack.pages.Minifloats(**k).side(), kvpack.pages.Minifloats(**v).side())
    q = torch.randn(BATCH, 2 * HEADS, 1, DIM, generator=torch.Generator().manual_seed(3))
    more = random_values(4)[:, :, :5]
    for appended in (0, 5):
        if appended:
            layer = layer.append(more, more)
            found = [side.unpack(torch.float32)[:, :, TOKENS:].double() for side in layer.sides.values()]
            assert all(((one - more).norm() / more.norm()) < 0.2 for one in found)
            k_values, v_values = (torch.cat([one, new], 2) for one, new in zip((k_values, v_values), found, strict=True))
        keys, values = (x.repeat_interleave(2, 1) for x in (k_values, v_values))
        expected = torch.softmax(q.double() @ keys.transpose(-1, -2) / DIM**0.5, -1) @ values
        assert (kvpack.attend(q, layer) - expected).norm() / expected.norm() < 1e-5


RECIPES = {"fp8 tensor": "fp8", "mxfp8": "mxfp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}


@pytest.mark.parametrize("name", RECIPES)
def test_pack_accepts_imported_values_if_the_recipe_has_their_format(name: str) -> None:
    (k, expected), (v, _) = engine_side(name, 1), engine_side(name, 2)
    pair = (kvpack.pages.Minifloats(**k), kvpack.pages.Minifloats(**v))
    for given in ([pair], pair):
        cache = kvpack.pack(given, f"{RECIPES[name]};tail=16")
        assert torch.equal(cache.unpack(torch.float32)[0][0], expected.to(torch.float32))
        assert cache[0].k.window == 16
    with pytest.raises(InvalidParameter, match=r"layers\[0\].k: the recipe selects codec .*'octahedral'.*: use a recipe of that format"):
        kvpack.pack([pair], "octopus-3")
    with pytest.raises(InvalidParameter, match="batch, kv_head and token must be the same"):
        kvpack.pack([(pair[0], torch.zeros(BATCH, HEADS, TOKENS + 1, DIM))], RECIPES[name])


def test_bytes_are_accepted_with_the_name_of_their_element() -> None:
    arguments, expected = engine_side("fp8 tensor", 1)
    given = kvpack.pages.Minifloats(arguments["elements"].view(torch.uint8), arguments["scales"], element="e4m3")
    assert torch.equal(given.side().unpack(torch.float32), expected.to(torch.float32))
    assert repr(given) == f"Minifloats(e4m3 {[BATCH, HEADS, TOKENS, DIM]}, fp32 scales per tensor)"
    nvfp4, expected = engine_side("nvfp4", 1)
    nvfp4["scales"] = nvfp4["scales"].view(torch.uint8)
    assert torch.equal(kvpack.pages.Minifloats(**nvfp4).side().unpack(torch.float32), expected.to(torch.float32))
    mxfp4, expected = engine_side("mxfp4", 1)
    mxfp4["scales"] = mxfp4["scales"].view(torch.uint8)
    assert torch.equal(kvpack.pages.Minifloats(**mxfp4).side().unpack(torch.float32), expected.to(torch.float32))
    if E2M1 is not None:
        mxfp4["elements"], mxfp4["element"] = mxfp4["elements"].view(E2M1), None
        assert torch.equal(kvpack.pages.Minifloats(**mxfp4).side().unpack(torch.float32), expected.to(torch.float32))


def test_strided_elements_are_accepted() -> None:
    """Engines store tokens before heads, and keep keys next to values, so their tensors are strided."""
    arguments, expected = engine_side("fp8 token", 1)
    pages = torch.empty(BATCH, TOKENS, HEADS, 2, DIM, dtype=torch.uint8)
    pages[..., 0, :] = arguments["elements"].view(torch.uint8).transpose(1, 2)
    elements = pages[..., 0, :].transpose(1, 2).view(torch.float8_e4m3fn)
    assert torch.equal(kvpack.pages.Minifloats(elements, arguments["scales"]).side().unpack(torch.float32), expected.to(torch.float32))


def test_one_scale_is_per_token_if_declared_so() -> None:
    elements = torch.ones(1, 2, 1, 8).to(torch.float8_e4m3fn)
    scales = torch.tensor([[[2.0], [3.0]]])
    assert kvpack.pages.Minifloats(elements, scales).codec.granularity == "head"
    assert kvpack.pages.Minifloats(elements, scales, granularity="token").codec.granularity == "token"


def test_runs_with_several_scales_are_given_as_slices() -> None:
    arguments, _ = engine_side("fp8 tensor", 1)
    side = kvpack.pages.Minifloats(**arguments).side().append(1000 * random_values(2)[:, :, :4])
    with pytest.raises(InvalidParameter, match=r"2 runs with different scales: slice .* The first run has 37 tokens"):
        kvpack.pages.Minifloats.from_side(side)
    assert same_bits(kvpack.pages.Minifloats.from_side(side.slice(0, TOKENS)).elements, arguments["elements"])
    with pytest.raises(InvalidParameter, match="the codec is group with sidecars, expected minifloat"):
        kvpack.pages.Minifloats.from_side(kvpack.pack([(random_values(1), None)], "kivi-2")[0].k)
    with pytest.raises(InvalidType, match=r"expected packed keys or values, such as cache\[0\].k, but got a Layer"):
        kvpack.pages.Minifloats.from_side(kvpack.pack([(random_values(1), None)], "fp8")[0])  # type: ignore[arg-type]
    cache = kvpack.pack([(random_values(1), None)], "fp8")
    with pytest.raises(InvalidParameter, match=r"the codec is minifloat with sidecars, .* 'fp8;raw=0'"):
        kvpack.pages.Minifloats.from_side(cache[0].k)
    assert kvpack.pages.Minifloats.from_side(cache.convert("fp8;raw=0")[0].k).elements.shape[2] == cache.tokens
    with pytest.raises(InvalidParameter, match="a raw tail of 5"):
        kvpack.pages.Minifloats.from_side(kvpack.pack([(random_values(1), None)], "fp8;raw=0;tail=32")[0].k)


def changed(name: str, **changes: Any) -> dict[str, Any]:
    return engine_side(name, 1)[0] | changes


def with_code(name: str, part: str, code: int) -> dict[str, Any]:
    arguments = engine_side(name, 1)[0]
    arguments[part].view(torch.uint8)[0, 1, 2, 1] = code
    return arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (changed("fp8 tensor", elements=torch.ones(1, 1, 1, 4)), InvalidType, "elements has dtype torch.float32, expected float8_e4m3fn"),
        (changed("fp8 tensor", elements=torch.ones(2, 3, 4).to(torch.float8_e5m2)), InvalidParameter, "elements has shape"),
        (
            changed("mxfp4", element=None), InvalidParameter,
            "elements has dtype uint8: pass their format as element=, one of e4m3, e5m2, e2m1",
        ),
        (changed("mxfp4", element="int4"), InvalidParameter, "element is 'int4', expected one of"),
        (changed("fp8 tensor", element="e5m2"), InvalidParameter, "which is e4m3, but element is 'e5m2'"),
        (
            changed("fp8 tensor", scales=torch.ones(5)),
            InvalidParameter,
            r"scales has shape \[5\], expected scales per tensor, head or token: one number",
        ),
        (changed("fp8 token", granularity="head"), InvalidParameter, r"scales has shape \[2, 3, 37\], expected scales per head"),
        (changed("fp8 tensor", scales=torch.ones(1).bfloat16()), InvalidType, "scales has dtype torch.bfloat16, expected float32"),
        (
            changed("fp8 tensor", global_scale=torch.ones(1)), InvalidParameter,
            "scales has dtype torch.float32, which takes no global_scale",
        ),
        (changed("nvfp4", global_scale=None), InvalidParameter, "pass global_scale too"),
        (changed("nvfp4", global_scale=torch.ones(1).half()), InvalidType, "global_scale is torch.float16, expected float32"),
        (changed("nvfp4", global_scale=torch.ones(3)), InvalidParameter, r"global_scale has shape \[3\]"),
        (
            changed("mxfp8", scales=torch.full((2, 3, 37, 3), 127, dtype=torch.uint8)),
            InvalidParameter,
            r"expected \[2, 3, 37, 2\] for e8m0",
        ),
        (changed("nvfp4", granularity="token"), InvalidParameter, "granularity is 'token', but the scales .* are per block"),
        (
            with_code("fp8 tensor", "elements", 0xFF),
            InvalidParameter,
            r"the e4m3 element at \[0, 1, 2, 1\] is 0xff, which is NaN or infinite",
        ),
        (with_code("fp8 e5m2 head", "elements", 0x7C), InvalidParameter, r"the e5m2 element at .* is 0x7c"),
        (with_code("mxfp8", "scales", 0xFF), InvalidParameter, r"the e8m0 scale at \[0, 1, 2, 1\] is 0xff, which is NaN"),
        (with_code("nvfp4", "scales", 0x80), InvalidParameter, r"the e4m3 scale at .* is 0x80, which is NaN or below zero"),
        (with_code("mxfp8", "scales", 0xFE), InvalidParameter, r"the value \(element times scale\) at .* is -?inf"),
        (changed("fp8 tensor", scales=torch.tensor(float("nan"))), InvalidParameter, "scale at .* is nan"),
        (changed("fp8 tensor", scales=1.0), InvalidType, "scales: expected a tensor, but got a float: pass a number as torch.tensor"),
        (changed("nvfp4", global_scale=1.0), InvalidType, "global_scale: expected a tensor, but got a float"),
        (changed("fp8 tensor", elements=[[0]]), InvalidType, "elements: expected a tensor, but got a list"),
        (changed("fp8 tensor", granularity="row"), InvalidParameter, "granularity is 'row', expected one of tensor, head, token, block"),
    ],
    ids=lambda case: str(case)[:40] if isinstance(case, str) else "",
)
def test_values_that_cannot_be_stored_are_refused_by_name(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kvpack.pages.Minifloats(**arguments)


def test_an_odd_head_dim_cannot_be_given_as_pairs_of_e2m1() -> None:
    side = kvpack.pack([(random_values(1, 33), None)], "nvfp4;raw=0")[0].k
    with pytest.raises(InvalidParameter, match="the head dim is 33, but e2m1 needs an even head dim"):
        kvpack.pages.Minifloats.from_side(side)
