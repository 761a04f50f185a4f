"""The share of near-zero entries against the floor that holds for all scores.

Gaussian scores stay above the floor. Scores built from the extremal step functions show that it
cannot be raised: their masks sit on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import laprune
from laprune import theory

from .inputs import draw as draw_scores
from .lab import Options, Record, Setting, Study
from .style import figure, save
from .tables import Floats, Row, dots, legend_below, line, seeds, select, spread, stack, write

A = 0.1
FIXED_GAMMAS = (0.5, 0.9, 0.99)
FIXED_EPS = (0.01, 0.05, 0.1)
EPS = {"full": (*(10 ** (i / 6) for i in range(-18, 0)), 0.8, 0.95), "quick": (0.01, 0.05, 0.9)}
GAMMAS = {
    "full": (*(i / 20 for i in range(1, 20)), 0.98, 0.99, 0.995, 0.999),
    "quick": (0.5, 0.9, 0.99),
}
MARGIN = 0.01
"""Adversarial scores aim this much (relatively) above eps, so that no entry there slips below."""
LEAST_LEVEL = 1e-9
"""Stands for the levels 0 and 1, which no finite score reaches."""


def settings(options: Options) -> list[Setting]:
    grid, n = ("quick", 20_000) if options.quick else ("full", 200_000)
    fixed = [{"over": "eps", "gamma": x} for x in FIXED_GAMMAS]
    fixed += [{"over": "gamma", "eps": x} for x in FIXED_EPS]
    # Adversarial scores are not random: one seed says it all.
    kinds = [("gaussian", seed) for seed in seeds(options, 5)] + [("adversarial", 0)]
    return [
        {"scores": kind, **held, "a": A, "n": n, "grid": grid, "seed": seed}
        for held in fixed
        for kind, seed in kinds
    ]


def measure(setting: Setting, options: Options) -> dict[str, Any]:
    """The fraction below eps and the floor of the mask's own mass and hardness."""
    n, k = setting["n"], round(setting["a"] * setting["n"])
    keys = ("gamma", "eps", "below", "floor", "unsolved")
    result: dict[str, list[float]] = {key: [] for key in keys}
    solved: dict[float, laprune.Solution] = {}
    for gamma, eps in _points(setting):
        if setting["scores"] == "adversarial":
            solution = laprune.solve(
                adversarial_scores(k, n, gamma, eps).to(options.device), k, gamma
            )
        else:
            if gamma not in solved:
                r = draw_scores(setting["scores"], 1, n, setting["seed"])[0]
                solved[gamma] = laprune.solve(r.to(options.device), k, gamma)
            solution = solved[gamma]
        p = solution.mask
        d = laprune.diagnostics(p)
        result["unsolved"].append(int(solution.status == laprune.Status.STALLED))
        result["gamma"].append(gamma)
        result["eps"].append(eps)
        result["below"].append(float((p < eps).double().mean()))
        result["floor"].append(float(theory.sparsity_floor(float(d.mass) / n, float(d.gamma), eps)))
    return result


def _points(setting: Setting) -> list[tuple[float, float]]:
    if setting["over"] == "eps":
        return [(setting["gamma"], eps) for eps in EPS[setting["grid"]]]
    return [(gamma, setting["eps"]) for gamma in GAMMAS[setting["grid"]]]


def adversarial_scores(k: int, n: int, gamma: float, eps: float) -> Tensor:
    """Scores whose mask at hardness gamma is nearly the step function that attains the floor.

    >>> r = adversarial_scores(k=1000, n=10_000, gamma=0.9, eps=0.05)
    >>> p = laprune.soft_topk(r, 1000, 0.9)
    >>> below, floor = (p < 0.05).double().mean().item(), theory.sparsity_floor(0.1, 0.9, 0.05)
    >>> round(below, 3), round(floor, 3)
    (0.722, 0.72)

    The score of a level is sigma^-1(level), sigma the Laplace CDF, so that b = 0 and t = 1 solve.
    The number of entries at a level is rounded down, except at the lowest, so that the level in the
    middle only rises.
    """
    levels, masses = theory.extremal_profile(k / n, gamma, min(eps * (1 + MARGIN), 1.0))
    counts = np.floor(masses * n).astype(int)
    counts[0] += n - counts.sum()
    q = np.minimum(levels, 1 - levels).clip(min=LEAST_LEVEL)
    scores = np.where(levels <= 0.5, np.log(2 * q), -np.log(2 * q))
    return torch.from_numpy(np.repeat(scores, counts))


