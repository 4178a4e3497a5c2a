"""Models by their names on the hub, from huggingface_hub's cache."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from kvpack import Identity, MissingFile, cli
from kvpack.hub import model_folder
from kvpack.models import load_model
from support import hub_cache

NAME = "someone/tiny-model"
ENGINE = {"kv_dtype": "bf16", "layout": "nhd"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    hub_cache.go_offline(tmp_path / "hub", monkeypatch)
    return tmp_path / "hub"


def test_a_name_is_found_in_the_cache(cache: Path) -> None:
    snapshot = hub_cache.add_model(cache, NAME)
    assert model_folder(NAME) == snapshot
    assert model_folder(snapshot) == snapshot
    assert Identity.of(load_model(NAME), "octopus-4").model == NAME


def test_identities_of_engines_accept_a_name(cache: Path) -> None:
    snapshot = hub_cache.add_model(cache, NAME)
    identity = Identity.of_engine(NAME, "octopus-4", **ENGINE)
    assert identity == Identity.of_engine(snapshot, "octopus-4", **ENGINE)
    assert identity.model == NAME
    # A revision names the weights, and they need not be there.
    (snapshot / "model.safetensors").unlink()
    assert Identity.of_engine(NAME, "octopus-4", **ENGINE, revision=hub_cache.COMMIT).weights == hub_cache.COMMIT
    with pytest.raises(MissingFile, match=f"download it with 'hf download {NAME} config.json --revision {'6' * 40}' on"):
        Identity.of_engine(NAME, "octopus-4", **ENGINE, revision="6" * 40)


def test_commands_accept_a_name(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub_cache.add_model(cache, NAME)
    assert cli.main(["bench", "io", "--model", NAME, "--tokens", "64", "--repeats", "1", "--recipe", "octopus-4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", [NAME, "gpt2"])
def test_the_error_for_a_missing_model_names_the_command(cache: Path, name: str) -> None:
    with pytest.raises(MissingFile, match=f"{name} is not a folder .* download it with 'hf download {name}' on"):
        model_folder(name)
    assert cli.main(["tune", "--bits", "3", "--model", name]) == 3


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere", "a/b/c", "../up", "~/model", "a b", "-x", ""])
def test_other_paths_are_not_looked_up(cache: Path, name: str) -> None:
    with pytest.raises(MissingFile, match=r"has no config\.json, expected the folder of a transformers model, or a"):
        model_folder(name)


def test_a_folder_without_a_configuration_is_not_a_model(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpt2").mkdir()
    hub_cache.add_model(cache, "gpt2")
    with pytest.raises(MissingFile, match=r"gpt2 has no config\.json, expected the folder"):
        model_folder("gpt2")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_an_incomplete_model_in_the_cache_is_ignored(cache: Path, missing: str) -> None:
    (hub_cache.add_model(cache, NAME) / missing).unlink()
    with pytest.raises(MissingFile, match=f"hf download {NAME}"):
        model_folder(NAME)


def test_all_files_in_an_index_must_exist(cache: Path) -> None:
    snapshot = hub_cache.add_model(cache, NAME)
    index = snapshot / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(MissingFile, match=f"hf download {NAME}"):
        model_folder(NAME)
    (snapshot / "model-2.safetensors").write_bytes(b"")
    assert model_folder(NAME) == snapshot


def test_an_unreachable_hub_is_asked_only_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 3)
    timeouts: list[float] = []

    def fail(*_: object, timeout: float, **__: object) -> None:
        timeouts.append(timeout)
        raise HfHubHTTPError.__mro__[1]("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("a download was attempted"))
    with pytest.raises(MissingFile, match=rf"cannot be downloaded \(no route to host\): .*'hf download {NAME}'"):
        model_folder(NAME)
    assert timeouts == [3]
