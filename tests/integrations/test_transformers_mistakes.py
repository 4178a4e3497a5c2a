"""Mistakes of transformers users: each one raises a KvpackError with advice, and following the advice works."""

from __future__ import annotations

import copy
import io
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

import kvpack
from kvpack.errors import InvalidParameter, InvalidType, KvpackError, MissingFile, MissingPackage
from kvpack.integrations import transformers_version
from kvpack.integrations.transformers import KvpackCache, recording
from support import warm_python
from support.foreign_values import FOREIGN, foreign_errors

OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 3, "pad_token_id": 0}
IDS = torch.arange(1, 41)[None]
NEW = torch.tensor([[45, 46]])


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=50,
        bos_token_id=0,
        eos_token_id=None,
    )
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mistakes") / "prompt.kvpack"
    with KvpackCache(model, "raw") as cache, torch.no_grad():
        model(IDS, past_key_values=cache)
        kvpack.save(cache.packed, path)
    return path


def test_a_model_that_is_not_loaded_is_refused_with_advice(model: Any, file: Path) -> None:
    for call in (
        lambda: KvpackCache.load(file, "folder"),  # type: ignore[arg-type]
        lambda: KvpackCache.load(file, None),  # type: ignore[arg-type]
        lambda: KvpackCache("folder", "octopus-3"),  # type: ignore[arg-type]
        lambda: kvpack.Identity.of("folder", "octopus-3"),
    ):
        with pytest.raises(KvpackError, match=r"AutoModelForCausalLM\.from_pretrained\(.*\) loads? (one|a model)|load the model first"):
            call()
    with pytest.raises(InvalidType, match=r"pass the path first, then the model"):
        KvpackCache.load(model, file)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="expected the transformers model that will continue from the cache"):
        KvpackCache.of(kvpack.load(file), "octopus-3")  # type: ignore[arg-type]
    for swapped in (lambda: KvpackCache(kvpack.load(file), "raw"), lambda: KvpackCache(model, kvpack.load(file))):  # type: ignore[arg-type]
        with pytest.raises(InvalidType, match=r"use KvpackCache\.of\(cache, model\) to continue a packed one"):
            swapped()
    with pytest.raises(InvalidType, match=r"the first argument is a model: use KvpackCache\.of\(cache, model\)"):
        KvpackCache.of(model, kvpack.load(file))  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match=r"the cache is None, which Store\.load returns .*: use KvpackCache\(model, recipe\)"):
        KvpackCache.of(None, model)  # type: ignore[arg-type]
    KvpackCache.load(file, model).release()


def test_a_packed_cache_instead_of_a_models_own_is_refused_with_advice(model: Any, file: Path) -> None:
    packed = kvpack.load(file)
    ids = torch.cat([IDS, NEW], 1)
    for given, advice in ((packed, r"KvpackCache\.of\(cache, model\)"), (kvpack.LiveCache.of(packed), r"of\(live\.freeze\(\), model\)")):
        for call in (partial(model.generate, **OPTIONS), model):
            with pytest.raises(InvalidParameter, match=rf"a (packed |Live)Cache is not a transformers cache: .*{advice}"):
                call(ids, past_key_values=given)
    with KvpackCache.of(packed, model) as cache:
        assert model.generate(ids, past_key_values=cache, **OPTIONS).tolist() == model.generate(ids, **OPTIONS).tolist()


@pytest.mark.parametrize("options", [{"copy": True}, {"memory_limit": 10**6}, {"copy": True, "memory_limit": 10**6, "device": "cpu"}])
def test_files_are_loaded_as_by_kvpack_load(options: dict[str, Any], model: Any, file: Path) -> None:
    with KvpackCache.load(file, model, **options) as cache:
        assert cache.get_seq_length() == 40
    with pytest.raises(kvpack.LimitExceeded):
        KvpackCache.load(file, model, memory_limit=10)


