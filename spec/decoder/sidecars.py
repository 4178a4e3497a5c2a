"""Sidecars: parameters, streams and special values (spec/side-cars.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .codec import FLOAT_DTYPES, RAW_DTYPES, Codec, NumberStream, Sidecar
from .packing import Columns, within_limits
from .refusal import refuse, require
from .rotation import hadamard_factors

SIDECARS = "side-cars.md"
SIDECAR_KEYS = (
    "balanced",
    "channel_scale",
    "channel_order",
    "block_rotation",
    "key_mean",
    "outliers",
    "qjl",
    "raw_tokens",
    "raw_positions",
)
POSITION_WORDS = 4


def take_choice(value: Any, allowed: Mapping[str, str], name: str) -> str:
    require(value in list(allowed), SIDECARS, f"{name} is {value!r}, expected one of {list(allowed)}")
    return allowed[value]


def take_flags(value: Mapping[str, Any], symbols: int, name: str) -> Columns:
    fields = value["fields"]
    require(isinstance(fields, int), SIDECARS, f"{name}: fields is {fields!r}, expected an integer")
    require(
        within_limits((2,), fields),
        "packing.md, Bit packing",
        f"{name} has {fields} fields per column, which exceeds the limits for one-bit digits",
    )
    return Columns(symbols, (2,), fields, (2,))


def take_sidecars(entry: Mapping[str, Any], codec: Codec) -> dict[str, Sidecar]:
    """Return the sidecars in the map of a codec, with each parameter checked against its range."""
    names = [name for name in SIDECAR_KEYS if name in entry]
    require(
        list(entry)[len(entry) - len(names) :] == names,
        SIDECARS,
        f"the map of codec {codec.id} has the keys {list(entry)}, expected the sidecars last and in the order of the table",
    )
    require(not names or codec.id != "raw", SIDECARS, f"codec raw has the sidecars {names}, but supports none")
    require(
        not names or codec.id != "lossless",
        "codecs/lossless.md, Parameters and ranges",
        f"codec lossless has the sidecars {names}, but supports none",
    )
    for codec_id in ("klt", "transform"):
        is_supported = codec.id != codec_id or names in ([], ["raw_positions"])
        require(
            is_supported,
            f"codecs/{codec_id}.md, Parameters and ranges",
            f"codec {codec_id} has the sidecars {names}, but supports only raw_positions",
        )
    return {name: take_sidecar(name, entry[name], codec) for name in names}


def take_sidecar(name: str, value: Any, codec: Codec) -> Sidecar:
    dim = codec.dim
    if name == "balanced":
        is_valid = isinstance(value, dict) and list(value) == ["basis", "layer", "frame"]
        require(
            is_valid and isinstance(value["basis"], bytes) and len(value["basis"]) == 32,
            SIDECARS,
            f"balanced is {value!r}, expected a map of basis (32 bytes), layer and frame",
        )
        is_valid = isinstance(value["layer"], int) and value["layer"] in range(4096) and value["frame"] in ("balanced", "centered")
        require(is_valid, SIDECARS, f"balanced is {value!r}, expected a layer below 4096, and the frame balanced or centered")
        return Sidecar({}, [], basis=(value["basis"], value["layer"], value["frame"]))
    if name == "channel_scale":
        return Sidecar({}, [NumberStream(name, take_choice(value, FLOAT_DTYPES, name), (dim,), per="run")])
    if name == "channel_order":
        dtype = take_choice(value, {"u8": "U8", "u16": "U16"}, name)
        require(dtype == "U16" or dim <= 256, SIDECARS, f"channel_order has dtype u8, but 8 bits cannot number {dim} channels")
        return Sidecar({}, [NumberStream(name, dtype, (dim,), per="run")])
    if name == "block_rotation":
        require(
            isinstance(value, int) and value >= 2 and dim % value == 0,
            SIDECARS,
            f"block_rotation is {value!r}, expected a divisor of the head dim {dim} of at least 2",
        )
        require(
            hadamard_factors(value) is not None,
            "packing.md, Rotation",
            f"block_rotation is {value}, but there is no Hadamard matrix of that order",
        )
        return Sidecar({}, [], block=value)
    if name == "raw_tokens":
        dtype = take_choice(value, RAW_DTYPES, name)
        flags = NumberStream("raw_token_flags", "U8", (), per_head=False)
        return Sidecar({}, [flags, NumberStream(name, dtype, (), any_bits=True, per="entry")])
    if name == "raw_positions":
        values = NumberStream("raw_values", take_choice(value, RAW_DTYPES, name), (), any_bits=True, per="entry")
        return Sidecar({}, [NumberStream(name, "U16", (POSITION_WORDS,), per="entry"), values])
    keys = {"key_mean": ["tokens", "bits"], "outliers": ["fields"], "qjl": ["seed", "norm", "fields"]}[name]
    if not isinstance(value, dict) or list(value) != keys:
        refuse(SIDECARS, f"{name} is {value!r}, expected a map with the keys {keys}")
    if name == "key_mean":
        tokens, bits = value["tokens"], value["bits"]
        require(
            tokens in [2**power for power in range(3, 11)],
            SIDECARS,
            f"key_mean: tokens is {tokens!r}, expected a power of two from 8 to 1024",
        )
        require(bits in (4, 8), SIDECARS, f"key_mean: bits is {bits!r}, expected 4 or 8")
        require(bits == 8 or dim % 2 == 0, SIDECARS, f"key_mean: bits is 4, which requires an even head dim, but the head dim is {dim}")
        require(
            codec.token_group == 1,
            SIDECARS,
            f"codec {codec.id} encodes {codec.token_group} tokens together, but key_mean requires a token group of 1",
        )
        means = NumberStream(name, "U8", (dim * bits // 8,), tokens)
        return Sidecar({}, [means, NumberStream("key_mean_scale", "F16", (), tokens)], bits=bits)
    if name == "outliers":
        require(dim % 4 == 0, SIDECARS, f"outliers requires a head dim that is a multiple of 4, but the head dim is {dim}")
        codes = {"outlier_flags": take_flags(value, dim // 4, name)}
        return Sidecar(codes, [NumberStream(name, "F16", (4,), per="entry")])
    require(isinstance(value["seed"], int), SIDECARS, f"qjl: seed is {value['seed']!r}, expected an integer")
    norm = take_choice(value["norm"], FLOAT_DTYPES, "the norm of qjl")
    require(
        hadamard_factors(dim) is not None,
        "packing.md, Rotation",
        f"qjl requires a Hadamard matrix of the head dim, and there is none for {dim}",
    )
    return Sidecar({"qjl_signs": take_flags(value, dim, name)}, [NumberStream("qjl_norm", norm, ())], value["seed"])


def check_special_values(name: str, stream: NumberStream, values: Sequence[float]) -> None:
    """Check the rules in the section "Special values" of each codec's and sidecar's page."""
    finite = stream.any_bits or all(map(math.isfinite, values))
    require(finite, "README.md, Conformance", f"{name} contains a number that is not finite")
    if stream.name == "channel_scale":
        require(all(value > 0 for value in values), f"{SIDECARS}, Special values", f"{name} contains a scale that is not above 0")
    if stream.name == "channel_order":
        dim = stream.sizes[0]
        for row in range(0, len(values), dim):
            once = sorted(values[row : row + dim]) == list(range(dim))
            require(once, f"{SIDECARS}, Special values", f"row {row // dim} of {name} does not list every channel exactly once")
    if stream.name == "raw_token_flags":
        require(all(value < 2 for value in values), f"{SIDECARS}, Special values", f"{name} contains a flag that is neither 0 nor 1")
