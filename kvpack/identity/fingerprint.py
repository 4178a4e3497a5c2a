"""Digests of a transformers model's weights, and of its configuration, modules, dtypes and buffers.

Weights can change unnoticed through ``.data``, so they are digested each time that a file or an identity is compared with the model. No
cheaper check could prove that an earlier digest is still valid.
"""

from __future__ import annotations

import hashlib
import os
from functools import cached_property, lru_cache
from itertools import chain
from json.encoder import encode_basestring_ascii as encoded
from operator import itemgetter
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from kvpack.coding import dispatch
from kvpack.formats.errors import InvalidParameter
from kvpack.runtime.threads import StartedCalls, usable_cores

from .canonical_text import (
    ALL,
    SAMPLE,
    SCALARS,
    class_name,
    is_constant,
    json_digest,
    json_text,
    sample_values,
    tensor_digest,
    tensor_text,
    to_json_value,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    import torch

    from .modules import ModelPart

THREADS = 8
"""Maximum number of threads that read weights in host memory. A single thread cannot use the memory's full bandwidth."""
_ALIGNMENT = 8
"""Required alignment, in bytes, of memory that is digested on a device."""


class WeightsDigest:
    """Computes the digest of a model's weights in the background. ``state`` contains their (name, value) pairs.

    Values must not change before ``wait_until_read`` returns. The constructor and ``text`` raise InvalidParameter if a tensor's values are
    not in memory or cannot be read.
    """

    def __init__(self, state: Sequence[tuple[str, Any]]) -> None:
        self._names = [name for name, _ in state]
        self._found: dict[int, Any] = {}
        first: dict[Hashable, int] = {}
        # Tied weights are read once.
        self._numbers = [first.setdefault(_memory_key(value) or number, number) for number, (_, value) in enumerate(state)]
        host: list[int] = []
        devices: dict[torch.device, dict[int, torch.Tensor]] = {}
        for number in first.values():
            name, value = state[number]
            if _is_in_host_memory(value):
                host.append(number)
            elif _is_digested_on_device(value):
                devices.setdefault(value.device, {})[number] = value
            else:
                self._found[number] = to_json_value(name, value)
        self._host_numbers = host
        self._host = StartedCalls(lambda number: tensor_digest(*state[number]), host, min(THREADS, usable_cores()))
        self._devices = [_DeviceDigests(device, state, values) for device, values in devices.items()]

    def wait_until_read(self) -> None:
        """Wait until tensors in host memory have been read, and make later work on CUDA devices wait until their tensors have been read."""
        for device in self._devices:
            device.wait_until_read()
        self._host.wait()

    @cached_property
    def text(self) -> str:
        """The digest of all names, dtypes, shapes and values, with the prefix ``sha256:``. Blocks until it has been computed."""
        result = self._found | dict(zip(self._host_numbers, self._host.results(), strict=True))
        for device in self._devices:
            result |= device.digest_texts()
        total = hashlib.sha256()
        for name, number in zip(self._names, self._numbers, strict=True):
            total.update(f"{json_text([name, result[number]])}\n".encode())
        return f"{ALL}:{total.hexdigest()}"


class _DeviceDigests:
    """The digests of the tensors on one CUDA device, which are computed on a separate stream."""

    def __init__(self, device: torch.device, named: Sequence[tuple[str, Any]], values: dict[int, torch.Tensor]) -> None:
        import torch

        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        # Sort by size, because tensors of the same size share a launch.
        largest_first = sorted(values.items(), key=lambda item: -item[1].nbytes)
        self._described = {number: tensor_text(value) for number, value in largest_first}
        self._memories = [value.detach().flatten().view(torch.uint8) for _, value in largest_first]
        self._texts: dict[int, str] = {}
        try:
            with torch.cuda.stream(self._stream):
                self._digests = dispatch.digests([(memory, 0, memory.numel()) for memory in self._memories])
        except torch.OutOfMemoryError:
            # This needs 64 MiB per 1 GiB of weights, because tensors are copied to host memory one by one.
            self._texts = {number: tensor_digest(*named[number]) for number in values}
        self._read = self._stream.record_event()

    def wait_until_read(self) -> None:
        import torch

        torch.cuda.current_stream(self._device).wait_event(self._read)
        # Only now may the memory be reused.
        self._memories = []

    def digest_texts(self) -> dict[int, str]:
        """Return the ``tensor_digest`` of each tensor, by index."""
        import torch

        if not self._texts:
            with torch.cuda.stream(self._stream):
                digests = [digest.hex() for digest in self._digests()]
            texts = map(" ".join, zip(self._described.values(), digests, strict=True))
            self._texts = dict(zip(self._described, texts, strict=True))
            self._memories = []
        return self._texts


def _memory_key(value: Any) -> Hashable:
    """Return a key that is equal for tensors that view the same bytes in memory, or None for other values."""
    import torch

    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
        return None
    if value.device.type == "meta" or not value.numel():
        return None
    return value.device, value.data_ptr(), value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()


def _is_in_host_memory(value: Any) -> bool:
    return _memory_key(value) is not None and value.device.type == "cpu"


def _is_digested_on_device(value: Any) -> bool:
    return (
        _memory_key(value) is not None
        and value.device.type == "cuda"
        and value.is_contiguous()
        and value.data_ptr() % _ALIGNMENT == 0
        and not value.is_conj()
        and not value.is_neg()
        and dispatch.supports_digests(value.device)
    )


_IGNORED_SETTINGS = {
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "dtype",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Settings of a transformers configuration that do not affect keys and values, or that have their own field in an identity."""
_IGNORED_ATTRIBUTES = {"gradient_checkpointing", "hf_device_map", "name_or_path", "warnings_issued"}
"""Attributes of modules that do not affect keys and values."""
SAMPLED_VALUES = 64
_LIBRARIES = {"accelerate", "peft", "torch", "transformers"}
"""Packages in whose modules private attributes do not affect keys and values. In other modules, they may be constants."""
_STATE_METHODS = {"_save_to_state_dict", "get_extra_state", "state_dict"}
"""Methods that a module overrides to define its own state."""
_MAX_LENGTH_SUFFIX = "max_seq_len_cached"
"""Suffix of attributes in which a rotary embedding stores the longest sequence length so far. Its buffers already depend on it."""
_POSITION_ATTRIBUTE = "rope_deltas"
"""Attribute in which a model stores the position of the text after the last prompt's images. It is None before the first prompt."""
_CALL_WORDS = ("cache", "state", "long_inv_freq", _POSITION_ATTRIBUTE)
"""Parts of the names of attributes that a model sets during forward passes."""
_HUB_FOLDER = "models--"
"""Prefix of a model's folder in the hub's cache."""
_FREQUENCIES = "inv_freq"
"""Suffix of buffers with a rotary embedding's frequencies."""


def model_name(loaded_from: str) -> str:
    """Return a model's name on the hub, or the name of the folder from which it was loaded.

    The rest of the path is dropped, so that files do not reveal paths on this machine.
    """
    path = PurePath(loaded_from)
    for part in reversed(path.parts):
        # A snapshot in the hub's cache folder is in models--OWNER--NAME/snapshots/COMMIT.
        if part.startswith(_HUB_FOLDER):
            return part.removeprefix(_HUB_FOLDER).replace("--", "/")
    # A hub's name has at most two parts, none of which begins with a dot or a tilde.
    is_path = path.is_absolute() or len(path.parts) > 2 or loaded_from.startswith((".", "~")) or os.path.isdir(loaded_from)
    return path.name if is_path else loaded_from


def digest_weights(model_parts: Iterable[ModelPart]) -> WeightsDigest:
    """Start computing the digest of all parameters and persistent buffers except those of adapters."""
    return WeightsDigest(_model_state(model_parts))


def weights_sample(model_parts: Iterable[ModelPart]) -> str:
    """Return the digest of ``SAMPLED_VALUES`` evenly spaced values of each tensor in the model's weights, with the prefix ``SAMPLE``.

    Files of earlier versions contain this digest.
    """
    named = _model_state(model_parts)
    lines = [
        # The same result as ``json_text`` for two strings, but faster.
        f"[{encoded(name)},{encoded(value)}]\n" if type(value) is str else f"{json_text([name, value])}\n"
        for (name, _), value in zip(named, sample_values(named, SAMPLED_VALUES), strict=True)
    ]
    return f"{SAMPLE}:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def config_digest(config: Any, model_parts: Iterable[ModelPart]) -> str:
    """Return a digest of everything on which keys and values depend, except the weights' values and the adapters.

    It covers the model's configuration and its modules. For every module, these are its class, its plain attributes, its current buffers,
    and the types, dtypes and shapes of its parameters.
    """
    return json_digest([_config_settings(config), [_describe_module(part) for part in _model_modules(model_parts)]])


def dtype_text(model: Any) -> str:
    """Return the dtype of a transformers model, followed by the dtype of autocast if it is enabled."""
    import torch

    # Offloaded weights do not show where the model computes.
    devices = [model.device.type] if torch.amp.is_autocast_available(model.device.type) else ["cpu", "cuda"]
    dtypes = [model.dtype, *(torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device))]
    return " autocast ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_deterministic(model_parts: Iterable[ModelPart]) -> None:
    """Raise InvalidParameter if a model is in training mode and has random dropout."""
    for part in model_parts:
        for name, module in part.module.named_modules() if part.adapter == "layer" else [("", part.module)]:
            if not module.training:
                continue
            rates = {key: value for key, value in vars(module).items() if "dropout" in key and isinstance(value, float)}
            if type(module).__name__.endswith(("Dropout", "Dropout1d", "Dropout2d", "Dropout3d")):
                rates["p"] = getattr(module, "p", 0)
            for key, rate in rates.items():
                if rate > 0:
                    where = ".".join(filter(None, (part.name, name, key)))
                    raise InvalidParameter(
                        f"the model is in training mode with random dropout ({where} is {rate}): call model.eval() first"
                    )


def _model_modules(model_parts: Iterable[ModelPart]) -> Sequence[ModelPart]:
    return [part for part in model_parts if not part.adapter]


def _model_state(model_parts: Iterable[ModelPart]) -> list[tuple[str, Any]]:
    """Return the model's state as sorted (name, value) pairs, including extra attributes of quantized modules."""
    defaults: dict[type, bool] = {}
    named: list[tuple[str, Any]] = []
    for part in _model_modules(model_parts):
        module, kind = part.module, type(part.module)
        if kind not in defaults:
            defaults[kind] = _has_default_state(kind)
        if defaults[kind] and vars(module).keys().isdisjoint(_STATE_METHODS):
            if module._parameters or module._buffers:
                named += sorted(_default_state(part), key=_name)
        else:
            named += sorted(_own_state(part).items(), key=_name)
    return named


_name = itemgetter(0)


def _default_state(part: ModelPart) -> Iterator[tuple[str, Any]]:
    """Yield the parameters and persistent buffers that ``Module._save_to_state_dict`` would return, but faster."""
    import torch

    module, prefix = part.module, f"{part.name}."
    unsaved = module._non_persistent_buffers_set
    for name, x in chain(module._parameters.items(), module._buffers.items()):
        if x is not None and name not in unsaved:
            if x.device.type == "meta":
                x = _fetch_offloaded(module, name, x)
            yield prefix + name, x if type(x) in (torch.Tensor, torch.nn.Parameter) else x.detach()


def _fetch_offloaded(module: torch.nn.Module, name: str, x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or its real values if ``x`` is a placeholder because accelerate moved them to another device or to disk."""
    hook = vars(module).get("_hf_hook")
    for inner in getattr(hook, "hooks", (hook,)):
        values = getattr(inner, "weights_map", None)
        if values is not None and name in values:
            moved: torch.Tensor = values[name].to(x.dtype)
            return moved
    return x


def _own_state(part: ModelPart) -> dict[str, Any]:
    """Return the state dict of a module that defines its own state, without the entries of its children."""
    import torch

    module, prefix = part.module, f"{part.name}."
    state: dict[str, Any] = {}
    if type(module).state_dict is not torch.nn.Module.state_dict and not module._modules:
        # Quantization libraries override either this method or the one below.
        return dict(module.state_dict(prefix=prefix))
    module._save_to_state_dict(state, prefix, keep_vars=False)
    return state


def _has_default_state(kind: type[torch.nn.Module]) -> bool:
    """Return True if the state of modules of this class consists only of their parameters and persistent buffers."""
    import torch

    usual = torch.nn.Module
    if kind.state_dict is not usual.state_dict or kind._save_to_state_dict is not usual._save_to_state_dict:
        return False
    return kind.get_extra_state is usual.get_extra_state


def _config_settings(config: Any) -> Any:
    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kept(item) for key, item in value.items() if key not in _IGNORED_SETTINGS}
        return [kept(item) for item in value] if isinstance(value, (list, tuple)) else value

    return to_json_value("config", kept(config.to_dict()))


def _describe_module(part: ModelPart) -> list[Any]:
    module = part.module
    where = part.name or "the model"
    # A copy, because a cache that is released meanwhile, in another thread or by the garbage collector, removes its wrappers.
    own = dict(vars(module))
    attributes = _setting_attributes(where, own) + _constant_attributes(where, module, own)
    parameters, buffers = (
        [(name, tensor) for name, tensor in sorted(tensors.items()) if tensor is not None] if tensors else ()
        for tensors in (module._parameters, module._buffers)
    )
    return [
        part.name,
        class_name(type(module)),
        attributes,
        [[name, _describe_parameter(f"{where}.{name}", tensor)] for name, tensor in parameters],
        [[name, tensor_digest(f"{where}.{name}", _short_sequence_frequencies(module, name, tensor))] for name, tensor in buffers],
    ]


def _short_sequence_frequencies(module: torch.nn.Module, name: str, buffer: torch.Tensor) -> torch.Tensor:
    """Return ``buffer``, or a rotary embedding's frequencies for short sequences if a forward pass may have changed ``buffer``."""
    before, found, _ = name.rpartition(_FREQUENCIES)
    first = module._buffers.get(f"{before}original_{_FREQUENCIES}") if found else None
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        kind = kind.get(before.removesuffix("_"))
    if first is None or not isinstance(kind, str):
        return buffer
    if kind == "longrope":
        return first
    # The model restores the original frequencies only after a sequence that exceeded its original length.
    longest = getattr(module, before + _MAX_LENGTH_SUFFIX, getattr(module, _MAX_LENGTH_SUFFIX, 0))
    return first if "dynamic" in kind and longest > getattr(module, "original_max_seq_len", longest) else buffer


def _setting_attributes(where: str, values: Mapping[str, Any]) -> list[Any]:
    """Return the attributes of a module that are settings, as (name, value) pairs."""
    attributes = []
    for name in _setting_names(tuple(values)):
        value = None if name == _POSITION_ATTRIBUTE else values[name]
        # Most are scalars, which need no conversion.
        if type(value) in SCALARS:
            attributes.append([name, value])
        elif _is_plain(value):
            attributes.append([name, to_json_value(where, value)])
    return attributes


def _constant_attributes(where: str, module: torch.nn.Module, attributes: Mapping[str, Any]) -> list[Any]:
    """Return the tensors, arrays and structures among a module's plain attributes, by name. Custom modules' private floats are included.

    The result is empty for a module that defines its own state, because its constants are among the weights.
    """
    if not _has_default_state(type(module)):
        return []
    is_home_made = type(module).__module__.partition(".")[0] not in _LIBRARIES
    constants = []
    for name in _constant_names(tuple(attributes), is_home_made):
        value = attributes[name]
        kind = type(value)
        # Private integers often count calls; _setting_attributes has the public scalars.
        if name.startswith("_") if kind is float else kind not in SCALARS and not _is_plain(value) and is_constant(value):
            constants.append([name, to_json_value(f"{where}.{name}", value)])
    return constants


@lru_cache(maxsize=4096)
def _constant_names(names: tuple[str, ...], private: bool) -> tuple[str, ...]:
    """Return the sorted names of attributes that may be constants. Private names are included if ``private`` is True."""
    import torch

    usual = vars(torch.nn.Module()).keys()
    setting_names = (name for name in names if name not in usual and _is_setting(name) and not any(word in name for word in _CALL_WORDS))
    return tuple(sorted(name for name in setting_names if private or not name.startswith("_")))


@lru_cache(maxsize=4096)
def _setting_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the sorted names of attributes that may be settings. Modules of one class have the same names, so results are cached."""
    return tuple(sorted(name for name in names if not name.startswith("_") and _is_setting(name)))


def _is_setting(name: str) -> bool:
    return name != "training" and name not in _IGNORED_ATTRIBUTES and not name.endswith(_MAX_LENGTH_SUFFIX)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in SCALARS:
        return True
    # Check the class, because isinstance is slow for transformers' configurations.
    if issubclass(kind, (list, tuple)):
        return all(map(_is_plain, value))
    if issubclass(kind, dict):
        return all(map(_is_plain, value.values())) and all(map(_is_plain, value))
    return issubclass(kind, (int, float, str))


def _describe_parameter(where: str, tensor: torch.Tensor) -> list[Any]:
    """Return a parameter's class, dtype, shape and attributes, which describe how it is quantized."""
    attributes = _setting_attributes(where, getattr(tensor, "__dict__", {}))
    kinds = [class_name(type(tensor)), str(tensor.dtype), list(tensor.shape), attributes]
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        kinds.append([[name, _describe_parameter(f"{where}.{name}", getattr(tensor, name))] for name in names])
    return kinds
