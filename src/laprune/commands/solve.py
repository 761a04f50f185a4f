"""Scores from a file, their mask into another, and what the mask is like."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import laprune
from laprune import Diagnostics, Solution, Status

from . import UserError

KINDS = (".npy", ".csv", ".pt")
PICTURES = (".png", ".svg", ".pdf")
UNSOLVED = ("INFEASIBLE", "NONFINITE", "STALLED")
BARS = " ▁▂▃▄▅▆▇█"
SKETCH_HEIGHT = 8


def check(file: Path, out: Path | None, picture: Path | None) -> Path:
    """Where the mask goes; refuses, before anything is done, what could not be written."""
    _check_kind(file)
    if not file.is_file():
        raise UserError(f"no such file: {file}")
    out = out or beside(file)
    _check_kind(out)
    if out.resolve() == file.resolve():
        raise UserError(f"the mask would overwrite the scores in {file}")
    if picture is not None and picture.suffix.lower() not in PICTURES:
        raise UserError(f"{picture} must end in one of {', '.join(PICTURES)}")
    for path in (out, picture):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"no such folder: {path.parent}")
    return out


def read(path: Path) -> Tensor:
    """The scores in a file: an array (.npy), rows of numbers (.csv) or a tensor (.pt)."""
    kind = _check_kind(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an empty file, which is refused below
            scores = _READERS[kind](path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:
        # Without what numpy advises those who call it.
        told = str(error).partition("; use ")[0].partition("\n")[0]
        reason = f": {told}" if kind == ".csv" else ""
        raise UserError(f"{path} does not hold {_HOLDS[kind]}{reason}") from None
    if not isinstance(scores, Tensor):
        raise UserError(f"{path} holds a {type(scores).__name__}, not one tensor")
    if scores.layout != torch.strided or scores.is_quantized:
        raise UserError(f"{path} must hold a dense tensor, got {scores.layout}, {scores.dtype}")
    if scores.is_complex() or scores.dtype == torch.bool:
        raise UserError(f"{path} must hold real numbers, got {scores.dtype}")
    if scores.dim() == 0:
        raise UserError(f"{path} holds a single number, not a row of scores")
    if scores.numel() == 0:
        raise UserError(f"{path} holds no scores: its shape is {tuple(scores.shape)}")
    scores = scores.detach().cpu()
    return scores if scores.is_floating_point() else scores.to(torch.float64)


def write(path: Path, mask: Tensor) -> None:
    """The mask in the format that the name of the file says."""
    kind = _check_kind(path)
    try:
        if kind == ".pt":
            torch.save(mask, path)
        elif kind == ".npy":
            # numpy has no bfloat16.
            np.save(path, (mask.float() if mask.dtype == torch.bfloat16 else mask).numpy())
        else:
            rows = mask.double().reshape(-1, mask.shape[-1]).numpy()
            np.savetxt(path, rows, delimiter=",", fmt="%.17g")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def beside(path: Path) -> Path:
    """Where the mask goes if nobody says: scores.npy -> scores.mask.npy.

    >>> beside(Path("data/scores.npy")).name
    'scores.mask.npy'
    """
    return path.with_name(f"{path.stem}.mask{path.suffix}")


def summary(solution: Solution, diagnostics: Diagnostics, k: float, gamma: float) -> dict[str, Any]:
    """What was asked for and what came out, over all rows."""
    counts = Counter(Status(int(s)).name for s in solution.status.reshape(-1))
    return {
        "shape": list(solution.mask.shape),
        "dtype": str(solution.mask.dtype).removeprefix("torch."),
        "k": k,
        "gamma": gamma,
        "status": dict(counts),
        "passes": _range(solution.passes),
        "mass": _range(diagnostics.mass),
        "realised_gamma": _range(diagnostics.gamma),
        "near_binary": _range(diagnostics.near_binary),
        "barrier": _range(solution.barrier),
        "temperature": _range(solution.temperature),
    }


def unsolved(summary: dict[str, Any]) -> dict[str, int]:
    """How many rows did not get what was asked for, by status.

    >>> unsolved({"status": {"CONVERGED": 3, "NONFINITE": 1}})
    {'NONFINITE': 1}
    """
    return {name: count for name, count in summary["status"].items() if name in UNSOLVED}


def plain(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary for JSON, which has no infinity and no NaN: they become null.

    >>> plain({"k": 2.0, "barrier": [float("nan"), 1.0]})
    {'k': 2.0, 'barrier': [None, 1.0]}
    """
    return {
        name: [x if math.isfinite(x) else None for x in value] if isinstance(value, list) else value
        for name, value in summary.items()
    }


