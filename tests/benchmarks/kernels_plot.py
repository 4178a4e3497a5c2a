"""The plot of ``kvpack bench kernels --sweep``: times of whole calls by context length, and ratios to bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpack.bench import quality_plot, synthetic_basis
from kvpack.bench.kernels import OWN_BF16
from kvpack.coding.recipes import parse_recipe
from kvpack.formats.klt import Klt

_SIZE = (11.0, 4.8)
_LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 3)), (0, (3, 3)))
_MAX_WHITE = 0.45
"""Share of white in the color of each codec's last recipe."""


def save_plot(report: dict[str, Any], path: Path) -> None:
    """Write the plot to the SVG file ``path``. Raises MissingPackage without matplotlib, and OSError if it cannot be written."""
    figure = quality_plot.import_figure_module().Figure(figsize=_SIZE, dpi=200, layout="constrained")
    sweep = report["sweep"]
    tokens = [table["tokens"] for table in sweep]
    times, ratios = figure.subplots(1, 2)
    lines = {}
    for number, (row, style) in enumerate(zip(sweep[0]["rows"], _styles(sweep[0]["rows"], sweep[0]["dim"]), strict=True)):
        rows = [table["rows"][number] for table in sweep]
        (lines[row["recipe"]],) = times.plot(tokens, [1e6 * row["whole_seconds"] for row in rows], **style)
        ratios.plot(tokens, [row["of_bf16"] for row in rows], **style)
    for axes, label in ((times, "microseconds per decode step (log scale)"), (ratios, "time relative to the best bf16 attention")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("context length in tokens (log scale)")
        axes.set_ylabel(label)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    times.set_yscale("log")
    ratios.set_ylim(bottom=0)
    ratios.axhline(1, color="#000000", linewidth=0.8)
    shape = sweep[0]
    title = f"{report['device']}: a decode step over {shape['q_heads']} query heads, {shape['heads']} KV heads, dim {shape['dim']}"
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    # List the recipes in the order of the lines' right ends.
    slowest_first = sorted(sweep[-1]["rows"], key=lambda row: -row["whole_seconds"])
    names = [row["recipe"] for row in slowest_first]
    figure.legend([lines[name] for name in names], names, loc="outside right center", fontsize=6.5, frameon=False)
    figure.savefig(path, metadata={"Date": None})


def _styles(rows: list[dict[str, Any]], dim: int) -> list[dict[str, Any]]:
    """Return the style of each recipe: a color and marker for its codec, with a different shade and line style."""
    families = [_codec_family(row, dim) for row in rows]
    styles = []
    for number, family in enumerate(families):
        color, marker = quality_plot.STYLES.get(family, quality_plot.OTHER_STYLE)
        before, count = families[:number].count(family), families.count(family)
        pale = _MAX_WHITE * before / max(1, count - 1)
        channels = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
        shade = tuple(channel + pale * (1 - channel) for channel in channels)
        line = _LINES[before % len(_LINES)]
        styles.append({"color": shade, "marker": marker, "linestyle": line, "linewidth": 1.2, "markersize": 3.5})
    return styles


def _codec_family(row: dict[str, Any], dim: int) -> str:
    if row["error"] is None or row["recipe"] == OWN_BF16:
        return "raw"
    if row["recipe"].startswith(synthetic_basis.NAME):
        return Klt.id
    return parse_recipe(row["recipe"]).codec(0, 1, "k", dim).id
