"""OCTOPUS's ablations: the split of bits in Table 4 and the rounding modes in Table 5."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .measure import Settings, errors
from .rows import Row, around

if TYPE_CHECKING:
    from collections.abc import Callable

_SPLITS = {
    2: {(1, 3): (0.4555, 0.2628), (2, 2): (0.1409, 0.0729), (3, 1): (0.0831, 0.0421)},
    3: {
        (1, 5): (0.4501, 0.2593),
        (2, 4): (0.1273, 0.0658),
        (3, 3): (0.0374, 0.0188),
        (4, 2): (0.0243, 0.0120),
        (5, 1): (0.0537, 0.0268),
    },
    4: {
        (2, 6): (0.1262, 0.0653),
        (3, 5): (0.0332, 0.0168),
        (4, 4): (0.0096, 0.0048),
        (5, 3): (0.0067, 0.0033),
        (6, 2): (0.0166, 0.0081),
    },
}
"""Table 4: the MSE and 1 - cosine for each (b_dir, b_norm)."""

_ROUNDINGS = {
    1: {"scalar": (0.692, 0.6022, 0.7935, 7.065), **dict.fromkeys(("local2x2", "local3x3", "full"), (0.703, 0.5172, 0.6664, 6.554))},
    2: {
        "scalar": (0.955, 0.0897, 0.1205, 2.722),
        "local2x2": (0.957, 0.0858, 0.1152, 2.662),
        **dict.fromkeys(("local3x3", "full"), (0.958, 0.0832, 0.1119, 2.620)),
    },
    3: {
        "scalar": (0.987, 0.0261, 0.0365, 1.464),
        "local2x2": (0.988, 0.0250, 0.0351, 1.433),
        **dict.fromkeys(("local3x3", "full"), (0.988, 0.0243, 0.0343, 1.414)),
    },
    4: {
        "scalar": (0.997, 0.0071, 0.0102, 0.763),
        "local2x2": (0.997, 0.0068, 0.0098, 0.749),
        **dict.fromkeys(("local3x3", "full"), (0.997, 0.0067, 0.0096, 0.739)),
    },
}
"""Table 5: cosine, MSE, tail95, and inner-product error of each rounding mode."""

_ONE_BIT_NOTE = "b = 1 uses the split (1, 1), because (2, 0) has no norm codebook in the paper"
_LOCAL_NOTE = (
    "the paper's 2x2 search tries the nearest level and the next higher one; kvpack's tries levels on either side, which finds the optimum"
)


def _splits(b: int, settings: Settings) -> list[Row]:
    rows = []
    for (b_dir, b_norm), (mse, from_one) in _SPLITS[b].items():
        words = f"octahedral:b_dir={b_dir},b_norm={b_norm},norm=fp32"
        found = errors(words, settings, seeds=settings.size(4, 2), keys=settings.size(8192, 2048), queries=1)
        label = f"b = {b}, split ({b_dir}, {b_norm})"
        rows += [Row("Table 4", f"{label}: MSE", found.mse, mse), Row("Table 4", f"{label}: 1 - cosine", 1 - found.cosine, from_one)]
    return rows


def _roundings(b: int, settings: Settings) -> list[Row]:
    split = "b_dir=1,b_norm=1" if b == 1 else f"b={b}"
    rows = []
    for rounding, published in _ROUNDINGS[b].items():
        words = f"octahedral:{split},norm=fp32,rounding={rounding}"
        found = errors(words, settings, seeds=settings.size(5, 2), keys=4096, queries=256)
        note = _ONE_BIT_NOTE if b == 1 else _LOCAL_NOTE if rounding == "local2x2" else ""
        optimum = _ROUNDINGS[b]["full"]
        for name, value, figure, best in zip(
            ("cosine", "MSE", "tail95", "inner-product error"),
            (found.cosine, found.mse, found.tail95, found.inner_product),
            published,
            optimum,
            strict=True,
        ):
            expected = around(best) if rounding == "local2x2" else None
            rows.append(Row("Table 5", f"b = {b}, {rounding}: {name}", value, figure, expected=expected, note=note))
    return rows


SECTIONS: tuple[Callable[[Settings], list[Row]], ...] = (
    *(partial(_splits, b) for b in _SPLITS),
    *(partial(_roundings, b) for b in _ROUNDINGS),
)
