"""Lists the modules of a transformers model, without the modules of adapters and PyTorch's wrappers.

PEFT is recognized by its class names, so it need not be installed.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpack.formats.arguments import describe
from kvpack.formats.errors import InvalidParameter, InvalidType

from .canonical_text import IDENTITY_ADVICE, class_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

_ADAPTER_LAYERS = {"BaseTunerLayer", "AuxiliaryTrainingWrapper", "ModulesToSaveWrapper"}
"""PEFT classes that replace one module of the model."""
_ADAPTER_WRAPPERS = {"PeftModel", "PeftMixedModel", "BaseTuner"}
"""PEFT classes that contain the whole model."""
_UNSUPPORTED_ADAPTERS = {"XLoraModel", "PolyModel", "PolyLayer", "ShadowModel", "ALoraLinearVariant"}
"""PEFT classes whose output depends on a call's arguments or on later tokens. kvpack rejects them."""
_TORCH_WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
"""PyTorch wrapper classes, which do not affect values, and the attribute of each that contains the wrapped module."""
_TORCH_WRAPPER = "of torch"
_BASE_ATTRIBUTES = ("base_layer", "original_module")
"""Attributes of PEFT layers that contain the replaced module."""
_OTHER_LIBRARIES = {"adapters": "AdapterConfig"}
"""Adapter libraries that keep state outside their modules. For each, a name that distinguishes it from a user's own module."""


class ModelPart(NamedTuple):
    """A module, with its name in the model without adapters.

    ``adapter`` is "layer" for a PEFT layer, "around" for a wrapper of the whole model, and otherwise empty.
    """

    name: str
    module: torch.nn.Module
    adapter: str = ""


def list_model_parts(model: torch.nn.Module) -> list[ModelPart]:
    """Return every module of ``model`` once, parents first. Among an adapter's children, only the module that it replaces is listed.

    PyTorch's wrappers are not listed, and names do not contain them. Raises InvalidParameter if kvpack cannot determine an adapter's
    effect.
    """
    check_model(model)
    result: list[ModelPart] = []
    waiting, seen, known = [("", model)], set(), dict[type, str]()
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        kind = type(module)
        if kind not in known:
            wraps = kind.__module__.startswith("torch.") and kind.__name__ in _TORCH_WRAPPERS
            known[kind] = _TORCH_WRAPPER if wraps else _adapter_kind(name, kind)
        adapter = known[kind]
        if adapter == _TORCH_WRAPPER:
            waiting.append((name, getattr(module, _TORCH_WRAPPERS[kind.__name__])))
            continue
        result.append(ModelPart(name, module, adapter))
        children = module._modules
        if adapter == "around":
            waiting.append((name, _inner_module(module)))
        elif adapter == "layer":
            # A wrapper may keep its own layer between itself and the module.
            inside = [children.get(place) for place in (*_BASE_ATTRIBUTES, "token_adapter")]
            waiting += [(name, child) for child in reversed(inside) if child is not None]
        elif children:
            before = f"{name}." if name else ""
            waiting += [(before + child_name, child) for child_name, child in reversed(children.items()) if child is not None]
    return result


def check_model(model: Any) -> None:
    """Raise InvalidType unless ``model`` is a model. If it is a path or a name, the message suggests loading the model."""
    import torch

    if isinstance(model, torch.nn.Module):
        return
    if isinstance(model, str | os.PathLike):
        instead = "load the model first, such as AutoModelForCausalLM.from_pretrained(path)"
    else:
        instead = "pass the model itself, such as one loaded with AutoModelForCausalLM"
    raise InvalidType(f"model is {describe(model)}, expected a transformers model: {instead}")


def base_model(model_parts: Iterable[ModelPart]) -> Any:
    """Return the transformers model inside its wrappers. Raises InvalidParameter if there is none."""
    base = next(part.module for part in model_parts if not part.adapter)
    if not hasattr(base, "config") or not hasattr(base, "dtype"):
        raise InvalidParameter(f"a {class_name(type(base))} is not a transformers model: pass the transformers model that it contains")
    return base


def child_modules(layer: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the child modules of an adapter layer by name, except the module that the layer replaces."""
    for name, child in layer._modules.items():
        if child is not None and name not in (*_BASE_ATTRIBUTES, "token_adapter"):
            yield name, child


def check_determined(where: str, kind: type) -> None:
    """Raise InvalidParameter if the output of an adapter class depends on more than the tokens of a prefix."""
    undetermined = _class_names(kind) & _UNSUPPORTED_ADAPTERS
    if undetermined:
        raise InvalidParameter(
            f"{where or 'the model'} has the adapter {class_name(kind)}, whose output depends on more than the preceding "
            "tokens, so token ids alone cannot identify its keys and values: disable the adapter"
        )


def _adapter_kind(name: str, kind: type) -> str:
    library = kind.__module__.partition(".")[0]
    check_determined(name, kind)
    names = _class_names(kind)
    if names & _ADAPTER_LAYERS:
        return "layer"
    if names & _ADAPTER_WRAPPERS:
        return "around"
    if library == "peft" or hasattr(sys.modules.get(library), _OTHER_LIBRARIES.get(library, "")):
        raise InvalidParameter(
            f"{name or 'the model'} has the adapter {class_name(kind)}, which kvpack does not recognize: {IDENTITY_ADVICE}"
        )
    return ""


def _class_names(kind: type) -> set[str]:
    return {base.__name__ for base in kind.__mro__ if base.__module__.partition(".")[0] == "peft"}


def _inner_module(module: torch.nn.Module) -> torch.nn.Module:
    result = module._modules.get("base_model") or module._modules.get("model")
    if result is None:
        raise InvalidParameter(f"{class_name(type(module))} has no submodule named base_model or model: {IDENTITY_ADVICE}")
    return result


def cache_layers(config: Any) -> list[Any]:
    """Return the layers of the cache that transformers creates for a decoder's configuration.

    If transformers cannot create the cache, raises AttributeError, KeyError, TypeError or ValueError, as transformers does.
    """
    from transformers import DynamicCache

    layers: list[Any] = DynamicCache(config=config).layers
    return layers


def windows_and_states(config: Any) -> tuple[tuple[int | None, ...], bool]:
    """Return the sliding window of each layer, and True if any layer keeps recurrent or convolution states.

    ``config`` is the model's configuration. Chunked attention counts as a window of one chunk, because no token attends to earlier chunks.
    For an encoder-decoder, the result is an empty tuple and False, because its layers also depend on the encoder.
    """
    if config.is_encoder_decoder:
        return (), False
    try:
        layers = cache_layers(config.get_text_config(decoder=True))
    except (AttributeError, KeyError, TypeError, ValueError):
        return (), False
    windows = tuple(getattr(layer, "sliding_window", None) for layer in layers)
    return windows if any(windows) else (), any(hasattr(layer, "recurrent_states") for layer in layers)
