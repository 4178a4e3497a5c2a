"""Outliers do not reduce the precision of other tokens or heads. They are stored raw, or a warning names them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
import torch

import kvpack
from kvpack.coding import dispatch
from kvpack.coding.presets import PUBLISHED
from kvpack.errors import KvpackWarning
from kvpack.formats import token_norms
from kvpack.formats.errors import ValueTooLarge
from kvpack.kernels.cpu import encode, library
from support.real_layers import layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHARED = "k=group:b=2,g=32,rotation=hadamard,token_scale=fp16;v=group:b=2,g=32"
PER_HEAD = SHARED.replace("fp16", "fp16-per-head")
RAW = f"{SHARED};raw=4,0.5,4"
HEADS = 4
MEAN = "k=group:b=2,g=32,axis=channel,rotation=hadamard,token_scale=fp16,mean=32;v=group:b=2,g=32"
SCALED = SHARED.replace("token_scale=fp16;", "token_scale=fp16,channel_scale=fp16;")


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def pair(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values. Token 9 of the second sequence has the key ``value`` in one channel of one head."""
    k, v = torch.randn(2, 2, 2, 300, 64, generator=torch.Generator().manual_seed(0))
    k[1, 1, 9, 3] = value
    return k, v


def dominated(ratio: float, tokens: tuple[int, ...] = (9,)) -> torch.Tensor:
    """Return keys of one sequence with large tokens.

    In ``tokens``, head 2 is so large that the norm over all heads is ``ratio`` times the median.
    """
    x = torch.randn(1, HEADS, 300, 64, generator=torch.Generator().manual_seed(0))
    norms = x.square().sum((1, 3)).sqrt()[0]
    for token in tokens:
        others = x[0, [0, 1, 3], token].square().sum()
        x[0, 2, token] *= ((ratio * norms.median()) ** 2 - others).sqrt() / x[0, 2, token].norm()
    return x


def relative(found: torch.Tensor, given: torch.Tensor) -> float:
    return float((found - given).norm() / given.norm())


@pytest.mark.parametrize("value", [100.0, 7e4])
def test_warning_about_a_shared_token_scale_names_the_token_and_a_remedy(value: float) -> None:
    text = (
        r"layers\[0\].k: in 1 of 600 tokens, one head .* token 9 of sequence 1, head 1 makes the scale .* times too large for another. "
        r"To avoid this, write token_scale=fp16-per-head in the recipe, .*, or add raw=4,0.5,4,"
    )
    with pytest.warns(KvpackWarning, match=text) as caught:
        kvpack.pack([pair(value)], SHARED)
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("value", [100.0, 1e3, 7e4])
@pytest.mark.parametrize("recipe", [RAW, "octopus-3", "octopus-3-scaled", "turboquant-3-scaled", "oscar-2", "oscar-2-scaled", "kivi-2"])
def test_an_outlier_affects_neither_other_tokens_nor_other_heads(recipe: str, value: float) -> None:
    k, v = pair(value)
    decoded, _ = kvpack.pack([(k, v)], recipe)[0].unpack(torch.float32)
    assert decoded is not None
    assert torch.equal(decoded[1, :, 9], k[1, :, 9].to(torch.bfloat16).float())
    usual = relative(decoded[0], k[0])
    others = [token for token in range(300) if token != 9]
    assert relative(decoded[1, 1, others], k[1, 1, others]) < 1.1 * usual


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("ratio", [1.4, 1.7, 2.0, 3.0, 3.9])
@pytest.mark.parametrize("recipe", ["oscar-2", "oscar-2-u8", "oscar-2-g128", PER_HEAD, f"{SHARED};raw=0,0,4", "kivi-2"])
def test_a_dominant_head_does_not_affect_the_other_heads_of_its_token(recipe: str, ratio: float) -> None:
    k = dominated(ratio)
    decoded, _ = kvpack.pack([(k, k)], recipe)[0].unpack(torch.float32)
    assert decoded is not None
    usual = relative(decoded[:, :, 10:128], k[:, :, 10:128])
    assert relative(decoded[:, [0, 1, 3], 9], k[:, [0, 1, 3], 9]) < 1.6 * usual


