"""The inputs of one forward pass, as far as its arguments determine them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kvpack.cache_names import NAMES
from kvpack.file.inputs import MASKED
from kvpack.file.sources import FROM_ENCODER, Sources
from kvpack.identity.rope import max_uniform_length

from .model_state import active_adapters, selects_adapters_per_row

WITHOUT_EFFECT = {
    *NAMES,
    "assistant_tokenizer",
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "num_logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "tokenizer",
    "use_cache",
}
"""Arguments of forward passes that are known not to affect keys and values. ``generate`` passes some of its own, such as tokenizers."""

_POSITIONS = ("position_ids", "cache_position")
OTHER_FREQUENCIES = "have the RoPE frequencies of a sequence of more than"
"""Beginning of the text about tokens whose RoPE frequencies depended on the sequence length. The length follows."""

_KNOWN_ARGUMENTS = {"input_ids", "inputs_embeds", "attention_mask", *_POSITIONS}
"""Arguments that ``Pass`` reads."""


def named_arguments(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of ``module`` by name, except those that are None or empty."""
    result = dict(kwargs)
    if args:
        parameters = inspect.signature(module.forward).parameters
        names = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
        result = {**dict(zip(names, args, strict=False)), **result}
    return {name: value for name, value in result.items() if not (value is None or (isinstance(value, (dict, list, tuple)) and not value))}


class Pass:
    """One forward pass that begins at token ``start``: its token ids, and the inputs that they do not determine.

    ``ids`` is ``[batch, token]`` or None, and ``adapters`` is the result of ``active_adapters``. Comparisons run on the device. Their
    results are read when ``undetermined_inputs`` is called.
    """

    def __init__(self, module: torch.nn.Module, arguments: Mapping[str, Any], start: int, encoder: bool) -> None:
        ids = arguments.get("decoder_input_ids" if encoder else "input_ids")
        self.ids = ids.detach().clone() if isinstance(ids, torch.Tensor) and ids.dim() == 2 else None
        self.start = start
        self.adapters = active_adapters(module)
        config = getattr(module, "config", None)
        self._longest = None if config is None else max_uniform_length(config.get_text_config(decoder=True))
        self._found: list[str] = []
        self.visible: torch.Tensor | None = None
        """Tokens that queries see according to a two-dimensional mask, bool ``[batch, token]``, beginning with the cache's.

        None without a mask.
        """
        self._all_visible: torch.Tensor | None = None
        self._positions: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._embedded = self.ids is None or arguments.get("inputs_embeds") is not None
        self._encoder = encoder
        self.sources: Sources | None = None
        """Recorded input of an encoder, which is available once the encoder's output is known."""
        others = sorted(set(arguments) - _KNOWN_ARGUMENTS - WITHOUT_EFFECT - ({"decoder_input_ids"} if encoder else set()))
        if others and not encoder:
            self._found.append(f"depend on the arguments {', '.join(others)}" if len(others) > 1 else f"depend on the argument {others[0]}")
        tensor = next((value for value in arguments.values() if isinstance(value, torch.Tensor)), None)
        device = tensor.device.type if tensor is not None else "cpu"
        if torch.is_autocast_enabled(device):
            self._found.append(f"were computed under autocast to {str(torch.get_autocast_dtype(device)).removeprefix('torch.')}")
        if selects_adapters_per_row(self.adapters):
            self._found.append("depend on the argument adapter_names")
        if module.training:
            self._found.append("were computed in training mode")
        if not encoder:
            self._record_mask(arguments.get("attention_mask"))
        self.record_positions(arguments)

    def note(self, text: str) -> None:
        """Record an input of the pass other than its token ids.

        ``text`` is a clause for messages, such as "were computed in training mode".
        """
        self._found.append(text)

    def record_positions(self, arguments: Mapping[str, Any]) -> None:
        """Record the positions that the model or a submodel receives, and whether they follow the cache."""
        for name in _POSITIONS:
            positions = arguments.get(name)
            if isinstance(positions, torch.Tensor) and positions.numel():
                stop = self.start + positions.shape[-1]
                expected = torch.arange(self.start, stop, device=positions.device)
                self._positions.append(((positions == expected).all(), positions.detach().clone()))

    def undetermined_inputs(self, tokens: int) -> list[str]:
        """Return a clause, for an error message, about each input of this pass that its token ids do not determine.

        The pass added ``tokens`` tokens.
        """
        result = [FROM_ENCODER] if self._encoder and self.sources is None else []
        result += self._found
        if self._embedded:
            result.insert(0, "came from embeddings, not from token ids")
        elif self.ids is not None and self.ids.shape[1] != tokens:
            result.insert(0, f"came from a forward pass over {self.ids.shape[1]} token ids, not {tokens}")
        if self._longest is not None and self.start + tokens > self._longest:
            result.append(f"{OTHER_FREQUENCIES} {self._longest} tokens")
        if not all(bool(plain) or self._counts_visible(positions) for plain, positions in self._positions):
            result.append("have positions other than those that follow the cache")
        return list(dict.fromkeys(result))

    @property
    def hides_tokens(self) -> bool:
        return self._all_visible is not None and not bool(self._all_visible)

    @property
    def counts_visible(self) -> bool:
        """True if the positions passed to the model count only tokens that are not hidden, as the positions of ``generate`` do."""
        return bool(self._positions) and all(self._counts_visible(positions) for _, positions in self._positions)

    def _counts_visible(self, positions: torch.Tensor) -> bool:
        if self.visible is None or not self.hides_tokens:
            return False
        visible = self.visible[:, self.start :]
        if positions.shape[-1] != visible.shape[1] or (positions.dim() > 1 and positions.shape[-2] not in (1, visible.shape[0])):
            return False
        counted = self.visible.cumsum(1)[:, self.start :] - 1
        return bool(((positions.to(visible.device) == counted) | ~visible).all())

    def _record_mask(self, mask: Any) -> None:
        plain = isinstance(mask, torch.Tensor) and mask.dim() == 2
        if plain and mask.shape[1] == (mask.shape[1] if self.ids is None else self.start + self.ids.shape[1]):
            self.visible = mask != 0
            self._all_visible = self.visible.all()
        elif mask is not None and any(part is not None for part in _mask_parts(mask)):
            self._found.append(MASKED)


def _mask_parts(mask: Any) -> Iterable[Any]:
    return mask.values() if isinstance(mask, dict) else (mask,)
