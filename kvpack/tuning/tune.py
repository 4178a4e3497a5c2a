"""kvpack tune: searches for a recipe for one model, and reports the outcome.

As in ``kvpack bench quality``, the first part of each window is packed, saved and loaded, and the model reads the second part over it. The
search does not use the held-out windows, on which the report compares recipes.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvpack.coding.bases import Basis
from kvpack.evaluation.models import (
    LONGER_TEXT,
    Text,
    check_size,
    get_vocabulary_size,
    ids_per_window,
    position_limit,
    read_text,
    window_ids,
    window_starts,
    window_tokens,
)
from kvpack.file.atomic import check_output_path, write_file
from kvpack.file.limits import MAX_TOKENS
from kvpack.formats.errors import InvalidParameter
from kvpack.identity.fingerprint import model_name
from kvpack.integrations.transformers.models import Model
from kvpack.models import load_model, model_folder

from .allocation import recipe_clauses, recipe_text
from .calibrate import check_basis
from .candidates import (
    BALANCED,
    CALIBRATED,
    FRAME_CANDIDATES,
    THOROUGH_CANDIDATES,
    WIDTH_CANDIDATES,
    is_attendable,
    pack_candidates,
    parse_candidates,
)
from .file_sizes import FileLength
from .journal import open_journal
from .measurement import Windows, evaluate_once
from .results import recipe_file, results
from .search import Search, recipe_count, thorough_search
from .widths import recipe_count as width_recipe_count
from .widths import search_by_widths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.coding.encoding import Progress

DEFAULT_TOKENS = 1024
DEFAULT_SCORE = 256
DEFAULT_WINDOWS = 4
DEFAULT_HELD_OUT_WINDOWS = 16

DEFAULT_FILE_TOKENS = 4096

MAX_BITS = 32

MAX_GROUP_TOKENS = 128
"""Maximum number of tokens that a codec encodes together."""


@dataclass(frozen=True)
class TuningSettings:
    """Settings of a search. None selects the default, or the limit of the model and the text if that is smaller.

    ``tokens`` is the size of a window. Its last ``scored_tokens`` tokens are scored. The search uses ``windows`` windows, and the report
    uses another ``held_out_windows``. Codecs that encode tokens in groups keep incomplete groups raw, which increases the size. Multiples
    of 128 avoid that. The model is in float32 on ``device``. Bits per value are computed for files of ``file_tokens`` tokens, which are
    longer than windows.
    """

    tokens: int | None = None
    scored_tokens: int | None = None
    windows: int | None = None
    held_out_windows: int | None = None
    seed: int = 0
    device: str = "cpu"
    file_tokens: int = DEFAULT_FILE_TOKENS


@dataclass(frozen=True)
class _WindowSizes:
    """The sizes of ``TuningSettings``, with defaults and limits applied."""

    tokens: int
    score: int
    windows: int
    held_out: int


@dataclass
class _WindowProgress:
    """Counts the windows read, and reports them as progress of the whole run."""

    progress: Progress | None
    total: int = 0
    done: int = 0

    def __call__(self) -> None:
        self.done += 1
        if self.progress:
            self.progress(min(self.done, self.total), self.total)

    def finish(self) -> None:
        if self.progress:
            self.progress(self.total, self.total)


def run(
    model: str | None,
    text: str | None,
    bits: float,
    settings: TuningSettings,
    *,
    widths: bool = False,
    candidates: Sequence[str] | None = None,
    out: str | None = None,
    measurements: str | None = None,
    basis: str | None = None,
    only_attendable: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Search for a recipe within a budget of bits per value, and return a report as JSON values.

    Args:
        model: Folder or hub name of the model, or None for the demo's model.
        text: File with the text, or None for the demo's text.
        bits: Budget in bits per value, counting all bytes of a file of ``settings.file_tokens`` tokens.
        settings: Sizes of the search.
        widths: Use the search by widths, which measures one recipe for each layer and side.
        candidates: Codecs such as ``k=scalar:b=3``.
        out: Recipe file to write.
        measurements: File in which losses are kept for later searches.
        basis: The model's basis file, which adds candidates.
        only_attendable: Omit codecs that attention decodes tile by tile.
        progress: Called as ``progress(done, total)``.

    Two runs with the same seed find the same recipe on the same device if PyTorch uses the same number of threads. Raises InvalidParameter
    if a size is not supported or no recipe fits the budget, MissingFile and WriteFailed.
    """
    if not 0 < bits <= MAX_BITS:
        raise InvalidParameter(f"--bits is {bits}, expected a number above 0 and at most {MAX_BITS}")
    check_size("--file-tokens", settings.file_tokens, 1, MAX_TOKENS, "in a file")
    loaded_basis = None if basis is None else Basis.load(basis)
    codecs = _parse_codecs(candidates or _default_candidates(loaded_basis, widths=widths, only_attendable=only_attendable), only_attendable)
    for path in (out, measurements):
        if path is not None:
            check_output_path(path)
    with model_folder(model) as folder:
        network = load_model(folder).to(settings.device)
        words = read_text(text, folder, get_vocabulary_size(network))
        name = model_name(str(folder.resolve()))
        if loaded_basis is not None:
            check_basis(loaded_basis, folder)
    sizes = _choose_window_sizes(settings, words, position_limit(network))
    counter = _WindowProgress(progress)
    with tempfile.TemporaryDirectory(prefix="kvpack-tune-") as folder_name:
        layers = network.config.get_text_config().num_hidden_layers
        length = FileLength(settings.file_tokens, Model(network).windows(layers))
        searched = Windows(network, folder_name, length, counter, basis=loaded_basis)
        search_windows, held_out_windows = _choose_windows(words, sizes, settings)
        runs = width_recipe_count(layers) if widths else recipe_count(layers, codecs)
        counter.total = sizes.windows * (1 + runs) + 3 * sizes.held_out
        packed = pack_candidates(searched.evaluate(search_windows, sizes.score), codecs, length, loaded_basis)
        search = Search(packed, searched, math.floor(bits * packed.values() / 8))
        journal = open_journal(measurements, searched.exact, settings.file_tokens)
        searched.losses, searched.on_measured = dict(journal.losses), journal.add
        try:
            tuned, uniform = (search_by_widths if widths else thorough_search)(search)
        finally:
            journal.write()
        held_out_losses = evaluate_once(
            searched,
            held_out_windows,
            sizes.score,
            [recipe_text(measured.allocation) for measured in (tuned, uniform) if measured is not None],
        )
        report = {
            "model": name,
            "text": words.name,
            "mode": "widths" if widths else "thorough",
            "bits": bits,
            "settings": {
                **asdict(sizes),
                "file_tokens": settings.file_tokens,
                "seed": settings.seed,
                "threads": torch.get_num_threads(),
                "device": settings.device,
            },
            "recipe": recipe_text(tuned.allocation),
            "file": out,
            "basis": None if loaded_basis is None else {"file": loaded_basis.where, "digest": loaded_basis.digest.hex()},
            **results(search, held_out_losses, tuned, uniform),
        }
    counter.finish()
    if out is not None:
        write_file(out, [memoryview(recipe_file(report, recipe_clauses(tuned.allocation)).encode())])
    return report


