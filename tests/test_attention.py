"""attend over packed layers, compared with a plain softmax over the unpacked tensors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import forward_ad

import kvpack
from kvpack import attention
from kvpack.cache.layer import Layer
from kvpack.formats.errors import InvalidParameter, InvalidType, OutOfBounds
from support.caches import RECIPES, random_pairs

if TYPE_CHECKING:
    from collections.abc import Callable

TOLERANCE = 2e-5


def plain(
    q: torch.Tensor, layer: Layer, scale: float | None, causal: bool, softcap: float | None, sliding_window: int | None
) -> torch.Tensor:
    k, v = layer.unpack(torch.float32)
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1).to(torch.float64), v.repeat_interleave(repeat, 1).to(torch.float64)
    scores = q.to(torch.float64) @ k.transpose(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    tokens = torch.arange(k.shape[2])
    position = k.shape[2] - q.shape[2] + torch.arange(q.shape[2])[:, None]
    if causal:
        scores = scores.masked_fill(tokens > position, -torch.inf)
    if sliding_window is not None:
        scores = scores.masked_fill(tokens <= position - sliding_window, -torch.inf)
    return torch.softmax(scores, -1) @ v


MODES = {
    "causal": (None, True, None, None),
    "full": (0.3, False, None, None),
    "softcap": (None, True, 5.0, None),
    "sliding": (None, True, None, 40),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_attend_equals_softmax_over_unpacked(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kvpack.pack(random_pairs(1, 150, batch=2, dims=(64, 96)), recipe)
    cache = cache.append(random_pairs(1, 9, batch=2, dims=(64, 96), seed=1))
    q = torch.randn(2, 6, 7, 64, generator=torch.Generator().manual_seed(2))
    for mode, (scale, causal, softcap, sliding_window) in MODES.items():
        expected = plain(q, cache[0], scale, causal, softcap, sliding_window)
        # The C kernels, where they are built, and PyTorch.
        for kernels in ("", "torch"):
            monkeypatch.setenv("KVPACK_KERNELS", kernels)
            out = kvpack.attend(q, cache[0], scale=scale, causal=causal, softcap=softcap, sliding_window=sliding_window)
            assert out.shape == (2, 6, 7, 96)
            assert torch.allclose(out.to(torch.float64), expected, rtol=TOLERANCE, atol=TOLERANCE), (mode, kernels)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("live", [False, True])
def test_derivatives_and_transforms_of_queries_are_exact(live: bool) -> None:
    """Kernels would lose tangents and gradients, and cannot read the tensors of ``torch.func``."""
    pairs = random_pairs(1, 150, batch=2, dims=(64, 96))
    grown = kvpack.LiveCache("fp8", layers=1)
    grown.update(0, *pairs[0])
    layer = grown.layer(0)
    q, tangent = torch.randn(2, 2, 6, 3, 64, generator=torch.Generator().manual_seed(2))

    def attend(q: torch.Tensor, **options: Any) -> torch.Tensor:
        return grown.attend(0, q, **options) if live else kvpack.attend(q, layer, **options)

    out, expected = attend(q), partial(plain, layer=layer, scale=None, causal=True, softcap=None, sliding_window=None)
    assert torch.allclose(torch.func.vmap(attend)(torch.stack([q, -q]))[0], out, atol=TOLERANCE)
    change = torch.func.jvp(attend, (q,), (tangent,))[1]
    assert torch.allclose(change, torch.func.jvp(expected, (q,), (tangent,))[1].to(q.dtype), atol=1e-4)
    with forward_ad.dual_level():
        assert torch.equal(forward_ad.unpack_dual(attend(forward_ad.make_dual(q, tangent))).tangent, change)
    sinks = torch.zeros(6, requires_grad=True)
    attend(q, sink_logits=sinks).sum().backward()
    assert sinks.grad is not None
    step = torch.full_like(sinks, 0.01)
    with torch.no_grad():
        difference = attend(q, sink_logits=step) - attend(q, sink_logits=-step)
    assert torch.allclose(sinks.grad.sum(), difference.sum() / 0.02, rtol=0.01)


@pytest.mark.parametrize("q_len", [1, 2, 63, 150])
def test_causal_chunks_agree_with_single_queries(q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPACK_KERNELS", "torch")
    cache = kvpack.pack(random_pairs(1, 150), "kivi-4")
    q = torch.randn(1, 4, q_len, 64)
    whole = kvpack.attend(q, cache[0])
    monkeypatch.setattr(attention, "QUERIES_AT_A_TIME", 1)
    torch.testing.assert_close(kvpack.attend(q, cache[0]), whole, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_tile_size_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPACK_KERNELS", "torch")
    cache = kvpack.pack(random_pairs(1, 1000), "k=group:b=3,g=32;v=group:b=3,g=32")
    q = torch.randn(1, 2, 3, 64)
    whole = kvpack.attend(q, cache[0])
    monkeypatch.setattr("kvpack.cache.side.TILE_VALUES", 1)
    torch.testing.assert_close(kvpack.attend(q, cache[0]), whole, rtol=TOLERANCE, atol=TOLERANCE)


def test_memory_is_bounded_by_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPACK_KERNELS", "torch")
    widest = 0
    cache = kvpack.pack(random_pairs(1, 5000, heads=1), "kivi-2")
    decode = type(cache[0].k).decode_frame

    def watched(self: kvpack.Side, start: int, stop: int) -> tuple[torch.Tensor, bool]:
        nonlocal widest
        widest = max(widest, stop - start)
        return decode(self, start, stop)

    monkeypatch.setattr("kvpack.cache.side.TILE_VALUES", 1 << 15)
    monkeypatch.setattr(type(cache[0].k), "decode_frame", watched)
    kvpack.attend(torch.randn(1, 1, 1, 64), cache[0])
    assert widest == (1 << 15) // 64


def test_a_window_reads_only_the_pages_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPACK_KERNELS", "torch")
    cache = kvpack.pack(random_pairs(1, 2000, heads=1), "kivi-2")
    seen = []
    decode = type(cache[0].k).decode_frame

    def watched(self: kvpack.Side, start: int, stop: int) -> tuple[torch.Tensor, bool]:
        seen.append((start, stop))
        return decode(self, start, stop)

    monkeypatch.setattr(type(cache[0].k), "decode_frame", watched)
    kvpack.attend(torch.randn(1, 1, 2, 64), cache[0], sliding_window=10)
    assert min(start for start, _ in seen) == 2000 - 2 - 10 + 1


def test_bfloat16_queries_give_bfloat16_results() -> None:
    cache = kvpack.pack(random_pairs(1, 40), "kivi-4")
    out = kvpack.attend(torch.randn(1, 2, 1, 64).to(torch.bfloat16), cache[0])
    assert out.dtype == torch.bfloat16
    assert torch.isfinite(out).all()


Q = torch.zeros(1, 4, 1, 64)
BAD = {
    "rank": (Q[0], {}, InvalidParameter, r"q has shape \[4, 1, 64\]"),
    "dtype": (Q.to(torch.int64), {}, InvalidType, "floating-point"),
    "head dim": (Q[..., :32], {}, InvalidParameter, "does not match keys"),
    "heads": (Q[:, :3], {}, InvalidParameter, "multiple of the number of key heads"),
    "batch": (Q.expand(2, 4, 1, 64), {}, InvalidParameter, "does not match keys"),
    "too many queries": (Q.expand(1, 4, 41, 64), {}, InvalidParameter, "q has 41 queries, but the layer has 40 tokens"),
    "window": (Q, {"sliding_window": 0}, InvalidParameter, "sliding_window is 0"),
    "softcap": (Q, {"softcap": -1.0}, InvalidParameter, "softcap is -1.0"),
    "infinite softcap": (Q, {"softcap": float("inf")}, InvalidParameter, "softcap is inf, expected a finite number"),
    "scale": (Q, {"scale": float("nan")}, InvalidParameter, "scale is nan, expected a finite number"),
    "layout": (Q.to_sparse(), {}, InvalidType, "q has layout torch.sparse_coo"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_queries_are_refused(name: str) -> None:
    q, options, error, message = BAD[name]
    cache = kvpack.pack(random_pairs(1, 40), "kivi-2")
    with pytest.raises(error, match=message):
        kvpack.attend(q, cache[0], **options)


def test_queries_are_checked_after_accepted_ones_of_their_shape() -> None:
    layer = kvpack.pack(random_pairs(1, 40), "kivi-2")[0]
    kvpack.attend(Q, layer)
    with pytest.raises(InvalidType, match=r"q has layout torch\.sparse_coo"):
        kvpack.attend(Q.to_sparse(), layer)


def test_attention_over_a_whole_cache_is_refused() -> None:
    with pytest.raises(InvalidParameter, match=r"such as cache\[0\], but got a Cache"):
        kvpack.attend(Q, kvpack.pack(random_pairs(1, 8), "kivi-2"))


def test_an_empty_or_one_sided_layer_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="q has 1 queries, but the layer has 0 tokens"):
        kvpack.attend(Q, kvpack.pack(random_pairs(1, 0), "kivi-2")[0])
    with pytest.raises(InvalidParameter, match="has only k"):
        kvpack.attend(Q, kvpack.pack([(random_pairs(1, 8)[0][0], None)], "kivi-2")[0])


def plain_each(
    q: torch.Tensor,
    layer: Layer,
    lengths: list[int],
    sink_logits: torch.Tensor,
    causal: bool,
    window: int | None,
    starts: list[int] | None = None,
) -> torch.Tensor:
    """Attend one sequence at a time, over all its tokens, with a mask of those that each query sees."""
    k, v = (x.to(torch.float64).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in layer.unpack(torch.float32) if x is not None)
    tokens, sinks = torch.arange(k.shape[2]), sink_logits.to(torch.float64)[:, None, None].expand(-1, q.shape[2], 1)
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for b, length in enumerate(lengths):
        position = length - q.shape[2] + torch.arange(q.shape[2])[:, None]
        hidden = (tokens >= length) | (causal & (tokens > position)) | (tokens < (0 if starts is None else starts[b]))
        if window is not None:
            hidden |= tokens <= position - window
        scores = (q[b].to(torch.float64) @ k[b].transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
        # A query that sees nothing, and no sink, has weights of NaN.
        out[b] = weights.masked_fill(hidden, 0) @ v[b]
    return out


@pytest.mark.parametrize("given", [list, torch.tensor], ids=["integers", "a tensor"])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 20), (False, None)])
def test_sink_logits_and_unequal_lengths_are_supported(causal: bool, window: int | None, given: Callable[[list[int]], Any]) -> None:
    cache = kvpack.pack(random_pairs(1, 150, batch=4), "kivi-4;tail=32")
    q = torch.randn(4, 4, 3, 64, generator=torch.Generator().manual_seed(2))
    lengths, sink_logits = [150, 2, 0, 77], torch.tensor([0.5, -torch.inf, 3.0, 0.0])
    out = kvpack.attend(q, cache[0], causal=causal, sliding_window=window, sink_logits=sink_logits, lengths=given(lengths))
    expected = plain_each(q, cache[0], lengths, sink_logits, causal, window)
    torch.testing.assert_close(out.to(torch.float64), expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert not out[2].any()
    assert out[1, :, 0].any() != causal


@pytest.mark.parametrize("kernels", ["", "torch"], ids=["C kernels, if built", "torch"])
@pytest.mark.parametrize("q_len", [1, 5, 300])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 20), (False, None)])
@pytest.mark.parametrize("recipe", ["kivi-4;tail=32", "octopus-3"])
def test_padding_before_sequences_is_not_attended(
    recipe: str, causal: bool, window: int | None, q_len: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPACK_KERNELS", kernels)
    tokens = q_len + 150
    cache = kvpack.pack(random_pairs(1, tokens, batch=4), recipe)
    q = torch.randn(4, 4, q_len, 64, generator=torch.Generator().manual_seed(2))
    starts, lengths, sink_logits = (
        [0, 65, tokens, tokens - 1],
        [tokens, tokens - 20, tokens, tokens],
        torch.tensor([0.5, -torch.inf, 3.0, 0.0]),
    )
    for given in (list, torch.tensor):
        out = kvpack.attend(
            q, cache[0], causal=causal, sliding_window=window, sink_logits=sink_logits, lengths=given(lengths), starts=given(starts)
        )
    expected = plain_each(q, cache[0], lengths, sink_logits, causal, window, starts)
    torch.testing.assert_close(out.to(torch.float64), expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert not out[2].any()
    alone = kvpack.attend(q, cache[0], causal=causal, sliding_window=window, starts=starts)
    plain = plain_each(q, cache[0], [tokens] * 4, torch.full((4,), -torch.inf), causal, window, starts)
    torch.testing.assert_close(alone.to(torch.float64), plain, rtol=TOLERANCE, atol=TOLERANCE)


def test_starts_count_tokens_that_a_layer_skipped() -> None:
    cache = kvpack.pack(random_pairs(1, 150, batch=2), "raw")
    layer = Layer(*(side.slice(40, 150) for side in cache[0].sides.values()), skipped=40)
    q = torch.randn(2, 4, 3, 64)
    found = kvpack.attend(q, layer, sliding_window=60, starts=[100, 7])
    torch.testing.assert_close(found, kvpack.attend(q, cache[0], sliding_window=60, starts=[100, 7]))
    torch.testing.assert_close(found, kvpack.attend(q, layer, sliding_window=60, starts=torch.tensor([100, 7], dtype=torch.int32)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["starts", "lengths"])
def test_token_counts_may_have_any_integer_dtype(name: str, dtype: torch.dtype) -> None:
    """This includes a dtype that cannot represent the layer's number of tokens."""
    k = torch.randn(2, 1, 300, 32, generator=torch.Generator().manual_seed(0))
    layer, q = kvpack.pack([(k, k)], "raw")[0], k[:, :, -1:]
    given: dict[str, Any] = {name: torch.tensor([5, 100]).to(dtype)}
    assert torch.equal(kvpack.attend(q, layer, **given), kvpack.attend(q, layer, **{name: [5, 100]}))


