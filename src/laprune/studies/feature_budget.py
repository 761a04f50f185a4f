"""The paper's budget sweep: recovery F1 as k passes the true number of informative features."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from .feature_selection import compare
from .feature_training import (
    ANNEALED,
    CONSTRUCTIONS,
    DFTOPK,
    FIXED,
    HARD,
    LABELS,
    LAPSUM,
    SIZES,
    Method,
    train,
)
from .lab import Options, Record, Setting, Study
from .style import figure, save
from .tables import Floats, markdown, plot, pm, seeds, select, spread, stack

SEEDS = 8
BUDGETS = {"full": (3, 5, 10, 20, 40), "quick": (2, 4, 8)}


def settings(options: Options) -> list[Setting]:
    size = "quick" if options.quick else "full"
    return [
        {"size": size, "construction": construction, "k": k, **method._asdict(), "seed": seed}
        for construction in CONSTRUCTIONS
        for k in BUDGETS[size]
        for method in LABELS
        for seed in seeds(options, SEEDS)
    ]


def measure(setting: Setting, options: Options) -> dict[str, Any]:
    """One record out of a training of all methods and seeds at this budget."""
    results = _train(setting["construction"], setting["k"], setting["size"], options)
    method = Method(setting["operator"], setting["softness"], setting["annealed"])
    return results[method, setting["seed"]]


@functools.lru_cache(maxsize=1)
def _train(
    construction: str, k: int, size: str, options: Options
) -> dict[tuple[Method, int], dict[str, Any]]:
    some = seeds(options, SEEDS)
    return train(construction, list(LABELS), some, k, size=SIZES[size], device=options.device)


def _values(records: list[Record], construction: str, k: int, method: Method, key: str) -> Floats:
    chosen = select(records, construction=construction, k=k, **method._asdict())
    return stack(sorted(chosen, key=lambda r: int(r["setting"]["seed"])), key)


def draw(records: list[Record], folder: Path) -> list[Path]:
    size = records[0]["setting"]["size"]
    budgets, truth = BUDGETS[size], SIZES[size].informative
    paths = []
    for key, label in (("f1", "recovery F1"), ("accuracy", "deployed accuracy")):
        fig, axes = figure(len(CONSTRUCTIONS), width=2.9, height=3.0)
        for axis, construction in zip(axes, CONSTRUCTIONS, strict=True):
            for i, (method, name) in enumerate(LABELS.items()):
                columns = [_values(records, construction, k, method, key) for k in budgets]
                plot(axis, budgets, np.stack(columns, 1), i, name)
            if key == "f1":
                axis.plot(
                    budgets,
                    [_ceiling(k, truth) for k in budgets],
                    color="black",
                    lw=0.8,
                    ls=":",
                    label="best possible",
                )
            axis.axvline(truth, color="grey", lw=0.8)
            axis.set(xscale="log", xlabel="budget k")
            axis.set_xticks(budgets, [str(k) for k in budgets])
            axis.set_xticks([], minor=True)
            axis.set_title(construction, fontsize=9)
        axes[0].set_ylabel(label)
        handles = axes[0].get_legend_handles_labels()
        fig.legend(*handles, loc="outside lower center", ncols=6, fontsize=8)
        paths += save(fig, folder, f"feature_budget_{key}")
    return [*paths, _report(records, folder)]


def _ceiling(k: int, truth: int) -> float:
    """The F1 of a selection with as many informative features as fit into k."""
    return 2 * min(k, truth) / (k + truth)


def _report(records: list[Record], folder: Path) -> Path:
    size = records[0]["setting"]["size"]
    budgets, truth = BUDGETS[size], SIZES[size].informative
    parts = [
        "# Feature selection over budgets",
        f"Mean ± sample standard deviation over seeds; {truth} features are informative. The paper "
        "shows this sweep as a picture without numbers and says that annealed LaPrune is "
        "competitive with fixed gamma and at or above LapSum and hard top-k at every budget.",
    ]
    for construction, about in CONSTRUCTIONS.items():
        parts.append(f"## {construction}: {about.about}")
        for key, name in (("f1", "recovery F1"), ("accuracy", "deployed accuracy")):
            rows = [
                [
                    label,
                    *(
                        pm(spread(_values(records, construction, k, m, key)), ".3f")
                        for k in budgets
                    ),
                ]
                for m, label in LABELS.items()
            ]
            if key == "f1":
                rows.append(["best possible", *(f"{_ceiling(k, truth):.3f}" for k in budgets)])
            parts.append(markdown([name, *(f"k = {k}" for k in budgets)], rows))
        rows = [
            [
                f"annealed minus {LABELS[other]}",
                *(_difference(records, construction, k, other) for k in budgets),
            ]
            for other in (FIXED, LAPSUM, HARD, DFTOPK)
        ]
        parts.append(markdown(["paired F1 (Wilcoxon p)", *(f"k = {k}" for k in budgets)], rows))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "feature_budget.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _difference(records: list[Record], construction: str, k: int, other: Method) -> str:
    first, second = (_values(records, construction, k, m, "f1") for m in (ANNEALED, other))
    pair = compare(first, second)
    return f"{pair.difference.mean:+.3f} ({pair.p:.2g})"


STUDY = Study(
    "feature_budget",
    "recovery F1 and accuracy over budgets around the true number of features",
    settings,
    measure,
    draw,
)
