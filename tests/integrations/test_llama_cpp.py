"""Tests of llama.cpp's sequence states: which are read, written back byte for byte, or refused by name.

The files in ``llama_cpp/`` were written by llama.cpp itself (commit 0c1e57098) for tiny models, with ``llama_cpp_round_trip.py
--fixtures``. tests/support/engines/llama_cpp_round_trip.py compares with llama.cpp itself.
"""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvpack
from kvpack.cli import main
from kvpack.formats.errors import InvalidParameter, KvpackError, MissingFile, ValueTooLarge
from kvpack.integrations.llama_cpp import CONFIG, export_slot, import_slot, is_state_file
from kvpack.integrations.mlx_lm import export_prompt_cache
from support.llama_state import Caches, of_server, state

FILES = Path(__file__).parent / "llama_cpp"
IDS = [1, 40, 90, 7, 200]
WINDOWS = {0: 4, 2: 4}
LAYERS = [
    tuple(torch.randn(7, 16, generator=torch.Generator().manual_seed(2 * number + side)).half() for side in (0, 1)) for number in range(2)
]
SEVEN = [1, 5, 6, 7, 8, 9, 300]


def ids_of(cache: kvpack.Cache) -> list[int]:
    return [] if cache.inputs is None else np.frombuffer(cache.inputs.token_ids, "<u4").tolist()


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def whole(positions: Any = range(7), **options: Any) -> Caches:
    return Caches(LAYERS, list(positions), **options)


@pytest.mark.parametrize(
    ("name", "windows", "dtypes", "ids"),
    [
        ("rows", None, ("fp16", "fp16"), IDS),
        ("transposed", None, ("bf16", "fp32"), IDS),
        ("streams", None, ("fp16", "fp16"), IDS),
        ("server", None, ("fp16", "fp16"), IDS),
        ("windows", WINDOWS, ("fp16", "fp16"), [*IDS, *IDS[1:]]),
    ],
)
def test_llama_cpps_own_files_are_read_and_written(name: str, windows: Any, dtypes: Any, ids: list[int], tmp_path: Path) -> None:
    own = FILES / f"{name}.bin"
    cache = import_slot(own, kv_heads=1, windows=windows)
    assert len(cache) == 3
    assert ids_of(cache) == ids
    assert cache.model == {"dtype": " and ".join(dict.fromkeys(dtypes)) + " of llama.cpp", "config": CONFIG}
    for number, layer in enumerate(cache):
        assert layer.k is not None
        assert layer.v is not None
        assert (layer.k.codec.exact_dtype, layer.v.codec.exact_dtype) == dtypes
        assert (layer.k.heads, layer.k.dim, layer.seen_tokens) == (1, 8, len(ids))
        assert layer.skipped == (len(ids) - 4 if number in (windows or {}) else 0)
    kvpack.save(cache, tmp_path / "x.kvpack")
    size = export_slot(kvpack.load(tmp_path / "x.kvpack"), tmp_path / "out.bin", windows=windows)
    assert size == own.stat().st_size
    assert (tmp_path / "out.bin").read_bytes() == own.read_bytes()


def test_latents_are_stored_as_keys(tmp_path: Path) -> None:
    own = FILES / "latents.bin"
    cache = import_slot(own, kv_heads=1, latents=True)
    assert [(sorted(layer.sides), layer.k.dim if layer.k else 0) for layer in cache] == [(["k"], 12)] * 3
    assert cache.model["dtype"] == "bf16 of llama.cpp"
    export_slot(cache, tmp_path / "out.bin")
    assert (tmp_path / "out.bin").read_bytes() == own.read_bytes()
    with pytest.raises(InvalidParameter, match="ends after its keys"):
        import_slot(own, kv_heads=1)


