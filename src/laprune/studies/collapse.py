"""Hardness in the top-5 loss: the paper's ablation, and why training collapses near the hard end.

The paper's fixed and annealed gammas, with what happens inside: gradient norms, saturated entries,
how the scores grow, and how often the true class's entry of the mask vanishes. Beside them the same
gammas with the mask's logarithm taken as it is, with the logarithm computed exactly from barrier
and temperature, with a gradient that takes the temperature as given, and with a lower bound on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .classification import (
    LAPRUNE,
    LOG,
    RAISED,
    Method,
    accuracies,
    curve,
    data,
    listed,
    measure,
    notes,
    style,
    suffix,
    together,
)
from .lab import Options, Record, Setting, Study
from .style import figure, save
from .tables import markdown, page, select

FIXED = {gamma: Method("laprune", gamma) for gamma in (0.3, 0.5, 0.7, 0.9, 0.99)}
NO_CLIP = LAPRUNE._replace(clip=None)
TO_90, TO_99 = (LAPRUNE._replace(softness=gamma) for gamma in (0.9, 0.99))
LITERAL = {m: m._replace(floor=0.0) for m in (FIXED[0.9], TO_90)}
EXACT = {m: m._replace(floor=None) for m in (FIXED[0.9], TO_90, TO_99)}
GIVEN = {m: m._replace(floor=None, detached=True) for m in (FIXED[0.9], TO_99)}
BOUNDED = {m: m._replace(min_temperature=RAISED.min_temperature) for m in (FIXED[0.9], FIXED[0.99])}
BOUNDS = tuple(TO_99._replace(min_temperature=t) for t in (0.25, 1.0))


def label(method: Method) -> str:
    start = "=" if method.start is None else f"{method.start:g} →"
    words = [f"gamma {start} {method.softness:g}"]
    if method.clip is None:
        words.append("no clipping")
    if method.floor is None:
        words.append("log space")
    elif method.floor == 0:
        words.append("no floor")
    if method.detached:
        words.append("t given")
    if method.min_temperature:
        words.append(f"t ≥ {method.min_temperature:g}")
    return ", ".join(words)


PAPER = {
    FIXED[0.3]: (72.8, 82.4),
    FIXED[0.5]: (71.8, 86.0),
    FIXED[0.7]: (67.4, 88.0),
    FIXED[0.9]: (1.0, 5.0),
    FIXED[0.99]: (2.0, 27.1),
    LAPRUNE: (72.0, 87.4),
    NO_CLIP: (71.9, 86.9),
    TO_90: (1.0, 5.0),
}
"""Top-1 and top-5 accuracy in per cent."""
METHODS = (
    *PAPER,
    TO_99,
    *LITERAL.values(),
    LOG,
    *EXACT.values(),
    *GIVEN.values(),
    RAISED,
    *BOUNDED.values(),
    *BOUNDS,
)
LABELS = {m: label(m) for m in METHODS}
SHOWN = (LAPRUNE, TO_99, RAISED, FIXED[0.9], EXACT[FIXED[0.9]], BOUNDED[FIXED[0.9]])
"""What the figure of the causes shows: healthy runs, collapsed ones, and what mends them."""
CAUSES = {
    "train_top5": "ACC@5 in training",
    "gradient": "gradient norm",
    "largest_gradient": "largest gradient norm",
    "clipped": "clipped steps",
    "score_gradient": "gradient in the scores, per row",
    "lost": "wrong rows without gradient",
    "floored": "rows with p below 1e-7",
    "underflow": "rows with p = 0",
    "saturated": "saturated entries",
    "spread": "sd of a row's scores",
    "temperature": "temperature",
    "hardness": "gamma of the mask",
    "broken": "steps without a finite gradient",
}
"""What is measured in every step; means over an epoch, or the largest."""
DRAWN = ("largest_gradient", "clipped", "hardness")


def settings(options: Options) -> list[Setting]:
    # The collapses and what mends them first: they say most.
    first = (TO_90, RAISED, EXACT[TO_90], FIXED[0.9], BOUNDED[FIXED[0.9]], GIVEN[TO_99])
    return listed([*first, *(m for m in METHODS if m not in first)], options)


def draw(records: list[Record], folder: Path) -> list[Path]:
    name = f"collapse{suffix(records)}"
    said = [
        *notes(records, LABELS),
        "A run without a single finite gradient in an epoch ends there; its accuracy is that of "
        "chance. Where nothing else is said the loss is -log((1 - 2e-7) p + 1e-7) of the mask's "
        "entry p; no floor: -log p of the mask; log space: -log p from barrier and temperature; t "
        "given: the gradient does not pass through the temperature; t ≥: a row whose gamma asks "
        "for less has that temperature, and a softer mask.",
        "## What happens inside: the first epoch",
        _causes(records, 0),
        "## What happens inside: the last epoch that was run",
        _causes(records, -1),
        "Means over an epoch; norms are those before clipping. A wrong row without gradient: the "
        "true class is not among the first five, and the gradient of that row's loss in the scores "
        "is below 1e-3.",
    ]
    title = f"Hardness and collapse, {data(records)}"
    table = page(folder, name, title, [accuracies(records, LABELS, PAPER), *said])
    return [*_figure(records, folder, name), table]


def _causes(records: list[Record], epoch: int) -> str:
    lines = []
    for method, text in LABELS.items():
        some = select(records, **method._asdict())
        if some:
            found = [[r["result"]["epochs"][key][epoch] for r in some] for key in CAUSES]
            lines.append([text, *map(_mean, found)])
    return markdown(("method", *CAUSES.values()), lines)


def _mean(values: list[float | None]) -> str:
    known = [x for x in values if x is not None]
    return f"{sum(known) / len(known):.3g}" if len(known) == len(values) else "not finite"


def _figure(records: list[Record], folder: Path, name: str) -> list[Path]:
    shown = [m for m in SHOWN if select(records, **m._asdict())]
    fig, axes = figure(1 + len(DRAWN), width=2.8, height=3.2)
    panels: list[tuple[Any, str, str]] = [(axes[0], "top5", "ACC@5 on the test images")]
    panels += [(a, key, CAUSES[key]) for a, key in zip(axes[1:], DRAWN, strict=True)]
    for axis, key, title in panels:
        for i, method in enumerate(shown):
            y = curve(records, method, key)
            axis.plot(range(1, len(y) + 1), y, label=LABELS[method], **style(i))
        axis.set(xlabel="epoch", title=title)
        if key == "largest_gradient":
            axis.set_yscale("log")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return save(fig, folder, f"{name}_causes")


STUDY = Study(
    "collapse",
    "hardness in the top-5 loss: the paper's ablation, its collapse and what mends it",
    settings,
    measure,
    draw,
    together,
)
