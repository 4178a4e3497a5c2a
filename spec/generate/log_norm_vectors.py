"""Vectors of 8-bit norms: every byte value, and the feature that declares them."""

from __future__ import annotations

from spec.generate.invalid_vectors import SCALAR, add, add_header
from spec.generate.valid_vectors import add as add_valid
from support.file_parts import edit, keys_file, overwrite
from support.strategies import create


def add_all() -> None:
    plain = create("scalar", 2, b="1", rotation="none", norm="log8")
    every = overwrite("0.k.norm", 0, bytes(range(256)).hex())
    add_valid(
        "log-norms-all", "every byte value as a norm", lambda: keys_file(plain, every, runs=(256,), heads=1), "scalar-7", "container-64"
    )
    for codec, rule in (
        (create("scalar", 12, b="2", high="3", norm="log8"), "scalar-7"),
        (create("octahedral", 7, b="3", rotation="none", norm="log8"), "octahedral-6"),
        (create("octahedral", 12, b="2", arrangement="direct", norm="log8"), "octahedral-6"),
        (create("trellis", 16, b="1", states="256", norm="log8"), "trellis-5"),
        (create("scalar", 6, "k", b="2", norm="log8", rotation="none", mean="8", raw_first="1"), "side-cars-10"),
    ):
        name = f"log-norms-{codec.id}-{codec.dim}"
        shows = f"norms of 8 bits of {codec.id}, two sequences and three heads"
        add_valid(name, shows, lambda c=codec: keys_file(c, runs=(5,), batch=2, heads=3), rule, "front-12", "container-64")
    add_header("log-norms-not-required", "container-64", plain, "required", [], "8-bit norms without the feature that they require")
    add_header("log-norms-required-of-none", "container-64", SCALAR, "required", ["log-norms"], "the required feature without 8-bit norms")
    quaternion = create("quaternion", 4, s="2", r="2")
    add_header("log-norms-of-quaternion", "quaternion-2", quaternion, "codecs.0.norm", "log8", "a scale of 8 bits")
    wrong = edit("codecs.0.norm", "fp16"), edit("required", [])
    add(
        "log-norms-as-fp16",
        "container-16",
        "InvalidHeader",
        "norm is fp16, but the tensor contains bytes",
        lambda: keys_file(plain, *wrong),
    )
