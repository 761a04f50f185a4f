"""What every backend agrees on: the status of a row and the layout of its state."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """How a row was solved. The first three are exact answers, the next two are limits."""

    CONVERGED = 0
    """Mass and hardness hold to rounding."""
    UNIFORM = 1
    """``gamma = 0`` (or an infinite temperature): every eligible entry is ``k/n``."""
    HARD = 2
    """``gamma = 1`` (or temperature 0), or k is 0 or n: zeros and ones, lowest index first."""
    CONSTANT = 3
    """All scores are equal: the uniform mask, whatever gamma."""
    TIED = 4
    """Equal scores (or a fractional budget) allow no larger gamma: the limit of small t."""
    INFEASIBLE = 5
    """k exceeds the number of eligible entries: all of them are 1."""
    NONFINITE = 6
    """NaN or +inf among the scores, or an invalid k or gamma: the row is NaN."""
    STALLED = 7
    """No convergence: the mask is the last iterate. Please report the row."""


PIVOT, OFFSET, TEMPERATURE, MEAN_Z, MEAN_P = range(5)
"""Columns of a row's state: z = (r - pivot - offset)/temperature, and the q-weighted means.

A hard row keeps its threshold as pivot and, as offset, what the scores equal to it share."""
STATE_SIZE = 5

STATUS, PASSES, COLLECTIVES = range(3)
INFO_SIZE = 2
"""Rows in pieces have a third column: how many collectives their solution took."""
