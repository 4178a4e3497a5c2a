"""Work over blocks: every block once, errors raised, torch's threads as they were."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

import kvpack
from kvpack import encoding
from kvpack.blocks import for_each_block
from kvpack.formats.errors import NonFinite

from caches import RECIPES, dense, random_pairs  # isort: skip

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
def test_every_block_once_in_threads_of_their_own() -> None:
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
def test_an_error_is_raised_and_the_threads_are_given_back() -> None:
    def work(start: int, stop: int) -> None:
        if start == 3:
            raise ValueError("block 3")

    with pytest.raises(ValueError, match="block 3"):
        for_each_block(work, [(i, i + 1) for i in range(8)], CPU)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_users_at_the_same_time_give_the_threads_back_once() -> None:
    barrier = threading.Barrier(2)

    def work(start: int, stop: int) -> None:
        if start == 0:
            barrier.wait(10)

    users = [threading.Thread(target=for_each_block, args=(work, [(0, 1), (1, 2)], CPU)) for _ in range(2)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("recipe", RECIPES)
def test_blocks_and_threads_change_no_code(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = random_pairs(1, 600, dims=(64, 96))
    whole = kvpack.pack(pairs, recipe)
    monkeypatch.setattr(encoding, "BLOCK_VALUES", 1)
    parts = kvpack.pack(pairs, recipe)
    for side, cut in zip(whole[0].sides.values(), parts[0].sides.values(), strict=True):
        for name, stream in side.pages[0].streams.items():
            assert torch.equal(stream.view(torch.uint8), cut.pages[0].streams[name].view(torch.uint8)), name
    assert all(torch.equal(a, b) for a, b in zip(dense(whole), dense(parts), strict=True))


@pytest.mark.usefixtures("two_threads")
def test_an_error_in_a_thread_names_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BLOCK_VALUES", 1)
    ((k, v),) = random_pairs(1, 600)
    k[0, 1, 555, 3] = float("nan")
    with pytest.raises(NonFinite, match="token 555, channel 3"):
        kvpack.pack([(k, v)], "kivi-2")
