"""The picture of what gamma does: one row of scores, its mask from uniform to hard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import laprune

from .inputs import draw as draw_scores
from .lab import Options, Record, Setting, Study
from .style import COLOURS, figure, save

GAMMAS = (0.0, 0.3, 0.6, 0.9, 0.99, 1.0)
N, K = 60, 15


def settings(options: Options) -> list[Setting]:
    return [{"gamma": gamma, "n": N, "k": K} for gamma in GAMMAS]


def measure(setting: Setting, options: Options) -> dict[str, Any]:
    scores = draw_scores("gaussian", 1, setting["n"]).sort(descending=True).values
    solution = laprune.solve(scores, setting["k"], setting["gamma"])
    d = laprune.diagnostics(solution)
    return {
        "scores": scores[0].tolist(),
        "mask": solution.mask[0].tolist(),
        "mass": d.mass.item(),
        "gamma": d.gamma.item(),
    }


def draw(records: list[Record], folder: Path) -> list[Path]:
    fig, axes = figure(len(records), width=1.75, height=2.3)
    for axis, record in zip(axes, records, strict=True):
        result, k = record["result"], record["setting"]["k"]
        axis.bar(range(len(result["mask"])), result["mask"], width=1.0, color=COLOURS[0])
        axis.axvline(k - 0.5, color=COLOURS[1], linestyle="--", linewidth=1)
        axis.set(ylim=(0, 1.02), xticks=[0, k, len(result["mask"])], yticks=[0, 0.5, 1])
        axis.set_title(
            f"$\\gamma$ = {record['setting']['gamma']:g}\nmass {result['mass']:.6g}", fontsize=9
        )
        axis.grid(visible=False)
        if axis is not axes[0]:
            axis.set_yticklabels([])
    axes[0].set_ylabel("mask p")
    fig.supxlabel("scores, largest first (dashed: k)", fontsize=9)
    return save(fig, folder, "hardness_path")


STUDY = Study(
    "hardness_path", "one mask from uniform to hard as gamma grows", settings, measure, draw
)
