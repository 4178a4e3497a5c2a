"""A warning of scales that heads or tokens share and that do not fit some of them: one for a call, however many sides it encodes."""

from __future__ import annotations

import contextlib
import warnings
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvpack.errors import KvpackWarning
from kvpack.formats.group import PER_HEAD
from kvpack.formats.head_norms import GROUP_RATIO, HEADS, SHARED_RATIO, TOKENS, excess, few, relative, widening

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import torch

MANY_RATIO = 4.0
"""Tokens of a page that has many are only warned of if they are more than this many times as large as usual in a head."""


@dataclass(frozen=True)
class Misfit:
    """The tokens of one encoded run that make a scale that ``shared`` names too large: ``count`` of ``tokens``.

    In the worst one, ``token`` of ``sequence``, ``head`` makes the scale ``factor`` times too large. ``rare``: few enough that raw tokens
    avoid them.
    """

    where: str
    shared: str
    count: int
    tokens: int
    factor: float
    sequence: int
    token: int
    head: int
    rare: bool


_EFFECTS = {
    HEADS: ("other heads, which share its token scale", "makes the scale {:.3g} times too large for another"),
    TOKENS: ("other tokens, which share scales of a group with it", "is {:.3g} times as large as usual"),
}
"""Tokens that lose precision, and the sentence about the worst token, by the kind of sharing."""

_collected: ContextVar[list[Misfit] | None] = ContextVar("misfits", default=None)


def misfit_of(
    norms: torch.Tensor, shared: Collection[str], where: str, kept: torch.Tensor | None = None, keeps_large: bool = False
) -> Misfit | None:
    """Return the error that ``shared`` scales cause in tokens that are not ``kept``, bool ``[batch, token]``; None if they fit all others.

    ``norms`` ``[batch, kv_head, token]`` are those of the coded values. ``keeps_large``: tokens of high norm are among the ``kept`` ones.
    A page with many large tokens in one head is not warned of before they are ``MANY_RATIO`` times as large as usual.
    """
    found = []
    for name, measured, ratio in ((HEADS, excess, SHARED_RATIO), (TOKENS, partial(widening, shared=shared), GROUP_RATIO)):
        if name not in shared:
            continue
        factors = measured(norms)
        if kept is not None:
            factors = factors.masked_fill(kept, 0.0)
        lost = factors > ratio
        if name == TOKENS and lost.any():
            lost = few(lost) | (factors > MANY_RATIO)
        if lost.any():
            factors = factors.masked_fill(~lost, 0.0)
            sequence, token = divmod(int(factors.argmax()), factors.shape[1])
            head = int(relative(norms)[sequence, :, token].nan_to_num(posinf=0.0).argmax())
            rare = not keeps_large and bool((few(lost) == lost).all())
            found.append(Misfit(where, name, int(lost.sum()), lost.numel(), float(factors.amax()), sequence, token, head, rare))
    return max(found, key=lambda one: one.factor) if found else None


def report(found: Misfit) -> None:
    """Add ``found`` to the collection of the surrounding call; without one, issue its warning."""
    collected = _collected.get()
    if collected is None:
        warn([found], stacklevel=4)
    else:
        collected.append(found)


@contextlib.contextmanager
def collected() -> Iterator[list[Misfit]]:
    """Collect the misfits reported inside the block, for ``warn``."""
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
    which, effect = _EFFECTS[worst.shared]
    if all(one.rare for one in found):
        remedy += ", or add raw=4,0.6,4, which keeps such tokens raw"
    warnings.warn(
        f"{worst.where}: in {worst.count} of {worst.tokens} tokens, one head is so large that {which}, lose precision; in the worst, token "
        f"{worst.token} of sequence {worst.sequence}, head {worst.head} {effect.format(worst.factor)}{others}. To avoid this, {remedy}",
        KvpackWarning,
        stacklevel=stacklevel + 1,
    )
