"""Tests of the C kernels for attention, compared with PyTorch operations over the same packed rows."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpack
from kvpack import attention
from kvpack.cache.layer import Layer
from kvpack.cache.packed_runs import PackedRuns
from kvpack.cache.side import pack_side
from kvpack.coding import dispatch
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.group import Group
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.kernels.cpu import attend as cpu_attend
from kvpack.kernels.cpu import codecs as cpu_codecs
from kvpack.kernels.cpu import library
from kvpack.kernels.cpu.library import THREADS
from support.caches import random_pairs
from support.random_pages import sides

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hypothesis.strategies import DrawFn


pytestmark = pytest.mark.skipif(not dispatch.c_is_built(), reason="the C kernels were not built")

TOLERANCE = 2e-5
"""Tolerance relative to the largest value. Both sides of the comparison sum in binary32, but in different orders."""


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.delenv(THREADS, raising=False)


def by_torch(q: torch.Tensor, layer: Layer, **options: Any) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(dispatch.VARIABLE, "torch")
        return kvpack.attend(q, layer, **options)


def assert_alike(found: torch.Tensor, expected: torch.Tensor, layer: Layer) -> None:
    assert layer.v is not None
    largest = float(layer.v.unpack(torch.float32).abs().amax())
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert torch.isfinite(found).all()
    assert (found - expected).abs().max() <= TOLERANCE * largest


@st.composite
def calls(draw: DrawFn, family: str, plain: bool = False) -> tuple[torch.Tensor, Layer, dict[str, Any]]:
    """Draw the queries, the layer, and the options of a call of ``kvpack.attend``."""
    batch, heads, tokens = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 300))
    layer = Layer(draw(sides(batch, heads, tokens, "k", family, plain)), draw(sides(batch, heads, tokens, "v", family, plain)))
    assert layer.k is not None
    q_len = draw(st.integers(1, min(tokens, draw(st.sampled_from((1, 1, 4, 90))))))
    q_heads = heads * draw(st.integers(1, 7))
    q = torch.randn(batch, q_heads, q_len, layer.k.dim, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    options: dict[str, Any] = {"causal": draw(st.booleans()), "scale": draw(st.sampled_from((None, 0.1)))}
    options["softcap"] = draw(st.sampled_from((None, None, 2.0)))
    options["sliding_window"] = draw(st.one_of(st.none(), st.integers(1, 200)))
    if draw(st.booleans()):
        options["lengths"] = draw(st.lists(st.integers(0, tokens), min_size=batch, max_size=batch))
    if draw(st.booleans()):
        options["starts"] = draw(st.lists(st.integers(0, tokens), min_size=batch, max_size=batch))
    if draw(st.booleans()):
        options["sink_logits"] = torch.tensor([0.5, -torch.inf, 3.0, 0.0, 1.0, -2.0, 9.0] * 2)[:q_heads]
    return q, layer, options


FAMILIES = sorted(codec.id for codec in cpu_codecs.FAMILIES)


@pytest.mark.scenario
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=15)
def test_every_supported_call_agrees_with_torch(family: str, data: st.DataObject) -> None:
    q, layer, options = data.draw(calls(family))
    odd = [
        side.codec
        for side in layer.sides.values()
        if isinstance(side.codec, CodecWithSidecars) and (side.codec.value_maps or len(side.codec.raw_token_sidecars) > 1)
    ]
    assert attention.cpu_attention(q, layer) is not None or odd
    assert_alike(kvpack.attend(q, layer, **options), by_torch(q, layer, **options), layer)


@pytest.fixture(params=range(len(library.levels())), ids=library.levels())
def level(request: pytest.FixtureRequest) -> int:
    return int(request.param)


RECIPES = (
    "kivi-2",
    "kivi-4",
    "kv=group:b=3,g=32",
    "kv=group:b=1,g=64",
    "kv=group:b=5,g=4",
    "int-4",
    "oscar-2",
    "oscar-2-u8",
    "k=group:b=2,rotation=hadamard,token_scale=fp16-per-head;v=group:b=3,token_scale=fp32-per-head",
    "octopus-2",
    "octopus-4",
    "kv=octahedral:b=3,arrangement=direct",
    "turboquant-3",
    "turboquant-2.5",
    "polarquant-3",
    "k=trellis:b=2,states=256;v=trellis:b=3",
    "kv=trellis:b=1,states=256,channel_scale=fp16,norm=fp32",
    "turboangle-k8v4",
    "kv=angle:n=48,norm=log4",
    "k=raw;v=angle:n=64,norm=linear4",
    "hqmq-s24-r3",
    "kv=quaternion:s=7,r=5,arrangement=direct",
    "fp8",
    "kv=minifloat:element=e5m2,per=head,scales=fp16",
    "kv=minifloat:element=e4m3,per=token",
    "mxfp4",
    "nvfp4",
    "ott-2",
    "rotatekv-2",
    "octopus-3-scaled",
    "octopus-qjl-2",
    "int-4-med3",
    "hqmq-s24-r4-med3",
    "k=octahedral:b=3,qjl=fp16,outliers=2,sinks=4;v=group:b=3,g=32,outliers=2,scales=u8",
    "bf16",
    "fp32;tail=64",
    "fp16;tail=40",
    "lossless",
    "kv=lossless:dtype=bf16,chunk=16",
    "kv=lossless:dtype=fp16,chunk=32",
)


def by_c(q: torch.Tensor, layer: Layer, *arguments: Any, **options: Any) -> torch.Tensor:
    assert layer.k is not None
    assert layer.v is not None
    prepared = cpu_attend.PreparedAttention.create(layer.k, layer.v)
    assert prepared is not None
    return prepared(q, *arguments, **options)


QUERIES = {(128, 128): [(1, 1), (3, 1), (7, 9)], (64, 96): [(2, 1), (4, 1), (7, 9)]}
"""For each pair of head dims: the numbers of query heads per KV head, and of queries."""


@pytest.mark.scenario
@pytest.mark.parametrize("dims", QUERIES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_instruction_set_agrees(recipe: str, dims: tuple[int, int]) -> None:
    layer = kvpack.pack(random_pairs(1, 333, batch=2, dims=dims), recipe)[0]
    for group, q_len in QUERIES[dims]:
        q = torch.randn(2, 2 * group, q_len, dims[0], generator=torch.Generator().manual_seed(1))
        expected = by_torch(q, layer, scale=0.1, sliding_window=200)
        for level in range(len(library.levels())):
            found = by_c(q, layer, 0.1, True, None, 200, None, None, level=level)
            assert_alike(found, expected, layer)


@pytest.mark.parametrize(("dim", "bits", "fields"), [(64, 8, 1), (64, 2, 4), (96, 2, 2), (192, 6, 4)])
def test_groups_in_columns_of_any_number_of_bytes_agree_with_torch(dim: int, bits: int, fields: int, level: int) -> None:
    """In planes of bytes, a word contains two columns, so a row may end inside a vector."""
    codecs = (Group(dim, bits, axis, 16, "none", 0, "none", (("codes", fields),)) for axis in ("token", "channel"))
    (pair,) = random_pairs(1, 70, dims=(dim, dim))
    layer = Layer(*(pack_side(x, codec, 0, "x") for x, codec in zip(pair, codecs, strict=True)))
    q = torch.randn(1, 2, 1, dim, generator=torch.Generator().manual_seed(1))
    found = by_c(q, layer, 0.1, True, None, None, None, None, level=level)
    assert_alike(found, by_torch(q, layer, scale=0.1), layer)


def test_results_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attend, "MIN_VALUES", 1)
    cache = kvpack.pack(random_pairs(1, 9000, heads=3), "kivi-2;tail=128")
    q = torch.randn(1, 6, 2, 64)
    one = by_c(q, cache[0], 0.1, True, None, None, None, None, threads=1)
    for threads in (2, 3, 64, 9999):
        assert torch.equal(by_c(q, cache[0], 0.1, True, None, None, None, None, threads=threads), one)
    monkeypatch.setenv(THREADS, "3")
    assert torch.equal(kvpack.attend(q, cache[0], scale=0.1), one)


@pytest.mark.parametrize("text", ["0", "-1", "two", "10000", "\u0661"])
def test_an_invalid_number_of_threads_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS, text)
    with pytest.raises(InvalidParameter, match=r"KVPACK_THREADS is .*; set it to an integer from 1 to 9999, or unset it"):
        kvpack.attend(torch.zeros(1, 2, 1, 64), kvpack.pack(random_pairs(1, 40), "kivi-2")[0])


def _layer(tokens: int) -> tuple[torch.Tensor, Layer]:
    return torch.randn(1, 8, 1, 64), kvpack.pack(random_pairs(1, tokens), "kivi-2")[0]


def test_a_forked_child_can_attend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attend, "MIN_VALUES", 1)
    q, layer = _layer(9000)
    expected = by_c(q, layer, 0.1, True, None, None, None, None, threads=3)
    child = os.fork()
    if not child:
        # The child of a process with threads: nothing but the kernels, and no exit through pytest.
        same = torch.equal(by_c(q, layer, 0.1, True, None, None, None, None, threads=3), expected)
        os._exit(0 if same else 1)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert done[1] == 0


def test_other_threads_run_during_a_call() -> None:
    q, layer = _layer(200_000)
    running, counted = True, 0

    def count() -> None:
        nonlocal counted
        while running:
            counted += 1
            time.sleep(0)

    other = threading.Thread(target=count)
    other.start()
    before = counted
    kvpack.attend(q.expand(1, 8, 1, 64), layer)
    after = counted
    running = False
    other.join()
    assert after - before > 10


@pytest.fixture
def host_settings() -> Iterator[None]:
    """Check that a test leaves the host's denormal flushing, threads, and random state unchanged."""
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    yield
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.usefixtures("host_settings")
@pytest.mark.parametrize("flush", [False, True])
def test_the_hosts_denormal_mode_is_kept(flush: bool) -> None:
    layer = kvpack.pack([(x, x) for x in (torch.ones(1, 2, 300, 64),)], "kivi-2")[0]
    q, tiny = torch.ones(1, 4, 1, 64), torch.tensor(2.0**-130)
    if not torch.set_flush_denormal(flush):
        pytest.skip("this processor cannot")
    try:
        kvpack.attend(q, layer)
        assert bool((tiny * 2 > 0).item()) is not flush
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.scenario
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=12)
def test_no_word_reads_out_of_bounds(family: str, data: st.DataObject) -> None:
    """Pages in memory are not verified, so arbitrary bits must result in some values, and never in a crash."""
    q, layer, options = data.draw(calls(family, plain=True))
    assert attention.cpu_attention(q, layer) is not None
    generator = torch.Generator().manual_seed(0)
    for side in layer.sides.values():
        for page in side.runs:
            for name, stream in page.streams.items():
                if name.partition(".")[0] in side.codec.packings():
                    stream.view(torch.int16).random_(generator=generator)
                elif name == "scales" and stream.dtype == torch.uint8:
                    stream.random_(generator=generator)
                elif name in ("frequencies", "states", "words"):
                    stream.view(torch.int16).random_(-(2**15), 2**15, generator=generator)
    assert kvpack.attend(q, layer, **options).shape[:3] == q.shape[:3]


