"""kvpack calibrate: create the basis of a model from a text, for the codecs klt and transform and for keys in balanced frames."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch
import xxhash

import kvpack
from kvpack.coding.bases import Basis, basis_bytes, weights_key
from kvpack.evaluation.models import Text, read_text, vocabulary
from kvpack.evaluation.sizes import check_size, positions, starts, window, window_ids, window_tokens
from kvpack.evaluation.twins import make_twin
from kvpack.evaluation.windows import prefill
from kvpack.file.atomic import write_file
from kvpack.file.basis import SUFFIX
from kvpack.formats import rans
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.transform import SCOPES, default_chunk
from kvpack.identity.rope import same_up_to
from kvpack.integrations.transformers.models import Model, identity_for, identity_of
from kvpack.models import load_model, model_folder, transformers_library
from kvpack.output import step_counter

from .balanced_fit import balanced_of_all, gain_of_more_text
from .basis_fit import rows_of_all
from .frames_fit import frames_of_all
from .place_losses import losses_of_places
from .rope import ropes
from .spread import places_of, spread_keys, spread_moments
from .statistics import RAW, Framing, QueryMoments, Statistics

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvpack.coding.encoding import Progress
    from kvpack.formats.frames import Frames, Rope

    from .statistics import KeyMoments

DEFAULT_TOKENS = 4096
DEFAULT_SCORE = 256
DEFAULT_WINDOWS = 16
BALANCED_TOKENS, BALANCED_WINDOWS = 2048, 2
"""Sizes for balanced frames only; 12 times as much text is no better."""
POSITIONS = 1 << 15
"""Maximum number of positions, of those of the model, that balanced frames are for by default."""
ROWS_POSITIONS = 4096
"""Maximum number of positions that the rows of klt are for by default: more cost short contexts too much."""
WIDTHS_TOKENS = 1024
"""Tokens of the windows that are read with one layer and side packed, of which the last quarter is scored."""
SAMPLES = 8192
"""Tokens whose keys and values are kept to train tables, over all windows."""
PROGRESS_SUFFIX = ".progress"
WIDEST_LAYER = 512
"""Maximum number of channels of a layer with one frame by default; decoding takes up to that many products per value."""
SHOWN_BITS = (0.3, 0.6, 1.0)
LOADED_DTYPES = ("bfloat16", "float16", "float32")
"""The dtypes that models are loaded in: a basis is for each of them."""
_SAMPLE_TOKENS = 256


@dataclass(frozen=True)
class Settings:
    """Sizes of a calibration; None stands for the default, or for the limit of the model and the text if that is smaller.

    ``tokens`` of a window, of which the last ``score`` are not in its cache; as many are predicted (``statistics.beginnings``).
    ``twin`` is the factor of the outlier-heavy twin, None for the model as it is. ``scope`` of frames is "head", "layer" or, for a
    basis without them, "none". ``balanced_only`` leaves out what klt and transform need: windows are read once, and nothing is predicted.
    ``widths`` windows are read again with one layer and side packed at a time, for the widths of kvpack's own presets.
    ``positions`` are those of a context that keys are described for (``spread``), None for ``POSITIONS`` and ``ROWS_POSITIONS``.
    """

    tokens: int | None = None
    score: int | None = None
    windows: int | None = None
    twin: float | None = None
    seed: int = 0
    scope: str | None = None
    balanced_only: bool = False
    widths: int = 0
    positions: int | None = None


def run(
    model: str | None, text: str | None, out: str, settings: Settings, *, dtype: str = "fp16", progress: Progress | None = None
) -> dict[str, Any]:
    """Calibrate the model in folder ``model`` on the file ``text``, write the basis to ``out``, and return JSON values.

    Progress is saved in ``out`` + ".progress" after every window, so that an interrupted calibration resumes, and removed at the end.
    Raises InvalidParameter for sizes that do not fit, and for a model with layers that have no keys and values of heads, MissingFile,
    WriteFailed and OutOfRange.
    """
    if not out.endswith(SUFFIX):
        raise InvalidParameter(f"{out}: the name of a basis ends in {SUFFIX}")
    with model_folder(model) as folder:
        network = load_model(folder)
        identity = _identity_in_any_dtype(folder)
        words = read_text(text, folder, vocabulary(network))
    longest = same_up_to(network.config.get_text_config())
    only = settings.balanced_only
    tokens, score, windows = _sizes(settings, words, longest, positions(network))
    read_again = _windows_for_widths(words, positions(network), settings) if settings.widths else []
    if settings.twin is not None:
        make_twin(network, settings.twin, _sample(network, words), settings.seed)
        identity = {key: text for key, text in identity.items() if not key.startswith("weights")}
        identity |= {"name": f"{identity.get('name', '')} twin {settings.twin:g}"}
    sizes: dict[str, Any] = {"tokens": tokens, "score": score, "windows": windows, "seed": settings.seed, "twin": settings.twin}
    framing, reason = (None, None) if only else _framing(network, words, settings.scope, tokens, longest)
    sizes["scope"] = "balanced only" if only else "none" if framing is None else framing.scope
    turns = _ropes(network, words, tokens, longest)
    report = _gathered(network, words, sizes, out + PROGRESS_SUFFIX, framing, turns, progress)
    halves = report.halves()
    for_frames, for_rows = _positions(settings, longest, positions(network))
    if turns is not None:
        places = places_of(tokens - score, for_frames)
        halves = halves and [
            (spread_moments(half, rope, places), spread_moments(other, rope, places))
            for (half, other), rope in zip(halves, turns, strict=True)
        ]
        # All contexts have the first positions: they count twice.
        report = spread_keys(report, turns, [0, *places_of(tokens - score, for_rows)])
    if only and halves is None:
        raise InvalidParameter(f"{words.name}: the model computes attention itself, so kvpack cannot observe its queries")
    # Layers that share those of others have none: a cache has them without sides.
    layers = len(Model(network).layers_with_tokens())
    total = windows + len(report.sums) + len(halves or ()) + settings.widths * (1 + 2 * layers)
    step = step_counter(progress, total, windows)

    frames = None if framing is None else frames_of_all(report, framing, step)
    rows = {} if only else rows_of_all(report, step)
    balanced = None if halves is None else balanced_of_all([half + other for half, other in halves], turns, lambda *_: step())
    data = basis_bytes(rows, layers, identity, dtype, frames, balanced)
    basis = Basis.of_bytes(data, where=out)
    if read_again:
        losses = losses_of_places(network, basis, layers, read_again, step)
        data = basis_bytes(rows, layers, identity | losses, dtype, frames, balanced)
        basis = Basis.of_bytes(data, where=out)
    write_file(out, [memoryview(data)])
    os.unlink(out + PROGRESS_SUFFIX)
    return {
        "basis": out,
        "digest": basis.digest.hex(),
        "bytes": len(data),
        "layers": layers,
        "model": identity,
        "text": words.name,
        **sizes,
        "positions": None if turns is None else {"frames": for_frames, "rows": for_rows},
        "raw": _raw_share(report, windows * (tokens - score), halves),
        "raw_attention": sum(map(float, report.shares.values())) / (len(report.shares) * windows) if report.shares else None,
        "transform": [] if frames is None else [rate(basis, bits) for bits in SHOWN_BITS if bits >= basis.min_transform_bits(raw=True)],
        "without_frames": reason,
        "balanced": halves is not None,
        "widths": settings.widths,
        "balanced_cost": None if halves is None else gain_of_more_text(halves),
    }


def _sizes(settings: Settings, words: Text, longest: int | None, most_positions: int | None) -> tuple[int, int, int]:
    """Return the tokens of a window, the number of predicted tokens, and the number of windows.

    Raises InvalidParameter for sizes that do not fit.
    """
    only = settings.balanced_only
    if only and (settings.score is not None or settings.scope is not None):
        raise InvalidParameter("--balanced-only predicts nothing, and makes no frames for transform: leave out --score and --scope")
    usual, limit = (BALANCED_TOKENS, BALANCED_WINDOWS) if only else (DEFAULT_TOKENS, DEFAULT_WINDOWS)
    tokens = window_tokens(settings.tokens, min(usual, longest or usual), words, most_positions)
    score = 0 if only else min(DEFAULT_SCORE, tokens // 2) if settings.score is None else settings.score
    room = len(words.ids) // window_ids(tokens, words)
    windows = min(limit, room) if settings.windows is None else settings.windows
    if not only:
        check_size("score", score, 1, tokens - 1 - RAW.first, f"in a window of {tokens} tokens")
    check_size("windows", windows, 1, room, f"of {tokens} tokens in {words.name}")
    if settings.positions is not None:
        most_read = min(most_positions or settings.positions, longest or settings.positions)
        check_size("positions", settings.positions, 1, most_read, "of the model")
    return tokens, score, windows


def _positions(settings: Settings, longest: int | None, most_positions: int | None) -> tuple[int, int]:
    """Return the numbers of positions for which keys are described, in balanced frames and in the rows of klt."""
    if settings.positions is not None:
        return settings.positions, settings.positions
    limits = [limit for limit in (longest, most_positions) if limit is not None]
    return min([POSITIONS, *limits]), min([ROWS_POSITIONS, *limits])


def _windows_for_widths(text: Text, most_positions: int | None, settings: Settings) -> list[torch.Tensor]:
    """Return windows of the text for ``losses_of_places``. Raises InvalidParameter if the text is too short."""
    tokens = window_tokens(None, WIDTHS_TOKENS, text, most_positions)
    size = window_ids(tokens, text)
    check_size("widths", settings.widths, 1, len(text.ids) // size, f"windows of {tokens} tokens in {text.name}")
    return [window(text, start, size) for start in starts(len(text.ids), size, settings.widths, settings.seed)]


def _raw_share(found: Statistics, tokens: int, halves: Sequence[tuple[KeyMoments, KeyMoments]] | None = None) -> float:
    """Return the average share of ``tokens`` in each layer that was not counted, because recipes such as klt-1.75 keep it raw."""
    counted = [float(count) for name, count in found.counts.items() if name.endswith(".k")]
    counted = counted or [float(half.tokens + other.tokens) for half, other in halves or ()]
    return 1 - sum(counted) / (len(counted) * tokens)


def _framing(model: Any, text: Text, scope: str | None, tokens: int, longest: int | None) -> tuple[Framing | None, str | None]:
    """Return the scope of the frames in windows of ``tokens`` tokens, or None and the reason for having none.

    RoPE frequencies are those of at most ``longest`` tokens. Raises InvalidParameter for keys with an unknown rotation, if ``scope``
    requests frames, and for layers without keys.
    """
    if scope not in (None, "none", *SCOPES):
        raise InvalidParameter(f"--scope is {scope!r}, expected one of none, {', '.join(SCOPES)}")
    if scope == "none":
        return None, None
    sample = _sample(model, text)
    (k, _), *_ = pairs = prefill(model, sample)
    _check_pairs(pairs)
    try:
        result = ropes(model, sample)
        if longest is not None and tokens > longest and any(result):
            raise InvalidParameter(
                f"--tokens is {tokens}, but RoPE uses different frequencies beyond {longest} tokens: "
                f"calibrate with --tokens {longest}, or without frames, --scope none"
            )
    except InvalidParameter as error:
        if scope is not None:
            raise
        return None, str(error)
    return Framing(scope or ("layer" if k.shape[1] * k.shape[3] <= WIDEST_LAYER else "head"), result), None


def _ropes(model: Any, text: Text, tokens: int, longest: int | None) -> Sequence[Rope | None] | None:
    """Return the RoPE of every layer's keys in windows of ``tokens`` tokens; None if it is unknown, or differs from shorter windows."""
    if longest is not None and tokens > longest:
        return None
    try:
        return ropes(model, _sample(model, text))
    except InvalidParameter:
        return None


