"""The entropy coder rANS (spec/rans.md)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from .refusal import require

RANS_LANES = 32
RANS_TOTAL = 4096
MIN_STATE = 65536


def check_frequencies(where: str, table: Sequence[int]) -> None:
    require(sum(table) == RANS_TOTAL, "rans.md, Tables", f"{where}: the frequencies sum to {sum(table)}")


def decode_chunk(where: str, table: Sequence[int], first_states: Sequence[int], chunk_words: Sequence[int], n: int) -> list[int]:
    """Return the ``n`` symbols of a chunk in which all symbols have the same table (section Decode)."""
    symbols, words_read = decode_symbols(where, [table] * n, first_states, chunk_words)
    require(words_read == len(chunk_words), "rans.md, Decode", f"{where} uses only {words_read} of its {len(chunk_words)} words")
    return symbols


@cache
def slots(table: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return, for a table, the sum of frequencies below every symbol, and the symbol of every slot."""
    return list(accumulate(table, initial=0)), [s for s, frequency in enumerate(table) for _ in range(frequency)]


def read_first_states(where: str, halves: Sequence[int]) -> list[int]:
    """Return the first states of the lanes, given their low and high halves (section Segments)."""
    states = [low + 65536 * high for low, high in zip(halves[::2], halves[1::2], strict=True)]
    least = min(states, default=MIN_STATE)
    require(least >= MIN_STATE, "rans.md, Segments", f"{where}: a first state is {least}, expected at least 2^16")
    return states


def decode_symbols(
    where: str, tables: Sequence[Sequence[int]], first_states: Sequence[int], chunk_words: Sequence[int]
) -> tuple[list[int], int]:
    """Return the symbols of a chunk and the number of words that they use (section Decode). Each symbol has its own table."""
    states = read_first_states(where, first_states)
    symbols, words_read = [], 0
    for i, table in enumerate(tables):
        below, symbol_of = slots(tuple(table))
        x = states[i % RANS_LANES]
        slot = x % RANS_TOTAL
        s = symbol_of[slot]
        x = table[s] * (x // RANS_TOTAL) + slot - below[s]
        if x < MIN_STATE:
            require(words_read < len(chunk_words), "rans.md, Decode", f"{where} needs more than its {len(chunk_words)} words")
            x = x * 65536 + chunk_words[words_read]
            words_read += 1
        states[i % RANS_LANES] = x
        symbols.append(s)
    require(max(states) == MIN_STATE, "rans.md, Decode", f"{where} ends in the state {max(states)}, expected 2^16")
    return symbols, words_read
