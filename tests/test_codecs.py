"""Recipes created from codecs instead of text: the resulting text, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from kvpack import Recipe, codecs
from kvpack.codecs import CodecChoice, Group, Octahedral, Polar, Quaternion, Raw, Scalar
from kvpack.errors import InvalidParameter
from kvpack.formats import CODECS


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"k": Octahedral(b=3), "v": Group(b=3, group=32), "window": 32}, "k=octahedral:b=3;v=group:b=3,g=32;tail=32"),
        ({"kv": Scalar(bits=2, outliers=3, raw_first=4, raw_low_norm=0.6)}, "kv=scalar:b=2,outliers=3,raw_first=4,raw_low_norm=0.6"),
        ({"kv": Polar(b=(4, 2, 2, 2))}, "kv=polar:b=4.2.2.2"),
        ({"kv": Quaternion(secondary=24, radius_bits=3), "v": Raw()}, "kv=quaternion:s=24,r=3;v=raw"),
        ({"kv": Group(b=2), "layers": {"0,-1": {"k": Raw()}, "1-3": Group(b=4)}}, "kv=group:b=2;layers=0,-1:k=raw;layers=1-3:kv=group:b=4"),
    ],
    ids=["two codecs", "sidecars", "integers", "a side replaced", "layers"],
)
def test_a_recipe_made_of_codecs_equals_one_made_of_text(given: dict[str, Any], text: str) -> None:
    made = Recipe(**given)
    assert made == Recipe(text)
    assert made.text == made.canonical == Recipe(text).canonical
    assert [made.codec(layer, 8, side, 128) for layer in (0, 2) for side in "kv"] == [
        Recipe(text).codec(layer, 8, side, 128) for layer in (0, 2) for side in "kv"
    ]


def test_every_codec_has_a_class() -> None:
    classes = {one.id: one.__name__ for one in CodecChoice.__subclasses__()}
    assert all(getattr(codecs, name).id == codec_id for codec_id, name in classes.items())
    assert classes == {codec_id: codec.__name__ for codec_id, codec in CODECS.items()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recipe(k=Octahedral(b=3)), "has no codec for values: add v=<codec>"),
        (lambda: Recipe("octopus-3", k=Raw()), "not both: got text 'octopus-3' and k"),
        (lambda: Recipe("octopus-3", window=3), "got text 'octopus-3' and layers or window"),
        (lambda: Recipe(kv="raw"), "kv is 'raw', expected a codec from kvpack.codecs"),  # type: ignore[arg-type]
        (lambda: Recipe(kv=Raw(), layers={"0": {"k": "raw"}}), "layers=0:k is 'raw', expected a codec"),  # type: ignore[dict-item]
        (lambda: Recipe(kv=Octahedral(b=9)), "octahedral:b is '9', expected an integer from 1 to 7"),
        (lambda: Recipe(kv=Octahedral(bits_per_value=3)), "codec octahedral needs b=<1 to 7>"),
        (lambda: Recipe(kv=Group(b=2, g=5)), "group:g is '5', expected one of 4, 8, 16"),
        (lambda: Recipe(kv=Group(b=3, group=32), window=5), "window=5 must be a multiple of 32"),
        (lambda: Group(b=2, g=32, group=64), "Group has the option g twice"),
        (lambda: Group(b="2;k=raw"), "Group(b=...) is '2;k=raw', expected a number, a tuple of integers, or a string without spaces"),
        (lambda: Group(b=True), "Group(b=...) is True, expected a number"),
        (lambda: Recipe(), "a recipe must be text, such as 'kvpack-3', but got a NoneType"),
    ],
)
def test_invalid_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        make()
    assert message in str(refused.value)


def test_a_map_gives_codecs_to_layers() -> None:
    with pytest.raises(InvalidParameter, match=r"layers is 'k=raw', expected a mapping such as"):
        Recipe(kv=Raw(), layers="k=raw")  # type: ignore[arg-type]


def test_codecs_are_compared_and_shown_by_their_options() -> None:
    assert Group(b=3, group=32) == Group(bits=3, g=32) != Group(b=3)
    assert Group(b=3) != Octahedral(b=3)
    assert len({Group(b=3, group=32), Group(bits=3, g=32)}) == 1
    assert str(Group(b=3, g=32)) == "group:b=3,g=32"
    assert repr(Group(b=3, g=32)) == "Group(b='3', g='32')"
