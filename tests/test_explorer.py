"""The explorer's numbers are the library's: its script runs in node on the same inputs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

import laprune
from laprune import Status, explorer, theory
from laprune.studies.inputs import REGISTRY, budgets, draw, hardnesses

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")

SCRIPT = Path(explorer.__file__).parent / "mask.js"
RUN = """
const api = require(process.argv[1]);
const jobs = JSON.parse(require("fs").readFileSync(0));
console.log(JSON.stringify(jobs.map(([name, ...rest]) => api[name](...rest))));
"""
# What the library leaves of the hardness equation moves a mask by no more than this.
AGREEMENT = 2e-9
ROWS, LARGEST_GAMMA = 6, 1 - 1e-8


def call(jobs: list[list[Any]]) -> list[Any]:
    run = subprocess.run(
        [str(NODE), "-e", RUN, str(SCRIPT)],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout)


@pytest.mark.parametrize("n", [2, 8, 101, 512])
def test_masks_over_the_registry(n: int) -> None:
    jobs, expected = [], []
    for name in REGISTRY:
        r, k, gamma = draw(name, ROWS, n), budgets(ROWS, n), hardnesses(ROWS, LARGEST_GAMMA)
        s = laprune.solve(r, k, gamma)
        for i in range(ROWS):
            jobs.append(["solve", r[i].tolist(), k[i].item(), gamma[i].item()])
            expected.append((name, s.mask[i], Status(s.status[i].item()).name))
    for found, (name, mask, status) in zip(call(jobs), expected, strict=True):
        apart = (torch.tensor(found["mask"], dtype=torch.float64) - mask).abs().max()
        assert apart <= AGREEMENT, name
        assert found["status"] == status, name


def test_endpoints() -> None:
    r = [1.0, 2.0, 2.0, 2.0, 0.0]
    cases = [(2, 1.0), (2.5, 1.0), (2, 0.0), (0, 0.5), (5, 0.5), (2, 0.9999)]
    found = call([["solve", r, k, gamma] for k, gamma in cases])
    for (k, gamma), answer in zip(cases, found, strict=True):
        s = laprune.solve(torch.tensor(r, dtype=torch.float64), k, gamma)
        assert answer["mask"] == pytest.approx(s.mask.tolist(), abs=1e-12)
        assert answer["status"] == Status(s.status.item()).name
    assert call([["solve", [3.0] * 4, 1, 0.5]])[0]["status"] == "CONSTANT"


def test_lapsum_and_measures() -> None:
    r = draw("laplace", 1, 101)[0]
    cases = [(k, t) for k in (1, 10.5, 100) for t in (1e-3, 0.3, 50.0)]
    masks = call([["lapsum", r.tolist(), k, t] for k, t in cases])
    measures = call([["measure", mask, 0.01] for mask in masks])
    for (k, t), mask, measured in zip(cases, masks, measures, strict=True):
        p = laprune.lapsum_topk(r, k, t)
        assert mask == pytest.approx(p.tolist(), abs=1e-11)
        d = laprune.diagnostics(p, eps=0.01)
        assert measured["mass"] == pytest.approx(d.mass.item(), abs=1e-9)
        assert measured["gamma"] == pytest.approx(d.gamma.item(), abs=1e-9)
        assert measured["zero"] + measured["one"] == pytest.approx(d.near_binary.item(), abs=1e-9)


@pytest.mark.parametrize("k", [1.4996, 1.5, 1.5004])
def test_a_barrier_beside_a_score(k: float) -> None:
    r = [1.0, 0.0, -1.0]
    p = laprune.lapsum_topk(torch.tensor(r, dtype=torch.float64), k, 1.0)
    assert call([["lapsum", r, k, 1.0]])[0] == pytest.approx(p.tolist(), abs=1e-12)


def _peaks(f: Any) -> Any:
    return lambda x: 0.7 * f(x, 0, 0.2) + 0.3 * f(x, 4, 0.2)


POPULATIONS = {
    "gaussian": "norm",
    "laplace": "laplace",
    "uniform": "uniform",
    "student": stats.t(3),
    "exponential": "expon",
    "peaks": theory.Density(pdf=_peaks(stats.norm.pdf), cdf=_peaks(stats.norm.cdf)),
}
POINTS = [(0.1, 0.9, 0.01), (0.5, 0.5, 1e-3), (0.02, 0.999, 0.01), (0.9, 0.05, 0.05), (0.3, 0, 0.5)]


def test_every_distribution_has_its_population() -> None:
    run = [str(NODE), "-p", f"Object.keys(require({str(SCRIPT)!r}).DISTRIBUTIONS).join()"]
    names = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert set(names.strip().split(",")) == set(POPULATIONS)


@pytest.mark.parametrize("name", POPULATIONS)
def test_mean_field(name: str) -> None:
    points = POINTS[:-1]
    found = call([["meanField", name, *point] for point in points])
    for point, answer in zip(points, found, strict=True):
        a, gamma, eps = point
        exact = theory.mean_field(a, gamma, POPULATIONS[name], eps)
        given = (answer["barrier"], answer["temperature"], answer["zero"], answer["one"])
        assert given == pytest.approx(exact[:4], abs=1e-9), point


def test_no_fraction_is_negative() -> None:
    points = [(a, gamma, eps) for a in (0.1, 0.5) for gamma in (0.05, 0.3) for eps in (0.001, 0.05)]
    for name in POPULATIONS:
        for answer in call([["meanField", name, *point] for point in points]):
            assert min(answer["zero"], answer["one"]) >= 0
            assert max(answer["zero"], answer["one"]) <= 1


def test_calculator_and_floor() -> None:
    floors = call([["floor", *point] for point in POINTS])
    assert floors == pytest.approx([theory.sparsity_floor(*p) for p in POINTS], abs=1e-12)
    cases = [(0.1, 0.95, 0.01), (0.5, 0.8, 0.001), (0.01, 0.5, 0.05), (0.3, 0.995, 0.01)]
    found = call([["gammaFor", "gaussian", *case] for case in cases])
    exact = [theory.gamma_for_saturation(a, target, eps) for a, target, eps in cases]
    assert found == pytest.approx(exact, abs=1e-9)


def test_draws_follow_their_distribution() -> None:
    drawn = call([["draw", name, 4000, 7] for name in POPULATIONS])
    for (name, population), sample in zip(POPULATIONS.items(), drawn, strict=True):
        named = getattr(stats, population) if isinstance(population, str) else population
        assert stats.kstest(sample, named.cdf).pvalue > 1e-3, name
