"""Switches a model's attention to "kvpack" for as long as caches need it."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from .hooks import outermost_model
from .plain_attention import NAMES, forget_attention, remember_attention

_SWITCHES: weakref.WeakValueDictionary[int, AttentionSwitch] = weakref.WeakValueDictionary()
"""The switch of each model, keyed by the model's id. A switch exists as long as a cache references it."""

_announced_model: list[str] = []
"""Name of the first model of the process whose switch was reported."""


class AttentionSwitch:
    """Sets one model's attention to "kvpack". When nothing references this object anymore, the previous attention is restored."""

    def __init__(self, model: Any) -> None:
        outer = outermost_model(model)
        self._model = weakref.ref(outer)
        before = {name: config._attn_implementation for name, config in _configs(outer).items()}
        outer.set_attn_implementation("kvpack")
        for name, config in _configs(outer).items():
            remember_attention(config, str(before.get(name) or "sdpa"))
        weakref.finalize(self, _restore_attention, self._model, before)
        name = type(outer).__name__
        if not _announced_model:
            _announced_model.append(name)
            logging.getLogger("kvpack").info(
                'the attention of %s is now "kvpack", for packed layers; plain tensors still use %r, which release() restores',
                name,
                before[""],
            )

    def __deepcopy__(self, memo: object) -> AttentionSwitch:
        return self

    @staticmethod
    def of(model: Any) -> AttentionSwitch | None:
        """Return the switch of ``model``, creating it if necessary.

        Returns None if the user has set the model's attention to "kvpack".
        """
        outer = outermost_model(model)
        switch = _SWITCHES.get(id(outer))
        # The model of this switch may have been deleted and its id reused.
        if switch is None or switch._model() is not outer:
            if outer.config.get_text_config(decoder=True)._attn_implementation in NAMES:
                return None
            switch = _SWITCHES[id(outer)] = AttentionSwitch(outer)
        return switch


def _configs(model: Any) -> dict[str, Any]:
    """Return the configurations of a model and of its submodels by name. The model's own has an empty name."""
    parts = {name: getattr(model.config, name) for name in model.config.sub_configs if getattr(model.config, name, None) is not None}
    return {"": model.config, **parts}


def _restore_attention(model: weakref.ref[Any], attention_names: dict[str, str | None]) -> None:
    outer = model()
    if outer is None:
        return
    for config in _configs(outer).values():
        forget_attention(config)
    if outer.config._attn_implementation not in NAMES:
        # The user has set another attention in the meantime.
        return
    chosen = {name: attention for name, attention in attention_names.items() if attention is not None}
    outer.set_attn_implementation(chosen if len(set(chosen.values())) > 1 else chosen[""])
    for name, config in _configs(outer).items():
        # Restore the unset value of parts that the model has not created.
        if name in attention_names and attention_names[name] is None:
            config._attn_implementation = None
