"""Presets: kvpack's own recipes and configurations from papers, by name.

A preset covers the keys and values of every layer. An addition changes some layers, and follows a preset in a recipe. Every lossy preset
keeps a few tokens raw, even if its paper does not. Two groups of presets also store key means separately: those that rotate keys and store
one norm per token, and those of HQMQ. The first group uses 8-bit norms for keys of up to 3 bits. Everything else follows the papers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

RAW_CLAUSE = "raw=4,0.5,4"
"""Clause for the tokens that lossy presets keep raw: the first of a sequence, and those with key norms far from their page's median.

Tokens with low norms are attention sinks. A limit of 0.6 instead of 0.5 takes 0.015 more bits per value, without a gain in quality. A token
with a high norm would raise the scales that it shares with other tokens or heads.
"""

KVPACK_RAW_CLAUSE = "raw=1,0.4,4"
"""``RAW_CLAUSE`` for kvpack's own presets, which take 0.02 to 0.03 bits per value less with it and lose the same.

Tokens with norms from 0.4 to 0.5 times the median, and the three after the first, lose no more than others do.
"""

CALIBRATED_RAW_CLAUSE = "raw=1,0.6,4"
"""Clause for the tokens that klt and transform keep raw. Fewer first tokens are raw, because raw tokens are costly at so few bits.

Later attention sinks are found by their low norms.
"""


@dataclass(frozen=True)
class Preset:
    """A named recipe. ``source`` names the paper or library that it comes from.

    ``codecs`` contains the clauses that select codecs. ``raw`` is the clause that selects raw tokens, or an empty string. If the preset is
    for only one model, ``layers`` and ``dim`` are its number of layers and head dim.
    """

    codecs: str
    source: str
    layers: int | None = None
    dim: int | None = None
    raw: str = RAW_CLAUSE

    @property
    def recipe(self) -> str:
        return f"{self.codecs};{self.raw}" if self.raw else self.codecs


class KvpackPreset(NamedTuple):
    """Settings of one of kvpack's own presets. ``bits`` is the width of a code. With ``trellis``, codes are paths through a trellis."""

    bits: int
    trellis: bool


KVPACK_PRESETS = {
    f"kvpack-{bits}{'-trellis' if trellis else ''}": KvpackPreset(bits, trellis) for bits in (4, 3, 2) for trellis in (False, True)
}

MAX_TRELLIS_BITS = 4
"""Maximum number of bits per value in the codec trellis."""

MAX_LOG8_BITS = 3
"""Maximum width of keys, in bits, for which presets use 8-bit norms.

An 8-bit norm is off by 1.3% on average, which scales all scores of its key. At 4 bits and head dim 64, random errors of the codes change a
score by 1.2%, less than the error of the norm.
"""

MAX_UNCALIBRATED_LOG8_BITS = 2
"""``MAX_LOG8_BITS`` for kvpack's own presets without a basis. At 3 bits, norms of 16 bits lose 10% less for 0.06 bits per value."""

MAX_SMALL_TRELLIS_BITS = 2
"""Maximum average width in bits, rounded down, for which presets use trellises of 256 states instead of 1,024.

With 256 states, encoding is eight times as fast on a CPU, and each codec in a file has a table of 512 bytes instead of 2,048. The squared
error is 4% larger at 2 bits, 8% at 3 bits, and 13% at 4 bits. At 4 bits, scalar codes with ``rounding=scaled`` would then be as good.
"""

_MEANS = "mean=32,mean_bits=4"
"""Options that make presets from papers store key means separately. The means take 0.07 bits per value at head dim 64."""

_MIXED_KV = {
    # model: (layers, head dim, boosted layers, bins of K, bins of V)
    "tinyllama-1.1b": (22, 64, "0-3", 128, 256),
    "mistral-7b": (32, 128, "0-3", 256, 128),
    "smollm2-1.7b": (24, 64, "0-19", 256, 128),
    "phi-1.5": (24, 64, "0-7,16-23", 256, 128),
    "stablelm-2-1.6b": (32, 64, "0-23", 256, 128),
    "starcoder2-3b": (40, 64, "0-15", 256, 128),
    "olmo-1b": (32, 64, "0-3", 256, 64),
}
"""Models with their bins in boosted layers, from TurboAngle Tables 2, 3 and 5. Other layers have 128 bins for keys and 64 for values."""


def _turboangle_clauses(k_bins: int, v_bins: int) -> tuple[str, str]:
    """Return the codec clauses for keys and for values, with K8V4-log norms (TurboAngle Sec. 3.3)."""
    return f"k=angle:n={k_bins},norm=linear8", f"v=angle:n={v_bins},norm=log4"


