"""Compile what operations launch on a CUDA device, for a chip of compute capability 9.0, on a machine without one.

    python compile_kernels.py [--every] RECIPE...

Triton's interpreter takes programs that its compiler refuses: constants that are given two values, tuples without names, variables of a
loop that change their shape. Launches only compile here, so results are memory as it was. Calls are those with the fewest and the most
options, which are not what loaders differ by, or with ``--every`` all that differ in code. The last line is a JSON object: the kernels
that were compiled, and what failed.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton import language
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvpack.bench import synthetic_basis
from kvpack.coding import dispatch
from kvpack.formats.errors import InvalidPayload
from kvpack.kernels import triton_insides
from kvpack.kernels.attend import attention, growing, many_queries, plan
from kvpack.kernels.attend.prepared import Options
from kvpack.kernels.decode import decode, sides
from kvpack.kernels.encode import encode, rows
from kvpack.kernels.tiles import addresses

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.cache.layer import Layer
    from kvpack.cache.side import Side

HEADS, TOKENS, DIM = 2, 640, 128


class NoDevice:
    """What Triton's compiler asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Compiled:
    """The kernels that were launched, by name, and the operations that failed."""

    def __init__(self) -> None:
        self.kernels: set[str] = set()
        self.failed: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def attempt(self, what: str, operation: Callable[[], object]) -> None:
        begin = time.process_time()
        try:
            operation()
        except Exception as error:
            self.failed[what] = f"{type(error).__name__}: {str(error)[-300:]}"
        self.seconds[what] = round(time.process_time() - begin, 1)


def compile_alone(compiled: Compiled) -> None:
    """From now on every launch compiles its kernel and does nothing else, and tensors of the CPU go to the kernels."""
    run = JITFunction.run

    def warm(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> Any:
        compiled.kernels.add(self.__name__)
        return run(self, *args, grid=grid, warmup=True, **given)

    def launch(self: Any, *pointers: tuple[torch.Tensor, int]) -> None:
        tensors = [tensor.view(-1)[skipped:] if skipped else tensor for tensor, skipped in pointers]
        self.function.run(*tensors, *self.arguments, grid=self.grid, warmup=True, **self.constants, **self.options)

    JITFunction.run = warm
    triton_insides.CachedLaunch.__call__ = launch  # type: ignore[method-assign]
    driver.set_active(NoDevice())
    addresses.uses_assembly = lambda device: True  # type: ignore[assignment]
    plan.overlaps = lambda device: True  # type: ignore[assignment]
    plan._multiprocessors = lambda device: 132
    rows.operand_of = lambda x: language.float16 if x.dtype == torch.float16 else language.bfloat16  # type: ignore[assignment]
    # What is attended depends on the values of outliers, which no kernel decodes here.
    decode.decode_frame = lambda codec, streams: codec.decode_frame(streams)


def packed(recipe: str) -> Layer:
    generator = torch.Generator().manual_seed(0)
    pair = [torch.randn(2, HEADS, TOKENS, DIM, generator=generator).to(torch.bfloat16) for _ in "kv"]
    return synthetic_basis.pack(pair[0], pair[1], recipe)


def attend(layer: Layer, recipe: str, compiled: Compiled, every: bool) -> None:
    lengths, starts = torch.full((2,), TOKENS, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    scale = DIM**-0.5
    calls = {
        "a query": (1, Options(scale)),
        "capped queries in a window, lengths and starts": (9, Options(scale, softcap=5.0, sliding_window=70, lengths=True, starts=True)),
    }
    if every:
        calls |= {"a query, lengths": (1, Options(scale, lengths=True)), "a query, starts": (1, Options(scale, starts=True))}
    for what, (q_len, options) in calls.items():
        q = torch.randn(2, 4 * HEADS, q_len, DIM).to(torch.bfloat16)
        given = lengths if options.lengths else None, starts if options.starts else None
        if attention.supports(q, layer):
            call = partial(lambda q, options, given: attention.prepare(q, layer, options)(q, None, *given), q, options, given)
            compiled.attempt(f"{recipe}: {what}", call)
    q = torch.randn(2, 4 * HEADS, 1, DIM).to(torch.bfloat16)
    if growing.GrowingCall.takes(q, layer):
        for options in (Options(scale, sliding_window=70, starts=True), *([Options(scale)] if every else ())):
            given = starts if options.starts else None
            step = partial(lambda options, given: growing.GrowingCall(q, layer, options)(q, lengths, None, given), options, given)
            compiled.attempt(f"{recipe}: a step, {options}", step)
    many = torch.randn(2, 4 * HEADS, 300, DIM).to(torch.bfloat16)
    compiled.attempt(f"{recipe}: many queries", lambda: many_queries.attend(many, layer, scale))
    compiled.attempt(f"{recipe}: many queries, capped", lambda: many_queries.attend(many, layer, scale, softcap=5.0, starts=starts))


def code(layer: Layer, recipe: str, compiled: Compiled) -> None:
    for name, side in layer.sides.items():
        for dtype in (torch.bfloat16, torch.float32):
            out = torch.empty(2, HEADS, TOKENS, DIM, dtype=dtype)
            compiled.attempt(f"{recipe}: {name} to {dtype}", lambda side=side, out=out: sides.unpack_into(side, 0, TOKENS, out))
        x = torch.randn(2, HEADS, TOKENS, DIM).to(torch.bfloat16)
        compiled.attempt(f"{recipe}: {name} encoded", lambda side=side, x=x: encode.encode(side.codec, x))
        if dispatch.checks_values(side.codec, out.device):
            streams = side.pages[0].streams
            compiled.attempt(
                f"{recipe}: {name}'s rules", lambda side=side, streams=streams: dispatch.check_values([(side.codec, streams, "x")])()
            )
        if dispatch.checks_chunks(side.codec, out.device):
            compiled.attempt(f"{recipe}: {name} checked", lambda side=side: check(side))


def check(side: Side) -> None:
    # No chunk ends well that was not decoded.
    with contextlib.suppress(InvalidPayload):
        dispatch.check_chunks(side.codec, side.pages[0].streams, "x")


def main(arguments: list[str]) -> int:
    every, recipes = "--every" in arguments, [argument for argument in arguments if argument != "--every"]
    layers = {recipe: packed(recipe) for recipe in recipes}
    compiled = Compiled()
    compile_alone(compiled)
    dispatch.uses_triton = lambda device: True  # type: ignore[assignment]
    for recipe, layer in layers.items():
        attend(layer, recipe, compiled, every)
        code(layer, recipe, compiled)
    found = {"triton": triton.__version__, "kernels": sorted(compiled.kernels), "failed": compiled.failed, "seconds": compiled.seconds}
    # Triton prints modules that it refuses, without an end of line.
    print(f"\n{json.dumps(found)}")
    return 1 if compiled.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
