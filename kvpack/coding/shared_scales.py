"""A warning of token scales that heads share and that do not fit some of them: one for a call, however many sides it encodes."""

from __future__ import annotations

import contextlib
import warnings
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpack.errors import KvpackWarning
from kvpack.formats.group import PER_HEAD
from kvpack.formats.head_norms import SHARED_RATIO, excess, few, relative

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


@dataclass(frozen=True)
class Misfit:
    """The tokens of one encoded run whose shared scale is too large for a head: ``count`` of ``tokens``.

    In the worst one, ``token`` of ``sequence``, ``head`` makes the scale ``factor`` times too large for another head. ``rare``: few enough
    that raw tokens avoid them.
    """

    where: str
    count: int
    tokens: int
    factor: float
    sequence: int
    token: int
    head: int
    rare: bool


_collected: ContextVar[list[Misfit] | None] = ContextVar("misfits", default=None)


def misfit(norms: torch.Tensor, where: str, kept: torch.Tensor | None = None, keeps_large: bool = False) -> Misfit | None:
    """What a shared scale costs the tokens that are not ``kept``, bool ``[batch, token]``; None if it fits all others.

    ``norms`` ``[batch, kv_head, token]`` are those of the values. ``keeps_large``: tokens of high norm are among the ``kept`` ones.
    """
    factors = excess(norms)
    if kept is not None:
        factors = factors.masked_fill(kept, 0.0)
    lost = factors > SHARED_RATIO
    if not lost.any():
        return None
    sequence, token = divmod(int(factors.argmax()), factors.shape[1])
    head = int(relative(norms)[sequence, :, token].argmax())
    rare = not keeps_large and bool((few(lost) == lost).all())
    return Misfit(where, int(lost.sum()), lost.numel(), float(factors.amax()), sequence, token, head, rare)


def report(found: Misfit) -> None:
    """Add ``found`` to what the call around this one collects; without one, issue its warning."""
    collected = _collected.get()
    if collected is None:
        warn([found], stacklevel=4)
    else:
        collected.append(found)


@contextlib.contextmanager
def collected() -> Iterator[list[Misfit]]:
    """What is reported in the block, for ``warn``."""
    found: list[Misfit] = []
    before = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(before)


def warn(found: Sequence[Misfit], stacklevel: int = 2) -> None:
    """Issue one KvpackWarning about ``found``, if anything was."""
    if not found:
        return
    worst = max(found, key=lambda one: one.factor)
    others = f"; the same is true of tokens in {len(found) - 1} more of the keys and values of layers" if len(found) > 1 else ""
    remedy = f"write token_scale=fp16{PER_HEAD} in the recipe, which gives every head a scale"
    if all(one.rare for one in found):
        remedy += ", or add raw=4,0.6,4, which keeps such tokens raw"
    warnings.warn(
        f"{worst.where}: in {worst.count} of {worst.tokens} tokens, one head is so large that other heads, which share its token scale, "
        f"lose precision; in the worst, token {worst.token} of sequence {worst.sequence}, head {worst.head} makes the scale "
        f"{worst.factor:.3g} times too large for another{others}. To avoid this, {remedy}",
        KvpackWarning,
        stacklevel=stacklevel + 1,
    )
