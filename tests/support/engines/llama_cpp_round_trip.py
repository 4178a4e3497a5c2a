"""Exchange sequence states between llama.cpp and kvpack, both of which must be installed (``make engines``).

States that llama.cpp saved are imported, saved, exported, and compared byte for byte. llama.cpp must continue identically from the original
and from the exported state. Imported keys must equal those that NumPy computes from the model's weights. ``--server PATH`` does the same
with slots of that llama-server, and ``--fixtures FOLDER`` writes the files of ``tests/integrations/test_llama_cpp.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
from gguf import GGUFReader
from llama_cpp import llama_cpp as library
from llama_cpp_model import LAYERS, WINDOW, Context, write_model

import kvpack
from kvpack.integrations.llama_cpp import export_slot, import_slot

TOKENS = 100
IDS = [1, *np.random.default_rng(0).integers(3, 259, TOKENS - 1).tolist()]
NEXT = [17, 40, 5]
WINDOWS = {"gemma3": {0: WINDOW, 2: WINDOW}}
PAIRS = (("fp16", "fp16"), ("bf16", "bf16"), ("fp32", "fp32"), ("fp16", "fp32"))


def options_of(arch: str) -> dict[str, Any]:
    """Return the import options for a model of ``arch``."""
    return {"kv_heads": 1, "latents": True} if arch == "deepseek2" else {"kv_heads": 2, "windows": WINDOWS.get(arch)}


def filled_context(model: Path, types: tuple[str, str], flash: bool, sequence: int, sequences: int) -> Context:
    context = Context(model, types, flash=flash, sequences=sequences)
    context.decode(IDS, 0, sequence)
    return context


def logits_after_load(context: Context, path: Path, sequence: int, ids: list[int] = IDS) -> list[np.ndarray]:
    """Load the file of ``ids`` into a context, and return the logits of a few further tokens."""
    assert context.load(path, sequence) == ids
    return [context.decode([token], len(ids) + number, sequence) for number, token in enumerate(NEXT)]


def relative_difference(actual: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Return the largest error of the logits, relative to the largest logit."""
    return max(float(np.abs(one - two).max() / np.abs(two).max()) for one, two in zip(actual, expected, strict=True))


def check_bytes(folder: Path, model: Path, arch: str) -> Iterator[str]:
    """Check that raw caches survive the round trip byte for byte, and give llama.cpp the same logits.

    The round trip is also made through a kvpack file.
    """
    windows = WINDOWS.get(arch)
    # All tensors of a cache of latents have the same type.
    pairs = PAIRS[:3] if arch == "deepseek2" else PAIRS
    for types in pairs:
        for flash in (True, False):
            for sequence, sequences in ((0, 1), (2, 3)):
                own, exported = folder / "own.bin", folder / "exported.bin"
                with filled_context(model, types, flash, sequence, sequences) as context:
                    data = context.save(own, IDS, sequence)
                    expected = logits_after_load(context, own, sequence)
                kvpack.save(import_slot(own, **options_of(arch)), folder / "x.kvpack")
                export_slot(kvpack.load(folder / "x.kvpack"), exported, windows=windows)
                assert exported.read_bytes() == data
                with Context(model, types, flash=flash, sequences=sequences) as context:
                    assert all(map(np.array_equal, logits_after_load(context, exported, sequence), expected))
    yield f"{len(pairs) * 4} files are the same byte for byte and give the same logits"


def check_quantized(folder: Path, model: Path, arch: str) -> Iterator[str]:
    """Check that quantized blocks survive the round trip byte for byte, and give llama.cpp the same logits.

    The round trip is also made through a kvpack file.
    """
    windows, own, exported = WINDOWS.get(arch), folder / "own.bin", folder / "exported.bin"
    kinds = [(kind, kind) for kind in ("q8_0", "q5_0", "q4_0")] + (
        [] if arch == "deepseek2" else [("q8_0", "fp16")]
    )
    for types in kinds:
        with filled_context(model, types, True, 0, 1) as context:
            data = context.save(own, IDS)
            expected = logits_after_load(context, own, 0)
        kvpack.save(import_slot(own, **options_of(arch)), folder / "x.kvpack")
        export_slot(kvpack.load(folder / "x.kvpack"), exported, windows=windows)
        assert exported.read_bytes() == data
        with Context(model, types, flash=True) as context:
            assert all(map(np.array_equal, logits_after_load(context, exported, 0), expected))
    yield f"{len(kinds)} quantized files are the same byte for byte and give the same logits"


