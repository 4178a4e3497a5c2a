"""Compile the kernels that operations launch, for CUDA devices of one compute capability, on a machine without such a device.

    python compile_kernels.py [--json] [--every] [--quick] [--capability 90] RECIPE...

Triton's interpreter accepts programs that its compiler rejects: for example, constants with two values, tuples without names, and loop
variables that change shape. Here, launches only compile kernels, so results are uninitialized memory. By default, calls with the fewest and
with the most options are compiled. ``--every`` compiles all calls whose code differs. With ``--quick``, only the first launch of each
kernel is compiled to machine code, including the loaders' assembly, and the others up to Triton's layouts. For each kernel, the program
prints the maximum number of registers per thread, bytes of shared memory per program, instructions, and stack bytes per thread (spilled
registers), next to the device's limits. It also prints all failures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import struct
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvpack.bench import synthetic_basis
from kvpack.coding import dispatch
from kvpack.formats.errors import InvalidPayload
from kvpack.kernels import gpu, triton_internals
from kvpack.kernels.attend import attention, growing, many_queries
from kvpack.kernels.attend.prepared import Options
from kvpack.kernels.decode import decode, sides
from kvpack.kernels.encode import encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.cache.layer import Layer
    from kvpack.cache.side import Side
    from kvpack.formats.base import Codec

HEADS, TOKENS, DIM = 2, 640, 128

CHIPS = {
    80: ("A100", 163 << 10),
    86: ("A10, RTX 30", 99 << 10),
    89: ("L40S, RTX 40", 99 << 10),
    90: ("H100, H200", 227 << 10),
    100: ("B200", 227 << 10),
    120: ("RTX 50", 99 << 10),
}
"""Name of a GPU for each compute capability, and the maximum shared memory per program in bytes.

The source is the CUDA C++ Programming Guide, 16.2.
"""

MAX_REGISTERS = 255
"""Maximum number of registers per thread."""

MAX_INSTRUCTIONS = 16384
"""Maximum number of instructions of a kernel.

It is more than twice what octahedral codes and quaternions take, so only runaway unrolling exceeds it. Such kernels would compile for
minutes.
"""

INSTRUCTION_BYTES = 16

_STACK = 0x11
"""Attribute in a cubin's .nv.info section that contains the stack size of a function in bytes."""

_REGISTERS = 0x2F
"""Attribute in a cubin's .nv.info section that contains the number of registers of a function."""


class Usage(NamedTuple):
    """Resources that a kernel uses: registers per thread, shared memory in bytes per program, instructions, and stack bytes per thread."""

    registers: int
    shared: int
    instructions: int
    stack: int


