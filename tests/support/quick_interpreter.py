"""Triton's interpreter without the work that it repeats, which is more than half of the time of the kernels' tests.

A launch of a kernel wraps every function of ``triton.language`` and restores them at its end. Triton 3.6 and later wrap them again at
every call of a device function, although they are wrapped by then, build a table of all dtypes whenever they convert one, and check and
name the shape of every result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton.language as tl
from triton.runtime import interpreter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np


def wrap_once_per_launch() -> None:
    """Make calls of device functions leave ``triton.language`` as the launch, or a call before them, has wrapped it."""
    wrap = interpreter._patch_lang
    wrapped: set[Any] = set()

    class Launch(interpreter._LangPatchScope):
        def restore(self) -> None:
            wrapped.clear()
            super().restore()

    def wrap_new(function: Callable[..., Any]) -> Launch:
        # If a function names neither module, or an unwrapped one, Triton refuses or wraps it.
        named = {module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())}
        scope = Launch()
        if not named or not named <= wrapped:
            scope._changes = wrap(function)._changes
            wrapped.update(named)
        return scope

    interpreter._patch_lang = wrap_new


def convert_dtypes_once() -> None:
    """Remember the NumPy dtype of each Triton dtype by its name, which is what Triton compares dtypes by."""
    convert = interpreter._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def converted(dtype: tl.dtype) -> np.dtype[Any]:
        if dtype.name not in known:
            known[dtype.name] = convert(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = converted


def describe_blocks_once() -> None:
    """Remember the checked shape, the size and the name of each block type: every result of an operation has one."""
    describe = tl.block_type.__init__
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def described(block: tl.block_type, element_ty: tl.dtype, shape: Sequence[Any]) -> None:
        # Pointers of one name may differ in what their types do not name.
        key = (id(element_ty) if element_ty.is_ptr() else element_ty.name, *shape)
        if key not in known:
            describe(block, element_ty, shape)
            known[key] = vars(block).copy()
        vars(block).update(known[key])

    tl.block_type.__init__ = described
