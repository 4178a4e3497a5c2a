"""Tests of assumptions about internals of the installed Triton. Code is compiled for a GPU that need not exist."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvpack.coding import triton_version
from kvpack.errors import KvpackError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels' Triton is not installed")


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    from support.summing_kernel import sum_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {"out": "*fp32", "x": "*fp32", "COUNT": "constexpr"}
    source = triton.compiler.ASTSource(fn=sum_kernel, signature=signature, constexprs={"COUNT": 1024})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def test_a_launch_gets_the_requested_shared_memory(compiled: Any) -> None:
    from kvpack.kernels import triton_internals

    own = triton_internals.shared_bytes(compiled)
    assert 0 < own <= triton_internals.COMPILER_BYTES
    assert f".shared .align 16 .b8 {triton_internals.SHARED_MEMORY}[]" in compiled.asm["ptx"]
    triton_internals.enlarge_shared_memory(compiled, 96 << 10)
    assert compiled.packed_metadata == (4, 1, 96 << 10)
    assert triton_internals.shared_bytes(compiled) == own


def test_a_launcher_for_other_values_is_refused() -> None:
    import triton

    from kvpack.kernels import triton_internals

    metadata = SimpleNamespace(num_warps=4, num_ctas=1, shared=512)
    for packed in ((4, 1, 512, 1, 1, 1), [4, 1, 512], (1, 4, 512), (4, 1, 0)):
        with pytest.raises(KvpackError, match=f"Triton {triton.__version__}: the kernels expect"):
            triton_internals.shared_bytes(SimpleNamespace(packed_metadata=packed, metadata=metadata))


def test_tables_do_not_overlap_the_compilers_shared_memory() -> None:
    from kvpack.kernels import triton_internals

    size = triton_internals.COMPILER_BYTES + 1
    kernel = SimpleNamespace(packed_metadata=(4, 1, size), metadata=SimpleNamespace(num_warps=4, num_ctas=1, shared=size))
    with pytest.raises(KvpackError, match="at most 16384 bytes"):
        triton_internals.enlarge_shared_memory(kernel, 96 << 10)


def test_compiled_code_is_identified_by_its_source() -> None:
    from kvpack.kernels import triton_internals
    from support.summing_kernel import sum_kernel

    assert sum_kernel.cache_key in triton_internals.code_key((sum_kernel, 3))
    assert triton_internals.code_key((sum_kernel, 3)) != triton_internals.code_key((sum_kernel, 4))


def test_collected_kernels_have_the_keys_of_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from triton.runtime import driver

    from kvpack.kernels import triton_internals
    from support.summing_kernel import sum_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x, out = torch.zeros(64), torch.zeros(1)
    with triton_internals.collect_compilations(90) as found:
        for skipped in (0, 16, 1):
            triton_internals.CachedLaunch(sum_kernel, (1, 1, 1), (), {"COUNT": 16}, {})((out, 0), (x, skipped))
    # Kernels for aligned and for other pointers differ.
    assert len(found) == 2
    monkeypatch.setattr(driver, "_active", triton_internals._TargetDriver(90))
    launched = [sum_kernel.warmup(out, x[skipped:], grid=(1,), COUNT=16) for skipped in (0, 16, 1)]
    assert {kernel.hash for kernel in launched} == {hashlib.sha256(key.encode()).hexdigest() for key in found}
    assert {job.compile().hash for job in found.values()} == {kernel.hash for kernel in launched}


@pytest.mark.parametrize(("capability", "stored"), [(80, 80), (90, 89)])
def test_collected_kernels_compile_for_their_target(capability: int, stored: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device that a process has, if any, does not matter: forked processes cannot use it."""
    import torch
    from triton.runtime import driver

    from kvpack.kernels import triton_internals
    from support.summing_kernel import capability_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with triton_internals.collect_compilations(capability) as found:
        triton_internals.CachedLaunch(capability_kernel, (1, 1, 1), (), {}, {})((torch.zeros(1, dtype=torch.int32), 0))
    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setattr(driver, "_default", triton_internals._TargetDriver(75))
    (job,) = found.values()
    assert f", {stored};" in job.compile().asm["ptx"]


