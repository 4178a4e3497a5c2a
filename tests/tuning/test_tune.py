"""kvpack tune: budgets hold, losses are reproducible, the sensitive layer is found, and the comparison is fair."""

from __future__ import annotations

import json
import re
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpack
from kvpack import cli
from kvpack.coding.bases import Basis
from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.evaluation import models, twins, windows
from kvpack.evaluation.models import LONGER_TEXT, check_size, window_ids, window_starts
from kvpack.formats.errors import InvalidParameter, MissingBasis, ValueTooLarge
from kvpack.models import load_model, model_folder
from kvpack.tuning import calibrate, candidates, greedy, journal, measurement, results, search, tune
from kvpack.tuning.allocation import format_ranges, recipe_clauses, recipe_text, uniform_allocation
from kvpack.tuning.file_sizes import FileLength
from kvpack.tuning.measurement import Loss
from kvpack.tuning.report import show

CANDIDATES = ["scalar:b=2", "scalar:b=3", "k=group:b=4,g=32", "v=octahedral:b=3"]
SETTINGS = tune.TuningSettings(tokens=128, scored_tokens=32, windows=2, held_out_windows=2, seed=3, file_tokens=128)
WORDS = ["tune", "--tokens", "128", "--file-tokens", "128", "--score", "32", "--windows", "1", "--held-out", "1"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tune") / "found.txt"
    return tune.run(None, None, 3.5, SETTINGS, candidates=CANDIDATES, out=str(path))


@pytest.fixture(scope="module")
def tinylm() -> Any:
    with model_folder(None) as folder:
        return load_model(folder)


def tuning_windows() -> dict[str, list[torch.Tensor]]:
    with model_folder(None) as folder:
        text = models.read_text(None, folder, 264)
    first, second, third, fourth = (window_ids(text, start, 128) for start in window_starts(2500, 128, 4, SETTINGS.seed))
    return {"searched": [second, fourth], "held_out": [first, third]}


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.scenario
def test_the_tuned_recipe_stays_within_the_budget(found: Any) -> None:
    assert 3.3 < found["tuned"]["bits_per_value"] <= 3.5
    assert found["uniform"]["bits_per_value"] <= 3.5
    assert all(step["bits_per_value"] <= 3.5 for step in found["measured"])
    assert found["tuned"]["bytes"] == found["tuned"]["bits_per_value"] * 4 * 2 * 128 * 64 / 8


@pytest.mark.scenario
def test_the_recipe_file_contains_the_recipe(found: Any) -> None:
    recipe = parse_recipe(f"@{found['file']}")
    assert recipe.text == found["recipe"]
    text = Path(found["file"]).read_text()
    assert text.startswith("# kvpack tune: tinylm, the demo's text, at most 3.5 bits per value (thorough search)\n")
    for number, codecs in enumerate(found["layers"]):
        for side, codec in codecs.items():
            assert recipe.codec(number, 4, side, 64) == Recipe(f"kv={codec}").codec(0, 1, side, 64)


@pytest.mark.scenario
def test_the_loss_is_reproducible(found: Any, tinylm: Any, tmp_path: Path) -> None:
    for part, of_text in tuning_windows().items():
        exact = [windows.evaluate_uncompressed(tinylm, tokens, 32) for tokens in of_text]
        measured = [windows.measure(tinylm, it, found["recipe"], str(tmp_path / "window")) for it in exact]
        assert [it.kl_divergence for it in measured] == pytest.approx(found["tuned"][part]["kl_divergences"], rel=1e-4)
        differences = [it.log_perplexity - of.loss for it, of in zip(measured, exact, strict=True)]
        assert sum(differences) / 2 == pytest.approx(found["tuned"][part]["log_perplexity_difference"], abs=1e-5)
        if part == "searched":
            # The saved windows also record that their last tokens were appended: at most 64 bytes.
            size = sum(it.values for it in measured) * found["tuned"]["bits_per_value"] / 8
            assert 0 <= sum(it.bytes for it in measured) - size <= 64 * len(measured)


@pytest.mark.scenario
def test_the_tuned_recipe_is_the_best_measured_one(found: Any) -> None:
    losses = {step["recipe"]: step["kl_divergence"] for step in found["measured"]}
    assert losses[found["recipe"]] == min(losses.values()) == found["tuned"]["searched"]["kl_divergence"]
    uniforms = [step for step in found["measured"] if step["what"] == "uniform"]
    assert found["uniform"]["recipe"] == min(uniforms, key=lambda step: step["kl_divergence"])["recipe"]
    assert all("layers=" not in step["recipe"] for step in uniforms)
    difference = found["comparison"]["kl_divergence_difference"]
    expected = found["tuned"]["held_out"]["kl_divergence"] - found["uniform"]["held_out"]["kl_divergence"]
    assert difference == pytest.approx(expected, rel=1e-9)


@pytest.mark.scenario
def test_every_candidate_was_tried_everywhere(found: Any) -> None:
    rows = {(row["layer"], row["side"], row["codec"]): row for row in found["sensitivities"]}
    codecs = {"k": ["scalar:b=2", "scalar:b=3", "group:b=4,g=32"], "v": ["scalar:b=2", "scalar:b=3", "octahedral:b=3"]}
    assert set(rows) == {(layer, side, codec) for layer in range(4) for side in "kv" for codec in codecs[side]}
    for layer, side in product(range(4), "kv"):
        coarse, fine = rows[layer, side, "scalar:b=2"], rows[layer, side, "scalar:b=3"]
        assert coarse["bytes"] < fine["bytes"]
        assert coarse["kl_divergence"] > fine["kl_divergence"] > 0
    assert found["left_out"] == []


@pytest.mark.scenario
def test_the_same_seed_gives_the_same_result(found: Any) -> None:
    settings = tune.TuningSettings(tokens=64, scored_tokens=16, windows=1, held_out_windows=1)
    first, again = (tune.run(None, None, 4.5, settings, candidates=["scalar:b=2", "scalar:b=4"]) for _ in range(2))
    assert first == again
    assert first["file"] is None
    assert first["tuned"] != found["tuned"]


@pytest.mark.scenario
def test_measurements_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "measurements.json"
    words = [*WORDS, "--candidate", "scalar:b=2", "--candidate", "scalar:b=3", "--json", "--measurements", str(path)]
    monkeypatch.chdir(tmp_path)
    read, measure = [], measurement.Windows._measure

    def interrupted(self: Any, exact: Any, recipe: str) -> Loss:
        if len(read) == 5:
            raise KeyboardInterrupt
        read.append(recipe)
        return measure(self, exact, recipe)

    monkeypatch.setattr(measurement.Windows, "_measure", interrupted)
    assert cli.main([*words, "--bits", "3.4"]) == 130
    assert list(strict(path.read_text())["losses"]) == read
    monkeypatch.setattr(measurement.Windows, "_measure", lambda *given: read.append(given[2]) or measure(*given))
    assert cli.main([*words, "--bits", "3.4"]) == 0
    resumed = strict(capsys.readouterr().out)
    # Nothing was measured twice except the held-out windows.
    assert len(read) == len(set(read)) + len({resumed["tuned"]["recipe"], resumed["uniform"]["recipe"]})
    before = len(read)
    assert cli.main([*words, "--bits", "3.4"]) == 2
    assert "recipe.txt already exists" in capsys.readouterr().err
    words.append("--force")
    assert cli.main([*words, "--bits", "3.4"]) == 0
    assert strict(capsys.readouterr().out) == resumed
    assert len(read) == before + 2
    assert cli.main([*words, "--bits", "3.4", "--seed", "1"]) == 2
    assert f"{path} was written for a different model, text, size, seed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "contains no measurements of kvpack tune"),
        ("[" * 100000, "contains no measurements of kvpack tune"),
        ('{"format": "kvpack measurements"}', "contains no measurements of kvpack tune"),
        ("{}", "its entry for the recipe 'a' is not a valid measurement"),
        ('{"kl_divergences": [NaN], "log_perplexities": [1.0], "bytes": 1, "values": 1}', "its entry for the recipe 'a'"),
        ('{"kl_divergences": [], "log_perplexities": [], "bytes": 1, "values": 1}', "its entry for the recipe 'a'"),
        ('{"kl_divergences": ["x"], "log_perplexities": [1.0], "bytes": 1, "values": 1}', "its entry for the recipe 'a'"),
    ],
    ids=["empty", "deep", "no losses", "no loss", "not finite", "no windows", "no number"],
)
def test_files_of_other_formats_contain_no_measurements(tmp_path: Path, content: str, message: str) -> None:
    exact: Any = [SimpleNamespace(tokens=torch.zeros(1, 2, dtype=torch.long), log_probabilities=torch.zeros(1, 2))]
    path = tmp_path / "file"
    if "recipe" in message:
        head = {"format": "kvpack measurements", "kvpack": kvpack.__version__, "windows": journal.windows_digest(exact, 4096)}
        content = json.dumps(head)[:-1] + f', "losses": {{"a": {content}}}}}'
    path.write_text(content)
    with pytest.raises(InvalidParameter, match=message):
        journal.open_journal(str(path), exact, 4096)


