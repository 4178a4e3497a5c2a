"""A codec family: what one codec file holds, and what a row of the table ``formats.CODECS`` is."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Self

from .base import Codec
from .errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .options import Options


class CodecFamily(Codec):
    """A codec that a recipe or a header asks for by its ``id``.

    Every subclass is a frozen dataclass. Its fields, of which ``dim`` is the first, are the parameters that the header stores, so
    equality, repr and the header round trip come with it. A field with ``metadata={"stored": False}`` and a default steers the
    encoder only: no header holds it. One with ``metadata={"optional": True}`` is stored unless it has its default, so that files
    written before the field existed stay as they were.
    """

    @classmethod
    @abstractmethod
    def create(cls, dim: int, side: str, options: Options) -> Self:
        """The codec that a recipe asks for, with the defaults of this ``side`` ("k" or "v") filled in.

        Raises InvalidParameter for an option that is unknown or out of range.
        """

    def params(self) -> dict[str, Any]:
        """The header's map of this codec: ``id``, then every stored field by name, an optional one only where it is not the default."""
        result: dict[str, Any] = {"id": self.id}
        for field in _stored_fields(type(self)):
            value = getattr(self, field.name)
            if not _is_optional(field) or value != field.default:
                result[field.name] = dict(value) if field.name == "fields" else value
        return result

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """The codec of a header map, ``id`` left out.

        Raises InvalidParameter for a missing or unknown name, an optional one with its default, a wrong type or a value out of range.
        """
        fields = [field for field in _stored_fields(cls) if field.name in params or not _is_optional(field)]
        odd = set(params) ^ {field.name for field in fields}
        if odd:
            names = ", ".join(name if name.isprintable() else repr(name) for name in sorted(odd))
            raise InvalidParameter(f"codec {cls.id}: parameters missing or unknown: {names}")
        values = {}
        for field in fields:
            name, type_name, value = field.name, field.type, params[field.name]
            if _is_optional(field) and value == field.default:
                raise InvalidParameter(f"codec {cls.id}: {name} is {value!r}, which is said by leaving it out")
            if type_name == "Fields":
                if not isinstance(value, dict) or not all(isinstance(k, str) and type(v) is int for k, v in value.items()):
                    raise InvalidParameter(f"codec {cls.id}: fields is a map from stream name to integer, found {value!r}")
                value = tuple(value.items())
            elif type(value).__name__ != type_name:
                raise InvalidParameter(f"codec {cls.id}: {name} is of type {type_name}, found {type(value).__name__}")
            values[name] = value
        return cls(**values)


def _stored_fields(codec: type[Codec]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(codec) if field.metadata.get("stored", True)]  # type: ignore[arg-type]


def _is_optional(field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata.get("optional", False))
