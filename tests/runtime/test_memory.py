"""Tests of the memory for large results on the CPU."""

from __future__ import annotations

import copy
import mmap
import os

import pytest
import torch

import kvpack
from kvpack.runtime import memory
from support.caches import random_pairs

CPU = torch.device("cpu")
VALUES = memory.MIN_OWN_MEMORY_BYTES // 2


@pytest.mark.parametrize("values", [1, VALUES - 1, VALUES, VALUES + 3])
def test_a_result_is_an_ordinary_tensor(values: int) -> None:
    x = memory.empty((values,), torch.bfloat16, CPU)
    assert x.shape == (values,)
    assert x.dtype == torch.bfloat16
    assert x.is_contiguous()
    assert x.untyped_storage().nbytes() == 2 * values
    assert x.data_ptr() % 64 == 0
    x.fill_(3)
    assert torch.equal(copy.deepcopy(x), x.clone())


def test_simultaneous_results_do_not_overlap() -> None:
    with memory.shared_arena(VALUES):
        found = [
            memory.empty((40_000 + number, 3), dtype, CPU) for number, dtype in enumerate((torch.float16, torch.uint16, torch.float32))
        ]
        large = memory.empty((40 * VALUES,), torch.float16, CPU)
    for number, x in enumerate(found):
        x.fill_(number)
    large[::4096] = 7
    for number, x in enumerate(found):
        assert (x.int() == number).all()
    assert found[1].data_ptr() - found[0].data_ptr() < 2**20
    last = found.pop()
    del found
    assert (last == 2).all()


def test_memory_is_reused_once_no_result_uses_it() -> None:
    def taken() -> list[torch.Tensor]:
        with memory.shared_arena(VALUES):
            return [memory.empty((40_000 + number,), torch.float16, CPU).fill_(number) for number in range(3)]

    first = taken()
    place, last = first[0].data_ptr(), first.pop()
    del first
    second = taken()
    assert second[0].data_ptr() != place
    assert (last == 2).all()
    del last
    third = taken()
    assert third[0].data_ptr() == place
    assert all((x == number).all() for found in (second, third) for number, x in enumerate(found))


def test_small_results_are_on_the_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", None)
    with memory.shared_arena(VALUES - 1):
        memory.empty((1000, 1000), torch.float16, CPU)
    with memory.shared_arena(VALUES):
        memory.empty((100,), torch.float16, CPU)


def test_torch_allocates_under_a_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr(mmap, "mmap", none_left)
    assert memory.empty((VALUES,), torch.float16, CPU).shape == (VALUES,)


def test_unpacked_values_are_private_after_a_fork() -> None:
    (k, _) = kvpack.pack(random_pairs(1, 16384, heads=4), "kivi-2")[0].unpack()
    assert k is not None
    assert k.nbytes >= memory.MIN_OWN_MEMORY_BYTES
    before = k[0, 0, 0, 0].item()
    child = os.fork()
    if not child:
        k.zero_()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert k[0, 0, 0, 0].item() == before != 0
