"""The identity of a prefix: everything on which its bytes depend, except its tokens.

Stores with different identities share no entries. The adapters in effect on a model are described by their names and by a digest of their
weights, scaling and state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.file.checks import TEXT, check_argument
from kvpack.file.header import FORMAT
from kvpack.file.user_files import path_text
from kvpack.formats.arguments import check_flag, check_text, describe
from kvpack.formats.errors import InvalidParameter

from .canonical_text import IDENTITY_ADVICE, class_name, json_digest, tensor_digest, to_json_value, weights_kind
from .modules import ModelPart, check_determined, child_modules

if TYPE_CHECKING:
    import os

    from kvpack.coding.bases import Basis

_ADAPTER_STATE = {"_active_adapter", "_disable_adapters", "merged_adapters"}
"""Attributes of an adapter layer that determine which adapters are in effect. They are described separately."""
_IGNORED_ATTRIBUTES = {"_adapters", "_caches", "_tied_adapter", "kwargs", "quantization_backend"}
"""Attributes of an adapter layer that do not affect values, or that are described elsewhere."""
_CUSTOM_ADAPTERS = re.compile(r"lora|adapter", re.IGNORECASE)


def adapters_text(layers: Sequence[ModelPart], names_override: str | None) -> str:
    """Return the identity field ``adapter``: the names of the adapters in effect (or ``names_override``), and their digest.

    Without adapters, the field is empty. Adapters that are loaded but not in effect are ignored. Raises InvalidParameter, with the module's
    name, if kvpack cannot describe an adapter.
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
        label = ",".join(sorted(names)) if names_override is None else names_override
        return f"{label} {json_digest(states)}".strip()
    label = names_override or ""
    return f"{label} disabled".strip() if any(part.adapter for part in layers) else label


def _active_adapters(layer: Any) -> list[str]:
    """Return the names of the adapters that a PEFT layer applies: merged adapters and, unless the layer is disabled, active ones."""
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
    """Describe an adapter module's attributes, tensors and inner modules, except those of ``other_adapters``."""
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
    """Describe the learned prompt that a PeftModel prepends, if it is enabled, and add the prompt's name to ``names``."""
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
    tensors = {name: x for name, x in part.module._parameters.items() if x is not None and _belongs_to_adapter(name, kind)}
    return [[name, tensor_digest(f"{part.name}.{name}", tensor)] for name, tensor in sorted(tensors.items())]


@lru_cache(maxsize=4096)
def _belongs_to_adapter(parameter: str, kind: str) -> bool:
    """Return True if a parameter outside PEFT belongs to an adapter, according to its own name, such as lora_A, or its module's class."""
    return bool(_CUSTOM_ADAPTERS.search(parameter) or _CUSTOM_ADAPTERS.search(kind))


_STATES = b"kvpack-states 1"

_HEADER_NAMES = {"model": "name"}
"""Fields that have a different name in an entry's header."""