@pytest.mark.parametrize("recipe", ["kivi-4", "octopus-3", "raw"])
def test_scores_that_differ_by_thousands_agree_with_torch(recipe: str) -> None:
    """Scores that are 8.8 to 17 million below the maximum have exponents that exceed 32-bit integers. Sanitizers run this test."""
    k, v = random_pairs(1, 300)[0]
    k *= 2.0**-10
    k[:, :, 7] = 1.5
    layer = kvpack.pack([(k, v)], recipe)[0]
    q = torch.full((1, 2, 1, 64), 2.0**20)
    assert attention.cpu_attention(q, layer) is not None
    found = kvpack.attend(q, layer)
    torch.testing.assert_close(found[0, :, 0], layer.v.unpack(torch.float32)[0, :, 7])


def test_wrong_word_counts_do_not_read_out_of_bounds() -> None:
    layer = kvpack.pack(random_pairs(1, 600), "lossless")[0]
    for side in layer.sides.values():
        side.runs[0].streams["word_counts"].view(torch.int16).fill_(-1)
    q = torch.randn(1, 2, 1, 64)
    assert attention.cpu_attention(q, layer) is not None
    assert kvpack.attend(q, layer).shape == q.shape


def test_lossless_runs_have_their_own_tables(level: int) -> None:
    cache = kvpack.pack(random_pairs(1, 300, batch=2), "lossless")
    for number, tokens in enumerate((1, 256, 70)):
        cache = cache.append([tuple(x * 2.0 ** (8 * number) for x in pair) for pair in random_pairs(1, tokens, batch=2)])
    q = torch.randn(2, 4, 3, 64, generator=torch.Generator().manual_seed(1)) * 2**-20
    assert attention.cpu_attention(q, cache[0]) is not None
    for window in (None, 130):
        found = by_c(q, cache[0], 0.1, True, None, window, None, None, level=level)
        assert_alike(found, by_torch(q, cache[0], scale=0.1, sliding_window=window), cache[0])


