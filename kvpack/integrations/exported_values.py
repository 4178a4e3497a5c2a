"""Checks and conversions for writing other libraries' cache files: values in a dtype, and sliding windows by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvpack.coding.encoding import RAW_DTYPES
from kvpack.file.limits import MAX_TOKENS
from kvpack.formats.errors import InvalidParameter, ValueTooLarge

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpack.cache.side import Side

_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in RAW_DTYPES.items()} | {name: name for name in RAW_DTYPES}
"""kvpack's names of the dtypes that can be written, by their own names and by those that transformers and llama.cpp models record."""


def export_values(where: str, side: Side, dtype: str | None, library: str, recorded: str | None = None) -> torch.Tensor:
    """Return the values of ``side`` in their stored dtype or rounded to ``dtype``, ``[batch, kv_head, token, dim]`` on the CPU.

    ``recorded`` is the dtype of the cache's model. If it is bf16, fp16 or fp32, the error message suggests it. Raises InvalidParameter if
    ``dtype`` is unknown, or missing although it is needed, and ValueTooLarge if rounding to ``dtype`` would make a value infinite.
    """
    if dtype is not None and dtype not in RAW_DTYPES:
        raise InvalidParameter(f"dtype is {dtype!r}, expected one of {', '.join(RAW_DTYPES)}")
    exact = side.codec.exact_dtype
    if dtype is None and exact is None:
        known = _NAMES.get((recorded or "").partition(" ")[0])
        advice = f"the cache was computed in {known}, so pass" if known else "choose one, such as"
        example = known or "bf16"
        raise InvalidParameter(
            f"{where}: the codec {side.codec.id} decodes to float32, but {library} stores the dtype of the model: {advice} "
            f"--dtype {example} on the command line, or dtype='{example}' in Python"
        )
    target = dtype or exact
    assert target is not None
    values = side.unpack(RAW_DTYPES[target])
    if target != exact and torch.isinf(values).any():
        raise ValueTooLarge(f"{where}: a value is too large for {target}: use bf16 or fp32")
    return values.cpu()


def parse_windows(windows: Mapping[int, int] | None, layers: int) -> dict[int, int]:
    """Check ``windows`` and return it as a dict of sliding windows, in tokens, by layer number."""
    result = dict(windows or {})
    for number, window in result.items():
        if number not in range(layers) or not isinstance(window, int) or not 0 < window <= MAX_TOKENS:
            raise InvalidParameter(
                f"windows[{number!r}] is {window!r}, expected a layer number from 0 to {layers - 1} and a window of 1 to {MAX_TOKENS} "
                "tokens"
            )
    return result
