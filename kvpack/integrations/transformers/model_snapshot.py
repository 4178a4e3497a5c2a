"""Snapshots of everything in a model on which a replayed step depends: modules, weights, hooks, attributes, and code with its origin."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import chain
from operator import is_, itemgetter
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.nn.modules import module as modules
from transformers import PretrainedConfig

from .model_state import iterate_modules

_KNOWN_PACKAGES = {"torch", "transformers", "kvpack", "accelerate", "huggingface_hub", *sys.stdlib_module_names}
"""Packages whose code does not depend on how many steps have run on the host. transformers' own classes use them."""

_INSPECTED_MODULES = "transformers.models."
"""Prefix of the transformers modules whose functions are inspected for calls of other functions."""

_TENSOR_TYPES = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}


class ModelSnapshot:
    """A snapshot of everything in ``model`` except the weights' values, which may change in place. It keeps modules and weights alive."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._modules = model, list(iterate_modules(model))
        result = self._modules
        self._parts: list[dict[str, Any]] = [
            part for module in result for part in (module._modules, module._parameters, module._buffers) if part
        ]
        self._hooks = [hooks for module in result for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._attributes = [vars(module) for module in result]
        self._tensors = [x for module in result for x in chain(module._parameters.values(), module._buffers.values()) if x is not None]
        configs = {
            id(value): value for attributes in self._attributes for value in attributes.values() if isinstance(value, PretrainedConfig)
        }
        self._settings = [vars(config) for config in configs.values()]
        self._own = [
            (itemgetter("training", "_modules", *sorted(attributes.keys() - _MODULE_ATTRIBUTES)), attributes)
            for attributes in self._attributes
        ]
        self._code = _ModelCode(result)
        self._held = list(self._objects())
        self._found = self._current_values()

    def unchanged(self) -> bool:
        """Return True if nothing has changed since the snapshot, except for values that changed in place."""
        try:
            return self._current_values() == self._found and all(map(is_, self._objects(), self._held))
        except KeyError:
            # An attribute was removed.
            return False

    @cached_property
    def foreign_part(self) -> str | None:
        """Description of the first part of the model that is not from PyTorch or transformers, or None. A replay might lack its effects."""
        for name, module in self._model.named_modules():
            forward = vars(module).get("forward")
            if forward is not None and not getattr(forward, "replaces_class_method", False):
                return f"{name or 'the model'} has a forward of its own"
        odd = next((type(x) for x in self._tensors if type(x) not in _TENSOR_TYPES), None)
        return self._code.foreign_part if odd is None else f"weights are of type {odd.__name__}"

    def _objects(self) -> Iterator[Any]:
        values = (attributes(module) for attributes, module in self._own)
        return chain.from_iterable(chain(map(dict.values, self._parts), map(dict.values, self._settings), values, self._code.objects()))

    def _current_values(self) -> tuple[Any, ...]:
        return (
            list(map(torch.Tensor.data_ptr, self._tensors)),
            list(map(type, self._modules)),
            # Counts detect added attributes, such as a module's own forward.
            list(map(len, chain(self._attributes, self._settings, self._code.classes))),
            sum(map(len, self._parts)),
            list(chain.from_iterable(self._hooks)),
            count_global_hooks(),
        )


_MODULE_ATTRIBUTES = vars(torch.nn.Module()).keys()


class _ModelCode:
    """The functions that ``modules`` run. They are found through classes and attributes, and through names in transformers' model code."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.foreign_part: str | None = None
        self.classes: list[Mapping[str, Any]] = []
        """Attributes of each class."""
        self._names: list[tuple[Callable[[str], Any], str]] = []
        self._seen: dict[int, Any] = {}
        waiting: list[Any] = []
        for module in modules:
            waiting += type(module).__mro__[:-1]
            waiting += [value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES]
        while waiting:
            value = waiting.pop()
            if id(value) not in self._seen:
                # Keep the object alive, so that its id is not reused.
                self._seen[id(value)] = value
                waiting += self._read(value)
        self._seen.clear()

    def objects(self) -> Iterator[Iterable[Any]]:
        """Yield the objects that the code reads from classes and modules by name."""
        yield from (cls.values() for cls in self.classes)
        yield (get(name) for get, name in self._names)

    def _read(self, value: Any) -> Iterable[Any]:
        if isinstance(value, (staticmethod, classmethod, MethodType)):
            return (value.__func__,)
        if isinstance(value, partial):
            return (value.func,)
        if isinstance(value, property):
            return (function for function in (value.fget, value.fset, value.fdel) if function is not None)
        if isinstance(value, FunctionType):
            return self._called_objects(value)
        place = value.__module__ if isinstance(value, type) else type(value).__module__
        self._record(place, value)
        if not isinstance(value, type) or not issubclass(value, torch.nn.Module):
            return ()
        self.classes.append(vars(value))
        # Every class attribute with code: functions, properties, and static and class methods.
        return [member for member in vars(value).values() if callable(member) or isinstance(member, (property, staticmethod, classmethod))]

    def _called_objects(self, function: FunctionType) -> Iterator[Any]:
        names = function.__globals__
        place = str(names.get("__name__"))
        self._record(place, function)
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            yield wrapped
        if place.startswith(_INSPECTED_MODULES):
            for name in sorted(_names_in(function.__code__)):
                if callable(called := names.get(name)):
                    self._names.append((names.get, name))
                    yield called

    def _record(self, location: str, value: Any) -> None:
        if self.foreign_part is None and location.partition(".")[0] not in _KNOWN_PACKAGES:
            self.foreign_part = f"{getattr(value, '__qualname__', type(value).__qualname__)} is of {location}"


def _names_in(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def count_global_hooks() -> int:
    """Return the number of PyTorch's global hooks, which run for every module."""
    return len(modules._global_forward_hooks) + len(modules._global_forward_pre_hooks)


def has_other_hooks(module: torch.nn.Module) -> bool:
    """Return True if a module has hooks that neither kvpack nor transformers (to collect outputs) has added."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    places = [str(getattr(getattr(hook, "func", hook), "__module__", "")) for hook in hooks]
    return not all(place.startswith((f"{__package__}.", "transformers.")) for place in places)
