"""Is this installation in order: versions, who serves which device, and a test of each."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

import laprune
from laprune.backends import cpu, cuda, pick, reference, use
from laprune.studies.inputs import draw
from laprune.studies.lab import hardware

PACKAGES = (
    "laprune",
    "torch",
    "numpy",
    "triton",
    "scipy",
    "matplotlib",
    "scikit-learn",
    "lightning",
    "transformers",
)
FAMILIES = ("gaussian", "cauchy", "relu", "offset")
ROWS, N = 8, 257
BUDGETS, HARDNESSES = (1.0, N / 2), (0.05, 0.95)
"""Over the rows, from the first to the second."""
BOUNDS = {torch.float64: 1e-7, torch.float32: 1e-4}
"""How far masks and gradients may lie from the reference in float64, on the same scores."""
MASS_BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6}


def examine() -> dict[str, Any]:
    """Everything the doctor says; ``healthy`` is False if a test failed."""
    found = devices()
    return {
        "healthy": all(test["passed"] for device in found for test in device["tests"]),
        "python": platform.python_version(),
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
        "packages": versions(),
        "devices": found,
    }


def versions() -> dict[str, str | None]:
    """The version of every package that matters, None where it is not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def devices() -> list[dict[str, Any]]:
    """Each device: its name, its backend, why that one, and how the test went."""
    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        names.append("mps")
    return [_device(name) for name in names]


def _device(name: str) -> dict[str, Any]:
    backend = pick(torch.empty(1, 2, device=name))
    kinds = [torch.float32] if name == "mps" else list(BOUNDS)
    return {
        "device": name,
        "hardware": platform.machine() if name == "mps" else hardware(name),
        "backend": backend.__name__.rsplit(".", 1)[-1],
        "why": why(name),
        "tests": [self_test(name, dtype) for dtype in kinds],
    }


def why(device: str) -> str:
    """Why the backend of a device is the one it is."""
    backend = pick(torch.empty(1, 2, device=device))
    if backend is cpu:
        return f"the native unit {_native_file()} is built"
    if backend is cuda:
        return "Triton is installed and launches cooperative grids"
    if device == "cpu":
        return "the native unit is not built: install again where there is a C++ compiler"
    if device.startswith("cuda") and cuda.kernels() is None:
        return "no Triton with cooperative launches is installed; the reference serves every device"
    return "no backend of its own serves here; the reference serves every device"


def _native_file() -> str:
    library = cpu.library()
    return "" if library is None else library._name.replace("\\", "/").rsplit("/", 1)[-1]


def self_test(device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Masks and gradients of easy and hard rows: their mass, and the reference beside them."""
    worst_mass = worst_mask = worst_gradient = 0.0
    unsolved, error = 0, None
    try:
        for family in FAMILIES:
            r = draw(family, ROWS, N, dtype=dtype).to(device)
            k, gamma = (
                torch.linspace(*x, ROWS, dtype=torch.float64) for x in (BUDGETS, HARDNESSES)
            )
            mine = _answer(r, k, gamma)
            with use(reference):
                exact = _answer(r.cpu().double(), k, gamma)
            unsolved += int((mine[2] == laprune.Status.STALLED).sum())
            worst_mass = max(worst_mass, float(((mine[0].sum(-1) - k) / k).abs().max()))
            worst_mask = max(worst_mask, _apart(mine[0], exact[0]))
            worst_gradient = max(worst_gradient, _apart(mine[1], exact[1]))
    except Exception as problem:  # a doctor reports, whatever it is
        error = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
    bound = BOUNDS[dtype]
    passed = error is None and unsolved == 0 and worst_mass <= MASS_BOUNDS[dtype]
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "passed": passed and worst_mask <= bound and worst_gradient <= bound,
        "mass_error": worst_mass,
        "mask_error": worst_mask,
        "gradient_error": worst_gradient,
        "unsolved": unsolved,
        "error": error,
    }


def _answer(r: Tensor, k: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mask, gradient of a fixed functional of it, and status; on the host, in float64."""
    r = r.detach().requires_grad_()
    s = laprune.solve(r, k.to(r.device), gamma.to(r.device))
    weight = torch.linspace(-1, 1, N, dtype=r.dtype, device=r.device)
    (gradient,) = torch.autograd.grad((s.mask * weight).sum(), r)
    scale = gradient.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(r.dtype).tiny)
    return s.mask.detach().double().cpu(), (gradient / scale).double().cpu(), s.status.cpu()


def _apart(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max())