def draw(records: list[Record], folder: Path) -> list[Path]:
    fig, (left, right) = figure(2, width=4.6, height=3.7)
    for axis, over, fixed, symbol in (
        (left, "eps", ("gamma", FIXED_GAMMAS), r"$\gamma$"),
        (right, "gamma", ("eps", FIXED_EPS), r"$\varepsilon$"),
    ):
        name, values = fixed
        for i, value in enumerate(values):
            chosen = select(records, over=over, scores="gaussian", **{name: value})
            extreme = select(records, over=over, scores="adversarial", **{name: value})
            x = chosen[0]["result"][over]
            floor, below = stack(chosen, "floor").mean(0), stack(chosen, "below").mean(0)
            axis.plot(x, floor, label=f"{symbol} = {value:g}", **line(i))
            axis.plot(x, below, **dots(i, hollow=True, size=5))
            axis.plot(x, stack(extreme, "below").mean(0), **dots(i, size=2.5))
        axis.set(ylim=(-0.03, 1.03))
        legend_below(axis, 3)
    left.set(
        xscale="log", xlabel=r"threshold $\varepsilon$", ylabel=r"fraction with p < $\varepsilon$"
    )
    right.set(xlabel=r"hardness $\gamma$")
    fig.suptitle(
        "a = 1/10. Lines: the floor; open: Gaussian scores; small: adversarial scores", fontsize=9
    )
    return [*save(fig, folder, "worst_case_floor"), _table(records, folder)]


def _table(records: list[Record], folder: Path) -> Path:
    def excess(kind: str) -> Floats:
        """Seeds by points: how far the measured fraction lies above the floor."""
        lines = [
            select(records, scores=kind, **{name: value})
            for name, values in (("gamma", FIXED_GAMMAS), ("eps", FIXED_EPS))
            for value in values
        ]
        return np.concatenate([stack(x, "below") - stack(x, "floor") for x in lines], axis=1)

    gaussian, adversarial = excess("gaussian"), excess("adversarial")
    unsolved = sum(sum(record["result"]["unsolved"]) for record in records)
    rows = [
        Row("points below the floor, Gaussian", 0, spread((gaussian < 0).sum(1)), ".0f"),
        Row("points below the floor, adversarial", None, spread((adversarial < 0).sum(1)), ".0f"),
        Row("masks the solver did not solve, both", None, spread([unsolved]), ".0f"),
        Row("smallest excess over the floor, Gaussian", None, spread(gaussian.min(1)), ".4f"),
        Row("median excess over the floor, Gaussian", None, spread(np.median(gaussian, 1)), ".4f"),
        Row("largest excess over the floor, adversarial", None, spread(adversarial.max(1)), ".4f"),
        Row("median excess, adversarial", None, spread(np.median(adversarial, 1)), ".4f"),
    ]
    notes = [
        f"{gaussian.shape[1]} points (gamma, eps) for each kind of scores, a = {A:g}. The paper "
        "states that every point of its figure lies at or above the floor.",
        "Adversarial scores have the step profile that attains the floor at "
        f"(1 + {MARGIN:g}) eps. Their ties may stop a little short of the gamma asked for, so each "
        "mask is held against the floor of its own mass and hardness.",
    ]
    return write(folder, "worst_case_floor", "Near-zero fraction against its floor", rows, notes)


STUDY = Study(
    "worst_case_floor",
    "near-zero entries against the floor for any scores",
    settings,
    measure,
    draw,
)
