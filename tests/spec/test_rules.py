"""Every MUST in spec/ has a number, and every number has a row in rules.md."""

from __future__ import annotations

import re

import pytest

from kvpack.formats import errors
from support.numbered_rules import ENFORCED_BY, PAGES, RULES, SPEC, documents, marked_rules, rules


@pytest.mark.parametrize("prefix", PAGES)
def test_every_must_has_a_number(prefix: str) -> None:
    for line in "\n".join((SPEC / document).read_text(encoding="utf-8") for document in documents(prefix)).splitlines():
        if "BCP 14" not in line and "every MUST and MUST NOT" not in line:
            numbers = [number for number, _, marked_line in marked_rules(prefix) if marked_line == line]
            assert len(numbers) == len(re.findall(r"\bMUST\b", line)), line


@pytest.mark.parametrize("prefix", PAGES)
def test_rule_numbers_are_consecutive_and_unique(prefix: str) -> None:
    numbers = [number for number, _, _ in marked_rules(prefix)]
    assert sorted(numbers) == sorted(f"{prefix}-{n}" for n in range(1, len(numbers) + 1))


def test_every_page_is_numbered() -> None:
    pages = {str(path.relative_to(SPEC)) for path in SPEC.rglob("*.md") if re.search(r"\bMUST\b", path.read_text(encoding="utf-8"))}
    assert pages <= {*(document for prefix in PAGES for document in documents(prefix)), "rules.md"}


def test_the_table_lists_every_rule() -> None:
    listed = list(rules())
    assert listed == sorted(listed, key=lambda number: (listed_page(number), int(number.rpartition("-")[2])))
    assert set(listed) == {number for prefix in PAGES for number, _, _ in marked_rules(prefix)}
    assert len(listed) == len(re.findall(r"^\| [a-z-]+-\d+ \|", RULES.read_text(encoding="utf-8"), re.MULTILINE))


def listed_page(number: str) -> int:
    """Return the position of the rule's page among the headings of rules.md."""
    return RULES.read_text(encoding="utf-8").index(f"\n## {PAGES[number.rpartition('-')[0]]}\n")


@pytest.mark.parametrize("number", rules())
def test_rows_of_the_table_match_the_text(number: str) -> None:
    rule = rules()[number]
    assert rule.enforced_by in ENFORCED_BY
    assert bool(rule.errors) == (rule.enforced_by == "refusal")
    for name in rule.errors:
        assert issubclass(getattr(errors, name), errors.KvpackError)


def test_error_classes_are_those_of_the_library() -> None:
    text = (SPEC / "README.md").read_text(encoding="utf-8")
    classes = re.findall(r"^\| `(\w+)` \|", text[text.index("### Refusals") : text.index("### Writers")], re.MULTILINE)
    assert {error for rule in rules().values() for error in rule.errors} == set(classes)
    known = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KvpackError)]
    refusing = {kind.__name__ for kind in known if kind.exit_code == 1} - {"KvpackError"}
    # An encrypted entry of a store is no kvpack file.
    assert set(classes) == refusing - {"Undecryptable"}


def test_rules_named_in_the_text_exist() -> None:
    for path in SPEC.rglob("*.md"):
        for text in re.findall(r"\brules? ((?:[a-z-]+-\d+(?:, | and )?)+)", path.read_text(encoding="utf-8")):
            for number in re.findall(r"[a-z-]+-\d+", text):
                assert number in rules(), f"{path.name}: {number}"