def _sample(model: Any, text: Text) -> torch.Tensor:
    """Return the first tokens ``[1, token]`` of the text, at most as many as the model has positions."""
    return window(text, 0, _SAMPLE_TOKENS)[:, : positions(model)]


def _check_pairs(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Raise InvalidParameter unless every layer has keys and values of heads."""
    if any(k is None or v is None for k, v in pairs):
        raise InvalidParameter("calibration needs a model whose layers all have keys and values")
    for x in (x for pair in pairs for x in pair):
        if x.dim() != 4:
            raise InvalidParameter(f"keys have shape {list(x.shape)}; calibration needs keys and values [batch, kv_head, token, dim]")


def rate(basis: Basis, bits: float) -> dict[str, float]:
    """Return the expected size and speed of ``transform-<bits>``: bits, and products per decoded value."""
    step = basis.step(bits, raw=True)
    places = basis.sides_with_frames()
    coded = [_columns_with_symbols(basis.frames(*place), step, default_chunk(basis.rows(*place).dim)) for place in places]
    return {"bits": bits, "expected_bits": basis.transform_bits(step, raw=True), "products": sum(coded) / len(coded)}


def _columns_with_symbols(frames: Frames, step: int, chunk: int) -> float:
    """Return the columns of a frame up to the last one with a nonzero level in half of all chunks, on average over frames."""
    tables = frames.tables
    zeros = (tables.frequencies[:, 1 + tables.reach] / rans.TOTAL) ** chunk
    used = zeros[frames.tables_at(step)] < 0.5
    return float((used * numpy.arange(1, frames.columns + 1)).max(1).mean())


def _gathered(
    model: Any,
    text: Text,
    sizes: dict[str, Any],
    path: str,
    framing: Framing | None,
    turns: Sequence[Rope | None] | None,
    progress: Progress | None,
) -> Statistics:
    """Return the statistics of all windows, continuing those in the file ``path``; only those of keys if nothing is predicted."""
    size = sizes["tokens"] + 1 - len(text.start)
    begun = starts(len(text.ids), size, sizes["windows"], sizes["seed"])
    result = Statistics.read(path, _name_of(model, text, sizes))
    attention = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    for number, start in enumerate(begun):
        if number >= result.windows:
            ids = window(text, start, size)
            # The last token is predicted, and not read.
            read = ids[:, :-1]
            queries = QueryMoments()
            pairs = prefill(model, read[:, : sizes["tokens"] - sizes["score"]], observe=queries.observe)
            _check_pairs(pairs)
            model.set_attn_implementation(attention)
            if sizes["score"]:
                result.add(model, read, pairs, sizes["seed"] + number, -(-SAMPLES // sizes["windows"]), framing)
            result.add_moments(number, pairs, queries, turns)
            result.windows += 1
            result.write(path)
        if progress:
            progress(number + 1, sizes["windows"] + len(result.sums) + len(result.halves() or ()))
    return result


def _name_of(model: Any, text: Text, sizes: dict[str, Any]) -> str:
    """Name the model, the text and the sizes, by what the model predicts after the text's first tokens."""
    sample = _sample(model, text)
    with torch.inference_mode():
        logits = model(sample).logits[0]
    digest = xxhash.xxh3_128(logits.float().contiguous().numpy().tobytes())
    digest.update(bytes(text.ids) if text.of_bytes else str(list(text.ids)).encode())
    digest.update(repr((kvpack.__version__, sizes)).encode())
    return digest.hexdigest()


def folder_identity(folder: Path, dtype: str = "auto") -> dict[str, str]:
    """Return the identity of the model loaded in ``dtype``, by default its checkpoint's; the digest of its weights distinguishes it."""
    return identity_of(_loaded(folder, dtype))


def check_basis(basis: Basis, folder: Path) -> None:
    """Raise InvalidParameter if ``basis`` belongs to another model than the one in ``folder``."""
    basis.check_model(identity_for(_loaded(folder, "auto"), basis))


def _loaded(folder: Path, dtype: str) -> Any:
    return transformers_library().AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _identity_in_any_dtype(folder: Path) -> dict[str, str]:
    """Return the identity in the checkpoint's dtype, with the digests of weights in the other dtypes that users load."""
    identity = folder_identity(folder)
    for dtype in LOADED_DTYPES:
        result = folder_identity(folder, dtype)
        if dtype != identity.get("dtype") and "weights" in result:
            identity[weights_key(dtype)] = result["weights"]
    return identity


def show(report: dict[str, Any]) -> None:
    """Print the path of the basis and its digest."""
    print(
        f"{report['basis']}: {report['bytes']:,} bytes, {report['layers']} layers, {report['windows']} windows of {report['tokens']} tokens"
    )
    print(f"SHA-256 {report['digest']}")
    cost = report["balanced_cost"]
    if cost is not None:
        print(
            f"frame=balanced: key errors cost scores {cost['other']:.2f} times as much as without it, on text outside the calibration; "
            f"more calibration text lowers that to {cost['own']:.2f} at best"
        )
    elif not report["balanced"]:
        print("no balanced frames: the model computes attention itself, so kvpack cannot observe its queries")
    left_out = f"{100 * report['raw']:.2f} % of the tokens left out, which caches keep raw: the first, and those whose keys have a low norm"
    share = report["raw_attention"]
    print(left_out if share is None else f"{left_out}; they get {100 * share:.1f} % of the attention weight")
    if report["without_frames"]:
        print(f"no frames for the codec transform: {report['without_frames']}")
    for rate in report["transform"]:
        print(
            f"transform-{rate['bits']:g}: {rate['expected_bits']:.2f} bits per value expected, "
            f"about {rate['products']:.0f} products per decoded value (frames of a {report['scope']})"
        )
