"""Parse recipes. A recipe selects the codecs of every layer's keys and values, by clauses or by the name of a preset::

    recipe  = clause { ";" clause }            later clauses win
    clause  = preset | addition | side "=" codec | "layers=" list ":" side "=" codec | "raw=" tokens | "window=" tokens
    side    = "k" | "v" | "kv"
    codec   = id [ ":" option { "," option } ]
    list    = item { "," item }                item = layer or first-last; -1 is the last layer

Presets and additions are in kvpack/coding/presets.py: the addition "boundary-1" stands for "layers=0,-1:k=raw". "raw=4,0.5,4" sets the
options raw_first=4, raw_low_norm=0.5 and raw_high_norm=4 of every lossy codec in the recipe that sets none of them itself. Every lossy
preset includes it, and "raw=0" after a preset turns it off. The codecs raw and lossless store their input's dtype, or round to the dtype in
their option: "k=raw:dtype=bf16". The codecs klt and transform need a basis (kvpack/coding/bases.py): "klt-1.75" stands for
"kv=klt:bits=1.75,widths=heads" and "transform-0.6" for "kv=transform:bits=0.6", both with "raw=1,0.6,4"; the number is the average number
of bits per value. Other codecs need a basis to encode keys in balanced frames: "k=scalar:b=2,frame=balanced". For example "kvpack-3",
"octopus-3;layers=0,-1:k=raw;window=32", or "k=octahedral:b=3;v=group:b=3,g=32;layers=0,-1:k=raw;window=32". Wherever a recipe is accepted,
"@path" refers to a file of clauses (kvpack/coding/recipe_files.py). Files, stores and pages record a recipe's canonical text, which
contains no preset names (kvpack/coding/canonical.py).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from typing import Self

from kvpack.codecs import CodecChoice
from kvpack.file.checks import TEXT, check_argument
from kvpack.file.limits import MAX_LAYERS
from kvpack.formats import CODECS, SIDECARS
from kvpack.formats.arguments import as_integer, check_mapping, describe
from kvpack.formats.base import Codec
from kvpack.formats.errors import InvalidParameter, InvalidType, MissingBasis, OutOfBounds
from kvpack.formats.raw import EXACT_DTYPES
from kvpack.formats.tables import BoundedCache

from . import raw_clause
from .bases import Basis
from .basis_sources import load_basis
from .calibrated_presets import MAX_WIDTH, calibrated_clauses, calibrated_presets
from .canonical import canonical_text
from .clauses import InvalidClause, parse_rule, reject_word, underline
from .presets import ADDITIONS, CALIBRATED_RAW_CLAUSE, KVPACK_PRESETS, PUBLISHED
from .recipe_files import read_clauses, split_path
from .recorded_presets import RECORDED
from .rules import BASIS_OPTIONS, CALIBRATED, CHECKED_DIM, Rule

PRESETS: dict[str, str] = {name: preset.recipe for name, preset in PUBLISHED.items()}
"""Recipe texts by preset name: kvpack's own recipes, configurations published in papers, and recipes that do not compress.

