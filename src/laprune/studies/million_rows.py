"""A million random rows of each type: is each solved, how exactly, and in how many passes?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import laprune

from .inputs import REGISTRY, budgets, hardnesses
from .inputs import draw as draw_scores
from .lab import Options, Record, Setting, Study, hardware
from .style import COLOURS, figure, save

LENGTHS = (2, 3, 5, 8, 16, 33, 64, 100, 256, 512)
ROWS = 6_700  # times 15 families and 10 lengths: a million in each dtype
LARGEST = {"float64": 1 - 1e-8, "float32": 1 - 1e-4}
FAR = 2e-6  # how far a float32 mask may be from the float64 answer


def settings(options: Options) -> list[Setting]:
    rows = 50 if options.quick else ROWS
    gpu = torch.device(options.device).type == "cuda"
    where = {"hardware": hardware(options.device)} if gpu else {}
    return [
        {"inputs": name, "n": n, "dtype": dtype, "rows": rows, **where}
        for dtype in LARGEST
        for name in REGISTRY
        for n in LENGTHS
    ]


def measure(setting: Setting, options: Options) -> dict[str, Any]:
    rows, n, name = setting["rows"], setting["n"], setting["dtype"]
    r = draw_scores(setting["inputs"], rows, n, dtype=getattr(torch, name))
    k, gamma = budgets(rows, n), hardnesses(rows, LARGEST[name])
    device = options.device if "hardware" in setting else "cpu"
    solution = laprune.Solution(*(x.cpu() for x in laprune.solve(r.to(device), k, gamma)))
    mask = solution.mask.double()
    errors = _errors(mask, k, gamma)
    exact = solution.status == laprune.Status.CONVERGED
    apart: dict[str, Any] = {}
    if name == "float32":
        off = (mask - laprune.solve(r.double(), k, gamma).mask).abs().amax(-1)
        apart = {"apart": float(off.max()), "far": int((off > FAR).sum())}
    return apart | {
        "status": {s.name: int((solution.status == s).sum()) for s in laprune.Status},
        "passes": torch.bincount(solution.passes).tolist(),
        "mass": _worst(errors[0]),
        "hard": _worst(errors[1][exact]),
        "soft": _worst(errors[2][exact]),
    }


def _errors(p: Tensor, k: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Relative errors of the mass, of 1 - gamma and of gamma, from the mask alone."""
    n = p.shape[-1]
    softness, spread = (p * (1 - p)).sum(-1), (p - p.mean(-1, keepdim=True)).square().sum(-1)
    scale = k * (1 - k / n)
    return (
        (p.sum(-1) / k - 1).abs(),
        (softness / (scale * (1 - gamma)) - 1).abs(),
        (spread / (scale * gamma) - 1).abs(),
    )


def _worst(x: Tensor) -> float | None:
    return float(x.max()) if x.numel() else None


def draw(records: list[Record], folder: Path) -> list[Path]:
    fig, (axis,) = figure(width=5.2)
    lines = [
        "| where | dtype | rows | converged | tied | constant | anything else | passes, median "
        "| worst |"
    ]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    bounds = ["", "| where | dtype | mass | 1 - gamma | gamma |", "|---|---|---:|---:|---:|"]
    distances = [""]
    for where in dict.fromkeys(r["setting"].get("hardware") for r in records):
        for i, dtype in enumerate(LARGEST):
            chosen = [
                r["result"]
                for r in records
                if r["setting"]["dtype"] == dtype and r["setting"].get("hardware") == where
            ]
            counts = _total([x["passes"] for x in chosen])
            rows = sum(counts)
            status = {s.name: sum(x["status"][s.name] for x in chosen) for s in laprune.Status}
            usual = [status[s] for s in ("CONVERGED", "TIED", "CONSTANT")]
            median, worst = _median(counts), len(counts) - 1
            cells = (rows, *usual, rows - sum(usual), median, worst)
            head = f"| {where or 'CPU'} | {dtype} | "
            lines.append(head + " | ".join(f"{x:,}" for x in cells) + " |")
            worsts = (
                max(x[e] for x in chosen if x[e] is not None) for e in ("mass", "hard", "soft")
            )
            bounds.append(head + " | ".join(f"{x:.1e}" for x in worsts) + " |")
            share = [c / rows for c in counts]
            axis.step(
                range(len(share)),
                share,
                where="mid",
                label=f"{dtype}, {where}" if where else dtype,
                color=COLOURS[i],
                linestyle="--" if where else "-",
            )
            if dtype == "float32":
                far = sum(x["far"] for x in chosen)
                distances.append(
                    f"{where or 'CPU'}: {far:,} of {rows:,} float32 masks are further than {FAR:g} "
                    "from the float64 answer in some entry, "
                    f"{max(x['apart'] for x in chosen):.1e} at most."
                )
    axis.set(yscale="log", xlabel="passes over the row", ylabel="share of rows")
    axis.legend()
    path = folder / "million_rows.md"
    note = (
        "",
        "Largest relative errors, computed in float64 from the mask. In float32 an entry near 1",
        "cannot hold 1 - p: rows with k close to n lose digits of 1 - gamma to that rounding.",
        *distances,
    )
    path.write_text("\n".join([*lines, *bounds, *note]).rstrip() + "\n")
    return [path, *save(fig, folder, "million_rows")]


def _total(histograms: list[list[int]]) -> list[int]:
    size = max(map(len, histograms))
    return [sum(h[i] for h in histograms if i < len(h)) for i in range(size)]


def _median(counts: list[int]) -> int:
    half, seen = math.ceil(sum(counts) / 2), 0
    for value, count in enumerate(counts):
        seen += count
        if seen >= half:
            return value
    raise ValueError("no rows")


STUDY = Study(
    "million_rows",
    "two million random rows: solved, how exactly, in how many passes",
    settings,
    measure,
    draw,
)