class NoDevice:
    """A stub of the driver that Triton's compiler queries."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class CompiledKernels:
    """The kernels that were launched, by name, and the operations that failed.

    ``whole`` is True while machine code is generated. ``assembled`` are the kernels that have been compiled to machine code for the current
    recipe.
    """

    def __init__(self, quick: bool) -> None:
        self.quick, self.whole = quick, not quick
        self.assembled: set[str] = set()
        self.kernels: set[str] = set()
        self.failed: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.used: dict[str, Usage] = {}

    def note(self, name: str, kernel: Any) -> None:
        """Raise the recorded maximum usage of the kernels called ``name`` to that of ``kernel``."""
        cubin = kernel.asm["cubin"]
        if not cubin:
            return
        declared = sum(size for section, size in _sections(cubin) if section.startswith(".nv.shared."))
        instructions = sum(size for section, size in _sections(cubin) if section.startswith(".text.")) // INSTRUCTION_BYTES
        usage = Usage(_attribute(cubin, _REGISTERS), kernel.metadata.shared + declared, instructions, _attribute(cubin, _STACK))
        self.used[name] = Usage(*map(max, usage, self.used.get(name, usage)))

    def attempt(self, what: str, operation: Callable[[], object]) -> None:
        begin = time.process_time()
        try:
            operation()
        except Exception as error:
            self.failed[what] = f"{type(error).__name__}: {str(error)[-300:]}"
        self.seconds[what] = round(time.process_time() - begin, 1)


def _section_table(cubin: bytes) -> list[tuple[str, int, int, int]]:
    """Return the name, type, offset and size of each section of an ELF file."""
    begin = struct.unpack_from("<Q", cubin, 40)[0]
    entry, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, begin + number * entry) for number in range(count)]
    text = headers[names][4]
    return [(cubin[text + name : cubin.index(b"\0", text + name)].decode(), kind, at, size) for name, kind, _, _, at, size in headers]


def _sections(cubin: bytes) -> list[tuple[str, int]]:
    return [(name, size) for name, _, _, size in _section_table(cubin)]


def _attribute(cubin: bytes, wanted: int) -> int:
    """Return the largest value that a function in ``cubin`` has for the attribute ``wanted`` of .nv.info."""
    most = 0
    for name, _, at, size in _section_table(cubin):
        if name != ".nv.info":
            continue
        place = at
        while place < at + size:
            form, attribute, value = struct.unpack_from("<BBH", cubin, place)
            place += 4
            if form == 4:
                if attribute == wanted:
                    most = max(most, struct.unpack_from("<II", cubin, place)[1])
                place += value
    return most


def compile_alone(compiled: CompiledKernels, capability: int) -> None:
    """Make launches only compile their kernel, and let CPU tensors reach the kernels."""
    run, add_stages = JITFunction.run, CUDABackend.add_stages

    def stages_now(self: Any, stages: dict[str, Any], *given: Any) -> None:
        add_stages(self, stages, *given)
        if not compiled.whole:
            del stages["llir"], stages["ptx"]
            # Only the metadata that Triton reads from a kernel without machine code.
            stages["cubin"] = lambda module, metadata: metadata.update(name="", shared=0) or b""

    def warm(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> Any:
        compiled.kernels.add(self.__name__)
        compiled.whole = not compiled.quick or self.__name__ not in compiled.assembled
        compiled.assembled.add(self.__name__)
        kernel = run(self, *args, grid=grid, warmup=True, **given)
        compiled.note(self.__name__, kernel)
        return kernel

    def launch(self: Any, *pointers: tuple[torch.Tensor, int]) -> None:
        tensors = [tensor.view(-1)[skipped:] if skipped else tensor for tensor, skipped in pointers]
        self.function.run(*tensors, *self.arguments, grid=self.grid, warmup=True, **self.constants, **self.options)

    JITFunction.run = warm
    CUDABackend.add_stages = stages_now
    triton_internals.CachedLaunch.__call__ = launch  # type: ignore[method-assign]
    driver.set_active(NoDevice(capability))
    gpu.assume(gpu.Gpu(divmod(capability, 10), 132, CHIPS[capability][1]))
    # Outlier entries depend on decoded values, which no kernel computes here.
    decode.decode_frame = lambda codec, streams: codec.decode_frame(streams)


def random_layer(recipe: str) -> Layer:
    generator = torch.Generator().manual_seed(0)
    pair = [torch.randn(2, HEADS, TOKENS, DIM, generator=generator).to(torch.bfloat16) for _ in "kv"]
    return synthetic_basis.pack(pair[0], pair[1], recipe)


def attend(layer: Layer, recipe: str, compiled: CompiledKernels, every: bool) -> None:
    lengths, starts = torch.full((2,), TOKENS, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    scale = DIM**-0.5
    calls = {"a query": (1, Options(scale))}
    if every or not compiled.quick:
        capped = Options(scale, softcap=5.0, sliding_window=70, lengths=True, starts=True)
        calls["capped queries in a window, lengths and starts"] = (9, capped)
    if every:
        calls |= {"a query, lengths": (1, Options(scale, lengths=True)), "a query, starts": (1, Options(scale, starts=True))}
    for what, (q_len, options) in calls.items():
        q = torch.randn(2, 4 * HEADS, q_len, DIM).to(torch.bfloat16)
        given = lengths if options.lengths else None, starts if options.starts else None
        if attention.supports(q, layer):
            call = partial(lambda q, options, given: attention.prepare(q, layer, options)(q, None, *given), q, options, given)
            compiled.attempt(f"{recipe}: {what}", call)
    q = torch.randn(2, 4 * HEADS, 1, DIM).to(torch.bfloat16)
    if growing.GrowingCall.supports(q, layer):
        for options in (Options(scale, sliding_window=70, starts=True), *([Options(scale)] if every else ())):
            given = starts if options.starts else None
            step = partial(lambda options, given: growing.GrowingCall(q, layer, options)(q, lengths, None, given), options, given)
            compiled.attempt(f"{recipe}: a step, {options}", step)
    many = torch.randn(2, 4 * HEADS, 300, DIM).to(torch.bfloat16)
    compiled.attempt(f"{recipe}: many queries", lambda: many_queries.prepare(many, layer, Options(scale))(many))
    capped = Options(scale, softcap=5.0, starts=True)
    compiled.attempt(f"{recipe}: many queries, capped", lambda: many_queries.prepare(many, layer, capped)(many, None, None, starts))


def encode_and_decode(layer: Layer, recipe: str, compiled: CompiledKernels) -> None:
    for name, side in layer.sides.items():
        for dtype in (torch.bfloat16, torch.float32):
            out = torch.empty(2, HEADS, TOKENS, DIM, dtype=dtype)
            compiled.attempt(f"{recipe}: {name} to {dtype}", lambda side=side, out=out: sides.unpack_into(side, 0, TOKENS, out))
        x = torch.randn(2, HEADS, TOKENS, DIM).to(torch.bfloat16)
        compiled.attempt(f"{recipe}: {name} encoded", lambda side=side, x=x: encode_on_device(side.codec, x))
        if dispatch.supports_value_checks(side.codec, out.device):
            checked = side.codec, side.runs[0].streams, [TOKENS], "x"
            compiled.attempt(f"{recipe}: {name}'s rules", lambda checked=checked: dispatch.check_values([checked])())
        if dispatch.supports_chunk_checks(side.codec, out.device):
            compiled.attempt(f"{recipe}: {name} checked", lambda side=side: check(side))


def encode_on_device(codec: Codec, x: torch.Tensor) -> None:
    # Trellis windows in uninitialized memory are not valid table indices.
    with contextlib.suppress(IndexError):
        encode.encode(codec, x, errors=torch.empty(x.shape[:3]) if codec.summary.direction_spread else None)


def check(side: Side) -> None:
    # Chunks that were not really decoded fail this check.
    with contextlib.suppress(InvalidPayload):
        dispatch.check_chunks(side.codec, side.runs[0].streams, "x")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="+", metavar="RECIPE")
    parser.add_argument("--json", action="store_true", help="print a JSON object on the last line")
    parser.add_argument("--every", action="store_true", help="compile every call that results in different code")
    parser.add_argument("--quick", action="store_true", help="generate machine code only for the first launch of each kernel")
    parser.add_argument(
        "--capability", type=int, default=90, choices=CHIPS, help="compute capability times ten, such as 90 for 9.0 (default 90)"
    )
    options = parser.parse_args(arguments)
    layers = {recipe: random_layer(recipe) for recipe in options.recipes}
    compiled = CompiledKernels(options.quick)
    compile_alone(compiled, options.capability)
    dispatch.uses_triton = lambda device: True  # type: ignore[assignment]
    for recipe, layer in layers.items():
        compiled.assembled.clear()
        attend(layer, recipe, compiled, options.every)
        encode_and_decode(layer, recipe, compiled)
    chip, room = CHIPS[options.capability]
    limits = Usage(MAX_REGISTERS, room, MAX_INSTRUCTIONS, sys.maxsize)
    for name, usage in compiled.used.items():
        if any(value > limit for value, limit in zip(usage, limits, strict=True)):
            compiled.failed[name] = f"{usage} exceeds {limits}, the limits of {chip}"
    found = {
        "triton": triton.__version__,
        "chip": chip,
        "shared_memory": room,
        "kernels": sorted(compiled.kernels),
        "used": {name: usage._asdict() for name, usage in compiled.used.items()},
        "failed": compiled.failed,
        "seconds": compiled.seconds,
    }
    if options.json:
        # Triton prints rejected modules without a final newline.
        print(f"\n{json.dumps(found)}")
    else:
        print(f"compute capability {options.capability / 10} ({chip}), {room:,} bytes of shared memory per program")
        print(f"  {', '.join(options.recipes)}")
        for name, usage in sorted(compiled.used.items()):
            print(
                f"  {name:<20} {usage.registers:>4} registers {usage.shared:>8,} bytes of shared memory "
                f"{usage.instructions:>6,} instructions {usage.stack:>4} bytes of stack"
            )
        for what, failure in compiled.failed.items():
            print(f"  FAILED {what}: {failure}")
    return 1 if compiled.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
