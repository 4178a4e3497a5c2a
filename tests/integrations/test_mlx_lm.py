"""Tests of mlx-lm prompt caches: both forms of its files are read, and the newer one is written.

tests/support/engines/mlx_lm_round_trip.py makes the same comparisons with mlx-lm itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kvpack
from kvpack.cli import main
from kvpack.formats.errors import InvalidParameter, MissingBasis, MissingFile, ValueTooLarge
from kvpack.integrations.mlx_lm import export_prompt_cache, import_prompt_cache
from support.klt_bases import random_basis

if TYPE_CHECKING:
    from pathlib import Path

K = torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
V = torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def rotated(x: torch.Tensor, window: int, seen: int) -> torch.Tensor:
    """Return a ring buffer of ``window`` slots to which ``seen`` tokens were added one at a time."""
    ring = x[:, :, :window].clone()
    for token in range(window, seen):
        ring[:, :, token % window] = x[:, :, token]
    return ring


def newer(path: Path, layers: list[tuple[str, list[Any]]], **texts: str) -> Path:
    """Write a file in the form that mlx-lm 0.32 uses."""
    tensors, scalars = {}, [""]
    for number, (_, parts) in enumerate(layers):
        for part, value in enumerate(parts):
            tensors[f"{number}.{part}"] = value.clone().contiguous() if isinstance(value, torch.Tensor) else torch.tensor(value)
            scalars += [] if isinstance(value, torch.Tensor) else [f"{number}.{part}"]
    metadata = {f"0.{name}": text for name, text in texts.items()} | {f"1.{n}": name for n, (name, _) in enumerate(layers)}
    for number, name in enumerate(scalars):
        metadata |= {f"2.{number}.0": name, f"2.{number}.1": "scalar"} if number else {"2.0": ""}
    save_file(tensors, path, metadata)
    return path


def older(path: Path, layers: list[tuple[str, list[torch.Tensor], list[int]]], **texts: str) -> Path:
    """Write a file in the form that earlier versions of mlx-lm used."""
    metadata = {f"1.{name}": text for name, text in texts.items()}
    tensors = {}
    for number, (name, arrays, counts) in enumerate(layers):
        metadata[f"2.{number}"] = name
        metadata |= {f"0.{number}.{part}": str(count) for part, count in enumerate(counts)} if counts else {f"0.{number}": ""}
        tensors |= {f"{number}.{part}": array.clone().contiguous() for part, array in enumerate(arrays)}
    save_file(tensors, path, metadata)
    return path


def values(layer: Any) -> list[torch.Tensor]:
    return [x.view(torch.int16) for x in layer.unpack(torch.bfloat16)]


def test_both_forms_are_read(tmp_path: Path) -> None:
    spare = torch.zeros(1, 2, 24, 16, dtype=torch.bfloat16)
    whole = [torch.cat([K, spare], 2), torch.cat([V, spare[..., :8]], 2)]
    window = [rotated(x, 16, 37) for x in (K[:, :, :37], V[:, :, :37])]
    new = newer(
        tmp_path / "new.safetensors",
        [("KVCache", [*whole, 37]), ("RotatingKVCache", [*window, 37, 0, 16, 5]), ("ConcatenateKVCache", [K[:, :, :37], V[:, :, :37]])],
        model="org/model",
    )
    old = older(
        tmp_path / "old.safetensors",
        [
            ("KVCache", [K[:, :, :37], V[:, :, :37]], []),
            ("RotatingKVCache", window, [0, 16, 37, 5]),
            ("ConcatenateKVCache", [K[:, :, :37], V[:, :, :37]], []),
        ],
        model="org/model",
    )
    for path in (new, old):
        cache = import_prompt_cache(path)
        assert [(layer.skipped, layer.seen_tokens) for layer in cache] == [(0, 37), (21, 37), (0, 37)]
        assert dict(cache.metadata) == {"model": "org/model"}
        for layer, first in zip(cache, (0, 21, 0), strict=True):
            expected = [x[:, :, first:37].view(torch.int16) for x in (K, V)]
            assert all(map(torch.equal, values(layer), expected))


@pytest.mark.parametrize("held", [15, 16, 20])
def test_written_files_are_read_back(held: int, tmp_path: Path) -> None:
    cache = kvpack.pack([(K, V), (K[:, :, 40 - held :], V[:, :, 40 - held :], 40 - held)], "raw")
    path = tmp_path / "out.safetensors"
    assert export_prompt_cache(cache, path, windows={1: 16}) == path.stat().st_size
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        counts = [int(file.get_tensor(f"1.{part}")) for part in range(2, 6)]
    assert [metadata["1.0"], metadata["1.1"], metadata["2.0"]] == ["KVCache", "RotatingKVCache", ""]
    assert counts == [40, 0, 16, max(held, 16)]
    assert [metadata[f"2.{number}.0"] for number in range(1, 6)] == ["0.2", "1.2", "1.3", "1.4", "1.5"]
    again = import_prompt_cache(path)
    for layer, other in zip(again, cache, strict=True):
        assert layer.skipped == other.skipped
        assert all(map(torch.equal, values(layer), values(other)))


def test_a_window_that_is_not_full_is_exported(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    export_prompt_cache(kvpack.pack([(K[:, :, :7], V[:, :, :7])], "raw"), path, windows={0: 16})
    with safe_open(path, "pt") as file:
        assert file.metadata()["1.0"] == "RotatingKVCache"
        assert [int(file.get_tensor(f"0.{part}")) for part in range(2, 6)] == [7, 0, 16, 7]
    assert import_prompt_cache(path)[0].seen_tokens == 7


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([("QuantizedKVCache", [K, V, 40])], r"layer 0 is a 'QuantizedKVCache', but kvpack reads only KVCache"),
        ([("KVCache", [K, V, 40]), ("ArraysCache", [K])], "layer 1 is a 'ArraysCache'"),
        ([("RotatingKVCache", [rotated(K, 16, 37), V[:, :, :16], 37, 4, 16, 5])], "keeps the first 4 of 37 tokens next to the newest 12"),
        ([("RotatingKVCache", [K, V, 37, 0, 16, 41])], "40 tokens stored, next position 41:"),
        # What mlx-lm never writes: arrays of other tokens, a window that lacks tokens, one that was written over before it was full.
        ([("KVCache", [K, V[:, :, :39], 39])], r"its keys are \[1, 2, 40, 16\] and its values \[1, 2, 39, 8\]"),
        ([("KVCache", [K, V[:, :1], 40])], r"its values \[1, 1, 40, 8\], expected the same batch, heads and tokens"),
        ([("RotatingKVCache", [K[:, :, :15], V[:, :, :15], 37, 0, 16, 15])], "15 tokens stored, next position 15:"),
        ([("RotatingKVCache", [K[:, :, :16], V[:, :, :16], 16, 0, 16, 5])], "16 tokens stored, next position 5:"),
        ([("RotatingKVCache", [K[:, :, :20], V[:, :, :20], 37, 0, 16, 5])], "20 tokens stored, next position 5:"),
        ([("RotatingKVCache", [K, V, 37, 0, 16, 38])], "40 tokens stored, next position 38:"),
        ([("RotatingKVCache", [K, V, 41, 0, 0, 40])], "window 0, 41 tokens seen, 40 tokens stored, next position 40"),
        ([("RotatingKVCache", [K, V])], "part 2 of its state is missing"),
        ([("KVCache", [K, V, 41])], "claims 41 tokens, but contains only 40"),
        ([("KVCache", [K, V, -1])], "a count in its state is '-1'"),
        ([("KVCache", [K])], "must be nonempty keys and values"),
        ([("KVCache", [K[0], V[0], 40])], "must be nonempty keys and values"),
    ],
)
def test_contents_that_kvpack_cannot_store_are_named(layers: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=message):
        import_prompt_cache(newer(tmp_path / "in.safetensors", layers))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("count", [-1, 3, 39, 41, 255, 9 * 10**9, 10**12, 2**40, 2**62])
@pytest.mark.parametrize("part", [2, 3, 4, 5])
def test_counts_are_compared_before_anything_is_allocated(
    part: int, count: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Any declared window size results in a cache with at most as many tokens as the file, or in InvalidParameter."""
    counts = [torch.tensor(one) for one in (2**40 - 1, 0, 16, 2**39)]
    counts[part - 2] = torch.tensor(count % 2**63).to(dtype)
    for others in (counts, [torch.tensor(37), torch.tensor(0), torch.tensor(16), torch.tensor(37)]):
        others[part - 2] = counts[part - 2]
        path = newer(tmp_path / "in.safetensors", [("RotatingKVCache", [K, V, *others])])
        try:
            cache = import_prompt_cache(path)
        except InvalidParameter:
            continue
        assert cache[0].tokens <= 40


