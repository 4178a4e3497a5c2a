"""Needle recall of a byte-level model: key lines are planted in a text and asked for after it.

A key line reads ``[[key QWERTY = 8J2K9XPL]]``, with 6 and 8 random characters of A-Z and 0-9. An answer is right when every one
of the 8 bytes is the model's first choice, given the true bytes before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from kvpack import cache_names

if TYPE_CHECKING:
    from collections.abc import Callable

LINES = 5
"""The number of key lines in a prompt; each is asked for."""

LINE_BYTES = len(b"\n[[key QWERTY = 8J2K9XPL]]\n")

QUESTION_TOKENS = 32
"""Tokens that a prompt leaves free for a question and its answer."""

_CHARACTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


@dataclass(frozen=True)
class Prompt:
    """A text with key lines in it, and the (question, value) of each line, all as bytes.

    ``depths`` says where each line begins, as a share of the text.
    """

    text: bytes
    questions: tuple[tuple[bytes, bytes], ...]
    depths: tuple[float, ...]


def plant(text: bytes, generator: torch.Generator) -> Prompt:
    """``text`` with LINES key lines inserted at random places and its end cut off to keep its length.

    ``text`` is longer than the lines together.
    """
    pairs = [(_word(6, generator), _word(8, generator)) for _ in range(LINES)]
    lines = [b"\n[[key %s = %s]]\n" % pair for pair in pairs]
    kept = text[: len(text) - LINES * LINE_BYTES]
    places = sorted(torch.randint(len(kept) + 1, (LINES,), generator=generator).tolist())
    edges = [0, *places, len(kept)]
    parts = [kept[first:last] for first, last in pairwise(edges)]
    planted = parts[0] + b"".join(line + part for line, part in zip(lines, parts[1:], strict=True))
    depths = tuple((place + number * LINE_BYTES) / len(planted) for number, place in enumerate(places))
    return Prompt(planted, tuple((b"\n[[key %s = " % key, value) for key, value in pairs), depths)


def answers(model: Any, prompt: Prompt, cache: Callable[[], Any]) -> list[bool]:
    """Whether each answer is right; ``cache`` returns the model's cache of the prompt, a new one for each question."""
    right = []
    with torch.inference_mode():
        for question, value in prompt.questions:
            logits = model(torch.tensor([[*question, *value[:-1]]]), **cache_names.over(model, cache())).logits[0, -len(value) :]
            right.append(logits.argmax(-1).tolist() == [*value])
    return right


def _word(length: int, generator: torch.Generator) -> bytes:
    return bytes(_CHARACTERS[i] for i in torch.randint(len(_CHARACTERS), (length,), generator=generator).tolist())
