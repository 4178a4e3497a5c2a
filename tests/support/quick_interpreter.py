"""Speed up Triton's interpreter by skipping repeated work, which takes more than half of the time of the kernel tests.

Each kernel launch wraps every function of ``triton.language`` and restores it at the end. Triton 3.6 and later wrap them again at every
call of a device function, build a table of all dtypes for every conversion of one, and check and name the shape of every result. They also
compare the types of all operands, convert every constant to a tensor again, and compute a check for integer overflow whose result they
discard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np


def wrap_once_per_launch() -> None:
    """Make calls of device functions reuse the wrappers of ``triton.language`` that the launch or an earlier call has installed."""
    wrap = interpreter._patch_lang
    wrapped: set[Any] = set()
    names: dict[Callable[..., Any], set[Any]] = {}

    class Launch(interpreter._LangPatchScope):
        def restore(self) -> None:
            wrapped.clear()
            super().restore()

    def wrap_new(function: Callable[..., Any]) -> Launch:
        # Triton itself wraps, or refuses, a function that refers to neither module or to an unwrapped one.
        if function not in names:
            names[function] = {module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())}
        named = names[function]
        scope = Launch()
        if not named or not named <= wrapped:
            scope._changes = wrap(function)._changes
            wrapped.update(named)
        return scope

    interpreter._patch_lang = wrap_new


def unwrap_only_constants() -> None:
    """Do not unwrap values whose class shows that they contain no Triton constant."""
    unwrap = core._unwrap_if_constexpr
    plain = frozenset({tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, float, bool, str, type(None)})

    def unwrapped(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    core._unwrap_if_constexpr = unwrapped


def call_builtins_directly() -> None:
    """Pass the interpreter to functions of ``triton.language`` as a positional argument.

    Triton would build and check a dictionary for every call.
    """

    def replace(owner: Any, name: str, member: Callable[..., Any], builder: object, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def called(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **options)

        scope.set_attr(owner, name, called)

    interpreter._patch_attr = replace


def convert_dtypes_once() -> None:
    """Cache the NumPy dtype of each Triton dtype by name, because Triton also compares dtypes by name."""
    convert = interpreter._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def converted(dtype: tl.dtype) -> np.dtype[Any]:
        if dtype.name not in known:
            known[dtype.name] = convert(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = converted


def describe_blocks_once() -> None:
    """Cache one block type for each element type and shape, because every operation needs one for its result."""
    describe = tl.block_type.__init__
    known: dict[tuple[Any, ...], tl.block_type] = {}

    def made(cls: type, element_ty: tl.dtype, shape: Sequence[Any]) -> tl.block_type:
        # Pointers with the same type name may differ in other properties.
        key = (id(element_ty) if element_ty.is_ptr() else element_ty.name, *shape)
        found = known.get(key)
        if found is None:
            found = object.__new__(cls)
            describe(found, element_ty, shape)
            known[key] = found
        return found

    tl.block_type.__new__ = made
    tl.block_type.__init__ = lambda *_: None


def shape_tensors_once() -> None:
    """Cache the shape and the number of elements of each block type in the form that tensors use."""
    make = tl.tensor.__init__
    known: dict[str, tuple[Any, Any]] = {}

    def made(tensor: tl.tensor, handle: Any, type: tl.dtype) -> None:
        # The name of a block type begins with its shape.
        name = type.name if type.is_block() else ""
        if name not in known:
            make(tensor, handle, type)
            known[name] = tensor.shape, tensor.numel
            return
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = known[name]

    tl.tensor.__init__ = made


def compare_types_once() -> None:
    """Leave operands of equal types as they are, and cache each constant as a tensor of the other operand's type."""
    check = TritonSemantic.binary_op_type_checking_impl
    known: dict[tuple[Any, ...], tl.tensor] = {}

    def constant(semantic: TritonSemantic, value: float, tensor: tl.tensor, first: bool, *options: bool) -> tuple[tl.tensor, tl.tensor]:
        """Convert ``value`` and ``tensor`` to their common type and return both in their original order."""
        key = (value, type(value), tensor.type.name, first, options)
        if key in known:
            return (known[key], tensor) if first else (tensor, known[key])
        pair = check(semantic, value, tensor, *options) if first else check(semantic, tensor, value, *options)
        # 0.0 and -0.0 are equal as keys, and pointers with the same type name may differ.
        if pair[first] is tensor and (value or isinstance(value, int)) and not tensor.dtype.is_ptr():
            known[key] = pair[not first]
        return pair

    def checked(
        semantic: TritonSemantic,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[tl.tensor, tl.tensor]:
        options = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        tensors = isinstance(lhs, tl.tensor), isinstance(rhs, tl.tensor)
        if tensors == (True, False) and type(rhs) in (int, float):
            return constant(semantic, rhs, lhs, False, *options)
        if tensors == (False, True) and type(lhs) in (int, float):
            return constant(semantic, lhs, rhs, True, *options)
        if tensors == (True, True) and not div_or_mod and lhs.type.name == rhs.type.name and not lhs.dtype.is_ptr():
            return lhs, rhs
        return check(semantic, lhs, rhs, *options)

    TritonSemantic.binary_op_type_checking_impl = checked


def broadcast_shapes_once() -> None:
    """Cache, for each pair of operand types, which operand is broadcast to which shape."""
    broadcast = TritonSemantic.broadcast_impl_value
    known: dict[tuple[str, str], tuple[Any, Any]] = {}

    def reshaped(semantic: TritonSemantic, tensor: tl.tensor, shape: Any) -> tl.tensor:
        block = tl.block_type(tensor.type.scalar, shape)
        if tensor.type.is_block():
            return semantic.tensor(semantic.builder.create_broadcast(tensor.handle, shape), block)
        return semantic.tensor(semantic.builder.create_splat(block.to_ir(semantic.builder), tensor.handle), block)

    def broadcasted(semantic: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        key = (lhs.type.name, rhs.type.name)
        if key not in known:
            pair = broadcast(semantic, lhs, rhs)
            if lhs.type.is_block() and rhs.type.is_block() and len(lhs.shape) != len(rhs.shape):
                return pair
            known[key] = tuple(None if now is before else now.type.shape for before, now in zip((lhs, rhs), pair, strict=True))
            return pair
        left, right = known[key]
        return lhs if left is None else reshaped(semantic, lhs, left), rhs if right is None else reshaped(semantic, rhs, right)

    TritonSemantic.broadcast_impl_value = broadcasted


def check_overflow_only_in_debug() -> None:
    """Check for integer overflow only when debugging. Otherwise, Triton computes the check and discards its result."""
    check = TritonSemantic.binary_op_sanitize_overflow_impl

    def checked(semantic: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor, operation: Callable[..., tl.tensor]) -> None:
        if semantic.builder.options.debug:
            check(semantic, lhs, rhs, operation)

    TritonSemantic.binary_op_sanitize_overflow_impl = checked