>>> kvpack.PRESETS["bf16"]
'kv=raw:dtype=bf16'
"""

_NAMED = {name: preset.recipe for name, preset in (PUBLISHED | ADDITIONS).items()}
SIDES = ("k", "v")
MAX_WINDOW = 1 << 20

_ALIAS_WORDS = {"klt": f",widths=heads;{CALIBRATED_RAW_CLAUSE}", "transform": f";{CALIBRATED_RAW_CLAUSE}"}
"""Text that ``klt-<bits>`` and ``transform-<bits>`` append. Changing it does not affect clauses that are written out."""
_ALIAS = re.compile(rf"({'|'.join(CALIBRATED)})-([0-9]+(?:\.[0-9]+)?)")
_CODEC = re.compile(r"(?:^|[;:])(?:k|v|kv)=([a-z]+)")
"""Pattern that finds the codec ids in a recipe."""
_WINDOW = ("window=", "tail=")
"""Prefixes of a window clause. The canonical text, which store keys depend on, uses the second one."""


@dataclass(frozen=True, init=False)
class Recipe:
    """A parsed recipe. It selects the codec of each layer's keys and values.

    ``text`` is the canonical text. It is the same for every spelling of the recipe, contains no preset names, and includes the SHA-256 of
    the basis. Recipes with the same canonical text are equal.

    Args:
        text: A preset, a recipe, another Recipe, or the path of a recipe file (as a Path or ``"@path"``). Omit it to pass codecs instead.
        basis: The Basis, or the path of its file, for the codecs klt and transform and for keys in balanced frames.
        k: Codec of all layers' keys, from ``kvpack.codecs``.
        v: Codec of all layers' values.
        kv: Codec of all layers' keys and values.
        layers: Codecs of some layers, keyed by a list of layers such as ``"0,-1"``: one codec for keys and values, or a mapping from "k"
            and "v" to codecs.
        window: Number of tokens that are encoded together. The newest tokens stay raw until there are this many.

    Raises:
        InvalidParameter: The recipe is invalid. The message points at the invalid word and lists the valid ones.
        MissingFile: The recipe file or the basis file does not exist.

    >>> kvpack.Recipe("k=scalar:b=4;v=group:b=2,g=32") == kvpack.Recipe("v=group:g=32,b=2;k=scalar:b=4")
    True
    >>> from kvpack.codecs import Raw, Scalar
    >>> kvpack.Recipe(kv=Scalar(b=4), layers={"0,-1": Raw()}).text
    'kv=scalar:b=4;layers=0,-1:kv=raw'
    """

    text: str = field(compare=False)
    basis: Basis | None = field(default=None, compare=False, repr=False)
    canonical: str = field(init=False, repr=False)
    _written: str = field(init=False, compare=False, repr=False)
    """The text as the caller wrote it, with the SHA-256 of the basis inserted."""
    _named: Mapping[str, str] = field(init=False, compare=False, repr=False)

    def __init__(
        self,
        text: str | os.PathLike[str] | Recipe | None = None,
        basis: Basis | str | os.PathLike[str] | None = None,
        *,
        k: CodecChoice | None = None,
        v: CodecChoice | None = None,
        kv: CodecChoice | None = None,
        layers: Mapping[str, CodecChoice | Mapping[str, CodecChoice]] | None = None,
        window: int | None = None,
    ) -> None:
        codecs = {name: codec for name, codec in (("kv", kv), ("k", k), ("v", v)) if codec is not None}
        if codecs or layers or window is not None:
            if text is not None:
                others = ", ".join(codecs) or "layers or window"
                raise InvalidParameter(f"pass a recipe either as text or as codecs, but not both: got text {describe(text)} and {others}")
            check_mapping(layers, "layers", '{"0,-1": Raw()}')
            text = _to_text(codecs, layers or {}, window)
        elif isinstance(text, Recipe) or (text is not None and _names_file(text)):
            parsed = parse_recipe(text)
            text, basis = parsed._written if parsed._has_own_preset else parsed.canonical, parsed.basis if basis is None else basis
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "basis", basis)
        self._parse(_NAMED)
        object.__setattr__(self, "text", self.canonical)

    @classmethod
    def calibrated(cls, basis: Basis | str | os.PathLike[str], bits: float, *, trellis: bool = False) -> Self:
        """Return a recipe like ``kvpack-2`` with a basis, but for any average width of codes, such as 2.4 bits.

        Args:
            basis: The Basis, or the path of its file, with balanced frames and measured losses of layers (``kvpack calibrate``).
            bits: Average width of codes over all layers, in bits. Files take about 0.25 bits more at head dim 64.
            trellis: Use trellis codes, as ``kvpack-2-trellis`` does.

        Raises:
            InvalidParameter: ``bits`` is not from 1 to 8, or the basis has no frames or no measured losses.
            MissingFile: The basis file does not exist.
        """
        if not isinstance(bits, int | float) or not 1 <= bits <= MAX_WIDTH:
            raise InvalidParameter(f"bits is {describe(bits)}, expected a number from 1 to {MAX_WIDTH}")
        loaded = load_basis(basis)
        if not loaded.has_balanced_frames or not loaded.losses:
            missing = "measured losses of layers" if loaded.has_balanced_frames else "balanced frames of keys"
            raise InvalidParameter(f"{loaded.where} has no {missing}: make it with kvpack calibrate, without --widths 0")
        return cls(calibrated_clauses(loaded, bits, trellis=trellis), loaded)

    @classmethod
    def from_recorded(cls, text: str, basis: Basis | None = None) -> Self:
        """Parse a recipe text that was recorded in a file, store entry or page. Presets mean what they meant when it was recorded.

        ``text`` stays as recorded, for comparison with pages. ``canonical`` is the text that this version of kvpack would record. Raises
        InvalidParameter if the text is not a recipe, which the file format allows.
        """
        recipe = cls.__new__(cls)
        object.__setattr__(recipe, "text", text)
        object.__setattr__(recipe, "basis", basis)
        recipe._parse(_NAMED | RECORDED)
        return recipe

    def _parse(self, presets: Mapping[str, str]) -> None:
        """Parse ``text`` and set all other attributes. ``presets`` maps names of presets and additions to recipe texts."""
        if not isinstance(self.text, str):
            raise InvalidType(f"a recipe must be text, such as 'kvpack-3', but got a {type(self.text).__name__}")
        object.__setattr__(self, "_named", presets)
        object.__setattr__(self, "_written", self.text)
        if self.basis is not None:
            object.__setattr__(self, "basis", load_basis(self.basis))
            object.__setattr__(self, "_named", {**presets, **calibrated_presets(self.basis)})
            object.__setattr__(self, "_written", self._text_with_basis_digest())
        for side in SIDES:
            if not any(side in rule.sides and rule.items is None for rule in self.rules):
                remedy = f"add {side}=<codec> or kv=<codec>, or use a preset, such as kvpack-4 (kvpack recipes lists them)"
                raise InvalidParameter(f"recipe {self._written!r} has no codec for {'keys' if side == 'k' else 'values'}: {remedy}")
        window = self.window
        self._check_order()
        rules = [(rule.sides, rule.items, {side: rule.canonical(side) for side in rule.sides}) for rule in self.rules]
        object.__setattr__(self, "canonical", canonical_text(rules, window))

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The rules in the order of the text. If several rules cover a layer's keys or values, the last one applies."""
        result: list[Rule] = []
        words: dict[str, str] = {}
        for clause, written in self._clauses():
            if clause.startswith(raw_clause.PREFIX):
                try:
                    words = raw_clause.parse_raw_clause(clause)
                except InvalidParameter as error:
                    reject_word(self._written, clause, clause, str(error))
            elif not clause.startswith(_WINDOW):
                result.append(parse_rule(clause, written, self._written, self._named))
        return tuple(rule.with_raw_tokens(words) for rule in result)

    @property
    def needs_basis(self) -> bool:
        """True if a clause of the recipe requires a basis."""
        return any(rule.needs_basis for rule in self.rules)

    @property
    def uses_basis(self) -> bool:
        """True if the recipe can use a basis, either because a clause requires one or because one of its presets changes with one."""
        return self.needs_basis or self._has_own_preset

    @property
    def _has_own_preset(self) -> bool:
        """True if the recipe contains one of kvpack's own presets, which change with a basis."""
        return any(written in KVPACK_PRESETS for _, written in self._clauses())

    @cached_property
    def window(self) -> int:
        """Number of tokens that are encoded together. Fewer new tokens stay raw. With 0, tokens are encoded once they fill the codec's
        token group.
        """
        windows = [clause for clause, _ in self._clauses() if clause.startswith(_WINDOW)]
        if not windows:
            return 0
        name, _, text = windows[-1].partition("=")
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) > MAX_WINDOW:
            reject_word(self._written, windows[-1], windows[-1], f"{name} is {text!r}, expected an integer from 0 to {MAX_WINDOW}")
        window = int(text)
        for rule in self.rules:
            for side in rule.sides:
                group = rule.codec(CHECKED_DIM, side).group_tokens
                if window % group:
                    reject_word(
                        self._written,
                        windows[-1],
                        windows[-1],
                        f"{name}={window} must be a multiple of {group}, the number of tokens that {side}={rule.codec_id} encodes together",
                    )
        return window

    def codec(self, layer: int, layers: int, side: str, dim: int, dtype: str = "bf16") -> Codec:
        """Return the codec of one layer's keys or values.

        Args:
            layer: Layer number, from 0.
            layers: Number of the model's layers.
            side: "k" for keys or "v" for values.
            dim: Head dim.
            dtype: Dtype of the values, "bf16", "fp16" or "fp32". The codecs raw and lossless store it, unless their clause sets another.

        Raises InvalidParameter, with a list of suitable presets, if the codec does not support the head dim. Raises InvalidType if it
        does not support the dtype.
        """
        layer, layers, dim = as_integer(layer, "layer"), as_integer(layers, "layers"), as_integer(dim, "dim")
        if not isinstance(side, str) or side not in SIDES:
            raise InvalidParameter(f"side is {describe(side)}, expected 'k' or 'v'")
        if not isinstance(dtype, str):
            raise InvalidType(f"dtype is {describe(dtype)}, expected 'bf16', 'fp16' or 'fp32'")
        key = layer, layers, side, dim, dtype
        if key not in self._codecs:
            self._codecs[key] = self._codec(*key)
        return self._codecs[key]

    @cached_property
    def _codecs(self) -> dict[tuple[int, int, str, int, str], Codec]:
        return BoundedCache()

    def _codec(self, layer: int, layers: int, side: str, dim: int, dtype: str) -> Codec:
        rule = next(rule for rule in reversed(self.rules) if side in rule.sides and rule.covers(layer, layers))
        calibrated = balanced = None
        if rule.frame:
            balanced = self._get_basis(rule, layers).balanced_frames(layer, rule.frame)
        elif rule.balances_channels:
            balanced = self._get_basis(rule, layers).channel_queries(layer)
        elif rule.codec_id in CALIBRATED:
            basis = self._get_basis(rule, layers)
            if rule.codec_id == "transform":
                calibrated = basis.transform_parameters(layer, side, rule.bits, rule.keeps_raw)
            else:
                words = dict(rule.words)
                calibrated = basis.klt_parameters(layer, side, rule.bits, words.get("gain"), words.get("widths") == "heads")
        try:
            return rule.codec(dim, side, dtype, calibrated, balanced)
        except InvalidType:
            raise
        except InvalidParameter as error:
            raise InvalidParameter(f"{error}{_presets_for(dim, dtype)}") from None

    def _get_basis(self, rule: Rule, layers: int) -> Basis:
        """Return the basis that ``rule`` requires. Raises MissingBasis if there is no basis, and InvalidParameter if it is for a different
        number of layers.
        """
        if self.basis is None:
            wanted = dict(rule.words).get("basis")
            named = f"the basis {wanted}" if wanted else "a basis"
            remedy = "pass --basis FILE to a command, or kvpack.Recipe(text, basis) in Python (kvpack calibrate makes a basis)"
            missing = MissingBasis(f"recipe {self._written!r} needs {named}: {remedy}")
            # The request is wrong, not a file.
            missing.exit_code = 2
            raise missing
        # The last layers may share the keys and values of others; caches then store them empty, or omit them.
        if not self.basis.described_layer_count <= layers <= self.basis.layers:
            raise InvalidParameter(
                f"{self.basis.where} is a basis for a model with {self.basis.layers} layers, but the cache has {layers}: use the basis "
                "of the cache's model"
            )
        return self.basis

    def _text_with_basis_digest(self) -> str:
        """Return the recipe text with the basis's SHA-256 added to every clause that needs a basis.

        Raises InvalidParameter if a clause names a different basis.
        """
        assert self.basis is not None
        digest, clauses = self.basis.digest.hex(), []
        for clause in (part for text in self._written.split(";") for part in _expand_alias(text.strip()).split(";")):
            match = re.fullmatch(r"((?:layers=[^:]*:)?(?:k|v|kv)=([a-z]+))(?::(.*))?", clause)
            words = [word for word in match[3].split(",") if word] if match and match[3] else []
            needs = match is not None and (match[2] in CALIBRATED or any(word.startswith(BASIS_OPTIONS) for word in words))
            if needs:
                named = next((word.partition("=")[2] for word in words if word.startswith("basis=")), digest)
                if named != digest:
                    raise InvalidParameter(
                        f"recipe {self._written!r} names the basis {named}, but {digest} was passed: pass the basis that the recipe names"
                    )
                words = [word for word in words if not word.startswith("basis=")]
            clauses.append(f"{match[1]}:{','.join([*words, f'basis={digest}'])}" if match and needs else clause)
        return ";".join(clauses)

    def lossless(self, layers: int, dim: int = CHECKED_DIM) -> tuple[str, ...]:
        """Return the dtypes ("bf16", "fp16" or "fp32") that the recipe stores exactly in every layer of a model with ``layers`` layers."""
        if not 0 <= as_integer(layers, "layers") <= MAX_LAYERS:
            raise InvalidParameter(f"layers is {describe(layers)}, expected an integer from 0 to {MAX_LAYERS}")
        sides = [(layer, side) for layer in range(layers) for side in SIDES]
        return tuple(dtype for dtype in EXACT_DTYPES if all(self._is_lossless(layer, layers, side, dim, dtype) for layer, side in sides))

    def _is_lossless(self, layer: int, layers: int, side: str, dim: int, dtype: str) -> bool:
        try:
            exact = self.codec(layer, layers, side, dim, dtype).exact_dtype
        except (InvalidType, MissingBasis):
            return False
        return exact is not None and dtype in EXACT_DTYPES[exact]

    def check_layers(self, layers: int) -> None:
        """Raise OutOfBounds if a clause names a layer that a cache with ``layers`` layers does not have.

        Raises InvalidParameter if the text is too long for a file's header.
        """
        _check_length(self.text)
        for rule in self.rules:
            for item in chain.from_iterable(rule.items or ()):
                if not -layers <= item < layers:
                    raise OutOfBounds(
                        f"recipe {self._written!r} names layer {item}, but the cache has only {layers} layers: name only these, or "
                        "count from the end, as in -1"
                    )

    def _check_order(self) -> None:
        """Raise InvalidParameter if the text names two presets, or if later clauses for all layers override a clause for some layers."""
        presets = dict.fromkeys(rule.written for rule in self.rules if rule.written in self._named and rule.written not in ADDITIONS)
        if len(presets) > 1:
            first, second = tuple(presets)[:2]
            reject_word(self._written, second, second, f"it already names {first!r}, and a recipe can name only one preset: remove one")
        covered: set[str] = set()
        for rule in reversed(self.rules):
            if rule.items is None:
                covered.update(rule.sides)
            elif covered.issuperset(rule.sides) and (rule.written in ADDITIONS or rule.written not in self._named):
                message = f"{rule.written!r} has no effect, because later clauses replace it in every layer: put it last"
                reject_word(self._written, rule.written, rule.written, message)

    def _clauses(self) -> Iterator[tuple[str, str]]:
        """Yield each clause, after expanding presets, additions and aliases, and the text from which it was expanded."""
        for text in self._written.split(";"):
            written = text.strip()
            for clause in self._named.get(written, _expand_alias(written)).split(";"):
                yield clause, written


