"""The conformance vectors of the states of recurrent and convolution layers."""

from __future__ import annotations

import math
import random
import struct
from typing import TYPE_CHECKING, Any

import torch

from kvpack.coding.encoding import TORCH_DTYPES
from kvpack.formats.base import DTYPE_BYTES
from spec.generate.invalid_vectors import GROUP, RAW, add
from spec.generate.valid_vectors import add as add_valid
from support.file_parts import changed, compressed, drop, edit, file_of, frame, random_side

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.parts import Parts

FEATURE = "layer-state"
DATA = f"ignorable.{FEATURE}"
BF16, F32 = 3, 4


def add_all() -> None:
    side = random_side(GROUP, tail=0), random_side(RAW, tail=0)
    two = random_side(GROUP, batch=2), None
    recurrent = {"conv.0": state("BF16", 1, 6, 4), "recurrent.0": state("F32", 1, 2, 3, 3)}
    special = torch.tensor([[0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40]])
    for name, shows, layers, states in (
        ("of-a-layer-without-sides", "a recurrent layer before an attention layer", [(None, None), side], [recurrent, {}]),
        ("of-a-layer-with-sides", "a layer has keys, values and states", [side], [recurrent]),
        ("of-two-sequences", "two sequences", [two], [{"conv.0": state("F16", 2, 5)}]),
        ("of-no-sides", "no layer has sides", [(None, None)], [{"a": special}]),
        (
            "of-every-dtype",
            "every dtype, names at their limits, and shapes of one and of eight sizes",
            [(None, None)],
            [
                {f"{'n' * 25}_{n}.": state(dtype, 3) for n, dtype in enumerate(DTYPE_BYTES)}
                | {"z": state("U8", 3, 1, 1, 2, 1, 1, 1, 3), "a_0.b": state("U16", 3, 2)}
            ],
        ),
    ):
        add_valid(f"layer-state-{name}", shows, lambda of=layers, by=states: file_of(*of, states=by), "container-47")
    zeros = [{"conv.0": torch.zeros(1, 40, 10)}]
    add_valid(
        "layer-state-in-a-frame",
        "a state with the filter zstd",
        lambda: changed(file_of((None, None), states=zeros), frame(lambda raw: compressed(raw), "0.state.conv.0")),
        "container-47",
    )
    add_invalid(side, [recurrent, {}, {"conv.0": state("BF16", 1, 6, 4)}])


