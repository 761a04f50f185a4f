"""LaPrune in dictionary_learning: its top-k dictionary with a mask of hardness gamma.

``dict_class=LaPruneDictionary`` is all its ``TopKTrainer`` needs
(``pip install 'laprune[dictionary-learning]'``); :class:`LaPruneTrainer` also anneals gamma. What
is saved loads as a stock ``AutoEncoderTopK``.

>>> import torch
>>> ae = LaPruneDictionary(activation_dim=8, dict_size=32, k=4)
>>> (ae.eval().encode(torch.randn(5, 8)) != 0).sum(-1).max().item()
4
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from dictionary_learning.trainers.top_k import AutoEncoderTopK, TopKTrainer
from torch import Tensor

from laprune._arguments import check_mode
from laprune._gamma import HasGamma
from laprune.functional import Mode, gated_topk
from laprune.schedules import Schedule, constant


class LaPruneDictionary(AutoEncoderTopK, HasGamma):
    """``AutoEncoderTopK`` whose codes are soft while it learns, and as ever in evaluation.

    The package evaluates and logs without leaving training mode, but without gradients: codes are
    soft only where there are gradients, so that what it counts is what is deployed. The top-k
    values and indices beside the codes are always the hard ones.
    """

    gamma: Tensor
    encoder: Any
    b_dec: Any
    k: Any

    def __init__(
        self, activation_dim: int, dict_size: int, k: int, gamma: float = 0.9, mode: Mode = "soft"
    ) -> None:
        check_mode(mode)
        super().__init__(activation_dim, dict_size, k)
        self.mode = mode
        # Not saved, so that a stock dictionary can load what is.
        self._start(gamma, persistent=False)

    def encode(self, x: Tensor, return_topk: bool = False, use_threshold: bool = False) -> Any:
        if use_threshold or not (self.training and torch.is_grad_enabled()):
            return super().encode(x, return_topk, use_threshold)
        u = self.encoder(x - self.b_dec)
        rectified = u.relu()
        k = int(self.k)  # a buffer, which trainers may anneal
        codes = gated_topk(rectified, k, self.gamma, scores=u, mode=self.mode)
        if not return_topk:
            return codes
        top = rectified.topk(k, sorted=False, dim=-1)
        return codes, top.values, top.indices, rectified


class LaPruneTrainer(TopKTrainer):
    """``TopKTrainer`` for :class:`LaPruneDictionary`, with gamma as a function of the step.

    Args:
        schedule: as in :mod:`laprune.schedules`; 0.9 throughout if None.
        mode: ``"soft"`` or ``"ste"``.
        kwargs: those of ``TopKTrainer``.
    """

    def __init__(
        self, *, schedule: Schedule | None = None, mode: Mode = "soft", **kwargs: Any
    ) -> None:
        self.schedule = constant(0.9) if schedule is None else schedule
        super().__init__(dict_class=functools.partial(LaPruneDictionary, mode=mode), **kwargs)

    @property
    def config(self) -> dict[str, Any]:
        """As a ``TopKTrainer`` has it, whose dictionary is what loads; and how this one trained."""
        return {**super().config, "laprune": {"mode": self.ae.mode, "gamma": float(self.ae.gamma)}}

    def update(self, step: int, x: Tensor) -> float:
        self.ae.set_gamma(self.schedule(step))
        return super().update(step, x)


__all__ = ["LaPruneDictionary", "LaPruneTrainer"]