def check_other_layout(folder: Path, model: Path, arch: str) -> Iterator[str]:
    """Check two conversions of layout that llama.cpp itself cannot make.

    A state saved without flash attention loads with it, and a state of several streams loads into a context with one stream.
    """
    own, other, windows = folder / "own.bin", folder / "other.bin", WINDOWS.get(arch)
    with filled_context(model, ("fp16", "fp16"), False, 1, 2) as context:
        context.save(own, IDS, 1)
    with filled_context(model, ("fp16", "fp16"), True, 0, 1) as context:
        context.save(other, IDS)
        expected = logits_after_load(context, other, 0)
        assert context.load(own) is None
        export_slot(import_slot(own, **options_of(arch)), other, windows=windows, transposed=False, streams=1)
        found = logits_after_load(context, other, 0)
    # Layers after the first were computed with different attention.
    error = relative_difference(found, expected)
    assert error < 2e-3
    yield f"after loading into another layout, logits differ by at most {error:.1e}"


def check_values(folder: Path, model: Path, arch: str) -> Iterator[str]:
    """Check that the keys and values of layer 0 are those of the model, head by head, with rotary pairs in the order of ``arch``."""
    weights = {tensor.name: np.asarray(tensor.data, np.float64) for tensor in GGUFReader(model).tensors}
    own = folder / "own.bin"
    with filled_context(model, ("fp32", "fp32"), False, 0, 1) as context:
        context.save(own, IDS)
    embedded = weights["token_embd.weight"][IDS]
    normed = embedded / np.sqrt((embedded**2).mean(1, keepdims=True) + 1e-5)
    keys, values = (normed @ weights[f"blk.0.attn_{side}.weight"].T for side in "kv")
    dim = keys.shape[1] // 2
    angles = np.arange(TOKENS)[:, None, None] * 10000.0 ** (-np.arange(0, dim, 2) / dim)
    keys = keys.reshape(TOKENS, 2, dim)
    # The converter for llama reorders channels so that RoPE rotates neighbors; other models rotate channels half a head apart.
    first, second = (slice(0, None, 2), slice(1, None, 2)) if arch == "llama" else (slice(0, dim // 2), slice(dim // 2, None))
    turned = np.empty_like(keys)
    turned[..., first] = keys[..., first] * np.cos(angles) - keys[..., second] * np.sin(angles)
    turned[..., second] = keys[..., first] * np.sin(angles) + keys[..., second] * np.cos(angles)
    found = import_slot(own, kv_heads=2)[0].unpack(torch.float32)
    for x, expected in zip(found, (turned, values.reshape(TOKENS, 2, dim)), strict=True):
        assert x is not None
        assert np.allclose(x[0].transpose(0, 1).numpy(), expected, atol=1e-4)
    yield f"layer 0 is the weights', pairs {'next to each other' if arch == 'llama' else 'half a head apart'}"


def check_lossy(folder: Path, model: Path, arch: str) -> Iterator[str]:
    """Check that llama.cpp continues from a lossy cache."""
    own, exported, windows = folder / "own.bin", folder / "exported.bin", WINDOWS.get(arch)
    with filled_context(model, ("fp16", "fp16"), True, 0, 1) as context:
        context.save(own, IDS)
        expected = logits_after_load(context, own, 0)
        cache = import_slot(own, "kv=group:b=8,g=32", **options_of(arch))
        export_slot(cache, exported, dtype="fp16", windows=windows)
        found = logits_after_load(context, exported, 0)
    error = relative_difference(found, expected)
    assert 0 < error < 0.1
    yield f"after packing to 8 bits per value, logits differ by at most {error:.1e}"


def check_moved(folder: Path, model: Path, arch: str) -> Iterator[str]:
    """Check states whose cells are not in order of position, as after a context shift or in a sliding window.

    A state with a gap must be refused.
    """
    own, exported, windows = folder / "own.bin", folder / "exported.bin", WINDOWS.get(arch)
    # The order of cells changes the result of flash attention by about 1e-3.
    with filled_context(model, ("fp32", "fp32"), False, 0, 1) as context:
        if windows:
            # The ring buffer has 256 cells, and single tokens wrap around from its end to its beginning.
            ids = (IDS * 3)[:270]
            for position in range(TOKENS, len(ids)):
                context.decode([ids[position]], position)
        else:
            assert context.remove(20, 40)
            context.save(own, [])
            check_refused(own, "with 40 in place of 20", **options_of(arch))
            context.shift(40, TOKENS, -20)
            context.decode(IDS[:20], TOKENS - 20)
            ids = IDS
        data = context.save(own, ids)
        expected = logits_after_load(context, own, 0, ids)
        export_slot(import_slot(own, **options_of(arch)), exported, windows=windows)
        assert sorted(exported.read_bytes()) == sorted(data)
        assert exported.read_bytes() != data
        found = logits_after_load(context, exported, 0, ids)
    error = relative_difference(found, expected)
    assert error < 1e-4
    yield f"with cells in another order, logits differ by at most {error:.1e}"


def check_refused(path: Path, message: str, **options: Any) -> None:
    found = "accepted"
    try:
        import_slot(path, **options)
    except kvpack.KvpackError as error:
        found = str(error)
    assert message in found, found


def check_refusals(folder: Path) -> Iterator[str]:
    """Check that kvpack refuses the unsupported states that llama.cpp can write."""
    path, llama = folder / "own.bin", write_model(folder / "llama.gguf", "llama", 64)
    with filled_context(llama, ("fp16", "fp16"), True, 0, 1) as context:
        array = (ctypes.c_int32 * TOKENS)(*IDS)
        assert library.llama_state_save_file(context.pointer, str(path).encode(), array, TOKENS)
        check_refused(path, "is the state of a whole context ('ggsn')", kv_heads=2)
        context.save(path, IDS[:-1])
        check_refused(path, "has 99 token ids for 100 cells", kv_heads=2)
        context.save(path, IDS)
        check_refused(path, "128 channels are not divisible by 3 heads", kv_heads=3)
    for arch, message in (("gemma3", "sliding-window layers"), ("qwen2vl", "(M-RoPE)"), ("mamba", "recurrent model")):
        with filled_context(write_model(folder / f"{arch}.gguf", arch, 64), ("fp16", "fp16"), True, 0, 1) as context:
            context.save(path, IDS)
        check_refused(path, message, kv_heads=2)
        if arch == "gemma3":
            check_refused(path, "is 2, but windows has 1", kv_heads=2, windows={0: WINDOW})
            check_refused(path, "layer 0 has a window of 64", kv_heads=2, windows={0: 64, 2: 64})
    yield "recurrent, M-RoPE, a whole context, windows and heads that are not: refused"


def check_server(folder: Path, program: Path) -> Iterator[str]:
    """Check slots of llama and gemma3 that llama-server saves, and that llama-server restores files written by kvpack."""
    for arch in ("llama", "gemma3"):
        windows = WINDOWS.get(arch)
        model = write_model(folder / f"{arch}.gguf", arch, 64)
        with run_server(program, model, folder) as ask:
            first = {"prompt": IDS, "n_predict": 16, "temperature": 0, "id_slot": 0, "cache_prompt": True, "return_tokens": True}
            ids = [*IDS, *ask("/completion", first)["tokens"]]
            ask("/slots/0?action=save", {"filename": "own.bin"})
            cache = import_slot(folder / "own.bin", **options_of(arch))
            assert cache.inputs is not None
            assert np.array_equal(np.frombuffer(cache.inputs.token_ids, "<u4"), ids[: cache.tokens])
            export_slot(cache, folder / "exported.bin", windows=windows)
            assert (folder / "exported.bin").read_bytes() == (folder / "own.bin").read_bytes()
            again = {**first, "prompt": [*ids[: cache.tokens], *NEXT], "n_probs": 5}
            found = []
            for name in ("own.bin", "exported.bin"):
                ask("/slots/0?action=erase", {})
                assert ask("/slots/0?action=restore", {"filename": name})["n_restored"] == cache.tokens
                answer = ask("/completion", again)
                found.append((answer["tokens"], answer["completion_probabilities"], answer["timings"]["prompt_n"]))
            assert found[0] == found[1]
            # For models with sliding windows, llama-server recomputes prompts even after loading its own files.
            assert windows or found[0][2] == len(NEXT), "the server did not reuse the slot's tokens"
        yield f"{arch} in llama-server: a slot of {cache.tokens} tokens byte for byte, and the same answer"


@contextlib.contextmanager
def run_server(program: Path, model: Path, folder: Path) -> Iterator[Callable[[str, Any], Any]]:
    """Run a llama-server for ``model`` that saves slots in ``folder``, and yield a function that posts a JSON body to a path."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = [
        "--port",
        address.rpartition(":")[2],
        "--slot-save-path",
        str(folder),
        "--parallel",
        "1",
        "--ctx-size",
        "512",
        "--threads",
        "1",
    ]
    process = subprocess.Popen([program, "--model", model, *options, "--no-warmup", "--log-disable"], stdout=subprocess.DEVNULL)

    def ask(path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{address}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                ask("/health")
                break
            time.sleep(0.1)
        yield ask
    finally:
        process.terminate()
        process.wait()


def write_fixtures(folder: Path, program: Path | None) -> None:
    """Write the fixtures of the tests.

    The models have one KV head of 8 channels, and 5 tokens, or a window of 4 among 9 tokens.
    """
    folder.mkdir(exist_ok=True)
    model = folder / "model.gguf"
    ids = [1, 40, 90, 7, 200]
    for name, arch, types, flash, sequence, sequences in (
        ("rows", "llama", ("fp16", "fp16"), True, 0, 1),
        ("transposed", "llama", ("bf16", "fp32"), False, 0, 1),
        ("streams", "llama", ("fp16", "fp16"), False, 1, 3),
        ("windows", "gemma3", ("fp16", "fp16"), True, 0, 1),
        ("latents", "deepseek2", ("bf16", "bf16"), False, 0, 1),
        ("m-rope", "qwen2vl", ("fp16", "fp16"), True, 0, 1),
        ("recurrent", "mamba", ("fp16", "fp16"), True, 0, 1),
    ):
        written = [*ids, *ids[1:]] if arch == "gemma3" else ids
        with Context(write_model(model, arch, 8, heads=1, kv_heads=1, window=4), types, flash=flash, sequences=sequences) as context:
            context.decode(written, 0, sequence)
            context.save(folder / f"{name}.bin", written, sequence)
    with Context(write_model(model, "llama", 32, heads=1, kv_heads=1), ("q8_0", "q8_0")) as context:
        context.decode(ids, 0)
        context.save(folder / "quantized.bin", ids)
    if program:
        with run_server(program, write_model(model, "llama", 8, heads=1, kv_heads=1), folder) as ask:
            ask("/completion", {"prompt": ids, "n_predict": 1, "temperature": 0, "id_slot": 0, "cache_prompt": True})
            ask("/slots/0?action=save", {"filename": "server.bin"})
    model.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", type=Path, help="a llama-server of the same version")
    parser.add_argument("--fixtures", type=Path)
    arguments = parser.parse_args()
    library.llama_log_set(log := library.llama_log_callback(lambda *_: None), None)
    if arguments.fixtures:
        write_fixtures(arguments.fixtures, arguments.server)
        raise SystemExit
    print(f"llama-cpp-python {llama_cpp.__version__}, {LAYERS} layers, {TOKENS} tokens")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for arch, dim in (("llama", 64), ("llama", 128), ("qwen2", 64), ("gemma3", 64), ("deepseek2", 64)):
            model = write_model(root / f"{arch}-{dim}.gguf", arch, dim, kv_heads=1 if arch == "deepseek2" else 2)
            checks = [
                check_bytes,
                check_quantized,
                check_other_layout,
                check_lossy,
                check_moved,
                *([check_values] if arch in ("llama", "qwen2") else []),
            ]
            for check in checks:
                for line in check(root, model, arch):
                    print(f"{arch}, head dim {dim}: {line}")
        for line in check_refusals(root):
            print(line)
        if arguments.server:
            for line in check_server(root, arguments.server):
                print(line)
