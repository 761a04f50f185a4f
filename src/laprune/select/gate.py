"""A learned choice of k input features for any PyTorch model."""

from __future__ import annotations

import torch
from torch import Tensor

from laprune.functional import Mode, hard_topk
from laprune.nn import SoftTopK

INITIAL_SPREAD = 0.01
"""Scores start as this times N(0, 1): equal scores would have no gradient."""


class FeatureGate(torch.nn.Module):
    """Multiply the features, the last dimension of the input, by a learned mask of mass k.

    One score per feature is learned with the model behind the gate. While training the mask is the
    soft one of :func:`laprune.soft_topk`; in evaluation exactly k features pass, unchanged.

    >>> gate = FeatureGate(n_features=4, k=2, gamma=0.5)
    >>> model = torch.nn.Sequential(gate, torch.nn.Linear(4, 1))
    >>> with torch.no_grad():
    ...     _ = gate.scores.copy_(torch.tensor([3.0, 1.0, 2.0, 0.0]))
    >>> gate.mask().detach()
    tensor([0.9349, 0.2534, 0.7466, 0.0651])
    >>> gate.eval()(torch.tensor([[10.0, 20.0, 30.0, 40.0]]))
    tensor([[10.,  0., 30.,  0.]])
    >>> gate.support()
    tensor([ True, False,  True, False])

    Args:
        n_features: how many features there are.
        k: how many pass.
        gamma: the hardness while training; change it with a
            :class:`laprune.schedules.GammaScheduler` over the model. At 0 the mask is uniform and
            the scores have no gradient: only the model behind the gate learns.
        mode: ``"soft"`` or ``"ste"``, as in :func:`laprune.soft_topk`.
        eligible: True for each feature that may pass; all if None.
        initial_spread: scores start at this times N(0, 1), drawn from torch's generator.
    """

    eligible: Tensor | None

    def __init__(
        self,
        n_features: int,
        k: int,
        gamma: float = 0.9,
        *,
        mode: Mode = "soft",
        eligible: Tensor | None = None,
        initial_spread: float = INITIAL_SPREAD,
    ) -> None:
        super().__init__()
        allowed = n_features if eligible is None else int(eligible.sum())
        if not 1 <= k <= allowed:
            raise ValueError(f"k must lie in [1, {allowed}], the features that may pass, got {k}")
        if initial_spread <= 0:
            raise ValueError(f"initial_spread must be positive, got {initial_spread}")
        if eligible is not None and eligible.shape != (n_features,):
            raise ValueError(
                f"eligible must have shape ({n_features},), got {tuple(eligible.shape)}"
            )
        self.scores = torch.nn.Parameter(initial_spread * torch.randn(n_features))
        self.topk = SoftTopK(k, gamma, mode=mode)
        self.register_buffer("eligible", eligible)

    @property
    def k(self) -> int:
        return int(self.topk.k)

    def mask(self) -> Tensor:
        """The mask in force: soft while training, hard in evaluation."""
        return self.topk(self.scores, self.eligible)

    def support(self) -> Tensor:
        """True for exactly k features, those with the largest scores."""
        return hard_topk(self.scores, self.k, mask=self.eligible) > 0.5

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != len(self.scores):
            raise ValueError(
                f"x must have {len(self.scores)} features along its last dimension, "
                f"got shape {tuple(x.shape)}"
            )
        return x * self.mask().to(x.dtype)

    def extra_repr(self) -> str:
        return f"n_features={len(self.scores)}, k={self.k}"