@pytest.mark.scenario
def test_progress_ends_at_its_total() -> None:
    seen: list[tuple[int, int]] = []
    settings = tune.TuningSettings(tokens=64, scored_tokens=16, windows=1, held_out_windows=1)
    tune.run(None, None, 4.5, settings, candidates=["scalar:b=2", "scalar:b=3"], progress=lambda *step: seen.append(step))
    assert len({total for _, total in seen}) == 1
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] >= len(seen) - 1


@pytest.mark.scenario
def test_the_report_states_the_result(found: Any, capsys: pytest.CaptureFixture[str]) -> None:
    show(found)
    shown = capsys.readouterr().out
    assert f"{found['tuned']['held_out']['kl_divergence']:.5f}" in shown
    assert "best uniform recipe" in shown
    assert found["file"] in shown
    verdicts = {
        "better": "Tuning pays",
        "worse": "does not pay here",
        "undecided": "inconclusive",
        "the same": "nothing better than",
    }
    for verdict, words in verdicts.items():
        show(found | {"comparison": found["comparison"] | {"verdict": verdict}})
        assert words in capsys.readouterr().out
    show(found | {"uniform": None, "comparison": None, "file": None})
    assert "No uniform recipe" in capsys.readouterr().out


@pytest.mark.scenario
@pytest.mark.parametrize(("factor", "sensitive"), [(1.0, False), (40.0, True)], ids=["as it is", "made sensitive"])
def test_the_sensitive_layer_gets_the_bytes(tmp_path: Path, factor: float, sensitive: bool) -> None:
    with model_folder(None) as folder:
        model = load_model(folder)
    # Outlier channels in the keys of one layer: a rotation spreads their error over all channels.
    with torch.inference_mode():
        twins._scale_layer(model.model.layers[2].self_attn, factor, torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path)
    words = ["k=scalar:b=2", "k=scalar:b=6", "v=scalar:b=4"]
    # Room for the finer keys of one layer, and not of two.
    settings = tune.TuningSettings(tokens=128, scored_tokens=32, windows=1, held_out_windows=4, file_tokens=128)
    report = tune.run(str(tmp_path), None, 4.6, settings, candidates=words)
    assert [layer["k"] for layer in report["layers"]].count("scalar:b=6") == 1
    assert (report["recipe"] == "k=scalar:b=2;v=scalar:b=4;layers=2:k=scalar:b=6") == sensitive
    assert report["uniform"]["recipe"] == "k=scalar:b=2;v=scalar:b=4"
    assert report["tuned"]["held_out"]["kl_divergence"] < 0.8 * report["uniform"]["held_out"]["kl_divergence"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--bits", "0"], 2, r"--bits is 0.0, expected a number above 0 and at most 32"),
        (["--bits", "nan"], 2, r"--bits is nan"),
        (
            ["--bits", "1"],
            2,
            r"with these candidates, a file of 128 tokens has at least [\d,]+ bytes \(2\.\d+ bits per value\), but the budget is [\d,]+",
        ),
        (["--bits", "3", "--windows", "19"], 2, r"--windows is 19, expected an integer from 1 to 18 .the number of 128-token windows"),
        (["--bits", "3", "--windows", "9", "--held-out", "11"], 2, r"--held-out is 11, expected an integer from 1 to 10 windows"),
        (["--bits", "3", "--score", "128"], 2, r"--score is 128, expected an integer from 1 to 127"),
        (["--bits", "3", "--tokens", "4000"], 2, r"--tokens is 4000"),
        (["--bits", "3", "--candidate", "scalar:b=99"], 2, r".*b is '99'"),
        (["--bits", "3", "--candidate", "kivi-2"], 2, r".*unknown codec 'kivi-2'"),
        (["--bits", "3", "--candidate", "k=scalar:b=2;v=raw"], 2, r"--candidate is 'k=scalar:b=2;v=raw', expected a single codec"),
        (["--bits", "3", "--candidate", "k=scalar:b=2"], 2, r"--candidate has no codec for values"),
        (["--bits", "3", "--model", "/nowhere"], 3, r"/nowhere has no config.json"),
        (["--bits", "3", "--text", "/nowhere"], 3, r"/nowhere: could not be opened"),
        (["--bits", "3", "--out", "none/x"], 3, r"cannot write none/x: none is not a folder"),
        (["--bits", "3", "--out", "."], 3, r"cannot write '\.': it is not a regular file"),
        (["--bits", "3", "--out", "/dev/null"], 3, r"cannot write '/dev/null': it is not a regular file"),
        (["--bits", "3", "--measurements", ""], 3, r"cannot write ''"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_invalid_arguments_are_refused(
    words: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*WORDS, *words]) == code
    error = capsys.readouterr().err
    assert error.startswith("kvpack: ")
    assert re.match(message, error.removeprefix("kvpack: ")), error
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_is_too_short_for_any_value_is_named() -> None:
    with pytest.raises(InvalidParameter, match=r"^no --score is possible in a window of 2 tokens: pass a longer text"):
        check_size("--score", 1, 1, -3, "in a window of 2 tokens")
    with pytest.raises(InvalidParameter, match=rf"^no --windows is possible in the text: {LONGER_TEXT}$"):
        check_size("--windows", 0, 1, 0, f"in the text: {LONGER_TEXT}")


def test_the_default_candidates_are_codecs() -> None:
    for side, codecs in candidates.parse_candidates(candidates.THOROUGH_CANDIDATES).items():
        assert len(codecs) == len(set(codecs)) <= 24
        for dim in (64, 80, 128, 256):
            assert all(Recipe(f"kv={codec}").codec(0, 1, side, dim).dim == dim for codec in codecs)


CODECS = ("raw:dtype=fp16", "group:b=2,g=32", "scalar:b=3", "octahedral:b=3")
MADE = {(codec, side): Recipe(f"kv={codec}").codec(0, 1, side, 64) for codec in CODECS for side in "kv"}


@given(st.lists(st.tuples(st.sampled_from(CODECS), st.sampled_from(CODECS)), min_size=1, max_size=12))
def test_a_recipe_states_its_allocation(layers: list[tuple[str, str]]) -> None:
    allocation = {(number, side): codec for number, pair in enumerate(layers) for side, codec in zip("kv", pair, strict=True)}
    text = recipe_text(allocation)
    recipe = Recipe(text)
    recipe.check_layers(len(layers))
    for (number, side), codec in allocation.items():
        assert recipe.codec(number, len(layers), side, 64) == MADE[codec, side]


@pytest.mark.scenario
def test_recipes_are_written_as_short_texts() -> None:
    assert format_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    places = [(layer, side) for layer in range(80) for side in "kv"]
    plain = uniform_allocation(places, "scalar:b=3", "scalar:b=3")
    assert recipe_clauses(plain) == ["kv=scalar:b=3"]
    assert recipe_clauses(plain | {(79, "k"): "raw", (79, "v"): "raw"}) == ["kv=scalar:b=3", "layers=79:kv=raw"]
    # No two neighbors share a codec, and there are ten codecs: the longest recipe that a search finds.
    mixed = {place: f"group:b={1 + number % 5},g={32 if number % 2 else 128},rotation=hadamard" for number, place in enumerate(places)}
    assert len(recipe_text(mixed)) < 1500
    many = [(layer, side) for layer in range(2000) for side in "kv"]
    with pytest.raises(InvalidParameter, match=r"the recipe of 2000 layers takes \d+ bytes as text, .* at most 4096"):
        recipe_text({place: f"scalar:b={1 + place[0] % 2}" for place in many})


POINTS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 1000)), min_size=1, max_size=6)


