"""How sparse a mask must be, whatever the scores: from its two moments alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._arguments import Array, Floats, require, unwrap, within


def sparsity_floor(a: ArrayLike, gamma: ArrayLike, eps: ArrayLike) -> Floats:
    """The least fraction of entries below eps that any mask of mass a and hardness gamma has.

    >>> from laprune.theory import sparsity_floor
    >>> round(sparsity_floor(a=0.1, gamma=0.9, eps=0.05), 12)
    0.72

    Theorem (worst-case sparsity floor). Let f: [0, 1] -> [0, 1] have mean a and second moment
    beta a, beta = a + (1 - a) gamma. Then

        |{f < eps}| >= (1 - a) max(0, 1 - a (1 - gamma)/eps)             for 0 < eps <= beta
        |{f < eps}| >= (eps - a)^2 / ((eps - a)^2 + a (1 - a) gamma)     for beta < eps <= 1

    The second line is Cantelli's inequality. Both are tight: `extremal_profile` attains them. The
    floor grows with eps. It grows with gamma while eps <= beta and falls before: where a < eps
    the uniform mask (gamma = 0) lies below eps everywhere, and at gamma = 1 the floor is 1 - a.
    """
    a, gamma, eps = _mask_arguments(a, gamma, eps)
    direct = (1 - a) * np.maximum(0.0, 1 - a * (1 - gamma) / eps)
    cantelli = _cantelli(a, gamma, np.maximum(eps, a))
    return unwrap(np.where(_beyond_beta(a, gamma, eps), cantelli, direct))


def extremal_profile(a: float, gamma: float, eps: float) -> tuple[Array, Array]:
    """Levels and masses of a step function that attains `sparsity_floor(a, gamma, eps)`.

    >>> from laprune.theory import extremal_profile
    >>> levels, masses = extremal_profile(a=0.1, gamma=0.9, eps=0.05)
    >>> levels.tolist(), masses.round(12).tolist()
    ([0.0, 0.05, 1.0], [0.72, 0.189473684211, 0.090526315789])

    The masses sum to 1 and the moments are a and beta a. With c = a (1 - gamma) the levels are

        c, 1         for 0 < eps <= c        nothing lies below eps
        0, eps, 1    for c < eps <= beta     what lies below eps is zero
        u, eps       for beta < eps <= 1     u = a - a (1 - a) gamma / (eps - a)
    """
    a, gamma, eps = (value.item() for value in _mask_arguments(a, gamma, eps))
    c = a * (1 - gamma)
    if eps <= c:
        top = a * gamma / (1 - c)
        return np.array([c, 1.0]), np.array([1 - top, top])
    if _beyond_beta(a, gamma, eps):
        below = float(_cantelli(a, gamma, eps))
        u = a - a * (1 - a) * gamma / (eps - a)
        return np.array([u, eps]), np.array([below, 1 - below])
    # The share of the mass a that sits at eps; at eps = 1 the levels eps and 1 are one.
    share = (1 - a) * (1 - gamma) / (1 - eps) if eps < 1 else 0.0
    bottom = (1 - a) * (1 - c / eps)
    return np.array([0.0, eps, 1.0]), np.array([bottom, a * share / eps, a * (1 - share)])


def gamma_for_floor(a: ArrayLike, target: ArrayLike, eps: ArrayLike) -> Floats:
    """The least gamma from which on every mask has at least the fraction `target` below eps.

    >>> from laprune.theory import gamma_for_floor, sparsity_floor
    >>> gamma = gamma_for_floor(a=0.1, target=0.72, eps=0.05)
    >>> round(gamma, 12), round(sparsity_floor(0.1, gamma, 0.05), 12)
    (0.9, 0.72)

    Inverts the growing branch of the floor, gamma = 1 - (eps/a)(1 - target/(1 - a)). The answer
    is 0 where the floor never falls below the target. At gamma = 1 the floor is 1 - a, so a
    larger target is refused.
    """
    a, eps = within("(0, 1)", a=a), within("(0, 1]", eps=eps)
    target = within("[0, 1)", target=target)
    # In float64 1 - 0.9 < 0.1: a target of 1 - a may exceed it by a rounding.
    attainable = target <= 1 - a + np.finfo(np.float64).eps
    require(attainable, target, "target must be in [0, 1 - a]")
    # Over gamma the floor is least where beta = eps, or zero if a >= eps.
    least = np.maximum(0.0, eps - a) / eps
    gamma = 1 - eps / a * np.maximum(0.0, 1 - target / (1 - a))
    return unwrap(np.where(target <= least, 0.0, gamma))


def _mask_arguments(a: ArrayLike, gamma: ArrayLike, eps: ArrayLike) -> tuple[Array, Array, Array]:
    return within("(0, 1)", a=a), within("[0, 1]", gamma=gamma), within("(0, 1]", eps=eps)


def _beyond_beta(a: Floats, gamma: Floats, eps: Floats) -> np.bool_ | NDArray[np.bool_]:
    """eps > beta, said through complements, which keep their digits as gamma -> 1."""
    return np.less(1 - np.asarray(eps), (1 - np.asarray(a)) * (1 - np.asarray(gamma)))


def _cantelli(a: Floats, gamma: Floats, eps: Floats) -> Array:
    """Cantelli's bound on the mass below eps >= a; 0 at eps = a, where it says nothing."""
    gap = np.square(np.asarray(eps) - a)
    total = np.asarray(gap + a * (1 - a) * gamma)
    return np.divide(gap, total, out=np.zeros_like(total), where=total > 0)
