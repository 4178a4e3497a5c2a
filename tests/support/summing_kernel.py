"""A kernel that uses shared memory allocated by the compiler, for a sum over several warps."""

import triton
from triton import language as tl
from triton.language.target_info import cuda_capability_geq


@triton.jit
def sum_kernel(out: tl.tensor, x: tl.tensor, COUNT: tl.constexpr) -> None:
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, COUNT)), 0))


@triton.jit
def sum_planes_kernel(out: tl.tensor, planes: tl.tuple, count: tl.tensor, absent: tl.tensor, COUNT: tl.constexpr) -> None:
    total = tl.zeros((), tl.float32)
    for number in tl.static_range(len(planes)):
        at = tl.arange(0, COUNT)
        total += tl.sum(tl.load(planes[number] + at, at < count, 0), 0)
    if absent is None:
        tl.store(out, total)


@triton.jit
def capability_kernel(out: tl.tensor) -> None:
    tl.store(out, 89 if cuda_capability_geq(8, 9) else 80)
