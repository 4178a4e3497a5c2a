"""Plots a quality report: KL divergence by bits per value, for print or screen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpack.formats.errors import MissingPackage

from .summary import model_label

STYLES = {
    "raw": ("#000000", "s"),
    "lossless": ("#7F7F7F", "*"),
    "group": ("#0072B2", "o"),
    "minifloat": ("#8C564B", "h"),
    "octahedral": ("#D55E00", "D"),
    "quaternion": ("#009E73", "^"),
    "angle": ("#CC79A7", "v"),
    "scalar": ("#E69F00", "P"),
    "polar": ("#56B4E9", "X"),
    "klt": ("#882255", "d"),
    "transform": ("#999933", "8"),
    "trellis": ("#332288", "H"),
}
"""For each codec of keys, a color and the first marker. Colors are from Okabe and Ito's palette, except for the last five codecs."""

OTHER_STYLE = ("#666666", "p")

MARKERS = "soD^vPXhd<>*8Hp"
"""Markers for further recipes with the same codec, in this order."""

SIZE = (8.4, 4.6)
"""Size of the plot in inches."""

SETTINGS: Any = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "kvpack"}
"""matplotlib settings that keep text as text in the SVG, and that make its ids independent of the time."""

_BITS = (0.25, 0.35, 0.5, 0.7, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)
_NARROW_BITS = (0.25, 0.5, 1, 2, 3, 4, 6, 8, 16, 32)

_LABEL_DISTANCE = 1.6
"""Ratio of bits, and of divergences, below which two points are too close for a label between them."""

_MIN_DIVERGENCE = 1e-8
"""Smallest divergence that is drawn. Smaller ones are drawn at this value, because a logarithmic scale has no zero."""


def import_figure_module() -> Any:
    """Return the module matplotlib.figure. Raises MissingPackage if it is not installed."""
    try:
        import matplotlib.figure
    except ImportError:
        raise MissingPackage("the plot needs matplotlib: pip install 'kvpack[bench]'") from None
    return matplotlib.figure


def save_plot(report: dict[str, Any], path: Path) -> None:
    """Write the plot to ``path`` with the suffixes .png and .svg. The same report always yields the same files."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        plot = figure(report)
        plot.savefig(path.with_suffix(".png"), metadata={"Software": None})
        plot.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def figure(report: dict[str, Any]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    result = import_figure_module().Figure(figsize=SIZE, dpi=200, layout="constrained")
    FigureCanvasAgg(result)
    plot(result.add_subplot(), report)
    return result


def plot(axes: Any, report: dict[str, Any], *, narrow: bool = False) -> None:
    """Draw the recipes, the Pareto front, and a line for the divergence of a model that has forgotten the packed tokens.

    Names of recipes are in a legend next to the axes or, if ``narrow``, next to the points.
    """
    rows, forgotten = report["recipes"], report["forgotten"]["kl_divergence"]
    axes.set_xscale("log")
    axes.set_yscale("log")
    divergences = [_plotted_divergence(row) for row in rows]
    axes.set_ylim(min(divergences) / 2, 2 * max(*divergences, forgotten))
    axes.axhline(forgotten, color="#666666", linestyle="--", linewidth=1, label="past forgotten", zorder=1)
    front = sorted((row["bits_per_value"], _plotted_divergence(row)) for row in rows if row["on_front"])
    axes.plot(*zip(*front, strict=True), color="#999999", linewidth=1.2, label="Pareto front", zorder=2)
    drawn: Counter[str] = Counter()
    for row in rows:
        color, first = STYLES.get(row["family"], OTHER_STYLE)
        # Codecs without a style share a color.
        marker = (first + MARKERS.replace(first, ""))[drawn[color] % len(MARKERS)]
        drawn[color] += 1
        x, y = row["bits_per_value"], _plotted_divergence(row)
        axes.errorbar(x, y, yerr=_error_bar(row, *axes.get_ylim()), fmt="none", ecolor=color, elinewidth=0.8, alpha=0.5, zorder=3)
        style = {"color": color, "marker": marker, "linestyle": "none", "markersize": 7, "markeredgecolor": "white"}
        axes.plot(x, y, **style, label=row["recipe"], zorder=4)
        if narrow:
            _label_point(axes, row["recipe"], x, y, on_left=_is_label_left(row, rows), below=_is_label_below(row, rows))
    if narrow:
        axes.set_title(model_label(report), fontsize=10, loc="left")
        _label_point(axes, "past forgotten", axes.get_xlim()[0], forgotten, on_left=False, below=False)
    else:
        settings = report["settings"]
        axes.set_title(
            f"{model_label(report)}, {report['precision']}:\n{settings['windows']} x {settings['score']:,} tokens scored, "
            f"each window {settings['tokens']:,}",
            fontsize=10,
            loc="left",
        )
    axes.set_xlabel("bits per value of the whole file" if narrow else "bits per value, every byte of the file counted (log scale)")
    axes.set_ylabel("KL divergence in nats (log scale), with 95% intervals")
    _set_bits_axis(axes, [row["bits_per_value"] for row in rows], _NARROW_BITS if narrow else _BITS)
    axes.grid(color="#dddddd", linewidth=0.6, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    if not narrow:
        legend_position = {"loc": "upper left", "bbox_to_anchor": (1.01, 1)}
        axes.legend(frameon=False, fontsize=8, **legend_position, title="color: the keys' codec", title_fontsize=8)


def _is_label_left(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Return True if a recipe's name must be to the left of its point, because another point or the end of the axis is to the right."""
    x, y = row["bits_per_value"], _plotted_divergence(row)
    others = [(other["bits_per_value"] / x, abs(math.log(_plotted_divergence(other) / y))) for other in rows]
    return _LABEL_DISTANCE * x > max(other["bits_per_value"] for other in rows) or any(
        1 < ratio < _LABEL_DISTANCE and apart < math.log(_LABEL_DISTANCE) for ratio, apart in others
    )


def _is_label_below(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Return True if a name to the left of its point must be below it, because the name of a point further left is at its height."""
    x, y = row["bits_per_value"], _plotted_divergence(row)
    others = [(x / other["bits_per_value"], _plotted_divergence(other) / y) for other in rows]
    return any(_LABEL_DISTANCE < ratio < 1.6 * _LABEL_DISTANCE and 1 < higher < 1.2 for ratio, higher in others)


def _label_point(axes: Any, name: str, x: float, y: float, *, on_left: bool, below: bool) -> None:
    offset = (-6, -11 if below else 5) if on_left else (6, 5)
    place = {"xytext": offset, "textcoords": "offset points", "ha": "right" if on_left else "left", "fontsize": 8}
    axes.annotate(name, (x, y), **place, zorder=5)


def _plotted_divergence(row: dict[str, Any]) -> float:
    return max(float(row["kl_divergence"]), _MIN_DIVERGENCE)


def _error_bar(row: dict[str, Any], lowest: float, highest: float) -> list[list[float]] | None:
    """Return the distances from a row's divergence to the ends of its interval, or None if it has no interval.

    The interval is clipped to the axis, which extends from ``lowest`` to ``highest``.
    """
    if row["kl_divergence_interval"] is None:
        return None
    middle, (low, high) = _plotted_divergence(row), row["kl_divergence_interval"]
    return [[middle - min(middle, max(low, lowest))], [max(middle, min(high, highest)) - middle]]


def _set_bits_axis(axes: Any, bits: list[float], ticks: tuple[float, ...]) -> None:
    from matplotlib import ticker

    low, high = min(bits) / 1.12, max(bits) * 1.12
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(ticker.FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
