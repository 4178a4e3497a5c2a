"""Recipe texts of presets as older versions of kvpack recorded them. They never change, even if the presets do."""

from __future__ import annotations

_BITS = (2, 3, 4)
_KEYS = {
    "octopus-{b}": "octahedral:b={b}",
    "turboquant-{b}": "scalar:b={b}",
    "octopus-qjl-{b}": "octahedral:b={b},qjl=fp16",
    "turboquant-qjl-{b}": "scalar:b={less},qjl=fp16",
    "polarquant-{b}": "polar:b={b}",
    "octopus-{b}-scaled": "octahedral:b={b},channel_scale=fp16",
    "turboquant-{b}-scaled": "scalar:b={b},channel_scale=fp16",
}
"""Codecs of keys by preset, for each number of bits ``b``. Their values are in groups of 32 tokens."""
_OSCAR = "group:b=2,g=32,rotation=hadamard"
_TURBOANGLE = "k=angle:n=128,norm=linear8;v=angle:n=64,norm=log4"
_MIXED_KV = {"mistral-7b": "0-3", "smollm2-1.7b": "0-19", "phi-1.5": "0-7,16-23", "stablelm-2-1.6b": "0-23", "starcoder2-3b": "0-15"}
"""Layers of each model whose keys have 256 bins, and whose values have 128."""

RECORDED: dict[str, str] = {
    "raw": "kv=raw",
    **{dtype: f"kv=raw:dtype={dtype}" for dtype in ("bf16", "fp16", "fp32")},
    "lossless": "kv=lossless",
    "fp8": "kv=minifloat:element=e4m3",
    "mxfp8": "kv=minifloat:element=e4m3,scales=e8m0",
    "mxfp4": "kv=minifloat:element=e2m1,scales=e8m0",
    "nvfp4": "kv=minifloat:element=e2m1,scales=e4m3",
    **{name.format(b=b): f"k={codec.format(b=b, less=b - 1)};v=group:b={b},g=32" for name, codec in _KEYS.items() for b in _BITS},
    "turboquant-2.5": "kv=scalar:b=2,high=3",
    **{f"turboquant-sym{b}-g4": f"kv=group:b={b},g=4,axis=channel,rotation=signed-hadamard,centre=zero" for b in (3, 4)},
    "oscar-2": f"k={_OSCAR},token_scale=fp16;v={_OSCAR}",
    "oscar-2-g128": "k=group:b=2,g=128,rotation=hadamard,token_scale=fp16;v=group:b=2,g=128,rotation=hadamard;tail=128",
    "oscar-2-u8": f"k={_OSCAR},scales=u8,token_scale=fp16;v={_OSCAR},scales=u8",
    "oscar-2-scaled": f"k={_OSCAR},token_scale=fp16,channel_scale=fp16;v={_OSCAR}",
    "oscar-2-u8-scaled": f"k={_OSCAR},scales=u8,token_scale=fp16,channel_scale=fp16;v={_OSCAR},scales=u8",
    "kivi-2": "kv=group:b=2,g=32",
    "kivi-4": "kv=group:b=4,g=32",
    "kivi-2-u8": "kv=group:b=2,g=32,scales=u8",
    "kivi-2-g128": "kv=group:b=2,g=128;tail=128",
    "kivi-4-g128": "kv=group:b=4,g=128;tail=128",
    "quarot-2": "kv=group:b=2,g=128,axis=channel,rotation=hadamard",
    "quarot-4": "kv=group:b=4,g=128,axis=channel,rotation=hadamard",
    "rotatekv-2": "k=group:b=2,g=32,axis=channel,channel_order=u8,block_rotation=32,sinks=4;v=group:b=2,g=32,rotation=hadamard",
    "ott-2": "kv=group:b=2,g=32,low_norm_tokens=5;tail=128",
    **{f"int-{b}": f"kv=group:b={b},g=128,axis=channel" for b in _BITS},
    **{f"int-{b}-med3": f"kv=group:b={b},g=128,axis=channel,outliers=3" for b in _BITS},
    "turboangle-k8v4": _TURBOANGLE,
    "turboangle-norm8": "k=angle:n=128,norm=linear8;v=angle:n=64,norm=linear8",
    "mixedkv-tinyllama-1.1b": f"{_TURBOANGLE};layers=0-3:v=angle:n=256,norm=log4",
    "mixedkv-olmo-1b": f"{_TURBOANGLE};layers=0-3:k=angle:n=256,norm=linear8",
    **{
        f"mixedkv-{model}": f"{_TURBOANGLE};layers={layers}:k=angle:n=256,norm=linear8;layers={layers}:v=angle:n=128,norm=log4"
        for model, layers in _MIXED_KV.items()
    },
    **{f"hqmq-s{s}-r{r}": f"kv=quaternion:s={s},r={r}" for s in (24, 48, 96, 192) for r in (3, 4, 6)},
    **{f"hqmq-s{s}-r{r}-med3": f"kv=quaternion:s={s},r={r},outliers=3" for s in (24, 48, 96, 192) for r in (4, 6)},
    "boundary-1": "layers=0,-1:k=raw",
}
