"""Measures what recipes cost a model in memory (``evaluate``), and shows the results as a table in notebooks."""

from __future__ import annotations

import html
import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.evaluation.models import Text, check_size, ids_per_window, position_limit, tokenize, window_ids, window_starts
from kvpack.evaluation.windows import PASS_TOKENS, Comparison, RecipeResult, evaluate_forgotten, evaluate_uncompressed, measure
from kvpack.formats.arguments import as_integer, check_callback, describe
from kvpack.formats.errors import InvalidParameter, InvalidType
from kvpack.identity.fingerprint import dtype_text, model_name
from kvpack.integrations.transformers.attention_switch import AttentionSwitch
from kvpack.integrations.transformers.models import execution_device
from kvpack.models import ByteTokenizer

from .quality import REFERENCE
from .summary import MAX_KL, check_max_kl, report_table, summary, verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpack.coding.encoding import Progress

TOKENS, SCORE, WINDOWS = 1024, 256, 4
MAX_SEED = 2**63

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The results of ``evaluate``. Notebooks, consoles and ``print`` show a table and a verdict. ``report`` contains all numbers as JSON
    values.

    Fewer bits per value and a lower divergence (KL, in nats) are better. "Same choice" is the fraction of tokens for which the model's top
    choice does not change.
    """

    report: Mapping[str, Any]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The name and the main results of each recipe, in descending order of bits."""
        names = ("recipe", "bits_per_value", "kl_divergence", "of_reference", "same_choices", "perplexity", "attention_error")
        return [{name: row[name] for name in names} for row in self.report["recipes"]]

    def __repr__(self) -> str:
        title, columns, rows = report_table(dict(self.report))
        cells = [[column.replace("\n", " ") for column in columns], *rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for row in cells:
            first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join([first.strip().ljust(widths[0]), *others]))
        return "\n".join([title, *lines, *verdict(dict(self.report))])

    def _repr_html_(self) -> str:
        title, columns, rows = report_table(dict(self.report))
        head = "".join(f"<th>{html.escape(column).replace(chr(10), '<br>')}</th>" for column in columns)
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        text = html.escape(" ".join(verdict(dict(self.report))))
        return f"<table><caption>{html.escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{text}</p>"


def evaluate(
    model: torch.nn.Module,
    tokenizer: Any,
    texts: str | Sequence[str],
    recipes: str | os.PathLike[str] | Recipe | Sequence[str | os.PathLike[str] | Recipe],
    *,
    reference: str | None = REFERENCE,
    tokens: int | None = None,
    scored_tokens: int | None = None,
    windows: int | None = None,
    step: int = PASS_TOKENS,
    seed: int = 0,
    max_kl: float = MAX_KL,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure how much recipes degrade a transformers model's predictions on texts.

    In each window of the texts, all tokens except the last ``scored_tokens`` are packed, saved and loaded. The model's predictions of the
    scored tokens are then compared with its predictions over the uncompressed cache. The model and its attention are unchanged afterwards.
    Two runs with the same seed differ only in times.

    Args:
        model: A transformers model in evaluation mode.
        tokenizer: The model's tokenizer, or None if the model's tokens are bytes.
        texts: A text or a list of texts, which should not have been used for calibration.
        recipes: A recipe or a list of recipes. A recipe such as "klt-1.75" needs a basis: ``Recipe("klt-1.75", basis)``.
        reference: Recipe to compare the others with (``of_reference`` in the report), or None for no comparison.
        tokens: Tokens per window. Defaults to 1,024, or as many as the model supports.
        scored_tokens: Scored tokens per window. Defaults to 256.
        windows: Number of windows. Defaults to 4, or as many as fit in the texts.
        step: Maximum number of scored tokens per forward pass.
        seed: Seed for the choice of windows.
        max_kl: The verdict's limit of KL divergence, in nats.
        progress: Called as ``progress(done, total)``, both in steps.

    Returns:
        An Evaluation, which notebooks and ``print`` show as a table.

    Raises:
        InvalidType: An argument has the wrong type.
        InvalidParameter: A size exceeds the texts or the model's positions, or the model is in training mode or has states other than keys
            and values.
        MissingBasis: A recipe needs a basis.

    >>> text = "the quick brown fox jumps over the lazy dog. " * 20
    >>> result = kvpack.evaluate(model, None, text, ["octopus-4"], tokens=64, scored_tokens=16, windows=1)
    >>> [row["recipe"] for row in result.rows]
    ['fp8', 'octopus-4']
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidType(f"model is {describe(model)}, expected a transformers model, such as AutoModelForCausalLM.from_pretrained(name)")
    if model.training:
        raise InvalidParameter("the model is in training mode, in which it may drop values at random: call model.eval()")
    check_callback(progress)
    if tokenizer is not None and not callable(tokenizer):
        raise InvalidType(
            f"tokenizer is {describe(tokenizer)}, expected the model's tokenizer, such as AutoTokenizer.from_pretrained(name), or None"
        )
    seed = as_integer(seed, "seed")
    if not 0 <= seed < MAX_SEED:
        raise InvalidParameter(f"seed is {describe(seed)}, expected an integer from 0 to {MAX_SEED - 1}")
    check_max_kl(max_kl)
    text_list = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, list | tuple) else []
    if not text_list or not all(isinstance(text, str) for text in text_list):
        raise InvalidType(f"texts is {describe(texts)}, expected a string or a list of strings")
    requested = [*(recipes if isinstance(recipes, list | tuple) else [recipes]), *([] if reference is None else [reference])]
    parsed = {
        _recipe_name(recipe_text): recipe for recipe_text, recipe in [(recipe_text, parse_recipe(recipe_text)) for recipe_text in requested]
    }
    source = next((recipe.basis for recipe in parsed.values() if recipe.basis is not None), None)
    words = [tokenize(f"text {number}", text, tokenizer or ByteTokenizer()) for number, text in enumerate(text_list, 1)]
    places, sizes = _plan_windows(words, model, tokens, scored_tokens, windows, step, seed)
    switch = AttentionSwitch.for_model(model)
    try:
        result = _measure(model, places, sizes, parsed, progress)
    finally:
        # The previous attention is restored when the last reference is released.
        model.set_attn_implementation("kvpack")  # type: ignore[operator]
        del switch
    exact, forgotten, measured = result
    rows = [(name, row, None) for name, row in zip(parsed, measured, strict=True)]
    report = {
        "model": model_name(str(getattr(model, "name_or_path", ""))) or type(model).__name__,
        "text": f"{len(words)} {'text' if len(words) == 1 else 'texts'}",
        "twin": None, "offset": None, "inserted": None,
        "basis": None if source is None else {"file": source.where, "digest": source.digest.hex()},
        "settings": {**sizes, "windows": len(places), "seed": seed, "max_kl": max_kl},
        "precision": f"{dtype_text(model)} on {execution_device(model).type}",
        "uncompressed_bits": 8 * getattr(torch, dtype_text(model).split()[-1]).itemsize,
        **summary([start for _, start in places], exact, forgotten, None, rows, None if reference is None else _recipe_name(reference)),
        "others": [], "generated": None,
    }  # fmt: skip
    return Evaluation(report)


