"""Describes the adapters in effect on a model as text: their names, and a digest of their weights, scaling and state."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from kvpack.formats.errors import InvalidParameter

from .canonical_text import IDENTITY_ADVICE, class_name, json_digest, tensor_digest, to_json_value
from .modules import ModelPart, check_determined, child_modules

_ADAPTER_STATE = {"_active_adapter", "_disable_adapters", "merged_adapters"}
"""Attributes of an adapter layer that determine which adapters are in effect. They are described separately."""
_IGNORED_ATTRIBUTES = {"_adapters", "_caches", "_tied_adapter", "kwargs", "quantization_backend"}
"""Attributes of an adapter layer that do not affect values, or that are described elsewhere."""
_CUSTOM_ADAPTERS = re.compile(r"lora|adapter", re.IGNORECASE)


def adapters_text(layers: Sequence[ModelPart], named: str | None) -> str:
    """Return the identity field ``adapter``: the names of the adapters in effect (or ``named``), and their digest.

    The field is empty without adapters. Adapters that are loaded but not in effect are ignored. Raises InvalidParameter, naming the module,
    for an adapter that kvpack cannot describe.
    """
    states: list[Any] = []
    names: set[str] = set()
    for part in layers:
        if part.adapter == "layer":
            active = _active_adapters(part.module)
            if active:
                names.update(active)
                states.append([part.name, _layer_state(part, active)])
        elif part.adapter == "around":
            states += _prompt_state(part.module, names)
        elif home_made := _custom_state(part):
            states.append([part.name, home_made])
    if states:
        label = ",".join(sorted(names)) if named is None else named
        return f"{label} {json_digest(states)}".strip()
    label = named or ""
    return f"{label} disabled".strip() if any(part.adapter for part in layers) else label


def _active_adapters(layer: Any) -> list[str]:
    """Return the names of the adapters that a PEFT layer applies: merged ones, and active ones unless the layer is disabled."""
    active = layer.active_adapters
    merged = list(getattr(layer, "merged_adapters", ()))
    known = _known_attributes(layer)
    applied = [] if layer.disable_adapters else [name for name in active if name in known and name not in merged]
    return merged + applied


def _known_attributes(layer: Any) -> set[str]:
    known: set[str] = set()
    for name in (*layer.adapter_layer_names, *layer.other_param_names):
        values: Any = layer
        for step in name.split("."):
            values = getattr(values, step, None)
        if hasattr(values, "keys"):
            known.update(values.keys())
    return known


def _layer_state(part: ModelPart, active: list[str]) -> list[Any]:
    layer: Any = part.module
    if any(getattr(layer, "sample_at_inference", {}).get(name) for name in active):
        raise InvalidParameter(
            f"{part.name} has the adapter {class_name(type(layer))} with sample_at_inference, so its values are random: turn "
            "sample_at_inference off"
        )
    others = _known_attributes(layer) - set(active)
    state = {"disabled": layer.disable_adapters, "merged": list(getattr(layer, "merged_adapters", ())), "applied": active}
    return [class_name(type(layer)), sorted(state.items()), _module_state(part.name, layer, others)]


def _module_state(where: str, module: Any, other_adapters: Collection[str]) -> list[Any]:
    """Return a description of an adapter module's attributes, tensors and inner modules, except those of ``other_adapters``."""
    import torch

    check_determined(where, type(module))
    usual = vars(torch.nn.Module()).keys() | _ADAPTER_STATE | _IGNORED_ATTRIBUTES
    attributes = [(name, value) for name, value in sorted(vars(module).items()) if name not in usual]
    state = [[name, _value_state(f"{where}.{name}", value, other_adapters)] for name, value in attributes]
    for name, tensor in sorted([*module._parameters.items(), *module._buffers.items()]):
        if tensor is not None:
            state.append([name, tensor_digest(f"{where}.{name}", tensor)])
    for name, child in sorted(child_modules(module)):
        state.append([name, [class_name(type(child)), _value_state(f"{where}.{name}", child, other_adapters)]])
    return state


def _value_state(where: str, value: Any, other_adapters: Collection[str]) -> Any:
    import torch

    if isinstance(value, (Mapping, torch.nn.ModuleDict, torch.nn.ParameterDict)) or _has_class(value, "BufferDict"):
        keys = sorted(key for key in value.keys() if key not in other_adapters)  # noqa: SIM118
        return [[key, _value_state(f"{where}.{key}", value[key], ())] for key in keys]
    if isinstance(value, torch.nn.Module):
        return [class_name(type(value)), _module_state(where, value, other_adapters)]
    if type(value).__module__.startswith("peft.") and hasattr(value, "__dict__") and not isinstance(value, type):
        # For example a variant of LoRA: a class and its settings.
        check_determined(where, type(value))
        attributes = sorted(vars(value).items())
        return [class_name(type(value)), [[name, _value_state(f"{where}.{name}", item, ())] for name, item in attributes]]
    return to_json_value(where, value)


def _has_class(value: Any, name: str) -> bool:
    return any(base.__name__ == name for base in type(value).__mro__)


def _prompt_state(model: Any, names: set[str]) -> list[Any]:
    """Return a description of the learned prompt that a PeftModel prepends, if it is enabled. Adds the prompt's name to ``names``."""
    encoders = model._modules.get("prompt_encoder")
    if encoders is None or model._adapters_disabled:
        return []
    name = model.active_adapter
    config = model.peft_config[name]
    if getattr(config, "num_tasks", None) is not None:
        raise InvalidParameter(f"the adapter {name!r} is {class_name(type(config))}, whose prompt depends on task_ids: {IDENTITY_ADVICE}")
    names.add(name)
    encoder = encoders[name]
    settings = {key: value for key, value in config.to_dict().items() if key not in _IGNORED_PROMPT_SETTINGS}
    return [
        [name, class_name(type(encoder)), to_json_value(f"peft_config[{name!r}]", settings), _module_state("prompt_encoder", encoder, ())]
    ]


_IGNORED_PROMPT_SETTINGS = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "tokenizer_kwargs"}
"""Settings of a prompt-tuning configuration that do not affect values."""


def _custom_state(part: ModelPart) -> list[Any]:
    if not part.module._parameters:
        return []
    kind = type(part.module).__name__
    parameters = [(name, tensor) for name, tensor in part.module._parameters.items() if tensor is not None and _is_adapters(name, kind)]
    return [[name, tensor_digest(f"{part.name}.{name}", tensor)] for name, tensor in sorted(parameters)]


@lru_cache(maxsize=4096)
def _is_adapters(parameter: str, kind: str) -> bool:
    """Return True if a parameter outside PEFT belongs to an adapter, judging by its name, such as lora_A, or its module's class."""
    return bool(_CUSTOM_ADAPTERS.search(parameter) or _CUSTOM_ADAPTERS.search(kind))
