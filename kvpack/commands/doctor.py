"""kvpack doctor: list installed packages and kernels, check that they work, and suggest how to fix problems."""

from __future__ import annotations

import os
import platform
import re
import tempfile
import time
import warnings
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpack import __version__
from kvpack.output import add_json, print_report, print_table, printable, progress

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    import torch


class Package(NamedTuple):
    """A package that kvpack uses. ``oldest`` is its oldest supported version. ``extra`` is the extra that installs it, or an empty string.
    """

    name: str
    oldest: str
    purpose: str
    extra: str = ""


PACKAGES = (
    Package("torch", "2.6", "everything but inspect and verify"),
    Package("triton", "3.6", "kernels on CUDA devices; PyTorch for CUDA includes it"),
    Package("transformers", "5.23", "models: KvpackCache, cache, generate, tune, bench quality", "transformers"),
    Package("redis", "5", "stores on Redis and Valkey", "redis"),
    Package("obstore", "0.12", "stores on S3, Google Cloud Storage and Azure", "object-store"),
    Package("cryptography", "42", "encrypted stores", "encryption"),
    Package("matplotlib", "3.8", "plots", "bench"),
)
ENGINES = ("vllm", "sglang", "lmcache", "mlx-lm")
"""Packages that kvpack has integrations for. They are listed if they are installed."""

RECIPES = ("lossless", "fp8", "octopus-4", "oscar-2", "turboquant-3", "turboangle-k8v4", "hqmq-s96-r4")
"""One preset for each kind of codec."""
MAX_ERROR = 0.02
"""Maximum error of attention over packed values, compared with attention over the same values unpacked, relative to the latter's norm."""
FAILED = 1
_FILES_ON = "files on "


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check the installation",
        description="Show what is installed and which kernels run, check them in less than a minute, and explain how to add the rest.",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the packages, the kernels and the results of the checks. Returns 1 if a check failed."""
    packages = [_package_status(package) for package in PACKAGES]
    engines = {name: version for name in ENGINES if (version := _installed_version(name)) is not None}
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith("KVPACK_")}
    with progress("doctor") as callback:
        kernels, checks = _run_checks(callback)
    advice = _advice(packages, kernels, checks)
    report = {
        "kvpack": __version__, "python": platform.python_version(), "system": platform.platform(),
        "packages": packages, "engines": engines, "variables": variables, "kernels": kernels, "checks": checks, "advice": advice,
    }  # fmt: skip
    print_report(report, _print_report, arguments)
    return FAILED if any(not check["ok"] for check in checks) else 0


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _package_status(package: Package) -> dict[str, Any]:
    version = _installed_version(package.name)
    recent = version is not None and _version_numbers(version) >= _version_numbers(package.oldest)
    return {**package._asdict(), "version": version, "ok": recent}


def _version_numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:2]))


def _run_checks(callback: Callable[[int, int], None] | None) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Run all checks. Returns the backend of each kind of device, and the results."""
    try:
        import torch

        from kvpack import backends

        kernels = backends()
    except Exception as error:
        # Any error of an installation is a result to report.
        return {}, [{"name": "import torch and kvpack", "ok": False, "result": _error_reason(error), "seconds": 0.0}]
    checks: list[tuple[str, Callable[[], str]]] = [(f"{_FILES_ON}the CPU", lambda: _check_files("cpu"))]
    if torch.cuda.is_available():
        checks.append((f"{_FILES_ON}{torch.cuda.get_device_name()}", lambda: _check_files("cuda")))
    checks += [("a damaged file is refused", _check_damage), ("a store in a folder", _check_store)]
    if _installed_version("transformers") is not None:
        checks.append(("a model continues a file", _check_model))
    results = []
    for number, (name, check) in enumerate(checks):
        begin = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result, right = check(), True
        except Exception as error:
            result, right = _error_reason(error), False
        results.append({"name": name, "ok": right, "result": result, "seconds": time.perf_counter() - begin})
        if callback:
            callback(number + 1, len(checks))
    return kernels, results


def _error_reason(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _random_values(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, tokens, 64, generator=generator, dtype=torch.float32, device="cpu").bfloat16().unbind()
    return keys, values


def _check_files(device: str) -> str:
    """Pack, save, load and attend to a cache with each recipe, and compare the result with attention over the unpacked values."""
    import torch

    import kvpack

    query = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float32, device="cpu").to(device)
    largest = 0.0
    with tempfile.TemporaryDirectory(prefix="kvpack-doctor-") as folder:
        for recipe in RECIPES:
            path = os.path.join(folder, "cache.kvpack")
            pair = _random_values(300)
            kvpack.save(kvpack.pack([(pair[0].to(device), pair[1].to(device))], recipe), path)
            layer = kvpack.load(path, device=device)[0]
            keys, values = layer.unpack(torch.float32)
            assert keys is not None
            assert values is not None
            for name, decoded, original in (("keys", keys, pair[0]), ("values", values, pair[1])):
                error = _relative_error(decoded.cpu(), original.float())
                # The coarsest recipe has 2 bits.
                limit = 0 if recipe == "lossless" else 0.7
                if error > limit:
                    raise ValueError(f"{recipe}: the decoded {name} have a relative error of {error:.2g}, expected at most {limit}")
            expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
            error = _relative_error(kvpack.attend(query, layer), expected)
            if not error <= MAX_ERROR:
                raise ValueError(f"{recipe}: attention has a relative error of {error:.2g}, expected at most {MAX_ERROR}")
            largest = max(largest, error)
    return f"{len(RECIPES)} recipes, attention exact to {largest:.1e}"


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def _check_damage() -> str:
    import kvpack

    with tempfile.TemporaryDirectory(prefix="kvpack-doctor-") as folder:
        path = os.path.join(folder, "cache.kvpack")
        size = kvpack.save(kvpack.pack([_random_values(64)], "octopus-4"), path)
        with open(path, "r+b") as file:
            file.seek(size - 1)
            last = file.read(1)
            file.seek(size - 1)
            file.write(bytes([last[0] ^ 1]))
        try:
            kvpack.load(path)
        except kvpack.KvpackError as error:
            return f"refused as expected: {type(error).__name__}"
    raise ValueError("a file with a flipped bit was loaded")


