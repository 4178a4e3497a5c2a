"""One packed layer as a layer of a transformers cache."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DummyLayer

from kvpack.cache.layer import Layer
from kvpack.formats.errors import InvalidShape, KvpackWarning, OutOfBounds


class Decoding:
    """Warns once that a model gets decoded keys and values; ``told`` if it has warned, or if decoding was requested."""

    def __init__(self, told: bool) -> None:
        self.told = told

    def tell(self, name: str) -> None:
        """Issue a KvpackWarning about the model ``name``, unless one was issued."""
        if not self.told:
            self.told = True
            text = f"{name} has attention that cannot take packed layers: each call decodes the keys and values of its layer"
            warnings.warn(text, KvpackWarning, stacklevel=3)


class AbsentLayer(DummyLayer):  # type: ignore[misc]
    """A layer that holds nothing: it uses the keys and values of another."""

    packed = Layer(None, None)
    is_sliding = False

    def check_window(self, crop: int = 0) -> None:
        """Do nothing: this layer attends to no tokens of its own."""

    def check_crop(self, tokens_to_remove: int) -> None:
        """Do nothing: this layer holds no tokens."""


class PackedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One packed layer; a sliding-window layer may hold only the newest tokens that it has seen.

    ``window`` is the model's sliding window for it, None when it has none or the model is not known. ``decoding`` is told when
    ``keys`` or ``values`` are decoded for a model that reads them as tensors.
    """

    # Cropping leaves tokens packed that were raw before, so transformers must not treat it as an exact undo.
    is_croppable = False
    supports_early_init = False

    def __init__(self, packed: Layer, window: int | None, decoding: Decoding) -> None:
        self.packed, self.window = packed, window
        self.is_initialized = True
        self._decoding = decoding

    @property
    def keys(self) -> torch.Tensor | None:
        """Dense keys, as cross-attention reads them."""
        self._decoding.tell("the model")
        return self.packed.k.unpack(self.packed.k.tail.dtype) if self.packed.k is not None else None

    @property
    def values(self) -> torch.Tensor | None:
        """Dense values, as cross-attention reads them."""
        self._decoding.tell("the model")
        return self.packed.v.unpack(self.packed.v.tail.dtype) if self.packed.v is not None else None

    @property
    def is_sliding(self) -> bool:
        """Whether the oldest tokens are gone."""
        return self.packed.skipped > 0

    @property
    def batch_size(self) -> int:
        return next((side.batch for side in self.packed.sides.values()), 1)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the layer is made of what was packed."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append, and return the packed layer twice."""
        self.packed = self.packed.append(key_states, value_states)
        return self.packed, self.packed

    def get_seq_length(self) -> int:
        return self.packed.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.packed.tokens + query_length, self.packed.skipped

    def get_max_length(self) -> int:
        return -1

    def check_window(self, crop: int = 0) -> None:
        """Raise InvalidShape when the next token would attend to tokens that the layer skipped."""
        held = self.packed.tokens - crop
        if self.packed.skipped and self.window is not None and held < self.window - 1:
            less = f" ({crop} are to be dropped)" if crop else ""
            raise InvalidShape(
                f"the layer holds only the newest {self.packed.tokens} of its tokens{less}, the model attends to a window of {self.window}"
            )

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise OutOfBounds or InvalidShape for a ``crop`` that cannot be done."""
        held = self.packed.tokens
        if not -held <= tokens_to_remove <= 0:
            raise OutOfBounds(f"crop({tokens_to_remove}) of a layer that holds {held} tokens; expected -{held} to 0")
        self.check_window(-tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest ``-tokens_to_remove`` tokens (transformers passes a negative number)."""
        self.check_crop(tokens_to_remove)
        self.packed = self.packed.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Drop all tokens."""
        self.packed = replace(self.packed.crop(self.packed.tokens), skipped=0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices`` of the batch, in that order; codes are copied, never decoded."""
        self.packed = self.packed.select(indices)