def _to_text(codecs: Mapping[str, CodecChoice], layers: Mapping[str, CodecChoice | Mapping[str, CodecChoice]], window: int | None) -> str:
    """Return the recipe text for codec objects. Raises InvalidType if an object is not from ``kvpack.codecs``."""
    clauses = [("", side, codec) for side, codec in codecs.items()]
    for items, choice in layers.items():
        sides = choice if isinstance(choice, Mapping) else {"kv": choice}
        clauses += [(f"layers={items}:", side, codec) for side, codec in sides.items()]
    for where, side, codec in clauses:
        if not isinstance(codec, CodecChoice):
            raise InvalidType(f"{where}{side} is {describe(codec)}, expected a codec from kvpack.codecs, such as Octahedral(b=3)")
    return ";".join([*(f"{where}{side}={codec}" for where, side, codec in clauses), *([] if window is None else [f"window={window}"])])


def _expand_alias(clause: str) -> str:
    match = _ALIAS.fullmatch(clause)
    return f"kv={match[1]}:bits={match[2]}{_ALIAS_WORDS[match[1]]}" if match else clause


@lru_cache(maxsize=256)
def _check_length(text: str) -> None:
    check_argument("recipe", text, TEXT)


def _presets_for(dim: int, dtype: str) -> str:
    """Return the end of an error message: a list of presets that support ``dim`` and ``dtype``, one per codec. Empty if there are none."""
    result: dict[str, str] = {}
    for name, preset in PUBLISHED.items():
        rules = Recipe(preset.recipe).rules
        if preset.layers is None and rules[0].codec_id not in result:
            with contextlib.suppress(InvalidParameter):
                _ = [rule.codec(dim, side, dtype) for rule in rules for side in rule.sides]
                result[rules[0].codec_id] = name
    return f"; presets that support head dim {dim} are {', '.join(result.values())}" if result else ""


