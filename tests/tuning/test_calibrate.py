"""kvpack calibrate: bases of the demo's model, by complete and interrupted calibrations, and their benefit."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

import kvpack
from benchmarks import decode
from kvpack import cli
from kvpack.bench import quality
from kvpack.coding.bases import Basis
from kvpack.errors import InvalidParameter
from kvpack.evaluation import windows
from kvpack.integrations.transformers import KvpackCache
from kvpack.tuning import basis_fit, calibrate, frames_fit, rope, statistics
from kvpack.tuning.statistics import Statistics
from support.small_models import small_llama
from support.zoo_models import model_of

if TYPE_CHECKING:
    from pathlib import Path

HUNDRED = torch.tensor(100.0, dtype=torch.float64)
SIZES = calibrate.CalibrationSettings(tokens=64, scored_tokens=16, windows=2)


@pytest.fixture(scope="module")
def basis(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("basis") / "tinylm.kvbasis"
    steps: list[tuple[int, int]] = []
    report = calibrate.run(None, None, str(path), SIZES, progress=lambda done, total: steps.append((done, total)))
    assert {total for _, total in steps} == {steps[-1][0]}
    assert all(before < after for (before, _), (after, _) in pairwise(steps))
    assert report["digest"] == Basis.load(path).digest.hex()
    assert report["bytes"] == path.stat().st_size
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    return path


@pytest.mark.scenario
def test_an_interrupted_calibration_continues_to_the_same_basis(basis: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, add, read = tmp_path / "x.kvbasis", Statistics.add, []

    def interrupted(self: Statistics, *given: Any) -> None:
        read.append(given)
        if len(read) == 2:
            raise KeyboardInterrupt
        add(self, *given)

    monkeypatch.setattr(Statistics, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate.run(None, None, str(path), SIZES)
    assert [one.name for one in tmp_path.iterdir()] == ["x.kvbasis.progress"]
    with pytest.raises(InvalidParameter, match="belongs to a calibration with a different model, text, size or device"):
        calibrate.run(None, None, str(path), calibrate.CalibrationSettings(tokens=64, scored_tokens=16, windows=1))
    calibrate.run(None, None, str(path), SIZES)
    assert len(read) == 3
    assert path.read_bytes() == basis.read_bytes()


@pytest.mark.scenario
def test_more_bits_cost_the_model_less_than_removing_the_past(basis: Path) -> None:
    # Several windows: a few tokens decide the divergence of one.
    settings = quality.QualitySettings(tokens=96, scored_tokens=24, windows=3, needles=0, seed=5)
    report = quality.run(None, None, ["klt-4", "klt-1.5"], settings, basis=str(basis))
    more, less = report["recipes"]
    assert [more["recipe"], more["family"]] == ["klt-4", "klt"]
    assert report["basis"]["digest"] == Basis.load(basis).digest.hex()
    assert more["nominal_bits"] <= 4
    assert less["nominal_bits"] <= 1.5
    assert more["kl_divergence"] < less["kl_divergence"] < report["forgotten"]["kl_divergence"]


def test_frames_take_the_predicted_bits(basis: Path) -> None:
    settings = quality.QualitySettings(tokens=96, scored_tokens=24, windows=1, needles=0, seed=5)
    report = quality.run(None, None, ["kv=transform:bits=4,chunk=16", "kv=transform:bits=1,chunk=16"], settings, basis=str(basis))
    more, less = report["recipes"]
    assert more["family"] == "transform"
    assert 3 < more["nominal_bits"] < 4.5
    assert 0.5 < less["nominal_bits"] < 1.2
    assert more["kl_divergence"] < less["kl_divergence"] < report["forgotten"]["kl_divergence"]


@pytest.mark.parametrize("bits", calibrate.SHOWN_BITS[1:])
def test_the_number_of_products_is_predicted(basis: Path, bits: float) -> None:
    foreseen = calibrate.rate(Basis.load(basis), bits)["products"]
    (row,) = decode.run(str(basis), [bits], 1024, repeats=1)["rows"]
    assert foreseen == pytest.approx(row["products_per_value"], rel=0.25)


def test_frames_describe_keys_before_rope(basis: Path) -> None:
    found = Basis.load(basis)
    assert found.sides_with_frames() == [(layer, side) for layer in range(found.layers) for side in "kv"]
    for place in found.sides_with_frames():
        frames, rows = found.frames(*place), found.rows(*place)
        assert (frames.rope is not None) == (place[1] == "k")
        # One step is the best for all: scales follow what errors cost.
        assert (numpy.diff(frames.scales, axis=1) >= 0).all()
        assert frames.heads(rows.dim) == rows.heads
        assert frames.tables.frequencies[:, 0].min() >= 1
    steps = [found.step(bits) for bits in (0.5, 1.0, 2.0)]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 8, "attn_logit_softcapping": 0.5}], ids=["llama", "gemma2"])
def test_shares_are_computed_from_attention_weights(settings: dict[str, Any]) -> None:
    model = model_of("Gemma-2", **settings) if settings else small_llama()
    tokens, known = torch.randint(1, 50, (1, 40)), 24
    pairs = windows.prefill(model, tokens[:, :known])
    chosen = [torch.rand(known) < 0.3 for _ in pairs]
    found = windows.attention_shares(model, tokens, pairs, chosen)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        exact = model(tokens, output_attentions=True).attentions
    expected = [float(layer[0, :, known:, :known][..., raw].sum(-1).mean()) for layer, raw in zip(exact, chosen, strict=True)]
    assert found == pytest.approx(expected, abs=1e-5)
    assert min(found) > 0


@pytest.mark.parametrize("name", ["Bloom", "MPT", "GPT-OSS"])
def test_weights_that_do_not_only_depend_on_queries_and_keys_have_no_share(name: str) -> None:
    model, tokens = model_of(name), torch.randint(1, 50, (1, 40))
    pairs = windows.prefill(model, tokens[:, :24])
    assert windows.attention_shares(model, tokens, pairs, [torch.ones(24, dtype=torch.bool) for _ in pairs]) == []


@pytest.mark.scenario
def test_the_weight_of_raw_tokens_is_reported(basis: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = calibrate.run(None, None, str(tmp_path / "x.kvbasis"), SIZES)
    assert (tmp_path / "x.kvbasis").read_bytes() == basis.read_bytes()
    assert 0 < report["raw_attention"] < 1
    calibrate.show(report)
    assert f"they get {100 * report['raw_attention']:.1f}% of the attention weight" in capsys.readouterr().out
    calibrate.show({**report, "raw_attention": None})
    assert "attention weight" not in capsys.readouterr().out


@pytest.mark.scenario
@pytest.mark.parametrize("scope", ["head", "none"])
def test_the_scope_of_frames_can_be_selected(scope: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.kvbasis"
    sizes = ["--tokens", "32", "--score", "8", "--windows", "1"]
    assert cli.main(["calibrate", "--out", str(out), *sizes, "--scope", scope]) == 0
    found = Basis.load(out)
    assert found.sides_with_frames() == ([] if scope == "none" else list(found.sides()))
    assert all(found.frames(*place).count == found.rows(*place).heads for place in found.sides_with_frames())
    assert ("products per decoded value (frames of a head)" in capsys.readouterr().out) == (scope == "head")
    with pytest.raises(InvalidParameter, match="--scope is 'model', expected one of none, head, layer"):
        calibrate.run(None, None, str(out), calibrate.CalibrationSettings(tokens=32, scored_tokens=8, windows=1, scope="model"))


@pytest.mark.scenario
def test_windows_belong_to_sequences_with_the_same_rope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (calibrate, rope):
        monkeypatch.setattr(module, "max_uniform_length", lambda config: 40)
    out = str(tmp_path / "x.kvbasis")
    sizes = calibrate.CalibrationSettings(scored_tokens=8, windows=1)
    assert calibrate.run(None, None, out, sizes)["tokens"] == 40
    assert Basis.load(out).model["rope_same_up_to"] == "40"
    longer = calibrate.CalibrationSettings(tokens=41, scored_tokens=8, windows=1)
    assert "41, but RoPE uses different frequencies" in calibrate.run(None, None, out, longer)["without_frames"]
    assert Basis.load(out).sides_with_frames() == []
    with pytest.raises(InvalidParameter, match=r"calibrate with --tokens 40, or without frames \(--scope none\)"):
        calibrate.run(None, None, out, calibrate.CalibrationSettings(tokens=41, scored_tokens=8, windows=1, scope="head"))


def test_a_basis_recognizes_its_model(basis: Path) -> None:
    found = Basis.load(basis)
    assert found.model["weights"].startswith("sha256:")
    found.check_model({"name": "elsewhere/tinylm", "weights": found.model["weights"]})
    found.check_model({"weights": "sample-sha256:0"})
    found.check_model({"weights": "sample-sha256:0"}, ["sample-sha256:0", found.model["weights"]])
    with pytest.raises(InvalidParameter, match=r"model whose name is .*tinylm', but the name of the cache's model is 'another'"):
        found.check_model({"name": "another", "weights": "sample-sha256:0"})
    with pytest.raises(InvalidParameter, match="is a basis for a model whose weights are"):
        found.check_model({"weights": "sha256:0"})
    with pytest.raises(InvalidParameter, match=f"its dtype is {found.model['dtype']}, but the cache's is complex64; load the model in "):
        found.check_model({"weights": "sha256:0", "dtype": "complex64"})


@pytest.fixture(scope="module")
def of_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a bfloat16 checkpoint with its basis."""
    folder = tmp_path_factory.mktemp("bf16")
    small_llama(vocab_size=257).to(torch.bfloat16).save_pretrained(folder)
    settings = calibrate.CalibrationSettings(tokens=32, scored_tokens=8, windows=1, scope="none")
    calibrate.run(str(folder), None, str(folder / "x.kvbasis"), settings)
    return folder


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "float32"])
def test_a_model_is_recognized_in_any_dtype(of_bf16: Path, dtype: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(of_bf16, dtype=dtype).eval()
    assert model.dtype == getattr(torch, "bfloat16" if dtype == "auto" else dtype)
    basis = of_bf16 / "x.kvbasis"
    assert Basis.load(basis).model["dtype"] == "bfloat16"
    with torch.no_grad(), KvpackCache(model, kvpack.Recipe("klt-4;tail=32", basis)) as cache:
        model(torch.randint(0, 257, (1, 150)), past_key_values=cache)
        assert cache.packed[0].k.packed_tokens > 100  # type: ignore[union-attr]
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
        with pytest.raises(InvalidParameter, match=r"are '[^']*': make a basis for the model of the cache with kvpack calibrate$"):
            KvpackCache(model, kvpack.Recipe("klt-4", basis))


def test_a_model_that_transformers_cannot_load_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(InvalidParameter, match=rf"^{tmp_path}: transformers cannot load this model with the attention 'sdpa': "):
        calibrate.run(str(tmp_path), None, str(tmp_path / "x.kvbasis"), calibrate.CalibrationSettings())


def calibrated(folder: Path, name: str, **sizes: Any) -> Path:
    """Return the basis of an architecture of the zoo, whose model is in ``folder``."""
    model_of(name, vocab_size=257, **sizes).save_pretrained(folder)
    calibrate.run(str(folder), None, str(folder / "x.kvbasis"), calibrate.CalibrationSettings(tokens=32, scored_tokens=8, windows=1))
    return folder / "x.kvbasis"


@pytest.mark.scenario
@pytest.mark.parametrize(("name", "sizes"), [("Gemma-2", {}), ("GPT-OSS", {"num_experts_per_tok": 2})], ids=["Gemma-2", "GPT-OSS"])
def test_a_model_without_scaled_dot_product_attention_uses_its_own(name: str, sizes: dict[str, int], tmp_path: Path) -> None:
    basis = calibrated(tmp_path, name, **sizes)
    settings = quality.QualitySettings(tokens=64, scored_tokens=16, windows=1, needles=0)
    report = quality.run(str(tmp_path), None, ["klt-8", "transform-4"], settings, basis=str(basis))
    assert all(row["kl_divergence"] < report["forgotten"]["kl_divergence"] / 3 for row in report["recipes"])


@pytest.mark.parametrize("name", ["Bloom", "MPT"])
def test_keys_of_models_with_distance_biases_are_calibrated(name: str, tmp_path: Path) -> None:
    found = Basis.load(calibrated(tmp_path, name))
    assert found.sides_with_frames() == list(found.sides())
    assert all(found.frames(*place).rope is None for place in found.sides_with_frames())


@pytest.mark.scenario
@pytest.mark.parametrize("name", ["Gemma-3n", "Gemma-4"])
def test_layers_that_share_keys_and_values_are_not_in_a_basis(name: str, tmp_path: Path) -> None:
    basis = calibrated(tmp_path, name, vocab_size_per_layer_input=257)
    found = Basis.load(basis)
    assert found.layers == 4
    assert list(found.sides()) == [(0, "k"), (0, "v"), (1, "k"), (1, "v")]
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for recipe in ("klt-4;tail=32", "transform-2;tail=0"):
        with torch.no_grad(), KvpackCache(model, kvpack.Recipe(recipe, basis)) as cache:
            model(torch.randint(0, 257, (1, 100)), past_key_values=cache)
            kvpack.save(cache.packed, tmp_path / "x.kvpack")
        assert len(kvpack.load(tmp_path / "x.kvpack", basis=basis)) == 4
    settings = quality.QualitySettings(tokens=96, scored_tokens=24, windows=1, needles=0, seed=5)
    assert quality.run(str(tmp_path), None, ["klt-4"], settings, basis=str(basis))["recipes"][0]["kl_divergence"] >= 0
    with pytest.raises(InvalidParameter, match=r"is a basis for a model with 4 layers, but the cache has 1:"):
        kvpack.pack([(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16))], kvpack.Recipe("klt-4", basis))


