"""Compiles a recipe's kernels before the first call, even on a machine without a GPU.

The calls run on CPU tensors, and each launch only records its kernel and Triton's cache key. Worker processes then compile the kernels into
Triton's cache, where later launches find them by key.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch

import kvpack
from kvpack.cache.packed_runs import PackedRuns
from kvpack.coding import dispatch, triton_version
from kvpack.formats.errors import InvalidParameter, InvalidPayload

from . import synthetic_basis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvpack.cache.side import Side
    from kvpack.coding.bases import Basis
    from kvpack.coding.encoding import Progress
    from kvpack.formats.base import Codec
    from kvpack.kernels.gpu import Gpu
    from kvpack.kernels.triton_internals import Compilation

CHIPS = {
    80: ("A100", 108, 163 << 10),
    86: ("A10, RTX 30", 84, 99 << 10),
    89: ("L40S, RTX 40", 142, 99 << 10),
    90: ("H100, H200", 132, 227 << 10),
    100: ("B200", 148, 227 << 10),
    120: ("RTX 50", 170, 99 << 10),
}
"""For each compute capability: its GPUs, their multiprocessors, and the maximum shared memory of a program in bytes.

Source: CUDA C++ Programming Guide, 16.2.
"""

TOKENS = (2048, 1000, 100)
"""Lengths of caches. Triton compiles other kernels for numbers that are not multiples of 16."""

REPEATS = (1, 2, 4, 8, 32)
"""Numbers of runs for which attention is compiled, because its launches depend on the length."""

QUERIES, STEP_TOKENS = 512, 128
"""Number of queries of a prompt, and number of tokens that a live cache packs together."""


class ModelShape(NamedTuple):
    """The shape of a model: numbers of layers, query heads and KV heads, and the head dim."""

    layers: int = 1
    q_heads: int = 32
    heads: int = 8
    dim: int = 128


_jobs: Sequence[Compilation] = ()
"""The kernels that forked processes compile."""


def representative_gpu(capability: int) -> Gpu:
    """Return the GPU that represents all GPUs with this compute capability, such as 90."""
    from kvpack.kernels.gpu import Gpu

    _, multiprocessors, shared_bytes = CHIPS[capability]
    return Gpu(divmod(capability, 10), multiprocessors, shared_bytes)


@contextmanager
def collect_kernels(gpu: Gpu) -> Iterator[dict[str, Compilation]]:
    """Context manager that collects, by key, the kernels that calls on CPU tensors would launch on ``gpu``. Calls return uninitialized
    memory.
    """
    from kvpack.kernels import gpu as gpus
    from kvpack.kernels import triton_internals
    from kvpack.kernels.attend import many_queries
    from kvpack.kernels.decode import decode

    decode_by_kernels = decode.decode_frame

    def decode_frame(codec: Codec, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        # Codes that no kernel unpacked may be outside their tables, and outlier entries depend on decoded values.
        with contextlib.suppress(IndexError, RuntimeError):
            decode_by_kernels(codec, streams)
        return codec.decode_frame(streams)

    capability = 10 * gpu.capability[0] + gpu.capability[1]
    with ExitStack() as stack:
        result = stack.enter_context(triton_internals.collect_compilations(capability))
        for module, name, value in (
            (gpus, "_without_device", gpu),
            (dispatch, "uses_triton", lambda device: True),
            (dispatch, "uses_c", lambda device: False),
            (decode, "decode_frame", decode_frame),
            (many_queries, "attend_dense", _library_outputs),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield result


def _library_outputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors with the shapes that cuDNN or FlashAttention would return. These libraries need no compilation."""
    return q.new_empty(*q.shape[:3], v.shape[3]), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def calls_to_compile(recipe: kvpack.Recipe, shape: ModelShape = ModelShape()) -> dict[str, Callable[[], object]]:  # noqa: B008
    """Return functions to call in ``collect_kernels``, by name. Each calls kvpack with caches of ``shape`` packed with ``recipe``."""
    pairs = {tokens: random_pairs(shape, tokens) for tokens in TOKENS}
    caches = {tokens: kvpack.pack(layers, recipe) for tokens, layers in pairs.items()}
    result: dict[str, Callable[[], object]] = {}
    for tokens, cache in caches.items():
        result[f"pack {tokens:,} tokens"] = partial(_pack_quietly, pairs[tokens], recipe)
        for number, layer in enumerate(cache):
            where = f"{tokens:,} tokens of layer {number}"
            result[f"unpack {where}"] = partial(layer.unpack, torch.bfloat16)
            for queries in (1, QUERIES) if tokens >= QUERIES else (1,):
                q = _zero_queries(shape, queries)
                for repeats in REPEATS if tokens == TOKENS[0] else REPEATS[:1]:
                    result[f"{queries} queries over {repeats} x {where}"] = partial(kvpack.attend, q, _repeat_runs(layer, repeats))
        result[f"steps after {tokens:,} tokens"] = partial(_run_live_steps, cache, shape)
    result["checks"] = partial(_check_streams, [side for layer in caches[TOKENS[0]] for side in layer.sides.values()])
    return result


def random_pairs(shape: ModelShape, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator("cpu").manual_seed(0)
    size = 2, 1, shape.heads, tokens, shape.dim
    x = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(torch.bfloat16)
    return [(x[0], x[1])] * shape.layers


def _zero_queries(shape: ModelShape, count: int) -> torch.Tensor:
    return torch.zeros(1, shape.q_heads, count, shape.dim, dtype=torch.bfloat16, device="cpu")


def _repeat_runs(layer: kvpack.Layer, count: int) -> kvpack.Layer:
    return kvpack.Layer(*(replace(side, runs=PackedRuns.from_runs([*side.runs] * count)) for side in layer.sides.values()))


def _pack_quietly(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], recipe: kvpack.Recipe) -> None:
    # Streams are uninitialized: scales may be beyond what a codec stores, and windows beyond their table.
    with warnings.catch_warnings(), contextlib.suppress(kvpack.KvpackError, IndexError):
        warnings.simplefilter("ignore")
        kvpack.pack(pairs, recipe)