def in_frame(ratio: float, recipe: str) -> torch.Tensor:
    """Return the ``dominated`` keys transformed such that they are large in the frame that ``recipe`` encodes.

    Outside that frame, large channels or a common mean hide the large tokens.
    """
    k = dominated(ratio)
    if "channel_scale" in recipe:
        k[..., 5] *= 40
        k[..., 37] *= 40
    return k + 20 if "mean" in recipe else k


@pytest.mark.parametrize("ratio", [1.7, 2.0, 3.0, 3.9])
@pytest.mark.parametrize("recipe", [SCALED, MEAN, "oscar-2-u8-scaled"])
def test_scales_are_measured_where_they_are_chosen(recipe: str, ratio: float) -> None:
    """Norms are measured after channel scales are applied and means are subtracted. Without raw tokens, a warning names the token."""
    k = in_frame(ratio, recipe)
    raw = recipe if recipe in PUBLISHED else f"{recipe};raw=4,0,4"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoded, _ = kvpack.pack([(k, k)], raw)[0].unpack(torch.float32)
        kvpack.pack([(in_frame(1.0, recipe),) * 2], raw)
        kvpack.pack([(in_frame(1.0, recipe),) * 2], f"{raw};raw=0")
    assert decoded is not None
    assert torch.equal(decoded[0, :, 9], k[0, :, 9].to(torch.bfloat16).float())
    with pytest.warns(KvpackWarning, match=r"in 1 of 300 tokens.* token 9 of sequence 0, head 2 "):
        kvpack.pack([(k, k)], f"{raw};raw=0")


def far_from_the_others(factor: float) -> torch.Tensor:
    """Return keys of one sequence with large channels and a mean.

    In head 1 of token 137, a channel that is otherwise small is ``factor`` times as large as the head's maximum.
    """
    generator = torch.Generator().manual_seed(3)
    k = torch.randn(1, HEADS, 300, 64, generator=generator)
    k[..., [5, 37]] *= 12
    k += torch.randn(1, HEADS, 1, 64, generator=generator)
    k[0, 1, 137, 9] = factor * k[0, 1, :, 9].abs().max()
    return k


