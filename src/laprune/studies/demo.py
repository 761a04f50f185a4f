"""The main job: ten million scores, solved, differentiated, checked and timed on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from rich.table import Table

import laprune
from laprune.baselines.lapsum import lapsum_sort
from laprune.baselines.paper import paper_topk

from . import hardness_path
from .lab import Options, console, hardware
from .timing import median_ms

CHECKS = {"mass": 1e-6, "hardness": 1e-3}  # what a float32 mask must hold


def run(n: int, gamma: float, device: str, picture: Path) -> bool:
    """Print what was measured; True if the mask is right."""
    k = n // 16
    console.print(f"{n:,} float32 scores, k = {k:,}, gamma = {gamma} on {hardware(device)}")
    r = torch.randn(n, device=device, requires_grad=True)
    g = torch.randn(n, device=device)

    d = laprune.diagnostics(laprune.soft_topk(r.detach(), k, gamma))
    errors = {
        "mass": abs(d.mass.item() / k - 1),
        "hardness": abs((1 - d.gamma.item()) / (1 - gamma) - 1),
    }
    right = all(errors[name] <= bound for name, bound in CHECKS.items())
    console.print(f"mass  {d.mass.item():.3f}   off by {errors['mass']:.1e}")
    console.print(f"gamma {d.gamma.item():.9f}   1 - gamma off by {errors['hardness']:.1e}")
    console.print("[green]both hold[/green]" if right else f"[red]out of bounds {CHECKS}[/red]")

    def both(f: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(f(r), r, g)

    t = float(laprune.solve(r.detach(), k, gamma).temperature)
    contenders = {
        "laprune, forward + backward": (both(lambda x: laprune.soft_topk(x, k, gamma)), 5),
        "torch.topk, forward only": (lambda: torch.topk(r.detach(), k), 3),
        "LapSum by sorting, forward + backward": (both(lambda x: lapsum_sort(x, k, t)), 1),
        "the paper's solver, forward + backward": (both(lambda x: paper_topk(x, k, gamma)), 1),
    }
    if busy():
        console.print("[yellow]others keep this machine busy: the times below say little[/yellow]")
    table = Table("what", "ms", "times laprune")
    times: dict[str, float] = {}
    with console.status("timing") as status:
        for name, (call, repeats) in contenders.items():
            status.update(f"timing {name}")
            times[name] = median_ms(call, device, repeats, warm_ups=int(repeats > 1))
    ours = next(iter(times.values()))
    for name, ms in times.items():
        table.add_row(name, f"{ms:,.1f}", f"{ms / ours:,.1f}")
    console.print(table)

    _draw(picture)
    return right


def busy() -> bool:
    """Whether more was running in the last minute than there are cores."""
    known = hasattr(os, "getloadavg")  # not on every system
    return known and os.getloadavg()[0] > (os.cpu_count() or 1)


def _draw(folder: Path) -> None:
    """The masks of growing hardness, where there is something to draw with."""
    options = Options(device="cpu")
    records = [
        {"setting": s, "result": hardness_path.measure(s, options)}
        for s in hardness_path.settings(options)
    ]
    try:
        console.print("picture:", *(str(p) for p in hardness_path.draw(records, folder)))
    except ModuleNotFoundError as error:
        console.print(f"no picture: that needs {error.name}")