def add_invalid(side: Any, states: list[dict[str, torch.Tensor]]) -> None:
    whole = record(0, "conv.0", BF16, 1, 6, 4), record(0, "recurrent.0", F32, 1, 2, 3, 3), record(2, "conv.0", BF16, 1, 6, 4)

    def broken(name: str, rule: str, shows: str, *changes: Callable[[Parts], Any], error: str = "InvalidHeader") -> None:
        """A file of three layers, the first without sides, the first and the third with states, after ``changes``."""
        make = lambda: changed(file_of((None, None), side, side, states=states), *changes)  # noqa: E731
        add(f"layer-state-{name}", rule, error, shows, make)

    def data(name: str, rule: str, shows: str, *records: bytes, error: str = "InvalidHeader") -> None:
        broken(name, rule, shows, edit(DATA, b"".join(records)), error=error)

    broken("without-data", "container-41", "the feature is named, and has no data", drop(DATA))
    broken("without-the-name", "container-41", "the feature has data, and is not named", edit("required", []))
    shows = "the feature has data of no bytes"
    nothing = edit("required", [FEATURE]), edit("ignorable", {FEATURE: b""})
    add("layer-state-of-nothing", "container-42", "InvalidHeader", shows, lambda: changed(file_of(side), *nothing))
    data("of-287-bytes", "container-42", "the last record lacks a byte", *whole[:2], whole[2][:-1])

    def with_tensor(name: str, rule: str, shows: str, last: bytes, *shape: int, named: str = "conv.0") -> None:
        """The third record is ``last``, and its tensor is what that says, so that nothing else is wrong."""
        broken(name, rule, shows, edit(DATA, b"".join([*whole[:2], last])), lambda parts: resized(parts, "2.state.conv.0", named, shape))

    data("of-a-record-with-dtype", "container-43", "a dtype that does not exist", *whole[:2], record(2, "conv.0", 5, 1, 6, 4))
    for name, shows, last, shape in (
        ("no-sizes", "a state without sizes", record(2, "conv.0", BF16), ()),
        ("nine-sizes", "a record that counts nine sizes", with_count(9, record(2, "conv.0", BF16, *[1] * 8)), (1,) * 8),
        ("size-of-zero", "a size of 0", record(2, "conv.0", BF16, 1, 0, 4), (1, 0, 4)),
        ("size-beyond-the-shape", "a size that does not count, and is not 0", with_count(2, whole[2]), (1, 6)),
    ):
        with_tensor(f"of-a-record-with-{name}", "container-43", shows, last, *shape)
    for name, shows, text in (
        ("empty-name", "a name of no bytes", ""),
        ("capital", "a name with a capital letter", "Conv.0"),
        ("digit-first", "a name that begins with a digit", "0"),
        ("slash", "a name with a slash", "conv/0"),
    ):
        with_tensor(f"of-a-record-with-{name}", "container-43", shows, record(2, text, BF16, 1, 6, 4), 1, 6, 4, named=text)
    for name, shows, text in (
        ("zero-within-a-name", "a name with a zero in it", "c\0a"),
        ("not-ascii", "a name that is not ASCII", "c\u00e9"),
    ):
        data(f"of-a-record-with-{name}", "container-43", shows, *whole[:2], record(2, text, BF16, 1, 6, 4))
    data(
        "of-a-fourth-layer",
        "container-44",
        "a state of a layer that the file does not have",
        *whole[:2],
        record(3, "conv.0", BF16, 1, 6, 4),
    )
    data("layers-out-of-order", "container-45", "layers that do not ascend", whole[2], *whole[:2])
    data("names-out-of-order", "container-45", "names that do not ascend", whole[1], whole[0], whole[2])
    data("named-twice", "container-45", "a name that occurs twice in a layer", whole[0], whole[0], whole[1], whole[2])
    shows = "a state of two sequences in a layer of one"
    with_tensor("of-other-sequences", "container-46", shows, record(2, "conv.0", BF16, 2, 6, 4), 2, 6, 4)
    shows = "states of one and of two sequences in a layer"
    data("of-two-numbers-of-sequences", "container-46", shows, whole[0], record(0, "recurrent.0", F32, 2, 2, 3, 3), whole[2])
    data("of-another-shape", "container-16", "a shape that is not that of the tensor", *whole[:2], record(2, "conv.0", BF16, 1, 4, 6))
    data("without-a-tensor", "container-16", "a state without a tensor", *whole, record(2, "recurrent.0", F32, 1, 2))
    data("without-a-record", "container-16", "a tensor without a record", *whole[:2])
    limits = (("sequences", (2**16 + 1, 1)), ("a-size", (1, 2**40)), ("a-size-of-64-bits", (1, 2**64 - 1)))
    for name, sizes in limits:
        shows = f"a state of the sizes {sizes}"
        data(f"limit-of-{name}", "container-29", shows, record(0, "conv.0", BF16, *sizes), *whole[1:], error="LimitExceeded")


def resized(parts: Parts, name: str, state_name: str, shape: tuple[int, ...]) -> None:
    """Gives the bf16 state with the tensor ``name`` another shape, bytes for it, and a name."""
    parts.store(name, bytes(2 * math.prod(shape)))
    row = parts.header["tensors"][parts.tensor(name)]
    row[0], row[2] = f"{name.partition('.')[0]}.state.{state_name}", list(shape)


def with_count(count: int, record: bytes) -> bytes:
    """The record, counting this many sizes."""
    return record[:3] + bytes([count]) + record[4:]


def record(layer: int, name: str, dtype: int, *sizes: int) -> bytes:
    """A record of the feature; what a name lacks of its 28 bytes is zero."""
    return struct.pack("<HBB8Q28s", layer, dtype, len(sizes), *sizes, *[0] * (8 - len(sizes)), name.encode())


def state(dtype: str, *shape: int) -> torch.Tensor:
    """Random bytes as a state."""
    source = random.Random(f"{dtype} {shape}")
    count = DTYPE_BYTES[dtype]
    for size in shape:
        count *= size
    return torch.tensor(list(source.randbytes(count)), dtype=torch.uint8).view(TORCH_DTYPES[dtype]).view(shape)
