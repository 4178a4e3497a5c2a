"""What the kernels expect of Triton beyond its language, on the installed version: code is compiled for a GPU that need not be there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvpack.coding import triton_version
from kvpack.errors import KvpackError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not triton_version.supported(), reason="the kernels' Triton is not installed")


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import triton
    from summing_kernel import summed
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {"out": "*fp32", "x": "*fp32", "COUNT": "constexpr"}
    source = triton.compiler.ASTSource(fn=summed, signature=signature, constexprs={"COUNT": 1024})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def test_a_launch_takes_the_shared_memory_that_it_is_given(compiled: Any) -> None:
    from kvpack.kernels import triton_insides

    own = triton_insides.shared_bytes(compiled)
    assert 0 < own <= triton_insides.COMPILERS_BYTES
    assert f".shared .align 16 .b8 {triton_insides.SHARED_MEMORY}[]" in compiled.asm["ptx"]
    triton_insides.enlarge_shared_memory(compiled, 96 << 10)
    assert compiled.packed_metadata == (4, 1, 96 << 10)
    assert triton_insides.shared_bytes(compiled) == own


def test_a_launcher_of_other_values_is_refused() -> None:
    import triton

    from kvpack.kernels import triton_insides

    metadata = SimpleNamespace(num_warps=4, num_ctas=1, shared=512)
    for packed in ((4, 1, 512, 1, 1, 1), [4, 1, 512], (1, 4, 512), (4, 1, 0)):
        with pytest.raises(KvpackError, match=f"Triton {triton.__version__}: the kernels expect"):
            triton_insides.shared_bytes(SimpleNamespace(packed_metadata=packed, metadata=metadata))


def test_tables_do_not_begin_in_the_compilers_shared_memory() -> None:
    from kvpack.kernels import triton_insides

    size = triton_insides.COMPILERS_BYTES + 1
    kernel = SimpleNamespace(packed_metadata=(4, 1, size), metadata=SimpleNamespace(num_warps=4, num_ctas=1, shared=size))
    with pytest.raises(KvpackError, match="at most 16384 bytes"):
        triton_insides.enlarge_shared_memory(kernel, 96 << 10)


def test_code_is_named_by_its_source() -> None:
    from summing_kernel import doubled, summed

    from kvpack.kernels import triton_insides

    assert summed.cache_key in triton_insides.code_key((summed, 3))
    assert triton_insides.code_key((summed, 3)) != triton_insides.code_key((summed, 4))
    assert triton_insides.plain(doubled)(4) == 8


@pytest.mark.cuda
def test_a_cached_launch_binds_its_arguments_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again where a pointer is not aligned as the compiled code expects."""
    import torch
    from summing_kernel import summed

    from kvpack.kernels import triton_insides

    bound = []
    run = type(summed).run
    monkeypatch.setattr(type(summed), "run", lambda *args, **kwargs: bound.append(1) or run(*args, **kwargs))
    launch = triton_insides.CachedLaunch(summed, (1, 1, 1), (), {"COUNT": 16}, {})
    x, out = torch.arange(64, dtype=torch.float32, device="cuda"), torch.zeros(1, device="cuda")
    found = []
    for skipped in (0, 16, 32, 1):
        launch((out, 0), (x, skipped))
        found.append(float(out))
    assert found == [float(x[skipped : skipped + 16].sum()) for skipped in (0, 16, 32, 1)]
    assert len(bound) == 2
