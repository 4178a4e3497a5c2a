"""Mistakes in a third-party codec are refused at registration or on the first encoding, before a file loses values."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pytest
import torch

import kvpack
from kvpack.formats import CODECS
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.family import CodecFamily, in_range
from kvpack.formats.runs import Run, RunEncoder
from kvpack.formats.streams import Layout
from support import toy_codec
from support.toy_codec import Largest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpack.formats.options import Options

Streams = dict[str, torch.Tensor]


def values() -> torch.Tensor:
    return torch.randn(1, 2, 10, 64, generator=torch.Generator().manual_seed(0))


def pack(monkeypatch: pytest.MonkeyPatch, change: Callable[[Largest, Streams], Streams], recipe: str) -> kvpack.Cache:
    """Pack with a codec that applies ``change`` to the streams of a correct encoder."""

    @dataclass(frozen=True)
    class Faulty(Largest):
        id: ClassVar[str] = "acme-faulty"

        def encode(self, x: torch.Tensor) -> Streams:
            return change(self, super().encode(x))

    monkeypatch.setitem(CODECS, Faulty.id, Faulty)
    return kvpack.pack([(values(), values())], recipe)


def without(streams: Streams, name: str) -> Streams:
    return {key: stream for key, stream in streams.items() if key != name}


def some_codes(*symbols: float) -> torch.Tensor:
    codes = torch.zeros(1, 2, 10, 64)
    codes[0, 0, 0, : len(symbols)] = torch.tensor(symbols)
    return codes


FAULTS: dict[str, tuple[Callable[[Largest, Streams], Streams], str]] = {
    "another stream": (
        lambda _, streams: streams | {"step": streams["largest"].half()},
        "encode's stream 'step' is float16 [1, 2, 10], expected only codes.0, largest: change encode, or scale_layouts and packings",
    ),
    "a missing stream": (
        lambda _, streams: without(streams, "largest"),
        "encode's stream 'largest' is missing, expected float32 [1, 2, 10]: change encode, or scale_layouts and packings",
    ),
    "no streams": (lambda *_: None, "encode's stream 'codes.0' is missing, expected uint16 [1, 2, 10, 32]"),  # type: ignore[dict-item, return-value]
    "a wrong shape": (
        lambda _, streams: streams | {"largest": streams["largest"][..., None]},
        "encode's stream 'largest' is float32 [1, 2, 10, 1], expected float32 [1, 2, 10]",
    ),
    "a wrong dtype": (
        lambda _, streams: streams | {"largest": streams["largest"].half()},
        "encode's stream 'largest' is float16 [1, 2, 10], expected float32 [1, 2, 10]",
    ),
    "a scale that is not finite": (
        lambda _, streams: streams | {"largest": streams["largest"] * torch.inf},
        "readers would reject the streams that encode returns: encode.largest: the value at [0, 0, 0] is inf",
    ),
    "symbols above the alphabet": (
        lambda codec, streams: streams | codec.pack("codes", some_codes(256)),
        "encode packs digits from 0 to 256 into stream 'codes', expected integers from 0 to 255: round or clamp the digits",
    ),
    "symbols below it": (
        lambda codec, streams: streams | codec.pack("codes", some_codes(-1)),
        "encode packs digits from -1 to 0 into stream 'codes', expected",
    ),
    "fractions": (
        lambda codec, streams: streams | codec.pack("codes", some_codes(0.5)),
        "encode packs digits from 0 to 0.5 into stream 'codes', expected integers",
    ),
    "too few symbols": (
        lambda codec, streams: streams | codec.pack("codes", some_codes()[..., :60]),
        "encode packs digits of shapes [[1, 2, 10, 60]] into stream 'codes', but their last axes must have the sizes [64]",
    ),
    "an unknown code stream": (
        lambda codec, streams: streams | codec.pack("code", some_codes()),
        "encode packs stream 'code', which is missing from packings: add it to packings",
    ),
    "too many digits": (
        lambda codec, streams: streams | codec.pack("codes", some_codes(), some_codes()),
        "encode packs digits of shapes [[1, 2, 10, 64], [1, 2, 10, 64]] into stream 'codes', but their last axes must have the sizes [64]",
    ),
}


@pytest.mark.parametrize("recipe", ["kv=acme-faulty;tail=0", "kv=acme-faulty:outliers=3,qjl=fp16;tail=0"], ids=["plain", "sidecars"])
@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_results_of_an_encoder_are_refused(fault: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = FAULTS[fault]
    with pytest.raises(InvalidParameter, match=re.escape(f"codec acme-faulty: {message}")):
        pack(monkeypatch, change, recipe)


DECODERS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "a missing axis": (lambda x: x[..., 0], "float32 [1, 2, 10], expected float32 [batch, kv_head, token, 64]"),
    "an extra axis": (lambda x: x[..., None], "float32 [1, 2, 10, 64, 1], expected float32 [batch, kv_head, token, 64]"),
    "another dim": (lambda x: x[..., :60], "float32 [1, 2, 10, 60], expected float32 [batch, kv_head, token, 64]"),
    "too few tokens": (lambda x: x[:, :, 1:], "float32 [1, 2, 9, 64], expected float32 [1, 2, 10, 64]"),
    "a wrong dtype": (lambda x: x.half(), "float16 [1, 2, 10, 64], expected float32 [batch, kv_head, token, 64]"),
}


@pytest.mark.parametrize("recipe", ["kv=acme-faulty;tail=0", "kv=acme-faulty:outliers=3;tail=0"], ids=["plain", "sidecars"])
@pytest.mark.parametrize("fault", DECODERS)
def test_invalid_results_of_a_decoder_are_refused(fault: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = DECODERS[fault]

    @dataclass(frozen=True)
    class Faulty(Largest):
        id: ClassVar[str] = "acme-faulty"
        faulty: ClassVar[bool] = True

        def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
            x = super().decode_digits(digits, streams)
            return change(x) if self.faulty else x

    monkeypatch.setitem(CODECS, Faulty.id, Faulty)
    with pytest.raises(InvalidParameter, match=re.escape(f"codec acme-faulty: decode_digits returns {message}: change decode_digits")):
        kvpack.pack([(values(), values())], recipe)
    monkeypatch.setattr(Faulty, "faulty", False)
    cache = kvpack.pack([(values(), values())], recipe)
    monkeypatch.setattr(Faulty, "faulty", True)
    if fault != "too few tokens":
        with pytest.raises(InvalidParameter, match=r"decode_digits returns .*, expected float32 \[batch, kv_head, token, 64\]"):
            cache[0].unpack()


def test_a_layout_must_have_a_known_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Faulty(Largest):
        id: ClassVar[str] = "acme-faulty"

        def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
            return {"largest": Layout("fp32", (batch, heads, tokens))}

    monkeypatch.setitem(CODECS, Faulty.id, Faulty)
    message = "codec acme-faulty: the dtype of stream 'largest' in scale_layouts is 'fp32', expected one of U8, U16, F16, BF16, F32"
    with pytest.raises(InvalidParameter, match=message):
        kvpack.pack([(values(), values())], "kv=acme-faulty;tail=0")


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ("batch heads", [1, 1]),
        ("batch tokens", [1, 0]),
        ("batch tokens heads", [1, 0, 1]),
        ("tokens heads batch", [0, 1, 1]),
        ("batch heads dim", [1, 1, 64]),
        ("batch heads dim tokens", [1, 1, 64, 0]),
    ],
)
def test_the_axes_of_a_layout_must_be_batch_head_and_token(axes: str, shape: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Faulty(Largest):
        id: ClassVar[str] = "acme-faulty"

        def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
            sizes = {"batch": batch, "heads": heads, "tokens": tokens, "dim": self.dim}
            return {"largest": Layout("F32", tuple(sizes[axis] for axis in axes.split()))}

    monkeypatch.setitem(CODECS, Faulty.id, Faulty)
    message = f"codec acme-faulty: the shape of stream 'largest' in scale_layouts is {shape} for batch 1, heads 1 and tokens 0"
    with pytest.raises(InvalidParameter, match=re.escape(message)):
        kvpack.pack([(values(), values())], "kv=acme-faulty")


def test_a_class_may_extend_a_checked_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Counted(Largest):
        id: ClassVar[str] = "acme-counted"

        def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
            return super().scale_layouts(batch, heads, tokens) | {
                "count": Layout("U8", (batch, heads, tokens)),
                "version": Layout("U8", (batch, heads, 1), per="run"),
            }

        def begin(self, run: Run, previous: Mapping[str, torch.Tensor] | None) -> RunEncoder:
            batch, heads, *_ = run.shape
            inner = super().begin(run, previous)

            def encode(block: torch.Tensor, start: int) -> Streams:
                return inner.encode(block, start) | {"count": (block > 0).sum(-1, dtype=torch.uint8)}

            return RunEncoder({"version": torch.ones(batch, heads, 1, dtype=torch.uint8)}, encode)

    monkeypatch.setitem(CODECS, Counted.id, Counted)
    cache = kvpack.pack([(values(), values())], "kv=acme-counted;tail=0")
    assert cache[0].k is not None
    assert cache[0].k.runs[0].streams["version"].unique().tolist() == [1]


def test_a_codec_id_cannot_be_registered_twice() -> None:
    scalar = CODECS["scalar"]

    @dataclass(frozen=True)
    class Scalar(Largest):
        id: ClassVar[str] = "scalar"

    with pytest.raises(InvalidParameter, match=r"codec id 'scalar' already belongs to kvpack\.formats\.scalar\.Scalar: .*'acme-scalar'"):
        CODECS["scalar"] = Scalar
    with pytest.raises(InvalidParameter, match="registered as 'acme-scalar', but its id is 'scalar'"):
        CODECS["acme-scalar"] = Scalar
    assert CODECS["scalar"] is scalar
    assert "acme-scalar" not in CODECS


def test_a_codec_class_must_be_a_complete_frozen_dataclass() -> None:
    class Plain(CodecFamily):
        id: ClassVar[str] = "acme-faulty"

        dim: int

    @dataclass
    class Mutable(CodecFamily):
        id: ClassVar[str] = "acme-faulty"

        dim: int

    @dataclass(frozen=True)
    class Partial(CodecFamily):
        id: ClassVar[str] = "acme-faulty"

        dim: int

    refused = r"must be a frozen dataclass with a field dim: decorate it with @dataclass\(frozen=True\)"
    for codec, message in ((Plain, refused), (Mutable, refused), (Partial, r"Partial does not define .*nominal_bits.*: define each")):
        with pytest.raises(InvalidParameter, match=message):
            CODECS["acme-faulty"] = codec
    assert "acme-faulty" not in CODECS


def test_a_reloaded_module_may_register_its_codec_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, Largest.id, Largest)
    again = importlib.reload(toy_codec).Largest
    assert again is not Largest
    CODECS[again.id] = again
    assert CODECS["largest"] is again


def test_a_field_without_declared_values_is_named() -> None:
    @dataclass(frozen=True)
    class Undeclared(Largest):
        id: ClassVar[str] = "acme-undeclared"

        levels: float = field(default=3.0)
        steps: int = field(default=3, metadata=in_range(1, 8))

        @classmethod
        def create(cls, dim: int, side: str, options: Options) -> Self:
            return cls(dim, (("codes", 2),), cls.option(options, "levels", 3.0))

    options: Any = None
    with pytest.raises(InvalidParameter, match=r"codec acme-undeclared: 'levels' is not a field with declared values: declare .*in_range"):
        Undeclared.create(64, "k", options)
    Undeclared.check_value("steps", 8)
    with pytest.raises(InvalidParameter, match="'levels' is not a field with declared values"):
        Undeclared.check_value("levels", 8)


def test_blocks_of_a_custom_run_encoder_are_checked_against_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Begun(Largest):
        id: ClassVar[str] = "acme-begun"

        def begin(self, run: Run, previous: Mapping[str, torch.Tensor] | None) -> RunEncoder:
            return RunEncoder({}, lambda block, _: without(self.encode(block), "largest"))

    monkeypatch.setitem(CODECS, Begun.id, Begun)
    with pytest.raises(InvalidParameter, match="codec acme-begun: encode's stream 'largest' is missing, expected float32"):
        kvpack.pack([(values(), values())], "kv=acme-begun;tail=0")
