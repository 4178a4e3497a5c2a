"""Tests of the declarations that a codec family reads from its annotated fields.

Annotations are evaluated in this module, as those in users' files are.
"""

# Without the future import of annotations, those of Evaluated are types instead of text.
from dataclasses import dataclass, field

import pytest

from kvpack.formats.errors import InvalidParameter
from kvpack.formats.parameter_checks import Fields
from support.toy_codec import Largest


@dataclass(frozen=True)
class Evaluated(Largest):
    dim: int
    fields: Fields
    optional: int = field(default=0, metadata={"optional": True})


STORED = {"dim": 64, "fields": {"codes": 4}}


def test_annotations_may_be_evaluated() -> None:
    codec = Evaluated.from_params(STORED | {"optional": 2})
    assert codec == Evaluated(64, (("codes", 4),), 2)
    assert Evaluated.from_params({name: value for name, value in codec.params().items() if name != "id"}) == codec


@pytest.mark.parametrize("codec", [Evaluated, Largest])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dim": "64"}, "codec largest: dim is of type str, expected int"),
        ({"dim": True}, "codec largest: dim is of type bool, expected int"),
        ({"fields": [4]}, r"codec largest: fields is \[4\], expected a map from stream name to integer"),
    ],
    ids=["text", "bool", "no map"],
)
def test_wrong_types_are_refused_alike(codec: type[Largest], changed: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{message}$"):
        codec.from_params(STORED | changed)