def test_layouts_contain_the_same_keys_and_values() -> None:
    """The files are from the same model and tokens. Those without flash attention store values transposed.

    Layer 0 depends on neither.
    """
    rows, streams = (import_slot(FILES / f"{name}.bin", kv_heads=1)[0].unpack(torch.float32) for name in ("rows", "streams"))
    assert all(map(torch.equal, rows, streams))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("m-rope", r"cell 2 of its full-attention layers belongs to .* sequences.*M-RoPE"),
        ("recurrent", r"cell 0 of its full-attention layers belongs to 0 sequences.*recurrent model"),
        ("windows", r"bytes follow its 1 layers, perhaps of sliding-window layers \(name them with windows="),
    ],
)
def test_contents_that_kvpack_cannot_store_are_named(name: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        import_slot(FILES / f"{name}.bin", kv_heads=1)


@pytest.mark.parametrize("transposed", [False, True])
def test_cells_are_split_into_heads(transposed: bool, tmp_path: Path) -> None:
    path = written(tmp_path / "in.bin", state(SEVEN, whole(transposed=transposed)))
    for heads in (4, [4, 2]):
        cache = import_slot(path, kv_heads=heads)
        for layer, sides, count in zip(cache, LAYERS, (4, 4 if heads == 4 else 2), strict=True):
            for found, values in zip(layer.unpack(torch.float16), sides, strict=True):
                assert found is not None
                assert torch.equal(found, values.view(1, 7, count, -1).transpose(1, 2))
    for other in (True, False):
        export_slot(import_slot(path, kv_heads=8), tmp_path / "out.bin", transposed=other)
        assert (tmp_path / "out.bin").read_bytes() == state(SEVEN, whole(transposed=other))


def test_cells_in_any_order_are_sorted(tmp_path: Path) -> None:
    order = [3, 0, 6, 5, 1, 2, 4]
    moved = Caches([(k[order], v[order]) for k, v in LAYERS], order, transposed=True)
    export_slot(import_slot(written(tmp_path / "in.bin", state(SEVEN, moved)), kv_heads=2), tmp_path / "out.bin")
    assert (tmp_path / "out.bin").read_bytes() == state(SEVEN, whole(transposed=True))


def test_a_stream_and_a_sequence_are_kept_or_merged(tmp_path: Path) -> None:
    path = written(tmp_path / "in.bin", state(SEVEN, whole(streams=4, sequence=2, stream=2)))
    cache = import_slot(path, kv_heads=2)
    export_slot(cache, tmp_path / "out.bin")
    assert (tmp_path / "out.bin").read_bytes() == path.read_bytes()
    export_slot(cache, tmp_path / "out.bin", streams=1)
    assert (tmp_path / "out.bin").read_bytes() == state(SEVEN, whole(sequence=2))
    with pytest.raises(InvalidParameter, match="sequence 2 is out of range for 2 streams: pass more streams, or 1"):
        export_slot(cache, tmp_path / "out.bin", streams=2)


def test_token_ids_may_be_unknown(tmp_path: Path) -> None:
    path = written(tmp_path / "in.bin", state([], whole()))
    cache = import_slot(path, kv_heads=2)
    assert cache.inputs is None
    export_slot(cache, tmp_path / "out.bin")
    assert (tmp_path / "out.bin").read_bytes() == path.read_bytes()


LARGEST = 500.0
"""A scale for which 8-bit codes decode to values that fp16 can represent."""
SIZES = {"q4_0": (2, 18), "q5_0": (6, 22), "q8_0": (8, 34)}
"""For each quantized type: ggml's number, and the size in bytes of a block of 32 channels."""


def blocks(kind: str, seed: int, cells: int = 7, count: int = 4) -> torch.Tensor:
    """Return random blocks, uint8 ``[cell, byte]``. Their binary16 scales have either sign, and include zero and the smallest number."""
    source = np.random.default_rng(seed)
    data = source.integers(0, 256, (cells, count, SIZES[kind][1]), np.uint8)
    scales = source.standard_normal((cells, count)) * 2.0 ** source.integers(-24, 6, (cells, count))
    scales[0, :4] = 0.0, -0.0, 2.0**-24, -LARGEST
    data[..., :2] = scales.astype("<f2")[..., None].view(np.uint8)
    return torch.from_numpy(data.reshape(cells, -1))


def dequantized(kind: str, data: torch.Tensor) -> np.ndarray:
    """Decode blocks value by value, as ggml's C code does. Returns float32 ``[cell, channel]``."""
    size = SIZES[kind][1]
    found = np.zeros((data.shape[0], data.shape[1] // size * 32), np.float32)
    for cell, row in enumerate(data.numpy()):
        for number in range(len(row) // size):
            block = row[number * size : (number + 1) * size].tobytes()
            d = np.frombuffer(block[:2], "<f2")[0].astype(np.float32)
            y = found[cell, number * 32 : number * 32 + 32]
            for j in range(32 if kind == "q8_0" else 16):
                if kind == "q8_0":
                    y[j] = np.int8(block[2 + j] - 256 * (block[2 + j] > 127)) * d
                    continue
                low, high, less = block[-16 + j] & 0xF, block[-16 + j] >> 4, 8
                if kind == "q5_0":
                    bits = int.from_bytes(block[2:6], "little")
                    low, high, less = low | (bits >> j & 1) << 4, high | (bits >> j + 12 & 0x10), 16
                y[j], y[j + 16] = np.float32(low - less) * d, np.float32(high - less) * d
    return found


def quantized(keys: str, values: str, order: list[int] | None = None) -> tuple[Caches, dict[tuple[int, int], torch.Tensor]]:
    """Return a state with two layers whose keys and values have two types, and its contents by layer and side."""
    contents, kinds = {}, {}
    for number in range(2):
        for side, kind in enumerate((keys, values)):
            seed = 2 * number + side
            if kind == "fp16":
                contents[number, side] = torch.randn(7, 128, generator=torch.Generator().manual_seed(seed)).half()
            else:
                contents[number, side], kinds[number, side] = blocks(kind, seed), SIZES[kind][0]
    cells = order or list(range(7))
    layers = [(contents[number, 0][cells], contents[number, 1][cells]) for number in range(2)]
    return Caches(layers, cells, kinds=kinds), contents


@pytest.mark.parametrize(
    ("keys", "values", "transposed"),
    [("q8_0", "q8_0", False), ("q4_0", "q4_0", False), ("q5_0", "q5_0", False), ("q8_0", "fp16", True), ("fp16", "q4_0", False)],
)
def test_blocks_are_converted_both_ways_bit_for_bit(keys: str, values: str, transposed: bool, tmp_path: Path) -> None:
    caches, contents = quantized(keys, values)
    caches.transposed = transposed
    path = written(tmp_path / "in.bin", state(SEVEN, caches))
    cache = import_slot(path, kv_heads=2)
    assert cache.model == {"dtype": f"{keys} keys beside values of {values} of llama.cpp", "config": CONFIG}
    kvpack.save(cache, tmp_path / "x.kvpack")
    cache = kvpack.load(tmp_path / "x.kvpack")
    for number, layer in enumerate(cache):
        for side, (kind, found) in enumerate(zip((keys, values), layer.unpack(torch.float32), strict=True)):
            assert found is not None
            given = contents[number, side]
            expected = given.float().numpy() if kind == "fp16" else dequantized(kind, given)
            # Of zeros, ggml's may be negative ones.
            assert np.array_equal(found[0].transpose(0, 1).reshape(7, 128).numpy(), expected)
    export_slot(cache, tmp_path / "out.bin")
    assert (tmp_path / "out.bin").read_bytes() == path.read_bytes()


def test_llama_cpps_own_blocks_are_converted_both_ways(tmp_path: Path) -> None:
    own = FILES / "quantized.bin"
    cache = import_slot(own, kv_heads=1)
    assert cache.recipe == kvpack.Recipe("kv=group:b=8,g=32,axis=channel,token_scale=fp16").text
    export_slot(cache, tmp_path / "out.bin")
    assert (tmp_path / "out.bin").read_bytes() == own.read_bytes()


def test_blocks_of_a_prefix_and_of_unordered_cells_are_converted(tmp_path: Path) -> None:
    order = [3, 0, 6, 5, 1, 2, 4]
    caches, contents = quantized("q8_0", "q4_0", order)
    cache = import_slot(written(tmp_path / "in.bin", state(SEVEN, caches)), kv_heads=2)
    export_slot(cache, tmp_path / "out.bin")
    assert (tmp_path / "out.bin").read_bytes() == state(SEVEN, quantized("q8_0", "q4_0")[0])
    export_slot(cache[:, :4], tmp_path / "out.bin")
    layers = [(contents[number, 0][:4], contents[number, 1][:4]) for number in range(2)]
    assert (tmp_path / "out.bin").read_bytes() == state(SEVEN[:4], Caches(layers, list(range(4)), kinds=caches.kinds))


@pytest.mark.filterwarnings("ignore:.*which share its token scale")
def test_blocks_are_never_reencoded(tmp_path: Path) -> None:
    """llama.cpp may have rotated the quantized values, so they would silently be wrong in another cache type."""
    path = written(tmp_path / "in.bin", state(SEVEN, quantized("q8_0", "fp16")[0]))
    with pytest.raises(InvalidParameter, match=r"are quantized \(q8_0 and fp16\), which kvpack stores unchanged: use the 'raw' recipe"):
        import_slot(path, "octopus-4", kv_heads=2)
    cache = import_slot(path, kv_heads=2)
    with pytest.raises(InvalidParameter, match=r"dtype is 'fp16', but the cache holds quantized llama.cpp blocks"):
        export_slot(cache, tmp_path / "out.bin", dtype="fp16")
    for recipe in ("fp32", "kv=group:b=8,g=32,axis=channel", "kv=group:b=8,g=32,axis=channel,token_scale=fp16"):
        changed = cache.convert(recipe)
        if recipe.endswith("fp16") and "group" in recipe:
            # The same codec, with scales of its own.
            changed = kvpack.pack([layer.unpack(torch.float32) for layer in cache], recipe, model=cache.model, inputs=cache.inputs)
            changed = replace(changed, metadata=cache.metadata)
        with pytest.raises(InvalidParameter, match=r"layer 0 was q8_0 in llama\.cpp and has been converted to the codec"):
            export_slot(changed, tmp_path / "out.bin")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scale": 0x7C00}, InvalidParameter, "layer 1: a scale of q8_0 is NaN or infinite"),
        ({"scale": 0xFE01}, InvalidParameter, "layer 1: a scale of q8_0 is NaN or infinite"),
        ({"scale": 0x77FF}, None, ""),
        ({"scale": 0xF7FF}, None, ""),
        ({"scale": 0x7800}, ValueTooLarge, "layer 1: a scale of q8_0 is 32768, but kvpack supports at most 32752"),
        ({"heads": 8}, InvalidParameter, "layer 0: with 8 heads, each head has 16 channels, which is not a multiple of"),
        ({"transposed": True}, InvalidParameter, "layer 0 have 1 bytes per value, expected values that are not quantized"),
        ({"kind": 2}, InvalidParameter, "layers have different cache types, expected q8_0 and q8_0 in all layers"),
    ],
)
def test_blocks_that_kvpack_cannot_store_are_refused(change: dict[str, int], error: Any, message: str, tmp_path: Path) -> None:
    caches, _ = quantized("q8_0", "q8_0")
    caches.transposed = bool(change.get("transposed"))
    if "scale" in change:
        caches.layers[1][1][3, 34:36] = torch.tensor([change["scale"] & 255, change["scale"] >> 8], dtype=torch.uint8)
    if "kind" in change:
        caches.layers[1] = (blocks("q4_0", 9), caches.layers[1][1])
        caches.kinds[1, 0] = change["kind"]
    path = written(tmp_path / "in.bin", state(SEVEN, caches))
    if error is None:
        export_slot(import_slot(path, kv_heads=2), tmp_path / "out.bin")
        assert (tmp_path / "out.bin").read_bytes() == path.read_bytes()
        return
    with pytest.raises(error, match=message):
        import_slot(path, kv_heads=change.get("heads", 2))


def windowed(tokens: int = 4, first: int = 3, **options: Any) -> Caches:
    return Caches([(k[:tokens], v[:tokens]) for k, v in LAYERS[:1]], list(range(first, first + tokens)), **options)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (b"ggsq", {}, "is not a sequence state of llama.cpp: it has only 4 bytes"),
        (state([], magic=0x12345678), {}, r"begins with 0x12345678, but a sequence state of llama.cpp begins with 0x67677371 \('ggsq'\)"),
        (state([], magic=0x6767736E), {}, r"is the state of a whole context \('ggsn'\).*save it with llama_state_seq_save_file"),
        (state([], magic=0x67676C61), {}, r"is an adapter \('ggla'\)"),
        (state(SEVEN, whole(), version=2), {}, "is a sequence state of version 2, but kvpack reads only version 3"),
        (state(SEVEN, whole(), version=4), {}, "is a sequence state of version 4, but kvpack reads only version 3"),
        (state(SEVEN), {}, "is truncated: the streams of its full-attention layers take 4 bytes at offset 40, but only 0 remain"),
        (struct.pack("<III", 0x67677371, 3, 2**32 - 1), {}, "its 4294967295 token ids take 17179869180 bytes at offset 12, but only"),
        (state(SEVEN, whole())[:-1], {}, "is truncated: the values of full-attention layer 1 take 224 bytes"),
        (state(SEVEN, whole()) + b"x", {}, "1 bytes follow its 2 layers, perhaps of sliding-window layers"),
        (state(SEVEN, whole(), windowed()) + b"x", {"windows": {0: 4}}, "1 bytes follow its 3 layers, perhaps of recurrent states"),
        (state(SEVEN, whole(streams=0)), {}, "its full-attention layers have 0 streams, expected 1 to 256"),
        (state(SEVEN, whole(streams=257)), {}, "have 257 streams, expected 1 to 256"),
        (state(SEVEN, whole(streams=3, stream=7)), {}, "its full-attention layers contain no tokens"),
        (
            state(SEVEN, whole(sequences_of_a_cell=2)), {},
            r"cell 0 of its full-attention layers belongs to 2 sequences \(the first is 0\), but",
        ),
        (state(SEVEN, whole(sequence=-1)), {}, r"cell 0 of its full-attention layers belongs to 1 sequences \(the first is -1\)"),
        (
            state(SEVEN, whole(sequence=256)), {},
            r"\(the first is 256\), but .* same single sequence \(256 in this file\), numbered below 256:",
        ),
        (state(SEVEN, whole([0, 1, 2, 4, 5, 6, 7])), {}, "positions from 0 to 7, with 4 in place of 3"),
        (state(SEVEN, whole([0, 1, 2, 2, 3, 4, 5])), {}, "positions from 0 to 5, with 2 in place of 3"),
        (state(SEVEN, whole(range(1, 8))), {}, "positions from 1 to 7, with 1 in place of 0"),
        (state(SEVEN, whole([-(2**31), *range(1, 7)])), {}, "positions from -2147483648 to 6"),
        (state(SEVEN[:-1], whole()), {}, "has 6 token ids for 7 cells, expected one per cell, or none"),
        (state([*SEVEN[:-1], -7], whole()), {}, "token 6 has id -7, but token ids must be at least 0"),
        (state(of_server(SEVEN[:-1]), whole()), {}, "has 6 token ids for 7 cells"),
        (
            state([-1, 2, *of_server(SEVEN)[2:]], whole()),
            {},
            "its 11 words of token ids begin like llama-server's, but are not in version 1",
        ),
        (state([-1, 1, 12, *SEVEN, 0], whole()), {}, "its 11 words of token ids begin like llama-server's"),
        (state([*of_server(SEVEN), 0], whole()), {}, "its 12 words of token ids begin like llama-server's"),
        (state([-1], whole()), {}, "its 1 words of token ids begin like llama-server's"),
        (state(of_server(SEVEN, 3), whole()), {}, "its tokens include 1 media, such as images"),
        (state(SEVEN, Caches([], list(range(7)))), {}, "has 0 layers, expected 1 to 4096"),
        (state(SEVEN, whole(kinds={1: 30, 0: 99})), {}, "layer 0 have ggml type 99, which is not supported"),
        (state(SEVEN, whole(kinds={1: 3})), {}, "layer 1 are in q4_1, which no codec represents: save a slot"),
        (state(SEVEN, whole(kinds={1: 8})), {}, "layer 1 have 32 bytes per cell, expected a positive multiple of 34 for q8_0"),
        (state(SEVEN, Caches([(k[:, :0], v) for k, v in LAYERS], list(range(7)))), {}, "0 have 0 bytes per cell, expected a positive"),
        (
            state(SEVEN, Caches([(k, v[:, :0]) for k, v in LAYERS], list(range(7)), True)),
            {},
            "the values of full-attention layer 0 have no channels",
        ),
        (state(SEVEN, whole(transposed=True, kinds={0: 0, 1: 0})), {}, "layer 0 have 2 bytes per value, expected 4 for fp32"),
        (state(SEVEN, whole(transposed=2)), {}, "has 2 full-attention layers and a transposed flag of 2, expected at most 4096 layers"),
        (state(SEVEN, whole()), {"kv_heads": 3}, "layer 0: 16 channels are not divisible by 3 heads"),
        (state(SEVEN, whole()), {"kv_heads": 0}, "kv_heads is 0, expected a positive integer, or one for each of 2 layers"),
        (state(SEVEN, whole()), {"kv_heads": [2]}, r"kv_heads is \[2\], expected a positive integer, or one for each of 2 layers"),
        (state(SEVEN, whole()), {"windows": {1: 4}}, "is truncated: the streams of its sliding-window layers take 4 bytes"),
        (state(SEVEN, whole(), windowed()), {"windows": {3: 4}}, r"windows\[3\] is 4, expected a layer number from 0 to 2"),
        (
            state(SEVEN, whole(), windowed()),
            {"windows": {0: 4, 1: 4}},
            "is 1, but windows has 2: pass one window per sliding-window layer",
        ),
        (state(SEVEN, whole(), windowed()), {"windows": {0: 8}}, "hold 4 of 7 tokens, but layer 0 has a window of 8"),
        (state(SEVEN, whole(), windowed()), {"windows": {0: 3}}, "hold 4 of 7 tokens, but layer 0 has a window of 3"),
        (state(SEVEN, whole(), windowed(4, 2)), {"windows": {0: 4}}, "positions from 2 to 5, with 2 in place of 3"),
        (state(SEVEN, whole(), windowed(sequence=1)), {"windows": {0: 4}}, "differ in streams, sequence or layout"),
    ],
)
def test_files_of_other_formats_are_refused(data: bytes, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=message):
        import_slot(written(tmp_path / "in.bin", data), **{"kv_heads": 2, **options})


