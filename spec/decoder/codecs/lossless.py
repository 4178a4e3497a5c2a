"""Codec lossless (spec/codecs/lossless.md)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from ..codec import RAW_DTYPES, Codec, Digits, Numbers, NumberStream, make_packings, single_digit, take_parameters
from ..contents import Side
from ..conventions import numbers
from ..packing import MAX_DIM
from ..rans import RANS_LANES, check_frequencies, decode_chunk
from ..refusal import require

FIELD_BITS = {"bf16": (8, 7), "fp16": (5, 10)}
"""Number of bits of the exponent field and of the fraction field."""


def lossless(entry: Mapping[str, Any]) -> Codec:
    page = "codecs/lossless.md"
    dim, dtype, chunk, fields = take_parameters(
        entry, {"dim": range(1, MAX_DIM + 1), "dtype": FIELD_BITS, "chunk": (16, 32, 64, 128, 256), "fields": dict}
    )
    require(
        chunk * dim <= 65536,
        f"{page}, Parameters and ranges",
        f"a chunk of {chunk} tokens and {dim} channels has {chunk * dim} symbols, expected at most 65536",
    )
    e_bits, m_bits = FIELD_BITS[dtype]
    codes = make_packings("lossless", fields, dim, {"signed_fractions": single_digit(2 ** (m_bits + 1))})
    streams = [
        NumberStream("frequencies", "U16", (2**e_bits,), per="run"),
        NumberStream("states", "U16", (2 * RANS_LANES,), chunk),
        NumberStream("word_counts", "U16", (), chunk),
        NumberStream("words", "U16", (), per="entry"),
    ]

    def exponent_digits(side: Side, prefix: str) -> dict[str, list[list[list[int]]]]:
        """Return the exponent fields as digits of every token (section Decode, step 1)."""
        stored: dict[str, list[Any]] = side.numbers
        counts, words_of_all = stored["word_counts"], stored["words"]
        total = sum(counts)
        require(total == side.entries["words"], f"{page}, Layout", f"{prefix}word_counts sum to {total}, expected {side.entries['words']}")
        groups = [(run, min(chunk, tokens - first)) for run, tokens in enumerate(side.runs) for first in range(0, tokens, chunk)]
        rows: list[list[list[int]]] = [[] for _ in range(side.batch * side.heads * side.packed if side.packed else 0)]
        words_read = token = 0
        for group, (run, tokens) in enumerate(groups):
            for head in range(side.batch * side.heads):
                where = f"{prefix}chunk {group} of head {head}"
                row, size = head * len(groups) + group, 2**e_bits
                table = stored["frequencies"][(head * len(side.runs) + run) * size :][:size]
                check_frequencies(where, table)
                chunk_words = words_of_all[words_read : words_read + counts[row]]
                symbols = decode_chunk(where, table, stored["states"][row * 64 : row * 64 + 64], chunk_words, tokens * dim)
                words_read += counts[row]
                for t in range(tokens):
                    rows[head * side.packed + token + t] = [symbols[t * dim : (t + 1) * dim]]
            token += tokens
        return {"exponents": rows}

    def decode(digits: Digits, row: Numbers) -> list[float]:
        values = zip(digits["exponents"][0], digits["signed_fractions"][0], strict=True)
        bits = [(c >> m_bits) << 15 | e << m_bits | c % 2**m_bits for e, c in values]
        return numbers(struct.pack(f"<{dim}H", *bits), RAW_DTYPES[dtype])

    return Codec("lossless", dim, chunk, codes, streams, decode, lambda *_: [0.0] * dim, derive_digits=exponent_digits)
