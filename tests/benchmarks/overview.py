"""Draw one plot of each recipe's loss of quality and attention speed, and one of its times by context length (``make bench-overview``).

The plot is drawn from reports of ``kvpack bench quality`` and ``kvpack bench kernels``. The README shows the plot of the reports in
``measured/``: ``quality.json`` contains only what the plot, the guides and ``kvpack recipes`` show, and ``kernels.json`` only the ratios
that kernels/README.md lists.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvpack.bench import quality_plot
from kvpack.bench.summary import key_codec
from kvpack.errors import InvalidParameter, MissingFile, WriteFailed

from . import kernels_plot

RECIPES = (
    "fp8",
    "nvfp4",
    "kv=group:b=4,g=32",
    "oscar-2",
    "kv=scalar:b=4",
    "kv=scalar:b=3",
    "kv=scalar:b=2",
    "kv=octahedral:b=3,arrangement=direct",
    "octopus-3",
    "octopus-qjl-3",
    "kv=quaternion:s=24,r=3,arrangement=direct",
    "kv=quaternion:s=24,r=3",
    "kv=angle:n=128,arrangement=direct",
    "kv=angle:n=128",
    "polarquant-3",
)
"""Recipes whose attention speed is drawn if the report contains them."""

LONG_TOKENS, SHORT_TOKENS = 131072, 16384
"""Context lengths in tokens: that of the report's shape B (32 query heads, 8 KV heads, dim 128), and one of its sweep."""

_SIZE = (5.6, 8.4)
"""Size of the figure in inches. The two plots are stacked, and narrow enough for 8-point text to be legible on a phone."""


def run(folder: str) -> str:
    """Draw ``overview.svg`` and ``kernels.svg`` from ``quality.json`` and ``kernels.json`` in ``folder``, and return the first one's path.

    Raises MissingFile if a report does not exist, InvalidParameter if its contents are invalid, WriteFailed if the plot cannot be written,
    and MissingPackage without matplotlib.
    """
    quality_plot.import_figure_module()
    import matplotlib

    quality, kernels = _report(folder, "quality", "recipes"), _report(folder, "kernels", "sweep")
    path = Path(folder, "overview.svg")
    with matplotlib.rc_context(quality_plot.SETTINGS):
        drawn = _figure(quality, _speeds(folder, kernels), kernels["device"])
        try:
            drawn.savefig(path, metadata={"Date": None})
            kernels_plot.save_plot(kernels, Path(folder, "kernels.svg"))
        except OSError as error:
            raise WriteFailed(f"{path}: could not be written: {error.strerror}") from None
    return str(path)


def _report(folder: str, name: str, key: str) -> dict[str, Any]:
    path = Path(folder, f"{name}.json")
    write = f"write it with: kvpack bench {name}{' --sweep' if name == 'kernels' else ''} --out {folder}"
    try:
        report = json.loads(path.read_bytes())
    except OSError as error:
        raise MissingFile(f"{path}: {error.strerror}; {write}", filename=str(path), number=error.errno or 0) from None
    except ValueError as error:
        raise InvalidParameter(f"{path}: is not JSON: {error}; {write}") from None
    if not isinstance(report, dict) or not report.get(key):
        raise InvalidParameter(f"{path}: is not a report with {key!r}; {write}")
    return report


def _speeds(folder: str, report: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return (recipe, speed at LONG_TOKENS, speed at SHORT_TOKENS) for each recipe, slowest first.

    A speed is relative to the fastest bf16 attention: the time of the latter divided by the recipe's time.
    """
    long, short = (
        {row["recipe"]: 1 / row["of_bf16"] for table in report[part] if table[key] == value for row in table["rows"]}
        for part, key, value in (("shapes", "name", "B"), ("sweep", "tokens", SHORT_TOKENS))
    )
    speeds = [(recipe, long[recipe], short[recipe]) for recipe in RECIPES if recipe in long and recipe in short]
    if not speeds:
        raise InvalidParameter(
            f"{folder}/kernels.json: has none of the recipes {', '.join(RECIPES)} at shape B and at {SHORT_TOKENS:,} tokens; "
            f"write it with: kvpack bench kernels --sweep --out {folder}"
        )
    return sorted(speeds, key=lambda speed: speed[1])


def _figure(quality: dict[str, Any], speeds: list[tuple[str, float, float]], device: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    result = quality_plot.import_figure_module().Figure(figsize=_SIZE, dpi=100, layout="constrained")
    FigureCanvasAgg(result)
    top, bottom = result.subplots(2, 1)
    quality_plot.plot(top, quality, narrow=True)
    _plot_speeds(bottom, speeds)
    bottom.set_title(f"{device}: attention over packed rows", fontsize=10, loc="left")
    return result


def _plot_speeds(axes: Any, speeds: list[tuple[str, float, float]]) -> None:
    recipes, long, short = zip(*speeds, strict=True)
    colors = [quality_plot.STYLES[key_codec(recipe)][0] for recipe in recipes]
    axes.barh(recipes, long, color=colors, height=0.7, zorder=2, label=f"{LONG_TOKENS:,} tokens")
    dots = {"color": "#ffffff", "markeredgecolor": "#000000", "marker": "o", "linestyle": "none", "markersize": 5}
    axes.plot(short, recipes, **dots, zorder=3, label=f"{SHORT_TOKENS:,} tokens")
    axes.axvline(1, color="#000000", linewidth=0.8, zorder=4)
    axes.set_xlim(0, 1.08 * max(long))
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    axes.set_xlabel("speed (1 = the best bf16 attention)")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(framealpha=0.9, edgecolor="none", fontsize=8, loc="lower right")