def test_two_sequences_and_keys_without_values_are_refused(tmp_path: Path) -> None:
    data = whole(streams=2).pieces()
    twice = state(SEVEN) + data[:-4] + data[4:-4]
    with pytest.raises(InvalidParameter, match="two of its streams hold cells, but kvpack reads one sequence"):
        import_slot(written(tmp_path / "in.bin", twice), kv_heads=2)
    alone = state(SEVEN, whole())[: -2 * (12 + 7 * 32)]
    with pytest.raises(InvalidParameter, match=r"ends after its keys: it is truncated, or from a model with .*latents=True, or --latents"):
        import_slot(written(tmp_path / "in.bin", alone), kv_heads=2)
    with pytest.raises(InvalidParameter, match="472 bytes follow its 2 layers, perhaps of"):
        import_slot(written(tmp_path / "in.bin", state(SEVEN, whole())), kv_heads=2, latents=True)
    with pytest.raises(MissingFile):
        import_slot(tmp_path / "none.bin", kv_heads=2)
    with pytest.raises(InvalidParameter, match="expected a str or"):
        is_state_file(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="model is a int, expected a transformers model"):
        import_slot(FILES / "rows.bin", kv_heads=1, model=3)  # type: ignore[arg-type]


def test_a_large_size_is_refused_before_memory_is_allocated(tmp_path: Path) -> None:
    data = bytearray(state(SEVEN, whole()))
    at = data.index(struct.pack("<iQ", 1, 32))
    for size in (2**63, 2**40, 34):
        data[at + 4 : at + 12] = struct.pack("<Q", size)
        message = f"the keys of full-attention layer 0 take {7 * size} bytes at offset"
        if size == 34:
            message = "the keys of full-attention layer 1 have ggml type"
        with pytest.raises(InvalidParameter, match=message):
            import_slot(written(tmp_path / "in.bin", bytes(data)), kv_heads=2)


