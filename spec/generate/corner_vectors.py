"""The conformance vectors at corners of the codec pages: the lists and ties of layouts, the largest columns, and roundings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec.generate.container_vectors import in_text
from spec.generate.invalid_vectors import add
from spec.generate.valid_vectors import add as add_valid
from spec.generate.valid_vectors import with_fields
from support.file_parts import Parts, bits, one_side
from support.strategies import create

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.formats.base import Codec


def add_all() -> None:
    for add_vectors in (add_octahedral, add_largest_columns, add_ties, add_roundings, add_small_rotations, add_orders, add_major_numbers):
        add_vectors()


def add_octahedral() -> None:
    """Where the norm level goes and how many digits a symbol has: one vector for every number in the lists, and one for each neighbour."""
    for b_dir, b_norm, shows in (
        (1, 1, "1 bit of magnitudes and norm level together"),
        (1, 2, "2 bits of norm level alone"),
        (2, 0, "2 bits of magnitudes alone"),
        (3, 4, "8 bits of magnitudes and norm level together"),
        (8, 2, "16 bits of magnitudes and norm level together"),
        (5, 8, "16 bits, half of magnitudes"),
        (4, 0, "6 bits of magnitudes and 2 of signs: one digit of 8 bits when direct"),
        (3, 2, "4 bits of magnitudes and 4 of norm level and signs: one digit of 8 bits when direct"),
        (4, 1, "6 bits of magnitudes and 3 of norm level and signs: two digits when direct"),
        (1, 7, "no bits of magnitudes, and 9 of norm level and signs"),
    ):
        for arrangement in ("dense", "direct"):
            codec = create("octahedral", 8, b_dir=str(b_dir), b_norm=str(b_norm), arrangement=arrangement, rotation="none")
            make = lambda c=codec: one_side(c, tail=0)  # noqa: E731
            add_valid(f"octahedral-{b_dir}-{b_norm}-{arrangement}", f"{shows}; {arrangement}", make, "octahedral-6", "front-12")


def first_column(codec: Codec, stream: str, value: int) -> Callable[[Parts], None]:
    """Sets the first column of a code stream with one column per row to ``value``."""
    packing = codec.packings()[stream]
    assert packing.width == 1
    data = value.to_bytes(packing.column_bytes, "little")
    data += bytes(len(data) % 2)

    def apply(parts: Parts) -> None:
        for plane in range(len(data) // 2):
            bits(f"0.k.{stream}.{plane}", 0, data[2 * plane : 2 * plane + 2].hex())(parts)

    return apply


def add_largest_columns() -> None:
    single = with_fields(create("angle", 66, n="3", norm="fp32", rotation="none"), 33)
    largest = first_column(single, "angle", 3**33 - 1)
    shows = "columns of 33 digits in base 3, which hold up to 3^33 - 1, above 2^52"
    add_valid("angle-columns-above-2-to-the-52", shows, lambda: one_side(single, largest, tail=0), "angle-4", "front-12")
    above = first_column(single, "angle", 3**33)
    shows = "a column of 3^33, of which all 33 digits are 0"
    add("value-above-a-column-of-53-bits", "front-4", "InvalidPayload", shows, lambda: one_side(single, above, tail=0))
    two = with_fields(create("angle", 26, n="9", norm="linear1", arrangement="direct", rotation="none"), 13)
    add_valid("angle-13-fields-of-two-digits", "13 fields of digits in bases 16 and 2", lambda: one_side(two), "angle-4", "front-12")


def add_ties() -> None:
    even = create("angle", 10, n="72", norm="linear3", rotation="none")
    assert [name for name in even.packings() if name.startswith("angle_")]
    shows = "72 bins at head dim 10: split and exact base take 4 bytes per row, the rounded base 6"
    add_valid("angle-split-before-exact-base", shows, lambda: one_side(even, tail=0), "angle-4", "front-12")


def add_roundings() -> None:
    """Scales of 8 bits: one centre per head, each by its own step, minimum and integer, in files of one channel."""
    codec = create("group", 1, b="1", g="4", scales="u8")
    ties = [(0x3C00, 0, k) for k in (47, 49, 51, 53, 55, 57, 59, 61, 63)]
    twice = [
        (0x32FB, 0x21C0, 0xB9), (0x29F4, 0x333F, 0xD6), (0x1F33, 0xAE64, 0xF7), (0x2C3E, 0xC213, 0x4C),
        (0x33E1, 0x24C4, 0x3F), (0x32D4, 0x393B, 0xBA), (0x255C, 0x45FE, 0x60), (0x2EE9, 0x2FC6, 0x70),
    ]  # fmt: skip
    once = [
        (0x3BE9, 0xA0FD, 0x8A), (0x3B24, 0xA087, 0xF9), (0x38C6, 0xA19B, 0xF0),
        (0x3A54, 0xA003, 0xBF), (0x3965, 0xA12D, 0xFC), (0x392E, 0xA06B, 0xFF),
    ]  # fmt: skip
    for name, shows, cases in (
        ("ties", "r * |r| in the middle of two binary16 numbers", ties),
        ("twice", "r * |r| that is another binary16 number without its rounding to binary32", twice),
        ("once", "r whose rounding to binary32 decides of the binary16 number", once),
    ):
        make = lambda c=cases: one_side(codec, centres(c), runs=(1,), tail=0, heads=len(c))  # noqa: E731
        add_valid(f"group-8-bit-scales-{name}", shows, make, "front-12", "group-5")


def centres(cases: list[tuple[int, int, int]]) -> Callable[[Parts], None]:
    """Gives every head a centre by the bits of its step and minimum and by its integer, and the scale 0."""

    def apply(parts: Parts) -> None:
        scales, ranges = parts.tensor("0.k.scales"), parts.tensor("0.k.scale_range")
        parts.tensors[scales] = b"".join(bytes([0, k]) for _, _, k in cases)
        parts.tensors[ranges] = b"".join(bytes(4) + step.to_bytes(2, "little") + low.to_bytes(2, "little") for step, low, _ in cases)

    return apply


def add_small_rotations() -> None:
    for dim, kind in ((1, "signed-hadamard"), (2, "hadamard"), (56, "signed-hadamard")):
        codec = create("group", dim, b="3", g="4", axis="channel", rotation=kind)
        add_valid(f"group-{kind}-dim-{dim}", f"{kind} at head dim {dim}", lambda c=codec: one_side(c, tail=0), "front-8")


def add_orders() -> None:
    codec = create("group", 256, b="2", g="128", axis="channel", channel_order="u8", block_rotation="128")
    make = lambda: one_side(codec, runs=(1,), tail=0, heads=1)  # noqa: E731
    add_valid("side-car-channel-order-u8-of-256", "an order in 8 bits of 256 channels", make, "side-cars-10")


def add_major_numbers() -> None:
    for name, number, shows in (
        ("of-ten-digits", "1000000000 ", "a major number of ten digits"),
        ("x", "x ", "a letter for the major number"),
        ("2x", "2x ", "a letter after the major number 2"),
        ("1-alone", '1"', "the major number 1 without a digest"),
        ("none", " ", "no major number"),
    ):
        make = lambda n=number: in_text('"kvpack":"1 ', f'"kvpack":"{n}')  # noqa: E731
        add(f"json-header-version-{name}", "container-5", "InvalidHeader", shows, make)
