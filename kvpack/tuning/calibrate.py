"""kvpack calibrate: creates a model's basis from a text, for the codecs klt and transform and for keys in balanced frames."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch
import xxhash

import kvpack
from kvpack.coding.bases import Basis, basis_bytes, weights_key
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
from kvpack.evaluation.twins import make_twin
from kvpack.evaluation.windows import prefill
from kvpack.file.atomic import write_file
from kvpack.file.basis import SUFFIX
from kvpack.formats import rans
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.transform import SCOPES, default_chunk
from kvpack.identity.rope import max_uniform_length
from kvpack.integrations.transformers.models import Model, identity_for, model_identity
from kvpack.models import import_transformers, load_model, model_folder
from kvpack.output import step_counter

from .basis_fit import fit_rows
from .frames_fit import compare_halves, fit_balanced_keys, fit_frames
from .rope import average_moments_over_positions, find_ropes, spread_keys, window_positions
from .statistics import RAW_TOKENS, Framing, KeyMoments, QueryMoments, Statistics
from .tensor_losses import measure_tensor_losses

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvpack.coding.encoding import Progress
    from kvpack.formats.frames import Frames, Rope

DEFAULT_TOKENS = 4096
DEFAULT_SCORE = 256
DEFAULT_WINDOWS = 16
BALANCED_TOKENS, BALANCED_WINDOWS = 2048, 2
"""Number of tokens per window, and number of windows, if only balanced frames are made. 12 times as much text is no better."""
POSITIONS = 1 << 15
"""Default maximum number of positions over which balanced frames are averaged."""
ROWS_POSITIONS = 4096
"""Default maximum number of positions over which klt's rows are averaged. More would harm short contexts."""
WIDTHS_TOKENS = 1024
"""Number of tokens per window in which losses of single tensors are measured. The last eighth is scored."""
SAMPLES = 8192
"""Number of tokens, over all windows, whose keys and values train the tables."""
PROGRESS_SUFFIX = ".progress"
WINDOW_STEPS = 32
"""Number of steps of progress per window: about how many times as long as the fit of a tensor a window takes."""
WRITE_INTERVAL = 20
"""Minimum time between two writes of progress, as a multiple of the time that the last one took. A GPU reads windows faster."""
MAX_LAYER_CHANNELS = 512
"""Maximum number of channels for which a layer gets a single frame by default. Decoding takes up to that many products per value."""
SHOWN_BITS = (0.3, 0.6, 1.0)
LOADED_DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes in which models are loaded. A basis works for all of them."""
_SAMPLE_TOKENS = 256


@dataclass(frozen=True)
class CalibrationSettings:
    """Settings of a calibration. None selects the default, or the limit of the model and the text if that is smaller.

    Attributes:
        tokens: Tokens per window.
        scored_tokens: Number of tokens per window that are predicted. The window's cache does not contain them.
        windows: Number of windows.
        twin: Factor that scales outlier channels in the model's twin, or None for the model itself.
        seed: Seed of the windows.
        scope: Scope of frames: "head", "layer" or, for a basis without frames, "none".
        balanced_only: Omit everything that only klt and transform need. Windows are then read once, and nothing is predicted.
        widths: Number of windows in which the loss of each tensor is measured, for the bit widths of kvpack's own presets. 0 omits them.
        positions: Number of positions over which statistics of keys are averaged, or None for ``POSITIONS`` and ``ROWS_POSITIONS``.
        device: Device of the model, whose dtype is float32.
    """

    tokens: int | None = None
    scored_tokens: int | None = None
    windows: int | None = None
    twin: float | None = None
    seed: int = 0
    scope: str | None = None
    balanced_only: bool = False
    widths: int = 2
    positions: int | None = None
    device: str = "cpu"


def run(
    model: str | None, text: str | None, out: str, settings: CalibrationSettings, *, dtype: str = "fp16", progress: Progress | None = None
) -> dict[str, Any]:
    """Calibrate a model on a text, write the basis to ``out``, and return a report as JSON values.

    ``model`` is a folder, and ``text`` a file. Progress is saved to ``out`` + ".progress" after windows, so that an interrupted calibration
    can resume; that file is removed at the end. Raises InvalidParameter if a size is not supported or a layer of the model has no keys and
    values, MissingFile, WriteFailed and ValueTooLarge.
    """
    if not out.endswith(SUFFIX):
        raise InvalidParameter(f"{out}: the name of a basis must end in {SUFFIX}")
    with model_folder(model) as folder:
        network = load_model(folder).to(settings.device)
        identity = _identity_in_any_dtype(folder, network)
        words = read_text(text, folder, get_vocabulary_size(network))
    longest = max_uniform_length(network.config.get_text_config())
    only = settings.balanced_only
    tokens, scored_tokens, windows = _choose_sizes(settings, words, longest, position_limit(network))
    read_again = _windows_for_widths(network, words, settings) if settings.widths else []
    if settings.twin is not None:
        make_twin(network, settings.twin, _sample_tokens(network, words), settings.seed)
        identity = {key: text for key, text in identity.items() if not key.startswith("weights")}
        identity |= {"name": f"{identity.get('name', '')} twin {settings.twin:g}"}
    sizes: dict[str, Any] = {"tokens": tokens, "score": scored_tokens, "windows": windows, "seed": settings.seed, "twin": settings.twin}
    framing, reason = (None, None) if only else _frame_scope(network, words, settings.scope, tokens, longest)
    sizes["scope"] = "balanced only" if only else "none" if framing is None else framing.scope
    layer_ropes = _ropes(network, words, tokens, longest) if framing is None else framing.ropes
    report = _gather_statistics(network, words, sizes, out + PROGRESS_SUFFIX, framing, layer_ropes, progress, len(read_again))
    halves = report.halves()
    for_frames, for_rows = _position_counts(settings, longest, position_limit(network))
    if layer_ropes is not None:
        places = window_positions(tokens - scored_tokens, for_frames)
        halves = halves and [
            (average_moments_over_positions(half, rope, places), average_moments_over_positions(other, rope, places))
            for (half, other), rope in zip(halves, layer_ropes, strict=True)
        ]
        # All contexts have the first positions, so these count twice.
        report = spread_keys(report, layer_ropes, [0, *window_positions(tokens - scored_tokens, for_rows)])
    if only and halves is None:
        raise InvalidParameter(f"{words.name}: the model implements attention itself, so its queries are unknown: omit --balanced-only")
    # Layers that share the keys and values of others are empty in a cache.
    layers = len(Model(network).layers_with_tokens())
    if halves is None:
        # Without frames, kvpack's own presets use no widths.
        read_again = []
    step = step_counter(progress, _total_steps(windows, report, len(read_again)), WINDOW_STEPS * windows)

    frames = None if framing is None else fit_frames(report, framing, step)
    rows = {} if only else fit_rows(report, step)
    balanced = None if halves is None else fit_balanced_keys([half + other for half, other in halves], layer_ropes, lambda *_: step())
    data = basis_bytes(rows, layers, identity, dtype, frames, balanced)
    basis = Basis.from_bytes(data, where=out)
    if read_again:
        losses = measure_tensor_losses(network, basis, read_again, step)
        data = basis_bytes(rows, layers, identity | losses, dtype, frames, balanced)
        basis = Basis.from_bytes(data, where=out)
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
        "positions": None if layer_ropes is None else {"frames": for_frames, "rows": for_rows},
        "raw": _raw_fraction(report, windows * (tokens - scored_tokens), halves),
        "raw_attention": sum(map(float, report.shares.values())) / (len(report.shares) * windows) if report.shares else None,
        "transform": [] if frames is None else [rate(basis, bits) for bits in SHOWN_BITS if bits >= basis.min_transform_bits(raw=True)],
        "without_frames": reason,
        "balanced": halves is not None,
        "widths": len(read_again),
        "balanced_cost": None if halves is None else compare_halves(halves),
    }


def _choose_sizes(settings: CalibrationSettings, text: Text, longest: int | None, max_positions: int | None) -> tuple[int, int, int]:
    """Return the tokens per window, the predicted tokens per window, and the number of windows.

    Raises InvalidParameter if a setting exceeds the limits of the model or the text.
    """
    only = settings.balanced_only
    if only and (settings.scored_tokens is not None or settings.scope is not None):
        raise InvalidParameter("--balanced-only neither scores predictions nor makes frames for transform: omit --score and --scope")
    usual, limit = (BALANCED_TOKENS, BALANCED_WINDOWS) if only else (DEFAULT_TOKENS, DEFAULT_WINDOWS)
    tokens = window_tokens(settings.tokens, min(usual, longest or usual), text, max_positions)
    scored_tokens = 0 if only else min(DEFAULT_SCORE, tokens // 2) if settings.scored_tokens is None else settings.scored_tokens
    room = len(text.ids) // ids_per_window(tokens, text)
    windows = min(limit, room) if settings.windows is None else settings.windows
    if not only:
        check_size("--score", scored_tokens, 1, tokens - 1 - RAW_TOKENS.first, f"in a window of {tokens} tokens")
    check_size("--windows", windows, 1, room, f"(the number of {tokens}-token windows in {text.name}): {LONGER_TEXT}")
    if settings.positions is not None:
        most_read = min(max_positions or settings.positions, longest or settings.positions)
        check_size("--positions", settings.positions, 1, most_read, "of the model")
    return tokens, scored_tokens, windows


def _position_counts(settings: CalibrationSettings, longest: int | None, max_positions: int | None) -> tuple[int, int]:
    """Return the numbers of positions over which balanced frames and klt's rows are averaged."""
    if settings.positions is not None:
        return settings.positions, settings.positions
    limits = [limit for limit in (longest, max_positions) if limit is not None]
    return min([POSITIONS, *limits]), min([ROWS_POSITIONS, *limits])