def test_no_damage_causes_a_crash(tmp_path: Path) -> None:
    """Truncated and randomly changed files are refused by name, or read as other valid files."""
    source = random.Random(0)
    path = tmp_path / "in.bin"
    for file in sorted(FILES.glob("*.bin")):
        data = file.read_bytes()
        options: dict[str, Any] = {"kv_heads": 1, "windows": WINDOWS if file.stem == "windows" else None, "latents": file.stem == "latents"}
        for end in range(0, len(data), 97):
            with pytest.raises(KvpackError):
                import_slot(written(path, data[:end]), **options)
        for _ in range(20):
            changed = bytearray(data)
            for _ in range(source.randrange(1, 4)):
                changed[source.randrange(min(len(data), source.choice((32, 120, len(data)))))] = source.choice((0, 1, 2, 127, 255, 64))
            try:
                cache = import_slot(written(path, bytes(changed)), **options)
                export_slot(cache, tmp_path / "out.bin", windows=options["windows"])
            except KvpackError:
                continue
            assert (tmp_path / "out.bin").stat().st_size == len(data)


def test_contents_that_llama_cpp_cannot_store_are_named(tmp_path: Path) -> None:
    path = tmp_path / "out.bin"
    made = import_slot(written(tmp_path / "in.bin", state(SEVEN, whole())), kv_heads=2)
    k, v = made[0].unpack(torch.float16)

    def cache(*layers: Any, **fields: Any) -> kvpack.Cache:
        packed = kvpack.pack(list(layers), fields.pop("recipe", "raw"), model={"config": CONFIG}, start=fields.pop("start", 0))
        return replace(packed, **{"metadata": made.metadata, **fields})

    def refused(found: kvpack.Cache, message: str, error: type[KvpackError] = InvalidParameter, **options: Any) -> None:
        with pytest.raises(error, match=message):
            export_slot(found, path, **options)

    refused(replace(made, model={"config": "a digest"}), "did not come from llama.cpp: its model has the config 'a digest', expected")
    refused(kvpack.pack([(k, v)], "raw"), r"did not come from llama.cpp.*pass dataclasses.replace\(cache, model=")
    refused(replace(made, metadata={}), "the cache's metadata does not have transposed: pass transposed=, expected an integer from 0 to 1")
    refused(replace(made, metadata={}), "the cache's metadata does not have streams: pass streams=", transposed=True)
    refused(made, "streams is 0, expected an integer from 1 to 256", streams=0)
    refused(made, "windows has 1 layers, expected the 0 sliding-window layers of the file", windows={0: 8})
    refused(made, r"windows\[7\] is 8, expected a layer number from 0 to 1", windows={7: 8})
    refused(made, "dtype is 'q8_0', expected one of bf16, fp16, fp32", dtype="q8_0")
    refused(cache((k, v), recipe="octopus-3"), r"layer 0: the codec octahedral decodes to float32, but llama.cpp stores .*dtype='bf16'")
    recorded = replace(cache((k, v), recipe="octopus-3"), model={"name": "m", "dtype": "fp16 of llama.cpp", "config": CONFIG})
    refused(recorded, "the cache was computed in fp16, so pass --dtype fp16 on the command line")
    refused(cache((k.float() * 1e6, v)), "layer 0: a value is too large for fp16", ValueTooLarge, dtype="fp16")
    refused(cache((k, v), start=5), "the cache begins at position 5, but a sequence of llama.cpp must begin at position 0")
    refused(cache((None, v)), "layer 0 contains no keys: for llama.cpp, kvpack writes only keys and values, or only latents")
    refused(cache((k, v), (k, None)), "layer 1 contains no values, unlike layer 0")
    refused(cache((k, None), (k, v)), "layer 1 contains values, unlike layer 0")
    refused(cache((torch.cat([k, k]), torch.cat([v, v]))), "layer 0 holds 2 sequences, but a sequence state holds one")
    refused(
        cache((k, v), (k[:, :, 2:], v[:, :, 2:], 2)), "layer 1 holds the newest 5 of 7 tokens, so it needs a sliding window: pass windows="
    )
    windows = dict(made.metadata) | {"llama.cpp sliding-window layers": 1}
    short = cache((k, v), (k[:, :, 2:], v[:, :, 2:], 2), metadata=windows)
    refused(short, "layer 1 holds the newest 5 of 7 tokens, but a window of 7 includes the previous 6", windows={1: 7})
    none = cache((k, v), (k[:, :, :0], v[:, :, :0], 7), metadata=windows)
    refused(none, "layer 1 holds the newest 0 of 7 tokens, but a window of 1 includes the previous 0", windows={1: 1})
    known = kvpack.Inputs(np.array(SEVEN[:3], "<u4").tobytes())
    refused(replace(made, inputs=known), "has the ids of only 3 of 7 tokens: for a file without ids, pass")
    refused(
        replace(made, inputs=kvpack.Inputs(b"", ("tokens 2 to 4 came from an image",))),
        "tokens 2 to 4 came from an image: a sequence state of llama.cpp holds only token ids",
    )
    refused(replace(made, inputs=kvpack.Inputs(np.full(7, 2**31, "<u4").tobytes())), r"token 0 has id 2147483648, .*below 2\^31")
    assert not path.exists()


