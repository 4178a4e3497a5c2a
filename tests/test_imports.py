"""Modules that the package imports, and functions that it never calls."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpack
from kvpack import formats

FORMATS = Path(formats.__file__).parent
PACKAGE = Path(kvpack.__file__).parent
ROOT = Path(__file__).parent.parent
SOURCES = sorted({*PACKAGE.rglob("*.py"), *FORMATS.rglob("*.py")})

EXECUTES_DATA = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "code", "codeop", "imp", "runpy", "pkgutil"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
LOADERS = {("torch", "load"), ("numpy", "load"), ("np", "load"), ("os", "system"), ("os", "popen")}

LIGHT = [
    pytest.param("import kvpack", id="kvpack"),
    pytest.param("import kvpack; assert kvpack.formats.codec_class('raw')(64, 'bf16')", id="kvpack.formats"),
    pytest.param(
        "from kvpack.formats.group import Group\n"
        "codec = Group(128, 3, 'token', 32, 'signed-hadamard', 7, 'fp16', (('codes', 8),))\n"
        "assert Group.from_params({k: v for k, v in codec.params().items() if k != 'id'}) == codec\n"
        "assert codec.layout(1, 8, 4096)['scales'].shape == (1, 8, 128, 128, 2)",
        id="a codec's parameters",
    ),
]


def imports_of(path: Path) -> list[tuple[int, str]]:
    """Yield (level, dotted name) for every import in a file; ``from a import b`` counts as a.b."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.level, f"{node.module}.{alias.name}" if node.module else alias.name) for alias in node.names]
    return found


def offences(tree: ast.Module) -> list[str]:
    """Return the names in ``tree`` with which bytes could be executed as code."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in EXECUTES_DATA]
        elif isinstance(node, ast.ImportFrom):
            parts = {(node.module or "").partition(".")[0], *(alias.name for alias in node.names if not node.level)}
            found += sorted(parts & (EXECUTES_DATA | BUILTINS))
            found += [f"{node.module}.{alias.name}" for alias in node.names if (node.module, alias.name) in LOADERS]
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            found.append(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            pair = (node.value.id, node.attr)
            found += [".".join(pair)] if pair in LOADERS or pair[0] == "builtins" else []
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only", "shell"):
            found.append(node.arg)
    return found


def dynamic_imports(tree: ast.Module) -> int:
    """Return the number of times that ``tree`` names import_module or its internals."""
    names = {"import_module", "spec_from_file_location", "module_from_spec", "exec_module", "load_module", "SourceFileLoader"}
    nodes = ast.walk(tree)
    used = [node.id if isinstance(node, ast.Name) else node.attr for node in nodes if isinstance(node, (ast.Name, ast.Attribute))]
    return len([name for name in used if name in names])


def test_the_sources_are_found() -> None:
    assert {"container.py", "columns.py", "group.py", "cache.py"} <= {path.name for path in SOURCES}


def assert_light(code: str) -> None:
    """Run ``code`` in a separate process, and fail if it imported torch or another heavy package."""
    check = "import sys; heavy = {'torch', 'triton', 'transformers', 'rich'} & set(sys.modules); assert not heavy, heavy"
    result = subprocess.run([sys.executable, "-W", "error", "-c", f"{code}\n{check}"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_importing_kvpack_is_quick() -> None:
    """The test counts modules, because time depends on the machine."""
    code = "import sys; before = set(sys.modules); import kvpack; print(*sorted(set(sys.modules) - before))"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    ours = [name for name in names if name.partition(".")[0] == "kvpack"]
    assert {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) == {"kvpack"}
    assert ours == ["kvpack"]


@pytest.mark.parametrize("code", LIGHT)
def test_codecs_need_no_torch(code: str) -> None:
    assert_light(code)


def test_reading_and_verifying_a_file_needs_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "cache.kvpack"
    x = torch.randn(1, 2, 40, 64).to(torch.float16)
    kvpack.save(kvpack.pack([(x, x)], "k=group:b=3,rotation=hadamard;v=raw:dtype=fp16"), path)
    assert_light(
        "from kvpack.file.container import open_file\n"
        f"file = open_file({str(path)!r})\n"
        "assert [codec.id for codec in file.header.codecs] == ['group', 'raw']\n"
        "file.verify()"
    )


def test_verifying_any_codec_needs_no_torch() -> None:
    assert_light(
        "from pathlib import Path\n"
        "from kvpack.file.container import open_file\n"
        f"root = Path({str(ROOT)!r})\n"
        "files = [*root.glob('tests/golden/*.kvpack'), *root.glob('spec/vectors/valid/*.kvpack')]\n"
        "assert len(files) > 100\n"
        "for path in files: open_file(path).verify()"
    )


def test_a_heavy_import_is_noticed() -> None:
    with pytest.raises(AssertionError, match="rich"):
        assert_light("import rich")


@pytest.mark.parametrize("path", sorted(FORMATS.glob("*.py")), ids=lambda path: path.name)
def test_formats_import_nothing_of_kvpack(path: Path) -> None:
    allowed = {"torch", "numpy"} | set(sys.stdlib_module_names)
    for level, name in imports_of(path):
        if level == 0:
            assert name.partition(".")[0] in allowed, f"{path.name} imports {name}"
        else:
            assert level == 1, f"{path.name} imports {'.' * level}{name}, above formats"


@pytest.mark.parametrize("path", sorted(FORMATS.glob("*.py")), ids=lambda path: path.name)
def test_formats_import_torch_lazily(path: Path) -> None:
    module = ast.parse(path.read_text(encoding="utf-8"))
    names = [alias.name for node in module.body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in module.body if isinstance(node, ast.ImportFrom) and not node.level]
    assert not {name.partition(".")[0] for name in names} & {"torch", "numpy"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_loading_never_executes_code(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert offences(tree) == []
    # Two map their public names to their own modules by a constant table, and the command line imports what --import names.
    known = (PACKAGE / "__init__.py", PACKAGE / "pages" / "__init__.py", PACKAGE / "cli.py")
    assert dynamic_imports(tree) == (1 if path in known else 0)


def test_public_names_are_listed_before_they_are_imported() -> None:
    assert {*kvpack.__all__, "errors", "__version__"} <= set(dir(kvpack))


@pytest.mark.parametrize("package", [kvpack, kvpack.pages])
def test_public_names_come_from_a_constant_table(package: Any) -> None:
    module = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    homes = next(node.value for node in module.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES")
    assert all(part.isidentifier() for home in ast.literal_eval(homes).values() for part in home.split("."))
    errors = {name for name in package.__all__ if getattr(kvpack.errors, name, None) is getattr(package, name)}
    assert set(ast.literal_eval(homes)) | errors == set(package.__all__)
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'os'"):
        package.__getattr__("os")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", "pickle"),
        ("from marshal import loads", "marshal"),
        ("import dill.session", "dill.session"),
        ("x = eval(y)", "eval"),
        ("f = exec", "exec"),
        ("__import__(name)", "__import__"),
        ("import torch\ntorch.load(p)", "torch.load"),
        ("from torch import load", "torch.load"),
        ("numpy.load(p, allow_pickle=True)", "numpy.load"),
        ("builtins.compile(s)", "builtins.compile"),
    ],
)
def test_forbidden_code_is_noticed(source: str, found: str) -> None:
    assert found in offences(ast.parse(source))
    assert dynamic_imports(ast.parse("from importlib import import_module\nimport_module(name)")) == 1
    assert dynamic_imports(ast.parse("importlib.util.spec_from_file_location(a, b)")) == 1
