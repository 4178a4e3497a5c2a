"""Conformance vectors of token ids, and of inputs that token ids do not determine (spec/container.md, Token ids)."""

from __future__ import annotations

import struct

from spec.generate.invalid_vectors import RAW
from spec.generate.valid_vectors import add
from support.file_parts import Parts, keys_file

THREE = keys_file(RAW, runs=(3,), tail=0, heads=1)
"""File with three tokens of one sequence."""


def with_features(data: bytes = THREE, **features: bytes) -> bytes:
    """Return ``data`` with additional ignorable features.

    In their names, a double underscore stands for a period, and a single one for a hyphen.
    """
    parts = Parts.of(data)
    added = {name.replace("__", ".").replace("_", "-"): content for name, content in features.items()}
    parts.header["ignorable"] = dict(sorted((parts.header["ignorable"] | added).items()))
    return parts.joined()


def ids(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def inputs(known: bytes, *undetermined: tuple[int, bytes]) -> bytes:
    texts = b"".join(struct.pack("<QI", position, len(text)) + text for position, text in undetermined)
    return struct.pack("<Q", len(known) // 4) + known + texts


def rows(*of_sequences: bytes) -> bytes:
    return struct.pack("<IQ", len(of_sequences), len(of_sequences[0]) // 4) + b"".join(of_sequences)


def add_all() -> None:
    for add_vectors in (add_inputs, add_token_ids, add_row_ids):
        add_vectors()


def add_inputs() -> None:
    five, text = ids(5, 6), (2**53 + 1, "€".encode())
    for name, shows, data in (
        ("inputs-of-all-tokens", "ids of all tokens, up to the largest", inputs(ids(0, 2**31, 2**32 - 1))),
        ("inputs-of-no-ids", "no ids, and no undetermined inputs", inputs(b"")),
        ("inputs-with-texts", "two ids and two texts, one at a position above 2^53", inputs(five, (4, b"an image"), text)),
    ):
        add(name, shows, lambda d=data: with_features(inputs=d), "container-73")  # type: ignore[misc]
    for name, shows, data in (
        ("no-bytes", "no bytes", b""),
        ("seven-bytes", "seven bytes", bytes(7)),
        ("ids-missing", "three ids in the space of two", struct.pack("<Q", 3) + five),
        ("more-ids-than-64-bits-count", "2^62 ids, whose bytes are a multiple of 2^64", struct.pack("<Q", 2**62)),
        ("cut-in-a-position", "ends within the position of a text", inputs(five) + bytes(7)),
        ("cut-in-a-length", "ends within the length of a text", inputs(five) + bytes(11)),
        ("cut-in-a-text", "ends within a text", inputs(five, (4, b"abc"))[:-1]),
        ("an-empty-text", "a text of no bytes", inputs(five, (4, b""))),
        ("a-text-of-4-gib", "a text whose length is 4,294,967,295", inputs(five) + struct.pack("<QI", 4, 2**32 - 1) + b"abc"),
        ("no-utf-8", "a text that is not UTF-8", inputs(five, (4, b"\xff"))),
        ("a-surrogate", "a text with a surrogate", inputs(five, (4, b"\xed\xa0\x80"))),
    ):
        shows = f"{shows}: there are no ids, and ids determine nothing"
        add(f"inputs-{name}-are-none", shows, lambda d=data: with_features(inputs=d), "container-73")  # type: ignore[misc]
    shows = "four ids for three tokens: the last is ignored"
    add("inputs-of-more-ids-than-tokens", shows, lambda: with_features(inputs=inputs(ids(5, 6, 7, 8))), "container-78")


def add_token_ids() -> None:
    two = inputs(ids(5, 6))
    parts = {"token_ids__0": ids(5)[:3], "token_ids__1": b"", "token_ids__2": b"\0" + ids(6)}
    for name, shows, features in (
        ("alone", "token-ids.0 without inputs", {"token_ids__0": ids(5, 6, 7)}),
        (
            "after-inputs",
            "token-ids.0 that starts with the ids of inputs and continues them",
            {"inputs": two, "token_ids__0": ids(5, 6, 7)},
        ),
        (
            "beside-other-inputs",
            "ids that differ from those of inputs: they count as absent",
            {"inputs": two, "token_ids__0": ids(5, 7, 7)},
        ),
        ("fewer-than-inputs", "fewer ids than in inputs: they count as absent", {"inputs": two, "token_ids__0": ids(5)}),
        ("beside-no-inputs", "inputs in another format, which count as absent", {"inputs": b"\1", "token_ids__0": ids(9, 8)}),
        ("of-ten-bytes", "not a whole number of ids: they count as absent", {"token_ids__0": ids(5, 6) + b"\7\0"}),
        ("in-parts", "an id whose bytes are in two features, with an empty feature between them", parts),
        (
            "with-a-gap",
            "token-ids.1 is missing: token-ids.2 and token-ids.3 are ignored",
            {"token_ids__0": ids(5), "token_ids__2": ids(6), "token_ids__3": ids(7)},
        ),
        ("without-the-first", "token-ids.0 is missing: there are no ids", {"token_ids__1": ids(5, 6, 7)}),
        ("of-another-number", "token-ids.00, whose number is not canonical", {"token_ids__00": ids(5, 6, 7)}),
    ):
        add(f"token-ids-{name}", shows, lambda f=features: with_features(**f), "container-74")  # type: ignore[misc]
    shows = "five ids for three tokens: the last two are ignored"
    add("token-ids-of-more-than-the-tokens", shows, lambda: with_features(token_ids__0=ids(1, 2, 3, 4, 5)), "container-78")
    add("token-ids-of-two-features", "16,385 ids, one of them in the second feature", of_two_features, "container-74")


def of_two_features() -> bytes:
    known = struct.pack("<16385I", *(token * 7919 % 2**32 for token in range(16385)))
    data = keys_file(RAW, runs=(16385,), tail=0, heads=1)
    return with_features(data, token_ids__0=known[:65536], token_ids__1=known[65536:])


def add_row_ids() -> None:
    batch = keys_file(RAW, runs=(3,), tail=0, heads=1, batch=2)
    first, second = ids(7, 8), ids(9, 8)
    both, shared = rows(first, second), {"inputs": inputs(ids(5))}
    for name, shows, features in (
        ("after-token-ids", "ids of two sequences after a shared one", {"token_ids__0": ids(5), "row_ids__0": both}),
        ("alone", "ids of two sequences", {"row_ids__0": both}),
        ("in-parts", "two features", {"row_ids__0": both[:13], "row_ids__1": both[13:]}),
        (
            "of-three-sequences",
            "three sequences in a file with two: they count as absent",
            shared | {"row_ids__0": rows(first, second, first)},
        ),
        ("of-a-byte-more", "an extra byte after the ids: they count as absent", shared | {"row_ids__0": both + b"\0"}),
        ("of-a-byte-less", "a byte of the ids is missing: they count as absent", shared | {"row_ids__0": both[:-1]}),
        ("of-eleven-bytes", "shorter than its numbers: the ids count as absent", shared | {"row_ids__0": both[:11]}),
        ("of-none", "no ids for any sequence", shared | {"row_ids__0": rows(b"", b"")}),
    ):
        add(f"row-ids-{name}", shows, lambda f=features: with_features(batch, **f), "container-75")  # type: ignore[misc]
    shows = "five ids for each of two sequences of three tokens, one of them shared: the last two are ignored"
    long = {"token_ids__0": ids(1), "row_ids__0": rows(ids(2, 3, 4, 5), ids(2, 4, 4, 5))}
    add("row-ids-of-more-than-the-tokens", shows, lambda: with_features(batch, **long), "container-78")
