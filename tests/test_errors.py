"""Every error is also the built-in exception that the reference names, and is listed in its table."""

from __future__ import annotations

import builtins
import pickle
import re
from pathlib import Path

import pytest

import kvpack
from kvpack import errors

TABLE = (Path(__file__).parents[1] / ".ci/docs/reference/errors.rst").read_text()
ROWS = re.findall(r"\* - ``(\w+)``\n     - (.*)\n     - .*\n     - ([\d, ]+)\n", TABLE)
CLASSES = {name for name in errors.__all__ if isinstance(vars(errors)[name], type) and issubclass(vars(errors)[name], kvpack.KvpackError)}


def test_the_table_lists_every_error() -> None:
    assert {name for name, _, _ in ROWS} == CLASSES - {"KvpackError"}


@pytest.mark.parametrize(("name", "also", "codes"), ROWS)
def test_an_error_is_also_a_built_in(name: str, also: str, codes: str) -> None:
    kind = getattr(errors, name)
    parents = [vars(builtins).get(parent) or getattr(errors, parent) for parent in re.findall(r"\w+", also)]
    assert all(issubclass(kind, parent) for parent in parents)
    assert str(kind.exit_code) in codes
    assert getattr(kvpack, name) is kind
    error = pickle.loads(pickle.dumps(kind("what is wrong")))
    assert (type(error), str(error)) == (kind, "what is wrong")
