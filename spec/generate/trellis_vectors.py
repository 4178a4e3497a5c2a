"""Vectors of the codec trellis: windows of every width around the end of a string, and malformed headers."""

from __future__ import annotations

import dataclasses
import struct

from spec.generate.invalid_vectors import add as add_invalid
from spec.generate.invalid_vectors import add_header
from spec.generate.parameter_vectors import add_alone, ranges, words
from spec.generate.valid_vectors import add as add_valid
from support.file_parts import edit, keys_file, overwrite, reorder
from support.strategies import create

TRELLIS = create("trellis", 8, b="2", states="256", rotation="none")
STEPS = struct.pack("<256e", *((37 * window % 256 - 128) / 256 for window in range(256)))
"""Table of the example in the specification."""


def add_all() -> None:
    add_windows()
    add_refused()


def add_windows() -> None:
    corners: tuple[tuple[int, dict[str, str]], ...] = (
        (16, {"b": "1", "states": "256"}),
        (16, {"b": "1", "states": "1024", "norm": "fp32"}),
        (8, {"b": "2", "states": "1024"}),
        (16, {"b": "3", "states": "256", "rotation": "signed-hadamard"}),
        (32, {"b": "3", "states": "1024"}),
        (4, {"b": "4", "states": "1024"}),
        (12, {"b": "4", "states": "256", "rotation": "hadamard"}),
    )
    for dim, options in corners:
        codec = create("trellis", dim, **{"rotation": "none", **options})
        shows = f"head dim {dim}, {', '.join(f'{name} {value}' for name, value in options.items())}"
        name = f"trellis-dim-{dim}-b-{options['b']}-states-{options['states']}"
        add_valid(name, shows, lambda c=codec: keys_file(c), "trellis-5", "front-12")
    k, v = create("trellis", 128, b="2", states="256"), create("trellis", 64, b="3", states="256")
    add_valid("trellis-dim-128", "a common head dim with a rotation", lambda: keys_file(k, runs=(1,), heads=1), "trellis-5", "front-8")
    add_valid(
        "trellis-dim-64",
        "64 channels, whose words have 48 bits per 16 channels",
        lambda: keys_file(v, runs=(1,), heads=1),
        "trellis-5",
        "front-8",
    )
    steps = dataclasses.replace(TRELLIS, table=STEPS)  # type: ignore[call-arg]
    example = overwrite("0.k.codes.0", 0, "4eb3"), overwrite("0.k.norm", 0, "0043")
    add_valid("trellis-example", "the page's example", lambda: keys_file(steps, *example, runs=(1,), tail=0, heads=1), "trellis-5")
    ends = struct.pack("<4e", -1.0, 1.0, 0.0, -0.0) + STEPS[8:]
    changed = dataclasses.replace(TRELLIS, table=ends)  # type: ignore[call-arg]
    add_valid(
        "trellis-ends-of-a-table",
        "a table with -1, 1, and zeros of both signs",
        lambda: keys_file(changed, overwrite("0.k.codes.0", 0, "0000")),
        "trellis-4",
    )
    shows = "subnormal and negative norms, and norms of zero"
    add_valid(
        "trellis-special-norms", shows, lambda: keys_file(TRELLIS, overwrite("0.k.norm", 0, "0100 ff83 0080")), "trellis-5", "front-1"
    )


def add_refused() -> None:
    names = list(TRELLIS.params())
    for name, order, shows in (
        ("missing", names[:-1], "a parameter is missing"),
        ("unknown", [*names, "more"], "an additional parameter"),
        ("swapped", [*names[:-2], *names[:-3:-1]], "the last two parameters in the wrong order"),
        ("fields", [*names, "fields"], "the parameter fields, which only other codecs have"),
    ):
        add_invalid(
            f"trellis-parameters-{name}", "trellis-1", "InvalidHeader", shows, lambda o=order: keys_file(TRELLIS, reorder("codecs.0", *o))
        )
    for name, codec, changes, shows in (
        *ranges(TRELLIS, ("dim", 0, 1032), ("bits", 0, 5)),
        *words(TRELLIS, "norm", "rotation_kind"),
        ("state-bits-9", TRELLIS, {"state_bits": 9, "table": bytes(1024)}, "state_bits is 9, and table has 512 values"),
        ("state-bits-0", TRELLIS, {"state_bits": 0, "table": bytes(2)}, "state_bits is 0, and table has one value"),
        ("seed-string", TRELLIS, {"seed": "0"}, "seed is a string"),
        ("table-string", TRELLIS, {"table": "\0" * 512}, "table is a string"),
    ):
        add_alone(f"trellis-{name}", "trellis-2", codec, changes, shows)
    wide = create("trellis", 16, b="2", states="256", rotation="none")
    add_alone("trellis-bits-5-of-16-channels", "trellis-2", wide, {"bits": 5}, "5 bits of 16 channels, which are whole words")
    for dim in (7, 9, 12):
        add_alone(f"trellis-{2 * dim}-bits", "trellis-3", TRELLIS, {"dim": dim}, f"{dim} channels of 2 bits")
    one, above, nan, infinite = (bytes.fromhex(text) for text in ("003c", "013c", "007e", "00fc"))
    for name, table, shows in (
        ("short", STEPS[:-2], "table has a value too few"),
        ("long", STEPS + one, "table has a value too many"),
        ("odd", STEPS[:-1], "table ends in half a value"),
        ("above-1", STEPS[:-2] + above, "the last value of table is above 1"),
        ("nan", nan + STEPS[2:], "the first value of table is no number"),
        ("infinite", infinite + STEPS[2:], "the first value of table is infinite"),
    ):
        add_alone(f"trellis-table-{name}", "trellis-4", TRELLIS, {"table": table}, shows)
    add_header("trellis-table-of-a-side", "trellis-4", TRELLIS, "codecs.0.table", above + STEPS[2:], "a table whose first value is above 1")
    add_invalid(
        "not-finite-trellis-norm",
        "front-13",
        "InvalidPayload",
        "an infinite norm",
        lambda: keys_file(TRELLIS, overwrite("0.k.norm", 0, "007c")),
    )
    add_invalid(
        "rotation-of-trellis",
        "front-7",
        "InvalidHeader",
        "hadamard at head dim 52",
        lambda: keys_file(create("trellis", 52, b="4", states="256", rotation="none"), edit("codecs.0.rotation_kind", "hadamard")),
    )