@pytest.mark.cuda
def test_a_cached_launch_binds_its_arguments_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are bound again if a pointer is not aligned as the compiled code expects."""
    import torch

    from kvpack.kernels import triton_internals
    from support.summing_kernel import sum_kernel

    bound = []
    run = type(sum_kernel).run
    monkeypatch.setattr(type(sum_kernel), "run", lambda *args, **kwargs: bound.append(1) or run(*args, **kwargs))
    launch = triton_internals.CachedLaunch(sum_kernel, (1, 1, 1), (), {"COUNT": 16}, {})
    x, out = torch.arange(64, dtype=torch.float32, device="cuda"), torch.zeros(1, device="cuda")
    found = []
    for skipped in (0, 16, 32, 1):
        launch((out, 0), (x, skipped))
        found.append(float(out))
    assert found == [float(x[skipped : skipped + 16].sum()) for skipped in (0, 16, 32, 1)]
    assert len(bound) == 2


class Compiled:
    """A stand-in for a compiled kernel and its function."""

    packed_metadata, function = (1, 1, 0), 7

    def __init__(self, launched: list[Any]) -> None:
        self.run = lambda *arguments: launched.append(arguments)


class Function:
    """A stand-in for a JIT function that counts how often Triton binds arguments and launches."""

    arg_names = ("out", "planes", "count", "SIZE")

    def __init__(self) -> None:
        self.bound: list[Any] = []
        self.launched: list[Any] = []
        self.params = [SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in self.arg_names]

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *arguments, **constants: self.bound.append((grid, arguments, constants)) or Compiled(self.launched)


def test_launches_of_one_class_are_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import triton

    from kvpack.kernels import triton_internals

    monkeypatch.setattr(triton.runtime, "JITFunction", Function)
    monkeypatch.setattr(triton_internals, "current_stream", lambda device: 5)
    function, device = Function(), torch.device("cuda:0")
    memory = torch.zeros(64, dtype=torch.int16)
    given = [
        ((memory, (memory[8:], memory[16:]), 48, {"SIZE": 4}), True),
        ((memory[32:], (memory, memory[8:]), 32, {"SIZE": 4}), False),
        # Another alignment, width, divisor, dtype, constant, number of planes, and none.
        ((memory[1:], (memory, memory), 48, {"SIZE": 4}), True),
        ((memory, (memory, memory[3:]), 48, {"SIZE": 4}), True),
        ((memory, (memory, memory), 1 << 40, {"SIZE": 4}), True),
        ((memory, (memory, memory), 49, {"SIZE": 4}), True),
        ((memory, (memory, memory), 1, {"SIZE": 4}), True),
        ((memory.view(torch.float16), (memory, memory), 48, {"SIZE": 4}), True),
        ((memory, (memory, memory), 48, {"SIZE": 5}), True),
        ((memory, (memory, memory), 48, {"SIZE": 4.0}), True),
        ((memory, (memory,), 48, {"SIZE": 4}), True),
        ((memory, (memory, None), 48, {"SIZE": 4}), True),
        ((memory, (memory[40:], None), 96, {"SIZE": 4}), False),
    ]
    for (out, planes, count, constants), bound in given:
        before = len(function.bound)
        arguments, options = (out, planes, count), {"num_warps": 2}
        if not triton_internals.launch_cached(function, 9, device, arguments, constants, options):
            triton_internals.launch_and_cache(function, 9, device, arguments, constants, options)
        assert len(function.bound) == before + bound
        if not bound:
            assert function.launched[-1] == (9, 1, 1, 5, 7, (1, 1, 0), None, None, None, *arguments, *constants.values())
    one = (memory, (memory, memory), 48)
    assert not triton_internals.launch_cached(function, 9, device, one, {"SIZE": 4}, {"num_warps": 4})
    assert not triton_internals.launch_cached(function, 9, torch.device("cuda:1"), one, {"SIZE": 4}, {"num_warps": 2})
    # A profiler sees every launch, and so does another device.
    monkeypatch.setattr(triton_internals, "current_stream", lambda device: -1)
    assert not triton_internals.launch_cached(function, 9, device, one, {"SIZE": 4}, {"num_warps": 2})


@pytest.mark.cuda
def test_cached_launches_give_the_same_results_as_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from kvpack.kernels.bitpack.columns import launch
    from support.summing_kernel import sum_planes_kernel

    bound = []
    run = type(sum_planes_kernel).run
    monkeypatch.setattr(type(sum_planes_kernel), "run", lambda *args, **kwargs: bound.append(1) or run(*args, **kwargs))
    x = torch.arange(256, dtype=torch.float32, device="cuda")
    given = [((x, x[64:]), 32), ((x[32:], x[128:]), 48), ((x[1:], x[2:]), 48), ((x,), 1), ((x[16:],), 1), ((x[3:], x[1:]), 16)]
    for planes, count in given:
        out = torch.zeros(1, device="cuda")
        launch(sum_planes_kernel, 1, x.device, out, planes, count, None, COUNT=64)
        assert float(out) == sum(float(plane[:count].sum()) for plane in planes)
    assert len(bound) == 3


def test_keys_of_code_do_not_depend_on_the_order_of_launches() -> None:
    """Otherwise, a process would not find the kernels that another one compiled."""
    from kvpack.kernels.attend import means

    def forget_keys() -> None:
        for function in (means.load_means, means._page_numbers):
            function.hash, function.used_global_vals = None, {}

    forget_keys()
    key = means.load_means.cache_key
    forget_keys()
    _ = means._page_numbers.cache_key
    assert means.load_means.cache_key == key
