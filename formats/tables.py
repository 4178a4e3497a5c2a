"""Tables that decoders look things up in, computed once and kept on each device that asked."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .lazy import torch

if TYPE_CHECKING:
    from collections.abc import Callable

TABLES_KEPT = 64
"""Of each kind: tables come from file headers, so their number has a bound."""


def kept_on_device(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Keep what ``compute`` returns for its arguments; the result takes the ``device`` as its last argument."""

    @lru_cache(TABLES_KEPT)
    def kept(device: str, *arguments: Any) -> torch.Tensor:
        # A tensor made in inference mode could never meet autograd afterwards; the caller's default device may be another.
        with torch.inference_mode(False), torch.device("cpu"):
            return compute(*arguments).to(device)

    def table(*arguments: Any) -> torch.Tensor:
        return kept(str(arguments[-1]), *arguments[:-1])

    return table
