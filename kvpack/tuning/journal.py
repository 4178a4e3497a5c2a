"""Storage of losses in a file, so that searches can resume, and searches with other budgets can reuse measurements."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

import kvpack
from kvpack.evaluation.windows import UncompressedResult
from kvpack.file.atomic import write_file
from kvpack.file.user_files import read_json
from kvpack.formats.errors import InvalidParameter

from .measurement import Loss

RECIPES_PER_WRITE = 16
"""Number of new recipes after which the file is written."""

MAX_JOURNAL_BYTES = 2**26
"""Maximum size of the file in bytes."""

_FORMAT = "kvpack measurements"


def windows_digest(exact: Sequence[UncompressedResult], file_tokens: int) -> str:
    """Return a digest of the tokens and of the uncompressed predictions, which identifies the model, the text and the sizes."""
    digest = xxhash.xxh3_128(str(file_tokens).encode())
    for window in exact:
        digest.update(window.tokens.cpu().numpy().tobytes())
        digest.update(window.log_probabilities.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


@dataclass
class Journal:
    """The losses of recipes, saved to the file ``path`` unless it is None. ``windows`` is the digest of the text windows."""

    path: str | None
    windows: str
    losses: dict[str, Loss] = field(default_factory=dict)
    unwritten: int = 0

    def add(self, recipe: str, loss: Loss) -> None:
        """Add the loss of a recipe, and write the file after every ``RECIPES_PER_WRITE`` recipes."""
        self.losses[recipe] = loss
        self.unwritten += 1
        if self.unwritten >= RECIPES_PER_WRITE:
            self.write()

    def write(self) -> None:
        """Write all losses to the file if there are new ones."""
        if self.path is None or not self.unwritten:
            return
        content = {
            "format": _FORMAT,
            "kvpack": kvpack.__version__,
            "windows": self.windows,
            "losses": {recipe: asdict(loss) for recipe, loss in self.losses.items()},
        }
        write_file(self.path, [memoryview(json.dumps(content).encode())])
        self.unwritten = 0


def open_journal(path: str | None, exact: Sequence[UncompressedResult], file_tokens: int) -> Journal:
    """Return the journal for the windows of ``exact`` and for files of ``file_tokens`` tokens.

    It contains the losses recorded in the file ``path``, if that exists. Raises MissingFile if the file cannot be read, and
    InvalidParameter if it is not a journal or is for other windows.
    """
    journal = Journal(path, windows_digest(exact, file_tokens))
    if path is None or not os.path.lexists(path):
        return journal
    try:
        content = read_json(path, MAX_JOURNAL_BYTES, "a file of measurements")
    except InvalidParameter:
        content = None
    if not isinstance(content, dict) or content.get("format") != _FORMAT or not isinstance(content.get("losses"), dict):
        raise InvalidParameter(f"{path} contains no measurements of kvpack tune: pass another path or remove the file")
    if (content.get("kvpack"), content.get("windows")) != (kvpack.__version__, journal.windows):
        raise InvalidParameter(
            f"{path} was written for a different model, text, size, seed, device, thread count or kvpack version: "
            "pass another path or remove the file"
        )
    journal.losses = {recipe: _parse_loss(path, recipe, result, len(exact)) for recipe, result in content["losses"].items()}
    return journal


def _parse_loss(path: str, recipe: str, entry: Any, windows: int) -> Loss:
    try:
        loss = Loss(**entry)
        numbers = [*loss.kl_divergences, *loss.log_perplexities]
        is_valid = len(loss.kl_divergences) == len(loss.log_perplexities) == windows and all(map(math.isfinite, numbers))
        is_valid = is_valid and type(loss.bytes) is type(loss.values) is int and min(loss.bytes, loss.values) > 0
    except TypeError:
        is_valid = False
    if not is_valid:
        raise InvalidParameter(f"{path}: its entry for the recipe {recipe!r} is not a valid measurement: remove the file")
    return loss