def run(scores: Tensor, k: float, gamma: float) -> tuple[Solution, dict[str, Any]]:
    """The solution of every row (along the last dimension) and its summary."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the summary says it
            solution = laprune.solve(scores, k, gamma)
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from None
    eligible = scores > -torch.inf
    return solution, summary(solution, laprune.diagnostics(solution, eligible=eligible), k, gamma)


def sketch(mask: Tensor, width: int = 64, height: int = SKETCH_HEIGHT) -> str:
    """The mask of one row, largest entry first, in block characters.

    >>> print(sketch(torch.tensor([0.1, 1.0, 0.5, 0.0]), width=4, height=2))
    █
    ██▂
    """
    ranked = mask.detach().double().nan_to_num().reshape(-1).sort(descending=True).values
    columns = torch.stack([part.mean() for part in ranked.tensor_split(min(width, len(ranked)))])
    levels = (columns * height * (len(BARS) - 1)).round().long()
    full = len(BARS) - 1
    lines = []
    for row in reversed(range(height)):
        cells = (levels - row * full).clamp(0, full).tolist()
        lines.append("".join(BARS[c] for c in cells).rstrip())
    return "\n".join(lines)


def picture(scores: Tensor, mask: Tensor, k: float, gamma: float, path: Path) -> None:
    """The mask over the sorted scores and its histogram, as an image file."""
    try:
        from laprune.studies.style import COLOURS, figure

        fig, (over, counts) = figure(2)
    except ModuleNotFoundError:
        raise UserError("a picture needs matplotlib: pip install 'laprune[studies]'") from None
    import matplotlib.pyplot as plt

    p = mask.double().reshape(-1)[scores.double().reshape(-1).argsort(descending=True)]
    over.plot(np.arange(1, len(p) + 1), p, color=COLOURS[0])
    over.axvline(k, color=COLOURS[1], linestyle="--", linewidth=1)
    over.set(xlabel="scores, largest first (dashed: k)", ylabel="mask p", ylim=(-0.02, 1.02))
    counts.hist(p, bins=30, range=(0.0, 1.0), color=COLOURS[0], log=True)
    counts.set(xlabel="mask p", ylabel="entries")
    fig.suptitle(f"n = {len(p)}, k = {k:g}, gamma = {gamma:g}", fontsize=9)
    try:
        fig.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot draw {path}: {error}") from None
    finally:
        plt.close(fig)


def _check_kind(path: Path) -> str:
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise UserError(f"{path} must end in one of {', '.join(KINDS)}")
    return kind


def _read_npy(path: Path) -> Tensor:
    array = np.load(path, allow_pickle=False)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def _read_csv(path: Path) -> Tensor:
    rows = np.loadtxt(path, delimiter=",", ndmin=2)
    # One number per line is one row.
    return torch.from_numpy(rows[:, 0].copy() if rows.shape[1] == 1 else rows)


def _read_pt(path: Path) -> Any:
    return torch.load(path, weights_only=True, map_location="cpu")


_READERS = {".npy": _read_npy, ".csv": _read_csv, ".pt": _read_pt}
_HOLDS = {
    ".npy": "one array saved by numpy",
    ".csv": "rows of numbers",
    ".pt": "one tensor saved by torch",
}


def _range(x: Tensor) -> list[float]:
    """Smallest and largest over the rows that have a number; NaN if none has."""
    x = x.double()
    x = x[~x.isnan()]
    return [float(x.min()), float(x.max())] if len(x) else [math.nan, math.nan]
