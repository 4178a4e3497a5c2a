"""Selects the attention for plain tensors: the one that the model would use without kvpack."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

NAMES = ("kvpack", "kvpack|eager")
"""Names of kvpack's attention. With the second one, plain tensors are always passed to eager attention."""

_NOT_IN_SDPA = ("s_aux", "softcap")
"""Options that eager attention functions support and scaled dot product attention ignores."""

_KEY_SELECTION_OPTIONS = ("indices", "block_indices")
"""Options with which models that have an indexer select the tokens to attend to, unless their attention is "sdpa" or "eager"."""

_previous_attention: dict[int, tuple[weakref.ref[Any], str]] = {}
"""For each configuration that a ``AttentionSwitch`` has changed, keyed by its id: a reference to it, and the previous attention."""


def remember_attention(config: Any, name: str) -> None:
    """Use attention ``name`` for plain tensors of models with ``config`` until ``forget_attention``."""
    number = id(config)
    # Remove the entry together with the configuration, because its id may then be reused.
    _previous_attention[number] = (weakref.ref(config, lambda _: _previous_attention.pop(number, None)), name)


def remember_copies(memo: dict[int, Any]) -> None:
    """Use the same attention for plain tensors of copied models as for the originals. ``memo`` is the memo of ``copy.deepcopy``."""
    for number, (config, name) in list(_previous_attention.items()):
        if number in memo and config() is not None:
            remember_attention(memo[number], name)


def forget_attention(config: Any) -> None:
    """Use transformers' own default for plain tensors of models with ``config``."""
    _previous_attention.pop(id(config), None)


def plain_attention_name(config: Any) -> str:
    """Return the attention for plain tensors of models with ``config``: the previous one, "sdpa" or "eager".

    If a ``KvpackCache`` did not set "kvpack", the previous attention is unknown, and transformers' default is returned.
    """
    if (before := _previous_attention.get(id(config))) is not None:
        return before[1]
    models = [model for model in _subclasses(PreTrainedModel) if getattr(model, "config_class", None) is type(config)]
    supported = bool(models) and all(model._supports_sdpa for model in models)
    return "sdpa" if supported and config._attn_implementation != "kvpack|eager" else "eager"


def plain_attention(module: torch.nn.Module, options: dict[str, Any]) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the attention function for plain tensors of one attention module. Raises InvalidParameter if there is none."""
    if used := [name for name in _KEY_SELECTION_OPTIONS if options.get(name) is not None]:
        raise InvalidParameter(
            f"{type(module).__name__} passes {' and '.join(used)} in place of a mask, and its own attention would attend to all tokens: "
            'call model.set_attn_implementation("sdpa"), so that the model creates a mask'
        )
    name = plain_attention_name(module.config)
    if name not in ("sdpa", "eager"):
        return AttentionInterface()[name]  # type: ignore[no-any-return]
    if name == "sdpa":
        lost = [name for name in _NOT_IN_SDPA if options.get(name) is not None]
        if lost:
            raise InvalidParameter(
                f"{type(module).__name__} passes {' and '.join(lost)}, which scaled dot product attention does not support: "
                'call model.set_attn_implementation("kvpack|eager")'
            )
        function: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = sdpa_attention_forward
        return function
    for parent in type(module).__mro__:
        eager = getattr(sys.modules.get(parent.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager  # type: ignore[no-any-return]
    raise InvalidParameter(
        f"{type(module).__name__} has no eager attention that kvpack can use for plain tensors: run such passes before "
        'calling model.set_attn_implementation("kvpack")'
    )


def _subclasses(parent: Any) -> Iterator[Any]:
    for child in parent.__subclasses__():
        yield child
        yield from _subclasses(child)