def test_a_file_system_without_mappings_is_reported_with_advice(model: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr("kvpack.file.user_files.mmap.mmap", refused)
    for call in (lambda: kvpack.load(file), lambda: KvpackCache.load(file, model)):
        with pytest.raises(MissingFile, match=r"mapped: No such device: read it into memory instead with kvpack\.load\(path, copy=True\)"):
            call()
    assert kvpack.load(file, copy=True).tokens == 40
    KvpackCache.load(file, model, copy=True).release()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS, r"got 40 token ids, but the cache holds 40: pass those 40 ids followed by at least one new one\. .*crop\(-1\)"),
        (IDS[:, :7], r"got 7 token ids, but the cache holds 40: .*\. KvpackCache\.load\(path, model, prompt=ids\) keeps"),
        (NEW, r"token 0 of row 0 has id 45, .* id 1: pass the 40 ids of the cache followed .*token_ids returns .*Chat\.load\("),
        (IDS.roll(1), r"token 0 of row 0 has id 40, .*: pass the 40 ids of the cache followed by new ones\. .*prompt=ids"),
        (torch.cat([IDS.roll(1), NEW], 1), r"token 0 of row 0 has id 40, .*prompt=ids"),
    ],
    ids=["the same", "its beginning", "only the new message", "other ids", "longer other ids"],
)
def test_token_ids_that_do_not_continue_the_cache_are_refused_with_advice(ids: torch.Tensor, message: str, model: Any, file: Path) -> None:
    with KvpackCache.load(file, model) as cache, pytest.raises(InvalidParameter, match=message):
        model.generate(ids, past_key_values=cache, **OPTIONS)
    with KvpackCache.load(file, model, prompt=ids) as cache:
        assert model.generate(ids, past_key_values=cache, **OPTIONS).tolist() == model.generate(ids, **OPTIONS).tolist()
    if torch.equal(ids, IDS):
        with KvpackCache.load(file, model) as cache:
            cache.crop(-1)
            assert model.generate(ids, past_key_values=cache, **OPTIONS).tolist() == model.generate(ids, **OPTIONS).tolist()


def test_beams_over_one_sequence_are_refused_with_advice(model: Any, file: Path) -> None:
    ids = torch.cat([IDS, NEW], 1)
    expected = model.generate(ids, num_beams=3, **OPTIONS)
    with KvpackCache.load(file, model) as cache:
        assert model.generate(ids, past_key_values=cache, num_beams=3, **OPTIONS).tolist() == expected.tolist()
    with KvpackCache.load(file, model) as cache:
        with pytest.raises(InvalidParameter, match=r"the forward pass has 3 rows, .*cache\.batch_repeat_interleave\(3\)"):
            model(NEW.repeat(3, 1), past_key_values=cache)
        cache.batch_repeat_interleave(3)
        assert model(NEW.repeat(3, 1), past_key_values=cache).logits.shape[0] == 3


@pytest.mark.parametrize("save", [lambda model: torch.save(model, io.BytesIO()), pickle.dumps], ids=["torch.save", "pickle"])
def test_a_recorded_model_cannot_be_pickled(save: Callable[[Any], Any], model: Any, file: Path) -> None:
    with KvpackCache.load(file, model) as cache:
        with pytest.raises(InvalidParameter, match=r"call release\(\) on the cache, or leave the with block"):
            save(model)
        torch.save(model.state_dict(), io.BytesIO())
        cache.release()
        save(model)
    with recording(model), pytest.raises(InvalidParameter, match="leave the with block"):
        save(model)
    save(model)


def test_reading_keys_gives_a_warning(model: Any, file: Path) -> None:
    with KvpackCache.load(file, model) as cache:
        with pytest.warns(kvpack.KvpackWarning, match=r"layers\[1\]\.values was read"):
            assert cache.layers[1].values.shape[2] == 40
        # It is said once; warnings are errors here.
        assert cache.layers[0].keys.shape[2] == 40


@pytest.mark.parametrize("use", ["a copy of the model", "the model after release"])
def test_a_cache_under_another_model_is_refused_with_advice(model: Any, use: str) -> None:
    copied = copy.deepcopy(model)
    with torch.no_grad(), KvpackCache(model, "raw") as cache:
        expected = model(torch.cat([IDS, NEW], 1)).logits[:, -2:]
        model(IDS, past_key_values=cache)
        if use == "the model after release":
            cache.release()
            copied = model
        with pytest.raises(InvalidParameter, match=r"not the one that the cache was created for, .*KvpackCache\.of\(cache\.packed, model"):
            copied(NEW, past_key_values=cache)
        with KvpackCache.of(cache.packed, copied) as advised:
            torch.testing.assert_close(copied(NEW, past_key_values=advised).logits, expected)


def test_a_cache_of_an_older_transformers_is_refused_with_advice() -> None:
    past = DynamicCache.__new__(DynamicCache)
    k = torch.randn(1, 1, 5, 64)
    past.__dict__.update(key_cache=[k], value_cache=[k], _seen_tokens=5)
    with pytest.raises(InvalidType, match=r"from a transformers version before 4\.56: pass list\(zip\("):
        kvpack.pack(past, "raw")
    assert kvpack.pack(list(zip(past.key_cache, past.value_cache, strict=True)), "raw").tokens == 5