def _run_live_steps(cache: kvpack.Cache, shape: ModelShape) -> None:
    """Append tokens to a live cache and attend to them: first single tokens, then many, which are packed."""
    live = kvpack.LiveCache.of(cache)
    for tokens in (1, 1, 1, STEP_TOKENS):
        for layer, (k, v) in enumerate(random_pairs(shape, tokens)):
            live.update(layer, k, v)
            live.attend(layer, _zero_queries(shape, tokens))
        live.roll()


def _check_streams(sides: Sequence[Side]) -> None:
    """Check the streams of ``sides`` as ``load`` does on a device."""
    dispatch.digests([(torch.zeros(1 << 16, dtype=torch.uint8), 0, 1 << 16)])
    for side in sides:
        streams = side.runs[0].streams
        if dispatch.supports_value_checks(side.codec, torch.device("cpu")):
            dispatch.check_values([(side.codec, streams, [side.runs[0].tokens], "")])
        if dispatch.supports_chunk_checks(side.codec, torch.device("cpu")):
            # Chunks that no kernel decoded fail the check.
            with contextlib.suppress(InvalidPayload):
                dispatch.check_chunks(side.codec, streams, "")


def parse_recipe(recipe: str, shape: ModelShape, basis: Basis | None = None) -> kvpack.Recipe:
    """Parse ``recipe``. If it names a synthetic basis, this basis is used. Otherwise, a recipe that needs a basis uses ``basis``."""
    text, synthetic = synthetic_basis.resolve_recipe(recipe, shape.heads, (shape.dim, shape.dim))
    parsed = kvpack.Recipe(text)
    return kvpack.Recipe(parsed, synthetic or basis) if parsed.uses_basis and (synthetic or basis) else parsed


def run(
    recipes: Sequence[str],
    shape: ModelShape,
    basis: Basis | None = None,
    capability: int | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compile the kernels of ``recipes`` for the CUDA device, or for GPUs of ``capability``. Returns a report as JSON values.

    Raises InvalidParameter if there is no device and no ``capability``, if Triton is missing or in interpreter mode, or if a recipe cannot
    be packed.
    """
    begin = time.perf_counter()
    if not triton_version.is_supported() or os.environ.get("TRITON_INTERPRET") == "1":
        needed = f"kvpack's kernels need {triton_version.requirement()}"
        raise InvalidParameter("TRITON_INTERPRET is 1: unset it to compile kernels" if triton_version.is_supported() else needed)
    import triton

    from kvpack.kernels.gpu import gpu

    if capability is None and not torch.cuda.is_available():
        known = " or ".join(map(str, CHIPS))
        raise InvalidParameter(f"PyTorch found no CUDA device: specify the compute capability with --capability {known}")
    target = gpu("cuda") if capability is None else representative_gpu(capability)
    name = torch.cuda.get_device_name() if capability is None else f"compute capability {capability / 10} ({CHIPS[capability][0]})"
    jobs: dict[str, Compilation] = {}
    keys: dict[str, list[str]] = {}
    for recipe in recipes:
        named_calls = calls_to_compile(parse_recipe(recipe, shape, basis), shape)
        with collect_kernels(target) as found:
            for call in named_calls.values():
                call()
        keys[recipe] = list(found)
        jobs |= found
    processes = max(1, min(processes or len(os.sched_getaffinity(0)), len(jobs)))
    results = dict(zip(jobs, _compile([*jobs.values()], processes, progress), strict=True))
    return {
        "gpu": name, "triton": triton.__version__, "folder": triton.knobs.cache.dir, "seconds": time.perf_counter() - begin,
        "processes": processes,
        "recipes": [{"recipe": recipe, "kernels": [results[key] for key in recipe_keys]} for recipe, recipe_keys in keys.items()],
    }  # fmt: skip


def _compile(jobs: Sequence[Compilation], processes: int, progress: Progress | None) -> list[dict[str, Any]]:
    """Compile ``jobs`` in parallel, and return their results in order."""
    global _jobs
    _jobs = jobs
    results: dict[int, dict[str, Any]] = {}
    with warnings.catch_warnings():
        # The forked processes only compile: they use none of the threads that Python warns about.
        warnings.simplefilter("ignore", DeprecationWarning)
        pool = multiprocessing.get_context("fork").Pool(processes)
    with pool:
        for index, result in pool.imap_unordered(_compile_job, range(len(jobs))):
            results[index] = result
            if progress:
                progress(len(results), len(jobs))
    return [results[index] for index in range(len(jobs))]


def _compile_job(index: int) -> tuple[int, dict[str, Any]]:
    from triton import knobs

    begin, cached, error = time.perf_counter(), [], None
    knobs.compilation.listener = lambda **fields: cached.append(fields["cache_hit"])
    try:
        _jobs[index].compile()
    except Exception as failure:
        # Triton's errors quote the line of each caller; the reason is in the first one.
        reason: BaseException = failure
        while reason.__cause__ is not None:
            reason = reason.__cause__
        error = f"{type(reason).__name__}: {str(reason)[-300:]}"
    return index, {
        "kernel": _jobs[index].kernel, "seconds": time.perf_counter() - begin, "cached": any(cached), "error": error,
    }  # fmt: skip
