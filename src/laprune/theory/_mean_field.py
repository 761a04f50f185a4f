"""The population fixed point, its near-binary limit, and the gamma that saturates as asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special

from ._arguments import Floats, require, unwrap, within
from ._population import Population, population

# Below this hardness the spread of the mask is lost in the rounding of its mean.
_LEAST_GAMMA = 1e-12
# Accuracy of log t and of b/t; b cannot be had more finely than its own rounding.
_XTOL = 1e-14
# Largest error in logit(gamma) that rounding explains; more means the quadrature has failed.
_HARDNESS_TOLERANCE = 1e-6
# The walk of `gamma_for_saturation`: its step in log t, and where the mask is as good as uniform.
_WALK = 0.5
_LEAST_WALK_GAMMA = 1e-9


class MeanField(NamedTuple):
    """The population solution at a budget fraction a and a hardness gamma."""

    barrier: Floats
    """b, the score whose mask value is 1/2."""
    temperature: Floats
    """t, the width of the transition, in the units of the scores."""
    frac_zero: Floats
    """Fraction of entries below eps."""
    frac_one: Floats
    """Fraction of entries above 1 - eps."""
    saturated: Floats
    """frac_zero + frac_one."""


def mean_field(
    a: ArrayLike, gamma: ArrayLike, distribution: Any = "norm", eps: ArrayLike = 1e-3
) -> MeanField:
    """What a mask of hardness gamma looks like when scores follow a known distribution.

    >>> from laprune.theory import mean_field
    >>> result = mean_field(a=0.5, gamma=0.9, eps=0.01)
    >>> round(result.temperature, 6), round(result.saturated, 6)
    (0.084287, 0.741603)

    The pair (b, t) is the unique solution of the two-moment fixed point

        E sigma((X - b)/t) = a        E sigma((X - b)/t)^2 = (a + (1 - a) gamma) a

    and the fractions follow from the distribution function F of the scores:

        frac_zero = F(b + t ln(2 eps))        frac_one = 1 - F(b - t ln(2 eps))

    `distribution` is a frozen `scipy.stats` continuous distribution, the name of one without
    shape parameters, or a `Density`; a in (0, 1), gamma in [0, 1] and eps in (0, 1/2) broadcast.
    At gamma = 1 (hard top-k) the barrier is the (1 - a)-quantile, t = 0 and all is saturated.
    At gamma = 0 (the uniform mask a) t is infinite, b is inf for a < 1/2, -inf for a > 1/2 and nan
    at 1/2, where any barrier does, and all is saturated or nothing is. Otherwise gamma >= 1e-12.
    """
    a, gamma = np.broadcast_arrays(within("(0, 1)", a=a), within("[0, 1]", gamma=gamma))
    eps = within("(0, 0.5)", eps=eps)
    interior = (gamma == 0) | (gamma >= _LEAST_GAMMA)
    require(interior, gamma, f"gamma must be 0 or at least {_LEAST_GAMMA}")
    scores = population(distribution)
    b, t = np.empty(a.shape), np.empty(a.shape)
    for i in np.ndindex(a.shape):
        b[i], t[i] = _fixed_point(scores, float(a[i]), float(gamma[i]))
    uniform = np.isinf(t)
    zero, one = _tails(scores, np.where(uniform, 0, b), np.where(uniform, 0, t), eps)
    zero, one = np.where(uniform, a < eps, zero), np.where(uniform, 1 - a < eps, one)
    fields = np.broadcast_arrays(b, t, zero, one, zero + one)
    return MeanField(*(unwrap(field.copy()) for field in fields))


def gamma_for_saturation(
    a: ArrayLike, target: ArrayLike, eps: ArrayLike = 1e-3, distribution: Any = "norm"
) -> Floats:
    """The least gamma from which on the mean-field fraction of near-binary entries is `target`.

    >>> from laprune.theory import gamma_for_saturation, mean_field
    >>> gamma = gamma_for_saturation(a=0.1, target=0.95, eps=0.01)
    >>> round(gamma, 6), round(mean_field(0.1, gamma, eps=0.01).saturated, 6)
    (0.946804, 0.95)

    Inverts s_eps(gamma) of `mean_field`, coming from gamma = 1, where s_eps = 1. An entry that is
    not saturated has p (1 - p) >= eps (1 - eps), and E p (1 - p) = a (1 - a)(1 - gamma), so

        1 - s_eps <= a (1 - a)(1 - gamma) / (eps (1 - eps))

    for every distribution: the search starts where this bound gives the target, and raises t by
    small factors until it is missed. s_eps need not be monotone: the uniform mask is itself
    saturated where a or 1 - a is below eps. The answer is 0 where no gamma misses the target.
    """
    a, target = within("(0, 1)", a=a), within("[0, 1]", target=target)
    a, target, eps = np.broadcast_arrays(a, target, within("(0, 0.5)", eps=eps))
    scores = population(distribution)
    gamma = np.empty(a.shape)
    for i in np.ndindex(a.shape):
        gamma[i] = _least_gamma(scores, float(a[i]), float(target[i]), float(eps[i]))
    return unwrap(gamma)


def near_binary_temperature(
    a: ArrayLike, gamma: ArrayLike, density_at_quantile: ArrayLike
) -> Floats:
    """The temperature to first order in 1 - gamma, from the density at the (1 - a)-quantile.

    >>> from laprune.theory import mean_field, near_binary_temperature
    >>> t = near_binary_temperature(a=0.5, gamma=0.999, density_at_quantile=0.3989422804)
    >>> round(t, 9), round(mean_field(a=0.5, gamma=0.999).temperature, 9)
    (0.000835543, 0.000835543)

    Law: if the density rho is continuous and positive at the quantile q of 1 - a, then

        t = (4/3) a (1 - a)(1 - gamma) / rho(q) + o(1 - gamma)        as gamma -> 1

    where 3/4 is the integral of sigma (1 - sigma).
    """
    a, gamma = within("(0, 1)", a=a), within("[0, 1]", gamma=gamma)
    density = within("(0, inf)", density_at_quantile=density_at_quantile)
    return unwrap(4 / 3 * a * (1 - a) * (1 - gamma) / density)


def near_binary_unsaturated(a: ArrayLike, gamma: ArrayLike, eps: ArrayLike = 1e-3) -> Floats:
    """The fraction of entries in [eps, 1 - eps] to first order in 1 - gamma, for any density.

    >>> from laprune.theory import mean_field, near_binary_unsaturated
    >>> unsaturated = near_binary_unsaturated(a=0.1, gamma=0.999)
    >>> round(unsaturated, 6), round(1 - mean_field(a=0.1, gamma=0.999).saturated, 6)
    (0.001492, 0.001492)

    Law: the density cancels between the width 2 t |ln 2 eps| of the transition and t, so

        1 - s_eps = (8/3) |ln 2 eps| a (1 - a)(1 - gamma) + o(1 - gamma)        as gamma -> 1
    """
    a, gamma = within("(0, 1)", a=a), within("[0, 1]", gamma=gamma)
    eps = within("(0, 0.5)", eps=eps)
    return unwrap(-8 / 3 * np.log(2 * eps) * a * (1 - a) * (1 - gamma))


def _fixed_point(scores: Population, a: float, gamma: float) -> tuple[float, float]:
    """(b, t) for one pair (a, gamma), with the limits at both ends."""
    if gamma == 1:
        return float(scores.isf(a)), 0.0
    if gamma == 0:
        return (np.nan if a == 0.5 else np.copysign(np.inf, 0.5 - a)), np.inf

    def residual(log_t: float) -> float:
        t = np.exp(log_t)
        return scores.moments(_barrier(scores, a, t), t).log_hardness - special.logit(gamma)

    log_t = _decreasing_root(residual, np.log(scores.scale))
    if not abs(residual(log_t)) < _HARDNESS_TOLERANCE:
        raise ArithmeticError(f"no temperature gives gamma = {gamma} at a = {a}")
    t = float(np.exp(log_t))
    return _barrier(scores, a, t), t


def _barrier(scores: Population, a: float, t: float) -> float:
    """The barrier of mass a at temperature t, sought from the quantile in units of t."""
    quantile = float(scores.isf(a))

    def residual(y: float) -> float:
        return scores.moments(quantile + t * y, t).log_odds - special.logit(a)

    return quantile + t * _decreasing_root(residual, 0.0, np.spacing(abs(quantile)) / t)


def _decreasing_root(
    function: Callable[[float], float], start: float, rounding: float = 0.0
) -> float:
    """The root of a decreasing function, bracketed by steps that double from `start`."""
    function = cache(function)  # the solver asks again for both ends of the bracket
    value = function(start)
    if value == 0:
        return start
    step = np.copysign(1.0, value)
    end = start + step
    while function(end) * value > 0:
        start, step = end, 2 * step
        end = start + step
    return float(optimize.brentq(function, start, end, xtol=max(_XTOL, rounding), rtol=_XTOL))


def _tails(scores: Population, b: Floats, t: Floats, eps: Floats) -> tuple[Any, Any]:
    """The masses on which p < eps and p > 1 - eps, at a finite temperature."""
    reach = t * np.log(2 * eps)
    # Far outside the scores a cdf may reach its limit through an exponential that overflows.
    with np.errstate(over="ignore"):
        return scores.cdf(b + reach), scores.sf(b - reach)


def _least_gamma(scores: Population, a: float, target: float, eps: float) -> float:
    """`gamma_for_saturation` for one triple: walk from the sharp side, then close in."""
    enough = 1 - (1 - target) * eps * (1 - eps) / (a * (1 - a))
    if target == 0 or enough < _LEAST_GAMMA:
        return 0.0
    if enough == 1:
        return 1.0

    def excess(log_t: float) -> float:
        t = np.exp(log_t)
        zero, one = _tails(scores, _barrier(scores, a, t), t, eps)
        return float(zero + one) - target

    def hardness(log_t: float) -> float:
        t = np.exp(log_t)
        return float(special.expit(scores.moments(_barrier(scores, a, t), t).log_hardness))

    log_t = np.log(_fixed_point(scores, a, enough)[1])
    while excess(log_t + _WALK) >= 0:
        log_t += _WALK
        if hardness(log_t) < _LEAST_WALK_GAMMA:
            return 0.0 if min(a, 1 - a) < eps else hardness(log_t)
    return hardness(optimize.brentq(excess, log_t, log_t + _WALK, xtol=_XTOL, rtol=_XTOL))
