"""The conformance vectors of bases and of the codec klt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpack.coding.bases import Basis
from kvpack.formats.klt import Klt
from spec.generate.invalid_vectors import GROUP, KLT, add
from spec.generate.parameter_vectors import add_alone
from spec.generate.valid_vectors import add as add_valid
from spec.generate.valid_vectors import with_fields
from support.file_parts import Parts, bits, changed, edit, file_of, one_side, random_side
from support.klt_bases import codec_of, random_basis
from support.strategies import create

if TYPE_CHECKING:
    from collections.abc import Callable

BASIS = "valid/basis-two-layers.kvpack"
SHAPES = {(0, "k"): (2, 16), (0, "v"): (2, 20), (1, "v"): (1, 3)}


def add_all() -> None:
    add_bases()
    add_by_basis()
    add_own_rows()
    add_widths_of_heads()
    add_parameters()
    add_refused_bases()
    add_payload()


def two_layers() -> bytes:
    return random_basis(SHAPES, 2)


def add_bases() -> None:
    shows = "a basis of two layers: sides of different head dims, and one that is nil"
    add_valid("basis-two-layers", shows, two_layers, "front-12")
    add_valid("basis-fp32", "a basis in binary32", lambda: random_basis({(0, "k"): (1, 16)}, 1, "fp32"), "front-12")


def add_by_basis() -> None:
    def by_basis() -> bytes:
        basis = Basis.of_bytes(two_layers())
        k, v = codec_of(basis, 0, "k", b"\3"), codec_of(basis, 0, "v", b"\2\1", "none")
        other = codec_of(basis, 1, "v", b"\4")
        return file_of((random_side(k), random_side(v)), (random_side(k, batch=2), None), (random_side(other, heads=1, tail=0), None))

    shows = "sides by the rows of a basis, which is a file of its own: three codecs, a side of another layer, two sequences"
    add_valid("klt-by-basis", shows, by_basis, "klt-8", "front-12", basis=BASIS)


def add_own_rows() -> None:
    wide = Klt.of(113, bytes(32), 0, "k", bytes((1, 2, 3, 4, 5, 6, 7, 8)), "fp16", "fp16")
    shows = "every width from 1 to 8, and a last run of one column"
    add_valid("klt-widths", shows, lambda: one_side(wide, runs=(2,), tail=0, heads=1), "klt-8", "front-12")
    gaps = Klt.of(50, bytes(32), 4095, "v", bytes((0, 2, 0, 2)), "none", "fp32")
    shows = "runs of width 0 before and between others, no gain, rows in binary32"
    add_valid("klt-gaps", shows, lambda: one_side(gaps, runs=(2,), tail=0, heads=1), "klt-8")
    several = Klt.of(7, bytes(32), 0, "k", b"\5", "fp16", "fp16")
    shows = "rows of two runs of tokens, two sequences and three heads"
    add_valid("klt-rows", shows, lambda: one_side(several, runs=(1, 2), batch=2, heads=3), "klt-8")
    gains = bits("0.k.gain", 0, "01bc 0100 0080 0000")
    shows = "gains that are negative, subnormal and zero"
    add_valid("klt-special-gains", shows, lambda: one_side(KLT, gains, tail=0), "front-1", "klt-8")
    zero = bits("0.k.rows", 2 * 3, "00" * 2 * 9)
    shows = "a matrix of zeros in the first head: every value is 0"
    add_valid("klt-singular", shows, lambda: one_side(KLT, zero, tail=0), "klt-8")
    add_valid("klt-one-channel", "head dim 1", lambda: one_side(Klt.of(1, bytes(32), 0, "k", b"\1", "fp16", "fp16")), "klt-8")
    for count, shows in ((1, "one field a column"), (42, "more fields than columns, in columns of 16 bytes")):
        codec = with_fields(Klt.of(5, bytes(32), 0, "k", b"\3", "none", "fp16"), count)
        add_valid(f"klt-fields-{count}", shows, lambda c=codec: one_side(c, tail=0, heads=1), "front-12")


def add_widths_of_heads() -> None:
    """Each head has its own widths, of runs of 8 columns."""
    every = Klt.of_heads(13, bytes(32), 0, "k", bytes((1, 2, 3, 4, 5, 6, 7, 8)), "none", "fp16")
    shows = "widths of four heads, every one from 1 to 8, whose last runs have five columns"
    add_valid("klt-heads-widths", shows, lambda: one_side(every, runs=(3,), heads=4, batch=2), "klt-8", "klt-11")
    gaps = Klt.of_heads(32, bytes(32), 0, "v", bytes((0, 2, 0, 1, 0, 0, 0, 0, 5, 0, 0, 0)), "fp16", "fp32")
    shows = "widths of three heads, the second of which has no codes, and gains"
    add_valid("klt-heads-gaps", shows, lambda: one_side(gaps, runs=(2, 1), tail=0, heads=3), "klt-8")

    def by_basis() -> bytes:
        rows = Basis.of_bytes(two_layers()).digest
        k = Klt.of_heads(16, rows, 0, "k", bytes((3, 1, 2, 0)), "none")
        v = Klt.of_heads(20, rows, 0, "v", bytes((8, 0, 1, 0, 0, 3)), "fp16")
        return file_of((random_side(k), random_side(v)))

    add_valid("klt-heads-by-basis", "widths of heads, by the rows of a basis", by_basis, "klt-8", basis=BASIS)
    shows = "three heads, and widths of four"
    add("klt-heads-of-others", "klt-10", "InvalidHeader", shows, lambda: one_side(every, edit("layers.0.k.heads", 3), tail=0, heads=4))
    # Five columns of one bit take a byte whose upper three bits are free, the second of head 0.
    narrow = Klt.of_heads(13, bytes(32), 0, "k", b"\1\1", "none", "fp16")
    spare = bits("0.k.codes", 1, "20")
    shows = "a bit of the codes of a run of five columns that belongs to none"
    add("klt-heads-spare-bits", "klt-11", "InvalidPayload", shows, lambda: one_side(narrow, spare, runs=(2,), tail=0, heads=1))


def add_parameters() -> None:
    of_heads = Klt.of_heads(13, bytes(32), 0, "k", b"\1\1\1\1", "none", "fp16")
    for name, rule, value, shows in (
        ("klt-heads-fields", "klt-2", {"fields": {"codes": 16}}, "16 fields of codes of heads"),
        ("klt-heads-fields-string", "klt-2", {"fields": {"codes": "8"}}, "fields of codes of heads that are a string"),
        ("klt-heads-both", "klt-3", {"fields": {"codes": 8, "codes_1": 8}}, "codes of heads beside those of a width"),
        ("klt-heads-widths-3", "klt-2", {"widths": b"\1\1\1"}, "widths of one head and a half"),
        ("klt-heads-widths-9", "klt-2", {"widths": b"\1\1\1\11"}, "a width of 9 of a head"),
        ("klt-heads-widths-0", "klt-2", {"widths": b"\0\0\0\0"}, "widths of heads that are all 0"),
        ("klt-heads-widths-none", "klt-2", {"widths": b""}, "widths of no head"),
    ):
        add_alone(name, rule, of_heads, value, shows)
    for name, value in (("channel-scale", "fp16"), ("outliers", {"fields": 1}), ("raw-tokens", "bf16")):
        codec = Klt.of(8, bytes(32), 0, "k", b"\2", "fp16", "fp16")
        add_alone(f"side-car-{name}-of-klt", "klt-4", codec, {name.replace("-", "_"): value}, f"{name} of klt")


def add_refused_bases() -> None:
    def file(codec: Klt, heads: int = 2) -> bytes:
        return one_side(codec, heads=heads)

    def named(layer: int, side: str, dim: int) -> Klt:
        return Klt.of(dim, Basis.of_bytes(two_layers()).digest, layer, side, bytes([2] * (1 + (dim > 16))))

    shows = "a side that needs a basis, and the reader is given none"
    add("klt-basis-not-given", "klt-5", "MissingBasis", shows, lambda: file(named(0, "k", 16)))
    other = Klt.of(16, bytes(range(32)), 0, "k", b"\2")
    shows = "a side that needs another basis than the one that is given"
    add("klt-basis-of-another-digest", "klt-5", "MissingBasis", shows, lambda: file(other), basis=BASIS)
    for name, rule, codec, heads, shows in (
        ("without-the-side", "klt-6", lambda: named(1, "k", 3), 1, "a side that is nil in the basis"),
        ("without-the-layer", "klt-6", lambda: named(2, "k", 16), 2, "a layer that the basis does not have"),
        ("of-another-dim", "klt-7", lambda: named(0, "k", 20), 2, "a head dim that is not that of the basis"),
        ("of-other-heads", "klt-7", lambda: named(0, "k", 16), 1, "a number of heads that is not that of the basis"),
    ):
        add(f"klt-basis-{name}", rule, "InvalidHeader", shows, lambda c=codec, h=heads: file(c(), h), basis=BASIS)
    header: tuple[tuple[str, str, Callable[[], bytes], str], ...] = (
        ("codec", "basis-1", lambda: one_side(GROUP, required, runs=(200,), tail=0, heads=1), "a basis of the codec group"),
        ("bf16", "basis-1", lambda: rows(dtype="bf16"), "a basis of bf16 values"),
        ("batch", "basis-2", lambda: rows(batch=2), "a basis of two sequences"),
        ("tail", "basis-2", lambda: rows(tail=1), "a basis with a tail"),
        ("rows", "basis-3", lambda: rows(tokens=174), "a basis of 174 rows of 3 channels, one too few"),
    )
    for name, rule, make, shows in header:
        add(f"basis-{name}", rule, "InvalidHeader", shows, make)
    for name, value in (("nan", "007e"), ("infinity", "00fc")):
        shows = f"a basis with a value that is {name}"
        add(f"basis-{name}", "basis-4", "InvalidPayload", shows, lambda v=value: changed(two_layers(), bits("0.v.values", 40, v)))


def required(parts: Parts) -> None:
    """Makes a file of a cache one of a basis."""
    parts.header["required"] = ["basis"]


def rows(tokens: int = 175, batch: int = 1, tail: int = 0, dtype: str = "fp16") -> bytes:
    codec = create("raw", 3, dtype=dtype)
    side = random_side(codec, (tokens,), tail, batch, 1)
    return changed(file_of((side, None)), required)


def add_payload() -> None:
    shows = "a code in a field without a column"
    field = bits("0.k.codes_2.0", 1, "80")
    codec = with_fields(Klt.of(5, bytes(32), 0, "k", b"\2", "none", "fp16"), 8)
    add("klt-field-without-a-symbol", "front-3", "InvalidPayload", shows, lambda: one_side(codec, field, tail=0))
    for name, tensor, value in (("gain-nan", "gain", "007e"), ("rows-infinity", "rows", "007c")):
        shows = f"a value of {tensor} that is not finite"
        add(f"klt-{name}", "front-13", "InvalidPayload", shows, lambda t=tensor, v=value: one_side(KLT, bits(f"0.k.{t}", 2, v), tail=0))
    shows = "two runs of tokens without a stream that has a row for each"
    one_run = Klt.of(16, bytes(32), 0, "k", b"\2")
    add("klt-two-runs", "container-18", "InvalidHeader", shows, lambda: one_side(one_run, edit("layers.0.k.runs", [1, 1])))
