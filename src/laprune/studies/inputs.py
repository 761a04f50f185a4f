"""One registry of score rows, the hard ones included, for tests and benchmarks alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """A family of rows: ``draw(generator, rows, n)`` in float64."""

    draw: Callable[[torch.Generator, int, int], Tensor]
    about: str


def _normal(g: torch.Generator, rows: int, n: int) -> Tensor:
    return torch.randn(rows, n, generator=g, dtype=torch.float64)


def _uniform(g: torch.Generator, rows: int, n: int) -> Tensor:
    return torch.rand(rows, n, generator=g, dtype=torch.float64)


def _laplace(g: torch.Generator, rows: int, n: int) -> Tensor:
    u = _uniform(g, rows, n) - 0.5
    return -u.sign() * torch.log1p(-2 * u.abs())


def _outlier(g: torch.Generator, rows: int, n: int) -> Tensor:
    r = _normal(g, rows, n)
    r[:, 0] = 1e8
    return r


def _cluster(g: torch.Generator, rows: int, n: int) -> Tensor:
    r = _normal(g, rows, n)
    return torch.where(_uniform(g, rows, n) < 0.5, 1e-9 * r, r)


REGISTRY: dict[str, Inputs] = {
    "gaussian": Inputs(_normal, "standard normal"),
    "laplace": Inputs(_laplace, "standard Laplace"),
    "cauchy": Inputs(
        lambda *a: torch.tan(math.pi * (_uniform(*a) - 0.5)), "no mean, huge outliers"
    ),
    "uniform": Inputs(_uniform, "between 0 and 1"),
    "lognormal": Inputs(lambda *a: torch.exp(3 * _normal(*a)), "exp(3 N): scales from 1e-4 to 1e4"),
    "bimodal": Inputs(
        lambda g, r, n: 0.1 * _normal(g, r, n) + 10 * (_uniform(g, r, n) < 0.3), "two narrow peaks"
    ),
    "relu": Inputs(lambda *a: _normal(*a).clamp(min=0), "half of the scores tied at zero"),
    "integers": Inputs(
        lambda *a: torch.floor(7 * _uniform(*a)) - 3, "seven values, ties everywhere"
    ),
    "near_ties": Inputs(
        lambda g, r, n: _normal(g, r, n).round() + 1e-9 * _normal(g, r, n), "integers, 1e-9 apart"
    ),
    "cluster": Inputs(_cluster, "half of the scores in a cluster 1e-9 wide"),
    "tiny": Inputs(lambda *a: 1e-30 * _normal(*a), "scale 1e-30"),
    "huge": Inputs(lambda *a: 1e30 * _normal(*a), "scale 1e30"),
    "offset": Inputs(lambda *a: 1e6 + _normal(*a), "a million spreads from zero"),
    "narrow": Inputs(lambda *a: 5 + 1e-8 * _normal(*a), "5 + 1e-8 N"),
    "outlier": Inputs(_outlier, "one score at 1e8"),
}


def draw(name: str, rows: int, n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows of a family, the same for the same seed on every machine.

    >>> draw("gaussian", 2, 3).shape
    torch.Size([2, 3])
    """
    return REGISTRY[name].draw(torch.Generator().manual_seed(seed), rows, n).to(dtype)


def budgets(rows: int, n: int, seed: int = 0) -> Tensor:
    """Budgets from 1 to n - 1, evenly on a log scale from both ends; one in five is fractional."""
    g = torch.Generator().manual_seed(seed + 1)
    u = torch.rand(4, rows, generator=g, dtype=torch.float64)
    k = torch.where(u[0] < 0.8, (n ** u[1]).round().clamp(1, n - 1), 0.05 + (n - 0.1) * u[1])
    return torch.where(u[2] < 0.3, n - k, k)


def hardnesses(rows: int, largest: float, seed: int = 0) -> Tensor:
    """Gammas from 1e-3 to ``largest``, evenly in log gamma or in log(1 - gamma)."""
    g = torch.Generator().manual_seed(seed + 2)
    u = torch.rand(2, rows, generator=g, dtype=torch.float64)
    soft = 10 ** (-3 * u[1])
    hard = 1 - 10 ** (math.log10(1 - largest) * u[1])
    return torch.where(u[0] < 0.5, soft, hard).clamp(1e-3, largest)
