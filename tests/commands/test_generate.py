"""Tests of ``kvpack cache`` and ``kvpack generate``: a text is cached in a file, and generation continues from it."""

from __future__ import annotations

import io
import json
import os
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpack
from kvpack import cli
from kvpack.integrations.transformers import Chat
from support import hub_cache

DEMO = files("kvpack.demo")
PROMPT = (DEMO / "demo.txt").read_bytes()[:2000].decode()
QUESTION, ANSWER = "\n[[key O9B4KF = ", "EL3GUXNT"
GREEDY = ("--temperature", "0", "--max-tokens", "8")
NAME = "someone/tiny-model"


def run(*words: object) -> int:
    return cli.main([str(word) for word in words])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a cached prompt whose model has a hub name."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "prompt.txt").write_text(PROMPT)
    with pytest.MonkeyPatch.context() as patch:
        hub_cache.go_offline(folder / "hub", patch)
        hub_cache.add_model(folder / "hub", NAME)
        assert run("cache", "--model", NAME, "--prompt-file", folder / "prompt.txt", "--out", folder / "prompt.kvpack") == 0
    return folder / "prompt.kvpack"


@pytest.fixture
def file(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    hub_cache.go_offline(saved.parent / "hub", monkeypatch)
    (tmp_path / "prompt.kvpack").write_bytes(saved.read_bytes())
    return tmp_path / "prompt.kvpack"


def test_an_answer_continues_from_the_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", file, "--prompt", QUESTION, *GREEDY) == 0
    output = capsys.readouterr()
    assert output.out == f"{ANSWER}\n"
    assert "2,001 of 2,017 tokens of the prompt came from" in output.err
    cache = kvpack.load(file)
    assert (cache.tokens, cache.model["name"], cache.recipe) == (2001, NAME, kvpack.Recipe("kvpack-4").text)


def test_the_longer_cache_is_saved_on_request(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.kvpack"
    assert run("generate", file, "--prompt", QUESTION, *GREEDY, "--out", other, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    counts = {"held_tokens": 2001, "reused_tokens": 2001, "prompt_tokens": 2017}
    assert found == {"text": ANSWER, **counts, "file": str(other), "bytes": other.stat().st_size}
    assert kvpack.load(file).tokens == 2001
    # The last token is not in the cache.
    assert kvpack.load(other).tokens == 2024
    assert run("generate", other, "--prompt", QUESTION, *GREEDY, "--update", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["reused_tokens"], found["prompt_tokens"]) == (ANSWER, 2024, 2041)
    assert kvpack.load(other).tokens == 2048
    assert run("inspect", other) == 0
    assert "a chat of 4 messages\n" in capsys.readouterr().out
    send = Chat.send

    def send_while_another_updates(chat: Chat, *arguments: Any, **options: Any) -> str:
        os.utime(other)
        return send(chat, *arguments, **options)

    monkeypatch.setattr(Chat, "send", send_while_another_updates)
    assert run("generate", other, "--prompt", QUESTION, "--max-tokens", 1, "--update") == 3
    assert "not saved, because another process or chat has changed the file meanwhile" in capsys.readouterr().err
    assert kvpack.load(other).tokens == 2048


def test_texts_are_read_from_standard_input(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    def give(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    give(PROMPT)
    again = tmp_path / "again.kvpack"
    assert run("cache", "--model", NAME, "--prompt-file", "-", "--out", again, "--recipe", "octopus-3", "--role", "system") == 0
    assert kvpack.load(again).recipe == kvpack.Recipe("octopus-3").text
    give(QUESTION)
    capsys.readouterr()
    assert run("generate", again, "--prompt", "-", *GREEDY) == 0
    assert len(capsys.readouterr().out) > 1


def test_compact_files_have_no_raw_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt, file, compact = (tmp_path / name for name in ("prompt.txt", "prompt.kvpack", "compact.kvpack"))
    prompt.write_text(PROMPT[:100])
    words = ("cache", "--model", DEMO / "tinylm", "--prompt-file", prompt, "--out")
    assert run(*words, file) == 0
    assert "--compact packs them now" in capsys.readouterr().err
    assert run(*words, compact, "--compact") == 0
    assert "--compact" not in capsys.readouterr().err
    assert compact.stat().st_size < file.stat().st_size
    assert run("generate", compact, "--prompt", "a", "--model", DEMO / "tinylm", "--update", "--compact", *GREEDY) == 0
    assert [layer.k.tail.shape[2] for layer in kvpack.load(compact)] == [0] * 4


def test_an_invalid_hub_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT[:100])
    file = tmp_path / "prompt.kvpack"
    assert run("cache", "--model", DEMO / "tinylm", "--prompt-file", tmp_path / "prompt.txt", "--out", file) == 0
    assert run("generate", file, "--prompt", "a") == 2
    assert "names the model 'tinylm', which is not a hub name: pass --model" in capsys.readouterr().err
    assert run("generate", file, "--prompt", "a", "--model", DEMO / "tinylm", *GREEDY) == 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--prompt", "a", "--max-tokens", "0"], 2, "--max-tokens is 0, expected at least 1"),
        (["--prompt", "a", "--temperature", "-1"], 2, "--temperature is -1.0, expected a finite, non-negative number"),
        (["--prompt", "a", "--temperature", "nan"], 2, "--temperature is nan, expected a finite, non-negative number"),
        (["--prompt", "a", "--update", "--out", "x"], 2, "pass only one of them"),
        (["--prompt", "a", "--out", "{file}"], 2, "is an input of this command"),
        (["--prompt", "a", "--model", "/nowhere"], 3, "has no config.json"),
        pytest.param(
            ["--prompt", "a", "--device", "cuda"],
            2,
            "PyTorch found no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_invalid_requests_are_refused(file: Path, words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", file, *(word.format(file=file) for word in words)) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("data", "message"), [(b"", "is empty"), (b"ab\xff", "byte 2 is not valid UTF-8")])
def test_prompts_are_texts(data: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt.txt").write_bytes(data)
    assert run("cache", "--model", "/nowhere", "--prompt-file", tmp_path / "prompt.txt", "--out", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
