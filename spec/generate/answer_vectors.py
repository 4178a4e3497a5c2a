"""Vectors for questions of authors of readers: bases without packed tokens, differing batches, positions of texts, and zeros."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvpack.coding.bases import Basis
from spec.generate.balanced_vectors import alone, keys
from spec.generate.container_vectors import in_text
from spec.generate.input_vectors import THREE, ids, inputs, rows, with_features
from spec.generate.invalid_vectors import RAW, add
from spec.generate.valid_vectors import add as add_valid
from support.file_parts import change_file, file_of, keys_file, overwrite, random_side
from support.klt_bases import codec_of, transform_of

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

VALID = Path(__file__).resolve().parents[2] / "spec" / "vectors" / "valid"


def add_all() -> None:
    for add_vectors in (add_bases, add_ids, add_front):
        add_vectors()


def of_raw_tokens(codec: Codec) -> bytes:
    """Return a file whose keys are two raw tokens without packed tokens."""
    return keys_file(codec, runs=(), tail=2)


def add_bases() -> None:
    basis = Basis.from_bytes((VALID / "basis-two-layers.kvpack").read_bytes())
    frames = Basis.from_bytes((VALID / "basis-frames.kvpack").read_bytes())
    (layer, side) = next(iter(basis.sides()))
    dim = basis.rows(layer, side).dim
    (of_frames, frames_side) = next(place for place in frames.sides() if frames.frames(*place) is not None)
    for name, rule, codec in (
        ("klt", "klt-5", codec_of(basis, layer, side, bytes([2]) * -(-dim // 16))),
        ("transform", "transform-5", transform_of(frames, of_frames, frames_side, 20)),
        ("balanced", "side-cars-16", keys("scalar", 6, b="2", rotation="none")),
    ):
        shows = "a side with only raw tokens, whose basis is not given to the reader"
        add(f"{name}-basis-of-raw-tokens-not-given", rule, "MissingBasis", shows, lambda c=codec: of_raw_tokens(c))  # type: ignore[misc]
    shows = "a frequency of negative zero"
    add_valid("basis-balanced-minus-zero", shows, lambda: change_file(alone(), overwrite("0.state.rope.halves", 8, "00000080")), "basis-15")


def add_ids() -> None:
    two, three = (random_side(RAW, (3,), 0, batch, 1) for batch in (2, 3))
    layers = file_of((three, None), (two, None))
    for name, shows, known in (
        ("fewest", "two sequences, the smallest number that a layer has", rows(ids(7, 8), ids(9, 8))),
        ("most", "three sequences where a layer has two: they count as absent", rows(ids(7), ids(9), ids(8))),
    ):
        add_valid(f"row-ids-of-the-{name}-sequences", shows, lambda k=known: with_features(layers, row_ids__0=k), "container-75")  # type: ignore[misc]
    shows = "texts at the end of the range, then at two positions before its start, one of them twice"
    texts = inputs(ids(5), (6, b"last"), (0, b"a"), (1, b"b"), (0, b"c"))
    add_valid("inputs-with-texts-in-any-order", shows, lambda: with_features(THREE, inputs=texts), "container-73")
    shows = "ids in a file without sides or states, which has no sequences"
    add_valid("token-ids-without-sides", shows, lambda: with_features(file_of((None, None)), token_ids__0=ids(5, 6)), "container-78")


def add_front() -> None:
    shows = "a quotation mark after the major number 1"
    add("json-header-ends-with-version-1", "container-5", "InvalidHeader", shows, lambda: in_text('"kvpack":"1 ', '"kvpack":"1"'))
