"""The tables of kvpack bench store: measurements next to their targets."""

from __future__ import annotations

from typing import Any

from kvpack.output import bytes_text, print_table

FLAT_TARGET = 1.5
"""The largest ratio of the cost of a chunk among the most entries to that among the fewest that counts as flat."""


def show(report: dict[str, Any]) -> None:
    """Print the tables: measurements next to their targets."""
    shape = f"{report['layers']} layers, {report['heads']} heads of dim {report['dim']}, chunks of {report['chunk']} tokens"
    match, load, fewest, most = report["match"], report["load"], report["entries"][0], report["entries"][-1]
    print_table(
        f"{report['recipe']}, {shape}",
        ["what", "measured", "target", ""],
        [
            _row(f"match of {match['tokens']:,} tokens, {match['chunks']} chunks", match["ms"], match["target_ms"], " ms", False),
            _row(f"load of {load['tokens']:,} tokens, of the speed of a read", load["of_read_and_digest"], load["target"], " x", True),
            *(
                _row(f"{name} among {most['entries']:,} entries, of {fewest['entries']:,}", most[us] / fewest[us], FLAT_TARGET, " x", False)
                for name, us in (("put", "put_us"), ("match", "match_us"), ("get", "get_us"))
            ),
            ["bytes stored per token", bytes_text(round(load["bytes_per_token"])), "", ""],
            ["bytes per token of bf16 safetensors", bytes_text(round(load["safetensors_bytes_per_token"])), "", ""],
        ],
    )
    print_table(
        "load, from the page cache",
        ["way", "ms", "GB/s", "tokens/s"],
        [[row["name"], f"{1000 * row['seconds']:.1f}", f"{row['gb_per_s']:.2f}", f"{row['tokens_per_s']:,.0f}"] for row in load["rows"]],
    )
    size = report["operations"][0]["entry_bytes"]
    print_table(
        f"entries of {size:,} bytes",
        ["processes", "puts/s", "gets/s", "failed"],
        [
            [str(row["processes"]), f"{row['puts_per_s']:,.0f}", f"{row['gets_per_s']:,.0f}", str(row["failed"])]
            for row in report["operations"]
        ],
    )
    print_table(
        "microseconds per chunk, by the entries of the folder",
        ["entries", "put", "match", "get"],
        [[f"{row['entries']:,}", *(f"{row[f'{name}_us']:.0f}" for name in ("put", "match", "get"))] for row in report["entries"]],
    )
    print("load maps the files, checks every digest and makes the pages.")
    print("A read copies each file to the same memory, and computes its digest.")


def _row(what: str, measured: float, target: float, unit: str, more: bool) -> list[str]:
    met = measured >= target if more else measured <= target
    return [what, f"{measured:.2f}{unit}", f"{'at least' if more else 'at most'} {target:g}{unit}", "met" if met else "missed"]
