"""Encoding and decoding of random tensors by codecs with random options, for a given time.

    python -m fuzz.roundtrip --seconds 60 --codec group

Every example is encoded, compared with its layout, checked, and decoded within its codec's bound (tests/support/strategies.py has a row for
each codec). Prints the number of examples, the slowest ones and the failures. Exits with 1 if there are failures.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from kvpack.formats import CODECS
from support.strategies import check_round_trip, codecs, tensors

EXAMPLES_AT_A_TIME = 50
MAX_FAILURES = 5


@dataclass
class Report:
    """Results of a run: examples per codec, examples refused by an encoder, the slowest examples, and the smallest failing examples."""

    examples: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    slowest_seconds: float = 0.0
    slowest: str = "none"
    failures: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return the report as text."""
        total = ", ".join(f"{name} {count}" for name, count in sorted(self.examples.items()))
        return [
            f"examples: {self.examples.total()} ({total}), {self.refused} refused as too large",
            f"slowest: {self.slowest_seconds * 1e3:.0f} ms, {self.slowest}",
            f"failures: {len(self.failures)}",
            *self.failures,
        ]


def run(seconds: float, codec_id: str | None, first_seed: int) -> Report:
    """Run examples of ``codec_id``, or of every codec if it is None, for ``seconds`` seconds.

    At least one batch runs. Each batch has its own seed. The run ends early after ``MAX_FAILURES`` failing batches.
    """
    report = Report()
    end = time.monotonic() + seconds
    number = first_seed
    while True:
        try:
            _batch(number, codec_id, report)
        except Exception:
            report.failures.append(f"--seed {number}:\n{traceback.format_exc()}")
        number += 1
        if time.monotonic() >= end or len(report.failures) == MAX_FAILURES:
            return report


def _batch(number: int, codec_id: str | None, report: Report) -> None:
    @seed(number)
    @settings(
        max_examples=EXAMPLES_AT_A_TIME,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def round_trip(data: st.DataObject) -> None:
        codec = data.draw(codecs(codec_id), label="codec")
        x = data.draw(tensors(codec.dim), label="x")
        start = time.perf_counter()
        report.refused += not check_round_trip(codec, x)
        elapsed = time.perf_counter() - start
        report.examples[codec.id] += 1
        if elapsed > report.slowest_seconds:
            report.slowest_seconds, report.slowest = elapsed, f"{codec} on {list(x.shape)}"

    round_trip()


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="start no new batch after this many seconds (default 60)")
    parser.add_argument("--codec", choices=sorted(CODECS), help="run only this codec (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first batch; a failure prints the seed that repeats it")
    arguments = parser.parse_args()
    report = run(arguments.seconds, arguments.codec, arguments.seed)
    print("\n".join(report.lines()))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
