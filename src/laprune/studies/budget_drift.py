"""The mass an operator really selects, as its softness grows.

DFTopK has no budget equation. LapSum takes its softness as a temperature; LaPrune is asked for the
hardness gamma that the DFTopK mask has, so that all three are compared as they soften.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import laprune
from laprune.baselines.dftopk import dftopk
from laprune.baselines.lapsum import lapsum_sort

from .inputs import draw as draw_scores
from .lab import Options, Record, Setting, Study
from .style import figure, save
from .tables import Row, dots, mark_paper, plot, seeds, select, spread, stack, write

PARTS = (100, 10, 2)  # k = n / part
TAUS = {"full": tuple(0.05 * 10 ** (i / 6) for i in range(13)), "quick": (0.05, 0.5, 5.0)}
PAPER = (1.03, 38.75)  # mass over k at the first and last tau, k = n/100
OPERATORS = {"dftopk": "DFTopK", "lapsum": "LapSum", "laprune": "LaPrune"}


def settings(options: Options) -> list[Setting]:
    grid, n = ("quick", 1000) if options.quick else ("full", 10_000)
    return [
        {"n": n, "k": n // part, "part": part, "grid": grid, "seed": seed}
        for part in PARTS
        for seed in seeds(options, 5)
    ]


def measure(setting: Setting, options: Options) -> dict[str, Any]:
    """Mass over k of float32 masks, summed in float64."""
    k = setting["k"]
    r = draw_scores("gaussian", 1, setting["n"], setting["seed"], torch.float32).to(options.device)
    taus = TAUS[setting["grid"]]
    soft = [dftopk(r, k, tau) for tau in taus]
    gammas = [float(laprune.diagnostics(p).gamma) for p in soft]
    return {
        "tau": taus,
        "gamma": gammas,
        "dftopk": [_mass(p) / k for p in soft],
        "lapsum": [_mass(lapsum_sort(r, k, tau)) / k for tau in taus],
        "laprune": [_mass(laprune.soft_topk(r, k, gamma)) / k for gamma in gammas],
    }


def _mass(p: Tensor) -> float:
    return float(p.double().sum())


def draw(records: list[Record], folder: Path) -> list[Path]:
    fig, (left, right) = figure(2, width=4.4, height=3.5)
    for i, part in enumerate(PARTS):
        chosen = select(records, part=part)
        tau, drift = chosen[0]["result"]["tau"], stack(chosen, "dftopk")
        plot(left, tau, drift, i, f"DFTopK, k = n/{part}")
    sparse = select(records, part=PARTS[0])
    tau = sparse[0]["result"]["tau"]
    lapsum, ours = stack(sparse, "lapsum").mean(0), stack(sparse, "laprune").mean(0)
    left.plot(tau, lapsum, label="LapSum, k = n/100", **dots(4, hollow=True, size=7))
    left.plot(tau, ours, label="LaPrune, k = n/100", **dots(6))
    mark_paper(left, [tau[0], tau[-1]], PAPER)
    left.set(xscale="log", yscale="log", xlabel=r"softness $\tau$", ylabel="mass / k")
    left.set_yticks([1, 3, 10, 30], ["1", "3", "10", "30"])
    left.legend(loc="upper left", fontsize=8)

    for i, (key, label) in enumerate(OPERATORS.items()):
        off = np.abs(stack(records, key) - 1).max(0, keepdims=True)
        plot(right, tau, off, i, label)
    right.set(
        xscale="log", yscale="log", xlabel=r"softness $\tau$", ylabel="largest |mass / k $-$ 1|"
    )
    right.set_title("float32, all seeds and budgets", fontsize=9)
    right.legend(loc="center right", fontsize=8)
    return [*save(fig, folder, "budget_drift"), _table(records, folder)]


def _table(records: list[Record], folder: Path) -> Path:
    rows = []
    for part in PARTS:
        drift = stack(select(records, part=part), "dftopk")
        papers = PAPER if part == PARTS[0] else (None, None)
        for at, tau, paper in ((0, "0.05", papers[0]), (-1, "5", papers[1])):
            name = f"DFTopK mass / k, tau = {tau}, k = n/{part}"
            rows.append(Row(name, paper, spread(drift[:, at]), ".2f"))
    for key in ("lapsum", "laprune"):
        off = np.abs(stack(records, key) - 1).max()
        name = f"{OPERATORS[key]}, largest relative error of the mass, all tau, k and seeds"
        rows.append(Row(name, 0.0, spread([off]), ".1e"))
    notes = [
        "float32 masks summed in float64. LapSum at temperature tau; LaPrune at the gamma of the "
        "DFTopK mask. The paper states that both remain at the requested mass to numerical "
        "tolerance."
    ]
    return write(folder, "budget_drift", "Realised mass over softness", rows, notes)


STUDY = Study(
    "budget_drift", "the realised mass of DFTopK, LapSum and LaPrune", settings, measure, draw
)