def _plan_windows(
    texts: Sequence[Text], model: Any, tokens: int | None, scored_tokens: int | None, windows: int | None, step: int, seed: int
) -> tuple[list[tuple[Text, int]], dict[str, int]]:
    """Return the (text, start) pair of each window, and the sizes that all windows share."""
    longest = max(len(text.ids) + len(text.start) for text in texts) - 1
    most = min(longest, position_limit(model) or longest)
    size = _checked_size(
        "tokens", min(TOKENS, most) if tokens is None else tokens, 2, most, "(the limit of the model or of the longest text)"
    )
    scored = _checked_size(
        "scored_tokens", min(SCORE, size // 2) if scored_tokens is None else scored_tokens, 1, size - 1, f"in a window of {size} tokens"
    )
    step = _checked_size("step", step, 1, size, f"in a window of {size} tokens")
    rooms = [len(text.ids) // ids_per_window(size, text) for text in texts]
    fitting, why = sum(rooms), f"(the number of {size}-token windows in the texts): pass longer texts or fewer tokens"
    count = _checked_size("windows", min(WINDOWS, fitting) if windows is None else windows, 1, fitting, why)
    # Take a window from each text in turn, as long as the text has enough tokens.
    shares = [0] * len(texts)
    while sum(shares) < count:
        for number, room in enumerate(rooms):
            if shares[number] < room and sum(shares) < count:
                shares[number] += 1
    places = [
        (text, start)
        for text, share in zip(texts, shares, strict=True)
        if share
        for start in window_starts(len(text.ids), ids_per_window(size, text), share, seed)
    ]
    return places, {"tokens": size, "score": scored, "step": step}


def _checked_size(name: str, value: int, low: int, high: int, reason: str) -> int:
    """Return ``value`` as an int. Raises InvalidParameter unless it is from ``low`` to ``high``. ``reason`` explains the upper limit."""
    result = as_integer(value, name)
    check_size(name, result, low, high, reason)
    return result


def _recipe_name(recipe: str | os.PathLike[str] | Recipe) -> str:
    return recipe.text if isinstance(recipe, Recipe) else str(recipe)


def _measure(
    model: Any, windows: Sequence[tuple[Text, int]], sizes: Mapping[str, int], recipes: Mapping[str, Recipe], progress: Progress | None
) -> tuple[list[float], list[Comparison], list[list[RecipeResult]]]:
    exact_losses: list[float] = []
    forgotten: list[Comparison] = []
    measured: list[list[RecipeResult]] = [[] for _ in recipes]
    device, steps = execution_device(model), len(windows) * (1 + len(recipes))
    with tempfile.TemporaryDirectory(prefix="kvpack-evaluate-") as folder:
        path = os.path.join(folder, "window.kvpack")
        for number, (text, start) in enumerate(windows):
            ids = window_ids(text, start, ids_per_window(sizes["tokens"], text)).to(device)
            exact = evaluate_uncompressed(model, ids, sizes["score"])
            exact_losses.append(exact.loss)
            forgotten.append(evaluate_forgotten(model, exact))
            for done, (recipe, rows) in enumerate(zip(recipes.values(), measured, strict=True), 1):
                if progress:
                    progress(number * (1 + len(recipes)) + done, steps)
                rows.append(measure(model, exact, recipe, path, sizes["step"]))
            if progress:
                progress((number + 1) * (1 + len(recipes)), steps)
    return exact_losses, forgotten, measured