def test_different_windows_cannot_share_cells(tmp_path: Path) -> None:
    k, v = (torch.randn(1, 2, 7, 8, generator=torch.Generator().manual_seed(side)).half() for side in (0, 1))
    layers = [(k, v), (k[:, :, 3:], v[:, :, 3:], 3), (k[:, :, 1:], v[:, :, 1:], 1)]
    cache = kvpack.pack(layers, "raw", model={"config": CONFIG})
    with pytest.raises(InvalidParameter, match="layer 2 would write 6 tokens, but earlier layers wrote 4, and all share the same cells"):
        export_slot(cache, tmp_path / "out.bin", windows={1: 4, 2: 6}, transposed=False, streams=1)
    export_slot(cache, tmp_path / "out.bin", windows={1: 4, 2: 4}, transposed=False, streams=1)
    again = import_slot(tmp_path / "out.bin", kv_heads=2, windows={1: 4, 2: 4})
    assert [layer.skipped for layer in again] == [0, 3, 3]
    for found, expected in zip(again[2].unpack(torch.float16), (k, v), strict=True):
        assert found is not None
        assert torch.equal(found, expected[:, :, 3:])


def test_a_llama_cpp_cache_is_refused_by_other_libraries(tmp_path: Path) -> None:
    cache = import_slot(FILES / "rows.bin", kv_heads=1, model={"name": "tiny", "config": "another"})
    assert cache.model == {"name": "tiny", "dtype": "fp16 of llama.cpp", "config": CONFIG}
    with pytest.raises(
        InvalidParameter, match=r"came from llama\.cpp, whose keys may have their channels in a different order than mlx-lm"
    ):
        export_prompt_cache(cache, tmp_path / "out.safetensors")
    transformers = pytest.importorskip("transformers")
    from kvpack.integrations.transformers import KvpackCache

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=260, hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=1, num_key_value_heads=1
        )
    ).eval()
    for cut in (cache, cache.convert("octopus-4")[:, :4]):
        with pytest.raises(InvalidParameter, match=r"computed by a model whose dtype is 'fp16 of llama\.cpp', but this one's is 'float32'"):
            KvpackCache.of(cut, model)


