"""Execute inline PTX in Triton's interpreter, which otherwise has none, so that tests compare it with plain Triton.

An instance of the PTX processes ``pack`` elements. By default these are neighbors on the last axis, as in the layouts of matrix operands
that kernels expect. With ``shuffled``, they are arbitrary, because the compiler may choose others. Lanes are arbitrary too, except for PTX
that exchanges registers between lanes: it gets the lanes of the layout of matrix products.

The emulator raises AssertionError for PTX that a GPU could execute differently: reads of registers that were never written, accesses of
memory that is not declared or not aligned, and reads of inputs after a write to an output that may share their register.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.language import target_info
from triton.runtime import interpreter

from kvpack.kernels.decode import sides
from kvpack.kernels.tiles import addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Array = np.ndarray[Any, np.dtype[Any]]

WIDTHS: dict[int, type[np.unsignedinteger[Any]]] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}

STATIC_ADDRESS, DYNAMIC_ADDRESS, SHARED_BYTES = 1 << 10, 64 << 10, 256 << 10
"""Where the emulated shared memory begins that PTX declares and that a launch has, and its size."""

UNWRITTEN = 0x7E
"""Byte of shared memory that was never written: two of them are NaN in float16."""


class Instruction(NamedTuple):
    """One instruction: its name, its operands, and the predicate under which it is executed, if any."""

    name: str
    operands: tuple[str, ...]
    predicate: str


class SharedMemory:
    """The shared memory of a program, with the addresses and sizes of the symbols that PTX declared."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all contents and declarations, because the next program begins."""
        self.bytes = np.full(SHARED_BYTES, UNWRITTEN, np.uint8)
        self.symbols = {"global_smem": (DYNAMIC_ADDRESS, SHARED_BYTES - DYNAMIC_ADDRESS)}
        self.registers: dict[str, int] = {}

    def declare(self, name: str, alignment: int, size: int) -> None:
        assert name not in self.symbols, f"{name} is declared twice"
        end = max((sum(place) for symbol, place in self.symbols.items() if symbol != "global_smem"), default=STATIC_ADDRESS)
        self.symbols[name] = -(-end // alignment) * alignment, size

    def places(self, address: Array, nbytes: int) -> Array:
        """Return the indices of ``nbytes`` bytes at each address, which must be aligned and inside of one symbol."""
        assert not (address % nbytes).any(), f"an access of {nbytes} bytes is not aligned"
        inside = np.zeros(address.shape, bool)
        for begin, size in self.symbols.values():
            inside |= (address >= begin) & (address + nbytes <= begin + size)
        assert inside.all(), "an access is outside of declared memory"
        return address[:, None].astype(np.int64) + np.arange(nbytes)

    def load(self, address: Array, bits: int, count: int) -> list[Array]:
        found = np.ascontiguousarray(self.bytes[self.places(address, bits // 8 * count)])
        return list(found.view(WIDTHS[bits]).T)

    def store(self, address: Array, values: Sequence[Array]) -> None:
        places = self.places(address, sum(value.dtype.itemsize for value in values))
        self.bytes[places] = np.ascontiguousarray(np.stack(values, 1)).view(np.uint8)


shared = SharedMemory()


def permute(a: Array, b: Array, selector: Array) -> Array:
    """Emulate ``prmt.b32``, which selects bytes of two registers, or repeats the sign of a byte in all of its bits."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros(both.shape, np.uint64)
    for place in range(4):
        nibble = (selector >> np.uint32(4 * place) & np.uint32(15)).astype(np.uint64)
        byte = both >> np.uint64(8) * (nibble & np.uint64(7)) & np.uint64(0xFF)
        signs = (byte >> np.uint64(7)) * np.uint64(0xFF)
        result |= np.where(nibble & np.uint64(8), signs, byte) << np.uint64(8 * place)
    return result.astype(np.uint32)


def choose(a: Array, b: Array, c: Array, table: Array) -> Array:
    """Emulate ``lop3.b32``, which computes any function of three bits."""
    result = np.zeros(a.shape, np.uint32)
    for number in range(8):
        if int(table.flat[0]) >> number & 1:
            terms = (value if number >> bit & 1 else ~value for bit, value in ((2, a), (1, b), (0, c)))
            result |= next(terms) & next(terms) & next(terms)
    return result


def shift(value: Array, by: Array, left: bool) -> Array:
    wide, amount = value.astype(np.uint64), np.minimum(by, 32).astype(np.uint64)
    return ((wide << amount if left else wide >> amount) & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def funnel(low: Array, high: Array, by: Array, left: bool) -> Array:
    both, amount = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32), (by & np.uint32(31)).astype(np.uint64)
    return (both << amount >> np.uint64(32) if left else both >> amount & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def by_halves(function: Callable[..., Array]) -> Callable[..., Array]:
    """Return an operation on pairs of float16: ``function`` computes in float64, which is exact for sums, products and both together."""

    def operation(*operands: Array) -> Array:
        values = (operand.view(np.float16).astype(np.float64) for operand in map(np.ascontiguousarray, operands))
        return function(*values).astype(np.float16).view(np.uint32)

    return operation


def of_halves(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *operands: function(*(np.ascontiguousarray(operand).view(np.uint16) for operand in operands)).view(np.uint32)


def of_floats(function: Callable[..., Array]) -> Callable[..., Array]:
    def operation(*operands: Array) -> Array:
        return function(*(operand.view(np.float32).astype(np.float64) for operand in operands)).astype(np.float32).view(np.uint32)

    return operation


def e4m3(pair: Array) -> Array:
    code = np.ascontiguousarray(pair).view(np.uint8).astype(np.int32)
    exponent, fraction = code >> 3 & 15, code & 7
    value = np.where(exponent, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
    value = np.where(code & 0x7F == 0x7F, np.nan, value)
    return np.where(code & 0x80, -value, value).astype(np.float16).view(np.uint32)


def transposed(rows: Array) -> Array:
    """Emulate ``movmatrix``, which transposes a matrix of 8 x 8 float16 of which each of 32 lanes has two neighbors of one row."""
    return rows.view(np.uint16).reshape(-1, 8, 8).transpose(0, 2, 1).copy().view(np.uint32).reshape(-1)


def signed(value: Array) -> Array:
    return value.astype(np.int32)


OPERATIONS: dict[str, Callable[..., Array]] = {
    "and.b32": np.bitwise_and,
    "and.b64": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "add.u32": np.add,
    "sub.u32": np.subtract,
    "min.u32": np.minimum,
    "mul.lo.u32": np.multiply,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "shr.u32": lambda a, b: shift(a, b, False),
    "shr.b32": lambda a, b: shift(a, b, False),
    "shl.b32": lambda a, b: shift(a, b, True),
    "shf.l.wrap.b32": lambda a, b, c: funnel(a, b, c, True),
    "shf.r.wrap.b32": lambda a, b, c: funnel(a, b, c, False),
    "prmt.b32": permute,
    "lop3.b32": choose,
    "max.u16x2": of_halves(np.maximum),
    "max.f16x2": by_halves(np.fmax),
    "min.f16x2": by_halves(np.fmin),
    "add.rn.f16x2": by_halves(np.add),
    "sub.f16x2": by_halves(np.subtract),
    "mul.rn.f16x2": by_halves(np.multiply),
    "fma.rn.f16x2": by_halves(lambda a, b, c: a * b + c),
    "ex2.approx.f16x2": by_halves(np.exp2),
    "fma.rn.f32": of_floats(lambda a, b, c: a * b + c),
    "ex2.approx.ftz.f32": of_floats(np.exp2),
    "cvt.rn.f16x2.e4m3x2": e4m3,
    "cvt.u32.u16": lambda a: a.astype(np.uint32),
    "setp.lt.u32": np.less,
    "setp.lt.s32": lambda a, b: signed(a) < signed(b),
    "setp.gt.s32": lambda a, b: signed(a) > signed(b),
    "setp.eq.u32": np.equal,
    "setp.ne.b32": np.not_equal,
    "setp.eq.and.b32": lambda a, b, c: (a == b) & c,
    "selp.f32": lambda a, b, c: np.where(c, a, b),
    "movmatrix.sync.aligned.m8n8.trans.b16": transposed,
}

WITHOUT_EFFECT = ("bar.warp.sync", "prefetch.global.L2", "cp.async.bulk.prefetch.L2.global")
"""Instructions that change no register and no memory of a program whose threads take turns."""

ACCESS = re.compile(r"(?P<kind>ld|st)\.(?P<space>shared|global)(\.v(?P<count>\d))?\.[bfu](?P<bits>\d+)")


@lru_cache(maxsize=1024)
def parsed(ptx: str) -> tuple[tuple[Instruction, ...], dict[str, int], bool]:
    """Return the instructions of ``ptx``, the bits of the registers that it declares (1 for predicates), and whether they have a scope."""
    text = ptx.strip()
    scoped = text.startswith("{")
    instructions, declared = [], {}
    for statement in (text[1:-1] if scoped else text).split(";"):
        words = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", statement)
        if not words:
            continue
        if words[0] == ".reg":
            for name in words[2:]:
                base, _, count = name.rstrip(">").partition("<")
                for register in [f"{base}{number}" for number in range(int(count))] if count else [name]:
                    declared[register] = 1 if words[1] == ".pred" else int(words[1][2:])
            continue
        predicate = words.pop(0)[1:] if words[0].startswith("@") else ""
        instructions.append(Instruction(words[0], tuple(words[1:]), predicate))
    return tuple(instructions), declared, scoped


class Execution:
    """Registers of one execution of inline PTX, one value per instance, and the operands that it may still read."""

    def __init__(self, ptx: str, constraints: str, inputs: Sequence[Array], lanes: Array) -> None:
        self.instructions, self.declared, scoped = parsed(ptx)
        forms = constraints.split(",")
        self.outputs = [form for form in forms if form.startswith("=")]
        assert len(forms) == len(self.outputs) + len(inputs), (constraints, len(inputs))
        self.count, self.lanes, self.inputs_are_readable = len(lanes), lanes, True
        bits = {"r": 32, "l": 64, "f": 32}
        self.registers: dict[str, Array] = {}
        self.kept = () if scoped else tuple(self.declared)
        for number, (form, value) in enumerate(zip(forms[len(self.outputs) :], inputs, strict=True), len(self.outputs)):
            assert value.dtype.itemsize * 8 == bits[form], (constraints, value.dtype)
            self.registers[f"${number}"] = value
        self.widths = {**self.declared, **{f"${number}": bits[form.lstrip("=&")] for number, form in enumerate(forms)}}

    def value(self, operand: str, bits: int) -> Array:
        """Return the value of a register, a symbol, a special register or a constant."""
        special = {"%laneid": self.lanes, "%tid.x": np.arange(self.count, dtype=np.uint32)}
        if operand in special:
            return special[operand]
        if operand.startswith("$") and int(operand[1:]) >= len(self.outputs):
            assert self.inputs_are_readable, f"{operand} is read after an output was written that is not marked as early clobber"
        if operand.startswith("$") or operand in self.declared:
            assert operand in self.registers, f"{operand} is read before it is written"
            return self.registers[operand]
        if operand in shared.registers:
            return np.full(self.count, shared.registers[operand], np.uint32)
        if operand in shared.symbols:
            return np.full(self.count, shared.symbols[operand][0], np.uint32)
        number = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
        return np.full(self.count, number & (1 << bits) - 1, WIDTHS[bits])

    def write(self, register: str, value: Array, predicate: Array | None = None) -> None:
        assert register in self.widths, f"{register} is not declared"
        bits = self.widths[register]
        value = value if bits == 1 else value.astype(WIDTHS[bits])
        if predicate is not None:
            value = np.where(predicate, value, self.value(register, bits))
        self.registers[register] = value
        if register.startswith("$"):
            assert int(register[1:]) < len(self.outputs), f"{register} is an input"
            self.inputs_are_readable &= self.outputs[int(register[1:])].startswith("=&")

    def run(self) -> list[Array]:
        for name, operands, predicate in self.instructions:
            condition = self.value(predicate, 32) if predicate else None
            if access := ACCESS.fullmatch(name):
                self.access(access, operands, condition)
            elif name == ".shared":
                symbol, _, size = operands[3].rstrip("]").partition("[")
                shared.declare(symbol, int(operands[1]), int(size))
            elif name.startswith("mov."):
                self.move(operands, int(name[-2:]), condition)
            elif name not in WITHOUT_EFFECT:
                bits = 64 if name.endswith("b64") else 32
                self.write(operands[0], OPERATIONS[name](*(self.value(operand, bits) for operand in operands[1:])), condition)
        shared.registers |= {name: int(self.registers[name].flat[0]) for name in self.kept}
        return [self.registers[f"${number}"] for number in range(len(self.outputs))]

    def move(self, operands: tuple[str, ...], bits: int, condition: Array | None) -> None:
        """Emulate ``mov``, which also splits a register into a vector of smaller ones, or joins them."""
        target, source = operands
        if target.startswith("{"):
            names = re.findall(r"[^\s,{}]+", target)
            parts = np.ascontiguousarray(self.value(source, bits)).view(WIDTHS[bits // len(names)]).reshape(self.count, -1)
            for name, part in zip(names, parts.T, strict=True):
                self.write(name, part)
        elif source.startswith("{"):
            names = re.findall(r"[^\s,{}]+", source)
            parts = np.stack([self.value(name, bits // len(names)) for name in names], 1)
            self.write(target, np.ascontiguousarray(parts).view(WIDTHS[bits]).reshape(-1), condition)
        else:
            self.write(target, self.value(source, bits), condition)

    def access(self, access: re.Match[str], operands: tuple[str, ...], condition: Array | None) -> None:
        """Emulate loads and stores of up to four values. Masked loads leave their registers as they are."""
        bits, count = int(access["bits"]), int(access["count"] or 1)
        place, vector = operands if access["kind"] == "st" else reversed(operands)
        names = re.findall(r"[^\s,{}]+", vector)
        assert len(names) == count, operands
        base, _, offset = place.strip("[]").partition("+")
        begin = self.value(base.strip(), 32)
        address = begin + begin.dtype.type(int(offset or 0))
        active = np.ones(self.count, bool) if condition is None else condition
        if access["kind"] == "st":
            shared.store(address[active], [self.value(name, bits)[active].astype(WIDTHS[bits]) for name in names])
            return
        found = []
        if access["space"] == "shared":
            for value in shared.load(address[active], bits, count):
                found.append(np.zeros(self.count, WIDTHS[bits]))
                found[-1][active] = value
        else:
            size = bits // 8
            assert not (address[active] % np.uint64(size * count)).any(), "a load is not aligned"
            for number in range(count):
                nothing = np.zeros(self.count, WIDTHS[bits])
                found.append(interpreter._interpreter.load(address + np.uint64(size * number), active, nothing, nothing.dtype))
        for name, value in zip(names, found, strict=True):
            self.write(name, value, condition)


def execute(ptx: str, constraints: str, arguments: Sequence[Array], bits: Sequence[int], pack: int, order: Array) -> list[Array]:
    """Execute ``ptx`` over flat ``arguments`` and return flat results of ``bits`` bits.

    ``order`` lists the elements so that each ``pack`` of them are for one instance.
    """
    packed = order.reshape(-1, pack)
    lanes = np.arange(len(packed), dtype=np.uint32) % 32 if "movmatrix" in ptx else np.random.default_rng(0).integers(0, 32, len(packed))
    inputs: list[Array] = []
    for argument in arguments:
        size = argument.dtype.itemsize * 8
        elements = np.ascontiguousarray(argument[packed]).view(WIDTHS[size])
        registers = elements if size >= 32 else elements.view(WIDTHS[min(32, size * pack)])
        inputs += [np.ascontiguousarray(register) for register in registers.astype(WIDTHS[max(32, size)]).T]
    outputs = Execution(ptx, constraints, inputs, lanes.astype(np.uint32)).run()
    results = []
    for size in bits:
        count = max(1, size * pack // 32)
        registers, outputs = np.stack(outputs[:count], 1), outputs[count:]
        values = np.empty(order.size, WIDTHS[size])
        values[order] = np.ascontiguousarray(registers).view(WIDTHS[size])[:, :pack].reshape(-1)
        results.append(values)
    assert not outputs, constraints
    return results


@contextmanager
def emulation(monkeypatch: pytest.MonkeyPatch, capability: int = 90, shuffled: bool = False) -> Iterator[None]:
    """In the context, interpreted kernels use inline PTX, as if for a GPU of ``capability``."""
    generator = np.random.default_rng(0)
    elementwise = tl.inline_asm_elementwise.__wrapped__

    def inline(
        builder: Any, ptx: str, constraints: str, values: Sequence[Any], types: Sequence[Any], is_pure: bool, pack: int
    ) -> SimpleCall:
        shape = values[0].data.shape
        count = values[0].data.size
        order = generator.permutation(count) if shuffled else np.arange(count)
        order = np.concatenate([order, order[:1].repeat(-count % pack)])
        flat = [np.broadcast_to(value.data, shape).reshape(-1) for value in values]
        scalars = [kind.scalar for kind in types]
        found = execute(ptx, constraints, flat, [kind.primitive_bitwidth for kind in scalars], pack, order)
        return SimpleCall(
            [
                interpreter.TensorHandle(result[:count].view(interpreter._get_np_dtype(kind)).reshape(shape), kind)
                for result, kind in zip(found, scalars, strict=True)
            ]
        )

    def with_plain_tuple(*arguments: Any, **options: Any) -> Any:
        # The interpreter adds tuples of Python, not of Triton, to the result.
        result = elementwise(*arguments, **options)
        return tuple(result) if isinstance(result, tl.tuple) else result

    with_plain_tuple.__triton_builtin__ = True

    def begin_program(builder: Any, *index: int) -> None:
        shared.clear()
        set_index(builder, *index)

    set_index = interpreter.InterpreterBuilder.set_grid_idx
    with monkeypatch.context() as patched:
        patched.setattr(interpreter.InterpreterBuilder, "set_grid_idx", begin_program)
        for module in (tl, tl.core):
            patched.setattr(module, "inline_asm_elementwise", with_plain_tuple)
        patched.setattr(interpreter.InterpreterBuilder, "create_inline_asm", inline)
        patched.setattr(target_info, "current_target", lambda: GPUTarget("cuda", capability, 32))
        # Compiled code shifts constants that are arguments of a function; the interpreter does not.
        patched.setattr(tl.constexpr, "__rlshift__", lambda self, other: other << self.value, raising=False)
        for module in (addresses, sides):
            patched.setattr(module, "uses_inline_ptx", lambda device: True)
        yield


class SimpleCall(NamedTuple):
    """The results of inline PTX, as ``tl.inline_asm_elementwise`` expects them."""

    results: list[Any]

    def get_result(self, number: int) -> Any:
        return self.results[number]