@lru_cache(maxsize=256)
def canonical_recorded_text(text: str) -> str:
    """Return the canonical text of a recorded recipe. If ``text`` is not a recipe, return it unchanged."""
    try:
        return Recipe.from_recorded(text).canonical
    except InvalidParameter:
        return text


@lru_cache(maxsize=256)
def preset_name(text: str) -> str:
    """Return the name of the preset with the canonical text ``text``, or an empty string."""
    codecs = set(_CODEC.findall(text))
    same = (name for name in PRESETS if set(_CODEC.findall(PRESETS[name])) == codecs)
    return next((name for name in same if Recipe(name).canonical == text), "")


def basis_digest(recipe: Recipe) -> bytes | None:
    """Return the SHA-256 of the basis that caches with ``recipe`` need, or None if they need none.

    Raises InvalidParameter if clauses name different bases, or if a clause that needs a basis does not name one.
    """
    if not recipe.needs_basis:
        return None
    named = {dict(rule.words).get("basis", "") for rule in recipe.rules if rule.needs_basis}
    if "" in named:
        raise InvalidParameter(f"recipe {recipe.text!r} does not name its basis: use kvpack.Recipe(text, basis).text instead")
    if len(named) > 1:
        raise InvalidParameter(f"recipe {recipe.text!r} names {len(named)} bases: use the same one in all clauses")
    return bytes.fromhex(*named)