def _check_store() -> str:
    import kvpack

    cache = kvpack.pack([_random_values(512)], "octopus-4", model={"name": "doctor"})
    ids = list(range(512))
    with (
        tempfile.TemporaryDirectory(prefix="kvpack-doctor-") as folder,
        kvpack.Store(os.path.join(folder, "store"), kvpack.Identity("doctor", "octopus-4")) as store,
    ):
        stored, (loaded, _) = store.save(ids, cache), store.load(ids)
        if (stored, loaded) != (512, 512):
            raise ValueError(f"stored {stored} and found {loaded} of 512 tokens, with the faults {store.counters()['faults']}")
    return "512 tokens stored and found"


def _check_model() -> str:
    """Check that the demo's model answers a question about a prompt loaded from a file."""
    from kvpack.integrations.transformers import Chat
    from kvpack.models import ByteTokenizer, demo_text, load_model

    model, prompt = load_model(), demo_text()[:2000].decode()
    with tempfile.TemporaryDirectory(prefix="kvpack-doctor-") as folder:
        path = os.path.join(folder, "prompt.kvpack")
        chat = Chat(model, ByteTokenizer(), "octopus-4")
        chat.read({"role": "user", "content": prompt})
        chat.save(path)
        chat = Chat.load(path, model, ByteTokenizer())
        answer = chat.send("\n[[key O9B4KF = ", max_new_tokens=8, do_sample=False)
    if answer != "EL3GUXNT":
        raise ValueError(f"the model answered {answer!r:.80}, expected 'EL3GUXNT'")
    return f"{chat.reused:,} of {chat.prompt_tokens:,} tokens reused, the answer is correct"


def _advice(packages: list[dict[str, Any]], kernels: dict[str, str], checks: list[dict[str, Any]]) -> list[str]:
    """Return advice about failed checks and about missing packages and features, most important first."""
    missing = any(package["name"] == "torch" and package["version"] is None for package in packages)
    failed = [check["name"] for check in checks if not check["ok"] and not missing]
    advice = [f"{name} failed: report it with the output of kvpack doctor --json" for name in failed]
    if "not built" in kernels.get("cpu", ""):
        advice.append(
            "the C kernels are not built, so kvpack uses PyTorch operations, which are many times slower: install a C compiler, then "
            "pip install --force-reinstall --no-cache-dir --no-binary kvpack kvpack"
        )
    if forced := os.environ.get("KVPACK_KERNELS"):
        advice.append(f"KVPACK_KERNELS={forced} selects the kernels: unset it to use the fastest ones on each device")
    has_cuda = any(check["name"].startswith(_FILES_ON) and check["name"] != f"{_FILES_ON}the CPU" for check in checks)
    if kernels and not has_cuda:
        advice.append("PyTorch found no CUDA device: on a machine that has one, install PyTorch for CUDA (https://pytorch.org)")
    for package in packages:
        if package["ok"] or (package["name"] == "triton" and (not has_cuda or "Triton kernels" in kernels.get("cuda", ""))):
            continue
        state = "is not installed" if package["version"] is None else f"is {package['version']}, older than {package['oldest']}"
        wanted = f"kvpack[{package['extra']}]" if package["extra"] else f"{package['name']}>={package['oldest']}"
        advice.append(f"{package['name']} {state}, needed for {package['purpose']}: pip install -U '{wanted}'")
    return advice


def _print_report(report: dict[str, Any]) -> None:
    print(f"kvpack {report['kvpack']}, Python {report['python']}, {report['system']}")
    for device, words in report["kernels"].items():
        print(f"{device}: {words}")
    for name, value in report["variables"].items():
        print(f"{name}={printable(value)}")
    rows = [[package["name"], package["version"] or "-", package["oldest"], package["purpose"]] for package in report["packages"]]
    rows += [[name, version, "", "serving engine"] for name, version in report["engines"].items()]
    print_table("packages", ["package", "installed", "needed", "for"], rows, text_columns=4)
    print_table(
        "checks",
        ["check", "", "result", "seconds"],
        (
            [check["name"], "ok" if check["ok"] else "FAILED", printable(check["result"]), f"{check['seconds']:.1f}"]
            for check in report["checks"]
        ),
        text_columns=3,
    )
    if report["advice"]:
        print("\nwhat to do:")
        for line in report["advice"]:
            print(f"- {printable(line)}")
