"""Arguments in, results out: ranges that are checked by name, and scalars that stay scalars."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array: TypeAlias = NDArray[np.float64]
Floats: TypeAlias = float | Array


def within(interval: str, **arguments: ArrayLike) -> Array:
    """The one keyword argument as a float64 array, or a ValueError that names it.

    >>> within("(0, 1]", eps=0.5)
    array(0.5)
    >>> within("(0, 1]", eps=[0.5, 0.0])
    Traceback (most recent call last):
        ...
    ValueError: eps must be in (0, 1], got 0.0
    """
    ((name, given),) = arguments.items()
    value = np.asarray(given, dtype=np.float64)
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value > low if interval[0] == "(" else value >= low
    below = value < high if interval[-1] == ")" else value <= high
    require(above & below, value, f"{name} must be in {interval}")
    return value


def require(valid: NDArray[np.bool_], value: Array, expected: str) -> None:
    """Raise a ValueError that says what was expected and the first value that is not valid."""
    if not np.all(valid):
        valid, value = np.broadcast_arrays(valid, value)
        raise ValueError(f"{expected}, got {value[~valid].flat[0]}")


def unwrap(result: Array) -> Floats:
    """A Python float where all arguments were scalars, the array otherwise."""
    return float(result) if result.ndim == 0 else result