def kvpack_codec(side: str, bits: int, trellis: bool) -> str:
    """Return the text of the codec for ``side`` in kvpack's own presets, without options for raw tokens.

    For keys, the mean of each page is stored separately, and channels are scaled to similar sizes.
    """
    sidecars = ",mean=128,channel_scale=fp16" if side == "k" else ""
    return f"{_kvpack_codec_text(bits, trellis, bits)}{_norm_option(side, bits, MAX_UNCALIBRATED_LOG8_BITS)}{sidecars}"


def calibrated_codec(side: str, bits: int, trellis: bool, average_bits: int | None = None) -> str:
    """Return the text of the codec for ``side`` in kvpack's own presets with a basis that has frames for keys.

    ``average_bits`` is the recipe's average width, rounded down. Defaults to ``bits``.
    """
    words = _kvpack_codec_text(bits, trellis and bits <= MAX_TRELLIS_BITS, bits if average_bits is None else average_bits)
    return f"{words}{_norm_option(side, bits)}{',mean=128,frame=centered' if side == 'k' else ''}"


def _kvpack_codec_text(bits: int, trellis: bool, average_bits: int) -> str:
    """Return the text of the codec in kvpack's own presets, without norms and sidecars."""
    if not trellis:
        return f"scalar:b={bits},rounding=scaled"
    return f"trellis:b={bits}{',states=256' if average_bits <= MAX_SMALL_TRELLIS_BITS else ''}"


def _add_mean_and_norm_options(codec: str, bits: int) -> str:
    """Add options for separate key means to ``codec``, and for 8-bit norms if these are precise enough for ``bits`` bits."""
    return f"{codec}{_norm_option('k', bits)},{_MEANS}"


def _norm_option(side: str, bits: int, max_bits: int = MAX_LOG8_BITS) -> str:
    """Return the option for 8-bit norms, or an empty string for keys of more than ``max_bits`` bits."""
    return ",norm=log8" if side == "v" or bits <= max_bits else ""


def _mixed_kv_recipe(boosted: str, k_bins: int, v_bins: int) -> str:
    uniform = _turboangle_clauses(128, 64)
    changed = (clause for clause in _turboangle_clauses(k_bins, v_bins) if clause not in uniform)
    return ";".join([*uniform, *(f"layers={boosted}:{clause}" for clause in changed)])


def _basic_presets() -> dict[str, Preset]:
    result = {"raw": Preset("kv=raw", "uncompressed, in the dtype of the values", raw="")}
    for name in ("bf16", "fp16", "fp32"):
        result[name] = Preset(f"kv=raw:dtype={name}", f"uncompressed, stored as {name}", raw="")
    for name, preset in KVPACK_PRESETS.items():
        codes = "paths through a trellis" if preset.trellis else "codes"
        recipe = ";".join(f"{side}={kvpack_codec(side, *preset)}" for side in "kv")
        result[name] = Preset(recipe, f"kvpack: {preset.bits}-bit {codes}, with key means and channel scales", raw=KVPACK_RAW_CLAUSE)
    result["lossless"] = Preset("kv=lossless", "bf16 or fp16 bit for bit, with entropy-coded exponents", raw="")
    result["fp8"] = Preset("kv=minifloat:element=e4m3", "fp8 as in serving engines: e4m3, one scale per tensor")
    result["mxfp8"] = Preset("kv=minifloat:element=e4m3,scales=e8m0", "OCP MX: e4m3 in blocks of 32 channels")
    result["mxfp4"] = Preset("kv=minifloat:element=e2m1,scales=e8m0", "OCP MX: e2m1 in blocks of 32 channels")
    result["nvfp4"] = Preset("kv=minifloat:element=e2m1,scales=e4m3", "NVIDIA: e2m1 in blocks of 16 channels")
    return result


def _rotation_presets() -> dict[str, Preset]:
    result = {}
    for b in (2, 3, 4):
        result[f"octopus-{b}"] = Preset(
            f"k={_add_mean_and_norm_options(f'octahedral:b={b}', b)};v=group:b={b},g=32", "OCTOPUS keys, group-quantized values"
        )
    for b in (2, 3, 4):
        result[f"turboquant-{b}"] = Preset(
            f"k={_add_mean_and_norm_options(f'scalar:b={b}', b)};v=group:b={b},g=32", "TurboQuant keys, group-quantized values"
        )
    for b in (2, 3, 4):
        recipe = f"k={_add_mean_and_norm_options(f'octahedral:b={b},qjl=fp16', b)};v=group:b={b},g=32"
        result[f"octopus-qjl-{b}"] = Preset(recipe, "OCTOPUS-QJL keys, group-quantized values")
    for b in (2, 3, 4):
        recipe = f"k={_add_mean_and_norm_options(f'scalar:b={b - 1},qjl=fp16', b - 1)};v=group:b={b},g=32"
        result[f"turboquant-qjl-{b}"] = Preset(recipe, "TurboQuant-QJL keys (1 bit for QJL), group-quantized values")
    words = "scalar:b=2,high=3"
    result["turboquant-2.5"] = Preset(f"k={_add_mean_and_norm_options(words, 3)};v={words}{_norm_option('v', 3)}", "TurboQuant+")
    for b in (3, 4):
        words = f"b={b},g=4,axis=channel,rotation=signed-hadamard,centre=zero"
        result[f"turboquant-sym{b}-g4"] = Preset(f"kv=group:{words}", "TurboAngle's baseline: symmetric groups of 4 channels")
    for b in (2, 3, 4):
        result[f"polarquant-{b}"] = Preset(f"k=polar:b={b},{_MEANS};v=group:b={b},g=32", "PolarQuant keys, group-quantized values")
    return result