def test_a_model_with_an_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=rf"^{tmp_path}: the model has an encoder, expected a decoder-only model"):
        calibrated(tmp_path, "BART")


def test_a_model_with_few_positions_reads_short_samples(tmp_path: Path) -> None:
    assert Basis.load(calibrated(tmp_path, "OPT")).sides_with_frames() == []


def test_predictions_without_a_past_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"^the 8 predicted tokens of a window attend to no earlier tokens, as with chunked "):
        # After 6, 12, 18 and 24 tokens.
        calibrated(tmp_path, "Llama-4", attention_chunk_size=6)
    assert not list(tmp_path.glob("*.progress"))


def test_non_finite_predictions_are_refused(tmp_path: Path) -> None:
    model = small_llama(vocab_size=257)
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    settings = calibrate.CalibrationSettings(tokens=32, scored_tokens=8, windows=1, scope="none")
    with pytest.raises(InvalidParameter, match=r"^the model's predictions in a window of the text are infinite or NaN: load it"):
        calibrate.run(str(tmp_path), None, str(tmp_path / "x.kvbasis"), settings)


def test_a_basis_knows_the_rope_of_its_model(basis: Path) -> None:
    found = Basis.load(basis)
    same, other = dict(found.model), {**found.model, "rope": '{"rope_theta":7}'}
    found.check_model(same)
    with pytest.raises(InvalidParameter, match=r"""whose rope is '\{.*', but the rope of the cache's model is '\{"rope_theta":7\}'"""):
        found.check_model(other)
    found.check_model({**other, "weights": "sample-sha256:0"})


