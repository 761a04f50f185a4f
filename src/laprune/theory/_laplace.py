"""Mask moments in closed form when the scores follow Laplace(0, 1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ._arguments import Array, Floats, unwrap, within


def laplace_moments(b: ArrayLike, t: ArrayLike) -> tuple[Floats, Floats]:
    """M1 = E p and M2 = E p^2 of the mask p = sigma((X - b)/t), X ~ Laplace(0, 1).

    >>> from laprune.theory import laplace_moments
    >>> M1, M2 = laplace_moments(b=0.5, t=1.0)
    >>> round(M1, 12), round(M2, 12)
    (0.37908166232, 0.222064488116)

    For b >= 0 direct integration gives

        M1 = (exp(-b) - t^2 exp(-b/t)) / (2 (1 - t^2))
        M2 = (4 + t) exp(-b) / (2 (1 + t)(4 - t^2)) - t^2 exp(-2b/t) / (4 (4 - t^2))

    and symmetry the rest: M1(b) = 1 - M1(-b), M2(b) = 1 - 2 M1(-b) + M2(-b). The poles at t = 1
    and t = 2 cancel. Divided out, with D(x, y) = (exp(-x) - exp(-y)) / (y - x), only positive
    terms are left and every t > 0 is computed to rounding:

        M1 = exp(-b)/2 + b t D(b, b/t) / (2 (1 + t))
        M2 = (4 + 3t + t^2) exp(-b) / (4 (1 + t)(2 + t)) + b t D(b, 2b/t) / (4 (2 + t))
    """
    barrier, t = within("(-inf, inf)", b=b), within("(0, inf)", t=t)
    b = np.abs(barrier)
    M1 = np.exp(-b) / 2 + b * t * _divided_difference(b, b / t) / (2 * (1 + t))
    M2 = np.exp(-b) * (4 + t * (3 + t)) / (4 * (1 + t) * (2 + t))
    M2 = M2 + b * t * _divided_difference(b, 2 * b / t) / (4 * (2 + t))
    flipped = barrier < 0
    return unwrap(np.where(flipped, 1 - M1, M1)), unwrap(np.where(flipped, 1 - 2 * M1 + M2, M2))


def _divided_difference(x: Array, y: Array) -> Array:
    """D(x, y) = (exp(-x) - exp(-y)) / (y - x), continued to x = y."""
    gap = np.abs(y - x)
    slope = np.divide(-np.expm1(-gap), gap, out=np.ones_like(gap), where=gap > 0)
    return np.exp(-np.minimum(x, y)) * slope
