"""Tests of ``kvpack doctor``: which parts are installed and work, and its advice about the others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpack
from kvpack import cli
from kvpack.coding import dispatch, triton_version
from kvpack.commands import doctor

ROOT = Path(__file__).resolve().parents[2]


def report(capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    assert cli.main(["doctor", "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_complete_installation_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"kvpack {kvpack.__version__}, Python ")
    assert f"cpu: {kvpack.backends()['cpu']}\n" in output
    assert "FAILED" not in output
    assert len(re.findall(r" ok +", output)) == 4 + torch.cuda.is_available()


def test_the_oldest_versions_match_the_package_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {f"{name} of {extra}" for extra, names in project["optional-dependencies"].items() for name in names}
    found = {f"{it.name}>={it.oldest} of {it.extra}" for it in doctor.PACKAGES if it.extra}
    assert found == required
    (of_torch,) = (it for it in doctor.PACKAGES if it.name == "torch")
    assert f"torch>={of_torch.oldest}" in project["dependencies"]
    (of_triton,) = (it for it in doctor.PACKAGES if it.name == "triton")
    assert of_triton.oldest == ".".join(map(str, triton_version.MIN_VERSION))


def test_missing_and_old_packages_are_named_with_a_remedy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name in ("transformers", "triton"):
            raise metadata.PackageNotFoundError(name)
        return {"redis": "4.9", "vllm": "0.32.1"}.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(dispatch, "c_is_built", lambda: False)
    found = report(capsys)
    assert [check["name"] for check in found["checks"]][-1] == "a store in a folder"
    assert found["engines"]["vllm"] == "0.32.1"
    advice = "\n".join(found["advice"])
    assert "transformers is not installed, needed for models" in advice
    assert "pip install -U 'kvpack[transformers]'" in advice
    assert "redis is 4.9, older than 5, needed for stores on Redis and Valkey: pip install -U 'kvpack[redis]'" in advice
    assert "install a C compiler" in advice
    if not torch.cuda.is_available():
        # Only CUDA devices need Triton, and PyTorch for CUDA brings it.
        assert "triton" not in advice


WITHOUT_TORCH = """
import sys
from importlib import metadata
real = metadata.version
def version(name):
    if name == "torch":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
sys.modules["torch"] = None
from kvpack.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_commands_and_doctor_say_what_to_install_if_torch_is_missing() -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], check=False, capture_output=True, text=True)

    refused = run("convert", "chat.kvpack", "smaller.kvpack", "fp8")
    assert (refused.returncode, refused.stdout) == (3, "")
    assert refused.stderr == "kvpack: this command needs PyTorch, which is not installed: pip install torch\n"
    found = run("doctor", "--json")
    assert (found.returncode, found.stderr) == (1, "")
    advice = json.loads(found.stdout)["advice"]
    assert advice[0].startswith("torch is not installed, needed for everything but inspect and verify: pip install -U 'torch>=")


def test_a_wrong_result_is_reported_as_a_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    attend = kvpack.attend
    monkeypatch.setattr(kvpack, "attend", lambda query, layer: attend(query, layer) * 1.1)
    monkeypatch.setattr(doctor, "_check_model", lambda: "right")
    found = report(capsys, code=1)
    failed = [check for check in found["checks"] if not check["ok"]]
    assert failed[0]["name"] == "files on the CPU"
    assert "lossless: attention has a relative error of 0.1, expected at most 0.02" in failed[0]["result"]
    assert any(line.startswith("files on the CPU failed: report it") for line in found["advice"])


def test_settings_are_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPACK_KERNELS", "torch")
    monkeypatch.setattr(doctor, "_check_model", lambda: "right")
    assert cli.main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "\nKVPACK_KERNELS=torch\n" in output
    assert "unset it to use the fastest" in output
    monkeypatch.setenv("KVPACK_KERNELS", "fast")
    found = report(capsys, code=1)
    assert found["kernels"] == {}
    assert "KVPACK_KERNELS" in found["checks"][0]["result"]
