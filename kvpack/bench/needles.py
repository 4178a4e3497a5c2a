"""Measures needle recall: facts are inserted into a text, and the model is then asked for them.

A prompt for a byte-level model contains LINES key lines, such as ``[[key QWERTY = 8J2K9XPL]]``, with 6 and 8 random characters from A-Z and
0-9. A prompt for a model with a tokenizer contains one passkey of 5 digits at some depth. An answer is right if all of its tokens are the
model's top choice after the true tokens before them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from kvpack import cache_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.evaluation.models import Text

LINES = 5
"""Number of key lines in a prompt. The model is asked for each of them."""

LINE_BYTES = len(b"\n[[key QWERTY = 8J2K9XPL]]\n")

QUESTION_TOKENS = 32
"""Number of tokens reserved in a prompt for a question and its answer."""

LENGTHS = (1024, 2048)
"""Lengths, in tokens, of the prompts with a passkey."""

_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_DIGITS = "0123456789"


@dataclass(frozen=True)
class NeedlePrompt:
    """A text with inserted facts, and a (question, value) pair for each fact, all as token ids.

    ``depths`` are the positions of the facts, as fractions of the text's length.
    """

    ids: tuple[int, ...]
    questions: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    depths: tuple[float, ...]


def key_lines_prompt(text: Text, ids: Sequence[int], generator: torch.Generator) -> NeedlePrompt:
    """Insert LINES key lines at random positions into ``ids``, the bytes of ``text``. The result is truncated to the original length.

    ``ids`` must be longer than all lines together.
    """
    pairs = [(_random_word(6, _CHARACTERS, generator), _random_word(8, _CHARACTERS, generator)) for _ in range(LINES)]
    lines = [text.encode(f"\n[[key {key} = {value}]]\n") for key, value in pairs]
    places = sorted(torch.randint(len(ids) - LINES * LINE_BYTES + 1, (LINES,), generator=generator).tolist())
    return _insert_lines(ids, lines, places, [(text.encode(f"\n[[key {key} = "), text.encode(value)) for key, value in pairs])


def passkey_prompt(text: Text, ids: Sequence[int], depth: float, generator: torch.Generator) -> NeedlePrompt:
    """Insert a passkey into ``ids`` at ``depth``, a fraction of the length. The result is truncated to the original length."""
    key = _random_word(5, _DIGITS, generator)
    line = text.encode(f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n")
    question = text.encode("\nWhat is the pass key? The pass key is")
    return _insert_lines(ids, [line], [round(depth * (len(ids) - len(line)))], [(question, text.encode(f" {key}"))])


def _insert_lines(
    ids: Sequence[int], lines: Sequence[Sequence[int]], positions: Sequence[int], questions: Sequence[tuple[list[int], list[int]]]
) -> NeedlePrompt:
    remaining_ids = ids[: len(ids) - sum(map(len, lines))]
    edges = [0, *positions, len(remaining_ids)]
    parts = [remaining_ids[first:last] for first, last in pairwise(edges)]
    planted, depths = [*parts[0]], []
    for line, part in zip(lines, parts[1:], strict=True):
        depths.append(len(planted) / len(ids))
        planted += [*line, *part]
    return NeedlePrompt(tuple(planted), tuple((tuple(question), tuple(value)) for question, value in questions), tuple(depths))


def grade_answers(model: Any, prompt: NeedlePrompt, new_cache: Callable[[], Any]) -> list[bool]:
    """Return a list with True for each question that ``model`` answers correctly. ``new_cache`` creates a cache of the prompt for each
    question.
    """
    right = []
    with torch.inference_mode():
        for question, value in prompt.questions:
            tokens = torch.tensor([[*question, *value[:-1]]], device=model.device)
            logits = model(tokens, **cache_names.cache_argument(model, new_cache())).logits[0, -len(value) :]
            right.append(logits.argmax(-1).tolist() == [*value])
    return right


def _random_word(length: int, characters: str, generator: torch.Generator) -> str:
    return "".join(characters[i] for i in torch.randint(len(characters), (length,), generator=generator).tolist())