def test_zeros_that_fill_a_window_are_distinguished_from_tokens(tmp_path: Path) -> None:
    """A zero slot that mlx-lm would write to next is not a token. Zeros elsewhere may be tokens."""
    k, v = (torch.cat([torch.zeros_like(x[:, :, :1]), x[:, :, :19]], 2) for x in (K, V))
    for counts, skipped in (([30, 0, 20, 20], 11), ([30, 0, 16, 20], 10)):
        layer = import_prompt_cache(newer(tmp_path / "in.safetensors", [("RotatingKVCache", [k, v, *counts])]))[0]
        assert (layer.skipped, layer.seen_tokens) == (skipped, 30)
        assert all(map(torch.equal, values(layer), (x[:, :, skipped - 10 :].view(torch.int16) for x in (k, v))))


def test_a_count_beyond_64_bits_is_refused(tmp_path: Path) -> None:
    full = torch.tensor(-(2**63)).view(torch.uint64)
    path = newer(tmp_path / "in.safetensors", [("KVCache", [K, V, full])])
    with pytest.raises(InvalidParameter, match="a count in its state is '9223372036854775808'"):
        import_prompt_cache(path)


@pytest.mark.parametrize("shape", [(1, 0, 3, 8), (0, 1, 3, 8), (1, 1, 0, 8), (1, 1, 3, 0), (1, 0, 2**39, 1)])
def test_arrays_without_values_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    empty = torch.zeros(shape, dtype=torch.bfloat16)
    for pair in ([empty, empty], [K, empty], [empty, V]):
        with pytest.raises(InvalidParameter, match=r"arrays 0 and 1 must be nonempty keys and values .* their shapes are"):
            import_prompt_cache(newer(tmp_path / "in.safetensors", [("RotatingKVCache", [*pair, 2**39, 0, 16, 2**39])]))