def test_flags_changed_later_do_not_read_out_of_bounds() -> None:
    q, layer = torch.randn(1, 2, 1, 64), kvpack.pack(random_pairs(1, 300), "int-4-med3")[0]
    expected = kvpack.attend(q, layer)
    for side in layer.sides.values():
        for name, stream in side.runs[0].streams.items():
            if name.startswith("outlier_flags"):
                stream.view(torch.int16).fill_(-1)
    assert torch.equal(kvpack.attend(q, layer), expected)


def test_nan_in_raw_values_is_visible() -> None:
    x = torch.randn(1, 1, 200, 64)
    x[0, 0, 150, 3] = torch.nan
    layer = kvpack.pack([(x, torch.randn(1, 1, 200, 64))], "raw")[0]
    out = kvpack.attend(torch.randn(1, 2, 100, 64), layer)
    assert torch.isfinite(out[:, :, :50]).all()
    assert torch.isnan(out[:, :, 50:]).all()


@pytest.mark.scenario
@pytest.mark.parametrize("q_heads", [2, 14])
@pytest.mark.parametrize("dim", [128, 40])
@pytest.mark.parametrize("recipe", ["bf16", "lossless", "kv=lossless:dtype=bf16,chunk=256", "k=group:b=4,g=8;v=raw:dtype=bf16"])
def test_nan_in_hidden_tokens_stays_hidden(recipe: str, dim: int, q_heads: int, level: int) -> None:
    """Padding may contain anything, wherever chunks and tiles begin. The same holds for torch operations."""
    q = torch.randn(2, q_heads, 1, dim, generator=torch.Generator().manual_seed(1))
    ((k, v),) = random_pairs(1, 600, batch=2, dims=(dim, dim))
    hidden = torch.zeros(2, 1, 600, 1, dtype=torch.bool)
    hidden[0, :, :290] = hidden[1, :, 470:] = True
    clean = kvpack.pack([(k, v)], recipe)[0]
    layer = kvpack.pack([(k if recipe.startswith("k=") else k.masked_fill(hidden, torch.inf), v.masked_fill(hidden, torch.nan))], recipe)[0]
    starts, lengths = torch.tensor([290, 0]), torch.tensor([600, 470])
    expected = by_c(q, clean, 0.1, True, None, None, None, lengths, starts, level=level)
    assert torch.equal(by_c(q, layer, 0.1, True, None, None, None, lengths, starts, level=level), expected)
    assert_alike(by_torch(q, layer, scale=0.1, lengths=lengths, starts=starts), expected, clean)


