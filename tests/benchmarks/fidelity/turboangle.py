"""TurboAngle: its rates for each number of bins and each model, and how evenly the angles are distributed."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from kvpack.coding.encoding import encode
from kvpack.coding.presets import PUBLISHED
from kvpack.coding.recipes import parse_recipe
from kvpack.coding.recorded_presets import RECORDED

from .measure import DIM, Settings, codec, rate
from .rows import Row, around

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.formats.angle import Angle

_ANGLE_BITS = {32: 2.50, 48: 2.79, 64: 3.00, 128: 3.50}
"""Table 1: bits per value for the angles of both sides, for each number of bins."""

_UNIFORM = "turboangle-k8v4"
_UNIFORM_ANGLE_BITS = 3.25
_UNIFORM_BITS = 6.75

_MODELS = {
    "tinyllama-1.1b": (3.34, 6.84, "fp16"),
    "mistral-7b": (3.31, 6.56, "fp16"),
    "smollm2-1.7b": (3.67, 7.67, "fp32"),
    "phi-1.5": (3.58, 7.58, "fp32"),
    "stablelm-2-1.6b": (3.63, 7.63, "fp32"),
    "starcoder2-3b": (3.45, 7.45, "fp32"),
    "olmo-1b": (3.28, 7.28, "fp32"),
}
"""For each model: angle bits (Table 2), bits with K8V4-log norms (Table 5), and the dtype of a token's norm range in Table 5."""

_NORM8_BITS = {"mistral-7b": 7.81, "tinyllama-1.1b": 8.3}
"""Bits per value with 8-bit linear norms on both sides (Table 6; Sec. 4.6 for a head dim of 64)."""

_RANGE_NOTE = "Table 5 counts 16 bits each for a token's smallest and largest norm for TinyLlama and Mistral, and 32 for the other five"
_EQUATION_NOTE = "Eq. 3 counts 32 bits for each of the two norms, which is 32 / d bits per value more than Table 5 for this model"
_STORED_NOTE = "a file stores a token's smallest and largest norm in 16 bits each, but Eq. 3 counts 32"


def _mean(recipe: str, layers: int, dim: int, bits: Callable[[Angle], float]) -> float:
    """Return the mean of ``bits`` over the codecs that ``recipe`` selects for keys and values of all layers."""
    parsed = parse_recipe(recipe)
    found = [bits(cast("Angle", parsed.codec(layer, layers, side, dim))) for layer in range(layers) for side in "kv"]
    return sum(found) / len(found)


def _angle_bits(chosen: Angle) -> float:
    return sum(bits for name, bits in rate(chosen).alphabets.items() if name.startswith("angle"))


def _counted(dtype: str) -> Callable[[Angle], float]:
    """Return a function that counts a codec's bits as the paper does, with the range of a token's norms stored in ``dtype``."""
    return lambda chosen: rate(replace(chosen, range=dtype)).counted


def _bins(settings: Settings) -> list[Row]:
    uniform = RECORDED[_UNIFORM]
    rows = []
    for bins, published in _ANGLE_BITS.items():
        found = rate(codec(f"angle:n={bins},norm=fp32"))
        rows.append(Row("Table 1", f"n = {bins}: angle bits", sum(found.alphabets.values()), published))
    return [
        *rows,
        Row("Sec. 3.2", "K128V64: angle bits", _mean(uniform, 1, DIM, _angle_bits), _UNIFORM_ANGLE_BITS),
        Row("Eq. 3", "K128V64, K8V4-log, d = 128: bits", _mean(uniform, 1, DIM, _counted("fp32")), _UNIFORM_BITS),
        Row(
            "Eq. 3",
            "K128V64, K8V4-log, d = 128: bits as stored",
            _mean(uniform, 1, DIM, _stored),
            _UNIFORM_BITS,
            expected=around(6.5),
            note=_STORED_NOTE,
        ),
    ]


