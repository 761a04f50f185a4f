"""How hardness grows with training: schedules are functions of the step, a scheduler applies one.

>>> anneal = linear(0.0, 0.9, steps=150)
>>> anneal(0), anneal(149), anneal(1000)
(0.0, 0.9, 0.9)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

Schedule = Callable[[int], float]


def linear(start: float, end: float, steps: int) -> Schedule:
    """From ``start`` at step 0 to ``end`` at step ``steps - 1``, and ``end`` from there on."""
    _check(start, end, steps)
    return functools.partial(_linear, start, end, steps)


def cosine(start: float, end: float, steps: int) -> Schedule:
    """As :func:`linear`, along half a cosine: slow at both ends.

    >>> [round(cosine(0.0, 1.0, steps=5)(i), 3) for i in range(5)]
    [0.0, 0.146, 0.5, 0.854, 1.0]
    """
    _check(start, end, steps)
    return functools.partial(_cosine, start, end, steps)


def constant(value: float) -> Schedule:
    """The same hardness at every step."""
    _check(value, value, 1)
    return functools.partial(_linear, value, value, 1)


# Functions of their own, so that what holds a schedule can be pickled.
def _linear(start: float, end: float, steps: int, step: int) -> float:
    return start + (end - start) * _progress(step, steps)


def _cosine(start: float, end: float, steps: int, step: int) -> float:
    return start + (end - start) * 0.5 * (1 - math.cos(math.pi * _progress(step, steps)))


def _progress(step: int, steps: int) -> float:
    return 1.0 if steps == 1 else min(max(step / (steps - 1), 0.0), 1.0)


def _check(start: float, end: float, steps: int) -> None:
    for name, value in (("start", start), ("end", end)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must lie in [0, 1], got {value}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")


class GammaScheduler:
    """Sets the hardness of every layer of a model that has one, step by step.

    >>> from laprune.nn import SoftTopK
    >>> layer = SoftTopK(k=2)
    >>> scheduler = GammaScheduler(layer, linear(0.0, 0.9, steps=4))
    >>> for epoch in range(3):
    ...     scheduler.step()
    >>> round(layer.gamma.item(), 6), scheduler.last_step
    (0.9, 3)

    Used like a learning-rate scheduler: step 0 is in force from construction on, and each
    :meth:`step` moves to the next. Any callable from step to gamma is a schedule; only the step is
    saved, so give the same schedule when you load.
    """

    def __init__(self, model: torch.nn.Module, schedule: Schedule, last_step: int = 0) -> None:
        self.layers = [
            m
            for m in model.modules()
            if callable(getattr(m, "set_gamma", None)) and getattr(m, "gamma", 0.0) is not None
        ]
        if not self.layers:
            raise ValueError(f"{type(model).__name__} has no layer with a gamma to schedule")
        self.schedule = schedule
        self.last_step = last_step
        self._apply()

    @property
    def gamma(self) -> float:
        """The hardness in force."""
        return self.schedule(self.last_step)

    def step(self) -> None:
        self.last_step += 1
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self.last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_step = state["last_step"]
        self._apply()

    def _apply(self) -> None:
        gamma = self.gamma
        for layer in self.layers:
            layer.set_gamma(gamma)  # type: ignore[operator]
