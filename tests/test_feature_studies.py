"""The feature-selection studies: the data, the batched training, and a small run of each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import laprune
from laprune import baselines
from laprune.cli import STUDIES
from laprune.studies import feature_budget, feature_selection, selector_comparison
from laprune.studies.feature_training import (
    ANNEALED,
    CONSTRUCTIONS,
    DFTOPK,
    FIXED,
    HARD,
    LABELS,
    LAPSUM,
    SIZES,
    Method,
    masks,
    problem,
    train,
)
from laprune.studies.lab import Options, Study, load, run

QUICK = Options(quick=True)
SMALL = SIZES["quick"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_only_informative_features_tell_the_classes_apart(construction: str) -> None:
    size = SIZES["full"]
    p = problem(construction, size, seed=1)
    again = problem(construction, size, seed=1)
    assert p.x.shape == (2000, 200)
    assert p.informative.sum() == 10
    assert set(np.unique(p.y)) == {0, 1}
    assert 0.35 < p.y.mean() < 0.65
    np.testing.assert_array_equal(p.x, again.x)
    assert not np.array_equal(p.x, problem(construction, size, seed=2).x)
    train_x = p.x[: size.train]
    np.testing.assert_allclose(train_x.mean(0), 0, atol=1e-9)
    np.testing.assert_allclose(train_x.std(0), 1, atol=1e-9)
    sides = 2.0 * p.y - 1
    association = np.abs(sides @ p.x) / len(p.y)
    assert association[~p.informative].max() < 0.1  # 190 draws of N(0, 1) / sqrt(2000)
    assert association[p.informative].max() > 0.2


def test_labels_are_flipped_and_features_correlated_as_described() -> None:
    clean, noisy = (problem(name, SIZES["full"], 3) for name in ("linear_rule", "noisy_rule"))
    assert np.mean(clean.y != noisy.y) == pytest.approx(0.1, abs=0.03)
    p = problem("correlated", SIZES["full"], 3)
    between = np.corrcoef(p.x[:, p.informative].T)[np.triu_indices(10, 1)]
    assert between.mean() == pytest.approx(0.5, abs=0.05)


def test_schedules_start_and_end_where_they_should() -> None:
    assert ANNEALED.at(0, 150) == 0
    assert ANNEALED.at(149, 150) == pytest.approx(0.9)
    assert FIXED.at(0, 150) == FIXED.at(149, 150) == 0.9
    geometric = Method("laprune", 0.99, annealed="geometric")
    assert geometric.at(0, 151) == 0
    assert geometric.at(75, 151) == pytest.approx(0.9)
    assert geometric.at(150, 151) == pytest.approx(0.99)
    cooling = Method("lapsum", 0.01, annealed=True)
    assert cooling.at(0, 150) == 1
    assert cooling.at(149, 150) == pytest.approx(0.01)


def test_masks_of_all_methods_at_once_are_those_of_each() -> None:
    torch.manual_seed(0)
    scores = torch.randn(3, 6, 30)
    methods = [LAPSUM, ANNEALED, DFTOPK, HARD, FIXED, Method("lapsum", 0.1)]
    together = masks(scores, 4, methods, 5, 12)
    expected = [
        baselines.get("lapsum")(scores[:, 0], 4, 1.0),
        laprune.soft_topk(scores[:, 1], 4, 0.9 * 5 / 11),
        baselines.get("dftopk")(scores[:, 2], 4, 1.0),
        baselines.get("hard_ste")(scores[:, 3], 4),
        laprune.soft_topk(scores[:, 4], 4, 0.9),
        baselines.get("lapsum")(scores[:, 5], 4, 0.1),
    ]
    torch.testing.assert_close(together, torch.stack(expected, 1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("batch", [None, 64])
def test_seeds_and_methods_trained_together_do_not_touch_each_other(batch: int | None) -> None:
    together = train("linear_rule", list(LABELS), [0, 1, 2], 4, size=SMALL, batch=batch)
    assert len(together) == 15
    for method in (ANNEALED, LAPSUM):
        alone = train("linear_rule", [method], [1], 4, size=SMALL, batch=batch)[method, 1]
        other = together[method, 1]
        assert alone["selected"] == other["selected"]
        assert alone["mass"] == pytest.approx(other["mass"], rel=1e-4)


def test_a_result_says_what_it_says() -> None:
    size = SMALL._replace(epochs=60, train=400, test=400)
    results = train("linear_rule", list(LABELS), range(3), 4, size=size)
    for (method, seed), result in results.items():
        truth = problem("linear_rule", size, seed).informative
        assert len(result["selected"]) == 4
        assert result["f1"] == pytest.approx(truth[result["selected"]].mean())
        if method != DFTOPK:
            assert result["mass"] == pytest.approx(4, rel=1e-4)
    assert all(results[HARD, seed]["near_binary"] == 1 for seed in range(3))
    assert all(results[LAPSUM, seed]["near_binary"] == 0 for seed in range(3))
    assert all(results[ANNEALED, seed]["near_binary"] > 0.3 for seed in range(3))
    annealed = np.mean([results[ANNEALED, seed]["f1"] for seed in range(3)])
    assert annealed > 0.6  # chance is 4/30


def test_the_comparison_of_pairs() -> None:
    first = np.array([0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 0.4, 0.3])
    up, same = (
        feature_selection.compare(first + 0.1, first),
        feature_selection.compare(first, first),
    )
    assert up.difference.mean == pytest.approx(0.1)
    assert up.p == pytest.approx(2 / 2**8)
    assert up.verdict == "holds"
    assert (same.p, same.verdict) == (1.0, "no difference shown")
    assert feature_selection.compare(first, first + 0.1).verdict == "reversed"


def test_the_softness_is_tuned_on_seeds_that_are_not_reported() -> None:
    variant = feature_selection.MAIN[0]
    grid = feature_selection.GRIDS["LapSum, t tuned"]
    records = [
        {
            "setting": {**variant.fields(), **m._asdict(), "use": use, "seed": 0},
            "result": {"accuracy": value},
        }
        for i, m in enumerate(grid)
        for use, value in (("test", 1.0 - 0.01 * i), ("tune", 0.5 if i != 2 else 0.7))
    ]
    assert feature_selection.tuned(feature_selection.index(records), variant, grid) == grid[2]
    assert not set(feature_selection.TUNING_SEEDS) & set(range(feature_selection.SEEDS))
    assert not set(feature_selection.FRESH_SEEDS) & set(range(feature_selection.SEEDS))


def test_selectors_that_follow_a_penalty_keep_at_least_k() -> None:
    kept = [selector_comparison.Choice(np.zeros(9), n) for n in (0, 2, 5, 9)]
    assert selector_comparison._at_least(3, iter(kept)).kept == 5
    assert selector_comparison._at_least(20, iter(kept)).kept == 9


@pytest.mark.parametrize("module", [feature_selection, feature_budget, selector_comparison])
def test_a_study_runs_resumes_and_is_drawn_from_its_records(module: object, tmp_path: Path) -> None:
    study: Study = module.STUDY  # type: ignore[attr-defined]
    records = run(study, QUICK, tmp_path)
    path = tmp_path / f"{study.name}.jsonl"
    wanted = list(study.settings(QUICK))
    assert len(records) == len(wanted) == len(load(path))

    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]))
    again = run(study, QUICK, tmp_path)
    assert len(load(path)) == len(wanted)
    timed = ("seconds",)
    for old, new in zip(records[-2:], again[-2:], strict=True):
        assert {k: v for k, v in old["result"].items() if k not in timed} == {
            k: v for k, v in new["result"].items() if k not in timed
        }

    paths = study.draw(load(path), tmp_path / "drawn")
    assert {p.suffix for p in paths} == {".svg", ".png", ".md"}
    assert all(p.stat().st_size > 200 for p in paths)
    assert "nan" not in next(p for p in paths if p.suffix == ".md").read_text()
    assert study.name in STUDIES