def _stored(chosen: Angle) -> float:
    return rate(chosen).total


def _models(settings: Settings) -> list[Row]:
    angles, totals, norm8 = [], [], []
    for model, (angle_bits, bits, dtype) in _MODELS.items():
        name = f"mixedkv-{model}"
        preset, recipe = PUBLISHED[name], RECORDED[name]
        # Each of these presets is for one model, and names its sizes.
        layers, dim = cast("int", preset.layers), cast("int", preset.dim)
        mean = partial(_mean, layers=layers, dim=dim)
        label = f"{model}, d = {dim}"
        angles.append(Row("Table 2", f"{label}: angle bits", mean(recipe, bits=_angle_bits), angle_bits))
        totals.append(Row("Table 5", f"{label}: K8V4-log bits", mean(recipe, bits=_counted(dtype)), bits, note=_RANGE_NOTE))
        if dtype == "fp16":
            equation = mean(recipe, bits=_counted("fp32"))
            expected = around(bits + 32 / dim)
            totals.append(Row("Table 5", f"{label}: K8V4-log bits by Eq. 3", equation, bits, expected=expected, note=_EQUATION_NOTE))
        if model in _NORM8_BITS:
            linear = recipe.replace("log4", "linear8")
            norm8.append(Row("Table 6", f"{label}: norm8 bits", mean(linear, bits=_counted("fp32")), _NORM8_BITS[model]))
    return [*angles, *totals, *norm8]


_EQUAL_BINS = 128
_ROTATIONS = 16
_OUTLIERS = 8
_OUTLIER_SIZE = 20.0
_OFFSET_NOTE = "all tokens have the same rotation, so channels with a constant sign give a pair the same direction in all tokens"
_KEYS: dict[str, tuple[int, str]] = {
    "Gaussian keys, d = 128": (128, ""),
    "Gaussian keys, d = 64": (64, ""),
    f"{_OUTLIERS} channels {_OUTLIER_SIZE:g} times as large, d = 128": (128, "scaled"),
    f"{_OUTLIERS} channels {_OUTLIER_SIZE:g} times as large, d = 64": (64, "scaled"),
    f"{_OUTLIERS} channels off zero by {_OUTLIER_SIZE:g}, d = 128": (128, "moved"),
}


def _uniformity(settings: Settings) -> list[Row]:
    """Return the rows for Sec. 2. After the rotation, angles are uniform and all bins are used equally, averaged over rotations."""
    rows = []
    for label, (dim, outliers) in _KEYS.items():
        x = torch.randn(1, 1, settings.size(4096, 1024), dim, generator=settings.generator(0))
        if outliers == "scaled":
            x[..., :_OUTLIERS] *= _OUTLIER_SIZE
        elif outliers == "moved":
            x[..., :_OUTLIERS] += _OUTLIER_SIZE
        used = statistics.mean(_bins_in_use(x, settings.draw(number)) for number in range(_ROTATIONS))
        expected, note = ((25.0, 65.0), _OFFSET_NOTE) if outliers == "moved" else (None, "")
        rows.append(Row("Sec. 2", f"{label}: angle bins used equally often", used, _EQUAL_BINS, expected=expected, note=note))
    return rows


def _bins_in_use(x: torch.Tensor, seed: int) -> float:
    """Return the effective number of bins that ``x`` uses: 2 to the power of their entropy in bits.

    It equals the number of bins if all are equally frequent, and is smaller otherwise.
    """
    chosen = codec(f"angle:n={_EQUAL_BINS},norm=fp32,seed={seed}", x.shape[-1])
    bins = chosen.digits(encode(chosen, x, "the benchmark's keys"))[0]
    share = torch.bincount(bins.flatten(), minlength=_EQUAL_BINS).double() / bins.numel()
    return math.exp(torch.special.entr(share).sum().item())


SECTIONS: tuple[Callable[[Settings], list[Row]], ...] = (_bins, _models, _uniformity)
