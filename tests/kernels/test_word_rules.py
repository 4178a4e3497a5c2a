"""The device's rules for words find exactly what ``Codec.check`` refuses, and files are refused with the same messages.

interpreter.py describes which process runs which of these tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch

import kvpack
from kvpack.cache import files
from kvpack.cache.device_copy import HostCopyQueue
from kvpack.coding import dispatch
from kvpack.errors import InvalidPayload, KvpackError
from kvpack.file import container
from kvpack.formats.base import Codec
from kvpack.kernels import codecs
from kvpack.kernels.bitpack import rules
from support.caches import random_pairs
from support.interpreter import DEVICE, INTERPRETED

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvpack.cache.side import Side

pytestmark = [pytest.mark.kernels]

RECIPES = (
    "k=octahedral:b=3;v=group:b=3", "kv=octahedral:b=3,norm=fp32", "kivi-2", "oscar-2", "kv=scalar:b=2,high=3,share=32", "kv=scalar:b=3",
    "kv=polar:b=3", "turboangle-k8v4", "kv=group:b=3,g=32,axis=channel", "kv=quaternion:s=24,r=3",
)  # fmt: skip


def sides_of(recipe: str) -> list[Side]:
    # Codewords of other dims take words that only decoding checks.
    dims = (128, 128) if "quaternion" in recipe else (64, 96)
    return list(kvpack.pack(random_pairs(1, 70, batch=1, dims=dims), f"{recipe};raw=0")[0].sides.values())


@pytest.fixture(autouse=True)
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels even on CPU tensors, in the interpreter. With a device, caches are packed on the CPU."""
    if INTERPRETED:
        monkeypatch.setenv(dispatch.VARIABLE, "triton")


def load(path: Path) -> kvpack.Cache:
    return files.read_to_device(HostCopyQueue(), container.open_file(path)) if INTERPRETED else kvpack.load(path, device=DEVICE)


def outcome(call: Any) -> str:
    try:
        call()
    except InvalidPayload as error:
        return str(error)
    return ""


def is_refused(codec: Codec, streams: Mapping[str, torch.Tensor]) -> bool:
    return bool(outcome(lambda: codec.check({name: stream.numpy() for name, stream in streams.items()}, "x")))


@pytest.mark.scenario
@pytest.mark.parametrize("recipe", RECIPES)
def test_rules_find_the_same_errors_as_the_codec(recipe: str) -> None:
    """One bit pattern at a time is invalid, in the first word of each stream, in the last, and between them."""
    random = numpy.random.default_rng(0)
    for side in sides_of(recipe):
        codec, own = side.codec, {name: stream.clone() for name, stream in side.stored_streams()[0].items()}
        assert dispatch.supports_value_checks(codec, torch.device(DEVICE))
        cases = [own]
        for name, stream in own.items():
            words = stream.view(torch.int32 if stream.dtype == torch.float32 else torch.int16)
            for place in (0, words.numel() - 1, *random.integers(0, words.numel(), 6).tolist()):
                changed = words.clone()
                bits = random.choice([-1, 3, 1 << 14, -(1 << 15), 0x7C00, 0x7F800000 if words.dtype == torch.int32 else 1])
                changed.view(-1)[place] = int(bits)
                cases.append({**own, name: changed.view(stream.dtype)})
        expected = [is_refused(codec, streams) for streams in cases]
        there = [(codec, {name: stream.to(DEVICE) for name, stream in streams.items()}) for streams in cases]
        assert rules.find_invalid_sides(there)() == [number for number, wrong in enumerate(expected) if wrong]
        assert not expected[0]


@pytest.mark.scenario
def test_every_kind_of_rule_is_violated_at_least_once() -> None:
    """Limits of columns, spare bits, and floats of both sizes all occur. Otherwise, other tests would pass without checking them."""
    kinds = set()
    for recipe in RECIPES:
        for side in sides_of(recipe):
            for rule in (rules.stream_rules(side.codec) or {}).values():
                kinds.add(rule if isinstance(rule, str) else ("spare" if any(rule.spare) else "limits"))
    assert kinds == {"F16", "F32", "spare", "limits"}


def test_custom_checks_run_on_the_host_unless_the_codec_table_says_otherwise() -> None:
    own = {kind.__name__ for kind, row in codecs.CODECS.items() if row.has_rules is codecs.supports_all and kind.check is not Codec.check}
    assert own == set()


@pytest.mark.scenario
@pytest.mark.parametrize(
    "recipe",
    [
        "octopus-3", "kvpack-2", "oscar-2", "int-3-med3", "octopus-3;raw=0", "kivi-2-u8",
        "kv=octahedral:b=3,channel_scale=fp16,outliers=3,sinks=2",
    ],
)  # fmt: skip
def test_a_loaded_file_gives_the_same_error_as_on_the_cpu(recipe: str, tmp_path: Path) -> None:
    cache, refused = kvpack.pack(random_pairs(2, 40), recipe), 0
    contents, arrays = files.header_and_arrays(cache)
    for name in [name for name in arrays if name.startswith("1.")]:
        changed = arrays[name].copy()
        changed[-2:] = 0xFF
        container.write(tmp_path / "a", contents, {**arrays, name: changed})
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv(dispatch.VARIABLE, raising=False)
            expected = outcome(lambda: kvpack.load(tmp_path / "a"))
        assert outcome(lambda: load(tmp_path / "a")) == expected, name
        refused += bool(expected)
    assert refused
    container.write(tmp_path / "a", contents, arrays)
    assert load(tmp_path / "a").tokens == cache.tokens


def test_a_wrong_digest_is_reported_before_a_broken_rule(tmp_path: Path) -> None:
    contents, arrays = files.header_and_arrays(kvpack.pack(random_pairs(3, 40), "octopus-3;raw=0"))
    arrays["0.k.norm"] = numpy.full_like(arrays["0.k.norm"], 0xFF)
    container.write(tmp_path / "a", contents, arrays)
    with container.open_file(tmp_path / "a") as file:
        at = len(file.front.text) + file.front.places["2.v.scales"].begin
    data = bytearray((tmp_path / "a").read_bytes())
    data[at] ^= 1
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(KvpackError, match=r"2\.v\.scales is damaged"):
        load(tmp_path / "a")