def _names_file(text: str | os.PathLike[str]) -> bool:
    return (isinstance(text, str) or hasattr(text, "__fspath__")) and split_path(text, PRESETS) is not None


def parse_recipe(recipe: str | os.PathLike[str] | Recipe) -> Recipe:
    """Parse a recipe: text, the name of a preset, or a recipe file. A Recipe is returned unchanged.

    Raises MissingFile or InvalidParameter. For a recipe file, the message contains the line.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str) and not hasattr(recipe, "__fspath__"):
        raise InvalidType(f"a recipe must be text, such as 'kvpack-3', but got a {type(recipe).__name__}")
    named = None if recipe in PRESETS else split_path(recipe, PRESETS)
    if named is None:
        return _parse_cached(str(recipe), (*CODECS.values(), *SIDECARS.values()))
    path, added = named
    clauses = read_clauses(path, PRESETS)
    try:
        return Recipe(";".join([*(clause for _, clause in clauses), *([added] if added else [])]))
    except InvalidClause as error:
        line = next((f", line {number}" for number, clause in clauses if clause == error.clause), "")
        raise InvalidParameter(f"{path}{line}: {error.reason}{underline(error.clause, error.word)}") from None
    except InvalidParameter as error:
        raise InvalidParameter(f"{path}: {error}") from None


@lru_cache(maxsize=256)
def _parse_cached(text: str, classes: tuple[type, ...]) -> Recipe:
    """Parse ``text``. Equal texts get the same Recipe, so that their caches share its codecs."""
    return Recipe(text)
