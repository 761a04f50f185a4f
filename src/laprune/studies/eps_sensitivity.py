"""Whether the agreement of theory and simulation hangs on the threshold of saturation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .lab import Options, Record, Setting, Study
from .mean_field_agreement import largest_discrepancies, measure
from .style import figure, save
from .tables import Row, dots, line, seeds, select, spread, stack, write

A = 0.1
EPS = (1e-4, 1e-3, 1e-2)


def settings(options: Options) -> list[Setting]:
    grid, n = ("quick", 20_000) if options.quick else ("full", 200_000)
    return [
        {"scores": "gaussian", "a": A, "eps": eps, "n": n, "grid": grid, "seed": seed}
        for eps in EPS
        for seed in seeds(options, 5)
    ]


def draw(records: list[Record], folder: Path) -> list[Path]:
    fig, (left, right) = figure(2, width=4.4, height=3.5)
    for i, eps in enumerate(EPS):
        chosen = select(records, eps=eps)
        gamma = np.array(chosen[0]["result"]["gamma"])
        theory, simulated = stack(chosen, "predicted")[0], stack(chosen, "simulated").mean(0)
        law = stack(chosen, "unsaturated_law")[0]
        label = rf"$\varepsilon$ = $10^{{{round(np.log10(eps))}}}$"
        left.plot(gamma, theory, label=label, **line(i))
        left.plot(gamma, simulated, **dots(i, hollow=True))
        right.plot(1 - gamma, 1 - theory, **line(i))
        right.plot(1 - gamma, 1 - simulated, **dots(i, hollow=True))
        near = law < 1
        right.plot((1 - gamma)[near], law[near], color="grey", linewidth=0.8, zorder=1)
    left.set(xlabel=r"hardness $\gamma$", ylabel="saturated fraction", ylim=(-0.03, 1.03))
    left.legend(loc="upper left", fontsize=8)
    left.set_title("lines: theory, open: simulated", fontsize=9)
    right.set(xscale="log", yscale="log", xlabel=r"1 $-$ $\gamma$ (harder to the right)")
    right.set(ylabel="unsaturated fraction", ylim=(None, 1.5))
    right.invert_xaxis()
    right.set_title("thin grey: the near-binary law", fontsize=9)
    return [*save(fig, folder, "eps_sensitivity"), _table(records, folder)]


def _table(records: list[Record], folder: Path) -> Path:
    rows = []
    for eps in EPS:
        chosen = select(records, eps=eps)
        simulated = stack(chosen, "simulated")
        worst = spread(largest_discrepancies(chosen))
        rows.append(Row(f"largest discrepancy, eps = {eps:g}", None, worst, ".4f"))
        step = spread([np.diff(simulated, axis=1).min()])
        rows.append(
            Row(f"smallest step along gamma, eps = {eps:g} (≥ 0: monotone)", None, step, ".4f")
        )
        gamma = chosen[0]["result"]["gamma"]
        ratio = (1 - simulated[:, -1]) / stack(chosen, "unsaturated_law")[:, -1]
        name = f"unsaturated fraction at gamma = {gamma[-1]:g} over its law, eps = {eps:g}"
        rows.append(Row(name, None, spread(ratio)))
    unsolved = spread([sum(sum(record["result"]["unsolved"]) for record in records)])
    rows.append(Row("masks the solver did not solve, all eps", None, unsolved, ".0f"))
    notes = [
        f"Gaussian scores, a = {A:g}. The paper gives no number here: it states that the monotone "
        "transition and the agreement persist for all three thresholds."
    ]
    return write(folder, "eps_sensitivity", "Sensitivity to the saturation threshold", rows, notes)


STUDY = Study(
    "eps_sensitivity", "theory against simulation at three thresholds", settings, measure, draw
)
