"""Codec transform (spec/codecs/transform.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..basis import ROPE, TABLES
from ..codec import Codec, Digits, Numbers, NumberStream, take_parameters
from ..contents import Side
from ..conventions import f32
from ..packing import MAX_DIM
from ..rans import RANS_LANES, decode_symbols, read_first_states
from ..refusal import require


def transform(entry: Mapping[str, Any]) -> Codec:
    page = "codecs/transform.md"
    dim, digest, layer, basis_side, scope, step, chunk = take_parameters(
        entry,
        {
            "dim": range(1, MAX_DIM + 1),
            "basis": bytes,
            "layer": range(4096),
            "side": ("k", "v"),
            "scope": ("head", "layer"),
            "step": range(256),
            "chunk": (16, 32, 64, 128, 256),
        },
    )
    require(len(digest) == 32, f"{page}, Parameters and ranges", f"basis has {len(digest)} bytes, expected 32")
    require(
        chunk * dim <= 65536,
        f"{page}, Parameters and ranges",
        f"a chunk of {chunk} tokens and {dim} channels has {chunk * dim} symbols, expected at most 65536",
    )
    positions = [NumberStream("positions", "U16", (2,), chunk, per_head=False)] if basis_side == "k" else []
    streams = [
        *positions,
        NumberStream("tokens", "U16", (), chunk, per_head=False),
        NumberStream("columns", "U16", (), chunk),
        NumberStream("states", "U16", (2 * RANS_LANES,), chunk),
        NumberStream("word_counts", "U16", (2,), chunk),
        NumberStream("words", "U16", (), per="entry"),
    ]

    def chunk_word_counts(side: Side) -> list[int]:
        halves: list[Any] = side.numbers["word_counts"]
        return [low + 65536 * high for low, high in zip(halves[::2], halves[1::2], strict=True)]

    def group_sizes(side: Side) -> list[int]:
        return [min(chunk, run - first) for run in side.runs for first in range(0, run, chunk)]

    def check_sizes(side: Side, prefix: str) -> None:
        total, rule, groups = sum(chunk_word_counts(side)), f"{page}, Layout", group_sizes(side)
        require(total == side.entries["words"], rule, f"{prefix}word_counts sum to {total}, expected {side.entries['words']}")
        for row, found in enumerate(side.numbers["tokens"]):
            require(
                found == groups[row % len(groups)], rule, f"{prefix}tokens is {found} in row {row}, expected {groups[row % len(groups)]}"
            )
        for found in side.numbers["columns"]:
            require(found <= dim, rule, f"{prefix}columns is {found}, expected at most {dim}")
        stored: dict[str, list[Any]] = side.numbers
        read_first_states(f"{prefix}states", stored["states"])

    def column_digits(side: Side, prefix: str) -> dict[str, list[list[list[int]]]]:
        """Return the digits of the columns of each token of a head (section Decode, steps 1 and 2).

        A token has its number in its group, and the table, symbol and level of each column.
        """
        stored: dict[str, list[Any]] = side.numbers
        counts, groups = chunk_word_counts(side), group_sizes(side)
        heads, words_read, token = side.heads, 0, 0
        rows: list[list[list[int]]] = [[] for _ in range(side.batch * heads * side.packed)]
        for group, tokens in enumerate(groups):
            for b in range(side.batch):
                # For each token, by column of block h.
                blocks: list[list[list[list[int]]]] = []
                for h in range(heads):
                    row = (b * heads + h) * len(groups) + group
                    head_basis = side.basis_parts[h]
                    scales = head_basis["scales"] if scope == "head" else head_basis["scales"][h::heads]
                    alphabet = int(head_basis["alphabet"][0])
                    last = len(head_basis[TABLES[0]]) // alphabet - 1
                    table_numbers = [min(max((step - int(s)) // 4, 0), last) for s in scales]
                    tables = [[int(f) for f in head_basis[TABLES[0]][number * alphabet :][:alphabet]] for number in table_numbers]
                    own_words = stored["words"][words_read : words_read + counts[row]]
                    words_read += len(own_words)
                    first_states = stored["states"][row * 64 : row * 64 + 64]
                    where = f"{prefix}chunk {group} of head {b * heads + h}"
                    by_column = block_levels(where, tables[: stored["columns"][row]], first_states, own_words, tokens)
                    by_column += [[(-1, 0)] * tokens] * (dim - len(by_column))
                    blocks.append([[[n, *by_column[c][t]] for c, n in enumerate(table_numbers)] for t in range(tokens)])
                for h in range(heads):
                    for t in range(tokens):
                        columns = blocks[h][t] if scope == "head" else [blocks[j % heads][t][j // heads] for j in range(heads * dim)]
                        rows[(b * heads + h) * side.packed + token + t] = [[t], *columns]
            token += tokens
        return {"columns": rows}

    def frame_values(digits: Digits, row: Numbers) -> tuple[list[float], list[float]]:
        """Return u, and the tolerance of each of its channels."""
        alphabet, values, frame = int(row["alphabet"][0]), row[TABLES[1]], row["frame"]
        delta = 2.0 ** (-step / 16)
        u, tau = [[frame[c]] for c in range(dim)], [abs(frame[c]) for c in range(dim)]
        for j, (table, symbol, level) in enumerate(digits["columns"][1:]):
            if symbol >= 0:
                v = delta * (level if symbol == 0 else values[table * (alphabet - 1) + symbol - 1])
                for c in range(dim):
                    product = v * frame[(1 + j) * dim + c]
                    u[c].append(product)
                    tau[c] += abs(product)
        return [math.fsum(terms) for terms in u], [2.0**-18 * one + 2.0**-126 for one in tau]

    def rotated_pairs(digits: Digits, row: Numbers) -> list[tuple[int, int, float]]:
        """Return the pairs of channels that RoPE rotates, each with its angle."""
        halves, neighbours = (row.get(name, []) for name in ROPE)
        if not halves and not neighbours:
            return []
        low, high = row["positions"]
        position = low + 65536 * high + digits["columns"][0][0]
        if halves:
            return [(i, i + len(halves), position * f) for i, f in enumerate(halves)]
        return [(2 * i, 2 * i + 1, position * f) for i, f in enumerate(neighbours)]

    def decode(digits: Digits, row: Numbers) -> list[float]:
        x, _ = frame_values(digits, row)
        for a, b, theta in rotated_pairs(digits, row):
            x[a], x[b] = x[a] * math.cos(theta) - x[b] * math.sin(theta), x[b] * math.cos(theta) + x[a] * math.sin(theta)
        return [f32(one) for one in x]

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        u, tau = frame_values(digits, row)
        for a, b, _ in rotated_pairs(digits, row):
            tau[a] = tau[b] = tau[a] + tau[b] + 2.0**-18 * (abs(u[a]) + abs(u[b]))
        return tau

    basis = digest, layer, basis_side
    codec = Codec("transform", dim, chunk, {}, streams, decode, tolerance, basis=basis, scope=scope)
    return replace(codec, derive_digits=column_digits, check_sizes=check_sizes)


def block_levels(
    where: str, tables: Sequence[Sequence[int]], first_states: Sequence[int], chunk_words: Sequence[int], tokens: int
) -> list[list[tuple[int, int]]]:
    """Return the symbol, and after an escape the level, of each token in each column that has symbols."""
    symbols, words_read = decode_symbols(where, [table for table in tables for _ in range(tokens)], first_states, chunk_words)
    escapes = iter(range(words_read, len(chunk_words), 2))
    needed = words_read + 2 * symbols.count(0)
    require(needed == len(chunk_words), "codecs/transform.md, Decode", f"{where} needs {needed} words, but has {len(chunk_words)}")
    result = []
    for symbol in symbols:
        at = next(escapes) if symbol == 0 else 0
        level = chunk_words[at] + 65536 * chunk_words[at + 1] if symbol == 0 else 0
        result.append((symbol, level - 2**32 if level >= 2**31 else level))
    return [result[first : first + tokens] for first in range(0, len(result), tokens)]
