"""Valid vectors for arithmetic that other vectors do not cover: sizes at limits, and zeros, whose tolerance is its smallest term."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvpack.formats.klt import Klt
from spec.generate.input_vectors import ids, with_features
from spec.generate.sidecar_vectors import with_positions
from spec.generate.valid_vectors import add
from support.file_parts import keys_file
from support.strategies import create

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.file_parts import Parts


VALID = Path(__file__).resolve().parents[2] / "spec" / "vectors" / "valid"


def zeros(*names: str, size: int | None = None) -> Callable[[Parts], None]:
    """Return a change that sets the first ``size`` bytes of tensors to zero, or all bytes if ``size`` is None."""

    def apply(parts: Parts) -> None:
        for name in names:
            number = parts.tensor(f"0.k.{name}")
            stored = parts.tensors[number]
            count = len(stored) if size is None else size
            parts.tensors[number] = bytes(count) + stored[count:]

    return apply


def add_all() -> None:
    means = create("group", 8, "k", b="2", g="4", axis="channel", mean="8")
    for name, shows, codec, change, rules in (
        (
            "angle-norms",
            "norms in binary32",
            create("angle", 6, n="100", norm="fp32", rotation="none"),
            zeros("norm", size=12),
            ("angle-4",),
        ),
        (
            "angle-range",
            "step and minimum",
            create("angle", 6, n="100", norm="linear8", rotation="none"),
            zeros("range", size=4),
            ("angle-4",),
        ),
        ("rotated-angle", "norms in binary32, rotated", create("angle", 8, n="100", norm="fp32"), zeros("norm", size=16), ("front-8",)),
        ("rotated-scalar", "a norm, rotated", create("scalar", 8, b="2"), zeros("norm", size=2), ("front-8",)),
        ("klt", "all rows of a basis", create("klt", 3, rows="fp16"), zeros("rows"), ("klt-8",)),
        ("group-and-key-mean", "scales of the codec and of means", means, zeros("scales", "key_mean_scale"), ("side-cars-10",)),
        (
            "group-and-qjl",
            "scales and norms of residuals",
            create("group", 8, b="2", g="4", axis="channel", qjl="fp16"),
            zeros("scales", "qjl_norm"),
            ("side-cars-10",),
        ),
        (
            "angle-and-channel-scale",
            "norms before a channel scale",
            create("angle", 8, "k", n="100", norm="fp32", rotation="none", channel_scale="fp16"),
            zeros("norm", size=16),
            ("side-cars-10",),
        ),
    ):
        add(f"zeros-of-{name}", f"zeros: {shows}", lambda c=codec, z=change: keys_file(c, z, heads=1), *rules)  # type: ignore[misc]
    bytes_of_norms = create("scalar", 2, b="1", rotation="none", norm="log8")
    for size in (1, 17, 129, 241, 257, 1025):
        shows = f"a tensor of {size} bytes, the least that XXH3 takes in another way than those before"
        add(f"digest-of-{size}-bytes", shows, lambda n=size: keys_file(bytes_of_norms, runs=(n,), tail=0, heads=1), "container-20")  # type: ignore[misc]
    wide = create("octahedral", 73, b="2", arrangement="direct", rotation="none")
    add("octahedral-direct-dim-73", "25 triplets in a column for 48", lambda: keys_file(wide, heads=1), "octahedral-6")
    heads = Klt.from_widths(11, bytes(32), 0, "k", b"\2\3", "fp16", "fp16", per_head=True)
    add(
        "klt-heads-of-nine-bits", "a short run of three columns, whose nine bits take two bytes", lambda: keys_file(heads, heads=1), "klt-8"
    )
    for name, shows in (
        ("layer-state-of-two-sequences", "ids of two sequences, with states of two sequences"),
        ("layer-state-of-no-sides", "ids in a file without sides, whose token range is empty: they are ignored"),
    ):
        data = (VALID / f"{name}.kvpack").read_bytes()
        of = name.removeprefix("layer-state-of-")
        add(
            f"token-ids-beside-states-of-{of}",
            shows,
            lambda d=data: with_features(d, token_ids__0=ids(3, 4)),
            "container-74",
            "container-78",
        )  # type: ignore[misc]
    add("side-car-raw-positions-above-65536", "raw tokens before and after the 65,536th token", positions, "side-cars-10")


def positions() -> bytes:
    codec = create("group", 1, "k", b="1", g="128", raw_first="1")
    words = [[2, 0, 0, 0], [65535, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0]]
    return keys_file(codec, lambda parts: with_positions(parts, words), runs=(65540,), tail=0, heads=1)
