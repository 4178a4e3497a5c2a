"""Printing of the report of a search."""

from __future__ import annotations

from typing import Any

from kvpack.output import format_count, print_table, printable

from .candidates import is_attendable
from .results import uniform_label


def show(report: dict[str, Any]) -> None:
    """Print the chosen and the best uniform recipe, the codecs of each layer, and whether tuning helped."""
    settings = report["settings"]
    title = (
        f"{printable(report['model'])}, {printable(report['text'])}: {report['mode']} search, at most {report['bits']:g} bits per value; "
        f"{format_count(settings['windows'], 'window')} of {settings['tokens']:,} tokens, {settings['held_out']} held out, "
        f"the last {settings['score']:,} tokens of each scored"
    )
    columns = [
        "what",
        "bits per\nvalue",
        "KL, search\nwindows",
        "KL, held-out\nwindows",
        "perplexity,\nheld out",
        "change in log\nperplexity",
        "95%\n+-",
    ]
    rows = [["uncompressed", "32.00", "", "", f"{report['tuned']['held_out']['uncompressed_perplexity']:.4f}", "", ""]]
    rows += [_cells(name, report[key]) for name, key in ((uniform_label(report), "uniform"), ("tuned", "tuned")) if report[key] is not None]
    print_table(title, columns, rows)
    decoded = [] if report["attendable"] else ["attended"]
    layers = _layer_rows(report["layers"], attended=bool(decoded))
    print_table("codecs", ["layers", "keys", "values", *decoded], layers, text_columns=3 + len(decoded))
    print(f"Bits per value count every byte of a file of {settings['file_tokens']:,} tokens, with the windows' share of raw tokens.")
    print("KL is KL(uncompressed || packed) of the next token, in nats.")
    print("Perplexity is per token; the change in its log is against the uncompressed cache.")
    print(_verdict(report))
    if report["file"] is not None:
        print(f"{printable(report['file'])}: the recipe, for --recipe @{printable(report['file'])}")


def _cells(name: str, measurement: dict[str, Any]) -> list[str]:
    held_out = measurement["held_out"]
    interval = held_out["log_perplexity_difference_interval"]
    return [
        name,
        f"{measurement['bits_per_value']:.3f}",
        f"{measurement['searched']['kl_divergence']:.5f}",
        f"{held_out['kl_divergence']:.5f}",
        f"{held_out['perplexity']:.4f}",
        f"{held_out['log_perplexity_difference']:+.5f}",
        "" if interval is None else f"{(interval[1] - interval[0]) / 2:.5f}",
    ]


def _layer_rows(layers: list[dict[str, str]], *, attended: bool) -> list[list[str]]:
    """Return one table row for each range of layers with the same codecs. With ``attended``, a column shows how attention reads them."""
    rows: list[tuple[int, int, dict[str, str]]] = []
    for number, codecs in enumerate(layers):
        if rows and rows[-1][2] == codecs:
            rows[-1] = (rows[-1][0], number, codecs)
        else:
            rows.append((number, number, codecs))
    result = []
    for first, last, codecs in rows:
        how = "packed" if all(map(is_attendable, codecs.values())) else "decoded tile by tile"
        numbers = str(first) if first == last else f"{first}-{last}"
        result.append([numbers, codecs["k"], codecs["v"], *([how] if attended else [])])
    return result


def _verdict(report: dict[str, Any]) -> str:
    tuned, uniform, comparison = report["tuned"], report["uniform"], report["comparison"]
    if uniform is None:
        return "No uniform recipe of the candidates is within the budget."
    losses = f"KL {tuned['held_out']['kl_divergence']:.5f} against {uniform['held_out']['kl_divergence']:.5f} nats on held-out text"
    same = f"the {uniform_label(report)}, {uniform['recipe']}"
    if comparison["verdict"] == "the same":
        return f"The search found nothing better than {same}."
    if comparison["verdict"] == "better":
        return f"Tuning pays: {losses}, compared with {same}."
    interval = comparison["interval"]
    if comparison["verdict"] == "worse":
        return f"Tuning does not pay here: {losses}. Use {same}."
    spread = "one window gives no interval" if interval is None else f"95% interval {interval[0]:+.5f} to {interval[1]:+.5f}"
    return f"The result is inconclusive: {losses} ({spread}), compared with {same}. A larger --held-out may decide it."
