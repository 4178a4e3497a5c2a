"""Returns a KvpackCache to earlier tokens. Layers with states can only return to tokens after which their states were kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpack.cache.cache import Cache, all_states
from kvpack.cache.side import row_indices
from kvpack.cache.states import SelectedStates, States
from kvpack.formats.errors import OutOfBounds
from kvpack.live.cache import LiveCache

from .layers import PackedLayer
from .state_layers import StateLayer, check_states_available, copy_states, restore
from .tracking import Tracking


class Rollback:
    """The kept states of ``layers``, by number of tokens, and methods that return to them. The initial states are those in ``cache``."""

    def __init__(self, layers: Sequence[Any], live: LiveCache, passes: Tracking, cache: Cache | None) -> None:
        self._layers, self._live, self._passes = layers, live, passes
        self._states = {} if cache is None else {position: SelectedStates(states) for position, states in all_states(cache).items()}

    def positions(self) -> tuple[int, ...]:
        """Return the token counts at which states were kept, in ascending order."""
        return tuple(sorted(self._states))

    def states_before(self, tokens: int) -> dict[int, States]:
        """Return the states that were kept after fewer than ``tokens`` tokens, by token count."""
        return {position: states.selected for position, states in self._states.items() if position < tokens}

    def snapshot(self) -> None:
        """Keep a copy of all states after the newest token."""
        tokens = self._passes.record.tokens
        if self._passes.states and tokens:
            self._passes.check_states(ended=True)
            check_states_available(self._layers)
            self._states[tokens] = SelectedStates(
                tuple({name: state.cpu() for name, state in layer.items()} for layer in copy_states(self._layers))
            )

    def nearest(self, tokens: int) -> int:
        """Return the largest token count, at most ``tokens``, to which the cache can return."""
        if not self._passes.states or tokens == self._passes.record.tokens:
            return tokens
        return max((position for position in self._states if position <= tokens), default=0)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens of every layer. ``tokens_to_remove`` is their number, negated, as transformers passes it.

        Raises OutOfBounds or InvalidParameter.
        """
        tokens = self._passes.record.tokens + tokens_to_remove
        states = self._states_after(tokens, tokens_to_remove)
        removed = [tokens_to_remove] * len(self._layers)
        for number, layer in enumerate(self._layers):
            if isinstance(layer, PackedLayer):
                seen = self._live.seen_tokens(number)
                if seen < tokens:
                    raise OutOfBounds(
                        f"crop({tokens_to_remove}) leaves {tokens} tokens, but layers[{number}] has seen only {seen}, because a forward "
                        f"pass failed before reaching that layer: call crop({seen - self._passes.record.tokens}) to drop what that pass "
                        "added"
                    )
                removed[number] = tokens - seen
            layer.check_crop(removed[number])
        for layer, count in zip(self._layers, removed, strict=True):
            layer.crop(count)
        self._passes.crop(tokens)
        if states is not None:
            restore(self._layers, states)
            self._passes.mark_restored()
            self._states = {position: position_states for position, position_states in self._states.items() if position <= tokens}

    def _states_after(self, tokens: int, tokens_to_remove: int) -> States | None:
        """Return the states to restore after the first ``tokens`` tokens, or None if no layer has states or all are current."""
        if not self._passes.states or (not tokens_to_remove and not (self._passes.has_failed and tokens in self._states)):
            return None
        if not tokens:
            return ({},) * len(self._layers)
        states = self._states.get(tokens)
        if states is None:
            number = next(number for number, layer in enumerate(self._layers) if isinstance(layer, StateLayer))
            nearest = max((position for position in self._states if position < tokens), default=0)
            hint = f"call rewind({tokens}), which returns to the states after {nearest} tokens" if nearest else "call reset()"
            raise OutOfBounds(
                f"crop({tokens_to_remove}): layers[{number}] keeps states, but has none after the first {tokens} tokens: {hint}; "
                "to keep more states, call snapshot_states() between passes"
            )
        return states.selected

    def forget(self) -> None:
        self._states = {}

    def select(self, indices: Any) -> None:
        if self._states:
            rows = row_indices(indices)
            self._states = {position: states.select(rows) for position, states in self._states.items()}