def _parse_codecs(candidates: Sequence[str], only_attendable: bool) -> dict[str, list[str]]:
    """Parse ``candidates`` into codecs by "k" and "v".

    Raises InvalidParameter if ``only_attendable`` is set and attention would have to decode a codec.
    """
    codecs = parse_candidates(candidates)
    if only_attendable and (decoded := next((codec for result in codecs.values() for codec in result if not is_attendable(codec)), None)):
        raise InvalidParameter(f"--candidate is {decoded!r}, which attention must decode tile by tile: omit this candidate or --attendable")
    return codecs


def _default_candidates(basis: Basis | None, *, widths: bool = False, only_attendable: bool) -> Sequence[str]:
    if widths:
        values = tuple(codec for codec in WIDTH_CANDIDATES if codec.startswith("v="))
        return (*BALANCED, *values) if basis is not None and basis.has_balanced_frames else WIDTH_CANDIDATES
    if basis is None:
        return THOROUGH_CANDIDATES
    framed = FRAME_CANDIDATES if basis.sides_with_frames() and not only_attendable else ()
    return (*THOROUGH_CANDIDATES, *CALIBRATED, *framed)


def _choose_window_sizes(settings: TuningSettings, text: Text, max_positions: int | None) -> _WindowSizes:
    tokens = window_tokens(settings.tokens, DEFAULT_TOKENS, text, max_positions)
    if settings.tokens is None:
        # A short text makes two windows, one of them held out. Whole token groups leave no raw tail.
        tokens = max(2, min(tokens, len(text.ids) // 2 + len(text.start) - 1))
        tokens -= tokens % (2 * MAX_GROUP_TOKENS) if tokens > 2 * MAX_GROUP_TOKENS else 0
    scored_tokens = min(DEFAULT_SCORE, tokens // 2) if settings.scored_tokens is None else settings.scored_tokens
    room = len(text.ids) // ids_per_window(tokens, text)
    windows = min(DEFAULT_WINDOWS, room // 2) if settings.windows is None else settings.windows
    check_size("--score", scored_tokens, 1, tokens - 1, f"in a window of {tokens} tokens")
    reason = f"(the number of {tokens}-token windows in {text.name}, without at least one held out): {LONGER_TEXT}"
    check_size("--windows", windows, 1, room - 1, reason)
    held_out_windows = min(DEFAULT_HELD_OUT_WINDOWS, room - windows) if settings.held_out_windows is None else settings.held_out_windows
    reason = f"windows of {tokens} tokens in {text.name}, in addition to {windows} for the search"
    check_size("--held-out", held_out_windows, 1, room - windows, reason)
    return _WindowSizes(tokens, scored_tokens, windows, held_out_windows)


def _choose_windows(text: Text, sizes: _WindowSizes, settings: TuningSettings) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the windows of the search, which are spread over the text, and the held-out windows between them."""
    size, count = ids_per_window(sizes.tokens, text), sizes.windows + sizes.held_out
    every = [window_ids(text, start, size).to(settings.device) for start in window_starts(len(text.ids), size, count, settings.seed)]
    chosen = {(2 * number + 1) * count // (2 * sizes.windows) for number in range(sizes.windows)}
    return [every[number] for number in sorted(chosen)], [every[number] for number in range(count) if number not in chosen]
