"""The base of a codec family: one codec file defines one family, which is one row of the table ``formats.CODECS``."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Self

from .base import Codec, Fields
from .errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .options import Options


class CodecFamily(Codec):
    """A codec that a recipe or a header names by its ``id``.

    Every subclass is a frozen dataclass whose first field is ``dim``. Its fields are the parameters that the header stores, so
    equality, repr and the header round trip need no code. A field is annotated with a plain type, such as ``int``, or ``Fields``.
    A field with ``metadata={"stored": False}`` and a default only steers the encoder and is never stored.
    A field with ``metadata={"optional": True}`` is stored unless it has its default, so that files written before the field
    existed keep their bytes.
    """

    @classmethod
    @abstractmethod
    def create(cls, dim: int, side: str, options: Options) -> Self:
        """Create the codec that a recipe asks for, with the defaults of this ``side`` ("k" or "v").

        Raises InvalidParameter for an option that is unknown or out of range.
        """

    def params(self) -> dict[str, Any]:
        """The header's map of this codec: ``id``, then every stored field by name; an optional field with its default is left out."""
        result: dict[str, Any] = {"id": self.id}
        for field in _stored_fields(type(self)):
            value = getattr(self, field.name)
            if not _is_optional(field) or value != field.default:
                result[field.name] = dict(value) if field.name == "fields" else value
        return result

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """Create the codec from a header map without its ``id``.

        Raises InvalidParameter for a missing or unknown name, an optional field with its default, a wrong type or a value out of range.
        """
        fields = [field for field in _stored_fields(cls) if field.name in params or not _is_optional(field)]
        odd = set(params) ^ {field.name for field in fields}
        if odd:
            names = ", ".join(name if name.isprintable() else repr(name) for name in sorted(odd))
            raise InvalidParameter(f"codec {cls.id}: parameters missing or unknown: {names}")
        values = {}
        for field in fields:
            name, type_name, value = field.name, _type_name(field), params[field.name]
            if _is_optional(field) and value == field.default:
                raise InvalidParameter(f"codec {cls.id}: {name} is {value!r}, the default: leave it out")
            if type_name == "Fields":
                if not isinstance(value, dict) or not all(isinstance(k, str) and type(v) is int for k, v in value.items()):
                    raise InvalidParameter(f"codec {cls.id}: fields is {value!r}, expected a map from stream name to integer")
                value = tuple(value.items())
            elif type(value).__name__ != type_name:
                raise InvalidParameter(f"codec {cls.id}: {name} is of type {type(value).__name__}, expected {type_name}")
            values[name] = value
        return cls(**values)


def _stored_fields(codec: type[Codec]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(codec) if field.metadata.get("stored", True)]  # type: ignore[arg-type]


def _type_name(field: dataclasses.Field[Any]) -> str:
    """The annotation as written; without ``from __future__ import annotations`` it is the type itself."""
    if isinstance(field.type, str):
        return field.type
    return "Fields" if field.type == Fields else getattr(field.type, "__name__", str(field.type))


def _is_optional(field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata.get("optional", False))