@pytest.mark.parametrize("infinite", [torch.inf, -torch.inf])
def test_infinite_keys_behave_as_in_torch(infinite: float) -> None:
    k, v = torch.rand(1, 1, 200, 64), torch.randn(1, 1, 200, 64)
    k[0, 0, 7] = infinite
    layer, q = kvpack.pack([(k, v)], "raw")[0], torch.rand(1, 2, 1, 64)
    torch.testing.assert_close(kvpack.attend(q, layer), by_torch(q, layer), equal_nan=True, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.scenario
def test_a_thousand_runs_agree_with_torch() -> None:
    # Attention is the same in any order of runs without a window, so fifty of them, twenty times, are as good as a thousand others.
    layers = 20 * [kvpack.pack(random_pairs(1, 32, heads=1, seed=seed), "oscar-2")[0] for seed in range(50)]
    k, v = [layer.k for layer in layers if layer.k], [layer.v for layer in layers if layer.v]
    layer = Layer(k[0].concat(*k[1:]), v[0].concat(*v[1:]))
    q = torch.randn(1, 4, 1, 64)
    assert attention.cpu_attention(q, layer) is not None
    expected = by_torch(q, layer)
    assert_alike(kvpack.attend(q, layer), expected, layer)
    merged = Layer(*(side.merged() for side in layer.sides.values()))
    assert_alike(kvpack.attend(q, merged), expected, layer)


def test_unsupported_calls_are_left_to_torch() -> None:
    pairs = random_pairs(1, 100)
    q = torch.randn(1, 2, 1, 64)
    assert isinstance(attention.cpu_attention(q, kvpack.pack(pairs, "kivi-2")[0]), cpu_attend.PreparedAttention)
    assert attention.cpu_attention(q.requires_grad_(), kvpack.pack(pairs, "kivi-2")[0]) is None
    transposed = kvpack.pack([(k, v) for k, v in pairs], "bf16")[0]
    assert transposed.k is not None
    page = transposed.k.runs[0]
    turned = {"values": page.streams["values"].transpose(2, 3).contiguous().transpose(2, 3)}
    layer = Layer(replace(transposed.k, runs=PackedRuns.from_runs([replace(page, streams=turned)])), transposed.v)
    q = q.detach()
    assert attention.cpu_attention(q, layer) is None
    torch.testing.assert_close(kvpack.attend(q, layer), kvpack.attend(q, transposed), rtol=TOLERANCE, atol=TOLERANCE)


def test_the_environment_selects_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    q, layer = _layer(100)
    assert kvpack.backends()["cpu"].startswith(f"C kernels for {library.levels()[0]}")
    assert kvpack.backends()["cuda"].startswith("no CUDA device (with one: ") == (not torch.cuda.is_available())
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    assert attention.cpu_attention(q, layer) is None
    assert kvpack.backends()["cpu"] == "PyTorch operations (KVPACK_KERNELS=torch)"
    monkeypatch.setenv(dispatch.VARIABLE, "cpu")
    monkeypatch.setattr(dispatch, "c_is_built", lambda: False)
    with pytest.raises(InvalidParameter, match="is 'cpu', which needs the C kernels, which are missing"):
        kvpack.attend(q, layer)
