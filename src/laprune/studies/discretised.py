"""How discrete the mask is: along gamma at several budgets, and as the scores are rescaled.

An entry is discretised below 0.01 or above 0.99. Gamma is a path from none to all at every budget,
and keeps its meaning when scores are multiplied by c; a fixed LapSum temperature does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

import laprune
from laprune.baselines.lapsum import lapsum_sort

from .inputs import draw as draw_scores
from .lab import Options, Record, Setting, Study
from .style import figure, save
from .tables import (
    Row,
    legend_below,
    mark_paper,
    markdown,
    plot,
    pm,
    seeds,
    select,
    spread,
    stack,
    write,
)

EPS = 0.01
BUDGETS = (0.02, 0.05, 0.1, 0.25, 0.5)
SCALE_BUDGET = 0.1
"""The k/n of the picture over c. The paper does not state its own; this one gives its values."""
GAMMAS = {
    "full": (*(i / 20 for i in range(20)), 0.98, 0.99, 0.999, 1.0),
    "quick": (0.0, 0.5, 0.9, 1.0),
}
SCALES = {"full": tuple(10 ** (i / 4) for i in range(-4, 9)), "quick": (0.1, 1.0, 100.0)}
CURVES = {
    "laprune_soft": r"LaPrune $\gamma$ = 0.5",
    "laprune_hard": r"LaPrune $\gamma$ = 0.9",
    "lapsum_one": "LapSum t = 1",
    "lapsum_tuned": r"LapSum tuned at c = 1 to $\gamma$ = 0.9",
}
PAPER_BUDGETS = {0.5: 0.74, 0.02: 0.98}  # at gamma = 0.9
PAPER_SCALES = {"laprune_soft": 0.481, "laprune_hard": 0.905}
PAPER_LAPSUM = (0.000, 0.987)  # at c = 0.1 and 100


def settings(options: Options) -> list[Setting]:
    grid, n = ("quick", 200) if options.quick else ("full", 2000)
    return [
        {"over": over, "a": a, "n": n, "grid": grid, "seed": seed}
        for over in ("gamma", "scale")
        for a in BUDGETS
        for seed in seeds(options, 5)
    ]


def measure(setting: Setting, options: Options) -> dict[str, Any]:
    n, k = setting["n"], round(setting["a"] * setting["n"])
    r = draw_scores("gaussian", 1, n, setting["seed"]).to(options.device)
    if setting["over"] == "gamma":
        gammas = GAMMAS[setting["grid"]]
        masks = [laprune.soft_topk(r, k, gamma) for gamma in gammas]
        return {"gamma": gammas, "fraction": [_discretised(p) for p in masks]}
    scales = SCALES[setting["grid"]]
    tuned = float(laprune.solve(r, k, 0.9).temperature)
    return {
        "scale": scales,
        "tuned_t": tuned,
        "laprune_soft": [_discretised(laprune.soft_topk(c * r, k, 0.5)) for c in scales],
        "laprune_hard": [_discretised(laprune.soft_topk(c * r, k, 0.9)) for c in scales],
        "lapsum_one": [_discretised(lapsum_sort(c * r, k, 1.0)) for c in scales],
        "lapsum_tuned": [_discretised(lapsum_sort(c * r, k, tuned)) for c in scales],
    }


def _discretised(p: Tensor) -> float:
    return float(((p < EPS) | (p > 1 - EPS)).double().mean())


def draw(records: list[Record], folder: Path) -> list[Path]:
    fig, (left, right) = figure(2, width=4.6, height=3.6)
    for i, a in enumerate(BUDGETS):
        chosen = select(records, over="gamma", a=a)
        x, y = chosen[0]["result"]["gamma"], stack(chosen, "fraction")
        plot(left, x, y, i, f"k/n = {a:g}", markevery=2)
    mark_paper(left, [0.9, 0.9], list(PAPER_BUDGETS.values()))
    left.set(xlabel=r"hardness $\gamma$", ylabel="discretised fraction", ylim=(-0.03, 1.05))
    legend_below(left, 3)

    chosen = select(records, over="scale", a=SCALE_BUDGET)
    scales = chosen[0]["result"]["scale"]
    for i, (key, label) in enumerate(CURVES.items()):
        plot(right, scales, stack(chosen, key), i, label)
    known = [*PAPER_SCALES.values(), *PAPER_LAPSUM]
    mark_paper(right, [1.0, 1.0, scales[0], scales[-1]], known)
    right.set(xscale="log", xlabel="scores multiplied by c", ylim=(-0.03, 1.05))
    right.set_title(f"the same scores times c, k/n = {SCALE_BUDGET:g}", fontsize=9)
    left.set_title("n = 2000 Gaussian scores", fontsize=9)
    legend_below(right, 2)
    return [*save(fig, folder, "discretised"), _table(records, folder)]


def _table(records: list[Record], folder: Path) -> Path:
    rows = []
    steps = []
    for a in BUDGETS:
        chosen = select(records, over="gamma", a=a)
        at = chosen[0]["result"]["gamma"].index(0.9)
        fraction = stack(chosen, "fraction")
        ours = spread(fraction[:, at])
        rows.append(Row(f"fraction at gamma = 0.9, k/n = {a:g}", PAPER_BUDGETS.get(a), ours))
        steps.append(np.diff(fraction, axis=1).min())
    rows.append(
        Row("smallest step along gamma, all budgets (≥ 0: monotone)", None, spread([min(steps)]))
    )

    chosen = select(records, over="scale", a=SCALE_BUDGET)
    for key, paper in PAPER_SCALES.items():
        fraction = stack(chosen, key)
        label = "LaPrune gamma = " + ("0.5" if key == "laprune_soft" else "0.9")
        rows.append(Row(f"{label}, mean over c", paper, spread(fraction.mean(1))))
        rows.append(Row(f"{label}, largest change over c", 0.0, spread(np.ptp(fraction, axis=1))))
    for key, label in (("lapsum_one", "LapSum t = 1"), ("lapsum_tuned", "LapSum tuned at c = 1")):
        fraction = stack(chosen, key)
        papers = PAPER_LAPSUM if key == "lapsum_one" else (None, None)
        rows.append(Row(f"{label}, c = 0.1", papers[0], spread(fraction[:, 0])))
        rows.append(Row(f"{label}, c = 100", papers[1], spread(fraction[:, -1])))
    notes = [
        f"Rows over c are at k/n = {SCALE_BUDGET:g}. The paper does not state the budget of that "
        "picture; the same quantities at every budget tried, beside its values, say which it was:",
        _budgets_tried(records),
    ]
    return write(folder, "discretised", "Discretised fraction: p < 0.01 or p > 0.99", rows, notes)


def _budgets_tried(records: list[Record]) -> str:
    header = (
        "k/n",
        "LaPrune gamma = 0.5",
        "LaPrune gamma = 0.9",
        "LapSum t = 1, c = 100",
        "largest difference",
    )
    papers = [*PAPER_SCALES.values(), PAPER_LAPSUM[1]]
    rows = [("paper", *(f"{x:.3f}" for x in papers), "")]
    for a in BUDGETS:
        chosen = select(records, over="scale", a=a)
        ours = [spread(stack(chosen, key)[:, -1]) for key in (*PAPER_SCALES, "lapsum_one")]
        worst = max(abs(x.mean - y) for x, y in zip(ours, papers, strict=True))
        rows.append((f"{a:g}", *(pm(x, ".3f") for x in ours), f"{worst:.3f}"))
    return markdown(header, rows)


STUDY = Study(
    "discretised", "how discrete the mask is, over gamma and score scale", settings, measure, draw
)