@pytest.mark.parametrize(("suffix", "least"), [("", basis_fit.MIN_COST), (".frames", frames_fit.MIN_COST)])
def test_no_layer_gets_almost_no_bits(suffix: str, least: float) -> None:
    """Rows and frames have gradients, although those of one layer are almost zero."""
    generator = torch.Generator().manual_seed(0)
    found = Statistics("x", 1)
    for name, size in (("0.k", 1.0), ("1.k", 1e-9), ("0.v", 1.0), ("1.v", 0.01)):
        roots = torch.randn(2, 2, 8, 8, generator=generator, dtype=torch.float64)
        found.counts[name + suffix] = HUNDRED
        found.sums[name + suffix] = torch.randn(2, 8, generator=generator, dtype=torch.float64)
        found.products[name + suffix] = 100 * (roots[0] @ roots[0].transpose(-1, -2))
        found.costs[name + suffix] = size * (roots[1] @ roots[1].transpose(-1, -2))[None].expand(3, -1, -1, -1)
    names = list(found.sums)

    def losses(costs: dict[str, torch.Tensor]) -> dict[str, float]:
        means = {name: found.sums[name] / 100 for name in names}
        spreads = {name: found.products[name] / 100 - means[name][:, :, None] * means[name][:, None, :] for name in names}
        return {name[:3]: float((costs[name] * spreads[name]).sum()) for name in names}

    total = sum(float(found.costs[name][0].diagonal(dim1=-2, dim2=-1).sum()) for name in names)
    before = losses({name: 3 * found.costs[name][0] / total for name in names})
    after = losses(basis_fit.error_costs(found, names, least))
    for side in "kv":
        mean = (before[f"0.{side}"] + before[f"1.{side}"]) / 2
        for layer in range(2):
            name = f"{layer}.{side}"
            assert after[name] == pytest.approx(before[name] + least * mean)