@given(POINTS)
def test_the_convex_hull_is_below_every_point(points: list[tuple[int, int]]) -> None:
    named = [(size, float(loss), str(number)) for number, (size, loss) in enumerate(points)]
    found = greedy.convex_hull(named)
    assert found[0] == min(named)
    assert found[-1][1] == min(loss for _, loss, _ in named)
    gains = [greedy._loss_decrease_per_byte(a, b) for a, b in pairwise(found)]
    assert all(gain > 0 for gain in gains)
    assert all(a > b for a, b in pairwise(gains))
    # No point lies below the hull.
    for size, loss, _ in named:
        for (x, high, _), (y, low, _) in pairwise(found):
            if x <= size <= y:
                assert loss >= high + (low - high) * (size - x) / (y - x) - 1e-9


class Prices:
    """Sizes that add up, without files."""

    length = FileLength(128, [None])

    def __init__(self, sizes: Any) -> None:
        self.sizes = self.packed = sizes
        self.tensor_keys = list(sizes)
        self.left_out: Any = {place: {} for place in sizes}

    def stream_bytes(self, place: Any, codec: str) -> int:
        return int(self.sizes[place][codec])

    def file_bytes(self, allocation: Any) -> int:
        return sum(self.stream_bytes(place, codec) for place, codec in allocation.items())

    def values(self) -> int:
        return 100


