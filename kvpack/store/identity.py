"""What the bytes of a prefix depend on besides its tokens: stores that differ in any of it never see each other's entries."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import xxhash

from kvpack.formats.errors import InvalidHeader, InvalidParameter, LimitExceeded

from ..checks import check_string
from ..header import FORMAT
from ..recipes import parse_recipe

if TYPE_CHECKING:
    import torch

    from ..recipes import Recipe

_MODEL_FIELDS = {"model": "name", "weights": "weights", "adapter": "adapter", "rope": "rope", "dtype": "dtype"}
"""Fields that an entry's header names, and the names that it has for them: the tenant is in the key alone."""

_INCIDENTAL_SETTINGS = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "_attn_implementation"}
"""Settings of a transformers configuration that change no key and no value, or that have a field of their own."""


@dataclass(frozen=True)
class Identity:
    """Model, weights (a digest or a revision), adapter, RoPE settings, dtype, recipe and tenant, each as text.

    An empty ``tenant`` is shared by all who name none. Raises InvalidParameter, naming the field, for anything but text
    that a header can hold (a tenant may be any text), and InvalidRecipe.
    """

    model: str
    recipe: str
    weights: str = ""
    adapter: str = ""
    rope: str = ""
    dtype: str = ""
    tenant: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "tenant" and isinstance(value, str):
                continue
            try:
                check_string(f"identity.{field.name}", value)
            except (InvalidHeader, LimitExceeded) as error:
                raise InvalidParameter(str(error)) from None
        object.__setattr__(self, "recipe", parse_recipe(self.recipe).text)

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
    ) -> Self:
        """The identity of a transformers ``model`` whose caches are packed with ``recipe``.

        Unless given, ``name`` is where the model was loaded from, ``adapter`` the names of its active PEFT adapters, and
        ``weights`` a digest of its configuration and of every parameter, which reads the weights once.
        """
        config = model.config
        rope = getattr(config, "rope_parameters", None) or {
            key: getattr(config, key) for key in ("rope_theta", "rope_scaling", "partial_rotary_factor") if hasattr(config, key)
        }
        return cls(
            model=getattr(config, "name_or_path", "") if name is None else name,
            recipe=parse_recipe(recipe).text,
            weights=weights_digest(model) if weights is None else weights,
            adapter=_active_adapters(model) if adapter is None else adapter,
            rope=_text(rope),
            dtype=str(model.dtype).removeprefix("torch."),
            tenant=tenant,
        )

    @property
    def header_model(self) -> dict[str, str]:
        """The map ``model`` of an entry's header."""
        return {name: value for field, name in _MODEL_FIELDS.items() if (value := getattr(self, field))}

    @property
    def digest(self) -> bytes:
        """32 bytes: the parent of a first chunk's key (spec/store.md, Keys)."""
        fields = [("format", str(FORMAT)), *((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))]
        return hashlib.sha256(b"".join(length_prefixed(text.encode("utf-8", "surrogatepass")) for pair in fields for text in pair)).digest()


def length_prefixed(data: bytes) -> bytes:
    """``data`` after its length in 8 bytes: no two sequences of such fields have the same bytes."""
    return len(data).to_bytes(8, "little") + data


def weights_digest(model: Any) -> str:
    """A digest of a transformers model's configuration and of every parameter and persistent buffer, by name, dtype and shape."""
    settings = {key: value for key, value in model.config.to_dict().items() if key not in _INCIDENTAL_SETTINGS}
    total = hashlib.sha256(length_prefixed(_text(settings).encode()))
    for name, tensor in sorted(model.state_dict().items()):
        described = f"{name} {tensor.dtype} {list(tensor.shape)}"
        total.update(length_prefixed(described.encode()) + xxhash.xxh3_128_digest(_bytes(tensor)))
    return f"sha256:{total.hexdigest()}"


def _bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    data: memoryview = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return data


def _active_adapters(model: Any) -> str:
    if not getattr(model, "_hf_peft_config_loaded", False):
        return ""
    return ",".join(sorted(model.active_adapters()))


def _text(settings: Any) -> str:
    return json.dumps(settings, sort_keys=True, separators=(",", ":"), default=str)
