"""Cache layers for transformers with recurrent or convolution states. The model writes them in place, and kvpack does not pack them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from kvpack.cache.cache import Cache
from kvpack.cache.dense_states import read_states
from kvpack.cache.side import row_indices
from kvpack.cache.states import States
from kvpack.formats.errors import InvalidParameter
from kvpack.live.cache import LiveCache

from .layers import DecodingWarnings, PackedLayer


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """A cache layer with states but no keys and values. ``count`` is the number of states of each kind."""

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, layer_index: int, count: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=count)
        self.state_number = layer_index

    @property
    def states(self) -> dict[str, torch.Tensor]:
        """Copies of the states, by their names in a file. Empty before the first token."""
        return read_states(self, f"layers[{self.state_number}]")

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Set the states to copies of ``states``. Raises InvalidParameter if the model does not keep such states."""
        for name, state in states.items():
            kind, _, place = name.partition(".")
            if kind not in ("conv", "recurrent") or place not in map(str, range(self.number_of_states)):
                raise InvalidParameter(
                    f"layers[{self.state_number}] of the cache has the state {name!r}, but the model keeps conv.0 to "
                    f"conv.{self.number_of_states - 1} and recurrent.0 to recurrent.{self.number_of_states - 1}"
                )
            index = int(place)
            LinearAttentionLayer.lazy_initialization(self, **{f"{kind}_states": state}, state_idx=index)
            tensors = self.conv_states if kind == "conv" else self.recurrent_states
            tensors[index].copy_(state)
            self.device, self.dtype = state.device, state.dtype
            self.has_previous_state[index] = True

    def select_states(self, indices: Any) -> None:
        rows = torch.tensor(row_indices(indices), dtype=torch.int64, device="cpu")
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                if state is not None:
                    states[index] = state[rows.to(state.device)]

    def activate_past_recording(self) -> None:
        """Raise InvalidParameter: recurrent states cannot be rolled back."""
        raise InvalidParameter(
            f"layers[{self.state_number}] keeps recurrent states, which cannot be rolled back: use a model without them for assisted "
            "decoding"
        )

    def reset(self) -> None:
        """Drop the states. The next states may have a different batch size."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)

    def check_window(self, crop: int = 0) -> None:
        """Do nothing, because this layer does not attend to tokens."""

    def check_crop(self, tokens_to_remove: int) -> None:
        """Do nothing. The cache checks whether it has the states of an earlier token."""

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing. The cache restores the states of an earlier token."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.select_states(indices)


class PackedStateLayer(StateLayer, PackedLayer):
    """A cache layer with states in addition to its packed keys and values."""

    # Otherwise generate would compile the model, as it does for static caches.
    is_compileable = False

    def __init__(self, live: LiveCache, layer_index: int, window: int | None, decoding: DecodingWarnings, count: int) -> None:
        PackedLayer.__init__(self, live, layer_index, window, decoding)
        StateLayer.__init__(self, layer_index, count)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the states. Packed keys and values get their shapes from the first tokens."""
        if not args:
            StateLayer.lazy_initialization(self, **kwargs)

    def get_max_length(self) -> int:
        return -1

    def check_window(self, crop: int = 0) -> None:
        PackedLayer.check_window(self, crop)

    def check_crop(self, tokens_to_remove: int) -> None:
        PackedLayer.check_crop(self, tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        PackedLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        StateLayer.reset(self)
        PackedLayer.reset(self)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        PackedLayer.batch_select_indices(self, indices)
        self.select_states(indices)


def copy_states(layers: Sequence[Any]) -> States:
    """Return copies of the states of each cache layer. A layer without states has an empty dict."""
    return tuple(layer.states if isinstance(layer, StateLayer) else {} for layer in layers)


def restore(layers: Sequence[Any], states: States) -> None:
    """Set the states of cache layers to copies of ``states``. Layers without states are reset."""
    for layer, layer_states in zip(layers, states, strict=True):
        if isinstance(layer, StateLayer):
            device = layer.device
            # Reset only the states: crop handles the keys and values of a layer that has both.
            StateLayer.reset(layer)
            layer.set_states({name: state if device is None else state.to(device) for name, state in layer_states.items()})


def restore_states(layers: Sequence[Any], cache: Cache) -> None:
    """Set the states of cache layers to those in ``cache``. Raises InvalidParameter if their names or shapes differ."""
    device = next((side.device for layer in cache for side in layer.sides.values()), None)
    for number, (state_layer, layer) in enumerate(zip(layers, cache.layers, strict=True)):
        keeps = isinstance(state_layer, StateLayer)
        if keeps and not layer.states and cache.tokens:
            raise InvalidParameter(
                f"layers[{number}] of the model keeps states, but the cache has none for it: load the model that computed the cache"
            )
        if layer.states and not keeps:
            raise InvalidParameter(
                f"layers[{number}] of the cache has the states {' and '.join(layer.states)}, which "
                "only a model can continue: use KvpackCache.of(cache, model) with the model that computed it"
            )
        if keeps:
            # States kept for earlier tokens may be in host memory.
            state_layer.set_states({name: state if device is None else state.to(device) for name, state in layer.states.items()})


def check_states_available(layers: Sequence[Any]) -> None:
    """Raise InvalidParameter if a layer still has no states after its first tokens, because the model keeps them in its modules."""
    for number, layer in enumerate(layers):
        if isinstance(layer, StateLayer) and not any(layer.has_previous_state.values()):
            raise InvalidParameter(
                f"layers[{number}] contains no state after the cache's tokens: the model keeps its states in its modules, not its cache, "
                "so kvpack cannot store them: run the model without a KvpackCache"
            )