@given(st.lists(POINTS, min_size=1, max_size=4), st.integers(0, 200))
def test_the_greedy_search_is_nearly_optimal(points: list[list[tuple[int, int]]], more: int) -> None:
    places = [(number // 2, "kv"[number % 2]) for number in range(len(points))]
    sizes = {place: {str(n): size for n, (size, _) in enumerate(of)} for place, of in zip(places, points, strict=True)}
    losses = {place: {str(n): float(loss) for n, (_, loss) in enumerate(of)} for place, of in zip(places, points, strict=True)}
    prices = Prices(sizes)
    smallest = sum(min(of.values()) for of in sizes.values())
    chosen = greedy.allocate(prices, losses, smallest + more)

    def loss(allocation: Any) -> float:
        return sum(losses[place][codec] for place, codec in allocation.items())

    assert prices.file_bytes(chosen) <= smallest + more
    # One step of the hulls is the most that a budget cannot use.
    largest = max(max(of.values()) - min(of.values()) for of in sizes.values())
    every = [dict(zip(places, codecs, strict=True)) for codecs in product(*(of for of in sizes.values()))]
    assert loss(chosen) <= min(loss(it) for it in every if prices.file_bytes(it) <= max(smallest, smallest + more - largest))
    for other in (chosen | {place: codec} for place, of in sizes.items() for codec in of):
        assert prices.file_bytes(other) > smallest + more or loss(other) >= loss(chosen)
    with pytest.raises(InvalidParameter, match="with these candidates, a file of 128 tokens has at least"):
        greedy.allocate(prices, losses, smallest - 1)


def scripted(layers: int, loss: Any, *, bytes_: Any = None, budget: int = 10**9) -> Any:
    """Return a search whose losses are a function of the recipe; codecs are scalar:b=1 to 4, of 1 to 4 bytes."""
    prices = Prices({(layer, side): {f"scalar:b={b}": b for b in range(1, 5)} for layer in range(layers) for side in "kv"})

    def measured(text: str) -> Loss:
        recipe = Recipe(text)
        bits = {place: recipe.codec(place[0], layers, place[1], 64).params().get("bits", 16) for place in prices.tensor_keys}
        return Loss([loss(bits)], [0.0], sum(bits.values()) if bytes_ is None else bytes_(bits), 100)

    return search.Search(prices, SimpleNamespace(loss=measured, exact=[None]), budget)


def average_bits(found: search.Measurement) -> list[int]:
    return [int(codec[-1]) for _, codec in sorted(found.allocation.items())]


def test_exchanges_find_improvements_that_single_changes_miss() -> None:
    def loss(bits: Any) -> float:
        # Alone, keys of layer 0 look harmless; beside coarse values they are not.
        k, v = bits[0, "k"], bits[0, "v"]
        return float(2.0**-v + 2.0 ** -bits[1, "k"] + 2.0 ** -bits[1, "v"] + (8 * 2.0**-k if v < 16 else 0.001 * (16 - k)))

    made = scripted(2, loss, budget=9)
    tuned, plain = search.thorough_search(made)
    kinds = [it.role for it in made.measurements]
    assert kinds[0] == "greedy"
    assert "exchange" in kinds
    assert average_bits(made.measurements[0])[0] < average_bits(tuned)[0]
    assert plain is not None
    assert tuned.loss.kl_divergence < min(made.measurements[0].loss.kl_divergence, plain.loss.kl_divergence)
    assert sum(average_bits(tuned)) <= 9


def test_a_better_uniform_recipe_is_kept() -> None:
    def loss(bits: Any) -> float:
        values = list(bits.values())
        return float(len(set(values))) if 16 not in values else float(-bits[0, "k"] - 2 * bits[0, "v"])

    tuned, plain = search.thorough_search(scripted(2, loss, budget=10))
    assert plain is not None
    assert tuned.allocation == plain.allocation
    assert results.compare_losses(tuned.loss, tuned.loss)["verdict"] == "the same"


def test_files_that_grow_with_a_window_stay_within_the_budget() -> None:
    made = scripted(1, lambda bits: -float(sum(bits.values())), bytes_=lambda bits: sum(bits.values()) + (bits[0, "k"] == 4), budget=7)
    tuned, _ = search.thorough_search(made)
    assert tuned.loss.bytes <= 7
    assert all(it.loss.bytes <= 7 for it in made.measurements if it.role != "uniform")


def test_candidates_that_cannot_store_the_values_are_left_out() -> None:
    def loss(bits: Any) -> float:
        if bits[1, "k"] == 1:
            raise ValueTooLarge("a norm is too large")
        return 1 / sum(bits.values())

    made = scripted(2, loss, budget=8)
    tuned, plain = search.thorough_search(made)
    assert made.candidates.left_out[1, "k"] == {"scalar:b=1": "a norm is too large"}
    assert tuned.allocation[1, "k"] != "scalar:b=1"
    assert plain is not None

    def never(bits: Any) -> float:
        raise ValueTooLarge("a norm is too large")

    with pytest.raises(InvalidParameter, match=r"no candidate can encode layers\[0\]\.k: a norm is too large"):
        search.thorough_search(scripted(1, never))


def test_candidates_that_do_not_support_the_head_dim_are_left_out() -> None:
    x = torch.randn(1, 1, 32, 7, generator=torch.Generator().manual_seed(0))
    small = x[:, :, :, [0, 1, 2, 3, 4, 5, 6, 0]]
    exact: Any = SimpleNamespace(pairs=[(small, small), (x, small)], prefix_tokens=16)
    angle = "angle:n=64,norm=log4"
    with pytest.raises(InvalidParameter, match=r"^no candidate can encode layers\[1\]\.k: codec angle: dim is 7"):
        candidates.pack_candidates(exact, {"k": [angle], "v": [angle]}, FileLength(32, [None, None]))
    encoded = candidates.pack_candidates(exact, {"k": [angle, "raw"], "v": [angle]}, FileLength(32, [None, None]))
    assert list(encoded.packed[1, "k"]) == ["raw"]
    assert encoded.left_out[1, "k"][angle].startswith("codec angle: dim is 7")
    made = search.Search(encoded, SimpleNamespace(), 10**6)
    assert (made.common_candidates("k"), made.common_candidates("v")) == (["raw"], [angle])
    pairs = [tuple(side.bfloat16() for side in pair) for pair in exact.pairs]
    allocation = {(0, "k"): angle, (0, "v"): angle, (1, "k"): "raw", (1, "v"): angle}
    packed = kvpack.pack([(k[:, :, :16], v[:, :, :16]) for k, v in pairs], recipe_text(allocation))
    whole = packed.append([(k[:, :, 16:], v[:, :, 16:]) for k, v in pairs])
    assert encoded.file_bytes(allocation) == whole.nbytes
    assert encoded.values() == whole.values


@pytest.mark.scenario
def test_a_basis_adds_candidates_and_is_recorded_with_measurements(tmp_path: Path) -> None:
    basis, measurements, out = (tmp_path / name for name in ("tinylm.kvbasis", "losses.json", "recipe.txt"))
    calibrate.run(None, None, str(basis), calibrate.CalibrationSettings(tokens=64, scored_tokens=16, windows=2))
    settings = tune.TuningSettings(tokens=128, scored_tokens=32, windows=1, held_out_windows=1)
    few = ["kv=klt:bits=1.5", "kv=klt:bits=3", "kv=scalar:b=2"]
    found = tune.run(None, None, 3.0, settings, candidates=few, out=str(out), measurements=str(measurements), basis=str(basis))
    digest = Basis.load(basis).digest.hex()
    assert found["basis"] == {"file": str(basis), "digest": digest}
    assert "klt:bits=" in found["recipe"]
    assert found["tuned"]["bits_per_value"] <= 3.0
    assert f"# basis {digest}" in out.read_text()
    assert f"basis={digest}" in measurements.read_text()
    with pytest.raises(MissingBasis, match=r"needs a basis: pass --basis FILE"):
        tune.run(None, None, 3.0, settings, candidates=few)


@pytest.mark.scenario
def test_frames_add_decoded_candidates_that_can_be_excluded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    basis = tmp_path / "tinylm.kvbasis"
    calibrate.run(None, None, str(basis), calibrate.CalibrationSettings(tokens=64, scored_tokens=16, windows=2))
    settings = tune.TuningSettings(tokens=96, scored_tokens=24, windows=1, held_out_windows=2)
    few = ["kv=klt:bits=1", "kv=klt:bits=2", "kv=transform:bits=1,chunk=16", "kv=transform:bits=3,chunk=16"]
    found = tune.run(None, None, 4.0, settings, candidates=few, basis=str(basis))
    codecs = [row[side] for row in found["layers"] for side in "kv"]
    assert found["attendable"] == (not any("transform" in codec for codec in codecs))
    assert any("transform" in codec for codec in codecs)
    # A mix may be better than either codec alone, and is never worse than what was measured of them.
    alone = [row for row in found["measured"] if row["what"] == "uniform"]
    assert alone
    assert {row["attendable"] for row in found["measured"]} == {True, False}
    assert all(found["tuned"]["searched"]["kl_divergence"] <= row["kl_divergence"] for row in alone)
    show(found)
    text = capsys.readouterr().out
    assert "attended" in text
    assert "decoded tile by tile" in text
    with pytest.raises(InvalidParameter, match="--candidate is 'transform:bits=1,chunk=16', which attention must decode tile by tile"):
        tune.run(None, None, 4.0, settings, candidates=few, basis=str(basis), only_attendable=True)
    packed = tune.run(None, None, 4.0, settings, candidates=few[:2], basis=str(basis), only_attendable=True)
    assert packed["attendable"]
    show(packed)
    assert "attended" not in capsys.readouterr().out
    given = Basis.load(basis)
    assert any("transform" in text for text in tune._default_candidates(given, only_attendable=False))
    assert not any("transform" in text for text in tune._default_candidates(given, only_attendable=True))
    calibrate.run(None, None, str(basis), calibrate.CalibrationSettings(tokens=64, scored_tokens=16, windows=2, scope="none"))
    assert not any("transform" in text for text in tune._default_candidates(Basis.load(basis), only_attendable=False))
