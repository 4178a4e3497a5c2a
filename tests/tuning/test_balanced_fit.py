"""Balanced frames of a calibration: their computation and their benefit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import kvpack
from kvpack import cli
from kvpack.bench import quality
from kvpack.coding.bases import Basis
from kvpack.errors import InvalidParameter
from kvpack.evaluation.models import get_vocabulary_size, read_text
from kvpack.evaluation.windows import prefill
from kvpack.models import load_model, model_folder
from kvpack.tuning import calibrate
from kvpack.tuning.frames_fit import balancing_frames, frame_cost
from kvpack.tuning.statistics import KeyMoments, QueryMoments, Statistics

if TYPE_CHECKING:
    from pathlib import Path

SIZES = calibrate.CalibrationSettings(tokens=512, windows=4, balanced_only=True)


def moments(seed: int, heads: int = 2, dim: int = 8) -> torch.Tensor:
    x = torch.randn(heads, 4 * dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x = x * torch.logspace(-1, 1, dim, dtype=torch.float64)
    return x.mT @ x / (4 * dim)


@pytest.fixture(scope="module")
def basis(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("balanced") / "tinylm.kvbasis"
    steps: list[tuple[int, int]] = []
    report = calibrate.run(None, None, str(path), SIZES, progress=lambda done, total: steps.append((done, total)))
    done, totals = zip(*steps, strict=True)
    assert list(done) == sorted(set(done))
    assert {*totals} == {done[-1]}
    assert report["digest"] == Basis.load(path).digest.hex()
    cost = report["balanced_cost"]
    assert 0 < cost["own"] < cost["other"] < 1
    return path


def test_keys_and_queries_have_equal_second_moments_in_a_frame() -> None:
    keys, queries = moments(1), moments(2)
    frames = balancing_frames(keys, queries)
    inverse = torch.linalg.inv(frames)
    framed, asked = inverse.mT @ keys @ inverse, frames @ queries @ frames.mT
    ratio = asked[:, 0, 0] / framed[:, 0, 0]
    torch.testing.assert_close(asked, framed * ratio[:, None, None], rtol=0.05, atol=0.02 * float(asked.amax()))
    values = framed.diagonal(dim1=1, dim2=2)
    assert (values.diff() <= 0).all()
    torch.testing.assert_close(framed, torch.diag_embed(values), rtol=0, atol=0.02 * float(framed.amax()))
    torch.testing.assert_close(frames.square().sum(2).mean(1), torch.ones(2, dtype=torch.float64))


def test_no_other_frame_costs_less() -> None:
    keys, queries = moments(1), moments(2).flip(1, 2)
    frames, plain = balancing_frames(keys, queries), torch.eye(8, dtype=torch.float64).expand(2, -1, -1)
    assert torch.equal(frame_cost(plain, keys, queries), torch.ones(2, dtype=torch.float64))
    least = frame_cost(frames, keys, queries)
    assert (least < 0.8).all()
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        other = frames + 0.05 * torch.randn(frames.shape, dtype=torch.float64, generator=generator)
        assert (frame_cost(other, keys, queries) > least).all()


def test_constant_channels_have_frames() -> None:
    nothing = torch.zeros(1, 4, 4, dtype=torch.float64)
    for keys, queries in ((nothing, nothing), (nothing, moments(1, 1, 4)), (moments(1, 1, 4), nothing)):
        frames = balancing_frames(keys, queries)
        assert frames.isfinite().all()
        assert torch.linalg.cond(frames).max() < 1e4


def test_sums_are_computed_from_the_models_own_keys_and_queries() -> None:
    with model_folder(None) as folder:
        model = load_model(folder)
        text = read_text(None, folder, get_vocabulary_size(model))
    tokens, queries, found = torch.tensor([list(text.ids[:100])]), QueryMoments(), Statistics("x")
    seen: dict[int, torch.Tensor] = {}

    def observe(layer: int, q: torch.Tensor) -> None:
        seen[layer] = q
        queries.observe(layer, q)

    pairs = prefill(model, tokens, observe=observe)
    found.add_moments(0, pairs, queries, None)
    halves = found.halves()
    assert halves is not None
    first, second = halves[1]
    assert float(second.tokens) == 0
    k, q = pairs[1][0], seen[1]
    assert 90 < float(first.tokens) <= 96
    grouped = q[0].unflatten(0, (k.shape[1], -1)).flatten(1, 2).double()
    assert float(first.rows) == grouped.shape[1] == 100 * q.shape[1] // k.shape[1]
    torch.testing.assert_close(first.queries, grouped.mT @ grouped)
    # The scores of attention are products of these queries and keys.
    expected = prefill(model, tokens)[1][0]
    assert torch.equal(expected, k)
    both = KeyMoments.__add__(first, second)
    torch.testing.assert_close(both.keys, first.keys)


@pytest.mark.scenario
def test_keys_cost_less_in_the_frame(basis: Path) -> None:
    settings = quality.QualitySettings(tokens=384, scored_tokens=64, windows=2, needles=0, seed=5)
    plain, framed, mean, centered = recipes = [
        f"k=scalar:b=2{words};v=raw:dtype=bf16;raw=4,0.6,4" for words in ("", ",frame=balanced", ",mean=64", ",frame=centered,mean=64")
    ]
    rows = quality.run(None, None, recipes, settings, basis=str(basis))["recipes"]
    loss = {row["given" if "given" in row else "recipe"]: row["kl_divergence"] for row in rows}
    assert loss[framed] < 0.8 * loss[plain]
    assert loss[centered] < 0.6 * loss[mean]


def test_a_default_basis_serves_only_recipes_that_need_one(basis: Path) -> None:
    """kvpack's own presets change with a basis, so published losses without one would not be comparable."""
    settings = quality.QualitySettings(tokens=160, scored_tokens=16, windows=1, needles=0)
    needy = "k=scalar:b=2,frame=balanced;v=raw:dtype=bf16"

    def losses(recipes: list[str], **bases: str) -> list[float]:
        rows = {row["recipe"]: row["kl_divergence"] for row in quality.run(None, None, recipes, settings, **bases)["recipes"]}
        return [rows[recipe] for recipe in recipes]

    own, framed = losses(["kvpack-2", needy], default_basis=str(basis))
    assert losses(["kvpack-2"]) == [own]
    explicit, also_framed = losses(["kvpack-2", needy], basis=str(basis))
    assert also_framed == framed
    assert explicit != own


