"""The base class of codec families. Each family has its own file and one row in the table ``formats.CODECS``."""

from __future__ import annotations

import dataclasses
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .base import Codec, PlainCodec
from .errors import InvalidParameter, InvalidPayload
from .lazy import torch
from .norm_rule import error_spread, typical_error
from .parameter_checks import Fields, check_choice, check_range
from .runs import RunEncoder
from .tables import MAX_CACHED_TABLES
from .token_norms import norm_features

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .options import Options
    from .runs import Run
    from .streams import Layout

OPTIONAL = {"optional": True}
"""Metadata of a parameter that is stored only if it differs from its default."""
ENCODER_ONLY = {"stored": False}
"""Metadata of a parameter that affects only the encoder and is never stored."""


def in_range(low: int, high: int) -> dict[str, Any]:
    """Return the metadata of an integer parameter from ``low`` to ``high``, both included."""
    return {"range": (low, high)}


def one_of(choices: Iterable[Any]) -> dict[str, Any]:
    """Return the metadata of a parameter whose value is one of the strings or integers in ``choices``."""
    return {"known": tuple(choices)}


_TORCH_NAMES = {"U8": "uint8", "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "F32": "float32"}

SEED = in_range(0, 2**64 - 1)


class CodecFamily(PlainCodec):
    """Base class of the codecs that recipes and headers name by ``id``.

    Every subclass is a frozen dataclass whose first field is ``dim``. Its fields are the parameters that the header stores, so equality,
    repr and the header round trip need no code. Annotate each field with a plain type, such as ``int``, or with ``Fields``. Declare its
    values in its metadata, ``in_range(low, high)`` or ``one_of(known)``; recipes and headers share that declaration. A field with
    ``ENCODER_ONLY`` and a default affects only the encoder and is never stored. A field with ``OPTIONAL`` is stored only if it differs from
    its default, so that files written before the field existed keep their bytes.

    Raises:
        InvalidParameter: A parameter is not one of its declared values.

    >>> kvpack.formats.codec_class("raw")(64, "bf16").params()
    {'id': 'raw', 'dim': 64, 'dtype': 'bf16'}
    """

    stores_directions: ClassVar[bool] = False
    """True if the codec stores a number proportional to each token's norm, and codes for its direction (``direction_spread``)."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # The encoders of kvpack's own codecs are tested instead, which costs users nothing.
        if not cls.__module__.startswith("kvpack."):
            _check_encoder(cls)

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
        """Required features of the stored form of norms, if the codec has a parameter ``norm``. Subclasses with other features add them."""
        return norm_features(getattr(self, "norm", ""))

    def params(self) -> dict[str, Any]:
        """Return the codec's map in a header: ``id``, then every stored field by name. Optional fields at their default are omitted."""
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
    """Return the metadata of every parameter with declared values, by name."""
    fields = dataclasses.fields(codec)  # type: ignore[arg-type]
    return {field.name: field.metadata for field in fields if field.metadata.keys() & {"range", "known"}}


@lru_cache(maxsize=MAX_CACHED_TABLES)
def _declared_checks(codec: type[Codec]) -> tuple[list[tuple[str, int, int]], list[tuple[str, tuple[Any, ...]]]]:
    """Return the ranges and choices of ``_declared_fields``. They are cached because files may have thousands of codecs."""
    ranges = [(name, *values["range"]) for name, values in _declared_fields(codec).items() if "range" in values]
    return ranges, [(name, values["known"]) for name, values in _declared_fields(codec).items() if "known" in values]


def _type_name(field: dataclasses.Field[Any]) -> str:
    """Return the annotation of a field as text. Without ``from __future__ import annotations``, the annotation is the type itself."""
    if isinstance(field.type, str):
        return field.type
    return "Fields" if field.type == Fields else getattr(field.type, "__name__", str(field.type))


def _list_names(names: Iterable[str]) -> str:
    return ", ".join(name if name.isprintable() else repr(name) for name in sorted(names))


def _is_optional(field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata.get("optional", False))


def _check_encoder(codec_class: type[PlainCodec]) -> None:
    """Make the codec raise InvalidParameter for unknown dtypes in ``scales``, and for encoded or decoded tensors outside its layout."""
    scales, pack, encode, begin = codec_class.scales, codec_class.pack, codec_class.encode, codec_class.begin
    decode_digits = codec_class.decode_digits

    @wraps(scales)
    def checked_scales(self: Codec, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        layouts = scales(self, batch, heads, tokens)
        for name, layout in layouts.items():
            check_choice(self.id, f"the dtype of stream {name!r} in scales", layout.dtype, tuple(_TORCH_NAMES))
        return layouts

    @wraps(pack)
    def checked_pack(self: Codec, stream: str, *digits: torch.Tensor) -> dict[str, torch.Tensor]:
        _check_digits(self, stream, digits)
        return pack(self, stream, *digits)

    # A subclass may extend an encoder, and its layout describes only the final result.
    @wraps(encode)
    def checked_encode(self: PlainCodec, x: torch.Tensor) -> dict[str, torch.Tensor]:
        streams = encode(self, x) or {}
        if type(self).encode is checked_encode and type(self).begin is Codec.begin:
            _check_streams(self, streams, x.shape)
        return streams

    @wraps(begin)
    def checked_begin(self: PlainCodec, run: Run, before: Mapping[str, torch.Tensor] | None) -> RunEncoder:
        encoder = begin(self, run, before)
        if type(self).begin is not checked_begin:
            return encoder

        def encode_block(block: torch.Tensor, start: int) -> dict[str, torch.Tensor]:
            streams = encoder.encode(block, start)
            _check_streams(self, {**encoder.streams, **streams}, block.shape)
            return streams

        return RunEncoder(encoder.streams, encode_block)

    @wraps(decode_digits)
    def checked_decode(self: Codec, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        values = decode_digits(self, digits, streams)
        if type(self).decode_digits is checked_decode:
            _check_values(self, values)
        return values

    codec_class.scales, codec_class.decode_digits = checked_scales, checked_decode  # type: ignore[method-assign]
    codec_class.pack, codec_class.encode = checked_pack, checked_encode  # type: ignore[assignment, method-assign]
    if begin is not Codec.begin:
        codec_class.begin = checked_begin  # type: ignore[assignment, method-assign]


def _check_digits(codec: Codec, stream: str, digits: Sequence[torch.Tensor]) -> None:
    where, packing = f"codec {codec.id}: encode packs stream {stream!r}", codec.packings().get(stream)
    if packing is None:
        raise InvalidParameter(f"{where}, which packings lacks: add it there")
    shapes, expected = [list(digit.shape) for digit in digits], [packing.symbols] * len(packing.bases)
    if [shape[-1] for shape in shapes] != expected:
        raise InvalidParameter(f"{where} from digits of shapes {shapes}, expected last axes {expected}: reshape them, or change packings")
    for digit, alphabet in zip(digits, packing.alphabets, strict=True):
        values = digit.to(torch.float64)
        if values.numel() and not (values.amin() >= 0 and values.amax() < alphabet and not values.frac().any()):
            raise InvalidParameter(
                f"{where} from digits {values.amin().item():g} to {values.amax().item():g}, expected integers from 0 to {alphabet - 1}: "
                "round or clamp them, or change packings"
            )


def _check_streams(codec: Codec, streams: Mapping[str, torch.Tensor], shape: Sequence[int]) -> None:
    """Check that ``streams``, encoded from values of ``shape``, match the codec's layout, and that a reader accepts and decodes them."""
    layout = codec.layout(*shape[:3])
    for name in {**layout, **streams}:
        entry, stream = layout.get(name), streams.get(name)
        sizes = [] if entry is None else list(entry.shape)
        if entry and entry.per == "entry" and stream is not None:
            # The number of entries depends on the values.
            sizes[2:3] = stream.shape[2:3]
        expected = f"{_TORCH_NAMES[entry.dtype]} {sizes}" if entry else f"only {', '.join(layout)}"
        given = "missing" if stream is None else f"{str(stream.dtype).removeprefix('torch.')} {list(stream.shape)}"
        if given != expected:
            raise InvalidParameter(
                f"codec {codec.id}: encode's stream {name!r} is {given}, expected {expected}: change encode, or scales and packings"
            )
    try:
        # NumPy lacks bfloat16.
        words = {name: x.view(torch.uint16) if x.dtype == torch.bfloat16 else x for name, x in streams.items()}
        codec.check({name: x.detach().cpu().numpy() for name, x in words.items()}, "encode")
    except InvalidPayload as error:
        raise InvalidParameter(f"codec {codec.id}: readers would refuse what encode returns: {error}") from None
    # The last group of tokens may be padded.
    _check_values(codec, codec.decode_frame(streams), shape[:3] if codec.token_group == 1 else (*shape[:2], "token"))


def _check_values(codec: Codec, values: torch.Tensor, shape: Sequence[int | str] = ("batch", "kv_head", "token")) -> None:
    """Check the dtype and shape of decoded ``values``. Axes that ``shape`` gives by name may have any size."""
    expected = [*shape, codec.dim]
    sizes = [size if isinstance(axis, int) else axis for size, axis in zip(values.shape, expected, strict=False)]
    if values.dtype != torch.float32 or values.dim() != 4 or sizes != expected:
        given = f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
        text = f"float32 [{', '.join(map(str, expected))}]"
        raise InvalidParameter(f"codec {codec.id}: decode_digits returns {given}, expected {text}: change decode_digits")