def test_larger_keys_with_smaller_queries_change_nothing() -> None:
    """Scores do not change, and neither do errors in the coded frame, because the costs of all channels scale by the same factor."""
    generator = torch.Generator().manual_seed(0)
    found, scaled = Statistics("x", 1), Statistics("x", 1)
    sizes = torch.tensor([1.0, 30.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    for name in ("0.k", "1.k"):
        roots = torch.randn(2, 2, 8, 8, generator=generator, dtype=torch.float64)
        found.counts[name] = scaled.counts[name] = HUNDRED
        found.sums[name] = scaled.sums[name] = torch.zeros(2, 8, dtype=torch.float64)
        found.products[name] = 100 * (roots[0] @ roots[0].transpose(-1, -2))
        found.costs[name] = (roots[1] @ roots[1].transpose(-1, -2))[None].expand(3, -1, -1, -1)
        scaled.products[name] = found.products[name] * sizes * sizes[:, None]
        scaled.costs[name] = found.costs[name] / sizes / sizes[:, None]
    for name in found.sums:
        own, other = (basis_fit.error_costs(one, list(one.sums), basis_fit.MIN_COST)[name] for one in (found, scaled))
        for head in range(2):
            of = [
                basis_fit.optimal_transform((one.products[name][head] / 100).numpy(), cost[head].numpy())
                for one, cost in ((found, own), (scaled, other))
            ]
            (_, _, deviations), (_, _, same) = of
            assert same / same[0] == pytest.approx(deviations / deviations[0], rel=0.05)


def test_a_side_whose_errors_cost_nothing_is_encoded() -> None:
    found = Statistics("x", 1)
    for name in ("0.v", "1.v"):
        found.counts[name] = HUNDRED
        found.sums[name] = torch.zeros(1, 4, dtype=torch.float64)
        found.products[name] = 100 * torch.eye(4, dtype=torch.float64)[None]
        found.costs[name] = (name == "0.v") * torch.eye(4, dtype=torch.float64).expand(3, 1, -1, -1)
    costs = basis_fit.error_costs(found, list(found.sums), 0.1)
    assert costs["1.v"][0].diagonal() == pytest.approx(costs["1.v"][0, 0, 0].repeat(4))
    assert float(costs["1.v"][0, 0, 0]) > 0


def test_bits_of_a_recipe_are_those_of_a_complete_file(basis: Path) -> None:
    found = Basis.load(basis)
    shapes = [(found.rows(layer, "k").heads, found.rows(layer, "k").dim) for layer in range(found.layers)]
    generator = torch.Generator().manual_seed(0)
    pairs = [tuple(torch.randn(2, 1, heads, 4096, dim, generator=generator).to(torch.bfloat16)) for heads, dim in shapes]
    for bits in (1.5, 3.0):
        plain = kvpack.pack(pairs, kvpack.Recipe(f"kv=klt:bits={bits:g},widths=heads", found))
        assert bits - 0.2 < plain.bits_per_value <= bits + 0.01
        # Raw tokens come on top: the first of these, and their tensors in the header.
        cache, (heads, dim) = kvpack.pack(pairs, kvpack.Recipe(f"klt-{bits:g}", found)), shapes[0]
        raw = (16 + 8 * 8 / (heads * dim)) / 4096
        assert raw < cache.bits_per_value - plain.bits_per_value < raw + 0.01


def test_raw_tokens_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tokens, and those whose keys in a layer have a low norm, are left out on both sides; all others count."""
    generator = torch.Generator().manual_seed(0)
    pairs = [tuple(torch.randn(2, 1, 2, 200, 8, generator=generator) + 3) for _ in range(2)]
    low = {0: [60, 150], 1: [170]}
    for layer, tokens in low.items():
        pairs[layer][0][:, :, tokens] /= 16
    gradients = [tuple(torch.randn(2, 1, 2, 200, 8, generator=generator)) for _ in range(2)]

    def found_gradients(model: None, tokens: torch.Tensor, pairs: Any, _: torch.Generator) -> Any:
        read.append((tokens.shape[1], first := pairs[0][0].shape[2]))
        return [(k[:, :, :first], v[:, :, :first]) for k, v in gradients]

    read: list[tuple[int, int]] = []
    monkeypatch.setattr(statistics, "_gradients", found_gradients)
    # As if attention were the same on all tokens.
    monkeypatch.setattr(statistics, "attention_shares", lambda *given: [float(chosen.sum()) / 200 for chosen in given[-1]])
    found = Statistics("x")
    found.add(None, torch.zeros(1, 220, dtype=torch.int64), pairs, 0, 50)
    # Tokens are predicted after beginnings of several lengths, 20 in all.
    assert read == [(55, 50), (105, 100), (155, 150), (205, 200)]
    for layer, tokens in low.items():
        counted = [token for token in range(4, 200) if token not in tokens]
        for number, side in enumerate("kv"):
            name, x, g = f"{layer}.{side}", pairs[layer][number][0].double(), gradients[layer][number][0].double()
            assert float(found.counts[name]) == len(counted)
            torch.testing.assert_close(found.sums[name], x[:, counted].sum(1))
            parts = [g[:, [token for token in counted if token < first]] for _, first in read]
            torch.testing.assert_close(found.costs[name][0], sum(part.transpose(1, 2) @ part for part in parts))
            kept = found.samples[name][0]
            assert kept.shape == (2, 50, 8)
            assert all((kept[:, token, None].double() == x[:, counted]).all(-1).all(0).any() for token in range(50))
    assert calibrate._raw_fraction(found, 200) == pytest.approx(1 - (194 + 195) / 400)
    assert [float(found.shares[layer]) for layer in "01"] == pytest.approx([6 / 200, 5 / 200])


def test_tables_are_trained_with_values_of_all_columns() -> None:
    columns = numpy.random.default_rng(0).standard_normal((basis_fit.MAX_TRAINING_VALUES, 16)) * numpy.arange(1, 17)
    values = basis_fit._training_values(columns.ravel())
    assert len(values) == basis_fit.MAX_TRAINING_VALUES
    assert float(values.std()) == pytest.approx(columns.std(), rel=0.01)
    assert (values.diff() >= 0).all()


def test_tables_are_scaled_lloyd_max_tables() -> None:
    values = basis_fit._training_values(numpy.random.default_rng(0).standard_normal(40_000))
    zeros = torch.zeros(len(values), dtype=torch.float64)
    tables, of_zeros = basis_fit._fit_tables([values, zeros])
    # Max 1960, Table I, divided by 1 less the error.
    assert tables[0].tolist() == pytest.approx([-1.2533, 1.2533], abs=0.03)
    assert tables[1].tolist() == pytest.approx([-1.711, -0.5131, 0.5131, 1.711], abs=0.03)
    assert of_zeros[1].tolist() == [0, 0, 0, 0]
    nearest = tables[7][(values[:2000, None] - tables[7]).abs().argmin(1)]
    assert (nearest - values[:2000]).square().mean() < 2e-4
    # A shorter run changes nothing.
    assert [table.tolist() for table in basis_fit._fit_tables([values, values[::2]])[0]] == [table.tolist() for table in tables]


def test_levels_have_slightly_more_energy_than_the_columns() -> None:
    deviations = 2.0 ** -(4 + numpy.arange(32) / 4)
    columns = numpy.random.default_rng(0).standard_normal((1, 8000, 32)) * deviations
    tables = frames_fit._train_tables({(0, "k"): columns}, {(0, "k"): frames_fit._scales(deviations)[None]}, lambda: None)
    steps = 2.0 ** (frames_fit.MIN_OCTAVES + numpy.arange(tables.count) / 4)
    parts = tables.frequencies[:, 1:] / tables.frequencies.sum(1, keepdims=True)
    energy = (parts * tables.values.numpy() ** 2).sum(1) / steps**2
    assert energy[(steps > 0.7) & (steps < 8)] == pytest.approx(1.085, abs=0.07)
    # Where most levels are 0, the others are not to stand for all of it.
    assert (energy[(steps > 0.2) & (steps < 0.3)] < 0.8).all()
    normal = NormalDist()
    for step, values in zip(steps, tables.values.tolist(), strict=True):
        if 0.2 < step < 0.3:
            ends = [(0.5 + frames_fit.DEAD_ZONE + level) / step for level in (0, 1)]
            mean = step * (normal.pdf(ends[0]) - normal.pdf(ends[1])) / (normal.cdf(ends[1]) - normal.cdf(ends[0]))
            assert values[tables.max_level + 1] == pytest.approx(frames_fit.MAX_SCALE * mean, rel=0.05)


@pytest.mark.scenario
def test_the_command_passes_on_its_arguments(basis: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "twin.kvbasis"
    arguments = ["calibrate", "--out", str(out), "--tokens", "32", "--score", "8", "--windows", "1", "--twin", "8", "--rows", "fp32"]
    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == Basis.load(out).digest.hex()
    twin, plain = Basis.load(out), Basis.load(basis)
    assert twin.rows(0, "k").rows.dtype == torch.float32
    assert not [key for key in twin.model if key.startswith("weights")]
    assert list(twin.sides()) == list(plain.sides())
    with pytest.raises(InvalidParameter, match=r"the name of a basis must end in \.kvbasis"):
        calibrate.run(None, None, str(tmp_path / "x"), SIZES)
    assert kvpack.Basis is Basis


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize("words", [["calibrate", "--out", "x.kvbasis"], ["tune", "--bits", "4", "--out", "x.txt"]], ids=" ".join)
def test_a_missing_cuda_device_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words, "--device", "cuda"]) == 2
    assert "--device is cuda, but PyTorch found no CUDA device: omit --device to use the CPU" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.cuda
def test_a_model_on_a_device_gets_the_same_basis(basis: Path, tmp_path: Path) -> None:
    calibrate.run(None, None, str(tmp_path / "x.kvbasis"), replace(SIZES, device="cuda"))
    there, here = Basis.load(tmp_path / "x.kvbasis"), Basis.load(basis)
    assert list(there.sides()) == list(here.sides())
    for layer in range(here.layers):
        torch.testing.assert_close(there.mean(layer), here.mean(layer), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(there.queries(layer), here.queries(layer), rtol=1e-3, atol=1e-2)


@pytest.mark.scenario
def test_widths_depend_on_the_losses_of_layers_and_sides(tmp_path: Path) -> None:
    path, steps = tmp_path / "x.kvbasis", []
    settings = calibrate.CalibrationSettings(tokens=64, windows=2, balanced_only=True, widths=1)
    report = calibrate.run(None, None, str(path), settings, progress=lambda done, total: steps.append((done, total)))
    assert {total for _, total in steps} == {steps[-1][0]}
    basis = Basis.load(path)
    assert report["digest"] == basis.digest.hex()
    assert report["widths"] == 1
    assert set(basis.losses) == {(layer, side) for layer in range(basis.layers) for side in "kv"}
    assert min(basis.losses.values()) == 0 < max(basis.losses.values())
    recipe = kvpack.Recipe("kvpack-2", basis)
    bits = {place: recipe.codec(place[0], basis.layers, place[1], 64).params()["bits"] for place in basis.losses}
    assert sum(bits.values()) == 2 * len(bits)
    assert bits[max(basis.losses, key=basis.losses.__getitem__)] == max(bits.values()) > 2
    with pytest.raises(InvalidParameter, match="--widths is 9999"):
        calibrate.run(None, None, str(path), calibrate.CalibrationSettings(tokens=64, windows=2, balanced_only=True, widths=9999))
