"""Tests of block-wise work: every block runs once, errors are raised, and torch's thread settings do not change."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import pytest
import torch

import kvpack
from kvpack.coding import dispatch, encoding
from kvpack.coding.blocks import for_each_block
from kvpack.formats import quaternion_search
from kvpack.formats.errors import InvalidParameter
from kvpack.kernels.cpu import library
from support.caches import RECIPES, random_pairs, unpack_all

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_every_block_runs_once_in_its_own_thread() -> None:
    seen, threads, inside = [], set(), []

    def work(start: int, stop: int) -> None:
        seen.append((start, stop))
        threads.add(threading.get_ident())
        inside.append(torch.get_num_threads())

    blocks = [(i, i + 1) for i in range(50)]
    for_each_block(work, blocks, CPU)
    assert sorted(seen) == blocks
    assert threading.get_ident() not in threads
    assert set(inside) == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_an_error_is_raised_and_threads_are_returned() -> None:
    def work(start: int, stop: int) -> None:
        if start == 3:
            raise ValueError("block 3")

    with pytest.raises(ValueError, match="block 3"):
        for_each_block(work, [(i, i + 1) for i in range(8)], CPU)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_concurrent_users_have_separate_threads() -> None:
    first_is_inside, second_is_inside, first_is_out = threading.Event(), threading.Event(), threading.Event()
    after = {}

    def use(name: str, inside: threading.Event, leave: threading.Event) -> None:
        torch.set_num_threads(2)

        def work(start: int, stop: int) -> None:
            inside.set()
            assert leave.wait(60)

        if name == "second":
            assert first_is_inside.wait(60)
        for_each_block(work, [(0, 1), (1, 2)], CPU)
        after[name] = torch.get_num_threads()
        if name == "first":
            first_is_out.set()

    users = [
        threading.Thread(target=use, args=("first", first_is_inside, second_is_inside)),
        threading.Thread(target=use, args=("second", second_is_inside, first_is_out)),
    ]
    for user in users:
        user.start()
    for user in users:
        user.join()
    late = threading.Thread(target=lambda: after.update(late=torch.get_num_threads()))
    late.start()
    late.join()
    assert after == {"first": 2, "second": 2, "late": 2}
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.skipif(not dispatch.c_is_built(), reason="the C kernels were not built")
def test_only_kernels_use_all_threads_while_c_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.delenv(library.THREADS, raising=False)
    x, of_new_threads = torch.randn(1, 2, 40, 64), []

    def threads(words: str) -> tuple[int, int]:
        with dispatch.serial_operations([kvpack.Recipe(f"k={words};v=raw").codec(0, 1, "k", 64), None], [x, None]):
            return torch.get_num_threads(), library.thread_count(None, 9)

    assert threads("octahedral:b=3,mean=32") == (1, 2)
    assert threads("scalar:b=2,outliers=3") == (2, 2)
    with contextlib.suppress(ValueError), dispatch.serial_operations([kvpack.Recipe("fp8").codec(0, 1, "k", 64)], [x]):
        while 2 not in of_new_threads:
            thread = threading.Thread(target=lambda: of_new_threads.append(torch.get_num_threads()))
            thread.start()
            thread.join()
        raise ValueError
    assert (torch.get_num_threads(), library.thread_count(None, 9)) == (2, 2)


@pytest.mark.scenario
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("recipe", RECIPES)
def test_inference_mode_does_not_affect_tensors(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BLOCK_VALUES", 1)
    # A tile holds 96 tokens of two heads of 64 channels, or 64 in groups of tokens.
    monkeypatch.setattr("kvpack.cache.side.TILE_VALUES", 96 * 2 * 64)
    first, second = random_pairs(1, 300), random_pairs(1, 20, seed=1)
    expected = kvpack.pack(first, recipe).append(second)
    with torch.inference_mode():
        found = kvpack.pack([(k + 0, v + 0) for k, v in first], recipe).append(second)
        assert all(torch.equal(a, b) for a, b in zip(unpack_all(found), unpack_all(expected), strict=True))
    tensors = [x for side in found[0].sides.values() for page in side.runs for x in (*page.streams.values(), side.tail)]
    assert not any(tensor.is_inference() for tensor in tensors)
    q = torch.randn(1, 2, 1, 64, requires_grad=True)
    kvpack.attend(q, found[0]).sum().backward()


@pytest.mark.scenario
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("tokens", [40, 300], ids=["one block", "several blocks"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_packed_cache_has_no_gradients(recipe: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BLOCK_VALUES", 1)
    pairs = [(k.requires_grad_(), v.requires_grad_()) for k, v in random_pairs(1, tokens)]
    cache = kvpack.pack(pairs, recipe).append(pairs)
    tensors = [x for side in cache[0].sides.values() for page in side.runs for x in (*page.streams.values(), side.tail)]
    assert not any(tensor.requires_grad for tensor in [*tensors, *unpack_all(cache)])


@pytest.mark.scenario
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("recipe", RECIPES)
def test_blocks_and_threads_do_not_change_codes(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What earlier tests searched decides which of two searches quaternions take, and near ties may then differ.
    monkeypatch.setattr(quaternion_search, "_GRID_BREAK_EVEN", 0)
    pairs = random_pairs(1, 300, dims=(64, 96))
    whole = kvpack.pack(pairs, recipe)
    monkeypatch.setattr(encoding, "BLOCK_VALUES", 1)
    parts = kvpack.pack(pairs, recipe)
    for side, cut in zip(whole[0].sides.values(), parts[0].sides.values(), strict=True):
        for name, stream in side.runs[0].streams.items():
            assert torch.equal(stream.view(torch.uint8), cut.runs[0].streams[name].view(torch.uint8)), name
    assert all(torch.equal(a, b) for a, b in zip(unpack_all(whole), unpack_all(parts), strict=True))


@pytest.mark.usefixtures("two_threads")
def test_an_error_in_a_thread_names_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BLOCK_VALUES", 1)
    ((k, v),) = random_pairs(1, 600)
    k[0, 1, 555, 3] = float("nan")
    with pytest.raises(InvalidParameter, match="token 555, channel 3"):
        kvpack.pack([(k, v)], "kivi-2")