@pytest.mark.parametrize("name", ["model", "recipe", "config", "dense", "graphs", "keep_all"])
def test_foreign_arguments_of_the_constructor_are_refused(name: str, model: Any) -> None:
    given: dict[str, Any] = {"recipe": "raw"} if name == "config" else {"model": model, "recipe": "raw"}
    check(lambda value: KvpackCache(**{**given, name: value}).release(), skipped="a module")


@pytest.mark.parametrize("name", ["cache", "model", "dense", "rope_deltas", "prompt", "graphs"])
def test_foreign_arguments_of_the_method_of_are_refused(name: str, model: Any, file: Path) -> None:
    given: dict[str, Any] = {"cache": kvpack.load(file), "model": model}
    check(lambda value: KvpackCache.of(**{**given, name: value}).release(), skipped="a module")


@pytest.mark.scenario
@pytest.mark.parametrize("name", ["path", "model", "device", "basis", "copy", "memory_limit", "layers", "tokens", "recipe", "prompt"])
def test_foreign_arguments_of_load_are_refused(name: str, model: Any, file: Path) -> None:
    check(lambda value: KvpackCache.load(**{"path": file, "model": model, name: value}).release(), skipped="a module")


CALLS: dict[str, Callable[[KvpackCache, Any], Any]] = {
    "crop": lambda cache, value: cache.crop(value),
    "batch_repeat_interleave": lambda cache, value: cache.batch_repeat_interleave(value),
    "batch_select_indices": lambda cache, value: cache.batch_select_indices(value),
    "reorder_cache": lambda cache, value: cache.reorder_cache(value),
    "get_seq_length": lambda cache, value: cache.get_seq_length(value),
    "keys of update": lambda cache, value: cache.update(value, value, 0),
    "layer of update": lambda cache, value: cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), value),
}


@pytest.mark.scenario
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_foreign_arguments_of_cache_methods_are_refused(call: Callable[[KvpackCache, Any], Any], model: Any, file: Path) -> None:
    packed = kvpack.load(file)

    def one(value: Any) -> None:
        with KvpackCache.of(packed, model) as cache:
            call(cache, value)

    check(one)


def check(call: Callable[[Any], Any], skipped: str = "") -> None:
    found = foreign_errors(call, {what: value for what, value in FOREIGN.items() if what != skipped})
    assert not found, "\n" + "\n".join(found)


_WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
import kvpack
try:
    exec(sys.argv[2])
except ImportError as error:
    assert isinstance(error, kvpack.KvpackError), error
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("package", "code", "extra"),
    [
        ("transformers", "from kvpack.integrations.transformers import KvpackCache", "transformers"),
        ("transformers", "import kvpack.models; kvpack.models.load_model()", "transformers"),
        ("redis", "kvpack.Store('redis://localhost', kvpack.Identity('m', 'raw'))", "redis"),
        ("obstore", "kvpack.Store('s3://bucket', kvpack.Identity('m', 'raw'))", "object-store"),
        ("cryptography", "kvpack.Store('x', kvpack.Identity('m', 'raw'), encryption={'a': bytes(16)})", "encryption"),
        ("matplotlib", "from kvpack.bench import quality_plot; quality_plot.import_figure_module()", "bench"),
    ],
)
def test_a_missing_package_is_reported_with_advice(package: str, code: str, extra: str, tmp_path: Path) -> None:
    # The process that forks has imported KvpackCache.
    words = [sys.executable if "KvpackCache" in code else warm_python.python(), "-c", _WITHOUT, package, code]
    found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert re.match(rf"MissingPackage .*pip install (-U )?'kvpack\[{extra}\]'", found.stdout)
    assert not list(tmp_path.iterdir())


def test_an_old_version_of_transformers_is_reported_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    for version in ("4.50.3", "5.22.0.dev0", "5.9"):
        monkeypatch.setattr(transformers, "__version__", version)
        with pytest.raises(MissingPackage, match=rf"5\.23 or newer, but {re.escape(version)} is installed: pip install -U"):
            transformers_version.installed_transformers()
    for version in ("5.23.0", "5.24.0.dev0", "6.0"):
        monkeypatch.setattr(transformers, "__version__", version)
        assert transformers_version.installed_transformers() is transformers
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    oldest = ".".join(map(str, transformers_version.MIN_VERSION))
    assert project["project"]["optional-dependencies"]["transformers"] == [f"transformers>={oldest}"]
