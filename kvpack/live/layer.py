"""One layer of a live cache: its keys and values, and its counts of packed and raw tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvpack.attention import attend
from kvpack.cache.layer import Layer
from kvpack.cache.packed_runs import PackedRuns
from kvpack.cache.side import Side, check_tensor
from kvpack.coding import dispatch
from kvpack.coding.encoding import RAW_DTYPES, RAW_NAMES, check_finite
from kvpack.coding.recipes import SIDES, Recipe
from kvpack.formats.arguments import as_integer, describe, prefix_errors
from kvpack.formats.errors import InvalidParameter, InvalidType, OutOfBounds
from kvpack.runtime.modes import float32_no_grad

from .side import LiveSide


class LiveLayer:
    """A growing layer: an immutable layer, followed by the tokens that ``update`` adds.

    ``window`` is the number of tokens encoded together, ``newest`` is the number of tokens that stay raw, and ``room`` is the capacity of
    the raw tail. With a ``sliding_window``, tokens to which no later query attends are dropped. ``name`` identifies the layer in error
    messages. ``start`` is the position of the cache's first token.
    """

    def __init__(self, layer: Layer, window: int, newest: int, room: int, sliding_window: int | None, name: str, start: int = 0) -> None:
        self.window, self.newest, self.sliding_window, self.name, self._start = window, newest, sliding_window, name, start
        self.skipped = layer.skipped
        self.raw_tokens = min((side.tail.shape[2] for side in layer.sides.values()), default=0)
        """Number of tokens in the raw tail, the same for keys and values."""
        self._given: tuple[Layer | None, int] = layer, self.raw_tokens
        self.room = max(room, self.raw_tokens)
        self.sides = {
            side: LiveSide(held, window, self.room, self.raw_tokens, sliding_window is None) for side, held in layer.sides.items()
        }
        self._one_side = next(iter(self.sides.values()))
        self._defer({})
        self.keeps_past = False
        """True if tokens to which no later query attends are kept until ``truncate``."""
        self.version = 0
        """Counter that changes with everything that prepared attention calls depend on: the packed runs and the tail's buffers."""

    @property
    def device(self) -> torch.device:
        return self._one_side.tail.device

    @property
    def batch(self) -> int:
        return self._one_side.batch

    @property
    def value_dim(self) -> int:
        """Head dim of the values, or 0 if the layer has none."""
        return self.sides["v"].dim if "v" in self.sides else 0

    @property
    def older_tokens(self) -> int:
        """Number of tokens before the tail. It includes raw tokens if the keys or the values end with an incomplete token group."""
        return self._one_side.older_tokens

    @property
    def is_uneven(self) -> bool:
        """True if different numbers of keys and values are packed."""
        return any(side.unfinished.shape[2] for side in self.sides.values())

    @property
    def is_due(self) -> bool:
        """True if ``roll`` would encode tokens."""
        return self._encodable_tokens(self.raw_tokens) > 0

    @property
    def tokens(self) -> int:
        return self.seen_tokens - self.skipped

    @property
    def seen_tokens(self) -> int:
        """Number of tokens that the layer has seen, including dropped ones."""
        side = self._one_side
        return self.skipped + side.packed_tokens + side.unfinished.shape[2] + self.raw_tokens + self.pending_tokens

    @property
    def nbytes(self) -> int:
        return sum(side.nbytes for side in self.sides.values()) + sum(x.nbytes for x in self._pending.values())

    def update(self, k: torch.Tensor | None, v: torch.Tensor | None) -> None:
        """Add new tokens to the raw tail. If they do not fit, they wait until ``commit`` encodes them.

        Raises InvalidParameter or InvalidType, and adds nothing, if the tokens do not continue the layer or, on the CPU, are not finite.
        """
        given = self._check_tensors(k, v)
        self.commit()
        tokens = next((x.shape[2] for x in given.values()), 0)
        if self.raw_tokens + tokens > self.room:
            with float32_no_grad(self.device):
                # Copy the tokens, because they are encoded at the next update, and the caller may reuse its memory before then.
                self._defer({name: x.clone(memory_format=torch.contiguous_format) for name, x in given.items()})
            return
        with float32_no_grad(self.device):
            for name, x in given.items():
                self.sides[name].tail[:, :, self.raw_tokens : self.raw_tokens + tokens] = x
        self.raw_tokens += tokens

    def save_tail(self) -> Callable[[], None]:
        """Save the newest token in the raw tail. Returns a function that restores it."""
        places = [side.tail[:, :, self.raw_tokens - 1] for side in self.sides.values()]
        with float32_no_grad(self.device):
            saved = [place.clone() for place in places]

        def restore_tail() -> None:
            for place, values in zip(places, saved, strict=True):
                place.copy_(values)

        return restore_tail

    def as_layer(self) -> Layer:
        """Return all tokens as a ``Layer`` that shares the packed bytes and the tail. The result is valid until more tokens are added."""
        return self._layer({name: self._tail(name) for name in self.sides})

    def with_full_tail(self) -> Layer:
        """Return a ``Layer`` that includes the complete tail buffers, with their free space."""
        return self._layer({name: side.tail for name, side in self.sides.items()})

    def freeze(self, packed: bool = False) -> Layer:
        """Return all tokens as an immutable layer.

        With ``packed=True``, the tail is packed in whole token groups or, if the recipe sets a window, in whole windows. If nothing has
        changed, returns the layer from which this one was created.
        """
        self.commit()
        layer, raw_tokens = self._given
        if layer is not None and not self.version and self.raw_tokens == raw_tokens:
            return layer
        tails = {name: self._tail(name) for name in self.sides}
        sides = {
            name: side.freeze(self.raw_tokens, packed, f"{self.name}.{name}", *self._position_and_norms(side.packed_tokens, tails))
            for name, side in self.sides.items()
        }
        return Layer(sides.get("k"), sides.get("v"), skipped=self.skipped if sides else 0)

    def attend(self, q: torch.Tensor, **options: Any) -> torch.Tensor:
        """Run ``kvpack.attend`` over all tokens. Tokens of a long update are encoded only later."""
        return attend(q, self.as_layer(), **options)

    def commit(self) -> None:
        """Encode the tail and the tokens of a long update, in whole windows. The remaining tokens become the new tail."""
        if not self._pending:
            return
        values = {name: self._tail(name) for name in self.sides}
        pending = self._pending
        self._defer({})
        try:
            self._encode(values)
        except BaseException:
            self._defer(pending)
            raise

    def roll(self) -> bool:
        """Encode the tail's full windows or, if the packed keys and values differ in length, enough tokens to even them out.

        Returns True if any tokens were encoded.
        """
        self.commit()
        if not self.is_due:
            return False
        self._encode({name: side.tail[:, :, : self.raw_tokens] for name, side in self.sides.items()})
        return True

    def truncate(self, tokens: int) -> None:
        """Keep the first ``tokens`` tokens that the layer has seen. Raises OutOfBounds if some of them have been dropped."""
        count = self.seen_tokens - tokens
        if not 0 <= count <= self.tokens:
            raise OutOfBounds(
                f"{self.name}: truncate({tokens}) is out of range: the layer holds tokens "
                f"[{self.seen_tokens - self.tokens}:{self.seen_tokens}]"
            )
        pending = min(count, self.pending_tokens)
        if pending:
            # Drop pending tokens first. Encoding them would drop older tokens that the remaining tokens still see.
            remaining = self.pending_tokens - pending
            self._defer({name: x[:, :, :remaining] for name, x in self._pending.items()} if remaining else {})
            count -= pending
        self.commit()
        with self._update_both_sides():
            raw = min(count, self.raw_tokens)
            self.raw_tokens -= raw
            # Other tokens may be added at their positions.
            self._given = None, 0
            if count > raw:
                older = self.older_tokens - (count - raw)
                for side in self.sides.values():
                    side.keep(0, older)
                self.version += 1
            if self.keeps_past:
                self._drop_unseen()

    def reset(self) -> None:
        self._defer({})
        self.skipped = self.raw_tokens = 0
        for side in self.sides.values():
            side.keep(0, 0)
        self.version += 1

    def without_tokens(self, batch: int) -> Layer:
        """Return a layer for ``batch`` sequences with the same codecs but no tokens."""
        with float32_no_grad(self.device):
            sides = {name: side.without_tokens(batch) for name, side in self.sides.items()}
        return Layer(sides.get("k"), sides.get("v"))

    def select(self, indices: torch.Tensor) -> None:
        """Keep the sequences at ``indices`` of the batch, int64 ``[row]``, in that order. Codes are copied, not decoded."""
        self.commit()
        with self._update_both_sides():
            for side in self.sides.values():
                side.select(indices)
        self.version += 1

    def _defer(self, pending: dict[str, torch.Tensor]) -> None:
        """Keep ``pending``, the keys and values of a long update, until attention over them has been computed."""
        self._pending = pending
        self.pending_tokens = next(iter(pending.values())).shape[2] if pending else 0
        """Number of tokens in an update that did not fit in the tail and is not encoded yet."""

    def _encode(self, values: dict[str, torch.Tensor]) -> None:
        """Encode whole windows of ``values``, the raw keys and values. The remaining tokens become the new tail."""
        tokens = next(x.shape[2] for x in values.values())
        unseen = 0 if self.keeps_past else self._count_unseen(tokens)
        # No later query sees these tokens, so they are dropped instead of encoded.
        dropped = min(tokens, max(0, unseen - self.older_tokens)) // self.window * self.window
        # If tokens are dropped, all tokens before the tail are dropped, so that keys and values end at the same token.
        whole = max(dropped, self._tokens_in_whole_windows(tokens)) if dropped else self._encodable_tokens(tokens)
        with float32_no_grad(self.device), self._update_both_sides():
            firsts = {name: self.older_tokens + dropped if dropped else side.packed_tokens for name, side in self.sides.items()}
            places = {first: self._position_and_norms(first, values) for first in set(firsts.values())}
            encoded = {
                name: self._encode_side(
                    name, x[:, :, dropped:whole] if dropped else self.sides[name].with_unfinished(x[:, :, :whole]), *places[firsts[name]]
                )
                for name, x in values.items()
            }
            remainders = {name: x[:, :, whole:].clone() for name, x in values.items()}
            if dropped:
                self.skipped += self.older_tokens + dropped
                for side in self.sides.values():
                    side.keep(side.older_tokens, side.older_tokens)
            for name, (streams, packed, unfinished) in encoded.items():
                if packed:
                    self.sides[name].add(streams, packed)
                self.sides[name].replace_unfinished(unfinished)
            self.raw_tokens = tokens - whole
            if not self.keeps_past:
                self._drop_unseen()
            # This comes last, because the tail is not restored after an error.
            for name, side in self.sides.items():
                side.tail[:, :, : tokens - whole] = remainders[name]
        self.version += 1

    def _position_and_norms(self, first: int, values: Mapping[str, torch.Tensor]) -> tuple[int, dict[str, torch.Tensor]]:
        """Return the position of token ``first``. If norms determine raw tokens, also return the norms starting with this token.

        ``values`` contains all keys and values that are not packed.
        """
        position = self._start + self.skipped + first
        if "k" not in values or not any(side.codec.raw_positions for side in self.sides.values()):
            return position, {}
        return position, {name: self._norms(name, x, first) for name, x in values.items()}

    def _norms(self, name: str, x: torch.Tensor, first: int) -> torch.Tensor:
        """Return the norms of keys or values, starting with token ``first``, ``[batch, kv_head, token]``.

        ``x`` contains the keys or values that are not packed.
        """
        held = self.sides[name].side(0)
        before = held.norms(first) if first < held.tokens else x.new_zeros(*x.shape[:2], 0, dtype=torch.float32)
        return torch.cat([before, dispatch.norms(x)[:, :, max(0, first - held.tokens) :]], 2)

    def _encode_side(
        self, name: str, x: torch.Tensor, position: int, norms: Mapping[str, torch.Tensor]
    ) -> tuple[Mapping[str, torch.Tensor], int, torch.Tensor]:
        """Encode as many whole token groups as possible from the beginning of ``x``.

        Returns their streams, the number of encoded tokens, and the remaining values.
        """
        side = self.sides[name]
        packed = x.shape[2] // side.unit * side.unit
        streams = side.encode(x[:, :, :packed], f"{self.name}.{name}", position, norms) if packed else {}
        return streams, packed, x[:, :, packed:]

    def _encodable_tokens(self, tokens: int) -> int:
        """Return how many of ``tokens`` raw tokens can be encoded.

        These are whole windows, or enough tokens to complete the token groups of keys and values.
        """
        if self.is_uneven:
            remainders = [(side.unfinished.shape[2], side.unit) for side in self.sides.values()]
            period = math.lcm(*(unit for _, unit in remainders))
            for whole in range(tokens, max(0, tokens - period), -1):
                if all((rest + whole) % unit == 0 for rest, unit in remainders):
                    return whole
        return self._tokens_in_whole_windows(tokens)

    def _tokens_in_whole_windows(self, tokens: int) -> int:
        """Return how many of ``tokens`` raw tokens are in whole windows. The newest tokens always stay raw, and are not counted."""
        return max(0, tokens - self.newest) // self.window * self.window

    @contextmanager
    def _update_both_sides(self) -> Iterator[None]:
        """Return a context manager that undoes all changes to keys and values on failure."""
        states, counts = {name: side.state for name, side in self.sides.items()}, (self.skipped, self.raw_tokens)
        try:
            yield
        except BaseException:
            for name, side in self.sides.items():
                side.restore(states[name])
            self.skipped, self.raw_tokens = counts
            self.version += 1
            raise

    def _count_unseen(self, raw: int) -> int:
        """Return the number of tokens in the layer to which no later query attends. ``raw`` is the number of tokens in the tail."""
        return 0 if self.sliding_window is None else max(0, self.older_tokens + raw - self.sliding_window)

    def _drop_unseen(self) -> None:
        first = min(self._count_unseen(self.raw_tokens), *(side.packed_tokens for side in self.sides.values()))
        if first < self.window:
            return
        first = self._last_boundary(first)
        older = self.older_tokens
        for side in self.sides.values():
            side.keep(first, older)
        self.skipped += first
        self.version += 1

    def _last_boundary(self, token: int) -> int:
        """Return the last token index, at most ``token``, at which both keys and values can begin.

        If possible, it is a whole number of windows after the beginning of a run. Kernels then stay the same.
        """
        first = token
        for group in (self.window, 0):
            first = token
            while (aligned := min(_aligned_start(side, first, group or side.codec.group_tokens) for side in self.sides.values())) != first:
                first = aligned
            if token - first < self.window:
                break
        return first

    def _layer(self, tails: dict[str, torch.Tensor]) -> Layer:
        sides: dict[str, Side] = {name: side.with_tail(tails[name]) for name, side in self.sides.items()}
        return Layer(sides.get("k"), sides.get("v"), skipped=self.skipped if sides else 0)

    def _tail(self, name: str) -> torch.Tensor:
        pending = self._pending.get(name)
        if pending is not None and not self.raw_tokens:
            return pending.contiguous()
        tail = self.sides[name].tail[:, :, : self.raw_tokens]
        return tail if pending is None else torch.cat([tail, pending], 2)

    def _check_tensors(self, k: torch.Tensor | None, v: torch.Tensor | None) -> dict[str, torch.Tensor]:
        given: dict[str, torch.Tensor] = {}
        for name, x in (("k", k), ("v", v)):
            where = f"{self.name}.{name}"
            side = self.sides.get(name)
            if (side is None) != (x is None):
                problem = f"has no {name}: pass None" if side is None else f"has {name}, but None was passed: pass a tensor"
                raise InvalidParameter(f"{where}: the layer {problem}")
            if side is None or x is None:
                continue
            check_tensor(x, where)
            expected = [side.batch, side.heads, x.shape[2], side.dim]
            if list(x.shape) != expected:
                raise InvalidParameter(f"{where} has shape {list(x.shape)}, expected {expected} to continue the cache")
            if x.device != side.tail.device:
                raise InvalidParameter(
                    f"{where}: the values are on {x.device}, but the cache is on {side.tail.device}: pass x.to({str(side.tail.device)!r})"
                )
            given[name] = x
        if len({x.shape[2] for x in given.values()}) > 1:
            counts = " and ".join(f"{x.shape[2]} tokens for {name}" for name, x in given.items())
            raise InvalidParameter(f"{self.name}: got {counts}: pass the same number of tokens for keys and values")
        for name, x in given.items():
            side = self.sides[name]
            if x.device.type == "cpu" and side.codec.exact_dtype is None:
                check_finite(x, self.tokens, f"{self.name}.{name}")
            if x.dtype != side.tail.dtype and torch.promote_types(x.dtype, side.tail.dtype) != side.tail.dtype:
                side.widen(x.dtype)
                self.version += 1
        return {name: x.to(self.sides[name].tail.dtype) for name, x in given.items()}