def test_files_of_other_libraries_are_refused(tmp_path: Path) -> None:
    save_file({"0.k": K}, tmp_path / "dense.safetensors")
    with pytest.raises(InvalidParameter, match="not an mlx-lm prompt cache: its metadata names no layer classes"):
        import_prompt_cache(tmp_path / "dense.safetensors")
    (tmp_path / "text.safetensors").write_text("no file of tensors")
    with pytest.raises(InvalidParameter, match="is not a safetensors file"):
        import_prompt_cache(tmp_path / "text.safetensors")
    with pytest.raises(MissingFile):
        import_prompt_cache(tmp_path / "none.safetensors")
    path = newer(tmp_path / "in.safetensors", [("KVCache", [K, V, 40])])
    save_file({"0.0": K, "0.1": V, "7.0": K + 1}, path, {"2.0": "", "1.0": "KVCache"})
    with pytest.raises(InvalidParameter, match=r"the array '7\.0' is not part of the 1 layers"):
        import_prompt_cache(path)


def test_contents_that_mlx_lm_cannot_store_are_named(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    with pytest.raises(InvalidParameter, match=r"name that ends in \.safetensors"):
        export_prompt_cache(kvpack.pack([(K, V)], "raw"), tmp_path / "out")
    with pytest.raises(InvalidParameter, match=r"layer 0: the codec octahedral decodes to float32.*dtype='bf16'"):
        export_prompt_cache(kvpack.pack([(K, V)], "octopus-3"), path)
    with pytest.raises(InvalidParameter, match="the cache was computed in fp16, so pass --dtype fp16 on the command line"):
        export_prompt_cache(kvpack.pack([(K, V)], "octopus-3", model={"name": "m", "dtype": "float16"}), path)
    with pytest.raises(InvalidParameter, match=r"the newest 30 of 40 tokens: pass its sliding window, such as windows=\{0: 31\}"):
        export_prompt_cache(kvpack.pack([(K[:, :, 10:], V[:, :, 10:], 10)], "raw"), path)
    with pytest.raises(InvalidParameter, match="holds the newest 30 of 40 tokens, but a window of 32 needs 31 earlier tokens"):
        export_prompt_cache(kvpack.pack([(K[:, :, 10:], V[:, :, 10:], 10)], "raw"), path, windows={0: 32})
    with pytest.raises(InvalidParameter, match="the cache begins at position 5"):
        export_prompt_cache(kvpack.pack([(K, V)], "raw", start=5), path)
    with pytest.raises(InvalidParameter, match="layer 0 contains no keys or no values"):
        export_prompt_cache(kvpack.pack([(K, None)], "raw"), path)
    with pytest.raises(InvalidParameter, match=r"windows\[3\] is 16, expected a layer number from 0 to 0"):
        export_prompt_cache(kvpack.pack([(K, V)], "raw"), path, windows={3: 16})
    with pytest.raises(InvalidParameter, match="dtype is 'int8', expected one of bf16, fp16, fp32"):
        export_prompt_cache(kvpack.pack([(K, V)], "raw"), path, dtype="int8")
    with pytest.raises(ValueTooLarge, match="layer 0: a value is too large for fp16"):
        export_prompt_cache(kvpack.pack([(K * 1e6, V)], "raw"), path, dtype="fp16")
    assert not list(tmp_path.iterdir())


def test_commands_import_and_export_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = newer(tmp_path / "in.safetensors", [("KVCache", [K, V, 40])], model="m")
    assert main(["import", str(source), str(tmp_path / "x.kvpack"), "--recipe", "octopus-4"]) == 0
    assert kvpack.load(tmp_path / "x.kvpack").metadata == {"model": "m"}
    assert main(["export", str(tmp_path / "x.kvpack"), str(tmp_path / "out.safetensors")]) == 2
    assert "choose one, such as --dtype bf16 on the command line, or dtype='bf16' in Python" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "x.kvpack"), str(tmp_path / "out.safetensors"), "--dtype", "bf16", "--window", "0=64"]) == 0
    assert (import_prompt_cache(tmp_path / "out.safetensors")[0].unpack(torch.float32)[0] - K).norm() < 0.1 * K.norm()
    assert main(["export", str(tmp_path / "x.kvpack"), str(tmp_path / "out.safetensors"), "--window", "all=64"]) == 2
    assert "expected layers and a number of tokens, such as 0,2,4=512" in capsys.readouterr().err


def test_caches_with_a_basis_are_imported_and_exported(tmp_path: Path) -> None:
    basis = tmp_path / "x.kvbasis"
    basis.write_bytes(random_basis({(0, side): (2, 32) for side in "kv"}, 1))
    x, y = (torch.randn(1, 2, 40, 32, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    plain, packed, back = (str(tmp_path / name) for name in ("x.safetensors", "x.kvpack", "y.safetensors"))
    export_prompt_cache(kvpack.pack([(x, y)], "raw"), plain)
    words = ["--recipe", "klt-6", "--basis", str(basis)]
    assert main(["import", plain, packed, *words]) == 0
    assert main(["export", packed, back]) == MissingBasis.exit_code
    assert main(["export", packed, back, "--basis", str(tmp_path), "--dtype", "fp32"]) == 0
    found = import_prompt_cache(back)[0].unpack(torch.float32)
    expected = kvpack.load(packed, basis=basis)[0].unpack(torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert torch.allclose(one, other)