@dataclass(frozen=True, init=False)
class Identity:
    """The identity of a prefix: everything on which its keys and values depend, except the tokens, as text.

    Stores with different identities share no entries. ``Identity.of`` returns the identity of a transformers model, and
    ``Identity.of_engine`` that of a serving engine's pages.

    Args:
        model: Name of the model.
        recipe: A recipe text or a Recipe. The attribute is its canonical text.
        weights: Digest or revision of the weights.
        adapter: Names and digests of the adapters in effect.
        rope: Rotary settings.
        dtype: Dtype of the model or of the engine's cache. Without it, ``raw`` caches of different dtypes replace each other.
        tenant: Owner of the entries, as any text. All users without a tenant share the empty one.
        config: Digest of the configuration, the modules with their settings and quantization, and the buffers.
        extra: Anything else that affects the values, such as a forward hook (spec/notes.md lists what kvpack detects).
        digests: Digests of all weights and of a sample of them, for comparison with caches that record either kind. Not in keys.
        windows: Sliding window of each layer in tokens, or None for full attention. Stores load only tokens within the windows. Not in
            keys.
        keeps_states: True if layers have recurrent or convolution states, which a stored prefix must then include.
        basis: Basis of the recipe, taken from ``recipe`` if it is a Recipe. Not in keys, because the recipe's text contains its digest.

    Raises:
        InvalidParameter: A field is not text that a header can store. The message names the field.

    >>> kvpack.Identity("llama", "octopus-3", weights="revision-1").model
    'llama'
    >>> kvpack.Identity("llama", "raw") == kvpack.Identity("llama", "kv=raw")
    True
    """

    model: str
    recipe: str
    weights: str = ""
    adapter: str = ""
    rope: str = ""
    dtype: str = ""
    tenant: str = ""
    config: str = ""
    extra: str = ""
    digests: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)
    windows: tuple[int | None, ...] = dataclasses.field(default=(), compare=False, repr=False)
    keeps_states: bool = dataclasses.field(default=False, compare=False, repr=False)
    basis: Basis | None = dataclasses.field(default=None, compare=False, repr=False)

    def __init__(
        self,
        model: str,
        recipe: str | Recipe,
        weights: str = "",
        adapter: str = "",
        rope: str = "",
        dtype: str = "",
        tenant: str = "",
        config: str = "",
        extra: str = "",
        digests: tuple[str, ...] = (),
        windows: tuple[int | None, ...] = (),
        keeps_states: bool = False,
        basis: Basis | None = None,
    ) -> None:
        parsed = Recipe(recipe, basis) if basis is not None else recipe if isinstance(recipe, Recipe) else None
        text = recipe if parsed is None else parsed.canonical
        values: dict[str, Any] = {"model": model, "recipe": text, "weights": weights, "adapter": adapter}
        values |= {"rope": rope, "dtype": dtype, "tenant": tenant, "config": config, "extra": extra, "digests": digests}
        values |= {
            "windows": windows,
            "keeps_states": keeps_states,
            "basis": parsed.basis if parsed is not None and parsed.needs_basis else None,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        """Check that a header can store all fields, and make the recipe's text canonical."""
        for name in _FIELDS:
            value = getattr(self, name)
            if name == "tenant" and isinstance(value, str):
                continue
            check_argument(f"identity.{name}", value, TEXT)
        if not isinstance(self.windows, tuple) or not all(size is None or (type(size) is int and size > 0) for size in self.windows):
            raise InvalidParameter(
                f"identity.windows is {describe(self.windows)}, expected a tuple with the window of each layer in tokens, or None for "
                "layers with full attention"
            )
        check_flag(self.keeps_states, "identity.keeps_states")
        object.__setattr__(self, "recipe", parse_recipe(self.recipe).canonical)

    @classmethod
    def of(
        cls,
        model: Any,
        recipe: str | Recipe,
        *,
        name: str | None = None,
        weights: str | None = None,
        adapter: str | None = None,
        tenant: str = "",
        extra: str = "",
    ) -> Self:
        """Return the identity of a transformers model as it is now.

        Adapters, configuration, modules and buffers are always digested, so create a new identity after any of them changes. All weights in
        memory are read once, even if ``weights`` is set, so that caches can be compared with them.

        Args:
            model: A transformers model, which may have PEFT adapters in it or around it.
            recipe: The recipe of the caches.
            name: Name of the model. Defaults to its name on the hub, or the last part of its folder.
            weights: Name of the weights. Defaults to a digest of every parameter.
            adapter: Name of the adapters. Defaults to the names of the adapters in effect.
            tenant: Owner of the entries.
            extra: Names of inputs that kvpack cannot detect (spec/notes.md lists those that it detects).

        Raises:
            InvalidParameter: An adapter has effects that kvpack cannot determine, values are not in memory (on the meta device) or cannot
                be read, or the model is in training mode with random dropout.
        """
        from .modules import base_model, list_model_parts, windows_and_states

        model_parts = list_model_parts(model)
        identity = cls.from_model_parts(model_parts, recipe, name=name, weights=weights, adapter=adapter, tenant=tenant, extra=extra)
        windows, keeps_states = windows_and_states(base_model(model_parts).config)
        return dataclasses.replace(identity, windows=windows, keeps_states=keeps_states)

    @classmethod
    def from_model_parts(
        cls,
        model_parts: Sequence[ModelPart],
        recipe: str | Recipe,
        *,
        name: str | None = None,
        weights: str | None = None,
        adapter: str | None = None,
        tenant: str = "",
        extra: str = "",
        digests: tuple[str, ...] | None = None,
    ) -> Self:
        """Return the identity of a model as ``of`` does. ``model_parts`` are the model's modules, which the caller has listed already.

        If both ``digests`` and ``weights`` are set, no weights are read.
        """
        from .fingerprint import check_deterministic, config_digest, digest_weights, dtype_text, model_name, weights_sample
        from .modules import base_model
        from .rope import rope_json

        base = base_model(model_parts)
        check_deterministic(model_parts)
        if digests is None:
            digests = ()
            with contextlib.nullcontext() if weights is None else contextlib.suppress(InvalidParameter):
                digests = digest_weights(model_parts).text, weights_sample(model_parts)
        return cls(
            model=model_name(getattr(base.config, "name_or_path", "") or "") if name is None else name,
            recipe=parse_recipe(recipe),
            weights=digests[0] if weights is None else weights,
            adapter=adapters_text(model_parts, adapter),
            rope=rope_json(getattr(base.config, "text_config", None) or base.config),
            dtype=dtype_text(base),
            tenant=tenant,
            config=config_digest(base.config, model_parts),
            extra=extra,
            digests=digests,
        )

    @classmethod
    def of_engine(
        cls,
        model_path: str | os.PathLike[str],
        recipe: str | Recipe,
        *,
        kv_dtype: str,
        layout: str,
        revision: str | None = None,
        rope: str | None = None,
        adapter: str = "",
        tp: tuple[int, int] = (0, 1),
        tenant: str = "",
        extra: str = "",
    ) -> Self:
        """Return the identity of a serving engine's pages, without loading the model.

        Files are read completely the first time, and again if their path, inode, size or times change. Digests are cached in
        ``kvpack-checkpoints`` in the user's cache folder (XDG_CACHE_HOME).

        Args:
            model_path: Folder of the model, or its name on the hub.
            recipe: The recipe of the pages.
            kv_dtype: Dtype of the engine's cache.
            layout: Name or digest of the page layout (``PageLayout.digest``).
            revision: Name of the weights, such as a commit on the hub. Defaults to a digest of the names and bytes of all safetensors
                files, which is never compared with a digest of weights in memory.
            rope: Rotary settings. Defaults to the settings in config.json.
            adapter: Name of the adapters that the engine has loaded.
            tp: Rank, and number of ranks that share the heads.
            tenant: Owner of the entries.
            extra: Anything else that affects the values.

        Raises:
            MissingFile: The folder does not exist.
            InvalidParameter: The folder has no weights and there is no ``revision``, or a weights file changes while it is read.
        """
        from .engine_identity import engine_fields

        path_text(model_path)
        texts = {"kv_dtype": kv_dtype, "layout": layout, "adapter": adapter, "tenant": tenant, "extra": extra}
        for name, text in (texts | {"revision": "" if revision is None else revision, "rope": "" if rope is None else rope}).items():
            check_text(text, name)
        if not isinstance(tp, tuple | list) or len(tp) != 2:
            raise InvalidParameter(f"tp is {describe(tp)}, expected the rank and the number of ranks, such as (0, 1)")
        fields: dict[str, Any] = engine_fields(model_path, revision, rope, kv_dtype=kv_dtype, layout=layout, tp=tp, extra=extra)
        return cls(recipe=parse_recipe(recipe), adapter=adapter, dtype=kv_dtype, tenant=tenant, **fields)

    @property
    def header_model(self) -> dict[str, str]:
        """The map ``model`` in an entry's header: all fields except the tenant, and except the recipe, which has its own header field."""
        fields = (name for name in _FIELDS if name not in ("recipe", "tenant"))
        return {_HEADER_NAMES.get(name, name): value for name in fields if (value := getattr(self, name))}

    def weights_of_kind(self, kind: str) -> str:
        """Return the weights digest of this kind (see ``canonical_text.weights_kind``). Empty if it is unknown."""
        return next((text for text in (self.weights, *self.digests) if weights_kind(text) == kind), "")

    @classmethod
    def from_header(cls, model: Mapping[str, str], recipe: str, tenant: str) -> Self:
        """Create an identity for ``tenant`` from the fields of a header."""
        fields = (name for name in _FIELDS if name not in ("recipe", "tenant"))
        named: dict[str, Any] = {name: model.get(_HEADER_NAMES.get(name, name), "") for name in fields}
        return cls(recipe=Recipe.from_recorded(recipe).canonical, tenant=tenant, **named)

    @property
    def root(self) -> bytes:
        """The 32 bytes that serve as the parent key of the first chunk (spec/store.md, Keys and States)."""
        return states_key(self.digest) if self.keeps_states else self.digest

    @property
    def digest(self) -> bytes:
        """The 32-byte digest of all fields on which keys depend (spec/store.md, Keys)."""
        fields = [("format", str(FORMAT)), *((name, getattr(self, name)) for name in _FIELDS)]
        return hashlib.sha256(b"".join(length_prefixed(text.encode("utf-8", "surrogatepass")) for pair in fields for text in pair)).digest()


_FIELDS = tuple(field.name for field in dataclasses.fields(Identity) if field.compare)
"""The fields that the digest covers, in order."""


def length_prefixed(data: bytes) -> bytes:
    """Return the length of ``data`` in 8 bytes, followed by ``data``. Different lists of such fields never have the same bytes."""
    return len(data).to_bytes(8, "little") + data


def states_key(digest: bytes) -> bytes:
    """Return the key of the states after the chunk with the key ``digest``.

    For an identity's digest, this is the parent key of the first chunk of a model with states.
    """
    return hashlib.sha256(length_prefixed(_STATES) + length_prefixed(digest)).digest()