def _aligned_start(side: LiveSide, start: int, group: int) -> int:
    """Return the last token index, at most ``start``, that is a multiple of ``group`` tokens after the beginning of its run."""
    first = 0
    for end in side.side(0).boundaries[1:-1]:
        if end > start:
            break
        first = end
    return first + (start - first) // group * group


DEFAULT_WINDOW = 128
"""Number of tokens that are encoded together if the recipe sets no window."""

ROOM = 2
"""Number of windows that fit in the raw tail in addition to the newest tokens. Steps can then continue after one window is full."""

NEWEST_TOKENS = 128
"""Number of newest tokens that stay raw if the recipe sets no window. The next tokens attend to them the most."""


def empty_layer(recipe: Recipe, layer_index: int, layers: int, k: torch.Tensor | None, v: torch.Tensor | None) -> Layer:
    """Create layer ``layer_index`` of ``layers``, without tokens, for keys and values with the shapes and dtypes of ``k`` and ``v``.

    Raises InvalidParameter or InvalidType if the recipe cannot encode such keys and values.
    """
    sides: dict[str, Side | None] = {}
    for name, x in zip(SIDES, (k, v), strict=True):
        if x is None:
            sides[name] = None
            continue
        where = f"layers[{layer_index}].{name}"
        if not isinstance(x, torch.Tensor) or x.dim() != 4 or not x.shape[0] or not x.shape[1]:
            description = f"has shape {list(x.shape)}" if isinstance(x, torch.Tensor) else f"is a {type(x).__name__}"
            raise InvalidParameter(f"{where} {description}, expected a tensor [batch, kv_head, token, dim]")
        if x.dtype not in RAW_DTYPES.values():
            raise InvalidType(f"{where} has dtype {x.dtype}, expected bfloat16, float16 or float32")
        with prefix_errors(where, InvalidParameter):
            codec = recipe.codec(layer_index, layers, name, x.shape[3], RAW_NAMES[x.dtype])
        sides[name] = Side(codec, PackedRuns(), x[:, :, :0].clone(), recipe.window)
    if not any(sides.values()):
        raise InvalidParameter(f"layers[{layer_index}]: k and v are both None: pass keys, values or both")
    return Layer(sides["k"], sides["v"])


def create_live_layer(layer: Layer, layer_index: int, sliding_window: int | None, start: int) -> LiveLayer:
    """Create a live layer that continues ``layer``. The cache begins at position ``start``."""
    group = math.lcm(*(side.codec.group_tokens for side in layer.sides.values()))
    windows = [side.window for side in layer.sides.values() if side.window]
    window = math.lcm(*windows, group) if windows else math.lcm(DEFAULT_WINDOW, group)
    newest = 0 if windows else NEWEST_TOKENS
    return LiveLayer(layer, window, newest, ROOM * window + newest, sliding_window, f"layers[{layer_index}]", start)


def check_windows(windows: Sequence[int | None] | None, layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer as a tuple. Raises InvalidParameter or InvalidType if ``windows`` are invalid."""
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
            raise InvalidParameter(f"sliding_windows contains {window}, expected a positive integer or None for each layer")
    return tuple(windows)
