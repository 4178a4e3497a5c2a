"""Switches a model's attention to "kvpack" for as long as caches need it."""

from __future__ import annotations

import logging
from typing import Any

from .hooks import outermost_model
from .model_changes import CHANGES_LOCK, Lease, ModelChange, is_changed, lease
from .plain_attention import NAMES, forget_attention, remember_attention

_announced_model: list[str] = []
"""Name of the first model of the process whose switch was reported."""


class AttentionSwitch(ModelChange):
    """Sets one model's attention to "kvpack" until the previous attention is restored."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._before = {name: config._attn_implementation for name, config in _configs(model).items()}
        model.set_attn_implementation("kvpack")
        for name, config in _configs(model).items():
            remember_attention(config, str(self._before.get(name) or "sdpa"))
        if not _announced_model:
            _announced_model.append(type(model).__name__)
            logging.getLogger("kvpack").info(
                'the attention of %s is now "kvpack", for packed layers; plain tensors still use %r, which release() restores',
                _announced_model[0],
                self._before[""],
            )

    @staticmethod
    def for_model(model: Any) -> Lease[AttentionSwitch] | None:
        """Return a lease on the ``AttentionSwitch`` of ``model``, or None if the user has set the model's attention to "kvpack"."""
        outer = outermost_model(model)
        with CHANGES_LOCK:
            if not is_changed(AttentionSwitch, outer) and outer.config.get_text_config(decoder=True)._attn_implementation in NAMES:
                return None
            return lease(AttentionSwitch, outer)

    def undo(self) -> None:
        """Restore the previous attention implementation, unless the user has changed it since."""
        outer = self.module()
        if outer is None:
            return
        for config in _configs(outer).values():
            forget_attention(config)
        if outer.config._attn_implementation not in NAMES:
            return
        chosen = {name: attention for name, attention in self._before.items() if attention is not None}
        outer.set_attn_implementation(chosen if len(set(chosen.values())) > 1 else chosen[""])
        for name, config in _configs(outer).items():
            # Restore the unset value of parts that the model has not created.
            if name in self._before and self._before[name] is None:
                config._attn_implementation = None


def _configs(model: Any) -> dict[str, Any]:
    """Return the configurations of a model and its submodels by submodel name. The model's own has an empty name."""
    parts = {name: getattr(model.config, name) for name in model.config.sub_configs if getattr(model.config, name, None) is not None}
    return {"": model.config, **parts}