@pytest.mark.parametrize("factor", [13.0, 18.0])
@pytest.mark.parametrize(
    "recipe",
    [
        "k=scalar:b=2,mean=128,channel_scale=fp16;v=scalar:b=2;raw=4,0.5,4",
        "kvpack-3",
        "kvpack-3-trellis",
        "k=group:b=3,axis=channel,mean=32,channel_scale=fp16;v=raw;raw=4,0.5,4",
    ],
)
def test_a_token_that_fits_neither_maps_nor_means_is_raw_or_named(recipe: str, factor: float) -> None:
    k = far_from_the_others(factor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = kvpack.pack([(k, k)], recipe)[0]
        usual = kvpack.pack([(far_from_the_others(1.0),) * 2], f"{recipe};raw=4,0.6")[0].unpack(torch.float32)[0]
    decoded, _ = layer.unpack(torch.float32)
    assert decoded is not None
    assert usual is not None
    assert torch.equal(decoded[0, :, 137], k[0, :, 137].to(torch.bfloat16).float())
    others = [token for token in range(300) if token != 137]
    given = far_from_the_others(1.0)
    assert relative(decoded[:, :, others], k[:, :, others]) < 1.05 * relative(usual[:, :, others], given[:, :, others])
    with pytest.warns(KvpackWarning, match=r"token 137 of sequence 0, head 1 has .* times the typical error.* add raw=4,0.5,4"):
        kvpack.pack([(far_from_the_others(14.0),) * 2], f"{recipe};raw=4,0.6")


@pytest.mark.parametrize("kernels", ["cpu", "torch"])
@pytest.mark.parametrize(
    "recipe",
    [
        "octahedral:b=3",
        "octahedral:b=2,norm=log8,mean=32",
        "scalar:b=4,norm_rule=norm",
        "scalar:b=3,rounding=scaled,mean=128,channel_scale=fp16",
        "polar:b=4",
        "octahedral:b=3,qjl=fp16",
    ],
)
def test_a_token_with_a_large_direction_error_is_raw_or_named(recipe: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotation that concentrates a token in one coordinate preserves its norm, so the stored norm does not show the error."""
    monkeypatch.setenv(dispatch.VARIABLE, kernels)
    ordinary = torch.randn(1, HEADS, 300, 64, generator=torch.Generator().manual_seed(4))
    given = kvpack.pack([(ordinary, ordinary)], f"k={recipe};v=raw")[0].k
    assert given is not None
    k = ordinary.clone()
    coordinate = torch.zeros(1, 1, 1, 64)
    coordinate[..., 5] = 8
    k[0, 1, 137] = given.codec.rotation.inverse(coordinate)[0, 0, 0]
    with pytest.warns(
        KvpackWarning, match=r"layers\[0\].k: in 1 of 300 .* token 137 of sequence 0, head 1 has \d.* times the typical error"
    ):
        kvpack.pack([(k, k)], f"k={recipe};v=raw")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvpack.pack([(ordinary, ordinary)], f"k={recipe};v=raw")
        side = kvpack.pack([(k, k)], f"k={recipe};v=raw;raw=0,0,4")[0].k
    assert side is not None
    assert torch.equal(side.unpack(torch.float32)[0, :, 137], k[0, :, 137].to(torch.bfloat16).float())
    assert side.runs[0].streams["raw_positions"].shape[2] == 1


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("recipe", ["octahedral:b=4", "scalar:b=2", "polar:b=4", "scalar:b=3,mean=32"])
def test_tokens_next_to_decoded_ones_are_ordinary(recipe: str) -> None:
    """Tokens that the codec has decoded are encoded again without error, for example when a cache with a raw tail is converted."""
    x = torch.randn(1, HEADS, 60, 64, generator=torch.Generator().manual_seed(0))
    decoded = kvpack.pack([(x, x)], f"k={recipe};v=raw")[0].unpack(torch.float32)[0]
    assert decoded is not None
    k = torch.cat([decoded, x[:, :, :20] + 1e-3], 2)
    side = kvpack.pack([(k, k)], f"k={recipe};v=raw;raw=0,0,4")[0].k
    assert side is not None
    assert side.runs[0].streams["raw_positions"].shape[2] == 0


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("kernels", ["cpu", "torch"])
@pytest.mark.parametrize("tokens", [128, 300])
def test_a_token_far_from_the_mean_of_its_page_is_raw(kernels: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm of each token's difference from the mean is computed in C or by the formats package."""
    monkeypatch.setenv(dispatch.VARIABLE, kernels)
    k = 3 + torch.randn(2, HEADS, tokens, 64, generator=torch.Generator().manual_seed(0))
    k[1, 2, 100, 9] = 30
    side = kvpack.pack([(k, k)], "k=octahedral:b=3,mean=128;v=raw;raw=4,0.5,4")[0].k
    assert side is not None
    assert side.runs[0].streams["raw_positions"].to(torch.int64)[0, 0, :, [0, 3]].tolist()[8:] == [[101, 1]]


def test_many_tokens_far_from_the_mean_are_named_but_not_raw() -> None:
    """Ordinary pages of real models contain tokens with twice the usual error, which cause no warning."""
    k = 3 + torch.randn(1, HEADS, 300, 64, generator=torch.Generator().manual_seed(0))
    k[0, 1, 100:105, 9] = 45
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = kvpack.pack([(k, k)], "k=scalar:b=3,mean=128;v=raw;raw=4,0.5,4")
    assert cache[0].k is not None
    assert cache[0].k.runs[0].streams["raw_positions"].shape[2] == 4
    k[0, 1, 100:105, 9] = 100
    with pytest.warns(KvpackWarning, match=r"in 5 of 300 tokens.* times the typical error. To .* omit mean=.* from the recipe$"):
        cache = kvpack.pack([(k, k)], "k=scalar:b=3,mean=128;v=raw;raw=4,0.5,4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvpack.pack([(k, k)], "k=scalar:b=3;v=raw;raw=4,0.5,4")
    assert cache[0].k is not None
    assert cache[0].k.runs[0].streams["raw_positions"].shape[2] == 4


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("recipe", ["kvpack-3", "k=scalar:b=3,mean=32;v=scalar:b=3"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 9, 40])
def test_few_tokens_and_zeros_are_not_outliers_of_maps_and_means(recipe: str, tokens: int) -> None:
    x = torch.randn(2, 3, tokens, 64, generator=torch.Generator().manual_seed(0))
    for k in (x, x * 0, torch.cat([x * 0, x], 2), x[:, :, :1].expand(-1, -1, tokens, -1).contiguous()):
        side = kvpack.pack([(k, k)], recipe)[0].k
        assert side is not None
        raw = side.runs[0].streams.get("raw_positions")
        assert raw is None or raw.shape[2] <= 2 * (4 + tokens)


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("heads", [slice(2, 3), slice(None)], ids=["one head", "all heads"])
@pytest.mark.parametrize("ratio", [2.3, 3.0, 3.9, 1000.0])
def test_a_large_token_hardly_affects_its_group(ratio: float, heads: slice) -> None:
    k = dominated(1.0)
    k[:, heads, 9] *= ratio
    decoded, _ = kvpack.pack([(k, k)], "kivi-2")[0].unpack(torch.float32)
    assert decoded is not None
    assert relative(decoded[0, 2, 10:32], k[0, 2, 10:32]) < 1.1 * relative(decoded[0, 2, 32:], k[0, 2, 32:])


def test_a_group_without_raw_tokens_names_its_large_token() -> None:
    k = dominated(1.0)
    k[:, 2, 9] *= 3
    text = r"k: in 1 of 300 tokens, one head is so large that other tokens, .* token 9 .*, head 2 is 2\.\d+ times as large"
    with pytest.warns(KvpackWarning, match=text):
        kvpack.pack([(k, k)], "kivi-2;raw=0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvpack.pack([(k, k)], "kivi-2;raw=0,0,4")
        kvpack.pack([(k, k)], "k=group:b=2,g=32,token_scale=fp16-per-head;v=group:b=2,g=32")
        # Many of them are what the group is for, unless they are far larger.
        k[:, 2, 20:27] *= 3
        kvpack.pack([(k, k)], "kivi-2;raw=0")
    k[:, 2, 20:27] *= 2
    with pytest.warns(KvpackWarning, match="in 7 of 300 tokens"):
        kvpack.pack([(k, k)], "kivi-2;raw=0")


@pytest.mark.usefixtures("no_warnings")
def test_a_dominant_head_hardly_affects_other_tokens_of_its_group() -> None:
    """KIVI has no scale per token, so a token with one very large head also enlarges the steps of the 31 other tokens."""
    k = dominated(2.5)
    decoded, _ = kvpack.pack([(k, k)], "kivi-2")[0].unpack(torch.float32)
    assert decoded is not None
    assert torch.equal(decoded[0, :, 9], k[0, :, 9].to(torch.bfloat16).float())
    assert relative(decoded[0, 2, 10:32], k[0, 2, 10:32]) < 1.1 * relative(decoded[0, 2, 32:], k[0, 2, 32:])


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize(("recipe", "value"), [("kvpack-2", 1e4), ("kvpack-2", 7e4), ("octopus-3", 1e6), ("turboquant-2.5", 1e6)])
def test_a_few_values_beyond_the_range_of_norms_are_raw(recipe: str, value: float) -> None:
    k, v = pair(1.0)
    v[1, 1, 9, 3] = value
    layer = kvpack.pack([(k, v)], recipe)[0]
    _, decoded = layer.unpack(torch.float32)
    assert decoded is not None
    assert torch.equal(decoded[1, :, 9], v[1, :, 9].to(torch.bfloat16).float())
    others = [token for token in range(4, 300) if token != 9]
    assert relative(decoded[1, 1, others], v[1, 1, others]) < 1.1 * relative(decoded[0, :, 4:], v[0, :, 4:])
    v[1, 1, :, 3] = value
    with pytest.raises(ValueTooLarge, match=r"layers\[0\].v"):
        kvpack.pack([(k, v)], recipe)


def test_many_tokens_with_a_dominant_head_are_named_but_not_raw() -> None:
    tokens = tuple(range(9, 89, 10))
    k = dominated(2.5, tokens)
    text = r"in 8 of 300 tokens, .* head 2 makes the scale 2\.\d+ times too large .*token_scale=fp16-per-head in the recipe, .* a scale$"
    with pytest.warns(KvpackWarning, match=text):
        cache = kvpack.pack([(k, k)], "oscar-2")
    assert cache[0].k is not None
    assert cache[0].k.runs[0].streams["raw_positions"].shape[2] == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoded, _ = kvpack.pack([(k, k)], PER_HEAD)[0].unpack(torch.float32)
    assert decoded is not None
    assert relative(decoded[:, :, tokens], k[:, :, tokens]) < 1.1 * relative(decoded, k)


def test_one_warning_names_all_layers() -> None:
    k = dominated(3.0)
    with pytest.warns(KvpackWarning, match=r"layers\[2\].k: in 1 of 300 .*another; the same is true of tokens in 1 more") as caught:
        kvpack.pack([(dominated(2.0), k), (dominated(1.0), k), (k, k)], SHARED)
    assert len(caught) == 1


def appended(k: torch.Tensor) -> None:
    kvpack.pack([(k[:, :, :1], k[:, :, :1])], SHARED).append([(k[:, :, 1:289], k[:, :, 1:289])])


def converted(k: torch.Tensor) -> None:
    kvpack.pack([(k, k)], "fp32").convert(SHARED)


def updated(k: torch.Tensor) -> None:
    live = kvpack.LiveCache(SHARED, layers=1)
    for _ in range(2):
        live.update(0, k[:, :, :288], k[:, :, :288])
        live.freeze()


@pytest.mark.parametrize("grow", [appended, converted, updated])
def test_every_encoding_function_warns_once(grow: Callable[[torch.Tensor], None]) -> None:
    with pytest.warns(KvpackWarning, match=r"k: in 1 of \d+ tokens") as caught:
        grow(dominated(3.0))
    assert len(caught) == 1


@pytest.mark.usefixtures("no_warnings")
def test_a_token_that_is_large_in_all_heads_fits_the_scale() -> None:
    k, v = pair(1.0)
    k[1, :, 9] *= 500
    kvpack.pack([(k, v)], SHARED)


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("tokens", [0, 1, 2, 40, 300])
def test_ordinary_keys_and_zero_keys_do_not_warn(tokens: int) -> None:
    x = torch.randn(2, 3, tokens, 64, generator=torch.Generator().manual_seed(0))
    x *= torch.tensor([1.0, 30.0, 0.1])[:, None, None]
    kvpack.pack([(x, x)], SHARED)
    kvpack.pack([(x * 0, x)], SHARED)


@pytest.mark.parametrize("recipe", ["kvpack-4", "kvpack-3", "v=octahedral:b=3,norm=log8;k=raw"])
def test_a_head_whose_norms_round_to_zero_is_named(recipe: str) -> None:
    x = torch.randn(2, 3, 300, 64, generator=torch.Generator().manual_seed(0))
    x[:, 1] *= 1e-4
    # Zeros, such as padding, lose nothing, and neither do heads of which only a few tokens are small.
    x[0, :, :200] = 0
    x[:, 2, 210:240] *= 1e-4
    with pytest.warns(KvpackWarning, match=r"one head is so small that .* round to 0 in 8 bits.* head 1 has a norm .*write norm=fp16"):
        packed = kvpack.pack([(x, x)], recipe)[0]
    kept, lost = (packed.unpack(torch.float32)[1][:, head, 250:] - x[:, head, 250:] for head in (0, 1))
    assert kept.norm() < 0.3 * x[:, 0, 250:].norm()
    assert lost.norm() > 0.9 * x[:, 1, 250:].norm()
    live = kvpack.LiveCache(recipe, layers=1)
    live.update(0, x, x)
    with pytest.warns(KvpackWarning, match="one head is so small"):
        live.snapshot(packed=True)


@pytest.mark.usefixtures("no_warnings")
def test_small_norms_with_enough_bits_do_not_warn() -> None:
    x = torch.randn(1, 2, 300, 64, generator=torch.Generator().manual_seed(0))
    kvpack.pack([(x * 0.002, x * 0.002)], "kvpack-3")
    kvpack.pack([(x * 1e-4, x * 1e-4)], "kv=scalar:b=3,norm=fp16")


@pytest.mark.usefixtures("no_warnings")
def test_keys_of_a_real_model_do_not_warn_and_few_are_raw() -> None:
    """The test covers all presets that share scales between tokens. The same keys determine the raw tokens of the other presets."""
    real = [(k, v) for k, v, _ in layers()]
    shared = [name for name, preset in PUBLISHED.items() if "token_scale" in preset.recipe]
    assert len(shared) >= 5
    for name in (*shared, "kivi-2", SHARED, SCALED, MEAN, f"{MEAN};raw=4,0.5,4", "kivi-2;raw=0"):
        for layer in kvpack.pack(real, name):
            for side in layer.sides.values():
                raw = side.runs[0].streams.get("raw_positions")
                assert raw is None or raw.shape[2] <= 8


def with_value(value: float, tokens: tuple[int, ...] = (137,), dim: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of two sequences of 300 tokens.

    Channel 9 of head 1 is ``value`` in ``tokens`` of the first sequence.
    """
    k, v = torch.randn(2, 2, 2, 300, dim, generator=torch.Generator().manual_seed(5))
    v[0, 1, list(tokens), 9] = value
    return k, v


RUNS = ["fp8", "nvfp4", "kivi-2-u8", "kv=minifloat:element=e4m3,per=head;raw=4,0.5,4", "kv=minifloat:element=e2m1,per=head;raw=4,0.5,4"]


@pytest.mark.parametrize("swapped", [False, True], ids=["values", "keys"])
@pytest.mark.parametrize("recipe", RUNS)
def test_a_value_that_does_not_fit_the_run_scale_is_raw_or_named(recipe: str, swapped: bool) -> None:
    given, usual = (pair[::-1] if swapped else pair for pair in (with_value(1e6), with_value(1.0)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoded = kvpack.pack([given], recipe)[0].unpack(torch.float32)[0 if swapped else 1]
        expected = kvpack.pack([usual], recipe)[0].unpack(torch.float32)[0 if swapped else 1]
    assert decoded is not None
    assert expected is not None
    x, y = given[0 if swapped else 1], usual[0 if swapped else 1]
    assert torch.equal(decoded[0, :, 137], x[0, :, 137].to(torch.bfloat16).float())
    others = [token for token in range(4, 300) if token != 137]
    assert relative(decoded[:, :, others], x[:, :, others]) < 1.1 * relative(expected[:, :, others], y[:, :, others])
    if recipe != "kivi-2-u8":
        text = r"in 1 of 600 tokens, .* 137 of sequence 0, head 1 makes the scale .*per=token for minifloat.*or add raw=4,0.5,4"
        with pytest.warns(KvpackWarning, match=text):
            kvpack.pack([given], f"{recipe.removesuffix(';raw=4,0.5,4')};raw=0")


def test_many_values_that_do_not_fit_the_run_scale_are_named_but_not_raw() -> None:
    given = with_value(2e5, tuple(range(130, 140)))
    with pytest.warns(KvpackWarning, match=r"layers\[0\].v: in 10 of 600 tokens") as caught:
        cache = kvpack.pack([given], "fp8")
    assert len(caught) == 1
    assert cache[0].v is not None
    assert cache[0].v.runs[0].streams["raw_positions"].shape[2] == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvpack.pack([given], "kv=minifloat:element=e4m3,per=token")


@pytest.mark.usefixtures("no_warnings")
def test_appended_values_that_do_not_fit_the_run_scale_are_raw() -> None:
    cache, (k, v) = kvpack.pack([with_value(1.0)], "fp8"), with_value(2e5)
    side = cache.append([(k, v)])[0].v
    assert side is not None
    decoded = side.unpack(torch.float32)
    assert torch.equal(decoded[0, :, 437], v[0, :, 137].to(torch.bfloat16).float())
    assert relative(decoded[:, :, 438:], v[:, :, 138:]) < 1.1 * relative(decoded[:, :, 138:300], with_value(1.0)[1][:, :, 138:])


@pytest.mark.parametrize("recipe", ["int-2", "int-3", "int-4", "kv=group:b=4,g=128,axis=channel,mean=32;raw=4,0.5,4"])
def test_a_token_that_widens_the_group_of_a_channel_is_raw_or_named(recipe: str) -> None:
    recipe = recipe.replace("kv=group", "v=group:b=4,g=128,axis=channel;k=group") if "mean" in recipe else recipe
    given = with_value(20.0, dim=128)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = kvpack.pack([given], recipe)[0]
        kvpack.pack([with_value(1.0, dim=128)], f"{recipe};raw=0")
    decoded = layer.unpack(torch.float32)[1]
    assert decoded is not None
    assert torch.equal(decoded[0, :, 137], given[1][0, :, 137].to(torch.bfloat16).float())
    with pytest.warns(KvpackWarning, match=r"v: in 1 of 600 tokens.* 137 of sequence 0, head 1 has .* times the typical error"):
        kvpack.pack([given], f"{recipe};raw=0")


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize(("recipe", "value"), [("mxfp8", 1000.0), ("mxfp8", 500.0), ("mxfp4", 500.0), ("mxfp4", 15.9)])
def test_a_token_with_a_value_above_the_largest_element_keeps_its_precision(recipe: str, value: float) -> None:
    """OCP MX's own scale would clip the value, which is up to twice the largest element (2^8 or 2^2 scales)."""
    given = with_value(value)
    layer = kvpack.pack([given], recipe)[0]
    decoded = layer.unpack(torch.float32)[1]
    assert decoded is not None
    usual = relative(decoded[0, 0], given[1][0, 0])
    assert relative(decoded[0, 1, 137], given[1][0, 1, 137]) < 1.75 * usual


@pytest.mark.parametrize("tokens", [1, 2, 5, 128, 300])
def test_c_finds_unusually_large_sizes_like_pytorch(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(tokens)
    found = []
    for number in range(60):
        sizes = 0.3 + torch.rand(2, 3, tokens, generator=generator)
        sizes = sizes.masked_fill(torch.rand(sizes.shape, generator=generator) < 0.1 * (number % 3), torch.nan)
        for ratio in (1.2, 1.6, 2.0):
            medians = token_norms.median_norms(sizes)
            compiled = [encode.has_large(sizes, ratio, level) for level in range(len(library.levels()))]
            with monkeypatch.context() as patch:
                patch.setenv(dispatch.VARIABLE, "torch")
                expected = token_norms.has_large_size(sizes, ratio)
            assert expected == bool((sizes > ratio * medians).any())
            assert set(compiled) == {expected}
            found.append(expected)
    assert tokens < 5 or len(set(found)) == 2


@pytest.mark.parametrize(
    ("recipe", "dim"),
    [
        ("int-3;raw=0", 128),
        ("k=raw;v=group:b=2,g=64,axis=channel", 128),
        ("mxfp4;raw=0", 64),
        ("mxfp4;raw=0", 128),
        ("mxfp8;raw=0", 256),
    ],
)
@pytest.mark.parametrize("tokens", [4, 300])
def test_c_finds_large_scales_like_pytorch(recipe: str, dim: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    found = []
    for number in range(24):
        v = torch.randn(2, 2, tokens, dim, generator=generator)
        v[0, 1, tokens - 1 - number % 4, number] = number
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KvpackWarning)
            side = kvpack.pack([(v, v)], recipe)[0].v
        assert side is not None
        codec, streams = side.codec, side.runs[0].streams
        expected = token_norms.has_large_size(codec.without_sidecars.error_sizes(streams), codec.error_spread)
        for level in range(len(library.levels())):
            assert encode.has_large_error(codec, streams, codec.error_spread, level) == expected
        found.append(expected)
    assert len(set(found)) == 2
