"""The picture of a quality report: perplexity against the bits of the file, on paper or a screen."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy

from kvpack.formats.errors import KvpackError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

STYLES = {
    "raw": ("#000000", "s"),
    "group": ("#0072B2", "o"),
    "octahedral": ("#D55E00", "D"),
    "quaternion": ("#009E73", "^"),
    "angle": ("#CC79A7", "v"),
    "scalar": ("#E69F00", "P"),
    "polar": ("#56B4E9", "X"),
}
"""Colour and marker by the keys' codec; the colours are Okabe and Ito's, which colour-blind readers tell apart."""

OTHER = ("#666666", "p")

SIZE = (7.2, 4.6)
"""Inches: the width of a page's text."""

SETTINGS: Any = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "kvpack"}
"""Text stays text in the SVG, and its ids do not depend on the time."""

_BITS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)
_RADII = (9, 14, 20, 28, 38, 50, 64)
_DIRECTIONS = 16


def library() -> Any:
    """The module matplotlib.figure. Raises KvpackError when it is not installed."""
    try:
        import matplotlib.figure
    except ImportError:
        raise KvpackError("the picture needs matplotlib: pip install 'kvpack[bench]'") from None
    return matplotlib.figure


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other equals or betters in both coordinates (fewer is better), ascending in the first."""
    front: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def draw(report: dict[str, Any], path: Path) -> None:
    """Write ``path`` with the suffixes .png and .svg; the same report gives the same files. Raises OSError."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        picture = figure(report)
        picture.savefig(path.with_suffix(".png"), metadata={"Software": None})
        picture.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def figure(report: dict[str, Any]) -> Any:
    """The picture as a matplotlib figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    result = library().Figure(figsize=SIZE, dpi=200, layout="constrained")
    canvas: Any = FigureCanvasAgg(result)
    axes = result.add_subplot()
    plot(axes, report)
    # Labels are placed in pixels, so the axes must lie where they will be drawn.
    result.draw_without_rendering()
    label_points(canvas.get_renderer(), axes, report["recipes"])
    return result


def plot(axes: Any, report: dict[str, Any]) -> None:
    """Draw everything except the names of the recipes."""
    rows, exact = report["recipes"], report["uncompressed"]["perplexity"]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.axhline(exact, color="#666666", linestyle="--", linewidth=1, label=f"uncompressed: {exact:.4f}", zorder=1)
    front = pareto_front([(row["bits_per_value"], row["perplexity"]) for row in rows])
    axes.plot(*zip(*front, strict=True), color="#999999", linewidth=1.2, label="Pareto front", zorder=2)
    for family in dict.fromkeys(row["family"] for row in rows):
        colour, marker = STYLES.get(family, OTHER)
        mine = [row for row in rows if row["family"] == family]
        x, y = ([row[name] for row in mine] for name in ("bits_per_value", "perplexity"))
        axes.errorbar(x, y, yerr=_bars(mine, exact), fmt="none", ecolor=colour, elinewidth=0.8, alpha=0.5, zorder=3)
        axes.plot(x, y, color=colour, marker=marker, linestyle="none", markersize=7, markeredgecolor="white", label=family, zorder=4)
    settings = report["settings"]
    twin = "" if report["twin"] is None else f", its twin with key channels x {report['twin']['factor']:g}"
    axes.set_title(
        f"{report['model']}{twin}: {settings['windows']} x {settings['score']:,} tokens scored, each window {settings['tokens']:,}",
        fontsize=10,
        loc="left",
    )
    axes.set_xlabel("bits per value, every byte of the file counted (log scale)")
    axes.set_ylabel("perplexity (log scale), with paired 95 % intervals")
    _ticks(axes, rows, exact)
    axes.grid(color="#dddddd", linewidth=0.6, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(framealpha=0.9, edgecolor="none", fontsize=8, loc="upper right", title="marker: the keys' codec", title_fontsize=8)


def _bars(rows: list[dict[str, Any]], exact: float) -> list[list[float]] | None:
    """The paired interval of each row around its perplexity: how far below and above it reaches."""
    intervals = [row["log_perplexity_difference_interval"] for row in rows]
    if None in intervals:
        return None
    below = [max(0.0, row["perplexity"] - exact * math.exp(low)) for row, (low, _) in zip(rows, intervals, strict=True)]
    above = [max(0.0, exact * math.exp(high) - row["perplexity"]) for row, (_, high) in zip(rows, intervals, strict=True)]
    return [below, above]


def _ticks(axes: Any, rows: list[dict[str, Any]], exact: float) -> None:
    from matplotlib import ticker

    bits = [row["bits_per_value"] for row in rows]
    low, high = min(bits) / 1.12, max(bits) * 1.12
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(ticker.FixedLocator([tick for tick in _BITS if low <= tick <= high]))
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    values = [exact, *(row["perplexity"] for row in rows)]
    ratio = max(values) / min(values)
    # Leave room for labels under the lowest point and over the highest.
    axes.set_ylim(min(values) / ratio**0.12 / 1.001, max(values) * ratio**0.08 * 1.001)
    narrow = ratio < 3
    axes.yaxis.set_major_locator(ticker.MaxNLocator(8, steps=(1, 2, 5, 10)) if narrow else ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(ticker.ScalarFormatter(useOffset=False) if narrow else ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())


def label_points(renderer: Any, axes: Any, rows: list[dict[str, Any]]) -> None:
    """Write each recipe beside its point, at the nearest place that is free of labels, points and the legend, and mostly of lines."""
    from matplotlib.transforms import Bbox

    scale = renderer.dpi / 72
    points = axes.transData.transform([(row["bits_per_value"], row["perplexity"]) for row in rows])
    taken = [Bbox.from_extents(*(point - 6 * scale), *(point + 6 * scale)) for point in points]
    taken.append(axes.get_legend().get_window_extent(renderer))
    inside, lines = axes.get_window_extent(renderer), _line_points(axes, 2 * scale)
    for row, point in zip(rows, points, strict=True):
        colour, _ = STYLES.get(row["family"], OTHER)
        label = axes.annotate(
            row["recipe"], (row["bits_per_value"], row["perplexity"]), xytext=(0, 0), textcoords="offset points",
            fontsize=8, color=colour, ha="center", va="center", zorder=5,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3},
        )  # fmt: skip
        size = label.get_window_extent(renderer)
        box, offset = _free_place(point, (size.width + 2 * scale, size.height + scale), scale, taken, lines, inside)
        label.set_position(offset)
        taken.append(box)


def _line_points(axes: Any, step: float) -> Any:
    """Pixels ``[point, 2]`` along every line and interval drawn, about ``step`` apart."""
    paths = [line.get_transform().transform(line.get_xydata()) for line in axes.lines if line.get_linestyle() != "None"]
    paths += [axes.transData.transform(segment) for collection in axes.collections for segment in collection.get_segments()]
    points = [numpy.zeros((0, 2))]
    for path in paths:
        for first, last in pairwise(path):
            share = numpy.linspace(0, 1, 2 + int(numpy.hypot(*(last - first)) / step))[:, None]
            points.append(first + share * (last - first))
    return numpy.concatenate(points)


def _free_place(
    point: Any, size: tuple[float, float], scale: float, taken: Sequence[Any], lines: Any, inside: Any
) -> tuple[Any, tuple[float, float]]:
    """The box of a label of ``size`` pixels beside ``point``, and its centre's offset in points."""
    from matplotlib.transforms import Bbox

    width, height = size
    best: tuple[float, Any, tuple[float, float]] | None = None
    for radius in _RADII:
        for direction in range(_DIRECTIONS):
            angle = 2 * math.pi * direction / _DIRECTIONS
            # An ellipse around the point, so that a label at the side is as near as one above.
            x = math.cos(angle) * (radius * scale + width / 2)
            y = math.sin(angle) * (radius * scale + height / 2)
            box = Bbox.from_bounds(point[0] + x - width / 2, point[1] + y - height / 2, width, height)
            outside = not (inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1)
            covered = sum(_common(box, other) for other in taken) / (width * height)
            crossed = int(((lines > box.min) & (lines < box.max)).all(1).sum())
            cost = 1000 * (covered + outside) + radius + crossed
            if best is None or cost < best[0]:
                best = cost, box, (x / scale, y / scale)
    assert best is not None
    return best[1], best[2]


def _common(first: Any, second: Any) -> float:
    """The area that two boxes share."""
    across: float = min(first.x1, second.x1) - max(first.x0, second.x0)
    up: float = min(first.y1, second.y1) - max(first.y0, second.y0)
    return max(0.0, across) * max(0.0, up)
