"""A score distribution as quadrature sees it, and the moments of the mask it meets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from scipy import optimize, stats

from ._arguments import Array

Function: TypeAlias = Callable[[Any], Any]

# A tail is left out once x rho(x) is this small; small budgets tilt the far tail up, so it is deep.
_TAIL = 1e-60
# Densities square their argument, which overflows beyond this.
_FARTHEST = 1e150
# Narrower than this about their median, scores are lost in their own rounding.
_LEAST_SPREAD = 1e-9
# Largest disagreement between the integral of the pdf and the cdf that is put down to rounding.
_CDF_TOLERANCE = 1e-7
# A panel is resolved when half its nodes give its mass to this relative accuracy. The
# nodes that are left are for the mask, which multiplies the density.
_PANEL_TOLERANCE = 1e-14
_MAX_PANELS = 5000
_MAX_DEPTH = 200

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)
_COARSE_NODES, _COARSE_WEIGHTS = np.polynomial.legendre.leggauss(10)
# Panel edges in z = (x - b)/t: exp(-z) is resolved on each, and below exp(-80) nothing counts.
_Z_EDGES = 8.0 * np.arange(-10, 11)


class Density(NamedTuple):
    """A score distribution given by its density and CDF, both vectorised over arrays.

    >>> from laprune.theory import Density, mean_field
    >>> ramp = Density(pdf=lambda x: 2 * x, cdf=lambda x: x**2, support=(0.0, 1.0))
    >>> round(mean_field(a=0.2, gamma=0.9, distribution=ramp).saturated, 6)
    0.734815
    """

    pdf: Function
    """The density rho(x), evaluated inside the support only."""
    cdf: Function
    """The distribution function F(x), evaluated inside the support only."""
    support: tuple[float, float] = (-np.inf, np.inf)
    """The interval outside which the density is zero."""


class Moments(NamedTuple):
    """What the two-moment fixed point asks of a barrier and a temperature."""

    log_odds: float
    """log E p - log E(1 - p): logit(a) on the budget."""
    log_hardness: float
    """log Var p - log E p(1 - p): logit(gamma) on the budget."""


@dataclass(frozen=True)
class Population:
    """A continuous distribution and the panels on which Gauss-Legendre resolves its density."""

    pdf: Function
    cdf: Function
    sf: Function
    isf: Function
    edges: Array
    scale: float

    def moments(self, b: float, t: float) -> Moments:
        """Moments of p = sigma((X - b)/t), from q = min(p, 1 - p) without cancellation."""
        x, offset, weight = self._quadrature(b, t)
        mass = weight * self.pdf(x)
        above = offset > 0
        q = np.exp(-np.abs(offset) / t) / 2
        mean = np.sum(mass * np.where(above, 1 - q, q))
        complement = np.sum(mass * np.where(above, q, 1 - q))
        deviation = np.where(above, complement - q, q - mean)
        C = np.sum(mass * deviation**2)
        V = np.sum(mass * q * (1 - q))
        return Moments(_log_ratio(mean, complement), _log_ratio(C, V))

    def _quadrature(self, b: float, t: float) -> tuple[Array, Array, Array]:
        """Nodes x, the same nodes as x - b, and weights.

        Both coordinates are carried from the edges on: x loses the transition where t is small
        against b, and x - b loses the scores where b is large against them.
        """
        low, high = self.edges[0], self.edges[-1]
        x = np.concatenate([self.edges, np.clip(b + t * _Z_EDGES, low, high)])
        offset = np.concatenate([self.edges - b, np.clip(t * _Z_EDGES, low - b, high - b)])
        order = np.lexsort((x, offset))
        x, offset = x[order], offset[order]
        finer = np.abs(x[:-1]) + np.abs(x[1:]) < np.abs(offset[:-1]) + np.abs(offset[1:])
        half = np.where(finer, np.diff(x), np.diff(offset)) / 2
        panels = np.flatnonzero(half > 0)
        half = half[panels, None]
        x_nodes, offset_nodes = (
            ((edge[panels] + edge[panels + 1])[:, None] / 2 + half * _NODES).ravel()
            for edge in (x, offset)
        )
        return x_nodes, offset_nodes, (half * _WEIGHTS).ravel()


def population(distribution: Any) -> Population:
    """The population of a `scipy.stats` name, a continuous distribution or a `Density`."""
    if isinstance(distribution, Density):
        return _from_density(distribution)
    frozen = _freeze(distribution)
    return _resolve(frozen.pdf, frozen.cdf, frozen.sf, frozen.isf, frozen.support())


def _freeze(distribution: Any) -> Any:
    """A frozen `scipy.stats` distribution from itself, from its family or from its name."""
    given = distribution
    if isinstance(distribution, str):
        distribution = getattr(stats, distribution, None)
    if isinstance(distribution, stats.rv_continuous) and distribution.numargs == 0:
        distribution = distribution()
    if isinstance(getattr(distribution, "dist", None), stats.rv_continuous):
        return distribution
    raise ValueError(
        "distribution must be a frozen scipy.stats continuous distribution, the name of one "
        f"without shape parameters, or a laprune.theory.Density, got {given!r}"
    )


def _from_density(density: Density) -> Population:
    low, high = density.support

    def cdf(x: Any) -> Any:
        inside = np.clip(x, low, high)
        return np.where(x <= low, 0.0, np.where(x >= high, 1.0, density.cdf(inside)))

    def sf(x: Any) -> Any:
        return 1 - cdf(x)

    def isf(a: float) -> float:
        # sinh spreads the search over every magnitude, more than the cdf may be prepared for.
        with np.errstate(all="ignore"):
            y = optimize.brentq(
                lambda y: float(sf(np.sinh(y))) - a, -700, 700, xtol=1e-300, maxiter=2000
            )
        return float(np.sinh(y))

    return _resolve(density.pdf, cdf, sf, isf, density.support)


def _resolve(
    pdf: Function, cdf: Function, sf: Function, isf: Function, support: tuple[float, float]
) -> Population:
    """The population with panels that start at the median and end where no mass is left."""
    centre = float(isf(0.5))
    scale = float(isf(0.25)) - float(isf(0.75))
    if scale < _LEAST_SPREAD * abs(centre):
        raise ValueError(
            f"distribution must have quartiles at least {_LEAST_SPREAD} of its median apart, "
            f"got {scale} around {centre}: shift the scores towards zero"
        )
    low = _ladder(pdf, cdf, centre, -scale, support[0])
    high = _ladder(pdf, sf, centre, scale, support[1])
    edges = _refine(pdf, cdf, np.array([*low[::-1], centre, *high]))
    return Population(pdf, cdf, sf, isf, edges, scale)


def _ladder(pdf: Function, tail: Function, centre: float, step: float, end: float) -> list[float]:
    """Edges outward from the centre, four times farther each, to the end of what has mass."""
    edges: list[float] = []
    while abs(step) < _FARTHEST:
        x = centre + step
        if abs(step) >= abs(end - centre):
            return [*edges, end]
        edges.append(x)
        if abs(step) * pdf(x) < _TAIL and tail(x) < _CDF_TOLERANCE:
            return edges
        step *= 4
    raise ValueError(f"distribution has a tail too heavy for float64: mass beyond {abs(step):.0e}")


def _refine(pdf: Function, cdf: Function, edges: Array) -> Array:
    """Halve panels until each resolves the density and agrees with the cdf."""
    left, right = edges[:-1], edges[1:]
    done: list[Array] = [edges]
    for _ in range(_MAX_DEPTH):
        open_ = ~_is_resolved(pdf, cdf, left, right)
        left, right = left[open_], right[open_]
        if left.size == 0:
            break
        middle = (left + right) / 2
        done.append(middle)
        if sum(map(len, done)) > _MAX_PANELS:
            raise ValueError(
                "distribution has a pdf too rough for quadrature, or not that of its cdf"
            )
        left, right = np.concatenate([left, middle]), np.concatenate([middle, right])
    edges = np.sort(np.concatenate(done))
    nodes, weights = _gauss(edges[:-1], edges[1:], _NODES, _WEIGHTS)
    total = float(np.sum(weights * pdf(nodes)))
    if not abs(total - 1) < _CDF_TOLERANCE:
        raise ValueError(f"distribution must have a pdf of integral 1, got {total}")
    return edges


def _is_resolved(pdf: Function, cdf: Function, left: Array, right: Array) -> Any:
    fine = _panel_mass(pdf, left, right, _NODES, _WEIGHTS)
    coarse = _panel_mass(pdf, left, right, _COARSE_NODES, _COARSE_WEIGHTS)
    # Rounding the nodes moves the density; a jump is cornered between neighbouring floats.
    rounding = 8 * np.spacing(np.maximum(np.abs(left), np.abs(right))) / (right - left)
    smooth = np.abs(fine - coarse) <= (_PANEL_TOLERANCE + rounding) * fine + _TAIL
    agrees = np.abs(fine - (cdf(right) - cdf(left))) < _CDF_TOLERANCE
    return smooth & agrees


def _panel_mass(pdf: Function, left: Array, right: Array, nodes: Array, weights: Array) -> Array:
    x, w = _gauss(left, right, nodes, weights)
    return np.asarray(np.sum(w * pdf(x), axis=1))


def _gauss(left: Array, right: Array, nodes: Array, weights: Array) -> tuple[Array, Array]:
    """Gauss-Legendre nodes and weights, one row per panel."""
    half = (right - left)[:, None] / 2
    return (left + right)[:, None] / 2 + half * nodes, half * weights


def _log_ratio(x: Any, y: Any) -> float:
    """log x - log y. Both underflow only far from a solution, where the sign is all that counts."""
    tiny = np.finfo(np.float64).tiny
    return float(np.log(max(x, tiny)) - np.log(max(y, tiny)))
