"""Compare attention over many runs with attention over one run, and a machine with all cores busy with an idle one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import kvpack
from kvpack.cache.layer import Layer
from kvpack.kernels.cpu.library import THREADS

from .process_time import time_interleaved

if TYPE_CHECKING:
    from collections.abc import Iterator

RECIPES = ("kivi-2", "octopus-3")
PAGES, PAGE_TOKENS = 1000, 32
BUSY_TOKENS, BUSY_THREADS = 16384, 2
Q_HEADS, HEADS, DIM = 32, 8, 128


def run(repeats: int) -> list[dict[str, Any]]:
    """Return one row per recipe as JSON values: process time over many runs and over one, and wall time with busy and with idle cores."""
    return [{"recipe": recipe, **_pages(recipe, repeats, PAGES), **_keep_busy(recipe, repeats, BUSY_TOKENS)} for recipe in RECIPES]


def _layer(recipe: str, tokens: int, seed: int) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(1, HEADS, tokens, DIM, generator=generator).to(torch.bfloat16) for _ in range(2))
    result: Layer = kvpack.pack([(k, v)], recipe)[0]
    return result


def _query() -> torch.Tensor:
    return torch.randn(1, Q_HEADS, 1, DIM, generator=torch.Generator().manual_seed(1))


def _pages(recipe: str, repeats: int, pages: int) -> dict[str, Any]:
    k, v = zip(*((layer.k, layer.v) for layer in (_layer(recipe, PAGE_TOKENS, seed) for seed in range(pages))), strict=True)
    many = Layer(k[0].concat(*k[1:]), v[0].concat(*v[1:]))
    single = _layer(recipe, many.tokens, 0)
    many_seconds, one_seconds = (
        measured.process for measured in time_interleaved([partial(kvpack.attend, _query(), layer) for layer in (many, single)], repeats)
    )
    return {"pages": pages, "many_pages_s": many_seconds, "one_page_s": one_seconds}


def _keep_busy(recipe: str, repeats: int, tokens: int) -> dict[str, Any]:
    call = partial(kvpack.attend, _query(), _layer(recipe, tokens, 0))
    with _threads(1):
        (idle,) = time_interleaved([call], repeats)
    with _threads(BUSY_THREADS), _keep_cores_busy():
        (busy,) = time_interleaved([call], repeats)
    return {"tokens": tokens, "idle_one_thread_s": idle.wall, "busy_two_threads_s": busy.wall}


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = os.environ.get(THREADS)
    os.environ[THREADS] = str(number)
    try:
        yield
    finally:
        if before is None:
            del os.environ[THREADS]
        else:
            os.environ[THREADS] = before


@contextlib.contextmanager
def _keep_cores_busy() -> Iterator[None]:
    """Keep all cores busy within this context, with processes that only count."""
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def show(rows: list[dict[str, Any]]) -> None:
    """Print both tables."""
    from kvpack.output import print_table

    print_table(
        f"{rows[0]['pages']:,} pages of {PAGE_TOKENS} tokens, process time in one thread",
        ["what", "ms", "one page,\nms", "ratio"],
        [
            [
                row["recipe"],
                f"{1e3 * row['many_pages_s']:.2f}",
                f"{1e3 * row['one_page_s']:.2f}",
                f"{row['many_pages_s'] / row['one_page_s']:.2f}",
            ]
            for row in rows
        ],
    )
    print_table(
        f"{rows[0]['tokens']:,} tokens in {BUSY_THREADS} threads while every core is busy, wall-clock time",
        ["what", "ms", "one thread,\nidle cores, ms", "ratio"],
        [
            [
                row["recipe"],
                f"{1e3 * row['busy_two_threads_s']:.2f}",
                f"{1e3 * row['idle_one_thread_s']:.2f}",
                f"{row['busy_two_threads_s'] / row['idle_one_thread_s']:.2f}",
            ]
            for row in rows
        ],
    )