def _group_presets() -> dict[str, Preset]:
    result, rotated = {}, "rotation=hadamard"
    for name, g, window in (("oscar-2", 32, ""), ("oscar-2-g128", 128, ";tail=128")):
        words = f"b=2,g={g},{rotated}"
        source = "OScaR" if g == 32 else f"OScaR with groups of {g} and its residual window"
        result[name] = Preset(f"k=group:{words},token_scale=fp16;v=group:{words}{window}", source)
    words = f"b=2,g=32,{rotated},scales=u8"
    result["oscar-2-u8"] = Preset(f"k=group:{words},token_scale=fp16;v=group:{words}", "OScaR with 8-bit scales")
    for b in (2, 4):
        result[f"kivi-{b}"] = Preset(f"kv=group:b={b},g=32", "KIVI")
    result["kivi-2-u8"] = Preset("kv=group:b=2,g=32,scales=u8", "KIVI with 8-bit scales")
    for b in (2, 4):
        result[f"kivi-{b}-g128"] = Preset(f"kv=group:b={b},g=128;tail=128", "KIVI with groups of 128 and OScaR's residual window")
    for b in (2, 4):
        result[f"quarot-{b}"] = Preset(f"kv=group:b={b},g=128,axis=channel,{rotated}", "QuaRot with groups of 128 channels")
    words = "b=2,g=32,axis=channel,channel_order=u8,block_rotation=32"
    result["rotatekv-2"] = Preset(f"k=group:{words};v=group:b=2,g=32,{rotated}", "RotateKV after RoPE, with blocks of one group's channels")
    result["ott-2"] = Preset("kv=group:b=2,g=32,low_norm_tokens=5;tail=128", "OTT: KIVI with the 5 tokens of smallest norm kept raw")
    for b in (2, 3, 4):
        result[f"int-{b}"] = Preset(f"kv=group:b={b},g=128,axis=channel", "HQMQ's integer baseline, with groups of 128 channels")
    for b in (2, 3, 4):
        result[f"int-{b}-med3"] = Preset(f"kv=group:b={b},g=128,axis=channel,outliers=3", "HQMQ's integer baseline with Med3x")
    return result


def _direction_presets() -> dict[str, Preset]:
    result = {}
    result["turboangle-k8v4"] = Preset(";".join(_turboangle_clauses(128, 64)), "TurboAngle K8V4-log")
    result["turboangle-norm8"] = Preset("k=angle:n=128,norm=linear8;v=angle:n=64,norm=linear8", "TurboAngle with norm8")
    for model, (layers, dim, boosted, k_bins, v_bins) in _MIXED_KV.items():
        recipe = _mixed_kv_recipe(boosted, k_bins, v_bins)
        result[f"mixedkv-{model}"] = Preset(recipe, "TurboAngle MixedKV with early boost and K8V4-log", layers, dim)
    for s in (24, 48, 96, 192):
        for r in (3, 4, 6):
            result[f"hqmq-s{s}-r{r}"] = Preset(_hqmq_codecs(f"s={s},r={r}"), "HQMQ")
    for s in (24, 48, 96, 192):
        for r in (4, 6):
            result[f"hqmq-s{s}-r{r}-med3"] = Preset(_hqmq_codecs(f"s={s},r={r},outliers=3"), "HQMQ + Med3x")
    return result


def _hqmq_codecs(options: str) -> str:
    """Return the clauses of an HQMQ preset with separate key means. HQMQ's norms cannot have 8 bits."""
    return f"k=quaternion:{options},mean=128;v=quaternion:{options}"


def _all_presets() -> dict[str, Preset]:
    result = _basic_presets() | _rotation_presets() | _group_presets() | _direction_presets()
    for name in ("octopus-2", "octopus-3", "octopus-4", "turboquant-2", "turboquant-3", "turboquant-4", "oscar-2", "oscar-2-u8"):
        keys, values = result[name].codecs.split(";")
        result[f"{name}-scaled"] = Preset(f"{keys},channel_scale=fp16;{values}", f"{result[name].source}, for keys with outlier channels")
    return result


PUBLISHED: dict[str, Preset] = _all_presets()

ADDITIONS: dict[str, Preset] = {
    "boundary-1": Preset(
        "layers=0,-1:k=raw", "OCTOPUS Sec. 4.2: the raw keys in the first and the last layer; no gain on a real model", raw=""
    ),
}
