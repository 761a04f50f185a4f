"""Losses that train a classifier for the true class to be among the k largest scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ._arguments import check_floating
from ._gamma import HasGamma
from .backends import Status
from .functional import Number, _solution, lapsum_topk, soft_topk

Operator = Callable[[Tensor, float], Tensor]
"""Scores and k to a mask of the scores' shape, rows along the last dimension."""
Reduction = Literal["none", "mean", "sum"]


def topk_cross_entropy(
    scores: Tensor,
    target: Tensor,
    k: float,
    gamma: Number | None = None,
    *,
    temperature: Number | None = None,
    min_temperature: float = 0.0,
    detach_temperature: bool = False,
    operator: Operator | None = None,
    floor: float | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """``-log p_y``: p the soft top-k mask of the scores, y the true class.

    It falls to zero as the true class moves safely into the top k, whatever its rank there: it
    trains for top-k accuracy and leaves the order of the first k open. A uniform mask costs
    ``log(n/k)``.

    >>> scores = torch.tensor([[3.0, 1.0, 2.0, 0.0], [3.0, 1.0, 2.0, 0.0]])
    >>> topk_cross_entropy(scores, torch.tensor([2, 3]), k=2, gamma=0.8, reduction="none")
    tensor([0.1126, 5.3315])

    The hardness is one of gamma and temperature, or the operator's own. With a gamma the loss does
    not change when the scores are scaled: it cannot be lowered by growing them.

    Args:
        scores: ``(..., classes)``; differentiable.
        target: ``(...)``, the index of the true class, int64.
        k: how many guesses are allowed.
        gamma: hardness of the mask, as in :func:`laprune.soft_topk`.
        temperature: or its temperature, as in :func:`laprune.lapsum_topk`.
        min_temperature: with gamma: rows whose temperature would be lower take this one, so that
            masks harden no faster than the scores grow apart. Near the hard end training from
            scratch needs it.
        detach_temperature: with gamma: the gradient takes each row's temperature as given. Its
            absolute values then sum to at most 2/t; through the temperature they have no such
            bound, and grow without one as gamma nears 1.
        operator: or any other mask, ``(scores, k) -> mask``; those of :mod:`laprune.baselines` fit.
        floor: None for the logarithm itself, computed from barrier and temperature where those
            exist, so that it is finite and has its gradient however small p_y is. A number for
            ``-log((1 - 2 floor) p_y + floor)`` from the mask, as published comparisons have it:
            rows with p_y far below the floor then lose their gradient; at 0 they are infinite, and
            their gradient NaN, once p_y underflows.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Returns:
        The loss in the scores' type, float32 for half types. Where a row has no finite
        temperature (gamma 0 or 1, constant or tied scores) its gradient is zero.
    """
    check_floating(scores, "scores")
    _check_target(scores, target)
    _check_hardness(gamma, temperature, min_temperature, detach_temperature, operator)
    _check_form(floor, reduction)
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    if gamma is not None and (min_temperature > 0 or detach_temperature):
        temperature = _own_temperature(scores, k, gamma, min_temperature, detach_temperature)
        gamma = None
    if operator is not None:
        log_p = _log(_entry(operator(scores, k), target), floor)
    elif floor is None:
        log_p = _log_entry(scores, target, k, gamma, temperature)
    else:
        log_p = _log(_entry(_mask(scores, k, gamma, temperature), target), floor)
    loss = -log_p.to(scores.dtype)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


class TopKCrossEntropy(HasGamma):
    """:func:`topk_cross_entropy` as a module; gamma is a buffer that a scheduler can move.

    >>> loss = TopKCrossEntropy(k=2, gamma=0.8)
    >>> loss(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([2]))
    tensor(0.1126)

    Arguments as in the function. :class:`laprune.schedules.GammaScheduler` finds it in a model, or
    takes it as the model.
    """

    def __init__(
        self,
        k: float,
        gamma: float | None = None,
        *,
        temperature: float | None = None,
        min_temperature: float = 0.0,
        detach_temperature: bool = False,
        operator: Operator | None = None,
        floor: float | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        _check_hardness(gamma, temperature, min_temperature, detach_temperature, operator)
        _check_form(floor, reduction)
        self.k, self.temperature = k, temperature
        self.min_temperature, self.detach_temperature = min_temperature, detach_temperature
        self.operator, self.floor, self.reduction = operator, floor, reduction
        self._start(gamma)

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return topk_cross_entropy(
            scores,
            target,
            self.k,
            self.gamma,
            temperature=self.temperature,
            min_temperature=self.min_temperature,
            detach_temperature=self.detach_temperature,
            operator=self.operator,
            floor=self.floor,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        shown = {"k": self.k, "temperature": self.temperature, "floor": self.floor}
        parts = [f"{name}={x:g}" for name, x in shown.items() if x is not None]
        return ", ".join(parts if self.gamma is None else [*parts, f"gamma={self._shown_gamma()}"])


def _entry(x: Tensor, target: Tensor) -> Tensor:
    return x.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def _log(p: Tensor, floor: float | None) -> Tensor:
    """log p; without a floor given, that of the smallest normal number."""
    small = torch.finfo(p.dtype).tiny if floor is None else floor
    return torch.log((1 - 2 * small) * p + small)


def _log_entry(
    scores: Tensor,
    target: Tensor,
    k: float,
    gamma: Number | None,
    temperature: Number | None,
) -> Tensor:
    """log p_y = z - log 2 for z <= 0 and log(1 - exp(-z)/2) above, z = (r_y - b)/t."""
    if gamma is not None:
        s = _solution(scores, k, gamma, "gamma")
    else:
        assert temperature is not None
        s = _solution(scores, k, temperature, "temperature")
    # As plain ints: dynamo takes a comparison with an enum for False.
    converged, stalled = int(Status.CONVERGED), int(Status.STALLED)
    smooth = (s.status == converged) | (s.status == stalled)
    b, t = torch.where(smooth, s.barrier, 0.0), torch.where(smooth, s.temperature, 1.0)
    z = (_entry(scores, target).to(b.dtype) - b) / t
    below, above = z.clamp(max=0), z.clamp(min=0)
    log_p = torch.where(z <= 0, below - math.log(2), torch.log1p(-0.5 * torch.exp(-above)))
    # Rows without a finite temperature: the mask is a constant, or a limit, and says it all.
    limit = torch.where(smooth, 1.0, _entry(s.mask, target))
    return torch.where(smooth, log_p, _log(limit, None).to(b.dtype))


def _mask(scores: Tensor, k: float, gamma: Number | None, temperature: Number | None) -> Tensor:
    if gamma is not None:
        return soft_topk(scores, k, gamma)
    assert temperature is not None
    return lapsum_topk(scores, k, temperature)


def _own_temperature(
    scores: Tensor, k: float, gamma: Number, least: float, detached: bool
) -> Tensor:
    """The temperature of each row's gamma, or `least` where that is larger."""
    t = _solution(scores.detach() if detached else scores, k, gamma, "gamma").temperature
    # A NaN row stays NaN through its scores.
    return torch.where(t > least, t, least)


def _check_target(scores: Tensor, target: Tensor) -> None:
    if not isinstance(target, Tensor) or target.dtype != torch.int64:
        given = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise TypeError(f"target must be an int64 tensor of class indices, got {given}")
    if scores.dim() == 0 or target.shape != scores.shape[:-1]:
        raise ValueError(
            f"target must have the shape of scores {tuple(scores.shape)} without the last "
            f"dimension, got {tuple(target.shape)}"
        )


def _check_hardness(
    gamma: object,
    temperature: object,
    min_temperature: float,
    detach_temperature: bool,
    operator: object,
) -> None:
    choices = {"gamma": gamma, "temperature": temperature, "operator": operator}
    given = [name for name, x in choices.items() if x is not None]
    if len(given) != 1:
        raise ValueError(
            f"give one of gamma, temperature and operator, got {', '.join(given) or 'none'}"
        )
    if not 0 <= min_temperature < math.inf:
        raise ValueError(f"min_temperature must be finite and at least 0, got {min_temperature}")
    if gamma is None and (min_temperature > 0 or detach_temperature):
        name = "min_temperature" if min_temperature > 0 else "detach_temperature"
        raise ValueError(f"{name} needs a gamma")


def _check_form(floor: float | None, reduction: str) -> None:
    if floor is not None and not 0 <= floor < 0.5:
        raise ValueError(f"floor must lie in [0, 0.5), got {floor}")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}")
