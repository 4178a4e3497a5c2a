"""Detection of changes to a model's adapters, weights and mode that affect its keys and values."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_ADAPTERS_WITH_OWN_CACHE = {"PREFIX_TUNING", "CARTRIDGE"}
"""Kinds of PEFT adapters that provide a cache of their own."""

MAX_CHECKED_PARAMETERS = 4
"""Number of parameters that each decode step checks. A few are enough, because training and ``to`` change all of them."""


def active_adapters(model: torch.nn.Module) -> tuple[Any, ...]:
    """Return the state of every PEFT layer in a transformers model. Empty without adapters. Fast enough to call in each pass."""
    # PEFT stores its settings on the model that it changes.
    if "peft_config" not in vars(model):
        return ()
    return tuple(_layer_state(module) for module in iterate_modules(model) if hasattr(module, "merged_adapters"))


def selects_adapters_per_row(adapters: tuple[Any, ...]) -> bool:
    """Return True if a call selects adapters per sequence with ``adapter_names``, for which PEFT adds hooks to adapter layers."""
    return any(hooks for *_, hooks in adapters)


def check_accepts_cache(model: Any, *, continues: bool = False) -> None:
    """Raise InvalidParameter if PEFT's wrapper ``model`` would replace a cache, or drop tokens of a prompt that ``continues`` one."""
    settings = getattr(model, "active_peft_config", None)
    kind = str(getattr(getattr(settings, "peft_type", None), "value", ""))
    if kind in _ADAPTERS_WITH_OWN_CACHE:
        raise InvalidParameter(
            f"the active adapter of {type(model).__name__} is of type {kind}, which replaces the cache that it receives with its "
            "own: run the model without a KvpackCache"
        )
    if continues and getattr(settings, "is_prompt_learning", False):
        raise InvalidParameter(
            f"the active adapter of {type(model).__name__} is of type {kind}, with which PEFT computes only the last token of a prompt "
            "that continues a cache: generate into an empty KvpackCache"
        )


def checkpointing_modules(model: torch.nn.Module) -> list[weakref.ref[Any]]:
    """Return the modules that support gradient checkpointing: those with an attribute ``gradient_checkpointing``."""
    name = "gradient_checkpointing"
    return [weakref.ref(module) for module in iterate_modules(model) if name in vars(module) or hasattr(type(module), name)]


class ModelState:
    """A summary of a model's adapters, weights, buffers, dtypes and mode. It reveals later changes, even in place.

    Creating it reads no values and keeps no weights alive. It misses only changes through ``data``, or through memory that is shared with
    other libraries.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modes = active_adapters(model), model.training
        self._parameters, self._buffers = _versions(model, "_parameters"), _versions(model, "_buffers")
        owners = {id(x): (module, name, x) for module in iterate_modules(model) for name, x in module._parameters.items() if x is not None}
        trained_first = sorted(owners.values(), key=lambda owner: not owner[2].requires_grad)[:MAX_CHECKED_PARAMETERS]
        self._checked = [(weakref.ref(module), name, _version(x)) for module, name, x in trained_first]

    def matches(self, model: torch.nn.Module) -> bool:
        """Return False if ``model`` may have changed since the summary was created."""
        # Tensors that were created in inference mode have no versions, so nothing shows that their values are the same.
        if any(version is None for _, version, _ in (*self._parameters, *self._buffers)):
            return False
        return (
            self._modes == (active_adapters(model), model.training)
            and not self.has_other_weights(model)
            and self._buffers == _versions(model, "_buffers")
        )

    def has_other_weights(self, model: torch.nn.Module, first_only: bool = False) -> bool:
        """Return True if parameters have changed or been replaced. With ``first_only``, only ``MAX_CHECKED_PARAMETERS`` are checked."""
        if not first_only:
            return self._parameters != _versions(model, "_parameters")
        return any(
            (module := kept()) is None or (x := module._parameters.get(name)) is None or _version(x) != version
            for kept, name, version in self._checked
        )


def _versions(model: torch.nn.Module, kind: str) -> list[tuple[Any, ...]]:
    """Return the versions of all parameters or buffers. They are in the order of the modules, so that a swap is detected."""
    return [_version(x) for module in iterate_modules(model) for x in getattr(module, kind).values() if x is not None]


def _layer_state(layer: Any) -> tuple[Any, ...]:
    active, scaling = getattr(layer, "_active_adapter", ()), getattr(layer, "scaling", None)
    names = (active,) if isinstance(active, str) else tuple(active)
    factors = tuple(scaling.values()) if isinstance(scaling, dict) else ()
    disabled = getattr(layer, "_disable_adapters", False)
    return names, disabled, tuple(layer.merged_adapters), factors, len(layer._forward_pre_hooks)


def iterate_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield ``model.modules()`` without building their names, which would take most of the time."""
    waiting, seen = [model], set()
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            waiting += [child for child in reversed(module._modules.values()) if child is not None]


def _version(x: torch.Tensor) -> tuple[Any, ...]:
    try:
        address = x.data_ptr()
    except RuntimeError:
        # Some quantized tensors have no memory of their own.
        address = id(x)
    return address, None if x.is_inference() else x._version, x.dtype
