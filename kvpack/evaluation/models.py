"""Texts for measurements, as token ids, and windows of these texts, whose number and sizes the model and the text limit."""

from __future__ import annotations

import bz2
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from kvpack.file.user_files import read_bytes
from kvpack.formats.arguments import describe
from kvpack.formats.errors import InvalidParameter
from kvpack.models import BOS, demo_text, load_tokenizer

MAX_TEXT_BYTES = 2**30

_BOOKS = ("calibration", "prose", "long")
"""Texts that are compressed together, in this order. The size of the wheel is limited."""


@dataclass(frozen=True)
class Text:
    """A text as token ids. ``start`` contains the ids that begin each sequence, and ``ids`` contains the ids of the text itself.

    If ``is_byte_level`` is True, there is no tokenizer: ids are byte values, and sequences begin with id 256. ``encode`` converts other
    text to ids.
    """

    name: str
    start: tuple[int, ...]
    ids: Sequence[int]
    is_byte_level: bool
    encode: Callable[[str], list[int]]


def get_vocabulary_size(model: Any) -> int:
    """Return the size of the model's vocabulary. Every token id is less than this."""
    return int(model.get_input_embeddings().weight.shape[0])


def read_text(path: str | None, folder: Path, vocabulary_size: int) -> Text:
    """Read a text file as token ids of the model in ``folder``. If ``path`` is None, read the demo's text.

    Every id is less than ``vocabulary_size``. Raises MissingFile, LimitExceeded, and InvalidParameter if the folder has no tokenizer and
    the model cannot use bytes as token ids.
    """
    if path is None:
        return _text_from_bytes("the demo's text", demo_text(), folder, vocabulary_size)
    return _text_from_bytes(path, read_bytes(path, MAX_TEXT_BYTES, "a text"), folder, vocabulary_size)


def bundled_bytes(name: str) -> bytes:
    """Return the bytes of a text in kvpack/bench/texts."""
    file = "books" if name in _BOOKS else name
    data = bz2.decompress((files("kvpack.bench") / "texts" / f"{file}.txt.bz2").read_bytes())
    return data.split(b"\f")[_BOOKS.index(name)] if name in _BOOKS else data


def bundled_text(name: str, folder: Path, vocabulary_size: int) -> Text:
    """Read a text in kvpack/bench/texts as token ids, as ``read_text`` does."""
    return _text_from_bytes(f"kvpack's {name}", bundled_bytes(name), folder, vocabulary_size)


def _text_from_bytes(name: str, data: bytes, folder: Path, vocabulary_size: int) -> Text:
    tokenizer = load_tokenizer(folder)
    if tokenizer is not None:
        return tokenize(name, data.decode(errors="replace"), tokenizer)
    if vocabulary_size <= BOS:
        raise InvalidParameter(
            f"{folder} has no tokenizer, so text is encoded as bytes, which needs at least {BOS + 1} token ids, but the model has only "
            f"{vocabulary_size}: add a tokenizer"
        )
    return Text(name, (BOS,), data, is_byte_level=True, encode=lambda text: [*text.encode()])


def tokenize(name: str, text: str, tokenizer: Any) -> Text:
    """Tokenize ``text``. ``name`` describes it in messages."""
    ids = tokenizer(text)["input_ids"]
    starts_with_bos = bool(ids) and ids[0] == tokenizer.bos_token_id
    return Text(name, tuple(ids[:starts_with_bos]), ids[starts_with_bos:], is_byte_level=False, encode=partial(_encode, tokenizer))


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


LONGER_TEXT = "pass a longer text or a smaller --tokens"
"""Advice at the end of error messages about a text that is too short."""


def position_limit(model: Any) -> int | None:
    """Return the maximum number of positions of the model, or None if its configuration does not specify it."""
    config = model.config.get_text_config()
    # MPT uses another name.
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    return None if limit is None else int(limit)


def window_tokens(requested: int | None, default: int, text: Text, max_positions: int | None) -> int:
    """Return the number of tokens in a window: ``requested``, or ``default`` reduced to the limits of the model and the text.

    Raises InvalidParameter if ``requested`` exceeds these limits.
    """
    # A window needs one id more than it has tokens, because the prediction after the last one is scored too.
    limit = min(len(text.ids) + len(text.start) - 1, max_positions or len(text.ids))
    if limit < 2:
        raise InvalidParameter(f"{text.name} has {len(text.ids)} tokens, which is less than a window: pass a longer text")
    tokens = min(default, limit) if requested is None else requested
    if not 2 <= tokens <= limit:
        raise InvalidParameter(
            f"--tokens is {tokens}, expected an integer from 2 to {limit} (limited by the model's positions and the length of {text.name})"
        )
    return tokens


def check_size(name: str, value: int, low: int, high: int, reason: str) -> None:
    """Raise InvalidParameter unless ``value`` is from ``low`` to ``high``. The message begins with ``name`` and ends with ``reason``."""
    if high < low:
        raise InvalidParameter(f"no {name} is possible {reason}{'' if LONGER_TEXT in reason else f': {LONGER_TEXT}'}")
    if not low <= value <= high:
        expected = low if low == high else f"an integer from {low} to {high}"
        raise InvalidParameter(f"{name} is {describe(value)}, expected {expected} {reason}")


def ids_per_window(tokens: int, text: Text) -> int:
    """Return the number of text ids needed for a window of ``tokens`` tokens, including the id after the window, which is predicted."""
    return tokens + 1 - len(text.start)


def window_starts(ids: int, size: int, count: int, seed: int) -> list[int]:
    """Return the start of a window of ``size`` ids at a random position in each of ``count`` equal parts of a text.

    The text has ``ids`` ids.
    """
    generator = torch.Generator().manual_seed(seed)
    part = ids // count
    return [number * part + int(torch.randint(part - size + 1, (), generator=generator)) for number in range(count)]


def window_ids(text: Text, start: int, size: int) -> torch.Tensor:
    """Return the ids of a window, ``[1, token]``: the ids that begin each sequence, then ``size`` ids of the text from position ``start``.
    """
    return torch.tensor([[*text.start, *text.ids[start : start + size]]])
