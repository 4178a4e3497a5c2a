"""kvpack inspect: print the contents of a file according to its checked header, and the SHA-256 of a basis."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from kvpack.coding.inspection import inspect
from kvpack.errors import KvpackError, worst_exit_code
from kvpack.file.metadata import CHAT, CHAT_MESSAGES
from kvpack.output import add_json, bytes_text, format_count, print_json, print_report, print_table, printable


def add_command(commands: Any) -> None:
    description = "Show the layers, codecs, bits per value, streams, model and token range of a file, or one row for each of several files."
    parser = commands.add_parser("inspect", help="show the contents of files", description=description)
    parser.add_argument("files", metavar="FILE", nargs="+", help="a kvpack file or basis")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the summary of one file, or one row per file. Returns the worst exit code of the rejected files."""
    if len(arguments.files) == 1:
        summary = inspect(arguments.files[0])
        return print_report(summary, _print, arguments)
    summaries, codes = [], []
    for path in arguments.files:
        try:
            summaries.append(inspect(path))
        except KvpackError as error:
            codes.append(error.exit_code)
            print(f"kvpack: {printable(str(error))}", file=sys.stderr)
    if arguments.json:
        print_json(summaries)
    else:
        print_table(
            format_count(len(summaries), "file"),
            ["file", "model", "recipe", "layers", "tokens", "bits per value", "bytes"],
            (
                [
                    printable(str(summary["file"])),
                    printable(summary["model"].get("name", "")),
                    "a basis" if summary["is_basis"] else _recipe_text(summary["recipe"]),
                    str(len(summary["layers"])),
                    f"{summary['stop'] - summary['start']:,}",
                    f"{summary['bits_per_value']:.3f}",
                    bytes_text(summary["bytes"]),
                ]
                for summary in summaries
            ),
            text_columns=3,
        )
    return worst_exit_code(codes)


def _print(summary: dict[str, Any]) -> None:
    print(f"{printable(str(summary['file']))}: kvpack format {summary['format']}, {summary['bytes']:,} bytes")
    print(f"{summary['values']:,} values, {summary['bits_per_value']:.3f} bits per value (nominal {summary['nominal_bits']:.3f})")
    if summary["is_basis"]:
        print(f"a basis, which caches refer to by its SHA-256, {summary['sha256']}")
    else:
        recipe, short = printable(summary["recipe"]), _recipe_text(summary["recipe"])
        print(f"tokens {summary['start']} to {summary['stop']}, recipe {short or 'not named'}")
        if short != recipe:
            print(*(f"  {clause}" for clause in recipe.split(";")), sep="\n")
    model = {name: printable(str(value)) for name, value in summary["model"].items()}
    print(f"model {model.pop('name', '') or 'not named'}")
    for name, value in model.items():
        print(f"  {printable(name)} {value}")
    if summary["token_ids"] or summary["undetermined"]:
        other = "".join(f"; {printable(text)}" for text in summary["undetermined"])
        print(f"token ids of the first {summary['token_ids']:,} tokens{other}")
    for name, value in summary["metadata"].items():
        if name == CHAT_MESSAGES:
            print(f"a chat of {value} {'message' if value == 1 else 'messages'}")
        elif not name.startswith(CHAT):
            print(f"{printable(name)}: {printable(str(value))}")
    if summary["states"]:
        states = Counter(state["name"].partition(".")[0] for state in summary["states"])
        size = sum(state["stored_bytes"] for state in summary["states"])
        print(f"{len(summary['states']):,} states of {len(states):,} layers, {bytes_text(size)} bytes")
    for digest in summary["bases"]:
        print(f"needs the basis {digest.hex()}")
    _print_layers(summary)
    print("codecs:")
    for number, params in enumerate(summary["codecs"]):
        print(f"({number}) {_codec_text(params)}")
    print_table(
        "bytes by stream",
        ["stream", "bytes", "share"],
        ([name, bytes_text(count), f"{100 * count / summary['bytes']:.1f}%"] for name, count in summary["streams"].items() if count),
    )


def _print_layers(summary: dict[str, Any]) -> None:
    """Print the table of layers. Consecutive layers that differ only in size share a row."""
    # Parameters are below the table, which then fits in 80 characters.
    codecs = [f"{params['id']} ({number})" for number, params in enumerate(summary["codecs"])]
    whole = (summary["start"], summary["stop"])
    # Show the column only if some layer does not have all tokens.
    positions = any((side["start"], side["stop"]) != whole for layer in summary["layers"] for side in layer.values())
    rows = "rows" if summary["is_basis"] else "tokens"
    batched = any(side["batch"] != 1 for layer in summary["layers"] for side in layer.values())
    batch = ["batch"] if batched else []
    columns = ["layers", "side", "codec", *batch, "heads", rows, "raw\ntail", "dim", "bits per\nvalue", "bytes"]
    if positions:
        columns.insert(columns.index(rows) + 1, "positions")
    print_table(
        "layers",
        columns,
        (
            [
                f"{first}-{last}" if last > first else str(first),
                name,
                codecs[side["codec"]],
                *(str(side[key]) for key in (*batch, "heads", "tokens")),
                *([f"{side['start']} to {side['stop']}"] if positions else []),
                *(str(side[key]) for key in ("tail_tokens", "dim")),
                f"{8 * size / (side['values'] * (last - first + 1) or 1):.3f}",
                bytes_text(size),
            ]
            for first, last, name, side, size in _group_layers(summary["layers"])
        ),
        text_columns=3,
    )
    if any(side["tail_tokens"] for layer in summary["layers"] for side in layer.values()):
        print("raw tail: the newest tokens, not packed yet; kvpack convert FILE OUT RECIPE packs them too")


def _group_layers(layers: list[dict[str, Any]]) -> Iterator[tuple[int, int, str, dict[str, Any], int]]:
    """Group consecutive layers that differ only in size. Yields (first, last, "k" or "v", side, bytes) for each group."""
    for _, run in groupby(enumerate(layers), key=lambda numbered: {name: _without_sizes(side) for name, side in numbered[1].items()}):
        numbered = list(run)
        for name, side in numbered[0][1].items():
            yield numbered[0][0], numbered[-1][0], name, side, sum(layer[name]["stored_bytes"] for _, layer in numbered)


def _without_sizes(side: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in side.items() if name not in ("stored_bytes", "bits_per_value", "nominal_bits")}


def _codec_text(params: dict[str, Any]) -> str:
    """Return a codec's id and parameters on one line, without tables, packing and unset options."""
    named = {name: value for name, value in params.items() if name not in ("id", "dim", "fields", "seed") and not isinstance(value, bytes)}
    # Show only the name of a sidecar whose parameters are a map.
    words = (name if isinstance(value, dict) else f"{name}={value}" for name, value in named.items() if value != "none")
    return " ".join([params["id"], *words])


def _recipe_text(text: str) -> str:
    from kvpack.coding.recipes import preset_name

    return printable(preset_name(text) or text)