def test_a_basis_with_balanced_frames_has_the_means_of_keys_before_rope(basis: Path) -> None:
    found = Basis.load(basis)
    assert not list(found.sides())
    with model_folder(None) as folder:
        model = load_model(folder)
        text = read_text(None, folder, get_vocabulary_size(model))
    keys = prefill(model, torch.tensor([list(text.ids[:64])]))[0][0]
    turned = prefill(model, torch.tensor([list(text.ids[:64])]), torch.arange(900, 964)[None])[0][0]
    assert not torch.allclose(keys, turned, atol=0.1)
    mean = found.mean(0)
    assert mean.shape == (keys.shape[1], keys.shape[3])
    queries = found.queries(0)
    assert torch.equal(queries, queries.mT)


@pytest.mark.scenario
def test_a_calibration_for_all_codecs_includes_balanced_frames(tmp_path: Path) -> None:
    path = tmp_path / "x.kvbasis"
    calibrate.run(None, None, str(path), calibrate.CalibrationSettings(tokens=64, scored_tokens=16, windows=2))
    basis = Basis.load(path)
    heads, dim = next(iter(basis.shapes))
    pairs = [(torch.randn(1, heads, 40, dim), torch.randn(1, heads, 40, dim)) for _ in range(basis.layers)]
    recipe = "k=scalar:b=3,mean=32,frame=centered;v=klt:bits=2"
    assert kvpack.pack(pairs, kvpack.Recipe(recipe, basis)).tokens == 40


@pytest.mark.scenario
def test_the_command_writes_balanced_frames(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.kvbasis"
    assert cli.main(["calibrate", "--balanced-only", "--tokens", "64", "--windows", "1", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "1 windows of 64 tokens" in shown or "1 window of 64 tokens" in shown
    assert cli.main(["inspect", str(out)]) == 0
    assert "state.k.balanced" in capsys.readouterr().out
    assert cli.main(["recipes", "k=scalar:b=2,frame=balanced;v=scalar:b=2", "--basis", str(out)]) == 0
    capsys.readouterr()
    for words in (["--score", "8"], ["--scope", "head"]):
        assert cli.main(["calibrate", "--balanced-only", *words, "--out", str(tmp_path / "y.kvbasis")]) == 2
        assert "--balanced-only neither scores predictions" in capsys.readouterr().err


@pytest.mark.scenario
def test_a_model_with_unknown_queries_has_no_balanced_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueryMoments, "observe", lambda *_: None)
    with pytest.raises(InvalidParameter, match="the model implements attention itself"):
        calibrate.run(None, None, str(tmp_path / "x.kvbasis"), calibrate.CalibrationSettings(tokens=64, windows=1, balanced_only=True))
    report = calibrate.run(None, None, str(tmp_path / "y.kvbasis"), calibrate.CalibrationSettings(tokens=64, scored_tokens=16, windows=1))
    assert not report["balanced"]
