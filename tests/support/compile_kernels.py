"""Compile the kernels that operations launch, for CUDA devices of one compute capability, on a machine without such a device.

    python compile_kernels.py [--json] [--every] [--quick | --first | --layouts] [--capability 90] [--dim 128] RECIPE...

Triton's interpreter accepts programs that its compiler rejects: for example, constants with two values, tuples without names, and loop
variables that change shape. Here, launches only compile kernels, so results are uninitialized memory. By default, calls with the fewest and
with the most options are compiled. ``--every`` compiles all calls whose code differs. With ``--quick``, only the first launch of each
kernel is compiled to machine code, including the loaders' assembly, and others up to Triton's layouts: of each constant of a kernel, every
value once, or, with ``--every`` too, all combinations that the calls have. With ``--first``, nothing but the first launch of each kernel is
compiled. With ``--layouts``, only attention is compiled, and only up to its layouts. For each kernel, the program prints the maximum number
of registers per thread, bytes of shared memory per program, instructions, and stack bytes per thread (spilled registers), next to the
device's limits. It also prints all failures, which include inline PTX that gets other elements in a register than it expects.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import sys
import tempfile
import time
from collections import Counter, defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import JITFunction

import kvpack
from kvpack.bench import compile_ahead
from support import register_layouts

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.kernels.gpu import Gpu

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


class CompiledKernels:
    """The kernels that were compiled for ``gpu``, by name, and the calls that failed; ``whole`` is True while machine code is generated.

    For the current recipe, ``assembled`` are the kernels that have been compiled to machine code, and ``values`` the values of constants
    with which kernels have been launched. What an earlier recipe compiled is not compiled again: ``keys`` has Triton's key of each kernel,
    and whether it was compiled to machine code.
    """

    def __init__(self, quick: bool, layouts: bool, gpu: Gpu) -> None:
        self.quick, self.only_layouts, self.gpu, self.whole = quick, layouts, gpu, not (quick or layouts)
        self.assembled: set[str] = set()
        self.values: set[tuple[str, object, str]] = set()
        self.kernels: dict[str, set[str]] = defaultdict(set)
        self.keys: dict[str, bool] = {}
        self.failed: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.used: dict[str, Usage] = {}
        self.layouts: dict[str, Counter[str]] = defaultdict(Counter)

    def note(self, recipe: str, name: str, kernel: Any) -> None:
        """Update the maximum usage of the kernels called ``name``, and check the layouts of its inline PTX."""
        counts, faults = register_layouts.find_faults(kernel.asm["ttgir"])
        self.layouts[recipe].update(counts)
        if faults:
            self.failed[f"{name}: layouts of inline PTX"] = "; ".join(faults)
        cubin = kernel.asm["cubin"]
        if not cubin:
            return
        declared = sum(size for section, size in _sections(cubin) if section.startswith(".nv.shared."))
        instructions = sum(size for section, size in _sections(cubin) if section.startswith(".text.")) // INSTRUCTION_BYTES
        usage = Usage(_attribute(cubin, _REGISTERS), kernel.metadata.shared + declared, instructions, _attribute(cubin, _STACK))
        self.used[name] = Usage(*map(max, usage, self.used.get(name, usage)))

    def attempt(self, recipe: str, operation: str, call: Callable[[], object]) -> None:
        """Compile the kernels that ``call`` launches and that no earlier call launched."""
        operation = f"{recipe}: {operation}"
        begin = time.process_time()
        try:
            with compile_ahead.collect_kernels(self.gpu) as found:
                call()
            for key, (name, _, compile_kernel) in found.items():
                self.kernels[recipe].add(name)
                self.whole = not self.only_layouts and (not self.quick or name not in self.assembled)
                self.assembled.add(name)
                if self.keys.get(key, False) or (key in self.keys and not self.whole):
                    continue
                self.keys[key] = self.whole
                self.note(recipe, name, compile_kernel())
        except Exception as error:
            self.failed[operation] = f"{type(error).__name__}: {str(error)[-300:]}"
        self.seconds[operation] = round(time.process_time() - begin, 1)


def _section_table(cubin: bytes) -> list[tuple[str, int, int, int]]:
    """Return the name, type, offset and size of each section of an ELF file."""
    begin = struct.unpack_from("<Q", cubin, 40)[0]
    entry, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, begin + number * entry) for number in range(count)]
    text = headers[names][4]
    return [(cubin[text + name : cubin.index(b"\0", text + name)].decode(), kind, at, size) for name, kind, _, _, at, size in headers]


def _sections(cubin: bytes) -> list[tuple[str, int]]:
    return [(name, size) for name, _, _, size in _section_table(cubin)]


def _attribute(cubin: bytes, number: int) -> int:
    """Return the largest value of an attribute of .nv.info that a function in ``cubin`` has."""
    most = 0
    for name, _, at, size in _section_table(cubin):
        if name != ".nv.info":
            continue
        place = at
        while place < at + size:
            form, attribute, value = struct.unpack_from("<BBH", cubin, place)
            place += 4
            if form == 4:
                if attribute == number:
                    most = max(most, struct.unpack_from("<II", cubin, place)[1])
                place += value
    return most


def truncate_compilation(compiled: CompiledKernels) -> None:
    """Skip the generation of machine code while ``compiled.whole`` is False."""
    add_stages = CUDABackend.add_stages

    def stages_now(self: Any, stages: dict[str, Any], *given: Any) -> None:
        add_stages(self, stages, *given)
        if not compiled.whole:
            del stages["llir"], stages["ptx"]
            # Only the metadata that Triton reads from a kernel without machine code.
            stages["cubin"] = lambda module, metadata: metadata.update(name="", shared=0) or b""

    CUDABackend.add_stages = stages_now


def skip_known_values(compiled: CompiledKernels, first: bool) -> None:
    """Skip launches of a kernel in which each constant has a value of ``compiled.values``: only their combination is new.

    If ``first`` is True, skip all launches of a kernel except the first.
    """
    do_compile = JITFunction._do_compile

    def compile_new_values(self: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, *given: Any) -> Any:
        compared = {"name": ""} if first else {**constants, "name": "", "warps": options.num_warps}
        values = {(self.__name__, place, repr(value)) for place, value in compared.items()}
        if values <= compiled.values:
            return None
        compiled.values |= values
        return do_compile(self, key, signature, device, constants, options, *given)

    JITFunction._do_compile = compile_new_values


def option_calls(layer: kvpack.Layer, shape: compile_ahead.ModelShape, every: bool, quick: bool) -> dict[str, Callable[[], object]]:
    """Return calls of attention with options, by name: ``every`` one, those of many queries (``quick``), or some."""
    q, many = (torch.zeros(1, shape.q_heads, queries, shape.dim, dtype=torch.bfloat16) for queries in (9, 300))
    starts, lengths = torch.zeros(1, dtype=torch.int32), torch.full((1,), layer.tokens, dtype=torch.int32)
    capped: dict[str, Any] = {"softcap": 5.0, "sliding_window": 70}
    result: dict[str, Callable[[], object]] = {"many queries, capped": partial(kvpack.attend, many, layer, softcap=5.0, starts=starts)}
    if every or not quick:
        both = partial(kvpack.attend, q, layer, **capped, lengths=lengths, starts=starts)
        result["capped queries in a window, lengths and starts"] = both
    if every:
        result["a query, lengths"] = partial(kvpack.attend, q[:, :, :1], layer, lengths=lengths)
        result["a query, starts"] = partial(kvpack.attend, q[:, :, :1], layer, starts=starts)
    return result


def select_calls(recipe: kvpack.Recipe, shape: compile_ahead.ModelShape, options: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Return the calls whose launches are compiled, by name."""
    calls = compile_ahead.calls_to_compile(recipe, shape)
    quick = options.quick or options.first or options.layouts
    if options.layouts:
        calls = {what: call for what, call in calls.items() if " queries over " in what}
    else:
        layer = kvpack.pack(compile_ahead.random_pairs(shape, compile_ahead.TOKENS[0]), recipe)[0]
        calls |= option_calls(layer, shape, options.every, quick)
    # Many queries over more runs launch nothing else, and take seconds.
    repeated = re.compile(f"{compile_ahead.QUERIES} queries over (?!1 x)")
    return {what: call for what, call in calls.items() if not (quick and repeated.match(what))}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="+", metavar="RECIPE")
    parser.add_argument("--json", action="store_true", help="print a JSON object on the last line")
    parser.add_argument("--every", action="store_true", help="compile all calls whose code differs")
    parser.add_argument("--quick", action="store_true", help="generate machine code only for the first launch of each kernel")
    parser.add_argument("--first", action="store_true", help="compile only the first launch of each kernel")
    parser.add_argument("--layouts", action="store_true", help="compile only attention, and no kernel to machine code")
    parser.add_argument("--dim", type=int, default=128, help="head dim (default 128)")
    parser.add_argument("--capability", type=int, default=90, choices=compile_ahead.CHIPS, help="compute capability times ten (default 90)")
    options = parser.parse_args(arguments)
    compiled = CompiledKernels(options.quick, options.layouts, compile_ahead.representative_gpu(options.capability))
    truncate_compilation(compiled)
    if not options.every and (options.quick or options.first or options.layouts):
        skip_known_values(compiled, options.first)
    shape = compile_ahead.ModelShape(dim=options.dim)
    with tempfile.TemporaryDirectory() as folder:
        if options.quick or options.layouts:
            # Kernels without machine code must not be found by other processes, or when they are compiled completely.
            triton.knobs.cache.dir, triton.knobs.compilation.always_compile = folder, True
        for name in options.recipes:
            recipe = compile_ahead.parse_recipe(name, shape)
            compiled.assembled.clear()
            compiled.values.clear()
            calls = select_calls(recipe, shape, options)
            # After packing and unpacking, live caches: their launches have the most values that no others have.
            for what, call in sorted(calls.items(), key=lambda item: re.search("pack|steps", item[0]) is None):
                compiled.attempt(name, what, call)
    chip, _, room = compile_ahead.CHIPS[options.capability]
    limits = Usage(MAX_REGISTERS, room, MAX_INSTRUCTIONS, sys.maxsize)
    for name, usage in compiled.used.items():
        if any(value > limit for value, limit in zip(usage, limits, strict=True)):
            compiled.failed[name] = f"{usage} exceeds the limits of {chip}, {limits}"
    found = {
        "triton": triton.__version__,
        "chip": chip,
        "shared_memory": room,
        "kernels": {recipe: sorted(names) for recipe, names in compiled.kernels.items()},
        "used": {name: usage._asdict() for name, usage in compiled.used.items()},
        "layouts": compiled.layouts,
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