def test_commands_import_and_export_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, packed, out = str(FILES / "windows.bin"), str(tmp_path / "x.kvpack"), str(tmp_path / "out.bin")
    assert is_state_file(own)
    assert main(["import", own, packed, "--window", "0,2=4"]) == 2
    assert "--kv-heads is missing: llama.cpp slots do not record the number of KV heads" in capsys.readouterr().err
    assert main(["import", own, packed, "--kv-heads", "one"]) == 2
    assert "--kv-heads is 'one'" in capsys.readouterr().err
    assert main(["import", own, packed, "--kv-heads", "1", "--window", "0,2=4"]) == 0
    assert main(["export", packed, out]) == 2
    assert "use a name that ends in .safetensors" in capsys.readouterr().err
    assert main(["export", packed, str(tmp_path / "out.safetensors")]) == 2
    assert "the cache came from llama.cpp" in capsys.readouterr().err
    assert main(["export", packed, out, "--streams", "1"]) == 2
    assert "--transposed and --streams require --to llama.cpp" in capsys.readouterr().err
    assert main(["export", packed, out, "--to", "llama.cpp", "--window", "0,2=4"]) == 0
    assert Path(out).read_bytes() == Path(own).read_bytes()
    assert main(["import", str(FILES / "latents.bin"), packed, "--kv-heads", "1", "--latents", "--force"]) == 0
    assert main(["import", str(FILES / "rows.bin"), packed, "--kv-heads", "1,1,1", "--recipe", "octopus-4", "--force"]) == 0
    words = ["--dtype", "fp16", "--transposed", "--streams", "2", "--force"]
    assert main(["export", packed, out, "--to", "llama.cpp", *words]) == 0
    assert Path(out).stat().st_size > (FILES / "rows.bin").stat().st_size
    (tmp_path / "other").write_bytes(b"no state")
    assert main(["import", str(tmp_path / "other"), packed, "--kv-heads", "1", "--force"]) == 2
    assert "is not a sequence state of llama.cpp: omit --kv-heads, --window and --latents" in capsys.readouterr().err
