"""Store losses in a file, so that an interrupted search resumes and a search for another budget measures little again."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import xxhash

import kvpack
from kvpack.file.atomic import write_file
from kvpack.file.user_files import read_json
from kvpack.formats.errors import InvalidParameter

from .measurement import Loss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.evaluation.windows import Exact

EVERY = 16
"""Recipes after which the file is written again."""

MAX_JOURNAL_BYTES = 2**26
"""Maximum number of bytes of the file."""

_FORMAT = "kvpack measurements"


def identity(exact: Sequence[Exact]) -> str:
    """Name the model, the text and the sizes, by what the uncompressed model reads and predicts in the windows."""
    digest = xxhash.xxh3_128()
    for window in exact:
        digest.update(window.tokens.numpy().tobytes())
        digest.update(window.log_probabilities.contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass
class Journal:
    """The losses of recipes in the windows named ``of``, kept in the file ``path`` (None: in memory only)."""

    path: str | None
    of: str
    losses: dict[str, Loss] = field(default_factory=dict)
    unwritten: int = 0

    def keep(self, recipe: str, loss: Loss) -> None:
        """Add the loss of a recipe, and write the file from time to time. Raises WriteFailed."""
        self.losses[recipe] = loss
        self.unwritten += 1
        if self.unwritten >= EVERY:
            self.write()

    def write(self) -> None:
        """Append the measurements that are not in the file yet. Raises WriteFailed."""
        if self.path is None or not self.unwritten:
            return
        content = {
            "format": _FORMAT,
            "kvpack": kvpack.__version__,
            "windows": self.of,
            "losses": {recipe: asdict(loss) for recipe, loss in self.losses.items()},
        }
        write_file(self.path, [memoryview(json.dumps(content).encode())])
        self.unwritten = 0


def open_journal(path: str | None, exact: Sequence[Exact]) -> Journal:
    """Open the journal of these windows, with the contents of an existing file.

    Raises MissingFile if it cannot be read, and InvalidParameter if it is not a journal or belongs to other windows.
    """
    journal = Journal(path, identity(exact))
    if path is None or not os.path.lexists(path):
        return journal
    try:
        content = read_json(path, MAX_JOURNAL_BYTES, "a file of measurements")
    except InvalidParameter:
        content = None
    if not isinstance(content, dict) or content.get("format") != _FORMAT or not isinstance(content.get("losses"), dict):
        raise InvalidParameter(f"{path}: contains no measurements of kvpack tune; name a new file or remove it")
    if (content.get("kvpack"), content.get("windows")) != (kvpack.__version__, journal.of):
        raise InvalidParameter(
            f"{path}: holds measurements of another model, text, size, seed, number of threads or version of kvpack; "
            "name a new file or remove it"
        )
    journal.losses = {recipe: _loss(path, recipe, result, len(exact)) for recipe, result in content["losses"].items()}
    return journal


def _loss(path: str, recipe: str, found: Any, windows: int) -> Loss:
    try:
        loss = Loss(**found)
        numbers = [*loss.kl_divergences, *loss.log_perplexities]
        right = len(loss.kl_divergences) == len(loss.log_perplexities) == windows and all(map(math.isfinite, numbers))
        right = right and type(loss.bytes) is type(loss.values) is int and min(loss.bytes, loss.values) > 0
    except TypeError:
        right = False
    if not right:
        raise InvalidParameter(f"{path}: its entry for the recipe {recipe!r} is not a measurement; remove the file")
    return loss