def test_lengths_that_include_all_tokens_change_nothing() -> None:
    cache = kvpack.pack(random_pairs(1, 150, batch=2), "kivi-4")
    q = torch.randn(2, 4, 3, 64)
    torch.testing.assert_close(kvpack.attend(q, cache[0], lengths=[150, 150]), kvpack.attend(q, cache[0]))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        pytest.param(
            {"sink_logits": torch.zeros(3)}, InvalidParameter, r"sink_logits has shape \[3\], .* per query head, \[4\]", id="too few logits"
        ),
        pytest.param({"sink_logits": torch.zeros(4, dtype=torch.int64)}, InvalidType, "sink_logits is torch.int64", id="integer logits"),
        pytest.param({"sink_logits": [0.0] * 4}, InvalidType, "sink_logits is list", id="a list of logits"),
        pytest.param({"lengths": [50]}, InvalidParameter, r"lengths has shape \[1\], .* for each sequence, \[2\]", id="too few lengths"),
        pytest.param({"lengths": [50, 51]}, OutOfBounds, r"lengths\[1\] is 51, expected 0 to 50", id="a length above the tokens"),
        pytest.param({"lengths": torch.tensor([-1, 50])}, OutOfBounds, r"lengths\[0\] is -1, expected 0 to 50", id="a negative length"),
        pytest.param({"lengths": [50, 10**30]}, OutOfBounds, r"lengths\[1\] is 10+, expected 0 to 50", id="a length beyond integers"),
        pytest.param({"lengths": [50, 2.0]}, InvalidType, "lengths", id="a length of no integer"),
        pytest.param({"starts": [50]}, InvalidParameter, r"starts has shape \[1\], .* for each sequence, \[2\]", id="too few starts"),
        pytest.param({"starts": [0, 51]}, OutOfBounds, r"starts\[1\] is 51, expected 0 to 50", id="a start behind the tokens"),
        pytest.param({"starts": 3}, InvalidType, "starts is 3, expected a list of integers", id="a start for all"),
        pytest.param({"lengths": torch.ones(2)}, InvalidType, "lengths has dtype torch.float32", id="lengths of no integers"),
    ],
)
def test_invalid_sink_logits_and_lengths_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    cache = kvpack.pack(random_pairs(1, 50, batch=2), "kivi-4")
    with pytest.raises(error, match=message):
        kvpack.attend(torch.randn(2, 4, 1, 64), cache[0], **options)