def _windows_for_widths(model: Any, text: Text, settings: CalibrationSettings) -> list[torch.Tensor]:
    """Return windows of the text for ``measure_tensor_losses``. Raises InvalidParameter if the text is too short."""
    tokens = window_tokens(None, WIDTHS_TOKENS, text, position_limit(model))
    size = ids_per_window(tokens, text)
    check_size("--widths", settings.widths, 1, len(text.ids) // size, f"windows of {tokens} tokens in {text.name}")
    return [window_ids(text, start, size).to(model.device) for start in window_starts(len(text.ids), size, settings.widths, settings.seed)]


def _raw_fraction(statistics: Statistics, tokens: int, halves: Sequence[tuple[KeyMoments, KeyMoments]] | None = None) -> float:
    """Return the fraction of ``tokens`` that were not counted, averaged over layers. Recipes such as klt-1.75 keep these tokens raw."""
    counted = [float(count) for name, count in statistics.counts.items() if name.endswith(".k")]
    counted = counted or [float(half.tokens + other.tokens) for half, other in halves or ()]
    return 1 - sum(counted) / (len(counted) * tokens)


def _frame_scope(model: Any, text: Text, scope: str | None, tokens: int, longest: int | None) -> tuple[Framing | None, str | None]:
    """Return (framing, None), or (None, reason) if there can be no frames. The reason is None if ``scope`` is "none".

    ``longest`` is the number of tokens up to which RoPE frequencies do not change, or None for no limit. Raises InvalidParameter if a layer
    has no keys, or if ``scope`` requests frames but the rotation of keys is unknown.
    """
    if scope not in (None, "none", *SCOPES):
        raise InvalidParameter(f"--scope is {scope!r}, expected one of none, {', '.join(SCOPES)}")
    if scope == "none":
        return None, None
    sample = _sample_tokens(model, text)
    (k, _), *_ = pairs = prefill(model, sample)
    _check_pairs(pairs)
    try:
        result = find_ropes(model, sample)
        if longest is not None and tokens > longest and any(result):
            raise InvalidParameter(
                f"--tokens is {tokens}, but RoPE uses different frequencies beyond {longest} tokens: "
                f"calibrate with --tokens {longest}, or without frames (--scope none)"
            )
    except InvalidParameter as error:
        if scope is not None:
            raise
        return None, str(error)
    return Framing(scope or ("layer" if k.shape[1] * k.shape[3] <= MAX_LAYER_CHANNELS else "head"), result), None


def _ropes(model: Any, text: Text, tokens: int, longest: int | None) -> Sequence[Rope | None] | None:
    """Return the RoPE of each layer's keys, or None if it is unknown or if ``tokens`` exceeds ``longest``.

    ``longest`` is the number of tokens up to which RoPE frequencies do not change.
    """
    if longest is not None and tokens > longest:
        return None
    try:
        return find_ropes(model, _sample_tokens(model, text))
    except InvalidParameter:
        return None


def _sample_tokens(model: Any, text: Text) -> torch.Tensor:
    """Return the first tokens ``[1, token]`` of the text, at most the model's number of positions."""
    return window_ids(text, 0, _SAMPLE_TOKENS)[:, : position_limit(model)].to(model.device)


def _check_pairs(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Raise InvalidParameter unless all layers have keys and values, with an axis for heads."""
    if any(k is None or v is None for k, v in pairs):
        raise InvalidParameter("the model has layers without keys and values, which calibration does not support: use another model")
    for x in (x for pair in pairs for x in pair):
        if x.dim() != 4:
            raise InvalidParameter(f"keys have shape {list(x.shape)}, expected [batch, kv_head, token, dim]: use another model")


def rate(basis: Basis, bits: float) -> dict[str, float]:
    """Return the expected bits per value of ``transform-<bits>``, and the number of products needed to decode a value."""
    step = basis.step(bits, raw=True)
    places = basis.sides_with_frames()
    coded = [_columns_with_symbols(basis.frames(*place), step, default_chunk(basis.rows(*place).dim)) for place in places]
    return {"bits": bits, "expected_bits": basis.transform_bits(step, raw=True), "products": sum(coded) / len(coded)}


def _columns_with_symbols(frames: Frames, step: int, chunk: int) -> float:
    """Return the number of columns that take up space in a typical chunk, averaged over frames.

    These are the columns up to the last one that has a nonzero level in half of all chunks.
    """
    tables = frames.tables
    zeros = (tables.frequencies[:, 1 + tables.max_level] / rans.TOTAL) ** chunk
    used = zeros[frames.tables_at(step)] < 0.5
    return float((used * numpy.arange(1, frames.columns + 1)).max(1).mean())


def _gather_statistics(
    model: Any,
    text: Text,
    sizes: dict[str, Any],
    path: str,
    framing: Framing | None,
    layer_ropes: Sequence[Rope | None] | None,
    progress: Progress | None,
    windows_for_widths: int,
) -> Statistics:
    """Return the statistics of all windows. Windows that are already in the file ``path`` are not read again.

    If no tokens are predicted, only statistics of keys are gathered.
    """
    size = sizes["tokens"] + 1 - len(text.start)
    starts = window_starts(len(text.ids), size, sizes["windows"], sizes["seed"])
    result = Statistics.read(path, _calibration_id(model, text, sizes))
    written, writing = -math.inf, 0.0
    attention = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    for number, start in enumerate(starts):
        if number >= result.windows:
            ids = window_ids(text, start, size).to(model.device)
            # The last token is predicted, but not read.
            read = ids[:, :-1]
            queries = QueryMoments()
            pairs = prefill(model, read[:, : sizes["tokens"] - sizes["score"]], observe=queries.observe)
            _check_pairs(pairs)
            model.set_attn_implementation(attention)
            if sizes["score"]:
                result.add(model, read, pairs, sizes["seed"] + number, -(-SAMPLES // sizes["windows"]), framing)
            result.add_moments(number, pairs, queries, layer_ropes)
            result.windows += 1
            began = time.perf_counter()
            if began - written >= WRITE_INTERVAL * writing:
                result.write(path)
                written = time.perf_counter()
                writing = written - began
        if progress:
            progress(WINDOW_STEPS * (number + 1), _total_steps(sizes["windows"], result, windows_for_widths))
    return result


def _total_steps(windows: int, statistics: Statistics, windows_for_widths: int) -> int:
    """Return the number of steps of progress: windows, fits of tensors, and passes of the measurement of widths."""
    layers = len(statistics.halves() or ())
    return WINDOW_STEPS * windows + len(statistics.sums) + layers + (windows_for_widths * (1 + 2 * layers) if layers else 0)


def _calibration_id(model: Any, text: Text, sizes: dict[str, Any]) -> str:
    """Return a digest that identifies the model, the text and the sizes. It covers the model's predictions for the beginning of the text.
    """
    sample = _sample_tokens(model, text)
    with torch.inference_mode():
        logits = model(sample).logits[0]
    digest = xxhash.xxh3_128(logits.float().contiguous().cpu().numpy().tobytes())
    digest.update(bytes(text.ids) if text.is_byte_level else str(list(text.ids)).encode())
    digest.update(repr((kvpack.__version__, sizes)).encode())
    return digest.hexdigest()


def folder_identity(folder: Path, dtype: str = "auto") -> dict[str, str]:
    """Return the identity of the model in ``folder`` when loaded in ``dtype``. "auto" selects the checkpoint's dtype."""
    return model_identity(_load_weights(folder, dtype))


def check_basis(basis: Basis, folder: Path) -> None:
    """Raise InvalidParameter if ``basis`` is not for the model in ``folder``."""
    basis.check_model(identity_for(_load_weights(folder, "auto"), basis))


def _load_weights(folder: Path, dtype: str) -> Any:
    return import_transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _identity_in_any_dtype(folder: Path, network: Any) -> dict[str, str]:
    """Return the identity of the model in ``folder``, with a digest of its weights for each dtype in which users may load it.

    ``network`` is the same model, loaded in one of these dtypes.
    """
    identity = folder_identity(folder)
    for dtype in LOADED_DTYPES:
        if dtype == identity.get("dtype"):
            continue
        result = model_identity(network) if network.dtype == getattr(torch, dtype) else folder_identity(folder, dtype)
        if "weights" in result:
            identity[weights_key(dtype)] = result["weights"]
    return identity


def show(report: dict[str, Any]) -> None:
    """Print the basis's path and digest, and the expected quality."""
    print(
        f"{report['basis']}: {report['bytes']:,} bytes, {report['layers']} layers, {report['windows']} windows of {report['tokens']} tokens"
    )
    print(f"SHA-256 {report['digest']}")
    cost = report["balanced_cost"]
    if cost is not None:
        print(
            f"frame=balanced: key errors change attention scores {cost['other']:.2f} times as much as without it, on text outside the "
            "calibration; "
            f"more calibration text lowers that to {cost['own']:.2f} at best"
        )
    elif not report["balanced"]:
        print("no balanced frames: the model computes attention itself, so kvpack cannot observe its queries")
    left_out = f"{100 * report['raw']:.2f}% of the tokens omitted, which caches keep raw: the first, and those whose keys have a low norm"
    share = report["raw_attention"]
    print(left_out if share is None else f"{left_out}; they get {100 * share:.1f}% of the attention weight")
    if report["without_frames"]:
        print(f"no frames for the transform codec: {report['without_frames']}")
    for rate in report["transform"]:
        print(
            f"transform-{rate['bits']:g}: {rate['expected_bits']:.2f} bits per value expected, "
            f"about {rate['products']:.0f} products per decoded value (frames of a {report['scope']})"
        )
