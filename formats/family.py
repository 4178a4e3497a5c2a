"""The base class of codec families. Each family has its own file and one row in the table ``formats.CODECS``."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .base import Codec, PlainCodec
from .errors import InvalidParameter
from .norm_rule import error_spread, typical_error
from .parameter_checks import Fields, check_choice, check_range
from .tables import MAX_CACHED_TABLES
from .token_norms import norm_features

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .options import Options

OPTIONAL = {"optional": True}
"""Metadata of a parameter that is stored only if its value is not the default."""
ENCODER_ONLY = {"stored": False}
"""Metadata of a parameter that affects only the encoder and is never stored."""


def in_range(low: int, high: int) -> dict[str, Any]:
    """Return the metadata of an integer parameter from ``low`` to ``high``, inclusive."""
    return {"range": (low, high)}


def one_of(choices: Iterable[Any]) -> dict[str, Any]:
    """Return the metadata of a parameter whose value is one of the strings or integers in ``choices``."""
    return {"known": tuple(choices)}


SEED = in_range(0, 2**64 - 1)


class CodecFamily(PlainCodec):
    """Base class of the codecs that recipes and headers name by ``id``.

    Every subclass is a frozen dataclass whose first field is ``dim``. Its fields are the parameters that the header stores, so equality,
    repr and the header round trip need no code. Annotate each field with a plain type, such as ``int``, or with ``Fields``. Declare its
    values in its metadata, ``in_range(low, high)`` or ``one_of(choices)``; recipes and headers share that declaration. A field with
    ``ENCODER_ONLY`` and a default affects only the encoder and is never stored. A field with ``OPTIONAL`` is stored only if it differs from
    its default, so that files written before the field existed keep their bytes.

    Raises:
        InvalidParameter: A parameter is not one of its declared values.

    >>> kvpack.formats.codec_class("raw")(64, "bf16").params()
    {'id': 'raw', 'dim': 64, 'dtype': 'bf16'}
    """

    stores_directions: ClassVar[bool] = False
    """True if the codec stores a number proportional to each token's norm, and codes for its direction (``direction_spread``)."""

    @property
    def direction_spread(self) -> float:
        return error_spread(self.nominal_bits, self.dim) if self.stores_directions else 0.0

    @property
    def min_error(self) -> float:
        return typical_error(self.nominal_bits) if self.stores_directions else 0.0

    def __post_init__(self) -> None:
        """Raise InvalidParameter for a parameter outside its declared values. Subclasses add checks that involve several parameters."""
        ranges, choices = _declared_checks(type(self))
        for name, low, high in ranges:
            if not low <= (value := getattr(self, name)) <= high:
                check_range(self.id, name, value, low, high)
        for name, known in choices:
            if (value := getattr(self, name)) not in known:
                check_choice(self.id, name, value, known)

    @classmethod
    def check_value(cls, name: str, value: int) -> None:
        """Raise InvalidParameter unless ``value`` is in the declared range of the parameter ``name``."""
        check_range(cls.id, name, value, *cls._declared(name)["range"])

    @classmethod
    def option(cls, options: Options, name: str, default: Any, word: str | None = None, *, omitted: str | None = "") -> Any:
        """Read the parameter ``name`` from a recipe.

        Args:
            options: The recipe's options for this codec.
            name: Name of the parameter, whose metadata declares its values.
            default: Value if the recipe lacks the option, or None if the option is required.
            word: Name of the option in the recipe, if it differs from ``name``.
            omitted: See ``Options``.

        Returns:
            The parameter's value.

        Raises:
            InvalidParameter: The option is missing or its value is not allowed, or the field declares no values.
        """
        values, word = cls._declared(name), word or name
        if "range" in values:
            return options.integer(word, default, *values["range"], omitted=omitted)
        text = options.choice(word, str(default), tuple(map(str, values["known"])), omitted=omitted)
        return next(value for value in values["known"] if str(value) == text)

    @classmethod
    def _declared(cls, name: str) -> Mapping[str, Any]:
        try:
            return _declared_fields(cls)[name]
        except KeyError:
            raise InvalidParameter(
                f"codec {cls.id}: {name!r} is not a field with declared values: declare an integer as `{name}: int = "
                "field(metadata=in_range(low, high))`, or strings or integers with one_of(choices)"
            ) from None

    @classmethod
    def create(cls, dim: int, side: str, options: Options) -> Self:
        """Create the codec that a recipe requests. Codecs with options override this.

        Args:
            dim: Head dim.
            side: ``"k"`` for keys or ``"v"`` for values, which may have different defaults.
            options: The recipe's options for this codec.

        Raises:
            InvalidParameter: An option is unknown or out of range.
        """
        options.finish()
        return cls(dim)  # type: ignore[call-arg]

    @property
    def features(self) -> frozenset[str]:
        """Features that readers need for the stored norms, if the codec has a parameter ``norm``. Subclasses may add features."""
        return norm_features(getattr(self, "norm", ""))

    def params(self) -> dict[str, Any]:
        """Return the map that describes the codec in a header: ``id``, then its fields, except optional ones left at their defaults."""
        result: dict[str, Any] = {"id": self.id}
        for field in _stored_fields(type(self)):
            value = getattr(self, field.name)
            if not _is_optional(field) or value != field.default:
                result[field.name] = dict(value) if field.name == "fields" else value
        return result

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """Create the codec from its map in a header, without the ``id``.

        Raises:
            InvalidParameter: A name is missing or unknown, an optional field is stored with its default, or a value has the wrong type or
                is out of range.
        """
        fields = [field for field in _stored_fields(cls) if field.name in params or not _is_optional(field)]
        expected = {field.name for field in fields}
        if set(params) != expected:
            faults = (("missing", expected - set(params)), ("unknown", set(params) - expected))
            text = " and ".join(f"{fault} parameters {_list_names(names)}" for fault, names in faults if names)
            raise InvalidParameter(f"codec {cls.id}: {text}")
        values = {}
        for field in fields:
            name, type_name, value = field.name, _type_name(field), params[field.name]
            if _is_optional(field) and value == field.default:
                raise InvalidParameter(f"codec {cls.id}: {name} is {value!r}, which is the default and must be omitted")
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


@lru_cache(maxsize=MAX_CACHED_TABLES)
def _declared_fields(codec: type[Codec]) -> dict[str, Mapping[str, Any]]:
    """Return the metadata of all parameters with declared values, by name."""
    fields = dataclasses.fields(codec)  # type: ignore[arg-type]
    return {field.name: field.metadata for field in fields if field.metadata.keys() & {"range", "known"}}


@lru_cache(maxsize=MAX_CACHED_TABLES)
def _declared_checks(codec: type[Codec]) -> tuple[list[tuple[str, int, int]], list[tuple[str, tuple[Any, ...]]]]:
    """Return the ranges and the choices in ``_declared_fields``. They are cached, because files may have thousands of codecs."""
    ranges = [(name, *values["range"]) for name, values in _declared_fields(codec).items() if "range" in values]
    return ranges, [(name, values["known"]) for name, values in _declared_fields(codec).items() if "known" in values]


def _type_name(field: dataclasses.Field[Any]) -> str:
    """Return the annotation of a field as text.

    With ``from __future__ import annotations``, it is already text; otherwise, it is a type.
    """
    if isinstance(field.type, str):
        return field.type
    return "Fields" if field.type == Fields else getattr(field.type, "__name__", str(field.type))


def _list_names(names: Iterable[str]) -> str:
    return ", ".join(name if name.isprintable() else repr(name) for name in sorted(names))


def _is_optional(field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata.get("optional", False))
