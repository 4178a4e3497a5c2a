"""Creation of a live cache's layers, for first tokens or for an immutable layer to continue."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvpack.cache.layer import Layer
from kvpack.cache.packed_runs import PackedRuns
from kvpack.cache.side import Side
from kvpack.coding.encoding import RAW_DTYPES, RAW_NAMES
from kvpack.coding.recipes import SIDES, Recipe
from kvpack.formats.arguments import as_integer, describe, prefix_errors
from kvpack.formats.errors import InvalidParameter, InvalidType

from .layer import LiveLayer

DEFAULT_WINDOW = 128
"""Number of tokens that are encoded together if the recipe sets no window."""

ROOM = 2
"""Number of windows that fit in the raw tail in addition to the newest tokens. Steps can then continue after one window is full."""

NEWEST_TOKENS = 128
"""Number of newest tokens that stay raw if the recipe sets no window. The next tokens attend to them the most."""


def empty_layer(recipe: Recipe, number: int, layers: int, k: torch.Tensor | None, v: torch.Tensor | None) -> Layer:
    """Create layer ``number`` of ``layers``, without tokens, for keys and values with the shapes and dtypes of ``k`` and ``v``.

    Raises InvalidParameter or InvalidType if the recipe cannot encode such keys and values.
    """
    sides: dict[str, Side | None] = {}
    for name, x in zip(SIDES, (k, v), strict=True):
        if x is None:
            sides[name] = None
            continue
        where = f"layers[{number}].{name}"
        if not isinstance(x, torch.Tensor) or x.dim() != 4 or not x.shape[0] or not x.shape[1]:
            description = f"has shape {list(x.shape)}" if isinstance(x, torch.Tensor) else f"is a {type(x).__name__}"
            raise InvalidParameter(f"{where} {description}, expected a tensor [batch, kv_head, token, dim]")
        if x.dtype not in RAW_DTYPES.values():
            raise InvalidType(f"{where} has dtype {x.dtype}, expected bfloat16, float16 or float32")
        with prefix_errors(where, InvalidParameter):
            codec = recipe.codec(number, layers, name, x.shape[3], RAW_NAMES[x.dtype])
        sides[name] = Side(codec, PackedRuns(), x[:, :, :0].clone(), recipe.window)
    if not any(sides.values()):
        raise InvalidParameter(f"layers[{number}]: k and v are both None: pass keys, values or both")
    return Layer(sides["k"], sides["v"])


def live_layer(layer: Layer, number: int, sliding_window: int | None, start: int) -> LiveLayer:
    """Create a live layer that continues ``layer``. The cache begins at position ``start``."""
    group = math.lcm(*(side.codec.token_group for side in layer.sides.values()))
    windows = [side.window for side in layer.sides.values() if side.window]
    window = math.lcm(*windows, group) if windows else math.lcm(DEFAULT_WINDOW, group)
    newest = 0 if windows else NEWEST_TOKENS
    return LiveLayer(layer, window, newest, ROOM * window + newest, sliding_window, f"layers[{number}]", start)


def check_windows(windows: Sequence[int | None] | None, layers: int) -> tuple[int | None, ...]:
    """Return ``sliding_windows`` as a tuple. Raises InvalidParameter or InvalidType if they are not valid for ``layers`` layers."""
    if windows is None:
        return (None,) * layers
    if not isinstance(windows, list | tuple):
        raise InvalidType(f"sliding_windows is {describe(windows)}, expected a list with an integer or None for each layer")
    if len(windows) != layers:
        raise InvalidParameter(
            f"sliding_windows has {len(windows)} items, but the cache has {layers} layers: pass an integer or None for each layer"
        )
    for window in windows:
        if window is not None and as_integer(window, "sliding_windows") < 1:
            raise InvalidParameter(f"sliding_windows contains {window}, expected positive integers or None")
    return tuple(windows)
