"""Options of one codec in a recipe. Codecs read them one by one; an option that was never read is unknown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from .errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .balanced_frames import CalibratedFrames
    from .basis import CalibratedRows


_DEFAULT: Final = ""
"""Value of ``omitted`` for options that, when omitted, have the method's default."""


class InvalidOption(InvalidParameter):
    """Error for an option or value that the codec does not support. ``word`` is the part of the recipe that messages point to."""

    def __init__(self, message: str, word: str) -> None:
        super().__init__(message)
        self.word = word


class Options:
    """The options ``name=value`` that a recipe gives to one codec.

    Every method that reads an option specifies its range and its default. A recipe without the option means the default, unless the
    argument ``omitted`` is another value, or None if the value depends on the head dim or on the data. This meaning never changes, because
    stored recipes omit such options.

    Args:
        codec: Codec id.
        words: Values of the options by name.
        calibrated: The codec's input from a basis, if it needs one.
        balanced: Input from a basis for a sidecar of the codec.

    Attributes:
        sketched: True if a sidecar will describe the codec's residual.

    >>> from kvpack.formats.options import Options
    >>> options = Options("group", {"b": "4"})
    >>> options.integer("b", None, 1, 8), options.integer("g", 32, 4, 128)
    (4, 32)
    """

    def __init__(
        self, codec: str, words: Mapping[str, str], calibrated: CalibratedRows | None = None, balanced: CalibratedFrames | None = None
    ) -> None:
        self.codec = codec
        self.sketched = False
        self.calibrated = calibrated
        self.balanced = balanced
        self._words = dict(words)
        # The names read so far, in order.
        self._known: dict[str, None] = {}
        self._extra: tuple[str, ...] = ()
        self._canonical: dict[str, str] = {}

    def canonical(self) -> dict[str, str]:
        """Return the options that were read, sorted by name, in their canonical spelling. Options with their default value are left out."""
        return dict(sorted(self._canonical.items()))

    def respell(self, words: Mapping[str, str | None]) -> None:
        """Replace the canonical spelling of options. The text None removes an option."""
        for name, text in words.items():
            self._canonical.pop(name, None)
            if text is not None:
                self._canonical[name] = text

    def is_given(self, name: str) -> bool:
        """Return True if the recipe contains the option ``name``."""
        return name in self._words

    def mentions_any(self, names: tuple[str, ...]) -> bool:
        """Return True if the recipe contains any option in ``names``. Messages about unknown options then also list all of ``names``."""
        self._extra = names
        return not self._words.keys().isdisjoint(names)

    def integer(self, name: str, default: int | None, low: int, high: int, *, omitted: str | None = _DEFAULT) -> int:
        """Read an integer from ``low`` to ``high``.

        Raises InvalidOption if it is out of range, or if it is missing and has no ``default``.
        """
        text = self._read(name)
        if text is None:
            if default is None:
                raise InvalidOption(f"codec {self.codec} needs {name}=<{low} to {high}>", self.codec)
            return default
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise InvalidOption(f"{self.codec}:{name} is {text!r}, expected an integer from {low} to {high}", f"{name}={text}")
        self._record(name, str(value), str(default) if omitted == _DEFAULT else omitted)
        return value

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """Read one or more integers from ``low`` to ``high``, separated by dots.

        Raises InvalidOption if an integer is out of range or the list is empty.
        """
        text = self._read(name)
        if text is None:
            raise InvalidOption(
                f"codec {self.codec} needs {name}=, one or more integers from {low} to {high} separated by dots", self.codec
            )
        choices = {str(value): value for value in range(low, high + 1)}
        words = text.split(".")
        if not set(words) <= set(choices):
            raise InvalidOption(
                f"{self.codec}:{name} is {text!r}, expected integers from {low} to {high} separated by dots", f"{name}={text}"
            )
        self._record(name, text, None)
        return tuple(choices[word] for word in words)

    def choice(self, name: str, default: str, choices: tuple[str, ...], *, omitted: str | None = _DEFAULT) -> str:
        """Read one of the words in ``choices``. Raises InvalidOption for any other word."""
        text = self._read(name)
        if text is None:
            return default
        if text not in choices:
            raise InvalidOption(f"{self.codec}:{name} is {text!r}, expected one of {', '.join(choices)}", f"{name}={text}")
        self._record(name, text, default if omitted == _DEFAULT else omitted)
        return text

    def fraction(self, name: str, default: float) -> float:
        """Read a number between 0 and 1 (both excluded) with at most four decimal places. Raises InvalidOption for anything else."""
        text = self._read(name)
        if text is None:
            return default
        value = float(text) if re.fullmatch(r"0?\.[0-9]{1,4}", text) else 0.0
        if not value:
            raise InvalidOption(f"{self.codec}:{name} is {text!r}, expected a number above 0 and below 1, such as 0.6", f"{name}={text}")
        self._record(name, f"{value:.4g}", None)
        return value

    def ratio(self, name: str, default: float) -> float:
        """Read a number greater than 1, up to 1,000, with at most four decimal places. Raises InvalidOption for anything else."""
        text = self._read(name)
        if text is None:
            return default
        value = float(text) if re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4})?", text) else 0.0
        if not 1 < value <= 1000:
            raise InvalidOption(f"{self.codec}:{name} is {text!r}, expected a number above 1 and up to 1000, such as 4", f"{name}={text}")
        self._record(name, f"{value:.8g}", None)
        return value

    def text(self, name: str) -> str | None:
        """Read any text. Returns None if the recipe does not contain the option."""
        text = self._read(name)
        if text is not None:
            self._record(name, text, None)
        return text

    def finish(self) -> None:
        """Raise InvalidOption if the recipe contains an option that was never read."""
        for name, value in self._words.items():
            if name in self._known:
                continue
            names = ", ".join([*self._known, *(name for name in self._extra if name not in self._known)])
            raise InvalidOption(f"codec {self.codec} has no option {name!r}; its options are {names}", f"{name}={value}")

    def _record(self, name: str, text: str, omitted: str | None) -> None:
        """Record ``text`` as the option's canonical spelling, unless leaving out the option means the same (``omitted``)."""
        self.respell({name: None if text == omitted else text})

    def _read(self, name: str) -> str | None:
        self._known[name] = None
        return self._words.get(name)
